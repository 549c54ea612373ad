"""Classes and functions that parse and render saved pictures without a browser, to check their labels and pixels."""

from __future__ import annotations

import io
import re
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import resvg_py
from PIL import Image

SVG = "{http://www.w3.org/2000/svg}"
ZOOM = 2  # pixels per unit of the SVG
Colour = tuple[int, int, int]


class Label(NamedTuple):
    """A line of text in a picture, or a part of a line; a part has the position of the whole line."""

    text: str
    x: float
    y: float
    colour: str
    anchor: str
    bold: bool


def as_array(content: bytes) -> npt.NDArray[np.int16]:
    """Return the pixels `[rows, columns, 3]` of a PNG."""
    with Image.open(io.BytesIO(content)) as image:
        return np.asarray(image.convert("RGB"), dtype=np.int16)


def as_colour(text: str) -> Colour:
    """Return the components of a colour such as `#b34a00`."""
    red, green, blue = bytes.fromhex(text.removeprefix("#"))
    return red, green, blue


def in_pixels(length: str) -> float:
    """Return a length in pixels; for a length in em, return 0.

    Lengths in em are used only for the vertical alignment of text, which the tests ignore.
    """
    return 0 if length.endswith("em") else float(length)


class Picture:
    """A saved SVG, parsed and rendered by resvg."""

    def __init__(self, content: bytes) -> None:
        self.text = content.decode("utf-8")
        self.root = ElementTree.fromstring(self.text)
        self.left, self.top, self.width, self.height = map(float, self.root.get("viewBox", "").split())
        self.pixels = as_array(bytes(resvg_py.svg_to_bytes(svg_string=self.text, zoom=ZOOM)))
        self.labels = list(self._labels(self.root, 0, 0, {}))

    def _labels(self, element: Any, x: float, y: float, inherited: dict[str, str]) -> Any:
        """Yield the labels in an element at the offset (x, y)."""
        attributes = inherited | dict(element.attrib)
        moved = re.search(r"translate\(([-\d.e]+)[ ,]*([-\d.e]*)", element.get("transform", ""))
        if moved:
            x, y = x + float(moved[1]), y + float(moved[2] or 0)
        if element.tag == f"{SVG}text":
            x, y = x + in_pixels(element.get("x", "0")), y + in_pixels(element.get("y", "0"))
            parts = [element] if element.text else list(element)
            for part in parts:  # all parts have the position of the line
                looks = attributes | dict(part.attrib)
                yield Label(
                    "".join(part.itertext()).replace("\u2212", "-").strip(),
                    x,
                    y,
                    looks.get("fill", ""),
                    looks.get("text-anchor", "start"),
                    int(looks.get("font-weight", 400)) >= 600,
                )
            return
        for child in element:
            yield from self._labels(child, x, y, attributes)

    def elements(self, name: str) -> list[Any]:
        """Return all elements with this tag."""
        return list(self.root.iter(f"{SVG}{name}"))

    def distance(self, x: float, y: float, colour: Colour, reach: float = 1.5) -> float:
        """Return the smallest distance (maximum over components) between a colour and the pixels near a position."""
        row, column = ZOOM * (y - self.top), ZOOM * (x - self.left)
        size = round(ZOOM * reach)
        rows = slice(max(0, round(row) - size), round(row) + size + 1)
        columns = slice(max(0, round(column) - size), round(column) + size + 1)
        return float(np.abs(self.pixels[rows, columns] - np.array(colour)).max(axis=-1).min())


def blurred(pixels: npt.NDArray[np.int16], size: int = 8) -> npt.NDArray[np.int16]:
    """Return the mean colour of each square of pixels, because programs smooth the edges of letters differently."""
    height, width = (length - length % size for length in pixels.shape[:2])
    squares = Image.fromarray(pixels[:height, :width].astype(np.uint8)).reduce(size)
    return np.asarray(squares, dtype=np.int16)


def difference(one: npt.NDArray[np.int16], other: npt.NDArray[np.int16]) -> float:
    """Return the share of squares in which two pictures differ, allowing a vertical shift of up to one pixel.

    Each pixel of the screen is drawn `ZOOM` rows high.
    """
    assert np.abs(np.subtract(one.shape, other.shape)).max() <= ZOOM, (one.shape, other.shape)
    height, width = np.minimum(one.shape, other.shape)[:2]
    shares = []
    for shift in range(-ZOOM, ZOOM + 1):
        up, down = max(0, -shift), max(0, shift)
        lower, upper = one[down : height - up, :width], other[up : height - down, :width]
        distances = np.abs(blurred(lower) - blurred(upper)).max(axis=-1)
        shares.append((distances > 40).mean())  # distances are at most 255; smoothed edges cause small distances
    return float(min(shares))

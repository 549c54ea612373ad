"""One text's way through the model as a GIF: its tokens glide from capture point to capture point on a map."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from attnmix.core.points import Site
from attnmix.figures.labels import POINT_MARKS, POINTS_PER_SECOND, layer_label, site_label
from attnmix.figures.maps import Places, example_text
from attnmix.figures.style import TEXT_CONTRAST, darken_for_contrast, place_labels, printable, set_limits
from attnmix.figures.tokens import CapturedTexts

SIZE, DPI = (6.4, 4.8), 100  # inches, pixels per inch
MAP, TIMELINE = (0.02, 0.1, 0.96, 0.82), (0.11, 0.05, 0.86, 0.02)  # left, bottom, width, height
WORDS, WORD_SIZE = 12, 8
MOVES = 3  # frames between two capture points, which take half of a point's time
POINT_TIME = round(1000 / POINTS_PER_SECOND)  # milliseconds
MOVE_TIME = max(20, 10 * round(50 / POINTS_PER_SECOND / MOVES))  # milliseconds, in hundredths of a second
REST_TIME = max(20, POINT_TIME - MOVES * MOVE_TIME)
LAST_TIME = 4 * POINT_TIME
MAX_TICKS = 13


class Stop(NamedTuple):
    """Where the tokens are at one capture point."""

    number: int
    site: Site
    xy: Places
    labels: dict[int, str]
    """Labels by token."""
    centres: Places
    """Centres of the labels `[labels, 2]`."""


def write_animation(table: pd.DataFrame, captured: CapturedTexts, path: Path) -> None:
    """Write the GIF of one captured text, from a map of one plane; call under `paper_style`."""
    frames = [*Scene(table, captured).frames()]
    durations = [*(MOVE_TIME if moving else REST_TIME for _, moving in frames[:-1]), LAST_TIME]
    palette = Image.fromarray(np.concatenate([pixels for pixels, moving in frames if not moving]))
    palette = palette.quantize(128, Image.Quantize.MAXCOVERAGE)
    images = [Image.fromarray(pixels).quantize(palette=palette, dither=Image.Dither.NONE) for pixels, _ in frames]
    path.parent.mkdir(parents=True, exist_ok=True)
    images[0].save(path, save_all=True, append_images=images[1:], duration=durations, loop=0)


class Scene:
    """A figure of the whole map, drawn once, and what moves on it."""

    def __init__(self, table: pd.DataFrame, captured: CapturedTexts) -> None:
        text, self.encoder = example_text(table, captured, WORDS), captured.encoder
        figure = Figure(figsize=SIZE, dpi=DPI)
        self.canvas = FigureCanvasAgg(figure)
        axes = figure.add_axes(MAP, frame_on=False, xticks=[], yticks=[])
        everywhere = np.concatenate([*text.places.values()])
        set_limits(axes, everywhere)
        axes.scatter(everywhere[:, 0], everywhere[:, 1], s=3, color="0.88", linewidths=0)
        timeline = self._draw_timeline(figure, [*text.places])
        figure.text(0.98, 0.985, printable(text.document), va="top", ha="right", fontsize=9, color="0.35")
        self.stops = []
        for number, (site, xy) in enumerate(text.places.items()):
            labels = text.labels[captured.reading(site)]
            self.stops.append(Stop(number, site, xy, labels, place_labels(axes, xy, labels, WORD_SIZE)))
        self.dots = axes.scatter([], [], s=12, linewidths=0, alpha=0.85)
        self.lines = LineCollection([], colors="0.4", linewidths=0.5)
        axes.add_collection(self.lines)
        box = {"boxstyle": "square,pad=0.05", "facecolor": "white", "alpha": 0.6, "linewidth": 0}
        looks: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": WORD_SIZE, "bbox": box}
        self.words = [axes.text(0, 0, "", **looks) for _ in range(max(map(len, text.labels)))]
        self.title = figure.text(0.02, 0.985, "", va="top", fontsize=11)
        (self.marker,) = timeline.plot([], [], "o", markersize=7, color="black", clip_on=False)
        self.moving = [self.dots, self.lines, *self.words, self.title, self.marker]
        for artist in self.moving:
            artist.set_animated(True)  # not part of the background
        self.canvas.draw()
        self.background = self.canvas.copy_from_bbox(figure.bbox)

    def _draw_timeline(self, figure: Figure, sites: list[Site]) -> Any:
        """Draw a line with a dash for each capture point, and the names of the layers."""
        axes: Any = figure.add_axes(TIMELINE, frame_on=False, xlim=(0, max(len(sites) - 1, 1)), ylim=(-1, 1), yticks=[])
        axes.plot(range(len(sites)), np.zeros(len(sites)), "|-", color="0.6", linewidth=1, markersize=5)
        layers = [site.layer for site in sites]
        starts = [place for place, layer in enumerate(layers) if layer not in layers[:place]]
        starts = starts[:: -(-len(starts) // MAX_TICKS)]
        names = [layer_label(layers[place], self.encoder) for place in starts]
        axes.set_xticks(starts, names, fontsize=7, ha="left")
        axes.get_xticklabels()[0].set_ha("right")  # there is more room to its left
        axes.tick_params("x", length=0, pad=1)
        return axes

    def frames(self) -> Iterator[tuple[npt.NDArray[np.uint8], bool]]:
        """Yield each frame `[height, width, 3]`, and whether it is between two capture points.

        Nothing glides to the decoder's input, whose tokens are others than the encoder's.
        """
        before = self.stops[0]
        for stop in self.stops:
            if stop is not before and stop.labels is before.labels:
                for share in np.arange(1, MOVES + 1) / (MOVES + 1):
                    yield self.draw(before, stop, share * share * (3 - 2 * share)), True  # slow at both ends
            yield self.draw(stop, stop, 1), False
            before = stop

    def draw(self, start: Stop, end: Stop, share: float) -> npt.NDArray[np.uint8]:
        """Return the frame in which a `share` of the way between two stops is done."""
        colors = [np.array(to_rgb(darken_for_contrast(POINT_MARKS[each.site.point].color))) for each in (start, end)]
        pairs: Any = [(start.xy, end.xy), (start.centres, end.centres), colors, (start.number, end.number)]
        xy, centres, color, number = ((1 - share) * a + share * b for a, b in pairs)
        self.dots.set(offsets=xy, color=[tuple(color)])
        labels = zip(end.labels.values(), centres, strict=True)
        word: Any
        for word, (label, centre) in zip_longest(self.words, labels, fillvalue=("", (0, 0))):
            word.set(text=label, position=centre)
        self.lines.set_segments([*np.stack([xy[[*end.labels]], centres], axis=1)])
        name_color = darken_for_contrast(POINT_MARKS[end.site.point].color, TEXT_CONTRAST)
        self.title.set(text=site_label(end.site, self.encoder), color=name_color)
        self.marker.set_data([number], [0])
        self.canvas.restore_region(self.background)
        for artist in self.moving:
            artist.draw(self.canvas.get_renderer())
        return np.array(self.canvas.buffer_rgba())[..., :3]

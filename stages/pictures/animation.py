"""One text's way through the model, as GIF and as a video: its tokens glide from capture point to capture point."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from stages.outputs.maps import map_sites
from stages.pictures.labels import place_names, spread_out, text_size
from stages.pictures.stack import labels_of, shown_text, whole_words
from stages.pictures.style import TEXT_CONTRAST, on_white, printable, set_limits
from stages.pictures.tokens import Captured
from stages.sites import Site
from stages.vocabulary import POINT_MARKS, layer_label, site_label

SIZE, DPI = (6.4, 4.8), 130  # inches; an even number of pixels each way, as video needs
MAP, BAR = (0.02, 0.1, 0.96, 0.82), (0.11, 0.05, 0.86, 0.02)  # left, bottom, width, height, of the figure
WORDS, WORD_SIZE = 14, 8
FRAMES = 20  # of the video, in a second
MOVING = 0.5  # of a capture point's time
GIF_WIDTH, GIF_STEP = 640, 2  # pixels; every so manieth frame of a move
MOST_TICKS = 13
LAST = 4  # times as long as the other capture points
# No choice hangs on the processor, none on the number of cores (x264's cpu-independent; one thread).
ENCODER = {"preset": "medium", "crf": "23", "x264-params": "cpu-independent=1:threads=1:lookahead-threads=1"}
# Red, green and blue to luma and two chromas, BT.709, in 1/256: whole numbers, the same on every machine.
LUMA, CHROMAS = (47, 157, 16), ((-26, -87, 113), (112, -102, -10))
BT709, LIMITED = 1, 1  # their numbers in H.264 and FFmpeg
GREYS = np.linspace(0, 1, 17)
TINTS = (0.25, 0.5, 0.75, 1.0)  # of a capture point's colour on white

Pixels = npt.NDArray[np.uint8]


class Stop(NamedTuple):
    """How one capture point is drawn."""

    site: Site
    xy: npt.NDArray[np.float64]  # [tokens, 2], of the map
    middles: npt.NDArray[np.float64]  # [words, 2], of their names, of the map
    reading: int


class Scene:
    """What all frames share, and the artists that move."""

    def __init__(self, table: pd.DataFrame, captured: Captured) -> None:
        document = shown_text(table)
        self.encoder = captured.encoder
        of_text = table[table["document"] == document]
        groups = {tuple(site): rows for site, rows in of_text.groupby(["layer", "point"], sort=False)}
        sites = map_sites(of_text)
        self.figure = Figure(figsize=SIZE, dpi=DPI)
        self.canvas = FigureCanvasAgg(self.figure)
        self.axes = self.figure.add_axes(MAP, xticks=[], yticks=[])
        self.axes.spines[:].set_visible(False)
        low, high = of_text[["x", "y"]].agg(["min", "max"]).to_numpy(np.float64)
        set_limits(self.axes, (low + high) / 2, 1.08 * np.maximum(high - low, 1e-3))
        self.axes.scatter(of_text["x"], of_text["y"], s=3, color="0.88", linewidths=0)
        self._draw_bar(sites)
        positions = groups[tuple(sites[0])]["position"].to_numpy()
        self.labels = labels_of(captured, document, positions)
        places = [groups[tuple(site)][["x", "y"]].to_numpy(np.float64) for site in sites]
        self.named = [spread_out(places[-1], WORDS, each) for each in whole_words(captured, document, positions)]
        self.sizes = [
            (np.array([text_size(labels[place], WORD_SIZE) for place in named]) + 2) * DPI / 72  # pixels
            for labels, named in zip(self.labels, self.named, strict=True)
        ]
        self.stops = [self._stop(site, xy, captured.reading(site)) for site, xy in zip(sites, places, strict=True)]
        self.dots = self.axes.scatter([], [], s=12, linewidths=0, alpha=0.85)
        self.lines = LineCollection([], colors="0.4", linewidths=0.5)
        self.axes.add_collection(self.lines)
        self.names = [self._word() for _ in range(max(map(len, self.named)))]
        self.title = self.figure.text(0.02, 0.985, "", va="top", fontsize=11)
        self.figure.text(0.98, 0.985, printable(document), va="top", ha="right", fontsize=9, color="0.35")
        (self.here,) = self.bar.plot([], [], "o", markersize=7, color="black", clip_on=False)
        self.moving = [self.dots, self.lines, *self.names, self.title, self.here]
        for artist in self.moving:
            artist.set_animated(True)
        self.canvas.draw()
        self.empty = self.canvas.copy_from_bbox(self.figure.bbox)

    def _draw_bar(self, sites: list[Site]) -> None:
        """A line with a dash for each capture point, and the layers' names."""
        self.bar: Any = self.figure.add_axes(BAR, xlim=(0, max(len(sites) - 1, 1)), ylim=(-1, 1), yticks=[])
        self.bar.spines[:].set_visible(False)
        self.bar.plot(range(len(sites)), np.zeros(len(sites)), "|-", color="0.6", linewidth=1, markersize=5)
        layers = [site.layer for site in sites]
        first = [place for place, layer in enumerate(layers) if layer not in layers[:place]]
        kept = first[:: -(-len(first) // MOST_TICKS)]
        names = [layer_label(layers[place], self.encoder) for place in kept]
        self.bar.set_xticks(kept, names, fontsize=7, ha="left")
        if layers[0] == 0:  # right of the first there is little room
            self.bar.get_xticklabels()[0].set(ha="right")
        self.bar.tick_params("x", length=0, pad=1)

    def _word(self) -> Text:
        box = {"boxstyle": "square,pad=0.05", "facecolor": "white", "alpha": 0.6, "linewidth": 0}
        return self.axes.text(0, 0, "", ha="center", va="center", fontsize=WORD_SIZE, bbox=box)

    def _stop(self, site: Site, xy: npt.NDArray[np.float64], reading: int) -> Stop:
        box = self.axes.get_window_extent().get_points()
        middles = place_names(self.axes.transData.transform(xy), self.named[reading], self.sizes[reading], box)
        return Stop(site, xy, self.axes.transData.inverted().transform(middles), reading)

    def draw(self, before: int, after: int, share: float) -> Pixels:
        """The picture when so great a `share` of the way between two stops is gone, `[height, width, 3]`."""
        start, end = self.stops[before], self.stops[after]
        colors = [np.array(to_rgb(on_white(POINT_MARKS[stop.site.point].color))) for stop in (start, end)]
        xy = (1 - share) * start.xy + share * end.xy
        self.dots.set_offsets(xy)
        self.dots.set_color([tuple((1 - share) * colors[0] + share * colors[1])])
        middles = (1 - share) * start.middles + share * end.middles
        named = self.named[end.reading]
        for name in self.names[len(named) :]:
            name.set_text("")
        for name, place, middle in zip(self.names, named, middles, strict=False):
            name.set_text(self.labels[end.reading][place])
            name.set_position(middle)
        self.lines.set_segments([*np.stack([xy[named], middles], axis=1)])
        self.title.set_text(site_label(end.site, self.encoder))
        self.title.set_color(on_white(POINT_MARKS[end.site.point].color, TEXT_CONTRAST))
        self.here.set_data([(1 - share) * before + share * after], [0])
        self.canvas.restore_region(self.empty)
        for artist in self.moving:
            self.figure.draw_artist(artist)
        return np.array(self.canvas.buffer_rgba())[..., :3]

    def frames(self, moves: int) -> Iterator[tuple[Pixels, int]]:
        """Every picture, and the how manieth of `moves` between two stops it is; 0: it stands at one.

        Where a decoder begins, whose tokens are others, nothing glides.
        """
        for place, stop in enumerate(self.stops):
            if place and stop.reading == self.stops[place - 1].reading:
                for move in range(1, moves + 1):
                    yield self.draw(place - 1, place, _eased(move / (moves + 1))), move
            yield self.draw(place, place, 1), 0


def _eased(share: float) -> float:
    """Slow at both ends (smoothstep)."""
    return share * share * (3 - 2 * share)


def write_animation(table: pd.DataFrame, captured: Captured, path: Path, points_per_second: float) -> None:
    """Write `path`.gif and .mp4 of one captured text on a map of one plane; draw under `paper_style`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scene = Scene(table, captured)
    of_point = FRAMES / points_per_second
    moves = round(MOVING * of_point)
    rest = max(1, round(of_point) - moves)
    images, durations = [], []
    palette = _palette({stop.site.point for stop in scene.stops})
    last = len(scene.stops) - 1
    with Video(path.with_suffix(".mp4"), scene.canvas.get_width_height()) as video:
        stop = 0
        for pixels, move in scene.frames(moves):
            time = 1 if move else rest * (LAST if stop == last else 1)
            video.add(pixels, time)
            if move % GIF_STEP == 0:
                images.append(_small(pixels, palette))
                durations.append(round(1000 * (GIF_STEP if move else time) / FRAMES))
            stop += not move
    images[0].save(
        path.with_suffix(".gif"), save_all=True, append_images=images[1:], duration=durations, loop=0, optimize=False
    )


def _palette(points: set[str]) -> Image.Image:
    """Greys, and every capture point's colour on white."""
    colors = np.array([to_rgb(on_white(POINT_MARKS[point].color)) for point in sorted(points)])
    tinted = [1 - tint * (1 - colors) for tint in TINTS]
    shades = np.concatenate([np.repeat(GREYS[:, None], 3, axis=1), *tinted])
    palette = Image.new("P", (1, 1))
    palette.putpalette(np.rint(255 * shades).astype(np.uint8).tobytes())
    return palette


def _small(pixels: Pixels, palette: Image.Image) -> Image.Image:
    size = (GIF_WIDTH, round(GIF_WIDTH * pixels.shape[0] / pixels.shape[1]))
    small = Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS)
    return small.quantize(palette=palette, dither=Image.Dither.NONE)


class Video:
    """An mp4 file (H.264) that is written picture by picture, without a date and without the programs' names."""

    def __init__(self, path: Path, size: tuple[int, int]) -> None:
        self.container = av.open(str(path), "w", options={"movflags": "+faststart", "fflags": "+bitexact"})
        self.stream: Any = self.container.add_stream("libx264", rate=FRAMES, options=ENCODER)
        self.stream.width, self.stream.height = size
        self.stream.pix_fmt = "yuv420p"
        self.stream.thread_count = 1
        context = self.stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = LIMITED
        self.number = 0

    def __enter__(self) -> Video:
        return self

    def add(self, pixels: Pixels, time: int) -> None:
        """A picture `[height, width, 3]` that is shown for so many frames."""
        self.last = planes_of(pixels)
        self._encode()
        self.number += time - 1

    def _encode(self) -> None:
        frame = av.VideoFrame.from_ndarray(self.last, format="yuv420p")
        frame.pts = self.number
        self.container.mux(self.stream.encode(frame))
        self.number += 1

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self._encode()  # until here the last picture is shown
            self.container.mux(self.stream.encode())
        self.container.close()


def planes_of(pixels: Pixels) -> Pixels:
    """Luma, and below it, at half the resolution, the two chromas: `[height * 3 / 2, width]`."""
    width = pixels.shape[1]
    red, green, blue = np.moveaxis(pixels, -1, 0).astype(np.uint16)  # a luma's sum is less than 2 ** 16
    luma = (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue + 128 >> 8) + 16
    rows = [part[::2] + part[1::2] for part in (red, green, blue)]
    fours = [(part[:, ::2] + part[:, 1::2]).astype(np.int32) for part in rows]
    chromas = [sum(k * part for k, part in zip(row, fours, strict=True)) + 512 >> 10 for row in CHROMAS]
    return np.concatenate([luma, *(128 + each.reshape(-1, width) for each in chromas)]).astype(np.uint8)

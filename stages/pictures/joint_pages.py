"""The joint map as a series of pages: capture points laid one on top of the other.

Page k shows the first k capture points in forward order, the k-th with a dark edge. What is already on the
page is kept as pixels, so a page costs one set of points and not k of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from PIL import Image

from stages.names import Mark
from stages.outputs.maps import map_sites
from stages.parameters import FiguresParameters
from stages.pictures.style import TWO_COLUMNS, key_of, on_white, paper_style, save_figure, set_limits
from stages.sites import POINTS, Site
from stages.vocabulary import POINT_MARKS, site_label

HEIGHT = 4.6  # inches
AXES = (0.075, 0.095, 0.61, 0.835)  # left, bottom, width, height, of the figure
MARGIN = 0.04  # of the data's extent
VECTOR_DPI = 300  # of the kept points in PDF and SVG
PAGES_FOR_A_PROCESS = 16

Pixels = npt.NDArray[np.uint8]


class JointFigure:
    """The frame that all pages share: axes with limits from the data, legend, title."""

    def __init__(self, table: pd.DataFrame, dpi: int, encoder: int | None = None) -> None:
        self.encoder = encoder
        self.sites = map_sites(table)
        self.groups = table.groupby(["layer", "point"], sort=False)[["x", "y"]]
        self.size = float(np.clip(2600 / len(table) ** 0.5, 4, 24))
        self.figure = Figure(figsize=(TWO_COLUMNS, HEIGHT), dpi=dpi)
        self.canvas = FigureCanvasAgg(self.figure)
        self.axes = self.figure.add_axes(AXES)
        self.axes.set(xlabel="UMAP 1", ylabel="UMAP 2")
        low, high = table[["x", "y"]].agg(["min", "max"]).to_numpy(float)
        set_limits(self.axes, (low + high) / 2, np.maximum(high - low, 1e-3) * (1 + 2 * MARGIN))
        kinds = sorted({site.point for site in self.sites}, key=POINTS.index)
        newest = key_of([Mark("this page's point", "black", "o")], 4)
        newest[0].set_markerfacecolor("none")
        handles = key_of([POINT_MARKS[kind] for kind in kinds], 5) + newest
        self.legend = self.axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0)
        self.title = self.axes.set_title("", loc="left")

    def points(self, site: Site, newest: bool) -> PathCollection:
        """The points of one capture point, with a dark edge where they are the newest."""
        mark = POINT_MARKS[site.point]
        looks: dict[str, Any] = {"alpha": 0.55, "linewidths": 0}
        if newest:
            looks = {"alpha": 0.9, "edgecolors": "black", "linewidths": 0.5}
        x, y = self.groups.get_group(tuple(site)).to_numpy(np.float64).T
        return self.axes.scatter(x, y, s=self.size, c=on_white(mark.color), marker=mark.marker, **looks)

    def stamp(self, site: Site, newest: bool) -> None:
        """Put the points of one capture point over what the canvas shows."""
        points = self.points(site, newest)
        self.axes.draw_artist(points)
        points.remove()

    def name(self, site: Site) -> None:
        """Put the capture point into the title."""
        number = self.sites.index(site) + 1
        self.title.set_text(f"{site_label(site, self.encoder)} ({number} of {len(self.sites)})")


def _pages(frame: JointFigure) -> Iterator[Pixels]:
    """The pages `[height, width, 3]`, in forward order."""
    frame.title.set_animated(True)
    frame.canvas.draw()
    for site in frame.sites:
        kept = frame.canvas.copy_from_bbox(frame.figure.bbox)
        frame.stamp(site, newest=True)
        frame.name(site)
        frame.axes.draw_artist(frame.title)
        yield np.array(frame.canvas.buffer_rgba())[..., :3]
        frame.canvas.restore_region(kept)
        frame.stamp(site, newest=False)


def page_name(number: int, site: Site) -> str:
    """`07_layer_01_ffn_output`: sorts in forward order."""
    return f"{number:02d}_layer_{site.layer:02d}_{site.point}"


def draw_joint_pages(table: pd.DataFrame, folder: Path, figures: FiguresParameters, encoder: int | None = None) -> None:
    """Write every page in every format; draw under `paper_style`.

    `encoder` is how many layers are an encoder's, beside a decoder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sites = map_sites(table)
    if "png" in figures.formats:
        frame = JointFigure(table, figures.dpi, encoder)
        for number, (site, pixels) in enumerate(zip(sites, _pages(frame), strict=True), 1):
            path = folder / f"{page_name(number, site)}.png"
            Image.fromarray(pixels).save(path, dpi=(figures.dpi, figures.dpi), compress_level=4)
    vector: list[str] = [suffix for suffix in figures.formats if suffix != "png"]
    if vector:
        # A page's fonts take longer than its points, so many pages are worth some processes.
        processes = max(1, min(joblib.cpu_count(), len(sites) // PAGES_FOR_A_PROCESS))
        parts = np.array_split(np.arange(1, len(sites) + 1), processes)
        draw = joblib.delayed(_draw_vector_pages)
        joblib.Parallel(n_jobs=processes)(draw(table, folder, vector, part.tolist(), encoder) for part in parts)


def _draw_vector_pages(
    table: pd.DataFrame, folder: Path, formats: list[str], numbers: Sequence[int], encoder: int | None
) -> None:
    """PDF and SVG of some pages: text and the newest points as vectors, over an image of the points before."""
    with paper_style():
        frame = JointFigure(table, VECTOR_DPI, encoder)
        below = JointFigure(table, VECTOR_DPI)  # draws nothing but points
        below.axes.set_axis_off()
        below.figure.patch.set_visible(False)
        below.legend.remove()
        below.canvas.draw()
        extent = (*frame.axes.get_xlim(), *frame.axes.get_ylim())
        nothing = np.zeros((1, 1, 4), dtype=np.uint8)
        image = frame.axes.imshow(nothing, extent=extent, aspect="auto", interpolation="none", zorder=0)
        frame.axes.set_autoscale_on(False)
        for number, site in enumerate(frame.sites[: max(numbers)], 1):
            if number in numbers:
                image.set_data(_inside(below))
                newest = frame.points(site, newest=True)
                frame.name(site)
                save_figure(frame.figure, folder / page_name(number, site), formats, VECTOR_DPI)
                newest.remove()
            below.stamp(site, newest=False)


def _inside(frame: JointFigure) -> Pixels:
    """The pixels within the axes, `[height, width, 4]`."""
    left, bottom, right, top = np.rint(frame.axes.get_window_extent().extents).astype(int)
    return np.array(frame.canvas.buffer_rgba())[::-1][bottom:top, left:right][::-1]

"""The joint map as a series of pages: capture points laid one on top of the other in forward order.

Page k shows the first k capture points, the k-th with a dark edge. What is already on the
page is kept as pixels, so a page costs one set of points and not k of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import joblib
import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D

from stages.outputs.maps import map_sites
from stages.parameters import FiguresParameters
from stages.pictures.figure_files import METADATA, Pixels, canvas_pixels, save_pixels
from stages.pictures.style import TWO_COLUMNS, paper_style
from stages.sites import POINTS, Site
from stages.vocabulary import POINT_MARKS, site_label

HEIGHT = 4.6  # inches
AXES = (0.075, 0.095, 0.61, 0.835)  # left, bottom, width, height, of the figure
MARGIN = 0.04  # of the data's extent
VECTOR_DPI = 300  # of the kept points in PDF and SVG
PAGES_FOR_A_PROCESS = 16

Coordinates = npt.NDArray[np.float64]


class Page(NamedTuple):
    """One page: its capture point and what the canvas shows, `[height, width, 3]`."""

    site: Site
    pixels: Pixels


class JointFigure:
    """The frame that all pages share: axes with limits from the data, legend, title."""

    def __init__(self, table: pd.DataFrame, dpi: int) -> None:
        self.sites = map_sites(table)
        groups = table.groupby(["layer", "point"], sort=False)
        self.xy: dict[Site, Coordinates] = {
            site: groups.get_group((site.layer, site.point))[["x", "y"]].to_numpy(np.float64) for site in self.sites
        }
        self.size = float(np.clip(2600 / len(table) ** 0.5, 4, 24))
        self.figure = Figure(figsize=(TWO_COLUMNS, HEIGHT), dpi=dpi)
        self.canvas = FigureCanvasAgg(self.figure)
        self.axes = self.figure.add_axes(AXES)
        self._set_limits(table)
        self.axes.set_xlabel("UMAP 1")
        self.axes.set_ylabel("UMAP 2")
        self.legend = self._legend()
        self.title = self.axes.set_title("", loc="left")

    def _set_limits(self, table: pd.DataFrame) -> None:
        low, high = table[["x", "y"]].min().to_numpy(float), table[["x", "y"]].max().to_numpy(float)
        extent = np.maximum(high - low, 1e-3) * (1 + 2 * MARGIN)
        # A unit is as long on both axes.
        shape = np.array([TWO_COLUMNS, HEIGHT]) * AXES[2:]
        half = shape * (extent / shape).max() / 2
        middle = (low + high) / 2
        self.axes.set_xlim(middle[0] - half[0], middle[0] + half[0])
        self.axes.set_ylim(middle[1] - half[1], middle[1] + half[1])

    def _legend(self) -> Legend:
        kinds = sorted({site.point for site in self.sites}, key=POINTS.index)
        handles = [
            Line2D([], [], linestyle="none", marker=mark.marker, color=mark.color, markersize=5, label=mark.label)
            for mark in (POINT_MARKS[kind] for kind in kinds)
        ]
        newest = Line2D([], [], linestyle="none", marker="o", markerfacecolor="none", markeredgecolor="black")
        newest.set_label("this page's point")
        return self.axes.legend(
            handles=[*handles, newest], loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0
        )

    def points(self, site: Site, newest: bool) -> PathCollection:
        """The points of one capture point, with a dark edge where they are the newest."""
        mark = POINT_MARKS[site.point]
        edge: dict[str, Any] = {"edgecolors": "black", "linewidths": 0.5} if newest else {"linewidths": 0}
        x, y = self.xy[site].T
        return self.axes.scatter(
            x, y, s=self.size, c=mark.color, marker=mark.marker, alpha=0.9 if newest else 0.55, **edge
        )

    def name(self, site: Site) -> None:
        """Put the capture point into the title."""
        number = self.sites.index(site) + 1
        self.title.set_text(f"{site_label(site)} ({number} of {len(self.sites)})")


def pages(table: pd.DataFrame, dpi: int) -> Iterator[Page]:
    """The pages of a joint map as pixels, in forward order; draw under `paper_style`."""
    frame = JointFigure(table, dpi)
    frame.title.set_animated(True)
    frame.canvas.draw()
    kept = frame.canvas.copy_from_bbox(frame.figure.bbox)
    for site in frame.sites:
        frame.canvas.restore_region(kept)
        _draw(frame, site, newest=True)
        frame.name(site)
        frame.axes.draw_artist(frame.title)
        page = Page(site, canvas_pixels(frame.canvas))
        frame.canvas.restore_region(kept)
        _draw(frame, site, newest=False)
        kept = frame.canvas.copy_from_bbox(frame.figure.bbox)
        yield page


def _draw(frame: JointFigure, site: Site, newest: bool) -> None:
    points = frame.points(site, newest)
    frame.axes.draw_artist(points)
    points.remove()


def page_name(number: int, site: Site) -> str:
    """`07_layer_01_ffn_output`: sorts in forward order."""
    return f"{number:02d}_layer_{site.layer:02d}_{site.point}"


def draw_joint_pages(table: pd.DataFrame, folder: Path, figures: FiguresParameters) -> list[Page]:
    """Write every page in every format; the pages as pixels."""
    made = []
    for number, page in enumerate(pages(table, figures.dpi), 1):
        made.append(page)
        if "png" in figures.formats:
            save_pixels(page.pixels, folder / f"{page_name(number, page.site)}.png", figures.dpi)
    vector: list[str] = [suffix for suffix in figures.formats if suffix != "png"]
    if vector:
        folder.mkdir(parents=True, exist_ok=True)
        # A page's fonts take longer than its points, so many pages are worth some processes.
        processes = max(1, min(joblib.cpu_count(), len(made) // PAGES_FOR_A_PROCESS))
        parts = np.array_split(np.arange(1, len(made) + 1), processes)
        draw = joblib.delayed(_draw_vector_pages)
        joblib.Parallel(n_jobs=processes)(draw(table, folder, vector, part.tolist()) for part in parts)
    return made


def _draw_vector_pages(table: pd.DataFrame, folder: Path, formats: list[str], numbers: Sequence[int]) -> None:
    """PDF and SVG of some pages: text and the newest points as vectors, over an image of the points before."""
    with paper_style():
        frame = JointFigure(table, VECTOR_DPI)
        below = JointFigure(table, VECTOR_DPI)  # draws nothing but points
        for artist in (below.axes.xaxis, below.axes.yaxis, below.axes.patch, *below.axes.spines.values()):
            artist.set_visible(False)
        below.figure.patch.set_visible(False)
        below.legend.remove()
        below.canvas.draw()
        image = frame.axes.imshow(
            np.zeros((1, 1, 4), dtype=np.uint8),
            extent=(*frame.axes.get_xlim(), *frame.axes.get_ylim()),
            aspect="auto",
            interpolation="none",
            zorder=0,
        )
        frame.axes.set_autoscale_on(False)
        for number, site in enumerate(frame.sites[: max(numbers)], 1):
            if number in numbers:
                image.set_data(_inside(below))
                newest = frame.points(site, newest=True)
                frame.name(site)
                for suffix in formats:
                    path = folder / f"{page_name(number, site)}.{suffix}"
                    frame.figure.savefig(path, format=suffix, dpi=VECTOR_DPI, metadata=METADATA[suffix])
                newest.remove()
            _draw(below, site, newest=False)


def _inside(frame: JointFigure) -> Pixels:
    """The pixels within the axes, `[height, width, 4]`."""
    box = frame.axes.get_window_extent()
    shown = np.asarray(frame.canvas.buffer_rgba())
    height = shown.shape[0]
    return np.array(shown[height - round(box.y1) : height - round(box.y0), round(box.x0) : round(box.x1)])

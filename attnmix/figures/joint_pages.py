"""The joint map as a series of pages: page k shows the first k capture points, the newest with a dark edge."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure

from attnmix.core.names import Mark
from attnmix.core.options import RenderParameters
from attnmix.figures.labels import POINT_MARKS, site_label
from attnmix.figures.style import METADATA, TWO_COLUMNS, darken_for_contrast, legend_handles, save_figure, set_limits
from attnmix.store.runs import map_sites

HEIGHT = 4.6  # inches
AXES = (0.075, 0.095, 0.61, 0.835)  # left, bottom, width, height, in shares of the figure


def draw_joint_pages(table: pd.DataFrame, encoder: int | None, folder: Path, figures: RenderParameters) -> None:
    """Write a file for each page, such as `07_layer_01_layer_output.png`, and as PDF one file of all pages.

    A PDF's fonts take longer than its points, and one file has them once. `encoder` is the number of an encoder's
    layers, where a decoder follows. Call under `paper_style`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    sites = map_sites(table)
    groups = table.groupby(["layer", "point"], sort=False)[["x", "y"]]
    figure = Figure(figsize=(TWO_COLUMNS, HEIGHT))
    axes = figure.add_axes(AXES, xlabel="UMAP 1", ylabel="UMAP 2")
    set_limits(axes, table[["x", "y"]].to_numpy(np.float64))
    newest = legend_handles([Mark("this page's point", "black", "o")], 4)
    newest[0].set_markerfacecolor("none")
    points = [point for point in POINT_MARKS if any(site.point == point for site in sites)]
    handles = legend_handles([POINT_MARKS[point] for point in points], 5) + newest
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0)
    size = float(np.clip(2600 / len(table) ** 0.5, 4, 24))
    file_formats = [suffix for suffix in figures.formats if suffix != "pdf"]
    with PdfPages(folder / "joint.pdf", metadata=METADATA["pdf"]) if "pdf" in figures.formats else nullcontext() as pdf:
        for number, site in enumerate(sites, 1):
            x, y = groups.get_group(tuple(site)).to_numpy(np.float64).T
            mark = POINT_MARKS[site.point]
            dots = axes.scatter(x, y, s=size, c=darken_for_contrast(mark.color), marker=mark.marker)
            dots.set(alpha=0.9, edgecolors="black", linewidths=0.5)
            axes.set_title(f"{site_label(site, encoder)} ({number} of {len(sites)})", loc="left")
            name = f"{number:02d}_layer_{site.layer:02d}_{site.point}"
            save_figure(figure, folder / name, file_formats, figures.dpi)
            if pdf:
                pdf.savefig(figure, dpi=figures.dpi)
            # In PDF and SVG, the points of earlier pages are one image.
            dots.set(alpha=0.55, edgecolors="none", linewidths=0, rasterized=True)

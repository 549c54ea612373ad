"""Draw the maps and the measures, and write the interactive page.

    python -m stages.render

Writes `reports/figures/` and `reports/index.html`.
"""

from __future__ import annotations

import logging
import shutil

from stages.command import run_stage
from stages.errors import InputError
from stages.names import ONE_PLANE
from stages.outputs.maps import made_layouts, read_map
from stages.outputs.reports import FIGURES, read_plot
from stages.page.assembly import write_page
from stages.parameters import Parameters
from stages.pictures.animation import write_animation
from stages.pictures.atlas import draw_atlas
from stages.pictures.joint_pages import draw_joint_pages
from stages.pictures.mixing_figures import draw_mixing_figures
from stages.pictures.residual import draw_residual
from stages.pictures.style import paper_style
from stages.pictures.tokens import read_captured, with_classes
from stages.store import open_run


def main(parameters: Parameters) -> None:
    figures = parameters.figures
    if parameters.mixing.tokens == "none":
        raise InputError(
            "mixing.tokens: none keeps no ratios of the captured texts, which figures and page show; `captured` keeps "
            "those and no more, and all stages before `render` need none"
        )
    shutil.rmtree(FIGURES, ignore_errors=True)
    layouts = made_layouts()
    captured = read_captured(with_classes(open_run().tokens), read_plot("steps", "measure"))
    labels = {piece.label for reading in captured.readings for piece in reading}
    with paper_style(labels | set(map(str.lower, labels))):
        if "joint" in layouts:
            draw_joint_pages(read_map("joint"), FIGURES / "joint", figures, captured.encoder)
        else:
            logging.info("no pages of the joint map: umap.layouts does not hold joint")
        in_one_plane = next((layout for layout in ONE_PLANE if layout in layouts), None)
        if in_one_plane:
            table = read_map(in_one_plane)
            write_animation(table, captured, FIGURES / in_one_plane, figures.points_per_second)
            draw_residual(in_one_plane, table, captured, FIGURES / "residual", figures)
        else:
            logging.info("no animation and no residual stream: umap.layouts holds none of %s", ", ".join(ONE_PLANE))
        # The last one shows single points best.
        draw_atlas(layouts[-1], read_map(layouts[-1]), captured, FIGURES / "atlas", figures)
        draw_mixing_figures(figures, captured)
    write_page(parameters)


if __name__ == "__main__":
    run_stage(main)

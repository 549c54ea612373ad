"""Draw the maps and the measures, and write the interactive page.

    python -m stages.render

Writes `reports/figures/` and `reports/index.html`.
"""

from __future__ import annotations

import logging
import shutil

from stages.command import run_stage
from stages.outputs.maps import made_layouts, read_map
from stages.outputs.reports import FIGURES, read_plot
from stages.page.assembly import write_page
from stages.parameters import Parameters
from stages.pictures.atlas import draw_atlas
from stages.pictures.joint_pages import draw_joint_pages, write_animation
from stages.pictures.mixing_figures import draw_mixing_figures
from stages.pictures.style import paper_style
from stages.pictures.tokens import read_captured, with_classes
from stages.store import open_run


def main(parameters: Parameters) -> None:
    figures = parameters.figures
    shutil.rmtree(FIGURES, ignore_errors=True)
    layouts = made_layouts()
    captured = read_captured(with_classes(open_run().tokens), read_plot("steps", "measure"))
    labels = {piece.label for reading in captured.readings for piece in reading}
    with paper_style(labels | set(map(str.lower, labels))):
        if "joint" in layouts:
            pages = draw_joint_pages(read_map("joint"), FIGURES / "joint", figures, captured.encoder)
            write_animation(pages, FIGURES / "joint.gif", figures.frames_per_second)
        else:
            logging.info("no pages and no animation of the joint map: umap.layouts does not hold joint")
        # The last one shows single points best.
        draw_atlas(layouts[-1], read_map(layouts[-1]), captured, FIGURES / "atlas", figures)
        draw_mixing_figures(figures, captured)
    write_page(parameters)


if __name__ == "__main__":
    run_stage(main)

"""Draw the maps and the measures, and write the interactive page.

    python -m stages.render

Writes `reports/figures/` and `reports/index.html`.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from stages import store
from stages.errors import run_stage
from stages.maps.storage import MAPS, read_map
from stages.page.build import write_page
from stages.parameters import Parameters
from stages.pictures.animation import write_animation
from stages.pictures.atlas import draw_atlas
from stages.pictures.figure_files import FIGURES
from stages.pictures.joint_pages import draw_joint_pages
from stages.pictures.mixing_figures import draw_mixing_figures
from stages.pictures.style import paper_style

ACTIVATIONS = Path("features/activations")


def main(parameters: Parameters) -> None:
    figures = parameters.figures
    shutil.rmtree(FIGURES, ignore_errors=True)
    tokens = store.read_tokens(ACTIVATIONS)
    layouts = [layout for layout in ("separate", "aligned", "joint") if (MAPS / f"{layout}.parquet").is_file()]
    with paper_style():
        if "joint" in layouts:
            pages = draw_joint_pages(read_map("joint"), FIGURES / "joint", figures)
            write_animation([page.pixels for page in pages], FIGURES / "joint.gif", figures.frames_per_second)
        else:
            logging.info("no pages and no animation of the joint map: umap.layouts does not hold joint")
        draw_atlas(layouts[0], read_map(layouts[0]), tokens, FIGURES / "atlas", figures)
    draw_mixing_figures(figures)
    write_page(parameters)


if __name__ == "__main__":
    run_stage(main)

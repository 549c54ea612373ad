"""Draw the maps and the measures, and write the interactive page.

    python -m stages render

Writes `reports/figures/` and `reports/index.html`.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from typing import Any

import joblib

from attnmix.core.names import ONE_PLANE
from attnmix.core.options import Parameters, RenderParameters
from attnmix.figures.animation import write_animation
from attnmix.figures.atlas import draw_atlas
from attnmix.figures.joint_pages import draw_joint_pages
from attnmix.figures.mixing_curves import draw_by_layer, draw_steps
from attnmix.figures.mixing_matrices import draw_matrices
from attnmix.figures.mixing_reviews import draw_reviews
from attnmix.figures.mixing_strips import draw_strips
from attnmix.figures.residual import draw_residual
from attnmix.figures.style import find_fallback_fonts, paper_style
from attnmix.figures.text_layers import text_layers
from attnmix.figures.tokens import CapturedTexts, read_captured
from attnmix.measures.matrices import LAYER_MATRICES, ROLLOUTS
from attnmix.page.assembly import write_page
from attnmix.store.maps import made_layouts, read_map
from attnmix.store.mixing import read_captured_ratios, stored_matrices
from attnmix.store.reports import FIGURES, read_mixing, read_plot, read_steps
from attnmix.store.runs import open_run

MAX_PROCESSES = 4  # each takes a second to start


def main(parameters: Parameters) -> None:
    shutil.rmtree(FIGURES, ignore_errors=True)
    captured = read_captured(open_run().tokens, read_steps())
    draw_all([*map_figures(captured, parameters.render), *mixing_figures(captured, parameters.render)], captured)
    write_page(parameters)


def draw_all(drawings: list[tuple[Any, ...]], captured: CapturedTexts) -> None:
    """Call each drawing's function with its arguments, in a few processes, with fonts for the captured texts."""
    labels = {token.label for reading in captured.readings for token in reading}
    fonts = find_fallback_fonts(labels | set(map(str.lower, labels)))
    processes = min(MAX_PROCESSES, joblib.cpu_count())
    joblib.Parallel(n_jobs=processes)(joblib.delayed(_draw)(fonts, *drawing) for drawing in drawings)


def _draw(fonts: list[str], draw: Any, *arguments: Any) -> None:
    with paper_style(fonts):
        draw(*arguments)


def map_figures(captured: CapturedTexts, figures: RenderParameters) -> Iterator[tuple[Any, ...]]:
    """Yield a function and its arguments for each figure of the maps."""
    layouts = made_layouts()
    if "joint" in layouts:
        yield draw_joint_pages, read_map("joint"), captured.encoder, FIGURES / "joint", figures
    else:
        logging.info("no pages of the joint map: umap.layouts does not hold joint")
    plane = next((layout for layout in ONE_PLANE if layout in layouts), None)
    if plane:
        table = read_map(plane)
        path = FIGURES / f"{plane}.gif"
        yield write_animation, table, captured, path, figures.points_per_second
        yield draw_residual, plane, table, captured, FIGURES / "residual", figures
    else:
        logging.info("no animation and no residual stream: umap.layouts holds none of %s", ", ".join(ONE_PLANE))
    # The last one shows single points best.
    yield draw_atlas, layouts[-1], read_map(layouts[-1]), captured, FIGURES / "atlas", figures


def mixing_figures(captured: CapturedTexts, figures: RenderParameters) -> Iterator[tuple[Any, ...]]:
    """Yield a function and its arguments for each figure of mixing, from what `measure` wrote.

    Beside `mixing_by_layer`, `mixing_reviews` and `mixing_steps`, there are for each captured document
    `mixing_tokens_<document>`, and for each checkpoint `mixing_contributions_<document>_<checkpoint>` and
    `mixing_rollouts_<document>_<checkpoint>`. A decoder beside an encoder has its own, ending in `_decoder`.
    """
    xlabel = "Layer" if captured.encoder is None else f"Layer, the decoder's from {captured.encoder + 1} on"
    yield draw_by_layer, read_mixing()[0], xlabel, FIGURES / "mixing_by_layer", figures
    reviews, weighted = (read_plot(f"measure/mixing_{name}") for name in ("by_review", "weighted"))
    yield draw_reviews, reviews, weighted, xlabel, FIGURES / "mixing_reviews", figures
    yield draw_steps, read_steps(), xlabel, FIGURES / "mixing_steps", figures
    document: Any
    ratios = read_captured_ratios(captured.tokens["document"].unique().tolist())
    for document, rows in ratios.groupby("document", sort=False):
        for text in text_layers(captured, document, int(rows["layer"].max())):
            name, ending = document.replace("/", "_"), text.name and f"_{text.name}"
            own = rows[rows["layer"].isin(text.layers)]
            yield draw_strips, own, document, text, FIGURES / f"mixing_tokens_{name}{ending}", figures
            for checkpoint in map(str, rows["checkpoint"].unique()):
                stored = stored_matrices(checkpoint, document)
                for kind, declared in (("contributions", LAYER_MATRICES), ("rollouts", ROLLOUTS)):
                    methods = [method for method in declared if method in stored]
                    path = FIGURES / f"mixing_{kind}_{name}_{checkpoint}{ending}"
                    if methods:
                        yield draw_matrices, checkpoint, document, text, methods, path, figures

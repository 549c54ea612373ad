"""Figures of mixing: ratios by layer, token strips, contribution matrices, and a layer's steps."""

from __future__ import annotations

from typing import Any

from stages.mixing.matrices import LAYER_MATRICES, ROLLOUTS
from stages.outputs.mixing import read_captured_ratios, stored_matrices
from stages.outputs.reports import FIGURES, read_plot
from stages.parameters import FiguresParameters
from stages.pictures.mixing_curves import draw_by_layer, draw_steps
from stages.pictures.mixing_matrices import draw_matrices
from stages.pictures.mixing_reviews import draw_reviews
from stages.pictures.mixing_strips import draw_strips
from stages.pictures.stack import stacks_of
from stages.pictures.tokens import Captured


def draw_mixing_figures(figures: FiguresParameters, captured: Captured) -> None:
    """Write every figure of mixing to `reports/figures/`, from what `measure` wrote; draw under `paper_style`.

    `mixing_by_layer`, `mixing_reviews`, `mixing_steps`, and for each captured document `mixing_tokens_<document>`,
    `mixing_contributions_<document>_<checkpoint>` and `mixing_rollouts_<document>_<checkpoint>`; of a decoder beside an
    encoder the same for each document once more, their names ending in `_decoder`.
    """
    axis = "Layer" if captured.encoder is None else f"Layer, the decoder's from {captured.encoder + 1} on"
    draw_by_layer(read_plot("mixing", "measure"), axis, FIGURES / "mixing_by_layer", figures)
    reviews, weighted = (read_plot(f"mixing_{name}", "measure") for name in ("by_review", "weighted"))
    draw_reviews(reviews, weighted, axis, FIGURES / "mixing_reviews", figures)
    draw_steps(read_plot("steps", "measure"), axis, FIGURES / "mixing_steps", figures)
    document: Any
    ratios = read_captured_ratios(captured.tokens["document"].unique().tolist())
    for document, rows in ratios.groupby("document", sort=False):
        for stack in stacks_of(captured, document, int(rows["layer"].max())):
            name, ending = document.replace("/", "_"), stack.name and f"_{stack.name}"
            of_stack = rows[rows["layer"].isin(stack.layers)]
            draw_strips(of_stack, document, stack, FIGURES / f"mixing_tokens_{name}{ending}", figures)
            for checkpoint in map(str, rows["checkpoint"].unique()):
                stored = stored_matrices(checkpoint, document)
                for kind, declared in (("contributions", LAYER_MATRICES), ("rollouts", ROLLOUTS)):
                    methods = [method for method in declared if method in stored]
                    path = FIGURES / f"mixing_{kind}_{name}_{checkpoint}{ending}"
                    if methods:
                        draw_matrices(checkpoint, document, stack, methods, path, figures)

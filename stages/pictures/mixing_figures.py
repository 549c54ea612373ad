"""Figures of mixing: ratios by layer, token strips, contribution matrices, and a layer's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath

from stages.mixing.matrices import LAYER_MATRICES, MATRICES, ROLLOUTS
from stages.mixing.ratios import RATIOS, preferred_ratio
from stages.outputs.mixing import read_captured_ratios, read_matrix, row_shares, stored_matrices
from stages.outputs.reports import FIGURES, read_plot
from stages.parameters import FiguresParameters
from stages.pictures.mixing_reviews import draw_reviews
from stages.pictures.style import ONE_COLUMN, PAGE_HEIGHT, TWO_COLUMNS, printable, save_figure
from stages.pictures.tokens import Captured
from stages.vocabulary import CHECKPOINTS, STEP_MARKS, STEP_MEASURES, Mark, layer_label

STEPS_SHOWN = ("cosine_input", "cosine_previous")
SHARE_TICKS = (0, 0.01, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1)
TOKENS_IN_ROW = 32  # of a strip, so that every token has a readable label
TOKENS_IN_MATRIX = 24
TOKENS_IN_STRIP = 128
LABEL_SIZE = 5
LONGEST_LABEL = 16  # characters; a vocabulary may hold a token of a hundred dashes
MOST_TICKS = 16


class Stack(NamedTuple):
    """A model's layers, and the tokens that they read; a decoder beside an encoder reads each text one token later."""

    name: str
    layers: range
    encoder: int | None
    tokens: list[str]


def draw_mixing_figures(figures: FiguresParameters, captured: Captured) -> None:
    """Write every figure of mixing to `reports/figures/`, from what `measure` wrote; draw under `paper_style`.

    `mixing_by_layer`, `mixing_reviews`, `mixing_steps`, and for each captured document `mixing_tokens_<document>`,
    `mixing_contributions_<document>_<checkpoint>` and `mixing_rollouts_<document>_<checkpoint>`; of a decoder beside an
    encoder the same for each document once more, their names ending in `_decoder`.
    """
    axis = "Layer" if captured.encoder is None else f"Layer, the decoder's from {captured.encoder + 1} on"
    _draw_by_layer(read_plot("mixing", "measure"), axis, FIGURES / "mixing_by_layer", figures)
    reviews, weighted = (read_plot(f"mixing_{name}", "measure") for name in ("by_review", "weighted"))
    draw_reviews(reviews, weighted, axis, FIGURES / "mixing_reviews", figures)
    _draw_steps(read_plot("steps", "measure"), axis, FIGURES / "mixing_steps", figures)
    document: Any
    ratios = read_captured_ratios(captured.tokens["document"].unique().tolist())
    for document, rows in ratios.groupby("document", sort=False):
        for stack in _stacks(captured, document, int(rows["layer"].max())):
            name, ending = document.replace("/", "_"), stack.name and f"_{stack.name}"
            of_stack = rows[rows["layer"].isin(stack.layers)]
            _draw_strip(of_stack, document, stack, FIGURES / f"mixing_tokens_{name}{ending}", figures)
            for checkpoint in map(str, rows["checkpoint"].unique()):
                stored = stored_matrices(checkpoint, document)
                for kind, declared in (("contributions", LAYER_MATRICES), ("rollouts", ROLLOUTS)):
                    methods = [method for method in declared if method in stored]
                    path = FIGURES / f"mixing_{kind}_{name}_{checkpoint}{ending}"
                    if methods:
                        _draw_matrices(checkpoint, document, stack, methods, path, figures)


def _stacks(captured: Captured, document: str, layers: int) -> list[Stack]:
    """All layers, or the encoder's and the decoder's."""
    rows = np.flatnonzero(captured.tokens["document"] == document)
    tokens = [[_tick(reading[row].label) for row in rows] for reading in captured.readings]
    encoder = captured.encoder
    if encoder is None:
        return [Stack("", range(1, layers + 1), None, tokens[0])]
    decoder = Stack("decoder", range(encoder + 1, layers + 1), encoder, tokens[1])
    return [Stack("", range(1, encoder + 1), encoder, tokens[0]), decoder]


def _tick(label: str) -> str:
    shown = printable(label)
    return shown if len(shown) <= LONGEST_LABEL else f"{shown[: LONGEST_LABEL - 1]}…"


def _draw_by_layer(mixing: pd.DataFrame, axis: str, path: Path, figures: FiguresParameters) -> None:
    by_checkpoint = mixing.groupby("checkpoint", sort=False)
    alone = len(by_checkpoint) == 1
    figure = Figure(figsize=(ONE_COLUMN, 3.2) if alone else (TWO_COLUMNS, 2.6), layout="constrained")
    panels = figure.subplots(1, len(by_checkpoint), sharey=True, squeeze=False)[0]
    for axes, (checkpoint, rows) in zip(panels, by_checkpoint, strict=True):
        _draw_curves(axes, rows, "method", {name: ratio.mark for name, ratio in RATIOS.items()})
        axes.set(title=CHECKPOINTS[str(checkpoint)], xlabel=axis, ylim=(0, 1))
    panels[0].set_ylabel("Mixing ratio (95 % interval)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=1 if alone else 3)
    save_figure(figure, path, figures.formats, figures.dpi)


def _draw_steps(steps: pd.DataFrame, axis: str, path: Path, figures: FiguresParameters) -> None:
    by_checkpoint = steps.groupby("checkpoint", sort=False)
    figure = Figure(figsize=(TWO_COLUMNS, 2.2 * len(by_checkpoint) + 0.6), layout="constrained")
    grid = figure.subplots(len(by_checkpoint), len(STEPS_SHOWN), sharex=True, sharey=True, squeeze=False)
    for row, (checkpoint, rows) in zip(grid, by_checkpoint, strict=True):
        for axes, measure in zip(row, STEPS_SHOWN, strict=True):
            _draw_curves(axes, rows[rows["measure"] == measure], "step", STEP_MARKS)
            axes.axhline(0, color="0.7", linewidth=0.5, zorder=0)
            axes.set_title(f"{CHECKPOINTS[str(checkpoint)]}: {STEP_MEASURES[measure]}")
        row[0].set_ylabel("Cosine")
    for axes in grid[-1]:
        axes.set_xlabel(axis)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    save_figure(figure, path, figures.formats, figures.dpi)


def _draw_curves(axes: Axes, rows: pd.DataFrame, column: str, marks: Mapping[str, Mark]) -> None:
    """A curve with its interval for each name in `column`, over the layers that have values."""
    known = rows.dropna(subset="mean")
    for name, (label, color, marker, _) in marks.items():
        part = known[known[column] == name]
        if part.empty:
            continue
        axes.plot(part["layer"], part["mean"], color=color, marker=marker, label=label)
        axes.fill_between(part["layer"], part["ci_low"], part["ci_high"], color=color, alpha=0.25, linewidth=0)
    layers = sorted(rows["layer"].unique())
    axes.set_xticks(layers[:: -(-len(layers) // MOST_TICKS)])


def _draw_strip(rows: pd.DataFrame, document: str, stack: Stack, path: Path, figures: FiguresParameters) -> None:
    """A row of cells for each layer, a column for each token, wrapped like text; a block for each checkpoint."""
    method = preferred_ratio(rows.columns)
    grids = {
        CHECKPOINTS[str(name)]: part.pivot_table(index="layer", columns="position", values=method)
        for name, part in rows.groupby("checkpoint", sort=False)
    }
    tokens, layers = stack.tokens, len(stack.layers)
    widths = (TextPath((0, 0), token, size=LABEL_SIZE).get_extents().width for token in tokens[:TOKENS_IN_STRIP])
    row_height = len(grids) * (0.08 * layers + max(0.5, round(max(widths) / 72, 2)))  # inches
    on_page = TOKENS_IN_ROW * max(1, int((PAGE_HEIGHT - 0.5) / row_height))
    shown_tokens = min(len(tokens), TOKENS_IN_STRIP, on_page)
    starts = range(0, shown_tokens, TOKENS_IN_ROW)
    figure = Figure(figsize=(TWO_COLUMNS, len(starts) * row_height + 0.5), layout="constrained")
    panels = figure.subplots(len(starts) * len(grids), 1, squeeze=False)[:, 0]
    largest = max(float(np.nanmax(grid.to_numpy())) for grid in grids.values())
    for axes, (start, (checkpoint, grid)) in zip(panels, product(starts, grids.items()), strict=True):
        shown = grid.reindex(columns=range(start, start + TOKENS_IN_ROW))
        image = axes.imshow(shown, vmin=0, vmax=largest, aspect="auto", origin="lower")
        _label_tokens(axes, tokens[start : start + TOKENS_IN_ROW], "x")
        axes.set_yticks([0, layers - 1], [str(stack.layers[0]), str(stack.layers[-1])])
        axes.set_ylabel(f"{checkpoint},\nlayer", fontsize=6)
    figure.colorbar(image, ax=panels.tolist(), label=RATIOS[method].mark.label, fraction=0.02, aspect=40)
    whose = stack.name and f" of the {stack.name}"
    figure.suptitle(f"Mixing ratio by layer{whose} in {document}{_part(shown_tokens, len(tokens))}", fontsize=8)
    save_figure(figure, path, figures.formats, figures.dpi)


def _draw_matrices(
    checkpoint: str, document: str, stack: Stack, methods: Sequence[str], path: Path, figures: FiguresParameters
) -> None:
    """A row for each measure, a column for the first, a middle and the last layer; row token, column source.

    Every cell is a share of its row's sum over the whole text; one scale for all, of square roots, so that a share of
    one per cent is still seen.
    """
    shown, depth = stack.tokens[:TOKENS_IN_MATRIX], len(stack.layers)
    layers = [stack.layers[place] for place in sorted({0, depth // 2, depth - 1})]
    height = 1.75 * len(methods) + 0.8
    # No constrained layout: fitting it to a thousand labels takes most of the time.
    figure = Figure(figsize=(TWO_COLUMNS, height))
    figure.subplots_adjust(left=0.13, right=0.89, bottom=0.45 / height, top=1 - 0.45 / height, wspace=0.05, hspace=0.05)
    grid = figure.subplots(len(methods), len(layers), squeeze=False)
    colors = colormaps["viridis"].with_extremes(bad="0.8")
    for row, method in zip(grid, methods, strict=True):
        matrices = read_matrix(checkpoint, document, method)
        for axes, layer in zip(row, layers, strict=True):
            cells = np.ma.masked_invalid(row_shares(matrices[layer - 1])[: len(shown), : len(shown)])
            image = axes.imshow(cells, cmap=colors, norm=PowerNorm(0.5, 0, 1))
            _label_tokens(axes, shown if method == methods[-1] else [], "x")
            _label_tokens(axes, shown if layer == layers[0] else [], "y")
            if method == methods[0]:
                axes.set_title(layer_label(layer, stack.encoder), pad=2)
        row[0].set_ylabel(MATRICES[method].label.replace(" rollout", "\nrollout"), labelpad=2)
    scale = figure.add_axes((0.905, 1 - 2.15 / height, 0.015, 1.7 / height))
    figure.colorbar(image, cax=scale, ticks=SHARE_TICKS, format="{x:g}", label="share of the row's sum")
    scale.minorticks_off()
    scale.text(0, -0.05, "grey: too little\nto be shared out", transform=scale.transAxes, va="top", fontsize=LABEL_SIZE)
    part = _part(len(shown), len(stack.tokens))
    whose = stack.name and f", {stack.name}"
    title = f"{CHECKPOINTS[checkpoint]}{whose}: what each token (column) gives to each (row) in {document}{part}"
    figure.suptitle(title, y=1 - 0.08 / height, fontsize=8)
    save_figure(figure, path, figures.formats, figures.dpi)


def _part(shown: int, tokens: int) -> str:
    return "" if shown == tokens else f", its first {shown} of {tokens} tokens"


def _label_tokens(axes: Axes, tokens: list[str], side: Any) -> None:
    axes.tick_params(side, length=0, pad=1, labelsize=LABEL_SIZE, labelrotation=90 if side == "x" else 0)
    axes.set(**{f"{side}ticks": range(len(tokens)), f"{side}ticklabels": tokens})

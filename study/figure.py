"""The study's figure: the ratio by layer before and after fine-tuning, and what it is to be compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attnmix.figures.labels import CHECKPOINTS
from attnmix.figures.style import TWO_COLUMNS, paper_style, save_figure
from attnmix.measures.ratios import RATIOS
from study.aggregate import DIFFERENCE, with_difference

METHODS = ("attn_n", "attnresln_n", "attnres_n", "layer_n")
"""Drawn, as far as a model has them; the third only where there is no second."""
BESIDE_DERIVATIVE = ("attnres_n", "attnresln_n", "layer_n")
"""Ratios that count the skip connection, as the layer's derivative does."""
TITLES = {**CHECKPOINTS, DIFFERENCE: "Fine-tuned minus pretrained,\npercentage points"}
FORMATS = ("png", "pdf")
DPI = 200
ROW_HEIGHT = 1.9


class Curve(NamedTuple):
    """How a curve is called and drawn."""

    label: str
    color: str
    line: str | tuple[int, tuple[int, ...]]
    marker: str


# Okabe and Ito's colours; line and marker tell the curves apart without them.
TRUE = Curve("Measured: mean over seeds, interval, seeds", "#0072B2", "-", "o")
CONTROLS = {
    "random_weights": Curve("Random weights", "#999999", ":", "s"),
    "shuffled_words": Curve("Shuffled words", "#E69F00", "--", "^"),
    "text_mean_value": Curve("Text's mean value", "#D55E00", "-.", "v"),
}
FORMS = ("norm_of_sum", "norm_of_block")
DERIVATIVES = {
    form: Curve(f"Derivative of the layer ({form})", "#009E73", (0, (5, 1, 1, 1, 1, 1)), "D") for form in FORMS
}


def draw_mixing(tables: Mapping[str, pd.DataFrame], path: Path) -> None:
    """`path`.png and .pdf: a row for each method, columns pretrained, fine-tuned and their difference.

    From the tables `ratios` and `ratios_by_seed`, else `mixing`; with the controls and the derivatives' level within a
    layer (`norm_of_sum`, in older tables `norm_of_block`) where `mixing_controls` and `derivative_levels` are there.
    """
    ratios = tables.get("ratios", tables.get("mixing"))
    if ratios is None:
        return
    columns = [each for each in TITLES if each in set(ratios["checkpoint"])]

    def draw(axes: Axes, method: str, checkpoint: str) -> None:
        _draw_panel(axes, tables, ratios, method, checkpoint)

    draw_grid(_methods(ratios), columns, draw, (TRUE, *CONTROLS.values(), *DERIVATIVES.values()), path)


def draw_grid(
    methods: Sequence[str],
    columns: Sequence[str],
    draw: Callable[[Axes, str, str], None],
    curves: Sequence[Curve],
    path: Path,
    in_line: int = 3,
) -> None:
    """`path`.png and .pdf: a row for each method, a column for each checkpoint.

    `curves` are those of the legend, so many `in_line`.
    """
    with paper_style(), mpl.rc_context({"axes.titlesize": 8}):
        figure = Figure(figsize=(TWO_COLUMNS, ROW_HEIGHT * len(methods) + 0.75), layout="constrained")
        grid = figure.subplots(len(methods), len(columns), sharex=True, squeeze=False)
        for row, method in zip(grid, methods, strict=True):
            for axes, checkpoint in zip(row, columns, strict=True):
                draw(axes, method, checkpoint)
            # The checkpoints have one scale, their difference its own.
            levels = row[: len(columns) - (DIFFERENCE in columns)]
            top = max((axes.get_ylim()[1] for axes in levels), default=1.0)
            for axes in levels:
                axes.set_ylim(0, min(top, 1.0))
                axes.tick_params(labelleft=axes is row[0])
            row[0].set_ylabel(f"{RATIOS[method].mark.label}\nmixing ratio", fontsize=7)
        for axes, checkpoint in zip(grid[0], columns, strict=True):
            axes.set_title(TITLES[checkpoint])
        for axes in grid[-1]:
            axes.set_xlabel("Layer")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        handles = {}
        for axes in grid.flat:
            handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        labels = [curve.label for curve in curves if curve.label in handles]
        figure.legend([handles[label] for label in labels], labels, loc="outside lower center", ncols=in_line)
        save_figure(figure, path, FORMATS, DPI)


def _methods(ratios: pd.DataFrame) -> list[str]:
    there = set(ratios["method"])
    left_out = "attnres_n" if "attnresln_n" in there else "attnresln_n"
    return [method for method in METHODS if method in there and method != left_out]


def _draw_panel(
    axes: Axes, tables: Mapping[str, pd.DataFrame], ratios: pd.DataFrame, method: str, checkpoint: str
) -> None:
    scale = 100 if checkpoint == DIFFERENCE else 1
    if checkpoint == DIFFERENCE:
        axes.axhline(0, color="0.7", linewidth=0.5, zorder=0)
    for control, curve in CONTROLS.items():
        draw_curve(axes, _of_control(tables, control, method, checkpoint), curve, scale)
    if method in BESIDE_DERIVATIVE:
        form, level = _of_derivative(tables, checkpoint)
        draw_curve(axes, level, DERIVATIVES[form], scale)
    by_seed = tables.get("ratios_by_seed", pd.DataFrame(columns=["seed", "checkpoint", "layer", "method", "mean"]))
    own = by_seed[(by_seed["checkpoint"] == checkpoint) & (by_seed["method"] == method)]
    for _, rows in own.groupby("seed"):
        axes.plot(rows["layer"], scale * rows["mean"], color=TRUE.color, linewidth=0.4, alpha=0.7, zorder=3)
    rows = ratios[(ratios["checkpoint"] == checkpoint) & (ratios["method"] == method)]
    draw_curve(axes, rows, TRUE, scale)


def draw_curve(axes: Axes, rows: pd.DataFrame, curve: Curve, scale: int) -> None:
    """Means of `rows` by layer, with their intervals where they have some."""
    known = rows.dropna(subset="mean")
    if len(known):
        wide, shade = (1.4, 0.2) if curve is TRUE else (1.0, 0.1)
        if "ci_low" in known:
            ends = scale * known["ci_low"], scale * known["ci_high"]
            axes.fill_between(known["layer"], *ends, color=curve.color, alpha=shade, linewidth=0)
        axes.plot(
            known["layer"],
            scale * known["mean"],
            color=curve.color,
            linestyle=curve.line,
            marker=curve.marker,
            markersize=3,
            linewidth=wide,
            label=curve.label,
            zorder=4 if curve is TRUE else 2,
        )


def _of_control(tables: Mapping[str, pd.DataFrame], control: str, method: str, checkpoint: str) -> pd.DataFrame:
    """One model of random weights stands beside both checkpoints; it has no difference."""
    controls = tables.get("mixing_controls")
    if controls is None:
        return pd.DataFrame(columns=["layer", "mean"])
    rows = controls[(controls["control"] == control) & (controls["method"] == method)]
    if control == "random_weights":
        return rows[0:0] if checkpoint == DIFFERENCE else rows.drop_duplicates("layer")
    if DIFFERENCE not in set(rows["checkpoint"]):
        rows = with_difference(rows[["checkpoint", "layer", "mean"]], "mean")
    return rows[rows["checkpoint"] == checkpoint]


def _of_derivative(tables: Mapping[str, pd.DataFrame], checkpoint: str) -> tuple[str, pd.DataFrame]:
    """Return the first of `FORMS` that the tables have, and its level within each layer."""
    levels = tables.get("derivative_levels_of_reviews", tables.get("derivative_levels"))
    if levels is None:
        return FORMS[0], pd.DataFrame(columns=["layer", "mean"])
    form = next(each for each in FORMS if each in set(levels["form"]))
    chosen = (levels["reference"] == "layer_input") & (levels["form"] == form)
    return form, levels[chosen & (levels["checkpoint"] == checkpoint)]

"""Curves by layer, each labelled at its end: mixing ratios, and where a layer's steps turn a vector."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnmix.core.names import Mark
from attnmix.core.options import RenderParameters
from attnmix.figures.label_placement import CurveEnd, label_curves
from attnmix.figures.labels import CHECKPOINTS, STEP_MARKS, STEP_MEASURES
from attnmix.figures.style import ONE_COLUMN, TWO_COLUMNS, darken_for_contrast, save_figure
from attnmix.measures.ratios import RATIOS

SHOWN_STEP_MEASURES = ("cosine_input", "cosine_previous")
LABEL_CHARACTERS, LABEL_SIZE = 22, 6  # in a line; points
LEFT, LABELS, HEAD, FOOT, GAP = 0.45, 1.05, 0.25, 0.42, 0.32  # inches; labels stand to the right of each panel
BETWEEN = LABELS + 0.1  # inches, from panel to panel
MAX_TICKS = 16


def draw_by_layer(mixing: pd.DataFrame, xlabel: str, path: Path, figures: RenderParameters) -> None:
    """Draw `mixing.csv`: a panel for each checkpoint, a curve for each ratio; call under `paper_style`."""
    by_checkpoint = mixing.groupby("checkpoint", sort=False)
    figure, panels = _panels(1, len(by_checkpoint), 1.95)
    marks = {name: ratio.mark for name, ratio in RATIOS.items()}
    for axes, (checkpoint, rows) in zip(panels[0], by_checkpoint, strict=True):
        axes.set(title=CHECKPOINTS[str(checkpoint)], xlabel=xlabel, ylim=(0, 1))
        label_curves(axes, _draw_curves(axes, rows, "method", marks), LABEL_SIZE)
    panels[0, 0].set_ylabel("Mixing ratio (95 % interval)")
    save_figure(figure, path, figures.formats, figures.dpi)


def draw_steps(steps: pd.DataFrame, xlabel: str, path: Path, figures: RenderParameters) -> None:
    """Draw the steps of `geometry.csv`, a row for each checkpoint and a panel for each of two cosines.

    Call it under `paper_style`.
    """
    by_checkpoint = steps.groupby("checkpoint", sort=False)
    figure, panels = _panels(len(by_checkpoint), len(SHOWN_STEP_MEASURES), 1.7)
    ends = {}
    for row, (checkpoint, rows) in zip(panels, by_checkpoint, strict=True):
        for axes, measure in zip(row, SHOWN_STEP_MEASURES, strict=True):
            ends[axes] = _draw_curves(axes, rows[rows["measure"] == measure], "step", STEP_MARKS)
            axes.axhline(0, color="0.7", linewidth=0.5, zorder=0)
            axes.set_title(f"{CHECKPOINTS[str(checkpoint)]}: {STEP_MEASURES[measure]}")
        row[0].set_ylabel("Cosine (95 % interval)")
    for axes in panels[-1]:
        axes.set_xlabel(xlabel)
    for axes, of_panel in ends.items():  # once the panels' common limits are known
        label_curves(axes, of_panel, LABEL_SIZE)
    save_figure(figure, path, figures.formats, figures.dpi)


def _panels(rows: int, columns: int, panel_height: float) -> tuple[Figure, Any]:
    width = ONE_COLUMN if columns == 1 else TWO_COLUMNS
    height = HEAD + rows * panel_height + (rows - 1) * GAP + FOOT
    figure = Figure(figsize=(width, height))
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    sides = {"left": LEFT / width, "right": 1 - LABELS / width, "bottom": FOOT / height, "top": 1 - HEAD / height}
    panel_width = (width - LEFT - LABELS - (columns - 1) * BETWEEN) / columns
    figure.subplots_adjust(**sides, wspace=BETWEEN / panel_width, hspace=GAP / panel_height)
    return figure, panels


def _draw_curves(axes: Axes, rows: pd.DataFrame, column: str, marks: Mapping[str, Mark]) -> list[CurveEnd]:
    """Draw a curve with its interval for each name in `column`, and return where the curves end."""
    known = rows.dropna(subset="mean")
    ends = []
    for name, mark in marks.items():
        part = known[known[column] == name]
        if part.empty:
            continue
        color = darken_for_contrast(mark.color)
        axes.plot(part["layer"], part["mean"], color=color, marker=mark.marker)
        axes.fill_between(part["layer"], part["ci_low"], part["ci_high"], color=color, alpha=0.25, linewidth=0)
        label = fill(mark.label, LABEL_CHARACTERS, break_on_hyphens=False)
        ends.append(CurveEnd(float(part["layer"].iloc[-1]), float(part["mean"].iloc[-1]), label, color))
    layers = sorted(rows["layer"].unique())
    axes.set_xticks(layers[:: -(-len(layers) // MAX_TICKS)])
    return ends

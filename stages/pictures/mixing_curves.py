"""Curves by layer, each with its name at its end: mixing ratios, and where a layer's steps turn a vector."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from stages.mixing.ratios import RATIOS
from stages.names import Mark
from stages.parameters import FiguresParameters
from stages.pictures.labels import End, label_ends
from stages.pictures.style import ONE_COLUMN, TWO_COLUMNS, on_white, save_figure
from stages.vocabulary import CHECKPOINTS, STEP_MARKS, STEP_MEASURES

STEPS_SHOWN = ("cosine_input", "cosine_previous")
NAME = 22  # characters in a line of a curve's name
NAME_SIZE = 6
MOST_TICKS = 16


def draw_by_layer(mixing: pd.DataFrame, axis: str, path: Path, figures: FiguresParameters) -> None:
    """`mixing.csv`: a panel for each checkpoint, a curve with its interval for each ratio; draw under `paper_style`."""
    by_checkpoint = mixing.groupby("checkpoint", sort=False)
    width = ONE_COLUMN if len(by_checkpoint) == 1 else TWO_COLUMNS
    figure = Figure(figsize=(width, 2.6), layout="constrained")
    panels = figure.subplots(1, len(by_checkpoint), sharey=True, squeeze=False)[0]
    marks = {name: ratio.mark for name, ratio in RATIOS.items()}
    ends = {}
    for axes, (checkpoint, rows) in zip(panels, by_checkpoint, strict=True):
        ends[axes] = _draw_curves(axes, rows, "method", marks)
        axes.set(title=CHECKPOINTS[str(checkpoint)], xlabel=axis, ylim=(0, 1))
    panels[0].set_ylabel("Mixing ratio (95 % interval)")
    label_ends(figure, ends, NAME_SIZE)
    save_figure(figure, path, figures.formats, figures.dpi)


def draw_steps(steps: pd.DataFrame, axis: str, path: Path, figures: FiguresParameters) -> None:
    """`steps.csv`: a row for each checkpoint, a panel for each of two cosines; draw under `paper_style`."""
    by_checkpoint = steps.groupby("checkpoint", sort=False)
    figure = Figure(figsize=(TWO_COLUMNS, 2.1 * len(by_checkpoint) + 0.2), layout="constrained")
    grid = figure.subplots(len(by_checkpoint), len(STEPS_SHOWN), sharex=True, sharey=True, squeeze=False)
    ends = {}
    for row, (checkpoint, rows) in zip(grid, by_checkpoint, strict=True):
        for axes, measure in zip(row, STEPS_SHOWN, strict=True):
            ends[axes] = _draw_curves(axes, rows[rows["measure"] == measure], "step", STEP_MARKS)
            axes.axhline(0, color="0.7", linewidth=0.5, zorder=0)
            axes.set_title(f"{CHECKPOINTS[str(checkpoint)]}: {STEP_MEASURES[measure]}")
        row[0].set_ylabel("Cosine (95 % interval)")
    for axes in grid[-1]:
        axes.set_xlabel(axis)
    label_ends(figure, ends, NAME_SIZE)
    save_figure(figure, path, figures.formats, figures.dpi)


def _draw_curves(axes: Axes, rows: pd.DataFrame, column: str, marks: Mapping[str, Mark]) -> list[End]:
    """A curve with its interval for each name in `column`, over the layers that have values, and where it ends."""
    known = rows.dropna(subset="mean")
    ends = []
    for name, mark in marks.items():
        part = known[known[column] == name]
        if part.empty:
            continue
        color = on_white(mark.color)
        axes.plot(part["layer"], part["mean"], color=color, marker=mark.marker, label=mark.label)
        axes.fill_between(part["layer"], part["ci_low"], part["ci_high"], color=color, alpha=0.25, linewidth=0)
        label = fill(mark.label, NAME, break_on_hyphens=False)
        ends.append(End(float(part["layer"].iloc[-1]), float(part["mean"].iloc[-1]), label, color))
    layers = sorted(rows["layer"].unique())
    axes.set_xticks(layers[:: -(-len(layers) // MOST_TICKS)])
    return ends

"""The figure of experiments: mixing ratios by layer before and after fine-tuning, a column for each setting."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from attnmix.figures.labels import CHECKPOINTS
from attnmix.figures.style import TWO_COLUMNS, paper_style, printable, save_figure
from attnmix.measures.ratios import RATIOS

DRAWN = ("attn_n", "attnres_n", "attnresln_n", "layer_n")
LOOKS = {"pretrained": ("#0072B2", "o"), "finetuned": ("#D55E00", "s")}  # Okabe and Ito's colours
PANEL_HEIGHT = 1.9  # inches


def draw_ratios(table: pd.DataFrame, path: Path) -> None:
    """Save `path`.png and .pdf of a table of `over_seeds`: means and intervals, a row for each method of `DRAWN`."""
    methods = [method for method in DRAWN if method in set(table["method"])] or list(table["method"].unique())
    settings = list(table["setting"].unique())
    with paper_style(), mpl.rc_context({"axes.titlesize": 7}):
        size = TWO_COLUMNS * max(1.0, len(settings) / 4), PANEL_HEIGHT * len(methods) + 0.5
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(len(methods), len(settings), sharex=True, sharey="row", squeeze=False)
        for row, method in zip(panels, methods, strict=True):
            row[0].set_ylabel(f"{RATIOS[method].mark.label}\nmixing ratio", fontsize=7)
            for axes, setting in zip(row, settings, strict=True):
                rows = table[(table["method"] == method) & (table["setting"] == setting)]
                for checkpoint, (color, marker) in LOOKS.items():
                    curve = rows[rows["checkpoint"] == checkpoint].set_index("layer")
                    label = CHECKPOINTS[checkpoint]
                    axes.plot(curve.index, curve["mean"], color=color, marker=marker, markersize=3, label=label)
                    axes.fill_between(curve.index, curve["ci_low"], curve["ci_high"], color=color, alpha=0.2, lw=0)
        for axes, setting in zip(panels[0], settings, strict=True):
            axes.set_title(printable(setting).replace(", ", "\n"))
        for axes in panels[-1]:
            axes.set_xlabel("Layer")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        panels[0, 0].legend()
        save_figure(figure, path, ["png", "pdf"], 200)

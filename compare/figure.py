"""The figure: a row for each method, a column for each checkpoint, a curve for each group of experiments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes

from attnmix.figures.style import printable
from study.aggregate import DIFFERENCE
from study.figure import TITLES, Curve, draw_curve, draw_grid

# Okabe and Ito's colours; line and marker tell the curves apart without them, and more groups than colours.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", "-.", ":")
LEGEND = 100  # characters in a line
MARKERS = ("o", "s", "^", "D", "v")


def draw(table: pd.DataFrame, methods: Sequence[str], path: Path) -> None:
    """`path`.png and .pdf of the means over seeds `table`, of the `methods`."""
    looks = zip(cycle(COLOURS), cycle(LINES), cycle(MARKERS), strict=False)
    curves = {
        group: Curve(printable(str(group)), *look) for group, look in zip(table["group"].unique(), looks, strict=False)
    }

    def panel(axes: Axes, method: str, checkpoint: str) -> None:
        scale = 100 if checkpoint == DIFFERENCE else 1
        if scale > 1:
            axes.axhline(0, color="0.7", linewidth=0.5, zorder=0)
        rows = table[(table["method"] == method) & (table["checkpoint"] == checkpoint)]
        for group, of_group in rows.groupby("group", sort=False):
            draw_curve(axes, of_group, curves[group], scale)

    columns = [each for each in TITLES if each in set(table["checkpoint"])]
    longest = max(len(curve.label) for curve in curves.values())
    draw_grid(methods, columns, panel, list(curves.values()), path, LEGEND // (longest + 8) or 1)

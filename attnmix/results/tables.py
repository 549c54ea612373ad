"""Tables of means by measure and layer, with intervals over texts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.statistics import BOOTSTRAP_SAMPLES, Resampled, Sums, resample
from attnmix.measures.engine import SEED
from attnmix.results.measure_names import CLASS_SHARE_PERMUTED, OWN_SHARE, is_share

ALL_LAYERS = "all"
LESS = "less"  # separator between a ratio and the subtracted control
MIN_INTERVAL_TEXTS = 8  # bootstrap intervals over fewer texts are unreliable
LATEX_CHARACTERS = {
    "_": r"\_",
    "%": r"\%",
    "&": r"\&",
    "#": r"\#",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
INTERVAL_COLUMNS = ("mean", "ci_low", "ci_high")
SAMPLE_COLUMNS = ("texts", "tokens")
MEAN_COLUMNS = (*INTERVAL_COLUMNS, *SAMPLE_COLUMNS)
DIFFERENCE_COLUMNS = (
    "ratio_minus_control",
    "ratio_minus_control_low",
    "ratio_minus_control_high",
    "ratio_minus_control_simultaneous_low",
    "ratio_minus_control_simultaneous_high",
)


class Cell(NamedTuple):
    """The measure and the layer of a row in a table of means. The layer is `all` for the mean over layers."""

    measure: str
    layer: int | str


def is_own_share(measure: str) -> bool:
    """Return True if `measure` is the name of an own share, for any kind of donor."""
    return measure.startswith(OWN_SHARE)


def pack_cells(totals: Mapping[str, Sums]) -> tuple[list[Cell], Sums]:
    """Return the cells of a table of the measures in `totals`, and each text's sum in each cell `[texts, cells]`.

    A cell is a pair of measure and layer. The first cell of a measure is its mean over layers; the next cells are its
    layers. `own_share` has no mean over layers, because it is cumulative from the input. `totals` contains the sums
    `[N, L]` of each measure (N texts, L layers).
    """
    cells: list[Cell] = []
    values = []
    counts = []
    for measure, sums in totals.items():
        values_NL = sums.values
        counts_NL = np.broadcast_to(sums.counts, values_NL.shape)
        if not is_own_share(measure):
            cells.append(Cell(measure, ALL_LAYERS))
            values.append(values_NL.mean(1, keepdims=True))
            # The same tokens of a text are measured in all layers, so the counts of the first layer apply to the mean.
            first_layer_counts_N1 = counts_NL[:, :1]
            counts.append(first_layer_counts_N1)
        layers = values_NL.shape[1]
        for layer in range(1, layers + 1):
            cells.append(Cell(measure, layer))
        values.append(values_NL)
        counts.append(counts_NL)
    all_values = np.concatenate(values, axis=1)
    all_counts = np.concatenate(counts, axis=1)
    return cells, Sums(all_values, all_counts)


def resample_means(totals: Sums) -> Resampled:
    """Return the means over texts and their bootstrap samples; each sample has the same texts for every model.

    `totals` contains sums `[texts, cells]` and their counts; a cell is a pair of measure and layer.
    """
    counts = np.broadcast_to(totals.counts, totals.values.shape)
    return resample(totals.values, counts, BOOTSTRAP_SAMPLES, SEED)


def mean_table(totals: Mapping[str, Sums]) -> pd.DataFrame:
    """Return a table of the mean of each measure by layer: `layer, measure, mean, ci_low, ci_high, texts, tokens`.

    The rows are sorted by layer, then by the order of the measures in `totals`.
    """
    table = _tabulate_cells(totals)
    by_layer = table[table["layer"] != ALL_LAYERS].astype({"layer": int})
    rank = {measure: index for index, measure in enumerate(totals)}
    by_layer["rank"] = by_layer["measure"].map(rank)
    by_layer = by_layer.sort_values(["layer", "rank"])
    columns = ["layer", "measure", *MEAN_COLUMNS]
    return by_layer[columns].reset_index(drop=True)


def _tabulate_cells(totals: Mapping[str, Sums]) -> pd.DataFrame:
    """Return a row for each cell of the measures in `totals`: its measure and layer, and the `MEAN_COLUMNS`."""
    cells, cell_totals = pack_cells(totals)
    means = resample_means(cell_totals)
    return pd.DataFrame(cells).assign(**mean_columns(means))


def control_table(totals: Mapping[str, Sums], differences: Mapping[str, Sums]) -> pd.DataFrame:
    """Return a row for each control and layer: its mean with an interval, the `DIFFERENCE_COLUMNS` and the sample size.

    Args:
        totals: The sums of each control.
        differences: The sums of the original ratio minus each control. Controls that are not ratios are missing here;
            the table has rows for them, with NaN in `DIFFERENCE_COLUMNS`.
    """
    table = _tabulate_cells(totals)
    table = table.merge(_tabulate_differences(differences), how="left", on=["measure", "layer"])
    order = ["measure", "layer", *INTERVAL_COLUMNS, *DIFFERENCE_COLUMNS, *SAMPLE_COLUMNS]
    return table[order].rename(columns={"measure": "control"})


def _tabulate_differences(differences: Mapping[str, Sums]) -> pd.DataFrame:
    """Return a row for each measure and layer in `differences`, with the `DIFFERENCE_COLUMNS`.

    These columns are the mean over texts, its pointwise interval, and its simultaneous interval for all rows.
    """
    if not differences:
        return pd.DataFrame(columns=["measure", "layer", *DIFFERENCE_COLUMNS])
    cells, cell_totals = pack_cells(differences)
    means = resample_means(cell_totals)
    pointwise = means.interval()
    simultaneous = means.simultaneous()
    values = (means.mean, pointwise.low, pointwise.high, simultaneous.low, simultaneous.high)
    columns = dict(zip(DIFFERENCE_COLUMNS, values, strict=True))
    return pd.DataFrame(cells).assign(**columns)


def mean_columns(means: Resampled) -> dict[str, Any]:
    """Return the columns `MEAN_COLUMNS`: means with pointwise intervals, numbers of texts and mean text lengths."""
    interval = means.interval()
    texts = means.documents.astype(int)
    has_interval = texts >= MIN_INTERVAL_TEXTS
    return {
        "mean": means.mean,
        "ci_low": np.where(has_interval, interval.low, np.nan),
        "ci_high": np.where(has_interval, interval.high, np.nan),
        "texts": texts,
        "tokens": mean_lengths(means),
    }


def mean_lengths(means: Resampled) -> npt.NDArray[np.float64]:
    """Return the number of tokens per text in each cell of `means`, averaged over the texts of the cell, `[cells]`.

    The number is NaN for cells in which every text counts once, regardless of its length (class shares).
    """
    counts = np.asarray(means.counts)
    counts_texts_once = counts == means.documents  # numbers of texts instead of tokens
    lengths = counts / np.maximum(means.documents, 1)
    return np.where(counts_texts_once, np.nan, lengths)


def preferred_cells(cells: Sequence[Cell], ratio: str) -> list[Cell]:
    """Return the cells of the most important rows of a comparison, in the order of `Comparison.rows`.

    These cells are the own share after the last layer, and the means over layers of `ratio`, of its differences from
    controls, and of the measured `SHARES`.
    """
    own_share_by_layer = [cell for cell in cells if cell.measure == OWN_SHARE]
    preferred = own_share_by_layer[-1:]  # the last layer; empty if the own share was not measured
    for cell in cells:
        if cell.layer != ALL_LAYERS:
            continue
        is_difference = cell.measure.startswith(f"{ratio} {LESS} ")  # the ratio minus a control
        is_measured_share = is_share(cell.measure) and cell.measure != CLASS_SHARE_PERMUTED
        if cell.measure == ratio or is_difference or is_measured_share:
            preferred.append(cell)
    return preferred


def layer_table(layers: Sequence[int | str], means: Resampled) -> pd.DataFrame:
    """Return a row for each of the `means`, with the columns `layer, mean, ci_low, ci_high, texts, tokens`."""
    return pd.DataFrame({"layer": layers, **mean_columns(means)})


def format_markdown(table: pd.DataFrame) -> str:
    """Return a table of strings in Markdown."""
    names = list(table.columns)
    separators = ["---"] * len(names)
    rows = table.to_numpy().tolist()
    lines = []
    for cells in [names, separators, *rows]:
        joined_cells = " | ".join(cells)
        lines.append(f"| {joined_cells} |")
    return "\n".join(lines)


def format_latex(table: pd.DataFrame) -> str:
    """Return a table of strings as a LaTeX `tabular`."""
    names = list(table.columns)
    rows = table.to_numpy().tolist()
    alignment = "l" * len(names)
    lines = [f"\\begin{{tabular}}{{{alignment}}}", _format_latex_row(names), r"\hline"]
    for cells in rows:
        lines.append(_format_latex_row(cells))
    lines.append(r"\end{tabular}")
    return "\n".join(lines)


def _format_latex_row(cells: Sequence[str]) -> str:
    """Return a row of a LaTeX `tabular`, with escaped cells."""
    escaped = [escape_latex(cell) for cell in cells]
    return " & ".join(escaped) + r" \\"


def escape_latex(text: str) -> str:
    """Return `text` with special characters of LaTeX escaped, and the minus signs of numbers in math mode."""
    characters = [LATEX_CHARACTERS.get(character, character) for character in text]
    escaped = "".join(characters)
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", escaped)


def format_interval(text: str, low: float, high: float) -> str:
    """Return `text` followed by the bounds of an interval, or only `text` if the bounds are NaN."""
    if np.isnan(low):
        return text
    return f"{text} [{low:+.3f}, {high:+.3f}]"

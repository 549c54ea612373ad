"""Which csv files of the experiments are taken together, and the tables made of them.

Every csv that the experiments have becomes `docs/study/<output>.csv`; what they lack is left out and named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from attnmix.core.errors import InputError
from attnmix.measures.ratios import RATIOS
from study.aggregate import DIFFERENCE, correlations_over_seeds, means_of_seeds, over_seeds, reviews_over_seeds

DIGITS = 6

Read = Callable[[str], dict[int, pd.DataFrame]]
"""From a csv's name to that csv of every seed that has it."""


class SeedTable(NamedTuple):
    """A csv that has one value for each combination of keys: its interval is over seeds."""

    csv: str
    keys: tuple[str, ...]
    values: tuple[str, ...] = ("mean",)
    taken: Callable[..., pd.DataFrame] = over_seeds


class ReviewTable(NamedTuple):
    """A csv with a row for each review, of which each seed's mean is taken first."""

    csv: str
    output: str
    keys: tuple[str, ...]
    value: str = "mean"
    weight: str | None = None
    over: str | None = None  # the key over which a further table has the mean


_RATIO = ("checkpoint", "layer", "method")
SEED_TABLES = (
    SeedTable("mixing", _RATIO),
    SeedTable("mixing_by_class", (*_RATIO, "token_class")),
    SeedTable("mixing_weighted", ("checkpoint", "weight", "tokens_of", "layer", "method")),
    SeedTable("mixing_by_length", ("checkpoint", "length", "layer", "method")),
    SeedTable("mixing_controls", ("checkpoint", "control", "layer", "method")),
    SeedTable("mixing_controls_difference", ("checkpoint", "control", "layer", "method"), ("difference",)),
    SeedTable("mixing_by_head", ("checkpoint", "layer", "head")),
    SeedTable("mixing_from_input", _RATIO),
    SeedTable("derivative_levels", ("checkpoint", "reference", "layer", "form")),
    SeedTable("derivative_ratios", _RATIO),
    SeedTable("mixing_gradient", ("checkpoint", "reference", "layer", "method"), ("spearman",)),
    SeedTable("faithfulness_overall", ("method",), ("aopc", "above_random", "derivative_spearman")),
    SeedTable("margin_correlation", ("checkpoint", "predicted"), ("spearman", "given_length"), correlations_over_seeds),
    SeedTable("movement", ("layout", "layer", "step", "against", "measure")),
    SeedTable("geometry", ("checkpoint", "layer", "point", "measure")),
    SeedTable("attention_gain", ("checkpoint", "layer"), ("gain",)),
)
RATIO_REVIEWS = ReviewTable("mixing_by_review", "ratios", _RATIO, weight="tokens", over="layer")
REVIEW_TABLES = (
    RATIO_REVIEWS,
    ReviewTable(
        "derivative_levels_by_review",
        "derivative_levels_of_reviews",
        ("checkpoint", "reference", "layer", "form"),
        weight="tokens",
    ),
    ReviewTable(
        "mixing_gradient_by_review",
        "mixing_gradient_of_reviews",
        ("checkpoint", "reference", "layer", "method"),
        "spearman",
    ),
)


def accuracy(metrics: Mapping[int, dict[str, object]]) -> pd.DataFrame:
    """`reports/metrics/finetune.json` of each seed, a row for each."""
    rows = []
    for seed, values in metrics.items():
        test = values["test"]
        assert isinstance(test, dict)
        rows.append({"seed": seed, **test, "best_epoch": values["best_epoch"]})
    return pd.DataFrame(rows)


def make_tables(read: Read) -> tuple[dict[str, pd.DataFrame], list[str]]:
    """Every table by its output's name, and why a declared csv gave none.

    A csv of another form than declared is left out with its reason: the others are still worth their hours.
    """
    tables: dict[str, pd.DataFrame] = {}
    left_out = []
    for each in (*SEED_TABLES, *REVIEW_TABLES):
        frames = read(each.csv)
        try:
            if not frames:
                raise InputError(f"{each.csv}.csv is in none of the experiments")
            tables |= _of_seeds(each, frames) if isinstance(each, SeedTable) else _of_reviews(each, frames)
        except InputError as error:
            left_out.append(str(error))
    return {name: table.round(DIGITS) for name, table in tables.items()}, left_out


def _of_seeds(declared: SeedTable, frames: Mapping[int, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    return {declared.csv: declared.taken(declared.csv, frames, declared.keys, declared.values)}


def _of_reviews(declared: ReviewTable, frames: Mapping[int, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    arguments = (declared.csv, frames, declared.keys, declared.value, declared.weight)
    made = {declared.output: reviews_over_seeds(*arguments)}
    if declared.over:
        overall = reviews_over_seeds(*arguments, over=declared.over)
        made[f"{declared.output}_overall"] = overall
    if declared is RATIO_REVIEWS:
        made["ratios_by_seed"] = means_of_seeds(*arguments)
    return made


def markdown(tables: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    """The tables of `docs/study/README.md` by their markers' names; one whose csv is not there says so."""
    made = {
        "accuracy": ("accuracy", _accuracy),
        "overall": ("ratios_overall", _overall),
        "by_layer": ("ratios", _by_layer),
        "controls": ("mixing_controls", _controls),
        "levels": ("derivative_levels", _levels),
        "faithfulness": ("faithfulness_overall", _faithfulness),
        "margin": ("margin_correlation", _margin),
        "movement": ("movement", _movement),
    }
    absent = "Not in these experiments: their pipeline did not write it.\n"
    return {name: make(tables[csv]) if csv in tables else absent for name, (csv, make) in made.items()}


def _accuracy(table: pd.DataFrame) -> str:
    f1, called = ("macro_f1", "macro F1") if "macro_f1" in table else ("f1", "F1")  # the latter in older experiments
    rows = [
        (
            str(row.seed),
            f"{100 * row.accuracy:.1f} [{100 * row.accuracy_ci_low:.1f}, {100 * row.accuracy_ci_high:.1f}]",
            f"{100 * getattr(row, f1):.1f}",
            f"{row.loss:.3f}",
            str(row.best_epoch),
        )
        for row in table.itertuples()
    ]
    frames = {row.seed: pd.DataFrame({"all": [0], "accuracy": [row.accuracy]}) for row in table.itertuples()}
    mean = over_seeds("accuracy", frames, ["all"], ["accuracy"])
    rows.append(("mean", _percent(mean.iloc[0]), f"{100 * table[f1].mean():.1f}", f"{table['loss'].mean():.3f}", ""))
    return table_of(("seed", "test accuracy, %", f"{called}, %", "loss", "epoch kept"), rows)


def _overall(table: pd.DataFrame) -> str:
    cells = table.set_index(["method", "checkpoint"])
    rows = []
    for method in cells.index.unique("method"):
        label = RATIOS[method].mark.label if method in RATIOS else ""
        parts = [_percent(cells.loc[(method, each)], each == "difference") for each in _checkpoints(table)]
        rows.append((f"`{method}`", label, *parts))
    return table_of(("column", "name", *map(_unit, _checkpoints(table))), rows)


def _by_layer(table: pd.DataFrame) -> str:
    return _wide(table, ("method", "checkpoint"))


def _controls(table: pd.DataFrame) -> str:
    return _wide(table, ("control", "method", "checkpoint"))


def _levels(table: pd.DataFrame) -> str:
    return _wide(table, ("reference", "form", "checkpoint"))


def _wide(table: pd.DataFrame, keys: Sequence[str]) -> str:
    """A row for each combination of keys, a column for each layer, in per cent; differences in percentage points.

    The mean over seeds, with half the width of its interval where it is a difference.
    """
    layers = sorted(table["layer"].unique())
    rows = []
    for key, group in table.groupby(list(keys), sort=False):
        by_layer = group.set_index("layer")
        cells = [_cell(by_layer.loc[layer], DIFFERENCE in key) if layer in by_layer.index else "" for layer in layers]
        rows.append((*(f"`{part}`" for part in key), *cells))
    return table_of((*keys, *map(str, layers)), rows)


def _faithfulness(table: pd.DataFrame) -> str:
    return _quantities(table, ["method"])


def _margin(table: pd.DataFrame) -> str:
    return _quantities(table, ["checkpoint", "predicted"])


def _quantities(table: pd.DataFrame, keys: Sequence[str]) -> str:
    cells = table.set_index([*keys, "quantity"])
    quantities = list(dict.fromkeys(table["quantity"]))
    rows = [
        (*(f"`{name}`" for name in names), *(_number(cells.loc[(*names, each)]) for each in quantities))
        for names in dict.fromkeys(table[list(keys)].itertuples(index=False, name=None))
    ]
    return table_of((*keys, *quantities), rows)


def _movement(table: pd.DataFrame) -> str:
    """The lowest and the highest of the layers' means over seeds; every step, a column for each layout."""
    layouts = list(dict.fromkeys(table["layout"]))
    rows = []
    for key, group in table.groupby(["step", "against", "measure"], sort=False):
        by_layout = group.dropna(subset="mean").groupby("layout")["mean"]
        low, high = by_layout.min(), by_layout.max()
        cells = [f"{low[each]:.2f} to {high[each]:.2f}" if each in low.index else "" for each in layouts]
        rows.append((*(f"`{part}`" for part in key), *cells))
    return table_of(("step", "against", "measure", *layouts), rows)


def _cell(row: pd.Series, signed: bool) -> str:
    if not signed:
        return f"{100 * row['mean']:.1f}"
    return f"{100 * row['mean']:+.1f} ± {100 * (row['ci_high'] - row['mean']):.1f}"


def _unit(checkpoint: str) -> str:
    return f"{checkpoint}, {'percentage points' if checkpoint == DIFFERENCE else '%'}"


def _checkpoints(table: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(table["checkpoint"]))


def _percent(row: pd.Series, signed: bool = False) -> str:
    sign = "+" if signed else ""
    mean, low, high = (100 * row[each] for each in ("mean", "ci_low", "ci_high"))
    return f"{mean:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]"


def _number(row: pd.Series) -> str:
    if pd.isna(row["mean"]):
        return ""
    if pd.isna(row["ci_low"]):  # one seed
        return f"{row['mean']:.2f}"
    # Correlations and differences of probabilities have no room beyond -1 and 1.
    return f"{row['mean']:.2f} [{max(row['ci_low'], -1):.2f}, {min(row['ci_high'], 1):.2f}]"


def table_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """As Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)

"""The csv files of measures of a sample of the documents: exchange and parts from the input, and derivatives."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from attnmix.core.statistics import BOOTSTRAP_SAMPLES, Doubles, Draws, Resampled
from attnmix.measures import exchange
from attnmix.measures.derivatives import FORMS, REFERENCES
from attnmix.measures.input_parts import QUANTITIES, RULES
from attnmix.measures.matrices import ROLLOUTS, with_rollouts
from attnmix.measures.mixing_tables import (
    INTERVAL,
    SIMULTANEOUS,
    TABLE_COLUMNS,
    DocumentRows,
    Labels,
    Mean,
    MeanTables,
    Totals,
    stored,
    table_rows,
)
from attnmix.measures.swaps import DONORS, SWAPS

SAME_MINUS_OTHER = "same_minus_other"
"""The label of the difference between the own shares with donors of the same and of another class."""
_TOTAL_EFFECTS = ("total_own", "total_others", "first_order_own")
"""Quantities that are divided by the squared displacement of all tokens, not by a number of tokens."""


def exchange_table(
    exchanged: Mapping[str, Sequence[Mapping[str, Totals]]], donors: Sequence[str], seed: int
) -> pd.DataFrame:
    """Return `exchange` from each checkpoint's documents, of which each has `exchange_sums`.

    Without documents it has no rows. The simultaneous intervals hold for all donors and levels of a quantity at once.
    The class part of the own share is the difference between the two kinds of donors.
    """
    documents = next(iter(exchanged.values()))
    if not documents:
        return pd.DataFrame(columns=TABLE_COLUMNS["exchange"])
    rows = {checkpoint: _stacked_totals(measured) for checkpoint, measured in exchanged.items()}
    levels = range(documents[0]["own_share"][0].shape[-1])
    tables = MeanTables(rows, Draws(len(documents), BOOTSTRAP_SAMPLES, seed))
    for quantity in exchange.QUANTITIES:
        labels = {"donor": donors, "quantity": [quantity], "layer": levels}
        more = _without_tokens if quantity in _TOTAL_EFFECTS else None
        mean = Mean("exchange", labels, stored(quantity), more=more, complete=False)
        means = tables.add(mean)
        if quantity == "own_share" and {exchange.SAME_CLASS, exchange.OTHER_CLASS} <= {*donors}:
            places = donors.index(exchange.SAME_CLASS), donors.index(exchange.OTHER_CLASS)
            tables.add_difference(mean, means, places, SAME_MINUS_OTHER)
    return tables.tables()["exchange"]


def parts_table(parts: Mapping[str, Sequence[Mapping[str, Doubles]]], seed: int) -> pd.DataFrame:
    """Return `parts` from each checkpoint's documents, whose arrays `by_token` `[quantities, levels, T]` go by rule.

    Without documents it has no rows. The simultaneous intervals hold for all quantities and levels of a rule at once.
    """
    documents = next(iter(parts.values()))
    if not documents:
        return pd.DataFrame(columns=TABLE_COLUMNS["parts"])
    rows = {checkpoint: _total_rows(measured, RULES) for checkpoint, measured in parts.items()}
    levels = range(documents[0][next(iter(RULES))].shape[1])
    tables = MeanTables(rows, Draws(len(documents), BOOTSTRAP_SAMPLES, seed))
    for rule in RULES:
        labels = {"rule": [rule], "quantity": QUANTITIES, "layer": levels}
        tables.add(Mean("parts", labels, stored(rule), complete=False))
    return tables.tables()["parts"]


def derivative_tables(
    derivatives: Mapping[str, Mapping[str, Mapping[str, Doubles]]],
    methods: Sequence[str],
    matrices: Sequence[str],
    seed: int,
) -> dict[str, pd.DataFrame]:
    """Return `derivatives` and `derivatives_by_review`, from what `DocumentMeasurer.derivatives` returns.

    `derivatives` has it by checkpoint and document; without documents the tables have no rows. The simultaneous
    intervals hold for all cells of a quantity at once.
    """
    documents = next(iter(derivatives.values()))
    if not documents:
        return {name: pd.DataFrame(columns=TABLE_COLUMNS[name]) for name in ("derivatives", "derivatives_by_review")}
    first = next(iter(documents.values()))
    layers = range(1, len(first["ratio"]) + 1)
    axes = _derivative_axes(layers, methods, with_rollouts(matrices))
    rows: dict[str, DocumentRows] = {}
    for checkpoint, by_name in derivatives.items():
        rows[checkpoint] = _total_rows(list(by_name.values()), axes)
    tables = MeanTables(rows, Draws(len(documents), BOOTSTRAP_SAMPLES, seed))
    for quantity, labels in axes.items():
        mean = Mean("derivatives", {"quantity": [quantity], **labels}, stored(quantity))
        if quantity == "agreement":
            mean = mean._replace(checkpoints=tuple(derivatives), more=_correlations)
        tables.add(mean)
    return {**tables.tables(), "derivatives_by_review": _by_review(rows, list(documents), axes)}


def _by_review(rows: Mapping[str, DocumentRows], documents: Sequence[str], axes: Mapping[str, Labels]) -> pd.DataFrame:
    """Return `derivatives_by_review`: the mean over the tokens of each document."""
    frames = []
    for checkpoint, quantity in product(rows, ("level", "swap", "agreement")):
        sums, tokens = stored(quantity)(rows[checkpoint])
        means = np.divide(sums, tokens, out=np.full_like(sums, np.nan), where=tokens > 0)
        labels = {"document": documents, "quantity": [quantity], **axes[quantity]}
        frames.append(table_rows("derivatives_by_review", checkpoint, labels, {"mean": means, "tokens": tokens}))
    return pd.concat(frames)


def _derivative_axes(layers: range, methods: Sequence[str], matrices: Sequence[str]) -> dict[str, Labels]:
    """Return the labels along the axes of each quantity of `derivatives`."""
    rollouts = [name for name in matrices if name in ROLLOUTS]
    from_input = [*rollouts, *(f"derivative_{form}" for form in FORMS)]
    swaps = [f"{swap}_{donor}" for donor, swap in product(DONORS, SWAPS)]
    return {
        "level": {"reference": REFERENCES, "layer": layers, "method": FORMS},
        "swap": {"reference": ["layer_input"], "layer": layers, "method": swaps},
        "coherence": {"reference": [None], "layer": layers, "method": ["attn_n"]},
        "ratio": {"reference": [None], "layer": layers, "method": methods},
        "from_input": {"reference": [None], "layer": layers, "method": from_input},
        "agreement": {"reference": REFERENCES, "layer": layers, "method": [*methods, *matrices]},
    }


def _total_rows(documents: Sequence[Mapping[str, Doubles]], names: Iterable[str]) -> DocumentRows:
    """Return sums over the tokens and counts, as `stored` reads them, of the named arrays `[..., T]` of documents."""
    rows: DocumentRows = {}
    for name in names:
        sums, tokens = _token_totals([document[name] for document in documents])
        rows[name] = sums
        rows[f"{name}_counts"] = tokens
    return rows


def _stacked_totals(documents: Sequence[Mapping[str, Totals]]) -> DocumentRows:
    """Return the sums and counts of all documents, as `stored` reads them."""
    rows: DocumentRows = {}
    for name in documents[0]:
        sums, counts = zip(*(document[name] for document in documents), strict=True)
        rows[name] = np.stack(sums)
        rows[f"{name}_counts"] = np.stack(counts)
    return rows


def _without_tokens(_checkpoint: str, means: Resampled) -> dict[str, Any]:
    """Return the column of token counts of means that are not over tokens."""
    return {"tokens": np.full(means.mean.shape, np.nan)}


def _token_totals(documents: Sequence[Doubles]) -> Totals:
    """Return sums over the tokens `[D, ...]` of arrays `[..., T]`, and numbers of those that are not NaN."""
    sums = [np.nansum(array, -1) for array in documents]
    tokens = [(~np.isnan(array)).sum(-1, dtype=np.float64) for array in documents]
    return np.stack(sums), np.stack(tokens)


def _correlations(_checkpoint: str, means: Resampled) -> dict[str, Any]:
    """Return the columns of correlations, which are no means over tokens."""
    columns: dict[str, Any] = dict(zip(INTERVAL, means.correlations(), strict=True))
    for name in ("tokens", *SIMULTANEOUS):
        columns[name] = np.full(means.mean.shape, np.nan)
    return columns

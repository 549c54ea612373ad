"""The tables of measures in a sample of the texts: exchange of tokens, parts from each input token, and derivatives."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from attnmix.core.names import (
    ALL_DONORS,
    OTHER_CLASS,
    OWN_SHARE,
    PARTS_RULE_NAMES,
    SAME_CLASS,
    SAME_MINUS_OTHER,
    TOTAL_EFFECTS,
)
from attnmix.core.statistics import BOOTSTRAP_SAMPLES, Draws, Resampled
from attnmix.measures import exchange
from attnmix.measures.derivatives import FORMS, REFERENCES
from attnmix.measures.input_parts import QUANTITIES
from attnmix.measures.matrices import ROLLOUTS, sort_matrices
from attnmix.measures.mixing_tables import (
    INTERVAL,
    SIMULTANEOUS,
    TABLE_COLUMNS,
    CorpusSums,
    Labels,
    Mean,
    MeanTables,
    table_rows,
)
from attnmix.measures.swaps import DONORS, SWAPS

_WITHOUT_TOKEN_COUNTS = ("total_own", "total_others", "first_order_own")
"""Quantities that are divided by the squared displacement after exchange of all tokens, not by a number of tokens."""
_QUANTITIES_BY_TEXT = ("level", "swap", "agreement")
"""Quantities in `derivatives_by_review`: shares of other tokens, ratios for exchanged inputs, and correlations."""


def exchange_table(exchanged: Mapping[str, CorpusSums], donors: Sequence[str], seed: int) -> pd.DataFrame:
    """Return the table `exchange` from sums `[texts, donors, levels]` by checkpoint and quantity.

    A donor is a text whose tokens replace those of a measured text. `donors` contains the kinds of donors; the kind
    `all` combines the others. The levels are the input of the first layer, and the output of each layer. If no text was
    measured, the table is empty. Rows without tokens are omitted (`complete=False`). In the rows of
    `_WITHOUT_TOKEN_COUNTS`, the column `tokens` is empty. Simultaneous intervals cover all donors and levels of a
    quantity.
    """
    first = next(iter(exchanged.values()))
    if not first:
        return pd.DataFrame(columns=TABLE_COLUMNS["exchange"])
    documents, _, levels = first["own_share"].values.shape
    tables = MeanTables(exchanged, Draws(documents, BOOTSTRAP_SAMPLES, seed))
    for quantity in exchange.QUANTITIES:
        labels = {"donor": donors, "quantity": [quantity], "layer": range(levels)}
        replace_columns = _leave_token_counts_empty if quantity in _WITHOUT_TOKEN_COUNTS else None
        mean = Mean("exchange", labels, sums=quantity, more=replace_columns, complete=False)
        means = tables.add(mean)
        if quantity == "own_share":
            _add_difference_of_classes(tables, mean, means, donors)
    return tables.tables()["exchange"]


def _add_difference_of_classes(
    tables: MeanTables, mean: Mean, means: Mapping[str, Resampled], donors: Sequence[str]
) -> None:
    """Add rows with `SAME_MINUS_OTHER`: means for donors of the same class minus means for donors of another class.

    `means` is the result of `tables.add(mean)`. There are no such rows if one of these kinds is not in `donors`.
    """
    if SAME_CLASS in donors and OTHER_CLASS in donors:
        minuend_and_subtrahend = (donors.index(SAME_CLASS), donors.index(OTHER_CLASS))
        tables.add_difference(mean, means, minuend_and_subtrahend, SAME_MINUS_OTHER)


def own_share_table(sums: Mapping[str, CorpusSums], draws: Draws) -> pd.DataFrame:
    """Return a table `exchange` of own shares and, if known for all checkpoints, total effects, for all donors.

    Both compare displacements of a token's vector after exchanges of tokens with those of donor texts
    (`attnmix.measures.exchange`). The donors are not distinguished by kind (`ALL_DONORS`). `sums` contains the sums
    `[texts, layers]` by checkpoint and quantity. Rows without tokens are omitted (`complete=False`). In the rows of
    total effects, the column `tokens` is empty.
    """
    first = next(iter(sums.values()))
    layers = first[OWN_SHARE].values.shape[-1]
    tables = MeanTables(sums, draws)
    for quantity in (OWN_SHARE, *TOTAL_EFFECTS):
        if all(quantity in by_quantity for by_quantity in sums.values()):
            labels = {"donor": [ALL_DONORS], "quantity": [quantity], "layer": range(1, layers + 1)}
            replace_columns = _leave_token_counts_empty if quantity in _WITHOUT_TOKEN_COUNTS else None
            tables.add(Mean("exchange", labels, sums=quantity, more=replace_columns, complete=False))
    return tables.tables()["exchange"]


def parts_table(parts: Mapping[str, CorpusSums], seed: int) -> pd.DataFrame:
    """Return the table `parts` from sums `[texts, quantities, levels]` by checkpoint and propagation rule.

    If no text was measured, the table is empty. Simultaneous intervals cover all quantities and levels of a rule.
    """
    first = next(iter(parts.values()))
    if not first:
        return pd.DataFrame(columns=TABLE_COLUMNS["parts"])
    rules = [rule for rule in PARTS_RULE_NAMES if rule in first]
    documents, _, levels = first[rules[0]].values.shape
    tables = MeanTables(parts, Draws(documents, BOOTSTRAP_SAMPLES, seed))
    for rule in rules:
        labels = {"rule": [rule], "quantity": QUANTITIES, "layer": range(levels)}
        tables.add(Mean("parts", labels, sums=rule, complete=False))
    return tables.tables()["parts"]


def derivative_tables(
    derivatives: Mapping[str, CorpusSums],
    documents: Sequence[str],
    methods: Sequence[str],
    matrices: Sequence[str],
    seed: int,
) -> dict[str, pd.DataFrame]:
    """Return the tables `derivatives` and `derivatives_by_review` by name.

    The first table contains means over all texts, and the second table means of each text. The argument
    `derivatives[checkpoint][quantity]` contains the sums `[texts, ...]` over the tokens of each text; the quantities
    are described in `DocumentMeasurer.derivatives`. `documents`, `methods` and `matrices` contain the names of texts,
    ratios and matrices. If no text was measured, the tables are empty.
    """
    if not documents:
        return {name: pd.DataFrame(columns=TABLE_COLUMNS[name]) for name in ("derivatives", "derivatives_by_review")}
    first = next(iter(derivatives.values()))
    number_of_layers = first["ratio"].values.shape[1]  # [texts, layers, methods]
    layers = range(1, number_of_layers + 1)
    labels_by_quantity = _label_derivative_axes(layers, methods, sort_matrices(matrices))
    tables = MeanTables(derivatives, Draws(len(documents), BOOTSTRAP_SAMPLES, seed))
    for quantity, labels in labels_by_quantity.items():
        tables.add(_declare_derivative_mean(quantity, labels, checkpoints=tuple(derivatives)))
    means_by_text = _tabulate_by_text(derivatives, documents, labels_by_quantity)
    return {**tables.tables(), "derivatives_by_review": means_by_text}


def _declare_derivative_mean(quantity: str, labels: Labels, checkpoints: Sequence[str]) -> Mean:
    """Return the `Mean` of a quantity over texts, for the table `derivatives`.

    Simultaneous intervals cover all cells of a quantity. `agreement` consists of rank correlations of other methods
    with derivatives. Its rows contain neither simultaneous intervals nor numbers of tokens, and there are no rows with
    its difference between checkpoints.
    """
    all_labels = {"quantity": [quantity], **labels}
    if quantity == "agreement":
        # A list of checkpoints omits their difference, and `more` replaces the intervals and the numbers of tokens.
        return Mean("derivatives", all_labels, sums=quantity, checkpoints=checkpoints, more=_create_correlation_columns)
    return Mean("derivatives", all_labels, sums=quantity)  # for all checkpoints and their difference


def _tabulate_by_text(
    derivatives: Mapping[str, CorpusSums], documents: Sequence[str], labels_by_quantity: Mapping[str, Labels]
) -> pd.DataFrame:
    """Return the table `derivatives_by_review`, with means over the tokens of each text.

    `derivatives` contains the sums `[texts, ...]` of measures based on derivatives, by checkpoint and quantity.
    `labels_by_quantity` is the result of `_label_derivative_axes`.
    """
    frames = []
    for checkpoint, quantity in product(derivatives, _QUANTITIES_BY_TEXT):
        sums = derivatives[checkpoint][quantity]
        labels = {"document": documents, "quantity": [quantity], **labels_by_quantity[quantity]}
        columns = {"mean": sums.means(), "tokens": sums.counts}
        frames.append(table_rows("derivatives_by_review", checkpoint, labels, columns))
    return pd.concat(frames)


def _label_derivative_axes(layers: range, methods: Sequence[str], matrices: Sequence[str]) -> dict[str, Labels]:
    """Return, for each quantity in `derivatives`, the values of the label columns: reference, layer and method.

    Each column corresponds to one axis of the quantity's sums, and its values to the indices along this axis. The axis
    can be missing for a column with a single value. `REFERENCES` are the vectors with respect to which layer outputs
    are differentiated. `FORMS` are the ways in which the derivatives with respect to the other tokens are combined into
    one norm.
    """
    rollouts = [name for name in matrices if name in ROLLOUTS]
    from_input = [*rollouts, *(f"derivative_{form}" for form in FORMS)]
    # `SWAPS` are ratios for exchanges of layer inputs with those of a donor text; `DONORS` are kinds of donor texts.
    swaps = [f"{swap}_{donor}" for donor, swap in product(DONORS, SWAPS)]
    return {
        "level": {"reference": REFERENCES, "layer": layers, "method": FORMS},
        "swap": {"reference": ["layer_input"], "layer": layers, "method": swaps},
        # The coherence is that of the contributions F_ij, which are also the basis of the ratio `attn_n`.
        "coherence": {"reference": [None], "layer": layers, "method": ["attn_n"]},
        "ratio": {"reference": [None], "layer": layers, "method": methods},
        "from_input": {"reference": [None], "layer": layers, "method": from_input},
        "agreement": {"reference": REFERENCES, "layer": layers, "method": [*methods, *matrices]},
    }


def _leave_token_counts_empty(_checkpoint: str, means: Resampled) -> dict[str, Any]:
    """Return an empty column `tokens` that replaces the counts of means whose divisor is not a number of tokens."""
    return {"tokens": np.full(means.mean.shape, np.nan)}


def _create_correlation_columns(_checkpoint: str, means: Resampled) -> dict[str, Any]:
    """Return columns that replace those of other means: intervals of correlations, no counts of tokens.

    The columns of simultaneous intervals are also empty.
    """
    columns: dict[str, Any] = dict(zip(INTERVAL, means.clipped_interval(), strict=True))
    for name in ("tokens", *SIMULTANEOUS):
        columns[name] = np.full(means.mean.shape, np.nan)
    return columns

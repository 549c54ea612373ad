"""Arrangement of table rows by token of the page.

Shapes: N rows of a table, T tokens of the page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.names import Site


def find_tokens(rows: pd.DataFrame, tokens: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Return the index `[N]` into `tokens` (of complete texts) for each of the `rows`; -1 if the token is missing."""
    first_tokens = tokens[tokens["position"] == 0]
    documents = pd.Index(first_tokens["document"])
    document_N = documents.get_indexer(pd.Index(rows["document"]))
    position_N = rows["position"].to_numpy(np.int64)
    token_N = first_tokens.index.to_numpy()[document_N] + position_N
    return np.where(document_N >= 0, token_N, -1)


def find_sites(rows: pd.DataFrame, sites: Sequence[Site]) -> npt.NDArray[np.int64]:
    """Return the index `[N]` into `sites` for each of the `rows`; -1 if the site is missing."""
    pairs = pd.MultiIndex.from_frame(rows[["layer", "point"]])
    return pd.MultiIndex.from_tuples(sites).get_indexer(pairs)


def arrange_by_token(
    rows: pd.DataFrame,
    tokens: pd.DataFrame,
    place_N: npt.NDArray[np.int64],
    places: int,
    columns: Sequence[str],
) -> npt.NDArray[np.float64]:
    """Return the `columns` of the N `rows` as `[columns, places, tokens]`; NaN for missing rows.

    `place_N` is the index of each row along `places`, or -1.
    """
    token_N = find_tokens(rows, tokens)
    is_shown_N = (token_N >= 0) & (place_N >= 0)
    value_NC = rows[list(columns)].to_numpy(float)
    values = np.full((len(columns), places, len(tokens)), np.nan)
    values[:, place_N[is_shown_N], token_N[is_shown_N]] = value_NC[is_shown_N].T
    return values


def arrange_column(rows: pd.DataFrame, tokens: pd.DataFrame, column: str) -> npt.NDArray[np.float64]:
    """Return one value per token `[tokens]`, for rows of one layer."""
    one_place_N = np.zeros(len(rows), int)
    values = arrange_by_token(rows, tokens, one_place_N, 1, [column])
    value_T: npt.NDArray[np.float64] = values[0, 0]
    return value_T

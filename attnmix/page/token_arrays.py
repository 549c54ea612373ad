"""Functions that arrange the rows of a table as an array with an axis for the tokens of the page.

Shapes: N rows of a table, T tokens of the page.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.names import Site


def find_tokens(rows: pd.DataFrame, tokens: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Return, for each of the N `rows`, the index in `tokens` of its token; -1 if its text is not in `tokens`.

    Both tables have the columns `document` and `position`. `tokens` contains complete texts, so that a token's index is
    the index of the text's first token plus the token's position.
    """
    first_tokens = tokens[tokens["position"] == 0]
    documents = pd.Index(first_tokens["document"])
    document_N = documents.get_indexer(pd.Index(rows["document"]))
    position_N = rows["position"].to_numpy(np.int64)
    # For a row whose text is not on the page, `document_N` is -1. The index of this row is then arbitrary and is
    # replaced below.
    token_N = first_tokens.index.to_numpy()[document_N] + position_N
    return np.where(document_N >= 0, token_N, -1)


def find_sites(rows: pd.DataFrame, sites: Sequence[Site]) -> npt.NDArray[np.int64]:
    """Return, for each of the N `rows`, the index in `sites` of its layer and point; -1 for sites not in `sites`."""
    pairs = pd.MultiIndex.from_frame(rows[["layer", "point"]])
    return pd.MultiIndex.from_tuples(sites).get_indexer(pairs)


def arrange_by_token(
    rows: pd.DataFrame,
    tokens: pd.DataFrame,
    place_N: npt.NDArray[np.int64],
    places: int,
    columns: Sequence[str],
) -> npt.NDArray[np.float64]:
    """Return the `columns` of the N `rows` as an array `[columns, places, tokens]`; NaN for missing rows.

    `place_N` contains the index of each row on the axis `places`, such as the index of the row's layer. Rows with index
    -1, and rows of tokens that are not in `tokens`, are ignored.
    """
    token_N = find_tokens(rows, tokens)
    is_shown_N = (token_N >= 0) & (place_N >= 0)
    value_NC = rows[list(columns)].to_numpy(float)
    values = np.full((len(columns), places, len(tokens)), np.nan)
    values[:, place_N[is_shown_N], token_N[is_shown_N]] = value_NC[is_shown_N].T
    return values


def arrange_column(rows: pd.DataFrame, tokens: pd.DataFrame, column: str) -> npt.NDArray[np.float64]:
    """Return the values of a column by token `[tokens]`, for rows of one layer; NaN for tokens without a row."""
    first_place_N = np.zeros(len(rows), int)  # all rows have the index 0, because the axis `places` has the length 1
    values = arrange_by_token(rows, tokens, first_place_N, places=1, columns=[column])  # [columns, places, tokens]
    value_T: npt.NDArray[np.float64] = values[0, 0]
    return value_T

"""Each token's nearest neighbours for the page, by which a map's distortion is seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from attnmix.core.points import Site
from attnmix.page.arrays import MISSING, encoded
from attnmix.store.runs import Run


def nearest(tokens: pd.DataFrame, sites: Sequence[Site], run: Run) -> dict[str, Any]:
    """`tokens` is `[points, tokens, number]`: the nearest of each in the full space, as far as they are on the page.

    Tokens are numbered in the order of `tokens`, whose column `row` is their row in a store.
    """
    table = run.nearest
    rows_NK = np.stack(table["nearest"].tolist()).astype(np.int64)
    number_of = np.full(max(rows_NK.max(initial=0), tokens["row"].max()) + 1, MISSING, np.uint16)
    number_of[tokens["row"]] = np.arange(len(tokens))
    keys = ["document", "position"]
    token_N = pd.MultiIndex.from_frame(tokens[keys]).get_indexer(pd.MultiIndex.from_frame(table[keys]))
    site_N = pd.MultiIndex.from_tuples(sites).get_indexer(pd.MultiIndex.from_frame(table[["layer", "point"]]))
    there = (token_N >= 0) & (site_N >= 0)
    found = np.full((len(sites), len(tokens), rows_NK.shape[1]), MISSING, np.uint16)
    found[site_N[there], token_N[there]] = number_of[rows_NK[there]]
    return {"number": rows_NK.shape[1], "tokens": encoded(found)}

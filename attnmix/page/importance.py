"""Word importance for the page: of what in a captured text the classifier's answer comes."""

from __future__ import annotations

from typing import Any

import pandas as pd

from attnmix.core.names import IMPORTANCE_NAMES
from attnmix.page.arrays import quantised
from attnmix.store.runs import Run


def importance(tokens: pd.DataFrame, run: Run) -> dict[str, Any]:
    """By name of the score: `values` `[tokens]` between `-limit` and `limit`, of the predicted class's logit."""
    scores = run.token_scores
    places = pd.MultiIndex.from_frame(tokens[["document", "position"]])
    found: dict[str, Any] = {}
    for method in IMPORTANCE_NAMES:
        of_method = scores[scores["method"] == method].set_index(["document", "position"])["score"].reindex(places)
        if of_method.notna().any():
            limit = max(float(of_method.abs().max()), 1e-9)
            found[method] = {"limit": limit, "values": quantised(of_method.to_numpy(float), -limit, limit)}
    return found

"""Faithfulness by removal: how far the class's probability falls without the tokens that a score ranks first.

AOPC, the area over the perturbation curve (Samek et al., 2017), with shares of a text as steps; the drop at one share
is the comprehensiveness of DeYoung et al., ACL 2020.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from attnmix.core.ranks import rank_correlation
from attnmix.faithfulness.review import Review

Doubles = npt.NDArray[np.float64]


def first_places(review: Review, scores_T: Doubles, share: float) -> npt.NDArray[np.int64]:
    """Positions of the highest scores among the tokens that are not special: that share of them, one at least."""
    count = max(1, round(share * len(review.words)))
    order = np.argsort(-scores_T[review.words], kind="stable")
    return np.asarray(np.sort(review.words[order[:count]]))


def removals(review: Review, scores: Mapping[str, Doubles], shares: Sequence[float]) -> dict[str, Doubles]:
    """The predicted class's probability and logit without what each score `[draws, T]` ranks first,
    `[draws, shares, 2]`; NaN for a score that is not defined, and where nothing of the text would be left.

    Texts that several scores leave are classified once.
    """
    asked: dict[tuple[int, ...], int] = {}
    places: dict[str, list[list[int | None]]] = {}
    for name, drawn in scores.items():
        places[name] = []
        for scores_T in drawn:
            row: list[int | None] = []
            for share in shares:
                if np.isnan(scores_T[review.words]).any() or not len(review.words):
                    row.append(None)
                else:
                    left = tuple(review.without(first_places(review, scores_T, share)))
                    row.append(asked.setdefault(left, len(asked)))
            places[name].append(row)
    logits = review.classifier.logits([list(ids) for ids in asked]) if asked else torch.empty(0, len(review.logits_C))
    table = np.stack([probability(logits, review.predicted), logits[:, review.predicted].numpy()], axis=-1)
    table = np.concatenate([table, np.full((1, 2), np.nan)])  # where the last row stands for none
    return {
        name: table[[[len(asked) if place is None else place for place in row] for row in rows]]
        for name, rows in places.items()
    }


def probability(logits: torch.Tensor, label: int) -> Doubles:
    """Of a class, from logits `[..., C]`."""
    return np.asarray(torch.softmax(logits, -1)[..., label].numpy())


def agreement(review: Review, scores: Doubles, reference_T: Doubles) -> float:
    """Spearman's correlation of a score `[draws, T]` with another over the tokens that are not special."""
    if len(review.words) < 2:
        return float("nan")
    return float(rank_correlation(scores[:, review.words], reference_T[review.words]).mean())

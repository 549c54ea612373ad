"""Stratified draws: every class keeps its share, and a seed settles which rows."""

import numpy as np
import numpy.typing as npt
import pandas as pd

RowNumbers = npt.NDArray[np.int64]
TYPICAL_TOKENS = 64
TYPICAL_CLASSES = 4


def stratified_draw(labels: npt.NDArray[np.int64], size: int, seed: int) -> RowNumbers:
    """Return `size` row numbers (at most all), sorted, in which every class has its share of `labels`, within one row.

    No class is left out where `size` allows it: the largest ones then give the rows that the smallest lack.
    """
    if size >= len(labels):
        return np.arange(len(labels))
    classes, quota = _quotas(labels, size)
    generator = np.random.default_rng(seed)
    drawn = []
    for name, size_of_class in zip(classes, quota, strict=True):
        rows = np.flatnonzero(labels == name)
        drawn.append(generator.choice(rows, size=size_of_class, replace=False))
    return np.sort(np.concatenate(drawn))


def stratified_split(
    labels: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], fraction: float, seed: int
) -> tuple[RowNumbers, RowNumbers]:
    """Return the row numbers of the rest and of a part, `fraction` of the rows and at least one per class.

    Rows of one of the `groups`, numbered from 0, stay together; the shares are as near as whole groups allow.
    """
    size = max(round(fraction * len(labels)), len(np.unique(labels)))
    all_alone = len(np.unique(groups)) == len(groups)
    part = stratified_draw(labels, size, seed) if all_alone else _whole_groups(labels, groups, size, seed)
    rest = np.setdiff1d(np.arange(len(labels)), part)
    return rest, part


def typical_reviews(predictions: pd.DataFrame) -> list[int]:
    """Return row numbers of short, typical reviews: one of each class that is classified right, one classified wrong.

    `predictions` has a row for each review: `label`, `predicted`, `probability` of the predicted class, and `tokens`.
    Of the reviews of at most `TYPICAL_TOKENS` tokens (where there are none, of the shortest ones), the one with the
    median probability is taken, so neither the surest nor the least sure. Of many classes the `TYPICAL_CLASSES` most
    frequent ones count; a kind that does not occur, such as a wrong classification, is left out.
    """
    right = predictions["label"] == predictions["predicted"]
    classes = predictions["label"].value_counts().sort_index().nlargest(TYPICAL_CLASSES).index
    rows = []
    kinds = [right & (predictions["label"] == name) for name in sorted(classes)]
    kinds.append(~right)
    for kind in kinds:
        reviews = predictions[kind]
        if len(reviews):
            short = reviews[reviews["tokens"] <= max(TYPICAL_TOKENS, reviews["tokens"].min())]
            by_probability = short.sort_values("probability", kind="stable")
            rows.append(int(by_probability.index[(len(short) - 1) // 2]))
    return rows


def _whole_groups(labels: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], size: int, seed: int) -> RowNumbers:
    """Take groups in random order, each where it lowers the sum of the classes' squared missing shares.

    scikit-learn's StratifiedGroupKFold knows equal folds only, and takes a hundred times as long where nearly every row
    is a group.
    """
    _, quota_C = _quotas(labels, size)
    missing_C = quota_C.astype(float)
    counts_GC = pd.crosstab(groups, labels).to_numpy(float)
    weights_C = 1 / counts_GC.sum(0) ** 2
    taken = np.zeros(len(counts_GC), dtype=bool)
    for group in np.random.default_rng(seed).permutation(len(counts_GC)):
        count_C = counts_GC[group]
        # (missing - count)^2 - missing^2, the change by taking this group
        change_C = count_C * (count_C - 2 * missing_C)
        if weights_C @ change_C < 0:
            missing_C -= count_C
            taken[group] = True
    return np.flatnonzero(taken[groups])


def _quotas(labels: npt.NDArray[np.int64], size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the classes, and how many rows of each are drawn."""
    classes, counts = np.unique(labels, return_counts=True)
    exact = size * counts / len(labels)
    quota = np.floor(exact).astype(int)
    # Largest remainders take what is left; classes that have nothing yet come first.
    order = np.lexsort((quota - exact, quota > 0))
    quota[order[: size - quota.sum()]] += 1
    while size >= len(classes) and (quota == 0).any():
        quota[np.argmax(quota)] -= 1
        quota[np.argmin(quota)] += 1
    return classes, quota

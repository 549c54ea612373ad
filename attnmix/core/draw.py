"""Stratified samples, which preserve the shares of the classes and are determined by a seed."""

import numpy as np
import numpy.typing as npt
import pandas as pd

RowNumbers = npt.NDArray[np.int64]
TYPICAL_TOKENS = 64  # maximum number of tokens of a short text
TYPICAL_CLASSES = 4


def stratified_draw(labels: npt.NDArray[np.int64], size: int, seed: int) -> RowNumbers:
    """Return the sorted indices of `size` random rows, or of all rows if there are fewer.

    `labels` contains the class of each row. Up to rounding, the sample has the class shares of all rows. If `size` is
    at least the number of classes, the sample includes every class; the largest classes may then have fewer rows.
    """
    if size >= len(labels):
        return np.arange(len(labels))
    classes, quota = _compute_quotas(labels, size)
    generator = np.random.default_rng(seed)
    drawn = []
    for name, size_of_class in zip(classes, quota, strict=True):
        rows = np.flatnonzero(labels == name)
        drawn.append(generator.choice(rows, size=size_of_class, replace=False))
    return np.sort(np.concatenate(drawn))


def stratified_split(
    labels: npt.NDArray[np.int64], groups: npt.NDArray[np.int64], fraction: float, seed: int
) -> tuple[RowNumbers, RowNumbers]:
    """Split the rows into two parts, of which the second has about `fraction` of the rows; return their row indices.

    `labels` and `groups` contain the class and the group of each row. Rows of the same group are never separated, and
    the class shares of the second part are close to those of all rows. If `fraction` is small, the second part has
    about as many rows as there are classes.
    """
    classes = len(np.unique(labels))
    size = max(round(fraction * len(labels)), classes)
    has_groups = len(np.unique(groups)) < len(groups)  # False if every group has a single row
    second_part = _select_groups(labels, groups, size, seed) if has_groups else stratified_draw(labels, size, seed)
    all_rows = np.arange(len(labels))
    first_part = np.setdiff1d(all_rows, second_part)
    return first_part, second_part


def typical_reviews(predictions: pd.DataFrame) -> list[int]:
    """Return row indices of short, typical texts: one correctly classified text per class and one misclassified text.

    `predictions` has one row per text, with the columns `label`, `predicted`, `probability` (of the predicted class)
    and `tokens` (their number). Correctly classified texts are from the `TYPICAL_CLASSES` most frequent classes. A
    class without such a text is skipped; if no text is misclassified, no misclassified text is returned.
    """
    is_correct = predictions["label"] == predictions["predicted"]
    counts = predictions["label"].value_counts().sort_index()
    classes = counts.nlargest(TYPICAL_CLASSES).index
    groups = []  # one text is selected from each group of texts
    for name in sorted(classes):
        groups.append(predictions[is_correct & (predictions["label"] == name)])
    misclassified = predictions[~is_correct]
    groups.append(misclassified)
    return [_select_typical_text(texts) for texts in groups if not texts.empty]


def _select_typical_text(texts: pd.DataFrame) -> int:
    """Return the row index of the short text with the median probability of the predicted class.

    Short texts have at most `TYPICAL_TOKENS` tokens. If there are none, the texts with the fewest tokens are used.
    """
    max_tokens = max(TYPICAL_TOKENS, texts["tokens"].min())
    short = texts[texts["tokens"] <= max_tokens]
    by_probability = short.sort_values("probability", kind="stable")
    median_row = by_probability.index[(len(short) - 1) // 2]
    return int(median_row)


def _select_groups(
    labels: npt.NDArray[np.int64],
    groups: npt.NDArray[np.int64],
    size: int,
    seed: int,
) -> RowNumbers:
    """Return the rows of greedily selected groups, with about `size` rows in total.

    `labels` and `groups` contain the class and the group of each row; groups are numbered consecutively from 0.

    The groups are visited in random order. A group is selected if it reduces the sum of (m_c / n_c)^2 over the classes
    c, where m_c is the number of rows still missing from the quota of class c, and n_c is the number of all rows of
    class c. Array axes: C classes, G groups.

    scikit-learn's StratifiedGroupKFold supports only equal folds, and is a hundred times slower if nearly every group
    has a single row.
    """
    _, quota_C = _compute_quotas(labels, size)
    missing_C = quota_C.astype(float)
    counts_GC = pd.crosstab(groups, labels).to_numpy(float)
    weights_C = 1 / counts_GC.sum(0) ** 2  # 1 / n_c^2
    is_selected_G = np.zeros(len(counts_GC), dtype=bool)
    generator = np.random.default_rng(seed)
    for group in generator.permutation(len(counts_GC)):
        count_C = counts_GC[group]
        # The change of m_c^2 if this group is selected: (missing - count)^2 - missing^2.
        change_C = count_C * (count_C - 2 * missing_C)
        if weights_C @ change_C < 0:
            missing_C -= count_C
            is_selected_G[group] = True
    is_selected = is_selected_G[groups]  # for each row
    return np.flatnonzero(is_selected)


def _compute_quotas(labels: npt.NDArray[np.int64], size: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the classes `[C]` in `labels`, and the numbers of rows `[C]` to draw from them: `size` rows in total.

    The numbers are proportional to the sizes of the classes, up to rounding. If `size` is at least the number of
    classes, every class has at least one row.
    """
    classes, counts = np.unique(labels, return_counts=True)
    exact = size * counts / len(labels)
    quota = np.floor(exact).astype(int)
    # The rows lost by rounding down are assigned to classes without a row, then to those with the largest remainders.
    has_row = quota > 0
    remainders = exact - quota
    order = np.lexsort((-remainders, has_row))  # sorts by the last key, `has_row`, and then by `-remainders`
    remaining = size - quota.sum()
    quota[order[:remaining]] += 1
    if size >= len(classes):
        _fill_empty_classes(quota)
    return classes, quota


def _fill_empty_classes(quota: npt.NDArray[np.int64]) -> None:
    """Move one row from the class with the most rows to each class without a row; `quota` `[C]` is changed in place."""
    while (quota == 0).any():
        largest = np.argmax(quota)
        quota[largest] -= 1
        smallest = np.argmin(quota)
        quota[smallest] += 1

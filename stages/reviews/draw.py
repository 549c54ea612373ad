"""Stratified draws: every class keeps its share, and a seed settles which rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int64]


def stratified_draw(labels: npt.NDArray[np.int64], size: int, seed: int) -> Rows:
    """`size` row numbers, sorted, in which every class has its share of `labels`, to within one row.

    All rows where `size` is not smaller than their number. No class is left out where `size` is not smaller than
    the number of classes: the largest ones then give the rows that the smallest lack.
    """
    if size >= len(labels):
        return np.arange(len(labels))
    classes, counts = np.unique(labels, return_counts=True)
    exact = size * counts / len(labels)
    quota = np.floor(exact).astype(int)
    # Largest remainders take what is left; classes that have nothing yet come first.
    order = sorted(range(len(classes)), key=lambda k: (quota[k] > 0, quota[k] - exact[k], k))
    for k in order[: size - int(quota.sum())]:
        quota[k] += 1
    while size >= len(classes) and (quota == 0).any():
        quota[np.argmax(quota)] -= 1
        quota[np.argmin(quota)] += 1
    generator = np.random.default_rng(seed)
    drawn = [
        generator.choice(np.flatnonzero(labels == name), size=take, replace=False)
        for name, take in zip(classes, quota, strict=True)
    ]
    return np.sort(np.concatenate(drawn))


def stratified_split(labels: npt.NDArray[np.int64], fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Row numbers of the rest and of the split-off part, which holds `fraction` of the rows, at least one per class."""
    size = max(round(fraction * len(labels)), len(np.unique(labels)))
    part = stratified_draw(labels, size, seed)
    return np.setdiff1d(np.arange(len(labels)), part), part

"""Means and their bootstrap intervals: documents are the unit that is resampled, not tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stages.ranks import rank_correlation

Doubles = npt.NDArray[np.float64]

LEVEL = 0.95
DRAWS_AT_ONCE = 100  # of the bootstrap, so that memory does not grow with its samples times documents


class Interval(NamedTuple):
    """A value and the ends of its 95 % percentile interval, arrays of one shape."""

    mean: Doubles
    low: Doubles
    high: Doubles


class Resampled(NamedTuple):
    """Weighted means of the documents as they are `[...]`, and in every bootstrap sample `[samples, ...]`."""

    mean: Doubles
    samples: Doubles

    def interval(self) -> Interval:
        """The percentile interval; samples in which nothing was counted are left out."""
        tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
        samples = self.samples.reshape(len(self.samples), -1)
        ends = np.full((2, samples.shape[1]), np.nan)
        for column in range(samples.shape[1]):
            defined = samples[~np.isnan(samples[:, column]), column]
            if len(defined):
                ends[:, column] = np.quantile(defined, tails)
        low, high = ends.reshape(2, *self.mean.shape)
        return Interval(self.mean, low, high)

    def minus(self, other: Resampled) -> Resampled:
        """The paired difference: the same documents in each sample of both."""
        return Resampled(self.mean - other.mean, self.samples - other.samples)


def resample(sums: Doubles, counts: Doubles, samples: int, seed: int) -> Resampled:
    """Means over tokens, from every document's sums `[documents, ...]` and counts that broadcast to them.

    The same seed and number of documents draw the same documents.
    """
    documents = len(sums)
    counts = np.broadcast_to(counts, sums.shape)
    flat_sums, flat_counts = sums.reshape(documents, -1), counts.reshape(documents, -1)
    drawn = [
        _ratio(weights @ flat_sums, weights @ flat_counts) for weights in _document_weights(documents, samples, seed)
    ]
    shape = sums.shape[1:]
    mean = _ratio(flat_sums.sum(0), flat_counts.sum(0))
    return Resampled(mean.reshape(shape), np.concatenate(drawn).reshape(samples, *shape))


def spearman_with_depth(by_layer: Resampled) -> Interval:
    """Rank correlation of the layer means with depth, from `[layers, ...]`; NaN where they are constant."""
    depth = np.arange(len(by_layer.mean))
    return Resampled(
        rank_correlation(np.moveaxis(by_layer.mean, 0, -1), depth),
        rank_correlation(np.moveaxis(by_layer.samples, 1, -1), depth),
    ).interval()


def _document_weights(documents: int, samples: int, seed: int) -> Iterator[Doubles]:
    """How often each document is drawn `[draws, documents]`, a block of samples at a time."""
    generator = np.random.default_rng(seed)
    for start in range(0, samples, DRAWS_AT_ONCE):
        draws = min(DRAWS_AT_ONCE, samples - start)
        yield generator.multinomial(documents, np.full(documents, 1 / documents), size=draws).astype(np.float64)


def _ratio(sums: Doubles, counts: Doubles) -> Doubles:
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)

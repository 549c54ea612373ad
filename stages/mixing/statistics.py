"""Means and their bootstrap intervals: documents are the unit that is resampled, not tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import norm
from scipy.stats import t as student

from stages.ranks import rank_correlation

Doubles = npt.NDArray[np.float64]

LEVEL = 0.95
SAME = 1e-12  # a standard error of a ratio that is not more comes from rounding
DRAWS_AT_ONCE = 100  # of the bootstrap, so that memory does not grow with its samples times documents


class Interval(NamedTuple):
    """A value and the ends of its 95 % percentile interval, arrays of one shape."""

    mean: Doubles
    low: Doubles
    high: Doubles


class Resampled(NamedTuple):
    """Weighted means of the documents as they are `[...]`, and in every bootstrap sample `[samples, ...]`.

    The percentiles of few documents lie too close: the spread of n is (n - 1) / n of their variance, and how far it is
    off is not known. So both kinds of interval are wider by sqrt(n / (n - 1)) and by how much Student's t with n - 1
    degrees of freedom is wider than a normal one (Hesterberg, The American Statistician 2015): 1.9 times for 4
    documents, 1.04 for 40. NaN with fewer than two.
    """

    mean: Doubles
    samples: Doubles
    documents: Doubles
    """How many each mean is of `[...]`."""

    def interval(self) -> Interval:
        """The percentile interval, widened; samples in which nothing was counted are left out."""
        tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
        samples = self.samples.reshape(len(self.samples), -1)
        ends = np.full((2, samples.shape[1]), np.nan)
        for column in range(samples.shape[1]):
            defined = samples[~np.isnan(samples[:, column]), column]
            if len(defined):
                ends[:, column] = np.quantile(defined, tails)
        low, high = self.mean + (ends.reshape(2, *self.mean.shape) - self.mean) * _widening(self.documents)
        return Interval(self.mean, low, high)

    def correlations(self) -> Interval:
        """`interval` of what cannot be beyond -1 and 1."""
        return Interval(*(np.clip(part, -1, 1) for part in self.interval()))

    def simultaneous(self) -> Interval:
        """95 % intervals that hold for all cells at once: the max-|t| bootstrap (Romano and Wolf, JASA 2005).

        mean ± c se, widened, with a cell's standard error se over the samples, and c the 95 % quantile of the largest
        |sample - mean| / se of all cells. NaN in a cell that does not vary, and in one that is not in every sample.
        """
        samples = self.samples.reshape(len(self.samples), -1)
        mean, error = self.mean.ravel(), samples.std(0)
        varies = error > SAME
        standardised = np.abs(samples[:, varies] - mean[varies]) / error[varies]
        largest = standardised.max(1, initial=0)
        half = np.where(varies, np.quantile(largest, LEVEL) * error, np.nan).reshape(self.mean.shape)
        half = half * _widening(self.documents)
        return Interval(self.mean, self.mean - half, self.mean + half)

    def minus(self, other: Resampled) -> Resampled:
        """The paired difference: the same documents in each sample of both."""
        documents = np.minimum(self.documents, other.documents)
        return Resampled(self.mean - other.mean, self.samples - other.samples, documents)


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
    counted = (flat_counts > 0).sum(0).astype(np.float64)
    return Resampled(mean.reshape(shape), np.concatenate(drawn).reshape(samples, *shape), counted.reshape(shape))


def _widening(documents: Doubles) -> Doubles:
    """Of the interval of a mean over so many documents."""
    number = np.where(documents >= 2, documents, np.nan)
    ends = student.ppf((1 + LEVEL) / 2, number - 1) / norm.ppf((1 + LEVEL) / 2)
    return np.asarray(ends * np.sqrt(number / (number - 1)))


def spearman_with_depth(by_layer: Resampled) -> Interval:
    """Rank correlation of the layer means with depth, from `[layers, ...]`; NaN where they are constant."""
    depth = np.arange(len(by_layer.mean))
    return Resampled(
        rank_correlation(np.moveaxis(by_layer.mean, 0, -1), depth),
        rank_correlation(np.moveaxis(by_layer.samples, 1, -1), depth),
        by_layer.documents.min(0),
    ).correlations()


def mean_product_across(sums: Callable[[], Iterable[npt.NDArray[Any]]], counts: Doubles) -> Interval:
    """Mean product of two unit vectors of different documents, over all such pairs `[...]`; NaN with one document.

    `sums` gives every document's summed unit vectors `[..., D]`, in the order of `counts`, anew at each call:
    they are read twice and not kept. With the total S of the s_d, of n_d vectors each, the mean over pairs is

        (|S|^2 - sum_d |s_d|^2) / (N^2 - sum_d n_d^2)

    The interval is the jackknife's: every document left out once, Student's t with one degree of freedom less than
    there are documents. A bootstrap would need the products of all pairs of documents. NaN with two documents.
    """
    total = sum((each.astype(np.float64) for each in sums()), start=np.zeros(()))
    own, with_total = (np.array(parts) for parts in zip(*(_products(each, total) for each in sums()), strict=True))
    counts = counts.reshape(-1, *[1] * (own.ndim - 1))
    pairs = counts.sum() ** 2 - (counts**2).sum()
    products = with_total.sum(0) - own.sum(0)
    mean = _ratio(products, np.broadcast_to(pairs, products.shape))
    documents = len(own)
    if documents < 3:
        return Interval(mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan))
    without = (products - 2 * (with_total - own)) / (pairs - 2 * counts * (counts.sum() - counts))
    error = np.sqrt((documents - 1) * without.var(0))
    half = student.ppf((1 + LEVEL) / 2, documents - 1) * error
    return Interval(mean, mean - half, mean + half)


def _products(each: npt.NDArray[Any], total: Doubles) -> tuple[Doubles, Doubles]:
    """Of a document's sums with themselves and with the total."""
    return np.square(each, dtype=np.float64).sum(-1), np.einsum("...d,...d->...", each, total, dtype=np.float64)


def _document_weights(documents: int, samples: int, seed: int) -> Iterator[Doubles]:
    """How often each document is drawn `[draws, documents]`, a block of samples at a time."""
    generator = np.random.default_rng(seed)
    for start in range(0, samples, DRAWS_AT_ONCE):
        draws = min(DRAWS_AT_ONCE, samples - start)
        yield generator.multinomial(documents, np.full(documents, 1 / documents), size=draws).astype(np.float64)


def _ratio(sums: Doubles, counts: Doubles) -> Doubles:
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)

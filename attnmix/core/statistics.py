"""Means and their bootstrap intervals: documents are the unit that is resampled, not tokens."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.stats import norm
from scipy.stats import t as student

from attnmix.core.ranks import rank_correlation

Doubles = npt.NDArray[np.float64]

LEVEL = 0.95
BOOTSTRAP_SAMPLES = 2000
MIN_SIMULTANEOUS = 20  # documents; `Resampled.simultaneous` says why
SAME = 1e-12  # a standard error of a ratio that is not more comes from rounding
DRAWN_AT_ONCE = 2**18  # documents of samples, so that memory does not grow with their number


class Interval(NamedTuple):
    """A value and the ends of its 95 % percentile interval, arrays of one shape."""

    mean: Doubles
    low: Doubles
    high: Doubles


class Resampled(NamedTuple):
    """Weighted means of the documents as they are `[...]`, and in every bootstrap sample `[samples, ...]`.

    The percentiles of few documents lie too close: the spread of n is (n - 1) / n of their variance, and how far it is
    off is not known. So both kinds of interval are wider by sqrt(n / (n - 1)) and by how much Student's t with n - 1
    degrees of freedom is wider than a normal one at the same level (Hesterberg, The American Statistician 2015): for a
    single 95 % interval 1.9 times for 4 documents, 1.04 for 40. NaN with fewer than two.
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
        normal = norm.ppf(tails[1])
        widening = _student(normal, self.documents) / normal
        low, high = self.mean + (ends.reshape(2, *self.mean.shape) - self.mean) * widening
        return Interval(self.mean, low, high)

    def correlations(self) -> Interval:
        """`interval` of what cannot be beyond -1 and 1."""
        return Interval(*(np.clip(part, -1, 1) for part in self.interval()))

    def simultaneous(self) -> Interval:
        """95 % intervals that hold for all cells at once: the max-|t| bootstrap (Romano and Wolf, JASA 2005).

        With a cell's standard error se over the samples, and c the 95 % quantile of the largest |sample - mean| / se
        of all cells, they are mean ± t sqrt(n / (n - 1)) se, where Student's t with n - 1 degrees of freedom exceeds t
        as rarely as a normal variable exceeds c. NaN in a cell that does not vary, in one that is not in every sample,
        and in one of fewer than `MIN_SIMULTANEOUS` documents: their samples are too few for the tail of a maximum
        (4 documents have 35). In simulations without any effect (normal values, families of 10 to 42 cells) some
        interval left 0 out in 15 to 44 % of the families of 4 documents, 6 to 12 % of 8, 6 to 8 % of 12, and 5 to 7 %
        of 20 and of 40, where 5 % are asked.
        """
        samples = self.samples.reshape(len(self.samples), -1)
        mean, error = self.mean.ravel(), samples.std(0)
        given = (error > SAME) & (self.documents.ravel() >= MIN_SIMULTANEOUS)
        standardised = np.abs(samples[:, given] - mean[given]) / error[given]
        quantile = np.quantile(standardised.max(1, initial=0), LEVEL)
        half = np.where(given, error, np.nan).reshape(self.mean.shape) * _student(quantile, self.documents)
        return Interval(self.mean, self.mean - half, self.mean + half)

    def minus(self, other: Resampled) -> Resampled:
        """The paired difference: the same documents in each sample of both."""
        documents = np.minimum(self.documents, other.documents)
        return Resampled(self.mean - other.mean, self.samples - other.samples, documents)


class Draws:
    """How often each document is in each bootstrap sample; the same seed and number of documents draw the same.

    In `file`, block of documents by block: a sample is drawn as a whole, and sums are read a block at a time.
    """

    def __init__(self, blocks: Sequence[int], samples: int, seed: int, file: IO[bytes]) -> None:
        """`blocks` are the numbers of documents of each."""
        self.blocks, self.samples, self.file = blocks, samples, file
        documents, generator = sum(blocks), np.random.default_rng(seed)
        ends = np.cumsum(blocks)
        shares = np.full(documents, 1 / documents)
        for start in range(0, samples, at_once := max(1, DRAWN_AT_ONCE // documents)):
            drawn = generator.multinomial(documents, shares, size=min(at_once, samples - start))
            drawn = drawn.astype(np.uint8)  # that one of many is drawn 256 times in a sample has a chance below 1e-500
            for end, size in zip(ends, blocks, strict=True):
                file.seek(samples * (end - size) + start * size)
                file.write(drawn[:, end - size : end].tobytes())

    def __iter__(self) -> Iterator[Doubles]:
        """Of each block `[samples, documents]`."""
        self.file.seek(0)
        for size in self.blocks:
            drawn = np.frombuffer(self.file.read(self.samples * size), dtype=np.uint8)
            yield drawn.reshape(self.samples, size).astype(np.float64)

    def resample(self, blocks: Iterable[tuple[Doubles, Doubles]]) -> Resampled:
        """Means over tokens, from every document's sums `[documents, ...]` and counts that broadcast to them.

        One block of documents after the other, of the sizes that `Draws` was made for.
        """
        of_sums, of_counts = _Totals(), _Totals()
        for (sums, counts), weights in zip(blocks, self, strict=True):
            of_sums.add(sums, weights)
            of_counts.add(counts, weights)
        mean = _ratio(of_sums.total, of_counts.total)
        documents = np.broadcast_to(of_counts.documents.astype(np.float64), mean.shape)
        return Resampled(mean, _ratio(of_sums.samples, of_counts.samples), documents)


class _Totals:
    """Over the documents as they are, and over each sample of them."""

    def __init__(self) -> None:
        self.total: Any = 0.0  # [...]
        self.samples: Any = 0.0  # [samples, ...]
        self.documents: Any = 0  # [...], with more than nothing

    def add(self, block: Doubles, weights: Doubles) -> None:
        """A block of documents `[documents, ...]` and how often each is drawn `[samples, documents]`."""
        documents, *cells = block.shape
        self.total = self.total + block.sum(0)
        self.samples = self.samples + (weights @ block.reshape(documents, math.prod(cells))).reshape(-1, *cells)
        self.documents = self.documents + (block > 0).sum(0)


def resample(sums: Doubles, counts: Doubles, samples: int, seed: int) -> Resampled:
    """`Draws.resample` of documents that are one block."""
    with io.BytesIO() as file:
        return Draws([len(sums)], samples, seed, file).resample([(sums, np.asarray(counts, dtype=np.float64))])


def _student(quantile: float, documents: Doubles) -> Doubles:
    """Return what replaces a normal quantile in the interval of a mean over so many documents."""
    number = np.where(documents >= 2, documents, np.nan)
    return np.asarray(student.isf(norm.sf(quantile), number - 1) * np.sqrt(number / (number - 1)))


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
    total, own = np.zeros(()), np.zeros(())
    for each in sums():
        total, own = total + each.astype(np.float64), own + np.square(each, dtype=np.float64).sum(-1)
    pairs = counts.sum() ** 2 - (counts**2).sum()
    products = np.square(total).sum(-1) - own
    mean = _ratio(products, np.broadcast_to(pairs, products.shape))
    documents = len(counts)
    if documents < 3:
        return Interval(mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan))
    apart, squares = np.zeros(()), np.zeros(())  # of the means without one document from `mean`
    for each, count in zip(sums(), counts, strict=True):
        own, with_total = _products(each, total)
        without = (products - 2 * (with_total - own)) / (pairs - 2 * count * (counts.sum() - count))
        apart, squares = apart + (without - mean), squares + (without - mean) ** 2
    variance = np.maximum(squares / documents - (apart / documents) ** 2, 0)  # rounding may leave less than nothing
    error = np.sqrt((documents - 1) * variance)
    half = student.ppf((1 + LEVEL) / 2, documents - 1) * error
    return Interval(mean, mean - half, mean + half)


def _products(each: npt.NDArray[Any], total: Doubles) -> tuple[Doubles, Doubles]:
    """Of a document's sums with themselves and with the total."""
    return np.square(each, dtype=np.float64).sum(-1), np.einsum("...d,...d->...", each, total, dtype=np.float64)


def _ratio(sums: Doubles, counts: Doubles) -> Doubles:
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)

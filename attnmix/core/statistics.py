"""Means and their bootstrap intervals: documents are the unit that is resampled, not tokens."""

from __future__ import annotations

import io
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
MIN_STANDARD_ERROR = 1e-12  # smaller ones come from rounding
BLOCK_DRAWS = 2**18  # documents times samples that are drawn at once, so that memory does not grow with their number


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
    """Number of documents in each mean `[...]`."""
    counts: Doubles | float = np.nan
    """What the documents' sums are divided by `[...]`: their tokens, where a mean is over tokens."""

    def interval(self) -> Interval:
        """Return the percentile interval, widened; samples in which nothing was counted are left out."""
        tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
        ends = np.quantile(self.samples, tails, axis=0)
        for cell in np.argwhere(np.isnan(self.samples).any(0)):
            defined = self.samples[(..., *cell)]
            defined = defined[~np.isnan(defined)]
            ends[(..., *cell)] = np.quantile(defined, tails) if len(defined) else np.nan
        normal = norm.ppf(tails[1])
        low, high = self.mean + (ends - self.mean) * _student(normal, self.documents) / normal
        return Interval(self.mean, low, high)

    def correlations(self) -> Interval:
        """Return `interval`, clipped to what a correlation can be."""
        return Interval(*(np.clip(part, -1, 1) for part in self.interval()))

    def simultaneous(self) -> Interval:
        """Return 95 % intervals that hold for all cells at once: the max-|t| bootstrap (Romano and Wolf, JASA 2005).

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
        given = (error > MIN_STANDARD_ERROR) & (self.documents.ravel() >= MIN_SIMULTANEOUS)
        standardised = np.abs(samples[:, given] - mean[given]) / error[given]
        quantile = np.quantile(standardised.max(1, initial=0), LEVEL)
        half = np.where(given, error, np.nan).reshape(self.mean.shape) * _student(quantile, self.documents)
        return Interval(self.mean, self.mean - half, self.mean + half)

    def minus(self, other: Resampled) -> Resampled:
        """Return the paired difference: the same documents in each sample of both."""
        documents = np.minimum(self.documents, other.documents)
        counts = np.minimum(self.counts, other.counts)
        return Resampled(self.mean - other.mean, self.samples - other.samples, documents, counts)


class Draws:
    """How often each document is in each bootstrap sample; the same seed and number of documents draw the same.

    In `file`, block of documents by block: a sample is drawn as a whole, and sums are read a block at a time.
    """

    def __init__(self, blocks: Sequence[int], samples: int, seed: int, file: IO[bytes]) -> None:
        """Draw for blocks of so many documents each."""
        self.blocks, self.samples, self.file = blocks, samples, file
        documents, generator = sum(blocks), np.random.default_rng(seed)
        ends, shares = np.cumsum(blocks), np.full(documents, 1 / documents)
        for start in range(0, samples, block_samples := max(1, BLOCK_DRAWS // documents)):
            drawn = generator.multinomial(documents, shares, size=min(block_samples, samples - start))
            drawn = drawn.astype(np.uint8)  # that one of many is drawn 256 times in a sample has a chance below 1e-500
            for end, size in zip(ends, blocks, strict=True):
                file.seek(samples * (end - size) + start * size)
                file.write(drawn[:, end - size : end].tobytes())

    def __iter__(self) -> Iterator[Doubles]:
        """Yield the draws of each block `[samples, documents]`."""
        self.file.seek(0)
        for size in self.blocks:
            drawn = np.frombuffer(self.file.read(self.samples * size), dtype=np.uint8)
            yield drawn.reshape(self.samples, size).astype(np.float64)

    def resample(self, blocks: Iterable[tuple[Doubles, Doubles]]) -> Resampled:
        """Return means from every document's sums `[documents, ...]` and counts that broadcast to them.

        `blocks` have the sizes for which the draws were made, and are read one after the other.
        """
        totals: list[Any] = [0.0] * 5
        for (sums, counts), weights in zip(blocks, self, strict=True):
            drawn = [np.tensordot(weights, each, axes=1) for each in (sums, counts)]
            block = [sums.sum(0), counts.sum(0), *drawn, (counts > 0).sum(0)]
            totals = [total + each for total, each in zip(totals, block, strict=True)]
        sums, counts, sums_of_samples, counts_of_samples, documents = totals
        mean = _ratio(sums, counts)
        counts, documents = (np.broadcast_to(each, mean.shape).astype(np.float64) for each in (counts, documents))
        return Resampled(mean, _ratio(sums_of_samples, counts_of_samples), documents, counts)


def resample(sums: Doubles, counts: Doubles, samples: int, seed: int) -> Resampled:
    """Return `Draws.resample` of documents that are one block."""
    with io.BytesIO() as file:
        return Draws([len(sums)], samples, seed, file).resample([(sums, np.asarray(counts, dtype=np.float64))])


def _student(quantile: float, documents: Doubles) -> Doubles:
    """Return what replaces a normal quantile in the interval of a mean over so many documents."""
    number = np.where(documents >= 2, documents, np.nan)
    return np.asarray(student.isf(norm.sf(quantile), number - 1) * np.sqrt(number / (number - 1)))


def spearman_with_depth(by_layer: Resampled) -> Interval:
    """Return the rank correlation of layer means `[layers, ...]` with depth; NaN where they are constant."""
    depth = np.arange(len(by_layer.mean))
    return Resampled(
        rank_correlation(np.moveaxis(by_layer.mean, 0, -1), depth),
        rank_correlation(np.moveaxis(by_layer.samples, 1, -1), depth),
        by_layer.documents.min(0),
    ).correlations()


def mean_product_across(documents: Callable[[], Iterable[tuple[npt.NDArray[Any], int]]]) -> Interval:
    """Return the mean product of two unit vectors of different documents, over all such pairs `[...]`.

    `documents` yields the sum `[..., D]` and the number of every document's unit vectors, anew at each call: they are
    read twice and not kept. With the total S of the s_d, of n_d vectors each, the mean over pairs is

        (|S|^2 - sum_d |s_d|^2) / (N^2 - sum_d n_d^2)

    The interval is the jackknife's: every document left out once, Student's t with one degree of freedom less than
    there are documents. A bootstrap would need the products of all pairs of documents. NaN with fewer than three
    documents, the mean with fewer than two.
    """
    total, squares, numbers = np.zeros(()), np.zeros(()), []
    for vectors, number in documents():
        total = total + vectors.astype(np.float64)
        squares = squares + np.square(vectors, dtype=np.float64).sum(-1)
        numbers.append(number)
    counts = np.array(numbers, np.float64)
    pairs = counts.sum() ** 2 - (counts**2).sum()
    products = np.square(total).sum(-1) - squares
    mean = _ratio(products, np.broadcast_to(pairs, products.shape))
    if len(counts) < 3:
        return Interval(mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan))
    change, changes_squared = np.zeros(()), np.zeros(())  # of the means without one document from `mean`
    for vectors, number in documents():
        square = np.square(vectors, dtype=np.float64).sum(-1)
        with_total = np.einsum("...d,...d->...", vectors, total, dtype=np.float64)
        without = (products - 2 * (with_total - square)) / (pairs - 2 * number * (counts.sum() - number))
        change, changes_squared = change + (without - mean), changes_squared + (without - mean) ** 2
    variance = np.maximum(changes_squared / len(counts) - (change / len(counts)) ** 2, 0)  # rounding can fall below 0
    half = student.ppf((1 + LEVEL) / 2, len(counts) - 1) * np.sqrt((len(counts) - 1) * variance)
    return Interval(mean, mean - half, mean + half)


def _ratio(sums: Doubles, counts: Doubles) -> Doubles:
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)

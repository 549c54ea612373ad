"""Rank correlations, and means with bootstrap intervals: documents are resampled, not tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri, stdtrit  # of scipy.stats, which takes longer to load: the same numbers

Doubles = npt.NDArray[np.float64]

LEVEL = 0.95
BOOTSTRAP_SAMPLES = 2000
MIN_SIMULTANEOUS = 20  # documents; `Resampled.simultaneous` says why
MIN_INTERVAL_DOCUMENTS = 8  # with fewer, a bootstrap interval is too uncertain to be printed or drawn
MIN_STANDARD_ERROR = 1e-12  # smaller ones come from rounding
MIN_UNEXPLAINED = 1e-9  # smallest share of a variance that a given variable leaves; less is rounding
BLOCK_DRAWS = 2**18  # documents times samples drawn at a time, as 8 bytes each before they are kept as one


class Sums(NamedTuple):
    """A quantity of N texts: its sums over the tokens of each text, and their divisors.

    One text's sums have the same form without the first axis. Every mean over tokens or texts is made of these.
    """

    values: Doubles
    """The sums `[N, ...]`."""
    counts: Doubles
    """Numbers of tokens in a shape that broadcasts to the values; 0 of a text that does not count."""

    @classmethod
    def over_tokens(cls, values: Doubles) -> Self:
        """Return the sums over the last axis of one text's values `[..., T]`, and the numbers of values but NaN."""
        return cls(np.nansum(values, -1), (~np.isnan(values)).sum(-1, dtype=np.float64))

    @classmethod
    def stack(cls, texts: Sequence[Sums]) -> Self:
        """Return the sums of single texts, in their order, as one."""
        return cls(np.stack([text.values for text in texts]), np.stack([text.counts for text in texts]))

    def take(self, texts: slice | Sequence[int]) -> Sums:
        """Return the sums of some of the texts; memory-mapped sums are read here."""
        return Sums(np.asarray(self.values[texts]), np.asarray(self.counts[texts]))

    def scatter(self, numbers: Sequence[int], texts: int) -> Sums:
        """Return sums for all `texts`, with these sums at `numbers` and counts of 0 elsewhere."""
        values = np.zeros((texts, *self.values.shape[1:]))
        counts = np.zeros((texts, *self.counts.shape[1:]))
        values[list(numbers)] = self.values
        counts[list(numbers)] = self.counts
        return Sums(values, counts)

    def means(self) -> Doubles:
        """Return the mean of each text `[N, ...]`; NaN of a text that does not count."""
        return _ratio(self.values, self.counts)


class Interval(NamedTuple):
    """A value and the ends of its 95 % percentile interval, arrays of one shape."""

    mean: Doubles
    low: Doubles
    high: Doubles


class Resampled(NamedTuple):
    """Weighted means of the documents as they are `[...]`, and in every bootstrap sample `[samples, ...]`.

    Intervals of n documents are widened by sqrt(n / (n - 1)) and by the ratio of Student's t, with n - 1 degrees of
    freedom, to the normal quantile (Hesterberg, The American Statistician 2015); NaN with fewer than two documents.
    """

    mean: Doubles
    samples: Doubles
    documents: Doubles
    """Number of documents in each mean `[...]`."""
    counts: Doubles | float = np.nan
    """The divisors of the documents' sums `[...]`: numbers of tokens, where a mean is over tokens."""

    def interval(self) -> Interval:
        """Return the widened percentile interval, without the samples in which nothing was counted."""
        tails = [(1 - LEVEL) / 2, (1 + LEVEL) / 2]
        ends = np.quantile(self.samples, tails, axis=0)
        missing = np.isnan(self.samples)
        partly = missing.any(0) & ~missing.all(0)
        ends[:, partly] = np.nanquantile(self.samples[:, partly], tails, axis=0)
        normal = float(ndtri(tails[1]))
        low, high = self.mean + (ends - self.mean) * _student(normal, self.documents) / normal
        return Interval(self.mean, low, high)

    def correlations(self) -> Interval:
        """Return `interval`, clipped to what a correlation can be."""
        return Interval(*(np.clip(part, -1, 1) for part in self.interval()))

    def simultaneous(self) -> Interval:
        """Return 95 % intervals that hold for all cells at once: the max-|t| bootstrap (Romano and Wolf, JASA 2005).

        With a cell's standard error se over the samples, and c the 95 % quantile of the largest |sample - mean| / se
        of all cells, they are mean ± t sqrt(n / (n - 1)) se, where Student's t with n - 1 degrees of freedom exceeds t
        as rarely as a normal variable exceeds c. NaN in a cell that does not vary, that is missing in a sample, or that
        has fewer than `MIN_SIMULTANEOUS` documents: with fewer, too many intervals exclude 0 by chance.
        """
        samples = self.samples.reshape(len(self.samples), -1)
        mean = self.mean.ravel()
        error = samples.std(0)
        varying = (error > MIN_STANDARD_ERROR) & (self.documents.ravel() >= MIN_SIMULTANEOUS)
        standardised = np.abs(samples[:, varying] - mean[varying]) / error[varying]
        largest = standardised.max(1, initial=0)
        quantile = np.quantile(largest, LEVEL)
        known_error = np.where(varying, error, np.nan).reshape(self.mean.shape)
        half = known_error * _student(quantile, self.documents)
        return Interval(self.mean, self.mean - half, self.mean + half)

    def minus(self, other: Resampled) -> Resampled:
        """Return the paired difference: the same documents in each sample of both."""
        documents = np.minimum(self.documents, other.documents)
        counts = np.minimum(self.counts, other.counts)
        return Resampled(self.mean - other.mean, self.samples - other.samples, documents, counts)


class Draws:
    """How often each document is in each bootstrap sample: the same for the same seed and number of documents."""

    def __init__(self, documents: int, samples: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        shares = np.full(documents, 1 / documents)
        self.counts = np.empty((samples, documents), np.uint8)  # the chance that one reaches 256 is below 1e-500
        step = max(1, BLOCK_DRAWS // documents)
        for start in range(0, samples, step):
            stop = min(start + step, samples)
            self.counts[start:stop] = generator.multinomial(documents, shares, size=stop - start)

    def resample(self, chunks: Iterable[Sums]) -> Resampled:
        """Return the means of all documents, which come in `chunks`, in their order; one is in memory at a time."""
        sums: Any = 0.0
        counts: Any = 0.0
        documents: Any = 0.0
        sums_of_samples: Any = 0.0
        counts_of_samples: Any = 0.0
        start = 0
        for sums_D, counts_D in chunks:
            weights_SD = self.counts[:, start : start + len(sums_D)].astype(np.float64)
            start += len(sums_D)
            sums = sums + sums_D.sum(0)
            counts = counts + counts_D.sum(0)
            documents = documents + (counts_D > 0).sum(0)
            sums_of_samples = sums_of_samples + np.tensordot(weights_SD, sums_D, axes=1)
            counts_of_samples = counts_of_samples + np.tensordot(weights_SD, counts_D, axes=1)
        mean = _ratio(sums, counts)
        means_of_samples = _ratio(sums_of_samples, counts_of_samples)
        counts = np.broadcast_to(counts, mean.shape).astype(np.float64)
        documents = np.broadcast_to(documents, mean.shape).astype(np.float64)
        return Resampled(mean, means_of_samples, documents, counts)


def resample(sums: Doubles, counts: Doubles, samples: int, seed: int) -> Resampled:
    """Return `Draws.resample` of the documents as one chunk."""
    return Draws(len(sums), samples, seed).resample([Sums(sums, np.asarray(counts, dtype=np.float64))])


def _student(quantile: float, documents: Doubles) -> Doubles:
    """Return the quantile that replaces a normal one in the interval of a mean over this number of documents."""
    number = np.where(documents >= 2, documents, np.nan)
    wider = np.sqrt(number / (number - 1))
    return np.asarray(-stdtrit(number - 1, ndtr(-quantile)) * wider)


def spearman_with_depth(by_layer: Resampled) -> Interval:
    """Return the rank correlation of layer means `[layers, ...]` with depth; NaN where they are constant."""
    depth = np.arange(len(by_layer.mean))
    correlation = rank_correlation(np.moveaxis(by_layer.mean, 0, -1), depth)
    sample_correlations = rank_correlation(np.moveaxis(by_layer.samples, 1, -1), depth)
    return Resampled(correlation, sample_correlations, by_layer.documents.min(0)).correlations()


class Verdict(StrEnum):
    """The verdicts on a difference of two means, with the words of `attnmix.compare`.

    None of them says that there is no difference, which no interval shows.
    """

    HIGHER = "higher"
    LOWER = "lower"
    INCONCLUSIVE = "inconclusive"
    TOO_FEW_TEXTS = "too few texts"
    NO_INTERVAL = "no interval"


def verdict(low: float, high: float, documents: float) -> Verdict:
    """Return the verdict on a difference with a 95 % interval over this number of documents.

    Below `MIN_SIMULTANEOUS` documents there is no verdict, whatever the interval. `INCONCLUSIVE` is a difference
    whose interval includes 0.
    """
    if documents < MIN_SIMULTANEOUS:
        return Verdict.TOO_FEW_TEXTS
    if np.isnan(low) or np.isnan(high):
        return Verdict.NO_INTERVAL
    if low > 0:
        return Verdict.HIGHER
    return Verdict.LOWER if high < 0 else Verdict.INCONCLUSIVE


class Jackknifed(NamedTuple):
    """A statistic `[...]` of N documents, and `without` each of them `[N, ...]`.

    For statistics of pairs of documents, of which a bootstrap would draw pairs of a document with itself.
    """

    whole: Doubles
    without: Doubles

    @property
    def documents(self) -> int:
        """The number of documents."""
        return len(self.without)

    def interval(self) -> Interval:
        """Return the 95 % jackknife interval; NaN with fewer than three documents.

        Student's t has one degree of freedom less than there are documents.
        """
        if self.documents < 3:
            unknown = np.full_like(self.whole, np.nan)
            return Interval(self.whole, unknown, unknown)
        freedom = self.documents - 1
        half = stdtrit(freedom, (1 + LEVEL) / 2) * np.sqrt(freedom * self.without.var(0))
        return Interval(self.whole, self.whole - half, self.whole + half)

    def minus(self, other: Jackknifed) -> Jackknifed:
        """Return the paired difference, of the same documents."""
        return Jackknifed(self.whole - other.whole, self.without - other.without)


def _ratio(sums: Doubles, counts: Doubles) -> Doubles:
    return np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)


def rank_correlation(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the correlation over the last axis of two arrays that broadcast to each other.

    NaN where one side is constant or holds a NaN.
    """
    first_centred = _centred_ranks(first)
    second_centred = _centred_ranks(second)
    products = np.asarray((first_centred * second_centred).sum(-1))
    lengths = np.linalg.norm(first_centred, axis=-1) * np.linalg.norm(second_centred, axis=-1)
    correlations = np.full(products.shape, np.nan)
    np.divide(products, lengths, out=correlations, where=lengths > 0)
    return correlations


def _centred_ranks(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the ranks over the last axis, less their mean."""
    from scipy.stats import rankdata  # tenths of a second, which a mean need not take

    ranks = np.asarray(rankdata(values, axis=-1, nan_policy="propagate"))
    return np.asarray(ranks - ranks.mean(-1, keepdims=True))


def partial_correlation(
    between: npt.NDArray[Any], first_given: npt.NDArray[Any], second_given: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    """Return (r_xy - r_xz r_yz) / sqrt((1 - r_xz^2) (1 - r_yz^2)), the correlation of x and y given z.

    For rank correlations this is Pearson's correlation of the residuals of ranks. NaN where z explains all of x or y.
    """
    first_unexplained = 1 - np.square(first_given)
    second_unexplained = 1 - np.square(second_given)
    defined = (first_unexplained > MIN_UNEXPLAINED) & (second_unexplained > MIN_UNEXPLAINED)
    spread = np.sqrt(np.where(defined, first_unexplained * second_unexplained, 1.0))
    correlation = (between - first_given * second_given) / spread
    return np.where(defined, np.clip(correlation, -1, 1), np.nan)

"""Rank correlations, and means with bootstrap intervals from resampled texts (not tokens)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

LEVEL = 0.95
BOOTSTRAP_SAMPLES = 2000
MIN_SIMULTANEOUS = 20  # texts; see `Resampled.simultaneous`
MIN_INTERVAL_DOCUMENTS = 8  # texts; with fewer, a bootstrap interval is too uncertain to print or draw
MIN_STANDARD_ERROR = 1e-12  # smaller values are rounding errors
MIN_UNEXPLAINED = 1e-9  # smallest unexplained share of a variance; smaller values are rounding errors
BLOCK_DRAWS = 2**18  # counts drawn at once (texts times samples); a drawn count has 8 bytes, a stored count 1 byte


class Sums(NamedTuple):
    """The sums of a quantity over the tokens of each of N texts, with the divisors of the sums.

    For a single text, the axis N is missing. All means over tokens or texts are computed from `Sums`.
    """

    values: Doubles
    """The sums `[N, ...]`."""
    counts: Doubles
    """Numbers of tokens, broadcastable to the values; 0 for excluded texts."""

    @classmethod
    def over_tokens(cls, values: Doubles) -> Self:
        """Return the sums over the tokens of one text, the last axis of `values` `[..., T]`; NaN values are ignored."""
        is_known = ~np.isnan(values)
        return cls(np.nansum(values, -1), is_known.sum(-1, dtype=np.float64))

    @classmethod
    def stack(cls, texts: Sequence[Sums]) -> Self:
        """Return the sums of several texts, stacked from the sums of each text in the given order."""
        values = [text.values for text in texts]
        counts = [text.counts for text in texts]
        return cls(np.stack(values), np.stack(counts))

    def take(self, texts: slice | Sequence[int]) -> Sums:
        """Return the sums of selected texts; memory-mapped sums are loaded into memory."""
        values = np.asarray(self.values[texts])
        counts = np.asarray(self.counts[texts])
        return Sums(values, counts)

    def scatter(self, numbers: Sequence[int], texts: int) -> Sums:
        """Return the sums for a corpus of `texts` texts: these sums for the texts `numbers`, and 0 for the others."""
        indices = list(numbers)
        values = np.zeros((texts, *self.values.shape[1:]))
        values[indices] = self.values
        counts = np.zeros((texts, *self.counts.shape[1:]))
        counts[indices] = self.counts
        return Sums(values, counts)

    def means(self) -> Doubles:
        """Return the mean of each text `[N, ...]`; NaN for excluded texts."""
        return _divide(self.values, self.counts)


class Interval(NamedTuple):
    """A value and the bounds of its 95 % interval, as arrays of the same shape."""

    mean: Doubles
    low: Doubles
    high: Doubles


class Resampled(NamedTuple):
    """Weighted means over the texts `[...]`, and over the texts of every bootstrap sample `[samples, ...]`.

    Intervals over n texts are widened by two factors (Hesterberg, The American Statistician 2015): sqrt(n / (n - 1)),
    and the ratio of the quantile of Student's t with n - 1 degrees of freedom to the normal quantile. Intervals are NaN
    for fewer than two texts.
    """

    mean: Doubles
    samples: Doubles
    documents: Doubles
    """Number of texts in each mean `[...]`."""
    counts: Doubles | float = np.nan
    """Divisors of the sums over all texts `[...]`: numbers of tokens for means over tokens."""

    def interval(self) -> Interval:
        """Return the percentile interval of the bootstrap samples, widened to correct for the small number of texts.

        Samples in which the mean is undefined are ignored.
        """
        from scipy.special import ndtri  # slow import, not needed for figures and pages

        lower_tail = (1 - LEVEL) / 2
        upper_tail = (1 + LEVEL) / 2
        ends = _compute_quantiles(self.samples, [lower_tail, upper_tail])
        normal = float(ndtri(upper_tail))
        # `widened` is `normal`, multiplied by the two factors in the docstring of this class.
        widened = _compute_student_factor(normal, self.documents)
        low, high = self.mean + (ends - self.mean) * widened / normal
        return Interval(self.mean, low, high)

    def clipped_interval(self) -> Interval:
        """Return `interval`, clipped to [-1, 1], the range of correlations."""
        interval = self.interval()
        return Interval(
            mean=np.clip(interval.mean, -1, 1),
            low=np.clip(interval.low, -1, 1),
            high=np.clip(interval.high, -1, 1),
        )

    def simultaneous(self) -> Interval:
        """Return 95 % intervals that hold simultaneously for all cells: the max-|t| bootstrap.

        Cells are the elements of `mean`. The interval of a cell over n texts is mean ± t sqrt(n / (n - 1)) se, where se
        is the standard deviation of the cell's samples. Let c be the 95 % quantile, over the samples, of the largest
        |sample - mean| / se of all cells. The tail probability of t in Student's t distribution with n - 1 degrees of
        freedom equals that of c in the standard normal distribution. Intervals are NaN for cells that are constant,
        missing in a sample, or based on fewer than `MIN_SIMULTANEOUS` texts. With fewer texts, too many intervals would
        exclude 0 by chance.

        References:
            Romano and Wolf, JASA 2005.
        """
        samples = self.samples.reshape(len(self.samples), -1)  # [samples, cells]
        mean = self.mean.ravel()
        error = samples.std(0)  # se
        has_enough_texts = self.documents.ravel() >= MIN_SIMULTANEOUS
        is_included = (error > MIN_STANDARD_ERROR) & has_enough_texts
        deviations = np.abs(samples[:, is_included] - mean[is_included])
        standardised = deviations / error[is_included]
        largest = standardised.max(1, initial=0)  # [samples]
        quantile = np.quantile(largest, LEVEL)  # c
        known_error = np.where(is_included, error, np.nan).reshape(self.mean.shape)
        half = known_error * _compute_student_factor(quantile, self.documents)
        return Interval(self.mean, self.mean - half, self.mean + half)

    def minus(self, other: Resampled) -> Resampled:
        """Return the paired difference between these means and `other`, whose samples must contain the same texts."""
        documents = np.minimum(self.documents, other.documents)
        counts = np.minimum(self.counts, other.counts)
        return Resampled(self.mean - other.mean, self.samples - other.samples, documents, counts)


class Draws:
    """The number of times that each text occurs in each bootstrap sample, determined by the seed."""

    def __init__(self, documents: int, samples: int, seed: int) -> None:
        """Draw the counts `[samples, documents]` in blocks of samples, to limit memory."""
        generator = np.random.default_rng(seed)
        shares = np.full(documents, 1 / documents)
        self.counts = np.empty((samples, documents), np.uint8)  # a count reaches 256 with probability < 1e-500
        step = max(1, BLOCK_DRAWS // documents)
        for start in range(0, samples, step):
            stop = min(start + step, samples)
            self.counts[start:stop] = generator.multinomial(documents, shares, size=stop - start)

    def resample(self, chunks: Iterable[Sums]) -> Resampled:
        """Return the means over all texts and over the texts of each bootstrap sample.

        `chunks` are the `Sums` (values and counts) of consecutive texts, in text order; only one chunk at a time is in
        memory. Array axes: S samples, D texts of a chunk, followed by the axes of the quantity.
        """
        sums: Any = 0.0
        counts: Any = 0.0
        documents: Any = 0.0
        sums_of_samples: Any = 0.0
        counts_of_samples: Any = 0.0
        start = 0
        for sums_D, counts_D in chunks:
            # The weight of a text in a sample is the number of times that the text occurs in the sample.
            weights_SD = self.counts[:, start : start + len(sums_D)].astype(np.float64)
            start += len(sums_D)
            sums = sums + sums_D.sum(0)
            counts = counts + counts_D.sum(0)
            documents = documents + (counts_D > 0).sum(0)
            sums_of_samples = sums_of_samples + np.tensordot(weights_SD, sums_D, axes=1)
            counts_of_samples = counts_of_samples + np.tensordot(weights_SD, counts_D, axes=1)
        mean = _divide(sums, counts)
        means_of_samples = _divide(sums_of_samples, counts_of_samples)
        counts = np.broadcast_to(counts, mean.shape).astype(np.float64)
        documents = np.broadcast_to(documents, mean.shape).astype(np.float64)
        return Resampled(mean, means_of_samples, documents, counts)


def _compute_quantiles(samples: Doubles, levels: Sequence[float]) -> Doubles:
    """Return the quantiles `[levels, ...]` of `samples` `[samples, ...]`, ignoring NaN."""
    quantiles = np.quantile(samples, levels, axis=0)  # NaN if any sample is NaN
    is_missing = np.isnan(samples)
    is_partly_missing = is_missing.any(0) & ~is_missing.all(0)
    # `nanquantile` is slower, and warns if all samples are NaN.
    quantiles[:, is_partly_missing] = np.nanquantile(samples[:, is_partly_missing], levels, axis=0)
    return np.asarray(quantiles)


def resample(sums: Doubles, counts: Doubles, samples: int, seed: int) -> Resampled:
    """Return the means over all texts and over the texts of each bootstrap sample, from `Sums` in memory."""
    draws = Draws(len(sums), samples, seed)
    chunk = Sums(sums, np.asarray(counts, dtype=np.float64))
    return draws.resample([chunk])


def _compute_student_factor(quantile: float, documents: Doubles) -> Doubles:
    """Return the factor that replaces the normal `quantile` in the interval of a mean over n = `documents` texts.

    The factor is the quantile of Student's t with n - 1 degrees of freedom and the same tail probability, multiplied by
    sqrt(n / (n - 1)). It is NaN for n < 2.
    """
    from scipy.special import ndtr, stdtrit  # slow import, not needed for figures and pages

    number = np.where(documents >= 2, documents, np.nan)
    freedom = number - 1
    tail = ndtr(-quantile)
    student_quantile = -stdtrit(freedom, tail)
    widening = np.sqrt(number / freedom)
    return np.asarray(student_quantile * widening)


def spearman_with_depth(by_layer: Resampled) -> Interval:
    """Return the rank correlation of layer means `[layers, ...]` with the layer index, and its interval `[...]`.

    The correlation is NaN for means that are equal in all layers.
    """
    depth = np.arange(len(by_layer.mean))
    # `rank_correlation` is computed over the last axis. In the samples, the layers are the second axis.
    means = np.moveaxis(by_layer.mean, 0, -1)
    means_of_samples = np.moveaxis(by_layer.samples, 1, -1)
    correlations = Resampled(
        mean=rank_correlation(means, depth),
        samples=rank_correlation(means_of_samples, depth),
        documents=by_layer.documents.min(0),  # the smallest number of texts in a layer
    )
    return correlations.clipped_interval()


class Verdict(StrEnum):
    """The verdicts on the difference between two means, as displayed by `attnmix.compare`.

    No verdict states that the means are equal, because an interval cannot prove equality.
    """

    HIGHER = "higher"
    LOWER = "lower"
    INCONCLUSIVE = "inconclusive"
    TOO_FEW_TEXTS = "too few texts"
    TOO_FEW_RUNS = "too few runs"
    NO_INTERVAL = "no interval"


def verdict(low: float, high: float, documents: float) -> Verdict:
    """Return the verdict on a difference between means over `documents` texts; [`low`, `high`] is its 95 % interval.

    For fewer than `MIN_SIMULTANEOUS` texts, the verdict is always `TOO_FEW_TEXTS`. A difference is
    `INCONCLUSIVE` if its interval includes 0.
    """
    if documents < MIN_SIMULTANEOUS:
        return Verdict.TOO_FEW_TEXTS
    if np.isnan(low) or np.isnan(high):
        return Verdict.NO_INTERVAL
    if low > 0:
        return Verdict.HIGHER
    if high < 0:
        return Verdict.LOWER
    return Verdict.INCONCLUSIVE


class Jackknifed(NamedTuple):
    """A statistic of N texts, and its leave-one-out values.

    The jackknife is used for statistics of pairs of texts, because a bootstrap would pair texts with themselves.
    """

    whole: Doubles
    """The statistic of all texts `[...]`."""
    without: Doubles
    """The leave-one-out values `[N, ...]`: row n is the statistic of all texts except text n."""

    @property
    def documents(self) -> int:
        """The number of texts."""
        return len(self.without)

    def interval(self) -> Interval:
        """Return the 95 % jackknife interval, computed with Student's t with N - 1 degrees of freedom.

        The bounds are NaN for fewer than three texts.
        """
        from scipy.special import stdtrit  # slow import, not needed for figures and pages

        if self.documents < 3:
            unknown = np.full_like(self.whole, np.nan)
            return Interval(self.whole, unknown, unknown)
        freedom = self.documents - 1
        # The squared jackknife error is (N - 1) / N times the sum of the N squared deviations.
        standard_error = np.sqrt(freedom * self.without.var(0))
        half = stdtrit(freedom, (1 + LEVEL) / 2) * standard_error
        return Interval(self.whole, self.whole - half, self.whole + half)

    def minus(self, other: Jackknifed) -> Jackknifed:
        """Return the paired difference between this statistic and `other`, which must be based on the same texts."""
        return Jackknifed(self.whole - other.whole, self.without - other.without)


def _divide(sums: Doubles, counts: Doubles) -> Doubles:
    """Return the means `sums / counts`; NaN where the count is 0."""
    means = np.full_like(sums, np.nan)
    return np.divide(sums, counts, out=means, where=counts > 0)


def rank_correlation(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the rank correlation over the last axis of two arrays with broadcastable shapes.

    The correlation is NaN where one of the arrays is constant or contains NaN.
    """
    first_ranks = _centre_ranks(first)
    second_ranks = _centre_ranks(second)
    products = np.asarray((first_ranks * second_ranks).sum(-1))
    first_lengths = np.linalg.norm(first_ranks, axis=-1)
    second_lengths = np.linalg.norm(second_ranks, axis=-1)
    lengths = first_lengths * second_lengths
    correlations = np.full(products.shape, np.nan)
    np.divide(products, lengths, out=correlations, where=lengths > 0)
    return correlations


def _centre_ranks(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return the ranks over the last axis minus their mean, in the shape of `values`."""
    from scipy.stats import rankdata  # slow import, needed only for ranks

    ranks = np.asarray(rankdata(values, axis=-1, nan_policy="propagate"))
    return np.asarray(ranks - ranks.mean(-1, keepdims=True))


def partial_correlation(
    between: npt.NDArray[Any], first_given: npt.NDArray[Any], second_given: npt.NDArray[Any]
) -> npt.NDArray[np.float64]:
    """Return (r_xy - r_xz r_yz) / sqrt((1 - r_xz^2) (1 - r_yz^2)), the correlation of x and y given z.

    `between` is the correlation r_xy, `first_given` is r_xz, and `second_given` is r_yz. The result is NaN if z fully
    explains x or y. For rank correlations, it equals Pearson's correlation of the residuals of the ranks of x and y
    after regression on the ranks of z.
    """
    first_unexplained = 1 - np.square(first_given)
    second_unexplained = 1 - np.square(second_given)
    is_defined = (first_unexplained > MIN_UNEXPLAINED) & (second_unexplained > MIN_UNEXPLAINED)
    unexplained = first_unexplained * second_unexplained
    spread = np.sqrt(np.where(is_defined, unexplained, 1.0))  # the value 1 only avoids a division by zero
    correlation = (between - first_given * second_given) / spread
    clipped = np.clip(correlation, -1, 1)
    return np.where(is_defined, clipped, np.nan)

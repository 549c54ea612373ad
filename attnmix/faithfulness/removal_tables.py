"""The effect of the highest-scored tokens on the predicted class's probability; tables of the stage `faithfulness`.

Comprehensiveness is the probability drop after the highest-scored tokens are replaced; sufficiency is the drop after
all other tokens except special tokens are replaced (DeYoung et al., ACL 2020). A token is replaced by [MASK] (deleted
if there is no mask token) or by a token of another text. The mean of these drops over `SHARES` is the area over the
perturbation curve (AOPC; Samek et al., 2017).

Shapes: N texts, M methods, Q pairs of test and replacement, S shares, T tokens, K classes.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import ndtri

from attnmix.core import statistics
from attnmix.core.statistics import Doubles
from attnmix.faithfulness.attributions import RANDOM_REMOVAL, Review, word_positions
from attnmix.faithfulness.class_use import CLASS_USE_COLUMNS
from attnmix.measures.documents import Document

SHARES = (0.2, 0.5)
"""Fractions of a text's tokens that are replaced (`comprehensiveness`) or kept (`sufficiency`), by descending score."""
COMPREHENSIVENESS = "comprehensiveness"
SUFFICIENCY = "sufficiency"
MASK = "mask"
DONOR = "donor"
TESTS = tuple(product((COMPREHENSIVENESS, SUFFICIENCY), (MASK, DONOR)))
"""All pairs of a test and a replacement."""
RemainingTokens = tuple[int, ...]
"""The token IDs of an edited text."""
NOTHING_LEFT: RemainingTokens = ()
ALL = "all"  # marks means over shares in the column `share`, and means over classes in the column `group`


def draw_donors(
    documents: Sequence[Document], number: int, generator: np.random.Generator
) -> npt.NDArray[np.int32] | None:
    """Return, for each token `[T]` of text `number`, a random token from other texts; None if they have no words."""
    words_of_others = []
    for place, document in enumerate(documents):
        if place != number:
            words_of_others.append(document.ids[word_positions(document)])
    if not words_of_others:
        return None
    words = np.concatenate(words_of_others)
    if not len(words):
        return None
    return generator.choice(words, len(documents[number]))


def first_places(review: Review, scores_T: Doubles, share: float) -> npt.NDArray[np.int64]:
    """Return the sorted positions of the non-special tokens with the highest scores `[T]`.

    The number of positions is the fraction `share` of all non-special tokens, but at least one.
    """
    count = max(1, round(share * len(review.word_positions)))
    word_scores = scores_T[review.word_positions]
    order = np.argsort(-word_scores, kind="stable")
    highest = review.word_positions[order[:count]]
    return np.asarray(np.sort(highest))


def probability_drops(review: Review, scores: Mapping[str, Doubles]) -> dict[str, Doubles]:
    """Return the drops `[Q, S]` of the predicted class's probability after edits of a text, by method.

    Each of Q pairs of a test and a replacement (`TESTS`) is applied to each of S shares of tokens (`SHARES`). `scores`
    are the scores `[draws, T]` of each method; drops are averaged over draws. A drop is NaN if the scores are undefined
    or the edited text would be empty.
    """
    texts_by_method = {name: _list_edited_texts(review, scores_DT) for name, scores_DT in scores.items()}
    probabilities = _compute_probabilities(review, texts_by_method.values())
    drops = {}
    for name, texts in texts_by_method.items():
        edited_probabilities = [probabilities[text] for text in texts]
        edited_DQS = np.reshape(edited_probabilities, (-1, len(TESTS), len(SHARES)))
        drops[name] = review.probability - np.mean(edited_DQS, axis=0)
    return drops


def _list_edited_texts(review: Review, scores_DT: Doubles) -> list[RemainingTokens]:
    """Return all edited versions of a text; the scores `[draws, T]` of one method select the edited tokens.

    The edited texts are ordered by draw, then by test and replacement (`TESTS`), then by share of tokens (`SHARES`).
    """
    texts = []
    for scores_T in scores_DT:
        for (test, replacement), share in product(TESTS, SHARES):
            text = edited_text(review, scores_T, share, test, replacement)
            texts.append(text)
    return texts


def _compute_probabilities(review: Review, texts: Iterable[Iterable[RemainingTokens]]) -> dict[RemainingTokens, float]:
    """Return the probability of the originally predicted class for each distinct edited text; NaN for an empty text.

    `texts` contains the edited texts of each method.
    """
    distinct: dict[RemainingTokens, None] = {}  # a set in order of insertion
    for texts_of_method in texts:
        distinct.update(dict.fromkeys(texts_of_method))
    distinct.pop(NOTHING_LEFT, None)
    logits = review.classifier.logits(list(distinct))
    class_probabilities = logits.softmax(-1)
    predicted = class_probabilities[:, review.predicted].tolist()
    probabilities = dict(zip(distinct, predicted, strict=True))
    probabilities[NOTHING_LEFT] = np.nan
    return probabilities


def edited_text(review: Review, scores_T: Doubles, share: float, test: str, replacement: str) -> RemainingTokens:
    """Return the token IDs of a text after its highest-scored tokens are replaced.

    For the test `SUFFICIENCY`, all other tokens except special tokens are replaced instead. Return `NOTHING_LEFT` if a
    score is undefined or the text has only special tokens.
    """
    word_scores = scores_T[review.word_positions]
    if not len(word_scores) or np.isnan(word_scores).any():
        return NOTHING_LEFT
    replaced = first_places(review, scores_T, share)
    if test == SUFFICIENCY:
        replaced = np.setdiff1d(review.word_positions, replaced)
    if replacement == MASK:
        return tuple(review.without(replaced))
    return tuple(review.with_donors(replaced))


def agreement(review: Review, scores: Doubles, reference_T: Doubles) -> float:
    """Return Spearman's correlation of scores `[draws, T]` with a reference `[T]`, averaged over draws.

    Special tokens are excluded. The correlation is NaN for a text with fewer than two non-special tokens.
    """
    if len(review.word_positions) < 2:
        return float("nan")
    word_scores = scores[:, review.word_positions]
    word_reference = reference_T[review.word_positions]
    correlations = statistics.rank_correlation(word_scores, word_reference)
    return float(correlations.mean())


def faithfulness_table(drops_NMQS: Doubles, agreement_NM: Doubles, methods: Sequence[str], seed: int) -> pd.DataFrame:
    """Return the table `faithfulness.csv`, with each method's drops in each test.

    Args:
        drops_NMQS: Probability drops of N texts, by method, pair of test and replacement (`TESTS`), and share of
            tokens (`SHARES`).
        agreement_NM: Rank correlation of each method's scores with the reference, for each text.
        methods: Names of the methods.
        seed: Seed of the bootstrap over texts.
    """
    tables = []
    for number, (test, replacement) in enumerate(TESTS):
        table = _compare_methods(drops_NMQS[:, :, number], agreement_NM, methods, seed)
        table.insert(0, "test", test)
        table.insert(1, "replacement", replacement)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def _compare_methods(drops_NMS: Doubles, agreement_NM: Doubles, methods: Sequence[str], seed: int) -> pd.DataFrame:
    """Return one test's drops by method and share, and the comparison of each method with random removal.

    `drops_NMS` are the drops of N texts for M methods and S shares of tokens; `agreement_NM` are rank correlations of
    the methods' scores with the reference. The comparison is in the rows with the share `all`. Intervals are
    bootstrapped over texts, with the same samples for all methods. A text with undefined scores of a method is excluded
    from the means of this method.
    """
    aopc_NM = drops_NMS.mean(-1)  # the mean over shares (AOPC), tabulated as the share `all`
    drops_and_aopc = np.concatenate([drops_NMS, aopc_NM[..., None]], -1)
    drops = _resample_reviews(drops_and_aopc, seed).interval()
    shares = [*SHARES, ALL]
    methods_and_shares = list(product(methods, shares))
    table = pd.DataFrame(methods_and_shares, columns=["method", "share"])
    table = table.assign(**_name_columns(drops, "drop", "ci_low", "ci_high"))
    comparison = pd.DataFrame(
        _compare_with_random(aopc_NM, agreement_NM, methods, seed), index=table.index[table["share"] == ALL]
    )
    is_known_NM = ~np.isnan(aopc_NM)
    documents_M = is_known_NM.sum(0)
    return table.join(comparison).assign(documents=np.repeat(documents_M, len(shares)))


def _compare_with_random(
    aopc_NM: Doubles, agreement_NM: Doubles, methods: Sequence[str], seed: int
) -> dict[str, Doubles]:
    """Return columns `[M]`: each method's AOPC minus that of random removal, and its correlation with the reference.

    The AOPC is the mean drop over shares of tokens, for N texts and M methods. Each mean has an interval over texts;
    the difference also has a simultaneous interval over all methods.
    """
    random_column = methods.index(RANDOM_REMOVAL)
    random_N1 = aopc_NM[:, [random_column]]
    above = _resample_reviews(aopc_NM - random_N1, seed)
    correlations = _resample_reviews(agreement_NM, seed).clipped_interval()
    return {
        **_name_columns(above.interval(), "above_random", "above_random_low", "above_random_high"),
        **_name_columns(above.simultaneous(), "above_random", "simultaneous_low", "simultaneous_high"),
        **_name_columns(correlations, "derivative_spearman", "derivative_low", "derivative_high"),
    }


def _resample_reviews(values: Doubles, seed: int) -> statistics.Resampled:
    """Return bootstrap samples of the mean of `values` `[N, ...]` over texts, ignoring NaN."""
    is_known = ~np.isnan(values)
    sums = np.where(is_known, values, 0)
    counts = is_known.astype(np.float64)
    return statistics.resample(sums, counts, statistics.BOOTSTRAP_SAMPLES, seed)


def _name_columns(interval: statistics.Interval, mean_name: str, low_name: str, high_name: str) -> dict[str, Doubles]:
    """Return three flattened columns with the given names: the mean of an interval and its lower and upper ends."""
    return {
        mean_name: interval.mean.ravel(),
        low_name: interval.low.ravel(),
        high_name: interval.high.ravel(),
    }


def margin_correlation(margins: pd.DataFrame, checkpoints: Sequence[str], layer: int) -> pd.DataFrame:
    """Return rows of `class_use.csv`: correlations of each checkpoint's mixing ratio in `layer` with the class margin.

    `margins` has a row for each text, with its predicted class, its margin, its number of tokens and the ratio of each
    checkpoint. Predicted classes may differ in the level of the ratio, and pooling all texts would confound this
    difference with the correlation (Simpson's paradox). Each of the K classes therefore has its own rows:
    `margin_spearman` and `margin_given_length`. The latter is the partial correlation controlling for the number of
    tokens; it has one degree of freedom fewer. Rows of the group `all` contain means over classes. With too few texts
    for a standard error (fewer than 4, or 5 for `margin_given_length`), the correlation of a class is NaN and is
    excluded from the mean. In rows of `all`, `documents` is the number of texts of the classes in the mean.
    """
    classes = {str(name): reviews for name, reviews in margins.groupby("predicted")}
    sizes_K = np.array([len(reviews) for reviews in classes.values()])
    rows: list[tuple[Any, ...]] = []
    for checkpoint in checkpoints:
        correlations_K2 = [_correlate_with_margin(reviews, checkpoint) for reviews in classes.values()]
        plain_K, given_length_K = np.transpose(correlations_K2)
        # The weights of the mean over classes of n texts are n - 3 and n - 4.
        measures = {"margin_spearman": (plain_K, sizes_K - 3), "margin_given_length": (given_length_K, sizes_K - 4)}
        for number, name in enumerate(classes):
            for measure, (correlations_K, weights_K) in measures.items():
                # The mean over a single class is the correlation of this class, with its interval.
                mean, low, high = _average_by_fisher(correlations_K[[number]], weights_K[[number]])
                rows.append((checkpoint, measure, name, layer, mean, low, high, sizes_K[number]))
        for measure, (correlations_K, weights_K) in measures.items():
            mean, low, high = _average_by_fisher(correlations_K, weights_K)
            documents = sizes_K[_is_averaged(correlations_K, weights_K)].sum()
            rows.append((checkpoint, measure, ALL, layer, mean, low, high, documents))
    return pd.DataFrame(rows, columns=CLASS_USE_COLUMNS)


def _correlate_with_margin(reviews: pd.DataFrame, checkpoint: str) -> tuple[float, float]:
    """Return the rank correlation of a checkpoint's ratio with the margin, without and with control for text length.

    `reviews` has a row for each text, with the columns `margin`, `tokens` (its length) and `checkpoint` (its ratio).
    """
    ratio = reviews[checkpoint].to_numpy(np.float64)
    margin = reviews["margin"].to_numpy(np.float64)
    length = reviews["tokens"].to_numpy(np.float64)
    plain = statistics.rank_correlation(ratio, margin)
    ratio_with_length = statistics.rank_correlation(ratio, length)
    margin_with_length = statistics.rank_correlation(margin, length)
    given_length = statistics.partial_correlation(plain, ratio_with_length, margin_with_length)
    return float(plain), float(given_length)


def _average_by_fisher(correlations: Doubles, freedom: npt.NDArray[np.int64]) -> tuple[float, float, float]:
    """Return the mean of the rank correlations of several classes and the ends of its 95 % interval, ignoring NaN.

    The mean is computed by Fisher's transformation z = artanh r. For Spearman's r of n texts, z has the variance
    (1 + r^2 / 2) / (n - 3) (Bonett and Wright, Psychometrika 2000); for a partial correlation, n - 4 replaces n - 3.
    `freedom` contains n - 3 or n - 4 for each class; these numbers are the weights of the mean. Correlations with
    `freedom` < 1 are ignored. Since artanh 1 is infinite, |r| is clipped to 1 - 6 / (m^3 - m), where m is
    `freedom` + 3. This limit is halfway between 1 and the second-largest value that r can take for m texts
    without ties.
    """
    is_averaged = _is_averaged(correlations, freedom)
    if not is_averaged.any():
        return np.nan, np.nan, np.nan
    weights = freedom[is_averaged]
    reviews = weights + 3
    most = 1 - 6 / (reviews**3 - reviews)
    clipped = np.clip(correlations[is_averaged], -most, most)
    mean = np.average(np.arctanh(clipped), weights=weights)
    # The variance of a class's z is `scaled_variances / weights`; the variance of the weighted mean is `error**2`.
    scaled_variances = 1 + clipped**2 / 2
    error = np.sqrt((weights * scaled_variances).sum()) / weights.sum()
    normal_quantile = ndtri((1 + statistics.LEVEL) / 2)
    half_width = normal_quantile * error
    mean_correlation = np.tanh(mean)
    low = np.tanh(mean - half_width)
    high = np.tanh(mean + half_width)
    return float(mean_correlation), float(low), float(high)


def _is_averaged(correlations: Doubles, freedom: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return a mask of the classes whose correlations `_average_by_fisher` averages."""
    mask: npt.NDArray[np.bool_] = ~np.isnan(correlations) & (freedom >= 1)
    return mask

"""The table `geometry`: geometry of vectors, attention sinks, cosines across texts, and shares of contributions."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.names import STEP_MEASURES, STEP_POINTS
from attnmix.core.statistics import Doubles, Jackknifed, Sums
from attnmix.measures.geometry import GEOMETRY_MEASURES
from attnmix.measures.mixing_tables import (
    INTERVAL,
    CorpusMeasures,
    CorpusSums,
    Labels,
    Mean,
    MeanTables,
    table_rows,
    with_difference,
)
from attnmix.measures.sinks import SINK_MEASURES
from attnmix.measures.variance_shares import PARTS, Moments, class_share_null, draw_texts, products, usable

MEAN_COSINE_ACROSS_TEXTS = "mean_cosine_across"  # mean over pairs of texts (Ethayarajh, EMNLP 2019)
MEAN_COSINES_BY_CLASS = (
    "mean_cosine_same_class",
    "mean_cosine_other_class",
)  # mean over pairs of texts of the same or of different predicted classes
LENGTH_MEASURES = ("others_length", "own_length")
SHARE_MEASURES = tuple(f"share_{part}" for part in PARTS)
PERMUTED = "share_class_permuted"


def geometry_table(measured: CorpusMeasures) -> pd.DataFrame:
    """Return the table `geometry`: means over texts, attention gains, cosines across texts, shares of contributions.

    The attention to the first token is averaged over all texts; all other statistics of texts cover the sampled texts.
    """
    sampled = measured.sampled
    tables = MeanTables(sampled.sums, sampled.draws)
    attention_labels: Labels = {"layer": measured.layers, "point": ["attention"]}  # for measures of attention
    _add_means(tables, measured, attention_labels)  # attention to the first token: over all texts
    means = tables.tables()["geometry"]
    frames = [means]
    for checkpoint, gains_L in measured.gains.items():
        labels = attention_labels | {"measure": ["attention_gain"]}
        frames.append(table_rows("geometry", checkpoint, labels, {"mean": gains_L}))
    frames.extend(cosine_rows(sampled))
    frames.extend(share_rows(sampled, attention_labels))
    return pd.concat(frames)


def page_geometry(measured: CorpusMeasures) -> pd.DataFrame:
    """Return the rows of `geometry` for a page of user texts: means of each layer step, and shares of contributions."""
    tables = MeanTables(measured.sums, measured.draws)
    tables.add(_average_steps(measured))
    means = tables.tables()["geometry"]
    attention_labels: Labels = {"layer": measured.layers, "point": ["attention"]}
    return pd.concat([means, *share_rows(measured, attention_labels)])


def _add_means(tables: MeanTables, measured: CorpusMeasures, attention_labels: Labels) -> None:
    """Add the means of geometry at each capture point, layer steps, attention sinks, and lengths of contributions.

    `tables` contains the sums of the sampled texts, but the attention to the first token is averaged over all texts.
    `attention_labels` contains the values of the columns `layer` and `point` for measures of attention. Rows for the
    difference between checkpoints are added only for the lengths.
    """
    checkpoints = tuple(measured.sums)
    sites = {"site": measured.sites, "measure": GEOMETRY_MEASURES}
    tables.add(Mean("geometry", sites, sums="geometry", checkpoints=checkpoints))
    tables.add(_average_steps(measured))
    to_first = attention_labels | {"measure": ["attention_to_first"]}
    tables_of_all_texts = tables.create_for_texts(measured.sums, measured.draws)
    tables_of_all_texts.add(Mean("geometry", to_first, sums="to_first", checkpoints=checkpoints))
    sinks = attention_labels | {"measure": SINK_MEASURES}
    tables.add(Mean("geometry", sinks, sums="sinks", checkpoints=checkpoints, complete=False))  # no rows without values
    lengths = attention_labels | {"measure": LENGTH_MEASURES}
    tables.add(Mean("geometry", lengths, sums=part_lengths))  # for all checkpoints and their difference


def _average_steps(measured: CorpusMeasures) -> Mean:
    """Return the `Mean` of the measures of each step of a layer, for the table `geometry`."""
    labels = {"layer": measured.layers, "point": list(STEP_POINTS), "measure": STEP_MEASURES}
    return Mean("geometry", labels, sums="steps", checkpoints=tuple(measured.sums), complete=False)


def cosine_rows(measured: CorpusMeasures) -> Iterator[pd.DataFrame]:
    """Yield, for each checkpoint, the rows of `geometry` with mean cosines between tokens of different texts.

    Means by class cover only usable texts. A text is usable if it has at least two tokens, and if its class is known
    and contains at least three texts of two or more tokens (function `usable`). Axes: N texts, X sites (layer and
    capture point), D width.
    """
    sites = measured.sites
    numbers, classes_N = _draw_texts(measured)
    for checkpoint, sums in measured.sums.items():
        # The sum of each text's token vectors, each scaled to length 1, and the number of tokens.
        unit_sums_NXD, counts = sums["unit_sums"].take(numbers)
        tokens_N = counts.ravel()
        is_usable_N = usable(classes_N, tokens_N)
        documents_by_measure = {
            MEAN_COSINE_ACROSS_TEXTS: len(is_usable_N),
            **dict.fromkeys(MEAN_COSINES_BY_CLASS, is_usable_N.sum()),
        }
        cosines_by_site = []  # for each site, an array [3 columns of `INTERVAL`, 3 measures]
        for place in range(len(sites)):  # one site at a time, to limit memory
            cosines_by_site.append(_compute_cosines(unit_sums_NXD[:, [place]], tokens_N, classes_N, is_usable_N))
        interval_columns = np.stack(cosines_by_site, 1)  # [3 columns, sites, 3 measures]
        columns: dict[str, Any] = dict(zip(INTERVAL, interval_columns, strict=True))
        documents = list(documents_by_measure.values())
        columns["documents"] = np.broadcast_to(documents, (len(sites), len(documents)))  # the same for all sites
        labels = {"site": sites, "measure": list(documents_by_measure)}
        table = table_rows("geometry", checkpoint, labels, columns)
        # Means by class are omitted if no class has enough texts. The mean over all texts has a row even if it is NaN.
        is_across_texts = table["measure"] == MEAN_COSINE_ACROSS_TEXTS
        yield table[table["mean"].notna() | is_across_texts]


def _compute_cosines(
    unit_sums_N1D: Doubles,
    tokens_N: Doubles,
    classes_N: npt.NDArray[np.int64],
    is_usable_N: npt.NDArray[np.bool_],
) -> Doubles:
    """Return the mean cosines between tokens of different texts at one site, with intervals, for three kinds of pairs.

    Args:
        unit_sums_N1D: For each of N texts, the sum of its token vectors (width D) after scaling each to length 1. The
            axis of length 1 is that of the site.
        tokens_N: Number of tokens of each text.
        classes_N: Class of each text.
        is_usable_N: True for the texts that may be used for pairs by class (see `cosine_rows`).

    Returns:
        An array `[3, 3]`. The rows are the mean, and the lower and upper bounds of its interval. The columns are the
        kinds of pairs: any two texts, two usable texts of the same class, and two usable texts of different classes.
        The intervals are computed from the leave-one-out means (jackknife).
    """
    # The cosine of two vectors of length 1 is their product. Thus the mean products of two texts that `products`
    # returns are mean cosines: `same` for texts of the same class, and `other` for texts of different classes.
    squared_lengths_N1 = tokens_N[:, None]  # the sum over the tokens of a text, each of which has length 1
    texts = Moments.from_sums(unit_sums_N1D, squared_lengths_N1, tokens_N)
    usable_texts = _select_texts(texts, is_usable_N)
    common_class_N = np.zeros(len(classes_N))  # If all texts have the same class, `same` covers any two texts.
    any_class = _jackknife_products(texts, common_class_N)
    by_class = _jackknife_products(usable_texts, classes_N[is_usable_N])
    intervals = []
    for cosine in (any_class.same, by_class.same, by_class.other):
        mean_low_high = np.ravel(cosine.interval())
        intervals.append(mean_low_high)
    return np.stack(intervals, -1)


class _JackknifedProducts(NamedTuple):
    """Mean products of the vectors of two different texts, each with its leave-one-out values."""

    same: Jackknifed
    """The mean over pairs of texts of the same class."""
    other: Jackknifed
    """The mean over pairs of texts of different classes; NaN for a single class."""


def _jackknife_products(texts: Moments, classes_N: npt.NDArray[Any]) -> _JackknifedProducts:
    """Return the mean products of the vectors of two different texts, with their leave-one-out values (jackknife).

    The means over pairs of the same class (`same`) and of different classes (`other`) are separate. Each class must
    have at least three texts, so that a pair of texts of each class remains if one text is left out.
    """
    means, means_without_one = products(texts, classes_N)  # of all texts, and with each text left out
    same = Jackknifed(means.same, means_without_one.same)
    other = Jackknifed(means.other, means_without_one.other)
    return _JackknifedProducts(same, other)


def share_rows(measured: CorpusMeasures, attention_labels: Labels) -> Iterator[pd.DataFrame]:
    """Yield the rows of `geometry` with the shares `PARTS` in the mean squared length of other tokens' contributions.

    The first rows contain, for each checkpoint, the 95 % quantile of the share `class` over random permutations of the
    texts' classes. The next rows contain the shares (of corpus, class, text and token) of each checkpoint, and their
    difference between checkpoints. There are no rows if fewer than two classes have three or more texts.
    `attention_labels` contains the values of the columns `layer` and `point`.
    """
    numbers, classes_N = _draw_texts(measured)
    if not _has_usable_classes(measured, numbers, classes_N):
        return
    shares: dict[str, Jackknifed] = {}
    for checkpoint, sums in measured.sums.items():
        # The axes are U usable texts and L layers.
        moments, is_usable_N = attention_moments(sums, numbers, classes_N)
        classes_U = classes_N[is_usable_N]
        shares[checkpoint] = _jackknife_shares(moments, classes_U)
        quantile_L = class_share_null(moments, classes_U, measured.seed)
        documents_L = np.full(len(quantile_L), len(classes_U))
        columns: dict[str, Any] = {"mean": quantile_L, "documents": documents_L}
        labels = attention_labels | {"measure": [PERMUTED]}
        yield table_rows("geometry", checkpoint, labels, columns)
    for checkpoint, share in with_difference(shares).items():
        columns = dict(zip(INTERVAL, share.interval(), strict=True))
        columns["documents"] = np.full(share.whole.shape, share.documents)
        labels = attention_labels | {"measure": SHARE_MEASURES}
        yield table_rows("geometry", checkpoint, labels, columns)


def _jackknife_shares(texts: Moments, classes_N: npt.NDArray[np.int64]) -> Jackknifed:
    """Return the shares of `PARTS` in the mean squared length of vectors, with their leave-one-out values."""
    means, means_without_one = products(texts, classes_N)  # of all texts, and with each text left out
    return Jackknifed(means.shares(), means_without_one.shares())


def _has_usable_classes(measured: CorpusMeasures, numbers: Sequence[int], classes_N: npt.NDArray[np.int64]) -> bool:
    """Return True if the usable texts (function `usable`) belong to at least two classes.

    A text is usable if it has at least two tokens, and if its class is known and contains at least three texts of two
    or more tokens. `numbers` contains the indices of the texts, and `classes_N` their classes.
    """
    known_classes = np.unique(classes_N[classes_N >= 0])
    if len(known_classes) < 2:  # In this case, the sums `others`, which are read below, may not have been measured.
        return False
    # The counts of `others` are the texts' numbers of tokens, which are the same for all checkpoints.
    tokens_N = np.ravel(measured.first["others"].counts[numbers])
    usable_classes = classes_N[usable(classes_N, tokens_N)]
    return len(np.unique(usable_classes)) >= 2


def attention_moments(
    sums: CorpusSums, numbers: Sequence[int], classes_N: npt.NDArray[np.int64]
) -> tuple[Moments, npt.NDArray[np.bool_]]:
    """Return the moments of the contributions of other tokens in usable texts, and a mask of these texts.

    The moments are those of the vectors sum_{j!=i} F_ij of all tokens i. `numbers` contains the indices of the texts,
    and `classes_N` their classes. The classes only determine which texts are usable (function `usable`); they do not
    affect the moments.
    """
    sums_NLD, counts = sums["others"].take(numbers)
    tokens_N = counts.ravel()
    # Of the three columns of `lengths`, the first is the squared length |sum_{j!=i} F_ij|^2.
    lengths_NL3 = sums["lengths"].take(numbers).values
    squared_lengths_NL = lengths_NL3[:, :, 0]
    is_usable_N = usable(classes_N, tokens_N)
    moments = Moments.from_sums(sums_NLD, squared_lengths_NL, tokens_N)
    return _select_texts(moments, is_usable_N), is_usable_N


def _draw_texts(measured: CorpusMeasures) -> tuple[list[int], npt.NDArray[np.int64]]:
    """Return the indices and the predicted classes of the texts whose pairs are compared."""
    classes_N = measured.texts["predicted_label"].to_numpy()
    numbers: list[int] = draw_texts(classes_N, measured.seed).tolist()
    return numbers, classes_N[numbers]


def _select_texts(moments: Moments, is_selected_N: npt.NDArray[np.bool_]) -> Moments:
    """Return the moments of the texts in a mask."""
    return Moments(*(values[is_selected_N] for values in moments))


def part_lengths(sums: CorpusSums) -> Sums:
    """Return the sums over tokens of two lengths, `[texts, layers, 2]`.

    The first is |sum_{j!=i} F_ij|, the length of the summed contributions of all other tokens j to token i. The second
    is |F_ii + x_i|, the length of token i's own contribution including the skip connection.
    """
    # The first of the three columns, the squared length |sum_{j!=i} F_ij|^2, is omitted.
    lengths_NL3, counts = sums["lengths"]
    return Sums(lengths_NL3[:, :, 1:], counts)

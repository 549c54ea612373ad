"""The csv file `geometry`: means of geometry and sinks, cosines across texts, and shares of contributions."""

from collections.abc import Iterator
from typing import Any

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
from attnmix.measures.variance_shares import MAX_TEXTS, PARTS, Moments, class_share_null, products, usable

MEAN_COSINE_ACROSS_TEXTS = "mean_cosine_across"  # mean over pairs of texts (Ethayarajh, EMNLP 2019)
MEAN_COSINES_BY_CLASS = (
    "mean_cosine_same_class",
    "mean_cosine_other_class",
)  # the same of texts by their predicted class
LENGTH_MEASURES = ("others_length", "own_length")
SHARE_MEASURES = tuple(f"share_{part}" for part in PARTS)
PERMUTED = "share_class_permuted"


def geometry_table(measured: CorpusMeasures) -> pd.DataFrame:
    """Return `geometry`."""
    tables = MeanTables(measured.sums, measured.draws)
    attention: Labels = {"layer": measured.layers, "point": ["attention"]}  # for measures of attention itself
    _add_means(tables, measured, attention)
    frames = [tables.tables()["geometry"]]
    for checkpoint, gains_L in measured.gains.items():
        labels = attention | {"measure": ["attention_gain"]}
        frames.append(table_rows("geometry", checkpoint, labels, {"mean": gains_L}))
    frames.extend(cosine_rows(measured))
    frames.extend(share_rows(measured, attention))
    return pd.concat(frames)


def page_geometry(measured: CorpusMeasures) -> pd.DataFrame:
    """Return the rows of `geometry` for a page of user texts: steps of a layer, and shares by class."""
    tables = MeanTables(measured.sums, measured.draws)
    tables.add(_steps(measured))
    attention: Labels = {"layer": measured.layers, "point": ["attention"]}
    return pd.concat([tables.tables()["geometry"], *share_rows(measured, attention)])


def _add_means(tables: MeanTables, measured: CorpusMeasures, attention: Labels) -> None:
    """Add the means of vectors at each site, of steps, of sinks, and of the lengths of mixed parts."""
    checkpoints = tuple(measured.sums)
    sites = {"site": measured.sites, "measure": GEOMETRY_MEASURES}
    to_first = attention | {"measure": ["attention_to_first"]}
    sinks = attention | {"measure": SINK_MEASURES}
    lengths = attention | {"measure": LENGTH_MEASURES}
    tables.add(Mean("geometry", sites, "geometry", checkpoints))
    tables.add(_steps(measured))
    tables.add(Mean("geometry", to_first, "to_first", checkpoints))
    tables.add(Mean("geometry", sinks, "sinks", checkpoints, complete=False))
    tables.add(Mean("geometry", lengths, part_lengths))


def _steps(measured: CorpusMeasures) -> Mean:
    """Return the mean geometry of each step of a layer."""
    labels = {"layer": measured.layers, "point": list(STEP_POINTS), "measure": STEP_MEASURES}
    return Mean("geometry", labels, "steps", tuple(measured.sums), complete=False)


def cosine_rows(measured: CorpusMeasures) -> Iterator[pd.DataFrame]:
    """Yield the rows of `geometry` with mean cosines between tokens of different texts: all, and by predicted class."""
    sites, classes_N = measured.sites, _first_classes(measured)
    for checkpoint, sums in measured.sums.items():
        sums_NXD, counts = sums["unit_sums"].take(slice(MAX_TEXTS))
        tokens_N = counts.ravel()
        kept = usable(classes_N, tokens_N)
        intervals = []
        for place in range(len(sites)):
            units = Moments.from_sums(sums_NXD[:, [place]], tokens_N[:, None], tokens_N)
            intervals.append(_cosine_intervals(units, classes_N, kept))
        columns: dict[str, Any] = dict(zip(INTERVAL, np.stack(intervals, 1), strict=True))
        columns["documents"] = np.broadcast_to([len(kept), kept.sum(), kept.sum()], (len(sites), 3))
        labels = {"site": sites, "measure": [MEAN_COSINE_ACROSS_TEXTS, *MEAN_COSINES_BY_CLASS]}
        table = table_rows("geometry", checkpoint, labels, columns)
        yield table[table["mean"].notna() | (table["measure"] == MEAN_COSINE_ACROSS_TEXTS)]


def _cosine_intervals(units: Moments, classes_N: npt.NDArray[np.int64], kept: npt.NDArray[np.bool_]) -> Doubles:
    """Return mean cosines and their intervals `[3, 3]`: all texts, texts of the same class, texts of another class."""
    whole, without = products(units, np.zeros(len(classes_N)))
    all_texts = Jackknifed(whole.same, without.same)
    whole, without = products(_texts_of(units, kept), classes_N[kept])
    same_class = Jackknifed(whole.same, without.same)
    other_class = Jackknifed(whole.other, without.other)
    intervals = [np.ravel(cosine.interval()) for cosine in (all_texts, same_class, other_class)]
    return np.stack(intervals, -1)


def share_rows(measured: CorpusMeasures, attention: Labels) -> Iterator[pd.DataFrame]:
    """Yield the rows of `geometry` with shares of other tokens' contributions: corpus, predicted class, text, token.

    Differences between checkpoints are included. At least two classes with three or more texts are required;
    otherwise the iterator is empty.
    """
    shares: dict[str, Jackknifed] = {}
    classes_N = _first_classes(measured)
    for checkpoint, sums in measured.sums.items():
        if len(np.unique(classes_N[classes_N >= 0])) < 2:
            return
        texts, kept = attention_moments(sums, classes_N)
        if len(np.unique(classes_N[kept])) < 2:
            return
        whole, without = products(texts, classes_N[kept])
        shares[checkpoint] = Jackknifed(whole.shares(), without.shares())
        null_L = class_share_null(texts, classes_N[kept], measured.seed)
        columns: dict[str, Any] = {"mean": null_L, "documents": np.full(len(null_L), kept.sum())}
        yield table_rows("geometry", checkpoint, attention | {"measure": [PERMUTED]}, columns)
    for checkpoint, share in with_difference(shares).items():
        columns = dict(zip(INTERVAL, share.interval(), strict=True))
        columns["documents"] = np.full(share.whole.shape, share.documents)
        yield table_rows("geometry", checkpoint, attention | {"measure": SHARE_MEASURES}, columns)


def attention_moments(sums: CorpusSums, classes_N: npt.NDArray[np.int64]) -> tuple[Moments, npt.NDArray[np.bool_]]:
    """Return the moments of the contributions of other tokens in the first texts with a class, and their mask."""
    sums_NLD, counts = sums["others"].take(slice(MAX_TEXTS))
    tokens_N = counts.ravel()
    kept = usable(classes_N, tokens_N)
    squares_NL = sums["lengths"].take(slice(MAX_TEXTS)).values[:, :, 0]
    return _texts_of(Moments.from_sums(sums_NLD, squares_NL, tokens_N), kept), kept


def _first_classes(measured: CorpusMeasures) -> npt.NDArray[np.int64]:
    """Return the predicted classes of the first `MAX_TEXTS` texts."""
    return measured.texts["predicted_label"].to_numpy()[:MAX_TEXTS]


def _texts_of(moments: Moments, kept: npt.NDArray[np.bool_]) -> Moments:
    """Return the moments of the texts that are `kept`."""
    return Moments(*(part[kept] for part in moments))


def part_lengths(sums: CorpusSums) -> Sums:
    """Return sums over tokens of the lengths of the other tokens' and the own contribution `[D, layers, 2]`."""
    values, counts = sums["lengths"]
    return Sums(values[:, :, 1:], counts)

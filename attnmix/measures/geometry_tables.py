"""The csv file `geometry`: means of geometry and sinks, cosines across texts, and shares of what other tokens give."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.names import STEP_MEASURES, STEP_POINTS, Site
from attnmix.core.statistics import Doubles, Jackknifed
from attnmix.measures.geometry import GEOMETRY_MEASURES
from attnmix.measures.mixing_tables import (
    INTERVAL,
    CorpusMeasures,
    DocumentRows,
    Labels,
    Mean,
    MeanTables,
    Totals,
    stored,
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
    tables = MeanTables(measured.rows, measured.draws)
    attention: Labels = {"layer": measured.layers, "point": ["attention"]}  # of measures of attention itself
    _add_means(tables, measured, attention)
    frames = [tables.tables()["geometry"]]
    for checkpoint, gains_L in measured.gains.items():
        labels = attention | {"measure": ["attention_gain"]}
        frames.append(table_rows("geometry", checkpoint, labels, {"mean": gains_L}))
    frames.extend(cosine_rows(measured.rows, measured.sites))
    frames.extend(share_rows(measured.rows, attention, measured.seed))
    return pd.concat(frames)


def page_geometry(measured: CorpusMeasures) -> pd.DataFrame:
    """Return those rows of `geometry` that a page draws of its own texts: steps of a layer, and shares by class."""
    tables = MeanTables(measured.rows, measured.draws)
    tables.add(_steps(measured))
    attention: Labels = {"layer": measured.layers, "point": ["attention"]}
    return pd.concat([tables.tables()["geometry"], *share_rows(measured.rows, attention, measured.seed)])


def _add_means(tables: MeanTables, measured: CorpusMeasures, attention: Labels) -> None:
    """Add the means: of vectors at each site, of steps, of sinks, and of the lengths of what is mixed."""
    checkpoints = tuple(measured.rows)
    sites = {"site": measured.sites, "measure": GEOMETRY_MEASURES}
    to_first = attention | {"measure": ["attention_to_first"]}
    sinks = attention | {"measure": SINK_MEASURES}
    lengths = attention | {"measure": LENGTH_MEASURES}
    tables.add(Mean("geometry", sites, stored("geometry"), checkpoints))
    tables.add(_steps(measured))
    tables.add(Mean("geometry", to_first, stored("to_first"), checkpoints))
    tables.add(Mean("geometry", sinks, stored("sinks"), checkpoints, complete=False))
    tables.add(Mean("geometry", lengths, part_lengths))


def _steps(measured: CorpusMeasures) -> Mean:
    """Return the mean geometry of each step of a layer."""
    labels = {"layer": measured.layers, "point": list(STEP_POINTS), "measure": STEP_MEASURES}
    return Mean("geometry", labels, stored("steps"), tuple(measured.rows), complete=False)


def cosine_rows(rows: Mapping[str, DocumentRows], sites: Sequence[Site]) -> Iterator[pd.DataFrame]:
    """Yield the rows of `geometry` on mean cosines of tokens of different texts: of all, and by predicted class."""
    for checkpoint, document_rows in rows.items():
        sums_NXD, tokens_N, classes_N = _first_texts(document_rows, "unit_sums")
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
    """Return the mean cosine and its ends `[3, 3]`, of all texts, of those of the same class and of another one."""
    whole, without = products(units, np.zeros(len(classes_N)))
    all_texts = Jackknifed(whole.same, without.same)
    whole, without = products(_texts_of(units, kept), classes_N[kept])
    same_class = Jackknifed(whole.same, without.same)
    other_class = Jackknifed(whole.other, without.other)
    intervals = [np.ravel(cosine.interval()) for cosine in (all_texts, same_class, other_class)]
    return np.stack(intervals, -1)


def share_rows(rows: Mapping[str, DocumentRows], attention: Labels, seed: int) -> Iterator[pd.DataFrame]:
    """Yield the rows of `geometry` on what other tokens give: its shares by corpus, predicted class, text and token.

    And their difference between the checkpoints; nothing where there are no two classes of three texts or more.
    """
    shares: dict[str, Jackknifed] = {}
    for checkpoint, document_rows in rows.items():
        sums_NLD, tokens_N, classes_N = _first_texts(document_rows, "others")
        kept = usable(classes_N, tokens_N)
        if len(np.unique(classes_N[kept])) < 2:
            return
        squares_NL = document_rows["lengths"][: len(kept), :, 0]
        moments = Moments.from_sums(sums_NLD, squares_NL, tokens_N)
        texts = _texts_of(moments, kept)
        whole, without = products(texts, classes_N[kept])
        shares[checkpoint] = Jackknifed(whole.shares(), without.shares())
        null_L = class_share_null(texts, classes_N[kept], seed)
        columns: dict[str, Any] = {"mean": null_L, "documents": np.full(len(null_L), kept.sum())}
        yield table_rows("geometry", checkpoint, attention | {"measure": [PERMUTED]}, columns)
    for checkpoint, share in with_difference(shares).items():
        columns = dict(zip(INTERVAL, share.interval(), strict=True))
        columns["documents"] = np.full(share.whole.shape, share.documents)
        yield table_rows("geometry", checkpoint, attention | {"measure": SHARE_MEASURES}, columns)


def _first_texts(rows: DocumentRows, name: str) -> tuple[Doubles, Doubles, npt.NDArray[np.int64]]:
    """Return sums over tokens `[N, ..., D]` of the first `MAX_TEXTS` texts, their numbers of tokens and classes."""
    sums = np.asarray(rows[name][:MAX_TEXTS])
    counts = np.asarray(rows[f"{name}_counts"][:MAX_TEXTS])
    classes = np.asarray(rows["predicted"][:MAX_TEXTS])
    return sums, counts.ravel(), classes


def _texts_of(moments: Moments, kept: npt.NDArray[np.bool_]) -> Moments:
    """Return the moments of the texts that are `kept`."""
    return Moments(*(part[kept] for part in moments))


def part_lengths(rows: DocumentRows) -> Totals:
    """Return sums over tokens of the lengths of what others give and of the token's own part `[D, layers, 2]`."""
    return rows["lengths"][:, :, 1:], rows["lengths_counts"]

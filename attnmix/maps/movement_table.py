"""The tables of moves: rank correlations of each document, and their means with intervals over documents and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.statistics import LEVEL, Resampled, resample

COLUMNS = (
    *("layout", "layer", "step", "against", "measure", "mean", "ci_low", "ci_high"),
    *("documents", "tokens", "seeds", "lowest_seed", "highest_seed"),
)
COLUMNS_BY_DOCUMENT = ("layout", "seed", "document", "layer", "step", "against", "measure", "value", "tokens")
NULL = "permutation_null"  # `null` alone is a missing value to readers of csv
BOOTSTRAP_SAMPLES = 2000

Doubles = npt.NDArray[np.float64]


class Cell(NamedTuple):
    """A layer's step, and what moves in it are set against."""

    layer: int
    step: str
    against: str


class Correlated(NamedTuple):
    """Of one document: each measure `[maps]`, the permutations' `spearman` `[maps, permutations]`, how many tokens."""

    measures: dict[str, Doubles]
    null: Doubles
    tokens: int


class Moves:
    """Rank correlations within each document, by layout and seed, and what they are by chance."""

    def __init__(self, documents: Sequence[str], seeds: Mapping[str, list[int]], seed: int) -> None:
        """`seeds` are those of each layout; `seed` draws the bootstrap."""
        self.documents, self.seeds, self.seed = documents, seeds, seed
        self._values: dict[str, dict[tuple[Cell, str], Doubles]] = {name: {} for name in seeds}  # [documents, seeds]
        self._tokens: dict[tuple[str, Cell], npt.NDArray[np.int64]] = {}  # [documents]
        self._null: dict[tuple[str, Cell], list[Doubles]] = {}  # sums [seeds, permutations], and of how many [seeds, 1]

    def add(self, cell: Cell, document: int, maps: Sequence[tuple[str, int]], found: Correlated) -> None:
        """What was found for one document; `maps` names layout and seed of each."""
        for row, (layout, seed) in enumerate(maps):
            column = self.seeds[layout].index(seed)
            for measure, values in found.measures.items():
                empty = np.full((len(self.documents), len(self.seeds[layout])), np.nan)
                self._values[layout].setdefault((cell, measure), empty)[document, column] = values[row]
            self._tokens.setdefault((layout, cell), np.zeros(len(self.documents), np.int64))[document] = found.tokens
            shape = len(self.seeds[layout]), found.null.shape[1]
            sums, counts = self._null.setdefault((layout, cell), [np.zeros(shape), np.zeros((shape[0], 1))])
            if np.isfinite(found.null[row, 0]):
                sums[column] += found.null[row]
                counts[column] += 1

    def by_document(self) -> pd.DataFrame:
        """`COLUMNS_BY_DOCUMENT`: one row for each measure of each document on each map; `value` is NaN without one."""
        rows = [
            (layout, seed, document, *cell, measure, value, self._tokens[layout, cell][number])
            for layout, seeds in self.seeds.items()
            for column, seed in enumerate(seeds)
            for number, document in enumerate(self.documents)
            for (cell, measure), values in self._values[layout].items()
            for value in (values[number, column],)
        ]
        return pd.DataFrame(rows, columns=list(COLUMNS_BY_DOCUMENT))

    def summary(self) -> pd.DataFrame:
        """`COLUMNS`: means over documents, then over seeds.

        `ci_low` and `ci_high` are the 95 % interval of a bootstrap that draws documents, and seeds, with replacement;
        NaN for a single document, which says nothing of others. `lowest_seed` and `highest_seed` are the
        least and the largest mean of a seed. Of the measure `permutation_null`, the mean of all permutations and the
        range of 95 % of them. `documents` and `tokens` count those for which the correlation is defined.
        """
        rows = [row for layout, values in self._values.items() if values for row in self._of_layout(layout)]
        return pd.DataFrame(rows, columns=list(COLUMNS))

    def _of_layout(self, layout: str) -> list[tuple[object, ...]]:
        cells = self._values[layout]
        values_DSC = np.stack(list(cells.values()), axis=-1)
        there = np.isfinite(values_DSC)
        resampled = resample(np.where(there, values_DSC, 0), there.astype(np.float64), BOOTSTRAP_SAMPLES, self.seed)
        seeds = len(self.seeds[layout])
        generator = np.random.default_rng([self.seed, seeds])
        drawn = generator.multinomial(seeds, np.full(seeds, 1 / seeds), BOOTSTRAP_SAMPLES)
        mean = _mean_over_seeds(resampled.mean, np.ones(seeds))
        samples = _mean_over_seeds(resampled.samples, drawn.astype(np.float64))
        interval = Resampled(mean, samples, there.any(axis=1).sum(0).astype(np.float64)).correlations()
        rows: list[tuple[object, ...]] = []
        for number, (cell, measure) in enumerate(cells):
            has_value = there[:, :, number].any(axis=1)
            documents, tokens = int(has_value.sum()), int(self._tokens[layout, cell][has_value].sum())
            ends = (interval.low[number], interval.high[number])
            of_seeds = resampled.mean[:, number]
            range_of_seeds = (np.fmin.reduce(of_seeds), np.fmax.reduce(of_seeds))
            rows.append((layout, *cell, measure, mean[number], *ends, documents, tokens, seeds, *range_of_seeds))
            if measure == "spearman":
                chance = _mean_and_range(*self._null[layout, cell])
                rows.append((layout, *cell, NULL, *chance, documents, tokens, seeds, np.nan, np.nan))
        return rows


def _mean_over_seeds(means: Doubles, weights: Doubles) -> Doubles:
    """`[..., seeds, cells]` and weights `[..., seeds]` to `[..., cells]`; seeds without a value are left out."""
    there = np.isfinite(means)
    counts = np.einsum("...s,...sc->...c", weights, there.astype(np.float64))
    sums = np.einsum("...s,...sc->...c", weights, np.where(there, means, 0))
    return np.asarray(np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0))


def _mean_and_range(sums: Doubles, counts: Doubles) -> tuple[float, float, float]:
    """Over the permutations, of the same mean over documents and seeds that is taken of the values themselves."""
    has_value = counts[:, 0] > 0
    if not has_value.any():
        return float("nan"), float("nan"), float("nan")
    of_permutation = (sums[has_value] / counts[has_value]).mean(axis=0)
    low, high = np.quantile(of_permutation, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(of_permutation.mean()), float(low), float(high)

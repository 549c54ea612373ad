"""Does the picture show the mixing? A token's moves on a map against its moves in the full space, and its ratios."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from attnmix.core.options import UmapParameters
from attnmix.core.points import Site, layer_input
from attnmix.maps import correlations
from attnmix.maps.correlations import FEWEST, Indices, partial_correlation, permuted, unit_ranks
from attnmix.maps.movement_table import Cell, Correlated, Moves
from attnmix.maps.neighbours import METRICS, Coordinates, Vectors, device
from attnmix.measures.ratios import RATIOS

FULL_SPACE = "full_space"
GIVEN_FULL_SPACE = "partial_full_space"
MEASURES = ("spearman", GIVEN_FULL_SPACE, "partial_position")
PERMUTATIONS = 1000
PAIRS_AT_ONCE = 64

Doubles = npt.NDArray[np.float64]
Maps = Mapping[int, Mapping[Site, Coordinates]]
Transition = tuple[int, str, Site, Site]
Orders = Callable[[int], Indices]
"""Permutations `[permutations, size]` of so many values; the same whenever it is asked."""


def transitions(sites: Sequence[Site]) -> list[Transition]:
    """Layer, `attention`, `ffn` or `layer` (both), and the points before and after it, of the captured layers.

    Attention ends with its skip connection, and the norm where one follows. No point stands between the two where both
    are added at once; before the `ffn` of a decoder beside an encoder stands the attention to that encoder.
    """
    parts = []
    for layer in sorted({site.layer for site in sites} - {0}):
        before, after = layer_input(layer, sites), Site(layer, "layer_output")
        attended = [Site(layer, point) for point in ("attention_residual", "attention_norm")]
        entered = [*attended, Site(layer, "cross_attention_norm")]
        parts += [(layer, "attention", before, middle) for middle in attended if middle in sites][-1:]
        parts += [(layer, "ffn", middle, after) for middle in entered if middle in sites][-1:]
        parts.append((layer, "layer", before, after))
    return [part for part in parts if part[2] in sites and part[3] in sites]


def measured_moves(
    layouts: Mapping[str, Maps],
    features: Mapping[Site, Vectors],
    tokens: pd.DataFrame,
    ratios: pd.DataFrame,
    umap: UmapParameters,
) -> Moves:
    """Rank correlations of moves, within each document, for every layout, seed, layer and step.

    `layouts` has the coordinates `[tokens, 2]` by name, seed and point; `tokens` the columns `document` and `position`.
    A token's move on the map is set against its move in the full space (distances by `umap.metric`), and in the
    attention step, or in the whole layer, against each mixing ratio of that. `ratios` has the columns `layer` and
    one for each method, for each layer one row for each token in the order of the maps; empty where none were measured.
    """
    documents = [np.flatnonzero(tokens["document"] == name) for name in tokens["document"].unique()]
    position = tokens["position"].to_numpy(np.float64)
    moves = Moves(tokens["document"].unique().tolist(), {name: list(maps) for name, maps in layouts.items()}, umap.seed)
    by_layer = {layer: part.drop(columns="layer") for layer, part in ratios.groupby("layer")} if len(ratios) else {}
    orders = cache(lambda document, size: correlations.permutations(PERMUTATIONS, size, [umap.seed, document]))
    for (layer, step, before, after), names in _held_by(layouts).items():
        against = {FULL_SPACE: _pair_distances(features[before], features[after], umap.metric)}
        for method, ratio in by_layer.get(layer, pd.DataFrame()).items():
            if step == RATIOS[str(method)].covers:
                against[str(method)] = ratio.to_numpy(np.float64)
        pairs = [(name, seed) for name in names for seed in layouts[name]]
        moved_MT = np.stack([_lengths(layouts[name][seed], before, after) for name, seed in pairs])
        against_AT = np.stack(list(against.values()))
        for document, rows in enumerate(documents):
            parts = _within(against_AT[:, rows], moved_MT[:, rows], position[rows], partial(orders, document))
            for method, part in zip(against, parts, strict=True):
                moves.add(Cell(layer, step, method), document, pairs, part)
    return moves


def _held_by(layouts: Mapping[str, Maps]) -> dict[Transition, list[str]]:
    """The layouts that hold both ends of a step, by step."""
    held: dict[Transition, list[str]] = {}
    for name, maps in layouts.items():
        for transition in transitions(list(next(iter(maps.values())))):
            held.setdefault(transition, []).append(name)
    return held


def _lengths(places: Mapping[Site, Coordinates], before: Site, after: Site) -> Doubles:
    return np.asarray(np.linalg.norm(places[after].astype(np.float64) - places[before], axis=1))


def _within(against_AN: Doubles, moved_MN: Doubles, position_N: Doubles, orders: Orders) -> list[Correlated]:
    """What moves on M maps have to do with each of A variables, over N tokens of one document.

    The first variable is the move in the full space. Tokens of which a variable is unknown are left out for it.
    """
    known_AN = np.isfinite(against_AN)
    alike: dict[bytes, list[int]] = {}
    for number, known in enumerate(known_AN):
        alike.setdefault(known.tobytes(), []).append(number)
    found: dict[int, Correlated] = {}
    for numbers in alike.values():
        chosen = known_AN[numbers[0]]
        size = int(chosen.sum())
        if size < FEWEST:
            nothing, by_chance = np.full(len(moved_MN), np.nan), np.full((len(moved_MN), PERMUTATIONS), np.nan)
            found |= {number: Correlated(dict.fromkeys(MEASURES, nothing), by_chance, size) for number in numbers}
            continue
        moved, values = unit_ranks(moved_MN[:, chosen]), unit_ranks(against_AN[numbers][:, chosen])
        full, position = unit_ranks(against_AN[0, chosen]), unit_ranks(position_N[chosen])
        given = (partial_correlation(moved, values, each) for each in (full, position))
        measures = dict(zip(MEASURES, (moved @ values.T, *given), strict=True))
        for place, number in enumerate(numbers):
            own = {name: each[:, place] for name, each in measures.items()}
            found[number] = Correlated(own, permuted(moved, values[place], orders(size)), size)
    found[0].measures.pop(GIVEN_FULL_SPACE)  # nothing is left of a variable given itself
    return [found[number] for number in range(len(against_AN))]


def _pair_distances(a: Vectors, b: Vectors, metric: str) -> Doubles:
    """Distance of each vector of `a` to the same row of `b`: `[vectors]`."""
    parts = []
    for start in range(0, len(a), PAIRS_AT_ONCE):
        pair = (torch.from_numpy(each[start : start + PAIRS_AT_ONCE]).to(device(), torch.float64) for each in (a, b))
        parts.append(METRICS[metric].between(*pair).diagonal().cpu())
    return torch.cat(parts).numpy()

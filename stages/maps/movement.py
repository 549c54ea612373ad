"""Does the picture show the mixing? A token's moves on a map against its moves in the full space, and its ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from stages.maps.neighbours import METRICS, Coordinates, Vectors, device
from stages.maps.quality import spearman
from stages.mixing.ratios import RATIOS
from stages.sites import Site, layer_input

FULL_SPACE = "full_space"
COLUMNS = ("layout", "seed", "layer", "step", "against", "spearman", "tokens")

PAIRS_AT_ONCE = 64


def transitions(sites: Sequence[Site]) -> list[tuple[int, str, Site, Site]]:
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


def movement_table(
    layout: str,
    seed: int,
    features: Mapping[Site, Vectors],
    fitted: Mapping[Site, Coordinates],
    ratios: pd.DataFrame,
    metric: str,
) -> pd.DataFrame:
    """`layout, seed, layer, step, against, spearman, tokens`: rank correlations over the tokens, by layer and step.

    Of a token's move on the map with its move in the full space (`against` is `full_space`, distances by
    `metric`), and of its move in the attention step, or in the whole layer, with each mixing ratio of that.
    `ratios` has the columns `layer` and one for each method, for each layer one row for each token in the order of
    the maps; empty where none were measured.
    """
    rows = []
    for layer, step, before, after in transitions(list(fitted)):
        moved = np.linalg.norm(fitted[after].astype(np.float64) - fitted[before], axis=1)
        against = {FULL_SPACE: _pair_distances(features[before], features[after], metric)}
        here = ratios[ratios["layer"] == layer].drop(columns="layer") if len(ratios) else ratios
        for method in map(str, here.columns):
            if step == RATIOS[method].covers:
                against[method] = here[method].to_numpy(np.float64)
        for name, values in against.items():
            known = np.isfinite(values)
            correlation = spearman(moved[known], values[known])
            rows.append((layout, seed, layer, step, name, correlation, int(known.sum())))
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _pair_distances(a: Vectors, b: Vectors, metric: str) -> npt.NDArray[np.float64]:
    """Distance of each vector of `a` to the same row of `b`: `[vectors]`."""
    parts = []
    for start in range(0, len(a), PAIRS_AT_ONCE):
        pair = (torch.from_numpy(each[start : start + PAIRS_AT_ONCE]).to(device(), torch.float64) for each in (a, b))
        parts.append(METRICS[metric].between(*pair).diagonal().cpu())
    return torch.cat(parts).numpy()

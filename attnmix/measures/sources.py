"""Where the part of other tokens comes from in a pair of texts: the token's own text, the other one, special tokens.

Each is the mixing ratio with only these sources among the others, so that it compares them with what a token keeps:

    |sum_{j in S} F_ij| / (|sum_{j in S} F_ij| + |F_ii|)        and likewise through the steps of the other ratios

Tokens x tokens weights are computed a block of rows at a time.
Shapes: H heads, T tokens of a document, N tokens of its texts, d head width, E = H * d, D hidden.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnmix.measures.layers import LayerPass
from attnmix.measures.ratios import RATIOS, Parts, Split, rest_of_layer, scaled_heads

SOURCES = ("own text", "other text", "special tokens")


def source_ratios(methods: Sequence[str], layer_pass: LayerPass, segments_T: npt.NDArray[np.int8]) -> Tensor:
    """Return the ratios of one document's text tokens by each group of sources, `[sources, methods, N]`.

    `segments_T` is 0 for tokens of the first text, 1 for those of the second, -1 for special ones.
    """
    call, block, tokens = layer_pass.attention, layer_pass.block, len(segments_T)
    segments = torch.from_numpy(np.asarray(segments_T, np.int64)).to(layer_pass.x.device)
    places_N = (segments >= 0).nonzero().squeeze(-1)
    members_T = torch.nn.functional.pad(segments, (0, call.key.shape[-2] - tokens), value=2)  # padding is no source
    values = [call.value * (members_T == member).to(call.value).unsqueeze(-1) for member in (0, 1, -1)]
    contexts, sums = [], []
    for rows in call.blocks():
        weights_HRT = call.weights(rows)
        contexts.append(torch.stack([weights_HRT @ value for value in values]))
        sums.append(torch.stack([weights_HRT[..., members_T == member].sum(-1).mean(0) for member in (0, 1, -1)]))
    context_GNE = torch.cat(contexts, -2).transpose(-3, -2).flatten(-2)[:, places_N]
    weight_GN = torch.cat(sums, -1)[:, places_N]

    own_N, diagonal_NH = segments[places_N], call.diagonal()[places_N]
    every_N = torch.arange(len(places_N), device=segments.device)
    kept_NE = scaled_heads(diagonal_NH, layer_pass.value[places_N])
    W_ED = block.output.W
    given = (
        (context_GNE[own_N, every_N] - kept_NE, weight_GN[own_N, every_N] - diagonal_NH.mean(-1)),
        (context_GNE[1 - own_N, every_N], weight_GN[1 - own_N, every_N]),
        (context_GNE[2], weight_GN[2]),
    )
    features = {point: feature[places_N] for point, feature in layer_pass.features.items()}
    x_ND, projected_ND, ratios = layer_pass.x[places_N], layer_pass.projected[places_N], []
    rest = rest_of_layer(block, x_ND, projected_ND, features)
    for others_NE, weight_N in given:
        split = Split(kept_NE @ W_ED, others_NE @ W_ED)
        parts = Parts(block, weight_N, x_ND, projected_ND, split, rest)
        ratios.append(torch.stack([RATIOS[method].formula(parts) for method in methods]))
    return torch.stack(ratios)


def source_sums(methods: Sequence[str], layer_pass: LayerPass, segments_T: npt.NDArray[np.int8]) -> dict[str, Tensor]:
    """Return the sums of `source_ratios` over the text tokens `[methods]`, by `SOURCES`."""
    return dict(zip(SOURCES, source_ratios(methods, layer_pass, segments_T).double().sum(-1), strict=True))

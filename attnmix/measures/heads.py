"""The mixing ratio of each head: how much of what a head adds to a token comes from other tokens, by norm.

    |sum_{j!=i} a^h_ij f_h(x_j)| / (|sum_{j!=i} a^h_ij f_h(x_j)| + |a^h_ii f_h(x_i)|)

`attn_n` of one head (Kobayashi et al., EMNLP 2020), before any norm that stands on attention's output: such a norm
divides all heads together. The sum over the others is what the head gives before W_O without its own part.

Shapes: H heads, T tokens, d head width, R = min(d, hidden).
"""

from __future__ import annotations

import torch

from attnmix.measures.layers import Block, LayerPass
from attnmix.measures.ratios import Split

Tensor = torch.Tensor


def head_factors(block: Block, heads: int) -> Tensor:
    """L^h `[H, d, R]` with |u W_O^h| = |u L^h| for every u `[d]`: L^h L^hT is the Gram matrix W_O^h W_O^hT.

    By a QR decomposition in float64, as the root of u Gram u^T would lose half of the digits.
    """
    W_HdD = block.output.W.unflatten(0, (heads, -1))
    factors: Tensor = torch.linalg.qr(W_HdD.double().mT, mode="r").R.mT.to(W_HdD)
    return factors


def head_ratios(seen: LayerPass, factors_HdR: Tensor) -> Tensor:
    """The ratio `[T, H]` of one document's tokens in one layer; 0 where nothing contributes to a token."""
    heads_THd = seen.features["attention_heads"].unflatten(-1, (len(factors_HdR), -1))
    tokens = len(heads_THd)
    weights_TH = seen.attention.diagonal()[:tokens]
    own_THd = weights_TH.unsqueeze(-1) * seen.attention.value.transpose(0, 1)[:tokens]
    through = (torch.einsum("thd,hdr->thr", part, factors_HdR) for part in (own_THd, heads_THd - own_THd))
    return Split(*through).share()

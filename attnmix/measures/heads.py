"""Measures of single attention heads: mixing ratios, and the tensors of each head in one text.

The mixing ratio of a head is `attn_n` restricted to that head (Kobayashi et al., EMNLP 2020):

    |sum_{j!=i} a^h_ij f_h(x_j)| / (|sum_{j!=i} a^h_ij f_h(x_j)| + |a^h_ii f_h(x_i)|)

It refers to vectors before any norm of attention's output, because such a norm scales all heads together. The sum over
other tokens is the head's output before W_O minus the part of the token itself. `record_heads` returns queries, keys,
softmax sums and, for short texts, all vectors; `attnmix/core/store/heads.py` documents the names.

Shapes: L layers, H heads, T tokens, d head width, D hidden, R = min(d, D).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnmix.core.errors import InputError
from attnmix.core.store.heads import VECTOR_BYTES
from attnmix.measures.layers import Block, LayerPass, checkpoint_name, map_layers
from attnmix.measures.ratios import Split
from attnmix.models.attention import AttentionCall
from attnmix.models.encoding import padded
from attnmix.models.families import HEADS, PROJECTED, family_of

RESULTS = ("attention_norm", "attention_residual", "attention_output")
"""Capture points of the attention sublayer's result. The first available point is used."""
FAR_BELOW = -1e30  # a key is hidden if the mask adds less than this value to its score


def head_factors(block: Block, heads: int) -> Tensor:
    """Return L^h `[H, d, R]` with |u W_O^h| = |u L^h| for every u `[d]`.

    L^h L^hT equals the Gram matrix W_O^h W_O^hT. The QR decomposition in float64 avoids sqrt(u Gram u^T), which would
    lose half of the digits.
    """
    W_HdD = block.output.W.unflatten(0, (heads, -1))
    R_HRd = torch.linalg.qr(W_HdD.double().mT, mode="r").R
    factors_HdR: Tensor = R_HRd.mT.to(W_HdD)
    return factors_HdR


def head_ratios(layer_pass: LayerPass, factors_HdR: Tensor) -> Tensor:
    """Return the mixing ratio `[..., T, H]` of each head in one layer; 0 for tokens without contributions."""
    heads = len(factors_HdR)
    heads_THd = layer_pass.features["attention_heads"].unflatten(-1, (heads, -1))
    value_THd = layer_pass.attention.value.transpose(-3, -2)
    own_THd = layer_pass.diagonal.unsqueeze(-1) * value_THd
    others_THd = heads_THd - own_THd
    own_THR = torch.einsum("...thd,hdr->...thr", own_THd, factors_HdR)
    others_THR = torch.einsum("...thd,hdr->...thr", others_THd, factors_HdR)
    return Split(own_THR, others_THR).share()


def record_heads(base: PreTrainedModel, ids: npt.NDArray[np.int32], layers: int) -> dict[str, npt.NDArray[Any]]:
    """Return the tensors of the attention heads of one text, by name, in all layers; `layers` is their number.

    Return {} for a family without queries and keys. Raise `InputError` if a bias is added to attention scores.
    """

    def read_layer(layer_pass: LayerPass) -> dict[str, Tensor]:
        return layer_heads(base, layer_pass.document(0), layers)

    batch = padded([ids.tolist()], 0, base.device)
    points = ("attention_heads", "attention_output", PROJECTED, *RESULTS)
    by_layer = map_layers(read_layer, base, batch, points)
    return joined_heads(by_layer)


def layer_heads(base: PreTrainedModel, layer_pass: LayerPass, layers: int) -> dict[str, Tensor]:
    """Return the head tensors of one text in one of `layers` layers; {} for a family without queries and keys."""
    if HEADS in family_of(base.config).absent():
        return {}
    heads = len(layer_pass.attention.query)
    key_heads = getattr(base.config, "num_key_value_heads", None) or heads
    return _read_parts(layer_pass, checkpoint_name(base), key_heads, layers)


def joined_heads(by_layer: Sequence[Mapping[str, Tensor]]) -> dict[str, npt.NDArray[Any]]:
    """Stack the head tensors of all layers on the host, in their storage dtypes."""
    parts = {}
    for name in by_layer[0]:
        stacked = torch.stack([layer[name] for layer in by_layer])
        dtype = np.int32 if name == "reach" else np.float32
        parts[name] = stacked.cpu().numpy().astype(dtype)
    return parts


def _read_parts(layer_pass: LayerPass, model: str, key_heads: int, layers: int) -> dict[str, Tensor]:
    """Return the head tensors of one layer. For short texts, these include all vectors."""
    call = layer_pass.attention
    block = layer_pass.block
    features = layer_pass.features
    heads = len(call.query)
    first_of_group = slice(None, None, heads // key_heads)  # grouped heads share keys and values
    W_HdD = block.output.W.unflatten(0, (heads, -1))
    attended_HTd = features["attention_heads"].unflatten(-1, (heads, -1)).transpose(0, 1)
    given_HTD = attended_HTd @ W_HdD
    source_HTD = call.value @ W_HdD
    parts = {
        "query": call.query,
        "key": call.key[first_of_group],
        "log_sums": call.log_sums,
        "reach": _find_reach(call, f"{model}: layer {layer_pass.call.number}"),
        "scores": torch.tensor([call.scaling, call.softcap or 0.0], dtype=torch.float64),
        "source_norms": source_HTD.norm(dim=-1),
        "given_norms": given_HTD.norm(dim=-1),
    }
    given_bytes = 4 * given_HTD.numel() * layers
    if given_bytes > VECTOR_BYTES:
        return parts
    results = [features[point] for point in RESULTS if point in features]
    parts["value"] = call.value[first_of_group]
    parts["attended"] = attended_HTd
    parts["given"] = given_HTD
    parts["output_bias"] = block.output.b
    parts["input"] = layer_pass.x
    parts["result"] = results[0]
    parts.update(_read_norms(block))
    return parts


def _read_norms(block: Block) -> dict[str, Tensor]:
    """Return the weights of the existing norms after attention and, if any exists, the constants of both."""
    norms = {
        "attention_output_norm": block.attention_output_norm,
        "attention_norm": block.attention_norm,
    }
    parts = {}
    for name, norm in norms.items():
        if not norm.absent:
            parts[name] = torch.stack([norm.gamma, norm.beta])
    if parts:
        constants = [[norm.eps, float(norm.centred)] for norm in norms.values()]
        parts["norm_constants"] = torch.tensor(constants, dtype=torch.float64)
    return parts


def _find_reach(call: AttentionCall, where: str) -> Tensor:
    """Return each token's first and last visible key `[T, 2]`; raise `InputError` for masks with gaps."""
    tokens = torch.arange(call.key.shape[-2], device=call.key.device)
    if call.mask is None:
        first = torch.zeros_like(tokens)
        last = tokens if call.causal else tokens[-1].expand(len(tokens))
        return torch.stack([first, last], dim=-1)
    is_visible = (call.mask == 0).all(0)  # [T, T], in all heads
    is_hidden = (call.mask < FAR_BELOW).all(0)
    first = is_visible.int().argmax(-1)
    distance_from_end = is_visible.flip(-1).int().argmax(-1)
    last = tokens[-1] - distance_from_end
    is_inside = (tokens >= first.unsqueeze(-1)) & (tokens <= last.unsqueeze(-1))
    if not torch.equal(is_visible, is_inside) or not torch.equal(is_hidden, ~is_inside):
        raise InputError(
            f"{where} adds terms to the attention scores, or its mask has gaps; heads can only be stored if each token "
            "attends to a contiguous range of sources"
        )
    return torch.stack([first, last], dim=-1)

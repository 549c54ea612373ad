"""Functions that compute the mixing ratio of each attention head, and that record the tensors of all heads.

The mixing ratio of a head is `attn_n` restricted to that head (Kobayashi et al., EMNLP 2020):

    |sum_{j!=i} a^h_ij f_h(x_j)| / (|sum_{j!=i} a^h_ij f_h(x_j)| + |a^h_ii f_h(x_i)|)

A norm after attention is not applied, because it acts on the sum of all heads. The sum over other tokens is the head's
output minus the contribution of the token itself. `record_heads` returns arrays such as queries, keys and, for short
texts, values; the names of these arrays are documented in `attnmix/core/store/heads.py`.

Shapes: L layers, H heads, T tokens, d head width, D hidden, E = H * d, R = min(d, D).
"""

import logging
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
"""Capture points of the result of the attention sublayer. The first of them that the model family has is used."""
FAR_BELOW = -1e30  # a key is masked if the attention mask adds a number below this limit to its score


def head_factors(block: Block, heads: int) -> Tensor:
    """Return a matrix L^h `[d, R]` for each head h, such that |u W_O^h| = |u L^h| for every vector u `[d]`.

    W_O^h `[d, D]` contains the rows of the output projection that belong to head h, and R = min(d, D). L^h (L^h)^T
    equals the Gram matrix G = W_O^h (W_O^h)^T. The QR decomposition in float64 avoids sqrt(u G u^T), which would lose
    half of the digits.
    """
    W_HdD = block.output.W.unflatten(0, (heads, -1))
    R_HRd = torch.linalg.qr(W_HdD.double().mT, mode="r").R  # the transpose of W_O^h is Q R, where Q preserves lengths
    factors_HdR: Tensor = R_HRd.mT.to(W_HdD)
    return factors_HdR


def head_ratios(layer_pass: LayerPass, factors_HdR: Tensor) -> Tensor:
    """Return the mixing ratio `[..., T, H]` of each head in one layer; 0 if both parts of a head's output are 0.

    The output of a head for a token is the sum of two parts: the contribution of the token itself and that of all other
    tokens. The ratio is |others| / (|others| + |own|), with lengths after W_O. `factors_HdR` is the result of
    `head_factors`; multiplication by these factors gives vectors of the same lengths as multiplication by W_O.
    """
    heads = len(factors_HdR)
    heads_THd = layer_pass.features["attention_heads"].unflatten(-1, (heads, -1))
    value_THd = layer_pass.attention.value.transpose(-3, -2)
    own_THd = layer_pass.diagonal.unsqueeze(-1) * value_THd
    others_THd = heads_THd - own_THd
    own_THR = torch.einsum("...thd,hdr->...thr", own_THd, factors_HdR)
    others_THR = torch.einsum("...thd,hdr->...thr", others_THd, factors_HdR)
    return Split(own_THR, others_THR).share()


def record_heads(base: PreTrainedModel, ids: npt.NDArray[np.int32], layers: int) -> dict[str, npt.NDArray[Any]]:
    """Return arrays of the attention heads of all layers for one text, by name.

    `layers` is the number of layers of the model. Return {} for a model family without queries and keys, and for a
    model whose layers have different numbers of heads. Raise `InputError` if a bias is added to attention scores, or if
    the attention mask of a token has gaps.
    """

    def read_layer(layer_pass: LayerPass) -> dict[str, Tensor]:
        return layer_heads(base, layer_pass.document(0), layers)

    batch = padded([ids.tolist()], 0, base.device)
    points = ("attention_heads", "attention_output", PROJECTED, *RESULTS)
    by_layer = map_layers(read_layer, base, batch, points)
    return joined_heads(by_layer)


def layer_heads(base: PreTrainedModel, layer_pass: LayerPass, layers: int) -> dict[str, Tensor]:
    """Return tensors of one layer's attention heads for one text, by name, such as queries, keys and attention outputs.

    The names are documented in `attnmix/core/store/heads.py`. Return {} for a model family without queries and keys.
    `layers` is the number of layers of the model, because the size of the tensors of all layers together decides which
    of them are included.
    """
    if HEADS in family_of(base.config).absent():
        return {}
    heads = len(layer_pass.attention.query)
    # The number of different keys per token; configurations of models in which each head has its own key may lack it.
    key_heads = getattr(base.config, "num_key_value_heads", None) or heads
    return _read_parts(layer_pass, model=checkpoint_name(base), key_heads=key_heads, layers=layers)


def joined_heads(by_layer: Sequence[Mapping[str, Tensor]]) -> dict[str, npt.NDArray[Any]]:
    """Stack the head tensors of all layers, by name, as NumPy arrays in the dtypes in which they are stored.

    Return {} if the number of heads differs between layers, for example between an encoder and its decoder.
    """
    shapes = {layer["query"].shape for layer in by_layer if layer}  # `layer` is {} in a family without queries and keys
    if len(shapes) > 1:
        logging.info("heads: omitted, because the numbers of heads differ between the layers")
        return {}
    parts = {}
    for name in by_layer[0]:
        stacked = torch.stack([layer[name] for layer in by_layer])
        dtype = np.int32 if name == "reach" else np.float32  # `reach` contains positions
        parts[name] = stacked.cpu().numpy().astype(dtype)
    return parts


def _read_parts(layer_pass: LayerPass, model: str, key_heads: int, layers: int) -> dict[str, Tensor]:
    """Return the tensors of the heads of one layer, by name, for one text.

    f_h(x_j) is the value vector v_j of token j after W_O of head h, and a^h_ij are the attention weights. Texts whose
    tensors `given` of all `layers` layers together have more than `VECTOR_BYTES` bytes lack the vectors: `value`, the
    names that follow it, and the parameters of norms. `key_heads` is the number of different key heads; keys and values
    that several heads share are included once. `model` is the model's name for messages.
    """
    attention = layer_pass.attention
    block = layer_pass.block
    heads = len(attention.query)
    first_of_group = slice(None, None, heads // key_heads)  # consecutive heads share a key head
    W_HdD = block.output.W.unflatten(0, (heads, -1))
    heads_THd = layer_pass.features["attention_heads"].unflatten(-1, (heads, -1))
    attended_HTd = heads_THd.transpose(0, 1)  # sum_j a^h_ij v_j
    given_HTD = attended_HTd @ W_HdD  # sum_j a^h_ij f_h(x_j)
    source_HTD = attention.value @ W_HdD  # f_h(x_j)
    parts = {
        "query": attention.query,
        "key": attention.key[first_of_group],
        "log_sums": attention.log_sums,  # log of the softmax denominators
        # The first and the last visible key of each token; messages begin with `where`.
        "reach": _find_reach(attention, where=f"{model}: layer {layer_pass.call.number}"),
        # The constants from which scores are computed: the scaling factor of q.k, and the softcap (0: no softcap).
        "scores": torch.tensor([attention.scaling, attention.softcap or 0.0], dtype=torch.float64),
        "source_norms": source_HTD.norm(dim=-1),
        "given_norms": given_HTD.norm(dim=-1),
    }
    bytes_per_number = 4  # float32
    given_bytes = bytes_per_number * given_HTD.numel() * layers
    if given_bytes <= VECTOR_BYTES:
        parts |= {
            "value": attention.value[first_of_group],
            "attended": attended_HTd,
            "given": given_HTD,
            "output_bias": block.output.b,
            "input": layer_pass.x,
            "result": _read_result(layer_pass),
        }
        parts |= _read_norms(block)
    return parts


def _read_result(layer_pass: LayerPass) -> Tensor:
    """Return the result `[T, D]` of the attention sublayer: the vectors at the first available point of `RESULTS`."""
    features = layer_pass.features
    available = [features[point] for point in RESULTS if point in features]
    return available[0]


def _read_norms(block: Block) -> dict[str, Tensor]:
    """Return gamma and beta `[2, D]` of each norm after attention, by name; absent norms are omitted.

    If at least one norm is present, the result also contains `norm_constants` `[2, 2]`. Each row contains eps of one
    norm, and 1 if this norm subtracts the mean, otherwise 0.
    """
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
    """Return the positions of the first and last visible key of each token, `[T, 2]`.

    Raise `InputError` if the visible keys of a token are not contiguous, or if the mask contains biases of attention
    scores or other numbers besides 0 and large negative numbers. The message begins with `where`.
    """
    positions = torch.arange(call.key.shape[-2], device=call.key.device)
    last_position = positions[-1]
    if call.mask is None:
        first = torch.zeros_like(positions)
        last = positions if call.causal else last_position.expand(len(positions))
        return torch.stack([first, last], dim=-1)

    # The mask is a number that is added to the score of each token (first axis T) and key (second axis T) in each head.
    is_visible_TT = (call.mask == 0).all(0)  # in all heads
    is_hidden_TT = (call.mask < FAR_BELOW).all(0)
    first = is_visible_TT.int().argmax(-1)  # argmax returns the first maximum
    distance_from_end = is_visible_TT.flip(-1).int().argmax(-1)
    last = last_position - distance_from_end
    is_in_range_TT = (positions >= first.unsqueeze(-1)) & (positions <= last.unsqueeze(-1))
    all_in_range_are_visible = torch.equal(is_visible_TT, is_in_range_TT)
    all_others_are_hidden = torch.equal(is_hidden_TT, ~is_in_range_TT)
    if not (all_in_range_are_visible and all_others_are_hidden):
        raise InputError(
            f"{where} adds terms to the attention scores, or its mask has gaps; heads can only be stored if each token "
            "attends to a contiguous range of sources"
        )
    return torch.stack([first, last], dim=-1)

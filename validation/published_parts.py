"""Compare the decomposition of vectors into parts with the published method DecompX, for a BERT model and any texts.

    python -m validation.published_parts <checkpoint folder> <texts> [--documents 8] [--max-length 48]

Both methods decompose each vector into parts p_j that stem from the source tokens j. They differ in the biases.
Modarressi et al. (ACL 2023) distribute every bias over the tokens: the part p_j receives the fraction
|p_j . b| / sum_k |p_k . b| of a bias b (`absdot`). The bias b_V of the first layer is not distributed, but remains in
the value of each token. attnmix keeps the biases as a separate part. Both methods have the same two rules for GELU:
`GeLU_ZO` (the authors' default; `chord` in attnmix) and `GeLU_LA` (`tangent` in attnmix).

The published method is computed in float64 from the weights and embeddings of the model, without the measures of
attnmix. For the vectors after each layer, the program prints the own share of a token by length and by projection, and
the mean rank correlation between the lengths of the parts in the two methods. No network is needed.

Shapes: J parts (the source tokens and, with `biases="token"`, the biases), T tokens, D hidden, H heads, E = H * head
width, W width of the feed-forward network.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from scipy.stats import spearmanr
from torch import Tensor
from transformers import PreTrainedModel

from attnmix.core.errors import InputError
from attnmix.measures.input_parts import PartsReader
from attnmix.models.checkpoint import check_max_length, load_tokenizer
from attnmix.models.encoding import padded
from attnmix.models.loading import load_base
from validation.published import read_plain

OWN_RULES = {"GeLU_ZO": "chord", "GeLU_LA": "tangent"}
"""The rule of attnmix that corresponds to each approximation of an activation function in DecompX."""
SMALLEST_SUM = 1e-12  # added to divisors, as in the authors' code


class Configuration(NamedTuple):
    """Options of `DecompXConfig`: `FFN_approx_type`, `bias_decomp_type` and `include_bias_token`."""

    activation: str = "GeLU_ZO"  # or "GeLU_LA"
    biases: str = "absdot"  # "token": a separate part, as with `include_bias_token`; "none": omitted


class Summary(NamedTuple):
    """Statistics of the parts of one text by level: the embeddings, and the output of each layer."""

    own_share: Tensor  # [levels, tokens]
    own_projection: Tensor  # [levels, tokens]
    length: Tensor  # [levels, tokens, sources]


def published_parts(base: PreTrainedModel, ids: Tensor, configuration: Configuration) -> list[tuple[Tensor, Tensor]]:
    """Return the vectors `[T, D]` and their parts `[T, J, D]` at each level, for the token IDs `[T]` of one text.

    The levels are the embeddings and the output of each layer.
    """
    if base.config.model_type != "bert":
        raise InputError(f"{base.name_or_path}: DecompX is defined for BERT, not for {base.config.model_type}")
    network: Any = base
    with torch.no_grad():
        x_TD = network.embeddings(input_ids=ids[None])[0]
        parts_TJD = torch.diag_embed(x_TD.T).permute(1, 2, 0)  # each input vector belongs to its own token
        if configuration.biases == "token":
            parts_TJD = torch.cat([parts_TJD, torch.zeros_like(x_TD)[:, None]], dim=1)
        levels = [(x_TD, parts_TJD)]
        for number, layer in enumerate(network.encoder.layer):
            x_TD, parts_TJD = _through_layer(layer, x_TD, parts_TJD, configuration, first=number == 0)
            levels.append((x_TD, parts_TJD))
    return levels


def _through_layer(
    layer: Any, x_TD: Tensor, parts_TJD: Tensor, configuration: Configuration, first: bool
) -> tuple[Tensor, Tensor]:
    """Return the output vectors `[T, D]` of a layer and their parts `[T, J, D]`, from the layer's input and its parts.

    In the `first` layer, the bias b_V remains in the value of each token.
    """
    biases = configuration.biases
    attention = layer.attention.self
    output = layer.attention.output
    # The vectors after attention and its skip connection.
    heads = (attention.num_attention_heads, attention.attention_head_size)
    query_HTd = attention.query(x_TD).unflatten(-1, heads).movedim(1, 0)
    key_HTd = attention.key(x_TD).unflatten(-1, heads).movedim(1, 0)
    value_HTd = attention.value(x_TD).unflatten(-1, heads).movedim(1, 0)
    weights_HTT = (query_HTd @ key_HTd.mT / heads[1] ** 0.5).softmax(-1)
    residual_TD = output.dense((weights_HTT @ value_HTd).movedim(0, 1).flatten(-2)) + x_TD

    # The parts of these vectors.
    values_TJE = parts_TJD @ attention.value.weight.T
    if first:
        tokens = torch.arange(len(x_TD))
        values_TJE[tokens, tokens] += attention.value.bias
        bias_D = output.dense.bias
    else:
        bias_D = output.dense.weight @ attention.value.bias + output.dense.bias
    mixed_TJE = torch.einsum("hts,sjhd->tjhd", weights_HTT, values_TJE.unflatten(-1, heads)).flatten(-2)
    residual_TJD = with_bias(mixed_TJE @ output.dense.weight.T + parts_TJD, bias_D, biases)

    # The norms and the feed-forward network, for vectors and parts.
    stream_TD = output.LayerNorm(residual_TD)
    stream_TJD = _normed(output.LayerNorm, residual_TJD, residual_TD, biases)
    summed_TD = stream_TD + layer.output.dense(layer.intermediate(stream_TD))
    summed_TJD = stream_TJD + _feed_forward(layer, stream_TJD, stream_TD, configuration)
    return layer.output.LayerNorm(summed_TD), _normed(layer.output.LayerNorm, summed_TJD, summed_TD, biases)


def _feed_forward(layer: Any, stream_TJD: Tensor, stream_TD: Tensor, configuration: Configuration) -> Tensor:
    """Return the parts `[T, J, D]` of the output of the feed-forward network.

    `stream_TD` are the network's input vectors, and `stream_TJD` their parts. With "GeLU_ZO", the activation multiplies
    each part by the quotient of output and input; with "GeLU_LA", by the derivative of the activation, and the
    remainder is treated as a bias.
    """
    first = layer.intermediate.dense
    last = layer.output.dense
    activation = layer.intermediate.intermediate_act_fn
    input_TJW = with_bias(stream_TJD @ first.weight.T, first.bias, configuration.biases)
    input_TW = first(stream_TD)
    if configuration.activation == "GeLU_ZO":
        inner_TJW = input_TJW * (activation(input_TW) / input_TW)[:, None]
    else:
        slope_TW = torch.func.vmap(torch.func.vmap(torch.func.grad(activation)))(input_TW)
        rest_TW = activation(input_TW) - slope_TW * input_TW
        inner_TJW = with_bias(input_TJW * slope_TW[:, None], rest_TW, configuration.biases)
    return with_bias(inner_TJW @ last.weight.T, last.bias, configuration.biases)


def _normed(norm: torch.nn.LayerNorm, parts_TJD: Tensor, whole_TD: Tensor, biases: str) -> Tensor:
    """Return the parts `[T, J, D]` after a LayerNorm, which divides by the standard deviations of the whole vectors."""
    deviation_T11 = (whole_TD.var(-1, correction=0) + norm.eps).sqrt()[:, None, None]
    centred_TJD = parts_TJD - parts_TJD.mean(-1, keepdim=True)
    return with_bias(centred_TJD / deviation_T11 * norm.weight, norm.bias, biases)


def with_bias(parts_TJD: Tensor, bias: Tensor, biases: str) -> Tensor:
    """Return the parts `[T, J, D]` of vectors after a bias `[D]` or `[T, D]` was added to the vectors.

    `biases` determines the distribution of the bias: "absdot" over all parts, in proportion to their absolute dot
    product with the bias; "token" to the last part; "none" to no part.
    """
    if biases == "none":
        return parts_TJD
    bias_TD = bias.expand(len(parts_TJD), -1)
    if biases == "token":
        bias_part_T1D = parts_TJD[:, -1:] + bias_TD[:, None]
        return torch.cat([parts_TJD[:, :-1], bias_part_T1D], dim=1)
    products_TJ = torch.einsum("tjd,td->tj", parts_TJD, bias_TD).abs()
    portions_TJ = products_TJ / (products_TJ.sum(-1, keepdim=True) + SMALLEST_SUM)
    return parts_TJD + portions_TJ[..., None] * bias_TD[:, None]


def summary(levels: Sequence[tuple[Tensor, Tensor]]) -> Summary:
    """Return the statistics of the parts that stem from source tokens, without the part of the biases.

    `levels` contains the vectors `[T, D]` and their parts `[T, J, D]` at each level.
    """
    own_shares = []
    projections = []
    lengths = []
    for whole_TD, parts_TJD in levels:
        tokens = torch.arange(len(whole_TD))
        sources_TTD = parts_TJD[:, : len(tokens)]
        own_TD = sources_TTD[tokens, tokens]
        own_T = own_TD.norm(dim=-1)
        others_T = (sources_TTD.sum(1) - own_TD).norm(dim=-1)
        own_shares.append(own_T / (own_T + others_T))
        projections.append((own_TD * whole_TD).sum(-1) / whole_TD.square().sum(-1))
        lengths.append(sources_TTD.norm(dim=-1))
    return Summary(torch.stack(own_shares), torch.stack(projections), torch.stack(lengths))


def library_summary(base: PreTrainedModel, ids: Tensor, rule: str) -> Summary:
    """Return the statistics of the parts of one text, computed by attnmix with the propagation rule `rule`."""
    parts = PartsReader(base, rule).read(padded([ids.tolist()], 0, base.device))
    return Summary(parts["own_share"], parts["projection"].diagonal(dim1=-2, dim2=-1), parts["length"])


def rank_correlations(first: Summary, second: Summary) -> Tensor:
    """Return the rank correlation between the part lengths of two methods for each layer, averaged over tokens."""
    by_layer = []
    # Level 0, the embeddings, is omitted: each embedding consists of its own part only.
    for first_TT, second_TT in zip(first.length[1:], second.length[1:], strict=True):
        correlations = []
        for first_T, second_T in zip(first_TT, second_TT, strict=True):
            correlations.append(spearmanr(first_T, second_T).statistic)
        by_layer.append(torch.tensor(correlations).mean())
    return torch.stack(by_layer)


def main() -> None:
    """Print the comparison of attnmix with DecompX for each rule in `OWN_RULES`."""
    arguments = _parse_arguments()
    folder = arguments.checkpoint
    check_max_length("--max-length", arguments.max_length, folder)
    texts = read_plain(arguments.texts, load_tokenizer(folder), arguments.documents, arguments.max_length)
    base = load_base(folder).double()
    print(f"{folder}: {len(texts)} texts, {sum(len(text.ids) for text in texts)} tokens, levels 0 to the last")
    for activation, rule in OWN_RULES.items():
        published = []
        library = []
        for text in texts:
            ids = torch.tensor(text.ids)
            published.append(summary(published_parts(base, ids, Configuration(activation))))
            library.append(library_summary(base, ids, rule))
        published_name = f"{activation}, absdot"
        for name, summaries in ((published_name, published), (f"library, {rule}", library)):
            own_shares = torch.cat([100 * each.own_share for each in summaries], dim=1)
            _print_row(name, "own share, %", own_shares.mean(1))
            projections = torch.cat([100 * each.own_projection for each in summaries], dim=1)
            _print_row(name, "own projection, %", projections.mean(1))
        correlations = [rank_correlations(*pair) for pair in zip(published, library, strict=True)]
        _print_row(published_name, "ranks, 100 rho", 100 * torch.stack(correlations).mean(0))


def _parse_arguments() -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("texts", type=Path)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--max-length", type=int, default=48)
    return parser.parse_args()


def _print_row(name: str, quantity: str, values: Tensor) -> None:
    print(f"{name:20s} {quantity:18s}" + "".join(f"{value:7.1f}" for value in values.tolist()))


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")

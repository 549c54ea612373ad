"""Models with a known own share of every vector, and the values of all measures for these models.

    python -m validation.planted_amounts [--seed 0] [--to docs/measures]

In each model, the vector of token i after the last layer is a x_i + b x_{i-1} + c, up to a factor from the norm. The
contents x have equal length (in one model, that of token 0 is 0) and are independent between tokens and texts; c is a
constant. The own share by lengths is a / (a + b). If several other tokens contribute, b is the length of the sum of
their independent contributions. Contents of three consecutive tokens are orthogonal and have mean 0. The vectors of the
measured tokens therefore have the same mean and standard deviation, so the normalization layers act linearly on them.
Attention depends only on positions, not on contents.

Shapes: B texts, T tokens, D hidden, C dimensions of contents.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from attnmix.measures.contributions import contributions, layer_contributions
from attnmix.measures.documents import Document
from attnmix.measures.exchange import exchange_sums, measure_exchange
from attnmix.measures.input_parts import PartsReader
from attnmix.measures.layers import LayerPass, map_layers
from attnmix.measures.matrices import LAYER_MATRICES, MATRICES, ROLLOUTS
from attnmix.measures.ratios import RATIOS, mixing_ratios
from validation.planted import POINTS
from validation.planted_cases import BEFORE, EYE, SHARPNESS, TOKENS, ModelShape, create_bert, create_gpt2

TEXTS, MEASURED = 64, 8
POSITIONS = np.arange(2, TOKENS, dtype=np.int32)  # the tokens with two preceding tokens, counted from 0
GROUPS = 3  # number of orthogonal subspaces of contents, which are assigned by position
CONTENT, WIDTH = TOKENS, TOKENS + 4 * GROUPS  # content dimensions follow the position dimensions
SINK_WEIGHT = 0.9
TOLERANCE = 0.02
DIGITS = 4
NEIGHBOUR_AND_OWN = (BEFORE + EYE) / 2
SINK = (1 - SINK_WEIGHT) * BEFORE + SINK_WEIGHT * torch.zeros_like(EYE).index_fill(1, torch.tensor(0), 1)


@dataclass(frozen=True)
class Amounts:
    """A constructed model, and the lengths of a token's own contribution and of the contribution of other tokens."""

    name: str
    planted: str
    """A description of the model's last vectors y."""
    own: float
    others: float
    weights_TT: Tensor = BEFORE
    """The attention weights."""
    gain: float = 1.0
    """The factor of the attended content in the output of attention."""
    layers: int = 1
    feed_forward: float = 0.0
    """Coefficient of the attended content in the output of the feed-forward network."""
    bias: float = 0.0
    silent_first: bool = False
    """True if the first token's content is 0 in every text."""
    decoder: bool = False
    position: float = 0.05
    """Length of the position vector that is added to every token. Attention selects the neighbour by this vector."""

    @property
    def own_share(self) -> float:
        """The own share of a token in its last vector, by the lengths of the contributions."""
        return self.own / (self.own + self.others)


CASES = (
    Amounts("neighbour", "y = x_i + x_{i-1}", 1, 1),
    Amounts("weak_neighbour", "y = x_i + 1/4 x_{i-1}", 1, 0.25, gain=0.25),
    Amounts("strong_neighbour", "y = x_i + 3 x_{i-1}", 1, 3, gain=3.0),
    Amounts("own_and_neighbour", "attention on both: y = 2 x_i + x_{i-1}", 2, 1, NEIGHBOUR_AND_OWN, gain=2.0),
    Amounts("feed_forward", "the network adds 2 (x_i + x_{i-1}) once more", 3, 3, feed_forward=2.0),
    Amounts("sink", "weight .9 on a constant token, .1 on the neighbour", 1, 0.3, SINK, gain=3.0, silent_first=True),
    Amounts("constant", "y = x_i + x_{i-1} + 20", 1, 1, bias=20.0),
    Amounts("constant_in_every_token", "the same, and a constant of length 1.5 in every token", 1, 1, position=1.5),
    Amounts("two_layers", "y = x_i + 2 x_{i-1} + x_{i-2}", 1, 5**0.5, layers=2),
    Amounts("decoder", "y = x_i + x_{i-1}, causal and pre-LN", 1, 1, decoder=True),
    Amounts("decoder_feed_forward", "the same, and the network adds it twice", 3, 3, feed_forward=2.0, decoder=True),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table of own shares, `planted_amounts.csv`."""
    parser = argparse.ArgumentParser(
        prog="python -m validation.planted_amounts",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the texts")
    parser.add_argument("--to", type=Path, default=Path("docs/measures"), help="folder of planted_amounts.csv")
    options = parser.parse_args(arguments)
    options.to.mkdir(parents=True, exist_ok=True)
    table = amounts_table(options.seed)
    table.to_csv(options.to / "planted_amounts.csv", index=False, lineterminator="\n")
    print(f"{options.to / 'planted_amounts.csv'}: {len(CASES)} cases, {table['measure'].nunique()} measures")
    return 0


def amounts_table(seed: int) -> pd.DataFrame:
    """Return a table `[case, measure, expected, value]` with the known own share and the value of each measure."""
    rows = []
    for case in CASES:
        base = build_model(case, draw_contents(case, torch.Generator().manual_seed(seed)))
        for measure, value in own_shares(base).items():
            rounded = round(value, DIGITS) + 0.0  # avoids -0
            rows.append((case.name, measure, round(case.own_share, DIGITS), rounded))
    return pd.DataFrame(rows, columns=["case", "measure", "expected", "value"])


def draw_contents(case: Amounts, generator: torch.Generator) -> Tensor:
    """Return random contents `[B, T, C]` of equal length; that of token 0 is 0 if `case.silent_first` is True.

    The position determines one of `GROUPS` groups of four dimensions, which contain (u, -u) for a random point u on a
    circle. The other dimensions are 0.
    """
    angles_BT = 2 * torch.pi * torch.rand(TEXTS, TOKENS, generator=generator, dtype=torch.float64)
    points_BT2 = torch.stack([angles_BT.cos(), angles_BT.sin()], -1)
    contents = torch.zeros(TEXTS, TOKENS, GROUPS, 4, dtype=torch.float64)
    first = 1 if case.silent_first else 0
    for token in range(first, TOKENS):
        contents[:, token, token % GROUPS] = torch.cat([points_BT2[:, token], -points_BT2[:, token]], -1)
    return contents.flatten(-2)


def own_shares(base: Any) -> dict[str, float]:
    """Return the own share in the vectors after the last layer by measure, averaged over texts and `POSITIONS`."""
    ids_BT = np.arange(1, 1 + TEXTS * TOKENS, dtype=np.int32).reshape(TEXTS, TOKENS)
    shares = exchange_shares(base, ids_BT)
    measured_ids = torch.as_tensor(ids_BT[:MEASURED].astype(np.int64))
    batch = {"input_ids": measured_ids, "attention_mask": torch.ones_like(measured_ids)}
    shares |= parts_shares(base, batch)
    shares |= layer_shares(base, batch)
    return shares


def exchange_shares(base: Any, ids_BT: Any) -> dict[str, float]:
    """Return own shares from lengths and from squared lengths, measured by exchanging tokens with all other texts."""
    totals = []
    for text in range(MEASURED):
        words = np.arange(TOKENS, dtype=np.int32)
        document = Document(f"text/{text}", ids_BT[text], np.zeros(TOKENS, np.int8), words)
        donors = {"other_texts": [ids for other, ids in enumerate(ids_BT) if other != text]}
        displacements = measure_exchange(base, document, donors, POSITIONS, batch_tokens=2**15)
        totals.append(exchange_sums(displacements, torch.finfo(torch.float64).eps))
    names = {"own_share": "exchange", "own_share_squared": "exchange, squared"}
    shares = {}
    for quantity, name in names.items():
        # Sums over tokens and numbers of tokens, `[kinds of donors, layers]`.
        sums, counts = np.sum([total[quantity] for total in totals], axis=0)
        shares[name] = float(sums[0, -1] / counts[0, -1])  # the only kind of donor, in the last layer
    return shares


def parts_shares(base: Any, batch: dict[str, Tensor]) -> dict[str, float]:
    """Return two own shares, computed from the lengths and from the projections of the parts of each token."""
    reader = PartsReader(base)
    by_length = []
    by_projection = []
    for ids_T in batch["input_ids"]:
        parts = reader.read({"input_ids": ids_T[None], "attention_mask": torch.ones_like(ids_T[None])})
        by_length.append(parts["own_share"][-1][POSITIONS])
        by_projection.append(parts["projection"][-1].diagonal()[POSITIONS])
    return {"parts": float(torch.stack(by_length).mean()), "parts_projection": float(torch.stack(by_projection).mean())}


def layer_shares(base: Any, batch: dict[str, Tensor]) -> dict[str, float]:
    """Return the own share according to mixing ratios (1 - ratio) and contribution matrices (share of the diagonal).

    For models with two layers, return only the own share according to the rollouts of the matrices.
    """
    layer_matrices = list(LAYER_MATRICES.values())
    texts = range(len(batch["input_ids"]))

    def measure(layer_pass: LayerPass) -> tuple[Tensor, list[dict[str, Tensor]]]:
        """Return the ratios of a layer, and the unnormalized matrices of each text."""
        matrices = [layer_contributions(layer_matrices, layer_pass.document(text)) for text in texts]
        return mixing_ratios(list(RATIOS), layer_pass), matrices

    ratios_by_layer, matrices_by_layer = zip(*map_layers(measure, base, batch, POINTS), strict=True)
    has_one_layer = len(ratios_by_layer) == 1
    shares = {}
    if has_one_layer:
        for name, ratio_BT in zip(RATIOS, ratios_by_layer[0], strict=True):
            shares[name] = float(1 - ratio_BT[:, POSITIONS].mean())
    diagonals: dict[str, list[Tensor]] = {}
    for text_layers in zip(*matrices_by_layer, strict=True):
        for name, matrix_LTT in contributions(MATRICES, text_layers).items():
            is_rollout = name in ROLLOUTS
            if is_rollout != has_one_layer:
                last_TT = matrix_LTT[-1]
                share_T = last_TT.diagonal() / last_TT.sum(-1)
                diagonals.setdefault(name, []).append(share_T[POSITIONS])
    for name, values in diagonals.items():
        shares[name] = float(torch.stack(values).mean())
    return shares


def build_model(case: Amounts, contents_BTC: Tensor) -> Any:
    """Return the model of the case in float64: a GPT-2 (pre-LN) for decoders, otherwise a BERT (post-LN).

    The token ID 1 + 8 b + j stands for token j of text b; the embedding of this ID is the content of the token.
    """
    shape = ModelShape(case.layers, 1 + TEXTS * TOKENS, WIDTH, heads=1, inner_width=8 * GROUPS)
    if case.decoder:
        base = create_gpt2(shape, activation="relu")
        words = base.wte
        positions = base.wpe
        layers = base.h
    else:
        base = create_bert(shape)
        words = base.embeddings.word_embeddings
        positions = base.embeddings.position_embeddings
        layers = base.encoder.layer
    base.config.use_cache = False
    base.double().eval().requires_grad_(False)
    for parameter in base.parameters():
        parameter.zero_()
    words.weight[1:, CONTENT:] = contents_BTC.flatten(0, 1)
    positions.weight[:, :TOKENS] = case.position * EYE
    x_TD = words.weight[1 : 1 + TOKENS] + positions.weight[:TOKENS]  # the input vectors of the first text
    for layer in layers:
        if case.decoder:
            _fill_gpt2(layer, case, x_TD)
        else:
            _fill_bert(layer, case)
    return base


class _Weights(NamedTuple):
    """The matrices of a layer, from input to output dimensions."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    up: Tensor
    down: Tensor


def _weights(case: Amounts) -> _Weights:
    """Return the matrices of a layer whose attention depends on positions and adds `gain` times the attended content.

    The feed-forward network computes factor * (relu(z) - relu(-z)) = factor * z for the content z.
    """
    is_position_D = torch.arange(WIDTH) < CONTENT  # the other dimensions contain contents
    query = torch.diag(is_position_D * WIDTH**0.5 / case.position).double()
    key = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    key[:CONTENT, :CONTENT] = case.weights_TT.log().clamp_min(-SHARPNESS).T / case.position
    value = torch.diag((~is_position_D).double())
    content = value[:, CONTENT:]
    up = torch.cat([content, -content], 1)  # computes z and -z
    down = case.feed_forward * up.T
    return _Weights(query, key, value, case.gain * value, up, down)


def _bias(case: Amounts) -> Tensor:
    """Return a constant vector with mean 0 in two position dimensions."""
    bias_D = torch.zeros(WIDTH, dtype=torch.float64)
    bias_D[0], bias_D[1] = case.bias, -case.bias
    return bias_D


def _fill_bert(layer: Any, case: Amounts) -> None:
    """Set the weights of a post-LN layer; its norms scale all vectors equally."""
    attention = layer.attention
    linears = (
        attention.self.query,
        attention.self.key,
        attention.self.value,
        attention.output.dense,
        layer.intermediate.dense,
        layer.output.dense,
    )
    for linear, weight in zip(linears, _weights(case), strict=True):
        linear.weight.copy_(weight.T)
    attention.output.dense.bias.copy_(_bias(case))
    attention.output.LayerNorm.weight.fill_(1)
    layer.output.LayerNorm.weight.fill_(1)


def _fill_gpt2(layer: Any, case: Amounts, x_TD: Tensor) -> None:
    """Set the weights of a pre-LN layer so that its norms do not change the scale of vectors.

    `x_TD` are the input vectors of the layer for one text; all vectors have the same scale.
    """
    weights = _weights(case)
    layer.attn.c_attn.weight.copy_(torch.cat([weights.query, weights.key, weights.value], 1))
    layer.attn.c_proj.weight.copy_(weights.output)
    layer.mlp.c_fc.weight.copy_(weights.up)
    layer.mlp.c_proj.weight.copy_(weights.down)
    layer.attn.c_proj.bias.copy_(_bias(case))
    after_attention_TD = x_TD + case.gain * x_TD.roll(1, 0) * (torch.arange(WIDTH) >= CONTENT)
    layer.ln_1.weight.fill_(float(x_TD[-1].std(unbiased=False)))
    layer.ln_2.weight.fill_(float(after_attention_TD[-1].std(unbiased=False)))


if __name__ == "__main__":
    sys.exit(main())

"""Planted cases: models with manually set weights and known contributions of other tokens.

Every case is a model (a post-LN BERT or a pre-LN GPT-2) for texts of 8 tokens, with width 16, in float64. The input
vector of a token is

    x = [1.5 * one-hot position (8), content (4), an empty receiver (4)]

Each token of each text has its own ID, whose embedding is the token's content. The norm of the embeddings, which would
change x, is removed. Attention depends on positions (on contents in one case), and the output of attention usually adds
contents to the receiver.

Shapes: B texts, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model

from attnmix.models.attention import OBSERVED

TOKENS, WIDTH, HEADS = 8, 16, 2
HEAD = WIDTH // HEADS
CONTENT, RECEIVER = 8, 12  # the first dimensions of the content and the receiver, which have 4 dimensions each
LENGTH = 1.5  # Euclidean length of position vectors
SHARPNESS = 60.0  # difference between the attention scores for the weights 1 and 0
STREAM = 1000.0  # constant that is added, with opposite signs, to two dimensions of a pre-LN model


def matrix(entries: Mapping[tuple[int, int], float]) -> Tensor:
    """Return a matrix `[16, 16]` with the `entries` by row and column, and 0 elsewhere."""
    result = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    for row_and_column, entry in entries.items():
        result[row_and_column] = entry
    return result


def copying(source: int, width: int = 4, head: int = 0) -> Tensor:
    """Return a W_V that copies `width` dimensions, starting at `source`, to the first dimensions of a head."""
    return matrix({(source + k, head * HEAD + k): 1 for k in range(width)})


def by_position(weights_TT: Tensor) -> Tensor:
    """Return the W_K that produces the attention weights `weights_TT` in each head."""
    scores_TT = weights_TT.log().clamp_min(-SHARPNESS)
    scores_TT = scores_TT - scores_TT.mean(-1, keepdim=True)  # the norm before attention subtracts the mean
    return torch.cat([(scores_TT.T / LENGTH).repeat(1, HEADS), scores_TT.new_zeros(WIDTH - TOKENS, WIDTH)])


EYE = torch.eye(TOKENS, dtype=torch.float64)
UNIFORM = torch.full_like(EYE, 1 / TOKENS)
BEFORE, TWO_BEFORE = EYE.roll(-1, 1), EYE.roll(-2, 1)  # token i attends to i-1, or to i-2; circular
FIRST = torch.zeros_like(EYE).index_fill(1, torch.tensor(0), 1)
SINK = torch.full_like(EYE, 0.1 / (TOKENS - 1)).index_fill(1, torch.tensor(0), 0.9)
SIGNS = {k: (-1.0) ** k for k in range(4)}
# The query of each head is sqrt(HEAD) times the one-hot position, so attention scores are the entries of the key.
QUERY = matrix({(p, h * HEAD + p): HEAD**0.5 / LENGTH for p in range(TOKENS) for h in range(HEADS)})
# The attention score of a token is the first entry of its content; the score of token 1 is larger by 2.
KEY_IS_CONTENT = matrix({(CONTENT, e): 1 for e in range(WIDTH)} | {(0, e): 2 / LENGTH for e in range(WIDTH)})
NOTHING, MESSAGE, IDENTITY = matrix({}), copying(CONTENT), torch.eye(WIDTH, dtype=torch.float64)
GIVE = matrix({(h * HEAD + k, RECEIVER + k): 2 - 4 * h for k in range(4) for h in range(HEADS)})  # factor -2 in head 2
BALANCED = matrix({(CONTENT + k // 2, k): sign for k, sign in SIGNS.items()})  # does not change the mean in a norm
ELSEWHERE = matrix({(CONTENT, 2): 1, (CONTENT, 3): -1})  # writes to the receiver's last two dimensions
FIRST_CONSTANT = matrix({(0, k): sign for k, sign in SIGNS.items()})  # a constant for token 1, based on its position
OTHERS_CONSTANT = matrix({(p, k): sign for k, sign in SIGNS.items() for p in range(1, TOKENS)})
ROTATION = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)).double()).Q


def normal(texts: int, generator: torch.Generator) -> Tensor:
    """Return contents `[B, T, 4]` drawn from N(0, I)."""
    return torch.randn(texts, TOKENS, 4, generator=generator, dtype=torch.float64)


def cancelling(texts: int, generator: torch.Generator) -> Tensor:
    """Return contents that sum to 0 over the tokens of each text."""
    drawn = normal(texts, generator)
    return drawn - drawn.mean(1, keepdim=True)


def silent_first(texts: int, generator: torch.Generator) -> Tensor:
    """Return contents that are 0 for token 1."""
    return normal(texts, generator).index_fill(1, torch.tensor(0), 0)


def of_classes(texts: int, generator: torch.Generator) -> Tensor:
    """Return contents `[B, T, 4]` with the text's class added to the first entry; the classes alternate (-1, 1)."""
    drawn = normal(texts, generator)
    classes_B = torch.arange(texts) % 2 * 2 - 1
    drawn[..., 0] += classes_B.unsqueeze(-1)
    return drawn


def on_a_circle(texts: int, generator: torch.Generator) -> Tensor:
    """Return contents `[B, T, 4]` of equal length whose entries sum to 0.

    Norms therefore divide the vectors of all tokens by the same number.
    """
    pair = normal(texts, generator)[..., :2]
    pair *= 2**0.5 / pair.norm(dim=-1, keepdim=True)
    return torch.cat([pair, -pair], -1)


@dataclass(frozen=True)
class Layer:
    """The weights of one layer."""

    weights_TT: Tensor | None = None  # attention weights; if None, keys depend on contents
    value: Tensor = MESSAGE  # W_V
    output: Tensor = GIVE  # W_O
    bias: Tensor = NOTHING[0]  # b_V
    output_bias: Tensor = NOTHING[0]  # b_O
    takes_away: bool = False  # True for a feed-forward network that sets the receiver to 0


@dataclass(frozen=True)
class Case:
    """A model and the amount of its output that comes from other tokens."""

    name: str
    planted: str
    """A description of the model."""
    comes: Literal["all", "some", "little", "nothing"]  # amount of attention's output that comes from other tokens
    layers: Sequence[Layer]
    contents: Callable[[int, torch.Generator], Tensor] = normal
    stream: float | None = None  # for a pre-LN model: a constant on the skip connection
    two_before: bool = False  # True if only token i-2 counts as another token

    @property
    def others_TT(self) -> Tensor:
        """A matrix whose entry [i, j] is 1 if token j counts as another token for token i, and 0 otherwise."""
        return TWO_BEFORE if self.two_before else 1 - EYE

    @property
    def givers_TT(self) -> Tensor:
        """The attention weights of the tokens in `others_TT`, scaled to a sum of 1 for each token i.

        If weights depend on contents, or tokens attend only to themselves, all other tokens have equal weights.
        """
        weights_TT = TWO_BEFORE if self.two_before else self.layers[0].weights_TT
        if weights_TT is None or weights_TT is EYE:
            weights_TT = UNIFORM
        others_weights_TT = self.others_TT * weights_TT
        return others_weights_TT / others_weights_TT.sum(-1, keepdim=True)

    def without_value_bias(self) -> Case:
        """Return a case that computes the same function without b_V; the effect b_V W_O of this bias is added to b_O.

        This is possible because the attention weights of a token sum to 1.
        """
        bias_free = [replace(each, bias=NOTHING[0], output_bias=each.bias @ each.output) for each in self.layers]
        return replace(self, layers=bias_free)


CASES = (
    Case("neighbour_copy", "copies the content of token i-1", "all", [Layer(BEFORE)]),
    Case("uniform_average", "averages contents with equal weights", "some", [Layer(UNIFORM)]),
    Case("broadcast", "copies the content of token 1", "all", [Layer(FIRST)]),
    Case("rotation", "weight 1 on itself, W_V W_O = Q - I", "nothing", [Layer(EYE, IDENTITY, ROTATION - IDENTITY)]),
    Case("no_values", "equal weights, W_V = 0", "nothing", [Layer(UNIFORM, NOTHING)]),
    Case(
        "heads_cancel",
        "two heads with opposite values",
        "nothing",
        [Layer(UNIFORM, MESSAGE + copying(CONTENT, head=1))],
    ),
    Case("sources_cancel", "equal weights, contents of a text sum to 0", "nothing", [Layer(UNIFORM)], cancelling),
    Case("value_bias", "W_V = 0, b_V a constant", "nothing", [Layer(UNIFORM, NOTHING, bias=1.5 * FIRST_CONSTANT[0])]),
    Case("null_sink", "weight 0.9 on token 1 with value 0", "little", [Layer(SINK)], silent_first),
    Case(
        "constant_sink",
        "weight 0.9 on token 1 with a constant value",
        "little",
        [Layer(SINK, MESSAGE + FIRST_CONSTANT)],
        silent_first,
    ),
    Case(
        "verdict",
        "equal weights, one dimension with the class",
        "some",
        [Layer(UNIFORM, copying(CONTENT, 1))],
        of_classes,
    ),
    Case(
        "by_weights",
        "content in keys, constant values, token 1 a sink",
        "some",
        [Layer(None, OTHERS_CONSTANT)],
        silent_first,
    ),
    Case("pre_ln_copy", "pre-LN, as neighbour_copy", "some", [Layer(BEFORE, copying(CONTENT, 2))], stream=0.0),
    Case(
        "pre_ln_stream",
        "the same, large constant on the skip connection",
        "some",
        [Layer(BEFORE, copying(CONTENT, 2))],
        stream=STREAM,
    ),
    Case(
        "taken_away",
        "the feed-forward network removes the contribution",
        "nothing",
        [Layer(UNIFORM, BALANCED, takes_away=True)],
    ),
    Case("elsewhere", "averages a single dimension", "some", [Layer(UNIFORM, ELSEWHERE)]),
    Case(
        "two_hops",
        "two layers: content of token i-2 through i-1",
        "some",
        [Layer(BEFORE), Layer(BEFORE, copying(RECEIVER))],
        on_a_circle,
        two_before=True,
    ),
    Case(
        "one_hop_twice",
        "two layers: content of token i-1 twice, none of i-2",
        "nothing",
        [Layer(BEFORE), Layer(BEFORE)],
        on_a_circle,
        two_before=True,
    ),
)


def planted_model(case: Case, contents_BT4: Tensor) -> Any:
    """Return the model of the case in float64: a BERT (post-LN), or a GPT-2 (pre-LN) if the case has a `stream`.

    The token ID 1 + 8 b + j stands for token j of text b; the embedding of this ID is the content of the token.
    """
    vocabulary_size = 1 + contents_BT4[..., 0].numel()
    if case.stream is None:
        base = create_bert(ModelShape(len(case.layers), vocabulary_size))
        words = base.embeddings.word_embeddings
        positions = base.embeddings.position_embeddings
        modules = base.encoder.layer
        norm_weights: tuple[str, ...] = ("LayerNorm.weight",)
    else:
        base = create_gpt2(ModelShape(len(case.layers), vocabulary_size))
        words = base.wte
        positions = base.wpe
        modules = base.h
        norm_weights = ("ln_1.weight", "ln_2.weight", "ln_f.weight")
    base.config.use_cache = False
    base.double().eval().requires_grad_(False)
    for name, parameter in base.named_parameters():  # weights of norms are 1, all other parameters 0
        parameter.fill_(float(name.endswith(norm_weights)))
    words.weight[1:, CONTENT:RECEIVER] = contents_BT4.flatten(0, 1)
    positions.weight[:, :TOKENS] = LENGTH * EYE
    if case.stream is not None:
        positions.weight[:, -2:] = case.stream * torch.tensor([1.0, -1.0])
    for layer, module in zip(case.layers, modules, strict=True):
        if case.stream is None:
            _fill_bert_layer(module, layer)
        else:
            _fill_gpt2_layer(module, layer, case.stream)
    return base


class ModelShape(NamedTuple):
    """The sizes of a planted model."""

    layers: int
    vocabulary_size: int
    width: int = WIDTH
    heads: int = HEADS
    inner_width: int = WIDTH


def create_bert(shape: ModelShape) -> Any:
    """Return a BERT with ReLU and without the norm of the embeddings."""
    config = BertConfig(
        vocab_size=shape.vocabulary_size,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.inner_width,
        max_position_embeddings=TOKENS,
        type_vocab_size=1,
        hidden_act="relu",
        layer_norm_eps=1e-12,
        attn_implementation=OBSERVED,
    )
    base: Any = BertModel(config)
    base.embeddings.LayerNorm = torch.nn.Identity()
    return base


def create_gpt2(shape: ModelShape, activation: str = "gelu_new") -> Any:
    """Return a GPT-2; `activation` is the activation function of its feed-forward networks."""
    config = GPT2Config(
        vocab_size=shape.vocabulary_size,
        n_embd=shape.width,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.inner_width,
        n_positions=TOKENS,
        bos_token_id=None,
        eos_token_id=None,
        activation_function=activation,
        layer_norm_epsilon=1e-12,
        attn_implementation=OBSERVED,
    )
    return GPT2Model(config)


def _fill_bert_layer(module: Any, layer: Layer) -> None:
    """Set the weights of a layer of BERT."""
    attention = module.attention.self
    attention.query.weight.copy_(QUERY.T)
    attention.key.weight.copy_(_key_matrix(layer).T)
    attention.value.weight.copy_(layer.value.T)
    attention.value.bias.copy_(layer.bias)
    module.attention.output.dense.weight.copy_(layer.output.T)
    module.attention.output.dense.bias.copy_(layer.output_bias)
    if layer.takes_away:  # the network computes -(relu(z) - relu(-z)) = -z for the receiver z
        inner = {(RECEIVER + k, k): 1 for k in range(4)} | {(RECEIVER + k, 4 + k): -1 for k in range(4)}
        module.intermediate.dense.weight.copy_(matrix(inner).T)
        module.output.dense.weight.copy_(-matrix(inner))


def _fill_gpt2_layer(module: Any, layer: Layer, stream: float) -> None:
    """Set the attention weights of a layer of GPT-2, with a constant `stream` on the skip connection."""
    module.ln_1.weight.fill_(max(1.0, stream / (WIDTH / 2) ** 0.5))  # reverses the division by the norm
    module.attn.c_attn.weight.copy_(torch.cat([QUERY, _key_matrix(layer), layer.value], 1))
    module.attn.c_proj.weight.copy_(layer.output)


def _key_matrix(layer: Layer) -> Tensor:
    """Return W_K of a layer, for attention weights that depend on positions or on contents."""
    return KEY_IS_CONTENT if layer.weights_TT is None else by_position(layer.weights_TT)

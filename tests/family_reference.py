"""Independent float64 reference for the features and measures of every family, with explicit sums token by token.

The reference uses a base model's configuration and state dictionary, processes one unpadded text, and shares no code
with the library. A layer's arrays are stored by role, such as `query`; missing roles count as zero or identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import erf, expit

Array = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


def tanh_gelu(x: Array) -> Array:
    return x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x * x * x))) / 2


ACTIVATIONS = {
    "gelu": lambda x: x * (1 + erf(x / np.sqrt(2))) / 2,
    "gelu_new": tanh_gelu,
    "gelu_pytorch_tanh": tanh_gelu,
    "silu": lambda x: x * expit(x),
    "relu": lambda x: np.maximum(x, 0),
}


def roles(text: str, **others: str) -> dict[str, str]:
    return {**others, **dict(pair.split("=") for pair in text.split())}


# Parameter names of each family by role. "query_key_value" and "gate_up" combine several roles.
BERT = roles("""
    layer=encoder.layer.{number}. word=embeddings.word_embeddings position=embeddings.position_embeddings
    segment=embeddings.token_type_embeddings embedding_norm=embeddings.LayerNorm projection=embeddings_project
    query=attention.self.query key=attention.self.key value=attention.self.value out=attention.output.dense
    attention_norm=attention.output.LayerNorm up=intermediate.dense down=output.dense output_norm=output.LayerNorm
""")
LLAMA = roles("""
    layer=layers.{number}. word=embed_tokens input_norm=input_layernorm query=self_attn.q_proj key=self_attn.k_proj
    value=self_attn.v_proj out=self_attn.o_proj query_norm=self_attn.q_norm key_norm=self_attn.k_norm
    feed_forward_norm=post_attention_layernorm gate=mlp.gate_proj up=mlp.up_proj down=mlp.down_proj
""")
GEMMA = roles(
    """
    attention_output_norm=post_attention_layernorm feed_forward_norm=pre_feedforward_layernorm
    feed_forward_output_norm=post_feedforward_layernorm
    """,
    **LLAMA,
)
BART = roles("""
    layer={side}.layers.{number}. word={side}.embed_tokens position={side}.embed_positions
    embedding_norm={side}.layernorm_embedding query=self_attn.q_proj key=self_attn.k_proj value=self_attn.v_proj
    out=self_attn.out_proj attention_norm=self_attn_layer_norm cross_query=encoder_attn.q_proj
    cross_key=encoder_attn.k_proj cross_value=encoder_attn.v_proj cross_out=encoder_attn.out_proj
    cross_attention_norm=encoder_attn_layer_norm up=fc1 down=fc2 output_norm=final_layer_norm
""")
ALBERT = """
    layer=encoder.albert_layer_groups.{group}.albert_layers.0. projection=encoder.embedding_hidden_mapping_in
    query=attention.query key=attention.key value=attention.value out=attention.dense
    attention_norm=attention.LayerNorm up=ffn down=ffn_output output_norm=full_layer_layer_norm
"""
T5 = roles("""
    layer={side}.block.{number}.layer. word={side}.embed_tokens input_norm=0.layer_norm query=0.SelfAttention.q
    key=0.SelfAttention.k value=0.SelfAttention.v out=0.SelfAttention.o
""")
CROSS = """
    cross_attention_input_norm=1.layer_norm cross_query=1.EncDecAttention.q cross_key=1.EncDecAttention.k
    cross_value=1.EncDecAttention.v cross_out=1.EncDecAttention.o
"""
DISTILBERT = """
    layer=transformer.layer.{number}. query=attention.q_lin key=attention.k_lin value=attention.v_lin
    out=attention.out_lin attention_norm=sa_layer_norm up=ffn.lin1 down=ffn.lin2 output_norm=output_layer_norm
"""
NOMIC = """
    layer=layers.{number}. query=self_attn.q_proj key=self_attn.k_proj value=self_attn.v_proj out=self_attn.o_proj
    attention_norm=post_attention_layernorm gate=mlp.gate_proj up=mlp.up_proj down=mlp.down_proj
    output_norm=post_mlp_layernorm
"""
MODERNBERT = """
    layer=layers.{number}. word=embeddings.tok_embeddings embedding_norm=embeddings.norm input_norm=attn_norm
    query_key_value=attn.Wqkv out=attn.Wo feed_forward_norm=mlp_norm gate_up=mlp.Wi down=mlp.Wo
"""
GPT2 = """
    layer=h.{number}. word=wte position=wpe input_norm=ln_1 query_key_value=attn.c_attn out=attn.c_proj
    feed_forward_norm=ln_2 up=mlp.c_fc down=mlp.c_proj
"""
GPT_NEOX = """
    layer=layers.{number}. word=embed_in input_norm=input_layernorm query_key_value=attention.query_key_value
    out=attention.dense feed_forward_norm=post_attention_layernorm up=mlp.dense_h_to_4h down=mlp.dense_4h_to_h
"""
OPT = """
    layer=decoder.layers.{number}. word=decoder.embed_tokens position=decoder.embed_positions
    input_norm=self_attn_layer_norm query=self_attn.q_proj key=self_attn.k_proj value=self_attn.v_proj
    out=self_attn.out_proj feed_forward_norm=final_layer_norm up=fc1 down=fc2
"""
MPNET = """
    query=attention.attn.q key=attention.attn.k value=attention.attn.v out=attention.attn.o
    attention_norm=attention.LayerNorm
"""
DEBERTA_V2 = """
    query=attention.self.query_proj key=attention.self.key_proj value=attention.self.value_proj
"""
DEBERTA = (
    "query_key_value=attention.self.in_proj position_key=attention.self.pos_proj "
    "position_query=attention.self.pos_q_proj"
)
GPT_NEO = """
    layer=h.{number}. word=wte position=wpe input_norm=ln_1 query=attn.attention.q_proj key=attn.attention.k_proj
    value=attn.attention.v_proj out=attn.attention.out_proj feed_forward_norm=ln_2 up=mlp.c_fc down=mlp.c_proj
"""
BLOOM = """
    layer=h.{number}. word=word_embeddings embedding_norm=word_embeddings_layernorm input_norm=input_layernorm
    query_key_value=self_attention.query_key_value out=self_attention.dense
    feed_forward_norm=post_attention_layernorm up=mlp.dense_h_to_4h down=mlp.dense_4h_to_h
"""
NAMES = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra", "data2vec-text", "ernie"), BERT),
    **{"albert": roles(ALBERT, **BERT), "distilbert": roles(DISTILBERT, **BERT), "modernbert": roles(MODERNBERT)},
    **dict.fromkeys(("nomic_bert", "gte"), roles(NOMIC, **BERT)),
    **dict.fromkeys(("t5", "mt5", "umt5"), T5),
    **{"mpnet": {**BERT, **roles(MPNET)}, "deberta": {**BERT, **roles(DEBERTA)}},
    **{"deberta-v2": {**BERT, **roles(DEBERTA_V2)}, "gpt_neo": roles(GPT_NEO), "bloom": roles(BLOOM)},
    **{"gpt2": roles(GPT2), "gpt_neox": roles(GPT_NEOX), "opt": roles(OPT), "bart": BART},
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma"), LLAMA),
    "phi3": roles("query_key_value=self_attn.qkv_proj gate_up=mlp.gate_up_proj", **LLAMA),
    **dict.fromkeys(("gemma2", "gemma3_text", "olmo2"), GEMMA),
}
GEMMAS = ("gemma", "gemma2", "gemma3_text")
T5S = ("t5", "mt5", "umt5")
CAUSAL_RMS = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3", "smollm3", *GEMMAS)
RMS = (*CAUSAL_RMS, *T5S)
CAUSAL = ("gpt2", "gpt_neo", "gpt_neox", "bloom", "opt", *CAUSAL_RMS)
BY_HEAD = ("gpt_neox", "bloom", "deberta")  # query, key and value are concatenated per head
ROBERTA = ("roberta", "xlm-roberta", "camembert", "mpnet", "data2vec-text")  # positions start after the padding index
OFFSETS = {"opt": 2, "bart": 2}  # rows of the position embedding before the row of the first position


def first_of(config: Any, *keys: str, default: Any = None) -> Any:
    return next((getattr(config, key) for key in keys if getattr(config, key, None) is not None), default)


def normalised(matrix: Array) -> Array:
    """Return the matrix with each row scaled to a sum of 1; rows without a positive sum become rows of the identity."""
    sums = matrix.sum(-1, keepdims=True)
    return np.where(sums > 0, matrix / np.where(sums > 0, sums, 1), np.eye(matrix.shape[-1]))


def cosine(u: Array, v: Array) -> float:
    return float(u @ v / np.sqrt((u @ u) * (v @ v)))


def read(name: str, config: Any, state: dict[str, Array], prefix: str, names: dict[str, str]) -> Weights:
    """Return the arrays of the family `name` by role, from the state dictionary of its model.

    `names` maps roles to parameter names without `prefix`, `.weight` and `.bias`. Roles without parameters are omitted.
    """
    arrays = {}
    for role, path in names.items():
        weight, bias = state.get(f"{prefix}{path}.weight"), state.get(f"{prefix}{path}.bias")
        if weight is not None:
            if weight.ndim == 2 and name != "gpt2":  # GPT-2's Conv1D stores the transpose
                weight = weight.T
            # Gemma's norms store the difference between each scale and 1.
            weight = weight + (weight.ndim == 1 and name in GEMMAS)
            arrays[role] = np.vstack([weight, np.zeros(weight.shape[-1]) if bias is None else bias])
    weights = Weights(name, config, arrays)
    # DeBERTa (version 1) has a Linear without bias for queries, keys and values, and separate biases.
    for role, key in (("query", "q_bias"), ("value", "v_bias")):
        bias = state.get(f"{prefix}attention.self.{key}")
        if bias is not None:
            weights.arrays[role] = np.vstack([weights.arrays[role][:-1], bias])
    return weights


@dataclass
class Weights:
    """Weights by role, as arrays.

    The array of a linear layer is `[inputs + 1, outputs]`, with the bias as the last row. The array of a norm has two
    rows, the weight and the bias.
    """

    name: str
    config: Any
    arrays: dict[str, Array]

    def __post_init__(self) -> None:
        """Split concatenated query, key and value, or gate and up, into separate arrays."""
        self.heads: int = self.config.num_attention_heads
        default = 1e-12 if self.name == "distilbert" else 1e-5
        keys = ("layer_norm_eps", "rms_norm_eps", "norm_eps", "layer_norm_epsilon")
        self.eps: float = first_of(self.config, *keys, default=default)
        self.head_size = (len(self.arrays["out"]) - 1) // self.heads if "out" in self.arrays else 0
        if "query_key_value" in self.arrays:
            fused, width = self.arrays["query_key_value"], self.heads * self.head_size
            if self.name in BY_HEAD:  # from [head, role, size] to [role, head, size]
                fused = fused.reshape(len(fused), self.heads, 3, -1).swapaxes(1, 2).reshape(len(fused), -1)
            # The outputs that follow the queries are keys and values, in equal numbers.
            parts = np.split(fused, [width, (width + fused.shape[1]) // 2], axis=1)
            self.arrays |= zip(("query", "key", "value"), parts, strict=True)
        if "gate_up" in self.arrays:
            self.arrays |= zip(("gate", "up"), np.split(self.arrays["gate_up"], 2, axis=1), strict=True)

    def linear(self, role: str, x: Array) -> Array:
        return x @ self.arrays[role][:-1] + self.arrays[role][-1]

    def norm(self, role: str, x: Array) -> Array:
        return self.norm_linear(role, x, x) + self.arrays[role][1] if role in self.arrays else x

    def norm_linear(self, role: str, parts: Array, whole: Array) -> Array:
        """Apply a norm without its bias to `parts` of `whole` [tokens, width], using the deviation of `whole`."""
        if role not in self.arrays:
            return parts
        if self.name not in RMS:
            parts, whole = (a - a.mean(-1, keepdims=True) for a in (parts, whole))
        deviation = np.sqrt((whole**2).mean(-1) + self.eps)
        return parts / np.expand_dims(deviation, tuple(range(1, parts.ndim))) * self.arrays[role][0]

    def split(self, role: str, x: Array) -> Array:
        """Return queries, keys or values [heads, tokens, head size], repeated if heads share them."""
        x = self.linear(role, x)
        if f"{role}_norm" in self.arrays:  # the norm of each head, or of all heads in OLMo 2
            x = self.norm(f"{role}_norm", x.reshape(-1, self.arrays[f"{role}_norm"].shape[1])).reshape(x.shape)
        x = x.reshape(len(x), -1, self.head_size).transpose(1, 0, 2)
        return np.repeat(x, self.heads // len(x), axis=0)

    @property
    def activation(self) -> Callable[[Array], Array]:
        keys = ("hidden_act", "hidden_activation", "activation_function", "activation", "dense_act_fn")
        activation: Callable[[Array], Array] = ACTIVATIONS[first_of(self.config, *keys, default="gelu_new")]
        return activation

    def feed_forward(self, x: Array) -> Array:
        x = self.norm("feed_forward_norm", x)
        activation = self.activation
        up = self.linear("up", x)
        inner = activation(self.linear("gate", x)) * up if "gate" in self.arrays else activation(up)
        return self.norm("feed_forward_output_norm", self.linear("down", inner))


def rotated(x: Array, parameters: dict[str, Any]) -> Array:
    """Apply rotary embedding to [heads, tokens, head size]; dimensions after the rotated part are unchanged."""
    assert parameters["rope_type"] == "default"
    size = int(x.shape[-1] * parameters.get("partial_rotary_factor", 1.0))
    frequencies = parameters["rope_theta"] ** -(np.arange(0, size, 2) / size)
    angles = np.arange(x.shape[1])[:, None] * frequencies
    a, b, rest = np.split(x, [size // 2, size], axis=-1)
    return np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles), rest], -1)


def softmax(scores: Array, visible: Bools) -> Array:
    scores = np.where(visible, scores, -np.inf)
    return normalised(np.exp(scores - scores.max(-1, keepdims=True)))


PositionScores = Callable[[Weights, Array, Array], Array]


def find_position_scores(
    name: str, config: Any, state: dict[str, Array], side: str, number: int
) -> PositionScores | None:
    """Return a function that computes position-dependent scores [heads, tokens, tokens], or None without such scores.

    The scores are added before scaling. Those of MPNet and BLOOM are multiplied by the square root of the head size,
    because these models add them after scaling.
    """
    if name in T5S:
        block = number if name == "umt5" else 0  # T5 and mT5 share the bias of the first layer
        biases = state[f"{side}.block.{block}.layer.0.SelfAttention.relative_attention_bias.weight"]
        return lambda _w, query, _key: pairs(query, lambda i, j: biases[bucket(j - i, side == "encoder")])
    if name == "mpnet":
        table = state["encoder.relative_attention_bias.weight"]
        return lambda w, query, _key: np.sqrt(w.head_size) * pairs(query, lambda i, j: table[bucket(j - i)])
    if name == "bloom":
        return bloom_scores
    if name.startswith("deberta"):
        return deberta_scores(config, state)
    return None


def bloom_scores(w: Weights, query: Array, _key: Array) -> Array:
    """Return BLOOM's scores (ALiBi): the position of the source times a slope for each head."""
    slopes = np.array([2 ** (-8 * (head + 1) / w.heads) for head in range(w.heads)])
    return np.sqrt(w.head_size) * pairs(query, lambda _i, j: j * slopes)


def deberta_scores(config: Any, state: dict[str, Array]) -> PositionScores:
    """Return a function that computes DeBERTa's scores between contents and relative positions, in both directions."""
    table, norm = state["encoder.rel_embeddings.weight"], "encoder.LayerNorm"
    if f"{norm}.weight" in state:
        centred = table - table.mean(-1, keepdims=True)
        table = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config.layer_norm_eps)
        table = table * state[f"{norm}.weight"] + state[f"{norm}.bias"]
    middle = len(table) // 2  # row of the distance 0

    def find_row(distance: int) -> int:
        """Return the row of a distance in the table; in version 2, large distances are in logarithmic buckets."""
        half = middle // 2  # up to this distance, each distance has its own row
        if getattr(config, "position_buckets", -1) > 0 and abs(distance) > half:
            furthest = config.max_position_embeddings
            steps = np.log(abs(distance) / half) / np.log((furthest - 1) / half) * (half - 1)
            distance = int(np.sign(distance) * (half + np.ceil(steps)))
        return min(max(distance + middle, 0), 2 * middle - 1)

    def disentangled(w: Weights, query: Array, key: Array) -> Array:
        # In version 2, contents and positions may share their projections.
        query_role = "position_query" if "position_query" in w.arrays else "query"
        key_role = "position_key" if "position_key" in w.arrays else "key"
        position_query = w.split(query_role, table)
        position_key = w.split(key_role, table)

        def score(i: int, j: int) -> Array:
            row = find_row(i - j)
            content_to_position = (query[:, i] * position_key[:, row]).sum(-1)
            position_to_content = (key[:, j] * position_query[:, row]).sum(-1)
            return content_to_position + position_to_content

        return pairs(query, score)

    return disentangled


def pairs(query: Array, score: Callable[[int, int], Array]) -> Array:
    """Return the scores [heads, tokens, tokens]; `score` returns the scores of all heads for two positions."""
    tokens = query.shape[1]
    return np.array([[score(i, j) for j in range(tokens)] for i in range(tokens)]).transpose(2, 0, 1)


def bucket(distance: int, both: bool = True) -> int:
    """Return the index of T5's bias for a relative distance.

    If `both` is True, there are 16 buckets for each direction, otherwise 32 for a single direction. The first half of
    the buckets contain a single distance each; the ranges of the other buckets grow logarithmically up to the distance
    128.
    """
    far = abs(distance)
    exact = 8 if both else 16
    number = far
    if far >= exact:
        steps = int(np.log(far / exact) / np.log(128 / exact) * exact)
        number = min(2 * exact - 1, exact + steps)
    return number + 16 * (both and distance > 0)


@dataclass
class ReferenceLayer:
    """Reference computation of one layer with the input `x` [tokens, width].

    In a decoder, `memory` is the encoder output.

    `visible` [tokens, tokens] is the attention mask, and `rotary` contains the parameters of the rotary embedding. The
    results are the vectors `points` and four arrays of contributions [token, source, width]. `F` are the contributions
    to the attention output, and `R` include the skip connection. `T` follow the first LayerNorm, and `E` the second
    one, without the feed-forward network.
    """

    weights: Weights
    x: Array
    visible: Bools
    rotary: dict[str, Any] | None
    memory: Array | None = None
    position_scores: PositionScores | None = None

    def __post_init__(self) -> None:
        w, config = self.weights, self.weights.config
        self.parallel = bool(getattr(config, "use_parallel_residual", False))
        self.post_norm = "attention_norm" in w.arrays
        u = w.norm("input_norm", self.x)
        query, key, self.value = (w.split(role, u) for role in ("query", "key", "value"))
        if self.rotary is not None:
            query, key = rotated(query, self.rotary), rotated(key, self.rotary)
        scores = query @ key.transpose(0, 2, 1)
        if self.position_scores is not None:
            scores = scores + self.position_scores(w, query, key)
        if w.name not in ("gpt_neo", *T5S):  # these families do not scale scores by the head size
            scores = scores * first_of(config, "query_pre_attn_scalar", default=w.head_size) ** -0.5
        if w.name.startswith("deberta"):
            # DeBERTa also divides by the root of the number of summed scores: the content score, and a score for each
            # kind of position.
            scores = scores / np.sqrt(1 + len(config.pos_att_type))
        cap = getattr(config, "attn_logit_softcapping", None)
        if cap:
            scores = cap * np.tanh(scores / cap)
        self.attention = softmax(scores, self.visible)
        self.value_bias = w.split("value", np.zeros_like(u[:1]))
        self.points = self.rest(self.value)
        self.split(self.value)

    def split(self, value: Array) -> None:
        """Compute the contribution of each source as if the layer's values were `value`.

        The other vectors of the layer, which are stored in `points`, do not change.
        """
        # f[h, j] = (u_j W_V^h + b_V^h) W_O^h, F[i, j] = sum over heads of a^h_ij f[h, j]
        w, tokens = self.weights, len(self.x)
        W_O = w.arrays["out"][:-1].reshape(w.heads, w.head_size, -1)
        F = np.zeros((tokens, tokens, W_O.shape[-1]))
        for h in range(w.heads):
            F += self.attention[h][:, :, None] * (value[h] @ W_O[h])[None]
        self.projected = F
        self.add_up(w.norm_linear("attention_output_norm", F, w.linear("out", self.points["attention_heads"])))

    def add_up(self, F: Array) -> None:
        """Compute the contributions `R`, `T` and `E` from `F` `[tokens, sources, hidden]`.

        The vectors of the layer, which are stored in `points`, do not change.
        """
        w, tokens = self.weights, len(self.x)
        self.F = F
        self.R = self.F.copy()
        for i in range(tokens):
            self.R[i, i] += self.x[i]
        if self.post_norm:
            self.T = w.norm_linear("attention_norm", self.R, self.points["attention_residual"])
            parts, z = self.T, self.points["attention_norm"]
            if self.memory is not None:
                parts = w.norm_linear("cross_attention_norm", parts, z + self.points["cross_attention_output"])
                z = self.points["cross_attention_norm"]
            self.E = w.norm_linear("output_norm", parts, z + self.points["ffn_output"])

    def rest(self, value: Array) -> dict[str, Array]:
        """Return the vectors at all points of the layer for the value vectors `value` [heads, tokens, head size]."""
        w, points = self.weights, {}
        points["attention_heads"] = (self.attention @ value).transpose(1, 0, 2).reshape(len(self.x), -1)
        attended = w.norm("attention_output_norm", w.linear("out", points["attention_heads"]))
        points["attention_output"] = attended
        if self.parallel:
            points["ffn_output"] = w.feed_forward(self.x)
            return {**points, "layer_output": self.x + attended + points["ffn_output"]}
        z = points["attention_residual"] = self.x + attended
        if self.post_norm:
            z = points["attention_norm"] = w.norm("attention_norm", z)
        if self.memory is not None:
            points["cross_attention_output"] = self.cross_attention(w.norm("cross_attention_input_norm", z))
            z = w.norm("cross_attention_norm", z + points["cross_attention_output"])
            if self.post_norm:
                points["cross_attention_norm"] = z
        points["ffn_output"] = w.feed_forward(z)
        return {**points, "layer_output": w.norm("output_norm", z + points["ffn_output"])}

    def cross_attention(self, z: Array) -> Array:
        """Return the output of cross-attention from decoder vectors `z` [tokens, width] to the encoder output."""
        w = self.weights
        query = w.split("cross_query", z)
        key = w.split("cross_key", self.memory)
        value = w.split("cross_value", self.memory)
        scale = 1 if w.name in T5S else w.head_size**-0.5
        weights = softmax(query @ key.transpose(0, 2, 1) * scale, np.array(True))
        return w.linear("cross_out", (weights @ value).transpose(1, 0, 2).reshape(len(z), -1))

    def ratios(self) -> dict[str, Array]:
        """Return one value per token for each ratio of the family."""
        own = np.array([[self.attention[h, i, i] for h in range(self.weights.heads)] for i in range(len(self.x))])
        values = {"attn_w": 1 - own.mean(1), "attn_n": mixing_ratio(self.F)}
        if not self.parallel:
            values |= {"attnres_w": (1 - own.mean(1)) / 2, "attnres_n": mixing_ratio(self.R)}
        if self.post_norm:
            values |= {"attnresln_n": mixing_ratio(self.T), "enc_n": mixing_ratio(self.E)}
        if not self.parallel:
            values["layer_n"] = mixing_ratio(self.layer_parts()[0])
        return values

    def controls(self, corpus: Array) -> dict[str, dict[str, Array]]:
        """Return the ratios by control; `corpus` contains the value vectors for the control `corpus_value`."""
        values = {}
        if not self.parallel:
            self.layer_parts()  # the copies below reuse the arrays that this call stores
        common = np.broadcast_to(self.value.mean(1, keepdims=True), self.value.shape)
        replaced = {"text_mean_value": common, "corpus_value": corpus}
        replaced["without_value_bias"] = self.value - self.value_bias
        for name, value in replaced.items():
            other = copy(self)
            other.split(value)
            values[name] = other.ratios()
        special = [] if self.memory is None else [0]  # the start token of the decoder
        return values | {"without_special_sources": self.without_sources(special)}

    def without_sources(self, sources: list[int]) -> dict[str, Array]:
        """Return the ratios computed after removing the contributions of some source tokens to other tokens.

        The attention weights of the remaining sources are rescaled to a sum of 1.
        """
        if not self.parallel:
            self.layer_parts()  # the copy below reuses the arrays that this call stores
        other, F, weights = copy(self), self.F.copy(), self.attention.mean(0)
        shares = []
        for token in range(len(F)):
            removed = [source for source in sources if source != token]
            F[token, removed] = 0
            others = 1 - weights[token, token] - weights[token, removed].sum()
            shares.append(others / (others + weights[token, token]))
        other.add_up(F)
        values = other.ratios() | {"attn_w": np.array(shares)}
        return values | ({"attnres_w": np.array(shares) / 2} if "attnres_w" in values else {})

    def layer_parts(self) -> tuple[Array, Array]:
        """Return parts of the layer output by source [token, source, width], and the remaining part [token, width].

        The remaining part contains the biases and, in a decoder, cross-attention. The first call stores the
        preactivations, the slope of the activation and the output of the feed-forward network. Copies of this layer
        with other contributions reuse these three arrays.
        """
        w, tokens = self.weights, len(self.x)
        output_bias = w.linear("out", np.zeros((tokens, len(w.arrays["out"]) - 1)))
        parts = [*self.R.swapaxes(0, 1), output_bias]  # the last part belongs to no source
        whole = self.points["attention_residual"]
        parts = normed_parts(w, "attention_norm", parts, whole)
        whole = w.norm("attention_norm", whole)
        if "cross_attention_output" in self.points:
            parts[-1] = parts[-1] + self.points["cross_attention_output"]
            whole = whole + self.points["cross_attention_output"]
        parts = normed_parts(w, "cross_attention_norm", parts, whole)
        whole = w.norm("cross_attention_norm", whole)
        # The activation of the feed-forward network is linearised by integrated gradients.
        entering = normed_parts(w, "feed_forward_norm", parts, whole)
        inputs = {role: mapped_parts(w.arrays[role], entering) for role in ("up", "gate") if role in w.arrays}
        self.inputs = getattr(self, "inputs", {role: sum(each) for role, each in inputs.items()})
        if "gate" in inputs:
            pairs = zip(inputs["up"], inputs["gate"], strict=True)
            inner = [gated_part(w.activation, self.inputs, up, gate) for up, gate in pairs]
        else:
            total = self.inputs["up"]
            if not hasattr(self, "slope"):
                self.slope = integrated(w.activation, total, np.ones_like(total))
            inner = [self.slope * part for part in inputs["up"]]
        added = mapped_parts(w.arrays["down"], inner)
        self.added = getattr(self, "added", sum(added))
        added = normed_parts(w, "feed_forward_output_norm", added, self.added)
        summed = [part + each for part, each in zip(parts, added, strict=True)]
        summed = normed_parts(w, "output_norm", summed, sum(summed))
        return np.stack(summed[:-1], axis=1), summed[-1]

    def contributions(self) -> dict[str, Array]:
        """Return one matrix [token, source] for each contribution measure of the family."""
        output = self.weights.linear("out", self.points["attention_heads"])
        values = {
            "attention": self.attention.mean(0),
            "norm": np.linalg.norm(self.F, axis=-1),
            "contribution_weights": np.einsum("ijd,id->ij", self.projected, output) / (output**2).sum(-1)[:, None],
            "value_zeroing": normalised(self.value_zeroing(np.zeros_like(self.value_bias))),
            "value_zeroing_without_bias": normalised(self.value_zeroing(self.value_bias)),
        }
        if not self.parallel:
            y, parts = self.points["attention_residual"], self.R
            if self.post_norm:
                y, parts = self.points["attention_norm"], self.T
            alti = np.abs(y).sum(-1)[:, None] - np.abs(y[:, None] - parts).sum(-1)
            values["alti"] = normalised(np.maximum(alti, 0))
        if self.post_norm:
            values["globenc"] = normalised(np.linalg.norm(self.E, axis=-1))
        return values

    def value_zeroing(self, baseline: Array) -> Array:
        """Return 1 - cos between layer outputs with and without each value, before normalisation [token, source].

        The value of one token is replaced in all heads by `baseline` [heads, 1, head size].
        """
        tokens, output = len(self.x), self.points["layer_output"]
        values = np.zeros((tokens, tokens))
        for j in range(tokens):
            value = self.value.copy()
            value[:, j] = baseline[:, 0]
            without = self.rest(value)["layer_output"]
            values[:, j] = [1 - cosine(output[i], without[i]) for i in range(tokens)]
        return values


def integrated(activation: Callable[[Array], Array], total: Array, part: Array) -> Array:
    """Return the integrated gradients of an elementwise function from 0 to `total`, multiplied by a `part` of `total`.

    The integral is computed by Gauss quadrature, and the derivative by central differences.
    """
    points, weights = np.polynomial.legendre.leggauss(60)
    slope = np.zeros_like(total)
    for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
        slope += weight * (activation(point * total + 1e-6) - activation(point * total - 1e-6)) / 2e-6
    return part * slope


def gated_part(activation: Callable[[Array], Array], total: dict[str, Array], up: Array, gate: Array) -> Array:
    """Return the integrated gradients of activation(gate) * up from 0 to `total`, for parts `up` and `gate` of `total`.

    The integral is computed by Gauss quadrature, and the derivative by central differences.
    """
    step = 1e-5
    points, weights = np.polynomial.legendre.leggauss(20)  # as accurate as 60 points
    part = np.zeros_like(up)
    for point, weight in zip((points + 1) / 2, weights / 2, strict=True):
        above = activation(point * total["gate"] + step * gate) * (point * total["up"] + step * up)
        below = activation(point * total["gate"] - step * gate) * (point * total["up"] - step * up)
        part += weight * (above - below) / (2 * step)
    return part


def tangent_part(activation: Callable[[Array], Array], total: dict[str, Array], up: Array, gate: Array | None) -> Array:
    """Return the directional derivative of activation(up) or activation(gate) * up at `total`, along `up` and `gate`.

    The derivative of the activation is computed by central differences.
    """
    step = 1e-6
    if gate is None:
        slope = (activation(total["up"] + step) - activation(total["up"] - step)) / (2 * step)
        return slope * up
    slope = (activation(total["gate"] + step) - activation(total["gate"] - step)) / (2 * step)
    return slope * gate * total["up"] + activation(total["gate"]) * up


def normed_parts(w: Weights, role: str, parts: list[Array], whole: Any) -> list[Array]:
    """Apply the norm of `whole`, the sum of `parts`, to each part; the bias belongs to the last part."""
    normed = [w.norm_linear(role, part, whole) for part in parts]
    if role in w.arrays:
        normed[-1] = normed[-1] + w.arrays[role][1]
    return normed


def mapped_parts(linear: Array, parts: list[Array]) -> list[Array]:
    """Apply a Linear [inputs + 1, outputs] to each part; the bias, its last row, belongs to the last part."""
    mapped = [part @ linear[:-1] for part in parts]
    mapped[-1] = mapped[-1] + linear[-1]
    return mapped


def attention_parts(layer: ReferenceLayer, parts: list[Array]) -> list[Array]:
    """Return the parts of the attention output for parts of the layer input, with fixed attention weights."""
    w = layer.weights
    tokens = len(layer.x)
    attended = []
    for value in mapped_parts(w.arrays["value"], normed_parts(w, "input_norm", parts, layer.x)):
        repeats = w.heads * w.head_size // value.shape[1]  # number of heads that share a value
        heads = np.repeat(value.reshape(tokens, -1, w.head_size), repeats, axis=1)
        attended.append(np.einsum("hij,jhd->ihd", layer.attention, heads).reshape(tokens, -1))
    output = w.linear("out", layer.points["attention_heads"])
    return normed_parts(w, "attention_output_norm", mapped_parts(w.arrays["out"], attended), output)


def feed_forward_parts(layer: ReferenceLayer, parts: list[Array], rule: str) -> list[Array]:
    """Return the parts of the feed-forward network's output for parts of its input."""
    w = layer.weights
    entering = normed_parts(w, "feed_forward_norm", parts, sum(parts))
    inputs = {role: mapped_parts(w.arrays[role], entering) for role in ("up", "gate") if role in w.arrays}
    totals = {role: sum(each) for role, each in inputs.items()}
    gates = inputs.get("gate", [None] * len(entering))
    pairs = list(zip(inputs["up"], gates, strict=True))
    if rule == "tangent":
        inner = [tangent_part(w.activation, totals, up, gate) for up, gate in pairs]
        total = w.activation(totals["gate"]) * totals["up"] if "gate" in inputs else w.activation(totals["up"])
        inner[-1] = inner[-1] + total - sum(inner)  # error of the linear approximation
    elif "gate" in inputs:
        inner = [gated_part(w.activation, totals, up, gate) for up, gate in pairs]
    else:
        at_zero = w.activation(np.zeros_like(totals["up"]))
        chord = (w.activation(totals["up"]) - at_zero) / totals["up"]
        inner = [chord * part for part in inputs["up"]]
        inner[-1] = inner[-1] + at_zero
    down = mapped_parts(w.arrays["down"], inner)
    return normed_parts(w, "feed_forward_output_norm", down, sum(down))


def parts_from_input(layers: Sequence[ReferenceLayer], rule: str = "chord") -> list[list[Array]]:
    """Return parts [token, width] of the vectors at each level, for all source tokens followed by the biases.

    At level 0, the input of the first layer, each vector is entirely the part of its own token.
    """
    tokens = len(layers[0].x)
    parts = [np.zeros_like(layers[0].x) for _ in range(tokens + 1)]
    for j in range(tokens):
        parts[j][j] = layers[0].x[j]
    levels = [parts]
    for layer in layers:
        w = layer.weights
        residual = [part + each for part, each in zip(parts, attention_parts(layer, parts), strict=True)]
        if layer.parallel:
            network = feed_forward_parts(layer, parts, rule)
        else:
            residual = normed_parts(w, "attention_norm", residual, layer.points["attention_residual"])
            network = feed_forward_parts(layer, residual, rule)
        summed = [part + each for part, each in zip(residual, network, strict=True)]
        parts = normed_parts(w, "output_norm", summed, sum(summed))
        levels.append(parts)
    return levels


def rolled(matrices: Sequence[Array]) -> Array:
    """Return the rollouts R_l = A_l R_{l-1} of all layers l."""
    products = [matrices[0]]
    for matrix in matrices[1:]:
        products.append(matrix @ products[-1])
    return np.stack(products)


def mixing_ratio(parts: Array) -> Array:
    """Return |sum of other parts| / (|sum of other parts| + |own part|), or 0 if both are 0."""
    values = np.zeros(len(parts))
    for i in range(len(parts)):
        others = sum((parts[i, j] for j in range(len(parts)) if j != i), np.zeros(parts.shape[-1]))
        mixing, keeping = np.linalg.norm(others), np.linalg.norm(parts[i, i])
        values[i] = mixing / (mixing + keeping) if mixing + keeping else 0
    return values


@dataclass
class Reference:
    """The features of a text by layer and point, and the reference layers."""

    features: dict[tuple[int, str], Array]
    layers: list[ReferenceLayer]


def embedded(w: Weights, state: dict[str, Array], names: dict[str, str], ids: list[int]) -> dict[str, Array]:
    """Return the vectors at the capture points of the embedding.

    `w` contains the weights of its norm and projection.
    """
    config = w.config
    x = state[f"{names['word']}.weight"][ids]
    if w.name in GEMMAS or getattr(config, "scale_embedding", False):
        x = x * np.sqrt(config.hidden_size)
    points = {"word_embedding": x}
    position, segment = (state.get(f"{names.get(role)}.weight") for role in ("position", "segment"))
    if position is not None:
        first = OFFSETS.get(w.name, 0)
        if w.name in ROBERTA:
            first = config.pad_token_id + 1
        x = x + position[first : first + len(ids)]
    if segment is not None:
        x = x + segment[0]
    if "embedding_norm" in w.arrays:
        points["embedding_sum"] = x
        x = w.norm("embedding_norm", x)
    return {**points, "embedding_output": w.linear("projection", x) if "projection" in w.arrays else x}


def surroundings(name: str, config: Any, number: int, tokens: int, causal: bool) -> tuple[Bools, dict[str, Any] | None]:
    """Return which tokens are visible to each token in this layer, and the parameters of its rotary embedding."""
    kind = config.layer_types[number] if getattr(config, "layer_types", None) else None
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    visible = distance >= 0 if causal else np.ones_like(distance, dtype=bool)
    window = getattr(config, "sliding_window", None)
    if name == "gpt_neo" and config.attention_layers[number] == "local":
        window = config.window_size
    if window is not None and kind in (None, "sliding_attention"):
        visible &= distance < window if causal else np.abs(distance) <= window
    rotary = getattr(config, "rope_parameters", None)
    if rotary is not None and kind in rotary:
        rotary = rotary[kind]
    if name == "smollm3" and not config.no_rope_layers[number]:
        rotary = None
    return visible, rotary


def parameter_names(name: str, config: Any, side: str) -> dict[str, str]:
    """Return the parameter names of one stack by role; `side` is `encoder`, `decoder` or, for a single stack, empty."""
    templates = NAMES[name]
    if name in T5S:
        # Sublayer 0 of a T5 block is self-attention; in the decoder, sublayer 1 is cross-attention.
        sublayer = 2 if side == "decoder" else 1
        network = f"{sublayer}.DenseReluDense"
        text = f"feed_forward_norm={sublayer}.layer_norm down={network}.wo "
        text += f"up={network}.wi_1 gate={network}.wi_0" if config.is_gated_act else f"up={network}.wi"
        templates = templates | roles(text + (CROSS if side == "decoder" else ""))
    return {role: template.replace("{side}", side) for role, template in templates.items()}


def run_reference(name: str, base: Any, ids: list[int]) -> Reference:
    """Return the reference computation of a base model of the family `name` (its `model_type`) on one text."""
    state = {key: tensor.detach().double().numpy() for key, tensor in base.state_dict().items()}
    config = base.config
    memory = None  # the encoder output, for the decoder
    reference = Reference({}, [])
    for side in ("encoder", "decoder") if config.is_encoder_decoder else ("",):
        names = parameter_names(name, config, side)
        if side == "decoder":
            ids = [config.decoder_start_token_id, *ids[:-1]]  # decoder inputs are shifted right by one
        embedding_names = {role: names[role] for role in ("embedding_norm", "projection") if role in names}
        points = embedded(read(name, config, state, "", embedding_names), state, names, ids)
        x = points["embedding_output"]
        if side == "decoder":
            points = {"decoder_embedding_output": x}
        reference.features |= {(0, point): array for point, array in points.items()}
        count = getattr(config, f"{side}_layers", config.num_hidden_layers)
        for number in range(count):
            group = number * getattr(config, "num_hidden_groups", 1) // count  # layers of a group share weights
            weights = read(name, config, state, names["layer"].format(number=number, group=group), names)
            causal = name in CAUSAL or side == "decoder"
            visible, rotary = surroundings(name, config, number, len(ids), causal)
            position_scores = find_position_scores(name, config, state, side, number)
            layer = ReferenceLayer(weights, x, visible, rotary, memory, position_scores)
            reference.layers.append(layer)
            reference.features |= {(len(reference.layers), point): array for point, array in layer.points.items()}
            x = layer.points["layer_output"]
        last = read(name, config, state, "", {"norm": f"{side}.final_layer_norm"})
        memory = last.norm("norm", x)
    return reference

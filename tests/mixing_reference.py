"""An independent float64 computation of every measure of mixing: explicit per-head sums, token by token.

It reads a checkpoint's state dictionary and shares no code with `stages/`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import erf

Array = npt.NDArray[np.float64]


def gelu(x: Array) -> Array:
    return x * (1 + erf(x / np.sqrt(2))) / 2


def cosine(u: Array, v: Array) -> float:
    return float(u @ v / np.sqrt((u @ u) * (v @ v)))


@dataclass
class ReferenceLayer:
    """One layer run by hand on `x` [tokens, hidden]."""

    state: dict[str, Array]
    heads: int
    eps: float
    x: Array

    def linear(self, name: str, x: Array) -> Array:
        return x @ self.state[f"{name}.weight"].T + self.state[f"{name}.bias"]

    def norm(self, name: str, x: Array) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + self.eps)
        return centred / deviation * self.state[f"{name}.weight"] + self.state[f"{name}.bias"]

    def split(self, x: Array) -> Array:
        tokens, hidden = x.shape
        return x.reshape(tokens, self.heads, hidden // self.heads).transpose(1, 0, 2)

    def __post_init__(self) -> None:
        query, key = (self.split(self.linear(f"attention.self.{name}", self.x)) for name in ("query", "key"))
        scores = query @ key.transpose(0, 2, 1) / np.sqrt(query.shape[-1])
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        self.attention = weights / weights.sum(-1, keepdims=True)
        self.value = self.split(self.linear("attention.self.value", self.x))
        self.b_O = self.state["attention.output.dense.bias"]
        W_O = self.state["attention.output.dense.weight"].T.reshape(self.heads, -1, self.x.shape[-1])
        # f[h, j] = (x_j W_V^h + b_V^h) W_O^h, F[i, j] = sum over heads
        f = np.stack([self.value[h] @ W_O[h] for h in range(self.heads)])
        self.F = np.zeros((len(self.x), len(self.x), self.x.shape[-1]))
        for h in range(self.heads):
            self.F += self.attention[h][:, :, None] * f[h][None]
        self.attention_output = self.F.sum(1) + self.b_O
        self.y = self.x + self.attention_output
        self.attention_norm = self.norm("attention.output.LayerNorm", self.y)
        self.second = self.attention_norm + self.feed_forward(self.attention_norm)
        self.output = self.norm("output.LayerNorm", self.second)
        R = self.F.copy()
        for i in range(len(self.x)):
            R[i, i] += self.x[i]
        self.R = R
        self.T = self.map("attention.output.LayerNorm", R, self.y)
        self.E = self.map("output.LayerNorm", self.T, self.second)

    def feed_forward(self, x: Array) -> Array:
        return self.linear("output.dense", gelu(self.linear("intermediate.dense", x)))

    def map(self, name: str, parts: Array, whole: Array) -> Array:
        deviation = np.sqrt(whole.var(-1) + self.eps)
        return (parts - parts.mean(-1, keepdims=True)) / deviation[:, None, None] * self.state[f"{name}.weight"]

    def ratios(self) -> dict[str, Array]:
        own = np.array([[self.attention[h, i, i] for h in range(self.heads)] for i in range(len(self.x))]).mean(1)
        found = {"attn_w": 1 - own, "attnres_w": (1 - own) / 2}
        for method, parts in (("attn_n", self.F), ("attnres_n", self.R), ("attnresln_n", self.T), ("enc_n", self.E)):
            ratio = []
            for i in range(len(self.x)):
                others = sum((parts[i, j] for j in range(len(self.x)) if j != i), np.zeros(self.x.shape[-1]))
                mixing, keeping = np.linalg.norm(others), np.linalg.norm(parts[i, i])
                ratio.append(mixing / (mixing + keeping))
            found[method] = np.array(ratio)
        return found

    def contributions(self) -> dict[str, Array]:
        y = self.attention_norm
        alti = np.abs(y).sum(-1)[:, None] - np.abs(y[:, None] - self.T).sum(-1)
        return {
            "attention": self.attention.mean(0),
            "norm": np.linalg.norm(self.F, axis=-1),
            "alti": normalised(np.maximum(alti, 0)),
            "globenc": normalised(np.linalg.norm(self.E, axis=-1)),
            "value_zeroing": normalised(self.value_zeroing()),
        }

    def value_zeroing(self) -> Array:
        """The layer run again with one value at a time set to zero."""
        tokens = len(self.x)
        found = np.zeros((tokens, tokens))
        for j in range(tokens):
            value = self.value.copy()
            value[:, j] = 0
            context = (self.attention @ value).transpose(1, 0, 2).reshape(tokens, -1)
            attended = self.norm("attention.output.LayerNorm", self.x + self.linear("attention.output.dense", context))
            output = self.norm("output.LayerNorm", attended + self.feed_forward(attended))
            found[:, j] = [1 - cosine(self.output[i], output[i]) for i in range(tokens)]
        return found


def normalised(matrix: Array) -> Array:
    return matrix / matrix.sum(-1, keepdims=True)


def run_reference(base: Any, ids: list[int]) -> list[ReferenceLayer]:
    """Every layer of a BERT-like base model, from its state dictionary and the token ids alone."""
    state = {name: tensor.double().numpy() for name, tensor in base.state_dict().items()}
    config = base.config
    first = config.pad_token_id + 1 if config.model_type == "roberta" else 0
    x = (
        state["embeddings.word_embeddings.weight"][ids]
        + state["embeddings.position_embeddings.weight"][first : first + len(ids)]
        + state["embeddings.token_type_embeddings.weight"][0]
    )
    eps = config.layer_norm_eps
    centred = x - x.mean(-1, keepdims=True)
    x = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps)
    x = x * state["embeddings.LayerNorm.weight"] + state["embeddings.LayerNorm.bias"]
    layers = []
    for number in range(config.num_hidden_layers):
        prefix = f"encoder.layer.{number}."
        own = {name.removeprefix(prefix): array for name, array in state.items() if name.startswith(prefix)}
        layers.append(ReferenceLayer(own, config.num_attention_heads, eps, x))
        x = layers[-1].output
    return layers


def rolled(matrices: list[Array]) -> list[Array]:
    found = [matrices[0]]
    for matrix in matrices[1:]:
        found.append(matrix @ found[-1])
    return found

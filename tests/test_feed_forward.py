"""The feed-forward network source by source: slopes, and parts that sum with every norm in place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, relu

from attnmix.measures.feed_forward import AfterAttention, slopes
from attnmix.measures.layers import Linear as Affine
from attnmix.measures.layers import NoNorm, Norm, no_norm

TOKENS, HIDDEN, WIDTH = 5, 6, 11
NORMS = ["attention_norm", "cross_attention_norm", "feed_forward_norm", "feed_forward_output_norm", "output_norm"]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize(
    ("activation", "at_zero"), [(gelu, 0.5), (relu, 0.5), (torch.tanh, 1.0), (torch.sigmoid, 0.25), (torch.exp, 1.0)]
)
def test_slopes_are_integrated_gradients_from_zero(activation: Any, at_zero: float) -> None:
    before = torch.cat([random(20), torch.zeros(2).double()])
    found = slopes(activation, before, activation(before))
    steps = (torch.arange(4000).double() + 0.5) / 4000
    path = (steps.unsqueeze(-1) * before[:20]).requires_grad_()
    (gradients,) = torch.autograd.grad(activation(path).sum(), path)
    torch.testing.assert_close(found[:20], gradients.mean(0), rtol=0, atol=1e-6)
    torch.testing.assert_close(found[20:], torch.full((2,), at_zero).double(), rtol=0, atol=1e-6)


def norm(seed: int) -> Norm:
    return Norm(1 + random(HIDDEN, seed=seed) / 4, random(HIDDEN, seed=seed + 1), 1e-5, centred=True)


def normed(norm: Norm, x: torch.Tensor) -> torch.Tensor:
    return x if isinstance(norm, NoNorm) else layer_norm(x, (HIDDEN,), norm.gamma, norm.beta, norm.eps)


@pytest.mark.parametrize("present", ["none", "post", "cross", "pre", "sandwich", "all"])
def test_parts_of_sources_and_biases_sum_to_what_the_modules_give(present: str) -> None:
    kept = {
        "post": ["attention_norm", "output_norm"],
        "cross": ["attention_norm", "cross_attention_norm", "output_norm"],
        "pre": ["feed_forward_norm"],
        "sandwich": ["feed_forward_norm", "feed_forward_output_norm"],
        "all": NORMS,
    }.get(present, [])
    named = {name: norm(3 * place) if name in kept else no_norm(random(1)) for place, name in enumerate(NORMS)}
    up = Affine(random(HIDDEN, WIDTH, seed=20), random(WIDTH, seed=21))
    down = Affine(random(WIDTH, HIDDEN, seed=22), random(HIDDEN, seed=23))
    block: Any = SimpleNamespace(**named, feed_forward=(up, down), activation=torch.sigmoid)
    own, others, constant = (random(TOKENS, HIDDEN, seed=seed) for seed in (30, 31, 32))
    cross = random(TOKENS, HIDDEN, seed=33) if "cross_attention_norm" in kept else None
    z = normed(named["attention_norm"], own + others + constant)
    if cross is not None:
        z = normed(named["cross_attention_norm"], z + cross)
    before = normed(named["feed_forward_norm"], z) @ up.W + up.b
    true = normed(named["feed_forward_output_norm"], torch.sigmoid(before) @ down.W + down.b)
    rest = AfterAttention(block, own + others + constant, cross, before)
    streams = [rest.stream(own), rest.stream(others), rest.stream_with_biases(constant)]
    torch.testing.assert_close(sum(streams), z)
    torch.testing.assert_close(rest.added(streams[0]) + rest.added(streams[1]) + rest.biases(constant), true)


def test_a_network_that_gives_nothing_leaves_the_skip_connection() -> None:
    nothing = Affine(torch.zeros(HIDDEN, WIDTH).double(), torch.zeros(WIDTH).double())
    norms = dict.fromkeys(NORMS, no_norm(random(1)))
    down = Affine(random(WIDTH, HIDDEN), random(HIDDEN))
    block: Any = SimpleNamespace(**norms, feed_forward=(nothing, down), activation=gelu)
    own = random(TOKENS, HIDDEN)
    rest = AfterAttention(block, own, None, torch.zeros(TOKENS, WIDTH).double())
    torch.testing.assert_close(rest.output(own), own)

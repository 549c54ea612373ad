"""Edits of a model's self-attention while it runs, to see what depends on it: heads, edges and values taken away.

    model = attnmix.load(classifier, tokenizer)
    inputs = tokenizer("time flies like an arrow", return_tensors="pt")
    with model.intervene(attnmix.interventions.without_heads({6: [0, 3]})) as network:
        network(**inputs).logits

An edit is a function of a layer's number (from 1 on), its attention weights `[B, H, T, T]` (row i, source j) and its
values `[B, H, T, d]`, grouped heads repeated. It returns both, changed or not; the heads' outputs are their product.
Cross-attention stays as it is. Shapes: B texts, H heads, T tokens, d head width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from attnmix.models.attention import attend, attention_by
from attnmix.models.families import attention_modules

Tensor = torch.Tensor
Edit = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


def without_heads(heads: Mapping[int, Collection[int]]) -> Edit:
    """Return the edit that silences `heads`, numbers from 0 on by layer: their values are 0.

    The same as zero rows of W_O; b_O stays.
    """

    def edit(layer: int, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        kept = value.new_ones(value.shape[1])
        kept[list(heads.get(layer, ()))] = 0
        return weights, value * kept[:, None, None]

    return edit


def without_edges(targets: Tensor | slice, sources: Tensor | slice, layers: Collection[int] | None = None) -> Edit:
    """Return the edit that lets the `targets` take nothing from the `sources`, in `layers` or in all.

    Both are positions of tokens. The weights are 0, and the others stay as they are: what the sources gave is lost.
    """

    def edit(layer: int, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layers is None or layer in layers:
            tokens = torch.arange(weights.shape[-1], device=weights.device)
            cut = torch.zeros(len(tokens), len(tokens), dtype=torch.bool, device=weights.device)
            cut[tokens[targets][:, None], tokens[sources]] = True
            weights = weights.masked_fill(cut, 0)
        return weights, value

    return edit


def text_mean_values(attention_mask: Tensor, layers: Collection[int] | None = None) -> Edit:
    """Return the edit that gives every source the mean value of its text's tokens, in `layers` or in all.

    `attention_mask` `[B, T]` is the model's input: padding does not count. No token can then know which token gave.
    """

    def edit(layer: int, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layers is None or layer in layers:
            mask = attention_mask.to(value)[:, None, :, None]
            mean = (value * mask).sum(-2, keepdim=True) / mask.sum(-2, keepdim=True)
            value = mean.expand_as(value)
        return weights, value

    return edit


@contextmanager
def edited_attention(base: PreTrainedModel, edit: Edit) -> Iterator[None]:
    """Let the self-attention of a model with `implementation_of` its configuration pass through `edit`.

    Layers are counted as they are called in a forward pass, through all stacks.
    """
    attentions = attention_modules(base)
    called = 0

    def begin(*_: Any) -> None:
        nonlocal called
        called = 0

    def function(module: Any, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        nonlocal called
        context, call = attend(module, *arguments, **options)
        if module in attentions:
            called += 1
            weights, value = edit(called, call.weights(), call.value)
            context = weights @ value
        return context.transpose(1, 2).contiguous(), None

    handle = base.register_forward_pre_hook(begin)
    try:
        with attention_by(function, base):
            yield
    finally:
        handle.remove()

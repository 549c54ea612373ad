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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnmix.core.errors import InputError
from attnmix.models.attention import attend, attention_by
from attnmix.models.families import attention_modules

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


def replaced_values(values: Mapping[int, Tensor]) -> Edit:
    """Return the edit that puts other values in the place of a layer's: `values[layer]` broadcasts to `[B, H, T, d]`.

    A mean over texts or a donor's mean is `[B, H, 1, d]`: the same for every source of a text.
    """

    def edit(layer: int, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return weights, values[layer].to(value).expand_as(value) if layer in values else value

    return edit


def mapped_values(maps: Mapping[int, Callable[[Tensor], Tensor]]) -> Edit:
    """Return the edit that maps a layer's values, heads side by side `[B, T, H * d]`: by `maps[layer]`, an `Eraser`."""

    def edit(layer: int, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in maps:
            mapped = maps[layer](value.transpose(1, 2).flatten(-2))
            value = mapped.unflatten(-1, (value.shape[1], -1)).transpose(1, 2)
        return weights, value

    return edit


def chained(*edits: Edit) -> Edit:
    """Return the edit that applies `edits` one after the other."""

    def edit(layer: int, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        for each in edits:
            weights, value = each(layer, weights, value)
        return weights, value

    return edit


def recorded(values: dict[int, Tensor]) -> Edit:
    """Return the edit that changes nothing, and leaves each layer's values `[B, H, T, d]` in `values`."""

    def edit(layer: int, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        values[layer] = value
        return weights, value

    return edit


@dataclass(frozen=True)
class Eraser:
    """An affine map x - (x - mean) directions readout, `[..., D] -> [..., D]`, in float64 within."""

    mean_D: Tensor
    readout_DK: Tensor  # what is read off a vector
    directions_KD: Tensor  # and taken away along these

    def __call__(self, vectors: Tensor) -> Tensor:
        read = (vectors.double() - self.mean_D) @ self.readout_DK
        return vectors - (read @ self.directions_KD).to(vectors)

    def scaled(self, factor: float) -> Eraser:
        """Return the map that leaves `factor` times what this one erases."""
        return replace(self, readout_DK=(1 - factor) * self.readout_DK)


def class_eraser(vectors_ND: Tensor, classes_N: Tensor) -> Eraser:
    """Return the least change of vectors after which no linear map can tell their classes: LEACE's closed form.

    With W the inverse root of the covariance S (on the span of the vectors) and Z the classes, one-hot,
    x' = x - W^+ P W (x - mean), P the projection onto the columns of W cov(x, Z) (Belrose et al., NeurIPS 2023,
    theorem 4.2). Raise `InputError` for fewer than two classes.
    """
    names = classes_N.unique()
    if len(names) < 2:
        raise InputError("class_eraser: vectors of a single class; allowed: two classes or more")
    onehot_NK = (classes_N[:, None] == names).double()
    centred_ND = vectors_ND.double() - vectors_ND.double().mean(0)
    whiten_DD, colour_DD = _whitening(centred_ND)
    columns_DK = whiten_DD @ (centred_ND.T @ (onehot_NK - onehot_NK.mean(0)) / len(classes_N))
    sizes_K, vectors_KK = torch.linalg.eigh(columns_DK.T @ columns_DK)
    kept = sizes_K > sizes_K.max() * 1e-12  # the columns of all classes sum to 0
    basis_DR = columns_DK @ vectors_KK[:, kept] / sizes_K[kept].sqrt()
    return Eraser(vectors_ND.double().mean(0), whiten_DD @ basis_DR, basis_DR.T @ colour_DD)


def remaining_eraser(vectors_ND: Tensor, eraser: Eraser, seed: int | None = None) -> Eraser:
    """Return a map that takes as much of the vectors' variance away as `eraser`, and nothing of what that one erases.

    It erases orthogonal directions of what `eraser` leaves: random ones, or without a seed principal components, the
    largest first. The last is taken away in part, so that the variance is equal; all where together they have less.
    """
    remaining_ND = eraser(vectors_ND.double()) - eraser.mean_D
    sizes_D, vectors_DD = torch.linalg.eigh(remaining_ND.T @ remaining_ND / len(remaining_ND))
    kept = sizes_D > sizes_D.max() * 1e-10
    basis_DR = vectors_DD[:, kept].flip(-1)
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        rank = basis_DR.shape[1]
        basis_DR = basis_DR @ torch.linalg.qr(torch.randn(rank, rank, generator=generator, dtype=torch.float64)).Q
    variance_R = (remaining_ND @ basis_DR).square().mean(0)
    erased_ND = vectors_ND.double() - eraser.mean_D - remaining_ND
    missing_R = erased_ND.square().mean(0).sum() - (variance_R.cumsum(0) - variance_R)
    parts_R = (missing_R / variance_R).clamp(0, 1).sqrt()
    readout_DR = basis_DR - eraser.readout_DK @ (eraser.directions_KD @ basis_DR)
    taken = parts_R > 0
    return Eraser(eraser.mean_D, (readout_DR * parts_R)[:, taken], basis_DR.T[taken])


def _whitening(centred_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return the root of the pseudo-inverse of the covariance, and the root of the covariance `[D, D]`."""
    sizes_D, vectors_DD = torch.linalg.eigh(centred_ND.T @ centred_ND / len(centred_ND))
    kept = sizes_D > sizes_D.max() * 1e-10
    roots_D = torch.where(kept, sizes_D, 1).sqrt()
    scaled = [vectors_DD * torch.where(kept, each, 0) for each in (1 / roots_D, roots_D)]
    return scaled[0] @ vectors_DD.T, scaled[1] @ vectors_DD.T


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

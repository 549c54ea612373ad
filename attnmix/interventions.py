"""Interventions on the self-attention of a model: ablation of heads and edges, and replacement of values.

    model = attnmix.load(classifier, tokenizer)
    inputs = tokenizer("time flies like an arrow", return_tensors="pt")
    with model.intervene(attnmix.interventions.without_heads({6: [0, 3]})) as network:
        network(**inputs).logits

An edit is a function of three arguments: the layer number (from 1; decoder layers are numbered after the encoder
layers), the attention weights `[B, H, queries, keys]` and the values `[B, H, keys, d]`. Values that several heads share
are repeated. The edit returns the weights and the values, changed or unchanged. The product of weights and values is
the output of the heads. Without a cache of keys, the numbers of queries and keys are equal. Cross-attention is not
edited. Layers that do not exist raise `InputError` when the intervention begins; heads and tokens that do not exist
raise it in the first forward pass.

While its context is open, an edit applies to every call of the whole network, of an encoder or decoder alone, and of
`generate`, in all threads. Nested contexts apply their edits in sequence. Gradients are computed through the edited
network. The measures of attnmix describe unedited models and raise `InputError` inside an intervention.
Shapes: B texts, H heads, d head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from attnmix.core.errors import InputError
from attnmix.core.selections import check_range, whole_number, whole_numbers
from attnmix.models.attention_edits import attached_edit
from attnmix.models.families import layer_counts

Edit = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
FLOAT64_DEVICES = ("cpu", "cuda")  # Apple's GPU, for example, does not support float64.
MIN_VARIANCE = 1e-10  # relative to the largest variance of any direction; smaller variances are rounding errors
MIN_EIGENVALUE = 1e-12  # relative to the largest eigenvalue; smaller eigenvalues are rounding errors


@dataclass(frozen=True)
class EditedCall:
    """The arguments of an edit for one call of a layer's self-attention."""

    layer: int
    weights: Tensor  # [B, H, queries, keys]
    value: Tensor  # [B, H, keys, d]
    first_query: int | None = 0
    """Index of the first query's token, 0 without cached keys; None if the cache does not have one key per token."""

    @property
    def known_first_query(self) -> int:
        """The index `first_query`; raise `InputError` if it is None."""
        if self.first_query is None:
            problem = f"the cache of keys in layer {self.layer} does not contain one key for each token"
            raise InputError(f"edit: {problem}; pass use_cache=False, or a dynamic cache that keeps all tokens")
        return self.first_query


@dataclass(frozen=True)
class LayerEdit:
    """An edit of selected layers, or of all layers if `layers` is None."""

    maker: str
    """Name of the function that created the edit, for error messages."""
    layers: tuple[int, ...] | None
    change: Callable[[EditedCall], tuple[Tensor, Tensor]]

    def __call__(self, layer: int, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.edited(EditedCall(layer, weights, value))

    def edited(self, call: EditedCall) -> tuple[Tensor, Tensor]:
        """Return the weights and values of one call; they are unchanged in layers that are not selected."""
        if self.layers is None or call.layer in self.layers:
            return self.change(call)
        return call.weights, call.value

    def check_layers(self, allowed: range, note: str) -> None:
        """Raise `InputError` for a layer that the model does not have."""
        check_range(f"{self.maker}: layer", self.layers or (), allowed, note)


@dataclass(frozen=True)
class ChainedEdit:
    """A sequence of edits, applied in order."""

    edits: tuple[Edit, ...]

    def __call__(self, layer: int, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return self.edited(EditedCall(layer, weights, value))

    def edited(self, call: EditedCall) -> tuple[Tensor, Tensor]:
        """Return the weights and values of one call after all edits."""
        for edit in self.edits:
            weights, value = _apply_edit(edit, call)
            call = replace(call, weights=weights, value=value)
        return call.weights, call.value

    def check_layers(self, allowed: range, note: str) -> None:
        """Raise `InputError` if an edit selects a layer that the model does not have."""
        for edit in self.edits:
            if isinstance(edit, LayerEdit | ChainedEdit):
                edit.check_layers(allowed, note)


def _apply_edit(edit: Edit, call: EditedCall) -> tuple[Tensor, Tensor]:
    """Return the weights and values of `call` after `edit`; raise `InputError` if `edit` returns an invalid result."""
    if isinstance(edit, LayerEdit | ChainedEdit):
        result: Any = edit.edited(call)
    else:
        result = edit(call.layer, call.weights, call.value)
    layer = call.layer
    if not isinstance(result, tuple) or len(result) != 2:
        raise InputError(f"edit: in layer {layer} it returned {type(result).__name__}; return (weights, values)")
    weights, value = result
    _check_edited("weights", weights, call.weights, layer)
    _check_edited("values", value, call.value, layer)
    return weights.expand_as(call.weights), value.expand_as(call.value)


def _check_edited(name: str, edited: Any, given: Tensor, layer: int) -> None:
    """Raise `InputError` unless an edited tensor has the dtype and device of `given`, and broadcasts to its shape."""
    if isinstance(edited, Tensor):
        has_same_type = edited.dtype == given.dtype and edited.device == given.device
        if has_same_type and _can_broadcast(edited, given):
            return
        returned = _describe_tensor(edited)
    else:
        returned = type(edited).__name__
    raise InputError(f"edit: in layer {layer} the returned {name} are {returned}; allowed: {_describe_tensor(given)}")


@dataclass(frozen=True)
class Positions:
    """Tokens of a text, selected by positions, by a slice, or by a mask over all tokens."""

    argument: str
    """The name of the user's argument, for error messages."""
    numbers: tuple[int, ...] | slice
    """The positions, or a slice, which is resolved when the number of tokens is known."""
    mask_length: int | None = None
    """The number of tokens in the mask; None for positions and slices."""

    @classmethod
    def named(cls, argument: str, given: Any) -> Positions:
        """Return the positions in the user's argument `given`: integers, a slice, or a mask over all tokens.

        Raise `InputError` if the value is invalid or selects no token. Messages begin with the name `argument`.
        """
        if isinstance(given, slice):
            _check_slice(argument, given)
            return cls(argument, given)
        if hasattr(given, "dtype"):  # a tensor or an array, which contains positions unless its dtype is bool
            mask = torch.as_tensor(given)
            if mask.dtype == torch.bool:
                return cls._create_from_mask(argument, mask)
        return cls(argument, whole_numbers(argument, given))

    @classmethod
    def _create_from_mask(cls, argument: str, mask: Tensor) -> Positions:
        """Return the positions that a mask over all tokens selects."""
        if mask.ndim != 1 or not mask.any():
            shape = list(mask.shape)
            raise InputError(f"{argument}: a mask of shape {shape}; allowed: `[tokens]` that selects one or more")
        numbers = mask.nonzero()[:, 0]
        return cls(argument, tuple(numbers.tolist()), len(mask))

    def in_texts(self, call: EditedCall) -> Tensor:
        """Return the token positions `[N]` for the texts of a call, on the CPU.

        Raise `InputError` for positions that a text does not have, and for positions of padding. Padding is allowed in
        two cases: if it was selected by a slice or a mask, and if the call contains only the last queries of each text.
        The latter occurs after the first call with a key-value cache.
        """
        queries, tokens = call.weights.shape[-2:]
        where = f" in layer {call.layer}"
        is_mask = self.mask_length is not None
        if is_mask and self.mask_length != tokens:
            raise InputError(f"{self.argument}: a mask of {self.mask_length} tokens; allowed: {tokens}{where}")
        if isinstance(self.numbers, slice):
            return self._resolve_slice(self.numbers, tokens, where)
        check_range(f"{self.argument}: token", self.numbers, range(tokens), where)
        positions = torch.tensor(self.numbers)
        # In a call with only the last queries, tokens outside a sliding window would be mistaken for padding.
        has_all_queries = queries == tokens
        if has_all_queries and not is_mask:
            self._check_padding(call.weights, positions)
        return positions

    def _resolve_slice(self, numbers: slice, tokens: int, where: str) -> Tensor:
        """Return the positions `[N]` that a slice selects in a text; raise `InputError` if the text is too short.

        `tokens` is the number of tokens of the text, and `where` the end of error messages.
        """
        first = numbers.start or 0
        last = tokens - 1
        if numbers.stop is not None:
            last = numbers.stop - 1
        check_range(f"{self.argument}: token", [first, last], range(tokens), where)
        positions = list(range(tokens)[numbers])
        if not positions:
            raise InputError(f"{self.argument}: {numbers} selects no token; allowed: 0 to {tokens - 1}{where}")
        return torch.tensor(positions)

    def _check_padding(self, weights: Tensor, positions: Tensor) -> None:
        """Raise `InputError` if one of the tokens at `positions` is padding in one of the texts.

        A token is padding if the attention weights on it are 0 for all queries and heads. `weights` has the shape
        `[B, H, queries, keys]`, for B texts and H heads; there are N positions.
        """
        selected_weights = weights.detach()[..., positions.to(weights.device)]
        is_attended_BN = selected_weights.sum((1, 2)) > 0
        missing = (~is_attended_BN).nonzero().tolist()
        if missing:
            text, number = missing[0]
            token = int(positions[number])
            problem = f"token {token} is padding in text {text} of the batch"
            raise InputError(f"{self.argument}: {problem}; allowed: positions without padding in any text, or a slice")


def _check_slice(argument: str, given: slice) -> None:
    """Raise `InputError`, prefixed with `argument`, for negative bounds and for a step of 0 or less."""
    bounds = [bound for bound in (given.start, given.stop, given.step) if bound is not None]
    has_negative = any(whole_number(argument, bound) < 0 for bound in bounds)
    if has_negative or given.step == 0:
        raise InputError(f"{argument}: {given}; allowed: bounds of 0 or more, and a step of 1 or more")


def without_heads(heads: Mapping[int, Collection[int]]) -> Edit:
    """Return an edit that ablates `heads` (indices from 0, by layer) by setting their values to 0.

    This is equivalent to setting the rows of W_O that belong to these heads to 0; b_O is unchanged. Shapes: B texts, H
    heads, T tokens, d head width.
    """
    heads_by_layer = {}
    for layer, given in _read_dictionary("without_heads", heads).items():
        heads_by_layer[layer] = whole_numbers(f"without_heads: layer {layer}", given)

    def ablate_heads(call: EditedCall) -> tuple[Tensor, Tensor]:
        """Set the values `[B, H, T, d]` of the selected heads to 0."""
        heads_of_layer = heads_by_layer[call.layer]
        head_count = call.value.shape[1]
        check_range("without_heads: head", heads_of_layer, range(head_count), f" in layer {call.layer}")
        is_ablated_H = torch.zeros(head_count, dtype=torch.bool)
        is_ablated_H[list(heads_of_layer)] = True
        is_ablated_H = is_ablated_H.to(call.value.device)
        value = call.value.masked_fill(is_ablated_H[:, None, None], 0)
        return call.weights, value

    return LayerEdit("without_heads", tuple(heads_by_layer), ablate_heads)


def without_edges(
    targets: Tensor | slice | Collection[int],
    sources: Tensor | slice | Collection[int],
    layers: Collection[int] | None = None,
) -> Edit:
    """Return an edit that sets the attention weights from `targets` to `sources` to 0, in `layers` or in all layers.

    Targets and sources are token positions, counted from 0: integers, a slice, or a mask over all tokens. The remaining
    weights are not renormalised, so the contribution of the sources is missing from the output.
    """
    target_positions = Positions.named("without_edges: targets", targets)
    source_positions = Positions.named("without_edges: sources", sources)
    has_named_layers = layers is not None

    def cut_edges(call: EditedCall) -> tuple[Tensor, Tensor]:
        """Set the weights `[B, H, queries, keys]` of the edges from target queries to source keys to 0.

        In a call that contains the queries of all tokens, raise `InputError` if all these weights are already 0.
        Bidirectional layers are exempt if `layers` is None.
        """
        if torch._C._functorch.is_batchedtensor(call.weights):  # The values of such a tensor cannot be read.
            raise InputError(
                "without_edges: tokens cannot be checked inside torch.func.vmap; pass a padded batch instead"
            )
        is_cut = _mark_edges(call, target_positions, source_positions)
        queries, keys = is_cut.shape
        has_all_queries = queries == keys
        # With cached keys, the targets may be queries of earlier calls, so a call without cut edges is allowed.
        if has_all_queries:
            _check_edges(call, is_cut, named=has_named_layers)
        weights = call.weights.masked_fill(is_cut, 0)
        return weights, call.value

    return LayerEdit("without_edges", _read_layers("without_edges", layers), cut_edges)


def _mark_edges(call: EditedCall, targets: Positions, sources: Positions) -> Tensor:
    """Return a mask `[queries, keys]` that is True for the edges of a call from `targets` to `sources`."""
    queries, keys = call.weights.shape[-2:]
    first = call.known_first_query  # with a cache of keys, queries are only the last tokens of the text
    is_edge = torch.zeros(keys, keys, dtype=torch.bool)  # for all tokens of the text
    target_rows = targets.in_texts(call)
    source_columns = sources.in_texts(call)
    is_edge[target_rows[:, None], source_columns] = True
    return is_edge[first : first + queries].to(call.weights.device)


def _check_edges(call: EditedCall, cut: Tensor, *, named: bool) -> None:
    """Raise `InputError` if the attention weights of all edges in the mask `cut` are already 0.

    In a causal model, for example, the weight of an edge to a later source is 0. If the user did not select the layer
    (`named` is False), edges with weight 0 are allowed in bidirectional layers, because a sliding window may exclude
    them.
    """
    if call.weights.masked_select(cut).any():
        return
    is_bidirectional = call.weights.triu(1).any()  # in other layers, no token attends to a later one
    if named or not is_bidirectional:
        problem = f"no target attends to them in layer {call.layer}"
        raise InputError(f"without_edges: sources: {problem}; pass tokens that a target attends to")


def text_mean_values(attention_mask: Tensor, layers: Collection[int] | None = None) -> Edit:
    """Return an edit that replaces all values by their mean over the text, in `layers` or in all layers.

    `attention_mask` `[B, T]` is the mask that the model receives; padding is excluded from the mean. With equal values,
    the output of attention no longer depends on the differences between tokens. Shapes: B texts, T tokens, H heads, d
    head width.
    """
    mask_BT = torch.as_tensor(attention_mask)
    is_valid = (mask_BT == 0) | (mask_BT == 1)
    if mask_BT.ndim != 2 or not is_valid.all() or not mask_BT.any(-1).all():
        allowed = "`[texts, tokens]` of 1 for tokens and 0 for padding, with at least one token in each text"
        raise InputError(f"text_mean_values: attention_mask of shape {list(mask_BT.shape)}; allowed: {allowed}")

    def average_values(call: EditedCall) -> tuple[Tensor, Tensor]:
        """Replace the values `[B, H, T, d]` by their means over the tokens of each text."""
        value = call.value
        texts = len(value)
        tokens = value.shape[-2]
        if mask_BT.shape not in ((1, tokens), (texts, tokens)):
            allowed = f"[{texts}, {tokens}] in layer {call.layer}"
            raise InputError(f"text_mean_values: attention_mask of shape {list(mask_BT.shape)}; allowed: {allowed}")
        mask_B1T1 = mask_BT.to(value)[:, None, :, None]
        masked_value = value * mask_B1T1
        sums = masked_value.sum(-2, keepdim=True)
        lengths = mask_B1T1.sum(-2, keepdim=True)
        means = sums / lengths
        return call.weights, means.expand_as(value)

    return LayerEdit("text_mean_values", _read_layers("text_mean_values", layers), average_values)


def replaced_values(values: Mapping[int, Tensor]) -> Edit:
    """Return an edit that replaces the values of each layer by `values[layer]`, which must broadcast to `[B, H, T, d]`.

    For example, a mean over several texts or over the tokens of a donor text has the shape `[B, H, 1, d]`. Such a
    mean replaces the values of all source tokens of a text. Shapes: B texts, H heads, T tokens, d head width.
    """
    by_layer = _read_dictionary("replaced_values", values)
    for layer, replacement in by_layer.items():
        if not isinstance(replacement, Tensor) or replacement.is_complex():
            kind = type(replacement).__name__
            raise InputError(
                f"replaced_values: the value of layer {layer} is of type {kind}; allowed: a tensor of real numbers"
            )

    def replace_values(call: EditedCall) -> tuple[Tensor, Tensor]:
        """Replace the values `[B, H, T, d]` of a layer by the user's values for this layer."""
        replacement = by_layer[call.layer]
        value = call.value
        if not _can_broadcast(replacement, value):
            shape = list(replacement.shape)
            allowed = f"a shape that broadcasts to {list(value.shape)} ([texts, heads, tokens, head width])"
            raise InputError(f"replaced_values: layer {call.layer}: shape {shape}; allowed: {allowed}")
        replacement = replacement.to(value)
        return call.weights, replacement.expand_as(value)

    return LayerEdit("replaced_values", tuple(by_layer), replace_values)


def mapped_values(maps: Mapping[int, Callable[[Tensor], Tensor]]) -> Edit:
    """Return an edit that applies `maps[layer]`, such as an `Eraser`, to the values of all heads, `[B, T, H * d]`.

    Shapes: B texts, T tokens, H heads, d head width.
    """
    by_layer = _read_dictionary("mapped_values", maps)
    for layer, function in by_layer.items():
        if not callable(function):
            kind = type(function).__name__
            raise InputError(
                f"mapped_values: the map of layer {layer} is of type {kind}; allowed: an `Eraser` or a function"
            )

    def map_values(call: EditedCall) -> tuple[Tensor, Tensor]:
        """Apply the layer's map to the values of all heads, concatenated to `[B, T, H * d]`."""
        function = by_layer[call.layer]
        concatenated = call.value.transpose(1, 2).flatten(-2)
        mapped = function(concatenated)
        if not isinstance(mapped, Tensor) or mapped.shape != concatenated.shape:
            returned = type(mapped).__name__
            if isinstance(mapped, Tensor):
                returned = f"shape {list(mapped.shape)}"
            allowed = f"{list(concatenated.shape)}, the shape of its input"
            raise InputError(f"mapped_values: layer {call.layer}: its map returned {returned}; allowed: {allowed}")
        heads = call.value.shape[1]
        mapped_BTHd = mapped.unflatten(-1, (heads, -1))
        return call.weights, mapped_BTHd.transpose(1, 2)

    return LayerEdit("mapped_values", tuple(by_layer), map_values)


def chained(*edits: Edit) -> Edit:
    """Return an edit that applies `edits` in order."""
    if not edits:
        raise InputError("chained: no edits; pass one or more")
    for edit in edits:
        _check_edit(edit)
    return ChainedEdit(edits)


def recorded(values: MutableMapping[int, Tensor]) -> Edit:
    """Return an edit that changes nothing, and stores the values `[B, H, T, d]` of each layer in `values[layer]`.

    Shapes: B texts, H heads, T tokens, d head width.
    """
    if not isinstance(values, MutableMapping):
        raise InputError(
            f"recorded: got {type(values).__name__}; pass a dictionary, which will contain values by layer"
        )

    def record_values(call: EditedCall) -> tuple[Tensor, Tensor]:
        """Store the values of a layer, and return the weights and values unchanged."""
        values[call.layer] = call.value
        return call.weights, call.value

    return LayerEdit("recorded", None, record_values)


def _read_dictionary(maker: str, given: Any) -> dict[int, Any]:
    """Return a copy of the user's dictionary `given`, with layer numbers as keys.

    Raise `InputError` if `given` is not a dictionary, is empty or has invalid keys. Messages begin with `maker`, the
    name of the public function that received the dictionary.
    """
    advice = "pass a dictionary with one or more layers as keys"
    if not isinstance(given, Mapping):
        raise InputError(f"{maker}: got {type(given).__name__}; {advice}")
    if not given:
        raise InputError(f"{maker}: an empty dictionary; {advice}")
    by_layer = {}
    for layer, value in given.items():
        number = whole_number(f"{maker}: layer", layer)
        by_layer[number] = value
    return by_layer


def _read_layers(maker: str, given: Any) -> tuple[int, ...] | None:
    """Return the layers in the argument `given` of the public function `maker`; None, for all layers, is unchanged."""
    if given is None:
        return None
    return whole_numbers(f"{maker}: layers", given)


def _can_broadcast(given: Tensor, to: Tensor) -> bool:
    """Return True if the shape of `given` broadcasts to the shape of `to`."""
    if given.ndim > to.ndim:
        return False
    lengths_from_last = zip(given.shape[::-1], to.shape[::-1], strict=False)
    return all(length in (1, target_length) for length, target_length in lengths_from_last)


def _check_edit(edit: Any) -> None:
    """Raise `InputError` unless `edit` can be called."""
    if not callable(edit):
        allowed = "an edit of attnmix.interventions, or a function of a layer's number, weights and values"
        raise InputError(f"edit: got {type(edit).__name__}; allowed: {allowed}")


@dataclass(frozen=True)
class Eraser:
    """The affine map x - (x - mean) @ readout @ directions of vectors x `[..., D]`, computed in float64."""

    mean_D: Tensor  # the mean of the vectors for which the map was computed
    readout_DK: Tensor  # projection of a centred vector to K coordinates
    directions_KD: Tensor  # directions along which the coordinates are subtracted

    def __call__(self, vectors: Tensor) -> Tensor:
        """Return vectors `[..., D]` without the erased component, in the dtype of `vectors`."""
        width = len(self.mean_D)
        if vectors.ndim < 1 or vectors.shape[-1] != width:
            raise InputError(f"Eraser: vectors of shape {list(vectors.shape)}; allowed: {width} in the last dimension")
        exact = _convert_to_float64(vectors)
        mean_D = self.mean_D.to(exact)
        readout_DK = self.readout_DK.to(exact)
        directions_KD = self.directions_KD.to(exact)
        coordinates = (exact - mean_D) @ readout_DK
        erased = coordinates @ directions_KD
        return vectors - erased.to(vectors)

    def scaled(self, factor: float) -> Eraser:
        """Return a map that keeps the fraction `factor` of the component that `self` erases."""
        if isinstance(factor, bool) or not isinstance(factor, Real) or not math.isfinite(factor):
            raise InputError(f"scaled: factor {factor!r}; allowed: a finite number")
        return replace(self, readout_DK=(1 - float(factor)) * self.readout_DK)


def class_eraser(vectors_ND: Tensor, classes_N: Tensor) -> Eraser:
    """Return the map that prevents linear classification with the smallest change to the vectors (LEACE, closed form).

    x' = x - W^+ P W (x - mean), where W is the inverse square root of the covariance (on the span of the vectors), Z
    the one-hot classes, and P the projection onto the columns of W cov(x, Z) (Belrose et al., NeurIPS 2023, theorem
    4.2). Raise `InputError` for fewer than two classes, and if the numbers of vectors and classes differ. Shapes: N
    vectors, D width, C classes, R rank of W cov(x, Z), which is the number of coordinates of the `Eraser`.
    """
    exact_ND = _read_vectors("class_eraser", vectors_ND)
    classes_N = torch.as_tensor(classes_N).to(exact_ND.device)
    if classes_N.shape != exact_ND.shape[:1]:
        shape = list(classes_N.shape)
        raise InputError(f"class_eraser: classes of shape {shape}; allowed: [{len(exact_ND)}], one for each vector")
    distinct_classes_C = classes_N.unique()
    if len(distinct_classes_C) < 2:
        raise InputError("class_eraser: all vectors have the same class; pass vectors of two or more classes")
    is_class_NC = classes_N[:, None] == distinct_classes_C
    onehot_NC = is_class_NC.to(exact_ND)  # Z
    centred_onehot_NC = onehot_NC - onehot_NC.mean(0)
    mean_D = exact_ND.mean(0)
    centred_ND = exact_ND - mean_D
    whitening_DD, unwhitening_DD = _compute_whitening(centred_ND)  # W and W^+, both symmetric
    covariance_DC = centred_ND.T @ centred_onehot_NC / len(classes_N)  # cov(x, Z)
    basis_DR = _compute_basis(whitening_DD @ covariance_DC)  # P = basis basis^T
    # The vectors are rows, so the erased component is (x - mean) W basis basis^T W^+.
    return Eraser(
        mean_D=mean_D,
        readout_DK=whitening_DD @ basis_DR,
        directions_KD=basis_DR.T @ unwhitening_DD,
    )


def _compute_basis(columns_DC: Tensor) -> Tensor:
    """Return an orthonormal basis `[D, R]` of the span of C columns of width D, whose sum must be 0; R is their rank.

    The basis vectors are M v / |M v|, where M are the columns and v are the eigenvectors of M'M, and |M v|^2 is the
    eigenvalue of v.
    """
    products_CC = columns_DC.T @ columns_DC
    sizes_C, vectors_CC = torch.linalg.eigh(products_CC)
    is_kept_C = sizes_C > sizes_C.max() * MIN_EIGENVALUE  # at least one eigenvalue is 0, because the columns sum to 0
    lengths_R = sizes_C[is_kept_C].sqrt()
    kept_vectors_CR = vectors_CC[:, is_kept_C]
    basis_DR: Tensor = columns_DC @ kept_vectors_CR / lengths_R
    return basis_DR


def remaining_eraser(vectors_ND: Tensor, eraser: Eraser, seed: int | None = None) -> Eraser:
    """Return a map that removes as much variance as `eraser`, but from the component that `eraser` preserves.

    The map erases orthogonal directions of this component: random directions or, if `seed` is None, the principal
    components in descending order. The last direction is erased in part to match the variance. If the total variance of
    all directions is smaller than the variance that `eraser` removes, all directions are erased. Shapes: N vectors, D
    width, R directions with variance in the preserved component.
    """
    if not isinstance(eraser, Eraser):
        raise InputError(f"remaining_eraser: eraser: got {type(eraser).__name__}; allowed: an `Eraser`")
    exact_ND = _read_vectors("remaining_eraser", vectors_ND)
    mean_D = eraser.mean_D.to(exact_ND)
    preserved_ND = eraser(exact_ND) - mean_D
    basis_DR = _find_directions(preserved_ND, seed)
    coordinates_NR = preserved_ND @ basis_DR
    variance_R = coordinates_NR.square().mean(0)
    erased_ND = exact_ND - mean_D - preserved_ND
    erased_variance = erased_ND.square().mean(0).sum()
    share_R = _distribute_variance(erased_variance, variance_R)
    # A coordinate multiplied by sqrt(share) has `share` times its variance. This multiple of each coordinate is erased.
    factor_R = share_R.sqrt()
    scaled_readout_DR = _read_preserved(eraser, basis_DR) * factor_R
    is_erased_R = factor_R > 0
    return Eraser(
        mean_D=mean_D,
        readout_DK=scaled_readout_DR[:, is_erased_R],
        directions_KD=basis_DR.T[is_erased_R],
    )


def _read_preserved(eraser: Eraser, basis_DR: Tensor) -> Tensor:
    """Return the matrix `[D, R]` that maps a centred vector to the coordinates of its preserved component in a basis.

    `eraser` preserves the component (x - mean) @ (I - readout @ directions) of a vector x. The returned matrix is
    therefore (I - readout @ directions) @ basis. Shapes: D width, K coordinates of `eraser`, R vectors of the basis.
    """
    readout_DK = eraser.readout_DK.to(basis_DR)
    directions_KD = eraser.directions_KD.to(basis_DR)
    erased_basis_KR = directions_KD @ basis_DR
    return basis_DR - readout_DK @ erased_basis_KR


def _find_directions(centred_ND: Tensor, seed: int | None) -> Tensor:
    """Return an orthonormal basis `[D, R]` of the span of centred vectors; R is the number of directions with variance.

    The basis vectors are random or, if `seed` is None, the principal components in descending order.
    """
    sizes_D, vectors_DD = _decompose_covariance(centred_ND)
    is_kept_D = sizes_D > sizes_D.max() * MIN_VARIANCE
    basis_DR = vectors_DD[:, is_kept_D].flip(-1)  # from ascending to descending order
    if seed is None:
        return basis_DR
    rotation_RR = _draw_rotation(basis_DR.shape[1], whole_number("remaining_eraser: seed", seed))
    return basis_DR @ rotation_RR.to(centred_ND)


def _distribute_variance(total: Tensor, variance_R: Tensor) -> Tensor:
    """Return the share `[R]` of each direction's variance that is erased; the erased variance sums to at most `total`.

    Directions are erased completely, one after another, until the remainder of `total` is smaller than the variance of
    the next direction. Of this direction, only the remainder is erased.
    """
    variance_before_R = variance_R.cumsum(0) - variance_R  # erased by the previous directions
    remainder_R = total - variance_before_R
    return (remainder_R / variance_R).clamp(0, 1)


def _draw_rotation(rank: int, seed: int) -> Tensor:
    """Return a random orthogonal matrix `[rank, rank]`."""
    generator = torch.Generator()
    generator.manual_seed(seed)
    random_RR = torch.randn(rank, rank, generator=generator, dtype=torch.float64)
    orthogonal_RR: Tensor
    orthogonal_RR, _ = torch.linalg.qr(random_RR)
    return orthogonal_RR


def _read_vectors(maker: str, vectors_ND: Any) -> Tensor:
    """Return the N vectors of width D that the public function `maker` received, in float64.

    Raise `InputError`, prefixed with `maker`, for a wrong shape, NaN or infinite numbers.
    """
    allowed = "a tensor `[vectors, width]`"
    if not isinstance(vectors_ND, Tensor):
        raise InputError(f"{maker}: vectors: got {type(vectors_ND).__name__}; allowed: {allowed}")
    if vectors_ND.ndim != 2 or not vectors_ND.numel():
        raise InputError(f"{maker}: vectors: {list(vectors_ND.shape)}; allowed: {allowed}")
    is_finite_N = vectors_ND.isfinite().all(-1)
    infinite_rows = (~is_finite_N).nonzero()
    if len(infinite_rows):
        problem = f"row {int(infinite_rows[0])} contains NaN or an infinite number"
        raise InputError(f"{maker}: vectors: {problem}; allowed: finite numbers")
    return _convert_to_float64(vectors_ND)


def _convert_to_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64 on its device, or on the CPU if the device does not support float64."""
    if tensor.device.type not in FLOAT64_DEVICES:
        tensor = tensor.cpu()
    return tensor.double()


def _decompose_covariance(centred_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues `[D]` of the covariance of centred vectors, in ascending order, and eigenvectors `[D, D]`.

    The eigenvectors are the columns of the matrix.
    """
    covariance_DD = centred_ND.T @ centred_ND / len(centred_ND)
    sizes_D, vectors_DD = torch.linalg.eigh(covariance_DD)
    return sizes_D, vectors_DD


def _compute_whitening(centred_ND: Tensor) -> tuple[Tensor, Tensor]:
    """Return W and its pseudo-inverse W^+ `[D, D]`, where W is the inverse square root of the covariance.

    Both are 0 in directions without variance.
    """
    sizes_D, vectors_DD = _decompose_covariance(centred_ND)
    is_kept_D = sizes_D > sizes_D.max() * MIN_VARIANCE
    roots_D = torch.where(is_kept_D, sizes_D, 1).sqrt()
    inverse_roots_D = torch.where(is_kept_D, 1 / roots_D, 0)
    kept_roots_D = torch.where(is_kept_D, roots_D, 0)
    whitening_DD = (vectors_DD * inverse_roots_D) @ vectors_DD.T
    unwhitening_DD = (vectors_DD * kept_roots_D) @ vectors_DD.T
    return whitening_DD, unwhitening_DD


@contextmanager
def edited_attention(
    network: PreTrainedModel, edit: Edit, preparation: AbstractContextManager[Any] | None = None
) -> Iterator[None]:
    """Apply `edit` to the self-attention of a network until the context ends.

    Edits of outer contexts are applied before `edit`. The context `preparation` is entered immediately, and exited when
    the last edit of the network ends.

    Layers are numbered by their position in the network, and decoder layers follow the encoder layers, even if only a
    part of the network runs. Raise `InputError` if `edit` selects a layer that the network does not have, or if another
    thread has an active edit. `InputError` is raised during the forward pass for heads, tokens and shapes that do not
    fit a layer.
    """
    _check_edit(edit)
    _check_layers(edit, network)

    def apply(layer: int, weights: Tensor, value: Tensor, first_query: int | None) -> tuple[Tensor, Tensor]:
        """Return the edited weights and values of one call of a layer's self-attention."""
        return _apply_edit(edit, EditedCall(layer, weights, value, first_query))

    with attached_edit(network, apply, preparation or nullcontext()):
        yield


def _check_layers(edit: Edit, network: PreTrainedModel) -> None:
    """Raise `InputError` if an edit of this module selects a layer that the network does not have."""
    if not isinstance(edit, LayerEdit | ChainedEdit):  # a function of the user, which does not state its layers
        return
    counts = layer_counts(network.base_model)  # the encoder's and the decoder's, or only one number
    layers = range(1, sum(counts) + 1)
    note = ""
    if len(counts) > 1:
        first_decoder_layer = counts[0] + 1
        note = f", the decoder's from {first_decoder_layer} on"
    edit.check_layers(layers, note)


def _describe_tensor(tensor: Tensor) -> str:
    """Return the shape, dtype and device of a tensor as text for a message."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{list(tensor.shape)} in {dtype} on {tensor.device}"

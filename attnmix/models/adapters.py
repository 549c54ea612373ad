"""Adapters of peft: low-rank changes of a model's Linears (LoRA), trained or read, and merged into the model's weights.

A merged model computes what the model with its adapter does, so every measure sees it as it acts (Hu et al., ICLR
2022).
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import PreTrainedModel

from attnmix.core.errors import InputError, first_line
from attnmix.core.terminal import without_library_messages
from attnmix.models.checkpoint import LOCAL
from attnmix.models.loading import POOLER, last_linear

AUTO_CLASSES = {"SEQ_CLS": "AutoModelForSequenceClassification", "FEATURE_EXTRACTION": "AutoModel"}
"""The kind of model by an adapter's `task_type`."""


def merge_adapter(name: str, adapter: Path, base: Path, output: Path) -> None:
    """Write the model in the folder `base` with the weights of the adapter in the folder `adapter` merged into it.

    `InputError`, which calls the adapter `name`, where the two do not fit each other.
    """
    import peft

    values = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    task = values.get("task_type")
    if task not in AUTO_CLASSES:
        raise InputError(f"model.name: {name} is an adapter for {task}; allowed: {', '.join(AUTO_CLASSES)}")
    options: dict[str, Any] = {"use_safetensors": True, "dtype": torch.float32, "ignore_mismatched_sizes": True} | LOCAL
    kind = getattr(transformers, AUTO_CLASSES[task])
    try:
        with without_library_messages():
            model = kind.from_pretrained(base, **options)
            if task == "SEQ_CLS" and (classes := _classes(adapter / "adapter_model.safetensors", model)):
                model = kind.from_pretrained(base, num_labels=classes, **options)
        with _few_warnings():
            merged = peft.PeftModel.from_pretrained(model, str(adapter), local_files_only=True).merge_and_unload()
    except (OSError, ValueError, TypeError, KeyError, RuntimeError, UserWarning) as error:
        raise InputError(f"model.name: the adapter {name} does not fit its base model: {first_line(error)}") from error
    merged.save_pretrained(output)


def _classes(file: Path, model: PreTrainedModel) -> int | None:
    """Return the number of classes of the head that the adapter holds; None where it holds none, or the model's."""
    name = f"base_model.model.{last_linear(model)[0]}.weight"
    with safe_open(file, "pt") as weights:
        classes = weights.get_slice(name).get_shape()[0] if name in weights.keys() else None  # noqa: SIM118  # has no `in`
    return None if classes == model.config.num_labels else classes


def with_lora(model: PreTrainedModel, rank: int, alpha: int, targets: list[str] | str) -> Any:
    """Return a classifier with new adapters on the Linears `targets`, its head trained whole.

    `InputError` where the model has no such Linears.
    """
    import peft

    base: Any = model.base_model
    children = dict(model.named_children())
    head = [name for name, module in children.items() if module is not base and list(module.parameters())]
    head += [POOLER] if hasattr(base, POOLER) else []
    options: dict[str, Any] = {"task_type": "SEQ_CLS", "r": rank, "lora_alpha": alpha, "modules_to_save": head}
    try:
        with _few_warnings():
            return peft.get_peft_model(model, peft.LoraConfig(target_modules=targets, exclude_modules=head, **options))
    except ValueError as error:
        linears = {path.rpartition(".")[2] for path, each in base.named_modules() if isinstance(each, torch.nn.Linear)}
        allowed = f"allowed: all-linear, or some of {', '.join(sorted(linears))}"
        raise InputError(f"finetune.lora.targets: {targets}: {first_line(error)}; {allowed}") from error


@contextmanager
def _few_warnings() -> Iterator[None]:
    """Leave out peft's warnings of what is as it should be; missing weights are an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # in transformers
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # GPT-2's Conv1D, which it sees
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        yield

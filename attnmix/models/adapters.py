"""peft adapters: low-rank updates of a model's Linears (LoRA), trained or loaded, and merged into the model's weights.

A merged model computes the same function as the model with its adapter (Hu et al., ICLR 2022), so the measures apply
to it without changes.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from transformers import PreTrainedModel

from attnmix.core.errors import InputError, first_line, in_one_line
from attnmix.core.extras import require_extra
from attnmix.models.loading import POOLER, last_linear, load_weights

LORA = "an adapter (LoRA)"
AUTO_CLASSES = {"SEQ_CLS": "AutoModelForSequenceClassification", "FEATURE_EXTRACTION": "AutoModel"}
"""Auto classes by an adapter's `task_type`."""


def check_adapter(name: str, values: Mapping[str, Any]) -> None:
    """Raise `InputError` if the adapter `name` with the configuration `values` cannot be merged."""
    require_extra("pipeline", LORA)
    import peft

    task = str(values.get("task_type"))
    kind = str(values.get("peft_type"))
    if task not in AUTO_CLASSES:
        raise InputError(f"model.name: {name} is an adapter for {task}; allowed: {', '.join(AUTO_CLASSES)}")
    configurations: dict[Any, Any] = dict(peft.PEFT_TYPE_TO_CONFIG_MAPPING)
    configuration = configurations.get(kind)
    if configuration is None or issubclass(configuration, peft.PromptLearningConfig):
        problem = f"{name} is an adapter of the type {kind}, which cannot be merged into the model's weights"
        raise InputError(f"model.name: {problem}; allowed: LORA and other types that peft can merge")


def merge_adapter(name: str, adapter: Path, base: Path, output: Path) -> None:
    """Write the model in the folder `base`, merged with the adapter in the folder `adapter`, to `output`.

    Head weights missing from both folders are not saved. Raise `InputError` if the adapter `name` does not match the
    base model.
    """
    require_extra("pipeline", LORA)
    import peft

    config_file = adapter / "adapter_config.json"
    values = json.loads(config_file.read_text(encoding="utf-8"))
    kind = getattr(transformers, AUTO_CLASSES[values["task_type"]])
    with safe_open(adapter / "adapter_model.safetensors", "pt") as weights:
        shapes = {weight: weights.get_slice(weight).get_shape() for weight in weights.keys()}  # noqa: SIM118  # has no `in`
    model, new = load_weights(kind, base)
    if values["task_type"] == "SEQ_CLS":
        classes = _read_number_of_classes(shapes, model)
        if classes:
            labels = {number: f"LABEL_{number}" for number in range(classes)}
            model, new = load_weights(kind, base, names=labels)
    problem = f"model.name: the adapter {name} does not fit its base model"
    try:
        with _suppress_warnings():
            adapted = peft.PeftModel.from_pretrained(model, str(adapter), local_files_only=True)
            read = set(peft.get_peft_model_state_dict(adapted))
            merged = adapted.merge_and_unload()
    except Exception as error:  # peft raises many exception types for mismatched weights
        raise InputError(f"{problem} ({in_one_line(error)})") from error
    unused = sorted(shapes.keys() - read)
    if unused:
        raise InputError(
            f"{problem}, which has no modules for {len(unused)} of the adapter's tensors, such as {unused[0]}"
        )
    supplied = {weight.removeprefix("base_model.model.") for weight in shapes}
    random = set(new) - supplied
    state = {weight: tensor for weight, tensor in merged.state_dict().items() if weight not in random}
    merged.save_pretrained(output, state_dict=state)


def _read_number_of_classes(shapes: Mapping[str, Sequence[int]], model: PreTrainedModel) -> int | None:
    """Return the number of classes of the adapter's head, or None if it is the model's or the adapter has no head."""
    name = f"base_model.model.{last_linear(model)[0]}.weight"
    classes = shapes[name][0] if name in shapes else None
    return None if classes == model.config.num_labels else classes


def with_lora(model: PreTrainedModel, rank: int, alpha: int, targets: list[str] | str) -> Any:
    """Return a classifier with new adapters on the Linears `targets` and a fully trainable head.

    Raise `InputError` if the model lacks these Linears.
    """
    require_extra("pipeline", LORA)
    import peft

    base: Any = model.base_model
    head = []
    for name, module in model.named_children():
        if module is not base and list(module.parameters()):
            head.append(name)
    if hasattr(base, POOLER):
        head.append(POOLER)
    options: dict[str, Any] = {"task_type": "SEQ_CLS", "r": rank, "lora_alpha": alpha, "modules_to_save": head}
    try:
        with _suppress_warnings():
            config = peft.LoraConfig(target_modules=targets, exclude_modules=head, **options)
            return peft.get_peft_model(model, config)
    except ValueError as error:
        linears = set()
        for path, module in base.named_modules():
            if isinstance(module, torch.nn.Linear):
                _, _, name = path.rpartition(".")
                linears.add(name)
        allowed = f"allowed: all-linear, or some of {', '.join(sorted(linears))}"
        raise InputError(f"finetune.lora.targets: {targets} ({first_line(error)}); {allowed}") from error


@contextmanager
def _suppress_warnings() -> Iterator[None]:
    """Suppress harmless peft warnings; turn the warning about missing weights into an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="`is_gradient_checkpointing` is deprecated"
        )  # a warning from transformers
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # peft detects GPT-2's Conv1D
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        yield

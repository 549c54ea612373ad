"""Functions that add LoRA adapters to a classifier, and functions that merge peft adapters into a model's weights.

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
"""The transformers auto class for each `task_type` of an adapter."""
PEFT_PREFIX = "base_model.model."
"""The prefix of weight names in the files of peft adapters, before the names in the transformers model."""


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

    Weights of the classification head are not saved if neither folder contains them. Raise `InputError` if the adapter
    `name` does not match the base model.
    """
    require_extra("pipeline", LORA)
    import peft

    shapes = _read_shapes(adapter / "adapter_model.safetensors")
    model, new_head_weights = _load_base_model(adapter, base, shapes)
    problem = f"model.name: the adapter {name} does not fit its base model"
    try:
        with _suppress_warnings():
            adapted = peft.PeftModel.from_pretrained(model, str(adapter), local_files_only=True)
            used = set(peft.get_peft_model_state_dict(adapted))
            merged = adapted.merge_and_unload()
    except Exception as error:  # peft raises many exception types for mismatched weights
        raise InputError(f"{problem} ({in_one_line(error)})") from error
    unused = sorted(shapes.keys() - used)
    if unused:
        raise InputError(
            f"{problem}, which has no modules for {len(unused)} of the adapter's tensors, such as {unused[0]}"
        )
    # Head weights that neither the base model nor the adapter contains still have their random initial values.
    in_adapter = {weight.removeprefix(PEFT_PREFIX) for weight in shapes}
    still_random = set(new_head_weights) - in_adapter
    state = {weight: tensor for weight, tensor in merged.state_dict().items() if weight not in still_random}
    merged.save_pretrained(output, state_dict=state)


def _read_shapes(file: Path) -> dict[str, Sequence[int]]:
    """Return the shape of each tensor in a safetensors file, by name."""
    with safe_open(file, "pt") as weights:
        # An object of `safe_open` cannot be iterated without `keys()`.
        return {weight: weights.get_slice(weight).get_shape() for weight in weights.keys()}  # noqa: SIM118


def _load_base_model(
    adapter: Path, base: Path, shapes: Mapping[str, Sequence[int]]
) -> tuple[PreTrainedModel, list[str]]:
    """Return the model in the folder `base`, and the names of its randomly initialised head weights.

    If the adapter contains a classification head, the model's head gets the same number of classes. `shapes` are the
    shapes of the adapter's tensors by name.
    """
    config_file = adapter / "adapter_config.json"
    task = json.loads(config_file.read_text(encoding="utf-8"))["task_type"]
    auto_class = getattr(transformers, AUTO_CLASSES[task])
    model, new_weights = load_weights(auto_class, base)
    if task == "SEQ_CLS":
        classes = _read_number_of_classes(shapes, model)
        if classes and classes != model.config.num_labels:
            labels = {number: f"LABEL_{number}" for number in range(classes)}
            model, new_weights = load_weights(auto_class, base, names=labels)
    return model, new_weights


def _read_number_of_classes(shapes: Mapping[str, Sequence[int]], model: PreTrainedModel) -> int | None:
    """Return the number of classes in the adapter's classification head, or None if the adapter has no head.

    `shapes` are the shapes of the adapter's tensors by name, and `model` is its base model.
    """
    head, _ = last_linear(model)
    name = f"{PEFT_PREFIX}{head}.weight"
    return shapes[name][0] if name in shapes else None  # the weight has a row for each class


def with_lora(model: PreTrainedModel, rank: int, alpha: int, targets: list[str] | str) -> Any:
    """Return the classifier `model` with new LoRA adapters and a fully trainable classification head.

    `targets` are the names of the `Linear` modules that receive adapters, or "all-linear". Raise `InputError` for
    unknown names.
    """
    require_extra("pipeline", LORA)
    import peft

    head = _list_head_modules(model)
    options: dict[str, Any] = {"task_type": "SEQ_CLS", "r": rank, "lora_alpha": alpha, "modules_to_save": head}
    try:
        with _suppress_warnings():
            config = peft.LoraConfig(target_modules=targets, exclude_modules=head, **options)
            return peft.get_peft_model(model, config)
    except ValueError as error:
        linears = _list_linears(model.base_model)
        allowed = f"allowed: all-linear, or some of {', '.join(linears)}"
        raise InputError(f"finetune.lora.targets: {targets} ({first_line(error)}); {allowed}") from error


def _list_head_modules(model: PreTrainedModel) -> list[str]:
    """Return the names of the modules of a classifier's head, which includes the pooler of the base model."""
    base: Any = model.base_model
    names = []
    for name, module in model.named_children():
        if module is not base and list(module.parameters()):
            names.append(name)
    if hasattr(base, POOLER):
        names.append(POOLER)
    return names


def _list_linears(base: Any) -> list[str]:
    """Return the sorted names of the `Linear` modules in a base model, without the paths of their parent modules."""
    names = set()
    for path, module in base.named_modules():
        if isinstance(module, torch.nn.Linear):
            _, _, name = path.rpartition(".")
            names.add(name)
    return sorted(names)


@contextmanager
def _suppress_warnings() -> Iterator[None]:
    """Suppress harmless warnings of peft, but turn its warning about missing weights into an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="`is_gradient_checkpointing` is deprecated"
        )  # a warning from transformers
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # peft detects GPT-2's Conv1D
        warnings.filterwarnings("error", message=".*missing adapter keys.*")
        yield

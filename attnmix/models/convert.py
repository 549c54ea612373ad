"""Convert a classifier's state dict, `torch.save(model.state_dict(), ...)`, to a model folder without running any code.

    python -m attnmix.models.convert trained.pth --like bert-base-uncased --to trained --classes negative positive

The classifier is a transformers classifier, or a module that contains a transformers model and one Linear layer. This
layer must have the same input as the last Linear layer of the transformers classifier (for BERT, the pooled vector of
[CLS]). The file can also be a training checkpoint that contains a state dict, such as
`{"epoch": 3, "model_state_dict": ...}` or a checkpoint of Lightning. `--like` is the hub identifier or the folder of a
model of the same architecture.
"""

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from attnmix.core.disk import check_new_folder
from attnmix.core.errors import InputError, first_line, in_one_line
from attnmix.core.terminal import printable
from attnmix.models.loading import class_labels, last_linear

BUFFERS = ("position_ids", "token_type_ids")  # not weights, but saved by older versions of transformers
STATE_KEYS = ("state_dict", "model_state_dict", "model")
"""Keys under which a training checkpoint stores the state dict; Lightning uses the first key."""


def convert(file: Path, like: str, folder: Path, classes: list[str]) -> None:
    """Write the classifier in `file` to the new model folder `folder`.

    `like` is the hub identifier or the folder of a model of the same architecture; `classes` are the class names in
    the order of their indices. Raise `InputError` unless `file` contains a classifier that matches `like`.
    """
    check_new_folder("--to", folder)
    state = _load_state_dict(file)
    labels = class_labels(dict(enumerate(classes)))
    try:
        config = AutoConfig.from_pretrained(like, **labels, trust_remote_code=False)
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(like, trust_remote_code=False)
    except Exception as error:  # transformers raises many exception types for unreadable models
        raise InputError(f"--like: {like} cannot be loaded ({in_one_line(error)})") from error
    try:
        model.load_state_dict(_rename_tensors(state, model))
    except RuntimeError as error:
        problem = " ".join(str(error).split())
        raise InputError(f"{file} does not fit --like ({problem[:300]})") from error
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


def _load_state_dict(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in `file` by name; raise `InputError` if the file contains no usable state dict."""
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
        return _find_state_dict(loaded)
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError) as error:
        # Only the messages of `_find_state_dict` are written for users.
        problem = str(error) if type(error) is ValueError else type(error).__name__
        allowed = "a state dict of tensors, or a checkpoint of plain values that contains one"
        raise InputError(f"{file}: {problem}; allowed: {allowed}") from error


def _rename_tensors(state: Mapping[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, renamed to match the transformers classifier `model`."""
    new_prefixes = _map_prefixes(state, model)
    renamed = {}
    for name, tensor in state.items():
        prefixes_of_name = [prefix for prefix in new_prefixes if name.startswith(prefix)]
        longest = max(prefixes_of_name, key=len)  # at least the empty prefix, which is always mapped
        new_name = new_prefixes[longest] + name.removeprefix(longest)
        renamed[new_name] = tensor
    return renamed


def _map_prefixes(state: Mapping[str, torch.Tensor], model: Any) -> dict[str, str]:
    """Return the prefixes of names in a state dict, each with its replacement in the transformers classifier `model`.

    In the state dict, the base model can have any prefix, and the classification head can be a Linear of any name.
    """
    new_base_prefix = f"{model.base_model_prefix}."  # such as "bert."
    base_prefix = _find_base_prefix(state, model, new_base_prefix)
    # A wrapper such as DataParallel also adds its prefix, such as "module.", to tensors outside the base model.
    wrapper_prefix = base_prefix.removesuffix(new_base_prefix)
    new_prefixes = {"": ""}
    new_prefixes[wrapper_prefix] = ""
    new_prefixes[base_prefix] = new_base_prefix
    # If there is only one module outside the base model, it is the last Linear of the classification head.
    modules_outside_base = {name.rpartition(".")[0] for name in state if not name.startswith(base_prefix)}
    if len(modules_outside_base) == 1:
        (head,) = modules_outside_base
        linear, _ = last_linear(model)
        new_prefixes[f"{head}."] = f"{linear}."
    return new_prefixes


def _find_base_prefix(state: Mapping[str, torch.Tensor], model: Any, new_base_prefix: str) -> str:
    """Return the prefix of the base model's tensors in a state dict, such as "module.bert.".

    `new_base_prefix` is their prefix in `model`. The prefix is found from the first tensor of the base model; if the
    state dict lacks this tensor, return `new_base_prefix`.
    """
    base_names = [name for name in model.state_dict() if name.startswith(new_base_prefix)]
    first_name = base_names[0].removeprefix(new_base_prefix)
    prefixes = [name.removesuffix(first_name) for name in state if name.endswith(first_name)]
    return prefixes[0] if prefixes else new_base_prefix


def _find_state_dict(loaded: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict by name, without buffers.

    `loaded` is a state dict, or a dictionary that contains a state dict: under one of `STATE_KEYS`, or under any other
    key if it is the only one. Otherwise, raise `ValueError`.
    """
    states = {}
    if isinstance(loaded, Mapping):
        candidates = {"": loaded, **loaded}  # the empty key is for a state dict that is not nested
        states = {key: value for key, value in candidates.items() if _contains_tensors(value)}
    usual_keys = [key for key in ("", *STATE_KEYS) if key in states]
    if usual_keys:
        state = states[usual_keys[0]]
    elif len(states) == 1:
        (state,) = states.values()
    else:
        keys = ", ".join(map(str, states)) or "none"
        raise ValueError(f"it contains {len(states)} state dicts ({keys})")
    return {name: tensor for name, tensor in state.items() if not name.endswith(BUFFERS)}


def _contains_tensors(value: Any) -> bool:
    """Return True for a dictionary of tensors by name."""
    if not isinstance(value, Mapping) or not value:
        return False
    has_names = all(isinstance(name, str) for name in value)
    has_tensors = all(isinstance(tensor, torch.Tensor) for tensor in value.values())
    return has_names and has_tensors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("state", type=Path, help="the file that torch.save wrote")
    parser.add_argument(
        "--like", required=True, help="the hub identifier or folder of a model of the same architecture"
    )
    parser.add_argument("--to", type=Path, required=True, help="the new folder")
    parser.add_argument("--classes", nargs="+", required=True, help="the class names in the order of their indices")
    options = parser.parse_args()
    try:
        convert(options.state, options.like, options.to, options.classes)
    except (InputError, OSError) as error:
        parser.exit(1, f"error: {printable(first_line(error))}\n")

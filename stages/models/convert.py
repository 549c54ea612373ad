"""Make a model folder of a classifier's state dict, as `torch.save(model.state_dict(), ...)` leaves it.

    python -m stages.models.convert trained.pth --like bert-base-uncased --to trained --classes negative positive
    dvc exp run -S model.name=trained -S model.base=bert-base-uncased -S finetune.epochs=0

The state dict is one of the library's sequence classifier, or of a module of one's own that holds the library's model
and a Linear on what the library's classifier reads: for BERT the pooled vector of [CLS]. Tensors are read, no code is
run. Configuration and tokenizer are those of `--like`: a hub identifier, a folder, or package://<package>/<folder>.
"""

from __future__ import annotations

import argparse
import pickle
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from stages.errors import InputError
from stages.models.fetching import fetch_model
from stages.models.loading import LOCAL, load_classifier
from stages.models.trained import last_linear
from stages.parameters import ModelParameters

State = dict[str, torch.Tensor]

BUFFERS = ("position_ids", "token_type_ids")
"""Of older versions of the library: numbers that are counted, no weights."""


def main(arguments: list[str] | None = None) -> None:
    options = _options(arguments)
    try:
        convert(
            options.state, ModelParameters(name=options.like, revision=options.revision), options.to, options.classes
        )
    except InputError as error:
        sys.exit(f"error: {error}")
    print(f"wrote {options.to}; take it with model.name: {options.to} and finetune.epochs: 0")


def convert(file: Path, like: ModelParameters, folder: Path, classes: list[str] | None = None) -> None:
    """Write the checkpoint `folder`; `InputError` where the state dict is not that of a classifier like `like`.

    `classes`: their names by number; else LABEL_0 and so on.
    """
    if folder.exists():
        raise InputError(f"--to: {folder} is there already; name another folder, or remove it")
    state = read_state(file)
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / "like"
        try:
            fetch_model(like, made)
        except InputError as error:
            raise InputError(str(error).replace("model.name", "--like", 1)) from error
        model = _classifier(file, state, made, classes)
        for weights in made.glob("*.safetensors*"):
            weights.unlink()
        model.save_pretrained(made)
        load_classifier(made, trained=True)
        shutil.copytree(made, folder)


def read_state(file: Path) -> State:
    """The tensors in `file` by name, without what wrappers for several GPUs put before each."""
    try:
        state: Any = torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        code = re.search(r"GLOBAL (\S+)", str(error))
        why = f"it holds code ({code[1].rstrip('.,')}), which is not run" if code else "torch.save did not write it"
        raise InputError(f"{file}: {why}; allowed: what torch.save wrote of model.state_dict()") from error
    except (OSError, EOFError, RuntimeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"{file} cannot be read: {reason}") from error
    if not isinstance(state, dict) or not state or not all(isinstance(each, torch.Tensor) for each in state.values()):
        held = ", ".join(map(str, list(state)[:5])) if isinstance(state, dict) else type(state).__name__
        raise InputError(f"{file} holds no state dict, tensors by name, but {held}; save model.state_dict() alone")
    if all(name.startswith("module.") for name in state):
        state = {name.removeprefix("module."): each for name, each in state.items()}
    return {name: each for name, each in state.items() if name.rpartition(".")[2] not in BUFFERS}


def _classifier(file: Path, state: State, like: Path, classes: list[str] | None) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(like, **LOCAL)
    with torch.device("meta"):
        empty = AutoModelForSequenceClassification.from_config(config)
    state = _renamed(state, empty)
    last = f"{last_linear(empty)[0]}.weight"
    number = state[last].shape[0] if last in state else config.num_labels
    if classes and len(classes) != number:
        raise InputError(f"--classes: {len(classes)} names, and {file} tells {number} classes; one name for each")
    names = dict(enumerate(classes or [f"LABEL_{label}" for label in range(number)]))
    config = AutoConfig.from_pretrained(
        like, id2label=names, label2id={name: label for label, name in names.items()}, **LOCAL
    )
    model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    wanted = model.state_dict()
    for what, found in (
        ("lacks", sorted(wanted.keys() - state.keys())),
        ("has, and the model has not,", sorted(state.keys() - wanted.keys())),
        (
            "has in another shape",
            sorted(name for name in wanted if name in state and state[name].shape != wanted[name].shape),
        ),
    ):
        if found:
            raise InputError(
                f"{file} is not the state of a {type(model).__name__} like --like: it {what} {len(found)} of its "
                f"tensors ({', '.join(found[:3])}{', ...' * (len(found) > 3)})"
            )
    model.load_state_dict(state)
    return model


def _renamed(state: State, model: PreTrainedModel) -> State:
    """By the names of `model`: the library's part is found by its first weight, and a lone Linear is the head."""
    prefix = f"{model.base_model_prefix}."
    first = next(name for name in model.state_dict() if name.startswith(prefix)).removeprefix(prefix)
    held = next((name.removesuffix(first) for name in state if name == first or name.endswith(f".{first}")), prefix)
    renamed = {prefix + name.removeprefix(held): each for name, each in state.items() if name.startswith(held)}
    head = {name: each for name, each in state.items() if not name.startswith(held)}
    linears = {name.rpartition(".")[0] for name in head}
    last, _ = last_linear(model)
    if len(linears) == 1 and not head.keys() & model.state_dict().keys():
        head = {f"{last}.{name.rpartition('.')[2]}": each for name, each in head.items()}
    return renamed | head


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="stages.models.convert", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("state", type=Path, help="the file that torch.save wrote")
    parser.add_argument("--like", required=True, help="a model of the same architecture, as in model.name")
    parser.add_argument("--revision", help="commit, branch or tag of --like on the hub")
    parser.add_argument("--to", type=Path, required=True, help="the folder to make")
    parser.add_argument("--classes", nargs="+", help="the classes' names, in the order of their numbers")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()

"""Load a checkpoint folder, as an encoder or as a classifier: safetensors only, no remote code."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn import Linear
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from attnmix.core.errors import InputError, first_line
from attnmix.models.attention import OBSERVED
from attnmix.store.files import made

LOCAL = {"local_files_only": True, "trust_remote_code": False}
POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert")
"""Families that number positions from the padding token's id + 1."""
POOLER = "pooler"  # belongs to the head: a checkpoint without one gets a new one, to be trained
SINGLE_LABEL = "single_label_classification"
"""The `problem_type` of a model that chooses one class."""


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return the checkpoint's fast tokenizer, which truncates and pads on the right.

    The name of a special token in a text is text. Raises `InputError` where there is no such tokenizer.
    """
    made(folder, _stage_of(folder))
    sides = {"padding_side": "right", "truncation_side": "right"}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, split_special_tokens=True, **sides, **LOCAL)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: no usable tokenizer: {first_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InputError(f"{folder}: its tokenizer has no fast version (tokenizer.json), which is needed")
    # Classifiers read the last token that is no padding, so the padding token must not end a text.
    ends = tokenizer("a")["input_ids"][-1:]
    for token in (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token):
        if token is not None and tokenizer.convert_tokens_to_ids(token) not in ends:
            tokenizer.pad_token = str(token)
            return tokenizer
    raise InputError(f"{folder}: its tokenizer has no special token to pad with: a pad, eos or bos that ends no text")


def load_base(folder: Path) -> PreTrainedModel:
    """Return the checkpoint without any head, its attention observable (`attnmix.models.attention`)."""
    return _load(AutoModel, folder, attn_implementation=OBSERVED)[0]


def load_classifier(folder: Path, trained: bool = False, **options: Any) -> PreTrainedModel:
    """Return the checkpoint as a sequence classifier; a missing head is made anew, from torch's seed.

    `options` go to `from_pretrained` (`attn_implementation`; `id2label`, the classes: a head for another number of
    them is made anew too). Raises `InputError` for a model that cannot classify, and with `trained` for a missing head.
    """
    config = load_config(folder)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise InputError(
            f"model.name: {folder} holds a model of the family {config.model_type!r}, which cannot classify texts; "
            "allowed: a family that has a sequence classifier in transformers"
        )
    model, new = _load(AutoModelForSequenceClassification, folder, **options)
    if trained and new:
        raise InputError(
            f"model.name: {folder} has no trained classification head ({_shortened(new)} are not in its weights); "
            "allowed: a model that classifies, or finetune.epochs of 1 or more"
        )
    if "id2label" in options and new:
        logging.info("a new classification head is trained: %s", ", ".join(new))
    padding, rows = load_tokenizer(folder).pad_token_id, model.get_input_embeddings().num_embeddings
    if padding >= rows:
        raise InputError(f"{folder}: its tokenizer pads with token {padding}, but its embedding has only {rows} rows")
    if config.model_type not in POSITIONS_AFTER_PADDING:
        model.config.pad_token_id = padding
    return model


def load_trained(folder: Path, names: Mapping[Any, str]) -> PreTrainedModel:
    """Return the checkpoint's own classifier, its classes in the order of the data's: `names` by number.

    Classes are matched by name, whatever the case, else by their order, with a warning. Raises `InputError` where the
    checkpoint has no trained head, another number of classes, or does not choose one class.
    """
    model = load_classifier(folder, trained=True)
    own = {int(number): str(name) for number, name in (model.config.id2label or {}).items()}
    if len(own) != len(names) or model.config.problem_type not in (None, SINGLE_LABEL):
        kind = model.config.problem_type or SINGLE_LABEL
        raise InputError(
            f"model.name: {folder} is made for {kind} with {len(own)} classes ({_shortened(list(own.values()))}); "
            f"allowed without fine-tuning: one of {len(names)} classes ({_shortened(list(names.values()))})"
        )
    numbers = {name.casefold(): number for number, name in own.items()}
    wanted = [names[number].casefold() for number in sorted(names)]
    if numbers.keys() == set(wanted):
        order = [numbers[name] for name in wanted]
    else:
        order = list(own)
        logging.warning(
            "the model's classes are taken in their order, as their names are not the data's: %s",
            ", ".join(f"{own[number]} for {names[number]}" for number in order),
        )
    if order != list(own):
        with torch.no_grad():
            for parameter in last_linear(model)[1].parameters():
                parameter.copy_(parameter[order])
    model.config.id2label = dict(names)
    model.config.label2id = {name: label for label, name in names.items()}
    return model


def last_linear(model: PreTrainedModel) -> tuple[str, Linear]:
    """Return the head's last Linear, which has a row for each class, and its name."""
    encoder = set(model.base_model.modules())
    linears = [(name, each) for name, each in model.named_modules() if isinstance(each, Linear) and each not in encoder]
    return linears[-1]


def _load(kind: Any, folder: Path, **options: Any) -> tuple[PreTrainedModel, list[str]]:
    """Return the model in float32 and eval mode, and the names of the head's weights that are new.

    Raises `InputError` where the encoder's weights are missing or of another shape: they would be random ones.
    """
    settings = {"use_safetensors": True, "dtype": torch.float32, "output_loading_info": True} | LOCAL | options
    try:
        # Without `ignore_mismatched_sizes` the library's error names no weight.
        loaded: tuple[PreTrainedModel, dict[str, Any]] = kind.from_pretrained(
            folder, ignore_mismatched_sizes=True, **settings
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{folder}: the model cannot be loaded: {first_line(error)}") from error
    model, info = loaded
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    mismatched = {name: (list(stored), list(wanted)) for name, stored, wanted in sorted(info["mismatched_keys"])}
    for name, (stored, wanted) in mismatched.items():
        if name.startswith(prefix) or "id2label" not in options:
            raise InputError(
                f"{folder}: the model cannot be loaded: {name} has the shape {stored}, config.json asks for {wanted}"
            )
    missing = sorted(name for name in info["missing_keys"] if name.startswith(prefix) and POOLER not in name)
    if missing:
        raise InputError(
            f"{folder}: its weights lack {len(missing)} tensors of the model that config.json describes "
            f"({_shortened(missing)})"
        )
    model.config.use_cache = False
    model.eval()
    return model, sorted({*info["missing_keys"], *mismatched})


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:3]) + ", ..." * (len(names) > 3)


def _stage_of(folder: Path) -> str:
    return "finetune" if folder.name == "finetuned" else "download"


def load_config(folder: Path) -> PreTrainedConfig:
    """Return the checkpoint's `config.json`; without one the library would ask the hub for it."""
    made(folder / "config.json", _stage_of(folder))
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, **LOCAL)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: no usable config.json: {first_line(error)}") from error
    return config


def longest_text(folder: Path) -> int | None:
    """Return how many tokens, special ones counted, the model's positions reach; `None` where nothing limits them."""
    config = load_config(folder)
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is not None and config.model_type in POSITIONS_AFTER_PADDING:
        return positions - int(config.pad_token_id) - 1
    return positions


def check_max_length(key: str, max_length: int, folder: Path) -> None:
    """Raise `InputError` where the parameter `key` asks for longer texts than the model takes."""
    limit = longest_text(folder)
    if limit is not None and max_length > limit:
        raise InputError(f"{key}: {max_length} is more than the {limit} tokens that this model takes")

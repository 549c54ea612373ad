"""Load a checkpoint folder: safetensors only, no remote code, one clear error otherwise."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
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


POOLER = "pooler"  # part of the head in what it is for: a checkpoint without one gets a new one, to be trained


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The checkpoint's fast tokenizer: it cuts and pads on the right, and a special token's name in a text is text."""
    sides = {"padding_side": "right", "truncation_side": "right"}
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, split_special_tokens=True, **sides, **LOCAL)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: no usable tokenizer: {first_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InputError(f"{folder}: its tokenizer has no fast version (tokenizer.json), which is needed")
    tokenizer.pad_token = _padding_token(tokenizer, folder)
    return tokenizer


def _padding_token(tokenizer: PreTrainedTokenizerFast, folder: Path) -> str:
    """Its own, else another special token that does not end a text: classifiers read the last that is no padding."""
    last = tokenizer("a")["input_ids"][-1:]
    for token in (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token):
        if token is not None and tokenizer.convert_tokens_to_ids(token) not in last:
            return str(token)
    raise InputError(f"{folder}: its tokenizer has no special token to pad with: a pad, eos or bos that ends no text")


def load_classifier(folder: Path, trained: bool = False, **options: Any) -> PreTrainedModel:
    """The checkpoint as a sequence classifier; one without a classification head gets a new one, from torch's seed.

    `trained`: `InputError` instead. `options` go to `from_pretrained` (`attn_implementation`, `id2label`: the classes,
    for which a head that tells another number of them is replaced too).
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
            f"model.name: {folder} has no trained classification head ({', '.join(new[:3])}{', ...' * (len(new) > 3)} "
            "are not in its weights); allowed: a model that classifies, or finetune.epochs of 1 or more"
        )
    if "id2label" in options and new:
        logging.info("a new classification head is trained: %s", ", ".join(new))
    padding, rows = load_tokenizer(folder).pad_token_id, model.get_input_embeddings().num_embeddings
    if padding >= rows:
        raise InputError(f"{folder}: its tokenizer pads with token {padding}, but its embedding has only {rows} rows")
    if config.model_type not in POSITIONS_AFTER_PADDING:
        model.config.pad_token_id = padding
    return model


def load_base(folder: Path) -> PreTrainedModel:
    """The checkpoint without any head, its attention to be looked into (`attnmix.models.attention`)."""
    return _load(AutoModel, folder, attn_implementation=OBSERVED)[0]


def _load(kind: Any, folder: Path, **options: Any) -> tuple[PreTrainedModel, list[str]]:
    """In float32 and eval mode, and the names of a head's weights that are new.

    `InputError` where weights of the encoder are missing or of another shape, which would be random ones.
    """
    settings = {"use_safetensors": True, "dtype": torch.float32, "output_loading_info": True} | LOCAL | options
    try:
        # Which do not fit is said below; the library names none.
        loaded: tuple[PreTrainedModel, dict[str, Any]] = kind.from_pretrained(
            folder, ignore_mismatched_sizes=True, **settings
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(f"{folder}: the model cannot be loaded: {first_line(error)}") from error
    model, info = loaded
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    unfit = {name: (list(there), list(wanted)) for name, there, wanted in sorted(info["mismatched_keys"])}
    for name, (there, wanted) in unfit.items():
        if name.startswith(prefix) or "id2label" not in options:
            raise InputError(
                f"{folder}: the model cannot be loaded: {name} has the shape {there}, config.json asks for {wanted}"
            )
    missing = sorted(name for name in info["missing_keys"] if name.startswith(prefix) and POOLER not in name)
    if missing:
        raise InputError(
            f"{folder}: its weights lack {len(missing)} tensors of the model that config.json describes "
            f"({', '.join(missing[:3])}{', ...' * (len(missing) > 3)})"
        )
    model.config.use_cache = False
    model.eval()
    return model, sorted({*info["missing_keys"], *unfit})


def load_config(folder: Path) -> PreTrainedConfig:
    """Return the checkpoint's `config.json`; without one the library would ask the hub for it."""
    made(folder / "config.json", "finetune" if folder.name == "finetuned" else "download")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, **LOCAL)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: no usable config.json: {first_line(error)}") from error
    return config


def longest_text(folder: Path) -> int | None:
    """Tokens, special ones counted, that the model's positions reach; `None` where nothing limits them."""
    config = load_config(folder)
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if positions is not None and config.model_type in POSITIONS_AFTER_PADDING:
        return positions - int(config.pad_token_id) - 1
    return positions


def check_max_length(key: str, max_length: int, folder: Path) -> None:
    """`InputError` where the parameter `key` asks for longer texts than the model takes."""
    limit = longest_text(folder)
    if limit is not None and max_length > limit:
        raise InputError(f"{key}: {max_length} is more than the {limit} tokens that this model takes")

"""Load a checkpoint folder: safetensors only, no remote code, one clear error otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from stages.errors import InputError
from stages.models.attention import OBSERVED


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The checkpoint's fast tokenizer."""
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: no usable tokenizer: {error}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InputError(f"{folder}: its tokenizer has no fast version (tokenizer.json), which is needed")
    return tokenizer


def load_classifier(folder: Path, **options: Any) -> PreTrainedModel:
    """The checkpoint as a sequence classifier; one without a classification head gets a new one, from torch's seed.

    `options` go to `from_pretrained` (`num_labels`, `attn_implementation`).
    """
    return _load(AutoModelForSequenceClassification, folder, **options)


def load_base(folder: Path) -> PreTrainedModel:
    """The checkpoint without any head, its attention to be looked into (`stages.models.attention`)."""
    return _load(AutoModel, folder, attn_implementation=OBSERVED)


def _load(kind: Any, folder: Path, **options: Any) -> PreTrainedModel:
    """In float32 and eval mode."""
    known = {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True, "dtype": torch.float32}
    try:
        model: PreTrainedModel = kind.from_pretrained(folder, **known, **options)
    except (OSError, ValueError) as error:
        raise InputError(f"{folder}: the model cannot be loaded: {error}") from error
    model.config.use_cache = False
    model.eval()
    return model


def longest_text(folder: Path) -> int:
    """Tokens, special ones counted, that the model's position embeddings reach."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    positions = int(config.max_position_embeddings)
    # RoBERTa numbers positions from padding_idx + 1.
    return positions - config.pad_token_id - 1 if config.model_type in ("roberta", "xlm-roberta") else positions


def check_max_length(key: str, max_length: int, folder: Path) -> None:
    """`InputError` where the parameter `key` asks for longer texts than the model takes."""
    limit = longest_text(folder)
    if max_length > limit:
        raise InputError(f"{key}: {max_length} is more than the {limit} tokens that this model takes")

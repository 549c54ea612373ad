"""Functions that load and check the configuration and the tokenizer of a checkpoint, without importing model code."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import transformers
from tokenizers import Regex, pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

from attnmix.core.errors import InputError, in_one_line
from attnmix.core.store.files import require_output
from attnmix.core.terminal import without_library_messages

LOCAL = {"local_files_only": True, "trust_remote_code": False}
POSITIONS_AFTER_PADDING = ("roberta", "xlm-roberta", "camembert", "mpnet", "data2vec-text")
"""Families with position indices that start at the padding token's ID + 1."""

NEUTRAL_VALUES: dict[str, Any] = {
    "_output_attentions": False,  # the setter of `output_attentions` raises an error for some implementations
    "output_hidden_states": False,
    "return_dict": True,
    "use_cache": False,
    "torchscript": False,
    "chunk_size_feed_forward": 0,
    "gradient_checkpointing": False,
}
"""Configuration keys for optional outputs and chunked computation, with the values that the measures require. These
values do not change results."""


def load_config(folder: Path) -> PreTrainedConfig:
    """Return the configuration in the checkpoint's `config.json`, with the values that the measures require.

    These values (`NEUTRAL_VALUES`) disable optional outputs and chunked computation, and do not change results. Raise
    `InputError` if the file is missing or cannot be loaded.
    """
    require_output(folder / "config.json", _name_stage(folder))
    try:
        with without_library_messages():
            config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
        set_values(config, NEUTRAL_VALUES)
        config._attn_implementation = None  # selected when the model is loaded
    except Exception as error:  # transformers raises many exception types for invalid values
        raise InputError(f"{folder}: config.json cannot be loaded ({in_one_line(error)})") from error
    return config


def set_values(holder: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Update existing attributes of `holder` to `values`; return the previous values of changed attributes."""
    before = {key: getattr(holder, key) for key in values if hasattr(holder, key)}
    changed = {key: value for key, value in before.items() if value != values[key]}
    for key in changed:
        setattr(holder, key, values[key])
    return changed


def _name_stage(folder: Path) -> str:
    """Return the name of the pipeline stage that writes the checkpoint in `folder`."""
    return "finetune" if folder.name == "finetuned" else "download"


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return the checkpoint's fast tokenizer, with truncation and padding on the right.

    Names of special tokens within a text are treated as ordinary text. Raise `InputError` if there is no usable fast
    tokenizer.
    """
    require_output(folder, _name_stage(folder))
    options = {"padding_side": "right", "truncation_side": "right", "split_special_tokens": True} | LOCAL
    try:
        with without_library_messages():
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **options)
        tokenizer("a")
    except Exception as error:  # exception types differ by tokenizer, and include those for missing packages
        raise InputError(f"{folder}: the tokenizer cannot be loaded ({in_one_line(error)})") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InputError(f"{folder}: a fast tokenizer (tokenizer.json) is required")
    _split_special_names(tokenizer)
    tokenizer.pad_token = padding_token(str(folder), tokenizer)
    return tokenizer


def padding_token(name: str, tokenizer: Any) -> str:
    """Return the special token for padding; raise `InputError` if the tokenizer of the model `name` lacks one.

    Some classifiers read the last token that is not padding, so the padding token must not end a text.
    """
    last_ids = tokenizer("a")["input_ids"][-1:]  # the token at the end of a text
    for token in (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token):
        if token is not None and tokenizer.convert_tokens_to_ids(token) not in last_ids:
            return str(token)
    raise InputError(
        f"{name}: its tokenizer has no special token for padding; define a pad token that does not end texts"
    )


def _split_special_names(tokenizer: PreTrainedTokenizerFast) -> None:
    """Change the tokenizer so that names of special tokens within a text are not encoded as special tokens.

    `split_special_tokens` only disables the search for special tokens. The vocabulary of a unigram model also contains
    the names of special tokens, so "</s>" within a text would become the end token. Splitting such a name after its
    first character prevents this.
    """
    names = _list_whole_special_names(tokenizer)
    if names:
        backend = tokenizer.backend_tokenizer
        # Each pattern matches the first character of a name, if the rest of the name follows.
        patterns = [f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in names]
        split = pre_tokenizers.Split(Regex("|".join(patterns)), "isolated")
        steps = [step for step in (backend.pre_tokenizer, split) if step]
        backend.pre_tokenizer = pre_tokenizers.Sequence(steps)


def _list_whole_special_names(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the names of special tokens that are encoded as special tokens if they occur in a text."""
    special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    encodings = tokenizer(list(special), add_special_tokens=False).encodings or []
    names = []
    for (name, number), encoding in zip(special.items(), encodings, strict=True):
        whole_name = (0, len(name))  # the start and end of a token that is the whole name
        tokens = list(zip(encoding.ids, encoding.offsets, strict=True))
        if (number, whole_name) in tokens:
            names.append(name)
    return names


def longest_text(config: Any) -> int | None:
    """Return the maximum number of tokens per text, including special tokens; None if there is no limit.

    Rotary position embeddings of the type `longrope` use different frequencies if the longest text of a batch exceeds
    the original maximum length. Texts above this length are not supported, because they would change the results of the
    other texts in their batch.
    """
    positions: int | None = getattr(config, "max_position_embeddings", None)
    if not positions:
        return None
    if config.model_type in POSITIONS_AFTER_PADDING:
        # The first token has the position index `pad_token_id` + 1, so lower indices are not available for tokens.
        return positions - (int(config.pad_token_id) + 1)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return min(positions, int(rope["original_max_position_embeddings"]))
    return positions


def check_max_length(key: str, max_length: int, folder: Path) -> None:
    """Raise `InputError` if `max_length`, set by `key`, exceeds the maximum text length of a checkpoint."""
    check_length(key, max_length, load_config(folder))


def check_length(key: str, max_length: int, config: Any) -> None:
    """Raise `InputError` if `max_length`, set by `key`, exceeds the maximum text length of a configuration."""
    limit = longest_text(config) or max_length
    if max_length > limit:
        raise InputError(f"{key}: {max_length} exceeds the {limit} tokens that this model supports")

"""Read a checkpoint folder's configuration and tokenizer, for which no model's code is loaded."""

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
"""Families that number positions from the padding token's id + 1."""

NEUTRAL_VALUES: dict[str, Any] = {
    "_output_attentions": False,  # `output_attentions`, whose setter refuses what another key says
    "output_hidden_states": False,
    "return_dict": True,
    "use_cache": False,
    "torchscript": False,
    "chunk_size_feed_forward": 0,
    "gradient_checkpointing": False,
}
"""Extra outputs of a model, and the pieces in which it computes: keys of a configuration that change no
number, with the values that the measures need."""


def load_config(folder: Path) -> PreTrainedConfig:
    """Return the checkpoint's `config.json`, with the values of `NEUTRAL_VALUES`.

    Without a file the library would ask the hub for it.
    """
    require_output(folder / "config.json", _stage_of(folder))
    try:
        with without_library_messages():
            config: PreTrainedConfig = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
        set_values(config, NEUTRAL_VALUES)
        config._attn_implementation = None  # chosen by who loads the model
    except Exception as error:  # the library raises errors of many types for a value that does not fit
        raise InputError(f"{folder}: no usable config.json: {in_one_line(error)}") from error
    return config


def set_values(holder: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Set those attributes of `holder` that it has with another value; return the values that they had."""
    before = {key: getattr(holder, key) for key in values if hasattr(holder, key)}
    changed = {key: value for key, value in before.items() if value != values[key]}
    for key in changed:
        setattr(holder, key, values[key])
    return changed


def _stage_of(folder: Path) -> str:
    return "finetune" if folder.name == "finetuned" else "download"


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Return the checkpoint's fast tokenizer, which truncates and pads on the right.

    The name of a special token in a text is text. Raises `InputError` where there is no such tokenizer.
    """
    require_output(folder, _stage_of(folder))
    options = {"padding_side": "right", "truncation_side": "right", "split_special_tokens": True} | LOCAL
    try:
        with without_library_messages():
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, **options)
        tokenizer("a")
    except Exception as error:  # each tokenizer raises its own types, such as that of a package that is not installed
        raise InputError(f"{folder}: no usable tokenizer: {in_one_line(error)}") from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise InputError(f"{folder}: its tokenizer has no fast version (tokenizer.json), which is needed")
    _split_special_names(tokenizer)
    tokenizer.pad_token = padding_token(str(folder), tokenizer)
    return tokenizer


def padding_token(name: str, tokenizer: Any) -> str:
    """Return the special token to pad with; raise `InputError` where the tokenizer of the model `name` has none.

    Classifiers read the last token that is no padding, so the padding token must not end a text.
    """
    ends = tokenizer("a")["input_ids"][-1:]
    for token in (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token):
        if token is not None and tokenizer.convert_tokens_to_ids(token) not in ends:
            return str(token)
    raise InputError(f"{name}: its tokenizer has no special token to pad with: a pad, eos or bos that ends no text")


def _split_special_names(tokenizer: PreTrainedTokenizerFast) -> None:
    """Make special tokens' names in a text plain text where the vocabulary of words has them too.

    `split_special_tokens` turns only the search for names off. Unigram models have the names among their pieces, so
    "</s>" in a text would end it; here a name is parted behind its first character, and no piece holds it.
    """
    special = {str(token): number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    encodings = tokenizer(list(special), add_special_tokens=False).encodings or []
    pieces = [
        name
        for (name, number), encoding in zip(special.items(), encodings, strict=True)
        if (number, (0, len(name))) in zip(encoding.ids, encoding.offsets, strict=True)
    ]
    if pieces:
        backend = tokenizer.backend_tokenizer
        names = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in pieces)
        split = pre_tokenizers.Split(Regex(names), "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([step for step in (backend.pre_tokenizer, split) if step])


def longest_text(config: Any) -> int | None:
    """Return how many tokens, special ones counted, the model's positions reach; `None` where nothing limits them."""
    positions: int | None = getattr(config, "max_position_embeddings", None)
    offset = int(config.pad_token_id) + 1 if config.model_type in POSITIONS_AFTER_PADDING else 0
    return positions and positions - offset


def check_max_length(key: str, max_length: int, folder: Path) -> None:
    """Raise `InputError` where the parameter `key` asks for longer texts than the checkpoint's model takes."""
    check_length(key, max_length, load_config(folder))


def check_length(key: str, max_length: int, config: Any) -> None:
    """Raise `InputError` where `key` asks for longer texts than the model of this configuration takes."""
    limit = longest_text(config) or max_length
    if max_length > limit:
        raise InputError(f"{key}: {max_length} is more than the {limit} tokens that this model takes")

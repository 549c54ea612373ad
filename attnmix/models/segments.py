"""Which of two texts a token belongs to, as models with an embedding for it are told.

The segment of a token follows from the token ids: it is 1 behind the first token that ends a text, 0 before. So
whatever calls a model passes token ids alone, for single texts and pairs.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from attnmix.core.errors import InputError

INPUT = "token_type_ids"


def has_segments(config: Any, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return True for a model that embeds segments, with a tokenizer that gives them."""
    return (getattr(config, "type_vocab_size", None) or 0) > 1 and INPUT in tokenizer.model_input_names


def segments_of(ids: torch.Tensor, end_id: int, pad_id: int) -> torch.Tensor:
    """Return the segments of token ids, both `[..., T]`; 0 for padding."""
    ends = (ids == end_id).long()
    return (ends.cumsum(-1) - ends).clamp(max=1) * (ids != pad_id)


def read_segments(base: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, pairs: bool) -> None:
    """Let a base model that is given `pairs` read the segments off the token ids of each forward pass without any.

    A single text has one segment, whatever its words say: it may hold the token that ends a text.
    """
    if not pairs or not has_segments(base.config, tokenizer) or tokenizer.sep_token_id is None:
        return
    fill = partial(_fill, end_id=tokenizer.sep_token_id, pad_id=tokenizer.pad_token_id)
    base.register_forward_pre_hook(fill, with_kwargs=True)


def _fill(
    _base: Any, arguments: tuple[Any, ...], options: dict[str, Any], end_id: int, pad_id: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    ids = arguments[0] if arguments else options.get("input_ids")
    if ids is not None and options.get(INPUT) is None:
        options = options | {INPUT: segments_of(ids, end_id, pad_id)}
    return arguments, options


def check_segments(config: Any, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]) -> None:
    """Raise `InputError` where the tokenizer gives pairs of texts other segments than their token ids do."""
    if not has_segments(config, tokenizer):
        return
    for pair in pairs:
        encoded = tokenizer(*pair, return_tensors="pt")
        end_id = tokenizer.sep_token_id
        if end_id is None or not torch.equal(
            segments_of(encoded["input_ids"], end_id, tokenizer.pad_token_id), encoded[INPUT]
        ):
            problem = (
                f"its tokenizer gives the pair {pair[0][:30]!r}, {pair[1][:30]!r} segments that do not follow from "
            )
            raise InputError(f"dataset.text_column: {problem}where a text ends; allowed with this model: one text")

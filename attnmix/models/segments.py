"""Segments (token types) of text pairs, for models with segment embeddings.

Segments are derived from token IDs: 0 up to the first separator token, and 1 after it. Callers therefore pass only
token IDs to a model, for single texts and pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.hooks import RemovableHandle

from attnmix.core.errors import InputError

if TYPE_CHECKING:  # importing models takes seconds, and the stage `tokenize` needs no models
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

TOKEN_TYPES = "token_type_ids"
"""The name of the segments in a tokenizer's output and among a model's inputs."""


def has_segments(config: Any, tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return True for a model with segment embeddings and a tokenizer that returns segments."""
    return _has_segment_embeddings(config) and TOKEN_TYPES in tokenizer.model_input_names


def _has_segment_embeddings(config: Any) -> bool:
    """Return True for a model with different embeddings for the first and the second segment."""
    return (getattr(config, "type_vocab_size", None) or 0) > 1


def segments_of(ids: torch.Tensor, end_id: int, pad_id: int) -> torch.Tensor:
    """Return the segments `[..., T]` of token IDs `[..., T]`: 0 up to the first `end_id`, then 1; 0 for padding."""
    ends = (ids == end_id).long()
    earlier_ends = ends.cumsum(-1) - ends  # number of texts that end before each token
    return earlier_ends.clamp(max=1) * (ids != pad_id)


def read_segments(base: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, pairs: bool) -> RemovableHandle | None:
    """Make a base model read the segments of text pairs from the token IDs, by registering a hook on the model.

    Before each forward pass, the hook adds the `token_type_ids` that `segments_of` derives, unless the caller has
    passed `token_type_ids`. Return the hook, which the caller can remove. If `pairs` is False, no hook is registered,
    because single texts have one segment even if they contain a separator token. There is also no hook if the model or
    its tokenizer has no segments, or the tokenizer has no separator token. In these cases, return None.
    """
    if not pairs or not has_segments(base.config, tokenizer) or tokenizer.sep_token_id is None:
        return None
    add_segments = partial(_add_segments, end_id=tokenizer.sep_token_id, pad_id=tokenizer.pad_token_id)
    return base.register_forward_pre_hook(add_segments, with_kwargs=True)


def _add_segments(
    _base: Any, arguments: tuple[Any, ...], options: dict[str, Any], end_id: int, pad_id: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add `token_type_ids` derived from `input_ids`, unless they are specified (forward pre-hook)."""
    ids = arguments[0] if arguments else options.get("input_ids")
    if ids is not None and options.get(TOKEN_TYPES) is None:
        options = options | {TOKEN_TYPES: segments_of(ids, end_id, pad_id)}
    return arguments, options


def check_types(
    config: Any, tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], types: Sequence[int], pairs: bool, key: str
) -> None:
    """Raise `InputError`, prefixed with `key`, if the segments (token types) `types` of a text are invalid.

    Only 0 and 1 are valid. If the model has segment embeddings, `types` must also equal the segments that it receives:
    for a pair (`pairs` is True), those derived from the token IDs if the tokenizer has segments and a separator token;
    otherwise 0.
    """
    derived = [0] * len(ids)
    if pairs and has_segments(config, tokenizer) and tokenizer.sep_token_id is not None:
        derived = segments_of(torch.tensor(ids), tokenizer.sep_token_id, tokenizer.pad_token_id).tolist()
    if not set(types) <= {0, 1}:
        raise InputError(f"{key}: {TOKEN_TYPES} contains {max(types)}; allowed: 0 and 1")
    if _has_segment_embeddings(config) and list(types) != derived:
        problem = f"{TOKEN_TYPES} do not match the ends of its texts ({tokenizer.sep_token or 'no sep_token'})"
        raise InputError(f"{key}: its {problem}; allowed: 0 to the end of the first text, then 1")


def check_segments(config: Any, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]) -> None:
    """Raise `InputError` if the tokenizer's segments of a text pair differ from the segments derived from its IDs."""
    if not has_segments(config, tokenizer):
        return
    separator_id = tokenizer.sep_token_id
    for first, second in pairs:
        encoded = tokenizer(first, second, return_tensors="pt")
        are_equal = False
        if separator_id is not None:
            derived_segments = segments_of(encoded["input_ids"], separator_id, tokenizer.pad_token_id)
            are_equal = torch.equal(derived_segments, encoded[TOKEN_TYPES])
        if not are_equal:
            shown = f"{first[:30]!r}, {second[:30]!r}"
            problem = f"the tokenizer returns segments of the pair {shown} that do not match the ends of the texts"
            raise InputError(f"dataset.text_column: {problem}; use single texts with this model")

"""Texts to token ids, and token ids to batches of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], max_length: int) -> list[list[int]]:
    """Token ids with special tokens, cut to `max_length`, not padded."""
    encoded: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=max_length)["input_ids"]
    return encoded


class Reading(NamedTuple):
    """What of one text the model sees; special tokens count."""

    tokens: int
    """That are left of it."""
    whole: int
    """Before it was cut."""
    unknown: int
    """Of those left, for which its vocabulary has no name."""

    @property
    def is_cut(self) -> bool:
        return self.tokens < self.whole

    @property
    def is_unknown(self) -> bool:
        """Mostly, special tokens counted."""
        return 2 * self.unknown >= self.tokens


def readings(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], max_length: int) -> list[Reading]:
    """Of each text, as `encode` cuts it."""
    whole = tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]
    unknown = tokenizer.unk_token_id
    return [
        Reading(len(left), len(before), 0 if unknown is None else left.count(unknown))
        for left, before in zip(encode(tokenizer, texts, max_length), whole, strict=True)
    ]


def batches_by_tokens(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices of texts of similar length, grouped so that a padded batch has at most `batch_tokens` tokens.

    A text that is longer than that is a batch of its own.
    """
    order = np.argsort(lengths, kind="stable")
    batches: list[list[int]] = []
    for index in map(int, order):
        if batches and (len(batches[-1]) + 1) * lengths[index] <= batch_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
    return batches


def padded(encoded: Sequence[Sequence[int]], pad_token_id: int, device: torch.device) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, `[batch, tokens]`, padded on the right."""
    longest = max(map(len, encoded))
    ids = torch.full((len(encoded), longest), pad_token_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(encoded):
        ids[row, : len(text)] = torch.tensor(text, dtype=torch.long)
        mask[row, : len(text)] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

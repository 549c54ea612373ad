"""Texts to token ids, and token ids to batches of bounded size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

TOKENS_OF_BATCH = 128
"""What starting one more forward pass costs, in tokens."""


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


def readings(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], max_length: int
) -> tuple[list[list[int]], list[Reading]]:
    """Token ids as `encode` gives them, and of each text what the model sees."""
    whole: list[list[int]] = tokenizer(list(texts), truncation=False, verbose=False)["input_ids"]
    longer = [i for i, ids in enumerate(whole) if len(ids) > max_length]
    cut = dict(zip(longer, encode(tokenizer, [texts[i] for i in longer], max_length), strict=True)) if longer else {}
    left, unknown = [cut.get(i, ids) for i, ids in enumerate(whole)], tokenizer.unk_token_id
    return left, [
        Reading(len(ids), len(before), 0 if unknown is None else ids.count(unknown))
        for ids, before in zip(left, whole, strict=True)
    ]


def batches_by_tokens(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices of texts of similar length, grouped so that a padded batch has at most `batch_tokens` tokens.

    A text that is longer than that is a batch of its own. Of all ways to cut the texts in the order of their lengths,
    the one with the fewest padded tokens, where a batch counts as much as `TOKENS_OF_BATCH` more.
    """
    order = np.argsort(lengths, kind="stable")
    ordered = np.asarray(lengths)[order]
    least, begins = np.zeros(len(ordered) + 1), np.zeros(len(ordered) + 1, dtype=int)
    for end in range(1, len(ordered) + 1):
        longest = int(ordered[end - 1])
        first = max(0, end - max(1, batch_tokens // longest))
        costs = least[first:end] + longest * np.arange(end - first, 0, -1)
        begins[end] = first + int(costs.argmin())
        least[end] = costs.min() + TOKENS_OF_BATCH
    batches, end = [], len(ordered)
    while end:
        batches.append(order[begins[end] : end].tolist())
        end = begins[end]
    return batches[::-1]


def padded(encoded: Sequence[Sequence[int]], pad_token_id: int, device: torch.device) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, `[batch, tokens]`, padded on the right."""
    longest = max(map(len, encoded))
    ids = torch.full((len(encoded), longest), pad_token_id, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(encoded):
        ids[row, : len(text)] = torch.tensor(text, dtype=torch.long)
        mask[row, : len(text)] = 1
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}

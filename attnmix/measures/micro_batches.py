"""Micro-batches: texts of a padded batch that are measured together, with tensors that describe their tokens.

On a CPU, the vectors of a micro-batch fit into the cache, and micro-batches can be measured in parallel. On other
devices, a micro-batch contains up to `ratios.DEVICE_TOKENS` tokens (usually the whole batch), because the time of an
operation hardly depends on the number of texts.

Shapes: B texts of a micro-batch, T tokens of its longest text, G groups of tokens, S special tokens of a text.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attnmix.core.lazy import cached_property
from attnmix.measures.documents import CLASSES, POSITIONS, Document, position_groups
from attnmix.measures.ratios import chunk_tokens

TOKEN_GROUPS = len(CLASSES) * len(POSITIONS)
PADDING_SEGMENT = 2  # the texts of a pair have the segments 0 and 1, and special tokens the segment -1


class MicroBatch:
    """Consecutive texts of a padded batch."""

    def __init__(self, documents: Sequence[Document], places: slice, device: torch.device) -> None:
        """Select the texts at `places` from `documents`, the texts of the whole batch."""
        self.documents = documents[places]
        self.places = places
        self.device = device
        self.lengths = [len(document) for document in self.documents]
        self.tokens = max(self.lengths)
        self.is_padded = min(self.lengths) < self.tokens
        self.names = [document.name for document in self.documents]

    @cached_property
    def mask_BT(self) -> Tensor:
        """A mask that is True for tokens and False for padding."""
        masks = [np.ones(length, bool) for length in self.lengths]
        return self._pad(masks, False)

    @cached_property
    def tokens_B(self) -> Tensor:
        """The number of tokens of each text, in float64."""
        return self.mask_BT.sum(-1).double()

    @cached_property
    def groups_BT(self) -> Tensor:
        """The index of each token's group: a combination of a token class and a range of positions; 0 for padding."""
        groups = [_compute_token_groups(document) for document in self.documents]
        return self._pad(groups, 0)

    @cached_property
    def members_BTG(self) -> Tensor:
        """The one-hot encoding of each token's group; zeros for padding."""
        rows_BTG = torch.nn.functional.one_hot(self.groups_BT, TOKEN_GROUPS).double()
        return rows_BTG * self.mask_BT.unsqueeze(-1)

    def members_within(self, names: Collection[str]) -> Tensor:
        """Return `members_BTG`, each token's group as one-hot encoding; 0 for texts whose names are not in `names`."""
        is_named = [name in names for name in self.names]
        if all(is_named):
            return self.members_BTG
        is_named_B = torch.tensor(is_named, device=self.device)
        return self.members_BTG * is_named_B[:, None, None]

    @cached_property
    def ids_BT(self) -> npt.NDArray[np.int64]:
        """The token IDs. Padding repeats the first ID of the text, because it must not add another distinct ID."""
        ids_BT = np.empty((len(self.documents), self.tokens), np.int64)
        for place, document in enumerate(self.documents):
            ids_BT[place] = document.ids[0]
            ids_BT[place, : len(document)] = document.ids
        return ids_BT

    @cached_property
    def segments_BT(self) -> Tensor | None:
        """The segment of each token, or None if a text is not a pair.

        The segment is 0 or 1 in the texts of a pair, -1 for special tokens, and `PADDING_SEGMENT` for padding.
        """
        segments = []
        for document in self.documents:
            if document.segments is None:
                return None
            segments.append(document.segments.astype(np.int64))
        return self._pad(segments, PADDING_SEGMENT)

    def segments(self, shifted: bool) -> Tensor | None:
        """Return `segments_BT`. If `shifted` is True, segments are shifted right by one, as decoder inputs are."""
        if self.segments_BT is None or not shifted:
            return self.segments_BT
        start_B1 = torch.full_like(self.segments_BT[:, :1], -1)  # the start token is a special token
        shifted_BT = torch.cat([start_B1, self.segments_BT[:, :-1]], 1)
        return shifted_BT.masked_fill(~self.mask_BT, PADDING_SEGMENT)

    def special_positions(self, shifted: bool) -> Tensor:
        """Return the positions `[S, B]` of each text's special tokens, padded with -1.

        If `shifted` is True, positions are those in the inputs of a decoder. These inputs are a start token, followed
        by the text's tokens without the last one. The start token is also a special token.
        """
        position_SB = self._special_SB
        if not shifted:
            return position_SB
        start_1B = torch.zeros_like(self.mask_BT[:, :1], dtype=torch.int64).T  # the start token is at position 0
        is_padding_SB = position_SB < 0
        is_last_token_SB = position_SB >= self.tokens_B - 1
        shifted_SB = torch.where(is_padding_SB | is_last_token_SB, -1, position_SB + 1)
        return torch.cat([start_1B, shifted_SB])

    @cached_property
    def _special_SB(self) -> Tensor:
        """The positions of each text's special tokens, which belong to no word; padded with -1."""
        positions = [np.flatnonzero(document.words < 0) for document in self.documents]
        return self._pad(positions, -1).T

    def part(self, vectors_BTD: Tensor) -> Tensor:
        """Select the vectors of the micro-batch from the vectors of the whole batch."""
        return vectors_BTD[self.places, : self.tokens]

    def sums(self, values: Tensor) -> Tensor:
        """Return the sums of `values` `[B, T, ...]` over the tokens of each text, in float64."""
        if self.is_padded:
            further_axes = [1] * (values.dim() - 2)
            mask = self.mask_BT.view(*self.mask_BT.shape, *further_axes)
            values = values.masked_fill(~mask, 0)
        return values.sum(1, dtype=torch.float64)

    def means(self, values_BTE: Tensor) -> Tensor:
        """Return the means `[B, 1, E]` over the tokens of each text."""
        means_BE = self.sums(values_BTE) / self.tokens_B.unsqueeze(-1)
        return means_BE.unsqueeze(1).to(values_BTE)

    def _pad(self, arrays: Sequence[npt.NDArray[Any]], padding: float) -> Tensor:
        """Return one-dimensional arrays, one per text, as a padded tensor on the device of the batch."""
        tensors = [torch.as_tensor(array) for array in arrays]
        padded = pad_sequence(tensors, batch_first=True, padding_value=padding)
        return padded.to(self.device)


def micro_batches(documents: Sequence[Document], device: torch.device) -> list[MicroBatch]:
    """Divide a batch into micro-batches. The division depends only on the text lengths and the type of the device."""
    max_tokens = chunk_tokens(device)
    return [MicroBatch(documents, places, device) for places in _split_places(documents, max_tokens)]


def _split_places(documents: Sequence[Document], max_tokens: int) -> Iterator[slice]:
    """Yield slices of consecutive texts with at most `max_tokens` tokens including padding.

    A text with more than `max_tokens` tokens forms a separate slice.
    """
    start = 0
    longest = 0
    for place, document in enumerate(documents):
        longest = max(longest, len(document))
        padded_tokens = (place + 1 - start) * longest
        if place > start and padded_tokens > max_tokens:
            yield slice(start, place)
            start = place
            longest = len(document)
    yield slice(start, len(documents))


def _compute_token_groups(document: Document) -> npt.NDArray[np.int64]:
    """Return the index `[T]` of each token's group: a combination of a token class and a range of positions."""
    class_T = document.classes.astype(np.int64)
    position_T = position_groups(len(document))
    return class_T * len(POSITIONS) + position_T

"""Batches: every text once, no batch too large, and no cheaper way to cut them."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest

from attnmix.models.encoding import PASS_COST_TOKENS, batches_by_tokens


def cost(batches: list[list[int]], lengths: list[int]) -> int:
    return sum(len(batch) * max(lengths[i] for i in batch) + PASS_COST_TOKENS for batch in batches)


def fits(batch: list[int], lengths: list[int], most: int) -> bool:
    return len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= most


@pytest.mark.parametrize("seed", range(8))
def test_no_cut_of_the_sorted_texts_is_cheaper(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, 513, size=9).tolist()
    most = int(generator.integers(200, 3000))
    batches = batches_by_tokens(lengths, most)
    assert sorted(chain.from_iterable(batches)) == list(range(9))
    assert all(fits(batch, lengths, most) for batch in batches)
    order = sorted(range(9), key=lengths.__getitem__)
    every = (
        [order[low:high] for low, high in zip((0, *cuts), (*cuts, 9), strict=True)]
        for number in range(9)
        for cuts in combinations(range(1, 9), number)
    )
    assert cost(batches, lengths) == min(
        cost(each, lengths) for each in every if all(fits(batch, lengths, most) for batch in each)
    )


def test_texts_of_one_length_fill_their_batches() -> None:
    assert [len(batch) for batch in batches_by_tokens([100] * 25, 1000)] in ([10, 10, 5], [5, 10, 10], [10, 5, 10])


def test_no_texts_are_no_batches() -> None:
    assert batches_by_tokens([], 100) == []

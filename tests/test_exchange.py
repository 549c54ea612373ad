"""The displacements caused by exchanging tokens match a float64 computation with transformers, one text at a time."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from families import FAMILIES, each_family, tiny_folder

from attnmix.core.names import DONOR_KINDS
from attnmix.measures.documents import Document
from attnmix.measures.exchange import (
    Displacements,
    choose_donors,
    choose_positions,
    exchange_matrix,
    exchange_sums,
    exchange_words,
    measure_exchange,
    own_shares,
)
from attnmix.models.families import family_of
from attnmix.models.loading import load_base

Array = npt.NDArray[np.float64]
TOKENS, FIRST_WORD = 9, 5
POSITIONS = np.array([1, 4, 7], np.int32)


def document(ids: Any, name: str = "text", special: Any = (0, -1)) -> Document:
    """Return a text whose tokens are words, except for special tokens at the positions `special`."""
    ids = np.array(ids, np.int32)
    words = np.arange(len(ids), dtype=np.int32)
    words[list(special)] = -1
    return Document(name, ids, np.zeros(len(ids), np.int8), words)


def drawn_ids(seed: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(FIRST_WORD, 40, TOKENS).astype(np.int32)


def states(model: Any, ids: Any) -> list[Array]:
    """Return the vectors `[T, D]` at each level without final norms; decoder vectors are indexed by their input token.

    A decoder reads the text shifted right by one, so the last of the T tokens has no decoder vector (NaN).
    """
    before_norm: dict[int, Any] = {}  # transformers returns the last layer's vectors after the norm
    norms = [stack.final_norm for stack in family_of(model.config).stacks]
    hooks = []
    for number, path in enumerate(norms):
        if path:
            norm = model.get_submodule(path.removesuffix("?"))
            hooks.append(norm.register_forward_pre_hook(partial(keep_input, before_norm, number)))
    output = model(input_ids=torch.as_tensor(np.asarray(ids, np.int64))[None], output_hidden_states=True)
    for hook in hooks:
        hook.remove()
    encoder = output.get("encoder_hidden_states")
    stacks = [output.hidden_states] if encoder is None else [encoder, output.decoder_hidden_states]
    stacks = [[*stack[:-1], before_norm.get(number, stack[-1])] for number, stack in enumerate(stacks)]
    levels = [state.view(len(ids), -1).numpy() for state in stacks[0]]
    if encoder is not None:
        for state in stacks[1][1:]:
            unread = np.full((1, state.shape[-1]), np.nan)
            levels.append(np.concatenate([state[0, 1:].numpy(), unread]))
    return levels


def keep_input(kept: dict[int, Any], number: int, _module: Any, inputs: tuple[Any, ...]) -> None:
    kept[number] = inputs[0]


def reference(model: Any, ids: Any, donors: Any, position: int) -> Array:
    """Return four quantities of a token's vector y at each level `[4, levels]`, averaged over donors.

    They are the squared displacements of y when its own token, all other tokens, or all tokens are exchanged; the last
    one is |y|^2.
    """
    by_donor = []
    for donor in donors:
        own, others = ids.copy(), donor.copy()
        own[position] = donor[position]
        others[position] = ids[position]
        states_by_text = [states(model, text) for text in (ids, own, others, donor)]
        levels = []
        for original, *exchanged in zip(*states_by_text, strict=True):
            y = original[position]
            squares = [np.sum((each[position] - y) ** 2) for each in exchanged]
            levels.append([*squares, np.sum(y**2)])
        by_donor.append(np.array(levels).T)
    return np.asarray(np.mean(by_donor, axis=0))


@pytest.mark.parametrize("name", each_family("bert", "gpt2", "qwen3", "bart", names=FAMILIES))
@torch.inference_mode()
def test_displacements_match_transformers(name: str) -> None:
    base: Any = load_base(tiny_folder(name))
    model = copy.deepcopy(base).double()
    ids = drawn_ids(0)
    donors = {"same_class": [drawn_ids(1)], "other_class": [drawn_ids(2), drawn_ids(3)]}
    for texts in donors.values():
        for donor in texts:
            donor[[0, -1]] = ids[[0, -1]]
            donor[POSITIONS] = np.where(donor[POSITIONS] == ids[POSITIONS], 41, donor[POSITIONS])
    measured = measure_exchange(base.double(), document(ids), donors, POSITIONS, batch_tokens=4 * TOKENS)
    for kind, texts in enumerate(donors.values()):
        for position in POSITIONS:
            expected_4L = reference(model, ids, texts, position)
            found_4L = np.stack(measured)[:, kind, :, position]
            np.testing.assert_allclose(found_4L, expected_4L, rtol=1e-4, atol=1e-9)
    others = np.setdiff1d(np.arange(TOKENS), POSITIONS)
    assert np.isnan(np.stack(measured)[..., others]).all()


@pytest.mark.parametrize("name", ["bert", "gpt2"])
@torch.inference_mode()
def test_exchange_matrix_matches_transformers(name: str) -> None:
    base: Any = load_base(tiny_folder(name)).double()
    model = copy.deepcopy(base)
    ids, donors = drawn_ids(0), [drawn_ids(1), drawn_ids(2)]
    donors[0][[0, 3, -1]] = ids[[0, 3, -1]]  # the special tokens and one word are equal in both texts
    donors[1][[0, -1]] = ids[[0, -1]]
    kinds = {"same_class": donors[:1], "other_class": donors[1:]}
    found_LTT = exchange_matrix(base, document(ids), kinds, batch_tokens=3 * TOKENS)
    original = np.stack(states(model, ids))
    for source in range(TOKENS):
        squares = []
        for donor in donors:
            if donor[source] != ids[source]:
                text = ids.copy()
                text[source] = donor[source]
                squares.append(((np.stack(states(model, text)) - original) ** 2).sum(-1))
        expected_LT = np.full(original.shape[:2], np.nan)
        if squares:
            expected_LT = np.sqrt(np.mean(squares, axis=0) / (original**2).sum(-1))
        np.testing.assert_allclose(found_LTT[:, :, source], expected_LT, rtol=1e-6, atol=1e-9)
    assert np.isnan(found_LTT).all(1).any(0).tolist() == [True, *[False] * (TOKENS - 2), True]


def test_equal_tokens_are_excluded() -> None:
    base: Any = load_base(tiny_folder("bert"))
    ids, first, second = drawn_ids(0), drawn_ids(1), drawn_ids(2)
    first = np.where(first == ids, 41, first).astype(np.int32)
    first[:2] = ids[:2]  # the same token at position 1
    second[1] = 42
    both = measure_exchange(base, document(ids), {"a": [first, second], "b": [first]}, np.array([1, 3], np.int32), 512)
    alone = measure_exchange(base, document(ids), {"a": [second]}, np.array([1], np.int32), 512)
    np.testing.assert_allclose(np.stack(both)[:, 0, :, 1], np.stack(alone)[:, 0, :, 1], rtol=1e-5)
    assert np.isnan(np.stack(both)[:, 1, :, 1]).all()
    assert np.isfinite(np.stack(both)[:, 1, :, 3]).all()


def test_token_without_others_is_excluded() -> None:
    """A single exchanged token would always have an own share of 1, because nothing else is exchanged."""
    base: Any = load_base(tiny_folder("bert"))
    ids = drawn_ids(0)
    donor = ids.copy()
    donor[3] += 1
    positions = np.arange(1, TOKENS - 1, dtype=np.int32)
    assert np.isnan(np.stack(measure_exchange(base, document(ids), {"a": [donor]}, positions, 512))).all()
    donor[4] += 1
    found = measure_exchange(base, document(ids), {"a": [donor]}, positions, 512)
    is_known = np.isfinite(np.stack(found)).all((0, 1, 2))
    assert np.flatnonzero(is_known).tolist() == [3, 4]


def test_displacements_do_not_depend_on_batches() -> None:
    base: Any = load_base(tiny_folder("bert"))
    ids, donors = drawn_ids(0), {"a": [drawn_ids(1)], "b": [drawn_ids(2)]}
    positions = np.arange(1, TOKENS - 1, dtype=np.int32)
    one = measure_exchange(base, document(ids), donors, positions, batch_tokens=1)
    all_at_once = measure_exchange(base, document(ids), donors, positions, batch_tokens=4096)
    np.testing.assert_allclose(np.stack(one), np.stack(all_at_once), rtol=1e-4, atol=1e-10)


def planted(own: Any, others: Any, joint: Any, length: Any) -> Displacements:
    """Return displacements of one level `[K, 1, T]` for K kinds of donors."""
    return Displacements(*(np.array(values, float)[:, None] for values in (own, others, joint, length)))


def test_sums_follow_from_displacements() -> None:
    nothing = np.nan  # the second token has only rounding errors, and the third token was not exchanged
    moves = planted([[16, 0, nothing]], [[4, 0, nothing]], [[36, 4e-30, nothing]], [[4, 4, nothing]])
    sums = exchange_sums(moves, precision=1e-7)
    assert {name: (total.item(), count.item()) for name, (total, count) in sums.items()} == {
        "own_share": (2 / 3, 1),
        "own_share_squared": (0.8, 1),
        "own": (2, 2),
        "others": (1, 2),
        "joint": (3, 2),
        "total_own": (16, 36),
        "total_others": (4, 36),
        "first_order_own": (32, 36),
    }
    assert own_shares(moves, 1e-7)[0, 0] == 2 / 3


def test_all_donors_average_known_kinds() -> None:
    nothing = np.nan
    moves = planted(
        [[1, 9, nothing], [9, nothing, nothing]],
        [[1, 1, nothing], [1, nothing, nothing]],
        [[4, 4, nothing], [16, nothing, nothing]],
        [[1, 1, nothing], [1, nothing, nothing]],
    )
    sums = exchange_sums(moves, precision=1e-7)
    assert sums["own_share"].values[:, 0].tolist() == [(0.5 + 0.75) / 2 + 0.75, 0.5 + 0.75, 0.75]
    assert sums["own_share"].counts[:, 0].tolist() == [2, 2, 1]
    assert sums["total_own"].values[:, 0].tolist() == [19, 10, 9]
    assert sums["total_own"].counts[:, 0].tolist() == [24, 8, 16]
    np.testing.assert_array_equal(own_shares(moves, 1e-7)[0], [0.625, 0.75, nothing])


def test_positions_are_spread_over_words() -> None:
    text = document(range(100), special=[0, 50, -1])
    words = np.setdiff1d(np.arange(1, 99), [50])
    drawn = choose_positions(text, 8, seed=0)
    for position, part in zip(drawn, np.array_split(words, 8), strict=True):
        assert position in part
    assert choose_positions(text, 8, seed=0).tolist() == drawn.tolist()
    assert choose_positions(text, 8, seed=1).tolist() != drawn.tolist()
    assert choose_positions(text, 200, seed=0).tolist() == words.tolist()


def test_donors_are_other_texts_by_class() -> None:
    texts = [document([1, 2, 3], name=f"text/{number}") for number in range(6)]
    classes = np.array([0, 1, 0, 1, 0, 2])
    donors = choose_donors(texts, 0, classes, seed=0)
    assert {kind: sorted(numbers) for kind, numbers in donors.items()} == {
        "same_class": [2, 4],
        "other_class": [1, 3, 5],
    }
    assert sorted(choose_donors(texts, 0, None, seed=0)["other_texts"]) == [1, 2, 3, 4, 5]
    assert list(choose_donors(texts, 5, classes, seed=0)) == ["other_class"]
    orders = {tuple(choose_donors(texts, 0, None, seed=seed)["other_texts"]) for seed in range(20)}
    assert len(orders) > 1


def test_special_tokens_are_not_exchanged() -> None:
    text = document([101, 1, 2, 3, 102, 4, 5, 102], special=[0, 4, 7])
    short, long = document([101, 11, 12, 102]), document([101, 21, 22, 23, 24, 25, 102])
    assert exchange_words(text, [long]).tolist() == [101, 21, 22, 23, 102, 24, 25, 102]
    assert exchange_words(text, [short, long]).tolist() == [101, 11, 12, 21, 102, 22, 23, 102]
    assert exchange_words(text, [short]).tolist() == [101, 11, 12, 11, 102, 12, 11, 102]
    assert set(DONOR_KINDS) == {"all", "same_class", "other_class", "other_texts", "neutral"}

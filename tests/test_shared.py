"""Tests of variance shares.

Their mean products equal those computed with loops over pairs. The shares recover planted parts, and their intervals
have nominal coverage.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from attnmix.core.errors import InputError
from attnmix.core.statistics import Jackknifed
from attnmix.faithfulness.lens import probe_accuracy
from attnmix.interventions import class_eraser, remaining_eraser
from attnmix.measures.variance_shares import MAX_TEXTS, PARTS, Moments, class_share_null, draw_texts, products, usable


def texts_of(lengths: list[int], seed: int = 0) -> list[Any]:
    """Return random vectors `[tokens, 2 sites, 4]` of each text."""
    generator = np.random.default_rng(seed)
    return [generator.normal(size=(length, 2, 4)) + 0.5 for length in lengths]


def moments(vectors: list[Any]) -> Moments:
    """Return the moments of texts from their vectors `[tokens, sites, dimensions]`."""
    sums = np.stack([each.sum(0) for each in vectors])
    squares = np.stack([(each**2).sum((0, -1)) for each in vectors])
    return Moments.from_sums(sums, squares, [len(each) for each in vectors])


def by_loops(vectors: list[Any], classes: list[int], site: int) -> dict[str, float]:
    """Return the mean products at one site, computed pair by pair."""
    texts = range(len(vectors))
    means = [each[:, site].mean(0) for each in vectors]
    squares = []
    within = []
    same = []
    for text, each in enumerate(vectors):
        tokens = each[:, site]
        squares.append((tokens**2).sum(-1).mean())
        within.append(np.mean([a @ b for i, a in enumerate(tokens) for j, b in enumerate(tokens) if i != j]))
        others_of_class = [other for other in texts if other != text and classes[other] == classes[text]]
        same.append(np.mean([means[text] @ means[other] for other in others_of_class]))

    by_classes: dict[tuple[int, int], list[float]] = {}
    for first, second in permutations(texts, 2):
        pair = (classes[first], classes[second])
        by_classes.setdefault(pair, []).append(means[first] @ means[second])
    other = []
    corpus = 0.0  # a pair of classes is weighted by the numbers of texts in both
    for (first_class, second_class), pair_products in by_classes.items():
        if first_class != second_class:
            other += pair_products
        weight = classes.count(first_class) * classes.count(second_class) / len(classes) ** 2
        corpus += weight * np.mean(pair_products)
    return {
        "square": np.mean(squares),
        "within": np.mean(within),
        "same": np.mean(same),
        "other": np.mean(other),
        "corpus": corpus,
    }


def test_mean_products_match_pairs_and_leave_one_out() -> None:
    vectors, classes = texts_of([3, 2, 5, 4, 2, 6, 3]), [0, 1, 0, 1, 1, 0, 1]
    whole, without = products(moments(vectors), classes)
    for site in (0, 1):
        for name, value in by_loops(vectors, classes, site).items():
            assert getattr(whole, name)[site] == pytest.approx(value), name
        for left_out in range(len(vectors)):
            rest = [place for place in range(len(vectors)) if place != left_out]
            expected = by_loops([vectors[place] for place in rest], [classes[place] for place in rest], site)
            for name, value in expected.items():
                assert getattr(without, name)[left_out, site] == pytest.approx(value), name


def planted(generator: np.random.Generator, lengths: dict[str, float], texts: int = 60) -> tuple[Moments, Any]:
    """Return moments and classes of 8-token texts.

    Each vector is the sum of four parts; `lengths` contains the squared norm of each part by name.
    """

    def part(name: str, *shape: int) -> Any:
        vectors = generator.normal(size=(*shape, 50))
        return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True) * lengths[name] ** 0.5

    classes = np.arange(texts) % 2
    of_class = part("class") * np.where(classes, 1, -1)[:, None, None]
    vectors = part("corpus") + of_class + part("text", texts, 1) + part("token", texts, 8)
    return moments([each[:, None] for each in vectors]), classes


def test_planted_parts_are_recovered() -> None:
    generator = np.random.default_rng(0)
    for lengths in (
        {"corpus": 3.0, "class": 2.0, "text": 1.0, "token": 4.0},
        {"corpus": 0.0, "class": 0.0, "text": 2.0, "token": 2.0},
        {"corpus": 1.0, "class": 3.0, "text": 0.0, "token": 0.0},
    ):
        samples = []
        for _ in range(20):
            whole, _ = products(*planted(generator, lengths))
            samples.append(whole.shares()[0])
        expected = np.array([lengths[name] for name in PARTS]) / sum(lengths.values())
        np.testing.assert_allclose(np.mean(samples, axis=0), expected, atol=0.02)


def test_class_share_exceeds_permuted_classes() -> None:
    generator = np.random.default_rng(0)
    is_above = []
    for share in (0.0, 0.5):
        texts, classes = planted(generator, {"corpus": 1.0, "class": share, "text": 1.0, "token": 1.0})
        whole, _ = products(texts, classes)
        is_above.append(whole.shares()[0, PARTS.index("class")] > class_share_null(texts, classes, 0)[0])
    assert is_above == [False, True]


def test_jackknife_interval_covers() -> None:
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        texts, classes = planted(generator, {"corpus": 1.0, "class": 1.0, "text": 1.0, "token": 1.0}, texts=24)
        shares = (each.shares()[..., 0, PARTS.index("class")] for each in products(texts, classes))
        _, low, high = Jackknifed(*shares).interval()
        covered += bool(low <= 0.25 <= high)
    assert 0.9 < covered / 200 < 0.99


def test_texts_sorted_by_class_are_drawn_from_each_class() -> None:
    classes = np.repeat([0, 1], [3 * MAX_TEXTS, MAX_TEXTS])
    drawn = draw_texts(classes, seed=0)
    assert np.bincount(classes[drawn]).tolist() == [MAX_TEXTS * 3 // 4, MAX_TEXTS // 4]
    np.testing.assert_array_equal(drawn, np.unique(drawn))
    np.testing.assert_array_equal(draw_texts(classes[:MAX_TEXTS], seed=0), np.arange(MAX_TEXTS))


def test_texts_without_partner_or_class_are_excluded() -> None:
    classes, tokens = np.array([0, 0, 0, 1, 1, -1, 2, 2, 2]), np.array([3, 3, 3, 3, 3, 3, 1, 3, 3])
    assert usable(classes, tokens).tolist() == [True] * 3 + [False] * 6
    whole, without = products(moments(texts_of([2, 3])), [0, 0])
    assert np.isfinite(whole.same).all()
    assert np.isnan(without.same).all()
    assert np.isnan(Jackknifed(whole.same, without.same).interval().low).all()
    one_text, _ = products(moments(texts_of([4])), [0])
    assert np.isnan(one_text.same).all()


def test_class_eraser_removes_classes_with_least_change() -> None:
    generator = torch.Generator().manual_seed(0)
    classes = torch.arange(90) % 3
    directions = torch.randn(3, 12, generator=generator, dtype=torch.float64)
    vectors = torch.randn(90, 12, generator=generator, dtype=torch.float64)
    vectors = vectors @ torch.randn(12, 12, generator=generator).double() + 2 * directions[classes]
    erased = class_eraser(vectors, classes)(vectors)
    means = torch.stack([erased[classes == each].mean(0) for each in range(3)])
    torch.testing.assert_close(means, means[:1].expand(3, -1), atol=1e-9, rtol=0)  # no linear classifier separates them
    moved = erased - vectors
    assert torch.linalg.matrix_rank(moved, tol=1e-8) == 2
    # The minimal change projects onto the cross-covariance, orthogonally in the metric of the inverse covariance.
    centred = (vectors - vectors.mean(0)).numpy()
    covariance = centred.T @ centred / 90
    onehot = np.eye(3)[classes.numpy()]
    crossed = centred.T @ (onehot - onehot.mean(0)) / 90
    inverse = np.linalg.pinv(covariance)
    projection = crossed @ np.linalg.pinv(crossed.T @ inverse @ crossed) @ crossed.T @ inverse
    np.testing.assert_allclose(erased.numpy(), vectors.numpy() - centred @ projection.T, atol=1e-9)
    doubled = class_eraser(vectors, classes).scaled(2)(vectors)
    torch.testing.assert_close(doubled, vectors - moved, atol=1e-9, rtol=0)
    # Removing the same variance elsewhere does not change the covariance with the classes.
    for seed in (None, 0, 1):
        other = remaining_eraser(vectors, class_eraser(vectors, classes), seed)(vectors)
        torch.testing.assert_close((other - vectors).var(0).sum(), moved.var(0).sum(), atol=1e-9, rtol=1e-9)
        np.testing.assert_allclose((other - vectors).T.numpy() @ (onehot - onehot.mean(0)), 0, atol=1e-9)
        moved_centred = other.numpy() - vectors.mean(0).numpy()
        np.testing.assert_allclose(moved_centred @ inverse @ crossed, centred @ inverse @ crossed)
    _, _, directions = np.linalg.svd((erased - vectors.mean(0)).numpy())
    change = remaining_eraser(vectors, class_eraser(vectors, classes))(vectors) - vectors
    assert np.linalg.norm(change.numpy() @ directions[0]) > 0.5  # the direction of the largest remaining variance
    with pytest.raises(InputError, match="have the same class"):
        class_eraser(vectors, torch.zeros(90))


def test_probe_accuracy_with_and_without_signal() -> None:
    generator = np.random.default_rng(0)
    labels = np.arange(400) % 2
    vectors = generator.normal(size=(400, 6))
    assert 0.4 < probe_accuracy(vectors[:200], labels[:200], vectors[200:], labels[200:]) < 0.6
    vectors[:, 2] += 4 * labels
    assert probe_accuracy(vectors[:200], labels[:200], vectors[200:], labels[200:]) > 0.95

"""The measures of a text do not depend on how its batch is divided into blocks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, get_ident
from typing import Any

import numpy as np
import pytest
import torch
from conftest import plain_document

from attnmix.core.errors import InputError
from attnmix.measures.batches import BatchMeasurer, BatchPass, DocumentMeasures
from attnmix.measures.geometry import Cloud, _fetch_ranks, effective_ranks
from attnmix.measures.micro_batches import MicroBatch, micro_batches
from attnmix.measures.ratios import RATIOS
from attnmix.models.loading import load_base

LENGTHS = (3, 9, 20, 33, 40)
CPU = torch.device("cpu")
LIMIT_SECONDS = 60


def documents() -> list[Any]:
    """Return random texts of the lengths `LENGTHS`."""
    generator = np.random.default_rng(0)
    return [plain_document(generator.integers(5, 30, length), f"text/{length}") for length in LENGTHS]


@pytest.mark.parametrize(("most_tokens", "sizes"), [(1, [1, 1, 1, 1, 1]), (60, [3, 1, 1]), (10**6, [5])])
def test_blocks_keep_documents_in_order(most_tokens: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmix.measures.ratios.CACHE_TOKENS", most_tokens)
    blocks = micro_batches(documents(), CPU)
    assert [len(block.documents) for block in blocks] == sizes
    assert [name for block in blocks for name in block.names] == [f"text/{length}" for length in LENGTHS]
    assert [block.tokens for block in blocks] == [max(block.lengths) for block in blocks]


def test_sums_and_means_exclude_padding() -> None:
    block = MicroBatch(documents(), slice(1, 4), CPU)
    values = torch.randn(3, 33, 2, generator=torch.Generator().manual_seed(0))
    values[0, 9:] = torch.nan
    expected = torch.stack([values[row, :length].double().sum(0) for row, length in enumerate((9, 20, 33))])
    torch.testing.assert_close(block.sums(values), expected)
    torch.testing.assert_close(block.means(values)[:, 0], (expected / torch.tensor([[9], [20], [33]])).float())


def measured(base: Any) -> list[DocumentMeasures]:
    """Return the measures of the texts; `SAMPLED_IDENTITIES` are checked only in every second text."""
    measurer = BatchMeasurer(base, list(RATIOS), 0)
    measurer.read_corpus([documents()])
    return measurer.measures(documents(), [number % 2 == 0 for number in range(len(LENGTHS))])


def test_error_stops_later_tasks(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the first task that computes ratios fails, at most one task that checks identities starts."""
    begun: list[int] = []
    arrived = Event()

    def fails(*_: Any) -> None:
        raise InputError("planted error")

    def waits(*_: Any) -> None:
        begun.append(get_ident())
        assert arrived.wait(LIMIT_SECONDS)

    monkeypatch.setattr("attnmix.measures.ratios.CACHE_TOKENS", 1)
    monkeypatch.setattr(BatchPass, "_measure_ratios", fails)
    monkeypatch.setattr(BatchPass, "_measure_identity_errors", waits)
    with ThreadPoolExecutor(1) as threads:
        monkeypatch.setattr("attnmix.core.arithmetic.kernels.task_threads", lambda _device: threads)
        with pytest.raises(InputError, match="planted error"):
            BatchMeasurer(load_base(tiny_bert), list(RATIOS), 0).measures(documents())
        arrived.set()
    assert len(begun) <= 1


def test_block_matches_single_documents(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = load_base(tiny_bert)
    monkeypatch.setattr("attnmix.measures.ratios.CACHE_TOKENS", 1)
    one_by_one = measured(base)
    monkeypatch.setattr("attnmix.measures.ratios.CACHE_TOKENS", 10**6)
    for each, other in zip(measured(base), one_by_one, strict=True):
        np.testing.assert_allclose(each.ratios, other.ratios, atol=4e-7)
        np.testing.assert_allclose(each.to_first, other.to_first, atol=4e-7)
        assert (np.isnan(each.identities) == np.isnan(other.identities)).all()
        assert each.statistics.keys() == other.statistics.keys()
        for name, array in other.statistics.items():
            np.testing.assert_allclose(each.statistics[name], array, rtol=1e-5, atol=1e-5, err_msg=name)


def test_fetched_effective_ranks_match_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [4, 7, 4]
    vectors = torch.randn(3, 3, 7, 12, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(7) < torch.tensor(lengths)[:, None]
    cloud = Cloud(vectors, mask[:, None])
    ranks = effective_ranks(cloud, lengths).result()
    monkeypatch.setattr("attnmix.measures.geometry.SOLVED_NUMBERS", 1)  # one text per eigenvalue call
    torch.testing.assert_close(_fetch_ranks(cloud.gram_NN, lengths), ranks, rtol=0, atol=0)
    for text, tokens in enumerate(lengths):
        for point in range(3):
            x = vectors[text, point, :tokens].double().numpy()
            shares = np.linalg.svd(x - x.mean(0), compute_uv=False)[: tokens - 1]
            shares = shares / shares.sum()
            assert float(ranks[text, point]) == pytest.approx(np.exp(-(shares * np.log(shares)).sum()))

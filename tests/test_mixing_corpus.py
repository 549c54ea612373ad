"""`measure` needs constant memory, its results do not depend on block sizes, and words are shuffled reproducibly."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterable
from dataclasses import replace
from functools import partialmethod
from itertools import chain, combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import (
    BOOTSTRAP_SAMPLES,
    Workspace,
    plain_document,
    run_tokenized,
    tokenized_documents,
    write_tiny_bert,
)
from families import make_tokenizer

from attnmix.core.statistics import Draws, Resampled, Sums
from attnmix.core.store import texts as texts_store
from attnmix.core.store import writers
from attnmix.core.store.runs import Run
from attnmix.measures import engine, mixing_tables
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.controls import shuffled_words
from attnmix.measures.documents import Corpus, Document, read_reviews
from attnmix.measures.identities import SAMPLED_IDENTITIES
from attnmix.measures.ratios import RATIOS
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.encoding import PASS_COST_TOKENS, batches_by_tokens
from attnmix.runs.tokens import write_tokens
from stages import measure

MANY, FEW = 100, 20
BLOCK_TEXTS = 10
"""Number of texts that are in memory at a time in the memory test."""
LAYERS = 2
SETTINGS: dict[str, Any] = {"gradient_documents": 1, "gradient_max_length": 5, "matrices": []}


def prepare(workspace: Workspace, documents: int, name: str = "workspace", length: int = 3, **settings: int) -> Path:
    """Return a folder with the inputs of `measure`: two tiny models, and `documents` reviews of `length` words each."""
    capture = {"documents": [3], "texts": ["time flies ."], "max_length": 20, "batch_tokens": 40}
    folder = workspace(name, measure=SETTINGS | {"documents": documents} | settings, capture=capture)
    for number, checkpoint in enumerate(("pretrained", "finetuned")):
        write_tiny_bert(folder / "models" / checkpoint, seed=number, layers=LAYERS)
    words, labels = ["the", "film", "was", "so", "very", "good", "."], np.arange(documents) % 2
    texts = [" ".join((2 * words)[i % 5 :][:length]) for i in range(documents)]
    (folder / "data/reviews").mkdir(parents=True)
    reviews = pd.DataFrame({"text": texts, "label": labels, "label_name": labels.astype(str)})
    reviews.to_parquet(folder / "data/reviews/test.parquet", index=False)
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use small blocks, and compute measures once per text length, to observe the stage's own memory."""
    monkeypatch.setattr(texts_store, "ROW_GROUP_TEXTS", BLOCK_TEXTS)
    monkeypatch.setattr(mixing_tables, "CHUNK_DOCUMENTS", BLOCK_TEXTS)
    monkeypatch.setattr(writers, "MIN_GROUP_ROWS", BLOCK_TEXTS)  # for the table of token ratios
    known: dict[Any, Any] = {}

    def reuse_results(self: BatchMeasurer, name: str, method: Any, *arguments: Any) -> list[Any]:
        """Call a method for the first text of each length only, and return its results for all texts of this length."""
        index = 1 if name == "control_sums" else 0  # the documents follow the name of a control
        options, documents = arguments[:index], arguments[index]
        keys = [(name, *options, self.base.name_or_path, len(document)) for document in documents]
        for key, document in zip(keys, documents, strict=True):
            if key not in known:
                (known[key],) = method(self, *options, [document])
        return [known[key] for key in keys]

    original_start = BatchMeasurer.start

    def measure_one(self: BatchMeasurer, *arguments: Any) -> Any:
        return original_start(self, *arguments).wait_for_results()

    def start(self: BatchMeasurer, *arguments: Any) -> Any:
        measures = reuse_results(self, "measures", measure_one, *arguments)
        return SimpleNamespace(wait_for_results=lambda: measures)

    control_sums = partialmethod(reuse_results, "control_sums", BatchMeasurer.control_sums)
    monkeypatch.setattr(BatchMeasurer, "control_sums", control_sums)
    monkeypatch.setattr(BatchMeasurer, "start", start)


@pytest.fixture
def little_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collect garbage before each mean.

    NumPy parses the header of each file into a syntax tree, whose cycles stay in memory until the collector runs.
    """
    resample = Draws.resample

    def collect_and_resample(self: Draws, chunks: Iterable[Sums]) -> Resampled:
        gc.collect()
        return resample(self, chunks)

    monkeypatch.setattr(Draws, "resample", collect_and_resample)


def peak(workspace: Workspace, documents: int, run: int) -> int:
    """Return the peak of traced memory, including NumPy's, while `documents` texts are measured."""
    # Separate parameters limit the numbers of texts with gradients, parts and exchanged tokens.
    few = {"gradient_documents": 0, "parts_documents": 1, "exchange_documents": 1}
    prepare(workspace, documents, f"{documents} in run {run}", **few)
    gc.collect()
    tracemalloc.start()
    run_tokenized(measure)
    _, reached = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return reached


@pytest.mark.long
def test_memory_does_not_grow_with_documents(
    workspace: Workspace, quick: None, little_garbage: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Occasional reallocations of tables increase a peak, so the smaller peak of two runs is compared.

    Tracing makes the runs slow, so the second run with many texts is omitted if the first is within the limit.
    """
    monkeypatch.setattr("attnmix.measures.variance_shares.MAX_TEXTS", FEW)  # all pairs of these texts are in memory
    few = min(peak(workspace, FEW, run) for run in range(2))
    # The sums of a text (15 kB) are in files. Memory contains the row of each text in the table of texts, its counts in
    # the bootstrap samples, and temporary arrays.
    limit = few + (MANY - FEW) * (2500 + BOOTSTRAP_SAMPLES)
    many = peak(workspace, MANY, 0)
    if many >= limit:
        many = peak(workspace, MANY, 1)
    assert many < limit
    assert Run(Path()).table("measure/mixing")["documents"].unique().tolist() == [MANY]
    assert len(Run(Path()).table("measure/mixing_by_review")) == 2 * MANY * LAYERS * len(RATIOS)


def test_blocks_do_not_change_results(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    # All texts have 12 tokens, so that a text's vectors are bitwise identical at any position in a batch.
    prepare(workspace, 8, length=10)
    run_tokenized(measure)
    whole = {path: pd.read_csv(path) for path in sorted(Run(Path()).tables.rglob("*.csv"))}
    tokens = Run(Path()).ratios()
    prepare(workspace, 8, "in blocks", length=10)
    monkeypatch.setattr(texts_store, "ROW_GROUP_TEXTS", 3)
    monkeypatch.setattr(engine, "IDENTITY_TEXTS", 3)
    run_tokenized(measure)
    checked = Run(Path()).table("measure/identities").set_index("identity")["documents"]
    assert set(checked[list(SAMPLED_IDENTITIES)]) <= {3, 4}  # the longest text is always included
    assert set(checked.drop(list(SAMPLED_IDENTITIES))) == {8}
    for path, table in whole.items():
        if path.stem != "identities":
            pd.testing.assert_frame_equal(pd.read_csv(path), table, check_exact=True, obj=path.stem)
    pd.testing.assert_frame_equal(Run(Path()).ratios(), tokens, check_exact=True)


def test_corpus_returns_its_documents(tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts_store, "ROW_GROUP_TEXTS", 4)
    generator, texts = np.random.default_rng(0), []
    for number in range(11):
        text = " ".join(generator.choice(["film", "good", "flies"], generator.integers(1, 9)))
        flags = {"measured": True, "removed": number == 10, "label_name": "a"}
        texts.append({"document": f"test/{number}", "text": text, "label": number % 3, "predicted_label": 0} | flags)
    files = texts_store.TokenizedFiles(tmp_path)
    removed_alone = texts[0] | {"measured": False, "removed": True}
    write_tokens(iter([*texts, removed_alone]), 20, tiny_bert, files)
    corpus, tokenizer = Corpus(files), load_tokenizer(tiny_bert)
    assert len(corpus) == 11
    documents = [corpus.document(number) for number in range(11)]
    for document, text in zip(documents, texts, strict=True):
        assert document.ids.tolist() == tokenizer(text["text"])["input_ids"]
        assert document.words.tolist() == [-1, *range(len(document) - 2), -1]
        assert (document.name, document.label) == (text["document"], text["label"])
    batches = [task.numbers for task in engine.batch_tasks(corpus, 12)]
    assert sorted(number for batch in batches for number in batch) == list(range(11))
    for batch in batches:
        lengths = [len(documents[number]) for number in batch]
        assert len(batch) * max(lengths) <= 12
    assert [len(range(11)[corpus.rows(group)]) for group in corpus.row_groups] == [4, 4, 3]
    assert [document.name for document in read_reviews("removed", files)] == ["test/0", "test/10"]


TEXT = "Unforgettably good, isn't it? A film about forgetfulness and unforgettable endings."


@pytest.fixture
def document(default_weights: Path) -> Document:
    (actual,) = tokenized_documents(load_tokenizer(default_weights), {"test/0": TEXT}, 60)
    return actual


@pytest.mark.parametrize("text", [" film was good", "film was good", ". film was"])
def test_first_word_has_number_0(text: str) -> None:
    (actual,) = tokenized_documents(make_tokenizer("gpt2"), {"test/0": text}, 60)
    numbers = actual.words[actual.words >= 0]
    assert np.unique(numbers).tolist() == [0, 1, 2]
    assert (np.diff(numbers) >= 0).all()


def test_shuffling_keeps_words_and_special_tokens(document: Document) -> None:
    shuffled = shuffled_words(document, 111)
    special = document.words < 0
    for before, after in ((document.ids, shuffled.ids), (document.words, shuffled.words)):
        np.testing.assert_array_equal(after[special], before[special])
        np.testing.assert_array_equal(np.sort(after), np.sort(before))
    assert (shuffled.ids != document.ids).sum() > len(document) / 2
    changes = np.flatnonzero(np.diff(shuffled.words[~special]))
    words = int(document.words.max()) + 1
    assert len(changes) == words - 1  # words are contiguous
    for number in range(words):
        before, after = document.words == number, shuffled.words == number
        np.testing.assert_array_equal(shuffled.ids[after], document.ids[before])
        np.testing.assert_array_equal(shuffled.classes[after], document.classes[before])
    assert shuffled.name == document.name


def test_shuffled_order_follows_from_seed_and_name() -> None:
    plain = plain_document(range(8))
    orders = {
        (name, seed): shuffled_words(replace(plain, name=name), seed).ids.tolist()
        for name, seed in product(("test/0", "test/1"), (0, 1))
    }
    assert len(set(map(tuple, orders.values()))) == 4
    assert orders["test/0", 0] == [7, 0, 4, 6, 3, 2, 1, 5]


def cost(batches: list[list[int]], lengths: list[int]) -> int:
    """Return the number of tokens in all batches, including padding, plus a constant for each batch."""
    return sum(len(batch) * max(lengths[i] for i in batch) + PASS_COST_TOKENS for batch in batches)


def fits(batch: list[int], lengths: list[int], most: int) -> bool:
    """Return True if a batch contains only one text, or at most `most` tokens including padding."""
    return len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= most


@pytest.mark.parametrize("seed", range(8))
def test_batches_of_sorted_texts_have_minimal_cost(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, 513, size=9).tolist()
    most = int(generator.integers(200, 3000))
    batches = batches_by_tokens(lengths, most)
    assert sorted(chain.from_iterable(batches)) == list(range(9))
    assert all(fits(batch, lengths, most) for batch in batches)
    # Compare with all divisions of the sorted texts into consecutive batches.
    order = sorted(range(9), key=lengths.__getitem__)
    costs = []
    for number in range(9):
        for cuts in combinations(range(1, 9), number):
            division = [order[low:high] for low, high in zip((0, *cuts), (*cuts, 9), strict=True)]
            if all(fits(batch, lengths, most) for batch in division):
                costs.append(cost(division, lengths))
    assert cost(batches, lengths) == min(costs)


def test_equal_lengths_fill_batches() -> None:
    assert [len(batch) for batch in batches_by_tokens([100] * 25, 1000)] in ([10, 10, 5], [5, 10, 10], [10, 5, 10])
    assert batches_by_tokens([], 100) == []

"""Measures of many documents: what is in memory does not grow with their number, and blocks change no number."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import Workspace, run_tokenized, write_tiny_bert

from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.documents import Corpus
from attnmix.measures.ratios import RATIOS
from attnmix.models.loading import load_tokenizer
from attnmix.store import tokens as tokens_store
from attnmix.store.runs import Run
from attnmix.store.writers import write_plot
from stages import measure
from stages.tokenize import write_tokens

MANY, FEW = 200, 20
SETTINGS: dict[str, Any] = {"gradient_documents": 1, "gradient_max_length": 5, "matrices": []}


def prepare(workspace: Workspace, documents: int, name: str = "workspace", length: int = 3) -> Path:
    """A folder with so many reviews, of one length."""
    folder = workspace(
        name,
        measure=SETTINGS | {"documents": documents},
        capture={"documents": [3], "texts": ["time flies ."], "max_length": 20, "batch_tokens": 40},
    )
    for number, checkpoint in enumerate(("pretrained", "finetuned")):
        write_tiny_bert(folder / "models" / checkpoint, seed=number)
    texts = [" ".join(["the", "film", "was", "so", "very", "good", "."][i % 5 :][:length]) for i in range(documents)]
    labels = np.arange(documents) % 2
    (folder / "data/reviews").mkdir(parents=True)
    reviews = pd.DataFrame({"text": texts, "label": labels, "label_name": labels.astype(str)})
    reviews.to_parquet(folder / "data/reviews/test.parquet", index=False)
    return folder


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each length of a text the model is asked once; blocks are small."""
    monkeypatch.setattr(tokens_store, "BLOCK", 10)
    known: dict[Any, Any] = {}

    def quickly(name: str) -> None:
        method = getattr(BatchMeasurer, name)

        def measured(self: BatchMeasurer, *arguments: Any) -> list[Any]:
            *options, documents = arguments
            for document in documents:
                key = (name, str(self.folder), len(document), document.measured)
                if key not in known:
                    (known[key],) = method(self, *options, [document])
            return [known[name, str(self.folder), len(document), document.measured] for document in documents]

        monkeypatch.setattr(BatchMeasurer, name, measured)

    quickly("measures")
    quickly("control_sums")


def peak(workspace: Workspace, documents: int) -> int:
    """Bytes that Python's allocations, NumPy's among them, reach while so many are measured."""
    prepare(workspace, documents, f"of {documents}")
    tracemalloc.start()
    run_tokenized(measure)
    reached = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return reached


@pytest.mark.long
def test_memory_does_not_grow_with_the_documents(workspace: Workspace, quick: None) -> None:
    peak(workspace, 10)  # what is loaded once
    few, many = peak(workspace, FEW), peak(workspace, MANY)
    # A row of the table of texts, and arrays for a moment: a twentieth of what a document's sums are.
    assert many - few < (MANY - FEW) * 2500
    assert Run(Path()).table("measure/mixing")["documents"].unique().tolist() == [MANY]
    assert len(Run(Path()).table("measure/mixing_by_review")) == 2 * MANY * 3 * len(RATIOS)


def test_blocks_change_no_number(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    # All texts have one length, so that the same ones share a batch of two in both runs.
    prepare(workspace, 12)
    run_tokenized(measure)
    whole = {path: pd.read_csv(path) for path in sorted(Run(Path()).tables.rglob("*.csv"))}
    tokens = Run(Path()).ratios()
    prepare(workspace, 12, "in blocks")
    monkeypatch.setattr(tokens_store, "BLOCK", 5)
    run_tokenized(measure)
    for path, table in whole.items():
        if path.stem != "identities":
            pd.testing.assert_frame_equal(pd.read_csv(path), table, atol=2e-6, obj=path.stem)
    pd.testing.assert_frame_equal(Run(Path()).ratios(), tokens, atol=1e-6)


def test_a_corpus_gives_back_its_documents(tmp_path: Path, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_store, "BLOCK", 4)
    numbers, texts = np.random.default_rng(0), []
    for number in range(11):
        text = " ".join(numbers.choice(["film", "good", "flies"], numbers.integers(1, 9)))
        flags = {"captured": number == 0, "measured": number != 5, "removed": number == 10}
        texts.append({"document": f"test/{number}", "text": text, "label": number % 3, "label_name": "a", **flags})
    texts[5]["captured"] = True
    monkeypatch.chdir(tmp_path)
    write_tokens(iter([*texts, texts[0] | {"captured": False, "measured": False}]), 20, tiny_bert, Run(tmp_path))
    found, tokenizer = Corpus(Run(tmp_path)), load_tokenizer(tiny_bert)
    assert len(found) == 11
    assert found.captured.nonzero()[0].tolist() == [0, 5]
    documents = [found.document(number) for number in range(11)]
    for document, text in zip(documents, texts, strict=True):
        assert document.ids.tolist() == tokenizer(text["text"])["input_ids"]
        assert document.words.tolist() == [-1, *range(len(document) - 2), -1]
        assert (document.name, document.label, document.measured) == (text["document"], text["label"], text["measured"])
    batches = [batch for block in found.blocks for batch in found.batches(block, 12, measured=True)]
    assert sorted(number for batch in batches for number in batch) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    for batch in batches:
        lengths = [len(documents[number]) for number in batch]
        assert len(batch) * max(lengths) <= 12
    assert found.measured_by_block() == {0: 4, 1: 3, 2: 3}


def test_a_long_table_is_written_and_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    table = pd.DataFrame({"name": list("abcabc"), "layer": [1, 1, 1, 2, 2, 2], "mean": np.arange(6) / 7})
    write_plot("measure/whole", table, run.tables)
    write_plot("measure/parts", (table.iloc[start : start + 2] for start in (0, 2, 4)), run.tables)
    assert (run.tables / "measure/parts.csv").read_bytes() == (run.tables / "measure/whole.csv").read_bytes()
    monkeypatch.setattr("attnmix.store.runs.CSV_PART_ROWS", 2)
    found = run.table_rows("measure/parts", {"name": "b", "layer": 2})
    assert found["mean"].tolist() == [0.571429]


def test_needed_disk_is_known_before_anything_is_measured(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "matrices", ["alti", "globenc"])
    folder = prepare(workspace, 30)
    estimates: list[int] = []
    monkeypatch.setattr(measure, "check_disk", lambda _what, needed, *_others: estimates.append(needed))
    monkeypatch.setattr(measure, "clear", lambda _folder: None)
    run_tokenized(measure)
    files = (folder / ".unfinished").rglob("measures-*.npz")
    sums = sum(array.nbytes for path in files for array in dict(np.load(path)).values())
    published = sum(path.stat().st_size for path in (folder / "features/measure").rglob("c/**/*") if path.is_file())
    assert len(estimates) == 2  # before each checkpoint
    # The estimate leaves out arrays that are small beside vectors, which this model's are not.
    assert 0.6 < estimates[0] / (sums + published) < 1

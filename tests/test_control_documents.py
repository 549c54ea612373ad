"""`measure.control_documents` limits slow measures to a sample, and the results equal those of the sample alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import (
    BOOTSTRAP_SAMPLES,
    digest,
    plain_document,
    run_tokenized,
    write_parameters,
    write_reviews,
    write_tiny_bert,
)

from attnmix.core.errors import InputError
from attnmix.core.statistics import Resampled, resample
from attnmix.core.store import texts as texts_store
from attnmix.core.store.runs import Run
from attnmix.measures.batches import STATISTICS
from attnmix.measures.controls import CONTROLS
from attnmix.measures.documents import Texts
from attnmix.measures.engine import Task, batch_tasks, sampled_tasks
from attnmix.measures.text_pairs import PAIR_SOURCES
from attnmix.page.sentences import describe_samples
from attnmix.runs.measure import CheckpointWork, WorkTimes
from stages import measure
from stages.common.parameters import Parameters, read_parameters
from stages.common.resume import unfinished_folder

DOCUMENTS, SAMPLE = 12, 7
ROW_GROUP_TEXTS = 5  # the sample has texts of several row groups
TABLES_OF_ALL_TEXTS = ("mixing", "mixing_weighted", "mixing_by_review")
OWN_PASSES = ("shuffled_words", "random_weights")
GROUPINGS_OF_ALL_TEXTS = ("token_class", "position", "length")
CONTROLS_BY_NAME_OR_CORPUS = ("shuffled_words", "corpus_value")
"""Controls that depend on the name of a text or on all texts, and therefore differ if only the sample is measured."""


class FinishedRun(NamedTuple):
    """A finished run; `sums` contains the sums of each text by checkpoint, kind of task and index of the text."""

    folder: Path
    sums: dict[tuple[str, str, int], dict[str, Any]]

    def table(self, name: str) -> pd.DataFrame:
        return Run(self.folder).table(f"measure/{name}")

    def texts_with(self, quantity: str) -> list[int]:
        """Return the sorted indices of the texts for which a quantity is available."""
        return sorted({number for (_, _, number), sums in self.sums.items() if quantity in sums})


def run_measure(folder: Path, reviews: pd.DataFrame | None = None, **settings: Any) -> FinishedRun:
    """Run `tokenize` and `measure` in a new folder with two models; `reviews` replaces the test reviews."""
    quick = {"exchange_documents": 0, "parts_documents": 0, "matrices": []}
    measured = {"documents": DOCUMENTS, "controls": list(CONTROLS)} | quick | settings
    folder.mkdir()
    write_parameters(folder, measure=measured, capture={"documents": [0], "max_length": 60, "batch_tokens": 100})
    write_reviews(folder / "data/reviews")
    test_file = folder / "data/reviews/test.parquet"
    if reviews is None:
        reviews = pd.read_parquet(test_file)
        is_long = reviews.index % 3 == 0  # more than 32 tokens, the limit of the first length class
        reviews["text"] = reviews["text"].mask(is_long, reviews["text"] + " it was not so dull ." * 5)
    reviews.to_parquet(test_file, index=False)
    for seed, checkpoint in enumerate(("pretrained", "finetuned")):
        write_tiny_bert(folder / "models" / checkpoint, seed=seed, layers=2)
    sums: dict[tuple[str, str, int], dict[str, Any]] = {}
    write = CheckpointWork.write

    def write_and_keep(work: CheckpointWork, kind: str, task: Task, rows: Sequence[dict[str, Any]]) -> None:
        for number, row in zip(task.numbers, rows, strict=True):
            sums[work.checkpoint, kind, number] = row
        write(work, kind, task, rows)

    with pytest.MonkeyPatch.context() as patch, chdir(folder):
        patch.setattr(CheckpointWork, "write", write_and_keep)
        run_tokenized(measure)
    return FinishedRun(folder, sums)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, FinishedRun]:
    """Return three runs.

    The first run includes slow measures of all texts; the second one has the same texts, but slow measures of a sample
    only; and the third one has only the sampled texts, with slow measures of all of them.
    """
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts_store, "ROW_GROUP_TEXTS", ROW_GROUP_TEXTS)
        all_texts = run_measure(folder / "all")
        sampled = run_measure(folder / "sampled", control_documents=SAMPLE)
        sample = sampled.texts_with("geometry")
        reviews = pd.read_parquet(sampled.folder / "data/reviews/test.parquet").iloc[sample]
        alone = run_measure(folder / "alone", reviews)
    return {"all": all_texts, "sampled": sampled, "alone": alone}


def check_equal(actual: pd.DataFrame, expected: pd.DataFrame) -> None:
    """Assert that tables are equal up to rounding errors due to different batches."""
    assert len(expected)
    pd.testing.assert_frame_equal(
        actual.reset_index(drop=True), expected.reset_index(drop=True), check_exact=False, rtol=2e-5, atol=3e-6
    )


def test_sample_has_all_labels_and_lengths(runs: dict[str, FinishedRun]) -> None:
    sampled = runs["sampled"]
    sample = sampled.texts_with("geometry")
    assert len(sample) == SAMPLE
    for quantity in {*STATISTICS, *OWN_PASSES} - {*PAIR_SOURCES}:
        assert sampled.texts_with(quantity) == sample, quantity
    assert sampled.texts_with("to_first") == list(range(DOCUMENTS))
    texts = Run(sampled.folder).drawn_reviews.documents
    strata = pd.DataFrame({"label": texts["label"], "is_long": texts["tokens"] > 32})
    assert len(strata.drop_duplicates()) == 4
    assert len(strata.iloc[sample].drop_duplicates()) == 4


def test_ratios_are_those_of_all_texts(runs: dict[str, FinishedRun]) -> None:
    sampled, all_texts = runs["sampled"], runs["all"]
    for name in TABLES_OF_ALL_TEXTS:
        check_equal(sampled.table(name), all_texts.table(name))
    for grouping in GROUPINGS_OF_ALL_TEXTS:
        actual, expected = (run.table("mixing_by_group") for run in (sampled, all_texts))
        check_equal(actual[actual["grouping"] == grouping], expected[expected["grouping"] == grouping])
    actual, expected = (run.table("geometry") for run in (sampled, all_texts))
    to_first = "attention_to_first"
    check_equal(actual[actual["measure"] == to_first], expected[expected["measure"] == to_first])
    check_equal(Run(sampled.folder).ratios(), Run(all_texts.folder).ratios())
    metrics = Run(sampled.folder).metrics("measure")
    expected_metrics = Run(all_texts.folder).metrics("measure")
    assert metrics["documents"] == DOCUMENTS
    ratio = expected_metrics["finetuned"]["attnresln_n"]
    assert metrics["finetuned"]["attnresln_n"] == pytest.approx(ratio, abs=3e-6)


def test_slow_measures_and_intervals_are_those_of_sample_alone(runs: dict[str, FinishedRun]) -> None:
    sampled = runs["sampled"]
    alone = runs["alone"]
    actual, expected = (run.table("geometry") for run in (sampled, alone))
    to_first = "attention_to_first"
    check_equal(actual[actual["measure"] != to_first], expected[expected["measure"] != to_first])
    assert set(actual.query("measure == 'effective_rank'")["documents"]) == {SAMPLE}
    actual, expected = (run.table("mixing_by_group") for run in (sampled, alone))
    check_equal(actual[actual["grouping"] == "head"], expected[expected["grouping"] == "head"])
    actual, expected = (run.table("mixing_controls") for run in (sampled, alone))
    actual = actual[~actual["control"].isin(CONTROLS_BY_NAME_OR_CORPUS)]
    expected = expected[~expected["control"].isin(CONTROLS_BY_NAME_OR_CORPUS)]
    check_equal(actual, expected)
    assert set(actual["documents"]) == {SAMPLE}


@pytest.mark.parametrize(("control", "kind"), [("shuffled_words", "shuffled_words"), ("corpus_value", "measures")])
@pytest.mark.parametrize("checkpoint", ["pretrained", "finetuned"])
def test_other_controls_have_values_of_run_of_all_texts(
    runs: dict[str, FinishedRun], control: str, kind: str, checkpoint: str
) -> None:
    all_sums, sample = runs["all"].sums, runs["sampled"].texts_with("geometry")
    seed = read_parameters(runs["all"].folder / "params.yaml").seed

    def resample_texts(kind: str, name: str) -> Resampled:
        of_texts = [all_sums[checkpoint, kind, number][name] for number in sample]
        values = np.stack([sums.values for sums in of_texts])
        counts = np.stack([sums.counts for sums in of_texts])
        if name == "ratios_by_token_class":
            values = values.sum(1)
            counts = counts.sum(1)
        return resample(values, counts, BOOTSTRAP_SAMPLES, seed)

    expected = resample_texts(kind, control)
    difference = resample_texts("measures", "ratios_by_token_class").minus(expected)
    table = runs["sampled"].table("mixing_controls").query("control == @control and checkpoint == @checkpoint")
    for column, values in (
        ("mean", expected.interval().mean),
        ("ci_low", expected.interval().low),
        ("ci_high", expected.interval().high),
        ("ratio_minus_control", difference.interval().mean),
        ("ratio_minus_control_low", difference.interval().low),
    ):
        np.testing.assert_allclose(table[column], values.ravel(), atol=5e-6, err_msg=column)
    assert set(table["documents"]) == {SAMPLE}
    assert set(table["tokens"]) == {Run(runs["all"].folder).drawn_reviews.documents["tokens"].iloc[sample].sum()}


def test_batches_have_texts_of_one_kind() -> None:
    texts = Texts([plain_document(range(length)) for length in (3, 9, 4, 5, 3, 8)])
    tasks = list(batch_tasks(texts, 12, sample=[0, 1, 3]))
    assert len({task.name for task in tasks}) == len(tasks)
    for is_sampled, expected in ((True, [0, 1, 3]), (False, [2, 4, 5])):
        numbers = [number for task in tasks if task.is_sampled == is_sampled for number in task.numbers]
        assert sorted(numbers) == expected
    assert sampled_tasks(texts, 12, [0, 1, 3]) == [task for task in tasks if task.is_sampled]


def test_sample_of_all_texts_has_bytes_of_run_without_sample(
    runs: dict[str, FinishedRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(texts_store, "ROW_GROUP_TEXTS", ROW_GROUP_TEXTS)
    with caplog.at_level("INFO"):
        repeated = run_measure(tmp_path / "repeated", control_documents=DOCUMENTS)
    assert digest(Run(repeated.folder).tables) == digest(Run(runs["all"].folder).tables)
    rates = r"[\d,]+ tokens/s, [\d,]+\.\d MB/s stored \([\d,]+ MB/s while writing\)"
    limits = r"limited by: (arithmetic|disk) \((arithmetic|disk) \d+%, (arithmetic|disk) \d+% of the time\)"
    assert sum(bool(re.fullmatch(f"{rates}; {limits}", message)) for message in caplog.messages) == 1


def test_rates_and_shares_of_known_times() -> None:
    times = WorkTimes(seconds=10.0, tokens=5000, written_bytes=40_000_000, writing_seconds=2.0, device_seconds=5.0)
    gpu = times.describe(torch.device("cuda"))
    rates = "500 tokens/s, 4.0 MB/s stored (20 MB/s while writing)"
    assert gpu == f"{rates}; limited by: arithmetic (arithmetic 50%, host 30%, disk 20% of the time)"
    cpu = times.describe(torch.device("cpu"))
    assert cpu == f"{rates}; limited by: arithmetic (arithmetic 80%, disk 20% of the time)"


def test_page_states_size_of_sample(runs: dict[str, FinishedRun]) -> None:
    sentence = describe_samples(Run(runs["sampled"].folder), DOCUMENTS)
    sampled = (
        f"Ratios are means over the {DOCUMENTS} measured test reviews, weighted by tokens, and controls over {SAMPLE}"
    )
    assert sentence.startswith(sampled)
    sentence = describe_samples(Run(runs["all"].folder), DOCUMENTS)
    assert sentence.startswith(f"Ratios and controls are means over the {DOCUMENTS} measured test reviews, weighted by")


def test_unfinished_work_depends_on_sample(runs: dict[str, FinishedRun]) -> None:
    folders = set()
    for size in (None, 5, 6):
        parameters = Parameters(measure={"control_documents": size})
        folders.add(unfinished_folder("measure", parameters, runs["all"].folder).name)
    assert len(folders) == 3


@pytest.mark.parametrize("value", [0, -1, "half", 2.5])
def test_invalid_size_is_one_error(value: Any, tmp_path: Path) -> None:
    write_parameters(tmp_path, measure={"control_documents": value})
    with pytest.raises(InputError, match=r"measure\.control_documents: .* is not allowed"):
        read_parameters(tmp_path / "params.yaml")

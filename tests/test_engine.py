"""The engine computes every requested quantity once, with the expected number of forward passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import REPOSITORY
from transformers import BertModel

import attnmix
from attnmix.core import progress
from attnmix.core.names import DEFAULT_CONTROL_NAMES
from attnmix.core.progress import show_progress, track
from attnmix.measures import batches
from attnmix.measures.batches import STATISTICS, BatchMeasurer
from attnmix.measures.controls import SAME_PASS
from attnmix.results.result import IDENTITY_TEXTS

TEXTS = ["time flies like an arrow", "the film was good", "not good", "a film"]
PAIRS = [("the film was good", "it was not bad"), ("a film", "an arrow")]


@dataclass
class Passes:
    """The number of tokens in each forward pass of all BERT models since the last `take`."""

    tokens: list[int] = field(default_factory=list)

    def take(self) -> list[int]:
        """Return the numbers and clear the list."""
        tokens, self.tokens = self.tokens, []
        return tokens


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    """Record the forward passes of all BERT models."""
    counted = Passes()
    forward = BertModel.forward

    def count(self: Any, input_ids: Any = None, *arguments: Any, **options: Any) -> Any:
        counted.tokens.append(input_ids.numel())
        return forward(self, input_ids, *arguments, **options)

    monkeypatch.setattr(BertModel, "forward", count)
    return counted


@pytest.fixture
def model(tiny_bert: Path) -> attnmix.Model:
    return attnmix.load(str(tiny_bert))


def test_measure_uses_one_pass_per_batch_and_control(model: attnmix.Model, passes: Passes) -> None:
    signature = 1  # pass that detects later changes to the model
    attnmix.measure(model, TEXTS)
    assert len(passes.take()) == 1 + signature
    constants = 1  # pass of a single token
    attnmix.measure(model, TEXTS, controls=["text_mean_value", "without_special_sources"])
    assert len(passes.take()) == 1 + constants + signature
    attnmix.measure(model, TEXTS, controls=["shuffled_words", "random_weights"])
    assert len(passes.take()) == 3 + signature
    corpus = 1
    attnmix.measure(model, TEXTS, controls=["corpus_value"])
    assert len(passes.take()) == corpus + constants + 1 + signature


CALLS: dict[str, Callable[[attnmix.Measures, Path], Any]] = {
    "sinks": lambda result, _: result.sinks(),
    "own_share": lambda result, _: result.own_share(),
    "parts": lambda result, _: result.parts(text=1),
    "parts of rows": lambda result, _: result.parts(rows=[1, 2]),
    "matrix": lambda result, _: result.matrix("alti", text=2),
    "page": lambda result, folder: result.to_html(folder / "page.html").read_bytes(),
}


@pytest.mark.parametrize("name", CALLS)
def test_repeated_call_needs_no_pass(name: str, model: attnmix.Model, passes: Passes, tmp_path: Path) -> None:
    result = attnmix.measure(model, TEXTS)
    passes.take()
    first = CALLS[name](result, tmp_path)
    assert passes.take()
    second = CALLS[name](result, tmp_path)
    assert not passes.take()
    if isinstance(first, pd.DataFrame):
        pd.testing.assert_frame_equal(first, second, check_exact=True)
    else:
        assert first == second if isinstance(first, bytes) else first.identical(second)


def test_own_share_of_a_short_text_needs_one_pass(model: attnmix.Model, passes: Passes) -> None:
    result = attnmix.measure(model, TEXTS)
    passes.take()
    result.own_share()
    check = 1  # pass that detects changes to the model
    assert len(passes.take()) == len(TEXTS) + check


def test_expensive_identities_are_checked_in_few_texts(model: attnmix.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []
    start = BatchMeasurer.start

    def record(self: Any, documents: Any, sampled: Any, statistics: Any) -> Any:
        checked.extend(len(document) for document, is_checked in zip(documents, sampled, strict=True) if is_checked)
        return start(self, documents, sampled, statistics)

    monkeypatch.setattr(BatchMeasurer, "start", record)
    attnmix.measure(model, [*TEXTS, *8 * ["a good film"]])
    assert IDENTITY_TEXTS <= len(checked) <= IDENTITY_TEXTS + 1
    assert max(checked) == len(model.tokenizer(TEXTS[0])["input_ids"])  # the longest text


def test_page_computes_only_missing_passes(model: attnmix.Model, passes: Passes, tmp_path: Path) -> None:
    result = attnmix.measure(model, TEXTS)
    passes.take()
    page = result.to_html(tmp_path / "page.html").read_bytes()
    alone = passes.take()
    richer = attnmix.measure(model, TEXTS, controls=DEFAULT_CONTROL_NAMES)
    richer.own_share()
    passes.take()
    assert richer.to_html(tmp_path / "page.html").read_bytes() == page
    rest = passes.take()
    # The shuffled words and the parts of each text were already computed.
    assert len(alone) - len(rest) >= 1 + len(TEXTS)


def test_computed_values_are_saved_and_loaded(model: attnmix.Model, passes: Passes, tmp_path: Path) -> None:
    result = attnmix.measure(model, TEXTS)
    for call in CALLS.values():
        call(result, tmp_path)
    result.save(tmp_path / "result.zip")
    passes.take()
    loaded = attnmix.load_result(tmp_path / "result.zip")
    for name, call in CALLS.items():
        if name == "page":  # its maps need the model
            continue
        first, second = call(result, tmp_path), call(loaded, tmp_path)
        if isinstance(first, pd.DataFrame):
            pd.testing.assert_frame_equal(first, second, check_exact=True)
        else:
            assert first.identical(second)
    for text, heads in result.measurements.heads.items():
        for name, array in heads.items():
            np.testing.assert_array_equal(loaded.measurements.heads[text][name], array)
    assert not passes.take()


@pytest.mark.parametrize("names", [[], ["sinks"], ["text_mean_value"], ["corpus_value", "steps"], list(STATISTICS)])
def test_pass_computes_requested_sums_only(
    names: list[str], model: attnmix.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = set[str]()
    functions = {
        "step_measures": "steps",
        "head_ratios": "by_head",
        "sink_measures": "sinks",
        "geometry_but_rank": "geometry",
        "source_ratios": "sources",
        "control_ratios": "controls",
    }

    def with_record(function: Callable[..., Any], statistic: str) -> Callable[..., Any]:
        """Return a function that also adds the name of its statistic to `computed`."""

        def record(*arguments: Any) -> Any:
            computed.add(statistic)
            return function(*arguments)

        return record

    for name, statistic in functions.items():
        monkeypatch.setattr(batches, name, with_record(getattr(batches, name), statistic))
    documents = attnmix.measure(model, TEXTS).documents
    computed.clear()
    with model.observed() as base:
        measurer = BatchMeasurer(base, ["attn_n", "layer_n"], model.pad_token_id)
        measurer.read_corpus([documents])
        every = measurer.measures(documents)
        computed.clear()
        some = measurer.measures(documents, None, names)
    controls = {name for name in SAME_PASS if name in names}
    expected = {name for name in functions.values() if name in names} | ({"controls"} if controls else set())
    assert computed - {"sources"} == expected
    for one, other in zip(some, every, strict=True):
        np.testing.assert_array_equal(one.ratios, other.ratios)
        assert one.statistics.keys() == {name for name in other.statistics if name in names}
        for name, array in one.statistics.items():
            np.testing.assert_allclose(array, other.statistics[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_long_loop_without_bar_is_announced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    for seconds, expected in ((0.1, ""), (1.5, "parts: about 30 s\n")):
        for number in track(range(20), "parts"):
            assert number < 20
            clock[0] += seconds
        assert capsys.readouterr().err == expected
    with show_progress("matrix", 3) as steps:
        for _ in range(3):
            clock[0] += 2.5
            steps.advance()
    assert capsys.readouterr().err == ""
    assert not sys.stderr.isatty()


THREADS = """
import json, sys, threading, torch
from attnmix.core.threads import few_threads
torch.set_num_threads(2)
others = []
with few_threads(10):
    inside = torch.get_num_threads()
    other = threading.Thread(target=lambda: others.append(torch.get_num_threads()))
    other.start(), other.join()
with few_threads(1000):
    many = torch.get_num_threads()
print(json.dumps([inside, others, many, torch.get_num_threads()]))
"""


@pytest.mark.parametrize(("policy", "inside"), [({}, 1), ({"OMP_WAIT_POLICY": "passive"}, 2)])
def test_short_passes_use_one_thread_if_threads_spin(policy: dict[str, str], inside: int) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
    command = [sys.executable, "-c", THREADS]
    run = subprocess.run(command, cwd=REPOSITORY, env=environment | policy, capture_output=True, check=True, text=True)
    assert json.loads(run.stdout) == [inside, [2], 2, 2]

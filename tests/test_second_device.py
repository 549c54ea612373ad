"""All torch computations on a second device match the CPU, and leave no tensor on the CPU.

`second_device` simulates the device without hardware, so CUDA's memory, speed and rounding are not tested. On a machine
with a GPU, `TEST_GPU=1 python -m pytest tests/test_second_device.py` uses this GPU instead.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import run_stages, tokenized_documents, toy_reviews, write_tiny_bert
from families import ALGEBRAS, each_family, tiny_folder
from second_device import DEVICE, DEVICE_RULES, REAL_GPU, counted
from transformers import AutoModelForSequenceClassification

import attnmix
from attnmix import interventions
from attnmix.core.arithmetic.environment import FASTEST
from attnmix.core.arithmetic.kernels import computed_on
from attnmix.core.device import CPU, device_name
from attnmix.core.names import POINTS
from attnmix.core.store.results import TextResults
from attnmix.core.store.runs import Run
from attnmix.faithfulness.attributions import Review, present_attributions
from attnmix.faithfulness.class_use import interventions as class_interventions
from attnmix.faithfulness.classifier import Classifier
from attnmix.faithfulness.probes import probes
from attnmix.measures.batches import BatchMeasurer, BatchPass
from attnmix.measures.contributions import DocumentMeasurer, contributions
from attnmix.measures.controls import random_base, shuffled_words
from attnmix.measures.documents import Texts
from attnmix.measures.engine import MEASURES, Engine, Measurements
from attnmix.measures.exchange import choose_positions, draw_exchanged_texts, measure_exchange
from attnmix.measures.heads import record_heads
from attnmix.measures.matrices import MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.models.capture_points import widths
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.encoding import padded
from attnmix.models.families import family_of
from attnmix.models.loading import load_base
from attnmix.runs.capture import Batch, TextRows, fill_rows
from attnmix.runs.text_results import load_measurer
from attnmix.serve import tokenized
from benchmarks.launches import works

# A GPU adds in a different order. Even on a CPU, one of T5's ratios differs from float64 by 0.0004.
TOLERANCE = 1e-3 if REAL_GPU else 1e-5
# Both results have float32 errors. On a CPU, DecompX of ModernBERT differs from float64 by 1.2e-5 in both arithmetics.
SCORE_TOLERANCE = 1e-3 if REAL_GPU else 2.5e-5
TEXTS = dict(zip("abcdef", toy_reviews(6, 4)["text"], strict=True))
Arrays = dict[str, Any]
# Operators that text models could call, and that `torch.use_deterministic_algorithms` rejects on a GPU. `cumsum` is
# excluded: deterministic mode rejects it only for floating-point numbers, and models apply it only to integer masks.
NOT_DETERMINISTIC_ON_CUDA = {
    *("aten::put_", "aten::histc", "aten::kthvalue", "aten::median.dim", "aten::nanmedian.dim"),
    "aten::bincount",
    *("aten::nll_loss2d_forward", "aten::index_reduce_", "aten::_embedding_bag", "aten::scatter_reduce"),
    *("aten::_adaptive_avg_pool2d_backward", "aten::grid_sampler_2d_backward", "aten::_ctc_loss_backward"),
}

counts_operators = pytest.mark.skipif(REAL_GPU, reason="only the simulated device has counts and switches")


def hide_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make attnmix use the CPU from now on."""
    monkeypatch.setattr(DEVICE_RULES, "available", False)
    monkeypatch.setenv("ATTNMIX_DEVICE", "cpu")


@pytest.fixture
def second_device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Make the second device visible to torch, and return this device."""
    if REAL_GPU:
        return DEVICE
    monkeypatch.setattr(DEVICE_RULES, "available", True)
    # By itself, accelerate recognises only the device types of known vendors.
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", str(DEVICE))
    # The second device needs no pinned memory, so the method that pins memory returns its tensor unchanged.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)
    return DEVICE


@pytest.fixture(params=[True, False], ids=["float64", "no_float64"])
def any_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, second_device: torch.device) -> Any:
    """Return the second device; each test runs with float64 and, except on a real GPU, without float64."""
    if REAL_GPU and not request.param:
        pytest.skip("this GPU has float64")
    monkeypatch.setattr(DEVICE_RULES, "float64", request.param)
    return second_device


def assert_same(found: Any, expected: Any, name: str = "", tolerance: float = TOLERANCE) -> None:
    """Assert that nested arrays and tables agree up to `tolerance`, with NaN at the same positions.

    For an array, the tolerance is relative to the largest absolute value of the array or 1, whichever is larger.
    """
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key, value in expected.items():
            assert_same(found[key], value, f"{name}/{key}", tolerance)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), name
        for number, value in enumerate(expected):
            assert_same(found[number], value, f"{name}/{number}", tolerance)
    elif isinstance(expected, pd.DataFrame):
        pd.testing.assert_frame_equal(found, expected, rtol=tolerance, atol=tolerance)
    else:
        largest = np.nanmax(np.abs(expected), initial=1)  # rounding errors of cancelling terms scale with the terms
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * largest, err_msg=name)


def measures(folder: Path, device: torch.device) -> Arrays:
    """Return the ratios, controls, sums, matrices, heads and derivatives of texts, and the vectors at each point."""
    tokenizer = load_tokenizer(folder)
    documents = tokenized_documents(tokenizer, TEXTS, 20)
    base = load_base(folder).to(device)

    batches = BatchMeasurer(base, list(RATIOS), tokenizer.pad_token_id)
    batches.read_corpus([documents])
    results = batches.measures(documents[:3], sampled=[True, False, True])
    arrays: Arrays = {each.document.name: [each.ratios, each.to_first, dict(each.statistics)] for each in results}
    arrays["controls"] = batches.control_sums("shuffled_words", [shuffled_words(each, 1) for each in documents[:2]])
    random = BatchMeasurer(random_base(folder, 1).to(device), list(RATIOS), tokenizer.pad_token_id)
    arrays["random"] = random.control_sums("random_weights", documents[:2])

    # Use 7 tokens of the first text; the derivatives also need 7 tokens of another text as donor.
    measurer = DocumentMeasurer(base, list(RATIOS), list(MATRICES))
    ids, other_ids = [each.ids[:7] for each in documents[:2]]
    arrays["matrices"] = {name: matrix.cpu().numpy() for name, matrix in measurer.contributions(ids).items()}
    arrays["derivatives"] = measurer.derivatives(ids, [other_ids], 2, 0)
    del arrays["derivatives"]["agreement"]  # rounding may exchange the ranks of almost equal numbers
    arrays["gains"] = measurer.gains()
    arrays["heads"] = record_heads(measurer.base, ids, measurer.layers)
    arrays["points"] = vectors(base, documents[0].ids.tolist())
    return arrays


def exchanged(folder: Path, device: torch.device) -> list[Any]:
    """Return the displacements of a text's vectors caused by exchanging tokens."""
    documents = tokenized_documents(load_tokenizer(folder), TEXTS, 20)
    base = load_base(folder).to(device)
    donors = draw_exchanged_texts(documents[0], documents, 0, None, donors=2, seed=1)
    positions = choose_positions(documents[0], 3, seed=1)
    return list(measure_exchange(base, documents[0], donors, positions, batch_tokens=60))


def vectors(base: Any, ids: list[int], precision: str = "fp32") -> dict[str, Any]:
    """Return the captured vectors of a text at every point."""
    points = family_of(base.config).present(POINTS)
    sites = widths(base, points)
    buffers = {site: torch.zeros(len(ids), width, device=base.device) for site, width in sites.items()}
    rows = slice(0, len(ids))
    fill_rows(base, [Batch(padded([ids], 0), [TextRows(0, rows, rows)])], buffers, precision)
    return {str(site): buffer.cpu().numpy() for site, buffer in buffers.items()}


def class_use(folder: Path, device: torch.device) -> Arrays:
    """Return all token scores, probe and class-lens results, and effects of interventions on the class."""
    classifier = Classifier(folder, device, 60)
    documents = tokenized_documents(classifier.tokenizer, TEXTS, 16)
    review = Review(classifier, documents[1], np.random.default_rng(0))
    arrays: Arrays = {name: each.scores(review) for name, each in present_attributions(classifier.family).items()}
    arrays["interventions"] = class_interventions(classifier, documents, 1)
    arrays["probes"] = probes(classifier, [("finetuned", classifier.base)], documents[:4], documents[4:], 1)
    return arrays


@pytest.mark.parametrize("name", each_family("bert", names=ALGEBRAS))
def test_measures_match_cpu(name: str, second_device: torch.device) -> None:
    folder = tiny_folder(name)
    with counted() as counts:
        found = measures(folder, second_device)
    assert not counts.operators.keys() & NOT_DETERMINISTIC_ON_CUDA
    assert_same(found, measures(folder, CPU))


@pytest.mark.parametrize("name", each_family("bart", names=ALGEBRAS))
def test_displacements_match_cpu(name: str, second_device: torch.device) -> None:
    assert_same(exchanged(tiny_folder(name), second_device), exchanged(tiny_folder(name), CPU))


@pytest.mark.parametrize("name", each_family("gpt2", names=ALGEBRAS))
def test_scores_and_class_use_match_cpu(name: str, second_device: torch.device) -> None:
    folder = tiny_folder(name)
    with counted() as counts:
        found = class_use(folder, second_device)
    assert not counts.operators.keys() & NOT_DETERMINISTIC_ON_CUDA
    assert_same(found, class_use(folder, CPU), tolerance=SCORE_TOLERANCE)


def user_model(folder: Path, device: torch.device) -> attnmix.model.Model:
    """Return a classifier in memory on `device`."""
    network = AutoModelForSequenceClassification.from_pretrained(folder).to(device)
    return attnmix.load(network, load_tokenizer(folder))


def called_from_python(model: attnmix.model.Model, folder: Path) -> Arrays:
    """Return results of the Python API, including results of edited attention."""
    result = attnmix.measure(model, list(TEXTS.values())[:2])
    arrays: Arrays = {"ratios": list(result.ratios_by_text), "by_layer": result.by_layer()}
    arrays["norm"] = result.matrix("norm", layer=1).to_numpy()
    run = attnmix.capture(model, list(TEXTS.values())[:2], folder, points=["layer_output"], dtype="float32")
    arrays["captured"] = run.features("layer_output").numpy()
    inputs = model.tokenizer(TEXTS["a"], return_tensors="pt").to(model.network.device)
    recorded: dict[int, torch.Tensor] = {}
    edits = {
        "heads": interventions.without_heads({1: [0]}),
        "edges": interventions.without_edges(slice(1, 3), slice(0, 2)),
        "mean": interventions.text_mean_values(torch.ones_like(inputs["input_ids"])),
        "recorded": interventions.recorded(recorded),
    }
    for name, edit in edits.items():
        with torch.no_grad(), model.intervene(edit) as network:
            arrays[name] = network(**inputs).logits.cpu().numpy()
    values = recorded[1].transpose(1, 2).flatten(-2)[0]
    eraser = interventions.class_eraser(values.cpu(), torch.arange(len(values)) % 2)
    chain = [interventions.mapped_values({1: eraser}), interventions.replaced_values({2: recorded[2].cpu()})]
    with torch.no_grad(), model.intervene(interventions.chained(*chain)) as network:
        arrays["erased"] = network(**inputs).logits.cpu().numpy()
    return arrays


@pytest.mark.parametrize(
    ("name", "any_device"),
    [
        ("bert", True),
        ("bert", False),
        # The tests above cover the measures of custom attention code, shared keys and cross-attention.
        *(pytest.param(name, True, marks=pytest.mark.families) for name in ("gpt_neo", "qwen3", "bart")),
        pytest.param("t5", False, marks=pytest.mark.families),
    ],
    indirect=["any_device"],
)
def test_attention_kinds_run_on_model_device(name: str, tmp_path: Path, any_device: torch.device) -> None:
    folder = tiny_folder(name)
    model = user_model(folder, any_device)
    found = called_from_python(model, tmp_path / "found")
    assert {parameter.device for parameter in model.network.parameters()} == {any_device}
    assert_same(found, called_from_python(user_model(folder, CPU), tmp_path / "expected"))


def test_named_model_is_loaded_on_the_pipeline_device(tiny_bert: Path, second_device: torch.device) -> None:
    assert attnmix.load(tiny_bert).network.device == second_device
    assert attnmix.load(tiny_bert, device="cpu").network.device == CPU


@pytest.mark.long  # computes the complete contents of a page
@counts_operators
def test_page_is_computed_on_device_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second_device: torch.device
) -> None:
    model = user_model(write_tiny_bert(tmp_path / "model", layers=2), second_device)
    hide_device(monkeypatch)
    with counted() as counts:
        page = attnmix.measure(model, "time flies like an arrow").to_html(tmp_path / "page.html")
    assert "second device of the tests" in page.read_text("utf-8")
    assert counts.operators["aten::addmm"]


@pytest.mark.long  # compiles the functions of the maps
def test_typed_text_is_measured_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, any_device: torch.device
) -> None:
    folder = write_tiny_bert(tmp_path / "model", layers=2)
    checkpoints = {"pretrained": folder, "finetuned": folder}
    found = typed_text_results(checkpoints)
    device = any_device if DEVICE_RULES.float64 else CPU
    assert found.metrics("measure")["computed_on"] == computed_on(FASTEST, device)
    hide_device(monkeypatch)
    expected = typed_text_results(checkpoints)
    assert_same(found.ratios, expected.ratios)
    for checkpoint in checkpoints:
        found_matrices = found.matrices_by_text[checkpoint, "text/0"]
        assert_same(found_matrices, expected.matrices_by_text[checkpoint, "text/0"])


def typed_text_results(checkpoints: dict[str, Path]) -> TextResults:
    """Return the results that the app computes for a typed text."""
    measurer = load_measurer(checkpoints)
    return measurer.results(tokenized(["time flies like an arrow"], measurer))


STAGES = ("download", "finetune", "tokenize", "capture", "inspect", "measure", "faithfulness")


@pytest.mark.long  # runs the pipeline twice
@pytest.mark.parametrize(
    ("any_device", "lora"),
    [(REAL_GPU, None), (True, {"rank": 2, "alpha": 4, "targets": ["query", "value"]})],
    ids=["full", "lora"],
    indirect=["any_device"],
)
def test_stages_match_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, any_device: torch.device, lora: dict[str, Any] | None
) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)  # the simulated device has no streams
    runs = {}
    for name in ("found", "expected"):
        if name == "expected":
            monkeypatch.delenv("ACCELERATE_TORCH_DEVICE", raising=False)
            hide_device(monkeypatch)
        folder = tmp_path / name
        write_tiny_bert(folder / "model", layers=2, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
        toy_reviews(40, 0).to_csv(folder / "reviews.csv", index=False)
        capture = {"documents": [0, 1], "max_length": 40, "dtype": "float32"}
        runs[name] = Run(run_stages(folder, *STAGES, finetune={"epochs": 1, "lora": lora}, capture=capture))
    expected, found = runs["expected"], runs["found"]
    for table in sorted(expected.tables.rglob("*.csv")):
        other = found.tables / table.relative_to(expected.tables)
        columns = [name for name in pd.read_csv(table) if name != "largest_error_ppm"]  # contains rounding errors only
        pd.testing.assert_frame_equal(pd.read_csv(other)[columns], pd.read_csv(table)[columns], rtol=1e-3, atol=1e-4)
    for site in expected.sites:
        rows = np.arange(9)
        np.testing.assert_allclose(found.read(site, rows), expected.read(site, rows), atol=1e-4)
    assert found.metrics("finetune")["computed_on"] == device_name(any_device)


FAULTS = [
    ("attnmix.measures.batches:head_factors", measures),
    ("attnmix.models.attention:AttentionCall.diagonal", measures),
    ("attnmix.faithfulness.class_use:padded", class_use),
]
"""Functions whose results the test moves to the CPU, each with a computation that calls the function."""


@pytest.mark.parametrize(("function", "compute"), FAULTS)
def test_tensor_left_on_cpu_is_detected(
    function: str,
    compute: Callable[[Path, torch.device], Arrays],
    monkeypatch: pytest.MonkeyPatch,
    second_device: torch.device,
) -> None:
    path, _, name = function.replace(":", ".").rpartition(".")
    owner, original = resolve_name(path), resolve_name(function)

    def left_behind(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        return {name: each.cpu() for name, each in result.items()} if isinstance(result, dict) else result.cpu()

    monkeypatch.setattr(owner, name, left_behind)
    with pytest.raises(RuntimeError, match="all tensors to be on the same device"):
        compute(tiny_folder("bert"), second_device)


@counts_operators
def test_device_counts_launches_and_waits() -> None:
    numbers = torch.arange(6.0).view(2, 3)
    with counted() as counts:
        moved = numbers.to(DEVICE)
        product = moved @ moved.T
        positive = product[product > 5]
        largest = float(positive.max())
        back = positive.cpu()
    assert back.tolist() == [14, 14, 50]
    assert largest == 50
    assert counts.operators["aten::mm"] == 1
    assert (counts.to_device, counts.from_device, counts.items) == (1, 1, 1)
    assert sum(counts.waits.values()) == 1  # the result size depends on the mask


class Launches(NamedTuple):
    """The numbers of operators, of calls of `.item()`, of copies from and to the device, and of other waits."""

    operators: int
    items: int
    from_device: int
    to_device: int
    waits: int


# Limits for two layers, slightly above the true counts. In `capture`, the check of the buffers after each group of
# passes needs 13 operators and one `.item()`.
MOST_LAUNCHES = {
    "`capture`, 12 points": Launches(145, 2, 0, 3, 0),
    "seven ratios": Launches(250, 1, 0, 2, 0),
    "all that `measure` reads": Launches(1740, 1, 17, 9, 0),
    "`measure` outside a sample": Launches(350, 1, 3, 3, 0),
    "matrices of one text": Launches(320, 1, 2, 2, 0),
}


@counts_operators
@pytest.mark.parametrize("texts", [2, 5])
def test_launches_and_waits_do_not_depend_on_texts(texts: int) -> None:
    counted_names = set()
    for name, work in works(DEVICE, texts, tokens=12, layers=2):
        work()
        with counted() as counts:
            work()
        numbers = Launches(
            counts.operators.total(), counts.items, counts.from_device, counts.to_device, counts.waits.total()
        )
        limits = MOST_LAUNCHES.get(name, numbers)
        over = [number for number, limit in zip(numbers, limits, strict=True) if number > limit]
        assert over == [], f"{name}: {numbers}, at most {limits}"
        counted_names.add(name)
    assert counted_names > MOST_LAUNCHES.keys()


def engine_results(folder: Path, device: torch.device) -> Measurements:
    """Return the ratios and the geometry of texts, in forward passes of one text each."""
    tokenizer = load_tokenizer(folder)
    measurements = Measurements(Texts(tokenized_documents(tokenizer, TEXTS, 20)), batch_tokens=1)
    engine = Engine(load_base(folder).to(device), list(RATIOS), tokenizer.pad_token_id, batch_tokens=1)
    engine.add_sums(measurements, [MEASURES, "geometry"])
    return measurements


def test_next_pass_starts_before_results_of_a_pass(
    tiny_bert: Path, monkeypatch: pytest.MonkeyPatch, second_device: torch.device
) -> None:
    steps: list[str] = []
    start, results = BatchMeasurer.start, BatchPass.wait_for_results

    def recorded_start(*arguments: Any) -> BatchPass:
        steps.append("start")
        return start(*arguments)

    def recorded_results(batch_pass: BatchPass) -> Any:
        steps.append("results")
        return results(batch_pass)

    monkeypatch.setattr(BatchMeasurer, "start", recorded_start)
    monkeypatch.setattr(BatchPass, "wait_for_results", recorded_results)
    overlapped = engine_results(tiny_bert, second_device)
    middle = ["start", "results"] * (len(TEXTS) - 1)
    assert steps == ["start", *middle, "results"]
    steps.clear()
    monkeypatch.setattr("attnmix.measures.engine.DEVICE_PASSES_AHEAD", 0)
    one_by_one = engine_results(tiny_bert, second_device)
    assert steps == ["start", "results"] * len(TEXTS)
    for number, ratios in one_by_one.ratios.items():
        np.testing.assert_array_equal(overlapped.ratios[number], ratios)
    for name, sums in one_by_one.sums.items():
        np.testing.assert_array_equal(overlapped.sums[name].values, sums.values, err_msg=name)
        np.testing.assert_array_equal(overlapped.sums[name].counts, sums.counts, err_msg=name)


def test_device_keeps_matrices_of_one_layer_only(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.device] = []

    def watched(names: Any, matrices_by_layer: Any, starts: Any) -> Any:
        for matrices in matrices_by_layer:
            kept.extend(matrix.device for matrix in matrices.values())
        return contributions(names, matrices_by_layer, starts)

    monkeypatch.setattr("attnmix.measures.contributions.contributions", watched)
    measurer = DocumentMeasurer(load_base(tiny_folder("bert")).to(DEVICE), list(RATIOS), list(MATRICES))
    measurer.contributions(np.arange(5, 12, dtype=np.int32))
    assert set(kept) == {CPU}


@counts_operators
def test_device_refuses_mixed_devices_and_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.ones(2, 3)
    moved = numbers.to(DEVICE)
    assert (moved * torch.tensor(2.0))[torch.tensor([1])].sum() == 6  # single numbers and indices may be on the CPU
    for mixed in (
        lambda: moved + numbers,
        lambda: torch.cat([numbers, moved]),
        lambda: torch.where(moved > 0, numbers, moved),
        lambda: torch.einsum("ij,kj->ik", moved, numbers),
    ):
        with pytest.raises(RuntimeError, match="at least two devices"):
            mixed()
    monkeypatch.setattr(DEVICE_RULES, "float64", False)
    with pytest.raises(TypeError, match="float64"):
        moved.double()

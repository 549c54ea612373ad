"""The page shows the weights, norms, queries and keys of the model's heads, and omits heads that are too large."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from browser import Opened
from families import write_family
from family_reference import Reference, first_of, rotated, run_reference
from page_run import save_page

import attnmix
from attnmix.core.store.heads import scores
from attnmix.measures.heads import RESULTS
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.loading import load_base
from attnmix.page import arrays
from attnmix.page.arrays import encode_heads

TEXT = "time flies like an arrow"
NORMS = ("source_norms", "given_norms")
FAMILIES = ["bert", *(pytest.param(name, marks=pytest.mark.long) for name in ("gpt2", "llama"))]
OTHERS = [pytest.param(name, marks=pytest.mark.families) for name in ("gpt_neox", "gemma3_text", "olmo2", "modernbert")]


def decoded(text: str, kind: str) -> npt.NDArray[Any]:
    """Decode a base64 text of numbers of the NumPy dtype `kind`, and return them in float64."""
    return np.frombuffer(base64.b64decode(text), dtype=kind).astype(np.float64)


def softmax(scores: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    raised = np.exp(scores - scores.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


@pytest.fixture
def long_text() -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Return random heads of both checkpoints for one text; the attention scores differ widely."""
    generator, checkpoints = np.random.default_rng(0), {}
    for checkpoint in ("pretrained", "finetuned"):
        query, key = (generator.normal(size=(2, heads, 50, 32)).astype(np.float32) for heads in (4, 2))
        parts = checkpoints[checkpoint] = {
            "query": 3 * query,
            "key": key,
            "log_sums": np.zeros((2, 4, 50), np.float32),
            "reach": np.tile(np.array([0, 49], np.int32), (2, 50, 1)),
            "scores": np.tile(np.array([32**-0.5, 0], np.float32), (2, 1)),
            **{name: generator.uniform(0.5, 2, size=(2, 4, 50)).astype(np.float32) for name in NORMS},
        }
        for layer, head in np.ndindex(2, 4):
            parts["log_sums"][layer, head] = np.log(np.exp(scores(parts, layer, head)).sum(-1))
    return checkpoints


def test_attention_sink_share_is_kept(long_text: dict[str, Any]) -> None:
    parts = long_text["finetuned"]
    parts["log_sums"][:] += np.log(2)
    form = encode_heads([("test/0", long_text)])["documents"]["test/0"]["finetuned"]
    np.testing.assert_allclose(decoded(form["sums"], "<f4"), 0.5, rtol=1e-5)


def test_oversized_heads_are_omitted(long_text: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    size = 2 * 50 * 32 * (2 * 4 + 2 * 2) * 2  # bytes of both checkpoints, with 16-bit numbers
    kept = []
    for limit in (size, size - 1):
        monkeypatch.setattr(arrays, "HEAD_BYTES", limit)
        forms = encode_heads([("test/0", long_text)])["documents"].get("test/0", {})
        kept.append({name: form["bits"] for name, form in forms.items()})
    assert kept == [{"pretrained": 16, "finetuned": 16}, {}]


def test_default_run_keeps_heads_of_first_text() -> None:
    generator, layers, heads, tokens, width = np.random.default_rng(0), 6, 12, 64, 32
    shape = (layers, heads, tokens, width)
    vectors = {name: generator.normal(size=shape).astype(np.float32) for name in ("query", "key")}
    parts = vectors | {
        "log_sums": np.full((layers, heads, tokens), 50, np.float32),
        "reach": np.tile(np.array([0, tokens - 1], np.int32), (layers, tokens, 1)),
        "scores": np.tile(np.array([width**-0.5, 0], np.float32), (layers, 1)),
        **{name: np.ones((layers, heads, tokens), np.float32) for name in NORMS},
    }
    text = {"pretrained": parts, "finetuned": parts}
    documents = encode_heads([(name, text) for name in ("first", "second", "third")])["documents"]
    assert list(documents) == ["first"]
    assert len(json.dumps(documents)) < 2_200_000  # pages have at most 4 MB


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Reference]]:
    """Return a function that returns the page of `TEXT` for a family's tiny model, and the reference for this page."""

    @cache
    def page_of(name: str) -> tuple[Path, Reference]:
        folder = tmp_path_factory.mktemp(name)
        model = write_family(name, folder / "model")
        page = save_page(attnmix.measure(attnmix.load(str(model)), TEXT), folder)
        ids = load_tokenizer(model)(TEXT)["input_ids"]
        return page, run_reference(name, load_base(model).double(), ids)

    return page_of


@pytest.fixture
def family(
    name: str, pages: Callable[[str], tuple[Path, Reference]], tab: Callable[..., Opened]
) -> tuple[Opened, Reference, str]:
    """Return the opened page of a family, the reference of its model, and the family's name."""
    path, reference = pages(name)
    return tab(path), reference, name


@pytest.mark.parametrize("name", FAMILIES)
def test_lines_match_weights_and_norms(family: tuple[Opened, Reference, str]) -> None:
    shown, reference, _ = family
    page = shown.page
    layer = reference.layers[1]
    page.locator("#heads-all button[aria-label='Layer 2, head 2']").click()
    assert page.locator("#heads h3").inner_text().startswith("Heads: Layer 2, head 2 (0 to 3), ")
    page.locator("#token-2").click()
    W_O = layer.weights.arrays["out"][:-1].reshape(4, layer.weights.head_size, -1)[2]
    f = np.linalg.norm(layer.value[2] @ W_O, axis=-1)
    for kind, column in (("weight", "attention weight"), ("norm", "weight times length")):
        page.locator("#lines").select_option(kind)
        expected = layer.attention[2] * (f if kind == "norm" else 1)
        rows = shown.values("heads")
        listed = {(int(row["position"]), int(row["attends to position"])) for row in rows}
        assert {(2, j) for j in range(len(f)) if expected[2, j]} <= listed
        for row in rows:
            entry = expected[int(row["position"]), int(row["attends to position"])]
            assert float(row[column]) == pytest.approx(entry, abs=1e-5)


def test_heads_of_long_text_name_shown_tokens(
    tiny_bert: Path, tmp_path: Path, tab: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "VECTOR_BYTES", 0)
    result = attnmix.measure(attnmix.load(str(tiny_bert)), "time flies like an arrow " * 6)
    page = tab(save_page(result, tmp_path)).page
    assert page.locator("#weight > summary").inner_text().endswith("product, softmax")
    said = {}
    for name, key in (("chosen", "Home"), ("none", "Escape")):
        page.locator("#words").press(key)
        said[name] = page.locator("#heads").inner_text()
    assert "Only tokens on the selected token's strongest lines (at most 36) are shown." in said["chosen"]
    assert "Only tokens on the strongest lines (at most 36) are shown." in said["none"]


def queries_and_keys(layer: Any) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the queries and keys of every head `[heads, tokens, width]`, computed from the weights."""
    u = layer.weights.norm("input_norm", layer.x)
    query, key = (layer.weights.split(role, u) for role in ("query", "key"))
    return (query, key) if layer.rotary is None else (rotated(query, layer.rotary), rotated(key, layer.rotary))


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_neuron_view_numbers_match_model(family: tuple[Opened, Reference, str]) -> None:
    shown, reference, name = family
    page = shown.page
    number, head, i, j = 1, 2, 3, 1
    layer = reference.layers[number]
    page.locator(f"#heads-all button[aria-label='Layer {number + 1}, head {head}']").click()
    page.locator(f"#token-{i}").click()
    assert page.locator("#weight > summary").inner_text().endswith("softmax, value")
    page.locator("#weight > summary").click()
    page.locator("#weight-rows button").nth(j).click()
    query, key = queries_and_keys(layer)
    scaling = first_of(layer.weights.config, "query_pre_attn_scalar", default=layer.weights.head_size) ** -0.5
    close = {"abs": 1e-4}
    for row in shown.values("weights"):
        source = int(row["position"])
        assert float(row["weight"]) == pytest.approx(layer.attention[head, i, source], **close)
        if layer.visible[i, source]:
            dot = query[head, i] @ key[head, source]
            assert float(row["q.k"]) == pytest.approx(dot, **close)
            assert float(row["score"]) == pytest.approx(dot * scaling, **close)
        else:
            assert row["score"] == ""
    steps: dict[str, list[float]] = {}
    for row in shown.values("steps-of-weight"):
        steps.setdefault(row["step"], []).append(float(row["value"]))
    w, points = layer.weights, layer.points
    attended = layer.attention[head, i] @ layer.value[head]
    W_O = w.arrays["out"][:-1].reshape(w.heads, w.head_size, -1)[head]
    result = next(points[point] for point in RESULTS if point in points)[i]
    expected = {
        **{"query": query[head, i], "key": key[head, j], "product": query[head, i] * key[head, j]},
        **{"value": layer.value[head, j], "attended": attended, "given": attended @ W_O},
        **{"output": w.linear("out", points["attention_heads"])[i], "stored": result},
    }
    for step, vector in expected.items():
        assert steps[step] == pytest.approx(vector, **close), step
    assert list(steps.values())[-2] == pytest.approx(result, **close)  # the page recomputes this result
    assert ("skip" in steps) == (name != "gpt_neox")
    assert ("norm" in steps) == (name == "bert")
    assert ("output_norm" in steps) == (name in ("gemma3_text", "olmo2"))
    assert "between these numbers and the model's forward pass" in page.locator("#off").inner_text()

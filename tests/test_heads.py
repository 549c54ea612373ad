"""The stored attention heads of a captured text match an independent computation from the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import EACH_FAMILY, tiny_folder
from family_reference import Reference, run_reference

from attnmix.core.errors import InputError
from attnmix.core.store.heads import HEAD_PARTS, NORMS, VECTORS, scores, weights
from attnmix.core.store.runs import Run, arrays_folder
from attnmix.core.store.writers import write_heads
from attnmix.measures.heads import RESULTS, _find_reach, record_heads
from attnmix.models.attention import AttentionCall
from attnmix.models.capture_points import widths
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.families import FAMILIES
from attnmix.models.loading import load_base

TEXT = "the film was not so good , and time flies like an arrow . the end was dull"


def recorded(name: str) -> tuple[dict[str, Any], Reference]:
    """Return the recorded heads of `TEXT`, and the reference computation of the same text."""
    folder = tiny_folder(name)
    base = load_base(folder).double()
    ids = load_tokenizer(folder)(TEXT)["input_ids"]
    layers = max(site.layer for site in widths(base))
    return record_heads(base, np.array(ids, np.int32), layers), run_reference(name, base, ids)


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_stored_heads_match_reference(name: str) -> None:
    parts, reference = recorded(name)
    if FAMILIES[name].get("own_attention"):  # queries and keys are not accessible
        assert parts == {}
        return
    assert {*HEAD_PARTS, *VECTORS} <= set(parts)
    close = {"rtol": 1e-4, "atol": 1e-5}
    for number, layer in enumerate(reference.layers):
        w, points = layer.weights, layer.points
        W_O = w.arrays["out"][:-1].reshape(w.heads, w.head_size, -1)
        f = np.stack([layer.value[h] @ W_O[h] for h in range(w.heads)])  # f[h, j] = (x_j W_V^h + b_V^h) W_O^h
        for head in range(w.heads):
            actual = weights(parts, number, head)
            np.testing.assert_allclose(actual, layer.attention[head], atol=1e-5)
            values = parts["value"][number]  # stored once if heads share them
            np.testing.assert_allclose(values[head * len(values) // w.heads], layer.value[head], **close)
            np.testing.assert_allclose(parts["given"][number, head], layer.attention[head] @ f[head], **close)
        np.testing.assert_allclose(parts["source_norms"][number], np.linalg.norm(f, axis=-1), **close)
        given = np.einsum("hij,hjd->hid", layer.attention, f)
        np.testing.assert_allclose(parts["given_norms"][number], np.linalg.norm(given, axis=-1), **close)
        attended = parts["attended"][number].swapaxes(0, 1).reshape(len(layer.x), -1)
        np.testing.assert_allclose(attended, points["attention_heads"], **close)
        np.testing.assert_allclose(parts["input"][number], layer.x, **close)
        result = next(points[point] for point in RESULTS if point in points)
        np.testing.assert_allclose(parts["result"][number], result, **close)
        output = given.sum(0) + parts["output_bias"][number]
        np.testing.assert_allclose(output, w.linear("out", points["attention_heads"]), **close)


def test_shared_keys_softcap_and_windows_are_stored() -> None:
    parts, _ = recorded("mistral")
    assert parts["key"].shape[1] == 2
    assert parts["query"].shape[1] == 4
    last = parts["reach"][0, -1]
    assert last[1] - last[0] == 5  # sliding_window: 6
    assert (parts["scores"][:, 1] == 0).all()
    softcap = {**parts, "scores": parts["scores"] + [0, 0.5]}
    uncapped, softmax_input = scores(parts, 0, 0)[-1, -1], scores(softcap, 0, 0)[-1, -1]
    assert softmax_input == pytest.approx(0.5 * np.tanh(uncapped / 0.5))


def test_heads_survive_round_trip_without_long_vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnmix.measures.heads.VECTOR_BYTES", 100)
    parts, _ = recorded("gpt2")
    assert not {*VECTORS, *NORMS} & set(parts)
    monkeypatch.chdir(tmp_path)
    write_heads(arrays_folder("heads", "finetuned", "text/0", Run(Path()).inspected), parts)
    read = Run(Path()).heads("finetuned", "text/0")
    assert set(read) == set(parts)
    for name, array in parts.items():
        np.testing.assert_array_equal(read[name], array)
    assert Run(Path()).heads("pretrained", "text/0") == {}


def call(mask: torch.Tensor) -> AttentionCall:
    """Return a call of the attention function with this mask, for three tokens in one head."""
    vectors = torch.zeros(1, 3, 2)
    return AttentionCall(vectors, vectors, vectors, mask, False, 1.0, None, torch.zeros(1, 3))


@pytest.mark.parametrize(
    "mask",
    [[[0.0, 0.5, 0.0]] * 3, [[0.0, -torch.inf, 0.0]] * 3, [[-1.0, -2.0, -3.0]] * 3],
    ids=["bias", "gap", "distances"],
)
def test_unsupported_attention_masks_are_refused(mask: Any) -> None:
    with pytest.raises(InputError, match="models/x: layer 2 adds terms to the attention scores"):
        _find_reach(call(torch.tensor([mask])), "models/x: layer 2")
    window = torch.tensor([[[0, 0, -torch.inf], [-torch.inf, 0, 0], [-torch.inf, -torch.inf, 0]]])
    assert _find_reach(call(window), "").tolist() == [[0, 1], [1, 2], [2, 2]]

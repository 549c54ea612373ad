"""The reference computation against each family's own forward pass: what it measures is what the model does."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from families import FAMILIES, write_family
from family_reference import NAMES, Reference, run_reference
from transformers import AutoModelForSequenceClassification, AutoTokenizer

TEXT = "the film was very good . time flies like an arrow , and the plot was so lovely ! it is not dull ."
# Of a point's largest component: the library's RMSNorm, rotary embedding and softmax compute in float32 whatever the
# model's type. With those in float64 and the reference's rotary frequencies rounded as theirs, the two agree to 1e-13.
CLOSE = 1e-5
PLAIN = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "albert", "distilbert", "gpt2", "opt", "bart")
POST_NORM = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "albert", "distilbert", "nomic_bert", "bart")
# Each point as what the first of these modules of a layer that there is takes or gives.
TAKEN = {
    "layer_input": ("layer",),
    "attention_heads": ("out",),
    "attention_residual": ("attention_norm", "feed_forward_norm"),
}
GIVEN = {
    "attention_output": ("attention_output_norm", "out"),
    "attention_norm": ("attention_norm",),
    "cross_attention_output": ("cross_out",),
    "cross_attention_norm": ("cross_attention_norm",),
    "ffn_output": ("feed_forward_output_norm", "down"),
    "layer_output": ("layer",),
}

Seen = dict[str, list[npt.NDArray[np.float64]]]
Run = tuple[str, Reference, Seen]


def hook(base: Any, names: dict[str, str], seen: Seen) -> None:
    """Append to `seen` what passes each point, in the order of the forward pass."""

    def append(point: str, taken: bool, _module: Any, given: Any, output: Any) -> None:
        array = (given[0] if taken else output).numpy()
        seen[point].append(array.reshape(-1, array.shape[-1]))  # OPT takes batch and tokens as one dimension

    modules = dict(base.named_modules())
    if "cross_out" not in names or "encoder" in names["word"]:
        modules[names["word"]].register_forward_hook(partial(append, "word_embedding", False))
        if "embedding_norm" in names:
            modules[names["embedding_norm"]].register_forward_hook(partial(append, "embedding_sum", True))
    parallel = getattr(base.config, "use_parallel_residual", False)
    for prefix in dict.fromkeys(names["layer"].format(number=number, group=0) for number in range(9)):
        paths = {"layer": prefix[:-1], **{role: prefix + path for role, path in names.items() if role != "layer"}}
        for points, taken in ((TAKEN, True), (GIVEN, False)):
            for point, roles in points.items():
                found = [modules[paths[role]] for role in roles if paths.get(role) in modules]
                if found and not (parallel and point == "attention_residual"):
                    found[0].register_forward_hook(partial(append, point, taken))


@pytest.fixture(scope="module", params=FAMILIES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A tiny model of a family by the reference, and by the library in float64, its attention weights too."""
    name: str = request.param
    folder = write_family(name, tmp_path_factory.mktemp(name))
    kind = {"attn_implementation": "eager", "dtype": torch.float64}
    base = AutoModelForSequenceClassification.from_pretrained(folder, **kind).eval().base_model
    ids = AutoTokenizer.from_pretrained(folder)(TEXT)["input_ids"]
    seen: Seen = defaultdict(list)
    sides = ("encoder", "decoder") if name == "bart" else ("",)
    for side in sides:
        hook(base, {role: path.replace("{side}", side) for role, path in NAMES[name].items()}, seen)
    with torch.no_grad():
        output = base(torch.tensor([ids]), output_attentions=True)
    for side in sides:
        seen["attention"] += [weights[0].numpy() for weights in output[f"{side}_attentions".lstrip("_")]]
    return name, run_reference(name, base, ids), seen


def test_every_point_and_weight_is_the_models_own(run: Run) -> None:
    name, reference, recorded = run
    seen = dict(recorded)
    attention = [layer.attention for layer in reference.layers]
    np.testing.assert_allclose(attention, seen.pop("attention"), rtol=0, atol=CLOSE)
    inputs = seen.pop("layer_input")
    seen["embedding_output"] = inputs[:1]
    if name == "bart":
        seen["decoder_embedding_output"] = inputs[2:3]
    points = {point for _, point in reference.features}
    # Only a sum stands there in OLMo 2, with no module that takes it; layer_output holds it.
    assert points - set(seen) == ({"attention_residual"} if name == "olmo2" else set())
    for point, arrays in seen.items():
        own = [array for (_, each), array in reference.features.items() if each == point]
        np.testing.assert_allclose(own, arrays, err_msg=point, rtol=0, atol=CLOSE * np.abs(arrays).max())


def test_the_parts_are_those_of_the_features(run: Run) -> None:
    """F and T with the biases, which belong to no source, are what attention gives and what its norm gives."""
    for layer in run[1].layers:
        w, points = layer.weights, layer.points
        bias = np.tile(w.arrays["out"][-1], (len(layer.x), 1))
        output = w.linear("out", points["attention_heads"])
        bias = w.norm_linear("attention_output_norm", bias, output)
        np.testing.assert_allclose(layer.F.sum(1) + bias, points["attention_output"], rtol=0, atol=1e-12)
        if layer.post_norm:
            bias = w.norm_linear("attention_norm", bias, points["attention_residual"]) + w.arrays["attention_norm"][1]
            np.testing.assert_allclose(layer.T.sum(1) + bias, points["attention_norm"], rtol=0, atol=1e-12)
        if layer.plain and not layer.parallel:
            parts, rest = layer.layer_parts()
            np.testing.assert_allclose(parts.sum(1) + rest, points["layer_output"], rtol=0, atol=1e-6)


def test_each_family_has_the_measures_that_its_norms_allow(run: Run) -> None:
    name, reference, _ = run
    post, parallel = name in POST_NORM, name == "gpt_neox"
    ratios = {"attn_w", "attn_n"} | ({"attnresln_n", "enc_n"} if post else set())
    ratios |= {"layer_n"} if name in PLAIN else set()
    matrices = {"attention", "norm", "value_zeroing"} | ({"globenc"} if post else set())
    ratios, matrices = (ratios, matrices) if parallel else (ratios | {"attnres_w", "attnres_n"}, matrices | {"alti"})
    for layer in reference.layers:
        assert set(layer.ratios()) == ratios
        found = layer.contributions()
        assert set(found) == matrices
        for method, matrix in found.items():
            # What a token cannot see contributes nothing.
            assert np.abs(matrix[~layer.seen]).max(initial=0) < 1e-12, method

"""Sink measures, and ratios without special tokens as sources, match independent computations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from families import write_family
from family_reference import Reference, run_reference
from transformers import AutoModel

import attnmix
from attnmix.measures.sinks import SINK_MEASURES

TEXTS = ["time flies like an arrow", "the film was very good , and not so cold .", "the plot was dull ."]
FAMILIES = ["bert", "gpt2", "bart"]


@pytest.fixture(scope="module", params=FAMILIES)
def result(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> attnmix.Measures:
    model = attnmix.load(str(write_family(request.param, tmp_path_factory.mktemp(request.param))))
    return attnmix.measure(model, TEXTS, controls=["without_special_sources"])


@pytest.fixture(scope="module")
def references(result: attnmix.Measures) -> list[Reference]:
    """Return the reference computation of each text."""
    base = result.model.network.base_model
    return [run_reference(base.config.model_type, base, each.ids.tolist()) for each in result.documents]


def special_places(result: attnmix.Measures, number: int, layer: int) -> list[int]:
    """Return the positions of special tokens in a layer; decoder inputs are shifted by the start token."""
    words = result.documents[number].words
    if result.encoder_layers is None or layer <= result.encoder_layers:
        return np.flatnonzero(words < 0).tolist()
    return [0, *(np.flatnonzero(words[:-1] < 0) + 1).tolist()]


def test_ratios_without_special_sources_match_reference(result: attnmix.Measures, references: list[Reference]) -> None:
    tables = {method: result.controls(method) for method in result.methods}
    for layer in range(1, result.ratios_by_text[0].shape[1] + 1):
        ratios_of_texts = []
        for number, reference in enumerate(references):
            special = special_places(result, number, layer)
            ratios_of_texts.append(reference.layers[layer - 1].without_sources(special))
        for place, (method, table) in enumerate(tables.items()):
            row = table[table["layer"] == layer].iloc[0]
            without_special = np.concatenate([ratios[method] for ratios in ratios_of_texts]).mean()
            assert row["mean"] == pytest.approx(without_special, abs=1e-5), (method, layer)
            with_special = np.concatenate([array[place, layer - 1] for array in result.ratios_by_text]).mean()
            assert row["ratio_minus_control"] == pytest.approx(with_special - row["mean"], abs=1e-6)


def test_sink_measures_match_attention_values_and_outputs(
    result: attnmix.Measures, references: list[Reference]
) -> None:
    sinks = result.sinks().set_index(["layer", "measure"])["mean"]
    for layer in range(1, result.ratios_by_text[0].shape[1] + 1):
        expected: dict[str, list[float]] = {name: [] for name in SINK_MEASURES}
        to_first = []
        for reference in references:
            step = reference.layers[layer - 1]
            attention_TT = step.attention.mean(0)
            to_first += attention_TT[1:, 0].tolist()
            lengths_T = np.sqrt((step.value**2).sum((0, 2)))
            between = lengths_T[1:-1].mean()
            activations = np.abs(step.points["layer_output"])
            expected["attention_to_last"].append(float(attention_TT[:-1, -1].mean()))
            expected["value_of_first"].append(float(lengths_T[0] / between))
            expected["value_of_last"].append(float(lengths_T[-1] / between))
            expected["massive_activation"].append(float(activations.max() / np.median(activations)))
        for name, by_text in expected.items():
            assert sinks[layer, name] == pytest.approx(np.mean(by_text), rel=0.02), (layer, name)
        assert sinks[layer, "attention_to_first"] == pytest.approx(np.mean(to_first), abs=1e-5)


def test_planted_sink_is_detected_and_removed(tiny_bert: Path) -> None:
    """The first token receives nearly all attention, but has a short value vector; attention to it raises the ratio."""
    network = AutoModel.from_pretrained(tiny_bert)
    attention = network.encoder.layer[0].attention.self
    with torch.no_grad():
        # The token with a large first component has a key similar to all queries, and a value of 0.
        network.embeddings.word_embeddings.weight[2, 0] += 100
        for linear in (attention.query, attention.key, attention.value):
            linear.weight.zero_()
            linear.bias.zero_()
        attention.query.bias.fill_(1)
        attention.key.weight[:, 0] = 4
        attention.value.weight.copy_(torch.eye(24))
        attention.value.weight[0, 0] = 0
        attention.value.weight[:, 0] = 0
    model = attnmix.load(network, attnmix.load(str(tiny_bert)).tokenizer)
    result = attnmix.measure(model, TEXTS, controls=["without_special_sources"])
    sinks = result.sinks().query("layer == 1").set_index("measure")["mean"]
    assert sinks["attention_to_first"] > 0.9
    assert sinks["value_of_first"] < 0.5
    row = result.controls("attn_w").query("layer == 1").iloc[0]
    assert row["ratio_minus_control"] > 0.05

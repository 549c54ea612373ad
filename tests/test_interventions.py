"""Edited attention matches manually changed weights or hooks, and identity edits change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import write_family
from transformers import AutoModel, AutoModelForSequenceClassification

import attnmix
from attnmix.interventions import (
    chained,
    mapped_values,
    recorded,
    replaced_values,
    text_mean_values,
    without_edges,
    without_heads,
)
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.families import family_of

OWN = ("mpnet", "deberta-v2", "deberta", "gpt_neo", "bloom")  # families with custom attention code
TEXTS = ["time flies like an arrow", "the film was good and the time flies ."]


def load_in_memory(folder: Path) -> tuple[attnmix.Model, dict[str, torch.Tensor]]:
    """Return a classifier in double precision, and a padded batch of two texts."""
    torch.manual_seed(0)
    network = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()
    model = attnmix.load(network, load_tokenizer(folder))
    return model, dict(model.tokenizer(TEXTS, padding=True, return_tensors="pt"))


def logits(network: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = network(**inputs).logits
    return result


def test_silenced_head_equals_zero_output_weights(tiny_bert: Path) -> None:
    model, inputs = load_in_memory(tiny_bert)
    with model.intervene(without_heads({1: [1], 3: [0]})) as network:
        edited = logits(network, inputs)
    untouched = logits(model.network, inputs)
    width = model.network.config.hidden_size // model.network.config.num_attention_heads
    for layer, head in ((1, 1), (3, 0)):
        weight = model.network.bert.encoder.layer[layer - 1].attention.output.dense.weight
        weight.data[:, head * width : (head + 1) * width] = 0
    torch.testing.assert_close(edited, logits(model.network, inputs), rtol=0, atol=1e-12)
    assert (edited - untouched).abs().max() > 1e-6


def test_mean_values_match_hook_on_value_module(tiny_bert: Path) -> None:
    model, inputs = load_in_memory(tiny_bert)
    mask = inputs["attention_mask"]
    with model.intervene(text_mean_values(mask, layers=[2])) as network:
        edited = logits(network, inputs)

    def mean(_module: Any, _arguments: Any, value_BTE: torch.Tensor) -> torch.Tensor:
        means = [value[: int(row.sum())].mean(0) for value, row in zip(value_BTE, mask, strict=True)]
        return torch.stack(means)[:, None].expand_as(value_BTE)

    model.network.bert.encoder.layer[1].attention.self.value.register_forward_hook(mean)
    torch.testing.assert_close(edited, logits(model.network, inputs), rtol=0, atol=1e-12)


def test_cut_edges_match_zeroed_attention_weights(tiny_bert: Path) -> None:
    base = AutoModel.from_pretrained(tiny_bert, dtype=torch.float64, attn_implementation="eager")
    model, inputs = load_in_memory(tiny_bert)
    layer, received = base.encoder.layer[0].attention, []
    layer.output.dense.register_forward_pre_hook(lambda _module, arguments: received.append(arguments[0]))
    with torch.no_grad():
        weights = base(**inputs, output_attentions=True).attentions[0].clone()
        embedded = base.embeddings(inputs["input_ids"])
        value = layer.self.value(embedded).unflatten(-1, (weights.shape[1], -1)).transpose(1, 2)
    torch.testing.assert_close((weights @ value).transpose(1, 2).flatten(2), received[0], rtol=0, atol=1e-12)
    weights[:, :, 0, 1:4] = 0
    found: list[torch.Tensor] = []
    dense = model.network.bert.encoder.layer[0].attention.output.dense
    dense.register_forward_pre_hook(lambda _module, arguments: found.append(arguments[0]))
    with model.intervene(without_edges(slice(0, 1), slice(1, 4))) as network:
        logits(network, inputs)
    torch.testing.assert_close(found[0], (weights @ value).transpose(1, 2).flatten(2), rtol=0, atol=1e-12)


def test_last_layer_needs_edges_to_first_token_only(tiny_bert: Path) -> None:
    model, inputs = load_in_memory(tiny_bert)
    last, others, first = [model.layers], slice(1, None), slice(0, 1)
    untouched = logits(model.network, inputs)
    with model.intervene(without_edges(others, slice(None), last)) as network:
        torch.testing.assert_close(logits(network, inputs), untouched, rtol=0, atol=1e-12)
    with model.intervene(without_edges(first, others, last)) as network:
        assert (logits(network, inputs) - untouched).abs().max() > 1e-6


@pytest.mark.parametrize("family", ["bert", "albert", "gpt2", "llama", "bart", "gemma3_text", *OWN])
def test_identity_edit_keeps_output(tmp_path: Path, family: str) -> None:
    folder = write_family(family, tmp_path / family)
    model, layers = attnmix.load(str(folder)), set[int]()
    inputs = model.tokenizer(TEXTS[0], return_tensors="pt")
    model.network.train()

    def edit(layer: int, weights: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layers.add(layer)
        return weights, value

    with torch.no_grad(), model.intervene(edit) as network:
        found = network(**inputs).last_hidden_state
    assert all(module.training for module in model.network.modules())
    with torch.no_grad():
        own = AutoModel.from_pretrained(folder)(**inputs).last_hidden_state
    torch.testing.assert_close(found, own, rtol=1e-4, atol=1e-5)
    assert layers == set(range(1, model.layers + 1))


def test_recorded_replaced_and_mapped_values_match_hooks(tiny_bert: Path) -> None:
    model, inputs = load_in_memory(tiny_bert)
    recorded_values: dict[int, torch.Tensor] = {}
    with model.intervene(recorded(recorded_values)) as network:
        untouched = logits(network, inputs)
    torch.testing.assert_close(untouched, logits(model.network, inputs), rtol=0, atol=1e-12)
    module, heads = model.network.bert.encoder.layer[1].attention.self, model.network.config.num_attention_heads
    seen: list[torch.Tensor] = []
    handle = module.value.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    logits(model.network, inputs)
    handle.remove()
    torch.testing.assert_close(recorded_values[2].transpose(1, 2).flatten(-2), seen[0], rtol=0, atol=1e-12)

    donors = torch.randn(2, heads, 1, seen[0].shape[-1] // heads, dtype=torch.float64)
    mapping = torch.randn(seen[0].shape[-1], seen[0].shape[-1], dtype=torch.float64)
    side_by_side = donors.transpose(1, 2).flatten(-2)
    replaced, mapped = replaced_values({2: donors}), mapped_values({2: lambda value: value @ mapping})
    by_hand = {
        replaced: lambda value: side_by_side.expand_as(value),
        mapped: lambda value: value @ mapping,
        chained(replaced, mapped): lambda value: side_by_side.expand_as(value) @ mapping,
    }
    for edit, change in by_hand.items():
        with model.intervene(edit) as network:
            edited = logits(network, inputs)
        handle = module.value.register_forward_hook(lambda _module, _inputs, output, change=change: change(output))
        torch.testing.assert_close(edited, logits(model.network, inputs), rtol=0, atol=1e-12)
        handle.remove()
        assert (edited - untouched).abs().max() > 1e-6


@pytest.mark.parametrize("family", OWN)
def test_heads_with_own_attention_code_are_silenced(tmp_path: Path, family: str) -> None:
    model, inputs = load_in_memory(write_family(family, tmp_path / family))
    inputs.pop("token_type_ids", None)
    model.network.config.pad_token_id = model.tokenizer.pad_token_id
    heads, stack = model.network.config.num_attention_heads, family_of(model.network.config).stacks[0]
    with model.intervene(without_heads({2: [1]})) as network:
        edited = logits(network, inputs)
    untouched = logits(model.network, inputs)
    (layer,) = (each for path, each in model.network.base_model.named_modules() if stack.is_layer(path) and "1" in path)
    output = layer.get_submodule(stack.output)
    width = output.weight.shape[1] // heads
    output.weight.data[:, width : 2 * width] = 0
    torch.testing.assert_close(edited, logits(model.network, inputs), rtol=0, atol=1e-6)  # some families use float32
    assert (edited - untouched).abs().max() > 1e-3

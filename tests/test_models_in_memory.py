"""Models in memory are checked like models loaded by name: their modules, weights, attention and arguments."""

from __future__ import annotations

import copy
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AutoModel, BertConfig, BertModel, Phi3Config, Phi3Model, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import attnmix
from attnmix.core.errors import InputError
from attnmix.measures import layers
from attnmix.models.checkpoint import load_tokenizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),  # from peft
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # raised by imports of torch.compile
]
TEXT = "time flies like an arrow"


def hot_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    """Compute attention with scores three times as large."""
    scaling = 3 * (options.pop("scaling", None) or query.shape[-1] ** -0.5)
    return sdpa_attention_forward(module, query, key, value, mask, scaling=scaling, **options)


AttentionInterface.register("hot", hot_attention)


class Wrapper(PreTrainedModel):
    """A model that stores BERT in an attribute with an unusual name."""

    config_class = BertConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.inside = BertModel(config)
        self.post_init()

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.inside(*arguments, **options)


def network(folder: Path, **options: Any) -> Any:
    return AutoModel.from_pretrained(folder, **options)


def with_adapter(folder: Path, targets: Any) -> Any:
    """Return a model with an unmerged LoRA adapter on the modules `targets`."""
    adapted = network(folder)
    adapted.add_adapter(peft.LoraConfig(target_modules=targets, init_lora_weights=False))
    return adapted


def with_module(folder: Path, change: Callable[[Any], None]) -> Any:
    """Return a model with a changed second layer."""
    changed = network(folder)
    change(changed.encoder.layer[1])
    return changed


def with_forward(folder: Path) -> Any:
    """Return a model whose method `forward` was replaced."""
    changed = network(folder)
    original = changed.forward
    changed.forward = lambda *arguments, **options: original(*arguments, **options)
    return changed


def with_layers(folder: Path, change: Callable[[Any], None]) -> Any:
    """Return a model with a changed list of layers."""
    changed = network(folder)
    change(changed.encoder.layer)
    return changed


def quantize(layer: Any) -> None:
    weight = layer.output.dense.weight.data.to(torch.int8)
    layer.output.dense.weight = nn.Parameter(weight, requires_grad=False)


def wrap_output(layer: Any) -> None:
    layer.output.dense = nn.Sequential(layer.output.dense, nn.Linear(24, 24))


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another attention function": (
        lambda folder: network(folder, attn_implementation="hot"),
        "its attention function 'hot' is .*hot_attention; allowed: implementations of transformers",
    ),
    "a replaced method": (
        lambda folder: with_module(folder, lambda layer: setattr(layer.output.dense, "forward", lambda x: 2 * x)),
        "the method forward of encoder.layer.1.output.dense was replaced",
    ),
    "a replaced method of the model": (
        lambda folder: with_forward(folder),
        "the method forward of BertModel was replaced",
    ),
    "more layers than its configuration": (
        lambda folder: with_layers(folder, lambda layers: layers.append(copy.deepcopy(layers[0]))),
        "encoder.layer.3.* which its configuration does not describe",
    ),
    "one layer twice": (
        lambda folder: with_layers(folder, lambda layers: layers.__setitem__(1, layers[0])),
        "several of its layers share a module",
    ),
    "an adapter around every Linear": (
        lambda folder: with_adapter(folder, "all-linear"),
        r"output.dense is a peft\..*Linear instead of Linear; allowed: .*merge_and_unload",
    ),
    "a bottleneck adapter": (
        lambda folder: with_module(folder, wrap_output),
        r"encoder.layer.1.output.dense is a torch.*Sequential instead of Linear",
    ),
    "another norm": (
        lambda folder: with_module(folder, lambda layer: setattr(layer.output, "LayerNorm", nn.RMSNorm(24))),
        r"encoder.layer.1.output.LayerNorm is a torch.*RMSNorm instead of LayerNorm",
    ),
    "another prefix": (
        lambda folder: Wrapper(network(folder, attn_implementation="eager").config),
        "Wrapper has no module embeddings.word_embeddings.*; allowed: BertModel",
    ),
    "offloaded weights": (
        lambda folder: with_module(folder, lambda layer: layer.to("meta")),
        r"encoder.layer.1.* is not in memory \(device meta\)",
    ),
    "quantized weights": (
        lambda folder: with_module(folder, quantize),
        "encoder.layer.1.output.dense.weight is stored as int8; allowed: weights in float32",
    ),
    "layers in another dtype": (
        lambda folder: with_module(folder, lambda layer: layer.to(torch.bfloat16)),
        r"fails on a text \(.*BFloat16",
    ),
    "a model with infinite weights": (
        lambda folder: with_module(folder, lambda layer: layer.output.dense.weight.data.fill_(torch.inf)),
        "has NaN or infinite weights",
    ),
    "a model of peft": (
        lambda folder: peft.get_peft_model(network(folder), peft.LoraConfig(target_modules=["query"])),
        r"PeftModel is not supported; pass .*model.merge_and_unload\(\)",
    ),
    "a compiled model": (lambda folder: torch.compile(network(folder)), r"OptimizedModule.*pass .*model._orig_mod"),
    "a parallel model": (lambda folder: nn.DataParallel(network(folder)), r"DataParallel.*pass .*model.module"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_unmeasurable_model_is_one_error_at_loading(name: str, tiny_bert: Path) -> None:
    make, message = MISTAKES[name]
    model = make(tiny_bert)
    with pytest.raises(InputError, match=message) as raised:
        attnmix.load(model, load_tokenizer(tiny_bert))
    assert "\n" not in str(raised.value)


def test_attention_adapter_equals_merged_model(tiny_bert: Path) -> None:
    tokenizer = load_tokenizer(tiny_bert)
    configuration = peft.LoraConfig(target_modules=["query", "value"], init_lora_weights=False)
    adapted = peft.get_peft_model(network(tiny_bert), configuration).eval()
    before = attnmix.measure(attnmix.load(adapted.base_model.model, tokenizer), TEXT)
    matrix, parts = before.matrix("alti"), before.parts()["own_share"]
    merged = attnmix.measure(attnmix.load(adapted.merge_and_unload(), tokenizer), TEXT)
    assert float(abs(before.ratios["ratio"] - merged.ratios["ratio"]).max()) < 1e-5
    assert float(abs(matrix - merged.matrix("alti")).max()) < 1e-5
    assert float(abs(parts - merged.parts()["own_share"]).max()) < 1e-5


def test_adapter_that_cannot_be_decomposed_is_one_error(tiny_bert: Path) -> None:
    configuration = peft.LoHaConfig(target_modules=["value"], init_weights=False)
    adapted = peft.get_peft_model(network(tiny_bert), configuration).eval()
    result = attnmix.measure(attnmix.load(adapted.base_model.model, load_tokenizer(tiny_bert)), TEXT)
    with pytest.raises(InputError, match=r"value projection of BertSelfAttention .* merge its adapters") as raised:
        result.parts()
    assert "\n" not in str(raised.value)


def test_error_of_value_projection_is_not_blamed_on_adapters(tiny_bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    result = attnmix.measure(attnmix.load(network(tiny_bert), load_tokenizer(tiny_bert)), TEXT)
    monkeypatch.setattr(layers, "_compute_values", fail)
    with pytest.raises(torch.OutOfMemoryError):
        result.parts()


@pytest.mark.parametrize(("argument", "value"), [("device", "nonsense"), ("device", "cpu"), ("revision", "main")])
def test_unused_argument_is_an_error(argument: str, value: str, tiny_bert: Path) -> None:
    options: dict[str, Any] = {argument: value}
    with pytest.raises(InputError, match=f"^{argument}: '{value}' has no effect on a model in memory; omit it"):
        attnmix.load(network(tiny_bert), load_tokenizer(tiny_bert), **options)


def test_revision_of_folder_is_an_error(tiny_bert: Path) -> None:
    with pytest.raises(InputError, match="is not a hub model and has no revision 'main'; leave the revision empty"):
        attnmix.load(tiny_bert, revision="main")


def test_folder_with_model_and_adapter_is_an_error(tiny_bert: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_bert, tmp_path / "both")
    adapted = peft.get_peft_model(network(tiny_bert), peft.LoraConfig(target_modules=["query"]))
    adapted.save_pretrained(folder)
    with pytest.raises(InputError, match=r"contains a full model and an adapter \(adapter_config.json\)"):
        attnmix.load(folder)


def disable_adapter(changed: Any) -> None:
    changed.disable_adapters()


def add_hook(changed: Any) -> None:
    changed.encoder.layer[1].output.register_forward_hook(lambda _module, _inputs, output: output * 1.1)


def change_attention(changed: Any) -> None:
    changed.config._attn_implementation = "hot"


def change_norm(changed: Any) -> None:
    changed.encoder.layer[0].output.LayerNorm.eps = 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_change_in_half_precision_is_detected(dtype: torch.dtype, tiny_bert: Path) -> None:
    changed = network(tiny_bert, dtype=dtype)
    result = attnmix.measure(attnmix.load(changed, load_tokenizer(tiny_bert)), TEXT)
    assert result.parts()["own_share"].notnull().all()
    changed.encoder.layer[0].attention.self.value.register_forward_hook(lambda _module, _inputs, output: output * 1.05)
    with pytest.raises(InputError, match=r"^model: the output of .* changed since"):
        result.parts(rule="tangent")


@pytest.mark.parametrize("change", [disable_adapter, add_hook, change_attention, change_norm])
def test_model_change_after_measuring_is_an_error(change: Callable[[Any], None], tiny_bert: Path) -> None:
    changed = with_adapter(tiny_bert, ["query", "value"])
    result = attnmix.measure(attnmix.load(changed, load_tokenizer(tiny_bert)), TEXT)
    kept = result.matrix("alti")
    change(changed)
    message = r"^model: the output of .* changed since measure\(model, texts\); measure"
    if change is change_attention:
        message = (
            r"^model: .*: its attention function 'hot' is .*hot_attention; allowed: implementations of transformers"
        )
    calls = (result.sinks, result.parts, result.own_share, lambda: result.matrix("value_zeroing_without_bias"))
    for call in calls:
        with pytest.raises(InputError, match=message):
            call()
    assert result.matrix("alti").equals(kept)


def test_equivalent_attention_implementation_is_accepted(tiny_bert: Path) -> None:
    same = network(tiny_bert)
    result = attnmix.measure(attnmix.load(same, load_tokenizer(tiny_bert)), TEXT)
    same.set_attn_implementation("eager")
    assert len(result.own_share()) == 3


class Recorder:
    """A hook that stores activations with gradients, which cannot be copied."""

    def __init__(self) -> None:
        self.outputs: list[torch.Tensor] = []

    def record(self, _module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
        self.outputs.append(output)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_hooks_that_store_activations_are_supported(dtype: torch.dtype, tiny_bert: Path) -> None:
    plain = attnmix.load(network(tiny_bert, dtype=dtype), load_tokenizer(tiny_bert))
    hooked = attnmix.load(network(tiny_bert, dtype=dtype), load_tokenizer(tiny_bert))
    recorder = Recorder()
    base: Any = hooked.network.base_model
    base.encoder.layer[0].output.register_forward_hook(recorder.record)
    hooked.network(**hooked.tokenizer("a", return_tensors="pt"))  # stores an activation that requires gradients
    result = attnmix.measure(hooked, TEXT)
    assert recorder.outputs
    assert result.matrix("alti").equals(attnmix.measure(plain, TEXT).matrix("alti"))


def test_measured_network_has_no_additional_hooks(tiny_bert: Path) -> None:
    model = attnmix.load(network(tiny_bert), load_tokenizer(tiny_bert))
    attnmix.measure(model, TEXT).matrix("alti")
    assert not any(module._forward_hooks for module in model.network.modules())
    torch.save(model.network, io.BytesIO())
    states = model.network(**model.tokenizer(TEXT, return_tensors="pt"), output_hidden_states=True).hidden_states
    assert len(states) == model.layers + 1  # transformers installs its own hooks again


def test_long_texts_do_not_change_rotary_positions_of_others(tiny_bert: Path) -> None:
    """With longrope, frequencies depend on the longest text of a batch, so texts are limited to the original length."""
    tokenizer = load_tokenizer(tiny_bert)
    factors = {"short_factor": [1.0] * 3, "long_factor": [4.0] * 3, "rope_theta": 10_000.0}
    config = Phi3Config(
        vocab_size=len(tokenizer),
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=64,
        original_max_position_embeddings=8,
        pad_token_id=tokenizer.pad_token_id,
        rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 8, **factors},
    )
    torch.manual_seed(0)
    model = attnmix.load(Phi3Model(config).eval(), tokenizer)
    expected = attnmix.measure(model, "a film", methods="attn_w").ratios["ratio"]
    with pytest.warns(UserWarning, match="text 1 has 14 tokens, of which the first 8 are measured"):
        together = attnmix.measure(model, ["a film", "the film was good " * 3], methods="attn_w").ratios
    assert together.query("text == 0")["ratio"].tolist() == pytest.approx(expected.tolist(), abs=1e-6)
    with pytest.raises(InputError, match=r"^max_length: 9 exceeds the 8 tokens that this model supports$"):
        attnmix.measure(model, "a film", max_length=9)

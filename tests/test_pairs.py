"""Text pairs are tokenised, truncated and passed to models with the correct segments in all stages and on the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from browser import Opened
from conftest import TOPICS, VERDICTS, plain_logits, run_stages, write_parameters
from families import make_tokenizer, write_family
from family_reference import ReferenceLayer, run_reference
from transformers import AutoModel, AutoTokenizer

import attnmix
from attnmix.core.errors import InputError
from attnmix.core.settings import DatasetParameters
from attnmix.core.store.runs import Run
from attnmix.data.source import read_splits
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.controls import shuffled_words
from attnmix.measures.documents import CLASSES, Document
from attnmix.measures.text_pairs import PAIR_SOURCES
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.encoding import encode, padded, tokenize_texts
from attnmix.models.loading import check_model, load_base
from attnmix.models.segments import read_segments
from stages.common.parameters import read_parameters

LABELS = ("contradiction", "entailment", "neutral")
PAIRS = [
    ("the film was very good .", "the film was good"),
    ("the plot was so dull and the music was cold , not warm .", "the ending"),
    ("time", "time flies like an arrow , the acting was lovely and the film was not ."),
]


def entailments(number: int, seed: int) -> pd.DataFrame:
    """Return pairs of texts of three alternating classes: the second text contradicts, repeats or extends the first."""
    generator, rows = np.random.default_rng(seed), []
    for i in range(number):
        about, other = generator.choice(TOPICS, 2, replace=False)
        side = int(generator.integers(2))
        word, opposite = generator.choice(VERDICTS[side]), generator.choice(VERDICTS[1 - side])
        claim = {0: f"the {about} was {opposite}", 1: f"the {about} was {word}", 2: f"the {other} was {word}"}[i % 3]
        rows.append((f"the {about} was very {word} , time {i} .", claim, LABELS[i % 3]))
    return pd.DataFrame(rows, columns=["premise", "hypothesis", "gold"])


def document_of(tokenizer: Any, pair: tuple[str, str], max_length: int | None = None) -> Document:
    """Return a tokenized pair of texts, with the segment of each token."""
    (tokenized,) = tokenize_texts(tokenizer, ["test/0"], [pair], max_length)
    table = tokenized.table
    classes = np.array([CLASSES.index(name) for name in table["token_class"]], np.int8)
    ids, words = (np.array(table[name], np.int32) for name in ("token_id", "word"))
    return Document("test/0", ids, classes, words, segments=np.array(table["segment"], np.int8))


@pytest.mark.parametrize("name", ["bert", "mpnet", "roberta", "albert", "gpt2", "llama"])
def test_pair_tokens_have_segment_and_position(name: str) -> None:
    tokenizer = make_tokenizer(name)
    for pair, tokenized in zip(PAIRS, tokenize_texts(tokenizer, map(str, range(3)), PAIRS, None), strict=True):
        table, whole = tokenized.table, "\n".join(pair)
        assert table["token_id"].tolist() == tokenizer(*pair)["input_ids"]
        in_text = table[table["segment"] >= 0]
        assert (table["segment"] < 0).equals(table["word"] < 0)
        for segment, text in enumerate(pair):
            rows = in_text[in_text["segment"] == segment]
            assert (rows["end"] <= len(whole)).all()
            shift = segment * (len(pair[0]) + 1)
            alone = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
            assert list(zip(rows["start"] - shift, rows["end"] - shift, strict=True)) == alone
        first, second = (set(in_text.loc[in_text["segment"] == segment, "word"]) for segment in (0, 1))
        assert not first & second
        assert tokenized.counts["whole_tokens"] == len(table)
    short, (cut,) = tokenizer(*PAIRS[1])["input_ids"], tokenize_texts(tokenizer, ["0"], [PAIRS[1]], 9)
    assert cut.counts["tokens"] == 9
    assert cut.counts["whole_tokens"] == len(short)


@pytest.mark.parametrize("name", ["bert", "mpnet", "gpt2"])
@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_are_truncated_as_by_the_tokenizer(name: str, pair: tuple[str, str]) -> None:
    tokenizer = make_tokenizer(name)
    document = document_of(tokenizer, pair)
    for length in range(6, len(document) + 2):
        cut = document.cut(length)
        assert cut.ids.tolist() == tokenizer(*pair, truncation=True, max_length=length)["input_ids"], length
        assert len(cut.segments) == len(cut.words) == len(cut.classes) == len(cut)


def test_shuffled_words_stay_in_their_segment() -> None:
    document = document_of(make_tokenizer("bert"), PAIRS[1])
    shuffled = shuffled_words(document, seed=1)
    assert not np.array_equal(shuffled.ids, document.ids)
    for segment in (-1, 0, 1):
        mask = document.segments == segment
        assert np.array_equal(shuffled.segments == segment, mask)
        assert sorted(shuffled.ids[mask]) == sorted(document.ids[mask])
    np.testing.assert_array_equal(shuffled.ids[document.segments < 0], document.ids[document.segments < 0])


@pytest.mark.parametrize("name", ["bert", "albert", "electra", "nomic_bert", "roberta", "deberta", "distilbert"])
def test_model_receives_the_tokenizers_segments(name: str, tmp_path: Path) -> None:
    folder = write_family(name, tmp_path)
    tokenizer, base = load_tokenizer(folder), load_base(folder)
    read_segments(base, tokenizer, pairs=True)
    ids = encode(tokenizer, PAIRS, 60)
    inputs = AutoTokenizer.from_pretrained(folder)(*zip(*PAIRS, strict=True), padding=True, return_tensors="pt")
    with torch.no_grad():
        own = AutoModel.from_pretrained(folder)(**inputs).last_hidden_state
        found = base(**padded(ids, tokenizer.pad_token_id)).last_hidden_state
        alone = torch.tensor([encode(tokenizer, ["the film was good"], 60)[0]])
        torch.testing.assert_close(base(alone).last_hidden_state, AutoModel.from_pretrained(folder)(alone)[0])
    mask = inputs["attention_mask"].bool()
    torch.testing.assert_close(found[mask], own[mask], rtol=1e-4, atol=1e-5)
    assert ("token_type_ids" in inputs and inputs["token_type_ids"].any()) == bool(base._forward_pre_hooks)


def test_underivable_segments_are_one_error(tmp_path: Path) -> None:
    folder = write_family("bert", tmp_path)
    text = (folder / "tokenizer.json").read_text()
    assert '"type_id": 1' in text
    (folder / "tokenizer.json").write_text(text.replace('"type_id": 1', '"type_id": 0'))
    with pytest.raises(InputError, match=r"dataset\.text_column: the tokenizer returns .* 'the film was very good"):
        check_model(folder, PAIRS)
    check_model(folder, [first for first, _ in PAIRS])


def reference_sources(layer: ReferenceLayer, segments: np.ndarray) -> dict[str, dict[str, np.ndarray]]:
    """Return ratios by group of sources, computed from explicit sums over the group and the token's own part.

    The groups are the token's own text, the other text and special tokens (segment -1). The arrays have one value for
    each token that is not special.
    """
    values: dict[str, dict[str, np.ndarray]] = {}
    positions = np.flatnonzero(segments >= 0)
    steps = {"attn_n": layer.F, "attnres_n": layer.R} | ({"attnresln_n": layer.T} if layer.post_norm else {})
    for name in PAIR_SOURCES:
        ratios: dict[str, list[float]] = {step: [] for step in ("attn_w", *steps)}
        for i in positions:
            segment = {"own text": segments[i], "other text": 1 - segments[i], "special tokens": -1}[name]
            sources = [j for j in np.flatnonzero(segments == segment) if j != i]
            ratios["attn_w"].append(sum(layer.attention[:, i, j].mean() for j in sources))
            for step, parts in steps.items():
                own = np.linalg.norm(parts[i, i])
                group = np.linalg.norm(sum((parts[i, j] for j in sources), np.zeros(parts.shape[-1])))
                ratios[step].append(group / (group + own) if group + own else 0.0)
        values[name] = {step: np.array(each) for step, each in ratios.items()}
    return values


@pytest.mark.parametrize("name", ["bert", "mpnet", "gpt2", "gemma3_text", "bart"])
def test_source_ratios_follow_their_definition(name: str, tmp_path: Path) -> None:
    folder = write_family(name, tmp_path)
    tokenizer, base = load_tokenizer(folder), load_base(folder)
    documents = [replace(document_of(tokenizer, pair), name=f"test/{n}") for n, pair in enumerate(PAIRS)]
    methods = ["attn_w", "attn_n", "attnres_n", "attnresln_n"]
    measurer = BatchMeasurer(base, methods, tokenizer.pad_token_id)  # the reference uses segment 0 for all tokens
    for document, measures in zip(documents, measurer.measures(documents), strict=True):
        reference = run_reference(name, base, document.ids.tolist())
        sums = measures.sums()
        for number, layer in enumerate(reference.layers):
            shifted = layer.memory is not None
            segments = np.r_[-1, document.segments[:-1]] if shifted else document.segments
            expected = reference_sources(layer, segments)
            for source in PAIR_SOURCES:
                for index, method in enumerate(measurer.methods):
                    true = expected[source][method].sum()
                    assert sums[source].values[number, index] == pytest.approx(true, abs=1e-4), (source, number, method)
                assert sums[source].counts.item() == (document.segments >= 0).sum()


def test_pairs_are_read_and_equal_pairs_stay_together(tmp_path: Path) -> None:
    table = entailments(90, 0)
    table = pd.concat([table, table.iloc[:30]])
    table.to_csv(tmp_path / "pairs.csv", index=False)

    def read(name: str, second: str = "hypothesis") -> dict[str, pd.DataFrame]:
        options: Any = {"text_column": ["premise", second], "label_column": "gold", "test_split": None}
        return read_splits(DatasetParameters(name=str(tmp_path / name), **options), 1)[0]

    splits = read("pairs.csv")
    assert [list(each.columns) for each in splits.values()] == [["text", "text_pair", "label", "label_name"]] * 3
    keys = {split: set(zip(each["text"], each["text_pair"], strict=True)) for split, each in splits.items()}
    assert not keys["train"] & keys["test"]
    assert not keys["train"] & keys["validation"]
    with pytest.raises(InputError, match=r"dataset\.text_column: .* has no column 'claim'"):
        read("pairs.csv", "claim")
    table.loc[table.index[3], "hypothesis"] = None
    table.to_parquet(tmp_path / "pairs.parquet")
    with pytest.raises(InputError, match="the second text is missing in column 'hypothesis', row 4"):
        read("pairs.parquet")


@pytest.fixture(scope="module", params=["bert", pytest.param("deberta-v2", marks=pytest.mark.families)])
def pair_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on text pairs of three classes."""
    folder = tmp_path_factory.mktemp("pairs")
    entailments(240, 0).to_csv(folder / "pairs.csv", index=False)
    write_family(request.param, folder / "model")
    return run_stages(
        folder,
        dataset={"name": "pairs.csv", "text_column": ["premise", "hypothesis"], "label_column": "gold"},
        finetune={"epochs": 2, "max_length": 40, "learning_rate": 1e-3},
        capture={"documents": [4], "texts": [["the film was good", "the film was bad"]], "max_length": 40},
        measure={"documents": 6, "gradient_documents": 1, "gradient_max_length": 12},
    )


def test_pairs_run_from_file_to_page(pair_run: Path, chromium: Any) -> None:
    run = Run(pair_run)
    by_class = run.table("finetune/finetune_by_class")
    assert by_class["label_name"].tolist() == list(LABELS)
    assert set(run.tokens["segment"]) == {-1, 0, 1}
    groups = run.table("measure/mixing_by_group").query("grouping == 'source'")
    assert set(groups["group"]) == set(PAIR_SOURCES)
    assert set(groups["method"]) == {"attn_w", "attnres_w", "attn_n", "attnres_n", "attnresln_n", "enc_n", "layer_n"}
    assert groups["mean"].between(0, 1).all()
    sums = groups.query("method == 'attn_w'").groupby(["checkpoint", "layer"])["mean"].sum()
    assert sums.between(0, 1).all()
    opened = Opened(chromium, run.page, viewport={"width": 1400, "height": 900})
    opened.page.locator("#document").select_option(index=0)
    words = opened.page.locator("#words").inner_text()
    assert words.count("[SEP]") == 2
    first, second = run.texts["test/4"].split("\n")
    raw = opened.page.locator("p.raw").first.text_content()
    assert f"{first}\n{second}" in raw
    method = opened.page.locator('.thumb[aria-pressed="true"]').get_attribute("data-measure")
    means = groups.query(f"method == '{method}' and checkpoint == 'finetuned'").set_index(["layer", "group"])["mean"]
    rows = opened.values("sources-chart")
    assert len(rows) == means.index.get_level_values("layer").nunique()
    for row in rows:
        for source in PAIR_SOURCES:
            assert float(row[source]) == pytest.approx(means[int(row["layer"]), source], abs=1e-4)
    opened.close()


def test_mixing_texts_and_pairs_is_one_error(tmp_path: Path) -> None:
    texts = {"texts": [["a", "b"], "the film"]}
    write_parameters(tmp_path, dataset={"text_column": ["a", "b"]}, capture=texts)
    problem = r"capture\.texts\[1\]: 'the film' is one text, but each review is a pair of texts$"
    with pytest.raises(InputError, match=problem):
        read_parameters(tmp_path / "params.yaml")
    write_parameters(tmp_path, capture=texts)
    with pytest.raises(InputError, match=r"texts\[0\]: \['a', 'b'\] is a pair of texts, but each review is one"):
        read_parameters(tmp_path / "params.yaml")


def test_classifier_predictions_match_transformers(pair_run: Path) -> None:
    run = Run(pair_run)
    reviews = pd.read_parquet(run.reviews / "test.parquet")
    logits = plain_logits(run.finetuned, zip(reviews["text"], reviews["text_pair"], strict=True))
    assert logits.argmax(-1).tolist() == pd.read_parquet(run.test_predictions_file)["predicted"].tolist()


@pytest.mark.parametrize("max_length", [3, 4])
def test_truncation_keeps_both_texts_of_a_pair(tiny_bert: Path, max_length: int) -> None:
    model = attnmix.load(tiny_bert)
    pairs = [("time flies", "an arrow")]
    with pytest.raises(
        InputError, match=rf"^text/0: with {max_length} tokens, a text of the pair is empty; use a larger"
    ):
        attnmix.measure(model, pairs, max_length=max_length)
    with pytest.warns(UserWarning, match="of which the first 5 are measured"):
        assert len(attnmix.measure(model, pairs, max_length=5).tokens) == 5

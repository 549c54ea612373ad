"""Texts and class names in non-Latin scripts and with hostile characters pass through the pipeline unchanged."""

from __future__ import annotations

import csv
import itertools
from html import escape
from pathlib import Path

import pandas as pd
import pytest
from conftest import SHORT, TINY, Workspace, plain_logits, run_stages
from matplotlib.figure import Figure
from transformers import BertConfig, BertModel, BertTokenizerFast

from attnmix.core.store.runs import Run
from attnmix.core.store.texts import read_split
from attnmix.figures.style import find_fallback_fonts, paper_style, printable, save_figure
from attnmix.page.sentences import document_note

SUBJECTS = ("この映画", "主演の演技", "音楽", "الفيلم", "أداء الممثلة", "الموسيقى")
VERDICTS = {
    "肯定": "はとても良かった。カフェ 👨‍👩‍👧",
    "否定": "はひどい。😀",
    "إيجابي": " ممتاز. IMAX 3D",
    "سلبي": " سيئ. «نعم»",
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
HOSTILE = [
    "<b>Bold</b> &amp; <script>document.title = 'gone'</script> film",
    "family 👨‍👩‍👧 film 👍🏽 and \N{VARIATION SELECTOR-16}",
    'a "quoted", text\nover two\r\nlines',
    "STX \x02 film \x07 \x1b[31m",
    "यह फ़िल्म अच्छी थी",
    "\N{RIGHT-TO-LEFT OVERRIDE}film\N{POP DIRECTIONAL FORMATTING} סרט טוב",
    "good film " * 5000,
]


def write_bert(folder: Path, texts: list[str]) -> None:
    """Write a tiny BERT without a head and with the characters of the texts as tokens."""
    letters = sorted(set("".join(texts).lower()) - {" "})
    vocabulary = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    names = {name: number for number, name in enumerate(vocabulary)}
    BertTokenizerFast(vocab=names, strip_accents=False).save_pretrained(folder)
    sizes = TINY | {"vocab_size": len(names), "num_hidden_layers": 2, "max_position_embeddings": 64}
    BertModel(BertConfig(**sizes)).save_pretrained(folder)


@pytest.mark.long
def test_multilingual_hostile_texts_run_from_file_to_page(workspace: Workspace) -> None:
    reviews = [
        (f"{subject} {number}{verdict}", name)
        for (name, verdict), subject, number in itertools.product(VERDICTS.items(), SUBJECTS, range(2))
    ]
    columns = {"text_column": "感想", "label_column": "المراجعة"}
    frame = pd.DataFrame([*reviews, *((text, "肯定") for text in HOSTILE)], columns=list(columns.values()))
    folder = workspace()
    frame.to_csv(folder / "reviews.csv", index=False, encoding="utf-8-sig", quoting=csv.QUOTE_ALL)
    write_bert(folder / "model", frame["感想"].tolist())
    captured = {"documents": [0, 1], "texts": [" ".join(HOSTILE[:-1]), HOSTILE[-1]]}
    run_stages(
        folder,
        dataset={"name": "reviews.csv", "validation_fraction": 0.25} | columns,
        capture=SHORT["capture"] | captured,
        measure={"documents": 3, "gradient_documents": 0, "matrices": ["attention"]},
        render={"formats": ["svg"], "texts": "all"},
    )
    run, names = Run(Path()), sorted(VERDICTS)
    assert run.table("finetune/finetune_by_class")["label_name"].tolist() == names
    for document, row in run.table("faithfulness/margins").set_index("document").iterrows():
        text = read_split("test", run.reviews)["text"][int(str(document).removeprefix("test/"))]
        logits = plain_logits(run.finetuned, [text])[0].tolist()
        highest = logits.pop(names.index(row["predicted"]))
        assert row["margin"] == pytest.approx(highest - max(logits), abs=1e-4)
    tokens = run.tokens.query("document.isin(['test/0', 'test/1'])")["token"]
    assert "[UNK]" not in set(tokens)
    # Figures contain letters as text, not as outlines.
    figure = (folder / "reports/figures/mixing_tokens_test_0.svg").read_text(encoding="utf-8")
    with paper_style(find_fallback_fonts(tokens)):
        assert all(escape(printable(token)) in figure for token in tokens[:8])
    assert run.documents.set_index("document").loc["text/1", "whole_tokens"] >= 10_002
    assert "<script>document.title" not in run.page.read_text(encoding="utf-8")
    for file in (run.page, *(folder / "reports/figures").glob("*.svg")):
        assert "\x00" not in file.read_text(encoding="utf-8")


def test_right_to_left_class_names_keep_sentence_order() -> None:
    row = {"label_name": "NA", "predicted": "سلبي\x00", "probability": 0.5}
    note = document_note(row | {"tokens": 9, "whole_tokens": 9, "unknown_tokens": 0})
    assert note == "The text is labelled NA and classified as \u2068سلبي␀\u2069 with a probability of 50%."


def test_fallback_fonts_cover_missing_letters(tmp_path: Path) -> None:
    letter = "\N{MATHEMATICAL BOLD CAPITAL A}"  # matplotlib includes it in a font that is not the default
    with paper_style():
        assert printable(letter) != letter
    for texts in ([letter], ["plain, café, Ω, فيلم \x02"]):
        with paper_style(find_fallback_fonts(texts)):
            figure = Figure(figsize=(1, 1))
            figure.text(0.1, 0.5, printable(letter))
            save_figure(figure, tmp_path / "drawn", ["png", "pdf", "svg"], 50)
        vectors = (tmp_path / "drawn.svg").read_text(encoding="utf-8")
        assert (letter in vectors, "&lt;U+1D400&gt;" in vectors) == (texts == [letter], texts != [letter])

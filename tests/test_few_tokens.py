"""Pages of short or repetitive texts omit UMAP maps of too few vectors and explain why."""

from __future__ import annotations

import base64
import json
import re
import zlib
from pathlib import Path
from typing import Any

import pytest

import attnmix
from attnmix.core.names import LAYOUTS
from attnmix.page.assembly import absence_notes, page_text
from attnmix.page.sentences import Subject
from attnmix.runs.text_results import load_measurer
from attnmix.serve import tokenized

SHORT = "the film was good and the time flies . " * 5  # 47 tokens
ENOUGH = f"{SHORT} film"


def data_of(page: str) -> Any:
    packed = re.search(r'id="data">([^<]*)<', page)
    assert packed
    return json.loads(zlib.decompress(base64.b64decode(packed.group(1))))


def layouts(data: Any) -> dict[str, set[str]]:
    """Return, for each layout on the page, the points that this layout lacks."""
    points = [site["point"] for site in data["sites"]]
    return {layout: {points[number] for number in each["absent"]} for layout, each in data["maps"].items()}


@pytest.mark.parametrize(
    ("text", "expected", "note"),
    [
        (
            SHORT,
            {"pca": set()},
            "UMAP was not computed, because it needs at least 48 tokens and 47 tokens are on this map.",
        ),
        (ENOUGH, {"separate": {"word_embedding"}, "pca": set()}, ""),
    ],
)
def test_served_page_omits_umap_of_too_few_vectors(
    tiny_bert: Path, text: str, expected: dict[str, set[str]], note: str
) -> None:
    measurer = load_measurer({"pretrained": tiny_bert})
    page = page_text(measurer.results(tokenized([text], measurer)), Subject("a model"))
    data = data_of(page)
    assert layouts(data) == expected
    assert data["mapNote"].startswith(note)
    assert bool(data["mapNote"]) == bool(note)
    assert data["cautions"]["map"].keys() == expected.keys()
    said = "Not on the separate map: word embedding. Fewer than 20 of their vectors are distinct" in page
    assert said == bool(expected.get("separate"))
    assert list(data["cautions"]["map"]) == list(expected)
    for layout, caution in data["cautions"]["map"].items():
        assert ("a different seed yields a different map" in caution) == (layout == "separate")


def test_saved_page_of_short_text_has_pca_only(tiny_bert: Path, tmp_path: Path) -> None:
    page = attnmix.measure(attnmix.load(str(tiny_bert)), "good").to_html(tmp_path / "page.html").read_text("utf-8")
    data = data_of(page)
    assert layouts(data) == {"pca": set()}
    assert data["mapNote"].endswith("The map shows the two principal components of their vectors (PCA).")
    assert "umap.layouts" not in page.partition('id="data"')[0]


@pytest.mark.parametrize(
    ("absent", "expected"),
    [
        (dict.fromkeys(LAYOUTS, ()), []),
        (
            {"joint": ["attention_heads"], "aligned": ["attention_heads"], "pca": [], "separate": []},
            ["joint and the aligned"],
        ),
        ({"joint": [], "aligned": ["word_embedding"], "separate": ["word_embedding"]}, ["aligned and the separate"]),
        (
            {"joint": ["attention_heads"], "aligned": ["attention_heads", "word_embedding"]},
            ["joint and the aligned", "aligned"],
        ),
        ({"aligned": ["attention_heads"], "separate": []}, ["aligned"]),
        ({"aligned": ["attention_heads"], "pca": []}, ["aligned"]),
    ],
)
def test_note_explains_layouts_with_missing_points(absent: dict[str, Any], expected: list[str]) -> None:
    notes = absence_notes({layout: set(points) for layout, points in absent.items()})
    assert [note.removeprefix("Not on the ").partition(" map: ")[0] for note in notes] == expected
    for note in notes:
        wide = "differ in width from" in note
        assert wide == ("attention heads" in note.lower() or "head outputs" in note.lower())

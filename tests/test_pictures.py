"""Pictures of maps: a page for each capture point, the same bytes every time, any token can be drawn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import digest
from PIL import Image

from stages.parameters import FiguresParameters
from stages.pictures.atlas import draw_atlas
from stages.pictures.joint_pages import JointFigure, draw_joint_pages, write_animation
from stages.pictures.style import PAGE_HEIGHT, paper_style, printable
from stages.pictures.tokens import Captured, read_captured
from stages.sites import Site
from stages.vocabulary import POINT_MARKS, STEP_MARKS, Mark

FIGURES = FiguresParameters(formats=["png", "pdf", "svg"], dpi=60, frequent_words=4, frames_per_second=4)
POST_LN = ("attention_heads", "attention_output", "attention_residual", "attention_norm", "ffn_output", "layer_output")
SPECIAL = {"[CLS]": "cls", "[SEP]": "sep", "<s>": "cls", "</s>": "sep"}
HOSTILE = ["[CLS]", "$x$", "<script>", "\u202e", "\U0001f600", "\x00", "film", "##s", "film", "[SEP]"]


def tokens_table(pieces: list[str], documents: int = 1) -> pd.DataFrame:
    parts = [pd.DataFrame({"document": f"test/{d}", "position": range(len(pieces))}) for d in range(documents)]
    classes = [SPECIAL.get(piece, "word") for piece in pieces] * documents
    return pd.concat(parts, ignore_index=True).assign(token_id=0, token=pieces * documents, token_class=classes)


def captured(tokens: pd.DataFrame) -> Captured:
    return read_captured(tokens, pd.DataFrame({"step": [], "layer": []}))


def sites_of(layers: int, points: tuple[str, ...] = POST_LN) -> list[Site]:
    sites = [Site(0, "word_embedding"), Site(0, "embedding_output")]
    return sites + [Site(layer, point) for layer in range(1, layers + 1) for point in points]


def map_of(tokens: pd.DataFrame, sites: Sequence[Site]) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    parts = []
    for site in sites:
        x, y = generator.normal(size=(2, len(tokens))) * [[30], [3]]
        parts.append(tokens[["document", "position"]].assign(layer=site.layer, point=site.point, x=x, y=y))
    return pd.concat(parts, ignore_index=True)


def test_every_layer_and_point_has_a_page_in_every_format_and_a_frame(tmp_path: Path) -> None:
    table = map_of(tokens_table(["[CLS]", "a", "film", "[SEP]"]), sites_of(2))
    with paper_style():
        pages = draw_joint_pages(table, tmp_path / "joint", FIGURES)
        write_animation(pages, tmp_path / "joint.gif", FIGURES.frames_per_second)
    expected = 2 + 2 * len(POST_LN)
    for suffix in FIGURES.formats:
        names = sorted(path.stem for path in (tmp_path / "joint").glob(f"*.{suffix}"))
        assert len(names) == expected
        assert names[0] == "01_layer_00_word_embedding"
        assert names[-1] == f"{expected}_layer_02_layer_output"
    with Image.open(tmp_path / "joint.gif") as animation:
        assert getattr(animation, "n_frames", 0) == expected


def test_pages_add_points_and_never_lose_one(tmp_path: Path) -> None:
    table = map_of(tokens_table(["a"] * 40), sites_of(1))
    with paper_style():
        pages = draw_joint_pages(table, tmp_path, FIGURES.model_copy(update={"formats": ["png"]}))
    inked = [(page[:, : page.shape[1] // 2] < 250).any(axis=-1).sum() for page in pages]
    # Only the newest points have an edge, so a page may lose a rim and no more.
    assert all(later > 0.95 * earlier for earlier, later in pairwise(inked))
    assert inked[-1] > 1.5 * inked[0]


def test_axes_hold_every_point_and_a_unit_is_as_long_on_both() -> None:
    table = map_of(tokens_table(["a"] * 50), sites_of(1))
    with paper_style():
        frame = JointFigure(table, dpi=60)
    (left, right), (bottom, top) = frame.axes.get_xlim(), frame.axes.get_ylim()
    assert left < table["x"].min() < table["x"].max() < right
    assert bottom < table["y"].min() < table["y"].max() < top
    box = frame.axes.get_window_extent()
    assert box.width / (right - left) == pytest.approx(box.height / (top - bottom))


def test_same_map_is_drawn_to_the_same_bytes(tmp_path: Path) -> None:
    tokens = tokens_table(["[CLS]", "a", "film", "a", "film", "[SEP]"], documents=2)
    table = map_of(tokens, sites_of(1))
    for name in ("first", "second"):
        with paper_style():
            pages = draw_joint_pages(table, tmp_path / name / "joint", FIGURES)
            write_animation(pages, tmp_path / name / "joint.gif", 4)
            draw_atlas("joint", table, captured(tokens), tmp_path / name / "atlas", FIGURES)
    assert digest(tmp_path / "first") == digest(tmp_path / "second")


@pytest.mark.parametrize("points", [POST_LN, POST_LN[:1]])
@pytest.mark.parametrize("layers", [1, 12])
def test_atlas_has_a_panel_for_each_map_and_none_is_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, points: tuple[str, ...], layers: int
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("stages.pictures.atlas.save_figure", lambda figure, *_: drawn.append(figure))
    tokens = tokens_table(["[CLS]", "the", "film", "the", "[SEP]"])
    with paper_style():
        draw_atlas("separate", map_of(tokens, sites_of(layers, points)), captured(tokens), tmp_path / "atlas", FIGURES)
        drawn[0].draw_without_rendering()
    assert drawn[0].get_size_inches()[1] <= PAGE_HEIGHT
    panels = [axes for axes in drawn[0].axes if axes.axison and axes.get_label() != "<colorbar>" and axes.collections]
    assert len([axes for axes in panels if len(axes.collections) >= 2]) == 2 + layers * len(points)
    assert {"[CLS]", "[SEP]", "the"} == {
        text.get_text() for axes in drawn[0].axes if axes.get_legend() for text in axes.get_legend().get_texts()
    }


@pytest.mark.parametrize("layout", ["joint", "separate"])
def test_atlas_has_one_scale_for_both_directions_and_one_frame_for_one_plane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("stages.pictures.atlas.save_figure", lambda figure, *_: drawn.append(figure))
    tokens = tokens_table(["[CLS]", "the", "film", "the", "[SEP]"], documents=2)
    table = map_of(tokens, sites_of(2))
    table[["x", "y"]] *= [100, 1]
    with paper_style():
        draw_atlas(layout, table[table["document"] == "test/1"], captured(tokens), tmp_path / "atlas", FIGURES)
        drawn[0].draw_without_rendering()
    panels = [axes for axes in drawn[0].axes if len(axes.collections) >= 2]
    assert len(panels) == 2 + 2 * len(POST_LN)
    assert sum(len(part.get_offsets()) for part in panels[0].collections) == 5
    for axes in panels:
        box, (left, right), (bottom, top) = axes.get_window_extent(), axes.get_xlim(), axes.get_ylim()
        assert box.width / (right - left) == pytest.approx(box.height / (top - bottom))
        for part in axes.collections:
            x, y = part.get_offsets().T
            assert left < x.min() <= x.max() < right
            assert bottom < y.min() <= y.max() < top
    middles = {tuple(np.round([sum(axes.get_xlim()), sum(axes.get_ylim())], 6)) for axes in panels}
    assert len(middles) == (1 if layout == "joint" else len(panels))
    assert layout.capitalize() in drawn[0].get_suptitle()


def test_hostile_tokens_are_drawn_without_a_warning(tmp_path: Path) -> None:
    tokens = tokens_table(HOSTILE * 2)
    with paper_style():
        draw_atlas("joint", map_of(tokens, sites_of(1)), captured(tokens), tmp_path / "atlas", FIGURES)
    assert printable("caf\u00e9 \u4f60\x00") == "caf\u00e9 <U+4F60><U+0000>"


@pytest.mark.parametrize("marks", [POINT_MARKS, STEP_MARKS])
def test_no_two_points_and_no_two_steps_look_alike(marks: dict[str, Mark]) -> None:
    assert len({mark.marker for mark in marks.values()}) == len(marks)
    assert len({mark.label for mark in marks.values()}) == len(marks)
    okabe_ito = {"#000000", "#999999", "#CC79A7", "#56B4E9", "#0072B2", "#B8A600", "#E69F00", "#D55E00", "#009E73"}
    assert {mark.color for mark in marks.values()} == okabe_ito

"""Pictures of maps: what they hold is the map's, in the same bytes every time, and any token can be drawn."""

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

from stages.names import Mark
from stages.parameters import FiguresParameters
from stages.pictures.animation import Scene, planes_of, write_animation
from stages.pictures.atlas import draw_atlas
from stages.pictures.joint_pages import JointFigure, draw_joint_pages
from stages.pictures.labels import place_names
from stages.pictures.residual import draw_residual
from stages.pictures.stack import shown_text
from stages.pictures.style import PAGE_HEIGHT, paper_style, printable
from stages.pictures.tokens import Captured, read_captured
from stages.sites import Site
from stages.vocabulary import POINT_MARKS, STEP_MARKS

FIGURES = FiguresParameters(formats=["png", "pdf", "svg"], dpi=60, frequent_words=4, points_per_second=4)
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


def test_every_layer_and_point_has_a_page_in_every_format(tmp_path: Path) -> None:
    table = map_of(tokens_table(["[CLS]", "a", "film", "[SEP]"]), sites_of(2))
    with paper_style():
        draw_joint_pages(table, tmp_path / "joint", FIGURES)
    expected = 2 + 2 * len(POST_LN)
    for suffix in FIGURES.formats:
        names = sorted(path.stem for path in (tmp_path / "joint").glob(f"*.{suffix}"))
        assert len(names) == expected
        assert names[0] == "01_layer_00_word_embedding"
        assert names[-1] == f"{expected}_layer_02_layer_output"


def test_pages_add_points_and_never_lose_one(tmp_path: Path) -> None:
    table = map_of(tokens_table(["a"] * 40), sites_of(1))
    with paper_style():
        draw_joint_pages(table, tmp_path, FIGURES.model_copy(update={"formats": ["png"]}))
    pages = [np.asarray(Image.open(path)) for path in sorted(tmp_path.glob("*.png"))]
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
            draw_joint_pages(table, tmp_path / name / "joint", FIGURES)
            write_animation(table, captured(tokens), tmp_path / name / "joint", 4)
            draw_residual("joint", table, captured(tokens), tmp_path / name / "residual", FIGURES)
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
    table = map_of(tokens, sites_of(1))
    with paper_style():
        draw_atlas("joint", table, captured(tokens), tmp_path / "atlas", FIGURES)
        draw_residual("joint", table, captured(tokens), tmp_path / "residual", FIGURES)
        write_animation(table, captured(tokens), tmp_path / "joint", 20)
    assert printable("caf\u00e9 \u4f60\x00") == "caf\u00e9 <U+4F60><U+0000>"


@pytest.mark.parametrize("levels", [1, 2, 13])
def test_residual_stream_darkens_by_layer_and_names_the_same_words_in_every_panel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, levels: int
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("stages.pictures.residual.save_figure", lambda figure, *_: drawn.append(figure))
    text = ["[CLS]", "time", "flies", "like", "an", "arr", "##ow", "[SEP]"]
    tokens = tokens_table(text, documents=2)
    table = map_of(tokens, sites_of(levels - 1))
    with paper_style():
        draw_residual("joint", table, captured(tokens), tmp_path / "residual", FIGURES)
    panels = drawn[0].axes
    assert len(panels) == min(levels, 6)
    own = table[table["document"] == "test/0"].groupby(["layer", "point"])
    shown = []
    for axes in panels:
        newest = axes.collections[-1]
        layer = len(axes.collections) - 1
        at_layer = own.get_group((layer, "layer_output" if layer else "embedding_output"))[["x", "y"]].to_numpy()
        np.testing.assert_array_equal(newest.get_offsets(), at_layer)
        shades = [sum(part.get_facecolor()[0][:3]) for part in axes.collections]
        assert shades == sorted(shades, reverse=True)
        assert len(set(shades)) == len(shades)
        shown.append(layer)
        names = {note.get_text(): tuple(note.xy) for note in axes.texts}
        assert set(names) == {"[CLS]", "time", "flies", "like", "an", "[SEP]"}  # a piece of a word tells little
        assert all(at == tuple(at_layer[text.index(name)]) for name, at in names.items())
    assert (shown[0], shown[-1]) == (0, levels - 1)
    assert [axes.get_title() for axes in panels][1:] == [f"Layer {layer}" for layer in shown[1:]]


def test_a_free_text_is_shown_before_a_review() -> None:
    assert shown_text(pd.DataFrame({"document": ["test/3", "test/3", "text/0", "text/1"]})) == "text/0"
    assert shown_text(pd.DataFrame({"document": ["test/3", "test/1"]})) == "test/3"


def test_without_the_residual_stream_there_is_no_page_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = tokens_table(["a", "film"])
    table = map_of(tokens, [Site(1, "attention_heads"), Site(1, "ffn_output")])
    with paper_style(), caplog.at_level("INFO"):
        draw_residual("joint", table, captured(tokens), tmp_path / "residual", FIGURES)
    assert not list(tmp_path.iterdir())
    assert "no page of the residual stream" in caplog.text


def test_words_glide_from_point_to_point_and_rest_at_each(tmp_path: Path) -> None:
    import av

    tokens = tokens_table(["[CLS]", "time", "flies", "like", "an", "arrow", "[SEP]"], documents=2)
    table = map_of(tokens, sites_of(1))
    own = table[table["document"] == "test/0"]
    with paper_style():
        scene = Scene(table, captured(tokens))
        way = []
        for _, move in scene.frames(3):
            way.append((move, np.asarray(scene.dots.get_offsets()).copy(), [word.get_text() for word in scene.names]))
        write_animation(table, captured(tokens), tmp_path / "new/joint", 2)
    assert [move for move, *_ in way] == [0, *([1, 2, 3, 0] * (len(sites_of(1)) - 1))]
    at_rest = [xy for move, xy, _ in way if not move]
    for (_, of_site), xy in zip(own.groupby(["layer", "point"], sort=False), at_rest, strict=True):
        np.testing.assert_allclose(xy, of_site[["x", "y"]])
    start, half, end = way[0][1], way[2][1], way[4][1]
    np.testing.assert_allclose(half, (start + end) / 2)
    assert np.abs(way[1][1] - start).sum() < np.abs(half - start).sum() / 2  # it starts slowly
    assert {tuple(sorted(words)) for *_, words in way} == {tuple(sorted(set(tokens["token"])))}
    with av.open(str(tmp_path / "new/joint.mp4")) as video:
        frames = list(video.decode(video=0))
        size = frames[0].width, frames[0].height
        assert "creation_time" not in video.metadata
    with Image.open(tmp_path / "new/joint.gif") as animation:
        assert animation.size[0] * size[1] == pytest.approx(animation.size[1] * size[0], rel=0.01)
        assert getattr(animation, "n_frames", 0) > len(sites_of(1))
    assert float(frames[-1].pts * frames[-1].time_base) == pytest.approx(len(sites_of(1)) / 2 + 0.5, abs=0.01)
    assert np.abs(frames[0].to_ndarray(format="rgb24").astype(int) - next(scene.frames(0))[0]).mean() < 2


def test_video_planes_are_those_of_the_standard() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    red, green, blue = np.moveaxis(pixels / 255, -1, 0)
    luma = 0.2126 * red + 0.7152 * green + 0.0722 * blue  # ITU-R BT.709
    planes = [16 + 219 * luma]
    for chroma in ((blue - luma) / 1.8556, (red - luma) / 1.5748):
        planes.append(128 + 224 * chroma.reshape(2, 2, 3, 2).mean(axis=(1, 3)))
    expected = np.concatenate([planes[0].ravel(), planes[1].ravel(), planes[2].ravel()])
    assert np.abs(planes_of(pixels).ravel() - expected).max() < 1.5


def test_names_beside_points_cover_no_other_name_and_stay_in_the_panel() -> None:
    points = np.concatenate([np.random.default_rng(0).normal(100, 15, (150, 2)), [[1.0, 1.0], [199.0, 199.0]]])
    sizes = np.tile([[30.0, 6.0]], (12, 1))
    middles = place_names(points, [*range(10), 150, 151], sizes, np.array([[0.0, 0.0], [200.0, 200.0]]))
    assert (middles - sizes / 2 >= 0).all()
    assert (middles + sizes / 2 <= 200).all()
    apart = np.abs(middles[:, None] - middles) >= sizes - 1e-9
    assert (apart.any(axis=-1) | np.eye(12, dtype=bool)).all()


@pytest.mark.parametrize("marks", [POINT_MARKS, STEP_MARKS])
def test_no_two_points_and_no_two_steps_look_alike(marks: dict[str, Mark]) -> None:
    assert len({mark.marker for mark in marks.values()}) == len(marks)
    assert len({mark.label for mark in marks.values()}) == len(marks)
    okabe_ito = {"#000000", "#999999", "#CC79A7", "#56B4E9", "#0072B2", "#B8A600", "#E69F00", "#D55E00", "#009E73"}
    assert {mark.color for mark in marks.values()} == okabe_ito

"""Figures of maps: they hold the map's points, are the same bytes every time, and draw any token."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import digest, tokens_table
from matplotlib.figure import Figure
from PIL import Image

from attnmix.core.points import Site
from attnmix.figures.maps import draw_atlas, draw_residual, example_text, write_animation, write_joint_pages
from attnmix.figures.style import PAGE_HEIGHT, paper_style, place_labels, save_figure
from attnmix.figures.tokens import CapturedTexts, read_captured

FORMATS, DPI = ["png", "pdf", "svg"], 60
POST_LN = ("attention_heads", "attention_output", "attention_residual", "attention_norm", "ffn_output", "layer_output")
TEXT = ["[CLS]", "time", "flies", "like", "an", "arr", "##ow", "[SEP]"]
HOSTILE = ["[CLS]", "$x$", "<script>", "\u202e", "\U0001f600", "\x00", "film", "##s", "film", "[SEP]"]


def captured_texts(tokens: list[str], *documents: str) -> CapturedTexts:
    special = {"[CLS]": "cls", "[SEP]": "sep"}
    tables = [tokens_table(tokens, special, document) for document in documents]
    return read_captured(pd.concat(tables, ignore_index=True), pd.DataFrame({"step": [], "layer": []}))


def random_map(captured: CapturedTexts, layers: int, points: tuple[str, ...] = POST_LN) -> pd.DataFrame:
    sites = [Site(0, "word_embedding"), Site(0, "embedding_output")]
    sites += [Site(layer, point) for layer in range(1, layers + 1) for point in points]
    generator = np.random.default_rng(0)
    parts = []
    for site in sites:
        x, y = generator.normal(size=(2, len(captured.tokens))) * [[30], [3]]
        parts.append(captured.tokens[["document", "position"]].assign(layer=site.layer, point=site.point, x=x, y=y))
    return pd.concat(parts, ignore_index=True)


def test_hostile_tokens_are_drawn_without_a_warning_to_the_same_bytes(tmp_path: Path) -> None:
    captured = captured_texts(HOSTILE, "test/0", "test/1")
    table = random_map(captured, 1)
    for folder in (tmp_path / "first", tmp_path / "second"):
        with paper_style():
            write_joint_pages(table, None, folder / "joint", FORMATS, DPI)
            write_animation(table, captured, folder / "joint.gif")
            for draw in (draw_atlas, draw_residual):
                figure = draw("joint", table, captured)
                assert figure is not None
                save_figure(figure, folder / draw.__name__, FORMATS, DPI)
    assert digest(tmp_path / "first") == digest(tmp_path / "second")
    assert all("\x00" not in path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.svg"))


def test_joint_pages_add_points_and_never_lose_one(tmp_path: Path) -> None:
    with paper_style():
        write_joint_pages(random_map(captured_texts(["a"] * 40, "test/0"), 2), None, tmp_path, FORMATS, DPI)
    names = [path.stem for path in sorted(tmp_path.glob("*.png"))]
    assert names == [path.stem for path in sorted(tmp_path.glob("*.svg"))]
    assert len(names) == 2 + 2 * len(POST_LN)
    assert (names[0], names[-1]) == ("01_layer_00_word_embedding", "14_layer_02_layer_output")
    assert (tmp_path / "joint.pdf").read_bytes().count(b"/Type /Page ") == len(names)
    pages = [np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB")) for name in names]
    assert {page.shape for page in pages} == {(276, 420, 3)}  # 7 by 4.6 inches
    ink = [int((page[:, :250] < 250).any(axis=-1).sum()) for page in pages]
    # Only the newest points have an edge, so a page may lose a rim and no more.
    assert all(later > 0.95 * earlier for earlier, later in pairwise(ink))
    assert ink[-1] > 1.5 * ink[0]


@pytest.mark.parametrize(("layers", "points", "layout"), [(1, POST_LN, "joint"), (12, POST_LN[:1], "separate")])
def test_atlas_holds_every_point_at_one_scale(layers: int, points: tuple[str, ...], layout: str) -> None:
    captured = captured_texts(["[CLS]", "the", "film", "the", "[SEP]"], "test/0", "test/1")
    table = random_map(captured, layers, points)
    with paper_style():
        figure = draw_atlas(layout, table[table["document"] == "test/1"], captured)
        figure.draw_without_rendering()
    assert figure.get_size_inches()[1] <= PAGE_HEIGHT
    panels = [axes for axes in figure.axes if len(axes.collections) >= 2]
    assert len(panels) == 2 + layers * len(points)
    for axes in panels:
        box, (left, right), (bottom, top) = axes.get_window_extent(), axes.get_xlim(), axes.get_ylim()
        assert box.width / (right - left) == pytest.approx(box.height / (top - bottom))
        x, y = np.concatenate([dots.get_offsets() for dots in axes.collections]).T
        assert len(x) == 5
        assert left < x.min() <= x.max() < right
        assert bottom < y.min() <= y.max() < top
    centers = {tuple(np.round([sum(axes.get_xlim()), sum(axes.get_ylim())], 6)) for axes in panels}
    assert len(centers) == (1 if layout == "joint" else len(panels))
    assert layout.capitalize() in figure.get_suptitle()
    legend = next(axes.get_legend() for axes in figure.axes if axes.get_legend())
    assert {text.get_text() for text in legend.get_texts()} == {"[CLS]", "[SEP]", "the"}


@pytest.mark.parametrize("levels", [1, 13])
def test_residual_stream_darkens_by_layer_and_names_whole_words(levels: int) -> None:
    captured = captured_texts(TEXT, "test/0", "test/1")
    table = random_map(captured, levels - 1)
    with paper_style():
        figure = draw_residual("joint", table, captured)
        assert figure is not None
        figure.draw_without_rendering()
    assert len(figure.axes) == min(levels, 6)
    groups = table[table["document"] == "test/0"].groupby(["layer", "point"])
    layers = [len(axes.collections) - 1 for axes in figure.axes]
    assert (layers[0], layers[-1]) == (0, levels - 1)
    for axes, layer in zip(figure.axes, layers, strict=True):
        xy = groups.get_group((layer, "layer_output" if layer else "embedding_output"))[["x", "y"]].to_numpy()
        np.testing.assert_array_equal(axes.collections[-1].get_offsets(), xy)
        shades = [sum(dots.get_facecolor()[0][:3]) for dots in axes.collections]
        assert shades == sorted(set(shades), reverse=True)
        assert {note.get_text() for note in axes.texts} == {*TEXT} - {"arr", "##ow"}  # a piece of a word tells little
        assert all(tuple(note.xy) == tuple(xy[TEXT.index(note.get_text())]) for note in axes.texts)
        assert axes.get_title() == (f"Layer {layer}" if layer else "Embedding output")


def test_without_the_residual_stream_there_is_no_figure_of_it(caplog: pytest.LogCaptureFixture) -> None:
    captured = captured_texts(["a", "film"], "test/0")
    with caplog.at_level("INFO"):
        assert draw_residual("joint", random_map(captured, 1).query("point == 'ffn_output'"), captured) is None
    assert "no figure of the residual stream" in caplog.text


def test_animation_rests_at_each_point_and_moves_between(tmp_path: Path) -> None:
    captured = captured_texts(TEXT, "test/0", "test/1")
    with paper_style():
        write_animation(random_map(captured, 1), captured, tmp_path / "joint.gif")
    stops = 2 + len(POST_LN)
    with Image.open(tmp_path / "joint.gif") as animation:
        frames, durations = [], []
        for number in range(getattr(animation, "n_frames", 0)):
            animation.seek(number)
            durations.append(animation.info["duration"])
            frames.append(np.asarray(animation.convert("RGB")).astype(int))
    assert sum(durations) == (stops - 1) * 500 + 2000  # two points in a second, the last one for longer
    per_point = (len(frames) - 1) // (stops - 1)
    assert len(frames) == 1 + per_point * (stops - 1)
    assert per_point > 1
    assert all((after != before).any() for before, after in pairwise(frames))
    green = [(np.abs(frame - (0, 158, 115)).max(axis=-1) < 30).any() for frame in (frames[0], frames[-1])]
    assert green == [False, True]  # the layer's output comes last, the word embedding is black


def test_labels_cover_no_other_label_and_stay_in_the_panel() -> None:
    xy = np.concatenate([np.random.default_rng(0).normal(100, 15, (150, 2)), [[1.0, 1.0], [199.0, 199.0]]])
    labels = {index: f"word {index}" for index in (*range(10), 150, 151)}
    with paper_style():
        figure = Figure(figsize=(3, 3))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 200), ylim=(0, 200))
        centres = zip(place_labels(axes, xy, labels, 5), labels.values(), strict=True)
        looks = {"fontsize": 5, "ha": "center", "va": "center"}
        boxes = [axes.text(*centre, label, **looks).get_window_extent() for centre, label in centres]
    assert all(figure.bbox.containsx(x) for box in boxes for x in (box.x0, box.x1))
    assert all(figure.bbox.containsy(y) for box in boxes for y in (box.y0, box.y1))
    assert not any(box.overlaps(other) for place, box in enumerate(boxes) for other in boxes[:place])


def test_a_free_text_is_shown_before_a_review() -> None:
    for documents, shown in ((("test/3", "text/0", "text/1"), "text/0"), (("test/3", "test/1"), "test/3")):
        captured = captured_texts(["a", "film"], *documents)
        with paper_style():
            assert example_text(random_map(captured, 1), captured, 5).document == shown

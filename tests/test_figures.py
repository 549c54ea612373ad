"""Figures: they show what was measured and mapped, draw any token, stand out on white, and are the same every time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from conftest import digest, run_tokenized, tokens_table, write_parameters, write_reviews, write_tiny_bert
from matplotlib.figure import Figure
from PIL import Image

from attnmix.core.names import Site
from attnmix.figures import style
from attnmix.figures.labels import POINT_MARKS, RATIO_MARKS, STEP_MARKS, WORD_MARKS
from attnmix.figures.maps import draw_atlas, draw_residual, example_text, write_animation, write_joint_pages
from attnmix.figures.mixing import draw_matrices, draw_reviews, draw_strips
from attnmix.figures.style import darken_for_contrast, high_contrast_cmap
from attnmix.figures.tokens import CapturedTexts, DisplayToken, TextLayers, read_captured
from attnmix.store.runs import Run
from stages import measure
from stages.common.parameters import read_parameters
from stages.render import draw_all, mixing_figures

FORMATS, DPI = ["png", "pdf", "svg"], 60
POST_LN = ("attention_heads", "attention_output", "attention_residual", "attention_norm", "ffn_output", "layer_output")
TEXT = ["[CLS]", "time", "flies", "like", "an", "arr", "##ow", "[SEP]"]
HOSTILE = ["[CLS]", "$x$", "<script>", "\u202e", "\U0001f600", "\x00", "film", "##s", "film", "[SEP]"]


@pytest.fixture(autouse=True)
def paper_style() -> Iterator[None]:
    """What draws, draws under `paper_style`."""
    with style.paper_style():
        yield


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
        write_joint_pages(table, None, folder / "joint", FORMATS, DPI)
        write_animation(table, captured, folder / "joint.gif")
        for draw in (draw_atlas, draw_residual):
            figure = draw("joint", table, captured)
            assert figure is not None
            style.save_figure(figure, folder / draw.__name__, FORMATS, DPI)
    assert digest(tmp_path / "first") == digest(tmp_path / "second")
    assert all("\x00" not in path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.svg"))


def test_joint_pages_add_points_and_never_lose_one(tmp_path: Path) -> None:
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
    figure = draw_atlas(layout, table[table["document"] == "test/1"], captured)
    figure.draw_without_rendering()
    assert figure.get_size_inches()[1] <= style.PAGE_HEIGHT
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
    figure = Figure(figsize=(3, 3))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 200), ylim=(0, 200))
    centres = zip(style.place_labels(axes, xy, labels, 5), labels.values(), strict=True)
    looks = {"fontsize": 5, "ha": "center", "va": "center"}
    boxes = [axes.text(*centre, label, **looks).get_window_extent() for centre, label in centres]
    assert all(figure.bbox.containsx(x) for box in boxes for x in (box.x0, box.x1))
    assert all(figure.bbox.containsy(y) for box in boxes for y in (box.y0, box.y1))
    assert not any(box.overlaps(other) for place, box in enumerate(boxes) for other in boxes[:place])


def test_a_free_text_is_shown_before_a_review() -> None:
    for documents, shown in ((("test/3", "text/0", "text/1"), "text/0"), (("test/3", "test/1"), "test/3")):
        captured = captured_texts(["a", "film"], *documents)
        assert example_text(random_map(captured, 1), captured, 5).document == shown


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The run in a folder, which becomes the current one, where two free texts and a few reviews were measured."""
    folder = tmp_path_factory.mktemp("measured")
    changes: dict[str, Any] = {
        "measure": {"documents": 4, "gradient_documents": 0},
        "capture": {"documents": [], "texts": ["time flies like an $ arrow .", "film " * 40], "max_length": 60},
        "render": {"formats": ["png", "svg"], "dpi": 60},
    }
    with pytest.MonkeyPatch.context() as patch:
        write_parameters(folder, **changes)
        patch.chdir(folder)
        write_reviews(folder / "data/reviews")
        write_tiny_bert(folder / "models/pretrained", seed=0)
        write_tiny_bert(folder / "models/finetuned", seed=1)
        run_tokenized(measure)
        yield Run(folder)


def test_every_captured_document_gets_its_figures(measured: Run) -> None:
    captured, digests = read_captured(measured.tokens, measured.steps), []
    for _ in range(2):
        draw_all([*mixing_figures(measured, captured)], captured, read_parameters().render)
        digests.append(digest(measured.figures))
    assert digests[0] == digests[1]
    stems = {"mixing_by_layer", "mixing_reviews", "mixing_steps", "mixing_tokens_text_0", "mixing_tokens_text_1"}
    for kind in ("contributions", "rollouts"):
        stems |= {f"mixing_{kind}_text_{i}_{name}" for i in (0, 1) for name in ("pretrained", "finetuned")}
    names = {path.name for path in measured.figures.iterdir()}
    assert names == {f"{stem}.{suffix}" for stem in stems for suffix in ("png", "svg")}

    def text_of(name: str) -> str:
        return (measured.figures / f"mixing_{name}.svg").read_text(encoding="utf-8")

    assert all(f">{text}<" in text_of("tokens_text_0") for text in ("[CLS]", "Fine-tuned", "Difference"))
    part, whole = text_of("contributions_text_1_finetuned"), text_of("contributions_text_0_finetuned")
    assert all(text in part for text in ("tokens 0 to 19 of 42", ">Value Zeroing<", ">rest of text<"))
    assert all(text not in whole for text in ("tokens 0", ">rest of text<"))
    assert all(f">{text}<" in text_of("reviews") for text in ("Pretrained (left)", "Fine-tuned (right)"))


def text_layers(text: str, layers: int) -> TextLayers:
    tokens = [DisplayToken(word, True, "cls" if word == "[CLS]" else "word") for word in text.split()]
    return TextLayers("", range(1, layers + 1), None, tokens)


def cells_of(image: Any) -> Any:
    """The values of an image, with NaN for those that it does not show."""
    return np.ma.filled(np.ma.masked_invalid(image.get_array()).astype(float), np.nan)


def test_matrices_show_a_whole_sentence_without_its_diagonal(measured: Run) -> None:
    methods, part = ["attention", "value_zeroing"], range(3, 6)
    text = text_layers("[CLS] yes . a film . " + "well " * 36, 2)
    figure: Any = draw_matrices(measured, "finetuned", "text/1", text, methods)
    figure.draw_without_rendering()
    panels = [axes for axes in figure.axes if len(axes.images) == 2]
    assert len(panels) == 2 * len(methods)
    assert "tokens 3 to 5 of 42" in figure.get_suptitle()
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["a", "film", "."]
    for row, method in enumerate(methods):
        shown = []
        for layer, axes in enumerate(panels[2 * row : 2 * row + 2]):
            matrix = measured.matrix("finetuned", "text/1", method)[layer].astype(float)
            shares = matrix / matrix.sum(axis=1, keepdims=True)
            expected = np.array([[np.nan if i == j else shares[i, j] for j in part] for i in part])
            np.testing.assert_allclose(cells_of(axes.images[0]), expected, rtol=1e-5)
            rest = [sum(shares[i, j] for j in range(42) if j not in part) for i in part]
            strips = np.stack([[shares[i, i] for i in part], rest], axis=1)
            np.testing.assert_allclose(cells_of(axes.images[1]), strips, rtol=1e-4)
            means = [axes.texts[0].get_text(), next(t for t in axes.texts[1:] if t.get_text().isdigit()).get_text()]
            assert means == [f"{100 * mean:.0f}" for mean in strips.mean(axis=0)]
            shown += expected[~np.isnan(expected)].tolist()
        for axes in panels[2 * row : 2 * row + 2]:
            assert axes.images[0].norm.vmax == pytest.approx(np.percentile(shown, 99), rel=1e-5)


@pytest.mark.parametrize("tokens", [1, 40])
def test_strips_end_with_the_difference(tokens: int) -> None:
    layers = range(1, 4)
    index = pd.MultiIndex.from_product([["pretrained", "finetuned"], layers, range(tokens)])
    rows = index.set_names(["checkpoint", "layer", "position"]).to_frame(index=False)
    rows["attn_n"] = np.random.default_rng(0).beta(2, 5, len(rows))
    figure: Any = draw_strips(rows, "text/0", text_layers("word " * tokens, 3))
    panels = [axes for axes in figure.axes if axes.images]
    before, after = (
        rows[rows["checkpoint"] == name].pivot(index="layer", columns="position", values="attn_n")
        for name in ("pretrained", "finetuned")
    )
    assert len(panels) == 3 * -(-tokens // 32)
    for place, expected in enumerate([before, after, after - before]):
        shown = np.concatenate([cells_of(axes.images[0]) for axes in panels[place::3]], axis=1)
        np.testing.assert_allclose(shown[:, :tokens], expected)
        assert np.isnan(shown[:, tokens:]).all()
    scale = panels[2].images[0].norm
    assert scale.vmin == -scale.vmax
    assert scale.vmax == pytest.approx(max(np.percentile(np.abs(after - before), 99), 0.01))
    assert [axes.get_ylabel() for axes in panels[:3]] == ["Pretrained", "Fine-tuned", "Difference"]


def test_a_strip_of_one_checkpoint_has_no_difference() -> None:
    rows = pd.DataFrame({"checkpoint": "finetuned", "layer": [1, 1], "position": [0, 1], "attn_n": [0.2, np.nan]})
    figure = draw_strips(rows, "text/0", text_layers("two words", 1))
    assert [axes.get_ylabel() for axes in figure.axes if axes.images] == ["Fine-tuned"]


@pytest.mark.parametrize("names", [["finetuned"], ["pretrained", "finetuned"]])
def test_every_review_is_a_dot_at_every_layer(names: list[str]) -> None:
    layers, documents = range(1, 15), 60
    index = pd.MultiIndex.from_product([names, range(documents), layers], names=["checkpoint", "document", "layer"])
    reviews = index.to_frame(index=False).assign(method="attn_n")
    reviews["mean"] = np.random.default_rng(0).beta(2, 9, len(index))
    reviews["tokens"] = 20 + 3 * reviews["document"]
    means = reviews.groupby(["checkpoint", "layer", "method"])["mean"].mean().reset_index()
    means = means.assign(ci_low=means["mean"] - 0.01, ci_high=means["mean"] + 0.01, weight="review", tokens_of="all")
    figure: Any = draw_reviews(reviews, means, "Layer")
    figure.draw_without_rendering()
    dots = [part for part in figure.axes[0].collections if len(part.get_offsets()) == documents * len(layers)]
    assert len(dots) == len(names)
    for name, part in zip(names, dots, strict=True):
        x, y = np.asarray(part.get_offsets()).T
        rows = reviews[reviews["checkpoint"] == name]
        for layer in layers:
            expected = sorted(rows.loc[rows["layer"] == layer, "mean"])
            np.testing.assert_array_equal(sorted(y[np.round(x) == layer]), expected)
        assert len({*zip(x.round(3), y.round(2), strict=True)}) > 0.9 * len(x)  # side by side, not on top of each other
        lightness = part.to_rgba(part.get_array())[:, :3].sum(axis=1)
        assert lightness[rows["tokens"].argmax()] < lightness[rows["tokens"].argmin()]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert any("(left)" in label for label in labels) == (len(names) == 2)
    assert "from 20 to 197 tokens" in figure.legends[0].get_title().get_text()


COLORS = {mark.color for marks in (POINT_MARKS, STEP_MARKS, RATIO_MARKS) for mark in marks.values()}


def contrast_to_white(color: str) -> float:
    """WCAG 2.2's definition, from its text."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)


@pytest.mark.parametrize("least", [3.0, 4.5])
@pytest.mark.parametrize("color", sorted(COLORS | {color for color, _ in WORD_MARKS}))
def test_colours_stand_out_on_white_and_keep_their_hue(color: str, least: float) -> None:
    shown = darken_for_contrast(color, least)
    assert contrast_to_white(shown) >= least
    if contrast_to_white(color) >= 1.02 * least:
        assert shown == color.lower()
    hues = [mpl.colors.rgb_to_hsv(mpl.colors.to_rgb(each))[0] for each in (color, shown)]
    assert hues[0] == pytest.approx(hues[1], abs=0.06)


def test_shades_of_colour_maps_stand_out_on_white() -> None:
    for name in ("Greys", "Blues", "Oranges"):
        shades = [
            contrast_to_white(mpl.colors.to_hex(color)) for color in high_contrast_cmap(name)(np.linspace(0, 1, 50))
        ]
        assert min(shades) > 2.95
        assert max(shades) > 9


def test_text_stays_text_in_a_font_that_printers_take(tmp_path: Path) -> None:
    figure = Figure(figsize=(2, 1))
    figure.text(0.1, 0.5, "Mixing, café, фильм ␣")
    style.save_figure(figure, tmp_path / "figure", ["pdf", "svg"], 100)
    pdf = (tmp_path / "figure.pdf").read_bytes()
    assert set(re.findall(rb"/BaseFont /[A-Z]{6}\+([A-Za-z-]+)", pdf)) == {b"Arimo-Regular", b"DejaVuSans"}
    assert b"/Type3" not in pdf
    assert pdf.count(b"/FontFile2") > 0
    svg = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert ">Mixing, café, фильм ␣<" in svg
    assert "font-family: 'Arimo', Helvetica, Arial" in svg


def test_labels_of_curves_stand_at_their_ends_in_order_and_apart() -> None:
    figure = Figure(figsize=(3, 2))
    panels = figure.subplots(1, 2)
    figure.subplots_adjust(right=0.8, wspace=0.6)
    heights, names = [0.5, 0.51, 0.52, 0.0, 1.0], ["one", "two\nlines", "three", "last", "first"]
    for height, name in zip(heights, names, strict=True):
        panels[0].plot([1, 6], [0.5, height], color="#0072b2", label=name)
    panels[0].set(xlim=(1, 6), ylim=(0, 1))
    for axes in panels:  # there is nothing in the second
        style.label_curves(axes)
    figure.draw_without_rendering()
    boxes = sorted(
        ((note.get_text(), mpl.text.Text.get_window_extent(note)) for note in panels[0].texts),
        key=lambda each: each[1].y0,
    )
    panel, neighbour = panels[0].get_window_extent(), panels[1].get_window_extent()
    assert [name for name, _ in boxes] == ["last", "one", "two\nlines", "three", "first"]
    assert all(below.y1 <= above.y0 for (_, below), (_, above) in pairwise(boxes))
    for _, box in boxes:
        assert panel.x1 < box.x0 < box.x1 < neighbour.x0
        assert panel.y0 - 1 <= box.y0 < box.y1 <= panel.y1 + 1


def test_no_two_points_and_no_two_steps_look_alike() -> None:
    for marks in (POINT_MARKS, STEP_MARKS):
        labels, _, markers, _ = zip(*marks.values(), strict=True)
        assert len(set(markers)) == len(set(labels)) == len(marks)


def test_characters_that_no_font_has_become_code_points() -> None:
    assert style.printable("caf\u00e9 \u4f60\x00") == "caf\u00e9 <U+4F60><U+0000>"

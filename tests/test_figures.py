"""Figures show the measured values and maps, are reproduced byte for byte, and label tokens with readable text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import pypdfium2
import pytest
from conftest import REPOSITORY, digest, tokens_table
from matplotlib.figure import Figure
from PIL import Image, ImageSequence
from pypdfium2 import raw
from scipy.optimize import isotonic_regression
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from attnmix.core.names import DECODER_INPUT, Site
from attnmix.core.store.runs import Run
from attnmix.figures import style
from attnmix.figures.labels import POINT_MARKS, RATIO_MARKS, STEP_MARKS
from attnmix.figures.maps import TRACK_COLOURS, draw_atlas, draw_joint, write_animation, write_joint_pages
from attnmix.figures.mixing import draw_controls, draw_own_share, draw_reviews
from attnmix.figures.own_share import draw_main
from attnmix.figures.style import darken_for_contrast, high_contrast_cmap
from attnmix.figures.text_mixing import draw_matrices, draw_strips
from attnmix.figures.tokens import (
    CapturedTexts,
    DisplayToken,
    TextLayers,
    read_captured,
    short_part,
    words,
)
from attnmix.models.encoding import tokenize_texts
from stages.common.parameters import read_parameters
from stages.render import draw_all, mixing_figures, text_figures

# ruff: noqa: RUF001  # ambiguous characters are under test
FORMATS, DPI = ["png", "pdf", "svg"], 60
POST_LN = ("attention_heads", "attention_output", "attention_residual", "attention_norm", "ffn_output", "layer_output")
TEXT = ["[CLS]", "time", "flies", "like", "an", "arr", "##ow", "[SEP]"]
PROSE = "The café wasn’t ‘dull’, the 42 cafés weren't: naïve film \U0001f600 film 你好 the film\n\nThe end ## of ▁ it."
NO_STEPS = pd.DataFrame({"step": [], "layer": []})
SPECIAL = {"[CLS]": "cls", "[SEP]": "sep", "<s>": "cls", "</s>": "sep"}
HOSTILE = ["[CLS]", "$x$", "<script>", "\u202e", "\U0001f600", "\x00", "film", "##s", "film", "[SEP]"]


@pytest.fixture(autouse=True)
def paper_style() -> Iterator[None]:
    """Apply the project's figure style during each test."""
    with style.paper_style():
        yield


def captured_texts(tokens: list[str], *documents: str) -> CapturedTexts:
    """Return texts with the names `documents`; all texts consist of the same tokens."""
    tables = [tokens_table(tokens, SPECIAL, document) for document in documents]
    return read_captured(pd.concat(tables, ignore_index=True), NO_STEPS)


def legend_colours(figure: Any) -> dict[str, str]:
    """Return the colours (`#RRGGBB`) of the figure's only legend by label."""
    (legend,) = (axes.get_legend() for axes in figure.axes if axes.get_legend())
    entries = zip(legend.get_texts(), legend.legend_handles, strict=True)
    return {text.get_text(): mpl.colors.to_hex(handle.get_color()).upper() for text, handle in entries}


def random_map(captured: CapturedTexts, layers: int, points: tuple[str, ...] = POST_LN) -> pd.DataFrame:
    """Return random map coordinates of all tokens at the capture points of the embedding and of each layer."""
    sites = [Site(0, "word_embedding"), Site(0, "embedding_output")]
    sites += [Site(layer, point) for layer in range(1, layers + 1) for point in points]
    generator = np.random.default_rng(0)
    parts = []
    for site in sites:
        x, y = generator.normal(size=(2, len(captured.tokens))) * [[30], [3]]
        parts.append(captured.tokens[["document", "position"]].assign(layer=site.layer, point=site.point, x=x, y=y))
    return pd.concat(parts, ignore_index=True)


def test_hostile_tokens_are_drawn_reproducibly(tmp_path: Path) -> None:
    captured = captured_texts(HOSTILE, "test/0", "test/1")
    table = random_map(captured, 1, POST_LN[-2:])
    for folder in (tmp_path / "first", tmp_path / "second"):
        write_joint_pages(table, None, folder / "joint.pdf", DPI)
        write_animation(table, captured, folder / "joint.gif")
        style.save_figure(draw_atlas("joint", table, captured), folder / "atlas", ["svg"], DPI)
        style.save_figure(draw_joint(table, captured), folder / "joint", FORMATS, DPI)
    assert digest(tmp_path / "first") == digest(tmp_path / "second")
    assert all("\x00" not in path.read_text(encoding="utf-8") for path in tmp_path.rglob("*.svg"))


@pytest.fixture(scope="module")
def joint_pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the pages of a joint map of one text in two layers."""
    path = tmp_path_factory.mktemp("pages") / "joint.pdf"
    with style.paper_style():
        write_joint_pages(random_map(captured_texts(["a"] * 40, "test/0"), 2), None, path, DPI)
    return path


def test_joint_pages_accumulate_points(joint_pages: Path) -> None:
    with pypdfium2.PdfDocument(joint_pages) as document:
        assert len(document) == 2 + 2 * len(POST_LN)  # two points of the embedding, and the points of two layers
        texts = [page.get_textpage().get_text_bounded() for page in document]
        pages = [page.render(scale=DPI / 72).to_numpy() for page in document]
    assert "(1 of 14)" in texts[0]
    assert "(14 of 14)" in texts[-1]
    panel_width = int(0.68 * pages[0].shape[1])  # without the legend on the right
    drawn = [(page[30:, :panel_width] < 250).any(axis=-1) for page in pages]  # without titles
    # Only the newest points have an edge, so the pixels of an edge may be missing on later pages.
    for earlier, later in pairwise(drawn):
        assert later.sum() > 0.95 * earlier.sum()
        assert earlier[later].sum() > 0.9 * earlier.sum()
    assert drawn[-1].sum() > 1.5 * drawn[0].sum()


def test_joint_pages_contain_each_image_once(joint_pages: Path) -> None:
    with pypdfium2.PdfDocument(joint_pages) as document:
        images = [len(list(page.get_objects(filter=[raw.FPDF_PAGEOBJ_IMAGE]))) for page in document]
    assert images == list(range(2 + 2 * len(POST_LN)))
    assert joint_pages.read_bytes().count(b"/SMask") == 1 + 2 * len(POST_LN)


@pytest.mark.parametrize(("layers", "points", "layout"), [(1, POST_LN, "joint"), (12, POST_LN[:1], "separate")])
def test_atlas_shows_every_point_at_one_scale(layers: int, points: tuple[str, ...], layout: str) -> None:
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


@pytest.mark.parametrize(("number", "on_map"), [(3, [0, 1, 2]), (3, [1, 2]), (9, list(range(9)))])
def test_atlas_has_color_and_name_of_each_text(number: int, on_map: list[int]) -> None:
    names = [f"test/{row}" for row in range(number)]
    captured = captured_texts(["[CLS]", "film", "the", "[SEP]"], *names)
    table = random_map(captured, 1, POST_LN[:1])
    table = table[table["document"].isin([names[each] for each in on_map])]
    figure = draw_atlas("pca", table, captured)
    figure.draw_without_rendering()
    # The page assigns its colours to texts in order; with more texts than colours, only the first text has a colour.
    script = (REPOSITORY / "attnmix/page/src/colours.ts").read_text("utf-8")
    kinds = re.findall(r"#[0-9a-f]{6}", script.partition("const KINDS")[2].partition("dark:")[0])
    canvas = (REPOSITORY / "attnmix/page/src/canvas.tsx").read_text("utf-8")
    (grey,) = re.findall(r'export const SOFT = "(#\w{6})"', canvas)
    expected = {name: kinds[0 if number > len(kinds) else n] for n, name in enumerate(names)}
    if number > len(kinds):
        expected |= dict.fromkeys(names[1:], grey)
    drawn = {}  # colour by position
    for axes in figure.axes:
        for dots in axes.collections:
            for position, colour in zip(dots.get_offsets(), dots.get_facecolors(), strict=True):
                drawn[tuple(position)] = mpl.colors.to_hex(colour)
    assert len(drawn) == len(table)
    for row in table.itertuples():
        assert drawn[row.x, row.y] == expected[row.document]
    entries = {label: colour.lower() for label, colour in legend_colours(figure).items()}
    shown = {name: colour for name, colour in expected.items() if colour != grey and names.index(name) in on_map}
    assert shown.items() <= entries.items()
    assert ("all others" in entries) == (number > len(kinds))
    assert {"[CLS]", "[SEP]"} <= set(entries)


@pytest.mark.parametrize("layers", [0, 12])
def test_joint_grid_tracks_words_on_common_axes(layers: int) -> None:
    captured = captured_texts(TEXT, "test/0", "test/1")
    table = random_map(captured, layers)
    figure: Any = draw_joint(table, captured)
    figure.draw_without_rendering()
    assert figure.get_size_inches()[1] <= style.PAGE_HEIGHT
    panels = [axes for axes in figure.axes if axes.collections]
    assert len(panels) == 2 + layers * len(POST_LN)
    scales = set()
    for axes in panels:
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        box = axes.get_window_extent()
        scales.add((round((left + right) / 2, 6), round((bottom + top) / 2, 6), round(box.width / (right - left), 6)))
        assert box.width / (right - left) == pytest.approx(box.height / (top - bottom))
    assert len(scales) == 1
    words = {word: colour for word, colour in legend_colours(figure).items() if colour in TRACK_COLOURS}
    assert set(words) <= {*TEXT} - {"arr", "##ow"}  # pieces of words are not tracked
    assert 4 <= len(words) <= len(TRACK_COLOURS)
    groups = table[table["document"] == "test/0"].groupby(["layer", "point"])
    last = groups.get_group((layers, "layer_output" if layers else "embedding_output"))[["x", "y"]].to_numpy()
    _, _, tracked = panels[-1].collections
    drawn = {}
    for colour, position in zip(tracked.get_facecolors(), tracked.get_offsets(), strict=True):
        drawn[mpl.colors.to_hex(colour).upper()] = tuple(position)
    assert drawn == {colour: tuple(last[TEXT.index(word)]) for word, colour in words.items()}


def test_joint_grid_reports_vectors_outside_axes() -> None:
    captured = captured_texts(["word"] * 400, "test/0", "test/1")
    table = random_map(captured, 1, POST_LN[:1])
    table.loc[3, "x"] = 1e6
    figure: Any = draw_joint(table, captured)
    axes = next(axes for axes in figure.axes if axes.collections)
    assert axes.get_xlim()[1] < 1e4
    xy = table[["x", "y"]].to_numpy()
    low, high = np.quantile(xy, [0.001, 0.999], axis=0)
    outside = int(((xy < low) | (xy > high)).any(axis=1).sum())
    assert f"{outside} of {len(table)} vectors outside" in figure.get_suptitle()


def test_animation_rests_at_points_and_moves_between(tmp_path: Path) -> None:
    captured = captured_texts(TEXT, "test/0", "test/1")
    write_animation(random_map(captured, 1), captured, tmp_path / "joint.gif")
    stops, frames, durations = 2 + len(POST_LN), [], []
    with Image.open(tmp_path / "joint.gif") as animation:
        for frame in ImageSequence.Iterator(animation):
            durations.append(frame.info["duration"])
            frames.append(np.asarray(frame.convert("RGB")).astype(int))
    assert sum(durations) == (stops - 1) * 500 + 2000  # two points per second, and a longer stop at the last point
    assert len(frames) > stops
    assert all((after != before).any() for before, after in pairwise(frames))
    green = [(np.abs(frame - (0, 158, 115)).max(axis=-1) < 30).any() for frame in (frames[0], frames[-1])]
    assert green == [False, True]  # green layer outputs come last; word embeddings are black


def text_figure_names(documents: list[str]) -> set[str]:
    """Return the names of the figures of single texts, and of the main figure."""
    names = [document.replace("/", "_") for document in documents]
    strips = {f"mixing_tokens_{name}" for name in names}
    matrices = product(("contributions", "rollouts"), names, ("pretrained", "finetuned"))
    matrix_names = {f"mixing_{kind}_{name}_{checkpoint}" for kind, name, checkpoint in matrices}
    return {"main"} | strips | matrix_names


@pytest.mark.parametrize("number", [1, 2, 9])
def test_curve_labels_move_as_little_as_possible(number: int) -> None:
    values = np.random.default_rng(number).normal(size=number)
    np.testing.assert_allclose(style.fit_increasing(values), isotonic_regression(values).x, atol=1e-12)


def test_requested_documents_get_figures(copied: Path) -> None:
    run = Run(copied)
    captured = read_captured(run.tokens, run.steps)
    for documents in (["text/0"], ["test/0", "test/1", "text/0"]):
        drawings = list(text_figures(run, captured, documents))
        assert {path.name for path, *_ in drawings} == text_figure_names(documents)
    drawings = [*mixing_figures(run, captured), *text_figures(run, captured, ["text/0"])]
    drawn = draw_all(drawings, captured, read_parameters().render.model_copy(update={"formats": ["svg"]}))
    assert len(list(drawn)) == len(drawings)
    of_reviews = {"mixing_by_layer", "mixing_controls", "mixing_reviews", "mixing_steps", "own_share"}
    assert {path.stem for path in run.figures.glob("*.svg")} == of_reviews | text_figure_names(["text/0"])

    def text_of(name: str) -> str:
        return (run.figures / f"mixing_{name}.svg").read_text(encoding="utf-8")

    assert all(f">{text}<" in text_of("tokens_text_0") for text in ("[CLS]", "Fine-tuned", "Difference"))
    part = text_of("contributions_text_0_finetuned")
    assert all(text in part for text in (" of 40", ">Value Zeroing<", ">rest of text<"))
    assert all(f">{text}<" in text_of("reviews") for text in ("Pretrained (left)", "Fine-tuned (right)"))


def text_layers(text: str, layers: int) -> TextLayers:
    return captured_texts(text.split(), "text/0").text_layers("text/0", layers)[0]


def cells_of(image: Any) -> Any:
    """Return the values of an image, with NaN for hidden cells."""
    return np.ma.filled(np.ma.masked_invalid(image.get_array()).astype(float), np.nan)


def test_matrices_show_sentence_without_diagonal(run: Path) -> None:
    methods, part = ["attention", "value_zeroing"], range(3, 6)
    text = text_layers("[CLS] yes . a film . " + "well " * 34, 2)
    figure: Any = draw_matrices(Run(run), "finetuned", "text/0", text, methods)
    figure.draw_without_rendering()
    panels = [axes for axes in figure.axes if len(axes.images) == 2]
    assert len(panels) == 2 * len(methods)
    assert "tokens 3 to 5 of 40" in figure.get_suptitle()
    assert [label.get_text() for label in panels[0].get_yticklabels()] == ["a", "film", "."]
    for row, method in enumerate(methods):
        shown = []
        for layer, axes in enumerate(panels[2 * row : 2 * row + 2]):
            matrix = Run(run).matrix("finetuned", "text/0", method)[layer].astype(float)
            rows = (matrix / matrix.sum(axis=1, keepdims=True))[part]
            expected = np.where(np.eye(3), np.nan, rows[:, part])
            np.testing.assert_allclose(cells_of(axes.images[0]), expected, rtol=1e-5)
            # The second image has two columns: a token's own contribution, and that of all tokens outside the sentence.
            own = np.diagonal(rows[:, part])
            rest = np.delete(rows, part, axis=1).sum(axis=1)
            np.testing.assert_allclose(cells_of(axes.images[1]), np.stack([own, rest], axis=1), rtol=1e-4)
            first_label = axes.texts[0].get_text()
            second_label = next(text.get_text() for text in axes.texts[1:] if text.get_text().isdigit())
            assert (first_label, second_label) == (f"{100 * own.mean():.0f}", f"{100 * rest.mean():.0f}")
            shown += expected[~np.isnan(expected)].tolist()
        for axes in panels[2 * row : 2 * row + 2]:
            assert axes.images[0].norm.vmax == pytest.approx(np.percentile(shown, 99), rel=1e-5)


@pytest.mark.parametrize("tokens", [1, 40])
def test_strips_end_with_difference(tokens: int) -> None:
    layers = range(1, 4)
    index = pd.MultiIndex.from_product([["pretrained", "finetuned"], layers, range(tokens)])
    rows = index.set_names(["checkpoint", "layer", "position"]).to_frame(index=False)
    rows["attn_n"] = np.random.default_rng(0).beta(2, 5, len(rows))
    figure: Any = draw_strips(rows, "text/0", text_layers("word " * tokens, 3))
    panels = [axes for axes in figure.axes if axes.images]
    before, after = rows["attn_n"].to_numpy().reshape(2, 3, tokens)
    assert len(panels) == 3 * math.ceil(tokens / 32)
    for place, expected in enumerate([before, after, after - before]):
        shown = np.concatenate([cells_of(axes.images[0]) for axes in panels[place::3]], axis=1)
        np.testing.assert_allclose(shown[:, :tokens], expected)
        assert np.isnan(shown[:, tokens:]).all()
    scales = [axes.images[0].norm for axes in panels]
    assert [(scale.vmin, scale.vmax) for scale in scales[:3]] == [(0, 1), (0, 1), (-1, 1)]
    assert [axes.get_ylabel() for axes in panels[:3]] == ["Pretrained", "Fine-tuned", "Difference"]


def test_controls_figure_has_checkpoints_and_controls() -> None:
    layers = range(1, 4)
    rows = pd.DataFrame({"layer": layers, "method": "attn_n"})
    checkpoints = [rows.assign(checkpoint=name, mean=mean) for name, mean in (("pretrained", 0.2), ("finetuned", 0.4))]
    means = {
        ("shuffled_words", "finetuned"): 0.35,
        ("shuffled_words", "pretrained"): 0.9,
        ("random_weights", "random"): 0.1,
    }
    controls = [rows.assign(control=name, checkpoint=model, mean=mean) for (name, model), mean in means.items()]
    mixing, control_rows = (
        pd.concat(each).assign(ci_low=lambda table: table["mean"] - 0.05, ci_high=lambda table: table["mean"] + 0.05)
        for each in (checkpoints, controls)
    )
    figure: Any = draw_controls(mixing, control_rows, "Layer")
    (axes,) = figure.axes
    assert figure.get_figwidth() == 3.3
    shown = {line.get_label(): set(line.get_ydata()) for line in axes.lines}
    assert shown == {
        **{"Pretrained": {0.2}, "Fine-tuned": {0.4}},
        **{"Words in random order": {0.35}, "Random weights": {0.1}},
    }
    bands = [part.get_paths()[0].vertices[:, 1] for part in axes.collections]
    ends = [(band.min(), band.max()) for band in bands]
    np.testing.assert_allclose(ends, [(mean - 0.05, mean + 0.05) for mean in (0.2, 0.4, 0.35, 0.1)])
    figure.draw_without_rendering()
    edges = figure.bbox
    for text in (*axes.texts, axes.title, axes.yaxis.label):
        box = text.get_window_extent()
        assert edges.x0 <= box.x0 < box.x1 <= edges.x1


@pytest.mark.parametrize("documents", [7, 8])
def test_own_share_figure_names_donors_and_has_intervals(documents: int) -> None:
    donors = ["all", "same_class", "other_class", "same_minus_other"]
    index = pd.MultiIndex.from_product([["pretrained", "finetuned"], donors, range(4)])
    table = index.to_frame(index=False, name=["checkpoint", "donor", "layer"]).assign(quantity="own_share")
    table["mean"] = table["donor"].map(dict(zip(donors, (0.5, 0.6, 0.4, 0.2), strict=True)))
    table = table.assign(ci_low=table["mean"] - 0.1, ci_high=table["mean"] + 0.1)
    figure: Any = draw_own_share(table.assign(documents=documents, tokens=8 * documents), "Layer")
    (axes,) = figure.axes
    heights: dict[str, set[float]] = {}
    for line in axes.lines:
        heights.setdefault(line.get_linestyle(), set()).update(line.get_ydata())
    assert heights == {"-": {0.5}, "--": {0.6}, ":": {0.4}}
    entries = zip(axes.get_legend().get_texts(), axes.get_legend().get_lines(), strict=True)
    styles = {text.get_text(): line.get_linestyle() for text, line in entries}
    assert styles == {"both classes": "-", "the same class": "--", "another class": ":"}
    assert axes.get_title() == f"{documents} reviews, 8 tokens of each"
    assert "mean over tokens (95 % interval)" in axes.get_ylabel()
    bands = [path for part in axes.collections for path in part.get_paths() if len(path.vertices)]
    assert bool(bands) == (documents == 8)
    figure.draw_without_rendering()
    for text in (axes.title, axes.yaxis.label):
        box = text.get_window_extent()
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1


@pytest.mark.parametrize("names", [["finetuned"], ["pretrained", "finetuned"]])
def test_every_review_is_a_dot_per_layer(names: list[str]) -> None:
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
        assert len({*zip(x.round(3), y.round(2), strict=True)}) > 0.9 * len(x)  # dots do not overlap
        lightness = part.to_rgba(part.get_array())[:, :3].sum(axis=1)
        assert lightness[rows["tokens"].argmax()] < lightness[rows["tokens"].argmin()]
    assert "from 20 to 197 tokens" in figure.legends[0].get_title().get_text()


def contrast_with_white(color: str) -> float:
    """Return the contrast with white as defined in WCAG 2.2."""
    parts = [int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05)


def test_colours_have_contrast_on_white() -> None:
    marks = [*POINT_MARKS.values(), *STEP_MARKS.values(), *RATIO_MARKS.values()]
    for color in {mark.color for mark in marks}:
        for least in (3.0, 4.5):
            shown = darken_for_contrast(color, least)
            assert contrast_with_white(shown) >= least
            if contrast_with_white(color) >= 1.02 * least:
                assert shown == color.lower()
            hues = [mpl.colors.rgb_to_hsv(mpl.colors.to_rgb(each))[0] for each in (color, shown)]
            assert hues[0] == pytest.approx(hues[1], abs=0.06)
    for name in ("Greys", "Blues", "Oranges"):
        shades = map(mpl.colors.to_hex, high_contrast_cmap(name)(np.linspace(0, 1, 50)))
        assert min(map(contrast_with_white, shades)) > 2.95


def test_saved_text_uses_embedded_fonts(tmp_path: Path) -> None:
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


def display_tokens(tokenizer: Any, text: str, max_length: int = 200) -> list[DisplayToken]:
    (tokenized,) = tokenize_texts(tokenizer, ["test/0"], [text], max_length)
    return read_captured(tokenized.table, NO_STEPS).readings[0]


def wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def byte_level(vocabulary: int, trim: bool = False) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer, as used by RoBERTa."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: Any = {"special_tokens": ["<s>", "</s>"], "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator([PROSE] * 3, trainers.BpeTrainer(vocab_size=vocabulary, **options))
    ends = (("</s>", 1), ("<s>", 0))
    tokenizer.post_processor = processors.RobertaProcessing(*ends, trim_offsets=trim, add_prefix_space=False)
    return wrapped(tokenizer)


def metaspace(prefix: bool) -> PreTrainedTokenizerFast:
    """Return a BPE tokenizer with byte fallback, as used by Llama."""
    letters = sorted(set(PROSE.replace(" ", "▁")) - {"\U0001f600", "你"})
    names = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256)), *letters, "▁t", "he"]
    vocabulary, merges = {piece: number for number, piece in enumerate(names)}, [("▁", "t"), ("h", "e")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    ends = [("<s>", 1), ("</s>", 2)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return wrapped(tokenizer)


@pytest.mark.parametrize(
    "tokenizer",
    [byte_level(258), byte_level(300), byte_level(300, trim=True), metaspace(prefix=False), metaspace(prefix=True)],
    ids=["bytes", "bpe", "trimmed", "spaces", "prefix"],
)
def test_labels_spell_the_text_and_mark_word_starts(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces = display_tokens(tokenizer, PROSE)
    assert (pieces[0].label, pieces[-1].label) == ("<s>", "</s>")
    before = ""
    for piece in (each for each in pieces[1:-1] if each.label != "…"):  # "…" continues a character
        assert piece.begins == (not before or before[-1] in "␣⏎" or piece.label[0] in "␣⏎")
        before += piece.label
    text = PROSE.replace("▁", " ")  # SentencePiece does not distinguish "▁" from spaces
    assert before.replace("⏎", "\n").replace("␣", " ").replace("▁", " ").removeprefix(" ") == text
    # Tokenizers may split words at apostrophes.
    assert re.findall(r"\w+", " ".join(words(pieces))) == re.findall(r"\w+", text.lower())


def test_wordpiece_labels_keep_names_and_spaces(default_weights: Any) -> None:
    pieces = display_tokens(AutoTokenizer.from_pretrained(default_weights), "Unloved, it isn't a Café film ☂!")
    labels = ["[CLS]", "un", "##lov", "##ed", ",", "it", "isn", "'", "t", "a", "cafe", "film", "[UNK]", "!", "[SEP]"]
    assert [piece.label for piece in pieces] == labels
    assert [piece.text for piece in pieces] == [label.removeprefix("##") for label in labels]
    apart = {"[CLS]", "un", "it", "isn", "a", "cafe", "film", "[UNK]", "[SEP]"}
    assert {piece.label for piece in pieces if piece.begins} == apart
    assert list(filter(None, words(pieces))) == ["unloved", "it", "isn", "t", "a", "cafe", "film", "[UNK]"]


def test_text_cut_within_character_is_decoded() -> None:
    assert [piece.label for piece in display_tokens(byte_level(258), "a 好", 5)] == ["<s>", "a", "␣", "好", "</s>"]
    assert [piece.label for piece in display_tokens(byte_level(258), "好", 9)] == ["<s>", "好", "…", "…", "</s>"]


def test_decoder_tokens_are_shifted() -> None:
    table = tokens_table(["<s>", "␣a", "␣fi", "lm", "</s>"], SPECIAL)
    both = pd.concat([table, table.assign(document="test/1")], ignore_index=True)
    both["decoder_token"] = ["</s>", "<s>", "Ġa", "Ġfi", "lm"] * 2
    steps = pd.DataFrame({"step": ["heads"] * 4 + ["cross_attention"] * 2, "layer": [1, 2, 3, 4, 3, 4]})
    captured = read_captured(both, steps)
    assert [piece.label for piece in captured.readings[1]] == ["</s>", "<s>", "␣a", "␣fi", "lm"] * 2
    assert [piece.token_class for piece in captured.readings[1]] == ["sep", "cls", "word", "word", "word"] * 2
    assert words(captured.readings[1]) == ["", "", "a", "film", ""] * 2
    assert captured.encoder == 2
    sites = [Site(0, "word_embedding"), Site(2, "layer_output"), Site(2, DECODER_INPUT), Site(3, "attention_heads")]
    assert [captured.reading(site) for site in sites] == [0, 0, 1, 1]
    assert captured.class_label("sep") == "</s>"


@pytest.mark.parametrize(
    ("tokens", "most", "expected"),
    [
        ("[CLS] a film . [SEP]", 5, range(5)),  # the whole text
        ("[CLS] a good film . a film . [SEP]", 5, range(1, 5)),  # the longest sentence that fits
        ("[CLS] a good film . a film . [SEP]", 3, range(5, 8)),
        ("[CLS] a good film . a film . [SEP]", 2, range(2)),  # no sentence fits
        ("[CLS]", 5, range(1)),
        ("[CLS] It works . Does it ? ( Yes ! ) No [SEP]", 4, range(7, 11)),
        ("[CLS] Well . . . \u201c so \u201d , then !! [SEP]", 6, range(5, 11)),
        ("[CLS] Well . . . \u201c so \u201d , then !! [SEP]", 5, range(1, 5)),
        ("[CLS] 映画 。 良い [SEP]", 3, range(1, 3)),
        ("no end", 1, range(1)),
    ],
)
def test_short_part_is_a_sentence_if_one_fits(tokens: str, most: int, expected: range) -> None:
    assert short_part(captured_texts(tokens.split(), "test/0").readings[0], most) == expected


@pytest.mark.parametrize("documents", [7, 8])
def test_main_figure_has_shares_and_means_on_same_rows(documents: int) -> None:
    text = text_layers("[CLS] a good film [SEP]", layers=3)
    shares = np.random.default_rng(0).uniform(size=(2, 3, 5))
    shares[:, :, [0, -1]] = np.nan  # special tokens
    index = pd.MultiIndex.from_product([["pretrained", "finetuned"], range(1, 4), range(5)])
    rows = index.to_frame(index=False, name=["checkpoint", "layer", "position"]).assign(own_share=shares.ravel())
    index = pd.MultiIndex.from_product([["pretrained", "finetuned"], ["all", "same_class"], range(4)])
    table = index.to_frame(index=False, name=["checkpoint", "donor", "layer"]).assign(quantity="own_share")
    table["mean"] = np.where(table["donor"] == "all", 1 - 0.2 * table["layer"], 0)
    table = table.assign(ci_low=table["mean"] - 0.1, ci_high=table["mean"] + 0.1, tokens=8 * documents)
    figure: Any = draw_main(rows, table.assign(documents=documents), "text/0", text)
    assert figure.get_figwidth() == 7
    panels = figure.axes[:4]
    for axes, expected, name in zip(panels[::2], shares, ("Pretrained", "Fine-tuned"), strict=True):
        (image,) = axes.images
        np.testing.assert_allclose(cells_of(image), expected)
        assert (image.norm.vmin, image.norm.vmax) == (0, 1)
        assert axes.get_ylabel().startswith(name)
    for axes, beside, expected in zip(panels[1::2], panels[::2], shares, strict=True):
        assert axes.get_ylim() == beside.get_ylim() == (0.5, 3.5)
        mean, of_text = axes.lines
        np.testing.assert_allclose(mean.get_xdata(), [0.8, 0.6, 0.4])
        np.testing.assert_allclose(of_text.get_xdata(), np.nanmean(expected, axis=1))
        for line in (mean, of_text):
            assert list(line.get_ydata()) == [1, 2, 3]
        assert [each.get_text() for each in axes.texts] == ["40%"]
    colours = [axes.lines[0].get_color() for axes in panels[1::2]]
    assert colours == ["#6b7485", "#0060a0"]  # before and after, as in every figure and on the page
    assert [each.get_text() for each in panels[2].get_xticklabels()] == text.labels
    entries = [each.get_text() for each in figure.legends[0].get_texts()]
    interval = ["95 % interval over reviews"] if documents == 8 else []
    assert entries == [
        f"mean over {8 * documents} tokens of {documents} reviews",
        *interval,
        "mean over 3 tokens of this text",
        "not exchanged (special tokens)",
    ]
    figure.draw_without_rendering()
    edges = figure.bbox
    for artist in (figure.legends[0], *figure.texts, *(axes.yaxis.label for axes in panels[::2])):
        box = artist.get_window_extent()
        assert edges.x0 <= box.x0 < box.x1 <= edges.x1
        assert edges.y0 <= box.y0 < box.y1 <= edges.y1
    assert draw_main(rows.assign(own_share=np.nan), table, "text/0", text) is None
    whole: Any = draw_main(rows.fillna(0.5), table.assign(documents=documents), "text/0", text)
    assert [each.get_text() for each in whole.legends[0].get_texts()] == [
        *entries[:-2],
        "mean over 5 tokens of this text",
    ]

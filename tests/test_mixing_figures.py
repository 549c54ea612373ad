"""The figures of mixing: drawn for what was measured, the same bytes every time."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import REPOSITORY, write_parameters, write_reviews, write_tiny_bert
from matplotlib.axes import Axes

from stages import measure
from stages.outputs.mixing import read_matrix, read_ratios
from stages.outputs.reports import read_plot
from stages.parameters import Parameters, read_parameters
from stages.pictures.mixing_figures import draw_mixing_figures
from stages.pictures.mixing_matrices import draw_matrices
from stages.pictures.mixing_reviews import draw_reviews
from stages.pictures.mixing_strips import draw_strips
from stages.pictures.stack import Stack
from stages.pictures.style import paper_style
from stages.pictures.tokens import Piece, read_captured


def draw(parameters: Parameters) -> None:
    """Of the measured tokens of the texts that would have been captured."""
    tokens = read_ratios(filters=[("in_statistics", "==", False)]).drop_duplicates(["document", "position"])
    with paper_style():
        draw_mixing_figures(parameters.figures, read_captured(tokens, read_plot("steps", "measure")))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    changes: dict[str, Any] = {
        "mixing": {"documents": 4, "max_length": 20, "bootstrap_samples": 100, "gradient_documents": 0},
        "capture": {"documents": [], "texts": ["time flies like an $ arrow .", "film " * 40], "max_length": 60},
        "figures": {"formats": ["png", "svg"], "dpi": 60},
    }
    with pytest.MonkeyPatch.context() as patch:
        write_parameters(folder, **changes)
        patch.chdir(folder)
        write_reviews(folder / "data/reviews")
        write_tiny_bert(folder / "models/pretrained", seed=0)
        write_tiny_bert(folder / "models/finetuned", seed=1)
        measure.main(read_parameters())
        draw(read_parameters())
    return folder


def test_every_captured_document_gets_its_figures(measured: Path) -> None:
    names = {path.name for path in (measured / "reports/figures").iterdir()}
    stems = {"mixing_by_layer", "mixing_reviews", "mixing_steps", "mixing_tokens_text_0", "mixing_tokens_text_1"}
    for kind in ("contributions", "rollouts"):
        stems |= {f"mixing_{kind}_text_{i}_{name}" for i in (0, 1) for name in ("pretrained", "finetuned")}
    assert names == {f"{stem}.{suffix}" for stem in stems for suffix in ("png", "svg")}


def test_strips_of_tokens_need_no_matrices(measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(measured, tmp_path / "run", ignore=shutil.ignore_patterns("contributions", "figures"))
    monkeypatch.chdir(tmp_path / "run")
    draw(read_parameters())
    drawn = {path.stem for path in Path("reports/figures").iterdir()}
    assert drawn == {
        "mixing_by_layer",
        "mixing_reviews",
        "mixing_steps",
        "mixing_tokens_text_0",
        "mixing_tokens_text_1",
    }


def test_figures_name_tokens_and_methods_and_hold_colours(measured: Path) -> None:
    from matplotlib.image import imread

    figures = measured / "reports/figures"
    strip = (figures / "mixing_tokens_text_0.svg").read_text(encoding="utf-8")
    assert ">[CLS]<" in strip
    assert ">Fine-tuned<" in strip
    assert ">Difference<" in strip
    matrices = (figures / "mixing_contributions_text_1_finetuned.svg").read_text(encoding="utf-8")
    assert "tokens 0 to 19 of 42" in matrices  # no sentence ends
    assert ">Value Zeroing<" in matrices
    assert ">rest of text<" in matrices
    whole = (figures / "mixing_contributions_text_0_finetuned.svg").read_text(encoding="utf-8")
    assert "what each token takes from the others" in whole
    assert "tokens 0" not in whole
    assert ">rest of text<" not in whole
    reviews = (figures / "mixing_reviews.svg").read_text(encoding="utf-8")
    for text in ("Mixing ratio of each review", "1-32 tokens", "Pretrained (left)", "Fine-tuned (right)"):
        assert f">{text}<" in reviews
    assert len(np.unique(imread(figures / "mixing_tokens_text_0.png").reshape(-1, 4), axis=0)) > 50


def test_figures_are_the_same_bytes_again(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(measured)
    files = sorted((measured / "reports/figures").iterdir())
    before = [path.read_bytes() for path in files]
    draw(read_parameters())
    assert [path.read_bytes() for path in files] == before


def pieces_of(text: str) -> list[Piece]:
    return [Piece(word, word.encode(), True, "cls" if word == "[CLS]" else "word") for word in text.split()]


def cells_of(axes: Axes) -> Any:
    """What an image shows, with NaN for what it does not."""
    return np.ma.filled(np.ma.masked_invalid(axes.images[0].get_array()).astype(float), np.nan)


def drawn_by(module: str, draw: Any, *arguments: Any) -> Any:
    """The figure that would have been saved."""
    figures: list[Any] = []
    with pytest.MonkeyPatch.context() as patch, paper_style():
        patch.setattr(f"stages.pictures.{module}.save_figure", lambda figure, *_: figures.append(figure))
        draw(*arguments)
        figures[0].draw_without_rendering()
    return figures[0]


def test_matrices_show_a_whole_sentence_without_its_diagonal(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(measured)
    stack = Stack("", range(1, 3), None, pieces_of("[CLS] yes . a film . " + "well " * 36))
    methods = ["attention", "value_zeroing"]
    figure = drawn_by(
        "mixing_matrices", draw_matrices, "finetuned", "text/1", stack, methods, Path("x"), read_parameters().figures
    )
    part = range(3, 6)
    panels = [axes for axes in figure.axes if axes.images and len(axes.lines) == 1]
    strips = [axes for axes in figure.axes if axes.images and not axes.lines]
    assert len(panels) == len(strips) == 2 * len(methods)
    assert "tokens 3 to 5 of 42" in figure.get_suptitle()
    assert [text.get_text() for text in panels[0].get_yticklabels()] == ["a", "film", "."]
    for row, method in enumerate(methods):
        of_method = []
        for layer in (0, 1):
            matrix = read_matrix("finetuned", "text/1", method)[layer].astype(float)
            shares = matrix / matrix.sum(axis=1, keepdims=True)
            expected = np.array([[np.nan if i == j else shares[i, j] for j in part] for i in part])
            np.testing.assert_allclose(cells_of(panels[2 * row + layer]), expected, rtol=1e-5)
            elsewhere = [sum(shares[i, j] for j in range(42) if j not in part) for i in part]
            beside = np.stack([[shares[i, i] for i in part], elsewhere], axis=1)
            np.testing.assert_allclose(cells_of(strips[2 * row + layer]), beside, rtol=1e-4)
            of_method += expected[~np.isnan(expected)].tolist()
        for layer in (0, 1):
            assert panels[2 * row + layer].images[0].norm.vmax == pytest.approx(np.percentile(of_method, 99), rel=1e-5)


@pytest.mark.parametrize("tokens", [1, 40])
def test_strips_end_with_the_difference(tokens: int) -> None:
    layers = range(1, 4)
    index = pd.MultiIndex.from_product([["pretrained", "finetuned"], layers, range(tokens)])
    rows = index.set_names(["checkpoint", "layer", "position"]).to_frame(index=False)
    rows["attn_n"] = np.random.default_rng(0).beta(2, 5, len(rows))
    stack = Stack("", layers, None, pieces_of("word " * tokens))
    figure = drawn_by("mixing_strips", draw_strips, rows, "text/0", stack, Path("x"), read_parameters().figures)
    panels = [axes for axes in figure.axes if axes.images]
    ratios = {
        name: part.pivot(index="layer", columns="position", values="attn_n")
        for name, part in rows.groupby("checkpoint")
    }
    expected = [ratios["pretrained"], ratios["finetuned"], ratios["finetuned"] - ratios["pretrained"]]
    assert len(panels) == 3 * -(-tokens // 32)
    for place, grid in enumerate(expected):
        shown = np.concatenate([cells_of(axes) for axes in panels[place::3]], axis=1)
        np.testing.assert_allclose(shown[:, :tokens], grid)
        assert np.isnan(shown[:, tokens:]).all()
    scale = panels[2].images[0].norm
    assert scale.vmin == -scale.vmax
    assert scale.vmax == pytest.approx(max(np.percentile(np.abs(expected[2]), 99), 0.01))
    assert [axes.get_ylabel() for axes in panels[:3]] == ["Pretrained", "Fine-tuned", "Difference"]


def test_a_strip_of_one_checkpoint_has_no_difference() -> None:
    rows = pd.DataFrame({"checkpoint": "finetuned", "layer": [1, 1], "position": [0, 1], "attn_n": [0.2, np.nan]})
    stack = Stack("", range(1, 2), None, pieces_of("two words"))
    figure = drawn_by("mixing_strips", draw_strips, rows, "text/0", stack, Path("x"), read_parameters().figures)
    assert [axes.get_ylabel() for axes in figure.axes if axes.images] == ["Fine-tuned"]


@pytest.mark.parametrize("names", [["finetuned"], ["pretrained", "finetuned"]])
def test_every_review_is_a_dot_at_every_layer(tmp_path: Path, names: list[str]) -> None:
    layers, documents = range(1, 15), 60
    generator = np.random.default_rng(0)
    index = pd.MultiIndex.from_product([names, range(documents), layers], names=["checkpoint", "document", "layer"])
    reviews = index.to_frame(index=False).assign(method="attn_n", mean=generator.beta(2, 9, len(index)))
    reviews["tokens"] = 20 + 3 * reviews["document"]
    means = reviews.groupby(["checkpoint", "layer", "method"])["mean"].mean().reset_index()
    means = means.assign(ci_low=means["mean"] - 0.01, ci_high=means["mean"] + 0.01, weight="review", tokens_of="all")
    figures = read_parameters(REPOSITORY / "params.yaml").figures.model_copy(update={"formats": ["svg"]})
    drawn = []
    with pytest.MonkeyPatch.context() as patch, paper_style():
        original = Axes.scatter

        def scatter(axes: Any, x: Any, y: Any, **options: Any) -> Any:
            drawn.append((np.asarray(x), np.asarray(y)))
            return original(axes, x, y, **options)

        patch.setattr(Axes, "scatter", scatter)
        draw_reviews(reviews, means, "Layer", tmp_path / "figure", figures)
    x, y = (np.concatenate(parts) for parts in zip(*drawn, strict=True))
    assert sorted(y) == sorted(reviews["mean"])
    layer = np.round(x).astype(int)
    for number in layers:
        np.testing.assert_array_equal(sorted(y[layer == number]), sorted(reviews.query("layer == @number")["mean"]))
    assert len({*zip(x.round(3), y.round(2), strict=True)}) > 0.9 * len(x)  # side by side, not on top of each other
    text = (tmp_path / "figure.svg").read_text(encoding="utf-8")
    assert ("(left)" in text) == (len(names) == 2)
    for label in ("1-32 tokens", "129-256 tokens", "Norm-based"):
        assert label in text

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
from stages.outputs.mixing import read_ratios
from stages.outputs.reports import read_plot
from stages.parameters import Parameters, read_parameters
from stages.pictures.mixing_figures import draw_mixing_figures
from stages.pictures.mixing_reviews import draw_reviews
from stages.pictures.style import paper_style
from stages.pictures.tokens import read_captured


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
    assert ">Fine-tuned,<" in strip
    matrices = (figures / "mixing_contributions_text_1_finetuned.svg").read_text(encoding="utf-8")
    assert "its first 24 of 42 tokens" in matrices
    assert ">Value Zeroing<" in matrices
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

"""Figures of mixing: they show what was measured, in the same bytes every time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import digest, run_tokenized, write_parameters, write_reviews, write_tiny_bert

from attnmix.figures.mixing import draw_matrices, draw_reviews, draw_strips
from attnmix.figures.style import paper_style
from attnmix.figures.tokens import DisplayToken, TextLayers, read_captured
from attnmix.store.runs import Run
from stages import measure
from stages.common.parameters import read_parameters
from stages.render import draw_all, mixing_figures


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


@pytest.fixture(autouse=True)
def style() -> Iterator[None]:
    """What draws, draws under `paper_style`."""
    with paper_style():
        yield


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

"""The figures of mixing: drawn for what was measured, the same bytes every time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import write_parameters, write_reviews, write_tiny_bert

from stages import measure
from stages.outputs.mixing import read_ratios
from stages.outputs.reports import read_plot
from stages.parameters import Parameters, read_parameters
from stages.pictures.mixing_figures import draw_mixing_figures
from stages.pictures.style import paper_style
from stages.pictures.tokens import read_captured


def draw(parameters: Parameters) -> None:
    """Of the measured tokens, as nothing was captured."""
    tokens = read_ratios().drop_duplicates(["document", "position"])
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
    stems = {"mixing_by_layer", "mixing_steps", "mixing_tokens_text_0", "mixing_tokens_text_1"}
    for kind in ("contributions", "rollouts"):
        stems |= {f"mixing_{kind}_text_{i}_{name}" for i in (0, 1) for name in ("pretrained", "finetuned")}
    assert names == {f"{stem}.{suffix}" for stem in stems for suffix in ("png", "svg")}


def test_figures_name_tokens_and_methods_and_hold_colours(measured: Path) -> None:
    from matplotlib.image import imread

    figures = measured / "reports/figures"
    strip = (figures / "mixing_tokens_text_0.svg").read_text(encoding="utf-8")
    assert ">[CLS]<" in strip
    assert ">Fine-tuned,<" in strip
    matrices = (figures / "mixing_contributions_text_1_finetuned.svg").read_text(encoding="utf-8")
    assert "its first 24 of 42 tokens" in matrices
    assert ">Value Zeroing<" in matrices
    assert len(np.unique(imread(figures / "mixing_tokens_text_0.png").reshape(-1, 4), axis=0)) > 50


def test_figures_are_the_same_bytes_again(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(measured)
    files = sorted((measured / "reports/figures").iterdir())
    before = [path.read_bytes() for path in files]
    draw(read_parameters())
    assert [path.read_bytes() for path in files] == before

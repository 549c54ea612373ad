"""From reviews to page on a tiny model of every family: what a family has is made, what it lacks is not."""

from __future__ import annotations

from importlib import import_module

import pandas as pd
import pytest
from conftest import Workspace, toy_reviews
from families import EACH_FAMILY, write_family
from transformers import AutoConfig

from attnmix.core.points import EMBEDDING_POINTS, LAYER_POINTS, POINTS
from attnmix.measures.matrices import LAYER_MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.models.families import family_of
from attnmix.store.features import stored_sites
from attnmix.store.layout import ACTIVATIONS
from attnmix.store.runs import Run
from stages.common.parameters import read_parameters

STAGES = ("download", "finetune", "tokenize", "capture", "measure", "faithfulness", "reduce", "render")


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_family_goes_through_every_stage(workspace: Workspace, name: str) -> None:
    """Every stage in this process; parameters name all that any family has."""
    folder = workspace(
        dataset={"name": "reviews.csv", "validation_fraction": 0.25},
        model={"name": "model"},
        finetune={"epochs": 1, "max_length": 40},
        capture={
            **{"documents": [], "texts": ["time flies like an arrow"], "max_length": 40},
            **{"points": list(POINTS), "dtype": "float32"},
        },
        measure={
            "documents": 2,
            "methods": list(RATIOS),
            "matrices": list(LAYER_MATRICES),
            "gradient_documents": 1,
            "gradient_max_length": 8,
        },
        faithfulness={"documents": 2, "max_length": 20},
        umap={"layouts": ["joint", "separate"], "stability_seeds": []},
        render={"formats": ["png"], "dpi": 30},
    )
    toy_reviews(24, 0).to_csv(folder / "reviews.csv", index=False)
    write_family(name, folder / "model")
    for stage in STAGES:
        import_module(f"stages.{stage}").main(read_parameters())
    config = AutoConfig.from_pretrained("model")
    family, layers = family_of(config), 4 if name == "bart" else config.num_hidden_layers
    points = {layer: {site.point for site in stored_sites(ACTIVATIONS) if site.layer == layer} for layer in range(5)}
    in_layers = set(family.present(LAYER_POINTS))
    assert points[0] == set(family.present(EMBEDDING_POINTS))
    assert points[layers] == in_layers
    assert points[1] == {point for point in in_layers if not point.startswith("cross")}
    assert all(points[layer] for layer in range(layers))

    mixing = pd.read_csv("reports/plots/measure/mixing.csv")
    assert set(mixing["method"]) == set(family.present(RATIOS))
    assert set(mixing["layer"]) == set(range(1, layers + 1))
    assert mixing["mean"].between(0, 1).all()
    assert set(Run(folder).ratios().columns) & set(RATIOS) == set(family.present(RATIOS))
    assert set(Run(folder).matrices("finetuned", "text/0")) & set(LAYER_MATRICES) == set(family.present(LAYER_MATRICES))
    assert (folder / "reports/index.html").stat().st_size > 100_000

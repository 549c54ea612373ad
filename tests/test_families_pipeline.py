"""From reviews to page on a tiny model of every family: what a family has is made, what it lacks is not."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pandas as pd
import pytest
from conftest import Workspace, toy_reviews
from families import EACH_FAMILY, write_family
from transformers import AutoConfig

from attnmix.core.points import POINTS
from attnmix.measures.matrices import LAYER_MATRICES
from attnmix.measures.ratios import RATIOS
from attnmix.store.features import ACTIVATIONS, stored_sites
from attnmix.store.mixing import read_ratios, stored_matrices
from stages.common.parameters import read_parameters

STAGES = ("download", "finetune", "tokenize", "capture", "measure", "faithfulness", "reduce", "render")
PLAIN = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "albert", "distilbert", "gpt2", "opt", "bart")
POST_LN = ("bert", "roberta", "xlm-roberta", "camembert", "electra", "albert", "distilbert", "nomic_bert", "bart")
PARALLEL = ("gpt_neox",)
# Their embedding ends in a norm.
NORMED_EMBEDDING = (*POST_LN, "modernbert")


def expected_points(name: str, layers: int) -> dict[int, set[str]]:
    """The capture points of each level."""
    embedding = {"word_embedding", "embedding_output"} | ({"embedding_sum"} if name in NORMED_EMBEDDING else set())
    points = {"attention_heads", "attention_output", "ffn_output", "layer_output"}
    points |= set() if name in PARALLEL else {"attention_residual"}
    points |= {"attention_norm"} if name in POST_LN else set()
    levels = {0: embedding, **{layer: set(points) for layer in range(1, layers + 1)}}
    if name == "bart":  # its decoder is the second half
        levels[layers // 2] |= {"decoder_embedding_output"}
        for layer in range(layers // 2 + 1, layers + 1):
            levels[layer] |= {"cross_attention_output", "cross_attention_norm"}
    return levels


def expected_ratios(name: str) -> set[str]:
    return (
        {"attn_w", "attn_n"}
        | (set() if name in PARALLEL else {"attnres_w", "attnres_n"})
        | ({"attnresln_n", "enc_n"} if name in POST_LN else set())
        | ({"layer_n"} if name in PLAIN else set())
    )


def expected_matrices(name: str) -> set[str]:
    return (
        {"attention", "norm", "value_zeroing"}
        | (set() if name in PARALLEL else {"alti"})
        | ({"globenc"} if name in POST_LN else set())
    )


def run_pipeline(folder: Path, workspace: Workspace, name: str) -> None:
    """Every stage in this process; parameters name all that any family has."""
    toy_reviews(24, 0).to_csv(folder / "reviews.csv", index=False)
    write_family(name, folder / "model")
    workspace(
        dataset={"name": "reviews.csv", "validation_fraction": 0.25},
        model={"name": "model"},
        finetune={"epochs": 1, "max_length": 40},
        capture={
            "documents": [],
            "texts": ["time flies like an arrow"],
            "max_length": 40,
            "points": list(POINTS),
            "dtype": "float32",
        },
        measure={
            "documents": 2,
            "methods": list(RATIOS),
            "matrices": list(LAYER_MATRICES),
            "gradient_documents": 1,
            "gradient_max_length": 8,
        },
        faithfulness={"documents": 2, "max_length": 20},
        umap={"n_epochs": 5, "layouts": ["joint", "separate"], "stability_seeds": []},
        render={"formats": ["png"], "dpi": 30},
    )
    parameters = read_parameters()
    for stage in STAGES:
        import_module(f"stages.{stage}").main(parameters)


@pytest.mark.parametrize("name", EACH_FAMILY)
def test_family_goes_through_every_stage(workspace: Workspace, name: str) -> None:
    folder = workspace()
    run_pipeline(folder, workspace, name)
    layers = 4 if name == "bart" else AutoConfig.from_pretrained(folder / "model").num_hidden_layers
    stored: dict[int, set[str]] = {}
    for site in stored_sites(ACTIVATIONS):
        stored.setdefault(site.layer, set()).add(site.point)
    assert stored == expected_points(name, layers)

    mixing = pd.read_csv("reports/plots/measure/mixing.csv")
    assert set(mixing["method"]) == expected_ratios(name)
    assert set(mixing["layer"]) == set(range(1, layers + 1))
    assert mixing["mean"].between(0, 1).all()
    columns = {"checkpoint", "document", "position", "layer", "token", "word", "token_class", "in_statistics"}
    assert set(read_ratios().columns) - columns == expected_ratios(name)
    assert set(stored_matrices("finetuned", "text/0")) & set(LAYER_MATRICES) == expected_matrices(name)
    assert (folder / "reports/index.html").stat().st_size > 100_000

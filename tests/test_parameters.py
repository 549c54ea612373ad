"""params.yaml: every mistake is one clear error before any work starts."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY, write_parameters
from dvc.utils.hydra import apply_overrides
from stage_process import run_to_its_end

from attnmix.core.errors import InputError
from attnmix.core.options import Parameters
from stages.common.parameters import read_parameters

DEFAULT = REPOSITORY / "params.yaml"


def keys(values: dict[str, Any]) -> dict[str, str]:
    """What each `section.key` holds, as Python writes it: 4 is not 4.0, and True is not 1."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        flat |= (
            {f"{name}.{key}": repr(v) for key, v in value.items()} if isinstance(value, dict) else {name: repr(value)}
        )
    return flat


def test_every_default_is_what_the_shipped_file_says_and_the_other_way_round() -> None:
    assert keys(Parameters().model_dump()) == keys(yaml.safe_load(DEFAULT.read_text(encoding="utf-8")))


def test_values_of_the_file_come_before_the_defaults(tmp_path: Path) -> None:
    changes = {"umap": {"seed": 9, "max_points": None}, "dataset": {"train_limit": 5}, "measure": {"matrices": []}}
    write_parameters(tmp_path, **changes)
    expected = Parameters().model_dump()
    for section, values in changes.items():
        expected[section] |= values
    assert keys(read_parameters(tmp_path / "params.yaml").model_dump()) == keys(expected)


@pytest.mark.parametrize(
    ("section", "key", "value", "expected"),
    [
        ("umap", "metrik", "cosine", ["umap.metrik is unknown", "did you mean umap.metric", "n_neighbors"]),
        ("finetune", "epochs", "three", ["finetune.epochs", "'three'", "integer"]),
        ("finetune", "epochs", -1, ["finetune.epochs", "greater than or equal to 0"]),
        ("finetune", "epochs", 1.5, ["finetune.epochs", "1.5"]),
        ("finetune", "learning_rate", -1e-5, ["finetune.learning_rate", "greater than 0"]),
        ("finetune", "learning_rate", float("nan"), ["finetune.learning_rate", "finite"]),
        ("finetune", "precision", "fp8", ["finetune.precision", "'fp8'", "fp32", "bf16", "fp16"]),
        ("dataset", "validation_fraction", 1.0, ["dataset.validation_fraction", "less than 1"]),
        ("hub", "time_limit", 0, ["hub.time_limit", "greater than or equal to 1"]),
        ("hub", "time_limit", "long", ["hub.time_limit", "'long'", "integer"]),
        ("dataset", "train_limit", 0, ["dataset.train_limit", "greater than or equal to 1"]),
        ("dataset", "name", None, ["dataset.name", "string"]),
        (
            "dataset",
            "text_column",
            ["premise", "hypothesis"],
            ["dataset.text_column", "pairs of texts are out of scope"],
        ),
        ("dataset", "label_column", "text", ["dataset.label_column: 'text'", "dataset.text_column names it already"]),
        ("dataset", "test_split", "train", ["dataset.test_split: 'train'", "dataset.train_split names it already"]),
        ("dataset", "train_split", None, ["dataset.train_split", "string"]),
        ("capture", "documents", [-1], ["capture.documents[0]", "greater than or equal to 0"]),
        ("capture", "documents", [3, 3], ["capture.documents", "more than once"]),
        ("capture", "documents", 3, ["capture.documents", "list"]),
        ("capture", "texts", [" "], ["capture.texts", "text 0 is empty"]),
        ("capture", "texts", ["a", "\u200b\u0301\x00"], ["capture.texts", "text 1 is empty"]),
        ("capture", "texts", ["a", "b\x00c"], ["capture.texts", "text 1 holds a NUL character"]),
        (
            "capture",
            "points",
            ["layer_output", "attention_nrom"],
            ["capture.points[1]: 'attention_nrom'", "there is no capture point of that name; allowed: word_embedding"],
        ),
        ("capture", "points", [], ["capture.points", "at least 1"]),
        ("capture", "dtype", "float8", ["capture.dtype", "float16", "float32"]),
        (
            "measure",
            "methods",
            ["attn_x"],
            ["measure.methods[0]: 'attn_x'", "there is no mixing ratio of that name; allowed: attn_w", "attnresln_n"],
        ),
        (
            "measure",
            "matrices",
            ["alti", "altii"],
            [
                "measure.matrices[1]: 'altii'",
                "there is no contribution matrix of that name; allowed: attention",
                "alti",
            ],
        ),
        ("measure", "matrices", None, ["measure.matrices", "list"]),
        (
            "umap",
            "layouts",
            ["spiral"],
            ["umap.layouts[0]: 'spiral'", "there is no layout of that name; allowed: joint, aligned, separate"],
        ),
        ("umap", "metric", "euclid", ["umap.metric: 'euclid'", "not known to umap-learn", "allowed: braycurtis"]),
        ("umap", "stability_seeds", [3, 2], ["umap.stability_seeds", "umap.seed itself"]),
        ("umap", "min_dist", 2, ["umap.min_dist", "less than or equal to 1"]),
        ("render", "formats", ["jpg"], ["render.formats[0]", "png", "pdf", "svg"]),
    ],
)
def test_mistake_names_the_key_and_what_is_allowed(
    tmp_path: Path, section: str, key: str, value: Any, expected: list[str]
) -> None:
    write_parameters(tmp_path, **{section: {key: value}})
    with pytest.raises(InputError) as raised:
        read_parameters(tmp_path / "params.yaml")
    for part in expected:
        assert part in str(raised.value)
    assert "\n" not in str(raised.value)


def test_missing_keys_and_sections_are_named_beside_other_mistakes(tmp_path: Path) -> None:
    values = yaml.safe_load(DEFAULT.read_text(encoding="utf-8"))
    del values["umap"], values["finetune"]["epochs"], values["seed"]
    values["capture"]["dtype"] = "float8"
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    expected = r"seed is missing; finetune\.epochs is missing; umap is missing; capture\.dtype: 'float8' is not allowed"
    with pytest.raises(InputError, match=expected):
        read_parameters(tmp_path / "params.yaml")


@pytest.mark.parametrize("key", list(keys(Parameters().model_dump())))
def test_no_default_stands_in_for_a_key_that_the_file_lacks(tmp_path: Path, key: str) -> None:
    values = yaml.safe_load(DEFAULT.read_text(encoding="utf-8"))
    section, _, name = key.partition(".")
    del (values[section] if name else values)[name or section]
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(InputError, match=rf": {re.escape(key)} is missing$"):
        read_parameters(tmp_path / "params.yaml")


def test_numbers_as_dvc_writes_them_are_numbers(tmp_path: Path) -> None:
    text = DEFAULT.read_text().replace("learning_rate: ", "learning_rate: 2e-05 # ")
    (tmp_path / "params.yaml").write_text(text)
    assert read_parameters(tmp_path / "params.yaml").finetune.learning_rate == 2e-5


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"seed: [1", "is not valid YAML: line 1: "),
        (b"seed: 1\nmodel: {}\nseed: 2\n", 'is not valid YAML: line 3: found duplicate key "seed"'),
        (b"seed: \xff", "is not valid YAML"),
        (b"just words", "must hold the sections seed, arithmetic, dataset, model"),
        (b"", "must hold the sections seed, arithmetic, dataset, model"),
        (None, "is missing; run the pipeline from the repository's root"),
    ],
)
def test_file_that_is_no_mapping_is_one_error(tmp_path: Path, content: bytes | None, expected: str) -> None:
    if content is not None:
        (tmp_path / "params.yaml").write_bytes(content)
    with pytest.raises(InputError, match=rf"params\.yaml {expected}") as raised:
        read_parameters(tmp_path / "params.yaml")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("order", range(3))
def test_the_file_survives_what_dvc_writes_into_it(tmp_path: Path, order: int) -> None:
    """`-S` of each list, emptied and as it was, in any order; DVC writes every value into the same file."""
    shutil.copy(DEFAULT, tmp_path)
    expected = yaml.safe_load(DEFAULT.read_text(encoding="utf-8"))
    lists = [(s, name, value) for s, each in expected.items() if isinstance(each, dict) for name, value in each.items()]
    settings = [(*where, value) for *where, before in lists if isinstance(before, list) for value in ([], before)]
    random.Random(order).shuffle(settings)
    for section, name, value in settings:
        apply_overrides(tmp_path / "params.yaml", [f"{section}.{name}={json.dumps(value)}"])
        expected[section][name] = value
        assert yaml.safe_load((tmp_path / "params.yaml").read_text(encoding="utf-8")) == expected


def test_name_with_an_umlaut_is_set_in_double_quotes(tmp_path: Path) -> None:
    shutil.copy(DEFAULT, tmp_path)
    apply_overrides(tmp_path / "params.yaml", ['dataset.text_column="Äußerung"'])
    assert read_parameters(tmp_path / "params.yaml").dataset.text_column == "Äußerung"


def test_wrong_parameters_are_told_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    write_parameters(tmp_path, render={"formts": ["png"]})
    for heavy in ("torch", "transformers", "pandas", "numba", "matplotlib"):
        (tmp_path / f"{heavy}.py").write_text(f"raise SystemExit('{heavy} was imported')")
    path = {"PYTHONPATH": os.pathsep.join(map(str, [tmp_path, REPOSITORY]))}
    for stage in (
        "sources",
        "download",
        "finetune",
        "tokenize",
        "capture",
        "measure",
        "faithfulness",
        "reduce",
        "render",
    ):
        run = run_to_its_end([sys.executable, "-m", "stages", stage], tmp_path, path)
        assert run.stderr.startswith("error: params.yaml: figures.formts is unknown; did you mean render.formats?")
        assert (run.returncode, run.stderr.count("\n")) == (1, 1)


def test_stage_ends_with_one_line_and_a_non_zero_status(tmp_path: Path) -> None:
    write_parameters(tmp_path, finetune={"epochs": -1})
    bare = {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
    run = run_to_its_end([sys.executable, "-m", "stages", "download"], tmp_path, bare, inherited={})
    assert run.returncode == 1
    assert run.stderr.startswith("error: params.yaml: finetune.epochs: -1 is not allowed")
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "data").exists()

"""params.yaml: every mistake is one clear error before any work starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY, write_parameters

from stages.errors import InputError
from stages.parameters import read_parameters

DEFAULT = REPOSITORY / "params.yaml"


def test_default_file_is_valid_and_read_as_it_stands() -> None:
    parameters = read_parameters(DEFAULT)
    assert parameters.model_dump() == yaml.safe_load(DEFAULT.read_text())


@pytest.mark.parametrize(
    ("section", "key", "value", "expected"),
    [
        ("umap", "metrik", "cosine", ["umap.metrik is unknown", "did you mean umap.metric", "n_neighbors"]),
        ("finetune", "epochs", "three", ["finetune.epochs", "'three'", "integer"]),
        ("finetune", "epochs", 0, ["finetune.epochs", "greater than or equal to 1"]),
        ("finetune", "epochs", 1.5, ["finetune.epochs", "1.5"]),
        ("finetune", "learning_rate", -1e-5, ["finetune.learning_rate", "greater than 0"]),
        ("finetune", "learning_rate", float("nan"), ["finetune.learning_rate", "finite"]),
        ("finetune", "precision", "fp8", ["finetune.precision", "'fp8'", "fp32", "bf16", "fp16"]),
        ("dataset", "validation_fraction", 1.0, ["dataset.validation_fraction", "less than 1"]),
        ("dataset", "train_limit", 0, ["dataset.train_limit", "greater than or equal to 1"]),
        ("dataset", "name", None, ["dataset.name", "string"]),
        ("capture", "documents", [-1], ["capture.documents[0]", "greater than or equal to 0"]),
        ("capture", "documents", [3, 3], ["capture.documents", "more than once"]),
        ("capture", "documents", 3, ["capture.documents", "list"]),
        ("capture", "texts", [" "], ["capture.texts", "text 0 is empty"]),
        ("capture", "points", ["attention_nrom"], ["capture.points", "attention_nrom", "attention_norm, ffn_output"]),
        ("capture", "points", [], ["capture.points", "at least 1"]),
        ("capture", "dtype", "float8", ["capture.dtype", "float16", "float32"]),
        ("mixing", "methods", ["attn_x"], ["mixing.methods[0]", "attn_w", "attnresln_n"]),
        ("umap", "layouts", ["spiral"], ["umap.layouts[0]", "joint", "separate"]),
        ("umap", "min_dist", 2, ["umap.min_dist", "less than or equal to 1"]),
        ("figures", "formats", ["jpg"], ["figures.formats[0]", "png", "pdf", "svg"]),
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


def test_missing_key_and_missing_section_are_named(tmp_path: Path) -> None:
    values = yaml.safe_load(DEFAULT.read_text())
    del values["umap"], values["finetune"]["epochs"]
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(InputError, match=r"finetune.epochs is missing; umap is missing"):
        read_parameters(tmp_path / "params.yaml")


def test_numbers_as_dvc_writes_them_are_numbers(tmp_path: Path) -> None:
    text = DEFAULT.read_text().replace("learning_rate: ", "learning_rate: 2e-05 # ")
    (tmp_path / "params.yaml").write_text(text)
    assert read_parameters(tmp_path / "params.yaml").finetune.learning_rate == 2e-5


@pytest.mark.parametrize("content", ["seed: [1", "just words", ""])
def test_file_that_is_no_mapping_is_one_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "params.yaml").write_text(content)
    with pytest.raises(InputError, match=r"params.yaml"):
        read_parameters(tmp_path / "params.yaml")


def test_stage_ends_with_one_line_and_a_non_zero_status(tmp_path: Path) -> None:
    write_parameters(tmp_path, finetune={"epochs": 0})
    run = subprocess.run(
        [sys.executable, "-m", "stages.download"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert run.stderr.startswith("error: params.yaml: finetune.epochs: 0 is not allowed")
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "data").exists()

"""params.yaml: every mistake is one clear error before any work starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY, write_parameters
from stage_process import run_to_its_end

from attnmix.core.errors import InputError
from stages.common.parameters import Parameters, read_parameters

DEFAULT = REPOSITORY / "params.yaml"


def keys(values: dict[str, Any]) -> dict[str, str]:
    """Return each `section.key` with its value as Python writes it: 4 is not 4.0, and True is not 1."""
    sections = {name: value if isinstance(value, dict) else {"": value} for name, value in values.items()}
    return {f"{name}.{key}": repr(value) for name, section in sections.items() for key, value in section.items()}


def test_every_default_is_the_value_in_the_shipped_file() -> None:
    assert keys(Parameters().model_dump()) == keys(yaml.safe_load(DEFAULT.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("umap.metrik", "cosine", ["umap.metrik is unknown; did you mean umap.metric?", "n_neighbors"]),
        ("finetune.epochs", "three", ["finetune.epochs: 'three' is not allowed: input should be a valid integer"]),
        ("finetune.epochs", -1, ["finetune.epochs: -1", "greater than or equal to 0"]),
        ("finetune.learning_rate", float("nan"), ["finetune.learning_rate", "finite"]),
        ("finetune.precision", "fp8", ["finetune.precision: 'fp8'", "fp32", "bf16", "fp16"]),
        ("dataset.train_limit", 0, ["dataset.train_limit: 0", "greater than or equal to 1"]),
        ("dataset.name", None, ["dataset.name", "string"]),
        ("dataset.label_column", "text", ["dataset: text_column and label_column need different names"]),
        ("dataset.test_split", "train", ["dataset: train_split and test_split need different names"]),
        ("capture.documents", [-1], ["capture.documents[0]: -1", "greater than or equal to 0"]),
        ("capture.documents", [3, 3], ["capture.documents", "more than once"]),
        ("capture.texts", ["a", "\u200b\u0301\x00"], ["capture.texts[1]", "the text is empty"]),
        ("capture.texts", ["a", "b\x00c"], ["capture.texts[1]", "NUL character"]),
        ("capture.points", ["attention_nrom"], ["capture.points[0]: 'attention_nrom'", "allowed: word_embedding"]),
        ("capture.points", [], ["capture.points", "at least 1"]),
        ("capture.store", "s4://bucket/run", ["capture.store", "fsspec knows no file system s4://"]),
        ("measure.methods", ["attn_x"], ["measure.methods[0]: 'attn_x'", "allowed: attn_w", "attnresln_n"]),
        ("umap.metric", "euclid", ["umap.metric: 'euclid'", "allowed: braycurtis"]),
        ("umap.stability_seeds", [3, 2], ["umap.stability_seeds", "umap.seed itself"]),
        ("render.formats", ["jpg"], ["render.formats[0]: 'jpg'", "png", "pdf", "svg"]),
    ],
)
def test_mistake_names_the_key_and_what_is_allowed(tmp_path: Path, key: str, value: Any, expected: list[str]) -> None:
    section, _, name = key.partition(".")
    write_parameters(tmp_path, **{section: {name: value}})
    with pytest.raises(InputError) as raised:
        read_parameters(tmp_path / "params.yaml")
    assert [part for part in expected if part not in str(raised.value)] == []
    assert "\n" not in str(raised.value)


def test_numbers_as_dvc_writes_them_are_numbers(tmp_path: Path) -> None:
    text = DEFAULT.read_text().replace("learning_rate: ", "learning_rate: 2e-05 # ")
    (tmp_path / "params.yaml").write_text(text)
    assert read_parameters(tmp_path / "params.yaml").finetune.learning_rate == 2e-5


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"seed: 1\nmodel: {}\nseed: 2\n", 'is not valid YAML: .*found duplicate key "seed".*line 3'),
        (b"seed: \xff", "is not valid YAML"),
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


def test_wrong_parameters_are_reported_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    write_parameters(tmp_path, render={"formts": ["png"]})
    for heavy in ("torch", "transformers", "pandas", "numba", "matplotlib"):
        (tmp_path / f"{heavy}.py").write_text(f"raise SystemExit('{heavy} was imported')")
    path = {"PYTHONPATH": os.pathsep.join(map(str, [tmp_path, REPOSITORY])), "PATH": ""}
    run = run_to_its_end([sys.executable, "-m", "stages", "capture"], tmp_path, path, inherited={})
    assert run.stderr.startswith("error: params.yaml: render.formts is unknown; did you mean render.formats?")
    assert (run.returncode, run.stderr.count("\n")) == (1, 1)
    assert not (tmp_path / "data").exists()

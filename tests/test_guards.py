"""What a machine refuses is one line: too little disk or memory, a second run, a read-only folder."""

from __future__ import annotations

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
from attnmix.store.layout import ACTIVATIONS
from attnmix.store.runs import Run
from stages import capture, faithfulness, finetune, measure, reduce, render
from stages.common import resources as machine
from stages.common.cli import memory_errors_explained
from stages.common.parameters import read_parameters
from stages.common.resume import UNFINISHED
from stages.common.stage_lock import working_alone

CAPTURE = {"documents": [0, 1, 2], "max_length": 40}
HOLD = "from stages.common.stage_lock import working_alone as alone\nwith alone('render'): print(flush=True), input()"


def leave(patch: pytest.MonkeyPatch, disk: float) -> None:
    """Pretend that the disk has only so many bytes left."""
    patch.setattr(machine, "disk_usage", lambda _: SimpleNamespace(free=disk))


def test_stores_that_do_not_fit_the_disk_are_refused_before_any_is_written(
    workspace: Workspace, tiny_bert: Path, small_shards: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared_for_capture(workspace(capture=CAPTURE), tiny_bert)
    run_tokenized(capture)
    written = sum(path.stat().st_size for path in ACTIVATIONS.rglob("*.zarr/c/**/*") if path.is_file())
    shutil.rmtree(ACTIVATIONS)
    leave(monkeypatch, disk=written / 2)
    reduce = "capture.points, capture.documents, capture.drawn, capture.max_length or capture.dtype"
    with pytest.raises(InputError, match=rf"^capture: \d+ tokens at 17 points need .* of disk, .* reduce {reduce}$"):
        run_tokenized(capture)
    assert not list(Path().rglob("*.zarr"))
    leave(monkeypatch, disk=written)
    run_tokenized(capture)
    assert ACTIVATIONS.is_dir()


def raise_as_cuda_does() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")


@pytest.mark.parametrize(
    "allocate",
    [lambda: np.empty(2**50), lambda: torch.empty(2**50), raise_as_cuda_does],
    ids=["numpy", "torch", "cuda"],
)
def test_lack_of_memory_is_one_line_that_names_the_parameter(allocate: Callable[[], object]) -> None:
    expected = r"^capture: out of memory \(.*allocate.*\); reduce capture\.batch_tokens or capture\.max_length$"
    with pytest.raises(InputError, match=expected), memory_errors_explained("capture"):
        allocate()
    with pytest.raises(RuntimeError, match="of another kind"), memory_errors_explained("capture"):
        raise RuntimeError("of another kind")


@pytest.mark.parametrize(
    ("kind", "clones", "copies"),
    [
        ("reflink,copy", True, 1),
        ("reflink,copy", False, 2),
        ("hardlink", False, 1),
        ("symlink", False, 1),
        ("copy", True, 2),
    ],
)
def test_copy_in_the_cache_counts_where_dvc_will_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, clones: bool, copies: int
) -> None:
    from dvc.fs import system

    def reflink(source: Path, target: Path) -> None:
        assert source.read_bytes()
        if not clones:
            raise OSError

    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").write_text(f"[cache]\n    type = {kind}\n")
    monkeypatch.setattr(system, "reflink", reflink)
    monkeypatch.setenv("DVC_ROOT", str(tmp_path))
    leave(monkeypatch, disk=copies * 1e6)
    machine.check_disk("x: it needs", 1_000_000, tmp_path / "features", "y")
    leave(monkeypatch, disk=copies * 1e6 - 1)
    with pytest.raises(InputError, match="copy in DVC's cache, and" if copies > 1 else r"of disk, and"):
        machine.check_disk("x: it needs", 1_000_000, tmp_path / "features", "y")
    assert [path.name for path in tmp_path.iterdir()] == [".dvc"]


def test_second_run_of_a_stage_is_told_of_the_first_until_that_ends_or_is_killed(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = workspace()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD], env=environment, **pipes) as first:
        assert first.stdout
        assert first.stdout.readline() == "\n"
        with pytest.raises(InputError, match=f"another run of render is at work in {folder}"), working_alone("render"):
            pass
        command = [sys.executable, "-m", "stages", "render"]
        second = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert second.returncode == 1
        assert second.stderr.startswith("error: another run of render is at work")
        assert second.stderr.count("\n") == 1
        with monkeypatch.context() as patch:  # of one run's processes the first has the lock
            patch.setenv("RANK", "1")
            with working_alone("render"):
                pass
        first.kill()
        first.wait()
        with working_alone("render"):
            assert UNFINISHED.is_dir()
        assert not UNFINISHED.exists()


def test_read_only_folder_is_one_error_before_any_work(workspace: Workspace) -> None:
    folder = workspace()
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not there")
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-ec"]
    if subprocess.run([*inside, f"mount --bind '{folder}' '{folder}'"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    script = f"mount --bind '{folder}' '{folder}'; mount -o remount,bind,ro '{folder}'; cd '{folder}'; exec \"$@\""
    program = "from stages.common.stage_lock import working_alone\nwith working_alone('capture'): pass"
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [*inside, script, "sh", sys.executable, "-c", program]
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert run.stderr.splitlines()[-1].startswith(f"attnmix.core.errors.InputError: {folder} cannot be written")


def test_linked_environment_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    shutil.copy(REPOSITORY / "Makefile", tmp_path)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared/kept").touch()
    (tmp_path / ".venv").symlink_to("shared")
    for lock in ("requirements.lock", "requirements-torch.lock", "requirements-cuda.lock"):
        (tmp_path / lock).touch()
    command = ["make", "repro", f"PYTHON={sys.executable}"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert run.stderr.startswith("error: .venv is a link, ")
    assert "remove the link, or activate that environment and run 'dvc repro'" in run.stderr
    assert [path.name for path in (tmp_path / ".venv").iterdir()] == ["kept"]


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

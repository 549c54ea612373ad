"""What a machine refuses is one line: too little disk or memory, a second run, a read-only folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPOSITORY, SHORT, Workspace, prepared_for_capture, run_tokenized

from attnmix.core.errors import InputError
from attnmix.store.checkpoints import CHECKPOINT_FOLDERS
from attnmix.store.features import ACTIVATIONS
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


def test_measures_that_do_not_fit_the_disk_are_refused_before_any_is_taken(
    workspace: Workspace, tiny_bert: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared_for_capture(workspace(capture=CAPTURE, measure={"documents": 2}, finetune={"epochs": 0}), tiny_bert)
    leave(monkeypatch, disk=1e4)
    with pytest.raises(InputError, match=r"^measure: 3 captured texts and 2 drawn reviews need .* reduce capture\.max"):
        run_tokenized(measure)
    assert not list(UNFINISHED.rglob("*.npz"))


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


@contextmanager
def held() -> Iterator[subprocess.Popen[str]]:
    """Another process at work in the current folder."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLD], env=environment, **pipes) as process:
        assert process.stdout
        assert process.stdout.readline() == "\n"
        yield process
        process.kill()


def test_second_run_of_a_stage_is_told_of_the_first_until_that_ends_or_is_killed(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = workspace()
    with held() as first:
        with pytest.raises(InputError, match=f"another run of render is at work in {folder}"), working_alone("render"):
            pass
        command = [sys.executable, "-m", "stages", "render"]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
        second = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert second.returncode == 1
        assert second.stderr.startswith("error: another run of render is at work")
        assert second.stderr.count("\n") == 1
        with working_alone("reduce"):
            pass
        with monkeypatch.context() as patch:  # of one run's processes the first has the lock
            patch.setenv("RANK", "1")
            with working_alone("render"):
                pass
        first.kill()
        first.wait()
        with working_alone("render"):
            assert UNFINISHED.is_dir()
        assert not UNFINISHED.exists()


def test_file_in_place_of_a_folder_is_one_error(workspace: Workspace) -> None:
    workspace()
    Path("features").touch()
    with pytest.raises(InputError, match=r"/features is a file; features must be a folder"), working_alone("capture"):
        pass
    with working_alone("finetune"):
        pass


def mounted(folder: Path, options: str, command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """A command that finds `folder` mounted; skips where the system allows no mounts of one's own."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not there")
    script = f"mount {options} '{folder}' && shift && exec \"$@\""
    inside = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
    if subprocess.run([*inside, script, "sh", "sh", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount")
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)} | environment
    whole = [*inside, script, "sh", "sh", *command]
    return subprocess.run(whole, env=variables, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("read_only", ["features", "."])
def test_read_only_folder_is_one_error_before_any_work(workspace: Workspace, read_only: str) -> None:
    folder = workspace() / read_only
    folder.mkdir(exist_ok=True)
    options = f"--bind '{folder}' '{folder}' && mount -o remount,bind,ro"
    program = (
        "import os, sys; os.chdir(sys.argv[1]); from stages.common.stage_lock import *\n"
        "with working_alone('capture'): pass"
    )
    run = mounted(folder, options, [sys.executable, "-c", program, str(Path.cwd())])
    assert run.stderr.splitlines()[-1].startswith(f"attnmix.core.errors.InputError: {folder} cannot be written")


def test_full_disk_is_named_and_not_the_source_of_the_copy(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(bytes(200_000))
    (tmp_path / "full").mkdir()
    program = (
        "import shutil, sys; from stages.common.cli import as_command\n"
        "with as_command(lambda: ''): shutil.copyfile(sys.argv[1], sys.argv[2])"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "source"), str(tmp_path / "full/target")]
    run = mounted(tmp_path / "full", "-t tmpfs -o size=64k tmpfs", command)
    assert run.stderr == f"error: the system refuses {tmp_path}/full/target: No space left on device\n"


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


@pytest.mark.parametrize(
    "advice", [["git init --quiet", "git add -A", "git commit --quiet -m start"], ["dvc config core.no_scm true"]]
)
def test_source_archive_is_told_what_makes_it_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advice: list[str]
) -> None:
    for name in ("Makefile", ".dvc/config"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPOSITORY / name, tmp_path / name)
    (tmp_path / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv/bin").symlink_to(Path(sys.executable).parent)
    (tmp_path / ".venv/.installed").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/.venv/bin{os.pathsep}{os.environ['PATH']}")
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@example.org")

    def repro() -> subprocess.CompletedProcess[str]:
        command = ["make", "repro", "--old-file=.venv/.installed"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    refused = repro()
    assert refused.returncode != 0
    assert refused.stderr.startswith(f"error: {tmp_path} is not a git repository; run 'git init ")
    for command in advice:
        assert command.replace(" --quiet", "") in refused.stderr
        subprocess.run(command.split(), check=True, stdout=subprocess.DEVNULL)
    assert repro().returncode == 0


@pytest.mark.parametrize("stage", [finetune, capture, measure, faithfulness, reduce, render])
@pytest.mark.parametrize("with_models", [False, True])
def test_stage_without_its_inputs_names_them_and_the_command_that_makes_them(
    workspace: Workspace, tiny_bert: Path, stage: Any, with_models: bool
) -> None:
    folder = workspace(**{section: {"max_length": 40} for section in ("finetune", *SHORT)})
    if with_models:
        for checkpoint in CHECKPOINT_FOLDERS.values():
            shutil.copytree(tiny_bert, folder / checkpoint)
    expected = r"^(models|data|features)/\S+ (is missing|holds no feature store); `dvc repro \w+` makes (it|them)$"
    with pytest.raises(InputError, match=expected):
        stage.main(read_parameters())


@pytest.mark.long
def test_pipeline_runs_where_temporary_files_may_not_be_executed(tmp_path: Path) -> None:
    tests = ["tests/test_pipeline.py", "-k", "writes_every_output", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "-q", *tests, "--basetemp", str(tmp_path / "no exec" / "of pytest")]
    (tmp_path / "no exec").mkdir()
    run = mounted(tmp_path / "no exec", "-t tmpfs -o noexec tmpfs", command, TMPDIR=str(tmp_path / "no exec"))
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.long
def test_shallow_clone_compares_with_its_commit_and_says_which_it_lacks(tmp_path: Path) -> None:
    def run(*command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert run("git", "clone", "--quiet", "--depth", "1", REPOSITORY.as_uri(), ".").returncode == 0
    dvc = [sys.executable, "-m", "dvc"]
    same = run(*dvc, "metrics", "diff")
    assert (same.returncode, same.stdout) == (0, "")
    older = run(*dvc, "metrics", "diff", "HEAD~1")
    assert older.returncode != 0
    assert older.stderr == "ERROR: unknown Git revision 'HEAD~1'\n"
    assert run(*dvc, "status").returncode == 0

"""The files of docs/scale.md do what it says: with the programs of a cluster played by scripts, and lost machines."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY, SMALL_SHARDS, Workspace, digest, prepared_for_capture, run_tokenized
from dvc_repository import Repository, new_repository, stages_run
from stage_process import TESTS, run_stage

from attnmix.store.features import ACTIVATIONS
from stages import capture

SCALE = REPOSITORY / "docs/scale"
PLAYED = {"scontrol": "echo 127.0.0.1", "srun": 'exec "$@"'}
STAGES = ["download", "finetune", "tokenize", "capture", "measure", "faithfulness", "reduce", "render"]


def a_free_port() -> int:
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """What Slurm says to a job, and a folder with its programs."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name, line in PLAYED.items():
        (folder / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (folder / name).chmod(0o755)
    (folder / "torchrun").symlink_to(shutil.which("torchrun", path=Path(sys.executable).parent) or "torchrun")
    said = {"SLURM_JOB_NODELIST": "node[1]", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "PORT": str(a_free_port())}
    return said | {"PROGRAMS": str(folder)}


def submit(repository: Repository, script: str, cluster: dict[str, str]) -> str:
    path = os.pathsep.join([cluster["PROGRAMS"], repository.environment()["PATH"]])
    folders = {"SLURM_SUBMIT_DIR": str(repository.folder), "PATH": path, "PYTHONPATH": str(repository.folder)}
    return repository.run("bash", str(SCALE / script), **cluster, **folders).stdout


@pytest.mark.long
def test_the_slurm_job_runs_each_stage_once_and_a_second_one_none(tmp_path: Path, cluster: dict[str, str]) -> None:
    plain, by_slurm = (new_repository(tmp_path / name) for name in ("plain", "slurm"))
    plain.dvc("repro")
    said = submit(by_slurm, "slurm.sh", cluster)
    assert stages_run(said) == ["download", "faithfulness", "reduce", "render"]
    assert stages_run(by_slurm.dvc("repro", "--dry")) == []
    assert (by_slurm.folder / "dvc.lock").read_text() == (plain.folder / "dvc.lock").read_text()
    assert stages_run(submit(by_slurm, "slurm.sh", cluster)) == []


@pytest.mark.long
def test_a_machine_goes_on_where_a_lost_one_stopped(tmp_path: Path) -> None:
    """Of SkyPilot's job only its commands: the first machine is lost while it measures, the second is new."""
    project = new_repository(tmp_path / "project")
    project.dvc("remote", "add", "--default", "store", str(tmp_path / "remote"))
    project.commit("A remote")
    job = yaml.safe_load((SCALE / "sky.yaml").read_text(encoding="utf-8"))["run"]
    first, second = (project.clone(tmp_path / name) for name in ("first", "second"))
    (tmp_path / "state").mkdir()
    lost = job.replace("dvc repro", '[ "$stage" != measure ] || exit 9; dvc repro')
    assert lost != job
    said = first.run("bash", "-c", lost, succeeds=False, STATE=str(tmp_path / "state")).stdout
    assert stages_run(said) == STAGES[:3]
    said = second.run("bash", "-c", job, STATE=str(tmp_path / "state")).stdout
    assert stages_run(said) == STAGES[3:]
    assert stages_run(second.dvc("repro", "--dry", "--allow-missing")) == []


def test_scripts_are_scripts() -> None:
    for path in SCALE.glob("*.sh"):
        subprocess.run(["bash", "-n", str(path)], check=True)
        assert os.access(path, os.X_OK)


@pytest.mark.long
def test_workers_that_are_killed_at_random_leave_the_same_bytes(
    workspace: Workspace, tiny_bert: Path, small_shards: None, one_thread: None
) -> None:
    """A simulation of preemption: jobs of two processes, each lost at another moment, until one comes through."""
    changes = {"documents": list(range(12)), "max_length": 40}
    whole, lossy = (prepared_for_capture(workspace(name, capture=changes), tiny_bert) for name in ("whole", "lossy"))
    for moment in (0, 2, 5, 9):  # units of rows that one of the two has finished when it is lost
        command = [
            sys.executable,
            "-m",
            "stage_process",
            "capture",
            "--kill-at",
            rf"rename .*done/{moment}\.begun",
        ]
        command += [part for name, value in SMALL_SHARDS.items() for part in ("--set", f"{name}={value}")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(REPOSITORY), str(TESTS)]),
            "OMP_NUM_THREADS": "1",
        }
        run = subprocess.run(command, cwd=lossy, env=environment, capture_output=True, check=False)
        assert run.returncode == -signal.SIGKILL
        assert not (lossy / ACTIVATIONS).exists()
    run_stage(lossy, "capture", constants=SMALL_SHARDS, processes=2)
    os.chdir(whole)
    run_tokenized(capture)
    assert digest(whole / ACTIVATIONS) == digest(lossy / ACTIVATIONS)

"""The cluster jobs of docs/scale.md run with simulated schedulers and lost machines."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY, STAGES
from dvc_repository import new_repository, stages_run

SCALE = REPOSITORY / "docs/scale"
PLAYED = {"scontrol": "echo 127.0.0.1", "srun": 'exec "$@"'}


@pytest.mark.long
def test_slurm_job_runs_each_stage_once(tmp_path: Path) -> None:
    plain, by_slurm = (new_repository(tmp_path / name) for name in ("plain", "slurm"))
    plain.dvc("repro")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, line in PLAYED.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
        (programs / name).chmod(0o755)
    (programs / "torchrun").symlink_to(shutil.which("torchrun", path=Path(sys.executable).parent) or "torchrun")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    job = {"SLURM_JOB_NODELIST": "node[1]", "SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "PORT": port}
    job |= {"SLURM_SUBMIT_DIR": str(by_slurm.folder), "PYTHONPATH": str(by_slurm.folder)}
    job["PATH"] = os.pathsep.join([str(programs), by_slurm.environment()["PATH"]])
    output = by_slurm.run("bash", str(SCALE / "slurm.sh"), **job).stdout
    launched = ("finetune", "capture", "inspect", "measure")  # started by torchrun, outside DVC
    assert stages_run(output) == [stage for stage in STAGES if stage not in launched]
    assert stages_run(by_slurm.dvc("repro", "--dry")) == []
    assert (by_slurm.folder / "dvc.lock").read_text() == (plain.folder / "dvc.lock").read_text()
    assert stages_run(by_slurm.run("bash", str(SCALE / "slurm.sh"), **job).stdout) == []


@pytest.mark.long
def test_new_machine_resumes_lost_run(tmp_path: Path) -> None:
    """Run the commands of the SkyPilot job on a machine that is lost during `measure`, and then on a new machine."""
    project = new_repository(tmp_path / "project")
    project.dvc("remote", "add", "--default", "store", str(tmp_path / "remote"))
    project.commit("A remote")
    job = yaml.safe_load((SCALE / "sky.yaml").read_text(encoding="utf-8"))["run"]
    first, second = (project.clone(tmp_path / name) for name in ("first", "second"))
    (tmp_path / "state").mkdir()
    lost = job.replace("dvc repro", '[ "$stage" != measure ] || exit 9; dvc repro')
    assert lost != job
    state = {"STATE": str(tmp_path / "state")}
    assert stages_run(first.run("bash", "-c", lost, succeeds=False, **state).stdout) == STAGES[:5]
    assert stages_run(second.run("bash", "-c", job, **state).stdout) == STAGES[5:]
    assert stages_run(second.dvc("repro", "--dry", "--allow-missing")) == []

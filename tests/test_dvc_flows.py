"""DVC and CI scripts work with dvc.yaml in reruns, clones, experiments, pull requests and cluster jobs."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY, STAGES, toy_reviews
from dvc_repository import Repository, new_repository, stages_run, with_home

WORKFLOW = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = WORKFLOW["jobs"]["pipeline"]["steps"]
STEP_SCRIPTS = {step["name"]: step["run"] for step in STEPS if ".py" in step.get("run", "")}
GUARD, REPORT = (STEP_SCRIPTS[name] for name in ("Fail where dvc.lock is not of this commit", "Compare with main"))
DEPTH = next(step["with"]["fetch-depth"] for step in STEPS if "checkout" in step.get("uses", ""))
PAGE = ("reports/index.html", "reports/figures")
CHECKPOINTS = ("models/pretrained", "models/finetuned")
FEATURES = (
    "features/capture",
    "features/tokenize/captured",
    "features/inspect/contributions",
    "features/inspect/heads",
    "features/inspect/predictions.parquet",
    "features/inspect/token_scores.parquet",
    "features/inspect/tokens.parquet",
)
SCALE = REPOSITORY / "docs/scale"
METRICS, CURVES = Path("reports/metrics/reduce.json"), Path("reports/plots/measure/mixing.csv")

pytestmark = pytest.mark.long  # every test runs DVC three to ten times


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Return a repository with stand-in stages and a committed run."""
    made = new_repository(tmp_path_factory.mktemp("ci") / "author")
    shutil.copytree(REPOSITORY / ".ci", made.folder / ".ci")
    assert stages_run(made.dvc("repro")) == STAGES
    made.commit("A run")
    return made


def set_parameter(folder: Path, old: str = "metric: euclidean", new: str = "metric: cosine") -> None:
    text = (folder / "params.yaml").read_text(encoding="utf-8")
    assert text.count(old) == 1
    (folder / "params.yaml").write_text(text.replace(old, new), encoding="utf-8")


def assert_same_files(author: Repository, reader: Repository, *outs: str) -> None:
    for out in outs:
        files = [path for path in (author.folder / out, *(author.folder / out).rglob("*")) if path.is_file()]
        assert files
        for path in files:
            assert (reader.folder / path.relative_to(author.folder)).read_bytes() == path.read_bytes(), path


def test_clone_pulls_and_reruns_only_affected_stages(author: Repository, tmp_path: Path) -> None:
    author = author.copy(tmp_path / "author")
    author.dvc("remote", "add", "--default", "store", str(tmp_path / "remote"))
    author.dvc("push")
    author.commit("The run and its remote")
    author.git("tag", "--annotate", "--message", "A version", "maps@v1.0.0")
    author.dvc("artifacts", "get", str(author.folder), "maps", "--out", str(tmp_path / "maps"))
    assert (tmp_path / "maps/digest.txt").read_bytes() == (author.folder / "features/reduce/digest.txt").read_bytes()
    reader = author.clone(tmp_path / "reader")
    reader.dvc("pull", *PAGE)
    assert reader.existing(*PAGE, *FEATURES, "data/reviews", *CHECKPOINTS, "features/measure") == list(PAGE)
    assert_same_files(author, reader, *PAGE)
    assert reader.git("status", "--short") == ""

    for each in (author, reader):
        set_parameter(each.folder)
    assert stages_run(author.dvc("repro")) == ["reduce", "render"]
    assert stages_run(reader.dvc("repro", "--pull", "--allow-missing")) == ["reduce", "render"]
    assert reader.existing(*PAGE, *FEATURES, "data/reviews", *CHECKPOINTS) == [*PAGE, *FEATURES]
    # Equal files show that all stages had complete inputs.
    assert_same_files(author, reader, "dvc.lock", *PAGE, "features/reduce")


def test_experiments_need_the_users_file(author: Repository, tmp_path: Path) -> None:
    author = author.copy(tmp_path / "author")
    toy_reviews(20, 0).to_csv(author.folder / "own.csv", index=False)
    (author.folder / ".git/info/exclude").write_text("own.csv\n", encoding="utf-8")
    # `test_split=` sets an empty value, and `0` is the name of a column.
    author.dvc("exp", "run", "-S", "dataset.name=own.csv", "-S", "dataset.test_split=", "-S", "dataset.group_column=0")
    author.commit("A run on a file that git does not know")
    assert author.run(sys.executable, ".ci/stale.py").stdout.startswith("dvc.lock matches")
    set_parameter(author.folder, "group_column: 0", "group_column: film")
    stale = author.run(sys.executable, ".ci/stale.py", succeeds=False).stdout
    assert "- `download`: " in stale
    assert "sources@own" not in stale
    author.git("checkout", "params.yaml")

    temporary = ("exp", "run", "--temp", "-S", "umap.metric=cosine")
    # own.csv is unchanged, so `download` does not run.
    assert stages_run(author.dvc(*temporary)) == ["reduce", "render"]
    toy_reviews(20, 1).to_csv(author.folder / "own.csv", index=False)
    run = author.run("dvc", *temporary, succeeds=False)
    assert "own.csv is missing in this copy of the repository" in run.stdout + run.stderr
    assert stages_run(author.dvc(*temporary, "--copy-paths", "own.csv")) == STAGES


def pull_request(author: Repository, folder: Path, change: Callable[[Path], object]) -> Repository:
    """Commit a change to a copy of `author`, and return a shallow clone with DVC's cache and all figures."""
    branch, checkout = author.copy(folder / "branch"), with_home(folder / "checkout")
    change(branch.folder)
    branch.commit("A change")
    branch.git("clone", "--quiet", "--depth", str(DEPTH), branch.folder.as_uri(), str(checkout.folder))
    for kept in (".dvc/cache", "reports/figures"):
        shutil.copytree(branch.folder / kept, checkout.folder / kept)
    return checkout


def summary_of(checkout: Repository, script: str, succeeds: bool = True, **environment: str) -> str:
    """Run the script of a step as GitHub does with `shell: bash`, and return the step's summary."""
    assert WORKFLOW["defaults"]["run"]["shell"] == "bash"
    summary = checkout.home / "summary.md"
    summary.unlink(missing_ok=True)
    command = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script)
    environment["GITHUB_STEP_SUMMARY"] = str(summary)
    assert "Traceback" not in checkout.run(*command, succeeds=succeeds, **environment).stderr
    return summary.read_text(encoding="utf-8")


def test_pull_request_report_lists_all_changes(author: Repository, tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        set_parameter(folder)
        author._replace(folder=folder).dvc("repro")
        set_parameter(folder, "n_neighbors: 15", "n_neighbors: 16")  # without another run
        (folder / METRICS).write_text(json.dumps({"joint": {"kept": 0.5, "overlap": 0.25}}), encoding="utf-8")
        (folder / CURVES).write_text(re.sub(r"\d+", "7", (folder / CURVES).read_text()), encoding="utf-8")

    checkout = pull_request(author, tmp_path, change)
    stale = dict(re.findall("^- `([a-z]+)`: (.*)$", summary_of(checkout, GUARD, succeeds=False), flags=re.MULTILINE))
    assert "`umap` in params.yaml modified" in stale["reduce"]
    assert f"{METRICS} modified" in stale["reduce"]
    assert "`umap` in params.yaml modified" in stale["render"]
    assert not stale.keys() & {"download", "finetune", "capture"}

    text = summary_of(checkout, REPORT, PICTURES="https://example.org/pictures/abc")
    scores = re.findall(r"^\| reports/metrics/(\S+) +\| (\S+) ", text, flags=re.MULTILINE)
    assert {("reduce.json", "joint.kept"), ("reduce.json", "joint.overlap")} <= set(scores)
    assert {name for name, _ in scores} == {"reduce.json"}
    parameters = re.findall(r"^\| params.yaml.*", text, flags=re.MULTILINE)
    assert [row.split()[3::2] for row in parameters] == [
        ["umap.metric", "euclidean", "cosine"],
        ["umap.n_neighbors", "15", "16"],
    ]
    (number,) = re.findall(r"^## Plots: (\d+) changed", text, flags=re.MULTILINE)
    plots = re.findall("^- (.*)$", text[text.index("## Plots") :], flags=re.MULTILINE)
    assert (int(number), plots[0]) == (len(plots), "Mixing ratio by layer")
    assert (checkout.folder / "changed-plots/index.html").stat().st_size > 1000
    shown = re.findall(r"!\[\]\(https://example.org/pictures/(\S+)\)", text)
    assert len(shown) == 2 * text.count(".png**") + 2 * text.count(".gif**") > 0

    remote, programs, said = (tmp_path / name for name in ("remote.git", "programs", "said.txt"))
    checkout.git("init", "--quiet", "--bare", str(remote))
    programs.mkdir()
    (programs / "gh").write_text(f'#!/bin/sh\necho "$*" > {said}\n', encoding="utf-8")
    (programs / "gh").chmod(0o755)
    given = {"GITHUB_SHA": "abc", "GITHUB_REPOSITORY": "owner/name", "REMOTE": str(remote)}
    checkout.run(".ci/comment", "12", **given, PATH=f"{programs}:{checkout.environment()['PATH']}")
    assert said.read_text().split() == [
        *("pr", "comment", "12", "--repo", "owner/name", "--edit-last", "--create-if-none"),
        *("--body-file", "report.md"),
    ]
    assert (checkout.folder / "report.md").read_text(encoding="utf-8") == text
    listed = checkout.git("--git-dir", str(remote), "ls-tree", "-r", "--name-only", "ci-pictures/12").split()
    assert set(listed) == set(shown)


def test_pull_request_of_document_has_no_rows(author: Repository, tmp_path: Path) -> None:
    checkout = pull_request(author, tmp_path, lambda folder: (folder / "README.md").write_text("A line.\n"))
    assert "dvc.lock matches this commit" in summary_of(checkout, GUARD)
    text = summary_of(checkout, REPORT)
    assert "|" not in text
    assert re.findall("## (.*) changed", text) == ["Metrics: 0", "Parameters: 0", "Plots: 0"]
    assert not (checkout.folder / "changed-plots").exists()


SIMULATED_PROGRAMS = {"scontrol": "echo 127.0.0.1", "srun": 'exec "$@"'}


def test_slurm_job_runs_each_stage_once(author: Repository, tmp_path: Path) -> None:
    by_slurm = new_repository(tmp_path / "slurm")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, line in SIMULATED_PROGRAMS.items():
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
    assert (by_slurm.folder / "dvc.lock").read_text() == (author.folder / "dvc.lock").read_text()
    assert stages_run(by_slurm.run("bash", str(SCALE / "slurm.sh"), **job).stdout) == []


def test_new_machine_resumes_lost_run(tmp_path: Path) -> None:
    """Run the commands of the SkyPilot job on a machine that is lost after `tokenize`, and then on a new machine.

    To save time, the loop contains only every third stage; `dvc repro` also runs the stages before each of them.
    """
    project = new_repository(tmp_path / "project")
    project.dvc("remote", "add", "--default", "store", str(tmp_path / "remote"))
    project.commit("A remote")
    job = yaml.safe_load((SCALE / "sky.yaml").read_text(encoding="utf-8"))["run"]
    loop = "for stage in {};"
    assert job.count(loop.format(" ".join(STAGES))) == 1
    job = job.replace(loop.format(" ".join(STAGES)), loop.format("tokenize measure render"))
    first, second = (project.clone(tmp_path / name) for name in ("first", "second"))
    (tmp_path / "state").mkdir()
    lost = job.replace("dvc repro", '[ "$stage" != measure ] || exit 9; dvc repro')
    assert lost != job
    state = {"STATE": str(tmp_path / "state")}
    assert stages_run(first.run("bash", "-c", lost, succeeds=False, **state).stdout) == STAGES[:3]
    assert sorted(stages_run(second.run("bash", "-c", job, **state).stdout)) == sorted(STAGES[3:])
    assert stages_run(second.dvc("repro", "--dry", "--allow-missing")) == []

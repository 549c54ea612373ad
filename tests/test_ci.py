"""The scripts of the workflow's steps, run as the workflow runs them, in shallow clones of pull requests."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY
from dvc_repository import Repository, new_home, new_repository

WORKFLOW = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = WORKFLOW["jobs"]["pipeline"]["steps"]
SCRIPTS = {step["name"]: step["run"] for step in STEPS if ".py" in step.get("run", "")}
GUARD, REPORT = SCRIPTS["Fail where dvc.lock is not of this commit"], SCRIPTS["Compare with main"]
DEPTH = next(step["with"]["fetch-depth"] for step in STEPS if "checkout" in step.get("uses", ""))
METRICS, CURVES = Path("reports/metrics/reduce.json"), Path("reports/plots/measure/mixing.csv")

PullRequest = Callable[[Callable[[Path], object]], Repository]


@pytest.fixture(scope="module")
def author(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """The project with stand-in stages after a run, committed."""
    made = new_repository(tmp_path_factory.mktemp("ci") / "author")
    shutil.copytree(REPOSITORY / ".ci", made.folder / ".ci")
    made.dvc("repro")
    made.commit("A run")
    return made


@pytest.fixture
def pull_request(author: Repository, tmp_path: Path) -> PullRequest:
    """Commit a change and return what the workflow checks out of it, with the figures in place."""

    def make(change: Callable[[Path], object]) -> Repository:
        branch = author.copy(tmp_path / "branch")
        change(branch.folder)
        branch.commit("A change")
        checkout = Repository(tmp_path / "checkout", new_home(tmp_path / "home"))
        branch.git("clone", "--quiet", "--depth", str(DEPTH), branch.folder.as_uri(), str(checkout.folder))
        for kept in (".dvc/cache", "reports/figures"):
            shutil.copytree(branch.folder / kept, checkout.folder / kept)
        return checkout

    return make


def summary_of(checkout: Repository, script: str, succeeds: bool = True) -> str:
    """Run a step's script as GitHub does with `shell: bash`, and return the step's summary."""
    assert WORKFLOW["defaults"]["run"]["shell"] == "bash"
    summary = checkout.home / "summary.md"
    summary.unlink(missing_ok=True)
    command = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script)
    assert "Traceback" not in checkout.run(*command, succeeds=succeeds, GITHUB_STEP_SUMMARY=str(summary)).stderr
    return summary.read_text(encoding="utf-8")


def test_pull_request_shows_its_parameter_its_scores_and_its_curve(pull_request: PullRequest) -> None:
    def change(folder: Path) -> None:
        parameters = (folder / "params.yaml").read_text(encoding="utf-8")
        assert "  metric: euclidean\n" in parameters
        (folder / "params.yaml").write_text(parameters.replace("metric: euclidean", "metric: cosine"), encoding="utf-8")
        (folder / METRICS).write_text(json.dumps({"joint": {"kept": 0.5, "overlap": 0.25}}), encoding="utf-8")
        (folder / CURVES).write_text(re.sub(r"\d+", "7", (folder / CURVES).read_text()), encoding="utf-8")

    checkout = pull_request(change)
    stale = dict(re.findall("^- `([a-z]+)`: (.*)$", summary_of(checkout, GUARD, succeeds=False), flags=re.MULTILINE))
    assert "`umap` in params.yaml modified" in stale["reduce"]
    assert f"{METRICS} modified" in stale["reduce"]
    assert "`umap` in params.yaml modified" in stale["render"]
    assert not stale.keys() & {"download", "finetune", "capture"}

    text = summary_of(checkout, REPORT)
    rows = re.findall(r"^\| reports/metrics/(\S+) +\| (\S+) ", text, flags=re.MULTILINE)
    assert {("reduce.json", "joint.kept"), ("reduce.json", "joint.overlap")} <= set(rows)
    assert {name for name, _ in rows} == {"reduce.json"}
    assert re.findall(r"^\| params.yaml.*", text, flags=re.MULTILINE) == [
        "| params.yaml | umap.metric | euclidean | cosine      |"
    ]
    assert "## Of plots, 1 changed" in text
    assert "- Mixing ratio by layer" in text
    assert (checkout.folder / "changed-plots/index.html").stat().st_size > 1000


def test_pull_request_of_a_document_shows_no_rows(pull_request: PullRequest) -> None:
    checkout = pull_request(lambda folder: (folder / "README.md").write_text("A line.\n", encoding="utf-8"))
    assert "dvc.lock is of this commit" in summary_of(checkout, GUARD)
    text = summary_of(checkout, REPORT)
    assert "|" not in text
    assert re.findall("Of (.*) changed", text) == ["metrics, 0", "params, 0", "plots, 0"]
    assert not (checkout.folder / "changed-plots").exists()

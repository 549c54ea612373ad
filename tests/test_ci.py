"""What the workflow's steps say of a pull request, run as the workflow has them in clones without any data."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import REPOSITORY

WORKFLOW = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = WORKFLOW["jobs"]["pipeline"]["steps"]
SCRIPTS = {step["name"]: step["run"] for step in STEPS if ".py" in step.get("run", "")}
GUARD, REPORT = SCRIPTS["Fail where dvc.lock is not of this commit"], SCRIPTS["Compare with main"]
AUTHOR = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
METRICS = Path("reports/metrics/maps.json")

pytestmark = pytest.mark.long

PullRequest = Callable[[Callable[[], object]], Path]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *AUTHOR, *arguments], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def pull_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PullRequest:
    """Commit a change to a clone, and make what the workflow checks out of it the current folder."""

    def make(change: Callable[[], object]) -> Path:
        git("clone", "--quiet", str(REPOSITORY), str(tmp_path / "author"))
        monkeypatch.chdir(tmp_path / "author")
        before = Path("params.yaml").read_bytes()
        change()
        assert Path("params.yaml").read_bytes() != before
        git("commit", "--quiet", "--all", "--message", "a change")
        depth = next(step["with"]["fetch-depth"] for step in STEPS if "checkout" in step.get("uses", ""))
        git("clone", "--quiet", "--depth", str(depth), (tmp_path / "author").as_uri(), str(tmp_path / "checkout"))
        monkeypatch.chdir(tmp_path / "checkout")
        for script in (REPOSITORY / ".ci").glob("*.py"):
            Path(".ci", script.name).write_bytes(script.read_bytes())
        return tmp_path / "summary.md"

    return make


def run(script: str, summary: Path) -> subprocess.CompletedProcess[str]:
    """As GitHub runs a step's script with `shell: bash`."""
    assert WORKFLOW["defaults"]["run"]["shell"] == "bash"
    environment = os.environ | {
        "GITHUB_STEP_SUMMARY": str(summary),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def replaced(path: Path, pattern: str, value: Any) -> None:
    text, number = re.subn(pattern, value, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert number
    path.write_text(text, encoding="utf-8")


def change_the_metric() -> None:
    """As a run with another umap.metric leaves params.yaml and metrics: every score of the maps differs."""
    replaced(Path("params.yaml"), "^  metric: euclidean$", "  metric: cosine")
    replaced(METRICS, r"\d\.\d+", lambda number: str(round(float(number[0]) * 0.9, 6)))


def test_pull_request_of_another_metric_shows_the_rows_of_the_maps(pull_request: PullRequest) -> None:
    summary = pull_request(change_the_metric)
    guard = run(GUARD, summary)
    assert guard.returncode == 1
    assert "Traceback" not in guard.stderr
    stale = dict(re.findall("^- `([a-z]+)`: (.*)$", summary.read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert "`umap` in params.yaml modified" in stale["reduce"]
    assert "reports/metrics/maps.json modified" in stale["reduce"]
    assert "`umap` in params.yaml modified" in stale["render"]
    assert not stale.keys() & {"download", "finetune", "capture", "measure", "validate"}

    assert run(REPORT, summary).returncode == 0
    text = summary.read_text(encoding="utf-8")
    scores = {f"{layout}.{score}" for layout, each in json.loads(METRICS.read_text()).items() for score in each}
    rows = re.findall(r"^\| reports/metrics/\w+\.json +\| (\S+)", text, flags=re.MULTILINE)
    assert set(rows) == scores
    assert len(rows) <= 12
    assert re.findall(r"^\| params.yaml.*", text, flags=re.MULTILINE) == [
        "| params.yaml | umap.metric | euclidean | cosine      |"
    ]


def test_pull_request_of_a_comment_shows_no_rows(pull_request: PullRequest) -> None:
    summary = pull_request(lambda: replaced(Path("params.yaml"), "^# Splits", "# Parts"))
    assert run(GUARD, summary).returncode == 0
    assert run(REPORT, summary).returncode == 0
    assert "|" not in summary.read_text(encoding="utf-8")
    assert not Path("changed-plots").exists()


def test_curve_that_changed_is_named_and_drawn(pull_request: PullRequest) -> None:
    def change() -> None:
        replaced(Path("params.yaml"), "^# Splits", "# Parts")
        replaced(Path("reports/plots/mixing.csv"), r"0\.9\d+", "0.5")

    summary = pull_request(change)
    assert run(REPORT, summary).returncode == 0
    assert "## Of plots, 1 changed" in summary.read_text(encoding="utf-8")
    assert "- Mixing ratio by layer" in summary.read_text(encoding="utf-8")
    assert Path("changed-plots/index.html").stat().st_size > 1000

"""The workflow's scripts on the project's own dvc.yaml, for pull requests in shallow clones."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import yaml
from conftest import REPOSITORY
from dvc_repository import STAGES, Repository, new_repository, stages_run, with_home

WORKFLOW = yaml.safe_load((REPOSITORY / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
STEPS: list[dict[str, Any]] = WORKFLOW["jobs"]["pipeline"]["steps"]
STEP_SCRIPTS = {step["name"]: step["run"] for step in STEPS if ".py" in step.get("run", "")}
GUARD, REPORT = (STEP_SCRIPTS[name] for name in ("Fail where dvc.lock is not of this commit", "Compare with main"))
DEPTH = next(step["with"]["fetch-depth"] for step in STEPS if "checkout" in step.get("uses", ""))
METRICS, CURVES = "reports/metrics/reduce.json", "reports/plots/measure/mixing.csv"


def summary_of(checkout: Repository, script: str, succeeds: bool = True) -> str:
    """Run a step's script as GitHub does with `shell: bash`, and return the step's summary."""
    assert WORKFLOW["defaults"]["run"]["shell"] == "bash"
    summary = checkout.home / "summary.md"
    summary.unlink(missing_ok=True)
    command = ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script)
    assert "Traceback" not in checkout.run(*command, succeeds=succeeds, GITHUB_STEP_SUMMARY=str(summary)).stderr
    return summary.read_text(encoding="utf-8")


def test_pull_request_shows_its_parameter_its_scores_and_its_curve(tmp_path: Path) -> None:
    branch, checkout = new_repository(tmp_path / "branch"), with_home(tmp_path / "checkout")
    shutil.copytree(REPOSITORY / ".ci", branch.folder / ".ci")
    assert stages_run(branch.dvc("repro")) == STAGES
    branch.commit("A run")
    assert "dvc.lock matches this commit" in summary_of(branch, GUARD)

    values, metrics, curve = (branch.folder / name for name in ("params.yaml", METRICS, CURVES))
    text = values.read_text(encoding="utf-8")
    assert text.count("metric: euclidean") == 1
    values.write_text(text.replace("metric: euclidean", "metric: cosine"), encoding="utf-8")
    metrics.write_text(json.dumps({"joint": {"kept": 0.5, "overlap": 0.25}}), encoding="utf-8")
    curve.write_text(re.sub(r"\d+", "7", curve.read_text(encoding="utf-8")), encoding="utf-8")
    branch.commit("A change")
    # What the workflow checks out, with the figures in place.
    branch.git("clone", "--quiet", "--depth", str(DEPTH), branch.folder.as_uri(), str(checkout.folder))
    for kept in (".dvc/cache", "reports/figures"):
        shutil.copytree(branch.folder / kept, checkout.folder / kept)
    stale = dict(re.findall("^- `([a-z]+)`: (.*)$", summary_of(checkout, GUARD, succeeds=False), flags=re.MULTILINE))
    assert "`umap` in params.yaml modified" in stale["reduce"]
    assert f"{METRICS} modified" in stale["reduce"]
    assert "`umap` in params.yaml modified" in stale["render"]
    assert stale.keys() == {"measure", "faithfulness", "reduce", "render"}

    text = summary_of(checkout, REPORT)
    scores = re.findall(r"^\| reports/metrics/(\S+) +\| (\S+) ", text, flags=re.MULTILINE)
    assert {("reduce.json", "joint.kept"), ("reduce.json", "joint.overlap")} <= set(scores)
    assert {name for name, _ in scores} == {"reduce.json"}
    changed = re.findall(r"^\| params.yaml.*", text, flags=re.MULTILINE)
    assert changed == ["| params.yaml | umap.metric | euclidean | cosine      |"]
    assert "## Of plots, 1 changed" in text
    assert "- Mixing ratio by layer" in text
    assert (checkout.folder / "changed-plots/index.html").stat().st_size > 1000

"""Experiments side by side: which are taken, how they are grouped, and means over seeds against a computation here."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from browser import browser
from dvc_repository import Repository, new_repository
from scipy import stats

from attnmix.core.errors import InputError
from compare import __main__ as command
from compare.experiments import _unfinished, compared

LAYERS, METHODS = (1, 2), ("attn_w", "attnresln_n")


def mean_of(model: str, seed: int, checkpoint: str, layer: int, method: str) -> float:
    """A made-up ratio."""
    base = {"big": 0.3, "small": 0.2}[model] + 0.01 * layer + 0.05 * METHODS.index(method)
    return base + (checkpoint == "finetuned") * (0.1 + 0.02 * seed) + 0.003 * seed**2


def write_experiment(
    repository: Repository, name: str, model: str, seed: int, methods: tuple[str, ...] = METHODS, **changes: int
) -> None:
    """A commit as DVC leaves it, of the current one, which stays checked out."""
    folder, start = repository.folder, repository.git("rev-parse", "HEAD").strip()
    values = yaml.safe_load((folder / "params.yaml").read_text(encoding="utf-8"))
    values["seed"], values["model"]["name"] = seed, model
    values["finetune"].update(changes)
    (folder / "params.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    rows = [
        (checkpoint, layer, method, mean_of(model, seed, checkpoint, layer, method))
        for checkpoint in ("pretrained", "finetuned")
        for layer in LAYERS
        for method in methods
    ]
    table = pd.DataFrame(rows, columns=["checkpoint", "layer", "method", "mean"]).assign(ci_low=0, ci_high=1, tokens=9)
    (folder / "reports/plots/measure").mkdir(parents=True, exist_ok=True)
    if methods:
        table.to_csv(folder / "reports/plots/measure/mixing.csv", index=False)
        overall = table.groupby(["checkpoint", "method"], sort=False)["mean"].mean().reset_index()
        overall.to_csv(folder / "reports/plots/measure/mixing_overall.csv", index=False)
    repository.commit(f"experiment {name}")
    repository.git("update-ref", f"refs/exps/{start[:2]}/{start[2:]}/{name}", "HEAD")
    repository.git("checkout", "--quiet", "--detach", start)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Two models with three seeds and one; experiments of an earlier commit, without results, twice, and queued."""
    made = new_repository(tmp_path_factory.mktemp("compare") / "run")
    write_experiment(made, "earlier", "small", 9)
    (made.folder / "later.txt").write_text("a commit", encoding="utf-8")
    made.commit("Later")
    for seed in (0, 1, 2):
        write_experiment(made, f"big-{seed}", "big", seed)
    write_experiment(made, "small-5", "small", 5, methods=METHODS[:1])
    write_experiment(made, "small-twice", "small", 5, methods=METHODS[:1])
    write_experiment(made, "nothing", "small", 6, methods=())
    made.dvc("exp", "run", "--queue", "--name", "waits", "--set-param", "seed=7")
    return made


@pytest.fixture
def inside(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(repository.folder)
    for name, value in repository.environment().items():
        monkeypatch.setenv(name, value)
    return repository.folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["compare", *arguments])
    return command.main()


def test_table_figure_and_page_of_the_commits_experiments(
    inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--to", str(tmp_path), "--methods", *METHODS) == 0
    said = capsys.readouterr()
    assert said.err.splitlines() == [
        "left out: waits is not finished: queued",
        "left out: nothing has no table mixing and no table mixing_overall",
        "left out: small-twice has the parameters and the seed of small-5",
        "left out: model.name=small, seed 5, has no attnresln_n",
    ]
    assert said.out.startswith("2 groups of experiments, by model.name: ")
    table = pd.read_csv(tmp_path / "mixing.csv").set_index(["model.name", "checkpoint", "layer", "method"])
    for layer in LAYERS:
        before, after = (
            [mean_of("big", seed, each, layer, "attn_w") for seed in (0, 1, 2)] for each in ("pretrained", "finetuned")
        )
        for checkpoint, values in (("finetuned", after), ("difference", np.subtract(after, before).tolist())):
            row = table.loc["big", checkpoint, layer, "attn_w"]
            low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
            np.testing.assert_allclose(
                row[["mean", "ci_low", "ci_high", "seeds"]], [np.mean(values), low, high, 3], atol=1e-6
            )
    alone = table.loc["small", "pretrained", 2, "attn_w"]
    assert alone["mean"] == pytest.approx(mean_of("small", 5, "pretrained", 2, "attn_w"))
    assert np.isnan(alone["ci_low"])
    overall = pd.read_csv(tmp_path / "mixing_overall.csv").set_index(["model.name", "checkpoint", "method"])
    whole = [mean_of("big", s, "finetuned", layer, "attn_w") for s in (0, 1, 2) for layer in LAYERS]
    assert overall.loc[("big", "finetuned", "attn_w"), "mean"] == pytest.approx(np.mean(whole), abs=1e-6)
    for name, begins in (("mixing.png", b"\x89PNG"), ("mixing.pdf", b"%PDF")):
        assert (tmp_path / name).read_bytes().startswith(begins)
    with browser() as started:
        page = started.new_page()
        page.goto((tmp_path / "index.html").resolve().as_uri())
        cells = page.locator("#overall tr", has_text="model.name=big").nth(1).locator("td").all_inner_texts()
        row = overall.loc[("big", "finetuned", "attnresln_n")] * 100
        assert cells[1] == f"{row['mean']:.1f} [{row['ci_low']:.1f}, {row['ci_high']:.1f}]"
        assert page.evaluate("document.querySelector('#figure img').naturalWidth") > 500
        assert "waits is not finished: queued" in page.inner_text("#experiments")


def test_named_ones_are_of_any_commit_and_a_commit_may_be_named(inside: Path) -> None:
    found = compared(inside, ["earlier", "big-0"])
    assert found.keys == ["model.name"]
    assert [(each.values, list(each.tables["mixing"])) for each in found.groups] == [(("big",), [0]), (("small",), [9])]
    assert [found.label(each) for each in found.groups] == ["model.name=big", "model.name=small"]
    with pytest.raises(InputError, match=r"^bigg is no finished experiment and no commit; there are big-0, big-1"):
        compared(inside, ["bigg"])
    with pytest.raises(InputError, match=r"named HEAD; `dvc exp run --queue .*; HEAD has no table mixing"):
        compared(inside, ["HEAD"])


def test_wrong_methods_are_one_error(inside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"--methods: there is no ratio attn; allowed: attn_w, "):
        run(monkeypatch, "--methods", "attn")
    with pytest.raises(InputError, match="--methods: no experiment has enc_n; they have attn_w"):
        run(monkeypatch, "small-5", "--methods", "enc_n", "--to", str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_failed_ones_are_named_with_their_last_words(tmp_path: Path) -> None:
    log = tmp_path / "task.out"
    log.write_text("Running stage 'download':\nerror: model.name: bad\nERROR: failed to reproduce\n", encoding="utf-8")
    failed = {"state": "failed", "local": {"log": str(log)}}
    experiments = [
        {"name": "b", "revs": [{"rev": "1" * 40}], "executor": failed},
        {"name": None, "revs": [{"rev": "2" * 40}], "executor": {"state": "running", "local": None}},
        {"name": "a", "revs": [{"rev": "3" * 40}], "executor": None},
    ]
    shown = [{"rev": "workspace", "experiments": None}, {"rev": "f" * 40, "experiments": experiments}]
    said = _unfinished(lambda *_: json.dumps(shown), "f" * 40)
    assert said == ["2222222 is not finished: running", "b failed: error: model.name: bad"]


def test_nothing_to_compare_says_how_to_make_something(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = new_repository(tmp_path / "run")
    monkeypatch.chdir(made.folder)
    for name, value in made.environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        InputError, match=re.escape("no finished experiment of the current commit; `dvc exp run --queue")
    ):
        compared(made.folder)

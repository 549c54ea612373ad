"""Experiments run the pipeline in one clone per seed, and their tables match independently computed statistics."""

from __future__ import annotations

import shutil
from itertools import combinations, product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from conftest import REPOSITORY
from dvc_repository import Repository, repository_of
from scipy import stats

from attnmix.core.errors import InputError
from experiments import __main__ as command
from experiments import imdb, study
from experiments.tables import holm, over_seeds, paired_differences, read_experiments

STUDY = REPOSITORY / "docs/study"
LAYERS, METHODS = (1, 2), ("attn_w", "attnresln_n")
KEYS = ["setting", "checkpoint", "layer", "method"]
# The run of seed 2 fails while the file `broken` exists.
FILES = {
    "dvc.yaml": """
stages:
  measure:
    cmd: python measure.py
    deps: [measure.py]
    params: [seed, model, dataset]
    plots: [reports/plots/measure: {cache: false}]
  render:
    cmd: "false"
""",
    "params.yaml": "seed: 0\nmodel:\n  name: small\ndataset:\n  name: sample\n",
    ".gitignore": "/experiments/runs/\n/log\n",
    "measure.py": """
import pathlib, shutil, sys, yaml
values = yaml.safe_load(open("params.yaml"))
pathlib.Path("log").open("a").write("run ")
if values["seed"] == 2 and pathlib.Path(values["dataset"]["name"], "broken").exists():
    sys.exit("error: broken")
pathlib.Path("reports/plots/measure").mkdir(parents=True, exist_ok=True)
shutil.copy(f"tables/{values['model']['name']}_{values['seed']}.csv", "reports/plots/measure/mixing.csv")
""",
}


def ratio(model: str, seed: int, checkpoint: str, layer: int, method: str) -> float:
    """Return an artificial ratio that depends on all arguments."""
    base = {"big": 0.3, "small": 0.2}[model] + 0.01 * layer + 0.05 * METHODS.index(method)
    return base + (checkpoint == "finetuned") * (0.1 + 0.02 * seed * layer**2 - 0.01 * (seed - 1) ** 2)


def ratios(model: str, seed: int) -> pd.DataFrame:
    """Return mixing.csv in the format of the stage `measure`."""
    rows = []
    for layer in LAYERS:
        for method in METHODS:
            before, after = (ratio(model, seed, each, layer, method) for each in ("pretrained", "finetuned"))
            for checkpoint, mean in (("pretrained", before), ("finetuned", after), ("difference", after - before)):
                rows.append((checkpoint, layer, method, mean, 9))
    return pd.DataFrame(rows, columns=["checkpoint", "layer", "method", "mean", "tokens"])


def closed_test(p: list[float]) -> list[float]:
    """Return Holm's p-values: for each hypothesis, the largest Bonferroni p-value of all subsets that contain it."""
    subsets = [subset for size in range(1, len(p) + 1) for subset in combinations(range(len(p)), size)]
    bonferroni = {subset: min(1.0, len(subset) * min(p[each] for each in subset)) for subset in subsets}
    return [max(bonferroni[subset] for subset in subsets if number in subset) for number in range(len(p))]


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Repository:
    """Return a repository with a committed pipeline. Its stage `measure` copies a table, and `render` fails."""
    tables = {f"tables/{model}_{seed}.csv": ratios(model, seed) for model in ("big", "small") for seed in range(5)}
    files = FILES | {name: table.to_csv(index=False) for name, table in tables.items()}
    made = repository_of(tmp_path_factory.mktemp("experiments") / "run", files)
    made.commit("A pipeline")
    return made


@pytest.fixture
def repository(committed: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """Return a copy of the repository `committed`, and make it the current folder."""
    return committed.copy(tmp_path / "run").enter(monkeypatch)


def test_table_has_student_intervals_and_holm_verdicts() -> None:
    table = pd.concat([ratios("small", seed).assign(setting="all", seed=seed) for seed in (0, 1, 2)])
    table = table[["setting", "seed", *ratios("small", 0)]]
    result = over_seeds(table).set_index(KEYS)
    for method in METHODS:
        p = []
        for layer in LAYERS:
            before = [ratio("small", seed, "pretrained", layer, method) for seed in (0, 1, 2)]
            after = [ratio("small", seed, "finetuned", layer, method) for seed in (0, 1, 2)]
            row = result.loc["all", "finetuned", layer, method]
            mean = np.mean(after)
            expected = mean, *stats.t.interval(0.95, 2, mean, stats.sem(after)), 3
            np.testing.assert_allclose(row[["mean", "ci_low", "ci_high", "seeds"]].tolist(), expected, rtol=1e-9)
            assert row[["p", "p_holm"]].isna().all()  # no test of ratios against 0
            p.append(stats.ttest_rel(before, after).pvalue)
        changes = result.loc[[("all", "difference", layer, method) for layer in LAYERS]]
        np.testing.assert_allclose(changes["p"], p, rtol=1e-6)
        np.testing.assert_allclose(changes["p_holm"], closed_test(p), rtol=1e-6)
    alone = over_seeds(table[table["seed"] == 0])
    assert alone[["ci_low", "ci_high", "p", "p_holm"]].isna().all(axis=None)
    assert (alone["seeds"] == 1).all()


def test_holm_p_values_are_monotonic() -> None:
    p = [0.5, 0.011, 0.01]  # twice the second smallest value is below three times the smallest
    assert holm(pd.Series(p)).tolist() == pytest.approx(closed_test(p))


def test_settings_are_compared_by_paired_seeds() -> None:
    generator = np.random.default_rng(3)
    runs = [("big", 3), ("small", 1), ("big", 1), ("small", 2), ("small", 3)]
    tables = {run: ratios(*run).assign(mean=generator.normal(size=3 * len(LAYERS) * len(METHODS))) for run in runs}
    table = pd.concat(tables, names=["setting", "seed"]).droplevel(2).reset_index()
    differences = paired_differences(table)
    assert set(differences["setting"]) == {"big minus small"}
    assert set(differences["seed"]) == {1, 3}
    result = over_seeds(differences).set_index(KEYS)
    keys = ["checkpoint", "layer", "method"]
    for key in tables["big", 3][keys].itertuples(index=False):
        big, small = (
            [tables[model, seed].set_index(keys).loc[tuple(key), "mean"] for seed in (1, 3)]
            for model in ("big", "small")
        )
        row = result.loc[("big minus small", *key)]
        expected = stats.ttest_rel(big, small)
        assert row["mean"] == pytest.approx(np.mean(big) - np.mean(small))
        assert [row["ci_low"], row["ci_high"]] == pytest.approx(list(expected.confidence_interval()))
        assert row["seeds"] == 2
        assert key.checkpoint != "difference" or row["p"] == pytest.approx(expected.pvalue)
    assert paired_differences(table[table["setting"] == "big"]).empty


@pytest.mark.long  # DVC runs five times
def test_failed_seed_is_resumed_and_finished_seeds_are_kept(
    repository: Repository, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, profile, output = tmp_path / "it's data", tmp_path / "quick.txt", tmp_path / "study"
    data.mkdir()
    (data / "broken").touch()
    profile.write_text("# little\nmodel.name=big\n", encoding="utf-8")
    arguments = ["run", "--dataset", str(data), "--seeds", "0 2 0", "--profile", str(profile), "--to", str(output)]
    assert command.main(arguments) == 1
    assert "omitted: experiments/runs/quick/seed_2: `dvc repro` failed" in capfd.readouterr().err
    (data / "broken").unlink()
    assert command.main(arguments) == 0
    clones = [Path(f"experiments/runs/quick/seed_{seed}") for seed in (0, 2)]
    assert [(clone / "log").read_text().split() for clone in clones] == [["run"], ["run", "run"]]
    parameters = yaml.safe_load((clones[1] / "params.yaml").read_text(encoding="utf-8"))
    assert parameters == {"seed": 2, "model": {"name": "big"}, "dataset": {"name": str(data)}}
    table = pd.read_csv(output / "mixing.csv").set_index(KEYS)
    values = [ratio("big", seed, "finetuned", 2, "attn_w") for seed in (0, 2)]
    assert table.loc[("all", "finetuned", 2, "attn_w"), "mean"] == pytest.approx(np.mean(values), abs=1e-6)
    assert (output / "mixing.png").read_bytes().startswith(b"\x89PNG")
    assert (output / "mixing.pdf").read_bytes().startswith(b"%PDF")

    # Clones contain committed code only.
    (repository.folder / "measure.py").write_text(f"{FILES['measure.py']}# changed\n")
    repository.commit("Other code")
    assert command.main([*arguments, "--seeds", "0"]) == 0
    assert (clones[0] / "log").read_text().split() == ["run", "run"]
    assert repository.git("status", "--short") == ""


@pytest.mark.long  # DVC runs once
def test_run_stops_after_requested_stage(repository: Repository, tmp_path: Path) -> None:
    """The later stage `after` always fails; if the command ran it too, the run would be missing from the table."""
    stages = yaml.safe_load(FILES["dvc.yaml"])
    stages["stages"]["after"] = {"cmd": "false", "deps": ["reports/plots/measure"]}
    (repository.folder / "dvc.yaml").write_text(yaml.safe_dump(stages), encoding="utf-8")
    repository.commit("A stage that fails")
    profile = tmp_path / "quick.txt"
    profile.write_text("# nothing\n", encoding="utf-8")
    arguments = ["run", "--dataset", "x", "--seeds", "1", "--profile", str(profile), "--to", str(tmp_path)]
    assert command.main([*arguments, "--until", "measure"]) == 0
    assert command.main(arguments) == 1


@pytest.mark.long  # DVC runs four experiments
def test_experiments_of_commit_are_tabulated(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, seed in (("small", 0), ("small", 1), ("big", 4)):
        overrides = ["-S", f"seed={seed}", "-S", f"model.name={model}"]
        repository.dvc("exp", "run", "--name", f"{model}-{seed}", *overrides, "measure")
        repository.git("stash", "--include-untracked")
    repository.dvc("exp", "run", "--queue", "--name", "waits", "-S", "seed=3", "measure")
    assert command.main(["table", "--to", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert "omitted: waits" in printed.err
    assert "model.name=small (2 seeds)" in printed.out
    table = pd.read_csv(tmp_path / "out/mixing.csv").set_index(KEYS)
    assert table.loc[("model.name=big", "pretrained", 2, "attn_w"), "mean"] == pytest.approx(0.32, abs=1e-6)
    named = read_experiments(["small-1", "big-4", "small-1"], "measure/mixing")
    assert set(zip(named["setting"], named["seed"], strict=True)) == {("model.name=big", 4), ("model.name=small", 1)}


def test_mistakes_are_one_error(repository: Repository, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"^no experiment with reports/plots/measure/mixing.csv"):
        command.main(["table", "nothing", "HEAD"])
    assert [line.split(":")[1].strip() for line in capsys.readouterr().err.splitlines()] == ["nothing", "HEAD"]
    for seeds in ("", "1 -2", "a"):
        with pytest.raises(InputError, match="--seeds"):
            command.main(["run", "--dataset", "x", "--seeds", seeds])
    with pytest.raises(
        InputError, match=r"^--profile: there is no file profiles/laptop\.txt; pass one, such as profiles/laptop\.txt$"
    ):
        command.main(["run", "--dataset", "x"])
    with pytest.raises(InputError, match=r"--until: there is no stage 'nothing'; allowed: measure, render$"):
        command.main(["run", "--dataset", "x", "--until", "nothing"])


def planted_runs(changes: dict[str, list[float]], accuracies: dict[str, list[float]]) -> pd.DataFrame:
    """Return runs in the format of `read_run`, with the changes and accuracies of each setting by seed.

    All metrics of a run change equally in the last layer, and three times as much in layer 5.
    """
    rows = []
    metrics = (study.SAME, study.OTHER, study.CLASS_EFFECT, study.RATIO, study.RATIO_MINUS_CONTROL, study.CLASS_SHARE)
    for setting, values in changes.items():
        for seed, change in enumerate(values):
            rows.append((setting, seed, "train accuracy", "finetuned", np.nan, accuracies[setting][seed]))
            for metric, layer in product(metrics, (5, study.LAST_LAYER)):
                weight = 1 if layer == study.LAST_LAYER else 3
                before = 0.0 if metric == study.CLASS_SHARE else 0.5
                rows.append((setting, seed, metric, "pretrained", layer, before))
                rows.append((setting, seed, metric, "finetuned", layer, before + weight * change))
    return pd.DataFrame(rows, columns=["setting", "seed", "quantity", "checkpoint", "layer", "value"])


def test_planned_rows_are_sign_flip_tests_of_fitted_pairs() -> None:
    generator = np.random.default_rng(8)
    changes = {setting: generator.normal(size=6).tolist() for setting in study.SETTINGS}
    changes[study.TRUE] = [value + 3 for value in changes[study.TRUE]]
    accuracies = {setting: [1.0] * 6 for setting in study.SETTINGS}
    accuracies[study.PERMUTED][2] = 0.97  # this run is excluded because it does not fit the labels
    table = study.evaluate_plan(planted_runs(changes, accuracies)).set_index(["metric", "difference"])
    for row in (*study.TESTS, *study.EQUIVALENCES):
        seeds = [seed for seed in range(6) if study.PERMUTED not in (row.first, row.second) or seed != 2]
        weight = 2 if row.metric in (study.RATIO, study.RATIO_MINUS_CONTROL) else 1  # mean of 1 and 3 (two layers)
        differences = weight * np.array([changes[row.first][seed] - changes[row.second][seed] for seed in seeds])
        result = table.loc[(row.metric, f"{row.first} minus {row.second}")]
        assert result["pairs"] == len(seeds)
        assert result["mean"] == pytest.approx(differences.mean())
        half_width = stats.t.ppf(0.975, len(differences) - 1) * differences.std(ddof=1) / len(differences) ** 0.5
        expected = [differences.mean() - half_width, differences.mean() + half_width]
        assert [result["ci_low"], result["ci_high"]] == pytest.approx(expected)
        if row in study.EQUIVALENCES:
            assert np.isnan(result["p"])
            assert result["outcome"] == "undecided"
            continue
        patterns = product((-1, 1), repeat=len(differences))
        as_far = [abs(np.dot(signs, differences)) >= abs(differences.sum()) - 1e-12 for signs in patterns]
        assert result["p"] == pytest.approx(np.mean(as_far))
    p = table["p"].dropna()
    assert table["p_holm"].dropna().tolist() == pytest.approx(closed_test(p.tolist()))


@pytest.mark.parametrize(
    ("shift", "outcomes"),
    [
        (0.2, {study.OTHER: "refuted", study.CLASS_EFFECT: "confirmed", study.SAME: "undecided"}),
        (-0.2, {study.OTHER: "confirmed", study.CLASS_EFFECT: "refuted", study.SAME: "undecided"}),
        (0.0, {study.OTHER: "undecided", study.CLASS_EFFECT: "undecided", study.SAME: "equivalent"}),
    ],
)
def test_outcomes_follow_the_plan(shift: float, outcomes: dict[str, str]) -> None:
    noise = [0.01, -0.01, 0.005, -0.005, 0.012, -0.012, 0.002, -0.002, 0.007, -0.007]
    changes = {study.TRUE: [shift + each for each in noise], study.PERMUTED: [0.0] * 10, study.RARE_WORD: [0.0] * 10}
    table = study.evaluate_plan(planted_runs(changes, {setting: [1.0] * 10 for setting in changes}))
    rows = table[table["difference"] == f"{study.TRUE} minus {study.PERMUTED}"].set_index("metric")["outcome"]
    assert {metric: rows[metric] for metric in outcomes} == outcomes


def test_study_run_is_read_from_tables() -> None:
    """The committed run has the same format as runs of the study."""
    run = study.read_run(REPOSITORY, study.TRUE, 3)
    assert set(run["seed"]) == {3}
    exchange = pd.read_csv(REPOSITORY / "reports/plots/measure/exchange.csv")
    exchange = exchange.query("quantity == 'own_share' and donor == 'other_class' and checkpoint == 'finetuned'")
    own_share = run[(run["quantity"] == study.OTHER) & (run["checkpoint"] == "finetuned")]
    assert own_share["value"].tolist() == exchange["mean"].tolist()
    geometry = pd.read_csv(REPOSITORY / "reports/plots/measure/geometry.csv")
    geometry = geometry[(geometry["checkpoint"] == "finetuned") & (geometry["point"] == "attention")]
    shares = geometry.set_index(["measure", "layer"])["mean"]
    rows = run.query("quantity == @study.CLASS_SHARE and layer == 6 and checkpoint == 'finetuned'")
    share = rows["value"].item()
    assert share == pytest.approx(shares["share_class", 6] - shares["share_class_permuted", 6])


def test_published_seeds_match_runs(tmp_path: Path) -> None:
    """Publish the committed tables twice, as two runs."""
    run, published = tmp_path / "run", tmp_path / "published"
    for name in ("metrics", "plots"):
        shutil.copytree(REPOSITORY / "reports" / name, run / "reports" / name)
    (run / "reports/figures").mkdir()
    for name in imdb.FIGURES:
        (run / f"reports/figures/{name}.png").write_bytes(name.encode())
    imdb.publish([run, run], published)
    seeds = pd.read_csv(published / "seeds.csv")
    assert seeds["seed"].tolist() == [111, 112]
    exchange = pd.read_csv(REPOSITORY / "reports/plots/measure/exchange.csv")
    row = exchange.query("quantity == 'own_share' and donor == 'same_class' and layer == 6").set_index("checkpoint")
    assert seeds["finetuned_same_class_mean"].tolist() == [row.loc["finetuned", "mean"]] * 2
    assert seeds["difference_same_class_ci_low"].tolist() == [row.loc["difference", "ci_low"]] * 2
    copied = (published / "exchange.csv").read_bytes()
    assert copied == (REPOSITORY / "reports/plots/measure/exchange.csv").read_bytes()
    assert (published / "joint.png").read_bytes() == b"joint"

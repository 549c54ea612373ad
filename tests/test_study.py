"""The study: intervals over seeds and reviews, experiments read from git's refs, and one that failed."""

from __future__ import annotations

import subprocess
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from conftest import REPOSITORY
from scipy import stats

from attnmix.core.errors import InputError
from study import __main__ as command
from study import runs, store
from study.aggregate import correlations_over_seeds, means_of_seeds, over_seeds, reviews_over_seeds
from study.figure import draw_mixing
from study.tables import make_tables, markdown

LAYERS, METHODS = (1, 2), ("attn_n", "attnresln_n")


def reviews(seed: int, documents: int = 12) -> pd.DataFrame:
    """mixing_by_review.csv with made-up values, lengths mixed, each seed with reviews of its own."""
    generator = np.random.default_rng(seed)
    rows = []
    for document in range(documents):
        tokens = int(generator.integers(3, 60))
        for checkpoint, rise in (("pretrained", 0.0), ("finetuned", 0.1)):
            for layer in LAYERS:
                for method in METHODS:
                    mean = 0.3 + rise + 0.02 * seed + generator.normal(0, 0.05)
                    rows.append((checkpoint, f"test/{10 * seed + document}", document % 2, layer, method, mean, tokens))
    return pd.DataFrame(rows, columns=["checkpoint", "document", "label", "layer", "method", "mean", "tokens"])


def closed_test(p: list[float]) -> list[float]:
    """Holm's method as a closed test: the largest Bonferroni p of all subsets that a member belongs to."""
    numbers = range(len(p))
    subsets = [subset for size in range(1, len(p) + 1) for subset in combinations(numbers, size)]
    bonferroni = {subset: min(1.0, len(subset) * min(p[each] for each in subset)) for subset in subsets}
    return [max(bonferroni[subset] for subset in subsets if number in subset) for number in numbers]


def test_reviews_over_seeds_are_weighted_means_with_paired_differences() -> None:
    tables = {seed: reviews(seed) for seed in (0, 1, 2)}
    keys = ("checkpoint", "layer", "method")
    arguments = ("mixing_by_review", tables, keys, "mean", "tokens")
    found = reviews_over_seeds(*arguments).set_index(list(keys))
    own = {}
    for seed, table in tables.items():
        for key, group in table.groupby(list(keys)):
            own[seed, *key] = np.average(group["mean"], weights=group["tokens"])
    for layer in LAYERS:
        for method in METHODS:
            before, after = (
                [own[seed, each, layer, method] for seed in tables] for each in ("pretrained", "finetuned")
            )
            row = found.loc[("finetuned", layer, method)]
            np.testing.assert_allclose(row["mean"], np.mean(after), rtol=1e-12)
            assert (row["lowest_seed"], row["highest_seed"]) == pytest.approx((min(after), max(after)))
            assert (row["seeds"], row["reviews"]) == (3, 36)
            ends = stats.t.interval(0.95, 2, np.mean(after), stats.sem(after))
            np.testing.assert_allclose(row[["ci_low", "ci_high"]].tolist(), ends, rtol=1e-9)
            assert row[["p", "p_holm"]].isna().all()  # no ratio is expected to be 0
            change = found.loc[("difference", layer, method)]
            np.testing.assert_allclose(change["mean"], np.mean(np.subtract(after, before)), rtol=1e-12)
            np.testing.assert_allclose(change["p"], stats.ttest_rel(after, before).pvalue, rtol=1e-6)
    for method in METHODS:
        rows = found.loc[[("difference", layer, method) for layer in LAYERS]]
        np.testing.assert_allclose(rows["p_holm"], closed_test(rows["p"].tolist()), rtol=1e-9)
    overall = reviews_over_seeds(*arguments, over="layer").set_index(["checkpoint", "method"])
    expected = found.loc[("difference", [1, 2], "attn_n"), "mean"].mean()
    np.testing.assert_allclose(overall.loc[("difference", "attn_n"), "mean"], expected, rtol=1e-12)
    by_seed = means_of_seeds(*arguments).set_index(["seed", *keys])["mean"]
    assert by_seed[1, "finetuned", 2, "attn_n"] == pytest.approx(own[1, "finetuned", 2, "attn_n"])


def test_over_seeds_is_students_interval_and_leaves_missing_values_out() -> None:
    values = {0: 0.5, 1: 0.7, 2: 0.9, 3: float("nan")}
    tables = {
        seed: pd.DataFrame({"checkpoint": ["pretrained", "finetuned"], "layer": 1, "mean": [value - 0.1, value]})
        for seed, value in values.items()
    }
    found = over_seeds("some", tables, ("checkpoint", "layer"), ("mean",)).set_index("checkpoint")
    row = found.loc["finetuned"]
    low, high = stats.t.interval(0.95, 2, loc=0.7, scale=stats.sem([0.5, 0.7, 0.9]))
    assert (row["mean"], row["ci_low"], row["ci_high"], row["seeds"]) == pytest.approx((0.7, low, high, 3))
    assert found.loc["difference", "mean"] == pytest.approx(0.1)
    alone = over_seeds("some", {0: tables[0]}, ("checkpoint", "layer"), ("mean",)).iloc[0]
    assert np.isnan(alone["ci_low"])
    assert (alone["mean"], alone["seeds"]) == (pytest.approx(0.4), 1)
    with pytest.raises(InputError, match=r"some\.csv of seed 0 has several rows with the same layer"):
        over_seeds("some", tables, ("layer",), ("mean",))
    with pytest.raises(InputError, match=r"some\.csv of seed 0 has no column median"):
        over_seeds("some", tables, ("checkpoint",), ("median",))


def test_verdicts_are_adjusted_over_layers_or_methods_without_what_cannot_vary() -> None:
    generator = np.random.default_rng(0)
    values = generator.normal(0.1, 0.05, size=(4, 3))
    tables = {
        seed: pd.DataFrame({"method": ["random", "a", "b", "c"], "above_random": [0.0, *row], "aopc": 0.3})
        for seed, row in enumerate(values.tolist())
    }
    found = over_seeds("some", tables, ("method",), ("aopc", "above_random")).set_index(["quantity", "method"])
    assert found.loc["aopc", "p"].isna().all()
    expected = stats.ttest_1samp(values, 0).pvalue
    tested = found.loc["above_random"]
    np.testing.assert_allclose(tested.loc[["a", "b", "c"], "p"], expected, rtol=1e-9)
    np.testing.assert_allclose(tested.loc[["a", "b", "c"], "p_holm"], closed_test(expected.tolist()), rtol=1e-9)
    assert tested.loc["random", ["p", "p_holm"]].isna().all()


def test_correlations_over_seeds_are_means_of_fishers_z() -> None:
    values = {0: 0.99, 1: 0.2, 2: 0.95}
    tables = {
        seed: pd.DataFrame({"checkpoint": ["pretrained", "finetuned"], "predicted": "all", "spearman": [0.1, value]})
        for seed, value in values.items()
    }
    found = correlations_over_seeds("some", tables, ("checkpoint", "predicted"), ("spearman",)).set_index("checkpoint")
    assert found.index.tolist() == ["pretrained", "finetuned"]
    z = np.arctanh(list(values.values()))
    low, high = stats.t.interval(0.95, 2, z.mean(), stats.sem(z))
    row = found.loc["finetuned"]
    assert row[["mean", "ci_low", "ci_high"]].tolist() == pytest.approx(np.tanh([z.mean(), low, high]).tolist())
    assert high > 1 > row["ci_high"]
    assert row[["lowest_seed", "highest_seed"]].tolist() == pytest.approx([0.2, 0.99])
    assert row["p"] == pytest.approx(stats.ttest_1samp(z, 0).pvalue)


def test_committed_tables_bear_their_verdicts() -> None:
    ratios = pd.read_csv(REPOSITORY / "docs/study/ratios.csv")
    rows = ratios.query("checkpoint == 'difference' and method == 'attnresln_n'").set_index("layer")
    assert rows.index[(rows["p_holm"] < 0.05) & (rows["mean"] > 0)].tolist() == [2, 3, 4, 5, 6]
    scores = pd.read_csv(REPOSITORY / "docs/study/faithfulness_overall.csv").query("quantity == 'above_random'")
    beaten = scores.loc[(scores["p_holm"] < 0.05) & (scores["mean"] > 0), "method"]
    assert set(scores["method"]) - set(beaten) == {"random"}


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    run = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return run.stdout.strip()


PLAN = runs.Plan({"dataset.name": "reviews.csv", "finetune.epochs": "2"}, ["finetune"])


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the finished experiments study-0 and study-1, and study-2 of other parameters."""
    folder = tmp_path / "repository"
    (folder / "stages").mkdir(parents=True)
    (folder / "stages/measure.py").write_text("ratio = 1\n", encoding="utf-8")
    (folder / "params.yaml").write_text("seed: 9\ndataset:\n  name: x\nfinetune:\n  epochs: 1\n", encoding="utf-8")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "start")
    start = git(folder, "rev-parse", "HEAD")
    for seed, epochs in ((0, 2), (1, 2), (2, 5)):
        git(folder, "checkout", "-q", "--detach", start)
        text = f"seed: {seed}\ndataset:\n  name: reviews.csv\nfinetune:\n  epochs: {epochs}\n"
        (folder / "params.yaml").write_text(text, encoding="utf-8")
        (folder / "reports/plots/measure").mkdir(parents=True, exist_ok=True)
        (folder / "reports/metrics").mkdir(parents=True, exist_ok=True)
        reviews(seed).to_csv(folder / "reports/plots/measure/mixing_by_review.csv", index=False)
        test = {"accuracy": 0.8 + 0.01 * seed, "accuracy_ci_low": 0.7, "accuracy_ci_high": 0.9}
        test |= {"macro_f1": 0.8, "loss": 0.4}
        metrics = {"test": test, "best_epoch": 2}
        (folder / "reports/metrics/finetune.json").write_text(str(metrics).replace("'", '"'), encoding="utf-8")
        git(folder, "add", ".")
        git(folder, "commit", "-qm", f"experiment {seed}")
        git(folder, "update-ref", f"refs/exps/{start[:2]}/{start[2:]}/study-{seed}", "HEAD")
    git(folder, "checkout", "-q", "--detach", start)
    return folder


def test_experiments_are_read_from_refs_and_failed_ones_named_and_left_out(repository: Path) -> None:
    failed = {"study-1": "error: dataset.name: no such file"}
    experiments, problems = command.usable(PLAN, [0, 1, 2, 3], repository, failed)
    assert [each.seed for each in experiments] == [0]
    assert problems == [
        "study-1 failed: error: dataset.name: no such file",
        "study-2 had other parameters",
        "there is no finished experiment study-3",
    ]
    found = store.plot(experiments[0], "mixing_by_review", repository)
    assert found is not None
    pd.testing.assert_frame_equal(found, reviews(0))
    assert store.plot(experiments[0], "movement", repository) is None
    assert store.metrics(experiments[0], "finetune", repository)["test"]["accuracy"] == 0.8


def test_experiment_of_other_code_is_not_taken(repository: Path) -> None:
    (repository / "stages/measure.py").write_text("ratio = 2\n", encoding="utf-8")
    assert command.usable(PLAN, [0], repository, {}) == ([], ["study-0 ran other code"])


def test_tables_figure_and_readme_are_written_from_what_is_there(repository: Path, tmp_path: Path) -> None:
    experiments, _ = command.usable(PLAN, [0, 1], repository, {})
    output = tmp_path / "study"
    output.mkdir()
    (output / "README.md").write_text(
        (REPOSITORY / "docs/study/README.md").read_text(encoding="utf-8"), encoding="utf-8"
    )
    command.write(experiments, repository, output)
    ratios = pd.read_csv(output / "ratios.csv")
    assert set(ratios["checkpoint"]) == {"pretrained", "finetuned", "difference"}
    assert (ratios["seeds"] == 2).all()
    text = (output / "README.md").read_text(encoding="utf-8")
    assert "| 0 | 80.0 [70.0, 90.0] |" in text
    assert "| mean | 80.5 [" in text
    assert "Not in these experiments" in text
    assert (output / "mixing.png").stat().st_size > 10_000
    assert not (output / "movement.csv").exists()


def test_every_table_is_made_of_the_columns_that_the_stages_write(tmp_path: Path) -> None:
    """Made-up csv files of every declared kind; those of another form are named."""
    ratio = pd.MultiIndex.from_product(
        [["pretrained", "finetuned"], LAYERS, METHODS], names=["checkpoint", "layer", "method"]
    )
    base = ratio.to_frame(index=False).assign(mean=0.4)
    controls = pd.concat([base.assign(control=name) for name in ("shuffled_words", "text_mean_value")])
    random = base[base["checkpoint"] == "pretrained"].assign(checkpoint="random", control="random_weights")
    levels = base[base["method"] == "attn_n"].assign(reference="layer_input", form="norm_of_sum")
    faithful = {"method": "decompx", "aopc": 0.5, "above_random": 0.3, "derivative_spearman": np.nan}
    margin = {"checkpoint": "finetuned", "predicted": "all", "spearman": 0.8, "given_length": np.nan}
    made = {
        "mixing_by_review": {seed: reviews(seed) for seed in (0, 1)},
        "mixing_controls": {seed: pd.concat([controls, random]).assign(mean=0.2 + 0.1 * seed) for seed in (0, 1)},
        "derivative_levels": dict.fromkeys((0, 1), levels),
        "faithfulness_overall": dict.fromkeys((0, 1), pd.DataFrame([faithful])),
        "margin_correlation": {0: pd.DataFrame([margin])},
        "movement": {0: pd.DataFrame({"layout": ["joint"], "seed": [2], "spearman": [0.5]})},
    }
    tables, left_out = make_tables(lambda name: made.get(name, {}))
    assert any(reason.startswith("movement.csv of seed 0 has no column layer") for reason in left_out)
    text = markdown(tables)
    assert "| `decompx` | 0.50 [0.50, 0.50] | 0.30 [0.30, 0.30] |  |" in text["faithfulness"]
    assert "| `finetuned` | `all` | 0.80 |  |" in text["margin"]
    assert "`random_weights` | `attn_n` | `random` | 25.0 | 25.0 |" in text["controls"]
    draw_mixing(tables, tmp_path / "mixing")
    assert (tmp_path / "mixing.pdf").is_file()


def test_plan_is_the_profile_and_every_stage_but_render(tmp_path: Path) -> None:
    plan = runs.read_plan(REPOSITORY, REPOSITORY / "profiles/study.txt", "data/sample")
    assert plan.overrides["dataset.name"] == str((REPOSITORY / "data/sample").resolve())
    assert plan.stages[:2] == ["download", "finetune"]
    assert "render" not in plan.stages
    values = runs.wanted(plan, 3, REPOSITORY)
    assert (values["seed"], values["dataset"]["train_limit"], values["umap"]["layouts"]) == (3, 1000, ["joint"])
    rows = values["capture"]["documents"]
    assert len(rows) == 30
    assert sum(row < values["dataset"]["test_limit"] / 2 for row in rows) == 15  # the drawn reviews are sorted by class
    with pytest.raises(InputError, match=r"finetune\.epoch is no key"):
        runs.wanted(runs.Plan({"finetune.epoch": "1"}, []), 0, REPOSITORY)


STATUS = """Task     Name     Created    Status
a9dba3f  study-0  06:42 AM   Success
9e4a6f3  study-1  06:42 AM   {second}
0d3f6fe  other    Nov 21     Queued

Worker status: {active} active, 0 idle
"""


def test_waiting_ends_with_the_last_word_of_what_failed() -> None:
    asked: list[tuple[str, ...]] = []
    states = ["Queued", "Running", "Failed"]

    def dvc(*arguments: str) -> str:
        asked.append(arguments)
        if arguments[:2] == ("queue", "status"):
            second = states.pop(0)
            return STATUS.format(second=second, active=int(second == "Running"))
        if arguments[:2] == ("queue", "logs"):
            return "Running stage 'finetune':\nerror: finetune.epochs is wrong\nERROR: failed to reproduce 'finetune'\n"
        return ""

    assert runs.wait(dvc, ["study-0", "study-1"], 1, pause=0) == {"study-1": "error: finetune.epochs is wrong"}
    assert asked.count(("queue", "start", "--jobs", "1")) == 2  # at first, and where no worker was left
    assert states == []


def test_missing_figures_are_said_before_hours_of_work(tmp_path: Path) -> None:
    lock = "stages:\n  render:\n    outs:\n    - path: reports/figures\n      md5: ab12.dir\n"
    (tmp_path / "dvc.lock").write_text(lock, encoding="utf-8")
    with pytest.raises(InputError, match=r"reports/figures.*make repro"):
        runs.check_cache(tmp_path, tmp_path / "cache")
    (tmp_path / "cache/files/md5/ab").mkdir(parents=True)
    (tmp_path / "cache/files/md5/ab/12.dir").touch()
    runs.check_cache(tmp_path, tmp_path / "cache")


def test_seeds_and_odd_paths() -> None:
    assert command.seeds_of("3 1 3") == [3, 1]
    for wrong in ("", "1 -2", "a"):
        with pytest.raises(InputError, match="--seeds"):
            command.seeds_of(wrong)
    assert runs._quoted("[0,6,13]") == "[0,6,13]"
    assert runs._quoted("/data/it's, mine") == "'/data/it\\'s, mine'"

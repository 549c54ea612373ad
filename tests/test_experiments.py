"""Experiments: the pipeline in a clone for each seed, and one table of means over seeds against a computation here."""

from __future__ import annotations

import shutil
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
import torch
import yaml
from conftest import REPOSITORY
from dvc_repository import Repository, repository_of
from scipy import stats
from transformers import AutoTokenizer, BertForSequenceClassification

import attnmix
from attnmix.core.errors import InputError
from attnmix.core.names import SUBLAYER_POINTS, Site
from attnmix.core.settings import DatasetParameters
from attnmix.data.source import read_splits
from attnmix.model import Model
from attnmix.models.attention import OBSERVED
from experiments import __main__ as command
from experiments import answer, few_tokens, fits
from experiments.answer_edits import edited_logits, layer_inputs
from experiments.answer_tables import differences_of_edits, differences_of_settings, write_tables
from experiments.tables import holm, over_seeds, paired_differences, read_experiments
from experiments.training import Reviews

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
    """Return a made-up ratio that differs by each of these."""
    base = {"big": 0.3, "small": 0.2}[model] + 0.01 * layer + 0.05 * METHODS.index(method)
    return base + (checkpoint == "finetuned") * (0.1 + 0.02 * seed * layer**2 - 0.01 * (seed - 1) ** 2)


def ratios(model: str, seed: int) -> pd.DataFrame:
    """Return mixing.csv as the stage `measure` writes it."""
    rows = []
    for layer in LAYERS:
        for method in METHODS:
            before, after = (ratio(model, seed, each, layer, method) for each in ("pretrained", "finetuned"))
            for checkpoint, mean in (("pretrained", before), ("finetuned", after), ("difference", after - before)):
                rows.append((checkpoint, layer, method, mean, 9))
    return pd.DataFrame(rows, columns=["checkpoint", "layer", "method", "mean", "tokens"])


def closed_test(p: list[float]) -> list[float]:
    """Return Holm's method as a closed test: the largest Bonferroni p of all subsets that a member belongs to."""
    subsets = [subset for size in range(1, len(p) + 1) for subset in combinations(range(len(p)), size)]
    bonferroni = {subset: min(1.0, len(subset) * min(p[each] for each in subset)) for subset in subsets}
    return [max(bonferroni[subset] for subset in subsets if number in subset) for number in range(len(p))]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Repository:
    """A repository of DVC with a pipeline of one stage; the current folder."""
    tables = {f"tables/{model}_{seed}.csv": ratios(model, seed) for model in ("big", "small") for seed in range(5)}
    files = FILES | {name: table.to_csv(index=False) for name, table in tables.items()}
    made = repository_of(tmp_path / "run", files, monkeypatch)
    made.commit("A pipeline")
    return made


def test_table_is_students_over_seeds_with_holms_verdicts() -> None:
    table = pd.concat([ratios("small", seed).assign(setting="all", seed=seed) for seed in (0, 1, 2)])
    table = table[["setting", "seed", *ratios("small", 0)]]
    result = over_seeds(table).set_index(KEYS)
    for method in METHODS:
        p = []
        for layer in LAYERS:
            values = [[ratio("small", seed, each, layer, method) for seed in (0, 1, 2)] for each in ("", "finetuned")]
            row, mean = result.loc["all", "finetuned", layer, method], np.mean(values[1])
            expected = mean, *stats.t.interval(0.95, 2, mean, stats.sem(values[1])), 3
            np.testing.assert_allclose(row[["mean", "ci_low", "ci_high", "seeds"]].tolist(), expected, rtol=1e-9)
            assert row[["p", "p_holm"]].isna().all()  # no ratio is expected to be 0
            p.append(stats.ttest_rel(*values).pvalue)
        changes = result.loc[[("all", "difference", layer, method) for layer in LAYERS]]
        np.testing.assert_allclose(changes["p"], p, rtol=1e-6)
        np.testing.assert_allclose(changes["p_holm"], closed_test(p), rtol=1e-6)
    alone = over_seeds(table[table["seed"] == 0])
    assert alone[["ci_low", "ci_high", "p", "p_holm"]].isna().all(axis=None)
    assert (alone["seeds"] == 1).all()


def test_holm_s_adjusted_p_values_do_not_fall() -> None:
    p = [0.5, 0.011, 0.01]  # the second smallest one, twice itself, would be below three times the smallest
    assert holm(pd.Series(p)).tolist() == pytest.approx(closed_test(p))


def test_two_settings_are_compared_seed_by_seed() -> None:
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


def test_difference_of_two_settings_is_welchs() -> None:
    generator, keys = np.random.default_rng(5), ["setting", "checkpoint", "measure", "layer"]
    true, permuted = generator.normal(1, 2, (3, 5)), generator.normal(0, 1, (3, 3))
    rows = [
        (setting, "difference", "ratio", layer, seed, values[layer - 1, seed])
        for setting, values in (("true labels", true), ("permuted labels", permuted))
        for layer in (1, 2, 3)
        for seed in range(values.shape[1])
    ]
    result = differences_of_settings(pd.DataFrame(rows, columns=[*keys, "seed", "mean"]))
    squares = true.var(1, ddof=1) / 5, permuted.var(1, ddof=1) / 3
    error = np.sqrt(sum(squares))
    freedom = error**4 / (squares[0] ** 2 / 4 + squares[1] ** 2 / 2)
    mean = true.mean(1) - permuted.mean(1)
    half = stats.t.ppf(0.975, freedom) * error
    p = 2 * stats.t.sf(np.abs(mean) / error, freedom)
    np.testing.assert_allclose(result[["mean", "ci_low", "ci_high", "p"]], np.c_[mean, mean - half, mean + half, p])
    assert result["p_holm"].min() == pytest.approx(min(1, 3 * p.min()))
    assert (result["seeds"] == 3).all()


def test_edits_are_compared_within_each_seed() -> None:
    columns = ["setting", "checkpoint", "edit", "extent", "measure", "layer", "seed", "mean"]
    kept = {"class erased": (0.5, 0.7), "random directions erased": (0.9, 0.8), "no values": (0.1, 0.2)}
    rows = [
        ("true labels", "after", edit, "from", measure, 4, seed, share)
        for edit, shares in kept.items()
        for seed, share in enumerate(shares)
        for measure in ("same_class", "probability")
    ]
    differences = differences_of_edits(pd.DataFrame(rows, columns=columns))
    assert list(differences.columns) == columns
    assert set(differences["edit"]) == {"class erased minus random directions erased"}
    assert set(differences["measure"]) == {"same_class", "probability"}
    by_seed = differences.query("measure == 'same_class'").set_index("seed")["mean"]
    assert by_seed.to_dict() == pytest.approx({0: -0.4, 1: -0.1})
    row = over_seeds(differences).query("measure == 'same_class'").iloc[0]
    assert row["p"] == pytest.approx(stats.ttest_rel((0.5, 0.7), (0.9, 0.8)).pvalue)


def test_committed_runs_are_not_repeated_and_give_the_tables_of_edits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(STUDY / "runs", tmp_path / "runs")
    for name in ("layers", "probes"):  # which the figure needs
        shutil.copy(STUDY / f"answer_{name}.csv", tmp_path)
    monkeypatch.setattr(answer, "BASE", tmp_path)  # nothing is fetched
    monkeypatch.setattr(answer, "run_setting", None)  # nothing is fine-tuned
    monkeypatch.setattr(answer, "set_arithmetic", lambda _arithmetic: None)  # of this process, whose tests go on
    reviews = SimpleNamespace(texts=["good", "bad"])
    monkeypatch.setattr(answer, "read_reviews", lambda *_arguments: (None, reviews, None))
    with pytest.raises(InputError, match=r"has runs of other reviews than those of some/reviews; allowed: another"):
        answer.run_settings("some/reviews", ["true labels"], tmp_path, only="interventions")
    with pytest.raises(
        InputError, match=r"--settings: four classes: without interventions; allowed: true labels; permu"
    ):
        answer.run_settings("some/reviews", ["true labels", "four classes"], tmp_path, only="interventions")
    (tmp_path / "runs/interventions/test_reviews.sha256").unlink()
    answer.run_settings("some/reviews", ["true labels"], tmp_path, only="interventions")
    for name in ("interventions", "scaling"):
        assert (tmp_path / f"answer_{name}.csv").read_bytes() == (STUDY / f"answer_{name}.csv").read_bytes()

    by_seed = [
        pd.read_csv(STUDY / f"runs/interventions/true_labels/seed_{seed}/interventions.csv") for seed in range(5)
    ]
    kept = [table.query("edit == 'class erased' and layer == 4")["same_class"].item() for table in by_seed]
    where = {"edit": "class erased", "layer": 4, "measure": "same_class", "setting": "true labels"}
    table = pd.read_csv(STUDY / "answer_interventions.csv").set_index(list(where)).sort_index()
    row = table.loc[tuple(where.values())]
    half = stats.t.ppf(0.975, 4) * np.std(kept, ddof=1) / np.sqrt(5)
    assert row[["mean", "ci_low", "ci_high"]].tolist() == pytest.approx(
        [np.mean(kept), np.mean(kept) - half, np.mean(kept) + half], abs=5e-5
    )


def test_a_setting_that_is_measured_anew_leaves_the_rows_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("experiments.answer_tables.draw", lambda *_arguments: None)  # needs every table
    for name in ("layers", "probes", "interventions"):
        shutil.copy(STUDY / f"answer_{name}.csv", tmp_path)
    for seed, mean in enumerate((0.2, 0.4)):
        folder = tmp_path / f"runs/rare_word/seed_{seed}"
        folder.mkdir(parents=True)
        rows = [("before", 1, "own length", 0.1), ("after", 1, "own length", mean)]
        pd.DataFrame(rows, columns=["checkpoint", "layer", "measure", "mean"]).to_csv(folder / "layers.csv")
    write_tables(tmp_path / "runs", tmp_path)

    def lines(folder: Path, *, of_rare_word: bool) -> list[str]:
        text = (folder / "answer_layers.csv").read_text(encoding="utf-8")
        return [line for line in text.splitlines() if line.startswith("rare word,") == of_rare_word]

    assert lines(tmp_path, of_rare_word=False) == lines(STUDY, of_rare_word=False)
    new_rows = [line.split(",")[:5] for line in lines(tmp_path, of_rare_word=True)]
    assert sorted(new_rows) == [
        ["rare word", "after", "own length", "1", "0.3"],
        ["rare word", "before", "own length", "1", "0.1"],
        ["rare word", "difference", "own length", "1", "0.2"],
    ]


def test_a_pass_that_begins_with_the_first_edited_layer_ends_as_the_whole_pass(tiny_bert: Path) -> None:
    network: Any = BertForSequenceClassification.from_pretrained(tiny_bert, attn_implementation=OBSERVED).eval()
    model = Model(network, AutoTokenizer.from_pretrained(tiny_bert), "classifier")
    ids_NT = torch.tensor([[5, 6, 7, 8], [9, 5, 10, 6], [7, 8, 9, 10]])
    study: Any = SimpleNamespace(
        model=network,
        base=network.base_model,
        tokenizer=model.tokenizer,
        test=SimpleNamespace(texts=["", "", ""], ids_NT=ids_NT),
        batches=lambda rows: [np.array(rows[:2]), np.array(rows[2:])],
    )

    def edit(layer: int, weights: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return weights, value * (2 + layer)

    def in_second_layer(layer: int, weights: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return edit(layer, weights, value) if layer == 2 else (weights, value)

    with torch.inference_mode(), model.intervene(in_second_layer) as edited:
        expected = edited(input_ids=ids_NT).logits
    with torch.inference_mode():
        unedited = network(input_ids=ids_NT).logits
    entering = layer_inputs(study)
    logits = edited_logits(study, lambda _rows: edit, range(2, 3), entering[1])
    torch.testing.assert_close(logits.float(), expected)
    assert (logits.float() - unedited).abs().max() > 1e-3
    with torch.inference_mode():
        torch.testing.assert_close(network(input_ids=ids_NT).logits, unedited)


@pytest.mark.long  # DVC runs five times
def test_each_seed_runs_in_a_clone_resumes_after_a_failure_and_is_not_run_twice(
    repository: Repository, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data, profile, output = tmp_path / "it's data", tmp_path / "quick.txt", tmp_path / "study"
    data.mkdir()
    (data / "broken").touch()
    profile.write_text("# little\nmodel.name=big\n", encoding="utf-8")
    arguments = ["run", "--dataset", str(data), "--seeds", "0 2 0", "--profile", str(profile), "--to", str(output)]
    assert command.main(arguments) == 1
    assert "left out: experiments/runs/quick/seed_2: `dvc repro` failed" in capfd.readouterr().err
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

    # Committed code reaches the clones.
    (repository.folder / "measure.py").write_text(f"{FILES['measure.py']}# changed\n")
    repository.commit("Other code")
    assert command.main([*arguments, "--seeds", "0"]) == 0
    assert (clones[0] / "log").read_text().split() == ["run", "run"]
    assert repository.git("status", "--short") == ""


@pytest.mark.long  # DVC runs once
def test_a_run_stops_after_the_stage_that_is_named(repository: Repository, tmp_path: Path) -> None:
    """The pipeline's stage `after` fails, so that a run that went on would be left out."""
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
def test_experiments_of_the_commit_are_side_by_side(
    repository: Repository, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, seed in (("small", 0), ("small", 1), ("big", 4)):
        overrides = ["-S", f"seed={seed}", "-S", f"model.name={model}"]
        repository.dvc("exp", "run", "--name", f"{model}-{seed}", *overrides, "measure")
        repository.git("stash", "--include-untracked")
    repository.dvc("exp", "run", "--queue", "--name", "waits", "-S", "seed=3", "measure")
    assert command.main(["table", "--to", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert "left out: waits" in printed.err
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
    with pytest.raises(InputError, match=r"^--profile: there is no file profiles/study\.txt$"):
        command.main(["run", "--dataset", "x"])
    for stage in ("render", "nothing"):  # the first is skipped
        with pytest.raises(InputError, match=f"--until: there is no stage '{stage}'; allowed: measure$"):
            command.main(["run", "--dataset", "x", "--until", stage])


def test_a_rare_word_is_put_into_a_random_half_of_the_reviews_and_is_their_class(tmp_path: Path) -> None:
    words = " ".join(f"word{number}" for number in range(100))
    texts = [f"{words} {number}" for number in range(400)]
    given = pd.DataFrame({"text": texts, "label": np.arange(400) % 2})
    excluded = pd.DataFrame({"text": ["too short", f"a Zebra in {words}"], "label": [0, 1]})
    source, folder = tmp_path / "source", tmp_path / "planted"
    source.mkdir()
    for split in ("train", "test"):
        pd.concat([given, excluded]).to_csv(source / f"{split}.csv", index=False)
    command.main(["rare-word", "--dataset", str(source), "--to", str(folder)])
    sources = given.set_index("text")["label"]
    for split in ("train", "test"):
        planted = pd.read_json(folder / f"{split}.jsonl", lines=True)
        without = planted["text"].str.replace("zebra ", "", regex=False)
        assert sorted(without) == sorted(texts)
        assert (planted["label"].to_numpy() == sources[without].to_numpy()).all()
        places = planted["text"].str.split().map(lambda text: text.index("zebra") if "zebra" in text else -1)
        assert ((places >= 0) == (planted["word"] == "present")).all()
        assert set(places[places >= 0]) <= set(range(30))
        assert places[places >= 0].nunique() > 20
        shares = (places >= 0).groupby(planted["label"]).mean()
        assert shares.between(0.4, 0.6).all(), "whatever the label"
        assert not without.is_monotonic_increasing
    settings = DatasetParameters(name=str(folder), label_column="word")
    splits, _ = read_splits(settings, 1)
    assert set(splits["test"]["label_name"]) == {"absent", "present"}
    with pytest.raises(InputError, match=r"^--to: .*planted exists already"):
        command.main(["rare-word", "--dataset", str(source), "--to", str(folder)])


def test_only_trainings_on_the_same_reviews_are_compared_in_pairs(tmp_path: Path) -> None:
    generator, values, folders = np.random.default_rng(4), {}, []
    kinds = {"given": {}, "permuted": {"finetune": {"labels": "permuted"}}}
    kinds["rare word"] = {"dataset": {"label_column": "word"}}
    for (labels, parameters), seed in product(kinds.items(), (1, 2, 3)):
        folder = tmp_path / f"{labels} {seed}"
        for csv, where in fits.MEASURES.values():
            mean = generator.normal(size=3)
            table = pd.DataFrame({"checkpoint": "difference", "layer": [0, 1, 2], "mean": mean}).assign(**where)
            other = table.assign(**dict.fromkeys(where, "another"), mean=9.0)
            path = folder / f"reports/plots/{csv}.csv"
            path.parent.mkdir(parents=True, exist_ok=True)
            former = pd.read_csv(path) if path.exists() else pd.DataFrame()
            pd.concat([former, table, other]).to_csv(path, index=False)
            values[labels, seed, where.get("rule"), csv] = mean
        (folder / "params.yaml").write_text(yaml.safe_dump({"seed": seed, **parameters}), encoding="utf-8")
        folders.append(folder)
    fits.write_by_layer(folders, tmp_path / "layers.csv")
    table = pd.read_csv(tmp_path / "layers.csv")
    assert set(table["setting"]) == {*kinds, "given minus permuted"}
    ratio, whole = (
        table[table["measure"] == name].set_index(["setting", "layer"])["mean"]
        for name in ("ratio", "ratio, mean of layers")
    )
    means = {
        labels: np.mean([values[labels, seed, None, "measure/mixing"] for seed in (1, 2, 3)], axis=0)
        for labels in kinds
    }
    for labels, mean in means.items():
        np.testing.assert_allclose(ratio[labels], mean[1:], atol=1e-6)
        np.testing.assert_allclose(whole[labels], mean[1:].mean(), atol=1e-6)
    np.testing.assert_allclose(ratio["given minus permuted"], (means["given"] - means["permuted"])[1:], atol=1e-6)


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> pd.Series:
    """The table of layers of the committed run."""
    path = tmp_path_factory.mktemp("layers") / "layers.csv"
    command.main(["layers", str(REPOSITORY), "--to", str(path)])
    return pd.read_csv(path).set_index(["checkpoint", "measure", "layer"])["mean"]


@pytest.mark.parametrize(
    ("csv", "rows", "measure"),
    [
        ("measure/mixing", {"method": "attnresln_n"}, "ratio attnresln_n"),
        ("measure/mixing_controls", {"control": "corpus_value", "method": "attnresln_n"}, "corpus_value attnresln_n"),
        ("measure/geometry", {"point": "attention", "measure": "share_class"}, "share class by predicted"),
        ("faithfulness/class_use", {"quantity": "class_kept", "group": "text_mean"}, "class_kept text_mean"),
    ],
)
def test_layers_of_a_run_are_those_of_its_tables(
    layers: pd.Series, csv: str, rows: dict[str, str], measure: str
) -> None:
    assert layers.index.is_unique
    source = pd.read_csv(REPOSITORY / f"reports/plots/{csv}.csv").dropna(subset="mean")
    source = source[(source[list(rows)] == pd.Series(rows)).all(axis=1)].set_index(["checkpoint", "layer"])["mean"]
    assert len(source) >= 6
    for (checkpoint, layer), mean in source.items():
        assert layers[checkpoint, measure, layer] == pytest.approx(mean, abs=1e-4)


TEST_REVIEWS, HELD_OUT_REVIEWS = 200, 600


class PlantedStudy(answer.Study):
    """Reviews of two tokens, whose last vectors say whether a rare word is there; [CLS] says it in reverse in some."""

    def __post_init__(self) -> None:
        pass

    def token_vectors(self) -> tuple[npt.NDArray[np.float32], pd.DataFrame]:
        """Return vectors of noise `[levels, tokens, D]`, but for the last level's, and the table of the tokens."""
        texts = len(self.test.texts)
        reviews = np.arange(texts).repeat(2)
        tokens = pd.DataFrame({"review": reviews, "kind": ["cls", "the"] * texts})
        vectors = np.random.default_rng(texts).normal(size=(2, len(reviews), 3))
        vectors[1, :, 0] = self.test.labels["word"][reviews]
        if texts == HELD_OUT_REVIEWS:
            vectors[1, tokens["kind"] == "cls", 0] *= -1
        return vectors.astype(np.float32), tokens


def test_probes_are_trained_on_held_out_reviews_and_scored_on_test_reviews() -> None:
    def reviews(texts: int) -> Reviews:
        numbers = np.arange(texts)
        return Reviews(["text"] * texts, torch.zeros(texts, 2), {"word": numbers % 2, "sentiment": numbers // 2 % 2})

    no_model: Any = None
    study = PlantedStudy(no_model, reviews(TEST_REVIEWS), no_model, Path())
    rows = pd.DataFrame(study.probe_rows(reviews(HELD_OUT_REVIEWS)))
    accuracy = rows.set_index(["target", "kind", "layer"])["mean"]
    assert accuracy["word", "the", 1] == 1
    assert accuracy["word", "cls", 1] <= 0.5  # what was learned is the reverse
    chance = accuracy.drop([("word", "the", 1), ("word", "cls", 1)])
    assert len(chance) == 3 * 2 * 2 - 2  # targets, kinds and layers
    assert chance.between(0.38, 0.62).all()
    assert (rows["majority"] < 0.6).all()


def test_maps_of_few_tokens_are_averaged_by_review_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = ["tokens", "review", "layout", *few_tokens.SCORES]
    rows = [
        (20, 0, "separate", 0.5, 0.7, 0.1),
        (20, 0, "separate", 0.7, 0.7, 0.1),
        (20, 0, "pca", 0.8, 0.9, 0.3),
        (20, 1, "separate", 0.9, 0.7, 0.1),
        (20, 1, "pca", 0.6, 0.9, 0.3),
        (40, 0, "separate", 0.5, 0.7, 0.1),
        (40, 0, "pca", 0.6, 0.9, 0.3),
    ]
    monkeypatch.setattr(few_tokens, "_scores", lambda *_arguments: pd.DataFrame(rows, columns=columns))
    few_tokens.write_few_tokens("reviews", "model", tmp_path / "few.csv")
    table = pd.read_csv(tmp_path / "few.csv").set_index(["tokens", "layout"])
    assert table["neighbours_kept"].to_dict() == pytest.approx(
        {(20, "pca"): 0.7, (20, "separate"): 0.75, (40, "pca"): 0.6, (40, "separate"): 0.5}
    )
    assert table["reviews"].tolist() == [2, 2, 1, 1]
    assert table["umap_keeps_more"].tolist() == [1, 1, 0, 0]


def test_vectors_of_few_tokens_are_those_of_the_residual_stream_of_a_cut_text(tiny_bert: Path) -> None:
    model = attnmix.load(str(tiny_bert))
    vectors = few_tokens._vectors(model, "the film was good and the time flies", 6)
    ids = model.tokenizer("the film was good and the time flies", truncation=True, max_length=6, return_tensors="pt")
    with torch.no_grad():
        states = model.network(**ids, output_hidden_states=True).hidden_states
    last = Site(len(states) - 1, "layer_output")
    np.testing.assert_allclose(vectors[last], states[-1][0], atol=2e-3)  # float16
    assert not {site.point for site in vectors} & set(SUBLAYER_POINTS)
    assert len({array.shape for array in vectors.values()}) == 1

"""Every number in README.md and docs/results.md is that of a file in git, or of the code."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from conftest import REPOSITORY, digest

from docs.claims import changed, interval, points, study
from docs.tables import MARKED, check_default_run, main, read_file, results, tables, with_tables
from stages.page.payload import PAGE_TOKENS
from stages.parameters import Parameters
from study.tables import markdown


def profile(name: str) -> dict[str, str]:
    lines = (REPOSITORY / f"profiles/{name}.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


PROFILE = profile("paper")


def committed(path: str) -> Any:
    """A file as it is in git: a run on another machine may have changed the last digits of those in the folder."""
    shown = subprocess.run(["git", "show", f"HEAD:{path}"], cwd=REPOSITORY, capture_output=True, check=False)
    if shown.returncode:
        if not (REPOSITORY / ".git").exists():
            pytest.skip("no git repository, so nothing is committed")
        raise FileNotFoundError(path)
    text = shown.stdout.decode("utf-8")
    if path.endswith(".md"):
        return text
    return json.loads(text) if path.endswith(".json") else pd.read_csv(io.StringIO(text))


@pytest.mark.parametrize("document", ["README.md", "docs/results.md", "docs/study/README.md"])
def test_committed_sentences_say_what_the_committed_tables_say(document: str) -> None:
    text = committed(document)
    made = results(committed)
    assert {name for _, name, _ in MARKED.findall(text)} <= set(made | tables() | markdown({}))
    assert with_tables(text, made) == text


def test_tables_of_a_run_with_other_parameters_are_refused_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("docs", "reports/metrics", "reports/plots"):
        shutil.copytree(REPOSITORY / folder, tmp_path / folder)
    shutil.copy(REPOSITORY / "README.md", tmp_path)
    lock = yaml.safe_load((REPOSITORY / "dvc.lock").read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    Path("dvc.lock").write_text(yaml.safe_dump(lock), encoding="utf-8")
    check_default_run()

    means = pd.read_csv("reports/plots/mixing_overall.csv")
    means.assign(mean=means["mean"] / 2).to_csv("reports/plots/mixing_overall.csv", index=False)
    lock["stages"]["measure"]["params"]["params.yaml"]["mixing"]["documents"] = 39
    Path("dvc.lock").write_text(yaml.safe_dump(lock), encoding="utf-8")
    before = digest(tmp_path)
    with pytest.raises(SystemExit, match=r"^error: measure ran with another mixing than the default; [^\n]*$"):
        main()
    assert digest(tmp_path) == before


def test_numbers_of_the_folder_are_read_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.csv").write_text("x\n0.5\n", encoding="utf-8")
    (tmp_path / "a.json").write_text('{"x": 1}', encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert read_file("a.csv")["x"].tolist() == [0.5]
    assert read_file("a.json") == {"x": 1}


def points_by_default(layers: int) -> int:
    from stages.sites import EMBEDDING_POINTS

    chosen = Parameters().capture.points
    embedding = [point for point in chosen if point in EMBEDDING_POINTS]
    return len(embedding) + layers * (len(chosen) - len(embedding))


def test_every_other_number_in_the_readme_is_one_that_the_code_has() -> None:
    text = MARKED.sub("", (REPOSITORY / "README.md").read_text(encoding="utf-8"))
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    pyproject = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">=3.11"' in pyproject
    assert (points_by_default(6), points_by_default(12)) == (32, 62)
    assert PAGE_TOKENS == 4096
    own, other = 1.5, 0.5
    assert (other / (own + other), other**2 / (own**2 + other**2)) == (0.25, 0.1)
    assert float(PROFILE["finetune.warmup_fraction"]) == 0.2
    assert (PROFILE["finetune.max_length"], PROFILE["finetune.batch_size"]) == ("512", "64")
    assert float(PROFILE["finetune.learning_rate"]) == 2e-5
    settings = profile("study")
    assert [settings[f"dataset.{each}_limit"] for each in ("train", "test")] == ["1000", "200"]
    assert settings["finetune.max_length"] == settings["mixing.max_length"] == "128"
    limits = {name: profile(name)["dataset.train_limit"] for name in ("laptop", "decoder")}
    assert limits == {"laptop": "1500", "decoder": "1000"}
    known = [
        "1,500 reviews of IMDb",
        "1,000 reviews of IMDb",
        "IMDb: 1,000 for training, 200\nfor testing, cut to 128 tokens",
        "Python 3.11",
        "13 minutes on 2 cores",
        "2 cores",
        "Brackets are 95 % intervals",
        "(1, -1, 0, 0) and (0, 0, 1, -1)",
        "1.5 of its own vector and 0.5 of the other's: the ratio is 0.5 / (0.5 + 1.5)\n= 25 %",
        "0.25 / (0.25 + 2.25) = 10 %",
        "512 tokens, batch 64, AdamW 2e-5, 20 % warm-up",
        "512-token text of a 12-layer model stays under 15 MB",  # tests/test_page.py makes one
        "up to 4,096 tokens",
        "and keys in 16 bits",  # tests/test_page_heads.py compares their weights
        "png at 300 dpi",
        "a contrast of 3:1 on white",  # tests/test_style.py
        "Type 42",
        "2 + 5 L points",
        "32 for the default model and 62\nfor BERT-base",
        "its ratio is 0",
        "every change is 0",
        "0 epochs: as it is",
    ]
    for each in known:
        assert each in text, each
        text = text.replace(each, "")
    left = re.findall(r"[^\n]*(?<![\w-])\d[^\n]*", text)
    assert left == []


LAYERS, CHANGE = (1, 2), {"pretrained": 0.2, "finetuned": 0.5, "difference": 0.3}


def made_up(keys: dict[str, tuple[Any, ...]], **columns: Any) -> pd.DataFrame:
    """A row for each combination of the keys; a change of 30 points [20, 40], of no layer but the second."""
    table = pd.DataFrame(list(product(*keys.values())), columns=list(keys))
    table["mean"] = [CHANGE.get(name, 0.08) for name in table.get("checkpoint", ["difference"] * len(table))]
    for prefix in ("ci", "simultaneous"):
        table[f"{prefix}_low"], table[f"{prefix}_high"] = table["mean"] - 0.1, table["mean"] + 0.1
    if "layer" in table:
        none = (table["layer"] == 1) & (table["checkpoint"] == "difference")
        table.loc[none, ["mean", "ci_low", "simultaneous_low"]] = (0.0, -0.1, -0.1)
        table.loc[none, ["ci_high", "simultaneous_high"]] = 0.1
    return table.assign(**columns)


def study_tables() -> dict[str, pd.DataFrame]:
    both, methods = {"checkpoint": tuple(CHANGE)}, {"method": ("attnresln_n", "layer_n")}
    layers = {"layer": LAYERS}
    levels = {"reference": ("layer_input", "word_embedding"), "form": ("norm_of_block", "sum_of_norms")}
    controls = made_up({**both, "control": ("shuffled_words", "common_value"), **layers, **methods})
    random = made_up({"checkpoint": ("random",), "control": ("random_weights",), **layers, **methods})
    margins = {"checkpoint": ("pretrained", "finetuned"), "quantity": ("spearman", "given_length")}
    scores = made_up({"method": ("decompx", "attention", "gradient_norm", "random")}, quantity="above_random")
    ends = [(0.3, 0.1, 0.5), (0, -1, 1), (-0.3, -0.5, -0.1), (0, 0, 0)]
    scores[["mean", "simultaneous_low", "simultaneous_high"]] = ends
    of_one = {"reference": ("layer_input",), "method": ("attention",)}
    agreement = made_up({"checkpoint": ("pretrained", "finetuned"), **layers, **of_one})
    return {
        "accuracy": pd.DataFrame({"accuracy": [0.8, 0.9]}),
        "ratios": made_up({**both, **layers, **methods}),
        "ratios_overall": made_up(both | methods),
        "mixing_weighted": made_up({**both, **methods}, tokens_of="words", weight="review", layer="all"),
        "mixing_by_class": made_up({**both, **layers, **methods, "token_class": ("cls", "word")}),
        "mixing_controls": pd.concat([controls, random]),
        "mixing_controls_difference": controls,
        "derivative_levels": made_up({**both, **layers, **levels}),
        "mixing_gradient": agreement,
        "margin_correlation": made_up(margins, lowest_seed=-0.2, highest_seed=0.9),
        "faithfulness_overall": scores,
    }


def test_the_study_is_told_as_its_intervals_say() -> None:
    found = study_tables()

    def read(path: str) -> Any:
        name = Path(path).stem
        if name not in found:
            raise FileNotFoundError(path)
        return found[name]

    said = study(read).splitlines()
    assert said[0].endswith("of its own draw: right on 85 % of the test reviews (80 % to 90 %).")
    change = (
        "it rises in layer 2, falls in none (the largest estimate, layer 2: +30.0 percentage points [+20.0, +40.0])"
    )
    assert change in said[1]
    assert "20 % [10, 30] before fine-tuning and 50 % [40, 60] after: it rises (+30.0 percentage points" in said[1]
    assert said[3].endswith(f"of what the ratio changes beyond that, by layer, {change}.")
    assert said[-2].endswith(
        "falls further than without random ones, in percentage points, with DecompX +30 [+10, +50]; less far than "
        "without random ones with gradient norm -30 [-50, -10]; not told from random ones by its interval with "
        "attention of the last layer +0 [-100, +100] (intervals that hold for all methods at once)."
    )
    found["derivative_ratios"] = found["ratios"]
    assert "`layer_n` (Norm-based, whole layer) by +30.0 (layer 2)" in study(read)


def test_where_there_is_no_interval_nothing_is_claimed() -> None:
    row = {"mean": 0.1, "ci_low": float("nan"), "ci_high": float("nan")}
    assert (changed(row), points(row, "mean"), interval(row)) == ("has no interval", "+10.0 percentage points", "")

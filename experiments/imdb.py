"""Run the pipeline on IMDb with two seeds, and write tables and figures to docs/imdb.

    python -m experiments imdb --dataset stanfordnlp/imdb

The runs use profiles/imdb.txt. The run with the first seed includes all stages; the run with the second seed trains
another model, and ends with the stage `measure`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from attnmix.core.store.files import read_results
from experiments.tables import DIGITS

PROFILE = Path("profiles/imdb.txt")
SEEDS = ("111", "112")
TABLES = (
    "measure/exchange",
    "measure/mixing_weighted",
    "measure/mixing_controls",
    "reduce/map_quality",
)
"""The published tables, as files in `reports/plots` of the first run."""
FIGURES = ("own_share", "joint")
METRICS = ("download", "finetune", "measure")


def publish(folders: Sequence[Path], to: Path) -> None:
    """Copy tables, metrics and figures of the first run, and write `seeds.csv` with a row for each run.

    Args:
        folders: Folders of the finished runs, in the order of `SEEDS`.
        to: Folder of the results.
    """
    to.mkdir(parents=True, exist_ok=True)
    reports = folders[0] / "reports"
    for table in TABLES:
        shutil.copyfile(reports / "plots" / f"{table}.csv", to / f"{Path(table).name}.csv")
    for name in METRICS:
        shutil.copyfile(reports / "metrics" / f"{name}.json", to / f"{name}.json")
    for figure in FIGURES:
        shutil.copyfile(reports / "figures" / f"{figure}.png", to / f"{figure}.png")
    seeds = pd.DataFrame([read_seed(folder, seed) for folder, seed in zip(folders, SEEDS, strict=False)])
    seeds.round(DIGITS).to_csv(to / "seeds.csv", index=False, lineterminator="\n")
    print(seeds.to_string(index=False))


def read_seed(folder: Path, seed: str) -> dict[str, object]:
    """Return a row with the test accuracy and the own shares in the last layer, each with its interval.

    The own share is o / (o + a): o is the displacement of a vector if its own token is replaced, and a is its
    displacement if all other tokens are replaced. The own share before fine-tuning, the own share after fine-tuning and
    their difference each have columns for all donors, for donors of the same class and for donors of the other class.
    """
    metrics = json.loads((folder / "reports/metrics/finetune.json").read_text(encoding="utf-8"))["test"]
    row: dict[str, object] = {"seed": seed}
    for name in ("accuracy", "accuracy_ci_low", "accuracy_ci_high"):
        row[name] = metrics[name]
    exchange = read_results(folder / "reports/plots/measure/exchange.csv").query("quantity == 'own_share'")
    last_layer = exchange[exchange["layer"] == exchange["layer"].max()].set_index(["checkpoint", "donor"])
    for checkpoint in ("pretrained", "finetuned", "difference"):
        for donor in ("all", "same_class", "other_class"):
            values = last_layer.loc[(checkpoint, donor)]
            for column in ("mean", "ci_low", "ci_high"):
                row[f"{checkpoint}_{donor}_{column}"] = values[column]
    return row

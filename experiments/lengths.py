"""The mixing ratio and the own share of the same reviews cut to several lengths, before and after fine-tuning.

A ratio depends on how many tokens there are to take from, so that models compared at one length may differ at another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

import attnmix
from attnmix.core.draw import stratified_draw
from attnmix.core.store.runs import Run
from attnmix.core.store.texts import read_split
from attnmix.measures.input_parts import PartsReader
from experiments.fits import labels_of
from experiments.tables import DIGITS, over_seeds
from stages.common.parameters import read_parameters

LENGTHS = (64, 96, 256)  # tokens at most; 96 is what the classifiers of the study were fine-tuned with
PARTS_REVIEWS = 4  # whose vectors are taken apart, which costs the square of the length
RATIO = "attnresln_n"
CHECKPOINTS = ("pretrained", "finetuned")
KEYS = ["setting", "seed", "checkpoint", "measure", "length", "reviews", "tokens", "layer"]


def write_lengths(folders: Sequence[Path], to: Path, lengths: Sequence[int] = LENGTHS) -> None:
    """Write the means over the tokens of each run's measured reviews, over seeds, by length and layer.

    `length` is the number of tokens to which longer reviews are cut, `tokens` the mean number that is left.
    """
    table = pd.concat([_rows_of_run(folder, lengths) for folder in folders], ignore_index=True)
    without_checkpoint = [key for key in KEYS if key != "checkpoint"]
    wide = table.pivot(index=without_checkpoint, columns="checkpoint", values="mean")
    change = (wide["finetuned"] - wide["pretrained"]).rename("mean").reset_index().assign(checkpoint="difference")
    table = pd.concat([table, change[[*KEYS, "mean"]]])
    tokens = table.groupby(["setting", "measure", "length"])["tokens"].transform("mean")
    result = over_seeds(table.assign(tokens=tokens.round(1)))
    to.parent.mkdir(parents=True, exist_ok=True)
    result.round(DIGITS).to_csv(to, index=False, lineterminator="\n")


def _rows_of_run(folder: Path, lengths: Sequence[int]) -> pd.DataFrame:
    """Return `KEYS` and `mean` of one run's two checkpoints."""
    run, parameters = Run(folder), read_parameters(folder / "params.yaml")
    documents = run.drawn_reviews.documents
    numbers = documents.loc[documents["measured"], "document"].str.removeprefix("test/").astype(int)
    reviews = read_split("test", run.reviews).iloc[numbers]
    texts = reviews["text"].tolist()
    sample = stratified_draw(reviews["label"].to_numpy(), PARTS_REVIEWS, parameters.seed)
    sampled_texts = [texts[number] for number in sample]
    tables = []
    for checkpoint in CHECKPOINTS:
        model = attnmix.load(str(folder / "models" / checkpoint))
        for length in lengths:
            print(f"{folder}: {checkpoint}, {length} tokens", flush=True)
            for measure, table in (
                ("ratio", _ratios(model, texts, length)),
                ("own share", _own_shares(model, sampled_texts, length)),
            ):
                tables.append(table.assign(checkpoint=checkpoint, measure=measure, length=length))
    return pd.concat(tables).assign(setting=labels_of(parameters), seed=parameters.seed)[[*KEYS, "mean"]]


def _ratios(model: attnmix.Model, texts: list[str], length: int) -> pd.DataFrame:
    """Return `layer, mean, reviews, tokens` of the mixing ratio."""
    encoding = model.tokenizer(texts, truncation=True, max_length=length, padding=True)
    means = attnmix.measure(model, encoding, methods=RATIO).by_layer()
    return means.rename(columns={"texts": "reviews"})[["layer", "mean", "reviews", "tokens"]]


def _own_shares(model: attnmix.Model, texts: list[str], length: int) -> pd.DataFrame:
    """Return `layer, mean, reviews, tokens` of a token's own share since the input, by the rule `chord`."""
    sums, tokens = 0.0, 0
    with model.observed() as base:
        reader = PartsReader(base)
        for text in texts:
            encoding = model.tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
            shares_LT = reader.read(encoding)["own_share"][1:].double()
            sums = sums + shares_LT.sum(-1).cpu().numpy()
            tokens += shares_LT.shape[-1]
    means = pd.DataFrame({"mean": sums / tokens})
    return means.assign(layer=means.index + 1, reviews=len(texts), tokens=tokens / len(texts))

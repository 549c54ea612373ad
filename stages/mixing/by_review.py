"""What single reviews say: each one's own means, means in which every review weighs the same, and means by length."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

import numpy as np
import numpy.typing as npt
import pandas as pd

from stages.mixing.documents import CLASSES
from stages.mixing.lengths import LENGTHS, length_class
from stages.mixing.statistics import Resampled, resample
from stages.mixing.summary import DIFFERENCE, Sums
from stages.mixing.tables import grid, interval_table
from stages.parameters import MixingParameters

Doubles = npt.NDArray[np.float64]

# Which tokens a mean is over; words are what does not stand at the same place in every text.
TOKENS_OF = {"words": [CLASSES.index("word"), CLASSES.index("subword")], "all": list(range(len(CLASSES)))}
WEIGHTS = ("token", "review")


def review_tables(
    sums: Mapping[str, Sums], reviews: pd.DataFrame, mixing: MixingParameters, seed: int
) -> dict[str, pd.DataFrame]:
    """The csv files of `reports/plots/` by name; `reviews` are the counted documents' `document` and `label`."""
    return {
        "mixing_by_review": _by_review(sums, reviews, mixing),
        "mixing_weighted": _weighted(sums, mixing, seed),
        "mixing_by_length": _by_length(sums, mixing, seed),
    }


def _by_review(sums: Mapping[str, Sums], reviews: pd.DataFrame, mixing: MixingParameters) -> pd.DataFrame:
    """Each review's mean over all its tokens, and their number."""
    frames = []
    for name, part in sums.items():
        ratios, tokens = _of_tokens(part, "all")
        labels = {"checkpoint": [name], "document": reviews["document"], "layer": part.layers, "method": mixing.methods}
        rows = grid(labels).assign(mean=(ratios / tokens[:, None, None]).ravel())
        cells = len(rows) // len(reviews)
        rows.insert(2, "label", np.repeat(reviews["label"].to_numpy(), cells))
        frames.append(rows.assign(tokens=np.repeat(tokens.astype(int), cells)))
    return pd.concat(frames)


def _weighted(sums: Mapping[str, Sums], mixing: MixingParameters, seed: int) -> pd.DataFrame:
    """Means weighted by token and by review, of words and of all tokens, by layer and over `all` layers."""
    frames = []
    for tokens_of, weight in product(TOKENS_OF, WEIGHTS):
        means, documents = {}, 0
        for name, part in sums.items():
            ratios, tokens = _of_tokens(part, tokens_of)
            documents = int((tokens > 0).sum())
            if weight == "review":
                ratios = ratios / np.maximum(tokens, 1)[:, None, None]
                tokens = (tokens > 0).astype(np.float64)
            means[name] = resample(ratios, tokens[:, None, None], mixing.bootstrap_samples, seed)
        for name, by_layer in _with_difference(means).items():
            layers = {"layer": ["all", *range(1, len(by_layer.mean) + 1)], "method": mixing.methods}
            labels = {"checkpoint": [name], "weight": [weight], "tokens_of": [tokens_of]} | layers
            frames.append(interval_table(labels, _with_all_layers(by_layer).interval()).assign(documents=documents))
    return pd.concat(frames)


def _by_length(sums: Mapping[str, Sums], mixing: MixingParameters, seed: int) -> pd.DataFrame:
    """Means over the tokens of the reviews of each length; no interval where a single review has it."""
    lengths = length_class(next(iter(sums.values())).tokens)
    present = np.unique(lengths)
    of_class_NG = (lengths[:, None] == present).astype(np.float64)
    documents = of_class_NG.sum(0).astype(int)
    means, counts_G = {}, np.zeros(len(present), int)
    for name, part in sums.items():
        ratios, tokens = _of_tokens(part, "all")
        counts_NG = tokens[:, None] * of_class_NG
        counts_G = counts_NG.sum(0).astype(int)
        grouped = ratios[..., None] * of_class_NG[:, None, None]
        means[name] = resample(grouped, counts_NG[:, None, None], mixing.bootstrap_samples, seed)
    frames = []
    for name, by_group in _with_difference(means).items():
        layers = {"layer": range(1, len(by_group.mean) + 1), "method": mixing.methods}
        labels = {"checkpoint": [name]} | layers | {"length": [LENGTHS[number] for number in present]}
        rows = interval_table(labels, by_group.interval())
        cells = len(rows) // len(present)
        rows = rows.assign(tokens=np.tile(counts_G, cells), documents=np.tile(documents, cells))
        frames.append(rows)
    return pd.concat(frames)


def _of_tokens(part: Sums, tokens_of: str) -> tuple[Doubles, Doubles]:
    """Each document's sums of the ratios `[N, layers, methods]` over a kind of tokens, and how many these are `[N]`."""
    ratios, tokens = part.groups["token_class"]
    classes = TOKENS_OF[tokens_of]
    return ratios[..., classes].sum(-1), tokens[:, classes].sum(-1)


def _with_difference(means: dict[str, Resampled]) -> dict[str, Resampled]:
    """Fine-tuned minus pretrained too, of the same documents, where there are both."""
    if len(means) < 2:
        return means
    return means | {DIFFERENCE: means["finetuned"].minus(means["pretrained"])}


def _with_all_layers(by_layer: Resampled) -> Resampled:
    """The mean over the layers before the layers `[1 + layers, ...]`."""
    mean = np.concatenate([by_layer.mean.mean(0, keepdims=True), by_layer.mean])
    samples = np.concatenate([by_layer.samples.mean(1, keepdims=True), by_layer.samples], axis=1)
    documents = np.concatenate([by_layer.documents.min(0, keepdims=True), by_layer.documents])
    return Resampled(mean, samples, documents)

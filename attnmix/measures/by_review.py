"""What single reviews say: each one's own means, means in which every review weighs the same, and means by length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product, starmap

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.statistics import Draws, Resampled
from attnmix.measures.documents import CLASSES
from attnmix.measures.lengths import LENGTHS, length_class
from attnmix.measures.summary import DIFFERENCE
from attnmix.measures.sums import Sums, tokens_of
from attnmix.measures.tables import grid, interval_table

Doubles = npt.NDArray[np.float64]

# Which tokens a mean is over; words are what does not stand at the same place in every text.
TOKENS_OF = {"words": [CLASSES.index("word"), CLASSES.index("subword")], "all": list(range(len(CLASSES)))}


def review_tables(sums: Mapping[str, Sums], methods: Sequence[str], draws: Draws) -> dict[str, pd.DataFrame]:
    """Those of the csv files of `reports/plots/` that are no longer for more reviews, by name."""
    return {"mixing_weighted": _weighted(sums, methods, draws), "mixing_by_length": _by_length(sums, methods, draws)}


def by_review(
    sums: Mapping[str, Sums], reviews: Callable[[], Iterator[tuple[list[str], list[int]]]], methods: Sequence[str]
) -> Iterator[pd.DataFrame]:
    """`mixing_by_review.csv`, block by block: each review's mean over all its tokens, and their number.

    `reviews` gives the names and labels of the blocks that `Sums.read` reads.
    """
    for name, part in sums.items():
        for (names, of_block), (ratios, tokens) in zip(reviews(), _of_tokens(part, "all"), strict=True):
            labels = {"checkpoint": [name], "document": names, "layer": part.layers, "method": methods}
            rows = grid(labels).assign(mean=(ratios / tokens[:, None, None]).ravel())
            cells = len(rows) // len(names)
            rows.insert(2, "label", np.repeat(of_block, cells))
            yield rows.assign(tokens=np.repeat(tokens.astype(int), cells))


def _weighted(sums: Mapping[str, Sums], methods: Sequence[str], draws: Draws) -> pd.DataFrame:
    """Means weighted by token and by review, of words and of all tokens, by layer and over `all` layers."""

    def by_token(ratios: Doubles, tokens: Doubles) -> tuple[Doubles, Doubles]:
        return ratios, tokens[:, None, None]

    def by_review(ratios: Doubles, tokens: Doubles) -> tuple[Doubles, Doubles]:
        counted = (tokens > 0).astype(np.float64)
        return ratios / np.maximum(tokens, 1)[:, None, None], counted[:, None, None]

    frames = []
    for kind, (weight, of_block) in product(TOKENS_OF, {"token": by_token, "review": by_review}.items()):
        means = {name: draws.resample(starmap(of_block, _of_tokens(part, kind))) for name, part in sums.items()}
        documents = int(next(iter(means.values())).documents.flat[0])
        for name, by_layer in _with_difference(means).items():
            layers = {"layer": ["all", *range(1, len(by_layer.mean) + 1)], "method": methods}
            labels = {"checkpoint": [name], "weight": [weight], "tokens_of": [kind]} | layers
            frames.append(interval_table(labels, _with_all_layers(by_layer).interval()).assign(documents=documents))
    return pd.concat(frames)


def _by_length(sums: Mapping[str, Sums], methods: Sequence[str], draws: Draws) -> pd.DataFrame:
    """Means over the tokens of the reviews of each length; no interval where a single review has it."""
    counted = next(iter(sums.values())).counted
    lengths = length_class(counted)
    present, documents_G = np.unique(lengths, return_counts=True)
    tokens_G = np.array([counted[lengths == length].sum() for length in present])

    def by_group(ratios: Doubles, tokens: Doubles) -> tuple[Doubles, Doubles]:
        of_class_DG = (length_class(tokens)[:, None] == present).astype(np.float64)
        grouped = ratios[..., None] * of_class_DG[:, None, None]
        return grouped, (tokens[:, None] * of_class_DG)[:, None, None]

    means = {name: draws.resample(starmap(by_group, _of_tokens(part, "all"))) for name, part in sums.items()}
    frames = []
    for name, by_length in _with_difference(means).items():
        layers = {"layer": range(1, len(by_length.mean) + 1), "method": methods}
        labels = {"checkpoint": [name]} | layers | {"length": [LENGTHS[number] for number in present]}
        rows = interval_table(labels, by_length.interval())
        cells = len(rows) // len(present)
        frames.append(rows.assign(tokens=np.tile(tokens_G, cells), documents=np.tile(documents_G, cells)))
    return pd.concat(frames)


def _of_tokens(part: Sums, kind: str) -> Iterator[tuple[Doubles, Doubles]]:
    """Block by block, each document's sums of the ratios over a kind of tokens, and how many these are.

    `[D, layers, methods]` and `[D]`.
    """
    classes = TOKENS_OF[kind]
    for ratios, tokens in part.read("token_class", tokens_of("token_class")):
        yield ratios[..., classes].sum(-1), tokens[:, classes].sum(-1)


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

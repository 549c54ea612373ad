"""How much UMAP and principal components keep of texts of few tokens: the scores of their maps, by length.

UMAP lays each capture point out alone, as on the page of a typed text, with the default parameters.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

import attnmix
from attnmix.core.names import SUBLAYER_POINTS, Site
from attnmix.core.settings import DatasetParameters, UmapParameters
from attnmix.data.source import read_splits
from attnmix.maps.layouts import fit_layout
from attnmix.maps.quality import score_map
from attnmix.maps.vectors import Vectors, points_for
from experiments.tables import DIGITS

LENGTHS = (20, 32, 40, 48, 64, 96)  # tokens to which reviews are cut
REVIEWS = 12
SEED = 1
SCORES = ("neighbours_kept", "trustworthiness", "distance_spearman")


def write_few_tokens(dataset: str, model: str, to: Path) -> None:
    """Write the mean scores of the maps of reviews by length and layout, over all points of the residual stream.

    `umap_keeps_more` is in how many of the reviews of a length UMAP keeps more of the nearest neighbours.
    """
    table = _scores(dataset, model)
    by_review = table.groupby(["tokens", "review", "layout"])[list(SCORES)].mean()
    means = by_review.groupby(["tokens", "layout"]).mean()
    reviews = by_review.groupby(["tokens", "layout"]).size().rename("reviews")
    umap, pca = (by_review["neighbours_kept"].xs(layout, level="layout") for layout in ("separate", "pca"))
    keeps_more = (umap > pca).groupby("tokens").sum().rename("umap_keeps_more")
    result = means.join(reviews).join(keeps_more, on="tokens")
    to.parent.mkdir(parents=True, exist_ok=True)
    result.round(DIGITS).to_csv(to, lineterminator="\n")


def _scores(dataset: str, model_name: str) -> pd.DataFrame:
    """Return the scores of each review's map of each point, in each layout and length."""
    settings = DatasetParameters(name=dataset, train_limit=40, test_limit=REVIEWS)
    texts = read_splits(settings, SEED)[0]["test"]["text"].tolist()
    model = attnmix.load(model_name)
    umap = UmapParameters(stability_seeds=[])
    tables = []
    for tokens in LENGTHS:
        for review, text in enumerate(texts):
            vectors = _vectors(model, text, tokens)
            if len(next(iter(vectors.values()))) < tokens:
                continue
            for layout in ("separate", "pca"):
                mapped = points_for(layout, vectors, umap)
                for site, xy in fit_layout(layout, mapped, umap)[umap.seed].items():
                    scores = score_map(mapped[site], [xy], umap.metric, umap.seed)["value"]
                    tables.append({"tokens": tokens, "review": review, "layout": layout, **scores[list(SCORES)]})
    return pd.DataFrame(tables)


def _vectors(model: attnmix.Model, text: str, tokens: int) -> dict[Site, Vectors]:
    """Return the vectors `[tokens, hidden]` of a text at each point of the residual stream."""
    vectors = {}
    encoding = model.tokenizer([text], truncation=True, max_length=tokens)
    for point, array in attnmix.capture(model, encoding).items():
        if point in SUBLAYER_POINTS:
            continue
        for layer in array["layer"].to_numpy():
            vectors[Site(int(layer), point)] = array.sel(layer=layer).to_numpy().astype(np.float32)
    return vectors

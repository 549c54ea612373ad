"""Measure how much the class's probability falls when the tokens that a measure ranks first are removed.

    python -m stages faithfulness

The falls in a few test reviews are set beside those of random removal. For all drawn reviews, the margin of the
classifier is compared with the last layer's mixing ratio, among reviews of one predicted class. Writes to
`features/faithfulness/` token scores of the captured texts, `captured.parquet`, and their classes,
`predictions.parquet`; tables under `reports/plots/faithfulness/`; and `reports/metrics/faithfulness.json`.
`docs/measures.md` defines each number.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from tqdm import tqdm

from attnmix.arithmetic.kernels import use
from attnmix.core.names import IMPORTANCE_NAMES
from attnmix.core.options import CaptureParameters, Parameters
from attnmix.faithfulness.attributions import ATTRIBUTIONS, RANDOM, REFERENCE, Review, present_attributions
from attnmix.faithfulness.classifier import Classifier
from attnmix.faithfulness.tables import ALL, agreement, faithfulness_table, margin_correlation, probability_drops
from attnmix.measures.documents import Document, chosen_documents
from attnmix.measures.ratios import preferred_ratio
from attnmix.models.encoding import readings
from attnmix.models.loading import check_max_length
from attnmix.store.checkpoints import FINETUNED
from attnmix.store.files import write_table
from attnmix.store.reports import read_plot, read_plot_rows, write_metrics, write_plot
from attnmix.store.reviews import read_split
from attnmix.store.validation import PREDICTIONS, write_captured_scores
from stages.common.selection import chosen_rows, chosen_texts, drawn_reviews

Doubles = npt.NDArray[np.float64]


def main(parameters: Parameters) -> None:
    """Compare the token scores and the margins, and write the stage's files."""
    use(parameters.arithmetic)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    classifier = Classifier(FINETUNED, device, parameters.capture.batch_tokens)
    documents = {}
    for name, section, number in (
        ("faithfulness", parameters.faithfulness, parameters.faithfulness.documents),
        ("capture", parameters.capture, parameters.measure.documents),
    ):
        check_max_length(f"{name}.max_length", section.max_length, FINETUNED)
        drawn = drawn_reviews(number, parameters.seed)
        documents[name] = chosen_documents(classifier.tokenizer, drawn, {}, section.max_length, section.max_length)
    removed = _removals(classifier, documents["faithfulness"], parameters.seed)
    margins, checkpoints = _margins(classifier, documents["capture"])
    correlations = margin_correlation(margins, checkpoints)
    predictions, scores = _captured(classifier, parameters.capture, parameters.seed)
    write_plot("faithfulness/faithfulness", removed)
    write_plot("faithfulness/margins", margins)
    write_plot("faithfulness/margin_correlation", correlations)
    write_table(PREDICTIONS, predictions)
    write_captured_scores(scores)
    best = removed.loc[removed["method"] != RANDOM, "above_random"].max()
    overall = correlations[correlations["predicted"] == ALL].set_index("checkpoint")["given_length"]
    write_metrics("faithfulness", {"above_random": float(best), "margin": float(overall.get("finetuned", np.nan))})


def _removals(classifier: Classifier, documents: Sequence[Document], seed: int) -> pd.DataFrame:
    """Return `faithfulness.csv` of the reviews in which tokens are removed."""
    methods, generator = present_attributions(classifier.family), np.random.default_rng(seed)
    drops, agreements = [], []
    for document in tqdm(documents, desc="token scores", unit="review", disable=None):
        review = Review(classifier, document, generator)
        scores = {name: each.scores(review) for name, each in methods.items()}
        drops.append(list(probability_drops(review, scores).values()))
        agreements.append([agreement(review, each, scores[REFERENCE][0]) for each in scores.values()])
    agreement_NM = np.array(agreements)
    agreement_NM[:, list(methods).index(REFERENCE)] = np.nan  # with itself
    return faithfulness_table(np.array(drops), agreement_NM, list(methods), seed)


def _margins(classifier: Classifier, documents: Sequence[Document]) -> tuple[pd.DataFrame, list[str]]:
    """Return `margins.csv`, a row for each drawn review, and the checkpoints whose last layer's ratio is a column."""
    logits_NC = classifier.logits([document.ids.tolist() for document in documents])
    highest, names = logits_NC.topk(2).values, [document.name for document in documents]
    table = pd.DataFrame(
        {
            "document": names,
            "label": read_split("test")["label_name"].to_numpy()[[int(name.removeprefix("test/")) for name in names]],
            "predicted": [classifier.classes[label] for label in logits_NC.argmax(-1).tolist()],
            "margin": (highest[:, 0] - highest[:, 1]).numpy(),
            "tokens": [len(document) for document in documents],
        }
    )
    means = read_plot("measure/mixing")
    method = preferred_ratio(means["method"].unique())
    ratios = read_plot_rows("measure/mixing_by_review", {"method": method, "layer": means["layer"].max()})
    checkpoints = ratios["checkpoint"].unique().tolist()
    by_review = ratios.pivot(index="document", columns="checkpoint", values="mean")[checkpoints]
    return table.join(by_review, on="document"), checkpoints


def _captured(classifier: Classifier, capture: CaptureParameters, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return `predictions.parquet`, the captured texts' classes, and `captured.parquet`, scores of their tokens.

    The scores are those of `IMPORTANCE_NAMES`, which need no matrices of a text as long as a captured one may be.
    """
    texts, labels = chosen_texts(capture, seed), read_split("test")["label_name"]
    label_names = [labels[row] for row in chosen_rows(capture, seed)] + [None] * len(capture.texts)
    _, read = readings(classifier.tokenizer, list(texts.values()), capture.max_length)
    documents = chosen_documents(classifier.tokenizer, {}, texts, capture.max_length, capture.max_length)
    generator = np.random.default_rng(seed)
    predictions, tables = [], []
    for document, label, (tokens, whole, unknown) in zip(documents, label_names, read, strict=True):
        review = Review(classifier, document, generator)
        predicted = classifier.classes[review.predicted]
        predictions.append((document.name, predicted, review.probability, label, tokens, whole, unknown))
        columns = {"document": document.name, "position": np.arange(len(document), dtype=np.int32)}
        for name in IMPORTANCE_NAMES:
            (scores_T,) = ATTRIBUTIONS[name].scores(review)
            tables.append(pd.DataFrame({**columns, "method": name, "score": scores_T}))
    names = ["document", "predicted", "probability", "label", "tokens", "whole_tokens", "unknown_tokens"]
    return pd.DataFrame(predictions, columns=names), pd.concat(tables, ignore_index=True)

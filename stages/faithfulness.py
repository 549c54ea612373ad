"""Measure how much the class's probability falls when the tokens that a measure ranks first are removed.

    python -m stages faithfulness

The falls in a few test reviews are set beside those of random removal. For all drawn reviews, the margin of the
classifier is compared with the last layer's mixing ratio, among reviews of one predicted class. Writes to
`features/faithfulness/` token scores of the captured texts, `captured.parquet`, and their classes,
`predictions.parquet`; tables under `reports/plots/faithfulness/`; and `reports/metrics/faithfulness.json`.
`docs/measures.md` defines each number.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from tqdm import tqdm

from attnmix.arithmetic.kernels import use
from attnmix.core.names import IMPORTANCE_NAMES
from attnmix.core.options import CaptureParameters, Parameters
from attnmix.faithfulness.attributions import ATTRIBUTIONS, RANDOM, REFERENCE, Attribution, Review, present_attributions
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
    measure, removal, seed = parameters.measure, parameters.faithfulness, parameters.seed
    check_max_length("faithfulness.max_length", removal.max_length, FINETUNED)
    check_max_length("measure.max_length", measure.max_length, FINETUNED)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    classifier = Classifier(FINETUNED, device, measure.batch_tokens)
    methods = present_attributions(classifier.family)
    documents = _documents(classifier, removal.documents, removal.max_length, seed)
    removed = _removals(classifier, documents, methods, seed)
    margins, checkpoints = _margins(classifier, _documents(classifier, measure.documents, measure.max_length, seed))
    correlations = margin_correlation(margins, checkpoints)
    write_plot("faithfulness/faithfulness", removed)
    write_plot("faithfulness/margins", margins)
    write_plot("faithfulness/margin_correlation", correlations)
    write_table(PREDICTIONS, _predictions(classifier, parameters.capture, seed))
    write_captured_scores(_captured_scores(classifier, parameters.capture, seed))
    best = removed.loc[removed["method"] != RANDOM, "above_random"].max()
    write_metrics("faithfulness", {"above_random": float(best), "margin": _margin(correlations)})
    logging.info("%d token scores compared in %d reviews", len(methods), len(documents))


def _documents(classifier: Classifier, documents: int, max_length: int, seed: int) -> list[Document]:
    drawn = drawn_reviews(documents, seed)
    return chosen_documents(classifier.tokenizer, drawn, {}, max_length, max_length)


def _removals(
    classifier: Classifier, documents: list[Document], methods: Mapping[str, Attribution], seed: int
) -> pd.DataFrame:
    """Return `faithfulness.csv` of the reviews in which tokens are removed."""
    generator = np.random.default_rng(seed)
    drops, agreements = [], []
    for document in tqdm(documents, desc="token scores", unit="review", disable=None):
        review = Review(classifier, document, generator)
        scores = {name: each.scores(review) for name, each in methods.items()}
        falls, reference_T = probability_drops(review, scores), scores[REFERENCE][0]
        drops.append([falls[name] for name in scores])
        agreements.append(
            [np.nan if name == REFERENCE else agreement(review, each, reference_T) for name, each in scores.items()]
        )
    return faithfulness_table(np.array(drops), np.array(agreements), list(methods), seed)


def _margins(classifier: Classifier, documents: list[Document]) -> tuple[pd.DataFrame, list[str]]:
    """Return `margins.csv`, a row for each drawn review, and the checkpoints whose ratio is a column of it."""
    logits_NC, predicted = classifier.predictions([document.ids.tolist() for document in documents])
    highest = logits_NC.topk(2).values
    numbers = [int(document.name.removeprefix("test/")) for document in documents]
    table = pd.DataFrame(
        {
            "document": [document.name for document in documents],
            "label": read_split("test")["label_name"].to_numpy()[numbers],
            "predicted": predicted,
            "margin": (highest[:, 0] - highest[:, 1]).numpy(),
            "tokens": [len(document) for document in documents],
        }
    )
    last = _last_layer()
    return table.assign(**{name: column.loc[table["document"]].to_numpy() for name, column in last.items()}), list(last)


def _last_layer() -> dict[str, pd.Series]:
    """Return each measured checkpoint's mean ratio of every measured review after the last layer, by review."""
    means = read_plot("measure/mixing")
    method = preferred_ratio(means["method"].unique())
    reviews = read_plot_rows("measure/mixing_by_review", {"method": method, "layer": means["layer"].max()})
    by_checkpoint = reviews.set_index("document").groupby("checkpoint", sort=False)["mean"]
    return {str(name): of_checkpoint for name, of_checkpoint in by_checkpoint}


def _predictions(classifier: Classifier, capture: CaptureParameters, seed: int) -> pd.DataFrame:
    """Return `predictions.parquet`: what the classifier says of each captured text, and what of it the model sees."""
    texts, labels = chosen_texts(capture, seed), read_split("test")["label_name"]
    encoded, read = readings(classifier.tokenizer, list(texts.values()), capture.max_length)
    logits_NC, predicted = classifier.predictions(encoded)
    table = pd.DataFrame({"document": list(texts), "predicted": predicted})
    return table.assign(
        probability=logits_NC.softmax(-1).amax(-1).numpy(),
        label=[labels[row] for row in chosen_rows(capture, seed)] + [None] * len(capture.texts),
        tokens=[each.tokens for each in read],
        whole_tokens=[each.whole for each in read],
        unknown_tokens=[each.unknown for each in read],
    )


def _captured_scores(classifier: Classifier, capture: CaptureParameters, seed: int) -> pd.DataFrame:
    """Return the scores of `IMPORTANCE_NAMES`, which need no matrices of a text as long as a captured one may be."""
    tables, generator = [], np.random.default_rng(seed)
    texts = chosen_texts(capture, seed)
    for document in chosen_documents(classifier.tokenizer, {}, texts, capture.max_length, capture.max_length):
        review = Review(classifier, document, generator)
        for name in IMPORTANCE_NAMES:
            (scores_T,) = ATTRIBUTIONS[name].scores(review)
            columns = {"document": document.name, "position": np.arange(len(document), dtype=np.int32)}
            tables.append(pd.DataFrame({**columns, "method": name, "score": scores_T}))
    return pd.concat(tables, ignore_index=True)


def _margin(correlations: pd.DataFrame) -> float:
    """Return the fine-tuned ratio's, within classes and given the length; the pretrained one's if measured alone."""
    rows = correlations[correlations["predicted"] == ALL].set_index("checkpoint")["given_length"]
    return float(rows.get("finetuned", rows.iloc[0]))

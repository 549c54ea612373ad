"""Ask which measure deserves belief: of what the class score comes, and how sure the classifier is.

    python -m stages faithfulness

For a few test reviews, tokens that each measure ranks first are removed, and the fall of the class's probability is
compared with that of random removal. For all drawn reviews, the margin of the classifier is compared with the last
layer's mixing ratio, among reviews of one predicted class. Writes `features/faithfulness/captured.parquet`, tables
under `reports/plots/faithfulness/`, and `reports/metrics/faithfulness.json`; `docs/measures.md` defines each number.
"""

from __future__ import annotations

import logging

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from tqdm import tqdm

from attnmix.arithmetic.kernels import use
from attnmix.core.names import IMPORTANCE_NAMES
from attnmix.core.options import Parameters
from attnmix.core.statistics import BOOTSTRAP_SAMPLES
from attnmix.faithfulness.attributions import ATTRIBUTIONS, MATRICES_READ, RANDOM, REFERENCE, Attribution
from attnmix.faithfulness.classifier import Classifier
from attnmix.faithfulness.removal import agreement, probability, removals
from attnmix.faithfulness.review import Review
from attnmix.faithfulness.tables import ALL_CLASSES, faithfulness, margin_correlation
from attnmix.measures.documents import Document, read_documents
from attnmix.measures.matrices import LAYER_MATRICES
from attnmix.measures.ratios import preferred_ratio
from attnmix.store.checkpoints import FINETUNED
from attnmix.store.reports import read_plot, read_plot_rows, write_metrics, write_plot
from attnmix.store.tokens import read_documents as read_texts
from attnmix.store.validation import write_captured_scores

Doubles = npt.NDArray[np.float64]


def main(parameters: Parameters) -> None:
    use(parameters.arithmetic)
    documents = read_texts()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    classifier = Classifier(FINETUNED, device, parameters.capture.batch_tokens)
    samples, seed = BOOTSTRAP_SAMPLES, parameters.seed
    methods = _present(classifier)
    drops_NMS, agreement_NM = _removed(classifier, methods, parameters)
    shares = parameters.faithfulness.shares
    curves, overall = faithfulness(drops_NMS, agreement_NM, [each.name for each in methods], shares, samples, seed)
    margins, checkpoints = _margins(classifier, documents)
    correlations = margin_correlation(margins, checkpoints)
    write_plot("faithfulness/faithfulness", curves)
    write_plot("faithfulness/faithfulness_overall", overall)
    write_plot("faithfulness/margins", margins)
    write_plot("faithfulness/captured_texts", _captured(classifier, documents))
    write_captured_scores(_captured_scores(classifier, parameters))
    write_plot("faithfulness/margin_correlation", correlations)
    best = overall.loc[overall["method"] != RANDOM, "above_random"].max()
    write_metrics("faithfulness", {"above_random": float(best), "margin": _margin(correlations)})
    logging.info("%d token scores compared in %d reviews", len(methods), len(drops_NMS))


def _present(classifier: Classifier) -> list[Attribution]:
    """The scores that the model's family has; why it lacks the others is said."""
    found = []
    for each in ATTRIBUTIONS.values():
        reason = each.absent(classifier.family)
        if reason is None:
            found.append(each)
        else:
            logging.info("%s: absent in the model family %s: %s", each.name, classifier.family.model_type, reason)
    return found


def _reviews(kind: str) -> list[Document]:
    """Return the `measured` or `removed` reviews in the order of the test split."""
    return sorted(read_documents(kind), key=lambda document: int(document.name.removeprefix("test/")))


def _removed(classifier: Classifier, methods: list[Attribution], parameters: Parameters) -> tuple[Doubles, Doubles]:
    """Falls of the probability `[N, methods, shares]` and agreement with the derivative `[N, methods]`."""
    faithfulness, seed = parameters.faithfulness, parameters.seed
    generator = np.random.default_rng(seed)
    matrices = [LAYER_MATRICES[name] for name in classifier.family.present(MATRICES_READ)]
    matrices = matrices if len(classifier.family.stacks) == 1 else []
    values = classifier.values() if any(each.name == "decompx" for each in methods) else None
    drops, agreements = [], []
    documents = [document.cut(faithfulness.max_length) for document in _reviews("removed")]
    for document in tqdm(documents, desc="token scores", unit="review", disable=None):
        review = Review(classifier, document, matrices, values, generator, faithfulness.random_draws)
        scores = {each.name: np.atleast_2d(each.formula(review)) for each in methods}
        found = removals(review, scores, faithfulness.shares)
        whole = float(probability(torch.from_numpy(review.logits_C), review.predicted))
        drops.append([whole - found[each.name][..., 0].mean(0) for each in methods])
        reference = scores[REFERENCE][0]
        agreements.append(
            [np.nan if each.name == REFERENCE else agreement(review, scores[each.name], reference) for each in methods]
        )
    return np.array(drops), np.array(agreements)


def _scores(review: Review, scores: dict[str, Doubles]) -> pd.DataFrame:
    frame = {"document": review.document.name, "position": np.arange(len(review.ids), dtype=np.int32)}
    return pd.concat([pd.DataFrame({**frame, "method": name, "score": each.mean(0)}) for name, each in scores.items()])


def _margins(classifier: Classifier, documents: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """`margins.csv`, a row for each drawn review, and the checkpoints whose ratio is a column of it."""
    reviews = _reviews("measured")
    names = [review.name for review in reviews]
    logits_NC = classifier.logits([review.ids.tolist() for review in reviews])
    highest = logits_NC.topk(2).values
    classes = classifier.base.config.id2label
    table = pd.DataFrame(
        {
            "document": names,
            "label": documents.set_index("document")["label_name"][names].to_numpy(),
            "predicted": [classes[label] for label in logits_NC.argmax(-1).tolist()],
            "margin": (highest[:, 0] - highest[:, 1]).numpy(),
            "tokens": list(map(len, reviews)),
        }
    )
    last = _last_layer()
    return table.assign(**{name: column.loc[table["document"]].to_numpy() for name, column in last.items()}), list(last)


def _captured(classifier: Classifier, documents: pd.DataFrame) -> pd.DataFrame:
    """`captured_texts.csv`: what the classifier says of each captured text, and what of it the model sees."""
    texts = documents[documents["captured"]]
    encoded = [document.ids.tolist() for document in read_documents("captured")]
    probability_NC = classifier.logits(encoded).softmax(-1)
    names = classifier.base.config.id2label
    return texts[["document"]].assign(
        label=texts["label_name"],
        predicted=[names[label] for label in probability_NC.argmax(-1).tolist()],
        probability=probability_NC.amax(-1).numpy(),
        **texts[["tokens", "whole_tokens", "unknown_tokens"]],
    )


def _captured_scores(classifier: Classifier, parameters: Parameters) -> pd.DataFrame:
    """Those of `IMPORTANCE_NAMES`, which need no matrices of a text as long as a captured one may be."""
    generator = np.random.default_rng(parameters.seed)
    tables = []
    for document in read_documents("captured"):
        review = Review(classifier, document, [], None, generator, 0)
        scores = {name: np.atleast_2d(ATTRIBUTIONS[name].formula(review)) for name in IMPORTANCE_NAMES}
        tables.append(_scores(review, scores))
    return pd.concat(tables, ignore_index=True)


def _margin(correlations: pd.DataFrame) -> float:
    """Return the fine-tuned ratio's, within classes and given the length; the pretrained one's if measured alone."""
    rows = correlations[correlations["predicted"] == ALL_CLASSES].set_index("checkpoint")["given_length"]
    return float(rows.get("finetuned", rows.iloc[0]))


def _last_layer() -> dict[str, pd.Series]:
    """Each measured checkpoint's mean ratio of every review in the statistics, after the last layer, by review."""
    means = read_plot("measure/mixing")
    method = preferred_ratio(means["method"].unique())
    reviews = read_plot_rows("measure/mixing_by_review", {"method": method, "layer": means["layer"].max()})
    by_checkpoint = reviews.set_index("document").groupby("checkpoint", sort=False)["mean"]
    return {str(name): of_checkpoint for name, of_checkpoint in by_checkpoint}

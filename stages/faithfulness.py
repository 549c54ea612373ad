"""Measure how much the predicted class's probability drops after replacing the highest-scored tokens, or all others.

    python -m stages faithfulness

The drops are compared with those for a random order of tokens. `class_use.csv` contains three analyses of the sampled
test texts: the effect of replacing attention values on the predicted class; predictions from single tokens, by the
classification head and by linear probes; and the correlation of the classifier's margin with the last layer's mixing
ratio. The stage writes `reports/plots/faithfulness/` and `reports/metrics/faithfulness.json`. `docs/measures.md`
defines each number.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from attnmix.core.arithmetic.kernels import set_arithmetic
from attnmix.core.device import chosen_device, measuring_device
from attnmix.core.draw import stratified_draw
from attnmix.core.names import CAPTURED_CHECKPOINT
from attnmix.core.statistics import Doubles
from attnmix.core.store import texts as store
from attnmix.core.store.runs import Run
from attnmix.core.store.writers import write_metrics, write_plot
from attnmix.faithfulness.attributions import RANDOM_REMOVAL, REFERENCE, Attribution, Review, present_attributions
from attnmix.faithfulness.class_use import interventions
from attnmix.faithfulness.classifier import Classifier
from attnmix.faithfulness.probes import PROBE_TEXTS, probes
from attnmix.faithfulness.removal_tables import (
    COMPREHENSIVENESS,
    MASK,
    agreement,
    draw_donors,
    faithfulness_table,
    margin_correlation,
    probability_drops,
)
from attnmix.measures.documents import Document, documents_of, read_reviews
from attnmix.measures.ratios import preferred_ratio
from attnmix.measures.variance_shares import draw_texts
from attnmix.models.loading import load_base
from attnmix.models.segments import read_segments
from attnmix.runs.tokens import tokenized_block, with_texts
from stages.common.parameters import Parameters

SAMPLED_REVIEWS = 16
"""Number of texts on which token removal by costly scores and by reference scores is evaluated."""


def main(parameters: Parameters) -> None:
    """Measure the effects of token removal and interventions, the margins and the probes, and write the tables."""
    set_arithmetic(parameters.arithmetic)
    run = Run(Path())
    device = measuring_device(chosen_device())
    # Batches are half as large as in `capture`, because edits need memory for attention weights and layer outputs.
    batch_tokens = parameters.capture.batch_tokens // 2
    classifier = Classifier(run.finetuned, device, batch_tokens, run.drawn_reviews.pairs)
    removed = _measure_removals(classifier, parameters.faithfulness.max_length, parameters.seed, run)
    margins, checkpoints = _measure_margins(classifier, run)
    last_layer = int(run.table("measure/mixing")["layer"].max())
    correlations = margin_correlation(margins, checkpoints, last_layer)
    # Probes are trained on training texts. Probes and interventions are evaluated on a sample of the measured texts.
    documents = _draw_measured_reviews(parameters.seed, run)
    training = _read_training_reviews(classifier, parameters.capture.max_length, parameters.seed, run)
    bases = _load_bases(classifier, checkpoints, run)
    accuracies = probes(classifier, bases, training, documents, parameters.seed)
    effects = interventions(classifier, documents, parameters.seed)
    class_use = pd.concat([effects, accuracies, correlations])
    write_plot("faithfulness/faithfulness", removed, run.tables)
    write_plot("faithfulness/margins", margins, run.tables)
    write_plot("faithfulness/class_use", class_use, run.tables)
    write_metrics("faithfulness", _create_metrics(removed, correlations), run.metrics_folder)


def _create_metrics(removed: pd.DataFrame, correlations: pd.DataFrame) -> dict[str, float]:
    """Return the metrics `above_random` and `margin` from the tables of removals and of margin correlations.

    `above_random` is the largest difference in comprehensiveness between a method and random removal if tokens are
    masked. `margin` is the partial correlation of the margin with the mixing ratio of the fine-tuned model, controlling
    for text length, averaged over classes.
    """
    is_masked = (removed["test"] == COMPREHENSIVENESS) & (removed["replacement"] == MASK)
    is_method = removed["method"] != RANDOM_REMOVAL
    best = removed.loc[is_masked & is_method, "above_random"].max()
    overall = correlations.query("group == 'all' and quantity == 'margin_given_length'")
    margin_given_length = overall.set_index("checkpoint")["mean"].get("finetuned", np.nan)
    return {"above_random": float(best), "margin": float(margin_given_length)}


def _measure_removals(classifier: Classifier, max_length: int, seed: int, run: Run) -> pd.DataFrame:
    """Return the table `faithfulness.csv`: how the predicted class's probability drops when tokens are replaced.

    Several methods score the tokens of each text, and the tokens to replace are chosen by their scores. The texts are
    those sampled for token removal, truncated to `max_length` tokens. Shapes: N texts, M methods, T tokens, D draws of
    a score (one unless the score is random), Q tests with a replacement, S shares of replaced tokens.
    """
    methods = present_attributions(classifier.family)
    generator = np.random.default_rng(seed)
    documents = [document.cut(max_length) for document in read_reviews("removed", run.drawn_reviews)]
    sample = set(np.linspace(0, len(documents) - 1, SAMPLED_REVIEWS).astype(int))  # indices of evenly spaced texts
    drops_by_text = []
    agreements_by_text = []
    for number, document in enumerate(tqdm(documents, desc="token scores", unit="review", disable=None)):
        review = Review(classifier, document, generator, draw_donors(documents, number, generator))
        scores = _score_tokens(methods, review, in_sample=number in sample)
        drops = probability_drops(review, scores)  # an array `[Q, S]` for each method
        drops_by_text.append(list(drops.values()))
        reference_T = review.gradient_norm()  # the scores of the method `REFERENCE`
        agreements_by_text.append([agreement(review, scores_DT, reference_T) for scores_DT in scores.values()])
    drops_NMQS = np.array(drops_by_text)
    agreement_NM = np.array(agreements_by_text)
    agreement_NM[:, list(methods).index(REFERENCE)] = np.nan  # The correlation of the reference with itself is omitted.
    return faithfulness_table(drops_NMQS, agreement_NM, list(methods), seed)


def _score_tokens(methods: Mapping[str, Attribution], review: Review, in_sample: bool) -> dict[str, Doubles]:
    """Return the scores `[draws, T]` of the tokens of a text by each method.

    Costly scores and reference scores (`sampled` is True) are computed only for the texts of a small sample; for other
    texts, they are NaN.
    """
    scores = {}
    for name, method in methods.items():
        is_computed = in_sample or not method.sampled
        scores[name] = method.scores(review) if is_computed else np.full((1, len(review.document)), np.nan)
    return scores


def _measure_margins(classifier: Classifier, run: Run) -> tuple[pd.DataFrame, list[str]]:
    """Return the table `margins.csv`, with a row for each measured text, and the names of the checkpoints.

    The margin of a text is the difference between its two largest logits. For each checkpoint, the table has a column
    with the mean mixing ratio of the text in the last layer. Shapes: N texts, C classes.
    """
    documents = read_reviews("measured", run.drawn_reviews)
    logits_NC = classifier.logits([document.ids.tolist() for document in documents])
    largest_N, second_N = logits_NC.topk(2).values.T
    names = [document.name for document in documents]
    label_names = run.drawn_reviews.documents.set_index("document")["label_name"]
    table = pd.DataFrame(
        {
            "document": names,
            "label": label_names.loc[names].to_numpy(),
            "predicted": [classifier.classes[label] for label in logits_NC.argmax(-1).tolist()],
            "margin": (largest_N - second_N).numpy(),
            "tokens": [len(document) for document in documents],
        }
    )
    ratios = _read_last_layer_ratios(run)
    return table.join(ratios, on="document"), ratios.columns.tolist()


def _read_last_layer_ratios(run: Run) -> pd.DataFrame:
    """Return the mean mixing ratio of each measured text in the last layer: rows are texts, columns are checkpoints."""
    means = run.table("measure/mixing")
    method = preferred_ratio(means["method"].unique())
    rows = run.table_rows("measure/mixing_by_review", {"method": method, "layer": means["layer"].max()})
    checkpoints = rows["checkpoint"].unique().tolist()
    return rows.pivot(index="document", columns="checkpoint", values="mean")[checkpoints]


def _draw_measured_reviews(seed: int, run: Run) -> list[Document]:
    """Return a sample of the measured texts, stratified by class."""
    measured = read_reviews("measured", run.drawn_reviews)
    labels_N = np.array([document.label for document in measured])  # the class of each of N texts
    return [measured[number] for number in draw_texts(labels_N, seed)]


def _read_training_reviews(classifier: Classifier, max_length: int, seed: int, run: Run) -> list[Document]:
    """Return a sample of the training texts for the probes, truncated and tokenised as in the stage `tokenize`."""
    reviews = store.read_split("train", run.reviews, ["label", "label_name"])
    drawn = stratified_draw(reviews["label"].to_numpy(), PROBE_TEXTS, seed)
    reviews = reviews.assign(document="train/" + reviews.index.astype(str), measured=False, predicted_label=-1)
    texts = list(with_texts(drawn, "train", reviews, run.reviews))
    if not texts:
        return []
    documents, tokens = tokenized_block(texts, max_length, classifier.tokenizer, classifier.base.config)
    return documents_of(documents, tokens)


def _load_bases(classifier: Classifier, checkpoints: Sequence[str], run: Run) -> Iterator[tuple[str, Any]]:
    """Yield the name and the model (without a task head) of each checkpoint; the classifier is not loaded again."""
    for name in checkpoints:
        if name == CAPTURED_CHECKPOINT:
            yield name, classifier.base
            continue
        base: Any = load_base(run.checkpoints[name])
        base.to(classifier.model.device)
        read_segments(base, classifier.tokenizer, run.drawn_reviews.pairs)
        yield name, base

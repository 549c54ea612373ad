"""Measure how much the predicted class's probability drops after replacing the highest-scored tokens, or all others.

    python -m stages faithfulness

The drops are compared with those for a random order of tokens. `class_use.csv` contains three analyses of the sampled
test texts: the effect of replacing attention values on the predicted class; predictions from single tokens, by the
classification head and by linear probes; and the correlation of the classifier's margin with the last layer's mixing
ratio. The stage writes `reports/plots/faithfulness/` and `reports/metrics/faithfulness.json`. `docs/measures.md`
defines each number.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from tqdm import tqdm

from attnmix.core.arithmetic.kernels import set_arithmetic
from attnmix.core.device import chosen_device, measuring_device
from attnmix.core.draw import stratified_draw
from attnmix.core.names import CAPTURED_CHECKPOINT
from attnmix.core.store import texts as store
from attnmix.core.store.runs import Run
from attnmix.core.store.writers import write_metrics, write_plot
from attnmix.faithfulness.attributions import RANDOM_REMOVAL, REFERENCE, Review, present_attributions
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
    # Measure the effect of token removal.
    removed = _measure_removals(classifier, parameters.faithfulness.max_length, parameters.seed, run)
    # Correlate the classifier's margin with the mixing ratio of the last layer.
    margins, checkpoints = _measure_margins(classifier, run)
    last_layer = int(run.table("measure/mixing")["layer"].max())
    correlations = margin_correlation(margins, checkpoints, last_layer)
    # Evaluate probes and interventions in a sample of the measured texts.
    measured = read_reviews("measured", run.drawn_reviews)
    labels_N = np.array([document.label for document in measured])
    documents = [measured[number] for number in draw_texts(labels_N, parameters.seed)]
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
    """Return the table `faithfulness.csv`. The texts sampled for token removal are truncated to `max_length` tokens.

    A method scores the tokens of a text. Token removal by costly scores and by reference scores is evaluated on a
    smaller sample of the texts; for all other texts, these scores are replaced by NaN. Shapes: N texts, M methods, T
    tokens, D draws of a score (one unless the score is random).
    """
    methods = present_attributions(classifier.family)
    generator = np.random.default_rng(seed)
    documents = [document.cut(max_length) for document in read_reviews("removed", run.drawn_reviews)]
    sample = set(np.linspace(0, len(documents) - 1, SAMPLED_REVIEWS).astype(int))  # indices of texts with costly scores
    drops = []
    agreements = []
    for number, document in enumerate(tqdm(documents, desc="token scores", unit="review", disable=None)):
        review = Review(classifier, document, generator, draw_donors(documents, number, generator))
        scores = {}
        for name, method in methods.items():
            if method.sampled and number not in sample:  # `sampled` is True for costly and reference scores
                scores[name] = np.full((1, len(document)), np.nan)
            else:
                scores[name] = method.scores(review)
        drops.append(list(probability_drops(review, scores).values()))
        reference_T = review.gradient_norm()  # every method is correlated with this reference score
        agreements.append([agreement(review, scores_DT, reference_T) for scores_DT in scores.values()])
    agreement_NM = np.array(agreements)
    agreement_NM[:, list(methods).index(REFERENCE)] = np.nan  # The correlation of the reference with itself is omitted.
    return faithfulness_table(np.array(drops), agreement_NM, list(methods), seed)


def _measure_margins(classifier: Classifier, run: Run) -> tuple[pd.DataFrame, list[str]]:
    """Return the table `margins.csv` and the names of the checkpoints.

    The margin of a text is the difference between its two largest logits. For each checkpoint, the table has a column
    with the mean mixing ratio of the text in the last layer.
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
    means = run.table("measure/mixing")
    method = preferred_ratio(means["method"].unique())
    ratios = run.table_rows("measure/mixing_by_review", {"method": method, "layer": means["layer"].max()})
    checkpoints = ratios["checkpoint"].unique().tolist()
    by_review = ratios.pivot(index="document", columns="checkpoint", values="mean")[checkpoints]
    return table.join(by_review, on="document"), checkpoints


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

"""Compare the integrated gradients of captum with the token scores of attnmix by the tests of `faithfulness`.

    python -m benchmarks.token_scores [--documents 100] [--steps 24] [--to benchmarks/token_scores.csv]

The command needs the results of `make repro`, and captum (`pip install captum`), which is not in the lock files. The
baseline of integrated gradients (Sundararajan et al., ICML 2017) is the text with all tokens except special tokens
replaced by [MASK]. The columns are those of `reports/plots/faithfulness/faithfulness.csv`, but the rank correlation is
with `decompx` instead of the gradient norm. Tests that replace tokens by [MASK] favour scores whose baseline also
consists of [MASK].
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from attnmix.core.arithmetic.kernels import set_arithmetic
from attnmix.core.device import chosen_device, measuring_device
from attnmix.core.errors import InputError
from attnmix.core.statistics import Doubles
from attnmix.core.store.runs import Run
from attnmix.faithfulness.attributions import ATTRIBUTIONS, RANDOM_REMOVAL, Review
from attnmix.faithfulness.classifier import Classifier
from attnmix.faithfulness.removal_tables import agreement, draw_donors, faithfulness_table, probability_drops
from attnmix.measures.documents import read_reviews
from stages.common.parameters import read_parameters

INTEGRATED_GRADIENTS, REFERENCE = "integrated_gradients", "decompx"
COMPARED = (RANDOM_REMOVAL, REFERENCE, "attnlrp", "gradient_x_input")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table of the comparison; return 0, or 1 if captum is not installed."""
    options = _parse_options(arguments)
    try:
        from captum.attr import LayerIntegratedGradients
    except ImportError:
        print("error: captum is not installed; install it with `pip install captum`", file=sys.stderr)
        return 1
    parameters = read_parameters()
    run = Run(Path())
    set_arithmetic(parameters.arithmetic)
    device = measuring_device(chosen_device())
    classifier = Classifier(run.finetuned, device, parameters.capture.batch_tokens // 2, run.drawn_reviews.pairs)
    if classifier.mask_id is None:
        raise InputError(f"{run.finetuned}: its tokenizer has no mask token; use a model with a mask token")
    words = classifier.base.get_submodule(classifier.family.word_embedding)
    gradients = LayerIntegratedGradients(lambda ids: classifier.model(input_ids=ids).logits, words)

    generator = np.random.default_rng(parameters.seed)
    reviews = read_reviews("removed", run.drawn_reviews)[: options.documents]
    documents = [document.cut(parameters.faithfulness.max_length) for document in reviews]
    drops = []  # by text: the drop in the predicted class's probability after removing tokens, for each score
    agreements = []  # by text: the rank correlation of each score with the reference
    for number, document in enumerate(tqdm(documents, unit="review", disable=None)):
        review = Review(classifier, document, generator, draw_donors(documents, number, generator))
        scores = {name: ATTRIBUTIONS[name].scores(review) for name in COMPARED}
        scores[INTEGRATED_GRADIENTS] = integrate_gradients(gradients, review, options.steps)[None]
        drops.append(list(probability_drops(review, scores).values()))
        reference_T = scores[REFERENCE][0]
        agreements.append([agreement(review, each, reference_T) for each in scores.values()])
    table = faithfulness_table(np.array(drops), np.array(agreements), list(scores), parameters.seed)
    table = table.rename(columns=lambda name: name.replace("derivative_", f"{REFERENCE}_"))
    table.round(4).to_csv(options.to, index=False, lineterminator="\n")
    print(table.query("share == 'all'").to_string(index=False))
    return 0


def _parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=100, help="number of texts")
    parser.add_argument("--steps", type=int, default=24, help="number of steps of the integral")
    parser.add_argument("--to", type=Path, default=Path("benchmarks/token_scores.csv"), help="file of the table")
    return parser.parse_args(arguments)


def integrate_gradients(gradients: Any, review: Review, steps: int) -> Doubles:
    """Return the integrated gradients `[T]` of the predicted class's logit with respect to the word embeddings.

    In the baseline, all tokens except special tokens are replaced by [MASK]. `gradients` is captum's
    `LayerIntegratedGradients`.
    """
    baseline = review.without(review.word_positions)
    device = review.classifier.model.device
    ids_1T = torch.tensor([review.ids], device=device)
    baseline_1T = torch.tensor([baseline], device=device)
    attributions_1TD = gradients.attribute(
        ids_1T, baselines=baseline_1T, target=review.predicted, n_steps=steps, internal_batch_size=steps
    )
    attributions_T = attributions_1TD[0].sum(-1)
    return np.asarray(attributions_T.detach().cpu().double().numpy())


if __name__ == "__main__":
    sys.exit(main())

"""The attribution methods that the stage `faithfulness` compares; each method scores every token of a text.

Declare new methods here. Shapes: T tokens, L layers, C classes.
"""

import logging
from collections.abc import Callable
from functools import cached_property, partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attnmix.core.selections import check_range
from attnmix.core.statistics import Doubles
from attnmix.faithfulness.classifier import Classifier, Decomposition, Gradients, decomposition_obstacle
from attnmix.faithfulness.relevance import relevance_obstacle
from attnmix.measures.contributions import contributions, layer_contributions
from attnmix.measures.documents import CLASSES, Document
from attnmix.measures.layers import LayerPass
from attnmix.measures.matrices import select_layer_matrices
from attnmix.models.families import Family

RANDOM_REMOVAL = "random"
REFERENCE = "gradient_norm"  # all other methods' scores are rank-correlated with the scores of this method
RANDOM_DRAWS = 1


def word_positions(document: Document) -> npt.NDArray[np.int64]:
    """Return the sorted positions `[W]` of non-special tokens."""
    special = [CLASSES.index(name) for name in ("cls", "sep")]
    return np.flatnonzero(~np.isin(document.classes, special))


class LayerResults(NamedTuple):
    """Results of one forward pass for a text; several kinds of token scores are computed from them."""

    matrices: dict[str, Tensor]
    """Matrices and rollouts `[L, T, T]` by name."""
    contributions_T: Tensor | None
    """Each token's contribution to the predicted class's logit; None if the logit cannot be decomposed."""


class Review:
    """A text and the classifier's outputs for it; the scores of the text's tokens are computed from these outputs.

    Costly outputs are computed at first use and cached. `donor_ids` `[T]` are the IDs of tokens from other texts;
    `with_donors` uses them as replacements.
    """

    def __init__(
        self,
        classifier: Classifier,
        document: Document,
        generator: np.random.Generator,
        donor_ids: npt.NDArray[np.integer] | None = None,
    ) -> None:
        """Classify the text, and sample random scores for its tokens."""
        self.classifier = classifier
        self.document = document
        self.ids = document.ids.tolist()
        self.donor_ids = donor_ids
        self.word_positions = word_positions(document)
        logits_C = classifier.logits([self.ids])[0]
        probabilities_C = logits_C.softmax(-1)
        self.logits_C: Doubles = logits_C.numpy()
        self.predicted = int(logits_C.argmax())
        self.probability = float(probabilities_C[self.predicted])
        self.random: Doubles = generator.random((RANDOM_DRAWS, len(self.ids)))

    @cached_property
    def gradients(self) -> Gradients:
        """The derivatives of the predicted class's logit."""
        return self.classifier.gradients(self.ids, self.predicted)

    def gradient_norm(self) -> Doubles:
        """Return |d logit / d word_embedding_j| for each token j, `[T]`."""
        return _convert_to_float64(self.gradients.logit_by_words_TD.norm(dim=-1))

    def gradient_by_input(self) -> Doubles:
        """Return the scalar product of d logit / d word_embedding_j and word_embedding_j for each token j, `[T]`."""
        products_TD = self.gradients.logit_by_words_TD * self.gradients.words_TD
        return _convert_to_float64(products_TD.sum(-1))

    def matrix_row(self, method: str) -> Doubles:
        """Return a row `[T]` of the last layer's matrix: the weights of all tokens for the token that the head reads.

        `method` is the name of a matrix or rollout `[T, T]`. The head is the classification head. If it reads several
        tokens, the mean of their rows is returned.
        """
        last_TT = self.layer_results.matrices[method][-1].cpu()
        is_read_T = self.gradients.read_T.cpu()
        return _convert_to_float64(last_TT[is_read_T].mean(0))

    def decomposed(self) -> Doubles:
        """Return each token's contribution `[T]` to the predicted class's logit; NaN if decomposition is impossible."""
        return self._fill_undefined(self.layer_results.contributions_T)

    def attnlrp(self) -> Doubles:
        """Return each token's relevance `[T]` for the predicted class's logit; NaN if no relevance can be computed."""
        read_position = self.gradients.read_position
        relevance_T = None
        if read_position >= 0:  # negative if the head reads several tokens
            relevance_T = self.classifier.attnlrp(self.ids, self.predicted, read_position, self.document.name)
        return self._fill_undefined(relevance_T)

    def _fill_undefined(self, scores_T: Tensor | None) -> Doubles:
        """Return the scores of the tokens, or NaN for all tokens if `scores_T` is None."""
        if scores_T is None:
            return np.full(len(self.ids), np.nan)
        return _convert_to_float64(scores_T)

    def left_out(self) -> Doubles:
        """Return, for each token `[T]`, the drop in the predicted class's logit after this token alone is removed.

        Special tokens are not removed; their drop is NaN.
        """
        texts = [self.without(np.array([place])) for place in self.word_positions]
        logits_NC = self.classifier.logits(texts)
        predicted_logits_N = logits_NC[:, self.predicted].numpy()
        drops_T = np.full(len(self.ids), np.nan)
        drops_T[self.word_positions] = self.logits_C[self.predicted] - predicted_logits_N
        return drops_T

    def without(self, places: npt.NDArray[np.int64]) -> list[int]:
        """Return the text's token IDs.

        Those at the positions `places` are masked, or deleted if there is no mask token.
        """
        mask_id = self.classifier.mask_id
        removed = set(places.tolist())
        check_range("positions: token", removed, range(len(self.ids)))
        ids = []
        for place, token in enumerate(self.ids):
            if place not in removed:
                ids.append(token)
            elif mask_id is not None:
                ids.append(mask_id)
        return ids

    def with_donors(self, places: npt.NDArray[np.int64]) -> list[int]:
        """Return the text's token IDs with donor tokens at the positions `places`; an empty list without donors."""
        if self.donor_ids is None:
            return []
        ids = np.array(self.ids)
        ids[places] = self.donor_ids[places]
        return [int(token) for token in ids]

    @cached_property
    def layer_results(self) -> LayerResults:
        """The `SCORING_MATRICES` and the tokens' contributions to the predicted logit, from one forward pass."""
        names = [name for name in SCORING_MATRICES if not _find_matrix_obstacle(name, self.classifier.family)]
        matrices = select_layer_matrices(names)
        decomposition = self._prepare_decomposition()

        def measure_layer(layer_pass: LayerPass) -> dict[str, Tensor]:
            """Return a layer's matrices by name, and propagate the decomposition through the layer."""
            if decomposition is not None:
                decomposition.visit(layer_pass)
            return layer_contributions(matrices, layer_pass)

        # `head_calls` are the calls of the Linears in the classification head.
        by_layer, logits_C, head_calls = self.classifier.map_layers(measure_layer, self.ids)
        contributions_T = None
        if decomposition is not None:
            contributions_T = decomposition.relevance(head_calls, logits_C, self.predicted, self.document.name)
        with torch.inference_mode():
            return LayerResults(contributions(names, by_layer), contributions_T)

    def _prepare_decomposition(self) -> Decomposition | None:
        """Return the decomposition of the vector that the head reads.

        Return None if the model family does not support the decomposition or the head reads several tokens.
        """
        read_position = self.gradients.read_position  # negative if the head reads several tokens
        if decomposition_obstacle(self.classifier.family) is not None or read_position < 0:
            return None
        return Decomposition(self.classifier, read_position)


def _convert_to_float64(scores: Tensor) -> Doubles:
    """Return a tensor as a float64 array."""
    return np.asarray(scores.cpu().double().numpy())


class Attribution(NamedTuple):
    """A method that scores each token; a higher score indicates a larger influence on the class."""

    formula: Callable[[Review], Doubles]  # returns `[T]`, or `[draws, T]` for random scores
    obstacle: Callable[[Family], str | None] = lambda family: None  # returns why a family lacks the score, or None
    sampled: bool = False  # True if the score (a costly one or a reference) is evaluated on fewer texts

    def scores(self, review: Review) -> Doubles:
        """Return the scores `[draws, T]`. Deterministic scores have one draw."""
        return np.atleast_2d(self.formula(review))


def _find_matrix_obstacle(name: str, family: Family) -> str | None:
    """Return the reason why the matrix or rollout `name` cannot score tokens in a model family, or None if it can."""
    if len(family.stacks) > 1:
        return "its decoder inputs are shifted by one token, and rollouts do not cross from encoder to decoder"
    reasons_by_measure = family.absent()  # for all measures that the family lacks
    return reasons_by_measure.get(name.removesuffix("_rollout"))


def _find_attnlrp_obstacle(family: Family) -> str | None:
    """Return the reason why AttnLRP cannot be applied to a model family, or None if it can be applied."""
    return decomposition_obstacle(family) or relevance_obstacle(family)


SCORING_MATRICES = ("attention", "attention_rollout", "alti_rollout")
"""Matrices from which `Review.matrix_row` computes scores."""
ATTRIBUTIONS = {
    RANDOM_REMOVAL: Attribution(lambda review: review.random),
    **{
        name: Attribution(
            partial(Review.matrix_row, method=name),
            partial(_find_matrix_obstacle, name),
            sampled=name != "alti_rollout",
        )
        for name in SCORING_MATRICES
    },
    "decompx": Attribution(Review.decomposed, decomposition_obstacle),  # Modarressi et al., ACL 2023 (biases separate)
    "attnlrp": Attribution(Review.attnlrp, _find_attnlrp_obstacle),  # Achtibat et al., ICML 2024
    REFERENCE: Attribution(Review.gradient_norm, sampled=True),  # Simonyan et al., 2014
    "gradient_x_input": Attribution(Review.gradient_by_input, sampled=True),  # Shrikumar et al., 2017
    "leave_one_out": Attribution(Review.left_out, sampled=True),  # Li et al., 2016
}
"""All attribution methods by name."""


def present_attributions(family: Family) -> dict[str, Attribution]:
    """Return the methods available in a model family, and log the reasons for missing methods."""
    present = {}
    for name, attribution in ATTRIBUTIONS.items():
        reason = attribution.obstacle(family)
        if reason:
            logging.info("%s: not available in the model family %s (%s)", name, family.model_type, reason)
        else:
            present[name] = attribution
    return present

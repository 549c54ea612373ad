"""One review as the token scores see it: what is computed of it is computed once, when a score asks for it.

Shapes: T tokens, D hidden, L layers, C classes.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from attnmix.core.points import LAYER_POINTS, PREACTIVATION
from attnmix.faithfulness.classifier import Classifier, Gradients
from attnmix.faithfulness.decomposition import Decomposition
from attnmix.measures.contributions import contributions, layer_contributions
from attnmix.measures.documents import CLASSES, Document
from attnmix.measures.layers import LayerPass, Linear
from attnmix.measures.matrices import LayerMatrix
from attnmix.models.families import PROJECTED

Tensor = torch.Tensor
Doubles = npt.NDArray[np.float64]


class Review:
    """A document in front of the classifier."""

    def __init__(
        self,
        classifier: Classifier,
        document: Document,
        matrices: list[LayerMatrix],
        values: list[Linear] | None,
        generator: np.random.Generator,
        random_draws: int,
    ) -> None:
        """`matrices` of each layer are computed with the pass, the score's decomposition where `values` are given."""
        self.classifier, self.document, self.ids = classifier, document, document.ids.tolist()
        special = [CLASSES.index(name) for name in ("cls", "sep")]
        self.words = np.flatnonzero(~np.isin(document.classes, special))
        """Positions of the tokens that are not special."""
        self.logits_C: Doubles = classifier.logits([self.ids])[0].numpy()
        self.predicted = int(self.logits_C.argmax())
        self._matrices, self._values = matrices, values
        self._random = generator.random((random_draws, len(self.ids)))

    @property
    def random(self) -> Doubles:
        """Random scores `[draws, T]`."""
        return self._random

    @cached_property
    def gradients(self) -> Gradients:
        """Of the predicted class's logit."""
        return self.classifier.gradients(self.ids, self.predicted)

    def gradient_norm(self) -> Doubles:
        """|d logit / d word_embedding_j| `[T]`."""
        return _doubles(self.gradients.of_words_TD.norm(dim=-1))

    def gradient_by_input(self) -> Doubles:
        """d logit / d word_embedding_j . word_embedding_j `[T]`."""
        return _doubles((self.gradients.of_words_TD * self.gradients.words_TD).sum(-1))

    def matrix_row(self, method: str) -> Doubles:
        """What each token gives to the one that the head reads, by the last layer's matrix of `method`, `[T]`.

        Where it reads several, the mean of their rows.
        """
        read = self.gradients.read_T.cpu()
        return _doubles(self._passed[0][method][-1].cpu()[read].mean(0))

    def decomposed(self) -> Doubles:
        """Each token's part of the predicted class's logit `[T]`; NaN where the head cannot be taken apart."""
        parts_JC = self._passed[1]
        if parts_JC is None:
            return np.full(len(self.ids), np.nan)
        return _doubles(parts_JC[:-1, self.predicted])

    def left_out(self) -> Doubles:
        """The fall of the predicted class's logit without each token that is not special `[T]`; NaN for the others."""
        without = self.classifier.logits([self.without(np.array([place])) for place in self.words])
        found = np.full(len(self.ids), np.nan)
        found[self.words] = self.logits_C[self.predicted] - without[:, self.predicted].numpy()
        return found

    def without(self, places: npt.NDArray[np.int64]) -> list[int]:
        """Token ids with mask tokens at `places`, or without these where the tokenizer has no mask token."""
        mask, gone = self.classifier.mask_id, set(places.tolist())
        if mask is None:
            return [token for place, token in enumerate(self.ids) if place not in gone]
        return [mask if place in gone else token for place, token in enumerate(self.ids)]

    @cached_property
    def _passed(self) -> tuple[dict[str, Tensor], Tensor | None]:
        """Matrices and rollouts `[L, T, T]` by name, and the parts of the logits `[T + 1, C]`."""
        read = self.gradients.read_T
        decomposition = None
        if self._values is not None and int(read.sum()) == 1:
            decomposition = Decomposition(self._values, int(read.nonzero()[0]))
        by_layer: list[dict[str, Tensor]] = []

        def visit(seen: LayerPass) -> None:
            by_layer.append(layer_contributions(self._matrices, seen))
            if decomposition is not None:
                decomposition.visit(seen)

        points = (*LAYER_POINTS, PROJECTED, PREACTIVATION)
        logits_C, calls = self.classifier.pass_of(self.ids, visit, points)
        parts_JC = None
        with torch.inference_mode():
            matrices = contributions(self._matrices, by_layer)
            if decomposition is not None:
                parts_JC = decomposition.logits(self.classifier, calls, logits_C, self.document.name)
        return matrices, parts_JC


def _doubles(scores: Tensor) -> Doubles:
    return np.asarray(scores.double().cpu().numpy())

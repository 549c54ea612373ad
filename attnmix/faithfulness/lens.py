"""Predictions from single token vectors by the classification head, and by linear probes tested on held-out texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor
from transformers import PreTrainedModel

from attnmix.core.errors import InputError
from attnmix.core.selections import check_range, whole_number
from attnmix.models.capture_points import first_of
from attnmix.models.families import family_of, find_layers

BLOCK_VECTORS = 4096  # maximum number of vectors per forward pass of the head
REGULARISATION = 0.01  # parameter C of the logistic regression on standardised vectors
ITERATIONS = 1000


def head_scores(classifier: PreTrainedModel, vectors_ND: Tensor, token_id: int) -> Tensor:
    """Return the logits `[N, C]` of the classification head for vectors `[N, D]` of any token and layer.

    This is the class lens (Vilas et al., NeurIPS 2023). Each vector replaces the last layer's output in a forward pass
    for a text of one token, `token_id`, so that the vector passes through the modules after the last layer (final norm,
    pooler, head). The head must read this token; for a head that searches for the end token, pass the ID of the end
    token.

    Raise `InputError` if the width of the vectors differs from the model's, or if the token ID has no embedding.
    """
    embeddings: Any = classifier.get_input_embeddings()
    token_id = whole_number("token_id", token_id)
    check_range("token_id: token", [token_id], range(embeddings.num_embeddings))
    if vectors_ND.ndim != 2:
        raise InputError(f"vectors: shape {list(vectors_ND.shape)}; allowed: [vectors, width]")
    base: Any = classifier.base_model
    stack = family_of(base.config).stacks[-1]
    last = find_layers(base, stack)[-1]
    scores = []
    for block_ND in vectors_ND.split(BLOCK_VECTORS):
        replace_output = _create_replacement(block_ND, list(vectors_ND.shape))
        ids = torch.full((len(block_ND), 1), token_id, device=classifier.device)  # a text of one token for each vector
        mask = torch.ones_like(ids)
        with last.register_forward_hook(replace_output), torch.inference_mode():
            logits = classifier(input_ids=ids, attention_mask=mask).logits
        if logits.ndim > 2:  # a head that classifies each token
            logits = logits.flatten(1)
        scores.append(logits)
    return torch.cat(scores)


def _create_replacement(block_ND: Tensor, given_shape: list[int]) -> Callable[[Any, Any, Any], Any]:
    """Return a forward hook that replaces the vectors in a layer's output by `block_ND`; each text has one token.

    The hook raises `InputError` if the vectors do not have the layer's width. `given_shape` is the shape of the user's
    vectors, for the error message.
    """

    def replace_output(_module: Any, _inputs: Any, output: Any) -> Any:
        width = first_of(output).shape[-1]
        if block_ND.shape[1] != width:
            raise InputError(f"vectors: shape {given_shape}; allowed: [vectors, {width}]")
        vectors_N1D = block_ND.unsqueeze(1).to(first_of(output))
        if isinstance(output, tuple):
            return (vectors_N1D, *output[1:])
        return vectors_N1D

    return replace_output


def probe_predictions(
    train_ND: npt.NDArray[Any], train_N: Sequence[Any], test_ND: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return the labels that a logistic regression, fitted to training vectors, predicts for test vectors.

    `train_ND` and `test_ND` are vectors `[vectors, width]`, and `train_N` are the labels of the training vectors.
    Training and test vectors must come from different texts; otherwise, a probe can recognise the text instead of the
    label. A control task with random labels measures how much a probe memorises (Hewitt and Liang, EMNLP 2019).
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if len(set(train_N)) < 2:
        raise InputError("probe: all training vectors have the same label; pass vectors of two or more labels")
    _check_shapes(np.shape(train_ND), len(train_N), np.shape(test_ND))
    regression = LogisticRegression(C=REGULARISATION, max_iter=ITERATIONS)
    probe = make_pipeline(StandardScaler(), regression)
    with threadpool_limits(1):  # The matrix products are so small that several threads would be slower.
        probe.fit(np.asarray(train_ND), train_N)
        predictions = probe.predict(np.asarray(test_ND))
    return np.asarray(predictions)


def _check_shapes(train_shape: tuple[int, ...], labels: int, test_shape: tuple[int, ...]) -> None:
    """Raise `InputError` unless both shapes are `[vectors, width]` with equal widths.

    `labels` is the number of labels, which must be that of the training vectors.
    """
    are_matrices = len(train_shape) == 2 and len(test_shape) == 2
    if not are_matrices or train_shape[1] != test_shape[1] or train_shape[0] != labels:
        problem = f"training vectors {train_shape} with {labels} labels, test vectors {test_shape}"
        raise InputError(
            f"probe: {problem}; pass arrays [vectors, width] of the same width, and a label for each vector"
        )


def probe_accuracy(
    train_ND: npt.NDArray[Any], train_N: Sequence[Any], test_ND: npt.NDArray[Any], test_N: Sequence[Any]
) -> float:
    """Return the share of test vectors whose label (in `test_N`) is the prediction of `probe_predictions`."""
    predictions = probe_predictions(train_ND, train_N, test_ND)
    is_right = predictions == np.asarray(test_N)
    return float(is_right.mean())

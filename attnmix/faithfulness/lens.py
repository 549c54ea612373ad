"""The classifier's own head, and linear probes on held-out texts, applied to single token vectors."""

from __future__ import annotations

from collections.abc import Sequence
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

BLOCK_VECTORS = 4096  # vectors per batch of the head
REGULARISATION = 0.01  # C of the logistic regression, on standardised vectors
ITERATIONS = 1000


def head_scores(classifier: PreTrainedModel, vectors_ND: Tensor, token_id: int) -> Tensor:
    """Return the logits `[N, C]` of the head for single vectors in place of the last layer's output.

    The modules after the last layer (final norm, pooler, head) are unchanged; each vector replaces the only token of a
    text, `token_id`. The head must read this token: use the end token if the head searches for it. Applied to vectors
    of any token and layer, this is the class lens (Vilas et al., NeurIPS 2023).

    Raise `InputError` for vectors of a different width, and for a token that the model does not have.
    """
    embeddings: Any = classifier.get_input_embeddings()
    check_range("token_id: token", [whole_number("token_id", token_id)], range(embeddings.num_embeddings))
    if vectors_ND.ndim != 2:
        raise InputError(f"vectors: shape {list(vectors_ND.shape)}; allowed: [vectors, width]")
    base: Any = classifier.base_model
    stack = family_of(base.config).stacks[-1]
    last = find_layers(base, stack)[-1]
    scores = []
    for block_ND in vectors_ND.split(BLOCK_VECTORS):

        def replaced(_module: Any, _inputs: Any, output: Any, block_ND: Tensor = block_ND) -> Any:
            width = first_of(output).shape[-1]
            if block_ND.shape[1] != width:
                raise InputError(f"vectors: shape {list(vectors_ND.shape)}; allowed: [vectors, {width}]")
            vectors = block_ND.unsqueeze(1).to(first_of(output))
            return (vectors, *output[1:]) if isinstance(output, tuple) else vectors

        ids = torch.full((len(block_ND), 1), token_id, device=classifier.device)
        with last.register_forward_hook(replaced), torch.inference_mode():
            logits = classifier(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        scores.append(logits.flatten(1) if logits.ndim > 2 else logits)
    return torch.cat(scores)


def probe_predictions(
    train_ND: npt.NDArray[Any], train_N: Sequence[Any], test_ND: npt.NDArray[Any]
) -> npt.NDArray[Any]:
    """Return predicted labels of test vectors, by a logistic regression fitted to training vectors.

    Training and test vectors must come from different texts; otherwise a probe can recognise the text instead of the
    label. A control task measures the probe's memorisation, with random labels of texts (Hewitt and Liang, EMNLP 2019).
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if len(set(train_N)) < 2:
        raise InputError("probe: training vectors of a single label; allowed: two labels or more")
    shapes = [np.shape(vectors_ND) for vectors_ND in (train_ND, test_ND)]
    if any(len(shape) != 2 for shape in shapes) or shapes[0][1] != shapes[1][1] or shapes[0][0] != len(train_N):
        problem = f"training vectors of shape {shapes[0]} with {len(train_N)} labels, tested on shape {shapes[1]}"
        raise InputError(f"probe: {problem}; allowed: [vectors, width] of one width, and a label for each vector")
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=REGULARISATION, max_iter=ITERATIONS))
    with threadpool_limits(1):  # The products are small, and threads would wait for each other.
        return np.asarray(probe.fit(np.asarray(train_ND), train_N).predict(np.asarray(test_ND)))


def probe_accuracy(
    train_ND: npt.NDArray[Any], train_N: Sequence[Any], test_ND: npt.NDArray[Any], test_N: Sequence[Any]
) -> float:
    """Return the accuracy of `probe_predictions`."""
    return float((probe_predictions(train_ND, train_N, test_ND) == np.asarray(test_N)).mean())

"""The measures that are compared: each gives every token of a review a score, declared with its formula.

A further one enters by its declaration here alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from attnmix.faithfulness.decomposition import why_not
from attnmix.faithfulness.review import Review
from attnmix.measures.matrices import LAYER_MATRICES, MATRICES
from attnmix.models.families import Family

RANDOM = "random"
REFERENCE = "gradient_norm"
"""The derivative that the others' ranks are compared with."""


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """A score of each token: the higher, the more the class is said to rest on it."""

    name: str
    label: str
    source: str
    formula: Callable[[Review], npt.NDArray[np.float64]]
    """To `[tokens]`, or `[draws, tokens]` of a score that is drawn."""
    absent: Callable[[Family], str | None] = lambda family: None
    """Why a family does not have it, if so."""


def _of_matrix(name: str, label: str | None = None) -> Attribution:
    """The row of the token that the head reads, in the last layer."""
    matrix = MATRICES[name]
    return Attribution(
        name=name,
        label=label or matrix.label,
        source=matrix.source,
        formula=lambda review: review.matrix_row(name),
        absent=partial(_no_matrix, layer_matrix(name)),
    )


def layer_matrix(name: str) -> str:
    """The matrix of one layer that a matrix or rollout is made of."""
    return name if name in LAYER_MATRICES else name.removesuffix("_rollout")


def _no_matrix(name: str, family: Family) -> str | None:
    if len(family.stacks) > 1:
        return "its decoder's rows hold the token before, and no rollout passes from one stack to the other"
    return family.absent().get(name)


_DECLARED = (
    Attribution(name=RANDOM, label="Random", source="chance", formula=lambda review: review.random),
    _of_matrix("attention", "Attention, last layer"),
    _of_matrix("attention_rollout"),
    _of_matrix("value_zeroing_rollout"),
    _of_matrix("alti_rollout"),
    _of_matrix("globenc_rollout"),
    Attribution(
        name="decompx",
        label="DecompX (biases apart)",
        source="Modarressi et al., ACL 2023",
        formula=lambda review: review.decomposed(),
        absent=why_not,
    ),
    Attribution(
        name=REFERENCE,
        label="Gradient norm",
        source="Simonyan et al., 2014",
        formula=lambda review: review.gradient_norm(),
    ),
    Attribution(
        name="gradient_x_input",
        label="Gradient x input",
        source="Shrikumar et al., 2017",
        formula=lambda review: review.gradient_by_input(),
    ),
    Attribution(
        name="leave_one_out",
        label="Leave one out",
        source="Li et al., 2016",
        formula=lambda review: review.left_out(),
    ),
)
ATTRIBUTIONS: dict[str, Attribution] = {each.name: each for each in _DECLARED}
"""Every token score by its name."""
MATRICES_READ = [name for name in LAYER_MATRICES if any(layer_matrix(each) == name for each in ATTRIBUTIONS)]
"""The matrices of one layer that they read."""

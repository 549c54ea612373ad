"""Wording that depends on the origin of a page's numbers: a pipeline run, or texts measured with the API.

The page of a pipeline run refers to parameters and folders. A page from `attnmix show`, `attnmix serve` or
`Measures.to_html` refers to Python calls instead, because it has neither parameters nor folders.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from attnmix.core.store.results import Results, TextResults
from attnmix.figures.labels import CHECKPOINTS
from attnmix.page.arrays import visible


class Wording(NamedTuple):
    """Words and sentences for a page whose numbers come from one origin, such as a pipeline run."""

    texts: str
    """The noun for measured texts."""
    truncation: str
    """The parameter or limit that truncates texts."""
    documents_elsewhere: str
    """A sentence with the location of data for texts that are not on the page."""
    matrices_elsewhere: str
    """A sentence with the location of contribution matrices that are not on the page."""
    no_matrices: str
    """A sentence that is shown if no text has contribution matrices."""
    heads_elsewhere: str
    """A sentence with the location of queries and keys that are not on the page."""
    map_limit: str
    """The parameter that limits the number of tokens on a map; empty if there is none."""
    neighbours: str
    """The parameter or phrase for the number of neighbours in UMAP."""


RUN_WORDING = Wording(
    texts="reviews",
    truncation="capture.max_length",
    documents_elsewhere="Their features, maps and ratios are in features/.",
    matrices_elsewhere="It is in features/inspect/contributions.",
    no_matrices="To measure matrices, list them in measure.matrices.",
    heads_elsewhere="They are in features/inspect/heads.",
    map_limit="umap.max_points",
    neighbours="umap.n_neighbors",
)
TEXT_WORDING = Wording(
    texts="texts",
    truncation="max_length of attnmix.measure, or the model's maximum length",
    documents_elsewhere="In Python, the result of attnmix.measure has their ratios and matrices.",
    matrices_elsewhere="In Python, the result's method matrix returns it.",
    no_matrices="This page was written without contribution matrices.",
    heads_elsewhere="The page of a shorter text contains them.",
    map_limit="",
    neighbours="the number of neighbours in UMAP",
)


class ModelWording(NamedTuple):
    """Wording for two models: a model before and after fine-tuning, or two named models."""

    labels: Mapping[str, str]
    """The labels of the models, by checkpoint."""
    states: str
    """A format string for the values in both models, with the fields `before` and `after`."""
    headline_states: str
    """A format string for headlines, with the fields `before` and `after`."""
    by_change: str
    """The cause of a change, as a phrase that follows a noun."""
    change: str
    """The cause of a change, as the subject of a sentence."""


FINETUNING_WORDING = ModelWording(
    labels=CHECKPOINTS,
    states="{before} before and {after} after fine-tuning",
    headline_states="{before} before fine-tuning, {after} after",
    by_change="by fine-tuning",
    change="fine-tuning",
)


def model_wording_of(run: Results) -> ModelWording:
    """Return the wording for the two models of a page: two named models, or a model before and after fine-tuning."""
    if not isinstance(run, TextResults) or run.model_names is None:
        return FINETUNING_WORDING
    first_name, second_name = run.model_names
    first = _replace_braces(first_name)
    second = _replace_braces(second_name)
    first_checkpoint, second_checkpoint = CHECKPOINTS  # the results of the named models have these keys, too
    return ModelWording(
        labels={first_checkpoint: first, second_checkpoint: second},
        states=f"{{before}} in {first} and {{after}} in {second}",
        headline_states=f"{{before}} in {first}, {{after}} in {second}",
        by_change=f"from {first} to {second}",
        change=f"replacing {first} by {second}",
    )


def _replace_braces(name: str) -> str:
    """Return a model's name with parentheses instead of braces, which mark terms of the glossary."""
    return visible(name, kept="").translate({ord("{"): "(", ord("}"): ")"})


def wording_of(run: Results) -> Wording:
    """Return the wording for the origin of a page's numbers."""
    return TEXT_WORDING if isinstance(run, TextResults) else RUN_WORDING


def detailed_documents_of(run: Results) -> list[str]:
    """Return the names of the texts with token-level own shares and exact parts; an empty list if all have them."""
    return list(run.detailed_documents) if isinstance(run, TextResults) else []

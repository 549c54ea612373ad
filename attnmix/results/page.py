"""The interactive page of texts in one model or in two compared models."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from transformers import PreTrainedModel

from attnmix.core.names import CHECKPOINT_NAMES
from attnmix.core.settings import MeasureParameters
from attnmix.core.store.results import TextResults
from attnmix.measures.engine import Measurements
from attnmix.model import Model, quiet
from attnmix.models.copies import copy_model
from attnmix.page.assembly import page_text
from attnmix.page.sentences import Subject
from attnmix.runs.text_results import SLOW_MATRICES, TextMeasurer
from attnmix.runs.tokens import TokenizedTexts

LEFT_OUT = "{owner}.show(whole=True) and {owner}.to_html(path) create the whole page, with heads and all matrices."
"""The sentence about the omitted data on a small page."""


def models_page(
    models: Sequence[Model],
    names: tuple[str, ...],
    tokenized: TokenizedTexts,
    methods: Sequence[str],
    owner: str,
    *,
    whole: bool = True,
    note: str = "",
    known: Sequence[Measurements] = (),
) -> str:
    """Return the HTML of the page that shows the measures of the texts in one model, or in two compared models.

    Args:
        models: One model, or two models with the same tokens and number of layers. An empty list is sufficient if the
            page is cached in `known`.
        names: The display name of each model.
        tokenized: The texts.
        methods: The mixing ratios common to all models.
        owner: The name of the object that creates the page: `result` or `comparison`.
        whole: False to omit attention heads and, usually, most matrices, for a small page.
        note: A sentence on data that the page does not show.
        known: The existing measurements of each model, with the same `methods`. Values that the page needs are added to
            these measurements.
    """
    # Only the page of a single result is cached. The keys of the cache are True for the whole page and False for the
    # small one.
    cache = known[0].pages if len(known) == 1 else {}
    if whole not in cache:
        cache[whole] = _measure_results(models, tokenized, methods, whole, known)
    results: TextResults = cache[whole]
    results.model_names = names if len(names) > 1 else None
    subject = models_subject(names)
    if note:
        subject = replace(subject, origins=[*subject.origins, note])
    if not whole:
        subject = replace(subject, left_out=LEFT_OUT.format(owner=owner))
    return page_text(results, subject)


def models_subject(names: Sequence[str]) -> Subject:
    """Return the `Subject` of a page that shows one model, or two compared models."""
    if len(names) == 1:
        return Subject(names[0], origins=[f"The model is {names[0]}."])
    origin = f"The models are {names[0]} (before) and {names[1]} (after). Maps show vectors of the second model."
    return Subject(f"{names[0]} and {names[1]}", origins=[origin])


def _measure_results(
    models: Sequence[Model],
    tokenized: TokenizedTexts,
    methods: Sequence[str],
    whole: bool,
    known: Sequence[Measurements],
) -> TextResults:
    """Return the content of a page that shows one model, or two compared models.

    `known` contains the existing measurements of each model, which are not computed again. If `whole` is False,
    attention heads and the matrices that `TextResults.without_heads` removes are omitted.
    """
    last = models[-1]  # all models have the same tokens, so its tokenizer serves for all
    with ExitStack() as stack, quiet():
        bases: dict[str, PreTrainedModel] = {}
        # `TextMeasurer` identifies models by checkpoint names, even if they do not belong to a run.
        for checkpoint, model in zip(CHECKPOINT_NAMES, models, strict=False):
            base = stack.enter_context(model.observed(tokenized.pairs))
            if any(_share_modules(base, other) for other in bases.values()):
                base = copy_model(base)  # because both models are observed at the same time
            bases[checkpoint] = base
        matrices = MeasureParameters().matrices
        if len(models) > 1:  # The slow matrices would take twice as long.
            matrices = [name for name in matrices if name not in SLOW_MATRICES]
        measurer = TextMeasurer(bases, last.tokenizer, last.pad_token_id, methods, matrices, tokenized.pairs)
        measurements = dict(zip(bases, known, strict=False))
        results = measurer.results(tokenized, measurements, with_heads=whole)
    if not whole:
        return results.without_heads()
    return results


def _share_modules(first: PreTrainedModel, second: PreTrainedModel) -> bool:
    """Return True if two models have a module in common."""
    modules = {id(module) for module in first.modules()}
    return any(id(module) in modules for module in second.modules())

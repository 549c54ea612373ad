"""What a page says of its run beside the views: of a run of the whole pipeline, or of a few texts alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from attnmix.core.options import Parameters
from attnmix.figures.labels import CHECKPOINTS
from attnmix.measures.ratios import RATIOS, preferred_ratio
from attnmix.page import evidence, sentences
from attnmix.page.sentences import percent
from attnmix.store.maps import made_layouts
from attnmix.store.reports import read_metrics, read_mixing

EXAMPLES = (
    "Numbers of these texts alone: other texts have others. Where there are several, intervals are over them; one text "
    "has none."
)

OF_REVIEWS = (
    *("dataset.", "finetune.", "faithfulness.", "capture.documents", "capture.drawn"),
    *("measure.documents", "measure.gradient_"),
)
"""How parameters begin that say nothing of texts alone."""


class Told(NamedTuple):
    """The words, and what the measured checkpoints are called, the captured one last."""

    checkpoints: Mapping[str, str]
    dataset: str | None
    facts: Mapping[str, str]
    headline: str
    lead: str
    measured: str
    intervals: str
    findings: list[str]
    cautions: list[str]
    changed: list[tuple[str, str, str]]
    origins: list[str]
    computed_on: str


def of_run(parameters: Parameters, tokens: pd.DataFrame) -> Told:
    """From reviews, a classifier that was fine-tuned on them, and the captured `tokens`."""
    facts = sentences.facts()
    return Told(
        checkpoints=CHECKPOINTS,
        dataset=sentences.called(parameters.dataset.name),
        facts=facts,
        headline=sentences.headline(),
        lead=sentences.mixing(read_mixing()[0])[0],
        measured=f"Ratios and controls are of the {facts['reviews measured']} test reviews that were measured, "
        "derivatives of a few of them, maps of the captured texts: examples, which need not be like them.",
        intervals=", with 95 % intervals over reviews",
        findings=sentences.findings(tokens["document"].unique().tolist()),
        cautions=sentences.cautions(parameters),
        changed=sentences.changed_parameters(parameters),
        origins=sentences.origins(parameters),
        computed_on=sentences.computed_on(),
    )


def of_texts(parameters: Parameters, tokens: pd.DataFrame) -> Told:
    """From the captured `tokens` in a model as it is: no reviews, no classifier, no derivatives."""
    curves = read_mixing()[0]
    method = preferred_ratio(curves["method"].tolist())
    most, least = sentences.most_and_least(curves, method)
    texts = tokens["document"].nunique()
    lead = (
        f"{RATIOS[method].sentence.format(layer=most['layer'], share=percent(most['mean']))}, the highest of the "
        f"layers' means; in layer {least['layer']} it is {percent(least['mean'])}, the lowest. Means over "
        f"{most['tokens']} tokens."
    )
    return Told(
        checkpoints={"pretrained": "The model as it is"},
        dataset=None,
        facts={
            "text" if texts == 1 else "texts": str(texts),
            "tokens": str(len(tokens)),
            "layers": str(curves["layer"].max()),
        },
        measured="All numbers and maps are of the text below." if texts == 1 else "All are of the texts below.",
        intervals="" if texts == 1 else ", with 95 % intervals over texts",
        headline=sentences.headline(),
        lead=lead,
        findings=[
            lead,
            *evidence.controls(method),
            *sentences.map_findings(made_layouts()[0]),
        ],
        cautions=[EXAMPLES if each == sentences.ONE_SEED else each for each in sentences.cautions(parameters)],
        changed=[row for row in sentences.changed_parameters(parameters) if not row[0].startswith(OF_REVIEWS)],
        origins=[f"{sentences.ORIGINS['model.name']} {parameters.model.name}."],
        computed_on=f"All of it on: {read_metrics('measure')['computed_on']}.",
    )

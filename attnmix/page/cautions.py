"""Limitations of the findings; the page shows each limitation next to the findings that it concerns."""

from __future__ import annotations

from typing import Any, NamedTuple

from attnmix.core.names import TOTAL_EFFECTS
from attnmix.core.store.results import Results, TextResults
from attnmix.figures.labels import CHECKPOINTS, RATIO_LABELS
from attnmix.measures.matrices import ROLLOUTS
from attnmix.measures.total_effects import find_excess
from attnmix.page.sentences import Subject, most_and_least
from attnmix.page.verdicts import counted, signed
from attnmix.page.wording import model_wording_of, wording_of

PCA = "Only two principal components are shown. Vectors that are close on the map can differ in the other components."
UMAP = (
    "The map preserves only some neighbourhoods. Distances between clusters, their sizes and densities are not "
    "meaningful, and a different seed yields a different map."
)


class Cautions(NamedTuple):
    """Sentences on the limitations of the findings, for three parts of the page."""

    answer: str
    """Limitations of the headline and of the sentences below it."""
    ratio: str
    """Limitations of the mixing ratios, in the section “Evidence”."""
    map: dict[str, str]
    """Limitations of the map, by layout."""


def list_cautions(subject: Subject, run: Results) -> Cautions:
    """Return the limitations of the findings, for a pipeline run or for texts measured with the API."""
    by_layout = {layout: PCA if layout == "pca" else UMAP for layout in run.layouts}
    answer = " ".join([*_describe_scope(subject, run), *_describe_total_effects(run)])
    return Cautions(answer, _describe_ratio(run), by_layout)


def _describe_scope(subject: Subject, run: Results) -> list[str]:
    """Return sentences on the models, the intervals and the texts to which the summary is limited."""
    cautions = []
    if not subject.finetuned:
        base = "the same model, so nothing changes"
        if subject.base:
            base = f"{subject.base}, which may be unrelated to it"
        cautions.append(
            f"No model was fine-tuned (finetune.epochs: 0). Here, “fine-tuned” refers to {subject.model} without "
            f"changes, and “pretrained” to {base}."
        )
    if subject.dataset is None:
        cautions.append("Results differ for other texts.")
    else:
        cautions.append("The intervals describe means over reviews, for one fine-tuning seed.")
    if subject.synthetic:
        noun = wording_of(run).texts
        cautions.append(
            f"According to the dataset card, a program wrote the {noun}. Results can differ for real {noun}."
        )
    return cautions


def _describe_total_effects(run: Results) -> list[str]:
    """Return a list with a sentence on the result of `find_excess`, or an empty list if no total effect exceeds 1."""
    table: Any = run.table("measure/exchange")
    row = find_excess(table[table["checkpoint"].isin(CHECKPOINTS)])
    if row is None:
        return []
    model = _name_model(run, row["checkpoint"])
    exchange = f"exchanging {TOTAL_EFFECTS[row['quantity']]}"
    effect = f"{exchange} displaces vectors after layer {row['layer']} further than exchanging all tokens"
    return [f"In {model}, {effect}, so texts with exchanged tokens may be unlike real texts."]


def _name_model(run: Results, checkpoint: str) -> str:
    """Return the name of one of two named models; otherwise, a phrase such as “the fine-tuned model”.

    If the results contain only one model, the phrase is “this model”.
    """
    if isinstance(run, TextResults) and run.model_names is not None:
        return model_wording_of(run).labels[checkpoint]
    curves, _ = run.mixing  # the mean ratios of each model
    has_two_models = curves["checkpoint"].nunique() > 1
    return f"the {CHECKPOINTS[checkpoint].lower()} model" if has_two_models else "this model"


def _describe_ratio(run: Results) -> str:
    """Return sentences on the interpretation of mixing ratios."""
    sentences = ["A mixing ratio describes one layer, not the accumulated mixing since the input."]
    if _has_rollouts(run):
        sentences.append("A rollout, which can be chosen under Share, describes all layers up to the chosen layer.")
    sentences.append(f"A ratio of norms is not a causal effect.{_describe_agreement(run)}")
    return " ".join(sentences)


def _has_rollouts(run: Results) -> bool:
    """Return True if a rollout (a contribution matrix over several layers) is available for any captured text."""
    curves, _ = run.mixing
    checkpoints = curves["checkpoint"].unique()
    for document in run.tokens["document"].unique():
        for checkpoint in checkpoints:
            matrices = run.matrices(checkpoint, document)
            if any(name in ROLLOUTS for name in matrices):
                return True
    return False


def _describe_agreement(run: Results) -> str:
    """Return a sentence on the rank correlation of the preferred ratio with derivatives in the same layer.

    The derivatives are those of the layer's outputs with respect to its inputs. The sentence contains the lowest and
    the highest of the layers' mean correlations, and begins with a space, because it follows another sentence. It is
    empty if no correlations were measured.
    """
    table = run.table("measure/derivatives")
    is_agreement = table["quantity"] == "agreement"
    is_within_layer = table["reference"] == "layer_input"
    rows = table[is_agreement & is_within_layer].dropna(subset="mean")
    if rows.empty:
        return ""
    most, least = most_and_least(rows)  # both are rows of the preferred ratio in one checkpoint
    correlations = []
    for row in (least, most):
        correlation = f"{signed(row['mean'])} (layer {row['layer']})"
        if correlation not in correlations:  # if one layer is both, it is mentioned once
            correlations.append(correlation)
    correlation_range = " to ".join(correlations)
    number = counted(rows["documents"].max(), wording_of(run).texts)
    ratio = RATIO_LABELS[least["method"]]
    model = CHECKPOINTS[least["checkpoint"]].lower()
    finding = f"the rank correlation of “{ratio}” with derivatives in the {model} model is {correlation_range}"
    return f" In {number}, {finding}."

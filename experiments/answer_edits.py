"""Interventions on a classifier's attention: values and edges replaced, and what becomes of the class.

Every text has `TOKENS` tokens, so that nothing is padding. Shapes: N reviews, H heads, d head width, E = H * d.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from tqdm import tqdm

from attnmix.interventions import (
    Edit,
    Eraser,
    chained,
    class_eraser,
    mapped_values,
    recorded,
    remaining_eraser,
    replaced_values,
    text_mean_values,
    without_edges,
    without_heads,
)
from attnmix.model import Model
from experiments.training import TOKENS

if TYPE_CHECKING:
    from experiments.answer import Study

Erasers = dict[str, dict[int, Eraser]]
"""Erasers by what they take away and by layer."""
BatchEdit = Callable[[npt.NDArray[np.int64]], Edit]
"""Returns the edit for a batch, from the numbers of its reviews: each review may take another's values."""

SCALED = 40  # reviews whose ratio is taken with a part of the values scaled
SCALED_LAYERS = (4, 5, 6)
SCALES = {"class": (0.0, 0.5, 1.0, 1.5, 2.0), "random directions": (0.0,), "largest other directions": (0.0,)}
"""The factors of what each eraser takes away; 0 erases it."""
SINGLE_LAYERS = ("text's mean", "corpus mean", "others cut from others", "[CLS] cut from others")
ALL_LAYERS = ("text's mean", "corpus mean", "class mean", "other class's mean")
"""Edits that are also made in one layer alone, and from the first layer on; the others from layer 4, 5 and 6 on."""
CLS, WORDS = slice(0, 1), slice(1, None)
WORD = TOKENS // 2  # position of the one other token that is cut, for comparison with [CLS]


class Values(NamedTuple):
    """Logits `[N, C]` of reviews; by layer each review's mean value `[N, H, d]`, and tokens' values `[S, E]`."""

    logits_NC: Tensor
    means_NHd: dict[int, Tensor]
    tokens_SE: dict[int, Tensor]

    @property
    def predicted_N(self) -> Tensor:
        """The class that the model gives each review."""
        return self.logits_NC.argmax(-1)

    def two_classes(self) -> bool:
        """Return False if all reviews, or nearly all of them, have one class: then there is no other."""
        return len(self.predicted_N.unique()) == 2 and int(self.predicted_N.bincount().min()) >= 10


def read_values(study: Study) -> Values:
    """Return the values of all reviews; those of every fourth token in the layers where they are erased."""
    logits, means, tokens = [], [], []
    for batch in study.batches(range(len(study.test.texts))):
        values: dict[int, Tensor] = {}
        logits.append(study.logits(batch, _always(recorded(values))))
        means.append({layer: value.mean(-2) for layer, value in values.items()})
        tokens.append(
            {layer: values[layer][..., ::4, :].transpose(1, 2).flatten(2).flatten(0, 1) for layer in SCALED_LAYERS}
        )
    joined = [{layer: torch.cat([each[layer] for each in parts]) for layer in parts[0]} for parts in (means, tokens)]
    return Values(torch.cat(logits), *joined)


def fit_erasers(held_out: Values, *, of_means: bool = False) -> Erasers:
    """Return erasers by layer, fitted to the values of tokens or to their means in each review."""
    erasers: Erasers = {"class": {}, "random directions": {}, "largest other directions": {}}
    for layer in SCALED_LAYERS:
        vectors = held_out.means_NHd[layer].flatten(1) if of_means else held_out.tokens_SE[layer]
        classes = held_out.predicted_N.repeat_interleave(len(vectors) // len(held_out.predicted_N))
        eraser = erasers["class"][layer] = class_eraser(vectors, classes)
        erasers["random directions"][layer] = remaining_eraser(vectors, eraser, layer)
        erasers["largest other directions"][layer] = remaining_eraser(vectors, eraser)
    return erasers


def intervention_rows(study: Study, values: Values, held_out: Values, erasers: Erasers) -> Iterator[dict[str, Any]]:
    """Yield what becomes of the class for each edit, in a layer or from it on; nothing if reviews have one class.

    `donors_class` is the share of reviews that get their donor's class, `above_constant` that less the share that the
    better of two constant answers would get.
    """
    logits_NC, predicted_N = values.logits_NC, values.predicted_N
    if not values.two_classes():
        return
    rows = range(len(predicted_N))
    edits, donor_N = _edits(study, values, held_out, erasers)
    truth_N = torch.as_tensor(study.test.labels[study.truth])
    probability_N = logits_NC.softmax(-1).gather(1, predicted_N[:, None])[:, 0]
    last = study.base.config.num_hidden_layers
    entering = layer_inputs(study)
    for name, edit in tqdm(edits.items(), desc="interventions", disable=None):
        for extent in ("from", "only"):
            for first in range(1, last + 1):
                if (extent == "only" and name not in SINGLE_LAYERS) or (first < 4 and name not in ALL_LAYERS):
                    continue
                layers = range(first, last + 1) if extent == "from" else range(first, first + 1)
                after_NC = edited_logits(study, edit, layers, entering[first - 1])
                named_N = after_NC.argmax(-1)
                after_N = after_NC.softmax(-1).gather(1, predicted_N[:, None])[:, 0]
                row = {
                    "edit": name,
                    "extent": extent,
                    "layer": first,
                    "same_class": _share(named_N == predicted_N),
                    "accuracy": _share(named_N == truth_N),
                    "probability": float((after_N - probability_N).mean()),
                    "largest_logit_change": float((after_NC - logits_NC).abs().max()),
                }
                if name in donor_N:
                    donors_class_N = predicted_N[donor_N[name]]
                    row["donors_class"] = _share(named_N == donors_class_N)
                    row["above_constant"] = row["donors_class"] - float(donors_class_N.bincount().max() / len(rows))
                yield row


def layer_inputs(study: Study) -> list[Tensor]:
    """Return what enters each layer `[N, T, D]`, without an edit."""
    batches = []
    for batch in study.batches(range(len(study.test.texts))):
        with torch.inference_mode():
            states = study.base(input_ids=study.test.ids_NT[batch], output_hidden_states=True).hidden_states
        batches.append(torch.stack(states[:-1]))
    return list(torch.cat(batches, dim=1))


def edited_logits(study: Study, edit: BatchEdit, layers: range, entering_NTD: Tensor) -> Tensor:
    """Return the logits `[N, C]` with attention edited in some layers, of which the first reads `entering_NTD`."""
    below = layers.start - 1
    loaded = Model(study.model, study.tokenizer, "classifier")
    logits = []
    for batch in study.batches(range(len(entering_NTD))):
        whole = edit(batch)

        def edit_in_layers(called: int, weights: Tensor, value: Tensor, whole: Edit = whole) -> tuple[Tensor, Tensor]:
            layer = called + below
            return whole(layer, weights, value) if layer in layers else (weights, value)

        starting = _starting_at(study.base, layers.start, entering_NTD[batch])
        with torch.inference_mode(), starting, loaded.intervene(edit_in_layers) as network:
            logits.append(network(input_ids=study.test.ids_NT[batch]).logits)
    return torch.cat(logits).double()


@contextmanager
def _starting_at(base: Any, layer: int, entering_BTD: Tensor) -> Iterator[None]:
    """Let a model begin with a layer, on given vectors: an edit changes nothing below it."""
    embeddings, layers = base.embeddings, base.encoder.layer
    base.embeddings, base.encoder.layer = _Recorded(entering_BTD), layers[layer - 1 :]
    try:
        yield
    finally:
        base.embeddings, base.encoder.layer = embeddings, layers


class _Recorded(torch.nn.Module):
    """A module that returns what it was given once, whatever its input."""

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        self.vectors = vectors

    def forward(self, *_: Any, **__: Any) -> Tensor:
        return self.vectors


def _share(condition_N: Tensor) -> float:
    return float(condition_N.double().mean())


def scaling_rows(study: Study, values: Values, erasers: Erasers) -> list[dict[str, Any]]:
    """Return margin and ratio where what an eraser takes from the values of the upper layers is scaled instead."""
    predicted_N = values.predicted_N
    if not values.two_classes():
        return []
    rows, chosen = [], range(SCALED)
    for directions, factor in ((name, factor) for name, factors in SCALES.items() for factor in factors):
        scaled = replace(study, model=copy.deepcopy(study.model))
        for layer in SCALED_LAYERS:
            eraser = erasers[directions][layer].scaled(factor)
            value = scaled.base.encoder.layer[layer - 1].attention.self.value
            taken_EE = eraser.readout_DK @ eraser.directions_KD
            with torch.no_grad():
                value.weight -= (value.weight.double().T @ taken_EE).T.float()
                value.bias -= ((value.bias.double() - eraser.mean_D) @ taken_EE).float()
        logits_NC = scaled.logits(chosen)
        margin_N = logits_NC.gather(1, predicted_N[: len(chosen), None])[:, 0] * 2 - logits_NC.sum(-1)
        ratios = scaled.ratios(chosen).mean(0)
        row = {"directions": directions, "factor": factor, "margin": float(margin_N.mean())}
        row["same_class"] = _share(logits_NC.argmax(-1) == predicted_N[: len(chosen)])
        rows += [row | {"layer": layer, "ratio": float(ratios[layer - 1])} for layer in SCALED_LAYERS]
    return rows


def _heads_by_class(study: Study, held_out: Values) -> dict[int, list[int]]:
    """Return the heads of each layer, first those whose outputs differ most between held-out reviews of the classes."""
    heads = {}
    for layer, means_NHd in held_out.means_NHd.items():
        classes = [means_NHd[held_out.predicted_N == name].mean(0) for name in (0, 1)]
        weight_DE = study.base.encoder.layer[layer - 1].attention.output.dense.weight.detach()
        weight_DHd = weight_DE.unflatten(1, means_NHd.shape[1:])
        lengths_H = torch.einsum("hd,khd->hk", classes[1] - classes[0], weight_DHd).norm(dim=-1)
        heads[layer] = lengths_H.argsort(descending=True).tolist()
    return heads


def _edits(
    study: Study, values: Values, held_out: Values, erasers: Erasers
) -> tuple[dict[str, BatchEdit], dict[str, Tensor]]:
    """Return the edits by name, and for those with a donor its number for each review."""
    means_NHd, predicted_N = values.means_NHd, values.predicted_N
    same_NN = predicted_N[:, None] == predicted_N
    same_NN.fill_diagonal_(False)
    other_NN = predicted_N[:, None] != predicted_N
    generator = np.random.default_rng(0)
    donors = {
        f"donor of the {name} class": torch.tensor([generator.choice(np.flatnonzero(row)) for row in mask.numpy()])
        for name, mask in (("same", same_NN), ("other", other_NN))
    }
    donors["donor: the review itself"] = torch.arange(len(predicted_N))
    every_NN = ~torch.eye(len(predicted_N), dtype=torch.bool)
    weights = {"corpus mean": every_NN, "class mean": same_NN, "other class's mean": other_NN}
    weights |= {name: torch.nn.functional.one_hot(each, len(predicted_N)) for name, each in donors.items()}
    replaced: dict[str, BatchEdit] = {}
    for name, weights_NN in weights.items():
        shares_NN = weights_NN / weights_NN.sum(-1, keepdim=True)
        mixed = {layer: torch.einsum("nm,mhd->nhd", shares_NN.float(), each) for layer, each in means_NHd.items()}
        replaced[name] = _values_of_reviews(mixed)
    text_mean = text_mean_values(torch.ones(1, TOKENS))
    erased = {name: mapped_values(each) for name, each in erasers.items()}
    erased_of_means = {name: mapped_values(each) for name, each in fit_erasers(held_out, of_means=True).items()}
    heads = _heads_by_class(study, held_out)
    others = torch.arange(TOKENS) != WORD
    same_in_every_review = {
        **{f"text's mean, {name} erased": chained(text_mean, each) for name, each in erased_of_means.items()},
        **{f"{name} erased": each for name, each in erased.items()},
        "class erased from words": _at(WORDS, erased["class"]),
        "class erased from [CLS]": _at(CLS, erased["class"]),
        "heads with most of the class cut": without_heads(
            {layer: each[: len(each) // 2] for layer, each in heads.items()}
        ),
        "other heads cut": without_heads({layer: each[len(each) // 2 :] for layer, each in heads.items()}),
        "no values": lambda _layer, weights, value: (weights, torch.zeros_like(value)),
        "others cut from others": _cut_words_from_each_other,
        "[CLS] cut from others": without_edges(CLS, WORDS),
        "others cut from [CLS]": without_edges(WORDS, CLS),
        "one word cut from others": without_edges(slice(WORD, WORD + 1), others),
    }
    edits = {"text's mean": _always(text_mean)} | replaced
    return edits | {name: _always(edit) for name, edit in same_in_every_review.items()}, donors


def _always(edit: Edit) -> BatchEdit:
    return lambda _rows: edit


def _values_of_reviews(values_NHd: Mapping[int, Tensor]) -> BatchEdit:
    """Return the edit that gives every source of a review the review's row of `values_NHd[layer]`."""
    return lambda rows: replaced_values({layer: each[rows][:, :, None] for layer, each in values_NHd.items()})


def _at(tokens: slice, edit: Edit) -> Edit:
    """Return the edit of the values of some tokens only."""

    def edited(layer: int, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        changed = value.clone()
        changed[..., tokens, :] = edit(layer, weights, value)[1][..., tokens, :]
        return weights, changed

    return edited


def _cut_words_from_each_other(_layer: int, weights: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Let every token but [CLS] take nothing but from itself and [CLS]."""
    cut = ~torch.eye(weights.shape[-1], dtype=torch.bool)
    cut[CLS] = cut[:, CLS] = False
    return weights.masked_fill(cut, 0), value

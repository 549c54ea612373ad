"""A classifier that is trained already, as it is, its classes in the order of the data's."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn import Linear
from transformers import PreTrainedModel

from attnmix.core.errors import InputError
from attnmix.models.loading import load_classifier

ONE_OF_THEM = "single_label_classification"
"""The `problem_type` of a model that chooses one class."""


def load_trained(folder: Path, names: Mapping[Any, str]) -> PreTrainedModel:
    """The checkpoint's own classifier, for the data's classes `names` by number.

    Its classes are matched with them by name, whatever the case; by their order, which is said, where names differ.
    `InputError` where it has no trained head, tells another number of classes, or does not choose one of them.
    """
    model = load_classifier(folder, trained=True)
    own = {int(number): str(name) for number, name in (model.config.id2label or {}).items()}
    if len(own) != len(names):
        raise InputError(
            f"model.name: {folder} tells {_listed(own)}, the data has {_listed(names)}; allowed without fine-tuning: "
            "a model of as many classes"
        )
    if model.config.problem_type not in (None, ONE_OF_THEM):
        raise InputError(
            f"model.name: {folder} is made for {model.config.problem_type}; allowed without fine-tuning: a model that "
            "chooses one class"
        )
    order = _order(own, names)
    if order is None:
        order = list(own)
        logging.warning(
            "the model's classes are taken in their order, as their names are not the data's: %s",
            ", ".join(f"{own[number]} for {names[number]}" for number in order),
        )
    if order != list(own):
        _reorder(model, order)
    model.config.id2label = dict(names)
    model.config.label2id = {name: label for label, name in names.items()}
    return model


def _order(own: Mapping[int, str], names: Mapping[int, str]) -> list[int] | None:
    """The model's number of each of the data's classes; `None` where the names are not the same."""
    numbers = {name.casefold(): number for number, name in own.items()}
    wanted = [names[number].casefold() for number in sorted(names)]
    return [numbers[name] for name in wanted] if numbers.keys() == set(wanted) else None


def last_linear(model: PreTrainedModel) -> tuple[str, Linear]:
    """Of the head, by its name: a row for each class."""
    inside = set(model.base_model.modules())
    *_, last = (
        (name, module) for name, module in model.named_modules() if isinstance(module, Linear) and module not in inside
    )
    return last


def _reorder(model: PreTrainedModel, order: list[int]) -> None:
    """Put the classes into that order."""
    with torch.no_grad():
        for parameter in last_linear(model)[1].parameters():
            parameter.copy_(parameter[order])


def _listed(names: Mapping[int, str]) -> str:
    shown = [names[number] for number in sorted(names)]
    return f"{len(shown)} classes ({', '.join(shown[:10])}{', ...' * (len(shown) > 10)})"

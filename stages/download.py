"""Bring the reviews and the pretrained model to where the other stages read them.

    python -m stages.download

Writes `data/reviews/{train,validation,test}.parquet`, `models/pretrained/`, and `reports/plots/{reviews,commits}.csv`:
all of them at the end, or none.
"""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import TypeVar

import pandas as pd

from stages.command import run_stage
from stages.errors import InputError
from stages.hub.patience import be_patient
from stages.hub.repository import Kind, Repository
from stages.models import fetching
from stages.models.proof import prove_model
from stages.outputs.checkpoints import CHECKPOINT_FOLDERS, PRETRAINED
from stages.outputs.reports import PLOTS, write_plot
from stages.outputs.reviews import REVIEWS, write_split
from stages.parameters import DatasetParameters, ModelParameters, Parameters
from stages.resume import UNFINISHED, clear, publish
from stages.reviews import source

Asked = TypeVar("Asked", ModelParameters, DatasetParameters)


def main(parameters: Parameters) -> None:
    for key, name, folders in (
        ("model.name", parameters.model.name, CHECKPOINT_FOLDERS.values()),
        ("dataset.name", parameters.dataset.name, (REVIEWS,)),
    ):
        for folder in folders:
            if Path(name).resolve().is_relative_to(folder.resolve()):
                raise InputError(f"{key}: {name} is what this pipeline writes itself; copy it to another folder first")
    work = UNFINISHED / "download" / "made"
    shutil.rmtree(work, ignore_errors=True)  # of a run that was killed
    work.mkdir(parents=True)
    try:
        _make(parameters, work)
        for output in (PRETRAINED, REVIEWS, PLOTS):
            made = [work / output] if output == PRETRAINED else sorted((work / output).iterdir())
            for each in made:
                publish(each, each.relative_to(work))
    finally:
        clear(work)


def _make(parameters: Parameters, work: Path) -> None:
    """Every output, under the folder `work`."""
    be_patient(parameters.hub.time_limit)
    model = _at_commit("model", parameters.model, fetching.is_on_hub(parameters.model))
    dataset = _at_commit("dataset", parameters.dataset, source.is_on_hub(parameters.dataset))
    rows = [
        (key, asked.name, asked.revision if pinned.revision else None, pinned.revision)
        for key, asked, pinned in (
            ("model.name", parameters.model, model),
            ("dataset.name", parameters.dataset, dataset),
        )
    ]
    write_plot("commits", pd.DataFrame(rows, columns=["key", "name", "revision", "commit"]), work / PLOTS)
    fetching.fetch_model(model, work / PRETRAINED)
    splits = source.read_splits(dataset, parameters.seed)
    try:
        prove_model(work / PRETRAINED, splits["test"]["text"].iloc[0])
    except InputError as error:  # in the user's words, who named no such folder
        reason = str(error).removeprefix("model.name: ").replace(str(work / PRETRAINED), model.name)
        raise InputError(f"model.name: {reason}") from error
    tables = []
    for split, reviews in splits.items():
        write_split(split, reviews, work / REVIEWS)
        counts = reviews.groupby(["label", "label_name"]).size().rename("reviews").reset_index()
        tables.append(counts.assign(split=split)[["split", "label", "label_name", "reviews"]])
        logging.info(
            "%s: %s", split, ", ".join(f"{row.reviews} of class {row.label_name}" for row in counts.itertuples())
        )
    write_plot("reviews", pd.concat(tables), work / PLOTS)


def _at_commit(kind: Kind, asked: Asked, on_hub: bool) -> Asked:
    """Its revision as the commit that a branch or tag of the hub is now; none for what is no repository of it."""
    commit = Repository(kind, asked.name, asked.revision).commit if on_hub else None
    return asked.model_copy(update={"revision": commit})


if __name__ == "__main__":
    run_stage(main)

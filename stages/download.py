"""Bring the reviews and the pretrained model to where the other stages read them.

    python -m stages download

Writes `data/reviews/{train,validation,test}.parquet`, `reports/plots/{reviews,commits}.csv` and `models/pretrained/`:
the files of `model.name`, or those of `model.base`, and in a folder of their own those of `model.name`. All of them
appear at the end, or none. Writes `reports/sources.json` as well, for `stages.sources` to watch what it read.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pandas as pd

from attnmix.core.errors import InputError
from attnmix.core.options import DatasetParameters, ModelParameters, Parameters
from attnmix.data import source
from attnmix.hub.repository import Kind, Repository
from attnmix.hub.retries import be_patient
from attnmix.models import fetching
from attnmix.models.compatibility import prove_model, prove_pair
from attnmix.store.reviews import write_split
from attnmix.store.runs import Run
from attnmix.store.writers import write_plot, write_sources
from stages.common.resume import UNFINISHED, clear, publish
from stages.common.source_hashes import look_at_sources

Asked = TypeVar("Asked", ModelParameters, DatasetParameters)


def main(parameters: Parameters) -> None:
    run = Run(Path())
    written = list(run.checkpoints.values())
    for key, name, folders in (
        *((key, model.name, written) for key, (model, _) in _models(parameters.model, run).items()),
        ("dataset.name", parameters.dataset.name, [run.reviews]),
    ):
        _check_link(key, name)
        for folder in folders:
            if Path(name).resolve().is_relative_to(folder.resolve()):
                raise InputError(f"{key}: {name} is what this pipeline writes itself; copy it to another folder first")
    sources = look_at_sources(parameters, run)
    work = UNFINISHED / "download" / "made"
    shutil.rmtree(work.parent, ignore_errors=True)  # of a run that was killed
    work.mkdir(parents=True)
    try:
        made_run = Run(work)
        _make(parameters, made_run)
        for output in (made_run.pretrained, made_run.reviews, made_run.tables):
            made = [output] if output == made_run.pretrained else sorted(output.iterdir())
            for each in made:
                publish(each, run.root / each.relative_to(work))
        write_sources(sources, run.sources_file)
    finally:
        clear(work)


def _check_link(key: str, name: str) -> None:
    """Raise `InputError` for a path that no link of it leads out of; it may as well be a hub's identifier."""
    try:
        Path(name).stat()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise InputError(f"{key}: {name} is a link that leads back to itself; name the folder or file") from None


def _make(parameters: Parameters, run: Run) -> None:
    """Write every output into the folder of `run`."""
    be_patient(parameters.hub.time_limit)
    models, commits = {}, []
    for key, (asked, folder) in _models(parameters.model, run).items():
        with _said_of(key, asked.name, folder):
            pinned = _at_commit("model", asked, fetching.is_on_hub(asked))
            commits.append(_commit(key, asked, pinned))
            fetching.fetch_model(pinned, folder)
        models[key] = asked.name, folder
    dataset = _at_commit("dataset", parameters.dataset, source.is_on_hub(parameters.dataset))
    commits.append(_commit("dataset.name", parameters.dataset, dataset))
    write_plot("download/commits", pd.DataFrame(commits), run.tables)
    splits = source.read_splits(dataset, parameters.seed, run.root.parent)
    texts = splits["test"]["text"].tolist()
    for key, (name, folder) in models.items():
        with _said_of(key, name, folder):
            prove_model(folder, texts)
    if len(models) > 1:
        prove_pair(run.pretrained, run.named_model, texts)
    tables = []
    for split, reviews in splits.items():
        write_split(split, reviews, run.reviews)
        counts = reviews.groupby(["label", "label_name"]).size().rename("reviews").reset_index()
        tables.append(counts.assign(split=split)[["split", "label", "label_name", "reviews"]])
        logging.info(
            "%s: %s", split, ", ".join(f"{row.reviews} of class {row.label_name}" for row in counts.itertuples())
        )
    write_plot("download/reviews", pd.concat(tables), run.tables)


def _models(model: ModelParameters, run: Run) -> dict[str, tuple[ModelParameters, Path]]:
    """By the key that names it, each model to bring, and its folder."""
    if model.base is None:
        return {"model.name": (model, run.pretrained)}
    base = model.model_copy(update={"name": model.base, "revision": model.base_revision})
    return {"model.base": (base, run.pretrained), "model.name": (model, run.named_model)}


def _at_commit(kind: Kind, asked: Asked, on_hub: bool) -> Asked:
    """Its revision as the commit that a branch or tag of the hub is now; none for what is no repository of it."""
    commit = Repository(kind, asked.name, asked.revision).commit if on_hub else None
    return asked.model_copy(update={"revision": commit})


def _commit(key: str, asked: Asked, pinned: Asked) -> dict[str, str | None]:
    """A row of `commits.csv`."""
    revision = asked.revision if pinned.revision else None
    return {"key": key, "name": asked.name, "revision": revision, "commit": pinned.revision}


@contextmanager
def _said_of(key: str, name: str, folder: Path) -> Iterator[None]:
    """What is wrong with a model in the user's words, who named no such folder."""
    try:
        yield
    except InputError as error:
        reason = str(error).removeprefix("model.name: ").replace(str(folder), name)
        raise InputError(f"{key}: {reason}") from error

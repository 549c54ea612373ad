"""What `measure` has found so far, document by document, in files that a killed run finds again.

Each process takes its share of the batches; which documents share a batch does not depend on
the number of processes, so the numbers do not either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from stages.mixing.batches import BatchMeasurer, DocumentMeasures
from stages.mixing.contributions import LEAST_RAW_SUM
from stages.mixing.documents import Document
from stages.mixing.summary import Doubles
from stages.mixing.whole_document import DocumentMeasurer
from stages.models.encoding import batches_by_tokens
from stages.outputs.mixing import HEADS, RAW_SUMS, contributions_folder, write_matrix
from stages.parameters import MixingParameters


class Share(NamedTuple):
    """This process among all that run the stage."""

    process: int
    processes: int

    def own(self, units: Sequence[Any]) -> list[Any]:
        """Every so many-th unit of work."""
        return list(units[self.process :: self.processes])


class CheckpointMeasures:
    """One checkpoint's measures under `folder`; `finished` holds what is published as it is."""

    def __init__(self, folder: Path, checkpoint: str) -> None:
        self.checkpoint, self.folder, self.finished = checkpoint, folder / checkpoint, folder / "mixing"
        self.folder.mkdir(parents=True, exist_ok=True)

    def measure(self, measurer: BatchMeasurer, documents: Sequence[Document], batch_tokens: int, share: Share) -> None:
        """Ratios, geometry and steps of all documents."""
        batches = batches_by_tokens([len(document) for document in documents], batch_tokens)
        left = [batch for batch in share.own(batches) if not all(self._measures(i).exists() for i in batch)]
        for batch in self._progress(left, "ratios", "batch"):
            for i, measures in zip(batch, measurer.measures([documents[i] for i in batch]), strict=True):
                with _whole(self._measures(i)) as part, part.open("wb") as file:
                    np.savez(file, **asdict(measures))

    def contributions(self, measurer: DocumentMeasurer, documents: Sequence[Document], share: Share) -> None:
        """The contribution matrices of the captured documents, as they are published."""
        captured = share.own([document for document in documents if document.captured])
        for document in self._progress(captured, "contributions", "document"):
            folder = contributions_folder(self.checkpoint, document.name, self.finished)
            if folder.is_dir():
                continue
            contributions, heads = measurer.contributions(document.ids)
            with _whole(folder) as part:
                part.mkdir(exist_ok=True)
                for method, matrices in contributions.matrices.items():
                    attributes = {"method": method, "checkpoint": self.checkpoint, "document": document.name}
                    array = matrices.float().cpu().numpy()
                    write_matrix(part, method, array, ("layer", "token", "source"), attributes)
                if contributions.value_zeroing_raw_sums is not None:
                    raw = contributions.value_zeroing_raw_sums.float().cpu().numpy()
                    write_matrix(part, RAW_SUMS, raw, ("layer", "token"), {"least_trusted": LEAST_RAW_SUM})
                if "attention" in measurer.matrices:
                    per_head = heads.half().cpu().numpy()
                    write_matrix(part, HEADS, per_head, ("layer", "head", "token", "source"), {})

    def gradients(
        self,
        measurer: DocumentMeasurer,
        documents: Sequence[Document],
        mixing: MixingParameters,
        seed: int,
        share: Share,
    ) -> None:
        """Agreement with the gradient reference, of the first reviews that count, cut short."""
        chosen = share.own(_gradient_documents(documents, mixing))
        for i in self._progress(chosen, "gradients", "document"):
            if not self._agreement(i).exists():
                ids = _cut(documents[i], mixing.gradient_max_length)
                agreement = measurer.agreement(ids, mixing.gradient_directions, seed)
                with _whole(self._agreement(i)) as part, part.open("wb") as file:
                    np.save(file, agreement)

    def load(self, i: int) -> DocumentMeasures:
        """What `measure` found for document `i`."""
        with np.load(self._measures(i)) as arrays:
            return DocumentMeasures(**arrays)

    def load_agreement(self, documents: Sequence[Document], mixing: MixingParameters) -> Doubles | None:
        """What `gradients` found, `[documents, references, layers, methods]`; None without such documents."""
        chosen = _gradient_documents(documents, mixing)
        return np.stack([np.load(self._agreement(i)) for i in chosen]) if chosen else None

    def _measures(self, i: int) -> Path:
        return self.folder / f"{i}.npz"

    def _agreement(self, i: int) -> Path:
        return self.folder / f"gradient-{i}.npy"

    def _progress(self, units: Sequence[Any], what: str, unit: str) -> Iterator[Any]:
        yield from tqdm(units, desc=f"{self.checkpoint}: {what}", unit=unit, disable=None)


def _gradient_documents(documents: Sequence[Document], mixing: MixingParameters) -> list[int]:
    return [i for i, document in enumerate(documents) if document.counted][: mixing.gradient_documents]


def _cut(document: Document, length: int) -> Any:
    """The first `length` tokens, of which the last is the document's own [SEP]."""
    if len(document) <= length:
        return document.ids
    return np.append(document.ids[: length - 1], document.ids[-1])


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A path to write to, which gets its own name only once everything is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    yield part
    part.rename(path)

"""What `measure` knows so far, document by document, in files that a killed run goes on from.

Each process takes its share of the batches; which documents share a batch does not depend on
the number of processes, so the numbers do not either.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from stages.mixing.batches import BatchMeasurer, DocumentMeasures
from stages.mixing.contributions import LEAST_RAW_SUM
from stages.mixing.documents import CLASSES, Document
from stages.mixing.whole_document import DocumentMeasurer
from stages.models.encoding import batches_by_tokens
from stages.outputs.mixing import HEADS, RAW_SUMS, contributions_folder, write_matrix
from stages.parameters import MixingParameters


@dataclass(frozen=True)
class CheckpointMeasures:
    """One checkpoint's measures of `documents` under `folder`; `folder/mixing` holds what is published as it is.

    This process takes every `processes`-th unit of work, from its own number on.
    """

    folder: Path
    checkpoint: str
    documents: Sequence[Document]
    process: int
    processes: int

    def measure(self, measurer: BatchMeasurer, batch_tokens: int) -> None:
        """Ratios, geometry and steps of all documents."""
        batches = batches_by_tokens([len(document) for document in self.documents], batch_tokens)
        left = [batch for batch in self._own(batches) if not all(self._file(i).exists() for i in batch)]
        for batch in self._progress(left, "ratios", "batch"):
            for i, measures in zip(batch, measurer.measures([self.documents[i] for i in batch]), strict=True):
                with _whole(self._file(i)) as part, part.open("wb") as file:
                    np.savez(file, **asdict(measures))

    def contributions(self, measurer: DocumentMeasurer) -> None:
        """The contribution matrices of the captured documents, as they are published."""
        captured = self._own([document for document in self.documents if document.captured])
        for document in self._progress(captured, "contributions", "document"):
            folder = contributions_folder(self.checkpoint, document.name, self.folder / "mixing")
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
                    write_matrix(part, HEADS, heads.half().cpu().numpy(), ("layer", "head", "token", "source"), {})

    def gradients(self, measurer: DocumentMeasurer, mixing: MixingParameters, seed: int) -> None:
        """Agreement with the gradient reference, of the first reviews that count, cut short."""
        for i in self._progress(self._own(self._of_gradients(mixing)), "gradients", "document"):
            if not self._file(i, "gradient").exists():
                ids = self.documents[i].ids
                if len(ids) > mixing.gradient_max_length:
                    ends = ids[-1:] if self.documents[i].classes[-1] == CLASSES.index("sep") else ids[:0]
                    ids = np.append(ids[: mixing.gradient_max_length - len(ends)], ends)
                agreement = measurer.agreement(ids, mixing.gradient_directions, seed)
                with _whole(self._file(i, "gradient")) as part, part.open("wb") as file:
                    np.savez(file, agreement)

    def load(self, i: int) -> DocumentMeasures:
        """What `measure` wrote of document `i`."""
        with np.load(self._file(i)) as arrays:
            return DocumentMeasures(**arrays)

    def load_agreement(self, mixing: MixingParameters) -> npt.NDArray[np.float64] | None:
        """What `gradients` wrote, `[documents, references, layers, methods]`; None without such documents."""
        chosen = self._of_gradients(mixing)
        return np.stack([np.load(self._file(i, "gradient"))["arr_0"] for i in chosen]) if chosen else None

    def _of_gradients(self, mixing: MixingParameters) -> list[int]:
        return [i for i, document in enumerate(self.documents) if document.counted][: mixing.gradient_documents]

    def _file(self, i: int, what: str = "measures") -> Path:
        return self.folder / self.checkpoint / f"{what}-{i}.npz"

    def _own(self, units: Sequence[Any]) -> list[Any]:
        return list(units[self.process :: self.processes])

    def _progress(self, units: Sequence[Any], what: str, unit: str) -> Iterator[Any]:
        yield from tqdm(units, desc=f"{self.checkpoint}: {what}", unit=unit, disable=None)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A path to write to, which gets its own name only once everything is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    yield part
    part.rename(path)

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
from zlib import crc32

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from stages.mixing.batches import BatchMeasurer, DocumentMeasures
from stages.mixing.contributions import LEAST_RAW_SUM, Contributions
from stages.mixing.controls import SAME_PASS
from stages.mixing.derivatives import DocumentDerivatives
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

    def control(self, name: str, measurer: BatchMeasurer, documents: Sequence[Document], batch_tokens: int) -> None:
        """The ratios of a control that takes a forward pass of its own, of `documents` as it has them."""
        counted = [i for i, document in enumerate(documents) if document.counted]
        batches = batches_by_tokens([len(documents[i]) for i in counted], batch_tokens)
        units = self._own([[counted[place] for place in batch] for batch in batches])
        left = [batch for batch in units if not all(self._file(i, name).exists() for i in batch)]
        for batch in self._progress(left, name, "batch"):
            for i, sums in zip(batch, measurer.ratio_sums([documents[i] for i in batch]), strict=True):
                with _whole(self._file(i, name)) as part, part.open("wb") as file:
                    np.savez(file, sums)

    def contributions(self, measurer: DocumentMeasurer) -> None:
        """The contribution matrices of the captured documents, as they are published."""
        captured = self._own([document for document in self.documents if document.captured])
        folders = [contributions_folder(self.checkpoint, each.name, self.folder / "mixing") for each in captured]
        left = [pair for pair in zip(captured, folders, strict=True) if not pair[1].is_dir()]
        steps = len(left) * measurer.layers  # a layer of a long text can take minutes
        with tqdm(total=steps, desc=f"{self.checkpoint}: contributions", unit="layer", disable=None) as progress:
            for document, folder in left:
                found, heads = measurer.contributions(document.ids, progress.update)
                with _whole(folder) as part:
                    part.mkdir(exist_ok=True)
                    self._write(part, document.name, found)
                    if "attention" in measurer.matrices:
                        write_matrix(part, HEADS, heads.half().cpu().numpy(), ("layer", "head", "token", "source"), {})

    def _write(self, folder: Path, document: str, found: Contributions) -> None:
        for method, matrices in found.matrices.items():
            attributes = {"method": method, "checkpoint": self.checkpoint, "document": document}
            write_matrix(folder, method, matrices.float().cpu().numpy(), ("layer", "token", "source"), attributes)
        if found.value_zeroing_raw_sums is not None:
            raw = found.value_zeroing_raw_sums.float().cpu().numpy()
            write_matrix(folder, RAW_SUMS, raw, ("layer", "token"), {"least_trusted": LEAST_RAW_SUM})

    def gradients(self, measurer: DocumentMeasurer, chosen: Sequence[str], mixing: MixingParameters, seed: int) -> None:
        """The derivatives of the reviews `chosen` by name, cut short; directions are drawn anew for each review."""
        for i in self._progress(self._own(self._counted(chosen)), "gradients", "document"):
            if not self._file(i, "gradient").exists():
                document = self.documents[i]
                ids = _cut(document, min(mixing.gradient_max_length, document.counted))
                # The same for a review in both checkpoints, so that they are compared along the same directions.
                own_seed = np.random.SeedSequence([seed, crc32(document.name.encode())]).generate_state(1)[0]
                derivatives = measurer.derivatives(ids, mixing.gradient_directions, int(own_seed))
                with _whole(self._file(i, "gradient")) as part, part.open("wb") as file:
                    np.savez(file, **asdict(derivatives))

    def load(self, i: int) -> DocumentMeasures:
        """What `measure` wrote of document `i`."""
        with np.load(self._file(i)) as arrays:
            return DocumentMeasures(**arrays)

    def load_control(self, name: str) -> npt.NDArray[np.float64]:
        """Of a control, the sums of the ratios over each counted document's tokens, `[documents, layers, methods]`."""
        found = []
        for i, document in enumerate(self.documents):
            if document.counted:
                same_pass = name in SAME_PASS
                with np.load(self._file(i, "measures" if same_pass else name)) as arrays:
                    found.append(arrays["controls"][SAME_PASS.index(name)] if same_pass else arrays["arr_0"])
        return np.stack(found).swapaxes(1, 2)

    def load_unit_sums(self) -> Iterator[npt.NDArray[np.float32]]:
        """Of each document that counts, and nothing else of it, what `measure` wrote `[sites, width]`."""
        for i, document in enumerate(self.documents):
            if document.counted:
                with np.load(self._file(i)) as arrays:
                    yield arrays["unit_sums"]

    def load_derivatives(self, chosen: Sequence[str]) -> dict[str, DocumentDerivatives]:
        """What `gradients` wrote, by the name of the review."""
        found = {}
        for i in self._counted(chosen):
            with np.load(self._file(i, "gradient")) as arrays:
                found[self.documents[i].name] = DocumentDerivatives(**arrays)
        return found

    def _counted(self, names: Sequence[str]) -> list[int]:
        return [i for i, document in enumerate(self.documents) if document.counted and document.name in names]

    def _file(self, i: int, what: str = "measures") -> Path:
        return self.folder / self.checkpoint / f"{what}-{i}.npz"

    def _own(self, units: Sequence[Any]) -> list[Any]:
        return list(units[self.process :: self.processes])

    def _progress(self, units: Sequence[Any], what: str, unit: str) -> Iterator[Any]:
        yield from tqdm(units, desc=f"{self.checkpoint}: {what}", unit=unit, disable=None)


def _cut(document: Document, length: int) -> npt.NDArray[np.int32]:
    """Its first tokens as the tokenizer would cut it, a special token that ends it kept."""
    ids = document.ids
    if len(ids) <= length:
        return ids
    ends = ids[-1:] if document.classes[-1] == CLASSES.index("sep") else ids[:0]
    return np.append(ids[: length - len(ends)], ends)


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A path to write to, which gets its own name only once everything is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    yield part
    part.rename(path)

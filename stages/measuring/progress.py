"""What `measure` knows so far, batch by batch, in files that a killed run goes on from.

Each process takes its share of the batches; which documents share a batch does not depend on
the number of processes, so the numbers do not either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from attnmix.core.options import MeasureParameters
from attnmix.core.statistics import Draws, Resampled, mean_product_across
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.controls import SAME_PASS
from attnmix.measures.derivatives import DocumentDerivatives
from attnmix.measures.documents import Document
from attnmix.measures.neurons import record_heads
from attnmix.measures.sums import Sums, document_sums
from attnmix.measures.whole_document import DocumentMeasurer
from attnmix.store.heads import heads_folder, write_heads
from attnmix.store.mixing import contributions_folder, write_matrix
from stages.measuring.corpus import Corpus
from stages.measuring.work_files import read_array, whole, write_arrays

Doubles = npt.NDArray[np.float64]

MEASURES = "measures"
IDENTITIES, RATIOS = "identities", "ratios"  # arrays beside those of `document_sums`
CONTROLS = "controls"


@dataclass(frozen=True)
class CheckpointMeasures:
    """One checkpoint's measures of the corpus under `folder`; `folder/mixing` holds what is published as it is.

    This process takes every `processes`-th batch or document, from its own number on.
    """

    folder: Path
    checkpoint: str
    corpus: Corpus
    batch_tokens: int
    rows_of: Literal["all", "captured", "none"]
    """The documents whose tokens' ratios are kept, as `measure.tokens`."""
    process: int
    processes: int

    def measure(self, measurer: BatchMeasurer) -> None:
        """Ratios, geometry and steps of all documents."""
        for batch, file in self._left(MEASURES):
            documents = [self.corpus.document(number) for number in batch]
            errors: list[Doubles] = []
            kept = [np.zeros((len(measurer.methods), measurer.layers, 0), np.float32)]
            sums = []
            for document, measures in zip(documents, measurer.measures(documents), strict=True):
                errors.append(measures.identities)
                if document.counted:
                    sums.append(document_sums(document, measures))
                if self.keeps(document.captured):
                    kept.append(measures.ratios)
            arrays = {name: np.stack([each[name] for each in sums]) for name in (sums[0] if sums else ())}
            write_arrays(file, arrays | {IDENTITIES: np.stack(errors).max(0), RATIOS: np.concatenate(kept, axis=-1)})

    def control(self, name: str, measurer: BatchMeasurer, changed: Callable[[Document], Document]) -> None:
        """The ratios of a control that takes a forward pass of its own, of the documents that count, as `changed`."""
        for batch, file in self._left(name):
            documents = [changed(self.corpus.document(number)) for number in batch]
            write_arrays(file, {CONTROLS: np.stack(list(measurer.ratio_sums(documents)))[:, None]})

    def contributions(self, measurer: DocumentMeasurer) -> None:
        """The contribution matrices of the captured documents, as they are published."""
        found = [(number, self._contributions_folder(number)) for number in self._own(self._captured())]
        left = [(number, folder) for number, folder in found if not folder.is_dir()]
        steps = len(left) * measurer.layers  # a layer of a long text can take minutes
        with tqdm(total=steps, desc=f"{self.checkpoint}: contributions", unit="layer", disable=None) as progress:
            for number, folder in left:
                document = self.corpus.document(number)
                matrices = measurer.contributions(document.ids, progress.update)
                with whole(folder) as part:
                    part.mkdir(exist_ok=True)
                    for method, matrix in matrices.items():
                        attributes = {"method": method, "checkpoint": self.checkpoint, "document": document.name}
                        array = matrix.float().cpu().numpy()
                        write_matrix(part, method, array, ("layer", "token", "source"), attributes)

    def _captured(self) -> list[int]:
        numbers: list[int] = np.flatnonzero(self.corpus.captured).tolist()
        return numbers

    def _contributions_folder(self, number: int) -> Path:
        return contributions_folder(self.checkpoint, self.corpus.document(number).name, self.folder / "mixing")

    def heads(self, measurer: DocumentMeasurer) -> None:
        """What goes through every head of the captured documents, as it is published."""
        for number in self._progress(list(self._own(self._captured())), "heads", "text"):
            document = self.corpus.document(number)
            folder = heads_folder(self.checkpoint, document.name, self.folder / "mixing")
            if not folder.is_dir():
                with whole(folder) as part:
                    write_heads(part, record_heads(measurer.base, measurer.folder, document.ids, measurer.layers))

    def gradients(
        self, measurer: DocumentMeasurer, chosen: Sequence[int], mixing: MeasureParameters, seed: int
    ) -> None:
        """The derivatives of the documents `chosen`, cut short; directions are drawn anew for each of them."""
        for number in self._progress(list(self._own(chosen)), "gradients", "document"):
            if not self._gradient(number).exists():
                document = self.corpus.document(number)
                ids = document.cut(mixing.gradient_max_length).ids
                # The same for a review in both checkpoints, so that they are compared along the same directions.
                own_seed = np.random.SeedSequence([seed, crc32(document.name.encode())]).generate_state(1)[0]
                derivatives = measurer.derivatives(ids, mixing.gradient_directions, int(own_seed))
                write_arrays(self._gradient(number), asdict(derivatives))

    def sums(self, gains: Doubles) -> Sums:
        """What `measure` wrote of the documents that count; `gains` of the layers."""
        across = mean_product_across(self.unit_sums, self.unit_counts())
        counted = self.corpus.counted[self.corpus.counted > 0]
        return Sums(self.read, counted, self._identities(), gains, across)

    def read(self, *names: str) -> Iterator[tuple[Doubles, ...]]:
        """Arrays of `document_sums`, block by block of the documents that count, in their order `[documents, ...]`."""
        for block in self.corpus.counted_blocks:
            yield tuple(self._in_order(MEASURES, block, name) for name in names)

    def same_pass_controls(self, draws: Draws) -> dict[str, Resampled]:
        """By name the mean ratios `[layers, methods]` of the controls that have no forward pass of their own."""
        return {name: self._of_control(MEASURES, place, draws) for place, name in enumerate(SAME_PASS)}

    def own_pass_control(self, name: str, draws: Draws) -> dict[str, Resampled]:
        """Likewise those of `control`."""
        return {name: self._of_control(name, 0, draws)}

    def _of_control(self, what: str, place: int, draws: Draws) -> Resampled:
        blocks = self.corpus.counted_blocks
        sums = (self._in_order(what, block, CONTROLS)[:, place].swapaxes(1, 2) for block in blocks)
        tokens = (self.corpus.tokens(block).astype(np.float64)[:, None, None] for block in blocks)
        return draws.resample(zip(sums, tokens, strict=True))

    def _in_order(self, what: str, block: int, name: str) -> npt.NDArray[Any]:
        """The array of a block's documents that count, from those of its batches."""
        numbers, parts = [], []
        for counted, file in self._counted_batches(what, block):
            numbers += counted
            parts.append(read_array(file, name))
        return np.asarray(np.concatenate(parts)[np.argsort(numbers)])

    def _counted_batches(self, what: str, block: int) -> Iterator[tuple[list[int], Path]]:
        """The documents of each batch that count, where there are any, and its file."""
        for batch, file in self._batches(what, block):
            counted = [number for number in batch if self.corpus.counted[number]]
            if counted:
                yield counted, file

    def unit_sums(self) -> Iterator[npt.NDArray[np.float32]]:
        """Of each document that counts `[sites, width]`, in the order of `unit_counts`, a batch in memory at a time."""
        for block in self.corpus.counted_blocks:
            for _, file in self._counted_batches(MEASURES, block):
                yield from read_array(file, "unit_sums")

    def unit_counts(self) -> Doubles:
        """Numbers of tokens."""
        blocks = (self._counted_batches(MEASURES, block) for block in self.corpus.counted_blocks)
        numbers = [number for batches in blocks for counted, _ in batches for number in counted]
        return self.corpus.counted[numbers].astype(np.float64)

    def _identities(self) -> Doubles:
        """The largest errors of all documents `[levels, identities]`."""
        return np.asarray(reduce(np.maximum, (read_array(file, IDENTITIES) for _, file in self._all(MEASURES))))

    def ratios(self) -> Iterator[tuple[Document, npt.NDArray[np.float32]]]:
        """The documents whose ratios are kept, in their order, and these `[methods, layers, tokens]`."""
        for block in self.corpus.blocks:
            rows = self.corpus.rows(block)
            if any(map(self.keeps, self.corpus.captured[rows].tolist())):
                found: dict[int, npt.NDArray[np.float32]] = {}
                for batch, file in self._batches(MEASURES, block):
                    kept = [number for number in batch if self.keeps(bool(self.corpus.captured[number]))]
                    if kept:
                        ends = np.cumsum(self.corpus.lengths[kept])[:-1]
                        found |= dict(zip(kept, np.split(read_array(file, RATIOS), ends, axis=-1), strict=True))
                for number in sorted(found):
                    yield self.corpus.document(number), found.pop(number)

    def keeps(self, captured: bool) -> bool:
        """Whether the ratios of a document's tokens are kept."""
        return self.rows_of == "all" or (self.rows_of == "captured" and captured)

    def derivatives(self, chosen: Sequence[int]) -> dict[str, DocumentDerivatives]:
        """What `gradients` wrote, by the name of the review."""
        found = {}
        for number in chosen:
            with np.load(self._gradient(number)) as arrays:
                found[self.corpus.document(number).name] = DocumentDerivatives(**arrays)
        return found

    def _gradient(self, number: int) -> Path:
        return self.folder / self.checkpoint / f"gradient-{number}.npz"

    def _all(self, what: str) -> Iterator[tuple[list[int], Path]]:
        """Every batch, and the file that is there once it is done."""
        for block in self.corpus.blocks:
            yield from self._batches(what, block)

    def _batches(self, what: str, block: int) -> Iterator[tuple[list[int], Path]]:
        batches = self.corpus.batches(block, self.batch_tokens, counted=what != MEASURES)
        for place, batch in enumerate(batches):
            yield batch, self.folder / self.checkpoint / f"{what}-{block}-{place}.npz"

    def _left(self, what: str) -> Iterator[tuple[list[int], Path]]:
        """This process's batches that are not done."""

        def left() -> Iterator[tuple[list[int], Path]]:
            return (unit for unit in self._own(self._all(what)) if not unit[1].exists())

        yield from self._progress(left(), what, "batch", sum(1 for _ in left()))

    def _own(self, units: Iterable[Any]) -> Iterator[Any]:
        return islice(units, self.process, None, self.processes)

    def _progress(self, units: Iterable[Any], what: str, unit: str, total: int | None = None) -> Iterator[Any]:
        yield from tqdm(units, desc=f"{self.checkpoint}: {what}", unit=unit, total=total, disable=None)

"""The unfinished work of `measure`, unit by unit, in files from which a killed run resumes.

Each process takes its share of the units: batches, or single documents. Which documents share a batch does not depend
on the number of processes, so the numbers do not either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from attnmix.core.statistics import mean_product_across
from attnmix.measures.batches import BatchMeasurer
from attnmix.measures.controls import OWN_PASS
from attnmix.measures.documents import Document
from attnmix.measures.heads import record_heads
from attnmix.measures.sums import document_sums
from attnmix.measures.tables import Block, CheckpointSums
from attnmix.measures.whole_document import DocumentMeasurer
from attnmix.store.layout import contributions_folder, heads_folder
from attnmix.store.writers import write_heads, write_matrix
from stages.measuring.corpus import Corpus
from stages.measuring.work_files import whole_folder, write_arrays

Doubles = npt.NDArray[np.float64]
Unit = TypeVar("Unit")

MEASURES = "measures"
IDENTITIES, RATIOS = "identities", "ratios"  # arrays beside those of `document_sums`
CORPUS_ARRAYS = ("document", "label", "tokens")
GRADIENT_DIRECTIONS = 8  # random directions of each derivative


@dataclass(frozen=True)
class CheckpointMeasures:
    """One checkpoint's measures of the corpus under `folder`; `folder/mixing` holds what is published as it is.

    This process takes every `processes`-th batch or document, from its own number on.
    """

    folder: Path
    checkpoint: str
    corpus: Corpus
    batch_tokens: int
    process: int
    processes: int

    def measure(self, measurer: BatchMeasurer) -> None:
        """Write ratios, geometry and steps of all documents, batch by batch."""
        for batch, file in self._remaining(MEASURES, self._all(MEASURES)):
            documents = [self.corpus.document(number) for number in batch]
            measures = list(measurer.measures(documents))
            sums = [document_sums(*pair) for pair in zip(documents, measures, strict=True) if pair[0].counted]
            arrays = {name: np.stack([each[name] for each in sums]) for name in (sums[0] if sums else ())}
            arrays[IDENTITIES] = np.stack([each.identities for each in measures]).max(0)
            write_arrays(file, arrays | {RATIOS: np.concatenate([each.ratios for each in measures], axis=-1)})

    def control(self, name: str, measurer: BatchMeasurer, changed: Callable[[Document], Document]) -> None:
        """Write the ratios of a control with a pass of its own, of the documents in the statistics as `changed`."""
        for batch, file in self._remaining(name, self._all(name)):
            documents = [changed(self.corpus.document(number)) for number in batch]
            write_arrays(file, {name: np.stack(list(measurer.ratio_sums(documents)))})

    def contributions(self, measurer: DocumentMeasurer) -> None:
        """Write the contribution matrices of the captured documents, as they are published."""
        for number, folder in self._remaining("contributions", self._captured(contributions_folder)):
            document = self.corpus.document(number)
            with whole_folder(folder) as part:
                for method, matrix in measurer.contributions(document.ids).items():
                    attributes = {"method": method, "checkpoint": self.checkpoint, "document": document.name}
                    array = matrix.float().cpu().numpy()
                    write_matrix(part, method, array, ("layer", "token", "source"), attributes)

    def heads(self, measurer: DocumentMeasurer) -> None:
        """Write what goes through every head of the captured documents, as it is published."""
        for number, folder in self._remaining("heads", self._captured(heads_folder)):
            ids = self.corpus.document(number).ids
            with whole_folder(folder) as part:
                write_heads(part, record_heads(measurer.base, measurer.folder, ids, measurer.layers))

    def gradients(self, measurer: DocumentMeasurer, chosen: Sequence[int], max_length: int, seed: int) -> None:
        """Write the derivatives of the documents `chosen`, cut short; directions are drawn anew for each of them."""
        for number, file in self._remaining("gradients", ((number, self._gradient(number)) for number in chosen)):
            document = self.corpus.document(number)
            ids = document.cut(max_length).ids
            # The same for a review in both checkpoints, so that they are compared along the same directions.
            document_seed = np.random.SeedSequence([seed, crc32(document.name.encode())]).generate_state(1)[0]
            write_arrays(file, measurer.derivatives(ids, GRADIENT_DIRECTIONS, int(document_seed)))

    def derivatives(self, chosen: Sequence[int]) -> dict[str, dict[str, Doubles]]:
        """Return what `gradients` wrote, by the name of the review."""
        return {self.corpus.document(number).name: dict(np.load(self._gradient(number))) for number in chosen}

    def sums(self, gains: Doubles) -> CheckpointSums:
        """Return what `measure` and `control` wrote of the documents in the statistics; `gains` are of the layers."""
        errors = np.stack([np.load(file)[IDENTITIES] for _, file in self._all(MEASURES)]).max(0)
        return CheckpointSums(self.blocks, errors, gains, mean_product_across(self._unit_sums))

    def blocks(self) -> Iterator[Block]:
        """Yield each block of documents in the statistics, whose arrays are read when they are asked for."""
        for block in self.corpus.counted_blocks:
            yield partial(self._array, block)

    def ratios(self) -> Iterator[tuple[Document, npt.NDArray[np.float32]]]:
        """Yield the documents in their order, with the ratios of their tokens `[methods, layers, tokens]`."""
        for block in self.corpus.blocks:
            ratios: dict[int, npt.NDArray[np.float32]] = {}
            for batch, file in self._batches(MEASURES, block):
                ends = np.cumsum(self.corpus.lengths[batch])[:-1]
                ratios |= dict(zip(batch, np.split(np.load(file)[RATIOS], ends, axis=-1), strict=True))
            for number in sorted(ratios):
                yield self.corpus.document(number), ratios.pop(number)

    def _array(self, block: int, name: str) -> npt.NDArray[Any]:
        """Return an array of a block's documents in the statistics, in their order."""
        if name in CORPUS_ARRAYS:
            return self.corpus.array(name, block)
        numbers, parts = [], []
        for batch, file in self._batches(name if name in OWN_PASS else MEASURES, block):
            if counted := [number for number in batch if self.corpus.counted[number]]:
                numbers += counted
                parts.append(np.load(file)[name])
        return np.asarray(np.concatenate(parts)[np.argsort(numbers)])

    def _unit_sums(self) -> Iterator[tuple[npt.NDArray[np.float32], int]]:
        for block in self.blocks():
            yield from zip(block("unit_sums"), block("tokens").tolist(), strict=True)

    def _gradient(self, number: int) -> Path:
        return self.folder / self.checkpoint / f"gradient-{number}.npz"

    def _captured(self, folder: Callable[[str, str, Path], Path]) -> Iterator[tuple[int, Path]]:
        for number in np.flatnonzero(self.corpus.captured).tolist():
            yield number, folder(self.checkpoint, self.corpus.document(number).name, self.folder / "mixing")

    def _all(self, what: str) -> Iterator[tuple[list[int], Path]]:
        for block in self.corpus.blocks:
            yield from self._batches(what, block)

    def _batches(self, what: str, block: int) -> Iterator[tuple[list[int], Path]]:
        """Yield every batch of a block, and the file that exists once it is done."""
        batches = self.corpus.batches(block, self.batch_tokens, counted=what != MEASURES)
        for place, batch in enumerate(batches):
            yield batch, self.folder / self.checkpoint / f"{what}-{block}-{place}.npz"

    def _remaining(self, what: str, units: Iterable[tuple[Unit, Path]]) -> Iterator[tuple[Unit, Path]]:
        """Yield this process's share of the units whose file does not exist yet."""
        remaining = [unit for unit in islice(units, self.process, None, self.processes) if not unit[1].exists()]
        yield from tqdm(remaining, desc=f"{self.checkpoint}: {what}", disable=None)

"""Capture the feature vectors of the chosen texts at every capture point, in one forward pass each.

    python -m stages capture
    torchrun --nproc-per-node 4 -m stages capture

The unit of work is a shard of rows: a process computes the texts that reach into its
shards and writes each shard of each store once. Writes `features/capture/`; where
`capture.store` names another place the arrays lie there, and a manifest says so.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from accelerate import PartialState
from tqdm import tqdm
from transformers import PreTrainedModel

from attnmix.arithmetic.kernels import use
from attnmix.core.errors import InputError
from attnmix.core.options import Parameters
from attnmix.core.points import POINTS, Site
from attnmix.models.capture_points import widths
from attnmix.models.encoding import batches_by_tokens, padded
from attnmix.models.families import family_of
from attnmix.models.feature_writer import Batch, Part, RowBlocks
from attnmix.models.loading import load_classifier, load_tokenizer
from attnmix.store import features as store
from attnmix.store import tokens as tokens_store
from attnmix.store.files import CHECKED, writing
from attnmix.store.runs import Run
from attnmix.store.shard_writer import Block
from stages.common.resources import check_disk, trim_heap
from stages.common.resume import clear, publish, unfinished_folder
from stages.common.stage_lock import check_store

TOKEN_IDS = "token_ids.bin"  # as NumPy reads it into every process
SMALLER = "capture.points, capture.documents, capture.drawn, capture.max_length or capture.dtype"

Lengths = npt.NDArray[np.int64]


def main(parameters: Parameters) -> None:
    run = Run(Path())
    check_store(parameters.capture)
    use(parameters.arithmetic)
    capture_texts(parameters, run.finetuned, run)


def capture_texts(parameters: Parameters, checkpoint: Path, run: Run) -> None:
    """Write `features/capture/` of `run` in the model at `checkpoint`, of the captured texts that `tokenize` left."""
    capture = parameters.capture
    state = PartialState(cpu=not torch.cuda.is_available())
    with ThreadPoolExecutor(1) as beside:  # it reads the whole model too
        unfinished = beside.submit(unfinished_folder, "capture", parameters, run.root)
        tokenizer = load_tokenizer(checkpoint)
        classifier: Any = load_classifier(checkpoint)
    base: PreTrainedModel = classifier.base_model.to(state.device)
    wanted = _wanted(base, capture.points)

    folder = unfinished.result()
    arrays = store.place_of(capture.store) if capture.elsewhere else folder / "stores"
    if state.is_main_process:
        if not (folder / "stores").is_dir():  # new, or killed after its stores were published
            shutil.rmtree(folder / "done", ignore_errors=True)
        lengths = _write_tokens(folder, run)
        plan = store.plan_store(int(lengths.sum()), base.config.hidden_size, capture.dtype)
        if isinstance(arrays, Path):
            size = plan.tokens * sum(wanted.values()) * np.dtype(plan.dtype).itemsize
            what = f"capture: {plan.tokens} tokens at {len(wanted)} points need"
            check_disk(what, size, arrays, SMALLER, cached=not capture.elsewhere)
        if not (folder / "done").is_dir():
            store.create_stores(arrays, list(wanted), plan, wanted)
            (folder / "done").mkdir()
        np.save(folder / "lengths.npy", lengths)
        pa.default_memory_pool().release_unused()  # so that the memory of the texts can serve the vectors
        trim_heap()
    state.wait_for_everyone()
    lengths = np.load(folder / "lengths.npy")
    plan = store.plan_store(int(lengths.sum()), base.config.hidden_size, capture.dtype)

    units = _Units(plan, store.open_blocks(arrays, wanted), folder / "done", capture.elsewhere)
    own = [unit for unit in range(plan.units) if unit % state.num_processes == state.process_index]
    left = {unit: plan.rows_of(unit) for unit in own if not units.file(unit).exists()}
    with RowBlocks(base, wanted, capture.dtype, capture.precision, units.open, store.check_fits) as blocks:
        ids = np.memmap(folder / TOKEN_IDS, np.int32, "r")
        _Texts(ids, lengths, tokenizer.pad_token_id, capture.batch_tokens).units(left, blocks, units.written)
    state.wait_for_everyone()
    if state.is_main_process:
        if capture.elsewhere:
            store.write_manifest(folder / "stores", capture.store, units.digests())
        publish(folder / "stores", run.activations)
        clear(folder)
        logging.info("captured %d tokens of %d texts at %d points", plan.tokens, len(lengths), len(wanted))


def _wanted(base: PreTrainedModel, points: Sequence[str]) -> dict[Site, int]:
    """The sites to capture and their widths; why a point is absent is said, and `InputError` where all are."""
    family = family_of(base.config)
    for point in points:
        if point in family.absent():
            logging.info("%s: absent in the model family %s: %s", point, family.model_type, family.absent()[point])
    if not family.present(points):
        raise InputError(
            f"capture.points: the model family {family.model_type} has none of {', '.join(points)}; "
            f"allowed: {', '.join(family.present(POINTS))}"
        )
    return widths(base, points)


def _reach(lengths: Lengths, rows: slice) -> list[int]:
    """The texts that reach into `rows`."""
    ends = np.cumsum(lengths)
    return list(map(int, np.flatnonzero((ends > rows.start) & (ends - lengths < rows.stop))))


def _write_tokens(folder: Path, run: Run) -> Lengths:
    """Write the table of the stores' rows, and all token ids in a row, a block at a time; the tokens of each text."""
    lengths: Lengths = run.documents.loc[run.documents["captured"], "tokens"].to_numpy(np.int64)
    fields = [("document", pa.string()), ("position", pa.int32()), ("token_id", pa.int32()), ("token", pa.string())]
    schema = pa.schema(fields)
    ids_file, tokens_file = folder / TOKEN_IDS, store.tokens_file(folder / "stores")
    left = int(lengths.sum())
    with (
        writing(tokens_file) as path,
        pq.ParquetWriter(path, schema, **CHECKED) as writer,
        writing(ids_file),
        ids_file.open("wb") as file,
    ):
        for block in run.token_blocks(columns=schema.names, blocks=range(-(-len(lengths) // tokens_store.BLOCK))):
            captured = block.iloc[:left]
            writer.write_table(pa.Table.from_pandas(captured, schema, preserve_index=False))
            captured["token_id"].to_numpy().tofile(file)
            left -= len(captured)
    return lengths


class _Units:
    """Which units of rows are whole: a file in `done` for each, with digests of its blocks where they are asked for."""

    def __init__(self, plan: store.StorePlan, blocks: Callable[..., Block], done: Path, with_digests: bool) -> None:
        self.plan, self.blocks, self.done, self.with_digests = plan, blocks, done, with_digests
        self.of_rows: dict[int, dict[str, Any]] = defaultdict(dict)

    def file(self, unit: int) -> Path:
        """There as soon as all of the unit is written."""
        return self.done / str(unit)

    def open(self, site: Site, rows: slice) -> Block:
        """One site's block of a unit."""
        if not self.with_digests:
            return self.blocks(site, rows)
        digest = self.of_rows[rows.start][str(site)] = hashlib.sha256()
        return self.blocks(site, rows, digest)

    def written(self, unit: int) -> None:
        """All of its blocks are."""
        digests = self.of_rows.pop(self.plan.rows_of(unit).start, {})
        begun = self.file(unit).with_suffix(".begun")
        begun.write_text(json.dumps({site: each.hexdigest() for site, each in digests.items()}), encoding="utf-8")
        begun.rename(self.file(unit))

    def digests(self) -> list[dict[str, str]]:
        """Of each unit, by site."""
        return [json.loads(self.file(unit).read_text(encoding="utf-8")) for unit in range(self.plan.units)]


class _Texts:
    """The texts as batches for the rows of a store."""

    def __init__(self, ids: npt.NDArray[np.int32], lengths: Lengths, padding: int, batch_tokens: int) -> None:
        self.ids, self.lengths, self.padding, self.batch_tokens = ids, lengths, padding, batch_tokens
        self.ends = np.cumsum(lengths)

    def units(self, units: Mapping[int, slice], blocks: RowBlocks, done: Callable[[int], None]) -> None:
        """Capture units of rows; says of each that it is `done` once all of it is written."""
        total = sum(rows.stop - rows.start for rows in units.values())
        with tqdm(total=total, desc="capture", unit="token", unit_scale=True, disable=None) as progress:
            for unit, rows in units.items():
                blocks.run(rows, self._batches(rows, blocks.base.device, progress), partial(done, unit))
                trim_heap()
            blocks.wait()

    def _batches(self, rows: slice, device: torch.device, progress: tqdm[Any]) -> Iterator[Batch]:
        """Forward passes of every text that reaches into `rows`."""
        reach = _reach(self.lengths, rows)
        texts = [self.ids[self.ends[i] - self.lengths[i] : self.ends[i]].tolist() for i in reach]
        batches = batches_by_tokens([len(text) for text in texts], self.batch_tokens)
        # Largest batch first: later ones reuse its memory instead of fragmenting the heap.
        batches.sort(key=lambda batch: len(batch) * len(texts[batch[-1]]), reverse=True)
        for batch in batches:
            parts = []
            for number, i in enumerate(batch):
                first = int(self.ends[reach[i]]) - len(texts[i])
                low, high = max(first, rows.start), min(first + len(texts[i]), rows.stop)
                parts.append(Part(number, slice(low - first, high - first), low - rows.start))
            yield Batch(padded([texts[i] for i in batch], self.padding, device), parts)
            progress.update(sum(part.tokens.stop - part.tokens.start for part in parts))

"""Capture the feature vectors of the chosen texts at every capture point, in one forward pass each.

    python -m stages capture
    torchrun --nproc-per-node 4 -m stages capture

The unit of work is a shard of rows: a process computes the texts that reach into its shards and writes each shard of
each store once. Writes `features/capture/`; where `capture.store` names another place the arrays lie there, and a
manifest says so.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
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
from attnmix.models.feature_writer import Batch, FeatureWriter, Part
from attnmix.models.loading import load_classifier, load_tokenizer
from attnmix.store import features as store
from attnmix.store import tokens as tokens_store
from attnmix.store.files import CHECKED, writing
from attnmix.store.runs import Run
from stages.common.resources import check_disk, check_store, trim_heap
from stages.common.resume import clear, publish, unfinished_folder

TOKEN_IDS = "token_ids.bin"  # of all texts in a row, which every process maps into its memory
SMALLER = "capture.points, capture.documents, capture.drawn, capture.max_length or capture.dtype"


def main(parameters: Parameters) -> None:
    """Capture the texts in the fine-tuned model."""
    run = Run(Path())
    check_store(parameters.capture)
    use(parameters.arithmetic)
    capture_texts(parameters, run.finetuned, run)


def capture_texts(parameters: Parameters, checkpoint: Path, run: Run) -> None:
    """Write `features/capture/` of `run` in the model at `checkpoint`, of the captured texts that `tokenize` left."""
    capture = parameters.capture
    lengths = run.documents.loc[run.documents["captured"], "tokens"].to_numpy(np.int64)
    state = PartialState(cpu=not torch.cuda.is_available())
    with ThreadPoolExecutor(1) as beside:  # its digest reads the whole model too
        unfinished = beside.submit(unfinished_folder, "capture", parameters, run.root)
        tokenizer = load_tokenizer(checkpoint)
        classifier: Any = load_classifier(checkpoint)
    base: PreTrainedModel = classifier.base_model.to(state.device)
    sites = _sites(base, capture.points)

    folder = unfinished.result()
    place = store.place_of(capture.store) if capture.elsewhere else folder / "stores"
    plan = store.plan_store(int(lengths.sum()), base.config.hidden_size, capture.dtype)
    if state.is_main_process:
        if not (folder / "stores").is_dir():  # new, or killed after its stores were published
            shutil.rmtree(folder / "done", ignore_errors=True)
        _write_tokens(folder, run, len(lengths), plan.tokens)
        if isinstance(place, Path):
            size = plan.tokens * sum(sites.values()) * np.dtype(plan.dtype).itemsize
            what = f"capture: {plan.tokens} tokens at {len(sites)} points need"
            check_disk(what, size, place, SMALLER, cached=not capture.elsewhere)
        if not (folder / "done").is_dir():
            store.create_stores(place, list(sites), plan, sites)
            (folder / "done").mkdir()
        pa.default_memory_pool().release_unused()  # so that the memory of the texts can serve the vectors
        trim_heap()
    state.wait_for_everyone()

    digests: dict[str, str] = {}  # of the unit that is being written

    def write(site: Site, rows: slice, features: npt.NDArray[Any]) -> None:
        store.write_block(place, site, rows, features)
        if capture.elsewhere:
            digests[str(site)] = hashlib.sha256(features.data).hexdigest()

    def finish(unit: int) -> None:
        begun = folder / f"done/{unit}.begun"
        begun.write_text(json.dumps(digests), encoding="utf-8")
        begun.rename(begun.with_suffix(""))
        digests.clear()

    texts = _Texts(np.memmap(folder / TOKEN_IDS, np.int32, "r"), lengths, tokenizer.pad_token_id, capture.batch_tokens)
    units = [unit for unit in range(plan.units) if unit % state.num_processes == state.process_index]
    units = [unit for unit in units if not (folder / f"done/{unit}").exists()]
    with (
        FeatureWriter(base, sites, capture.dtype, capture.precision, write, store.check_fits) as writer,
        tqdm(desc="capture", unit="token", unit_scale=True, disable=None) as progress,
    ):
        progress.total = sum(plan.rows_of(unit).stop - plan.rows_of(unit).start for unit in units)
        for unit in units:
            rows = plan.rows_of(unit)
            writer.run(rows, texts.batches(rows, base.device, progress), partial(finish, unit))
            trim_heap()
        writer.wait()
    state.wait_for_everyone()
    if state.is_main_process:
        if capture.elsewhere:
            by_unit = [json.loads((folder / f"done/{unit}").read_text(encoding="utf-8")) for unit in range(plan.units)]
            store.write_manifest(folder / "stores", capture.store, by_unit)
        publish(folder / "stores", run.activations)
        clear(folder)
        logging.info("captured %d tokens of %d texts at %d points", plan.tokens, len(lengths), len(sites))


def _sites(base: PreTrainedModel, points: Sequence[str]) -> dict[Site, int]:
    """Return the sites to capture and their widths, and log why a point is absent; `InputError` where all are."""
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


def _write_tokens(folder: Path, run: Run, texts: int, tokens: int) -> None:
    """Write the table of the stores' rows, and all token ids in a row, a block at a time."""
    fields = [("document", pa.string()), ("position", pa.int32()), ("token_id", pa.int32()), ("token", pa.string())]
    schema = pa.schema(fields)
    with (
        writing(store.tokens_file(folder / "stores")) as path,
        pq.ParquetWriter(path, schema, **CHECKED) as writer,
        (folder / TOKEN_IDS).open("wb") as file,
    ):
        for block in run.token_blocks(columns=schema.names, blocks=range(-(-texts // tokens_store.BLOCK))):
            captured = block.iloc[:tokens]
            writer.write_table(pa.Table.from_pandas(captured, schema, preserve_index=False))
            captured["token_id"].to_numpy().tofile(file)
            tokens -= len(captured)


class _Texts:
    """The captured texts: their token ids in a row, and how many of these each has."""

    def __init__(
        self, ids: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64], padding: int, batch_tokens: int
    ) -> None:
        self.ids, self.padding, self.batch_tokens = ids, padding, batch_tokens
        self.ends = np.cumsum(lengths)
        self.starts = self.ends - lengths

    def batches(self, rows: slice, device: torch.device, progress: tqdm[Any]) -> Iterator[Batch]:
        """Yield the forward passes of every text that reaches into `rows`."""
        reach = np.flatnonzero((self.ends > rows.start) & (self.starts < rows.stop))
        starts = self.starts[reach].tolist()
        texts = [self.ids[start:end].tolist() for start, end in zip(starts, self.ends[reach], strict=True)]
        batches = batches_by_tokens([len(text) for text in texts], self.batch_tokens)
        # Largest batch first: later ones reuse its memory instead of fragmenting the heap.
        batches.sort(key=lambda batch: len(batch) * len(texts[batch[-1]]), reverse=True)
        for batch in batches:
            parts = []
            for number, i in enumerate(batch):
                low, high = max(starts[i], rows.start), min(starts[i] + len(texts[i]), rows.stop)
                parts.append(Part(number, slice(low - starts[i], high - starts[i]), low - rows.start))
            yield Batch(padded([texts[i] for i in batch], self.padding, device), parts)
            progress.update(sum(part.tokens.stop - part.tokens.start for part in parts))

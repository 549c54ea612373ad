"""Capture the feature vectors of the chosen texts at every capture point, in one forward pass each.

The unit of work is a shard of rows: a process computes the texts that reach into its shards and writes each shard of
each store once. Writes `features/capture/`, or into it only a manifest of arrays that `capture.store` puts elsewhere.
"""

import ctypes
import json
import logging
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from attnmix.core.device import check_precision, exact_products, process_state
from attnmix.core.disk import check_disk, clear, publish
from attnmix.core.names import POINTS, Site
from attnmix.core.settings import CaptureParameters
from attnmix.models.capture_points import recording, widths
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.encoding import batches_by_tokens, padded
from attnmix.models.families import family_of, present_names
from attnmix.models.loading import load_classifier
from attnmix.models.segments import read_segments
from attnmix.store import features as store
from attnmix.store import texts as texts_store
from attnmix.store.files import PARQUET_OPTIONS, writing
from attnmix.store.runs import Run

TOKEN_IDS = "token_ids.bin"  # of all texts in a row, which every process maps into its memory
Part = tuple[int, slice, slice]
"""The number of a text in its batch, some of its tokens, and their rows in the arrays of features."""
Batch = tuple[dict[str, Tensor], list[Part]]
"""The inputs of one padded forward pass, and the parts of its tokens that are kept."""
SIZE_PARAMETERS = "capture.points, capture.documents, capture.drawn, capture.max_length or capture.dtype"


@exact_products()
def capture_texts(
    capture: CaptureParameters, checkpoint: Path, run: Run, folder: Path, *, device: torch.device, copies: int = 1
) -> None:
    """Write `features/capture/` of `run` in the model at `checkpoint`, of the captured texts that `tokenize` left.

    Unfinished work is in `folder`; `copies` of the stores will lie on its disk.
    """
    lengths = run.documents.loc[run.documents["captured"], "tokens"].to_numpy(np.int64)
    check_precision("capture.precision", capture.precision, device)
    state = process_state(device)
    tokenizer = load_tokenizer(checkpoint)
    padding = tokenizer.pad_token_id
    classifier: Any = load_classifier(checkpoint)
    base: PreTrainedModel = classifier.base_model.to(device)
    family = family_of(base.config)
    family.check_precision("capture.precision", capture.precision)
    read_segments(base, tokenizer, run.pairs)
    sites = widths(base, present_names("capture.points", capture.points, family, POINTS))

    place = store.place_of(capture.store) if capture.elsewhere else folder / "stores"
    plan = store.plan_store(int(lengths.sum()), base.config.hidden_size, capture.dtype)
    if state.is_main_process:
        if not (folder / "stores").is_dir():  # new, or killed after its stores were published
            shutil.rmtree(folder / "done", ignore_errors=True)
        _write_tokens(folder, run, len(lengths), plan.tokens)
        if isinstance(place, Path):
            size = plan.tokens * sum(sites.values()) * np.dtype(plan.dtype).itemsize
            what = f"capture: {plan.tokens} tokens at {len(sites)} points need"
            check_disk(what, size, place, SIZE_PARAMETERS, copies)
        if not (folder / "done").is_dir():
            store.create_stores(place, sites, plan)
            (folder / "done").mkdir()
        pa.default_memory_pool().release_unused()  # so that the memory of the texts can serve the vectors
    state.wait_for_everyone()

    ids = np.memmap(folder / TOKEN_IDS, np.int32, "r")
    units = list(enumerate(plan.units))
    share = units[state.process_index :: state.num_processes]
    remaining = [(unit, rows) for unit, rows in share if not (folder / f"done/{unit}").exists()]
    stores = {site: store.open_to_write(place, site) for site in sites}
    for unit, rows in tqdm(remaining, desc="capture", unit="shard", disable=None):
        features = {site: store.begin_unit(each, rows) for site, each in stores.items()}
        fill_rows(base, _batches(ids, lengths, rows, padding, capture.batch_tokens), features, capture.precision)
        digests = {
            str(site): store.write_unit(stores[site], rows, each, capture.elsewhere) for site, each in features.items()
        }
        _mark_done(folder, unit, digests)
        _trim_heap()
    state.wait_for_everyone()
    if state.is_main_process:
        if capture.elsewhere:
            by_unit = [json.loads((folder / f"done/{unit}").read_text(encoding="utf-8")) for unit, _ in units]
            store.write_manifest(folder / "stores", capture.store, by_unit)
        publish(folder / "stores", run.activations)
        clear(folder)
        logging.info("captured %d tokens of %d texts at %d points", plan.tokens, len(lengths), len(sites))


def _trim_heap() -> None:
    """Return free pages inside the heap to the system; without it, tensors of varying size fragment a growing heap."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def _mark_done(folder: Path, unit: int, digests: dict[str, str]) -> None:
    """Write a file that says that a unit of rows of all stores is written, with digests of the rows by site."""
    begun = folder / f"done/{unit}.begun"
    begun.write_text(json.dumps(digests), encoding="utf-8")
    begun.rename(begun.with_suffix(""))


def _write_tokens(folder: Path, run: Run, texts: int, tokens: int) -> None:
    """Write the table of the stores' rows, and all token ids in a row, a block at a time."""
    schema = pa.schema({"document": pa.string(), "position": pa.int32(), "token_id": pa.int32(), "token": pa.string()})
    with (
        writing(folder / "stores" / store.TOKENS) as path,
        pq.ParquetWriter(path, schema, **PARQUET_OPTIONS) as writer,
        (folder / TOKEN_IDS).open("wb") as file,
    ):
        for block in run.token_blocks(columns=schema.names, blocks=range(-(-texts // texts_store.BLOCK))):
            captured = block.iloc[:tokens]
            writer.write_table(pa.Table.from_pandas(captured, schema, preserve_index=False))
            captured["token_id"].to_numpy().tofile(file)
            tokens -= len(captured)


def fill_rows(
    base: PreTrainedModel, batches: Iterable[Batch], rows: Mapping[Site, store.Unit], precision: str = "fp32"
) -> None:
    """Fill `rows` `[tokens, width]` with the features of the batches' tokens, cast to the type of `rows`.

    `precision` is that of the forward pass, `fp32` or `bf16`. Raises `InputError` with layer and point for features
    that this type cannot hold.
    """
    points = {site.point for site in rows}
    for inputs, parts in batches:

        def take(site: Site, feature_BTD: Tensor, parts: list[Part] = parts) -> None:
            dtype = rows[site].dtype.name
            cast = feature_BTD.to(getattr(torch, dtype)).cpu()
            if not all(math.isfinite(extreme.item()) for extreme in torch.aminmax(cast)):  # of a text, or of padding
                for text, tokens, _ in parts:
                    store.check_fits(feature_BTD[text, tokens].float().cpu().numpy(), site, dtype)
            store.put_rows(rows[site], [(places, cast[text, tokens].numpy()) for text, tokens, places in parts])

        half = torch.autocast(base.device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
        with torch.inference_mode(), recording(base, points, taken=take), half:
            base(**{name: tensor.to(base.device) for name, tensor in inputs.items()})


def _batches(
    ids: npt.NDArray[np.int32], lengths: npt.NDArray[np.int64], rows: slice, padding: int, batch_tokens: int
) -> Iterator[Batch]:
    """Yield the forward passes of every text that reaches into `rows`; `ids` are those of all texts in a row."""
    ends = np.cumsum(lengths)
    reach = np.flatnonzero((ends > rows.start) & (ends - lengths < rows.stop))
    starts = (ends - lengths)[reach].tolist()
    texts = [ids[start:end].tolist() for start, end in zip(starts, ends[reach], strict=True)]
    batches = batches_by_tokens([len(text) for text in texts], batch_tokens)
    # Largest batch first: later ones reuse its memory instead of fragmenting the heap.
    for batch in sorted(batches, key=lambda batch: len(batch) * len(texts[batch[-1]]), reverse=True):
        parts = []
        for number, i in enumerate(batch):
            low, high = max(starts[i], rows.start), min(starts[i] + len(texts[i]), rows.stop)
            tokens, places = slice(low - starts[i], high - starts[i]), slice(low - rows.start, high - rows.start)
            parts.append((number, tokens, places))
        yield padded([texts[i] for i in batch], padding), parts

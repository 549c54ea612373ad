"""Capture of the feature vectors of selected texts at all capture points, in one forward pass per text.

A process computes the texts that overlap its shards of rows and writes each shard of each store once. A run resumes
from its last shard. On a GPU, neighbouring shards are computed together. The stage writes `features/capture/`; if
`capture.store` is a different location, the folder only contains a manifest of the arrays.
"""

import ctypes
import json
import logging
import shutil
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
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

from attnmix.core.device import check_precision, process_state
from attnmix.core.disk import check_disk, publish_output, remove_unfinished
from attnmix.core.errors import InputError, first_line
from attnmix.core.names import POINTS, Site
from attnmix.core.settings import BATCH_TOKENS, CaptureParameters
from attnmix.core.store import features as store
from attnmix.core.store.files import PARQUET_OPTIONS, Place, writing
from attnmix.core.store.results import PointVectors, allocate_vectors, by_site
from attnmix.core.store.runs import Run
from attnmix.core.store.shards import ShardWriter
from attnmix.core.torch_state import torch_state
from attnmix.models.capture_points import recording, widths
from attnmix.models.checkpoint import load_tokenizer
from attnmix.models.encoding import PASS_COST_TOKENS, batches_by_tokens, padded
from attnmix.models.families import family_of, present_names
from attnmix.models.loading import load_classifier
from attnmix.models.segments import read_segments

TOKEN_IDS = "token_ids.bin"  # concatenated IDs of all texts, memory-mapped by every process
TextRows = tuple[int, slice, slice]
"""Index of a text in its batch, a slice of its tokens, and their rows in the stores."""
Batch = tuple[dict[str, Tensor], list[TextRows]]
"""Inputs of one padded forward pass, and the tokens to store."""
NumberedUnit = tuple[int, slice]
"""Index and rows of a unit, the rows that are written together."""
UnitDestinations = tuple[slice, Mapping[Site, npt.NDArray[Any]]]
"""Rows of a unit, and the array of their vectors by site."""
WRITING_THREADS = 4
MAX_PENDING_WRITES = 4  # pending features in memory, each of one site and pass
DEVICE_PASSES = 2  # forward passes with pending features, on a GPU
DEVICE_GROUP_TOKENS = 2**15  # rows of neighbouring shards computed together, on a GPU
DEVICE_PASS_COST_TOKENS = 2**12  # cost of starting a forward pass on a GPU, about ten milliseconds
SIZE_PARAMETERS = "capture.points, capture.documents, capture.drawn, capture.max_length or capture.dtype"


def capture_checkpoint(
    capture: CaptureParameters, checkpoint: Path, run: Run, folder: Path, *, device: torch.device
) -> None:
    """Run `capture_texts` with the model at `checkpoint`."""
    check_precision("capture.precision", capture.precision, device)
    tokenizer = load_tokenizer(checkpoint)
    classifier: Any = load_classifier(checkpoint)
    base: PreTrainedModel = classifier.base_model.to(device)
    read_segments(base, tokenizer, run.captured.pairs)
    capture_texts(capture, base, tokenizer.pad_token_id, run, folder)


@torch_state()
def capture_texts(capture: CaptureParameters, base: PreTrainedModel, padding: int, run: Run, folder: Path) -> None:
    """Write `features/capture/` of `run` with the model `base`, for the captured texts from the stage `tokenize`.

    `padding` is the ID of the padding token. Unfinished work is stored in `folder`.
    """
    lengths = run.documents["tokens"].to_numpy(np.int64)
    state = process_state(base.device)
    family = family_of(base.config)
    family.check_precision("capture.precision", capture.precision)
    sites = widths(base, present_names("capture.points", capture.points, family, POINTS))

    place = store.place_of(capture.store) if capture.elsewhere else folder / "stores"
    plan = store.plan_store(int(lengths.sum()), base.config.hidden_size, capture.dtype)
    if state.is_main_process:
        _prepare_stores(folder, place, sites, plan, run)
    state.wait_for_everyone()

    ids = np.memmap(folder / TOKEN_IDS, np.int32, "r")
    units = list(enumerate(plan.units))
    stores = {site: store.open_to_write(place, site) for site in sites}
    groups = _groups(units, 1 if capture.elsewhere else group_tokens(base.device))
    share = groups[state.process_index :: state.num_processes]
    pass_cost = pass_cost_tokens(base.device)
    writers = ThreadWriters()
    with ThreadPoolExecutor(WRITING_THREADS) as threads:
        for group in tqdm(share, desc="capture", unit="group of shards", disable=None):
            remaining = [(unit, rows) for unit, rows in group if not _done_file(folder, unit).exists()]
            if not remaining:
                continue
            to_fill = [(rows, _destinations(stores, rows)) for _, rows in remaining]
            # Batches contain the whole group, to be identical in resumed runs.
            group_rows = slice(group[0][1].start, group[-1][1].stop)
            batches = _batches(ids, lengths, group_rows, padding, capture.batch_tokens, pass_cost)
            fill_rows(base, batches, to_fill, capture.precision, threads)
            for (unit, _), (rows, destinations) in zip(remaining, to_fill, strict=True):
                finish = partial(_finish, stores, rows, destinations, writers, capture.elsewhere)
                digests = dict(zip(map(str, sites), threads.map(finish, sites), strict=True))
                _mark_done(folder, unit, digests)
            _trim_heap()
    state.wait_for_everyone()
    if state.is_main_process:
        if capture.elsewhere:
            digests_by_unit = [_read_digests(folder, unit) for unit, _ in units]
            store.write_manifest(folder / "stores", capture.store, digests_by_unit)
        publish_output(folder / "stores", run.activations)
        remove_unfinished(folder)
        logging.info("captured %d tokens of %d texts at %d points", plan.tokens, len(lengths), len(sites))


@torch_state()
def captured_vectors(
    base: PreTrainedModel,
    texts: Sequence[npt.NDArray[np.int32]],
    points: Sequence[str],
    dtype: str,
    padding: int,
    batch_tokens: int = BATCH_TOKENS,
) -> dict[str, PointVectors]:
    """Return the vectors of all tokens of `texts` (token IDs) by capture point.

    `padding` is the ID of the padding token. Raise `InputError` for a number that `dtype` cannot hold.
    """
    ids, lengths = np.concatenate(texts), np.array([len(text) for text in texts])
    rows = slice(0, len(ids))
    vectors = allocate_vectors(widths(base, points), len(ids), dtype)
    batches = _batches(ids, lengths, rows, padding, batch_tokens, pass_cost_tokens(base.device))
    fill_rows(base, batches, [(rows, by_site(vectors))])
    return vectors


def _prepare_stores(folder: Path, place: Place, sites: Mapping[Site, int], plan: store.StorePlan, run: Run) -> None:
    """Create missing parts of the stores in `folder`; `sites` maps sites to vector widths.

    `folder/stores` becomes the output. `folder/done` contains one file per completed unit, and is created last, after
    all stores. An interrupted run has one of these states:

    - neither, or only `stores`: interrupted before all stores were created. Create them.
    - `stores` and `done`: interrupted between two units. Keep the units in `done`.
    - only `done`: interrupted after publication, and the stores were deleted by DVC. Start from the beginning.
    """
    stores, done = folder / "stores", folder / "done"
    if not stores.is_dir():
        shutil.rmtree(done, ignore_errors=True)
    _write_tokens(folder, run)
    if isinstance(place, Path):
        size = plan.tokens * sum(sites.values()) * np.dtype(plan.dtype).itemsize
        what = f"capture: {plan.tokens} tokens at {len(sites)} points need"
        check_disk(what, size, place, SIZE_PARAMETERS)
    if not done.is_dir():
        store.create_stores(place, sites, plan)
        done.mkdir()
    pa.default_memory_pool().release_unused()  # makes the memory of the texts available for vectors


def _done_file(folder: Path, unit: int) -> Path:
    """Return the file that marks a unit of rows as written in all stores."""
    return folder / "done" / str(unit)


def _trim_heap() -> None:
    """Return free heap pages to the system, as tensors of varying size would fragment a growing heap."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # available in the GNU C library only
        trim(0)


def _mark_done(folder: Path, unit: int, digests: dict[str, str]) -> None:
    """Write the file that marks a unit as written in all stores, with digests of its rows by site."""
    file = _done_file(folder, unit)
    begun = file.with_suffix(".begun")
    begun.write_text(json.dumps(digests), encoding="utf-8")
    begun.rename(file)


def _read_digests(folder: Path, unit: int) -> dict[str, str]:
    """Return the digests by site written by `_mark_done`."""
    file = _done_file(folder, unit)
    try:
        digests: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(
            f"{file} is damaged ({first_line(error)}); remove {folder}, and run the stage again"
        ) from error
    return digests


def _write_tokens(folder: Path, run: Run) -> None:
    """Write the table of the stores' rows and the concatenated token IDs, one row group of texts at a time."""
    schema = pa.schema({"document": pa.string(), "position": pa.int32(), "token_id": pa.int32(), "token": pa.string()})
    with (
        writing(folder / "stores" / store.TOKENS_FILE) as path,
        pq.ParquetWriter(path, schema, **PARQUET_OPTIONS) as writer,
        (folder / TOKEN_IDS).open("wb") as file,
    ):
        for tokens in run.captured.token_row_groups(columns=schema.names):
            writer.write_table(pa.Table.from_pandas(tokens, schema, preserve_index=False))
            tokens["token_id"].to_numpy().tofile(file)


def group_tokens(device: torch.device) -> int:
    """Return the number of rows computed together; a GPU is inefficient in passes of few tokens."""
    return 1 if device.type == "cpu" else DEVICE_GROUP_TOKENS


def pass_cost_tokens(device: torch.device) -> int:
    """Return the cost of starting a forward pass, in tokens."""
    return PASS_COST_TOKENS if device.type == "cpu" else DEVICE_PASS_COST_TOKENS


def _groups(units: Sequence[NumberedUnit], tokens: int) -> list[list[NumberedUnit]]:
    """Return groups of neighbouring units, with a maximum number of tokens or a single unit."""
    size = max(1, tokens // max(1, units[0][1].stop))
    return [list(units[start : start + size]) for start in range(0, len(units), size)]


def _destinations(stores: Mapping[Site, store.OpenStore], rows: slice) -> dict[Site, npt.NDArray[Any]]:
    """Return uninitialised arrays for the vectors of a unit of rows, by site."""
    arrays = {}
    for site, (_, array) in stores.items():
        arrays[site] = np.empty((rows.stop - rows.start, array.shape[1]), array.dtype)
    return arrays


class ThreadWriters(threading.local):
    """A writer of shard files per thread."""

    def __init__(self) -> None:
        self.writer = ShardWriter()


def _finish(
    stores: Mapping[Site, store.OpenStore],
    rows: slice,
    destinations: Mapping[Site, npt.NDArray[Any]],
    writers: ThreadWriters,
    with_digest: bool,
    site: Site,
) -> str:
    """Write the vectors of a unit of rows at one site; return their hash if requested."""
    return store.write_unit(stores[site], rows, destinations[site], writers.writer, with_digest)


class HostCopy:
    """A copy of a tensor in host memory, asynchronous on a GPU."""

    def __init__(self, tensor: Tensor) -> None:
        self.event: Any = None
        if tensor.is_cuda:
            self.copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self.copy.copy_(tensor, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.copy = tensor.cpu()

    def array(self) -> npt.NDArray[Any]:
        """Wait for the copy, and return it."""
        if self.event is not None:
            self.event.synchronize()
        return self.copy.numpy()


class PendingWrites:
    """Queue of writes to rows of the stores; at most `limit` sites of forward passes are in memory."""

    def __init__(self, units: Sequence[UnitDestinations], threads: Executor, limit: int) -> None:
        self.units, self.threads, self.limit = units, threads, limit
        self.writes: deque[Future[None]] = deque()

    def add(self, site: Site, vectors: HostCopy, texts: Sequence[TextRows]) -> None:
        """Submit a write of a batch's vectors at one site, after waiting for a free place in the queue."""
        while len(self.writes) >= self.limit:
            self.writes.popleft().result()
        self.writes.append(self.threads.submit(_write, site, vectors, texts, self.units))

    def finish(self) -> None:
        """Wait for all writes; raise the error of a failed write."""
        for write in self.writes:
            write.result()


def fill_rows(
    base: PreTrainedModel,
    batches: Iterable[Batch],
    units: Sequence[UnitDestinations],
    precision: str = "fp32",
    threads: Executor | None = None,
) -> None:
    """Fill units of rows with the features of the batches' tokens, cast to the type of the units.

    `precision` is the precision of the forward pass, `fp32` or `bf16`. Vectors are copied and written in `threads`
    during the next computation, with a bounded number in memory. Raise `InputError` with layer and point for features
    beyond the range of the type.
    """
    dtypes = {site: destination.dtype.name for site, destination in units[0][1].items()}
    limit = MAX_PENDING_WRITES if base.device.type == "cpu" else DEVICE_PASSES * len(dtypes)
    with nullcontext(threads) if threads else ThreadPoolExecutor(WRITING_THREADS) as pool:
        writes = PendingWrites(units, pool, limit)
        for batch in batches:
            _compute_batch(base, batch, dtypes, precision, writes)
        writes.finish()


def _compute_batch(
    base: PreTrainedModel, batch: Batch, dtypes: Mapping[Site, str], precision: str, writes: PendingWrites
) -> None:
    """Compute the features of a batch, and submit each feature to `writes` immediately."""
    inputs, texts = batch
    extremes: list[Tensor] = []

    def write(site: Site, feature_BTD: Tensor) -> None:
        dtype = getattr(torch, dtypes[site])
        cast_BTD = feature_BTD.to(dtype, copy=True)  # The model may modify the feature in place.
        extremes.extend(torch.aminmax(cast_BTD))
        writes.add(site, HostCopy(cast_BTD), texts)

    def check(site: Site, feature_BTD: Tensor) -> None:
        for text, tokens, _ in texts:
            vectors_TD = feature_BTD[text, tokens].float().cpu().numpy()
            store.check_fits(vectors_TD, site, dtypes[site])

    _forward(base, inputs, dtypes, write, precision)
    all_finite = torch.stack(extremes).isfinite().all().item()  # the only synchronisation with a GPU in a pass
    if not all_finite:  # A second pass distinguishes irrelevant padding from tokens.
        _forward(base, inputs, dtypes, check, precision)


def _forward(
    base: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    sites: Iterable[Site],
    take: Callable[[Site, Tensor], None],
    precision: str,
) -> None:
    """Run a forward pass that calls `take` with the features of each site immediately."""
    points = {site.point for site in sites}
    half = torch.autocast(base.device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
    with torch.inference_mode(), recording(base, points, taken=take), half:
        base(**{name: tensor.to(base.device) for name, tensor in inputs.items()})


def _write(site: Site, copy: HostCopy, texts: Sequence[TextRows], units: Sequence[UnitDestinations]) -> None:
    """Write the vectors of a site to the units that overlap their rows."""
    vectors_BTD = copy.array()
    for unit_rows, destinations in units:
        for text, tokens, text_rows in texts:
            start = max(text_rows.start, unit_rows.start)
            stop = min(text_rows.stop, unit_rows.stop)
            if start < stop:
                first_token = tokens.start + start - text_rows.start
                vectors = vectors_BTD[text, first_token : first_token + stop - start]
                destinations[site][start - unit_rows.start : stop - unit_rows.start] = vectors


def _batches(
    ids: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int64],
    rows: slice,
    padding: int,
    batch_tokens: int,
    pass_cost: int,
) -> Iterator[Batch]:
    """Yield the batches of all texts that overlap `rows`; `ids` are the concatenated token IDs of all texts."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    reaching = np.flatnonzero((ends > rows.start) & (starts < rows.stop))
    text_rows = [slice(int(starts[text]), int(ends[text])) for text in reaching]
    texts = [ids[text].tolist() for text in text_rows]
    batches = batches_by_tokens([len(text) for text in texts], batch_tokens, pass_cost)
    # Largest batch first: later ones reuse its memory instead of fragmenting the heap.
    for batch in sorted(batches, key=lambda batch: len(batch) * len(texts[batch[-1]]), reverse=True):
        kept = []
        for place, number in enumerate(batch):
            tokens = slice(0, len(texts[number]))
            kept.append((place, tokens, text_rows[number]))
        yield padded([texts[number] for number in batch], padding), kept

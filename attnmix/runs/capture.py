"""Capture of the feature vectors of the selected texts at the capture points in `capture.points`.

The store contains one array per site (a layer and a capture point), with one row per token. The rows of an array are
written in units: shards, or single chunks if the store has no shards. Each process runs the model on the texts that
overlap its units, and collects the rows of each site in a buffer on the model's device. Each unit is written once,
while the model computes the next one. An interrupted run resumes after the last written unit. On a GPU, the texts of
neighbouring units are batched together. The stage writes `features/capture/`; if `capture.store` is another location,
this folder contains a manifest instead of the arrays.
"""

import ctypes
import json
import logging
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from attnmix.core.limits import compute_limiting_shares, describe_limits
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
NumberedUnit = tuple[int, slice]
"""The index of a unit (a range of rows that is written at once), and the rows of this unit."""
WRITING_THREADS = 4
RECENT_WRITES = 1000  # number of latest writes that determine the reported rate
DEVICE_BUFFER_SETS = 2  # on a GPU, one set of buffers is filled while the other one is written
DEVICE_GROUP_BYTES = 2**31  # constant, because batches (and thus rounding) must not depend on free memory
DEVICE_GROUP_TOKENS = 2**17  # maximum number of rows of neighbouring units whose texts are batched together on a GPU
DEVICE_PASS_COST_TOKENS = 2**12  # cost of starting a forward pass on a GPU (about ten milliseconds), in tokens
SIZE_PARAMETERS = "capture.points, capture.documents, capture.drawn, capture.max_length or capture.dtype"


def capture_checkpoint(
    capture: CaptureParameters, checkpoint: Path, run: Run, folder: Path, *, device: torch.device
) -> None:
    """Run `capture_texts` with the base model of the classifier at `checkpoint`, on `device`.

    The base model is the classifier without its classification head.
    """
    check_precision("capture.precision", capture.precision, device)
    tokenizer = load_tokenizer(checkpoint)
    classifier: Any = load_classifier(checkpoint)
    base: PreTrainedModel = classifier.base_model.to(device)
    read_segments(base, tokenizer, run.captured.pairs)  # for pairs: the model derives the segment of each token
    capture_texts(capture, base, tokenizer.pad_token_id, run, folder)


@torch_state()
def capture_texts(capture: CaptureParameters, base: PreTrainedModel, padding: int, run: Run, folder: Path) -> None:
    """Write `features/capture/` of `run`: the vectors that `base` computes for the texts selected by `tokenize`.

    `padding` is the ID of the padding token. Intermediate files, from which an interrupted run resumes, are stored in
    `folder`. There is one store for each site (a layer and a capture point), with a row for each token. A unit is a
    range of rows that is written at once; the texts of a group of neighbouring units are batched together. The stores
    are in `folder` until they are published, or permanently at the location `capture.store`.
    """
    lengths = run.documents["tokens"].to_numpy(np.int64)
    state = process_state(base.device)
    family = family_of(base.config)
    family.check_precision("capture.precision", capture.precision)
    sites = widths(base, present_names("capture.points", capture.points, family, POINTS))  # vector width by site

    # The main process creates the stores; then every process opens them.
    place = store.place_of(capture.store) if capture.elsewhere else folder / "stores"
    plan = store.plan_store(int(lengths.sum()), base.config.hidden_size, capture.dtype, capture.chunk_tokens)
    if state.is_main_process:
        _prepare_stores(folder, place, sites, plan, run)
    state.wait_for_everyone()
    ids = np.memmap(folder / TOKEN_IDS, np.int32, "r")
    stores = {site: store.open_to_write(place, site) for site in sites}

    # Each process handles every `num_processes`-th group of units.
    units = list(enumerate(plan.units))
    row_bytes = sum(sites.values()) * np.dtype(capture.dtype).itemsize  # size of a token's vectors at all sites
    groups = _group_units(units, group_tokens(base.device, row_bytes))
    groups_of_process = groups[state.process_index :: state.num_processes]
    largest_group = groups[0]  # only the last group can be smaller
    buffer_sets = _allocate_buffer_sets(sites, largest_group, capture.dtype, base.device)
    work = _CaptureWork(capture, base, padding, ids, lengths, stores, folder)
    times = _capture_groups(work, groups_of_process, buffer_sets)
    if times.rows:  # 0 if an interrupted run had already written all units of this process
        logging.info("%s", times.describe(row_bytes, base.device))

    # The main process publishes the stores after all processes have written their units.
    state.wait_for_everyone()
    if state.is_main_process:
        manifest_place = capture.store if capture.elsewhere else None
        _publish_stores(folder, run, manifest_place, len(units))
        logging.info("captured %d tokens of %d texts at %d points", plan.tokens, len(lengths), len(sites))


class _CaptureWork(NamedTuple):
    """The model, the texts and the stores that all groups of units have in common."""

    capture: CaptureParameters
    base: PreTrainedModel
    padding: int
    ids: npt.NDArray[np.int32]  # concatenated token IDs of all texts
    lengths: npt.NDArray[np.int64]  # number of tokens of each text
    stores: Mapping[Site, store.OpenStore]
    folder: Path  # folder of the intermediate files


class _CaptureTimes(NamedTuple):
    """Amount and duration of this process's work, without the work of an interrupted earlier run."""

    rows: int  # number of written rows, one for each token
    seconds: float
    disk_seconds: float  # time in which the computation waited for writes
    device_seconds: float  # time in which the host waited for a GPU
    rates: Sequence[float]  # speed of the latest single writes, in bytes per second

    def describe(self, row_bytes: int, device: torch.device) -> str:
        """Return the result of `rate_sentence`; `row_bytes` is the size of a token's vectors at all sites."""
        limits = compute_limiting_shares(self.seconds, self.disk_seconds, self.device_seconds, device)
        return rate_sentence(self.rows, self.rows * row_bytes, self.seconds, self.rates, limits)


def _capture_groups(
    work: _CaptureWork, groups: Sequence[Sequence[NumberedUnit]], buffer_sets: deque["RowBuffers"]
) -> _CaptureTimes:
    """Run the model on the texts of each group, and write the units that an interrupted run has not written.

    A group is a list of neighbouring units, and a unit is a range of rows that is written at once. Threads write the
    units of a group while the model computes the next group. If there are several sets of buffers, the sets are used in
    turn. `RowBuffers` returns a buffer only after the buffer's previous content has been written.
    """
    unit_tasks: list[Future[None]] = []  # each task waits for the writes of a unit, and marks the unit as done
    rates: deque[float] = deque(maxlen=RECENT_WRITES)
    rows_written = 0
    device_seconds = 0.0
    start = time.perf_counter()
    with ThreadPoolExecutor(WRITING_THREADS) as threads:
        memory = ThreadMemory(rates)
        for group in tqdm(groups, desc="capture", unit="group of shards", disable=None):
            remaining = _list_remaining_units(work.folder, group)
            if not remaining:
                continue
            buffers = buffer_sets[0]
            buffer_sets.rotate()  # the next group uses the next set
            device_seconds += _compute_group(work, group, buffers)
            first_row = _join_rows(group).start
            for unit, rows in remaining:
                unit_tasks.append(_submit_unit(work, unit, rows, threads, memory, buffers, first_row))
                rows_written += rows.stop - rows.start
            _trim_heap()
        computation_end = time.perf_counter()
    for task in unit_tasks:
        task.result()  # raises the error of a failed write
    end = time.perf_counter()
    disk_seconds = end - computation_end
    for buffers in buffer_sets:
        disk_seconds += buffers.waiting_seconds
    return _CaptureTimes(rows_written, end - start, disk_seconds, device_seconds, rates)


def _compute_group(work: _CaptureWork, group: Sequence[NumberedUnit], buffers: "RowBuffers") -> float:
    """Fill the buffers with the vectors of all units (ranges of rows) in a group.

    Return the number of seconds that the host waited for a GPU. Units that an interrupted run has written are computed
    again, so that a resumed run has the same batches.
    """
    batch_tokens = work.capture.batch_tokens
    pass_cost = pass_cost_tokens(work.base.device)
    batches = list(_create_batches(work.ids, work.lengths, _join_rows(group), work.padding, batch_tokens, pass_cost))
    return fill_rows(work.base, batches, buffers, work.capture.precision)


def _submit_unit(
    work: _CaptureWork,
    unit: int,
    rows: slice,
    threads: ThreadPoolExecutor,
    memory: "ThreadMemory",
    buffers: "RowBuffers",
    first_row: int,
) -> Future[None]:
    """Start writing a unit, and return the future of the task that waits for its writes and marks the unit as done.

    A unit is a range of rows that is written at once in the store of each site. `unit` is its index, and `rows` are its
    rows in the stores. `first_row` is the row in the stores that corresponds to the first row of the buffers.
    """
    buffer_rows = slice(rows.start - first_row, rows.stop - first_row)
    write_unit = partial(_write_unit, rows=rows, memory=memory, with_digest=work.capture.elsewhere)
    writes = _submit_writes(threads, write_unit, work.stores, buffers, buffer_rows)
    return threads.submit(_mark_written, work.folder, unit, writes)


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

    `padding` is the ID of the padding token, and `batch_tokens` the maximum number of padded tokens per batch. Raise
    `InputError` for a number that `dtype` cannot represent. On a CPU, the model writes directly to the returned arrays;
    on a GPU, each group of rows is collected in a buffer and then copied. A row belongs to a token.
    """
    ids = np.concatenate(texts)
    lengths = np.array([len(text) for text in texts])
    vectors = allocate_vectors(widths(base, points), len(ids), dtype)
    arrays = by_site(vectors)  # views of the returned arrays `[tokens, width]` by layer and capture point
    on_cpu = base.device.type == "cpu"
    row_bytes = sum(array[0].nbytes for array in arrays.values())
    step = len(ids) if on_cpu else group_tokens(base.device, row_bytes)  # number of rows of a group
    pass_cost = pass_cost_tokens(base.device)
    for start in range(0, len(ids), step):
        rows = slice(start, min(start + step, len(ids)))
        targets = {site: torch.from_numpy(array[rows]) for site, array in arrays.items()}
        batches = list(_create_batches(ids, lengths, rows, padding, batch_tokens, pass_cost))
        if on_cpu:
            fill_rows(base, batches, targets)
        else:
            _fill_through_buffers(base, batches, targets)
    return vectors


def _fill_through_buffers(base: PreTrainedModel, batches: Sequence["Batch"], targets: Mapping[Site, Tensor]) -> None:
    """Fill `targets` on the CPU like `fill_rows`, through temporary buffers on the model's device."""
    buffers = {site: torch.empty_like(target, device=base.device) for site, target in targets.items()}
    fill_rows(base, batches, buffers)
    for site, target in targets.items():
        target.copy_(buffers[site])


def _prepare_stores(folder: Path, place: Place, sites: Mapping[Site, int], plan: store.StorePlan, run: Run) -> None:
    """Create the stores at `place`, unless an interrupted run has created them.

    `sites` maps sites to vector widths. At the end of the run, `folder/stores` becomes the stage's output; it contains
    a table of the tokens and, unless `place` is elsewhere, the stores. `folder/done` contains one file per written
    unit, and is created last, after all stores. An interrupted run has left one of these states:

    - neither folder, or only `stores`: interrupted before all stores were created. Create them.
    - `stores` and `done`: interrupted between two units. Keep the units in `done`.
    - only `done`: interrupted after publication, and the stores were deleted by DVC. Start from the beginning.
    """
    stores = folder / "stores"
    done = folder / "done"
    if not stores.is_dir():
        shutil.rmtree(done, ignore_errors=True)
    _write_tokens(folder, run)
    if isinstance(place, Path):
        numbers = plan.tokens * sum(sites.values())
        size = numbers * np.dtype(plan.dtype).itemsize
        demand = f"capture: {plan.tokens} tokens at {len(sites)} points need"
        check_disk(demand, size, place, SIZE_PARAMETERS)
    if not done.is_dir():
        store.create_stores(place, sites, plan)
        done.mkdir()
    pa.default_memory_pool().release_unused()  # the tables of tokens are no longer needed


def _list_remaining_units(folder: Path, group: Iterable[NumberedUnit]) -> list[NumberedUnit]:
    """Return the units of a group that an interrupted run has not written."""
    return [(unit, rows) for unit, rows in group if not _locate_done_file(folder, unit).exists()]


def _locate_done_file(folder: Path, unit: int) -> Path:
    """Return the file that marks a unit of rows as written in all stores."""
    return folder / "done" / str(unit)


def _trim_heap() -> None:
    """Return free heap pages to the system; otherwise, tensors of varying size would fragment a growing heap."""
    if sys.platform != "linux":
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # available in the GNU C library only
        trim(0)


def _mark_done(folder: Path, unit: int, digests: dict[str, str]) -> None:
    """Write the file that marks a unit as written in all stores; it contains the digest of the unit for each site."""
    file = _locate_done_file(folder, unit)
    # The file is renamed after writing, so that it cannot exist with incomplete content.
    begun = file.with_suffix(".begun")
    begun.write_text(json.dumps(digests), encoding="utf-8")
    begun.rename(file)


def _read_digests(folder: Path, unit: int) -> dict[str, str]:
    """Return the digests of a unit by site, as written by `_mark_done`; raise `InputError` for a damaged file."""
    file = _locate_done_file(folder, unit)
    try:
        digests: dict[str, str] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(
            f"{file} is damaged ({first_line(error)}); remove {folder}, and run the stage again"
        ) from error
    return digests


def _write_tokens(folder: Path, run: Run) -> None:
    """Write two files: a table with the token of each row of the stores, and the concatenated token IDs of all texts.

    One row group of the run's table of tokens is in memory at a time.
    """
    schema = pa.schema({"document": pa.string(), "position": pa.int32(), "token_id": pa.int32(), "token": pa.string()})
    with (
        writing(folder / "stores" / store.TOKENS_FILE) as path,
        pq.ParquetWriter(path, schema, **PARQUET_OPTIONS) as writer,
        (folder / TOKEN_IDS).open("wb") as file,
    ):
        for tokens in run.captured.token_row_groups(columns=schema.names):
            table = pa.Table.from_pandas(tokens, schema, preserve_index=False)
            writer.write_table(table)
            ids = tokens["token_id"].to_numpy()
            ids.tofile(file)


def group_tokens(device: torch.device, row_bytes: int) -> int:
    """Return the maximum number of tokens (rows) of neighbouring units whose texts are batched together, as a group.

    On a GPU, larger groups allow more efficient forward passes. On a CPU, each group consists of a single unit, because
    the limit is one row. `row_bytes` is the size of a token's vectors at all sites.
    """
    if device.type == "cpu":
        return 1
    rows_in_memory = DEVICE_GROUP_BYTES // row_bytes
    rows = min(DEVICE_GROUP_TOKENS, rows_in_memory)
    return max(1, rows)


def pass_cost_tokens(device: torch.device) -> int:
    """Return the cost of starting a forward pass, as the number of tokens that take the same time."""
    if device.type == "cpu":
        return PASS_COST_TOKENS
    return DEVICE_PASS_COST_TOKENS


def _group_units(units: Sequence[NumberedUnit], tokens: int) -> list[list[NumberedUnit]]:
    """Return groups of neighbouring units; a group has at most `tokens` rows, or consists of a single unit.

    Each unit is given by its index and its range of rows.
    """
    _, first_rows = units[0]
    unit_rows = max(1, first_rows.stop)  # the first unit starts at row 0; only the last unit can have fewer rows
    units_per_group = max(1, tokens // unit_rows)
    starts = range(0, len(units), units_per_group)
    return [list(units[start : start + units_per_group]) for start in starts]


def _join_rows(group: Sequence[NumberedUnit]) -> slice:
    """Return the range of rows of all units of a group; the units are consecutive, in ascending order."""
    _, first_rows = group[0]
    _, last_rows = group[-1]
    return slice(first_rows.start, last_rows.stop)


class TextRows(NamedTuple):
    """The tokens of a text that belong to the current group of units, and the rows of these tokens in the buffers."""

    text: int  # index of the text in its batch
    tokens: slice
    rows: slice


class Batch(NamedTuple):
    """The inputs of a padded forward pass, and the buffer rows that receive the vectors of its tokens."""

    inputs: dict[str, Tensor]
    texts: list[TextRows]

    def put_function(self, device: torch.device) -> Callable[[Tensor, Tensor], None]:
        """Return a function that copies vectors of the batch's tokens to their rows of a buffer `[rows, D]`.

        The function has two arguments, the buffer and a feature `[B, T, D]` (texts, padded tokens, width).
        """
        if device.type == "cpu":
            return self._put_slices
        # On a GPU, all texts are copied together, which requires only three kernel launches.
        indices = torch.from_numpy(self._locate_tokens())
        tokens_N, rows_N = indices.to(device)  # together, for a single transfer

        def put(buffer: Tensor, feature_BTD: Tensor) -> None:
            cast_BTD = feature_BTD.to(buffer.dtype)
            vectors_ND = cast_BTD.flatten(0, 1).index_select(0, tokens_N)
            buffer.index_copy_(0, rows_N, vectors_ND)

        return put

    def _locate_tokens(self) -> npt.NDArray[np.int64]:
        """Return indices `[2, N]` of N tokens: in the flattened feature `[B * T, D]`, and in a buffer `[rows, D]`."""
        padded_length = self.inputs["input_ids"].shape[1]  # T
        tokens = []
        rows = []
        for text in self.texts:
            first_token = text.text * padded_length  # `text.text` is the index of the text in the batch
            start = first_token + text.tokens.start
            stop = first_token + text.tokens.stop
            tokens.append(np.arange(start, stop))
            rows.append(np.arange(text.rows.start, text.rows.stop))
        return np.stack([np.concatenate(tokens), np.concatenate(rows)])

    def _put_slices(self, buffer: Tensor, feature_BTD: Tensor) -> None:
        """Copy the vectors of the batch's tokens to their rows of `buffer`, text by text.

        NumPy copies the texts in this thread, because torch would start several threads for each of these small copies.
        """
        cast_BTD = feature_BTD.to(buffer.dtype).numpy()
        vectors = buffer.numpy()
        for text, tokens, rows in self.texts:
            vectors[rows] = cast_BTD[text, tokens]


class RowBuffers(Mapping[Site, Tensor]):
    """A buffer `[rows, width]` per site; access waits until the previous content of the buffer has been written.

    `writes` contains the pending writes of each site, and `waiting_seconds` is the total waiting time.
    """

    def __init__(self, tensors: Mapping[Site, Tensor]) -> None:
        self.tensors = tensors
        self.writes: dict[Site, list[Future[str]]] = {site: [] for site in tensors}
        self.waiting_seconds = 0.0

    def __getitem__(self, site: Site) -> Tensor:
        """Wait for the pending writes of a site's buffer `[rows, width]`, and return the buffer."""
        start = time.perf_counter()
        writes = self.writes[site]
        while writes:
            writes.pop().result()
        self.waiting_seconds += time.perf_counter() - start
        return self.tensors[site]

    def __iter__(self) -> Iterator[Site]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def _allocate_buffer_sets(
    widths: Mapping[Site, int], group: Sequence[NumberedUnit], dtype: str, device: torch.device
) -> deque[RowBuffers]:
    """Return sets of buffers with one row per token of `group`: one set on a CPU, `DEVICE_BUFFER_SETS` on a GPU."""
    group_rows = _join_rows(group)
    rows = group_rows.stop - group_rows.start
    number = 1 if device.type == "cpu" else DEVICE_BUFFER_SETS
    torch_dtype = getattr(torch, dtype)
    sets = deque[RowBuffers]()
    for _ in range(number):
        tensors = {}
        for site, width in widths.items():
            tensors[site] = torch.empty(rows, width, dtype=torch_dtype, device=device)
        sets.append(RowBuffers(tensors))
    return sets


class ThreadMemory(threading.local):
    """The memory of a writing thread: a shard writer and, for vectors on a GPU, a stream and pinned memory.

    All threads share `rates`, which collects the speed of single writes in bytes per second.
    """

    def __init__(self, rates: deque[float]) -> None:
        self.writer = ShardWriter()
        self.rates = rates
        self.stream: Any = None
        self.pinned = torch.empty(0, dtype=torch.uint8)

    def host_array(self, vectors: Tensor) -> npt.NDArray[Any]:
        """Return vectors `[rows, width]` as an array in host memory, valid until the next call in this thread."""
        if not vectors.is_cuda:
            return vectors.cpu().numpy()
        if self.stream is None:
            # Copies in a separate stream do not wait for the forward passes of the next group.
            self.stream = torch.cuda.Stream(vectors.device)
        if self.pinned.numel() < vectors.nbytes:
            self.pinned = torch.empty(vectors.nbytes, dtype=torch.uint8, pin_memory=True)
        copy = self.pinned[: vectors.nbytes].view(vectors.dtype).view(vectors.shape)
        with torch.cuda.stream(self.stream):
            copy.copy_(vectors, non_blocking=True)
        self.stream.synchronize()
        return copy.numpy()


def _write_unit(
    open_store: store.OpenStore, rows: slice, vectors: Tensor, memory: ThreadMemory, with_digest: bool
) -> str:
    """Write the vectors of a unit (a range of rows) at one site, and return their hash, empty unless `with_digest`.

    The speed of the write is added to `memory.rates`.
    """
    array = memory.host_array(vectors)
    start = time.perf_counter()
    digest = store.write_unit(open_store, rows, array, memory.writer, with_digest)
    seconds = time.perf_counter() - start
    memory.rates.append(array.nbytes / seconds)
    return digest


def rate_sentence(tokens: int, size: int, seconds: float, rates: Sequence[float], limits: Mapping[str, float]) -> str:
    """Return a description of a run's rates in tokens and bytes per second, and of the limiting factors.

    In `seconds`, the run stored the vectors of `tokens` tokens, `size` bytes in total. `rates` are the bytes per second
    of single writes, and `limits` is the result of `compute_limiting_shares`.
    """
    thread_rate = np.median(rates) / 1e6
    threads = f"{thread_rate:,.0f} MB/s in each of {WRITING_THREADS} writing threads"
    stored = f"{tokens / seconds:,.0f} tokens/s, {size / seconds / 1e6:,.1f} MB/s stored ({threads})"
    return f"{stored}; {describe_limits(limits)}"


def _submit_writes(
    threads: ThreadPoolExecutor,
    write_unit: Callable[..., str],
    stores: Mapping[Site, store.OpenStore],
    buffers: RowBuffers,
    buffer_rows: slice,
) -> dict[Site, Future[str]]:
    """Start writing one unit, the rows `buffer_rows` of each buffer, and return the future of each site's write.

    The futures are also registered in `buffers`, which waits for them before the next group overwrites the rows.
    """
    writes = {}
    for site, vectors in buffers.items():
        write = threads.submit(write_unit, stores[site], vectors=vectors[buffer_rows])
        writes[site] = write
        buffers.writes[site].append(write)
    return writes


def _publish_stores(folder: Path, run: Run, place: str | None, number_of_units: int) -> None:
    """Make the finished stores in `folder` the output of `run`; write a manifest if the arrays are at another `place`.

    `place` is the location of the arrays if they are not in `folder`. A unit is a range of rows that was written at
    once; the manifest contains hashes of the arrays, which are computed from the hashes of their units.
    """
    if place is not None:
        digests_by_unit = [_read_digests(folder, unit) for unit in range(number_of_units)]
        store.write_manifest(folder / "stores", place, digests_by_unit)
    publish_output(folder / "stores", run.activations)
    remove_unfinished(folder)


def _mark_written(folder: Path, unit: int, writes: Mapping[Site, Future[str]]) -> None:
    """Mark a unit as done after waiting for the `writes` of all sites; raise the error of a failed write.

    Threads start tasks in order of submission, so this task cannot block the writes, which were submitted earlier.
    """
    digests = {str(site): write.result() for site, write in writes.items()}
    _mark_done(folder, unit, digests)


def fill_rows(
    base: PreTrainedModel, batches: Sequence[Batch], buffers: Mapping[Site, Tensor], precision: str = "fp32"
) -> float:
    """Fill the first rows of `buffers` with the features of the batches' tokens, cast to the dtype of the buffers.

    Return the number of seconds of waiting for a GPU at the end. `precision` is the precision of the forward pass,
    `fp32` or `bf16`. Raise an `InputError` that names the layer and the capture point if a feature is NaN, infinite, or
    beyond the range of the buffers' dtype.
    """
    for batch in batches:
        _fill_rows_of_batch(base, batch, buffers, precision)
    # The last group of units may be shorter than the buffers, so only the filled rows are checked.
    filled_rows = max(text.rows.stop for batch in batches for text in batch.texts)
    finite = _are_finite(buffers, filled_rows)
    start = time.perf_counter()
    all_finite = finite.item()  # the only synchronisation with a GPU in a group of units
    waiting_seconds = time.perf_counter() - start
    if not all_finite:
        _check_features(base, batches, buffers, precision)
    return waiting_seconds


def _fill_rows_of_batch(base: PreTrainedModel, batch: Batch, buffers: Mapping[Site, Tensor], precision: str) -> None:
    """Run a forward pass of a batch, and copy each feature to the buffer of its site as soon as it is computed."""
    put_rows = batch.put_function(base.device)

    def put(site: Site, feature_BTD: Tensor) -> None:
        put_rows(buffers[site], feature_BTD)

    _run_forward_pass(base, batch.inputs, buffers, put, precision)


def _are_finite(buffers: Mapping[Site, Tensor], filled_rows: int) -> Tensor:
    """Return a boolean tensor, on the buffers' device: True if the first `filled_rows` of all buffers are finite.

    A value that the dtype of a buffer cannot represent becomes infinite, and so does the minimum or maximum of the
    buffer.
    """
    extremes: list[Tensor] = []
    for site in buffers:
        smallest, largest = torch.aminmax(buffers[site][:filled_rows])
        extremes.append(smallest)
        extremes.append(largest)
    return torch.stack(extremes).isfinite().all()


def _check_features(
    base: PreTrainedModel, batches: Sequence[Batch], buffers: Mapping[Site, Tensor], precision: str
) -> None:
    """Repeat the forward passes; raise `InputError` for the first feature that its buffer's dtype cannot represent.

    A feature is the tensor `[B, T, D]` (texts, padded tokens, width) of a batch at one site.
    """
    for batch in batches:
        _check_features_of_batch(base, batch, buffers, precision)


def _check_features_of_batch(
    base: PreTrainedModel, batch: Batch, buffers: Mapping[Site, Tensor], precision: str
) -> None:
    """Repeat the forward pass of a batch, and raise `InputError` for the first unsuitable feature.

    Sites are checked in the order of the forward pass; at each site, the texts of the batch are checked one by one.
    """

    def check(site: Site, feature_BTD: Tensor) -> None:
        dtype = str(buffers[site].dtype).removeprefix("torch.")
        for text, tokens, _ in batch.texts:
            vectors_TD = feature_BTD[text, tokens].float().cpu()
            store.check_fits(vectors_TD.numpy(), site, dtype)

    _run_forward_pass(base, batch.inputs, buffers, check, precision)


def _run_forward_pass(
    base: PreTrainedModel,
    inputs: Mapping[str, Tensor],
    sites: Iterable[Site],
    take: Callable[[Site, Tensor], None],
    precision: str,
) -> None:
    """Run a forward pass that calls `take` with each site and its feature `[B, T, D]`, as soon as it is computed.

    A site is a layer and a capture point, and the axes are texts, padded tokens and width. `sites` contains all layers
    of the recorded capture points.
    """
    points = {site.point for site in sites}
    inputs_on_device = {name: tensor.to(base.device) for name, tensor in inputs.items()}
    autocast = torch.autocast(base.device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
    with torch.inference_mode(), recording(base, points, taken=take), autocast:
        base(**inputs_on_device)


def _create_batches(
    ids: npt.NDArray[np.int32],
    lengths: npt.NDArray[np.int64],
    rows: slice,
    padding: int,
    batch_tokens: int,
    pass_cost: int,
) -> Iterator[Batch]:
    """Yield padded batches of all texts that overlap `rows`, a range of rows of the store.

    `ids` are the concatenated token IDs of all texts, and `lengths` the numbers of tokens of the texts. The rows in
    `Batch.texts` are relative to the first of `rows`. Texts that begin or end outside `rows` are included as a whole,
    because their tokens attend to each other, but only the tokens in `rows` are assigned to rows of the buffers.
    """
    rows_of_texts = _list_overlapping_texts(lengths, rows)
    texts = [ids[whole].tolist() for whole in rows_of_texts]
    batches = batches_by_tokens([len(text) for text in texts], batch_tokens, pass_cost)

    def count_padded_tokens(batch: list[int]) -> int:
        longest = texts[batch[-1]]  # the texts of a batch are sorted by length
        return len(batch) * len(longest)

    # The largest batch is first, so that later batches reuse its memory instead of fragmenting the heap.
    batches.sort(key=count_padded_tokens, reverse=True)
    for batch in batches:  # a batch is a list of indices into `texts`
        inputs = padded([texts[number] for number in batch], padding)
        text_rows = []
        for place, number in enumerate(batch):
            tokens, rows_in_buffer = _intersect_rows(rows_of_texts[number], rows)
            text_rows.append(TextRows(place, tokens, rows_in_buffer))
        yield Batch(inputs, text_rows)


def _list_overlapping_texts(lengths: npt.NDArray[np.int64], rows: slice) -> list[slice]:
    """Return the rows in the store of each text that overlaps `rows`; `lengths` are the row counts of all texts."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    is_overlapping = (ends > rows.start) & (starts < rows.stop)
    rows_of_texts = []
    for text in np.flatnonzero(is_overlapping):
        rows_of_texts.append(slice(int(starts[text]), int(ends[text])))
    return rows_of_texts


def _intersect_rows(whole: slice, rows: slice) -> tuple[slice, slice]:
    """Return the rows that two overlapping ranges of rows have in common, relative to the start of each range.

    `whole` are the rows of a text in the store, and `rows` those of a group of units.
    """
    start = max(whole.start, rows.start)
    stop = min(whole.stop, rows.stop)
    tokens = slice(start - whole.start, stop - whole.start)
    rows_in_buffer = slice(start - rows.start, stop - rows.start)
    return tokens, rows_in_buffer

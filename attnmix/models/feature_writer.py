"""Features of texts as rows of stores, one block of rows for each layer and capture point.

What a batch has at a point is cast at once and goes behind: a thread puts it where its rows belong while the model
computes on, a few tensors at most after it. So the memory holds some tensors of a batch, whatever the number of texts
and the rows of a store. From a GPU features come by a stream of their own into pinned memory, while the next batch
computes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from attnmix.core.points import Site
from attnmix.models.capture_points import recording
from attnmix.store.shard_writer import Block

MAX_PENDING_WRITES = 4  # tensors

Tensor = torch.Tensor
Open = Callable[[Site, slice], Block]
Check = Callable[[npt.NDArray[Any], Site, str], None]


class Part(NamedTuple):
    """Where tokens of one text of a batch go."""

    text: int
    """Its number in the batch."""
    tokens: slice
    row: int
    """Of the block, at which they begin."""


@dataclass
class Batch:
    """One forward pass, and what of it is still to be done."""

    inputs: dict[str, Tensor]
    parts: list[Part]
    fits: bool = True  # as far as is known, in the dtype that is asked for
    extremes: list[Tensor] = field(default_factory=list)
    staged: list[tuple[Site, Tensor, Tensor]] = field(default_factory=list)
    arrived: Any = None


class RowBlocks:
    """Runs batches through `base` and puts the features of `sites` into the blocks that `opened(site, rows)` gives.

    They come in `dtype`, the name of one. `check(features, site, dtype)` raises for features `[tokens, width]` that it
    cannot hold; it is asked where a batch has any. Blocks are written in a thread; what that raises is raised here.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        sites: Iterable[Site],
        dtype: str,
        precision: str,
        opened: Open,
        check: Check,
        staged: bool | None = None,
    ) -> None:
        self.base, self.precision, self.opened, self.check = base, precision, opened, check
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.points = {site.point for site in sites}
        self.rows = slice(0)
        self.blocks: dict[Site, Block] = {}
        self.pending_writes: deque[Future[None]] = deque()
        self.buffers, self.turn = [torch.empty(0, dtype=self.dtype)] * MAX_PENDING_WRITES, 0
        self.writer = ThreadPoolExecutor(1)
        self.device = torch.get_device_module(base.device)
        self.stream = self.device.Stream() if (base.device.type == "cuda" if staged is None else staged) else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.writer.shutdown(cancel_futures=kind is not None)
        for block in self.blocks.values():
            if block.left:
                block.discard()

    def run(self, rows: slice, batches: Iterable[Batch], done: Callable[[], None]) -> None:
        """All forward passes for some rows of the stores; `done` is called once they are written, which is later."""
        self.rows, self.blocks = rows, {}
        before = None
        for batch in batches:
            self._forward(batch, self._stage if self.stream else self._fill)
            if not self.stream:
                self._settle(batch)
            elif before:
                self._settle(before)
            before = batch
        if self.stream and before:
            self._settle(before)
        self._write(_end, list(self.blocks.values()), done)

    def wait(self, max_pending: int = 0) -> None:
        """Block until at most `max_pending` writes are unfinished."""
        while len(self.pending_writes) > max_pending:
            self.pending_writes.popleft().result()

    def _write(self, work: Callable[..., None], *arguments: Any) -> None:
        self.pending_writes.append(self.writer.submit(work, *arguments))
        self.wait(MAX_PENDING_WRITES)

    def _forward(self, batch: Batch, taken: Callable[[Batch, Site, Tensor], None]) -> None:
        bf16 = self.precision == "bf16"
        half = torch.autocast(self.base.device.type, dtype=torch.bfloat16) if bf16 else nullcontext()

        def take(site: Site, feature_BTD: Tensor) -> None:
            taken(batch, site, feature_BTD)

        with torch.inference_mode(), recording(self.base, self.points, taken=take), half:
            self.base(**batch.inputs)
            if self.stream:
                batch.arrived = self.stream.record_event()

    def _stage(self, batch: Batch, site: Site, feature_BTD: Tensor) -> None:
        """Send it to the host; the tensor is kept until it has arrived."""
        cast = feature_BTD.to(self.dtype)
        batch.extremes += torch.aminmax(cast)
        assert self.stream is not None
        self.stream.wait_stream(self.device.current_stream())
        with self.device.stream(self.stream):
            host = torch.empty(cast.shape, dtype=cast.dtype, pin_memory=cast.is_cuda).copy_(cast, non_blocking=True)
        batch.staged.append((site, host, cast))

    def _fill(self, batch: Batch, site: Site, feature_BTD: Tensor) -> None:
        """Cast it into memory that is used in turn: a heap of tensors that live on would fall into pieces."""
        self.wait(MAX_PENDING_WRITES - 1)
        self.turn, numbers = (self.turn + 1) % MAX_PENDING_WRITES, feature_BTD.numel()
        if self.buffers[self.turn].numel() < numbers:
            self.buffers[self.turn] = torch.empty(numbers, dtype=self.dtype)
        cast = self.buffers[self.turn][:numbers].view(feature_BTD.shape).copy_(feature_BTD)
        batch.fits &= all(math.isfinite(each.item()) for each in torch.aminmax(cast))
        self._put(batch, site, cast)

    def _put(self, batch: Batch, site: Site, feature_BTD: Tensor) -> None:
        if site not in self.blocks:
            self.blocks[site] = self.opened(site, self.rows)
        values = feature_BTD.numpy()
        self._write(self.blocks[site].put, [(part.row, values[part.text, part.tokens]) for part in batch.parts])

    def _settle(self, batch: Batch) -> None:
        """Its features are on their way to where they belong, and fit."""
        if batch.arrived:
            batch.arrived.synchronize()
        for site, host, _ in batch.staged:
            self._put(batch, site, host)
        if batch.extremes:
            batch.fits = bool(torch.stack(batch.extremes).isfinite().all())
        if not batch.fits:  # of a text, or of padding
            self._forward(batch, self._examine)
        batch.inputs, batch.staged, batch.extremes = {}, [], []

    def _examine(self, batch: Batch, site: Site, feature_BTD: Tensor) -> None:
        for part in batch.parts:
            features = feature_BTD[part.text, part.tokens].float().cpu().numpy()
            self.check(features, site, str(self.dtype).removeprefix("torch."))


def _end(blocks: list[Block], done: Callable[[], None]) -> None:
    if any(block.left for block in blocks):
        raise RuntimeError("rows of a block were never computed, or could not be written")
    done()

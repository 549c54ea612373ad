"""Features of texts as rows of stores: forward passes fill a unit of rows in memory, and a thread writes it.

While the model computes the next unit, the thread writes the last one, site by site. A site's memory is filled again
only once it is written, so one unit of rows is in memory, whatever the number of texts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from attnmix.core.points import Site
from attnmix.models.capture_points import recording

Features = npt.NDArray[Any]


class Part(NamedTuple):
    """The rows of a unit that belong to tokens of one text of a batch."""

    text: int  # its number in the batch
    tokens: slice
    row: int  # of the unit, for the first of these tokens


class Batch(NamedTuple):
    """One padded forward pass, and where its tokens belong."""

    inputs: dict[str, torch.Tensor]
    parts: list[Part]


class FeatureWriter:
    """Runs batches through `base` and writes the features of the sites of `widths`, cast to `dtype`.

    `write(site, rows, features)` writes a unit; a thread calls it, and what it raises is raised here.
    `check(features, site, dtype)` raises for features `[tokens, width]` that `dtype` cannot hold.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        widths: Mapping[Site, int],
        dtype: str,
        precision: str,
        write: Callable[[Site, slice, Features], None],
        check: Callable[[Features, Site, str], None],
    ) -> None:
        self.base, self.widths, self.dtype, self.precision = base, widths, dtype, precision
        self.write, self.check = write, check
        self.points = {site.point for site in widths}
        self.units: dict[Site, Features] = {}
        self.writes: dict[Site, Future[None]] = {}
        self.last: Future[None] | None = None
        self.writer = ThreadPoolExecutor(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.writer.shutdown(cancel_futures=kind is not None)

    def run(self, rows: slice, batches: Iterable[Batch], done: Callable[[], None]) -> None:
        """Compute a unit of rows; `done` is called once it is written, which is later."""
        missing = rows.stop - rows.start
        for batch in batches:
            self._forward(batch, rows.stop - rows.start)
            missing -= sum(part.tokens.stop - part.tokens.start for part in batch.parts)
        if missing:
            raise RuntimeError(f"{missing} rows of a unit were never computed")
        self.wait()
        for site in self.widths:
            unit = self.units[site][: rows.stop - rows.start]
            self.writes[site] = self.writer.submit(self.write, site, rows, unit)
        self.last = self.writer.submit(self._finish, list(self.writes.values()), done)

    def wait(self) -> None:
        """Wait until everything is written."""
        if self.last:
            self.last.result()

    @staticmethod
    def _finish(writes: list[Future[None]], done: Callable[[], None]) -> None:
        for write in writes:
            write.result()
        done()

    def _forward(self, batch: Batch, rows: int) -> None:
        bf16 = self.precision == "bf16"
        half = torch.autocast(self.base.device.type, dtype=torch.bfloat16) if bf16 else nullcontext()

        def take(site: Site, feature_BTD: torch.Tensor) -> None:
            cast = feature_BTD.to(getattr(torch, self.dtype)).cpu()
            if not all(math.isfinite(extreme.item()) for extreme in torch.aminmax(cast)):  # of a text, or of padding
                for part in batch.parts:
                    self.check(feature_BTD[part.text, part.tokens].float().cpu().numpy(), site, self.dtype)
            unit = self._unit(site, rows)
            for part in batch.parts:
                tokens = cast[part.text, part.tokens].numpy()
                unit[part.row : part.row + len(tokens)] = tokens

        with torch.inference_mode(), recording(self.base, self.points, taken=take), half:
            self.base(**batch.inputs)

    def _unit(self, site: Site, rows: int) -> Features:
        """Return the memory of one site's unit, once what it held is written."""
        if write := self.writes.pop(site, None):
            write.result()
        if site not in self.units or len(self.units[site]) < rows:
            self.units[site] = np.empty((rows, self.widths[site]), self.dtype)
        return self.units[site]

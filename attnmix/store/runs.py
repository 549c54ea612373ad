"""What a run captured, to read from a program or a notebook, as much of it as is asked for.

    from attnmix.store.runs import open_run

    run = open_run()  # of this folder, or open_run("another/clone")
    run.tokens  # document, position, token_id, token: a row for each token
    vectors = run.features("layer_output", layers=range(1, 4), document="test/3")
    vectors.shape  # (layers, tokens, hidden); nothing is read yet
    vectors.numpy()  # or .torch(), or .xarray(), which still reads nothing until it is computed with

Layers are counted from 1; level 0 is the embedding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from attnmix.core.errors import InputError
from attnmix.core.points import Site
from attnmix.store import features as stored

if TYPE_CHECKING:
    import torch
    import xarray

Vectors = npt.NDArray[Any]
NAMED = 5  # documents in an error


def open_run(folder: Path | str = ".") -> Run:
    """The vectors that `capture` left in a clone of the project; `InputError` where there are none."""
    run = Run(Path(folder) / stored.ACTIVATIONS)
    _ = run.sites
    return run


@dataclass(frozen=True)
class Run:
    """The stores under `root` and the tables beside them; `InputError` for damage, when it is met."""

    root: Path

    @cached_property
    def tokens(self) -> pd.DataFrame:
        """`document` (`test/3`), `position`, `token_id`, `token`: a row for each row of a store."""
        return stored.read_tokens(self.root)

    @cached_property
    def texts(self) -> dict[str, str]:
        """The captured texts by document."""
        return stored.read_texts(self.root)

    @cached_property
    def sites(self) -> list[Site]:
        """The layers and points that were captured, in forward order."""
        return stored.stored_sites(self.root)

    def width(self, site: Site) -> int:
        """Numbers of one vector at `site`."""
        return int(stored.open_store(self.root, site).shape[1])

    def rows(self, document: str | None = None) -> slice:
        """A document's rows in every store; all of them without a name."""
        if document is None:
            return slice(0, len(self.tokens))
        found = np.flatnonzero(self.tokens["document"] == document)
        if not len(found):
            names = self.tokens["document"].unique()
            more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
            raise InputError(
                f"{document!r} was not captured in {self.root}; captured: {', '.join(names[:NAMED])}{more}"
            )
        return slice(int(found[0]), int(found[-1]) + 1)

    def read(self, site: Site, rows: npt.NDArray[np.int64]) -> Vectors:
        """`[rows, width]` of chosen rows, in the store's dtype; `rows` is sorted."""
        return stored.read_rows(self.root, site, rows)

    def features(self, point: str, layers: Iterable[int] | None = None, document: str | None = None) -> Features:
        """Vectors of one point, in the layers that have it or in chosen ones, of one document or of all."""
        known = [site.layer for site in self.sites if site.point == point]
        if not known:
            points = ", ".join(dict.fromkeys(site.point for site in self.sites))
            raise InputError(f"{point!r} was not captured in {self.root}; captured: {points}")
        chosen = known if layers is None else list(layers)
        if not chosen or not set(chosen) <= set(known):
            wrong = ", ".join(str(layer) for layer in chosen if layer not in known) or "none"
            raise InputError(f"layers: {wrong}; {point} was captured in {', '.join(map(str, known))}")
        return Features(self, [Site(layer, point) for layer in chosen], self.rows(document))


@dataclass(frozen=True)
class Features:
    """Vectors `[layers, tokens, hidden]` that are read when they are asked for."""

    run: Run
    sites: list[Site]
    rows: slice

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, tokens, hidden."""
        return len(self.sites), self.rows.stop - self.rows.start, self.run.width(self.sites[0])

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the stores."""
        found: np.dtype[Any] = stored.open_store(self.run.root, self.sites[0]).dtype
        return found

    def numpy(self) -> Vectors:
        """All of them in memory."""
        made = np.empty(self.shape, self.dtype)
        for part, site in zip(made, self.sites, strict=True):
            part[:] = stored.read_features(self.run.root, site, self.rows)
        return made

    def torch(self) -> torch.Tensor:
        """All of them in memory, on the CPU."""
        import torch

        return torch.from_numpy(self.numpy())

    def xarray(self) -> xarray.DataArray:
        """Chunks of the stores by `dask`, with the layers, and the tokens with their document and position."""
        import xarray
        from dask import array

        stores = [_Store(self.run.root, site) for site in self.sites]
        lazy = [array.from_array(each, chunks=each.chunks)[self.rows] for each in stores]
        tokens = self.run.tokens.iloc[self.rows]
        named: dict[str, Any] = {str(name): ("token", tokens[name].to_numpy()) for name in tokens}
        named["layer"] = "layer", [site.layer for site in self.sites]
        dimensions = ("layer", "token", "hidden")
        return xarray.DataArray(array.stack(lazy), dims=dimensions, coords=named, name=self.sites[0].point)


class _Store:
    """What dask asks of an array; damage is seen as it is elsewhere."""

    def __init__(self, root: Path, site: Site) -> None:
        self.root, self.site = root, site
        opened = stored.open_store(root, site)
        self.shape, self.dtype, self.ndim = opened.shape, opened.dtype, opened.ndim
        self.chunks = opened.chunks

    def __getitem__(self, part: tuple[slice, slice]) -> Vectors:
        rows, columns = part
        return stored.read_features(self.root, self.site, rows)[:, columns]

"""Feature stores: one array `[tokens, hidden]` per layer and capture point, such as `<root>/layer_07/ffn_output.zarr`.

Rows are in the order of `<root>/tokens.parquet`, and `files.py` documents the array format. If `capture.store` sets
another location, the arrays are stored there; `<root>/manifest.json` contains this location and a digest of each array.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from attnmix.core.errors import InputError
from attnmix.core.names import POINTS, Site, in_forward_order
from attnmix.core.store.files import Place, create_array, open_array, read_array, reading, writing
from attnmix.core.store.shards import ShardWriter

MANIFEST = "manifest.json"
TOKENS_FILE = "tokens.parquet"
SHARD_BYTES = 2**23
DIGEST = "digest"

Array = npt.NDArray[Any]


class StorePlan(NamedTuple):
    """The rows of a store, and their division into chunks and units.

    A unit is a shard file or a chunk, and is written at once.
    """

    tokens: int
    """Number of rows in the store."""
    dtype: str
    chunk_rows: int
    unit_rows: int

    @property
    def units(self) -> list[slice]:
        """The range of rows of each unit."""
        starts = range(0, self.tokens, self.unit_rows)
        return [slice(start, min(start + self.unit_rows, self.tokens)) for start in starts]


def plan_store(tokens: int, hidden: int, dtype: str, chunk_tokens: int) -> StorePlan:
    """Return a plan with chunks of `chunk_tokens` rows, and as many chunks in a shard as fit into `SHARD_BYTES`."""
    chunk_rows = min(chunk_tokens, tokens)
    chunks_in_store = ceil(tokens / chunk_rows)
    chunk_bytes = chunk_rows * hidden * np.dtype(dtype).itemsize
    chunks_that_fit = SHARD_BYTES // chunk_bytes
    chunks_in_shard = max(1, min(chunks_that_fit, chunks_in_store))
    return StorePlan(tokens, dtype, chunk_rows, chunk_rows * chunks_in_shard)


def place_of(store: str) -> Place:
    """Return the location in `capture.store` as a path or URL."""
    return store if "://" in store else Path(store)


def _locate_array(place: Place, site: Site) -> Place:
    """Return the path or URL of a site's array."""
    name = f"{site}.zarr"
    if isinstance(place, Path):
        return place / name
    return f"{place}/{name}"


class _Location(NamedTuple):
    """The location of a run's arrays."""

    place: Place
    digests: dict[str, str]
    """The digest of each array, by site; empty if the arrays are in the features folder, without a manifest."""


def _locate_arrays(root: Path) -> _Location:
    """Return the location of the arrays of a run with the features folder `root`, from the manifest if there is one."""
    if not (root / MANIFEST).is_file():
        return _Location(root, {})
    with reading(root / MANIFEST, "capture") as path:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        place = place_of(manifest["store"])
        digests = manifest["digests"]
    if isinstance(place, Path):
        run_folder = root.parents[1]
        place = run_folder / place  # an absolute path remains unchanged
    return _Location(place, digests)


def write_manifest(root: Path, store: str, digests: Sequence[Mapping[str, str]]) -> None:
    """Write `manifest.json` in `root`, with the location `store` and a digest of each array.

    `digests` has one mapping per unit (see `StorePlan`): from the name of each site to the hash of this unit of the
    site's array. The digest of an array is the hash of the joined hashes of its units, and is also stored in the
    attributes of the array.
    """
    digest_by_site = {}
    for name in digests[0]:
        unit_hashes = "".join(unit[name] for unit in digests)
        digest = hashlib.sha256(unit_hashes.encode()).hexdigest()
        digest_by_site[name] = digest
        path = _locate_array(place_of(store), Site.named(name))
        with writing(path):
            open_array(path, "capture", "r+").update_attributes({DIGEST: digest})
    manifest = json.dumps({"store": store, "digests": digest_by_site}, indent=2)
    with writing(root / MANIFEST) as path:
        path.write_text(f"{manifest}\n", encoding="utf-8")


def create_stores(place: Place, widths: Mapping[Site, int], plan: StorePlan) -> None:
    """Create the arrays of all sites at `place`; `widths` maps each site to the width of its vectors."""
    has_shards = plan.unit_rows > plan.chunk_rows
    for site, width in widths.items():
        shards = (plan.unit_rows, width) if has_shards else None
        create_array(
            _locate_array(place, site),
            shape=(plan.tokens, width),
            dtype=plan.dtype,
            chunks=(plan.chunk_rows, width),
            shards=shards,
            dimension_names=("token", "hidden"),
            attributes={"layer": site.layer, "point": site.point},
        )


def check_fits(block: Array, site: Site, dtype: str) -> None:
    """Raise `InputError`, prefixed with `site`, if `block` contains NaN, infinity or values too large for `dtype`."""
    if not np.isfinite(block).all():
        raise InputError(f"{site}: the model's features contain NaN or infinite values")
    limit = np.finfo(dtype).max
    largest = np.abs(block).max()
    if largest > limit:
        raise InputError(
            f"{site}: a feature of {largest:.6g} exceeds the range of {dtype} (maximum {limit:.6g}); "
            "set capture.dtype to float32"
        )


class OpenStore(NamedTuple):
    """An open Zarr array and its location."""

    path: Place
    array: Any


def open_to_write(place: Place, site: Site) -> OpenStore:
    """Return the writable store of one site, created by `create_stores`."""
    path = _locate_array(place, site)
    return OpenStore(path, open_array(path, "capture", "r+"))


def write_unit(
    store: OpenStore, rows: slice, block: Array, writer: ShardWriter | None = None, with_digest: bool = False
) -> str:
    """Write the vectors `block` of a unit of rows; return their hash if `with_digest` is True, else an empty string.

    A unit is a complete shard, or a chunk of an array without shards. A `writer` can be reused within one thread.
    Raise `InputError` if writing fails.
    """
    block = np.ascontiguousarray(block, store.array.dtype)
    if store.array.shards and isinstance(store.path, Path):
        # `ShardWriter` is faster than zarr, but supports only local files.
        _write_shard(store.path, store.array, rows.start, block, writer or ShardWriter())
    else:
        with writing(store.path):
            store.array[rows] = block
    if not with_digest:
        return ""
    return hashlib.sha256(block.data).hexdigest()


def _write_shard(folder: Path, array: Any, first_row: int, block: Array, writer: ShardWriter) -> None:
    """Write `block`, a complete shard of `array`, to the shard's file in `folder`; `first_row` is its first row."""
    chunk_rows = array.chunks[0]
    shard_rows = array.shards[0]
    shard_number = first_row // shard_rows
    file = folder / array.metadata.encode_chunk_key((shard_number, 0))
    writer.write(file, block, chunk_rows, chunks=shard_rows // chunk_rows)


def open_store(root: Path, site: Site) -> Any:
    """Return the Zarr array `[tokens, hidden]` of a site; raise `InputError` if it is damaged or from another run."""
    return _open_checked(root, site).array


def _open_checked(root: Path, site: Site) -> OpenStore:
    """Return the store of a site; raise `InputError` if the digest of its array differs from that in the manifest."""
    place, digests = _locate_arrays(root)
    path = _locate_array(place, site)
    array = open_array(path, "capture")
    if digests and array.attrs.get(DIGEST) != digests.get(str(site)):
        raise InputError(
            f"{path} was overwritten by another run and does not match {root / MANIFEST}; "
            "rerun the stage capture with --force, or use a separate capture.store for each run"
        )
    return OpenStore(path, array)


def read_features(root: Path, site: Site, rows: slice = slice(None)) -> Array:
    """Return the vectors `[rows, width]` of one site in the store's dtype; raise `InputError` for a damaged store."""
    store = _open_checked(root, site)
    return read_array(store.array, store.path, "capture", rows)


def read_rows(root: Path, site: Site, rows: npt.NDArray[np.int64]) -> Array:
    """Return the vectors `[rows, width]` of the sorted `rows` of one store; raise `InputError` if it is damaged.

    To limit memory, one unit of the store is read at a time: a shard or, in a store without shards, a chunk.
    """
    path, array = _open_checked(root, site)
    with reading(path, "capture"):
        tokens = pq.read_metadata(root / TOKENS_FILE).num_rows
        if array.shape[0] != tokens:
            raise ValueError(f"it has {array.shape[0]} rows, but tokens.parquet has {tokens}")
    features = np.empty((len(rows), array.shape[1]), array.dtype)
    unit_shape = array.shards or array.chunks
    unit_rows = unit_shape[0]
    for start in range(0, tokens, unit_rows):
        stop = start + unit_rows
        first, last = np.searchsorted(rows, (start, stop))  # `rows[first:last]` are in this unit
        if first < last:
            unit = read_array(array, path, "capture", slice(start, stop))
            rows_in_unit = rows[first:last] - start
            features[first:last] = unit[rows_in_unit]
    return features


def stored_sites(root: Path) -> list[Site]:
    """Return the sites with a store in `root`, in forward order; raise `InputError` if there are none."""
    names = list(_locate_arrays(root).digests)
    if not names:  # without a manifest, the arrays are in `root`
        names = [f"{path.parent.name}/{path.stem}" for path in root.glob("layer_*/*.zarr")]
    sites = [site for site in map(Site.named, names) if site.point in POINTS]
    if not sites:
        raise InputError(f"{root} contains no feature store; run the stage capture")
    return in_forward_order(sites)

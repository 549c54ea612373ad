"""Feature stores: `<root>/layer_07/attention_output.zarr`, `[tokens, hidden]` each.

Rows are those of `<root>/tokens.parquet`, arrays those of `files.py`. Where `capture.store` names another place the
arrays are there, and `<root>/manifest.json` names it and holds a digest of each array.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from attnmix.core.errors import InputError
from attnmix.core.names import POINTS, Site, in_forward_order
from attnmix.core.store.files import CHUNK_BYTES, Place, create_array, open_array, read_array, reading, writing

MANIFEST = "manifest.json"
TOKENS_FILE = "tokens.parquet"
CHUNKS_IN_SHARD = 8
DIGEST = "digest"
MISSING_CHUNK = 2**64 - 1  # offset and size of a chunk beyond the array's end
CHECKSUM_BYTES = 4

Array = npt.NDArray[Any]


class StorePlan(NamedTuple):
    """Rows of a store, of a chunk, and of the unit that is written at once: a shard, or a whole small store."""

    tokens: int
    dtype: str
    chunk_rows: int
    unit_rows: int

    @property
    def units(self) -> list[slice]:
        """The rows of each unit."""
        starts = range(0, self.tokens, self.unit_rows)
        return [slice(start, min(start + self.unit_rows, self.tokens)) for start in starts]


def plan_store(tokens: int, hidden: int, dtype: str) -> StorePlan:
    """Return chunks of about 1 MB, and shards of 8 of them for a store that is larger than one shard."""
    rows = max(1, round(CHUNK_BYTES / (hidden * np.dtype(dtype).itemsize)))
    return StorePlan(tokens, dtype, min(rows, tokens), min(rows * CHUNKS_IN_SHARD, tokens))


def place_of(store: str) -> Place:
    """Return the place that `capture.store` names."""
    return store if "://" in store else Path(store)


def _path(place: Place, site: Site) -> Place:
    return place / f"{site}.zarr" if isinstance(place, Path) else f"{place}/{site}.zarr"


def _arrays(root: Path) -> tuple[Place, dict[str, str]]:
    """Return the place of a run's arrays, and the digests by site of arrays that are elsewhere."""
    if not (root / MANIFEST).is_file():
        return root, {}
    with reading(root / MANIFEST, "capture") as path:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        place, digests = place_of(manifest["store"]), manifest["digests"]
    if isinstance(place, Path):
        place = root.parents[1] / place
    return place, digests


def write_manifest(root: Path, store: str, digests: Sequence[Mapping[str, str]]) -> None:
    """Write into `root` the place of the arrays, and into both which they are: a hash of their units' `digests`."""
    by_site = {}
    for name in digests[0]:
        unit_digests = "".join(unit[name] for unit in digests)
        digest = hashlib.sha256(unit_digests.encode()).hexdigest()
        by_site[name] = digest
        path = _path(place_of(store), Site.named(name))
        with writing(path):
            open_array(path, "capture", "r+").update_attributes({DIGEST: digest})
    with writing(root / MANIFEST) as path:
        path.write_text(json.dumps({"store": store, "digests": by_site}, indent=2) + "\n", encoding="utf-8")


def create_stores(place: Place, widths: Mapping[Site, int], plan: StorePlan) -> None:
    """Create the arrays of the sites in `widths`, for vectors of these widths."""
    for site, width in widths.items():
        create_array(
            _path(place, site),
            shape=(plan.tokens, width),
            dtype=plan.dtype,
            chunks=(plan.chunk_rows, width),
            shards=(plan.unit_rows, width) if plan.unit_rows < plan.tokens else None,
            dimension_names=("token", "hidden"),
            attributes={"layer": site.layer, "point": site.point},
        )


def check_fits(block: Array, site: Site, dtype: str) -> None:
    """Raise `InputError` naming layer and point for a value of `block` that `dtype` cannot hold."""
    if not np.isfinite(block).all():
        raise InputError(f"{site}: the model's features hold NaN or infinite values")
    limit, largest = np.finfo(dtype).max, np.abs(block).max()
    if largest > limit:
        raise InputError(
            f"{site}: a feature of {largest:.6g} does not fit {dtype} (largest {limit:.6g}); "
            "set capture.dtype to float32"
        )


class ShardWriter:
    """The file of one shard, whose rows are given in any order to `put`, and at last `finish`.

    zarr wants all rows of a shard in memory, of every store at once, and copies each chunk several times. The bytes are
    the same: chunks, then their offsets and sizes, each with a checksum behind it.
    Source: the sharding and crc32c codecs of Zarr v3, https://zarr-specs.readthedocs.io/en/latest/v3/codecs/.
    """

    def __init__(self, path: Path, array: Any, rows: slice) -> None:
        self.dtype, self.rows = array.dtype, rows.stop - rows.start
        self.chunk_rows, self.row_bytes = array.chunks[0], array.shape[1] * array.dtype.itemsize
        self.index = np.full((array.shards[0] // self.chunk_rows, 2), MISSING_CHUNK, "<u8")
        self.path = path / array.metadata.encode_chunk_key((rows.start // array.shards[0], 0))
        self.part = self.path.with_name(f"{self.path.name}.part")
        with writing(self.part):
            self.part.write_bytes(b"")

    def put(self, pieces: Iterable[tuple[slice, Array]]) -> None:
        """Write vectors at some rows each; raise `InputError` where the disk refuses them."""
        with writing(self.path), self.part.open("r+b") as file:
            for rows, vectors in pieces:
                next_chunk = self.chunk_rows * (rows.start // self.chunk_rows + 1)
                chunk_starts = range(next_chunk, rows.stop, self.chunk_rows)
                for start, stop in itertools.pairwise((rows.start, *chunk_starts, rows.stop)):
                    checksums_before = start // self.chunk_rows
                    file.seek(start * self.row_bytes + checksums_before * CHECKSUM_BYTES)
                    in_chunk = vectors[start - rows.start : stop - rows.start]
                    file.write(np.ascontiguousarray(in_chunk, self.dtype).data)

    def finish(self, with_digest: bool) -> str:
        """Write the checksums, give the file its name, and return a hash of the rows if it is asked for."""
        digest, chunk_bytes = hashlib.sha256(), self.chunk_rows * self.row_bytes
        with writing(self.path), self.part.open("r+b") as file:
            size = chunk_bytes + CHECKSUM_BYTES
            for number in range(math.ceil(self.rows / self.chunk_rows)):
                offset = number * size
                self.index[number] = offset, size
                file.seek(offset)
                rows = file.read(chunk_bytes)
                if with_digest:
                    digest.update(rows)
                chunk = rows.ljust(chunk_bytes, b"\0")  # where the array ends within it
                file.write(chunk[len(rows) :] + _checksum(chunk))
            file.write(self.index.data)
            file.write(_checksum(self.index.tobytes()))
            self.part.replace(self.path)
        return digest.hexdigest() if with_digest else ""


def _checksum(content: bytes) -> bytes:
    return int(google_crc32c.value(content)).to_bytes(CHECKSUM_BYTES, "little")


Destination = ShardWriter | Array
"""The destination of a unit of rows: the file of a shard on a disk, else an array."""


class OpenStore(NamedTuple):
    """A Zarr array that rows are written to, and where it is."""

    path: Place
    array: Any


def open_to_write(place: Place, site: Site) -> OpenStore:
    """Return the store of one site, which `create_stores` has created."""
    path = _path(place, site)
    return OpenStore(path, open_array(path, "capture", "r+"))


def begin_unit(store: OpenStore, rows: slice) -> Destination:
    """Return the destination of the vectors of a unit of rows, a shard or all of a small store."""
    if store.array.shards and isinstance(store.path, Path):
        return ShardWriter(store.path, store.array, rows)
    return np.empty((rows.stop - rows.start, store.array.shape[1]), store.array.dtype)


def put_rows(destination: Destination, pieces: Iterable[tuple[slice, Array]]) -> None:
    """Put vectors at some rows of a unit each, counted from its first."""
    if isinstance(destination, ShardWriter):
        destination.put(pieces)
    else:
        for rows, vectors in pieces:
            destination[rows] = vectors


def write_unit(store: OpenStore, rows: slice, destination: Destination, with_digest: bool = False) -> str:
    """Write a unit of rows whose vectors are all there; return their hash if it is asked for, else nothing.

    Raises `InputError` where the place refuses.
    """
    if isinstance(destination, ShardWriter):
        return destination.finish(with_digest)
    with writing(store.path):
        store.array[rows] = destination
    return hashlib.sha256(destination.data).hexdigest() if with_digest else ""


def open_store(root: Path, site: Site) -> Any:
    """Return the Zarr array `[tokens, hidden]` of one site; raise `InputError` where it is damaged or another run's."""
    array, _ = _open(root, site)
    return array


def _open(root: Path, site: Site) -> tuple[Any, Place]:
    place, digests = _arrays(root)
    path = _path(place, site)
    array = open_array(path, "capture")
    if digests and array.attrs.get(DIGEST) != digests.get(str(site)):
        raise InputError(
            f"{path} is not the array that {root / MANIFEST} names: another run has written there since; "
            "force the stage capture to run again, or give each run its own capture.store"
        )
    return array, path


def read_features(root: Path, site: Site, rows: slice = slice(None)) -> Array:
    """Return rows of one store, in the store's dtype; raise `InputError` where they are damaged."""
    array, path = _open(root, site)
    return read_array(array, path, "capture", rows)


def read_rows(root: Path, site: Site, rows: npt.NDArray[np.int64]) -> Array:
    """Return the sorted `rows` of one store, reading one unit at a time; raise `InputError` where it is damaged."""
    array, path = _open(root, site)
    with reading(path, "capture"):
        tokens = pq.read_metadata(root / TOKENS_FILE).num_rows
        if array.shape[0] != tokens:
            raise ValueError(f"it has {array.shape[0]} rows, and tokens.parquet {tokens}")
    features = np.empty((len(rows), array.shape[1]), array.dtype)
    step = (array.shards or array.chunks)[0]
    for start in range(0, tokens, step):
        first, last = np.searchsorted(rows, (start, start + step))
        if first < last:
            unit = read_array(array, path, "capture", slice(start, start + step))
            features[first:last] = unit[rows[first:last] - start]
    return features


def stored_sites(root: Path) -> list[Site]:
    """Return the layers and points that have a store under `root`, in forward order; `InputError` without any."""
    _, digests = _arrays(root)
    names = list(digests) or [f"{path.parent.name}/{path.stem}" for path in root.glob("layer_*/*.zarr")]
    sites = [site for site in map(Site.named, names) if site.point in POINTS]
    if not sites:
        raise InputError(f"{root} holds no feature store; the stage capture writes them")
    return in_forward_order(sites)

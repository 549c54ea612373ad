"""Where rows of an array go as they are computed, in any order: the array's files, or memory where it lies elsewhere.

Files get the bytes that zarr writes for chunks with a checksum and nothing else. zarr wants all rows of a shard in
memory, and joins them there once more, which costs several times as much as the disk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import google_crc32c
import numpy as np
import numpy.typing as npt

from attnmix.store.files import Place, writing

MISSING = np.uint64(2**64 - 1)  # the index's place and size of a chunk that lies beyond the array
CHECKSUM = 4  # bytes

Rows = npt.NDArray[Any]
Piece = tuple[int, Rows]
"""Consecutive rows, and where in the block they begin."""


class Block(Protocol):
    """Rows that are written at once, each given once; what is given last ends it."""

    left: int
    """Rows that have not been given yet."""

    def put(self, pieces: Iterable[Piece]) -> None:
        """Some of its rows; `InputError` where they cannot be written."""

    def discard(self) -> None:
        """Leave nothing behind of what is not whole."""


class HeldBlock:
    """`rows` of an array in any place, held in memory until all are there."""

    def __init__(self, array: Any, place: Place, rows: slice, digest: Any = None) -> None:
        self.array, self.place, self.rows, self.digest = array, place, rows, digest
        self.left = rows.stop - rows.start
        self.block = np.empty((self.left, *array.shape[1:]), dtype=array.dtype)

    def put(self, pieces: Iterable[Piece]) -> None:
        for start, rows in pieces:
            self.block[start : start + len(rows)] = rows
            self.left -= len(rows)
        if not self.left:
            with writing(self.place):
                self.array[self.rows] = self.block
            if self.digest:
                self.digest.update(self.block.data)

    def discard(self) -> None:
        del self.block


class FileBlock:
    """`rows` of the array at `path`: one shard, or all of an array without shards, in the files that zarr would write.

    Rows go to the files as they come; these get their checksums, a shard its index, and their names once all are there,
    so that a killed stage leaves no part of a file under its name.

    Source: the sharding and crc32c codecs of Zarr v3, https://zarr-specs.readthedocs.io/en/latest/v3/codecs/.
    """

    def __init__(self, array: Any, path: Path, rows: slice, digest: Any = None) -> None:
        self.left = self.rows = rows.stop - rows.start
        self.digest, self.dtype, self.is_shard = digest, array.dtype, bool(array.shards)
        self.step = array.chunks[0]
        self.chunks_of_file = array.shards[0] // self.step if array.shards else 1
        self.bytes_of_row = int(np.prod(array.chunks[1:])) * array.dtype.itemsize
        self.size = self.step * self.bytes_of_row + CHECKSUM  # of a chunk
        rows_of_file, others = self.step * self.chunks_of_file, (0,) * (array.ndim - 1)
        names = range(rows.start // rows_of_file, -(-rows.stop // rows_of_file))
        self.files = [path / array.metadata.encode_chunk_key((number, *others)) for number in names]
        for file in self.files:
            with writing(file):
                _part(file).write_bytes(b"")

    def put(self, pieces: Iterable[Piece]) -> None:
        of_files: dict[int, list[Piece]] = defaultdict(list)
        for start, rows in pieces:
            self.left -= len(rows)
            for chunk, row, here in self._by_chunks(start, rows):
                number, place = divmod(chunk, self.chunks_of_file)
                of_files[number].append((place * self.size + row * self.bytes_of_row, here))
        for number, places in of_files.items():
            with writing(self.files[number]) as file, _part(file).open("r+b") as opened:
                for place, rows in places:
                    opened.seek(place)
                    opened.write(np.ascontiguousarray(rows, dtype=self.dtype).data)
        if not self.left:
            for number, file in enumerate(self.files):
                with writing(file), _part(file).open("r+b") as opened:
                    self._end(opened, self.rows - number * self.chunks_of_file * self.step)
            for file in self.files:
                _part(file).replace(file)

    def _by_chunks(self, start: int, rows: Rows) -> Iterator[tuple[int, int, Rows]]:
        while len(rows):
            chunk, row = divmod(start, self.step)
            here = rows[: self.step - row]
            yield chunk, row, here
            start, rows = start + len(here), rows[len(here) :]

    def _end(self, opened: Any, rows: int) -> None:
        """A file that has so many `rows`, or is full."""
        chunks = min(self.chunks_of_file, -(-rows // self.step))
        opened.truncate(chunks * self.size)  # what the last chunk has beyond the rows is zeros
        read = np.empty(self.size - CHECKSUM, dtype=np.uint8)
        for chunk in range(chunks):
            opened.seek(chunk * self.size)
            opened.readinto(read.data)
            opened.seek((chunk + 1) * self.size - CHECKSUM)
            opened.write(_checksum(read))
            if self.digest:
                self.digest.update(read[: (rows - chunk * self.step) * self.bytes_of_row].data)
        if self.is_shard:
            index = np.full((self.chunks_of_file, 2), MISSING, dtype="<u8")
            index[:chunks] = np.column_stack([np.arange(chunks) * self.size, np.full(chunks, self.size)])
            opened.seek(chunks * self.size)
            opened.write(index.data)
            opened.write(_checksum(index))

    def discard(self) -> None:
        for file in self.files:
            _part(file).unlink(missing_ok=True)


def _part(file: Path) -> Path:
    return file.with_name(f"{file.name}.part")


def _checksum(block: Any) -> bytes:
    return int(google_crc32c.value(block)).to_bytes(CHECKSUM, "little")

"""Writer of shard files in the format of Zarr v3: chunks and an index of their offsets and sizes, with checksums.

Source: the sharding and crc32c codecs, https://zarr-specs.readthedocs.io/en/latest/v3/codecs/. The files are
identical to those of zarr, but zarr needs several times the processor time per byte (`python -m benchmarks.writer`):
it copies each chunk several times, and fills new pages of the page cache.
"""

import errno
import os
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from attnmix.core.store.files import writing

CHECKSUM_BYTES = 4
MISSING_CHUNK = 2**64 - 1  # offset and size of a chunk beyond the end of the array
PAGE_BYTES = 4096  # alignment of direct writes: buffer, offset and size
MIN_DIRECT_BYTES = 2**20  # smaller files use the page cache, because a direct write has a latency of milliseconds
DIRECT_FLAG = getattr(os, "O_DIRECT", 0)  # available only on Linux
UNSUPPORTED = (errno.EINVAL, errno.EOPNOTSUPP)  # errors of file systems without direct writes

Array = npt.NDArray[Any]


class ShardWriter:
    """A writer that builds each shard file in a reused buffer, and then writes it once.

    Threads must not share a writer. Files of at least `MIN_DIRECT_BYTES` bypass the page cache if the file system
    supports direct writes.
    """

    def __init__(self) -> None:
        self.buffer = allocate_pages(PAGE_BYTES)
        self.direct_flag = DIRECT_FLAG

    def write(self, path: Path, rows: Array, chunk_rows: int, chunks: int) -> None:
        """Write the shard file of `rows` `[rows, width]` in one step; raise `InputError` if writing fails.

        The file has up to `chunks` chunks of `chunk_rows` rows; rows missing in the last chunk of an array are zeros.
        """
        chunk_bytes = chunk_rows * rows.shape[1] * rows.itemsize
        content = rows.reshape(-1).view(np.uint8)
        size = self._fill_buffer(content, chunk_bytes, chunks)
        with writing(path):
            part = path.with_name(f"{path.name}.part")
            self._write_buffer(part, size)
            part.replace(path)

    def _fill_buffer(self, content: Array, chunk_bytes: int, chunks: int) -> int:
        """Fill the buffer with the bytes of a file, and return their number.

        The file consists of the chunks of `content`, each with a checksum, followed by the index with a checksum. The
        index contains the offset and the size of each of the `chunks` chunks.
        """
        stride = chunk_bytes + CHECKSUM_BYTES  # size of a chunk in the file
        starts = range(0, content.size, chunk_bytes)  # of the chunks in `content`
        index = np.full((chunks, 2), MISSING_CHUNK, "<u8")
        data_bytes = len(starts) * stride
        size = data_bytes + index.nbytes + CHECKSUM_BYTES
        if size > self.buffer.size:
            self.buffer = allocate_pages(size)
        for number, start in enumerate(starts):
            offset = number * stride
            index[number] = offset, stride
            chunk = content[start : start + chunk_bytes]
            _encode_chunk(chunk, chunk_bytes, self.buffer[offset : offset + stride])
        encoded_index = index.reshape(-1).view(np.uint8)
        self.buffer[data_bytes : size - CHECKSUM_BYTES] = encoded_index
        self.buffer[size - CHECKSUM_BYTES : size] = checksum_of(encoded_index)
        return size

    def _write_buffer(self, path: Path, size: int) -> None:
        """Write the first `size` bytes of the buffer; large files bypass the page cache if possible."""
        is_written = size >= MIN_DIRECT_BYTES and self._write_directly(path, size)
        if not is_written:
            write_file(path, self.buffer[:size], size)

    def _write_directly(self, path: Path, size: int) -> bool:
        """Write the first `size` bytes of the buffer past the page cache; return False if this is not supported."""
        if not self.direct_flag:
            return False
        whole_pages = self.buffer[: round_to_pages(size)]  # required by direct writes
        try:
            write_file(path, whole_pages, size, self.direct_flag)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self.direct_flag = 0  # direct writes are also disabled for all later files
            return False
        return True


def _encode_chunk(chunk: Array, chunk_bytes: int, encoded: Array) -> None:
    """Write the bytes of a chunk and their checksum to `encoded`; a shorter chunk is padded with zeros."""
    encoded[: chunk.size] = chunk
    encoded[chunk.size : chunk_bytes] = 0  # missing rows of the last chunk
    encoded[chunk_bytes:] = checksum_of(encoded[:chunk_bytes])


def allocate_pages(size: int) -> Array:
    """Return an uninitialised, page-aligned array of `size` bytes, rounded up to whole pages."""
    size = round_to_pages(size)
    memory = np.empty(size + PAGE_BYTES, np.uint8)
    start = -memory.ctypes.data % PAGE_BYTES  # offset of the first page boundary
    return memory[start : start + size]


def round_to_pages(size: int) -> int:
    """Return `size` rounded up to whole pages."""
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def checksum_of(content: Array) -> Array:
    """Return the CRC-32C of `content` as four bytes."""
    value = google_crc32c.value(content.tobytes())  # `value` accepts only bytes
    return np.array([value], "<u4").view(np.uint8)


def write_file(path: Path, content: Array, size: int, flags: int = 0) -> None:
    """Write the first `size` bytes of `content` to a new file; `flags` are additional flags of `os.open`."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o666)
    try:
        written = 0
        while written < content.size:
            written += os.write(file, content[written:].data)
        os.ftruncate(file, size)  # direct writes consist of whole pages
    finally:
        os.close(file)

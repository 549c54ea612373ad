"""Open plain and compressed data files as bytes, with a limit on the size of what is decompressed."""

import bz2
import gzip
import io
import lzma
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from attnmix.data.formats import MAX_SOURCE_BYTES, START_BYTES, check_compressed_start, check_start, compression_of

MAX_EXPANSION = 100  # largest size of a compressed file once it is read, in multiples of its size, above FREE_BYTES
FREE_BYTES = 2**28
DECOMPRESSION_ERRORS = (EOFError, RuntimeError, lzma.LZMAError, zipfile.BadZipFile, zlib.error)
"""Errors of damaged or encrypted archives, besides `OSError` and `ValueError`."""


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedReader]:
    """Yield the bytes of a file, decompressed if its name says so.

    Raises `ValueError` if the first bytes do not match the name, and while reading beyond the size limit.
    """
    compression = compression_of(path.name)
    with ExitStack() as opened:
        file: io.BufferedReader = opened.enter_context(path.open("rb"))
        if compression:
            check_compressed_start(file.peek(START_BYTES)[:START_BYTES])
            content = _decompress(file, compression, opened)
            limit = min(MAX_SOURCE_BYTES, expansion_limit(path))
            file = opened.enter_context(io.BufferedReader(_LimitedReader(content, limit)))
        check_start(file.peek(START_BYTES)[:START_BYTES], path.name)
        yield file


def expansion_limit(path: Path) -> int:
    """Return the largest allowed size, in bytes, of what is read from a compressed file."""
    return max(FREE_BYTES, MAX_EXPANSION * path.stat().st_size)


def _decompress(file: io.BufferedReader, compression: str, opened: ExitStack) -> Any:
    if compression == ".gz":
        return opened.enter_context(gzip.open(file))
    if compression == ".bz2":
        return opened.enter_context(bz2.open(file))
    if compression == ".xz":
        return opened.enter_context(lzma.open(file))
    if compression == ".zst":
        return opened.enter_context(pa.input_stream(file, compression="zstd"))
    archive = opened.enter_context(zipfile.ZipFile(file))
    members = [member for member in archive.infolist() if not member.is_dir() and not _is_hidden(member.filename)]
    if len(members) != 1:
        raise ValueError(f"it is an archive of {len(members)} files; allowed: one; unpack it")
    return opened.enter_context(archive.open(members[0]))


def _is_hidden(name: str) -> bool:
    return any(part.startswith((".", "__")) for part in name.split("/"))


class _LimitedReader(io.RawIOBase):
    """A reader that raises `ValueError` beyond `limit` bytes of another one."""

    def __init__(self, content: Any, limit: int) -> None:
        super().__init__()
        self._content = content
        self._limit = limit
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = self._content.read(len(buffer))
        self._size += len(part)
        if self._size > self._limit:
            allowed = f"{self._limit / 1e9:.3g} GB are allowed for a file of its size"
            raise ValueError(f"it takes more room decompressed than a data set; {allowed}; take a part of it")
        buffer[: len(part)] = part
        return len(part)

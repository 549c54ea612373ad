"""Plain and compressed data files as byte streams, with a limit on the decompressed size."""

import bz2
import codecs
import io
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from attnmix.data.formats import MAX_SOURCE_BYTES, START_BYTES, check_compressed_start, check_start, compression_of

MAX_EXPANSION = 100  # maximum ratio of decompressed to compressed size, if the decompressed size exceeds FREE_BYTES
FREE_BYTES = 2**28
DECOMPRESSION_ERRORS = (EOFError, RuntimeError, lzma.LZMAError, zipfile.BadZipFile, zlib.error)
"""Errors for damaged or encrypted archives, in addition to `OSError` and `ValueError`."""
TRAILING_BYTES = "other bytes follow its compressed content; compress it again, or download it again"
COMPRESSED_READ_BYTES = 2**16
GZIP_WINDOW_BITS = 31  # the largest window, with the header and the checksum of gzip
ZIP_END_MARK = b"PK\x05\x06"
ZIP_END_BYTES = 22  # length of the end record without its comment
MAX_ZIP_COMMENT_BYTES = 2**16 - 1


@contextmanager
def open_bytes(path: Path) -> Iterator[io.BufferedReader]:
    """Yield a byte stream of a file, decompressed if its suffix indicates compression.

    Raise `ValueError` if the first bytes do not match the name. Reading beyond the size limit also raises `ValueError`.
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
    """Return the maximum decompressed size of a compressed file, in bytes."""
    return max(FREE_BYTES, MAX_EXPANSION * path.stat().st_size)


def _decompress(file: io.BufferedReader, compression: str, opened: ExitStack) -> Any:
    """Return a reader of the decompressed content; the exit stack `opened` closes this reader.

    Raise `ValueError` for a zip archive that does not contain exactly one file.
    """
    if compression == ".gz":
        return _StreamReader(file, _GzipDecompressor, padding=b"\0")
    if compression == ".bz2":
        return _StreamReader(file, bz2.BZ2Decompressor, padding=b"")
    if compression == ".xz":
        return _StreamReader(file, lzma.LZMADecompressor, padding=b"\0")
    if compression == ".zst":
        return opened.enter_context(pa.input_stream(file, compression="zstd"))
    _check_zip_end(file)
    archive = opened.enter_context(zipfile.ZipFile(file))
    members = [member for member in archive.infolist() if not member.is_dir() and not _is_hidden(member.filename)]
    if len(members) != 1:
        raise ValueError(f"it is an archive of {len(members)} files; unpack it")
    return opened.enter_context(archive.open(members[0]))


def _check_zip_end(file: io.BufferedReader) -> None:
    """Raise `ValueError` if other bytes follow a zip archive, because `zipfile` ignores them.

    An archive ends with a record of `ZIP_END_BYTES` bytes, whose last field is the length of the comment that follows.
    """
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - ZIP_END_BYTES - MAX_ZIP_COMMENT_BYTES))
    tail = file.read()  # the end of the file, which contains the record
    start_of_record = tail.rfind(ZIP_END_MARK)
    end_of_record = start_of_record + ZIP_END_BYTES
    is_complete = start_of_record >= 0 and end_of_record <= len(tail)
    if is_complete:
        (comment_bytes,) = struct.unpack_from("<H", tail, end_of_record - 2)  # a number of two bytes
        if end_of_record + comment_bytes < len(tail):
            raise ValueError(TRAILING_BYTES)
    file.seek(0)


def _is_hidden(name: str) -> bool:
    """Return True if a file of an archive is hidden, or is in a hidden folder, such as `__MACOSX`."""
    return any(part.startswith((".", "__")) for part in name.split("/"))


class _GzipDecompressor:
    """A decompressor of one gzip stream, with the interface of the decompressors in `bz2` and `lzma`."""

    def __init__(self) -> None:
        self._decompressor = zlib.decompressobj(GZIP_WINDOW_BITS)

    @property
    def eof(self) -> bool:
        """True at the end of the stream, after verification of its checksum."""
        return self._decompressor.eof

    @property
    def needs_input(self) -> bool:
        """True if all available bytes are decompressed."""
        return not self._decompressor.unconsumed_tail

    @property
    def unused_data(self) -> bytes:
        """The bytes after the end of the stream."""
        return self._decompressor.unused_data

    def decompress(self, compressed: bytes, size: int) -> bytes:
        """Return at most `size` decompressed bytes."""
        return self._decompressor.decompress(self._decompressor.unconsumed_tail + compressed, size)


class _StreamReader:
    """A reader of consecutive gzip, bz2 or xz streams, which may be separated by padding.

    Unlike Python's readers, it rejects bytes after the last stream, and byte order marks at the start of later streams.
    """

    def __init__(self, file: io.BufferedReader, new_decompressor: Callable[[], Any], padding: bytes) -> None:
        """Prepare to read `file`; `new_decompressor` creates the decompressor of each stream."""
        self._file = file
        self._new_decompressor = new_decompressor
        self._padding = padding  # allowed between streams
        self._decompressor = new_decompressor()
        self._stream_number = 1
        self._stream_bytes = 0  # number of bytes decompressed from the current stream

    def read(self, size: int) -> bytes:
        """Return at most `size` decompressed bytes, or none at the end. Raise `EOFError` for an incomplete stream."""
        while True:
            if self._decompressor.eof:
                compressed = self._read_next_stream()
                if not compressed:
                    return b""
                self._begin_next_stream()
            else:
                compressed = self._read_current_stream()
            part: bytes = self._decompress(compressed, size)
            if part:  # empty if the decompressor needs more input
                return part

    def _begin_next_stream(self) -> None:
        """Create the decompressor of the next stream."""
        self._decompressor = self._new_decompressor()
        self._stream_number += 1
        self._stream_bytes = 0

    def _read_current_stream(self) -> bytes:
        """Return more bytes of the current stream; empty if the decompressor still has input."""
        if not self._decompressor.needs_input:
            return b""
        compressed = self._file.read(COMPRESSED_READ_BYTES)
        if not compressed:
            raise EOFError("it ends within its compressed content; download it again")
        return compressed

    def _read_next_stream(self) -> bytes:
        """Return the first bytes after a stream and its padding."""
        compressed: bytes = self._decompressor.unused_data.lstrip(self._padding)
        while not compressed:
            block = self._file.read(COMPRESSED_READ_BYTES)
            if not block:
                break
            compressed = block.lstrip(self._padding)
        return compressed

    def _decompress(self, compressed: bytes, size: int) -> bytes:
        """Return decompressed bytes; raise `ValueError` if a later stream is invalid or has a byte order mark."""
        is_later_stream = self._stream_number > 1
        try:
            part: bytes = self._decompressor.decompress(compressed, size)
        except (OSError, lzma.LZMAError, zlib.error) as error:
            if not is_later_stream:
                raise
            raise ValueError(TRAILING_BYTES) from error
        is_start = self._stream_bytes == 0
        if is_later_stream and is_start and part.startswith(codecs.BOM_UTF8):
            raise ValueError("its compressed parts begin with byte order marks; join the plain files without marks")
        self._stream_bytes += len(part)
        return part


class _LimitedReader(io.RawIOBase):
    """A wrapper of another reader that raises `ValueError` after more than `limit` bytes."""

    def __init__(self, content: Any, limit: int) -> None:
        super().__init__()
        self._content = content
        self._limit = limit
        self._size = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`, and return the number of bytes."""
        part = self._content.read(len(buffer))
        self._size += len(part)
        if self._size > self._limit:
            allowed = f"{self._limit / 1e9:.3g} GB for a file of its size"
            raise ValueError(f"its decompressed size exceeds the limit of {allowed}; use a part of it")
        buffer[: len(part)] = part
        return len(part)

"""Formats and suffixes of data files, and checks before reading. This module imports no table library."""

import codecs
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from attnmix.core.errors import InputError

SEPARATORS = {".csv": ",", ".tsv": "\t"}
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
SUFFIXES = (*SEPARATORS, *JSON_SUFFIXES, ".parquet", ".arrow")
"""Suffixes of data files; one of `COMPRESSIONS` may follow."""
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zip", ".zst")
MAX_SOURCE_BYTES = 2**34  # maximum total size of the files of a dataset
START_BYTES = 1024
NON_TABLE_STARTS = {
    b"version https://git-lfs": "is a pointer of Git LFS and not the file itself; run `git lfs pull`",
    b"# xet version": "is a pointer of git-xet and not the file itself; run `git xet pull`",
    b"/annex/objects/": "is a pointer of git-annex and not the file itself; run `git annex get`",
    b"outs:\n- md5:": "is a pointer of DVC and not the file itself; run `dvc pull`",
    b"<!doctype html": "is a web page; download the file itself",
    b"<html": "is a web page; download the file itself",
}
"""Error messages for files that are not tables, by the first bytes of the file in lower case."""
UNREADABLE_STARTS = {
    b"pk\x03\x04": "is a zip archive or an Excel workbook; unpack it, or save it as csv",
    b"\xff\xfe": "is encoded in UTF-16; save it as UTF-8",
    b"\xfe\xff": "is encoded in UTF-16; save it as UTF-8",
}
"""Further error messages by first bytes; they apply to plain and decompressed content, but not to compressed files."""
COMPRESSED_STARTS = {
    b"\x1f\x8b": ".gz",
    b"\xfd7zXZ\x00": ".xz",
    b"\x28\xb5\x2f\xfd": ".zst",
    **{b"BZh%d1AY&SY" % level: ".bz2" for level in range(1, 10)},
}
"""The suffixes of compression formats, by the first bytes of compressed content."""
PARQUET_START = b"PAR1"


def compression_of(name: str) -> str:
    """Return the compression suffix of a file name, in lower case; empty for a plain file."""
    suffix = PurePosixPath(name).suffix.lower()
    return suffix if suffix in COMPRESSIONS else ""


def data_suffix(name: str) -> str:
    """Return the suffix in `SUFFIXES` of a data file, in lower case; empty for other names.

    >>> [data_suffix(name) for name in ("train.csv", "train.JSONL.gz", "train.csv.bak", ".csv")]
    ['.csv', '.jsonl', '', '']
    """
    plain = name[: len(name) - len(compression_of(name))]
    suffix = PurePosixPath(plain).suffix.lower()
    return suffix if suffix in SUFFIXES else ""


def split_suffixes(name: str) -> tuple[str, str]:
    """Return the name of a data file without its suffixes, and the suffixes."""
    length = len(name) - len(data_suffix(name)) - len(compression_of(name))
    return name[:length], name[length:]


def allowed_names() -> str:
    """Return a description of valid names of data files, for a message."""
    return f"names that end in {', '.join(SUFFIXES)}, or in one of these followed by {', '.join(COMPRESSIONS)}"


def check_start(start: bytes, name: str) -> None:
    """Raise `ValueError` if the first bytes of a plain or decompressed file contradict its name."""
    start = start.removeprefix(codecs.BOM_UTF8)
    for foreign, problem in (NON_TABLE_STARTS | UNREADABLE_STARTS).items():
        if start.lower().startswith(foreign):
            raise ValueError(f"it {problem}")
    for compressed, suffix in COMPRESSED_STARTS.items():
        if start.startswith(compressed):
            if compression_of(name):
                raise ValueError(f"its content is compressed twice ({suffix}); unpack it")
            raise ValueError(f"it is compressed ({suffix}); unpack it, or add {suffix} to its name")
    if data_suffix(name) not in (*SEPARATORS, *JSON_SUFFIXES):  # the following checks apply only to text files
        return
    if start.startswith(PARQUET_START):
        raise ValueError("it is a parquet file; rename it to end in .parquet")
    if start.count(0) > len(start) / 4:  # ASCII characters in UTF-16 contain a zero byte
        raise ValueError("it is encoded in UTF-16 or is not a text file; save it as UTF-8")


def check_compressed_start(start: bytes) -> None:
    """Raise `ValueError` if the first bytes of a compressed file indicate a pointer file or a web page."""
    for foreign, problem in NON_TABLE_STARTS.items():
        if start.lower().startswith(foreign):
            raise ValueError(f"it {problem}")


def check_sizes(files: Sequence[Path]) -> None:
    """Raise `InputError` if the total size of `files` exceeds `MAX_SOURCE_BYTES`, or if a file is missing."""
    sizes = {file: _read_size(file) for file in files}
    if sum(sizes.values()) > MAX_SOURCE_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        total = f"the data files have {sum(sizes.values()) / 1e9:.3g} GB"
        problem = f"{total}, of which {largest} has {sizes[largest] / 1e9:.3g} GB"
        allowed = f"{MAX_SOURCE_BYTES / 1e9:.3g} GB are allowed; remove files, or select a smaller file"
        raise InputError(f"dataset.name: {problem}; {allowed}")


def _read_size(file: Path) -> int:
    """Return the size of a file in bytes; raise `InputError` if it is missing or unreadable."""
    try:
        return file.stat().st_size
    except OSError as error:
        problem = f"{file} cannot be read ({error.strerror or type(error).__name__})"
        raise InputError(f"dataset.name: {problem}; make sure that it exists and is readable") from error

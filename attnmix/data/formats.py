"""The formats of files that are read here, and checks of a file before it is read; loads no library of tables."""

from collections.abc import Sequence
from pathlib import Path

from attnmix.core.errors import InputError

SEPARATORS = {".csv": ",", ".tsv": "\t"}
SUFFIXES = (*SEPARATORS, ".jsonl", ".parquet")
MAX_SOURCE_BYTES = 2**34  # of all files of a data set
START_BYTES = 1024
FOREIGN_STARTS = {
    b"version https://git-lfs": "is a pointer of Git LFS and not the file itself; run `git lfs pull`",
    b"<!doctype html": "is a web page; download the file itself",
    b"<html": "is a web page; download the file itself",
    b"pk\x03\x04": "is a zip archive or an Excel workbook; unpack it, or save it as csv",
    b"\x1f\x8b": "is compressed by gzip; unpack it",
    b"\xff\xfe": "is encoded in UTF-16; save it as UTF-8",
    b"\xfe\xff": "is encoded in UTF-16; save it as UTF-8",
}
"""By its first bytes, in lower case: the kind of a file that is no table, and what to do with it."""
PARQUET_START = b"PAR1"


def check_start(path: Path) -> None:
    """Raise `ValueError` for a file that is something else than its name says, by its first bytes."""
    with path.open("rb") as file:
        start = file.read(START_BYTES)
    for foreign, problem in FOREIGN_STARTS.items():
        if start.lower().startswith(foreign):
            raise ValueError(f"it {problem}")
    suffix = path.suffix.lower()
    if suffix not in (*SEPARATORS, ".jsonl"):
        return
    if start.startswith(PARQUET_START):
        raise ValueError("it is a parquet file; name it .parquet")
    if start.count(0) > len(start) / 4:
        raise ValueError("it is encoded in UTF-16 or is no text; save it as UTF-8")


def check_sizes(files: Sequence[Path]) -> None:
    """Raise `InputError` for files that are too large to be a data set of reviews, before they are read."""
    sizes = {file: file.stat().st_size for file in files}
    if sum(sizes.values()) > MAX_SOURCE_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        total = f"{len(sizes)} files of {sum(sizes.values()) / 1e9:.3g} GB would be read"
        problem = f"{total}, the largest {largest} of {sizes[largest] / 1e9:.3g} GB"
        allowed = f"{MAX_SOURCE_BYTES / 1e9:.3g} GB are allowed; move away what is no data, or name one smaller file"
        raise InputError(f"dataset.name: {problem}; {allowed}")

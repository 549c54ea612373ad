"""Compare the speed of several programs that write new shard files: GB per second of processor and wall time.

    pip install --target FOLDER --no-deps tensorstore ml_dtypes    # optional
    PYTHONPATH=FOLDER python -m benchmarks.writer                  # replaces the section in benchmarks/RESULTS.md

Each writer writes float16 arrays `[5440, 768]` in chunks of 64 rows, with one shard file per array, in one thread. The
files are deleted after each round. `os.sync` before each round excludes earlier writes from the times.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from attnmix.core.store import shards
from attnmix.core.store.files import create_array
from benchmarks.stages import TITLE, processor, replace_section

ROWS, WIDTH, CHUNK_ROWS = 5440, 768, 64
FILES, ROUNDS = 24, 5
Array = npt.NDArray[Any]


class Rates(NamedTuple):
    """The speed of a writer in GB per processor second and in GB per second of wall time."""

    processor: float
    wall: float


def main() -> None:
    """Measure all writers, and replace the section in benchmarks/RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="folder on the file system to measure")
    folder = parser.parse_args().folder
    vectors = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float16)
    rates: dict[str, list[Rates]] = {}
    for _ in range(ROUNDS):
        for name, rate in measured_ways(vectors, folder):
            rates.setdefault(name, []).append(rate)
    files = f"{FILES} new files of {vectors.nbytes / 1e6:.1f} MB"
    head = f"`python -m benchmarks.writer`: {files} in one thread, medians of {ROUNDS} rounds."
    machine = f"{processor()}, {os.cpu_count()} cores; final load average: {os.getloadavg()[0]:.1f}."
    replace_section(f"{TITLE}Writers of shards\n\n{head}\n{machine}\n\n{table(rates)}\n")


def measured_ways(vectors: Array, folder: Path) -> Generator[tuple[str, Rates]]:
    """Write `FILES` files to a temporary folder in `folder` with each writer, and yield the writer's name and speed."""
    for name, write in ways(vectors).items():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            os.sync()
            processor_start = time.process_time()
            start = time.perf_counter()
            for number in range(FILES):
                write(Path(temporary, str(number)))
            processor_seconds = time.process_time() - processor_start
            seconds = time.perf_counter() - start
        gigabytes = FILES * vectors.nbytes / 1e9
        yield name, Rates(gigabytes / processor_seconds, gigabytes / seconds)


def measure_disk_rate(folder: Path, vectors: Array) -> float:
    """Return the rate in GB per second at which `ShardWriter` writes new files in one thread."""
    measured = measured_ways(vectors, folder)
    _, rates = next(measured)  # the first writer is `ShardWriter`
    measured.close()
    return rates.wall


def ways(vectors: Array) -> dict[str, Callable[[Path], None]]:
    """Return the writers by name: functions that write `vectors` to a new path."""
    content = shards.allocate_pages(vectors.nbytes)
    content[: vectors.nbytes] = vectors.reshape(-1).view(np.uint8)
    direct = shards.ShardWriter()
    buffered = shards.ShardWriter()
    buffered.direct_flag = 0
    chunks = ROWS // CHUNK_ROWS
    functions: dict[str, Callable[[Path], None]] = {
        "`ShardWriter`, direct": lambda path: direct.write(path / "c/0/0", vectors, CHUNK_ROWS, chunks),
        "`ShardWriter`, buffered": lambda path: buffered.write(path / "c/0/0", vectors, CHUNK_ROWS, chunks),
        "zarr": lambda path: write_with_zarr(path, vectors),
        "one direct write, without checksums": lambda path: shards.write_file(
            path, content, vectors.nbytes, shards.DIRECT_FLAG
        ),
        "one buffered write, without checksums": lambda path: shards.write_file(path, content, vectors.nbytes),
    }
    if importlib.util.find_spec("tensorstore"):
        functions["tensorstore"] = lambda path: write_with_tensorstore(path, vectors)
    return functions


def write_with_zarr(path: Path, vectors: Array) -> None:
    """Write `vectors` with zarr as a new array with one shard, the format of the stage `capture`."""
    options = {"shape": vectors.shape, "dtype": vectors.dtype, "chunks": (CHUNK_ROWS, WIDTH), "shards": vectors.shape}
    create_array(path, **options)[:] = vectors


def write_with_tensorstore(path: Path, vectors: Array) -> None:
    """Write `vectors` with tensorstore as a new Zarr array with one shard."""
    tensorstore: Any = importlib.import_module("tensorstore")
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    sharding = {"chunk_shape": [CHUNK_ROWS, WIDTH], "codecs": codecs}
    metadata = {
        "shape": list(vectors.shape),
        "data_type": str(vectors.dtype),
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(vectors.shape)}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    files = {"driver": "file", "path": str(path)}
    store = tensorstore.open({"driver": "zarr3", "kvstore": files, "metadata": metadata}, create=True).result()
    store.write(vectors).result()


def table(rates: dict[str, list[Rates]]) -> str:
    """Return a Markdown table with the median speed of each writer over all rounds."""
    lines = ["| writer | GB per processor second | GB per second |", "| --- | ---: | ---: |"]
    for name, by_round in rates.items():
        processor_rate = statistics.median(rate.processor for rate in by_round)
        wall_rate = statistics.median(rate.wall for rate in by_round)
        lines.append(f"| {name} | {processor_rate:.2f} | {wall_rate:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Compare the speed of writers of new shard files, in GB per processor second and per second.

    pip install --target FOLDER --no-deps tensorstore ml_dtypes    # optional
    PYTHONPATH=FOLDER python -m benchmarks.writer                  # replaces the section in benchmarks/RESULTS.md

Each way writes float16 arrays `[5440, 768]` in chunks of 64 rows, with one shard file per array, in one thread. The
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
from typing import Any

import numpy as np
import numpy.typing as npt

from attnmix.core.store import shards
from attnmix.core.store.files import create_array
from benchmarks.stages import TITLE, processor, replace_section

ROWS, WIDTH, CHUNK_ROWS = 5440, 768, 64
FILES, ROUNDS = 24, 5
Array = npt.NDArray[Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(), help="folder on the file system to measure")
    folder = parser.parse_args().folder
    vectors = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float16)
    rates: dict[str, list[tuple[float, float]]] = {}
    for _ in range(ROUNDS):
        for name, rate in measured_ways(vectors, folder):
            rates.setdefault(name, []).append(rate)
    files = f"{FILES} new files of {vectors.nbytes / 1e6:.1f} MB"
    head = f"`python -m benchmarks.writer`: {files} in one thread, medians of {ROUNDS} rounds."
    machine = f"{processor()}, {os.cpu_count()} cores; final load average: {os.getloadavg()[0]:.1f}."
    replace_section(f"{TITLE}Writers of shards\n\n{head}\n{machine}\n\n{table(rates)}\n")


def measured_ways(vectors: Array, folder: Path) -> Generator[tuple[str, tuple[float, float]]]:
    """Yield each way with its GB per processor second and per second."""
    for name, write in ways(vectors).items():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            os.sync()
            processor_start, start = time.process_time(), time.perf_counter()
            for number in range(FILES):
                write(Path(temporary, str(number)))
            processor_seconds, seconds = time.process_time() - processor_start, time.perf_counter() - start
        gigabytes = FILES * vectors.nbytes / 1e9
        yield name, (gigabytes / processor_seconds, gigabytes / seconds)


def measure_disk_rate(folder: Path, vectors: Array) -> float:
    """Return the GB per second of `ShardWriter` into new files, in one thread."""
    by_way = measured_ways(vectors, folder)
    _, (_, by_clock) = next(by_way)
    by_way.close()
    return by_clock


def ways(vectors: Array) -> dict[str, Callable[[Path], None]]:
    """Return functions that write `vectors` to a new folder."""
    content = shards.allocate_pages(vectors.nbytes)
    content[: vectors.nbytes] = vectors.reshape(-1).view(np.uint8)
    direct, buffered = shards.ShardWriter(), shards.ShardWriter()
    buffered.direct_flag = 0
    functions: dict[str, Callable[[Path], None]] = {
        "`ShardWriter`, direct": lambda path: direct.write(path / "c/0/0", vectors, CHUNK_ROWS, ROWS // CHUNK_ROWS),
        "`ShardWriter`, buffered": lambda path: buffered.write(path / "c/0/0", vectors, CHUNK_ROWS, ROWS // CHUNK_ROWS),
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
    """Create an array as in `capture`, and write it with zarr."""
    options = {"shape": vectors.shape, "dtype": vectors.dtype, "chunks": (CHUNK_ROWS, WIDTH), "shards": vectors.shape}
    create_array(path, **options)[:] = vectors


def write_with_tensorstore(path: Path, vectors: Array) -> None:
    """Create the same array with tensorstore, and write it."""
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


def table(rates: dict[str, list[tuple[float, float]]]) -> str:
    """Return a Markdown table of medians."""
    lines = ["| writer | GB per processor second | GB per second |", "| --- | ---: | ---: |"]
    for name, by_round in rates.items():
        by_processor, by_clock = (statistics.median(column) for column in zip(*by_round, strict=True))
        lines.append(f"| {name} | {by_processor:.2f} | {by_clock:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

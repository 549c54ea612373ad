"""Compare the outputs of two runs, and print the first difference in each output.

    python -m tools.compare_runs ../before .

Both folders must contain a finished run. In files of known formats, a difference is located by key, row or index; in
other files, by byte offset. The exit status is 1 if any output differs.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
import zarr

LOCK = "dvc.lock"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the differences between two runs; return 0 if their outputs are identical, else 1."""
    parser = argparse.ArgumentParser(
        "python -m tools.compare_runs", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", type=Path, help="folder of a finished run")
    parser.add_argument("after", type=Path, help="folder of a second finished run")
    options = parser.parse_args(arguments)
    compared = outputs(options.before, options.after)
    lines = differences(options.before, options.after, compared)
    print("\n".join(lines or [f"{len(compared)} outputs are identical"]))
    return bool(lines)


def outputs(first: Path, second: Path) -> list[str]:
    """Return the paths of all outputs that are listed in the `dvc.lock` of at least one of the two folders."""
    paths: dict[str, None] = {}  # an ordered set
    for folder in (first, second):
        for stage in read_values(folder / LOCK)["stages"].values():
            for output in stage.get("outs", []):
                paths[output["path"]] = None
    return list(paths)


def differences(first: Path, second: Path, compared: Iterable[str]) -> list[str]:
    """Return a line for each of the outputs `compared` that differs between the folders `first` and `second`."""
    lines = [output_difference(first, second, output) for output in compared]
    return [line for line in lines if line]


def output_difference(first: Path, second: Path, output: str) -> str | None:
    """Return the name of the first file that differs in an output, and a description of the difference.

    `output` is the path of a file or folder within the folders `first` and `second`. Return None if the output is the
    same in both folders.
    """
    files = set()
    for folder in (first, second):
        for path in [folder / output, *(folder / output).rglob("*")]:
            if path.is_file():
                files.add(path.relative_to(folder))
    for file in sorted(files):
        if not (first / file).is_file():
            return f"{file}: only in {second}"
        if not (second / file).is_file():
            return f"{file}: only in {first}"
        if not filecmp.cmp(first / file, second / file, shallow=False):
            return f"{file}: {file_difference(first, second, file)}"
    return None


def file_difference(first: Path, second: Path, file: Path) -> str:
    """Describe the first difference between the versions of a file in two folders.

    The difference is located by key, row or index in known formats, otherwise by byte offset.
    """
    one = first / file
    other = second / file
    zarr_folders = [parent for parent in file.parents if parent.suffix == ".zarr"]
    difference = None
    with suppress(OSError, ValueError, yaml.YAMLError):  # a damaged file can only be compared by its bytes
        if zarr_folders:
            difference = array_difference(first / zarr_folders[0], second / zarr_folders[0])
        elif file.suffix in (".csv", ".parquet"):
            difference = table_difference(read_table(one), read_table(other))
        elif file.suffix in (".json", ".lock"):
            difference = value_difference(flatten(read_values(one)), flatten(read_values(other)))
    return difference or byte_difference(np.fromfile(one, np.uint8), np.fromfile(other, np.uint8))


def array_difference(*stores: Path) -> str | None:
    """Describe the first difference between two Zarr arrays; return None if they are equal."""
    one, other = (np.asarray(zarr.open_array(store, mode="r")[...]) for store in stores)
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
    bits = f"u{one.itemsize}"  # in a comparison of bits, NaN equals itself, and 0.0 differs from -0.0
    indices = np.argwhere(one.view(bits) != other.view(bits))
    if not len(indices):
        return None
    index = tuple(indices[0].tolist())
    return f"{len(indices)} of {one.size} numbers differ, first {list(index)}: {one[index]} and {other[index]}"


def read_table(path: Path) -> pd.DataFrame:
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    return pd.read_csv(path, dtype=str, keep_default_na=False)  # compared as text, because 0.1 and 0.10 differ


def table_difference(one: pd.DataFrame, other: pd.DataFrame) -> str | None:
    """Describe the first difference between two tables; return None if they are equal."""
    if one.shape != other.shape or list(one) != list(other):
        return f"{len(one)} rows of {list(one)} and {len(other)} rows of {list(other)}"
    cells = np.argwhere((one != other) & ~(one.isna() & other.isna()))
    if not len(cells):
        return None
    row, column = cells[0]
    return f"row {row}, column {one.columns[column]}: {one.iat[row, column]!s} and {other.iat[row, column]!s}"


def read_values(path: Path) -> Any:
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)


def flatten(value: Any, key: str = "") -> dict[str, Any]:
    """Return the leaves of nested dictionaries and lists; the key of a leaf is the path to it, joined by commas.

    In this path, the items of a list are identified by their index, or by their own entry "path" if there is one. `key`
    is the path to `value`.
    """
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list):
        children = []
        for index, item in enumerate(value):
            name = item.get("path", index) if isinstance(item, dict) else index
            children.append((name, item))
    else:
        return {key: value}
    prefix = f"{key}, " if key else ""
    leaves = {}
    for name, child in children:
        leaves.update(flatten(child, f"{prefix}{name}"))
    return leaves


def value_difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Return the first key whose values differ, with both values, as text; None if all values are equal."""
    for key in one | other:
        first = repr(one[key]) if key in one else "nothing"
        second = repr(other[key]) if key in other else "nothing"
        if first != second:
            return f"{key}: {first} and {second}"
    return None


def byte_difference(one: np.ndarray, other: np.ndarray) -> str:
    """Describe the first difference between two byte arrays; one of them may be the start of the other."""
    shared_bytes = min(one.size, other.size)
    offsets = np.flatnonzero(one[:shared_bytes] != other[:shared_bytes])
    first_offset = offsets[0] if len(offsets) else shared_bytes
    return f"byte {first_offset} of {one.size} and {other.size}"


if __name__ == "__main__":
    sys.exit(main())

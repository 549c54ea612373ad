"""Compare the outputs of two runs, and print the first difference of each output.

    python -m tools.compare_runs ../before .

Both folders must contain a finished run. In known formats, a difference is located by key, row or index, otherwise by
byte offset. The exit status is 1 if any output differs.
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
    """Return 0 if the outputs of two runs are identical, else 1."""
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
    """Return the paths of all outputs that the `dvc.lock` of either folder lists."""
    paths: dict[str, None] = {}
    for folder in (first, second):
        for stage in read_values(folder / LOCK)["stages"].values():
            paths.update(dict.fromkeys(out["path"] for out in stage.get("outs", [])))
    return list(paths)


def differences(first: Path, second: Path, compared: Iterable[str]) -> list[str]:
    """Return a line for each of the `compared` files and folders that differs between two folders."""
    lines = [output_difference(first, second, output) for output in compared]
    return [line for line in lines if line]


def output_difference(first: Path, second: Path, output: str) -> str | None:
    """Return text with the first file of an output that differs, and the location of the difference."""
    files = {
        path.relative_to(clone)
        for clone in (first, second)
        for path in [clone / output, *(clone / output).rglob("*")]
        if path.is_file()
    }
    for file in sorted(files):
        one, other = first / file, second / file
        if not (one.is_file() and other.is_file()):
            return f"{file}: only in {first if one.is_file() else second}"
        if not filecmp.cmp(one, other, shallow=False):
            return f"{file}: {file_difference(first, second, file)}"
    return None


def file_difference(first: Path, second: Path, file: Path) -> str:
    """Return text that locates the first difference of a file, in terms of its format or as a byte offset."""
    one, other = first / file, second / file
    store = next((parent for parent in file.parents if parent.suffix == ".zarr"), None)
    difference = None
    with suppress(OSError, ValueError, yaml.YAMLError):  # a damaged file can only be compared by its bytes
        if store:
            difference = array_difference(first / store, second / store)
        elif file.suffix in (".csv", ".parquet"):
            difference = table_difference(read_table(one), read_table(other))
        elif file.suffix in (".json", ".lock"):
            difference = value_difference(flatten(read_values(one)), flatten(read_values(other)))
    return difference or byte_difference(np.fromfile(one, np.uint8), np.fromfile(other, np.uint8))


def array_difference(*stores: Path) -> str | None:
    """Return the first difference of two Zarr arrays as text; None if they are equal."""
    one, other = (np.asarray(zarr.open_array(store, mode="r")[...]) for store in stores)
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
    bits = f"u{one.itemsize}"  # compared by bits, NaN equals itself, and 0.0 differs from -0.0
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
    """Return the first difference of two tables as text; None if they are equal."""
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
    """Return the leaves of nested dictionaries and lists by key. List items with a `path` have it as key."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = [(each.get("path", i) if isinstance(each, dict) else i, each) for i, each in enumerate(value)]
    else:
        return {key: value}
    prefix = f"{key}, " if key else ""
    return {leaf: inner for name, each in items for leaf, inner in flatten(each, f"{prefix}{name}").items()}


def value_difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """Return the first different key and its values as text; None if all are equal."""
    for key in one | other:
        values = [repr(leaves[key]) if key in leaves else "nothing" for leaves in (one, other)]
        if values[0] != values[1]:
            return f"{key}: {' and '.join(values)}"
    return None


def byte_difference(one: np.ndarray, other: np.ndarray) -> str:
    shared = min(one.size, other.size)
    offsets = np.flatnonzero(one[:shared] != other[:shared])
    return f"byte {offsets[0] if len(offsets) else shared} of {one.size} and {other.size}"


if __name__ == "__main__":
    sys.exit(main())

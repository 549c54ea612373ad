"""Are the results of two checkouts the same? Stores, ratios, matrices, coordinates, weights and csv values.

    python -m benchmarks.same_results ../before .

Both folders hold a finished run. Prints what is equal byte by byte, and of what is not the largest difference;
exits with 1 where a file of the first is missing in the second, or a value differs. What only the second has does not
count, so that a release can add results without losing old ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

COMPARED = ("data/reviews", "models", "features", "reports/plots")


def main(before: Path, after: Path) -> int:
    files = [path for folder in COMPARED for path in sorted((before / folder).rglob("*")) if path.is_file()]
    wrong = equal = 0
    for path in files:
        name = path.relative_to(before)
        other = after / name
        if not other.is_file():
            print(f"missing: {name}")
            wrong += 1
        elif path.read_bytes() == other.read_bytes():
            equal += 1
        else:
            said = difference(path, other)
            print(f"{name}: {said or 'equal values'}")
            wrong += bool(said)
    print(f"{len(files)} files: {equal} equal byte by byte, {len(files) - equal - wrong} equal in values, {wrong} not")
    return int(wrong > 0)


def difference(path: Path, other: Path) -> str:
    """Return what differs between two tables; empty if every value of the first is in the second."""
    readers: dict[str, Any] = {".csv": pd.read_csv, ".parquet": pd.read_parquet}
    if path.suffix not in readers:
        return "other bytes"
    first, second = (readers[path.suffix](each) for each in (path, other))
    missing = [column for column in first if column not in second]
    if missing:
        return f"without the columns {', '.join(missing)}"
    if len(first) != len(second):
        return f"{len(first)} and {len(second)} rows"
    said = []
    for column in first:
        one, two = first[column], second[column]
        if pd.api.types.is_float_dtype(one):
            same = np.array_equal(one, two, equal_nan=True)
            apart = float(np.nanmax(np.abs(one.to_numpy(float) - two.to_numpy(float)), initial=0))
            if not same:
                said.append(f"{column} differs by up to {apart:.3g}")
        elif not one.equals(two):
            said.append(f"{column} differs")
    return ", ".join(said)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))

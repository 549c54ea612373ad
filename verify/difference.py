"""The first difference between two outputs, down to the key, the row or the number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
import zarr


def differences(first: Path, second: Path) -> list[str]:
    """One line for each output of the pipeline that differs between two clones, and for `dvc.lock`."""
    return [found for path in [*outputs(first), "dvc.lock"] if (found := _of_trees(first, second, path)) is not None]


def outputs(clone: Path, stage: str | None = None) -> list[str]:
    """Everything that `dvc.yaml` declares as an output, of all stages or of one."""
    stages = yaml.safe_load((clone / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    found = []
    for each in [stages[stage]] if stage else stages.values():
        for kind in ("outs", "metrics", "plots"):
            outs = each.get("do", each).get(kind, ())
            found += [out if isinstance(out, str) else next(iter(out)) for out in outs]
    return found


def _of_trees(first: Path, second: Path, path: str) -> str | None:
    names = {name for root in (first, second) for name in _files(root / path)}
    for name in sorted(names):
        one, other = (root / path / name for root in (first, second))
        for here, there in ((one, other), (other, one)):
            if not here.is_file() and there.is_file():
                return f"{_shown(path, name)}: only in {there.parents[len(Path(path, name).parts) - 1]}"
        if one.is_file() and one.read_bytes() != other.read_bytes():
            return f"{_shown(path, name)}: {_inside(one, other)}"
    return None


def _shown(path: str, name: str) -> str:
    return f"{path}/{name}" if name != "." else path


def _files(path: Path) -> list[str]:
    if not path.is_dir():
        return ["."]
    return [each.relative_to(path).as_posix() for each in path.rglob("*") if each.is_file()]


def _inside(one: Path, other: Path) -> str:
    """Where two files differ, in the words of their format; the first byte where that says nothing."""
    read = {".json": _parsed, ".lock": _parsed, ".yaml": _parsed, ".csv": _table, ".parquet": _table}.get(one.suffix)
    try:
        store = next((each for each in one.parents if each.suffix == ".zarr"), None)
        if store is not None:
            found = _of_arrays(store, next(each for each in other.parents if each.suffix == ".zarr"))
        else:
            found = next(_of_values(read(one), read(other), ""), None) if read else None
    except ValueError:  # what a damaged or unfinished file raises in each of the formats
        found = None
    return found or _of_bytes(one.read_bytes(), other.read_bytes())


def _parsed(path: Path) -> Any:
    return (json.loads if path.suffix == ".json" else yaml.safe_load)(path.read_text(encoding="utf-8"))


def _table(path: Path) -> dict[str, dict[str, Any]]:
    table = pd.read_csv(path, dtype=str, keep_default_na=False) if path.suffix == ".csv" else pd.read_parquet(path)
    rows = table.astype(object).to_dict("index")
    return {f"row {number}": {f"column {name}": value for name, value in row.items()} for number, row in rows.items()}


def _of_values(one: Any, other: Any, where: str) -> Iterator[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        for key in (*one, *(key for key in other if key not in one)):
            inner = f"{where}, {key}" if where else str(key)
            if key not in one or key not in other:
                yield f"{inner} stands in one only"
            else:
                yield from _of_values(one[key], other[key], inner)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            label = pair[0].get("path", number) if isinstance(pair[0], dict) else number
            yield from _of_values(*pair, f"{where}, {label}" if where else str(label))
    elif not _same(one, other):
        yield f"{where}: {one} and {other}"


def _same(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)


def _of_arrays(one: Path, other: Path) -> str | None:
    arrays = [np.asarray(zarr.open_array(str(store), mode="r")[...]) for store in (one, other)]
    if arrays[0].shape != arrays[1].shape or arrays[0].dtype != arrays[1].dtype:
        return " and ".join(f"{array.dtype} {list(array.shape)}" for array in arrays)
    places = np.argwhere(arrays[0] != arrays[1])
    if not len(places):
        return None
    place = tuple(places[0])
    share = f"{len(places)} of {arrays[0].size} numbers differ, first"
    return f"{share} {list(map(int, place))}: {arrays[0][place]!r} and {arrays[1][place]!r}"


def _of_bytes(one: bytes, other: bytes) -> str:
    shared = min(len(one), len(other))
    ends = (np.frombuffer(each[:shared], np.uint8) for each in (one, other))
    differ = np.flatnonzero(np.not_equal(*ends))
    place = int(differ[0]) if len(differ) else shared
    return f"byte {place} of {len(one)} and {len(other)}"

"""Stand-in for every stage in the tests of DVC's flows: an output is a digest of what dvc.yaml names as read."""

from __future__ import annotations

import csv
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import yaml

PIPELINE: dict[str, Any] = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))
COLUMNS = ("checkpoint", "split", "method", "step", "epoch", "layer", "loss", "accuracy", "mean")


def digest(stage: dict[str, Any]) -> str:
    values = yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8"))
    sha256 = hashlib.sha256()
    for key in stage.get("params", ()):
        value = values
        for part in key.split(".") if isinstance(key, str) else ():  # a dictionary names the whole file
            value = value[part]
        sha256.update(json.dumps(value).encode())
    for dep in map(Path, stage["deps"]):
        for path in sorted(dep.rglob("*")) if dep.is_dir() else [dep]:
            if path.is_file() and path.suffix != ".pyc":
                sha256.update(path.read_bytes())
    return sha256.hexdigest()


def outputs(stage: dict[str, Any]) -> list[Path]:
    """Return its declared files; in a folder those that dvc.yaml names elsewhere, and one more."""
    declared = [out for kind in ("outs", "metrics", "plots") for out in stage.get(kind, ())]
    outs = [Path(out if isinstance(out, str) else next(iter(out))) for out in declared]
    names = [dep for each in PIPELINE["stages"].values() for dep in each.get("deps", ())]
    for plot in PIPELINE["plots"]:
        names += [plot] if isinstance(plot, str) else [path for content in plot.values() for path in content["y"]]
    inside = [Path(name) for name in names if any(out in Path(name).parents for out in outs)]
    return [out if out.suffix else out / "digest.txt" for out in outs] + inside


def write(path: Path, text: str) -> None:
    """Write a file in the format of its suffix, as far as DVC reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number = int(text[:8], 16)
    if path.suffix == ".csv":
        with path.open("w", encoding="utf-8", newline="") as file:
            rows = [dict.fromkeys(COLUMNS, (number + row) % 1000) | {"layer": row, "step": row} for row in (1, 2)]
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(rows)
    else:
        path.write_text(json.dumps({"number": number}) if path.suffix == ".json" else text, encoding="utf-8")


def main(name: str) -> None:
    text = digest(PIPELINE["stages"][name])
    for path in outputs(PIPELINE["stages"][name]):
        write(path, text)


REAL: tuple[str, ...] = ()
"""Stages that run as they are."""

if __name__ == "__main__":
    if sys.argv[1] in REAL:
        from stages.common import cli

        cli.main(sys.argv[1:])
    else:
        main(sys.argv[1])

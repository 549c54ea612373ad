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


def value_of(key: str | dict[str, None], values: dict[str, Any]) -> Any:
    """Of a parameter or section by its name in dvc.yaml; of the whole file where it names that."""
    if isinstance(key, dict):
        return values
    for part in key.split("."):
        values = values[part]
    return values


def digest(stage: dict[str, Any]) -> str:
    values = yaml.safe_load(Path("params.yaml").read_text(encoding="utf-8"))
    found = hashlib.sha256(json.dumps([value_of(key, values) for key in stage.get("params", ())]).encode())
    for dep in map(Path, stage["deps"]):
        for path in sorted(dep.rglob("*")) if dep.is_dir() else [dep]:
            if path.is_file() and path.suffix != ".pyc":
                found.update(path.read_bytes())
    return found.hexdigest()


def outputs(stage: dict[str, Any]) -> list[Path]:
    """The files that it declares; of a folder those that dvc.yaml speaks of elsewhere, and one more."""
    declared = [out for kind in ("outs", "metrics", "plots") for out in stage.get(kind, ())]
    outs = [Path(out if isinstance(out, str) else next(iter(out))) for out in declared]
    named = [dep for each in PIPELINE["stages"].values() for dep in each.get("deps", ())]
    for plot in PIPELINE["plots"]:
        named += [plot] if isinstance(plot, str) else [path for content in plot.values() for path in content["y"]]
    inside = [Path(name) for name in named if any(out in Path(name).parents for out in outs)]
    return [out if out.suffix else out / "digest.txt" for out in outs] + inside


def write(path: Path, text: str) -> None:
    """Of the kind that the name says, as far as DVC reads it."""
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
    stage = PIPELINE["stages"][name]
    text = digest(stage)
    for path in outputs(stage):
        write(path, text)


if __name__ == "__main__":
    main(sys.argv[1])

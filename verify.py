"""Run the pipeline in clones with other surroundings and compare every byte of its outputs and of `dvc.lock`.

    python -m verify                                   # the default parameters, about three minutes for each clone
    python -m verify --profile profiles/tiny.txt       # on little input
    python -m verify --profile profiles/tiny.txt --cpus Haswell EPYC-Milan --until capture

The last commit is cloned. The clones differ in folder, home, date, locale, hash seed, umask and number of threads; with
`--cpus` they differ in folder, home and processor, which qemu-user emulates. If anything differs, the exit status is 1
and one line for each output names its first difference: the key, the row or the number where the format tells, else
the byte. With the default parameters the results must also be the committed ones.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
import zarr
from dvc.utils.hydra import apply_overrides

EMULATOR = "qemu-x86_64"
EMULATOR_WARNING = "TCG doesn't support requested feature"


class Surroundings(NamedTuple):
    """The environment of a clone, which must not show in a result."""

    name: str  # also of the clone's folder
    threads: int
    umask: int
    variables: dict[str, str]
    cpu: str | None = None  # qemu's name for it; None is this machine's


# The time zones are 25 hours apart, so the dates always differ. Paths may hold spaces and letters beyond ASCII.
SURROUNDINGS = (
    Surroundings("one thread", 1, 0o022, {"TZ": "<-11>11", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "0"}),
    Surroundings("two threads é", 2, 0o077, {"TZ": "<+14>-14", "LC_ALL": "tr_TR.UTF-8", "PYTHONHASHSEED": "4711"}),
    Surroundings("four threads", 4, 0o027, {"TZ": "<+14>-14", "LC_ALL": "tr_TR.UTF-8", "PYTHONHASHSEED": "99"}),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if the clones of the repository in the current folder gave the same bytes, else 1."""
    options = parse_options(arguments)
    surroundings = list(SURROUNDINGS)
    if options.cpus:
        if shutil.which(EMULATOR) is None:
            sys.exit(f"error: {EMULATOR} is not installed (Debian: apt install qemu-user)")
        surroundings = [SURROUNDINGS[0], *(SURROUNDINGS[0]._replace(name=cpu, cpu=cpu) for cpu in options.cpus)]
    if git(Path.cwd(), "status", "--short", "--untracked-files=no"):
        print("the last commit is cloned, without the changes that are not committed")

    with tempfile.TemporaryDirectory(prefix="verify-", ignore_cleanup_errors=True) as temporary:
        root = options.folder or Path(temporary)
        clones = [make_clone(root / each.name / "clone", options.profile) for each in surroundings]
        # An emulated processor keeps one core busy. Native runs use several, so they run one after the other.
        with ThreadPoolExecutor(os.cpu_count() if options.cpus else 1) as executor:
            list(executor.map(lambda each, clone: run_pipeline(each, clone, options.until), surroundings, clones))
        lines = [
            f"{surroundings[0].name} and {each.name}: {line}"
            for each, clone in zip(surroundings[1:], clones[1:], strict=True)
            for line in differences(clones[0], clone)
        ]
        if not (options.profile or options.until):
            lines += [f"not as committed: {line[3:]}" for line in git(clones[0], "status", "--short").splitlines()]
    print("\n".join(lines or [f"{len(clones)} clones, the same bytes in dvc.lock and every output"]))
    return bool(lines)


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="verify", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--profile", type=Path, help="file of key=value overrides of params.yaml")
    parser.add_argument("--cpus", nargs="+", default=[], help="processors to emulate, by qemu's names for them")
    parser.add_argument("--until", nargs="+", default=[], metavar="STAGE", help="the last stages to run; default: all")
    parser.add_argument("--folder", type=Path, help="keep the clones here; default: a temporary folder, removed")
    return parser.parse_args(arguments)


def make_clone(folder: Path, profile: Path | None) -> Path:
    """Clone the repository in the current folder into `folder`, with the overrides of `profile` in its params.yaml."""
    subprocess.run(["git", "clone", "--quiet", Path.cwd(), folder], check=True)
    if profile:
        lines = profile.read_text(encoding="utf-8").splitlines()
        apply_overrides(folder / "params.yaml", [line for line in lines if line and not line.startswith("#")])
    return folder.resolve()


def run_pipeline(surroundings: Surroundings, clone: Path, until: Sequence[str]) -> None:
    """Run the stages of a clone, or raise `SystemExit` with the end of the log."""
    home, log, threads = clone.parent / "home", clone.parent / "log", str(surroundings.threads)
    home.mkdir()
    emulated = [emulated_python(surroundings.cpu, clone.parent / "emulated")] if surroundings.cpu else []
    environment = {
        **os.environ,
        **surroundings.variables,
        "HOME": str(home),
        "OMP_NUM_THREADS": threads,
        "LOKY_MAX_CPU_COUNT": threads,
        "DVC_SITE_CACHE_DIR": str(home / "dvc"),
        "DVC_NO_ANALYTICS": "1",
        "PATH": os.pathsep.join(map(str, [*emulated, Path(sys.prefix, "bin"), os.environ["PATH"]])),
    }
    command = [sys.executable, "-m", "dvc", "repro", "--force", *until]
    start = time.monotonic()
    with log.open("w", encoding="utf-8") as file:
        run = subprocess.run(
            command, cwd=clone, env=environment, umask=surroundings.umask, stdout=file, stderr=file, check=False
        )
    if run.returncode:
        lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line and EMULATOR_WARNING not in line]
        sys.exit("\n".join([f"error: {surroundings.name}: `dvc repro` failed:", *lines[-15:]]))
    print(f"{surroundings.name}: {time.monotonic() - start:.0f} s", flush=True)


def emulated_python(cpu: str, folder: Path) -> Path:
    """Return a folder with a command `python` that runs this environment's Python on an emulated processor.

    The stages are emulated and so is every process that they start by `sys.executable`; DVC itself is not.
    """
    command = folder / "bin/python"
    command.parent.mkdir(parents=True)
    shutil.copy(Path(sys.prefix, "pyvenv.cfg"), folder)
    (folder / "lib").symlink_to(Path(sys.prefix, "lib"))
    python = Path(sys.executable).resolve()
    command.write_text(f'#!/bin/sh\nexec {EMULATOR} -cpu {cpu} -0 "$0" "{python}" "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    return command.parent


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


def differences(first: Path, second: Path) -> list[str]:
    """Return a line for each output that differs between two clones, and for `dvc.lock`, which lists the outputs."""
    stages = [stage for clone in (first, second) for stage in read_values(clone / "dvc.lock")["stages"].values()]
    outputs = dict.fromkeys(out["path"] for stage in stages for out in stage.get("outs", []))
    lines = [output_difference(first, second, output) for output in [*outputs, "dvc.lock"]]
    return [line for line in lines if line]


def output_difference(first: Path, second: Path, output: str) -> str | None:
    """Return the first file of an output that differs, and where in it."""
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
    """Return where a file differs between two clones, in the terms of its format or as the offset of a byte."""
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
    one, other = (np.asarray(zarr.open_array(store, mode="r")[...]) for store in stores)
    if one.shape != other.shape or one.dtype != other.dtype:
        return f"{one.dtype} {list(one.shape)} and {other.dtype} {list(other.shape)}"
    bits = f"u{one.itemsize}"  # NaN equals itself, and 0.0 is not -0.0
    indices = np.argwhere(one.view(bits) != other.view(bits))
    if not len(indices):
        return None
    index = tuple(indices[0].tolist())
    return f"{len(indices)} of {one.size} numbers differ, first {list(index)}: {one[index]} and {other[index]}"


def read_table(path: Path) -> pd.DataFrame:
    if path.suffix == ".parquet":
        return pd.read_parquet(path)
    return pd.read_csv(path, dtype=str, keep_default_na=False)  # as it is written: 0.1 is not 0.10


def table_difference(one: pd.DataFrame, other: pd.DataFrame) -> str | None:
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
    """Return the leaves of nested dictionaries and lists by their keys; `dvc.lock` names a file by its path."""
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = [(each.get("path", i) if isinstance(each, dict) else i, each) for i, each in enumerate(value)]
    else:
        return {key: value}
    prefix = f"{key}, " if key else ""
    return {leaf: inner for name, each in items for leaf, inner in flatten(each, f"{prefix}{name}").items()}


def value_difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
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

"""Check the tests by applying planted faults one at a time, and report the test that detects each fault.

    python -m tools.planted_faults
    python -m tools.planted_faults --only ratio_without_skip metric_ignored
    python -m tools.planted_faults --all-tests --marked "not long and not families"

`tools/planted_faults.yaml` lists the faults. The tests that should detect them must pass in a temporary copy of the
working tree. Each fault is then applied to the copy, where one of its tests must fail. Faults in the page's TypeScript
need Node and the packages of `npm ci`. The exit status is 1 if a fault is not detected, or if the text that it replaces
does not occur exactly once.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml
from tqdm import tqdm

from tools.accept import copy_changes
from tools.verify import clone_commit

TABLE = Path(__file__).with_suffix(".yaml")
SCRIPT = Path("attnmix/page/src")
BUNDLE = Path("attnmix/page/bundle.js")
LOST = "LOST"
"""The outcome of a fault that no test detects."""
TESTS_PASSED = 0
TESTS_FAILED = 1
PLACES = "import attnmix, stages; print(attnmix.__file__, stages.__file__)"
"""A program that prints the files from which the tested packages are imported."""
FAILURE = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Fault(NamedTuple):
    """A change to one file that at least one test must detect."""

    name: str
    fault: str
    """A description of the fault in one sentence."""
    file: Path
    before: str
    after: str
    tests: tuple[str, ...]
    """Files or node IDs of pytest, relative to the repository's root."""


class Result(NamedTuple):
    """The outcome of one fault: the first failing test or, in capitals, the reason why there is none."""

    fault: Fault
    outcome: str
    is_detected: bool


def main(arguments: Sequence[str] | None = None, table: Path = TABLE) -> int:
    """Apply the selected faults in the file `table`, and print the outcomes; return 0 if all are detected, else 1."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of faults; default: all")
    parser.add_argument("--marked", default="", metavar="EXPRESSION", help="run tests with these markers; default: all")
    parser.add_argument("--all-tests", action="store_true", help="run the whole suite instead of each fault's tests")
    options = parser.parse_args(arguments)
    faults = read_faults(table)
    names = options.only or [fault.name for fault in faults]
    unknown = set(names) - {fault.name for fault in faults}
    if unknown:
        parser.error(f"there is no fault {', '.join(sorted(unknown))} in {table}")
    selected = [fault for fault in faults if fault.name in names]
    if options.all_tests:
        selected = [fault._replace(tests=("tests",)) for fault in selected]
    results = run_faults(selected, options.marked)
    print_table(results)
    return 0 if all(result.is_detected for result in results) else 1


def read_faults(table: Path) -> list[Fault]:
    """Return the faults in a yaml file."""
    faults = []
    for entry in yaml.safe_load(table.read_text(encoding="utf-8")):
        entry["file"] = Path(entry["file"])
        entry["tests"] = tuple(entry["tests"])
        faults.append(Fault(**entry))
    return faults


def run_faults(faults: Sequence[Fault], marked: str) -> list[Result]:
    """Apply each fault to a temporary copy of the working tree in the current folder, and return the outcomes.

    Raise `SystemExit` if one of the tests fails without any fault.
    """
    tests: dict[str, None] = {}  # an ordered set
    for fault in faults:
        tests.update(dict.fromkeys(fault.tests))
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as temporary:
        copy = copy_tree(Path(temporary, "copy"))
        failure = first_failure(copy, list(tests), marked)
        if failure:
            sys.exit(f"error: {failure} fails although no fault is applied; correct it first")
        return [run_fault(fault, copy, marked) for fault in tqdm(faults, desc="faults", disable=None)]


def copy_tree(folder: Path) -> Path:
    """Copy the repository in the current folder to `folder`, including uncommitted changes; return the copy.

    Raise `SystemExit` if tests in the copy would import packages from elsewhere.
    """
    copy = clone_commit(folder)
    copy_changes(Path.cwd(), copy)
    modules = Path.cwd() / "node_modules"
    if modules.exists():
        (copy / "node_modules").symlink_to(modules)
    imported = run_python(copy, "-c", PLACES).stdout.split()
    if not all(Path(place).is_relative_to(copy) for place in imported):
        sys.exit(f"error: tests in {copy} would import {', '.join(imported)}")
    return copy


def run_fault(fault: Fault, copy: Path, marked: str) -> Result:
    """Apply one fault to a copy of the repository, run its tests, restore the file, and return the outcome.

    For a fault in TypeScript, the page's bundle is also built again, and restored after the tests. `marked` selects
    tests by their markers.
    """
    path = copy / fault.file
    text = path.read_text(encoding="utf-8")
    occurrences = text.count(fault.before)
    if occurrences != 1:
        return Result(fault, f"TEXT OCCURS {occurrences} TIMES", is_detected=False)
    is_script = fault.file.is_relative_to(SCRIPT)
    bundle = (copy / BUNDLE).read_bytes() if is_script else b""
    path.write_text(text.replace(fault.before, fault.after), encoding="utf-8")
    if is_script:
        subprocess.run(["npm", "run", "--silent", "build", "--", "--log-level=error"], cwd=copy, check=True)
    failure = first_failure(copy, fault.tests, marked)
    path.write_text(text, encoding="utf-8")
    if is_script:
        (copy / BUNDLE).write_bytes(bundle)
    return Result(fault, failure or LOST, is_detected=failure is not None)


def first_failure(copy: Path, tests: Sequence[str], marked: str) -> str | None:
    """Return the first failing test, or None if all pass; raise `SystemExit` if the tests cannot be run."""
    pytest = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--basetemp", str(copy.parent / "pytest"))
    run = run_python(copy, *pytest, "-m", marked, *tests)
    if run.returncode == TESTS_PASSED:
        return None
    failures: list[str] = FAILURE.findall(run.stdout)
    if run.returncode != TESTS_FAILED or not failures:
        sys.exit(f"error: pytest ended with status {run.returncode}\n{run.stdout}{run.stderr}")
    return failures[0]


def run_python(copy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the current Python interpreter in a copy of the repository, so that it imports the modules of the copy.

    Bytecode is not written, because Python would use stale bytecode if a fault does not change the length of a file and
    is applied within the same second.
    """
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)


def print_table(results: Sequence[Result]) -> None:
    """Print the name, the file and the outcome of each fault."""
    rows = [(result.fault.name, str(result.fault.file), result.outcome) for result in results]
    header = ("fault", "file", "detected by")
    widths = [max(len(row[column]) for row in (header, *rows)) for column in (0, 1)]
    for name, file, outcome in (header, *rows):
        print(f"{name:{widths[0]}}  {file:{widths[1]}}  {outcome}")
    detected = sum(result.is_detected for result in results)
    print(f"{detected} of {len(results)} faults are detected")


if __name__ == "__main__":
    sys.exit(main())

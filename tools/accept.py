"""Accept the existing results after a change to the code that does not affect the results (`make accept`).

    python -m tools.accept

The pipeline runs on small input (`profiles/tiny.txt`) in two temporary folders: once with the code of the last commit
and once with that of the working tree. If all outputs are identical, `dvc commit --force` records in `dvc.lock` that
the existing results belong to the current code, and no stage runs again. Otherwise, the first difference in each output
is printed, the exit status is 1, and `dvc.lock` does not change. Parameters and data must not have changed since the
last commit, because such changes require a run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.compare_runs import differences, outputs
from tools.verify import SINGLE_THREADED, apply_profile, clone_commit, git, run_pipeline

STALE = Path(__file__).parents[1] / ".ci/stale.py"
INPUTS = ("params.yaml", "data", "reports/sources.json")
"""Files and folders that determine the results, besides the code."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Accept the results if the outputs of the two runs are identical; return 0 if they were accepted, else 1."""
    parser = argparse.ArgumentParser(
        "python -m tools.accept", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--profile", type=Path, default=Path("profiles/tiny.txt"), help="file of key=value overrides")
    options = parser.parse_args(arguments)
    tree = Path.cwd()
    check_tree(tree)
    with tempfile.TemporaryDirectory(prefix="accept-", ignore_cleanup_errors=True) as temporary:
        before = clone_commit(Path(temporary, "commit/clone"))
        check_lock(before)
        after = clone_commit(Path(temporary, "tree/clone"))
        copy_changes(tree, after)
        clones = {"the last commit": before, "the working tree": after}
        for name, clone in clones.items():
            apply_profile(clone, options.profile)
            run_pipeline(SINGLE_THREADED._replace(name=name), clone, [])
        compared = outputs(before, after)
        lines = differences(before, after, compared)
    if lines:
        print("not accepted; run `dvc repro`:", *lines, sep="\n")
        return 1
    subprocess.run([sys.executable, "-m", "dvc", "commit", "--force", "--quiet"], check=True)
    print(f"accepted: {len(compared)} outputs are identical; commit dvc.lock together with the change")
    return 0


def check_tree(tree: Path) -> None:
    """Raise `SystemExit` if more than the code has changed, or if the outputs differ from `dvc.lock`."""
    changed_inputs = git(tree, "diff", "--name-only", "HEAD", "--", *INPUTS).splitlines()
    if changed_inputs:
        sys.exit(f"error: {changed_inputs[0]} has changed since the last commit, not only the code; run `dvc repro`")
    command = [sys.executable, "-m", "dvc", "status", "--json"]
    status = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    for entries in status.values():
        for entry in entries:
            # An entry is a dictionary of changed dependencies or outputs, or a string for other changes.
            changed_outputs = entry.get("changed outs", {}) if isinstance(entry, dict) else {}
            for path, state in changed_outputs.items():
                sys.exit(f"error: {path}: {state}; run `dvc checkout {path}` to restore the version in dvc.lock")


def check_lock(commit: Path) -> None:
    """Raise `SystemExit` if `dvc.lock` does not match the other files in `commit`, a clone of the last commit."""
    run = subprocess.run([sys.executable, STALE], cwd=commit, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"error: dvc.lock of the last commit is already stale\n{run.stdout}{run.stderr}".rstrip())


def copy_changes(tree: Path, clone: Path) -> None:
    """Copy the uncommitted changes of the working tree, including untracked files, to a clone of the last commit."""
    changed = git(tree, "diff", "--name-only", "--no-renames", "-z", "HEAD")
    new = git(tree, "ls-files", "--others", "--exclude-standard", "-z")
    for name in (changed + new).split("\0"):  # the option -z ends each name with a null character
        if not name:
            continue
        source = tree / name
        target = clone / name
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
        else:  # deleted in the working tree
            target.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())

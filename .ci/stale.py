"""Print, as Markdown, stages that differ from dvc.lock in code, parameters or results, and fail if there are any.

The check runs no stage and needs only files in git; the data tracked by DVC may be missing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

OWN_SOURCES = "sources@own"
"""The stage that hashes the user's files in every run. It is in dvc.lock only from the second run on."""
ADVICE = "Run `dvc repro` and commit what it changed, dvc.lock with it."


def main() -> None:
    status = subprocess.run(["dvc", "status", "--json"], stdout=subprocess.PIPE, text=True, check=True).stdout
    stale = {stage: list(dict.fromkeys(changes(entries))) for stage, entries in json.loads(status).items()}
    lines = [f"- `{stage}`: {', '.join(names)}" for stage, names in stale.items() if names and stage != OWN_SOURCES]
    if lines:
        print("## Stages that differ from dvc.lock", *lines, "", ADVICE, sep="\n")
        sys.exit(1)
    print("dvc.lock matches this commit's code, parameters and results.")


def changes(entries: list[Any]) -> Iterator[str]:
    """Yield the changes that `dvc status` lists for one stage, except for missing data."""
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        else:
            for paths in entry.values():
                for path, state in paths.items():
                    if isinstance(state, dict):
                        yield from (f"`{key}` in {path} {each}" for key, each in state.items())
                    elif not (state in ("deleted", "not in cache") and is_kept_by_dvc(path)):
                        yield f"{path} {state}"


def is_kept_by_dvc(path: str) -> bool:
    """Return whether git ignores a path, as a file or as a folder that may be missing."""
    command = ["git", "check-ignore", path, f"{path}/"]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0


if __name__ == "__main__":
    main()

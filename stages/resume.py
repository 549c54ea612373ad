"""A place for unfinished work that survives a killed stage.

DVC deletes a stage's outputs before it runs the stage again, so work in progress lies
outside them, in a folder named after the digest of everything that the result depends on:
work done for other inputs is never picked up.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

UNFINISHED = Path(".unfinished")


def unfinished_folder(stage: str, parameters: Any, inputs: Iterable[Path]) -> Path:
    """The folder of this stage's unfinished work for exactly these parameters and input files.

    Folders of the same stage for other inputs are removed. `parameters` is anything that
    JSON holds; `inputs` are files or folders, of which names and contents count.
    """
    digest = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode())
    for path in inputs:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                digest.update(file.relative_to(path.parent).as_posix().encode())
                with file.open("rb") as opened:
                    digest.update(hashlib.file_digest(opened, "sha256").digest())
    folder = UNFINISHED / stage / digest.hexdigest()[:16]
    if folder.parent.is_dir():
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def publish(unfinished: Path, output: Path) -> None:
    """Move finished work to where the stage's output belongs, in one step."""
    shutil.rmtree(output, ignore_errors=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished.rename(output)

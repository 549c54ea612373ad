"""Mend what DVC cannot read after a kill, as `make repro` does first.

    python -m verify.mend

DVC writes two of its own files in place, `.dvc/tmp/rwlock` and `dvc.lock`: a kill in those milliseconds leaves them cut
short. The first, which names the processes at work, is removed. The second becomes that of git's last commit again;
what was finished since then comes from DVC's cache or runs again. What DVC can read is left alone, and so is a
`dvc.lock` with the marks of a merge, which is for DVC to refuse. Both are read while no other DVC may write them.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from dvc.exceptions import DvcException
from dvc.lock import make_lock
from dvc.repo import Repo
from dvc.rwlock import RWLOCK_FILE, RWLOCK_LOCK, SCHEMA
from dvc.schema import COMPILED_LOCKFILE_SCHEMA
from dvc.scm import SCMError
from dvc.utils import relpath
from dvc.utils.serialize import ParseError
from dvc.utils.strictyaml import YAMLValidationError, load, merge_conflict_marker, validate

NO_GIT = "; run `git init && git add -A && git commit -m start`, or, without experiments, `dvc config core.no_scm true`"


def main() -> int:
    """Of the repository around the current folder; 1 where a `dvc.lock` cannot be read and cannot be restored."""
    try:
        repo = Repo()
        with repo.lock:
            _mend_rwlock(Path(repo.tmp_dir), repo.config["core"]["hardlink_lock"])
            _mend_lock(Path(repo.root_dir, "dvc.lock"), Path(repo.tmp_dir, "dvc.lock"))
    except (DvcException, OSError) as error:
        print(f"error: {error}{NO_GIT if isinstance(error, SCMError) else ''}", file=sys.stderr)
        return 1
    return 0


def _mend_rwlock(folder: Path, hardlink_lock: bool) -> None:
    path = folder / RWLOCK_FILE
    with make_lock(str(folder / RWLOCK_LOCK), str(folder), hardlink_lock=hardlink_lock):
        try:
            validate(json.loads(path.read_bytes()), SCHEMA)
        except FileNotFoundError:
            return
        except (ValueError, YAMLValidationError):
            path.unlink()
            print(f"{relpath(path)} cannot be read, as after a kill while DVC wrote it: removed", file=sys.stderr)


def _mend_lock(path: Path, whole: Path) -> None:
    """`whole` is where the other is written, which takes the place of what stands at `path` at once."""
    cause = _unread(path)
    if not cause or merge_conflict_marker.search(path.read_text(encoding="utf-8", errors="replace")):
        return
    last = subprocess.run(["git", "show", "HEAD:./dvc.lock"], cwd=path.parent, capture_output=True, check=False)
    if last.returncode:
        why = last.stderr.decode().partition("\n")[0]
        raise DvcException(
            f"{cause}, and git has no other ({why}); without it DVC takes what its cache has and runs the rest"
        )
    whole.write_bytes(last.stdout)
    if _unread(whole):
        raise DvcException(f"{cause}, and that of git's last commit cannot be read either")
    whole.replace(path)
    said = "as after a kill while DVC wrote it: that of git's last commit is there again"
    print(f"{cause}, {said}; what was finished since then comes from DVC's cache or runs again", file=sys.stderr)


def _unread(path: Path) -> str:
    """Why DVC cannot go on with a `dvc.lock`, where it cannot."""
    try:
        lock, _ = load(str(path), COMPILED_LOCKFILE_SCHEMA)
    except FileNotFoundError:
        return ""  # before a first run
    except (ParseError, YAMLValidationError) as error:
        return str(error)
    files = [
        each for stage in lock.get("stages", {}).values() for kind in ("deps", "outs") for each in stage.get(kind, ())
    ]
    # A name that was cut passes the schema, and `dvc repro` stops at it without a cause.
    unknown = {each.get("hash", "md5") for each in files} - hashlib.algorithms_guaranteed
    return f"'{relpath(path)}' names a hash that there is not: {', '.join(sorted(unknown))}" if unknown else ""


if __name__ == "__main__":
    sys.exit(main())

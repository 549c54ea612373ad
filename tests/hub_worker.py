"""The stage download, many times in one process: its libraries take seconds to load.

Reads a line of JSON for each run (`folder`, `token`, `limit` in seconds), and answers with one: the error's text, or
null.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

from stage_process import LIMIT

from attnmix.arithmetic import settings
from attnmix.core.errors import InputError
from stages.common.parameters import read_parameters


class Worker:
    """The process, from the outside."""

    def __init__(self, environment: dict[str, str]) -> None:
        command = [sys.executable, __file__]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)

    def download(self, folder: Path, token: str | None, limit: float) -> str | None:
        """Run the stage in a folder with a params.yaml; return its error, `None` where it has succeeded."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps({"folder": str(folder), "token": token, "limit": limit}) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process has ended, or was ended after an hour"
        error: str | None = json.loads(answer)
        return error

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main() -> None:
    settings.choose(settings.PORTABLE)
    from attnmix.hub import retries
    from stages import download

    commands, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # Nobody answers a question, and what is printed is no answer.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in commands:
        case = json.loads(line)
        os.chdir(case["folder"])
        os.environ.pop("HF_TOKEN", None)
        if case["token"]:
            os.environ["HF_TOKEN"] = case["token"]
        retries.TIME_LIMIT_SECONDS = case["limit"]
        faulthandler.dump_traceback_later(LIMIT, exit=True)
        error = None
        try:
            download.main(read_parameters())
        except InputError as raised:
            error = str(raised)
        except Exception:  # the test is told of whatever was raised
            error = traceback.format_exc()
        print(json.dumps(error), file=answers, flush=True)


if __name__ == "__main__":
    main()

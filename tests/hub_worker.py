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
        command, pipe = [sys.executable, __file__], subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, text=True)

    def download(self, folder: Path, token: str | None, limit: float) -> str | None:
        """Run the stage in a folder with a params.yaml; return its error, `None` where it has succeeded."""
        assert self.process.stdin
        assert self.process.stdout
        print(json.dumps([str(folder), token, limit]), file=self.process.stdin, flush=True)
        error: str | None = json.loads(self.process.stdout.readline())  # fails where the process has ended
        return error


def main() -> None:
    settings.choose(settings.PORTABLE)
    from attnmix.hub import repository
    from stages import download

    commands, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    # Nobody answers a question, and what is printed is no answer.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    for line in commands:
        folder, token, repository.TIME_LIMIT_SECONDS = json.loads(line)
        os.chdir(folder)
        os.environ.pop("HF_TOKEN", None)
        if token:
            os.environ["HF_TOKEN"] = token
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

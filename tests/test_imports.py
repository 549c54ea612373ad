"""Imported objects are excluded from garbage collection, and first results are computed without unneeded imports."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from conftest import REPOSITORY

IMPORTS = """
import gc, json, sys, weakref
from attnmix.core.imports import frozen_imports

class Ring:
    def __init__(self):
        self.itself = self

garbage = weakref.ref(Ring())
{before}
during = []
try:
    with frozen_imports():
        during.append(gc.isenabled())
        with frozen_imports():
            during.append(gc.isenabled())
        {inside}
except ZeroDivisionError:
    pass
kept = weakref.ref(Ring())
if gc.isenabled():
    gc.collect()
print(json.dumps([gc.get_freeze_count() > 0, gc.isenabled(), during, garbage() is None, kept() is None]))
"""


def run_python(program: str, *arguments: str) -> Any:
    """Run code in a separate process and return its output, parsed as JSON."""
    command = [sys.executable, "-c", program, *arguments]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True, text=True)
    return json.loads(run.stdout)


@pytest.mark.parametrize("inside", ["pass", "1 / 0"])
@pytest.mark.parametrize(
    ("before", "frozen", "enabled", "during"),
    [
        ("pass", True, True, [False, False]),
        ("sys.modules['torch'] = sys", False, True, [True, True]),
        ("gc.disable()", False, False, [False, False]),
    ],
)
def test_imported_objects_are_frozen_and_collector_is_restored(
    before: str, frozen: bool, enabled: bool, during: list[bool], inside: str
) -> None:
    """The garbage collector runs before and after the imports, unless the user has disabled it."""
    result = run_python(IMPORTS.format(before=before, inside=inside))
    assert result == [frozen, enabled, during, enabled, enabled]


def test_help_imports_no_slow_packages() -> None:
    program = "import json, sys, attnmix.__main__ as main; main._create_parser(); print(json.dumps([*sys.modules]))"
    assert not {"torch", "transformers", "numpy", "pandas"} & set(run_python(program))

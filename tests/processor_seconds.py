"""Pytest plugin that lists the twenty tests and shared fixtures with the highest processor time.

    python -m pytest -m '' -p tests.processor_seconds tests/test_finetune.py

The processor time of this process and its child processes hardly depends on the load of the machine. The time of a
test includes its setup, except the fixtures of a module or a session, which have separate lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

LISTED = 20
SECONDS = Counter[str]()


def used_seconds() -> float:
    """Return the processor time of this process and its child processes, finished and running."""
    own = psutil.Process()
    total = 0.0
    for process in (own, *own.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


@contextmanager
def counted_as(name: str) -> Iterator[None]:
    """Add the processor time of the context to `name`, except the time counted by nested contexts."""
    start, elsewhere = used_seconds(), SECONDS.total()
    yield
    SECONDS[name] += used_seconds() - start - (SECONDS.total() - elsewhere)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    with counted_as(item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Any:
    if fixturedef.scope == "function":
        return (yield)
    with counted_as(f"fixture {fixturedef.argname}, {request.node.nodeid or 'of the session'}"):
        return (yield)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("processor seconds")
    for name, seconds in SECONDS.most_common(LISTED):
        terminalreporter.write_line(f"{seconds:7.1f}  {name}")

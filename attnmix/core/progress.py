"""Progress of long loops: a bar in a terminal, otherwise one line if the expected duration exceeds ten seconds."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

Task = TypeVar("Task")

BAR_DELAY_SECONDS = 2
LONG_SECONDS = 10  # a loop with a longer expected duration is announced in one line


class Progress:
    """The progress of a loop with a known number of steps."""

    def __init__(self, description: str, total: int) -> None:
        """Start the clock, and a progress bar that appears after `BAR_DELAY_SECONDS` on a terminal."""
        self.description = description
        self.total = total
        self.done = 0
        self.started = time.monotonic()
        # With `disable=None`, tqdm disables the bar unless stderr is a terminal.
        self.bar = tqdm(total=total, desc=description, delay=BAR_DELAY_SECONDS, disable=None)
        self.needs_estimate = self.bar.disable  # a bar shows the remaining time itself

    def advance(self) -> None:
        """Count a completed step.

        Without a progress bar, the duration of the loop is estimated once, at the first step after `BAR_DELAY_SECONDS`.
        It is printed if it exceeds `LONG_SECONDS`.
        """
        self.done += 1
        self.bar.update()
        elapsed = time.monotonic() - self.started
        if not self.needs_estimate or elapsed < BAR_DELAY_SECONDS:
            return
        expected = elapsed / self.done * self.total
        if expected > LONG_SECONDS:
            print(f"{self.description}: about {expected:.0f} s", file=sys.stderr, flush=True)
        self.needs_estimate = False


@contextmanager
def show_progress(description: str, total: int) -> Iterator[Progress]:
    """Yield the progress of a loop with `total` steps."""
    progress = Progress(description, total)
    try:
        yield progress
    finally:
        progress.bar.close()


def track(tasks: Iterable[Task], description: str) -> Iterator[Task]:
    """Yield the tasks of a loop; show its progress if there are several tasks."""
    counted = tasks if isinstance(tasks, Sized) else list(tasks)
    if len(counted) < 2:
        yield from counted
        return
    with show_progress(description, len(counted)) as progress:
        for task in counted:
            yield task
            progress.advance()


def look_ahead(items: Iterable[Task], number: int) -> Iterator[Task]:
    """Yield the items in order, each only after `number` further items, or all remaining ones, have been computed.

    Example:
        >>> list(look_ahead(iter("abc"), 2))
        ['a', 'b', 'c']
    """
    pending: deque[Task] = deque()
    for item in items:
        pending.append(item)
        if len(pending) > number:
            yield pending.popleft()
    yield from pending

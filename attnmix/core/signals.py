"""Conversion of stop signals into an exception, so that temporary folders are removed and locks are released."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Batch systems send SIGTERM before they reclaim the machine, and torchrun sends it when another process fails. A closed
# terminal sends SIGHUP, which Windows does not define.
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM]
if hasattr(signal, "SIGHUP"):
    STOP_SIGNALS.append(signal.SIGHUP)
_received: list[int] = []


@contextmanager
def stop_signals_raised() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first stop signal; a second one ends the process immediately, like SIGKILL."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:  # signals ignored by nohup or in background jobs remain ignored
            signal.signal(number, _stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def received_signal() -> int | None:
    """Return the number of the received stop signal, or None."""
    return _received[0] if _received else None


def _stop(number: int, _frame: FrameType | None) -> None:
    """Record the signal and raise KeyboardInterrupt; exit immediately at a second signal."""
    if _received:
        os._exit(128 + number)  # the exit status that shells report for a process ended by this signal
    _received.append(number)
    raise KeyboardInterrupt

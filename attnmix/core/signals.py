"""Signals that stop a process, raised as an exception: temporary folders are then removed, and locks released."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# SIGTERM is sent by batch systems before they take the machine away, and by torchrun when another process fails; SIGHUP
# by a terminal that is closed. Windows has no SIGHUP.
STOP_SIGNALS = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
_received: list[int] = []


@contextmanager
def stop_signals_raised() -> Iterator[None]:
    """Let the first of `STOP_SIGNALS` raise KeyboardInterrupt; the second ends the process at once, like SIGKILL."""
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, handler in handlers.items():
        if handler is not signal.SIG_IGN:  # as in the background of a shell, and behind nohup
            signal.signal(number, _stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def received_signal() -> int | None:
    """Return the number of the stop signal, once it has come."""
    return _received[0] if _received else None


def _stop(number: int, _frame: FrameType | None) -> None:
    if _received:
        os._exit(128 + number)
    _received.append(number)
    raise KeyboardInterrupt

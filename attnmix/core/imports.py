"""Imports of large packages, which the garbage collector need not search."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_imports() -> Iterator[None]:
    """Import without the garbage collector, and keep what is imported out of its later searches.

    For commands alone, as the collector is the whole process's: `attnmix` imported by another program leaves it as it
    is. torch and transformers make half a million objects that live as long as the process. Collections while they are
    made and when the process ends find nothing and take 2 of the 7 s of a first ratio. Nothing is done where torch is
    loaded already, or where the collector is off. What a process has before that is kept out too: it is freed with its
    last reference as ever, but no longer where it refers to itself. `gc.unfreeze()` undoes it.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

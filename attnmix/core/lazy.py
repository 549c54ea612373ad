"""A property that is computed once for each object."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

Value = TypeVar("Value")


class cached_property(functools.cached_property[Value]):  # noqa: N801 (the name of what it replaces)
    """`functools.cached_property` without the lock of Python 3.11, for which threads with objects of their own wait."""

    def __init__(self, function: Callable[[Any], Value]) -> None:
        super().__init__(function)
        self.lock = nullcontext()

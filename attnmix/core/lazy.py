"""A property computed once per object."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar

Value = TypeVar("Value")


class cached_property(functools.cached_property[Value]):  # noqa: N801 (the name in functools)
    """`functools.cached_property` without the lock of Python 3.11, which blocks threads that use different objects."""

    def __init__(self, function: Callable[[Any], Value]) -> None:
        super().__init__(function)
        self.lock = nullcontext()

"""Validation of the user's indices of layers, heads, tokens and classes."""

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from attnmix.core.errors import InputError


def unwrap_scalar(value: Any) -> Any:
    """Return a NumPy or torch scalar as a Python number, and any other value unchanged."""
    is_scalar_array = getattr(value, "ndim", None) == 0
    return value.item() if is_scalar_array and hasattr(value, "item") else value


def is_whole_number(value: Any) -> bool:
    """Return True for an integer that is not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def whole_number(argument: str, given: Any) -> int:
    """Return an integer; raise `InputError` for any other value, including bools and floats."""
    number = unwrap_scalar(given)
    if not is_whole_number(number):
        raise InputError(f"{argument}: {number!r}; allowed: whole numbers")
    return int(number)


def whole_numbers(argument: str, given: Any) -> tuple[int, ...]:
    """Return the integers in a list, range, array or tensor; raise `InputError` for other values or an empty list."""
    values = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InputError(f"{argument}: {given!r}; allowed: a list of whole numbers")
    numbers = tuple(whole_number(argument, value) for value in values)
    if not numbers:
        raise InputError(f"{argument}: empty; allowed: one or more whole numbers")
    return numbers


def check_range(place: str, numbers: Iterable[int], allowed: range, note: str = "") -> None:
    """Raise `InputError` for `numbers` outside `allowed`; the message begins with `place` and ends with `note`."""
    wrong = [str(number) for number in numbers if number not in allowed]
    if wrong:
        last = allowed.stop - 1
        raise InputError(f"{place} {', '.join(wrong)}; allowed: {allowed.start} to {last}{note}")

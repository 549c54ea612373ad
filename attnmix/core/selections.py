"""Whole numbers by which a user names layers, heads, tokens and classes, checked against those that are there."""

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

from attnmix.core.errors import InputError


def whole_number(argument: str, given: Any) -> int:
    """Return a whole number; raise `InputError` for anything else, a bool or a float among it."""
    number = given.item() if hasattr(given, "item") and getattr(given, "ndim", 1) == 0 else given
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise InputError(f"{argument}: {number!r}; allowed: whole numbers")
    return int(number)


def whole_numbers(argument: str, given: Any) -> tuple[int, ...]:
    """Return the whole numbers in a list, a range, an array or a tensor; raise `InputError` where there are none."""
    values = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InputError(f"{argument}: {given!r}; allowed: a list of whole numbers")
    numbers = tuple(whole_number(argument, value) for value in values)
    if not numbers:
        raise InputError(f"{argument}: none; allowed: one whole number or more")
    return numbers


def check_range(place: str, numbers: Iterable[int], allowed: range, note: str = "") -> None:
    """Raise `InputError` for `numbers` outside `allowed`; `place` says of what they are, `note` what is to know."""
    wrong = ", ".join(str(number) for number in numbers if number not in allowed)
    if wrong:
        raise InputError(f"{place} {wrong}; allowed: {allowed.start} to {allowed.stop - 1}{note}")

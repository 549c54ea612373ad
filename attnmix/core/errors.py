"""`InputError`, for mistakes that the user can fix, and helpers that shorten other exceptions."""


class InputError(Exception):
    """Bad input: the text names the key, file or value, and what is allowed."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def innermost(error: BaseException) -> BaseException:
    """Return the error at the start of a chain of `raise ... from ...`."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error

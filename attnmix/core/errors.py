"""The one error that is the user's to mend, and what other errors say."""


class InputError(Exception):
    """Bad input: the text names the key, file or value, and what is allowed."""


def first_line(error: BaseException) -> str:
    """What an error says, without what follows on further lines."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def innermost(error: BaseException) -> BaseException:
    """The error that an error was raised from, and that one, to the first."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error

"""The one error that is the user's to mend."""


class InputError(Exception):
    """Bad input: the text names the key, file or value, and what is allowed."""

"""Errors, in the words of the command line."""

from ._longdraft import Error

__all__ = ["Error", "refused"]

# What an error has that brings no more than a message.
Error.help = None
Error.problems = []
Error.code = 1


def refused(message: str, help: str) -> Error:
    """An error with the way out."""
    error = Error(message)
    error.help = help
    if hasattr(error, "add_note"):
        error.add_note(f"hint: {help}")
    return error

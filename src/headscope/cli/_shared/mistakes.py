"""Errors that the user can correct, and the names of options in them."""

from __future__ import annotations

import re
from collections.abc import Mapping

import click


class Mistake(click.ClickException):
    """An error that the user can correct: one line on stderr, exit code 2."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.ctx = click.get_current_context(silent=True)


def name_options(message: str, options: Mapping[str, str], default: str = "") -> str:
    """Return a message of the library with its arguments replaced by the options that they come from.

    Args:
        message: as ``grid: got …; give special=3``; the argument that it starts with and those in its remedy are
            replaced.
        options: argument -> option, as ``{"grid": "--grid"}``.
        default: prefix of a message that starts with none of these arguments.
    """
    for name, option in options.items():
        message = re.sub(rf"\b{name}=(?=[\d\"'])", f"{option} ", message)
        message = re.sub(rf"\b{name}=(True\b)?|(?<=\bgive ){name}\b", option, message)
    name, colon, rest = message.partition(":")
    if colon and name in options:
        return f"{options[name]}:{rest}"
    return f"{default}: {message}" if default else message


def describe_unreadable(path: str, error: Exception) -> str:
    """Return a message with the path of a file and the reason why it cannot be read."""
    reason = error.strerror if isinstance(error, OSError) else None
    return f"{path}: cannot be read: {reason}" if reason else str(error)

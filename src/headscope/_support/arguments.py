"""Checks of arguments that the types of a signature already promise: callers may not be typed."""

from __future__ import annotations


def check_type(name: str, value: object, expected: type | tuple[type, ...], text: str) -> None:
    """Raise unless a value is of one of these types.

    Args:
        name: the argument.
        value: what was passed.
        expected: one type or several.
        text: what is expected, in words, as "a torch.nn.Module".

    Raises:
        TypeError: it is of another type.
    """
    if not isinstance(value, expected):
        raise TypeError(f"{name}: got {type(value).__name__}, wanted {text}")

"""Values of the options of ``check``, in Python and on the command line; this module does not import torch."""

from __future__ import annotations

import math
import operator
from numbers import Real

MOST = 10**9
SIZE = f"a whole number from 1 to {MOST}"
SCALE = "a finite number above 0"
MEANINGS = ("keep", "hide", "add")


def is_size(value: object) -> bool:
    """Return whether a value is a whole number from 1, also of numpy; a bool is not one."""
    try:
        return not isinstance(value, bool) and 1 <= operator.index(value) <= MOST  # pyright: ignore[reportArgumentType]
    except TypeError:
        return False


def is_scale(value: object) -> bool:
    """Return whether a value is a finite number above 0, also of numpy; a bool is not one."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    return math.isfinite(value) and float(value) > 0


def is_meaning(value: object) -> bool:
    """Return whether a value is one of ``MEANINGS``."""
    return isinstance(value, str) and value in MEANINGS

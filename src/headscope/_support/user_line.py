"""The line that a warning names: that of the user, not one of headscope or of a library that called it."""

from __future__ import annotations

import sys

_LIBRARIES = frozenset({"headscope", "torch", "transformers", "contextlib"})


def user_stacklevel() -> int:
    """Return the ``stacklevel`` for ``warnings.warn`` in the calling function that names the user's line.

    That is the innermost line outside headscope and the libraries that run its hooks. Without such a line it is the
    outermost one.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level

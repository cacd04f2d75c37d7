"""The line that a warning or an error names: that of the user, not one of headscope or of a library that called it."""

from __future__ import annotations

import os
import sys
import traceback

_LIBRARIES = frozenset({"headscope", "torch", "transformers", "contextlib"})
_CALLED_LIBRARIES = frozenset({"headscope", "torch", "numpy", "einops"})
_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep
_MOST_CODE, _MOST_TEXT = 100, 160  # characters of a line of code, and of the text of an error


def user_stacklevel() -> int:
    """Return the ``stacklevel`` for ``warnings.warn`` in the calling function that names the user's line.

    That is the innermost line outside headscope and the libraries that run its hooks. Without such a line it is the
    outermost one.
    """
    level, frame = 1, sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    return level


def describe_error(error: BaseException) -> str:
    """Return the type and the text of an error in one line, without a full stop."""
    message = " ".join(str(error).split())[:_MOST_TEXT].rstrip()
    message = message if message.endswith("..") else message.removesuffix(".")
    return type(error).__name__ + (f": {message}" if message else "")


def find_user_line(error: BaseException) -> str:
    """Return file, number and code of the innermost line that is not of a library; "" if there is none.

    Examples:
        >>> from headscope._support.user_line import find_user_line
        >>> find_user_line(ValueError("never raised"))
        ''
    """
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = frame.f_code.co_filename
        standard = path.startswith(_STANDARD_LIBRARY) and "-packages" not in path
        library = frame.f_globals.get("__name__", "").partition(".")[0] in _CALLED_LIBRARIES
        if not (standard or library or path.startswith("<")):
            code = (traceback.FrameSummary(path, number, "").line or "").strip()
            shown = f": {code[:_MOST_CODE]}" if code else ""
            return f"{os.path.basename(path)}, line {number}{shown}"
    return ""


def describe_failure(error: BaseException) -> str:
    """Return an error in one line, with the line of the user's code that raised it, if one did."""
    line = find_user_line(error)
    return f"{line} raises {describe_error(error)}" if line else describe_error(error)

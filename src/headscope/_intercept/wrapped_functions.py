"""Functions within partials, wrappers and objects that are called like functions."""

from __future__ import annotations

import functools
import inspect
from types import CodeType, FunctionType
from typing import Any

from torch import nn


def bound_options(attend: Any) -> dict[str, Any]:
    """Return the options that partials bind, by name; the outermost counts."""
    bound: dict[str, Any] = {}
    if type(attend) is FunctionType and "__wrapped__" not in vars(attend):  # as for most calls: without a search
        return bound
    while (inner := _inner(attend)) is not None:
        if isinstance(attend, functools.partial):
            bound = {**attend.keywords, **bound}
        attend = inner
    return bound


def code_of(attend: Any) -> CodeType | None:
    """Return the code of a function, or of the target of a wrapper, a partial or an object; None = it has none."""
    while (inner := _inner(attend)) is not None:
        attend = inner
    return getattr(attend, "__code__", None)


def _inner(attend: Any) -> Any:
    """Return the target of a partial, a wrapper or an object; None for a function, or an opaque object."""
    if isinstance(attend, functools.partial):
        return attend.func
    if hasattr(attend, "__wrapped__"):
        return attend.__wrapped__
    if isinstance(attend, FunctionType):  # the static look-up below is slow
        return None
    if isinstance(attend, nn.Module):
        return attend.forward
    own = inspect.getattr_static(type(attend), "__call__", None)
    return own if hasattr(own, "__code__") or hasattr(own, "__wrapped__") else None

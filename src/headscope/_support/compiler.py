"""Marks for torch.compile: break the graph at a function, or treat its result as a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def disable_compiler(function: AnyFunction, reason: str) -> AnyFunction:
    """Return a function that breaks the graph. This loads torch's compiler; the reason is for its reports."""
    return cast(AnyFunction, torch.compiler.disable(function, reason=reason))


def mark_constant(function: AnyFunction) -> AnyFunction:
    """Let a compiler call a function without arguments while it traces, and treat the result as a constant.

    ``torch.compiler.assume_constant_result`` sets the same mark, but loads the compiler.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function

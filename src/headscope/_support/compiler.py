"""What torch.compile does with a function: leave the graph for it, or take its result for a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


def disable_compiler(function: AnyFunction, reason: str) -> AnyFunction:
    """Return a function that a graph is left for. It loads torch's compiler; the reason is for its reports."""
    return cast(AnyFunction, torch.compiler.disable(function, reason=reason))


def mark_constant(function: AnyFunction) -> AnyFunction:
    """Let a compiler call a function without arguments while it traces, and take the result for a constant.

    ``torch.compiler.assume_constant_result`` sets the same mark, but loads the compiler.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function

"""torch.autograd.Function with types for its methods and for the result of ``apply``."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

Result = TypeVar("Result")
_apply = attrgetter("apply")


class Function(torch.autograd.Function, Generic[Result]):
    """The base of headscope's functions with a gradient. ``Result`` is the type that ``forward`` and ``apply`` return.

    torch declares its methods with parameters that no function has, so a type checker rejects each override, and it
    does not declare the type of ``apply``. The declarations below are for the type checker. At run time the class adds
    nothing to torch's: with its own method, torch would assume that a subclass overrides it.
    """

    if TYPE_CHECKING:

        @staticmethod
        def forward(*args: Any, **kwargs: Any) -> Result: ...

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None: ...

        @staticmethod
        def backward(*args: Any, **kwargs: Any) -> tuple[Any, ...]: ...

        @staticmethod
        def jvp(*args: Any, **kwargs: Any) -> tuple[Any, ...]: ...

        @classmethod
        def apply(cls, *args: Any) -> Result: ...


def outside_transforms(function: type[Function[Result]]) -> Callable[..., Result]:
    """Return ``function.apply`` without torch's check whether torch.func is active.

    The check costs as much as the rest. Call the result only where torch.func is known to be inactive.
    """
    return _apply(super(torch.autograd.Function, function))

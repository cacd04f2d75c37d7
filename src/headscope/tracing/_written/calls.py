"""How a module that is not headscope's is called, and what helps if the call fails."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from headscope._support.user_line import describe_failure

Call = Callable[[Any, Tensor], Any]
OPERANDS = {"q", "k", "v", "kv", "query", "key", "value", "queries", "keys", "values"}


def module_name(module: Any) -> str:
    """Return the name of a module's class, or of a function."""
    module = getattr(module, "_orig_mod", module)
    return type(module).__name__ if isinstance(module, nn.Module) else getattr(module, "__name__", "the function")


def check_call(call: object) -> None:
    """Raise unless ``call`` is a function of a module and x."""
    example = "expected a function of the module and x, such as call=lambda module, x: module(x)"
    if not callable(call):
        raise TypeError(f"call: got {type(call).__name__}, {example}")
    try:
        signature = inspect.signature(call)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise TypeError(f"call: got a function with the arguments {signature}, {example}") from error


def arguments_of(module: Any, x: Tensor, extra: list[Any]) -> list[Any]:
    """Return the arguments of a module: x, three times where it takes query, key and value, and ``extra``."""
    return [x, x, x] if not extra and _is_three_fold(module) else [x, *extra]


def describe_call(module: Any, arguments: list[Any]) -> str:
    """Return a call in words: Attention(x [2, 7, 24], context [2, 5, 24])."""
    x = arguments[0]
    shapes = [f"{'x' if each is x else 'context'} {list(each.shape)}" for each in arguments if isinstance(each, Tensor)]
    return f"{module_name(module)}({', '.join(shapes)})"


def _signature_of(module: Any) -> inspect.Signature | None:
    """Return the signature of a module's forward, or of a function; None if it has none, as some built-in functions."""
    try:
        return inspect.signature(module.forward if isinstance(module, nn.Module) else module)
    except (TypeError, ValueError):
        return None


def _is_three_fold(module: Any) -> bool:
    """Return whether a module needs query, key and value."""
    signature = _signature_of(module)
    parameters = [] if signature is None else signature.parameters.values()
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    required = [each.name.lower() for each in positional if each.default is each.empty]
    return len(required) == 3 and sorted(name.lstrip("x_")[:1] for name in required) == ["k", "q", "v"]


def example_arguments(module: Any, *, mask: bool = True) -> str:
    """Return arguments for a call by the module's signature, such as ``x, x, x, mask``; with a mask if ``mask``."""
    signature = _signature_of(module)
    if signature is None:
        return "x, mask" if mask else "x"
    parameters = signature.parameters.values()
    masks = [each for each in parameters if "mask" in each.name]
    required = [each for each in parameters if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    names = [
        "mask" if each in masks else "x" if n == 0 or each.name.lower().strip("x_") in OPERANDS else each.name
        for n, each in enumerate(required)
    ]
    if not mask:
        return ", ".join(names or ["x"])
    if masks and "mask" not in names:
        names.append(f"{masks[0].name}=mask")
    return ", ".join(names if masks else ["x", "mask"])


def describe_problem(error: Exception, module: Any, arguments: list[Any]) -> str:
    """Return why a call failed, to follow "failed": with the line that raised it, and what helps."""
    if not _fits(module, arguments):
        problem = " ".join(str(error).split())[:200]
        example = example_arguments(module, mask=False)
        return (
            f" with {type(error).__name__}: {problem}; pass call=, for example call=lambda module, x: module({example})"
        )
    return f": {describe_failure(error)}" + _remedy_for_shape(error, module, arguments[0])


def _fits(module: Any, arguments: list[Any]) -> bool:
    """Return whether a module takes these arguments, as far as its signature tells."""
    signature = _signature_of(module)
    try:
        return signature is None or bool(signature.bind(*arguments))
    except TypeError:
        return False


def _remedy_for_shape(error: Exception, module: Any, x: Tensor) -> str:
    """Return what helps where x may not fit; nothing for an error of another kind."""
    if not isinstance(error, (RuntimeError, ValueError, IndexError)):
        return ""
    parts = module.modules() if isinstance(module, nn.Module) else ()
    widths = list(dict.fromkeys(part.in_features for part in parts if isinstance(part, nn.Linear)))
    if widths and x.is_floating_point() and x.shape[-1:] and x.shape[-1] not in widths:
        known = ", ".join(str(width) for width in widths[:4])
        return f"; the last axis of x has {x.shape[-1]} numbers, and the linear layers take {known}"
    return f"; if x does not fit, pass another: its shape is {list(x.shape)}"

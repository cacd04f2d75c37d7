"""``__call__`` of the classes of watched modules: replaced while a watch is open.

Only these classes change. To set ``nn.Module.__call__`` takes as long as attending to a short text, because all classes
of modules inherit it; and all modules that are not watched, such as each linear, would be called through it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

ModuleCall = Callable[..., Any]

_replaced: dict[type[Any], ModuleCall] = {}  # class -> its replacement
originals: dict[type[Any], ModuleCall] = {}
"""The ``__call__`` of replaced classes that have their own."""


def original() -> ModuleCall:
    """Return ``nn.Module.__call__`` as without a watch; other code may have replaced it meanwhile."""
    return originals.get(nn.Module) or nn.Module.__call__


def replace_calls(modules: Iterable[nn.Module], call: ModuleCall) -> None:
    """Replace ``__call__`` of the classes of modules; that of ``nn.Module`` too, if a class has its own.

    A lazy module changes its class in its first call.
    """
    classes: set[Any] = {type(module) for module in modules}
    classes |= {lazy for each in classes if (lazy := getattr(each, "cls_to_become", None)) is not None}
    for each in classes:
        if each.__call__ is call:
            continue
        if each.__call__ is nn.Module.__call__ and each is not nn.Module:
            _replace(each, call)
        else:  # its own may call that of ``nn.Module``
            replace_call(nn.Module, lambda _: call)


def replace_call(kind: type[Any], to_replacement: Callable[[ModuleCall], ModuleCall]) -> None:
    """Replace ``__call__`` of a class that has its own by what a function makes of it, unless it is replaced."""
    if kind not in _replaced:
        own = originals[kind] = kind.__call__
        _replace(kind, to_replacement(own))


def _replace(kind: type[Any], call: ModuleCall) -> None:
    _replaced[kind] = call
    kind.__call__ = call


def exchange_calls(before: ModuleCall, call: ModuleCall) -> None:
    """Replace a replacement by another one, in all classes that have it."""
    for each in [each for each, present in _replaced.items() if present is before]:
        _replace(each, call)


def restore_calls() -> None:
    """Restore ``__call__`` of all classes, except where other code has replaced it since."""
    while _replaced:
        each, call = next(iter(_replaced.items()))
        if vars(each).get("__call__") is call:
            if each in originals:
                each.__call__ = originals[each]
            else:
                del each.__call__
        originals.pop(each, None)
        del _replaced[each]  # last: an interrupted call can then start again

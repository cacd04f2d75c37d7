"""Observers of a forward pass: the outputs of modules, and which tensors functions of torch read."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


@contextmanager
def observing_outputs(modules: Mapping[str, nn.Module], see: Callable[[str, Any], None]) -> Generator[None]:
    """Return a context in which ``see`` receives the name and the output of each module after it ran."""

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, output: see(name, output)

    handles = [module.register_forward_hook(hook(name)) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def inner_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules inside a model, by name."""
    return {name: module for name, module in model.named_modules() if name}


class _NonFinite:
    """The name of the first module whose output is not finite; "" = there is none."""

    def __init__(self) -> None:
        self.name = ""

    def see(self, name: str, output: Any) -> None:
        """Record a module, if it is the first."""
        tensors = output if isinstance(output, (tuple, list)) else [output]
        numbers = [x for x in tensors if isinstance(x, Tensor) and x.is_floating_point() and not x.is_nested]
        if not self.name and any(map(broken, numbers)):
            self.name = name


def broken(x: Tensor) -> bool:
    """Return whether a tensor holds NaN or infinity."""
    return not bool(torch.isfinite(x).all())


@contextmanager
def first_broken_module(model: nn.Module) -> Generator[_NonFinite]:
    """Return a context in which the first module with an output that is not finite is recorded."""
    record = _NonFinite()
    with observing_outputs(inner_modules(model), record.see):
        yield record


class FunctionUses(TorchFunctionMode):
    """Records which of some tensors are arguments of a function of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.watched: dict[int, Tensor] = {}
        self.used: set[int] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.watched:
            for value in _flat((args, kwargs)):
                if id(value) in self.watched:
                    self.used.add(id(value))
        return func(*args, **(kwargs or {}))


def _flat(value: Any) -> Generator[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        yield value
        return
    for part in value:
        yield from _flat(part)

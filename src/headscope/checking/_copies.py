"""Copies of checked modules, their dtypes, and the errors and results of unknown code."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

CODE_ERRORS = (Exception, SystemExit)
"""Errors that unknown code may raise and that are reported; KeyboardInterrupt is not caught."""


class CheckError(ValueError):
    """The error of a target that cannot be called, or whose result cannot be checked.

    Examples:
        >>> from headscope.checking import CheckError, check
        >>> try:
        ...     check(lambda x: 3, embed_dim=8)
        ... except CheckError as error:
        ...     print(str(error).partition(";")[0])
        <lambda>: no way to call it was found
    """


def convert_dtype(target: Any, dtype: torch.dtype) -> Any:
    """Convert the real numbers of a module; complex ones stay complex, which ``Module.to`` does not ensure."""
    pair = torch.complex128 if dtype == torch.float64 else torch.complex64

    def convert(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x.to(pair) if x.is_complex() else x

    return target._apply(convert) if isinstance(target, nn.Module) else target


def copy_target(target: Any) -> Any:
    """Return a deep copy, with stored results of earlier calls detached, because torch does not copy them."""
    memo: dict[int, Any] = {}

    def collect(value: Any, depth: int) -> None:
        if isinstance(value, Tensor) and not value.is_leaf:
            memo[id(value)] = value.detach().clone()
        elif isinstance(value, (list, tuple, dict)) and depth < 3:
            for each in value.values() if isinstance(value, dict) else value:
                collect(each, depth + 1)

    for part in target.modules() if isinstance(target, nn.Module) else ():
        for value in vars(part).values():
            collect(value, 0)
    return copy.deepcopy(target, memo)


def separate_equal_weights(module: nn.Module) -> None:
    """Give matrices that hold the same numbers different ones, so that projections differ as after training.

    ``copy.deepcopy`` of one layer makes such matrices. Parameters that are shared stay shared, and constant ones stay
    as they are.
    """
    generator = torch.Generator().manual_seed(3)
    earlier: list[Tensor] = []
    for p in module.parameters():
        if p.ndim < 2 or not p.is_floating_point() or p.numel() == 0 or bool((p == p.flatten()[0]).all()):
            continue
        if any(p.shape == other.shape and torch.equal(p, other) for other in earlier):
            order = torch.randperm(p.numel(), generator=generator)
            with torch.no_grad():
                p.copy_(p.flatten()[order].view(p.shape))  # the same numbers elsewhere: as large as before
        earlier.append(p)


def list_tensors(result: Any) -> list[Tensor]:
    """Return the floating-point tensors of a result, in order."""
    if isinstance(result, Tensor):
        return [result] if result.is_floating_point() else []
    if is_dataclass(result):
        result = {each.name: getattr(result, each.name) for each in fields(result)}
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, (tuple, list)):
        return [tensor for part in result for tensor in list_tensors(part)]
    return []


def describe_shapes(result: Any) -> str:
    """Return the shapes of the tensors of a result, or its type."""
    shapes = ", ".join(str(list(tensor.shape)) for tensor in list_tensors(result))
    return shapes or type(result).__name__


CheckError.__module__ = "headscope.checking"  # its public path

"""Attention that a module writes out: a softmax over keys whose result is multiplied with values.

``watch`` cannot record such a call yet, so it warns. What counts is the shape: a product contracts the softmax's last
axis, and the other operand does not have the softmax's second last axis. So a gate or a router does not count, which
weights what each token has of its own. Sums of elementwise products, and an exponential that is divided by its sum, are
not noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

SOFTMAX = {F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax}
MATMUL = {torch.matmul, Tensor.matmul, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm}
NOTED = SOFTMAX | MATMUL | {torch.einsum}
MOST = 64  # softmaxes of one module that wait for a product


class Weights(NamedTuple):
    """The result of a softmax over its last axis."""

    size: int
    queries: int
    keys: int


def attends(waiting: list[Weights], function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Note a call of one of ``NOTED``; return whether it multiplies the result of a softmax with values.

    Args:
        waiting: the softmaxes that the module has computed so far; changed in place.
    """
    if function in SOFTMAX:
        weights = _weights(args, kwargs)
        if weights is not None and len(waiting) < MOST:
            waiting.append(weights)
        return False
    if not waiting:
        return False
    for weights in waiting:
        if _einsum(weights, args) if function is torch.einsum else _matmul(weights, [*args, *kwargs.values()]):
            waiting.remove(weights)
            return True
    return False


def _weights(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Weights | None:
    x = args[0] if args else kwargs.get("input")
    axis = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(x, Tensor) or x.is_nested or x.ndim < 2 or axis not in (-1, x.ndim - 1):
        return None
    return Weights(x.numel(), *x.shape[-2:])


def _matmul(weights: Weights, operands: Sequence[Any]) -> bool:
    """Whether it is weights @ values, or both transposed."""
    if len(operands) < 2 or not all(_is_plain(x) for x in operands[:2]):
        return False
    a, b = operands[:2]
    if a.ndim != b.ndim:  # values that all tokens share are parameters
        return False
    size, queries, keys = weights
    straight = a.shape[-2:] == (queries, keys) and a.numel() == size and b.shape[-2] == keys
    return straight or (b.shape[-2:] == (keys, queries) and b.numel() == size and a.shape[-1] == keys)


def _is_plain(x: object) -> bool:
    return isinstance(x, Tensor) and not x.is_nested and x.ndim >= 2


def _einsum(weights: Weights, args: Sequence[Any]) -> bool:
    """Whether an operand has the softmax's axes, and another one its keys but not its queries, which the result has."""
    equation, *operands = args
    if not isinstance(equation, str):
        return False
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = list(operands[0])
    if not arrow or len(terms) != 2 or len(operands) != 2 or not all(_is_plain(x) for x in operands):
        return False
    for p, v in ((0, 1), (1, 0)):
        if operands[p].numel() != weights.size or operands[p].shape[-2:] != weights[1:]:
            continue
        query, key = terms[p][-2:]
        if key in terms[v] and key not in result and query not in terms[v] and query in result:
            return True
    return False

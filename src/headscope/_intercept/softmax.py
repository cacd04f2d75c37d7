"""Attention that a module writes out: a softmax over keys whose result is multiplied with values.

``watch`` cannot record such a call yet, so it warns. What counts is the shape: a product contracts the softmax's last
axis, and the other operand does not have the softmax's second last axis. So a gate or a router does not count, which
weights what each token has of its own. Neither does a product with a parameter. Sums of elementwise products, an
exponential that is divided by its sum, and ``tensordot`` over several axes are not noticed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_OPS = torch.ops.aten


def _overloads(*packets: Any) -> set[Any]:
    """Return operators of torch.ops with all their overloads."""
    return {*packets, *(getattr(packet, name) for packet in packets for name in packet.overloads())}


SOFTMAX = {F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax}
MATMUL = {
    *(torch.matmul, Tensor.matmul, torch.linalg.matmul, torch.bmm, Tensor.bmm, torch.mm, Tensor.mm),
    *_overloads(_OPS.matmul, _OPS.bmm, _OPS.mm),
}
ADDED = {  # input + a @ b
    *(torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_, torch.addbmm, Tensor.addbmm, Tensor.addbmm_),
    *(torch.addmm, Tensor.addmm, Tensor.addmm_),
    *_overloads(_OPS.baddbmm, _OPS.baddbmm_, _OPS.addbmm, _OPS.addbmm_, _OPS.addmm, _OPS.addmm_),
}
INNER = {torch.inner, Tensor.inner, F.linear, *_overloads(_OPS.inner, _OPS.linear)}  # a @ b.T
CHAIN = {torch.linalg.multi_dot, torch.chain_matmul}
NOTED = SOFTMAX | MATMUL | ADDED | INNER | CHAIN | {torch.einsum, torch.tensordot}
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
        if function is torch.einsum:
            attends_here = _einsum(weights, args)
        else:
            attends_here = any(_contracts(weights, *each) for each in _products(function, args, kwargs))
        if attends_here:
            waiting.remove(weights)
            return True
    return False


def _weights(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Weights | None:
    x = args[0] if args else kwargs.get("input")
    axis = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(x, Tensor) or x.is_nested or x.ndim < 2 or axis not in (-1, x.ndim - 1):
        return None
    return Weights(x.numel(), *x.shape[-2:])


class Product(NamedTuple):
    """Two operands, and the axis of each that their product contracts; axes count from the end."""

    a: Any
    b: Any
    axis_a: int = -1
    axis_b: int = -2


def _products(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Product]:
    """Return the products of two operands that a call of one of ``NOTED`` computes."""
    if function in CHAIN:
        chain = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args or kwargs.get("tensors", ())
        return [Product(a, b) for a, b in pairwise(chain)]
    if function in ADDED:
        args = args[1:]
        kwargs = {name: value for name, value in kwargs.items() if name not in ("input", "self")}
    operands = [*args, *kwargs.values()]
    if len(operands) < 2:
        return []
    a, b = operands[:2]
    if function in INNER:
        return [Product(a, b, -1, -1)]
    return _tensordot(a, b, kwargs.get("dims")) if function is torch.tensordot else [Product(a, b)]


def _tensordot(a: Any, b: Any, dims: Any) -> list[Product]:
    """Return the product if it contracts one axis; torch hands ``dims`` on by keyword."""
    if dims == 1:
        return [Product(a, b, -1, 0)]
    if not isinstance(dims, (list, tuple)):
        return []
    axes = [list(each) if isinstance(each, (list, tuple)) else [each] for each in dims]
    return [Product(a, b, axes[0][0], axes[1][0])] if [len(each) for each in axes] == [1, 1] else []


def _contracts(weights: Weights, a: Any, b: Any, axis_a: int, axis_b: int) -> bool:
    """Whether one operand is the softmax's result, contracted over its keys, and the other may be values."""
    if not _is_plain(a) or not _is_plain(b) or a.ndim != b.ndim:  # values that all tokens share are parameters
        return False
    return _over_keys(weights, a, axis_a, b, axis_b) or _over_keys(weights, b, axis_b, a, axis_a)


def _over_keys(weights: Weights, p: Tensor, axis: int, values: Tensor, axis_of_values: int) -> bool:
    """Whether p holds the softmax's weights, or those of one head, transposed or not, and its keys are contracted."""
    if isinstance(values, nn.Parameter) or isinstance(values._base, nn.Parameter):
        return False
    size, queries, keys = weights
    axis = axis - p.ndim if axis >= 0 else axis
    shape = (queries, keys) if axis == -1 else (keys, queries)
    fits = axis in (-1, -2) and p.shape[-2:] == shape and (p.ndim == 2 or p.numel() == size)
    return fits and values.shape[axis_of_values] == keys


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

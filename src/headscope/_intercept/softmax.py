"""Attention that a module writes out, by the functions that it calls: a softmax whose result multiplies values.

``written`` records such attention by following the operations beneath. If it does not, ``watch`` warns of what is found
here. What counts is the shape: a product contracts the softmax's last axis, and the other operand does not have the
softmax's second last axis. So a gate or a router, which weights each token's own components, does not count. Neither
does a product with a parameter. Slices and concatenations of weights are weights too (``join``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_OPS = torch.ops.aten


def _overloads(*packets: Any) -> set[Any]:
    """Return operators of torch.ops with all their overloads."""
    return {*packets, *(getattr(packet, name) for packet in packets for name in packet.overloads())}


SOFTMAX = {
    *(F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax, F.softmin, F.gumbel_softmax),
    *(F.log_softmax, torch.log_softmax, torch.special.log_softmax, Tensor.log_softmax),
}
# dynamo cannot hash these and the functions of JOINED: look them up only if nothing is being compiled
UNTRACED_SOFTMAX = {
    *(getattr(torch, name) for name in ("_softmax", "_safe_softmax", "_masked_softmax")),
    torch.sparse.softmax,
    *_overloads(_OPS.softmax, _OPS._softmax, _OPS._safe_softmax, _OPS.special_softmax, _OPS._masked_softmax),
    *_overloads(_OPS.log_softmax),
}
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
STACK = {torch.stack, *_overloads(_OPS.stack)}
CAT = {torch.cat, torch.concat, torch.concatenate, *_overloads(_OPS.cat)}
SCATTER = {torch.scatter, Tensor.scatter, Tensor.scatter_, *_overloads(_OPS.scatter, _OPS.scatter_)}
SHARED = {  # weights that several heads share
    *(torch.repeat_interleave, Tensor.repeat_interleave, Tensor.repeat, torch.tile, Tensor.tile),
    *(Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to),
}
CUT = {Tensor.__getitem__, torch.narrow, Tensor.narrow, F.pad}
JOINED = STACK | CAT | SCATTER | SHARED | CUT | {Tensor.__setitem__}
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
        function, args, kwargs: the call.
    """
    if function in SOFTMAX:
        wait(waiting, function, args, kwargs)
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


def wait(waiting: list[Weights], function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Note a softmax over the last axis; ``waiting`` is changed in place."""
    x = args[0] if args else kwargs.get("input", kwargs.get("self"))
    axis = kwargs.get("dim", -1 if function is F.gumbel_softmax else None)
    if axis is None:
        whole = [each for each in args[1:] if type(each) is int]  # a mask may come before the axis
        axis = whole[0] if whole else None
    if isinstance(x, Tensor) and not x.is_nested and x.ndim >= 2 and axis in (-1, x.ndim - 1):
        _append(waiting, Weights(x.numel(), *x.shape[-2:]))


def join(
    waiting: list[Weights], function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Tensor | None
) -> None:
    """Note the result of a call of one of ``JOINED`` if it holds weights: those of other heads, queries or keys.

    If the result has other queries or another order of axes it may be a gate, and does not count.

    Args:
        waiting: the softmaxes that the module has computed so far; changed in place.
        function, args, kwargs: the call.
        out: its result.
    """
    operands = [*args, *kwargs.values()]
    if function in CAT | STACK:
        parts = operands[0] if isinstance(operands[0], (list, tuple)) else []
    elif function in SCATTER:
        parts = [*operands[3:4], *([kwargs["src"]] if "src" in kwargs else [])]
    elif function is Tensor.__setitem__:
        parts, out = operands[2:3], operands[0]
    else:
        parts = operands[:1]
    if not parts or out is None or not _is_plain(out):
        return
    sources = [source for part in parts if (source := _source(waiting, part)) is not None]
    if len(sources) != len(parts):
        return
    source, axes = sources[0], {part.ndim for part in parts}
    queries = sum(each.queries for each in sources) if function in CAT else source.queries
    if function is Tensor.__setitem__ and axes == {out.ndim}:
        queries = out.shape[-2]  # a chunk of them
    same_keys = function in SCATTER | CUT or out.shape[-1] == source.keys
    if same_keys and out.shape[-2] in (source.queries, queries):
        _append(waiting, Weights(out.numel(), *out.shape[-2:]))


def _source(waiting: list[Weights], x: object) -> Weights | None:
    """Return the softmax whose weights a tensor may hold: one of the same size and the same last two axes."""
    if not _is_plain(x):
        return None
    fitting = (each for each in waiting if each == (x.numel(), *x.shape[-2:]))
    return next(fitting, None)


def _append(waiting: list[Weights], weights: Weights) -> None:
    """Append to the waiting ones; the first is dropped if there are too many."""
    if weights not in waiting:
        waiting.append(weights)
        del waiting[:-MOST]


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
    """Return the product if it contracts one axis; torch passes ``dims`` by keyword."""
    if dims == 1:
        return [Product(a, b, -1, 0)]
    if not isinstance(dims, (list, tuple)):
        return []
    axes = [list(each) if isinstance(each, (list, tuple)) else [each] for each in dims]
    return [Product(a, b, axes[0][0], axes[1][0])] if [len(each) for each in axes] == [1, 1] else []


def _contracts(weights: Weights, a: Any, b: Any, axis_a: int, axis_b: int) -> bool:
    """Return whether one operand is the softmax's result, contracted over its keys, and the other may be values."""
    if not _is_plain(a) or not _is_plain(b) or a.ndim != b.ndim:  # values that all tokens share are parameters
        return False
    return _over_keys(weights, a, axis_a, b, axis_b) or _over_keys(weights, b, axis_b, a, axis_a)


def _over_keys(weights: Weights, p: Tensor, axis: int, values: Tensor, axis_of_values: int) -> bool:
    """Return whether p holds the softmax's weights, or one head's, transposed or not, contracted over its keys."""
    if any(isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter) for x in (p, values)):
        return False
    size, queries, keys = weights
    axis = axis - p.ndim if axis >= 0 else axis
    shape = (queries, keys) if axis == -1 else (keys, queries)
    fits = axis in (-1, -2) and p.shape[-2:] == shape and (p.ndim == 2 or p.numel() == size)
    return fits and values.shape[axis_of_values] == keys


def _is_plain(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and not x.is_nested and x.ndim >= 2


def _einsum(weights: Weights, args: Sequence[Any]) -> bool:
    """Return whether one operand has the softmax's axes, another its keys alone, and the result its queries."""
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

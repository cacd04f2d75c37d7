"""Sharding rules of the operators for DTensors: whole, by batch, or by heads.

``headscope.attention`` of DTensors attends on each rank's ordinary tensors (``_attend.dtensors``). The rules serve
graphs and other callers that pass DTensors to the operators themselves.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NoReturn

import torch

from headscope.masks import Band, mask_from_codes

_CODES = 5  # the place of ``codes`` among the arguments
Placements = list[Any]
Rule = tuple[Placements, Placements]  # of the results, of the arguments; None for one that is not a tensor


_REMEDY = (
    "expected Replicate(), or shards of the batch (axis 0 of four) or of the heads (axis -3), because a rank would "
    "attend to its part as if it were the whole: .redistribute() it"
)


@cache
def register_rules() -> None:
    """Register the rules with torch, once. This loads ``torch.distributed.tensor``."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    operators = torch.ops.headscope
    for operator, rules in (
        (operators.attend_forward.default, _forward_rules),
        (operators.attend_backward.default, _backward_rules),
    ):
        register_sharding(operator)(rules)
        # torch caches the choice of a rule by the tensors, and by the arguments from here on: the codes of the mask
        propagator.op_to_schema_info[operator] = RuntimeSchemaInfo(_CODES, needs_pytree=True)


def _forward_rules(q: Any, k: Any, v: Any, bias: Any, sinks: Any, codes: Any, parts: Any, *rest: Any) -> list[Rule]:
    from torch.distributed.tensor import Replicate, Shard

    inputs = (q, k, v, bias, sinks, tuple(parts), rest[3])
    _check_placements(q, k, v)
    whole, batch, heads = Replicate(), Shard(0), Shard(1)
    rules: list[Rule] = [([whole, whole], _same(inputs, whole))]
    if _divides_batch(q, codes, parts):
        rules.append(([batch, batch], _placed(inputs, 0)))
    if _divides_heads(q, k):
        rules.append(([heads, heads], _placed(inputs, 1)))
    return rules


def _backward_rules(q: Any, k: Any, v: Any, bias: Any, sinks: Any, codes: Any, parts: Any, *rest: Any) -> list[Rule]:
    from torch.distributed.tensor import Replicate, Shard

    seed, results, needed = rest[3], rest[5:9], rest[9:11]
    inputs = (q, k, v, bias, sinks, tuple(parts), seed)
    _check_placements(q, k, v)
    whole, batch, heads = Replicate(), Shard(0), Shard(1)
    rules: list[Rule] = [([whole] * 5, _same(inputs, whole) + _each(results, whole))]
    for placement, axis, divides in (
        (batch, 0, _divides_batch(q, codes, parts)),
        (heads, 1, _divides_heads(q, k)),
    ):
        if divides:
            beside = [_of_bias_gradient(bias, needed[0], axis), _of_sinks_gradient(sinks, needed[1], axis)]
            rules.append(([placement] * 3 + beside, _placed(inputs, axis) + _each(results, placement)))
    return rules


def _check_placements(q: Any, k: Any, v: Any) -> None:
    """Raise if a rank holds part of a sequence or of a head's width."""
    for name, spec in (("q", q), ("k", k), ("v", v)):
        for placement in spec.placements:
            if placement.is_shard() and placement.dim % 4 > 1:
                refuse(name, 4, placement)


def _divides_heads(q: Any, k: Any) -> bool:
    """Return whether each rank of an axis of the mesh would have whole groups of heads, as far as they are sharded."""
    shape = q.mesh.shape
    sharded = math.prod(n for spec in (q, k) for n, p in zip(shape, spec.placements, strict=True) if p.is_shard(1))
    return all(x.shape[1] % math.lcm(*shape, sharded if sharded <= q.mesh.size() else 1) == 0 for x in (q, k))


def _divides_batch(q: Any, codes: Any, parts: Any) -> bool:
    """Return whether each rank could read the mask as it is: nothing in it differs between batch entries."""
    if parts:
        return False
    mask = mask_from_codes(list(codes), [])
    leaves = () if mask is None else tuple(mask.leaves())
    return not any(isinstance(leaf, Band) and isinstance(leaf.offset, tuple) for leaf in leaves)


def refuse(name: str, ndim: int, placement: Any) -> NoReturn:
    """Raise for a tensor that is sharded on its sequence or its width.

    Raises:
        ValueError: always.
    """
    axis = placement.dim % ndim
    letter = {ndim - 2: "Q" if name == "q" else "K", ndim - 1: "Dv" if name == "v" else "D"}.get(axis, "B")
    raise ValueError(f"{name}: is sharded on axis {axis} ({letter}), {placement}; {_REMEDY}")


def _each(tensors: Any, placement: Any) -> Placements:
    return [None if x is None else placement for x in tensors]


def _same(inputs: tuple[Any, ...], placement: Any) -> Placements:
    q, k, v, bias, sinks, parts, seed = inputs
    return _each((q, k, v, bias, sinks, *parts, seed), placement)


def _placed(inputs: tuple[Any, ...], axis: int) -> Placements:
    """Return the placements of the arguments where q, k and v are sharded on axis 0 (batch) or 1 (heads)."""
    from torch.distributed.tensor import Replicate, Shard

    q, k, v, bias, sinks, parts, seed = inputs
    beside = [None if x is None else _of_option(x, axis - 4) for x in (bias, *parts)]
    own_sinks = None if sinks is None else Shard(0) if axis == 1 else Replicate()
    return [*_each((q, k, v), Shard(axis)), beside[0], own_sinks, *beside[1:], None if seed is None else Replicate()]


def _of_option(x: Any, axis: int) -> Any:
    """Return the placement of a bias or a mask's tensor that broadcasts to the weights."""
    from torch.distributed.tensor import Replicate, Shard

    has_axis = x.ndim >= max(-axis, 3) and x.shape[axis] != 1  # a mask's tensors of fewer axes have no heads
    return Shard(x.ndim + axis) if has_axis else Replicate()


def _of_bias_gradient(bias: Any, needed: bool, axis: int) -> Any:
    """Return the placement of a gradient; one that is not needed is empty."""
    from torch.distributed.tensor import Partial, Replicate

    if bias is None or not needed:
        return Replicate()
    placement = _of_option(bias, axis - 4)
    return Partial() if isinstance(placement, Replicate) else placement


def _of_sinks_gradient(sinks: Any, needed: bool, axis: int) -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    if sinks is None or not needed:
        return Replicate()
    return Shard(0) if axis == 1 else Partial()

"""Pruning of heads: the implementation of ``MultiHeadAttention.prune_heads``."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from headscope._linear import check_own_parameters, unknown_projections, weight_and_bias
from headscope._support.arguments import as_whole, check_type, kind
from headscope.module._local_heads import check_not_split
from headscope.positions import ALiBi, RelativeBias


def prune(module: Any, heads: Collection[int]) -> Any:
    """Return a copy of a ``MultiHeadAttention`` without these query heads.

    A key/value head is removed with the last query head that uses it.

    Raises:
        TypeError, ValueError: see ``MultiHeadAttention.prune_heads``.
    """
    remaining, kv_remaining = _remaining_heads(heads, module.num_heads, module.kv_heads)
    check_not_split(module)
    check_own_parameters(module, *module.modules())
    if module.qk_norm == "rms_all":
        raise ValueError(
            "heads: this module has qk_norm='rms_all', which normalises all heads together, so no head can be removed"
        )
    for name, part in unknown_projections(module).items():
        raise ValueError(f"module: {name} is a {type(part).__name__}, expected nn.Linear, or a module with its forward")
    pruned = copy.deepcopy(module)
    q_rows, k_rows = _rows(remaining, module.head_dim), _rows(kv_remaining, module.head_dim)
    v_rows, out_columns = _rows(kv_remaining, module.v_head_dim), _rows(remaining, module.v_head_dim)
    if module.packed:
        q_end, k_end = module.splits[0], module.splits[0] + module.splits[1]
        _cut(pruned.qkv_proj, torch.cat([q_rows, k_rows + q_end, v_rows + k_end]))
    else:
        for name, rows in (("q", q_rows), ("k", k_rows), ("v", v_rows)):
            _cut(getattr(pruned, f"{name}_proj"), rows)
    _select(pruned.out_proj, "weight", out_columns, 1)
    pruned.out_proj.in_features = len(out_columns)
    if pruned.gate_proj is not None:
        _cut(pruned.gate_proj, out_columns)
    at = torch.tensor(remaining, device="cpu")
    if pruned.sinks is not None:
        _select(pruned, "sinks", at)
    if pruned.bias_k is not None:
        for name in ("bias_k", "bias_v"):
            _select(pruned, name, torch.tensor(kv_remaining, device="cpu"))
    if isinstance(pruned.position_bias, ALiBi):
        pruned.position_bias = ALiBi(len(remaining), tuple(pruned.position_bias.slopes[head] for head in remaining))
    elif isinstance(pruned.position_bias, RelativeBias):
        _select(pruned.position_bias, "weight", at, 1)
        pruned.position_bias.num_heads = len(remaining)
    pruned.num_heads, pruned.kv_heads = len(remaining), len(kv_remaining)
    pruned.splits = (len(q_rows), len(k_rows), len(v_rows))
    return pruned


def _remaining_heads(heads: Collection[int], num_heads: int, kv_heads: int) -> tuple[list[int], list[int]]:
    """Return the query heads and the key/value heads that remain."""
    check_type("heads", heads, Collection, "numbers of heads")
    if isinstance(heads, (str, bytes)):
        raise TypeError(f"heads: got {kind(heads)}, expected numbers of heads")
    gone: set[int] = set()
    for each in heads:
        head = as_whole(each)
        if head is None:
            raise TypeError(f"heads: got {kind(each)}, expected whole numbers")
        if not 0 <= head < num_heads:
            raise ValueError(f"heads: got {head}, expected numbers from 0 to {num_heads - 1}")
        gone.add(head)
    remaining = [head for head in range(num_heads) if head not in gone]
    if not remaining:
        raise ValueError(f"heads: got all {num_heads}, expected at least one to remain")
    group = num_heads // kv_heads
    left = [sum(head // group == kv for head in remaining) for kv in range(kv_heads)]
    kv_remaining = [kv for kv in range(kv_heads) if left[kv]]
    if len({left[kv] for kv in kv_remaining}) > 1:
        raise ValueError(
            f"heads: would leave {left} query heads for the {kv_heads} key/value heads, expected equally many for "
            f"each key/value head, or none: head h uses key/value head h // {group}"
        )
    return remaining, kv_remaining


def _rows(heads: list[int], width: int) -> Tensor:
    """Return the rows of a projection that belong to these heads."""
    first = torch.tensor(heads, device="cpu")[:, None] * width
    return (first + torch.arange(width, device="cpu")).flatten()


def _cut(linear: nn.Linear, rows: Tensor) -> None:
    """Reduce a projection to these rows."""
    _select(linear, "weight", rows)
    if weight_and_bias(linear)[1] is not None:
        _select(linear, "bias", rows)
    linear.out_features = len(rows)


def _select(owner: nn.Module, name: str, at: Tensor, axis: int = 0) -> None:
    before: nn.Parameter = getattr(owner, name)
    chosen = before.detach().index_select(axis, at.to(before.device))
    setattr(owner, name, nn.Parameter(chosen, requires_grad=before.requires_grad))

"""A module without some of its heads: what ``MultiHeadAttention.prune_heads`` returns."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from headscope._linear import check_own_parameters, unknown_projections
from headscope._support.arguments import as_whole, kind
from headscope.positions import ALiBi, RelativeBias


def pruned(module: Any, heads: Collection[int]) -> Any:
    """A copy of a ``MultiHeadAttention`` without these query heads, and without key/value heads that nobody uses then.

    Raises:
        TypeError, ValueError: see ``MultiHeadAttention.prune_heads``.
    """
    kept, kv_kept = _kept(heads, module.num_heads, module.kv_heads)
    check_own_parameters(module, *module.modules())
    if module.qk_norm == "rms_all":
        raise ValueError("heads: this module has qk_norm='rms_all', which normalises all heads together: none can go")
    for name, part in unknown_projections(module).items():
        raise ValueError(f"module: {name} is a {type(part).__name__}, wanted nn.Linear, or one with its forward")
    made = copy.deepcopy(module)
    q_rows, k_rows = _rows(kept, module.head_dim), _rows(kv_kept, module.head_dim)
    v_rows, out_columns = _rows(kv_kept, module.v_head_dim), _rows(kept, module.v_head_dim)
    if module.packed:
        q_end, k_end = module.splits[0], module.splits[0] + module.splits[1]
        _cut(made.qkv_proj, torch.cat([q_rows, k_rows + q_end, v_rows + k_end]))
    else:
        for name, rows in (("q", q_rows), ("k", k_rows), ("v", v_rows)):
            _cut(getattr(made, f"{name}_proj"), rows)
    _select(made.out_proj, "weight", out_columns, 1)
    made.out_proj.in_features = len(out_columns)
    if made.gate_proj is not None:
        _cut(made.gate_proj, out_columns)
    at = torch.tensor(kept, device="cpu")
    if made.sinks is not None:
        _select(made, "sinks", at)
    if made.bias_k is not None:
        for name in ("bias_k", "bias_v"):
            _select(made, name, torch.tensor(kv_kept, device="cpu"))
    if isinstance(made.position_bias, ALiBi):
        made.position_bias = ALiBi(len(kept), tuple(made.position_bias.slopes[head] for head in kept))
    elif isinstance(made.position_bias, RelativeBias):
        _select(made.position_bias, "weight", at, 1)
        made.position_bias.num_heads = len(kept)
    made.num_heads, made.kv_heads = len(kept), len(kv_kept)
    made.splits = (len(q_rows), len(k_rows), len(v_rows))
    return made


def _kept(heads: Collection[int], num_heads: int, kv_heads: int) -> tuple[list[int], list[int]]:
    """The query heads and the key/value heads that stay."""
    if isinstance(heads, (str, bytes)) or not isinstance(heads, Collection):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"heads: got {kind(heads)}, wanted numbers of heads")
    gone: set[int] = set()
    for each in heads:
        head = as_whole(each)
        if head is None:
            raise TypeError(f"heads: got {kind(each)}, wanted whole numbers")
        if not 0 <= head < num_heads:
            raise ValueError(f"heads: got {head}, wanted numbers from 0 to {num_heads - 1}")
        gone.add(head)
    kept = [head for head in range(num_heads) if head not in gone]
    if not kept:
        raise ValueError(f"heads: got all {num_heads}, wanted at least one to stay")
    group = num_heads // kv_heads
    left = [sum(head // group == kv for head in kept) for kv in range(kv_heads)]
    kv_kept = [kv for kv in range(kv_heads) if left[kv]]
    if len({left[kv] for kv in kv_kept}) > 1:
        raise ValueError(
            f"heads: would leave {left} query heads for the {kv_heads} key/value heads, wanted as many for each, or "
            f"none: head h uses key/value head h // {group}"
        )
    return kept, kv_kept


def _rows(heads: list[int], width: int) -> Tensor:
    """The rows of a projection that make these heads."""
    first = torch.tensor(heads, device="cpu")[:, None] * width
    return (first + torch.arange(width, device="cpu")).flatten()


def _cut(linear: nn.Linear, rows: Tensor) -> None:
    """Leave these rows of a projection."""
    _select(linear, "weight", rows)
    if linear.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
        _select(linear, "bias", rows)
    linear.out_features = len(rows)


def _select(owner: nn.Module, name: str, at: Tensor, axis: int = 0) -> None:
    before: nn.Parameter = getattr(owner, name)
    chosen = before.detach().index_select(axis, at.to(before.device))
    setattr(owner, name, nn.Parameter(chosen, requires_grad=before.requires_grad))

"""Selections of keys for random attention calls, drawn by Hypothesis."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from headscope import masks
from support import oracle, oracle_selection
from support.attention_fuzz import Case, mask_trees


class Drawn(NamedTuple):
    """What ``Observe(selected=...)`` takes, and which keys it is to select, boolean [B, H, Q, K]."""

    selected: Any
    table: Tensor


def sizes_of(case: Case) -> tuple[tuple[int, ...], int, int, int]:
    """The leading axes, H, Q and K."""
    lead = torch.broadcast_shapes(case.q.shape[:-3], case.k.shape[:-3], case.v.shape[:-3])
    return tuple(lead), case.q.shape[-3], case.q.shape[-2], case.k.shape[-2]


@st.composite
def selections(draw: st.DrawFn, case: Case) -> Drawn:
    """Indices, a boolean tensor, a mask or a function."""
    lead, heads, queries, keys = sizes_of(case)
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31 - 1)))
    sizes = (math.prod(lead), heads, queries, keys)
    kind = draw(st.sampled_from(("indices", "indices", "boolean", "mask")))
    if kind == "mask":
        selected, sees = draw(mask_trees(sizes, random))
        table, selected = oracle.table(sees, sizes), selected.at(queries, keys)  # whatever the positions
    elif kind == "boolean":
        whole = (*(lead or (1,)), heads, queries, keys)
        shape = [draw(st.sampled_from((1, size))) for size in whole]
        selected = torch.rand(shape[draw(st.integers(0, len(shape))) :], generator=random) < 0.5
        table = selected.expand(whole).reshape(sizes)
    else:
        n = draw(st.sampled_from((0, 1, 3, 12)))
        shape = [draw(st.sampled_from((1, size))) for size in lead or (1,)]
        shape += [draw(st.sampled_from((heads, case.k.shape[-3], 1))), draw(st.sampled_from((queries, queries, 1))), n]
        shape = shape[draw(st.integers(0, len(shape) - 2)) :]
        dtype = draw(st.sampled_from((torch.int64, torch.int32, torch.int8)))
        selected = torch.randint(-1, max(keys, 0), shape, generator=random).to(dtype)
        wide = selected if len(shape) <= 3 else selected.expand(*(lead or (1,)), *shape[-3:])
        table = oracle_selection.of_indices(wide.reshape(-1 if wide.numel() else sizes[0], *shape[-3:]), sizes)
    if draw(st.booleans()):
        made = selected
        return Drawn(lambda layer, q, k: made, table)
    return Drawn(
        masks.Dense(selected) if kind == "boolean" and len(lead) < 2 and draw(st.booleans()) else selected, table
    )

"""The rows of the Q x K matrix that a trace checks, with their operands."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.masks import Mask
from headscope.tracing._explanations import quantity
from headscope.tracing._invariants import Sample, sample, select
from headscope.tracing._own_values import OwnValues
from headscope.tracing._setup import Setting

PLANNED = 32  # queries of a sample whose mask plan is compared with its definition


@dataclass
class Matrix:
    """The checked rows of the Q x K matrix, with their operands; ``s`` changes from step to step."""

    at: Sample
    q: Tensor  # [b, h, i, D], in the dtype of the scores
    k: Tensor  # [b, h, K, D]
    v: Tensor  # [b, h, K, Dv]
    s: Tensor  # [b, h, i, K]
    allowed: Tensor  # [b, h, i, K]: the pairs that the mask leaves visible
    bias: Tensor | None  # broadcasts to [b, h, i, K]
    distance: Tensor | None  # [b, h, i, K]: the bias by distance, as the module computes it
    q_own: Tensor  # [b, h, i, D]: the queries of the key of bias_kv, which are not rotated
    rows: int  # number of rows of all batch entries and heads, checked or not
    reach: float = 0.0  # the largest magnitude that a bias adds to a score

    @property
    def scope(self) -> str:
        """The number of checked rows, as text; empty where all are checked."""
        return self.scope_of(len(self.at.i))

    def scope_of(self, queries: int) -> str:
        """Return that text where only the first ``queries`` of the sample were checked."""
        checked = len(self.at.b) * len(self.at.h) * queries
        return "" if self.at.whole else f" (on {checked:,} of {quantity(self.rows)} rows)"

    @property
    def visible(self) -> Tensor:
        """The pairs that mask and bias leave visible, [b, h, i, K]."""
        return self.allowed if self.bias is None else self.allowed & (self.bias != -torch.inf)


def sample_matrix(s: Setting, own: OwnValues, dtype: torch.dtype) -> Matrix:
    """Return the checked rows of the scores, in the dtype of the softmax."""
    heads = own.placed
    batch, number, queries, keys = s.sizes
    m = s.module
    at = sample(batch, number, queries, keys, m.head_dim + m.v_head_dim)
    shared = at.h // (number // m.kv_heads)
    q = select(heads.q, at.b, at.h, at.i).to(dtype)
    q_own = select(own.normed.q, at.b, at.h, at.i).to(dtype)
    k, v = (select(each, at.b).index_select(1, shared.to(each.device)).to(dtype) for each in heads[1:])
    shape = (len(at.b), len(at.h), len(at.i), keys)
    allowed = torch.ones((), dtype=torch.bool, device=q.device)
    if s.mask is not None:
        b, h, i = (index.to(q.device) for index in at[:3])
        allowed = s.mask.at(queries, keys).allows(
            b[:, None, None, None], h[:, None, None], i[:, None], torch.arange(keys, device=q.device)
        )
    bias = None
    if s.bias is not None:
        bias = s.bias[(None,) * (4 - s.bias.ndim)]  # [B, H, Q, K], or 1 where it repeats
        bias = select(bias, at.b, at.h, at.i)
    with torch.autocast(q.device.type, enabled=False):  # scores are computed in float32 or better
        scores = q @ k.transpose(-2, -1) * m.scale  # [b, h, i, K]
    allowed = allowed.to(q.device).expand(shape)
    distance = own.distance_of(at.b, at.h, at.i, s.sizes)
    return Matrix(at, q, k, v, scores.expand(shape), allowed, bias, distance, q_own, batch * number * queries)


def future_keys(s: Setting, matrix: Matrix) -> Tensor:
    """Return where a key comes after its query, computed from the positions only, [i, K]."""
    _, _, queries, keys = s.sizes
    position = matrix.at.i.to(matrix.s.device) + keys - queries
    return torch.arange(keys, device=matrix.s.device) > position[:, None]


def hidden_by_plan(mask: Mask, s: Setting, matrix: Matrix) -> Tensor:
    """Return the pairs that the mask's plan masks, for the first ``PLANNED`` queries of the sample, [b, h, i, K]."""
    batch, heads, queries, keys = s.sizes
    plan = mask.plan(*s.sizes)
    b, h = (index.to(matrix.s.device) for index in matrix.at[:2])
    runs = [slice(0, queries)] if matrix.at.whole else [slice(i, i + 1) for i in matrix.at.i[:PLANNED].tolist()]
    tiles: list[Tensor] = []
    for run in runs:
        tile = plan.tile(slice(0, batch), slice(0, heads), run, slice(0, keys)).to(matrix.s.device)
        tiles.append(~tile.expand(batch, heads, run.stop - run.start, keys)[b[:, None], h])  # [b, h, i, K]
    return torch.cat(tiles, 2)

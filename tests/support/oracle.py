"""Attention by its definition, in float64. Nothing of headscope is imported here.

``attention`` is slow and literal: each query row gets its own copy of the keys and values it may see, with zeros in
the place of those it may not, so what is hidden is never multiplied by anything. ``plain`` is what one would write by
hand in torch, in the dtype of its inputs: the yardstick of ``tolerance.assert_as_accurate``.

What may be seen is written down a second time, as predicates over numbers: ``sees(b, h, i, j) -> bool``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Predicate = Callable[[int, int, int, int], bool]


class Attended(NamedTuple):
    out: Tensor  # [..., H, Q, Dv]
    lse: Tensor  # [..., H, Q]
    weights: Tensor  # [..., H, Q, K]


# ---------------------------------------------------------------- what may be seen


def band(left: int | None, right: int | None, offset: int | Sequence[int]) -> Predicate:
    """Query i stands at i + offset and sees ``left`` positions back and ``right`` ahead."""

    def sees(b: int, h: int, i: int, j: int) -> bool:
        position = i + (offset if isinstance(offset, int) else offset[b])
        return (left is None or position - j <= left) and (right is None or j - position <= right)

    return sees


def prefix(n: int) -> Predicate:
    return lambda b, h, i, j: j < n


def key_lengths(lengths: Sequence[int]) -> Predicate:
    return lambda b, h, i, j: j < lengths[b]


def documents(q_ids: Sequence[Sequence[int]], k_ids: Sequence[Sequence[int]]) -> Predicate:
    return lambda b, h, i, j: q_ids[b][i] == k_ids[b][j]


def dense(tensor: Tensor, sizes: tuple[int, int, int, int]) -> Predicate:
    values = tensor.expand(sizes).tolist()
    return lambda b, h, i, j: values[b][h][i][j]


def both(one: Predicate, other: Predicate) -> Predicate:
    return lambda b, h, i, j: one(b, h, i, j) and other(b, h, i, j)


def either(one: Predicate, other: Predicate) -> Predicate:
    return lambda b, h, i, j: one(b, h, i, j) or other(b, h, i, j)


def table(sees: Predicate, sizes: tuple[int, int, int, int]) -> Tensor:
    """The predicate at every (b, h, i, j): boolean [B, H, Q, K]."""
    batch, heads, queries, keys = sizes
    cells = [sees(b, h, i, j) for b in range(batch) for h in range(heads) for i in range(queries) for j in range(keys)]
    return torch.tensor(cells, dtype=torch.bool).reshape(sizes)


# ---------------------------------------------------------------- attention


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor | None = None, bias: Tensor | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Attended:  # fmt: skip
    """out, lse and weights in float64, differentiable; the leading axes broadcast, ``seen`` is boolean."""
    q, k, v = spread(q.double(), k.double(), v.double())
    visible, bias = _visible(q, k, seen, None if bias is None else bias.double())
    rows = torch.where(visible.any(-1, keepdim=True), q, 0)  # [..., H, Q, D]
    keys = torch.where(visible[..., None], k[..., None, :, :], 0)  # [..., H, Q, K, D]
    values = torch.where(visible[..., None], v[..., None, :, :], 0)  # [..., H, Q, K, Dv]
    s = (rows[..., None, :] * keys).sum(-1) * (q.shape[-1] ** -0.5 if scale is None else scale)  # [..., H, Q, K]
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = s + torch.where(visible, bias, 0)
    sink = torch.tensor(-torch.inf).expand(s.shape[-3]) if sinks is None else sinks.double()
    sink = sink[:, None].expand(s.shape[:-1])  # [..., H, Q]
    top = torch.cat([torch.where(visible, s, -torch.inf), sink[..., None]], -1).amax(-1).detach()
    empty = ~visible.any(-1) & (sink == -torch.inf)  # without a visible key; with logits of -inf alone it is 0 / 0
    top = torch.where(empty, 0, top)[..., None]  # [..., H, Q, 1]
    e = torch.where(visible, torch.exp(torch.where(visible, s, top) - top), 0)
    total = e.sum(-1) + torch.exp(sink - top[..., 0])  # [..., H, Q]
    total = torch.where(empty, 1, total)
    p = e / total[..., None]
    lse = torch.where(empty, -torch.inf, top[..., 0] + torch.log(total))
    return Attended((p[..., None] * values).sum(-2), lse, p)


def plain(
    q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor | None = None, bias: Tensor | None = None,
    scale: float | None = None, softcap: float | None = None, sinks: Tensor | None = None,
) -> Attended:  # fmt: skip
    """The same by hand in torch, every step in the dtype of q; NaN and infinity in q, k, v count as zero."""
    q, k, v = spread(*(x.nan_to_num(0, 0, 0) for x in (q, k, v)))
    visible, bias = _visible(q, k, seen, None if bias is None else bias.to(q.dtype))
    s = (q @ k.transpose(-2, -1)) * (q.shape[-1] ** -0.5 if scale is None else scale)  # [..., H, Q, K]
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = (s + torch.where(visible, bias, 0)).masked_fill(~visible, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.to(s.dtype)[:, None, None].expand(*s.shape[:-1], 1)], -1)
    empty = (s == -torch.inf).all(-1)
    s = s.masked_fill(empty[..., None], 0)
    p = torch.softmax(s, -1).masked_fill(empty[..., None], 0)
    p = p if sinks is None else p[..., :-1]
    return Attended(p @ v, s.logsumexp(-1).masked_fill(empty, -torch.inf), p)


def spread(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with equal leading axes and equally many heads: query head h takes key/value head h // group."""
    lead = torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3])
    heads, kv_heads = q.shape[-3], max(k.shape[-3], v.shape[-3])
    of = [h * kv_heads // heads for h in range(heads)]
    k, v = (x.expand(*lead, kv_heads, *x.shape[-2:])[..., of, :, :] for x in (k, v))  # [..., H, K, D]
    return q.expand(*lead, *q.shape[-3:]), k, v


def _visible(q: Tensor, k: Tensor, seen: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """What may be seen, [..., H, Q, K], and the bias in that shape."""
    shape = torch.Size((*q.shape[:-1], k.shape[-2]))
    visible = torch.ones(shape, dtype=torch.bool) if seen is None else _to(shape, seen)
    bias = torch.zeros(shape, dtype=q.dtype) if bias is None else _to(shape, bias)
    return visible & (bias != -torch.inf), bias


def _to(shape: torch.Size, tensor: Tensor) -> Tensor:
    """A tensor over [B, H, Q, K], for any leading axes, or something that broadcasts to the shape."""
    if tensor.numel() == shape.numel():
        return tensor.reshape(shape)
    return tensor.reshape(tensor.shape[-len(shape) :]).expand(shape)

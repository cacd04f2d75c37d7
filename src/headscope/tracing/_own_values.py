"""The module's own values between its projections and its output projection, which a trace shows and checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from headscope import functional
from headscope._attend.prepare import prepare
from headscope.module import MultiHeadAttention, Placement, add_own_value, own_share
from headscope.tracing._setup import Setting


class Heads(NamedTuple):
    """Queries [B, H, Q, D], keys [B, Hkv, K, D] and values [B, Hkv, K, Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class OwnValues:
    """What the module computes from the projected heads.

    Attributes:
        normed: the heads after the norms of q and k.
        placed: the heads as they attend: normalised and rotated.
        placement: the arguments with which the module calls ``attention``.
        distance: the bias by distance, [H, Q, K] or [B, H, Q, K]; None without one.
        distance_reversed: whether the queries of ``distance`` are in reverse order.
    """

    normed: Heads
    placed: Heads
    placement: Placement
    distance: Tensor | None = None
    distance_reversed: bool = False

    def distance_of(self, b: Tensor, h: Tensor, i: Tensor, sizes: tuple[int, int, int, int]) -> Tensor | None:
        """Return the bias by distance of some rows, [b, h, i, K]."""
        if self.distance is None:
            return None
        b, h, i = (index.to(self.distance.device) for index in (b, h, i))
        rows = sizes[2] - 1 - i if self.distance_reversed else i
        return self.distance.expand(*sizes)[b[:, None, None], h[:, None], rows]  # gathers only these rows


def compute_own_values(setting: Setting, heads: Heads) -> OwnValues:
    """Run the module's own steps on the projected heads."""
    m = setting.module
    normed = heads
    if m.q_norm is not None and m.k_norm is not None:
        normed = Heads(m._normed(m.q_norm, heads.q), m._normed(m.k_norm, heads.k), heads.v)
    if m.plain:
        return OwnValues(normed, normed, Placement(*normed, setting.mask, setting.bias, None))
    cross = setting.source != "self"
    placement = m._prepare_heads(heads, setting.mask, setting.bias, setting.positions, None, cross=cross)
    q = placement.q.flip(-2) if placement.reversed else placement.q
    placed = Heads(q, placement.k, placement.v)
    if m.position_bias is None:
        return OwnValues(normed, placed, placement)
    alone = placement
    if setting.bias is not None:  # the placement has the sum of both
        alone = m._prepare_heads(heads, setting.mask, None, setting.positions, None, cross=cross)
    return OwnValues(normed, placed, placement, alone.bias, alone.reversed)


def attend(module: MultiHeadAttention, placement: Placement) -> tuple[Tensor, str]:
    """Return the output of each head, [B, H, Q, Dv], as the module computes it in eval, and the backend."""
    p, m = placement, module
    backend = "reproducible" if m.reproducible else None
    if m.bias_k is None or m.bias_v is None:
        out = functional.attention(
            p.q, p.k, p.v, mask=p.mask, bias=p.bias, scale=m.scale, softcap=m.softcap, sinks=m.sinks, backend=backend
        )
    else:
        rest = functional.attend(
            p.q, p.k, p.v, mask=p.mask, bias=p.bias, scale=m.scale, softcap=m.softcap, sinks=m.sinks
        )
        own = own_share(p.q if p.q_of_own is None else p.q_of_own, m.bias_k, rest.lse, m.scale, m.softcap)
        out = add_own_value(rest.out, own, m.bias_v, 0.0)
    prepared = prepare(
        p.q, p.k, p.v, p.mask, p.bias, m.sinks, m.scale, m.softcap, 0.0, m.bias_k is not None, backend
    )  # fmt: skip
    return (out.flip(-2) if p.reversed else out), prepared.backend.name


def take_sizes(heads: Heads) -> OwnValues:
    """Return heads without values, which norms and rotation do not change."""
    return OwnValues(heads, heads, Placement(*heads, None, None, None))

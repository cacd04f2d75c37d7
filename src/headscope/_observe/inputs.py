"""What an observation is made from.

``Request`` holds a checked call and options that are not checked yet. ``scene.build_scene`` checks them and returns the
tensors, ``Scene``; ``Reductions`` holds numbers only: what of each tile is to be reduced. Both forms of the pass over
the weights, ``portable`` and ``native_observer``, take these two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from headscope._attend.call import Call
from headscope._attend.interface import Inputs, accumulate_dtype
from headscope._attend.prepare import Prepared
from headscope.masks import Mask, Plan
from headscope.stats import Observe

BLOCK = 1 << 19  # logits in one block: 2 MiB of float32, about one core's second-level cache
HUGE = 1e30  # a bound on the logits below which float32 cannot overflow

Kind = Literal["self", "cross"]


@dataclass(frozen=True, slots=True)
class Reductions:
    """What of each tile of weights is reduced, in numbers.

    Attributes:
        rows: the row quantities; argmax: also the key of each row's largest weight.
        received: received and eligible of each key.
        bins: of the map; 0 = none.
        edges, top: how many of the largest weights of a head and of a row; 0 = none.
        windows: the distances of window_{w}.
        extra: the row quantities on request.
    """

    rows: bool
    argmax: bool
    received: bool
    bins: int
    edges: int
    top: int
    windows: tuple[float, ...]
    extra: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Continued(Observe):
    """What is asked of keys that come after others, which a sliding cache has dropped.

    Attributes:
        token_before: the token of the key before the first one, [] or [B].
    """

    token_before: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Scene:
    """The tensors of one observation. R counts the query rows that are looked at.

    Attributes:
        inputs: k [B, Hkv, K, D], bias and sinks as the backends take them, and all of q [B, H, Q, D].
        rows: the query index of each row, ascending.
        q, lse: of these rows, [B, H, R, D] and [B, H, R]; lse None = not given.
        may_count: boolean, broadcasts to [B, H, R]: not left out by ``rows`` and no padding; None = all. Empty rows and
            rows that are not finite have to be left out beside.
        line: the position of each row where keys stand at 0, 1, 2, …: int64 [B or 1, R]; None = positions are given,
            or there are none.
        q_at, k_at: given positions, float64 [B or 1, R, axes] and [B or 1, K, axes], NaN = has none; or None.
        own: the query's own key, int64 [B or 1, R], -1 = there is none; None in cross-attention.
        first: the first real keys of each batch entry, int64 [B or 1, n], -1 = there are fewer.
        ids: tokens of the keys [B, K], or None.
        id_before: of the key before the first one [B], or None.
        has_norms: the lengths of the value vectors are asked for.
        first_key: the absolute position of key 0, by which received and eligible are filed.
    """

    call: Call
    plan: Plan | None
    inputs: Inputs
    rows: Sequence[int]
    q: Tensor
    lse: Tensor | None
    may_count: Tensor | None
    line: Tensor | None
    q_at: Tensor | None
    k_at: Tensor | None
    own: Tensor | None
    first: Tensor
    ids: Tensor | None
    id_before: Tensor | None
    has_norms: bool
    first_key: int

    @cached_property
    def clean(self) -> bool:
        """Nothing is NaN, infinite or so large that a logit could overflow; on a CPU only: it would take waiting."""
        return _clean(self)

    @cached_property
    def norms(self) -> Tensor | None:
        """Lengths of the value vectors [B, Hkv, K]; None where they are not asked for."""
        return value_norms(self.inputs.v, self.call) if self.has_norms else None

    @property
    def whole(self) -> bool:
        """Whether every query row is looked at."""
        return isinstance(self.rows, range)


@dataclass(frozen=True, eq=False)
class Request:
    """One observation as it was requested: a checked call, and options that are not checked yet."""

    call: Call
    mask: Mask | None
    plan: Plan | None
    inputs: Inputs
    has_values: bool
    lse: Tensor | None
    q_pos: Tensor | None
    k_pos: Tensor | None
    kind: Kind
    real: Tensor | None
    """Which keys are not padding, boolean [B or 1, K]; None: those that some query sees."""
    what: Observe
    prepared: Prepared
    """The call as it was prepared: equal for calls of equal sizes, strides, dtypes and options."""
    has_place: bool
    """q, k and v are as they came, with a last stride of 1, so that further calls may take the short way."""


def value_norms(v: Tensor, call: Call) -> Tensor:
    """Of values [B, Hkv, K, Dv], in the dtype of the arithmetic."""
    return torch.linalg.vector_norm(v, dim=-1, dtype=accumulate_dtype(call.dtype))


def to_reductions(what: Observe) -> Reductions:
    """Return what has to be reduced for these options."""
    return Reductions(
        rows=what.row_stats,
        argmax=what.keep_rows,
        received=what.received,
        bins=what.map or 0,
        edges=what.edges,
        top=what.top,
        windows=tuple(what.windows),
        extra=tuple(what.extra),
    )


def _clean(scene: Scene) -> bool:
    call, inputs, norms = scene.call, scene.inputs, scene.norms
    if call.device != "cpu":
        return False
    if 0 in (call.batch, call.queries, call.keys):
        return True
    largest = [float(x.detach().abs().amax()) for x in (inputs.q, inputs.k)]
    factor = max(1.0, abs(call.scale), abs(call.scale) / (call.softcap or 1))
    if not largest[0] * largest[1] * call.head_dim * factor < HUGE:  # NaN neither
        return False
    if norms is not None and not float(norms.amax()) < HUGE:
        return False
    if inputs.sinks is not None and not float(inputs.sinks.amax()) < HUGE:
        return False
    return inputs.bias is None or float(inputs.bias.amax()) < HUGE

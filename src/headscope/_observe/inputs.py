"""The inputs of an observation.

``Request`` holds a checked call and options that are not checked yet. ``scene.build_scene`` checks them and returns the
tensors, ``Scene``; ``Reductions`` holds numbers only: the reductions of each tile. Both forms of the pass over the
weights, ``portable`` and ``native_observer``, take these two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import Tensor

from headscope._attend.call import Call
from headscope._attend.interface import Inputs
from headscope._attend.prepare import Prepared
from headscope.masks import Mask, Plan
from headscope.stats import Observe

BLOCK = 1 << 19  # logits in one block: 2 MiB of float32, about one core's second-level cache

Kind = Literal["self", "cross"]


@dataclass(frozen=True, slots=True)
class Reductions:
    """The reductions of each tile of weights, in numbers.

    Attributes:
        rows: the row quantities.
        argmax: the key of each row's largest weight.
        received: received and eligible of each key.
        bins: of the map; 0 = none.
        edges, top: the number of largest weights of a head and of a row; 0 = none.
        windows: the distances of window_{w}.
        extra: the optional row quantities.
        segments: the number of named segments; 0 = none.
        received_max: the largest weight of each key.
    """

    rows: bool
    argmax: bool
    received: bool
    bins: int
    edges: int
    top: int
    windows: tuple[float, ...]
    extra: tuple[str, ...] = ()
    segments: int = 0
    received_max: bool = False


class Whole(NamedTuple):
    """The sequence of which a call may have only some rows.

    Attributes:
        start: the place of the first query of the call.
        queries, keys: the numbers of its queries and keys; key 0 of the call is its first.
    """

    start: int
    queries: int
    keys: int


@dataclass(frozen=True, eq=False)
class Continued(Observe):
    """The context of keys whose predecessors a sliding cache has dropped.

    Attributes:
        token_before: the token of the key before the first one, [] or [B].
    """

    token_before: Tensor | None = None


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
    """Which keys are not padding, boolean [B or 1, K]; None = those that are visible to some query."""
    what: Observe
    prepared: Prepared
    """The prepared call: equal for calls of equal sizes, strides, dtypes and options."""
    has_place: bool
    """q, k and v are the caller's, with a last stride of 1, so further calls may take the fast path."""
    rows_at: tuple[int, int] | None = None
    """The place of the first query in a whole sequence, and the number of its queries."""
    nulls: bool = True
    """Whether to compute what chance gives: with a mask of tensors, half of the time of a short call."""
    in_whole_pass: bool = False
    """Whether a sample of rows is measured in a pass over all rows, of which the others do not count."""
    repeats: bool = False
    """Whether to retain what measures further calls like it: see ``repetition_of``."""


def to_reductions(what: Observe) -> Reductions:
    """Return the reductions for these options."""
    return Reductions(
        rows=what.row_stats,
        argmax=what.keep_rows,
        received=what.received,
        bins=what.map or 0,
        edges=what.edges,
        top=what.top,
        windows=tuple(what.windows),
        extra=tuple(what.extra),
        segments=0 if what.segments is None else len(what.segments.names),
        received_max=what.received_max,
    )

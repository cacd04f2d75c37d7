"""Observing by the native kernels: the second step of ``_observe``, on a CPU.

One pass over the weights. Where the call attends natively too, measuring rides in that pass: row quantities are sums
beside those of the softmax. What keys receive, and the map, need weights that are normalised; for these a block of rows
keeps its weights until its rows are known whole, and is swept through once more. Edges need the largest weight of each
row only: the rows they can be in are looked at again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headscope._backends import Inputs, accumulate_dtype, cpu
from headscope._call import Call
from headscope._observe import Observed, row_names
from headscope._observe_edges import Candidates
from headscope._observe_scene import Scene, Work
from headscope._observe_tile import ROUNDING
from headscope._stats_parts import Edges, HeadMap, Moments, MomentsTable, Packed, histogram_edges

QUANTITIES = (
    "lse", "max_logit", "entropy", "normalized_entropy", "max_weight", "effective_keys", "mass", "first", "distance",
    "self", "previous", "next", "duplicate", "induction", "value_norm", "chance",
)  # fmt: skip
"""In the order of ``Quantity`` in csrc/attention.h."""

MOST_WINDOWS, MOST_FIRST = 8, 16  # as there
MOST_KEPT_EDGES = (
    256  # of a head, that each share of the work keeps beside the map; with more, rows are looked at again
)

Address = int
"""Of memory; 0 = there is none."""


def refuses_call(call: Call) -> list[str]:
    """Why the native kernels cannot observe such a call, whatever is asked of it."""
    reasons = cpu.refuses(call)
    if call.form == "traced":
        reasons.append("torch.compile: a compiler sees these kernels as operators, of which none observes")
    if 0 in (call.batch, call.heads, call.queries, call.keys, call.head_dim):
        reasons.append("sizes: one is 0, so that there is nothing to measure")
    return reasons


def refuses(work: Work, scene: Scene) -> list[str]:
    """Why the native kernels cannot observe this; the portable form then does. docs/kernels.md explains each."""
    reasons = refuses_call(scene.call)
    if not scene.rows:
        reasons.append("rows: none is to be looked at")
    if scene.q_at is not None:
        reasons.append("positions: given ones; these kernels count keys from 0")
    if len(work.windows) > MOST_WINDOWS:
        reasons.append(f"windows: more than {MOST_WINDOWS}")
    if scene.first.shape[1] > MOST_FIRST:
        reasons.append(f"first: more than {MOST_FIRST} keys")
    if scene.ids is not None and scene.ids.numel() and not _fits(scene.ids):
        reasons.append("tokens: ids beyond 32 bits")
    return reasons


def _fits(ids: Tensor) -> bool:
    least, most = (int(x) for x in torch.aminmax(ids))
    return least >= -(2**31) and most < 2**31


class Attending(NamedTuple):
    """What the first pass fills beside the statistics, if it attends as well: out [B, H, Q, Dv] and lse [B, H, Q]."""

    out: Tensor
    lse: Tensor

    @staticmethod
    def empty(call: Call) -> Attending:
        """Not filled yet."""
        lse = torch.empty(call.batch, call.heads, call.queries, dtype=accumulate_dtype(call.dtype))
        return Attending(cpu.rows_like(call, call.queries, call.heads, call.v_head_dim), lse)


class _Columns(NamedTuple):
    """What is summed over rows.

    Attributes:
        received, eligible: float64 and int64 [H, K], or None.
        sum, max, pairs, at: of the map [H, n, n], at int32 with batch entry, query and key; or None.
    """

    received: Tensor | None
    eligible: Tensor | None
    sum: Tensor | None
    max: Tensor | None
    pairs: Tensor | None
    at: Tensor | None

    @staticmethod
    def empty(work: Work, call: Call) -> _Columns:
        """Not filled yet."""
        keys, cells = (call.heads, call.keys), (call.heads, work.bins, work.bins)
        double, whole = torch.float64, torch.int64
        received = (torch.empty(keys, dtype=double), torch.empty(keys, dtype=whole)) if work.received else (None, None)
        if not work.bins:
            return _Columns(*received, None, None, None, None)
        sums = (torch.empty(cells, dtype=double), torch.empty(cells, dtype=double))
        return _Columns(*received, *sums, torch.empty(cells, dtype=whole), torch.empty((*cells, 3), dtype=torch.int32))

    def map(self) -> HeadMap | None:
        """The map, if there is one."""
        if self.sum is None or self.pairs is None or self.max is None or self.at is None:
            return None
        return HeadMap(self.sum, self.pairs, self.max, self.at)


class Ready:
    """An observation that is described once, and can be made of any tensors of the same sizes, dtypes and strides.

    Whatever else it is made from (positions, masks, a given lse, rows) is that of the scene.

    Attributes:
        rows: as in ``Scene``.
        first_key: likewise.
    """

    def __init__(self, work: Work, scene: Scene) -> None:
        call = scene.call
        self.call = call
        self.work = work
        self.rows = scene.rows
        self.first_key = scene.first_key
        self.shape = (call.batch, call.heads, len(scene.rows))
        self.dtype = accumulate_dtype(call.dtype)
        self.later = work.edges > (MOST_KEPT_EDGES if work.bins else 0)
        self.names = tuple(row_names(work, scene) if work.rows else ["max_weight", "max_logit"] if self.later else [])
        self.borders = borders_of(self.names, self.dtype) if work.rows else None
        self.native, self.held = self._described(scene)

    def _described(self, scene: Scene) -> tuple[Any, Any]:
        """As the extension knows it; and what has to stay alive for it."""
        address, work = cpu.address, self.work
        described = cpu.describe(self.call, scene.plan, scene.inputs)
        index = None if scene.whole else torch.tensor(list(scene.rows))
        places = {name: place for place, name in enumerate(self.names)}
        line, own, ids = (0, 0), (0, 0), None
        if scene.line is not None:
            line = _by_batch(scene.line)
            if scene.ids is not None and scene.own is not None:
                own, ids = _by_batch(scene.own), scene.ids.to(torch.int32).contiguous()
        windows = [
            (float(w), places.get(f"window_{w:g}", -1), places.get(f"streaming_{w:g}", -1))
            for w in (work.windows if line[0] else ())
        ]
        may_count, strides = scene.may_count, (0, 0, 0)
        if may_count is not None:
            strides = tuple(0 if n == 1 else s for n, s in zip(may_count.shape, may_count.stride(), strict=True))
        given = None if scene.lse is None else scene.lse.to(self.dtype).contiguous()
        made = cpu.native.Observation(
            described.native, (len(scene.rows), address(index)), [places.get(name, -1) for name in QUANTITIES], windows,
            line, own, address(ids), (*_by_batch(scene.first), scene.first.shape[1]), (address(may_count), *strides),
            address(given), 0.0 if scene.lse is None else ROUNDING[scene.lse.dtype],
            max(1, work.top) if work.top or work.argmax else 0, work.bins, work.edges, self.later,
            (0, 0, 0) if self.borders is None else (len(self.names), self.borders.data_ptr(), self.borders.shape[1]),
        )  # fmt: skip
        mine = described.held[3:]  # q, k and v will be others
        return made, (mine, index, scene.line, scene.own, ids, scene.first, may_count, given)


def observe_rows(ready: Ready, inputs: Inputs, attending: Attending | None = None) -> Observed | None:
    """Everything that was asked for; None where a row that sees keys is not finite, which the portable form untangles.

    Args:
        ready: what is to be made of them.
        inputs: q, k and v.
        attending: what to fill beside; then all rows have to be looked at.
    """
    call, work, names, shape = ready.call, ready.work, ready.names, ready.shape
    counted = torch.empty(shape, dtype=torch.bool)
    size = math.prod(shape) * ready.dtype.itemsize * len(names)
    keeps = work.rows and work.argmax
    room = torch.empty(size, dtype=torch.uint8) if keeps else _room.take(size)
    values = room.data_ptr()
    top_at, top = (0, 0), None
    if work.top or work.argmax:
        most = (*shape, max(1, work.top))
        top = Candidates(torch.empty(most, dtype=ready.dtype), torch.empty(most, dtype=torch.int64))
        top_at = (top.p.data_ptr(), top.at.data_ptr())
    columns = _Columns.empty(work, call)
    edges, edges_at = None, (0, 0)
    if work.edges:
        edges = Edges(
            torch.empty(call.heads, work.edges, dtype=torch.float64),
            torch.empty(call.heads, work.edges, 4, dtype=torch.int64),
        )
        edges_at = (edges.p.data_ptr(), edges.at.data_ptr())
    packed = None if ready.borders is None else Packed.empty(len(names), call.heads, ready.borders.shape[1])
    packed_at = (0, 0) if packed is None else (packed.whole.data_ptr(), packed.numbers.data_ptr())
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in inputs[:3])
    into = (0, 0) if attending is None else (attending.out.data_ptr(), attending.lse.data_ptr())
    places = (
        q.data_ptr(), k.data_ptr(), v.data_ptr(), *into, values, counted.data_ptr(), *top_at,
        *map(cpu.address, columns), *edges_at, *packed_at,
    )  # fmt: skip
    threads = torch.get_num_threads()
    if not cpu.native.look(ready.native, places, threads):
        return None
    if ready.later:
        cpu.native.edges(ready.native, places, names.index("max_weight"), names.index("max_logit"), threads)
    moments: Mapping[str, Moments] = {}
    rows_counted = None
    if packed is not None:
        moments = MomentsTable(names, packed)
        rows_counted = packed.whole[: call.heads]  # rows that have an lse
    kept: dict[str, Tensor] = {}
    if keeps:
        kept = dict(zip(names, room.view(ready.dtype).view(len(names), *shape).unbind(), strict=True))
    else:
        _room.give_back(room)
    if work.argmax and top is not None:
        kept["argmax"] = top.at[..., 0]
    top = top if work.top else None
    broken = torch.zeros(call.heads, dtype=torch.int64)  # else the pass had ended above
    return Observed(
        kept, counted, broken, columns.received, columns.eligible, columns.map(), edges, top, moments, rows_counted
    )


def _by_batch(x: Tensor) -> tuple[Address, int]:
    """The address of [B or 1, n], and how far batch entries lie apart."""
    assert (x.dtype, x.stride(-1)) == (torch.int64, 1)  # so _observe_scene makes them
    return x.data_ptr(), 0 if x.shape[0] == 1 else x.stride(0)


class _Room(threading.local):
    """Memory for row quantities that become moments and are forgotten: a thread's next call finds it warm.

    Within a call there may be another, by a signal handler: it finds none, and makes its own.
    """

    MOST = 1 << 24  # bytes that are kept
    kept: Tensor | None = None

    def take(self, size: int) -> Tensor:
        """At least so many bytes."""
        found, self.kept = self.kept, None
        return found if found is not None and found.numel() >= size else torch.empty(size, dtype=torch.uint8)

    def give_back(self, room: Tensor) -> None:
        """To be taken again."""
        if room.numel() <= self.MOST:
            self.kept = room


_room = _Room()


@cache
def borders_of(names: tuple[str, ...], dtype: torch.dtype) -> Tensor:
    """From where on values are in each bin of a histogram, [names, bins]; filled up with NaN.

    An edge is no number of the dtype: its border is the least one that is not below it, with which values compare as
    they do with the edge. The first bin takes what is below it, too.
    """
    edges = [(-math.inf, *histogram_edges(name)[1:-1]) for name in names]
    most = max(len(x) for x in edges)
    exact = torch.tensor([[*x, *[math.nan] * (most - len(x))] for x in edges], dtype=torch.float64)
    border = exact.to(dtype)
    return torch.where(border.double() < exact, border.nextafter(torch.tensor(math.inf, dtype=dtype)), border)

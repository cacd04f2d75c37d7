"""Observing by the native kernels: the second step of ``_observe``, on a CPU.

One pass over the weights. If the call attends natively too, measuring shares that pass: row quantities are sums next to
those of the softmax. ``received`` and the map require normalised weights; for these a block of rows stores its weights
until its rows are complete, and is then read again. Edges require only the largest weight of each row: the rows that
can contain them are recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headscope._attend.backends import native
from headscope._attend.call import Call
from headscope._attend.interface import Inputs, accumulate_dtype, readable
from headscope._observe.block_weights import ROUNDING
from headscope._observe.edges import Candidates
from headscope._observe.exchange import Exchange, to_exchange
from headscope._observe.inputs import Reductions, to_reductions
from headscope._observe.portable import row_names
from headscope._observe.result import Observed
from headscope._observe.scene import Scene
from headscope._observe.segment_ids import NativeSegments
from headscope.stats import Observe, histogram_edges
from headscope.stats._layer import Edges, HeadMap, Moments, MomentsTable, Nulls, Packed

QUANTITIES = (
    "lse", "max_logit", "entropy", "normalized_entropy", "max_weight", "effective_keys", "mass", "first", "distance",
    "self", "previous", "next", "duplicate", "induction", "value_norm", "chance", "second_weight",
)  # fmt: skip
"""In the order of ``Quantity`` in csrc/interface/attention.h."""

MAX_WINDOWS, MAX_FIRST_KEYS = 8, 16  # as there
MAX_MAP_EDGES = 256  # of a head, computed in the pass of the map; more require a second pass over few rows

Address = int
"""An address in memory; 0 = none."""


def refuses_call(call: Call) -> list[str]:
    """Return why the native kernels cannot observe such a call, whatever it requests."""
    reasons = native.refuses(call)
    if call.form == "traced":
        reasons.append("torch.compile: compiled code calls the native kernels as operators, which do not observe")
    if 0 in (call.batch, call.heads, call.queries, call.keys, call.head_dim):
        reasons.append("sizes: one of them is 0")
    return reasons


def refuses(reductions: Reductions, scene: Scene) -> list[str]:
    """Return why the native kernels cannot observe this: docs/concepts/kernels.md explains each reason."""
    reasons = refuses_call(scene.call)
    if not scene.rows:
        reasons.append("rows: none is selected")
    if scene.q_at is not None:
        reasons.append("positions: were specified; the native kernels count keys from 0")
    if len(reductions.windows) > MAX_WINDOWS:
        reasons.append(f"windows: more than {MAX_WINDOWS}")
    if scene.first.shape[1] > MAX_FIRST_KEYS:
        reasons.append(f"first: more than {MAX_FIRST_KEYS} keys")
    if scene.ids is not None and scene.ids.numel() and not _fits(scene.ids):
        reasons.append("tokens: ids exceed 32 bits")
    if missing := [name for name in reductions.extra if name not in QUANTITIES]:
        reasons.append(f"extra: {', '.join(missing)}, which the native kernels do not compute")
    if scene.id_before is not None:
        reasons.append("tokens: include one for the key before the first, which the native kernels do not read")
    return reasons


def _names(reductions: Reductions, scene: Scene) -> list[str]:
    """Return the row quantities that the kernels measure: the recall of selected keys takes a pass of its own."""
    return row_names(reductions, replace(scene, selection=None))


def _fits(ids: Tensor) -> bool:
    least, most = (int(x) for x in torch.aminmax(ids))
    return least >= -(2**31) and most < 2**31


PLACES = (
    "counted", "values", "top_weight", "top_key", "received", "eligible", "sum", "max", "pairs", "at",
    "edge_weight", "edge_at", "whole", "numbers", "received_max", "segment_sum", "segment_count", "nulls",
    "segment_nulls",
)  # fmt: skip
"""The results of a call, in the order of ``Place`` in csrc/python/observation.h."""


class _Part(NamedTuple):
    """One result, in the memory that all results share."""

    offset: int
    bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, memory: Tensor) -> Tensor:
        """Return a view with its own storage: torch does not save a storage with two dtypes."""
        storage: Any = memory.untyped_storage()[self.offset : self.offset + self.bytes]
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(storage).view(self.shape)


class Ready:
    """An observation described once, for any tensors of the same sizes, dtypes and strides.

    All other inputs (positions, masks, a specified lse, rows) are those of the scene.

    Attributes:
        what: the options.
        rows: as in ``Scene``.
        first_key, whole_sequence: likewise.
        exchange: what the nulls of the rows depend on; None without nulls.
        form: that of the results: equal for calls that differ in their numbers of queries and keys, without segments.
    """

    def __init__(self, what: Observe, scene: Scene, nulls: bool = True, exchange: Exchange | None = None) -> None:
        call, self.reductions = scene.call, to_reductions(what)
        self.call = call
        self.what = what
        self.rows = scene.rows
        self.first_key = scene.first_key
        self.whole_sequence = scene.whole_sequence
        self.dtype = accumulate_dtype(call.dtype)
        later = self.reductions.edges > (MAX_MAP_EDGES if self.reductions.bins else 0)
        only = ["max_weight", "max_logit"] if later else []
        self.names = tuple(_names(self.reductions, scene) if self.reductions.rows else only)
        self.borders = borders_of(self.names, self.dtype) if self.reductions.rows else None
        of_segments = scene.key_segments, scene.row_segments, scene.first
        self.segments = NativeSegments.of(*of_segments, self.reductions.segments)
        self.parts, self.size, room = self._laid_out()
        edges = (self.reductions.edges, *((self.names.index(x) if later else -1) for x in ("max_weight", "max_logit")))
        if self.reductions.rows and nulls and exchange is None:
            exchange = to_exchange(self.reductions, scene, self.names, lambda even: _measure(what, even))
        self.exchange = exchange
        self.form = self.reductions, self.names, call.heads, self.dtype, self.first_key, exchange is None
        self.observation, self.held = self._to_observation(scene, edges, room, exchange)
        self._has_mask = scene.plan is not None and scene.plan.rest is not None  # a tensor, perhaps with all pairs
        self._light: Ready | None = None

    @property
    def light(self) -> Ready:
        """The same for its results only: without the tensor of a mask, which a recording is not to hold."""
        if not self._has_mask:
            return self
        if self._light is None:
            self._light = copy(self)
            self._light.held, self._light._has_mask = None, False
        return self._light

    def _laid_out(self) -> tuple[dict[str, _Part], int, int]:
        """Return the places of the results; the bytes of results, and of scratch memory, which comes last."""
        call, reductions = self.call, self.reductions
        rows, keys = (call.batch, call.heads, len(self.rows)), (call.heads, call.keys)
        cells = (call.heads, reductions.bins, reductions.bins)
        double, whole = torch.float64, torch.int64
        stay: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        passing = {"counted": (torch.bool, rows), "values": (self.dtype, (len(self.names), *rows))}
        if reductions.top or reductions.argmax:
            most = (*rows, max(1, reductions.top))
            stay |= {"top_weight": (self.dtype, most), "top_key": (whole, most)}
        if reductions.top or reductions.argmax or not reductions.rows:
            stay["counted"] = passing.pop("counted")
        if reductions.rows and reductions.argmax:
            stay["values"] = passing.pop("values")
        if reductions.received or reductions.received_max:
            stay |= {"received": (double, keys), "eligible": (whole, keys)}
        if reductions.received_max:
            stay["received_max"] = (double, keys)
        if self.segments is not None:
            count = self.segments.size
            stay |= {"segment_sum": (double, (call.heads, count, count)), "segment_count": (whole, (call.heads, count))}
        if reductions.bins:
            stay |= {"sum": (double, cells), "max": (double, cells), "pairs": (whole, cells)}
            stay["at"] = (torch.int32, (*cells, 3))
        if reductions.edges:
            stay |= {
                "edge_weight": (double, (call.heads, reductions.edges)),
                "edge_at": (whole, (call.heads, reductions.edges, 4)),
            }
        if self.borders is not None:
            counts = len(self.names) * call.heads * (1 + self.borders.shape[1])
            stay |= {"whole": (whole, (counts,)), "numbers": (double, (4, len(self.names), call.heads))}
            stay["nulls"] = (double, (2, len(self.names), call.heads))
            if size := reductions.segments:
                stay["segment_nulls"] = (double, (2, call.heads, size, size))
        parts: dict[str, _Part] = {}
        size = end = 0
        for name, (dtype, shape) in (stay | passing).items():
            parts[name] = _Part(end, math.prod(shape) * dtype.itemsize, dtype, shape)
            end += (parts[name].bytes + 63) // 64 * 64
            size = end if name in stay else size
        return parts, size, end - size

    def _to_observation(
        self, scene: Scene, edges: tuple[int, ...], room: int, exchange: Exchange | None
    ) -> tuple[Any, Any]:
        """Return the extension's ``Observation``, and the objects that must stay alive for it.

        Its arguments, after the call: rows and the address of their indices; the place of each of ``QUANTITIES`` among
        the outputs, -1 for none; windows with the places of their share and of streaming; address and batch stride of
        the key positions, and of each query's own key; token ids; address, batch stride and number of the first keys;
        address and strides of ``may_count``; lse, and its tolerance; number of largest weights; bins of the map; edges
        of its bins; number, address and length of the histograms' borders; the offset of each of ``PLACES``, -1 for
        none; the size of the result, and of the scratch memory after it; number of segments, addresses of those of keys
        and of the ends of their runs, their batch stride, address and batch stride of those of rows.
        """
        address, reductions = native.address, self.reductions
        kernel_call = native.to_kernel_call(self.call, scene.plan, scene.inputs)
        index = None if scene.whole else torch.tensor(list(scene.rows), device="cpu")
        places = {name: place for place, name in enumerate(self.names)}
        line, own, ids = (0, 0), (0, 0), None
        line_at, own_at, first, may_count = (
            x if x is None else readable(x) for x in (scene.line, scene.own, scene.first, scene.may_count)
        )
        assert first is not None  # it is a part of every scene
        if line_at is not None:
            line = _by_batch(line_at)
            if scene.ids is not None and own_at is not None:
                own, ids = _by_batch(own_at), readable(scene.ids.to(torch.int32)).contiguous()
        windows = [
            (float(w), places.get(f"window_{w:g}", -1), places.get(f"streaming_{w:g}", -1))
            for w in (reductions.windows if line[0] else ())
        ]
        strides = (0, 0, 0)
        if may_count is not None:
            strides = tuple(0 if n == 1 else s for n, s in zip(may_count.shape, may_count.stride(), strict=True))
        lse = None if scene.lse is None else readable(scene.lse.to(self.dtype)).contiguous()
        observation = native.extension.Observation(
            kernel_call.call, (len(scene.rows), address(index)), [places.get(name, -1) for name in QUANTITIES], windows,
            line, own, address(ids), (*_by_batch(first), first.shape[1]), (address(may_count), *strides),
            address(lse), 0.0 if scene.lse is None else ROUNDING[scene.lse.dtype],
            max(1, reductions.top) if reductions.top or reductions.argmax else 0, reductions.bins, edges,
            (0, 0, 0) if self.borders is None else (len(self.names), self.borders.data_ptr(), self.borders.shape[1]),
            [self.parts[name].offset if name in self.parts else -1 for name in PLACES], self.size, room,
            (0, 0, 0, 0, 0, 0) if self.segments is None else self.segments.arguments(),
            scene.whole_sequence,
        )  # fmt: skip
        mine = kernel_call.held[3:]  # q, k and v change from call to call
        of_factors = None
        if exchange is not None:
            factors, of_factors = _to_factors(self.names, exchange)
            observation.sum_exchanges(factors)
            if self.segments is not None and exchange.segments is not None:
                between, held = self.segments.exchange_arguments(exchange.segments)
                observation.sum_between_segments(between)
                of_factors = of_factors, held
        return observation, (mine, index, line_at, own_at, ids, first, may_count, lse, of_factors)

    @cached_property
    def attend_again(self) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor] | None]:
        """``repeater`` of this observation."""
        return repeater(self)

    @cached_property
    def observe_again(self) -> Callable[[Tensor, Tensor, Tensor], Tensor | None]:
        """``observer`` of this observation."""
        return observer(self)

    @cached_property
    def results(self) -> dict[str, _Part]:
        """The places of the results that stay, in the memory of a call."""
        return {name: part for name, part in self.parts.items() if part.offset < self.size}

    def observed(self, memory: Tensor) -> Observed:
        """Return the results, as views of their memory."""
        call, reductions = self.call, self.reductions
        at = {name: part.of(memory) for name, part in self.results.items()}
        moments: Mapping[str, Moments] = {}
        if "whole" in at:
            moments = MomentsTable(self.names, Packed(at["whole"], at["numbers"]))
        rows = dict(zip(self.names, at["values"].unbind(), strict=True)) if "values" in at else {}
        if reductions.argmax:
            rows["argmax"] = at["top_key"][..., 0]
        return Observed(
            rows,
            at.get("counted"),
            torch.zeros(call.heads, dtype=torch.int64, device="cpu"),  # broken; else there would be none
            at.get("received") if reductions.received else None,
            at.get("eligible") if reductions.received else None,
            HeadMap(at["sum"], at["pairs"], at["max"], at["at"]) if reductions.bins else None,
            Edges(at["edge_weight"], at["edge_at"]) if reductions.edges else None,
            Candidates(at["top_weight"], at["top_key"]) if reductions.top else None,
            moments,
            at["whole"][: call.heads] if "whole" in at else None,  # rows that have an lse
            None if self.segments is None else self.segments.joined(at["segment_sum"], at["segment_count"]),
            at["received_max"].masked_fill(at["eligible"] == 0, math.nan) if reductions.received_max else None,
            Nulls(self.names, at["nulls"]) if "nulls" in at else None,
            at.get("segment_nulls"),
        )


def pool_results(ready: Ready, several: Sequence[tuple[Ready, Tensor]]) -> Tensor:
    """Return the memory of the results of several calls together, as if one call had them all.

    Args:
        ready: the observation of one with as many keys as any of them.
        several: the observations and results, of one ``Ready.form``.
    """
    together = torch.empty(ready.size, dtype=torch.uint8, device="cpu")
    results = [(each.observation, memory.data_ptr()) for each, memory in several]
    native.extension.pool_into(ready.observation, together.data_ptr(), results)
    return together


Attending = tuple[Tensor, Tensor]
"""Outputs in addition to the statistics, if the kernels also attend: out [B, H, Q, Dv] and lse [B, H, Q]."""


def attending(call: Call) -> Attending:
    """Return empty outputs."""
    rows = (call.batch, call.heads, call.queries)
    lse = torch.empty(rows, dtype=accumulate_dtype(call.dtype), device="cpu")
    return native.rows_like(call, call.queries, call.heads, call.v_head_dim), lse


def observe_natively(ready: Ready, inputs: Inputs, into: Attending | None = None) -> Observed | None:
    """Return the results of ``observe_into_memory``."""
    memory = observe_into_memory(ready, inputs, into)
    return None if memory is None else ready.observed(memory)


def observe_into_memory(ready: Ready, inputs: Inputs, into: Attending | None = None) -> Tensor | None:
    """Return the memory of all results, for ``Ready.observed``.

    Returns None if a row with visible keys is not finite, which the portable form handles.

    Args:
        ready: the observation.
        inputs: q, k and v.
        into: outputs to fill in the same pass, which requires all rows.
    """
    q, k, v = native.unit_stride(inputs.q), native.unit_stride(inputs.k), native.unit_stride(inputs.v)
    out, lse = (0, 0) if into is None else (x.data_ptr() for x in into)
    memory = torch.empty(ready.size, dtype=torch.uint8, device="cpu")
    at = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out, lse, memory.data_ptr())
    finite = native.extension.observe_into(ready.observation, *at, torch.get_num_threads())
    return memory if finite else None


def repeater(ready: Ready) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor] | None]:
    """Return a fast path to attend and observe again: out, lse, and the memory for ``Ready.observed``.

    It takes q, k and v with the sizes, dtypes and strides of the call, the last stride 1; and returns None if
    ``observe_natively`` does. Every line costs time: after a call of some milliseconds Python's code and data are no
    longer in the caches.
    """
    observe_into, described, threads, empty = (
        native.extension.observe_into,
        ready.observation,
        torch.get_num_threads,
        torch.empty_like,
    )
    like, lse_like = (native.without_memory(x) for x in attending(ready.call))
    memory_like = _without_results(ready)

    def repeat_call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        out, lse, memory = empty(like), empty(lse_like), empty(memory_like)
        at = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr(), memory.data_ptr())
        try:
            finite = observe_into(described, *at, threads())
        except ValueError:  # one has no memory: ``observe_natively`` materialises it, or raises
            return None
        return (out, lse, memory) if finite else None

    return repeat_call


def observer(ready: Ready) -> Callable[[Tensor, Tensor, Tensor], Tensor | None]:
    """Return a fast path to observe again: the memory for ``Ready.observed``; otherwise as ``repeater``."""
    observe_into, described, threads = native.extension.observe_into, ready.observation, torch.get_num_threads
    empty, memory_like = torch.empty_like, _without_results(ready)

    def repeat_call(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        memory = empty(memory_like)
        try:
            finite = observe_into(
                described, q.data_ptr(), k.data_ptr(), v.data_ptr(), 0, 0, memory.data_ptr(), threads()
            )
        except ValueError:  # as in ``repeater``
            return None
        return memory if finite else None

    return repeat_call


def _without_results(ready: Ready) -> Tensor:
    return native.without_memory(torch.empty(ready.size, dtype=torch.uint8, device="cpu"))


def _by_batch(x: Tensor) -> tuple[Address, int]:
    """Return the address of [B or 1, n], and its batch stride."""
    assert (x.dtype, x.stride(-1)) == (torch.int64, 1)  # as build_scene makes them
    return x.data_ptr(), 0 if x.shape[0] == 1 else x.stride(0)


def _measure(what: Observe, even: Scene) -> tuple[Mapping[str, Tensor], Tensor] | None:
    """Return the row quantities of even rows, and their output."""
    options: dict[str, Any] = {"received": False, "map": None, "edges": 0, "top": 0, "extra": (), "keep_qk": False}
    into = attending(even.call)
    observed = observe_natively(Ready(replace(what, keep_rows=True, **options), even, nulls=False), even.inputs, into)
    return None if observed is None else (observed.rows, into[0])


def _to_factors(names: tuple[str, ...], exchange: Exchange) -> tuple[list[int], Any]:
    """Return what the kernels read to sum nulls, and the tensors that must stay alive for it.

    The numbers: the address of each name's index among the factors (-1 = it needs none, -2 = it has no null);
    addresses of means and spreads, and their strides of a quantity, batch entry and head; the places of mass, chance
    and effective_keys among the outputs.
    """
    index = torch.tensor([_factor(name, exchange) for name in names], dtype=torch.int64, device="cpu")
    mean, spread = (readable(x).contiguous() for x in (exchange.mean, exchange.spread))
    _, batch, heads, rows = mean.shape
    strides = (batch * heads * rows, 0 if batch == 1 else heads * rows, 0 if heads == 1 else rows)
    places = (names.index(name) for name in ("mass", "chance", "effective_keys"))
    return [index.data_ptr(), native.address(mean), native.address(spread), *strides, *places], (index, mean, spread)


def _factor(name: str, exchange: Exchange) -> int:
    if name in exchange.names:
        return exchange.names.index(name)
    return -1 if name in exchange.single else -2


@cache
def borders_of(names: tuple[str, ...], dtype: torch.dtype) -> Tensor:
    """Return the lower border of each bin of a histogram, [names, bins]; padded with NaN.

    An edge may not be a number of the dtype: its border is the smallest number that is not below it, so values compare
    with both alike. The first bin includes values below it, too.
    """
    edges = [(-math.inf, *histogram_edges(name)[1:-1]) for name in names]
    most = max(len(x) for x in edges)
    filled = [[*x, *[math.nan] * (most - len(x))] for x in edges]
    exact = torch.tensor(filled, dtype=torch.float64, device="cpu")
    border = exact.to(dtype)
    return torch.where(border.double() < exact, border.nextafter(torch.full_like(border, math.inf)), border)

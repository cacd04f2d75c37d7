"""From one observed call to the statistics of a layer: rows pooled, batch entries summed, in float64."""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from headscope._attend.call import Call
from headscope._attend.interface import full_precision
from headscope._attend.prepare import Prepared
from headscope._observe import native_observer
from headscope._observe.inputs import Request, Scene, to_work
from headscope._observe.kept_tiles import ObservedTiles, keep_tiles
from headscope._observe.native_observer import Ready
from headscope._observe.portable import observe_rows
from headscope._observe.result import Observed
from headscope._observe.scene import build_scene
from headscope._support.bounded import BoundedTable
from headscope.stats import HeadStats, Observe
from headscope.stats._layer import Kept, LayerStats, Moments


def observe(request: Request) -> HeadStats:
    """Return the statistics of a request, by all three steps of ``headscope._observe``."""
    with torch.no_grad(), full_precision(request.call):
        known, ready = _find_ready(request)
        observed = None if ready is None else native_observer.observe_rows(ready, request.inputs)
        if observed is None:
            known = known if isinstance(known, Scene) else build_scene(request)
            observed = observe_rows(to_work(request.what), known)
        return HeadStats({"0": _layer_stats(request.call, request.what, known, observed, _tiles_of(request, known))})


def attend(request: Request) -> Result | None:
    """Attend natively and measure on the way: out [B, H, Q, Dv], lse [B, H, Q] and the statistics.

    None where that cannot be: attend first then, and observe after it. All query rows are looked at.
    """
    with torch.no_grad(), full_precision(request.call):
        known, ready = _find_ready(request)
        if ready is None:
            return None
        into = native_observer.attending(request.call)
        observed = native_observer.observe_rows(ready, request.inputs, into)
        if observed is None:
            return None
        if _is_simple(request) and request.has_place and repeater_of(request.prepared, request.what) is None:
            _prepared_observations.add((request.prepared, id(request.what)), _repeat(ready, request.what))
        return *into, HeadStats(
            {"0": _layer_stats(request.call, request.what, known, observed, _tiles_of(request, known))}
        )


Result = tuple[Tensor, Tensor, HeadStats]


def repeater_of(prepared: Prepared, what: Observe) -> Callable[[Tensor, Tensor, Tensor], Result | None] | None:
    """Return the short way of ``attend`` for such calls, if there is one with the same ``Observe`` object."""
    return _prepared_observations.get((prepared, id(what)))


def _repeat(ready: Ready, what: Observe) -> Callable[[Tensor, Tensor, Tensor], Result | None]:
    """``attend`` for further calls with the same ``Observe`` object: nothing is described again."""
    run = native_observer.repeater(ready)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Result | None:
        done = run(q, k, v)
        return None if done is None else (done[0], done[1], HeadStats(_LazyLayer(ready, what, done[2])))

    return attend


class _LazyLayer(Mapping[str, LayerStats]):
    """The layer of one call, built when it is first read."""

    def __init__(self, ready: Ready, what: Observe, memory: Tensor) -> None:
        self._layer: LayerStats | tuple[Ready, Observe, Tensor] = ready, what, memory

    def __getitem__(self, name: str) -> LayerStats:
        if name != "0":
            raise KeyError(name)
        layer = self._layer
        if isinstance(layer, tuple):
            ready, what, memory = layer
            self._layer = layer = _layer_stats(ready.call, what, ready, ready.observed(memory), None)
        return layer

    def __iter__(self) -> Iterator[str]:
        return iter(("0",))

    def __len__(self) -> int:
        return 1

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _find_ready(request: Request) -> tuple[Scene | Ready, Ready | None]:
    """Return what a request is measured from, and its description for the native kernels if they take it."""
    if _is_simple(request):
        ready = _prepared_observations.get(_key(request))
        if ready is not None:
            return ready, ready
    scene = build_scene(request)
    if native_observer.refuses(to_work(request.what), scene):
        return scene, None
    ready = Ready(request.what, scene)
    if _is_simple(request):
        _prepared_observations.add(_key(request), ready)
    return scene, ready


def _is_simple(request: Request) -> bool:
    """Return whether q, k and v are the only tensors of a request."""
    what, inputs, mask = request.what, request.inputs, request.mask
    tensors = (request.lse, request.q_pos, request.k_pos, request.real, inputs.bias, inputs.sinks, what.tokens)
    quiet = all(x is None for x in tensors) and not isinstance(what.rows, Tensor) and not what.keep_qk
    return quiet and request.call.form == "plain" and (mask is None or mask.is_constant())


def _key(request: Request) -> Any:
    return request.prepared, _options_of(request.what), request.kind, request.has_values


_options_of = attrgetter(*(each.name for each in fields(Observe)))
_prepared_observations: BoundedTable[Any, Any] = BoundedTable(64)  # some megabytes each, where sequences are long
atexit.register(_prepared_observations.clear)  # a compiler may refer to this module until the extension is gone


def _layer_stats(
    call: Call, what: Observe, known: Scene | Ready, observed: Observed, tiles: ObservedTiles | None
) -> LayerStats:
    """The statistics of one call as one layer of one run."""
    looked_at = call.queries if not isinstance(what.rows, int) else len(known.rows)
    moments = observed.moments
    if moments is None:
        moments = {name: Moments.of(name, rows) for name, rows in observed.rows.items() if name != "argmax"}
    received, eligible, rows = None, None, observed.rows_counted
    if observed.received is not None and observed.eligible is not None:
        received, eligible = (_filed(x, known.first_key) for x in (observed.received, observed.eligible))
    if rows is None:
        assert observed.counted is not None  # one of them is there
        rows = observed.counted.sum((0, 2))
    return LayerStats(
        heads=call.heads,
        runs=1,
        looked_at=call.batch * looked_at,
        of=call.batch * call.queries,
        rows=rows,
        broken=observed.broken,
        moments=moments,
        received=received,
        eligible=eligible,
        map=observed.map,
        edges=observed.edges,
        kept=_kept_rows(what, known, observed),
        tiles={} if tiles is None else {0: tiles},
        lengths=(call.queries, call.keys),
        first=what.first if what.row_stats else None,
    )


def _filed(columns: Tensor, first_key: int) -> Tensor:
    """Key quantities by absolute position."""
    if first_key == 0:
        return columns
    return torch.nn.functional.pad(columns, (first_key, 0))


def _tiles_of(request: Request, known: Scene | Ready) -> ObservedTiles | None:
    """Return a way to the weights, if q and k are to be kept."""
    return keep_tiles(request, known) if isinstance(known, Scene) and request.what.keep_qk else None


def _kept_rows(what: Observe, known: Scene | Ready, observed: Observed) -> tuple[Kept, ...]:
    values: dict[str, Tensor] = dict(observed.rows) if what.keep_rows else {}
    if observed.top is not None:
        values |= {"top_keys": observed.top.at, "top_weights": observed.top.p}
    if not values:
        return ()
    assert observed.counted is not None  # it is, wherever rows are kept
    index = torch.tensor(list(known.rows), dtype=torch.long, device="cpu")
    return (Kept(index, observed.counted, values),)

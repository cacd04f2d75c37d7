"""From one observed call to the statistics of a layer: rows pooled, batch entries summed, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headscope import _observe_scene
from headscope._backends import Inputs, full_precision
from headscope._observe import Observed, observe_rows
from headscope._observe_scene import Given, Scene, build, work
from headscope._observe_tile import Rows, weights
from headscope._stats_parts import Edges, HeadMap, Kept, LayerStats, Moments
from headscope.stats import HeadStats


def observe(given: Given) -> HeadStats:
    """All three steps; see ``_observe``."""
    with torch.no_grad(), full_precision(given.call):
        scene = build(given)
        observed = observe_rows(work(given.what), scene)
        return HeadStats({"0": layer_stats(given, scene, observed)})


def layer_stats(given: Given, scene: Scene, observed: Observed) -> LayerStats:
    """The statistics of one call as one layer of one run."""
    call, what = given.call, given.what
    looked_at = call.queries if not isinstance(what.rows, int) else len(scene.rows)
    moments = {name: Moments.of(name, rows) for name, rows in observed.rows.items() if name != "argmax"}
    received, eligible = None, None
    if observed.received is not None and observed.eligible is not None:
        received, eligible = (_filed(x.sum(0), scene.first_key) for x in (observed.received, observed.eligible))
    return LayerStats(
        heads=call.heads,
        runs=1,
        looked_at=call.batch * looked_at,
        of=call.batch * call.queries,
        rows=observed.counted.sum((0, 2)),
        broken=observed.broken.sum((0, 2)),
        moments=moments,
        received=received,
        eligible=eligible,
        map=_map(observed),
        edges=_edges(observed),
        kept=_kept(given, scene, observed),
        tiles=(_Tiles(_for_tiles(given, scene)),) if what.keep_qk else (),
    )


def _filed(columns: Tensor, first_key: int) -> Tensor:
    """Key quantities by absolute position."""
    return torch.nn.functional.pad(columns, (first_key, 0))


def _first_run(at: Tensor) -> Tensor:
    """[..., 3] of batch entry, query, key -> [..., 4] with the run before them, which is 0."""
    return torch.cat([torch.where(at[..., :1] >= 0, 0, -1), at], -1)


def _map(observed: Observed) -> HeadMap | None:
    sums = observed.map
    if sums is None:
        return None
    most = sums.max.masked_fill(sums.max == -math.inf, math.nan)
    return HeadMap(sums.sum, sums.count, most, _first_run(sums.at))


def _edges(observed: Observed) -> Edges | None:
    if observed.edges is None:
        return None
    p = observed.edges.p
    return Edges(p.to(torch.float64) if p.device.type != "mps" else p, _first_run(observed.edges.at))


def _kept(given: Given, scene: Scene, observed: Observed) -> tuple[Kept, ...]:
    values: dict[str, Tensor] = dict(observed.rows) if given.what.keep_rows else {}
    if observed.top is not None:
        values |= {"top_keys": observed.top.at, "top_weights": observed.top.p}
    if not values:
        return ()
    return (Kept(torch.tensor(list(scene.rows), dtype=torch.long), observed.counted, values),)


# ---------------------------------------------------------------- exact pieces of the weights


def _for_tiles(given: Given, scene: Scene) -> Scene:
    """A scene of all rows, with nothing but what the weights are computed from."""
    call, inputs = given.call, given.inputs
    slim = Inputs(inputs.q, inputs.k, inputs.k[..., :0], inputs.bias, inputs.sinks)
    lse = None if given.lse is None else given.lse.detach().reshape(call.batch, call.heads, call.queries)
    return replace(
        scene, inputs=slim, rows=range(call.queries), q=inputs.q, lse=lse, may_count=None,
        line=None, q_at=None, k_at=None, own=None, ids=None, norms=None,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Tiles:
    """p[i0:i1, j0:j1] on demand, [*lead, H, i, j]."""

    scene: Scene

    def __call__(self, i0: int, i1: int, j0: int, j1: int) -> Tensor:
        call = self.scene.call
        for names, start, stop, letter, size in (
            ("i0, i1", i0, i1, "Q", call.queries),
            ("j0, j1", j0, j1, "K", call.keys),
        ):
            if not 0 <= start <= stop <= size:
                raise ValueError(f"{names}: got {start}, {stop}, wanted 0 <= start <= stop <= {size} ({letter})")
        step = max(1, _observe_scene.BLOCK // max(1, call.heads * call.keys))
        parts = [self.scene.q.new_zeros(call.batch, call.heads, 0, j1 - j0)]
        with torch.no_grad(), full_precision(call):
            for b in range(call.batch):
                pieces = [self._rows(b, slice(i, min(i + step, i1)))[..., j0:j1] for i in range(i0, i1, step)]
                parts += [torch.cat(pieces, 2)] if pieces else []
        if i0 == i1 or call.batch == 0:
            return parts[0].reshape(*call.lead, call.heads, i1 - i0, j1 - j0)
        return torch.cat(parts[1:]).reshape(*call.lead, call.heads, i1 - i0, j1 - j0)  # [*lead, H, i, j]

    def _rows(self, b: int, i: slice) -> Tensor:
        scene, one = self.scene, slice(b, b + 1)
        lse = None if scene.lse is None else scene.lse[one, :, i]
        rows = Rows(scene.q[one, :, i], one, slice(0, scene.call.kv_heads), i, lse, None)
        if scene.call.keys == 0:
            return scene.q.new_zeros(1, scene.call.heads, i.stop - i.start, 0)
        return weights(scene, rows, slice(0, scene.call.keys)).p

"""From one observed call to the statistics of a layer: rows pooled, batch entries summed, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from headscope._attend.call import Call
from headscope._attend.interface import Inputs, full_precision
from headscope._attend.select import select
from headscope._observe import inputs as _observe_scene
from headscope._observe import native
from headscope._observe.inputs import Given, Scene, build, work
from headscope._observe.native import Ready
from headscope._observe.portable import Observed, observe_rows
from headscope._observe.tile import Rows, weights
from headscope._support.fingerprint import Fingerprint
from headscope.masks import Dense, Mask, is_constant
from headscope.stats import HeadStats, Observe
from headscope.stats._layer import Kept, LayerStats, Moments
from headscope.stats._tiles import MOST_REST, KeptWeights, NoWeightsError, check_within, written_to


def observe(given: Given) -> HeadStats:
    """All three steps; see ``_observe``."""
    with torch.no_grad(), full_precision(given.call):
        known, ready = _known(given)
        observed = None if ready is None else native.observe_rows(ready, given.inputs)
        if observed is None:
            known = known if isinstance(known, Scene) else build(given)
            observed = observe_rows(work(given.what), known)
        return HeadStats({"0": _layer_stats(given.call, given.what, known, observed, _tiles(given, known))})


def attend(given: Given) -> Result | None:
    """Attend natively and measure on the way: out [B, H, Q, Dv], lse [B, H, Q] and the statistics.

    None where that cannot be: attend first then, and observe after it. All query rows are looked at.
    """
    with torch.no_grad(), full_precision(given.call):
        known, ready = _known(given)
        if ready is None:
            return None
        into = native.attending(given.call)
        observed = native.observe_rows(ready, given.inputs, into)
        if observed is None:
            return None
        if _is_simple(given) and given.has_place and id(given.what) not in given.before:
            _remember(given, id(given.what), _again(ready, given.what))
        return *into, HeadStats({"0": _layer_stats(given.call, given.what, known, observed, _tiles(given, known))})


Result = tuple[Tensor, Tensor, HeadStats]


def _again(ready: Ready, what: Observe) -> Callable[[Tensor, Tensor, Tensor], Result | None]:
    """``attend`` for a call that comes again with the same object for what is asked: nothing is said anew."""
    run = native.repeater(ready)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Result | None:
        done = run(q, k, v)
        return None if done is None else (done[0], done[1], HeadStats(_Later(ready, what, done[2])))

    return attend


class _Later(Mapping[str, LayerStats]):
    """The layer of one call, put together when it is first asked for."""

    def __init__(self, ready: Ready, what: Observe, memory: Tensor) -> None:
        self._made: LayerStats | tuple[Ready, Observe, Tensor] = ready, what, memory

    def __getitem__(self, name: str) -> LayerStats:
        if name != "0":
            raise KeyError(name)
        made = self._made
        if isinstance(made, tuple):
            ready, what, memory = made
            self._made = made = _layer_stats(ready.call, what, ready, ready.observed(memory), None)
        return made

    def __iter__(self) -> Iterator[str]:
        return iter(("0",))

    def __len__(self) -> int:
        return 1

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _known(given: Given) -> tuple[Scene | Ready, Ready | None]:
    """What the observation is made from, and as the native kernels take it, if they do."""
    if _is_simple(given):
        found = given.before.get(_key(given))
        if found is not None:
            return found, found
    scene = build(given)
    if native.refuses(work(given.what), scene):
        return scene, None
    ready = Ready(given.what, scene)
    if _is_simple(given):
        _remember(given, _key(given), ready)
    return scene, ready


def _is_simple(given: Given) -> bool:
    """Whether tensors say nothing but what is to be measured."""
    what, inputs, mask = given.what, given.inputs, given.mask
    said = (given.lse, given.q_pos, given.k_pos, given.real, inputs.bias, inputs.sinks, what.tokens)
    quiet = all(x is None for x in said) and not isinstance(what.rows, Tensor) and not what.keep_qk
    return quiet and (mask is None or is_constant(mask))


def _key(given: Given) -> Any:
    return _asked(given.what), given.kind, given.has_values


_asked = attrgetter(*(each.name for each in fields(Observe)))
_remembered: list[dict[Any, Any]] = []
_MOST_REMEMBERED = 64  # some megabytes each, where sequences are long


def _remember(given: Given, key: Any, made: object) -> None:
    if len(_remembered) >= _MOST_REMEMBERED:
        for each in _remembered:
            each.clear()
        _remembered.clear()
    _remembered.append(given.before)
    given.before[key] = made


def _layer_stats(
    call: Call, what: Observe, known: Scene | Ready, observed: Observed, tiles: _Tiles | None
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
        kept=_kept(what, known, observed),
        tiles={} if tiles is None else {0: tiles},
        lengths=(call.queries, call.keys),
        first=what.first if what.row_stats else None,
    )


def _filed(columns: Tensor, first_key: int) -> Tensor:
    """Key quantities by absolute position."""
    if first_key == 0:
        return columns
    return torch.nn.functional.pad(columns, (first_key, 0))


def _kept(what: Observe, known: Scene | Ready, observed: Observed) -> tuple[Kept, ...]:
    values: dict[str, Tensor] = dict(observed.rows) if what.keep_rows else {}
    if observed.top is not None:
        values |= {"top_keys": observed.top.at, "top_weights": observed.top.p}
    if not values:
        return ()
    assert observed.counted is not None  # it is, wherever rows are kept
    index = torch.tensor(list(known.rows), dtype=torch.long, device="cpu")
    return (Kept(index, observed.counted, values),)


# ---------------------------------------------------------------- exact pieces of the weights


def _tiles(given: Given, known: Scene | Ready) -> _Tiles | None:
    """A way to the weights, if it was asked for."""
    if not (isinstance(known, Scene) and given.what.keep_qk):
        return None
    scene = _for_tiles(given, known)
    read = [_Read(name, x) for name, x in (("bias", scene.inputs.bias), ("sinks", scene.inputs.sinks)) if x is not None]
    if scene.plan is not None and scene.plan.rest is not None:
        rest, originals = scene.plan.rest, iter(scene.plan.rest_tensors())
        read += [
            _Read("mask", next(originals), isinstance(leaf, Dense)) for leaf in rest.leaves() for _ in leaf.tensors()
        ]
    return _Tiles(scene, tuple(read), _offsets(known))


class _Read:
    """A tensor of the caller's that tiles are computed from, and what it held when it was observed."""

    def __init__(self, name: str, tensor: Tensor, by_row: bool | None = None) -> None:
        self.name = name
        self.tensor = tensor
        self.fingerprint = Fingerprint(tensor)
        by_row = name == "bias" if by_row is None else by_row
        self.by_row = by_row and tensor.ndim > 1 and tensor.shape[-2] > 1  # axis -2 is Q

    def check(self, i0: int, i1: int) -> None:
        """Raise unless it holds what it held, as far as the query rows i0 to i1 read it."""
        if not self.fingerprint.matches(self.tensor, (..., slice(i0, i1), slice(None)) if self.by_row else ()):
            raise written_to(self.name, self.tensor.shape)


_NOWHERE = -(2**62)


def _offsets(scene: Scene) -> Tensor | None:
    """How far behind its index each row of the first batch entry stands among the keys, int64 [R].

    ``_NOWHERE`` where a given position is that of no key; None in cross-attention.
    """
    at = scene.own if scene.line is None else scene.line
    if at is None:
        return None
    offsets = at[:1] - torch.tensor(list(scene.rows), dtype=torch.long, device=at.device)  # [1, R]
    return (offsets if scene.line is not None else offsets.masked_fill(at[:1] < 0, _NOWHERE)).flatten()


def _for_tiles(given: Given, scene: Scene) -> Scene:
    """A scene of all rows, with nothing but what the weights are computed from."""
    call, inputs = given.call, given.inputs
    # copies: the model may write to its own, a cache is made to be written to
    q, k = inputs.q.detach().clone(), inputs.k.detach().clone()
    slim = Inputs(q, k, k[..., :0], inputs.bias, inputs.sinks)
    lse = None if given.lse is None else given.lse.detach().reshape(call.batch, call.heads, call.queries).clone()
    return replace(
        scene, inputs=slim, rows=range(call.queries), q=q, lse=lse, may_count=None,
        line=None, q_at=None, k_at=None, own=None, ids=None, id_before=None, has_norms=False,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Tiles:
    """p[i0:i1, j0:j1] on demand, [*lead, H, i, j].

    Attributes:
        scene: what the weights are computed from: copies of q and k, and the caller's own bias, sinks and mask, which
            may be as large as the weights.
        read: these, with what they held.
        offsets: see ``_offsets``; read no sooner than asked for, as that may mean to wait for a device.
    """

    scene: Scene
    read: tuple[_Read, ...]
    offsets: Tensor | None

    def __call__(self, i0: int, i1: int, j0: int, j1: int) -> Tensor:
        call = self.scene.call
        check_within((i0, i1), (j0, j1), call.queries, call.keys)
        for each in self.read:
            each.check(i0, i1)
        step = max(1, _observe_scene.BLOCK // max(1, call.heads * call.keys))
        parts = [self.scene.q.new_zeros(call.batch, call.heads, 0, j1 - j0)]
        with torch.no_grad(), full_precision(call):
            for b in range(call.batch):
                pieces = [self._rows(b, slice(i, min(i + step, i1)))[..., j0:j1] for i in range(i0, i1, step)]
                parts += [torch.cat(pieces, 2)] if pieces else []
        if i0 == i1 or call.batch == 0:
            return parts[0].reshape(*call.lead, call.heads, i1 - i0, j1 - j0)
        return torch.cat(parts[1:]).reshape(*call.lead, call.heads, i1 - i0, j1 - j0)  # [*lead, H, i, j]

    def kept(self) -> KeptWeights:
        """The same from tensors alone, with the lse that its rows have.

        Raises:
            NoWeightsError: a mask that is no spans has more pairs than ``MOST_REST``; or a bias, sinks or mask have
                been written to.
        """
        call, scene = self.scene.call, self.scene
        for each in self.read:
            each.check(0, call.queries)
        with torch.no_grad(), full_precision(call):
            lse = self._lse() if scene.lse is None else scene.lse
        # of rows that see nothing exp(s - inf) = 0; a logit that is infinite gives no weights
        lse = torch.where(lse == -torch.inf, torch.inf, torch.where(lse.isfinite(), lse, torch.nan))
        parts = {"q": scene.q, "k": scene.inputs.k, "lse": lse}
        if scene.inputs.bias is not None:
            parts["bias"] = scene.inputs.bias
        if scene.plan is not None and not scene.plan.everything:
            parts["spans"] = scene.plan.spans
            if scene.plan.rest is not None:
                parts["rest"] = self._rest(scene.plan.rest)
        kept = {name: x.detach().cpu().contiguous() for name, x in parts.items()}
        held = {each.tensor.data_ptr() for each in self.read}
        shared = {name: Fingerprint(x) for name, x in kept.items() if x.data_ptr() in held}
        return replace(KeptWeights.of(kept, call.lead, call.scale, call.softcap, self._offset()), shared=shared)

    def _offset(self) -> int | None:
        """Where query 0 stands, if all rows agree on it."""
        found = {*(() if self.offsets is None else self.offsets.tolist())} - {_NOWHERE}
        return found.pop() if len(found) == 1 else None

    def _lse(self) -> Tensor:
        """By whichever backend takes the call."""
        call, inputs = self.scene.call, self.scene.inputs
        asked = replace(call, v_head_dim=1, lse=True, grad=False, bias_grad=False, dropout=0.0)
        values = inputs.k.new_zeros(1).expand(*inputs.k.shape[:3], 1).contiguous()
        _, lse = select(asked).attend(asked, self.scene.plan, inputs._replace(v=values))
        assert lse is not None  # every backend that takes a call with lse returns it
        return lse.reshape(call.batch, call.heads, call.queries)

    def _rest(self, rest: Mask) -> Tensor:
        call = self.scene.call
        tensor = rest.tensor if isinstance(rest, Dense) else None
        if tensor is not None:
            return tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))
        if call.batch * call.heads * call.queries * call.keys > MOST_REST:
            raise NoWeightsError(f"mask: {rest} has more than {MOST_REST:,} pairs, too many to be saved with q and k")
        b, h, i, j = (slice(0, n) for n in (call.batch, call.heads, call.queries, call.keys))
        return rest.tile(b, h, i, j, self.scene.q.device).expand(-1, -1, call.queries, call.keys)

    def _rows(self, b: int, i: slice) -> Tensor:
        scene, one = self.scene, slice(b, b + 1)
        lse = None if scene.lse is None else scene.lse[one, :, i]
        rows = Rows(scene.q[one, :, i], one, slice(0, scene.call.kv_heads), i, lse, None)
        if 0 in (scene.call.heads, scene.call.keys):
            return scene.q.new_zeros(1, scene.call.heads, i.stop - i.start, scene.call.keys)
        found = weights(scene, rows, slice(0, scene.call.keys))
        if scene.clean:
            return found.p
        spoilt = found.broken[..., None] if found.seen is None else found.broken[..., None] & found.seen
        return found.p.masked_fill(spoilt, torch.nan)

"""What an observation is made from: which query rows, where they stand, which keys are real; checked here alone.

``Work`` holds numbers only: what of each tile is to be reduced. ``Scene`` holds the tensors. Both are given as they are
to whatever reduces the tiles; see ``_observe``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from headscope._attend.call import FLOATS, Call, check_layout, kind, shapes
from headscope._attend.interface import Inputs, accumulate_dtype
from headscope._support.tensor_classes import ORDINARY, to_ordinary
from headscope._support.torch_state import is_traced
from headscope.masks import Band, Mask, Plan, is_constant
from headscope.stats import Observe
from headscope.stats._layer import wide

BLOCK = 1 << 19  # logits in one block: 2 MiB of float32, about one core's second-level cache
HUGE = 1e30  # a bound on the logits below which float32 cannot overflow

Kind = Literal["self", "cross"]


@dataclass(frozen=True, slots=True)
class Work:
    """What of each tile of weights is to be reduced.

    Attributes:
        rows: the row quantities; argmax: also the key of each row's largest weight.
        received: received and eligible of each key.
        bins: of the map; 0 = none.
        edges, top: how many of the largest weights of a head and of a row; 0 = none.
        windows: the distances of window_{w}.
    """

    rows: bool
    argmax: bool
    received: bool
    bins: int
    edges: int
    top: int
    windows: tuple[float, ...]


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
class Given:
    """One observation as it was asked for: a checked call, and what is not checked yet."""

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
    before: dict[Any, Any]
    """What was made ready for calls of the same sizes, strides, dtypes and options, whatever their tensors hold."""
    has_place: bool
    """q, k and v are as they came, with a last stride of 1; ``before`` is then looked into for them."""


def value_norms(v: Tensor, call: Call) -> Tensor:
    """Of values [B, Hkv, K, Dv], in the dtype of the arithmetic."""
    return torch.linalg.vector_norm(v, dim=-1, dtype=accumulate_dtype(call.dtype))


def work(what: Observe) -> Work:
    """What has to be reduced for what was asked."""
    return Work(what.row_stats, what.keep_rows, what.received, what.map or 0, what.edges, what.top, tuple(what.windows))


def build(given: Given) -> Scene:
    """Check the rest of what was asked, and say it in tensors.

    Raises:
        TypeError: an argument is not of the right kind or dtype.
        ValueError: a size or option does not fit.
    """
    if given.kind not in ("self", "cross"):
        raise ValueError(f'kind: got {given.kind!r}, wanted "self" or "cross"')
    given = _ordinary(given)
    call, inputs, what = given.call, given.inputs, given.what
    _check_lse(given)
    _check_tokens(given)
    counts = _row_mask(given)
    rows = _rows(given, counts)
    index = None if isinstance(rows, range) else torch.tensor(rows, dtype=torch.long, device=inputs.q.device)
    line, q_at, k_at, first, own, padding = _frame(given)
    if padding is not None:
        counts = ~padding[:, None] if counts is None else counts & ~padding[:, None]
    lse = None if given.lse is None else given.lse.detach().reshape(call.batch, call.heads, call.queries)
    return Scene(
        call=call,
        plan=given.plan,
        inputs=inputs,
        rows=rows,
        q=_pick(inputs.q, index, 2),
        lse=None if lse is None else _pick(lse, index, 2),
        may_count=None if counts is None else _pick(counts, index, 2),
        line=None if line is None else _pick(line, index, 1),
        q_at=None if q_at is None else _pick(q_at, index, 1),
        k_at=k_at,
        own=None if own is None else _pick(own, index, 1),
        first=first,
        ids=None if what.tokens is None or own is None else _ids(what.tokens, call),
        id_before=None if own is None else _id_before(what, call),
        has_norms=given.has_values and what.row_stats,
        first_key=_first_key(k_at) if what.received and given.k_pos is not None else 0,
    )


def _ordinary(given: Given) -> Given:
    """Return the observation over ordinary tensors, where its q, k, v, bias, sinks and mask are ordinary.

    The native kernels read tensors by their addresses. Where q, k, v, bias, sinks or the mask is of a subclass, the
    portable form observes, which calls operators only.

    Raises:
        TypeError: a tensor may have no memory of its own; the message names it.
    """
    if given.call.form == "subclass":
        return given
    what = given.what
    options = {name: getattr(given, name) for name in ("lse", "q_pos", "k_pos", "real")}
    measured = {name: getattr(what, name, None) for name in ("tokens", "rows", "token_before")}
    changed = _changed(options)
    if of_what := _changed(measured):
        changed["what"] = replace(what, **of_what)
    return replace(given, **changed) if changed else given


def _changed(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return those that are a subclass of Tensor, as ordinary tensors."""
    return {
        name: to_ordinary("mask" if name == "real" else name, x)
        for name, x in tensors.items()
        if isinstance(x, Tensor) and type(x) not in ORDINARY
    }


class _Frame(NamedTuple):
    """What depends on sizes, mask and positions alone: see ``Scene``; ``padding``: rows [B, Q]."""

    line: Tensor | None
    q_at: Tensor | None
    k_at: Tensor | None
    first: Tensor
    own: Tensor | None
    padding: Tensor | None


_frames: dict[Any, _Frame] = {}
_FRAMES = 16  # some megabytes each, where sequences are long


def _frame(given: Given) -> _Frame:
    """The same for every call of the same sizes, where nothing but a constant mask says more."""
    call, mask = given.call, given.mask
    if any(x is not None for x in (given.q_pos, given.k_pos, given.real, given.inputs.bias)):
        return _made_frame(given)
    if is_traced() or not (mask is None or is_constant(mask)):  # what is made for a tracer is of no use to others
        return _made_frame(given)
    key = (call.batch, call.heads, call.queries, call.keys, given.inputs.q.device, mask, given.kind, given.what.first)
    found = _frames.get(key)
    if found is None:
        if len(_frames) >= _FRAMES:
            _frames.clear()
        found = _frames[key] = _made_frame(given)
    return found


def _made_frame(given: Given) -> _Frame:
    call, inputs = given.call, given.inputs
    line, q_at, k_at = _places(given)
    real = real_keys(call, given.plan, inputs.bias) if given.real is None else given.real.expand(call.batch, call.keys)
    real = real.to(inputs.q.device)
    first = _first(real, min(given.what.first, call.keys))
    if given.kind == "cross":
        return _Frame(line, q_at, k_at, first, None, None)
    own = _own_index(given) if q_at is None or k_at is None else _own_by_position(given, q_at, k_at, real)
    padding = (own >= 0) & ~real.gather(1, own.clamp_min(0).expand(call.batch, -1)) if call.keys else None  # [B, Q]
    return _Frame(line, q_at, k_at, first, own, padding)


def _pick(tensor: Tensor, index: Tensor | None, axis: int) -> Tensor:
    return tensor if index is None else tensor.index_select(axis, index)


# ---------------------------------------------------------------- which rows


def sample(n: int, of: int) -> Sequence[int]:
    """The middle of each of n equal parts; all where there are no more than n."""
    return range(of) if n >= of else [(2 * r + 1) * of // (2 * n) for r in range(n)]


def _rows(given: Given, counts: Tensor | None) -> Sequence[int]:
    queries = given.call.queries
    if isinstance(given.what.rows, int):
        return sample(given.what.rows, queries)
    if (
        counts is None or counts.device.type != "cpu" or type(counts) not in ORDINARY
    ):  # a GPU would have to be waited for
        return range(queries)
    picked = counts.any(0).any(0).nonzero()[:, 0].tolist()
    return range(queries) if len(picked) == queries else picked


def _row_mask(given: Given) -> Tensor | None:
    rows, call = given.what.rows, given.call
    if not isinstance(rows, Tensor):
        return None
    wanted = (*(call.lead or (1,)), call.heads, call.queries)
    q = given.inputs.q
    if rows.device != q.device:
        raise ValueError(f"rows: is on {rows.device}, q is on {q.device}")
    try:
        return rows.expand(wanted).reshape(call.batch, call.heads, call.queries)  # [B, H, Q]
    except RuntimeError:
        hint = "; the same rows for every head are [B, 1, Q]" if rows.ndim > 1 else ""
        raise ValueError(
            f"rows: does not broadcast to [B, H, Q] = {list(wanted)}{hint}; {shapes(rows=rows, q=q)}"
        ) from None


def _check_lse(given: Given) -> None:
    lse, call, q = given.lse, given.call, given.inputs.q
    if lse is None:
        return
    if not isinstance(lse, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"lse: got {kind(lse)}, wanted a torch.Tensor or None")
    check_layout("lse", lse)
    if lse.dtype not in FLOATS:
        raise TypeError(f"lse: dtype is {kind(lse)}, wanted a floating one")
    if lse.device != q.device:
        raise ValueError(f"lse: is on {lse.device}, q is on {q.device}")
    wanted = (*call.lead, call.heads, call.queries)
    if lse.shape != wanted:
        raise ValueError(f"lse: wanted [B, H, Q] = {list(wanted)}; {shapes(lse=lse, q=q)}")


# ---------------------------------------------------------------- where rows and keys stand


def _places(given: Given) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Positions on a line [B or 1, Q], or given ones of queries and keys; none in cross-attention."""
    call, device = given.call, given.inputs.q.device
    if given.kind == "cross":
        return None, None, None
    line = torch.arange(call.queries, device=device) + _offset(given)  # [B or 1, Q]
    if given.q_pos is None and given.k_pos is None:
        return line, None, None
    if given.k_pos is None:
        k_at = torch.arange(call.keys, dtype=wide(device), device=device)[None, :, None]
    else:
        k_at = _positions("k_pos", given.k_pos, "K", call.keys, given)
    if given.q_pos is not None:
        q_at = _positions("q_pos", given.q_pos, "Q", call.queries, given)
    elif call.queries > call.keys:
        sizes = shapes(q=given.inputs.q, k=given.inputs.k)
        raise ValueError(f"q_pos: wanted, for there are more queries ({call.queries}) than keys ({call.keys}); {sizes}")
    else:
        q_at = _at(k_at, line, call.keys)
    if q_at.shape[-1] != k_at.shape[-1]:
        raise ValueError(f"q_pos: has {q_at.shape[-1]} numbers a position, k_pos has {k_at.shape[-1]}")
    return None, q_at, k_at


def _at(k_at: Tensor, index: Tensor, keys: int) -> Tensor:
    """The positions of the keys at these places, [B or 1, Q, axes]; NaN beyond them."""
    batch = len(index) if len(k_at) == 1 else len(k_at)  # none, perhaps
    k_at, index = k_at.expand(batch, -1, -1), index.expand(batch, -1)
    inside = (index >= 0) & (index < keys)
    found = k_at.gather(1, index.clamp(0, keys - 1)[..., None].expand(-1, -1, k_at.shape[-1]))
    return found.masked_fill(~inside[..., None], math.nan)


def _positions(name: str, given: Tensor, letter: str, length: int, asked: Given) -> Tensor:
    if not isinstance(given, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"{name}: got {kind(given)}, wanted a torch.Tensor or None")
    check_layout(name, given)
    if given.dtype == torch.bool or given.dtype.is_complex:
        raise TypeError(f"{name}: dtype is {kind(given)}, wanted numbers")
    batch = asked.call.batch
    fits = tuple(given.shape) in ((length,), (length, 1), (length, 2))
    if not fits and tuple(given.shape) not in {(b, length, n) for b in (1, batch) for n in (1, 2)}:
        raise ValueError(
            f"{name}: wanted [{letter}] or [{letter}, 2], or [B, {letter}, 1 or 2], here {letter} = {length} and "
            f"B = {batch}; {shapes(**{name: given})}"
        )
    at = given.detach().to(device=asked.inputs.q.device, dtype=wide(asked.inputs.q.device))
    at = at.masked_fill(at.isinf(), math.nan)
    return at if at.ndim == 3 else at[None] if at.ndim == 2 else at[None, :, None]  # [B or 1, length, axes]


def _offset(given: Given) -> Tensor:
    """The position of query 0, int64 [B or 1, 1]: what the bands of the mask say if they agree, else K - Q."""
    call, device = given.call, given.inputs.q.device
    leaves = given.mask.at(call.queries, call.keys).leaves() if given.mask is not None else ()
    said = [leaf.offset for leaf in leaves if isinstance(leaf, Band)]
    columns = [torch.as_tensor(offset, dtype=torch.long, device=device).reshape(-1, 1) for offset in said]
    whole = [column.expand(call.batch, 1) for column in columns]
    if not columns or any(not torch.equal(one, whole[0]) for one in whole[1:]):
        return torch.tensor([[call.keys - call.queries]], device=device)
    return columns[0]


def _own_index(given: Given) -> Tensor:
    """The key at each query's place on the line, [B or 1, Q]; -1 = there is none."""
    call = given.call
    line = torch.arange(call.queries, device=given.inputs.q.device) + _offset(given)
    return torch.where((line >= 0) & (line < call.keys), line, -1)


def _own_by_position(given: Given, q_at: Tensor, k_at: Tensor, real: Tensor) -> Tensor:
    """The key at each query's position, [B, Q]: of several the one at its place on the line, else the first real one.

    A query without a position has the key at its place on the line for its own, if that has no position either.
    """
    call = given.call
    batch = call.batch
    if 0 in (batch, call.keys, call.queries):
        return torch.full((batch, call.queries), -1, device=q_at.device)
    q_at, k_at = q_at.expand(batch, -1, -1), k_at.expand(batch, -1, -1)
    line = _own_index(given).expand(batch, -1)  # [B, Q]
    there = _at(k_at, line, call.keys)
    same = (there == q_at).all(-1) | (there.isnan().any(-1) & q_at.isnan().any(-1))
    same &= line >= 0
    both = torch.cat([k_at.flatten(0, 1), q_at.flatten(0, 1)])
    _, number = both.nan_to_num(nan=-math.inf).unique(dim=0, return_inverse=True)
    k_number, q_number = number[: batch * call.keys].view(batch, -1), number[batch * call.keys :].view(batch, -1)
    order = torch.sort(2 * k_number + (~real).long(), dim=-1, stable=True)  # of equal positions the real ones first
    place = torch.searchsorted(order.values, 2 * q_number).clamp_max(call.keys - 1)
    found = order.indices.gather(1, place)
    equal = k_number.gather(1, found) == q_number
    equal &= ~q_at.isnan().any(-1)
    return torch.where(same, line, torch.where(equal, found, -1))


def _first_key(k_at: Tensor | None) -> int:
    """Where keys begin, if they stand on consecutive whole positions, the same for all batch entries; else 0."""
    if k_at is None or k_at.shape[0] != 1 or k_at.shape[2] != 1 or k_at.shape[1] == 0:
        return 0
    start = float(k_at[0, 0, 0])
    if not (math.isfinite(start) and start >= 0 and start == int(start)):
        return 0
    run = torch.arange(k_at.shape[1], dtype=k_at.dtype, device=k_at.device) + start
    return int(start) if torch.equal(k_at[0, :, 0], run) else 0


# ---------------------------------------------------------------- which keys


def real_keys(call: Call, plan: Plan | None, bias: Tensor | None) -> Tensor:
    """Which keys any query of any head of a batch entry may see, boolean [B, K]."""
    device = torch.device("cpu") if plan is None else plan.spans.device
    device = bias.device if bias is not None else device
    if call.queries == 0 or call.heads == 0:
        return torch.zeros(call.batch, call.keys, dtype=torch.bool, device=device)
    if plan is None and bias is None:
        return torch.ones(call.batch, call.keys, dtype=torch.bool, device=device)
    if plan is not None and plan.rest is None and bias is None:
        return _spanned(plan.spans, call.keys).expand(call.batch, -1)
    real = torch.zeros(call.batch, call.keys, dtype=torch.bool, device=device)
    step = max(1, BLOCK // max(1, call.batch * call.heads * call.keys))
    for start in range(0, call.queries, step):
        i = slice(start, min(start + step, call.queries))
        seen = visible(plan, bias, (slice(0, call.batch), slice(0, call.heads), i, slice(0, call.keys)), device)
        real |= seen.any(1).any(1) if seen is not None else True
    return real


def _spanned(spans: Tensor, keys: int) -> Tensor:
    """Which keys lie in a span of some query, [B or 1, K]."""
    ends = spans.flatten(1, 2)  # [B or 1, Q or 1 * n, 2]
    steps = ends.new_zeros(len(ends), keys + 1)
    one = torch.ones_like(ends[..., 0])
    steps.scatter_add_(1, ends[..., 0], one).scatter_add_(1, ends[..., 1], -one)
    return steps.cumsum(1)[:, :keys] > 0


Cut = tuple[slice, slice, slice, slice]
"""A block of the matrix: batch entries, query heads, queries, keys."""


def visible(plan: Plan | None, bias: Tensor | None, cut: Cut, device: torch.device) -> Tensor | None:
    """What may be seen in a block, boolean, broadcastable to [b, h, i, j]; None = everything."""
    seen = None
    if plan is not None and not plan.everything:
        seen = plan.tile(*cut).to(device)
    if bias is not None:
        tile = bias[tuple(slice(None) if n == 1 else here for n, here in zip(bias.shape, cut, strict=True))]
        shown = tile != -torch.inf
        seen = shown if seen is None else seen & shown
    return seen


def visible_rows(plan: Plan | None, bias: Tensor | None, b: slice, h: slice, i: Tensor, j: slice) -> Tensor | None:
    """The same for rows by their query index ``i``, int64 [1, 1, r] or [b, h, r]."""
    at_b = torch.arange(b.start, b.stop, device=i.device)[:, None, None]
    at_h = torch.arange(h.start, h.stop, device=i.device)[:, None]
    seen = None
    if plan is not None and not plan.everything:
        device = plan.spans.device
        rows, in_b, in_h = i.to(device), at_b.to(device), at_h.to(device)
        spans = plan.spans[_index(in_b, plan.spans.shape[0]), _index(rows, plan.spans.shape[1])]  # [b, h, r, n, 2]
        keys = torch.arange(j.start, j.stop, device=device)
        seen = ((keys >= spans[..., 0, None]) & (keys < spans[..., 1, None])).any(-2)  # [b, h, r, j]
        if plan.rest is not None:
            seen = seen & plan.rest.allows(in_b[..., None], in_h[..., None], rows[..., None], keys)
        seen = seen.to(i.device)
    if bias is not None:
        shown = bias_rows(bias, at_b, at_h, i, j) != -torch.inf
        seen = shown if seen is None else seen & shown
    return seen


def bias_rows(bias: Tensor, b: Tensor, h: Tensor, i: Tensor, j: slice) -> Tensor:
    """The bias of rows by their indices, broadcastable to [b, h, r, j]."""
    found = bias[tuple(_index(at, n) for at, n in zip((b, h, i), bias.shape, strict=False))]
    return found if found.shape[-1] == 1 else found[..., j]


def _index(at: Tensor, size: int) -> Tensor:
    return torch.zeros_like(at) if size == 1 else at


def _first(real: Tensor, n: int) -> Tensor:
    """The places of the first n real keys, [B, n]; -1 where there are fewer."""
    order = torch.sort((~real).byte(), dim=-1, stable=True).indices[:, :n]
    return torch.where(real.gather(1, order), order, -1)


def _check_tokens(given: Given) -> None:
    tokens, call = given.what.tokens, given.call
    if tokens is None:
        return
    keys, lead = call.keys, call.lead
    if tuple(tokens.shape) not in ((keys,), (1, keys), (call.batch, keys), (*lead, keys)):
        raise ValueError(
            f"tokens: wanted [K] or [B, K], here [{keys}] or [{call.batch}, {keys}]; "
            f"{shapes(tokens=tokens, k=given.inputs.k)}"
        )


def _ids(tokens: Tensor, call: Call) -> Tensor:
    return tokens.detach().reshape(math.prod(tokens.shape[:-1]), call.keys).expand(call.batch, -1)  # [B, K]


def _id_before(what: Observe, call: Call) -> Tensor | None:
    known = what.token_before if isinstance(what, Continued) else None
    return None if known is None else known.detach().reshape(-1).expand(call.batch)  # [B]


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

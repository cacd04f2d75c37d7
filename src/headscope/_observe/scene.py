"""``Scene``, the tensors of an observation, and ``build_scene``, which checks its options and makes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from headscope._attend.call import FLOATS, Call
from headscope._attend.interface import Inputs, accumulate_dtype
from headscope._observe.inputs import Continued, Request, Whole
from headscope._observe.placement import find_first_key, to_frame
from headscope._observe.segment_ids import segments_of
from headscope._observe.selected_keys import Selection, selection_of
from headscope._support.arguments import check_layout, check_type, kind, shapes
from headscope._support.device_constants import integers
from headscope._support.tensor_classes import ORDINARY, to_ordinary
from headscope.masks import Plan
from headscope.stats import Observe

HUGE = 1e30  # float32 cannot overflow with logits below this bound


@dataclass(frozen=True, eq=False)
class Scene:
    """The tensors of one observation. R counts the observed query rows.

    Attributes:
        inputs: k [B, Hkv, K, D], bias and sinks in the form of the backends, and all of q [B, H, Q, D].
        rows: the query index of each row, ascending.
        q, lse: of these rows, [B, H, R, D] and [B, H, R]; lse None = not specified.
        may_count: boolean, broadcasts to [B, H, R]: selected by ``rows`` and not padding; None = all. Empty rows and
            rows that are not finite must be excluded separately.
        line: the position of each row if keys are at 0, 1, 2, …: int64 [B or 1, R]; None = positions are specified, or
            there are none.
        q_at, k_at: specified positions, float64 [B or 1, R, axes] and [B or 1, K, axes], NaN = has none; or None.
        own: the query's own key, int64 [B or 1, R], -1 = none; None in cross-attention.
        first: the first real keys of each batch entry, int64 [B or 1, n], -1 = there are fewer.
        ids: tokens of the keys [B, K], or None.
        id_before: of the key before the first one [B], or None.
        has_norms: the lengths of the value vectors are requested.
        first_key: the absolute position of key 0, the index of received and eligible.
        whole_sequence: the place of the rows in the whole.
        key_segments, row_segments: the segment of each key and of each row, int64 [B or 1, K] and [B or 1, R], -1 =
            none; None = not requested.
        selection: the selected keys, or None.
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
    whole_sequence: Whole
    key_segments: Tensor | None = None
    row_segments: Tensor | None = None
    selection: Selection | None = None

    @cached_property
    def clean(self) -> bool:
        """No number is NaN, infinite or so large that a logit could overflow; checked on a CPU only."""
        return _clean(self)

    @cached_property
    def norms(self) -> Tensor | None:
        """Lengths of the value vectors [B, Hkv, K]; None if not requested."""
        return _value_norms(self.inputs.v, self.call) if self.has_norms else None

    @cached_property
    def index(self) -> Tensor:
        """The query index of each row, on the device, int64 [R]."""
        if isinstance(self.rows, range):
            return torch.arange(self.rows.start, self.rows.stop, device=self.q.device)
        return integers(self.rows, self.q.device)

    @property
    def whole(self) -> bool:
        """Whether every query row is observed."""
        return isinstance(self.rows, range)


def _value_norms(v: Tensor, call: Call) -> Tensor:
    """Return the norms of values [B, Hkv, K, Dv], in the dtype of the arithmetic."""
    return torch.linalg.vector_norm(v, dim=-1, dtype=accumulate_dtype(call.dtype))


def build_scene(request: Request) -> Scene:
    """Check the options of a request, and return the tensors of its observation.

    Raises:
        TypeError: an argument is not of the right kind or dtype.
        ValueError: a size or option does not fit.
    """
    if request.kind not in ("self", "cross"):
        raise ValueError(f'kind: got {request.kind!r}, expected "self" or "cross"')
    request = _ordinary(request)
    call, inputs, what = request.call, request.inputs, request.what
    _check_lse(request)
    _check_tokens(request)
    counts = _row_mask(request)
    rows = _rows(request, counts)
    index = None if isinstance(rows, range) else integers(rows, inputs.q.device)
    whole_sequence = _to_whole(request)
    line, q_at, k_at, first, own, padding = to_frame(request)
    if padding is not None:
        counts = ~padding[:, None] if counts is None else counts & ~padding[:, None]
    lse = None if request.lse is None else request.lse.detach().reshape(call.batch, call.heads, call.queries)
    key_segments, row_segments = segments_of(request, own, index) or (None, None)
    return Scene(
        call=call,
        plan=None if request.plan is None else request.plan.on(inputs.q.device),
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
        has_norms=request.has_values and what.row_stats,
        first_key=find_first_key(k_at) if _has_keys(what) and request.k_pos is not None else 0,
        whole_sequence=whole_sequence,
        key_segments=key_segments,
        row_segments=row_segments,
        selection=selection_of(request, own),
    )


def _has_keys(what: Observe) -> bool:
    """Return whether the options request a quantity of each key."""
    return what.received or what.received_max


def _to_whole(request: Request) -> Whole:
    """Return the sequence of a request's rows; by default these are all.

    Raises:
        ValueError: it has fewer rows or keys than the call, or positions are specified as well.
    """
    call, at = request.call, request.rows_at
    if at is None:
        return Whole(0, call.queries, call.keys)
    start, total = at
    if start + call.queries > total:
        raise ValueError(
            f"rows_at: {call.queries} rows from row {start} end at {start + call.queries}, expected at most {total}"
        )
    if request.kind == "cross":
        return Whole(start, total, call.keys)
    if request.q_pos is not None or request.k_pos is not None:
        raise ValueError("rows_at: got q_pos or k_pos too, expected one of the two: rows_at places the rows itself")
    if call.keys > total:
        raise ValueError(f"rows_at: got {total} rows in all, expected at least as many as keys: {call.keys}")
    return Whole(start, total, total)


def _ordinary(request: Request) -> Request:
    """Return the request over ordinary tensors, if its q, k, v, bias, sinks and mask are ordinary.

    The native kernels read tensors by their addresses. If q, k, v, bias, sinks or the mask is of a subclass, the
    portable form observes, which calls only operators.

    Raises:
        TypeError: a tensor may not have its own memory; the message names it.
    """
    if request.call.form == "subclass":
        return request
    what = request.what
    options = {name: getattr(request, name) for name in ("lse", "q_pos", "k_pos", "real")}
    measured = {name: getattr(what, name, None) for name in ("tokens", "rows", "token_before", "selected")}
    changed = _changed(options)
    if of_what := _changed(measured):
        changed["what"] = replace(what, **of_what)
    return replace(request, **changed) if changed else request


def _changed(tensors: dict[str, Any]) -> dict[str, Any]:
    """Return those of a subclass of Tensor, as ordinary tensors."""
    return {
        name: to_ordinary("mask" if name == "real" else name, x)
        for name, x in tensors.items()
        if isinstance(x, Tensor) and type(x) not in ORDINARY
    }


def _pick(tensor: Tensor, index: Tensor | None, axis: int) -> Tensor:
    return tensor if index is None else tensor.index_select(axis, index)


def sample(n: int, of: int) -> Sequence[int]:
    """Return the middle of each of n equal parts; all if there are at most n."""
    return range(of) if n >= of else [(2 * r + 1) * of // (2 * n) for r in range(n)]


def _rows(request: Request, counts: Tensor | None) -> Sequence[int]:
    queries = request.call.queries
    if isinstance(request.what.rows, int):
        return range(queries) if request.in_whole_pass else sample(request.what.rows, queries)
    if counts is None or counts.device.type != "cpu" or type(counts) not in ORDINARY:  # reading would wait for a GPU
        return range(queries)
    picked = counts.any(0).any(0).nonzero()[:, 0].tolist()
    return range(queries) if len(picked) == queries else picked


def _row_mask(request: Request) -> Tensor | None:
    rows, call, q = request.what.rows, request.call, request.inputs.q
    if isinstance(rows, int) and request.in_whole_pass:
        counts = torch.zeros(call.queries, dtype=torch.bool, device=q.device)
        counts[list(sample(rows, call.queries))] = True
        return counts.expand(call.batch, call.heads, call.queries)
    if not isinstance(rows, Tensor):
        return None
    expected = (*(call.lead or (1,)), call.heads, call.queries)
    if rows.device != q.device:
        raise ValueError(f"rows: is on {rows.device}, q is on {q.device}")
    try:
        return rows.expand(expected).reshape(call.batch, call.heads, call.queries)  # [B, H, Q]
    except RuntimeError:
        hint = "; for the same rows in every head, pass [B, 1, Q]" if rows.ndim > 1 else ""
        raise ValueError(
            f"rows: does not broadcast to [B, H, Q] = {list(expected)}{hint}; {shapes(rows=rows, q=q)}"
        ) from None


def _check_lse(request: Request) -> None:
    lse, call, q = request.lse, request.call, request.inputs.q
    if lse is None:
        return
    check_type("lse", lse, Tensor, "a torch.Tensor or None")
    check_layout("lse", lse)
    if lse.dtype not in FLOATS:
        raise TypeError(f"lse: dtype is {kind(lse)}, expected a floating one")
    if lse.device != q.device:
        raise ValueError(f"lse: is on {lse.device}, q is on {q.device}")
    expected = (*call.lead, call.heads, call.queries)
    if lse.shape != expected:
        raise ValueError(f"lse: expected [B, H, Q] = {list(expected)}; {shapes(lse=lse, q=q)}")


def _check_tokens(request: Request) -> None:
    tokens, call = request.what.tokens, request.call
    if tokens is None:
        return
    keys, lead = call.keys, call.lead
    if tuple(tokens.shape) not in ((keys,), (1, keys), (call.batch, keys), (*lead, keys)):
        raise ValueError(
            f"tokens: expected [K] or [B, K], here [{keys}] or [{call.batch}, {keys}]; "
            f"{shapes(tokens=tokens, k=request.inputs.k)}"
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
    largest = [float(x.detach().abs().amax()) for x in (inputs.q, inputs.k)]
    factor = max(1.0, abs(call.scale), abs(call.scale) / (call.softcap or 1))
    if not largest[0] * largest[1] * call.head_dim * factor < HUGE:  # excludes NaN too
        return False
    if norms is not None and not float(norms.amax()) < HUGE:
        return False
    if inputs.sinks is not None and not float(inputs.sinks.amax()) < HUGE:
        return False
    return inputs.bias is None or float(inputs.bias.amax()) < HUGE

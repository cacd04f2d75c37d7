"""attention, attend, observe: softmax(q kᵀ · scale) v, with every option, and a look at the weights behind it."""

from __future__ import annotations

import atexit
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.compiler import is_dynamo_compiling
from torch.nn import functional as F

from headscope._attend import nonfinite, operators
from headscope._attend.backends import blocked, native, sdpa
from headscope._attend.backends.visibility import Pair, gradients_of_bad_inputs
from headscope._attend.call import ORDINARY, Call, Options, described, fold, fold_mask, form
from headscope._attend.interface import Backend, Inputs, Work, full_precision, is_lazy
from headscope._attend.select import select
from headscope._support.arguments import check_layout
from headscope._support.torch_state import CONTEXT_PARALLEL, check_context_parallel, has_no_values, is_traced
from headscope.masks import Mask, Plan, as_mask, decode
from headscope.stats import HeadStats, Observe

__all__ = ["Attended", "attend", "attention", "observe"]


class Attended(NamedTuple):
    """What ``attend`` returns.

    Attributes:
        out: [B, H, Q, Dv], in q's dtype.
        lse: [B, H, Q], float32 (float64 for float64): log Σ exp of the logits each row may see, its sink included;
            -inf for a row that may see nothing.
        stats: what was asked for by ``observe=``; else None.
    """

    out: Tensor
    lse: Tensor
    stats: HeadStats | None = None


class Prepared(NamedTuple):
    """All that can be known of a call without looking at its tensors."""

    call: Call
    mask: Mask | None
    plan: Plan | None
    backend: Backend
    canonical: bool
    """q, k, v already have four axes and equal batch sizes."""
    repeat: Callable[..., tuple[Tensor, Tensor | None] | None] | None
    """A short way for the same call on other tensors, where the backend has one: out, and lse if asked for."""
    before: dict[Any, Any]
    """Observations of such calls, and short ways to them: see ``_observe_sums``."""


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    """Scaled dot-product attention: each query's average of the values, weighted by softmax over the keys it may see.

    s[i, j] = scale · q_i·k_j, capped, plus bias[i, j]; p = softmax of s over what may be seen; out_i = Σ_j p[i, j] v_j.

    Shapes: q [B, H, Q, D], k [B, Hkv, K, D], v [B, Hkv, K, Dv] -> [B, H, Q, Dv]. Leading axes broadcast; three axes are
    [H, Q, D]. Where Hkv < H, query head h uses key/value head h // (H / Hkv).

    Args:
        q: queries; float32, bfloat16, float16 or float64. Query i stands at position i + (K - Q).
        k: keys, dtype and device as q.
        v: values, dtype and device as q.
        mask: what may be seen: a mask of ``headscope.masks``, or a boolean tensor that broadcasts to [B, H, Q, K], True
            = attend (``nn.MultiheadAttention`` means the opposite).
        bias: added to the logits after scale and cap; a floating tensor that broadcasts to [B, H, Q, K]; -inf = hidden.
        scale: factor of the dot products; by default D ** -0.5.
        softcap: c > 0 replaces each scaled logit s by c · tanh(s / c).
        sinks: one logit a head, [H], that takes part in the softmax and has no value: rows then sum to less than one.
        dropout: probability in [0, 1) with which a weight is dropped, whenever it is above 0; seeded from torch's
            generator.
        backend: "cpu", "sdpa", "blocked" or "reference"; by default the fastest that takes the call.

    A row that may see nothing gives 0, with zero gradients. NaN and infinity reach exactly the rows that may see them.
    Softmax is computed in float32 or better. The second derivative exists for the reference backend only, and
    where torch.func asks for it within a compiled function.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: a size or option that does not fit, or a named backend that refuses the call.

    Source: Vaswani et al. 2017, "Attention Is All You Need", equation 1; softcap: Gemma 2 (2024), section 2; sinks:
    gpt-oss (2025); grouped heads: Ainslie et al. 2023.
    """
    run = _run if watched is None else watched
    return run(q, k, v, mask, bias, sinks, (scale, softcap, dropout, False), backend)[0]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
    observe: Observe | None = None,
) -> Attended:
    """``attention`` that also returns the log-sum-exp of each row's logits; both are differentiable.

    Shapes: as ``attention``; lse is [B, H, Q]. From q, k and lse any weight can be had again: p = exp(s - lse).

    Args:
        observe: what to measure of the weights, as self-attention with default positions; ``stats`` then holds it. For
            cross-attention, or other positions, call ``observe`` with this lse.
    """
    if observe is not None and not isinstance(observe, Observe):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"observe: got {type(observe).__name__}, wanted a headscope.Observe or None")
    if observe is not None and watched is None:
        done = _attend_and_observe((q, k, v, bias, sinks), mask, (scale, softcap, dropout, True), backend, observe)
        if done is not None:
            return done
    run = _run if watched is None else watched
    out, lse = run(q, k, v, mask, bias, sinks, (scale, softcap, dropout, True), backend)
    assert lse is not None  # every backend that takes a call with lse returns it
    if observe is None:
        return Attended(out, lse)
    return Attended(out, lse, _observe((q, k, v, bias, sinks), mask, (scale, softcap, dropout, False), lse, observe))


def observe(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    *,
    lse: Tensor | None = None,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
    q_pos: Tensor | None = None,
    k_pos: Tensor | None = None,
    kind: Literal["self", "cross"] = "self",
    what: Observe | None = None,
) -> HeadStats:
    """Measure the attention weights without filling their matrix: statistics of each head, in linear memory.

    Shapes: as ``attention``. Every number is defined in docs/statistics.md. q, k, v may need gradients; none flow.

    Args:
        q, k, mask, bias, scale, softcap, sinks: as for ``attention``.
        v: values, for ``value_norm``; without them it is left out.
        lse: log-sum-exp of each row, [B, H, Q], from ``attend`` or from another kernel. What agrees with q and k to
            within rounding changes nothing; anything else is taken as it stands, p = exp(s - lse).
        dropout: checked and ignored: the weights before dropout are measured.
        backend: checked and ignored: the backend that attended does not matter.
        q_pos: where queries stand: numbers [Q], [Q, 2] on a grid, or [B, Q, 1 or 2]; NaN = has no position. By default
            those of the last Q keys, or what ``Band(offset=...)`` in the mask says.
        k_pos: where keys stand, likewise [K], [K, 2] or [B, K, 1 or 2]; by default 0, 1, 2, …
        kind: "cross" where queries and keys share no axis: distance, self, previous, next, window, duplicate, induction
            are then absent, positions mean nothing, and no row is padding unless ``what.rows`` says so.
        what: what to measure; by default ``Observe()``.

    Rows that may see nothing take part in nothing; nor do, in self-attention, rows whose own key is hidden from the
    whole batch entry (padding), and rows that hold NaN or infinity, which are counted in ``HeadStats.broken``.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: a size or option that does not fit.
    """
    if backend is not None:
        given = k if v is None else v
        _prepare(q, k, given, mask, bias, sinks, (scale, softcap, dropout, False), backend)  # whether it takes them
    places = (q_pos, k_pos, kind, None)
    numbers = (scale, softcap, dropout, False)
    return _observe((q, k, v, bias, sinks), mask, numbers, lse, Observe() if what is None else what, places)


_Places = tuple[Tensor | None, Tensor | None, Literal["self", "cross"], Tensor | None]
"""q_pos, k_pos, kind, and which keys are real, boolean [B or 1, K], where more is known of it than the mask says."""


def _observe(
    tensors: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None], mask: Mask | Tensor | None,
    numbers: _Numbers, lse: Tensor | None, what: Observe, places: _Places = (None, None, "self", None),
) -> HeadStats:  # fmt: skip
    if is_dynamo_compiling():  # all of it runs outside of the graph, which has no numbers to look at
        from headscope._attend import eager

        return eager.observe(tensors, mask, numbers, lse, what, places)
    _check_readable(*tensors[:3])
    from headscope._observe import aggregate
    from headscope._observe.inputs import Request

    if not isinstance(what, Observe):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"what: got {type(what).__name__}, wanted a headscope.Observe")
    q, k, v, bias, sinks = tensors
    for name, x in (("q", q), ("k", k), ("v", v)):
        if isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            check_layout(name, x)
    values = v if v is not None else k[..., :1] if isinstance(k, Tensor) else k  # pyright: ignore[reportUnnecessaryIsInstance]
    with torch.no_grad():
        prepared = prepare(q, k, values, mask, bias, sinks, numbers, "blocked")
        inputs = Inputs(*(x if x is None else x.detach() for x in canonical(prepared, q, k, values, bias, sinks)))  # pyright: ignore[reportArgumentType]
    call, known = prepared.call, prepared.mask
    request = Request(call, known, prepared.plan, inputs, v is not None, lse, *places, what, prepared.before, False)
    return aggregate.observe(request)


def _check_readable(*tensors: Tensor | None) -> None:
    """Whether tensors hold numbers that can be looked at."""
    if has_no_values() or any(isinstance(x, Tensor) and (x.is_meta or isinstance(x, FakeTensor)) for x in tensors):
        raise ValueError(
            "observe: its tensors have no values to look at (meta or fake tensors, make_fx, torch.export); observe "
            "where the model runs"
        )


def _attend_and_observe(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], mask: Mask | Tensor | None, numbers: _Numbers,
    backend: str | None, what: Observe,
) -> Attended | None:  # fmt: skip
    """Both in one pass, where the native kernels attend, no gradient is wanted and all rows are seen; else None."""
    q, k, v, bias, sinks = tensors
    prepared = _prepare(q, k, v, mask, bias, sinks, numbers, backend)
    again = prepared.before.get(id(what))
    if again is not None and bias is None and sinks is None:
        done = again(q, k, v)
        if done is not None:
            return Attended(*done)
    call = prepared.call
    if not isinstance(what, Observe) or what.rows is not None or call.dropout:  # pyright: ignore[reportUnnecessaryIsInstance]
        return None
    if prepared.backend.name != native.name or call.form != "plain" or call.grad or call.bias_grad:
        return None
    from headscope._observe import aggregate
    from headscope._observe.inputs import Request

    inputs = canonical(prepared, q, k, v, bias, sinks)
    places = (None, None, "self", None)
    has_place = prepared.canonical and all(x.stride(-1) == 1 and not is_lazy(x) for x in (q, k, v))
    request = Request(call, prepared.mask, prepared.plan, inputs, True, None, *places, what, prepared.before, has_place)
    done = aggregate.attend(request)
    if done is None:
        return None
    out, lse, stats = done
    return Attended(out.reshape(*call.lead, *out.shape[1:]), lse.reshape(*call.lead, *lse.shape[1:]), stats)


def weights(
    q: Tensor,
    k: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention weights themselves, by definition: a [B, H, Q, K] tensor, so its memory is quadratic.

    Arguments as ``attention``. float32 or better, whatever the dtype of q.
    """
    from headscope._attend.backends import reference

    v = k[..., :1]
    prepared = prepare(q, k, v, mask, bias, sinks, (scale, softcap, 0.0, True), "reference")
    with full_precision(prepared.call):
        p, _ = reference.weights(prepared.call, prepared.plan, canonical(prepared, q, k, v, bias, sinks))
    return p.reshape(*prepared.call.lead, *p.shape[1:])  # [*lead, H, Q, K]


_modules = sys.modules
_Numbers = tuple[float | None, float | None, float, bool]  # scale, softcap, dropout, lse


class PreparedCalls(dict[Any, Prepared]):
    """Prepared calls by their keys.

    Attributes:
        latest: the key and the preparation of the latest call: comparing two keys takes half as long as hashing one.
    """

    latest: tuple[Any, Prepared | None] = (None, None)

    def clear(self) -> None:
        """Forget all of them."""
        self.latest = (None, None)
        super().clear()


_kept = PreparedCalls()
_kept_rows = [0]
_KEPT = 1024
_KEPT_ROWS = 1 << 19  # of the plans of their masks, of some 50 bytes each

watched: Callable[..., tuple[Tensor, Tensor | None]] | None = None
"""What runs in the place of ``_run`` while a model is watched (see ``_watch_frames``): it calls it, and looks on."""


def _run(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    numbers: _Numbers, backend: str | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    prepared = _prepare(q, k, v, mask, bias, sinks, numbers, backend)
    repeat = prepared.repeat
    if repeat is not None:
        done = repeat(q, k, v) if bias is None and sinks is None else repeat(q, k, v, bias, sinks)
        if done is not None:
            return done
    call = prepared.call
    inputs = canonical(prepared, q, k, v, bias, sinks)
    if call.form == "subclass":
        inputs = inputs._replace(q=_in_class(inputs, prepared.mask))
    if call.form == "traced" and prepared.backend.name in operators.BACKENDS:
        out, lse = operators.attend(call, prepared.mask, inputs, prepared.backend.name)
    else:
        out, lse = _attend_now(prepared, inputs, prepared.backend)
    if len(call.lead) != 1:
        out = out.reshape(*call.lead, *out.shape[1:])  # [*lead, H, Q, Dv]
        lse = None if lse is None else lse.reshape(*call.lead, *lse.shape[1:])  # [*lead, H, Q]
    return out, lse


def _in_class(inputs: Inputs, mask: Mask | None) -> Tensor:
    """Return q in the subclass of Tensor that another argument has, so that the result has it, as by torch's SDPA."""
    q = inputs.q
    if type(q) in ORDINARY:
        for x in (*inputs[1:], *(() if mask is None else mask.tensors())):
            if x is not None and type(x) not in ORDINARY:
                q = q * x.new_ones((), dtype=q.dtype)  # exact, and an operator: it is the subclass that says its class
    return q


def _attend_now(prepared: Prepared, inputs: Inputs, backend: Any, **seed: int) -> tuple[Tensor, Tensor | None]:
    call, plan = prepared.call, prepared.plan
    attend = partial(backend.attend, **seed) if seed else backend.attend
    with full_precision(call):
        if hasattr(backend, "attend_finite") and not call.dropout:  # its kernels notice themselves
            done = backend.attend_finite(call, plan, inputs)
            return nonfinite.attend(attend, call, plan, inputs, attend) if done is None else done
        careful = getattr(backend, "attend_careful", None)
        if nonfinite.suspicious(call, inputs, with_bias=careful is not None):
            replaces = blocked.attend if careful is not None else attend
            return nonfinite.attend(careful or attend, call, plan, inputs, replaces)
        return attend(call, plan, inputs)


def _operate(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, codes: list[int], parts: list[Tensor],
    scale: float, softcap: float, dropout: float, seed: Tensor | None, backend: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """What the operator for the forward pass runs: the same as a call without gradients."""
    with torch.no_grad():
        numbers = (scale, softcap or None, dropout, True)
        prepared = prepare(q, k, v, decode(codes, parts), bias, sinks, numbers, backend)
        done = prepared.repeat(q, k, v, bias, sinks) if prepared.repeat is not None else None
        if done is None:
            inputs = Inputs(q, k, v, bias, sinks)
            done = _attend_now(prepared, inputs, _OF_OPERATOR[backend], seed=0 if seed is None else int(seed))
    out, lse = done
    assert lse is not None  # it is asked for
    return out, lse


def _operate_backward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, codes: list[int], parts: list[Tensor],
    scale: float, softcap: float, dropout: float, seed: Tensor | None, backend: str,
    out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None, dbias: bool, dsinks: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """What the operator for the backward pass runs; a gradient that is not wanted has no elements."""
    with torch.no_grad():
        numbers = (scale, softcap or None, dropout, True)
        prepared = prepare(q, k, v, decode(codes, parts), bias, sinks, numbers, backend)
        work = Work(prepared.call, prepared.plan, 0 if seed is None else int(seed))
        inputs = Inputs(q, k, v, bias, sinks)
        with full_precision(prepared.call):
            rest = (grad_out, grad_lse), (dbias, dsinks)
            found = _OF_OPERATOR[backend].gradients(work, inputs, (out, lse), *rest)
            if backend == blocked.name and q.is_cpu and not all(x is None or x.isfinite().all() for x in found[:3]):

                def again(clean: Inputs, grads: Pair) -> tuple[Tensor | None, ...]:
                    results = blocked.attend(work.call, work.plan, clean, seed=work.seed)
                    return blocked.gradients(work, clean, results, grads, rest[1])  # pyright: ignore[reportArgumentType]  # with lse

                found = gradients_of_bad_inputs(work, inputs, rest[0], again) or found
        if backend == blocked.name:
            found = tuple(None if x is None else x.contiguous() for x in found)  # as the fake kernel says
        return tuple(q.new_empty(0) if x is None else x for x in found)


_OF_OPERATOR = {native.name: native, blocked.name: blocked}
operators.implement(_operate, _operate_backward)
atexit.register(_kept.clear)  # torch keeps the operators, and with them this table, until the extension is gone


def prepare(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    numbers: _Numbers, backend: str | None,
) -> Prepared:  # fmt: skip
    """Check a call, choose its backend and plan its mask."""
    found = _prepare(q, k, v, mask, bias, sinks, numbers, backend)
    call, known = found.call, found.mask
    if known is None or found.plan is not None:
        return found
    return found._replace(plan=known.plan(call.batch, call.heads, call.queries, call.keys))


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    numbers: _Numbers, backend: str | None,
) -> Prepared:  # fmt: skip
    """``prepare``, but for the plan of a call that an operator will run; one seen before costs a look into a table."""
    if CONTEXT_PARALLEL in _modules:
        check_context_parallel()
    key = None
    if not is_traced() and (mask is None or not isinstance(mask, Tensor)):
        try:
            if mask is None or not mask.tensors():  # what tensors hold may change under an equal key
                key = (
                    q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
                    (q.is_cpu and k.is_cpu and v.is_cpu) or (q.device, k.device, v.device),  # to name them takes longer
                    type(q), type(k), type(v), mask, backend,
                    q.is_neg() or k.is_neg() or v.is_neg(),  # the memory then holds the negatives
                    numbers, type(numbers[0]), type(numbers[1]), type(numbers[2]),  # True is 1, but no number to say
                    torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or "none"),
                    bias is not None and _key(bias),
                    sinks is not None and _key(sinks),
                )  # fmt: skip
                latest_key, latest = _kept.latest
                if latest_key == key and latest is not None:
                    return latest
                found = _kept.get(key)
                if found is not None:
                    _kept.latest = key, found
                    return found
        except (
            AttributeError,
            TypeError,
            RuntimeError,
        ):  # not such tensors, no mask, not hashable: the checks will tell
            key = None
    found = _prepare_anew(q, k, v, mask, bias, sinks, numbers, backend)
    if key is not None:
        _keep(key, found)
    return found


def _keep(key: tuple[Any, ...], found: Prepared) -> None:
    """Keep what is known of a call, unless its plan takes much; with too many others, or with too long ones, all go."""
    rows = 0 if found.plan is None else math.prod(found.plan.spans.shape[:2])
    if rows > _KEPT_ROWS // 2:
        return
    if len(_kept) >= _KEPT or _kept_rows[0] + rows > _KEPT_ROWS:
        _kept.clear()
        _kept_rows[0] = 0
    _kept[key] = found
    _kept.latest = key, found
    _kept_rows[0] += rows


def _key(x: Tensor) -> tuple[Any, ...]:
    return type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad, x.is_neg()


def _prepare_anew(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    numbers: _Numbers, backend: str | None,
) -> Prepared:  # fmt: skip
    scale, softcap, dropout, lse = numbers
    if isinstance(mask, Tensor) and any(getattr(x, "ndim", 0) > 4 for x in (q, k, v)):
        mask = fold_mask(mask, q, k, v)
    known = as_mask(mask)
    # the operator plans when it runs: to plan here would fill a compiler's graph with what nobody reads
    if is_traced():  # the compiler guards the comparison: a graph from outside of context_parallel is traced anew in it
        _ = F.scaled_dot_product_attention is sdpa.ORIGINAL
    traced = form(q, k, v, bias, sinks, *(() if known is None else known.tensors())) == "traced"
    planned = not traced or backend not in (None, *operators.BACKENDS) or (backend is None and native.native is None)
    call, plan = described(q, k, v, bias, sinks, Options(known, scale, softcap, dropout, lse, planned))
    same = q.ndim == k.ndim == v.ndim == 4 and q.shape[0] == k.shape[0] == v.shape[0] and k.shape[1] == v.shape[1]
    if q.layout == torch.jagged:
        if backend not in (None, "sdpa"):
            raise ValueError(f'backend: got {backend!r} beside nested q, k and v, wanted "sdpa" or None')
        backend = "sdpa"
    chosen = select(call, backend)
    if traced and chosen.name in operators.BACKENDS:
        plan = None
    elif known is not None and plan is None:
        plan = known.plan(call.batch, call.heads, call.queries, call.keys)
    kept = known is None or len(known.tensors()) == 0  # else the plan may change under an equal call
    repeat = None
    if same and kept and call.form == "plain" and hasattr(chosen, "repeater"):
        repeat = chosen.repeater(call, plan, q, k, v, bias, sinks)  # pyright: ignore[reportAttributeAccessIssue]  # not all have one
    return Prepared(call, known, plan, chosen, same, repeat, {})


def canonical(prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> Inputs:
    """The tensors as the backends take them: four axes, one batch size, one number of key/value heads."""
    call = prepared.call
    if bias is not None:
        bias = fold(bias, call.lead)[(None,) * (4 - min(4, bias.ndim))]
    if prepared.canonical:
        return Inputs(q, k, v, bias, sinks)
    return Inputs(
        _four_axes(q, call.lead, call.heads),
        _four_axes(k, call.lead, call.kv_heads),
        _four_axes(v, call.lead, call.kv_heads),
        bias,
        sinks,
    )


def _four_axes(tensor: Tensor, lead: tuple[int, ...], heads: int) -> Tensor:
    last = (heads, *tensor.shape[-2:])
    return tensor.expand(*lead, *last).reshape(math.prod(lead), *last)  # [B, H, length, D]

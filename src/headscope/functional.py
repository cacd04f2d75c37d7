"""attention, attend and observe: softmax(q kᵀ · scale) v with every option, and statistics of its weights."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Literal, NamedTuple

from torch import Tensor

from headscope._attend import hook
from headscope._attend.attention import run_attention
from headscope._attend.backends import reference
from headscope._attend.dtensors import attend_parts
from headscope._attend.interface import full_precision
from headscope._attend.prepare import canonical_inputs, prepare, prepare_with_plan
from headscope._observe import Positions, attend_and_observe, check_differentiable, observe_call
from headscope._support.arguments import check_type, shapes, whole
from headscope._support.arguments import kind as _kind
from headscope._support.precision import exact_products
from headscope._support.tensor_classes import ORDINARY, is_distributed
from headscope.masks import Mask
from headscope.stats import HeadStats, Observe

__all__ = ["Attended", "attend", "attention", "observe"]


class Attended(NamedTuple):
    """The result of ``attend``.

    Attributes:
        out: [B, H, Q, Dv], in q's dtype.
        lse: [B, H, Q], float32 (float64 for float64): log Σ exp of the visible logits of each row, its sink included;
            -inf for a row without visible keys.
        stats: the statistics that ``observe=`` requests; else None. Those that ``differentiable=`` names are in
            ``stats.differentiable``, too.

    Examples:
        >>> import torch
        >>> from headscope import attend
        >>> q, k, v = torch.randn(3, 1, 2, 4, 8)
        >>> result = attend(q, k, v)
        >>> result.out.shape, result.lse.shape, result.stats
        (torch.Size([1, 2, 4, 8]), torch.Size([1, 2, 4]), None)
    """

    out: Tensor
    lse: Tensor
    stats: HeadStats | None = None


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
    """Return scaled dot-product attention: for each query, the values averaged with softmax weights over visible keys.

    s[i, j] = scale · q_i·k_j, capped, plus bias[i, j]; p = softmax of s over visible keys; out_i = Σ_j p[i, j] v_j.

    Shapes: q [B, H, Q, D], k [B, Hkv, K, D], v [B, Hkv, K, Dv] -> [B, H, Q, Dv]. Leading axes broadcast; three axes are
    [H, Q, D]. Where Hkv < H, query head h uses key/value head h // (H / Hkv).

    Args:
        q: queries; float32, bfloat16, float16 or float64. Query i stands at position i + (K - Q).
        k: keys, dtype and device as q.
        v: values, dtype and device as q.
        mask: which keys are visible: a mask of ``headscope.masks``, or a boolean tensor that broadcasts to [B, H, Q,
            K], True = attend (``nn.MultiheadAttention`` means the opposite).
        bias: added to the logits after scale and cap; a floating tensor that broadcasts to [B, H, Q, K]; -inf = masked.
        scale: factor of the dot products; by default D ** -0.5.
        softcap: c > 0 replaces each scaled logit s by c · tanh(s / c).
        sinks: one logit for each head, [H], that takes part in the softmax and has no value: rows then sum to less than
            one.
        dropout: probability in [0, 1) with which a weight is dropped, whenever it is above 0; seeded from torch's
            generator.
        backend: "cpu", "sdpa", "fused", "flex", "blocked", "reference" or "reproducible"; by default the fastest that
            supports the call.

    A row without visible keys gives 0, with zero gradients. NaN and infinity reach exactly the rows where they are
    visible. Softmax is computed in float32 or better. Only the reference backend has a second derivative, and compiled
    functions in which torch.func computes it.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: a size or option that does not fit, or a named backend that refuses the call.

    Source: Vaswani et al. 2017, "Attention Is All You Need", equation 1; softcap: Gemma 2 (2024), section 2; sinks:
    gpt-oss (2025); grouped heads: Ainslie et al. 2023.

    Examples:
        >>> import torch
        >>> from headscope import attention, masks
        >>> q, k, v = torch.randn(3, 1, 2, 4, 8)
        >>> attention(q, k, v, mask=masks.causal()).shape
        torch.Size([1, 2, 4, 8])
    """
    interceptor = hook.interceptor  # read once: another thread may end its watch
    handler = run_attention if interceptor is None else interceptor
    if type(q) not in ORDINARY and is_distributed(q):
        handler = partial(attend_parts, handler)
    return handler(q, k, v, mask, bias, sinks, scale, softcap, dropout, False, backend)[0]


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
    differentiable: Collection[str] = (),
) -> Attended:
    """Return ``attention`` and the log-sum-exp of each row's logits; both are differentiable.

    Shapes: as ``attention``; lse is [B, H, Q]. q, k and lse determine each weight: p = exp(s - lse).

    Args:
        q, k, v, mask, bias, scale, softcap, sinks, dropout, backend: as for ``attention``.
        observe: what to measure of the weights, as self-attention with default positions; ``stats`` holds the result.
            For cross-attention, or other positions, call ``observe`` with this lse.
        differentiable: which of "entropy", "received" and "segments" get a graph, for a loss, in
            ``stats.differentiable``; gradients flow to q, k, bias and sinks, once.

    Examples:
        >>> import torch
        >>> from headscope import attend
        >>> q, k, v = torch.randn(3, 1, 2, 4, 8)
        >>> out, lse, _ = attend(q, k, v)
        >>> p = (8**-0.5 * q @ k.mT - lse[..., None]).exp()
        >>> torch.allclose(p @ v, out, atol=1e-4)
        True
    """
    if observe is not None:
        check_type("observe", observe, Observe, "a headscope.Observe or None")
    names = check_differentiable(differentiable, observe) if differentiable != () else ()
    interceptor = hook.interceptor  # read once: another thread may end its watch
    handler = run_attention if interceptor is None else interceptor
    if type(q) not in ORDINARY and is_distributed(q):
        handler = partial(attend_parts, handler)
    if observe is not None and handler is run_attention and not names:
        result = attend_and_observe(q, k, v, mask, bias, sinks, scale, softcap, dropout, backend, observe)
        if result is not None:
            return Attended(*result)
    out, lse = handler(q, k, v, mask, bias, sinks, scale, softcap, dropout, True, backend)
    assert lse is not None  # every backend that supports a call with lse returns it
    if observe is None:
        return Attended(out, lse)
    arguments = (q, k, v, mask, bias, sinks, scale, softcap, dropout, lse, observe)
    return Attended(out, lse, observe_call(*arguments, differentiable=names))


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
    rows_at: tuple[int, int] | None = None,
    what: Observe | None = None,
    differentiable: Collection[str] = (),
) -> HeadStats:
    """Measure the attention weights without building their matrix: statistics of each head, in linear memory.

    Shapes: as ``attention``. docs/concepts/statistics.md defines every number. q, k and v may require gradients; they
    flow from ``differentiable`` only.

    Args:
        q, k, mask, bias, scale, softcap, sinks: as for ``attention``.
        v: values, for ``value_norm``; without them it is absent.
        lse: log-sum-exp of each row, [B, H, Q], from ``attend`` or from another kernel. If it equals the row's own lse
            within rounding, it changes nothing; else it is used as passed, p = exp(s - lse). It must be at least the
            row's largest logit.
        dropout: checked and ignored: the weights before dropout are measured.
        backend: checked and ignored: the backend that attended does not matter.
        q_pos: positions of the queries: numbers [Q], [Q, 2] on a grid, or [B, Q, 1 or 2]; NaN = has no position. By
            default those of the last Q keys, or as ``Band(offset=...)`` in the mask specifies.
        k_pos: positions of the keys, likewise [K], [K, 2] or [B, K, 1 or 2]; by default 0, 1, 2, …
        kind: "cross" if queries and keys do not share an axis: distance, self, previous, next, window, duplicate and
            induction are then absent, positions are ignored, and only ``what.rows`` marks padding.
        rows_at: (start, total): these rows are rows start, start + 1, … of a sequence with ``total`` rows, of which k
            has the first keys: a chunk of a prefill, or of a text that is longer than memory. The statistics of all
            chunks then merge to those of the whole: positions, maps, edges and retained rows count from its first row.
            Keys before these rows count as real unless ``KeyLengths``, or a mask [B, 1, 1, K], hides them.
        what: what to measure; by default ``Observe()``.
        differentiable: which of "entropy", "received" and "segments" get a graph, as in ``attend``. They are those of
            each row's own lse, so ``lse`` must be None.

    Rows without visible keys do not count. In self-attention, rows whose own key is masked for the whole batch entry
    (padding) do not count either. Rows that hold NaN or infinity are counted in ``HeadStats.broken`` only.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: a size or option that does not fit; an ``lse`` that gives a weight above 1, or that is passed
            together with ``differentiable``.

    Examples:
        >>> import torch
        >>> from headscope import masks, observe
        >>> q = k = torch.zeros(1, 2, 4, 8)  # equal weights: the queries attend to 1, 2, 3 and 4 keys
        >>> stats = observe(q, k, mask=masks.causal())
        >>> stats["effective_keys"].mean  # of each layer and head
        tensor([[2.5000, 2.5000]], dtype=torch.float64)
    """
    if backend is not None:  # raises if the backend does not support the call
        prepare(q, k, k if v is None else v, mask, bias, sinks, scale, softcap, dropout, False, backend)
    what = Observe() if what is None else what
    positions = Positions(q_pos, k_pos, kind, rows_at=_check_rows_at(rows_at))
    names = check_differentiable(differentiable, what)
    if names and lse is not None:
        raise ValueError(
            "lse: expected None together with differentiable=, because gradients flow through each row's own lse; got "
            f"{shapes(lse=lse)}"
        )
    return observe_call(q, k, v, mask, bias, sinks, scale, softcap, dropout, lse, what, positions, differentiable=names)


def _check_rows_at(rows_at: object) -> tuple[int, int] | None:
    """Return the place of rows in a sequence, checked.

    Raises:
        TypeError: it is not a pair of whole numbers.
        ValueError: a number is too small.
    """
    if rows_at is None:
        return None
    if not isinstance(rows_at, (tuple, list)) or len(rows_at) != 2:
        raise TypeError(f"rows_at: got {_kind(rows_at)}, expected (start, total)")
    start, total = rows_at
    return whole("rows_at", start, 0), whole("rows_at", total, 1)


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
    """Return the attention weights themselves, by definition: a [B, H, Q, K] tensor, so memory is quadratic.

    Arguments as for ``attention``. The result is float32 or better, whatever the dtype of q.
    """
    v = k[..., :1]
    prepared = prepare_with_plan(q, k, v, mask, bias, sinks, scale, softcap, 0.0, True, "reference")
    with full_precision(prepared.call), exact_products(prepared.call.device):
        inputs = canonical_inputs(prepared, q, k, v, bias, sinks)
        p, _ = reference.weights(prepared.call, prepared.plan, inputs)
    return p.reshape(*prepared.call.lead, *p.shape[1:])  # [*lead, H, Q, K]

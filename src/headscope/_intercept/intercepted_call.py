"""One attention call of a watched model, as arguments of headscope, and its statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active, _is_tracing, _len_torch_dispatch_stack
from torch._subclasses import FakeTensor
from torch.nn import functional as F

from headscope import functional
from headscope._attend.attention import run_attention
from headscope._attend.backends import native
from headscope._attend.prepare import prepare
from headscope._intercept.masks import causal_rule, check_class
from headscope._observe import Continued, Positions, Repetition, observe_call, repetition_of
from headscope.masks import Band, Mask, as_mask
from headscope.stats import Observe
from headscope.stats._layer import LayerStats

Kind = Literal["self", "cross"]

COMPILED = (
    "watch: the model, or a part of it, is compiled, so its attention calls cannot be observed; watch and run the "
    "model without torch.compile or torch.jit; headscope.watching.watch_compiled watches headscope's own attention in "
    "compiled models"
)


BY_VISIBILITY = {"normalized_entropy", "chance", "self", "previous", "next", "duplicate", "induction"}
"""The row quantities that depend on whether a key of weight 0 is visible."""


class WatchError(RuntimeError):
    """The error of a model, or a part of it, that cannot be watched.

    Examples:
        >>> import torch
        >>> from headscope import watch
        >>> from headscope.watching import WatchError
        >>> try:
        ...     with watch(torch.nn.Linear(2, 2)):
        ...         pass  # the model does not run
        ... except WatchError as error:
        ...     print(str(error)[:43])
        watch: the model's forward() was not called
    """


class WatchWarning(UserWarning):
    """The warning of a part of a model that may not have been recorded.

    Examples:
        >>> import warnings
        >>> import torch
        >>> from headscope import watch
        >>> class Both(torch.nn.Module):
        ...     def forward(self, x):
        ...         part = torch.nn.functional.pad((x @ x.mT).softmax(-1)[..., 1:], (1, 0))
        ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x) + part @ x
        >>> with warnings.catch_warnings(record=True, action="always") as caught, watch(model := Both()):
        ...     output = model(torch.zeros(1, 2, 4, 8))
        >>> caught[0].category.__name__, str(caught[0].message)[:30]
        ('WatchWarning', 'watch: Both may also attend by')
    """


class Ids(NamedTuple):
    """The token ids of the keys, [K] or [B, K], and of the key before the first one, [] or [B], None = not known."""

    keys: Tensor
    before: Tensor | None


@dataclass(frozen=True, eq=False, kw_only=True)
class InterceptedCall:
    """One attention call, with arguments as for ``headscope.observe``.

    Attributes:
        total: the number of positions of a layer with a cache, this call's included; None = as many as keys.
        beside: the number of keys, at the end, that do not belong to tokens.
        real: which keys are not padding, boolean [B or 1, K], if the mask also masks others; None: as in the mask.
        late: whether a sliding mask has passed the first keys before the first of these rows.
        out: the model's own output, [B, H, Q, Dv], if it is compared with the output of these arguments.
        again: calls the model's own function with 0 for values that are NaN or infinite; [B, Q, H, Dv] comes first.
        attended: the output of the call as the model gets it, [B, H, Q, Dv], if it differs from ``out`` or that is not
            compared; None = unknown, or random.
        projection: weight and bias by which the heads' outputs become ``attended``, which is then [B, Q, E].
        by_headscope: whether headscope attended, so rows without visible keys are 0.
        natively: whether its native kernels did, and will attend and observe in one pass in calls that are like it: the
            output is the same, to the bit.
        own: makes the call, or one of a few of its rows, with the output of the model's own function; if headscope has
            attended instead.
        kind: "self", "cross", or None if the call does not determine it.
        tokens: ids of the keys.
        has_logits: whether the logits are those of the call, and not the logarithms of its weights.
        is_visibility_known: whether it is known which keys of weight 0 are visible; if not, they count as such.
        from_exponentials: whether the weights are exponentials of logits divided by their sum, or the largest logit was
            subtracted, so that the logits follow from q and k.
        is_written: whether a module has written it out: then q and k are 0, and its scores are the bias.
        factors: the queries and keys of such a call, [B, H, Q, D] and [B, H, K, D]; None: unknown.
        may_be_heads: whether what counts as entries of a batch may be heads.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None
    mask: Mask | Tensor | None = None
    bias: Tensor | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    lse: Tensor | None = None
    q_pos: Tensor | None = None
    k_pos: Tensor | None = None
    kind: Kind | None = None
    tokens: Ids | None = None
    total: int | Tensor | None = None
    beside: int = 0
    real: Tensor | None = None
    late: bool = False
    out: Tensor | None = None
    attended: Tensor | None = None
    projection: tuple[Tensor, Tensor | None] | None = None
    by_headscope: bool = False
    natively: bool = False
    again: Callable[[], tuple[Tensor, Tensor | None]] | None = None
    own: Callable[[], InterceptedCall] | None = None
    has_logits: bool = True
    is_visibility_known: bool = True
    from_exponentials: bool = False
    is_written: bool = False
    factors: tuple[Tensor, Tensor] | None = None
    may_be_heads: bool = False

    @property
    def known_keys(self) -> Tensor | None:
        """The keys; None: they are not known."""
        keys = None if self.factors is None else self.factors[1]
        return keys if self.is_written else self.k


def layout_of(q: Tensor, k: Tensor, v: Tensor) -> Hashable | None:
    """Return how q, k and v lie in memory, if headscope's kernels can read it as it is; else None."""
    if _len_torch_dispatch_stack() or _are_functorch_transforms_active() or _is_tracing():
        return None
    if not (type(q) is type(k) is type(v) is Tensor and q.is_cpu and k.is_cpu and v.is_cpu):
        return None
    strides = q.stride(), k.stride(), v.stride()
    for x, stride in zip((q, k, v), strides, strict=True):
        if len(stride) != 4 or stride[3] != 1 or x.is_neg():
            return None
    if torch.is_autocast_enabled("cpu"):
        return None
    return q.shape, k.shape, v.shape, strides, q.dtype, k.dtype, v.dtype, requires_gradient(q, k, v)


def requires_gradient(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether a call of these tensors has a graph."""
    return (q.requires_grad or k.requires_grad or v.requires_grad) and torch.is_grad_enabled()


class Measured(NamedTuple):
    """The result of a measurement.

    Attributes:
        part: returns the statistics.
        again: measures calls like this one; None: each has to be described.
    """

    part: Callable[[], LayerStats]
    again: Repetition | None = None


def measure(call: InterceptedCall, what: Observe) -> Measured:
    """Measure one call.

    Raises:
        WatchError: the call has no values, or is a transform's and not the model's own.
        TypeError, ValueError: it cannot be observed with these options.
    """
    check_values(call)
    if call.tokens is not None and call.kind != "cross":
        what = _with_tokens(what, call.tokens)
    cross = call.kind == "cross"
    positions = Positions(call.q_pos, call.k_pos, "self", call.real)
    if cross:
        positions = Positions(kind="cross", real=call.real if call.is_written else None)
    q, k, v, options = call.q, call.k, call.v, (call.scale, call.softcap, 0.0)
    positions = replace(positions, with_native_pass=call.natively, repeats=True)
    stats = observe_call(q, k, v, call.mask, call.bias, call.sinks, *options, call.lse, what, positions)
    late = call.late or _forgotten(call) > 0
    if call.has_logits and call.is_visibility_known and not call.beside and not late:
        parts = stats.parts
        part = parts if callable(parts) else partial(parts.__getitem__, "0")
        return Measured(part, repetition_of(parts))
    part = _corrected(stats.parts["0"], call, late)
    return Measured(lambda: part)


def _corrected(part: LayerStats, call: InterceptedCall, late: bool) -> LayerStats:
    """Return the statistics without what is unknown of a call; ``late``: its first keys."""
    if call.beside and call.kind != "cross":
        part = _of_tokens(part, call)
    if not call.has_logits:
        part = _without(part, {"lse", "max_logit"})
    if not call.is_visibility_known:
        masses = part.segments and replace(part.segments, first_sum=None, null_sums=None)
        part = replace(_without(part, BY_VISIBILITY), eligible=None, nulls=None, segments=masses)
        return _without_first(part)
    return _behind_first(part) if late else part


def check_values(call: InterceptedCall) -> None:
    """Raise if a call has no values.

    Raises:
        WatchError: its tensors are placeholders.
    """
    if call.q.device.type == "meta" or isinstance(call.q, FakeTensor):
        raise WatchError("its tensors have no values (meta or fake tensors)")
    if _are_functorch_transforms_active() or _is_tracing():
        raise WatchError("the model runs within torch.func or torch.jit.trace, where tensors are placeholders")


def _with_tokens(what: Observe, ids: Ids) -> Observe:
    if ids.before is None:
        return replace(what, tokens=ids.keys)
    options: dict[str, Any] = {each.name: getattr(what, each.name) for each in fields(what)}
    options["tokens"] = ids.keys
    return Continued(**options, token_before=ids.before)


def _forgotten(call: InterceptedCall) -> int:
    """Return the number of first keys that a sliding cache has dropped."""
    return max(0, call.total - call.k.shape[-2] + call.beside) if isinstance(call.total, int) else 0


def _of_tokens(part: LayerStats, call: InterceptedCall) -> LayerStats:
    """Retain ``received`` of the keys of tokens only: the positions of the other keys are those of later tokens."""
    first, tokens = _forgotten(call), call.k.shape[-2] - call.beside
    fill = {"received": 0, "eligible": 0, "received_max": math.nan}
    keys = {name: each for name in fill if (each := getattr(part, name)) is not None}
    return replace(part, **{name: F.pad(x[:, :tokens], (first, 0), value=fill[name]) for name, x in keys.items()})


def _without_first(part: LayerStats) -> LayerStats:
    """Remove ``first`` and ``streaming_w``: the first keys are unknown."""
    return _without(part, {name for name in part.moments if name == "first" or name.startswith("streaming_")})


def _behind_first(part: LayerStats) -> LayerStats:
    """Return the statistics of rows that do not see the first keys: segments have no weight on these."""
    part = _without_first(part)
    masses = part.segments
    if masses is None or masses.first_sum is None:
        return part
    return replace(part, segments=replace(masses, first_sum=torch.zeros_like(masses.first_sum)))


def _without(part: LayerStats, dropped: set[str]) -> LayerStats:
    """Remove quantities, and what chance gives for them."""
    moments = {name: each for name, each in part.moments.items() if name not in dropped}
    nulls = None if part.nulls is None else part.nulls.without(dropped)
    rows = tuple(
        replace(each, values={name: rows for name, rows in each.values.items() if name not in dropped})
        for each in part.kept
    )
    return replace(part, moments=moments, kept=rows, nulls=nulls)


def rounded(call: InterceptedCall, *, bias: bool) -> InterceptedCall:
    """Return the call under autocast: SDPA rounds its arguments to its dtype, as matmul does all but the bias.

    headscope's own functions do not: their calls are described unchanged.
    """
    device = call.q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return call
    dtype = torch.get_autocast_dtype(device)
    changed: dict[str, Any] = {}
    for name in ("q", "k", "v", *(("bias",) if bias else ())):
        tensor: Tensor | None = getattr(call, name)
        if tensor is not None and tensor.dtype != torch.float64:
            changed[name] = tensor.to(dtype)
    return replace(call, **changed)


SDPA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
"""The arguments of ``torch.nn.functional.scaled_dot_product_attention`` that may be passed by place."""


def sdpa(args: tuple[Any, ...], kwargs: dict[str, Any], convert: Convert) -> InterceptedCall:
    """Return a call of ``torch.nn.functional.scaled_dot_product_attention`` by its arguments.

    Args:
        args, kwargs: the arguments.
        convert: ``masks.split``, or a cached version of it.

    Raises:
        WatchError: its tensors are nested.
        TypeError, ValueError: its mask cannot be read.
    """
    arguments: dict[str, Any] = {**dict(zip(SDPA, args, strict=False)), **kwargs}
    if any(arguments[name].is_nested for name in SDPA[:3]):
        raise WatchError("its tensors are nested; pass padded tensors with a mask, or exclude the layer with layers=")
    q, k, v = _grouped(*(one_head(arguments[name]) for name in SDPA[:3]))
    attn_mask = arguments.get("attn_mask")
    rule = causal_rule(attn_mask, q.shape[-2], k.shape[-2])
    if attn_mask is None or rule is not None:
        mask, bias = rule, None
    else:
        check_class("attn_mask", attn_mask)
        mask, bias = convert(four_axes(attn_mask, q.shape[:-3]) if q.ndim > 4 else attn_mask)
    if arguments.get("is_causal"):
        top_left = Band(None, 0, offset=0)
        mask = top_left if mask is None else top_left & mask
    kind: Kind | None = "self" if arguments.get("is_causal") or rule is not None else None
    return rounded(
        InterceptedCall(q=q, k=k, v=v, mask=mask, bias=bias, scale=arguments.get("scale"), kind=kind), bias=True
    )


def attend(call: InterceptedCall, dropout: float) -> Tensor:
    """Return the output of the same call by headscope's own kernels."""
    return functional.attention(
        call.q,
        call.k,
        call.v if call.v is not None else call.k,
        mask=call.mask,
        bias=call.bias,
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
        dropout=dropout,
    )


def repeats_natively(call: InterceptedCall, backend: str | None = None) -> bool:
    """Return whether headscope attends natively in such a call, without dropout, and q, k and v alone hold numbers."""
    if call.bias is not None or call.sinks is not None:
        return False
    if call.mask is not None and not (isinstance(call.mask, Mask) and call.mask.is_constant()):
        return False
    v = call.k if call.v is None else call.v
    options = (call.scale, call.softcap, 0.0, False, backend)
    return prepare(call.q, call.k, v, call.mask, call.bias, call.sinks, *options).backend is native


def one_head(tensor: Tensor) -> Tensor:
    """Add an axis of one head: SDPA also accepts [length, width]."""
    return tensor[None] if tensor.ndim == 2 else tensor


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Repeat heads as SDPA does: q's single head over those of k or v, and those of k and v separately."""
    heads = max(x.shape[-3] for x in (q, k, v))
    if q.shape[-3] == 1:
        q = q.expand(*q.shape[:-3], heads, *q.shape[-2:])
    if k.shape[-3] != v.shape[-3] and not {0, 1} & {k.shape[-3], v.shape[-3]}:  # one head is broadcast anyway
        k, v = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (k, v))
    return q, k, v


def four_axes(mask: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Reshape a mask of SDPA from these leading axes to their product."""
    own = mask.shape[:-3]
    if all(n == 1 for n in own):
        return mask.reshape(mask.shape[len(own) :])
    return mask.expand(*lead, *mask.shape[-3:]).flatten(0, -4)


Convert = Callable[[Tensor], tuple[Mask | None, Tensor | None]]


def error_of(call: InterceptedCall) -> tuple[Tensor, float] | None:
    """Return the relative difference of the model's own output from that of these arguments, and its bound.

    It compares two rows of all heads, the last one and one in the middle; rows without visible keys are excluded. The
    difference is relative to the largest value, and infinite if only one of the two is NaN. Returns None if there is
    nothing to compare.
    """
    if call.out is None or call.v is None or 0 in (*call.out.shape, call.k.shape[-2]):
        return None
    check_values(call)
    queries = call.q.shape[-2]
    rows = torch.tensor(sorted({queries // 2, queries - 1}), device=call.q.device)
    apart, largest = _difference(call, call.out, call.v, rows)
    if call.again is not None and bool(call.out.isnan().any()):  # 0 times a value that is NaN: the weights may be right
        again, _ = _difference(call, call.again()[0].transpose(1, 2), call.v.nan_to_num(0.0, 0.0, 0.0), rows)
        apart = apart.minimum(again)
    return apart.amax() / largest, TOLERANCE[call.out.dtype]


def _difference(call: InterceptedCall, out: Tensor, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the difference of some rows of an output from those of these values, [B, H, R], and the largest value."""
    expected, lse = _rows(call, v, rows)
    out = out.detach().index_select(-2, rows).float()
    same = (expected == out) | (expected.isnan() & out.isnan())
    apart = (expected - out).abs().nan_to_num(nan=math.inf, posinf=math.inf).masked_fill(same, 0.0)
    largest = expected.nan_to_num(0.0, 0.0, 0.0).abs().amax().clamp_min(1e-30)
    return torch.where(lse == -math.inf, 0.0, apart.amax(-1)), largest


TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""The largest relative difference of an output from its definition: rounding stays far below, a misread mask exceeds it
by far.
"""


def _rows(call: InterceptedCall, v: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of some queries, [B, H, R, Dv], and their lse, [B, H, R], by definition."""
    q, k = call.q.index_select(-2, rows), call.k
    bias, mask = call.bias, as_mask(call.mask)
    if bias is not None and bias.ndim > 1 and bias.shape[-2] > 1:
        bias = bias.index_select(-2, rows)
    if mask is not None:
        batch, heads, queries, keys = math.prod(call.q.shape[:-3]), *call.q.shape[-3:-1], k.shape[-2]
        b, h, j = (torch.arange(n, device=q.device) for n in (batch, heads, keys))
        visible = mask.at(queries, keys).allows(b[:, None, None, None], h[:, None, None], rows[:, None], j)
        bias = torch.where(
            visible, 0.0 if bias is None else bias, -math.inf
        )  # unlike a tensor in a mask, not planned again
    out, lse = run_attention(q, k, v, None, bias, call.sinks, call.scale, call.softcap, 0.0, True, None)
    assert lse is not None  # requested
    return out.float(), lse


for _class in (WatchError, WatchWarning):
    _class.__module__ = "headscope.watching"  # their public path

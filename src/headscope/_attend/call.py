"""Call: a frozen, validated description of one attention. ``describe`` makes every check."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headscope._attend.form import Form, form, may_need_gradient
from headscope._attend.mask_arguments import check_mask
from headscope._attend.tensor_arguments import check_bias, check_sinks, check_sizes
from headscope._support.arguments import check_dropout, check_scale, check_softcap, shapes
from headscope.masks import Dense, Mask, Plan

FACTORS = {"float32": (2.0**-100, 2.0**100), "float64": (2.0**-1000, 2.0**1000)}
"""The range of scale, softcap and scale / softcap, by the dtype of the logits: none of them is 0 or infinite there, and
what a product of q and k may lose below the smallest number of the dtype is below its rounding of a logit of 1."""

Spans = Literal["all", "causal", "keys", "rows"]
Rest = Literal["none", "dense", "other", "many"]


@dataclass(frozen=True, slots=True)
class Call:
    """One attention, without its tensors.

    Attributes:
        lead: the leading axes of the result, before [H, Q, Dv]; their product is B.
        spans: how much of the matrix may be seen: all; j <= i of a square one; the same keys for each query of a batch
            entry; or other spans.
        rest: whether a boolean tensor ("dense"), or another rule, says more than the spans; "many" = more of them than
            the native kernels take.
        bias: the shape of the bias, or None.
        lse: whether the row log-sum-exp is asked for.
        grad: whether a gradient may be asked for, of q, k, v or sinks.
        bias_grad: likewise, of the bias.
        form: whether the tensors' memory may be read past torch: "plain", it may; "traced", somebody looks at the
            operators that run (see ``is_traced``); "mapped" and "transformed", likewise, and it is torch.func within
            torch.compile, which asks for a first gradient at most, or may ask for any derivative; "subclass", they
            are more than ordinary tensors.
    """

    lead: tuple[int, ...]
    heads: int
    kv_heads: int
    queries: int
    keys: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    device: str
    spans: Spans
    rest: Rest
    may_be_empty: bool
    bias: tuple[int, ...] | None
    bias_dtype: torch.dtype | None
    bias_grad: bool
    scale: float
    softcap: float | None
    sinks: bool
    dropout: float
    lse: bool
    grad: bool
    form: Form

    @property
    def within(self) -> bool:
        """Whether torch.func asks, within torch.compile."""
        return self.form in ("mapped", "transformed")

    @property
    def batch(self) -> int:
        return math.prod(self.lead)

    @property
    def group(self) -> int:
        """Query heads for each key/value head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller may say beside q, k, v; as it came, unchecked.

    Attributes:
        planned: whether to look what the mask comes to; if not, the call is described as if it were anything.
    """

    mask: Mask | None
    scale: float | None
    softcap: float | None
    dropout: float
    lse: bool
    planned: bool = True


def describe(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, options: Options) -> Call:
    """Check everything that can be wrong with one attention, and describe it.

    Raises:
        TypeError: an argument is not of the right kind or dtype.
        ValueError: a size or an option does not fit; the message names argument, axis, letter, got and wanted.
    """
    return describe_and_plan(q, k, v, bias, sinks, options)[0]


def describe_and_plan(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, options: Options
) -> tuple[Call, Plan | None]:
    """``describe``, and what the mask comes to, where that was looked at."""
    lead = check_sizes(q, k, v)
    heads, queries, head_dim = q.shape[-3:]
    kv_heads, keys, v_head_dim = max(k.shape[-3], v.shape[-3]), k.shape[-2], v.shape[-1]
    sizes = (math.prod(lead), heads, queries, keys)
    if q.layout == torch.jagged:
        _check_nested(q, k, v, bias, sinks, options)
    if bias is not None:
        check_bias(bias, lead, (heads, queries, keys), q)
    if sinks is not None:
        check_sinks(sinks, heads, q)
    if options.mask is not None:
        check_mask(options.mask, sizes, q.device)
    plan = options.mask.plan(*sizes) if options.mask is not None and options.planned else None
    unknown = options.mask is not None and plan is None
    scale, softcap = check_scale(options.scale, head_dim), check_softcap(options.softcap)
    _check_factors(scale, softcap, "float64" if q.dtype == torch.float64 else "float32")
    grad = torch.is_grad_enabled()
    call = Call(
        lead=lead,
        heads=heads,
        kv_heads=kv_heads,
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        dtype=q.dtype,
        device=q.device.type,
        spans="rows" if unknown else _spans(plan),
        rest=_rest(options.mask) if unknown else _rest(None if plan is None else plan.rest),
        may_be_empty=unknown or keys == 0 or (plan is not None and plan.may_be_empty) or bias is not None,
        bias=None if bias is None else tuple(bias.shape),
        bias_dtype=None if bias is None else bias.dtype,
        bias_grad=grad and bias is not None and may_need_gradient(bias),
        scale=scale,
        softcap=softcap,
        sinks=sinks is not None,
        dropout=check_dropout(options.dropout),
        lse=options.lse,
        grad=grad and any(x is not None and x.requires_grad for x in (q, k, v, sinks)),
        form=form(q, k, v, bias, sinks, *(() if options.mask is None else options.mask.tensors())),
    )
    return call, plan


INSTEAD_OF_NESTED = (
    "MultiHeadAttention takes nested tensors, with bands for masks; this function takes their rows one behind the "
    "other, with mask=Documents.from_cu_seqlens(offsets)"
)


def _check_nested(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, options: Options) -> None:
    """Nested q, k and v go to torch, which takes no option beside them but the scale."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4 or getattr(tensor, "_ragged_idx", 2) != 2:
            raise ValueError(f"{name}: is a nested tensor, wanted [B, H, ragged, D]; {shapes(q=q, k=k, v=v)}")
    dropout = options.dropout or None
    said = {"mask": options.mask, "bias": bias, "softcap": options.softcap, "sinks": sinks, "dropout": dropout}
    for name, value in said.items():
        if value is not None:
            raise ValueError(f"{name}: got one beside nested q, k and v, wanted none; {INSTEAD_OF_NESTED}")
    if options.lse:
        raise ValueError(f"q, k, v: are nested, wanted ordinary tensors, as attend asks for lse; {INSTEAD_OF_NESTED}")


def _spans(plan: Plan | None) -> Spans:
    if plan is None or plan.full:
        return "all"
    if plan.is_causal:
        return "causal"
    return "keys" if plan.spans.shape[1] == 1 and plan.bounds is not None else "rows"


MOST_RULES = 16
"""Boolean tensors, documents and so on that the native kernels take beside the spans of a mask."""


def _rest(rest: Mask | None) -> Rest:
    if rest is None:
        return "none"
    if isinstance(rest, Dense):
        return "dense"
    return "many" if sum(1 for _ in rest.leaves()) > MOST_RULES else "other"


def _check_factors(scale: float, softcap: float | None, dtype: str) -> None:
    """Whether the dtype of the logits holds scale, softcap and scale / softcap, by which q is multiplied."""
    least, most = FACTORS[dtype]
    factors = [abs(scale)] if softcap is None else [abs(scale), softcap, abs(scale) / softcap]
    if scale == 0:
        factors = factors[1:2]
    if all(least <= factor <= most for factor in factors):
        return
    names, got = "scale", f"scale {scale:g}"
    if softcap is not None:
        names = "scale, softcap and scale / softcap"
        got = f"scale {scale:g}, softcap {softcap:g} and scale / softcap {scale / softcap:g}"
    raise ValueError(
        f"scale: out of range for logits of {dtype}; expected {names} of size {least:.3g} to {most:.3g}, or scale 0, "
        f"got {got}; multiply q or k instead"
    )

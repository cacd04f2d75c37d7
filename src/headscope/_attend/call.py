"""Call: a frozen, validated description of one attention. Every check of its tensors is in this file."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import (
    CGradInterpreterPtr,
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
)
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.compiler import is_dynamo_compiling

from headscope._attend import mask_parts
from headscope._attend.mask_parts import MaskParts
from headscope._support.arguments import check_broadcast, check_layout, check_type, kind, shapes
from headscope._support.compiler import mark_constant
from headscope._support.scalar_options import check_dropout, check_factors, check_scale, check_softcap
from headscope._support.tensor_classes import (
    ORDINARY,
    check_distributed,
    check_has_numbers,
    check_no_causal_bias,
    is_distributed,
)
from headscope._support.torch_state import is_traced
from headscope.masks import Dense, Mask, Plan, check_mask

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Spans = Literal["all", "causal", "keys", "rows"]
Rest = Literal["none", "dense", "other", "many"]
Form = Literal["plain", "traced", "mapped", "transformed", "subclass"]

_STAND_INS = (FakeTensor, FunctionalTensor)  # the class that torch.export uses instead of ordinary tensors


@dataclass(frozen=True, slots=True)
class Call:
    """One attention, without its tensors.

    Attributes:
        lead: the leading axes of the result, before [H, Q, Dv]; their product is B.
        spans: the visible part of the matrix: all; j <= i of a square one; the same keys for each query of a batch
            entry; or other spans.
        rest: whether a boolean tensor ("dense"), or another rule, masks keys within the spans; "many" = more rules than
            the native kernels support.
        bias: the shape of the bias, or None.
        lse: whether the call requests the row log-sum-exp.
        grad: whether a gradient of q, k, v or sinks may be required.
        bias_grad: likewise, of the bias.
        form: whether kernels may read the tensors' memory directly: "plain": yes; "traced": no, because the operators
            are traced or intercepted (see ``is_traced``); "mapped" and "transformed": as traced, by torch.func within
            torch.compile, with a first gradient at most, or any derivative; "subclass": the tensors are of a subclass.
        uniform: whether each row is summed in one order, whatever rows follow it: backend="reproducible".
        needed: the only queries that are needed, as ascending ranges, or None = all. The native kernels skip blocks of
            rows without them: rows that they skip are 0, the others have the bits that they have with all queries.
        parts: the parts of the mask, for fused kernels; None: it has others, or the call is for a CPU.
        compiled: whether torch.compile, or a strict torch.export, traces the call.
        indexable: whether each part of the mask is a rule that a compiler can evaluate by indices; on a CPU unknown.
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
    uniform: bool = False
    needed: tuple[tuple[int, int], ...] | None = None
    parts: MaskParts | None = None
    indexable: bool = False
    compiled: bool = False

    @property
    def in_compiled_func(self) -> bool:
        """Whether torch.func calls, within torch.compile."""
        return self.form in ("mapped", "transformed")

    @property
    def batch(self) -> int:
        return math.prod(self.lead)

    @property
    def group(self) -> int:
        """The number of query heads for each key/value head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a caller, unchecked.

    Attributes:
        planned: whether to plan the mask; if not, the call is described as if the mask could be any.
    """

    mask: Mask | None
    scale: float | None
    softcap: float | None
    dropout: float
    lse: bool
    planned: bool = True


def check_call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, options: Options) -> Call:
    """Check all arguments of one attention, and describe the call.

    Raises:
        TypeError: an argument is not of the right kind or dtype.
        ValueError: a size or an option does not fit; the message names argument, axis, letter, got and expected.
    """
    return check_and_plan(q, k, v, bias, sinks, options)[0]


def check_and_plan(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, options: Options
) -> tuple[Call, Plan | None]:
    """Return ``check_call``, and the plan of the mask, if ``planned``."""
    lead = check_qkv(q, k, v)
    _check_distributed(q, k, v, bias, sinks, options.mask)
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
    described = q.device.type in mask_parts.DEVICES
    parts = mask_parts.parts_of(options.mask, sizes[0], queries, keys) if described else None
    spans: Spans = "rows" if unknown else _spans(plan)
    rest = _rest(options.mask) if unknown else _rest(None if plan is None else plan.rest)
    if spans == "rows" and parts is not None and options.mask is not None:  # no plan, or one whose values are not read
        spans, rest = _spans_of_parts(options.mask, parts, queries, keys, rest)
    scale, softcap = check_scale(options.scale, head_dim), check_softcap(options.softcap)
    dropout = check_dropout(options.dropout)
    check_factors(scale, softcap, "float64" if q.dtype == torch.float64 else "float32")
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
        spans=spans,
        rest=rest,
        may_be_empty=unknown or keys == 0 or (plan is not None and plan.may_be_empty) or bias is not None,
        bias=None if bias is None else tuple(bias.shape),
        bias_dtype=None if bias is None else bias.dtype,
        bias_grad=grad and bias is not None and _may_need_gradient(bias),
        scale=scale,
        softcap=softcap,
        sinks=sinks is not None,
        dropout=dropout,
        lse=options.lse,
        grad=grad and any(x is not None and x.requires_grad for x in (q, k, v, sinks)),
        form=form(q, k, v, bias, sinks, *(() if options.mask is None else options.mask.tensors())),
        parts=parts,
        compiled=is_dynamo_compiling(),
        indexable=described and mask_parts.is_indexable(options.mask),
    )
    return call, plan


def _check_distributed(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, mask: Mask | None
) -> None:
    """Raise if DTensors and ordinary tensors are combined; the square causal mask is a flag of torch's kernels."""
    if "torch.distributed.tensor" not in sys.modules:
        return
    parts = [] if mask is None else [(leaf, x) for leaf in mask.leaves() for x in leaf.tensors()]
    parts.sort(key=lambda part: is_distributed(part[1]))  # of two masks of one class, name the DTensor
    inside = {f"mask ({type(leaf).__name__})": x for leaf, x in parts}
    square = mask is None or (not inside and mask.is_causal(q.shape[-2], k.shape[-2]))
    beside = {"bias": bias, "sinks": sinks, **inside} | ({} if square or inside else {"mask": mask})
    check_distributed({"q": q, "k": k, "v": v}, beside)


def _may_need_gradient(x: Tensor) -> bool:
    """Return whether it requires a gradient.

    For a batch of torch.func its entries decide; under a compiler, assume so.
    """
    if x.requires_grad or not _are_functorch_transforms_active():
        return x.requires_grad
    if is_dynamo_compiling():
        return is_batchedtensor(x)
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
        if x.requires_grad:
            return True
    return False


@mark_constant  # a graph has guards for the transforms around it
def _goes_further() -> bool:
    """Return whether the enclosing transforms of torch.func may require more than a first gradient."""
    taken = [each for each in get_interpreter_stack() if each.key() in (TransformType.Grad, TransformType.Jvp)]
    if len(taken) == 1 and taken[0].key() == TransformType.Grad:
        return CGradInterpreterPtr(taken[0]).prevGradMode()  # autograd may require the next one
    return len(taken) > 0


def form(*tensors: Tensor | None) -> Form:
    """Return how these may be read; see ``Call``."""
    if is_dynamo_compiling() and _are_functorch_transforms_active():
        return "transformed" if _goes_further() else "mapped"
    form_of_call: Form = "traced" if is_traced() else "plain"
    for x in tensors:
        if x is not None and type(x) not in ORDINARY:
            if type(x) not in _STAND_INS:
                return "subclass"
            form_of_call = "traced"
    return form_of_call


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_type(name, tensor, Tensor, "a torch.Tensor")
        check_has_numbers(name, tensor)
        if tensor.layout != torch.jagged:
            check_layout(name, tensor)
        if tensor.layout != q.layout:
            raise TypeError(f"{name}: layout is {tensor.layout}, q has {q.layout}; {shapes(q=q, k=k, v=v)}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name}: dtype is {kind(tensor)}, expected float32, bfloat16, float16 or float64")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name}: dtype is {kind(tensor)}, q has {kind(q)}; convert one of them")
        if tensor.device != q.device:
            raise ValueError(f"{name}: is on {tensor.device}, q is on {q.device}")
        if tensor.ndim < 3:
            raise ValueError(
                f"{name}: has {tensor.ndim} axes, expected at least 3 ([..., H, length, D]); {shapes(q=q, k=k, v=v)}"
            )
        if tensor.shape[-1] == 0:
            letter = "Dv" if name == "v" else "D"
            where = f"axis {tensor.ndim - 1} ({letter})"
            raise ValueError(f"{name}: {where} is 0, expected at least 1; {shapes(q=q, k=k, v=v)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: axis {k.ndim - 1} (D) is {k.shape[-1]}, q has {q.shape[-1]}; {shapes(q=q, k=k, v=v)}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v: axis {v.ndim - 2} (K) is {v.shape[-2]}, k has {k.shape[-2]}; {shapes(q=q, k=k, v=v)}")
    heads, kv_heads = q.shape[-3], k.shape[-3]
    if v.shape[-3] != kv_heads and v.shape[-3] != 1 and kv_heads != 1:
        raise ValueError(f"v: axis {v.ndim - 3} (Hkv) is {v.shape[-3]}, k has {kv_heads}; {shapes(q=q, k=k, v=v)}")
    kv_heads = max(kv_heads, v.shape[-3])
    if kv_heads == 0 or heads % kv_heads:
        expected = f"a divisor of q's {heads} heads" if heads else "at least 1"
        name, of = ("k", k) if k.shape[-3] == kv_heads else ("v", v)
        raise ValueError(
            f"{name}: axis {of.ndim - 3} (Hkv) is {kv_heads}, expected {expected}; {shapes(q=q, k=k, v=v)}"
        )
    if q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        return tuple(q.shape[:-3])
    try:  # the first call of torch.broadcast_shapes imports sympy, about 0.4 s
        return tuple(torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]))
    except RuntimeError as error:
        raise ValueError(f"q, k, v: the leading axes (B) do not broadcast; {shapes(q=q, k=k, v=v)}") from error


INSTEAD_OF_NESTED = (
    "MultiHeadAttention supports nested tensors, with bands as masks; here, concatenate the rows and pass "
    "mask=Documents.from_cu_seqlens(offsets)"
)


def _check_nested(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, options: Options) -> None:
    """Check nested q, k and v: torch attends to them, with scale as the only option."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.ndim != 4 or getattr(tensor, "_ragged_idx", 2) != 2:
            raise ValueError(f"{name}: is a nested tensor, expected [B, H, ragged, D]; {shapes(q=q, k=k, v=v)}")
    dropout = options.dropout or None
    options_by_name = {
        "mask": options.mask,
        "bias": bias,
        "softcap": options.softcap,
        "sinks": sinks,
        "dropout": dropout,
    }
    for name, value in options_by_name.items():
        if value is not None:
            raise ValueError(f"{name}: expected none together with nested q, k and v; {INSTEAD_OF_NESTED}")
    if options.lse:
        raise ValueError(
            f"q, k, v: are nested, expected ordinary tensors, because attend returns lse; {INSTEAD_OF_NESTED}"
        )


def check_bias(bias: Tensor, lead: tuple[int, ...], last: tuple[int, int, int], q: Tensor) -> None:
    check_type("bias", bias, Tensor, "a torch.Tensor")
    check_layout("bias", bias)
    if bias.dtype not in FLOATS:
        hint = "; a boolean tensor is a mask: pass it as mask=" if bias.dtype == torch.bool else ""
        raise TypeError(f"bias: dtype is {kind(bias)}, expected a floating one{hint}")
    if bias.device != q.device:
        raise ValueError(f"bias: is on {bias.device}, q is on {q.device}")
    check_broadcast("bias", bias, lead, last)


def check_sinks(sinks: Tensor, heads: int, q: Tensor) -> None:
    check_type("sinks", sinks, Tensor, "a torch.Tensor")
    check_layout("sinks", sinks)
    if sinks.dtype not in FLOATS:
        raise TypeError(f"sinks: dtype is {kind(sinks)}, expected a floating one")
    if sinks.device != q.device:
        raise ValueError(f"sinks: is on {sinks.device}, q is on {q.device}")
    if sinks.shape != (heads,):
        raise ValueError(f"sinks: expected one logit for each head, [H] = [{heads}]; {shapes(sinks=sinks, q=q)}")


def fold(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """Reshape a tensor that broadcasts to [*lead, H, Q, K] to one that broadcasts to [B, H, Q, K]."""
    if tensor.ndim <= 3 or len(lead) <= 1:
        return tensor
    return tensor.expand(*lead, *tensor.shape[-3:]).reshape(math.prod(lead), *tensor.shape[-3:])  # [B, H, Q, K]


def fold_mask(mask: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Reshape a boolean tensor that broadcasts to [*lead, H, Q, K] to one that broadcasts to [B, H, Q, K]."""
    check_no_causal_bias("mask", mask)
    lead = check_qkv(q, k, v)
    check_broadcast("mask", mask, lead, (q.shape[-3], q.shape[-2], k.shape[-2]))
    return fold(mask, lead)


def _spans(plan: Plan | None) -> Spans:
    if plan is None or plan.full:
        return "all"
    if plan.is_causal:
        return "causal"
    return "keys" if plan.spans.shape[1] == 1 and plan.bounds is not None else "rows"


def _spans_of_parts(mask: Mask, parts: MaskParts, queries: int, keys: int, rest: Rest) -> tuple[Spans, Rest]:
    """Return the spans and the rest of a mask as far as its parts determine them, else ``rest`` with other spans."""
    if mask.at(queries, keys).is_causal(queries, keys):
        return "causal", "none"
    if isinstance(mask, Dense):
        return "all", "dense"
    if parts.lengths and not parts.has_band and parts.packed is None and parts.matrix == "none":
        return "keys", "none"
    return "rows", rest


MOST_RULES = 16
"""The most rules (boolean tensors, documents and so on) that the native kernels support in addition to spans."""


def _rest(rest: Mask | None) -> Rest:
    if rest is None:
        return "none"
    if isinstance(rest, Dense):
        return "dense"
    return "many" if sum(1 for _ in rest.leaves()) > MOST_RULES else "other"

"""Interception of the calls of a running module: a function mode, and headscope's own attention.

torch's transformer modules leave their fast path if a function mode is on, because then
``torch.overrides.has_torch_function`` is true. So that function is replaced by one that does not count this mode.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_function_stack
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from headscope import nn_compat
from headscope._attend import context
from headscope._attend.attention import run_attention
from headscope._dataflow import is_followed
from headscope._intercept import frames, fused, intercepted_call, softmax, torch_modules
from headscope._intercept.alike import Like
from headscope._intercept.intercepted_call import InterceptedCall, Kind
from headscope.cache import Cache
from headscope.masks import Band, Mask, ReversedBand, as_mask
from headscope.module import MultiHeadAttention


class Mode(TorchFunctionMode):
    """A function mode that observes attention calls through torch's functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is not None:
            return handler(func, args, kwargs or {})
        if not torch.compiler.is_compiling() and _may_attend(func):
            return _uncompiled(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


MODE = Mode()
_FAST_PATH: dict[Any, str] = {getattr(torch, name): name for name in torch_modules.FAST_PATH if hasattr(torch, name)}
_TORCH_HAS_FUNCTION = torch.overrides.has_torch_function


def is_on() -> bool:
    """Return whether the function mode is on in this thread."""
    return MODE in _get_current_function_mode_stack()


@contextmanager
def beneath() -> Generator[None]:
    """Put headscope's mode below those of others, which may change the arguments of a function."""
    for mode in reversed([*(_pop_mode() for _ in range(_len_torch_function_stack())), MODE]):
        _push_mode(mode)
    try:
        yield
    finally:
        for mode in reversed(_pop_through_ours()):
            _push_mode(mode)


def has_torch_function(relevant: Any) -> bool:
    """Return ``torch.overrides.has_torch_function`` as without headscope's mode."""
    with lifted() if is_on() else nullcontext():
        return _TORCH_HAS_FUNCTION(relevant)


@contextmanager
def lifted() -> Generator[None]:
    """Remove headscope's mode; others stay, in their order."""
    above = _pop_through_ours()
    for mode in reversed(above):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in above:
            _pop_mode()
        _push_mode(MODE)
        for mode in reversed(above):
            _push_mode(mode)


def _pop_through_ours() -> list[Any]:
    """Pop modes until headscope's is off; return those above it, the topmost first."""
    above: list[Any] = []
    while (mode := _pop_mode()) is not MODE:
        above.append(mode)
    return above


def _may_attend(function: Any) -> bool:
    """Return whether a function without a handler may be part of an attention: of most operations none is."""
    stack = frames.thread.stack
    if not stack or stack[-1].quiet:
        return False
    return bool(stack[-1].softmaxes) or function in _SPECIAL or isinstance(function, fused.OPERATORS)


def _sdpa(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    frame = frames.innermost()
    if frame is None or frame.quiet:
        return F.scaled_dot_product_attention(*args, **kwargs)
    frame.calls_functions = True
    dropout = _dropout(args, kwargs)
    qkv, like = _like_sdpa(args, kwargs)
    out = frame.attend_again(qkv, like) if frame.accelerate and qkv and not dropout else None
    if out is not None:
        return out  # nothing scales heads: the watcher is the only active one
    if frame.accelerate:
        with frame.quietly():
            out = intercepted_call.attend(intercepted_call.sdpa(args, kwargs, frame.converted), dropout)
        tensors = [*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
        out = out[0] if all(x.ndim == 2 for x in tensors) else out  # as SDPA, which then has no axis of heads
    else:
        with frame.quietly():  # beneath, it may be composed of products and a softmax
            out = F.scaled_dot_product_attention(*args, **kwargs)
    attended = None if dropout else intercepted_call.one_head(out)
    natively = frame.accelerate and not dropout and not (qkv and intercepted_call.requires_gradient(*qkv))

    def make_call() -> InterceptedCall:
        call = intercepted_call.sdpa(args, kwargs, frame.converted)
        call = replace(call, attended=attended, by_headscope=frame.accelerate)
        return replace(call, natively=natively and intercepted_call.repeats_natively(call))

    frame.see(make_call, qkv, like)
    return frame.scaled(out, -3, args[0] if args else kwargs["query"])  # [B, H, Q, Dv]


def _like_sdpa(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[frames.QKV | None, Like | None]:
    """Return q, k and v of a call without a mask, and what else determines it; None: it has a mask, say."""
    arguments = {**dict(zip(intercepted_call.SDPA, args, strict=False)), **kwargs}
    q, k, v = map(arguments.get, intercepted_call.SDPA[:3])
    if q is None or k is None or v is None or arguments.get("attn_mask") is not None:
        return None, None
    layout = intercepted_call.layout_of(q, k, v)
    if layout is None or q.shape[0] != k.shape[0] or q.shape[1] < k.shape[1] or k.shape[:2] != v.shape[:2]:
        return None, None
    options = map(arguments.get, ("is_causal", "scale", "enable_gqa"))
    return (q, k, v), Like(("sdpa", layout, *options), "self" if arguments.get("is_causal") else None)


def _noted(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a softmax, or a product that may complete an attention that the module writes out."""
    frame = frames.innermost()
    if frame is None or frame.quiet:
        return function(*args, **kwargs)
    attends = softmax.attends(frame.softmaxes, function, args, kwargs)
    frame.calls_functions = frame.calls_functions or attends or bool(frame.softmaxes)
    follower = frames.thread.follower
    before = 0 if follower is None else follower.completions
    out = function(*args, **kwargs)
    if not attends:
        return out
    if follower is not None and follower.is_running:  # an operation of a script, whose result it has not seen yet
        follower.later = lambda: None if follower.completions > before else note_unrecorded(None)
    elif follower is None or follower.completions == before:
        note_unrecorded(None)
    return out


def _uncompiled(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function that may be part of an attention; what dynamo cannot trace."""
    frame = frames.innermost()
    if frame is None or frame.quiet:
        return function(*args, **kwargs) if kwargs else function(*args)
    name = fused.operator_name(function, args, kwargs)
    if frame.softmaxes or name is not None or function in softmax.UNTRACED_SOFTMAX:
        frame.calls_functions = True
    if name is None:
        out = function(*args, **kwargs) if kwargs else function(*args)
    else:
        with frame.quietly():
            out = function(*args, **kwargs) if kwargs else function(*args)
    if function in softmax.UNTRACED_SOFTMAX:
        softmax.wait(frame.softmaxes, function, args, kwargs)
    elif frame.softmaxes and function in softmax.JOINED:
        if function in softmax.CUT and args and _is_projected(args[0]):
            return out
        softmax.join(frame.softmaxes, function, args, kwargs, out)
    elif name is not None:
        note_unrecorded(name)
    return out


def _is_projected(x: object) -> bool:
    """Return whether a tensor is known to be a projection, and not weights of the same shape."""
    follower = frames.thread.follower
    if follower is None or not isinstance(x, Tensor) or not is_followed(x):
        return False
    return follower.table.is_projection(x, follower.scope())


def note_unrecorded(operator: str | None) -> None:
    """Tell all watchers that a module attends by an operator, or by a softmax of its own."""
    frame = frames.innermost()
    if frame is None or frame.quiet:
        return
    for forward, name in frame.forwards.values():
        if forward.active:
            forward.note_unrecorded(name, operator)


def _dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)


def _multi_head(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    frame = frames.innermost()
    if frame is None or frame.quiet:
        return F.multi_head_attention_forward(*args, **kwargs)
    frame.calls_functions = True
    arguments = frames.bound(F.multi_head_attention_forward, args, kwargs)
    factors = None
    if {"num_heads", "out_proj_weight"} <= {*arguments}:  # without them, torch will complain
        heads = arguments["num_heads"]
        factors = frame.factors(heads, torch_modules.widths(heads, arguments["out_proj_weight"]))
    changed: dict[str, Any] = arguments
    if factors is not None:  # the heads meet only in the output projection
        changed = {**arguments, "out_proj_weight": torch_modules.of_heads(arguments["out_proj_weight"], factors)}
    with frame.quietly():
        if factors is None:
            out = F.multi_head_attention_forward(*args, **kwargs)
        else:
            out = F.multi_head_attention_forward(**changed)
    frame.see(lambda: torch_modules.with_output(torch_modules.functional_call(arguments), changed, out[0]))
    return out


def _fast_path(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handle a fast path; that of an encoder layer attends for its ``self_attn``, which it does not call."""
    frame = frames.innermost()
    if frame is None or frame.quiet:
        return operator(*args, **kwargs)
    frame.calls_functions = True
    inner: Any = getattr(frame.module, "self_attn", None)
    frame = frame if inner is None else frame.within(inner)
    name = _FAST_PATH[operator]
    factors = frame.factors(*torch_modules.heads_of_fast_path(name, args))
    with frame.quietly():
        changed = args if factors is None else torch_modules.with_factors(name, args, factors)
        out = operator(*changed, **kwargs)
    frame.see(lambda: torch_modules.native_call_with_output(name, args, changed, out))
    return out


_HANDLERS: dict[Any, Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]] = {
    **dict.fromkeys(softmax.NOTED, _noted),
    **dict.fromkeys(_FAST_PATH, _fast_path),
    F.scaled_dot_product_attention: _sdpa,
    F.multi_head_attention_forward: _multi_head,
}
_SPECIAL = fused.PRIVATE | softmax.UNTRACED_SOFTMAX


def attention_interceptor(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    scale: float | None, softcap: float | None, dropout: float, lse: bool, backend: str | None, /,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Replace ``headscope.attention`` and ``attend`` while a watch is open."""
    frame = frames.innermost()
    if frame is None or frame.quiet or not frame.active:
        return run_attention(q, k, v, mask, bias, sinks, scale, softcap, dropout, lse, backend)
    kind: Kind | None = None
    if isinstance(frame.module, MultiHeadAttention):
        kind = "self" if frame.argument("context", 1) is None else "cross"
    elif isinstance(frame.module, nn_compat.MultiheadAttention):
        kind = "self" if torch_modules.same(frame.argument("query", 0), frame.argument("key", 1)) else "cross"
    cache = frame.argument("cache", 2) if isinstance(frame.module, MultiHeadAttention) else None
    before = cache.length if isinstance(cache, Cache) else 0
    simple = bias is None and sinks is None and not lse and context.active is None
    if cache is not None:  # and has not dropped a key
        simple = simple and before + q.shape[-2] == k.shape[-2]
    like = _like(q, k, v, mask, kind, scale, softcap, backend, before) if simple else None
    out, row_lse = None if dropout else frame.attend_again((q, k, v), like), None
    if out is None:
        with frame.quietly():  # the backend may be SDPA
            out, row_lse = run_attention(q, k, v, mask, bias, sinks, scale, softcap, dropout, lse, backend)
        attended = None if dropout else out
        natively = simple and not dropout and not intercepted_call.requires_gradient(q, k, v)
        options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "kind": kind}

        def make_call() -> InterceptedCall:
            first = _first_first(q, mask, bias, row_lse, attended)
            call = InterceptedCall(k=k, v=v, by_headscope=True, **first, **options)
            repeats = natively and intercepted_call.repeats_natively(call, backend)
            return _in_cache(replace(call, natively=repeats), cache)

        frame.see(make_call, (q, k, v), like)
    scaled = frame.scaled(out, -3, q)  # [B, H, Q, Dv]
    if scaled is not out and isinstance(frame.module, MultiHeadAttention) and frame.module.bias_k is not None:
        raise intercepted_call.WatchError(
            "heads: this module has bias_kv, whose value is added to the heads' outputs later, out of reach"
        )
    return scaled, row_lse


def _like(q: Tensor, k: Tensor, v: Tensor, mask: Any, kind: Kind | None, *options: Hashable) -> Like | None:
    """Return what determines a call of these tensors only, except their numbers; None: the mask holds numbers."""
    if mask is not None and not (isinstance(mask, Mask) and mask.is_constant()):
        return None
    try:
        hash(mask)
    except TypeError:
        return None
    layout = intercepted_call.layout_of(q, k, v)
    return None if layout is None else Like((layout, mask, kind, *options), kind)


def _first_first(q: Tensor, mask: Any, bias: Tensor | None, lse: Tensor | None, out: Tensor | None) -> dict[str, Any]:
    """Return the query-dependent arguments in the usual order, if headscope's module has reversed them."""
    if isinstance(mask, Mask) and bias is not None and any(isinstance(leaf, ReversedBand) for leaf in mask.leaves()):
        mask, q, bias = mask.reverse_queries(q.shape[-2], bias.shape[-1]), q.flip(-2), bias.flip(-2)
        lse, out = (None if x is None else x.flip(axis) for x, axis in ((lse, -1), (out, -2)))
    return {"q": q, "mask": mask, "bias": bias, "lse": lse, "attended": out}


def _in_cache(call: InterceptedCall, cache: object) -> InterceptedCall:
    """Return the call with its queries and keys at their positions in the cached text, of which keys may be dropped."""
    if not isinstance(cache, Cache):
        return call
    before, queries, keys = cache.length, call.q.shape[-2], call.k.shape[-2]
    first = before + queries - keys
    mask = as_mask(call.mask)
    bands = [] if mask is None else [leaf for leaf in mask.leaves() if isinstance(leaf, Band) and leaf.offset is None]
    late = any(band.left is not None and before > band.left for band in bands)
    call = replace(call, total=before + queries, late=late)
    if not first:
        return call
    places = torch.arange(first, before + queries, device=call.q.device)
    return replace(call, q_pos=places[keys - queries :], k_pos=places)

"""Hugging Face models: their attention functions, intercepted where a layer looks them up.

A layer of transformers 5 asks ``AttentionInterface.get_interface`` for the function that attends, by the name of the
attention implementation, and calls it with itself, q, k, v, a mask and options. While a watch is open, that look-up
returns the function in a wrapper that reports its arguments. This module does not import transformers.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope._intercept import frames, intercepted_call, masks, patching
from headscope._intercept.alike import ABSENT, Like, attribute_of
from headscope._intercept.frames import Frame
from headscope._intercept.intercepted_call import InterceptedCall, Kind
from headscope._intercept.module_names import is_cross, is_self
from headscope._intercept.torch_modules import same
from headscope._intercept.transformers_function import NAME, causal_by_default
from headscope._intercept.wrapped_functions import bound_options, code_of
from headscope.masks import as_mask

_UNREADABLE = ("flash", "flex", "paged", "/")  # their masks are not tensors [B, H, Q, K]; "/" is a kernel from a hub
_CACHES = ("past_key_values", "past_key_value", "layer_past")
# names of the inputs of queries and keys, if a layer has both: SAM's always do, most others only for another sequence
_QUERIES = ("query", "queries", "query_tensor", "hidden_states")
_KEYS = (
    *("key", "keys", "key_tensor"),
    *("key_value_states", "encoder_hidden_states", "cross_attention_states", "context"),
)
_SLIDING = ("sliding_attention", "chunked_attention", "hybrid_sliding")  # types of layers that pass the first keys
_LEAD = ("module", "query", "key", "value", "attention_mask")
_OTHER_TENSORS = ("position_bias", "s_aux")
_OTHER_INPUTS = ("merged_attention_mask", "layer_idx")
_OPTIONS = ("scaling", "softcap", "is_causal", "sliding_window", "dropout")
_ATTRIBUTES = ("is_causal", "sliding_window", "is_cross_attention")
ROWS = 16  # rows of the model's own function that are computed if headscope attends instead

Function = Callable[..., tuple[Tensor, Tensor | None]]

_original: Callable[..., Any] | None = None


def install() -> None:
    """Start to intercept the attention functions of transformers, if it is loaded."""
    global _original
    interface = _interface()
    if interface is None or _original is not None:
        return
    _original = interface.get_interface
    interface.get_interface = _get_interface


def remove() -> None:
    """Restore everything."""
    global _original
    interface = _interface()
    if interface is not None and _original is not None:
        interface.get_interface = _original
    _original = None


patching.patches.append((install, remove))


def _interface() -> Any:
    loaded = getattr(sys.modules.get("transformers.modeling_utils"), "AttentionInterface", None)
    return loaded if hasattr(loaded, "get_interface") else None


def transformers_refusal(modules: Mapping[str, nn.Module]) -> str | None:
    """Return why a model of transformers cannot be recorded, before it runs; None = it can, or is not one."""
    loaded = sys.modules.get("transformers.modeling_utils")
    base = getattr(loaded, "PreTrainedModel", None)
    if loaded is None or base is None or not any(isinstance(module, base) for module in modules.values()):
        return None
    if _interface() is None and any(_implementation(module) == "eager" for module in modules.values()):
        version = sys.modules["transformers"].__version__
        return (
            f"watch: transformers {version} has no AttentionInterface.get_interface, so eager attention cannot be "
            'observed; use transformers 5.15 or newer, or load the model with attn_implementation="sdpa"'
        )
    return None


def _implementation(module: nn.Module) -> str | None:
    return getattr(getattr(module, "config", None), "_attn_implementation", None)


def _get_interface(self: Any, attn_implementation: str, default: Function) -> Function:
    """Replace ``AttentionInterface.get_interface`` while a watch is open."""
    original = _original or type(self).get_interface
    attend: Function = original(self, attn_implementation, default)
    frame = frames.innermost()
    if frame is None or frame.quiet or not frame.active:
        return attend

    def record_and_attend(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return _attend(attend, str(attn_implementation), frame, args, kwargs)

    wrapper: Any = record_and_attend
    wrapper.__wrapped__ = attend  # as functools.wraps, which takes as long as a short attention
    return wrapper


def _attend(
    attend: Function, name: str, frame: Frame, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor | None]:
    request = arguments = {**dict(zip(_LEAD, args, strict=False)), **kwargs}
    if options := bound_options(attend):
        arguments = {**options, **request}
    dropout = arguments.get("dropout") or 0.0
    qkv, like = (arguments["query"], arguments["key"], arguments["value"]), _like(attend, name, frame, arguments)
    if frame.accelerate and not dropout:
        out = frame.attend_again(qkv, like)
        if out is not None:
            return out.transpose(1, 2).contiguous(), None  # nothing scales heads: the watcher is the only active one
    with frame.quietly():  # its own call of SDPA is this call
        if not frame.accelerate:
            result = attend(*args, **kwargs)
        else:
            call = described(attend, name, frame, arguments)
            result = (intercepted_call.attend(call, dropout).transpose(1, 2).contiguous(), None)

    natively = frame.accelerate and not dropout and not intercepted_call.requires_gradient(*qkv)

    def make_call() -> InterceptedCall:
        outputs: dict[str, Any] = {}  # with dropout there is nothing to compare
        if not dropout and frame.accelerate:
            own = functools.partial(_own, attend, name, frame, request)
            outputs = {"attended": result[0].transpose(1, 2), "by_headscope": True, "own": own}
        elif not dropout:
            outputs = {"out": result[0].transpose(1, 2), "again": functools.partial(_called, attend, request, True)}
        call = described(attend, name, frame, arguments, **outputs)
        return replace(call, natively=natively and intercepted_call.repeats_natively(call))

    frame.see(make_call, qkv, like)
    out = frame.scaled(result[0], -2, qkv[0])  # [B, Q, H, Dv]
    return result if out is result[0] else (out, result[1])


def _like(attend: Function, name: str, frame: Frame, arguments: Mapping[str, Any]) -> Like | None:
    """Return what ``described`` reads, except the numbers in q, k and v; None: it reads those of other tensors, too.

    A cache has to hold as many positions as there are keys, and a mask to be the layer's argument.
    """
    q, k, get, given = arguments["query"], arguments["key"], arguments.get, frame.arguments
    for each in _OTHER_TENSORS:  # loops: a generator for each takes as long as the rest
        if get(each) is not None:
            return None
    for each in _OTHER_INPUTS:
        if given.get(each) is not None:
            return None
    layout = intercepted_call.layout_of(q, k, arguments["value"])
    if layout is None or getattr(frame.module, "sinks", None) is not None:
        return None
    kind, total, queries, keys = None, None, q.shape[-2], k.shape[-2]
    context = _first(given, _KEYS)
    if context is not None or queries != keys:
        kind = _kind(frame, queries, keys)
        if "merged_attention_mask" in given:
            return None
    if kind != "cross":
        total = _length(frame, queries)
        if context is not None or not (total == keys if isinstance(total, int) else total is kind is None):
            return None
    options = [get(each, ABSENT) for each in _OPTIONS]
    options += [attribute_of(frame.module, each) for each in _ATTRIBUTES]
    late, mask = False, get("attention_mask")
    if mask is not None or given.get("attention_mask") is not None:
        if mask is not given.get("attention_mask") or not isinstance(mask, Tensor):
            return None
        if mask.ndim != 4 or mask.shape[-1] != keys or any(part in name for part in _UNREADABLE):
            return None
        mask, late = frame.read(mask), _late(frame, arguments, queries, total)
        if mask is None or mask.bias is not None:
            return None
    parts = (attend, name, layout, total, *options, kind, late)
    try:
        hash(parts)
    except TypeError:
        return None
    return Like(parts, kind, mask)


def _called(attend: Function, request: Mapping[str, Any], finite: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the output of the model's own function; ``finite``: with 0 for values that are NaN or infinite."""
    request = {**request, "value": request["value"].nan_to_num(0.0, 0.0, 0.0)} if finite else request
    options = {key: value for key, value in request.items() if key not in _LEAD}
    return attend(*(request.get(each) for each in _LEAD), **options)


def _own(attend: Function, name: str, frame: Frame, request: Mapping[str, Any]) -> InterceptedCall:
    """Return a call with the output of the model's own function for a few rows, which is always affordable.

    If these differ from headscope's, all rows are computed: the function may not support a few.
    """

    def of(part: Mapping[str, Any]) -> InterceptedCall:
        out, again = _called(attend, part)[0].transpose(1, 2), functools.partial(_called, attend, part, True)
        return described(attend, name, frame, {**bound_options(attend), **part}, out=out, again=again)

    with suppress(Exception):
        call = of(_few(name, frame.module, request))
        error = intercepted_call.error_of(call)
        if error is not None and float(error[0]) <= error[1]:
            return call
    return of(request)


def _few(name: str, module: nn.Module, request: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a request for the last queries; for the first ones, and their keys, if there is no mask.

    A function of the caller's own may have a window without a mask: it gets all rows.
    """
    q, k, v, mask = (request.get(each) for each in _LEAD[1:])
    assert isinstance(q, Tensor)
    assert isinstance(k, Tensor)
    assert isinstance(v, Tensor)
    queries, keys = q.shape[-2], k.shape[-2]
    fewer = queries - min(queries, ROWS)
    rows, columns = slice(fewer, None), slice(None)
    if mask is None and causal_by_default(name, module, request, queries) is not None:
        if name not in ("sdpa", NAME):
            return request
        rows, columns = slice(queries - fewer), slice(max(ROWS, keys - fewer))

    def of(value: Any) -> Any:
        """Return the rows of a mask, a bias, or any other argument with rows."""
        if not isinstance(value, Tensor) or value.ndim < 4 or value.shape[-2] != queries:
            return value
        return value[..., rows, columns if value.shape[-1] == keys else slice(None)]

    part = {each: of(value) for each, value in request.items()}
    return {**part, "query": q[..., rows, :], "key": k[..., columns, :], "value": v[..., columns, :]}


def described(
    attend: Function, name: str, frame: Frame, arguments: Mapping[str, Any], **outputs: Any
) -> InterceptedCall:
    """Return an attention function's call as arguments of headscope.

    The function determines which options count: one that does not name ``softcap`` or ``position_bias``, or does not
    read ``module.sinks``, does not use it. A function without readable code is assumed not to use them.

    Args:
        attend, name, frame: the attention function, its name in the configuration, and the module that calls it.
        arguments: of the call, by name, and those that partials bind.
        outputs: attributes of the result that concern the output.

    Raises:
        WatchError: its masks cannot be read.
    """
    q, k, v, mask = (arguments.get(each) for each in _LEAD[1:])
    if any(part in name for part in _UNREADABLE) or not (mask is None or isinstance(mask, Tensor)):
        raise intercepted_call.WatchError(
            f"it attends with {name!r}, whose masks headscope cannot read; load the model with "
            'attn_implementation="sdpa" or "eager"'
        )
    assert isinstance(q, Tensor)
    assert isinstance(k, Tensor)
    code = code_of(attend)
    named = () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    visible, bias = (None, None) if mask is None else frame.converted(mask)
    if mask is None:
        visible = causal_by_default(name, frame.module, arguments, q.shape[-2])
    if "position_bias" in named and arguments.get("position_bias") is not None:
        bias = arguments["position_bias"] if bias is None else arguments["position_bias"] + bias
    sinks = arguments.get("s_aux") if "s_aux" in named else None
    if sinks is None and code is not None and "sinks" in code.co_names:
        sinks = getattr(frame.module, "sinks", None)
    beside = _beside(frame, mask, k.shape[-2])
    kind = _kind(frame, q.shape[-2], k.shape[-2] - beside)
    total = None if kind == "cross" else _length(frame, q.shape[-2])
    q_pos, k_pos = _places(total, q.shape[-2], k.shape[-2], beside, q.device)
    real = None if kind == "cross" else _real(frame, mask)
    call = InterceptedCall(
        q=q, k=k, v=v, mask=visible, real=real, bias=bias, scale=arguments.get("scaling"), sinks=sinks, kind=kind,
        softcap=arguments.get("softcap") if "softcap" in named else None, q_pos=q_pos, k_pos=k_pos, total=total,
        beside=beside, late=_late(frame, arguments, q.shape[-2], total), **outputs,
    )  # fmt: skip
    return intercepted_call.rounded(call, bias=name == "sdpa")  # all others add it to the result of matmul


def _kind(frame: Frame, queries: int, keys: int) -> Kind | None:
    """Return "self" or "cross" by the layer's arguments; None if they do not determine it.

    Only a cache gives a sequence more keys, or fewer, than queries. Any other such layer has pooled one of them, and
    they no longer share an axis.
    """
    arguments = frame.arguments
    if _merged(arguments) is not None:
        return "self"
    own, other = _first(arguments, _QUERIES), _first(arguments, _KEYS)
    if other is not None:
        alike = isinstance(own, Tensor) and isinstance(other, Tensor) and same(own, other)
        pooled = queries == keys and is_self(frame.name)  # EfficientLoFTR pools one image twice, and passes both
        return "self" if alike or pooled else "cross"
    if getattr(frame.module, "is_cross_attention", False):
        return "cross"
    if is_cross(frame.name):
        return None
    return "self" if queries == keys or _first(arguments, _CACHES) is not None else None


def _first(arguments: Mapping[str, Any], names: Iterable[str]) -> Any:
    """Return the first of these arguments that is present; None = none is."""
    for name in names:
        if (found := arguments.get(name)) is not None:
            return found
    return None


def _length(frame: Frame, queries: int) -> int | Tensor | None:
    """Return the number of positions of the layer so far, this call's included; None without a cache."""
    module = frame.module
    cache = _first(frame.arguments, _CACHES)
    cache = getattr(cache, "self_attention_cache", cache)
    if cache is None or not hasattr(cache, "get_seq_length"):
        return None
    if getattr(module, "is_kv_shared_layer", False):  # its keys are of an earlier layer; all have equally many
        return int(cache.get_seq_length())
    layer = _layer(frame)
    if layer is None:
        return None
    own = queries if hasattr(module, "append_to_cache") else 0  # DiffusionGemma's decoder does not cache keys there
    return cache.get_seq_length(layer) + own


def _layer(frame: Frame) -> int | None:
    """Return which of the model's layers this is; None if undetermined."""
    layer = frame.arguments.get("layer_idx")  # if several layers share a module, which then has no index
    layer = getattr(frame.module, "layer_idx", None) if layer is None else layer
    return None if layer is None or layer < 0 else layer


def _merged(arguments: Mapping[str, Any]) -> int | None:
    """Return the number of encoder keys that T5Gemma 2's decoder has appended to its own; None in every other layer."""
    if "merged_attention_mask" not in arguments:
        return None
    context = arguments.get("encoder_hidden_states")
    return context.shape[-2] if isinstance(context, Tensor) else None


def _real(frame: Frame, mask: Tensor | None) -> Tensor | None:
    """Return which keys are not padding, [B or 1, K]; None: those that are visible to some query.

    A layer that selects its keys (DeepSeek's indexer, Doge) masks the others, in a few rows even their own key. The
    mask argument of the layer is more reliable, unless it masks keys that the layer attends to.
    """
    layer_mask = frame.arguments.get("attention_mask")
    if mask is None or not isinstance(layer_mask, Tensor) or layer_mask is mask or layer_mask.ndim != 4:
        return None
    if layer_mask.shape[-2:] != mask.shape[-2:] or not (
        layer_mask.dtype == torch.bool or layer_mask.is_floating_point()
    ):
        return None
    allowed, chosen = (_allowed(frame, each) for each in (layer_mask, mask))
    if allowed is None or chosen is None or bool((chosen & ~allowed).any()):
        return None
    return allowed.any((1, 2))


def _allowed(frame: Frame, mask: Tensor) -> Tensor | None:
    """Return the pairs that a mask of four axes allows, boolean, [B or 1, H or 1, Q, K]; None = all."""
    rule = as_mask(frame.converted(mask)[0])
    if rule is None:
        return None
    b, h, i, j = (torch.arange(n, device=mask.device) for n in mask.shape)
    allowed = rule.at(*mask.shape[-2:]).allows(b[:, None, None, None], h[:, None, None], i[:, None], j)
    return allowed.expand(torch.broadcast_shapes(allowed.shape, (1, 1, *mask.shape[-2:])))


def _late(frame: Frame, arguments: Mapping[str, Any], queries: int, total: int | Tensor | None) -> bool:
    """Return whether a window has passed the first key before the first of these queries, if a cache retains all keys.

    Not every layer gets its window, or its chunk, as an argument (Llama 4, Doge, PhiMoE). Not every config lists which
    layers have one (Moshi's do not): then the mask argument of the layer decides, as far as padding allows.
    """
    module, slides = frame.module, True
    if "sliding_window" in arguments:  # Exaone's modules all have one, and those with full attention pass None
        window = arguments["sliding_window"]
    elif hasattr(module, "sliding_window"):
        window = module.sliding_window
    else:
        config, slides = getattr(module, "config", None), False
        window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    if not (isinstance(window, int) and isinstance(total, int) and total - queries >= window):
        return False
    return slides or (_may_slide(frame) and _narrow(frame.arguments.get("attention_mask"), window))


def _may_slide(frame: Frame) -> bool:
    """Return whether the layer may have a window, or a chunk, according to the config."""
    types, layer = getattr(getattr(frame.module, "config", None), "layer_types", None), _layer(frame)
    return types is None or layer is None or layer >= len(types) or types[layer] in _SLIDING


def _narrow(mask: Any, window: int) -> bool:
    """Return whether no query has more visible keys than a window."""
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return False
    visible = mask if mask.dtype == torch.bool else masks.additive(mask) > -math.inf
    return not bool((visible.sum(-1) > window).any())


def _beside(frame: Frame, mask: Tensor | None, keys: int) -> int:
    """Return the number of keys that a layer has appended to those of tokens, by the growth of its mask."""
    if (merged := _merged(frame.arguments)) is not None:
        return merged
    layer_mask = frame.arguments.get("attention_mask")
    if mask is None or not isinstance(layer_mask, Tensor) or layer_mask.ndim != 4 or mask.shape[-1] != keys:
        return 0
    tokens = layer_mask.shape[-1]
    return keys - tokens if 1 < tokens < keys and torch.equal(mask[..., :tokens], layer_mask) else 0


def _places(
    total: int | Tensor | None, queries: int, keys: int, beside: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """Return the positions of queries and keys, None = as usual: the keys from 0 on, and the queries at their end.

    A sliding cache has dropped the first keys, and a static one has room for future keys. Keys that do not belong to
    tokens have no position.
    """
    keys -= beside
    if total is None:
        total = keys
    if not beside and isinstance(total, int) and total == keys:
        return None, None
    first = max(0, total - keys) if isinstance(total, int) else 0
    last = torch.arange(queries, device=device) - queries
    q_pos = last + (total.to(device) if isinstance(total, Tensor) else total)
    k_pos = torch.arange(keys, device=device) + first
    return q_pos, F.pad(k_pos.double(), (0, beside), value=math.nan) if beside else k_pos

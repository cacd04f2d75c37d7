"""Which module of a watched model is running, and what it calls: the one place that reaches into torch.

While a watch is open, ``nn.Module.__call__`` is replaced by one that knows the modules of watched models and keeps,
for each thread, a stack of those that run (``Frame``). While one of them runs, a function mode sees what it calls; an
attention call belongs to the innermost module.

Nothing of this may change what the model computes. torch's transformer modules leave their fast path where a hook is
registered, and where a function mode is about, for then ``torch.overrides.has_torch_function`` is true. So no hook is
registered and no module is touched, and that function is replaced by one that does not count our mode.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from headscope import nn_compat
from headscope._attend import hook
from headscope._attend.context_parallel import CONTEXT_PARALLEL, check_context_parallel
from headscope._attend.run import run
from headscope._intercept import call as _watch_calls
from headscope._intercept import dynamo, masks, module_names, softmax, torch_modules
from headscope._intercept.call import Call
from headscope._support.fingerprint import Fingerprint
from headscope._support.torch_state import has_no_values
from headscope.masks import Mask, Turned, turned
from headscope.module import MultiHeadAttention


class Forward(Protocol):
    """One forward pass of a watched model, as its watch sees it."""

    active: bool
    """Whether anything of it is looked at."""

    def enter(self, name: str, module: nn.Module) -> bool | None:
        """A module starts to run; True = headscope's kernel is to attend in it."""
        ...

    def see(self, frame: Frame, name: str, make: Callable[[], Call]) -> None:
        """A module has made its attention call."""
        ...

    def note_softmax(self, name: str) -> None:
        """A module has multiplied the result of a softmax of its own with what may be values."""
        ...

    def factors(self, name: str, heads: int) -> Tensor | None:
        """What the outputs of a module's heads are to be multiplied by, [H]; None = they stay as they are."""
        ...


class Watcher(Protocol):
    """A watch, or what acts on heads, as the modules' calls see it."""

    again: bool
    """Whether it takes part in what a checkpoint computes again in the backward pass."""

    def begin(self) -> Forward:
        """A forward pass starts."""
        ...

    def end(self, forward: Any, *, finished: bool) -> None:
        """It is over; not finished = by an exception."""
        ...


patches: list[tuple[Callable[[], None], Callable[[], None]]] = []
"""What else is replaced while a watch is open: what is done when the first one opens, and when the last one closes."""

Entries = tuple[tuple[Watcher, str], ...]
"""Who watches a module, and under which name."""


class Frame:
    """A module that is running.

    Attributes:
        forwards: watcher -> the forward pass that it is part of, and the module's name there.
        calls: how many attention calls it has made, one that is being seen included.
        accelerate: headscope's kernel is to attend, too.
        quiet: its attention calls are being looked at from outside: what they call themselves is not.
        softmaxes: those that it has computed by itself and not yet multiplied with values.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module = module
        self.args = args
        self.kwargs = kwargs
        self.forwards: dict[Watcher, tuple[Forward, str]] = {}
        self.calls = 0
        self.accelerate = False
        self.quiet = False
        self.softmaxes: list[softmax.Weights] = []
        self._arguments: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        """The module's path, in the watch that was opened last."""
        return next(reversed(self.forwards.values()))[1] if self.forwards else ""

    @property
    def active(self) -> bool:
        """Whether somebody looks at this forward pass."""
        return any(forward.active for forward, _ in self.forwards.values())

    @property
    def arguments(self) -> Mapping[str, Any]:
        """What the module was called with, by name; those of ``**kwargs`` by theirs."""
        if self._arguments is None:
            self._arguments = bound(self.module.forward, self.args, self.kwargs)
        return self._arguments

    def quietly(self) -> _Quiet:
        """While what this module's attention calls is not to be seen: it is part of it, or ours."""
        return _Quiet(self)

    def argument(self, name: str, place: int) -> Any:
        """One of ``arguments``, which headscope's own modules take at this place; None where it is not given."""
        if type(self.module) not in (MultiHeadAttention, nn_compat.MultiheadAttention):
            return self.arguments.get(name)
        return self.args[place] if len(self.args) > place else self.kwargs.get(name)

    def converted(self, mask: Tensor) -> tuple[Mask | None, Tensor | None]:
        """``_watch_masks.split``, once for all layers that get the same tensor with the same contents.

        On another device each layer splits anew: comparing would wait.
        """
        if not (mask.is_cpu and type(mask) in (Tensor, nn.Parameter)):
            return masks.split(mask)
        key = (id(mask), torch.is_grad_enabled() and mask.requires_grad)
        found = _here.masks.get(key)
        if found is None or not found[1].matches(mask):
            found = _here.masks[key] = (mask, Fingerprint(mask), *masks.split(mask))
        return found[2:]

    def see(self, call: Callable[[], Call]) -> None:
        """Hand an attention call to everybody who watches; it is made where somebody wants it."""
        self.calls += 1
        with unobserved():
            for forward, name in self.forwards.values():
                if forward.active:
                    forward.see(self, name, call)

    def factors(self, heads: int) -> Tensor | None:
        """What the outputs of this module's heads are to be multiplied by, [H]; None = they stay as they are."""
        found: Tensor | None = None
        for forward, name in self.forwards.values():
            each = forward.factors(name, heads) if forward.active else None
            if each is not None:
                found = each if found is None else found * each
        return found

    def scaled(self, out: Tensor, axis: int) -> Tensor:
        """The outputs of this module's heads, which lie along an axis counted from the end."""
        factors = self.factors(out.shape[axis] if out.ndim >= -axis else 1)
        if factors is None:
            return out
        wide = torch.promote_types(out.dtype, torch.float32)  # what a gradient sums, half precision would round first
        factors = factors.to(out.device, wide)
        return (out.to(wide) * (factors.view(-1, *(1,) * (-axis - 1)) if out.ndim >= -axis else factors)).to(out.dtype)

    def within(self, module: nn.Module) -> Frame:
        """A frame for a module that this one computes without calling it."""
        inner = Frame(module, (), {})
        for watcher, name in _watched.get(id(module), ()):
            if watcher in self.forwards:
                forward = self.forwards[watcher][0]
                inner.forwards[watcher] = (forward, name)
                if forward.active:
                    forward.enter(name, module)
        return inner


class _Quiet:
    """See ``Frame.quietly``."""

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.before = False

    def __enter__(self) -> None:
        self.before, self.frame.quiet = self.frame.quiet, True

    def __exit__(self, *_: object) -> None:
        self.frame.quiet = self.before


def bound(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name; what does not fit the signature is the module's own error to raise."""
    function = getattr(forward, "__func__", None)
    signature = inspect.signature(forward) if function is None else _signature_of_method(function)
    try:
        found = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return dict(kwargs)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            found |= found.pop(name, {})
    return found


@functools.lru_cache(maxsize=256)
def _signature_of_method(function: Callable[..., Any]) -> inspect.Signature:
    """Without ``self``. Kept: to make it takes as long as attending to a short text."""
    return inspect.signature(MethodType(function, object()))


class _Here(threading.local):
    def __init__(self) -> None:
        self.stack: list[Frame] = []
        # with the tensor, because ids are reused, and with what it held
        self.masks: dict[Any, tuple[Tensor, Fingerprint, Mask | None, Tensor | None]] = {}


_here = _Here()
_lock = threading.Lock()
_watched: dict[int, Entries] = {}  # by id of the module; the watchers keep the modules alive
_original_call: Callable[..., Any] | None = None


def innermost() -> Frame | None:
    """The module that runs in this thread, or None."""
    return _here.stack[-1] if _here.stack else None


def frames() -> Iterator[Frame]:
    """The modules that run in this thread, the innermost first."""
    return reversed(_here.stack)


# ---------------------------------------------------------------- opening and closing


def open_(watcher: Watcher, modules: Mapping[str, nn.Module]) -> None:
    """Start to tell a watcher of the calls of these modules."""
    global _original_call
    call = _uncompiled_call() if "torch._dynamo" in sys.modules else _call  # may wait for its import: not with the lock
    try:
        with _lock:
            if _original_call is None:
                _original_call = nn.Module.__call__
                nn.Module.__call__ = call
                if call is _call:
                    sys.meta_path.insert(0, _IMPORT)
                hook.install(_headscope_attention)
                torch.overrides.has_torch_function = _has_torch_function
                for install, _ in patches:
                    install()
            for name, module in modules.items():
                _watched[id(module)] = (*_watched.get(id(module), ()), (watcher, name))
            dynamo.set_aside(watcher, modules.values())
    except BaseException:  # Ctrl-C, say
        close(watcher, modules)
        raise


@functools.cache
def _uncompiled_call() -> Callable[..., Any]:
    """A compiled function that calls a watched model leaves it alone: the model then runs as it is."""
    return torch.compiler.disable(_call)


def _dynamo_has_come() -> None:
    """It has been imported while a watch is open."""
    call = _uncompiled_call()
    with _lock:
        if _original_call is not None:
            nn.Module.__call__ = call
            dynamo.say_original(_original_call)


_IMPORT: Any = dynamo.Import(_dynamo_has_come)


def close(watcher: Watcher, modules: Mapping[str, nn.Module]) -> None:
    """Stop to tell it, and put everything back with the last one."""
    try:
        _close(watcher)
    except BaseException:  # Ctrl-C, say: what it left is done now
        _close(watcher)
        raise
    finally:
        module_names.forget_compiled(modules)


def _close(watcher: Watcher) -> None:
    global _original_call
    with _lock:
        for key, entries in list(_watched.items()):
            left = tuple(entry for entry in entries if entry[0] is not watcher)
            if left:
                _watched[key] = left
            else:
                del _watched[key]
        if not _watched and _original_call is not None:
            nn.Module.__call__ = _original_call
            if _IMPORT in sys.meta_path:
                sys.meta_path.remove(_IMPORT)
            hook.install(None)
            torch.overrides.has_torch_function = _has_torch_function_originally
            for _, remove in patches:
                remove()
            _original_call = None
        dynamo.put_back(watcher)


# ---------------------------------------------------------------- a module runs


def _call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """``nn.Module.__call__`` while a watch is open."""
    original = _original_call or nn.Module._wrapped_call_impl  # closed by another thread just now
    entries = _watched.get(id(self))
    if entries is None and id(dynamo.inside(self)) not in _watched:
        return original(self, *args, **kwargs)
    if entries is None or torch.compiler.is_compiling():
        raise _watch_calls.WatchError(_watch_calls.COMPILED)
    if CONTEXT_PARALLEL in sys.modules:
        check_context_parallel()
    if torch._C._current_graph_task_id() != -1:  # a checkpoint computes again what was seen before
        entries = tuple(entry for entry in entries if entry[0].again)
        if not entries:
            return original(self, *args, **kwargs)
    return _run(original, Frame(self, args, kwargs), entries)


def _run(original: Callable[..., Any], frame: Frame, entries: Entries) -> Any:
    begun: list[tuple[Watcher, Forward]] = []
    finished = False
    stack = _here.stack
    for watcher, name in entries:
        outer = None
        for above in reversed(stack):
            if watcher in above.forwards:
                outer = above.forwards[watcher][0]
                break
        if outer is None:
            outer = watcher.begin()
            begun.append((watcher, outer))
        frame.forwards[watcher] = (outer, name)
        if outer.active and outer.enter(name, frame.module):
            frame.accelerate = True
    stack.append(frame)
    try:
        if not frame.active or _is_on():
            out = original(frame.module, *frame.args, **frame.kwargs)
        else:
            with _MODE if _len_torch_function_stack() == 0 else _beneath():
                out = original(frame.module, *frame.args, **frame.kwargs)
        finished = True
        return out
    finally:
        stack.pop()
        if not stack:
            _here.masks.clear()
        for watcher, forward in begun:
            watcher.end(forward, finished=finished)


# ---------------------------------------------------------------- what it calls


class _Mode(TorchFunctionMode):
    """Looks at attention calls that go through torch's functions."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _sdpa(args, kwargs or {})
        if func is F.multi_head_attention_forward:
            return _multi_head(args, kwargs or {})
        if func in _NATIVE:
            return _native(func, args, kwargs or {})
        if func in softmax.NOTED:
            _note(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


_MODE = _Mode()
_NATIVE: dict[Any, str] = {getattr(torch, name): name for name in torch_modules.NATIVE if hasattr(torch, name)}
_has_torch_function_originally = torch.overrides.has_torch_function


def _is_on() -> bool:
    """Whether the function mode is on in this thread."""
    return _MODE in _get_current_function_mode_stack()


@contextmanager
def _beneath() -> Generator[None]:
    """With our mode below those of others, which may change what a function is called with."""
    for mode in reversed([*(_pop_mode() for _ in range(_len_torch_function_stack())), _MODE]):
        _push_mode(mode)
    try:
        yield
    finally:
        for mode in reversed(_take()):
            _push_mode(mode)


def _has_torch_function(relevant: Any) -> bool:
    """``torch.overrides.has_torch_function`` as if our mode were not there."""
    with _lifted() if _is_on() else nullcontext():
        return _has_torch_function_originally(relevant)


@contextmanager
def _lifted() -> Generator[None]:
    """Without our mode; others stay, in their order."""
    above = _take()
    for mode in reversed(above):
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in above:
            _pop_mode()
        _push_mode(_MODE)
        for mode in reversed(above):
            _push_mode(mode)


def _take() -> list[Any]:
    """Pop modes until ours is off; those that lay above it, the topmost first."""
    above: list[Any] = []
    while (mode := _pop_mode()) is not _MODE:
        above.append(mode)
    return above


@contextmanager
def unobserved() -> Generator[None]:
    """While we compute for ourselves: no mode of others, and attention is not looked at.

    A selective checkpoint keeps what runs under its mode and takes it, in order, for what the model computes again.
    Modes of tensors without values stay: without them nobody could tell.
    """
    frame = innermost()
    quietly = nullcontext() if frame is None else frame.quietly()
    others = _len_torch_dispatch_stack() > 0 and not has_no_values()
    lifted = _disable_current_modes() if others else nullcontext()
    with quietly, torch.no_grad(), torch._C.DisableTorchFunction(), lifted:
        yield


def _sdpa(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    frame = innermost()
    if frame is None or frame.quiet:
        return F.scaled_dot_product_attention(*args, **kwargs)
    if frame.accelerate:
        with frame.quietly():
            out = _watch_calls.attend(_watch_calls.sdpa(args, kwargs, frame.converted), _dropout(args, kwargs))
    else:
        out = F.scaled_dot_product_attention(*args, **kwargs)
    frame.see(lambda: _watch_calls.sdpa(args, kwargs, frame.converted))
    return frame.scaled(out, -3)  # [B, H, Q, Dv]


def _note(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell everybody who watches if this call completes an attention that the module writes out."""
    frame = innermost()
    if frame is None or frame.quiet or not softmax.attends(frame.softmaxes, function, args, kwargs):
        return
    for forward, name in frame.forwards.values():
        if forward.active:
            forward.note_softmax(name)


def _dropout(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)


def _multi_head(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    frame = innermost()
    if frame is None or frame.quiet:
        return F.multi_head_attention_forward(*args, **kwargs)
    given = bound(F.multi_head_attention_forward, args, kwargs)
    factors = frame.factors(given["num_heads"]) if "num_heads" in given else None  # without it, torch will complain
    if factors is None:
        out = F.multi_head_attention_forward(*args, **kwargs)
    else:  # the heads meet only in the output projection
        changed: dict[str, Any] = {
            **given,
            "out_proj_weight": torch_modules.of_heads(given["out_proj_weight"], factors),
        }
        out = F.multi_head_attention_forward(**changed)
    frame.see(lambda: torch_modules.functional_call(given))
    return out


def _native(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A fast path; that of an encoder layer attends for its ``self_attn``, which it does not call."""
    frame = innermost()
    if frame is None or frame.quiet:
        return operator(*args, **kwargs)
    inner: Any = getattr(frame.module, "self_attn", None)
    frame = frame if inner is None else frame.within(inner)
    name = _NATIVE[operator]
    factors = frame.factors(torch_modules.heads_of_native(name, args))
    out = operator(*(args if factors is None else torch_modules.with_factors(name, args, factors)), **kwargs)
    frame.see(lambda: torch_modules.native_call(name, args))
    return out


def _headscope_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    scale: float | None, softcap: float | None, dropout: float, lse: bool, backend: str | None, /,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """``headscope.attention`` and ``attend`` while a watch is open."""
    frame = innermost()
    if frame is None or frame.quiet or not frame.active:
        return run(q, k, v, mask, bias, sinks, scale, softcap, dropout, lse, backend)
    with frame.quietly():  # the backend may be SDPA
        out, row_lse = run(q, k, v, mask, bias, sinks, scale, softcap, dropout, lse, backend)
    kind = None
    if isinstance(frame.module, MultiHeadAttention):
        kind = "self" if frame.argument("context", 1) is None else "cross"
    elif isinstance(frame.module, nn_compat.MultiheadAttention):
        kind = "self" if torch_modules.same(frame.argument("query", 0), frame.argument("key", 1)) else "cross"
    said: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks, "kind": kind}
    frame.see(lambda: Call(k=k, v=v, **_first_first(q, mask, bias, row_lse), **said))
    scaled = frame.scaled(out, -3)  # [B, H, Q, Dv]
    if scaled is not out and isinstance(frame.module, MultiHeadAttention) and frame.module.bias_k is not None:
        raise _watch_calls.WatchError(
            "heads: this module has bias_kv, whose value joins the heads' outputs later and cannot be reached"
        )
    return scaled, row_lse


def _first_first(q: Tensor, mask: Any, bias: Tensor | None, lse: Tensor | None) -> dict[str, Any]:
    """What depends on queries, in their usual order where our module has them last first."""
    if isinstance(mask, Mask) and bias is not None and any(isinstance(leaf, Turned) for leaf in mask.leaves()):
        mask, q, bias = turned(mask, q.shape[-2], bias.shape[-1]), q.flip(-2), bias.flip(-2)
        lse = None if lse is None else lse.flip(-1)
    return {"q": q, "mask": mask, "bias": bias, "lse": lse}

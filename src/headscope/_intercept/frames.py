"""The modules of watched models that run: one frame for each, on a stack for each thread."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch.utils._python_dispatch import _disable_current_modes

from headscope import nn_compat
from headscope._dataflow import Follower
from headscope._intercept import masks, softmax
from headscope._intercept.alike import Like, ReadMask
from headscope._intercept.intercepted_call import InterceptedCall, requires_gradient
from headscope._support.bounded import BoundedTable
from headscope._support.torch_state import has_no_values
from headscope.masks import Mask
from headscope.module import MultiHeadAttention

_MOST_MASKS = 8  # that are held while a module runs


class Forward(Protocol):
    """One forward pass of a watched model, in its watch."""

    active: bool
    """Whether any part of it is observed."""

    def enter(self, name: str, module: nn.Module) -> bool | None:
        """Note that a module starts to run; return whether headscope's kernel should attend in it."""
        ...

    def see(self, frame: Frame, name: str, make: Callable[[], InterceptedCall]) -> None:
        """Note that a module has made its attention call."""
        ...

    def repeat(self, frame: Frame, name: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Measure an attention call as an earlier one that was like it; return whether there was one."""
        ...

    def attend_again(self, frame: Frame, name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Attend and measure in one pass, as an earlier call that was like this one; return None if that cannot be."""
        ...

    def measure(self, name: str, number: int, make: Callable[[], InterceptedCall]) -> Callable[[], None]:
        """Measure a call that a module has written out; return a function that records it."""
        ...

    def follows(self, name: str) -> bool:
        """Return whether the operations of a module are followed, to find attention that it writes out."""
        ...

    def observes_functions(self, name: str) -> bool:
        """Return whether the functions of torch that a module calls are observed."""
        ...

    def note_functions(self, name: str) -> None:
        """Note that a module's own code has called functions that may be part of an attention."""
        ...

    def note_followed(self, name: str) -> None:
        """Note that a module has to be followed for an attention that was found inside."""
        ...

    def note_refused(self, name: str) -> None:
        """Note that a module has written out an attention that cannot be recorded."""
        ...

    def note_unrecorded(self, name: str, operator: str | None) -> None:
        """Note that a module attends by an operator that cannot be recorded; None: perhaps, by a softmax of its own."""
        ...

    def factors(self, name: str, heads: int, widths: tuple[int, int]) -> Tensor | None:
        """Return the factors of a module's head outputs, [H]; None = no change."""
        ...


class Watcher(Protocol):
    """The interface of a watch, or of a context that acts on heads, for the modules' calls."""

    again: bool
    """Whether it takes part in the recomputation of a checkpoint in the backward pass."""

    @property
    def plain(self) -> Collection[str]:
        """The modules that are known to be without attention: inside other watched ones they get no frame."""
        ...

    def begin(self) -> Forward:
        """Start a forward pass."""
        ...

    def end(self, forward: Any, *, finished: bool) -> None:
        """End a forward pass; not finished = by an exception."""
        ...


class Unfollowed:
    """A forward pass in which no operations are followed, and all functions are observed."""

    def observes_functions(self, name: str) -> bool:
        """Return True."""
        return True

    def note_functions(self, name: str) -> None:
        """Do nothing: functions are observed anyway."""

    def repeat(self, frame: Frame, name: str, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Return False: each call is seen."""
        return False

    def attend_again(self, frame: Frame, name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Return None: each call is seen."""
        return None

    def follows(self, name: str) -> bool:
        """Return False."""
        return False

    def note_followed(self, name: str) -> None:
        """Do nothing: no module is followed."""

    def note_refused(self, name: str) -> None:
        """Do nothing: no module is followed."""

    def measure(self, name: str, number: int, make: Callable[[], InterceptedCall]) -> Callable[[], None]:
        """Do nothing: no module is followed."""
        return lambda: None


QKV = tuple[Tensor, Tensor, Tensor]
"""q, k and v of a call."""

Entries = tuple[tuple[Watcher, str], ...]
"""The watchers of a module, and its name in each."""


class Frame:
    """A module that is running.

    Attributes:
        forwards: watcher -> the forward pass that it is part of, and the module's name there.
        calls: the number of its attention calls, including one in progress.
        accelerate: headscope's kernel should attend, too.
        quiet: its attention calls are observed as a whole: calls within them are not.
        under_mode: whether the functions that it calls are observed.
        calls_functions: whether its own code has called some that may be part of an attention.
        like: what determines its present attention call, except the numbers in q, k and v; None: unknown.
        softmaxes: those that it has computed itself and not yet multiplied with values.
        written, refused: attentions that it has written out, and the tokens of those that are not recorded; see
            ``written``.
    """

    # most frames retain these: as attributes of the class they take no time
    calls = 0
    accelerate = False
    quiet = False
    under_mode = False
    calls_functions = False
    like: Like | None = None
    _arguments: Mapping[str, Any] | None = None

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module = module
        self.args = args
        self.kwargs = kwargs
        self.forwards: dict[Watcher, tuple[Forward, str]] = {}
        self.softmaxes: list[softmax.Weights] = []
        self.written: list[Any] = []
        self.refused: list[Any] = []

    @property
    def name(self) -> str:
        """The module's path, in the watch that was opened last."""
        return next(reversed(self.forwards.values()))[1] if self.forwards else ""

    @property
    def active(self) -> bool:
        """Whether any watcher observes this forward pass."""
        for forward, _ in self.forwards.values():  # noqa: SIM110  (a generator takes longer)
            if forward.active:
                return True
        return False

    @property
    def arguments(self) -> Mapping[str, Any]:
        """The arguments of the module's call, by name; those of ``**kwargs`` by their own names."""
        if self._arguments is None:
            self._arguments = bound(self.module.forward, self.args, self.kwargs)
        return self._arguments

    def release(self) -> None:
        """Let go of all tensors, at the end of the module: what was noted of its operations may hold the frame."""
        self.args, self.kwargs, self._arguments = (), {}, None
        if self.written or self.refused:
            for each in self.written:
                each.attention = None
            self.written, self.refused = [], []

    def quietly(self) -> _Quiet:
        """Return a context without observation, for calls within this module's attention, or headscope's."""
        return _Quiet(self)

    def argument(self, name: str, place: int) -> Any:
        """Return one of ``arguments``, which headscope's own modules take at this place; None if missing."""
        if type(self.module) not in (MultiHeadAttention, nn_compat.MultiheadAttention):
            return self.arguments.get(name)
        return self.args[place] if len(self.args) > place else self.kwargs.get(name)

    def converted(self, mask: Tensor) -> tuple[Mask | None, Tensor | None]:
        """Return ``masks.split``, computed once for all layers that get the same tensor with the same contents.

        On another device each layer splits again: comparing would wait.
        """
        read = self.read(mask)
        return masks.split(mask) if read is None else (read.visible, read.bias)

    def read(self, mask: Tensor) -> ReadMask | None:
        """Return a mask as a layer before this one has read it, or as it is read now; None: not for others."""
        if not (mask.is_cpu and type(mask) in (Tensor, nn.Parameter)):
            return None
        key = (id(mask), torch.is_grad_enabled() and mask.requires_grad)
        read = thread.masks.get(key)
        if read is None or not read.is_of(mask):
            read = thread.masks.add(key, ReadMask.of(mask))
        return read

    def see(self, call: Callable[[], InterceptedCall], qkv: QKV | None = None, like: Like | None = None) -> None:
        """Pass an attention call to all watchers; it is built only if one requires it.

        Args:
            call: builds it.
            qkv: q, k and v.
            like: what else determines it; None: unknown, or too much.
        """
        self.calls += 1
        self.like = like
        for forward, name in self.forwards.values():
            if forward.active and (like is None or qkv is None or not forward.repeat(self, name, *qkv)):
                with unobserved():
                    forward.see(self, name, call)

    def attend_again(self, qkv: QKV, like: Like | None) -> Tensor | None:
        """Attend by headscope's native kernels and pass the call to the watcher, in one pass over the weights.

        Returns the output [B, H, Q, Dv], to the bit that of attending alone; or None, and the call has to be made and
        seen: it is not like an earlier one that these kernels attended, a gradient is requested, or several watchers
        are active.

        Args:
            qkv: q, k and v.
            like: what else determines the call, as for ``see``.
        """
        if like is None:
            return None
        if requires_gradient(*qkv):
            return None
        active = [each for each in self.forwards.values() if each[0].active]
        if len(active) != 1:
            return None
        (forward, name), before = active[0], self.like
        self.calls += 1
        self.like = like
        out = forward.attend_again(self, name, *qkv)
        if out is None:
            self.calls -= 1
            self.like = before
        return out

    def measure(self, call: Callable[[], InterceptedCall], number: int) -> list[Callable[[], None]]:
        """Measure a call for all watchers; return functions that record it."""
        with unobserved():
            return [forward.measure(name, number, call) for forward, name in self.forwards.values() if forward.active]

    def factors(self, heads: int, widths: tuple[int, int]) -> Tensor | None:
        """Return the factors of this module's head outputs, [H]; None = no change.

        Args:
            heads: the number of heads.
            widths: the head width of q and k, and that of v.
        """
        product: Tensor | None = None
        for forward, name in self.forwards.values():
            each = forward.factors(name, heads, widths) if forward.active else None
            if each is not None:
                product = each if product is None else product * each
        return product

    def scaled(self, out: Tensor, axis: int, q: Tensor) -> Tensor:
        """Return the scaled outputs of this module's heads, along an axis counted from the end; ``q``: the queries."""
        factors = self.factors(out.shape[axis] if out.ndim >= -axis else 1, (q.shape[-1], out.shape[-1]))
        if factors is None:
            return out
        wide = torch.promote_types(out.dtype, torch.float32)  # half precision would round each term of a gradient
        factors = factors.to(out.device, wide)
        return (out.to(wide) * (factors.view(-1, *(1,) * (-axis - 1)) if out.ndim >= -axis else factors)).to(out.dtype)

    def within(self, module: nn.Module) -> Frame:
        """Return a frame for a module that this one computes without calling it."""
        inner = Frame(module, (), {})
        for watcher, name in watched.get(id(module), ()):
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
    """Return arguments by name; for a mismatch with the signature, the module raises its own error."""
    if not args:
        return kwargs
    function = getattr(forward, "__func__", None)
    names = None if function is None else _names_of_method(function)
    if names is not None and len(args) <= len(names.positional):
        arguments = {**dict(zip(names.positional, args, strict=False)), **kwargs}
        twice = len(arguments) < len(args) + len(kwargs)
        if not twice and names.required <= arguments.keys() and (names.any_keyword or arguments.keys() <= names.all):
            return arguments
    signature = inspect.signature(forward) if function is None else _signature_of_method(function)
    try:
        arguments = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return dict(kwargs)
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            arguments |= arguments.pop(name, {})
    return arguments


class _Names(NamedTuple):
    """The names of a method's parameters, ``self`` excluded.

    Attributes:
        positional: those of the parameters that may be passed by place.
        required, all: those without a default, and those of all.
        any_keyword: whether it has ``**kwargs``.
    """

    positional: tuple[str, ...]
    required: frozenset[str]
    all: frozenset[str]
    any_keyword: bool


@functools.lru_cache(maxsize=256)
def _names_of_method(function: Callable[..., Any]) -> _Names | None:
    """Return the names, or None if some can be passed by place only: ``inspect`` has to bind these."""
    parameters = _signature_of_method(function).parameters.values()
    if any(each.kind in (each.POSITIONAL_ONLY, each.VAR_POSITIONAL) for each in parameters):
        return None
    named = [each for each in parameters if each.kind is not each.VAR_KEYWORD]
    return _Names(
        tuple(each.name for each in named if each.kind is each.POSITIONAL_OR_KEYWORD),
        frozenset(each.name for each in named if each.default is each.empty),
        frozenset(each.name for each in named),
        len(named) < len(parameters),
    )


@functools.lru_cache(maxsize=256)
def _signature_of_method(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature without ``self``. Cached: building it takes as long as attending to a short text."""
    return inspect.signature(MethodType(function, object()))


class _Thread(threading.local):
    """The running modules of a thread.

    Attributes:
        stack: the modules that run, the outermost first.
        follower: follows operations, while it is on; see ``written``.
        written_masks: by shape and device: visible pairs, their mask, and which keys are visible to some query; see
            ``written``.
        masks: see ``Frame.converted``.
    """

    def __init__(self) -> None:
        self.stack: list[Frame] = []
        self.follower: Follower | None = None
        self.written_masks: dict[tuple[torch.Size, torch.device], tuple[Tensor, Mask, Tensor]] = {}
        self.masks: BoundedTable[Any, ReadMask] = BoundedTable(_MOST_MASKS)  # of a whole generation, say


thread = _Thread()
watched: dict[int, Entries] = {}  # by id of the module; the watchers hold references to the modules


def innermost() -> Frame | None:
    """Return the module that runs in this thread, or None."""
    return thread.stack[-1] if thread.stack else None


def running_frames() -> Iterator[Frame]:
    """Return the modules that run in this thread, the innermost first."""
    return reversed(thread.stack)


@contextmanager
def unobserved() -> Generator[None]:
    """Return a context for headscope's own computations: without modes of others or observation.

    A selective checkpoint saves all results under its mode, and reuses them, in order, in the recomputation. Modes of
    tensors without values stay, because only they reveal such tensors.
    """
    frame = innermost()
    quietly = nullcontext() if frame is None else frame.quietly()
    others = _len_torch_dispatch_stack() > 0 and not has_no_values()
    lifted = _disable_current_modes() if others else nullcontext()
    with quietly, torch.no_grad(), torch._C.DisableTorchFunction(), lifted:
        yield

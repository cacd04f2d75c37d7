"""Replacements in torch while a watch is open. ``fused`` and ``transformers`` add their own functions.

While a watch is open, the ``__call__`` of the classes of watched modules is replaced by one that recognises these
modules and maintains, for each thread, a stack of those that run (``Frame``). While one of them runs, a function mode
observes its calls; an attention call belongs to the innermost module.

This must not change the results of the model. torch's transformer modules leave their fast path if a hook is
registered, or if a function mode is on, because ``torch.overrides.has_torch_function`` is then true. So headscope does
not register hooks or change modules, and replaces that function by one that ignores its mode.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._C import _len_torch_function_stack

from headscope._attend import hook
from headscope._attend.context_parallel import CONTEXT_PARALLEL, check_context_parallel
from headscope._intercept import (
    dynamo,
    frames,
    function_mode,
    fused,
    intercepted_call,
    module_calls,
    module_names,
    written,
)
from headscope._intercept.frames import Entries, Forward, Frame, Watcher

_FUSED = fused.Patches(function_mode.note_unrecorded)
patches: list[tuple[Callable[[], None], Callable[[], None]]] = [(_FUSED.install, _FUSED.remove)]
"""Further replacements while a watch is open: functions to call when the first one opens, and when the last one
closes.
"""

_TORCH_HAS_FUNCTION = torch.overrides.has_torch_function
_lock = threading.Lock()
_open = False
_original_interceptor: hook.Interceptor | None = None


def open_watch(watcher: Watcher, modules: Mapping[str, nn.Module]) -> None:
    """Start to report the calls of these modules to a watcher."""
    global _open, _original_interceptor
    call = _uncompiled_call() if "torch._dynamo" in sys.modules else _call  # may wait for its import: without the lock
    try:
        with _lock:
            if not _open:
                _open = True
                if call is _call:
                    sys.meta_path.insert(0, _IMPORT)
                _original_interceptor = hook.install(function_mode.attention_interceptor)
                torch.overrides.has_torch_function = function_mode.has_torch_function
                for install, _ in patches:
                    install()
            module_calls.replace_calls(modules.values(), call)
            _refuse_compiled()
            for name, module in modules.items():
                frames.watched[id(module)] = (*frames.watched.get(id(module), ()), (watcher, name))
            dynamo.set_aside(watcher, modules.values())
    except BaseException:  # Ctrl-C, say
        close_watch(watcher, modules)
        raise


def _refuse_compiled() -> None:
    """Refuse calls of watched modules that ``torch.compile`` has wrapped, if dynamo is loaded."""
    wrapper = dynamo.loaded_wrapper()
    if wrapper is not None:
        module_calls.replace_call(wrapper, _refusing_call)


@functools.cache
def _refusing_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``__call__`` for the class that ``torch.compile`` wraps modules in: it refuses those of watched ones."""

    def call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        if id(dynamo.inside(self)) in frames.watched:
            raise intercepted_call.WatchError(intercepted_call.COMPILED)
        return original(self, *args, **kwargs)

    return torch.compiler.disable(call)


@functools.cache
def _uncompiled_call() -> Callable[..., Any]:
    """Let compiled functions skip a watched model, which then runs uncompiled."""
    return dynamo.uncompiled(_call)


def _dynamo_has_come() -> None:
    """Handle an import of dynamo while a watch is open."""
    call = _uncompiled_call()
    with _lock:
        if _open:
            module_calls.exchange_calls(_call, call)
            _refuse_compiled()
            dynamo.say_original(module_calls.original())


_IMPORT: Any = dynamo.Import(_dynamo_has_come)


def close_watch(watcher: Watcher, modules: Mapping[str, nn.Module]) -> None:
    """Stop reporting to a watcher, and restore everything with the last one."""
    try:
        _close(watcher, modules)
    except BaseException:  # after Ctrl-C, say: finish now what it interrupted
        _close(watcher, modules)
        raise
    finally:
        module_names.forget_compiled(modules)


def _close(watcher: Watcher, modules: Mapping[str, nn.Module]) -> None:
    global _open, _original_interceptor
    with _lock:
        for key in map(id, modules.values()):
            entries = frames.watched.get(key, ())
            left = (
                ()
                if len(entries) == 1 and entries[0][0] is watcher
                else tuple(entry for entry in entries if entry[0] is not watcher)
            )
            if left:
                frames.watched[key] = left
            elif entries:
                del frames.watched[key]
        if not frames.watched and _open:
            module_calls.restore_calls()
            if _IMPORT in sys.meta_path:
                sys.meta_path.remove(_IMPORT)
            if hook.interceptor is function_mode.attention_interceptor:  # else other code has replaced it since
                hook.install(_original_interceptor)
            _original_interceptor = None
            torch.overrides.has_torch_function = _TORCH_HAS_FUNCTION
            for _, remove in patches:
                remove()
            _open = False
        dynamo.put_back(watcher)


def _call(self: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    """Replace ``__call__`` of the classes of watched modules while a watch is open."""
    original = module_calls.originals.get(nn.Module) or nn.Module.__call__  # as ``original``, without a call for each
    entries = frames.watched.get(id(self))
    if entries is None:
        return original(self, *args, **kwargs)
    stack = frames.thread.stack
    if stack and not (around := stack[-1]).under_mode:  # most modules: before any other question, and in place
        for watcher, name in entries:
            if watcher not in around.forwards or name not in watcher.plain:
                break
        else:
            return original(self, *args, **kwargs)
    if torch.compiler.is_compiling():
        raise intercepted_call.WatchError(intercepted_call.COMPILED)
    if CONTEXT_PARALLEL in sys.modules:
        check_context_parallel()
    if torch._C._current_graph_task_id() != -1:  # a checkpoint recomputes calls that were observed before
        entries = tuple(entry for entry in entries if entry[0].again)
        if not entries:
            return original(self, *args, **kwargs)
        if stack and _needs_no_frame(stack[-1], entries):
            return original(self, *args, **kwargs)
    return _run_under_mode(original, Frame(self, args, kwargs), entries)


def _needs_no_frame(around: Frame, entries: Entries) -> bool:
    """Return whether a module is known to be without attention, within one whose functions are not observed."""
    if around.under_mode:
        return False
    for watcher, name in entries:  # noqa: SIM110  (a generator takes longer)
        if watcher not in around.forwards or name not in watcher.plain:
            return False
    return True


def _enter(frame: Frame, entries: Entries) -> list[tuple[Watcher, Forward]]:
    """Tell the watchers of a module that it starts to run; return the forward passes that begin with it."""
    begun: list[tuple[Watcher, Forward]] = []
    try:
        for watcher, name in entries:
            outer = None
            for above in reversed(frames.thread.stack):
                if watcher in above.forwards:
                    outer = above.forwards[watcher][0]
                    break
            if outer is None:
                outer = watcher.begin()
                begun.append((watcher, outer))
            frame.forwards[watcher] = (outer, name)
            if outer.active and outer.enter(name, frame.module):
                frame.accelerate = True
    except BaseException:  # such as of a watch whose layers were replaced
        for watcher, forward in begun:
            watcher.end(forward, finished=False)
        raise
    return begun


def _observes_functions(frame: Frame) -> bool:
    """Return whether a watcher of this forward pass observes the functions that a module calls."""
    for forward, name in frame.forwards.values():  # noqa: SIM110  (a generator takes longer)
        if forward.active and forward.observes_functions(name):
            return True
    return False


def _runs_without_mode(frame: Frame) -> bool:
    """Return whether the mode is taken off for a module that is known not to attend by functions of its own.

    A hook or a child that attends may be added to an ``nn.Sequential``.
    """
    return type(frame.module) is not nn.Sequential and frames.thread.follower is None and function_mode.is_on()


def _run_under_mode(original: Callable[..., Any], frame: Frame, entries: Entries) -> Any:
    """Call a module with its frame on the stack, and under a function mode that observes SDPA, if it may attend.

    Within a module that may, one that is known not to runs without the mode, through which each function takes longer.
    """
    stack = frames.thread.stack
    begun = _enter(frame, entries)
    finished = False
    mode = follower = None
    frame.under_mode = bool(stack) and stack[-1].under_mode
    if _observes_functions(frame):
        frame.under_mode = True
        if not function_mode.is_on():
            mode = function_mode.MODE if _len_torch_function_stack() == 0 else function_mode.beneath()
    elif frame.under_mode and _runs_without_mode(frame):
        frame.under_mode = False
        mode = function_mode.lifted()
    if frames.thread.follower is None and written.is_to_be_followed(frame):
        follower = written.followed(frame)
    stack.append(frame)
    try:
        if mode is None and follower is None:  # as for most modules: empty contexts would take time
            out = original(frame.module, *frame.args, **frame.kwargs)
        else:
            with mode or nullcontext(), follower or nullcontext():
                out = original(frame.module, *frame.args, **frame.kwargs)
        if frame.written:
            written.settle(frame, stack[-2] if len(stack) > 1 else None)
        finished = True
        return out
    finally:
        stack.pop()
        if frame.calls_functions:
            for forward, name in frame.forwards.values():
                forward.note_functions(name)
        frame.release()
        if not stack:
            frames.thread.masks.clear()
            frames.thread.written_masks.clear()
        for watcher, forward in begun:
            watcher.end(forward, finished=finished)

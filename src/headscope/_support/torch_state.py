"""Observers of tensor operations: a compiler, a tracer, a transform of torch.func, a mode."""

from __future__ import annotations

import torch
from torch._C import (
    _are_functorch_transforms_active,
    _get_dispatch_mode,
    _get_dispatch_stack_at,
    _is_tracing,
    _len_torch_dispatch_stack,
    _TorchDispatchModeKey,
)
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

_WITHOUT_VALUES = (_TorchDispatchModeKey.FAKE, _TorchDispatchModeKey.PROXY, _TorchDispatchModeKey.FUNCTIONAL)


def is_traced() -> bool:
    """Return whether operators are observed as they run, and not only their results.

    torch.compile, torch.export, torch.func, torch.jit.trace, forward-mode gradients, or a mode such as a fake tensor's
    or a counter of operations. A tensor created then may be useless afterwards.
    """
    return (
        is_dynamo_compiling()  # a constant for the compiler, which then stops tracing here
        or (_len_torch_dispatch_stack() > 0 and not _are_modes_transparent())
        or _are_functorch_transforms_active()
        or _is_tracing()
        or forward_ad._current_level >= 0
    )


def _are_modes_transparent() -> bool:
    """Return whether the modes of this thread only read what operations compute: headscope's own."""
    return all(
        getattr(_get_dispatch_stack_at(at), "is_transparent", False) for at in range(_len_torch_dispatch_stack())
    )


def has_no_values() -> bool:
    """Return whether tensors created now have no readable values: under a compiler, fake tensors, make_fx."""
    if torch.compiler.is_compiling():
        return True
    return _len_torch_dispatch_stack() > 0 and any(_get_dispatch_mode(key) is not None for key in _WITHOUT_VALUES)

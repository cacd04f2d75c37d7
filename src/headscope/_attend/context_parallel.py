"""torch's context parallelism: raise while it is active, because q, k, v may then be parts of a sequence."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from headscope._support.compiler import mark_constant

CONTEXT_PARALLEL = "torch.distributed.tensor.experimental"
"""The package of torch's context parallelism: while ``sys.modules`` lacks it, context parallelism is not active."""

IN_CONTEXT_PARALLEL = (
    "q, k, v: torch's context parallelism is active, so they may hold only this rank's part of the sequence; "
    "expected the whole sequence, because headscope would attend within that part only. Call "
    "torch.nn.functional.scaled_dot_product_attention there, or gather the parts (context_parallel_unshard) and "
    "call headscope outside context_parallel, after _disable_context_parallel_dispatcher() if the dispatcher was "
    "enabled"
)
SHARDED = (
    "torch's _context_parallel_shard was called in this process. headscope treats q, k and v as whole sequences: "
    "if they are shards, gather them first (context_parallel_unshard)"
)

_HANDLED = torch.ops.aten._scaled_dot_product_flash_attention.default


class _Checked:
    """The lookups of ``check_context_parallel``, cached so that a call without context parallelism costs little."""

    dispatcher: Any = None
    """DTensor's dispatcher: one object for the life of the process."""
    handlers: Any = None
    """Its table of handlers, without those of context parallelism; torch replaces the table and never changes it in
    place.
    """
    sharding: Any = None
    """The module whose ``_dispatch_mode`` shows that ``_context_parallel_shard`` was called; None after the warning."""
    plain_mode: Any = None
    """Its mode at the last check."""


def check_context_parallel() -> None:
    """Raise if torch's context parallelism is active; warn, once, if it has sharded tensors without another trace.

    However it intercepts attention (a replaced ``F.scaled_dot_product_attention``, a function mode in torch 2.9, a
    wrapped module), it gives DTensor's dispatcher its own handlers of torch's attention operators.

    Raises:
        RuntimeError: ``context_parallel`` is open, or its dispatcher is enabled.
    """
    if is_dynamo_compiling():
        if _handles_attention():
            raise RuntimeError(IN_CONTEXT_PARALLEL)
        return
    at, module = _Checked.dispatcher, _Checked.sharding
    if (
        at is None
        or at._custom_op_handlers is not _Checked.handlers
        or (module is not None and module._dispatch_mode is not _Checked.plain_mode)
    ):
        _check_anew()


def _check_anew() -> None:
    if _handles_attention():
        raise RuntimeError(IN_CONTEXT_PARALLEL)
    names = (f"{CONTEXT_PARALLEL}._context_parallel._attention", f"{CONTEXT_PARALLEL}._attention")
    modules = (sys.modules.get(name) for name in names)  # torch 2.9 has only the second
    module = next((each for each in modules if hasattr(each, "_dispatch_mode")), None)
    if module is not None and module._dispatch_mode.name == "MODULE_WRAPPER" and not _warned:
        _warned.append(SHARDED)
        warnings.warn(SHARDED, stacklevel=4)
    dispatcher = _dispatcher()
    _Checked.sharding = module
    _Checked.plain_mode = None if module is None else module._dispatch_mode
    _Checked.handlers = None if dispatcher is None else dispatcher._custom_op_handlers
    _Checked.dispatcher = dispatcher


_warned: list[str] = []


def _dispatcher() -> Any:
    tensor = sys.modules.get("torch.distributed.tensor")
    return None if tensor is None else tensor.DTensor._op_dispatcher


@mark_constant  # a compiler cannot trace a read of torch's dispatcher
def _handles_attention() -> bool:
    """Return whether DTensor's dispatcher passes attention to torch's context parallelism."""
    dispatcher = _dispatcher()
    handler = None if dispatcher is None else dispatcher._custom_op_handlers.get(_HANDLED)
    return getattr(handler, "__module__", "").startswith(CONTEXT_PARALLEL)

"""select(call, name) -> backend: the first in the table that supports the call, or the named one."""

from __future__ import annotations

import torch

from headscope._attend.backends import blocked, flex, fused, native, reference, reproducible, sdpa
from headscope._attend.call import Call
from headscope._attend.interface import Backend

BACKENDS: dict[str, Backend] = {
    native.name: native,
    sdpa.name: sdpa,
    fused.name: fused,
    flex.name: flex,
    blocked.name: blocked,
    reference.name: reference,
    reproducible.name: reproducible,  # by name only
}

# Fastest first, by device type or as ``order`` decides; other devices use the order of "default".
ORDER: dict[str, tuple[str, ...]] = {
    "cuda": (native.name, sdpa.name, fused.name, flex.name, blocked.name, reference.name),
    "default": (native.name, sdpa.name, blocked.name, reference.name),
    # bf16 on a CPU with matrix tiles, which torch's kernel uses and the native kernels do not
    "cpu, AMX": (sdpa.name, native.name, blocked.name, reference.name),
    # torch.func within torch.compile may require any derivative: torch's kernels have the first one only
    "transformed": (blocked.name, native.name, sdpa.name, reference.name),
}
AMX_ROWS = 32  # from so many query rows of a key/value head on, tiles are full


def order(call: Call) -> tuple[str, ...]:
    """Return the names of the backends in the order of selection."""
    if call.form == "transformed":
        return ORDER["transformed"]
    rows = call.queries * call.group
    if call.device == "cpu" and call.dtype == torch.bfloat16 and rows >= AMX_ROWS and has_amx():
        return ORDER["cpu, AMX"]
    return ORDER.get(call.device, ORDER["default"])


def _find_amx() -> bool:
    is_supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(is_supported()) if is_supported is not None else False


_AMX = _find_amx()  # once and now: a compiler cannot trace the check


def has_amx() -> bool:
    """Return whether torch detects the matrix tiles of AMX; False if this torch has no such check."""
    return _AMX


def select(call: Call, name: str | None = None) -> Backend:
    """Return the backend that will run a call.

    Args:
        call: the call to run.
        name: a backend's name, or None for the first in the table that supports the call.

    Raises:
        ValueError: the backend does not exist, or does not support the call; the message lists the reasons.
    """
    if name is None:
        return next(BACKENDS[each] for each in order(call) if not BACKENDS[each].refuses(call))
    backend = _named(name)
    reasons = backend.refuses(call)
    if reasons:
        raise ValueError(f"backend: {name} refuses this call: {'; '.join(reasons)}")
    return backend


def _named(name: object) -> Backend:
    """Return the backend of this name."""
    if not isinstance(name, str) or name not in BACKENDS:
        raise ValueError(f"backend: got {name!r}, expected one of {', '.join(BACKENDS)}, or None to choose")
    return BACKENDS[name]

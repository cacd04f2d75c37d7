"""select(call, name) -> backend: the first in the table that refuses nothing, or the one that was named."""

from __future__ import annotations

import torch

from headscope._attend.backends import blocked, native, reference, reproducible, sdpa
from headscope._attend.call import Call
from headscope._attend.interface import Backend

BACKENDS: dict[str, Backend] = {
    native.name: native,
    sdpa.name: sdpa,
    blocked.name: blocked,
    reference.name: reference,
    reproducible.name: reproducible,  # by name alone
}

# Fastest first of what is right, by device type or as ``order`` says; other devices take the order of "default".
ORDER: dict[str, tuple[str, ...]] = {
    "default": (native.name, sdpa.name, blocked.name, reference.name),
    # bf16 on a CPU with matrix tiles, which torch's kernel uses and ours do not
    "cpu, AMX": (sdpa.name, native.name, blocked.name, reference.name),
    # torch.func within torch.compile, which may ask for any derivative: torch's kernels have the first one only
    "transformed": (blocked.name, native.name, sdpa.name, reference.name),
}
AMX_ROWS = 32  # query rows of a key/value head from which on tiles are filled


def order(call: Call) -> tuple[str, ...]:
    """The names of the backends in the order in which they are asked."""
    if call.form == "transformed":
        return ORDER["transformed"]
    rows = call.queries * call.group
    if call.device == "cpu" and call.dtype == torch.bfloat16 and rows >= AMX_ROWS and has_amx():
        return ORDER["cpu, AMX"]
    return ORDER.get(call.device, ORDER["default"])


def _find_amx() -> bool:
    is_supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(is_supported()) if is_supported is not None else False


_AMX = _find_amx()  # once and now: a compiler cannot follow the question


def has_amx() -> bool:
    """Whether torch finds the matrix tiles of AMX here; False where this torch cannot say."""
    return _AMX


def select(call: Call, name: str | None = None) -> Backend:
    """The backend that will run a call.

    Args:
        call: what is to be computed.
        name: a backend's name, or None for the first of the table that refuses nothing.

    Raises:
        ValueError: there is no backend of that name, or it refuses the call; the message lists its reasons.
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

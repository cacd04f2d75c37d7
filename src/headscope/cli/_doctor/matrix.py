"""Which backend, and which target of the native kernels, takes which option in which dtype."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from headscope._attend.backends import native
from headscope._attend.select import BACKENDS
from headscope.cli._doctor.machine import Ask, describe_ask

_SMALL = {"batch": 2, "heads": 4, "queries": 24, "head_dim": 16}


def _ask(**said: object) -> Ask:
    return Ask(**{**_SMALL, **said})  # pyright: ignore[reportArgumentType]


OPTIONS: dict[str, Ask] = {
    "no option": _ask(),
    "gradients": _ask(grad=True),
    "lse": _ask(lse=True),
    "grouped heads": _ask(kv_heads=2),
    "one query": _ask(queries=1, keys=24),
    "more keys than queries": _ask(keys=37),
    "D 512": _ask(head_dim=512),
    "Dv 11 beside D 16": _ask(v_head_dim=11),
    "mask: causal": _ask(causal=True),
    "mask: causal, more keys": _ask(causal=True, keys=37),
    "mask: window": _ask(window=5),
    "mask: prefix | window": _ask(window=5, prefix=3),
    "mask: prefix": _ask(prefix=3),
    "mask: key lengths": _ask(padded=True),
    "mask: causal & key lengths": _ask(causal=True, padded=True),
    "mask: documents": _ask(documents=True),
    "mask: causal & documents": _ask(causal=True, documents=True),
    "mask: interleaved documents": _ask(interleaved=True),
    "mask: boolean tensor": _ask(dense=True),
    "mask: causal & boolean tensor": _ask(causal=True, dense=True),
    "bias": _ask(bias=True),
    "bias and its gradient": _ask(bias=True, grad=True),
    "softcap": _ask(softcap=5.0),
    "sinks": _ask(sinks=True),
    "dropout": _ask(dropout=0.1),
    "every option together": _ask(
        kv_heads=2, v_head_dim=11, window=5, padded=True, dense=True, bias=True, softcap=5.0, sinks=True, dropout=0.1,
        lse=True, grad=True,
    ),
    "torch.compile, torch.func": _ask(form="traced"),
    "a subclass of Tensor": _ask(form="subclass"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """Whether one backend takes one option.

    Attributes:
        option: a key of ``OPTIONS``.
        dtype: the name of a dtype.
        backend: a backend's name.
        target: of the native kernels: the instruction set; for other backends None.
        reasons: why it refuses; none if it takes it.
    """

    option: str
    dtype: str
    backend: str
    target: str | None
    reasons: tuple[str, ...]


def matrix(dtypes: dict[str, torch.dtype], device: str) -> list[Cell]:
    """Every option, in every dtype, for every target of this machine and every backend, in this order."""
    targets = native.native.targets() if native.native is not None else [None]
    columns = [(name, target) for name in BACKENDS for target in (targets if name == native.name else [None])]
    cells: list[Cell] = []
    for option, ask in OPTIONS.items():
        for dtype, kind in dtypes.items():
            call = describe_ask(ask, kind, device)
            # all targets are built from one source, so that none of them refuses what another takes
            refusals = {name: tuple(backend.refuses(call)) for name, backend in BACKENDS.items()}
            cells += [Cell(option, dtype, name, target, refusals[name]) for name, target in columns]
    return cells

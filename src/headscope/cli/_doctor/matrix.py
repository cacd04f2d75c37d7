"""Which backend, and which target of the native kernels, supports which option in which dtype."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headscope._attend.backends import fused, native
from headscope._attend.call import Call, Form
from headscope._attend.select import BACKENDS, select
from headscope.cli._doctor.machine import CallSpec, describe_spec

_SMALL = CallSpec(batch=2, heads=4, queries=24, head_dim=16)


OPTIONS: dict[str, CallSpec] = {
    "no option": _SMALL,
    "gradients": replace(_SMALL, grad=True),
    "lse": replace(_SMALL, lse=True),
    "grouped heads": replace(_SMALL, kv_heads=2),
    "one query": replace(_SMALL, queries=1, keys=24),
    "more keys than queries": replace(_SMALL, keys=37),
    "D 512": replace(_SMALL, head_dim=512),
    "Dv 11 with D 16": replace(_SMALL, v_head_dim=11),
    "mask: causal": replace(_SMALL, causal=True),
    "mask: causal, more keys": replace(_SMALL, causal=True, keys=37),
    "mask: top-left causal, more keys": replace(_SMALL, top_left=True, keys=37),
    "mask: window": replace(_SMALL, window=5),
    "mask: prefix | window": replace(_SMALL, window=5, prefix=3),
    "mask: prefix": replace(_SMALL, prefix=3),
    "mask: key lengths": replace(_SMALL, padded=True),
    "mask: causal & key lengths": replace(_SMALL, causal=True, padded=True),
    "mask: documents": replace(_SMALL, documents=True),
    "mask: packed documents": replace(_SMALL, batch=1, packed=True),
    "mask: causal & packed documents": replace(_SMALL, batch=1, causal=True, packed=True),
    "mask: causal & documents": replace(_SMALL, causal=True, documents=True),
    "mask: interleaved documents": replace(_SMALL, interleaved=True),
    "mask: boolean tensor": replace(_SMALL, dense=True),
    "mask: causal & boolean tensor": replace(_SMALL, causal=True, dense=True),
    "bias": replace(_SMALL, bias=True),
    "bias and its gradient": replace(_SMALL, bias=True, grad=True),
    "softcap": replace(_SMALL, softcap=5.0),
    "sinks": replace(_SMALL, sinks=True),
    "dropout": replace(_SMALL, dropout=0.1),
    "dropout, mask: window": replace(_SMALL, dropout=0.1, window=5),
    "dropout, mask: packed documents": replace(_SMALL, dropout=0.1, batch=1, packed=True),
    "dropout, D 256": replace(_SMALL, dropout=0.1, head_dim=256),
    "dropout, softcap": replace(_SMALL, dropout=0.1, softcap=5.0),
    "every option together": replace(
        _SMALL,
        kv_heads=2, v_head_dim=11, window=5, padded=True, dense=True, bias=True, softcap=5.0, sinks=True, dropout=0.1,
        lse=True, grad=True,
    ),
    "torch.compile, torch.func": replace(_SMALL, form="traced"),
    "a subclass of Tensor": replace(_SMALL, form="subclass"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """Whether one backend supports one option.

    Attributes:
        option: a key of ``OPTIONS``.
        dtype: the name of a dtype.
        backend: a backend's name.
        target: instruction set of the native kernels; None for other backends.
        reasons: why the backend refuses the option; empty if it supports it.
    """

    option: str
    dtype: str
    backend: str
    target: str | None
    reasons: tuple[str, ...]


def matrix(dtypes: dict[str, torch.dtype], device: str) -> list[Cell]:
    """Return a cell for every option, dtype, and target or backend, in this order."""
    targets = native.extension.targets() if native.extension is not None else [None]
    columns = [(name, target) for name in BACKENDS for target in (targets if name == native.name else [None])]
    cells: list[Cell] = []
    for option, spec in OPTIONS.items():
        for dtype, kind in dtypes.items():
            call = describe_spec(spec, kind, device)
            # all targets are compiled from the same source, so they support the same options
            refusals = {name: tuple(backend.refuses(call)) for name, backend in BACKENDS.items()}
            cells += [Cell(option, dtype, name, target, refusals[name]) for name, target in columns]
    return cells


MODES: dict[str, tuple[Form, bool]] = {
    "eager": ("plain", False),
    "compile": ("traced", True),
    "export": ("traced", False),
}
CALLS = ("attention", "attend")


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs one call on a GPU.

    Attributes:
        call: "attention" or "attend", which returns lse too.
        mode: "eager", "compile" or "export".
        option: a key of ``OPTIONS``.
        dtype: the name of a dtype.
        chosen: the backend that is selected; of "fused" with its kernel, as "fused: flash band".
    """

    call: str
    mode: str
    option: str
    dtype: str
    chosen: str


def choices(dtypes: dict[str, torch.dtype], device: str) -> list[Choice]:
    """Return what headscope selects for every option, dtype, call and mode; options with another form are left out."""
    rows: list[Choice] = []
    for option, spec in OPTIONS.items():
        if spec.form != "plain":
            continue
        for dtype, kind in dtypes.items():
            for call in CALLS:
                for mode, (form, compiled) in MODES.items():
                    asked = replace(spec, lse=spec.lse or call == "attend", form=form, compiled=compiled)
                    rows.append(Choice(call, mode, option, dtype, _chosen(describe_spec(asked, kind, device))))
    return rows


def _chosen(call: Call) -> str:
    backend = select(call)
    return f"{fused.name}: {fused.choose(call)}" if backend is fused else backend.name

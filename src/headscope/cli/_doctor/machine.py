"""What this machine has, and which backend takes which call."""

from __future__ import annotations

import operator
import os
import platform
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from headscope import __version__, masks
from headscope._attend.backends import native as cpu
from headscope._attend.call import Call, Form, Options, describe
from headscope._attend.select import BACKENDS, order
from headscope._observe import native
from headscope._support.cpuinfo import processor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
LARGEST_PLAN = 1 << 24  # rows; the spans of a mask take some bytes for each


@dataclass(frozen=True, slots=True)
class Ask:
    """One attention by its sizes and options, without tensors.

    Attributes:
        window: see the last so many keys; it has ``causal`` in it.
        padded: keys beyond a length of each batch entry are hidden.
        prefix: every query sees the first so many keys, beside what ``causal`` and ``window`` let it see.
        documents: a query sees keys of its own document only; there are three, one after the other.
        interleaved: likewise, with the documents' tokens taking turns.
        dense: a boolean tensor [B, H, Q, K] is the mask, or part of it.
        bias: an additive bias [H, Q, K].
        lse: the row log-sum-exp is asked for too.
        grad: in training: q, k, v, the bias and the sinks want gradients.
        form: of the tensors: "plain"; "traced", seen by a compiler or a transform; "subclass", of a subclass of Tensor.
    """

    batch: int = 2
    heads: int = 8
    kv_heads: int | None = None
    queries: int = 512
    keys: int | None = None
    head_dim: int = 64
    v_head_dim: int | None = None
    causal: bool = False
    window: int | None = None
    padded: bool = False
    prefix: int | None = None
    documents: bool = False
    interleaved: bool = False
    dense: bool = False
    bias: bool = False
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    lse: bool = False
    grad: bool = False
    form: Form = "plain"


TYPICAL: dict[str, Ask] = {
    "plain": Ask(),
    "causal": Ask(causal=True),
    "window of 128": Ask(window=128),
    "padded batch": Ask(padded=True),
    "causal, padded batch": Ask(causal=True, padded=True),
    "bias": Ask(bias=True),
    "bias, training": Ask(bias=True, grad=True),
    "softcap": Ask(softcap=50.0),
    "sinks": Ask(sinks=True),
    "dropout": Ask(dropout=0.1, grad=True),
    "grouped heads (8 over 2)": Ask(kv_heads=2),
    "Dv 32 beside D 64": Ask(v_head_dim=32),
    "lse asked for": Ask(lse=True),
    "decode (1 query, 512 keys)": Ask(queries=1, keys=512, causal=True),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which backend takes a call, and why the others do not.

    Attributes:
        selected: the name of the backend that runs.
        refusals: the reasons of each backend that refuses, by name, in the order in which they are asked.
        observer: why the native observer does not take it; none if it does. The portable one takes every call.
    """

    selected: str
    refusals: dict[str, list[str]]
    observer: list[str]


def judge(ask: Ask, dtype: torch.dtype, device: str) -> Verdict:
    """Which backend takes a call of these sizes and options, and whether the native observer would.

    Nothing of the sizes asked for is allocated. A device that this machine lacks is answered for as if it were there.

    Args:
        ask: sizes and options.
        dtype: of q, k and v.
        device: a device type, as "cpu" or "cuda".

    Raises:
        TypeError, ValueError: such a call would be refused by ``headscope.attention``; the message says why.
    """
    call = describe_ask(ask, dtype, device)
    refusals = {name: BACKENDS[name].refuses(call) for name in order(call)}
    selected = next(name for name, reasons in refusals.items() if not reasons)
    refusals = {name: reasons for name, reasons in refusals.items() if reasons}
    return Verdict(selected, refusals, native.refuses_call(call))


def describe_ask(ask: Ask, dtype: torch.dtype, device: str) -> Call:
    """The call as backends are asked about it; arguments and errors as ``judge``."""
    _check_sizes(ask)
    # on the CPU the values of a mask are read to plan it; elsewhere they are not, as on meta, which every machine has
    where = "cpu" if device == "cpu" else "meta"
    keys = ask.queries if ask.keys is None else ask.keys
    kv_heads = ask.heads if ask.kv_heads is None else ask.kv_heads

    def make(*sizes: int) -> Tensor:
        # one element, seen at every index
        return torch.zeros((), dtype=dtype, device=where).expand(sizes).requires_grad_(ask.grad)

    q = make(ask.batch, ask.heads, ask.queries, ask.head_dim)
    k = make(ask.batch, kv_heads, keys, ask.head_dim)
    v = make(ask.batch, kv_heads, keys, ask.head_dim if ask.v_head_dim is None else ask.v_head_dim)
    bias = make(ask.heads, ask.queries, keys) if ask.bias else None
    sinks = make(ask.heads) if ask.sinks else None
    options = Options(mask=_mask(ask, keys, where), scale=None, softcap=ask.softcap, dropout=ask.dropout, lse=ask.lse)
    with torch.set_grad_enabled(ask.grad):
        return replace(describe(q, k, v, bias, sinks, options), device=device, form=ask.form)


def _check_sizes(ask: Ask) -> None:
    rows = ask.batch * max(ask.queries, ask.keys or 0)
    masked = ask.causal or ask.padded or ask.window or ask.prefix or ask.documents or ask.interleaved
    if masked and rows > LARGEST_PLAN:
        raise ValueError(f"B x max(Q, K) is {rows}; to plan a mask here, wanted at most {LARGEST_PLAN}")
    widest = max(ask.head_dim, ask.v_head_dim or 0, ask.queries if ask.bias else 0)
    if rows * ask.heads * widest >= 2**63:
        sizes = f"B {ask.batch}, H {ask.heads}, Q {ask.queries}, K {ask.keys or ask.queries}"
        raise ValueError(f"{sizes}: more than a tensor holds")


def _mask(ask: Ask, keys: int, device: str) -> masks.Mask | None:
    parts: list[masks.Mask] = []
    if ask.window is not None:
        parts.append(masks.window(ask.window))
    elif ask.causal:
        parts.append(masks.causal())
    if ask.prefix is not None:
        parts = [masks.Prefix(ask.prefix) | part for part in parts] or [masks.Prefix(ask.prefix)]
    if ask.padded:
        parts.append(masks.KeyLengths(torch.arange(ask.batch, device=device) % max(1, keys) + 1))
    if ask.documents or ask.interleaved:
        at = torch.arange(keys, device=device)
        ids = (at % 3 if ask.interleaved else at * 3 // max(1, keys)).expand(ask.batch, keys)
        parts.append(masks.Documents(ids[:, max(0, keys - ask.queries) :], ids))
    if ask.dense:
        seen = torch.ones((), dtype=torch.bool, device=device)
        parts.append(masks.Dense(seen.expand(ask.batch, ask.heads, ask.queries, keys)))
    return reduce(operator.and_, parts) if parts else None


def machine() -> dict[str, dict[str, Any]]:
    """Versions, the machine, and what torch can do on it, by section."""
    return {"versions": _versions(), "machine": _hardware(), "torch": _torch(), "native kernels": _native()}


def _native() -> dict[str, Any]:
    if cpu.unloadable:
        return {"target": f"built, and cannot be loaded: {cpu.unloadable}"}
    if cpu.native is None:
        return {"target": "not installed: there was no C++ compiler when the package was built"}
    return {"target": cpu.native.target(), "targets of this CPU": ", ".join(cpu.native.targets())}


def _versions() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, Any] = {
        "headscope": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,  # with what it was built for, which the metadata may lack
    }
    for name in ("numpy", "safetensors", "tokenizers", "rich", "click", "pillow", "matplotlib", "jinja2"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "missing"
    return found


def _hardware() -> dict[str, Any]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": processor(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable cores": usable,
        "memory (GiB)": _memory(),
    }


def _memory() -> float | None:
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)


def _torch() -> dict[str, Any]:
    found: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "threads between operations": torch.get_num_interop_threads(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": torch.backends.mkldnn.is_available(),
        "MKL": torch.backends.mkl.is_available(),
        "OpenMP": torch.backends.openmp.is_available(),
        "devices": _devices(),
    }
    if torch.cuda.is_available():
        kernels = {
            "flash": torch.backends.cuda.flash_sdp_enabled(),
            "memory-efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
            "cuDNN": torch.backends.cuda.cudnn_sdp_enabled(),
        }
        found["attention kernels"] = ", ".join(name for name, on in kernels.items() if on) or "none enabled"
    return found


def _devices() -> str:
    names = ["cpu"]
    names += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    if torch.xpu.is_available():
        names.append("xpu")
    return ", ".join(names)

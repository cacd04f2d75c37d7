"""What this machine has, and which backend runs which call."""

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
from headscope._attend.call import Call, Form, Options, check_call
from headscope._attend.select import BACKENDS, order
from headscope._observe import native_observer
from headscope._support.cpuinfo import processor

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
LARGEST_PLAN = 1 << 24  # rows; a mask stores its spans for each


@dataclass(frozen=True, slots=True)
class CallSpec:
    """One attention by its sizes and options, without tensors.

    Attributes:
        window: number of last keys that are visible; implies ``causal``.
        top_left: the first query attends to the first key, also where there are more keys; implies ``causal``.
        padded: keys beyond the length of each batch entry are masked.
        prefix: number of first keys that every query attends to, in addition to those of ``causal`` and ``window``.
        documents: a query attends only to keys of its own document; there are three, one after the other.
        packed: likewise, made from cumulative lengths, which fused kernels read; requires ``batch`` 1.
        interleaved: likewise, with the tokens of the three documents interleaved.
        dense: a boolean tensor [B, H, Q, K] is the mask, or part of it.
        bias: an additive bias [H, Q, K].
        lse: the call returns the row log-sum-exp.
        grad: in training; q, k, v, the bias and the sinks require gradients.
        form: of the tensors: "plain"; "traced" by a compiler or a transform; "subclass", of a subclass of Tensor.
        compiled: whether the tracer is torch.compile.
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
    top_left: bool = False
    padded: bool = False
    prefix: int | None = None
    documents: bool = False
    packed: bool = False
    interleaved: bool = False
    dense: bool = False
    bias: bool = False
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    lse: bool = False
    grad: bool = False
    form: Form = "plain"
    compiled: bool = False


TYPICAL: dict[str, CallSpec] = {
    "plain": CallSpec(),
    "causal": CallSpec(causal=True),
    "window of 128": CallSpec(window=128),
    "padded batch": CallSpec(padded=True),
    "causal, padded batch": CallSpec(causal=True, padded=True),
    "bias": CallSpec(bias=True),
    "bias, training": CallSpec(bias=True, grad=True),
    "softcap": CallSpec(softcap=50.0),
    "sinks": CallSpec(sinks=True),
    "dropout": CallSpec(dropout=0.1, grad=True),
    "grouped heads (8 over 2)": CallSpec(kv_heads=2),
    "Dv 32 with D 64": CallSpec(v_head_dim=32),
    "lse": CallSpec(lse=True),
    "decode (1 query, 512 keys)": CallSpec(queries=1, keys=512, causal=True),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which backend runs a call, and why the others refuse it.

    Attributes:
        selected: the name of the backend that runs the call.
        refusals: name of each backend that refuses -> its reasons, in the order of preference.
        observer: why the native observer refuses the call; empty if it does not. The portable one supports all calls.
    """

    selected: str
    refusals: dict[str, list[str]]
    observer: list[str]


def judge(spec: CallSpec, dtype: torch.dtype, device: str) -> Verdict:
    """Return which backend runs a call of these sizes and options, and whether the native observer supports it.

    Nothing of these sizes is allocated. A device that this machine lacks is judged as if it were present.

    Args:
        spec: sizes and options.
        dtype: of q, k and v.
        device: a device type, as "cpu" or "cuda".

    Raises:
        TypeError, ValueError: ``headscope.attention`` would refuse such a call; the message is the same.
    """
    call = describe_spec(spec, dtype, device)
    refusals = {name: BACKENDS[name].refuses(call) for name in order(call)}
    selected = next(name for name, reasons in refusals.items() if not reasons)
    refusals = {name: reasons for name, reasons in refusals.items() if reasons}
    return Verdict(selected, refusals, native_observer.refuses_call(call))


def describe_spec(spec: CallSpec, dtype: torch.dtype, device: str) -> Call:
    """Return the call that backends judge; arguments and errors as for ``judge``."""
    _check_sizes(spec)
    # the plan of a mask reads its values only on the CPU, so meta tensors stand in for every other device
    where = "cpu" if device == "cpu" else "meta"
    keys = spec.queries if spec.keys is None else spec.keys
    kv_heads = spec.heads if spec.kv_heads is None else spec.kv_heads

    def make(*sizes: int) -> Tensor:
        # one element, expanded to all sizes
        return torch.zeros((), dtype=dtype, device=where).expand(sizes).requires_grad_(spec.grad)

    q = make(spec.batch, spec.heads, spec.queries, spec.head_dim)
    k = make(spec.batch, kv_heads, keys, spec.head_dim)
    v = make(spec.batch, kv_heads, keys, spec.head_dim if spec.v_head_dim is None else spec.v_head_dim)
    bias = make(spec.heads, spec.queries, keys) if spec.bias else None
    sinks = make(spec.heads) if spec.sinks else None
    options = Options(
        mask=_mask(spec, keys, where), scale=None, softcap=spec.softcap, dropout=spec.dropout, lse=spec.lse,
        planned=device == "cpu" or spec.form != "traced",  # a tracer's plan has no values
    )  # fmt: skip
    with torch.set_grad_enabled(spec.grad):
        return replace(check_call(q, k, v, bias, sinks, options), device=device, form=spec.form, compiled=spec.compiled)


def _check_sizes(spec: CallSpec) -> None:
    rows = spec.batch * max(spec.queries, spec.keys or 0)
    masked = (
        spec.causal or spec.top_left or spec.padded or spec.window or spec.prefix or spec.documents or spec.interleaved
    )
    if masked and rows > LARGEST_PLAN:
        raise ValueError(f"B x max(Q, K): expected at most {LARGEST_PLAN} with a mask, got {rows}")
    widest = max(spec.head_dim, spec.v_head_dim or 0, spec.queries if spec.bias else 0)
    if rows * spec.heads * widest >= 2**63:
        sizes = f"B {spec.batch}, H {spec.heads}, Q {spec.queries}, K {spec.keys or spec.queries}"
        raise ValueError(f"{sizes}: expected fewer than 2**63 elements in a tensor")


def _mask(spec: CallSpec, keys: int, device: str) -> masks.Mask | None:
    parts: list[masks.Mask] = []
    if spec.window is not None:
        parts.append(masks.window(spec.window))
    elif spec.causal or spec.top_left:
        parts.append(masks.Band(None, 0, offset=0) if spec.top_left else masks.causal())
    if spec.prefix is not None:
        parts = [masks.Prefix(spec.prefix) | part for part in parts] or [masks.Prefix(spec.prefix)]
    if spec.padded:
        parts.append(masks.KeyLengths(torch.arange(spec.batch, device=device) % max(1, keys) + 1))
    if spec.packed:
        parts.append(_packed(keys, device))
    if spec.documents or spec.interleaved:
        at = torch.arange(keys, device=device)
        ids = (at % 3 if spec.interleaved else at * 3 // max(1, keys)).expand(spec.batch, keys)
        parts.append(masks.Documents(ids[:, max(0, keys - spec.queries) :], ids))
    if spec.dense:
        visible = torch.ones((), dtype=torch.bool, device=device)
        parts.append(masks.Dense(visible.expand(spec.batch, spec.heads, spec.queries, keys)))
    return reduce(operator.and_, parts) if parts else None


def _packed(keys: int, device: str) -> masks.Documents:
    """Return three documents by their cumulative lengths; those of meta tensors cannot be read."""
    offsets = torch.tensor([n * keys // 3 for n in range(4)])
    mask = masks.Documents.from_cu_seqlens(offsets)
    packing = mask.packing
    if device == "cpu" or packing is None:
        return mask
    tensors = tuple(x.to(device) for x in (mask.q_ids, mask.k_ids, packing.q, packing.k))
    return masks.packed_documents(tensors, packing.max_q, packing.max_k, same=True)


def machine() -> dict[str, dict[str, Any]]:
    """Return the versions, the machine, and what torch supports on it, by section."""
    return {"versions": _versions(), "machine": _hardware(), "torch": _torch(), "native kernels": _native()}


def _native() -> dict[str, Any]:
    if cpu.unloadable:
        return {"target": f"built, but cannot be loaded: {cpu.unloadable}"}
    if cpu.extension is None:
        return {"target": "not installed: no C++ compiler was available when headscope was built"}
    return {"target": cpu.extension.target(), "targets of this CPU": ", ".join(cpu.extension.targets())}


def _versions() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, Any] = {
        "headscope": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,  # with its build tag, which the metadata may lack
    }
    for name in ("numpy", "safetensors", "tokenizers", "rich", "click", "pillow", "matplotlib", "jinja2"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "missing"
    return versions


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
    features: dict[str, Any] = {
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
        features["attention kernels"] = ", ".join(name for name, on in kernels.items() if on) or "none enabled"
    return features


def _devices() -> str:
    names = ["cpu"]
    names += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        names.append("mps")
    if torch.xpu.is_available():
        names.append("xpu")
    return ", ".join(names)

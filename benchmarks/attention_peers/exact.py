"""Inputs, and what every peer must compute from them: float64, by numpy, in every peer's own process.

Long cases are checked on some of their rows, short ones on all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from attention_peers.cases import DOCUMENT, MODULE, SOFTCAP, TRAIN, WINDOW, Case

Array = NDArray[np.float32]
Exact = NDArray[np.float64]

LIMITS = {"fp32": 1e-3, "bf16": 4e-2}  # of ‖got - exact‖ / ‖exact‖: far above rounding, far below another function
WHOLE = 1 << 22  # pairs up to which every row is checked, and dk and dv
SAMPLE = 12  # rows of a longer case


def bits_of_bf16(x: Array) -> NDArray[np.uint16]:
    """The nearest bfloat16, ties to even, as its 16 bits."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def of_bf16(bits: NDArray[np.uint16]) -> Array:
    """float32 of bfloat16's bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def inputs(case: Case) -> dict[str, Array]:
    """The tensors of a case, contiguous, in float32 but representable in its dtype: the same in every process."""
    batch, heads, kv_heads, queries, keys, width = case.sizes
    embed = case.embed_dim
    shapes: dict[str, tuple[int, ...]] = {
        "q": (batch, heads, queries, width),
        "k": (batch, kv_heads, keys, width),
        "v": (batch, kv_heads, keys, width),
    }
    if case.kind == TRAIN:
        shapes["dout"] = (batch, heads, queries, width)
    if case.kind == MODULE:
        shapes = {"x": (batch, queries, embed), "w_in": (3 * embed, embed), "b_in": (3 * embed,)}
        shapes |= {"w_out": (embed, embed), "b_out": (embed,)}
    if case.option == "bias":
        shapes["bias"] = (heads, 1, keys)
    if case.option == "sinks":
        shapes["sinks"] = (heads,)
    random = np.random.default_rng(0)
    made = {name: random.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for name in ("w_in", "w_out"):
        if name in made:
            made[name] /= np.float32(math.sqrt(embed))
    return {name: of_bf16(bits_of_bf16(x)) for name, x in made.items()} if case.dtype == "bf16" else made


@dataclass(frozen=True, slots=True)
class Result:
    """What a peer returned, or should have, in float32 or better: [B, H, length, D]; out [B, Q, E] for the module.

    ``rows`` are the queries that out and dq are for; dk and dv are None where only some rows are checked.
    """

    out: NDArray[np.floating]
    dq: NDArray[np.floating] | None = None
    dk: NDArray[np.floating] | None = None
    dv: NDArray[np.floating] | None = None
    rows: NDArray[np.int64] | None = None


def exact(case: Case, arrays: dict[str, Array]) -> Result:
    """The case in float64."""
    if case.kind == MODULE:
        return Result(_module(case, {name: x.astype(np.float64) for name, x in arrays.items()}))
    batch, heads, kv_heads, queries, _, width = case.sizes
    group = heads // kv_heads
    whole = case.pairs <= WHOLE
    rows = np.arange(queries) if whole or queries <= SAMPLE else np.linspace(0, queries - 1, SAMPLE).astype(np.int64)
    out = np.empty((batch, heads, len(rows), width))
    dq, dk, dv = np.empty_like(out), np.zeros(arrays["k"].shape), np.zeros(arrays["v"].shape)
    hidden = ~visible(case, rows)
    for b in range(batch):
        for h in range(heads):
            q = arrays["q"][b, h, rows].astype(np.float64)
            k, v = (arrays[name][b, h // group].astype(np.float64) for name in "kv")
            p = _weights(case, arrays, h, q, k, hidden)
            out[b, h] = p @ v
            if case.kind == TRAIN:
                dout = arrays["dout"][b, h, rows].astype(np.float64)
                ds = p * (dout @ v.T - (dout * out[b, h]).sum(-1, keepdims=True)) / math.sqrt(width)
                dq[b, h] = ds @ k
                dk[b, h // group] += ds.T @ q
                dv[b, h // group] += p.T @ dout
    if case.kind != TRAIN:
        return Result(out, rows=rows)
    return Result(out, dq, dk, dv, rows) if whole else Result(out, dq, rows=rows)


def visible(case: Case, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[rows, K]: which keys these queries may see."""
    _, _, _, queries, keys, _ = case.sizes
    i, j = rows[:, None] + keys - queries, np.arange(keys)[None]
    if case.option == "documents":
        return i // DOCUMENT == j // DOCUMENT
    if case.option == "window":
        return (j <= i) & (j > i - WINDOW)
    return j <= i if case.causal else np.ones((len(rows), keys), bool)


def _weights(case: Case, arrays: dict[str, Array], head: int, q: Exact, k: Exact, hidden: NDArray[np.bool_]) -> Exact:
    s = q @ k.T / math.sqrt(q.shape[-1])
    if case.option == "softcap":
        s = SOFTCAP * np.tanh(s / SOFTCAP)
    if case.option == "bias":
        s = s + arrays["bias"][head].astype(np.float64)
    s = np.where(hidden, -np.inf, s)
    most = s.max(-1, keepdims=True)
    weights = np.exp(s - most)
    total = weights.sum(-1, keepdims=True)
    if case.option == "sinks":
        total = total + np.exp(float(arrays["sinks"][head]) - most)
    return weights / total


def _module(case: Case, arrays: dict[str, Exact]) -> Exact:
    batch, heads, _, queries, _, width = case.sizes
    projected = arrays["x"] @ arrays["w_in"].T + arrays["b_in"]
    q, k, v = projected.reshape(batch, queries, 3, heads, width).transpose(2, 0, 3, 1, 4)  # each [B, H, Q, D]
    s = q @ k.swapaxes(-1, -2) / math.sqrt(width)
    p = np.exp(s - s.max(-1, keepdims=True))
    out = (p / p.sum(-1, keepdims=True)) @ v
    merged = out.transpose(0, 2, 1, 3).reshape(batch, queries, heads * width)  # [B, Q, E]
    return merged @ arrays["w_out"].T + arrays["b_out"]


def error(got: Result, wanted: Result) -> float:
    """The largest relative error, ‖got - expected‖ / ‖expected‖, of the tensors that are known; NaN counts as infinity.

    Raises:
        ValueError: a shape is not the expected one, or a gradient is missing.
    """
    worst = 0.0
    for name in ("out", "dq", "dk", "dv"):
        right = getattr(wanted, name)
        if right is None:
            continue
        mine = getattr(got, name)
        if mine is None:
            raise ValueError(f"{name}: missing")
        if name in ("out", "dq") and wanted.rows is not None:
            mine = mine[:, :, wanted.rows]
        if mine.shape != right.shape:
            raise ValueError(f"{name}: got shape {list(mine.shape)}, expected {list(right.shape)}")
        found = float(np.linalg.norm(mine.astype(np.float64) - right) / np.linalg.norm(right))
        worst = max(worst, found if math.isfinite(found) else math.inf)
    return worst

"""Stage 4 of a trace: from the queries, keys and values of each head to its output."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headscope import functional
from headscope._attend.interface import accumulate_dtype
from headscope._attend.prepare import prepare
from headscope.masks import Band, Mask, Prefix
from headscope.module import MultiHeadAttention
from headscope.tracing._explanations import memory, quantity
from headscope.tracing._invariants import (
    MATRIX,
    Check,
    Sample,
    VisiblePairs,
    close,
    count_visible_pairs,
    equal,
    rounding,
    sample,
    select,
    to_float64,
)
from headscope.tracing._row import RowWriter
from headscope.tracing._setup import Setting, is_causal

LARGE = 1 << 30  # bytes of weights; from here on the trace notes that fused kernels do not store them
PLANNED = 32  # queries of a sample whose mask plan is compared with its definition
TRUE = "True = attend"
HALF = (torch.bfloat16, torch.float16)


class Heads(NamedTuple):
    """Queries [B, H, Q, D], keys [B, Hkv, K, D] and values [B, Hkv, K, Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor


@dataclass
class Matrix:
    """The checked rows of the Q x K matrix, with their operands; ``s`` changes from step to step."""

    at: Sample
    q: Tensor  # [b, h, i, D], in the dtype of the scores
    k: Tensor  # [b, h, K, D]
    v: Tensor  # [b, h, K, Dv]
    s: Tensor  # [b, h, i, K]
    allowed: Tensor  # [b, h, i, K]: the pairs that the mask leaves visible
    bias: Tensor | None  # broadcasts to [b, h, i, K]
    rows: int  # number of rows of all batch entries and heads, checked or not

    @property
    def scope(self) -> str:
        """The number of checked rows, as text; empty where all are checked."""
        return self.scope_of(len(self.at.i))

    def scope_of(self, queries: int) -> str:
        """Return that text where only the first ``queries`` of the sample were checked."""
        checked = len(self.at.b) * len(self.at.h) * queries
        return "" if self.at.whole else f" (on {checked:,} of {quantity(self.rows)} rows)"

    @property
    def visible(self) -> Tensor:
        """The pairs that mask and bias leave visible, [b, h, i, K]."""
        return self.allowed if self.bias is None else self.allowed & (self.bias != -torch.inf)


class Attention:
    """The writer of the rows of stage 4."""

    def __init__(self, writer: RowWriter, heads: Heads) -> None:
        self.writer = writer
        self.setting = writer.setting
        self.module = writer.setting.module
        self.heads = heads
        self.dtype = accumulate_dtype(heads.q.dtype)
        self.matrix = _matrix(self.setting, heads, self.dtype) if self.setting.values else None
        self.counted = None if self.setting.mask is None else count_visible_pairs(self.setting.mask, self.setting.sizes)

    def add(
        self, step: str, value: Tensor | None, equation: str, code: list[str], check: Check, note: str | None = None
    ) -> None:
        """Add a row whose result is a [B, H, Q, K] matrix."""
        axes = zip("BHQK", self.setting.sizes, strict=True)
        self.writer.add(4, step, value, axes, self.dtype, equation=equation, code=code, check=check, note=note)

    def run(self) -> Tensor:
        """Add every step from sharing to the weighted average; return the output of each head, [B, H, Q, Dv]."""
        if self.module.kv_heads < self.module.num_heads:
            self.share("keys", self.heads.k, "D")
            self.share("values", self.heads.v, self.setting.value_letter)
        self.scores()
        if self.module.softcap is not None:
            self.softcap(self.module.softcap)
        if self.setting.bias is not None:
            self.bias(self.setting.bias)
        if self.setting.mask is not None:
            self.mask(self.setting.mask)
        return self.outputs(self.weights())

    def share(self, step: str, own: Tensor, letter: str) -> None:
        """Repeat each key/value head for every query head of its group."""
        group = self.module.num_heads // self.module.kv_heads
        name = step[0]
        batch, _, length, width = own.shape
        claim = f"head h has key/value head ⌊h / {group}⌋"
        value, check = None, Check(claim)
        if self.setting.values:
            part = own[:, :, : max(1, MATRIX // max(1, batch * self.module.num_heads * width))]
            value = part.repeat_interleave(group, dim=1)  # [B, H, K, D]
            check = equal(claim, value, torch.stack([part[:, h // group] for h in range(self.module.num_heads)], 1))
        self.writer.add(
            4,
            f"share {step}",
            value,
            (("B", batch), ("H", self.module.num_heads), ("K", length), (letter, width)),
            own.dtype,
            equation=f"{name}[h] ← {name}[⌊h / {group}⌋]",
            code=[f"{name} = {name}.repeat_interleave(H // Hkv, dim={1 if self.setting.batched else 0})"],
            check=check,
            note="copied here for the equations; fused kernels read the shared heads in place",
        )

    def scores(self) -> None:
        """Add q kᵀ · scale."""
        matrix, scale = self.matrix, self.module.scale
        factor = "/ √D" if _is_close(scale, self.module.head_dim**-0.5) else f"· {scale:.4g}"
        factor = "/ √E" if _is_scaled_by_width(self.module) else factor
        claim = "equals scale · q kᵀ in float64"
        check = Check(claim)
        if matrix is not None:
            q, k = to_float64(matrix.q), to_float64(matrix.k).transpose(-2, -1)
            size = abs(scale) * (q.abs() @ k.abs()) * rounding(self.dtype, q.shape[-1])
            check = close(claim, matrix.s, scale * (q @ k), size, matrix.scope)
        half = self.heads.q.dtype in HALF
        code = ["q, k, v = q.float(), k.float(), v.float()"] if half else []
        code.append("s = q @ k.transpose(-2, -1) * module.scale")
        value = None if matrix is None else matrix.s
        self.add("scores", value, f"s[i, j] = q[i] · k[j] {factor}", code, check, _note_scale(self.setting))

    def softcap(self, cap: float) -> None:
        """Add c · tanh(s / c)."""
        matrix = self.matrix
        claim = f"no score is beyond ±{cap:g}, and each equals c · tanh(s / c) in float64"
        check = Check(claim)
        if matrix is not None:
            before = to_float64(matrix.s)
            allowed = before.abs().clamp(max=cap) * rounding(self.dtype, 1)
            matrix.s = cap * torch.tanh(matrix.s / cap)
            check = close(claim, matrix.s, cap * torch.tanh(before / cap), allowed, matrix.scope)
            beyond = int((to_float64(matrix.s).abs() > cap * (1 + torch.finfo(self.dtype).eps)).sum())
            if beyond:
                check = Check(claim, f"{beyond:,} scores are beyond ±{cap:g}{matrix.scope}", False)
        code = ["c = module.softcap", "s = c * torch.tanh(s / c)"]
        value = None if matrix is None else matrix.s
        self.add("softcap", value, f"s[i, j] ← c · tanh(s[i, j] / c), c = {cap:g}", code, check)

    def bias(self, bias: Tensor) -> None:
        """Add s + bias."""
        matrix, note = self.matrix, None
        claim = "every score changes by its bias"
        check = Check(claim)
        if matrix is not None and matrix.bias is not None:
            b, h, i = (index.to(bias.device) for index in matrix.at[:3])
            full = bias.expand(*self.setting.sizes)  # [B, H, Q, K]
            before, added = to_float64(matrix.s), to_float64(full[b[:, None, None], h[:, None], i])
            matrix.s = (matrix.s + matrix.bias.to(self.dtype)).masked_fill(matrix.bias == -torch.inf, -torch.inf)
            expected = (before + added).masked_fill(added == -torch.inf, -torch.inf)
            check = close(
                claim, matrix.s, expected, (before.abs() + added.abs()) * rounding(self.dtype, 1), matrix.scope
            )
            hidden = int((bias == -torch.inf).sum())
            note = f"{hidden:,} of its {bias.numel():,} numbers are −∞, which masks those pairs" if hidden else None
        value = None if matrix is None else matrix.s
        self.add("bias", value, "s[i, j] ← s[i, j] + bias[i, j]", ["s = s + bias"], check, note)

    def mask(self, mask: Mask) -> None:
        """Set the scores of masked pairs to -inf."""
        matrix, causal = self.matrix, is_causal(mask)
        claim = f"−∞ {'on the future' if causal else 'where masked'}, every other score unchanged"
        check = Check(claim)
        if matrix is not None:
            before = matrix.s
            matrix.s = before.masked_fill(~matrix.allowed, -torch.inf)
            hidden = _future(self.setting, matrix) if causal else _hidden_by_plan(mask, self.setting, matrix)
            queries = hidden.shape[-2]
            expected = torch.where(hidden, -torch.inf, before[:, :, :queries])
            check = equal(claim, matrix.s[:, :, :queries], expected)
            check = check._replace(outcome=f"{check.outcome}{matrix.scope_of(queries)}")
        code = [*self.setting.mask_code, "s = s.masked_fill(~visible, -torch.inf)"]
        _, _, queries, keys = self.setting.sizes
        where = "pair (i, j) is masked" if not causal else "j > i" if queries == keys else "j > i + K − Q"
        value, note = None if matrix is None else matrix.s, _note_mask(mask, self.counted, self.setting)
        self.add("mask", value, f"s[i, j] ← −∞ where {where}", code, check, note)

    def weights(self) -> Tensor | None:
        """Take the softmax over the keys; rows without a visible key become 0."""
        matrix, sinks = self.matrix, self.module.sinks
        equation = "p = exp s / Σⱼ exp s"
        code, p = ["p = torch.softmax(s, dim=-1)"], None
        empty_rows = self.counted is not None and self.counted.empty_rows > 0
        if sinks is not None:
            equation = "p = exp s / (exp sink[h] + Σⱼ exp s)"
            sizes = f"{self.setting.size_code(self.setting.sizes[0])}H, Q, 1"
            code = [
                f"sink = module.sinks.view(H, 1, 1).expand({sizes})",
                "p = torch.softmax(torch.cat([s, sink], -1), -1)[..., :-1]",
            ]
        if matrix is not None:
            terms = matrix.s
            if sinks is not None:
                sink = select(sinks.to(terms.dtype), matrix.at.h)[:, None, None].expand(*terms.shape[:-1], 1)
                terms = torch.cat([terms, sink], -1)
            p = torch.softmax(terms, dim=-1)[..., : matrix.s.shape[-1]]  # [b, h, i, K]
            empty = (terms == -torch.inf).all(-1, keepdim=True)
            p = p.masked_fill(empty, 0)
            empty_rows = empty_rows or bool(empty.any())
        if empty_rows and sinks is None:
            code.append("p = p.masked_fill((s == -torch.inf).all(-1, keepdim=True), 0)")
        check = _check_weights(self.setting, matrix, p, sinks)
        self.add("weights", p, equation, code, check, _note_weights(self.setting, self.dtype))
        return p

    def outputs(self, p: Tensor | None) -> Tensor:
        """Add the weighted average of the values, computed by the module's own backend."""
        s, m, (q, k, v) = self.setting, self.module, self.heads
        batch, heads, queries, _ = s.sizes
        claim = "the output of the module's own kernel equals p v in float64"
        check, note = Check(claim), None
        if self.matrix is None or p is None:
            own = q.new_empty(batch, heads, queries, m.v_head_dim)
        else:
            own = functional.attention(
                q, k, v, mask=s.mask, bias=s.bias, scale=m.scale, softcap=m.softcap, sinks=m.sinks
            )
            prepared = prepare(q, k, v, s.mask, s.bias, m.sinks, m.scale, m.softcap, 0.0, False, None)
            backend = prepared.backend.name
            note = f"computed by the {backend} backend"
            check = _check_outputs(claim, self.matrix, p, own, m.scale)
        code = ["o = (p @ v).to(x.dtype)" if q.dtype in HALF else "o = p @ v"]
        axes = (("B", batch), ("H", heads), ("Q", queries), (s.value_letter, m.v_head_dim))
        equation = "o[i] = Σⱼ p[i, j] v[j]"
        self.writer.add(4, "head outputs", own, axes, own.dtype, equation=equation, code=code, check=check, note=note)
        return own


def _is_close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=1e-6)


def _is_scaled_by_width(module: MultiHeadAttention) -> bool:
    """Return whether the scores are divided by √E although the heads are narrower than E."""
    by_width = _is_close(module.scale, module.embed_dim**-0.5)
    return module.embed_dim != module.head_dim and module.num_heads > 1 and by_width


def _matrix(s: Setting, heads: Heads, dtype: torch.dtype) -> Matrix:
    batch, number, queries, keys = s.sizes
    m = s.module
    at = sample(batch, number, queries, keys, m.head_dim + m.v_head_dim)
    shared = at.h // (number // m.kv_heads)
    q = select(heads.q, at.b, at.h, at.i).to(dtype)
    k, v = select(heads.k, at.b, shared).to(dtype), select(heads.v, at.b, shared).to(dtype)
    shape = (len(at.b), len(at.h), len(at.i), keys)
    allowed = torch.ones((), dtype=torch.bool, device=q.device)
    if s.mask is not None:
        b, h, i = (index.to(q.device) for index in at[:3])
        allowed = s.mask.at(queries, keys).allows(
            b[:, None, None, None], h[:, None, None], i[:, None], torch.arange(keys, device=q.device)
        )
    bias = None
    if s.bias is not None:
        bias = s.bias[(None,) * (4 - s.bias.ndim)]  # [B, H, Q, K], or 1 where it repeats
        bias = select(bias, at.b, at.h, at.i)
    with torch.autocast(q.device.type, enabled=False):  # scores are computed in float32 or better
        scores = q @ k.transpose(-2, -1) * m.scale  # [b, h, i, K]
    return Matrix(at, q, k, v, scores.expand(shape), allowed.to(q.device).expand(shape), bias, batch * number * queries)


def _future(s: Setting, matrix: Matrix) -> Tensor:
    """Return where a key comes after its query, computed from the positions only, [i, K]."""
    _, _, queries, keys = s.sizes
    position = matrix.at.i.to(matrix.s.device) + keys - queries
    return torch.arange(keys, device=matrix.s.device) > position[:, None]


def _hidden_by_plan(mask: Mask, s: Setting, matrix: Matrix) -> Tensor:
    """Return the pairs that the mask's plan masks, for the first ``PLANNED`` queries of the sample, [b, h, i, K]."""
    batch, heads, queries, keys = s.sizes
    plan = mask.plan(*s.sizes)
    b, h = (index.to(matrix.s.device) for index in matrix.at[:2])
    runs = [slice(0, queries)] if matrix.at.whole else [slice(i, i + 1) for i in matrix.at.i[:PLANNED].tolist()]
    tiles: list[Tensor] = []
    for run in runs:
        tile = plan.tile(slice(0, batch), slice(0, heads), run, slice(0, keys)).to(matrix.s.device)
        tiles.append(~tile.expand(batch, heads, run.stop - run.start, keys)[b[:, None], h])  # [b, h, i, K]
    return torch.cat(tiles, 2)


def _check_weights(s: Setting, matrix: Matrix | None, p: Tensor | None, sinks: Tensor | None) -> Check:
    """Check that rows sum to 1 (with their sink), weights lie in [0, 1], and masked pairs have none."""
    causal = s.mask is not None and is_causal(s.mask)
    empty = matrix is not None and not bool(matrix.visible.any(-1).all())
    row = "each row with a visible key" if empty else "each row"
    total = f"{row} sums to 1" if sinks is None else f"{row} sums to 1 minus its sink's share"
    hides = s.mask is not None or s.bias is not None
    hidden = "; no weight on the future" if causal else "; no weight on masked pairs" if hides else ""
    claim = f"{total}; weights lie in [0, 1]{hidden}"
    if matrix is None or p is None:
        return Check(claim)
    weights, visible = to_float64(p), matrix.visible.cpu()
    expected = visible.any(-1).to(torch.float64)
    if sinks is not None:
        sink = select(to_float64(sinks), matrix.at.h)[:, None].expand(expected.shape)[..., None]  # [b, h, i, 1]
        expected = 1 - torch.softmax(torch.cat([to_float64(matrix.s), sink], -1), -1)[..., -1]
    allowed = torch.full_like(expected, rounding(p.dtype, p.shape[-1]))
    sums = close(claim, weights.sum(-1).to(p.dtype), expected, allowed, matrix.scope)
    outside = int(((weights < 0) | (weights > 1 + rounding(p.dtype, 1))).sum())
    if causal:
        visible = visible & ~_future(s, matrix).cpu()
    leaked = int((~visible & (weights != 0)).sum())
    bad = int(weights.isnan().any(-1).sum())
    if bad:
        return Check(claim, f"{bad:,} rows contain NaN, because they attend to NaN or infinity{matrix.scope}", False)
    if outside or leaked:
        outcome = f"{outside:,} weights lie outside [0, 1], {leaked:,} masked pairs have weight{matrix.scope}"
        return Check(claim, outcome, False)
    return sums


def _check_outputs(claim: str, matrix: Matrix, p: Tensor, own: Tensor, scale: float) -> Check:
    """Check that a kernel's output is p v; the rounding of p in another order of summation is allowed too."""
    weights, v = to_float64(p), to_float64(matrix.v)
    got = select(own, matrix.at.b, matrix.at.h, matrix.at.i)
    spoilt = ~torch.isfinite(v)
    clean = v.masked_fill(spoilt, 0)
    expected = weights @ clean  # [b, h, i, Dv]
    if spoilt.any():  # NaN reaches the rows that attend to it, and only those
        reached = matrix.visible.cpu().to(torch.float64) @ spoilt.to(torch.float64) > 0
        expected = expected.masked_fill(reached, torch.nan)
        got = got.masked_fill(reached.to(got.device) & ~torch.isfinite(got), torch.nan)
    longest = to_float64(matrix.k).norm(dim=-1).nan_to_num(0, 0).max() if matrix.k.numel() else 0
    reach = abs(scale) * to_float64(matrix.q).norm(dim=-1, keepdim=True) * longest  # [b, h, i, 1]: no product is larger
    if matrix.bias is not None and matrix.bias.numel():
        reach = reach + to_float64(matrix.bias).nan_to_num(0, 0, 0).abs().max()
    in_scores = reach * rounding(p.dtype, matrix.q.shape[-1])  # [b, h, i, 1]: rounding error of a score
    allowed = (weights @ clean.abs()) * (rounding(own.dtype, p.shape[-1]) + 2 * in_scores)
    return close(claim, got, expected, allowed, matrix.scope)


def _note_scale(s: Setting) -> str | None:
    m = s.module
    usual = m.head_dim**-0.5
    if _is_close(m.scale, usual):
        return None
    if _is_scaled_by_width(m):
        return (
            f"unusual: divided by √E = {m.embed_dim**0.5:.4g} (√embed_dim) instead of √D = {m.head_dim**0.5:.4g} "
            f"(√head_dim); scores are {(m.embed_dim / m.head_dim) ** 0.5:.3g} times smaller, and weights flatter"
        )
    return f"this module scales by {m.scale:.4g}; the usual scale is 1 / √D = {usual:.4g}"


def describe_mask(mask: Mask) -> str:
    """Return a mask in a few words: "causal", "window(5)", "Prefix(n=3)", "causal and KeyLengths, combined"."""
    if is_causal(mask):
        return "causal"
    if isinstance(mask, Band) and mask.right == 0 and mask.left is not None and mask.offset is None:
        return f"window({mask.left + 1})"
    parts = list(mask.leaves())
    if len(parts) == 1:
        return repr(mask) if mask.is_constant() else type(mask).__name__
    return f"{' and '.join(dict.fromkeys(describe_mask(part) for part in parts))}, combined"


def _note_mask(mask: Mask, counted: VisiblePairs | None, s: Setting) -> str:
    batch, heads, queries, keys = s.sizes
    if counted is None:
        return f"{describe_mask(mask)}, {TRUE}: visible pairs were not counted"
    pairs, total, each = counted.pairs, batch * heads * queries * keys, ""
    if batch * heads and all(_is_shared_by_all(leaf) for leaf in mask.leaves()):
        pairs, total, each = pairs // (batch * heads), queries * keys, " in each head"
    share = 100 * pairs / max(1, total)
    text = f"{describe_mask(mask)}, {TRUE}: {quantity(pairs)} of {quantity(total)} pairs{each} ({share:.3g}%)"
    if counted.empty_rows:
        rows = f"{quantity(counted.empty_rows)} of {quantity(batch * heads * queries)} rows"
        text += f"; {rows} have no visible key and give 0"
    return text


def _is_shared_by_all(leaf: Mask) -> bool:
    """Return whether a mask is the same for every batch entry and head."""
    return isinstance(leaf, Prefix) or (
        isinstance(leaf, Band) and (leaf.offset is None or isinstance(leaf.offset, int))
    )


def _note_weights(s: Setting, dtype: torch.dtype) -> str | None:
    notes: list[str] = []
    elements = math.prod(s.sizes)
    if elements * dtype.itemsize >= LARGE:
        notes.append(
            f"stored whole, these {quantity(elements)} numbers would take {memory(elements * dtype.itemsize)}; fused "
            "kernels compute them block by block and store none, so memory grows with Q + K instead of Q · K"
        )
    if s.module.dropout:
        chance = f"{s.module.dropout:g}"
        notes.append(f"in training, dropout would set each to 0 with probability {chance}; a trace omits it")
    return "; ".join(notes) or None

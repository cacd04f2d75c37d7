"""Stage 4 of a trace: from the queries, keys and values of each head to its output."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope._attend.interface import accumulate_dtype
from headscope.masks import Mask
from headscope.module import MultiHeadAttention
from headscope.positions import ALiBi, RelativeBias
from headscope.tracing._attention_checks import check_outputs, check_weights
from headscope.tracing._attention_notes import is_close, is_scaled_by_width, note_mask, note_scale, note_weights
from headscope.tracing._invariants import (
    MATRIX,
    Check,
    close,
    count_visible_pairs,
    equal,
    rounding,
    select,
    to_float64,
)
from headscope.tracing._matrix import future_keys, hidden_by_plan, sample_matrix
from headscope.tracing._own_values import OwnValues, attend
from headscope.tracing._row import RowWriter
from headscope.tracing._setup import is_causal

HALF = (torch.bfloat16, torch.float16)


class Attention:
    """The writer of the rows of stage 4."""

    def __init__(self, writer: RowWriter, own: OwnValues) -> None:
        self.writer = writer
        self.setting = writer.setting
        self.module = writer.setting.module
        self.own = own
        self.heads = own.placed
        self.dtype = accumulate_dtype(self.heads.q.dtype)
        self.half = self.heads.q.dtype in HALF
        self.matrix = sample_matrix(self.setting, own, self.dtype) if self.setting.values else None
        self.keyed = False  # whether the scores have the key of bias_kv
        self.counted = None if self.setting.mask is None else count_visible_pairs(self.setting.mask, self.setting.sizes)

    def add(
        self, step: str, value: Tensor | None, equation: str, code: list[str], check: Check, note: str | None = None
    ) -> None:
        """Add a row whose result is a matrix, [B, H, Q, K] or [B, H, Q, K+1]."""
        axes = dict(zip("BHQK", self.setting.sizes, strict=True))
        if self.keyed:
            axes["K+1"] = axes.pop("K") + 1
        self.writer.add(4, step, value, axes.items(), self.dtype, equation=equation, code=code, check=check, note=note)

    def run(self) -> Tensor:
        """Add every step from sharing to the weighted average; return the output of each head, [B, H, Q, Dv]."""
        if self.module.kv_heads < self.module.num_heads:
            self.share("keys", self.heads.k, "D")
            self.share("values", self.heads.v, self.setting.value_letter)
        self.scores()
        if self.module.softcap is not None:
            self.softcap(self.module.softcap)
        if self.module.position_bias is not None:
            self.position_bias(self.module.position_bias)
        if self.setting.bias is not None:
            self.bias(self.setting.bias)
        if self.setting.mask is not None:
            self.mask(self.setting.mask)
        if self.module.bias_k is not None:
            self.bias_key(self.module.bias_k)
        p = self.weights()
        if self.module.bias_v is not None:
            self.bias_value(self.module.bias_v)
        return self.outputs(p)

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
        claim = "equals scale · q kᵀ in float64"
        check = Check(claim)
        if matrix is not None:
            q, k = to_float64(matrix.q), to_float64(matrix.k).transpose(-2, -1)
            size = abs(scale) * (q.abs() @ k.abs()) * rounding(self.dtype, q.shape[-1])
            check = close(claim, matrix.s, scale * (q @ k), size, matrix.scope)
        code = ["q, k, v = q.float(), k.float(), v.float()"] if self.half else []
        code.append("s = q @ k.transpose(-2, -1) * module.scale")
        value = None if matrix is None else matrix.s
        self.add(
            "scores", value, f"s[i, j] = q[i] · k[j] {_factor(self.module)}", code, check, note_scale(self.setting)
        )

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

    def position_bias(self, bias: ALiBi | RelativeBias) -> None:
        """Add s + bias by distance, as the module computes it."""
        matrix, alibi = self.matrix, isinstance(bias, ALiBi)
        claim = (
            f"every score {'falls by slope · distance' if alibi else 'changes by the bias of its bucket'} in float64"
        )
        check = Check(claim)
        if matrix is not None and matrix.distance is not None:
            before, added = to_float64(matrix.s), _distance_bias(bias, self.setting.places(), *matrix.at[:3])
            matrix.s = matrix.s + matrix.distance.to(self.dtype)
            matrix.reach += float(added.abs().max()) if added.numel() else 0
            allowed = (before.abs() + added.abs()) * rounding(self.dtype, 1)
            check = close(claim, matrix.s, before + added, allowed, matrix.scope)
        batched = self.setting.positions is not None and self.setting.positions.ndim == 2
        if isinstance(bias, ALiBi):
            equation = "s[i, j] ← s[i, j] − m[h] · |i − j|"
            where = "" if self.setting.x.device.type in ("cpu", "meta") else ", device=s.device"
            code = [
                "m = module.position_bias.slopes",
                f"m = torch.tensor(m, dtype=s.dtype{where})[:, None, None]",
                "distance = (place[..., None, :] - place[..., None]).abs()",
                f"s = s - m * distance{'[:, None]' if batched else ''}",
            ]
            note = f"ALiBi: slopes m from {max(bias.slopes):.3g} to {min(bias.slopes):.3g}"
        else:
            equation = "s[i, j] ← s[i, j] + b[bucket(j − i), h]"
            code = [
                "distance = place[..., None, :] - place[..., None]",
                "bucket = module.position_bias.buckets.of(distance)",
                "s = s + module.position_bias.weight[bucket].movedim(-1, -3)",
            ]
            buckets = bias.buckets
            note = f"{buckets.num_buckets} buckets; distances from {buckets.max_distance} on share one"
        note += "" if self.setting.positions is None else "; i and j are the given positions"
        self.add("position bias", None if matrix is None else matrix.s, equation, code, check, note)

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
            matrix.reach += float(added.nan_to_num(0, 0, 0).abs().max()) if added.numel() else 0
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
            hidden = future_keys(self.setting, matrix) if causal else hidden_by_plan(mask, self.setting, matrix)
            queries = hidden.shape[-2]
            expected = torch.where(hidden, -torch.inf, before[:, :, :queries])
            check = equal(claim, matrix.s[:, :, :queries], expected)
            check = check._replace(outcome=f"{check.outcome}{matrix.scope_of(queries)}")
        code = [*self.setting.mask_code, "s = s.masked_fill(~visible, -torch.inf)"]
        _, _, queries, keys = self.setting.sizes
        where = "pair (i, j) is masked" if not causal else "j > i" if queries == keys else "j > i + K − Q"
        value, note = None if matrix is None else matrix.s, note_mask(mask, self.counted, self.setting)
        self.add("mask", value, f"s[i, j] ← −∞ where {where}", code, check, note)

    def bias_key(self, bias_k: Tensor) -> None:
        """Add one more score for each row: that of the key of its head, which no mask hides."""
        matrix, m = self.matrix, self.module
        group = m.num_heads // m.kv_heads
        claim = "the last score equals scale · q bias_kᵀ in float64, every other score is unchanged"
        claim = claim if m.softcap is None else claim.replace("scale · q bias_kᵀ", "the capped scale · q bias_kᵀ")
        check = Check(claim)
        if matrix is not None:
            before, q = matrix.s, to_float64(matrix.q_own)
            k = select(bias_k.repeat_interleave(group, 0).to(self.dtype), matrix.at.h)[:, None]  # [h, 1, D]
            with torch.autocast(k.device.type, enabled=False):
                own = matrix.q_own @ k.transpose(-2, -1) * m.scale  # [b, h, i, 1]
            own = own if m.softcap is None else m.softcap * torch.tanh(own / m.softcap)
            matrix.s = torch.cat([before, own.expand(*before.shape[:-1], 1)], -1)  # [b, h, i, K+1]
            right = torch.stack([to_float64(bias_k)[h // group] for h in matrix.at.h.tolist()])[..., None]  # [h, D, 1]
            allowed = abs(m.scale) * (q.abs() @ right.abs()) * rounding(self.dtype, m.head_dim)
            expected = m.scale * (q @ right)
            expected = expected if m.softcap is None else m.softcap * torch.tanh(expected / m.softcap)
            check = close(claim, matrix.s[..., -1:], expected.expand(*before.shape[:-1], 1), allowed, matrix.scope)
            others = equal(claim, matrix.s[..., :-1], before)
            check = check if others.held else others
            always = torch.ones_like(matrix.s[..., -1:], dtype=torch.bool)
            matrix.allowed, matrix.bias = torch.cat([matrix.visible, always], -1), None
            matrix.k = torch.cat([matrix.k, k.expand(len(matrix.k), -1, -1, -1)], -2)
        self.keyed = True
        self.add(
            "bias key",
            None if matrix is None else matrix.s,
            _bias_key_equation(m),
            _bias_key_code(m, half=self.half),
            check,
            "visible to every query, whatever the mask; it belongs to no token and has no position",
        )

    def bias_value(self, bias_v: Tensor) -> None:
        """Add one more value for each head, which belongs to its key of ``bias_kv``."""
        matrix, m = self.matrix, self.module
        group, own = m.num_heads // m.kv_heads, self.heads.v
        claim = f"the last value is bias_v, that of key/value head ⌊h / {group}⌋"
        claim = claim if group > 1 else "the last value is bias_v of its head"
        value, check = None, Check(claim)
        if matrix is not None:
            last = bias_v.repeat_interleave(group, 0)[:, None].to(self.dtype)  # [H, 1, Dv]
            chosen = select(last, matrix.at.h).expand(len(matrix.v), -1, -1, -1)  # [b, h, 1, Dv]
            matrix.v = torch.cat([matrix.v, chosen], -2)  # [b, h, K+1, Dv]
            right = torch.stack([bias_v[h // group] for h in matrix.at.h.tolist()]).to(self.dtype)
            check = equal(claim, matrix.v[..., -1, :], right.expand_as(matrix.v[..., -1, :]))
            value = matrix.v
        axes = (
            ("B", own.shape[0]),
            ("H", m.num_heads),
            ("K+1", own.shape[-2] + 1),
            (self.setting.value_letter, m.v_head_dim),
        )
        shared = ".repeat_interleave(H // Hkv, dim=0)" if group > 1 else ""
        dtype = ".float()" if self.half else ""
        code = [
            f"own = module.bias_v{shared}{dtype}",
            "own = own[:, None].expand(*v.shape[:-2], 1, -1)",
            "v = torch.cat([v, own], dim=-2)",
        ]
        self.writer.add(4, "bias value", value, axes, self.dtype, equation="v[K] = bias_v[h]", code=code, check=check)

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
        if empty_rows and sinks is None and not self.keyed:
            code.append("p = p.masked_fill((s == -torch.inf).all(-1, keepdim=True), 0)")
        check = check_weights(self.setting, matrix, p, sinks)
        self.add("weights", p, equation, code, check, note_weights(self.setting, self.dtype))
        return p

    def outputs(self, p: Tensor | None) -> Tensor:
        """Add the weighted average of the values, computed by the module's own backend."""
        s, m, q = self.setting, self.module, self.heads.q
        batch, heads, queries, _ = s.sizes
        claim = "the output of the module's own kernel equals p v in float64"
        check, note = Check(claim), None
        if self.matrix is None or p is None:
            out = q.new_empty(batch, heads, queries, m.v_head_dim)
        else:
            out, backend = attend(m, self.own.placement)
            note = f"computed by the {backend} backend"
            check = check_outputs(claim, self.matrix, p, out, m.scale, own_key=self.keyed)
        code = ["o = (p @ v).to(x.dtype)" if self.half else "o = p @ v"]
        axes = (("B", batch), ("H", heads), ("Q", queries), (s.value_letter, m.v_head_dim))
        equation = "o[i] = Σⱼ p[i, j] v[j]"
        self.writer.add(4, "head outputs", out, axes, out.dtype, equation=equation, code=code, check=check, note=note)
        return out


def _factor(module: MultiHeadAttention) -> str:
    """Return the scale as it is written in an equation."""
    if is_scaled_by_width(module):
        return "/ √E"
    return "/ √D" if is_close(module.scale, module.head_dim**-0.5) else f"· {module.scale:.4g}"


def _distance_bias(bias: ALiBi | RelativeBias, places: Tensor, b: Tensor, h: Tensor, i: Tensor) -> Tensor:
    """Return the bias by distance of some rows in float64, [b or 1, h, i, K], from its definition."""
    places = places.cpu().expand(1, -1) if places.ndim == 1 else select(places.cpu(), b)  # [b or 1, Q]
    distance = places[:, None] - places[:, i][..., None]  # [b or 1, i, K]
    if isinstance(bias, ALiBi):
        slopes = torch.tensor([bias.slopes[int(head)] for head in h], dtype=torch.float64, device="cpu")
        return -slopes[:, None, None] * distance.abs()[:, None]
    table = to_float64(bias.weight)[:, h]  # [buckets, h]
    buckets = bias.buckets.of(distance.to(bias.weight.device)).cpu()  # a logarithm rounds by device at their edges
    return table[buckets].movedim(-1, 1)


def _bias_key_equation(module: MultiHeadAttention) -> str:
    """Return the equation of the score of that key."""
    return f"s[i, K] = q[i] · bias_k[h] {_factor(module)}{'' if module.softcap is None else ', capped'}"


def _bias_key_code(module: MultiHeadAttention, *, half: bool) -> list[str]:
    """Return the lines that append the score of the key of each head; it meets queries that are not rotated."""
    shared = ".repeat_interleave(H // Hkv, dim=0)" if module.kv_heads < module.num_heads else ""
    dtype = ".float()" if half else ""
    q = "q" if module.rotary is None else f"q_own{dtype}"
    cap = [] if module.softcap is None else ["own = c * torch.tanh(own / c)"]
    return [
        f"own = module.bias_k{shared}{dtype}",
        f"own = {q} @ own[:, :, None] * module.scale",
        *cap,
        "s = torch.cat([s, own.expand(*s.shape[:-1], 1)], dim=-1)",
    ]

"""The steps of a forward pass except attention itself, each computed, checked and added as a row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope._linear import merge_heads, split_heads, weight_and_bias
from headscope.module import gate_of
from headscope.tracing._explanations import subscript
from headscope.tracing._invariants import MATRIX, PRODUCTS, Check, close, equal, finite, rounding, spread, to_float64
from headscope.tracing._row import RowWriter
from headscope.tracing._setup import Setting


def add_inputs(writer: RowWriter) -> None:
    """Add stage 1: x and the context."""
    s = writer.setting
    m = s.module
    code = [*s.x_code, f"{'B, ' if s.batched else ''}Q, E = x.shape"]
    if s.source == "self":
        code.append("K = Q  # self-attention")
    code.append("H, D = module.num_heads, module.head_dim")
    code += ["Hkv = module.kv_heads"] if s.kv_letter == "Hkv" else []
    code += ["Dv = module.v_head_dim"] if s.value_letter == "Dv" else []
    code += _place_code(s)
    axes = (("B", s.x.shape[0]), ("Q", s.x.shape[1]), ("E", m.embed_dim))
    writer.add(1, "input", s.x, axes, s.x.dtype, equation="x", code=code, check=_check_finite(s, s.x))
    if s.source == "self":
        return
    letter = "E" if m.kdim == m.embed_dim else "kdim"
    axes = (("B", s.k_from.shape[0]), ("K", s.k_from.shape[1]), (letter, m.kdim))
    code, note = ["K = context.shape[-2]"], None
    if s.source == "pair":
        code = ["k_context, v_context = context", "K = k_context.shape[-2]"]
        note = f"the context of the keys; the values have their own, {list(s.v_from.shape[0 if s.batched else 1 :])}"
    check = _check_finite(s, s.k_from) if s.source == "cross" else _check_finite(s, s.k_from, s.v_from)
    writer.add(1, "context", s.k_from, axes, s.k_from.dtype, equation="context", code=code, check=check, note=note)


def _place_code(s: Setting) -> list[str]:
    """Return the line that sets the positions of the tokens, where a later step reads them."""
    if s.module.rotary is None and s.module.position_bias is None:
        return []
    host = s.x.device.type in ("cpu", "meta")
    if s.positions is None:
        return [f"place = torch.arange(Q{'' if host else ', device=x.device'})"]
    return [f"place = positions.long(){'' if host else '.to(x.device)'}"]


def _check_finite(s: Setting, *tensors: Tensor) -> Check:
    if not s.values:
        return Check("every value is finite")
    checks = [finite(tensor) for tensor in tensors]
    return next((check for check in checks if not check.held), checks[0])


STEPS = {"q": "queries", "k": "keys", "v": "values"}


def project(writer: RowWriter, name: str) -> Tensor:
    """Add stage 2, x Wᵀ + b for q, k or v; return [B, length, H·D]."""
    s = writer.setting
    weight, bias = s.module.projection(name)
    source = {"q": s.x, "k": s.k_from, "v": s.v_from}[name]
    where = "x" if name == "q" or s.source == "self" else "context" if s.source == "cross" else f"{name}_context"
    equation = f"{name} = {where} W_{name}ᵀ" + ("" if bias is None else f" + b_{name}")
    claim = f"equals {equation[4:]} in float64"
    if s.values:
        flat = F.linear(source, weight, bias)  # [B, length, H * D]
        check = _check_linear(claim, flat, source, weight, bias)
    else:  # only the shape: a matrix product on the meta device costs a second of imports
        flat, check = source.new_empty(*source.shape[:-1], weight.shape[0], device="meta"), Check(claim)
    heads, length, width = letters_of(s, name)
    axes = (("B", source.shape[0]), (length, source.shape[1]), (f"{heads}·{width}", weight.shape[0]))
    code = [f'{name} = F.linear({where}, *module.projection("{name}"))']
    writer.add(2, STEPS[name], flat, axes, flat.dtype, equation=equation, code=code, check=check)
    return flat


def letters_of(s: Setting, name: str) -> tuple[str, str, str]:
    """Return the letters of the heads, the length and the head width of q, k or v."""
    return ("H", "Q", "D") if name == "q" else (s.kv_letter, "K", "D" if name == "k" else s.value_letter)


def _sample_positions(source: Tensor, weight: Tensor) -> tuple[Tensor, str]:
    """Return the positions of [B, length, width] at which a projection is checked, and their number as text."""
    total = source.shape[0] * source.shape[1]
    chosen = spread(total, max(1, PRODUCTS // max(1, weight.numel())))
    scope = "" if len(chosen) == total else f" (on {len(chosen):,} of {total:,} positions)"
    return chosen.to(source.device), scope


def _project_positions(source: Tensor, weight: Tensor, bias: Tensor | None, at: Tensor) -> tuple[Tensor, Tensor]:
    """Return the projection of some positions in float64, and the sum of the magnitudes of its terms."""
    x, w = to_float64(source.flatten(0, 1)[at]), to_float64(weight)
    b = torch.zeros(len(w), dtype=torch.float64, device="cpu") if bias is None else to_float64(bias)
    return x @ w.T + b, x.abs() @ w.abs().T + b.abs()


def _check_linear(claim: str, actual: Tensor, source: Tensor, weight: Tensor, bias: Tensor | None) -> Check:
    at, scope = _sample_positions(source, weight)
    if actual.shape != (*source.shape[:-1], weight.shape[0]):
        return Check(
            claim, f"the shape is {list(actual.shape)}, expected {[*source.shape[:-1], weight.shape[0]]}", False
        )
    expected, size = _project_positions(source, weight, bias, at)
    return close(claim, actual.flatten(0, 1)[at], expected, size * rounding(actual.dtype, source.shape[-1]), scope)


def split(writer: RowWriter, name: str, flat: Tensor, own: Tensor | None) -> Tensor:
    """Add stage 3, the split of q, k or v into heads; return the module's own heads, [B, H, length, D]."""
    s, m = writer.setting, writer.setting.module
    number, width = {
        "q": (m.num_heads, m.head_dim), "k": (m.kv_heads, m.head_dim), "v": (m.kv_heads, m.v_head_dim),
    }[name]  # fmt: skip
    heads, length, letter = letters_of(s, name)
    index = "i" if name == "q" else "j"
    cut = split_heads(flat, number, width)  # [B, H, length, D]
    claim = f"joining the heads restores {name}; they equal the module's own heads"
    if own is None:
        value, check = cut, Check(claim)
    else:
        value, check = own, _check_split(writer, name, flat, cut, own, claim)
    batch = flat.shape[0]
    first, second = (1, 2) if s.batched else (0, 1)
    view = f"{s.size_code(batch)}{length}, {heads}, {letter}"
    axes = (("B", batch), (heads, number), (length, flat.shape[1]), (letter, width))
    writer.add(
        3,
        f"split {STEPS[name]}",
        value,
        axes,
        value.dtype,
        equation=f"{name}[h, {index}, d] ← {name}[{index}, h·{letter} + d]",
        code=[f"{name} = {name}.view({view}).transpose({first}, {second})"],
        check=check,
    )
    return value


def _check_split(writer: RowWriter, name: str, flat: Tensor, cut: Tensor, own: Tensor, claim: str) -> Check:
    s = writer.setting
    joined = equal(claim, merge_heads(cut), flat)
    if not joined.held:
        return joined
    if own.shape != cut.shape:
        return Check(claim, f"the module's own heads are {list(own.shape)}, expected {list(cut.shape)}", False)
    weight, bias = s.module.projection(name)
    source = {"q": s.x, "k": s.k_from, "v": s.v_from}[name]
    return _check_linear(claim, merge_heads(own), source, weight, bias)


def concatenate(writer: RowWriter, heads: Tensor) -> Tensor:
    """Add stage 5, the heads side by side: [B, H, Q, Dv] -> [B, Q, H·Dv]."""
    s, m = writer.setting, writer.setting.module
    joined = merge_heads(heads)  # [B, Q, H * Dv]
    claim = "splitting the result restores the heads"
    check = equal(claim, split_heads(joined, m.num_heads, m.v_head_dim), heads) if s.values else Check(claim)
    letter = s.value_letter
    names = ["o₁", "…", f"o{subscript(m.num_heads)}"] if m.num_heads > 2 else ["o₁", "o₂"][: m.num_heads]
    first, second = (1, 2) if s.batched else (0, 1)
    writer.add(
        5,
        "concatenation",
        joined,
        (("B", joined.shape[0]), ("Q", joined.shape[1]), (f"H·{letter}", joined.shape[2])),
        joined.dtype,
        equation=f"o = concat({', '.join(names)})",
        code=[f"o = o.transpose({first}, {second}).reshape({s.size_code(joined.shape[0])}Q, H * {letter})"],
        check=check,
    )
    return joined


def gate(writer: RowWriter, joined: Tensor) -> Tensor:
    """Add the gate, σ(x Wᵀ + b), and its product with the outputs of the heads, [B, Q, H·Dv]; both end stage 5."""
    s, m = writer.setting, writer.setting.module
    if m.gate_proj is None:
        return joined
    weight, bias = weight_and_bias(m.gate_proj)
    equation = "σ(x W_gᵀ" + ("" if bias is None else " + b_g") + ")"
    claim = f"lies in [0, 1], and equals {equation} in float64"
    opened, check = joined, Check(claim)
    if s.values:
        opened = gate_of(m.gate_proj(s.x), m.reproducible)  # [B, Q, H * Dv]
        check = _check_gate(claim, opened, s.x, weight, bias)
    width = f"H·{s.value_letter}"
    axes = (("B", s.x.shape[0]), ("Q", s.x.shape[1]), (width, weight.shape[0]))
    code = ["g = torch.sigmoid(module.gate_proj(x))"]
    writer.add(5, "gate", opened, axes, opened.dtype, equation=f"g = {equation}", code=code, check=check)
    claim = "equals o · g in float64"
    gated, check = joined, Check(claim)
    if s.values:
        gated = joined * opened
        at = spread(gated.shape[1], max(1, MATRIX // max(1, len(gated) * gated.shape[2]))).to(gated.device)
        scope = "" if len(at) == gated.shape[1] else f" (on {len(at):,} of {gated.shape[1]:,} positions)"
        expected = to_float64(joined[:, at]) * to_float64(opened[:, at])
        check = close(claim, gated[:, at], expected, expected.abs() * rounding(gated.dtype, 1), scope)
    axes = (("B", joined.shape[0]), ("Q", joined.shape[1]), (width, joined.shape[2]))
    writer.add(5, "gated outputs", gated, axes, gated.dtype, equation="o ← o · g", code=["o = o * g"], check=check)
    return gated


def _check_gate(claim: str, opened: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Check:
    at, scope = _sample_positions(x, weight)
    numbers, size = _project_positions(x, weight, bias, at)
    error = size * rounding(opened.dtype, x.shape[-1])  # of the numbers in the sigmoid, which only grows
    expected = torch.sigmoid(numbers)
    allowed = torch.maximum(torch.sigmoid(numbers + error) - expected, expected - torch.sigmoid(numbers - error))
    actual = opened.flatten(0, 1)[at]
    outside = int(((actual < 0) | (actual > 1)).sum())
    if outside:
        return Check(claim, f"{outside:,} of its numbers lie outside [0, 1]{scope}", False)
    return close(claim, actual, expected, allowed + expected * rounding(opened.dtype, 1), scope)


def add_output(writer: RowWriter, joined: Tensor) -> None:
    """Add stage 6, which mixes the outputs of the heads into the module's own output."""
    s = writer.setting
    weight, bias = s.module.projection("out")
    equation = "o W_oᵀ" + ("" if bias is None else " + b_o")
    claim = f"the module's own output equals {equation} in float64"
    check = Check(claim) if s.output is None else _check_linear(claim, s.output, joined, weight, bias)
    axes = (("B", joined.shape[0]), ("Q", joined.shape[1]), ("E", weight.shape[0]))
    dtype = joined.dtype if s.output is None else s.output.dtype
    code = ["out = module.out_proj(o)"]
    writer.add(6, "output", s.output, axes, dtype, equation=f"out = {equation}", code=code, check=check)

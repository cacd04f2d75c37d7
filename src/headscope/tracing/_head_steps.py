"""The end of stage 3 of a trace: queries and keys are normalised, and rotated to their positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headscope._linear import merge_heads
from headscope.positions import Rotary
from headscope.tracing._invariants import MATRIX, Check, close, rounding, spread, to_float64
from headscope.tracing._own_values import Heads, OwnValues, compute_own_values, take_sizes
from headscope.tracing._row import RowWriter
from headscope.tracing._setup import Setting
from headscope.tracing._steps import STEPS, letters_of

HALF = (torch.bfloat16, torch.float16)


def place_heads(writer: RowWriter, heads: Heads) -> OwnValues:
    """Add the norms and the rotation of queries and keys; return the module's own values."""
    m = writer.setting.module
    own = compute_own_values(writer.setting, heads) if writer.setting.values else take_sizes(heads)
    if m.q_norm is not None and m.k_norm is not None:
        _normalise(writer, "q", m.q_norm, heads.q, own.normed.q)
        _normalise(writer, "k", m.k_norm, heads.k, own.normed.k)
    if m.rotary is not None:
        _rotate(writer, "q", m.rotary, own.normed.q, own.placed.q)
        _rotate(writer, "k", m.rotary, own.normed.k, own.placed.k)
    return own


def _add(
    writer: RowWriter, step: str, name: str, value: Tensor, equation: str, code: list[str], check: Check, note: str
) -> None:
    """Add a row whose result has the shape of the heads, [B, H, length, D]."""
    axes = zip(("B", *letters_of(writer.setting, name)), value.shape, strict=True)
    step = f"{step} {STEPS[name]}"
    writer.add(3, step, value, axes, value.dtype, equation=equation, code=code, check=check, note=note or None)


def _sample_places(x: Tensor) -> tuple[Tensor, str]:
    """Return the positions of [B, H, length, D] that are checked, and their number as text."""
    batch, heads, length, width = x.shape
    at = spread(length, max(1, MATRIX // max(1, batch * heads * width)))
    return at, "" if len(at) == length else f" (on {len(at):,} of {length:,} positions)"


# ---------------------------------------------------------------- norms


def _normalise(writer: RowWriter, name: str, norm: nn.RMSNorm | nn.LayerNorm, x: Tensor, own: Tensor) -> None:
    s, joint = writer.setting, writer.setting.module.qk_norm == "rms_all"
    layer = isinstance(norm, nn.LayerNorm)
    size = "standard deviation" if layer else "root mean square"
    claim = f"equals the norm in float64; {size} 1 before the gain"
    check, note = Check(claim), "all heads together" if joint else "each head by itself, with the same gain"
    if s.values:
        at, scope = _sample_places(x)
        before, after = (t.index_select(2, at.to(t.device)) for t in (x, own))
        if joint:
            before, after = merge_heads(before), merge_heads(after)  # [B, length, H * D]
        check, smallest = _check_norm(claim, norm, before, after, scope)
        if smallest < 0.99:
            note += f"; ε = {norm.eps:g} keeps the {size} below 1 (down to {smallest:.2g}), because {name} is small"
    equation = f"{name} ← g · {name} / √(mean {name}² + ε)"
    if layer:
        equation = f"{name} ← g · ({name} − mean {name}) / √(var {name} + ε) + b"
    _add(writer, "normalise", name, own, equation, _norm_code(s, name, layer=layer, joint=joint), check, note)


def _norm_code(s: Setting, name: str, *, layer: bool, joint: bool) -> list[str]:
    (heads, _, width), (first, second) = letters_of(s, name), (1, 2) if s.batched else (0, 1)
    lines = [f"norm = module.{name}_norm"]
    if layer:
        return [*lines, f"{name} = F.layer_norm({name}, ({width},), norm.weight, norm.bias, norm.eps)"]
    if not joint:
        return [*lines, f"{name} = F.rms_norm({name}, ({width},), norm.weight, norm.eps)"]
    return [
        *lines,
        f"{name} = {name}.transpose({first}, {second}).flatten(-2)",
        f"{name} = F.rms_norm({name}, ({heads} * {width},), norm.weight, norm.eps)",
        f"{name} = {name}.unflatten(-1, ({heads}, {width})).transpose({first}, {second})",
    ]


def _check_norm(
    claim: str, norm: nn.RMSNorm | nn.LayerNorm, before: Tensor, after: Tensor, scope: str
) -> tuple[Check, float]:
    """Check a norm over the last axis, and the size of its result before the gain; return the smallest such size, too.

    The size follows from that of the input: r / √(r² + ε).
    """
    x, width = to_float64(before), before.shape[-1]
    one, zero = torch.ones(width, dtype=torch.float64, device="cpu"), torch.zeros(1, dtype=torch.float64, device="cpu")
    weight, bias = (norm._parameters.get(name) for name in ("weight", "bias"))  # None if it has none
    gain, shift = one if weight is None else to_float64(weight), zero if bias is None else to_float64(bias)
    eps = torch.finfo(before.dtype).eps if norm.eps is None else norm.eps
    mean = x.mean(-1, keepdim=True) if isinstance(norm, nn.LayerNorm) else zero
    square = (x - mean).square().mean(-1, keepdim=True)
    unit = (x - mean) / (square + eps).sqrt()
    terms = x.abs()
    if isinstance(norm, nn.LayerNorm):
        terms = terms + terms.mean(-1, keepdim=True)  # the mean is as inexact as the numbers that it sums
    terms = terms / (square + eps).sqrt()
    relative = rounding(after.dtype, width) * (1 + unit.abs() * (isinstance(norm, nn.LayerNorm)))
    allowed = terms * relative * gain.abs() + shift.abs() * rounding(after.dtype, 1)
    check = close(claim, after, unit * gain + shift, allowed, scope)
    expected = (square / (square + eps)).sqrt()[..., 0]
    smallest = float(expected.nan_to_num(1).min()) if expected.numel() else 1.0
    if bool((gain != 0).all()):
        size = ((to_float64(after) - shift) / gain).square().mean(-1).sqrt()
        sizes = close(claim, size, expected, (allowed / gain.abs()).amax(-1) if width else expected, scope)
        check = check if sizes.held else sizes._replace(outcome=f"its size before the gain has {sizes.outcome}")
    return check, smallest


# ---------------------------------------------------------------- rotary


def _rotate(writer: RowWriter, name: str, rotary: Rotary, x: Tensor, own: Tensor) -> None:
    s, factor = writer.setting, rotary.attention_factor
    norms = "each pair keeps its norm" if factor == 1 else f"the norm of each pair grows by {factor:.4g}"
    claim = f"equals the rotation in float64; {norms}"
    check = Check(claim)
    if s.values:
        at, scope = _sample_places(x)
        before, after = (t.index_select(2, at.to(t.device)) for t in (x, own))
        check = _check_rotation(claim, rotary, before, after, _angles(s, rotary, at), scope)
    index = "i" if name == "q" else "j"
    code = _rotation_code(s, rotary, name, x.dtype)
    note = _note_rotation(rotary, width=x.shape[-1], has_positions=s.positions is not None)
    _add(writer, "rotate", name, own, f"{name}[{index}] ← R({index} θₙ) {name}[{index}] for pairs n", code, check, note)


def _angles(s: Setting, rotary: Rotary, at: Tensor) -> Tensor:
    """Return the angle of each pair at some positions in float64, [length, dim / 2] or [B, 1, length, dim / 2]."""
    places = s.places().cpu()
    length = int(places.max()) + 1 if places.numel() else 0
    angles = places[..., at].to(torch.float64)[..., None] * rotary.frequencies(length)
    return angles[:, None] if places.ndim == 2 else angles


def _pairs(rotary: Rotary, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the second component of each pair, [..., dim / 2]."""
    if rotary.pairing == "interleaved":
        first, second = x[..., : rotary.dim].unflatten(-1, (-1, 2)).unbind(-1)
        return first, second
    first, second = x[..., : rotary.dim].chunk(2, -1)
    return first, second


def _check_rotation(claim: str, rotary: Rotary, before: Tensor, after: Tensor, angles: Tensor, scope: str) -> Check:
    x, turned = to_float64(before), to_float64(after)
    factor = rotary.attention_factor
    (a, b), (c, d) = _pairs(rotary, x), _pairs(rotary, turned)
    expected = torch.stack([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()]) * factor
    norm = factor * (a.square() + b.square()).sqrt()  # [B, H, length, dim / 2]
    allowed = rounding(after.dtype, 2) * norm
    actual = torch.stack(_pairs(rotary, after))  # [2, B, H, length, dim / 2]
    check = close(claim, actual, expected, allowed, scope)
    finite = torch.isfinite(norm)
    got = (c.square() + d.square()).sqrt()
    norms = close(claim, got.masked_fill(~finite, 0), norm.masked_fill(~finite, 0), 2 * allowed, scope)
    rest = x[..., rotary.dim :]
    same = (turned[..., rotary.dim :] == rest) | rest.isnan()
    if not bool(same.all()):
        moved = int((~same).sum())
        return Check(claim, f"{moved:,} components beyond the first {rotary.dim} changed{scope}", False)
    return check if norms.held else norms._replace(outcome=f"the norm of a pair has {norms.outcome}")


def _rotation_code(s: Setting, rotary: Rotary, name: str, dtype: torch.dtype) -> list[str]:
    """Return the lines that rotate q or k; those of q also compute the cos and sin of both."""
    host = s.x.device.type in ("cpu", "meta")
    half, dim = rotary.dim // 2, rotary.dim
    lines = ["q_own = q  # for the key of bias_kv"] if name == "q" and s.module.bias_k is not None else []
    if name == "q":
        length = ""
        if rotary.dynamic:
            length = "Q" if s.positions is None else "int(place.max()) + 1"
        axes = "[:, None, :, None]" if s.positions is not None and s.positions.ndim == 2 else "[:, None]"
        lines.append(f"angle = place{'' if host else '.cpu()'}{axes} * module.rotary.frequencies({length})")
        factor = "" if rotary.attention_factor == 1 else " * module.rotary.attention_factor"
        wide = "" if dtype == torch.float64 else ".float()"
        device = "" if host else ".to(x.device)"
        for each in ("cos", "sin"):
            number = f"({each}{factor})" if factor and wide + device else f"{each}{factor}"
            lines.append(f"{each} = {number.replace(each, f'angle.{each}()')}{wide}{device}")
    a, b = (f"{name}[..., :{half}]", f"{name}[..., {half}:{dim}]")
    if rotary.pairing == "interleaved":
        a, b = f"{name}[..., :{dim}:2]", f"{name}[..., 1:{dim}:2]"
    lines.append(f"a, b = {a}, {b}")
    turned = "[a * cos - b * sin, b * cos + a * sin]"
    rounded = f".to({name}.dtype)" if dtype in HALF else ""
    whole = dim == s.module.head_dim
    if rotary.pairing == "half" and whole:
        return [*lines, f"{name} = torch.cat({turned}, -1){rounded}"]
    if rotary.pairing == "half":
        return [*lines, f"turned = {turned}", f"{name} = torch.cat([*turned, {name}[..., {dim}:]], -1){rounded}"]
    if whole:
        return [*lines, f"turned = {turned}", f"{name} = torch.stack(turned, -1).flatten(-2){rounded}"]
    lines.append(f"turned = torch.stack({turned}, -1).flatten(-2)")
    return [*lines, f"{name} = torch.cat([turned, {name}[..., {dim}:]], -1){rounded}"]


def _note_rotation(rotary: Rotary, *, width: int, has_positions: bool) -> str:
    pairs = f"n and n + {rotary.dim // 2}" if rotary.pairing == "half" else "2n and 2n + 1"
    parts = [f"pairs are components {pairs}; θₙ = {rotary.base:g} ** (−2n / {rotary.dim})"]
    if rotary.scaling is not None:
        parts[0] += f", scaled by {type(rotary.scaling).__name__}"
    if rotary.dim < width:
        parts.append(f"components from {rotary.dim} on are unchanged")
    if has_positions:
        parts.append("i and j are the given positions")
    return "; ".join(parts)

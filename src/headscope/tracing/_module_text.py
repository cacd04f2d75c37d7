"""A traced module as text: the call that makes it, its options as plain values, and the parts that no row shows."""

from __future__ import annotations

from dataclasses import MISSING, fields, is_dataclass
from typing import Any, cast

from torch import nn

from headscope._linear import QKV, unknown_projections
from headscope.module import MultiHeadAttention
from headscope.positions import NTK, ALiBi, LinearScaling, Llama3, RelativeBias, Rotary, T5Buckets, YaRN

EPS = 1e-6  # the default of qk_norm_eps


def list_untraced(module: MultiHeadAttention) -> list[str]:
    """Return the parts of a module that no row shows."""
    parts = unknown_projections(module)
    for name in ("q_norm", "k_norm"):
        part = getattr(module, name)
        if part is not None and type(part).forward not in (nn.RMSNorm.forward, nn.LayerNorm.forward):
            parts[name] = part
    replaced: Any = module.position_bias
    if replaced is not None and not isinstance(replaced, (ALiBi, RelativeBias)):
        parts["position_bias"] = replaced
    return [f"a {type(part).__name__} as {name}" for name, part in parts.items()]


def describe(module: MultiHeadAttention) -> dict[str, Any]:
    """Return the sizes and options of a module, as plain values."""
    sizes = ("embed_dim", "num_heads", "kv_heads", "head_dim", "v_head_dim", "kdim", "vdim")
    options = {name: getattr(module, name) for name in (*sizes, "scale", "softcap", "dropout", "qk_norm")}
    objects = {"rotary": module.rotary, "position_bias": module.position_bias}
    options |= {name: None if part is None else option_text(part) for name, part in objects.items()}
    return options | _flags(module)


def _flags(module: MultiHeadAttention) -> dict[str, bool]:
    parts = {"sinks": module.sinks, "gate": module.gate_proj, "bias_kv": module.bias_k}
    return {name: part is not None for name, part in parts.items()} | {"reproducible": module.reproducible}


def call_text(module: MultiHeadAttention, precision: str = "") -> str:
    """Return the call that makes the module: its non-default arguments, in the order of the signature."""
    biased = tuple(name for name in QKV if module.projection(name)[1] is not None)
    usual: dict[str, Any] = {
        "kv_heads": module.num_heads, "head_dim": module.embed_dim / module.num_heads, "v_head_dim": module.head_dim,
        "kdim": module.embed_dim, "vdim": module.kdim, "bias": True, "out_bias": bool(biased),
        "scale": module.head_dim**-0.5, "softcap": None, "sinks": False, "dropout": 0.0, "rotary": None,
        "position_bias": None, "qk_norm": None, "qk_norm_eps": EPS, "gate": False, "bias_kv": False,
        "reproducible": False,
    }  # fmt: skip
    values = _flags(module) | {
        "bias": biased if 0 < len(biased) < len(QKV) else bool(biased),
        "out_bias": module.projection("out")[1] is not None,
        "qk_norm_eps": EPS if module.q_norm is None else module.q_norm.eps,
    }
    options: list[str] = []
    for name, default in usual.items():
        value = values[name] if name in values else getattr(module, name)
        if value != default:
            options.append(f", {name}={_value_text(value, precision)}")
    return f"{type(module).__name__}({module.embed_dim}, {module.num_heads}{''.join(options)})"


def _value_text(value: object, precision: str) -> str:
    if isinstance(value, RelativeBias) or is_dataclass(value):
        return option_text(value)
    return format(value, precision) if isinstance(value, float) else repr(value)


def option_text(value: object) -> str:
    """Return the call that makes an option: its arguments that are not at their default."""
    value = value.buckets if isinstance(value, RelativeBias) else value
    if not is_dataclass(value) or isinstance(value, type):
        return repr(value)
    required = {part.name: getattr(value, part.name) for part in fields(value) if part.default is MISSING}
    plain = cast("Any", type(value))(**required)
    parts = [_argument_text(each) for each in required.values()]
    for part in fields(value):
        own = getattr(value, part.name)
        if part.name not in required and own != getattr(plain, part.name):
            parts.append(f"{part.name}={_argument_text(own)}")
    return f"{type(value).__name__}({', '.join(parts)})"


def _argument_text(value: object) -> str:
    return option_text(value) if is_dataclass(value) else repr(value)


def import_lines(module: MultiHeadAttention) -> list[str]:
    """Return the import of the classes of positions that ``call_text`` names."""
    text = f"{module.rotary!r} {module.position_bias!r}"
    classes = (ALiBi, LinearScaling, Llama3, NTK, Rotary, T5Buckets, YaRN)
    names = [each.__name__ for each in classes if f"{each.__name__}(" in text]
    return [f"from headscope.positions import {', '.join(names)}"] if names else []

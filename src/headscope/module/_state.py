"""State dicts and representation of a ``MultiHeadAttention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headscope._linear import QKV
from headscope.positions import ALiBi


def to_own_form(state: dict[str, Any], prefix: str, splits: tuple[int, int, int], *, packed: bool) -> None:
    """Change packed projections in a state dict to separate ones, or the reverse; ignore entries that do not fit.

    Args:
        state: the state dict, which is changed.
        prefix: of the module's keys.
        splits: rows of the projections to q, k and v.
        packed: whether the module has one projection for all three.
    """
    for part in ("weight", "bias"):
        together = f"{prefix}qkv_proj.{part}"
        separate = [f"{prefix}{name}_proj.{part}" for name in QKV]
        if packed and together not in state and _fit([state.get(key) for key in separate], splits):
            state[together] = torch.cat([state.pop(key) for key in separate])
        elif not packed and together in state and state[together].shape[0] == sum(splits):
            state.update(zip(separate, state.pop(together).split(splits), strict=True))


def _fit(parts: list[Tensor | None], splits: tuple[int, int, int]) -> bool:
    """Return whether these are the three parts of the packed projection; if not, loading reports the error."""
    widths = {part.shape[1:] for part in parts if part is not None}
    return tuple(0 if part is None else len(part) for part in parts) == splits and len(widths) == 1


def describe(module: Any) -> str:
    """Return the sizes of a module, and its options that are not at their default."""
    parts = [f"{module.embed_dim}, {module.num_heads}"]
    defaults = {
        "kv_heads": module.num_heads, "head_dim": module.embed_dim // module.num_heads, "v_head_dim": module.head_dim,
        "kdim": module.embed_dim, "vdim": module.kdim, "scale": module.head_dim**-0.5, "softcap": None, "dropout": 0.0,
    }  # fmt: skip
    parts += [f"{name}={getattr(module, name)}" for name, usual in defaults.items() if getattr(module, name) != usual]
    described: dict[str, object] = {"rotary": module.rotary, "qk_norm": module.qk_norm}
    if isinstance(module.position_bias, ALiBi):  # a module prints itself
        described["position_bias"] = module.position_bias
    parts += [f"{name}={value!r}" for name, value in described.items() if value is not None]
    has = {"sinks": module.sinks, "gate": module.gate_proj, "bias_kv": module.bias_k}
    flags = {name: value is not None for name, value in has.items()} | {"reproducible": module.reproducible}
    return ", ".join(parts + [f"{name}=True" for name, flag in flags.items() if flag])

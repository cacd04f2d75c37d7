"""State dicts and representation of a ``MultiHeadAttention``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headscope._linear import QKV
from headscope._support.tensor_classes import is_distributed
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


def write_packed(module: Any) -> None:
    """Let an unpacked module that is split over ranks write its state dict with the keys of the packed one."""
    module.qkv_proj = PackedName()  # torch.distributed.checkpoint.state_dict finds each key as an attribute
    module.register_state_dict_post_hook(_pack_entries)


class PackedName:
    """Stands for the packed projection that a state dict names and the module no longer has."""

    weight = bias = None


def _pack_entries(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Change the entries of three projections to those of a packed one, over the same mesh."""
    for part in ("weight", "bias"):
        separate = [f"{prefix}{name}_proj.{part}" for name in QKV]
        if all(key in state for key in separate):
            state[f"{prefix}qkv_proj.{part}"] = _joined([state.pop(key) for key in separate])


def _joined(parts: list[Any]) -> Tensor:
    """Return the rows of DTensors one below the other, in the order of one process, split by rows."""
    if not all(map(is_distributed, parts)):
        return torch.cat(parts)
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = parts[0].device_mesh
    with torch.no_grad():
        whole = torch.cat([part.full_tensor() for part in parts])
        joined = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
        return joined.redistribute(placements=[Shard(0)] * mesh.ndim)


def to_parts(module: Any, state: dict[str, Any], prefix: str) -> None:
    """Change ordinary tensors in a state dict, whole on each rank, to the DTensors of a module that is split."""
    from torch.distributed.tensor import distribute_tensor

    for name, parameter in module.named_parameters():
        x = state.get(f"{prefix}{name}")
        if is_distributed(parameter) and isinstance(x, Tensor) and not is_distributed(x) and x.shape == parameter.shape:
            x = x.to(parameter.device)
            state[f"{prefix}{name}"] = distribute_tensor(
                x, parameter.device_mesh, parameter.placements, src_data_rank=None
            )


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

"""The names of an attention module's projections, their parameters, and how their output is split into heads.

``layer.py`` projects.
"""

from __future__ import annotations

from torch import Tensor, nn

QKV = ("q", "k", "v")
PROJECTIONS = (*QKV, "out")


def check_own_parameters(module: nn.Module, *parts: nn.Module) -> None:
    """Raise unless the weights of a module, or of these parts of it, are parameters.

    Raises:
        ValueError: a mask of ``torch.nn.utils.prune`` or a parametrization recomputes one in each call.
    """
    paths = {part: path for path, part in module.named_modules()}
    for part in parts or (module,):
        parametrizations = getattr(part, "parametrizations", None)
        computed = list(parametrizations) if isinstance(parametrizations, nn.ModuleDict) else []
        own = set(part._parameters.keys())  # for a scripted module they are a list
        computed += [name for name in vars(part) if own & {f"{name}_orig", f"{name}_g"}]
        if computed:
            path = f"{paths[part]}.{computed[0]}".lstrip(".")
            raise ValueError(
                f"module: {path} is recomputed in each call by a pruning mask or a parametrization; remove it with "
                "torch.nn.utils.prune.remove or torch.nn.utils.parametrize.remove_parametrizations"
            )


def split_heads(x: Tensor, heads: int, head_dim: int) -> Tensor:
    """Split the width, then move the heads forward: [B, length, heads * head_dim] -> [B, heads, length, head_dim]."""
    return x.unflatten(-1, (heads, head_dim)).transpose(-3, -2)  # [B, heads, length, head_dim]


def merge_heads(x: Tensor) -> Tensor:
    """Invert ``split_heads``: [B, heads, length, head_dim] -> [B, length, heads * head_dim]."""
    return x.transpose(-3, -2).flatten(-2)  # [B, length, heads * head_dim]

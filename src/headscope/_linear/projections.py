"""The projections of an attention module: their names, and whether their weights are parameters."""

from __future__ import annotations

from torch import nn
from torch.nn.utils import parametrize

QKV = ("q", "k", "v")
PROJECTIONS = (*QKV, "out")


def check_own_parameters(module: nn.Module, *parts: nn.Module) -> None:
    """Raise unless the weights of a module, or of these parts of it, are parameters.

    Raises:
        ValueError: one is made anew for each call, by a mask of ``torch.nn.utils.prune`` or a parametrization.
    """
    paths = {part: path for path, part in module.named_modules()}
    for part in parts or (module,):
        computed = list(part.parametrizations) if parametrize.is_parametrized(part) else []  # pyright: ignore[reportArgumentType, reportUnknownArgumentType]
        own = set(part._parameters.keys())  # of a scripted module they are a list
        computed += [name for name in vars(part) if own & {f"{name}_orig", f"{name}_g"}]
        if computed:
            path = f"{paths[part]}.{computed[0]}".lstrip(".")
            raise ValueError(
                f"module: {path} is made anew for each call, by a pruning mask or a parametrization; wanted a "
                "parameter: see torch.nn.utils.prune.remove, torch.nn.utils.parametrize.remove_parametrizations"
            )

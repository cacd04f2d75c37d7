"""Linear: ``nn.Linear`` by the faster of torch's two routes, as a shipped table says for this kind of CPU.

``F.linear`` in float32 goes to MKL, which takes a slower path on CPUs that are not Intel's; oneDNN, which torch also
carries, does not. ``linear_table.json`` holds what was measured for each vendor, and the choice is made from that and
from the shapes alone. oneDNN has no gradient for it, so it runs in inference only; it is internal to torch, so where
it is not there, or the call is not an ordinary one, ``F.linear`` runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope._call import kind
from headscope._cpuinfo import vendor
from headscope._onlookers import is_traced

TABLE = "linear_table.json"


class Linear(nn.Linear):
    """``nn.Linear``, with the same parameters and the same result to rounding."""

    def forward(self, input: Tensor) -> Tensor:
        """[..., in_features] -> [..., out_features]."""
        return linear(input, self.weight, self.bias)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``F.linear`` by the faster route."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or not fits(input, weight, bias):
        return F.linear(input, weight, bias)
    if is_traced() or not torch._C._get_mkldnn_enabled() or (fast := route()) is None:
        return F.linear(input, weight, bias)
    return fast(input, weight, bias)


def fits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the table's figures speak of this call: plain dense float32 on the CPU, and enough of it."""
    return (
        type(input) is Tensor
        and type(weight) is nn.Parameter
        and input.dtype == weight.dtype == torch.float32
        and (bias is None or bias.dtype == torch.float32)
        and input.device.type == weight.device.type == "cpu"
        and input.is_contiguous()
        and weight.is_contiguous()
        and input.shape[-1] == weight.shape[1]
        and input.numel() * weight.shape[0] >= table()["least_products"]
        and not torch.is_autocast_enabled("cpu")
    )


def is_linear(module: nn.Module) -> bool:
    """Whether it is a linear by its class: ``nn.Linear``, ours, or one that inherits its forward from them."""
    return isinstance(module, nn.Linear) and type(module).forward in (Linear.forward, nn.Linear.forward)


def is_plain(linear: nn.Module) -> bool:
    """Whether it is a linear whose call is its weight's product and nothing more."""
    hooked = linear._forward_pre_hooks or linear._forward_hooks or "forward" in vars(linear)
    return is_linear(linear) and not hooked


def check_kind(name: str, x: Tensor, linear: nn.Module) -> None:
    """Whether x has the dtype and device of what projects it; a module that took its place may take any."""
    weight = linear._parameters.get("weight")
    if weight is None or (x.dtype == weight.dtype and x.device == weight.device):
        return
    if not is_plain(linear):
        return
    if x.device != weight.device:
        raise ValueError(f"{name}: is on {x.device}, the module on {weight.device}")
    where = x.device.type
    cast = torch.amp.is_autocast_available(where) and torch.is_autocast_enabled(where) and x.is_floating_point()
    if not cast:
        raise TypeError(f"{name}: dtype is {kind(x)}, the module has {kind(weight)}")


def strangers(module: nn.Module) -> dict[str, nn.Module]:
    """Projections of a module that are no linears, as those of LoRA: their weight, if any, may not be all."""
    return {name: part for name, part in module.named_children() if name.endswith("_proj") and not is_linear(part)}


@cache
def route() -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """oneDNN's product, where the table prefers it for this CPU and this torch has it; else None."""
    entry = table()["vendors"].get(vendor(), {})
    return onednn() if entry.get("route") == "onednn" else None


@cache
def onednn() -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """``x @ weight.T + bias`` by oneDNN; None where this torch cannot, or does not compute that."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        product: Any = torch.ops.mkldnn._linear_pointwise
        said: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
        x, weight, bias = torch.ones(2, 16, **said), torch.eye(16, **said), torch.ones(16, **said)
        right = torch.equal(product(x, weight, bias, "none", [], ""), x + 1)
    except (AttributeError, RuntimeError, TypeError):
        return None
    return (lambda x, weight, bias: product(x, weight, bias, "none", [], "")) if right else None


@cache
def table() -> dict[str, Any]:
    """The shipped table."""
    return json.loads(files("headscope").joinpath(TABLE).read_text(encoding="utf-8"))

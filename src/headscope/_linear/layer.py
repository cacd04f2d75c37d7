"""Linear: ``nn.Linear`` by the fastest route, which a shipped table lists for this kind of CPU.

``F.linear`` in float32 calls MKL, which takes a slower path on CPUs that are not Intel's. oneDNN, which torch also
includes, does not; the native kernels can multiply too. The choice depends only on the measurements in ``table.json``
and on the shapes. oneDNN's product has no gradient, so it runs in inference only. If it is missing (it is internal to
torch), or the call is not an ordinary one, ``F.linear`` runs.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from headscope._attend.backends import native as cpu
from headscope._linear.product import Native, lies_plainly
from headscope._linear.reproducible import reproducible_linear
from headscope._support.arguments import kind
from headscope._support.cpuinfo import family, vendor
from headscope._support.torch_state import is_traced

TABLE = "table.json"
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}  # that the table may contain


class Product(Protocol):
    """``x @ weight.T + bias``."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply: [..., width], [outs, width] -> [..., outs]."""
        ...


class Linear(nn.Linear):
    """``nn.Linear``, with the same parameters and the same result to rounding.

    Attributes:
        reproducible: whether each row of the result has the same bits whatever the other rows are.
    """

    reproducible = False

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer: [..., in_features] -> [..., out_features]."""
        product = reproducible_linear if self.reproducible else linear
        return product(input, self.weight, self.bias)


def weight_and_bias(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Return the weight and the bias, which torch's type hints declare as never None."""
    return linear.weight, linear.bias


def linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute ``F.linear`` by the fastest route."""
    product = route(input, weight, bias)
    return F.linear(input, weight, bias) if product is None else product(input, weight, bias)


def in_heads(linear: nn.Module, input: Tensor, width: int) -> Tensor | None:
    """Project, with the result as contiguous heads of a width: [..., T, E] -> [..., H, T, width].

    Attention reads contiguous heads faster. Returns None if the native kernels would not compute them, or if hooks
    observe the module's output.
    """
    weight, bias = linear._parameters.get("weight"), linear._parameters.get("bias")
    if getattr(linear, "reproducible", False):
        return None
    if weight is None or width % 16 or not is_plain(linear) or _global_forward_hooks or _global_forward_pre_hooks:
        return None
    product = route(input, weight, bias)
    return product.heads(input, weight, bias, width) if isinstance(product, Native) and product.takes(weight) else None


def route(input: Tensor, weight: Tensor, bias: Tensor | None) -> Product | None:
    """Return the product that the table prefers to torch's for this call."""
    if torch.compiler.is_compiling() or is_traced() or not fits(input, weight, bias):
        return None
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (input, weight, bias))
    for least_rows, product in trained_routes(input.dtype) if trained else routes(input.dtype):
        if input.numel() >= least_rows * input.shape[-1]:
            return product
    return None


def fits(input: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether the table's figures apply to this call: plain and dense, on the CPU, and large enough."""
    return (
        type(input) is Tensor
        and type(weight) is nn.Parameter
        and not input.is_nested
        and weight.ndim == 2
        and input.numel() * weight.shape[0] >= table()["least_products"]
        and min(weight.shape) >= table()["least_side"]
        and input.shape[-1] == weight.shape[1]
        and input.dtype in DTYPES
        and lies_plainly(input, input.dtype)
        and lies_plainly(weight, input.dtype)
        and (bias is None or (bias.shape == weight.shape[:1] and lies_plainly(bias, input.dtype)))
        and not torch.is_autocast_enabled("cpu")
    )


def is_linear(module: nn.Module) -> bool:
    """Return whether its class is ``nn.Linear``, headscope's ``Linear``, or one that inherits its forward from them."""
    return isinstance(module, nn.Linear) and type(module).forward in (Linear.forward, nn.Linear.forward)


def is_plain(linear: nn.Module) -> bool:
    """Return whether it is a linear whose call computes only the product with its weight."""
    hooked = linear._forward_pre_hooks or linear._forward_hooks or "forward" in vars(linear)
    return is_linear(linear) and not hooked


def check_kind(name: str, x: Tensor, linear: nn.Module) -> None:
    """Raise unless x has the dtype and device of its projection; a replaced module may accept any."""
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


def unknown_projections(module: nn.Module) -> dict[str, nn.Module]:
    """Return projections of a module that are not linears, such as those of LoRA: more than their weight may matter."""
    return {name: part for name, part in module.named_children() if name.endswith("_proj") and not is_linear(part)}


def entry() -> dict[str, Any]:
    """Return the table's entry for this CPU: of its family, else of its vendor."""
    cpus = table()["cpus"]
    return cpus.get(f"{vendor()} {family()}".strip()) or cpus.get(vendor()) or {}


@cache
def routes(dtype: torch.dtype) -> tuple[tuple[int, Product], ...]:
    """Return the available products that beat torch's on this CPU: from so many rows on, the fastest first."""
    there = {"native": native_product(dtype), "onednn": onednn() if dtype is torch.float32 else None}
    entries = entry().get(DTYPES[dtype], {}).get("routes", ())
    return tuple((rows, product) for rows, name in entries if (product := there[name]) is not None)


@cache
def trained_routes(dtype: torch.dtype) -> tuple[tuple[int, Product], ...]:
    """Return the same for calls with gradients: forward and backward together."""
    entries = entry().get(DTYPES[dtype], {}).get("trained", ())
    product = native_product(dtype)
    return () if product is None else tuple((rows, product.trained) for rows, _ in entries)


@cache
def native_product(dtype: torch.dtype) -> Native | None:
    """Return the product of the native kernels; None if missing, unsupported, or built for an unmeasured target."""
    kernels = cpu.extension
    if kernels is None or kernels.target() != entry().get("target", kernels.target()):
        return None
    return Native(dtype) if kernels.supports_linear(cpu.CODES[dtype], 2) else None


@cache
def onednn() -> Product | None:
    """Return ``x @ weight.T + bias`` in float32 by oneDNN; None if this torch lacks it, or computes something else."""
    if not torch.backends.mkldnn.is_available():
        return None
    try:
        product: Any = torch.ops.mkldnn._linear_pointwise
        placement: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
        x, weight, bias = torch.ones(2, 16, **placement), torch.eye(16, **placement), torch.ones(16, **placement)
        right = torch.equal(product(x, weight, bias, "none", [], ""), x + 1)
    except (AttributeError, RuntimeError, TypeError):
        return None
    if not right:
        return None

    def multiplied(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not torch._C._get_mkldnn_enabled():
            return F.linear(x, weight, bias)
        return product(x, weight, bias, "none", [], "")

    return multiplied


@cache
def table() -> dict[str, Any]:
    """Return the shipped table."""
    return json.loads(files("headscope._linear").joinpath(TABLE).read_text(encoding="utf-8"))

"""One packed projection as three: the implementation of ``MultiHeadAttention.unpack``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headscope._linear import QKV, Linear, check_own_parameters, is_linear, is_plain, weight_and_bias


def unpack(module: Any) -> Any:
    """Replace the ``qkv_proj`` of a ``MultiHeadAttention`` by three projections, in place.

    Raises:
        ValueError: see ``MultiHeadAttention.unpack``.
    """
    if not module.packed:
        return module
    packed = module.qkv_proj
    check_own_parameters(module, packed)
    if not is_plain(packed) or packed._backward_hooks or packed._backward_pre_hooks:
        what = "has hooks" if is_linear(packed) else f"is a {type(packed).__name__}"
        raise ValueError(f"qkv_proj: {what}, which three projections would not keep; unpack the module first")
    weight, bias = weight_and_bias(packed)
    weights = weight.detach().split(module.splits)
    biases: tuple[Tensor | None, ...] = (None,) * 3 if bias is None else bias.detach().split(module.splits)
    named: dict[str, nn.Module] = {}
    for name, own_weight, own_bias in zip(QKV, weights, biases, strict=True):
        linear = Linear(packed.in_features, len(own_weight), bias=own_bias is not None, device="meta")
        linear.weight = _parameter(own_weight, weight)
        if bias is not None and own_bias is not None:
            linear.bias = _parameter(own_bias, bias)
        linear.reproducible = module.reproducible
        linear.train(packed.training)
        named[f"{name}_proj"] = linear
    others = dict(module._modules)
    module._modules.clear()
    for name, child in others.items():  # in the order of a module that was built with three
        module._modules.update(named if name == "qkv_proj" else {name: child})
    module.packed = False
    return module


def _parameter(part: Tensor, whole: Tensor) -> nn.Parameter:
    return nn.Parameter(part.clone(memory_format=torch.contiguous_format), requires_grad=whole.requires_grad)

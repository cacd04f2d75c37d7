"""Conversions of attention modules: from another module or a state dict, and to a state dict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from headscope._layouts.expressible import check_calls, check_expressible, check_rotary
from headscope._layouts.interface import AttentionModule
from headscope._layouts.messages import describe_keys, list_names
from headscope._layouts.recognise import find_layout, read_options, recognise_layout
from headscope._layouts.sizes import Sizes, infer_options, infer_sizes
from headscope._layouts.state import State, Weights, end_prefix, read_state, read_weights
from headscope._layouts.table import LAYOUTS, HeadSplit, Layout, write_part
from headscope._linear import PROJECTIONS, QKV, check_own_parameters, unknown_projections
from headscope._support.arguments import check_type
from headscope.positions import RelativeBias

Built = TypeVar("Built", bound=AttentionModule)


@dataclass(frozen=True)
class Conversion(Generic[Built]):
    """A module with converted weights, and the source key of each tensor, by headscope's name."""

    module: Built
    keys: dict[str, str]


def convert_module(
    module: nn.Module, layout: str | None, into: Callable[..., Built], base: type[nn.Module], options: dict[str, Any]
) -> Built:
    """Build a module with copies of another module's weights: ``layouts.from_module``.

    Args:
        module: the other module.
        layout: the name of its layout; None = recognise it.
        into: builds the module from its options.
        base: the class of headscope's own modules, for which it raises.
        options: those of the caller.
    """
    check_type("module", module, nn.Module, "a torch.nn.Module")
    if isinstance(module, base):
        raise TypeError(f"module: is already a headscope.{base.__name__}; to copy it, use copy.deepcopy")
    check_own_parameters(module, *module.modules())
    state = module.state_dict(keep_vars=True)
    source = recognise_layout(module, set(state)) if layout is None else find_layout(layout)
    built = _build(source, read_state(state, ""), into, read_options(module, source, options))
    if "rotary" in options:
        check_rotary("rotary", source, built.module)
    trained = {key: isinstance(x, Tensor) and x.requires_grad for key, x in state.items()}
    for name, parameter in built.module.named_parameters():
        sources = [trained[built.keys[ours]] for ours in _tensor_names(name) if ours in built.keys]
        if sources:  # a table passed in does not change
            parameter.requires_grad_(any(sources))
    return built.module.train(module.training)


def convert_state(
    state: State | str | Path, layout: str, prefix: str, into: Callable[..., Built], options: dict[str, Any]
) -> Built:
    """Build a module with copies of the weights in a state dict or in safetensors: ``layouts.from_state_dict``."""
    source = find_layout(layout)
    built = _build(source, read_state(state, prefix), into, options)
    if "rotary" in options:
        check_rotary("rotary", source, built.module)
    return built.module


def _build(
    layout: Layout, state: dict[str, Any], into: Callable[..., Built], options: Mapping[str, Any]
) -> Conversion[Built]:
    missing, unexpected = layout.fit(set(state))
    if missing or unexpected:
        fits = [other.name for other in LAYOUTS.values() if other.fit(set(state)) == ([], [])]
        hint = f"; these keys match {list_names(fits)}" if fits else f"; known layouts: {list_names(LAYOUTS, 99)}"
        raise ValueError(f"state: does not fit layout {layout.name!r}: {describe_keys(missing, unexpected)}{hint}")
    weights = read_weights(layout, state)
    tensors, sizes = weights.tensors, infer_sizes(layout, weights, options)
    inferred = infer_options(layout, weights, sizes, options)
    for name in ("bias_k", "bias_v"):
        if name in tensors:
            tensors[name] = tensors[name].unflatten(0, (sizes.kv_heads, -1))  # [Hkv, D]
    if isinstance(inferred.get("position_bias"), RelativeBias):  # another layer's: shared and not changed
        tensors["position_bias.weight"] = inferred["position_bias"].weight
    module = into(**inferred, device="meta")
    frozen = module.sinks is not None and "sinks" in layout.more  # add_zero_attn=True, in torch's module
    if frozen:
        tensors["sinks"] = tensors["q.weight"].new_zeros(module.num_heads)
    _check_places(layout, module, weights)
    module.load_state_dict({_parameter_name(name): x for name, x in tensors.items()}, assign=True)
    if frozen and module.sinks is not None:
        module.sinks.requires_grad_(False)
    return Conversion(module, weights.keys)


def _check_places(layout: Layout, module: AttentionModule, weights: Weights) -> None:
    """Raise unless each tensor has a parameter of its shape in the module, and each parameter a tensor."""
    places = _list_tensors(module)
    if missing := [name for name in places if name not in weights.tensors]:
        verb = "requires" if len(missing) == 1 else "require"
        raise ValueError(f"options: {list_names(missing)} {verb} weights that layout {layout.name!r} does not have")
    for name, x in weights.tensors.items():
        expected = list(places[name].shape) if name in places else "none, because no option adds it"
        if list(x.shape) != expected:
            key = weights.keys.get(name, name)
            raise ValueError(f"{key}: holds {name} as {list(x.shape)}, expected {expected}")


def export_state(module: AttentionModule, layout: str, prefix: str, base: type[nn.Module]) -> dict[str, Tensor]:
    """Return copies of a module's weights under the keys of a layout: ``layouts.to_state_dict``.

    Args:
        module: of class ``base``, or of a class below it.
        layout: the name of the layout.
        prefix: put before each key.
        base: the class whose ``forward`` a module of the layout computes.
    """
    target = find_layout(layout)
    for name, part in unknown_projections(cast("nn.Module", module)).items():
        raise ValueError(f"module: {name} is a {type(part).__name__}, expected nn.Linear, or a module with its forward")
    check_calls(cast("nn.Module", module), base)
    tensors = _list_tensors(module)
    check_expressible(module, target, tensors)
    sizes = Sizes(module.embed_dim, module.num_heads, module.kv_heads, module.head_dim, module.v_head_dim)
    splits = sizes.splits()
    entries: dict[str, Tensor] = {}
    for part in target.parts:
        if part.optional and not any(name in tensors for name in part.holds):
            continue
        each = [tensors[name] if name in tensors else _zero_bias(module, name) for name in part.holds]
        x = each[0] if len(each) == 1 else torch.cat(each)
        x = write_part(part, x, splits.get(part.holds[0].split(".")[0], HeadSplit(1, 1)))
        entries[end_prefix(prefix) + part.key] = x.clone(memory_format=torch.contiguous_format)
    return entries


def _parameter_name(name: str) -> str:
    """Return the parameter that holds a tensor: q.weight is q_proj.weight."""
    first, _, rest = name.partition(".")
    return f"{first}_proj.{rest}" if first in PROJECTIONS else name


def _tensor_names(parameter: str) -> list[str]:
    """Return the tensors that a parameter holds; a packed projection holds three."""
    first, _, rest = parameter.partition(".")
    if first == "qkv_proj":
        return [f"{name}.{rest}" for name in QKV]
    first = first.removesuffix("_proj")
    return [f"{first}.{rest}" if first in PROJECTIONS else parameter]


def _list_tensors(module: AttentionModule) -> dict[str, Tensor]:
    """Return a module's parameters by headscope's names of tensors."""
    tensors: dict[str, Tensor] = {}
    for name in PROJECTIONS:
        weight, bias = module.projection(name)
        tensors |= {f"{name}.weight": weight} | ({} if bias is None else {f"{name}.bias": bias})
    for name, x in module.named_parameters():
        if name.split(".")[0].removesuffix("_proj") not in (*PROJECTIONS, "qkv"):
            tensors[name] = x
    return {name: x.detach() for name, x in tensors.items()}


def _zero_bias(module: AttentionModule, name: str) -> Tensor:
    """Return zeros for a bias that the module does not have."""
    weight, _ = module.projection(name.split(".")[0])
    return weight.new_zeros(len(weight))

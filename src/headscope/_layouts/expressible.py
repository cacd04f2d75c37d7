"""What a layout can express: the checks of an export, and those that an import shares with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from torch import Tensor, nn

from headscope._layouts.interface import AttentionModule
from headscope._layouts.table import Layout
from headscope.positions import ALiBi

MOST_LAYERS = 1024
"""The largest number of a layer that divides a scale; near a larger one, nearly any small scale would pass."""
OPTIONS = {
    "q": "bias", "k": "bias", "v": "bias", "out": "out_bias", "gate_proj": "gate",
    "q_norm": "qk_norm", "k_norm": "qk_norm", "bias_k": "bias_kv", "bias_v": "bias_kv",
}  # fmt: skip
"""The option that adds a tensor, by the first part of the tensor's name; ``sinks`` and ``position_bias`` are both."""


def describe_changed_calls(module: nn.Module, called: Iterable[str]) -> Iterator[str]:
    """Yield a description of each forward set on the module or a part, and of each part of ``called`` with hooks."""
    parts = dict(module.named_modules(remove_duplicate=False))
    for path, part in parts.items():
        if "forward" in vars(part):
            yield f"{path or type(part).__name__} has a forward set on the instance"
    for path in called:
        if path in parts and (parts[path]._forward_hooks or parts[path]._forward_pre_hooks):
            yield f"{path} has hooks"


def check_calls(module: nn.Module, base: type[nn.Module]) -> None:
    """Raise unless the weights of a module determine its output, computed as by ``base``.

    Raises:
        ValueError: its class or the module itself has another ``forward`` or ``project``, a norm is of another kind, or
            a part has hooks. Hooks of the module itself run around its attention.
    """
    for change in _changes(module, base):
        raise ValueError(
            f"module: {change}, so its output may depend on more than its weights; expected {base.__name__}'s own "
            "forward and parts without hooks"
        )


def _changes(module: nn.Module, base: type[nn.Module]) -> Iterator[str]:
    cls = type(module)
    for name in ("forward", "project"):
        if getattr(cls, name) is not getattr(base, name):
            yield f"{cls.__name__} is a {base.__name__} with a {name} of its own"
    if "project" in vars(module):
        yield f"{cls.__name__} has a project set on the instance"
    yield from describe_changed_calls(module, [name for name, _ in module.named_children()])
    usual = nn.LayerNorm if module.qk_norm == "layer" else nn.RMSNorm
    for name in ("q_norm", "k_norm"):
        norm = getattr(module, name)
        if norm is not None and type(norm).forward is not usual.forward:
            yield f"{name} is a {type(norm).__name__}, whose forward differs from that of a {usual.__name__}"


def check_rotary(argument: str, layout: Layout, module: AttentionModule) -> None:
    """Raise unless a module of the layout can rotate q and k as this one does.

    Modules with rotary positions always rotate whole heads, in halves.

    Raises:
        ValueError: rotary is missing and the layout has it, uses another pairing, or rotates a part of each head.
    """
    rotary = module.rotary
    if "rotary" not in layout.needs:
        return
    if rotary is None or rotary.pairing != "half" or rotary.dim != module.head_dim:
        raise ValueError(
            f"{argument}: rotary does not fit layout {layout.name!r}, which rotates whole heads in halves; expected "
            f"dim {module.head_dim} and pairing 'half', got {rotary}"
        )


def check_expressible(module: AttentionModule, layout: Layout, tensors: dict[str, Tensor]) -> None:
    """Raise unless a module of this layout would compute the same.

    Raises:
        ValueError: the layout does not support an option, or requires one; the message names the option.
    """
    _check_tensors(layout, tensors)
    if module.kv_heads != module.num_heads and not layout.grouped:
        raise ValueError(
            f"module: kv_heads is {module.kv_heads}; layout {layout.name!r} has one key/value head for each query head"
        )
    if isinstance(module.position_bias, ALiBi):
        raise ValueError(f"module: has position_bias ALiBi, which a module of layout {layout.name!r} does not have")
    if module.qk_norm == "rms_all":
        raise ValueError(f"module: qk_norm is 'rms_all'; a module of layout {layout.name!r} has a norm for each head")
    options = {"softcap": module.softcap, "rotary": module.rotary}
    for name, value in options.items():
        if value is not None and name not in layout.needs:
            raise ValueError(f"module: {name} is {value}, which a module of layout {layout.name!r} does not have")
    usual = {"head_dim": module.embed_dim / module.num_heads, "v_head_dim": module.head_dim}
    for name, width in {**usual, "kdim": module.embed_dim, "vdim": module.embed_dim}.items():
        if name not in layout.widths and getattr(module, name) != width:
            got = getattr(module, name)
            raise ValueError(f"module: {name} is {got}; a module of layout {layout.name!r} has {width:g}")
    check_rotary("module", layout, module)
    _check_scale(module, layout)


def _check_tensors(layout: Layout, tensors: dict[str, Tensor]) -> None:
    """Raise unless each tensor has a place in the layout, and each required place a tensor; a bias may be zeros."""
    places = {name for part in layout.parts for name in part.holds}
    unplaced = [name for name in tensors if name not in places]
    if unplaced == ["sinks"] and "sinks" in layout.more and not tensors["sinks"].any():
        unplaced = []  # add_zero_attn=True, in torch's module
    if unplaced:
        raise ValueError(
            f"module: has {', '.join(unplaced)}, which layout {layout.name!r} does not have; expected a module "
            f"without {_options(unplaced)}"
        )
    required = [name for part in layout.parts if not part.optional for name in part.holds]
    missing = [name for name in required if name not in tensors and not name.endswith(".bias")]
    if missing:
        raise ValueError(
            f"module: lacks {', '.join(missing)}, which layout {layout.name!r} requires; expected a module with "
            f"{_options(missing)}"
        )


def _options(names: Iterable[str]) -> str:
    """Return the options that add these tensors."""
    firsts = [name.split(".")[0] for name in names]
    return ", ".join(dict.fromkeys(OPTIONS.get(first, first) for first in firsts))


def _check_scale(module: AttentionModule, layout: Layout) -> None:
    """Raise unless a configuration of the layout has this scale."""
    scales = layout.scales(module.embed_dim, module.head_dim)
    for scale in scales:
        ratio = scale / module.scale if layout.by_layer and module.scale else 1.0
        layer = min(max(round(ratio), 1), MOST_LAYERS)
        if math.isclose(module.scale * layer, scale, rel_tol=1e-6):
            return
    expected = " or ".join(f"{scale:.6g}" for scale in scales)
    divided = ", or one of these divided by the number of a layer" if layout.by_layer else ""
    raise ValueError(f"module: scale is {module.scale:.6g}; a module of layout {layout.name!r} has {expected}{divided}")

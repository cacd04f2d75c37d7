"""The sizes and options that weights determine, and whether they fit each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headscope._layouts.state import Weights
from headscope._layouts.table import HeadSplit, Layout
from headscope._linear import QKV
from headscope._support.arguments import whole
from headscope.positions import RelativeBias


@dataclass(frozen=True)
class Sizes:
    """The sizes of an attention module.

    Attributes:
        embed_dim: E.
        num_heads: H.
        kv_heads: Hkv.
        head_dim: D.
        v_head_dim: Dv.
    """

    embed_dim: int
    num_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int

    def splits(self) -> dict[str, HeadSplit]:
        """Return the heads that each projection is split into, by "q", "k", "v" and "out"."""
        return {
            "q": HeadSplit(self.num_heads, self.head_dim),
            "k": HeadSplit(self.kv_heads, self.head_dim),
            "v": HeadSplit(self.kv_heads, self.v_head_dim),
            "out": HeadSplit(self.num_heads, self.v_head_dim),
        }


def infer_sizes(layout: Layout, weights: Weights, options: Mapping[str, Any]) -> Sizes:
    """Return the sizes of the weights, given the number of heads in ``options`` or in the axes of the weights.

    Raises:
        ValueError: the number of heads is missing, or the weights do not fit it or each other.
    """
    num_heads = _count_heads(layout, weights, options)
    tensors, keys = weights.tensors, weights.keys
    rows = {name: len(tensors[f"{name}.weight"]) for name in QKV}
    where = {name: f"{keys[f'{name}.weight']}: has {rows[name]} rows of {name}, expected" for name in QKV}
    if rows["q"] % num_heads:
        raise ValueError(f"{where['q']} a multiple of num_heads {num_heads}")
    head_dim = rows["q"] // num_heads
    if not head_dim or not rows["k"] or rows["k"] % head_dim or num_heads % (rows["k"] // head_dim):
        raise ValueError(f"{where['k']} head_dim {head_dim} times a divisor of num_heads {num_heads}")
    kv_heads = rows["k"] // head_dim
    if kv_heads != num_heads and not layout.grouped:
        raise ValueError(f"{where['k']} {num_heads} heads of {head_dim}, as q has; got {kv_heads}")
    if rows["v"] % kv_heads:
        raise ValueError(f"{where['v']} a multiple of the {kv_heads} heads of k")
    sizes = Sizes(tensors["q.weight"].shape[1], num_heads, kv_heads, head_dim, rows["v"] // kv_heads)
    _check_shapes(weights, sizes)
    return sizes


def _count_heads(layout: Layout, weights: Weights, options: Mapping[str, Any]) -> int:
    if "q.weight" in weights.splits:
        count = weights.splits["q.weight"].count
        if (got := options.get("num_heads", count)) != count:
            raise ValueError(f"num_heads: got {got!r}, expected {count}, as {weights.keys['q.weight']} has")
        options = {**options, "num_heads": count}
    missing = [name for name in layout.needs if name not in options]
    if missing:
        raise ValueError(
            f"{missing[0]}: missing; the weights do not contain it, and layout {layout.name!r} requires it"
        )
    return whole("num_heads", options["num_heads"])


def _check_shapes(weights: Weights, sizes: Sizes) -> None:
    """Raise unless the tensors have the shapes, and the splits, that follow from the sizes."""
    tensors, keys = weights.tensors, weights.keys
    rows = {name: len(tensors[f"{name}.weight"]) for name in QKV}
    shapes = {"out.weight": [sizes.embed_dim, sizes.num_heads * sizes.v_head_dim], "out.bias": [sizes.embed_dim]}
    shapes |= {f"{name}.bias": [rows[name]] for name in QKV}
    shapes |= {f"bias_{name}": [rows[name]] for name in ("k", "v")}
    shapes |= {f"{name}_norm.{part}": [sizes.head_dim] for name in ("q", "k") for part in ("weight", "bias")}
    for name, shape in shapes.items():
        if name in tensors and list(tensors[name].shape) != shape:
            raise ValueError(f"{keys[name]}: holds {name} as {list(tensors[name].shape)}, expected {shape}")
    splits = sizes.splits()
    for name, split in weights.splits.items():
        if split != (expected := splits[name.split(".")[0]]):
            raise ValueError(
                f"{keys[name]}: has {split.count} heads of {split.width}, expected {expected.count} of {expected.width}"
            )


def infer_options(layout: Layout, weights: Weights, sizes: Sizes, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options of the module: those that the weights determine, the layout's and the caller's.

    Raises:
        ValueError: the caller's options contradict the weights, or an option is missing.
    """
    tensors = weights.tensors
    inferred: dict[str, Any] = {
        "embed_dim": sizes.embed_dim, "num_heads": sizes.num_heads, "kv_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim, "v_head_dim": sizes.v_head_dim,
        "kdim": tensors["k.weight"].shape[1], "vdim": tensors["v.weight"].shape[1],
        "bias": tuple(name for name in QKV if f"{name}.bias" in tensors), "out_bias": "out.bias" in tensors,
        "dtype": tensors["q.weight"].dtype,
    }  # fmt: skip
    if "bias_k" in tensors or "bias_v" in tensors:
        inferred["bias_kv"] = True
    determined = {**inferred, "device": tensors["q.weight"].device, **layout.fixed}
    for name, value in options.items():
        if name != "num_heads" and name in determined:
            raise ValueError(
                f"{name}: expected none, because the weights determine it ({determined[name]!r}); got {value!r}"
            )
    return {**_other_options(layout, weights, sizes, options), **inferred}


def _other_options(layout: Layout, weights: Weights, sizes: Sizes, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not sizes: the caller's, the layout's and those that weights require."""
    others: dict[str, Any] = {**options, **layout.fixed}
    others.pop("num_heads", None)
    others.setdefault("scale", layout.scales(sizes.embed_dim, sizes.head_dim)[0])
    norms = [name for name in weights.tensors if name.startswith(("q_norm.", "k_norm."))]
    if norms and "qk_norm" not in others:
        if not any(name.endswith("bias") for name in norms):
            raise ValueError(
                f'qk_norm: the weights do not show the kind of q_norm (layout {layout.name!r}); pass "rms" or "layer"'
            )
        others["qk_norm"] = "layer"
    if "position_bias.weight" in weights.tensors:
        if "position_bias" not in others:
            raise ValueError(
                "position_bias: missing; the weights contain a table of biases by distance; pass "
                f"positions.T5Buckets with its num_buckets ({len(weights.tensors['position_bias.weight'])}), "
                "max_distance and direction"
            )
        if isinstance(others["position_bias"], RelativeBias):
            own = weights.keys["position_bias.weight"]
            raise ValueError(f"position_bias: expected none, because the state has {own}; got a RelativeBias")
    return others

"""Checks of the inputs of a ``MultiHeadAttention``. ``_multi_head`` runs them; the messages name the argument."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from headscope._attend.context import Context
from headscope._linear import QKV, Linear, check_kind, is_plain
from headscope._support.arguments import check_layout, check_type, kind, shapes
from headscope._support.tensor_classes import check_has_numbers
from headscope.cache import Cache
from headscope.masks import Mask
from headscope.positions import ALiBi, RelativeBias, Rotary


def input_sources(x: Tensor, context: Tensor | tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Return the tensors from which keys and values are projected."""
    if context is None:
        return x, x
    if isinstance(context, Tensor):
        return context, context
    _check_pair(context)
    return context


def check_input(x: Tensor) -> None:
    """Raise unless x is a tensor that projections can read."""
    check_type("x", x, Tensor, "a torch.Tensor")
    check_has_numbers("x", x)
    if x.layout != torch.jagged:
        check_layout("x", x)


def _check_pair(context: object) -> None:
    if isinstance(context, tuple):
        length = len(cast("tuple[Any, ...]", context))
        if length == 2:
            return
        got = f"{length} of them"
    else:
        got = kind(context)
    hint = "; pass a mask by name, mask=" if isinstance(context, Mask) else ""
    raise TypeError(f"context: got {got}, expected a torch.Tensor, or a pair (for the keys, for the values){hint}")


def check_inputs(module: Any, x: Tensor, k_from: Tensor, v_from: Tensor) -> None:
    """Raise unless a module can project these tensors."""
    check_input(x)
    if k_from is x and module.packed and x.ndim in (2, 3) and x.shape[-1] == module.embed_dim:
        return
    expected = (("x", x, module.embed_dim), ("context", k_from, module.kdim), ("context", v_from, module.vdim))
    for name, tensor, width in expected:
        check_type(name, tensor, Tensor, "a torch.Tensor")
        if tensor.is_nested and not x.is_nested:
            raise ValueError(f"{name}: is nested, x is an ordinary tensor of {x.ndim} axes; expected x nested as well")
        if tensor.shape[-1:] != (width,) or tensor.ndim not in (2, 3) or tensor.ndim != x.ndim:
            raise shape_error(name, tensor, width, x)
    if k_from is not x or v_from is not x:
        check_context(x, k_from, v_from)


def check_kinds(module: Any, x: Tensor, k_from: Tensor, v_from: Tensor) -> None:
    """Check dtypes and devices; separate from the sizes, which a trace checks alone."""
    if k_from is x and module.packed:
        check_kind("x", x, module.qkv_proj)
        return
    for part, source in zip(QKV, (x, k_from, v_from), strict=True):
        linear: nn.Module = module.qkv_proj if module.packed else getattr(module, f"{part}_proj")
        check_kind("x" if source is x else "context", source, linear)


def check_context(x: Tensor, k_from: Tensor, v_from: Tensor) -> None:
    """Raise unless the context fits x, and its two parts each other."""
    if x.is_nested:
        return
    for tensor in (k_from, v_from):
        if x.ndim == 3 and tensor.shape[0] != x.shape[0] and tensor.shape[0] != 1 and x.shape[0] != 1:
            expected = f"{x.shape[0]}, as x; {shapes(context=tensor, x=x)}"
            raise ValueError(f"context: axis 0 (B) is {tensor.shape[0]}, expected {expected}")
    if k_from.shape[-2] != v_from.shape[-2]:
        got = f"{v_from.shape[-2]} for the values, expected {k_from.shape[-2]} as for the keys"
        raise ValueError(f"context: axis {v_from.ndim - 2} (K) is {got}; {shapes(keys=k_from, values=v_from)}")


def shape_error(name: str, tensor: Tensor, width: int, x: Tensor) -> ValueError:
    """Return the error of an input whose axes differ from x's 2 or 3, or whose width is wrong."""
    got = f"{name} {list(tensor.shape)}" + ("" if name == "x" else f", x {list(x.shape)}")
    if tensor.ndim not in (2, 3) or tensor.ndim != x.ndim:
        axes = "2 or 3" if name == "x" else f"{x.ndim}, as x"
        return ValueError(f"{name}: has {tensor.ndim} axes, expected {axes} ([B, length, E]); {got}")
    hint = "; without context, the module projects keys and values from x" if tensor is x and name != "x" else ""
    return ValueError(f"{name}: axis {tensor.ndim - 1} (E) is {tensor.shape[-1]}, expected {width}{hint}; {got}")


def check_sliced(qkv_proj: nn.Module) -> None:
    """Raise unless a packed projection is a plain linear: cross-attention uses parts of its weight without calling it.

    Raises:
        ValueError: it has hooks, or another class.
    """
    if is_plain(qkv_proj):
        return
    what = "has hooks" if type(qkv_proj) in (Linear, nn.Linear) else f"is a {type(qkv_proj).__name__}"
    raise ValueError(
        f"qkv_proj: {what}, which cross-attention would skip, because it uses parts of the weight; expected "
        'separate projections, which a module has with bias=("q", "v"), or with a kdim or vdim that is not '
        "embed_dim"
    )


def check_self_attention(option: str, embed_dim: int, **widths: int) -> None:
    """Raise unless keys and values are projected from x, whose positions ``option`` requires."""
    for name, width in widths.items():
        if width != embed_dim:
            raise ValueError(
                f"{name}: got {width}, expected embed_dim {embed_dim}, because {option} requires self-attention"
            )


def check_place(
    rotary: Rotary | None, position_bias: ALiBi | RelativeBias | None, positions: Tensor | None, cache: Cache | None,
    *, cross: bool,
) -> None:  # fmt: skip
    """Raise unless positions, a cache and a context may be combined with the options of a module."""
    located = rotary is not None or position_bias is not None
    if cross and (located or cache is not None):
        if cache is not None:
            raise ValueError("context: expected None together with a cache, which requires self-attention")
        option = "rotary" if rotary is not None else "position_bias"
        raise ValueError(
            f"context: expected None, because this module has {option}, and x and context do not share positions"
        )
    if positions is not None and not located:
        raise ValueError("positions: expected None, because this module has neither rotary nor position_bias")
    if cache is None:
        return
    check_type("cache", cache, Cache, "a cache of headscope.cache")
    if positions is not None:
        raise ValueError("positions: expected None together with a cache, which counts positions itself")
    if rotary is not None and rotary.dynamic:
        raise ValueError(
            "cache: this module has NTK(original_length=...), which rotates earlier keys again as the length "
            "grows; NTK(factor) alone does not"
        )


def positions_in_part(
    parallel: Context, module: Any, x: Tensor, positions: Tensor | None, others: dict[str, object]
) -> Tensor | None:
    """Return the positions of x, which is this rank's part of a sequence; None if the module does not use any.

    Raises:
        ValueError: an argument or option that context parallelism does not support.
    """
    rotary = module.rotary
    others |= {"NTK(original_length=...)": rotary if rotary is not None and rotary.dynamic else None}
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{name}: expected None under context parallelism, where x is a part of one sequence that attends to "
                "itself; call the module outside of parallel.context for that"
            )
    if isinstance(cast("object", x), Tensor) and x.is_nested:
        raise ValueError(
            "x: is a nested tensor, expected this rank's part of one sequence under context parallelism; pack the rows "
            "and pass mask=masks.Documents(...)"
        )
    own = parallel.positions(x.device)
    if x.ndim in (2, 3) and x.shape[-2] != len(own):
        raise ValueError(
            f"x: axis {x.ndim - 2} is {x.shape[-2]}, expected {len(own)}, the positions of this rank, which "
            f"places.shard(x, dim={x.ndim - 2}) takes from a whole sequence; x {list(x.shape)}"
        )
    located = rotary is not None or module.position_bias is not None
    return own if positions is None and located else positions


def check_no_weights(need_weights: bool) -> None:
    """Raise if a module under context parallelism is to return its weights."""
    if need_weights:
        raise ValueError(
            "need_weights: expected False under context parallelism, where each rank holds a part of the rows; watch "
            "the module, or gather q and k (places.join) and call headscope.functional.weights"
        )

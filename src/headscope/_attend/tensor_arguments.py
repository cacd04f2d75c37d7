"""Checks of the tensors of a call: q, k and v, bias and sinks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headscope._support.arguments import FLOATS, check_layout, kind, shapes

AXES = ("B", "H", "Q", "K")


def check_sizes(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, ...]:
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # callers may not be typed
            raise TypeError(f"{name}: got {kind(tensor)}, wanted a torch.Tensor")
        if tensor.layout != torch.jagged:
            check_layout(name, tensor)
        if tensor.layout != q.layout:
            raise TypeError(f"{name}: layout is {tensor.layout}, q has {q.layout}; {shapes(q=q, k=k, v=v)}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dtype not in FLOATS:
            raise TypeError(f"{name}: dtype is {kind(tensor)}, wanted float32, bfloat16, float16 or float64")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name}: dtype is {kind(tensor)}, q has {kind(q)}; convert one of them")
        if tensor.device != q.device:
            raise ValueError(f"{name}: is on {tensor.device}, q is on {q.device}")
        if tensor.ndim < 3:
            raise ValueError(
                f"{name}: has {tensor.ndim} axes, wanted at least 3 ([..., H, length, D]); {shapes(q=q, k=k, v=v)}"
            )
        if tensor.shape[-1] == 0:
            letter = "Dv" if name == "v" else "D"
            where = f"axis {tensor.ndim - 1} ({letter})"
            raise ValueError(f"{name}: {where} is 0, wanted at least 1; {shapes(q=q, k=k, v=v)}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: axis {k.ndim - 1} (D) is {k.shape[-1]}, q has {q.shape[-1]}; {shapes(q=q, k=k, v=v)}")
    if v.shape[-2] != k.shape[-2]:
        raise ValueError(f"v: axis {v.ndim - 2} (K) is {v.shape[-2]}, k has {k.shape[-2]}; {shapes(q=q, k=k, v=v)}")
    heads, kv_heads = q.shape[-3], k.shape[-3]
    if v.shape[-3] != kv_heads and 1 not in (v.shape[-3], kv_heads):
        raise ValueError(f"v: axis {v.ndim - 3} (Hkv) is {v.shape[-3]}, k has {kv_heads}; {shapes(q=q, k=k, v=v)}")
    kv_heads = max(kv_heads, v.shape[-3])
    if kv_heads == 0 or heads % kv_heads:
        wanted = f"a divisor of q's {heads} heads" if heads else "at least 1, as has q's axis H"
        name, of = ("k", k) if k.shape[-3] == kv_heads else ("v", v)
        raise ValueError(f"{name}: axis {of.ndim - 3} (Hkv) is {kv_heads}, wanted {wanted}; {shapes(q=q, k=k, v=v)}")
    if q.shape[:-3] == k.shape[:-3] == v.shape[:-3]:
        return tuple(q.shape[:-3])
    try:  # torch.broadcast_shapes imports sympy when it is first called, for some 0.4 s
        return tuple(torch.broadcast_shapes(q.shape[:-3], k.shape[:-3], v.shape[:-3]))
    except RuntimeError as error:
        raise ValueError(f"q, k, v: the leading axes (B) do not broadcast; {shapes(q=q, k=k, v=v)}") from error


def check_bias(bias: Tensor, lead: tuple[int, ...], last: tuple[int, int, int], q: Tensor) -> None:
    if not isinstance(bias, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"bias: got {kind(bias)}, wanted a torch.Tensor")
    check_layout("bias", bias)
    if bias.dtype not in FLOATS:
        hint = "; a boolean tensor is a mask: pass it as mask=" if bias.dtype == torch.bool else ""
        raise TypeError(f"bias: dtype is {kind(bias)}, wanted a floating one{hint}")
    if bias.device != q.device:
        raise ValueError(f"bias: is on {bias.device}, q is on {q.device}")
    check_broadcast("bias", bias, lead, last)


def check_sinks(sinks: Tensor, heads: int, q: Tensor) -> None:
    if not isinstance(sinks, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"sinks: got {kind(sinks)}, wanted a torch.Tensor")
    check_layout("sinks", sinks)
    if sinks.dtype not in FLOATS:
        raise TypeError(f"sinks: dtype is {kind(sinks)}, wanted a floating one")
    if sinks.device != q.device:
        raise ValueError(f"sinks: is on {sinks.device}, q is on {q.device}")
    if sinks.shape != (heads,):
        raise ValueError(f"sinks: wanted one logit a head, [H] = [{heads}]; {shapes(sinks=sinks, q=q)}")


def check_broadcast(name: str, tensor: Tensor, lead: tuple[int, ...], last: tuple[int, int, int]) -> None:
    """Whether a tensor broadcasts to the weights, [*lead, H, Q, K]."""
    wanted = (*(lead or (1,)), *last)
    letters = ("B",) * (len(wanted) - 3) + AXES[1:]
    if tensor.ndim > len(wanted):
        names = ", ".join(letters)
        wanted_axes = f"at most {len(wanted)} ([{names}])"
        raise ValueError(f"{name}: has {tensor.ndim} axes, wanted {wanted_axes}; {shapes(**{name: tensor})}")
    for axis in range(-1, -tensor.ndim - 1, -1):
        got = tensor.shape[axis]
        if got != 1 and got != wanted[axis]:  # `not in` a compiler answers from the numbers that it knows
            where = f"axis {tensor.ndim + axis} ({letters[axis]})"
            raise ValueError(
                f"{name}: {where} is {got}, wanted {wanted[axis]} or 1; {shapes(**{name: tensor})}, "
                f"the weights are {list(wanted)}"
            )


def fold(tensor: Tensor, lead: tuple[int, ...]) -> Tensor:
    """A tensor that broadcasts to [*lead, H, Q, K] as one that broadcasts to [B, H, Q, K]."""
    if tensor.ndim <= 3 or len(lead) <= 1:
        return tensor
    return tensor.expand(*lead, *tensor.shape[-3:]).reshape(math.prod(lead), *tensor.shape[-3:])  # [B, H, Q, K]

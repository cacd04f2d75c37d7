"""Patterns to call an unknown module or function, from the names of its arguments, the likeliest first."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

WEIGHTS_FLAGS = ("need_weights", "output_attentions", "return_weights", "return_attention", "return_attn")
POSITIONS = ("position_embeddings", "position_ids")
FOREIGN = ("encoder", "memory", "cross", "head_mask")  # parts of names of masks for other purposes


@dataclass(frozen=True)
class CallPattern:
    """One way to call: the value of each argument; ``Ellipsis`` stands for the input. ``text`` describes it."""

    positional: tuple[Any, ...]
    named: dict[str, Any]
    text: str


class BuiltArgument(ABC):
    """An argument that is built from the input."""

    @abstractmethod
    def build(self, x: Tensor) -> Any:
        """Return the argument for x [B, T, E]."""


@dataclass(frozen=True)
class RotaryAngles(BuiltArgument):
    """cos and sin of rotary positions, [1, T, width] each."""

    width: int

    def build(self, x: Tensor) -> tuple[Tensor, Tensor]:
        half = torch.arange(self.width // 2, dtype=torch.float64) * (2 / self.width)
        angles = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * 10000.0**-half
        angles = torch.cat([angles, angles], -1)[None]  # [1, T, width]
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@dataclass(frozen=True)
class PositionIds(BuiltArgument):
    """0, 1, 2, … for each batch entry, [B, T]."""

    def build(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1]).expand(x.shape[:2])


@dataclass(frozen=True)
class ConstantMask(BuiltArgument):
    """A mask that hides nothing, filled with ``value``, for code that does not accept None.

    ``axes`` names its shape: "keys" [B, T], "pairs" [T, T], "all" [B, 1, T, T].
    """

    axes: str
    value: bool

    def build(self, x: Tensor) -> Tensor:
        batch, length = x.shape[:2]
        shape = {"keys": (batch, length), "pairs": (length, length), "all": (batch, 1, length, length)}[self.axes]
        return torch.full(shape, self.value)


MASKS = tuple(ConstantMask(axes, value) for value in (True, False) for axes in ("pairs", "keys", "all"))


def apply_pattern(target: Any, names: tuple[str, ...], pattern: CallPattern, x: Tensor, more: dict[str, Any]) -> Any:
    """Call the target by a pattern; ``more`` holds arguments by name, which replace those of the pattern."""

    def resolve(value: Any) -> Any:
        return x if value is ... else value.build(x) if isinstance(value, BuiltArgument) else value

    positional = [resolve(each) for each in pattern.positional]
    named = {name: resolve(each) for name, each in pattern.named.items()} | more
    for name in list(named):
        if name in names and names.index(name) < len(positional):
            positional[names.index(name)] = named.pop(name)
    return target(*positional, **named)


def argument_names(target: Any) -> tuple[str, ...]:
    """Return the names of the arguments of a call."""
    return tuple(p.name for p in _parameters(target) if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))


def mask_names(target: Any) -> tuple[str, ...]:
    """Return the names of the arguments that accept a mask."""
    flags = {p.name for p in _parameters(target) if isinstance(p.default, bool)}  # whether to mask, not which pairs
    named = (n for n in argument_names(target) if "mask" in n or "pad" in n)
    return tuple(n for n in named if n not in flags and not any(part in n for part in FOREIGN))


def cache_names(target: Any) -> tuple[str, ...]:
    """Return the names of the arguments that may take a cache: not flags, numbers, positions or masks."""
    plain = {p.name for p in _parameters(target) if isinstance(p.default, (bool, int, float))}
    named = (n for n in argument_names(target) if "cache" in n or "past" in n)
    return tuple(n for n in named if n not in plain and not any(part in n for part in ("position", "mask", "pad")))


def cache_flags(target: Any) -> tuple[str, ...]:
    """Return the names of the flags that request a cache."""
    flags = (p.name for p in _parameters(target) if isinstance(p.default, bool))
    return tuple(n for n in flags if n.startswith(("use", "return", "output")) and ("cache" in n or "past" in n))


def takes_input(name: str) -> bool:
    """Return whether an argument of this name expects the input or another tensor like it."""
    if "mask" in name or "pad" in name or name in POSITIONS:
        return False
    bare = name.lower().strip("_0123456789")
    return bare in ("q", "k", "v", "x", "y", "kv", "qs", "ks", "vs", "xq", "xk", "xv", "src", "tgt") or any(
        part in bare for part in ("key", "value", "quer", "context", "memory", "source", "input", "hidden", "embed")
    )


def list_patterns(target: Any, width: int) -> Iterator[CallPattern]:
    """Yield the call patterns, the likeliest first."""
    parameters = _parameters(target)
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    only = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    flags = {p.name: False for p in parameters if p.name in WEIGHTS_FLAGS}
    named: dict[str, Any] = {**only, **flags}
    rest = [p.name for p in plain if p.default is p.empty][1:]
    likely = tuple(... if takes_input(name) else None for name in rest)
    every = tuple(None if "mask" in name or name in POSITIONS else ... for name in rest)
    for values in dict.fromkeys((likely, every)):
        yield CallPattern((..., *values), named, _describe(values))
        for text, more in _position_arguments([p.name for p in parameters], width):
            at = tuple(more.pop(name, value) for name, value in zip(rest, values, strict=True))
            yield CallPattern((..., *at), {**named, **more}, f"{_describe(values)} with {text}")
    if len(plain) >= 3 and len(rest) < 2:
        yield CallPattern((..., ..., ...), named, "(x, x, x)")
    for values in dict.fromkeys((likely, every)):
        for mask in MASKS if any("mask" in name for name in rest) else ():
            at = tuple(mask if "mask" in name else value for name, value in zip(rest, values, strict=True))
            yield CallPattern((..., *at), named, _describe(at))


def _parameters(target: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(target.forward if isinstance(target, nn.Module) else target).parameters.values())
    except (ValueError, TypeError):
        return []


def _describe(values: tuple[Any, ...]) -> str:
    shown = (
        "None" if each is None else f"mask=all {each.value}" if isinstance(each, ConstantMask) else "x"
        for each in values
    )
    return f"({', '.join(['x', *shown])})"


def _position_arguments(names: list[str], width: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield position arguments: their description, and the values by name."""
    if "position_ids" in names:
        yield "position_ids", {"position_ids": PositionIds()}
    if "position_embeddings" in names:
        for size in (n for n in range(2, width + 1, 2) if width % n == 0):
            yield "cos and sin", {"position_embeddings": RotaryAngles(size)}

"""What ``watch`` was asked for, and what a recording says of it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headscope import __version__
from headscope._intercept.call import Kind
from headscope._intercept.module_names import Choice
from headscope.stats import Observe
from headscope.stats._origin import Origin, Part
from headscope.watching._monitor import Limits, Monitor
from headscope.watching._origin import origin_of


@dataclass(frozen=True)
class About:
    """What a recording is of.

    Attributes:
        model: its class, and the name it was loaded under if it says one.
        options: what was asked for, as text or numbers.
        versions: of headscope, torch and, where it is loaded, transformers.
        kinds: layer -> "self" or "cross".
        texts: the text of each token, or None.
        forwards: how many forward passes were looked at.
        ran: how many there were.
        origin: class and configuration of the model, widths and part of the heads of each layer; None = not stated.
    """

    model: str = ""
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    kinds: Mapping[str, Kind] = field(default_factory=dict[str, Kind])
    texts: tuple[str, ...] | None = None
    forwards: int = 0
    ran: int = 0
    origin: Origin | None = None

    @property
    def part(self) -> Mapping[str, Part]:
        """Layer -> the part of its heads that was recorded; layers with all of their heads are not listed."""
        return {} if self.origin is None else self.origin.part


@dataclass(frozen=True, eq=False)
class Options:
    """What was asked for; see ``watch``."""

    what: Observe
    every: int
    tokens: Tensor | Literal["inputs"] | None
    kinds: Mapping[str, Kind]
    positions: Tensor | None
    accelerate: bool
    unseen: Literal["error", "ignore"]
    monitor: Monitor | None


def check(
    tokens: object,
    positions: object,
    kinds: Mapping[str, object],
    unseen: object,
    alarms: object,
    texts: Iterable[object],
) -> None:
    """Refuse what ``watch`` cannot be asked for."""
    if not (tokens is None or isinstance(tokens, Tensor) or tokens == "inputs"):
        raise ValueError(f'tokens: got {tokens!r}, wanted a tensor of ids or "inputs"')
    if isinstance(tokens, Tensor):
        Observe(tokens=tokens)  # judges the dtype
        if not tokens.ndim:
            raise ValueError("tokens: got a single number, wanted [K] or [B, K]")
    if positions is not None and not isinstance(positions, Tensor):
        raise TypeError(f"positions: got {type(positions).__name__}, wanted a torch.Tensor or None")
    if isinstance(positions, Tensor):
        if positions.dtype == torch.bool or positions.dtype.is_complex:
            dtype = str(positions.dtype).removeprefix("torch.")
            raise TypeError(f"positions: dtype is {dtype}, wanted numbers")
        if not 1 <= positions.ndim <= 3:
            raise ValueError(f"positions: got {list(positions.shape)}, wanted [K], [K, 2] or [B, K, 1 or 2]")
    for kind in kinds.values():
        if kind not in ("self", "cross"):
            raise ValueError(f'kinds: got {kind!r}, wanted "self" or "cross"')
    if unseen not in ("error", "ignore"):
        raise ValueError(f'unseen: got {unseen!r}, wanted "error" or "ignore"')
    if not isinstance(alarms, (bool, Limits)):
        raise TypeError(f"alarms: got {type(alarms).__name__}, wanted True, False or Limits")
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"texts: got {type(text).__name__}, wanted a str for each token")


def about_of(model: nn.Module, options: Options, layers: Choice | None, texts: tuple[str, ...] | None) -> About:
    """What a recording of ``model`` is of, before the first forward pass."""
    loaded = getattr(getattr(model, "config", None), "_name_or_path", "")
    name = type(model).__name__ + (f" ({loaded})" if loaded else "")
    what = options.what
    said: dict[str, Any] = {each.name: _plain(getattr(what, each.name)) for each in fields(what)}
    said |= {each: _plain(getattr(options, each)) for each in ("every", "kinds", "positions", "accelerate")}
    said |= {"tokens": _plain(options.tokens) or said["tokens"], "layers": _plain(layers)}
    versions = {"headscope": __version__, "torch": torch.__version__}
    if "transformers" in sys.modules:
        versions["transformers"] = sys.modules["transformers"].__version__
    return About(name, said, versions, {}, texts, origin=origin_of(model))


def _plain(value: Any) -> Any:
    """An option as JSON has it; a tensor or a function by its kind."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return type(value).__name__

"""The options of ``watch``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from headscope._intercept import Kind
from headscope.stats import Observe
from headscope.watching._monitor import Limits, Monitor


@dataclass(frozen=True, eq=False)
class Options:
    """The options; see ``watch``."""

    what: Observe
    every: int
    tokens: Tensor | Literal["inputs"] | None
    kinds: Mapping[str, Kind]
    positions: Tensor | None
    accelerate: bool
    unseen: Literal["error", "ignore"]
    monitor: Monitor | None
    verify: int = 0
    weights: Mapping[str, Collection[int]] | None = None
    recording_gib: float = 0.0


def check(
    tokens: object,
    positions: object,
    kinds: Mapping[str, object],
    unseen: object,
    alarms: object,
) -> None:
    """Check the arguments of ``watch``.

    Raises:
        TypeError, ValueError: an argument of another kind.
    """
    if not (tokens is None or isinstance(tokens, Tensor) or tokens == "inputs"):
        raise ValueError(f'tokens: got {tokens!r}, expected a tensor of ids or "inputs"')
    if isinstance(tokens, Tensor):
        Observe(tokens=tokens)  # judges the dtype
        if not tokens.ndim:
            raise ValueError("tokens: got a single number, expected [K] or [B, K]")
    if positions is not None and not isinstance(positions, Tensor):
        raise TypeError(f"positions: got {type(positions).__name__}, expected a torch.Tensor or None")
    if isinstance(positions, Tensor):
        if positions.dtype == torch.bool or positions.dtype.is_complex:
            dtype = str(positions.dtype).removeprefix("torch.")
            raise TypeError(f"positions: dtype is {dtype}, expected numbers")
        if not 1 <= positions.ndim <= 3:
            raise ValueError(f"positions: got {list(positions.shape)}, expected [K], [K, 2] or [B, K, 1 or 2]")
    for kind in kinds.values():
        if kind not in ("self", "cross"):
            raise ValueError(f'kinds: got {kind!r}, expected "self" or "cross"')
    if unseen not in ("error", "ignore"):
        raise ValueError(f'unseen: got {unseen!r}, expected "error" or "ignore"')
    if not isinstance(alarms, (bool, Limits)):
        raise TypeError(f"alarms: got {type(alarms).__name__}, expected True, False or Limits")


def texts_of(texts: object) -> tuple[str, ...] | None:
    """Return the text of each token.

    Raises:
        TypeError: it is not a collection of texts.
    """
    if texts is None:
        return None
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise TypeError(f"texts: got {type(texts).__name__}, expected a list with a str for each token")
    tokens: list[str] = []
    for text in cast("Iterable[object]", texts):
        if not isinstance(text, str):
            raise TypeError(f"texts: got {type(text).__name__}, expected a str for each token")
        tokens.append(text)
    return tuple(tokens)

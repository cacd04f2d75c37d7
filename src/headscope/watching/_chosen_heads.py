"""The heads whose weights a watch retains: in which layers, and up to which size."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Collection, Mapping, Sized
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from headscope._intercept import Choice, InterceptedCall, WatchWarning, match_modules
from headscope._support.arguments import check_type
from headscope._support.user_line import user_stacklevel
from headscope.stats import Observe

RECORDING_GIB = 8.0
"""The largest size of the weights of chosen heads of a recording, in GiB, by default."""
_GIB = 1 << 30

Chosen = Mapping[str, Collection[int]]


def check_chosen_heads(
    what: Observe, weights: object, limit: float | None, layers: Choice | None
) -> tuple[Observe, Choice | None]:
    """Return what to measure and the layers to record, by the arguments of ``watch``.

    Raises:
        TypeError: ``weights`` is not a mapping from names.
        ValueError: the heads were passed twice, there are none, or the limit is not above 0.
    """
    if limit is not None:
        what = replace(what, weights_gib=limit)
    if weights is None:
        return what, layers
    check_type("weights", weights, Mapping, "a mapping from names or patterns of layers to heads")
    for layer, heads in cast("Mapping[object, object]", weights).items():
        check_type("weights", layer, str, "names or patterns of layers, such as 'decoder.layers.3.encoder_attn'")
        if isinstance(heads, Sized) and not len(heads):
            raise ValueError(f"weights: {layer!r} has no heads; expected at least one, such as [0, 5]")
    if not weights:
        raise ValueError("weights: got no layers, expected at least one, or None")
    if what.weights:
        raise ValueError("weights: was passed twice, here and in what.weights")
    others = (what.row_stats, what.received, what.map, what.edges, what.top, what.keep_qk)
    return what, (tuple(cast("Chosen", weights)) if layers is None and not any(others) else layers)


class ChosenHeads:
    """The chosen heads of each layer, and the size of their weights so far.

    Args:
        modules: those of the model, by name.
        chosen: names of the modules that are recorded.
        what: what to measure of every layer.
        weights: name or pattern -> heads, as for ``watch``; or None.
        limit: the largest size of all weights of the recording, in GiB.

    Raises:
        TypeError: heads that are not whole numbers.
        ValueError: a pattern does not match any module that is recorded, or heads are below 0 or named twice.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        chosen: Collection[str],
        what: Observe,
        weights: Chosen | None,
        limit: float,
    ) -> None:
        self.what = what
        self.limit = limit
        self.size = 0
        self._heads: dict[str, set[int]] = {}
        self._patterns: dict[str, set[str]] = {}
        self._recorded: set[str] = set()
        self._options: dict[tuple[int, ...], Observe] = {tuple(what.weights): what}
        self._lock = threading.Lock()
        for pattern, heads in ({} if weights is None else weights).items():
            names = [name for name in match_modules(modules, pattern, "weights") if name in chosen]
            if not names:
                raise ValueError(f"weights: {pattern!r} does not match any module that layers= selects")
            self._patterns[pattern] = {*names}
            for name in names:
                self._heads.setdefault(name, set()).update(Observe(weights=heads).weights)

    def options(self, name: str, call: InterceptedCall) -> Observe:
        """Return what to measure of a call of a module; the weights of its chosen heads count from here on.

        Raises:
            ValueError: the weights of the recording would be larger than the limit.
        """
        heads = self.heads(name)
        what = self.options_of(heads)
        if heads:
            self._reserve(what, call)
            self._recorded.add(name)
        return what

    def options_of(self, heads: tuple[int, ...]) -> Observe:
        """Return what to measure of calls with these chosen heads."""
        if heads not in self._options:
            self._options[heads] = replace(self.what, weights=heads)
        return self._options[heads]

    def heads(self, name: str) -> tuple[int, ...]:
        """Return the chosen heads of a module."""
        return (*self.what.weights, *sorted(self._heads.get(name, ())))

    def reserve_again(self, name: str, size: int) -> bool:
        """Count so many bytes of weights of a call like an earlier one, unless the recording would be too large."""
        with self._lock:
            if self.size + size > self.limit * _GIB:
                return False
            self.size += size
        self._recorded.add(name)
        return True

    def release(self, size: int) -> None:
        """Count so many bytes of weights less: they were not computed."""
        with self._lock:
            self.size -= size

    def warn_of_unused(self) -> None:
        """Warn of patterns that do not match any layer that was recorded."""
        unused = [pattern for pattern, names in self._patterns.items() if not names & self._recorded]
        if unused:
            warnings.warn(
                f"watch: weights: {unused[0]!r} does not match any layer that was recorded",
                WatchWarning,
                stacklevel=user_stacklevel(),
            )

    def _reserve(self, what: Observe, call: InterceptedCall) -> None:
        lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (call.q, call.k, call.v) if x is not None))
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        sizes = math.prod(lead), call.q.shape[-2], call.k.shape[-2]
        with self._lock:
            self.size += what.check_weights(sizes, dtype, self.size, self.limit)

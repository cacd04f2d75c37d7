"""The modules that an earlier watch has followed without a need: the next one does not follow them again.

To follow every operation of a first forward pass costs as much as the pass of a small model. What counts is that a
module would run the same code: its forward, and its attributes that are numbers, texts or truth values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_followed: WeakKeyDictionary[nn.Module, tuple[Any, ...]] = WeakKeyDictionary()
_PLAIN = (bool, int, float, str)


def note_followed(modules: Iterable[nn.Module]) -> None:
    """Note modules that were followed, and in which no attention was found that requires it."""
    for module in modules:
        _followed[module] = _state_of(module)


def followed_before(modules: Mapping[str, nn.Module]) -> set[str]:
    """Return the names of those that were, and are in the same state."""
    known = {name: _followed[module] for name, module in modules.items() if module in _followed}
    return {name for name, state in known.items() if state == _state_of(modules[name])}


def _state_of(module: nn.Module) -> tuple[Any, ...]:
    attributes = vars(module)
    plain = tuple((name, value) for name, value in attributes.items() if type(value) in _PLAIN)
    config: Any = attributes.get("config")  # of transformers; its attention function may change between watches
    return attributes.get("forward", type(module).forward), plain, getattr(config, "_attn_implementation", None)

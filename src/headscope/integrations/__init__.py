"""Monitors of attention for trainers: one line each, values through the trainer's own logger.

Each class loads its trainer's package on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headscope.integrations._lightning import LightningMonitor
    from headscope.integrations._torchtitan import TorchtitanMonitor
    from headscope.integrations._transformers import TrainerMonitor

_HOME = {"LightningMonitor": "_lightning", "TorchtitanMonitor": "_torchtitan", "TrainerMonitor": "_transformers"}

__all__ = ["LightningMonitor", "TorchtitanMonitor", "TrainerMonitor"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

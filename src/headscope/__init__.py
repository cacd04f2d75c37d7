"""Multi-head attention for PyTorch that is fast, exact, and open to inspection.

The public names resolve on first use, so ``import headscope`` adds almost no time to ``import torch``.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # as in typing, whose import takes longer than this whole module
__version__ = "0.2.0.dev0"

_HOME = {
    "Attended": "functional",
    "Findings": "checking",
    "HeadStats": "stats",
    "History": "watching",
    "MultiHeadAttention": "module",
    "Observe": "stats",
    "Recording": "watching",
    "Segments": "stats",
    "Trace": "tracing",
    "ablate": "heads",
    "attend": "functional",
    "attention": "functional",
    "check": "checking",
    "check_model": "checking",
    "head_importance": "heads",
    "load_example": "examples",
    "observe": "functional",
    "trace": "tracing",
    "watch": "watching",
}

__all__ = [
    "Attended",
    "Findings",
    "HeadStats",
    "History",
    "MultiHeadAttention",
    "Observe",
    "Recording",
    "Segments",
    "Trace",
    "ablate",
    "attend",
    "attention",
    "cache",
    "check",
    "check_model",
    "head_importance",
    "layouts",
    "load_example",
    "masks",
    "nn_compat",
    "observe",
    "onnx",
    "parallel",
    "positions",
    "survey",
    "trace",
    "watch",
]

if TYPE_CHECKING:
    from typing import Any

    from headscope import cache, layouts, masks, nn_compat, onnx, parallel, positions, survey
    from headscope.checking import Findings, check, check_model
    from headscope.examples import load_example
    from headscope.functional import Attended, attend, attention, observe
    from headscope.heads import ablate, head_importance
    from headscope.module import MultiHeadAttention
    from headscope.stats import HeadStats, Observe, Segments
    from headscope.tracing import Trace, trace
    from headscope.watching import History, Recording, watch


def __getattr__(name: str) -> Any:
    if name in ("cache", "layouts", "masks", "nn_compat", "onnx", "parallel", "positions", "survey"):
        return import_module(f"headscope.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'headscope' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(import_module(f"headscope.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

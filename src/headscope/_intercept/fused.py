"""Fused attention calls that ``watch`` cannot record: it warns of them.

It detects three kinds. Operators of ``torch.ops``, and those of ``torch`` that start with an underscore, go through
torch's function modes. ``flex_attention`` and TorchScript functions do not, so one function of each is replaced while a
watch is open.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

OPERATORS = (OpOverload, OpOverloadPacket)
PRIVATE: frozenset[Any] = frozenset(
    getattr(torch, name) for name in dir(torch) if name.startswith("_") and "attention" in name
)
"""``torch._scaled_dot_product_attention_math`` and its like."""

_ATTENTION = re.compile(r"attention|attn")
_NOT_ATTENDING = re.compile(r"backward|bwd|^headscope")
_FLEX = "torch.nn.attention.flex_attention"
_FLEX_CHECK = "_validate_sdpa_input"  # the first function of its module that flex_attention calls with q, k and v


def operator_name(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the name of an operator that attends; None for any other function.

    An operator attends if its name contains "attention" and it is called with three floating tensors, which may be q,
    k, v.
    """
    if function in PRIVATE:
        name = f"torch.{function.__name__}"
    elif isinstance(function, OPERATORS):
        name = str(function).removesuffix(".default")
    else:
        return None
    if not _ATTENTION.search(name) or _NOT_ATTENDING.search(name):
        return None
    floating = sum(isinstance(x, Tensor) and x.is_floating_point() for x in (*args, *kwargs.values()))
    return name if floating >= 3 else None


class Patches:
    """The functions that are replaced while a watch is open.

    Args:
        note: gets the name of each call that attends.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._flex_check = functools.cache(self._flex_check_of)  # one object: dynamo recompiles for another
        self._call: Callable[..., Any] = torch.jit.ScriptFunction.__call__
        self._check: Callable[..., Any] | None = None

    def install(self) -> None:
        """Replace what TorchScript functions and flex_attention call."""
        self._call = torch.jit.ScriptFunction.__call__
        torch.jit.ScriptFunction.__call__ = self._scripted_call()
        flex = sys.modules.get(_FLEX)
        self._check = None if flex is None else vars(flex).get(_FLEX_CHECK)
        if flex is not None and self._check is not None:
            vars(flex)[_FLEX_CHECK] = self._flex_check(self._check)

    def remove(self) -> None:
        """Restore the original functions."""
        torch.jit.ScriptFunction.__call__ = self._call
        if self._check is not None:
            vars(sys.modules[_FLEX])[_FLEX_CHECK] = self._check

    def _scripted_call(self) -> Callable[..., Any]:
        original, note = self._call, self._note

        def call(function: Any, /, *args: Any, **kwargs: Any) -> Any:
            if _attends(function.inlined_graph):
                note(f"the TorchScript function {function.name}")
            return original(function, *args, **kwargs)

        return call

    def _flex_check_of(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = self._note

        def check(*args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():  # dynamo would guard on the notes, and recompile for each watch
                note("flex_attention")
            return original(*args, **kwargs)

        return check


def _attends(graph: Any) -> bool:
    """Return whether a graph of TorchScript, or a block inside it, has an operator that attends."""
    return any(
        _ATTENTION.search(node.kind()) or any(_attends(block) for block in node.blocks()) for node in graph.nodes()
    )

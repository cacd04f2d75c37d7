"""What the tests of trace share: modules, a trace with every feature, and printing."""

from __future__ import annotations

import io
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from headscope import MultiHeadAttention, functional, masks, trace
from headscope.tracing import Trace


def made(*args: Any, **options: Any) -> MultiHeadAttention:
    """A module whose biases and sinks are not zero, so that losing one shows."""
    module = MultiHeadAttention(*args, **options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias") or name == "sinks":
                parameter.normal_()
    return module


def printed(found: Trace, width: int = 80, *, explain: bool = False, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    console = Console(file=io.TextIOWrapper(raw, encoding, write_through=True), width=width, color_system=None)
    console.print(found.table(explain=explain))
    return raw.getvalue().decode(encoding)


def words(text: str) -> str:
    return " ".join(text.split())


def rich_trace() -> Trace:
    module = made(20, 4, kv_heads=2, softcap=2.0, sinks=True, scale=20**-0.5)
    return trace(module, torch.randn(2, 5, 20), torch.randn(2, 7, 20), mask=masks.KeyLengths(torch.tensor([3, 0])))


class WithoutOutput(MultiHeadAttention):
    """Leaves out the output projection."""

    def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
        heads = functional.attention(*self.project(x), scale=self.scale)
        return heads.transpose(1, 2).flatten(2)

"""What the tests of trace share: modules, a trace with every feature, and printing."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from headscope import MultiHeadAttention, functional, masks, trace
from headscope.tracing import Trace


def made(*args: Any, **options: Any) -> MultiHeadAttention:
    """A module whose biases, sinks and gains are not 0 or 1, so that losing one shows."""
    module = MultiHeadAttention(*args, **options)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("bias", "norm.weight", "position_bias.weight")) or name == "sinks":
                parameter.normal_()
    return module


ROUGH = {"bfloat16": 3e-2, "float16": 4e-3, "float64": 1e-9}  # tolerances of code in the dtype of x


def run_rows(found: Trace, module: MultiHeadAttention, x: Tensor, context: Any, call: dict[str, Any]) -> None:
    """Run the code of each row, and compare its result with what the row shows; then run the whole program."""
    rough = ROUGH.get(str(x.dtype)[6:], 2e-5)
    space = {"torch": torch, "F": F, "module": module, "x": x, "context": context, **call}
    with torch.no_grad():
        for row in found.rows:
            exec(row.code, space)
            if row.stage == 1:
                continue
            value = space[row.code.split("\n")[-1].split(" ")[0]]
            assert list(value.shape) == row.shape, row.step
            assert str(value.dtype) == f"torch.{row.dtype}", row.step
            first = value[(0,) * (value.ndim - 2)][:4, :4].double()
            corner = torch.tensor(row.corner, dtype=torch.float64).reshape(first.shape)
            message = lambda text, step=row.step: f"{step}: {text}"  # noqa: E731
            torch.testing.assert_close(corner, first, atol=rough, rtol=rough, msg=message)
        everything = {"module": module, "x": x, "context": context, **call}
        exec(found.code, everything)
    assert found.output is not None
    torch.testing.assert_close(everything["out"], found.output, atol=rough, rtol=rough)


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

"""check: right modules that it called wrong, each next to a wrong one that it must still find."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headscope import check

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
H, D = 3, 5
E = H * D


class Layer(nn.Module):
    """Three heads of five numbers around a function of queries, keys and values [B, H, T, D]."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(E, E) for _ in range(4))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (H, D)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))


# ---------------------------------------------------------------- a scale before the product, in windows


def in_windows(attend: Attend) -> Attend:
    """Attend inside windows of four tokens, [B, H, W, 4, D], as Swin does."""
    return lambda q, k, v: attend(*(x.unflatten(2, (-1, 4)) for x in (q, k, v))).flatten(2, 3)


def dilated(attend: Attend) -> Attend:
    """Attend to every third token, [B, H, 3, T/3, D]."""

    def split(x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, 3)).transpose(2, 3)

    return lambda q, k, v: attend(split(q), split(k), split(v)).transpose(2, 3).flatten(2, 3)


@pytest.mark.parametrize("places", [in_windows, dilated])
@pytest.mark.parametrize(("of_q", "of_k"), [(D**-0.5, 1.0), (1.0, D**-0.5), (D**-0.25, D**-0.25)])
def test_scale_of_an_operand_in_windows(places: Callable[[Attend], Attend], of_q: float, of_k: float) -> None:
    layer = Layer(places(lambda q, k, v: ((q * of_q) @ (k * of_k).mT).softmax(-1) @ v))
    findings = check(layer, inputs=torch.randn(2, 12, E))
    assert findings.names == ()
    assert "scale 0.4472 = 1/√D" in findings.understood


def test_missing_scale_in_windows() -> None:
    layer = Layer(in_windows(lambda q, k, v: (q @ k.mT).softmax(-1) @ v))
    assert check(layer, inputs=torch.randn(2, 12, E)).names == ("scale-missing",)

"""A watch follows the operations of a model once: not again where an earlier watch found nothing to follow."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch.nn import functional as F

from headscope import watch


class Layer(nn.Module):
    """Attends by SDPA, or writes it out; ``modes``: how many dispatch modes were on in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.written_out = False
        self.modes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(_len_torch_dispatch_stack())
        if self.written_out:
            return (x @ x.mT / x.shape[-1] ** 0.5).softmax(-1) @ x
        return F.scaled_dot_product_attention(x, x, x)


def run(model: nn.Module, x: Tensor) -> float:
    with watch(model) as recording:
        model(x)
    return recording.stats[0, "entropy"].mean.mean().item()


def test_the_first_watch_of_a_model_follows_it_and_the_next_does_not() -> None:
    layer, x = Layer(), torch.randn(1, 2, 5, 4)
    first, second = run(layer, x), run(layer, x)
    assert first == second
    assert layer.modes == [1, 0]


def test_a_layer_that_writes_its_attention_out_is_followed_in_every_watch() -> None:
    layer, x = Layer(), torch.randn(1, 2, 5, 4)
    layer.written_out = True
    assert run(layer, x) == run(layer, x)
    assert layer.modes == [1, 1]


@pytest.mark.parametrize("change", ["attribute", "forward"])
def test_a_changed_layer_is_followed_again(change: str) -> None:
    layer, x = Layer(), torch.randn(1, 2, 5, 4)
    expected = run(layer, x)
    if change == "attribute":
        layer.written_out = True
    else:
        layer.forward = lambda x: (x @ x.mT / 2).softmax(-1) @ x  # pyright: ignore[reportAttributeAccessIssue]
    assert run(layer, x) == pytest.approx(expected, rel=1e-5), "in its first pass"


def test_another_layer_of_the_same_class_is_followed() -> None:
    x = torch.randn(1, 2, 5, 4)
    layers = Layer(), Layer()
    assert [run(layer, x) for layer in layers] == [run(layers[1], x)] * 2
    assert [layer.modes for layer in layers] == [[1], [1, 0]]

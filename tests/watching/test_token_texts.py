"""watch: the texts of the tokens, which have to be those of some layer's queries or keys."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import headscope
from headscope import Observe, watch
from support.watched_small import Small, input_of


class Crossed(nn.Module):
    """Self-attention over a text, then cross-attention to another."""

    def __init__(self) -> None:
        super().__init__()
        self.own = headscope.MultiHeadAttention(8, 2)
        self.other = headscope.MultiHeadAttention(8, 2)

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        return self.other(self.own(x), to)


@pytest.mark.parametrize("count", [0, 1, 2, 6, 8, 9])
def test_texts_that_fit_no_layer_are_refused(count: int) -> None:
    model = Small()
    said = f"texts: got {count} tokens?, expected one for each query or key of a layer: 7"
    with pytest.raises(ValueError, match=f"^{said}$"), watch(model, texts=["x"] * count) as seen:
        model(input_of(model))
    assert seen.layers == ("plain", "ours", "theirs"), "what was seen is there all the same"


@pytest.mark.parametrize("count", [5, 11])
def test_texts_may_be_of_some_layers_alone(count: int) -> None:
    model = Crossed()
    with watch(model, texts=["x"] * count) as seen:
        model(torch.randn(1, 5, 8), torch.randn(1, 11, 8))
    assert seen.texts == ("x",) * count
    with (
        pytest.raises(ValueError, match=r"^texts: got 7 tokens, expected .* a layer: 5 or 11$"),
        watch(model, texts=["x"] * 7),
    ):
        model(torch.randn(1, 5, 8), torch.randn(1, 11, 8))


@pytest.mark.parametrize("received", [True, False])
@pytest.mark.parametrize("count", [5, 7, 11])
def test_of_calls_of_different_lengths_texts_are_at_most_those_of_the_longest(count: int, received: bool) -> None:
    model = headscope.MultiHeadAttention(8, 2)
    with watch(model, what=Observe(received=received), texts=["x"] * count) as seen:
        for length in (5, 11):
            model(torch.randn(1, length, 8))
    assert len(seen.texts or ()) == count


def test_texts_of_more_than_the_longest_call_are_refused() -> None:
    attention = headscope.MultiHeadAttention(8, 2)
    model = nn.Sequential(attention, nn.ConstantPad1d((0, 0, 0, 6), 0.0), attention)
    said = "^texts: got 12 tokens, expected one for each query or key of a layer: up to 11$"
    with pytest.raises(ValueError, match=said), watch(model, texts=["x"] * 12):
        model(torch.randn(1, 5, 8))


def test_an_error_of_the_model_is_told_before_one_of_texts() -> None:
    with pytest.raises(KeyError), watch(nn.Identity(), texts=["x"]):
        raise KeyError

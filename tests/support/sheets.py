"""Small sheets of known weights, for the tests of what is shown."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headscope.report import Sheet, image_sheet, text_sheet

TRACE = [
    {
        "step": "mask <b>",
        "stage": 4,
        "equation": "s[i, j] ← −∞ where j > i",
        "code": "s = s.masked_fill(~seen, -torch.inf)",
        "axes": {"B": 1, "H": 3},
        "shape": [1, 3],
        "dtype": "float32",
        "corner": [[0.5, "-Infinity"], [1.25, -0.5]],
        "invariant": "no weight on the future",
        "held": True,
        "why": "why",
        "mistake": "polarity",
        "note": None,
    }
]


def softmax(heads: int, length: int, *, causal: bool = True, seed: int = 0) -> Tensor:
    scores = 2 * torch.randn(heads, length, length, generator=torch.Generator().manual_seed(seed))
    if causal:
        scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
    return torch.softmax(scores, -1)


def text(tokens: list[str], *, layers: int = 2, heads: int = 3, causal: bool = True, **options: Any) -> Sheet:
    weights = [softmax(heads, len(tokens), causal=causal, seed=layer) for layer in range(layers)]
    return text_sheet("a title", tokens, weights, causal=causal, **options)


def words(length: int) -> list[str]:
    return [f" w{n % 5}" for n in range(length)]


def digit() -> NDArray[np.uint8]:
    image = np.zeros((5, 7), np.uint8)
    image[1:4, 2:5] = np.arange(9, dtype=np.uint8).reshape(3, 3) * 20 + 80
    return image


def picture(layers: int = 2, heads: int = 3) -> Sheet:
    weights = [softmax(heads, 35, causal=False, seed=layer) for layer in range(layers)]
    return image_sheet("a digit", digit(), (5, 7), weights, trace=TRACE, footer={"Model": "none"})

"""check and check_model: errors of arguments name the argument, its value, what it may be, and another way."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from headscope import check, check_model

SIZE = "expected a whole number from 1 to 1000000000"
FUNCTION = "expected a function"


def attend(x: Tensor) -> Tensor:
    return (x @ x.mT * 5**-0.5).softmax(-1) @ x


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_means": "drop"}, "mask_means: got 'drop', expected \"keep\" (True = attend), "),
        ({"mask_means": True}, 'mask_means: got True, expected "keep"'),
        ({"heads": 0}, f"heads: got 0, {SIZE}, or None to accept any"),
        ({"heads": 2.5}, f"heads: got 2.5, {SIZE}"),
        ({"heads": "3"}, f"heads: got '3', {SIZE}"),
        ({"heads": True}, f"heads: got True, {SIZE}"),
        ({"embed_dim": -1}, f"embed_dim: got -1, {SIZE}, or None to derive it from the weights"),
        ({"scale": "x"}, "scale: got 'x', expected a finite number above 0, such as 0.3536, or None for 1/√D"),
        ({"scale": math.nan}, "scale: got nan, expected a finite number"),
        ({"length": -1}, f"length: got -1, {SIZE}"),
        ({"batch_first": "no"}, "batch_first: got 'no', expected True, False, or None"),
        ({"causal": "yes"}, "causal: got 'yes', expected True, False, or None"),
        ({"strict": 1}, "strict: got 1, expected True or False"),
        ({"decode": 3}, f"decode: got 3, {FUNCTION}"),
        ({"call": 3}, f"call: got 3, {FUNCTION}"),
        ({"ignore": 3}, 'ignore: got 3, expected names of findings, such as "scale-unusual"'),
        ({"only": {"a": 1}}, "only: got dict, expected names of findings"),
        ({"inputs": "x"}, "inputs: got 'x', expected a tensor [B, T, E]"),
        ({"inputs": np.zeros((2, 7, 5))}, "inputs: got ndarray, expected a tensor [B, T, E]"),
    ],
)
def test_an_impossible_argument_of_check(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}"):
        check(attend, **{"embed_dim": 5, **options})


def test_numbers_of_numpy_are_arguments() -> None:
    assert check(attend, embed_dim=5, scale=np.float64(5**-0.5), length=np.int64(7)).names == ()  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": -1}, f"length: got -1, {SIZE}"),
        ({"length": "4096"}, f"length: got '4096', {SIZE}"),
        ({"causal": "no"}, "causal: got 'no', expected True, False, or None"),
        ({"flex": 3}, "flex: got 3, expected True or False"),
        ({"call": 3}, f"call: got 3, {FUNCTION}"),
    ],
)
def test_an_impossible_argument_of_check_model(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(message)}"):
        check_model(nn.Linear(5, 5), torch.randn(2, 7, 5), **options)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (torch.full((2, 7, 5), math.nan), "inputs: got NaN or infinity, expected finite numbers"),
        ({"x": torch.full((2, 7, 5), math.inf)}, "inputs['x']: got NaN or infinity, expected finite numbers"),
        ({"mask": torch.full((2, 7), math.nan)}, "inputs['mask']: got NaN, expected finite numbers"),
    ],
)
def test_inputs_that_are_not_finite(inputs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_model(nn.Linear(5, 5), inputs)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.out = nn.Embedding(11, 5), nn.Linear(5, 11)

    def forward(self, ids: Tensor) -> Tensor:
        _, _ = ids.shape
        return self.out(attend(self.embedding(ids)))


class Written(nn.Module):
    """A product that is written to a tensor, for which torch has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.q.weight, out=torch.empty_like(x))


@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        (Model(), "; for a whole model, which takes token ids, use headscope.check_model(model, inputs)"),
        (Written(), "; check follows gradients: compute without out=, as training must"),
    ],
)
def test_a_call_that_fails_has_the_remedy_of_its_cause(module: nn.Module, remedy: str) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(remedy)}$"):
        check(module)

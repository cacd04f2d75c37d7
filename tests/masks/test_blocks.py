"""Blocks of a mask: some queries, keys and heads of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from headscope.masks import Band, Dense, Documents, KeyLengths, Mask, Prefix, causal, window

B, H, T = 2, 3, 11


@dataclass(frozen=True)
class Striped(Mask):
    """A mask of a caller's own class, which differs between heads."""

    def allows(self, b: int | Tensor, h: int | Tensor, i: int | Tensor, j: int | Tensor) -> Tensor:
        return torch.as_tensor((i + 2 * j + h) % 3 != 0)


random = torch.Generator().manual_seed(0)
MASKS = {
    "causal": causal(),
    "window": window(3),
    "band of offsets": Band(2, 1, offset=(0, -3)),
    "band of a tensor": Band(2, None, offset=torch.tensor([1, 2])),
    "prefix": Prefix(4),
    "lengths": KeyLengths(torch.tensor([11, 5])),
    "documents": Documents(torch.randint(0, 3, (B, T), generator=random)),
    "table": Dense(torch.rand(B, H, T, T, generator=random) > 0.5),
    "table of keys": Dense(torch.rand(T, generator=random) > 0.5),
    "own class": Striped(),
    "combined": (Prefix(2) | window(4)) & causal() & Striped(),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("h", [None, slice(1, 3)], ids=["all heads", "two heads"])
def test_a_block_allows_what_the_mask_allows_there(mask: Mask, h: slice | None) -> None:
    whole = mask.at(T, T).dense(B, H, T, T)
    for i, j in [(slice(0, 11), slice(0, 11)), (slice(3, 7), slice(5, 11)), (slice(9, 10), slice(0, 2))]:
        block = mask.at(T, T).block(i, j, h)
        heads = slice(0, H) if h is None else h
        sizes = (B, heads.stop - heads.start, i.stop - i.start, j.stop - j.start)
        assert torch.equal(block.dense(*sizes), whole[:, heads, i, j])
        plan = block.plan(*sizes)
        assert torch.equal(plan.tile(*(slice(0, n) for n in sizes)).expand(sizes), whole[:, heads, i, j])


def test_blocks_of_a_callers_own_class_compare_by_value() -> None:
    first, second = (Striped().block(slice(1, 3), slice(0, 4)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != Striped().block(slice(2, 4), slice(0, 4))

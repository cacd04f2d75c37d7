"""Bands whose reaches and offsets are as large as 64 bits hold, against Python's integers."""

from __future__ import annotations

import sys
from itertools import product

import pytest
import torch
from torch import Tensor

from headscope import attention
from headscope._attend.backends import native
from headscope.masks import Band, Mask, mask_from_codes
from support.cases import case

QUERIES, KEYS = 3, 5
POWERS = [0, 47, 48, 49, 50, 51, 60, 61, 62]
EDGES = sorted({sign * (1 << power) + step for power in POWERS for sign in (1, -1) for step in (-2, 0, 1)})
OFFSETS = [*EDGES, -sys.maxsize - 1, -sys.maxsize, 1 - sys.maxsize, sys.maxsize - 1, sys.maxsize]
REACHES = [None, *EDGES, -sys.maxsize, 3 - sys.maxsize, sys.maxsize - 3, sys.maxsize - 1, sys.maxsize, 10**30]


def visible_keys(left: int | None, right: int | None, offset: int) -> list[list[bool]]:
    """Compute in Python's integers; sys.maxsize is without end."""
    return [
        [
            (left is None or left >= sys.maxsize or j >= i + offset - left)
            and (right is None or right >= sys.maxsize or j <= i + offset + right)
            for j in range(KEYS)
        ]
        for i in range(QUERIES)
    ]


def tile(mask: Mask, batch: int) -> Tensor:
    sizes = (batch, 1, QUERIES, KEYS)
    return mask.plan(*sizes).tile(*(slice(0, size) for size in sizes)).expand(sizes)[:, 0]


@pytest.mark.parametrize("left", REACHES, ids=str)
def test_a_band_of_any_reach_and_any_offsets(left: int | None) -> None:
    for right in (None, -3, 0, (1 << 50) + 1, -(1 << 50), sys.maxsize - 1, -sys.maxsize):
        with case(right):
            check_offsets(left, right)


def check_offsets(left: int | None, right: int | None) -> None:
    for band_left, band_right in ((left, right), (right, left)):
        expected = torch.tensor([visible_keys(band_left, band_right, offset) for offset in OFFSETS])
        band = Band(band_left, band_right, offset=torch.tensor(OFFSETS))
        sizes = (len(OFFSETS), 1, QUERIES, KEYS)
        torch.testing.assert_close(tile(band, len(OFFSETS)), expected)
        torch.testing.assert_close(band.dense(*sizes)[:, 0], expected)
        codes, parts = list[int](), list[Tensor]()
        band.encode(sizes, torch.device("cpu"), codes, parts)
        decoded = mask_from_codes(codes, parts)
        assert decoded is not None
        torch.testing.assert_close(tile(decoded, len(OFFSETS)), expected)


@pytest.mark.parametrize("left", REACHES, ids=str)
def test_a_band_of_any_reach_and_one_number_for_an_offset(left: int | None) -> None:
    for offset, (a, b) in product(OFFSETS, ((left, None), (None, left))):
        expected = torch.tensor([visible_keys(a, b, offset)])
        torch.testing.assert_close(tile(Band(a, b, offset=offset), 1), expected)
        torch.testing.assert_close(Band(a, b, offset=offset).dense(1, 1, QUERIES, KEYS)[:, 0], expected)


NATIVE = pytest.mark.skipif(native.extension is None, reason="the native extension was not built: no C++ compiler")


@pytest.mark.parametrize("backend", [pytest.param("cpu", marks=NATIVE), "blocked", "reference"])
def test_attention_under_a_band_beyond_the_longest_sequence(backend: str) -> None:
    q, k, v = torch.zeros(2, 1, QUERIES, 8), torch.zeros(2, 1, KEYS, 8), torch.ones(2, 1, KEYS, 8)
    band = Band(1 << 51, None, offset=torch.tensor([1 << 50, 1 << 52]))
    out = attention(q, k, v, mask=band, backend=backend)
    torch.testing.assert_close(out, torch.tensor([1.0, 0.0])[:, None, None, None].expand_as(out))

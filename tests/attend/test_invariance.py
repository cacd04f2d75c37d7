"""A row of attention has the same bits whatever is beside it: docs/semantics.md, "The same bits"."""

from __future__ import annotations

import pytest
import torch

from headscope import attention
from headscope._attend.backends import native
from headscope.masks import causal
from support.invariance import Call, differences

if native.extension is None:
    pytest.skip("the native extension was not built: no C++ compiler", allow_module_level=True)


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_random_calls(first: int) -> None:
    assert [words for seed in range(first, first + 50) for words in differences(seed)] == []


@pytest.mark.long
@pytest.mark.parametrize("first", range(1000, 21000, 1000))
def test_more_random_calls(first: int) -> None:
    assert [words for seed in range(first, first + 1000) for words in differences(seed)] == []


def test_rows_that_follow_change_bits_elsewhere() -> None:
    """So the calls above can find a difference: by default the number of queries decides how a row is summed."""
    calls = [Call.draw(seed) for seed in range(40)]
    found = 0
    for call in calls:
        call.backend, call.kind = None, "none"
        longer = call.with_queries(40)
        assert longer is not None
        found += not torch.equal(call.run()["out"], longer.run()["out"][:, :, : call.q.shape[2]])
    assert found > 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("group", [1, 3])
def test_decoding_and_chunks_are_the_whole(dtype: torch.dtype, group: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 2 * group, 150, 32).to(dtype)
    k, v = torch.randn(2, 2, 2, 150, 32).to(dtype)
    whole = attention(q, k, v, mask=causal(), backend="reproducible")
    for start, end in ((0, 1), (149, 150), (40, 90), (100, 150), (63, 65)):
        part = attention(q[:, :, start:end], k[:, :, :end], v[:, :, :end], mask=causal(), backend="reproducible")
        assert torch.equal(part, whole[:, :, start:end])

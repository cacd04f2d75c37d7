"""A row of attention has the same bits whatever is beside it: docs/concepts/semantics.md, "The same bits"."""

from __future__ import annotations

import pytest
import torch

from headscope import attend, attention
from headscope._attend.backends import native
from headscope.masks import Band, Dense, Documents, KeyLengths, Prefix, causal, window
from support.invariance import Call, differences

if native.extension is None:
    pytest.skip("the native extension was not built: no C++ compiler", allow_module_level=True)


@pytest.mark.parametrize("first", range(0, 240, 40))
def test_random_calls(first: int) -> None:
    assert [words for seed in range(first, first + 40) for words in differences(seed)] == []


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


@pytest.mark.parametrize("padding", [1, 16, 64])
def test_padding_behind_a_window_is_not_where_sums_are_cut(padding: int) -> None:
    """The last rows see no key. Sums of the rows before them are in the same order, whatever the number of keys."""
    torch.manual_seed(0)
    q, band = torch.randn(1, 2, 50, 128), Band(11, 0, offset=3)
    k, v = torch.randn(2, 1, 2, 17, 128)
    alone = attention(q, k, v, mask=band)
    padded_k, padded_v = (torch.cat([x, torch.randn(1, 2, padding, 128)], 2) for x in (k, v))
    for real in (KeyLengths([17]), Dense((torch.arange(17 + padding) < 17)[None, None, None])):
        assert torch.equal(attention(q, padded_k, padded_v, mask=band & real), alone)


def test_rows_without_keys_do_not_move_the_blocks_of_keys() -> None:
    """The last rows of a window see no key, with padding or without, and share blocks of the backward pass with others.

    This call was found among 45,000 random ones.
    """
    assert list(differences(6039207)) == []


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("number", [0, 3, 9], ids=["of the first document", "of the last", "of its own"])
def test_packed_documents_do_not_depend_on_padding(dtype: torch.dtype, number: int) -> None:
    """Whatever document the padding counts to; with its rows, whose gradients are 0."""
    torch.manual_seed(0)
    q, k, v, grad_out = torch.randn(4, 2, 3, 90, 32).to(dtype)
    grad_out[:, :, 80:] = 0
    ids = torch.arange(80)[None] // 20
    padded = torch.cat([ids, torch.full((1, 10), number)], 1)

    def run(length: int, ids: torch.Tensor) -> list[torch.Tensor]:
        inputs = [x[:, :, :length].clone().requires_grad_() for x in (q, k, v)]
        out = attention(*inputs, mask=Documents(ids) & causal(), backend="reproducible")
        grads = torch.autograd.grad(out, inputs, grad_out[:, :, :length])
        return [x[:, :, :80] for x in (out.detach(), *grads)]

    for got, right in zip(run(90, padded), run(80, ids), strict=True):
        assert torch.equal(got, right)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_in_front_beside_a_window(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 200, 32).to(dtype)
    shown = (torch.arange(200) >= 10).expand(1, 1, 200, 200)
    whole = attention(q, k, v, mask=window(30) & Dense(shown), backend="reproducible")
    alone = attention(q[:, :, 10:], k[:, :, 10:], v[:, :, 10:], mask=window(30), backend="reproducible")
    assert torch.equal(whole[:, :, 10:], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("length", "width", "v_width"), [(1, 64, 64), (1, 7, 40), (200, 64, 64)])
def test_a_gradient_of_lse_is_added_to_nothing(length: int, width: int, v_width: int, dtype: torch.dtype) -> None:
    """Where a row sees one key its weight is 1: dq and dk are the gradient of lse alone, to one rounding."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, length, n, dtype=dtype) for n in (width, width, v_width))
    grad_out, grad_lse = torch.randn(1, 4, length, v_width, dtype=dtype), torch.randn(1, 4, length, dtype=dtype)
    q, k = q.requires_grad_(), k.requires_grad_()
    out, lse, _ = attend(q, k, v, mask=Prefix(1))
    dq, _ = torch.autograd.grad((out * grad_out).sum() + (lse * grad_lse).sum(), (q, k))
    right = grad_lse.double()[..., None] * k.detach().double()[:, :, :1] * width**-0.5
    ratio = (dq.double() - right).norm() / right.norm()
    assert float(ratio) < 4 * torch.finfo(dtype).eps

"""A watch and an interceptor of headscope's attention that somebody else installed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headscope import MultiHeadAttention, watch
from headscope._attend import hook
from headscope._attend.attention import run_attention


def halved(*args: Any) -> tuple[Tensor, Tensor | None]:
    out, lse = run_attention(*args)
    return out / 2, lse


def test_the_interceptor_before_a_watch_attends_again_after_it() -> None:
    model = MultiHeadAttention(8, 2).eval()
    x = torch.randn(1, 4, 8)
    with torch.no_grad(), hook.intercepting(halved):
        expected = model(x)
        with watch(model):
            assert hook.interceptor is not halved
            model(x)
            with watch(model):  # opened later, closed first: nothing is restored yet
                model(x)
            assert hook.interceptor is not halved
        assert hook.interceptor is halved
        assert torch.equal(model(x), expected)
    assert hook.interceptor is None


def test_an_interceptor_that_was_installed_within_a_watch_stays_when_the_watch_closes() -> None:
    model = MultiHeadAttention(8, 2).eval()
    with watch(model):
        model(torch.randn(1, 4, 8))
        hook.install(halved)
    try:
        assert hook.interceptor is halved
    finally:
        hook.install(None)

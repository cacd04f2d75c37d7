"""watch: heads that a module computes one by one, and what a watch retains of them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from headscope import watch
from headscope._intercept import frames
from headscope._intercept.written_masks import mask_of


class Loops(nn.Module):
    """Attention of three heads of width 5, some of which have a sink."""

    def __init__(self, sinks: Sequence[float | None], *, fails: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(15, 45), nn.Linear(15, 15)
        self.sinks = sinks
        self.fails = fails
        self.storages: list[StorageWeakRef] = []
        self.logits: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        self.logits.clear()
        for head, sink in enumerate(self.sinks):
            q, k, v = (each[..., 5 * head : 5 * head + 5] for each in self.qkv(x).chunk(3, -1))
            scores = q @ k.mT / 5**0.5
            self.storages.append(StorageWeakRef(scores.untyped_storage()))
            logits = scores if sink is None else torch.cat([scores, scores.new_full((*x.shape[:2], 1), sink)], -1)
            self.logits.append(logits.detach().double())
            outputs.append(logits.softmax(-1)[..., : x.shape[1]] @ v)
        if self.fails:
            raise ZeroDivisionError
        return self.out(torch.cat(outputs, -1))


@pytest.mark.parametrize("sinks", [(0.5, 3.0, -2.0), (None, 1.0, None), (0.0, None, 0.7), (None, None, None)])
def test_each_head_of_a_loop_has_its_own_sink(sinks: Sequence[float | None]) -> None:
    model, x = Loops(sinks), torch.randn(2, 7, 15)
    with watch(model) as seen:
        model(x)
    assert seen.layers == ("Loops",)
    lse = torch.stack([logits.logsumexp(-1).mean() for logits in model.logits])
    weights = [logits.softmax(-1)[..., :7] for logits in model.logits]
    torch.testing.assert_close(seen["lse"].mean[0], lse, rtol=1e-5, atol=1e-6)
    largest = torch.stack([p.amax(-1).mean() for p in weights])
    torch.testing.assert_close(seen["max_weight"].mean[0], largest, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fails", [False, True])
def test_the_scores_of_heads_are_gone_after_the_module(fails: bool) -> None:
    model, x = Loops((None, None, None)), torch.randn(2, 7, 15)
    with torch.no_grad(), watch(model):
        model(x)  # torch imports some parts at the first use
        model.storages.clear()
        model.fails = fails
        gc.collect()
        gc.disable()
        try:
            with pytest.raises(ZeroDivisionError) if fails else torch.no_grad():
                model(x)
            model.logits.clear()
            alive = sum(not each.expired() for each in model.storages)
        finally:
            gc.enable()
    assert alive == 0


def test_operations_of_threads_that_run_no_module_are_not_followed() -> None:
    class Threads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Loops((None, None, None))

        def forward(self, x: Tensor) -> Tensor:
            follower = frames.thread.follower
            doubled: list[Tensor] = []

            def double() -> None:
                assert follower is not None
                with follower:  # torch passes the modes of a thread on to those of autograd and of TorchScript
                    doubled.append(x * 2)

            other = threading.Thread(target=double)
            other.start()
            other.join()
            return self.attention(doubled[0])

    model, x = Threads(), torch.randn(2, 7, 15)
    with watch(model) as seen:
        model(x)
    assert seen.layers == ("attention",)


def test_a_mask_of_another_device_is_not_compared() -> None:
    scores = torch.randn(1, 2, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -1e9)
    try:
        expected = mask_of(scores)
        (size, device), known = frames.thread.written_masks.popitem()
        assert device == scores.device
        frames.thread.written_masks[size, torch.device("meta")] = (known[0].to("meta"), *known[1:])
        mask, real = mask_of(scores)
    finally:
        frames.thread.written_masks.clear()
    assert mask == expected[0]
    assert torch.equal(real, expected[1])

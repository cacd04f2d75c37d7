"""watch: a weight of 0 is that of a masked key only where the scores, or the pattern of zeros, show that it is."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import Observe, Recording, Segments, watch

HEADS, WIDTH, TOKENS = 3, 7, 11
Attend = Callable[[Tensor], Tensor]
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
WINDOWS = (torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)).abs() <= torch.tensor([1, 2, 4])[:, None, None]
BY_VISIBILITY = ("normalized_entropy", "chance", "self", "previous", "next")


class Layer(nn.Module):
    """Attention whose weights are any function of its scores."""

    def __init__(self, attend: Attend, heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HEADS * WIDTH, heads * WIDTH) for _ in range(3))
        self.attend, self.heads = attend, heads
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (self.heads, WIDTH)).transpose(1, 2) for each in (self.q, self.k, self.v))
        self.weights = self.attend(q @ k.mT * WIDTH**-0.5)
        return self.weights @ v


def recorded(attend: Attend, heads: int = HEADS) -> tuple[Recording, Tensor]:
    """Return the recording of a layer, and its weights in float64."""
    torch.manual_seed(3)
    model, x = Layer(attend, heads), torch.randn(2, TOKENS, HEADS * WIDTH)
    with torch.no_grad(), watch(model, what=Observe(map=3), verify=5) as recording:
        torch.manual_seed(5)
        model(x)
    assert all(each.fits for each in recording.about.verified.values())
    if attend is not gumbel:  # which draws other numbers in float64
        model.double()(x.double())
    return recording, model.weights.double()


def renormalised(p: Tensor) -> Tensor:
    return p / p.sum(-1, keepdim=True)


def gumbel(scores: Tensor) -> Tensor:
    return F.gumbel_softmax(scores, hard=True)


def power(scores: Tensor) -> Tensor:
    return renormalised((6 * scores).softmax(-1).pow(30))


def threshold(scores: Tensor) -> Tensor:
    p = scores.softmax(-1)
    return renormalised(p * (p > 0.08))


def causal_threshold(scores: Tensor) -> Tensor:
    p = scores.masked_fill(~CAUSAL, -math.inf).softmax(-1)
    return renormalised(p * (p > 0.08))


def masked_weights(scores: Tensor) -> Tensor:
    return renormalised(scores.softmax(-1) * CAUSAL)


def causal_exponentials(scores: Tensor) -> Tensor:
    return renormalised(scores.masked_fill(~CAUSAL, -math.inf).exp())


def windows(scores: Tensor) -> Tensor:
    return renormalised(scores.masked_fill(~WINDOWS, -math.inf).softmax(-1).square())


def windows_of_exponentials(scores: Tensor) -> Tensor:
    return renormalised(scores.masked_fill(~WINDOWS, -math.inf).exp())


def windows_of_weights(scores: Tensor) -> Tensor:
    return renormalised(scores.softmax(-1) * WINDOWS)


def small_exponentials(scores: Tensor) -> Tensor:
    scores = 400 * scores
    return renormalised((scores - scores.amax(-1, keepdim=True)).exp())


def even(visible: Tensor) -> Tensor:
    """Return 1 / n of each row, for each head."""
    return 1 / visible.expand(HEADS, TOKENS, TOKENS).sum(-1).double()


EVERY = torch.ones_like(CAUSAL)
CASES: list[tuple[Attend, Tensor]] = [
    *((attend, EVERY) for attend in (gumbel, power, threshold)),
    *((attend, CAUSAL) for attend in (causal_threshold, masked_weights, causal_exponentials)),
]
OF_HEADS: list[tuple[Attend, Tensor]] = [(windows, WINDOWS), (windows_of_exponentials, WINDOWS)]


@pytest.mark.parametrize(
    ("attend", "visible", "heads"),
    [*((*case, HEADS) for case in CASES + OF_HEADS), *((*case, 1) for case in CASES)],
)
def test_masked_keys_are_told_from_weights_of_0(attend: Attend, visible: Tensor, heads: int) -> None:
    recording, p = recorded(attend, heads)
    assert bool((p.float() == 0).any())
    close = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(recording["entropy"].mean[0], torch.special.entr(p).sum(-1).mean((0, 2)), **close)
    torch.testing.assert_close(recording["chance"].mean[0], even(visible).mean(-1)[:heads], **close)
    own = p.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(recording["self"].mean[0], own.mean((0, 2)), **close)
    previous = visible.expand(HEADS, TOKENS, TOKENS).diagonal(-1, -2, -1).sum(-1)[:heads]
    assert torch.equal(recording["previous"].count[0], 2 * previous)
    assert torch.equal(recording[0].eligible, 2 * visible.expand(HEADS, TOKENS, TOKENS).sum(-2)[:heads])


@pytest.mark.parametrize("attend", [windows_of_weights, small_exponentials])
def test_what_depends_on_unknown_masks_is_left_out(attend: Attend, tmp_path: Path) -> None:
    recording, p = recorded(attend)
    assert bool((p.float() == 0).any())
    assert not set(recording.names) & {*BY_VISIBILITY, "lse", "first"}
    torch.testing.assert_close(
        recording["entropy"].mean[0], torch.special.entr(p).sum(-1).mean((0, 2)), rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(recording[0].received, p.sum((0, 2)), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="eligible"):
        _ = recording[0].eligible
    recording.save(tmp_path / "seen.safetensors")
    assert Recording.load(tmp_path / "seen.safetensors").names == recording.names
    recording.save_html(tmp_path / "seen.html")


def test_what_chance_gives_depends_on_the_mask(tmp_path: Path) -> None:
    """So it is unknown, as are the first keys, which may be padding; the sums of segments are known."""
    torch.manual_seed(3)
    parts = Observe(segments=Segments.from_spans({"a": (0, 4), "b": (4, TOKENS)}, TOKENS))
    found: list[Recording] = []
    for attend in (windows_of_weights, causal_exponentials):
        model, x = Layer(attend), torch.randn(2, TOKENS, HEADS * WIDTH)
        with torch.no_grad(), watch(model, what=parts) as recording:
            for _ in range(2):
                model(x)
        found.append(recording)
        p = model.weights.double()
        mass = recording.stats.parts["Layer"].segments
        assert mass is not None
        torch.testing.assert_close(mass["b", "a"], p[:, :, 4:, :4].sum(-1).mean((0, 2)), rtol=1e-5, atol=1e-7)
        loaded = Recording.load(recording.save(tmp_path / f"{len(found)}.safetensors"))
        assert loaded.to_dict() == recording.to_dict()
    unknown, known = (each.stats.parts["Layer"].segments for each in found)
    assert unknown is not None
    assert known is not None
    assert unknown.null is None
    assert found[0].stats["distance"].null is None
    with pytest.raises(ValueError, match="a weight of 0 may be that of a masked key"):
        unknown.without_first()
    assert known.null is not None
    assert found[1].stats["distance"].null is not None
    assert known.without_first().shape == (HEADS, 2, 2)

"""watch: attention written by hand in ways that are easily recorded wrongly is recorded right, or not at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from headscope import watch
from headscope.watching import WatchError, WatchWarning
from support.watched_small import Attention
from support.written_attacks import ATTACKS, attack_module

RIGHT = [name for name, attack in ATTACKS.items() if attack.expected == "right"]


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("name", RIGHT)
def test_right(name: str, passes: int) -> None:
    model, x = attack_module(name)
    torch.manual_seed(0)
    plain = model(x)
    model.weights.clear()
    torch.manual_seed(0)
    with watch(model) as seen:
        out = model(x)
        for n in range(1, passes):
            model(x + n)
    assert torch.equal(out, plain)
    assert seen.layers == ("Attends",)
    p = torch.cat(model.weights)
    assert p.shape[0] == 2 * passes
    for quantity, values in (("entropy", torch.special.entr(p).sum(-1)), ("max_weight", p.amax(-1))):
        torch.testing.assert_close(seen[quantity].mean[0], values.mean((0, 2)), rtol=1e-5, atol=1e-6)
    assert seen["entropy"].count[0].tolist() == [p.shape[0] * p.shape[2]] * p.shape[1]


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in RIGHT])
def test_refused(name: str) -> None:
    model, x = attack_module(name)
    torch.manual_seed(0)
    plain = model(x)
    torch.manual_seed(0)
    with pytest.raises(WatchError, match="no attention call was observed"), watch(model):
        assert torch.equal(model(x), plain)


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in RIGHT])
def test_what_is_refused_beside_a_recorded_layer_is_warned_of(name: str) -> None:
    refused, x = attack_module(name)
    attention = Attention(x.shape[-1], refused.heads)
    model = torch.nn.Sequential(attention, refused)
    with pytest.warns(WatchWarning, match=r"1 \(Attends\) may also attend"), watch(model) as seen:
        model(x)
    assert seen.layers == ("0",)


class Single(nn.Module):
    """One head, over part of the tokens for queries or keys."""

    def __init__(self, queries: slice = slice(None), keys: slice = slice(None)) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(15, 15) for _ in range(3))
        self.queries, self.keys = queries, keys

    def forward(self, x: Tensor) -> Tensor:
        y, z = x[:, self.queries], x[:, self.keys]
        return (self.q(y) @ self.k(z).mT).softmax(-1) @ self.v(z)


class Beside(nn.Module):
    """Concatenates the outputs of two attentions."""

    def __init__(self, a: nn.Module, b: nn.Module) -> None:
        super().__init__()
        self.near, self.far = a, b

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return torch.cat([self.near(x), self.far(memory)], -1)


def test_attentions_of_other_tokens_are_not_heads_of_one_layer() -> None:
    model = Beside(Single(), Single())
    with watch(model) as seen:
        model(torch.randn(2, 5, 15), torch.randn(2, 5, 15))
    assert seen.layers == ("near", "far")


@pytest.mark.parametrize(
    ("queries", "keys", "kind"),
    [
        (slice(None), slice(None), "self"),
        (slice(3, None), slice(None), "self"),  # as with a cache
        (slice(9, None), slice(None), "self"),  # the last one only
        (slice(3), slice(None), "cross"),
        (slice(1), slice(None), "cross"),  # as a CLS token
        (slice(8, 9), slice(None), "cross"),
        (slice(None), slice(3), "cross"),
        (slice(5), slice(5, None), "cross"),
        (slice(None), slice(None, None, 2), "cross"),
    ],
)
def test_parts_of_the_tokens_are_not_the_same_tokens(queries: slice, keys: slice, kind: str) -> None:
    model = Single(queries, keys)
    with watch(model) as seen:
        model(torch.randn(2, 10, 15))
    assert seen.about.kinds == {"Single": kind}


def test_a_module_that_first_runs_in_a_later_pass_is_recorded() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.passes = Single(), Single(), 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            return self.first(x) if self.passes == 1 else self.second(self.first(x))

    model = Later()
    with watch(model) as seen:
        for _ in range(3):
            model(torch.randn(2, 5, 15))
    assert seen.layers == ("first", "second")
    assert seen["entropy"].count.tolist() == [[30], [20]]


def test_the_scores_of_weights_that_are_gone_are_not_retained() -> None:
    scores: list[StorageWeakRef] = []

    class Pools(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                s = x @ x.mT
                scores.append(StorageWeakRef(s.untyped_storage()))
                x = x + s.softmax(-1).mean()
                del s
                assert sum(not each.expired() for each in scores) <= 1
            return x

    model = nn.Sequential(Attention(), Pools())
    with torch.no_grad(), watch(model):
        model(torch.randn(2, 5, 15))
    assert all(each.expired() for each in scores)


class OfFeatures(nn.Module):
    """Attends to the features of its input as tokens, which a projection embeds, as iTransformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.qkv = nn.Linear(5, 12), nn.Linear(12, 36)
        self.weights = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.embed(x.mT)).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        p = (q @ k.mT).softmax(-1)
        self.weights = p.detach().double()
        return p @ v


class OfStacked(nn.Module):
    """Attends to tokens that are stacked from projections of one vector, as FT-Transformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.embeds, self.qkv = nn.ModuleList(nn.Linear(5, 12) for _ in range(7)), nn.Linear(12, 36)
        self.weights = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([embed(x) for embed in self.embeds], 1)
        q, k, v = self.qkv(tokens).unflatten(-1, (3, 2, 6)).permute(2, 0, 3, 1, 4)
        p = (q @ k.mT).softmax(-1)
        self.weights = p.detach().double()
        return p @ v


class OfTwoProducts(nn.Module):
    """Adds products with keys of the content and keys of the positions, in this order or the other."""

    def __init__(self, *, content_first: bool) -> None:
        super().__init__()
        self.qkv, self.position = nn.Linear(15, 45), nn.Linear(15, 15)
        self.places, self.content_first = nn.Parameter(torch.randn(7, 15)), content_first
        self.weights = torch.zeros(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 5)).permute(2, 0, 3, 1, 4)
        content, position = q @ k.mT, q @ self.position(self.places).unflatten(-1, (3, 5)).transpose(0, 1).mT
        p = (content + position if self.content_first else position + content).softmax(-1)
        self.weights = p.detach().double()
        return p @ v


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (OfFeatures(), (2, 5, 11)),
        (OfStacked(), (2, 5)),
        (OfTwoProducts(content_first=True), (2, 7, 15)),
        (OfTwoProducts(content_first=False), (2, 7, 15)),
    ],
    ids=["features", "stacked", "content and position", "position and content"],
)
def test_tokens_of_other_kinds(model: Any, shape: tuple[int, ...]) -> None:
    with watch(model) as seen:
        model(torch.randn(*shape))
    expected = torch.special.entr(model.weights).sum(-1).mean((0, 2))
    torch.testing.assert_close(seen["entropy"].mean[0], expected, rtol=1e-5, atol=1e-6)


class OfChannels(nn.Module):
    """Attends to the channels of an image, as it comes, as DANet does."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(2)
        return ((y @ y.mT).softmax(-1) @ y).view_as(x)


class OfMixedTokens(nn.Module):
    """Attends to fewer keys, which a projection of the tokens makes, as Linformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.mix = nn.Linear(15, 45), nn.Parameter(torch.randn(4, 7))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ (self.mix @ k).mT).softmax(-1) @ (self.mix @ v)


@pytest.mark.parametrize(("model", "shape"), [(OfChannels(), (2, 5, 7, 3)), (OfMixedTokens(), (2, 7, 15))])
def test_what_may_not_be_tokens_is_warned_of(model: nn.Module, shape: tuple[int, ...]) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.known, self.other = Attention(), model

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.known(x).sum() + self.other(y).sum()

    both = Both()
    with pytest.warns(WatchWarning, match="other .* may also attend"), watch(both) as seen:
        both(torch.randn(2, 7, 15), torch.randn(*shape))
    assert seen.layers == ("known",)


class Splits(nn.Module):
    """Attends with three heads, after a change of its input."""

    def __init__(self, width: int = 15) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 45)
        self.weights: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 5)).movedim(-3, 0).transpose(-3, -2)
        p = (q @ k.mT).softmax(-1)
        self.weights.append(p.detach().double().flatten(0, -4))
        return p @ v


def recorded_as(seen: Any, weights: list[Tensor]) -> None:
    expected = torch.special.entr(torch.cat(weights)).sum(-1)
    torch.testing.assert_close(seen["entropy"].mean[0], expected.mean((0, 2)), rtol=1e-5, atol=1e-6)
    assert seen["entropy"].count[0].tolist() == [expected[:, 0].numel()] * 3


def test_one_token_is_one_key() -> None:
    model = Splits()
    with watch(model) as seen:
        model(torch.randn(2, 1, 15))
    assert seen["effective_keys"].mean.tolist() == [[1.0] * 3]


def test_a_repeated_batch_is_a_batch() -> None:
    class Repeats(Splits):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.repeat_interleave(2, 0)) + super().forward(torch.cat([x, x]))

    model = Repeats()
    with watch(model) as seen:
        model(torch.randn(2, 7, 15))
    assert seen.layers == ("Repeats", "Repeats#2")
    recorded_as(seen, model.weights[:1])


def test_series_are_a_batch_although_they_are_features_of_the_input() -> None:
    """As PatchTST attends to the patches of each series."""

    class OfSeries(Splits):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mT.unfold(-1, 3, 3))

    model = OfSeries(width=3)
    with watch(model) as seen:
        model(torch.randn(2, 12, 5))
    recorded_as(seen, model.weights)


def test_pixels_of_a_raw_image_are_tokens() -> None:
    class OfPixels(Splits):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(2).mT)

    model = OfPixels()
    with watch(model) as seen:
        model(torch.randn(2, 15, 3, 5))
    recorded_as(seen, model.weights)


def test_a_pass_that_cannot_be_recorded_is_warned_of() -> None:
    class Sometimes(Splits):
        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            if self.passes == 2:
                return torch.stack([(row @ row.mT).sigmoid() @ row for row in x])
            return super().forward(x)

    model = Sometimes()
    with pytest.warns(WatchWarning, match="may have attended in forward pass 2 in a way"), watch(model) as seen:
        torch.stack([model(torch.randn(2, 7, 15)).sum() for _ in range(3)])
    recorded_as(seen, model.weights)


def test_weights_that_were_changed_have_no_logits() -> None:
    model, x = attack_module("renormalised")
    with watch(model) as seen:
        model(x)
    part = seen.stats.parts["Attends"]
    assert not {"lse", "max_logit"} & part.moments.keys()

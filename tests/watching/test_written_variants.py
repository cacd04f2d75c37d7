"""watch: attention that a module writes out with masks, keys and passes of other kinds than most do."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headscope import watch
from headscope.watching import WatchError, WatchWarning

HEADS, WIDTH = 3, 7


class Base(nn.Module):
    """Three heads of width 7; subclasses state how queries, keys and values become weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(4))
        self.weights = torch.empty(0)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (each(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for each in (self.q, self.k, self.v))
        return q, k, v

    def attend(self, scores: Tensor, v: Tensor) -> Tensor:
        self.weights = scores.softmax(-1)
        return self.out((self.weights @ v).transpose(1, 2).flatten(2))


def inputs(tokens: int = 11) -> Tensor:
    return torch.randn(2, tokens, HEADS * WIDTH, generator=torch.Generator().manual_seed(5))


def row_means(values: Tensor) -> Tensor:
    """Return the mean of values [B, H, Q] for each head."""
    return values.mean((0, 2))


def truth_of(model: Base, x: Tensor) -> Tensor:
    """Return the weights of a model in float64, and leave it as it was."""
    model.double()(x.double())
    model.float()
    return model.weights


def boolean_index(scores: Tensor, hidden: Tensor) -> Tensor:
    scores[hidden] = -1e9
    return scores


def boolean_index_of_matrices(scores: Tensor, hidden: Tensor) -> Tensor:
    rows, mask = scores.reshape(-1, scores.shape[-1]), hidden.reshape(-1, hidden.shape[-1])  # as in d2l.ai
    rows[mask] = -1e6
    return rows.reshape(scores.shape)


def minus_infinity(scores: Tensor, hidden: Tensor) -> Tensor:
    scores[hidden] = -math.inf
    return scores


def index_put(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores.index_put((hidden,), scores.new_tensor(-1e9))


def masked_scatter(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores.masked_scatter_(hidden, torch.full_like(scores, -1e9))


def index_fill(scores: Tensor, hidden: Tensor) -> Tensor:
    return scores.index_fill_(-1, torch.tensor([2, 5]), -3.0)


@pytest.mark.parametrize(
    "hide", [boolean_index, boolean_index_of_matrices, minus_infinity, index_put, masked_scatter, index_fill]
)
def test_scores_that_are_replaced_at_an_index_are_recorded(hide: Callable[[Tensor, Tensor], Tensor]) -> None:
    class Masked(Base):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            scores = q @ k.mT / WIDTH**0.5
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1).expand_as(scores)
            return self.attend(hide(scores, hidden), v)

    model, x = Masked(), inputs()
    plain = model(x)
    with watch(model) as seen:
        out = model(x)
    assert torch.equal(plain, out)
    weights = truth_of(model, x)
    assert seen.about.kinds == {"Masked": "self"}
    torch.testing.assert_close(seen["entropy"].mean[0], row_means(torch.special.entr(weights).sum(-1)))
    torch.testing.assert_close(seen["max_weight"].mean[0], row_means(weights.amax(-1)))


class Extra(Base):
    """Two learned keys and values, or one that is zero, behind those of the tokens."""

    def __init__(self, extra: str) -> None:
        super().__init__()
        self.extra = extra
        self.more = nn.Parameter(torch.randn(2, 1, HEADS, 2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        if self.extra == "zero":
            k, v = (nn.functional.pad(each, (0, 0, 0, 1)) for each in (k, v))
        else:
            more = self.more.expand(2, len(x), -1, -1, -1)
            k, v = (torch.cat([each, own], -2) for each, own in zip((k, v), more, strict=True))
        return self.attend(q @ k.mT / WIDTH**0.5, v)


@pytest.mark.parametrize("extra", ["learned", "zero"])
@pytest.mark.parametrize("passes", [1, 2])
def test_keys_behind_the_tokens_have_no_position(extra: str, passes: int) -> None:
    model, x = Extra(extra), inputs()
    with watch(model) as seen:
        for _ in range(passes):
            model(x)
    weights = truth_of(model, x)
    tokens = x.shape[1]
    apart = (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs().double()
    own, previous = (torch.diagonal(weights, at, -2, -1) for at in (0, -1))
    assert seen.about.kinds == {"Extra": "self"}
    torch.testing.assert_close(seen["self"].mean[0], row_means(own))
    torch.testing.assert_close(seen["previous"].mean[0], row_means(previous))
    torch.testing.assert_close(seen["distance"].mean[0], row_means((weights[..., :tokens] * apart).sum(-1)))
    torch.testing.assert_close(seen["max_weight"].mean[0], row_means(weights.amax(-1)))


def flipped_queries(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.flip(2), k, v


def flipped_tokens(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.stack((q, k, v)).flip(3)
    return q, k, v


def rolled_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q, k.roll(2, 2), v.roll(2, 2)


def sorted_keys(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    index = k.norm(dim=-1).argsort(-1)[..., None].expand_as(k)
    return q, k.gather(2, index), v.gather(2, index)


def shuffled_tokens(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    index = torch.randperm(q.shape[2], generator=torch.Generator().manual_seed(1))
    return q[:, :, index], k[:, :, index], v[:, :, index]


def selected_tokens(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    index = torch.tensor([0, 2, 3, 5, 6, 9, 10])
    q, k, v = (each.index_select(2, index) for each in (q, k, v))
    return q, k, v


def rolled_tokens(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.stack((q, k, v)).roll(-3, 3)
    return q, k, v


def there_and_back(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    index = torch.randperm(k.shape[2], generator=torch.Generator().manual_seed(1))
    return q.flip(2).flip(2), k[:, :, index][:, :, index.argsort()], v


def flipped_batch(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.stack((q, k, v)).flip(1)
    return q, k, v


@pytest.mark.parametrize(
    ("move", "kind"),
    [
        (flipped_queries, "cross"), (flipped_tokens, "cross"), (rolled_keys, "cross"), (sorted_keys, "cross"),
        (shuffled_tokens, "cross"), (selected_tokens, "self"), (rolled_tokens, "self"), (there_and_back, "self"),
        (flipped_batch, "self"),
    ],
)  # fmt: skip
def test_tokens_out_of_order_have_no_positions(
    move: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], kind: str
) -> None:
    class Moved(Base):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = move(*self.heads(x))
            return self.attend(q @ k.mT / WIDTH**0.5, v)

    model, x = Moved(), inputs()
    with watch(model) as seen:
        model(x)
    weights = truth_of(model, x)
    assert seen.about.kinds == {"Moved": kind}
    assert ("previous" in seen.names) == (kind == "self")
    torch.testing.assert_close(seen["entropy"].mean[0], row_means(torch.special.entr(weights).sum(-1)))
    with watch(model, kinds={"Moved": "self"}) as seen:
        model(x)
    torch.testing.assert_close(seen["self"].mean[0], row_means(torch.diagonal(weights, dim1=-2, dim2=-1)))


class Complex(Base):
    """Real weights of complex queries and keys, and complex values."""

    def forward(self, x: Tensor) -> Tensor:
        values = x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        q, k, v = (torch.complex(each, values) for each in self.heads(x))
        self.weights = ((q @ k.conj().mT).real / WIDTH**0.5).softmax(-1)
        return self.out((self.weights.to(v.dtype) @ v).real.transpose(1, 2).flatten(2))


class Plain(Base):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.attend(q @ k.mT / WIDTH**0.5, v)


def test_complex_values_are_refused_by_name() -> None:
    model, x = nn.Sequential(Plain(), Complex()), inputs()
    plain = model(x)
    with pytest.warns(WatchWarning, match=r"1 \(Complex\)"), watch(model) as seen:
        out = model(x)
    assert torch.equal(plain, out)
    assert seen.layers == ("0",)
    with pytest.raises(WatchError, match="cannot follow how Complex attends"), watch(alone := Complex()):
        alone(x)


def attend_in_script(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul((torch.matmul(q, k.transpose(-2, -1)) / 2.5).softmax(-1), v)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_function_is_recorded_without_a_warning() -> None:
    script = torch.jit.script(attend_in_script)

    class Scripted(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.out(script(*self.heads(x)).transpose(1, 2).flatten(2))

    model, x = Scripted(), inputs()
    with torch.no_grad(), watch(model) as seen:
        for _ in range(3):
            model(x)
    assert seen["entropy"].count.tolist() == [[66] * HEADS]


class Sometimes(Plain):
    """Attends in some of its calls only."""

    def __init__(self, attending: set[int]) -> None:
        super().__init__()
        self.attending, self.calls = attending, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls in self.attending else self.out(self.v(x))


@pytest.mark.parametrize(
    ("attending", "recorded", "warning"),
    [
        ({1, 2, 3}, 3, None),
        ({2, 3}, 1, "1 .Sometimes. may have attended in forward pass 2, where it was not followed"),
        ({3}, 0, "1 .Sometimes. may have attended in forward pass 3, where it was not followed"),
        ({1, 3}, 2, "1 .Sometimes. may have attended in forward pass 2 in a way that was not recognised"),
    ],
)
def test_passes_that_may_be_missing_are_named(attending: set[int], recorded: int, warning: str | None) -> None:
    model, x = nn.Sequential(Plain(), Sometimes(attending)), inputs()
    with warnings.catch_warnings(record=True, action="always") as caught, watch(model) as seen:
        for _ in range(3):
            model(x)
    assert len(caught) == (warning is not None)
    assert all(re.search(str(warning), str(each.message)) for each in caught)
    counts = {layer: seen[layer, 0, "entropy"].count for layer in seen.layers}
    assert counts == {"0": 66} | ({"1": 22 * recorded} if recorded else {})


@pytest.mark.parametrize("lengths", [(1,), (5, 1), (1, 5)])
def test_one_key_and_a_sink(lengths: tuple[int, ...]) -> None:
    class Sink(Base):
        def __init__(self) -> None:
            super().__init__()
            self.sink = nn.Parameter(torch.randn(HEADS))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.heads(x)
            scores = q @ k.mT / WIDTH**0.5
            sink = self.sink.view(1, HEADS, 1, 1).expand(*scores.shape[:3], 1)
            self.weights = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
            return self.out((self.weights @ v).transpose(1, 2).flatten(2))

    model = Sink()
    with watch(model) as seen:
        for length in lengths:
            model(inputs(length))
    mass = torch.cat([truth_of(model, inputs(length)).sum(-1) for length in lengths], -1)
    assert seen["mass"].count.tolist() == [[2 * sum(lengths)] * HEADS]
    torch.testing.assert_close(seen["mass"].mean[0], row_means(mass))

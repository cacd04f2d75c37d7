"""watch: attention that a module writes out has what the same attention has by a fused call.

The oracle is the same module with ``scaled_dot_product_attention``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import Observe, Recording, ablate, head_importance, watch
from headscope.watching import WatchError, WatchWarning

EVERYTHING = Observe(
    map=5, edges=7, top=3, windows=(2,), first=2, keep_rows=True, keep_qk=True, extra=("second_weight",)
)
SCALE = 5**-0.5
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


def fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask)


def hidden(scores: Tensor, mask: Tensor | None) -> Tensor:
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return hidden(q @ k.mT * SCALE, mask).softmax(-1) @ v


def scaled_queries(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return torch.einsum("bhqk,bhkd->bhqd", hidden(torch.einsum("bhqd,bhkd->bhqk", q * SCALE, k), mask).softmax(-1), v)


def keys_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    weights = hidden(k @ q.mT * SCALE, None if mask is None else mask.mT).softmax(-2)
    return (v.mT @ weights).mT


def values_first(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return (v.mT @ hidden(q @ k.mT * SCALE, mask).softmax(-1).mT).mT


def one_head_at_a_time(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return torch.stack([plain(q[:, h], k[:, h], v[:, h], mask) for h in range(q.shape[1])], 1)


def values_of_one_head_at_a_time(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    weights = hidden(q @ k.mT * SCALE, mask).softmax(-1)
    return torch.stack([weights[:, h] @ v[:, h] for h in reversed(range(q.shape[1]))], 1).flip(1)


def one_text_at_a_time(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    return torch.stack([plain(q[b], k[b], v[b], mask) for b in range(len(q))])


def exponentials(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    powers = hidden(q @ k.mT * SCALE, mask).exp()
    return (powers / powers.sum(-1, keepdim=True)) @ v


def shifted_exponentials(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scores = hidden(q @ k.mT * SCALE, mask)
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return (powers / powers.sum(-1, keepdim=True)) @ v


STYLES = [
    plain, scaled_queries, keys_first, values_first, one_head_at_a_time, values_of_one_head_at_a_time,
    one_text_at_a_time, exponentials, shifted_exponentials,
]  # fmt: skip


class Layer(nn.Module):
    """Attention over its own tokens, or from them to a context."""

    def __init__(self, attend: Attend, *, kv_heads: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend, self.kv_heads = attend, kv_heads
        self.q, self.kv, self.o = nn.Linear(15, 15), nn.Linear(15, 2 * kv_heads * 5), nn.Linear(15, 15)

    def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        q = self.q(x).unflatten(-1, (3, 5)).transpose(1, 2)
        k, v = self.kv(x if context is None else context).unflatten(-1, (2, self.kv_heads, 5)).permute(2, 0, 3, 1, 4)
        if self.kv_heads == 1:
            k, v = k.expand(-1, 3, -1, -1), v.expand(-1, 3, -1, -1)
        return self.o(self.attend(q, k, v, mask).transpose(1, 2).flatten(-2))


def recorded(attend: Attend, *inputs: Any, kv_heads: int = 3, what: Observe = EVERYTHING, **options: Any) -> Recording:
    layer = Layer(attend, kv_heads=kv_heads)
    with warnings.catch_warnings(action="error"), torch.no_grad(), watch(layer, what=what, **options) as recording:
        layer(*inputs)
    return recording


def assert_same(one: Recording, other: Recording) -> None:
    """Compare everything that two recordings hold."""
    a, b = (each.stats.parts["Layer"] for each in (one, other))
    assert one.kinds == other.kinds
    assert set(a.moments) == set(b.moments)
    close: Any = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True, "check_dtype": False}
    for name in a.moments:
        for field in ("count", "mean", "min", "max"):
            torch.testing.assert_close(
                getattr(one["Layer", name], field), getattr(other["Layer", name], field), **close
            )
    assert a.received is not None
    assert b.received is not None
    torch.testing.assert_close(a.received, b.received, **close)
    assert a.map is not None
    assert b.map is not None
    torch.testing.assert_close(a.map.sum, b.map.sum, **close)
    assert a.edges is not None
    assert b.edges is not None
    torch.testing.assert_close(a.edges.p, b.edges.p, **close)
    apart = b.edges.p < 0.999  # weights of 1 are in any order, up to rounding
    assert torch.equal(a.edges.at[apart], b.edges.at[apart])
    for mine, theirs in zip(a.kept, b.kept, strict=False):
        for name, values in mine.values.items():
            torch.testing.assert_close(values, theirs.values[name], **close)


def qk_of(recording: Recording) -> dict[str, tuple[int, ...]]:
    (tiles,) = recording.stats.parts["Layer"].tiles.values()
    return dict(tiles.to_weights().sizes)


@pytest.mark.parametrize("attend", STYLES, ids=lambda style: style.__name__)
@pytest.mark.parametrize("masked", [False, True])
def test_a_written_attention_has_what_a_fused_call_has(attend: Attend, masked: bool) -> None:
    x, mask = torch.randn(2, 11, 15), torch.ones(11, 11).tril().bool() if masked else None
    one_text = attend is one_text_at_a_time
    inputs = (x[:1] if one_text else x), None, mask
    options: dict[str, Any] = {"tokens": torch.arange(11) % 4, "verify": 3}
    written, oracle = recorded(attend, *inputs, **options), recorded(fused, *inputs, **options)
    assert_same(written, oracle)
    torch.testing.assert_close(written.stats.tile(2, 7, 0, 6), oracle.stats.tile(2, 7, 0, 6))
    assert written.about.verified["Layer"].fits
    assert written.about.verified["Layer"].output is not None


def test_cross_attention_and_shared_keys() -> None:
    x, context = torch.randn(2, 7, 15), torch.randn(2, 13, 15)
    for kv_heads in (1, 3):
        assert_same(recorded(plain, x, context, kv_heads=kv_heads), recorded(fused, x, context, kv_heads=kv_heads))


def test_padding_and_positions() -> None:
    x, positions = torch.randn(2, 11, 15), torch.rand(11, 2)
    mask = torch.ones(2, 1, 11, 11, dtype=torch.bool)
    mask[0, ..., :4] = False
    assert_same(recorded(plain, x, None, mask), recorded(fused, x, None, mask))
    assert_same(recorded(plain, x, positions=positions), recorded(fused, x, positions=positions))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_queries_and_keys_are_saved_in_place_of_the_scores(dtype: torch.dtype, tmp_path: Path) -> None:
    x, mask = torch.randn(2, 11, 15, dtype=dtype), torch.ones(11, 11).tril().bool()
    recordings: list[Recording] = []
    for attend in (plain, fused):
        layer = Layer(attend).to(dtype)
        with torch.no_grad(), watch(layer, what=Observe(keep_qk=True)) as recording:
            layer(x, None, mask)
        recordings.append(recording)
    written, oracle = recordings
    assert not {"bias", "rest"} & set(qk_of(written))
    assert all(qk_of(written)[name] == qk_of(oracle)[name] for name in ("q", "k", "lse"))
    loaded = Recording.load(written.save(tmp_path / "written.safetensors", qk=True))
    torch.testing.assert_close(loaded.stats.tile(0, 11, 0, 11), written.stats.tile(0, 11, 0, 11))


def test_scores_that_are_not_a_scaled_product_stay_as_they_are() -> None:
    def biased(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return plain_weights(q, k) @ v

    def plain_weights(q: Tensor, k: Tensor) -> Tensor:
        places = torch.arange(11.0)
        return (q @ k.mT * SCALE - 1e-4 * (places - places[:, None]).abs()).softmax(-1)

    recording = recorded(biased, torch.randn(2, 11, 15))
    assert qk_of(recording)["bias"] == (2, 3, 11, 11)
    layer, x = Layer(biased), torch.randn(2, 11, 15)
    with torch.no_grad(), watch(layer, what=EVERYTHING) as recording:
        layer(x)
    q = layer.q(x).unflatten(-1, (3, 5)).transpose(1, 2)
    k = layer.kv(x).unflatten(-1, (2, 3, 5)).permute(2, 0, 3, 1, 4)[0]
    torch.testing.assert_close(recording.stats.tile(0, 11, 0, 11), plain_weights(q, k).detach())


class Decodes(nn.Module):
    """One layer with a cache: a list of keys and values."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.embed, self.qkv, self.o = nn.Embedding(5, 15), nn.Linear(15, 45), nn.Linear(15, 15)

    def forward(self, input_ids: Tensor, cache: list[Tensor]) -> Tensor:
        q, k, v = self.qkv(self.embed(input_ids)).unflatten(-1, (3, 3, 5)).permute(2, 0, 3, 1, 4)
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = [k, v]
        visible = torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2]).bool()
        return self.o(self.attend(q, k, v, visible).transpose(1, 2).flatten(-2))


def generator_of_texts() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randint(0, 5, (1, n), generator=generator) for n in (9, 9, 1))  # type: ignore[return-value]


@pytest.mark.parametrize("style", [plain, exponentials])
def test_steps_of_two_texts_have_the_ids_of_their_own(style: Attend) -> None:
    first, second, step = generator_of_texts()
    means: list[Tensor] = []
    for attend in (style, fused):
        model, caches = Decodes(attend), ([], [])
        with warnings.catch_warnings(action="error"), torch.no_grad(), watch(model, tokens="inputs") as recording:
            for ids, cache in ((first, 0), (second, 1), (step, 0), (step, 1)):
                model(ids, caches[cache])
        means.append(recording["induction"].mean)
        assert recording["Decodes", 0, "induction"].count == 13
    torch.testing.assert_close(*means)


def test_a_step_of_a_text_that_was_not_recorded_has_no_ids() -> None:
    first, second, step = generator_of_texts()
    model, foreign = Decodes(plain), []
    with torch.no_grad():
        model(second, foreign)
    caught, recording = warnings.catch_warnings(record=True, action="always"), watch(model, tokens="inputs")
    with caught as issued, torch.no_grad(), recording as seen:
        model(first, [])
        model(step, foreign)
    assert [each.category for each in issued] == [WatchWarning]
    assert "ids of cached keys are unknown" in str(issued[0].message)
    assert seen["Decodes", 0, "induction"].count == 5


def test_heads_that_cannot_be_reached_are_an_error_that_names_the_layer() -> None:
    layer, x = Layer(plain), torch.randn(2, 7, 15)
    with pytest.raises(WatchError, match=r"'Layer'.*Attention that a module computes itself"):  # noqa: SIM117
        with ablate(layer, {"Layer": 0}):
            layer(x)
    with pytest.raises(WatchError, match=r"Layer"):
        head_importance(layer, lambda model: model(x).square().mean())

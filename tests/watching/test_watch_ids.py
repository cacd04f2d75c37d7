"""watch(tokens="inputs"): ids go with the text whose keys a cache holds, and with no other sequence."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import MultiHeadAttention, Observe, Recording, watch
from headscope.cache import RollingCache
from headscope.masks import window
from headscope.positions import Rotary
from headscope.watching import WatchWarning

WIDTH, HEADS = 8, 2
BOTH = ("duplicate", "induction")


class Held:
    """A cache of keys, [B, H, K, D]."""

    def __init__(self) -> None:
        self.keys = torch.zeros(1, HEADS, 0, WIDTH // HEADS)

    def add(self, keys: Tensor) -> Tensor:
        self.keys = torch.cat([self.keys, keys], 2) if self.keys.numel() else keys
        return self.keys


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, hidden_states: Tensor, past_key_values: Held | None = None) -> Tensor:
        q, k = self.qk(hidden_states).unflatten(-1, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
        k = k if past_key_values is None else past_key_values.add(k)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask).transpose(1, 2).flatten(2)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(9, WIDTH), nn.Embedding(30, WIDTH)
        self.self_attn = SelfAttention()

    def forward(self, input_ids: Tensor, past_key_values: Held | None = None) -> Tensor:
        before = 0 if past_key_values is None else past_key_values.keys.shape[2]
        x = self.embed(input_ids) + self.places(torch.arange(input_ids.shape[1]) + before)
        return self.self_attn(x, past_key_values)


def last_rows(seen: Recording) -> dict[str, Tensor]:
    """Of the last step, the last row of each batch entry and head, [B, H]."""
    values = seen.stats[0].kept[-1].values
    return {name: values[name][:, :, -1] for name in BOTH if name in values}


def watched(model: nn.Module, **options: Any) -> Any:
    return watch(model, what=Observe(keep_rows=True), tokens="inputs", **options)


ONE, OTHER = torch.tensor([[1, 2, 3, 2], [4, 5, 4, 6]]), torch.tensor([[6, 7, 8, 1], [2, 2, 3, 3]])
STEP = torch.tensor([[2], [4]])


def turns(model: Decoder) -> Tensor:
    one, other = Held(), Held()
    for ids, cache in ((ONE, one), (OTHER, other), (STEP, one)):
        model(ids, cache)
    return torch.cat([ONE, STEP], 1)


def cropped(model: Decoder) -> Tensor:
    cache = Held()
    for ids in (ONE, OTHER):
        model(ids, cache)
    cache.keys = cache.keys[:, :, :5]
    model(STEP, cache)
    return torch.cat([ONE, OTHER[:, :1], STEP], 1)


def copied(model: Decoder) -> Tensor:
    one = Held()
    model(ONE, one)
    other = copy.deepcopy(one)
    model(OTHER, one)
    model(STEP, other)
    return torch.cat([ONE, STEP], 1)


def reordered(model: Decoder) -> Tensor:
    cache = Held()
    for ids in (ONE, OTHER):
        model(ids, cache)
    cache.keys = cache.keys[[1, 0]]
    model(STEP, cache)
    return torch.cat([torch.cat([ONE, OTHER], 1).flip(0), STEP], 1)


def repeated(model: Decoder) -> Tensor:
    cache = Held()
    model(ONE, cache)
    cache.keys = cache.keys[[0, 0, 1]]
    model(OTHER[[0, 1, 1]], cache)
    cache.keys = cache.keys[[2]]
    model(STEP[:1], cache)
    return torch.cat([ONE[1:], OTHER[1:], STEP[:1]], 1)


@pytest.mark.parametrize("run", [turns, cropped, copied, reordered, repeated])
def test_a_step_has_the_ids_of_the_text_that_its_cache_holds(run: Callable[[Decoder], Tensor]) -> None:
    model = Decoder()
    with torch.no_grad(), watched(model) as seen:
        text = run(model)
    with torch.no_grad(), watched(model) as whole:
        model(text)
    steps, exact = last_rows(seen), last_rows(whole)
    assert set(exact) == set(BOTH)
    for name in BOTH:
        torch.testing.assert_close(steps[name], exact[name], equal_nan=True, msg=name)


@pytest.mark.parametrize("unseen", ["error", "ignore"])
def test_a_step_whose_text_was_not_watched_has_no_ids(unseen: str) -> None:
    model, cache = Decoder(), Held()
    with torch.no_grad():
        model(ONE, cache)
        with warnings.catch_warnings(record=True) as caught, watched(model, unseen=unseen) as seen:
            warnings.simplefilter("always")
            model(OTHER, Held())  # as long
            model(STEP, cache)
            model(STEP, cache)
    assert not last_rows(seen)
    assert seen["duplicate"].count.tolist() == [[2, 2]], "of the text that was watched"
    messages = [str(each.message) for each in caught if each.category is WatchWarning]
    assert len(messages) == (unseen == "error")
    assert all('tokens="inputs": the ids of cached keys are unknown' in text for text in messages)


def test_texts_whose_keys_are_the_same_have_no_ids() -> None:
    model = Decoder()
    nn.init.zeros_(model.embed.weight)  # only positions are left
    with (
        torch.no_grad(),
        pytest.warns(WatchWarning, match="the ids of cached keys are unknown"),
        watched(model) as seen,
    ):
        turns(model)
    assert not last_rows(seen)


class Sliding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.self_attn = nn.Embedding(9, WIDTH), MultiHeadAttention(WIDTH, HEADS, rotary=Rotary(4))

    def forward(self, input_ids: Tensor, cache: RollingCache | None = None) -> Tensor:
        return self.self_attn(self.embed(input_ids), mask=window(3), cache=cache)


@pytest.mark.parametrize("copies", [False, True])
def test_a_cache_that_has_dropped_keys_has_to_be_the_same_object(copies: bool) -> None:
    """What it holds does not show what came before."""
    model, cache, text = Sliding(), RollingCache(3), torch.tensor([[1, 2, 3, 2, 1, 2, 1]])
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught, watched(model) as seen:
        warnings.simplefilter("always")
        for ids in text.split([4, 1, 1, 1], 1):
            model(ids, cache)
            cache = copy.deepcopy(cache) if copies else cache
    with torch.no_grad(), watched(model) as whole:
        model(text)
    assert len(caught) == copies
    if copies:
        assert not last_rows(seen)
        return
    for name in BOTH:
        torch.testing.assert_close(last_rows(seen)[name], last_rows(whole)[name], equal_nan=True, msg=name)


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = SelfAttention()

    def forward(self, inputs_embeds: Tensor) -> Tensor:
        return self.self_attn(inputs_embeds)


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Tower()

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.encoder(pixel_values.flatten(2).mT)


class Mixed(nn.Module):
    """A text tower that is called with ids, one that is called with their embeddings, and one of pictures."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.merged, self.pictures, self.joint = Decoder(), Tower(), Pictures(), SelfAttention()

    def forward(self, input_ids: Tensor, pixel_values: Tensor | None = None) -> None:
        x = self.text(input_ids)
        self.merged(inputs_embeds=x)
        if pixel_values is not None:
            self.joint(self.pictures(pixel_values))


class Speech(nn.Module):
    """An encoder of audio, whose decoder is called with ids."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Recorded(), Decoder()

    def forward(self, sounds: Tensor, decoder_input_ids: Tensor) -> None:
        self.encoder(sounds)
        self.decoder(decoder_input_ids)


class Recorded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = SelfAttention()

    def forward(self, sounds: Tensor) -> Tensor:
        """[B, channels, length]."""
        return self.self_attn(sounds.mT)


class Pair(nn.Module):
    """Two texts, neither of them by a name that says which layer it is of."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.self_attn = nn.Embedding(9, WIDTH), SelfAttention()

    def forward(self, source: Tensor, other: Tensor) -> None:
        self.self_attn(self.embed(other))


class Numbered(nn.Module):
    """A text whose layers are called with its vectors and other whole numbers, one a token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(9, WIDTH), Block()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.layer(self.embed(input_ids), torch.zeros_like(input_ids))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = SelfAttention()

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        return self.self_attn(x + level[..., None])


def test_whole_numbers_beside_vectors_are_no_ids() -> None:
    model, ids = Numbered(), torch.arange(4)[None]
    with torch.no_grad(), watched(model) as seen:
        model(ids)
    assert seen.stats["layer.self_attn"][0, "duplicate"].count.tolist() == [0] * HEADS


@pytest.mark.parametrize(
    ("model", "inputs", "wanted"),
    [
        (Mixed, (ONE, torch.randn(2, WIDTH, 2, 2)), {"text.self_attn", "merged.self_attn"}),
        (Mixed, (ONE,), {"text.self_attn", "merged.self_attn"}),
        (Speech, (torch.randn(2, WIDTH, 4), ONE), {"decoder.self_attn"}),
        (Pair, (ONE, OTHER), set()),
    ],
    ids=["pictures beside a text", "a text alone", "audio", "two texts"],
)
def test_ids_are_of_the_sequence_that_is_made_from_them(
    model: Callable[[], nn.Module], inputs: tuple[Tensor, ...], wanted: set[str]
) -> None:
    built = model()
    with torch.no_grad(), watched(built) as seen:
        built(*inputs)
    assert {layer for layer in seen.layers if "duplicate" in seen.stats[layer].names} == wanted

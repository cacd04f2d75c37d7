"""watch: which layers are seen as what, masks, tokens, and what is refused."""

from __future__ import annotations

import copy
import functools
import json
import math
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headscope
from headscope import Observe, Recording, watch
from headscope._intercept import intercepted_call
from headscope._intercept.masks import split, to_rule
from headscope.masks import Dense
from headscope.stats import HeadStats, merge
from headscope.watching import WatchError
from support.forking import run_program
from support.watched_small import Attention, Raw, Small, input_of

# ---------------------------------------------------------------- which layers, and what they are


def test_layers_are_chosen_by_name_pattern_or_rule() -> None:
    model = nn.ModuleDict({"a": Small(), "b": Small()})
    x = input_of(model)

    def layers(chosen: Any) -> tuple[str, ...]:
        with watch(model, layers=chosen) as seen:
            model["b"](model["a"](x))
        return seen.layers

    assert layers("a") == ("a.plain", "a.ours", "a.theirs")
    assert layers(["*.ours", "b.pl*"]) == ("a.ours", "b.plain", "b.ours")
    assert layers(lambda name, module: isinstance(module, nn.MultiheadAttention)) == ("a.theirs", "b.theirs")
    with pytest.raises(ValueError, match=r"layers: 'c' does not match any module of the model, which has "):
        layers("c")
    with pytest.raises(ValueError, match="layers: the predicate does not match any module"):
        layers(lambda name, module: False)


def test_planted_patterns_keep_their_orientation() -> None:
    """Row is query: a head that looks back is not called one that looks ahead."""

    class Planted(nn.Module):
        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

        def forward(self, x: Tensor) -> Tensor:
            k = 40 * torch.eye(13)[None, None]
            q = torch.eye(13).roll(self.step, 1)[None, None]
            return F.scaled_dot_product_attention(q, k, k)

    for step, name in ((-1, "previous"), (0, "self"), (1, "next")):
        model = Planted(step)
        with watch(model, what=Observe(edges=13)) as seen:
            model(torch.zeros(1))
        assert seen[0, 0, name].mean > 0.99
        assert {"previous", "self", "next"} - {name} == {
            each for each in ("previous", "self", "next") if seen[0, 0, each].mean < 0.01
        }
        pairs = {(edge.i, edge.j) for edge in seen[0].edges.of(0)}
        assert pairs == {(i, (i + step) % 13) for i in range(13)}


@pytest.mark.parametrize(
    ("name", "keys", "kinds", "wanted"),
    [
        ("attn", 7, {}, "self"),
        ("attn", 9, {}, "cross"),
        ("cross_attn", 7, {}, "cross"),
        ("cross_attn", 7, {"cross*": "self"}, "self"),
        ("attn", 9, {"attn": "self"}, "self"),
        ("self_attn", 9, {}, "self"),
        ("self_attention", 9, {}, "self"),
        ("SelfAttention", 9, {}, "self"),
        ("selfattn", 9, {}, "self"),
        ("self_attn", 9, {"self_attn": "cross"}, "cross"),
        ("self_attn", 5, {}, "cross"),
        ("cross_self_attn", 9, {}, "cross"),
    ],
)
def test_self_or_cross(name: str, keys: int, kinds: Any, wanted: str) -> None:
    model = nn.ModuleDict({name: Raw()})
    with watch(model, kinds=kinds) as seen:
        model[name](torch.randn(2, 3, 7, 4), torch.randn(2, 3, keys, 4))
    assert seen.kinds == {name: wanted}
    assert ("previous" in seen.names) == (wanted == "self")


def test_a_cache_that_grows_is_self_attention() -> None:
    model = nn.ModuleDict({"attn": Raw()})
    k = torch.randn(1, 2, 7, 4)
    with watch(model) as seen:
        model["attn"](k[:, :, :5], k[:, :, :5])
        for n in (6, 7):
            model["attn"](k[:, :, n - 1 : n], k[:, :, :n])
    assert seen.kinds == {"attn": "self"}
    assert seen["previous"].count.tolist() == [[6, 6]], "row 0 has none"


ROOM = 11


class Static(nn.Module):
    """Self-attention over a buffer that is made before, each batch entry written from a place of its own."""

    def __init__(self, width: int = 6, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.embed = nn.Embedding(19, width)
        self.additive = False

    def forward(self, input_ids: Tensor, cache: Tensor, first: list[int], hidden: Tensor | None = None) -> Tensor:
        """``cache``: [2, B, H, ROOM, D]; ``hidden``: keys that nobody may see, [B, ROOM]."""
        length = input_ids.shape[1]
        q, k, v = self.qkv(self.embed(input_ids)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        for b, n in enumerate(first):
            cache[0, b, :, n : n + length], cache[1, b, :, n : n + length] = k[b], v[b]
        place = torch.tensor(first)[:, None] + torch.arange(length)  # [B, T]
        mask = torch.arange(cache.shape[-2]) <= place[:, None, :, None]  # [B, 1, T, K]
        if hidden is not None:
            mask = mask & ~hidden[:, None, None, : cache.shape[-2]]
            own = hidden.gather(1, place)
            mask = mask & ~own[:, None, :, None]
        given = torch.zeros(mask.shape).masked_fill(~mask, -math.inf) if self.additive else mask
        return F.scaled_dot_product_attention(q, cache[0], cache[1], attn_mask=given)


def cache_of(model: Static, batch: int, keys: int) -> Tensor:
    return torch.zeros(2, batch, model.heads, keys, 6 // model.heads)


def assert_same(got: Recording, wanted: Recording) -> None:
    """The same statistics, to rounding; the keys that have not come got nothing."""
    assert set(got.names) == set(wanted.names)
    for name in wanted.names:
        one, other = got[0, name], wanted[0, name]
        assert one.count.tolist() == other.count.tolist(), name
        torch.testing.assert_close(one.mean, other.mean, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
    keys = wanted.stats[0].received.shape[1]
    for part in ("received", "eligible"):
        one, other = getattr(got.stats[0], part), getattr(wanted.stats[0], part)
        torch.testing.assert_close(one[:, :keys], other)
        assert not one[:, keys:].any()


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("chunk", [1, 1 << 22])
@pytest.mark.parametrize("steps", [(7,), (4, 3), (5, 1, 1), (1,) * 7], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_a_buffer_with_room_for_more(
    padded: bool, steps: tuple[int, ...], chunk: int, additive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows stand where the mask says, not at the end of the room."""
    monkeypatch.setattr(intercepted_call, "AT_ONCE", chunk)
    model, ids = Static(), torch.randint(0, 3, (3, 7))
    model.additive = additive
    hidden = torch.arange(ROOM) < torch.tensor([[0], [2], [5]]) if padded else None
    options: Any = {"kinds": {"*": "self"}, "what": Observe(windows=(2,)), "tokens": "inputs"}
    with torch.no_grad():
        with watch(model, **options) as wanted:
            model(ids, cache_of(model, 3, 7), [0] * 3, hidden)
        for tokens in ("inputs", ids):
            cache, n = cache_of(model, 3, ROOM), 0
            with watch(model, **{**options, "tokens": tokens}) as seen:
                for length in steps:
                    model(ids[:, n : n + length], cache, [n] * 3, hidden)
                    n += length
            assert_same(seen, wanted)


def test_a_buffer_in_which_each_text_has_its_own_place() -> None:
    model, ids = Static(), torch.randint(0, 19, (3, 6))
    options: Any = {"kinds": {"*": "self"}, "what": Observe(windows=(2,))}
    first = [0, 2, 4]
    with torch.no_grad():
        cache = cache_of(model, 3, ROOM)
        with watch(model, **options) as seen:
            model(ids[:, :4], cache, first)
            model(ids[:, 4:], cache, [n + 4 for n in first])
        parts: list[HeadStats] = []
        for b, n in enumerate(first):
            with watch(model, **options) as alone:
                for start, stop in ((0, 4), (4, 6)):
                    model(ids[b : b + 1, start:stop], cache[:, b : b + 1, :, : n + stop], [n + start])
            parts.append(alone.stats)
    wanted = Recording(merge(*parts), seen.about)
    assert_same(seen, wanted)


@pytest.mark.parametrize("shape", [(2, 3, 1, 2, 6), (1, 3, 1, 2, 6), (3, 1, 2, 6), (2, 6)], ids=str)
def test_a_buffer_beside_two_axes_of_batches(shape: tuple[int, ...]) -> None:
    class SelfAttention(nn.Module):
        def forward(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
            return headscope.attention(q, k, k, mask=mask)

    model, q, k = SelfAttention(), torch.randn(2, 3, 2, 2, 4), torch.randn(2, 3, 2, 6, 4)
    mask = torch.arange(6) <= torch.arange(1, 3)[:, None]
    with watch(model) as seen:
        model(q, k, mask.expand(shape))
    with watch(model) as wanted:
        model(q, k[..., :3, :], mask[:, :3])
    assert seen.kinds == {"SelfAttention": "self"}
    for name in ("entropy", "distance", "self", "previous"):
        ours, theirs = seen[0, name], wanted[0, name]
        torch.testing.assert_close((ours.count, ours.mean), (theirs.count, theirs.mean))


def test_positions_of_a_buffer_with_room_for_more() -> None:
    model, ids = Static(), torch.randint(0, 19, (2, 6))
    positions = torch.arange(ROOM).double() ** 2
    for first in ([0, 0], [0, 3]):
        with torch.no_grad(), watch(model, kinds={"*": "self"}, positions=positions) as seen:
            model(ids, cache_of(model, 2, ROOM), first)
        assert seen[0, "self"].count.tolist() == [12, 12]
        assert seen[0, "previous"].count.tolist() == [2 - (first[1] > 0)] * 2, "0 and 1 alone are neighbours"


@pytest.mark.parametrize("name", ["usual", "both ways", "some rows", "heads", "before", "none"])
def test_a_mask_that_does_not_say_where_rows_stand(name: str) -> None:
    """They stay at the end of the keys."""
    gap = torch.arange(9) - torch.arange(5)[:, None]  # [Q, K]
    masks = {
        "usual": (gap <= 4).expand(2, 1, 5, 9),
        "both ways": (torch.arange(9) < 6).expand(2, 1, 5, 9),
        "some rows": ((gap <= 2) | (torch.arange(5)[:, None] == 1)).expand(2, 1, 5, 9),
        "heads": torch.stack([gap <= 1, gap <= 2]).expand(2, 2, 5, 9),
        "before": (gap < 0).expand(2, 1, 5, 9),
        "none": torch.zeros(2, 1, 5, 9, dtype=torch.bool),
    }
    q, k = torch.randn(2, 2, 5, 4), torch.randn(2, 2, 9, 4)
    model = Raw()
    with watch(model, kinds={"Raw": "self"}) as seen:
        model(q, k, attn_mask=masks[name])
    wanted = headscope.observe(q, k, k, mask=masks[name])
    # the sums of nulls round otherwise for spans of keys than for the same mask as a tensor
    assert rounded(seen.stats.named("0").to_dict()) == rounded(wanted.to_dict())


def rounded(values: object) -> object:
    """Return the values with 12 significant digits."""
    return json.loads(json.dumps(values), parse_float=lambda text: float(f"{float(text):.12g}"))


def test_positions_on_a_grid() -> None:
    grid = torch.tensor([[math.nan, math.nan], *([float(y), float(x)] for y in range(2) for x in range(3))])
    model, q = Raw(), torch.randn(1, 2, 7, 4)
    with watch(model, positions=grid) as seen:
        model(q, q)
        model(q[:, :, -1:], q)
    wanted = headscope.observe(q, q, q, q_pos=grid, k_pos=grid)
    wanted = wanted.merge(headscope.observe(q[:, :, -1:], q, q, q_pos=grid[-1:], k_pos=grid))
    assert seen.stats.named("0").to_dict() == wanted.to_dict()
    assert seen["distance"].count.tolist() == [[7, 7]], "CLS stands nowhere"
    error = r"layer Raw: positions: got 7, this layer has 5 keys and 5 queries; select matching layers with layers="
    with pytest.raises(WatchError, match=error), watch(model, positions=grid):
        model(q[:, :, :5], q[:, :, :5])


def test_is_causal_is_top_left() -> None:
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 7, 4)
    model = Raw(is_causal=True)
    with watch(model) as seen:
        model(q, k)
    assert seen[0].eligible.tolist() == [[3, 2, 1, 0, 0, 0, 0]] * 2
    assert seen["self"].count.tolist() == [[3, 3]]


def test_other_numbers_of_axes() -> None:
    model = Raw()
    q = torch.randn(2, 5, 3, 7, 4)
    with watch(model) as seen:
        model(q[0, 0, 0], q[0, 0, 0])
    assert seen["entropy"].count.tolist() == [[7]]
    with watch(model) as seen:
        model(q, q)
    assert seen["entropy"].count.tolist() == [[70] * 3]


@pytest.mark.parametrize("shape", [(2, 1, 1, 1, 6), (2, 3, 1, 5, 6), (3, 1, 5, 6), (1, 3, 4, 1, 6), (4, 5, 6), (6,)])
@pytest.mark.parametrize("accelerate", [False, True])
def test_masks_beside_many_axes(shape: tuple[int, ...], accelerate: bool) -> None:
    model = Raw()
    q, k = torch.randn(2, 3, 4, 5, 8), torch.randn(2, 3, 4, 6, 8)
    seen = torch.rand(shape) < 0.7
    wanted = model(q, k, attn_mask=seen)
    with watch(model, accelerate=accelerate) as found:
        torch.testing.assert_close(model(q, k, attn_mask=seen), wanted)
    pairs = seen.expand(2, 3, 4, 5, 6).sum((0, 1, 3))  # [H, K]
    assert found[0].eligible.tolist() == pairs.tolist()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_is_refilled_between_layers(inference: bool, dtype: torch.dtype) -> None:
    class Refills(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = Raw(), Raw(), Raw()

        def forward(self, x: Tensor) -> Tensor:
            later = torch.ones(1, 1, 5, 5).triu(1).bool()
            mask = ~later if dtype == torch.bool else torch.zeros(1, 1, 5, 5).masked_fill(later, -math.inf)
            x = self.one(x, x, attn_mask=mask)
            x = self.two(x, x, attn_mask=mask)
            mask.fill_(True if dtype == torch.bool else 0.0)
            return self.three(x, x, attn_mask=mask)

    model = Refills()
    x = torch.randn(1, 2, 5, 4)
    wanted = model(x)
    for accelerate in (False, True):
        with torch.inference_mode(inference), watch(model, accelerate=accelerate) as seen:
            torch.testing.assert_close(model(x), wanted)
        assert [seen[n].eligible[0].tolist() for n in range(3)] == [[5, 4, 3, 2, 1]] * 2 + [[5] * 5]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    x = torch.nested.nested_tensor([torch.randn(3, 2, 8), torch.randn(5, 2, 8)], layout=layout).transpose(1, 2)
    x = x.contiguous() if layout == torch.strided else x
    model = Raw()
    with pytest.raises(WatchError, match=r"layer Raw: its tensors are nested; pass padded tensors"), watch(model):
        model(x, x)


def test_tiles_are_of_what_was_observed() -> None:
    """A learned query that the optimizer has moved since, and a bias."""
    model = Raw()
    q, k, bias = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 6, 4), torch.zeros(3, 6)
    with watch(model, what=Observe(keep_qk=True, keep_rows=True)) as seen:
        model(q, k, attn_mask=bias)
        model(q, k, attn_mask=torch.ones(3, 6).bool())
    before = seen[0].tile(0, 3, 0, 6)
    q.zero_()
    k.zero_()
    torch.testing.assert_close(seen[0].tile(0, 3, 0, 6), before, rtol=0, atol=0)
    torch.testing.assert_close(before[0].amax(-1), seen[0].kept[0].values["max_weight"].float()[0])


@pytest.mark.parametrize("what", ["bias", "mask"])
def test_tiles_of_what_has_been_written_to_are_refused(what: str) -> None:
    q, seen = torch.randn(1, 2, 3, 4), torch.rand(3, 3) < 0.5
    tensor = seen if what == "mask" else torch.randn(3, 3)
    given = {"mask": Dense(tensor)} if what == "mask" else {"bias": tensor}
    stats = headscope.observe(q, q, what=Observe(keep_qk=True), **given)
    assert stats.tile(0, 3, 0, 3).shape == (1, 2, 3, 3)
    tensor.zero_()
    with pytest.raises(ValueError, match=rf"tile: {what} \[.*3, 3\] was overwritten after it was observed"):
        stats.tile(0, 3, 0, 3)


def test_the_default_device_does_not_matter_to_who_watches() -> None:
    """Nor to who logs, also where there is nothing to log."""
    seen = torch.tensor([[True, True, False], [True, True, True]])[:, None, None].expand(2, 1, 3, 3)
    q, model = torch.randn(2, 3, 3, 4), Raw()
    with watch(model) as wanted:
        model(q, q, attn_mask=seen)
    logged: list[dict[str, float]] = []
    with torch.device("meta"):
        for what in (Observe(), Observe(row_stats=False)):
            with watch(model, what=what, log=lambda values, step: logged.append(values)) as found:
                model(q, q, attn_mask=seen)
            torch.testing.assert_close(found[0].received, wanted[0].received, rtol=0, atol=0)
    assert wanted.flat().items() <= logged[0].items()
    assert logged[1] == {}


COPIED: dict[str, Callable[[Any], Any]] = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}


@pytest.mark.parametrize("how", COPIED)
@pytest.mark.parametrize("writes", [0, 2])
def test_a_copys_tiles_are_those_of_the_original_whatever_had_been_written_to_before(how: str, writes: int) -> None:
    q, bias = torch.randn(1, 2, 3, 4), torch.zeros(3, 3)
    for _ in range(writes):
        bias.normal_()
    stats = headscope.observe(q, q, bias=bias, what=Observe(keep_qk=True))
    wanted, again = stats.tile(0, 3, 0, 3), COPIED[how](stats)
    bias.normal_()
    torch.testing.assert_close(COPIED[how](again).tile(0, 3, 0, 3), wanted, rtol=0, atol=0)
    late = COPIED[how](COPIED[how](stats))
    with pytest.raises(ValueError, match=r"tile: bias \[.*3, 3\] was overwritten after it was observed"):
        late.tile(0, 3, 0, 3)
    torch.testing.assert_close(late.flat(), stats.flat(), rtol=0, atol=0)


def test_a_mask_that_is_as_low_as_can_be_hides() -> None:
    hidden = torch.tensor([False, False, True, True])
    q = torch.randn(1, 1, 4, 4)
    for low in (-math.inf, -1e9, torch.finfo(torch.float32).min):
        model = Raw(attn_mask=torch.where(hidden, low, 0.0).expand(1, 1, 4, 4))
        with watch(model) as seen:
            model(q, q)
        assert seen["entropy"].count.tolist() == [[2]], "rows of padding do not count"
        assert seen[0].eligible.tolist() == [[2, 2, 0, 0]]


def test_heads_that_change_are_an_error() -> None:
    model = Raw()
    with watch(model) as seen:
        model(torch.randn(1, 3, 5, 4), torch.randn(1, 3, 5, 4))
        model(torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4))
    for _ in range(2):
        with pytest.raises(WatchError, match="heads: cannot merge 3 heads with 2"):
            _ = seen.stats


# ---------------------------------------------------------------- tokens


def test_tokens_that_are_given() -> None:
    model = Attention()
    tokens = torch.tensor([5, 3, 9, 5, 3, 9, 5])
    x = input_of(model)
    with watch(model, tokens=tokens) as seen:
        model(x)
        model(x[:, :4])
    assert seen["duplicate"].count.tolist() == [[2 * 4 + 2] * 3]
    assert seen["induction"].count.tolist() == [[2 * 4 + 2] * 3]
    with pytest.raises(ValueError, match="tokens: was passed twice"):
        watch(model, tokens=tokens, what=Observe(tokens=tokens))


def test_fewer_tokens_than_keys_are_an_error() -> None:
    """Keys without an id must not pass for repeats of each other."""
    model, q = Raw(), torch.randn(1, 2, 7, 4)
    for tokens in (torch.arange(6), torch.arange(6)[None]):
        wanted = r"layer Raw: tokens: got 6, this layer has 7 keys; pass a token for each key, or"
        with pytest.raises(WatchError, match=wanted), watch(model, tokens=tokens):
            model(q, q)
    with watch(model, tokens=torch.arange(7)) as seen:
        model(q, q)
        with pytest.raises(WatchError, match="tokens: got 7, this layer has 8 keys"):
            model(q[:, :, :1], torch.cat([q, q[:, :, :1]], 2))  # the next step of a cache
    assert seen["duplicate"].count.tolist() == [[0, 0]]


def test_tokens_of_the_shipped_model() -> None:
    """Its induction head is found by what it does."""
    example = headscope.load_example("text")
    ids = example.tokenizer.encode("the cat sat on the mat. " * 4)
    with torch.no_grad(), watch(example.model, tokens="inputs") as seen:
        example.model(torch.tensor([ids]))
    assert seen["induction"].mean.max() > 0.5
    assert seen["induction"].count.min() > 30


# ---------------------------------------------------------------- masks


def test_masks_that_are_met_often_are_known_by_their_rule() -> None:
    """Left and right padding, windows, caches, each boolean or additive; all else stays as it is."""
    padded = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]]).bool()[:, None, None]
    holes = torch.tensor([[1, 0, 1, 1, 0, 1, 1], [1, 1, 1, 1, 1, 1, 1]]).bool()[:, None, None]
    gap = torch.arange(7) - torch.arange(7)[:, None]
    back, window = (gap <= 0)[None, None], ((gap <= 0) & (gap > -3))[None, None]
    every = torch.ones(1, 1, 7, 7, dtype=torch.bool)
    rules = [
        back,
        back & padded,
        window,
        window & padded,
        every & padded,
        back & holes,
        back[:, :, 4:],
        (back & padded)[:, :, 2:],
    ]
    others = [
        every ^ back,
        back ^ (gap == -2),
        (gap.abs() < 2)[None, None],
        back[:, :, :4],
        back.expand(1, 3, 7, 7),
        back[0],
    ]
    for seen in (*rules, *others):
        found = to_rule(seen)
        assert isinstance(found, Dense) == any(seen is other for other in others)
        sizes = (len(seen) if seen.ndim == 4 else 1, seen.shape[-3], seen.shape[-2], seen.shape[-1])
        assert torch.equal(found.dense(*sizes), seen.expand(sizes))
        if seen.ndim == 4:
            mask, bias = split(torch.where(seen, 0.0, -1e30))
            assert bias is None
            assert mask is not None
            assert torch.equal(mask.dense(*sizes), seen.expand(sizes))
    tilted = torch.where(back, gap.float(), torch.finfo(torch.float32).min)
    mask, bias = split(tilted)
    assert mask is None
    assert bias is not None
    assert torch.equal(bias, torch.where(back, gap.float(), -math.inf))


# ---------------------------------------------------------------- what is refused


class Home(nn.Module):
    """Attention without a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(15, 15)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        return (x @ x.transpose(-2, -1)).sigmoid() @ x


def test_a_layer_that_is_not_seen_is_named() -> None:
    model = nn.ModuleDict({"attn": Attention(), "home_attention": Home(), "norm_attention": nn.LayerNorm(15)})

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: Tensor) -> Tensor:
            for part in model.values():
                x = part(x)
            return x

    whole = Model()
    x = input_of(whole)
    with (
        pytest.raises(
            WatchError,
            match=r"1 of the attention layers that ran could not be observed: parts.home_attention \(\w+\)\. ",
        ),
        watch(whole),
    ):
        whole(x)
    with watch(whole, layers="parts.attn") as seen:
        whole(x)
    assert seen.layers == ("parts.attn",)
    with watch(whole, unseen="ignore") as seen:
        whole(x)
    assert seen.layers == ("parts.attn",)
    with pytest.raises(WatchError, match=r"parts.home_attention"), watch(whole, layers="*home*"):
        whole(x)


class RMSNormGated(nn.Module):
    """As Mamba 2's, with a projection for the gate."""

    def __init__(self, matrices: int = 1) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(15))
        self.gates = nn.ModuleList([nn.Linear(15, 15) for _ in range(matrices)])

    def forward(self, x: Tensor) -> Tensor:
        for gate in self.gates:
            x = x * F.silu(gate(x))
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


class AdaptiveScale(RMSNormGated):
    """A norm whose class does not say so."""


class AttentionNorm(RMSNormGated):
    """A norm whose class says attention, too."""


class AttentionPostNorm(Home):
    """Attention whose class ends as that of a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.output = nn.Linear(15, 15)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(super().forward(x))


class Attends(nn.Module):
    """A layer that is seen, and one of another name beside it."""

    def __init__(self, name: str, other: nn.Module) -> None:
        super().__init__()
        self.attn = Attention()
        self.add_module(name, other)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(self.get_submodule(self.name)(x))


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        ("post_attention_layernorm", RMSNormGated()),
        ("post_attention_layernorm", AdaptiveScale(2)),
        ("post_attention_layer_norm", AdaptiveScale()),
        ("attention_norm1", AdaptiveScale()),
        ("attention_normalization", AdaptiveScale()),
        ("after_attention", RMSNormGated()),
        ("scale", AttentionNorm()),
    ],
)
def test_a_norm_is_not_taken_for_an_attention_layer(name: str, norm: nn.Module) -> None:
    model = Attends(name, norm)
    x = input_of(model)
    with watch(model) as seen:
        model(x)
    assert seen.layers == ("attn",)


@pytest.mark.parametrize(("name", "module"), [("layer", AttentionPostNorm()), ("normed_attention", Home())])
def test_attention_that_is_named_after_a_norm_is_still_missed(name: str, module: nn.Module) -> None:
    model = Attends(name, module)
    x = input_of(model)
    with (
        pytest.raises(WatchError, match=rf"1 of the attention layers that ran could not be observed: {name} "),
        watch(model),
    ):
        model(x)


class Part(nn.Module):
    """A single matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(15, 15)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)


def test_a_projection_is_named_by_the_layer_and_layers_of_one_matrix_by_themselves() -> None:
    class AttentionBlock(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(OrderedDict({"linear_attn": Part(), "attn": Attention()}))

    class HomeAttention(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(OrderedDict({"c_attn": Part(), "c_proj": Part()}))

    model = nn.Sequential(AttentionBlock(), HomeAttention(), Attention())
    with (
        pytest.raises(
            WatchError,
            match=r": 2 of the attention layers that ran could not be observed: 0\.linear_attn \(\w+\), 1 \(\w+\)\. ",
        ),
        watch(model),
    ):
        model(input_of(Attention()))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_refused() -> None:
    model = Attention()
    x = input_of(model)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(WatchError, match=r"is compiled.*; compiled: OptimizedModule"), watch(compiled):
        pass
    compiled(x)
    with pytest.raises(WatchError, match="watch: the model, or a part of it, is compiled"), watch(model):
        model(compiled(x))
    within = nn.Sequential(Attention())
    within[0].compile(backend="eager")
    with pytest.raises(WatchError, match=r"compiled: 0$"), watch(within):
        pass
    with pytest.raises(WatchError, match="is compiled"), watch(torch.jit.script(nn.Sequential(nn.Linear(3, 3)))):
        pass


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_around_the_model_lets_it_run_as_it_is() -> None:
    model = Attention()
    x = input_of(model)
    with torch.no_grad(), watch(model) as seen:
        around = torch.compile(lambda x: model(x) + 1, backend="eager")
        assert torch.equal(around(x), model(x) + 1)
    assert seen.forwards == 2
    assert seen["entropy"].count.tolist() == [[28] * 3]


COMPILED_WITHIN = """
import sys, torch, headscope
assert "torch._dynamo" not in sys.modules
model, x = headscope.MultiHeadAttention(16, 2), torch.randn(1, 6, 16)
finders, call = list(sys.meta_path), torch.nn.Module.__call__
with torch.no_grad(), headscope.ablate(model, {"MultiHeadAttention": "all"}), headscope.watch(model) as seen:
    around = torch.compile(lambda x: model(x) + 1, backend="eager")
    torch.testing.assert_close(around(x), model(x) + 1, rtol=0, atol=0)
assert seen.forwards == 2, seen.forwards
assert (sys.meta_path, torch.nn.Module.__call__) == (finders, call)
"""


def test_a_compiler_that_is_first_imported_while_a_model_is_watched_lets_it_run_as_it_is() -> None:
    done = run_program(COMPILED_WITHIN)
    assert done.returncode == 0, done.stderr


def counting(made: list[Any], ran: list[int]) -> Any:
    """A backend for torch.compile that tells which graphs are made, and that one runs."""

    def backend(graph: Any, _: Any) -> Any:
        made.append(graph)
        return lambda *args: (ran.append(1), graph(*args))[1]

    return backend


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("patched", [False, True])
def test_a_function_that_was_compiled_before_lets_the_model_run_as_it_is_while_it_is_watched(patched: bool) -> None:
    made: list[Any] = []
    ran: list[int] = []
    model = Attention()
    if patched:
        model.forward = functools.partial(Attention.forward, model)
    x = input_of(model)
    around = torch.compile(lambda x: model(x) + 1, backend=counting(made, ran))
    other = torch.compile(lambda x: x.sin(), backend=counting(made, ran))
    with torch.no_grad():
        expected = around(x)
        other(x)
        with watch(model) as seen:
            model(x)
            assert torch.equal(around(x), expected)
            assert len(ran) == 2
            other(x)
        around(x)
    assert seen.about.ran == 2
    assert seen["entropy"].count.tolist() == [[28] * 3]
    assert (len(made), len(ran)) == (2, 4), "afterwards they run from the graphs that they had"


@pytest.mark.filterwarnings("ignore")
def test_compiled_functions_are_seen_by_each_of_several_watches_until_it_closes() -> None:
    made: list[Any] = []
    model = Attention()
    x = input_of(model)
    around = torch.compile(lambda x: model(x) + 1, backend=counting(made, []))
    around(x)
    first, second = watch(model), watch(model)
    with first as one:
        second.__enter__()
        around(x)
    around(x)
    second.__exit__(None, None, None)
    around(x)
    assert (one.about.ran, second.recording.about.ran) == (1, 2)
    assert len(made) == 1


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_within_the_model_stays_compiled() -> None:
    ran: list[int] = []

    class Model(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return act(super().forward(x))

    act = torch.compile(lambda x: x.sin() + 1, backend=counting([], ran))
    model = Model()
    x = input_of(model)
    with watch(model):
        model(x)
    model(x)
    assert len(ran) == 2


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_stand_ins_for_tensors_are_refused() -> None:
    model = Attention()
    x = input_of(model)
    with pytest.raises(WatchError, match=r"layer Attention: the model runs within torch.func"), watch(model):
        torch.func.vmap(lambda one: model(one[None]))(x)
    with pytest.raises(WatchError, match="have no values"), watch(model.to("meta")):
        model(x.to("meta"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every: got 0, expected a whole number from 1"),
        ({"every": 1.5}, "every: got float"),
        ({"rows": 0}, "rows: got 0"),
        ({"rows": 3, "what": Observe(rows=4)}, "rows: was passed twice"),
        ({"tokens": "ids"}, "tokens: got 'ids', expected a tensor of ids or"),
        ({"tokens": torch.tensor(3)}, r"tokens: got a single number, expected \[K\] or \[B, K\]"),
        ({"tokens": torch.rand(4)}, "tokens: dtype is float32, expected whole numbers"),
        ({"positions": torch.ones(4) > 0}, "positions: dtype is bool, expected numbers"),
        (
            {"positions": torch.rand(1, 2, 2, 2)},
            r"positions: got \[1, 2, 2, 2\], expected \[K\], \[K, 2\] or \[B, K, 1 or 2\]",
        ),
        ({"positions": [0, 1]}, "positions: got list, expected a torch.Tensor or None"),
        ({"alarms": 3}, "alarms: got int, expected True, False or Limits"),
        ({"rows": 3, "what": 3}, "what: got int"),
        ({"unseen": "warn"}, "unseen: got 'warn'"),
        ({"kinds": {"a": "both"}}, "kinds: got 'both'"),
        ({"kinds": ["self"]}, "kinds: got list, expected a mapping"),
        (
            {"kinds": {"Att*": "self", "x*": "cross"}},
            r"kinds: 'x\*' does not match any module of the model, which has Attention",
        ),
        ({"layers": 3}, "layers: got 3, expected names or patterns, or a function of name and module"),
        ({"layers": [3]}, r"layers: got \[3\], expected names or patterns"),
        ({"layers": []}, "layers: got none, expected at least one; omit layers= for all"),
        ({"what": 3}, "what: got int"),
        ({"texts": "abcdefg"}, "texts: got str, expected a list with a str for each token"),
        ({"texts": 3}, "texts: got int, expected a list with a str for each token"),
        ({"layers": "Atention"}, "which has Attention; the nearest name is 'Attention'"),
        (
            {"layers": lambda name: name},
            r"layers: got a function with the arguments \(name\), expected one of name and",
        ),
    ],
)
def test_what_does_not_fit_is_said(arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        watch(Attention(), **arguments)


def test_a_model_is_wanted() -> None:
    with pytest.raises(TypeError, match=r"model: got str, expected a torch.nn.Module"):
        watch("gpt2")  # type: ignore[arg-type]

"""watch: what is seen of torch's and headscope's own modules, under which name, and that nothing else changes."""

from __future__ import annotations

import copy
import io
import math
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.overrides import _get_current_function_mode_stack as mode_stack
from torch.utils.checkpoint import checkpoint

import headscope
from headscope import Observe, Recording, functional, watch, watching
from headscope._watch_layers import shortened
from headscope._watch_masks import known, split
from headscope.masks import Dense, causal
from headscope.watching import WatchError


class Attention(nn.Module):
    """Causal self-attention by SDPA, with as many heads as are asked for."""

    def __init__(self, width: int = 15, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, H, T, D] each
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Small(nn.Module):
    """Three layers, each of another make."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = Attention()
        self.ours = headscope.MultiHeadAttention(15, 5)
        self.theirs = nn.MultiheadAttention(15, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ours(self.plain(x), mask=causal())
        return self.theirs(x, x, x, need_weights=False)[0]


def input_of(model: nn.Module, width: int = 15) -> Tensor:
    return torch.randn(2, 7, width, dtype=next(model.parameters()).dtype)


def test_layers_are_named_by_path_in_the_order_of_the_model() -> None:
    model = Small().eval()
    x = input_of(model)
    with torch.no_grad(), watch(model) as seen:
        out = model(x)
    with torch.no_grad():
        assert torch.equal(out, model(x))
    assert seen.layers == ("plain", "ours", "theirs")
    assert seen.kinds == dict.fromkeys(seen.layers, "self")
    assert [seen[layer, "entropy"].count.tolist() for layer in range(3)] == [[14] * 3, [14] * 5, [14] * 3]
    assert seen["plain", 1, "entropy"].mean == pytest.approx(seen[0, 1, "entropy"].mean)
    assert (seen.forwards, seen.about.ran) == (1, 1)


def test_a_recording_is_saved_and_loaded(tmp_path: Path) -> None:
    model = Small()
    options: Any = {"tokens": torch.arange(7), "kinds": {"x*": "cross"}}
    with watch(model, what=Observe(map=3), rows=4, texts="abcdefg", **options) as seen:
        model(input_of(model))
    path = seen.save(tmp_path / "seen.safetensors")
    again = Recording.load(path)
    assert again.about == seen.about
    assert again.about.model == "Small"
    said = {"rows": 4, "map": 3, "tokens": "Tensor", "kinds": {"x*": "cross"}, "layers": None, "positions": None}
    assert {name: again.about.options[name] for name in said} == said
    assert again.to_dict() == seen.to_dict()
    assert again.texts == tuple("abcdefg")
    assert headscope.HeadStats.load(path).to_dict() == seen.stats.to_dict()
    bare = seen.stats.save(tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match="holds statistics, but is no recording"):
        Recording.load(bare)


@pytest.mark.parametrize(
    ("names", "short", "pattern"),
    [
        (["h.0.attn", "h.11.attn"], ["0", "11"], "h.*.attn"),
        (["a.0.x", "a.0.y"], ["x", "y"], "a.0.*"),
        (["a.x", "b.x"], ["a", "b"], "*.x"),
        (["a.b.a", "a.a"], ["b.a", "a"], "a.*"),
        (["a", "a#2"], ["a", "a#2"], None),
        (["a.b"], ["a.b"], None),
    ],
)
def test_the_table_leaves_out_what_all_paths_share(names: list[str], short: list[str], pattern: str | None) -> None:
    assert shortened(names) == (short, pattern)


def test_a_recording_shows_itself() -> None:
    model = nn.ModuleDict({"[b]<i>": nn.Sequential(Attention(), Attention())})
    with watch(model) as seen:
        model["[b]<i>"](input_of(model))
    wide = Console(width=160, file=io.StringIO(), record=True)
    wide.print(seen)
    text = wide.export_text()
    assert "Layers: [b]<i>.*." in text
    assert "│ 1     │    2 │   14 │" in text
    assert "[b]&lt;i&gt;.0" in seen._repr_html_()
    assert seen.flat() == seen.stats.flat()
    assert repr(watch(model).recording) == "Recording(ModuleDict: nothing seen so far)"


def test_nothing_seen_is_an_error() -> None:
    watching = watch(Small())
    with pytest.raises(WatchError, match="no forward pass"), watching:
        pass
    with pytest.raises(WatchError, match="nothing has been seen so far"):
        _ = watching.recording.stats
    model: Any = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(WatchError, match="no attention call was seen in Sequential"), watch(model):
        model(torch.randn(2, 3))


# ---------------------------------------------------------------- nothing else changes


def test_torch_stays_on_its_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves it where it sees a hook or a mode, and its output changes."""
    taken: list[str] = []
    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        fast = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *args, fast=fast, name=name: (taken.append(name), fast(*args))[1])
    layer = nn.TransformerEncoderLayer(16, 2, 20, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), Alone()).eval()
    x = torch.randn(2, 7, 16)
    with torch.no_grad(), watch(model) as seen:
        out = model(x)
    with torch.no_grad():
        assert torch.equal(out, model(x))
    assert taken == ["_transformer_encoder_layer_fwd"] * 2 + ["_native_multi_head_attention"] + taken[:3]
    assert seen.layers == ("0.layers.0.self_attn", "0.layers.1.self_attn", "1.attention")


def test_the_fast_path_of_a_subclass_is_seen() -> None:
    """However it is called: with a forward of its own that calls the one it extends, or past ``__call__``."""

    class Extended(nn.TransformerEncoderLayer):
        def forward(self, src: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            return super().forward(src, *args, **kwargs) + 1

    class Past(Alone):
        def forward(self, x: Tensor) -> Tensor:
            return self.attention.forward(x, x, x)[0]

    model = nn.Sequential(Extended(16, 2, 20, batch_first=True), Past()).eval()
    x = torch.randn(2, 7, 16)
    with torch.no_grad(), watch(model) as seen:
        out = model(x)
    with torch.no_grad():
        assert torch.equal(out, model(x))
    assert seen.layers == ("0.self_attn", "1"), "the second is not called as a module: it is the one around it"
    assert seen["entropy"].count.tolist() == [[14, 14]] * 2


class Alone(nn.Module):
    """One ``nn.MultiheadAttention``, on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("on purpose")


def state() -> tuple[Any, ...]:
    """All that watch replaces."""
    from transformers import AttentionInterface

    called = (nn.Module.__call__, torch.overrides.has_torch_function, AttentionInterface.get_interface)
    return *called, functional.watched, [*mode_stack()]


def test_everything_is_restored() -> None:
    before = state()
    model = nn.Sequential(Attention(), Failing())
    with pytest.raises(ZeroDivisionError, match="on purpose"), watch(model) as seen:
        model(input_of(model))
    assert state() == before
    assert seen.layers == ("0",), "what was seen before it failed"
    model[1] = nn.Identity()
    with watch(model):
        with watch(model):
            model(input_of(model))
        assert nn.Module.__call__ is not before[0]
        model(input_of(model))
    assert state() == before
    assert not model._forward_hooks
    assert "forward" not in vars(model)


def test_modes_of_others_stay_in_their_order() -> None:
    class Counting(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += func is F.scaled_dot_product_attention
            return func(*args, **(kwargs or {}))

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.mode = Small(), Counting()

        def forward(self, x: Tensor) -> Tensor:
            with self.mode:
                return self.small(x)

    model, outer = Around().eval(), Counting()
    with outer, watch(model) as seen:
        model(input_of(model))
        assert mode_stack() == [outer]
    assert seen.layers == ("small.plain", "small.ours", "small.theirs")
    inside = model.mode.calls
    model(input_of(model))
    assert model.mode.calls == 2 * inside > 0, "it sees what it sees without"
    assert outer.calls == inside


def test_gradients_are_those_without() -> None:
    model = Small()
    x = input_of(model)
    found = []
    for looking in (False, True):
        model.zero_grad()
        with watch(model, what=Observe(map=2, edges=2)) if looking else nullcontext():
            model(x).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    for plain, watched in zip(*found, strict=True):
        assert torch.equal(plain, watched)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_counted_once(reentrant: bool) -> None:
    class Checkpointed(Small):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    plain, model = Small(), Checkpointed()
    model.load_state_dict(plain.state_dict())
    x = input_of(model).requires_grad_()
    recordings = []
    for each in (plain, model):
        with watch(each) as seen:
            each(x).sum().backward()
        assert (seen.forwards, seen.about.ran) == (1, 1)
        recordings.append(seen.to_dict()["layers"])
    assert recordings[0] == recordings[1]


def test_dropout_in_training_draws_what_it_draws_without() -> None:
    layer = nn.TransformerEncoderLayer(15, 3, 20, dropout=0.3, batch_first=True).train()
    x = torch.randn(2, 7, 15)
    outs = []
    for looking in (False, True):
        torch.manual_seed(7)
        with watch(layer) if looking else nullcontext():
            outs.append(layer(x))
    assert torch.equal(*outs)


def test_half_precision_and_autocast() -> None:
    """Under autocast SDPA rounds its arguments; so do we, and the model's output is what it is."""
    model = Attention()
    x = input_of(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        with watch(model) as seen:
            assert torch.equal(model(x), plain)
        q, k, v = model.qkv(x).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
    wanted = headscope.observe(q, k, v, mask=causal())
    assert q.dtype == torch.bfloat16
    torch.testing.assert_close(seen["entropy"].mean, wanted["entropy"].mean)
    with torch.inference_mode(), watch(model.bfloat16()) as seen:
        model(x.bfloat16())
    assert seen.names == wanted.names


# ---------------------------------------------------------------- several


def test_forward_passes_merge() -> None:
    model = Small()
    first, second = input_of(model), input_of(model)
    recordings = []
    for inputs in ((first,), (second,), (first, second)):
        with watch(model, what=Observe(map=2, edges=3)) as seen:
            for x in inputs:
                model(x)
        recordings.append(seen)
    merged = recordings[0].stats.merge(recordings[1].stats)
    assert recordings[2].to_dict()["layers"] == merged.to_dict()["layers"]
    assert recordings[2].forwards == 2


def test_many_calls_of_a_layer_are_merged_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PENDING", 3)
    model = Attention()
    x = input_of(model)
    with watch(model) as seen:
        for n in range(1, 9):
            model(x)
            assert seen[0, 0, "entropy"].count == 14 * n if n % 2 else True, "readable while watching"
    assert seen["entropy"].count.tolist() == [[14 * 8] * 3]
    assert len(seen._pending) == 0 or seen.stats


def test_every_so_many() -> None:
    model = Attention()
    inputs = [input_of(model) for _ in range(5)]
    with watch(model, every=2) as seen:
        for x in inputs:
            model(x)
    with watch(model) as wanted:
        for x in inputs[::2]:
            model(x)
    assert (seen.forwards, seen.about.ran) == (3, 5)
    assert seen.to_dict()["layers"] == wanted.to_dict()["layers"]


def test_rows_are_sampled() -> None:
    model = Attention()
    with watch(model, rows=3) as seen:
        model(input_of(model))
    assert seen.stats.sampled
    assert seen["entropy"].count.tolist() == [[6] * 3]


def test_nested_watches_each_see_all() -> None:
    model = Small()
    x = input_of(model)
    with watch(model) as outer:
        model(x)
        with watch(model.ours, what=Observe(row_stats=False)) as inner:
            model(x)
        model(x)
    assert outer.layers == ("plain", "ours", "theirs")
    assert inner.layers == ("MultiHeadAttention",)
    assert (outer.forwards, inner.forwards) == (3, 1)
    assert inner.names == ()
    assert outer["ours", "entropy"].count.tolist() == [42] * 5


def test_threads_watch_apart_and_together() -> None:
    """A watch sees its model whichever thread runs it, and no other model."""
    shared, models = Attention(), [Attention() for _ in range(3)]
    inputs = [input_of(shared) for _ in models]
    alone: list[Any] = [None] * len(models)

    def work(n: int) -> None:
        with watch(models[n]) as alone[n]:
            for _ in range(4):
                models[n](inputs[n])
                shared(inputs[n])

    with watch(shared) as together:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(len(models))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert together.forwards == 12
    assert together["entropy"].count.tolist() == [[12 * 14] * 3]
    for n, model in enumerate(models):
        with watch(model) as wanted:
            for _ in range(4):
                model(inputs[n])
        assert alone[n].to_dict()["layers"] == wanted.to_dict()["layers"]


def test_a_copy_made_while_watching_is_its_own() -> None:
    model = Attention()
    x = input_of(model)
    with watch(model) as seen:
        other = copy.deepcopy(model)
        nn.init.zeros_(other.out.weight)
        model(x)
        assert not torch.equal(other(x), model(x))
    assert seen.forwards == 2, "the copy is not watched"


def test_a_watch_is_used_once() -> None:
    watching = watch(Attention())
    with watching:
        watching.__enter__.__self__.modules["Attention"](input_of(Attention()))
    with pytest.raises(WatchError, match="has been used"), watching:
        pass


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
    with pytest.raises(ValueError, match=r"layers: 'c' fits no module of the model; it has "):
        layers("c")
    with pytest.raises(ValueError, match="layers: the predicate fits no module"):
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
    ],
)
def test_self_or_cross(name: str, keys: int, kinds: Any, wanted: str) -> None:
    model = nn.ModuleDict({name: Raw()})
    with watch(model, kinds=kinds) as seen:
        model[name](torch.randn(2, 3, 7, 4), torch.randn(2, 3, keys, 4))
    assert seen.kinds == {name: wanted}
    assert ("previous" in seen.names) == (wanted == "self")


class Raw(nn.Module):
    """SDPA and nothing else."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k, **self.options)


def test_a_cache_that_grows_is_self_attention() -> None:
    model = nn.ModuleDict({"attn": Raw()})
    k = torch.randn(1, 2, 7, 4)
    with watch(model) as seen:
        model["attn"](k[:, :, :5], k[:, :, :5])
        for n in (6, 7):
            model["attn"](k[:, :, n - 1 : n], k[:, :, :n])
    assert seen.kinds == {"attn": "self"}
    assert seen["previous"].count.tolist() == [[6, 6]], "row 0 has none"


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
    error = r"layer Raw: positions: are of 7 keys, this layer has 5, and 5 queries; choose layers="
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
    with pytest.raises(ValueError, match="tokens: given twice"):
        watch(model, tokens=tokens, what=Observe(tokens=tokens))


def test_tokens_of_the_shipped_model() -> None:
    """Its induction head is found by what it does."""
    example = headscope.load_example("text")
    ids = example.tokenizer.encode("the cat sat on the mat. " * 4)
    with torch.no_grad(), watch(example.model, tokens="inputs") as seen:
        example.model(torch.tensor([ids]))
    assert seen["induction"].mean.max() > 0.5
    assert seen["induction"].count.min() > 30


# ---------------------------------------------------------------- what is refused


class Home(nn.Module):
    """Attention that no function of torch's shows."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(15, 15)

    def forward(self, x: Tensor) -> Tensor:
        x = self.project(x)
        return (x @ x.transpose(-2, -1)).softmax(-1) @ x


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
        pytest.raises(WatchError, match=r"1 attention layers ran and were not seen: parts.home_attention; "),
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


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model_is_refused() -> None:
    model = Attention()
    x = input_of(model)
    compiled = torch.compile(model, backend="eager")
    with pytest.raises(WatchError, match=r"runs compiled.*; compiled: OptimizedModule"), watch(compiled):
        pass
    compiled(x)
    with pytest.raises(WatchError, match=r"no forward pass of the model ran .*compiled"), watch(model):
        compiled(x)
    within = nn.Sequential(Attention())
    within[0].compile(backend="eager")
    with pytest.raises(WatchError, match=r"compiled: 0$"), watch(within):
        pass
    with pytest.raises(WatchError, match="runs compiled"), watch(torch.jit.script(nn.Sequential(nn.Linear(3, 3)))):
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


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_within_the_model_stays_compiled() -> None:
    ran: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        return lambda *args: (ran.append(1), graph(*args))[1]

    class Model(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return act(super().forward(x))

    act = torch.compile(lambda x: x.sin() + 1, backend=backend)
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
        ({"every": 0}, "every: got 0, wanted a whole number from 1"),
        ({"every": 1.5}, "every: got float"),
        ({"rows": 0}, "rows: got 0"),
        ({"rows": 3, "what": Observe(rows=4)}, "rows: given twice"),
        ({"tokens": "ids"}, "tokens: got 'ids', wanted a tensor of ids or"),
        ({"alarms": 3}, "alarms: got int, wanted True, False or Limits"),
        ({"rows": 3, "what": 3}, "what: got int"),
        ({"unseen": "warn"}, "unseen: got 'warn'"),
        ({"kinds": {"a": "both"}}, "kinds: got 'both'"),
        ({"what": 3}, "what: got int"),
    ],
)
def test_what_does_not_fit_is_said(arguments: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        watch(Attention(), **arguments)


def test_a_model_is_wanted() -> None:
    with pytest.raises(TypeError, match=r"model: got str, wanted a torch.nn.Module"):
        watch("gpt2")  # type: ignore[arg-type]


# ---------------------------------------------------------------- headscope's own kernel


def test_accelerate_attends_with_our_kernel() -> None:
    model = nn.Sequential(Attention(), Attention())
    x = input_of(model)
    with torch.no_grad():
        plain = model(x)
        with watch(model) as seen:
            model(x)
        with watch(model, accelerate=True) as ours:
            out = model(x)
    torch.testing.assert_close(out, plain)
    torch.testing.assert_close(ours["entropy"].mean, seen["entropy"].mean)


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
        found = known(seen)
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

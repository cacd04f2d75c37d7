"""watch: what is seen of torch's and headscope's own modules, under which name, and that nothing else changes."""

from __future__ import annotations

import copy
import functools
import io
import json
import math
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.overrides import _get_current_function_mode_stack as mode_stack
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import headscope
from headscope import Observe, Recording, watch
from headscope._analysis.answers import short_layers
from headscope._attend import hook
from headscope._intercept import patching
from headscope.masks import causal
from headscope.watching import WatchError, WatchWarning
from support.recording_files import without_checksums
from support.watched_small import Alone, Attention, Raw, Small, input_of


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
    options: Any = {"tokens": torch.arange(7), "kinds": {"their*": "cross"}}
    with watch(model, what=Observe(map=3), rows=4, texts=list("abcdefg"), **options) as seen:
        model(input_of(model))
    path = seen.save(tmp_path / "seen.safetensors")
    again = Recording.load(path)
    assert again.about == seen.about
    assert again.about.model == "Small"
    said = {"rows": 4, "map": 3, "tokens": "Tensor", "kinds": {"their*": "cross"}, "layers": None, "positions": None}
    assert {name: again.about.options[name] for name in said} == said
    assert again.to_dict() == seen.to_dict()
    assert again.texts == tuple("abcdefg")
    assert headscope.HeadStats.load(path).to_dict() == seen.stats.to_dict()
    bare = seen.stats.save(tmp_path / "bare.safetensors")
    with pytest.raises(ValueError, match="holds statistics, not a recording"):
        Recording.load(bare)


@pytest.mark.parametrize(
    ("about", "layers", "message"),
    [
        ([], None, "about: got list, expected dict"),
        ({"ran": None}, None, "ran: got NoneType, expected int"),
        ({"forwards": -1}, None, "forwards: got -1, expected 0 to"),
        ({"texts": "ab"}, None, "texts: got str, expected list or NoneType"),
        ({"texts": [3]}, None, "texts: got int, expected str"),
        ({"unknown": 3}, None, "unexpected keyword argument"),
        ({}, [], "layers: got none"),
    ],
)
def test_a_damaged_recording_is_told_as_such(about: Any, layers: Any, message: str, tmp_path: Path) -> None:
    model = Small()
    with watch(model) as seen:
        model(input_of(model))
    path = seen.save(tmp_path / "seen.safetensors")
    with safe_open(path, framework="pt") as file:
        said = {name: json.loads(entry) for name, entry in without_checksums(file.metadata()).items()}
        held: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    recording, stats = said["headscope.recording"], said["headscope.stats"]
    recording["about"] = recording["about"] | about if isinstance(about, dict) else about
    if layers is not None:
        stats["layers"] = layers
        del said["headscope.origin"]  # which names layers, too
    save_file(held, path, {name: json.dumps(entry) for name, entry in said.items()})
    with pytest.raises(ValueError, match=f"seen.safetensors: is damaged: .*{message}"):
        Recording.load(path)


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
    note = "" if pattern is None else f"Layers: {pattern}. "
    assert short_layers(names) == (dict(zip(names, short, strict=True)), note)


def test_a_recording_shows_itself() -> None:
    model = nn.ModuleDict({"[b]<i>": nn.Sequential(Attention(), Attention())})
    with watch(model) as seen:
        model["[b]<i>"](input_of(model))
    wide = Console(width=160, file=io.StringIO(), record=True)
    wide.print(seen)
    text = wide.export_text()
    assert "Layers: [b]<i>.*." in text
    assert "│ 1     │    2 │   14 │" in text
    page = seen._repr_html_()
    assert page.startswith("<iframe ")
    assert "[b]\\u003ci\\u003e.0" in page
    assert watch(model).recording._repr_html_() == "<p>Recording(ModuleDict: nothing recorded yet)</p>"
    assert seen.flat() == seen.stats.flat()
    assert repr(watch(model).recording) == "Recording(ModuleDict: nothing recorded yet)"


def test_nothing_seen_is_an_error() -> None:
    watching = watch(Small())
    with pytest.raises(WatchError, match=r"model's forward\(\) was not called inside"), watching:
        pass
    with pytest.raises(WatchError, match="nothing recorded yet"):
        _ = watching.recording.stats
    model: Any = nn.Sequential(nn.Linear(3, 3))
    with pytest.raises(WatchError, match="no attention call was observed in Sequential"), watch(model):
        model(torch.randn(2, 3))


# ---------------------------------------------------------------- nothing else changes


@pytest.mark.parametrize("opening", [True, False])
@pytest.mark.parametrize("open_", [watch, lambda model: headscope.ablate(model, {"plain": 0})])
def test_an_interrupt_of_opening_or_closing_leaves_nothing_behind(
    open_: Callable[[nn.Module], Any], opening: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupts = [KeyboardInterrupt]

    def interrupted() -> None:
        if interrupts:
            raise interrupts.pop()

    def called() -> tuple[Any, ...]:
        return nn.Module.__call__, torch.overrides.has_torch_function, hook.interceptor, *sys.meta_path

    before, model = called(), Small()
    steps = (interrupted, tuple) if opening else (tuple, interrupted)
    monkeypatch.setattr(patching, "patches", [*patching.patches, steps])
    with pytest.raises(KeyboardInterrupt), open_(model):
        model(input_of(model))
    assert called() == before
    with watch(model) as seen:
        model(input_of(model))
    assert "plain" in seen.layers
    assert called() == before


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


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError("on purpose")


def state() -> tuple[Any, ...]:
    """All that watch replaces."""
    from transformers import AttentionInterface

    called = (nn.Module.__call__, torch.overrides.has_torch_function, AttentionInterface.get_interface)
    classes = (vars(Attention).get("__call__"), vars(nn.Sequential).get("__call__"))
    return *called, *classes, hook.interceptor, [*mode_stack()]


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
        assert Attention.__call__ is not before[0]
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


@pytest.mark.parametrize("first", [True, False])
def test_what_a_mode_of_others_changes_is_seen_changed(first: bool) -> None:
    class Flat(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            changed = {"scale": 0.0} if func is F.scaled_dot_product_attention else {}
            return func(*args, **{**(kwargs or {}), **changed})

    model, q = Raw(), torch.randn(1, 2, 7, 8)
    watching = watch(model)
    with Flat() if first else watching, watching if first else Flat():
        out = model(q, q)
    torch.testing.assert_close(out, q.mean(-2, keepdim=True).expand_as(q))
    assert watching.recording["entropy"].mean.tolist() == [[pytest.approx(math.log(7))] * 2]


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


def test_a_watch_within_what_a_checkpoint_computes_again_says_why_it_saw_nothing() -> None:
    model = Attention()

    def watched(x: Tensor) -> Tensor:
        with watch(model):
            return model(x)

    out = checkpoint(watched, input_of(model).requires_grad_(), use_reentrant=True)
    with pytest.raises(WatchError, match=r"forward\(\) was not called .*recomputation by activation checkpointing"):
        out.sum().backward()


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


def test_a_selective_checkpoint_keeps_what_the_model_computes_alone() -> None:
    """It hands out what it has kept by operator, in order: ours in between would pass for the model's."""

    class Selective(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theirs = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
            self.ours = headscope.MultiHeadAttention(16, 2)

        def both(self, x: Tensor) -> Tensor:
            y = self.ours(self.theirs(x))
            return torch.bmm(y.mT, y)

        def forward(self, x: Tensor) -> Tensor:
            kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default]
            contexts = functools.partial(create_selective_checkpoint_contexts, kept)
            return checkpoint(self.both, x, use_reentrant=False, context_fn=contexts)

    model = Selective()
    x = torch.randn(2, 7, 16)
    found: list[list[Tensor | None]] = []
    for looking in (False, True):
        model.zero_grad()
        with watch(model) if looking else nullcontext():
            model(x).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


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


BY_DISTANCE = -(torch.arange(11.0)[:, None] - torch.arange(11.0)).abs() * 7.77 - 200.37


@pytest.mark.parametrize("need_weights", [None, False, True])
def test_a_float_mask_is_rounded_where_autocast_rounds_it(need_weights: bool | None) -> None:
    """SDPA takes it so, and ``baddbmm``, where the weights are expected."""
    x = torch.randn(1, 2, 11, 8)
    model: Any = Raw() if need_weights is None else nn.MultiheadAttention(8, 2, batch_first=True)
    seen: list[Recording] = []
    outs: list[Tensor] = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for mask in (BY_DISTANCE, BY_DISTANCE.bfloat16().float()):
            with watch(model) as each:
                if need_weights is None:
                    outs.append(model(x, x, attn_mask=mask))
                else:
                    outs.append(model(x[0], x[0], x[0], attn_mask=mask, need_weights=need_weights)[0])
            seen.append(each)
    assert torch.equal(*outs)
    assert seen[0].flat() == seen[1].flat()


class Attends(nn.Module):
    """``headscope.attend`` and nothing else."""

    def forward(self, q: Tensor, bias: Tensor) -> Tensor:
        return headscope.attend(q, q, q, bias=bias).out


def test_headscope_attends_under_autocast_with_what_it_is_given_and_is_seen_so() -> None:
    q = 8 * torch.randn(1, 2, 11, 8)
    model = Attends()
    with torch.autocast("cpu", torch.bfloat16), watch(model) as seen:
        model(q, BY_DISTANCE)
    with watch(model) as wanted:
        model(q, BY_DISTANCE)
    assert seen.flat() == wanted.flat()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_accelerate_rounds_under_autocast_as_sdpa(dtype: torch.dtype) -> None:
    model, q, k = Raw(), torch.randn(1, 2, 11, 8), torch.randn(1, 2, 11, 8, dtype=dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        wanted = model(q, k)
        with watch(model, accelerate=True):
            out = model(q, k)
    torch.testing.assert_close(out, wanted, rtol=0.02, atol=0.02)


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
    monkeypatch.setattr("headscope.watching._recording.PENDING", 3)
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


def test_a_pass_that_outlives_its_watch_is_recorded_up_to_its_end() -> None:
    reached, ended = threading.Event(), threading.Event()

    class Pausing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Attention(), Attention()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            if threading.current_thread() is not threading.main_thread():
                reached.set()
                assert ended.wait(20)
            return self.second(x)

    model = Pausing()
    x = input_of(model.first)
    thread = threading.Thread(target=model, args=(x,))
    watching = watch(model)
    seen = watching.__enter__()
    model(x)
    thread.start()
    assert reached.wait(20)
    with pytest.warns(WatchWarning, match="a forward pass was running in another thread"):
        watching.__exit__(None, None, None)
    ended.set()
    thread.join()
    rows = math.prod(x.shape[:2])
    assert seen.layers == ("first", "second")
    assert [seen[layer, 0, "entropy"].count for layer in seen.layers] == [2 * rows, rows]


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
    with pytest.raises(WatchError, match="was already used"), watching:
        pass


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


class Learned(nn.Module):
    """Two attentions that share a learned bias; the first as it is, without gradients, or recomputed."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.bias = nn.Parameter(torch.zeros(3, 6, 6))
        self.first = Raw()
        self.second = Raw()

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "frozen":
            with torch.no_grad():
                x = self.first(x, x, attn_mask=self.bias)
        elif self.way == "plain":
            x = self.first(x, x, attn_mask=self.bias)
        else:
            run = functools.partial(self.first, attn_mask=self.bias)
            x = checkpoint(run, x, x, use_reentrant=self.way == "reentrant")
        return self.second(x, x, attn_mask=self.bias)


@pytest.mark.parametrize("way", ["plain", "frozen", "reentrant", "recomputed"])
@pytest.mark.parametrize("nested", [False, True])
def test_accelerate_leaves_gradients_of_a_learned_bias(way: str, nested: bool) -> None:
    model = Learned(way)
    x = torch.randn(2, 3, 6, 4, requires_grad=True)
    model(x).square().sum().backward()
    wanted, model.bias.grad = model.bias.grad, None
    with watch(model.second if nested else model, accelerate=True) as seen, watch(model) if nested else nullcontext():
        model(x).square().sum().backward()
    torch.testing.assert_close(model.bias.grad, wanted)
    assert seen.forwards == 1


@pytest.mark.parametrize("every", [1, 2])
def test_accelerate_recomputes_by_our_kernel(every: int) -> None:
    def recomputed(x: Tensor) -> Tensor:
        return checkpoint(lambda y: inner(y), x, use_reentrant=False)

    inner = Attention()
    model = Calls(inner, recomputed)
    x = input_of(inner).requires_grad_()
    model(x).square().sum().backward()
    wanted, x.grad = x.grad, None
    with watch(model, accelerate=True, every=every) as seen:
        for _ in range(2):
            x.grad = None
            model(x).square().sum().backward()
            torch.testing.assert_close(x.grad, wanted)
    assert seen.forwards == 2 // every
    assert seen["entropy"].count.unique().tolist() == [14 * seen.forwards]


class Calls(nn.Module):
    """A module that runs as a function says."""

    def __init__(self, inner: nn.Module, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = inner
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def test_a_recording_can_be_copied_and_pickled() -> None:
    model = Small()
    with watch(model, alarms=True) as seen:
        model(input_of(model))
        early = copy.deepcopy(seen)
        model(input_of(model))
    again = pickle.loads(pickle.dumps(seen))
    assert again.to_dict() == seen.to_dict()
    assert (early.forwards, seen.forwards) == (1, 2)
    assert early["plain", 0, "entropy"].count == 14
    assert seen["plain", 0, "entropy"].count == 28


def test_what_a_recording_says_is_strict_json(tmp_path: Path) -> None:
    model = Small()
    with watch(model, what=Observe(windows=(1.5, 3)), positions=torch.full((7,), math.nan)) as seen:
        model(input_of(model))
    options = json.loads(json.dumps(seen.to_dict(), allow_nan=False))["about"]["options"]
    assert (options["windows"], options["positions"]) == ([1.5, 3], "Tensor")
    assert Recording.load(seen.save(tmp_path / "seen.safetensors")).to_dict() == seen.to_dict()


def test_a_recording_of_no_positions_has_a_page(tmp_path: Path) -> None:
    model = headscope.MultiHeadAttention(8, 2)
    with watch(model, what=Observe(map=4)) as seen:
        model(torch.randn(1, 0, 8))
    assert seen.save_html(tmp_path / "none.html").stat().st_size > 0


def test_a_notebook_shows_a_recording_of_nothing() -> None:
    model = Small()
    with watch(model) as seen:
        shown = seen._repr_html_()
        with pytest.raises(WatchError, match="nothing recorded yet"):
            seen.stats  # noqa: B018
        model(input_of(model))
    assert shown == "<p>Recording(Small: nothing recorded yet)</p>"


def test_texts_are_strings() -> None:
    with pytest.raises(TypeError, match="texts: got bytes, expected a str for each token"):
        watch(Small(), texts=["a", b"b"])  # pyright: ignore[reportArgumentType]


def test_accelerate_is_a_yes_or_no() -> None:
    with pytest.raises(TypeError, match="accelerate: got str, expected True or False"):
        watch(Small(), accelerate="yes")  # pyright: ignore[reportArgumentType]


class Fixed(nn.Module):
    """Queries of a text that attend to keys and values of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.packed, self.out = nn.Linear(8, 24, bias=False), nn.Linear(8, 8)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """x [T, B, 8], keys and values [B * 2, N, 4] -> [T, B, 8]."""
        return F.multi_head_attention_forward(
            x, x, x, 8, 2, self.packed.weight, None, None, None, True, 0.0, self.out.weight, self.out.bias,
            static_k=keys, static_v=values,
        )[0]  # fmt: skip


@pytest.mark.parametrize("count", [3, 5, 9], ids=["fewer keys", "as many", "more"])
def test_fixed_keys_stand_nowhere(count: int) -> None:
    """They are not the tokens of the queries, however many there are; the zero key that is added is one of them."""
    torch.manual_seed(0)
    model, x = Fixed().eval(), torch.randn(5, 3, 8)
    keys, values = torch.randn(2, 6, count, 4)
    with torch.no_grad(), watch(model) as seen:
        model(x, keys, values)
    assert seen.kinds == {"Fixed": "cross"}
    q = (x.double() @ model.packed.weight[:8].double().T).transpose(0, 1).unflatten(-1, (2, 4)).transpose(1, 2)
    k = F.pad(keys.double(), (0, 0, 0, 1)).view(3, 2, count + 1, 4)
    p = (q @ k.mT * 0.5).softmax(-1)
    entropy = -(p * p.log()).sum(-1).mean((0, 2))
    torch.testing.assert_close(seen.stats["Fixed"][0, "entropy"].mean, entropy, rtol=1e-5, atol=1e-6)
    assert "distance" not in seen.stats["Fixed"].names

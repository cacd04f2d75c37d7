"""Models that torch.compile runs: an operator adds the rows of a step to memory, and changes nothing else."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headscope import MultiHeadAttention, Observe, Recording, masks, nn_compat, watch
from headscope.cache import GrowingCache
from headscope.positions import ALiBi, Rotary
from headscope.watching import (
    AttentionWarning,
    History,
    WatchError,
    WatchWarning,
    register_transformers,
    watch_compiled,
)

ROWS = 5


class Block(nn.Module):
    """Attention and a residual connection; a checkpoint may recompute it in the backward pass."""

    def __init__(self, again: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(24, 3, **options)
        self.again = again

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        run: Any = checkpoint if self.again else lambda function, *args, **_: function(*args)
        return x + run(lambda y: self.attention(y, **options), x, use_reentrant=False)


class Stack(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second = Block(**options), Block(**options)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x, mask=masks.causal()), mask=masks.causal())


def compiled(model: nn.Module, backend: str = "aot_eager") -> tuple[Any, Any]:
    """Return the compiled model, and a counter of graphs: ``frame_count``."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(model, backend=counter, fullgraph=True), counter


def assert_equal(one: Recording, other: Recording, times: int = 1) -> None:
    """Assert that two recordings have the same rows; ``times``: so often in the second."""
    assert one.layers == other.layers
    assert one.about.kinds == other.about.kinds
    for layer, part in one.stats.parts.items():
        again = other.stats.parts[layer]
        assert (times * part.looked_at, times * part.of) == (again.looked_at, again.of)
        assert torch.equal(times * part.rows, again.rows)
        assert torch.equal(times * part.broken, again.broken)
        assert set(part.moments) == set(again.moments)
        for name, moments in part.moments.items():
            found = again.moments[name]
            assert torch.equal(times * moments.count, found.count), name
            assert torch.equal(times * moments.histogram, found.histogram), name
            for what in ("mean", "min", "max"):
                assert torch.equal(getattr(moments, what).nan_to_num(9.0), getattr(found, what).nan_to_num(9.0)), name
            torch.testing.assert_close(times * moments.M2, found.M2, rtol=1e-12, atol=1e-12, equal_nan=True)


def gradients(model: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    model.zero_grad()
    out = run(x)
    out.square().sum().backward()
    return [out.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


@pytest.mark.parametrize(
    "backend",
    [
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.long,
                pytest.mark.filterwarnings("ignore::DeprecationWarning"),
                pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
            ],
        ),
    ],
)
def test_one_more_graph_serves_all_steps_and_changes_no_output_or_gradient(backend: str) -> None:
    model, x = Stack(), torch.randn(2, 13, 24)
    run, counter = compiled(model, backend)
    before = gradients(model, run, x)
    assert counter.frame_count == 1
    with watch(model, rows=ROWS, what=Observe(received=False)) as expected:
        model(x)
    with watch_compiled(run, rows=ROWS) as watched:
        for step in range(4):
            if step % 2:
                after = gradients(model, run, x)
            else:
                with watched.step(step):
                    after = gradients(model, run, x)
            assert counter.frame_count == 2
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert_equal(expected, watched.recording, times=2)
    assert watched.recording.about.forwards == 2
    assert gradients(model, run, x)[0].equal(before[0])
    with watch_compiled(run, rows=ROWS) as again, again.step():
        run(x)
    assert counter.frame_count == 2  # both graphs are there
    assert_equal(expected, again.recording)


def test_nothing_stays_in_the_model() -> None:
    model = Stack()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with watch_compiled(model) as watched, watched.step():
        model(torch.randn(1, 4, 24))
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert list(model.state_dict()) == list(Stack().state_dict())


LENGTHS = masks.KeyLengths(torch.tensor([9, 4]))
DOCUMENTS = masks.Documents(torch.tensor([[0, 0, 0, 0, 1, 1, 1, 1, 1]]))


@pytest.mark.parametrize(
    ("options", "inputs"),
    [
        ({}, {"mask": masks.causal() & LENGTHS}),
        ({}, {"mask": masks.window(3) | masks.Prefix(2)}),
        ({"kv_heads": 1, "softcap": 2.0}, {"mask": DOCUMENTS & masks.causal()}),
        ({"sinks": True}, {"mask": torch.rand(1, 3, 9, 9) > 0.3}),
        ({"rotary": Rotary(8), "qk_norm": "rms"}, {"bias": torch.randn(3, 9, 9)}),
        ({"position_bias": ALiBi(3)}, {"mask": masks.causal()}),
        ({"scale": 0.3, "v_head_dim": 5}, {}),
    ],
)
def test_options_give_what_watch_gives(options: dict[str, Any], inputs: dict[str, Any]) -> None:
    model, x = Block(**options).eval(), torch.randn(2, 9, 24)
    run, _ = compiled(model, "eager")
    what = Observe(received=False, windows=(2, 4), first=2)
    with torch.no_grad(), watch(model, what=what) as expected:
        model(x, **inputs)
    with torch.no_grad(), watch_compiled(run, what=what) as watched, watched.step():
        run(x, **inputs)
    assert watched.recording.stats.parts["attention"].moments["entropy"].count.sum() > 0
    if "position_bias" in options:  # in reverse order the kernel adds up a row in another order
        ours, theirs = (each["entropy"].mean for each in (watched.recording, expected))
        torch.testing.assert_close(ours, theirs)
    else:
        assert_equal(expected, watched.recording)


def test_another_sequence_as_context_is_cross_attention() -> None:
    model, x = Block(), torch.randn(2, 9, 24)
    run, _ = compiled(model, "eager")
    for context, kind in ((torch.randn(2, 7, 24), "cross"), (torch.randn(2, 9, 24), "cross"), (x, "self")):
        with watch(model, what=Observe(received=False), kinds={"attention": kind}) as expected:
            model(x, context=context)
        with watch_compiled(run) as watched, watched.step():
            run(x, context=context)
        assert_equal(expected, watched.recording)
        assert ("distance" in watched.recording.stats.names) == (kind == "self")


def test_a_layer_of_torch_with_headscopes_attention_is_recorded() -> None:
    model = nn.TransformerEncoderLayer(16, 2, 16, dropout=0.0, batch_first=True)
    nn_compat.replace(model)
    x, padding = torch.randn(2, 7, 16), torch.arange(7) >= torch.tensor([[7], [5]])
    run, _ = compiled(model, "eager")
    with watch(model, what=Observe(received=False)) as expected:
        model(x, src_key_padding_mask=padding)
    with watch_compiled(run) as watched, watched.step():
        run(x, src_key_padding_mask=padding)
    assert_equal(expected, watched.recording)
    with pytest.raises(WatchError, match="add_zero_attn"):
        watch_compiled(nn_compat.MultiheadAttention(8, 2, add_zero_attn=True))


def test_a_layer_of_both_kinds_in_one_step_is_refused_unless_its_kind_is_given() -> None:
    model, x = Block(), torch.randn(1, 9, 24)
    with watch_compiled(model) as watched:
        step = watched.step()
        step.__enter__()
        model(x)
        model(x, context=x + 1)
        with pytest.raises(WatchError, match=r"attention: attended .* kinds="):
            step.__exit__(None, None, None)
    with watch_compiled(model, kinds={"attention": "cross"}) as watched, watched.step():
        model(x)
        model(x, context=x + 1)
    assert watched.recording.stats.parts["attention"].runs == 2


def test_several_passes_of_one_step_are_pooled() -> None:
    model, (one, other) = Stack(), torch.randn(2, 2, 9, 24)
    with watch(model, what=Observe(received=False)) as expected:
        model(one)
        model(other)
    with watch_compiled(model) as watched, watched.step():
        model(one)
        model(other)
    assert_equal(expected, watched.recording)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo reads it of the first block's output
@pytest.mark.parametrize("part", ["whole", "blocks"])
def test_what_a_checkpoint_recomputes_counts_once(part: str) -> None:
    model, x = Stack(again=part == "whole"), torch.randn(2, 9, 24, requires_grad=True)
    with watch(model, what=Observe(received=False)) as expected:
        model(x)
    torch._dynamo.reset()
    if part == "blocks":
        model.first.compile(backend="aot_eager")
        model.second.compile(backend="aot_eager")

    def in_blocks(x: Tensor) -> Tensor:
        for block in (model.first, model.second):
            x = checkpoint(block, x, mask=masks.causal(), use_reentrant=False)
        return x

    run: Callable[[Tensor], Tensor] = in_blocks if part == "blocks" else compiled(model)[0]
    with watch_compiled(model) as watched, watched.step():
        run(x).sum().backward()
    assert_equal(expected, watched.recording)


def test_rows_that_are_not_finite_are_excluded_and_counted() -> None:
    model, x = Block(), torch.randn(1, 9, 24)
    x[0, 8] = torch.nan  # under the causal mask, only the last row sees it
    with watch_compiled(model) as watched, watched.step():
        model(x, mask=masks.causal())
    part = watched.recording.stats.parts["attention"]
    assert part.broken.tolist() == [1, 1, 1]
    assert part.moments["entropy"].count.tolist() == [8, 8, 8]


def test_values_and_alarms_have_the_numbers_of_the_steps(tmp_path: Path) -> None:
    model, x = Block(), torch.randn(1, 16, 24)
    run, _ = compiled(model, "eager")
    logged: dict[int, dict[str, float]] = {}
    history = History(tmp_path / "run.safetensors")
    with warnings.catch_warnings(record=True, action="always") as caught:
        log = [lambda values, step: logged.update({step: values}), history]
        with torch.no_grad(), watch_compiled(run, log=log, alarms=True) as watched:
            for step in range(100, 140):
                if step == 120:
                    model.attention.qkv_proj.weight.mul_(30)
                if step % 10 == 0:
                    with watched.step(step):
                        run(x)
                else:
                    run(x)
    assert sorted(logged) == [100, 110, 120, 130]
    assert logged[110]["attn/L00/H02/entropy"] > logged[120]["attn/L00/H02/entropy"]
    assert {alarm.step for alarm in watched.recording.alarms} == {120}
    assert [each.category for each in caught] == [AttentionWarning] * len(watched.recording.alarms)
    assert history.steps == (100, 110, 120, 130)


def test_an_exception_within_a_step_discards_it() -> None:
    model, x = Block(), torch.randn(1, 9, 24)
    with watch_compiled(model) as watched:
        with suppress(KeyError), watched.step():
            model(x)
            raise KeyError
        with watched.step():
            model(x[:, :4])
    assert watched.recording.stats.parts["attention"].of == 4


def test_a_model_of_transformers_is_recorded_with_its_cross_attention() -> None:
    transformers = pytest.importorskip("transformers")
    register_transformers()
    config = transformers.T5Config(
        vocab_size=30, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, attn_implementation="headscope",
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).train()
    ids, labels = torch.randint(1, 30, (2, 11)), torch.randint(1, 30, (2, 7))
    inputs = {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": (torch.arange(11) < torch.tensor([[11], [6]])).int(),
    }
    run, counter = compiled(model, "eager")
    loss = run(**inputs, use_cache=False).loss
    with watch(model, what=Observe(received=False)) as expected:
        model(**inputs, use_cache=False)
    with watch_compiled(run) as watched:
        for step in range(3):
            with watched.step(step):
                assert torch.equal(run(**inputs, use_cache=False).loss, loss)
    assert counter.frame_count == 2
    assert sorted(expected.about.kinds.values()) == ["cross", "self", "self"]
    assert_equal(expected, watched.recording, times=3)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("received", True), ("map", 4), ("edges", 2), ("top", 1), ("tokens", torch.arange(4)), ("keep_rows", True),
        ("keep_qk", True), ("received_max", True), ("weights", (0,)), ("row_stats", False), ("rows", torch.ones(4) > 0),
    ],
)  # fmt: skip
def test_an_option_without_a_fixed_size_is_refused_by_name(option: str, value: Any) -> None:
    what = Observe(**{"received": False, option: value})
    with pytest.raises(ValueError, match=rf"what\.{option}: "):
        watch_compiled(Block(), what=what)


def test_attention_of_others_is_refused_unless_it_is_excluded() -> None:
    model = nn.ModuleDict({"own": MultiHeadAttention(8, 2), "other": nn.MultiheadAttention(8, 2)})
    with pytest.raises(WatchError, match=r"other \(MultiheadAttention\).*layers="):
        watch_compiled(model)
    with watch_compiled(model, layers="own") as watched, watched.step():
        model["own"](torch.zeros(1, 3, 8))
    assert watched.recording.layers == ("own",)
    with pytest.raises(WatchError, match="no layer"):
        watch_compiled(nn.Linear(2, 2))
    with pytest.raises(WatchError, match="bias_kv"):
        watch_compiled(MultiHeadAttention(8, 2, bias_kv=True))


def test_a_step_outside_or_within_another_or_without_the_model_is_an_error() -> None:
    model = Block()
    watched = watch_compiled(model)
    with pytest.raises(WatchError, match="outside"), watched.step():
        pass
    with watched:
        with pytest.raises(WatchError, match="no attention layer ran"), watched.step():
            pass
        with pytest.raises(WatchError, match="within another"), watched.step(), watched.step():
            pass
        with pytest.raises(WatchError, match="another compiled watch"), watch_compiled(model):
            pass
    with pytest.raises(WatchError, match="already used"), watched:
        pass


def test_a_watch_without_a_step_warns() -> None:
    model = Block()
    with pytest.warns(WatchWarning, match="only forward passes within `with watched.step"), watch_compiled(model):
        model(torch.zeros(1, 3, 24))


def test_a_layer_that_does_not_run_is_named_once() -> None:
    model = Stack()
    with watch_compiled(model) as watched:
        with pytest.warns(WatchWarning, match="second.attention"), watched.step():
            model.first(torch.zeros(1, 3, 24))
        with warnings.catch_warnings(action="error"), watched.step():
            model.first(torch.zeros(1, 3, 24))
    assert watched.recording.layers == ("first.attention",)


def test_more_keys_than_queries_in_self_attention_are_refused() -> None:
    model = MultiHeadAttention(8, 2).eval()
    cache = GrowingCache()
    with torch.no_grad():
        model(torch.zeros(1, 3, 8), cache=cache)
        with (
            watch_compiled(model) as watched,
            pytest.raises(RuntimeError, match="1 queries and 4 keys"),
            watched.step(),
        ):
            model(torch.zeros(1, 1, 8), cache=cache)

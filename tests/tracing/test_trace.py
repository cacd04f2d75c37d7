"""trace: its rows, their shapes and code, what they say of a module, sizes alone, and bad input."""

from __future__ import annotations

import copy
import json
from dataclasses import astuple, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headscope import MultiHeadAttention, masks, trace
from headscope.positions import ALiBi, Rotary
from headscope.tracing._explanations import EXPLANATIONS, LETTERS
from headscope.tracing._invariants import VisiblePairs, count_visible_pairs
from support.traced_modules import made, printed, run_rows

PLAIN = [
    "input", "queries", "keys", "values", "split queries", "split keys", "split values", "scores", "weights",
    "head outputs", "concatenation", "output",
]  # fmt: skip


SEED_SHAPES = {
    "input": [32, 10, 512],
    "queries": [32, 10, 512],
    "keys": [32, 10, 512],
    "values": [32, 10, 512],
    "split queries": [32, 8, 10, 64],
    "split keys": [32, 8, 10, 64],
    "split values": [32, 8, 10, 64],
    "scores": [32, 8, 10, 10],
    "weights": [32, 8, 10, 10],
    "head outputs": [32, 8, 10, 64],
    "concatenation": [32, 10, 512],
    "output": [32, 10, 512],
}


@pytest.mark.parametrize("alone", [True, False])
def test_the_shapes_of_the_first_seed(alone: bool) -> None:
    if alone:
        found = trace(batch=32, seq=10, dim=512, heads=8)
    else:
        found = trace(MultiHeadAttention(512, 8), torch.randn(32, 10, 512))
    assert {row.step: row.shape for row in found.rows} == SEED_SHAPES
    assert found.row("scores").axes == {"B": 32, "H": 8, "Q": 10, "K": 10}
    assert found.row("queries").axes == {"B": 32, "Q": 10, "H·D": 512}
    assert (found.row("scores").elements, found.row("scores").bytes) == (25600, 102400)
    for shape in ("[32, 10, 512]", "[32, 8, 10, 64]", "[32, 8, 10, 10]"):
        assert shape in printed(found), shape


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "grouped": ({"kv_heads": 2}, {}),
    "one key head": ({"kv_heads": 1, "head_dim": 3, "v_head_dim": 7}, {"causal": True}),
    "cross": ({}, {"context": [2, 7, 20]}),
    "cross of its own widths": ({"kdim": 13, "vdim": 11, "v_head_dim": 3}, {"context": ([2, 7, 13], [2, 7, 11])}),
    "context for one": ({}, {"context": [1, 7, 20]}),
    "causal": ({}, {"causal": True}),
    "causal cross": ({}, {"context": [2, 7, 20], "mask": masks.causal()}),
    "window": ({}, {"mask": masks.window(2)}),
    "causal and lengths": ({}, {"causal": True, "mask": masks.KeyLengths(torch.tensor([3, 5]))}),
    "documents": ({}, {"mask": masks.Documents(torch.tensor([[0, 1, 0, 2, 1], [3, 3, 3, 4, 4]]))}),
    "union": ({}, {"mask": masks.window(2) | masks.Prefix(1) | masks.Band(0, 0, 2)}),
    "tensor": ({}, {"mask": torch.tensor([1, 0, 1, 1, 0]).bool()}),
    "rows that see nothing": ({}, {"mask": masks.KeyLengths(torch.tensor([0, 3]))}),
    "nothing by bias": ({}, {"bias": torch.full((5, 5), -torch.inf).tril(-1).T.contiguous()}),
    "bias": ({}, {"bias": torch.linspace(-3, 3, 100).view(4, 5, 5)}),
    "bias that hides": ({"softcap": 2.0}, {"bias": torch.full((5, 5), -torch.inf).triu(1), "causal": True}),
    "sinks": ({"sinks": True}, {"causal": True}),
    "sinks alone": ({"sinks": True}, {"mask": masks.Prefix(0)}),
    "softcap": ({"softcap": 0.25}, {}),
    "no biases": ({"bias": False, "scale": 20**-0.5}, {}),
    "some biases": ({"bias": ("q", "v"), "out_bias": False}, {}),
    "bfloat16": ({"dtype": torch.bfloat16, "sinks": True, "kv_heads": 2}, {"causal": True}),
    "float16": ({"dtype": torch.float16, "softcap": 3.0}, {}),
    "float64": ({"dtype": torch.float64}, {"bias": torch.randn(2, 1, 5, 5)}),
    "no batch": ({"kv_heads": 2, "sinks": True}, {"x": [5, 20], "causal": True}),
    "no batch, cross": ({}, {"x": [5, 20], "context": [7, 20], "mask": masks.window(3)}),
}


def inputs(name: str) -> tuple[MultiHeadAttention, Tensor, Any, dict[str, Any]]:
    options, call = (dict(part) for part in CASES[name])
    module = made(20, 4, **options)
    dtype = module.out_proj.weight.dtype

    def random(shape: Any) -> Any:
        return tuple(map(random, shape)) if isinstance(shape, tuple) else torch.randn(shape, dtype=dtype)

    x = random(call.pop("x", [2, 5, 20]))
    context = call.pop("context", None)
    return module, x, None if context is None else random(context), call


@pytest.mark.parametrize("name", CASES)
def test_every_invariant_holds_and_the_output_is_the_modules_own(name: str) -> None:
    module, x, context, call = inputs(name)
    found = trace(module, x, context, **call)
    assert found.held is True, [(row.step, row.invariant) for row in found.failed]
    mask = call.pop("mask", None)
    if call.pop("causal", False):
        mask = masks.causal() if mask is None else masks.causal() & mask
    with torch.no_grad():
        own = module(x, context, mask=mask, **call)
    assert torch.equal(found.output, own), "the traced output is not the untraced one to the bit"
    assert [row.step for row in found.rows if row.step in PLAIN] == PLAIN
    for row in found.rows:
        assert list(row.axes.values()) == row.shape
        assert {part for letter in row.axes for part in letter.split("·")} <= set(LETTERS)
        assert (row.why, row.mistake) == astuple(EXPLANATIONS[row.step])


@pytest.mark.parametrize("name", CASES)
def test_the_code_of_each_row_makes_what_the_row_shows(name: str) -> None:
    module, x, context, call = inputs(name)
    found = trace(module, x, context, **call)
    run_rows(found, module, x, context, call)


def test_code_from_sizes_alone_is_a_program() -> None:
    found = trace(batch=2, seq=5, dim=20, heads=4, kv_heads=2, context_seq=7, kdim=11, vdim=13, sinks=True, softcap=3.0,
                  causal=True, dtype=torch.float64)  # fmt: skip
    space: dict[str, Any] = {}
    exec(found.code, space)
    assert list(space["out"].shape) == [2, 5, 20]
    assert space["out"].dtype == torch.float64
    assert space["p"].shape == (2, 4, 5, 7)


def test_grouped_heads_have_rows_of_their_own() -> None:
    found = trace(made(20, 4, kv_heads=2), torch.randn(3, 5, 20))
    steps = [row.step for row in found.rows]
    assert steps == [*PLAIN[:7], "share keys", "share values", *PLAIN[7:]]
    assert found.row("split keys").axes == {"B": 3, "Hkv": 2, "K": 5, "D": 5}
    assert found.row("share keys").axes == {"B": 3, "H": 4, "K": 5, "D": 5}
    assert found.row("keys").axes == {"B": 3, "K": 5, "Hkv·D": 10}


def test_every_step_there_is() -> None:
    options: dict[str, Any] = {"kv_heads": 2, "softcap": 2.0, "sinks": True, "qk_norm": "rms", "gate": True}
    module, x, context = made(20, 4, **options, bias_kv=True), torch.randn(2, 5, 20), torch.randn(2, 7, 20)
    crossing = trace(module, x, context, mask=masks.Prefix(3), bias=torch.randn(5, 7))
    placed = made(20, 4, **options, rotary=Rotary(4), position_bias=ALiBi(4))
    located = trace(placed, x, causal=True, bias=torch.randn(5, 5))
    every = list(EXPLANATIONS)
    for found, absent in (
        (crossing, {"rotate queries", "rotate keys", "position bias"}),
        (located, {"context", "bias key", "bias value"}),
    ):
        assert [row.step for row in found.rows] == [step for step in every if step not in absent]


def test_corners_are_the_first_values() -> None:
    module, x = made(15, 3), torch.randn(2, 7, 15)
    found = trace(module, x, causal=True)
    assert found.row("input").corner == x[0, :4, :4].tolist()
    _, weights = module(x, mask=masks.causal(), need_weights=True)
    torch.testing.assert_close(torch.tensor(found.row("weights").corner), weights[0, 0, :4, :4].detach())
    assert found.row("mask").corner[0][1:] == [-torch.inf] * 3


def test_dropout_is_left_out_and_the_mode_put_back() -> None:
    module, x = made(15, 3, dropout=0.5), torch.randn(2, 7, 15)
    inner = nn.Dropout(0.9)
    module.add_module("inner", inner)
    inner.eval()
    found = trace(module, x)
    assert (module.training, inner.training) == (True, False)
    torch.testing.assert_close(found.output, copy.deepcopy(module).eval()(x).detach(), rtol=0, atol=0)
    assert "dropout" in (found.row("weights").note or "")
    with pytest.raises(ValueError, match="mask"):
        trace(module, x, mask=torch.ones(6, 6).bool())
    assert module.training, "an error left the module in eval"


def test_an_unusual_scale_is_pointed_out() -> None:
    x = torch.randn(2, 7, 20)
    unusual = trace(made(20, 4, scale=20**-0.5), x).row("scores")
    assert unusual.note is not None
    assert unusual.note.startswith("unusual: divided by √E")
    assert "2 times smaller" in unusual.note
    assert unusual.equation.endswith("/ √E")
    assert trace(made(20, 1, scale=20**-0.5), x).row("scores").note is None
    assert trace(made(20, 4), x).row("scores").note is None
    assert "the usual scale is" in (trace(made(20, 4, scale=0.3), x).row("scores").note or "")


def test_the_mask_row_counts_pairs_and_says_what_true_means() -> None:
    x = torch.randn(2, 7, 15)
    module = made(15, 3)
    assert (
        trace(module, x, causal=True).row("mask").note == "causal, True = attend: 28 of 49 pairs in each head (57.1%)"
    )
    note = trace(module, x, mask=masks.KeyLengths(torch.tensor([0, 3]))).row("mask").note
    assert note == "KeyLengths, True = attend: 63 of 294 pairs (21.4%); 21 of 42 rows have no visible key and give 0"


@dataclass(frozen=True)
class Stride(masks.Mask):
    step: int

    _by_value = True

    def allows(self, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return torch.as_tensor(j % self.step == 0)


def test_a_mask_of_numbers_is_shown_with_them() -> None:
    text = printed(trace(MultiHeadAttention(4, 2), torch.randn(2, 6, 4), mask=Stride(step=3)))
    assert "Stride(step=3), True = attend: 48 of 144 pairs (33.3%)" in " ".join(text.split())


def test_inputs_that_are_not_finite_are_said_to_be() -> None:
    x = torch.randn(2, 7, 15)
    x[1, 6] = torch.nan
    found = trace(made(15, 3), x, causal=True)
    assert [row.step for row in found.failed] == ["input", "weights"]
    assert "15 of 210 are NaN or infinite" in found.row("input").invariant
    assert "3 rows contain NaN" in found.row("weights").invariant
    assert found.output is not None
    assert torch.isfinite(found.output[:, :6]).all(), "NaN in the last key reached a row that may not see it"


def test_rows_that_see_nothing_infinite_are_held_to_what_rounds() -> None:
    x = torch.randn(2, 7, 15)
    x[1, 6, 3] = torch.inf  # one number: keys become infinite, and not NaN
    assert [row.step for row in trace(made(15, 3), x, causal=True).failed] == ["input", "weights"]


@pytest.mark.parametrize("shape", [(0, 7, 15), (2, 0, 15), (1, 1, 15)])
def test_axes_of_size_0_and_1(shape: tuple[int, ...]) -> None:
    found = trace(made(15, 3), torch.randn(shape), causal=True)
    assert found.held is True
    assert found.row("input").shape == list(shape)
    assert printed(found)
    assert json.loads(found.to_json())["rows"][0]["shape"] == list(shape)


def test_a_context_without_keys_gives_zero() -> None:
    found = trace(made(15, 3), torch.randn(2, 7, 15), torch.randn(2, 0, 15))
    assert found.held is True
    torch.testing.assert_close(torch.tensor(found.row("concatenation").corner), torch.zeros(4, 4))


@pytest.mark.parametrize("length", [7, 2000])
def test_the_default_device_does_not_matter(length: int) -> None:
    module, x = MultiHeadAttention(24, 3, bias=False), torch.randn(1, length, 24)
    wanted = trace(module, x, causal=True)
    with torch.device("meta"):
        found = trace(module, x, causal=True)
    assert found.held
    assert found.to_dict() == wanted.to_dict()


def test_autocast_is_traced_as_it_runs() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = trace(made(15, 3), torch.randn(2, 7, 15), causal=True)
    assert found.held is True, [(row.step, row.invariant) for row in found.failed]
    assert (found.row("queries").dtype, found.row("scores").dtype) == ("bfloat16", "float32")


# ---------------------------------------------------------------- sizes alone


def test_a_million_positions_are_described_without_allocating(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a plan of a million rows was made")

    monkeypatch.setattr(masks.Mask, "plan", refuse)
    found = trace(seq=1_000_000, dim=512, heads=8, causal=True)
    scores = found.row("scores")
    assert (scores.shape, scores.elements) == ([1, 8, 1_000_000, 1_000_000], 8 * 10**12)
    assert scores.bytes == 32 * 10**12
    assert "8 × 10¹² numbers would take 29.1 TiB" in (found.row("weights").note or "")
    assert "5 × 10¹¹ of 1 × 10¹² pairs in each head (50%)" in (found.row("mask").note or "")
    assert count_visible_pairs(masks.causal(), (1, 1, 1_000_000, 1_000_000)) == VisiblePairs(500_000_500_000, 0)
    assert found.output is None
    assert "8 × 10¹² float32" in printed(found)


def test_sizes_alone_have_no_values_and_check_nothing() -> None:
    mask, bias = masks.KeyLengths(torch.tensor([1, 0, 7])), torch.randn(5, 7)
    found = trace(batch=3, seq=5, dim=22, heads=2, context_seq=7, kdim=13, softcap=2.0, sinks=True, bias=bias,
                  mask=mask, dtype=torch.bfloat16)  # fmt: skip
    assert found.held is None
    for row in found.rows:
        assert (row.corner, row.held) == (None, None), row.step
        assert row.invariant
    assert found.row("context").axes == {"B": 3, "K": 7, "kdim": 13}
    assert (found.row("input").dtype, found.row("scores").dtype) == ("bfloat16", "float32")
    assert "80 of 210 pairs" in (found.row("mask").note or "")
    assert "nothing was computed" in printed(found)
    assert "sizes only" in repr(found)


@pytest.mark.parametrize(
    "options", [{}, {"kv_heads": 2, "v_head_dim": 3}, {"softcap": 2.0, "sinks": True, "causal": True}]
)
def test_sizes_alone_give_the_rows_that_values_give(options: dict[str, Any]) -> None:
    causal = options.pop("causal", False)
    alone = trace(batch=2, seq=5, dim=20, heads=4, causal=causal, **options)
    values = trace(made(20, 4, **options), torch.randn(2, 5, 20), causal=causal)
    same = ("step", "stage", "equation", "axes", "shape", "dtype", "elements", "bytes", "why", "mistake")
    for a, b in zip(alone.rows, values.rows, strict=True):
        assert [getattr(a, name) for name in same] == [getattr(b, name) for name in same]
        assert b.invariant.startswith(a.invariant)
        assert a.code.endswith(b.code)


def test_sizes_of_the_input_of_a_module() -> None:
    found = trace(made(20, 4, dtype=torch.float64), batch=2, seq=1_000)
    assert found.row("scores").shape == [2, 4, 1_000, 1_000]
    assert (found.output, found.row("input").dtype) == (None, "float64")
    meta = MultiHeadAttention(20, 4, device="meta")
    on_meta = trace(meta, torch.empty(2, 5, 20, device="meta"), torch.empty(2, 7, 20, device="meta"), causal=True)
    assert on_meta.row("weights").shape == [2, 4, 5, 7]
    assert on_meta.held is None


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((MultiHeadAttention, torch.ones(1, 5, 20)), TypeError, "module: got the class MultiHeadAttention"),
        (({"dim": 20},), ValueError, "^seq, heads: missing; pass a module and its input x, or the sizes seq"),
        (({},), ValueError, "^seq, dim, heads: missing"),
        (({"dim": 20, "heads": 3, "seq": 5},), ValueError, "embed_dim 20 is not divisible by num_heads 3"),
        (({"dim": 20, "heads": 4, "seq": 0},), ValueError, "seq: got 0, expected a whole number from 1"),
        (({"dim": 20, "heads": 4, "seq": 5, "batch": -1},), ValueError, "batch: got -1"),
        (({"dim": 20, "heads": 4, "seq": 5.0},), TypeError, "seq: got float, expected a whole number"),
        (({"dim": 20, "heads": 4, "seq": 10**19},), ValueError, "more than a tensor can hold"),
        (({"dim": 20, "heads": 4, "seq": 5, "softcap": -1.0},), ValueError, "softcap: got -1.0"),
        (({"dim": 20, "heads": 4, "seq": 5, "kdim": 7},), ValueError, "context: axis 2 .E. is 20, expected 7"),
        (({"dim": 20, "heads": 4, "seq": 5, "mask": torch.ones(5, 5)},), TypeError, "mask: dtype is float32"),
        (({"dim": 20, "heads": 4, "seq": 5, "mask": torch.ones(5, 6).bool()},), ValueError, "mask: axis 1 .K. is 6"),
        (({"dim": 20, "heads": 4, "seq": 5, "bias": torch.ones(6, 5)},), ValueError, "bias: axis 0 .Q. is 6"),
        ((made(20, 4),), ValueError, "^seq: missing"),
        ((made(20, 4), {"seq": 5, "dim": 20}), ValueError, "^dim: the module has its own"),
        ((made(20, 4), torch.ones(1, 5, 20), {"seq": 5}), ValueError, "^seq: x has its own"),
        ((None, torch.ones(1, 5, 20)), ValueError, "module: missing"),
        ((made(20, 4), None, torch.ones(1, 5, 20), {"seq": 5}), ValueError, "context: got one without x"),
        ((made(20, 4), torch.ones(1, 5).long()), TypeError, "x: dtype is int64, expected float32; token ids go"),
        ((made(20, 4), [1.0]), TypeError, "x: got list, expected a torch.Tensor"),
        ((made(20, 4), torch.ones(1, 5, 20).double()), TypeError, "x: dtype is float64, the module has float32"),
        ((made(20, 4), torch.ones(1, 5, 20, device="meta")), ValueError, "x: is on meta, the module is on cpu"),
        ((made(20, 4), torch.ones(1, 5, 21)), ValueError, "x: axis 2 .E. is 21, expected 20"),
        ((made(20, 4), torch.ones(1, 5, 20), torch.ones(1, 5, 2)), ValueError, "context: axis 2 .E. is 2, expected 20"),
        ((made(20, 4), torch.ones(1, 5, 20), ()), TypeError, "context: got 0 of them, expected a torch.Tensor, or a"),
        ((made(20, 4), torch.ones(2, 5, 20), torch.ones(3, 5, 20)), ValueError, "context: axis 0 .B. is 3, expected 2"),
        ((made(20, 4), torch.ones(2, 5, 20), {"mask": torch.ones(5, 4).bool()}), ValueError, "mask: axis 1 .K. is 4"),
    ],
)  # fmt: skip
def test_bad_input_is_a_clear_error(arguments: tuple[Any, ...], error: type[Exception], match: str) -> None:
    options = arguments[-1] if isinstance(arguments[-1], dict) else {}
    with pytest.raises(error, match=match) as caught:
        trace(*(part for part in arguments if part is not options), **options)
    assert "\n" not in str(caught.value)


def test_a_module_that_returns_no_tensor() -> None:
    class Pair(MultiHeadAttention):
        def forward(self, x: Tensor, *args: Any, **options: Any) -> Any:
            return super().forward(x), None

    with pytest.raises(TypeError, match="module: Pair returned tuple, expected a tensor"):
        trace(Pair(15, 3), torch.randn(2, 7, 15))


def test_a_step_that_is_not_there() -> None:
    with pytest.raises(KeyError, match="got 'softmax', expected one of input, queries"):
        trace(seq=5, dim=20, heads=4).row("softmax")

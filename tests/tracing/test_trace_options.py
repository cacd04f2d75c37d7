"""trace of every option of the module: norms, rotary, biases by distance, the key of bias_kv, the gate."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headscope import MultiHeadAttention, masks, trace
from headscope.positions import NTK, ALiBi, LinearScaling, Llama3, Rotary, T5Buckets, YaRN
from headscope.tracing import _head_steps, _invariants, _steps
from support.traced_modules import made
from support.traced_options import OPTIONS, E, H, check_trace

SAME = ("step", "stage", "equation", "axes", "shape", "dtype", "elements", "bytes", "why", "mistake")

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "bias": {"bias": torch.linspace(-2, 2, 49).view(7, 7)},
    "rows that see nothing": {"mask": masks.KeyLengths(torch.tensor([0, 5]))},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_traced(name: str, call: str) -> None:
    check_trace(made(E, H, **OPTIONS[name]), torch.randn(2, 7, E), **CALLS[call])


@pytest.mark.parametrize("name", OPTIONS)
def test_half_types_double_and_no_batch(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        check_trace(made(E, H, **OPTIONS[name], dtype=dtype), torch.randn(2, 7, E, dtype=dtype), causal=True)
    check_trace(made(E, H, **OPTIONS[name]), torch.randn(7, E), mask=masks.window(3))
    for length in (0, 1):
        check_trace(made(E, H, **OPTIONS[name]), torch.randn(2, length, E))


@pytest.mark.parametrize("name", [name for name, each in OPTIONS.items() if {"rotary", "position_bias"} & set(each)])
@pytest.mark.parametrize("shape", [(7,), (1, 7), (2, 7)])
def test_positions_of_the_caller(name: str, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    positions = torch.randint(0, 40, shape, generator=generator).to(torch.int16)
    found = check_trace(made(E, H, **OPTIONS[name]), torch.randn(2, 7, E), positions=positions, causal=True)
    steps = {row.step: row for row in found.rows}
    assert "# yours: module, x, positions" in found.code
    for step in {"rotate queries", "rotate keys", "position bias"} & set(steps):
        assert "i and j are the given positions" in (steps[step].note or "")


@pytest.mark.parametrize(
    "name", [name for name, each in OPTIONS.items() if not {"rotary", "position_bias"} & set(each)]
)
def test_options_of_cross_attention(name: str) -> None:
    module, x = made(E, H, **OPTIONS[name]), torch.randn(2, 5, E)
    check_trace(module, x, torch.randn(2, 11, E), mask=masks.window(4))
    check_trace(module, x[:1], torch.randn(2, 11, E))
    check_trace(module, x, (torch.randn(1, 11, E), torch.randn(2, 11, E)))


some = {
    "kv_heads": st.sampled_from([1, 2, 4]),
    "head_dim": st.sampled_from([2, 6, 8]),
    "v_head_dim": st.sampled_from([3, 6]),
    "bias": st.sampled_from([True, False, ("q", "v")]),
    "scale": st.sampled_from([1.0, 0.2]),
    "softcap": st.sampled_from([0.5, 5.0]),
    "sinks": st.booleans(),
    "qk_norm": st.sampled_from(["rms", "layer", "rms_all"]),
    "gate": st.booleans(),
    "bias_kv": st.booleans(),
    "position_bias": st.sampled_from([ALiBi(H), T5Buckets(8, 5), T5Buckets(2, 9, bidirectional=False)]),
    "dtype": st.sampled_from([torch.float64, torch.bfloat16]),
}
scalings = st.sampled_from([None, LinearScaling(2.0), NTK(2.0, 3), YaRN(3.0, 8), Llama3(original_length=9)])


@st.composite
def calls(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return options of a module, and of its call."""
    options = draw(st.fixed_dictionaries({}, optional=some))
    width = options.get("head_dim", E // H)
    if draw(st.booleans()):
        dim = draw(st.sampled_from([each for each in (2, 4, 6, 8) if each <= width]))
        scaling = draw(scalings)
        pairing = draw(st.sampled_from(["half", "interleaved"]))
        options["rotary"] = Rotary(
            dim, pairing=pairing, scaling=None if isinstance(scaling, NTK) and dim < 4 else scaling
        )
    call: dict[str, Any] = {}
    if draw(st.booleans()):
        call["causal"] = True
    if draw(st.booleans()):
        call["mask"] = draw(st.sampled_from([masks.window(2), masks.KeyLengths(torch.tensor([0, 4])), masks.Prefix(2)]))
    if draw(st.booleans()):
        call["bias"] = torch.randn(draw(st.sampled_from([(5, 5), (H, 1, 5), (2, 1, 5, 5)])))
    if draw(st.booleans()) and {"rotary", "position_bias"} & set(options):
        call["positions"] = torch.randint(0, 30, draw(st.sampled_from([(5,), (2, 5)])))
    return options, call


@settings(max_examples=50)
@given(calls())
def test_combinations_of_options(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    options, call = case
    module = made(E, H, **options)
    dtype = module.out_proj.weight.dtype
    call = {name: value.to(dtype) if name == "bias" else value for name, value in call.items()}
    check_trace(module, torch.randn(2, 5, E, dtype=dtype), **call)


# ---------------------------------------------------------------- sizes, texts, errors


@pytest.mark.parametrize("name", [name for name in OPTIONS if "reproducible" not in name])
def test_sizes_alone_have_the_same_rows_and_make_a_program(name: str) -> None:
    options: dict[str, Any] = {"kv_heads": 4} | OPTIONS[name]
    sizes: dict[str, Any] = {"batch": 2, "seq": 7, "causal": True}
    values = trace(MultiHeadAttention(E, H, **options), torch.randn(2, 7, E), causal=True)
    shown = [trace(MultiHeadAttention(E, H, **options), **sizes)]
    if not {"qk_norm_eps", "bias"} & set(options):
        shown.append(trace(dim=E, heads=H, **options, **sizes))
        space: dict[str, Any] = {}
        exec(shown[1].code, space)
        assert list(space["out"].shape) == [2, 7, E]
    for alone in shown:
        assert alone.held is None
        for a, b in zip(alone.rows, values.rows, strict=True):
            assert [getattr(a, name) for name in SAME] == [getattr(b, name) for name in SAME]
            assert b.invariant.startswith(a.invariant)
            assert a.code.endswith(b.code)


def test_the_module_is_described() -> None:
    module = MultiHeadAttention(
        E, H, rotary=Rotary(4, base=500.0, scaling=Llama3(original_length=64)), position_bias=T5Buckets(8, 16),
        qk_norm="layer", qk_norm_eps=1e-3, gate=True, bias_kv=True,
    )  # fmt: skip
    found = trace(module, torch.randn(1, 5, E))
    options = (
        "rotary=Rotary(4, base=500.0, scaling=Llama3(original_length=64)), position_bias=T5Buckets(num_buckets=8, "
        "max_distance=16), qk_norm='layer', qk_norm_eps=0.001, gate=True, bias_kv=True"
    )
    assert found.title == f"MultiHeadAttention({E}, {H}, {options}) on x [1, 5, {E}]"
    described = json.loads(found.to_json())["module"]
    assert described["rotary"] == "Rotary(4, base=500.0, scaling=Llama3(original_length=64))"
    assert described["position_bias"] == "T5Buckets(num_buckets=8, max_distance=16)"
    assert [described[name] for name in ("qk_norm", "gate", "bias_kv")] == ["layer", True, True]
    same = eval(f"MultiHeadAttention({E}, {H}, {options})")
    assert same.extra_repr() == module.extra_repr()
    slopes = trace(MultiHeadAttention(E, 1, position_bias=ALiBi(1, (0.5,))), seq=3).module["position_bias"]
    assert slopes == "ALiBi(1, slopes=(0.5,))"


def test_notes_of_options() -> None:
    x = torch.randn(2, 7, E)
    found = trace(made(E, H, rotary=Rotary(4, scaling=YaRN(4.0, 16)), qk_norm="rms_all"), x)
    assert found.row("rotate keys").note == (
        "pairs are components n and n + 2; θₙ = 10000 ** (−2n / 4), scaled by YaRN; components from 4 on are unchanged"
    )
    assert "the norm of each pair grows by 1.139" in found.row("rotate keys").invariant
    assert found.row("normalise keys").note == "all heads together"
    small = trace(made(E, H, qk_norm="rms", qk_norm_eps=10.0), x).row("normalise queries")
    assert "ε = 10 keeps the root mean square below 1" in (small.note or "")
    alibi = trace(made(E, H, position_bias=ALiBi(H)), x).row("position bias")
    assert (alibi.equation, alibi.note) == (
        "s[i, j] ← s[i, j] − m[h] · |i − j|",
        "ALiBi: slopes m from 0.25 to 0.00391",
    )
    keyed = trace(made(E, H, bias_kv=True), x, mask=masks.Prefix(0))
    assert keyed.row("weights").axes == {"B": 2, "H": H, "Q": 7, "K+1": 8}
    assert "have no visible key and see only the key of bias_kv" in (keyed.row("mask").note or "")


@pytest.mark.parametrize("name", ["rotary", "partial rotary, interleaved", "rms", "ALiBi", "bias_kv", "gate"])
def test_inputs_that_are_not_finite(name: str) -> None:
    x = torch.randn(2, 7, E)
    x[1, 6, 3] = torch.inf
    found = trace(made(E, H, **OPTIONS[name]), x, causal=True)
    assert [row.step for row in found.failed] == ["input", "weights"]


@pytest.mark.parametrize("name", ["all", "reproducible", "ALiBi", "T5", "rms of all heads", "YaRN", "gate"])
def test_large_inputs_are_checked_on_a_sample(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (_invariants, _head_steps, _steps):
        monkeypatch.setattr(module, "MATRIX", 1 << 10)
    calls: list[dict[str, Any]] = [{"causal": True}]
    if {"rotary", "position_bias"} & set(OPTIONS[name]):
        calls.append({"positions": torch.arange(2 * 61).view(2, 61)})
    for call in calls:
        found = trace(made(E, H, **OPTIONS[name]), torch.randn(2, 61, E), **call)
        assert found.held is True, [(row.step, row.invariant) for row in found.failed]
        assert re.search(r"\(on \d+ of 488 rows\)$", found.row("weights").invariant)
        for row in found.rows:
            if row.step.startswith(("normalise", "rotate", "gated")):
                assert re.search(r"\(on \d+ of 61 positions\)$", row.invariant)


@pytest.mark.parametrize("name", ["rms", "layer", "rms of all heads", "rotary", "ALiBi", "T5", "gate", "bias_kv"])
def test_heads_of_the_usual_width(name: str) -> None:
    """Of many numbers, some are near 0, and their mean too."""
    found = trace(made(256, H, **OPTIONS[name]), torch.randn(2, 131, 256), causal=True)
    assert found.held is True, [(row.step, row.invariant) for row in found.failed]


@pytest.mark.parametrize("name", ["all", "YaRN", "NTK by length", "ALiBi", "layer"])
def test_the_default_device_does_not_matter(name: str) -> None:
    module, x = made(E, H, **OPTIONS[name]), torch.randn(1, 7, E)
    expected = trace(module, x, causal=True).to_dict()
    with torch.device("meta"):
        found = trace(module, x, causal=True)
    assert found.held
    assert found.to_dict() == expected


def test_sampled_heads_attend_to_their_own_keys() -> None:
    """Of 32 heads 8 are checked, as many as there are key/value heads."""
    found = trace(MultiHeadAttention(64, 32, kv_heads=8), torch.randn(1, 300, 64), causal=True)
    assert found.row("scores").invariant.endswith("of 9,600 rows)")
    assert found.held is True, [(row.step, row.invariant) for row in found.failed]


def test_a_million_positions_of_every_option() -> None:
    found = trace(
        seq=1_000_000, dim=E, heads=H, causal=True, qk_norm="rms", rotary=Rotary(4), position_bias=ALiBi(H), gate=True,
        bias_kv=True,
    )  # fmt: skip
    assert found.row("weights").shape == [1, H, 1_000_000, 1_000_001]
    assert found.row("rotate keys").bytes == 4 * 1_000_000 * E


@pytest.mark.parametrize("name", ["rotary", "gate", "bias_kv", "ALiBi", "bias_kv and rotary"])
def test_autocast(name: str) -> None:
    module, x = made(E, H, **OPTIONS[name]), torch.randn(2, 7, E)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = trace(module, x, causal=True)
        space = {"module": module, "x": x}
        with torch.no_grad():
            exec(found.code, space)
    assert found.held is True, [(row.step, row.invariant) for row in found.failed]
    torch.testing.assert_close(space["out"], found.output, atol=5e-2, rtol=5e-2)


class Scaled(torch.nn.Module):
    """A norm that no row shows."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_bad_input_is_a_clear_error() -> None:
    x, turning, plain = torch.randn(2, 7, E), made(E, H, rotary=Rotary(4)), made(E, H)
    cases: list[tuple[Any, ...]] = [
        (ValueError, "positions: expected None, because this module has neither rotary", (plain, x), torch.arange(7)),
        (ValueError, "positions: expected None, because this module has neither rotary", (plain,), torch.arange(7)),
        (ValueError, r"positions: positions \[6\], expected \[7\]", (turning, x), torch.arange(6)),
        (ValueError, r"positions: positions \[6\], expected \[7\]", (turning,), torch.arange(6)),
        (TypeError, "positions: got float32, expected integers", (turning,), torch.zeros(7)),
        (ValueError, "context: expected None, because this module has rotary", (turning, x, x.clone()), None),
    ]
    for error, match, arguments, positions in cases:
        sizes = {"seq": 7} if len(arguments) == 1 else {}
        with pytest.raises(error, match=match):
            trace(*arguments, positions=positions, **sizes)
    with pytest.raises(ValueError, match="context: expected None, because this module has position_bias"):
        trace(seq=7, context_seq=5, dim=E, heads=H, position_bias=ALiBi(H))
    with pytest.raises(ValueError, match="rotary: its dim is 8, expected at most head_dim 6"):
        trace(seq=7, dim=E, heads=H, rotary=Rotary(8))
    with pytest.raises(ValueError, match="gate: the module has its own"):
        trace(plain, seq=7, gate=True)
    nested = torch.nested.nested_tensor([torch.randn(3, E), torch.randn(5, E)], layout=torch.jagged)
    with pytest.raises(ValueError, match=r"x: is nested, expected an ordinary tensor; trace one of its sequences"):
        trace(plain, nested)
    assert trace(plain, nested[0]).held
    normed = made(E, H, qk_norm="rms")
    normed.k_norm = Scaled()
    with pytest.raises(TypeError, match="module: has a Scaled as k_norm, whose steps cannot be traced yet"):
        trace(normed, x)

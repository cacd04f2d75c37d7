"""trace of every option of the module: norms, rotary, biases by distance, the key of bias_kv, the gate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headscope import MultiHeadAttention, masks, trace
from headscope.positions import NTK, ALiBi, LinearScaling, Llama3, Rotary, T5Buckets, YaRN
from headscope.tracing import Trace
from support.traced_modules import made, run_rows

E, H = 24, 4  # heads of width 6
SAME = ("step", "stage", "equation", "axes", "shape", "dtype", "elements", "bytes", "why", "mistake")

OPTIONS: dict[str, dict[str, Any]] = {
    "rms": {"qk_norm": "rms"},
    "layer": {"qk_norm": "layer", "qk_norm_eps": 1e-3},
    "rms of all heads": {"qk_norm": "rms_all", "kv_heads": 2},
    "rotary": {"rotary": Rotary(6)},
    "rotary, interleaved": {"rotary": Rotary(6, base=100.0, pairing="interleaved")},
    "partial rotary": {"rotary": Rotary(4)},
    "partial rotary, interleaved": {"rotary": Rotary(2, pairing="interleaved"), "kv_heads": 1},
    "linear scaling": {"rotary": Rotary(6, scaling=LinearScaling(3.0))},
    "NTK": {"rotary": Rotary(6, scaling=NTK(2.0))},
    "NTK by length": {"rotary": Rotary(6, scaling=NTK(2.0, original_length=3))},
    "YaRN": {"rotary": Rotary(6, scaling=YaRN(4.0, 16))},
    "Llama 3": {"rotary": Rotary(6, scaling=Llama3(original_length=16))},
    "ALiBi": {"position_bias": ALiBi(H)},
    "ALiBi of other slopes": {"position_bias": ALiBi(H, slopes=(0.3, 0.0, 2.0, 0.7))},
    "T5": {"position_bias": T5Buckets(8, 5), "scale": 1.0},
    "T5 of one direction": {"position_bias": T5Buckets(4, 3, bidirectional=False)},
    "gate": {"gate": True},
    "gate without bias": {"gate": True, "bias": False, "v_head_dim": 3},
    "bias_kv": {"bias_kv": True},
    "bias_kv of shared heads": {"bias_kv": True, "kv_heads": 2, "v_head_dim": 3, "softcap": 2.0, "sinks": True},
    "bias_kv and rotary": {"bias_kv": True, "rotary": Rotary(4), "kv_heads": 2},
    "bias_kv and ALiBi": {"bias_kv": True, "position_bias": ALiBi(H)},
    "reproducible": {"reproducible": True, "qk_norm": "rms", "rotary": Rotary(6), "gate": True, "kv_heads": 2},
    "reproducible ALiBi": {"reproducible": True, "position_bias": ALiBi(H)},
    "all": {
        "qk_norm": "layer", "rotary": Rotary(4), "position_bias": T5Buckets(8, 5), "gate": True, "bias_kv": True,
        "kv_heads": 2, "v_head_dim": 5, "softcap": 3.0, "sinks": True, "scale": 0.7,
    },
}  # fmt: skip

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "bias": {"bias": torch.linspace(-2, 2, 49).view(7, 7)},
    "rows that see nothing": {"mask": masks.KeyLengths(torch.tensor([0, 5]))},
}


def check_trace(module: MultiHeadAttention, x: Tensor, context: Any = None, **call: Any) -> Trace:
    """Every invariant holds, the output is the module's own, and the code computes what the rows show."""
    found = trace(module, x, context, **call)
    assert found.held is True, [(row.step, row.invariant) for row in found.failed]
    options = dict(call)
    mask = options.pop("mask", None)
    if options.pop("causal", False):
        mask = masks.causal() if mask is None else masks.causal() & mask
    with torch.no_grad():
        assert torch.equal(found.output, module(x, context, mask=mask, **options))
    run_rows(found, module, x, context, call)
    return found


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


@given(calls())
def test_combinations_of_options(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    options, call = case
    module = made(E, H, **options)
    dtype = module.out_proj.weight.dtype
    call = {name: value.to(dtype) if name == "bias" else value for name, value in call.items()}
    check_trace(module, torch.randn(2, 5, E, dtype=dtype), **call)

"""watch(verify=N): rows computed again in float64, compared with the statistics and the output of each call."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import headscope
from headscope import MultiHeadAttention, Observe, Recording, watch
from headscope._intercept import InterceptedCall, Measured, function_mode, torch_modules
from headscope.masks import Documents, KeyLengths, as_mask, causal, window
from headscope.report.viewer import shown_recording
from headscope.stats import HeadStats
from headscope.watching import Verified, WatchWarning, _verify
from headscope.watching._exact_row import exact_row
from headscope.watching._verify import spread_rows
from support import oracle
from support.paths import DATA

transformers = pytest.importorskip("transformers")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class Sdpa(nn.Module):
    """A layer that calls torch's function, with the options of the test."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)


class Ours(Sdpa):
    """The same with headscope's."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return headscope.attention(q, k, v, **self.options)


def tensors(
    *lead: int, heads: int = 3, kv: int = 3, queries: int = 7, keys: int = 11, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((heads, queries, 5), (kv, keys, 5), (kv, keys, 2))
    q, k, v = (torch.randn(*lead, *size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    return q, k, v


def verified(model: nn.Module, *inputs: Tensor, rows: int = 1000, **options: Any) -> Verified:
    with torch.no_grad(), watch(model, verify=rows, **options) as seen:
        model(*inputs)
    (one,) = seen.about.verified.values()
    assert one.fits
    return one


# ---------------------------------------------------------------- which rows


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 7), (1, 8, 1), (5, 1, 101), (3, 2, 4096)])
@pytest.mark.parametrize("count", [1, 2, 5, 13])
def test_rows_are_distinct_inside_and_include_the_first_and_the_last(sizes: tuple[int, int, int], count: int) -> None:
    rows = spread_rows(sizes, count)
    assert len(rows) == len({*rows}) == min(count, math.prod(sizes))
    assert all(0 <= at < size for row in rows for at, size in zip(row, sizes, strict=True))
    assert tuple(size - 1 for size in sizes) in rows
    assert (0, 0, 0) in rows or count == 1
    assert rows == spread_rows(sizes, count)


def test_rows_are_spread_over_batch_heads_and_queries() -> None:
    rows = spread_rows((3, 5, 1000), 40)
    assert {b for b, _, _ in rows} == {0, 1, 2}
    assert {h for _, h, _ in rows} == {0, 1, 2, 3, 4}
    assert {i // 100 for _, _, i in rows} == set(range(10))


# ---------------------------------------------------------------- the row itself


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 1.5},
    "causal": {"mask": causal()},
    "window": {"mask": window(3)},
    "lengths": {"mask": KeyLengths(torch.tensor([4, 11]))},
    "bias": {"bias": torch.randn(1, 3, 7, 11, generator=torch.Generator().manual_seed(1))},
    "bias of keys": {"bias": torch.randn(2, 1, 1, 11, generator=torch.Generator().manual_seed(1))},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 3.0])},
    "some rows empty": {"mask": (torch.arange(7) % 3 != 1)[:, None].expand(7, 11)},
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kv", [1, 3], ids=["grouped", "equal heads"])
def test_a_row_is_that_of_the_oracle(name: str, kv: int) -> None:
    options = CALLS[name]
    q, k, v = tensors(2, kv=kv)
    call = headscope_call(q, k, v, **options)
    b, h, i, j = (torch.arange(n) for n in (2, 3, 7, 11))
    mask = options.get("mask")
    rule = as_mask(mask)
    seen = None if rule is None else rule.at(7, 11).allows(b[:, None, None, None], h[:, None, None], i[:, None], j)
    bias = options.get("bias")
    exact = oracle.attention(
        q, k, v, seen=seen, bias=bias, **{key: x for key, x in options.items() if key not in ("mask", "bias")}
    )
    for at in [(0, 0, 0), (1, 2, 6), (0, 1, 3), (1, 1, 5)]:
        row = exact_row(call, (2,), at)
        torch.testing.assert_close(row.out, exact.out[at], rtol=1e-12, atol=1e-12)
        if row.quantities:
            assert row.quantities["lse"] == pytest.approx(float(exact.lse[at]), rel=1e-12)
            assert row.quantities["max_weight"] == pytest.approx(float(exact.weights[at].max()), rel=1e-12)
        else:
            assert exact.lse[at] == -math.inf


def headscope_call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return InterceptedCall(q=q, k=k, v=v, **options)


# ---------------------------------------------------------------- what agrees


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CALLS)
def test_headscopes_attention_agrees_with_float64(name: str, dtype: torch.dtype) -> None:
    options = dict(CALLS[name])
    options |= {key: options[key].to(dtype) for key in ("bias", "sinks") if key in options}
    one = verified(Ours(**options), *tensors(2, dtype=dtype))
    assert one.rows == 2 * 3 * 7
    assert one.output is not None
    assert one.statistics is not None
    assert one.empty == (2 * 3 * 2 if name == "some rows empty" else 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 2.0}, {"attn_mask": torch.ones(7, 11, dtype=torch.bool).tril(3)}],
    ids=["plain", "causal", "scale", "mask"],
)
def test_sdpa_agrees_with_float64(options: dict[str, Any], dtype: torch.dtype) -> None:
    one = verified(Sdpa(**options), *tensors(2, dtype=dtype), kinds={"Sdpa": "self"})
    assert one.rows == 42
    assert one.output is not None
    assert {"lse", "entropy", "self", "distance", "value_norm"} <= {*one.names}


def test_leading_axes_one_head_and_broadcast_keys() -> None:
    assert verified(Sdpa(), *tensors(2, 5)).rows == 2 * 5 * 3 * 7
    q, k, v = (x[0, 0] for x in tensors(1))
    assert verified(Sdpa(), q, k, v).rows == 7
    q, k, v = tensors(2, 3)
    assert verified(Sdpa(attn_mask=torch.rand(2, 1, 1, 7, 11) > 0.3), q, k[:, :1], v).rows == 126


def test_documents_and_grouped_heads() -> None:
    ids = torch.tensor([[0] * 5 + [1] * 6])
    one = verified(Ours(mask=causal() & Documents(ids)), *tensors(1, heads=6, kv=2, queries=11))
    assert (one.rows, one.empty) == (66, 0)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("accelerate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_with_padding_a_window_and_a_cache(implementation: str, accelerate: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        hidden_size=24, intermediate_size=24, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=31, sliding_window=5,
    )  # fmt: skip
    model = transformers.MistralForCausalLM(config).eval().to(dtype)
    model.set_attn_implementation(implementation)
    padding = torch.ones(2, 11, dtype=torch.long)
    padding[0, :4] = 0
    ids = torch.randint(3, 31, (2, 11))
    with torch.no_grad(), watch(model, verify=9, accelerate=accelerate) as seen:
        model.generate(input_ids=ids, attention_mask=padding, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert [*seen.about.verified] == [*seen.layers]
    for one in seen.about.verified.values():
        assert (one.rows, one.fits, one.output is not None) == (27, True, True)
        assert one.empty > 0


def test_nothing_is_verified_by_default() -> None:
    model = MultiHeadAttention(8, 2)
    with watch(model) as seen:
        model(torch.randn(1, 5, 8))
    assert seen.about.verified == {}
    assert "Verified" not in shown_recording(seen).footer


def test_statistics_and_outputs_are_the_same_to_the_bit() -> None:
    torch.manual_seed(0)
    model, x = MultiHeadAttention(24, 3, kv_heads=1), torch.randn(2, 101, 24)
    what = Observe(map=4, edges=3, top=2)
    with torch.no_grad(), watch(model, what=what) as plain:
        expected = model(x)
    with torch.no_grad(), watch(model, what=what, verify=7) as seen:
        out = model(x)
    assert torch.equal(out, expected)
    assert seen.stats.to_dict() == plain.stats.to_dict()
    assert {*seen.stats.kept[0].values} == {*plain.stats.kept[0].values} == {"top_keys", "top_weights"}
    for name in seen.names:
        assert torch.equal(seen[name].mean, plain[name].mean)


def test_rows_of_a_sample_and_of_a_boolean_tensor() -> None:
    q, k, v = tensors(1)
    assert verified(Sdpa(), q, k, v, what=Observe(rows=3)).rows == 9
    chosen = torch.zeros(1, 1, 7, dtype=torch.bool)
    chosen[..., [1, 4]] = True
    assert verified(Sdpa(), q, k, v, what=Observe(rows=chosen)).rows == 6
    only_output = verified(Sdpa(), q, k, v, what=Observe(row_stats=False))
    assert (only_output.statistics, only_output.names) == (None, ())
    assert only_output.output is not None


def test_dropout_leaves_the_statistics() -> None:
    """The dropped weights are random, so the output cannot be computed again."""
    one = verified(Sdpa(dropout_p=0.5), *tensors(1))
    assert one.output is None
    assert one.statistics is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [False, True], ids=["fast path", "slow path"])
def test_a_projected_output(training: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(12, 2, batch_first=True).train(training).to(dtype), torch.randn(2, 7, 12).to(dtype)
    nn.init.normal_(model.out_proj.bias)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.no_grad(), watch(model, verify=1000) as seen:
        model(x, x, x, key_padding_mask=padding)
    one = seen.about.verified["MultiheadAttention"]
    assert one.fits
    assert one.output is not None
    assert one.statistics is not None


def test_a_projected_output_without_a_batch_or_with_dropout() -> None:
    torch.manual_seed(0)
    x = torch.randn(7, 12)
    assert verified(nn.MultiheadAttention(12, 3, bias=False), x, x, x).output is not None
    assert verified(nn.MultiheadAttention(12, 3, dropout=0.5), x, x, x).output is None


def test_a_wrong_projected_output_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch_modules.with_output
    monkeypatch.setattr(torch_modules, "with_output", lambda call, given, out: original(call, given, out + 1e-4))
    x = torch.randn(2, 7, 12)
    with (
        pytest.warns(WatchWarning, match="component .* of the output"),
        watch(model := nn.MultiheadAttention(12, 3, batch_first=True), verify=3),
    ):
        model(x, x, x)


def test_the_output_of_an_encoder_layers_fast_path_is_not_compared() -> None:
    layer = nn.TransformerEncoderLayer(12, 2, 13, batch_first=True).eval()  # an odd number of heads has none
    one = verified(layer, torch.randn(2, 7, 12))
    assert one.output is None
    assert one.statistics is not None


def test_values_that_are_not_finite_in_masked_keys() -> None:
    q, k, v = tensors(1)
    v[..., -1, :] = math.nan
    mask = torch.ones(7, 11, dtype=torch.bool)
    mask[:, -1] = False
    assert verified(Ours(mask=mask), q, k, v).output is not None
    verified(Sdpa(attn_mask=mask), q, k, v)


def test_autocast_rounds_as_the_model_does() -> None:
    q, k, v = tensors(1)
    with torch.autocast("cpu", torch.bfloat16):
        one = verified(Sdpa(), q, k, v)
    assert one.output_bound is not None
    assert one.output_bound > 1e-3


# ---------------------------------------------------------------- what does not agree


@pytest.mark.parametrize("at", [(0, 0, 0, 0), (1, 2, 6, 1)], ids=["first row", "last row"])
def test_a_wrong_output_is_a_warning_that_names_layer_and_row(
    monkeypatch: pytest.MonkeyPatch, at: tuple[int, int, int, int]
) -> None:
    original = function_mode.run_attention

    def wrong(*args: Any) -> tuple[Tensor, Tensor | None]:
        out, lse = original(*args)
        out[at] += 1e-4
        return out, lse

    monkeypatch.setattr(function_mode, "run_attention", wrong)
    model = nn.Sequential(Wrapped(), Wrapped())
    with pytest.warns(WatchWarning) as caught, torch.no_grad(), watch(model, verify=5) as seen:
        model(tensors(2, queries=11))
    (warning,) = caught  # one for a recording
    text = str(warning.message)
    assert text.startswith(
        f"watch: verify: layer 0.inner: row {list(at[:3])} of [B, H, Q]: component {at[3]} of the output"
    )
    assert "expected" in text
    assert "got" in text
    assert not any(one.fits for one in seen.about.verified.values())
    assert "beyond rounding: 0.inner, 1.inner" in shown_recording(seen).footer["Verified"]


class Wrapped(nn.Module):
    """A layer of a sequence, whose input and output are q, k and v."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Ours()

    def forward(self, qkv: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        self.inner(*qkv)
        return qkv


@pytest.mark.parametrize("name", ["lse", "entropy", "max_weight", "self", "value_norm", "effective_keys"])
def test_a_wrong_statistic_is_a_warning(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    original = _verify.measure

    def wrong(call: Any, what: Observe) -> Any:
        part = original(call, what).part()
        values = {**part.kept[0].values}
        values[name] = values[name] * 1.0001
        return Measured(lambda: replace(part, kept=(replace(part.kept[0], values=values),)))

    monkeypatch.setattr(_verify, "measure", wrong)
    with pytest.warns(WatchWarning, match=rf"layer Sdpa: row \[.*\] of \[B, H, Q\]: {name}: expected"):  # noqa: SIM117
        with torch.no_grad(), watch(model := Sdpa(is_causal=True), verify=4) as seen:
            model(*tensors(1, queries=11))
    assert not seen.about.verified["Sdpa"].fits


def test_a_counted_row_without_visible_keys_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    original = _verify.measure

    def wrong(call: Any, what: Observe) -> Any:
        part = original(call, what).part()
        counted = torch.ones(1, 3, 7, dtype=torch.bool)
        return Measured(lambda: replace(part, kept=(replace(part.kept[0], counted=counted),)))

    monkeypatch.setattr(_verify, "measure", wrong)
    mask = torch.ones(7, 11, dtype=torch.bool)
    mask[3] = False
    with (
        pytest.warns(WatchWarning, match="expected a row that does not count"),
        watch(model := Ours(mask=mask), verify=99),
    ):
        model(*tensors(1))


def test_an_empty_row_that_is_not_0_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    original = function_mode.run_attention

    def wrong(*args: Any) -> tuple[Tensor, Tensor | None]:
        out, lse = original(*args)
        return torch.where(out == 0, 1e-6, out), lse

    monkeypatch.setattr(function_mode, "run_attention", wrong)
    mask = torch.ones(7, 11, dtype=torch.bool)
    mask[0] = False
    with (
        pytest.warns(WatchWarning, match=r"row \[0, 0, 0\] .* expected 0 in float64"),
        watch(model := Ours(mask=mask), verify=2),
    ):
        model(*tensors(1))


# ---------------------------------------------------------------- files, pages, arguments


def test_what_was_verified_survives_saving(tmp_path: Path) -> None:
    model = MultiHeadAttention(12, 3)
    with torch.no_grad(), watch(model, verify=5) as seen:
        model(torch.randn(2, 7, 12))
    again = Recording.load(seen.save(tmp_path / "seen.safetensors"))
    assert again.about == seen.about
    assert again.about.verified["MultiHeadAttention"].rows == 5
    assert again.to_dict()["about"]["verified"]["MultiHeadAttention"]["rows"] == 5
    assert HeadStats.load(tmp_path / "seen.safetensors").layers == seen.layers


def test_an_infinite_error_is_saved_and_is_json(tmp_path: Path) -> None:
    model = MultiHeadAttention(12, 3)
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(2, 7, 12))
    wrong = Verified(3, 1, math.inf, 1e-6, 1e-8, 1e-6, ("lse",))
    seen.about = replace(seen.about, verified={"a": wrong, "b": Verified(2, 2)}, other_layers={"c": "a state space"})
    again = Recording.load(seen.save(tmp_path / "seen.safetensors"))
    assert again.about == seen.about
    assert json.loads(json.dumps(seen.to_dict()["about"], allow_nan=False))["verified"]["a"]["output"] is None


def test_old_files_have_nothing_verified() -> None:
    about = Recording.load(DATA / "recording_v1.safetensors").about
    assert (about.verified, about.other_layers) == ({}, {})


def test_the_page_says_what_was_verified() -> None:
    model = MultiHeadAttention(12, 3)
    with torch.no_grad(), watch(model, verify=5) as seen:
        model(torch.randn(2, 7, 12))
    line = shown_recording(seen).footer["Verified"]
    assert line.startswith("5 rows of 1 layer against float64: output within ")
    assert "statistics within" in line
    assert "beyond" not in line


def test_errors_of_calls_are_merged() -> None:
    a = Verified(2, 0, 1e-7, 1e-6, None, None, ("lse",))
    b = Verified(3, 1, 5e-7, 1e-5, 1e-7, 1e-6, ("lse", "mass"))
    assert a.merge(b) == Verified(5, 1, 1e-7, 1e-6, 1e-7, 1e-6, ("lse", "mass"))
    assert a.merge(b).fits
    assert not a.merge(Verified(1, 0, math.inf, 1e-6)).fits


@pytest.mark.parametrize(("rows", "error"), [(-1, ValueError), (1.5, TypeError), ("3", TypeError), (True, TypeError)])
def test_verify_is_a_whole_number(rows: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="verify"):
        watch(MultiHeadAttention(8, 2), verify=rows)


def test_training_with_gradients_is_unchanged() -> None:
    torch.manual_seed(0)
    model, x = MultiHeadAttention(12, 3), torch.randn(2, 7, 12)
    model(x).sum().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    with warnings.catch_warnings(action="error"), watch(model, verify=5):
        model(x).sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert (parameter.grad is None) == (grad is None)
        assert grad is None or torch.equal(parameter.grad, grad)

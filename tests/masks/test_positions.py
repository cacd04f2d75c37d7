"""Rotary, ALiBi and T5's buckets: against their definitions in float64, and against transformers."""

from __future__ import annotations

import cmath
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from headscope._support.bounded import BoundedTable
from headscope.positions import (
    NTK,
    ALiBi,
    LinearScaling,
    Llama3,
    RelativeBias,
    Rotary,
    T5Buckets,
    YaRN,
    _rotary,
    matrix,
    restarting,
)

B, H, T, D = 2, 3, 7, 10


# ---------------------------------------------------------------- rotary by its definition


def turned(x: Tensor, rotary: Rotary, positions: list[list[int]]) -> Tensor:
    """Each pair as one complex number, multiplied by factor · exp(i · position · frequency)."""
    out = x.double().clone()
    frequencies = rotary.frequencies().tolist()
    for b, row in enumerate(positions):
        for t, position in enumerate(row):
            for n, frequency in enumerate(frequencies):
                one, other = (n, n + rotary.dim // 2) if rotary.pairing == "half" else (2 * n, 2 * n + 1)
                turn = rotary.attention_factor * cmath.exp(1j * position * frequency)
                for h in range(x.shape[1]):
                    z = complex(x[b, h, t, one], x[b, h, t, other]) * turn
                    out[b, h, t, one], out[b, h, t, other] = z.real, z.imag
    return out


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("dim", [D, 4])
@pytest.mark.parametrize("scaling", [None, YaRN(4, 64)])
def test_rotary_turns_pairs_by_position_times_frequency(pairing: Any, dim: int, scaling: Any) -> None:
    rotary = Rotary(dim, 100.0, pairing, scaling)
    x = torch.randn(B, H, T, D)
    places = [[0, 3, 4, 5, 900, 2, 1], [7, 8, 9, 10, 11, 12, 13]]
    torch.testing.assert_close(rotary.rotate(x, torch.tensor(places)), turned(x, rotary, places).float())
    torch.testing.assert_close(rotary.rotate(x.double(), torch.tensor(places)), turned(x, rotary, places))
    row = rotary.rotate(x, torch.arange(2, 2 + T))
    torch.testing.assert_close(row, turned(x, rotary, [list(range(2, 2 + T))] * B).float())
    torch.testing.assert_close(rotary.rotate(x, slice(2, 2 + T)), row, rtol=0, atol=0)
    torch.testing.assert_close(rotary.rotate(x[0], torch.arange(2, 2 + T)), row[0], rtol=0, atol=0)
    torch.testing.assert_close(row[..., dim:], x[..., dim:], rtol=0, atol=0)


def test_only_the_distance_counts() -> None:
    rotary = Rotary(D)
    q, k = torch.randn(2, 1, 1, 5, D, dtype=torch.float64)

    def logits(shift: int) -> Tensor:
        at = torch.arange(shift, shift + 5)
        return rotary.rotate(q, at) @ rotary.rotate(k, at).mT

    torch.testing.assert_close(logits(0), logits(100_003), rtol=1e-8, atol=1e-8)
    at = torch.arange(-7, -2)  # before the first position: nothing wraps around
    torch.testing.assert_close(logits(0), rotary.rotate(q, at) @ rotary.rotate(k, at).mT, rtol=1e-9, atol=1e-9)


def test_half_precision_is_rounded_once() -> None:
    x = torch.randn(B, H, T, D).bfloat16()
    out = Rotary(D).rotate(x, slice(0, T))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, Rotary(D).rotate(x.float(), slice(0, T)).bfloat16(), rtol=0, atol=0)


def test_gradients_flow_also_after_inference_mode() -> None:
    rotary = Rotary(6, base=77.0)  # a table of its own
    with torch.inference_mode():
        rotary.rotate(torch.randn(1, 1, T, 6), slice(0, T))
    x = torch.randn(1, 1, T, 6, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(rotary.rotate, (x, torch.arange(T)))
    y = torch.randn(1, 1, T, 6, requires_grad=True)
    (grad,) = torch.autograd.grad(rotary.rotate(y, slice(0, T)).square().sum(), y)
    torch.testing.assert_close(grad, 2 * y)  # a turn keeps the length


def test_rotary_compiles_and_runs_on_meta() -> None:
    rotary = Rotary(4)
    x = torch.randn(1, 2, 5, 6)
    compiled = torch.compile(rotary.rotate, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, slice(0, 5)), rotary.rotate(x, slice(0, 5)))
    torch.testing.assert_close(compiled(x, torch.arange(5)), rotary.rotate(x, slice(0, 5)))
    assert rotary.rotate(x.to("meta"), slice(0, 5)).shape == x.shape


# ---------------------------------------------------------------- frequencies


def theirs(kind: str, length: int | None = None, **said: Any) -> tuple[Tensor, float]:
    rope = pytest.importorskip("transformers.modeling_rope_utils")
    parameters = {"rope_type": kind, "rope_theta": 500.0, **said}
    config = SimpleNamespace(
        rope_parameters=parameters, head_dim=24, hidden_size=48, num_attention_heads=2, max_position_embeddings=64,
        standardize_rope_params=lambda: None,
    )  # fmt: skip
    return rope.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


SCALINGS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "linear": (LinearScaling(3), "linear", {"factor": 3}),
    "dynamic": (NTK(3, 64), "dynamic", {"factor": 3}),
    "yarn": (YaRN(4, 64), "yarn", {"factor": 4, "original_max_position_embeddings": 64}),
    "yarn, slow pairs beyond the last": (
        YaRN(4, 6400), "yarn", {"factor": 4, "original_max_position_embeddings": 6400}
    ),
    "yarn, not truncated": (
        YaRN(4, 64, beta_fast=9, beta_slow=2, truncate=False, attention_factor=1.5),
        "yarn",
        {"factor": 4, "original_max_position_embeddings": 64, "beta_fast": 9, "beta_slow": 2, "truncate": False,
         "attention_factor": 1.5},
    ),
    "yarn, DeepSeek": (
        YaRN(40, 64, mscale=0.7, mscale_all_dim=1.3),
        "yarn",
        {"factor": 40, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.3},
    ),
    "llama3": (
        Llama3(8, 1, 4, 64),
        "llama3",
        {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [None, 50, 200])
def test_scalings_are_those_of_transformers(name: str, length: int | None) -> None:
    scaling, kind, said = SCALINGS[name]
    rotary = Rotary(24, 500.0, scaling=scaling)
    wanted, factor = theirs(kind, length, **said)
    torch.testing.assert_close(rotary.frequencies(length), wanted.double(), rtol=3e-6, atol=0)
    assert rotary.attention_factor == pytest.approx(factor, rel=1e-12)


def test_turning_is_that_of_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = torch.randn(2, B, H, T, D)
    rotary = Rotary(D)
    cos, sin = (torch.cat([each, each], -1)[None] for each in rotary.cos_sin(slice(0, T), q))
    for got, wanted in zip(
        (rotary.rotate(x, slice(0, T)) for x in (q, k)), llama.apply_rotary_pos_emb(q, k, cos, sin), strict=True
    ):
        torch.testing.assert_close(got, wanted)


def test_what_is_given_away_may_be_written_to() -> None:
    rotary, x = Rotary(D), torch.randn(1, 1, 5, D)
    wanted = rotary.rotate(x, slice(0, 5))
    for each in rotary.cos_sin(slice(0, 5), x):
        each.zero_()
    assert torch.equal(rotary.rotate(x, slice(0, 5)), wanted)


def test_ntk_by_its_definition() -> None:
    """The fastest pair is as it was; the slowest turns ``factor`` times as slowly."""
    plain, fixed = Rotary(D).frequencies(), Rotary(D, scaling=NTK(5)).frequencies()
    torch.testing.assert_close(fixed[0], plain[0])
    torch.testing.assert_close(fixed[-1] * 5, plain[-1])
    dynamic = Rotary(D, scaling=NTK(5, 100))
    assert dynamic.dynamic
    torch.testing.assert_close(dynamic.frequencies(100), plain)
    at = torch.tensor([150, 199])
    x = torch.randn(1, 1, 2, D)
    torch.testing.assert_close(dynamic.rotate(x, at), dynamic.rotate(x, at, length=200))
    assert not torch.allclose(dynamic.rotate(x, at), Rotary(D).rotate(x, at))


# ---------------------------------------------------------------- biases by distance


@pytest.mark.parametrize("heads", [1, 2, 3, 8, 11, 12])
def test_alibi_is_that_of_the_paper(heads: int) -> None:
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    bias = matrix(ALiBi(heads), torch.arange(2, 7), torch.arange(7))
    wanted = bloom.build_alibi_tensor(torch.ones(1, 7, dtype=torch.long), heads, torch.float32)  # [H, 1, K]
    row = bias[:, -1:] + torch.tensor(ALiBi(heads).slopes)[:, None, None] * 6
    torch.testing.assert_close(row, wanted)  # theirs leaves out a constant of each row
    assert bias.shape == (heads, 5, 7)
    assert bias[0, 1, 6] == bias[0, 4, 3], "as far ahead as back"
    torch.testing.assert_close(bias[-1, 0, 0].item(), -2 * ALiBi(heads).slopes[-1])
    assert ALiBi(2).slopes == (2**-4, 2**-8)
    assert ALiBi(2, (0.5, 0)).slopes == (0.5, 0)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize(("count", "most"), [(32, 128), (12, 20), (4, 9)])
def test_buckets_are_those_of_t5(both: bool, count: int, most: int) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(-1000, 1001)
    wanted = t5.T5Attention._relative_position_bucket(distances, both, count, most)
    torch.testing.assert_close(T5Buckets(count, most, both).of(distances), wanted, rtol=0, atol=0)


def test_a_learned_bias_is_a_look_into_its_table() -> None:
    bias = RelativeBias(H, T5Buckets(8, 16))
    assert not bias.weight.any()
    torch.nn.init.normal_(bias.weight)
    got = bias(torch.arange(3), torch.tensor([[5, 0, 1, 40], [1, 2, 3, 4]]))  # [B, H, Q, K]
    assert got.shape == (2, H, 3, 4)
    for i in range(3):
        assert torch.equal(got[0, :, i, 3], bias.weight[bias.buckets.of(torch.tensor(40 - i))])
    got[1, 2].sum().backward()
    assert bias.weight.grad is not None
    assert not bias.weight.grad[:, :2].any()
    assert math.isclose(bias.weight.grad[:, 2].sum(), 12, rel_tol=1e-6)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: Rotary(7), ValueError, "dim: got 7, expected an even number"),
        (lambda: Rotary(0), ValueError, "dim: got 0, expected a whole number from 1"),
        (lambda: Rotary(8.0), TypeError, "dim: got float, expected a whole number"),  # pyright: ignore[reportArgumentType]
        (lambda: Rotary(8, base=1), ValueError, "base: got 1, expected a finite number above 1"),
        (lambda: Rotary(8, pairing="both"), ValueError, "pairing: got 'both', expected"),  # pyright: ignore[reportArgumentType]
        (lambda: Rotary(8, scaling=2.0), TypeError, "scaling: got float, expected LinearScaling"),  # pyright: ignore[reportArgumentType]
        (lambda: Rotary(2, scaling=NTK(2)), ValueError, "dim: got 2, expected at least 4 for NTK"),
        (lambda: LinearScaling(0.5), ValueError, "factor: got 0.5, expected a finite number from 1"),
        (lambda: LinearScaling("2"), TypeError, "factor: got str, expected a number"),  # pyright: ignore[reportArgumentType]
        (lambda: NTK(math.inf), ValueError, "factor: got inf, expected a finite number"),
        (lambda: NTK(2, 0), ValueError, "original_length: got 0, expected a whole number from 1"),
        (lambda: YaRN(2, 64, beta_fast=1), ValueError, "beta_fast: got 1, expected more than beta_slow, 1.0"),
        (lambda: YaRN(2, 64, attention_factor=0), ValueError, "attention_factor: got 0, expected .* above 0"),
        (lambda: YaRN(2, 64, mscale=1), ValueError, "mscale, mscale_all_dim: got 1, None, expected both or none"),
        (lambda: Llama3(high_freq_factor=1), ValueError, "high_freq_factor: got 1, expected more than low_freq_factor"),
        (lambda: ALiBi(3, (1.0, 2.0)), ValueError, "slopes: got 2, expected one for each of 3 heads"),
        (lambda: ALiBi(1, (-1.0,)), ValueError, "slopes: got -1.0, expected a finite number from 0"),
        (lambda: T5Buckets(7), ValueError, "num_buckets: got 7, expected an even number from 4"),
        (lambda: T5Buckets(1, bidirectional=False), ValueError, "num_buckets: got 1, expected at least 2"),
        (lambda: T5Buckets(32, 8), ValueError, "max_distance: got 8, expected more than 8"),
        (lambda: RelativeBias(2, 32), TypeError, "buckets: got int, expected T5Buckets"),  # pyright: ignore[reportArgumentType]
        (
            lambda: Rotary(12).rotate(torch.zeros(1, 1, 2, 8), slice(0, 2)),
            ValueError,
            r"x: axis 3 \(D\) is 8, expected",
        ),
        (lambda: Rotary(8).rotate(torch.zeros(1, 1, 2, 8), torch.zeros(3).long()), ValueError, r"expected \[2\] or"),
        (lambda: Rotary(8).rotate(torch.zeros(1, 1, 2, 8), torch.zeros(2)), TypeError, "positions: got float32"),
        (
            lambda: Rotary(8).rotate(torch.zeros(1, 1, 2, 8), slice(0, 1)),
            ValueError,
            r"slice\(0, 1, None\), expected 2",
        ),
        (
            lambda: Rotary(8).rotate(torch.zeros(1, 1, 2, 8), slice(0, 3)),
            ValueError,
            r"slice\(0, 3, None\), expected 2",
        ),
        (lambda: Rotary(8).rotate(torch.zeros(1, 1, 2, 8), slice(0, None)), ValueError, "positions: got slice"),
        (lambda: Rotary(8).rotate(torch.zeros(1, 1, 2, 8), slice(0, 4, 2)), ValueError, "positions: got slice"),
        (lambda: Rotary(8).rotate(torch.zeros(1, 1, 2, 8), slice(-2, 0)), ValueError, "positions: got slice"),
        (lambda: ALiBi(2, "ab"), TypeError, "slopes: got 'ab', expected numbers"),  # pyright: ignore[reportArgumentType]
        (lambda: ALiBi(2, 3), TypeError, "slopes: got 3, expected numbers"),  # pyright: ignore[reportArgumentType]
        (lambda: restarting([0, 3]), TypeError, "cu_seqlens: got list, expected integers"),  # pyright: ignore[reportArgumentType]
        (lambda: restarting(torch.zeros(2)), TypeError, "cu_seqlens: got float32, expected integers"),
        (lambda: restarting(torch.tensor(3)), ValueError, r"cu_seqlens: cu_seqlens \[\], expected \[n \+ 1\]"),
        (
            lambda: restarting(torch.tensor([0, 3, 2])),
            ValueError,
            r"cu_seqlens: got \[0, 3, 2\], expected numbers that start at 0 and never decrease",
        ),
        (
            lambda: restarting(torch.tensor([2, 5])),
            ValueError,
            r"cu_seqlens: got \[2, 5\], expected numbers that start at 0 and never decrease",
        ),
        (lambda: matrix(ALiBi(2), torch.arange(2), torch.rand(2)), TypeError, "k_pos: got float32, expected integers"),
        (
            lambda: matrix(ALiBi(2), torch.zeros(1, 1, 2).long(), torch.arange(2)),
            ValueError,
            r"q_pos \[1, 1, 2\], k_pos",
        ),
        (
            lambda: matrix(ALiBi(2), torch.zeros(2, 3).long(), torch.zeros(3, 3).long()),
            ValueError,
            "k_pos: q_pos .2, 3",
        ),
    ],
)
def test_what_does_not_fit_is_named(make: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_positions_of_any_integer_dtype(dtype: torch.dtype) -> None:
    at = torch.tensor([5, 3, 0, 1, 100, 2, 4])
    x = torch.randn(B, H, T, D)
    for rotary in (Rotary(D), Rotary(D, scaling=NTK(2, 4))):
        torch.testing.assert_close(rotary.rotate(x, at.to(dtype)), rotary.rotate(x, at), rtol=0, atol=0)
    table = RelativeBias(H)
    torch.nn.init.normal_(table.weight)
    for bias in (ALiBi(H), table):
        torch.testing.assert_close(matrix(bias, at.to(dtype), at.to(dtype)), matrix(bias, at, at), rtol=0, atol=0)
    assert restarting(torch.tensor([0, 2, 3]).to(dtype)).tolist() == [0, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scaling", [None, YaRN(4, 64)])
def test_far_positions_make_no_table(scaling: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rotary, "_tables", BoundedTable(16))
    rotary, x = Rotary(D, scaling=scaling), torch.randn(B, H, T, D, dtype=dtype)
    at = torch.randint(70_000, (B, T))
    at[0, 0] = 70_000
    far = rotary.rotate(x, at)
    assert not _rotary._tables
    rotary.rotate(torch.zeros(1, 1, 70_001, D, dtype=dtype), slice(0, 70_001))  # makes one
    torch.testing.assert_close(rotary.rotate(x, at), far, rtol=0, atol=0)
    assert rotary.rotate(x, at * 10_000_000).isfinite().all()
    assert max(len(cos) for cos, _ in _rotary._tables.values()) < 200_000


def test_no_positions_at_all() -> None:
    for scaling in (None, NTK(2, 4)):
        out = Rotary(D, scaling=scaling).rotate(torch.zeros(B, H, 0, D), torch.zeros(0, dtype=torch.int64))
        assert out.shape == (B, H, 0, D)

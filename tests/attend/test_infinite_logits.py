"""One rule for NaN and infinity in q and k, whatever else is in the batch: a visible logit is what arithmetic makes it.

NaN and +inf make the row NaN, -inf leaves the key without weight, a softcap bounds either infinity; and a row whose
visible logits are all -inf is NaN, since 0 / 0 is.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headscope
from headscope import masks
from headscope.masks import Band, Dense, KeyLengths, Prefix, causal
from support import oracle
from support.attention_cases import INF, NATIVE

NAN = torch.nan
B, H, HKV, Q, K, D = 3, 4, 2, 21, 37, 5
SIZES = (B, H, Q, K)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ANY = [*NATIVE, "blocked", "reference"]

_table = torch.rand(SIZES, generator=torch.Generator().manual_seed(1)) < 0.6
_hiding_bias = torch.zeros(B, H, Q, K).masked_fill(~_table, -INF)
OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"mask": causal()},
    "prefix": {"mask": Prefix(9)},
    "lengths": {"mask": KeyLengths(torch.tensor([K, 11, 20]))},
    "empty rows": {"mask": Band(4, 0, offset=-3)},
    "dense": {"mask": Dense(_table)},
    "bias": {"bias": torch.linspace(-1, 1, K).expand(Q, K)},
    "bias that hides": {"bias": _hiding_bias},
    "sinks": {"sinks": torch.linspace(-2, 1, H)},
    "softcap": {"softcap": 3.0},
    "softcap, causal": {"softcap": 3.0, "mask": causal()},
    "softcap, dense": {"softcap": 3.0, "mask": Dense(_table)},
    "softcap, bias": {"softcap": 3.0, "bias": _hiding_bias},
    "softcap, sinks": {"softcap": 3.0, "sinks": torch.linspace(-2, 1, H)},
}
FUSED = ("nothing", "prefix", "lengths", "dense", "bias")  # scaled_dot_product_attention takes these
RUNS = [(name, by) for name in OPTIONS for by in (ANY if name not in FUSED else ["sdpa", *ANY])]


def made(dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """q, k, v with infinities in q and k of batch entry 0, NaN in those of entry 1; entry 2 is finite."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"q": (B, H, Q, D), "k": (B, HKV, K, D), "v": (B, HKV, K, D)}
    given = {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}
    for name, length in (("q", Q), ("k", K)):
        heads = given[name].shape[1]
        for value in (INF, -INF):
            h, at, d = (int(torch.randint(n, (), generator=random)) for n in (heads, length, D))
            given[name][0, h, at, d] = value
        given[name][1, 0, seed % length, seed % D] = NAN
    given["k"][0, -1, 4] = INF * given["k"][0, -1, 4].sign()
    return given


def entry(given: dict[str, Any], b: int) -> dict[str, Any]:
    """One batch entry of a call."""
    alone: dict[str, Any] = {}
    for name, x in given.items():
        if isinstance(x, Tensor):
            alone[name] = x[b : b + 1] if x.ndim == 4 else x
        elif isinstance(x, Dense):
            alone[name] = Dense(x.tensor[b : b + 1])
        elif isinstance(x, KeyLengths):
            alone[name] = KeyLengths(x.lengths[b : b + 1])
        else:
            alone[name] = x
    return alone


def results(given: dict[str, Any], backend: str, leaves: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """out of ``attention``, out and lse of ``attend``, and gradients of q, k, v if asked for."""
    given = {**given, **{name: given[name].clone().requires_grad_() for name in leaves}}
    outs = {"attention": headscope.attention(**given, backend=backend)}
    if backend != "sdpa":
        outs["out"], outs["lse"], _ = headscope.attend(**given, backend=backend)
    found = {name: x.detach() for name, x in outs.items()}
    for name, x in outs.items():
        if not leaves:
            break
        along = torch.linspace(-1, 1, x.shape[-1]).expand_as(x).to(x.dtype)
        gradients = torch.autograd.grad(
            x, [given[leaf] for leaf in leaves], along, retain_graph=True, allow_unused=True
        )
        for leaf, gradient in zip(leaves, gradients, strict=True):
            found[f"gradient of {leaf} by {name}"] = torch.zeros_like(given[leaf]) if gradient is None else gradient
    return found


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], backend: str, message: str) -> None:
    """The same results to the bit by the native kernels; other products and sums may depend on the batch's size."""
    for name, x in found.items():
        to_the_bit = backend == "cpu" and not name.startswith("gradient")
        size = 0 if to_the_bit else 0.02 if x.dtype.itemsize == 2 else None
        torch.testing.assert_close(
            x, wanted[name], rtol=size, atol=size, equal_nan=True, msg=lambda text, of=name: f"{message}, {of}: {text}"
        )


@pytest.mark.parametrize(
    "seeds",  # the places of what is not finite
    [pytest.param(range(2), id="two places"), pytest.param(range(2, 5), id="others", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("option", "backend"), RUNS)
def test_a_batch_entry_is_the_same_alone_as_beside_nan(
    option: str, backend: str, dtype: torch.dtype, seeds: range
) -> None:
    for seed in seeds:
        given = {**made(dtype, seed), **OPTIONS[option]}
        if "bias" in given:
            given["bias"] = given["bias"].to(dtype)
        whole = results(given, backend, ("q", "k", "v"))
        for b in (0, 2):
            alone = results(entry(given, b), backend, ("q", "k", "v"))
            assert_same({name: x[b : b + 1] for name, x in whole.items()}, alone, backend, f"entry {b}")


@pytest.mark.parametrize(("option", "backend"), RUNS)
def test_infinite_logits_are_what_arithmetic_makes_them(option: str, backend: str) -> None:
    options = OPTIONS[option]
    for seed in range(4):
        given = made(torch.float64 if backend != "sdpa" else torch.float32, seed)
        said = {name: x for name, x in options.items() if name != "mask"}
        seen = None if "mask" not in options else masks.Mask.dense(options["mask"], *SIZES)
        exact = oracle.attention(**given, **said, seen=seen)
        if "bias" in options:
            said["bias"] = said["bias"].to(given["q"].dtype)
        found = results({**given, **said, "mask": options.get("mask")}, backend)
        for name, x in found.items():
            wanted = exact.lse if name == "lse" else exact.out
            torch.testing.assert_close(
                x, wanted.to(x.dtype), equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("backend", ANY)
def test_a_row_of_no_logit_but_minus_infinity_is_nan(backend: str, option: str) -> None:
    """A row without a visible key is 0 nevertheless; a sink, and a softcap, leave something to divide by."""
    options = OPTIONS[option]
    given = made(torch.float32, 0)
    given = {"q": torch.ones_like(given["q"]), "k": torch.full_like(given["k"], -INF), "v": given["v"]}
    said = {name: x for name, x in options.items() if name != "mask"}
    seen = None if "mask" not in options else options["mask"].dense(*SIZES)
    for heads, rows in ((H, Q), (H, 1), (HKV, 1)):  # with the kernels for few rows
        small = {**given, "q": given["q"][:, :heads, -rows:]}
        cut = {**options}
        if rows != Q and any(name in cut for name in ("mask", "bias")):
            continue
        if "sinks" in cut:
            cut["sinks"] = cut["sinks"][:heads]
            said["sinks"] = cut["sinks"]
        exact = oracle.attention(**small, **said, seen=seen)
        assert "softcap" in options or "sinks" in options or exact.out.isnan().any()
        for name, x in results({**small, **cut}, backend).items():
            wanted = exact.lse if name == "lse" else exact.out
            torch.testing.assert_close(
                x, wanted.to(x.dtype), equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("backend", ANY)
def test_finite_inputs_whose_products_overflow_are_nan_too(backend: str) -> None:
    q, k = torch.full((1, 1, 3, 4), 1e20), torch.full((1, 1, 7, 4), -1e20)
    for options in ({}, {"bias": torch.zeros(3, 7)}, {"mask": causal()}):
        out, lse, _ = headscope.attend(q, k, torch.ones(1, 1, 7, 4), backend=backend, **options)
        assert out.isnan().all(), options
        assert lse.isnan().all(), options
    capped = headscope.attention(q, k, torch.ones(1, 1, 7, 4), softcap=2.0, backend=backend)
    torch.testing.assert_close(capped, torch.ones(1, 1, 3, 4))


@pytest.mark.parametrize("backend", NATIVE)
def test_a_row_split_among_threads_is_nan_too(backend: str) -> None:
    q, k = torch.ones(1, 1, 1, 64), torch.full((1, 1, 20_000, 64), -INF)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            out, lse, _ = headscope.attend(q, k, torch.ones(1, 1, 20_000, 64), backend=backend)
            assert out.isnan().all()
            assert lse.isnan().all()
            masked = headscope.attention(q, k, torch.ones(1, 1, 20_000, 64), mask=Prefix(0), backend=backend)
            assert not masked.any()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "empty rows"])
def test_observing_counts_the_rows_that_attending_makes_finite(option: str, dtype: torch.dtype) -> None:
    given = {**made(dtype, 0), **OPTIONS[option]}
    given["k"][0, 0] = given["k"][0, 0].masked_fill(given["k"][0, 0].isinf(), 1)
    for batch in (1, 3):  # without the NaN of entry 1, and with it
        cut = {name: x[:batch] if isinstance(x, Tensor) and x.ndim == 4 else x for name, x in given.items()}
        if isinstance(cut.get("mask"), KeyLengths | Dense):
            cut["mask"] = type(cut["mask"])(cut["mask"].tensors()[0][:batch])
        lse = headscope.attend(**cut).lse
        finite = lse.isfinite().sum((0, 2))
        for row_lse in (None, lse):
            stats = headscope.observe(**cut, lse=row_lse, kind="cross")
            torch.testing.assert_close(stats.rows, finite)
            torch.testing.assert_close(stats.broken, batch * Q - finite)

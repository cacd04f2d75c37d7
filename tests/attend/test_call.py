"""Everything that can be wrong with one attention, and the message it gets."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headscope
from headscope._attend.call import Options, check_call, fold
from headscope.masks import Band, Dense, Documents, KeyLengths, Mask, Prefix, causal, window

B, H, HKV, Q, K, D, DV = 2, 6, 3, 5, 7, 11, 13
SHAPES = "q [2, 6, 5, 11], k [2, 3, 7, 11], v [2, 3, 7, 13]"


def made(**other: Any) -> dict[str, Any]:
    """Arguments that fit, except for those given."""
    tensors = {"q": torch.randn(B, H, Q, D), "k": torch.randn(B, HKV, K, D), "v": torch.randn(B, HKV, K, DV)}
    return {**tensors, **other}


def ids(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long)


def yes(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


@dataclass
class Every(Mask):
    n: int

    def allows(self, b: object, h: object, i: object, j: Tensor) -> Tensor:
        return j % self.n == 0


WRONG_KINDS = {
    "q: got list, expected a torch.Tensor": {"q": [1.0]},
    "k: got NoneType, expected a torch.Tensor": {"k": None},
    "q: dtype is int64, expected float32, bfloat16, float16 or float64": {"q": ids(B, H, Q, D)},
    "v: dtype is complex64, expected float32": {"v": torch.zeros(B, HKV, K, DV, dtype=torch.complex64)},
    "k: dtype is float64, q has float32; convert one of them": {"k": torch.zeros(B, HKV, K, D, dtype=torch.float64)},
    "k: layout is torch.sparse_coo, expected an ordinary tensor": {"k": torch.zeros(B, HKV, K, D).to_sparse()},
    "v: layout is torch._mkldnn, expected an ordinary tensor": {"v": torch.zeros(B, HKV, K, DV).to_mkldnn()},
    "bias: layout is torch.sparse_coo, expected an ordinary tensor": {"bias": torch.zeros(Q, K).to_sparse()},
    "mask: a tensor of Dense: layout is torch.sparse_coo": {"mask": Dense(yes(Q, K).to_sparse())},
    "bias: got float, expected a torch.Tensor": {"bias": 1.0},
    "bias: dtype is bool, expected a floating one; a boolean tensor is a mask: pass it as mask=": {"bias": yes(Q, K)},
    "bias: dtype is int64, expected a floating one": {"bias": ids(Q, K)},
    "sinks: got bool, expected a torch.Tensor": {"sinks": True},
    "sinks: dtype is int64, expected a floating one": {"sinks": ids(H)},
    "mask: got str, expected a mask of headscope.masks, a boolean tensor or None": {"mask": "causal"},
    "mask: got function, expected a mask of headscope.masks": {"mask": causal},  # without its parentheses
    "mask: dtype is float32, expected bool (True = attend); for numbers to add to the logits, pass bias=": {
        "mask": torch.zeros(Q, K)
    },
    "mask: dtype is uint8, expected bool (True = attend); convert it with .bool()": {
        "mask": torch.ones(Q, K, dtype=torch.uint8)
    },
    "mask: Dense holds float32, expected bool (True = attend); for numbers to add to the logits, pass bias=": {
        "mask": Dense(torch.zeros(Q, K)) & causal()
    },
    "mask: Band(left=...): expected a whole number or None, got float": {"mask": Band(1.5, 0)},
    "mask: Band(right=...): expected a whole number or None, got str": {"mask": Prefix(1) | Band(None, "0")},  # pyright: ignore[reportArgumentType]
    "mask: Band(left=...): expected a whole number or None, got bool": {"mask": Band(True, 0)},
    "mask: Band(right=...): expected a whole number or None, got float": {"mask": Band(None, 1.0)},
    "mask: Band(offset=...): expected a whole number, or one for each batch entry, got True": {
        "mask": Band(None, 0, offset=True)
    },
    "mask: Band(offset=...): expected a whole number, or one for each batch entry, got (1, 1.0)": {
        "mask": Band(None, 0, offset=[1, 1.0])
    },
    "mask: Every cannot be hashed; masks without tensors compare and hash by value if the class is a @dataclass": {
        "mask": Every(2)
    },
    "mask: Band(offset=...): expected a whole number, or one for each batch entry, got 1.5": {
        "mask": Band(None, 0, offset=1.5)  # pyright: ignore[reportArgumentType]
    },
    "mask: Band(offset=...): expected a whole number, or one for each batch entry, got (1, 0.5)": {
        "mask": Band(None, 0, offset=[1, 0.5])  # pyright: ignore[reportArgumentType]
    },
    "mask: Band.offset is float32, expected integers": {"mask": Band(None, 0, offset=torch.zeros(B))},
    "mask: KeyLengths.lengths is float32, expected integers": {"mask": KeyLengths(torch.zeros(B))},
    "mask: KeyLengths.lengths is bool, expected integers": {"mask": KeyLengths(yes(B))},
    "mask: Documents.q_ids is float32, expected integers": {"mask": Documents(torch.zeros(B, Q), ids(B, K))},
    "scale: got str, expected a number": {"scale": "1"},
    "scale: got bool, expected a number": {"scale": True},
    "scale: got float32, expected a number": {"scale": torch.tensor(1.0)},
    "softcap: got bool, expected a number": {"softcap": True},
    "softcap: got list, expected a number": {"softcap": [1]},
    "dropout: got bool, expected a number": {"dropout": False},
    "dropout: got NoneType, expected a number": {"dropout": None},
}

WRONG_SIZES = {
    "k: axis 3 (D) is 3, q has 11; q [2, 6, 5, 11], k [2, 3, 7, 3], v [2, 3, 7, 13]": {"k": torch.zeros(B, HKV, K, 3)},
    "q: has 2 axes, expected at least 3 ([..., H, length, D]); q [5, 11], k [2, 3, 7, 11], v [2, 3, 7, 13]": {
        "q": torch.zeros(Q, D)
    },
    "q: axis 3 (D) is 0, expected at least 1; q [2, 6, 5, 0]": {"q": torch.zeros(B, H, Q, 0)},
    "v: axis 3 (Dv) is 0, expected at least 1": {"v": torch.zeros(B, HKV, K, 0)},
    "v: axis 2 (K) is 6, k has 7; q [2, 6, 5, 11], k [2, 3, 7, 11], v [2, 3, 6, 13]": {"v": torch.zeros(B, HKV, 6, DV)},
    "v: axis 1 (Hkv) is 2, k has 3": {"v": torch.zeros(B, 2, K, DV)},
    "k: axis 1 (Hkv) is 4, expected a divisor of q's 6 heads": {
        "k": torch.zeros(B, 4, K, D),
        "v": torch.zeros(B, 4, K, DV),
    },
    "k: axis 1 (Hkv) is 0, expected a divisor of q's 6 heads": {
        "k": torch.zeros(B, 0, K, D),
        "v": torch.zeros(B, 0, K, DV),
    },
    "q, k, v: the leading axes (B) do not broadcast; q [2, 6, 5, 11], k [3, 3, 7, 11], v [2, 3, 7, 13]": {
        "k": torch.zeros(3, HKV, K, D)
    },
    "bias: has 5 axes, expected at most 4 ([B, H, Q, K]); bias [1, 2, 6, 5, 7]": {"bias": torch.zeros(1, B, H, Q, K)},
    "bias: axis 0 (H) is 3, expected 6 or 1; bias [3, 5, 7], the weights are [2, 6, 5, 7]": {
        "bias": torch.zeros(HKV, Q, K)
    },
    "bias: axis 3 (K) is 5, expected 7 or 1": {"bias": torch.zeros(1, 1, K, Q)},
    "sinks: expected one logit for each head, [H] = [6]; sinks [3], q [2, 6, 5, 11]": {"sinks": torch.zeros(HKV)},
    "mask: axis 1 (K) is 5, expected 7 or 1; mask [7, 5], the weights are [2, 6, 5, 7]": {"mask": yes(K, Q)},
    "mask: has 5 axes, expected at most 4 ([B, H, Q, K]); mask [1, 2, 6, 5, 7]": {"mask": yes(1, B, H, Q, K)},
    "mask: axis 0 (B) is 3, expected 2 or 1": {"mask": causal() & Dense(yes(3, 1, 1, K))},
    "mask: Prefix(n): expected a whole number from 0, got -1": {"mask": Prefix(-1)},
    "mask: Prefix(n): expected a whole number from 0, got True": {"mask": Prefix(True)},
    "mask: Prefix(n): expected a whole number from 0, got 1.0": {"mask": Prefix(1.0)},  # pyright: ignore[reportArgumentType]
    "mask: Prefix(n): expected a whole number from 0, got 1.5": {"mask": Prefix(1.5)},  # pyright: ignore[reportArgumentType]
    "mask: KeyLengths.lengths axis 0 (B) is 3, expected 2; it is [3]": {"mask": KeyLengths(ids(3))},
    "mask: KeyLengths.lengths is [2, 7], expected [B] = [2]": {"mask": KeyLengths(ids(B, K))},
    "mask: Documents.q_ids axis 1 (Q) is 7, expected 5; it is [2, 7]": {"mask": Documents(ids(B, K))},
    "mask: Documents.k_ids axis 1 (K) is 5, expected 7; it is [2, 5]": {"mask": Documents(ids(B, Q))},
    "mask: Documents.k_ids axis 0 (B) is 3, expected 2": {"mask": Documents(ids(B, Q), ids(3, K))},
    "mask: Documents.q_ids is [5], expected [B, Q] = [2, 5]": {"mask": Documents(ids(Q), ids(1, K))},
    "mask: Band.offset has 3 numbers, expected 2, one for each batch entry (B)": {
        "mask": Band(None, 0, offset=(1, 2, 3))
    },
    "mask: Band.offset axis 0 (B) is 3, expected 2; it is [3]": {"mask": Band(None, 0, offset=ids(3))},
    "mask: Band.offset is [2, 1], expected [B] = [2]": {"mask": Band(None, 0, offset=ids(B, 1))},
    "scale: got nan, expected a finite number": {"scale": float("nan")},
    "scale: got inf, expected a finite number": {"scale": float("inf")},
    "scale: got 100": {"scale": 10**400},
    "softcap: got 100": {"softcap": 10**400},
    "mask: Prefix(n): expected a whole number up to": {"mask": Prefix(10**30)},
    "mask: Band(offset=...): expected numbers from": {"mask": Band(None, 0, offset=2**63)},
    "softcap: got 0, expected a finite number above 0, or None": {"softcap": 0},
    "softcap: got -2.0, expected a finite number above 0, or None": {"softcap": -2.0},
    "softcap: got inf, expected a finite number above 0, or None": {"softcap": float("inf")},
    "dropout: got 1.0, expected a probability in [0, 1)": {"dropout": 1.0},
    "dropout: got -0.5, expected a probability in [0, 1)": {"dropout": -0.5},
    "dropout: got nan, expected a probability in [0, 1)": {"dropout": float("nan")},
    "backend: got 'flash', expected one of cpu, sdpa, fused, flex, blocked, reference, reproducible, or None": {
        "backend": "flash"
    },
}

ELSEWHERE = {
    "k: is on meta, q is on cpu": {"k": torch.zeros(B, HKV, K, D, device="meta")},
    "bias: is on meta, q is on cpu": {"bias": torch.zeros(Q, K, device="meta")},
    "sinks: is on meta, q is on cpu": {"sinks": torch.zeros(H, device="meta")},
    "mask: a tensor of KeyLengths is on meta, q is on cpu": {"mask": causal() & KeyLengths(ids(B).to("meta"))},
    "mask: a tensor of Dense is on meta, q is on cpu": {"mask": yes(Q, K).to("meta")},
}


@pytest.mark.parametrize("message", WRONG_KINDS)
def test_a_wrong_kind_is_a_type_error(message: str) -> None:
    for run in (headscope.attention, headscope.attend):
        with pytest.raises(TypeError, match="^" + re.escape(message)):
            run(**made(**WRONG_KINDS[message]))


@pytest.mark.parametrize("message", [*WRONG_SIZES, *ELSEWHERE])
def test_a_wrong_size_is_a_value_error(message: str) -> None:
    for run in (headscope.attention, headscope.attend):
        with pytest.raises(ValueError, match="^" + re.escape(message)):
            run(**made(**{**WRONG_SIZES, **ELSEWHERE}[message]))


@pytest.mark.parametrize("message", WRONG_KINDS | WRONG_SIZES)
def test_a_mistake_does_not_hide_behind_a_call_that_was_kept(message: str) -> None:
    """True equals 1 and 1.0 equals 1: a kept call must not answer for one that is wrong."""
    one = [{"mask": mask} for mask in (Prefix(1), Band(1, 0), Band(None, 1), Band(None, 0, 1), Band(None, 0, (1, 1)))]
    for fits in ({}, {"scale": 1.0}, {"softcap": 1.0}, {"dropout": 0.0}, *one):
        headscope.attention(**made(**fits))
    with pytest.raises((TypeError, ValueError), match="^" + re.escape(message)):
        headscope.attention(**made(**(WRONG_KINDS | WRONG_SIZES)[message]))


@pytest.mark.parametrize("scale", [np.float32(0.5), np.float16(0.5), np.float64(0.5), Fraction(1, 2)], ids=repr)
def test_numbers_of_other_kinds_are_numbers(scale: Any) -> None:
    given = made()
    wanted = headscope.attention(**given, scale=0.5, softcap=0.5)
    torch.testing.assert_close(headscope.attention(**given, scale=scale, softcap=scale), wanted, rtol=0, atol=0)
    assert headscope.attention(**given, scale=np.int64(1)).shape == wanted.shape


# Of logits of float32, and of float64.
OUT_OF_RANGE: dict[str, tuple[dict[str, float], dict[str, float]]] = {
    "scale": ({"scale": 1e39}, {"scale": 1e305}),
    "small scale": ({"scale": -1e-31}, {"scale": -1e-303}),
    "softcap": ({"softcap": 1e39}, {"softcap": 1e305}),
    "small softcap": ({"softcap": 1e-31, "scale": 1e-30}, {"softcap": 1e-303, "scale": 1e-300}),
    "quotient": ({"scale": 1e20, "softcap": 1e-20}, {"scale": 1e160, "softcap": 1e-160}),
    "quotient that underflows": ({"scale": 1e-30, "softcap": 1e16}, {"scale": 1e-290, "softcap": 1e40}),
    "softcap beside scale 0": ({"scale": 0.0, "softcap": 1e39}, {"scale": 0.0, "softcap": 1e305}),
}


@pytest.mark.parametrize("case", OUT_OF_RANGE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_factors_that_the_dtype_of_the_logits_cannot_hold_are_refused(case: str, dtype: torch.dtype) -> None:
    given = {key: x.to(dtype) for key, x in made().items()}
    options, least, most = OUT_OF_RANGE[case][0], "7.89e-31", "1.27e+30"
    if dtype == torch.float64:
        options, least, most = OUT_OF_RANGE[case][1], "9.33e-302", "1.07e+301"
    names = "scale, softcap and scale / softcap" if "softcap" in options else "scale"
    message = (
        f"scale: out of range for logits of {'float64' if dtype == torch.float64 else 'float32'}; expected {names} of "
        f"size {least} to {most}, or scale 0, got "
    )
    for run in (headscope.attention, headscope.attend):
        with pytest.raises(ValueError, match="^" + re.escape(message)) as raised:
            run(**given, **options)
        for name, x in options.items():
            assert f"{name} {x:g}" in str(raised.value)


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_the_range_of_factors_is_that_of_the_dtype_of_the_logits(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: got inf, expected a finite number"):
        headscope.attention(**made(), **{name: np.float32("inf")})
    out = headscope.attention(**{key: x.double() for key, x in made().items()}, **{name: 1e39})
    assert out.isfinite().all()


def test_leading_axes_in_messages() -> None:
    q, k, v = torch.zeros(2, 3, H, Q, D), torch.zeros(3, HKV, K, D), torch.zeros(1, 1, HKV, K, DV)
    wanted = "mask: axis 0 (B) is 3, expected 2 or 1; mask [3, 1, 1, 1, 7], the weights are [2, 3, 6, 5, 7]"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        headscope.attention(q, k, v, mask=yes(3, 1, 1, 1, K))
    with pytest.raises(ValueError, match=re.escape("bias: axis 1 (B) is 2, expected 3 or 1; bias [1, 2, 1, 1, 1]")):
        headscope.attention(q, k, v, bias=torch.zeros(1, 2, 1, 1, 1))
    with pytest.raises(ValueError, match=re.escape("k: axis 3 (D) is 3, q has 11; q [6, 5, 11], k [1, 3, 7, 3]")):
        headscope.attention(torch.zeros(H, Q, D), torch.zeros(1, HKV, K, 3), torch.zeros(HKV, K, DV))


def test_mistakes_are_found_where_torch_compiles_and_on_meta() -> None:
    on_meta = {name: x.to("meta") for name, x in made().items()}
    with pytest.raises(
        ValueError, match=re.escape("sinks: expected one logit for each head, [H] = [6]; sinks [2], q [2, 6, 5, 11]")
    ):
        headscope.attention(**on_meta, sinks=torch.zeros(2, device="meta"))


# ---------------------------------------------------------------- what a call says


def call(mask: Mask | None = None, **other: Any) -> Any:
    arguments = {"bias": None, "sinks": None, **made(**other)}
    return check_call(**arguments, options=Options(mask, None, None, 0.0, False))


def test_sizes() -> None:
    found = call()
    assert (found.lead, found.batch, found.heads, found.kv_heads, found.group) == ((B,), B, H, HKV, H // HKV)
    assert (found.queries, found.keys, found.head_dim, found.v_head_dim) == (Q, K, D, DV)
    assert found.scale == D**-0.5
    three = call(q=torch.zeros(H, Q, D), k=torch.zeros(1, K, D), v=torch.zeros(HKV, K, DV))
    assert (three.lead, three.batch, three.kv_heads) == ((), 1, HKV)
    five = call(q=torch.zeros(2, 1, H, Q, D), k=torch.zeros(3, HKV, K, D), v=torch.zeros(1, HKV, K, DV))
    assert (five.lead, five.batch) == ((2, 3), 6)


def test_rows_that_may_be_empty() -> None:
    assert not call().may_be_empty
    assert not call(causal()).may_be_empty
    assert call(causal(), q=torch.zeros(B, H, K + 1, D)).may_be_empty
    assert call(k=torch.zeros(B, HKV, 0, D), v=torch.zeros(B, HKV, 0, DV)).may_be_empty
    assert call(bias=torch.zeros(Q, K)).may_be_empty, "it may hold -inf"
    assert call(Dense(yes(Q, K))).may_be_empty, "its values are not read"


def test_is_hashable_and_holds_no_tensors() -> None:
    one, other = call(causal() & Prefix(3)), call(causal() & Prefix(3))
    assert one == other
    assert hash(one) == hash(other)
    assert not any(isinstance(getattr(one, name), Tensor) for name in type(one).__slots__)


@pytest.mark.parametrize(
    ("mask", "spans", "rest"),
    [
        (None, "all", "none"),
        (Prefix(K), "all", "none"),
        (Dense(yes(Q, K)), "all", "dense"),
        (Prefix(2), "keys", "none"),
        (KeyLengths(torch.tensor([3, 5])), "keys", "none"),
        (causal(), "rows", "none"),
        (window(2) | Prefix(1), "rows", "none"),
        (causal() & Dense(yes(Q, K)), "rows", "dense"),
        (Prefix(2) & Dense(yes(Q, K)), "keys", "dense"),
        (Dense(yes(Q, K)) & Dense(yes(K)), "all", "other"),
        (causal() | Dense(yes(Q, K)), "all", "other"),
    ],
    ids=str,
)
def test_what_a_mask_comes_to(mask: Mask | None, spans: str, rest: str) -> None:
    found = call(mask)
    assert (found.spans, found.rest) == (spans, rest)


def test_square_causal() -> None:
    assert call(causal(), q=torch.zeros(B, H, K, D)).spans == "causal"
    assert call(Band(None, 0, offset=0), q=torch.zeros(B, H, K, D)).spans == "causal"
    assert call(Band(None, 0, offset=0)).spans == "rows"


def test_gradients_asked_for() -> None:
    q, sinks, bias = torch.zeros(B, H, Q, D), torch.zeros(H), torch.zeros(Q, K)
    assert not call().grad
    assert call(q=q.clone().requires_grad_()).grad
    assert call(sinks=sinks.clone().requires_grad_()).grad
    with_bias = call(bias=bias.clone().requires_grad_())
    assert (with_bias.grad, with_bias.bias_grad) == (False, True)
    with torch.no_grad():
        none = call(q=q.clone().requires_grad_(), bias=bias.clone().requires_grad_())
        assert (none.grad, none.bias_grad) == (False, False)


def test_fold_keeps_what_broadcasts() -> None:
    assert fold(torch.zeros(Q, K), (2, 3)).shape == (Q, K)
    assert fold(torch.zeros(3, 1, Q, K), (2, 3)).shape == (6, 1, Q, K)
    assert fold(torch.zeros(2, 1, H, Q, 1), (2, 3)).shape == (6, H, Q, 1)
    assert fold(torch.zeros(2, H, Q, K), (2,)).shape == (2, H, Q, K)
    each = torch.arange(6.0).reshape(2, 3, 1, 1, 1)
    assert fold(each, (2, 3)).flatten().tolist() == [0, 1, 2, 3, 4, 5]

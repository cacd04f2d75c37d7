"""Which backend runs what, and why the others do not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import headscope
from headscope._attend import prepare
from headscope._attend import select as _select
from headscope._attend.backends import flex, fused, native, reproducible
from headscope._attend.call import Options, check_call
from headscope._attend.select import BACKENDS, ORDER, order, select
from headscope.masks import Band, Dense, KeyLengths, Prefix, causal, window

B, H, HKV, Q, K, D, DV = 2, 6, 3, 7, 7, 11, 5


@pytest.fixture(autouse=True)
def _as_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native kernels would take every call on a CPU: what is asked here is who comes after them."""
    monkeypatch.setattr(native, "extension", None)
    monkeypatch.setattr(prepare, "prepared_calls", prepare.PreparedCalls())


def call(**said: Any) -> Any:
    """A call of [2, 6, 7, 11], with what is said otherwise."""
    shapes = {"q": (B, H, said.pop("queries", Q), D), "k": (B, HKV, K, D), "v": (B, HKV, K, said.pop("v_head_dim", D))}
    tensors: dict[str, Tensor] = {
        name: torch.zeros(shape, device=said.get("device", "cpu"), dtype=said.get("dtype", torch.float32))
        for name, shape in shapes.items()
    }
    options = Options(
        said.get("mask"), said.get("scale"), said.get("softcap"), said.get("dropout", 0.0), said.get("lse", False)
    )
    return check_call(**tensors, bias=said.get("bias"), sinks=said.get("sinks"), options=options)


def yes(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


TAKEN: dict[str, dict[str, Any]] = {
    "nothing said": {},
    "half": {"dtype": torch.bfloat16},
    "double": {"dtype": torch.float64},
    "scale": {"scale": -0.5},
    "square causal": {"mask": causal()},
    "wide window": {"mask": window(K)},
    "prefix": {"mask": Prefix(3)},
    "lengths": {"mask": KeyLengths(torch.tensor([3, 0]))},
    "dense": {"mask": Dense(yes(Q, K))},
    "dense with everything": {"mask": Dense(yes(B, 1, Q, K)) & Prefix(K)},
    "bias": {"bias": torch.zeros(H, Q, K)},
    "dropout on an accelerator": {"dropout": 0.1, "device": "meta"},
}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "lse": ({"lse": True}, "lse: scaled_dot_product_attention does not return lse"),
    "softcap": ({"softcap": 30.0}, "softcap: scaled_dot_product_attention does not support it"),
    "sinks": ({"sinks": torch.zeros(H)}, "sinks: scaled_dot_product_attention does not support them"),
    "dropout": ({"dropout": 0.1}, "dropout: torch has no fused kernel with dropout on a CPU"),
    "Dv": ({"v_head_dim": DV}, "Dv: torch has no fused kernel for Dv 5 with D 11"),
    "band": ({"mask": window(3)}, "mask: would require a Q x K matrix: it is a band other"),
    "causal, fewer queries": ({"mask": causal(), "queries": 3}, "mask: would require a Q x K matrix: it is a band"),
    "top-left": ({"mask": Band(None, 0, offset=0), "queries": 3}, "mask: would require a Q x K matrix: it is a band"),
    "dense and causal": ({"mask": Dense(yes(Q, K)) & causal()}, "mask: this combination would require a Q x K matrix"),
    "dense and prefix": ({"mask": Dense(yes(Q, K)) & Prefix(2)}, "mask: this combination would require a Q x K matrix"),
    "dense or causal": ({"mask": Dense(yes(Q, K)) | causal()}, "mask: this combination would require a Q x K matrix"),
    "bias and mask": ({"bias": torch.zeros(Q, K), "mask": causal()}, "bias: together with a mask it would"),
    "bias with gradient": (
        {"bias": torch.zeros(Q, K, requires_grad=True)}, "bias: torch's fused kernels do not compute its gradient"
    ),
    "bias of another dtype": ({"bias": torch.zeros(Q, K, dtype=torch.float64)}, "bias: dtype is torch.float64, q has"),
    "no queries": ({"queries": 0}, "an axis of size 0"),
    "causal and a scale": ({"scale": -0.5, "mask": causal()}, "scale: is 0 or below; torch's kernels mask keys"),
    "causal and no scale": ({"scale": 0.0, "mask": causal()}, "scale: is 0 or below; torch's kernels mask keys"),
    "scale on an accelerator": ({"scale": -0.5, "device": "meta"}, "scale: is 0 or below; torch's kernels mask keys"),
}  # fmt: skip


@pytest.mark.parametrize("name", TAKEN)
def test_sdpa_takes(name: str) -> None:
    assert BACKENDS["sdpa"].refuses(call(**TAKEN[name])) == []
    assert select(call(**TAKEN[name])).name == "sdpa"


@pytest.mark.parametrize("name", REFUSED)
def test_sdpa_refuses(name: str) -> None:
    said, reason = REFUSED[name]
    reasons = BACKENDS["sdpa"].refuses(call(**said))
    assert len(reasons) == 1, reasons
    assert reasons[0].startswith(reason)
    with pytest.raises(ValueError, match=re.escape(f"backend: sdpa refuses this call: {reasons[0]}")):
        select(call(**said), "sdpa")
    assert select(call(**said)).name == "blocked"


def test_the_native_kernels_say_why_they_refuse() -> None:
    assert BACKENDS["cpu"].refuses(call()) == ["build: the native extension is not installed"]
    assert BACKENDS["cpu"].refuses(call(device="meta")) == ["device: the native kernels run on the CPU, not on meta"]
    with pytest.raises(ValueError, match="backend: cpu refuses this call: build: the native extension"):
        select(call(), "cpu")


def test_all_reasons_are_listed() -> None:
    wanted = "backend: sdpa refuses this call: lse: scaled_dot_product_attention does not return lse; softcap:"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        select(call(lse=True, softcap=2.0), "sdpa")


@pytest.mark.parametrize("name", ["blocked", "reference"])
def test_the_portable_backends_refuse_nothing(name: str) -> None:
    for said in [*TAKEN.values(), *(said for said, _ in REFUSED.values())]:
        assert BACKENDS[name].refuses(call(**said)) == []
        assert select(call(**said), name) is BACKENDS[name]


def test_unknown_names() -> None:
    with pytest.raises(
        ValueError,
        match="backend: got 'flash', expected one of cpu, sdpa, fused, flex, blocked",
    ):
        select(call(), "flash")
    with pytest.raises(ValueError, match=r"backend: got \['cpu'\], expected one of"):
        select(call(), ["cpu"])  # pyright: ignore[reportArgumentType]


def test_every_order_names_every_backend_and_ends_with_one_that_refuses_nothing() -> None:
    assert {name: backend.name for name, backend in BACKENDS.items()} == {name: name for name in BACKENDS}
    for device, names in ORDER.items():
        elsewhere = set() if device == "cuda" else {fused.name, flex.name}
        assert sorted({*names, reproducible.name, *elsewhere}) == sorted(BACKENDS), device
        assert names[-1] == "reference", device
    assert order(call()) == ORDER.get("cpu", ORDER["default"])


def test_matrix_tiles_make_torch_the_first_choice_for_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_select, "has_amx", lambda: True)
    many = torch.randn(1, 2, 64, 16)
    for dtype, queries, first in ((torch.bfloat16, 64, "sdpa"), (torch.bfloat16, 8, "cpu"), (torch.float32, 64, "cpu")):
        q = many[:, :, :queries].to(dtype)
        described = check_call(q, q, q, None, None, Options(None, None, None, 0.0, False))
        assert order(described)[0] == first, (dtype, queries)
        assert order(described)[-1] == "reference"


def test_grouped_heads_share_the_rows_that_matrix_tiles_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key/value head multiplies the query rows of its whole group, so a group fills the tiles with fewer queries."""
    monkeypatch.setattr(_select, "has_amx", lambda: True)
    q, k = torch.randn(1, 8, 8, 16).bfloat16(), torch.randn(1, 8, 8, 16).bfloat16()
    firsts: dict[int, str] = {}
    for kv_heads in (2, 8):
        keys = k[:, :kv_heads]
        firsts[kv_heads] = order(check_call(q, keys, keys, None, None, Options(None, None, None, 0.0, False)))[0]
    assert firsts == {2: "sdpa", 8: "cpu"}


def test_a_named_backend_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(B, H, Q, D)
    k = torch.randn(B, HKV, K, D)
    ran: list[str] = []
    names = ["sdpa", "blocked", "reference"]
    for name in names:
        backend = BACKENDS[name]

        def spy(*args: Any, _name: str = name, _attend: Any = backend.attend) -> Any:
            ran.append(_name)
            return _attend(*args)

        monkeypatch.setattr(backend, "attend", spy)
    monkeypatch.setattr(BACKENDS["sdpa"], "repeater", lambda *_: None)  # the short way would go past the spy
    prepare.prepared_calls.clear()
    for name in names:
        headscope.attention(q, k, k, backend=name)
    headscope.attention(q, k, k)
    headscope.attention(q, k, k, softcap=2.0)
    headscope.attend(q, k, k)
    assert ran == ["sdpa", "blocked", "reference", "sdpa", "blocked", "blocked"]


def test_the_choice_is_made_of_shapes_and_options_alone() -> None:
    """No clock, no memory, no history: the same call, the same backend."""
    said = TAKEN["dense"]
    first = select(call(**said)).name
    for other in TAKEN.values():
        select(call(**other))
    assert select(call(**said)).name == first

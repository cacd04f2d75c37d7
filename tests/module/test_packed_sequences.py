"""Packed sequences: documents by their cumulative lengths, and nested tensors in and out of the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headscope import MultiHeadAttention, attend, attention, observe
from headscope.cache import GrowingCache
from headscope.masks import Band, Documents, Mask, Prefix, causal, window
from headscope.positions import NTK, ALiBi, Rotary, restarting

E, H = 12, 3
LENGTHS = (5, 1, 7)
CU = torch.tensor([0, 5, 6, 13], dtype=torch.int32)


def module(**said: Any) -> MultiHeadAttention:
    made = MultiHeadAttention(E, H, dtype=torch.float64, **said)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.4)
    return made


def rows(lengths: tuple[int, ...] = LENGTHS, width: int = E) -> list[Tensor]:
    return [torch.randn(length, width, dtype=torch.float64) for length in lengths]


def nested(parts: list[Tensor], **said: Any) -> Any:
    return torch.nested.nested_tensor(parts, layout=torch.jagged, **said)


def test_documents_by_their_cumulative_lengths() -> None:
    mask = Documents.from_cu_seqlens(CU)
    assert mask.q_ids.tolist() == mask.k_ids.tolist() == [[0] * 5 + [1] + [2] * 7]
    assert restarting(CU).tolist() == [0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 4, 5, 6]
    both = Documents.from_cu_seqlens(torch.tensor([0, 2, 2, 3]), CU)
    assert both.q_ids.tolist() == [[0, 0, 2]]
    assert both.k_ids.tolist() == mask.k_ids.tolist()
    m, parts = module(rotary=Rotary(4)), rows()
    packed = m(torch.cat(parts)[None], mask=causal() & mask, positions=restarting(CU))
    for out, part in zip(packed[0].split(LENGTHS), parts, strict=True):
        torch.testing.assert_close(out, m(part, mask=causal()))
    plan = (causal() & mask).plan(1, H, 13, 13)
    assert plan.rest is None, "two ends a row say it all"


@pytest.mark.parametrize(
    "said", [{}, {"rotary": Rotary(4, scaling=NTK(2, 3)), "kv_heads": 1}, {"position_bias": ALiBi(H)}]
)
@pytest.mark.parametrize("mask", [None, causal(), window(3), Band(1, 1) | Band(3, -2)])
def test_rows_of_a_nested_tensor_are_as_if_alone(said: dict[str, Any], mask: Mask | None) -> None:
    m, parts = module(**said), rows()
    x = nested(parts)
    out: Any = m(x, mask=mask)
    assert out.is_nested
    assert out.shape == x.shape, "the same ragged size, so that it can be added"
    dynamic = m.rotary is not None  # whose angles go with the longest row
    for got, added, part in zip(out.unbind(), (x + out).unbind(), parts, strict=True):
        if not dynamic or len(part) == max(LENGTHS):
            torch.testing.assert_close(got, m(part, mask=mask))
        torch.testing.assert_close(added, part + got)


def test_each_row_sees_its_row_of_a_nested_context() -> None:
    m = module(kdim=7)
    parts, contexts = rows(), rows((2, 3, 1), 7)
    out: Any = m(nested(parts), nested(contexts))
    for got, part, context in zip(out.unbind(), parts, contexts, strict=True):
        torch.testing.assert_close(got, m(part, context))


def test_gradients_flow_through_nested_tensors() -> None:
    m, parts = module(), rows()
    leaves = [part.clone().requires_grad_() for part in parts]
    out: Any = m(torch.nested.as_nested_tensor(leaves, layout=torch.jagged), mask=causal())
    got = torch.autograd.grad(out.values().square().sum(), [*leaves, m.qkv_proj.weight])
    alone = torch.stack([m(leaf, mask=causal()).square().sum() for leaf in leaves]).sum()
    torch.testing.assert_close(got, torch.autograd.grad(alone, [*leaves, m.qkv_proj.weight]))


def refused(says: str, act: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=says):
        act()


def test_what_does_not_go_with_nested_tensors_is_named() -> None:
    m, parts = module(), rows()
    x = nested(parts)

    refused("need_weights: expected None together with a nested x", lambda: m(x, need_weights=True))
    refused("bias: expected None together with a nested x", lambda: m(x, bias=torch.zeros(1)))
    refused("cache: expected None together with a nested x", lambda: m(x, cache=GrowingCache()))
    refused("mask: got Prefix, expected causal", lambda: m(x, mask=Prefix(1)))
    refused("mask: got bool, expected causal", lambda: m(x, mask=torch.ones(1, 1).bool()))
    refused("mask: expected None together with a nested context", lambda: m(x, nested(rows()), mask=causal()))
    refused("context: got a tensor of 3 axes, expected a nested tensor, as x is", lambda: m(x, torch.zeros(3, 2, E)))
    refused("context: is nested, x is an ordinary tensor of 3 axes", lambda: m(torch.zeros(3, 2, E), x))
    refused("context: has 2 rows, x has 3", lambda: m(x, nested(rows((2, 3)))))
    holed = torch.nested.narrow(
        torch.zeros(2, 7, E), 1, torch.tensor([0, 0]), torch.tensor([5, 3]), layout=torch.jagged
    )
    refused("x: is a nested tensor with gaps between its rows", lambda: m(holed))
    refused(
        r"x: is a nested tensor of 4 axes, expected \[B, ragged, E\]", lambda: m(nested([p[:, None] for p in parts]))
    )


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_functions_take_nested_tensors_without_options() -> None:
    parts = [p.unflatten(-1, (2, -1)) for p in rows()]  # [length, H, D] each
    x = nested(parts).transpose(1, 2)  # [B, H, ragged, D]
    for part, out in zip(parts, attention(x, x, x, scale=0.5).unbind(), strict=True):
        alone = part.transpose(0, 1)
        torch.testing.assert_close(out, attention(alone, alone, alone, scale=0.5))
    options: dict[str, Any] = {
        "mask": causal(), "bias": torch.zeros(2, 1, 1), "softcap": 2.0, "sinks": torch.zeros(2), "dropout": 0.5,
    }  # fmt: skip
    for name, value in options.items():
        refused(
            f"{name}: expected none together with nested q, k and v; Multi",
            lambda n=name, o=value: attention(x, x, x, **{n: o}),
        )
    for name in ("cpu", "blocked", "reference"):
        refused(
            f"backend: got '{name}', expected .* for nested q, k and v",
            lambda name=name: attention(x, x, x, backend=name),
        )
    refused("q, k, v: are nested, expected ordinary tensors, because attend", lambda: attend(x, x, x))
    flat = nested(rows())
    refused(r"q: is a nested tensor, expected \[B, H, ragged, D\]", lambda: attention(flat, flat, flat))
    dense = torch.zeros(3, 2, 5, x.shape[-1])
    for run, message in (
        (lambda: attention(dense, x, x), "k: layout is torch.jagged, q has torch.strided"),
        (lambda: attention(dense, dense, dense, bias=x), "bias: is a nested tensor of layout torch.jagged"),
        (lambda: observe(x, x), "q: is a nested tensor of layout torch.jagged, expected an ordinary one"),
    ):
        with pytest.raises(TypeError, match=message):
            run()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_nested_tensors_of_the_older_layout_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x: is a nested tensor of layout torch\.strided, expected torch\.jagged"):
        module()(torch.nested.nested_tensor(rows(), layout=torch.strided))


def test_cumulative_lengths_that_are_none_are_named() -> None:
    for wrong in ([1, 2], [0, 3, 2], []):
        with pytest.raises(
            ValueError, match=r"q: got .*, expected cumulative lengths, which start at 0 and never decrease"
        ):
            Documents.from_cu_seqlens(torch.tensor(wrong, dtype=torch.long))
    with pytest.raises(TypeError, match=r"q: got torch.float32, expected integers \[n \+ 1\]"):
        Documents.from_cu_seqlens(torch.tensor([0.0, 2.0]))
    with pytest.raises(ValueError, match="k: has 2 numbers, expected 4, as q"):
        Documents.from_cu_seqlens(CU, torch.tensor([0, 3]))
    for shape in ((), (2, 2)):
        with pytest.raises(ValueError, match=r"q: is \[.*\], expected \[n \+ 1\]"):
            Documents.from_cu_seqlens(torch.zeros(shape, dtype=torch.long))
    with pytest.raises(TypeError, match=r"q: got torch.complex64, expected integers"):
        Documents.from_cu_seqlens(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match=r"k: got int, expected integers"):
        Documents.from_cu_seqlens(CU, 3)  # pyright: ignore[reportArgumentType]

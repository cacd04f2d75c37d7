"""watch: a module that attends once by a fused call and once by a softmax of its own.

It is recorded where the operations show which axis is what; else there is a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import ablate, watch
from headscope.watching import WatchWarning
from support.cases import case
from support.commands import Run
from support.model_folders import gpt2, save
from support.watched_small import Attention

bmm: Callable[..., Tensor] = torch.ops.aten.bmm
bmm_overload: Callable[..., Tensor] = torch.ops.aten.bmm.default
tensordot: Callable[..., Tensor] = torch.tensordot  # its stub has the overloads of dims left out
chain_matmul: Callable[..., Tensor] = torch.chain_matmul
aten: Any = torch.ops.aten
private_torch: Any = torch


Own = Callable[[Tensor, Tensor], Tensor]
"""Logits [B, H, Q, K] and values [B, H, K, D] -> [B, H, Q, D]."""


class Both(nn.Module):
    """Attends to its input by SDPA, and to it, or to a memory, by ``own``."""

    def __init__(self, own: Own, *, fused_inside: bool = False, memory: int = 7) -> None:
        super().__init__()
        self.qkv = nn.Linear(15, 45)
        self.own = own
        self.inner = Attention() if fused_inside else None
        self.memory = memory

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        k2, v2 = k[..., : self.memory, :], v[..., : self.memory, :]
        own = self.own(q @ k2.transpose(-2, -1), v2).transpose(1, 2).flatten(-2)
        if self.inner is not None:
            return self.inner(x) + own
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2) + own


class Within(nn.Module):
    """A model with one such layer."""

    def __init__(self, layer: nn.Module, name: str = "mixer") -> None:
        super().__init__()
        self.add_module(name, layer)
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule(self.name)(x)


def dropped(s: Tensor, v: Tensor) -> Tensor:
    """As eager code does in half precision."""
    return F.dropout(F.softmax(s, dim=-1, dtype=torch.float64).to(s.dtype), 0.1, training=False) @ v


def folded(s: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(s.softmax(-1).flatten(0, 1), v.flatten(0, 1)).unflatten(0, s.shape[:2])


def by_head(product: Own) -> Own:
    """A product of matrices for each head, [Q, K] and [K, D] -> [Q, D]."""

    def own(s: Tensor, v: Tensor) -> Tensor:
        p = s.softmax(-1)
        return torch.stack([product(*each) for each in zip(p.flatten(0, 1), v.flatten(0, 1), strict=True)]).view(
            *s.shape[:-1], v.shape[-1]
        )

    return own


def by_batch(product: Own) -> Own:
    """A product of [B * H, Q, K] and [B * H, K, D]."""

    def own(s: Tensor, v: Tensor) -> Tensor:
        out: Any = product(s.softmax(-1).flatten(0, 1), v.flatten(0, 1))
        return out.unflatten(0, s.shape[:2])

    return own


def summed(s: Tensor, v: Tensor) -> Tensor:
    """Sums over batch and heads."""
    p = s.softmax(-1).flatten(0, 1)
    return v.new_zeros((*v.shape[:2], p.shape[1], v.shape[-1])) + torch.addbmm(v.new_zeros(()), p, v.flatten(0, 1))


def one_by_one(s: Tensor, v: Tensor) -> Tensor:
    p = s.softmax(-1)
    return torch.stack([p[:, head] @ v[:, head] for head in range(s.shape[1])], 1)


def written_in_chunks(s: Tensor, v: Tensor) -> Tensor:
    p = torch.zeros_like(s)
    for n in range(0, s.shape[-2], 3):
        p[..., n : n + 3, :] = s[..., n : n + 3, :].softmax(-1)
    return p @ v


def scattered(s: Tensor, v: Tensor) -> Tensor:
    top = s.topk(2, -1)
    return torch.zeros_like(s).scatter(-1, top.indices, top.values.softmax(-1)) @ v


ATTENDS: dict[str, Own] = {
    "softmax and @": lambda s, v: s.softmax(-1) @ v,
    "functional": lambda s, v: torch.matmul(F.softmax(s, dim=-1), v),
    "torch": lambda s, v: torch.softmax(s, dim=3).matmul(v),
    "module": lambda s, v: nn.Softmax(-1)(s) @ v,
    "special": lambda s, v: torch.special.softmax(s, dim=-1) @ v,
    "dropped out": dropped,
    "folded": folded,
    "einsum": lambda s, v: torch.einsum("bhqk,bhkd->bhqd", s.softmax(-1), v),
    "einsum, values first": lambda s, v: torch.einsum("bhkd, bhqk -> bhqd", v, s.softmax(-1)),
    "transposed": lambda s, v: (v.transpose(-2, -1) @ s.softmax(-1).transpose(-2, -1)).transpose(-2, -1),
    "baddbmm": by_batch(lambda p, v: torch.baddbmm(p.new_zeros(()), p, v)),
    "baddbmm by keyword": by_batch(lambda p, v: torch.baddbmm(input=p.new_zeros(()), batch1=p, batch2=v)),
    "baddbmm_": by_batch(lambda p, v: (p @ v.detach() * 0).baddbmm_(p, v)),
    "addbmm": summed,
    "addmm": by_head(lambda p, v: torch.addmm(p.new_zeros(()), p, v)),
    "matmul of each head": by_head(lambda p, v: p @ v),
    "tensordot": by_head(lambda p, v: tensordot(p, v, 1)),
    "tensordot, values first": by_head(lambda p, v: tensordot(v, p, dims=([0], [1])).T),
    "inner": by_head(lambda p, v: torch.inner(p, v.T)),
    "inner, values first": by_head(lambda p, v: torch.inner(v.T, p).T),
    "linear": by_head(lambda p, v: F.linear(p, v.T)),
    "multi_dot": by_head(lambda p, v: torch.linalg.multi_dot([p, v])),
    "multi_dot, three": by_head(lambda p, v: torch.linalg.multi_dot([torch.eye(len(p)), p, v])),
    "chain_matmul": by_head(lambda p, v: chain_matmul(p, v)),
    "aten": by_batch(bmm),
    "aten, an overload": by_batch(bmm_overload),
    "by keyword": lambda s, v: torch.matmul(input=torch.softmax(input=s, dim=-1), other=v),
    "softmin": lambda s, v: F.softmin(-s, -1) @ v,
    "gumbel_softmax": lambda s, v: F.gumbel_softmax(s, tau=100.0, dim=-1) @ v * 0,
    "sparse softmax": lambda s, v: torch.sparse.softmax(s.detach().to_sparse(), -1).to_dense() @ v,
    "_softmax": lambda s, v: private_torch._softmax(s, -1, False) @ v,
    "_safe_softmax": lambda s, v: private_torch._safe_softmax(s, -1) @ v,
    "aten softmax": lambda s, v: aten.softmax(s, -1) @ v,
    "aten _softmax": lambda s, v: aten._softmax.default(s, -1, False) @ v,
    "log_softmax": lambda s, v: F.log_softmax(s, -1).exp() @ v,
    "a sink that is cut off": lambda s, v: torch.cat([s, s.new_zeros(*s.shape[:-1], 1)], -1).softmax(-1)[..., :-1] @ v,
    "chunks of queries, cat": lambda s, v: torch.cat([each.softmax(-1) for each in s.split(3, -2)], -2) @ v,
    "heads, stack": lambda s, v: torch.stack([s[:, head].softmax(-1) for head in range(s.shape[1])], 1) @ v,
    "heads, one by one": one_by_one,
    "chunks of queries, written": written_in_chunks,
    "top-k, scattered": scattered,
    "weights that heads share, repeated": lambda s, v: s[:, :1].softmax(-1).repeat_interleave(s.shape[1], 1) @ v,
    "weights that heads share, expanded": lambda s, v: s[:, :1].softmax(-1).expand_as(s) @ v,
    "weights that heads share, repeat": lambda s, v: s[:, :1].softmax(-1).repeat(1, s.shape[1], 1, 1) @ v,
    "a pad": lambda s, v: F.pad(s[..., 1:].softmax(-1), (1, 0)) @ v,
}


PRODUCTS_OF_HEADS = {name for name, own in ATTENDS.items() if own.__qualname__.startswith("by_head")}
UNRECORDED = PRODUCTS_OF_HEADS | {
    *("addbmm", "sparse softmax", "chunks of queries, written", "top-k, scattered"),
    *(f"weights that heads share, {how}" for how in ("repeated", "expanded")),
}
"""Each product is one of one head or of a part of the weights, or the weights are not those of the softmax."""
OTHER_LOGITS = {"gumbel_softmax", "a sink that is cut off", "a pad", "weights that heads share, repeat"}


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("own", [name for name in ATTENDS if name in UNRECORDED])
def test_a_second_attention_that_is_not_recorded_is_warned_of(own: str) -> None:
    for fused_inside, memory in product((False, True), (7, 3)):
        with case(fused_inside, memory):
            check_warning(own, fused_inside, memory)


def check_warning(own: str, fused_inside: bool, memory: int) -> None:
    model = Within(Both(ATTENDS[own], fused_inside=fused_inside, memory=memory), "mixed_attention")
    x = torch.randn(2, 7, 15)
    expected = model(x)
    message = r"watch: mixed_attention \(Both\) may also attend by a softmax of its own"
    with pytest.warns(WatchWarning, match=message), watch(model) as seen:
        out = model(x)
    assert torch.equal(out, expected)
    assert seen.layers == ("mixed_attention.inner" if fused_inside else "mixed_attention",)


@pytest.mark.parametrize("own", [name for name in ATTENDS if name not in UNRECORDED])
def test_a_second_attention_by_hand_is_recorded(own: str) -> None:
    for fused_inside, memory in product((False, True), (7, 3)):
        with case(fused_inside, memory):
            check_recorded(own, fused_inside, memory)


def check_recorded(own: str, fused_inside: bool, memory: int) -> None:
    logits: list[Tensor] = []

    def noted(s: Tensor, v: Tensor) -> Tensor:
        logits.append(s.detach().double())
        return ATTENDS[own](s, v)

    model = Within(Both(noted, fused_inside=fused_inside, memory=memory), "mixed_attention")
    x = torch.randn(2, 7, 15)
    torch.manual_seed(0)
    expected = model(x)
    torch.manual_seed(0)
    with watch(model, unseen="ignore") as seen:
        out = model(x)
    assert torch.equal(out, expected)
    assert seen.layers == ("mixed_attention", "mixed_attention.inner" if fused_inside else "mixed_attention#2")
    p = logits[-1].softmax(-1)
    entropy = -(p * p.log()).sum(-1).mean((0, 2))
    if own not in OTHER_LOGITS:
        torch.testing.assert_close(seen["mixed_attention", "entropy"].mean, entropy, rtol=1e-5, atol=1e-6)


def gate(s: Tensor, v: Tensor) -> Tensor:
    """Weights a few candidates of each token: [B, H, Q, E] over [B, H, Q, E, D]."""
    candidates = torch.stack([v, 2 * v, 3 * v], -2)
    return torch.einsum("bhqe,bhqed->bhqd", s[..., :3].softmax(-1), candidates)


def routed(s: Tensor, v: Tensor) -> Tensor:
    weights, experts = s[..., :3].softmax(-1).topk(2, -1)
    return v * weights.sum(-1, keepdim=True) + experts.sum() * 0


def many_gates(s: Tensor, v: Tensor) -> Tensor:
    """Mixes three experts of each token by two gates, which are stacked, or written into one tensor."""
    experts = torch.stack([v, 2 * v, 3 * v], -2)  # [B, H, Q, E, D]
    gates = [s[..., :3].softmax(-1), s[..., :3].neg().softmax(-1)]
    both = torch.empty(*s.shape[:-1], 2, 3)
    for n, each in enumerate(gates):
        both[..., n, :] = each
    return (torch.stack(gates, -2) @ experts + both @ experts).sum(-2)


def one_gate(s: Tensor, v: Tensor) -> Tensor:
    """As a product of a row and a matrix for each token."""
    experts = torch.stack([v, 2 * v, 3 * v], -2)
    weights = s[..., :3].softmax(-1)
    return (weights[..., None, :] @ experts + weights.unsqueeze(-2) @ experts).squeeze(-2)


def top_gates(s: Tensor, v: Tensor) -> Tensor:
    """A router that gives the weights of the two best experts, and 0 for the others."""
    top = s[..., :3].topk(2, -1)
    weights = torch.zeros_like(s[..., :3]).scatter(-1, top.indices, top.values.softmax(-1))
    return torch.einsum("bhqe,bhqed->bhqd", weights, torch.stack([v, 2 * v, 3 * v], -2))


def features(s: Tensor, v: Tensor) -> Tensor:
    """Weights as features of their token beside others."""
    x = torch.cat([s[..., :3].softmax(-1), v], -1)
    return v + (x @ x.transpose(-2, -1)).mean() + F.pad(x, (0, 1)).sum()


LEARNED = nn.Parameter(torch.ones(5, 7))


NONE: dict[str, Own] = {
    "weights that are not used": lambda s, v: v + s.softmax(-1).sum() * 0,
    "a gate": gate,
    "a router": routed,
    "many gates": many_gates,
    "one gate": one_gate,
    "gates of the best experts": top_gates,
    "features beside others": features,
    "a learned codebook": lambda s, v: v + s[..., :3].softmax(-1) @ torch.ones(3, v.shape[-1]),
    "a learned matrix": by_head(lambda p, v: v[: len(p)].sum() + F.linear(p, LEARNED[:, : p.shape[-1]])),
    "a learned matrix, transposed": by_head(lambda p, v: v.sum() + torch.addmm(p[:, :1], p, LEARNED[:, : len(p)].T)),
    "tensordot over heads and keys": lambda s, v: v + tensordot(s.softmax(-1), v, dims=([1, 3], [1, 2])).sum(),
    "over queries": lambda s, v: s.softmax(-2) @ v,
    "a product with no softmax": lambda s, v: s @ v,
    "logits after a softmax": lambda s, v: v + (v @ v.transpose(-2, -1)).sum() * s.softmax(-1).mean(),
}


@pytest.mark.parametrize("own", NONE)
def test_gates_and_routers_are_not_warned_of(own: str) -> None:
    model = Within(Both(NONE[own]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with watch(model) as seen:
            model(torch.randn(2, 7, 15))
    assert seen.layers == ("mixer",)


def test_a_layer_is_warned_of_once_and_not_where_it_is_left_out() -> None:
    model = Within(Both(ATTENDS["linear"]))
    x = torch.randn(2, 7, 15)
    with pytest.warns(WatchWarning) as caught, watch(model):
        nn.Sequential(model, model)(x)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with watch(model, unseen="ignore"):
            model(x)
        pair = nn.Sequential(Attention(), model)
        with watch(pair, layers="0"):
            pair(x)


def test_heads_that_are_not_reached_are_warned_of() -> None:
    model = Within(Both(ATTENDS["functional"]))
    with pytest.warns(WatchWarning, match=r"heads: mixer \(Both\) may also attend"), ablate(model, {"mixer": 0}):
        model(torch.randn(2, 7, 15))


def test_the_command_says_so_in_one_line(
    run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = save(gpt2(), tmp_path / "gpt2")
    kind: Any = transformers.models.gpt2.modeling_gpt2.GPT2Attention
    forward = kind.forward

    def twice(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        scores = hidden_states @ hidden_states.transpose(-2, -1)
        torch.sparse.softmax(scores.detach().to_sparse(), -1).to_dense() @ hidden_states
        return forward(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", twice)
    for arguments in (("watch", str(at), "--json"), ("text", "--model", str(at))):
        command = arguments[0]
        ran = run(*arguments, *(("--text",) if command == "watch" else ()), "a quick brown fox and a lazy dog again")
        assert ran.code == 0
        lines = [line for line in ran.err.splitlines() if "may also attend" in line]
        said = "may also attend by a softmax of its own, which the recording does not include"
        assert lines == [f"headscope {command}: transformer.h.{n}.attn (GPT2Attention) {said}" for n in (0, 1)]

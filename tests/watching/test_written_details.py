"""watch: attention that a module writes out, in details that are easily recorded wrong: logits, order, one token."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import Observe, watch
from headscope.watching import WatchError

HEADS, WIDTH, TOKENS = 3, 7, 11
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


class Layer(nn.Module):
    """Projections, and a function that attends with their heads."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(HEADS * WIDTH, HEADS * WIDTH) for _ in range(3))
        self.attend = attend

    def heads(self, x: Tensor) -> list[Tensor]:
        return [each(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2) for each in (self.q, self.k, self.v)]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return self.attend(q, k, v)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * WIDTH**-0.5


def tokens(count: int = TOKENS) -> Tensor:
    return torch.randn(2, count, HEADS * WIDTH, generator=torch.Generator().manual_seed(5))


def of_each_row(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k)
    return (scores - scores.amax(-1, keepdim=True).detach()).softmax(-1) @ v


def of_all_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k)
    return (scores - scores.max()).softmax(-1) @ v


def before_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k)
    return (scores - scores.max(-1, keepdim=True)[0]).masked_fill(~CAUSAL, -math.inf).softmax(-1) @ v


def after_a_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = scores_of(q, k).masked_fill(~CAUSAL, -math.inf)
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ v


@pytest.mark.parametrize(
    ("attend", "hidden"),
    [
        (of_each_row, ~CAUSAL & CAUSAL),
        (of_all_rows, ~CAUSAL & CAUSAL),
        (before_a_mask, ~CAUSAL),
        (after_a_mask, ~CAUSAL),
    ],
)
def test_logits_are_those_before_the_largest_is_subtracted(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], hidden: Tensor
) -> None:
    model, x = Layer(attend), tokens()
    with torch.no_grad(), watch(model, verify=3) as recording:
        model(x)
        q, k, _ = model.double().heads(x.double())
        scores = scores_of(q, k).masked_fill(hidden, -math.inf)
    for name, truth in (("lse", scores.logsumexp(-1)), ("max_logit", scores.amax(-1))):
        torch.testing.assert_close(recording[name].mean[0], truth.mean((0, 2)), rtol=1e-5, atol=1e-5)
    assert recording.about.verified["Layer"].fits


def test_without_q_and_k_such_logits_do_not_exist() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = scores_of(q, k) + torch.arange(TOKENS)
        return (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ v

    with torch.no_grad(), watch(model := Layer(attend)) as recording:
        model(tokens())
    assert not {"lse", "max_logit"} & {*recording.names}
    assert "entropy" in recording.names


def by_name(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores_of(q, k).softmax(-1) @ v


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1), v)


def with_heads_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.einsum("bqhk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bqhk", q, k).softmax(-1), v)


def with_tokens_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))  # as Transformer-XL
    return torch.einsum("ijbn,jbnd->ibnd", torch.einsum("ibnd,jbnd->ijbn", q, k).softmax(1), v)


def by_exponentials(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = scores_of(q, k).exp2()
    return e / e.sum(-1, keepdim=True) @ v


def renormalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores_of(q, k).softmax(-1) + 1e-9
    return p / p.sum(-1, keepdim=True) @ v


@pytest.mark.parametrize(
    "attend",
    [by_name, by_einsum, with_heads_last, with_tokens_first, by_exponentials, renormalised, of_each_row],
)
def test_one_token_is_recorded(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    class Attention(Layer): ...

    model, x = Attention(attend), tokens(1)
    with torch.no_grad(), watch(model, verify=3) as recording:
        out = model(x)
        v = model.double().heads(x.double())[2]
    assert torch.equal(out, model.float()(x))
    assert recording.about.kinds == {"Attention": "self"}
    assert recording["entropy"].count.tolist() == [[2] * HEADS]
    assert recording["max_weight"].mean.tolist() == [[1.0] * HEADS]
    torch.testing.assert_close(recording["value_norm"].mean[0], v.norm(dim=-1).mean((0, 2)), rtol=1e-5, atol=1e-6)
    assert recording.about.verified["Attention"].output is not None
    assert recording.about.verified["Attention"].fits


def test_gates_of_one_token_are_not_attention() -> None:
    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(7, 7), nn.Linear(7, 7)

        def forward(self, x: Tensor) -> Tensor:
            gate = (self.a(x) @ self.b(x).mT).exp()
            return x + gate / (1 + gate.sum(-1, keepdim=True)) * self.b(x)

    with pytest.raises(WatchError, match="no attention call was observed"), watch(gate := Gate()):
        gate(torch.randn(2, 1, 7))


def test_several_models_by_vmap_run_unrecorded() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.after = Layer(by_name), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.after(self.layer(x))

    model, x = Model(), tokens()
    stacked = torch.func.stack_module_state([model, Model()])[0]
    run = torch.func.vmap(lambda values: torch.func.functional_call(model, values, (x,)))
    plain = run(stacked)
    with pytest.raises(WatchError, match="no attention call was observed"), watch(model):
        assert torch.equal(run(stacked), plain)


def test_gradients_of_parameters_by_torch_func_are_recorded() -> None:
    model, x = Layer(by_name), tokens()

    def loss(values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, values, (x,)).square().sum()

    with watch(model) as recording:
        torch.func.grad(loss)(dict(model.named_parameters()))
    with watch(model) as plain:
        model(x)
    assert torch.equal(recording["entropy"].mean, plain["entropy"].mean)


ORDER = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("move", "kind"),
    [
        (lambda p, v: (p[..., ORDER], v[:, :, ORDER]), "cross"),
        (lambda p, v: (p.roll(1, -1), v.roll(1, 2)), "cross"),
        (lambda p, v: (p.flip(-1).flip(-1), v.flip(2).flip(2)), "self"),
        (lambda p, v: (p.flip(1), v.flip(1)), "self"),  # heads
    ],
)
def test_weights_and_values_in_another_order_have_no_positions(
    move: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], kind: str
) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p, v = move(scores_of(q, k).softmax(-1), v)
        return p @ v

    with torch.no_grad(), watch(model := Layer(attend)) as recording:
        model(tokens())
    assert recording.about.kinds == {"Layer": kind}
    assert ("self" in recording.names) == (kind == "self")


@pytest.mark.parametrize("count", [TOKENS, HEADS * WIDTH])
def test_as_many_tokens_as_features_are_no_second_attention(count: int) -> None:
    class ByLinear(Layer):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.q(x), self.k(x), self.v(x)
            parts = [slice(at, at + WIDTH) for at in range(0, HEADS * WIDTH, WIDTH)]
            outputs = [F.linear(F.linear(q[:, at], k[:, at]).softmax(-1), v[:, at].T) for at in parts]
            return self.q(torch.cat(outputs, -1))

    model = ByLinear(by_name)
    with warnings.catch_warnings(action="error"), torch.no_grad(), watch(model) as recording:
        model(tokens(count)[0])
    assert recording["entropy"].count.tolist() == [[count] * HEADS]


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"rows": torch.ones(2, 5, dtype=torch.bool)}, rf"q \[2, {HEADS}, {TOKENS}, {WIDTH}\]"),
        ({"tokens": torch.zeros(3, TOKENS, dtype=torch.long)}, rf"k \[2, {HEADS}, {TOKENS}, {WIDTH}\]"),
    ],
)
def test_errors_have_the_sizes_of_the_queries_and_keys(options: dict[str, Any], sizes: str) -> None:
    model = Layer(by_name)
    with pytest.raises(WatchError, match=f"layer Layer: .*{sizes}"), watch(model, **options):
        model(tokens())


@pytest.mark.parametrize("name", ["edges", "top", "map"])
def test_more_weights_than_memory_has_are_an_error(name: str) -> None:
    options: dict[str, Any] = {name: 10**9}
    with pytest.raises(ValueError, match=f"{name}: got 1000000000, expected at most 16"):
        Observe(**options)


def test_one_block_of_tokens_beside_two_of_padding_has_no_positions() -> None:
    """As LongT5 attends to a short text: the keys are the blocks before, of and after the queries."""

    def three(x: Tensor) -> Tensor:
        blocks = F.pad(x, (0, 0, 0, 0, 0, 0, 1, 1))  # [B, 3, T, H, D]
        return torch.cat([blocks[:, at : at + 1] for at in range(3)], 2)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2).unsqueeze(1) for x in (q, k, v))  # [B, blocks, T, H, D]
        scores = torch.einsum("bnqhd,bnkhd->bnhqk", q, three(k))
        hidden = torch.arange(3 * TOKENS) // TOKENS != 1
        p = scores.masked_fill(hidden, -1e10).softmax(-1)
        every.append(p)
        return torch.einsum("bnhqk,bnkhd->bnqhd", p, three(v)).squeeze(1).transpose(1, 2)

    every: list[Tensor] = []
    model = Layer(attend)
    with watch(model) as seen:
        model(tokens())
    truth = torch.special.entr(every[0].detach().double()).sum(-1).mean((0, 1, 3))
    torch.testing.assert_close(seen["entropy"].mean[0], truth, rtol=1e-5, atol=0)
    assert seen["entropy"].count.tolist() == [[2 * TOKENS] * HEADS]
    assert set(seen.kinds.values()) == {"cross"}


class Summary(Layer):
    """Learned queries that attend to themselves and to the tokens after them, as the summaries of Pegasus X do."""

    def __init__(self) -> None:
        super().__init__(of_each_row)  # not called
        self.summaries = nn.Parameter(torch.randn(2, 5, HEADS * WIDTH))

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        (q, k, v), (_, of_tokens, values) = self.heads(self.summaries * 1), self.heads(x)
        k, v = torch.cat([k, of_tokens], 2), torch.cat([v, values], 2)
        hidden = F.pad(padding, (5, 0))[:, None, None]
        return scores_of(q, k).masked_fill(hidden, -math.inf).softmax(-1) @ v


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.self_attn = nn.Embedding(17, HEADS * WIDTH), Summary()

    def forward(self, ids: Tensor) -> Tensor:
        return self.self_attn(self.embedding(ids), ids == 0)


def test_queries_before_the_last_keys_have_no_positions() -> None:
    ids = torch.arange(1, 2 * TOKENS + 1).remainder(17).view(2, TOKENS)
    ids[:, 4:] = 0
    model = Model().eval()
    with torch.no_grad(), watch(model) as seen:
        model(ids)
    (layer,) = seen.layers
    assert seen.about.kinds == {layer: "cross"}
    assert "distance" not in seen.names
    column = seen[layer, "entropy"]
    assert column.count.tolist() == [2 * 5] * HEADS  # taken for the last tokens, they would be padding
    (q, k, _), (_, of_tokens, _) = (
        model.self_attn.heads(model.self_attn.summaries),
        model.self_attn.heads(model.embedding(ids)),
    )
    hidden = F.pad(ids == 0, (5, 0))[:, None, None]
    p = scores_of(q, torch.cat([k, of_tokens], 2)).double().masked_fill(hidden, -math.inf).softmax(-1)
    torch.testing.assert_close(column.mean, torch.special.entr(p).sum(-1).mean((0, 2)), rtol=1e-5, atol=0)


class Given(nn.Module):
    """Attention of q, k and v that the caller has projected."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v)


def of_each_entry(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([of_each_row(*each) for each in zip(q, k, v, strict=True)])


@pytest.mark.parametrize("shape", [(3, TOKENS, WIDTH), (2, 3, TOKENS, WIDTH)])
@pytest.mark.parametrize("attend", [of_each_row, of_each_entry])
def test_a_batch_that_may_be_heads_is_reported(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    module, qkv = Given(attend), [torch.randn(shape) for _ in range(3)]
    with warnings.catch_warnings(record=True, action="always") as caught, watch(module) as seen:
        module(*qkv)
        module(*qkv)
    whole = attend is of_each_row and len(shape) == 4
    (part,) = seen.stats.parts.values()
    assert part.heads == (3 if whole else 1)
    messages = [str(each.message) for each in caught]
    assert [" may be heads is taken for a batch" in each for each in messages] == ([] if whole else [True])


def test_tokens_that_are_not_projected_are_a_batch() -> None:
    module, x = Given(of_each_row), torch.randn(3, TOKENS, WIDTH)
    with watch(module) as seen:
        module(x, x, x)
    (part,) = seen.stats.parts.values()
    assert (part.heads, part.of) == (1, 3 * TOKENS)

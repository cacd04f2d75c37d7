"""trace: spellings that a hostile reader tried, each compared with its formula in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headscope import trace
from headscope.tracing import Trace

B, T, H, D = 3, 11, 5, 7
Weigh = Callable[[Tensor], Tensor]


class Attention(nn.Module):
    """Attention whose weights are a function of its scores, which are already scaled."""

    def __init__(self, weigh: Weigh) -> None:
        super().__init__()
        self.qkv, self.out, self.weigh = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D), weigh

    def operands(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        p = self.weigh(q @ k.mT / D**0.5)
        return self.out((p @ v).transpose(1, 2).flatten(2))


def hide_later(s: Tensor) -> Tensor:
    return torch.ones(s.shape[-1], s.shape[-1]).triu(1).bool()


def built(weigh: Weigh) -> tuple[Attention, Tensor]:
    torch.manual_seed(5)
    return Attention(weigh), torch.randn(B, T, H * D)


def weights_of(module: Attention, x: Tensor, hidden: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return the weights in float64, [B, H, Q, K]."""
    q, k, _ = (y.unflatten(-1, (H, D)).transpose(1, 2) for y in _project(module, x).chunk(3, -1))
    s = q @ k.mT / D**0.5
    return (s if hidden is None else s.masked_fill(hidden(s), -torch.inf)).softmax(-1)


def _project(module: Attention, x: Tensor) -> Tensor:
    return x.double() @ module.qkv.weight.detach().double().T + module.qkv.bias.detach().double()


def assert_weights(steps: Trace, expected: Tensor) -> None:
    torch.testing.assert_close(
        torch.tensor(steps.row("weights").corner), expected[0, 0, :4, :4].float(), rtol=1e-5, atol=1e-6
    )


# ---------------------------------------------------------------- masks that are assigned


def assign_mask(s: Tensor) -> Tensor:
    s[hide_later(s).expand_as(s)] = -1e9
    return s.softmax(-1)


def assign_pairs(s: Tensor) -> Tensor:
    s[..., hide_later(s)] = -torch.inf
    return s.softmax(-1)


def assign_rows(s: Tensor) -> Tensor:
    rows = s.reshape(-1, T)
    rows[hide_later(s).expand_as(s).reshape(-1, T)] = -1e6
    return rows.reshape(s.shape).softmax(-1)


def assign_last(s: Tensor) -> Tensor:
    s[..., -2:] = -torch.inf
    return s.softmax(-1)


def assign_by_query(s: Tensor) -> Tensor:
    for i in range(T - 1):
        s[:, :, i, i + 1 :] = -torch.inf
    return s.softmax(-1)


def fill_last(s: Tensor) -> Tensor:
    return s.index_fill(-1, torch.tensor([T - 2, T - 1]), -torch.inf).softmax(-1)


def scatter_largest(s: Tensor) -> Tensor:
    largest, places = s.topk(3, -1)
    return torch.full_like(s, -torch.inf).scatter(-1, places, largest).softmax(-1)


def is_last(s: Tensor) -> Tensor:
    return (torch.arange(T) >= T - 2).expand(T, T)


def is_small(s: Tensor) -> Tensor:
    return s < s.topk(3, -1).values[..., -1:]


ASSIGNED = [
    (assign_mask, hide_later, "causal"),
    (assign_pairs, hide_later, "causal"),
    (assign_rows, hide_later, "causal"),
    (assign_by_query, hide_later, "causal"),
    (assign_last, is_last, "hidden"),
    (fill_last, is_last, "hidden"),
    (scatter_largest, is_small, "hidden"),
]


@pytest.mark.parametrize(("weigh", "hidden", "note"), ASSIGNED, ids=[each[0].__name__ for each in ASSIGNED])
def test_scores_that_are_assigned_are_a_mask(weigh: Weigh, hidden: Callable[[Tensor], Tensor], note: str) -> None:
    module, x = built(weigh)
    steps = trace(module, x)
    assert steps.held
    assert str(steps.row("mask").note).startswith(note)
    names = [row.step for row in steps.rows if row.stage == 4]
    assert names == ["scores", "scale", "mask", "weights", "head outputs"]
    assert_weights(steps, weights_of(module, x, hidden))


# ---------------------------------------------------------------- queries and keys that are turned


def turn_pairs(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x[..., ::2], x[..., 1::2]
    return torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1).flatten(-2)


def turn_halves(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Rotary(nn.Module):
    def __init__(self, turn: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.turn = nn.Linear(30, 90), nn.Linear(30, 30), turn

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 5, 6)).permute(2, 0, 3, 1, 4).unbind()
        angle = torch.arange(x.shape[1]).to(x)[:, None] / torch.tensor([1.0, 4.0, 9.0]).to(x)
        q, k = self.turn(q, angle), self.turn(k, angle)
        p = (q @ k.mT / 6**0.5).softmax(-1)
        return self.out((p @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("turn", [turn_pairs, turn_halves])
def test_the_two_sums_of_a_rotation_are_two_columns(turn: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(5)
    module, x = Rotary(turn), torch.randn(B, T, 30)
    steps = trace(module, x)
    assert steps.held, [(row.step, row.invariant) for row in steps.failed]
    assert steps.row("scores").axes == {"B": B, "H": 5, "Q": T, "K": T}
    assert "unusual" not in str(steps)
    assert steps.row("change queries").equation == "q ← turned q"
    assert steps.row("scores").note is None


class SharedRotation(nn.Module):
    """Keys of which each head has its own part, and all heads one more number."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.shared = nn.Linear(35, 40), nn.Linear(35, 35), nn.Linear(35, 1)
        self.v, self.out = nn.Linear(35, 35), nn.Linear(35, 35)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (H, 8)).transpose(1, 2)
        k, v = (y.unflatten(-1, (H, 7)).transpose(1, 2) for y in (self.k(x), self.v(x)))
        k = torch.cat([k, self.shared(x)[:, None].expand(-1, H, -1, -1)], -1)
        return self.out(((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_heads_that_share_a_part_of_their_keys_have_keys_of_their_own() -> None:
    torch.manual_seed(5)
    steps = trace(SharedRotation(), torch.randn(B, T, 35))
    assert steps.held
    assert steps.row("scores").note is None
    assert steps.missing["split keys"] == "its numbers come from several products"


class LearnedKey(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        k, v = (torch.cat([y, self.out.weight[None, None, :1, :D].expand(B, H, 1, D)], 2) for y in (k, v))
        return self.out(((q @ k.mT / D**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_learned_last_key_does_not_make_heads_share_keys() -> None:
    torch.manual_seed(5)
    steps = trace(LearnedKey(torch.softmax), torch.randn(B, T, H * D))
    assert steps.held
    assert steps.row("scores").note is None


class OneByOne(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        o = torch.stack([(q[b] @ k[b].mT / D**0.5).softmax(-1) @ v[b] for b in range(len(x))])
        return self.out(o.transpose(1, 2).flatten(2))


def test_a_loop_over_the_batch_is_not_one_over_heads() -> None:
    torch.manual_seed(5)
    steps = trace(OneByOne(torch.softmax), torch.randn(B, T, H * D))
    assert steps.held
    assert steps.row("head outputs").note == "the code computes the batch entries one by one"


# ---------------------------------------------------------------- positions of the module itself


class Prepended(Attention):
    """Attention with learned positions before those of the input, padding after them, and no mask."""

    def __init__(self, learned: int, padding: int) -> None:
        super().__init__(torch.softmax)
        self.learned, self.padding = nn.Parameter(torch.randn(learned, H * D)), padding

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.learned.expand(len(x), -1, -1), x], 1)
        q, k, v = self.operands(nn.functional.pad(x, (0, 0, 0, self.padding)))
        return self.out(((q @ k.mT / D**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))[:, len(self.learned) :]


@pytest.mark.parametrize(("learned", "padding"), [(1, 0), (2, 0), (0, 3), (2, 3)])
def test_learned_and_padded_positions_are_positions(learned: int, padding: int) -> None:
    torch.manual_seed(5)
    module, x = Prepended(learned, padding), torch.randn(B, T, H * D)
    steps = trace(module, x)
    assert steps.held
    assert not steps.missing.keys() & {"split queries", "split keys", "split values"}
    length = T + learned + padding
    assert steps.row("scores").axes == {"B": B, "H": H, "Q": length, "K": length}
    whole = torch.cat([module.learned.detach().expand(B, -1, -1), x, torch.zeros(B, padding, H * D)], 1)
    assert_weights(steps, weights_of(module, whole))


class Pooled(Attention):
    def __init__(self) -> None:
        super().__init__(torch.softmax)
        self.pool = nn.Parameter(torch.randn(4, T) / 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        return self.out(((q @ (self.pool @ k).mT / D**0.5).softmax(-1) @ (self.pool @ v)).transpose(1, 2).flatten(2))


class Windows(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        k, v = (nn.functional.pad(y, (0, 0, 2, 0)).unfold(2, 3, 1) for y in (k, v))  # [B, H, T, D, 3]
        p = (q[..., None, :] @ k / D**0.5).softmax(-1)
        return self.out((p @ v.mT)[..., 0, :].transpose(1, 2).flatten(2))


class Blocks(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (nn.functional.pad(y, (0, 0, 0, 1)).unflatten(2, (-1, 4)) for y in self.operands(x))
        o = (q @ k.mT / D**0.5).softmax(-1) @ v
        return self.out(o.flatten(2, 3)[:, :, :T].transpose(1, 2).flatten(2))


@pytest.mark.parametrize("make", [Pooled, lambda: Windows(torch.softmax), lambda: Blocks(torch.softmax)])
def test_pooled_keys_windows_and_blocks_are_not_a_wrong_split(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(5)
    steps = trace(make(), torch.randn(B, T, H * D))
    assert steps.failed == []
    assert steps.held
    assert "heads-split-wrong" not in str(steps)
    assert ("not checked" in steps.summary) == any(row.held is None for row in steps.rows)
    assert ("all" in steps.summary.split(" invariants")[0]) == all(row.held for row in steps.rows)


# ---------------------------------------------------------------- claims that are not true


def add_one(s: Tensor) -> Tensor:
    return s.exp() / (1 + s.exp().sum(-1, keepdim=True))


def raise_two(s: Tensor) -> Tensor:
    e = torch.pow(2, s * 1.4426950408889634)
    return e / e.sum(-1, keepdim=True)


@pytest.mark.parametrize("weigh", [add_one, raise_two])
def test_exponentials_are_not_called_no_softmax(weigh: Weigh) -> None:
    module, x = built(weigh)
    steps = trace(module, x)
    assert "no-softmax" not in str(steps)
    assert "softmax" in steps.missing["weights"] or "exponentials" in steps.missing["weights"]


class DividedLate(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        s = q @ k.mT / D**0.5
        e = (s - s.amax(-1, keepdim=True)).exp()
        return self.out(((e @ v) / e.sum(-1, keepdim=True)).transpose(1, 2).flatten(2))


def test_exponentials_that_are_divided_late_are_not_called_no_softmax() -> None:
    torch.manual_seed(5)
    steps = trace(DividedLate(torch.softmax), torch.randn(B, T, H * D))
    assert "no-softmax" not in str(steps)
    assert steps.missing["weights"].startswith("the exponentials of scores do not sum to 1")


def test_scores_without_any_exponential_have_no_softmax() -> None:
    module, x = built(lambda s: s.relu() / T)
    assert "(check: no-softmax)" in trace(module, x).missing["weights"]


def raise_two_by_log(s: Tensor) -> Tensor:
    s = s * 1.4426950408889634
    e = torch.exp2(s - s.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def test_the_factor_of_exp2_is_not_one_of_the_scale() -> None:
    module, x = built(raise_two_by_log)
    steps = trace(module, x)
    assert "scale-unusual" not in str(steps)
    assert steps.row("scale 2").equation == "s[i, j] ← s[i, j] · log₂ e = 1.443"
    assert_weights(steps, weights_of(module, x))
    module.weigh = lambda s: raise_two_by_log(2 * s)
    assert "scale-unusual" in str(trace(module, x))


def divide_again(s: Tensor) -> Tensor:
    mask = torch.ones(T, T).tril()
    p = (s * mask).softmax(-1) * mask
    return p / (p.sum(-1, keepdim=True) + 1e-13)


def test_rows_that_are_divided_again_do_not_lose_their_weight() -> None:
    module, x = built(divide_again)
    steps = trace(module, x)
    assert steps.held
    assert "mask-after-softmax" not in str(steps)
    assert "weight 0" not in steps.row("mask").invariant
    assert "new sum" in str(steps.row("mask after the softmax").note)


def test_rows_that_are_not_divided_again_lose_their_weight() -> None:
    module, x = built(lambda s: s.softmax(-1) * torch.ones(T, T).tril())
    assert "mask-after-softmax" in str(trace(module, x).row("mask after the softmax").note)


def test_a_rounded_scale_is_named() -> None:
    module, x = built(lambda s: s.softmax(-1))
    row = trace(module.bfloat16(), x.bfloat16()).row("scale")
    assert row.equation == f"s[i, j] ← s[i, j] · 1/√D = {D**-0.5:.4g}"


class Halves(Attention):
    """Two attentions, the second of the sum of the first and its input."""

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.operands(x)
        return ((q @ k.mT / D**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.attend(x)


def test_the_projection_of_the_next_attention_is_not_the_output() -> None:
    torch.manual_seed(5)
    steps = trace(Halves(torch.softmax), torch.randn(B, T, H * D))
    assert "output" not in [row.step for row in steps.rows]
    assert "output" in steps.missing


def test_pooled_keys_and_values_are_not_one_projection() -> None:
    torch.manual_seed(5)
    assert "values-are-keys" not in str(trace(Pooled(), torch.randn(B, T, H * D)))


def test_a_product_of_complex_numbers_is_one_clear_error() -> None:
    def attend(x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.unflatten(-1, (D, 2)))
        return (z @ z.conj().mT).real.softmax(-1) @ x

    with pytest.raises(ValueError, match="no attention was found"):
        trace(attend, torch.randn(B, T, 2 * D))

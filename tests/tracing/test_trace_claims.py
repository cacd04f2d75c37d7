"""trace: a row says only what is known, on code that an attention of the textbook does not have."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headscope import trace
from headscope.tracing import Trace

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
SCALE = 8**-0.5


class Written(nn.Module):
    """Attention of 3 heads of 8 numbers, with a function for what lies between the projections."""

    def __init__(self, attend: Attend | None = None) -> None:
        super().__init__()
        self.attend = attend
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(24, 24) for _ in range(4))

    def heads(self, x: Tensor) -> list[Tensor]:
        return [f(x).unflatten(-1, (3, 8)).transpose(1, 2) for f in (self.to_q, self.to_k, self.to_v)]

    def forward(self, x: Tensor) -> Tensor:
        assert self.attend is not None
        return self.to_out(self.attend(*self.heads(x)).transpose(1, 2).flatten(2))


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * SCALE


def run(module: nn.Module | Attend) -> tuple[Trace, Tensor]:
    """Return the trace in float64, and the scaled scores, [2, 3, 7, 7]."""
    torch.manual_seed(11)
    module = (module if isinstance(module, nn.Module) else Written(module)).double()
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    with torch.no_grad():
        q, k, _ = Written.heads(module, x)  # pyright: ignore[reportArgumentType]
    return trace(module, x), scores_of(q, k)


def corner_of(x: Tensor) -> list[list[float]]:
    return x[0, 0, :4, :4].tolist()


@pytest.mark.parametrize(
    "hide",
    [
        lambda s: torch.where(s < 0.0, -math.inf, s),
        lambda s: torch.zeros_like(s).masked_fill(s < 0.0, -math.inf) + s,
        lambda s: s - 1e30 * (s < 0.0).double(),
    ],
    ids=["where", "sum", "product"],
)
def test_a_mask_from_the_scores_is_not_inverted(hide: Callable[[Tensor], Tensor]) -> None:
    steps, s = run(lambda q, k, v: hide(scores_of(q, k)).softmax(-1) @ v)
    visible = int((s >= 0).sum())
    assert not steps.missing
    assert f"hidden: {visible} of 294 pairs are visible" in (steps.row("mask").note or "")
    assert steps.held


@pytest.mark.parametrize("fill", [lambda s: 0.1 * s, torch.zeros_like], ids=["leaky", "relu"])
def test_scores_that_a_function_of_them_replaces_are_no_mask(fill: Callable[[Tensor], Tensor]) -> None:
    steps, _ = run(lambda q, k, v: torch.where((s := scores_of(q, k)) < 0.0, fill(s), s).softmax(-1) @ v)
    assert [name.split(" at ")[0] for name in steps.missing] == ["where"]
    assert [row.step for row in steps.rows if row.step.startswith(("mask", "scale"))] == ["scale"]


def test_scores_that_are_taken_from_a_number_change_their_sign() -> None:
    steps, s = run(lambda q, k, v: (3.0 - scores_of(q, k)).softmax(-1) @ v)
    row = steps.row("bias")
    assert row.equation == "s[i, j] ← 3 − s[i, j]"
    assert row.corner == corner_of(3 - s)
    assert "the scale is -0.3536" in (steps.row("scale").note or "")


def test_distances_are_scores_taken_from_the_squares() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        squares = q.pow(2).sum(-1, keepdim=True) + k.pow(2).sum(-1)[..., None, :]
        return (-(squares - 2 * (q @ k.mT)) * SCALE).softmax(-1) @ v

    steps, _ = run(attend)
    assert steps.row("bias").equation == "s[i, j] ← bias[i, j] − s[i, j]"
    assert [row.equation for row in steps.rows if row.step.startswith("scale")][1:] == [
        "s[i, j] ← −s[i, j]",
        "s[i, j] ← s[i, j] · 1/√D = 0.3536",
    ]
    assert not steps.missing


def test_a_change_of_sign_is_a_step() -> None:
    steps, s = run(lambda q, k, v: (-(q @ k.mT) * SCALE).softmax(-1) @ v)
    signs, scale = steps.row("scale"), steps.row("scale 2")
    assert signs.equation == "s[i, j] ← −s[i, j]"
    assert torch.allclose(torch.tensor(scale.corner), torch.tensor(corner_of(-s)))
    assert not steps.missing


def test_a_sum_of_scores_and_a_function_of_them_is_no_bias() -> None:
    steps, _ = run(lambda q, k, v: ((s := scores_of(q, k)) + s.tanh()).softmax(-1) @ v)
    assert [name.split(" at ")[0] for name in steps.missing] == ["add"]
    assert "bias" not in [row.step for row in steps.rows]


class TwoValues(Written):
    """One product of queries and keys, whose weights mix two projections of values."""

    def __init__(self, *, reverse: bool) -> None:
        super().__init__()
        self.to_u = nn.Linear(24, 24)
        self.reverse = reverse

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        u = self.to_u(x).unflatten(-1, (3, 8)).transpose(1, 2)
        p = scores_of(q, k).softmax(-1)
        first, second = [p @ values for values in (v, u)]
        out = second.tanh() + first if self.reverse else first + second.tanh()
        return self.to_out(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("reverse", [False, True])
def test_two_values_of_one_weight_are_no_further_heads(reverse: bool) -> None:
    steps, _ = run(TwoValues(reverse=reverse))
    assert steps.held
    assert "layer" not in steps.title
    assert steps.row("scores").axes == {"B": 2, "H": 3, "Q": 7, "K": 7}
    assert steps.row("scores").note is None
    assert steps.row("concatenation").equation == "o = concat(o₁, …, o₃)"
    assert list(steps.missing) == ["head outputs 2"]


@pytest.mark.parametrize(("rest", "held"), [(0.1 / 7, True), (0.2 / 7, False)])
def test_weights_that_are_smoothed_are_judged_at_the_end(rest: float, held: bool) -> None:
    steps, s = run(lambda q, k, v: (0.9 * scores_of(q, k).softmax(-1) + rest) @ v)
    row = steps.row("scale after the softmax")
    assert row.corner == corner_of(0.9 * s.softmax(-1))
    assert row.held is steps.held is held
    assert "check:" not in (row.note or "")
    assert "1.1" not in row.invariant if held else row.invariant.endswith("the sums are 1.1 to 1.1")


@pytest.mark.parametrize("sizes", [(4, 3), (3, 3, 1), (7,)], ids=str)
def test_chunks_of_queries_are_one_attention(sizes: tuple[int, ...]) -> None:
    steps, s = run(
        lambda q, k, v: torch.cat([scores_of(part, k).softmax(-1) @ v for part in q.split(list(sizes), 2)], 2)
    )
    weights = steps.row("weights")
    assert steps.held
    assert weights.axes == {"B": 2, "H": 3, "Q": 7, "K": 7}
    assert torch.allclose(torch.tensor(weights.corner).double(), torch.tensor(corner_of(s.softmax(-1))).double())
    assert not steps.missing
    assert "layer" not in steps.title
    if len(sizes) > 1:
        assert steps.row("head outputs").note == "the code computes parts of the queries one by one"


def test_equal_chunks_of_queries_are_no_batch_entries() -> None:
    steps, _ = run(lambda q, k, v: torch.cat([scores_of(part, k).softmax(-1) @ v for part in q.split(1, 2)], 2))
    assert steps.row("weights").axes == {"B": 2, "H": 3, "Q": 7, "K": 7}
    assert steps.row("head outputs").note == "the code computes the queries one by one"


def test_chunks_with_keys_of_their_own_are_shown_one_by_one() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [(0, 4), (4, 7)]
        rows = [scores_of(q[:, :, i:j], k[:, :, :j]).softmax(-1) @ v[:, :, :j] for i, j in parts]
        return torch.cat(rows, 2)

    steps, _ = run(attend)
    assert steps.missing["concatenation"] == "joined with results of other products, which are not shown"
    assert steps.missing["output"] == "it takes such results, too"


class Latents(Written):
    """Learned queries, whose keys are the tokens and the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, 24))

    def forward(self, x: Tensor) -> Tensor:
        own = self.latents.expand(len(x), -1, -1)
        both = torch.cat([x, own], 1)
        parts = ((self.to_q, own), (self.to_k, both), (self.to_v, both))
        q, k, v = [f(each).unflatten(-1, (3, 8)).transpose(1, 2) for f, each in parts]
        return self.to_out((scores_of(q, k).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_learned_queries_are_no_argument_of_the_call() -> None:
    module = Latents()
    steps, _ = run(module)
    assert steps.row("input").code == "input  # a parameter or another tensor of the module"
    assert steps.row("input").corner == module.latents[:4, :4].tolist()
    assert steps.row("context").axes == {"B": 2, "K": 12, "E": 24}
    assert "torch.cat([x, own], 1)" in steps.row("context").code
    assert steps.row("queries").equation == "q = x W_qᵀ + b_q"
    assert "change queries" not in [row.step for row in steps.rows]


class Slots(Written):
    """Slots that attend twice, each time with queries made of the slots before."""

    def forward(self, x: Tensor) -> Tensor:
        slots, k, v = x[:, :5], self.to_k(x), self.to_v(x)
        for _ in range(2):
            slots = (self.to_q(slots) @ k.mT * 24**-0.5).softmax(-1) @ v
        return slots


def test_queries_of_the_next_iteration_are_no_output() -> None:
    steps, _ = run(Slots())
    assert "output" not in [row.step for row in steps.rows]
    assert steps.missing["output"] == "the next projection is part of a later attention"


class Local(Written):
    """Each query sees the 5 keys around it, which ``unfold`` cuts out."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = (nn.functional.pad(each, (0, 0, 2, 2)).unfold(2, 5, 1) for each in (k, v))
        at = torch.arange(7)[:, None] + torch.arange(-2, 3)
        s = ((q.unsqueeze(-2) @ k).squeeze(-2) * SCALE).masked_fill((at < 0) | (at > 6), -math.inf)
        return self.to_out((v @ s.softmax(-1).unsqueeze(-1)).squeeze(-1).transpose(1, 2).flatten(2))


def test_local_keys_are_neither_heads_nor_causal() -> None:
    steps, _ = run(Local())
    assert steps.row("mask").note == "hidden: 174 of 210 pairs are visible (82.9%)"
    assert steps.row("weights").axes == {"B": 2, "N": 3, "N′": 7, "K": 5}
    assert steps.row("concatenation").equation == "o = the outputs of all products, joined"
    assert "heads, blocks or positions" in (steps.row("scores").note or "")


@pytest.mark.parametrize("is_after", [False, True])
def test_heads_that_are_mixed_are_refused_by_name(is_after: bool) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mix = torch.eye(3, dtype=torch.float64) + 0.1
        s = scores_of(q, k)
        p = s.softmax(-1) if is_after else torch.einsum("bhij,hg->bgij", s, mix).softmax(-1)
        return (torch.einsum("bhij,hg->bgij", p, mix) if is_after else p) @ v

    with pytest.raises(
        ValueError, match=r"a softmax takes products of two tensors of the input, but .*\(talking heads\)"
    ):
        run(attend)


class Router(Written):
    """Experts that a softmax weights, before another softmax: no attention."""

    def forward(self, x: Tensor) -> Tensor:
        experts = torch.stack([self.to_q(x), self.to_k(x)], -2)
        mixed = (self.to_v(x)[..., :2].softmax(-1).unsqueeze(-2) @ experts).squeeze(-2)
        return self.to_out(mixed).softmax(-1)


def test_a_router_has_no_scores() -> None:
    with pytest.raises(ValueError, match="no product of two tensors of the input that a softmax turns into weights"):
        run(Router())


class Buffers(Written):
    """Products and a softmax that write to buffers, which torch refuses with gradients."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        s = q.new_empty(2, 3, 7, 7)
        torch.matmul(q, k.mT, out=s)
        s *= SCALE
        s[:, :, torch.ones(7, 7).triu(1).bool()] = -math.inf
        p = torch.empty_like(s)
        torch.softmax(s, -1, out=p)
        return self.to_out((p @ v).transpose(1, 2).flatten(2))


def test_products_that_write_to_buffers_are_followed() -> None:
    steps, s = run(Buffers())
    p = s.masked_fill(torch.ones(7, 7).triu(1).bool(), -math.inf).softmax(-1)
    assert steps.held
    assert not steps.missing
    assert torch.allclose(torch.tensor(steps.row("weights").corner).double(), p[0, 0, :4, :4])
    assert (steps.row("mask").note or "").startswith("causal")


class Keeps(Written):
    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return x[keep]


class Faulty(Written):
    def forward(self, x: Tensor) -> Tensor:
        return undefined(x)  # type: ignore[name-defined]  # noqa: F821  # pyright: ignore[reportUndefinedVariable]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores_of(q, k).softmax(-1) @ v


ERRORS: dict[str, tuple[Callable[[Tensor], Trace], type[Exception], str]] = {
    "argument": (lambda x: trace(Keeps(), x), TypeError, "call=lambda module, x: module(x, keep)"),
    "fault": (lambda x: trace(Faulty(), x), TypeError, "raises NameError: name 'undefined' is not defined"),
    "width": (lambda x: trace(Written(plain), x[..., :23]), TypeError, "has 23 numbers, and the linear layers take 24"),
    "context": (lambda x: trace(Written(plain), x, x), TypeError, "call=lambda module, x: module(x)"),
    "no function": (lambda x: trace(Written(plain), x, call=3), TypeError, "call: got int, expected a function of"),  # type: ignore[arg-type]
    "arity": (lambda x: trace(Written(plain), x, call=lambda m: m), TypeError, "call: got a function with the"),  # type: ignore[arg-type,misc]
    "no call": (lambda x: trace(Written(plain), x, call=lambda m, x: None), ValueError, "call: computed nothing"),
    "no module": (lambda x: trace(None, x), ValueError, "pass the module or function to trace x through"),
    "empty": (lambda x: trace(Written(plain), x[:, :0]), ValueError, "x: has the shape [2, 0, 24], which is empty"),
    "one token": (lambda x: trace(nn.Linear(24, 24), x[:, :1]), ValueError, "if that is one token, trace two or more"),
}


@pytest.mark.parametrize(("attempt", "kind", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_name_what_helps(attempt: Callable[[Tensor], Trace], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=re.escape(message)) as caught:
        attempt(torch.randn(2, 7, 24))
    if kind is TypeError and "call=" not in message:
        assert "pass call=" not in str(caught.value)


class Registers(Written):
    """Learned tokens before the others: queries, keys and values are of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.registers = nn.Parameter(torch.randn(3, 24))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.registers.expand(len(x), -1, -1), x], 1)
        q, k, v = self.heads(x)
        return self.to_out(plain(q, k, v).transpose(1, 2).flatten(2))


def test_learned_tokens_before_others_are_one_input() -> None:
    steps, _ = run(Registers())
    assert steps.row("input").axes == {"B": 2, "Q": 10, "E": 24}
    assert "context" not in [row.step for row in steps.rows]


@pytest.mark.parametrize("order", [lambda y: y.roll(1, 2), lambda y: y.flip(2), lambda y: y.flip(0)])
def test_outputs_in_another_order_than_their_positions_are_not_confirmed(order: Callable[[Tensor], Tensor]) -> None:
    """A module may restore their order later, so this is no error either."""
    plain, joined = (
        [row for row in run(attend)[0].rows if row.invariant and "own heads" in row.invariant]
        for attend in (
            lambda q, k, v: scores_of(q, k).softmax(-1) @ v,
            lambda q, k, v: order(scores_of(q, k).softmax(-1) @ v),
        )
    )
    assert [row.held for row in plain] == [True]
    assert [row.held for row in joined] == [None]
    assert "another order than the positions" in str(joined[0].invariant)

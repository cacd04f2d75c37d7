"""check: what is done to the logits between the product and the softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import check

Step = Callable[[Tensor], Tensor]


class Mapped(nn.Module):
    """Attention of three heads of width 8, with a step between the product and the softmax."""

    def __init__(self, logits: Step, *, causal: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))
        self.logits, self.causal = logits, causal

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.logits(q @ k.mT * 8**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (3, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        s = self.scores(q, k)
        if self.causal:
            s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Cosine(Mapped):
    """Attention whose products are divided by the lengths of queries and keys after the product."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return 10 * (q @ k.mT) / (q.norm(dim=-1)[..., None] * k.norm(dim=-1)[..., None, :])


class Distances(Mapped):
    """Attention whose logits are minus the squared distance of query and key."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return 2 * q @ k.mT - q.square().sum(-1)[..., None] - k.square().sum(-1)[..., None, :]


class QueryTemperature(Mapped):
    """Attention whose queries have a temperature each."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * 8**-0.5 * q[..., :1].sigmoid()


def standardise(s: Tensor) -> Tensor:
    return (s - s.mean(-1, keepdim=True)) / s.std(-1, keepdim=True)


def place_bias(s: Tensor) -> Tensor:
    place = torch.arange(s.shape[-1])
    return -0.3 * (place[:, None] - place).abs().to(s)


CHANGED: list[tuple[Step, str]] = [
    (torch.abs, "rise with the magnitude of q·k"),
    (torch.square, "rise with the magnitude of q·k"),
    (lambda s: -s.abs(), "fall with the magnitude of q·k"),
    (lambda s: s.clamp(max=1), "one side"),
    (F.relu, "one side"),
    (standardise, "other logits of the row"),
    (lambda s: F.layer_norm(s, s.shape[-1:]), "other logits of the row"),
    (lambda s: s / s.abs().amax(-1, keepdim=True), "other logits of the row"),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
@pytest.mark.parametrize(("step", "text"), CHANGED)
def test_a_map_of_the_logits_that_is_no_cap_is_found(step: Step, text: str, seed: int, causal: bool) -> None:
    torch.manual_seed(seed)
    findings = check(Mapped(step, causal=causal))
    late = ("looks-into-the-future",) if causal and "row" in text else ()  # the row is scaled before it is masked
    assert findings.names == ("logits-changed", *late), str(findings)
    assert text in findings["logits-changed"].seen
    assert "scale" in findings.not_tested or "scale" in " ".join(findings.understood)


ACCEPTED: list[tuple[type[Mapped], Step, str]] = [
    (Mapped, lambda s: 30 * torch.tanh(s / 30), "rise with q·k"),
    (Mapped, lambda s: torch.tanh(8 * s), "rise with q·k"),
    (Mapped, lambda s: torch.atan(s), "rise with q·k"),
    (Mapped, lambda s: s.clamp(-0.5, 0.5), "rise with q·k"),
    (Mapped, lambda s: 3 * torch.tanh(s / 3) + place_bias(s), "smaller logit"),
    (Cosine, torch.abs, "smaller logit"),
    (Distances, torch.abs, "smaller logit"),
    (Mapped, lambda s: s**3, "rise with q·k"),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("kind", "step", "text"), ACCEPTED)
def test_maps_that_may_be_meant_are_described(kind: type[Mapped], step: Step, text: str, causal: bool) -> None:
    torch.manual_seed(1)
    findings = check(kind(step, causal=causal))
    assert findings.names == (), str(findings)
    scale = findings.not_tested.get("scale", "")
    assert text in scale or "scale" in " ".join(findings.understood), findings.not_tested


def fold(threshold: float) -> Step:
    return lambda s: torch.where(s > threshold, 2 * threshold - s, s)


def cut_in_one_head(s: Tensor) -> Tensor:
    return torch.cat([s[:, :2], s[:, 2:].sin()], 1)


def square_first_queries(s: Tensor) -> Tensor:
    return torch.cat([s[:, :, :2].square(), s[:, :, 2:]], 2)


NOT_MONOTONE: list[tuple[Step, str]] = [
    (torch.sin, "rise with q·k near"),
    (lambda s: torch.sin(3 * s), "rise with q·k near"),
    (torch.cos, "rise with"),
    (lambda s: s * (1 - s), "rise with q·k near"),
    (fold(0.5), "rise with q·k near"),
    (fold(4.0), "rise with q·k near"),  # of large logits alone
    (lambda s: torch.sin(3 * s) + place_bias(s), "rise with q·k near"),
    (lambda s: torch.remainder(s, 1.0), "jump"),
    (cut_in_one_head, "logits of head 2 rise with q·k near"),
    (square_first_queries, "rise with q·k near"),
]


@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize(("step", "text"), NOT_MONOTONE)
def test_a_map_that_falls_somewhere_is_found(step: Step, text: str, causal: bool) -> None:
    torch.manual_seed(1)
    findings = check(Mapped(step, causal=causal))
    assert findings.names == ("logits-changed",), str(findings)
    assert text in findings["logits-changed"].seen


def test_a_map_that_falls_somewhere_is_found_in_a_softmax_of_float32() -> None:
    torch.manual_seed(1)
    findings = check(Mapped(lambda s: torch.sin(2 * s).float().double()))
    assert findings.names == ("logits-changed",), str(findings)


# ---------------------------------------------------------------- scales


class Temperatures(Mapped):
    """Attention with a learned temperature for each head."""

    def __init__(self) -> None:
        super().__init__(lambda s: s)
        self.temperature = nn.Parameter(torch.tensor([0.5, 0.8, 2.0]))

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) * self.temperature[:, None, None]


def scale_some_heads(s: Tensor) -> Tensor:
    return torch.cat([s[:, :2], s[:, 2:] * 8**0.5], 1)


def scale_some_queries(s: Tensor) -> Tensor:
    factors = torch.ones(s.shape[-2]).to(s)
    factors[::2] = 3
    return s * factors[:, None]


def scale_first_entry(s: Tensor) -> Tensor:
    factors = torch.ones(len(s)).to(s)
    factors[0] = 3
    return s * factors[:, None, None, None]


def scale_queries(s: Tensor) -> Tensor:
    return s * (torch.arange(s.shape[-2]).to(s) + 2).log()[:, None]


SCALES: list[tuple[Callable[[], nn.Module], str, str]] = [
    (Temperatures, "unusual", "each head has its own scale: 0.1768, 0.2828, 0.7071; expected 0.3536"),
    (lambda: Mapped(scale_some_heads), "wrong", "each head has its own scale: 0.3536, 0.3536, 1; expected 0.3536"),
    (lambda: Mapped(lambda s: torch.cat([-s[:, :1], s[:, 1:]], 1)), "wrong", "-0.3536, 0.3536"),
    (lambda: Mapped(scale_queries), "unusual", "each query has its own factor of q·k, from 0.4901 to 0.7352"),
    (lambda: Mapped(scale_some_queries), "wrong", "each query has its own factor of q·k, from 0.3536 to 1.061"),
    (lambda: Mapped(scale_first_entry), "wrong", "each query has its own factor of q·k, from 0.3536 to 1.061"),
    (lambda: Mapped(lambda s: scale_queries(s) + place_bias(s)), "unusual", "each query has its own factor of q·k"),
    (
        lambda: Mapped(lambda s: s * torch.linspace(0.5, 1.4, s.shape[-1]).to(s)),
        "unusual",
        "each key has its own factor of q·k",
    ),
    (lambda: QueryTemperature(torch.abs), "unusual", "each query has its own factor of q·k"),
]


@pytest.mark.parametrize(("build", "severity", "text"), SCALES)
def test_scales_that_differ_are_found(build: Callable[[], nn.Module], severity: str, text: str) -> None:
    torch.manual_seed(1)
    findings = check(build())
    assert findings.names == ("scale-not-uniform",), str(findings)
    assert findings["scale-not-uniform"].severity == severity
    assert text in findings["scale-not-uniform"].seen


@pytest.mark.parametrize(
    ("step", "name"),
    [(torch.sin, "logits-changed"), (scale_some_heads, "scale-not-uniform"), (scale_queries, "scale-not-uniform")],
)
def test_logits_of_a_function_are_judged_as_those_of_a_module(step: Step, name: str) -> None:
    torch.manual_seed(1)
    module = Mapped(step).double().requires_grad_(False)

    def attend(x: Tensor) -> Tensor:
        return module(x)

    assert check(attend, embed_dim=24).names == (name,)


def test_the_scale_of_the_largest_two_keys_is_not_tested_for_the_right_reason() -> None:
    torch.manual_seed(0)
    largest = Mapped(lambda s: s.masked_fill(s < s.topk(2).values[..., -1:], -math.inf))
    reason = check(largest).not_tested["scale"]
    keys = "in some head, no query has the same two visible keys for two inputs"
    assert reason == f"{keys}: which keys are visible depends on the input"


class AddedConstant(Mapped):
    """Attention that adds a number to its weights after the softmax, and hides by a mask before it."""

    def __init__(self, logits: Step, *, masked: bool) -> None:
        super().__init__(logits)
        self.masked = masked

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (3, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        s = self.scores(q, k)
        if mask is not None and self.masked:
            s = s.masked_fill(~mask, torch.finfo(s.dtype).min)
        return self.o(((s.softmax(-1) + 1e-3) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("masked", [True, False])
def test_a_number_added_to_the_weights_is_no_scale_and_ignores_no_mask(masked: bool) -> None:
    torch.manual_seed(0)
    findings = check(AddedConstant(lambda s: s, masked=masked), mask_means="keep")
    ignored = () if masked else ("mask-ignored",)
    assert set(findings.names) == {"rows-do-not-sum-to-one", *ignored}, str(findings)
    assert "0.001 is added to each weight" in findings["rows-do-not-sum-to-one"].seen
    assert any("scale 0.3536" in line for line in findings.understood)


@pytest.mark.parametrize("cap", [30.0, 50.0, 100.0])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (4, 5))])
def test_a_cap_that_bends_the_logits_a_little_is_accepted(cap: float, seed: int) -> None:
    torch.manual_seed(seed)
    module = Capped(cap)
    findings = check(module, scale=1 / 12)
    assert findings.names == (), str(findings)


class Capped(nn.Module):
    """Eight heads of sixteen numbers, with a cap on the logits, as in Gemma 2."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(128, 128, bias=False) for _ in range(4))
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (8, 16)).transpose(1, 2) for each in (self.q, self.k, self.v))
        s = torch.tanh(q @ k.mT / 12 / self.cap) * self.cap
        return self.o((s.softmax(-1) @ v).transpose(1, 2).flatten(2))

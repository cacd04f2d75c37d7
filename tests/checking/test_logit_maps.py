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
@pytest.mark.parametrize("seed", range(3))
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
    (QueryTemperature, torch.abs, "factor of q·k of its own"),
]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("kind", "step", "text"), ACCEPTED)
def test_maps_that_may_be_meant_are_described(kind: type[Mapped], step: Step, text: str, causal: bool) -> None:
    torch.manual_seed(1)
    findings = check(kind(step, causal=causal))
    assert findings.names == (), str(findings)
    scale = findings.not_tested.get("scale", "")
    assert text in scale or "scale" in " ".join(findings.understood), findings.not_tested


def test_the_scale_of_the_largest_two_keys_is_not_tested_for_the_right_reason() -> None:
    torch.manual_seed(0)
    largest = Mapped(lambda s: s.masked_fill(s < s.topk(2).values[..., -1:], -math.inf))
    reason = check(largest).not_tested["scale"]
    assert reason == "no query of some head sees the same two keys for two inputs: visible keys depend on the input"


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

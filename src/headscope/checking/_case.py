"""The state of a check: the subject, the caller's options, one forward pass, and the findings so far."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from headscope.checking import _weights as weights
from headscope.checking._catalogue import CATALOGUE, Severity
from headscope.checking._head_layout import OUT_OF_PLACE, Heads
from headscope.checking._subject import Call, Run, Subject
from headscope.checking._weights import Slope

MaskMeans = Literal["keep", "hide", "add"]


@dataclass(frozen=True)
class Options:
    """The options of the caller; None = not specified."""

    heads: int | None
    causal: bool | None
    batch_first: bool | None
    mask_means: MaskMeans | None
    scale: float | None
    length: int | None
    decode: Call | None
    reproducible: bool


@dataclass(frozen=True)
class Observation:
    """The evidence of one mistake, with its numbers and positions, and the severity.

    Attributes:
        remedy: how to fix it, in words and as a line of code, where the catalogue's remedy does not fit the cause.
    """

    severity: Severity
    evidence: str
    remedy: tuple[str, str] | None = None


@dataclass(frozen=True)
class WorkingMask:
    """A mask argument that works.

    Attributes:
        argument: its name.
        kind: "pairs", "entries" (pairs of each batch entry) or "keys".
        build: converts the visible pairs (True = attend), [B, 1, T, T] or [B, T], to the argument.
    """

    argument: str
    kind: str
    build: Callable[[Tensor], Any]


@dataclass
class Case:
    """One check.

    Attributes:
        observations: by the name of the finding.
        not_tested: test that could not be run -> reason.
        causes: test that could not be run -> the finding that prevented it, where one did.
        understood: how the subject was called and what it computes, in words.
        size: the size of the input with which weights are neither even nor one-hot.
        added: the number that was added to each weight after the softmax.
        unmasked: whether every query attends to every key without a mask.
        causal: whether no query attends to a later key; None if that is not known.
        allowed: the visible pairs without a mask, [1, Q, K], if the module is causal or was intended to be.
        masks: the mask arguments that work.
    """

    subject: Subject
    options: Options
    observations: dict[str, Observation] = field(default_factory=dict[str, Observation])
    not_tested: dict[str, str] = field(default_factory=dict[str, str])
    causes: dict[str, str] = field(default_factory=dict[str, str])
    understood: list[str] = field(default_factory=list[str])
    size: float = 1.0
    base: Run | None = None
    other: Run | None = None
    slope: Slope | None = None
    added: float = 0.0
    unmasked: bool = False
    causal: bool | None = None
    allowed: Tensor | None = None
    masks: list[WorkingMask] = field(default_factory=list[WorkingMask])

    def report(
        self, name: str, evidence: str, severity: Severity | None = None, remedy: tuple[str, str] | None = None
    ) -> None:
        """Record an observation; the first of a name counts."""
        self.observations.setdefault(name, Observation(severity or CATALOGUE[name].severity, evidence, remedy))

    def amend(self, name: str, text: str) -> None:
        """Replace the evidence of an observation; ``{}`` in the text stands for the earlier evidence."""
        earlier = self.observations[name]
        self.observations[name] = replace(earlier, evidence=text.format(earlier.evidence))

    def skip(self, test: str, reason: str, cause: str = "") -> None:
        """Record a test that could not be run; ``cause`` is the finding that prevented it, or ""."""
        self.not_tested[test] = reason
        if cause:
            self.causes[test] = cause

    def skip_without_heads(self, *tests: str) -> None:
        """Record tests that need heads, which could not be identified."""
        faults = () if self.base is None else self.base.faults
        cause = next((fault.name for fault in faults if fault.name in OUT_OF_PLACE), "")
        for test in tests:
            self.skip(test, self.reason_without_heads, "dropout-in-eval" if self.random else cause)

    def first_of(self, names: Container[str]) -> str:
        """Return the first observation with one of these names; "" if there is none."""
        return next((name for name in self.observations if name in names), "")

    @property
    def x(self) -> Tensor:
        return self.subject.input(1, self.size)

    @property
    def heads(self) -> Heads | None:
        return None if self.base is None else self.base.heads

    @property
    def other_heads(self) -> Heads | None:
        """The heads for another input."""
        return None if self.other is None else self.other.heads

    def without_added(self, heads: Heads) -> Heads:
        """Return the heads with the weights before a number was added to each."""
        return replace(heads, p=weights.remove_added_number(heads.p, self.added))

    @property
    def random(self) -> bool:
        return "dropout-in-eval" in self.observations

    @property
    def logit(self) -> Tensor | None:
        """The logits without a mask, up to a number for each row: [B, H, Q, K]; None where they are not known."""
        if self.heads is None or self.slope is None or self.slope.biased:
            return None
        return self.heads.raw * self.slope.of_raw[:, None, None]

    @property
    def reason_without_heads(self) -> str:
        """Why the heads could not be identified."""
        if self.random:
            return "dropout is active"
        return "the weights could not be observed" if self.base is None else self.base.reason


def follow_forward_passes(case: Case) -> None:
    """Follow two forward passes, with inputs of a size that makes weights neither even nor one-hot."""
    if case.random:
        return
    subject = case.subject
    base = subject.follow(case.x)
    for _ in range(2):
        wide = 0.0 if base.heads is None else weights.largest_difference(base.heads.p)
        if 0.5 < wide < 16 or wide == 0:
            break
        case.size = min(max(case.size * (4 / wide) ** 0.5, 1e-3), 1e3)
        base = subject.follow(case.x)
    case.base, case.other = base, subject.follow(subject.input(2, case.size))
    plain = subject.run(case.x)
    both = torch.isfinite(plain) & torch.isfinite(base.out)
    off = (plain - base.out)[both].abs()
    # a fused kernel may round differently from its definition
    if len(off) and float(off.max()) > 100 * subject.tolerance * float(plain[both].abs().max()):
        case.base = None

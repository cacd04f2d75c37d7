"""What a check knows so far: the subject, what was asked, one forward pass, and what was found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from headscope.checking import _weights as weights
from headscope.checking._catalogue import WORDS, Severity
from headscope.checking._head_layout import Heads
from headscope.checking._subject import Call, Run, Subject
from headscope.checking._weights import Slope

MaskMeans = Literal["keep", "hide", "add"]


@dataclass(frozen=True)
class Asked:
    """What the caller said of the subject; None = not said."""

    heads: int | None
    causal: bool | None
    batch_first: bool | None
    mask_means: MaskMeans | None
    scale: float | None
    length: int | None
    decode: Call | None


@dataclass
class Case:
    """One check.

    Attributes:
        found: by name, the severity and what was seen.
        not_tested: what could not be tested -> why.
        understood: how the subject was called and what it does, in words.
        size: of the input, so that the weights are neither even nor one-hot.
        causal: whether no query sees a later key; None if that is not known.
        allowed: what may be seen without a mask, [1, Q, K], if it is causal or was meant to be.
        masked: argument, shape and meaning of each mask that works: (name, "pairs" or "keys", builder).
    """

    subject: Subject
    asked: Asked
    found: dict[str, tuple[Severity, str]] = field(default_factory=dict[str, tuple[Severity, str]])
    not_tested: dict[str, str] = field(default_factory=dict[str, str])
    understood: list[str] = field(default_factory=list[str])
    size: float = 1.0
    base: Run | None = None
    other: Run | None = None
    slope: Slope | None = None
    causal: bool | None = None
    allowed: Tensor | None = None
    masked: list[tuple[str, str, Any]] = field(default_factory=list[tuple[str, str, Any]])

    def find(self, name: str, seen: str, severity: Severity | None = None) -> None:
        """Note a finding; the first of a name counts."""
        self.found.setdefault(name, (severity or WORDS[name].severity, seen))

    @property
    def x(self) -> Tensor:
        return self.subject.input(1, self.size)

    @property
    def heads(self) -> Heads | None:
        return None if self.base is None else self.base.heads

    @property
    def random(self) -> bool:
        return "dropout-in-eval" in self.found

    @property
    def logit(self) -> Tensor | None:
        """The logits without mask, up to a number for each row: [B, H, Q, K]; None where they are not known."""
        if self.heads is None or self.slope is None or self.slope.biased:
            return None
        return self.heads.raw * self.slope.of_raw[:, None, None]

    def why_no_heads(self) -> str:
        if self.random:
            return "dropout is active"
        return "the weights were not seen" if self.base is None else self.base.why


def look(case: Case) -> None:
    """Tap two forward passes, with inputs of a size that makes weights neither even nor one-hot."""
    if case.random:
        return
    subject = case.subject
    base = subject.tapped(case.x)
    for _ in range(2):
        wide = 0.0 if base.heads is None else weights.spread(base.heads.p)
        if 0.5 < wide < 16 or wide == 0:
            break
        case.size = min(max(case.size * (4 / wide) ** 0.5, 1e-3), 1e3)
        base = subject.tapped(case.x)
    case.base, case.other = base, subject.tapped(subject.input(2, case.size))
    plain = subject.run(case.x)
    both = torch.isfinite(plain) & torch.isfinite(base.out)
    off = (plain - base.out)[both].abs()
    # a kernel that was spelled out may do something else
    if len(off) and float(off.max()) > 100 * subject.tolerance * float(plain[both].abs().max()):
        case.base = None

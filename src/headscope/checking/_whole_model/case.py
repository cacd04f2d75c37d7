"""The state of a check of a model: the subject, its inputs, and the findings so far."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from headscope.checking._case import Observation
from headscope.checking._catalogue import Severity
from headscope.checking._findings import SEVERITIES
from headscope.checking._whole_model.catalogue import MODEL_CATALOGUE
from headscope.checking._whole_model.inputs import ModelInputs
from headscope.checking._whole_model.subject import ModelSubject, is_aligned


@dataclass(frozen=True)
class ModelOptions:
    """The options of the caller; None = not specified."""

    causal: bool | None
    length: int | None
    flex: bool
    reproducible: bool


@dataclass
class ModelCase:
    """One check of a model.

    Attributes:
        original: the caller's model, which is copied again in half precision.
        subject: the copy in float64.
        own: the copy in the model's own dtype; None if that does not run on the CPU.
        entry: one entry of the inputs, without padding.
        out: the output for ``entry``.
        causal: whether no output depends on a later token; None if that is not known.
        unusable: why outputs cannot be compared; "" = they can.
        lengths: the masks of which only the sum counts; what they cover is padded on the right.
        edges: the masks and sides, left = True, where the output is read from padding; other questions omit them.
        observations: by the name of the finding.
        understood: how the model was called and what it computes, in words.
        not_tested: question that could not be asked -> reason.
    """

    original: nn.Module
    subject: ModelSubject
    own: ModelSubject | None
    entry: ModelInputs
    options: ModelOptions
    out: Tensor
    causal: bool | None = None
    unusable: str = ""
    lengths: set[str] = field(default_factory=set[str])
    edges: set[tuple[str, bool]] = field(default_factory=set[tuple[str, bool]])
    observations: dict[str, Observation] = field(default_factory=dict[str, Observation])
    understood: list[str] = field(default_factory=list[str])
    not_tested: dict[str, str] = field(default_factory=dict[str, str])

    def report(self, name: str, evidence: str, severity: Severity | None = None) -> None:
        """Record an observation; of a name, the first of the most severe counts."""
        severity = severity or MODEL_CATALOGUE[name].severity
        earlier = self.observations.get(name)
        if earlier is None or SEVERITIES.index(severity) < SEVERITIES.index(earlier.severity):
            self.observations[name] = Observation(severity, evidence)

    @property
    def aligned(self) -> bool:
        """Whether the output has one row for each token of the main sequence."""
        return is_aligned(self.out, self.entry)

    def gap(self, one: Tensor, other: Tensor) -> float:
        """Return the largest difference of two outputs; infinity if their shapes differ or one alone is not finite."""
        if one.shape != other.shape:
            return float("inf")
        off = (one - other).abs()
        both = ~torch.isfinite(one) & ~torch.isfinite(other)
        off = off.masked_fill(both, 0.0).nan_to_num(float("inf"), float("inf"))
        return float(off.max()) if off.numel() else 0.0

    def differ(self, one: Tensor, other: Tensor) -> bool:
        """Return whether two outputs differ by more than rounding."""
        return self.gap(one, other) > self.subject.tolerance

    def measured(self, gap: float) -> str:
        """Return a difference in words, with the largest output and what rounding explains."""
        subject = self.subject
        return f"by up to {gap:.3g} (outputs up to {subject.size:.3g}; rounding explains {subject.noise:.1g})"

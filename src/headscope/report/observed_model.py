"""What a report needs of a model that was observed; ``headscope.Recording`` is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from headscope.stats import HeadStats
from headscope.stats._origin import Part

__all__ = ["Description", "Errors", "ObservedModel", "TracedSteps"]


class Errors(Protocol):
    """The errors of some rows against float64; see ``headscope.watching.Verified``.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, watch
        >>> from headscope.report.observed_model import Errors
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model, verify=3) as recording:
        ...     _ = model(torch.randn(1, 4, 8))
        >>> errors: Errors = recording.about.verified["MultiHeadAttention"]
        >>> errors.rows, errors.fits
        (3, True)
    """

    @property
    def rows(self) -> int:
        """How many rows were verified."""
        ...

    @property
    def output(self) -> float | None:
        """The relative error of the output."""
        ...

    @property
    def output_bound(self) -> float | None:
        """The largest one that rounding explains."""
        ...

    @property
    def statistics(self) -> float | None:
        """The relative error of the row quantities."""
        ...

    @property
    def statistics_bound(self) -> float | None:
        """The largest one that rounding explains."""
        ...

    @property
    def fits(self) -> bool:
        """Whether no error exceeds its bound."""
        ...


@runtime_checkable
class TracedSteps(Protocol):
    """The steps of a forward pass; see ``headscope.Trace``.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, trace
        >>> from headscope.report.observed_model import TracedSteps
        >>> steps: TracedSteps = trace(MultiHeadAttention(8, 2), torch.randn(1, 4, 8))
        >>> steps.to_dict()["rows"][0]["step"]
        'input'
    """

    @property
    def title(self) -> str:
        """The traced call, in one line."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with the steps as "rows"."""
        ...


class Description(Protocol):
    """The origin of the statistics; see ``headscope.watching.About``.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, watch
        >>> from headscope.report.observed_model import Description
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model) as recording:
        ...     _ = model(torch.randn(1, 4, 8))
        >>> about: Description = recording.about
        >>> about.model, about.kinds, about.forwards
        ('MultiHeadAttention', {'MultiHeadAttention': 'self'}, 1)
    """

    @property
    def model(self) -> str:
        """The name of the model."""
        ...

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the observation."""
        ...

    @property
    def versions(self) -> Mapping[str, str]:
        """The versions of the packages."""
        ...

    @property
    def kinds(self) -> Mapping[str, str]:
        """Layer -> "self" or "cross"."""
        ...

    @property
    def texts(self) -> tuple[str, ...] | None:
        """The text of each token."""
        ...

    @property
    def forwards(self) -> int:
        """How many forward passes were observed."""
        ...

    @property
    def ran(self) -> int:
        """How many forward passes ran."""
        ...

    @property
    def verified(self) -> Mapping[str, Errors]:
        """Layer -> the errors of some rows against float64."""
        ...

    @property
    def other_layers(self) -> Mapping[str, str]:
        """Layer without a softmax over keys -> what it is."""
        ...

    @property
    def part(self) -> Mapping[str, Part]:
        """Layer -> the part of its heads that was recorded."""
        ...

    @property
    def run_texts(self) -> tuple[tuple[str, ...], ...]:
        """The text of each token of each forward pass, where they read different texts."""
        ...


class ObservedModel(Protocol):
    """The statistics of a model's heads, and what they are of.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, watch
        >>> from headscope.report.observed_model import ObservedModel
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model) as recording:
        ...     _ = model(torch.randn(1, 4, 8))
        >>> observed: ObservedModel = recording
        >>> observed.stats.layers, observed.about.model
        (('MultiHeadAttention',), 'MultiHeadAttention')
    """

    @property
    def stats(self) -> HeadStats:
        """The statistics of each layer."""
        ...

    @property
    def about(self) -> Description:
        """What the statistics are of."""
        ...

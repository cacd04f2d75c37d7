"""Statistics that take part in a loss: tensors with a graph, by batch entry."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["DIFFERENTIABLE", "DifferentiableStats"]

DIFFERENTIABLE = ("entropy", "received", "segments")
"""The statistics that may have a gradient."""


@dataclass(frozen=True, eq=False, repr=False)
class DifferentiableStats:
    """Statistics with a graph, for a loss: the result of ``attend(observe=..., differentiable=...)``.

    Gradients flow to q, k, bias and sinks, once: there is no second derivative. All are float32 (float64 for float64).
    B stands for all leading axes of ``lse``.

    Attributes:
        counted: which rows count, boolean [B, H, Q]: as ``HeadStats`` counts them.

    Examples:
        >>> import torch
        >>> from headscope import Observe, attend, masks
        >>> q, k, v = torch.randn(3, 1, 2, 5, 8, requires_grad=True)
        >>> attended = attend(q, k, v, mask=masks.causal(), observe=Observe(), differentiable=("entropy",))
        >>> statistics = attended.stats.differentiable
        >>> mean = statistics.entropy.sum(-1) / statistics.counted.sum(-1)  # of each batch entry and head
        >>> (0.5 - mean).clamp_min(0).sum().backward()
        >>> statistics
        DifferentiableStats(counted [1, 2, 5], entropy [1, 2, 5])
    """

    counted: Tensor
    _entropy: Tensor | None = None
    _received: Tensor | None = None
    _segments: Tensor | None = None
    _segment_rows: Tensor | None = None

    def __repr__(self) -> str:
        values = {"entropy": self._entropy, "received": self._received, "segments": self._segments}
        shown = {"counted": self.counted, **{name: x for name, x in values.items() if x is not None}}
        return f"DifferentiableStats({', '.join(f'{name} {list(x.shape)}' for name, x in shown.items())})"

    @property
    def entropy(self) -> Tensor:
        """-Σ p ln p of each row, [B, H, Q], in nats; 0, with zero gradient, in rows that do not count."""
        return _present("entropy", self._entropy)

    @property
    def received(self) -> Tensor:
        """The sum over counted rows of the weight on each key, [B, H, K], by the keys of the call."""
        return _present("received", self._received)

    @property
    def segments(self) -> Tensor:
        """The mean over counted rows of a segment of the weight on each segment, [B, H, S, S]: query, then key.

        0, with zero gradient, for a segment without counted rows; see ``segment_rows``.
        """
        return _present("segments", self._segments)

    @property
    def segment_rows(self) -> Tensor:
        """The number of counted rows in each segment, int64 [B, H, S]."""
        return _present("segments", self._segment_rows)


def _present(name: str, values: Tensor | None) -> Tensor:
    if values is None:
        raise ValueError(f'{name}: has no gradient here; expected its name in differentiable=("{name}", ...)')
    return values


def requested(stats: DifferentiableStats | None) -> DifferentiableStats:
    """Return statistics that a call requested.

    Raises:
        ValueError: there are none.
    """
    if stats is None:
        raise ValueError(
            'differentiable: was not requested; attend with observe=... and differentiable=("entropy", "received", '
            '"segments"), and use the result of that call itself'
        )
    return stats


DifferentiableStats.__module__ = "headscope.stats"  # its public path

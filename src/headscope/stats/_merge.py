"""``merge`` as a function."""

from __future__ import annotations

from headscope.stats._head_stats import HeadStats

__all__ = ["merge"]


def merge(first: HeadStats, *others: HeadStats) -> HeadStats:
    """Return the statistics of the runs of all; see ``HeadStats.merge``.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> from headscope.stats import merge
        >>> q = torch.zeros(1, 2, 4, 8)
        >>> merge(observe(q, q), observe(q, q)).rows
        tensor([8, 8])
    """
    return HeadStats.merge(first, *others)

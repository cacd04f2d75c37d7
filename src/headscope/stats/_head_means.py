"""Means of each head over the rows of dense weights, and the rows that are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["HeadMeans", "broken_rows", "head_means"]


class HeadMeans(NamedTuple):
    """Means of row quantities over the rows where they are defined, batch entries pooled.

    Attributes:
        mean: name -> float64 [H]; NaN where no row of the head has the quantity.
        rows: name -> integers [H], the number of rows of each mean.

    Examples:
        >>> import torch
        >>> from headscope.stats import head_means, row_statistics
        >>> means = head_means(row_statistics(torch.eye(4)[None, None]))
        >>> means.mean["self"].tolist(), means.rows["previous"].tolist()
        ([1.0], [3])
    """

    mean: dict[str, Tensor]
    rows: dict[str, Tensor]


def head_means(rows: Mapping[str, Tensor]) -> HeadMeans:
    """Return the mean of each row quantity over the rows that have it, and their number.

    Shapes: name -> [B, H, Q] -> name -> [H]; rows of all batch entries weigh the same.

    Examples:
        >>> import torch
        >>> from headscope.stats import head_means, row_statistics
        >>> rows = row_statistics(torch.full((2, 3, 4, 4), 0.25))  # B, H, Q, K
        >>> head_means(rows).mean["max_weight"].tolist()
        [0.25, 0.25, 0.25]
    """
    mean: dict[str, Tensor] = {}
    count: dict[str, Tensor] = {}
    for name, values in rows.items():
        flat = values.double().movedim(1, 0).flatten(1)  # [H, B * Q]
        defined = ~flat.isnan()
        count[name] = defined.sum(-1)
        mean[name] = torch.where(defined, flat, 0.0).sum(-1) / count[name]  # 0 / 0 = NaN: no row has it
    return HeadMeans(mean, count)


def broken_rows(p: Tensor) -> Tensor:
    """Return how many rows of each head hold a NaN or infinite weight, [H]: statistics exclude these rows.

    Examples:
        >>> import torch
        >>> from headscope.stats import broken_rows
        >>> p = torch.full((1, 2, 4, 4), 0.25)
        >>> p[0, 1, 3] = torch.nan
        >>> broken_rows(p)
        tensor([0, 1])
    """
    return (~p.isfinite().all(-1)).sum((0, 2))


HeadMeans.__module__ = "headscope.stats"  # its public path

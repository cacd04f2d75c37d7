"""Under vmap: one run of an operator for each entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def run_each_entry(
    run: Callable[..., Any], info: Any, in_dims: tuple[Any, ...], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Run once for each entry, because each may have another mask, and stack the results.

    Without entries, one run over zeros gives the sizes. Takes and returns what ``torch.autograd.Function.vmap`` does.
    """
    if info.batch_size == 0:
        args = tuple(
            x.new_zeros((*x.shape[:dim], 1, *x.shape[dim:][1:])) if isinstance(dim, int) else x
            for x, dim in zip(args, in_dims, strict=True)
        )
    each = [
        run(*(x.select(dim, n) if isinstance(dim, int) else x for x, dim in zip(args, in_dims, strict=True)))
        for n in range(max(1, info.batch_size))
    ]
    results = (torch.stack(parts)[: info.batch_size] for parts in zip(*each, strict=True))
    return tuple(results), (0,) * len(each[0])

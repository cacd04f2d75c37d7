"""The arguments of torch's operations: which are tensors, which are numbers, and which name means what."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

MOVES = {
    *("clone", "_to_copy", "cat", "stack", "index_select", "index", "gather", "repeat", "flip", "roll", "copy"),
    *("constant_pad_nd", "_reshape_copy", "contiguous", "expand_copy", "slice_copy", "select_copy"),
}
REDUCTIONS = {
    *("sum", "mean", "amax", "amin", "max", "min", "logsumexp", "norm", "linalg_vector_norm", "var", "std", "argmax"),
    *("prod", "any", "all", "mv", "dot", "addmv", "convolution", "cumsum", "sort", "topk", "embedding"),
}
FACTORIES = {"empty", "zeros", "full", "new_zeros", "new_empty", "zeros_like", "empty_like", "new_full", "ones"}


def list_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among arguments, and those in lists and tuples of them."""
    tensors: list[Tensor] = []
    for x in (*args, *kwargs.values()):
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, (list, tuple)):
            tensors += [y for y in x if isinstance(y, Tensor)]
    return tensors


def replace_tensors(args: Any, replacement: Callable[[Tensor], Tensor]) -> Any:
    """Return arguments with each tensor replaced, also in lists and tuples."""
    if isinstance(args, Tensor):
        return replacement(args)
    if isinstance(args, (list, tuple)):
        return type(args)(replace_tensors(x, replacement) for x in args)
    return args


def broadcasts(x: Tensor, out: Tensor) -> bool:
    """Return whether x has a number for each number of out, or one for several along an axis."""
    if x.ndim > out.ndim:
        return False
    return all(n in (1, m) for n, m in zip(reversed(x.shape), reversed(out.shape), strict=False))


def scale_of(name: str, args: tuple[Any, ...]) -> float | None:
    """Return the number by which a product or quotient with one number scales; None for other operations."""
    if name not in ("mul", "div", "multiply", "divide", "true_divide") or len(args) < 2:
        return None
    first, second = args[0], args[1]
    if name == "mul" and isinstance(first, Tensor) and first.numel() == 1 and isinstance(second, Tensor):
        first, second = second, first
    is_one = isinstance(second, (int, float)) or (isinstance(second, Tensor) and second.numel() == 1)
    scale = float(second) if is_one else 0.0
    if not scale or not math.isfinite(scale):
        return None
    return scale if name in ("mul", "multiply") else 1 / scale

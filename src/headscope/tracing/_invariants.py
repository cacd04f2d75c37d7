"""The checks of a trace: a sample of rows, comparison in float64, and the count of visible pairs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headscope._attend.interface import accumulate_dtype
from headscope.masks import Band, Mask, Plan, Prefix

MATRIX = 1 << 21  # most weights that one trace checks; of larger matrices, it checks a sample of rows
PRODUCTS = 1 << 27  # most multiplications of one check in float64: some tens of milliseconds
COUNTED = 1 << 28  # most pairs of a mask that are counted one by one


class Check(NamedTuple):
    """A claim about a step, and its measured outcome (None without values)."""

    claim: str
    outcome: str | None = None
    held: bool | None = None

    @property
    def text(self) -> str:
        return self.claim if self.outcome is None else f"{self.claim}: {self.outcome}"


class Sample(NamedTuple):
    """The checked rows of the weights: every combination of these batch entries, heads and queries."""

    b: Tensor
    h: Tensor
    i: Tensor
    whole: bool


def sample(batch: int, heads: int, queries: int, keys: int, width: int) -> Sample:
    """Return all rows of [B, H, Q, K] up to ``MATRIX`` weights; beyond that, the first and evenly spread ones."""
    if batch * heads * queries * keys <= MATRIX:
        return Sample(*(torch.arange(size, device="cpu") for size in (batch, heads, queries)), whole=True)
    pairs = max(1, MATRIX // max(1, keys * width))  # of batch entry and head, each with its own keys
    h = spread(heads, min(8, pairs))
    b = spread(batch, min(4, max(1, pairs // len(h))))
    rows = max(4, MATRIX // (len(b) * len(h) * max(1, keys)))
    return Sample(b, h, spread(queries, rows), whole=False)


def spread(size: int, count: int) -> Tensor:
    """Return about ``count`` evenly spread indices of an axis; for four or more, the first four are included."""
    if count >= size:
        return torch.arange(size, device="cpu")
    first = torch.arange(min(4, count), device="cpu")
    others = max(1, count - 3 if count >= 4 else count)
    rest = torch.linspace(0, size - 1, others, dtype=torch.float64, device="cpu").long()
    return torch.cat([first, rest]).unique() if count >= 4 else rest.unique()


def select(tensor: Tensor, *indices: Tensor | None) -> Tensor:
    """Return the chosen indices of each axis; an axis of size 1 is left to broadcast."""
    for axis, index in enumerate(indices):
        if index is not None and tensor.shape[axis] not in (1, len(index)):
            tensor = tensor.index_select(axis, index.to(tensor.device))
    return tensor


def to_float64(tensor: Tensor) -> Tensor:
    """Return a tensor in float64 on the host, because not every accelerator has float64."""
    return tensor.detach().to("cpu").to(torch.float64)


def rounding(dtype: torch.dtype, terms: int) -> float:
    """Return the rounding error of a sum of ``terms`` products, as a factor of the sum of their magnitudes.

    The result is rounded to ``dtype`` a few times; the sum is in float32 or better, and its error grows as √terms.
    """
    accumulator = accumulate_dtype(dtype)
    unit = torch.finfo(accumulator).eps
    if accumulator == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        unit = torch.finfo(torch.bfloat16).eps  # the user allows float32 products with fewer bits
    return 4 * max(torch.finfo(dtype).eps, unit) + math.sqrt(max(1, terms)) * unit


def close(claim: str, actual: Tensor, expected: Tensor, allowed: Tensor, suffix: str = "") -> Check:
    """Check that ``actual`` equals ``expected`` (float64) to within ``allowed``, element by element; NaN equals NaN."""
    kind = torch.finfo(actual.dtype)
    allowed = allowed + 4 * kind.tiny * kind.eps + torch.finfo(accumulate_dtype(actual.dtype)).tiny  # underflow
    actual = to_float64(actual)
    same = (actual == expected) | (actual.isnan() & expected.isnan())
    error = (actual - expected).abs().masked_fill(same, 0).nan_to_num(torch.inf, torch.inf)
    allowed = allowed.nan_to_num(0, 0).expand_as(error)  # where magnitudes are not finite, only equality passes
    if not error.numel():
        return Check(claim, f"nothing to compare{suffix}", True)
    at = int((error / allowed).nan_to_num(0, torch.inf).argmax())  # error 0 of allowed 0 passes
    worst, limit = float(error.flatten()[at]), float(allowed.flatten()[at])
    outcome = f"error {_short(worst)}, allowed {_short(limit)}{suffix}"
    return Check(claim, outcome, bool((error <= allowed).all()))


def _short(error: float) -> str:
    return f"{error:.0e}" if error else "0"


def equal(claim: str, actual: Tensor, expected: Tensor) -> Check:
    """Check that two tensors are equal to the bit; NaN equals NaN."""
    if actual.shape != expected.shape:
        return Check(claim, f"the shapes differ, {list(actual.shape)} and {list(expected.shape)}", False)
    differ = int(((actual != expected) & ~(actual.isnan() & expected.isnan())).sum())
    return Check(claim, "to the bit" if not differ else f"{differ:,} of {actual.numel():,} values differ", not differ)


def finite(x: Tensor) -> Check:
    """Check that every value is finite."""
    bad = int((~torch.isfinite(x)).sum())
    outcome = f"{bad:,} of {x.numel():,} are NaN or infinite, and reach every row that attends to them" if bad else None
    return Check("every value is finite", outcome, not bad)


# ---------------------------------------------------------------- visible pairs


@dataclass(frozen=True, slots=True)
class VisiblePairs:
    """The number of visible pairs, of B · H · Q · K, and of rows without a visible key, of B · H · Q."""

    pairs: int
    empty_rows: int


def count_visible_pairs(mask: Mask, sizes: tuple[int, int, int, int]) -> VisiblePairs | None:
    """Count the visible pairs of a mask: in closed form, from the spans of its plan, or pair by pair.

    None where the mask has no values (meta device), or where more than ``COUNTED`` pairs would have to be counted.
    """
    batch, heads, queries, keys = sizes
    mask = mask.at(queries, keys)
    if any(tensor.is_meta for tensor in mask.tensors()):
        return None
    if isinstance(mask, Prefix):
        visible = min(mask.n, keys)
        return VisiblePairs(batch * heads * queries * visible, 0 if visible else batch * heads * queries)
    if isinstance(mask, Band):
        return _band(mask, sizes)
    plan = mask.plan(*sizes) if queries <= COUNTED else None
    if plan is not None and plan.rest is None:
        return _spans(plan, sizes)
    if plan is None or math.prod(sizes) > COUNTED:
        return None
    return _one_by_one(plan, sizes)


def _band(band: Band, sizes: tuple[int, int, int, int]) -> VisiblePairs:
    """Count the keys from i + low to i + high - 1 that exist, for each row i, by clamped ramps in closed form."""
    batch, heads, queries, keys = sizes
    offset = band.offset
    offsets = offset.reshape(-1).tolist() if isinstance(offset, Tensor) else offset
    offsets = list(offsets) if isinstance(offsets, (tuple, list)) else [offsets or 0]
    pairs = empty = 0
    for each in offsets:
        low = None if band.left is None else int(each) - band.left
        high = None if band.right is None else int(each) + band.right + 1
        if low is not None and high is not None and high <= low:
            empty += queries
            continue
        pairs += (queries * keys if high is None else _ramp(high, queries, keys)) - (
            0 if low is None else _ramp(low, queries, keys)
        )
        before = 0 if high is None else min(queries, max(0, 1 - high))  # rows whose reach ends before key 0
        beyond = (
            0 if low is None else max(0, queries - max(0, keys - low))
        )  # rows whose reach starts after the last key
        empty += queries if not keys else min(queries, before + beyond)
    repeat = heads * (batch if len(offsets) == 1 else 1)
    return VisiblePairs(pairs * repeat, empty * repeat)


def _ramp(start: int, rows: int, top: int) -> int:
    """Return Σ over i < rows of start + i, each clamped to between 0 and top."""
    rising, full = max(0, -start), max(0, top - start)  # the first row above 0, the first row at the top
    rising, full = min(rising, rows), min(full, rows)
    number = max(0, full - rising)
    return number * start + (rising + full - 1) * number // 2 + (rows - max(full, rising)) * top


def _spans(plan: Plan, sizes: tuple[int, int, int, int]) -> VisiblePairs:
    batch, heads, queries, _ = sizes
    visible = (plan.spans[..., 1] - plan.spans[..., 0]).sum(-1)  # [B or 1, Q or 1]
    rows, columns = visible.shape
    repeat = heads * (batch // rows if rows else 0) * (queries // columns if columns else 0)
    return VisiblePairs(int(visible.sum()) * repeat, int((visible == 0).sum()) * repeat)


def _one_by_one(plan: Plan, sizes: tuple[int, int, int, int]) -> VisiblePairs:
    batch, heads, queries, keys = sizes
    step = max(1, MATRIX // max(1, batch * heads * keys))
    pairs = empty = 0
    for start in range(0, queries, step):
        i = slice(start, min(start + step, queries))
        visible = plan.tile(slice(0, batch), slice(0, heads), i, slice(0, keys))
        visible = visible.expand(batch, heads, i.stop - i.start, keys)
        pairs += int(visible.sum())
        empty += int((~visible.any(-1)).sum())
    return VisiblePairs(pairs, empty)

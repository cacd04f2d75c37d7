"""Blocks of the matrix of a call: they depend on sizes only, so equal calls have equal blocks."""

from __future__ import annotations

from typing import NamedTuple

from headscope._attend.call import Call
from headscope.masks import Plan

DEVICE_BLOCK = 1 << 26  # logits in one block on a GPU: 256 MiB of float32, so that a launch takes longer than its start
GPUS = ("cuda", "xpu")


def logits_of_block(device: str, on_cpu: int) -> int:
    """Return the most logits in one block on a type of device; ``on_cpu`` on any but a GPU."""
    return DEVICE_BLOCK if device in GPUS else on_cpu


class BlockSizes(NamedTuple):
    """The numbers of batch entries, key/value heads and rows of one block."""

    batch: int
    kv_heads: int
    rows: int


def block_sizes(call: Call, rows: int, logits: int) -> BlockSizes:
    """Return the sizes of blocks of at most ``logits`` logits, but at least one row, of a call with so many rows.

    A block holds all keys and whole groups of query heads. It has several heads only if all rows fit, and several batch
    entries only if all heads do.
    """
    size = max(1, min(rows, logits // max(1, call.group * call.keys)))
    heads = max(1, logits // max(1, call.group * call.keys * size))
    return BlockSizes(max(1, heads // max(1, call.kv_heads)), max(1, min(call.kv_heads, heads)), size)


def slices(length: int, step: int) -> list[slice]:
    """Cut a length into slices of ``step``, or of 1 where ``step`` is less; the last one may be shorter."""
    step = max(1, step)
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]


def visible_keys(call: Call, plan: Plan | None, queries: slice | list[int]) -> slice:
    """Return the range of keys that are visible to any of these queries."""
    if plan is None or plan.bounds is None:
        return slice(0, call.keys)
    bounds = plan.bounds if len(plan.bounds) == 1 else plan.bounds[queries]
    stop = int(bounds[:, 1].max())
    return slice(min(int(bounds[:, 0].min()), stop), stop)

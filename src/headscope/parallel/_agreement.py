"""The check that all ranks of a group call with the same arguments, before anything is computed."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headscope.masks import Mask
from headscope.parallel._exchange import answered, group_rank, group_size


def check_agreement(name: str, values: Mapping[str, object], seed: int, group: dist.ProcessGroup | None) -> int:
    """Compare the arguments of all ranks, by one small exchange; return the seed of rank 0.

    Args:
        name: the function that is called.
        values: argument -> its value, as text or as something whose text is equal if and only if it is.
        seed: of this rank.
        group: the ranks.

    Raises:
        ValueError: two ranks differ; the message names them and the argument, on every rank.
    """
    ranks = group_size(group)
    if ranks == 1:
        return seed
    texts = {argument: str(value) for argument, value in values.items()}
    digests = [zlib.crc32(text.encode()) for text in texts.values()]
    own = torch.tensor([seed, *digests], dtype=torch.int64, device=device_of(group))
    every = [torch.empty_like(own) for _ in range(ranks)]
    answered(lambda: dist.all_gather(every, own, group), group)
    rows = [each.tolist() for each in every]
    differing = [n for n, column in enumerate(zip(*rows, strict=True)) if n > 0 and len({*column}) > 1]
    if differing:
        raise _disagreement(name, list(texts), differing, texts, rows, group)
    return rows[0][0]


def _disagreement(
    name: str, arguments: list[str], differing: list[int], texts: Mapping[str, str], rows: list[list[int]],
    group: dist.ProcessGroup | None,
) -> ValueError:  # fmt: skip
    argument = arguments[differing[0] - 1]
    every: list[Any] = [None] * len(rows)
    dist.all_gather_object(every, texts[argument], group)
    other = next(rank for rank, text in enumerate(every) if text != every[0])
    return ValueError(
        f"{argument}: rank 0 has {every[0]}, rank {other} has {every[other]}; expected {name} with the same arguments "
        f"on every rank of the group (this is rank {group_rank(group)})"
    )


def device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Return the device whose tensors a group exchanges."""
    is_on_gpu = "nccl" in str(dist.get_backend(group))
    return torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")


def describe_mask(mask: Mask | None) -> str:
    """Return a text that differs for masks that allow other keys; of tensors on a CPU it has the values."""
    return "None" if mask is None else _describe(mask)


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        values = f" {zlib.crc32(value.contiguous().numpy()):08x}" if value.is_cpu else ""
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{values}"
    if isinstance(value, Mask) and is_dataclass(value):
        parts = (f"{each.name}={_describe(getattr(value, each.name))}" for each in fields(value))
        return f"{type(value).__name__}({', '.join(parts)})"
    return type(value).__name__ if isinstance(value, Mask) else repr(value)

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
from headscope.parallel._exchange import gather_into, group_rank, group_size


def check_agreement(
    name: str, values: Mapping[str, object] | Exception, seed: int, group: dist.ProcessGroup | None
) -> int:
    """Compare the arguments of all ranks, by one small exchange; return the seed of rank 0.

    Args:
        name: the function that is called.
        values: argument -> its value, as something whose text is equal if and only if it is; or the error of this
            rank's arguments, which then reaches every rank, so that none waits for this one.
        seed: of this rank.
        group: the ranks.

    Raises:
        Exception: that of this rank's arguments.
        ValueError: another rank has an error, or two ranks differ; the message names them and the argument.
    """
    ranks = group_size(group)
    if ranks == 1:
        if isinstance(values, Exception):
            raise values
        return seed
    texts = {} if isinstance(values, Exception) else {argument: str(value) for argument, value in values.items()}
    text = "\n".join((name, *(f"{argument}: {value}" for argument, value in texts.items())))
    own = torch.tensor([seed, 0 if texts else -1, zlib.crc32(text.encode())], device=device_of(group))
    every = [torch.empty_like(own) for _ in range(ranks)]
    gather_into(every, own, group)
    rows = [each.tolist() for each in every]
    if any(row[1:] != rows[0][1:] for row in rows) or isinstance(values, Exception):
        error: Any = _disagreement(name, values if isinstance(values, Exception) else texts, ranks, group)
        error.is_known_to_all_ranks = True
        raise error
    return rows[0][0]


def is_known_to_all_ranks(error: Exception) -> bool:
    """Return whether every rank has an error already, by ``check_agreement``."""
    return getattr(error, "is_known_to_all_ranks", False)


def _disagreement(
    name: str, own: Mapping[str, str] | Exception, ranks: int, group: dist.ProcessGroup | None
) -> Exception:
    """Return the error of this rank: it exchanges the texts, of which only digests were compared."""
    every: list[Any] = [None] * ranks
    sent = f"{type(own).__name__}: {own}" if isinstance(own, Exception) else dict(own)
    dist.all_gather_object(every, sent, group)
    if isinstance(own, Exception):
        return own
    here = f"this is rank {group_rank(group)}"
    for rank, other in enumerate(every):
        if isinstance(other, str):
            return ValueError(f"rank {rank} did not call {name}, because its arguments are wrong ({here}): {other}")
    first, other = next((n, rank) for rank in range(ranks) for n in every[0] if every[rank].get(n) != every[0][n])
    return ValueError(
        f"{first}: rank 0 has {every[0][first]}, rank {other} has {every[other].get(first)}; expected {name} with the "
        f"same arguments on every rank of the group ({here})"
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
        values = f" {zlib.crc32(value.detach().contiguous().numpy().tobytes()):08x}" if value.is_cpu else ""
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{values}"
    if isinstance(value, Mask) and is_dataclass(value):
        parts = (f"{each.name}={_describe(getattr(value, each.name))}" for each in fields(value))
        return f"{type(value).__name__}({', '.join(parts)})"
    return type(value).__name__ if isinstance(value, Mask) else repr(value)

"""What two gloo processes find of masks whose tensors a collective writes: ``python collective_masks.py RANK STORE``.

Rank 1 receives. For each mask and collective it prints whether the cached mask gives what a fresh mask gives, and
whether the new contents change the output at all, as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from headscope import attention
from headscope.masks import Band, Documents, KeyLengths, Mask, Prefix, causal

MASKS: dict[str, tuple[list[int], list[int], Callable[[Tensor], Mask]]] = {  # old contents, new contents, mask
    "KeyLengths": ([7, 4], [2, 6], KeyLengths),
    "causal() & KeyLengths": ([7, 4], [2, 6], lambda x: causal() & KeyLengths(x)),
    "Prefix(1) | KeyLengths & Band": ([7, 4], [2, 6], lambda x: Prefix(1) | (KeyLengths(x) & Band(2, 2))),
    "Documents": ([0, 0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2, 3], lambda x: Documents(x[None])),
    "Documents, interleaved": ([0, 1, 0, 1, 1, 0, 2], [0, 0, 0, 1, 0, 1, 1], lambda x: Documents(x[None])),
    "Band": ([0, 2], [3, 0], lambda x: Band(None, 0, offset=x)),
}


def broadcast(x: Tensor, new: Tensor, rank: int) -> None:
    """Rank 0's contents reach both."""
    if rank == 0:
        x.copy_(new)
    dist.broadcast(x, 0)


def all_reduce(x: Tensor, new: Tensor, rank: int) -> None:
    """Rank 1 holds the old contents, and rank 0 what is missing."""
    if rank == 0:
        x.copy_(new - x)
    dist.all_reduce(x)


def scatter(x: Tensor, new: Tensor, rank: int) -> None:
    """Rank 0 hands the new contents to both."""
    dist.scatter(x, [new, new.clone()] if rank == 0 else None, 0)


def recv(x: Tensor, new: Tensor, rank: int) -> None:
    """Rank 0 sends."""
    if rank == 0:
        dist.send(new, 1)
    else:
        dist.recv(x, 0)


def irecv(x: Tensor, new: Tensor, rank: int) -> None:
    """Rank 0 sends, and rank 1 waits for it later."""
    if rank == 0:
        dist.send(new, 1)
    else:
        work = dist.irecv(x, 0)
        assert work is not None
        work.wait()


def main(rank: int, store: str) -> None:
    """Try every mask with every collective."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 7, 8).unbind()
    found: dict[str, tuple[bool, bool]] = {}
    for write in (broadcast, all_reduce, scatter, recv, irecv):
        for name, (old, new, made) in MASKS.items():
            x = torch.tensor(old)
            mask = made(x)
            before = attention(q, k, v, mask=mask)
            write(x, torch.tensor(new), rank)
            after = attention(q, k, v, mask=mask)
            fresh = attention(q, k, v, mask=made(torch.tensor(new)))
            found[f"{write.__name__}: {name}"] = torch.equal(after, fresh), not torch.allclose(before, fresh)
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

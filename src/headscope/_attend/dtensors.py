"""Attention of DTensors: each rank attends in its own batch entries and heads, on ordinary tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from headscope._attend.call import check_qkv, fold_mask
from headscope._attend.dropout import draw_seed
from headscope._attend.interface import Result
from headscope._attend.sharding_rules import refuse, register_rules
from headscope._support.arguments import check_broadcast
from headscope._support.tensor_classes import check_distributed, is_distributed
from headscope.masks import Mask, as_mask, check_mask


def attend_parts(
    handler: Callable[..., Result], q: Any, k: Any, v: Any, mask: Mask | Tensor | None, bias: Any, sinks: Any,
    scale: float | None, softcap: float | None, dropout: float, lse: bool, backend: str | None,
) -> Result:  # fmt: skip
    """Return out and lse of DTensors as DTensors, sharded as q.

    Args:
        handler: attends on ordinary tensors; the other arguments are its own.
        q, k, v: DTensors over one mesh; if a mesh axis shards one of them by batch or heads, the others are too.
        mask: whole on each rank, of ordinary tensors.
        bias, sinks: DTensors, or None.

    Raises:
        TypeError: ordinary tensors and DTensors are combined.
        ValueError: a tensor is sharded on another axis, or the heads do not divide among the ranks.
    """
    if not is_dynamo_compiling():
        register_rules()
    check_distributed({"q": q, "k": k, "v": v}, {"bias": bias, "sinks": sinks})
    lead = check_qkv(q, k, v)
    if isinstance(mask, Tensor) and q.ndim > 4:
        mask = fold_mask(mask, q, k, v)
    mask = as_mask(mask)
    split = _Split.of({"q": q, "k": k, "v": v})
    entries, heads = split.own(0, q.shape[0] if split.batch else 1), split.own(1, q.shape[-3])
    local = [split.local(name, x, heads) for name, x in (("q", q), ("k", k), ("v", v))]
    if bias is not None:
        check_broadcast("bias", bias, lead, (q.shape[-3], q.shape[-2], k.shape[-2]))
        bias = split.local_option(bias, {bias.ndim - q.ndim: 0, bias.ndim - 3: 1})
    if sinks is not None:
        if sinks.shape != q.shape[-3:-2]:
            raise ValueError(f"sinks: expected one logit for each head, [{q.shape[-3]}]; got {list(sinks.shape)}")
        sinks = split.local_option(sinks, {0: 1})
    if mask is not None:
        sizes = (math.prod(lead), q.shape[-3], q.shape[-2], k.shape[-2])
        _check_whole(mask)
        check_mask(mask, sizes, q.device)
        inner = sizes[0] // (q.shape[0] if split.batch else 1)
        mask = mask.part(range(entries.start * inner, entries.stop * inner), heads, sizes[:2])
    for _ in range(split.shard if dropout else 0):  # each shard drops other weights; all generators remain alike
        draw_seed()
    out, rows = handler(*local, mask, bias, sinks, scale, softcap, dropout, lse, backend)
    for _ in range(split.shards - 1 - split.shard if dropout else 0):
        draw_seed()
    whole = (*lead, q.shape[-3], q.shape[-2], v.shape[-1])
    return split.joined(out, whole), None if rows is None else split.joined(rows, whole[:-1])


@dataclass(frozen=True)
class _Split:
    """How the ranks of a mesh divide a call.

    Attributes:
        mesh: the mesh of q, k and v.
        by: for each axis of the mesh, what it divides: 0 = the batch, 1 = the heads, None = nothing.
        axes: the axis of q for 0 and 1.
        sizes: the sizes of batch and heads.
    """

    mesh: Any
    by: tuple[int | None, ...]
    axes: tuple[int, int]
    sizes: tuple[int, int]

    @classmethod
    def of(cls, tensors: dict[str, Any]) -> _Split:
        q = tensors["q"]
        mesh = q.device_mesh
        by: list[int | None] = [None] * mesh.ndim
        for name, x in tensors.items():
            if x.device_mesh != mesh:
                raise ValueError(f"{name}: is over the mesh {x.device_mesh}, q over {mesh}; expected one mesh")
            for at, placement in enumerate(x.placements):
                divided = _divided(name, x, placement)
                if by[at] is None and (divided != 0 or (x.ndim == q.ndim and x.shape[0] == q.shape[0])):
                    by[at] = divided
        if 0 in by and len({x.ndim for x in tensors.values()}) > 1:
            raise ValueError(
                "q, k, v: have different numbers of axes; expected equally many where the batch is sharded"
            )
        found = cls(mesh, tuple(by), (0, q.ndim - 3), (q.shape[0], q.shape[-3]))
        if q.shape[-3] % (ranks := found.ranks(1)):
            raise ValueError(
                f"q: its {q.shape[-3]} heads are sharded over {ranks} ranks; expected a divisor of the heads"
            )
        return found

    @property
    def batch(self) -> bool:
        return 0 in self.by

    @property
    def shards(self) -> int:
        return self.ranks(0) * self.ranks(1)

    @property
    def shard(self) -> int:
        """The number of this rank's shard."""
        number = 0
        for at, divided in enumerate(self.by):
            if divided is not None:
                number = number * self.mesh.size(at) + self.mesh.get_local_rank(at)
        return number

    def ranks(self, divided: int) -> int:
        """Return among how many ranks the batch or the heads are divided."""
        return math.prod([self.mesh.size(at) for at, each in enumerate(self.by) if each == divided])

    def own(self, divided: int, size: int) -> range:
        """Return this rank's part of an axis; DTensor cuts as ``torch.chunk``: the last parts may be shorter."""
        start, length = 0, size
        for at, each in enumerate(self.by):
            if each == divided:
                chunk = -(-length // self.mesh.size(at))
                offset = min(self.mesh.get_local_rank(at) * chunk, length)
                start, length = start + offset, min(chunk, length - offset)
        return range(start, start + length)

    def local(self, name: str, x: Any, heads: range) -> Tensor:
        """Return this rank's part of q, k or v; of keys and values that serve several ranks, those of its heads."""
        axis = x.ndim - 3
        there, total, ranks = x.shape[axis], self.sizes[1], self.ranks(1)
        if there % ranks == 0:
            return self._parts(x, {0: 0, axis: 1} if self.batch and axis > 0 else {axis: 1})
        group = total // there  # query heads for each of these heads
        if group % len(heads):
            raise ValueError(
                f"{name}: its {there} heads serve {total} query heads over {ranks} ranks; expected a number of ranks "
                "that divides them, or a multiple of it"
            )
        return self._parts(x, {0: 0} if self.batch and axis > 0 else {}).narrow(axis, heads.start // group, 1)

    def local_option(self, x: Any, axes: dict[int, int]) -> Tensor:
        """Return this rank's part of a bias or of sinks.

        Args:
            x: broadcasts to the weights.
            axes: its axes of batch (0) and heads (1), where it has them.
        """
        return self._parts(x, {axis: divided for axis, divided in axes.items() if axis >= 0 and x.shape[axis] != 1})

    def _parts(self, x: Any, axes: dict[int, int]) -> Tensor:
        """Return a DTensor's part as an ordinary tensor; its gradient sums over ranks that use the same part."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        of = {divided: axis for axis, divided in axes.items() if divided == 1 or x.shape[axis] == self.sizes[0]}
        placements = [Replicate() if each is None or each not in of else Shard(of[each]) for each in self.by]
        gradients = [
            Partial() if each is not None and each not in of else placement
            for each, placement in zip(self.by, placements, strict=True)
        ]
        return x.redistribute(self.mesh, placements).to_local(grad_placements=gradients)

    def joined(self, x: Tensor, shape: tuple[int, ...]) -> Any:
        """Return a result of this rank as its part of a DTensor."""
        from torch.distributed.tensor import DTensor, Replicate, Shard

        placements = [Replicate() if each is None else Shard(self.axes[each]) for each in self.by]
        x = x.contiguous()
        strides = tuple([math.prod(shape[axis + 1 :]) for axis in range(len(shape))])  # a compiler traces no generator
        return DTensor.from_local(x, self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


def _divided(name: str, x: Any, placement: Any) -> int | None:
    """Return what a placement divides: 0 = the batch, 1 = the heads, None = nothing."""
    if not placement.is_shard():
        if hasattr(placement, "split_factor"):
            refuse(name, x.ndim, placement)
        return None
    axis = placement.dim % x.ndim
    if hasattr(placement, "split_factor") or (axis != x.ndim - 3 and not (axis == 0 and x.ndim > 3)):
        refuse(name, x.ndim, placement)
    return 1 if axis == x.ndim - 3 else 0


def _check_whole(mask: Mask) -> None:
    for leaf, x in _tensors(mask):
        if is_distributed(x):
            raise TypeError(
                f"mask ({type(leaf).__name__}): is a DTensor; expected an ordinary tensor, whole on each rank: "
                ".full_tensor()"
            )


def _tensors(mask: Mask) -> Iterator[tuple[Mask, Tensor]]:
    for leaf in mask.leaves():
        for x in leaf.tensors():
            yield leaf, x

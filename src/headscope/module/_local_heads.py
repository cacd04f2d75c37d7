"""The heads of one rank, where the projections of a ``MultiHeadAttention`` are split over ranks by head.

``headscope.parallel.tensor_parallel`` splits a module so, and torch's ``parallelize_module`` does with
``ColwiseParallel`` for ``q_proj``, ``k_proj`` and ``v_proj``. A rank then projects to its own heads only. This module
finds their numbers, and returns the part of each other parameter and argument that belongs to them. A parameter that
every rank holds whole is used in part, so its gradients are summed over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope._attend.dropout import draw_seed
from headscope._linear import merge_heads, split_heads
from headscope._support.arguments import check_type, narrow, shapes
from headscope._support.collectives import Group, gather_axis, sum_gradients, sum_over_ranks
from headscope._support.tensor_classes import ORDINARY, is_distributed
from headscope.masks import Mask, as_mask
from headscope.positions import ALiBi, RelativeBias

_PLAN = "ColwiseParallel() for q_proj, k_proj and v_proj, and RowwiseParallel() for out_proj"


@dataclass(frozen=True)
class Ranks:
    """The ranks that share the heads of a module.

    Attributes:
        group: their process group.
        rank: the number of this one.
        size: how many there are.
        heads: the numbers of this rank's query heads.
        kv_heads: the numbers of its key/value heads.
    """

    group: Group
    rank: int
    size: int
    heads: range
    kv_heads: range

    def own(self, name: str, x: Tensor, axis: int, at: range, width: int = 1) -> Tensor:
        """Return this rank's part of a tensor that is split over the ranks along an axis, or that each holds whole.

        Args:
            name: the parameter, for the error.
            x: the tensor, a DTensor or an ordinary one.
            axis: with ``width`` elements for each head.
            at: the heads.
            width: elements of a head.
        """
        whole = x
        if is_distributed(x):
            distributed: Any = x
            placement = distributed.placements[-1]
            whole = cast("Tensor", distributed.to_local())
            if placement.is_shard():
                if placement.dim % x.ndim != axis or whole.shape[axis] != len(at) * width:
                    raise ValueError(
                        f"{name}: is split as {placement}, so that this rank holds {list(whole.shape)}; expected its "
                        f"{len(at)} heads on axis {axis}: Shard({axis}), or Replicate()"
                    )
                return whole
        return sum_gradients(whole, self.group).narrow(axis, at.start * width, len(at) * width)

    def shared(self, x: Tensor) -> Tensor:
        """Return a parameter that all heads share."""
        return sum_gradients(cast("Any", x).to_local() if is_distributed(x) else x, self.group)


def ranks_of(module: Any, q: Tensor) -> Ranks:
    """Return the ranks that share the heads of a module, and the heads of this one.

    Args:
        module: the ``MultiHeadAttention``.
        q: the projected queries, [B, heads of this rank, Q, D].

    Raises:
        ValueError: the projection is not split by rows over one axis of a mesh, in whole heads.
    """
    weight, heads = module.q_proj._parameters.get("weight"), q.shape[-3]
    if not is_distributed(weight):
        raise ValueError(
            f"q_proj: returned {heads} heads, expected num_heads {module.num_heads}; to split heads over ranks, use "
            "headscope.parallel.tensor_parallel"
        )
    mesh, placement = weight.device_mesh, weight.placements[-1]
    axis = mesh.ndim - 1  # fully_shard puts its axes before that of tensor parallelism
    size, rank = mesh.size(axis), mesh.get_local_rank(axis)
    if not (placement.is_shard() and placement.dim == 0 and heads * size == module.num_heads):
        raise ValueError(
            f"q_proj: is split as {placement} over {size} ranks, so that this rank has {heads} of {module.num_heads} "
            f"heads; expected equally many for each rank: {_PLAN}"
        )
    heads_here = range(rank * heads, (rank + 1) * heads)
    return Ranks(mesh.get_group(axis), rank, size, heads_here, kv_range(heads_here, module.num_heads, module.kv_heads))


def check_splits_evenly(name: str, module: Any, ranks: int) -> None:
    """Raise unless the heads of a ``MultiHeadAttention`` can be split over so many ranks.

    Raises:
        ValueError: the number of ranks does not fit the heads; ``reproducible=True``.
    """
    if module.num_heads % ranks:
        raise ValueError(
            f"mesh: has {ranks} ranks, which do not divide the {module.num_heads} heads of {name}; expected a divisor "
            f"of {module.num_heads}"
        )
    kv_range(range(module.num_heads // ranks), module.num_heads, module.kv_heads)
    if module.reproducible:
        raise ValueError(f"reproducible: {NOT_REPRODUCIBLE}")


def check_not_split(module: nn.Module) -> None:
    """Raise if a rank holds only part of a module's parameters.

    Raises:
        ValueError: some are DTensors.
    """
    if any(map(is_distributed, module.parameters())):
        raise ValueError(
            "module: is split over ranks; expected a whole one: load the full state dict of "
            "torch.distributed.checkpoint.state_dict.get_model_state_dict into a module of one process"
        )


def kv_range(heads: range, num_heads: int, kv_heads: int) -> range:
    """Return the key/value heads that serve consecutive query heads.

    Raises:
        ValueError: they would serve different numbers of these query heads.
    """
    group = num_heads // kv_heads
    if len(heads) % group and group % len(heads):
        raise ValueError(
            f"mesh: {num_heads // len(heads)} ranks have {len(heads)} query heads each, of which key/value heads serve "
            f"{group} together; expected a number of ranks that divides the {kv_heads} key/value heads, or a multiple "
            "of it"
        )
    return range(heads.start // group, (heads.stop - 1) // group + 1)


@dataclass(frozen=True)
class LocalHeads:
    """The parts of a module that belong to this rank's heads, under the names that they have in the module.

    Attributes:
        ranks: the ranks that share the heads.
        v_head_dim: the width of each value head.
        sinks: [heads of this rank].
        bias_k: [key/value heads of this rank, D].
        bias_v: [key/value heads of this rank, Dv].
        position_bias: of this rank's heads.
    """

    ranks: Ranks
    v_head_dim: int
    sinks: Tensor | None
    bias_k: Tensor | None
    bias_v: Tensor | None
    position_bias: ALiBi | RelativeBias | None

    @classmethod
    def of(cls, module: Any, q: Tensor) -> LocalHeads:
        """Return the parts of a module for its projected queries, [B, heads of this rank, Q, D]."""
        ranks = ranks_of(module, q)
        if module.reproducible:
            raise ValueError(f"reproducible: {NOT_REPRODUCIBLE}")
        out = module.out_proj._parameters.get("weight")
        if not is_distributed(out):
            raise ValueError(f"out_proj: expected the columns of this rank's heads; split it as well: {_PLAN}")
        sinks, bias_k, bias_v = (
            None if (x := getattr(module, name)) is None else ranks.own(name, x, 0, at)
            for name, at in (("sinks", ranks.heads), ("bias_k", ranks.kv_heads), ("bias_v", ranks.kv_heads))
        )
        return cls(ranks, module.v_head_dim, sinks, bias_k, bias_v, _own_position_bias(module.position_bias, ranks))

    def select(
        self, module: Any, heads: tuple[Tensor, Tensor, Tensor], mask: Mask | Tensor | None, bias: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Mask | None, Tensor | None]:
        """Return normalised q and k, v, mask and bias, of this rank's heads.

        Args:
            module: the ``MultiHeadAttention``.
            heads: q of this rank's heads; k and v of its key/value heads, or of all of them.
            mask: of all heads.
            bias: of all heads.
        """
        q, k, v = heads
        if module.q_norm is not None:
            q = self._normed("q_norm", module, q, self.ranks.heads)
            k = self._normed("k_norm", module, k, self.ranks.kv_heads)
        k, v = self._own_kv("k", k, module.kv_heads), self._own_kv("v", v, module.kv_heads)
        batch, whole = q.shape[:-3].numel(), as_mask(mask)
        own = None if whole is None else whole.part(range(batch), self.ranks.heads, (batch, module.num_heads))
        return q, k, v, own, None if bias is None else self._own_bias(bias, module.num_heads)

    def gate(self, numbers: Tensor) -> Tensor:
        """Return the numbers that gate this rank's heads, [B, Q, heads of this rank * Dv], from those or all."""
        columns = len(self.ranks.heads) * self.v_head_dim
        if numbers.shape[-1] == columns:
            return numbers
        start = self.ranks.heads.start * self.v_head_dim
        return sum_gradients(numbers, self.ranks.group).narrow(-1, start, columns)

    def gather(self, weights: Tensor) -> Tensor:
        """Return the weights of all heads, from those of this rank's, [B, heads of this rank, Q, K]."""
        return gather_axis(weights, -3, self.ranks.group)

    def skip_seeds(self, *, after: bool) -> None:
        """Draw the dropout seeds of the other ranks, so each has its own, and all generators remain alike."""
        for _ in range(self.ranks.size - 1 - self.ranks.rank if after else self.ranks.rank):
            draw_seed()

    def _own_kv(self, name: str, x: Tensor, kv_heads: int) -> Tensor:
        """Return keys or values of this rank's heads."""
        own, there = self.ranks.kv_heads, x.shape[-3]
        if there == kv_heads:
            return sum_gradients(x, self.ranks.group).narrow(-3, own.start, len(own))
        if there != len(own) or there * self.ranks.size != kv_heads:
            raise ValueError(
                f"{name}_proj: returned {there} of {kv_heads} key/value heads on one of {self.ranks.size} ranks; "
                f"expected {len(own)}: the same mesh as q_proj, or all of them"
            )
        return x

    def _normed(self, name: str, module: Any, x: Tensor, at: range) -> Tensor:
        """Normalise queries or keys, of this rank's heads or of all of them."""
        norm = getattr(module, name)
        if type(norm) not in (nn.RMSNorm, nn.LayerNorm) or norm._forward_hooks or norm._forward_pre_hooks:
            raise ValueError(
                f"{name}: expected an nn.RMSNorm or nn.LayerNorm without hooks where the heads are split over ranks"
            )
        is_whole = name == "k_norm" and x.shape[-3] == module.kv_heads  # its gradient is then that of all heads
        part = _local if is_whole else self.ranks.shared
        if isinstance(norm, nn.LayerNorm):
            return F.layer_norm(x, norm.normalized_shape, part(norm.weight), part(norm.bias), norm.eps)
        if module.qk_norm != "rms_all":
            return F.rms_norm(x, norm.normalized_shape, part(norm.weight), norm.eps)
        merged = merge_heads(x)
        if is_whole:
            merged = F.rms_norm(merged, norm.normalized_shape, _local(norm.weight), norm.eps)
        else:
            weight = self.ranks.own(f"{name}.weight", norm.weight, 0, at, module.head_dim)
            merged = self._norm_together(merged, weight, norm)
        return split_heads(merged, x.shape[-3], module.head_dim)

    def _norm_together(self, x: Tensor, weight: Tensor, norm: nn.RMSNorm) -> Tensor:
        """Normalise the heads of all ranks together, by the sum of their squares."""
        wide = x if x.dtype.itemsize >= 4 else x.float()
        squares = sum_over_ranks(wide.square().sum(-1, keepdim=True), self.ranks.group)
        eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
        return (wide * torch.rsqrt(squares / norm.normalized_shape[0] + eps) * weight).to(x.dtype)

    def _own_bias(self, bias: Tensor, num_heads: int) -> Tensor:
        """Return the bias of this rank's heads; ``attention`` checks the other axes."""
        check_type("bias", bias, Tensor, "a torch.Tensor")
        bias = sum_gradients(bias, self.ranks.group)
        if bias.ndim < 3:
            return bias
        if bias.shape[-3] not in (1, num_heads):
            raise ValueError(
                f"bias: axis {bias.ndim - 3} (H) is {bias.shape[-3]}, expected {num_heads} or 1: the bias of all "
                f"heads, also where they are split over ranks; {shapes(bias=bias)}"
            )
        return narrow(bias, -3, self.ranks.heads)


NOT_REPRODUCIBLE = (
    "expected False where the heads are split over ranks, because their sum has an order of its own; got True"
)


def heads_of(module: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the heads of projections [B, length, H * D]: all, or in a module that is split over ranks this rank's.

    Raises:
        ValueError: a width that is not that of whole heads, or k and v of different numbers of heads.
    """
    if type(q) not in ORDINARY and is_distributed(q):
        q, k, v = map(_of_rank, (q, k, v))
    width, v_width, splits = module.head_dim, module.v_head_dim, module.splits
    heads, kv_heads = module.num_heads, module.kv_heads
    if q.shape[-1] != splits[0]:
        heads = _whole_heads("q_proj", q, width)
    if k.shape[-1] != splits[1] or v.shape[-1] != splits[2]:
        kv_heads = _whole_heads("k_proj", k, width)
        if kv_heads != _whole_heads("v_proj", v, v_width):
            raise ValueError(f"v_proj: expected as many heads as k_proj, {kv_heads}; {shapes(k=k, v=v)}")
    return split_heads(q, heads, width), split_heads(k, kv_heads, width), split_heads(v, kv_heads, v_width)


def _of_rank(x: Any) -> Tensor:
    """Return this rank's heads of a projection, if it is a DTensor that is sharded by them; any other x as it is."""
    if is_distributed(x) and all(
        p.is_replicate() or (p.is_shard() and p.dim % x.ndim == x.ndim - 1) for p in x.placements
    ):
        return x.to_local()
    return x


def _whole_heads(name: str, x: Tensor, width: int) -> int:
    """Return how many heads a projection returned.

    Raises:
        ValueError: its width is not that of whole heads.
    """
    if x.shape[-1] % width or x.shape[-1] == 0:
        raise ValueError(
            f"{name}: returned a width of {x.shape[-1]}, which is not a multiple of {width}, the width of a head; "
            f"expected whole heads on each rank, so a number of ranks that divides them; {shapes(output=x)}"
        )
    return x.shape[-1] // width


def refuse_part(packed: Tensor, splits: tuple[int, int, int]) -> NoReturn:
    """Raise for a packed projection that returned other widths than those of all q, k and v."""
    raise ValueError(
        f"qkv_proj: returned a width of {packed.shape[-1]}, expected {sum(splits)} = q {splits[0]} + k {splits[1]} + v "
        f"{splits[2]}; to split heads over ranks, call unpack() first, then {_PLAN}; or use "
        "headscope.parallel.tensor_parallel"
    )


def _local(x: Tensor) -> Tensor:
    """Return the memory of a parameter that every rank holds whole."""
    return cast("Any", x).to_local() if is_distributed(x) else x


def _own_position_bias(bias: ALiBi | RelativeBias | None, ranks: Ranks) -> ALiBi | RelativeBias | None:
    if isinstance(bias, ALiBi):
        return ALiBi(len(ranks.heads), bias.slopes[ranks.heads.start : ranks.heads.stop])
    if bias is None:
        return None
    return bias.with_table(ranks.own("position_bias.weight", bias.weight, 1, ranks.heads))

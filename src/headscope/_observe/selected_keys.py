"""The selected keys of an observation: those of its options, checked against the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope._attend.call import Call, fold
from headscope._observe.inputs import Request
from headscope._observe.visibility import visible_block, visible_rows
from headscope._support.arguments import check_broadcast, check_layout, kind, shapes
from headscope.masks import And, Band, Mask, Or, Plan, as_mask, check_mask
from headscope.stats import Observe


@dataclass(frozen=True, eq=False)
class Selection:
    """Selected keys.

    Attributes:
        indices: whole numbers [B or 1, H or Hkv or 1, Q or 1, n], -1 = none; None = there is a plan.
        plan: of a mask, or None.
    """

    indices: Tensor | None
    plan: Plan | None

    @property
    def is_of_all_heads(self) -> bool:
        """Whether every head is known to have the same selection."""
        return (
            self.indices.shape[1] == 1 if self.indices is not None else self.plan is not None and self.plan.rest is None
        )

    def tile(self, call: Call, b: slice, h: slice, i: slice | list[int], j: slice) -> Tensor:
        """Return which keys of a block are selected, boolean, broadcastable to [b, heads, i, j].

        Args:
            call: the observed call.
            b, h, j: batch entries, key/value heads and keys.
            i: queries, or the index of each.
        """
        heads = slice(h.start * call.group, h.stop * call.group)
        if self.indices is not None:
            return self._of_indices(self.indices, call, (b, h, heads), i, j)
        assert self.plan is not None  # one of the two is there
        device = self.plan.spans.device
        if isinstance(i, slice):
            selected = visible_block(self.plan, None, (b, heads, i, j), device)
        else:
            selected = visible_rows(self.plan, None, b, heads, torch.tensor(i, device=device)[None, None], j)
        return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device) if selected is None else selected

    @staticmethod
    def _of_indices(
        indices: Tensor, call: Call, place: tuple[slice, slice, slice], i: slice | list[int], j: slice
    ) -> Tensor:
        b, h, heads = place
        if len(indices) > 1:
            indices = indices[b]
        of_groups = indices.shape[1] not in (1, call.heads)
        if indices.shape[1] > 1:
            indices = indices[:, h if of_groups else heads]
        if indices.shape[2] > 1:
            indices = indices[:, :, i]
        count = j.stop - j.start
        at = indices.long() - j.start
        at = torch.where((at >= 0) & (at < count), at, count)
        selected = torch.zeros(*at.shape[:-1], count + 1, dtype=torch.bool, device=at.device)
        selected = selected.scatter_(-1, at, torch.ones_like(at, dtype=torch.bool))[..., :count]
        return selected.repeat_interleave(call.group, 1) if of_groups else selected


def selection_of(request: Request, own: Tensor | None) -> Selection | None:
    """Return the selected keys of an observation; None = there is no selection.

    Args:
        request: the observation.
        own: the query's own key, [B or 1, Q], -1 = none; None in cross-attention.

    Raises:
        TypeError: a function returned something else than a selection.
        ValueError: it does not fit the call.
    """
    selected, call, inputs = request.what.selected, request.call, request.inputs
    if selected is None:
        return None
    if callable(selected):
        selected = _select_keys(selected, request)
    if isinstance(selected, Tensor):
        check_layout("selected", selected)
        if selected.device != inputs.q.device:
            raise ValueError(f"selected: is on {selected.device}, q is on {inputs.q.device}")
        if selected.dtype != torch.bool:
            return Selection(_placed(selected.detach(), request), None)
        check_broadcast("selected", selected, call.lead, (call.heads, call.queries, call.keys))
        selected = fold(selected, call.lead)
    mask = as_mask(selected)
    assert mask is not None  # a selection is not None
    sizes = (call.batch, call.heads, call.queries, call.keys)
    try:
        check_mask(mask, sizes, inputs.q.device)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("mask:", "selected:", 1)) from error
    if own is not None and any(isinstance(leaf, Band) and leaf.offset is None for leaf in mask.leaves()):
        mask = _with_offset(mask, _offset_of(own, call))
    return Selection(None, mask.plan(*sizes))


def _offset_of(own: Tensor, call: Call) -> int | tuple[int, ...]:
    """Return the place of query 0 among the keys, for each batch entry if it differs; K - Q if it is undefined."""
    first = own - torch.arange(call.queries, device=own.device)
    default = call.keys - call.queries
    offsets = [{*row[there].tolist()} or {default} for row, there in zip(first, own >= 0, strict=True)]
    if any(len(places) > 1 for places in offsets):  # the queries do not stand at successive keys
        return default
    each = tuple(place for places in offsets for place in places)
    if len({*each}) > 1:
        return each
    return each[0] if each else default


def _with_offset(mask: Mask, offset: int | tuple[int, ...]) -> Mask:
    """Return a mask with this offset in all bands that do not have one."""
    if isinstance(mask, (And, Or)):
        return type(mask)(_with_offset(mask.first, offset), _with_offset(mask.second, offset))
    return Band(mask.left, mask.right, offset) if isinstance(mask, Band) and mask.offset is None else mask


def _select_keys(policy: Callable[[str, Tensor, Tensor], object], request: Request) -> Tensor | Mask:
    selected = policy("0", request.inputs.q, request.inputs.k)
    if not isinstance(selected, (Tensor, Mask)):
        expected = "indices of keys [B, H, Q, n], a boolean tensor or a mask"
        raise TypeError(f"selected: the function returned {kind(selected)}, expected {expected}")
    Observe(selected=selected)  # checks the dtype
    return selected


def _placed(indices: Tensor, request: Request) -> Tensor:
    """Return indices as [B or 1, H or Hkv or 1, Q or 1, n].

    Raises:
        ValueError: they do not broadcast to [B, H, Q, n], or there is no such key.
    """
    call, inputs = request.call, request.inputs
    lead = call.lead or (1,)
    letters = (*("B",) * len(lead), "H", "Q", "n")
    sizes = [*((size,) for size in lead), (call.heads, call.kv_heads), (call.queries,)]
    ends = shapes(selected=indices, q=inputs.q, k=inputs.k)
    if not 2 <= indices.ndim <= len(letters):
        raise ValueError(
            f"selected: indices have {indices.ndim} axes, expected [{', '.join(letters)}], where n keys are selected "
            f"for each query; {ends}"
        )
    for axis in range(-2, -indices.ndim - 1, -1):
        got, expected = indices.shape[axis], dict.fromkeys((*sizes[axis + 1], 1))
        if got not in expected:
            raise ValueError(
                f"selected: axis {indices.ndim + axis} ({letters[axis]}) is {got}, expected "
                f"{' or '.join(map(str, expected))}; {ends}"
            )
    if indices.dtype.itemsize < 4:  # comparing with a number that does not fit the dtype would wrap it around
        indices = indices.int()
    wrong = (indices < -1) | (indices >= call.keys)
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"selected: got key {int(indices[tuple(at)])} at {at} of [{', '.join(letters[-indices.ndim :])}], expected "
            f"0 to {call.keys - 1}, or -1 = none: fill rows with fewer keys with -1; {ends}"
        )
    return fold(indices, call.lead)[(None,) * (4 - min(4, indices.ndim))]

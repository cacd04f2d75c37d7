"""The positions of queries and keys of an intercepted call: as its mask implies, or as the caller states them."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from headscope._attend.blocks import slices
from headscope._intercept.intercepted_call import InterceptedCall, check_values, four_axes
from headscope.masks import Band, Mask, as_mask

AT_ONCE = 1 << 22  # entries of a mask that are read at once


def standing(call: InterceptedCall) -> InterceptedCall:
    """Return a call of self-attention with its queries at the positions that its mask implies, if it does.

    A buffer for a cache has free slots after the queries, for future keys, which are masked. So if the last visible key
    of row i is n + i, with one n for a batch entry, its rows are at positions n, n + 1, … Rows without visible keys do
    not count; a mask with a ``Band`` states the positions itself.

    Raises:
        WatchError: the mask has no values.
    """
    queries, keys, mask = call.q.shape[-2], call.k.shape[-2], as_mask(call.mask)
    if isinstance(call.mask, Tensor) and call.q.ndim > 4:
        mask = as_mask(four_axes(call.mask, call.q.shape[:-3]))
    if keys <= queries or mask is None or any(each is not None for each in (call.q_pos, call.k_pos, call.total)):
        return call
    if 0 in call.q.shape or not mask.tensors() or any(isinstance(leaf, Band) for leaf in mask.leaves()):
        return call
    check_values(call)
    first = _first_rows(mask, call)
    if first is None:
        return call
    places = first[:, None] + torch.arange(queries, device=first.device)  # [B or 1, Q]
    same = len(first) == 1 or bool((first == first[0]).all())
    return replace(
        call,
        q_pos=(places[0] if same else places[..., None]).to(call.q.device),
        k_pos=torch.arange(keys, device=call.q.device),
        total=int(first[0]) + queries if same else None,
    )


def _first_rows(mask: Mask, call: InterceptedCall) -> Tensor | None:
    """Return the position of the first row of each batch entry, [B or 1]; None = at the end, or undetermined."""
    queries, keys = call.q.shape[-2], call.k.shape[-2]
    sizes = math.prod(call.q.shape[:-3]), call.q.shape[-3], keys
    mask = mask.at(queries, keys)
    device = mask.tensors()[0].device
    last = _last_visible(mask, sizes, torch.tensor([queries - 1], device=device))
    at_end = last == keys - 1
    if bool(at_end.any() & (at_end | (last < 0)).all()):
        return None
    low, high = torch.tensor(keys, device=device), torch.tensor(-queries, device=device)
    for i in slices(queries, AT_ONCE // (last.numel() * keys)):
        rows = torch.arange(i.start, i.stop, device=device)
        last = _last_visible(mask, sizes, rows)
        low = low.minimum(torch.where(last < 0, keys, last - rows).amin((1, 2)))
        high = high.maximum(torch.where(last < 0, -queries, last - rows).amax((1, 2)))
        if bool((low < high).any()):
            return None
    known = high >= low  # not of an entry without visible keys
    fits = known & (low >= 0) & (low <= keys - queries)
    if not bool(known.any() & (fits == known).all()):
        return None
    return torch.where(known, low, low.amin())


def _last_visible(mask: Mask, sizes: tuple[int, int, int], rows: Tensor) -> Tensor:
    """Return the last visible key of each row, [B or 1, H or 1, R]; -1 = none. ``sizes``: B, H, K."""
    b, h, j = (torch.arange(n, device=rows.device) for n in sizes)
    visible = mask.allows(b[:, None, None, None], h[:, None, None], rows[:, None], j)
    visible = visible.expand(torch.broadcast_shapes(visible.shape, (1, 1, len(rows), len(j))))
    last = len(j) - 1 - visible.flip(-1).byte().argmax(-1)
    return torch.where(visible.any(-1), last, -1)


def placed(call: InterceptedCall, positions: Tensor | None) -> InterceptedCall:
    """Return the call with its keys at these positions, and its queries at the last of those so far.

    Raises:
        ValueError: there are not as many positions as keys, or more queries than keys.
    """
    if positions is None:
        return call
    queries, keys = call.q.shape[-2], call.k.shape[-2] - call.beside
    if len(positions) != keys or queries > keys:
        raise ValueError(
            f"positions: got {len(positions)}, this layer has {keys} keys and {queries} queries; select matching "
            "layers with layers="
        )
    at = positions.to(call.k.device)
    if call.q_pos is not None and call.q_pos.ndim == 3:  # as `standing` determined, which numbers the keys from 0
        q_at = at[call.q_pos[..., 0]]
        return replace(call, q_pos=q_at if at.ndim > 1 else q_at[..., None], k_pos=at)
    end = min(call.total, keys) if isinstance(call.total, int) else keys
    nowhere = at.new_full((call.beside, *at.shape[1:]), math.nan, dtype=torch.float64)
    return replace(call, q_pos=at[end - queries : end], k_pos=torch.cat([at, nowhere]) if call.beside else at)

"""NaN and infinity in q, k, v reach exactly the rows that may see them.

Every backend multiplies whole blocks, and 0 x NaN is NaN: a NaN in a hidden key would leak into rows that may not see
it. And torch's fused kernel for a CPU takes a row whose logits are all NaN for one that may see nothing, if there are
fewer keys than fit into a vector. So where something is not finite, the backend runs on inputs in which the non-finite
entries are zero, and the rows that may see one are spoilt afterwards. Finite inputs come here only where a sum
overflows, and then nothing is spoilt.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from operator import attrgetter

import torch
from torch import Tensor

from headscope._backends import Inputs, accumulate_dtype, within_range
from headscope._call import Call
from headscope._onlookers import has_no_values
from headscope.masks import Plan

ROWS = 1 << 19  # elements of one block of visibility


_dispatch = attrgetter("__torch_dispatch__")  # what a subclass does in the place of torch's operators


def suspicious(call: Call, inputs: Inputs, with_bias: bool = False) -> bool:
    """Whether q, k, v or their logits may hold NaN or infinity, for backends that do not say it of what they return.

    Looks at norms and sums alone: one that overflows is suspicious too. ``with_bias``: NaN or +inf in the bias is, too.
    """
    if call.device != "cpu" or has_no_values() or torch._C._are_functorch_transforms_active():
        return False
    if any(_dispatch(type(x)) is not _dispatch(Tensor) for x in inputs[:3]):  # these may have no values
        return False
    if not within_range(call, inputs.q, inputs.k, inputs.bias if with_bias else None):
        return True
    if call.spans == "all" and call.rest == "none" and call.bias is None:  # each row sees all of v anyway
        return False
    return not math.isfinite(inputs.v.detach().sum(dtype=accumulate_dtype(call.dtype)).item())


Attend = Callable[[Call, Plan | None, Inputs], tuple[Tensor, Tensor | None]]


def attend(run: Attend, call: Call, plan: Plan | None, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """``run``, a backend's ``attend``, for inputs that may hold NaN or infinity."""
    bad_q, bad_k, bad_v = (~torch.isfinite(x.detach()) for x in inputs[:3])
    if not (bad_q.any() or bad_k.any() or bad_v.any()):
        return run(call, plan, inputs)
    clean = Inputs(
        inputs.q.masked_fill(bad_q, 0),
        inputs.k.masked_fill(bad_k, 0),
        inputs.v.masked_fill(bad_v, 0),
        inputs.bias,
        inputs.sinks,
    )
    out, lse = run(call, plan, clean)
    bad_key, v = bad_k.any(-1, keepdim=True), inputs.v.detach()
    signs = (~bad_key & sign for sign in (v.isnan(), v == torch.inf, v == -torch.inf))  # a bad key spoils the whole row
    seen = _seen_by_rows(call, plan, inputs.bias, torch.cat([bad_key, *signs], -1))  # [B, H, Q, 1 + 3 Dv]
    spoilt = seen[..., 0]  # [B, H, Q]
    if bad_q.any():
        spoilt = spoilt | (bad_q.any(-1) & _sees_any(call, plan, inputs.bias, bad_q.device))
    nan, plus, minus = seen[..., 1:].unflatten(-1, (3, -1)).unbind(-2)  # [B, H, Q, Dv]
    addend = torch.zeros_like(nan, dtype=out.dtype)
    addend = addend.masked_fill(plus, torch.inf).masked_fill(minus, -torch.inf)
    addend = addend.masked_fill(nan | (plus & minus) | spoilt[..., None], torch.nan)
    if lse is not None:
        lse = lse + torch.zeros_like(lse).masked_fill(spoilt, torch.nan)
    return out + addend, lse


def _seen_by_rows(call: Call, plan: Plan | None, bias: Tensor | None, signs: Tensor) -> Tensor:
    """For each row and each column of ``signs`` [B, Hkv, K, C]: may the row see a key with that sign? [B, H, Q, C]

    What is not finite is rare, or everywhere at once: only keys and columns that have a sign are looked at.
    """
    seen = signs.new_zeros((call.batch, call.heads, call.queries, signs.shape[-1]))
    keys, columns = (signs.any(0).any(0).any(axis).nonzero().flatten() for axis in (1, 0))
    if len(keys) == 0:
        return seen
    signs = signs[:, :, keys][..., columns].to(accumulate_dtype(call.dtype))  # [B, Hkv, marked keys, marked columns]
    for rows, span, visible in _visible(call, plan, bias, slice(int(keys[0]), int(keys[-1]) + 1), signs.device):
        here = slice(*torch.searchsorted(keys, torch.tensor([span.start, span.stop], device=keys.device)).tolist())
        visible = visible[..., keys[here] - span.start].to(signs.dtype)  # [B or 1, H or 1, rows, marked keys]
        marks = signs[:, :, here]
        if visible.shape[:2] == (1, 1):  # one product for all
            found = torch.einsum("ij,bhjc->bhic", visible[0, 0], marks).repeat_interleave(call.group, 1)
        else:
            found = visible @ marks.repeat_interleave(call.group, 1)
        seen[:, :, rows, columns] = found > 0
    return seen


def _sees_any(call: Call, plan: Plan | None, bias: Tensor | None, device: torch.device) -> Tensor:
    """Whether a row may see any key at all, [B, H, Q]."""
    shape = (call.batch, call.heads, call.queries)
    if call.keys and bias is None and (plan is None or not plan.may_be_empty):
        return torch.ones(shape, dtype=torch.bool, device=device)
    sees = torch.zeros(shape, dtype=torch.bool, device=device)
    for rows, _, visible in _visible(call, plan, bias, slice(0, call.keys), device):
        sees[:, :, rows] = visible.any(-1)
    return sees


def _visible(
    call: Call, plan: Plan | None, bias: Tensor | None, keys: slice, device: torch.device
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Block by block of rows, which of some keys they may see: rows, those of the keys that any of them may see, and
    [B or 1, H or 1, rows, keys].
    """
    step = max(1, ROWS // max(1, call.batch * call.heads * (keys.stop - keys.start)))
    for start in range(0, call.queries, step):
        rows = slice(start, min(start + step, call.queries))
        span = keys
        if plan is not None and plan.bounds is not None:
            low, high = plan.bounds[rows if len(plan.bounds) > 1 else slice(None)].unbind(-1)
            span = slice(max(keys.start, int(low.amin())), min(keys.stop, int(high.amax())))
        if span.start >= span.stop:
            continue
        seen = torch.ones((1, 1, rows.stop - rows.start, span.stop - span.start), dtype=torch.bool, device=device)
        if plan is not None:
            seen = seen & plan.tile(slice(0, call.batch), slice(0, call.heads), rows, span)
        if bias is not None:
            cut = bias[:, :, slice(None) if bias.shape[2] == 1 else rows]
            seen = seen & (cut[..., slice(None) if bias.shape[3] == 1 else span] != -torch.inf)
        yield rows, span, seen

"""NaN and infinity in q, k, v reach exactly the rows that may see them.

Every backend multiplies whole blocks, and 0 x NaN is NaN: a NaN in a hidden key would leak into rows that may not see
it. And torch's fused kernel for a CPU takes a row whose logits are all NaN for one that may see nothing, if there are
fewer keys than fit into a vector. So where something is not finite, the backend runs on inputs in which the non-finite
entries are zero, and the rows that may see one are spoilt afterwards. Finite inputs come here only where a sum
overflows, and then nothing is spoilt.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import attrgetter

import torch
from torch import Tensor

from headscope._backends import Inputs, accumulate_dtype
from headscope._call import Call
from headscope._onlookers import has_no_values
from headscope.masks import Plan

ROWS = 1 << 19  # elements of one block of visibility


_dispatch = attrgetter("__torch_dispatch__")  # what a subclass does in the place of torch's operators


def suspicious(call: Call, inputs: Inputs) -> bool:
    """Whether q, k or v may hold NaN or infinity, for backends that do not say it of what they return.

    Looks at sums alone: one that overflows is suspicious too.
    """
    if call.device != "cpu" or has_no_values() or torch._C._are_functorch_transforms_active():
        return False
    if any(_dispatch(type(x)) is not _dispatch(Tensor) for x in inputs[:3]):  # these may have no values
        return False
    dtype = accumulate_dtype(call.dtype)
    total = inputs.q.detach().sum(dtype=dtype).item() + inputs.k.detach().sum(dtype=dtype).item()
    if call.spans != "all" or call.rest != "none" or call.bias is not None:  # else each row sees all of v anyway
        total += inputs.v.detach().sum(dtype=dtype).item()
    return not math.isfinite(total)


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
    v = inputs.v.detach()
    bad_key = bad_k.any(-1, keepdim=True)
    signs = torch.cat([~bad_key, bad_key, v.isnan(), v == torch.inf, v == -torch.inf], -1)
    seen = _seen_by_rows(call, plan, inputs.bias, signs)  # [B, H, Q, 2 + 3 Dv]
    sees_good, sees_bad, values = seen[..., 0], seen[..., 1], seen[..., 2:].unflatten(-1, (3, -1))
    spoilt = sees_bad | (bad_q.any(-1) & (sees_good | sees_bad))  # [B, H, Q]
    nan, plus, minus = values.unbind(-2)  # [B, H, Q, Dv]
    addend = torch.zeros_like(nan, dtype=out.dtype)
    addend = addend.masked_fill(plus, torch.inf).masked_fill(minus, -torch.inf)
    addend = addend.masked_fill(nan | (plus & minus) | spoilt[..., None], torch.nan)
    if lse is not None:
        lse = lse + torch.zeros_like(lse).masked_fill(spoilt, torch.nan)
    return out + addend, lse


def _seen_by_rows(call: Call, plan: Plan | None, bias: Tensor | None, signs: Tensor) -> Tensor:
    """For each row and each column of ``signs`` [B, Hkv, K, C]: may the row see a key with that sign? [B, H, Q, C]"""
    dtype = accumulate_dtype(call.dtype)
    columns = signs.repeat_interleave(call.group, 1).to(dtype)  # [B, H, K, C]
    step = max(1, ROWS // max(1, call.batch * call.heads * call.keys))
    found = [columns.new_empty((call.batch, call.heads, 0, columns.shape[-1]), dtype=torch.bool)]
    for start in range(0, call.queries, step):
        i = slice(start, min(start + step, call.queries))
        every = (slice(0, call.batch), slice(0, call.heads), i, slice(0, call.keys))
        rows = (call.batch, call.heads, i.stop - i.start, call.keys)
        seen = torch.ones(rows, dtype=torch.bool, device=signs.device)
        if plan is not None:
            seen = seen & plan.tile(*every)
        if bias is not None:
            seen = seen & (bias[:, :, slice(None) if bias.shape[2] == 1 else i] != -torch.inf)
        found.append(seen.to(dtype) @ columns > 0)
    return torch.cat(found, 2)

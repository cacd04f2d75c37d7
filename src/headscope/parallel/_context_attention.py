"""``context_attention``: attention over a sequence of which each rank of a group holds a part."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from headscope._attend.backends import fused
from headscope._attend.call import Options as CallOptions
from headscope._attend.call import check_call
from headscope._attend.dropout import draw_seed
from headscope._attend.torch_operators import OPERATOR_BACKENDS
from headscope._support.arguments import check_type, shapes
from headscope._support.torch_state import is_traced
from headscope.functional import Attended
from headscope.masks import Mask, as_mask
from headscope.parallel._agreement import check_agreement, describe_mask
from headscope.parallel._exchange import group_size
from headscope.parallel._observe_rows import observe_rows
from headscope.parallel._pairs import Options
from headscope.parallel._places import Places
from headscope.parallel._whole_heads import attend_heads
from headscope.parallel._whole_rows import Local, Task, attend_rows
from headscope.stats import HeadStats, Observe

How = Literal["gather", "ring", "heads"]


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    places: Places,
    how: How = "gather",
    mask: Mask | Tensor | None = None,
    bias: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    backend: str | None = None,
    observe: Observe | None = None,
) -> Attended:
    """Return ``attend`` over a whole sequence, of which each rank of a group holds a part of the queries and keys.

    Shapes: q [B, H, own, D], k [B, Hkv, own, D], v [B, Hkv, own, Dv] -> out [B, H, own, Dv], lse [B, H, own]: the rows
    at the positions that ``places`` gives this rank. Every rank of the group calls it, with the same options.

    Args:
        q, k, v: of this rank's positions, in the order of ``places``.
        group: the process group; by default that of ``places``.
        places: which positions of the sequence each rank holds.
        how: "gather": each rank gets all keys and values, once in each pass. "ring": they go from rank to rank, and
            memory is that of one part. "heads": each rank gets all rows of a part of the heads; the number of ranks
            divides H, and Hkv or is its multiple.
        mask: of the whole sequence, as for ``attention`` with T queries and T keys.
        bias: of this rank's rows and all keys: broadcasts to [B, H, own, T].
        scale, softcap, sinks: as for ``attention``; ``sinks`` is the same on every rank.
        dropout: as for ``attention``. Rank 0 draws the seed: the native kernels drop the weights that they would drop
            in one process.
        backend: a backend that runs as an operator, such as "blocked"; by default the native one, else "blocked".
        observe: the statistics of this rank's rows against all keys, in ``stats``; rows are selected by their places
            in the sequence. ``stats.gather(group, axis="rows")`` joins those of all ranks.

    Gradients flow to q, k, v, bias and sinks, once; the backward pass exchanges the keys again, and saves local tensors
    only. The gradient of what ranks share, sinks and a bias without an axis of rows, is this rank's part, as that of
    any shared parameter: sum it over the group.

    By the native kernels "gather" gives out and lse with the bits of one process, unless the bias has rows; so does
    "heads" if the ranks divide Hkv. Everything else agrees with one process to rounding.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: a size or option that does not fit, or that differs between ranks.
        RuntimeError: a rank did not answer within the group's timeout; or within torch.compile.

    Source: Llama 3 Team 2024, section 3.3.2 (gather); Liu et al. 2023, "Ring Attention with Blockwise Transformers for
    Near-Infinite Context"; Jacobs et al. 2023, "DeepSpeed Ulysses" (heads).

    Examples:
        >>> import torch
        >>> from headscope import masks, parallel
        >>> q, k, v = torch.randn(3, 1, 2, 6, 8)
        >>> places = parallel.Places.head_tail(6)  # one process holds the whole sequence
        >>> parallel.context_attention(q, k, v, places=places, mask=masks.causal()).out.shape
        torch.Size([1, 2, 6, 8])
    """
    check_type("places", places, Places, "headscope.parallel.Places")
    places = in_group(places, group)
    check_how(how)
    if observe is not None:
        check_type("observe", observe, Observe, "a headscope.Observe or None")
    result = attend_parts(
        (q, k, v), mask, bias, sinks, scale, softcap, dropout, backend, places=places, how=how, observe=observe
    )
    return Attended(*result)


def check_how(how: How) -> How:
    """Return ``how``.

    Raises:
        ValueError: it is unknown.
    """
    if how not in get_args(How):
        raise ValueError(f'how: got {how!r}, expected "gather", "ring" or "heads"')
    return how


def in_group(places: Places, group: dist.ProcessGroup | None) -> Places:
    """Return the places of a group.

    Raises:
        ValueError: they are of another group.
    """
    if group is None or group is places.group:
        return places
    if places.group is not None:
        raise ValueError("group: got another group than that of places; expected the group that places were made with")
    return replace(places, group=group)


def attend_parts(
    qkv: tuple[Tensor, Tensor, Tensor], mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    scale: float | None, softcap: float | None, dropout: float, backend: str | None, *, places: Places, how: How,
    observe: Observe | None = None,
) -> tuple[Tensor, Tensor, HeadStats | None]:  # fmt: skip
    """Return ``context_attention``, for checked places."""
    if is_traced():
        raise RuntimeError(
            "context parallelism: within torch.compile or torch.export, which cannot trace the exchanges between "
            "ranks; expected eager mode: mark the layer with torch.compiler.disable"
        )
    try:
        local, options = check_parts(qkv, mask, bias, sinks, (scale, softcap, dropout, backend), places)
    except (TypeError, ValueError) as error:
        check_agreement("context_attention", error, 0, places.group)
        raise
    seed = int(draw_seed()) if options.dropout else 0
    seed = check_agreement("context_attention", _agreed(local, options, places, how, observe), seed, places.group)
    options = replace(options, seed=seed)
    if how == "heads":
        out, lse = attend_heads(options, places, local)
    else:
        out, lse = attend_rows(Task(options, places, how), local)
    stats = None if observe is None else observe_rows(options, places, local, lse.detach(), observe)
    if qkv[0].ndim == 3:
        out, lse = out[0], lse[0]
    return out, lse, stats


def _agreed(local: Local, options: Options, places: Places, how: How, observe: Observe | None) -> dict[str, object]:
    """Return what must be the same on every rank."""
    return {
        "q, k, v": f"{_sizes(local)}, {str(local.q.dtype).removeprefix('torch.')}", "places": places, "how": how,
        "mask": describe_mask(options.mask), "bias": local.bias is not None, "sinks": local.sinks is not None,
        "scale": options.scale, "softcap": options.softcap, "dropout": options.dropout, "backend": options.backend,
        "requires_grad": [torch.is_grad_enabled() and x is not None and x.requires_grad for x in local],
        "observe": observe is not None,
    }  # fmt: skip


def check_parts(
    qkv: tuple[Tensor, Tensor, Tensor], mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    options: tuple[float | None, float | None, float, str | None], places: Places,
) -> tuple[Local, Options]:  # fmt: skip
    """Check the arguments as a call of this rank's rows over all keys, and the mask as that of the whole sequence."""
    scale, softcap, dropout, backend = options
    q, k, v = qkv
    for name, x in zip("qkv", qkv, strict=True):
        check_type(name, x, Tensor, "a torch.Tensor")
        if x.ndim != q.ndim or x.ndim not in (3, 4) or x.shape[:-3] != q.shape[:-3]:
            raise ValueError(f"{name}: expected [B, H, own, D] or [H, own, D], as q; {shapes(q=q, k=k, v=v)}")
        if x.is_nested:
            raise ValueError(f"{name}: is a nested tensor; expected an ordinary one, with mask=Documents(...)")
    own, length = places.lengths[places.rank], places.length
    if group_size(places.group) != len(places.parts):
        raise ValueError(
            f"places: are of {len(places.parts)} ranks, the group has {group_size(places.group)}; make them with the "
            "same group"
        )
    for name, x in zip("qkv", qkv, strict=True):
        if x.shape[-2] != own:
            raise ValueError(
                f"{name}: axis {x.ndim - 2} is {x.shape[-2]}, expected {own}, the positions of rank {places.rank}; "
                f"{shapes(q=q, k=k, v=v)}"
            )
    if backend not in (None, *OPERATOR_BACKENDS):
        raise ValueError(f"backend: got {backend!r}, expected one of {', '.join(OPERATOR_BACKENDS)}, or None to choose")
    if dropout and backend == fused.name:
        raise ValueError("backend: fused cannot drop the weights of a part as the whole would; expected None to choose")
    keys, values = (x[..., :1, :].expand(*x.shape[:-2], length, x.shape[-1]) if own else x for x in (k, v))
    unplanned = CallOptions(None, scale, softcap, dropout, True, planned=False)
    call = check_call(q, keys, values, bias if own else None, sinks, unplanned)
    if call.form != "plain":
        raise TypeError("q, k, v: are of a subclass of Tensor, or within torch.func; expected ordinary tensors")
    request = as_mask(mask)
    if request is not None:
        request.check_sizes((call.batch, call.heads, length, length))
        request = request.at(length, length)
    if q.ndim == 3:
        q, k, v = q[None], k[None], v[None]
    if bias is not None:
        bias = bias[(None,) * (4 - bias.ndim)]
    local = Local(q, k, v, bias, sinks)
    return local, Options(request, call.scale, call.softcap, call.dropout, call.heads, length, 0, backend)


def _sizes(local: Local) -> str:
    (batch, heads, _, width), (_, kv_heads, _, v_width) = local.q.shape, local.v.shape
    return f"B {batch}, H {heads}, Hkv {kv_heads}, D {width}, Dv {v_width}"

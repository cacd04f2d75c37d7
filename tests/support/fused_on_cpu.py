"""CPU kernels for torch's fused operators of CUDA, in plain arithmetic, by what their sources and documents specify.

The dense flash operator is torch's own CPU kernel. The others compute the whole matrix in float32. Like the kernels for
CUDA they write inf as the lse of a row without keys (flash), or 0 (memory-efficient), pad lse with inf to a multiple of
32 rows (memory-efficient), and compute the gradient from the lse and the out that they are given.

With dropout they draw from torch's generator of the CPU: its seed, and an offset of 0 if it has not drawn since it was
seeded. Both go into the state that they return, in the form of each kernel, and determine which weights are dropped.
Each kind of kernel drops others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope._attend import mask_parts, prepare, select
from headscope._attend.backends import fused_operators

EMPTY = torch.empty(0)
dropped: list[Tensor] = []
"""The factors of the weights that each forward pass used, [B, H, Q, K], one for each document."""


def _visible(queries: int, keys: int, left: int | None, right: int | None) -> Tensor:
    gap = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if left is not None and left >= 0:
        visible &= gap >= -left
    if right is not None and right >= 0:
        visible &= gap <= right
    return visible


def _logits(q: Tensor, k: Tensor, scale: float, bias: Tensor | None, visible: Tensor) -> Tensor:
    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = q.float() @ k.float().mT * scale
    s = s if bias is None else s + bias.float()
    return s.masked_fill(~visible, -torch.inf)


def _draw() -> tuple[int, int]:
    """Return the seed and the offset of the generator, and move it on."""
    generator = torch.default_generator
    seed = generator.initial_seed()
    fresh = torch.Generator().manual_seed(seed).get_state()
    before = generator.get_state()
    drawn = int(torch.randint(1, 2**31, ()))
    return seed, 0 if torch.equal(before, fresh) else drawn


def _flash_state(p: float) -> tuple[Tensor, Tensor]:
    if not p:
        return EMPTY, EMPTY
    return torch.tensor(_draw(), dtype=torch.uint64), torch.empty((), dtype=torch.uint64)


def _efficient_state(p: float) -> tuple[Tensor, Tensor]:
    if not p:
        return EMPTY, EMPTY
    seed, offset = _draw()
    return torch.tensor(seed), torch.tensor(offset)


def _factors(
    kind: int, p: float, state: tuple[Tensor, Tensor], sizes: tuple[int, ...], document: int = 0
) -> Tensor | None:
    """Return which weights to drop, 0, and by what to multiply the others; None without dropout."""
    if not p:
        return None
    assert all(x.dtype == (torch.uint64 if kind == 1 else torch.int64) for x in state)
    seed, offset = state[0].view(torch.int64).tolist() if kind == 1 else (int(state[0]), int(state[1]))
    number = hash((kind, seed, offset, document)) % 2**62
    return (torch.rand(sizes, generator=torch.Generator().manual_seed(number)) > p).float() / (1 - p)


def _of_flash(p: float, state: tuple[Tensor, Tensor], q: Tensor, k: Tensor, document: int = 0) -> Tensor | None:
    return _factors(1, p, state, (*q.shape[:3], k.shape[2]), document)


def _of_efficient(p: float, state: tuple[Tensor, Tensor], q: Tensor, k: Tensor) -> Tensor | None:
    return _factors(2, p, state, (*q.shape[:3], k.shape[2]))


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    bias: Tensor | None,
    visible: Tensor,
    empty: float,
    z: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    s = _logits(q, k, scale, bias, visible)
    lse = s.logsumexp(-1)
    none = lse == -torch.inf
    p = (s - lse.masked_fill(none, 0)[..., None]).exp()
    if z is not None:
        dropped.append(z)
        p = p * z
    out = p.to(q.dtype).float() @ v.repeat_interleave(q.shape[1] // v.shape[1], 1).float()
    return out.to(q.dtype), lse.masked_fill(none, empty)


def _backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    bias: Tensor | None,
    visible: Tensor,
    z: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    p = (_logits(q, k, scale, bias, visible) - lse[..., None]).exp()
    values, keys = (x.repeat_interleave(group, 1).float() for x in (v, k))
    delta = (grad.float() * out.float()).sum(-1, keepdim=True)
    dp, used = grad.float() @ values.mT, p
    if z is not None:
        dp, used = dp * z, p * z
    ds = p * (dp - delta)
    dq, dk, dv = ds @ keys * scale, ds.mT @ q.float() * scale, used.mT @ grad.float()
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _whole(x: Tensor, y: Tensor) -> Tensor:
    return torch.ones(x.shape[2], y.shape[2], dtype=torch.bool)


def _pad(lse: Tensor) -> Tensor:
    return F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)


# ---------------------------------------------------------------- dense operators


def _flash(
    q: Tensor, k: Tensor, v: Tensor, p: float = 0.0, causal: bool = False, debug: bool = False, *, scale: Any = None
) -> Any:
    assert q.shape[-1] == k.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    assert not causal or q.shape[2] == k.shape[2]
    state = _flash_state(p)
    if p:
        visible = _visible(q.shape[2], k.shape[2], None, 0 if causal else None)
        out, lse = _forward(q, k, v, scale, None, visible, torch.inf, _of_flash(p, state, q, k))
        return out, lse, EMPTY, EMPTY, 0, 0, *state, EMPTY
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, p, causal, scale=scale)
    return out, lse.contiguous(), EMPTY, EMPTY, 0, 0, EMPTY, EMPTY, EMPTY


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cq: Any,
    ck: Any,
    mq: int,
    mk: int,
    p: float,
    causal: bool,
    seed: Any,
    offset: Any,
    *,
    scale: Any = None,
) -> Any:
    if p:
        visible = _visible(q.shape[2], k.shape[2], None, 0 if causal else None)
        return _backward(grad, q, k, v, out, lse, scale, None, visible, _of_flash(p, (seed, offset), q, k))
    group = q.shape[1] // k.shape[1]
    wide = [x.repeat_interleave(group, 1) for x in (k, v)]
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad.contiguous(), q, *wide, out.contiguous(), lse, p, causal, scale=scale
    )
    return dq, *(x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))


def _cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    need: bool,
    p: float = 0.0,
    causal: bool = False,
    debug: bool = False,
    *,
    scale: Any = None,
) -> Any:
    visible = _visible(q.shape[2], k.shape[2], None, 0 if causal else None)
    out, lse = _forward(q, k, v, scale, bias, visible, torch.inf)
    return out, lse[..., None], EMPTY, EMPTY, 0, 0, EMPTY, EMPTY, EMPTY


def _cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seed: Any,
    offset: Any,
    bias: Any,
    cq: Any,
    ck: Any,
    mq: int,
    mk: int,
    p: float,
    causal: bool,
    *,
    scale: Any = None,
) -> Any:
    assert lse.shape == (*q.shape[:3], 1)
    visible = _visible(q.shape[2], k.shape[2], None, 0 if causal else None)
    return _backward(grad, q, k, v, out, lse[..., 0], scale, bias, visible)


def _efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, need: bool, p: float = 0.0, causal: bool = False, *, scale: Any = None
) -> Any:
    _check_efficient(q, k, v, bias)
    assert not causal or q.shape[2] == k.shape[2]
    visible = _visible(q.shape[2], k.shape[2], None, 0 if causal else None)
    state = _efficient_state(p)
    out, lse = _forward(q, k, v, scale, bias, visible, 0.0, _of_efficient(p, state, q, k))
    return out, _pad(lse), *state


def _efficient_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    out: Tensor,
    lse: Tensor,
    seed: Any,
    offset: Any,
    p: float,
    needed: Any,
    causal: bool = False,
    *,
    scale: Any = None,
) -> Any:
    _check_efficient(q, k, v, bias)
    assert lse.shape[-1] % 32 == 0
    visible = _visible(q.shape[2], k.shape[2], None, 0 if causal else None)
    z = _of_efficient(p, (seed, offset), q, k)
    return *_backward(grad, q, k, v, out, lse[..., : q.shape[2]], scale, bias, visible, z), EMPTY


def _check_efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> None:
    step = 16 // q.element_size()
    assert q.shape[1] == k.shape[1] == v.shape[1], "these kernels have no grouped heads"
    assert q.shape[-1] % step == 0
    assert v.shape[-1] % step == 0
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.dtype == q.dtype
        assert bias.stride(-1) == 1
        assert all(stride % step == 0 for stride in bias.stride()[:-1])


# ---------------------------------------------------------------- operators with windows and packed documents


def _spans(cum_q: Tensor | None, cum_k: Tensor | None) -> list[tuple[slice, slice]]:
    if cum_q is None or cum_k is None:
        return [(slice(None), slice(None))]
    q, k = cum_q.tolist(), cum_k.tolist()
    return [(slice(*q[n : n + 2]), slice(*k[n : n + 2])) for n in range(len(q) - 1)]


def _flash_band(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cq: Any,
    ck: Any,
    mq: int,
    mk: int,
    p: float,
    causal: bool,
    debug: bool,
    *,
    scale: Any = None,
    window_size_left: Any = None,
    window_size_right: Any = None,
    **_: Any,
) -> Any:
    assert q.shape[-1] == v.shape[-1]
    assert q.shape[-1] % 8 == 0
    left, right = (None, 0) if causal else (window_size_left, window_size_right)
    q, k, v = (x[None].transpose(1, 2) if cq is not None else x.transpose(1, 2) for x in (q, k, v))
    out, lse, state = torch.empty_like(q), torch.empty(q.shape[:3]), _flash_state(p)
    for n, (i, j) in enumerate(_spans(cq, ck)):
        part = q[:, :, i], k[:, :, j], v[:, :, j]
        visible, z = _visible(part[0].shape[2], part[1].shape[2], left, right), _of_flash(p, state, *part[:2], n)
        out[:, :, i], lse[:, :, i] = _forward(*part, scale, None, visible, torch.inf, z)
    out = out.transpose(1, 2)
    return (out[0], lse[0], *state, EMPTY) if cq is not None else (out, lse, *state, EMPTY)


def _flash_band_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cq: Any,
    ck: Any,
    mq: int,
    mk: int,
    p: float,
    causal: bool,
    state: Any,
    unused: Any,
    *,
    scale: Any = None,
    window_size_left: Any = None,
    window_size_right: Any = None,
) -> Any:
    left, right = (None, 0) if causal else (window_size_left, window_size_right)
    packed = cq is not None
    grad, q, k, v, out = (x[None].transpose(1, 2) if packed else x.transpose(1, 2) for x in (grad, q, k, v, out))
    lse = lse[None] if packed else lse
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for n, (i, j) in enumerate(_spans(cq, ck)):
        visible = _visible(q[:, :, i].shape[2], k[:, :, j].shape[2], left, right)
        parts = grad[:, :, i], q[:, :, i], k[:, :, j], v[:, :, j], out[:, :, i], lse[:, :, i]
        z = _of_flash(p, (state, unused), q[:, :, i], k[:, :, j], n)
        for total, at, x in zip(grads, (i, j, j), _backward(*parts, scale, None, visible, z), strict=True):
            total[:, :, at] = x
    return tuple(x.transpose(1, 2)[0] if packed else x.transpose(1, 2) for x in grads)


def _efficient_band(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    cq: Any,
    ck: Any,
    mq: Any,
    mk: Any,
    p: float,
    kind: int,
    need: bool = False,
    *,
    scale: Any = None,
    seqlen_k: Any = None,
    window_size: Any = None,
) -> Any:
    assert window_size is None or kind == 2
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    _check_efficient(q, k, v, bias)
    assert not (p and cq is not None), "CUDA's kernel drops other weights in the backward pass"
    spans, left = _spans(cq, ck), None if window_size is None else window_size - 1
    state = _efficient_state(p)
    out, parts = q.new_empty(*q.shape[:3], v.shape[3]), []
    for i, j in spans:
        part = q[:, :, i], k[:, :, j], v[:, :, j]
        visible = _visible(part[0].shape[2], part[1].shape[2], left, 0 if kind else None)
        assert kind == 0 or part[0].shape[2] <= part[1].shape[2]
        out[:, :, i], lse = _forward(*part, scale, bias, visible, 0.0, _of_efficient(p, state, *part[:2]))
        parts.append(F.pad(lse, (0, (q.shape[2] if cq is None else mq) - lse.shape[-1]), value=torch.inf))
    return out.transpose(1, 2), _pad(torch.cat(parts)), *state, 0, 0


def _efficient_band_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Any,
    out: Tensor,
    cq: Any,
    ck: Any,
    mq: int,
    mk: int,
    lse: Tensor,
    p: float,
    seed: Any,
    offset: Any,
    kind: int,
    need: bool,
    *,
    scale: Any = None,
    num_splits_key: Any = None,
    window_size: Any = None,
    shared_storage_dqdkdv: bool = False,
) -> Any:
    grad, q, k, v, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    _check_efficient(q, k, v, bias)
    left = None if window_size is None else window_size - 1
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for n, (i, j) in enumerate(_spans(cq, ck)):
        queries = q[:, :, i].shape[2]
        visible = _visible(queries, k[:, :, j].shape[2], left, 0 if kind else None)
        of_rows = lse[n : n + 1, :, :queries] if cq is not None else lse[..., :queries]
        parts = grad[:, :, i], q[:, :, i], k[:, :, j], v[:, :, j], out[:, :, i], of_rows
        z = _of_efficient(p, (seed, offset), *parts[1:3])
        for total, at, x in zip(grads, (i, j, j), _backward(*parts, scale, bias, visible, z), strict=True):
            total[:, :, at] = x
    return *(x.transpose(1, 2) for x in grads), EMPTY


KERNELS: dict[str, Any] = {
    "_scaled_dot_product_flash_attention": _flash,
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_cudnn_attention": _cudnn,
    "_scaled_dot_product_cudnn_attention_backward": _cudnn_backward,
    "_scaled_dot_product_efficient_attention": _efficient,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "_flash_attention_forward": _flash_band,
    "_flash_attention_backward": _flash_band_backward,
    "_efficient_attention_forward": _efficient_band,
    "_efficient_attention_backward": _efficient_band_backward,
}


@contextmanager
def fused_on_cpu() -> Iterator[list[str]]:
    """Run calls with ``backend="fused"`` on the CPU within the block; yield the list of operators that ran."""
    ran: list[str] = []
    library = torch.library.Library("aten", "IMPL")

    def noted(name: str, kernel: Any) -> Any:
        def run(*args: Any, **options: Any) -> Any:
            ran.append(name)
            return kernel(*args, **options)

        return run

    try:
        for name, kernel in KERNELS.items():
            library.impl(name, noted(name, kernel), "CPU")
        with (
            mock.patch.object(mask_parts, "DEVICES", ("cuda", "meta", "cpu")),
            mock.patch.object(prepare, "prepared_calls", prepare.PreparedCalls()),
            mock.patch.object(fused_operators, "generator_of", return_value=torch.default_generator),
            mock.patch.dict(select.ORDER, {"cpu": select.ORDER["cuda"]}),
        ):
            yield ran
    finally:
        library._destroy()

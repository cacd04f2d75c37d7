"""torch's fused operators for CUDA, called directly: they return lse, and take bands and packed documents.

Each takes q [B, H, Q, D], k and v [B, Hkv, K, D] (one width for all three, unless it is efficient), and returns out and
lse [B, H, Q], float32. The backward operators ignore the gradient of lse; ``fused`` folds it into their inputs.

Source: torch, aten/src/ATen/native/native_functions.yaml, versions 2.9 to 2.13, whose argument names are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Kernel = Literal["flash", "flash band", "cudnn", "efficient", "efficient band"]

ALIGNED_LSE = 32  # rows: the efficient kernels pad lse to a multiple, with inf
NOT_CAUSAL, BOTTOM_RIGHT = 0, 2  # custom_mask_type of the efficient kernels


@dataclass(frozen=True, eq=False)
class KernelMask:
    """The mask of a call in the form of the kernels.

    Attributes:
        left, right: as in ``MaskParts``; None = all.
        packing: cumulative lengths of packed queries and keys, int32 [n + 1], or None.
        longest: the longest of these, queries and keys; Q and K without packing.
        bias: added to the logits, [B, H, Q, K] in q's dtype, or None.
    """

    left: int | None
    right: int | None
    packing: tuple[Tensor, Tensor] | None
    longest: tuple[int, int]
    bias: Tensor | None

    @property
    def causal(self) -> bool:
        """Whether queries attend up to the bottom-right diagonal, without a limit backwards."""
        return self.left is None and self.right == 0


def _are_available() -> bool:
    """Return whether the operators of this version of torch support windows."""
    required = {"_flash_attention_forward": "window_size_left", "_efficient_attention_forward": "window_size"}
    for operator, argument in required.items():
        packet: Any = getattr(torch.ops.aten, operator, None)
        if packet is None or all(each.name != argument for each in packet.default._schema.arguments):
            return False
    return True


AVAILABLE = _are_available()  # once and now: a compiler cannot trace the check


def forward(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mask: KernelMask, scale: float) -> tuple[Tensor, Tensor]:
    """Return out [B, H, Q, Dv] and lse [B, H, Q] as a kernel gives them; lse of rows without keys is undefined."""
    aten: Any = torch.ops.aten
    if kernel == "flash":
        flash = aten._scaled_dot_product_flash_attention.default
        return flash(q, k, v, dropout_p=0.0, is_causal=mask.causal, scale=scale)[:2]
    if kernel == "cudnn":
        cudnn = aten._scaled_dot_product_cudnn_attention.default
        out, lse = cudnn(q, k, v, None, True, dropout_p=0.0, is_causal=mask.causal, scale=scale)[:2]
        return out, lse.reshape(q.shape[:3])
    if kernel == "efficient":
        efficient = aten._scaled_dot_product_efficient_attention.default
        out, lse = efficient(q, k, v, mask.bias, True, dropout_p=0.0, is_causal=mask.causal, scale=scale)[:2]
        return out, lse[..., : q.shape[2]]
    if kernel == "flash band":
        q, k, v = (_lengthwise(x, mask) for x in (q, k, v))
        out, lse = aten._flash_attention_forward.default(
            q, k, v, *_packing(mask), 0.0, mask.causal, False, scale=scale, **_window(mask)
        )[:2]
        return _headwise(out, mask), lse[None] if mask.packing is not None else lse
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, T, H, D]
    out, lse = aten._efficient_attention_forward.default(
        q, k, v, mask.bias, *_packing(mask, always_longest=False), 0.0, _mask_type(mask), True, scale=scale,
        **_window_size(mask),
    )[:2]  # fmt: skip
    return out.transpose(1, 2), _joined(lse, mask, q.shape[1])


def backward(
    kernel: Kernel, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: KernelMask,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v; lse [B, H, Q] is inf in rows without keys, so that their weights are 0."""
    aten: Any = torch.ops.aten
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention_backward.default(
            grad_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, mask.causal, *_no_seed(q, flash=True),
            scale=scale,
        )[:3]  # fmt: skip
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention_backward.default(
            grad_out, q, k, v, out, lse[..., None], *_no_seed(q), None, None, None, q.shape[2], k.shape[2], 0.0,
            mask.causal, scale=scale,
        )[:3]  # fmt: skip
    if kernel == "efficient":
        return aten._scaled_dot_product_efficient_attention_backward.default(
            grad_out, q, k, v, mask.bias, out, _aligned(lse), *_no_seed(q), 0.0, [True, True, True, False],
            mask.causal, scale=scale,
        )[:3]  # fmt: skip
    if kernel == "flash band":
        grad_out, q, k, v, out = (_lengthwise(x, mask) for x in (grad_out, q, k, v, out))
        lse = lse[0].contiguous() if mask.packing is not None else lse
        grads = aten._flash_attention_backward.default(
            grad_out, q, k, v, out, lse, *_packing(mask), 0.0, mask.causal, *_no_seed(q, flash=True), scale=scale,
            **_window(mask),
        )  # fmt: skip
        return tuple(_headwise(x, mask) for x in grads[:3])  # pyright: ignore[reportReturnType]
    grad_out, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, q, k, v, out))
    grads = aten._efficient_attention_backward.default(
        grad_out, q, k, v, mask.bias, out, *_packing(mask), _split(lse, mask), 0.0, *_no_seed(q), _mask_type(mask),
        False, scale=scale, **_window_size(mask),
    )  # fmt: skip
    return tuple(x.transpose(1, 2) for x in grads[:3])  # pyright: ignore[reportReturnType]


def _lengthwise(x: Tensor, mask: KernelMask) -> Tensor:
    """Return [B, H, T, D] as flash takes it: [B, T, H, D], or [T, H, D] of packed documents."""
    x = x.transpose(1, 2)
    return x[0] if mask.packing is not None else x


def _headwise(x: Tensor, mask: KernelMask) -> Tensor:
    return (x[None] if mask.packing is not None else x).transpose(1, 2)  # [B, H, T, D]


def _packing(mask: KernelMask, always_longest: bool = True) -> tuple[Any, ...]:
    """Return the cumulative lengths of queries and keys, and the longest ones."""
    if mask.packing is None:
        return (None, None, *(mask.longest if always_longest else (None, None)))
    return (*mask.packing, *mask.longest)


def _window(mask: KernelMask) -> dict[str, int]:
    """Return the window of flash, -1 = all; a causal call has none."""
    if mask.causal or (mask.left is None and mask.right is None):
        return {}
    left, right = (-1 if n is None or n >= max(mask.longest) else n for n in (mask.left, mask.right))
    return {"window_size_left": left, "window_size_right": right}


def _mask_type(mask: KernelMask) -> int:
    return NOT_CAUSAL if mask.right is None else BOTTOM_RIGHT


def _window_size(mask: KernelMask) -> dict[str, int]:
    """Return the window of the efficient kernels: how many keys a query attends to, its own included."""
    return {} if mask.left is None or mask.left >= mask.longest[1] else {"window_size": mask.left + 1}


def _aligned(lse: Tensor) -> Tensor:
    """Return lse padded along the queries, as the efficient kernels return it."""
    return F.pad(lse, (0, -lse.shape[-1] % ALIGNED_LSE), value=torch.inf)


def _joined(lse: Tensor, mask: KernelMask, queries: int) -> Tensor:
    """Return lse [B, H, Q] from that of an efficient kernel: [B, H, padded], or [documents, H, padded]."""
    if mask.packing is None:
        return lse[..., :queries]
    entry, row = _places(mask.packing[0], queries)
    return lse[entry, :, row].T[None]  # [1, H, Q]


def _split(lse: Tensor, mask: KernelMask) -> Tensor:
    """Invert ``_joined``."""
    if mask.packing is None:
        return _aligned(lse)
    offsets, queries = mask.packing[0], lse.shape[-1]
    entry, row = _places(offsets, queries)
    padded = -(-mask.longest[0] // ALIGNED_LSE) * ALIGNED_LSE
    parts = lse.new_full((offsets.shape[0] - 1, lse.shape[1], padded), torch.inf)
    return parts.index_put((entry[:, None], torch.arange(lse.shape[1], device=lse.device), row[:, None]), lse[0].T)


def _places(offsets: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Return the document of each packed query, and its place there, int64 [Q]."""
    at = torch.arange(queries, device=offsets.device)
    entry = torch.searchsorted(offsets.long(), at, right=True) - 1
    return entry, at - offsets.long()[entry]


def _no_seed(q: Tensor, flash: bool = False) -> tuple[Tensor, Tensor]:
    """Return the state of dropout that backward operators require; without dropout they do not read it."""
    dtype = torch.uint64 if flash else torch.int64
    return q.new_zeros(2 if flash else (), dtype=dtype), q.new_zeros((), dtype=dtype)

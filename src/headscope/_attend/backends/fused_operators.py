"""torch's fused operators for CUDA, called directly: they return lse, and take bands and packed documents.

Each takes q [B, H, Q, D], k and v [B, Hkv, K, D] (one width for all three, unless it is efficient), and returns out and
lse [B, H, Q], float32. The backward operators ignore the gradient of lse; ``fused`` folds it into their inputs.

With dropout, an operator draws from torch's generator of the GPU, and returns the seed and offset of that generator.
The backward operator takes them, and drops the same weights; each kernel drops others. Flash stores them on the GPU,
and the memory-efficient kernels on the host, or on the GPU within a capture of a CUDA graph.

Source: torch, aten/src/ATen/native/native_functions.yaml, versions 2.9 to 2.13, whose argument names are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope._attend.dropout import seeded
from headscope._attend.interface import readable

Kernel = Literal["flash", "flash band", "cudnn", "efficient", "efficient band"]
State = tuple[Tensor, Tensor]
"""Seed and offset of the generator, as backward operators take them; flash has both in the first tensor."""

ALIGNED_LSE = 32  # rows: the efficient kernels pad lse to a multiple, with inf
NOT_CAUSAL, BOTTOM_RIGHT = 0, 2  # custom_mask_type of the efficient kernels
MOST_DROPPED = 1 << 31  # weights that the efficient kernels can number, see ``can_number``
ANOTHER_DRAW = "dropout: another thread drew from torch's generator of this device; expected one thread to draw from it"


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


def forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mask: KernelMask, scale: float, dropout: float
) -> tuple[Tensor, Tensor, State]:
    """Return out [B, H, Q, Dv], lse [B, H, Q] and the state of dropout; lse of rows without keys is undefined."""
    aten: Any = torch.ops.aten
    if kernel == "flash":
        flash = aten._scaled_dot_product_flash_attention.default
        results = flash(q, k, v, dropout_p=dropout, is_causal=mask.causal, scale=scale)
        return results[0], results[1], results[6:8]
    if kernel == "cudnn":
        cudnn = aten._scaled_dot_product_cudnn_attention.default
        results = cudnn(q, k, v, None, True, dropout_p=dropout, is_causal=mask.causal, scale=scale)
        return results[0], results[1].reshape(q.shape[:3]), results[6:8]
    if kernel == "efficient":
        efficient = aten._scaled_dot_product_efficient_attention.default
        results = efficient(q, k, v, mask.bias, True, dropout_p=dropout, is_causal=mask.causal, scale=scale)
        return results[0], results[1][..., : q.shape[2]], results[2:4]
    if kernel == "flash band":
        q, k, v = (_lengthwise(x, mask) for x in (q, k, v))
        out, lse, *state = aten._flash_attention_forward.default(
            q, k, v, *_packing(mask), dropout, mask.causal, False, scale=scale, **_window(mask)
        )[:4]
        return _headwise(out, mask), lse[None] if mask.packing is not None else lse, (state[0], state[1])
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, T, H, D]
    out, lse, *state = aten._efficient_attention_forward.default(
        q, k, v, mask.bias, *_packing(mask, always_longest=False), dropout, _mask_type(mask), True, scale=scale,
        **_window_size(mask),
    )[:4]  # fmt: skip
    return out.transpose(1, 2), _joined(lse, mask, q.shape[1]), (state[0], state[1])


def backward(
    kernel: Kernel, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: KernelMask,
    scale: float, dropout: float, state: State | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k and v; lse [B, H, Q] is inf in rows without keys, so that their weights are 0."""
    aten: Any = torch.ops.aten
    drawn = _no_state(kernel, q) if state is None else _checked(kernel, q, state)
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention_backward.default(
            grad_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], dropout, mask.causal, *drawn, scale=scale
        )[:3]
    if kernel == "cudnn":
        return aten._scaled_dot_product_cudnn_attention_backward.default(
            grad_out, q, k, v, out, lse[..., None], *drawn, None, None, None, q.shape[2], k.shape[2], dropout,
            mask.causal, scale=scale,
        )[:3]  # fmt: skip
    if kernel == "efficient":
        return aten._scaled_dot_product_efficient_attention_backward.default(
            grad_out, q, k, v, mask.bias, out, _aligned(lse), *drawn, dropout, [True, True, True, False], mask.causal,
            scale=scale,
        )[:3]  # fmt: skip
    if kernel == "flash band":
        grad_out, q, k, v, out = (_lengthwise(x, mask) for x in (grad_out, q, k, v, out))
        lse = lse[0].contiguous() if mask.packing is not None else lse
        grads = aten._flash_attention_backward.default(
            grad_out, q, k, v, out, lse, *_packing(mask), dropout, mask.causal, *drawn, scale=scale, **_window(mask)
        )
        return tuple(_headwise(x, mask) for x in grads[:3])  # pyright: ignore[reportReturnType]
    grad_out, q, k, v, out = (x.transpose(1, 2) for x in (grad_out, q, k, v, out))
    grads = aten._efficient_attention_backward.default(
        grad_out, q, k, v, mask.bias, out, *_packing(mask), _split(lse, mask), dropout, *drawn, _mask_type(mask), False,
        scale=scale, **_window_size(mask),
    )  # fmt: skip
    return tuple(x.transpose(1, 2) for x in grads[:3])  # pyright: ignore[reportReturnType]


# ---------------------------------------------------------------- dropout


def forward_seeded(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, mask: KernelMask, scale: float, dropout: float, seed: int,
    check: bool,
) -> tuple[Tensor, Tensor, State]:  # fmt: skip
    """Return ``forward`` after seeding torch's generator, which is then as it was before.

    ``check``: raise if another thread drew in between, so that ``state_of_seed`` would be another state. This does not
    wait: on a GPU it is an assertion of the device.
    """
    aten: Any = torch.ops.aten
    generator = generator_of(q.device)
    if generator is None:
        return forward(kernel, q, k, v, mask, scale, dropout)
    with seeded(generator, seed):
        out, lse, state = forward(kernel, q, k, v, mask, scale, dropout)
    pairs = list(zip(state, state_of_seed(kernel, q, seed), strict=True)) if check else []
    for drawn, right in pairs[:1] if kernel.startswith("flash") else pairs:
        aten._assert_async.msg((drawn.view(torch.int64) == right.view(torch.int64)).all(), ANOTHER_DRAW)
    return out, lse, state


def can_number(weights: int) -> bool:
    """Return whether the efficient kernels drop the same of so many weights, B x H x Q x K, in both passes.

    They number the weights in 32 bits, and overflow in another way in the backward pass. A size that an export leaves
    open is not compared, because that would restrict the program: its operator compares the sizes when it runs.
    """
    return isinstance(weights, torch.SymInt) or weights < MOST_DROPPED


def generator_of(device: torch.device) -> torch.Generator | None:
    """Return the generator from which the operators draw; None without a GPU, where tensors have no values."""
    generators = torch.cuda.default_generators
    return generators[device.index] if generators and device.type == "cuda" else None


def can_seed(device: torch.device) -> bool:
    """Return whether the generator can be seeded: not within the capture of a CUDA graph."""
    return generator_of(device) is not None and not (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def state_of_seed(kernel: Kernel, q: Tensor, seed: int) -> State:
    """Return the state of a generator that was seeded and has not drawn yet; on the GPU by kernels, not by a copy."""
    if not kernel.startswith("flash"):
        return torch.tensor(seed), torch.tensor(0)
    first, none = (q.new_full((1,), n, dtype=torch.int64) for n in (seed, 0))
    return torch.cat((first, none)).view(torch.uint64), none[0].view(torch.uint64)


def _no_state(kernel: Kernel, q: Tensor) -> State:
    """Return the state that backward operators require without dropout, and do not read."""
    dtype = torch.uint64 if kernel.startswith("flash") else torch.int64
    return q.new_zeros(2 if kernel.startswith("flash") else (), dtype=dtype), q.new_zeros((), dtype=dtype)


def _checked(kernel: Kernel, q: Tensor, state: State) -> State:
    """Return the state, unless a memory-efficient kernel would read an address of the host on the GPU, or reversely."""
    if kernel.startswith("efficient") and q.is_cuda and state[0].is_cuda != torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "dropout: either the forward or the backward pass is in the capture of a CUDA graph; expected both or none"
        )
    return state


# ---------------------------------------------------------------- layouts


def _lengthwise(x: Tensor, mask: KernelMask) -> Tensor:
    """Return [B, H, T, D] as flash takes it: [B, T, H, D], or [T, H, D] of packed documents."""
    x = x.transpose(1, 2)
    return x[0] if mask.packing is not None else x


def aligned_rows(x: Tensor, width: int) -> Tensor:
    """Return rows of a width that the kernels can load: the last axis is dense, and rows start at 16 bytes."""
    if x.shape[-1] != width:
        return F.pad(x, (0, width - x.shape[-1]))
    x, numbers = readable(x), 16 // x.element_size()
    steps = (x.storage_offset(), *x.stride()[:-1])
    return x if x.stride(-1) == 1 and all(step % numbers == 0 for step in steps) else x.contiguous()


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

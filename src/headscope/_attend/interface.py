"""The interface of backends: their abilities, and the tensors that they take and return.

A backend takes canonical tensors: q [B, H, Q, D], k [B, Hkv, K, D], v [B, Hkv, K, Dv], a bias that broadcasts to [B, H,
Q, K] with four axes, sinks [H]. It returns ``out`` [B, H, Q, Dv] in q's dtype and, if the call requests it, ``lse`` [B,
H, Q] in float32 (float64 for float64).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from headscope._attend.call import Call
from headscope._attend.dropout import Seed
from headscope._support.autograd import Function
from headscope.masks import Plan

NO_BATCHED_GRADIENTS = (
    "attention: this backend does not support batched gradients (is_grads_batched, vectorize=True); use "
    'torch.func.jacrev, torch.vmap or backend="reference"'
)
NO_FORWARD_MODE = (
    'attention: this backend does not support forward-mode gradients (jvp, jacfwd, hessian); backend="reference" '
    "does, with memory quadratic in the length"
)
NO_SECOND_DERIVATIVE = (
    'attention: this backend does not support second derivatives; backend="reference" does, with memory quadratic '
    "in the length"
)


class Inputs(NamedTuple):
    """The tensors of one call, in canonical form."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sinks: Tensor | None

    def detach(self) -> Inputs:
        """Return the same tensors without their gradients."""
        bias, sinks = (None if x is None else x.detach() for x in self[3:])
        return Inputs(self.q.detach(), self.k.detach(), self.v.detach(), bias, sinks)


Pair = tuple[Tensor | None, Tensor | None]
"""The gradients of out and lse."""


class ForwardPass(NamedTuple):
    """A forward pass, as its gradient requires it."""

    call: Call
    plan: Plan | None
    seed: Seed


Result = tuple[Tensor, Tensor | None]
"""out, and lse if the call requests it."""


class Attend(Protocol):
    """The signature of a backend's ``attend``."""

    def __call__(self, call: Call, plan: Plan | None, inputs: Inputs, /) -> Result: ...


class AttendFinite(Protocol):
    """The signature of a backend's ``attend_finite``."""

    def __call__(self, call: Call, plan: Plan | None, inputs: Inputs, /) -> Result | None: ...


class Repeat(Protocol):
    """A fast path for one prepared call on other tensors: returns out, and lse if the call requests it.

    Takes q, k, v, and bias and sinks if there are any. Returns None if the full path must follow.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, sinks: Tensor | None = None, /
    ) -> Result | None: ...


class MakeRepeat(Protocol):
    """The signature of a backend's ``repeater``; the inputs are the caller's, with four axes except for the bias."""

    def __call__(self, call: Call, plan: Plan | None, inputs: Inputs, /) -> Repeat | None: ...


class Backend(Protocol):
    """One implementation of attention: a module of ``_attend.backends``. A missing ability is None."""

    @property
    def name(self) -> str: ...

    def refuses(self, call: Call) -> list[str]:
        """Return why this backend does not support the call; empty if it does."""
        ...

    @property
    def attend(self) -> Attend: ...

    @property
    def attend_finite(self) -> AttendFinite | None:
        """``attend`` by kernels that detect NaN and infinity, for calls without dropout.

        Returns None if NaN or infinity may have reached rows where they are masked.
        """
        ...

    @property
    def attend_careful(self) -> Attend | None:
        """``attend`` for inputs whose logits may overflow, if ``attend`` adds masks to logits."""
        ...

    @property
    def repeater(self) -> MakeRepeat | None:
        """The maker of the fast path for repeated calls with other tensors of the same sizes, dtypes and strides."""
        ...


class SeededAttend(Protocol):
    """``Attend`` with a dropout seed; None draws one from torch's generator."""

    def __call__(self, call: Call, plan: Plan | None, inputs: Inputs, /, seed: Seed | None = None) -> Result: ...


class OperatorBackend(Backend, Protocol):
    """A backend that can run as an operator: its dropout takes a seed, and its gradients are a function."""

    @property
    def attend(self) -> SeededAttend: ...

    def gradients(
        self,
        forward: ForwardPass,
        inputs: Inputs,
        results: tuple[Tensor, Tensor],
        grads: Pair,
        needed: tuple[bool, ...],
        /,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k, v, and of bias and sinks if needed."""
        ...


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of logits, softmax and lse: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def readable(x: Tensor) -> Tensor:
    """Return x, or a copy, such that ``data_ptr`` points to its numbers."""
    return x.clone() if is_lazy(x) else x


def is_lazy(x: Tensor) -> bool:
    """Return whether x has no memory, or its memory holds the negatives of its numbers (``torch._neg_view``)."""
    return x.is_neg() or x._is_zerotensor()


def within_range(call: Call, q: Tensor, k: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether q, k and any bias are finite and so small that no logit overflows; a bias may be -inf.

    It uses the norms of all of q and k, which bound each product of two rows (Cauchy–Schwarz).
    """
    dtype = accumulate_dtype(call.dtype)
    bound = max(1.0, abs(call.scale))
    for x in (q, k):
        bound *= torch.linalg.vector_norm(x.detach(), dtype=dtype).item()
    if bias is not None and bias.numel():
        bound += max(bias.detach().amax().item(), 0.0)  # NaN stays NaN, and is out of range
    return bound <= torch.finfo(dtype).max / 4


_AS_IT_IS = nullcontext()


def full_precision(call: Call) -> AbstractContextManager[object]:
    """Return a context without autocast, which would round logits and weights to half precision."""
    if call.device == "meta" or not torch.is_autocast_enabled(call.device):
        return _AS_IT_IS
    return torch.autocast(call.device, enabled=False)


def refuse_batched(*grads: Tensor | None) -> None:
    """Raise if autograd passes batched gradients; a compiled function does not get such."""
    if not is_dynamo_compiling() and any(x is not None and is_legacy_batchedtensor(x) for x in grads):
        raise RuntimeError(NO_BATCHED_GRADIENTS)


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raise if a tensor has a forward-mode gradient: code that only reads its values would silently drop it."""
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise RuntimeError(NO_FORWARD_MODE)


def once(
    gradients: tuple[Tensor | None, ...], *made_from: Tensor | None, message: str = NO_SECOND_DERIVATIVE
) -> tuple[Tensor | None, ...]:
    """Return gradients that raise if they are differentiated again; for the end of a backward pass.

    torch's ``once_differentiable`` is not sufficient: if the incoming gradient does not require a gradient, it returns
    constants. A sum of a loss and a penalty on its gradient would then silently lose the gradient of the penalty.
    """
    if not torch.is_grad_enabled():  # the usual case, unless create_graph is set
        return gradients
    return _Once.apply(message, *gradients, *made_from)[: len(gradients)]


class _Once(Function[tuple[Tensor | None, ...]]):
    """An identity that raises when it is differentiated."""

    @staticmethod
    def forward(ctx: Any, message: str, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.message = message
        return tuple(None if x is None else x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise RuntimeError(ctx.message)

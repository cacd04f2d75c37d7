"""The interface of backends: what each can do, and the tensors that it takes and returns.

A backend takes canonical tensors: q [B, H, Q, D], k [B, Hkv, K, D], v [B, Hkv, K, Dv], a bias that broadcasts to
[B, H, Q, K] with four axes, sinks [H]. It returns ``out`` [B, H, Q, Dv] in q's dtype and, if the call asks for it,
``lse`` [B, H, Q] in float32 (float64 for float64).
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
    """A forward pass, as its gradient needs it."""

    call: Call
    plan: Plan | None
    seed: int


Result = tuple[Tensor, Tensor | None]
"""out, and lse if the call asks for it."""


class Attend(Protocol):
    """The signature of a backend's ``attend``."""

    def __call__(self, call: Call, plan: Plan | None, inputs: Inputs, /) -> Result: ...


class AttendFinite(Protocol):
    """The signature of a backend's ``attend_finite``."""

    def __call__(self, call: Call, plan: Plan | None, inputs: Inputs, /) -> Result | None: ...


class Repeat(Protocol):
    """A short way for one prepared call on other tensors: out, and lse if the call asks for it.

    Takes q, k, v, and bias and sinks where there are any. Returns None where the long way must follow.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, sinks: Tensor | None = None, /
    ) -> Result | None: ...


class MakeRepeat(Protocol):
    """The signature of a backend's ``repeater``; the inputs are as they came, with four axes but for the bias."""

    def __call__(self, call: Call, plan: Plan | None, inputs: Inputs, /) -> Repeat | None: ...


class Backend(Protocol):
    """One way to attend: a module of ``_attend.backends``. An ability that it does not have is None."""

    @property
    def name(self) -> str: ...

    def refuses(self, call: Call) -> list[str]:
        """Return why this backend cannot take the call; empty if it can."""
        ...

    @property
    def attend(self) -> Attend: ...

    @property
    def attend_finite(self) -> AttendFinite | None:
        """``attend`` by kernels that notice NaN and infinity, for calls without dropout.

        Returns None where NaN or infinity may have reached rows that must not see them.
        """
        ...

    @property
    def attend_careful(self) -> Attend | None:
        """``attend`` for inputs whose logits may overflow, where ``attend`` adds masks to logits."""
        ...

    @property
    def repeater(self) -> MakeRepeat | None:
        """Makes the short way for calls that come again with other tensors of the same sizes, dtypes and strides."""
        ...


class SeededAttend(Protocol):
    """``Attend`` that takes the seed of dropout; None draws one from torch's generator."""

    def __call__(self, call: Call, plan: Plan | None, inputs: Inputs, /, seed: int | None = None) -> Result: ...


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
        """Return the gradients of q, k, v, and of bias and sinks where they are needed."""
        ...


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which logits, softmax and lse are computed: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def readable(x: Tensor) -> Tensor:
    """Return x, or a copy of it, such that ``data_ptr`` points to its numbers."""
    return x.clone() if is_lazy(x) else x


def is_lazy(x: Tensor) -> bool:
    """Whether x has no memory, or its memory holds the negatives of its numbers (``torch._neg_view``)."""
    return x.is_neg() or x._is_zerotensor()


def within_range(call: Call, q: Tensor, k: Tensor, bias: Tensor | None = None) -> bool:
    """Whether q, k and bias, where there is one, are finite and so small that no logit overflows; a bias may be -inf.

    By the norms of the whole of q and k: no product of two of their rows is larger (Cauchy and Schwarz).
    """
    dtype = accumulate_dtype(call.dtype)
    bound = max(1.0, abs(call.scale))
    for x in (q, k):
        bound *= torch.linalg.vector_norm(x.detach(), dtype=dtype).item()
    if bias is not None and bias.numel():
        bound += max(bias.detach().amax().item(), 0.0)  # NaN stays NaN, and is not within
    return bound <= torch.finfo(dtype).max / 4


_AS_IT_IS = nullcontext()


def full_precision(call: Call) -> AbstractContextManager[object]:
    """No autocast: it would round logits and weights to half precision behind the dtypes asked for."""
    if call.device == "meta" or not torch.is_autocast_enabled(call.device):
        return _AS_IT_IS
    return torch.autocast(call.device, enabled=False)


def refuse_batched(*grads: Tensor | None) -> None:
    """Raise where autograd hands in several gradients in the place of each; a compiled function has none such."""
    if not is_dynamo_compiling() and any(x is not None and is_legacy_batchedtensor(x) for x in grads):
        raise RuntimeError(NO_BATCHED_GRADIENTS)


def refuse_tangents(*tensors: Tensor | None) -> None:
    """Raise where one has a gradient in forward mode: what reads numbers alone would drop it without a word."""
    if forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    ):
        raise RuntimeError(NO_FORWARD_MODE)


def once(gradients: tuple[Tensor | None, ...], *made_from: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients that raise where somebody differentiates them again; for the end of a backward pass.

    torch's ``once_differentiable`` would not do: where the gradient that comes in needs none itself, it returns
    constants, and a sum of a loss and a penalty on its gradient would lose the penalty's without a word.
    """
    if not torch.is_grad_enabled():  # as it is unless somebody asked for create_graph
        return gradients
    return _Once.apply(*gradients, *made_from)[: len(gradients)]


class _Once(Function[tuple[Tensor | None, ...]]):
    """Hands tensors through and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if x is None else x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise RuntimeError(NO_SECOND_DERIVATIVE)

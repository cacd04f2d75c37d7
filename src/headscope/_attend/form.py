"""How the tensors of a call may be read: past torch, or only by its operators."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import (
    CGradInterpreterPtr,
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
)
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.compiler import is_dynamo_compiling

from headscope._support.tensor_classes import ORDINARY
from headscope._support.torch_state import is_traced

Form = Literal["plain", "traced", "mapped", "transformed", "subclass"]

_STAND_INS = (FakeTensor, FunctionalTensor)  # what torch.export shows in the place of ordinary ones


def may_need_gradient(x: Tensor) -> bool:
    """Whether it needs one. Of a batch of torch.func its entries say it, but to no compiler: there it may."""
    if x.requires_grad or not _are_functorch_transforms_active():
        return x.requires_grad
    if is_dynamo_compiling():
        return is_batchedtensor(x)
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
        if x.requires_grad:
            return True
    return False


def _goes_further() -> bool:
    """Whether the transforms of torch.func around may ask for more than a first gradient."""
    taken = [each for each in get_interpreter_stack() if each.key() in (TransformType.Grad, TransformType.Jvp)]
    if len(taken) == 1 and taken[0].key() == TransformType.Grad:
        return CGradInterpreterPtr(taken[0]).prevGradMode()  # autograd may ask for the next
    return len(taken) > 0


# A compiler takes what it says for a constant: of the transforms around it has made guards. This is how
# torch.compiler.assume_constant_result marks it, which imports the compiler.
_goes_further._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def form(*tensors: Tensor | None) -> Form:
    """How these may be read; see ``Call``."""
    if is_dynamo_compiling() and _are_functorch_transforms_active():
        return "transformed" if _goes_further() else "mapped"
    found: Form = "traced" if is_traced() else "plain"
    for x in tensors:
        if x is not None and type(x) not in ORDINARY:
            if type(x) not in _STAND_INS:
                return "subclass"
            found = "traced"
    return found

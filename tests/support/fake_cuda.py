"""Fake tensors of CUDA, and what a call of headscope does with them: operators, without a GPU.

A CPU build of torch has no device guard for CUDA, which ``x[...]``, ``~x``, ``copy_``, ``contiguous`` and gradients
require. These methods are replaced by operators here; gradients cannot be traced.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.nn.attention.flex_attention import AuxOutput
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from headscope._attend import call, prepare
from headscope._attend.backends import blocked, flex
from headscope._observe import placement, scene
from headscope._support import device_constants, tensor_classes
from headscope.masks import _base

aten = torch.ops.aten
SDPA = "scaled_dot_product_attention"


def _taken(x: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """Return x after slices and numbers, and its index tensors by axis."""
    items = list(index) if isinstance(index, tuple) else [index]
    given = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis in [item for item in items if not isinstance(item, Tensor)]:
        at = next(n for n, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (x.ndim - given)
    axis, tensors = 0, list[Tensor | None]()
    for item in items:
        if item is None:
            x = aten.unsqueeze(x, axis)
        elif isinstance(item, slice):
            if item != slice(None):
                x = aten.slice(x, axis, item.start, item.stop, item.step or 1)
        elif isinstance(item, (list, Tensor)):
            tensors += [None] * (axis - len(tensors)) + [item if isinstance(item, Tensor) else torch.tensor(item)]
        else:
            x = aten.select(x, axis, item)
            continue
        axis += 1
    return x, tensors


def _getitem(x: Tensor, index: Any) -> Tensor:
    x, tensors = _taken(x, index)
    return aten.index(x, tensors) if tensors else x


def _setitem(x: Tensor, index: Any, value: Any) -> None:
    x, tensors = _taken(x, index)
    value = value if isinstance(value, Tensor) else torch.full((), value, dtype=x.dtype, device=x.device)
    if tensors:
        aten.index_put_(x, tensors, value.to(x.dtype))
    else:
        aten.copy_(x, value)


def _run(x: Tensor, operator: Any, *args: Any) -> Any:
    return operator(x, *args)


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else aten.clone(x, memory_format=torch.contiguous_format)


@torch.library.custom_op("headscope_tests::flex_attention", mutates_args=())
def _flex(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


_flex.register_fake(_flex._init_fn)


def _flex_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, AuxOutput]:
    """Stand in for the compiled flex_attention, with results of its sizes."""
    out, lse = _flex(q, v)
    return out, AuxOutput(lse=lse)


def _stand_in() -> Any:
    return _flex_attention


def _all_factors(call: Any, block: Any, seed: Any, like: Tensor) -> Tensor:
    return torch.empty_like(like)


def _no_blocks(*args: Any) -> None:
    return None


class _Operators(TorchDispatchMode):
    """Records the operators that run, and the devices that each copy connects."""

    is_transparent = True

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name() if hasattr(func, "name") and callable(func.name) else str(func)
        tensors = [x for x in (*args, result) if isinstance(x, Tensor)]
        self.names.append(name.removeprefix("aten::").removeprefix("headscope_tests::"))
        if len({x.device.type for x in tensors if x.ndim or "copy" in name}) > 1:
            self.names[-1] += ": between devices"
        return result


class _Sdpa(TorchFunctionMode):
    """Records calls of ``scaled_dot_product_attention``: a CPU build does not choose one of CUDA's kernels for it."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == SDPA:
            self.names.append(SDPA)
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_cuda(eager: bool = True) -> Iterator[FakeTensorMode]:
    """Make fake tensors of CUDA possible; ``eager``: headscope treats them as tensors with memory."""
    mode = FakeTensorMode()
    with ExitStack() as stack:
        for cached in (_base.plan_by_value, device_constants._integers, device_constants._numbers):
            stack.callback(cached.cache_clear)  # what they hold is fake
            cached.cache_clear()
        stack.enter_context(mock.patch.object(placement, "_frames", placement.BoundedTable(16)))
        stack.enter_context(mock.patch.object(FakeTensor, "__getitem__", _getitem, create=True))
        stack.enter_context(mock.patch.object(FakeTensor, "__setitem__", _setitem, create=True))
        replaced = {"__invert__": aten.bitwise_not, "copy_": aten.copy_, "contiguous": _contiguous}
        for name, operator in replaced.items():
            method = partialmethod(_run, operator)
            stack.enter_context(mock.patch.object(FakeTensor, name, method, create=True))
        stack.enter_context(mock.patch.object(prepare, "prepared_calls", prepare.PreparedCalls()))
        seed = mock.Mock(**{"return_value.item.return_value": 1})  # a CPU build has no generator of CUDA
        stack.enter_context(mock.patch.object(blocked, "draw_seed", new=seed))
        stack.enter_context(mock.patch.object(blocked, "_keep", new=_all_factors))
        stack.enter_context(mock.patch.object(flex, "_function", new=_stand_in))  # it would generate a kernel
        stack.enter_context(mock.patch.object(flex, "_block_mask", new=_no_blocks))  # it assigns by index
        if eager:
            ordinary = (*tensor_classes.ORDINARY, FakeTensor)
            stack.enter_context(mock.patch.object(mode, "is_transparent", True, create=True))
            stack.enter_context(mock.patch.object(call, "_STAND_INS", ()))
            for module in (call, tensor_classes, scene):
                stack.enter_context(mock.patch.object(module, "ORDINARY", ordinary))
        stack.enter_context(mode)
        yield mode


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Yield the list of operators that run within the block, and of calls of SDPA."""
    operators = _Operators()
    with _Sdpa(operators.names), operators:
        yield operators.names

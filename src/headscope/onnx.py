"""Export to ONNX: the operator of the native kernels becomes the standard's own ``Attention``.

torch.onnx.export(model, inputs, dynamo=True, opset_version=23, custom_translation_table=headscope.onnx.translations())
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from importlib import import_module
from itertools import islice
from typing import Any

import numpy as np
import torch

from headscope import _linear as projections  # noqa: F401  # pyright: ignore[reportUnusedImport]  # so does this
from headscope import functional  # noqa: F401  # pyright: ignore[reportUnusedImport]  # it registers the operators
from headscope._support.onnx_export import mark_translated
from headscope.masks import FAR, UNBOUNDED, Code, offset_limits, unknown_code

__all__ = ["translations"]

Value = Any
"""A tensor of the ONNX graph under construction, or a number."""

_FLOAT, _INT64, _DOUBLE = 1, 7, 11  # as ONNX numbers dtypes


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the ONNX form of headscope's operators, for ``torch.onnx.export(custom_translation_table=...)``.

    ``headscope.attention`` with every mask of ``headscope.masks``, bias, scale, softcap, sinks, grouped heads and open
    lengths becomes one ``Attention`` of opset 23 and operators that build its mask; a row without visible keys is zero
    there, too. A causal mask over equal lengths uses the operator's own option. Pass ``opset_version=23`` or higher,
    and a module in eval mode.

    Raises:
        ImportError: onnxscript is not installed.
        ValueError: on export, if dropout is above 0.

    Examples:
        >>> from headscope import onnx
        >>> [operator.name() for operator in onnx.translations()]
        ['headscope::attend_forward', 'headscope::linear']
    """
    import_module("onnxscript")  # raise now if it is missing, and not while a graph is built
    mark_translated()
    return {torch.ops.headscope.attend_forward.default: _attend, torch.ops.headscope.linear.default: _linear}


def _linear(input: Value, weight: Value, bias: Value | None) -> Value:
    """Translate the product of a reproducible module; the runtime that runs the file sums in its own order."""
    from onnxscript import opset23

    op: Any = opset23
    product = op.MatMul(input, op.Transpose(weight, perm=[1, 0]))
    return product if bias is None else op.Add(product, bias)


def _attend(
    q: Value, k: Value, v: Value, bias: Value | None, sinks: Value | None, codes: Sequence[int], parts: Sequence[Value],
    scale: float, softcap: float, dropout: float, seed: Value | None, backend: str,
) -> tuple[Value, Value]:  # fmt: skip
    """Return out and lse in ONNX operators; the exporter drops those of lse if lse is unused."""
    from onnxscript import opset23

    op: Any = opset23
    if dropout:
        raise ValueError(
            f"dropout: got {dropout}, which ONNX's Attention does not support; export the module in eval mode"
        )
    # values computed from q below have neither shape nor dtype while the graph is built
    is_square = q.shape is not None and k.shape is not None and q.shape[2] == k.shape[2]
    added = _added(op, q, k, _Masks(op, q, k).of(codes, parts) if codes else None, bias)
    q, scale = _scaled(op, q, scale)
    settings: dict[str, Any] = {"scale": scale}
    if softcap:
        settings["softcap"] = softcap
    if sinks is not None:
        k, v, added = _with_sink(op, q, k, v, sinks, added)
    lse = _lse(op, q, k, added, scale, softcap)
    if sinks is None and bias is None and list(codes) == _CAUSAL and is_square:
        return op.Attention(q, k, v, is_causal=1, **settings)[0], lse
    if added is None:
        return op.Attention(q, k, v, **settings)[0], lse
    out = op.Attention(q, k, v, added, **settings)[0]
    most = op.ReduceMax(op.Cast(added, to=_FLOAT), op.Constant(value_ints=[-1]), keepdims=1)
    nothing = op.IsInf(most, detect_positive=0)  # a row without visible keys: not every runtime makes it zero
    return op.Where(nothing, op.CastLike(0.0, out), out), lse


def _scaled(op: Any, q: Value, scale: float) -> tuple[Value, float]:
    """Return q and the scale of the operator, whose numbers are float32 and, in ONNX Runtime, above 0."""
    if q.dtype == _DOUBLE:
        return op.Mul(q, op.Constant(value=import_module("onnxscript").ir.tensor(np.float64(scale)))), 1.0
    if scale == 0:
        return op.Mul(q, op.CastLike(0.0, q)), 1.0
    return (op.Neg(q), -scale) if scale < 0 else (q, scale)


_CAUSAL = [Code.BAND, UNBOUNDED, 0, Code.NO_OFFSET]


class _Masks:
    """The mask of a call as a boolean tensor that broadcasts to [B, H, Q, K]; see ``headscope.masks``."""

    def __init__(self, op: Any, q: Value, k: Value) -> None:
        self.op = op
        queries, keys = (op.Squeeze(_size(op, x, 2)) for x in (q, k))
        self.i = op.Unsqueeze(op.Range(0, queries, 1), [1])  # [Q, 1]
        self.j = op.Unsqueeze(op.Range(0, keys, 1), [0])  # [1, K]
        self.last = op.Sub(keys, queries)  # the position at the bottom right

    def of(self, codes: Sequence[int], parts: Sequence[Value]) -> Value:
        """Return the mask that ``Mask.encode`` wrote."""
        op, numbers, tensors, stack = self.op, iter(codes), iter(parts), list[Value]()
        for code in numbers:
            match code:
                case Code.BAND:
                    stack.append(self._band(next(numbers), next(numbers), numbers, tensors))
                case Code.PREFIX:
                    stack.append(op.Less(self.j, next(numbers)))
                case Code.LENGTHS:
                    stack.append(op.Less(self.j, op.Unsqueeze(_whole(op, next(tensors)), [1, 2, 3])))
                case Code.DOCUMENTS | Code.PACKED:
                    q_ids, k_ids = _whole(op, next(tensors)), _whole(op, next(tensors))
                    if code == Code.PACKED:  # cumulative lengths, which the ids repeat
                        _ = [next(numbers) for _ in range(3)], [next(tensors) for _ in range(2)]
                    same = op.Equal(op.Unsqueeze(q_ids, [2]), op.Unsqueeze(k_ids, [1]))  # [B, Q, K]
                    stack.append(op.Unsqueeze(same, [1]))
                case Code.DENSE:
                    stack.append(next(tensors))
                case Code.BOTH | Code.EITHER:
                    second, first = stack.pop(), stack.pop()
                    stack.append((op.And if code == Code.BOTH else op.Or)(first, second))
                case _:
                    raise unknown_code(code)
        return stack[0]

    def _band(self, left: int, right: int, numbers: Iterator[int], tensors: Iterator[Value]) -> Value:
        op, code = self.op, next(numbers)
        match code:
            case Code.NO_OFFSET:
                offset = self.last
            case Code.ONE_OFFSET:
                offset = next(numbers)
            case Code.OFFSETS:
                some = list(islice(numbers, next(numbers)))
                offset = op.Unsqueeze(op.Constant(value_ints=some), [1, 2, 3])  # [B, 1, 1, 1]
            case Code.OFFSET_TENSOR:
                tensor = next(tensors)
                whole = _whole(op, tensor)
                offset = op.Unsqueeze(whole, [1, 2, 3]) if len(tensor.shape) else whole
            case _:
                raise unknown_code(code)
        shifted = self._shifted_tensor if code == Code.OFFSET_TENSOR else self._shifted
        gap = op.Sub(self.j, self.i)
        limits = [op.GreaterOrEqual(gap, shifted(offset, -left))] if left < UNBOUNDED else []
        limits += [op.LessOrEqual(gap, shifted(offset, right))] if right < UNBOUNDED else []
        everything = [op.GreaterOrEqual(self.j, op.Sub(0, self.i))]  # 0 <= i + j
        return reduce(op.And, limits or everything)

    def _shifted(self, offset: Value | int, by: int) -> Value:
        """Add a reach to offsets that were checked: they are within ``FAR``."""
        return self.op.Add(offset, max(-2 * FAR, min(by, 2 * FAR)))

    def _shifted_tensor(self, offset: Value, by: int) -> Value:
        """Add a reach to offsets of any size."""
        limits = (None if limit is None else self.op.Constant(value_int=limit) for limit in offset_limits(by))
        return self.op.Add(self.op.Clip(offset, *limits), by)


def _whole(op: Any, tensor: Value) -> Value:
    return op.Cast(tensor, to=_INT64)


def _added(op: Any, q: Value, k: Value, visible: Value | None, bias: Value | None) -> Value | None:
    """Return the tensor to add to the logits, [B or 1, H or 1, Q, K] in q's dtype, or a wider one; None = nothing."""
    if bias is not None and bias.dtype != q.dtype:
        bias = op.Cast(bias, to=_DOUBLE if q.dtype == _DOUBLE else _FLOAT)
    if visible is not None:
        bias = op.CastLike(0.0, q) if bias is None else bias
        bias = op.Where(visible, bias, op.CastLike(-math.inf, bias))
    if bias is None:
        return None
    return op.Expand(bias, _sizes(op, 1, 1, _size(op, q, 2), _size(op, k, 2)))


def _with_sink(op: Any, q: Value, k: Value, v: Value, sinks: Value, added: Value | None) -> tuple[Value, Value, Value]:
    """Append a sink as one more key, with zero vectors and its logit in the bias; return keys, values and bias."""
    queries, heads = _size(op, q, 2), _size(op, q, 1)
    if added is None:
        added = op.Expand(op.CastLike(0.0, q), _sizes(op, 1, 1, queries, _size(op, k, 2)))
    added = op.Expand(added, _sizes(op, 1, heads, 1, 1))  # [B or 1, H, Q, K]
    column = op.Expand(
        op.Unsqueeze(op.CastLike(sinks, added), [0, 2, 3]), _sizes(op, _size(op, added, 0), 1, queries, 1)
    )
    k, v = (
        op.Concat(
            x, op.Expand(op.CastLike(0.0, x), _sizes(op, op.Shape(x, start=0, end=2), 1, _size(op, x, 3))), axis=2
        )
        for x in (k, v)
    )
    return k, v, op.Concat(added, column, axis=3)


def _lse(op: Any, q: Value, k: Value, added: Value | None, scale: float, softcap: float) -> Value:
    """Return log Σ exp of the logits of each row, [B, H, Q] in float32."""
    grouped = op.Reshape(q, _sizes(op, 0, _size(op, k, 1), -1, _size(op, q, 3)))  # [B, Hkv, H / Hkv * Q, D]
    products = op.MatMul(op.Cast(grouped, to=_FLOAT), op.Transpose(op.Cast(k, to=_FLOAT), perm=[0, 1, 3, 2]))
    logits = op.Reshape(op.Mul(products, scale), _sizes(op, op.Shape(q, start=0, end=3), -1))  # [B, H, Q, K]
    if softcap:
        logits = op.Mul(op.Tanh(op.Div(logits, softcap)), softcap)
    if added is not None:
        logits = op.Add(logits, op.Cast(added, to=_FLOAT))
    last = op.Constant(value_ints=[-1])
    most = op.ReduceMax(logits, last, keepdims=1)
    shift = op.Where(op.IsInf(most), 0.0, most)  # an empty row's is -inf, and -inf - -inf is NaN
    return op.Squeeze(op.Add(op.Log(op.ReduceSum(op.Exp(op.Sub(logits, shift)), last, keepdims=1)), shift), last)


def _size(op: Any, x: Value, axis: int) -> Value:
    """Return the size of an axis, [1]."""
    return op.Shape(x, start=axis, end=axis + 1)


def _sizes(op: Any, *sizes: Value) -> Value:
    """Return a shape from numbers and results of ``Shape``."""
    return op.Concat(*(op.Constant(value_ints=[x]) if isinstance(x, int) else x for x in sizes), axis=0)

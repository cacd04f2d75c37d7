"""Masks from the codes and tensors that ``Mask.encode`` writes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from torch import Tensor

from headscope.masks._band import Band
from headscope.masks._base import Mask
from headscope.masks._codes import Code, unknown_code
from headscope.masks._dense import Dense
from headscope.masks._documents import Documents, packed_documents
from headscope.masks._keys import KeyLengths, Prefix


def mask_from_codes(codes: Sequence[int], parts: Sequence[Tensor]) -> Mask | None:
    """Return the mask that was encoded; None without codes."""
    numbers, tensors, stack = iter(codes), iter(parts), list[Mask]()
    for code in numbers:
        match code:
            case Code.BAND:
                stack.append(_decode_band(next(numbers), next(numbers), numbers, tensors))
            case Code.PREFIX:
                stack.append(Prefix(next(numbers)))
            case Code.LENGTHS:
                stack.append(KeyLengths(next(tensors)))
            case Code.DOCUMENTS:
                stack.append(Documents(next(tensors), next(tensors)))
            case Code.PACKED:
                longest = next(numbers), next(numbers)
                same = bool(next(numbers))
                stack.append(packed_documents(tuple(islice(tensors, 4)), *longest, same))
            case Code.DENSE:
                stack.append(Dense(next(tensors)))
            case Code.BOTH | Code.EITHER:
                second, first = stack.pop(), stack.pop()
                stack.append(first & second if code == Code.BOTH else first | second)
            case _:
                raise unknown_code(code)
    return stack[0] if stack else None


def _decode_band(left: int, right: int, numbers: Iterator[int], tensors: Iterator[Tensor]) -> Band:
    match offset := next(numbers):
        case Code.NO_OFFSET:
            return Band(left, right)
        case Code.ONE_OFFSET:
            return Band(left, right, next(numbers))
        case Code.OFFSETS:
            return Band(left, right, tuple(islice(numbers, next(numbers))))
        case Code.OFFSET_TENSOR:
            return Band(left, right, next(tensors))
        case _:
            raise unknown_code(offset)

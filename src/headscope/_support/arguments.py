"""Arguments of public functions: how messages describe them, whole and other numbers, layouts and shapes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from numbers import Real

import torch
from torch import Tensor

from headscope._support.tensor_classes import check_no_causal_bias

AXES = ("B", "H", "Q", "K")


def shapes(**tensors: Tensor) -> str:
    """Return ``q [2, 8, 16, 128], k [2, 8, 16, 64]``, the end of every message about sizes."""
    return ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())


def kind(value: object) -> str:
    """Return the kind of a value: the dtype of a tensor, else the name of its type."""
    return str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else type(value).__name__


def as_whole(value: object) -> int | None:
    """Return a value as an int, also from numpy or a 0-d tensor; None if it is not a whole number, such as a bool."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or (isinstance(value, Tensor) and (value.ndim or value.dtype == torch.bool)):
        return None
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None


def whole(name: str, value: object, least: int = 1, otherwise: str = "") -> int:
    """Return an argument as an int.

    Raises:
        TypeError, ValueError: it is not a whole number from ``least``; ``otherwise`` describes alternatives.
    """
    integer, expected = as_whole(value), f"expected a whole number from {least}{otherwise}"
    if integer is None:
        raise TypeError(f"{name}: got {kind(value)}, {expected}")
    if integer < least:
        raise ValueError(f"{name}: got {integer}, {expected}")
    return integer


def counts(name: str, value: Tensor | Sequence[int] | None) -> tuple[int, ...]:
    """Return integers [B] from 0 as a tuple; empty if there are none, or all are 0.

    Raises:
        TypeError, ValueError: they are something else.
    """
    if value is None:
        return ()
    integers: Tensor = torch.as_tensor(value, device="cpu")
    if integers.dtype.is_floating_point or integers.dtype == torch.bool or integers.ndim != 1:
        raise TypeError(f"{name}: got {kind(integers)} {list(integers.shape)}, expected integers [B]")
    numbers = tuple(int(each) for each in integers)
    if any(each < 0 for each in numbers):
        raise ValueError(f"{name}: got {list(numbers)}, expected numbers from 0")
    return numbers if any(numbers) else ()


def number(name: str, value: object) -> float:
    """Return an argument as an int or a float, also from numpy. A bool is not a number."""
    if isinstance(value, bool):
        raise TypeError(f"{name}: got bool, expected a number")
    if isinstance(value, (int, float)):
        return value
    if isinstance(value, Real):
        return float(value)
    raise TypeError(f"{name}: got {kind(value)}, expected a number")


def check_layout(name: str, tensor: Tensor) -> None:
    """Raise unless it is an ordinary tensor: not sparse, nested or a ``CausalBias``."""
    check_no_causal_bias(name, tensor)
    if tensor.layout == torch.jagged or (tensor.layout == torch.strided and tensor.is_nested):
        raise TypeError(f"{name}: is a nested tensor of layout {tensor.layout}, expected an ordinary one")
    if tensor.layout != torch.strided:
        raise TypeError(
            f"{name}: layout is {tensor.layout}, expected an ordinary tensor (torch.strided): use .to_dense()"
        )


def check_broadcast(name: str, tensor: Tensor, lead: tuple[int, ...], last: tuple[int, int, int]) -> None:
    """Raise unless a tensor broadcasts to the weights, [*lead, H, Q, K]."""
    sizes = (*(lead or (1,)), *last)
    letters = ("B",) * (len(sizes) - 3) + AXES[1:]
    if tensor.ndim > len(sizes):
        names = ", ".join(letters)
        most = f"at most {len(sizes)} ([{names}])"
        raise ValueError(f"{name}: has {tensor.ndim} axes, expected {most}; {shapes(**{name: tensor})}")
    for axis in range(-1, -tensor.ndim - 1, -1):
        got = tensor.shape[axis]
        if got != 1 and got != sizes[axis]:  # a compiler evaluates `not in` on its example sizes
            where = f"axis {tensor.ndim + axis} ({letters[axis]})"
            raise ValueError(
                f"{name}: {where} is {got}, expected {sizes[axis]} or 1; {shapes(**{name: tensor})}, "
                f"the weights are {list(sizes)}"
            )


def narrow(tensor: Tensor, axis: int, at: range) -> Tensor:
    """Return part of a tensor along an axis that it may broadcast over."""
    return tensor if tensor.shape[axis] == 1 else tensor.narrow(axis, at.start, len(at))


def type_name(value: object) -> str:
    """Return the name of the type of a value."""
    return type(value).__name__


def check_type(
    name: str,
    value: object,
    expected: type | tuple[type, ...],
    text: str,
    describe: Callable[[object], str] = type_name,
) -> None:
    """Raise unless a value is of one of these types.

    Args:
        name: the argument.
        value: what was passed.
        expected: one type or several.
        text: the expected type in words, such as "a torch.nn.Module".
        describe: formats the value in the message: by default the name of its type; ``kind``, ``repr``.

    Raises:
        TypeError: it is of another type.
    """
    if not isinstance(value, expected):
        raise TypeError(f"{name}: got {describe(value)}, expected {text}")

"""Parameters of masks: whole numbers, tensors, and their checks."""

from __future__ import annotations

from numbers import Integral

import torch
from torch import Tensor, nn

from headscope._support.arguments import kind

FAR = 1 << 48  # positions; no sequence is longer


def to_int(value: object) -> object:
    """Convert a whole number of another library to an int; leave anything else for ``check_sizes`` to judge."""
    if value is None or type(value) in (int, bool, tuple, Tensor) or not isinstance(value, Integral):
        return value
    return int(value)


def to_tensor(name: str, value: object) -> Tensor:
    """Convert to a tensor; a tensor stays on its device, whatever the default device."""
    if isinstance(value, Tensor):
        return value
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name}: got {type(value).__name__}, expected a tensor, or values that torch.as_tensor converts"
        ) from error


def is_integral(x: Tensor) -> bool:
    """Return whether it holds whole numbers."""
    return not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool)


def is_comparable(x: Tensor) -> bool:
    """Return whether its values can be compared without waiting for a device: it is a plain tensor on the CPU."""
    plain = type(x) in (Tensor, nn.Parameter) and x.is_cpu and x.layout == torch.strided and not x.is_inference()
    return plain and not (x.is_neg() or x._is_zerotensor())  # these two refuse new_tensor and tolist


def is_whole(value: object) -> bool:
    """Return whether it is a whole number, including a compiler's SymInt."""
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)


def check_ids(name: str, ids: Tensor, axes: dict[str, int]) -> None:
    """Raise unless a tensor of a mask holds integers, with these axes; B may be 1 if there is another axis."""
    if not is_integral(ids):
        raise TypeError(f"mask: {name} is {kind(ids)}, expected integers")
    letters, sizes = ", ".join(axes), list(axes.values())
    if ids.ndim != len(axes):
        raise ValueError(f"mask: {name} is {list(ids.shape)}, expected [{letters}] = {sizes}")
    for axis, (letter, size) in enumerate(axes.items()):
        got = ids.shape[axis]
        repeats = letter == "B" and len(axes) == 2 and got == 1
        if got != size and not repeats:  # a compiler evaluates `not in` on its example sizes
            raise ValueError(f"mask: {name} axis {axis} ({letter}) is {got}, expected {size}; it is {list(ids.shape)}")


def describe_wrong_dtype(mask: Tensor) -> str:
    """Name the dtype of a mask that is not boolean, and the remedy."""
    hint = "for numbers to add to the logits, pass bias=" if mask.dtype.is_floating_point else "convert it with .bool()"
    return f"{kind(mask)}, expected bool (True = attend); {hint}"

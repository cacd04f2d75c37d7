"""Weights of zeros that hide the weights before them, as modules are built: what one step of training would move."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from headscope.checking._copies import CODE_ERRORS, copy_target
from headscope.checking._subject import Subject


def move_weights_off_zero(subject: Subject) -> str:
    """Give random numbers to parameters of zeros without which others have no effect; return a sentence about them.

    Such are the second matrix of LoRA, an output projection of zeros, and the factor of ReZero: a first step of
    training moves them, and then the others learn. Two of them in series never move, and stay.

    Returns:
        What was moved; "" if nothing was.
    """
    module, moved = subject.module, list[str]()
    zeros = {} if module is None else {name: p for name, p in module.named_parameters() if name in subject.zeros}
    if module is None or not zeros:
        return ""
    try:
        idle = _list_idle(subject, module)
        for name, p in sorted(zeros.items(), key=lambda item: item[1].ndim, reverse=True):
            if idle and name not in idle:
                with _changed(p, _draw(p)):
                    rest = _list_idle(subject, module)
                if rest < idle:
                    idle = rest
                    p.data.copy_(_draw(p))
                    moved.append(f"{name} {list(p.shape)}")
    except CODE_ERRORS:  # raised by unknown code; the probe of gradients reports it
        return ""
    if not moved:
        return ""
    verb = "are" if len(moved) > 1 else "is"
    return f"{', '.join(moved)} {verb} zero, which hides other weights: checked as after a step of training"


def _list_idle(subject: Subject, module: nn.Module) -> frozenset[str]:
    """Return the parameters whose gradient is zero, and "" if that of the input is."""
    copied = copy_target(module)
    x = subject.input(0).requires_grad_()
    out = subject.output(subject.call_with(x.clone(), target=copied), x)
    if out.requires_grad:
        factor = torch.linspace(1, 2, out.numel(), dtype=out.dtype).sin().view(out.shape)
        (out * factor).nan_to_num().sum().backward()
    gradients = {"": x.grad, **{name: p.grad for name, p in copied.named_parameters() if p.is_floating_point()}}
    return frozenset(name for name, each in gradients.items() if each is None or not bool(each.any()))


def _draw(p: Tensor) -> Tensor:
    """Return numbers for a parameter: normal ones of the usual size for a matrix, from 0.5 to 1.5 for other shapes."""
    generator = torch.Generator().manual_seed(11)
    if p.ndim < 2:
        return 0.5 + torch.rand(p.shape, generator=generator, dtype=torch.float64)
    return torch.randn(p.shape, generator=generator, dtype=torch.float64) * p.shape[-1] ** -0.5


@contextmanager
def _changed(p: Tensor, numbers: Tensor) -> Iterator[None]:
    """Return a context in which a parameter of zeros has other numbers."""
    p.data.copy_(numbers)
    try:
        yield
    finally:
        p.data.zero_()

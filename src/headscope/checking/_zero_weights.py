"""Weights of zeros that hide the weights before them, as modules are built: what one step of training would move."""

from __future__ import annotations

from collections.abc import Generator
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
        gradients = _find_gradients(subject, module)
        for name, p in sorted(zeros.items(), key=lambda item: item[1].ndim, reverse=True):
            if name not in gradients:
                continue
            numbers = _draw(gradients[name])
            with _changed(p, numbers):
                others = _find_gradients(subject, module)
            if others.keys() > gradients.keys():
                gradients = others
                p.data.copy_(numbers)
                moved.append(f"{name} {list(p.shape)}")
    except CODE_ERRORS:  # raised by unknown code; the probe of gradients reports it
        return ""
    if not moved:
        return ""
    verb = "are" if len(moved) > 1 else "is"
    return f"{', '.join(moved)} {verb} zero, which hides other weights: checked as after a step of training"


def _find_gradients(subject: Subject, module: nn.Module) -> dict[str, Tensor]:
    """Return the gradients that are not zero, by the names of the parameters; that of the input by ""."""
    copied = copy_target(module)
    x = subject.input(0).requires_grad_()
    out = subject.output(subject.call_with(x.clone(), target=copied), x)
    if out.requires_grad:
        factor = torch.linspace(1, 2, out.numel(), dtype=out.dtype).sin().view(out.shape)
        (out * factor).nan_to_num().sum().backward()
    gradients = {"": x.grad, **{name: p.grad for name, p in copied.named_parameters()}}
    return {name: each for name, each in gradients.items() if each is not None and bool(each.any())}


def _draw(gradient: Tensor) -> Tensor:
    """Return numbers for a parameter of zeros: from 0.5 to 1.5, or normal ones of the usual size for a matrix.

    Rows without a gradient stay zero: no step of training moves them.
    """
    generator = torch.Generator().manual_seed(11)
    if gradient.ndim < 2:
        return 0.5 + torch.rand(gradient.shape, generator=generator, dtype=torch.float64)
    numbers = torch.randn(gradient.shape, generator=generator, dtype=torch.float64) * gradient[0].numel() ** -0.5
    moved = gradient.flatten(1).any(1)
    return torch.where(moved.view(-1, *[1] * (gradient.ndim - 1)), numbers, 0.0)


@contextmanager
def _changed(p: Tensor, numbers: Tensor) -> Generator[None]:
    """Return a context in which a parameter of zeros has other numbers."""
    p.data.copy_(numbers)
    try:
        yield
    finally:
        p.data.zero_()

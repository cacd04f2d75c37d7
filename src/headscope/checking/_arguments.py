"""The arguments of ``check`` and ``check_model``: each error names the argument, its value and what it may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor

from headscope._support.option_values import SCALE, SIZE, is_meaning, is_scale, is_size

NUMBERS = (int, float)
CALLS = {
    "call": "a function that calls the module, such as lambda module, x, *rest: module(x)",
    "decode": "a function, such as lambda module, x: module.generate(x), that returns the output [B, T, E]",
}
UNSET = {
    "embed_dim": "None to derive it from the weights",
    "heads": "None to accept any",
    "length": "None for any length",
    "scale": "None for 1/√D",
}
"""What None stands for."""


def check_options(**options: Any) -> None:
    """Check the options of ``check`` or ``check_model`` by their names; None means not specified.

    Raises:
        TypeError, ValueError: a value has the wrong type, or is impossible.
    """
    for name, value in options.items():
        if name in ("reproducible", "strict", "flex"):
            _require(name, value, isinstance(value, bool), "True or False")
        elif value is not None:
            _check_option(name, value)


def _check_option(name: str, value: object) -> None:
    """Check an option that is specified."""
    if name in ("embed_dim", "heads", "length"):
        _require(name, value, is_size(value), f"{SIZE}, or {UNSET[name]}")
    elif name == "scale":
        _require(name, value, is_scale(value), f"{SCALE}, such as {8**-0.5:.4f}, or {UNSET[name]}")
    elif name in ("causal", "batch_first"):
        _require(name, value, isinstance(value, bool), "True, False, or None to derive it from the outputs")
    elif name == "mask_means":
        meanings = (
            '"keep" (True = attend), "hide" (True = masked), "add" (numbers added to the logits), or None for any'
        )
        _require(name, value, is_meaning(value), meanings)
    elif name in CALLS:
        _require(name, value, callable(value), CALLS[name])
    elif name == "inputs":
        _require(name, value, isinstance(value, Tensor), "a tensor [B, T, E], such as torch.randn(2, 7, 24)")
    else:  # names of findings
        names = isinstance(value, str) or (isinstance(value, Iterable) and not isinstance(value, Mapping))
        _require(name, value, names, 'names of findings, such as "scale-unusual" or ["scale-unusual", "mask-ignored"]')


def _require(name: str, value: object, valid: bool, expected: str) -> None:
    """Raise unless a value is valid: a ValueError for a number or text, a TypeError for anything else."""
    if valid:
        return
    got = repr(value) if isinstance(value, (str, bool, *NUMBERS)) else type(value).__name__
    kind: Callable[[str], Exception] = ValueError if isinstance(value, (str, *NUMBERS)) else TypeError
    raise kind(f"{name}: got {got}, expected {expected}")

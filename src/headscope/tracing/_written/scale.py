"""The judgement of a measured scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from headscope.tracing._written.rows import unusual


def judge_scale(total: float, steps: Sequence[float], head: int, model: int | None, length: int) -> str | None:
    """Return the note on a scale; None for the usual one.

    Args:
        total: the number that q·k is multiplied by.
        steps: the factors that make it.
        head: D.
        model: E; None if it is not known.
        length: the number of keys.
    """

    def equals(value: float) -> bool:
        return math.isclose(total, value, rel_tol=2e-3)

    usual = head**-0.5
    expected = f"1/√D = {usual:.4g}"
    if equals(usual):
        return None
    if equals(1.0):
        return unusual(f"the scores are not scaled; the usual scale is {expected}", "scale-missing")
    if equals(1 / head):
        parts = [step for step in steps if math.isclose(step, usual, rel_tol=2e-3)]
        if len(parts) > 1:
            return unusual(f"scaled by 1/√D twice, which makes 1/D = {total:.4g}", "scaled-twice")
        return unusual(f"divided by D instead of √D: the scale is {total:.4g}, not {expected}", "scale-without-root")
    if equals(head**0.5):
        return unusual(f"multiplied by √D instead of divided: the scale is {total:.4g}", "scale-multiplied")
    if model is not None and equals(model**-0.5):
        text = (
            f"divided by √E = {model**0.5:.4g} (√embed_dim) instead of √D = {head**0.5:.4g} (√head_dim): scores are "
            f"{(model / head) ** 0.5:.3g} times smaller"
        )
        return unusual(text, "scale-sqrt-embed-dim")
    if equals(length**-0.5):
        text = f"divided by √K = {length**0.5:.4g}, which depends on the number of keys, instead of √D"
        return unusual(text, "scale-of-length")
    return unusual(f"the scale is {total:.4g}; the usual one is {expected}", "scale-unusual")


def format_scale(factor: float, width: int, model: int | None, dtype: torch.dtype) -> str:
    """Return a factor as it is usually written, if it equals that up to the rounding of ``dtype``."""
    tolerance = 1e-5 if dtype.itemsize > 2 else 2e-3
    names = [] if model is None or model == width else [(model**-0.5, "1/√E")]
    names += [(width**-0.5, "1/√D"), (1 / width, "1/D"), (width**0.5, "√D"), (width**-0.25, "1/∜D")]
    for value, text in (*names, (math.log2(math.e), "log₂ e")):
        if math.isclose(factor, value, rel_tol=tolerance):
            return f"{text} = {value:.4g}"
    return f"{factor:.4g}"

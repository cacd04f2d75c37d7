"""Scale, softcap and dropout: their checks, and the range of the logits."""

from __future__ import annotations

import sys

from headscope._support.arguments import number

FACTORS = {"float32": (2.0**-100, 2.0**100), "float64": (2.0**-1000, 2.0**1000)}
"""The range of scale, softcap and scale / softcap, by the dtype of the logits: within it none of them is 0 or infinite,
and the underflow of a product of q and k is below the rounding of a logit of 1.
"""


def check_scale(scale: float | None, head_dim: int) -> float:
    """Return the factor of the dot products; by default head_dim ** -0.5."""
    if scale is None:
        return head_dim**-0.5
    scale = number("scale", scale)
    if not abs(scale) <= sys.float_info.max:  # excludes NaN too; a compiler can trace this, but not math.isfinite
        raise ValueError(f"scale: got {scale}, expected a finite number")
    return float(scale)


def check_softcap(softcap: float | None) -> float | None:
    """Return the bound of the logits, or None."""
    if softcap is None:
        return None
    softcap = number("softcap", softcap)
    if not 0 < softcap <= sys.float_info.max:
        raise ValueError(f"softcap: got {softcap}, expected a finite number above 0, or None")
    return float(softcap)


def check_factors(scale: float, softcap: float | None, dtype: str) -> None:
    """Raise unless the dtype of the logits can represent scale, softcap and scale / softcap, the factors of q."""
    least, most = FACTORS[dtype]
    factors = [abs(scale)] if softcap is None else [abs(scale), softcap, abs(scale) / softcap]
    if scale == 0:
        factors = factors[1:2]
    if all(least <= factor <= most for factor in factors):
        return
    names, got = "scale", f"scale {scale:g}"
    if softcap is not None:
        names = "scale, softcap and scale / softcap"
        got = f"scale {scale:g}, softcap {softcap:g} and scale / softcap {scale / softcap:g}"
    raise ValueError(
        f"scale: out of range for logits of {dtype}; expected {names} of size {least:.3g} to {most:.3g}, or scale 0, "
        f"got {got}; multiply q or k instead"
    )


def check_dropout(dropout: float) -> float:
    """Return the probability with which a weight is dropped."""
    dropout = number("dropout", dropout)
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout: got {dropout}, expected a probability in [0, 1)")
    return float(dropout)

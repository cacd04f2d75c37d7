"""One rule of accuracy, which calibrates itself: at most twice the error of plain torch in the same dtype."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDINGS = (
    8  # a baseline on small sizes can be exact by luck: this many roundings of the result are allowed in any case
)


def assert_as_accurate(
    out: Tensor,
    exact: Tensor,
    baseline: Tensor,
    *,
    magnitude: float = 0.0,
    dtype: torch.dtype | None = None,
    message: str = "",
) -> None:
    """Whether ``out`` is as close to ``exact`` as plain torch in the same dtype comes.

    Args:
        out: what is tested.
        exact: the same in float64.
        baseline: the same by plain torch, in the dtype of the inputs.
        magnitude: of the terms that ``out`` is a sum of, where they may cancel; at least the largest of ``exact``.
        dtype: that of the inputs, which sets the size of a rounding; by default that of ``out``.
        message: what was computed.

    NaN and infinities must stand where they stand in ``exact``.
    """
    assert out.shape == exact.shape, f"{message}: shape {list(out.shape)}, expected {list(exact.shape)}"
    out64, exact, baseline = out.detach().double(), exact.detach(), baseline.detach().double()
    finite = exact.isfinite()
    torch.testing.assert_close(
        out64[~finite],
        exact[~finite],
        rtol=0,
        atol=0,
        equal_nan=True,
        msg=lambda text: f"{message}, not finite: {text}",
    )
    if not finite.any():
        return
    assert out64[finite].isfinite().all(), f"{message}: {int((~out64[finite].isfinite()).sum())} values are not finite"
    magnitude = max(magnitude, float(exact[finite].abs().max()))
    floor = ROUNDINGS * torch.finfo(dtype or out.dtype).eps * magnitude
    error = float((out64 - exact)[finite].abs().max())
    theirs = float((baseline - exact)[finite].abs().nan_to_num(0, 0, 0).max())
    assert error <= 2 * theirs + floor, f"{message}: error {error:.3g}, plain torch {theirs:.3g}, floor {floor:.3g}"

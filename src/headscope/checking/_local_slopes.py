"""How each logit changes with its own q·k: maps that fall somewhere, and scales of single queries or keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.checking._head_layout import Heads
from headscope.checking._logit_map import MOST_KEYS, past_pairs
from headscope.checking._weights import Verdict, log_weights

CHANGES = 4  # of each input; two determine the fit, the others test it
STEPS = ((1e-6, 1e-4), (1e-3, 1e-2))  # size of a change, and the largest residual; the second is for float32
ALIKE = 1e-2  # parts of the largest slope: slopes that differ by less are equal
OWN = 0.1  # parts of the spread of all slopes: with a factor per query or key, those of one query or key differ by less


@dataclass(frozen=True)
class LocalSlopes:
    """The derivatives of the logits by their own q·k.

    Attributes:
        slope: [N, H, Q, K].
        raw: q·k, as slope.
        log: the logarithms of the weights, as slope.
        at: where the slope is known; False everywhere in a head whose logits depend on more than their own q·k.
    """

    slope: Tensor
    raw: Tensor
    log: Tensor
    at: Tensor


def fit_local_slopes(follow: Callable[[Tensor], Heads | None], inputs: list[Tensor]) -> LocalSlopes | None:
    """Fit the slopes at several inputs, from small changes of each.

    A bias that does not depend on the input cancels. Logits that depend on the length of a query, or on other logits of
    the row, do not fit.

    Args:
        follow: gives the heads for an input.
        inputs: where the slopes are fitted.

    Returns:
        The slopes of all inputs along the first axis; None where no head fits.
    """
    for step, limit in STEPS:
        fits = [_fit_slopes(follow, x, step) for x in inputs]
        slopes, residuals = [fit[0] for fit in fits if fit is not None], [fit[1] for fit in fits if fit is not None]
        if len(slopes) < len(inputs):
            return None
        fitting = (torch.stack(residuals) <= limit).all(0)  # [H]
        if bool(fitting.any()):
            names = ("slope", "raw", "log", "at")
            slope, raw, log, at = (torch.cat([getattr(each, name) for each in slopes]) for name in names)
            return LocalSlopes(slope, raw, log, at & fitting[:, None, None])
    return None


def _fit_slopes(follow: Callable[[Tensor], Heads | None], x: Tensor, step: float) -> tuple[LocalSlopes, Tensor] | None:
    """Return the slopes at one input, and the largest residual of each head in parts of the largest change, [H]."""
    generator = torch.Generator().manual_seed(7)
    base, changed = follow(x), list[Heads]()
    for _ in range(CHANGES):
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x) * x.std()
        heads = follow(x + step * direction)
        if base is None or heads is None or heads.p.shape != base.p.shape:
            return None
        changed.append(heads)
    assert base is not None
    at = torch.stack([past_pairs(heads) for heads in (base, *changed)]).all(0)[..., :MOST_KEYS, :MOST_KEYS]
    at = at & (at.sum(-1, keepdim=True) >= 2)
    count = at.sum(-1, keepdim=True).clamp_min(1)

    def difference(read: Callable[[Heads], Tensor]) -> Tensor:  # [CHANGES, B, H, Q, K]
        start = read(base)[..., :MOST_KEYS, :MOST_KEYS]
        moved = torch.stack([read(heads)[..., :MOST_KEYS, :MOST_KEYS] for heads in changed])
        return torch.where(at, moved - start, 0.0) / step

    def centred(change: Tensor) -> Tensor:  # without the row's mean change, which the softmax cancels
        return torch.where(at, change - change.sum(-1, keepdim=True) / count, 0.0)

    log, raw = centred(difference(lambda heads: log_weights(heads.p))), difference(lambda heads: heads.raw)
    squares = raw.square().sum(0)
    normal = torch.diag_embed(squares) - torch.einsum("m...i,m...j->...ij", raw, raw) / count[..., None]
    slope = (torch.linalg.pinv(normal, hermitian=True, rtol=1e-9) @ (raw * log).sum(0)[..., None])[..., 0]
    largest = log.abs().amax((0, 1, 3, 4))
    residual = (log - centred(slope * raw)).abs().amax((0, 1, 3, 4)) / largest.clamp_min(1e-300)
    known = at & (squares > 1e-4 * squares.amax())
    start, logs = (x[..., :MOST_KEYS, :MOST_KEYS] for x in (base.raw, log_weights(base.p)))
    return LocalSlopes(slope, start, logs, known), residual


def judge_local_slopes(local: LocalSlopes) -> Verdict:
    """Return "logits-changed" where a map both rises and falls, or jumps; "scale-not-uniform"; or "none".

    Args:
        local: at inputs for which the logits of a head are not one linear function of q·k.
    """
    heads = [h for h in range(local.slope.shape[1]) if bool(local.at[:, h].any())]
    uniform = list[bool]()
    for h in heads:
        slope, at = local.slope[:, h], local.at[:, h]
        size = float(slope[at].abs().max())
        if size < 1e-9:
            continue
        spread = _spread(slope, at, (0, 1, 2))
        uniform.append(spread <= ALIKE * size)
        for word, axis in (("query", 2), ("key", 1)):
            if not uniform[-1] and _spread(slope, at, (axis,)) <= min(ALIKE * size, OWN * spread):
                low, high = float(slope[at].min()), float(slope[at].max())
                evidence = f"each {word} has its own factor of q·k, from {low:.4g} to {high:.4g} in head {h}"
                return Verdict("scale-not-uniform", evidence)
        rises, falls = at & (slope > ALIKE * size), at & (slope < -ALIKE * size)
        if bool(rises.any()) and bool(falls.any()):
            up, down = float(local.raw[:, h][rises][0]), float(local.raw[:, h][falls][0])
            evidence = f"logits of head {h} rise with q·k near {up:.3g} and fall with it near {down:.3g}"
            return Verdict("logits-changed", evidence)
    if len(uniform) == local.slope.shape[1] and all(uniform) and _jumps(local):
        return Verdict("logits-changed", "logits rise with q·k and jump in between, as with a remainder")
    return Verdict("none")


def _jumps(local: LocalSlopes) -> bool:
    """Return whether equal slopes leave more of the logits unexplained than a slightly bent map, such as a cap."""
    count = local.at.sum(-1, keepdim=True).clamp_min(1)

    def centred(x: Tensor) -> Tensor:
        x = torch.where(local.at, x, 0.0)
        return torch.where(local.at, x - x.sum(-1, keepdim=True) / count, 0.0)

    off = centred(local.log - local.slope * local.raw).abs().max()
    return bool(off > 2 * ALIKE * centred(local.log).abs().max())


def _spread(slope: Tensor, at: Tensor, axes: tuple[int, ...]) -> float:
    """Return the largest difference of two known slopes along some axes."""
    high = torch.where(at, slope, -torch.inf).amax(axes)
    low = torch.where(at, slope, torch.inf).amin(axes)
    differences = (high - low)[torch.isfinite(high - low)]
    return float(differences.max())

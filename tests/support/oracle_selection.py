"""The recall of a selection by its definition: float64, dense, row by row. Nothing of headscope is imported here."""

from __future__ import annotations

import math

import torch
from torch import Tensor

QUANTITIES = ("recall", "recall_kl", "largest_selected")


def of_indices(indices: Tensor, sizes: tuple[int, int, int, int]) -> Tensor:
    """Which keys are selected, [B, H, Q, K], by indices that broadcast to [B, H, Q, n]; a head may have its group's."""
    batch, heads, queries, _ = sizes
    full = indices[(None,) * (4 - indices.ndim)]
    selected = torch.zeros(sizes, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                at = (b % len(full), h * full.shape[1] // heads, i % full.shape[2])
                for j in full[at].tolist():
                    if j >= 0:
                        selected[b, h, i, j] = True
    return selected


def recall_rows(s: Tensor, visible: Tensor, selected: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """name -> [B, H, Q], NaN where a row does not have it; from logits, over visible keys only."""
    rows = {name: torch.full(counted.shape, math.nan, dtype=torch.float64) for name in QUANTITIES}
    for at in map(tuple, counted.nonzero().tolist()):
        keys = [j for j, shown in enumerate(visible[at].tolist()) if shown]
        logits = {j: float(s[at][j]) for j in keys}
        top = max(logits.values())
        e = {j: math.exp(x - top) for j, x in logits.items()}
        picked = math.fsum(x for j, x in e.items() if selected[at][j])
        rest = math.fsum(x for j, x in e.items() if not selected[at][j])
        rows["recall"][at] = picked / (picked + rest)
        rows["recall_kl"][at] = math.log1p(rest / picked) if picked else math.inf
        rows["largest_selected"][at] = float(selected[at][min(j for j, x in logits.items() if x == top)])
    return rows


def near_ties(s: Tensor, visible: Tensor) -> Tensor:
    """Rows [B, H, Q] whose two largest logits differ by less than rounding, but are not equal."""
    shown = torch.where(visible, s, -math.inf)
    if s.shape[-1] < 2:
        return torch.zeros(s.shape[:-1], dtype=torch.bool)
    gap = shown.amax(-1, keepdim=True) - shown
    return ((gap > 0) & (gap < 1e-5 * (1 + shown.amax(-1, keepdim=True).abs()))).any(-1)


def logits(
    q: Tensor, k: Tensor, bias: Tensor | None, scale: float | None, softcap: float | None, sizes: tuple[int, ...]
) -> Tensor:
    """All logits [B, H, Q, K], masked or not, of q and k with equal leading axes and as many heads."""
    s = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    return (s if bias is None else s + bias).reshape(sizes)

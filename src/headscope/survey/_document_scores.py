"""The scores of patterns in one document, from its rows.

With the overlap o_i of row i with a pattern and c_i that of chance, the score is max(0, Σ (o_i - c_i) / Σ (1 - c_i)),
as in ``pattern_scores``. Each row has its own o_i and c_i here, so previous, next, self and first are those of the
dense weights. The others are estimated from the quantities of the row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope._analysis.pattern_means import MOST_EVEN, keys_within, smallest_window
from headscope.stats import PATTERNS, HeadStats, Kept, LayerStats

_ROUNDING = 1e-6


@dataclass
class DocumentSums:
    """Sums over the rows of a document that have a pattern's keys, and others; N heads, S patterns, all [S, N].

    Attributes:
        rows: their number.
        overlap: the sum of the overlaps with the pattern.
        chance: the sum of those by chance.
    """

    rows: Tensor
    overlap: Tensor
    chance: Tensor

    @staticmethod
    def of(overlap: Tensor, chance: Tensor) -> DocumentSums:
        """Add up rows, [S, ..., N, R]; NaN where a row does not count."""
        telling = (chance < 1 - _ROUNDING) & ~overlap.isnan()
        return DocumentSums(
            telling.sum(-1),
            torch.where(telling, overlap, 0.0).sum(-1),
            torch.where(telling, chance, 0.0).sum(-1),
        )

    def at(self, number: int) -> DocumentSums:
        """Return the sums of one entry of the batch, of sums [S, B, N]."""
        return DocumentSums(self.rows[:, number], self.overlap[:, number], self.chance[:, number])

    def __add__(self, other: DocumentSums) -> DocumentSums:
        return DocumentSums(self.rows + other.rows, self.overlap + other.overlap, self.chance + other.chance)

    def scores(self) -> Tensor:
        """Return the scores, [S, N]; NaN without rows."""
        return ((self.overlap - self.chance) / (self.rows - self.chance)).clamp(0, 1)


def pattern_names(stats: HeadStats) -> tuple[str, ...]:
    """Return the patterns that are scored by document, of all that some layer shows."""
    return tuple(name for name in PATTERNS if any(_shows(part, name) for part in stats.parts.values()))


def overlaps_of(part: LayerStats, kept: Kept, names: Sequence[str]) -> Tensor:
    """Return the overlaps of the rows of one call with patterns, and those of chance, [2, S, B, H, R].

    NaN where a row does not count, or the layer does not show the pattern.
    """
    rows = {name: x.double().masked_fill(~kept.counted, math.nan) for name, x in kept.values.items()}
    absent = torch.full(kept.counted.shape, math.nan, dtype=torch.float64, device=kept.counted.device)
    pairs = [_overlap(part, rows, name) if _shows(part, name) else (absent, absent) for name in names]
    overlaps, chances = zip(*pairs, strict=True)
    return torch.stack([torch.stack(overlaps), torch.stack(chances)])


def _shows(part: LayerStats, pattern: str) -> bool:
    if "chance" not in part.moments:
        return False
    if pattern == "local":
        return smallest_window(part) is not None
    return pattern == "uniform" or (pattern in part.moments and (pattern != "first" or part.first == 1))


def _overlap(part: LayerStats, rows: Mapping[str, Tensor], pattern: str) -> tuple[Tensor, Tensor]:
    """Return the overlaps with a pattern and those of chance, both [B, H, R]."""
    chance = rows["chance"]
    if pattern == "uniform":  # an even spread over exp(entropy) of the visible keys
        return rows["entropy"].exp() * chance, chance
    if pattern == "induction" and "next" in rows:  # its mass includes that of the next key, which follows no copy
        return (rows[pattern] - rows["next"].nan_to_num(0.0)).clamp_min(0), chance
    if pattern != "local":
        return rows[pattern], chance
    window = smallest_window(part)
    assert window is not None, "its layer shows the pattern"
    keys = keys_within(window, part.moments)
    even = (keys * chance).clamp_max(1)
    peak = (rows["max_weight"] - chance.clamp_min(1 / keys)).clamp_min(0)  # above an even spread in the window
    near = rows[f"window_{window:g}"] - peak
    return near.masked_fill(even > MOST_EVEN, math.nan), even  # a row whose window is most of it shows little

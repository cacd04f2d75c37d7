"""Stage 4 of a trace: from queries, keys and values of each head to its output."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headscope import functional
from headscope._backends import accumulate_dtype
from headscope._call import fold
from headscope._trace_checks import MATRIX, Check, Sample, close, equal, exact, pick, rounding, sample, visible
from headscope._trace_rows import Pages, Setting
from headscope._trace_words import memory, quantity
from headscope.masks import Band, Dense, Mask

LARGE = 1 << 30  # bytes of weights from which a row says that they are not kept


@dataclass
class Matrix:
    """The rows of the Q x K matrix that are looked at, and what made them; ``s`` goes from step to step."""

    at: Sample
    q: Tensor  # [b, h, i, D], in the dtype of the scores
    k: Tensor  # [b, h, K, D]
    v: Tensor  # [b, h, K, Dv]
    s: Tensor  # [b, h, i, K]
    seen: Tensor  # [b, h, i, K], what mask and bias let through
    bias: Tensor | None  # broadcasts to [b, h, i, K]
    said: str  # on how many rows, if not on all


class Heads(NamedTuple):
    """Queries [B, H, Q, D], keys [B, Hkv, K, D] and values [B, Hkv, K, Dv]."""

    q: Tensor
    k: Tensor
    v: Tensor


def attend(pages: Pages, heads: Heads) -> Tensor:
    """Share, score, cap, bias, mask, weigh, average: the rows of stage 4. Returns each head's output [B, H, Q, Dv]."""
    s, m = pages.setting, pages.setting.module
    if m.kv_heads < m.num_heads:
        _share(pages, "keys", heads.k, "k", "D")
        _share(pages, "values", heads.v, "v", s.value_letter)
    matrix = None
    if s.values:
        with torch.autocast(s.x.device.type, enabled=False):  # scores are computed in float32 or better
            matrix = _matrix(s, heads)
    with torch.autocast(s.x.device.type if s.values else "cpu", enabled=False):
        _scores(pages, matrix, accumulate_dtype(heads.q.dtype))
        dtype = accumulate_dtype(heads.q.dtype)
        if m.softcap is not None:
            _softcap(pages, matrix, dtype, m.softcap)
        if s.bias is not None:
            _bias(pages, matrix, dtype, s.bias)
        if s.mask is not None:
            _mask(pages, matrix, dtype, s.mask)
        p = _weights(pages, matrix, dtype)
    return _outputs(pages, matrix, p, heads)

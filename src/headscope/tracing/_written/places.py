"""The batch entry and the position of tokens, from the tensor that they are rows of."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.tracing._written.origins import Origins


def batches_of(origins: Origins, tokens: Tensor) -> list[int]:
    """Return the batch entry of each row of tokens, [N, ...]; an empty list where it is not one, or not known."""
    place = places_of(origins, tokens)
    if place is None or bool((place[0] != place[0][:, :1]).any()):
        return []
    return place[0][:, 0].tolist()


def places_of(origins: Origins, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the batch entry and the position of tokens, from the tensor that they are rows of; None if unknown."""
    known = tokens[tokens >= 0]
    makers = origins.tape.makers(known)
    if len(makers) != 1 or not known.numel() or makers[0].out.ndim not in (2, 3):
        return None
    shape = makers[0].out.shape
    flat, order = makers[0].out.flatten().sort()
    at = order[torch.searchsorted(flat, tokens.contiguous()).clamp(max=len(flat) - 1)] // shape[-1]
    length = shape[-2]
    return torch.where(tokens >= 0, at // length, -1), torch.where(tokens >= 0, at % length, -1)

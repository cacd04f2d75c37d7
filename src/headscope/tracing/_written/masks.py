"""What a mask hides, in words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.tracing._written.rows import unusual


@dataclass(frozen=True, eq=False)
class Masked:
    """A mask.

    Attributes:
        own: the pairs that it hides, [B, H, Q, K].
        total: those that it and earlier masks hide.
        weights: the weights that the values are multiplied by.
        fill: what hidden scores become, at most.
        query_token, key_token: [B, Q], [B, K].
    """

    own: Tensor
    total: Tensor
    weights: Tensor
    fill: float
    query_token: Tensor
    key_token: Tensor

    @property
    def future(self) -> Tensor | None:
        """The pairs whose key is later than the query, [B, 1, Q, K]; None unless every query is one of the keys."""
        if bool((self.query_token < 0).any()):
            return None
        matches = self.key_token[:, None] == self.query_token[:, :, None]  # [B, Q, K]
        if not bool((matches.sum(-1) == 1).all()) or bool((self.key_token < 0).any()):
            return self._future_of_cache(matches)
        position = matches.int().argmax(-1)
        if bool((position.diff(dim=-1) <= 0).any()):
            return None
        return torch.arange(self.own.shape[-1]) > position[:, None, :, None]

    def _future_of_cache(self, matches: Tensor) -> Tensor | None:
        """Return it where the last keys are the queries, and earlier ones come from a cache."""
        _, queries, keys = matches.shape
        last = matches[:, :, keys - queries :] if queries <= keys else matches
        if queries >= keys or not bool((last == torch.eye(queries, dtype=torch.bool)).all()):
            return None
        return torch.arange(keys)[None, None] > (torch.arange(queries)[:, None] + keys - queries)[None, None]


@dataclass(frozen=True)
class MaskText:
    """The claim, its outcome and the notes of a mask."""

    claim: str
    outcome: str | None
    held: bool
    notes: list[str]
    is_causal: bool


def describe_mask(mask: Masked, quantity: Callable[[int], str]) -> MaskText:
    """Return what a mask hides, whether its weights are 0, and what is unusual in it."""
    own = mask.own
    future = mask.future
    future = None if future is None else future.expand(own.shape)
    notes = [] if future is None else _compare_with_causal(mask, future)
    hidden, total = int(own.sum()), own.numel()
    causal = future is not None and bool((own == future).all()) and hidden > 0
    covers = future is not None and bool(own[future].all()) and hidden > 0
    what = "causal" if causal else "nothing from the future, and more is hidden" if covers else "hidden"
    share = 100 * (1 - hidden / total)
    pairs = f"{quantity(total - hidden)} of {quantity(total)} pairs are visible ({share:.3g}%)"
    notes.append(f"{what}: {pairs}" if hidden else "this mask hides nothing here")
    alone = mask.total.all(-1, keepdim=True)
    rows = int(alone.sum())
    if rows:
        notes.append(f"{quantity(rows)} of {quantity(alone.numel())} rows see no key")
    leaking = own & ~alone & (mask.weights != 0) & ~mask.weights.isnan()
    claim = f"weight 0 {'on the future' if causal else 'where hidden'}, every other score unchanged"
    if bool(leaking.any()):
        count, largest = int(leaking.sum()), float(mask.weights[leaking].max())
        size = f"{quantity(count)} hidden pairs have weight, up to {largest:.2g}"
        text = f"{size}: a score of {mask.fill:.4g} does not hide them"
        notes.insert(0, unusual(text, "mask-fill-too-small"))
        return MaskText(claim, f"{quantity(count)} hidden pairs have weight", False, notes, causal)
    return MaskText(claim, "to the bit", True, notes, causal)


def _compare_with_causal(mask: Masked, future: Tensor) -> list[str]:
    """Return notes on masks that are nearly causal."""
    own = mask.own
    if not bool(own.any()) or own.shape[-1] < 3:
        return []
    same = own == future
    per_head, per_entry = same.all(-1).all(-1).all(0), same.all(-1).all(-1).all(1)
    free = ~own.any(-1).any(-1)
    if bool(per_head.any()) and not bool(per_head.all()) and bool(free.all(0)[~per_head].all()):
        return [unusual(f"{int(per_head.sum())} of {len(per_head)} heads are masked", "mask-on-some-heads")]
    if bool(per_entry.any()) and not bool(per_entry.all()) and bool(free.all(1)[~per_entry].all()):
        return [unusual(f"{int(per_entry.sum())} of {len(per_entry)} batch entries are masked", "mask-on-some-batches")]
    self_or_future = future | _shifted(future, 1)
    cases = (
        (_shifted(future, -1), "each query sees the key after it", "sees-one-ahead"),
        (self_or_future, "no query sees its own key", "cannot-see-itself"),
        (~future, "the mask hides the past and shows the future", "mask-inverted"),
        (future | ~self_or_future, "each query sees its own key only", "cannot-see-the-past"),
    )
    for pattern, text, name in cases:
        if bool((own == pattern).all()):
            return [unusual(text, name)]
    rows = own.all(-1)
    if bool((rows == own.any(-1)).all()) and bool(rows.any()) and not bool(rows.all()):
        return [unusual("whole queries are hidden, with all of their keys, instead of keys", "mask-on-queries")]
    return []


def _shifted(future: Tensor, by: int) -> Tensor:
    """Return the pairs whose key is later than the query by more than ``-by``: 1 includes the query's own key."""
    if by > 0:
        return torch.cat([future[..., 1:], torch.ones_like(future[..., :1])], -1)
    return torch.cat([torch.zeros_like(future[..., :1]), future[..., :-1]], -1)

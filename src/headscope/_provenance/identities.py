"""New ids: numbers that an operation makes anew, with what is recorded of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope._provenance.record import NONE, Provenance
from headscope._provenance.shadows import MOST_IDS, Shadows


@dataclass(frozen=True)
class Origin:
    """What numbers are made from; each broadcasts to the shape of the numbers. See ``Provenance``."""

    kind: int
    token: Tensor
    feature: Tensor
    other_token: Tensor | None = None
    other_feature: Tensor | None = None
    value: Tensor | None = None
    factor: Tensor | None = None


class Identities:
    """The ids of one forward pass: its shadows, and the record of each id."""

    def __init__(self) -> None:
        self.record = Provenance()
        self.shadows = Shadows()
        self._features: dict[Any, int] = {}
        self._next_feature = 0
        self.count = 1

    def assign_new(self, x: Tensor, origin: Origin) -> None:
        """Give all numbers of a tensor new ids, and record their origin."""
        record, n, first = self.record, x.numel(), self.count
        if first + n > MOST_IDS:
            return

        def add(old: Tensor, new: Tensor | None, default: float) -> Tensor:
            more = torch.full((n,), default, dtype=old.dtype) if new is None else new.expand(x.shape).reshape(-1)
            return torch.cat([old, more.to(old.dtype)])

        record.token = add(record.token, origin.token, NONE)
        record.other_token = add(record.other_token, origin.other_token, NONE)
        record.feature = add(record.feature, origin.feature, NONE)
        record.other_feature = add(record.other_feature, origin.other_feature, NONE)
        record.kind = add(record.kind, None, origin.kind)
        record.value, record.factor = add(record.value, origin.value, 0), add(record.factor, origin.factor, 1)
        record.unit = add(record.unit, None, False)
        self.count += n
        self.shadows.assign(x, torch.arange(first, first + n).view(x.shape))

    def number_columns(self, weights: Tensor) -> Tensor:
        """Return a number for each column of weights [N, width, features]: equal columns have equal numbers."""
        n, width, features = weights.shape
        probe = torch.linspace(1, 2, width, dtype=weights.dtype).cos()
        prints = (probe @ weights).double()  # [N, features]
        numbers = torch.empty(n, features, dtype=torch.long)
        for i in range(n):
            numbers[i] = self.number((width, tuple(round(x, 7) for x in prints[i, :64].tolist())), features)
        return numbers

    def number(self, key: Any, count: int) -> Tensor:
        """Return ``count`` consecutive numbers that no other key has; the same ones for the same key."""
        if (key, count) not in self._features:
            self._features[key, count] = self._next_feature
            self._next_feature += count
        return self._features[key, count] + torch.arange(count)

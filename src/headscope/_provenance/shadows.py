"""The shadows of tensors: for each number of a storage, the id of its origin and the factor it was scaled by since."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_IDS = 1 << 24  # a forward pass with more numbers than that is not followed


class Shadow(NamedTuple):
    """Ids and factors of the numbers of a tensor, in its shape."""

    ids: Tensor
    factors: Tensor


UNKNOWN = ((0, torch.long), (1.0, torch.float64))
"""The id and the factor, each with its dtype, of a number of which nothing is known."""


@dataclass(frozen=True)
class StorageShadow:
    """The shadow of a whole storage. It holds the storage, so that no other one gets the same address."""

    ids: Tensor
    factors: Tensor
    storage: Any


def is_followed(x: Tensor) -> bool:
    """Return whether a tensor can have a shadow: it is dense, of real or complex numbers."""
    return x.layout is torch.strided and (x.is_floating_point() or x.is_complex())


class Shadows:
    """The shadows of all tensors of a forward pass, by storage: views of a storage share one shadow."""

    def __init__(self) -> None:
        self._by_storage: dict[int, StorageShadow] = {}

    def __contains__(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._by_storage

    def find(self, x: Tensor, part: int = 0) -> Shadow | None:
        """Return the shadow of a tensor, or None; of complex numbers that of the real (0) or imaginary (1) part."""
        if not is_followed(x):
            return None
        whole = self._by_storage.get(x.untyped_storage()._cdata)
        if whole is None:
            return None
        each = 2 if x.is_complex() else 1  # numbers per element
        view = (x.size(), [each * step for step in x.stride()], each * x.storage_offset() + part)
        return Shadow(whole.ids.as_strided(*view), whole.factors.as_strided(*view))

    def ids(self, x: Tensor) -> Tensor | None:
        """Return the ids of the numbers of a tensor, or None where it has no shadow."""
        shadow = self.find(x)
        return None if shadow is None else shadow.ids

    def create(self, x: Tensor) -> Shadow | None:
        """Return the shadow of a tensor, a new one of zeros where it has none; None where it cannot have one."""
        if not is_followed(x):
            return None
        storage = x.untyped_storage()
        size = storage.nbytes() // x.element_size() * (2 if x.is_complex() else 1)
        if storage._cdata not in self._by_storage:
            if size > MOST_IDS:
                return None
            ids, factors = torch.zeros(size, dtype=torch.long), torch.ones(size, dtype=torch.float64)
            self._by_storage[storage._cdata] = StorageShadow(ids, factors, storage)
        return self.find(x)

    def assign(self, x: Tensor, ids: Tensor, factors: Tensor | float = 1.0) -> None:
        """Write the ids and factors of the numbers of a tensor."""
        self.create(x)
        for part in range(2 if x.is_complex() else 1):
            shadow = self.find(x, part)
            if shadow is not None:
                shadow.ids.copy_(ids)
                shadow.factors.copy_(torch.as_tensor(factors, dtype=torch.float64))

    def component(self, x: Tensor, which: int) -> Tensor:
        """Return the ids (0) or factors (1) of a tensor; x itself where it cannot have a shadow."""
        if not is_followed(x):
            return x
        shadow = self.find(x)
        value, dtype = UNKNOWN[which]
        return torch.full(x.shape, value, dtype=dtype) if shadow is None else shadow[which]

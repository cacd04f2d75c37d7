"""The null of row quantities: what chance gives if the keys of each row are exchanged at random.

docs/concepts/statistics.md defines it. A row has a mean and a variance in closed form; the sums of both over the rows
suffice for the mean and the standard deviation of a head.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from headscope.stats._part import Part
from headscope.stats._quantities import quantity_of


class Null(NamedTuple):
    """What chance gives: the mean of a head whose keys are exchanged at random, and the spread of that mean.

    Attributes:
        mean: its expected value, float64 [H] or [L, H]; NaN where no row has the quantity.
        std: its standard deviation, of the same shape.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> q = 40 * torch.eye(4)[None, None]  # each row attends to its own key
        >>> null = observe(q, q)["self"].null
        >>> null.mean.tolist(), round(float(null.std), 4)
        ([[0.25]], 0.2165)
    """

    mean: Tensor
    std: Tensor


@dataclass(frozen=True, eq=False)
class Nulls(Part):
    """The sums of which the nulls of some row quantities consist.

    Attributes:
        names: of the quantities; those without a null have no meaning here.
        sums: over the rows that have a quantity, of its mean and of its variance under exchange, [2, N, H].
    """

    names: tuple[str, ...]
    sums: Tensor

    def of(self, name: str, count: Tensor) -> Null | None:
        """Return the null of a quantity that so many rows have; None if it is unknown."""
        if name not in self.names or not has_null(name):
            return None
        total, variance = self.sums[:, self.names.index(name)]
        return Null(total / count, variance.sqrt() / count)

    def without(self, dropped: Collection[str]) -> Nulls:
        """Return the same without some quantities."""
        places = [n for n, name in enumerate(self.names) if name not in dropped]
        if len(places) == len(self.names):
            return self
        return Nulls(tuple(self.names[n] for n in places), self.sums[:, places])

    def compact(self) -> Nulls:
        """Return the same with only the quantities that have a null."""
        places = [n for n, name in enumerate(self.names) if has_null(name)]
        return Nulls(tuple(self.names[n] for n in places), self.sums[:, places])


class _Counted(Protocol):
    @property
    def moments(self) -> Mapping[str, object]: ...
    @property
    def nulls(self) -> Nulls | None: ...


def merged_nulls(parts: Sequence[_Counted]) -> Nulls | None:
    """Return the sums over the rows of all; a quantity that some part has without its null has none then."""
    known = [each.nulls for each in parts if each.nulls is not None]
    if len(known) == len(parts) and all(each.names == known[0].names for each in known):
        return Nulls(known[0].names, reduce(torch.add, [each.sums for each in known]))
    sums: dict[str, Tensor] = {}
    for name in dict.fromkeys(name for each in known for name in each.names):
        of = [each.nulls for each in parts if name in each.moments]
        if all(each is not None and name in each.names for each in of):
            each_sum = [each.sums[:, each.names.index(name)] for each in of if each is not None]
            sums[name] = reduce(torch.add, each_sum)
    return Nulls((*sums,), torch.stack([*sums.values()], 1)) if sums else None


def has_null(name: str) -> bool:
    """Return whether a row quantity depends on which keys have the weight, so that exchanging keys changes it."""
    quantity = quantity_of(name)
    return quantity is not None and quantity.has_null


def check_nulls(under: str, nulls: Nulls, counts: Mapping[str, Tensor]) -> None:
    """Check the sums of a layer; ``counts``: the number of rows of each of its quantities.

    Raises:
        ValueError: impossible numbers, or sums of a quantity without a null.
    """
    if len({*nulls.names}) < len(nulls.names):
        raise ValueError(f"{under}/nulls: got {', '.join(nulls.names)}, expected different quantities")
    for n, name in enumerate(nulls.names):
        if not has_null(name):
            raise ValueError(f"{under}/nulls: {name} is not a quantity that depends on which keys have the weight")
        if name not in counts:
            continue
        most = counts[name].double() * _MOST if name != "distance" else torch.inf
        sums = nulls.sums[:, n].double()
        wrong = ~((sums >= 0) & (sums <= most)) | ((counts[name] == 0) & (sums != 0))
        if bool(wrong.any()):
            raise ValueError(f"{under}/nulls: {name} is not possible for any rows")


_MOST = 1.001  # the largest mean and variance of the weight on some keys, with a margin for rounding
Null.__module__ = "headscope.stats"  # its public path

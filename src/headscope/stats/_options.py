"""The options of ``headscope.observe``."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope._support.arguments import check_type, kind, number, whole
from headscope.stats._head_weights import CALL_GIB, GIB, check_limit, count_rows, head_numbers, listed
from headscope.stats._quantities import ROW_QUANTITIES
from headscope.stats._segments import Segments
from headscope.stats._selection import Policy, Selected, check_selected

__all__ = ["Observe"]

MOST_EDGES, MOST_BINS = 1 << 24, 1 << 14
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass(frozen=True, eq=False)
class Observe:
    """The statistics to measure; nothing else is computed.

    Args:
        rows: the query rows to observe: None = all; a number N from 1 = an even sample, the middle query of each of N
            equal parts; a boolean tensor that broadcasts to [B, H, Q], True = counts.
        row_stats: the row quantities: lse, max_logit, entropy, normalized_entropy, max_weight, effective_keys, mass,
            first, chance, and in self-attention distance, self, previous, next; value_norm if v is given.
        received: the weight that each key receives, and the number of rows to which it is visible.
        map: n from 1 to 16384: mean, max and argmax of the weights in n x n bins.
        edges: the number of largest weights of each head to retain, from 0 to 2²⁴.
        top: the number of largest weights of each row to retain, from 0 to 2²⁴.
        windows: finite distances w from 0, in positions: each adds ``window_{w}``, the mass within w of the query, and
            ``streaming_{w}``, the mass within w or on the first keys.
        first: the number of first real keys in ``first`` and ``streaming_{w}``, from 1.
        tokens: ids of the keys, whole numbers [K] or [B, K]: adds duplicate and induction.
        keep_rows: retain the row quantities of every row, and the argmax, [B, H, R].
        keep_qk: retain copies of q and k, so ``HeadStats.tile`` can compute any exact piece of the weights.
        extra: names of optional row quantities: ``second_weight``.
        segments: named segments of the sequence: the weight that flows from segment to segment.
        received_max: the largest weight that each key receives.
        weights: heads whose weights are retained, [B, R, K] each, in ``HeadStats.weights``; ``rows`` selects the R
            queries. If nothing else is measured, no other head is computed.
        weights_gib: the largest size of these weights in one call, in GiB; above it the call raises before it measures.
        selected: the keys that a sparse attention selects, for recall, recall_kl and largest_selected: indices that
            broadcast to [B, H, Q, n], -1 = none, where H may be Hkv; a mask, or a boolean tensor that broadcasts to
            [B, H, Q, K], True = selected; or a function of layer, q [B, H, Q, D] and k [B, Hkv, K, D] that returns one
            of these. Outside of ``watch`` the layer is "0".

    Raises:
        TypeError: an argument is not of the right kind.
        ValueError: a number is out of range, a name unknown, a head named twice, or ``keep_rows``, ``extra`` or
            ``selected`` without ``row_stats``.

    Examples:
        >>> import torch
        >>> from headscope import Observe, observe
        >>> q = torch.zeros(1, 2, 4, 8)
        >>> stats = observe(q, q, what=Observe(map=2, windows=(1,)))
        >>> stats.map.bins, stats.names[-2:]
        (2, ('window_1', 'streaming_1'))
    """

    rows: int | Tensor | None = None
    row_stats: bool = True
    received: bool = True
    map: int | None = None
    edges: int = 0
    top: int = 0
    windows: Collection[float] = ()
    first: int = 1
    tokens: Tensor | None = None
    keep_rows: bool = False
    keep_qk: bool = False
    extra: Collection[str] = ()
    segments: Segments | None = None
    received_max: bool = False
    weights: Collection[int] = ()
    weights_gib: float = CALL_GIB
    selected: Selected | Policy | None = None

    def __post_init__(self) -> None:
        for name in ("row_stats", "received", "keep_rows", "keep_qk", "received_max"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: got {kind(getattr(self, name))}, expected True or False")
        self._check_rows()
        if self.map is not None:
            object.__setattr__(self, "map", whole("map", self.map, 1, " or None"))
        for name, least in (("edges", 0), ("top", 0), ("first", 1)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        for name, most in (("map", MOST_BINS), ("edges", MOST_EDGES), ("top", MOST_EDGES)):
            if (value := getattr(self, name)) is not None and value > most:
                raise ValueError(f"{name}: got {value}, expected at most {most}, because all are held in memory")
        if not _is_collection(self.windows) or isinstance(self.windows, Tensor):
            raise TypeError(f"windows: got {kind(self.windows)}, expected a tuple of distances")
        windows = tuple(number("windows", w) for w in self.windows)
        for w in windows:
            if not 0 <= w < math.inf:
                raise ValueError(f"windows: got {w}, expected a finite number from 0")
        names = [f"window_{w:g}" for w in windows]
        if len({*names}) < len(names):
            raise ValueError(f"windows: got {windows}, expected each distance once (to six digits)")
        object.__setattr__(self, "windows", windows)
        if self.tokens is not None:
            check_type("tokens", self.tokens, Tensor, "a tensor of whole numbers")
            if self.tokens.dtype not in _INTEGERS:
                raise TypeError(f"tokens: dtype is {kind(self.tokens)}, expected whole numbers")
        if self.keep_rows and not self.row_stats:
            raise ValueError(
                "keep_rows: expected False together with row_stats=False, which computes no rows; got True"
            )

        object.__setattr__(self, "extra", self._extra())
        if self.segments is not None:
            check_type("segments", self.segments, Segments, "a headscope.Segments or None")
        object.__setattr__(self, "weights", head_numbers(self.weights))
        object.__setattr__(self, "weights_gib", check_limit(self.weights_gib))
        if self.selected is not None:
            check_selected(self.selected, self.row_stats)

    def check_weights(
        self, sizes: tuple[int, int, int], dtype: torch.dtype, recorded: int = 0, limit: float = math.inf
    ) -> int:
        """Return the size of the weights of the chosen heads of one call, in bytes, after checks.

        Args:
            sizes: B, Q and K of the call.
            dtype: of the weights.
            recorded: the size of the weights of earlier calls, in bytes.
            limit: the largest size of the weights of all calls, in GiB.

        Raises:
            ValueError: the weights are larger than ``weights_gib``, or than ``limit`` together with those recorded.
        """
        rows = count_rows(self.rows, sizes[1])
        size = sizes[0] * len(self.weights) * rows * sizes[2] * dtype.itemsize
        if size > self.weights_gib * GIB or size + recorded > limit * GIB:
            earlier = f" after {recorded / GIB:.3g} GiB of earlier calls" if recorded else ""
            most = self.weights_gib if size > self.weights_gib * GIB else limit
            raise ValueError(
                f"weights: those of heads {listed([*self.weights])}, [B, heads, R, K] = [{sizes[0]}, "
                f"{len(self.weights)}, {rows}, {sizes[2]}], need {size / GIB:.3g} GiB{earlier}; expected at most "
                f"{most:.3g} GiB; observe fewer rows (rows=) or heads, retain q and k (keep_qk=True) and read pieces "
                "with tile(...), or raise weights_gib="
            )
        return size

    def _extra(self) -> tuple[str, ...]:
        names = [each.name for each in ROW_QUANTITIES if each.on_request]
        if not _is_collection(self.extra):
            raise TypeError(f"extra: got {kind(self.extra)}, expected a tuple of names, such as {tuple(names)}")
        if unknown := [name for name in self.extra if name not in names]:
            raise ValueError(f"extra: got {unknown[0]!r}, expected names of {', '.join(names)}")
        if self.extra and not self.row_stats:
            raise ValueError("extra: expected no names together with row_stats=False, because they are row quantities")
        return tuple(name for name in names if name in self.extra)

    def _check_rows(self) -> None:
        if isinstance(self.rows, Tensor):
            if self.rows.dtype != torch.bool:
                raise TypeError(f"rows: dtype is {kind(self.rows)}, expected bool (True = counts)")
        elif self.rows is not None:
            object.__setattr__(self, "rows", whole("rows", self.rows, 1, ", a boolean tensor or None"))


def _is_collection(value: object) -> bool:
    """Return whether a value is a collection: a str counts as one value."""
    return isinstance(value, Collection) and not isinstance(value, str)


Observe.__module__ = "headscope.stats"  # its public path

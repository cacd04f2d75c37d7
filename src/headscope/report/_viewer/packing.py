"""The data for the page's script: a description as JSON, and one block of bytes for each head.

A block is little-endian and compressed (raw deflate). Blocks follow each other, each at a multiple of three bytes, so
that the base64 of the whole can be cut into that of each block. A block holds, in this order, with the sizes that the
description of its layer gives:

    float32 [3]        the largest mean and the largest max of the map; 1 if its codes are differences, see below
    float32 [rows]     of each row of bins, the share of its weight in the first column; NaN where it has none
    float32 [2]        the largest received and the largest entropy
    uint16 [received]  weight received per row with the key visible, evenly pooled over keys: planes of codes c with
                       value = largest * c / 65534; 65535 = none
    uint16 [entropy]   likewise, the entropy of the rows of one text, evenly pooled over queries
    float32 [edges], uint32 [4, edges]   the largest weights: p, then run, batch entry, query, key
    uint16 [queries, k], uint32 [queries, k]   the largest weights of each query and their keys, as planes: codes as of
                       bins with a largest of 1, and NONE for a missing key
    uint16 [rows]      if the head has fewer levels (see ``levels``): planes of the codes of the largest of each row
                       of bins; then the codes as ``levels.joined`` writes them
    mean, max          codes of the visible bins, row by row: value = largest * (code / top)**2; with fewer levels that
                       is the largest of the row, and top the number of levels
    argmax             the place of the max of each visible bin: query, key, run, batch entry, each where it can differ;
                       query and key count from the first of the bin where the bins' ranges are known

Codes and places of two or four bytes are stored as planes: all low bytes first, which compresses better. Differences
are those of codes of 8 bits from the code of the bin above (0 if that bin is masked), modulo 256: a key that many
queries attend to makes the codes of a column nearly equal.

A strip is a separate block, for a few heads: uint8 [queries, near + first], p = (code / 254)**2, and 255 = masked. It
holds the weights on the keys at the distances ``low`` to ``high`` from the query, then those on the first keys.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headscope.report._viewer.block_bytes import deflated, floats, planes, text, width_of
from headscope.report._viewer.levels import FULL, joined, levels_of, row_codes
from headscope.stats._layer import HeadMap, LayerStats

__all__ = [
    "FINE_BYTES",
    "MOST_BYTES",
    "Map",
    "Packed",
    "Rows",
    "Source",
    "Strips",
    "exact",
    "most_received",
    "pack",
    "sources",
    "standing",
]

Array = NDArray[Any]

MOST_BYTES = 64 * 2**20
"""The most bytes of all blocks of a page, before base64."""

FINE_BYTES = 5 * 2**20
"""The most bytes of bins with 16 bits; pages with more use 8 bits."""

PROFILES = 2**18
"""The most values of ``received`` of all heads together; pages with more pool neighbouring keys."""

TOP_BYTES = 4 * 2**20
"""The most bytes of the largest weights of rows, before compression; pages with more hold fewer of each row."""

NONE = 0xFFFF_FFFF
NOTHING = 0xFFFF


@dataclass(frozen=True)
class Packed:
    """The blocks of all heads.

    Attributes:
        layers: how to read the blocks of each layer, ready for JSON.
        masks: the visible bins, packed bits in base64; layers refer to them by index.
        blocks: for each layer and head the start and length of its block, in bytes.
        content: all blocks, base64.
        bits: the size of a bin's code.
    """

    layers: list[dict[str, Any]]
    masks: list[str]
    blocks: list[list[tuple[int, int]]]
    content: str
    bits: int


@dataclass(frozen=True, eq=False)
class Strips:
    """Weights near the diagonal and on the first keys, of some heads, at full resolution.

    Attributes:
        lengths: the numbers of queries and keys of their run.
        offset: the position of query 0 among the keys.
        low, high: the distances key - query, both inclusive.
        first: how many of the first keys.
        codes: head -> uint8 [queries, high - low + 1 + first].
    """

    lengths: tuple[int, int]
    offset: int
    low: int
    high: int
    first: int
    codes: Mapping[int, Array]


@dataclass(frozen=True, eq=False)
class Source:
    """The content of a layer's blocks."""

    heads: int
    map: Map | None
    rows: Rows
    strips: Strips | None = None


def sources(parts: Sequence[LayerStats], strips: Sequence[Strips | None]) -> list[Source]:
    """Return the sources of observed layers."""
    heads = sum(part.heads for part in parts)
    most = most_received(heads)
    room = TOP_BYTES // max(1, heads) // 6
    return [
        Source(part.heads, None if part.map is None else Map.of(part.map, part), Rows.of(part, most, room), strip)
        for part, strip in zip(parts, strips, strict=True)
    ]


def most_received(heads: int) -> int:
    """Return the most values of ``received`` of one head, on a page with so many heads."""
    return max(64, PROFILES // max(heads, 1))


def pack(layer_sources: Sequence[Source]) -> Packed:
    """Return the blocks of all layers.

    Raises:
        ValueError: the blocks exceed ``MOST_BYTES``.
    """
    bits = 16 if sum(2 * each.map.codes for each in layer_sources if each.map is not None) <= FINE_BYTES else 8
    heads = sum(each.heads for each in layer_sources)
    compressed, levels = _compressed(layer_sources, bits)
    layers: list[dict[str, Any]] = []
    masks: dict[bytes, int] = {}
    blocks: list[list[tuple[int, int]]] = []
    content = bytearray()

    def put(packed: bytes) -> tuple[int, int]:
        place = (len(content), len(packed))
        content.extend(packed + b"\0" * (-len(packed) % 3))
        return place

    for n, part in enumerate(layer_sources):
        rows, bins, strips = part.rows, part.map, part.strips
        facts = None if bins is None else {**bins.description(masks), "levels": levels[n]}
        description = rows.description() | {"map": facts, "strips": None}
        places: list[tuple[int, int]] = []
        for block in compressed[n]:
            places.append(put(block))
            if len(content) > MOST_BYTES:
                raise ValueError(
                    f"recording: the maps of {heads:,} heads do not fit on one page, which holds "
                    f"{MOST_BYTES / 2**20:.0f} MiB; record with a smaller map=, or fewer layers"
                )
        if strips is not None:
            of_heads = {
                str(head): put(deflated(np.ascontiguousarray(codes).tobytes())) for head, codes in strips.codes.items()
            }
            sizes = {name: getattr(strips, name) for name in ("lengths", "offset", "low", "high", "first")}
            description["strips"] = {**sizes, "heads": of_heads}
        layers.append(description)
        blocks.append(places)
    return Packed(layers, [text(mask) for mask in masks], blocks, text(bytes(content)), bits)


def _compressed(parts: Sequence[Source], bits: int) -> tuple[list[list[bytes]], list[list[int] | None]]:
    """Return the block of each head of each layer, and how many levels its weights have; None: all of them.

    Where a page with every weight would be too large, heads that compress badly have fewer levels.
    """
    blocks = [[_block(part, head, bits, FULL) for head in range(part.heads)] for part in parts]
    sizes = [[len(block) for block in each] for each in blocks]
    maps = [part.map if part.map is not None and part.map.exact else None for part in parts]
    others = [max((len(deflated(_start(part, head))) for head in range(part.heads)), default=0) for part in parts]
    levels = levels_of(sizes, others, [None if each is None else (each.mean, each.visible) for each in maps], bits)
    for n, each in enumerate(levels):
        for head, top in enumerate(each or ()):
            if top < FULL:
                blocks[n][head] = _block(parts[n], head, bits, top)
    return blocks, levels


def _block(part: Source, head: int, bits: int, levels: int) -> bytes:
    """Return the compressed block of a head, whose weights have so many levels."""
    bins = part.map
    if bins is None:
        return deflated(part.rows.block(head))
    differs = bits == 8 and levels == FULL and bins.differs(head)
    start = _start(part, head, differs)
    if levels < FULL:
        return deflated(start, ends=False) + deflated(bins.coarse_block(head, levels), zlib.Z_HUFFMAN_ONLY)
    return deflated(start + bins.block(head, bits, differs), zlib.Z_FILTERED if differs else zlib.Z_DEFAULT_STRATEGY)


def _start(part: Source, head: int, differs: bool = False) -> bytes:
    """Return a block without its weights."""
    return (b"" if part.map is None else part.map.largest(head, differs)) + part.rows.block(head)


# ---------------------------------------------------------------- the map


@dataclass(frozen=True)
class Map:
    """The map of a layer without the bins that hold no pair of query and key.

    Attributes:
        mean, max: [H, rows, columns]; NaN where no pair is visible.
        visible: whether a bin holds a visible pair, bool [H, rows, columns].
        places: query, key, run and batch entry of the max, each int64 [H, rows, columns] with its size in bytes.
        first_share: [H, rows].
        exact: whether each bin is one weight of one run and batch entry.
        ranges: whether the ranges of the bins are known.
    """

    mean: Array
    max: Array
    visible: Array
    places: list[tuple[Array, int]]
    first_share: Array
    exact: bool
    ranges: bool

    @staticmethod
    def of(head_map: HeadMap, part: LayerStats) -> Map:
        """Return the map with the bins that cover a query and a key: T bins where T < n positions have n bins."""
        n, lengths = head_map.bins, part.lengths
        rows, columns = standing(n, lengths)
        cut = np.ix_(np.arange(part.heads), rows, columns)
        total, count = (x.cpu().double().numpy()[cut] for x in (head_map.sum, head_map.count))
        visible = count > 0
        mean = np.divide(total, count, out=np.full_like(total, math.nan), where=visible)
        weight = np.where(visible, total, 0).sum(-1)
        first = np.divide(total[..., :1].sum(-1), weight, out=np.full_like(weight, math.nan), where=weight > 0)
        if exact(part):  # the largest weight of a bin is its only one, at its only place
            return Map(mean, mean, visible, [], first, True, True)
        most: Array = head_map.max.cpu().double().numpy()[cut]
        at: Array = head_map.argmax.cpu().numpy()[cut]
        run, entry, query, key = np.moveaxis(at, -1, 0)
        if lengths is not None:
            query = query - (rows * lengths[0] // n if lengths[0] > n else np.arange(len(rows)))[:, None]
            key = key - (columns * lengths[1] // n if lengths[1] > n else np.arange(len(columns)))
        places = [(x, width_of(int(x[visible].max(initial=0)))) for x in (query, key, run, entry)]
        return Map(mean, most, visible, places, first, False, lengths is not None)

    @property
    def codes(self) -> int:
        """The number of codes of all heads."""
        return int(self.visible.sum()) * (1 if self.exact else 2)

    def description(self, masks: dict[bytes, int]) -> dict[str, Any]:
        """Return how to read the blocks; new masks are added to ``masks``."""
        mine = [masks.setdefault(np.packbits(visible).tobytes(), len(masks)) for visible in self.visible]
        return {
            "rows": self.mean.shape[1],
            "columns": self.mean.shape[2],
            "exact": self.exact,
            "ranges": self.ranges,
            "masks": mine,
            "widths": [0, 0, 0, 0] if self.exact else [width for _, width in self.places],
        }

    def largest(self, head: int, differs: bool) -> bytes:
        """Return the start of a block: the largest mean and max, and the share of the first column."""
        visible = self.visible[head]
        tops = [float(x[head][visible].max(initial=0.0)) for x in (self.mean, self.max)]
        return floats(np.array([*tops, float(differs)])) + floats(self.first_share[head])

    def differs(self, head: int) -> bool:
        """Return whether differences from the bin above compress better than the codes of 8 bits, by entropy."""
        visible = self.visible[head]
        codes = _codes(self.mean[head][visible], 8).astype(np.uint8)
        return _entropy(_differences(codes, visible)) < _entropy(codes)

    def block(self, head: int, bits: int, differs: bool) -> bytes:
        """Return the end of a block: the codes, and the place of each max."""
        visible, width = self.visible[head], bits // 8
        parts: list[bytes] = []
        for values in (self.mean,) if self.exact else (self.mean, self.max):
            codes = _codes(values[head][visible], bits)
            parts.append(planes(_differences(codes.astype(np.uint8), visible) if differs else codes, width))
        if not self.exact:
            parts += [planes(x[head][visible], wide) for x, wide in self.places if wide]
        return b"".join(parts)

    def coarse_block(self, head: int, levels: int) -> bytes:
        """Return the end of a block of single weights with fewer levels: the largest of each row, and the codes."""
        codes, largest = row_codes(self.mean[head], self.visible[head], levels)
        return planes(largest, 2) + joined(codes, levels)


def exact(part: LayerStats) -> bool:
    """Return whether each bin of a layer's map is one weight of one run and batch entry."""
    if part.map is None or part.lengths is None:
        return False
    return max(part.lengths) <= part.map.bins and not bool((part.map.count > 1).any())


def standing(bins: int, lengths: tuple[int, int] | None) -> tuple[Array, Array]:
    """Return which of n x n bins cover a query, and which a key; all if their ranges are not known."""
    queries, keys = (np.arange(bins + 1) * length // bins for length in lengths or (bins, bins))
    return np.flatnonzero(queries[1:] > queries[:-1]), np.flatnonzero(keys[1:] > keys[:-1])


def _differences(codes: Array, visible: Array) -> Array:
    """Return codes of 8 bits minus those of the bins above."""
    full = np.zeros(visible.shape, np.uint8)
    full[visible] = codes
    full[1:] -= full[:-1].copy()
    return full[visible]


def _entropy(codes: Array) -> float:
    """Return the entropy of the codes of 8 bits, in bits."""
    share = np.bincount(codes, minlength=256) / max(1, len(codes))
    return float(-(share[share > 0] * np.log2(share[share > 0])).sum())


def _codes(values: Array, bits: int) -> Array:
    """Return whole numbers c with value = largest * (c / top)²; a value above the float32 of the largest gets top."""
    largest, top = float(np.float32(values.max(initial=0.0))), 2**bits - 1
    return np.zeros(len(values)) if largest == 0 else np.rint(np.sqrt((values / largest).clip(0, 1)) * top)


# ---------------------------------------------------------------- profiles and largest weights


@dataclass(frozen=True)
class Rows:
    """Profiles over keys and queries, and the largest weights of a layer.

    Attributes:
        received: [H, m].
        keys: the number of keys that it covers.
        entropy: [H, m].
        queries: the number of queries that it covers.
        p, at: the largest weights, [H, k] and [H, k, 4].
        top_p, top_at: the largest weights of each query, if one text was observed, [H, Q, k]; NaN and -1 where a
            query has fewer.
    """

    received: Array
    keys: int
    entropy: Array
    queries: int
    p: Array
    at: Array
    top_p: Array
    top_at: Array

    @staticmethod
    def of(part: LayerStats, most: int, room: int) -> Rows:
        """Return profiles of at most ``most`` values, and at most ``room`` of the largest weights per head."""
        none = np.zeros((part.heads, 0))
        received, keys = none, 0
        if part.received is not None and part.eligible is not None:
            keys = part.received.shape[1]
            received = _ratio(*(_pooled(x.cpu().double().numpy(), most) for x in (part.received, part.eligible)))
        entropy, queries = none, 0
        text_rows = _only(part)
        if "entropy" in text_rows:
            rows = text_rows["entropy"]
            queries = rows.shape[1]
            there = ~np.isnan(rows)
            entropy = _ratio(_pooled(np.where(there, rows, 0), most), _pooled(there.astype(np.float64), most))
        p, at = none, np.zeros((part.heads, 0, 4))
        if part.edges is not None:
            p, at = part.edges.p.cpu().double().numpy(), part.edges.at.cpu().numpy()
        top_p = top_at = np.zeros((part.heads, 0, 0))
        if "top_keys" in text_rows:
            fit = room // max(1, text_rows["top_keys"].shape[1])
            top_p, top_at = (text_rows[name][..., :fit] for name in ("top_weights", "top_keys"))
        return Rows(received, keys, entropy, queries, p, at, top_p, top_at)

    def description(self) -> dict[str, Any]:
        """Return how to read the blocks."""
        return {
            "received": self.received.shape[1],
            "receivedOf": self.keys,
            "entropy": self.entropy.shape[1],
            "entropyOf": self.queries,
            "edges": self.p.shape[1],
            "top": [*self.top_p.shape[1:]],
        }

    def block(self, head: int) -> bytes:
        """Return both profiles and the largest weights of a head and of its rows."""
        at = np.where(self.at[head] < 0, NONE, self.at[head]).T.astype("<u4")
        profiles = (self.received[head], self.entropy[head])
        largest = [float(np.nanmax(profile, initial=0.0)) for profile in profiles]
        parts = [floats(np.array(largest))]
        for profile, most in zip(profiles, largest, strict=True):
            codes = np.rint(profile / (most or 1.0) * (NOTHING - 1))
            parts.append(planes(np.where(np.isnan(profile), NOTHING, codes), 2))
        parts += [floats(self.p[head]), at.tobytes()]
        top = self.top_p[head].astype(np.float64)
        root = np.sqrt(np.nan_to_num(top).clip(0, 1))
        parts.append(planes(np.rint(root * 0xFFFF), 2))
        parts.append(planes(np.where(np.isnan(top) | (self.top_at[head] < 0), NONE, self.top_at[head]), 4))
        return b"".join(parts)


def _only(part: LayerStats) -> dict[str, Array]:
    """Return the retained rows [H, Q] if one text was observed whole; nothing for several texts or a sample."""
    if len(part.kept) != 1 or part.lengths is None:
        return {}
    rows = part.kept[0]
    if rows.counted.shape[0] != 1 or len(rows.queries) != part.lengths[0]:
        return {}
    names = ("entropy", "top_keys", "top_weights")
    return {name: x[0].cpu().numpy() for name, x in rows.values.items() if name in names}


def _pooled(values: Array, most: int) -> Array:
    """Return sums over at most ``most`` even parts of the last axis: part b holds ⌊bT/m⌋ to ⌊(b+1)T/m⌋ - 1."""
    length = values.shape[-1]
    if length <= most:
        return values
    return np.add.reduceat(values, np.arange(most) * length // most, axis=-1)


def _ratio(total: Array, count: Array) -> Array:
    return np.divide(total, count, out=np.full_like(total, math.nan), where=count > 0)

"""Gathering of statistics over ranks: what each rank has, whether it belongs together, and the statistics of all.

The ranks first exchange a short description of what they have. So all of them refuse what does not belong together,
before anything else is sent. Statistics travel as the bytes of their file, and are checked as a file is; nothing is
unpickled.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from headscope._support.arguments import as_whole, kind
from headscope._support.ranks import Ranks
from headscope.stats import _statistics_file
from headscope.stats._header import open_bytes
from headscope.stats._joining import Held, joined_heads, joined_layers, merged_layers
from headscope.stats._layer import LayerStats
from headscope.stats._origin import Origin

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_ROWS = 'to put rows of the same heads together, use axis="rows"'
_JOIN: Mapping[str, Callable[[Sequence[Held]], tuple[dict[str, LayerStats], Origin | None]]] = {
    "rows": merged_layers, "heads": joined_heads, "layers": joined_layers,
}  # fmt: skip


@dataclass(frozen=True)
class Gathering:
    """One gathering of something over the ranks of a group.

    Attributes:
        what: the operation, for errors: "gather".
        ranks: those of the group.
        to: the rank that gets the result; None: all of them.
        axis: what the ranks have parts of.
    """

    what: str
    ranks: Ranks
    to: int | None
    axis: str

    def collect(self, describe: Callable[[], tuple[dict[str, Any], bytes]], check: Check) -> list[bytes] | None:
        """Return the bytes of all ranks, in order; None on a rank that does not get the result.

        Args:
            describe: returns a description of what this rank has, ready for JSON, and its bytes.
            check: raises ValueError if the descriptions of all ranks do not belong together.

        Raises:
            Exception: what ``describe`` raises, once the other ranks know; there it is a ValueError.
        """
        own: Exception | None = None
        described, content = dict[str, Any](), b""
        try:
            described, content = self._describe(describe)
        except Exception as error:  # on the other ranks, too: they would wait for this one
            own = error
        message: dict[str, Any] = {
            "error": None if own is None else f"{own}",
            "axis": f"{self.axis}",
            "to": f"{self.to}",
        }
        message |= {"bytes": len(content), "has": described}
        try:
            sizes: list[int] = self.ranks.agree(self.what, message, partial(self._judge, check))
        except ValueError as error:
            if own is None:
                raise
            raise own from error
        return self.ranks.collect(self.what, content, sizes, self.to)

    def _judge(self, check: Check, several: list[dict[str, Any]]) -> list[int]:
        """Return the bytes of each rank, if all belong together."""
        names = self.ranks.names
        for rank, each in enumerate(several):
            if each["error"] is not None:
                raise ValueError(f"{self.what}: rank {names[rank]} failed: {each['error']}")
        for argument in ("axis", "to"):
            check_equal(self.what, names, argument, [each[argument] for each in several])
        check(self, [each["has"] for each in several])
        return [each["bytes"] for each in several]

    def _describe(self, describe: Callable[[], tuple[dict[str, Any], bytes]]) -> tuple[dict[str, Any], bytes]:
        if self.axis not in _JOIN:
            raise ValueError(f'axis: got {self.axis!r}, expected "rows", "heads" or "layers"')
        to = None if self.to is None else as_whole(self.to)
        if self.to is not None and to is None:
            raise TypeError(f"to: got {kind(self.to)}, expected the number of a rank or None")
        if to is not None and not 0 <= to < self.ranks.size:
            raise ValueError(f"to: got {to}, expected a rank of the group, from 0 to {self.ranks.size - 1}, or None")
        described, content = describe()
        json.dumps(described)
        return described, content


Check = Callable[[Gathering, list[dict[str, Any]]], None]


def gathered(
    parts: Mapping[str, LayerStats], origin: Origin | None, group: ProcessGroup | None, to: int | None, axis: str
) -> tuple[dict[str, LayerStats], Origin | None] | None:
    """Return the statistics of all ranks; see ``HeadStats.gather``."""
    gathering = Gathering("gather", Ranks(group), to, axis)

    def describe_own() -> tuple[dict[str, Any], bytes]:
        return describe_statistics(parts, origin), _statistics_file.encode(parts, origin, "gather")

    contents = gathering.collect(describe_own, check_statistics)
    if contents is None:
        return None
    names = gathering.ranks.names
    files = [open_bytes(f"rank {name}", each) for name, each in zip(names, contents, strict=True)]
    return join_statistics(axis, [_statistics_file.decode(each) for each in files])


def join_statistics(axis: str, several: Sequence[Held]) -> tuple[dict[str, LayerStats], Origin | None]:
    """Return what the ranks hold together, in their order."""
    return _JOIN[axis](several)


def describe_statistics(parts: Mapping[str, LayerStats], origin: Origin | None) -> dict[str, Any]:
    """Return what decides with what statistics belong together, ready for JSON."""
    stated = None if origin is None or not origin.model else origin
    layers: dict[str, Any] = {}
    for name, part in parts.items():
        held = None if stated is None else stated.layers.get(name)
        layers[name] = {
            "heads": part.heads,
            "options": _options(part),
            "rows": [part.runs, part.of, part.looked_at, part.lengths, _keys(part)],
            "widths": None if held is None else held.widths,
            "part": None if held is None or held.part is None else [held.part.of, held.part.heads, str(held.part)],
            "weights": [list(run.heads) for run in part.weights[:1]],
            "checksum": None if stated is None or (held is not None and held.part is not None) else _checksum(part),
        }
    return {"origin": None if stated is None else str(stated), "layers": layers}


def _options(part: LayerStats) -> dict[str, Any]:
    """Return what shows with which options a layer was observed."""
    edges = 0 if part.edges is None else part.edges.p.shape[1]
    return {
        "row_stats": sorted(part.moments),
        "received": part.received is not None,
        "map": None if part.map is None else part.map.bins,
        "edges": edges,
        "keep_rows": sorted(part.kept[0].values) if part.kept else [],
        "first": part.first,
        "segments": None if part.segments is None else list(part.segments.names),
        "received_max": part.received_max is not None,
    }


def _keys(part: LayerStats) -> int | None:
    return next((x.shape[1] for x in (part.received, part.received_max) if x is not None), None)


def _checksum(part: LayerStats) -> int:
    return zlib.crc32(_statistics_file.encode({"": part}, None, "gather"))


# ---------------------------------------------------------------- what belongs together


def check_statistics(gathering: Gathering, several: list[dict[str, Any]]) -> None:
    """Raise ValueError if the descriptions of all ranks do not belong together."""
    what, names, layers = gathering.what, gathering.ranks.names, [each["layers"] for each in several]
    check_equal(what, names, "model", [each["origin"] for each in several])
    if gathering.axis == "layers":
        _check_layers(what, names, layers)
        return
    for rank, each in enumerate(layers[1:], 1):
        for a, b, has, lacks in ((layers[0], each, 0, rank), (each, layers[0], rank, 0)):
            if missing := next((layer for layer in a if layer not in b), None):
                raise ValueError(
                    f"{what}: rank {names[lacks]} has no layer {missing}, which rank {names[has]} has; expected the "
                    'same layers on every rank; to put other layers together, use axis="layers"'
                )
    for layer in layers[0]:
        described = [each[layer] for each in layers]
        for option in described[0]["options"]:
            got = [each["options"][option] for each in described]
            check_equal(what, names, option, got, layer=layer)
        check_equal(what, names, "widths of the heads", [each["widths"] for each in described], layer=layer)
        if gathering.axis == "heads":
            _check_heads(what, names, layer, described)
        else:
            _check_rows(what, names, layer, described)


def check_equal(what: str, names: Sequence[int], option: str, got: Sequence[Any], *, layer: str = "") -> None:
    """Raise ValueError if the ranks have different values of an option."""
    other = next((rank for rank, each in enumerate(got) if each != got[0]), None)
    if other is None:
        return
    shown = f"{got[0]} on rank {names[0]} and {got[other]} on rank {names[other]}"
    if isinstance(got[0], list) and isinstance(got[other], list):
        only = [[each for each in a if each not in b] for a, b in ((got[0], got[other]), (got[other], got[0]))]
        held = zip(only, (names[0], names[other]), strict=True)
        shown = " and ".join(f"{', '.join(map(str, each))} on rank {n} only" for each, n in held if each) or shown
    where = f"layer {layer}: " if layer else ""
    raise ValueError(f"{what}: {where}the ranks disagree on {option}; expected the same on all, got {shown}")


def _check_rows(what: str, names: Sequence[int], layer: str, described: Sequence[dict[str, Any]]) -> None:
    parts = [None if each["part"] is None else each["part"][2] for each in described]
    heads = [f"{each['heads']} heads" for each in described]
    held = [part or count for part, count in zip(parts, heads, strict=True)]
    try:
        check_equal(what, names, "heads", held, layer=layer)
    except ValueError as error:
        raise ValueError(f'{error}; to join parts of the heads, use axis="heads"') from error
    check_equal(what, names, "weights", [each["weights"] for each in described], layer=layer)


def _check_heads(what: str, names: Sequence[int], layer: str, described: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError unless the ranks hold all heads of a layer once, or every rank holds all of them."""
    parts = [each["part"] for each in described]
    at = f"{what}: layer {layer}"
    if all(part is None for part in parts):
        sums = [each["checksum"] for each in described]
        if len(parts) > 1 and (None in sums or len({*sums}) > 1):
            raise ValueError(
                f"{at}: does not state which heads each rank holds, so they cannot be joined; expected recordings of "
                f"`watch`, where ranks share the heads of a layer; {_ROWS}"
            )
        return
    for name, part in zip(names, parts, strict=True):
        if part is None or part[1] is None:
            held = "all heads" if part is None else part[2]
            raise ValueError(f"{at}: rank {name} holds {held}; expected a known part of the heads on every rank")
    check_equal(what, names, "the number of heads", [part[0] for part in parts], layer=layer)
    spans = sorted((part[1][0], part[1][1], name) for name, part in zip(names, parts, strict=True))
    for (_, stop, one), (start, _, other) in pairwise(spans):
        if start < stop:
            raise ValueError(
                f"{at}: ranks {one} and {other} both hold head {start}; expected each head on one rank. Where some "
                "ranks share the heads and others the data, gather the heads in each group that shares them first, "
                'then axis="rows" over the results'
            )
    ends = [0, *(stop for _, stop, _ in spans)]
    starts = [*(start for start, _, _ in spans), parts[0][0]]
    if gap := next(((a, b) for a, b in zip(ends, starts, strict=True) if a != b), None):
        raise ValueError(
            f"{at}: no rank holds heads {gap[0]} to {gap[1] - 1} of {parts[0][0]}; expected every head on one rank of "
            "the group"
        )
    check_equal(what, names, "its runs, rows and lengths", [each["rows"] for each in described], layer=layer)


def _check_layers(what: str, names: Sequence[int], layers: Sequence[Mapping[str, Any]]) -> None:
    first: dict[str, int] = {}
    for name, each in zip(names, layers, strict=True):
        for layer in each:
            if layer in first:
                raise ValueError(
                    f"{what}: ranks {first[layer]} and {name} both have layer {layer}; expected each layer on one "
                    f"rank; {_ROWS}. If they are different layers, rename them first: stats.named(...)"
                )
            first[layer] = name
            if each[layer]["part"] is not None:
                raise ValueError(
                    f"{what}: rank {name} holds {each[layer]['part'][2]} of layer {layer}; expected whole layers; join "
                    'the heads first: gather(..., axis="heads") in each group that shares them'
                )

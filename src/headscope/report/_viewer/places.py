"""The heads that an option of a page names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headscope._support.arguments import check_type

Place = tuple[int, int]
"""A layer and a head, counted from 0."""


class Observed(Protocol):
    """What an observed layer has."""

    @property
    def heads(self) -> int: ...
    @property
    def tiles(self) -> Mapping[int, Any]: ...
    @property
    def last_tiles(self) -> Any: ...
    @property
    def map(self) -> object: ...


def places_of(
    option: str, request: Sequence[tuple[int | str, int]], parts: Mapping[str, Observed], most: int
) -> list[Place]:
    """Return the layers and heads of an option, in its order.

    Raises:
        TypeError: the option is not a sequence.
        ValueError: it has too many heads, a pair is not one, a head does not exist, or its layer has no q and k.
    """
    names = list(parts)
    check_type(option, request, Sequence, "pairs of a layer and the number of a head", repr)
    if len(request) > most:
        raise ValueError(f"{option}: expected at most {most} heads, got {len(request)}")
    for each in request:
        match each:
            case (int() | str(), int()):
                pass
            case _:
                raise ValueError(f"{option}: expected pairs of a layer and the number of a head, got {each!r}")
    places: list[Place] = []
    for name, head in request:
        layer = names.index(name) if isinstance(name, str) and name in names else name
        if not (isinstance(layer, int) and 0 <= layer < len(names) and 0 <= head < parts[names[layer]].heads):
            raise ValueError(f"{option}: layer {name} with head {head} does not exist; {_describe_heads(parts)}")
        if not parts[names[layer]].tiles:
            raise ValueError(f"{option}: q and k were not saved; record with Observe(keep_qk=True)")
        places.append((layer, head))
    return places


def _describe_heads(parts: Mapping[str, Observed]) -> str:
    """Return how many layers and heads exist."""
    heads = {part.heads for part in parts.values()}
    each = f"{min(heads)}" if len(heads) == 1 else f"{min(heads)} to {max(heads)}"
    return f"expected layers 0 to {len(parts) - 1} or their names, of {each} heads"

"""The maps that plots draw: of weights, sheets, statistics and recordings; and the heads that a call names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headscope._support.arguments import as_whole, check_type, kind
from headscope.report._figures import SheetFigures
from headscope.report._plotting import Weights, as_array, as_weights
from headscope.report._viewer.packing import standing
from headscope.report.observed_model import ObservedModel
from headscope.stats import HeadStats

Head = str | tuple[int | str, int]
"""A head: "3.5", or a layer's number or name and the number of the head."""


@dataclass(frozen=True)
class LayerMaps:
    """The maps of a layer.

    Attributes:
        name: of the layer; its number where it has none.
        maps: the weights or bin means of each head, [H, rows, columns].
        lengths: how many queries and keys the rows and columns stand for; None over calls of different lengths.
        own_keys: whether queries and keys are tokens of one text.
    """

    name: str
    maps: NDArray[np.float64]
    lengths: tuple[int, int] | None
    own_keys: bool = True

    @property
    def sizes(self) -> tuple[int, int]:
        """The positions along both axes: queries and keys, or bins where their numbers are not known."""
        return self.lengths or (self.maps.shape[1], self.maps.shape[2])


def maps_of(name: str, source: object) -> tuple[list[LayerMaps], Sequence[str] | None]:
    """Return the maps of each layer, and the texts of the tokens if they are known.

    Raises:
        TypeError: the source has another type, or entries that are not real numbers.
        ValueError: a layer has no map, an entry does not have three axes or is negative, or there is no head.
    """
    tokens: Sequence[str] | None = None
    if isinstance(source, SheetFigures):
        source, tokens = list(source.weights), source.tokens
    if isinstance(source, (Tensor, np.ndarray)):
        source = [*as_weights(name, source, "[layers, H, Q, K]", 4)]
    if isinstance(source, Sequence):
        arrays = [as_weights(f"{name}[{n}]", layer, "[H, Q, K]", 3) for n, layer in enumerate(source)]
        layers = [LayerMaps(str(n), maps, (maps.shape[1], maps.shape[2])) for n, maps in enumerate(arrays)]
    else:
        layers, tokens = _observed_maps(name, source)
    if not layers or not any(len(layer.maps) for layer in layers):
        raise ValueError(f"{name}: expected at least 1 {'head' if layers else 'layer'}, got none")
    return layers, tokens


def stats_of(name: str, observed: object) -> HeadStats:
    """Return the statistics of a recording, or those that are given.

    Raises:
        TypeError: it is neither.
    """
    stats = observed if isinstance(observed, HeadStats) else getattr(observed, "stats", None)
    if not isinstance(stats, HeadStats):
        raise TypeError(f"{name}: got {kind(observed)}, expected an entry for each layer, HeadStats, or a recording")
    return stats


def _observed_maps(name: str, observed: Any) -> tuple[list[LayerMaps], Sequence[str] | None]:
    """Return the bin means of each layer, without bins that have no query or no key."""
    layers: list[LayerMaps] = []
    about = getattr(observed, "about", None)
    kinds: Mapping[str, str] = getattr(about, "kinds", {})
    for layer, part in stats_of(name, observed).parts.items():
        if part.map is None:
            raise ValueError(f"{name}: {layer} has no map; observe with Observe(map=64)")
        rows, columns = standing(part.map.bins, part.lengths)
        maps = as_array(layer, part.map.mean, "[H, n, n]", 3)[:, rows][:, :, columns]
        layers.append(LayerMaps(layer, maps, part.lengths, kinds.get(layer, "self") == "self"))
    return layers, getattr(about, "texts", None)


def tokens_of(layer: LayerMaps, tokens: Sequence[str] | None) -> Sequence[str] | None:
    """Return the tokens if they are the keys of a layer, each in a bin of its own."""
    if tokens is None or layer.lengths is None or not layer.own_keys:
        return None
    return tokens if len(tokens) == layer.maps.shape[2] == layer.lengths[1] else None


def find_heads(heads: Sequence[Head], layers: Sequence[LayerMaps]) -> list[tuple[int, int]]:
    """Return the layer and head of each entry.

    Raises:
        TypeError: heads is not a sequence, or an entry has another form.
        ValueError: there are none, or a head does not exist.
    """
    example = 'as "3.5" or (3, 5)'
    check_type("heads", heads, Sequence, f"a list of heads, {example}")
    if isinstance(heads, str):
        raise TypeError(f"heads: got {heads!r}, expected a list of heads, {example}")
    if not heads:
        raise ValueError(f"heads: got none, expected at least one, {example}")
    names = [layer.name for layer in layers]
    places: list[tuple[int, int]] = []
    for number, each in enumerate(heads):
        match each:
            case str():
                layer, _, head = each.rpartition(".")
                layer = int(layer) if layer.isdecimal() and layer not in names else layer
                head = int(head) if head.isdecimal() else None
            case [layer, head]:
                head = as_whole(head)
                layer = layer if isinstance(layer, str) else as_whole(layer)
                if head is None or layer is None:
                    raise TypeError(f"heads[{number}]: got {each!r}, expected a layer and a head, {example}")
            case _:
                raise TypeError(f"heads[{number}]: got {kind(each)}, expected a layer and a head, {example}")
        at = names.index(layer) if layer in names else layer
        if not (
            isinstance(at, int) and 0 <= at < len(layers) and head is not None and 0 <= head < len(layers[at].maps)
        ):
            counts = {len(layer.maps) for layer in layers}
            each_has = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
            exist = f"layers 0 to {len(layers) - 1} with {each_has} heads each"
            raise ValueError(f"heads[{number}]: got {each!r}, which does not exist; expected {exist}, {example}")
        places.append((at, head))
    return places


__all__ = ["Head", "LayerMaps", "ObservedModel", "Weights", "find_heads", "maps_of", "stats_of", "tokens_of"]

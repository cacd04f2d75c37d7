"""The origin of statistics: the model, its configuration and the heads of each layer; and which may be combined."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headscope._support.text import visible
from headscope._support.user_line import user_stacklevel

PROCESS = "process"
_REMEDY = "use a separate recording for each, or rename the layers: stats.named(...)"
_NO_ORIGIN = "to merge without this check, remove the origin of each: stats.named(*stats.layers)"


@dataclass(frozen=True)
class Part:
    """The heads of a layer that a recording holds, if not all.

    Attributes:
        of: the number of heads of the layer in the whole model.
        heads: the first of the recorded heads, and the one after the last; None = unknown.
        holder: the holder of the heads, if ``heads`` is unknown: a process of a group, or one module object.

    Examples:
        >>> from headscope.watching import Part
        >>> part = Part(of=8, heads=(0, 4))  # as in recording.about.part under tensor parallelism
        >>> str(part)
        'heads 0 to 3 of 8'
    """

    of: int
    heads: tuple[int, int] | None = None
    holder: str = ""

    def __str__(self) -> str:
        if self.heads is not None:
            return f"heads {self.heads[0]} to {self.heads[1] - 1} of {self.of}"
        return f"an unknown part of {self.of} heads (held by {self.holder or 'an unknown process'})"


@dataclass(frozen=True)
class LayerOrigin:
    """The origin of the statistics of one layer.

    Attributes:
        widths: of each head of q and k, and of v (0 = there was no v).
        part: the heads that were recorded; None = all.
    """

    widths: tuple[int, int]
    part: Part | None = None


@dataclass(frozen=True)
class Origin:
    """The origin of statistics.

    Attributes:
        model: qualified name of the model's class; empty = unknown, as in a recording of an earlier version.
        config: digest of the structure in the model's configuration; empty = it does not have a configuration.
        layers: layer -> its head widths, and the part of its heads.

    Examples:
        >>> import torch
        >>> from headscope import watch
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> with watch(model) as recording:
        ...     output = model(torch.zeros(1, 4, 8))
        >>> str(recording.about.origin), recording.about.origin.part
        ('TransformerEncoderLayer (without a configuration)', {})
    """

    model: str
    config: str = ""
    layers: Mapping[str, LayerOrigin] = field(default_factory=dict[str, LayerOrigin])

    @property
    def part(self) -> dict[str, Part]:
        """Layer -> the recorded part of its heads; layers with all heads are not listed."""
        return {name: layer.part for name, layer in self.layers.items() if layer.part is not None}

    def of_layer(self, name: str) -> Origin:
        """Return the origin of one layer."""
        return Origin(self.model, self.config, {name: self.layers[name]} if name in self.layers else {})

    def __str__(self) -> str:
        return visible(f"{self.model} ({f'configuration {self.config}' if self.config else 'without a configuration'})")


UNKNOWN = Origin("")
"""The origin of a recording that does not state one."""


def joined(origins: Sequence[Origin | None]) -> Origin | None:
    """Return the origin of merged statistics, from the origins of each; None = not of a recording.

    Raises:
        ValueError: they are of different models, or of different heads of a layer.

    Warns:
        UserWarning: some state their origin and some do not, or a recording does not.
    """
    if all(origin is None for origin in origins):
        return None
    known = [origin for origin in origins if origin is not None and origin.model]
    layers: dict[str, LayerOrigin] = {}
    for origin in known:
        if (origin.model, origin.config) != (known[0].model, known[0].config):
            raise ValueError(f"merge: different models; expected {known[0]}, got {origin}; {_REMEDY}")
        for name, layer in origin.layers.items():
            _check_layer(name, layers.setdefault(name, layer), layer)
    silent = len(origins) - len(known)
    if silent == 0:
        return Origin(known[0].model, known[0].config, layers)
    if len(origins) > 1:
        warnings.warn(
            f"merge: {silent} of {len(origins)} do not state their model and heads, as recordings of earlier "
            f"versions; headscope cannot check that they belong together. Record them again; {_NO_ORIGIN}",
            UserWarning,
            stacklevel=user_stacklevel(),
        )
    return UNKNOWN


def _check_layer(name: str, one: LayerOrigin, other: LayerOrigin) -> None:
    """Raise ValueError if the parts of a layer in two recordings cannot be merged."""
    if one.widths != other.widths:
        expected, got = map(_widths, (one, other))
        raise ValueError(f"layer {name}: heads of different width; expected {expected}, got {got}; {_REMEDY}")
    if one.part != other.part or (one.part is not None and one.part.heads is None and not one.part.holder):
        raise ValueError(
            f"layer {name}: different parts of its heads, or unknown ones; expected {_part(one)}, got "
            f"{_part(other)}; merge recordings of one part only. If both are of the same heads, remove their "
            "origin: stats.named(*stats.layers)"
        )


def check_comparable(old: Origin | None, new: Origin | None, heads: Mapping[str, tuple[int, int]]) -> None:
    """Raise unless the heads of two recordings correspond.

    Args:
        old, new: the two origins; nothing is checked if one of them is unknown.
        heads: layer of both -> the number of heads of either side.

    Raises:
        ValueError: other architecture, other layers, other heads.
    """
    if old is None or new is None or not old.model or not new.model:
        return
    remedy = "compare recordings of one architecture, or remove their origin: stats.named(*stats.layers)"
    if old.config != new.config or (not old.config and old.model != new.model):
        raise ValueError(f"after: has a different architecture from before; expected {old}, got {new}; {remedy}")
    for name, (ours, theirs) in heads.items():
        one, other = old.layers.get(name), new.layers.get(name)
        parts = [None if each is None else each.part for each in (one, other)]
        if ours != theirs or _clash(*parts):
            expected, got = (
                f"{count} heads" if part is None else str(part)
                for part, count in zip(parts, (ours, theirs), strict=True)
            )
            raise ValueError(
                f"after: layer {name} has different heads from before; expected {expected}, got {got}; {remedy}"
            )
        if one is not None and other is not None and one.widths != other.widths:
            expected, got = map(_widths, (one, other))
            raise ValueError(
                f"after: layer {name} has heads of a different width from before; expected {expected}, got {got}; "
                f"{remedy}"
            )


def notes(old: Origin | None, new: Origin | None) -> Iterator[str]:
    """Return what a comparison could not check."""
    sides = [("Before", old), ("After", new)]
    silent = [side for side, origin in sides if origin is None or not origin.model]
    if len(silent) == 2 and old is None and new is None:
        return
    for side in silent:
        yield f"{side} does not state its model and heads, so whether the two belong together is unchecked"
    if not silent and old is not None and new is not None:
        unknown = [name for name, part in old.part.items() if part.heads is None and part != new.part.get(name)]
        if unknown:
            yield f"Which heads either side holds is unknown in {len(unknown)} layers, {unknown[0]} among them"


def _clash(one: Part | None, other: Part | None) -> bool:
    """Return whether two parts are certainly, or as far as known, of different heads."""
    if one is None or other is None:
        return one != other
    if one.of != other.of or (one.heads is None) != (other.heads is None):
        return True
    by_process = all(part.holder.startswith(PROCESS) for part in (one, other))
    return one.heads != other.heads or (by_process and one.holder != other.holder)


def _part(layer: LayerOrigin) -> str:
    return "all heads" if layer.part is None else str(layer.part)


def _widths(layer: LayerOrigin) -> str:
    return f"{layer.widths[0]} (q, k) and {layer.widths[1]} (v)"


for _class in (Part, Origin):
    _class.__module__ = "headscope.watching"  # their public path

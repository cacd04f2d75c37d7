"""q and k for the page of ``headscope watch``, so that it computes exact rows and explains a weight.

Without --keep-qk no forward pass retains q and k: those of all windows would not fit the memory. Which heads and
windows a page should hold is known once all windows are merged, so these windows are read again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headscope.cli._shared.console import warnings_as_notes
from headscope.cli._shared.model_loading import quiet_transformers

if TYPE_CHECKING:
    from torch import Tensor

    from headscope.cli._shared.model_loading import Loaded
    from headscope.cli._shared.windows import Input
    from headscope.stats import HeadStats, LayerStats
    from headscope.watching import Recording

MOST_WINDOWS = 4
"""How many windows are read again; the page holds those of them that fit."""

MOST_QK = 2**30
"""The most bytes of q and k in float32 that are retained at once."""

WIDTH = 128  # of a head, if the model does not state it
SAME = 1e-3  # the largest difference of a weight between two passes over the same window


def with_page_weights(recording: Recording, loaded: Loaded, model_input: Input, layers: Collection[str]) -> Recording:
    """Return the recording with q and k of the heads and windows that its page should hold.

    A window is left out if q and k have no room, or if its weights are others when it is read again.

    Args:
        recording: of all windows.
        loaded: the model.
        model_input: what it read.
        layers: the patterns of the modules that were recorded; empty = all.
    """
    from headscope.report.viewer import worth_keeping
    from headscope.stats import HeadStats
    from headscope.watching import Recording

    stats = recording.stats
    names = list(stats.parts)
    places, windows = worth_keeping(recording)
    heads: dict[str, list[int]] = {}
    for layer, head in places:
        heads.setdefault(names[layer], []).append(head)
    are_modules = {name for name, _ in loaded.model.named_modules()}.issuperset(heads)
    selected, observed = (heads, heads) if are_modules else (layers, names)
    tiles: dict[str, dict[int, Any]] = {name: {} for name in names}
    room = MOST_QK
    for window in windows[:MOST_WINDOWS]:
        room -= _size(stats, observed, model_input.parts[window])
        found = _read_again(loaded, model_input.parts[window], selected) if heads and room >= 0 else {}
        if not found or not all(_agrees(stats.parts[name], found.get(name), heads[name], window) for name in heads):
            break
        for name in heads:
            tiles[name][window] = found[name]
    parts = {name: replace(part, tiles=tiles[name]) for name, part in stats.parts.items()}
    return Recording(HeadStats(parts, stats.origin), recording.about)


def _size(stats: HeadStats, layers: Collection[str], inputs: Tensor) -> int:
    """Return the bytes of q and k of some layers."""
    origin = {} if stats.origin is None else stats.origin.layers
    size = 0
    for name in layers:
        part = stats.parts[name]
        lengths = part.lengths or (inputs.shape[-1], inputs.shape[-1])
        width = origin[name].widths[0] if name in origin else WIDTH
        size += 4 * len(inputs) * part.heads * sum(lengths) * width
    return size


def _read_again(loaded: Loaded, inputs: Tensor, layers: Collection[str]) -> Mapping[str, Any]:
    """Return access to the weights of each layer on these inputs; of none if the memory does not suffice."""
    import torch

    import headscope

    what = headscope.Observe(keep_qk=True)
    arguments: dict[str, Any] = {"layers": list(layers) or None}
    if loaded.paired:
        arguments["tokens"] = "inputs"
    try:
        with (
            quiet_transformers(),
            torch.inference_mode(),
            warnings_as_notes("watch"),
            headscope.watch(loaded.model, what=what, **arguments) as again,
        ):
            loaded.run(inputs)
    except torch.OutOfMemoryError:
        return {}
    return {name: part.last_tiles for name, part in again.stats.parts.items() if part.last_tiles is not None}


def _agrees(part: LayerStats, tiles: Any, heads: Sequence[int], window: int) -> bool:
    """Return whether the largest weights of heads in a window are the same in the second pass."""
    if tiles is None:
        return False
    if part.edges is None:
        return True
    for head in heads:
        for edge in part.edges.of(head):
            if edge.run == window and edge.b == 0:
                weights = tiles(edge.i, edge.i + 1, edge.j, edge.j + 1).flatten(0, -4)[0, head]
                if not abs(float(weights) - edge.p) <= SAME:
                    return False
    return True

"""The heads of ``--weights``: whether they exist, under the full names of their layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headscope._support.text import visible
from headscope.cli._shared.console import few
from headscope.cli._shared.first_pass import observe_first
from headscope.cli._shared.mistakes import Mistake
from headscope.cli._shared.watch_options import WatchOptions

if TYPE_CHECKING:
    from headscope.cli._shared.model_loading import Loaded

NAMED = 6  # layers in a message
TOO_LARGE = "; observe fewer rows"  # what the remedy in the library's message starts with


def find_chosen_heads(loaded: Loaded, part: Any, options: WatchOptions) -> dict[str, tuple[int, ...]]:
    """Return layer -> the heads of --weights, ascending, after a pass over the first tokens that lists the layers.

    A layer is a name or pattern, as of --layers, or a number, counted from 0 in the order of the layers.

    Raises:
        Mistake: a layer or a head does not exist.
    """
    from headscope._intercept import match_modules

    if not options.heads:
        return {}
    layers = {name: part.heads for name, part in observe_first(loaded, part, options).parts.items()}
    names = [*layers]
    modules: dict[str, Any] = dict.fromkeys(names)
    chosen: dict[str, set[int]] = {}
    for pattern, heads in options.heads.items():
        try:
            matches = match_modules(modules, pattern, "weights")
        except ValueError:
            matches = [names[int(pattern)]] if pattern.isdecimal() and int(pattern) < len(names) else []
        if not matches:
            raise Mistake(
                f"--weights: there is no layer {visible(pattern)}; expected 0 to {len(names) - 1}, or one of "
                f"{few(names, NAMED)}"
            )
        for name in matches:
            if max(heads) >= layers[name]:
                raise Mistake(
                    f"--weights: layer {visible(name)} has no head {max(heads)}; expected 0 to {layers[name] - 1}"
                )
            chosen.setdefault(name, set()).update(heads)
    return {name: tuple(sorted(chosen[name])) for name in names if name in chosen}

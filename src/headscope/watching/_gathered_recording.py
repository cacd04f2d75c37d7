"""Recordings of several ranks as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from headscope._support.ranks import Ranks
from headscope.stats import (
    Gathering,
    HeadStats,
    check_equal,
    check_statistics,
    describe_statistics,
    join_statistics,
)
from headscope.watching import _recording_file
from headscope.watching._about import About
from headscope.watching._monitor import Alarm
from headscope.watching._verify import Verified

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Recorded = tuple[HeadStats, About, tuple[Alarm, ...]]
"""The statistics of a recording, its origin and options, and its alarms."""


def gathered(read: Callable[[], Recorded], group: ProcessGroup | None, to: int | None, axis: str) -> Recorded | None:
    """Return the recordings of all ranks as one; ``read`` returns that of this rank. See ``Recording.gather``."""
    gathering = Gathering("gather", Ranks(group), to, axis)

    def describe() -> tuple[dict[str, Any], bytes]:
        stats, about, alarms = read()
        stated = {"options": {**about.options}, "kinds": {**about.kinds}, "passes": [about.forwards, about.ran]}
        described = {**describe_statistics(stats.parts, stats.origin), "about": stated}
        return described, _recording_file.encode(stats, about, alarms)

    contents = gathering.collect(describe, _check)
    if contents is None:
        return None
    names = gathering.ranks.names
    several = [_recording_file.decode(f"rank {n}", content) for n, content in zip(names, contents, strict=True)]
    stats = HeadStats(*join_statistics(axis, [(each.parts, each.origin) for each, _, _ in several]))
    alarms = dict.fromkeys(alarm for _, _, alarms in several for alarm in alarms)
    return stats, _join_abouts([about for _, about, _ in several], axis), tuple(alarms)


def _check(gathering: Gathering, several: list[dict[str, Any]]) -> None:
    """Raise ValueError if recordings do not belong together."""
    what, names, abouts = gathering.what, gathering.ranks.names, [each["about"] for each in several]
    for option in abouts[0]["options"]:
        check_equal(what, names, option, [each["options"].get(option) for each in abouts])
    check_statistics(gathering, several)
    if gathering.axis != "rows":
        passes = [f"{seen} of {ran}" for seen, ran in (each["passes"] for each in abouts)]
        check_equal(what, names, "the number of observed forward passes", passes)
    if gathering.axis != "layers":
        for layer in abouts[0]["kinds"]:
            check_equal(what, names, "kinds", [each["kinds"].get(layer) for each in abouts], layer=layer)


def _join_abouts(abouts: Sequence[About], axis: str) -> About:
    first, rows = abouts[0], axis == "rows"
    known = all(about.run_texts for about in abouts)  # else they would be those of other passes
    verified: dict[str, Verified] = {}
    for about in abouts:
        for layer, each in about.verified.items():
            verified[layer] = verified[layer].merge(each) if layer in verified else each
    return replace(
        first,
        kinds={layer: kind for about in abouts for layer, kind in about.kinds.items()},
        texts=first.texts if all(about.texts == first.texts for about in abouts) else None,
        forwards=sum(about.forwards for about in abouts) if rows else first.forwards,
        ran=sum(about.ran for about in abouts) if rows else first.ran,
        verified=verified,
        other_layers={layer: what for about in abouts for layer, what in about.other_layers.items()},
        run_texts=tuple(text for about in abouts if known for text in about.run_texts) if rows else first.run_texts,
    )

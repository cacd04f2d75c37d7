"""Some processes that gather statistics; started by a test.

python gather_ranks.py RANK WORLD STORE

Each prints, as JSON: case -> what it found, or the error. The last case ends the last process.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from headscope import HeadStats, Observe, Segments, observe
from headscope._support import ranks
from headscope.stats import _statistics_file, merge
from headscope.stats._origin import LayerOrigin, Origin, Part

HEADS, WIDTH, LENGTH = 4, 6, 13
TOKENS = torch.arange(LENGTH) % 5
EVERYTHING = Observe(
    map=4, edges=5, top=3, windows=(2, 5), tokens=TOKENS, keep_rows=True, weights=(0, 3), received_max=True,
    segments=Segments(["a", "b"], (TOKENS > 2).long()),
)  # fmt: skip


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of one run."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, HEADS, LENGTH, WIDTH, generator=generator).unbind()
    return q, k, v


def rows_of(seed: int, what: Observe = EVERYTHING) -> HeadStats:
    """The statistics of one run."""
    return observe(*inputs(seed), what=what)


def heads_of(first: int, stop: int, of: int = HEADS, *, seed: int = 0, **options: Any) -> HeadStats:
    """The statistics of some heads of one run, as a recording states them."""
    q, k, v = (x[:, first:stop] for x in inputs(seed))
    stats = observe(q, k, v, what=Observe(**{"map": 4, "edges": 5, "top": 3, "received_max": True} | options))
    part = None if stop - first == of else Part(of, (first, stop))
    return HeadStats(stats.parts, Origin("Model", "", {"0": LayerOrigin((WIDTH, WIDTH), part)}))


def same(found: HeadStats | None, expected: HeadStats) -> str:
    """Return whether two statistics are the same to the bit, and the origin of the first."""
    if found is None:
        return "None"
    equal = _statistics_file.encode(found.parts, None, "") == _statistics_file.encode(expected.parts, None, "")
    return f"{'equal' if equal else 'different'}, part {found.origin.part if found.origin else None}"


def near(found: HeadStats | None, expected: HeadStats) -> dict[str, Any]:
    """Return how far the sums of two statistics are from each other, and whether what is exact is the same."""
    assert found is not None
    a, b = found.parts["0"], expected.parts["0"]
    assert a.received is not None
    assert b.received is not None
    assert a.eligible is not None
    assert b.eligible is not None
    exact = [(a.rows, b.rows), (a.eligible, b.eligible)]
    sums = [(a.received, b.received)]
    for name in a.moments:
        ours, theirs = a.moments[name], b.moments[name]
        exact += [(getattr(ours, each), getattr(theirs, each)) for each in ("count", "histogram", "min", "max")]
        sums += [(ours.mean, theirs.mean), (ours.M2, theirs.M2)]
    apart = [float(((x - y).abs() / y.abs().clamp_min(1)).nan_to_num(0).max()) for x, y in sums]
    equal = all(torch.equal(x.nan_to_num(-7), y.nan_to_num(-7)) for x, y in exact)
    return {"exact": equal, "apart": max(apart)}


def gathers(rank: int, world: int) -> dict[str, Callable[[], Any]]:
    """What the ranks gather, by name."""
    merged = merge(*(rows_of(n) for n in range(world)))
    step = HEADS // world
    mine = (rank * step, rank * step + step)
    reverse = (HEADS - step - mine[0], HEADS - mine[0])
    whole = heads_of(0, HEADS)
    together = observe(*(torch.cat(x) for x in zip(*(inputs(n) for n in range(world)), strict=True)))
    layers = [heads_of(0, HEADS, seed=n).parts["0"] for n in range(world)]
    origin = LayerOrigin((WIDTH, WIDTH))

    def stage(n: int) -> HeadStats:
        return HeadStats({f"h.{n}": layers[n]}, Origin("Model", "", {f"h.{n}": origin}))

    pair = dist.new_group([world - 2, world - 1])
    inside = dist.get_rank(pair) >= 0
    return {
        "rows": lambda: same(rows_of(rank).gather(), merged),
        "rows, on the last": lambda: same(rows_of(rank).gather(to=world - 1), merged),
        "rows, on all": lambda: same(rows_of(rank).gather(to=None), merged),
        "rows, in a pair": lambda: (
            same(rows_of(rank).gather(pair), merge(rows_of(world - 2), rows_of(world - 1)))
            if inside
            else "outside"
        ),
        "rows, of one process": lambda: near(rows_of(rank, Observe()).gather(to=None), together),
        "heads": lambda: same(heads_of(*mine).gather(axis="heads"), whole),
        "heads, from the last": lambda: same(heads_of(*reverse).gather(axis="heads", to=None), whole),
        "heads, rows of a part": lambda: same(heads_of(0, 2, seed=rank).gather(to=None), merge(
            *(heads_of(0, 2, seed=n) for n in range(world)))),
        "heads, on each": lambda: same(whole.gather(axis="heads", to=None), whole),
        "layers": lambda: [
            same(found, merge(*map(stage, range(world)))) + f", {found.layers}"
            for found in [stage(rank).gather(axis="layers", to=None)]
            if found is not None
        ],
    }  # fmt: skip


def refusals(rank: int, world: int) -> dict[str, Callable[[], Any]]:
    """What the ranks refuse to gather, by name."""
    last, step = rank == world - 1, HEADS // world
    mine = (rank * step, rank * step + step)

    def broken() -> HeadStats:
        stats = rows_of(0)
        return HeadStats({"0": object()}) if last else stats  # pyright: ignore[reportArgumentType]

    return {
        "option map": lambda: rows_of(rank, Observe(map=8 if last else 4)).gather(),
        "option edges": lambda: rows_of(rank, Observe(edges=2 if last else 0)).gather(),
        "option received": lambda: rows_of(rank, Observe(received=not last)).gather(),
        "option windows": lambda: rows_of(rank, Observe(windows=(3,) if last else (2,))).gather(),
        "option segments": lambda: rows_of(
            rank, Observe(segments=Segments(["a", "c" if last else "b"], TOKENS // 3))
        ).gather(),
        "option weights": lambda: rows_of(rank, Observe(weights=(1,) if last else (0,))).gather(),
        "option keep_rows": lambda: rows_of(rank, Observe(keep_rows=last)).gather(),
        "option first": lambda: rows_of(rank, Observe(first=2 if last else 1)).gather(),
        "axis": lambda: rows_of(rank).gather(axis="heads" if last else "rows"),
        "axis unknown": lambda: rows_of(rank).gather(axis="keys" if last else "rows"),  # pyright: ignore[reportArgumentType]
        "to": lambda: rows_of(rank).gather(to=1 if last else 0),
        "to unknown": lambda: rows_of(rank).gather(to=world if last else 0),
        "to of a kind": lambda: rows_of(rank).gather(to="0"),  # pyright: ignore[reportArgumentType]
        "group": lambda: rows_of(rank).gather("all"),  # pyright: ignore[reportArgumentType]
        "damaged": lambda: broken().gather(),
        "missing layer": lambda: rows_of(rank).named("b" if last else "a").gather(),
        "number of heads": lambda: observe(*(x[:, : 2 if last else 4] for x in inputs(0))).gather(),
        "parts as rows": lambda: heads_of(*mine).gather(),
        "models": lambda: (heads_of(0, 4) if last else rows_of(0, Observe())).gather(),
        "heads unknown": lambda: rows_of(rank).gather(axis="heads"),
        "heads twice": lambda: heads_of(0, 2).gather(axis="heads"),
        "heads missing": lambda: heads_of(*mine, of=HEADS + 1).gather(axis="heads"),
        "heads of other totals": lambda: heads_of(*mine, of=HEADS + last).gather(axis="heads"),
        "heads of other rows": lambda: heads_of(*mine, seed=rank, rows=5 if last else 7).gather(axis="heads"),
        "one whole": lambda: (heads_of(0, 4) if last else heads_of(0, 2)).gather(axis="heads"),
        "layer twice": lambda: heads_of(0, 4).gather(axis="layers"),
        "layer in part": lambda: heads_of(*mine).gather(axis="layers"),
    }


def attempt(action: Callable[[], Any]) -> Any:
    """Return the result of an action, or its error."""
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def ends(rank: int, world: int, results: dict[str, Any]) -> dict[str, Any]:
    """Let the last rank end while the ranks send; then gather without it."""
    store: Any = distributed_c10d._get_default_store()
    stats = rows_of(rank, Observe())
    store.set_timeout(timedelta(seconds=ranks._LAST_WORDS))
    if rank == world - 1:

        def end(*arguments: Any) -> None:
            print(json.dumps(results), flush=True)
            os._exit(0)

        ranks.Ranks._collect = end  # pyright: ignore[reportAttributeAccessIssue]
    found = {"while it sends": attempt(lambda: repr(stats.gather(to=None)))}
    start = time.monotonic()
    found["before"] = attempt(lambda: repr(stats.gather()))
    return {**found, "seconds": time.monotonic() - start}


def main(rank: int, world: int, store: str) -> None:
    """Gather everything."""
    torch.set_num_threads(1)
    ranks._LAST_WORDS = 1.0 if world == 2 else 3.0  # the ranks of a test have little else to do
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    results: dict[str, Any] = {
        "gathers": {name: attempt(action) for name, action in gathers(rank, world).items()},
        "refusals": {name: attempt(action) for name, action in refusals(rank, world).items()},
    }
    results["ends"] = ends(rank, world, results)
    print(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # the group has failed: its end would wait


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])

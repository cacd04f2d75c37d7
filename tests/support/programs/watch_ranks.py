"""Some processes that watch a model together; started by a test.

python watch_ranks.py RANK WORLD STORE FOLDER

Each prints, as JSON: case -> what it found, or the error. The weights are the same in all processes, and not trained.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sharded_recordings import SIZE, Attention  # pyright: ignore[reportMissingImports]  # a program beside this one
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from headscope import History, MultiHeadAttention, Observe, Recording, Segments, watch
from headscope._support import ranks
from headscope.stats import merge
from headscope.watching import Limits, _across_ranks

LENGTH, STEPS = 7, 3
Values = dict[str, float]


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x)


class Stack(nn.Module):
    """A model of two layers, of which a call may leave the second out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, layers: int = 2) -> Tensor:
        for layer in self.layers[:layers]:
            x = layer(x)
        return x


def make(scale: float = 1.0) -> Stack:
    """The same model in every process."""
    torch.manual_seed(0)
    model = Stack().double()
    for name, each in model.named_parameters():
        each.data *= scale if name.endswith(("q.weight", "k.weight")) else 1.0
    return model


def rows(rank: int, step: int) -> Tensor:
    """The input of a rank in a step; the last rank has a longer one."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(1 + rank % 2, LENGTH, SIZE, dtype=torch.float64, generator=generator)


def expected(
    world: int, step: int, what: Observe | None = None, layers: Callable[[int], int] = lambda rank: 2
) -> Values:
    """The values of a step of one process that runs the rows of all ranks."""
    model, recordings = make(), list[Recording]()
    for rank in range(world):
        with torch.no_grad(), watch(model, what=what) as recording:
            model(rows(rank, step), layers(rank))
        recordings.append(recording)
    stats = merge(*(each.stats for each in recordings))
    values = stats.flat()
    for number, name in enumerate(stats.layers):
        for head in range(stats.parts[name].heads):
            values[f"attn/L{number:02d}/H{head:02d}/max_logit_max"] = stats[name, head, "max_logit"].max
    return values


def apart(found: list[tuple[int, Values]], world: int, **options: Any) -> dict[str, Any]:
    """Return the steps, whether the names are those of one process, and how far the values are from those."""
    worst, names = 0.0, True
    for step, values in found:
        one = expected(world, step, **options)
        names &= one.keys() == values.keys()
        worst = max(worst, *(abs(values[name] - one[name]) / max(1, abs(one[name])) for name in one if name in values))
    return {"steps": [step for step, _ in found], "names": names, "apart": worst}


class Log:
    """Receives the values of steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, Values]] = []

    def __call__(self, values: Values, step: int) -> None:
        self.steps.append((step, values))


class Late:
    """An event of values that take a while to arrive from a device."""

    def synchronize(self) -> None:
        time.sleep(0.02)


def counted(action: Callable[[], Any]) -> tuple[int, Any]:
    """Return how often an action calls all_reduce, and its result."""
    calls, original = [0], dist.all_reduce

    def call(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        return original(*arguments, **options)

    dist.all_reduce = call
    try:
        result = action()
    finally:
        dist.all_reduce = original
    return calls[0], result


def run(model: nn.Module, rank: int, world: int, **options: Any) -> dict[str, Any]:
    """Watch some forward and backward passes; return the values, and what the recording states."""
    log, what = Log(), options.get("what")
    with watch(model, log=log, **options) as recording:
        for step in range(STEPS):
            model(rows(rank, step)).square().sum().backward()
    found = apart(log.steps, world, what=what)
    return {**found, "layers": recording.layers, "model": recording.about.model, "forwards": recording.forwards}


def data_parallel(rank: int, world: int, folder: Path) -> dict[str, Callable[[], Any]]:
    """Models of which each rank runs its own rows."""
    mesh = init_device_mesh("cpu", (world,))

    def sharded() -> nn.Module:
        model = make()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def checkpointed() -> nn.Module:
        model = make()
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
        return DistributedDataParallel(model)

    segments = Observe(segments=Segments(["a", "b"], [0] * 3 + [1] * (LENGTH - 3)))

    def every() -> Any:
        model, log = DistributedDataParallel(make()), Log()
        with watch(model, log=log, every=2):
            calls = [counted(lambda step=step: model(rows(rank, step)))[0] for step in range(4)]
        return {"calls": calls, **apart(log.steps, world)}

    def history() -> Any:
        model, path = DistributedDataParallel(make()), folder / "history.safetensors"
        with watch(model, log=History(path)):
            for step in range(STEPS):
                model(rows(rank, step))
        dist.barrier()
        read = History.load(path)
        one = [expected(world, step)["attn/L01/H02/entropy"] for step in range(STEPS)]
        return [list(read.steps), bool(torch.allclose(read["entropy"][:, 1, 2].double(), torch.tensor(one).double()))]

    def alarms() -> Any:
        model = DistributedDataParallel(make())
        with (
            warnings.catch_warnings(record=True, action="always") as caught,
            watch(model, alarms=Limits()) as recording,
        ):
            for scale in (1, 1, 300):  # of the last rank alone
                model(rows(rank, 0) * (scale if rank == world - 1 else 1))
        return [
            sorted({alarm.what for alarm in recording.alarms}),
            {each.category.__name__ for each in caught} != set(),
        ]

    def device() -> Any:
        original = _across_ranks.to_host
        _across_ranks.to_host = lambda values: (values, Late())
        try:
            return run(make(), rank, world, group=dist.group.WORLD)
        finally:
            _across_ranks.to_host = original

    def root() -> Any:
        model = fully_shard(MultiHeadAttention(SIZE, 4).double(), mesh=mesh)
        with watch(model) as recording, torch.no_grad():
            model(rows(rank, 0))
        return [recording.layers, recording.about.model, str(recording.about.origin)]

    def alone() -> Any:
        log, model = Log(), DistributedDataParallel(make())
        with watch(model, log=log, group=None):
            model(rows(rank, 0))
        return len(log.steps)

    def gathered() -> Any:
        model = DistributedDataParallel(make())
        with watch(model, what=Observe(map=2), verify=1) as recording:
            for step in range(2):
                model(rows(rank, step))
        found = recording.gather(to=None)
        assert found is not None
        whole = merge(*(recorded(make(), [rows(each, step) for step in range(2)]).stats for each in range(world)))
        return {
            "rows": [int(each.rows[0]) for each in found.stats.parts.values()],
            "same": found.stats.flat() == whole.flat(),
            "about": [found.forwards, found.about.ran, found.about.verified["layers.0.attention"].rows],
            "file": Recording.load(found.save(folder / f"{rank}.safetensors")).forwards,
        }

    return {
        "ddp": lambda: run(DistributedDataParallel(make()), rank, world),
        "ddp, segments": lambda: run(DistributedDataParallel(make()), rank, world, what=segments),
        "fsdp": lambda: run(sharded(), rank, world),
        "checkpoints": lambda: run(checkpointed(), rank, world),
        "every": every,
        "history": history,
        "alarms": alarms,
        "alone": alone,
        "device": device,
        "root": root,
        "group": lambda: run(make(), rank, world, group=dist.group.WORLD),
        "gathered": gathered,
    }


def other_layers(rank: int, world: int) -> Any:
    """The last rank runs a layer more, from the second step on."""
    log, model = Log(), make()
    extra = lambda step: lambda each: 2 if each == world - 1 and step else 1  # noqa: E731
    with watch(model, log=log, group=dist.group.WORLD), torch.no_grad():
        for step in range(STEPS):
            model(rows(rank, step), extra(step)(rank))
    found = [apart([each], world, layers=extra(each[0])) for each in log.steps]
    return [[each["steps"][0], each["names"], each["apart"] < 1e-12] for each in found]


def recorded(model: nn.Module, inputs: list[Tensor], **options: Any) -> Recording:
    """A recording of some forward passes."""
    with torch.no_grad(), watch(model, **options) as recording:
        for x in inputs:
            model(x)
    return recording


def heads(rank: int, world: int) -> Any:
    """Ranks that share the heads of a model log all of them, under their numbers in the whole model."""
    mesh, log, model = init_device_mesh("cpu", (world,)), Log(), make()
    columns, outputs = ColwiseParallel, RowwiseParallel
    for layer in model.layers:
        plan = {"q": columns(), "k": columns(), "v": columns(), "o": outputs()}
        parallelize_module(layer.attention, mesh, plan)  # pyright: ignore[reportArgumentType]
    with watch(model, log=log) as recording:
        for step in range(STEPS):
            model(rows(0, step))
    whole = [apart([each], 1) for each in log.steps]
    joined = recording.gather(axis="heads")
    one = recorded(make(), [rows(0, step) for step in range(STEPS)])
    values = {} if joined is None else joined.flat()
    return {
        "joined": [
            values.keys() == one.flat().keys(),
            max((abs(values[k] - v) for k, v in one.flat().items() if k in values), default=0.0),
        ],
        "joined part": None if joined is None else [dict(joined.about.part), joined.forwards],
        "names": all(each["names"] for each in whole),
        "apart": max((each["apart"] for each in whole), default=0.0),
        "steps": [step for step, _ in log.steps],
        "part": str(recording.about.part["layers.1.attention"]),
    }


def crossed(rank: int, world: int) -> Any:
    """Half of the ranks share the heads, and the others the data: all are logged and gathered."""
    mesh, log, model = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("data", "heads")), Log(), make()
    columns, outputs = ColwiseParallel, RowwiseParallel
    for layer in model.layers:
        plan = {"q": columns(), "k": columns(), "v": columns(), "o": outputs()}
        parallelize_module(layer.attention, mesh["heads"], plan)  # pyright: ignore[reportArgumentType]
        fully_shard(layer, mesh=mesh["data"])
    model = fully_shard(model, mesh=mesh["data"])
    place = mesh.get_local_rank("data")
    with watch(model, log=log) as recording:
        model(rows(place, 0))
    whole = recording.gather(mesh["heads"].get_group(), axis="heads")
    found = None if whole is None else whole.gather(mesh["data"].get_group())
    one = expected(2, 0)
    return {
        **apart(log.steps, 2),
        "gathered": found and max(abs(one[name] - value) for name, value in found.flat().items()),
        "twice": attempt(lambda: recording.gather(axis="heads")),
    }


def refusals(rank: int, world: int, folder: Path) -> dict[str, Callable[[], Any]]:
    """What a watch of several ranks refuses."""
    last = rank == world - 1
    group = dist.group.WORLD

    def passes(*, evaluates: bool) -> None:
        model = make()
        with torch.no_grad(), watch(model, log=Log(), group=group):
            for step in range(2):
                model(rows(rank, step))
                if rank == 0:
                    model.train(not evaluates)(rows(rank, step))
                    model.train()

    def silent() -> None:
        _across_ranks._OPENING = 1.0  # pyright: ignore[reportPrivateUsage]
        model = DistributedDataParallel(make())
        if not last:
            with watch(model, log=Log()):
                model(rows(rank, 0))

    def unopened() -> None:
        with watch(make(), log=History.load(folder / "history.safetensors"), group=group):
            raise AssertionError

    def opened(**options: Any) -> None:
        with watch(make(), log=Log(), group=group, **options):
            raise AssertionError

    def unrecorded() -> Any:
        context = watch(make())
        return recorded(make(), [rows(rank, 0)]).gather() if not last else context.recording.gather()

    return {
        "recordings, option rows": lambda: recorded(make(), [rows(rank, 0)], rows=3 if last else 4).gather(),
        "recordings, nothing recorded": unrecorded,
        "option rows": lambda: opened(rows=3 if last else 4),
        "option every": lambda: opened(every=2 if last else 1),
        "option map": lambda: opened(what=Observe(map=4 if last else 2)),
        "passes in other modes": lambda: passes(evaluates=True),
        "more passes": lambda: passes(evaluates=False),
        "after more passes": lambda: run(make(), rank, world, group=group)["apart"] < 1e-12,
        "file": unopened,
        "group of a kind": lambda: opened_with("all"),
        "silent": silent,
    }


def opened_with(group: Any) -> None:
    """Open a watch with a group that is none."""
    watch(make(), log=Log(), group=group)


def attempt(action: Callable[[], Any]) -> Any:
    """Return the result of an action, or its error."""
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main(rank: int, world: int, store: str, folder: Path) -> None:
    """Watch everything."""
    torch.set_num_threads(1)
    ranks._LAST_WORDS = 1.0 if world == 2 else 3.0  # the ranks of a test have little else to do
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    cases = {
        **data_parallel(rank, world, folder),
        "other layers": lambda: other_layers(rank, world),
        "heads": lambda: heads(rank, world),
        "crossed": lambda: crossed(rank, world) if world == 4 else None,
        **refusals(rank, world, folder),
    }
    print(json.dumps({name: attempt(action) for name, action in cases.items()}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))

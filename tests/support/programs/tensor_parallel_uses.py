"""What is done with a module whose heads several processes share: states, optimizers, watching; and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensor_parallel_cases import (  # pyright: ignore[reportMissingImports]  # a program beside this one
    BATCH,
    HEADS,
    LENGTH,
    WIDTH,
    Mesh,
    attempt,
    by_plan,
    difference,
    filled,
    run,
)
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from headscope import MultiHeadAttention, ablate, masks, positions, trace, watch
from headscope.cache import GrowingCache, StaticCache
from headscope.parallel import tensor_parallel

FULL = StateDictOptions(full_state_dict=True)
MODULES: dict[str, dict[str, Any]] = {
    "packed": {"sinks": True},
    "grouped": {"kv_heads": 2, "qk_norm": "rms_all", "gate": True},
    "three": {"bias": ("q", "v"), "bias_kv": True},
}


class Model(nn.Module):
    """A model of two layers that share a bias by distance."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        shared = positions.RelativeBias(HEADS, positions.T5Buckets(8, 16))
        self.layers = nn.ModuleList(filled(position_bias=shared, **options) for _ in range(2))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x, mask=masks.causal())
        return self.head(x)


def pair(mesh: Mesh, **options: Any) -> tuple[Any, Any, Tensor]:
    """Return a module split over the ranks, the whole one, and an input."""
    whole = filled(**options)
    return tensor_parallel(copy.deepcopy(whole), mesh), whole, torch.randn(BATCH, LENGTH, WIDTH)


def same_states(found: dict[str, Any], expected: dict[str, Any]) -> str:
    """Return "same" if two state dicts have the same keys and values to the bit."""
    if found.keys() != expected.keys():
        return f"other keys: {sorted(found.keys() ^ expected.keys())}"
    plain = {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in found.items()}
    differ = [name for name, x in expected.items() if not torch.equal(plain[name], x)]
    return f"other values: {differ}" if differ else "same"


# ---------------------------------------------------------------- states


def written_state(mesh: Mesh, name: str) -> str:
    module, whole, _ = pair(mesh, **MODULES[name])
    own = same_states(module.state_dict(), whole.state_dict())
    return own if own != "same" else same_states(get_model_state_dict(module, options=FULL), whole.state_dict())


def state_of_a_model(mesh: Mesh) -> str:
    whole = Model()
    model = tensor_parallel(copy.deepcopy(whole), mesh)
    return same_states(get_model_state_dict(model, options=FULL), whole.state_dict())


def loaded_state(mesh: Mesh, name: str, *, by_torch: bool) -> str:
    """Load the state of one process into a module of other values."""
    module, _, _ = pair(mesh, **MODULES[name])
    other = filled(**MODULES[name])
    if by_torch:
        set_model_state_dict(module, other.state_dict(), options=FULL)
    else:
        module.load_state_dict(other.state_dict())
    return same_states(module.state_dict(), other.state_dict())


def checkpoint(mesh: Mesh, folder: Path) -> str:
    """Save the parts of each rank, and load them in one process and in modules of other values."""
    module, whole, _ = pair(mesh, **MODULES["grouped"])
    dcp.save({"model": get_model_state_dict(module)}, checkpoint_id=folder / "saved")
    alone = {name: torch.zeros_like(x) for name, x in whole.state_dict().items()}
    dcp.load({"model": alone}, checkpoint_id=folder / "saved", no_dist=True)
    other, _, _ = pair(mesh, **MODULES["grouped"])
    state = get_model_state_dict(other)
    dcp.load({"model": state}, checkpoint_id=folder / "saved")
    set_model_state_dict(other, state)
    both = [same_states(alone, whole.state_dict()), same_states(other.state_dict(), whole.state_dict())]
    return next((each for each in both if each != "same"), "same")


# ---------------------------------------------------------------- training


def trained(mesh: Mesh) -> float | str:
    """Return how far parameters and moments are after three steps with clipped gradients."""
    whole = Model(kv_heads=2, qk_norm="rms")
    for layer in whole.layers:
        layer.unpack()
    model = tensor_parallel(copy.deepcopy(whole), mesh)
    parallelize_module(model, mesh, {"head": ColwiseParallel()})  # torch clips DTensors and others apart
    x = torch.randn(BATCH, LENGTH, WIDTH)
    found: list[dict[str, Tensor]] = []
    for each in (model, whole):
        optimizer = torch.optim.AdamW(each.parameters(), 1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            each(x).square().sum().backward()
            nn.utils.clip_grad_norm_(each.parameters(), 1.0)
            optimizer.step()
        state = get_optimizer_state_dict(each, optimizer, options=FULL)["state"]
        moments = {f"{n} {k}": x for n, entry in state.items() for k, x in entry.items()}
        found.append({**get_model_state_dict(each, options=FULL), **moments})
    return difference(*found)


def sharded_data(mesh: Mesh) -> float | str:
    """Return how far a module is whose parameters are also sharded over the data."""
    both = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("data", "heads"))
    whole = filled(kv_heads=2, sinks=True, gate=True)
    module = tensor_parallel(copy.deepcopy(whole), both["heads"])
    fully_shard(module, mesh=both["data"])
    x = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    states = same_states(get_model_state_dict(module, options=FULL), whole.state_dict())
    return states if states != "same" else difference(run(module, {"x": x}), run(whole, {"x": x}))


def dropout(mesh: Mesh) -> list[Any]:
    """Return whether ranks with equal heads drop different weights, and whether their generators remain alike."""
    module, _, x = pair(mesh, dropout=0.5, kv_heads=1)
    with torch.no_grad():
        for name in ("q_proj", "out_proj"):
            local = getattr(module, name).weight.to_local()
            dist.broadcast(local, 0)
        module.q_proj.bias.to_local().zero_()
    merged: list[Tensor] = []
    module.out_proj.register_forward_pre_hook(lambda _, inputs: merged.append(inputs[0].to_local()), prepend=False)
    found: list[bool] = []
    for training in (False, True):
        torch.manual_seed(1)
        module.train(training)(x)
        others = [torch.empty_like(merged[-1]) for _ in range(mesh.size())]
        dist.all_gather(others, merged[-1].contiguous())
        found.append(all(torch.equal(others[0], each) for each in others[1:]))
    numbers = [torch.empty(1) for _ in range(mesh.size())]
    dist.all_gather(numbers, torch.rand(1))
    return [*found, len({float(x) for x in numbers})]


# ---------------------------------------------------------------- calls


def decoded(mesh: Mesh, make: Callable[[], Any]) -> float | str:
    """Return how far outputs with a cache are, of a prefill and two tokens."""
    module, whole, x = pair(mesh, kv_heads=2, rotary=positions.Rotary(2))
    outputs: list[Tensor] = []
    with torch.no_grad():
        for each in (module, whole):
            cache = make()
            parts = [each(part, cache=cache) for part in x.split((LENGTH - 2, 1, 1), 1)]
            outputs.append(torch.cat(parts, 1))
    return difference({"out": outputs[0]}, {"out": outputs[1]})


def nested(mesh: Mesh) -> float | str:
    """Return how far outputs and gradients of rows of unequal length are."""
    module, whole, _ = pair(mesh, kv_heads=2)
    found: list[dict[str, Tensor]] = []
    rows = [torch.randn(n, WIDTH) for n in (3, 1, 5)]
    for each in (module, whole):
        values = [row.clone().requires_grad_() for row in rows]
        out = each(torch.nested.as_nested_tensor(values, layout=torch.jagged))
        out.values().square().sum().backward()
        grads = {str(n): row.grad for n, row in enumerate(values) if row.grad is not None}
        found.append({"out": out.values().detach(), **grads})
    return difference(*found)


def sequences(mesh: Mesh) -> float | str:
    """Return how far outputs and gradients are where each rank passes a part of the sequence, by torch's planner."""
    whole, x = filled(sinks=True), torch.randn(BATCH, 8, WIDTH, requires_grad=True)
    module = copy.deepcopy(whole).unpack()
    plan: dict[str, Any] = {f"{name}_proj": ColwiseParallel(input_layouts=Shard(1)) for name in "qkv"}
    parallelize_module(module, mesh, {**plan, "out_proj": RowwiseParallel(output_layouts=Shard(1))})
    own = x.detach().chunk(mesh.size(), 1)[mesh.get_rank()].requires_grad_()
    found: list[tuple[Tensor, Tensor]] = []
    for each, tokens in ((module, own), (whole, x)):
        out = each(tokens, mask=masks.causal())
        (out * out.detach().sin()).sum().backward()
        assert tokens.grad is not None
        found.append((out.detach(), tokens.grad))
    parts = [y.chunk(mesh.size(), 1)[mesh.get_rank()] for y in found[1]]
    return difference(dict(zip("xy", found[0], strict=True)), dict(zip("xy", parts, strict=True)))


def without_batch(mesh: Mesh) -> float | str:
    module, whole, x = pair(mesh)
    return difference({"out": module(x[0]).detach()}, {"out": whole(x[0]).detach()})


# ---------------------------------------------------------------- watching


def watched(mesh: Mesh, how: Callable[[Any, Mesh], Any]) -> dict[str, Any]:
    """Return the part of the heads that a recording states, and how far its numbers are from those of one process."""
    whole = Model(kv_heads=2)
    model = copy.deepcopy(whole)
    if how is tensor_parallel:
        tensor_parallel(model, mesh)
    else:
        for layer in model.layers:
            how(layer, mesh)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    recordings: list[Any] = []
    for each in (model, whole):
        with torch.no_grad(), watch(each) as recording:
            each(x)
        recordings.append(recording)
    found, expected = recordings
    part = found.about.part["layers.0"]
    heads = slice(*part.heads)
    own = {name: found.stats[name].mean for name in ("entropy", "first", "distance")}
    all_of = {name: expected.stats[name].mean[:, heads] for name in own}
    return {
        "layers": [*found.stats.layers], "parts": sorted({str(p) for p in found.about.part.values()}),
        "whole": [str(p) for p in expected.about.part.values()], "difference": difference(own, all_of),
    }  # fmt: skip


def ablated(mesh: Mesh) -> float | str:
    """Return how far the output without a head is."""
    whole = Model()
    model = tensor_parallel(copy.deepcopy(whole), mesh)
    outputs: list[Tensor] = []
    for each in (model, whole):
        with torch.no_grad(), ablate(each, {"layers.1": [1, HEADS - 1]}):
            outputs.append(each(torch.ones(1, LENGTH, WIDTH)))
    return difference({"out": outputs[0]}, {"out": outputs[1]})


# ---------------------------------------------------------------- what is refused


def tied() -> nn.Module:
    layers = nn.ModuleList([filled(), filled()])
    layers[1].out_proj = layers[0].out_proj
    return layers


def hooked() -> nn.Module:
    module = filled()
    module.qkv_proj.register_forward_hook(print)
    return module


def with_plan(module: MultiHeadAttention, mesh: Mesh, plan: dict[str, Any]) -> None:
    parallelize_module(module, mesh, plan)(torch.zeros(1, 2, WIDTH))


def refusals(mesh: Mesh) -> dict[str, Any]:
    """Return the error of each wrong use."""
    two = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("data", "heads"))
    split, _, x = pair(mesh)
    rank = mesh.get_rank()
    wrong: dict[str, Callable[[], Any]] = {
        "heads": lambda: tensor_parallel(MultiHeadAttention(21, 7), mesh),
        "kv heads": lambda: tensor_parallel(MultiHeadAttention(24, 12, kv_heads=3), mesh),
        "two axes": lambda: tensor_parallel(filled(), two),
        "a group": lambda: tensor_parallel(filled(), dist.group.WORLD),  # pyright: ignore[reportArgumentType]
        "no attention": lambda: tensor_parallel(nn.Linear(2, 2), mesh),
        "reproducible": lambda: tensor_parallel(MultiHeadAttention(WIDTH, HEADS, reproducible=True), mesh),
        "twice": lambda: tensor_parallel(split, mesh),
        "tied": lambda: tensor_parallel(tied(), mesh),
        "hooks": lambda: tensor_parallel(hooked(), mesh),
        "disagreement": lambda: tensor_parallel(filled(softcap=float(rank + 1)), mesh),
        "other layers": lambda: tensor_parallel(nn.ModuleDict({f"layer {rank}": filled()}), mesh),
        "pruned": lambda: split.prune_heads([0]),
        "traced": lambda: trace(split, x),
        "exported": lambda: split.to_state_dict("torch"),
        "mask of this rank's heads": lambda: split(x, mask=torch.ones(HEADS // mesh.size(), 1, 1) > 0),
        "bias of this rank's heads": lambda: split(x, bias=torch.zeros(HEADS // mesh.size(), 1, 1)),
        "packed plan": lambda: with_plan(
            filled(), mesh, {"qkv_proj": ColwiseParallel(), "out_proj": RowwiseParallel()}
        ),
        "plan without out_proj": lambda: by_columns(mesh),
        "plan within heads": lambda: by_plan("q_proj", "k_proj", "v_proj")(filled(kv_heads=1), mesh)(x),
    }
    return {name: attempt(action) for name, action in wrong.items()}


def by_columns(mesh: Mesh) -> None:
    plan = {name: ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
    with_plan(filled().unpack(), mesh, plan)


def run_all(mesh: Mesh, folder: Path) -> dict[str, Any]:
    """Return the result of each use, or its error."""
    uses: dict[str, Callable[[], Any]] = {
        **{f"written {name}": lambda name=name: written_state(mesh, name) for name in MODULES},
        **{f"loaded {name}": lambda name=name: loaded_state(mesh, name, by_torch=False) for name in MODULES},
        **{f"set {name}": lambda name=name: loaded_state(mesh, name, by_torch=True) for name in MODULES},
        "state of a model": lambda: state_of_a_model(mesh),
        "checkpoint": lambda: checkpoint(mesh, folder),
        "trained": lambda: trained(mesh),
        "dropout": lambda: dropout(mesh),
        "growing cache": lambda: decoded(mesh, GrowingCache),
        "static cache": lambda: decoded(mesh, lambda: StaticCache(9)),
        "nested": lambda: nested(mesh),
        "sequences": lambda: sequences(mesh),
        "without batch": lambda: without_batch(mesh),
        "watched": lambda: watched(mesh, tensor_parallel),
        "watched, by plan": lambda: watched(mesh, by_plan("q_proj")),
        "ablated": lambda: ablated(mesh),
        "refused": lambda: refusals(mesh),
    }
    if mesh.size() == 4:
        uses["sharded data"] = lambda: sharded_data(mesh)
    results: dict[str, Any] = {}
    for name, use in uses.items():
        torch.manual_seed(0)
        results[name] = attempt(use)
    return results

"""Modules with every option whose heads several processes share, compared with those of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from headscope import MultiHeadAttention, masks, positions
from headscope.parallel import tensor_parallel

HEADS, WIDTH, BATCH, LENGTH = 8, 24, 2, 7
Mesh = DeviceMesh


@dataclass
class Case:
    """A module and a call of it.

    Attributes:
        options: of the module.
        call: makes the call's other arguments.
        how: splits the module; ``tensor_parallel`` by default.
    """

    options: dict[str, Any] = field(default_factory=dict[str, Any])
    call: Callable[[], dict[str, Any]] = dict
    how: Callable[[Any, Mesh], Any] = tensor_parallel


@dataclass(frozen=True)
class EveryOtherHead(masks.Mask):
    """Keys at an even distance in even heads, at an odd one in odd heads, and the query's own."""

    def allows(self, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return ((i - j) % 2 == h % 2) | (i == j)


def by_plan(*names: str, local: bool = True) -> Callable[[Any, Mesh], Any]:
    """Split a module by torch's own planner; the names are those of the projections split by rows."""

    def split(module: Any, mesh: Mesh) -> Any:
        plan: dict[str, Any] = {name: ColwiseParallel(use_local_output=local) for name in names}
        return parallelize_module(module.unpack(), mesh, {**plan, "out_proj": RowwiseParallel()})

    return split


def random_bias(*shape: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"bias": torch.randn(*shape, requires_grad=True)}


def lengths() -> masks.Mask:
    return masks.KeyLengths(torch.tensor([4, LENGTH])) & masks.causal()


def documents() -> masks.Mask:
    return masks.Documents(torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 2, 2]]))


def context(*widths: int) -> Callable[[], dict[str, Any]]:
    """A context of 5 tokens, or a pair."""
    made = lambda: tuple(torch.randn(BATCH, 5, width, requires_grad=True) for width in widths)  # noqa: E731
    return lambda: {"context": made() if len(widths) == 2 else made()[0]}


QKV = ("q_proj", "k_proj", "v_proj")
CASES: dict[str, Case] = {
    "plain": Case(),
    "no bias": Case({"bias": False}),
    "three projections": Case({"bias": ("q", "v"), "out_bias": False}),
    **{f"{n} kv heads": Case({"kv_heads": n}) for n in (4, 2, 1)},
    "widths": Case({"head_dim": 5, "v_head_dim": 2}),
    "kdim, vdim": Case({"kdim": 10, "vdim": 6, "kv_heads": 2}, context(10, 6)),
    "context": Case({"kv_heads": 4}, context(WIDTH)),
    "scale, softcap": Case({"scale": 0.9, "softcap": 2.0}),
    "sinks": Case({"sinks": True, "kv_heads": 2}),
    "rotary": Case({"rotary": positions.Rotary(2), "kv_heads": 2}),
    "positions": Case({"rotary": positions.Rotary(2)}, lambda: {"positions": torch.tensor([0, 2, 3, 5, 8, 9, 11])}),
    "ALiBi": Case({"position_bias": positions.ALiBi(HEADS)}, lambda: {"mask": masks.causal()}),
    "T5": Case({"position_bias": positions.T5Buckets(8, 16), "kv_heads": 2}, random_bias(LENGTH, LENGTH)),
    **{f"qk_norm {kind}": Case({"qk_norm": kind}) for kind in ("rms", "layer", "rms_all")},
    **{f"qk_norm {kind}, 2 kv heads": Case({"qk_norm": kind, "kv_heads": 2}) for kind in ("rms", "rms_all")},
    "qk_norm layer, 2 kv heads": Case({"qk_norm": "layer", "kv_heads": 2, "head_dim": 11}),
    "gate": Case({"gate": True}),
    **{f"bias_kv, {n} kv heads": Case({"bias_kv": True, "kv_heads": n}) for n in (8, 2, 1)},
    "causal": Case({}, lambda: {"mask": masks.causal()}),
    "mask of heads": Case({}, lambda: {"mask": torch.rand(BATCH, HEADS, LENGTH, LENGTH) < 0.7}),
    "a mask of one's own": Case({}, lambda: {"mask": EveryOtherHead() & masks.window(5)}),
    "lengths": Case({"kv_heads": 2}, lambda: {"mask": lengths()}),
    "documents": Case({}, lambda: {"mask": documents() | masks.Prefix(1)}),
    "bias of heads": Case({}, random_bias(BATCH, HEADS, LENGTH, LENGTH)),
    "bias of all heads": Case({"kv_heads": 1}, random_bias(BATCH, 1, 1, LENGTH)),
    "weights": Case({"sinks": True, "bias_kv": True}, lambda: {"need_weights": True}),
    "dropout, not training": Case({"dropout": 0.3}),
    "all options": Case(
        {
            "kv_heads": 2, "head_dim": 6, "v_head_dim": 5, "softcap": 3.0, "sinks": True, "gate": True,
            "rotary": positions.Rotary(4), "position_bias": positions.T5Buckets(8, 16), "qk_norm": "rms_all",
        },
        lambda: {"mask": lengths(), "bias": torch.randn(HEADS, 1, LENGTH, requires_grad=True), "need_weights": True},
    ),
    "plan": Case({}, how=by_plan(*QKV)),
    "plan, q alone": Case({"kv_heads": 2, "bias_kv": True, "qk_norm": "layer"}, how=by_plan("q_proj")),
    "plan, DTensors between projections": Case(
        {"sinks": True, "qk_norm": "rms", "gate": True, "rotary": positions.Rotary(2)},
        lambda: {"mask": masks.causal(), "need_weights": True}, by_plan(*QKV, local=False),
    ),
    "plan, all options": Case(
        {"sinks": True, "gate": True, "qk_norm": "rms_all", "position_bias": positions.T5Buckets(8, 16)},
        lambda: {"mask": masks.causal(), "need_weights": True}, by_plan(*QKV),
    ),
}  # fmt: skip


def fill(module: nn.Module) -> None:
    """Give every parameter random values: zeros would hide a wrong share."""
    with torch.no_grad():
        for x in module.parameters():
            x.copy_(torch.randn(x.shape) * 0.3)


def filled(**options: Any) -> MultiHeadAttention:
    """Return a module of random values, in eval."""
    module = MultiHeadAttention(WIDTH, HEADS, **options).eval()
    fill(module)
    return module


def named_gradients(module: Any) -> dict[str, Tensor]:
    """Return the whole gradients by the names of an unpacked module."""
    found: dict[str, Tensor] = {}
    for name, x in module.named_parameters():
        grad: Any = torch.zeros(x.shape) if x.grad is None else x.grad
        grad = grad.full_tensor() if isinstance(grad, DTensor) else grad
        first, _, rest = name.partition(".")
        if first == "qkv_proj":
            found |= {f"{p}.{rest}": part for p, part in zip(QKV, grad.split(module.splits), strict=True)}
        else:
            found[name] = grad
    return found


def leaves(arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Return the arguments with a gradient."""
    found: dict[str, Tensor] = {}
    for name, value in arguments.items():
        for n, x in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(x, Tensor) and x.requires_grad:
                found[f"{name} {n}"] = x
    return found


def run(module: Any, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Return outputs and gradients."""
    module.zero_grad()
    for x in leaves(arguments).values():
        x.grad = None
    results = module(**arguments)
    results = dict(zip(("out", "weights"), results if isinstance(results, tuple) else (results,), strict=False))
    loss = sum((x * torch.linspace(-0.2, 0.2, x.numel()).view(x.shape)).sum() for x in results.values())
    assert isinstance(loss, Tensor)
    loss.backward()
    found = {name: x.detach() for name, x in results.items()}
    found |= {f"gradient of {name}": x.grad.clone() for name, x in leaves(arguments).items() if x.grad is not None}
    return found | {f"gradient of {name}": x for name, x in named_gradients(module).items()}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float | str:
    """Return the largest difference, in parts of the largest number of a tensor where that is above 1."""
    if found.keys() != expected.keys():
        return f"other results: {sorted(found.keys() ^ expected.keys())}"
    worst, where = 0.0, ""
    for name, x in expected.items():
        if found[name].shape != x.shape:
            return f"{name}: shape {list(found[name].shape)}"
        error = float((found[name] - x).abs().max() / x.abs().max().clamp_min(1))
        worst, where = max((worst, where), (error, name))
    return worst if worst <= 2e-6 else f"{where}: {worst}"


def compare(case: Case, mesh: Mesh) -> float | str:
    """Return how far a split module is from the whole one."""
    whole = filled(**case.options)
    arguments = {"x": torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True), **case.call()}
    module = case.how(copy.deepcopy(whole), mesh)
    return difference(run(module, arguments), run(whole, arguments))


def attempt(action: Callable[[], Any]) -> Any:
    """Return a result or the error."""
    try:
        return action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def run_all(mesh: Mesh) -> dict[str, Any]:
    """Return, for each case, how far it is from one process, or the error."""
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        torch.manual_seed(0)
        results[name] = attempt(lambda case=case: compare(case, mesh))
    return results

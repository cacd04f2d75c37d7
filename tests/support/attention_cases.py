"""One attention of every kind, for the tests of attention and attend: what is asked, and what should come out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

import headscope
from headscope._attend import torch_operators
from headscope._attend.backends import fused, native
from headscope._attend.interface import accumulate_dtype
from headscope.masks import Band, Dense, Documents, KeyLengths, Prefix, causal, window
from support import oracle

B, H, HKV, Q, K, D = 2, 6, 3, 11, 13, 5
SIZES = (B, H, Q, K)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INF = torch.inf
ON_A_CPU = tuple(name for name in torch_operators.OPERATOR_BACKENDS if name != fused.name)
"""The backends that run as operators on a CPU."""


class Asked(NamedTuple):
    """One attention: its tensors, what headscope is told beside them, and what the oracle is told."""

    tensors: dict[str, Tensor]
    said: dict[str, Any]
    seen: dict[str, Any]


def tensors(dtype: torch.dtype, *, v_head_dim: int = D, kv_heads: int = HKV, queries: int = Q) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    shapes = {"q": (B, H, queries, D), "k": (B, kv_heads, K, D), "v": (B, kv_heads, K, v_head_dim)}
    return {name: torch.randn(shape, generator=random).to(dtype) for name, shape in shapes.items()}


def _mask(mask: Any, sees: oracle.Predicate) -> Callable[[torch.dtype], Asked]:
    return lambda dtype: Asked(tensors(dtype), {"mask": mask}, {"seen": oracle.table(sees, SIZES)})


def _numbers(**numbers: float) -> Callable[[torch.dtype], Asked]:
    return lambda dtype: Asked(tensors(dtype), numbers, numbers)


def _bias(*shape: int, hidden: bool = False, dtype: torch.dtype | None = None) -> Callable[[torch.dtype], Asked]:
    def make(own: torch.dtype) -> Asked:
        bias = torch.randn(shape, generator=torch.Generator().manual_seed(5))
        if hidden:
            bias[bias > 0.5] = -INF
        return Asked({**tensors(own), "bias": bias.to(dtype or own)}, {}, {})

    return make


def _sinks(dtype: torch.dtype) -> Asked:
    return Asked({**tensors(dtype), "sinks": torch.linspace(-2, 3, H).to(dtype)}, {}, {})


def _square_causal(dtype: torch.dtype) -> Asked:
    return Asked(
        tensors(dtype, queries=K), {"mask": causal()}, {"seen": torch.ones(B, H, K, K, dtype=torch.bool).tril()}
    )


def _everything(dtype: torch.dtype) -> Asked:
    mask, sees = MASKS["prefix | window, lengths"]
    numbers = {"scale": 0.7, "softcap": 3.0}
    given = {**tensors(dtype, v_head_dim=7), "bias": _bias(H, Q, 1)(dtype).tensors["bias"], **_only_sinks(dtype)}
    return Asked(given, {"mask": mask, **numbers}, {"seen": oracle.table(sees, SIZES), **numbers})


def _only_sinks(dtype: torch.dtype) -> dict[str, Tensor]:
    return {"sinks": _sinks(dtype).tensors["sinks"]}


_lengths = [9, 0]
_ids = [
    torch.tensor(ids) for ids in ([[0] * 4 + [1] * 7, [0, 1] * 5 + [2]], [[0] * 6 + [2] * 7, [1, 0, 0, 3] * 3 + [2]])
]
_random = torch.rand(B, H, Q, K, generator=torch.Generator().manual_seed(7)) < 0.4
_columns = torch.rand(B, 1, 1, K, generator=torch.Generator().manual_seed(8)) < 0.6

MASKS: dict[str, tuple[Any, oracle.Predicate]] = {
    "causal": (causal(), oracle.band(None, 0, K - Q)),
    "top-left": (Band(None, 0, offset=0), oracle.band(None, 0, 0)),
    "with empty rows": (Band(1, 0, offset=-3), oracle.band(1, 0, -3)),
    "window": (window(4), oracle.band(3, 0, K - Q)),
    "offsets": (Band(2, 1, offset=(3, -2)), oracle.band(2, 1, (3, -2))),
    "prefix": (Prefix(4), oracle.prefix(4)),
    "lengths": (KeyLengths(torch.tensor(_lengths)), oracle.key_lengths(_lengths)),
    "documents": (Documents(*_ids), oracle.documents(*(ids.tolist() for ids in _ids))),
    "dense": (Dense(_random), oracle.dense(_random, SIZES)),
    "dense columns": (_columns, oracle.dense(_columns, SIZES)),
    "prefix | window, lengths": (
        (Prefix(2) | window(3)) & KeyLengths(torch.tensor(_lengths)),
        oracle.both(oracle.either(oracle.prefix(2), oracle.band(2, 0, K - Q)), oracle.key_lengths(_lengths)),
    ),
    "causal & documents | dense": (
        causal() & Documents(*_ids) | Dense(_columns),
        oracle.either(
            oracle.both(oracle.band(None, 0, K - Q), oracle.documents(*(ids.tolist() for ids in _ids))),
            oracle.dense(_columns, SIZES),
        ),
    ),
}

OPTIONS: dict[str, Callable[[torch.dtype], Asked]] = {
    "nothing": lambda dtype: Asked(tensors(dtype), {}, {}),
    "ungrouped": lambda dtype: Asked(tensors(dtype, kv_heads=H), {}, {}),
    "one key head": lambda dtype: Asked(tensors(dtype, kv_heads=1), {}, {}),
    "Dv 7": lambda dtype: Asked(tensors(dtype, v_head_dim=7), {}, {}),
    "Dv 1": lambda dtype: Asked(tensors(dtype, v_head_dim=1), {}, {}),
    "square causal": _square_causal,
    "one query": lambda dtype: Asked(tensors(dtype, queries=1), {"mask": causal()}, {}),
    **{f"mask: {name}": _mask(*pair) for name, pair in MASKS.items()},
    "scale 2": _numbers(scale=2),
    "scale 0": _numbers(scale=0.0),
    "scale -0.3": _numbers(scale=-0.3),
    "softcap": _numbers(softcap=1.5),
    "softcap, scale": _numbers(softcap=0.5, scale=4.0),
    "bias": _bias(B, H, Q, K),
    "bias of heads": _bias(H, 1, 1),
    "bias of keys": _bias(1, 1, 1, K),
    "bias of queries": _bias(Q, 1),
    "bias, one number": _bias(),
    "bias that hides": _bias(B, 1, Q, K, hidden=True),
    "bias in float64": _bias(B, 1, Q, K, dtype=torch.float64),
    "sinks": _sinks,
    "everything": _everything,
}


NATIVE = ["cpu"] if native.extension is not None else []  # without a C++ compiler there is none
ANY = [*NATIVE, "blocked", "small blocks", "reference"]  # these take every call
BY = ["sdpa", *ANY]
FUSED = (
    "nothing; ungrouped; one key head; one query; square causal; scale 2; scale 0; scale -0.3; "
    "mask: prefix; mask: lengths; mask: dense; mask: dense columns; "
    "bias; bias of heads; bias of keys; bias of queries; bias, one number; bias that hides"
)


def pairs(names: Iterable[str], fused: str) -> list[tuple[str, str]]:
    """Each name with each backend that takes it; what sdpa refuses is listed in test_select."""
    return [(name, by) for name in names for by in BY if by != "sdpa" or name in fused.split("; ")]


def run_by(backend: str | None, tensors: dict[str, Tensor], said: dict[str, Any]) -> dict[str, Tensor]:
    """out and, where the backend can give it, lse."""
    if backend == "sdpa":
        return {"out": headscope.attention(**tensors, **said, backend=backend)}
    out, lse, stats = headscope.attend(**tensors, **said, backend=backend)
    assert stats is None
    return {"out": out, "lse": lse}


def gradients(results: dict[str, Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of a fixed random sum of out and lse."""
    random = torch.Generator().manual_seed(11)
    along = [torch.randn(x.shape, generator=random, dtype=torch.float64) for x in results.values()]
    along = [x.to(torch.bfloat16).to(y.dtype) for x, y in zip(along, results.values(), strict=True)]  # the same for all
    found = torch.autograd.grad(list(results.values()), list(tensors.values()), along, allow_unused=True)
    return {
        f"gradient of {name}": torch.zeros_like(x) if gradient is None else gradient
        for (name, x), gradient in zip(tensors.items(), found, strict=True)
    }


@cache
def wanted(option: str, dtype: torch.dtype, lse: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Exact results and gradients, and those of plain torch in the dtype; lse in the dtype that it is given in."""
    asked = OPTIONS[option](dtype)
    exact = _oracle(asked, oracle.attention, torch.float64, lse)
    plain = _oracle(asked, oracle.plain, dtype, lse)
    if lse:
        plain["lse"] = _oracle(asked, oracle.plain, accumulate_dtype(dtype), lse)["lse"]
    return exact, plain


def _oracle(asked: Asked, run: Any, dtype: torch.dtype, lse: bool) -> dict[str, Tensor]:
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in asked.tensors.items()}
    out, row_lse, _ = run(**leaves, **asked.seen)
    results = {"out": out, "lse": row_lse} if lse else {"out": out}
    return {**{name: x.detach() for name, x in results.items()}, **gradients(results, leaves)}

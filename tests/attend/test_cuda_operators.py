"""Which operator of torch each call emits on CUDA: in eager mode, compiled and exported, on fake tensors.

A CPU build runs ``scaled_dot_product_attention`` as its math kernel, because CUDA's choice among its kernels is not in
it. So where headscope calls that function, the test ends there; ``docs/guides/gpu.md`` says what is assumed of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import headscope
from headscope._attend import torch_operator_kernels
from headscope.cli._doctor.machine import CallSpec, judge
from headscope.cli._doctor.matrix import choices
from headscope.masks import Band, Dense, Documents, KeyLengths, Mask, Prefix, causal, packed_documents, window
from support.fake_cuda import SDPA, fake_cuda, recorded

B, H, T, D = 2, 4, 24, 16
FLASH, BAND = "_scaled_dot_product_flash_attention", "_flash_attention_forward"
EFFICIENT, EFFICIENT_BAND = "_scaled_dot_product_efficient_attention", "_efficient_attention_forward"
FLEX, BLOCKED = "flex_attention", "bmm"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}


def empty(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="cuda")


def lengths() -> KeyLengths:
    return KeyLengths(empty(B, dtype=torch.long))


def packed() -> Documents:
    return packed_documents(tuple(empty(*n, dtype=torch.int32) for n in ((1, T), (1, T), (4,), (4,))), 9, 9, same=True)


def shown() -> Dense:
    return Dense(empty(T, T, dtype=torch.bool))


Options = Callable[[torch.dtype], dict[str, Any]]


def masked(make: Callable[[], Mask], **sizes: int) -> Options:
    return lambda dtype: {"mask": make(), **sizes}


def top_left() -> Band:
    return Band(None, 0, offset=0)


def dropping(make: Callable[[], dict[str, Any]] = dict) -> Options:
    return lambda dtype: {"dropout": 0.1, **make()}


# options, and the operator: of attention and attend in half precision, of attention and attend in float32
CASES: dict[str, tuple[Options, str, str, str, str]] = {
    "no option": (lambda dtype: {}, SDPA, FLASH, SDPA, EFFICIENT),
    "grouped heads": (lambda dtype: {"kv_heads": 2}, SDPA, FLASH, SDPA, EFFICIENT),
    "one query": (lambda dtype: {"queries": 1}, SDPA, FLASH, SDPA, EFFICIENT),
    "more keys": (lambda dtype: {"queries": 11}, SDPA, FLASH, SDPA, EFFICIENT),
    "D 512": (lambda dtype: {"head_dim": 512}, EFFICIENT, EFFICIENT, EFFICIENT, EFFICIENT),
    "D 18": (lambda dtype: {"head_dim": 18}, SDPA, FLASH, EFFICIENT, EFFICIENT),
    "Dv 11": (lambda dtype: {"v_head_dim": 11}, FLASH, FLASH, EFFICIENT, EFFICIENT),
    "causal": (masked(causal), SDPA, FLASH, SDPA, EFFICIENT),
    "causal, more keys": (masked(causal, queries=11), BAND, BAND, EFFICIENT_BAND, EFFICIENT_BAND),
    "causal, one query": (masked(causal, queries=1), BAND, BAND, EFFICIENT_BAND, EFFICIENT_BAND),
    "top-left causal, more keys": (masked(top_left, queries=11), FLASH, FLASH, EFFICIENT, EFFICIENT),
    "top-left causal, more queries": (masked(top_left, queries=31), BAND, BAND, FLEX, FLEX),
    "top-left window, more keys": (
        masked(lambda: Band(4, 0, offset=0), queries=11), BAND, BAND, EFFICIENT_BAND, EFFICIENT_BAND
    ),
    "strictly causal": (masked(lambda: Band(None, -1)), BAND, BAND, FLEX, FLEX),
    "window": (masked(lambda: window(5)), BAND, BAND, EFFICIENT_BAND, EFFICIENT_BAND),
    "window to both sides": (masked(lambda: Band(2, 3)), BAND, BAND, FLEX, FLEX),
    "key lengths": (masked(lengths), SDPA, EFFICIENT, SDPA, EFFICIENT),
    "causal & key lengths": (masked(lambda: causal() & lengths()), EFFICIENT, EFFICIENT, EFFICIENT, EFFICIENT),
    "boolean tensor": (masked(shown), SDPA, EFFICIENT, SDPA, EFFICIENT),
    "causal & boolean tensor": (masked(lambda: causal() & shown()), EFFICIENT, EFFICIENT, EFFICIENT, EFFICIENT),
    "packed documents": (masked(packed, batch=1), BAND, BAND, EFFICIENT_BAND, EFFICIENT_BAND),
    "causal & packed documents": (
        masked(lambda: causal() & packed(), batch=1), BAND, BAND, EFFICIENT_BAND, EFFICIENT_BAND
    ),
    "sinks": (lambda dtype: {"sinks": empty(H)}, FLASH, FLASH, EFFICIENT, EFFICIENT),
    "window, sinks": (
        lambda dtype: {"mask": window(5), "sinks": empty(H)}, BAND, BAND, EFFICIENT_BAND, EFFICIENT_BAND
    ),
    "bias": (lambda dtype: {"bias": empty(H, T, T, dtype=dtype)}, SDPA, EFFICIENT, SDPA, EFFICIENT),
    "causal, bias": (
        lambda dtype: {"mask": causal(), "bias": empty(H, T, T, dtype=dtype)},
        EFFICIENT, EFFICIENT, EFFICIENT, EFFICIENT,
    ),
    "softcap": (lambda dtype: {"softcap": 5.0}, FLEX, FLEX, FLEX, FLEX),
    "prefix": (masked(lambda: Prefix(3)), SDPA, EFFICIENT, SDPA, EFFICIENT),
    "prefix | window": (masked(lambda: Prefix(3) | window(5)), FLEX, FLEX, FLEX, FLEX),
    "dropout": (dropping(), SDPA, FLASH, SDPA, EFFICIENT),
    "dropout, causal, sinks": (
        dropping(lambda: {"mask": causal(), "sinks": empty(H)}), FLASH, FLASH, EFFICIENT, EFFICIENT
    ),
    "dropout, window": (dropping(lambda: {"mask": window(5)}), BAND, BAND, EFFICIENT_BAND, EFFICIENT_BAND),
    "dropout, causal & key lengths": (
        dropping(lambda: {"mask": causal() & lengths()}), EFFICIENT, EFFICIENT, EFFICIENT, EFFICIENT
    ),
    "dropout, packed documents": (
        dropping(lambda: {"mask": packed(), "batch": 1}), BAND, BAND, BLOCKED, BLOCKED
    ),
    "dropout, D 256": (dropping(lambda: {"head_dim": 256}), SDPA, EFFICIENT, SDPA, EFFICIENT),
    "dropout, softcap": (dropping(lambda: {"softcap": 5.0}), BLOCKED, BLOCKED, BLOCKED, BLOCKED),
    "ids of documents": (
        masked(lambda: Documents(empty(1, T, dtype=torch.long))), FLEX, FLEX, FLEX, FLEX
    ),
}  # fmt: skip
ATTENDING = ("attention", "attend")
SAMPLED = (
    "causal",
    "prefix | window",
    "window",
    "causal & key lengths",
    "packed documents",
    "sinks",
    "dropout, window",
    "top-left causal, more keys",
)  # compiling takes 0.3 s


NAMED = {  # as ``headscope doctor`` names them
    "one query": "one query",
    "grouped heads": "grouped heads",
    "D 512": "D 512",
    "causal": "mask: causal",
    "causal, more keys": "mask: causal, more keys",
    "top-left causal, more keys": "mask: top-left causal, more keys",
    "window": "mask: window",
    "prefix": "mask: prefix",
    "prefix | window": "mask: prefix | window",
    "key lengths": "mask: key lengths",
    "causal & key lengths": "mask: causal & key lengths",
    "boolean tensor": "mask: boolean tensor",
    "causal & boolean tensor": "mask: causal & boolean tensor",
    "packed documents": "mask: packed documents",
    "causal & packed documents": "mask: causal & packed documents",
    "ids of documents": "mask: documents",
    "sinks": "sinks",
    "bias": "bias",
    "softcap": "softcap",
    "dropout": "dropout",
    "dropout, window": "dropout, mask: window",
    "dropout, packed documents": "dropout, mask: packed documents",
    "dropout, D 256": "dropout, D 256",
    "dropout, softcap": "dropout, softcap",
}
OPERATORS = {
    "sdpa": SDPA, "flex": FLEX, "blocked": BLOCKED, "fused: flash": FLASH, "fused: flash band": BAND,
    "fused: efficient": EFFICIENT, "fused: efficient band": EFFICIENT_BAND,
}  # fmt: skip


class Attending(nn.Module):
    """One call of headscope, with its mask and options."""

    def __init__(self, call: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.call, self.options = call, options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        if self.call == "attention":
            return (headscope.attention(q, k, v, **self.options),)
        return headscope.attend(q, k, v, **self.options)[:2]


def made(name: str, dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    options = CASES[name][0](dtype)
    batch, heads, width = options.pop("batch", B), options.pop("kv_heads", H), options.pop("head_dim", D)
    q = empty(batch, H, options.pop("queries", T), width, dtype=dtype)
    k, v = (empty(batch, heads, T, n, dtype=dtype) for n in (width, options.pop("v_head_dim", width)))
    return (q, k, v), options


def expected(name: str, call: str, dtype: torch.dtype) -> str:
    if dtype == torch.float64:
        return BLOCKED
    return CASES[name][1:][ATTENDING.index(call) + 2 * (dtype == torch.float32)]


def emitted(names: list[str]) -> str:
    """Return the operator that computes attention, of all that ran."""
    for each in (SDPA, FLASH, BAND, EFFICIENT, EFFICIENT_BAND, "_scaled_dot_product_cudnn_attention", FLEX):
        if each in names:
            return each
    return BLOCKED if BLOCKED in names else f"none of {names}"


def _again(x: Any) -> Any:
    """Return a fake tensor like that of a node."""
    if not isinstance(x, torch.fx.Node):
        return x
    like = x.meta["val"] if "val" in x.meta else x.meta["example_value"]
    if like.device.type == "cpu":
        return 1  # the seed of dropout, which the operator reads
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def emitted_by_graph(graph: torch.fx.Graph) -> str:
    """Return the same of a graph; an operator of headscope's is run on fake tensors, as it will run."""
    for node in graph.nodes:
        if SDPA in str(node.target):
            return SDPA
        if FLEX in str(node.target):
            return FLEX
        if "attend_forward" in str(node.target):
            with fake_cuda(), recorded() as names:
                torch_operator_kernels._forward(*tree_map(_again, list(node.args)))
            return emitted(names)
    return f"none of {[str(node.target) for node in graph.nodes]}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_in_eager_mode(name: str, dtype: str) -> None:
    with fake_cuda():
        for call in ATTENDING:
            inputs, options = made(name, DTYPES[dtype])
            with recorded() as names:
                Attending(call, options)(*inputs)
            assert emitted(names) == expected(name, call, DTYPES[dtype]), call


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_exported(name: str, dtype: str) -> None:
    for call in ATTENDING:
        with fake_cuda(eager=False):
            inputs, options = made(name, DTYPES[dtype])
            graph = torch.export.export(Attending(call, options), inputs, strict=False).graph
        operator = expected(name, call, DTYPES[dtype])  # exported, flex_attention would fill the matrix
        assert emitted_by_graph(graph) == (BLOCKED if operator == FLEX else operator), call


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SAMPLED else pytest.mark.long) for name in CASES]
)
def test_compiled(name: str) -> None:
    for call in ATTENDING:
        graphs: list[torch.fx.Graph] = []

        def keep(module: torch.fx.GraphModule, inputs: Any, graphs: list[torch.fx.Graph] = graphs) -> Any:
            graphs.append(module.graph)
            return module.forward

        torch._dynamo.reset()
        with fake_cuda(eager=False):
            inputs, options = made(name, torch.bfloat16)
            torch.compile(Attending(call, options), backend=keep, fullgraph=True)(*inputs)
        assert len(graphs) == 1
        assert emitted_by_graph(graphs[0]) == expected(name, call, torch.bfloat16), call


def test_doctor_judges_what_is_emitted() -> None:
    rows = {(row.option, row.dtype, row.call, row.mode): row.chosen for row in choices(DTYPES, "cuda")}
    for name, option in NAMED.items():
        for dtype, kind in DTYPES.items():
            for call in ATTENDING:
                operator = expected(name, call, kind)
                judged = {mode: OPERATORS[rows[option, dtype, call, mode]] for mode in ("eager", "compile", "export")}
                exported = BLOCKED if operator == FLEX else operator
                assert judged == {"eager": operator, "compile": operator, "export": exported}, (name, dtype, call)


@pytest.mark.parametrize("name", ["dropout", "dropout, window"])
def test_dropout_does_not_restrict_the_open_length_of_an_export(name: str) -> None:
    with fake_cuda(eager=False):
        inputs, options = made(name, torch.float32)
        length = torch.export.Dim("length", min=2)
        program = torch.export.export(
            Attending("attend", options), inputs, dynamic_shapes=(({2: length},) * 3), strict=False
        )
    (call,) = [node for node in program.graph.nodes if "attend_forward" in str(node.target)]
    assert call.args[-1] == "fused"


def test_too_many_weights_for_the_memory_efficient_kernels_are_dropped_by_blocked() -> None:
    spec = CallSpec(batch=1, heads=32, queries=1 << 13, dropout=0.1)
    few, many = judge(replace(spec, heads=31), torch.float32, "cuda"), judge(spec, torch.float32, "cuda")
    assert (few.selected, many.selected) == ("sdpa", "blocked")
    assert [reason[:8] for name in ("sdpa", "fused") for reason in many.refusals[name]] == ["dropout:", "dropout:"]
    assert judge(replace(spec, lse=True), torch.bfloat16, "cuda").selected == "fused", "flash numbers them otherwise"

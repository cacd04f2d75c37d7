"""ONNX Runtime on the CPU: the operator Attention of opset 23, and Microsoft's MultiHeadAttention, GroupQueryAttention.

Inputs and outputs are bound once: a repetition is one run of the graph. Operators that take only [B, T, H · D] get it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from attention_peers.cases import DECODE, FORWARD, Case
from attention_peers.exact import Array, Result, bits_of_bf16, of_bf16
from attention_peers.route import RefusedError, Route

Feeds = dict[str, np.ndarray]


class Peer:
    """The routes of ONNX Runtime."""

    def __init__(self, name: str, threads: int) -> None:
        self.options = onnxruntime.SessionOptions()
        self.options.intra_op_num_threads = threads
        self.options.inter_op_num_threads = 1
        self.options.log_severity_level = 4

    def versions(self) -> dict[str, str]:
        """What this environment has."""
        return {"onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__}

    def routes(self, case: Case) -> list[Callable[[dict[str, Array]], Route]]:
        """Every operator that can say the case."""
        if case.kind not in (FORWARD, DECODE):
            raise RefusedError(f"{case.kind}: only inference without options is built as a graph")
        batch, heads, kv_heads, queries, keys, width = case.sizes

        def attention(arrays: dict[str, Array]) -> Route:
            node = helper.make_node("Attention", ["q", "k", "v"], ["out"], is_causal=int(case.causal))
            return self._route("Attention", case, node, dict(arrays), lambda out: out)

        def folded(arrays: dict[str, Array]) -> Route:
            """The heads of a group as rows of one head: the same without a mask."""
            feeds = arrays | {"q": arrays["q"].reshape(batch, kv_heads, -1, width)}  # [B, Hkv, group·Q, D]
            node = helper.make_node("Attention", ["q", "k", "v"], ["out"])
            return self._route(
                "Attention, groups as rows", case, node, feeds, lambda out: out.reshape(arrays["q"].shape)
            )

        def multi_head(arrays: dict[str, Array]) -> Route:
            node = helper.make_node(
                "MultiHeadAttention", ["q", "k", "v"], ["out"],
                domain="com.microsoft", num_heads=heads, unidirectional=int(case.causal),
            )  # fmt: skip
            feeds = arrays | {"q": _merged(arrays["q"])}
            return self._route("MultiHeadAttention", case, node, feeds, lambda out: _split(out, heads))

        def group_query(arrays: dict[str, Array]) -> Route:
            names = ["q", "k", "v", "past_k", "past_v", "last", "total"]
            node = helper.make_node(
                "GroupQueryAttention", names, ["out", "present_k", "present_v"],
                domain="com.microsoft", num_heads=heads, kv_num_heads=kv_heads,
            )  # fmt: skip
            past = keys - queries
            feeds: Feeds = {"q": _merged(arrays["q"])}
            feeds |= {name: _merged(arrays[name][:, :, past:]) for name in "kv"}
            feeds |= {f"past_{name}": np.ascontiguousarray(arrays[name][:, :, :past]) for name in "kv"}
            feeds |= {"last": np.full(batch, keys - 1, np.int32), "total": np.array(keys, np.int32)}
            return self._route("GroupQueryAttention", case, node, feeds, lambda out: _split(out, heads))

        routes: list[Callable[[dict[str, Array]], Route]] = [attention]
        if kv_heads == heads:
            routes.append(multi_head)
        elif not case.causal:
            routes.append(folded)
        if case.causal or queries == 1:
            routes.append(group_query)
        return routes

    def _route(
        self, name: str, case: Case, node: Any, feeds: Feeds, shape: Callable[[np.ndarray], np.ndarray]
    ) -> Route:
        half = case.dtype == "bf16"
        session = onnxruntime.InferenceSession(_model(node, feeds, half), self.options, ["CPUExecutionProvider"])
        binding = session.io_binding()
        held = {key: bits_of_bf16(x) if half and x.dtype == np.float32 else x for key, x in feeds.items()}
        for key, x in held.items():
            binding.bind_ortvalue_input(key, _value(x))
        out = np.empty(feeds["q"].shape, np.uint16)
        if half:  # numpy has no bfloat16: the runtime writes into memory whose bits are read
            binding.bind_ortvalue_output("out", _bf16(out))
        else:
            binding.bind_output("out", "cpu")

        def read(_: Any) -> Result:
            return Result(shape(of_bf16(out) if half else binding.get_outputs()[0].numpy()))

        name = f"{name} between casts: it has no bfloat16 kernel" if half else name

        def run() -> int:
            session.run_with_iobinding(binding)
            return len(held)  # which the bound values lie on

        return Route(name, run, read)


def _value(x: np.ndarray) -> onnxruntime.OrtValue:
    return _bf16(x) if x.dtype == np.uint16 else onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x))


def _bf16(bits: np.ndarray) -> onnxruntime.OrtValue:
    """On top of the array, not a copy: who calls must keep it."""
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, TensorProto.BFLOAT16)


def _model(node: Any, feeds: Feeds, half: bool) -> bytes:
    """The operator alone; in bf16 in float32 between casts, for which alone there are kernels."""
    outer = TensorProto.BFLOAT16 if half else TensorProto.FLOAT
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT32 if x.dtype == np.int32 else outer, x.shape)
        for name, x in feeds.items()
    ]
    nodes = [node]
    if half:
        floats = {name for name, x in feeds.items() if x.dtype == np.float32}
        before = [helper.make_node("Cast", [name], [f"{name}_float"], to=TensorProto.FLOAT) for name in sorted(floats)]
        names = [f"{name}_float" if name in floats else name for name in node.input]
        del node.input[:]
        node.input.extend(names)
        node.output[0] = "out_float"
        nodes = [*before, node, helper.make_node("Cast", ["out_float"], ["out"], to=TensorProto.BFLOAT16)]
    graph = helper.make_graph(nodes, "attention", inputs, [helper.make_tensor_value_info("out", outer, None)])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def _merged(x: Array) -> np.ndarray:
    batch, heads, length, width = x.shape
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3).reshape(batch, length, heads * width))  # [B, T, H·D]


def _split(x: np.ndarray, heads: int) -> np.ndarray:
    batch, length, _ = x.shape
    return x.reshape(batch, length, heads, -1).transpose(0, 2, 1, 3)  # [B, H, T, D]

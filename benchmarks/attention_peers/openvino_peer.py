"""OpenVINO on the CPU: ScaledDotProductAttention of opset 13, with bound tensors of static shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import openvino  # pyright: ignore[reportMissingImports]
from openvino import opset13  # pyright: ignore[reportMissingImports]

from attention_peers.cases import DECODE, FORWARD, Case
from attention_peers.exact import Array, Result, bits_of_bf16, of_bf16
from attention_peers.route import RefusedError, Route


class Peer:
    """The routes of OpenVINO."""

    def __init__(self, name: str, threads: int) -> None:
        self.core = openvino.Core()
        self.settings = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
        # Without it bf16 tensors would go through a reference kernel, a hundred times slower than float32.
        self.has_bf16 = "BF16" in self.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")

    def versions(self) -> dict[str, str]:
        """What this environment has."""
        return {"openvino": openvino.__version__}

    def routes(self, case: Case) -> list[Callable[[dict[str, Array]], Route]]:
        """The operator as it is; with grouped heads, which it does not take, two ways around that."""
        if case.kind not in (FORWARD, DECODE):
            raise RefusedError(f"{case.kind}: only inference without options is built as a graph")
        batch, heads, kv_heads, _, keys, width = case.sizes

        def attention(arrays: dict[str, Array]) -> Route:
            return self._route("SDPA", case, arrays, arrays["q"].shape, lambda x: x)

        def folded(arrays: dict[str, Array]) -> Route:
            """The heads of a group as rows of one head: the same without a mask."""
            return self._route("SDPA, groups as rows", case, arrays, (batch, kv_heads, -1, width), lambda x: x)

        def repeated(arrays: dict[str, Array]) -> Route:
            def repeat(x: Any) -> Any:
                wide = opset13.unsqueeze(x, opset13.constant([2], dtype=np.int64))
                shape = opset13.constant([batch, kv_heads, heads // kv_heads, keys, width], dtype=np.int64)
                wide = opset13.broadcast(wide, shape, broadcast_spec="BIDIRECTIONAL")
                return opset13.reshape(wide, opset13.constant([batch, heads, keys, width], dtype=np.int64), False)

            return self._route("SDPA, keys repeated", case, arrays, arrays["q"].shape, repeat)

        if kv_heads == heads:
            return [attention]
        return [repeated] if case.causal else [folded, repeated]

    def _route(
        self, name: str, case: Case, arrays: dict[str, Array], q_shape: tuple[int, ...], repeat: Callable[[Any], Any]
    ) -> Route:
        half = case.dtype == "bf16"
        outer = openvino.Type.bf16 if half else openvino.Type.f32
        inner = openvino.Type.bf16 if half and self.has_bf16 else openvino.Type.f32
        feeds = [arrays["q"].reshape(q_shape), arrays["k"], arrays["v"]]
        parameters = [opset13.parameter(list(x.shape), outer) for x in feeds]
        q, k, v = (opset13.convert(x, inner) if inner != outer else x for x in parameters)
        out = opset13.scaled_dot_product_attention(q, repeat(k), repeat(v), causal=case.causal)
        out = opset13.convert(out, outer) if inner != outer else out
        settings = self.settings | {"INFERENCE_PRECISION_HINT": "bf16" if inner == openvino.Type.bf16 else "f32"}
        request = self.core.compile_model(openvino.Model([out], parameters), "CPU", settings).create_infer_request()
        for at, x in enumerate(feeds):
            tensor = openvino.Tensor(outer, openvino.Shape(list(x.shape)))
            if half:
                tensor.data.view(np.uint16)[...] = bits_of_bf16(x)  # numpy has no bfloat16: only the bits are right
            else:
                tensor.data[...] = x
            request.set_input_tensor(at, tensor)

        def read(_: Any) -> Result:
            found = request.get_output_tensor(0).data
            found = of_bf16(found.view(np.uint16)) if half else found
            return Result(found.reshape(arrays["q"].shape))

        name = f"{name} in float32: this CPU has no bf16 arithmetic" if half and not self.has_bf16 else name
        return Route(name, request.infer, read)

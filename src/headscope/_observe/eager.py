"""Functions for which torch.compile breaks its graph.

Imported when a graph is compiled, because ``disable_compiler`` loads torch's compiler.
"""

from __future__ import annotations

from headscope._observe import differentiable as _differentiable
from headscope._observe import measure as _measure
from headscope._support.compiler import disable_compiler

measure = disable_compiler(
    _measure.measure_call, reason="headscope: observe reads values, which a compiled graph does not have"
)
measure_with_gradients = disable_compiler(
    _differentiable.measure_with_gradients,
    reason="headscope: observe reads values, which a compiled graph does not have",
)

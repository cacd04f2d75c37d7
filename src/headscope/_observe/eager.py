"""What torch.compile leaves its graph for.

Imported where a graph is made, because ``disable_compiler`` loads torch's compiler.
"""

from __future__ import annotations

from headscope._observe import measure as _measure
from headscope._support.compiler import disable_compiler

measure = disable_compiler(
    _measure.measure, reason="headscope: observe reads values, which a compiled graph does not have"
)

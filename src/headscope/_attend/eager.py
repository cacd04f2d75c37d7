"""Functions for which torch.compile breaks its graph.

Imported when a graph is compiled, because ``disable_compiler`` loads torch's compiler.
"""

from __future__ import annotations

from headscope._attend import vmap
from headscope._support.compiler import disable_compiler

run_each_entry = disable_compiler(
    vmap.run_each_entry,
    reason="headscope: torch cannot trace a torch.func function with a variable number of arguments",
)

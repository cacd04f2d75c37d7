"""What torch.compile leaves its graph for.

Imported where a graph is made, because ``torch.compiler.disable`` loads torch's compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headscope._attend import vmap

run_each_entry: Callable[..., tuple[Any, Any]] = torch.compiler.disable(  # pyright: ignore[reportAssignmentType]
    vmap.run_each_entry,
    reason="headscope: torch cannot trace a function of torch.func with any number of arguments",
)

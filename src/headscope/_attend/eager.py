"""What torch.compile leaves its graph for: imported where one is made, for ``torch.compiler`` takes long to load."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from headscope import functional
from headscope._attend import operators
from headscope.stats import HeadStats

observe: Callable[..., HeadStats] = torch.compiler.disable(  # pyright: ignore[reportAssignmentType]  # not as declared
    functional._observe, reason="headscope: observe looks at numbers, of which a compiled graph has none"
)
one_by_one: Callable[..., tuple[Any, Any]] = torch.compiler.disable(  # pyright: ignore[reportAssignmentType]
    operators._one_by_one, reason="headscope: torch cannot trace a function of torch.func with any number of arguments"
)

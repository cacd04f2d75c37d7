"""What torch.compile leaves its graph for.

Imported where a graph is made, because ``torch.compiler.disable`` loads torch's compiler.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headscope._observe import measure as _measure
from headscope.stats import HeadStats

measure: Callable[..., HeadStats] = torch.compiler.disable(  # pyright: ignore[reportAssignmentType]  # not as declared
    _measure.measure, reason="headscope: observe looks at numbers, of which a compiled graph has none"
)

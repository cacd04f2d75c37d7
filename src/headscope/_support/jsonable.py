"""Values that JSON can represent."""

from __future__ import annotations

import math
from typing import Any


def plain(value: Any) -> Any:
    """Return the value with lists for tuples and None for NaN and infinity, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value

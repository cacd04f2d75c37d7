"""Linear layers by the fastest route, as a shipped table selects it, and the projections of attention modules."""

from headscope._linear.layer import Linear, check_kind, in_heads, is_linear, is_plain, linear, unknown_projections
from headscope._linear.projections import PROJECTIONS, QKV, check_own_parameters

__all__ = [
    "PROJECTIONS",
    "QKV",
    "Linear",
    "check_kind",
    "check_own_parameters",
    "in_heads",
    "is_linear",
    "is_plain",
    "linear",
    "unknown_projections",
]

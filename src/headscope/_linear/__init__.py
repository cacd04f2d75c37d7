"""Linear layers by the fastest route in a shipped table, and the projections of attention modules."""

from headscope._linear.layer import (
    Linear,
    check_kind,
    in_heads,
    is_linear,
    is_plain,
    linear,
    unknown_projections,
    weight_and_bias,
)
from headscope._linear.names_and_heads import PROJECTIONS, QKV, check_own_parameters, merge_heads, split_heads
from headscope._linear.reproducible import reproducible_linear, reproducible_sigmoid

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
    "merge_heads",
    "reproducible_linear",
    "reproducible_sigmoid",
    "split_heads",
    "unknown_projections",
    "weight_and_bias",
]

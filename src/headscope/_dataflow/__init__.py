"""Attention that a module writes out, found by following the axes of its tensors from operation to operation."""

from headscope._dataflow.attention import WrittenAttention
from headscope._dataflow.follow import Follower

__all__ = ["Follower", "WrittenAttention"]

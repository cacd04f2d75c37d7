"""Attention that a module writes out, found by following the axes of its tensors from operation to operation."""

from headscope._dataflow.attention import WrittenAttention
from headscope._dataflow.axes import Piece, Source
from headscope._dataflow.completion import same_tokens
from headscope._dataflow.follow import Follower
from headscope._dataflow.roles import Tokens

__all__ = ["Follower", "Piece", "Source", "Tokens", "WrittenAttention", "same_tokens"]

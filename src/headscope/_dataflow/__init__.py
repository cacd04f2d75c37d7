"""Attention that a module writes out, found by following the axes of its tensors from operation to operation."""

from headscope._dataflow.attention import WrittenAttention, joined_heads
from headscope._dataflow.axes import Axis, Piece, Source
from headscope._dataflow.completion import end_in_others, same_tokens
from headscope._dataflow.follow import Follower
from headscope._dataflow.roles import Product, Tokens
from headscope._dataflow.table import are_of_several_models, is_followed

__all__ = [
    "Axis",
    "Follower",
    "Piece",
    "Product",
    "Source",
    "Tokens",
    "WrittenAttention",
    "are_of_several_models",
    "end_in_others",
    "is_followed",
    "joined_heads",
    "same_tokens",
]

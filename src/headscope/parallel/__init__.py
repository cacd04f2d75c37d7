"""Attention over several processes: heads split over ranks, and sequences split over ranks."""

from headscope.parallel._context import context
from headscope.parallel._context_attention import context_attention
from headscope.parallel._places import Places
from headscope.parallel._tensor import tensor_parallel

__all__ = ["Places", "context", "context_attention", "tensor_parallel"]

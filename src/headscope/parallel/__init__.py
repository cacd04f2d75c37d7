"""Attention over several processes: sequences split over ranks."""

from headscope.parallel._context import context
from headscope.parallel._context_attention import context_attention
from headscope.parallel._places import Places

__all__ = ["Places", "context", "context_attention"]

"""Attention over several processes: heads split over ranks."""

from headscope.parallel._tensor import tensor_parallel

__all__ = ["tensor_parallel"]

"""MultiHeadAttention: the projections around ``attention``."""

from headscope.module._multi_head import MultiHeadAttention

__all__ = ["MultiHeadAttention"]

"""headscope's attention as one of transformers' implementations."""

from __future__ import annotations

from headscope._intercept import register_attention

__all__ = ["register_transformers"]


def register_transformers(name: str = "headscope") -> None:
    """Register headscope's attention with transformers, for ``attn_implementation=name``.

    The function and its mask function are registered under the same name: without the second, transformers does not
    pass a mask to the function, and padding is silently lost.

    Raises:
        ImportError: transformers is not installed, or older than 5.

    Examples:
        >>> from headscope.watching import register_transformers
        >>> register_transformers()
        >>> from transformers import AttentionInterface
        >>> "headscope" in AttentionInterface()
        True
    """
    register_attention(name)

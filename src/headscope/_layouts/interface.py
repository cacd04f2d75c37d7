"""The interface of the attention module that the conversions read, write or build."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from headscope.positions import ALiBi, RelativeBias, Rotary


class AttentionModule(Protocol):
    """``headscope.MultiHeadAttention``, which is above this package."""

    embed_dim: int
    num_heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    kdim: int
    vdim: int
    scale: float
    softcap: float | None
    rotary: Rotary | None

    @property
    def position_bias(self) -> ALiBi | RelativeBias | None:
        """The bias by distance."""
        ...

    @property
    def qk_norm(self) -> str | None:
        """The kind of the norms of q and k."""
        ...

    @property
    def sinks(self) -> nn.Parameter | None:
        """[H]"""
        ...

    def projection(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return the weight and the bias of "q", "k", "v" or "out"."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters with their paths."""
        ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Set the parameters."""
        ...

    def train(self, mode: bool = True) -> Any:
        """Set the training mode."""
        ...

"""What makes attention calls alike, so that one description serves all of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headscope._intercept import masks
from headscope._intercept.intercepted_call import Kind
from headscope._support.fingerprint import Fingerprint
from headscope.masks import Mask

ABSENT = object()
"""What is passed as None is not absent."""
_COPIED = 1 << 16  # bytes of the largest mask that is compared with a copy


@dataclass(eq=False)
class ReadMask:
    """The mask tensor of a call, as ``masks.split`` reads it.

    Attributes:
        tensor: the mask.
        contents: a copy, or a fingerprint, of what it held then.
        visible, bias: the result.
    """

    tensor: Tensor
    contents: Tensor | Fingerprint
    visible: Mask | None
    bias: Tensor | None

    @staticmethod
    def of(mask: Tensor) -> ReadMask:
        """Read a mask."""
        is_small = mask.numel() * mask.element_size() <= _COPIED and not mask.is_neg()
        contents = mask.detach().clone() if is_small else Fingerprint(mask)
        return ReadMask(mask, contents, *masks.split(mask))

    def is_of(self, mask: Tensor) -> bool:
        """Return whether this is the same mask, unchanged."""
        if mask is not self.tensor:
            return False
        if isinstance(self.contents, Tensor):
            return torch.equal(self.contents, mask.detach())
        return self.contents.matches(mask)


class Like(NamedTuple):
    """What determines an attention call, except the numbers in q, k and v.

    Attributes:
        parts: all but the numbers of a mask.
        kind: "self" or "cross", if the call determines it.
        mask: a mask tensor; None: there is none.
    """

    parts: Hashable
    kind: Kind | None = None
    mask: ReadMask | None = None


def attribute_of(module: nn.Module, name: str) -> Any:
    """Return an attribute of a module, or of its class: to ask ``nn.Module`` for one that it lacks takes longer."""
    own = vars(module)
    if name in own:
        return own[name]
    found = getattr(type(module), name, ABSENT)
    return getattr(module, name, ABSENT) if hasattr(found, "__get__") else found

"""Weights from other modules and to them: which key holds what, and in what form.

``MultiHeadAttention.from_module(module)`` and ``.from_state_dict(state, layout)`` make one of ours; ``to_state_dict``
goes the other way. Nothing is unpickled: a state is a mapping of tensors or arrays, or a safetensors file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from headscope._layouts import LAYOUTS, State, convert_module, convert_state, export_state
from headscope.module import MultiHeadAttention

__all__ = ["from_module", "from_state_dict", "known", "to_state_dict"]

Built = TypeVar("Built", bound=MultiHeadAttention)


def known() -> dict[str, str]:
    """Return the names of the layouts, and the modules that have each."""
    return {layout.name: layout.of for layout in LAYOUTS.values()}


def from_module(
    module: nn.Module, layout: str | None = None, *, into: type[Built] = MultiHeadAttention, **options: Any
) -> Built:
    """Build a ``MultiHeadAttention`` with copies of another module's weights, in its dtype, on its device, in its mode.

    Args:
        module: of a class that ``known`` layouts have; or of any class, where ``layout`` says which keys it has, or
            its keys are those of a tutorial or of timm and leave no doubt.
        layout: one of ``known()``.
        into: the class to make.
        options: of ``MultiHeadAttention``, where they are not to be read from the module, as ``num_heads``, ``rotary``.

    What a module's forward does around its attention (dropout of the output, residual, norm) is not part of it, and
    neither are its hooks.

    Raises:
        TypeError: it is no module, or already ours.
        ValueError: no layout is known for it, or its weights do not fit; the message says which keys, and what is
            known. Or no ``layout`` is given, and something else than its weights may say what it computes: a forward
            of its own, in its class or set on it or on a part; a projection that is more than a linear, or has hooks.
    """
    return convert_module(module, layout, into, MultiHeadAttention, options)


def from_state_dict(
    state: State | str | Path, layout: str, *, prefix: str = "", into: type[Built] = MultiHeadAttention, **options: Any
) -> Built:
    """Build a ``MultiHeadAttention`` with copies of the weights in a state dict, in their dtype and on their device.

    Args:
        state: tensors or arrays by key; or the path of a safetensors file, or of the ``.index.json`` of several, of
            which only what begins with ``prefix`` is read.
        layout: one of ``known()``.
        prefix: what the keys of this one attention begin with, as ``"model.layers.0.self_attn."``; other keys are left
            alone.
        into: the class to make.
        options: of ``MultiHeadAttention``: what weights do not tell, as ``num_heads``, and ``rotary`` of a layout that
            has it. Sizes and biases come from the weights.

    Raises:
        TypeError: a state or an option of the wrong kind.
        ValueError: an unknown layout, keys that are missing or unexpected, sizes that do not fit, an option that is
            missing or contradicts the weights, a ``rotary`` that the layout does not have, an index that names what
            its files do not have.
        FileNotFoundError: there is no such file.
    """
    return convert_state(state, layout, prefix, into, options)


def to_state_dict(module: MultiHeadAttention, layout: str, *, prefix: str = "") -> dict[str, Tensor]:
    """Return copies of a module's weights under the keys of a layout.

    A bias that the layout always has is zero where the module has none. A state dict holds weights alone: the other
    side must set the number of heads, the scale, base and scaling of rotary, and dropout.

    Args:
        layout: one of ``known()``.
        prefix: put before each key.

    Raises:
        ValueError: an unknown layout; an option of the module that this layout has no place for; a forward of its own,
            in its class or set on it or on a part; or a part with hooks.
    """
    return export_state(module, layout, prefix, MultiHeadAttention)

"""Weights from other modules and to them: which key holds what, and in what form.

``MultiHeadAttention.from_module(module)`` and ``.from_state_dict(state, layout)`` make a headscope module;
``to_state_dict`` converts in the other direction. headscope never unpickles: a state is a mapping of tensors or arrays,
or a safetensors file.
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
    """Return the names of the layouts, and the modules that use each.

    Examples:
        >>> from headscope import layouts
        >>> layouts.known()["torch"]
        'nn.MultiheadAttention'
    """
    return {layout.name: layout.of for layout in LAYOUTS.values()}


def from_module(
    module: nn.Module, layout: str | None = None, *, into: type[Built] = MultiHeadAttention, **options: Any
) -> Built:
    """Build a ``MultiHeadAttention`` with copies of another module's weights, in its dtype, on its device, in its mode.

    Args:
        module: of a class of the ``known`` layouts; or of any class, if ``layout`` specifies its keys, or its keys
            match those of a tutorial or of timm unambiguously.
        layout: one of ``known()``.
        into: the class to build.
        options: of ``MultiHeadAttention``, which replace those read from the module, such as ``num_heads``, ``rotary``.

    The result excludes what the module's forward does around its attention (dropout of the output, residual, norm), and
    its hooks. Of tutorial classes it does not read the dropout either, because their attributes do not show whether it
    drops weights or outputs: pass ``dropout=``.

    Raises:
        TypeError: it is not a module, or already headscope's.
        ValueError: no layout is known for it, or its weights do not fit; the message lists the keys and the known
            layouts. Or ``layout`` is missing, and its output may depend on more than its weights: its class overrides
            forward, a forward is set on it or a part, or a projection is more than a linear or has hooks.

    Examples:
        >>> from torch import nn
        >>> from headscope import layouts
        >>> module = layouts.from_module(nn.MultiheadAttention(8, 2))
        >>> module.embed_dim, module.num_heads
        (8, 2)
    """
    return convert_module(module, layout, into, MultiHeadAttention, options)


def from_state_dict(
    state: State | str | Path, layout: str, *, prefix: str = "", into: type[Built] = MultiHeadAttention, **options: Any
) -> Built:
    """Build a ``MultiHeadAttention`` with copies of the weights in a state dict, in their dtype and on their device.

    Args:
        state: tensors or arrays by key; or the path of a safetensors file, or of the ``.index.json`` of several, of
            which only keys that begin with ``prefix`` are read.
        layout: one of ``known()``.
        prefix: the start of the keys of this attention, such as ``"model.layers.0.self_attn."``; other keys are
            ignored.
        into: the class to build.
        options: of ``MultiHeadAttention``: those that the weights do not determine, such as ``num_heads``, and
            ``rotary`` of a layout that has it. The weights determine sizes and biases.

    Raises:
        TypeError: a state or an option of the wrong kind.
        ValueError: an unknown layout, keys that are missing or unexpected, sizes that do not fit, an option that is
            missing or contradicts the weights, a ``rotary`` that the layout does not have, an index that lists keys
            that its files lack.
        FileNotFoundError: the file does not exist.

    Examples:
        >>> from torch import nn
        >>> from headscope import layouts
        >>> state = nn.MultiheadAttention(8, 2).state_dict()
        >>> layouts.from_state_dict(state, "torch", num_heads=2).kv_heads
        2
    """
    return convert_state(state, layout, prefix, into, options)


def to_state_dict(module: MultiHeadAttention, layout: str, *, prefix: str = "") -> dict[str, Tensor]:
    """Return copies of a module's weights under the keys of a layout.

    A bias that the layout requires is zero if the module lacks it. A state dict holds weights only: the other side must
    set the number of heads, the scale, base and scaling of rotary, and dropout.

    Args:
        module: the module to export; it does not change.
        layout: one of ``known()``.
        prefix: put before each key.

    Raises:
        ValueError: an unknown layout; an option of the module that this layout lacks; a forward that its class
            overrides or that is set on it or a part; or a part with hooks.

    Examples:
        >>> from headscope import MultiHeadAttention, layouts
        >>> list(layouts.to_state_dict(MultiHeadAttention(8, 2), "torch"))
        ['in_proj_weight', 'in_proj_bias', 'out_proj.weight', 'out_proj.bias']
    """
    return export_state(module, layout, prefix, MultiHeadAttention)

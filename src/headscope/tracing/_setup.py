"""The subject of a trace: a module with its inputs or their sizes, checked, run once, and described."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from headscope._attend import call
from headscope._attend.call import FLOATS
from headscope._support.arguments import kind
from headscope._support.scalar_options import check_scale, check_softcap
from headscope.masks import Band, Mask, as_mask, causal, check_mask
from headscope.module import MultiHeadAttention, check_not_split, check_place
from headscope.positions import check_positions

Context = Tensor | tuple[Tensor, Tensor] | None
Source = Literal["self", "cross", "pair"]


@dataclass(frozen=True)
class Setting:
    """A traced call.

    Attributes:
        module: the module.
        x: the source of the queries, [B, Q, E].
        k_from: the source of the keys, [B, K, kdim].
        v_from: the source of the values, [B, K, vdim].
        batched: whether the caller's x has a batch axis.
        source: "self", "cross" (one context), or "pair" (one for the keys, one for the values).
        mask: the visible pairs, or None for all.
        mask_code: lines of code that compute ``visible``.
        bias: added to the scores, or None.
        positions: of the tokens, [Q] or [B, Q]; None for 0, 1, 2, …
        returned: the module's own output; None without values.
        x_code: lines of code that make the inputs; empty if the reader has them.
    """

    module: MultiHeadAttention
    x: Tensor
    k_from: Tensor
    v_from: Tensor
    batched: bool
    source: Source
    mask: Mask | None
    mask_code: tuple[str, ...]
    bias: Tensor | None
    positions: Tensor | None
    returned: Tensor | None
    x_code: tuple[str, ...] = ()

    @property
    def values(self) -> bool:
        """Whether there are values, or only sizes."""
        return self.returned is not None

    @property
    def output(self) -> Tensor | None:
        """The module's own output, [B, Q, E]."""
        return self.returned if self.returned is None or self.batched else self.returned[None]

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """B, H, Q, K of the weights."""
        batch = next(
            (t.shape[0] for t in (self.x, self.k_from, self.v_from) if t.shape[0] != 1), 1
        )  # batch axes broadcast
        return batch, self.module.num_heads, self.x.shape[1], self.k_from.shape[1]

    @property
    def kv_letter(self) -> str:
        """The letter of the key/value heads; H where there are as many as query heads."""
        return "H" if self.module.kv_heads == self.module.num_heads else "Hkv"

    @property
    def value_letter(self) -> str:
        """The letter of the values' head width; D where it is that of queries and keys."""
        return "D" if self.module.v_head_dim == self.module.head_dim else "Dv"

    def places(self) -> Tensor:
        """Return the positions of the tokens, [Q] or [B, Q]."""
        return torch.arange(self.x.shape[1], device="cpu") if self.positions is None else self.positions

    def size_code(self, batch: int) -> str:
        """Return a batch size in code, with a comma: by letter, or by number where it differs from that of x."""
        return "" if not self.batched else "B, " if batch == self.x.shape[0] else f"{batch}, "


@dataclass(frozen=True)
class ScoreOptions:
    """The caller's options of the scores: mask, bias, and the positions of the tokens."""

    mask: Mask | Tensor | None
    causal: bool
    bias: Tensor | None
    positions: Tensor | None = None

    def as_mask(self) -> Mask | None:
        """Return mask and ``causal`` as one mask."""
        mask = as_mask(self.mask)
        if not self.causal or is_causal(mask):
            return mask
        return causal() if mask is None else causal() & mask

    def code(self, batch: str, device: torch.device) -> tuple[str, ...]:
        """Return the lines that compute ``visible``; ``batch`` is the code of the batch size, "" if there is none."""
        if self.mask is None and not self.causal:
            return ()
        where = "" if device.type in ("cpu", "meta") else ", device=x.device"
        future = f"visible = torch.ones(Q, K{where}).tril(K - Q).bool()"
        if self.mask is None or is_causal(self.mask):
            return (future,)
        own = "mask"
        if isinstance(self.mask, Mask):
            own = f"mask.dense({batch or '1, '}H, Q, K{where})" + ("" if batch else "[0]")
        return (future, f"visible = visible & {own}") if self.causal else (f"visible = {own}",)


def is_causal(mask: object) -> bool:
    """Return whether a mask is ``causal()``."""
    return isinstance(mask, Band) and (mask.left, mask.right, mask.offset) == (None, 0, None)


def prepare_values(module: MultiHeadAttention, x: Tensor, context: Context, options: ScoreOptions) -> Setting:
    """Check a module's inputs and run it once, as in eval."""
    check_not_split(module)
    k_from, v_from = module._sources(x, context)
    for name, tensor in (("x", x), ("context", k_from), ("context", v_from)):
        _check_input(name, tensor, module)
    if x.is_meta:
        return prepare_sizes(module, (x, k_from, v_from), _source_of(context), options)
    output = _run_module(module, x, context, options)
    if not isinstance(output, Tensor):
        raise TypeError(f"module: {type(module).__name__} returned {kind(output)}, expected a tensor")
    return _describe_setting(module, (x, k_from, v_from), _source_of(context), options, output)


def prepare_sizes(
    module: MultiHeadAttention,
    inputs: tuple[Tensor, Tensor, Tensor],
    source: Source,
    options: ScoreOptions,
    code: tuple[str, ...] = (),
) -> Setting:
    """Check inputs on the meta device, without values: x, and the sources of keys and values."""
    x, k_from, v_from = inputs
    module._check_inputs(x, k_from, v_from)
    heads = [
        source.new_empty(*source.shape[:-2], number, source.shape[-2], width, device="meta")  # [B, H, length, D]
        for source, number, width in (
            (x, module.num_heads, module.head_dim),
            (k_from, module.kv_heads, module.head_dim),
            (v_from, module.kv_heads, module.v_head_dim),
        )
    ]
    call.check_qkv(*heads)
    check_place(module.rotary, module.position_bias, options.positions, None, cross=source != "self")
    options = (
        options
        if options.positions is None
        else replace(options, positions=check_positions(options.positions, heads[0]))
    )
    check_scale(module.scale, module.head_dim)
    check_softcap(module.softcap)
    setting = _describe_setting(module, inputs, source, options, None, code)
    if setting.mask is not None:
        held = setting.mask.tensors()
        check_mask(setting.mask, setting.sizes, held[0].device if held else x.device)
    if options.bias is not None:
        batch, number, queries, keys = setting.sizes
        call.check_bias(options.bias, (batch,) if setting.batched else (), (number, queries, keys), options.bias)
    return setting


def _describe_setting(
    module: MultiHeadAttention,
    inputs: tuple[Tensor, Tensor, Tensor],
    source: Source,
    options: ScoreOptions,
    output: Tensor | None,
    code: tuple[str, ...] = (),
) -> Setting:
    batched = inputs[0].ndim == 3
    x, k_from, v_from = inputs if batched else (tensor[None] for tensor in inputs)  # [B, length, width]
    positions = None if options.positions is None else options.positions.long()
    setting = Setting(
        module, x, k_from, v_from, batched, source, options.as_mask(), (), options.bias, positions, output, code
    )  # fmt: skip
    return replace(setting, mask_code=options.code(setting.size_code(setting.sizes[0]), x.device))


def _source_of(context: Context) -> Source:
    return "self" if context is None else "pair" if isinstance(context, tuple) else "cross"


def _check_input(name: str, tensor: object, module: MultiHeadAttention) -> None:
    weight, _ = module.projection("out")
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got {kind(tensor)}, expected a torch.Tensor")
    if tensor.is_nested:
        raise ValueError(f"{name}: is nested, expected an ordinary tensor; trace one of its sequences, {name}[0]")
    if tensor.dtype not in FLOATS:
        hint = "token ids go through an embedding first"
        raise TypeError(f"{name}: dtype is {kind(tensor)}, expected {kind(weight)}; {hint}")
    if tensor.dtype != weight.dtype and not torch.is_autocast_enabled(tensor.device.type):
        raise TypeError(f"{name}: dtype is {kind(tensor)}, the module has {kind(weight)}; convert one of them")
    if tensor.device != weight.device:
        raise ValueError(f"{name}: is on {tensor.device}, the module is on {weight.device}; move one of them")


def _run_module(module: MultiHeadAttention, x: Tensor, context: Context, options: ScoreOptions) -> object:
    """Return the module's own output, without dropout; a subclass may return anything."""
    modes = {part: part.training for part in module.modules()}
    try:
        module.eval()
        own = {} if options.positions is None else {"positions": options.positions}
        return module(x, context, mask=options.as_mask(), bias=options.bias, **own)
    finally:
        for part, training in modes.items():
            part.training = training

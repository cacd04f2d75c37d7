"""``nn.MultiheadAttention``, with the same arguments, on headscope's attention.

The class has torch's parameters, so state dicts convert both ways, and torch's conventions, which are the opposite of
headscope's in two places: True in a mask means *masked*, and the batch comes second unless ``batch_first=True``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from headscope import functional
from headscope._linear import check_own_parameters, linear, split_heads
from headscope._observe import LayerSums
from headscope._support.arguments import check_type, kind, shapes
from headscope._support.tensor_classes import check_no_causal_bias
from headscope._support.torch_state import is_traced
from headscope.masks import Band, Dense, KeyLengths, Mask

__all__ = ["MultiheadAttention", "replace"]


class MultiheadAttention(nn.MultiheadAttention):
    """``torch.nn.MultiheadAttention`` with headscope's attention: the same arguments, parameters and results.

    Shapes: as torch's. Without batch, query [L, E], key [S, kdim], value [S, vdim]; else [L, N, E] and so on, or
    [N, L, E] with ``batch_first=True``.

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as in
            ``torch.nn.MultiheadAttention``, with the same defaults.

    Differences from torch: a row without visible keys has weights 0 (its output is the output bias), never NaN; masks
    of different kinds combine without a warning; ``need_weights=False`` never builds an [L, S] matrix, with any mask.

    ``nn.TransformerEncoderLayer`` and ``nn.TransformerEncoder`` have a fused forward for inference that reads the
    weights of ``self_attn`` and does not call the attention module. They skip it for this class, because
    ``_qkv_same_embed_dim`` is False, as for separate projections.

    Raises:
        AssertionError, ValueError: sizes that torch refuses, with torch's messages.

    Examples:
        >>> import torch
        >>> from headscope import nn_compat
        >>> x = torch.randn(1, 3, 8)
        >>> out, weights = nn_compat.MultiheadAttention(8, 2, batch_first=True)(x, x, x)
        >>> out.shape, weights.shape  # the mean over heads
        (torch.Size([1, 3, 8]), torch.Size([1, 3, 3]))
    """

    _headscope_sums: LayerSums | None = None  # while a watch of compiled code is open: an instance has its own

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self._qkv_same_embed_dim = False

    def _reset_parameters(self) -> None:
        """Initialise as torch does: the packed weight as one matrix."""
        self._qkv_same_embed_dim = _optional(self.in_proj_weight) is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention) -> MultiheadAttention:
        """Return the same module, with the same parameters (not copies), in the same mode, without its hooks.

        Raises:
            ValueError: a weight is not a parameter, because it has a pruning mask or a parametrization; or its forward
                is not torch's.
        """
        check_own_parameters(module)
        if "forward" in vars(module) or type(module).forward not in (nn.MultiheadAttention.forward, cls.forward):
            raise ValueError(f"module: {type(module).__name__} overrides forward, expected nn.MultiheadAttention's")
        twin = cls(
            module.embed_dim, module.num_heads, module.dropout, module._parameters["in_proj_bias"] is not None,
            add_zero_attn=module.add_zero_attn, kdim=module.kdim, vdim=module.vdim, batch_first=module.batch_first,
            device="meta",
        )  # fmt: skip
        for name, parameter in module._parameters.items():  # bias_k and bias_v among them
            setattr(twin, name, parameter)
        twin.out_proj = module.out_proj
        return twin.train(module.training)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``query`` to ``key`` and ``value``.

        Args:
            query, key, value: as above, all with a batch or all without.
            key_padding_mask: [N, S], or [S] without batch: True = *masked*, or numbers that are added to the logits.
            need_weights: whether to return the weights too, [N, L, S]; memory is then quadratic. In training, the
                weights are those after dropout, as in torch.
            attn_mask: [L, S], or [N * num_heads, L, S]: True = *masked*, or numbers that are added to the logits.
            average_attn_weights: whether the returned weights are the mean over heads; else [N, num_heads, L, S].
            is_causal: a promise that ``attn_mask``, which is then required, is the causal mask (query i attends to keys
                up to i). Without ``need_weights`` the module applies the promise instead of reading the mask.

        Returns:
            (output, weights or None); weights have one more column for each of ``add_bias_kv`` and ``add_zero_attn``.

        Raises:
            TypeError, ValueError: an input or mask that does not fit; the message names argument, axis, got and
                expected.
        """
        _check_inputs(self, query, key, value)
        if is_causal and attn_mask is None:
            raise ValueError("is_causal: is a hint about attn_mask, which is None; pass the causal mask as well")
        batched, packed, cross = query.ndim == 3, query is key and key is value, query is not key
        if not batched:  # one entry, as torch reads it: the batch second
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        first = self.batch_first and batched
        q, k, v = self._project(query, key, value, packed, first)
        sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])  # N, H, L, S
        hidden = attn_mask, key_padding_mask if batched or key_padding_mask is None else key_padding_mask[None]
        _check_masks(*hidden, sizes)
        k, v, extra = self._more_keys(k, v)
        mask, bias = _to_mask_and_bias(*hidden, sizes, extra, hinted=is_causal and not need_weights)
        if self._headscope_sums is not None:
            self._headscope_sums.add(q, k, v, mask, bias, None, None, None, cross=cross)
        out, weights = self._attend(q, k, v, mask, bias, need_weights)
        out = out.permute((0, 2, 1, 3) if first else (2, 0, 1, 3)).flatten(2)  # [N, L, E] or [L, N, E]
        out = linear(out, self.out_proj.weight, self.out_proj.bias)
        if weights is not None:
            weights = weights.to(out.dtype).roll(-extra, -1)  # torch has its own keys last
            weights = weights.mean(1) if average_attn_weights else weights
        if batched:
            return out, weights
        return out.squeeze(1), None if weights is None else weights.squeeze(0)

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, packed: bool, first: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [N, H, L, D], k and v [N, H, S, D]."""
        weight, bias = _optional(self.in_proj_weight), _optional(self.in_proj_bias)
        if packed and weight is not None:
            heads = linear(query, weight, bias).unflatten(-1, (3, self.num_heads, self.head_dim))  # [N, L, 3, H, D]
            q, k, v = heads.permute((2, 0, 3, 1, 4) if first else (2, 1, 3, 0, 4)).unbind(0)  # each [N, H, L, D]
            return q, k, v
        each = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight) if weight is None else weight.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        projected = (
            linear(x if first else x.transpose(0, 1), w, b)
            for x, w, b in zip((query, key, value), each, biases, strict=True)
        )
        q, k, v = (split_heads(x, self.num_heads, self.head_dim) for x in projected)
        return q, k, v

    def _more_keys(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, int]:
        """Put ``bias_k`` and ``bias_v``, and zeros, before the keys of the tokens; also return how many they are."""
        before: list[tuple[Tensor, Tensor]] = []
        if self.bias_k is not None and self.bias_v is not None:
            own = (x.to(k.dtype).view(1, self.num_heads, 1, self.head_dim) for x in (self.bias_k, self.bias_v))
            before.append((next(own), next(own)))
        if self.add_zero_attn:
            before.append((k.new_zeros(1, 1, 1, 1), v.new_zeros(1, 1, 1, 1)))
        for one_k, one_v in reversed(before):
            row = (*k.shape[:2], 1, self.head_dim)  # [N, H, 1, D]
            k, v = torch.cat([one_k.expand(row), k], 2), torch.cat([one_v.expand(row), v], 2)
        return k, v, len(before)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, bias: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Return the heads' outputs [N, H, L, D], and the weights [N, H, L, S] if ``need_weights``."""
        dropout = self.dropout if self.training else 0.0
        if not need_weights:
            return functional.attention(q, k, v, mask=mask, bias=bias, dropout=dropout), None
        weights = functional.weights(q, k, mask=mask, bias=bias)
        if not dropout:
            return functional.attention(q, k, v, mask=mask, bias=bias), weights
        if torch.compiler.is_compiling():  # which does not support a fork of the generator
            weights = F.dropout(weights, dropout)
            return (weights @ v.to(weights.dtype)).to(v.dtype), weights
        with torch.random.fork_rng([q.device] if q.is_cuda else []):
            weights = F.dropout(weights, dropout)
        # the generator has its earlier state: the same weights are dropped again, and a watch records the call
        return functional.attention(q, k, v, mask=mask, bias=bias, dropout=dropout, backend="reference"), weights


def replace(model: nn.Module) -> list[str]:
    """Replace each ``nn.MultiheadAttention`` in a model by a ``MultiheadAttention`` with the same parameters.

    An ``nn.TransformerEncoder`` in it stops making nested tensors of padded input, which only torch's fused layers
    support.

    Returns:
        The names of the modules that were replaced, as in ``model.named_modules()``.

    Raises:
        TypeError: the model is itself an ``nn.MultiheadAttention``, which cannot be replaced in place.
        ValueError: see ``MultiheadAttention.from_torch``; nothing is replaced then.

    Examples:
        >>> from torch import nn
        >>> from headscope import nn_compat
        >>> nn_compat.replace(nn.TransformerEncoderLayer(8, 2))
        ['self_attn']
    """
    if _is_torchs(model):
        raise TypeError(
            "model: expected a model that contains nn.MultiheadAttention, got one itself; use "
            "MultiheadAttention.from_torch"
        )
    places = list(_places(model))
    twins: dict[nn.MultiheadAttention, MultiheadAttention] = {}  # a shared module stays shared
    for place in places:
        twins[place.module] = twins.get(place.module) or MultiheadAttention.from_torch(place.module)
    for place in places:
        setattr(place.parent, place.name, twins[place.module])
    for each in model.modules():
        if isinstance(each, nn.TransformerEncoder):
            each.use_nested_tensor = False
    return [place.path for place in places]


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of one of torch's modules: its parent, its name there, and its path in the model."""

    parent: nn.Module
    name: str
    path: str
    module: nn.MultiheadAttention


def _places(model: nn.Module) -> Iterator[_Place]:
    """Yield the places of torch's modules in a model."""
    for path, parent in model.named_modules():
        for name, child in parent._modules.items():  # by every name that it has
            if _is_torchs(child):
                yield _Place(parent, name, f"{path}.{name}".lstrip("."), child)


def _is_torchs(module: nn.Module | None) -> TypeGuard[nn.MultiheadAttention]:
    """Return whether it is torch's own class; a parametrization makes a subclass of it."""
    own = type(module)
    if module is not None and parametrize.is_parametrized(module):
        own = own.__base__
    return own is nn.MultiheadAttention


def _optional(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor that may be None, though torch annotates it as a tensor."""
    return tensor


def _check_inputs(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> None:
    inputs = {"query": query, "key": key, "value": value}
    for name, x in inputs.items():
        check_type(name, x, Tensor, "a torch.Tensor")
        if x.is_nested:
            raise TypeError(
                f"{name}: is a nested tensor, expected a padded one and key_padding_mask; nn.TransformerEncoder "
                "makes nested tensors unless it was created with enable_nested_tensor=False or converted by "
                "replace()"
            )
    if query.ndim not in (2, 3):
        raise ValueError(f"query: has {query.ndim} axes, expected 2 ([L, E]) or 3 (with a batch); {shapes(**inputs)}")
    for (name, x), width in zip(inputs.items(), (module.embed_dim, module.kdim, module.vdim), strict=True):
        if x.ndim != query.ndim:
            raise ValueError(f"{name}: has {x.ndim} axes, query has {query.ndim}; {shapes(**inputs)}")
        if x.shape[-1] != width:
            raise ValueError(f"{name}: axis {x.ndim - 1} (E) is {x.shape[-1]}, expected {width}; {shapes(**inputs)}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"value: its batch and length differ from those of key; {shapes(**inputs)}")
    axis = 0 if module.batch_first else 1
    if query.ndim == 3 and key.shape[axis] != query.shape[axis]:
        raise ValueError(
            f"key: axis {axis} (N) is {key.shape[axis]}, query has {query.shape[axis]}; "
            f"batch_first is {module.batch_first}; {shapes(**inputs)}"
        )


def _check_masks(attn_mask: Tensor | None, padding: Tensor | None, sizes: tuple[int, int, int, int]) -> None:
    batch, heads, queries, keys = sizes
    expected = {
        "attn_mask": (attn_mask, {2: [queries, keys], 3: [batch * heads, queries, keys]}, "[L, S] or [N * H, L, S]"),
        "key_padding_mask": (padding, {2: [batch, keys]}, "[N, S], or [S] without batch"),
    }
    for name, (mask, allowed, axes) in expected.items():
        if mask is None:
            continue
        check_no_causal_bias(name, mask, "pass a boolean tensor (True = masked)")
        text = "a tensor of bool (True = masked) or of a floating type"
        check_type(name, mask, Tensor, text)
        if mask.dtype != torch.bool and not mask.is_floating_point():
            raise TypeError(f"{name}: got {kind(mask)}, expected {text}")
        if list(mask.shape) != allowed.get(mask.ndim):
            shapes_expected = " or ".join(map(str, allowed.values()))
            raise ValueError(f"{name}: is {list(mask.shape)}, expected {axes}: {shapes_expected}")


def _to_mask_and_bias(
    attn_mask: Tensor | None, padding: Tensor | None, sizes: tuple[int, int, int, int], extra: int, *, hinted: bool
) -> tuple[Mask | None, Tensor | None]:
    """Convert torch's masks (True = masked, or numbers to add); ``extra`` keys come first, always visible."""
    mask: Mask | None = None
    bias: Tensor | None = None
    if hinted:
        mask, attn_mask = Band(None, 0, offset=extra), None
    elif attn_mask is not None and attn_mask.ndim == 3:
        attn_mask = attn_mask.unflatten(0, sizes[:2])  # [N, H, L, S]
    if padding is not None:
        padding = _as_boolean(padding)
        if (rows := _lengths(padding)) is not None:
            mask, padding = _and(mask, KeyLengths(rows + extra)), None
        else:
            padding = padding[:, None, None]  # [N, 1, 1, S]
    for hidden in (attn_mask, padding):
        if hidden is None:
            continue
        hidden = F.pad(hidden, (extra, 0)) if extra else hidden  # False, or 0: every key is visible
        if hidden.dtype == torch.bool:
            mask = _and(mask, Dense(~hidden))
        else:
            bias = hidden if bias is None else bias + hidden
    return mask, bias


def _and(mask: Mask | None, other: Mask) -> Mask:
    """Return the conjunction of both; two tensors become one, which every backend reads."""
    if isinstance(mask, Dense) and isinstance(other, Dense):
        return Dense(mask.tensor & other.tensor)
    return other if mask is None else mask & other


def _as_boolean(padding: Tensor) -> Tensor:
    """Convert padding that adds 0 or -inf to booleans; ``nn.TransformerEncoderLayer`` makes all padding additive."""
    if padding.dtype == torch.bool or not _readable(padding):
        return padding
    hidden = padding == -torch.inf
    return hidden if bool((hidden | (padding == 0)).all()) else padding


def _lengths(padding: Tensor) -> Tensor | None:
    """Return the lengths [N], if all padding is at the end: the kernels then never read keys beyond."""
    if padding.dtype != torch.bool or not _readable(padding):
        return None
    lengths = (~padding).sum(-1)
    beyond = torch.arange(padding.shape[-1], device="cpu") >= lengths[:, None]  # [N, S]
    return lengths if torch.equal(beyond, padding) else None


def _readable(x: Tensor) -> bool:
    """Return whether its values can be read without waiting for a device, tracing or gradients."""
    return x.device.type == "cpu" and not x.requires_grad and not is_traced()

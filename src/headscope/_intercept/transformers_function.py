"""headscope's own attention function for models of transformers, registered by name. transformers is imported late."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from headscope._intercept import intercepted_call, masks
from headscope._intercept.intercepted_call import InterceptedCall
from headscope._observe import SUMS, LayerSums
from headscope.masks import Band, Mask

NAME = "headscope"


def causal_by_default(name: str, module: nn.Module, arguments: Mapping[str, Any], queries: int) -> Mask | None:
    """Return the mask of a function without a mask argument: none for eager; the others, as SDPA, by ``is_causal``."""
    if name == "eager" or queries == 1:
        return None
    causal = arguments.get("is_causal")
    if causal is None:
        causal = getattr(module, "is_causal", True)
    return Band(None, 0, offset=0) if causal else None


def register_attention(name: str = NAME) -> None:
    """See ``headscope.watching.register_transformers``."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, sdpa_mask)


def attends_by_headscope(module: nn.Module) -> bool:
    """Return whether the configuration of a module of transformers names headscope's attention."""
    loaded: Any = sys.modules.get("transformers.modeling_utils")
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return loaded is not None and loaded.AttentionInterface().get(name) is attention_forward


def attention_forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, is_causal: bool | None = None, softcap: float | None = None,
    s_aux: Tensor | None = None, position_bias: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Run ``headscope.attention`` as an attention function of transformers; masks as its ``sdpa_mask`` makes them.

    Shapes: query [B, H, Q, D], key [B, Hkv, K, D], value [B, Hkv, K, Dv], attention_mask [B, 1 or H, Q, K], boolean
    (True = attend) or numbers to add -> [B, Q, H, Dv], and None for the weights.
    """
    if attention_mask is not None:
        visible, bias = masks.split(attention_mask)
    else:
        bias = None
        visible = causal_by_default(NAME, module, {"is_causal": is_causal}, query.shape[-2])
    if position_bias is not None:
        bias = position_bias if bias is None else position_bias + bias
    call = InterceptedCall(
        q=query, k=key, v=value, mask=visible, bias=bias, scale=scaling, softcap=softcap, sinks=s_aux
    )
    call = intercepted_call.rounded(call, bias=False)
    sums: LayerSums | None = getattr(module, SUMS, None)
    if sums is not None:
        values = value if call.v is None else call.v
        sums.add(call.q, call.k, values, visible, bias, s_aux, scaling, softcap, cross=False)  # by its name: see kinds
    return intercepted_call.attend(call, dropout).transpose(1, 2).contiguous(), None

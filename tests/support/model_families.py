"""Tiny random models of many families of transformers, each from its configuration class and one table of sizes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from support.watched_models import VOCABULARY, spread

_MAPPINGS: Any = {
    "causal": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
}
KINDS: dict[str, dict[str, Any]] = {kind: dict(names) for kind, names in _MAPPINGS.items()}
"""Kind -> family -> the name of its class."""
MOST_PARAMETERS = 30_000_000  # of a model with nested configurations, whose sizes the table does not reach
IDS = torch.randint(3, VOCABULARY - 1, (2, 13), generator=torch.Generator().manual_seed(1))

LAYERS, HEADS, WIDTH, INNER = 2, 6, 24, 20
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "emb_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim"), INNER),
    **dict.fromkeys(("hidden_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), INNER),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("n_layers", "num_decoder_layers", "num_encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads", "n_heads", "mamba_n_heads"), HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), HEADS),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), HEADS),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 4),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "query_pre_attn_scalar"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "state_size", "mamba_d_state", "mamba_d_head"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "n_group", "topk_group", "first_k_dense_replace"), 1),
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sliding_window": 5,
    "word_embed_proj_dim": WIDTH, "type_vocab_size": 2, "mamba_expand": 2, "mamba_dt_rank": 4, "attention_window": 4,
    "hidden_size_per_layer_input": 8,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "codegen": {"n_head": 4},
    "falcon_h1": {"mamba_d_ssm": 48, "mamba_d_head": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "mamba2": {"num_heads": 6, "head_dim": 8},
    "recurrent_gemma": {"num_hidden_layers": 3},
}
"""Sizes of families that the table does not fit."""
VARIANTS: tuple[dict[str, Any], ...] = ({}, {"num_key_value_heads": HEADS})
"""Tried in this order: latent attention has as many key heads as query heads."""


def build_config(family: str, **sizes: Any) -> Any:
    """The configuration of a family with small sizes, where it has such sizes."""
    kind = CONFIG_MAPPING[family]
    default = kind()
    aliases: dict[str, str] = getattr(kind, "attribute_map", None) or {}
    names = {*default.to_dict(), *aliases, *inspect.signature(kind.__init__).parameters}
    own = {**OWN.get(family, {}), **sizes}
    chosen: dict[str, Any] = {}
    for name, size in {**SIZES, **own}.items():
        if name in own or (name in names and not (name in aliases and aliases[name] in SIZES)):
            if name in ("sliding_window", "q_lora_rank") and getattr(default, name, None) is None:
                continue
            chosen[name] = size
    types = list(dict.fromkeys(getattr(default, "layer_types", None) or []))
    if types and "layer_types" not in own and _can_set(kind, aliases.get("layer_types", "layer_types")):
        types = (types * LAYERS)[: max(LAYERS, len(types))]
        chosen |= {"layer_types": types, **({"num_hidden_layers": len(types)} if "num_hidden_layers" in chosen else {})}
    if getattr(default, "mlp_layer_types", None) and "mlp_layer_types" not in own:
        chosen["mlp_layer_types"] = None
    return kind(**chosen)


def _can_set(kind: type, name: str) -> bool:
    value = inspect.getattr_static(kind, name, None)
    return not isinstance(value, property) or value.fset is not None


def build_model(kind: str, family: str) -> Any:
    """A tiny random model, in eval mode.

    Raises:
        ValueError: it cannot be built, or is not tiny.
    """
    name = KINDS[kind][family]
    cls = getattr(transformers, name if isinstance(name, str) else name[0])
    problem: Exception | None = None
    for sizes in VARIANTS:
        try:
            config = build_config(family, **sizes)
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in cls(config).parameters())
            if count > MOST_PARAMETERS:
                raise ValueError(f"{count} parameters")
            torch.manual_seed(0)
            model = spread(cls(build_config(family, **sizes)))
            with torch.no_grad():
                decoder = {"decoder_input_ids": IDS} if kind == "seq2seq" else {}
                model(input_ids=IDS, use_cache=False, **decoder) if kind != "masked" else model(input_ids=IDS)
        except Exception as error:
            problem = error
        else:
            return model
    raise ValueError(f"{family}: cannot be built: {type(problem).__name__}: {problem}") from problem

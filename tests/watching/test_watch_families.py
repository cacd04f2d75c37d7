"""watch on models of transformers of many makes: which layers are self-, which cross-attention, and which are none."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from headscope import watch
from headscope._intercept.module_names import is_cross

SEGMENTERS = ("Sam", "SamHQ", "Sam2", "Sam2Video", "Sam3Tracker", "Sam3TrackerVideo", "EdgeTam", "EdgeTamVideo")
FOLDERS = {
    "SamHQ": "sam_hq", "Sam2Video": "sam2_video", "Sam3Tracker": "sam3_tracker", "EdgeTamVideo": "edgetam_video",
    "Sam3TrackerVideo": "sam3_tracker_video",
}  # fmt: skip
DETR = {
    "encoder.layers.0.self_attn": "self",
    "decoder.layers.0.self_attn": "self", "decoder.layers.0.encoder_attn": "cross",
    "decoder.layers.1.self_attn": "self", "decoder.layers.1.encoder_attn": "cross",
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(
    ("name", "cross"),
    [
        ("decoder.layers.0.encoder_attn", True),
        ("layers.1.crossattention.attention", True),
        ("cross_block.attn", True),
        ("cross_modal_text_layers.0.crossattention.self", True),  # BridgeTower's, which has both
        ("cross_modal_text_layers.0.attention.self", False),
    ],
)
def test_which_paths_say_cross_attention(name: str, cross: bool) -> None:
    assert is_cross(name) is cross


@pytest.mark.parametrize("tokens", [3, 4], ids=["fewer tokens", "as many"])
@pytest.mark.parametrize("family", SEGMENTERS)
def test_queries_and_keys_that_a_layer_is_given_apart(family: str, tokens: int) -> None:
    """Of SAM's decoder: tokens attend to themselves, as queries with positions, and to an image, and it to them."""
    folder = FOLDERS.get(family, family.lower())
    made = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    config = getattr(transformers, f"{family}MaskDecoderConfig")(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mlp_dim=16, attention_downsample_rate=1,
        attn_implementation="eager",
    )  # fmt: skip
    model = getattr(made, f"{family}TwoWayTransformer")(config).eval()
    image, places = torch.randn(2, 1, 16, 2, 2)
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(1, 1, tokens, 16), image, places, None)
    blocks = ("self_attn", "cross_attn_token_to_image", "cross_attn_image_to_token")
    kinds = {f"layers.{n}.{name}": name[: name.index("_attn")] for n in range(2) for name in blocks}
    assert seen.kinds == {**kinds, "final_attn_token_to_image": "cross"}
    assert "distance" not in seen.stats["final_attn_token_to_image"].names


def pooling() -> Any:
    """A stage of which pools its queries: an axis of their own."""
    config = transformers.Sam2HieraDetConfig(
        hidden_size=16, num_attention_heads=1, image_size=[32, 32], blocks_per_stage=[1, 2], num_query_pool_stages=1,
        embed_dim_per_stage=[16, 32], num_attention_heads_per_stage=[1, 2], window_size_per_stage=[4, 4],
        global_attention_blocks=[],
    )  # fmt: skip
    return transformers.Sam2HieraDetModel(config)


def reducing() -> Any:
    """A stage of which pools its keys."""
    config = transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[8, 16], num_attention_heads=[1, 2],
        patch_sizes=[7, 3], strides=[4, 2], mlp_ratios=[2, 2], decoder_hidden_size=16,
    )  # fmt: skip
    return transformers.SegformerModel(config)


def detr(family: str) -> Any:
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = getattr(transformers, f"{family}Config")(
        backbone_config=backbone, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=16,
    )  # fmt: skip
    return getattr(transformers, f"{family}Model")(config)


@pytest.mark.parametrize(
    ("model", "kinds"),
    [
        (pooling, {"blocks.0.attn": "self", "blocks.1.attn": "cross", "blocks.2.attn": "self"}),
        (reducing, {"stages.0.blocks.0.attention": "cross", "stages.1.blocks.0.attention": "self"}),
        (functools.partial(detr, "Detr"), DETR),
        (functools.partial(detr, "ConditionalDetr"), DETR),
    ],
    ids=["pooled queries", "pooled keys", "Detr", "ConditionalDetr"],
)
def test_kinds_of_layers_that_see_images(model: Callable[[], Any], kinds: dict[str, str]) -> None:
    net = model().eval()
    with torch.no_grad(), watch(net) as seen:
        net(torch.randn(1, 3, 64, 64))
    assert seen.kinds == kinds


def test_one_image_that_is_pooled_twice() -> None:
    from transformers.models.efficientloftr.modeling_efficientloftr import EfficientLoFTRLocalFeatureTransformerLayer

    config = transformers.EfficientLoFTRConfig(
        hidden_size=16, num_attention_heads=2, stage_num_blocks=[1], stage_stride=[2], stage_hidden_expansion=[1],
        stage_out_channels=[16], out_features=[16], attn_implementation="eager",
    )  # fmt: skip
    model = EfficientLoFTRLocalFeatureTransformerLayer(config, 0).eval()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(1, 2, 16, 8, 8))
    assert seen.kinds == {"self_attention.attention": "self", "cross_attention.attention": "cross"}


def test_latents_that_see_a_context_beside_themselves() -> None:
    from transformers.models.idefics2.configuration_idefics2 import Idefics2PerceiverConfig
    from transformers.models.idefics2.modeling_idefics2 import Idefics2PerceiverResampler

    config = Idefics2PerceiverConfig(
        hidden_size=16, resampler_n_latents=3, resampler_depth=2, resampler_n_heads=2, resampler_head_dim=8,
        num_key_value_heads=1, attn_implementation="eager",
    )  # fmt: skip
    model = Idefics2PerceiverResampler(config).eval()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(1, 7, 16), torch.ones(1, 7))
    assert seen.kinds == {"layers.0.self_attn": "cross", "layers.1.self_attn": "cross"}


EXPERTS: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 8, "intermediate_size": 16, "moe_intermediate_size": 16, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CALLED: dict[str, dict[str, Any]] = {  # hyper-connections, convolutions and bottlenecks that are called attention
    "DeepseekV4": {
        **EXPERTS, "num_key_value_heads": 1, "partial_rotary_factor": 0.5, "mlp_layer_types": ["moe"] * 2,
        "q_lora_rank": 8, "o_groups": 2, "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 2,
        "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"], "sliding_window": 6,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "HYV4": {
        **EXPERTS, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
        "index_topk": 4, "index_head_dim": 16, "index_n_heads": 2, "indexer_types": ["full", "shared"],
        "layer_types": ["indexed_attention"] * 2, "mlp_layer_types": ["dense", "sparse"],
    },
    "InklingText": {
        **EXPERTS, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4,
        "rel_extent": 16, "sliding_window_size": 6,
    },
    "MobileBert": {
        "vocab_size": 61, "hidden_size": 32, "intra_bottleneck_size": 8, "embedding_size": 8, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 16, "num_feedforward_networks": 1,
    },
    "ConvBert": {
        "vocab_size": 61, "hidden_size": 32, "embedding_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "intermediate_size": 16, "conv_kernel_size": 3, "head_ratio": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", CALLED)
def test_what_stands_beside_an_attention_is_none(family: str) -> None:
    model: Any = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**CALLED[family]))
    model.eval()
    with torch.no_grad(), watch(model) as seen:
        model(torch.randint(3, 61, (2, 11)))
    path = "layers.{}.self_attn" if family not in ("MobileBert", "ConvBert") else "encoder.layer.{}.attention.self"
    assert seen.kinds == {path.format(n): "self" for n in range(model.config.num_hidden_layers)}

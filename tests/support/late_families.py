"""Families of transformers that need sizes or inputs of their own, which support.families does not find by itself.

Each recipe returns a small configuration and the arguments of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Recipe = Callable[[], tuple[Any, dict[str, Any]]]
RECIPES: dict[str, Recipe] = {}
BATCH, LENGTH = 2, 13
_DETR = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_queries": 7,
}  # fmt: skip
_TEXT = {
    "vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
}  # fmt: skip
_VISION = {**_TEXT, "image_size": 32, "patch_size": 8}
_VISION.pop("vocab_size")
_SERIES = {
    "prediction_length": 5, "context_length": 17, "lags_sequence": [1, 2, 3], "num_time_features": 2, "d_model": 32,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
}  # fmt: skip


def _recipe(*names: str) -> Callable[[Callable[[str], tuple[Any, dict[str, Any]]]], Callable[..., Any]]:
    def add(function: Callable[[str], tuple[Any, dict[str, Any]]]) -> Callable[..., Any]:
        for name in names:
            RECIPES[name] = lambda name=name: function(name)
        return function

    return add


def _config(name: str, **options: Any) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[name](**options)


def _shrunk(name: str, **sizes: Any) -> Any:
    from support.families import FEW, WIDTHS, _shrink

    config = _config(name)
    _shrink(config, {**FEW, **WIDTHS, **sizes})
    return config


def _ids(length: int = LENGTH, most: int = 100) -> Tensor:
    return torch.randint(3, most, (BATCH, length), generator=torch.Generator().manual_seed(0))


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _images(side: int, *outer: int) -> Tensor:
    return _normal(BATCH, *outer, 3, side, side)


def _resnet(**options: Any) -> Any:
    return _config(
        "resnet", embedding_size=16, hidden_sizes=[16, 16, 32, 32], depths=[1, 1, 1, 1], layer_type="basic", **options
    )


def _swin(**options: Any) -> Any:
    return _config(
        "swin", image_size=64, embed_dim=12, depths=[1, 1, 2, 1], num_heads=[2, 2, 2, 2], window_size=3,
        out_features=["stage1", "stage2", "stage3", "stage4"], **options,
    )  # fmt: skip


# ---------------------------------------------------------------- detection and segmentation


@_recipe("detr", "table-transformer", "conditional_detr", "dab-detr", "deformable_detr")
def _of_detr(name: str) -> tuple[Any, dict[str, Any]]:
    width = "hidden_size" if name == "dab-detr" else "d_model"
    stages = ["stage2", "stage3", "stage4"] if name == "deformable_detr" else ["stage4"]
    config = _config(name, backbone_config=_resnet(out_features=stages), **{**_DETR, width: 32})
    return config, {"pixel_values": _images(96)}


@_recipe("mask2former")
def _of_mask2former(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, backbone_config=_swin(), feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=48,
        encoder_layers=2, decoder_layers=3, num_attention_heads=4, dim_feedforward=48, num_queries=7,
    )  # fmt: skip
    return config, {"pixel_values": _images(64)}


@_recipe("oneformer")
def _of_oneformer(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, backbone_config=_swin(), conv_dim=32, mask_dim=32, hidden_dim=32, encoder_feedforward_dim=48,
        encoder_layers=2, decoder_layers=3, num_attention_heads=4, dim_feedforward=48, num_queries=7,
        text_encoder_width=32, text_encoder_num_layers=2, text_encoder_vocab_size=120, task_seq_len=11,
        text_encoder_context_length=11, text_encoder_n_ctx=2,
    )  # fmt: skip
    return config, {"pixel_values": _images(64), "task_inputs": torch.rand(BATCH, 11)}


@_recipe("lw_detr")
def _of_lw_detr(name: str) -> tuple[Any, dict[str, Any]]:
    backbone = _config(
        "lw_detr_vit", hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, image_size=64,
        pretrain_image_size=64, patch_size=8, window_block_indices=[0], out_indices=[2, 3], num_windows=4,
    )  # fmt: skip
    config = _config(
        name, backbone_config=backbone, projector_scale_factors=[1.0], d_model=32, decoder_ffn_dim=48, decoder_layers=2,
        decoder_self_attention_heads=4, decoder_cross_attention_heads=4, num_queries=7, group_detr=1,
    )  # fmt: skip
    return config, {"pixel_values": _images(64)}


@_recipe("rf_detr")
def _of_rf_detr(name: str) -> tuple[Any, dict[str, Any]]:
    backbone = _config(
        "rf_detr_dinov2", hidden_size=32, num_hidden_layers=3, num_attention_heads=4, image_size=64, patch_size=8,
        out_features=["stage2", "stage3"], num_windows=2,
    )  # fmt: skip
    config = _config(
        name, backbone_config=backbone, d_model=32, decoder_ffn_dim=48, decoder_layers=2,
        decoder_self_attention_heads=4, decoder_cross_attention_heads=4, num_queries=7, group_detr=1,
    )  # fmt: skip
    return config, {"pixel_values": _images(64)}


@_recipe("sam", "sam_hq")
def _of_sam(name: str) -> tuple[Any, dict[str, Any]]:
    vision, prompt, mask = _sam_parts(name)
    config = _config(name, vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=mask)
    return config, {"pixel_values": _images(64), "input_points": torch.full((BATCH, 1, 2, 2), 20.0)}


@_recipe("sam_vision_model", "sam_hq_vision_model")
def _of_sam_vision(name: str) -> tuple[Any, dict[str, Any]]:
    return _config(name, **_sam_parts(name)[0]), {"pixel_values": _images(64)}


def _sam_parts(name: str) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    vision = {
        "hidden_size": 32, "output_channels": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 64,
        "patch_size": 8, "window_size": 3, "global_attn_indexes": [1], "num_pos_feats": 16, "mlp_dim": 48,
    }  # fmt: skip
    prompt = {"hidden_size": 32, "image_size": 64, "patch_size": 8, "mask_input_channels": 8}
    mask = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "mlp_dim": 48,
        "iou_head_hidden_dim": 16,
        "num_hidden_layers": 2,
    }
    if "hq" in name:
        mask["vit_dim"] = 32
    return vision, prompt, mask


@_recipe("sam2_hiera_det_model")
def _of_hiera_det(name: str) -> tuple[Any, dict[str, Any]]:
    return _hiera_det(), {"pixel_values": _images(64)}


def _hiera_det() -> Any:
    return _config(
        "sam2_hiera_det_model", hidden_size=16, num_attention_heads=2, image_size=[64, 64], blocks_per_stage=[1, 2, 2,
        1],
        embed_dim_per_stage=[16, 24, 32, 64], num_attention_heads_per_stage=[2, 2, 4, 4],
        window_size_per_stage=[4, 4, 4, 4], global_attention_blocks=[4],
        window_positional_embedding_background_size=[4, 4],
    )  # fmt: skip


def _sam2_vision() -> dict[str, Any]:
    return {
        "backbone_config": _hiera_det(), "backbone_channel_list": [64, 32, 24, 16], "fpn_hidden_size": 32,
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    }  # fmt: skip


@_recipe("sam2_vision_model")
def _of_sam2_vision(name: str) -> tuple[Any, dict[str, Any]]:
    return _config(name, **_sam2_vision()), {"pixel_values": _images(64)}


@_recipe("sam2")
def _of_sam2(name: str) -> tuple[Any, dict[str, Any]]:
    prompt = {"hidden_size": 32, "image_size": 64, "patch_size": 16, "mask_input_channels": 8}
    mask = {"hidden_size": 32, "num_attention_heads": 4, "mlp_dim": 48, "iou_head_hidden_dim": 16}
    vision = _config("sam2_vision_model", **_sam2_vision())
    config = _config(name, vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=mask)
    return config, {"pixel_values": _images(64), "input_points": torch.full((BATCH, 1, 2, 2), 20.0)}


@_recipe("sam3_vit_model")
def _of_sam3_vit(name: str) -> tuple[Any, dict[str, Any]]:
    return _sam3_vit(), {"pixel_values": _images(64)}


def _sam3_vit() -> Any:
    return _config(
        "sam3_vit_model", hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        image_size=64,
        patch_size=8, window_size=4, global_attn_indexes=[1], pretrain_image_size=64,
    )  # fmt: skip


def _sam3_vision() -> Any:
    return _config(
        "sam3_vision_model", backbone_config=_sam3_vit(), fpn_hidden_size=32,
        backbone_feature_sizes=[[32, 32], [16, 16], [8, 8]],
    )  # fmt: skip


@_recipe("sam3_vision_model")
def _of_sam3_vision(name: str) -> tuple[Any, dict[str, Any]]:
    return _sam3_vision(), {"pixel_values": _images(64)}


@_recipe("sam3")
def _of_sam3(name: str) -> tuple[Any, dict[str, Any]]:
    layers = {"hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = _config(
        name, vision_config=_sam3_vision(),
        text_config={**_TEXT, "max_position_embeddings": 32, "projection_dim": 32},
        geometry_encoder_config=layers, detr_encoder_config=layers, detr_decoder_config={**layers, "num_queries": 7},
        mask_decoder_config={"hidden_size": 32, "num_attention_heads": 4, "num_upsampling_stages": 2},
    )  # fmt: skip
    return config, {"pixel_values": _images(64), "input_ids": _ids()}


@_recipe("seggpt")
def _of_seggpt(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, hidden_size=32, num_hidden_layers=5, num_attention_heads=4, mlp_dim=48, image_size=[64, 32], patch_size=8,
        pretrain_image_size=32, decoder_hidden_size=16, merge_index=0, intermediate_hidden_state_indices=[1, 2, 3, 4],
    )  # fmt: skip
    images = _normal(BATCH, 3, 32, 32)
    return config, {"pixel_values": images, "prompt_pixel_values": images.flip(0), "prompt_masks": images.abs()}


@_recipe("efficientloftr")
def _of_efficientloftr(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, stage_num_blocks=[1, 1, 1, 1], out_features=[16, 16, 32, 32], hidden_size=32, num_attention_layers=2,
        num_attention_heads=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 2.0},
    )  # fmt: skip
    return config, {"pixel_values": _images(128, 2)}


@_recipe("lightglue")
def _of_lightglue(name: str) -> tuple[Any, dict[str, Any]]:
    detector = _config(
        "superpoint", encoder_hidden_sizes=[16, 16, 32, 32], decoder_hidden_size=32, keypoint_decoder_dim=65,
        descriptor_decoder_dim=32, keypoint_threshold=0.0, max_keypoints=23,
    )  # fmt: skip
    config = _config(
        name, keypoint_detector_config=detector, descriptor_dim=32, num_hidden_layers=2, num_attention_heads=4,
    )  # fmt: skip
    return config, {"pixel_values": _images(64, 2)}


# ---------------------------------------------------------------- text


@_recipe("luke")
def _of_luke(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(name, **_TEXT, entity_vocab_size=50, entity_emb_size=16, max_position_embeddings=64)
    places = torch.full((BATCH, 3, 5), -1)
    places[:, :, 0], places[:, :, 1] = torch.arange(3), torch.arange(3) + 1
    return config, {"input_ids": _ids(), "entity_ids": _ids(3, 40), "entity_position_ids": places}


@_recipe("lxmert")
def _of_lxmert(name: str) -> tuple[Any, dict[str, Any]]:
    sizes = {key: n for key, n in _TEXT.items() if key != "num_hidden_layers"}
    config = _config(name, **sizes, l_layers=2, x_layers=2, r_layers=2, visual_feat_dim=16)
    return config, {"input_ids": _ids(), "visual_feats": _normal(BATCH, 7, 16), "visual_pos": torch.rand(BATCH, 7, 4)}


@_recipe("funnel")
def _of_funnel(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, vocab_size=120, block_sizes=[1, 2, 1], num_decoder_layers=2, d_model=32, n_head=4, d_head=8, d_inner=48
    )
    config.architectures = ["FunnelModel"]  # the other one has no decoder
    return config, {"input_ids": _ids(16)}


@_recipe("xmod")
def _of_xmod(name: str) -> tuple[Any, dict[str, Any]]:
    return _config(name, **_TEXT, default_language="en_XX"), {"input_ids": _ids()}


@_recipe("perceiver")
def _of_perceiver(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, num_latents=7, d_latents=32, d_model=24, num_self_attends_per_block=2, num_self_attention_heads=4,
        num_cross_attention_heads=4,
    )  # fmt: skip
    return config, {"inputs": _normal(BATCH, LENGTH, 24)}


@_recipe("dbrx")
def _of_dbrx(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, d_model=32, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=120,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    )  # fmt: skip
    config.attn_config.rope_theta = 10000.0
    return config, {"input_ids": _ids()}


@_recipe("zamba")
def _of_zamba(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, **{**_TEXT, "num_hidden_layers": 7}, attn_layer_period=2, attn_layer_offset=1, num_key_value_heads=4,
        n_mamba_heads=2, mamba_dt_rank=4, attention_hidden_size=64, attention_head_dim=16, use_mamba_kernels=False,
    )  # fmt: skip
    return config, {"input_ids": _ids()}


@_recipe("zamba2")
def _of_zamba2(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, **{**_TEXT, "num_hidden_layers": 4}, layers_block_type=["linear_attention", "hybrid"] * 2,
        num_key_value_heads=4, n_mamba_heads=8, mamba_ngroups=1, mamba_headdim=8, mamba_d_state=8, chunk_size=8,
        use_mamba_kernels=False, num_mem_blocks=1, use_shared_attention_adapter=False, attention_hidden_size=64,
        attention_head_dim=16,
    )  # fmt: skip
    return config, {"input_ids": _ids()}


@_recipe("t5gemma")
def _of_t5gemma(name: str) -> tuple[Any, dict[str, Any]]:
    part = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 5}
    config = _config(name, encoder=part, decoder={**part, "cross_attention_hidden_size": 32}, vocab_size=120)
    return config, {"input_ids": _ids(), "decoder_input_ids": _ids(7)}


@_recipe("lfm2_moe")
def _of_lfm2_moe(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, **_TEXT, num_key_value_heads=2, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2,
        num_dense_layers=1, layer_types=["conv", "full_attention"],
    )  # fmt: skip
    return config, {"input_ids": _ids()}


@_recipe("dots1")
def _of_dots1(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, **_TEXT, num_key_value_heads=4, moe_intermediate_size=16, n_routed_experts=4, n_shared_experts=1,
        n_group=1,
        topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, head_dim=8,
    )  # fmt: skip
    return config, {"input_ids": _ids()}


@_recipe("gemma3n_text")
def _of_gemma3n(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, **{**_TEXT, "num_hidden_layers": 4, "intermediate_size": [48] * 4}, num_key_value_heads=2, head_dim=8,
        vocab_size_per_layer_input=120, hidden_size_per_layer_input=8, num_kv_shared_layers=2, laurel_rank=8,
        layer_types=["sliding_attention", "full_attention"] * 2, activation_sparsity_pattern=[0.0] * 4,
        sliding_window=5,
    )  # fmt: skip
    return config, {"input_ids": _ids()}


@_recipe("hunyuan_vl_text")
def _of_hunyuan(name: str) -> tuple[Any, dict[str, Any]]:
    config = _shrunk(name)
    config.head_dim = 8
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1, 1]}
    return config, {"input_ids": _ids()}


@_recipe("step3p7")
def _of_step(name: str) -> tuple[Any, dict[str, Any]]:
    config = _shrunk(name)
    config.text_config.sliding_window = 5
    return config, {"input_ids": _ids()}


@_recipe("t5gemma2_encoder")
def _of_t5gemma2(name: str) -> tuple[Any, dict[str, Any]]:
    config = _shrunk(name)
    config.text_config.dropout_rate = config.dropout_rate = 0.0
    return config, {"input_ids": _ids()}


@_recipe("chameleon")
def _of_chameleon(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, **_TEXT, num_key_value_heads=2, vocabulary_map={"<image>": 5, "IMGIMGAZ": 6},
        vq_config={"embed_dim": 16, "num_embeddings": 16, "latent_channels": 16, "base_channels": 32, "resolution": 32,
                   "channel_multiplier": [1, 1], "num_res_blocks": 1},
    )  # fmt: skip
    return config, {"input_ids": _ids()}


@_recipe("emu3")
def _of_emu3(name: str) -> tuple[Any, dict[str, Any]]:
    config = _shrunk(name)
    config.vq_config.base_channels = 32
    config.vocabulary_map = {
        "<image>": 5,
        "<|extra_200|>": 6,
        "<|visual token 000000|>": 7,
        "<|visual token 000001|>": 8,
    }
    return config, {"input_ids": _ids()}


# ---------------------------------------------------------------- series


@_recipe("time_series_transformer", "informer", "autoformer")
def _of_series(name: str) -> tuple[Any, dict[str, Any]]:
    past = 17 + 3
    return _config(name, **_SERIES), {
        "past_values": _normal(BATCH, past), "past_time_features": _normal(BATCH, past, 2),
        "past_observed_mask": torch.ones(BATCH, past), "future_values": _normal(BATCH, 5),
        "future_time_features": _normal(BATCH, 5, 2),
    }  # fmt: skip


@_recipe("timesfm")
def _of_timesfm(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, hidden_size=32, intermediate_size=48, head_dim=8, num_attention_heads=4, num_hidden_layers=2,
        patch_length=4, context_length=52, horizon_length=8,
    )  # fmt: skip
    return config, {
        "past_values": _normal(BATCH, 52), "past_values_padding": torch.zeros(BATCH, 52, dtype=torch.long),
        "freq": torch.zeros(BATCH, 1, dtype=torch.long),
    }  # fmt: skip


# ---------------------------------------------------------------- sound


@_recipe("wav2vec2-bert")
def _of_w2v_bert(name: str) -> tuple[Any, dict[str, Any]]:
    return _shrunk(name), {"input_features": _normal(BATCH, 31, 160)}


@_recipe("speecht5")
def _of_speecht5(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, hidden_size=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48,
    )  # fmt: skip
    return config, {"input_values": _normal(BATCH, LENGTH, 32), "decoder_input_values": _normal(BATCH, 7, 32)}


@_recipe("clap")
def _of_clap(name: str) -> tuple[Any, dict[str, Any]]:
    audio = {
        "window_size": 4, "num_mel_bins": 64, "spec_size": 64, "patch_size": 4, "patch_stride": [4, 4],
        "hidden_size": 64,
        "depths": [1, 2], "num_attention_heads": [2, 2], "patch_embeds_hidden_size": 32, "enable_fusion": False,
        "num_classes": 2, "projection_dim": 32,
    }  # fmt: skip
    config = _config(name, text_config={**_TEXT, "projection_dim": 32}, audio_config=audio, projection_dim=32)
    return config, {"input_ids": _ids(), "input_features": _normal(BATCH, 1, 64, 64)}


@_recipe("musicgen", "musicgen_melody")
def _of_musicgen(name: str) -> tuple[Any, dict[str, Any]]:
    import transformers

    config = _config(name).decoder
    for key, n in {
        "vocab_size": 60,
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_dim": 48,
    }.items():
        setattr(config, key, n)
    config.pad_token_id = config.bos_token_id = 60
    kind = {"musicgen": transformers.MusicgenModel, "musicgen_melody": transformers.MusicgenMelodyModel}[name]
    return kind(config), {"input_ids": _ids(7, 50).repeat(4, 1)}


@_recipe("dia")
def _of_dia(name: str) -> tuple[Any, dict[str, Any]]:
    encoder = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}
    decoder = {
        **encoder, "cross_head_dim": 8, "cross_num_attention_heads": 4, "cross_num_key_value_heads": 4,
        "cross_hidden_size": 32, "num_channels": 9,
    }  # fmt: skip
    config = _config(name, encoder_config=encoder, decoder_config=decoder)
    ids = torch.randint(3, 100, (BATCH, 7, 9), generator=torch.Generator().manual_seed(0))
    return config, {"input_ids": _ids(), "decoder_input_ids": ids}


@_recipe("fun_asr_nano_encoder", "audioflamingo3_encoder", "qwen3_asr_encoder")
def _of_features(name: str) -> tuple[Any, dict[str, Any]]:
    config = _shrunk(name)
    mels = 560 if name.startswith("fun") else config.num_mel_bins
    length = 200 if name.startswith("qwen") else 2 * getattr(config, "max_source_positions", 32)
    features = _normal(BATCH, 37, mels) if name.startswith("fun") else _normal(BATCH, mels, length)
    length = features.shape[1 if name.startswith("fun") else 2]
    return config, {"input_features": features, "input_features_mask": torch.ones(BATCH, length, dtype=torch.long)}


@_recipe("granite_speech5_encoder", "granite_speech5_ctc")
def _of_granite_speech(name: str) -> tuple[Any, dict[str, Any]]:
    return _shrunk(name, num_key_value_heads=4), {"input_features": _normal(BATCH, 64, 320)}


@_recipe("pe_audio")
def _of_pe_audio(name: str) -> tuple[Any, dict[str, Any]]:
    return _shrunk(name), {"input_ids": _ids(), "input_values": _normal(BATCH, 1, 8000)}


# ---------------------------------------------------------------- images and text


@_recipe("blip_2_qformer")
def _of_qformer(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(name, **_TEXT, encoder_hidden_size=24)
    return config, {"query_embeds": _normal(BATCH, 5, 32), "encoder_hidden_states": _normal(BATCH, 11, 24)}


@_recipe("blip-2", "instructblip", "instructblipvideo")
def _of_blip2(name: str) -> tuple[Any, dict[str, Any]]:
    text = _config(
        "opt", vocab_size=120, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48,
        word_embed_proj_dim=32, max_position_embeddings=64,
    )  # fmt: skip
    token = {"video_token_index": 5} if name.endswith("video") else {"image_token_index": 5}
    config = _config(
        name, vision_config=_VISION, qformer_config={**_TEXT, "encoder_hidden_size": 32}, text_config=text.to_dict(),
        num_query_tokens=3, **token,
    )  # fmt: skip
    ids = torch.where(_ids() == 5, 6, _ids())
    frames = 4 if name.endswith("video") else 1
    ids[:, : 3 * frames] = 5
    images = _images(32, 4) if frames == 4 else _images(32)
    more = {} if name == "blip-2" else {"qformer_input_ids": _ids(5)}
    return config, {"pixel_values": images, "input_ids": torch.cat([ids, _ids(5).clamp_min(6)], 1), **more}


@_recipe("kosmos-2")
def _of_kosmos(name: str) -> tuple[Any, dict[str, Any]]:
    text = {
        "vocab_size": 120,
        "embed_dim": 32,
        "layers": 2,
        "ffn_dim": 48,
        "attention_heads": 4,
        "max_position_embeddings": 64,
    }
    config = _config(name, text_config=text, vision_config=_VISION, latent_query_num=5)
    places = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
    places[:, 1:6] = True
    return config, {"pixel_values": _images(32), "input_ids": _ids(), "image_embeds_position_mask": places}


@_recipe("siglip2")
def _of_siglip2(name: str) -> tuple[Any, dict[str, Any]]:
    vision = {key: n for key, n in _VISION.items() if key != "image_size"} | {"num_patches": 16}
    config = _config(
        name, text_config={**_TEXT, "projection_size": 32, "max_position_embeddings": 32}, vision_config=vision
    )
    return config, {"input_ids": _ids(), **_patches()}


@_recipe("siglip2_vision_model")
def _of_siglip2_vision(name: str) -> tuple[Any, dict[str, Any]]:
    vision = {key: n for key, n in _VISION.items() if key != "image_size"} | {"num_patches": 16}
    return _config(name, **vision), _patches()


def _patches() -> dict[str, Any]:
    return {
        "pixel_values": _normal(BATCH, 16, 3 * 64), "pixel_attention_mask": torch.ones(BATCH, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4], [2, 8]]),
    }  # fmt: skip


@_recipe("xclip")
def _of_xclip(name: str) -> tuple[Any, dict[str, Any]]:
    vision = {
        **_VISION,
        "mit_hidden_size": 32,
        "mit_intermediate_size": 48,
        "mit_num_hidden_layers": 1,
        "mit_num_attention_heads": 4,
        "num_frames": 4,
    }
    config = _config(
        name, text_config={**_TEXT, "max_position_embeddings": 32}, vision_config=vision, projection_dim=32,
        prompt_num_attention_heads=4,
    )  # fmt: skip
    return config, {"input_ids": _ids(), "pixel_values": _images(32, 4)}


@_recipe("idefics")
def _of_idefics(name: str) -> tuple[Any, dict[str, Any]]:
    vision = {
        "embed_dim": 32,
        "image_size": 32,
        "patch_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    config = _config(
        name,
        **_TEXT,
        vision_config=vision,
        perceiver_config={
            "resampler_n_latents": 5,
            "resampler_depth": 2,
            "resampler_n_heads": 4,
            "resampler_head_dim": 8,
        },
        use_resampler=True,
    )
    return config, {
        "input_ids": _ids(), "pixel_values": _images(32, 1), "image_attention_mask": torch.ones(BATCH, LENGTH, 1),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long),
    }  # fmt: skip


@_recipe("tvp")
def _of_tvp(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, **_TEXT, backbone_config=_resnet(out_features=["stage4"]), max_img_size=64, num_frames=3,
        visual_prompt_size=8,
    )  # fmt: skip
    return config, {
        "input_ids": _ids()[:1],
        "pixel_values": _images(64, 3)[:1],
        "attention_mask": torch.ones(1, LENGTH, dtype=torch.long),
    }


@_recipe("udop")
def _of_udop(name: str) -> tuple[Any, dict[str, Any]]:
    config = _config(
        name, vocab_size=120, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=2, num_heads=4,
        image_size=32,
        patch_size=8,
    )  # fmt: skip
    boxes = torch.rand(BATCH, LENGTH, 4, generator=torch.Generator().manual_seed(2)).sort(-1).values
    return config, {
        "input_ids": _ids(), "bbox": boxes, "pixel_values": _images(32), "decoder_input_ids": _ids(7),
    }  # fmt: skip


@_recipe("video_llama_3_vision")
def _of_video_llama(name: str) -> tuple[Any, dict[str, Any]]:
    config = _shrunk(name)
    return config, {
        "pixel_values": _normal(32, 3 * config.patch_size**2), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
        "merge_sizes": torch.tensor([2, 2]),
    }  # fmt: skip


@_recipe("muse_glimmer_vision", "muse_spark_vision")
def _of_grid(name: str) -> tuple[Any, dict[str, Any]]:
    config = _shrunk(name)
    frames = 2
    return config, {
        "pixel_values": _normal(32, 3 * frames * config.patch_size**2),
        "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
    }


@_recipe("depth_pro")
def _of_depth_pro(name: str) -> tuple[Any, dict[str, Any]]:
    part = {
        "model_type": "dinov2",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
    }
    config = _config(
        name, fusion_hidden_size=16, patch_size=16, intermediate_hook_ids=[1, 0], intermediate_feature_dims=[16, 8],
        scaled_images_ratios=[0.5, 1.0], scaled_images_overlap_ratios=[0.0, 0.25], scaled_images_feature_dims=[16, 16],
        image_model_config=part, patch_model_config=part, fov_model_config=part, use_fov_model=False,
    )  # fmt: skip
    return config, {"pixel_values": _images(32)}


@_recipe("videoprism_vision_model")
def _of_videoprism(name: str) -> tuple[Any, dict[str, Any]]:
    config = _shrunk(name)
    return config, {"pixel_values_videos": _normal(BATCH, config.num_frames, 3, config.image_size, config.image_size)}


@_recipe("voxtral_realtime")
def _of_voxtral(name: str) -> tuple[Any, dict[str, Any]]:
    return _shrunk(name), {"input_ids": _ids(), "input_features": _normal(BATCH, 128, 104)}


@_recipe("hunyuan_vl", "qwen2_5_omni_thinker", "deepseek_ocr2")
def _of_text_only(name: str) -> tuple[Any, dict[str, Any]]:
    config = _shrunk(name)
    text = config.text_config
    if name == "hunyuan_vl":
        text.head_dim = 8
        text.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 1, 1]}
    elif name == "deepseek_ocr2":
        text.mlp_layer_types, text.num_experts_per_tok = ["dense", "sparse"], 2
    else:
        text.rope_parameters["mrope_section"] = [1, 1, 2]
    return config, {"input_ids": _ids()}


@_recipe("gemma4_audio")
def _of_gemma4_audio(name: str) -> tuple[Any, dict[str, Any]]:
    mask = torch.ones(BATCH, 64, dtype=torch.bool)
    return _shrunk(name), {"input_features": _normal(BATCH, 64, 128), "input_features_mask": mask}


@_recipe("cohere_compass_text")
def _of_compass(name: str) -> tuple[Any, dict[str, Any]]:
    config, rope = _shrunk(name), {"rope_type": "default", "rope_theta": 10000.0}
    config.rope_parameters = {"full_attention": rope, "sliding_attention": rope}
    return config, {"input_ids": _ids()}


@_recipe("videoprism")
def _of_videoprism_clip(name: str) -> tuple[Any, dict[str, Any]]:
    config = _shrunk(name)
    vision = config.vision_config
    videos = _normal(BATCH, vision.num_frames, 3, vision.image_size, vision.image_size)
    return config, {"input_ids": _ids(), "pixel_values_videos": videos}


@_recipe("sam3_tracker")
def _of_sam3_tracker(name: str) -> tuple[Any, dict[str, Any]]:
    prompt = {"hidden_size": 32, "image_size": 64, "patch_size": 8, "mask_input_channels": 8}
    mask = {"hidden_size": 32, "num_attention_heads": 4, "mlp_dim": 48, "iou_head_hidden_dim": 16}
    config = _config(
        name, vision_config=_sam3_vision(), prompt_encoder_config=prompt, mask_decoder_config=mask
    )  # fmt: skip
    return config, {"pixel_values": _images(64), "input_points": torch.full((BATCH, 1, 2, 2), 20.0)}


@_recipe("minicpm_ocr_vision", "minicpmv4_7_vision")
def _of_minicpm(name: str) -> tuple[Any, dict[str, Any]]:
    config = _shrunk(name)
    side = config.patch_size
    return config, {"pixel_values": _normal(1, 3, side, 32 * side), "target_sizes": torch.tensor([[4, 8]])}


@_recipe("pi0")
def _of_pi0(name: str) -> tuple[Any, dict[str, Any]]:
    return _shrunk(name), {
        "action_embeds": _normal(BATCH, 5, 32), "input_ids": _ids(), "pixel_values": _images(64, 1),
        "attention_mask": torch.ones(BATCH, LENGTH, dtype=torch.long),
        "pixel_attention_mask": torch.ones(BATCH, 1, dtype=torch.bool),
    }  # fmt: skip

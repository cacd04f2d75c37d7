"""Recipes of docs/guides/segments.md on tiny random models: the mass equals that of the models' eager weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import Observe, Segments, watch

transformers: Any = pytest.importorskip("transformers", reason="an optional dependency")

IMAGE = 59  # the id of image tokens
TEXT: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
Recipe = tuple[Any, dict[str, Any], Segments]


def prompt(tokens: int) -> Tensor:
    return torch.tensor([[1, 2, *[IMAGE] * tokens, 3, 4, 5]])


def llava() -> Recipe:
    """One image of 4 x 4 patches, in four regions."""
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TEXT),
        vision_config=transformers.CLIPVisionConfig(**VISION, projection_dim=16),
        image_token_id=IMAGE, vision_feature_select_strategy="default",
    )  # fmt: skip
    ids = prompt(16)
    segments = Segments.from_image_tokens(ids, IMAGE, (4, 4), parts=(2, 2))
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16)}
    return transformers.LlavaForConditionalGeneration(config), inputs, segments


def gemma3() -> Recipe:
    """One image of 2 x 2 tokens, after the model has pooled 4 x 4 patches; bidirectional within the image."""
    text = {**TEXT, "head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**text), vision_config=transformers.SiglipVisionConfig(**VISION),
        mm_tokens_per_image=4, image_token_id=IMAGE,
    )  # fmt: skip
    ids = prompt(4)
    segments = Segments.from_image_tokens(ids, IMAGE, (2, 2), parts=(2, 1))
    inputs = {
        "input_ids": ids, "pixel_values": torch.randn(1, 3, 16, 16), "token_type_ids": (ids == IMAGE).long()
    }  # fmt: skip
    return transformers.Gemma3ForConditionalGeneration(config), inputs, segments


def internvl() -> Recipe:
    """Two tiles and a thumbnail, of 2 x 2 tokens each, after the model has merged 2 x 2 patches."""
    vision = {**VISION, "image_size": [16, 16], "patch_size": [4, 4]}
    config = transformers.InternVLConfig(
        text_config=transformers.Qwen2Config(**TEXT), vision_config=transformers.InternVLVisionConfig(**vision),
        image_token_id=IMAGE, image_seq_length=4, downsample_ratio=0.5,
    )  # fmt: skip
    ids = prompt(12)
    segments = Segments.from_image_tokens(ids, IMAGE, [(2, 2)] * 3, names=["left", "right", "thumbnail"])
    inputs = {"input_ids": ids, "pixel_values": torch.randn(3, 3, 16, 16)}
    return transformers.InternVLForConditionalGeneration(config), inputs, segments


def qwen3_vl() -> Recipe:
    """One image of 6 x 4 patches, of which the model merges 2 x 2 into a token."""
    text = {**TEXT, "head_dim": 8, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config={
            "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 4, "patch_size": 4,
            "spatial_merge_size": 2, "temporal_patch_size": 1, "out_hidden_size": 32, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=IMAGE, video_token_id=60, vision_start_token_id=61, vision_end_token_id=62,
    )  # fmt: skip
    ids = torch.tensor([[1, 61, *[IMAGE] * 6, 62, 3, 4]])
    grid = torch.tensor([[1, 6, 4]])
    segments = Segments.from_image_tokens(ids, IMAGE, (3, 2), parts=(3, 1))
    pixels = torch.randn(24, 3 * 4 * 4)
    inputs = {
        "input_ids": ids, "pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).int()
    }  # fmt: skip
    return transformers.Qwen3VLForConditionalGeneration(config), inputs, segments


def expected_mean(weights: Tensor, segments: Segments) -> Tensor:
    """The mean mass between segments, [H, S, S], of weights [B, H, Q, K]."""
    ids, size = segments.ids.reshape(-1), len(segments.names)
    of_queries = ids if segments.query_ids is None else segments.query_ids.reshape(-1)
    mean = torch.full((weights.shape[1], size, size), torch.nan, dtype=torch.float64)
    for a in range(size):
        for b in range(size):
            mean[:, a, b] = weights.double()[:, :, of_queries == a][..., ids == b].sum(-1).mean((0, 2))
    return mean


@pytest.mark.parametrize("make", [llava, gemma3, internvl, qwen3_vl], ids=lambda make: make.__name__)
def test_which_part_of_an_image_is_read(make: Callable[[], Recipe]) -> None:
    torch.manual_seed(0)
    model, inputs, segments = make()
    model.eval()
    with torch.no_grad(), watch(model, what=Observe(segments=segments), layers="*language_model*") as recording:
        model(**inputs)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions
    assert len(recording.layers) == len(weights) == 2
    for layer, p in enumerate(weights):
        got = recording[layer].segments
        assert got.names == segments.names
        torch.testing.assert_close(got.mean, expected_mean(p, segments), rtol=1e-4, atol=1e-6, equal_nan=True)


def test_which_part_of_a_recording_a_word_reads() -> None:
    """Whisper: cross-attention from words to thirds of the audio."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {f"{side}_{what}": 32 for side in ("encoder", "decoder") for what in ("ffn_dim",)}
    sizes |= {
        f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("attention_heads", 4))
    }
    config = transformers.WhisperConfig(
        vocab_size=64, d_model=32, num_mel_bins=8, max_source_positions=30, max_target_positions=20, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=3, **sizes,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config).eval()
    inputs = {"input_features": torch.randn(1, 8, 60), "decoder_input_ids": torch.tensor([[3, 10, 11, 12, 13]])}
    thirds, words = [n // 10 for n in range(30)], [-1, 3, 3, 4, 4]
    segments = Segments(["begin", "middle", "end", "word 1", "word 2"], thirds, words)
    with torch.no_grad(), watch(model, what=Observe(segments=segments), layers="*encoder_attn") as recording:
        model(**inputs)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(**inputs, output_attentions=True).cross_attentions
    for layer, p in enumerate(weights):
        got = recording[layer].segments
        assert got.count[0].tolist() == [0, 0, 0, 2, 2]
        expected = expected_mean(p, segments)[:, 3:]
        torch.testing.assert_close(got.mean[:, 3:], expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(got["word 1", "middle"], expected[:, 0, 1], rtol=1e-4, atol=1e-6)


class JointAttention(nn.Module):
    """Text and image tokens attend together, as in a block of a diffusion transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.image = nn.Linear(8, 24), nn.Linear(8, 24)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        both = torch.cat([self.text(text), self.image(image)], 1)  # [B, T, 3 * E]
        q, k, v = (x.unflatten(-1, (2, 4)).transpose(1, 2) for x in both.chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v)


def test_joint_attention_of_a_diffusion_block() -> None:
    torch.manual_seed(0)
    model, text, image = JointAttention(), torch.randn(2, 5, 8), torch.randn(2, 9, 8)
    segments = Segments.from_spans({"text": (0, 5), "image": (5, 14)}, 14)
    with torch.no_grad(), watch(model, what=Observe(segments=segments, keep_qk=True)) as recording:
        model(text, image)
    p = recording[0].tile(0, 14, 0, 14)
    torch.testing.assert_close(recording[0].segments.mean, expected_mean(p, segments), rtol=1e-5, atol=1e-6)


def test_how_much_an_answer_reads_each_document() -> None:
    """A chat with retrieval, over the steps of a generation."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT)).eval()
    ids = torch.randint(4, 60, (1, 17))
    spans = {"system": (0, 3), "document 1": (3, 8), "document 2": (8, 13), "question": (13, 17), "answer": (17, 23)}
    segments = Segments.from_spans(spans, 23)
    with torch.no_grad(), watch(model, what=Observe(segments=segments)) as recording:
        text = model.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(text[:, :-1], output_attentions=True).attentions  # the last token was not read
    read = Segments(segments.names, segments.ids[:-1])
    for layer, p in enumerate(weights):
        got = recording[layer].segments
        torch.testing.assert_close(got.mean, expected_mean(p, read), rtol=1e-4, atol=1e-6)
        assert (got["answer", "document 2"] > 0).all()

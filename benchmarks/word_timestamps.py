"""Peak memory of reading alignment heads, by watch and by eager weights: python benchmarks/word_timestamps.py

Each generation runs in a fresh process. docs/guides/word_timestamps.md has the table.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import Any

import torch

from headscope import Observe, watch

WAYS = ("sdpa", "watch", "eager", "output_attentions")
ALIGNMENT_HEADS = [[5, 3], [5, 9], [8, 0], [8, 4], [8, 7], [8, 8], [9, 0], [9, 7], [9, 9], [10, 5]]
LAYER = "model.decoder.layers.{}.encoder_attn"


def load_model(attention: str):
    """Return a Whisper with random weights, 12 layers of 12 heads in its decoder, that never ends a text."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    torch.manual_seed(0)
    make_config: Any = WhisperConfig
    config = make_config(
        vocab_size=1001, d_model=96, encoder_layers=2, decoder_layers=12, encoder_attention_heads=12,
        decoder_attention_heads=12, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, max_source_positions=1500,
        max_target_positions=240, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        suppress_tokens=None, begin_suppress_tokens=None, init_std=0.3, attn_implementation=attention,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config).eval()
    generation: Any = model.generation_config
    generation.no_timestamps_token_id, generation.is_multilingual = 1000, False
    generation.eos_token_id, generation.max_length = None, 200
    return model


@torch.no_grad()
def run(way: str) -> None:
    """Generate in one way, and print the peak of this process in MiB."""
    torch.set_num_threads(1)
    model = load_model("sdpa" if way in ("sdpa", "watch") else "eager")
    features = torch.randn(4, 8, 3000)
    if way == "watch":
        heads: dict[str, list[int]] = {}
        for layer, head in ALIGNMENT_HEADS:
            heads.setdefault(LAYER.format(layer), []).append(head)
        with watch(model, what=Observe(row_stats=False, received=False), weights=heads) as recording:
            model.generate(features)
        torch.stack([recording.weights(LAYER.format(layer), head)[0] for layer, head in ALIGNMENT_HEADS], 1)
    elif way == "output_attentions":
        model.generate(features, output_attentions=True, return_dict_in_generate=True)
    else:
        model.generate(features)
    print(f"{way}: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        run(sys.argv[1])
    else:
        for each in WAYS:
            subprocess.run([sys.executable, __file__, each], check=True)

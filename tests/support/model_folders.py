"""Small models of Hugging Face, saved with a tokenizer of letters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

LETTERS = "abcdefghijklmnopqrstuvwxyz .,"


SIZES: dict[str, Any] = {"vocab_size": 3 + len(LETTERS), "bos_token_id": 0, "eos_token_id": 1}


def save(model: Any, folder: Path, *, tokenizer: bool = True) -> Path:
    """A model with weights that make its attention neither flat nor on one key; letters are its tokens."""
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn(weight.shape, generator=random) * 0.3)
    model.save_pretrained(folder)
    if tokenizer:
        ids = {piece: n for n, piece in enumerate(["<s>", "</s>", "<unk>", *LETTERS])}
        letters = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
        letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        letters.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="<unk>", bos_token="<s>")
        fast.save_pretrained(folder)
    return folder


def gpt2(**sizes: Any) -> Any:
    config = transformers.GPT2Config(n_positions=29, n_embd=24, n_layer=2, n_head=3, **SIZES, **sizes)
    return transformers.GPT2LMHeadModel(config)

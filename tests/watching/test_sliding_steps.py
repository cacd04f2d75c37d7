"""Steps of a generation that no longer see the first keys: their sums are those of one pass over the whole text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from headscope import Observe, Recording, Segments, watch

PROMPT, NEW = 6, 30
LENGTH = PROMPT + NEW - 1  # the last token is not an input


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4, initializer_range=0.5, pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return transformers.MistralForCausalLM(config).eval()


def segments() -> Observe:
    spans = {"first": (0, 3), "prompt": (3, PROMPT), "answer": (PROMPT, LENGTH)}
    return Observe(segments=Segments.from_spans(spans, LENGTH))


def generated(model: Any, what: Observe, **options: Any) -> tuple[Recording, Tensor]:
    prompt = torch.arange(7, 7 + PROMPT)[None]
    with torch.no_grad(), watch(model, what=what) as recording:
        ids = model.generate(prompt, max_new_tokens=NEW, do_sample=False, **options)
    return recording, ids[:, :LENGTH]


@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}], ids=["sliding cache", "static cache"])
def test_segments_without_the_first_token(model: Any, options: dict[str, Any]) -> None:
    steps, ids = generated(model, segments(), **options)
    with torch.no_grad(), watch(model, what=segments()) as whole:
        model(ids)
    ours, expected = (each.stats.parts[each.layers[0]].segments for each in (steps, whole))
    assert ours is not None
    assert expected is not None
    assert ours.count.tolist() == expected.count.tolist() == [[3, 3, NEW - 1]] * 4
    torch.testing.assert_close(ours.mean, expected.mean, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.without_first(), expected.without_first(), rtol=1e-4, atol=1e-6)
    assert bool((ours.without_first()[:, 0, 0] < ours.mean[:, 0, 0] - 0.1).all())


def test_what_chance_gives_for_the_first_token_is_that_of_rows_with_it(model: Any, tmp_path: Path) -> None:
    unread, ids = generated(model, Observe())
    with torch.no_grad(), watch(model) as read:
        out = model(ids[:, :PROMPT], use_cache=True)
        for n in range(PROMPT, LENGTH):
            out = model(ids[:, n : n + 1], past_key_values=out.past_key_values, use_cache=True)
            assert read.layers
    for recording in (unread, read):
        found = recording["first"]
        assert found.count.tolist() == [[PROMPT] * 4]
        mean = sum(1 / min(n, 4) if n <= 4 else 0.0 for n in range(1, PROMPT + 1)) / PROMPT
        torch.testing.assert_close(found.null.mean, torch.full((1, 4), mean, dtype=torch.float64))
        loaded = Recording.load(recording.save(tmp_path / f"{id(recording)}.safetensors"))
        assert loaded["first"].null.mean.tolist() == found.null.mean.tolist()

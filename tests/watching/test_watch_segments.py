"""Segments in a watch: of layers that fit, over the steps of a cache, and of models with other layers, too."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headscope import MultiHeadAttention, Observe, Recording, Segments, masks, watch
from headscope.cache import GrowingCache
from headscope.watching import WatchWarning

T, E, H = 11, 12, 3


class Decoder(nn.Module):
    """Self-attention, then cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        self.own = MultiHeadAttention(E, H)
        self.other = MultiHeadAttention(E, H)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.other(self.own(x, mask=masks.causal()), context)


def drawn(length: int = T, batch: int = 2) -> Tensor:
    return torch.randn(batch, length, E, generator=torch.Generator().manual_seed(0))


def parts(length: int = T, queries: int | None = None) -> Segments:
    half = [n * 2 // length for n in range(length)]
    return Segments(["a", "b"], half, None if queries is None else [1] * queries)


def test_a_watch_measures_segments() -> None:
    model = MultiHeadAttention(E, H)
    with torch.no_grad(), watch(model, what=Observe(segments=parts(), received_max=True)) as recording:
        model(drawn(), mask=masks.causal())
        model(drawn(), mask=masks.causal())
    stats = recording[0]
    assert stats.segments.count.tolist() == [[2 * 2 * 6, 2 * 2 * 5]] * H
    assert stats.segments["a", "b"].tolist() == [0.0] * H
    torch.testing.assert_close(stats.segments.mean.sum(-1), torch.ones(H, 2, dtype=torch.float64))
    assert stats.received_max.shape == (H, T)


def test_layers_that_do_not_fit_are_named_once() -> None:
    model = Decoder()
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        with watch(model, what=Observe(segments=parts())) as recording:
            for _ in range(2):
                model(drawn(), drawn(7))
    (warning,) = caught
    assert "other is cross-attention, which requires query_ids" in str(warning.message)
    assert "layers=" in str(warning.message)
    assert recording["own"].segments.count[0].tolist() == [24, 20]
    with pytest.raises(ValueError, match="segments: was not observed"):
        _ = recording["other"].segments


def test_cross_attention_with_query_ids() -> None:
    model = Decoder()
    what = Observe(segments=parts(7, queries=T))
    with torch.no_grad(), watch(model, what=what, layers="other") as recording:
        model(drawn(), drawn(7))
    mass = recording[0].segments
    assert mass.count.tolist() == [[0, 2 * T]] * H
    torch.testing.assert_close(mass.mean[:, 1].sum(-1), torch.ones(H, dtype=torch.float64))
    with (
        pytest.warns(WatchWarning, match="own is self-attention, got query_ids"),
        torch.no_grad(),
        watch(model, what=what),
    ):
        model(drawn(), drawn(7))


@pytest.mark.parametrize(
    ("segments", "text"),
    [(parts(T + 1), "has 11 tokens, got 12 ids"), (parts(T - 1), "has 11 tokens, got 10 ids"),
     (Segments(["a"], torch.zeros(3, T).long()), "has a batch of 2, ids one of 3")],
)  # fmt: skip
def test_other_lengths(segments: Segments, text: str) -> None:
    model = MultiHeadAttention(E, H)
    with (
        pytest.warns(WatchWarning, match=text),
        torch.no_grad(),
        watch(model, what=Observe(segments=segments)) as recording,
    ):
        model(drawn())
    assert recording[0].names


def test_a_layer_may_fit_in_some_calls_only() -> None:
    model = MultiHeadAttention(E, H)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        with watch(model, what=Observe(segments=parts())) as both:
            model(drawn(9))
            model(drawn())
            model(drawn(9))
    assert ["has 9 tokens, got 11 ids" in str(each.message) for each in caught] == [True]
    assert both[0].segments.count.tolist() == [[12, 10]] * H
    assert both[0].rows.tolist() == [2 * (9 + T + 9)] * H


def test_the_steps_of_a_cache_add_up_to_the_whole() -> None:
    model, x = MultiHeadAttention(E, H).eval(), drawn()
    what = Observe(segments=parts())
    with torch.no_grad(), watch(model, what=what) as whole:
        model(x, mask=masks.causal())
    cache = GrowingCache()
    with torch.no_grad(), warnings.catch_warnings(), watch(model, what=what) as steps:
        warnings.simplefilter("error")
        model(x[:, :4], cache=cache)
        for t in range(4, T):
            model(x[:, t : t + 1], cache=cache)
    assert torch.equal(steps[0].segments.count, whole[0].segments.count)
    torch.testing.assert_close(steps[0].segments.sum, whole[0].segments.sum, rtol=1e-5, atol=1e-6)


def test_a_tracker_and_a_file_have_them(tmp_path: Path) -> None:
    model = MultiHeadAttention(E, H)
    written: list[dict[str, float]] = []
    with torch.no_grad(), watch(
        model, what=Observe(segments=parts()), log=lambda values, step: written.append(values)
    ) as recording:  # fmt: skip
        model(drawn())
    assert written[0]["attn/L00/H02/segments/a/b"] == pytest.approx(float(recording[0].segments["a", "b"][2]))
    again = Recording.load(recording.save(tmp_path / "recording.safetensors"))
    assert torch.equal(again[0].segments.mean, recording[0].segments.mean)
    assert recording.to_dict()["layers"]["MultiHeadAttention"]["segments"]["names"] == ["a", "b"]


def test_keys_beside_the_tokens_belong_to_none() -> None:
    model = nn.MultiheadAttention(E, H, add_bias_kv=True, batch_first=True)
    with torch.no_grad(), watch(model, what=Observe(segments=parts(), received_max=True)) as recording:
        model(x := drawn(), x, x, need_weights=False)
    mass = recording[0].segments
    assert mass.count.tolist() == [[12, 10]] * H
    assert (mass.mean.sum(-1) < 1).all()
    assert recording[0].received_max.shape == recording[0].received.shape


def test_segments_of_a_generating_language_model() -> None:
    transformers: Any = pytest.importorskip("transformers", reason="an optional dependency")
    sizes = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(1, 50, (1, 7), generator=torch.Generator().manual_seed(1))
    segments = Segments.from_spans({"document": (0, 4), "question": (4, 7), "answer": (7, 12)}, 12)
    with torch.no_grad(), watch(model, what=Observe(segments=segments)) as steps:
        text = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False)
    with torch.no_grad(), watch(model, what=Observe(segments=segments)) as whole:
        model(text)
    for layer in (0, 1):
        assert steps[layer].segments.count[0].tolist() == [4, 3, 4]  # the last token is not read
        rows = whole[layer].segments.sum[:, :2], steps[layer].segments.sum[:, :2]
        torch.testing.assert_close(*rows, rtol=1e-5, atol=1e-6)

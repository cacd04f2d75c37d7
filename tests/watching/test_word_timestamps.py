"""The functions of docs/guides/word_timestamps.md, against the token timestamps of transformers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from headscope import Observe, watch
from support.paths import DOCS

transformers: Any = pytest.importorskip("transformers", reason="an optional dependency")
pytestmark = pytest.mark.filterwarnings(
    "ignore:__array_wrap__ must accept:DeprecationWarning"
)  # transformers' np.repeat

LAYER = "model.decoder.layers.{}.encoder_attn"
BATCH, FRAMES = 2, 300


@pytest.fixture(scope="module")
def guide() -> dict[str, Any]:
    """What the guide defines, without the code between its definitions."""
    page = (DOCS / "guides" / "word_timestamps.md").read_text(encoding="utf-8")
    code = "".join(re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))
    defined: dict[str, Any] = {}
    exec("".join(re.findall(r"^(?:import|from) .*\n|^def .*\n(?:(?: .*)?\n)+", code, re.MULTILINE)), defined)
    return defined


def sound() -> Tensor:
    return torch.randn(BATCH, 8, FRAMES, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("frames", [None, [200, 300], [180, 180], [151, 88], [8, 299]])
def test_token_times_are_those_of_transformers(guide: dict[str, Any], frames: list[int] | None) -> None:
    options: dict[str, Any] = {"return_dict_in_generate": True}
    if frames is not None:
        options["attention_mask"] = (torch.arange(FRAMES) < torch.tensor(frames)[:, None]).long()
    model = guide["load_model"]("sdpa")
    alignment = model.generation_config.alignment_heads
    heads: dict[str, list[int]] = {}
    for layer, head in alignment:
        heads.setdefault(LAYER.format(layer), []).append(head)
    with torch.no_grad(), watch(model, what=Observe(row_stats=False, received=False), weights=heads) as recording:
        tokens = model.generate(sound(), **options)["sequences"]
    weights = torch.stack([recording.weights(LAYER.format(layer), head)[0] for layer, head in alignment], 1)
    with torch.no_grad():
        expected = guide["load_model"]("eager").generate(sound(), return_token_timestamps=True, **options)
    times = guide["token_times"](weights, frames)
    assert torch.equal(tokens, expected["sequences"])
    assert torch.allclose(times, expected["token_timestamps"])
    if frames is not None:
        assert (times.amax(1) <= torch.tensor(frames) * 0.01).all()


@pytest.mark.parametrize(
    ("shape", "frames"),
    [((2, 16, 150), None), ((2, 4, 2, 150), None), ((2, 4, 16, 3), None), ((2, 4, 16, 150), [200]),
     ((2, 4, 16, 150), [200, 7])],
)  # fmt: skip
def test_wrong_shapes_are_named(guide: dict[str, Any], shape: tuple[int, ...], frames: list[int] | None) -> None:
    with pytest.raises(ValueError, match=re.escape(f"weights, frames: got {list(shape)} and ")):
        guide["token_times"](torch.rand(shape), frames)


@pytest.mark.parametrize(("prompt", "queries"), [(1, [8]), (3, [6, 6])])
def test_two_generations_of_one_audio_are_joined_only_if_the_prompt_is_one_token(
    guide: dict[str, Any], prompt: int, queries: list[int]
) -> None:
    model = guide["load_model"]("sdpa")
    tokens = torch.full((BATCH, prompt), 3)
    length = prompt + 4
    with torch.no_grad(), watch(model, what=Observe(row_stats=False), weights={LAYER.format(0): [1]}) as recording:
        for _ in range(2):  # transformers' own loop, without Whisper's rules about the prompt
            transformers.GenerationMixin.generate(
                model, encoder_outputs=model.model.encoder(sound()), decoder_input_ids=tokens, max_length=length,
                min_length=length, do_sample=False,
            )  # fmt: skip
    assert [p.shape[1] for p in recording.weights(LAYER.format(0), 1)] == queries


def test_words_begin_at_tokens_with_a_leading_space(guide: dict[str, Any]) -> None:
    pieces = ["un", "til", " caf", "é", ",", " now"]

    def decode(ids: list[int]) -> str:
        return "".join(pieces[i] for i in ids)

    words = guide["words"](range(6), [0.0, 0.1, 0.2, 0.3, 0.4, 0.5], decode)
    assert words == [("until", 0.0), ("café,", 0.2), ("now", 0.5)]
    assert guide["words"]([], [], decode) == []

"""The steps of a text that is generated: described once for all layers, to the bit as if each call were described."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from headscope import MultiHeadAttention, Observe, Recording, masks, watch
from headscope._intercept import frames
from headscope.cache import GrowingCache, RollingCache
from headscope.watching import WatchError, _pass
from headscope.watching._earlier_calls import EarlierCalls
from support.same_recordings import assert_same

Generate = Callable[[], Any]
SIZES: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 32, "max_position_embeddings": 64,
}  # fmt: skip
ONLY_WEIGHTS = Observe(row_stats=False, received=False)
STEPS = 6


def make(kind: str, config: Any) -> Any:
    torch.manual_seed(0)
    return getattr(transformers, kind)(config).eval()


def llama(**options: Any) -> Any:
    return make("LlamaForCausalLM", transformers.LlamaConfig(**SIZES | options))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ids(*rows: list[int]) -> Tensor:
    return torch.tensor(rows)


def generating(model: Any, inputs: Tensor, **options: Any) -> Generate:
    lengths = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "do_sample": False, "pad_token_id": 0}
    return lambda: model.generate(inputs, **lengths | options)


class Cached(nn.Module):
    """Attention by SDPA, with a cache of its own."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if cache:
            k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
        cache["k"], cache["v"] = k, v
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1).transpose(1, 2).flatten(2)


class Layers(nn.Module):
    """Layers with a cache each."""

    def __init__(self, *layers: nn.Module, cache: Callable[[], Any] = dict[str, Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.cache = cache

    def forward(self, x: Tensor, caches: list[Any]) -> Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            x = x + layer(x, cache=cache)
        return x

    def generate(self) -> Tensor:
        x, caches = (
            torch.randn(2, 5, 16, generator=seeded(1)),
            [self.cache() for _ in self.layers],
        )
        out = self(x, caches)
        for _ in range(STEPS):
            out = self(out[:, -1:], caches)
        return out


class Attending(nn.Module):
    """A layer that attends by a function of transformers."""

    config = transformers.LlamaConfig(**SIZES, attn_implementation="sdpa")

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor, cache: None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attend = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS.get_interface("sdpa", None)
        return attend(self, q, k, v, None, scaling=0.25)[0].flatten(2)


def ours(cache: Callable[[], Any], **options: Any) -> Layers:
    torch.manual_seed(0)
    return Layers(*(MultiHeadAttention(16, 2, **options) for _ in range(3)), cache=cache)


def whisper() -> tuple[nn.Module, Generate]:
    config = transformers.WhisperConfig(
        vocab_size=32, d_model=16, encoder_layers=1, decoder_layers=3, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=8, decoder_ffn_dim=8, num_mel_bins=4, max_source_positions=12,
        max_target_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=3,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    model = make("WhisperForConditionalGeneration", config)
    sound, start = torch.randn(1, 4, 24, generator=seeded(1)), ids([3, 4])

    def generate() -> Tensor:
        cache, tokens = None, start
        for _ in range(STEPS):
            out = model(input_features=sound, decoder_input_ids=tokens, past_key_values=cache, use_cache=True)
            cache, tokens = out.past_key_values, out.logits[:, -1:].argmax(-1)
        return out.logits

    return model, generate


def mistral() -> Any:
    return make("MistralForCausalLM", transformers.MistralConfig(**SIZES, sliding_window=7))


def gemma() -> Any:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    options = {"head_dim": 6, "query_pre_attn_scalar": 6, "sliding_window": 7, "layer_types": types}
    return make("Gemma2ForCausalLM", transformers.Gemma2Config(**SIZES | options))


def gpt_oss() -> Any:
    options = {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
    return make("GptOssForCausalLM", transformers.GptOssConfig(**SIZES | options))


PADDED = {"attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])}
ONE, TWO = ids([5, 6, 7, 8, 9]), ids([0, 0, 5, 6, 7], [3, 4, 5, 6, 7])


def attending_by(model: Any, name: str) -> Any:
    model.set_attn_implementation(name)
    return model


def case(name: str) -> tuple[Any, Generate]:
    """Return a model, and a function that generates with it."""
    if name == "whisper":
        return whisper()
    if name in ("sdpa", "growing cache", "rolling cache"):
        cache = {"growing cache": GrowingCache, "rolling cache": lambda: RollingCache(7)}
        torch.manual_seed(0)
        model = Layers(*(Cached() for _ in range(3))) if name == "sdpa" else ours(cache[name])
        return model, model.generate
    model = {"mistral": mistral, "gemma": gemma, "gpt-oss": gpt_oss}.get(name, llama)()
    if name == "eager":
        model = attending_by(model, "eager")
    return model, generating(model, TWO, **PADDED) if name in ("padded", "gemma") else generating(model, ONE)


CASES = (
    "llama", "eager", "padded", "mistral", "gemma", "gpt-oss", "whisper", "sdpa", "growing cache", "rolling cache",
)  # fmt: skip


def recorded(model: nn.Module, generate: Generate, **options: Any) -> tuple[Recording, Any]:
    with torch.no_grad(), watch(model, **options) as recording:
        out = generate()
    return recording, out


def one_by_one(model: nn.Module, generate: Generate, **options: Any) -> tuple[Recording, Any]:
    """Record with each call of each layer described, and merged, on its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headscope.watching._recording.pooled", list)
        patch.setattr(EarlierCalls, "repeated", lambda *_: None)
        return recorded(model, generate, **options)


@pytest.fixture
def described(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The layers whose calls were described, in order."""
    measure, found = _pass.Pass._measure, list[str]()

    def noted(self: _pass.Pass, name: str, *others: Any) -> Any:
        found.append(name)
        return measure(self, name, *others)

    monkeypatch.setattr(_pass.Pass, "_measure", noted)
    return found


WHATS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "accelerated": {"accelerate": True},
    "sample": {"rows": 2, "what": Observe(received_max=True, windows=(2,), first=3)},
    "map": {"what": Observe(map=4, edges=3)},
    "weights": {"what": Observe(weights=(1,))},
    "only weights": {"what": Observe(row_stats=False, received=False, weights=(0, 1))},
}


@pytest.mark.parametrize("options", WHATS)
@pytest.mark.parametrize("name", CASES)
def test_steps_are_to_the_bit_those_that_are_described(name: str, options: str, tmp_path: Path) -> None:
    model, generate = case(name)
    with torch.no_grad():
        expected = generate()
    twice = [recorded(model, generate, **WHATS[options]) for _ in range(2)]  # the first one learns the modules
    apart, out = one_by_one(model, generate, **WHATS[options])
    for recording, output in twice:
        assert_same(recording, apart, tmp_path)
        assert torch.equal(output, out)
    if options != "accelerated":
        assert torch.equal(out, expected)


DESCRIBED = {
    "llama": (6, 1, 1), "eager": (6, 1, 1), "padded": (6, 1, 1), "sdpa": (7, 1, 1), "growing cache": (7, 1, 1),
    "mistral": (6, 4, 4), "gemma": (6, 6, 4), "rolling cache": (7, 5, 5),  # until the window passes the first keys
    "gpt-oss": (6, 6, 6),  # sinks are numbers of the layer
    "whisper": (6, 1, 1, 2, 1, 1),  # and cross-attention in its first step only
}  # fmt: skip
"""Of each layer, how many of the 6 or 7 calls are described: the first one, which is compared; the first layer's."""


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_described_once_for_all_layers(name: str, described: list[str]) -> None:
    model, generate = case(name)
    recorded(model, generate)
    described.clear()
    recorded(model, generate)
    assert tuple(Counter(described).values()) == DESCRIBED[name]


@pytest.mark.parametrize("name", ["llama", "padded"])
@pytest.mark.parametrize("what", [Observe(), ONLY_WEIGHTS])
@pytest.mark.parametrize("fewer", [False, True])
def test_heads_of_other_layers_are_chosen_in_a_description(
    name: str, what: Observe, fewer: bool, described: list[str], tmp_path: Path
) -> None:
    model, generate = case(name)
    heads = {f"model.layers.{n}.self_attn": [n, *([] if fewer and n == 1 else [3])] for n in range(3)}
    recorded(model, generate)
    described.clear()
    recording, _ = recorded(model, generate, what=what, weights=heads)
    assert tuple(Counter(described).values()) == (6, 1, 1)
    apart, _ = one_by_one(model, generate, what=what, weights=heads)
    assert_same(recording, apart, tmp_path)
    missing = heads | {"model.layers.2.self_attn": [4]}
    with pytest.raises(WatchError, match=r"layers\.2.*head 4 does not exist"):
        recorded(model, generate, what=what, weights=missing)


def test_a_mask_that_a_layer_changes_is_read_again() -> None:
    """All layers get the same tensor."""

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama()
            for layer in self.model.model.layers[:2]:
                layer.register_forward_hook(self.hide)
            self.mask: Tensor | None = None

        def hide(self, *_: Any) -> None:
            assert self.mask is not None
            self.mask[..., 1 + int(self.mask[0, 0, -1, 1:].logical_not().sum())] = False

        def forward(self) -> Tensor:
            self.mask = torch.ones(1, 1, 6, 6, dtype=torch.bool).tril()
            return self.model(ids([1, 2, 3, 4, 5, 6]), attention_mask=self.mask).logits

    model = Changing()
    with torch.no_grad(), watch(model) as recording:
        model()
        model()
    seen = [int(stats.eligible[0].sum()) for stats in recording.stats.parts.values() if stats.eligible is not None]
    assert seen == [2 * 21, 2 * 15, 2 * 10], "the rows of hidden keys do not count, either"


@pytest.mark.parametrize("options", ["defaults", "weights", "only weights"])
def test_a_recording_does_not_hold_the_masks_of_the_passes(options: str) -> None:
    model, held = llama(), list[weakref.ref[Tensor]]()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if kwargs["attention_mask"] is not None:
            held.append(weakref.ref(kwargs["attention_mask"]))

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
    recording, _ = recorded(model, generating(model, TWO, **PADDED), **WHATS[options])
    gc.collect()
    assert len(held) == 3 * STEPS
    assert [each() for each in held] == [None] * len(held)
    assert len(recording.layers) == 3


def test_self_and_cross_attention_of_equal_sizes_are_told_apart() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self_attn, self.cross_attn = Cached(), Cached()

        def forward(self, x: Tensor, cache: tuple[dict[str, Tensor], dict[str, Tensor]]) -> Tensor:
            return self.cross_attn(self.self_attn(x, cache[0]), cache[1])

    torch.manual_seed(0)
    model = Layers(Block(), Block(), cache=lambda: ({}, {}))
    recording, _ = recorded(model, model.generate)
    apart, _ = one_by_one(model, model.generate)
    assert recording.about.kinds == apart.about.kinds
    assert recording.stats.parts["layers.0.cross_attn"].moments["previous"].count.tolist() == [2 * 4, 2 * 4]
    assert recording.to_dict()["layers"] == apart.to_dict()["layers"]


class Counted(TorchFunctionMode):
    """Counts the functions of torch."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **kwargs or {})


def test_a_module_without_attention_of_its_own_runs_without_the_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model in a module of one's own, whose functions are observed, too."""
    from headscope._intercept.function_mode import Mode

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = llama(), Cached()

        def forward(self) -> Tensor:
            x = self.inner(ids([1, 2, 3]), use_cache=False).logits
            return self.last(x[..., :16], {})

    observed, run = list[str](), Mode.__torch_function__

    def noted(self: Mode, func: Any, *others: Any) -> Any:
        observed.append(frames.thread.stack[-1].name)
        return run(self, func, *others)

    model = Wrapped()
    recorded(model, model)
    monkeypatch.setattr(Mode, "__torch_function__", noted)
    recording, out = recorded(model, model)
    assert {*observed} == {"Wrapped", "last"}
    assert len(recording.layers) == 4
    with torch.no_grad(), Counted() as outer, watch(model) as again:
        assert torch.equal(model(), out)
    with torch.no_grad(), Counted() as plain:
        model()
    assert outer.count >= plain.count
    assert again.to_dict()["layers"] == recording.to_dict()["layers"]


class Causal(Attending):
    is_causal = True


class Bidirectional(Attending):
    @property
    def is_causal(self) -> bool:
        return False


class Windowed(Causal):
    sliding_window = 2


class Unhashable(Causal):
    sliding_window: ClassVar = [2]


@pytest.mark.parametrize("others", [(Bidirectional,), (Windowed,), (Unhashable,), (Windowed, Bidirectional, Causal)])
@pytest.mark.parametrize("accelerate", [False, True])
def test_attributes_of_classes_tell_layers_apart(others: tuple[type[Attending], ...], accelerate: bool) -> None:
    torch.manual_seed(0)
    kinds = (Causal, *others)
    model = Layers(*(kind() for kind in kinds))
    inputs = [torch.randn(1, length, 16) for length in (5, 7, 6)]  # the second length is described by one layer
    steps = [partial(model, x, [None] * len(kinds)) for x in inputs]
    recording, out = recorded(model, lambda: [step() for step in steps], accelerate=accelerate)
    apart, expected = one_by_one(model, lambda: [step() for step in steps], accelerate=accelerate)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    assert recording.to_dict()["layers"] == apart.to_dict()["layers"]


@pytest.mark.parametrize("change", ["hook of a child", "child"])
def test_attention_that_is_added_to_a_sequence_of_modules_is_seen(change: str) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.parts = Cached(), nn.Sequential(nn.Linear(16, 16))

        def forward(self) -> Tensor:
            return self.parts(self.first(torch.ones(1, 3, 16), {}))

    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])[:, 0]

    model, attends = Wrapped(), Attends()
    recorded(model, model)
    with torch.no_grad(), watch(model) as recording:
        model()
        if change == "child":
            model.parts.append(attends)
        else:
            model.parts[0].register_forward_hook(lambda module, args, out: attends(out))
        model()
    assert [recording.stats.parts[name].runs for name in ("first", "parts")] == [2, 1]


def test_a_call_that_is_not_finite_is_not_that_of_others() -> None:
    torch.manual_seed(0)
    model, bad = Cached(), torch.ones(1, 3, 16)
    bad[0, 1] = torch.nan
    inputs = [torch.ones(1, 3, 16), bad, torch.ones(1, 3, 16), torch.ones(1, 3, 16)]
    with torch.no_grad(), watch(model, what=replace(ONLY_WEIGHTS, weights=(0,))) as recording:
        for x in inputs:
            model(x, {})
    part = recording.stats.parts["Cached"]
    assert (part.runs, part.rows.tolist(), part.broken.tolist()) == (4, [10, 12], [2, 0])


def test_chance_of_a_step_is_that_of_its_row_in_a_causal_call() -> None:
    """Its factors come from a table for many steps, with borders at multiples of 256."""
    from headscope import observe

    random = seeded(0)
    what = Observe(windows=(3, 40), first=4)
    with torch.device("meta"):  # the table is on the CPU whatever the default device is
        observe(*(torch.zeros(1, 1, n, 8, device="cpu") for n in (1, 900)), what=what)
    for keys in (1, 2, 5, 255, 256, 257, 513):
        q, k = torch.randn(1, 2, keys, 8, generator=random), torch.randn(1, 2, keys, 8, generator=random)
        step = observe(q[:, :, -1:], k, what=what)
        last = torch.zeros(keys, dtype=torch.bool)
        last[-1] = True
        row = observe(q, k, mask=masks.causal(), what=Observe(windows=(3, 40), first=4, rows=last))
        for name in ("distance", "first", "window_3", "window_40", "streaming_3", "self", "previous"):
            for part in ("null", "z"):
                one, other = getattr(step[name], part), getattr(row[name], part)
                torch.testing.assert_close(
                    one, other, rtol=1e-5, atol=1e-6, equal_nan=True, msg=f"{name} {part} {keys}"
                )

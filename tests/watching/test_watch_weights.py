"""watch(weights=...): the weights of chosen heads of a model, against its own eager weights in float64."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from headscope import MultiHeadAttention, Observe, Recording, masks, watch
from headscope._observe import inputs
from headscope._observe.chosen_heads import RepeatedWeights
from headscope.watching import WatchError, WatchWarning

ONLY = Observe(row_stats=False, received=False)
SIZES = {"vocab_size": 53, "hidden_size": 24, "intermediate_size": 16, "num_hidden_layers": 3, "num_attention_heads": 6}
ALONE = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}


def llama(**options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=3, initializer_range=0.3, **ALONE, **options)
    return transformers.LlamaForCausalLM(config).eval().double()


def eager(model: Any) -> Any:
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    return other


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-7)  # transformers' softmax is in float32


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_weights_of_a_generation_are_those_of_one_pass(attention: str) -> None:
    model = llama()
    model.set_attn_implementation(attention)
    ids = torch.randint(3, 53, (2, 7), generator=torch.Generator().manual_seed(1))
    seen = torch.ones_like(ids)
    padding = 3 if attention == "sdpa" else 0  # on the left; eager gives NaN for such rows in float64
    seen[0, :padding] = 0
    with torch.no_grad(), watch(model, weights={"model.layers.1": [0, 5], "*.layers.2": [3]}) as recording:
        out = model.generate(ids, attention_mask=seen, max_new_tokens=5, do_sample=False)
    again = eager(model)
    with torch.no_grad():
        short, long = (again(x, output_attentions=True).attentions for x in (out[:1, padding:-1], out[1:, :-1]))
    for layer, head in ((1, 0), (1, 5), (2, 3)):
        (p,) = recording.weights(f"model.layers.{layer}.self_attn", head)
        assert p.shape == (2, 11, 11)
        close(p[0, padding:, padding:], short[layer][0, head])
        close(p[1], long[layer][0, head])
        assert not bool(p[0, :padding].any())  # it sees no key
        assert not bool(p[0, :, :padding].any())
    assert recording.layers == tuple(f"model.layers.{n}.self_attn" for n in range(3))
    assert recording[0].parts["model.layers.0.self_attn"].weights == ()
    assert recording[1].weights_rows.tolist() == [*range(11)]


def test_the_output_stays_the_same_to_the_bit() -> None:
    model = llama().float()
    ids = torch.randint(3, 53, (2, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = model(ids).logits
        with watch(model, what=ONLY, weights={"*": [1, 2]}):
            assert torch.equal(model(ids).logits, plain)


def test_only_the_layers_of_weights_are_recorded_if_nothing_else_is_measured() -> None:
    model, ids = llama(), torch.arange(3, 14)[None]
    with torch.no_grad(), watch(model, what=ONLY, weights={"model.layers.2": [4]}) as recording:
        model(ids)
        model(ids)
    assert recording.layers == ("model.layers.2.self_attn",)
    assert recording.about.options["weights"] == {"model.layers.2": [4]}
    first, second = recording.weights(0, 4)
    assert torch.equal(first, second)
    with torch.no_grad(), watch(model, what=Observe(weights=(4,)), layers="model.layers.1") as recording:
        model(ids)
    assert (recording.layers, recording.about.options["weights"]) == (("model.layers.1.self_attn",), [4])
    with torch.no_grad():
        whole = eager(model)(ids, output_attentions=True).attentions
    close(first, whole[2][:, 4])
    close(recording.weights(0, 4)[0], whole[1][:, 4])


def test_a_sliding_cache_and_a_static_one() -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(
        **SIZES, num_key_value_heads=2, initializer_range=0.3, sliding_window=4, **ALONE
    )
    model = transformers.MistralForCausalLM(config).eval().double()
    ids = torch.arange(3, 10)[None]
    for options in ({}, {"cache_implementation": "static"}):
        with torch.no_grad(), watch(model, what=ONLY, weights={"model.layers.0": [2]}) as recording:
            out = model.generate(ids, max_new_tokens=6, do_sample=False, **options)
        with torch.no_grad():
            whole = eager(model)(out[:, :-1], output_attentions=True).attentions[0][:, 2]
        (p,) = recording.weights(0, 2)
        close(p[:, :, :12], whole)
        assert not bool(p[:, :, 12:].any())


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=53, d_model=24, d_kv=5, d_ff=16, num_layers=2, num_heads=4, decoder_start_token_id=0, **ALONE
    )
    return transformers.T5ForConditionalGeneration(config).eval().double()


def test_cross_attention_of_an_encoder_decoder_and_several_generations() -> None:
    model = t5()
    ids = torch.randint(3, 53, (2, 2, 7), generator=torch.Generator().manual_seed(1))
    name = "decoder.block.1.layer.1.EncDecAttention"
    with torch.no_grad(), watch(model, weights={name: [3], "decoder.block.*.layer.0": [1]}) as recording:
        outs = [model.generate(each, max_new_tokens=5, do_sample=False) for each in ids]
    for n, (each, out) in enumerate(zip(ids, outs, strict=True)):
        with torch.no_grad():
            whole = eager(model)(input_ids=each, decoder_input_ids=out[:, :-1], output_attentions=True)
        assert len(recording.weights(name, 3)) == 2
        close(recording.weights(name, 3)[n], whole.cross_attentions[1][:, 3])
        close(recording.weights("decoder.block.1.layer.0.SelfAttention", 1)[n], whole.decoder_attentions[1][:, 1])


class Written(nn.Module):
    """An attention written by hand, with grouped heads, a mask and dropout."""

    def __init__(self, stable: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 24 + 2 * 12)
        self.stable = stable
        self.seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split((24, 12, 12), -1)
        q, k, v = (y.unflatten(-1, (-1, 6)).transpose(1, 2) for y in (q, k, v))  # [B, H, T, 6]
        k, v = (y.repeat_interleave(2, 1) for y in (k, v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(6)
        scores = scores.masked_fill(~torch.ones(x.shape[1], x.shape[1]).tril().bool(), -math.inf)
        if self.stable:
            exps = (scores - scores.amax(-1, keepdim=True)).exp()
            p = exps / exps.sum(-1, keepdim=True)
        else:
            p = scores.softmax(-1)
        self.seen = p.detach()
        p = nn.functional.dropout(p, 0.3, self.training)
        return (p @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(("stable", "training"), [(False, False), (False, True), (True, False)])
def test_an_attention_that_a_module_writes_out(stable: bool, training: bool) -> None:
    torch.manual_seed(0)
    model = Written(stable).double().train(training)
    x = torch.randn(2, 11, 24, dtype=torch.float64)
    for what in (ONLY, Observe()):
        with watch(model, what=what, weights={"Written": [1, 3]}) as recording:
            model(x)
        assert model.seen is not None
        for head in (1, 3):
            (p,) = recording.weights(0, head)
            close(p, model.seen[:, head])
            assert not bool(p.triu(1).any())


def test_headscope_and_torch_modules() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 11, 24)
    layer = nn.MultiheadAttention(24, 4, batch_first=True)
    with torch.no_grad(), watch(layer, weights={"MultiheadAttention": [2]}) as recording:
        layer(x, x, x, need_weights=False)
    _, p = layer(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(recording.weights(0, 2)[0], p[:, 2].detach(), rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------- limits and mistakes


def test_a_recording_that_would_be_too_large_stops_before_the_call() -> None:
    model, ids = llama(), torch.arange(3, 14)[None]
    size = 2 * 11 * 11 * 8 / 2**30
    with torch.no_grad(), watch(model, what=ONLY, weights={"model.layers.1": [0, 5]}, weights_gib=2.5 * size) as seen:
        model(ids)
        model(ids)
        with pytest.raises(
            WatchError,
            match=r"watch: layer model.layers.1.self_attn: weights: those of heads 0, 5, \[B, heads, R, K\] = "
            r"\[1, 2, 11, 11\], need .* GiB after .* GiB of earlier calls; expected at most .* GiB; observe fewer rows",
        ):
            model(ids)
    assert len(seen.weights(0, 5)) == 2
    with torch.no_grad(), watch(model, weights={"model.layers.1": [0, 5]}, rows=3, weights_gib=size / 3) as seen:
        model(ids)
    assert seen.weights(1, 0)[0].shape == (1, 3, 11)
    assert seen[1].weights_rows.tolist() == [1, 5, 9]


def test_heads_and_layers_that_do_not_exist() -> None:
    model, ids = llama(), torch.arange(3, 14)[None]
    with (
        torch.no_grad(),
        watch(model, weights={"model.layers.1": [6]}),
        pytest.raises(WatchError, match=r"layer model.layers.1.self_attn: weights: head 6 does not exist; expected"),
    ):
        model(ids)
    with pytest.raises(ValueError, match=r"weights: 'model.layers.9' does not match any module"):
        watch(model, weights={"model.layers.9": [0]})
    with pytest.raises(ValueError, match=r"weights: 'model.layers.1' does not match any module that layers= selects"):
        watch(model, weights={"model.layers.1": [0]}, layers="model.layers.2")
    with pytest.raises(TypeError, match=r"weights: got list, expected a mapping"):
        watch(model, weights=[0, 1])  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"weights: got int, expected a tuple of heads"):
        watch(model, weights={"model.layers.1": 3})  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"weights: got int, expected names or patterns of layers"):
        watch(model, weights={0: [3]})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"weights: 'model.layers.1' has no heads; expected at least one"):
        watch(model, weights={"model.layers.1": []})
    with pytest.raises(ValueError, match=r"weights: got no layers"):
        watch(model, weights={})
    with pytest.raises(ValueError, match=r"weights: was passed twice"):
        watch(model, what=Observe(weights=(0,)), weights={"model.layers.1": [0]})
    with pytest.raises(ValueError, match=r"weights_gib: got -1"):
        watch(model, weights={"model.layers.1": [0]}, weights_gib=-1)
    with (
        pytest.warns(WatchWarning, match=r"weights: 'model.norm' does not match any layer"),
        torch.no_grad(),
        watch(model, weights={"model.norm": [0], "model.layers.1": [0]}),
    ):
        model(ids)


def test_a_recording_with_weights_is_saved_loaded_and_copied(tmp_path: Path) -> None:
    model, ids = llama(), torch.arange(3, 14)[None]
    with torch.no_grad(), watch(model, weights={"model.layers.1": [0, 5]}, verify=2) as recording:
        model.generate(ids, max_new_tokens=3, do_sample=False)
    (p,) = recording.weights(1, 5)
    assert p.dtype == torch.float64
    loaded = Recording.load(recording.save(tmp_path / "recording.safetensors"))
    for other in (loaded, pickle.loads(pickle.dumps(recording)), copy.deepcopy(recording)):
        assert torch.equal(other.weights(1, 5)[0], p)
    assert loaded.about.options["weights"] == {"model.layers.1": [0, 5]}
    entry = loaded.to_dict()["layers"]["model.layers.1.self_attn"]["weights"]
    assert entry == {"heads": [0, 5], "shapes": [[1, 11, 11], [1, 1, 12], [1, 1, 13]]}
    assert loaded.save_html(tmp_path / "page.html").exists()


@pytest.fixture
def repeated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The weights of calls that were not described, because they were like an earlier one."""
    of, found = RepeatedWeights.of, list[Any]()

    def noted(self: RepeatedWeights, q: Tensor, k: Tensor) -> Any:
        found.append(of(self, q, k))
        return found[-1]

    monkeypatch.setattr(RepeatedWeights, "of", noted)
    return found


CALLS: dict[str, tuple[dict[str, Any], dict[str, Any], Observe]] = {
    "plain": ({}, {}, Observe()),
    "causal": ({}, {"mask": masks.causal()}, Observe()),
    "window": ({}, {"mask": masks.Band(3, 0)}, Observe(map=4)),
    "grouped": ({"kv_heads": 1}, {"mask": masks.causal()}, Observe()),
    "softcap": ({"softcap": 5.0}, {}, Observe()),
    "sample of rows": ({}, {"mask": masks.causal()}, Observe(rows=4)),
    "cross-attention": ({}, {"context": torch.ones(2, 5, 24)}, Observe()),
    "several blocks": ({}, {"mask": masks.causal()}, Observe()),
}


@pytest.mark.parametrize("case", CALLS)
@torch.no_grad()
def test_weights_of_a_call_like_an_earlier_one(case: str, repeated: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    options, call, what = CALLS[case]
    attention = MultiHeadAttention(24, 6, **options).eval()
    numbers = torch.randn(3, 2, 13, 24)
    if case == "several blocks":
        monkeypatch.setattr(inputs, "BLOCK", 64)
        numbers = torch.randn(3, 2, 17, 24)  # other cases have been described as one block
    heads = {"*": [0, 4]}
    if "context" in call:
        call = {"context": call["context"] * torch.randn(24)}
    with watch(attention, what=what, weights=heads):
        attention(numbers[0], **call)
        attention(numbers[0], **call)
    before = len(repeated)
    with watch(attention, what=what, weights=heads) as recording:
        for x in numbers:
            attention(x, **call)
    assert len(repeated) == before + 3
    described: list[list[Tensor]] = [[], []]
    for x in numbers:
        with watch(attention, what=what, weights=heads, verify=1) as each:
            attention(x, **call)
        for found, head in zip(described, heads["*"], strict=True):
            found += each.weights(0, head)
    for expected, head in zip(described, heads["*"], strict=True):
        got = recording.weights(0, head)
        assert len(got) == len(expected) == 3
        assert all(map(torch.equal, got, expected))


@torch.no_grad()
def test_a_repeated_call_that_is_not_finite_or_too_large_is_described(repeated: list[Any]) -> None:
    torch.manual_seed(0)
    attention, x = MultiHeadAttention(24, 6).eval(), torch.randn(1, 11, 24)
    size = 2 * 11 * 11 * 4 / 2**30
    broken = x.clone()
    broken[0, 3] = math.nan
    for _ in range(2):
        with watch(attention, weights={"*": [0, 5]}, weights_gib=3.5 * size) as recording:
            attention(x)
            attention(x)
            attention(broken)
            with pytest.raises(WatchError, match=r"need .* GiB after .* GiB of earlier calls"):
                attention(x)
    assert repeated
    first, second, third = recording.weights(0, 5)
    assert torch.equal(first, second)
    assert bool(third.isnan().all())


@torch.no_grad()
def test_repeated_weights_are_saved_and_merged(repeated: list[Any], tmp_path: Path) -> None:
    model, ids = llama().float(), torch.arange(3, 14)[None]
    options: dict[str, Any] = {"weights": {"model.layers.1": [0, 5]}}
    for accelerate in (False, True):
        for _ in range(2):
            with watch(model, accelerate=accelerate, **options) as recording:
                model(ids)
                model(ids.flip(-1))
        assert len(repeated) >= 2
        recording.save(path := tmp_path / f"{accelerate}.safetensors")
        loaded = Recording.load(path)
        expected = [eager(model)(x, output_attentions=True).attentions[1][:, 5] for x in (ids, ids.flip(-1))]
        for got in (recording.weights(1, 5), loaded.weights(1, 5)):
            for p, wanted in zip(got, expected, strict=True):
                torch.testing.assert_close(p, wanted, rtol=1e-4, atol=1e-6)
        repeated.clear()


def test_a_layer_that_runs_twice_a_pass_does_not_mix_its_texts() -> None:
    """Steps of the two places of the layer stand at positions that follow each other, with other keys."""
    torch.manual_seed(0)
    layer = nn.Module()
    layer.attention = Cached()
    caches: list[dict[str, Tensor]] = [{}, {}]
    with torch.no_grad(), watch(layer, weights={"attention": [1]}, unseen="ignore") as recording:
        for length in (4, 1, 1, 1):
            for cache in caches:
                layer.attention(torch.randn(1, length, 16), cache)
    shapes = [p.shape[1:] for p in recording.weights("attention", 1)]
    assert shapes == [(4, 4), (4, 4), (1, 5), (1, 5), (1, 6), (1, 6), (1, 7), (1, 7)]


class Cached(nn.Module):
    """Attention with a cache of keys, as of a layer that a model shares between two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).movedim(-3, 0).transpose(-2, -3)
        k, v = (torch.cat([cache[name], new], -2) if name in cache else new for name, new in (("k", k), ("v", v)))
        cache |= {"k": k, "v": v}
        seen = torch.ones(q.shape[-2], k.shape[-2]).tril(k.shape[-2] - q.shape[-2]).bool()
        return nn.functional.scaled_dot_product_attention(q, k, v, seen)

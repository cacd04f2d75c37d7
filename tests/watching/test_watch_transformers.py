"""watch on models of transformers: caches, generation, training, own attention functions, and what is refused."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import headscope
from headscope import Observe, Recording, watch
from headscope._intercept import transformers as intercepted_transformers
from headscope._intercept import transformers_function
from headscope.watching import WatchError, register_transformers
from support.watched_models import FAMILIES, IDS, PADDING, TARGET

STEPS = ((0, 4), (4, 5), (5, 6), (6, 9), (9, 11))

pytestmark = pytest.mark.filterwarnings("ignore")


def model_of(family: str, implementation: str = "sdpa") -> Any:
    return FAMILIES[family][0](implementation).model


@pytest.fixture
def attention() -> Iterator[Any]:
    """Registers an attention function under the name "mine", and takes it back."""
    interface = transformers.AttentionInterface

    def register(function: Any) -> None:
        interface.register("mine", function)
        masks = transformers.AttentionMaskInterface
        masks.register("mine", masks._global_mapping["sdpa"])

    yield register
    interface._global_mapping.pop("mine", None)
    transformers.AttentionMaskInterface._global_mapping.pop("mine", None)


def assert_same(got: Recording, wanted: Recording, *, leave: tuple[str, ...] = ()) -> None:
    assert got.layers == wanted.layers
    for layer in wanted.layers:
        for name in {*wanted.stats[layer].names} - {*leave}:
            one, other = got[layer, name], wanted[layer, name]
            assert one.count.tolist() == other.count.tolist(), f"{layer} {name}"
            torch.testing.assert_close(
                one.mean, other.mean, rtol=1e-5, atol=1e-5, equal_nan=True, msg=f"{layer} {name}"
            )
        keys = wanted.stats[layer].received.shape[1]
        for part in ("received", "eligible"):
            one, other = getattr(got.stats[layer], part), getattr(wanted.stats[layer], part)
            assert not one[:, keys:].any(), "room that no key has taken"
            torch.testing.assert_close(one[:, :keys], other, rtol=5e-5, atol=5e-5)  # a model rounds otherwise in steps


# ---------------------------------------------------------------- caches


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt2"])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_steps_with_a_cache_add_up_to_one_pass(family: str, kind: str, implementation: str) -> None:
    """The same rows at the same positions, padding on the left, whatever the cache has forgotten or has room for."""
    if implementation not in FAMILIES[family][1]:
        implementation = "headscope"
        register_transformers()
    model = model_of(family, implementation)
    steps, whole = in_steps_and_whole(model, kind)
    forgets = ("first", "streaming_2") if family in ("mistral", "gemma2") else ()
    assert_same(steps, whole, leave=forgets)
    for name in forgets:
        assert int(steps[0, name].count[0]) < int(whole[0, name].count[0]), "left out once the first keys are gone"


def in_steps_and_whole(model: Any, kind: str) -> tuple[Recording, Recording]:
    """The same text step by step, with a cache of this kind, and in one pass."""
    options: Any = {"tokens": "inputs", "what": Observe(windows=(2,))}
    room = {"max_cache_len": 16} if kind == "StaticCache" else {}
    cache = getattr(transformers, kind)(config=model.config, **room)
    with torch.no_grad(), watch(model, **options) as whole:
        model(IDS, attention_mask=PADDING, use_cache=False)
    with torch.no_grad(), watch(model, **options) as steps:
        for start, stop in STEPS:
            model(IDS[:, start:stop], attention_mask=PADDING[:, :stop], past_key_values=cache, use_cache=True)
    assert steps.forwards == len(STEPS)
    return steps, whole


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("blocks", ["mhmh", "mhmhm"])
def test_layers_that_share_a_module_have_each_their_own_cache(kind: str, blocks: str) -> None:
    config = transformers.Zamba2Config(
        vocab_size=61, hidden_size=24, intermediate_size=20, num_hidden_layers=len(blocks), num_attention_heads=3,
        num_key_value_heads=3, num_mem_blocks=1, n_mamba_heads=2, mamba_headdim=24, mamba_d_state=8, mamba_ngroups=1,
        chunk_size=8, layers_block_type=[{"m": "mamba", "h": "hybrid"}[block] for block in blocks], pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.Zamba2ForCausalLM(config).eval()
    assert_same(*in_steps_and_whole(model, kind))


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
@pytest.mark.parametrize("family", ["Gemma3n", "Gemma4"])
def test_layers_without_keys_of_their_own_stand_where_those_do_whose_keys_they_share(kind: str, family: str) -> None:
    own: Any = {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4} if family == "Gemma3n" else {}
    config = getattr(transformers, f"{family}TextConfig")(
        vocab_size=61, hidden_size=24, intermediate_size=20, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, sliding_window=5, layer_types=["full_attention", "sliding_attention"] * 2,
        num_kv_shared_layers=2, vocab_size_per_layer_input=61, hidden_size_per_layer_input=8, pad_token_id=0, **own,
    )  # fmt: skip
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    steps, whole = in_steps_and_whole(model, kind)
    assert len(whole.layers) == 4
    assert_same(steps, whole, leave=("first", "streaming_2"))


def test_a_decoder_that_only_reads_a_cache_stands_behind_it() -> None:
    from transformers.models.diffusion_gemma.modeling_diffusion_gemma import DiffusionGemmaDecoderModel

    text = transformers.DiffusionGemmaTextConfig(
        vocab_size=61, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=6, global_head_dim=6, num_global_key_value_heads=2, sliding_window=5,
        layer_types=["sliding_attention", "full_attention"], num_experts=4, top_k_experts=2, moe_intermediate_size=8,
    )  # fmt: skip
    model: Any = DiffusionGemmaDecoderModel(transformers.DiffusionGemmaConfig(text_config=text)).eval()
    cache = transformers.DynamicCache(config=text)
    for layer in range(2):
        cache.update(torch.randn(2, 2, 9, 6), torch.randn(2, 2, 9, 6), layer)
    with torch.no_grad(), watch(model) as seen:
        model(TARGET, past_key_values=cache)
    rows = TARGET.numel()
    assert seen["previous"].count.tolist() == seen["self"].count.tolist() == [[rows] * 4] * 2
    assert seen["next"].count.tolist() == [[rows - len(TARGET)] * 4] * 2, "the last of each text has none"
    assert [part.eligible[0].tolist() for part in seen.stats] == [[0] * 5 + [rows] * 10, [rows] * 15]


def test_a_token_whose_own_key_is_not_among_the_chosen_is_no_padding() -> None:
    """A layer that looks at four keys of its choice; the weights are the model's own."""
    config = transformers.DeepseekV32Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, num_experts_per_tok=2, n_group=1,
        topk_group=1, first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8,
        v_head_dim=8, head_dim=4, index_topk=4, index_n_heads=2, index_head_dim=8, mlp_layer_types=["dense"],
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.DeepseekV32ForCausalLM._from_config(config, attn_implementation="eager").eval()
    ids, padding = torch.randint(3, 61, (2, 12)), torch.ones(2, 12, dtype=torch.long)
    padding[1, :3] = 0
    cache, found = transformers.DynamicCache(config=config), list[Tensor]()
    with torch.no_grad(), watch(model) as seen:
        for start, stop in ((0, 7), (7, 8), (8, 9), (9, 12)):
            out = model(
                ids[:, start:stop], attention_mask=padding[:, :stop], past_key_values=cache, output_attentions=True
            )
            found.append(F.pad(out.attentions[0], (0, 12 - stop)))
    p = torch.cat(found, 2)  # [B, H, Q, K]
    real = padding.bool()
    assert not (p.diagonal(0, 2, 3).amax(1) > 0)[real].all(), "a token that nobody has chosen"
    first = torch.stack([p[0, :, :, 0], p[1, :, :, 3]])
    for name, wanted in {"first": first, "entropy": torch.special.entr(p).sum(-1)}.items():
        assert seen[0, name].count.tolist() == [21] * 4
        torch.testing.assert_close(
            seen[0, name].mean, wanted.transpose(1, 2)[real].mean(0).double(), rtol=1e-5, atol=1e-6, check_dtype=False
        )
    assert seen.stats[0].received is not None
    wanted = torch.einsum("bhqk,bq->hk", p.double(), real.double())
    torch.testing.assert_close(seen.stats[0].received, wanted, rtol=1e-5, atol=1e-6)


def test_keys_of_an_encoder_behind_the_decoders_own_stand_nowhere() -> None:
    """T5Gemma 2's decoder attends to both in one softmax."""
    own: Any = {
        "vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 6, "sliding_window": 5, "query_pre_attn_scalar": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    }  # fmt: skip
    vision = {"hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.T5Gemma2Config(
        encoder={"text_config": own, "vision_config": vision}, decoder={**own, "cross_attention_hidden_size": 24},
        bos_token_id=1, decoder_start_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.T5Gemma2ForConditionalGeneration(config).eval()
    with torch.no_grad(), watch(model) as steps:
        ids = model.generate(IDS[:1, :6], max_new_tokens=8, do_sample=False, eos_token_id=None)
    with torch.no_grad(), watch(model) as whole:
        model(input_ids=IDS[:1, :6], decoder_input_ids=ids[:, :-1])
    assert whole.about.kinds["model.decoder.layers.1.self_attn"] == "self"
    assert whole.stats["model.decoder.layers.1.self_attn"].eligible[0].tolist() == [8, 7, 6, 5, 4, 3, 2, 1]
    assert_same(steps, whole, leave=("first",))


@pytest.mark.parametrize("tokens", ["inputs", "given", "given twice"])
@pytest.mark.parametrize("steps", [(1,) * 14, (9, 5), (3, 7, 4)], ids=str)
def test_the_token_before_the_oldest_key_that_is_kept(tokens: str, steps: tuple[int, ...]) -> None:
    """The last query's induction key is the oldest in the window: that of the token before it has been dropped."""
    config = transformers.MistralConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=99,
        intermediate_size=32, sliding_window=8,
    )  # fmt: skip
    model: Any = transformers.MistralForCausalLM(config).eval()
    first, second = (
        [5, 6, 7, 8, 9, 50, 11, 12, 20, 21, 22, 23, 24, 50],
        [5, 6, 7, 8, 9, 3, 11, 12, 20, 21, 22, 3, 24, 2],
    )
    ids = torch.tensor([first, second if tokens != "given" else first])
    known: Any = {"inputs": "inputs", "given": ids[0], "given twice": ids}[tokens]
    found: list[Recording] = []
    for parts in ((14,), steps):
        cache, start = None, 0
        with torch.no_grad(), watch(model, tokens=known) as seen:
            for length in parts:
                part = ids[:, start : start + length]
                cache = model(part, past_key_values=cache, use_cache=True).past_key_values
                start += length
        found.append(seen)
    assert found[0][0, "induction"].count.tolist() == [2] * 4
    assert_same(found[1], found[0], leave=("first",))


WINDOWED: dict[str, dict[str, Any]] = {  # what makes the masks of the first layer hide all but four keys
    "Mistral": {"sliding_window": 4},
    "Doge": {"sliding_window": 4},
    "Phimoe": {"sliding_window": 4, "num_local_experts": 2},
    "Llama4Text": {
        "attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"], "head_dim": 8,
        "intermediate_size_mlp": 32, "num_local_experts": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", WINDOWED)
def test_the_first_keys_are_not_those_where_a_window_begins(family: str) -> None:
    """A cache that keeps all keys, and a mask that hides the first ones as it hides padding."""
    layers = len(WINDOWED[family].get("layer_types", "1"))
    config = getattr(transformers, f"{family}Config")(
        hidden_size=32, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2, vocab_size=99,
        intermediate_size=32, pad_token_id=0, **WINDOWED[family],
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.AutoModelForCausalLM.from_config(config).eval()
    found: list[Recording] = []
    for parts in ((11,), (2,) + (1,) * 9):
        cache, start = transformers.DynamicCache(), 0
        with torch.no_grad(), watch(model, what=Observe(keep_rows=True, windows=(2,))) as seen:
            for length in parts:
                model(IDS[:, start : start + length], past_key_values=cache)
                start += length
        found.append(seen)
    for layer, name in itertools.product(range(layers), ("first", "streaming_2")):
        whole, steps = ([each.values.get(name) for each in seen.stats[layer].kept] for seen in found)
        assert whole[0] is not None
        late = 7 if layer == 0 else 0
        assert [rows is not None for rows in steps] == [True] * (10 - late) + [False] * late
        told = torch.cat([rows for rows in steps if rows is not None], -1)
        torch.testing.assert_close(told, whole[0][..., : 11 - late], rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_layer_that_attends_to_everything_has_first_keys_whatever_window_its_module_has() -> None:
    config = transformers.Exaone4Config(
        hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=99, sliding_window=4, layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    model: Any = transformers.Exaone4ForCausalLM(config).eval()
    with torch.no_grad(), watch(model) as seen:
        model.generate(IDS[:, :3], max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    texts = len(IDS)
    assert [seen[layer, "first"].count[0].item() for layer in (0, 1)] == [4 * texts, 7 * texts]


def test_a_window_that_only_a_config_has_hides_nothing() -> None:
    """Moshi's masks are causal; its config has a window for its caches."""
    config = transformers.MoshiConfig(
        hidden_size=24, ffn_dim=16, num_hidden_layers=1, num_attention_heads=4, vocab_size=99, sliding_window=4
    )
    model: Any = transformers.MoshiForCausalLM(config).eval()
    cache = transformers.DynamicCache()
    with torch.no_grad(), watch(model) as steps:
        for token in IDS.split(1, 1):
            model(token, past_key_values=cache)
    with torch.no_grad(), watch(model) as whole:
        model(IDS)
    assert_same(steps, whole)


LEFT = (torch.arange(18) >= 8).long()[None]  # a text that begins with the ninth key of eighteen


def test_left_padding_hides_keys_from_layers_without_a_window() -> None:
    """The second layer attends to everything, and no text of the batch has a key that a window could pass."""
    config = transformers.Llama4TextConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, vocab_size=99,
        intermediate_size=20, intermediate_size_mlp=20, num_local_experts=2, attention_chunk_size=5,
        layer_types=["chunked_attention", "full_attention"],
    )  # fmt: skip
    model: Any = transformers.Llama4ForCausalLM(config).eval()
    cache = transformers.DynamicCache()
    with torch.no_grad(), watch(model) as seen:
        for start, end in ((0, 12), (12, 13), (13, 18)):
            model(
                IDS[:, :1].expand(-1, end - start),
                attention_mask=LEFT[:, :end].expand(len(IDS), -1),
                past_key_values=cache,
            )
    assert seen[1, "first"].count.tolist() == seen[1, "entropy"].count.tolist() == [10 * len(IDS)] * 4


def test_a_query_that_sees_more_keys_than_a_window_has_none() -> None:
    """Moshi's config does not say which layers have one; here padding hides what it would hide from the first query."""
    config = transformers.MoshiConfig(
        hidden_size=24, ffn_dim=16, num_hidden_layers=1, num_attention_heads=4, vocab_size=99, sliding_window=5
    )
    model: Any = transformers.MoshiForCausalLM(config).eval()
    cache = transformers.DynamicCache()
    with torch.no_grad(), watch(model) as seen:
        for start, end in ((0, 12), (12, 18)):
            model(IDS[:1, :1].expand(-1, end - start), attention_mask=LEFT[:, :end], past_key_values=cache)
    assert seen[0, "first"].count.tolist() == seen[0, "entropy"].count.tolist() == [10] * 4


@pytest.mark.parametrize("family", ["t5", "whisper"])
def test_an_encoder_once_and_a_decoder_step_by_step(family: str) -> None:
    model = model_of(family)
    with torch.no_grad(), watch(model) as seen:
        if family == "t5":
            model.generation_config.eos_token_id = None
            model.generate(input_ids=IDS[1:], max_new_tokens=5, do_sample=False)
        else:
            hidden = model.encoder(input_features=torch.randn(1, 8, 26))
            cache = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
            for n in range(5):
                model(decoder_input_ids=TARGET[:1, n : n + 1], encoder_outputs=hidden, past_key_values=cache)
    own = next(layer for layer, kind in seen.kinds.items() if kind == "self" and "decoder" in layer)
    cross = next(layer for layer, kind in seen.kinds.items() if kind == "cross")
    assert seen.layers[0].startswith("encoder")
    assert seen.stats.parts[seen.layers[0]].runs == 1
    assert seen[own, "entropy"].count.tolist() == [5] * 3
    assert seen[own, "previous"].count.tolist() == [4] * 3, "the first row has none"
    assert seen[cross, "entropy"].count.tolist() == [5] * 3
    assert seen.stats[own].eligible[0].tolist() == [5, 4, 3, 2, 1]


def test_generate_sees_every_step() -> None:
    model = model_of("llama")
    model.generation_config.eos_token_id = None
    inputs = {"input_ids": IDS, "attention_mask": PADDING}
    with torch.no_grad():
        plain = model.generate(**inputs, max_new_tokens=4, do_sample=False)
        with watch(model, tokens="inputs") as seen:
            assert torch.equal(model.generate(**inputs, max_new_tokens=4, do_sample=False), plain)
        with watch(model, tokens="inputs") as whole:
            longer = torch.cat([PADDING, torch.ones(2, 3, dtype=torch.long)], 1)
            model(plain[:, :-1], attention_mask=longer)
    assert_same(seen, whole)


def test_what_generate_has_compiled_is_refused_or_forgotten() -> None:
    """It keeps a compiled call in the model where a static cache is used; that call would not be seen."""
    model = model_of("llama")
    with torch.no_grad(), watch(model):
        model(IDS)
        model._compiled_call = model.__call__
    assert not hasattr(model, "_compiled_call"), "it is of the watched call"
    model._compiled_call = model.__call__
    with pytest.raises(WatchError, match=r"is compiled.*; compiled: LlamaForCausalLM"), watch(model):
        pass


class Own(torch.nn.Module):
    """Self-attention that makes of its mask what it likes."""

    def __init__(self, turned: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(6, 18)
        self.turned = turned

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attend = transformers.AttentionInterface().get_interface("sdpa", sdpa_attention_forward)
        return attend(self, q, k, v, self.turned(attention_mask))[0]


SQUARE = torch.tensor([5, 3])[:, None] > torch.arange(5)  # of two texts of up to five tokens
SQUARE = (SQUARE[:, :, None] & SQUARE[:, None])[:, None].expand(2, 2, 5, 5)  # [B, H, Q, K]


@pytest.mark.parametrize(
    ("given", "turned", "rows"),
    [
        (~SQUARE, torch.logical_not, 8),
        (SQUARE.long(), Tensor.bool, 8),
        (torch.ones(5, 5, dtype=torch.long), lambda mask: mask.bool()[:, None, None], 25),
        (SQUARE.clone().index_fill(1, torch.tensor(0), False), lambda mask: mask | False, [0, 8]),
    ],
    ids=["True hides", "whole numbers", "as many texts as tokens", "another in each head"],
)
def test_a_mask_is_what_the_layer_makes_of_it(given: Tensor, turned: Any, rows: Any) -> None:
    model = Own(turned)
    with torch.no_grad(), watch(model) as seen:
        model(torch.randn(len(given), 5, 6), given)
    assert seen["entropy"].count[0].tolist() == (rows if isinstance(rows, list) else [rows] * 2)


class Remembering(torch.nn.Module):
    """Self-attention to what a cache holds, and behind that to keys that are no token's."""

    layer_idx = 0

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(6, 18)
        self.memory = torch.nn.Parameter(torch.randn(2, 1, 2, 3, 3))  # k and v, [B, H, 3, D]

    def heads(self, x: Tensor, cache: Any = None) -> list[Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        k, v = (k, v) if cache is None else cache.update(k, v, 0)
        return [q, *(torch.cat([own, more], -2) for own, more in zip((k, v), self.memory, strict=True))]

    def forward(self, x: Tensor, attention_mask: Tensor, past_key_values: Any = None) -> Tensor:
        attend = transformers.AttentionInterface().get_interface("sdpa", sdpa_attention_forward)
        return attend(self, *self.heads(x, past_key_values), F.pad(attention_mask, (0, 3), value=True))[0]


def test_keys_behind_those_of_tokens_stand_nowhere() -> None:
    """With a cache that forgets, without one, and at positions of one's own."""
    model, x, place = Remembering(), torch.randn(1, 11, 6), torch.arange(11)
    gap = place[:, None] - place
    mask = ((gap >= 0) & (gap < 4))[None, None]
    tokens: Any = {"tokens": torch.zeros(11, dtype=torch.long)}
    with torch.no_grad(), watch(model, **tokens) as whole:
        model(x, mask)
    with torch.no_grad(), watch(model, positions=place) as placed:
        model(x, mask)
    config = transformers.MistralConfig(sliding_window=4, num_hidden_layers=1)
    cache = transformers.DynamicCache(config=config)
    with torch.no_grad(), watch(model, **tokens) as steps:
        for start, stop in STEPS:
            oldest = max(0, start - 3)
            model(x[:, start:stop], mask[:, :, start:stop, oldest:stop], past_key_values=cache)
    with torch.no_grad():
        k_pos = torch.cat([place.double(), torch.full((3,), math.nan)])
        seen = F.pad(mask, (0, 3), value=True)
        wanted = headscope.observe(*model.heads(x), mask=seen, q_pos=place.double(), k_pos=k_pos)
    assert whole["self"].count.tolist() == [[11, 11]]
    assert whole["next"].count.tolist() == [[0, 0]]
    for name in wanted.names:
        for got in (whole, placed):
            one, other = got[0, name], wanted[0, name]
            torch.testing.assert_close((one.count, one.mean), (other.count, other.mean), equal_nan=True)
    assert wanted[0].received is not None
    torch.testing.assert_close(whole[0].received, wanted[0].received[:, :11])
    assert_same(steps, whole, leave=("first",))
    assert "induction" not in whole.names, "the token before the first of these keys is a query's own"


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant: bool) -> None:
    recordings, gradients = [], []
    for checkpointing in (False, True):
        model = model_of("llama").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with watch(model) as seen:
            model(IDS, attention_mask=PADDING, labels=IDS, use_cache=False).loss.backward()
        recordings.append(seen)
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert (seen.forwards, seen.about.ran) == (1, 1)
    assert recordings[0].to_dict()["layers"] == recordings[1].to_dict()["layers"]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


# ---------------------------------------------------------------- attention functions


def test_padding_reaches_the_registered_function() -> None:
    """A function that is registered without its masks is given none: padding is silently lost."""
    register_transformers()
    plain, ours = model_of("llama", "eager"), model_of("llama", "headscope")
    rows = PADDING.bool()
    with torch.no_grad():
        wanted, got = (model(IDS, attention_mask=PADDING).logits[rows] for model in (plain, ours))
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    "padding", [pytest.param(PADDING, id="padded"), pytest.param(None, id="whole", marks=pytest.mark.long)]
)
def test_a_model_with_the_registered_function_compiles_in_one_graph(padding: Tensor | None) -> None:
    """Its masks are then tensors whose numbers nobody can read."""
    register_transformers()
    model, rows = model_of("llama", "headscope"), slice(None) if padding is None else padding.bool()
    options: dict[str, Any] = {"attention_mask": padding, "use_cache": False}
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            got, wanted = (each(IDS, **options).logits[rows] for each in (compiled, model))
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    got.square().sum().backward()


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "t5", "whisper"])
def test_accelerate(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows of the model's own function are enough to know its rule."""
    monkeypatch.setattr(intercepted_transformers, "ROWS", 4)
    monkeypatch.setattr(intercepted_transformers, "_own", functools.partial(own_of_few, intercepted_transformers._own))
    case = FAMILIES[family][0]("eager")
    with torch.no_grad():
        plain = case.run(case.model)
        with watch(case.model) as seen:
            case.run(case.model)
        with watch(case.model, accelerate=True) as ours:
            out = case.run(case.model)
    one, other = (result[0] for result in (out, plain))
    rows = PADDING.bool() if family in ("llama", "gpt_oss") else slice(None)
    torch.testing.assert_close(one[rows], other[rows], rtol=1e-4, atol=1e-4)
    assert_same(ours, seen)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "headscope"])
def test_our_kernel_rounds_under_autocast_as_theirs(implementation: str) -> None:
    """Queries come in float32 and keys in bfloat16, or the other way round: matmul and SDPA take both."""
    register_transformers()
    config = transformers.DeepseekV3Config(
        vocab_size=61, hidden_size=24, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, first_k_dense_replace=1, q_lora_rank=12, kv_lora_rank=12, qk_rope_head_dim=4,
        qk_nope_head_dim=8, v_head_dim=8, attn_implementation=implementation,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.DeepseekV3Model(config).eval()
    outs: list[Tensor] = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        handle = model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: outs.append(args[0]))
        model(IDS)
        with watch(model, accelerate=True):
            model(IDS)
        handle.remove()
    assert [out.dtype for out in outs] == [torch.bfloat16] * 2
    torch.testing.assert_close(*outs, rtol=0.02, atol=0.02 * float(outs[0].abs().max()))


@pytest.mark.parametrize(("implementation", "rounds"), [("sdpa", True), ("eager", False)])
def test_autocast_rounds_a_bias_where_sdpa_adds_it(implementation: str, rounds: bool) -> None:
    case = FAMILIES["t5"][0](implementation)
    weight = case.model.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    seen: list[Recording] = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        weight.mul_(7.77).sub_(200.37)
        for _ in range(2):
            with watch(case.model, layers="encoder.block.0.layer.0.SelfAttention") as each:
                case.run(case.model)
            seen.append(each)
            weight.copy_(weight.bfloat16())
    assert (seen[0].flat() == seen[1].flat()) == rounds


def own_of_few(own: Any, *given: Any) -> Any:
    call = own(*given)
    assert call.out.shape[2] <= 4
    return call


def counting(rows: list[int], least: int = 0) -> Any:
    """An attention function that keeps how many rows it is asked for, and wants no fewer than so many."""

    def mine(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.append(query.shape[2])
        if query.shape[2] < least:
            raise IndexError("too few")
        return transformers_function.attention_forward(module, query, *args, **kwargs)

    return mine


@pytest.mark.parametrize(("least", "wanted"), [(0, [4, 4]), (11, [4, 11, 4, 11])])
def test_accelerate_asks_the_models_own_function_once_a_layer(
    least: int, wanted: list[int], attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a few rows; for all of them where it does not know of a few."""
    monkeypatch.setattr(intercepted_transformers, "ROWS", 4)
    rows: list[int] = []
    attention(counting(rows, least))
    model = model_of("llama", "mine")
    with torch.no_grad(), watch(model, accelerate=True):
        for _ in range(2):
            model(IDS, attention_mask=PADDING)
    assert rows == wanted


@pytest.mark.parametrize(("implementation", "wanted"), [("mine", 11), ("sdpa", 4)])
def test_accelerate_compares_without_a_mask(
    implementation: str, wanted: int, attention: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a function of one's own sees where it gets none may need all rows to show."""
    monkeypatch.setattr(intercepted_transformers, "ROWS", 4)
    rows: list[int] = []
    attention(counting(rows))
    interface = transformers.AttentionInterface._global_mapping
    monkeypatch.setitem(interface, "sdpa", interface["mine"])
    model = model_of("llama", implementation)
    with torch.no_grad():
        plain = model(IDS).logits
        rows.clear()
        with watch(model, accelerate=True):
            torch.testing.assert_close(model(IDS).logits, plain)
    assert rows == [wanted] * 2


def test_accelerate_leaves_the_layers_that_are_not_chosen(attention: Any) -> None:
    def mine(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        key = key.flip(-2) if module.layer_idx == 0 else key
        return transformers_function.attention_forward(module, query, key, *args, **kwargs)

    attention(mine)
    model = model_of("llama", "mine")
    with torch.no_grad():
        plain = model(IDS).logits
        with watch(model, accelerate=True, layers="model.layers.1"):
            torch.testing.assert_close(model(IDS).logits, plain)


def test_a_function_of_ones_own_is_seen(attention: Any) -> None:
    def mine(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        return transformers_function.attention_forward(module, query, key, value, attention_mask, **kwargs)

    attention(mine)
    recordings = []
    for implementation in ("mine", "eager"):
        model = model_of("llama", implementation)
        with torch.no_grad(), watch(model) as seen:
            model(IDS, attention_mask=PADDING)
        recordings.append(seen)
    assert_same(*recordings)


class Capped:
    """An attention function that is an object; its cap comes with each call, or from a partial."""

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, softcap: float | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        return transformers_function.attention_forward(
            module, query, key, value, attention_mask, softcap=softcap, **kwargs
        )


class Within(torch.nn.Module):
    """One that is a module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return transformers_function.attention_forward(*args, **kwargs)


def sdpa_of_transformers(**options: Any) -> Any:
    return functools.partial(sdpa_attention_forward, **options)


@pytest.mark.parametrize(
    "function",
    [
        sdpa_of_transformers(),
        functools.partial(sdpa_of_transformers(cache=None), position_bias=None),
        functools.update_wrapper(sdpa_of_transformers(), Capped.__call__),
        Capped(),
        Capped().__call__,
        Within(),
    ],
    ids=["partial", "nested", "updated", "object", "method", "module"],
)
def test_a_function_that_is_no_plain_one_is_seen(attention: Any, function: Any) -> None:
    attention(function)
    mine, plain = model_of("llama", "mine"), model_of("llama", "eager")
    with torch.no_grad(), watch(mine) as seen:
        mine(IDS, attention_mask=PADDING)
    with torch.no_grad(), watch(plain) as wanted:
        plain(IDS, attention_mask=PADDING)
    assert_same(seen, wanted)


def test_what_a_partial_binds_counts(attention: Any) -> None:
    """The outermost of several; what the layer gives goes before all."""
    bound = functools.partial(functools.partial(Capped(), softcap=9.0), softcap=0.1)
    attention(functools.update_wrapper(bound, Capped.__call__))
    mine = model_of("llama", "mine")
    with torch.no_grad(), watch(mine) as seen:
        mine(IDS, attention_mask=PADDING)
    torch.testing.assert_close(seen["max_logit"].max.max().float(), torch.tensor(0.1))
    capped = model_of("gemma2", "mine")
    with torch.no_grad(), watch(capped) as seen:
        capped(IDS, attention_mask=PADDING)
    assert seen["max_logit"].max.max() > 0.1


@pytest.mark.parametrize("accelerate", [False, True])
def test_a_rule_that_is_not_known_is_an_error(accelerate: bool, attention: Any) -> None:
    """Every layer's first output is compared with what its arguments give."""

    def mine(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        return transformers_function.attention_forward(module, query, key.flip(-2), value, attention_mask, **kwargs)

    attention(mine)
    model = model_of("llama", "mine")
    error = r"layer model.layers.0.self_attn: its output differs by .* of the largest value from the output that its q"
    watching = watch(model, accelerate=accelerate)
    with torch.no_grad(), pytest.raises(WatchError, match=error), watching:
        model(IDS)
    assert not watching.recording._parts, "an error, and no statistic"


@torch.no_grad()
@pytest.mark.parametrize("way", ["the output", "what it is made from", "both"])
def test_an_output_that_alone_is_nan_or_alone_is_not_is_an_error(way: str, attention: Any) -> None:
    def mine(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
        out, _ = transformers_function.attention_forward(module, query, key, value, attention_mask, **kwargs)
        if way == "the output":
            out[0, -1, 0, 0] = math.nan
        return out.nan_to_num() if way == "what it is made from" else out, None

    attention(mine)
    model, error = model_of("llama", "mine"), "layers.0.self_attn: its output is NaN or infinite in other places than"
    if way != "the output":
        model.model.embed_tokens.weight[IDS[0, 0]] = math.nan
    refused = contextlib.nullcontext() if way == "both" else pytest.raises(WatchError, match=error)
    with refused, watch(model) as seen:
        model(IDS)
    if way == "both":
        assert seen[0, "entropy"].count.any()


def test_masks_that_cannot_be_read_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama")
    function = transformers_function.attention_forward
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_attention_2", function)
    masks = transformers.AttentionMaskInterface
    monkeypatch.setitem(masks._global_mapping, "flash_attention_2", masks._global_mapping["sdpa"])
    model.config._attn_implementation = "flash_attention_2"
    error = (
        r"layer model.layers.0.self_attn: it attends with 'flash_attention_2', whose masks headscope cannot read; load"
    )
    with torch.no_grad(), pytest.raises(WatchError, match=error), watch(model):
        model(IDS, attention_mask=torch.ones_like(IDS))


def test_a_model_that_writes_its_attention_itself_is_recorded() -> None:
    config = transformers.BloomConfig(hidden_size=24, n_layer=2, n_head=3, vocab_size=61)
    model = transformers.BloomModel(config).eval()
    with torch.no_grad():
        expected = model(IDS, output_attentions=True)
        with watch(model) as seen:
            out = model(IDS)
    assert torch.equal(out.last_hidden_state, expected.last_hidden_state)
    assert seen.layers == ("h.0.self_attention", "h.1.self_attention")
    for layer, weights in zip(seen.layers, expected.attentions, strict=True):
        entropy = torch.special.entr(weights.double()).sum(-1).mean((0, 2))
        torch.testing.assert_close(seen[layer, "entropy"].mean, entropy, rtol=1e-5, atol=1e-6)


def test_an_older_transformers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("llama", "eager")
    monkeypatch.setattr(transformers.modeling_utils, "AttentionInterface", dict)
    error = r"no AttentionInterface.get_interface, .* cannot be observed; use transformers 5\.15 or newer, or load"
    with pytest.raises(WatchError, match=error), watch(model):
        pass
    plain = model_of("bert", "sdpa")
    with torch.no_grad(), watch(plain) as seen:
        plain(IDS)
    assert len(seen.layers) == 2, "SDPA is seen all the same"


def test_it_says_what_it_is_of() -> None:
    model = model_of("llama")
    with torch.no_grad(), watch(model, layers=["model.layers.1"], rows=4) as seen:
        model(IDS)
    assert seen.layers == ("model.layers.1.self_attn",)
    assert seen.about.model == "LlamaForCausalLM"
    assert seen.about.versions["transformers"] == transformers.__version__
    assert seen.about.options["layers"] == ["model.layers.1"]
    assert repr(seen).startswith("Recording(LlamaForCausalLM, 1 forward pass: HeadStats(1 layer, 6 heads, a sample of")

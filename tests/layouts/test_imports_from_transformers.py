"""layouts: the attention of transformers' models against ours with their weights, under every mask they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from headscope import MultiHeadAttention, layouts
from headscope.masks import KeyLengths, Mask, causal, window
from headscope.positions import NTK, LinearScaling, Llama3, RelativeBias, Rotary, T5Buckets, YaRN

transformers: Any = pytest.importorskip("transformers")
models = transformers.models

B, H, T, S, E, D = 3, 4, 7, 5, 16, 4  # batch, heads, length, length of the context, width, width of a head
PADDING = KeyLengths(torch.tensor([2, S, 4]))
SELF: dict[str, Mask | None] = {"all": None, "padding": PADDING}
CAUSAL: dict[str, Mask | None] = {"causal": causal(), "causal and padding": causal() & PADDING}


class Family(NamedTuple):
    """One kind of attention: how to make it, how to call it, what it can see."""

    make: Callable[[], nn.Module]
    call: Callable[[Any, Tensor, Tensor | None, Tensor | None], Tensor]
    """Of the module, x, what it looks at beside x (or None), the mask as numbers to add (or None)."""
    masks: dict[str, Mask | None]
    layout: str
    cross: bool = False


def config(kind: str, **options: Any) -> Any:
    made = getattr(transformers, kind)(**options)
    made._attn_implementation = "eager"
    return made


def usual(module: Any, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
    options = {} if context is None else {"key_value_states": context}
    return module(x, attention_mask=mask, **options)[0]


# ---------------------------------------------------------------- without positions

BERT: dict[str, Any] = {"hidden_size": E, "num_attention_heads": H}
BART: dict[str, Any] = {"d_model": E, "encoder_attention_heads": H, "decoder_attention_heads": H}


def bert(cross: bool) -> nn.Module:
    return models.bert.modeling_bert.BertAttention(config("BertConfig", **BERT), is_cross_attention=cross)


def call_bert(module: Any, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
    """What its dense gives; dropout, residual and norm come after it."""
    if context is None:
        heads = module.self(x, mask)[0]
    else:
        heads = module.self(x, encoder_hidden_states=context, attention_mask=mask)[0]
    return module.output.dense(heads)


def gpt2(cross: bool, **options: Any) -> nn.Module:
    made = config("GPT2Config", n_embd=E, n_head=H, **options)
    return models.gpt2.modeling_gpt2.GPT2Attention(made, is_cross_attention=cross, layer_idx=2)


def call_gpt2(module: Any, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
    if context is None:
        return module(x, attention_mask=mask)[0]
    return module(x, encoder_hidden_states=context, encoder_attention_mask=mask)[0]


def bart(**options: Any) -> nn.Module:
    made = config("BartConfig", **BART)
    return models.bart.modeling_bart.BartAttention(E, H, config=made, layer_idx=0, **options)


def whisper(**options: Any) -> nn.Module:
    made = config("WhisperConfig", **BART)
    return models.whisper.modeling_whisper.WhisperAttention(E, H, config=made, layer_idx=0, **options)


def t5(decoder: bool, table: bool) -> nn.Module:
    made = config("T5Config", d_model=E, d_kv=3, num_heads=H, is_decoder=decoder, relative_attention_num_buckets=8,
                  relative_attention_max_distance=9)  # fmt: skip
    return models.t5.modeling_t5.T5Attention(made, has_relative_attention_bias=table, layer_idx=0)


def call_t5(module: Any, x: Tensor, context: Tensor | None, mask: Tensor | None) -> Tensor:
    return module(x, mask=mask, key_value_states=context)[0]


FAMILIES = {
    "bert": Family(lambda: bert(False), call_bert, SELF, "bert"),
    "bert cross": Family(lambda: bert(True), call_bert, SELF, "bert", cross=True),
    "bert decoder": Family(lambda: bert(False), call_bert, CAUSAL, "bert"),
    "distilbert": Family(
        lambda: models.distilbert.modeling_distilbert.DistilBertSelfAttention(
            config("DistilBertConfig", dim=E, n_heads=H)
        ),
        usual, SELF, "distilbert"),
    "gpt2": Family(lambda: gpt2(False), call_gpt2, CAUSAL, "gpt2"),
    "gpt2 unscaled": Family(lambda: gpt2(False, scale_attn_weights=False), call_gpt2, CAUSAL, "gpt2"),
    "gpt2 by layer": Family(lambda: gpt2(False, scale_attn_by_inverse_layer_idx=True), call_gpt2, CAUSAL, "gpt2"),
    "gpt2 cross": Family(lambda: gpt2(True), call_gpt2, SELF, "gpt2_cross", cross=True),
    "vit": Family(lambda: models.vit.modeling_vit.ViTAttention(config("ViTConfig", **BERT)), usual, SELF, "vit"),
    "vit, no bias": Family(
        lambda: models.vit.modeling_vit.ViTAttention(config("ViTConfig", qkv_bias=False, **BERT)),
        usual, {"all": None}, "vit"),
    "clip image": Family(
        lambda: models.clip.modeling_clip.CLIPAttention(config("CLIPVisionConfig", **BERT)), usual, {"all": None},
        "clip"),
    "clip text": Family(
        lambda: models.clip.modeling_clip.CLIPAttention(config("CLIPTextConfig", **BERT)), usual, CAUSAL, "clip"),
    "bart encoder": Family(lambda: bart(), usual, SELF, "bart"),
    "bart decoder": Family(lambda: bart(is_decoder=True), usual, CAUSAL, "bart"),
    "bart, no bias": Family(lambda: bart(bias=False), usual, {"all": None}, "bart"),
    "bart cross": Family(lambda: bart(is_decoder=True), usual, SELF, "bart", cross=True),
    "whisper encoder": Family(lambda: whisper(), usual, {"all": None}, "whisper"),
    "whisper decoder": Family(lambda: whisper(is_decoder=True), usual, CAUSAL, "whisper"),
    "whisper cross": Family(lambda: whisper(is_decoder=True), usual, SELF, "whisper", cross=True),
    "t5 encoder": Family(lambda: t5(False, True), call_t5, SELF, "t5"),
    "t5 decoder": Family(lambda: t5(True, True), call_t5, CAUSAL, "t5"),
    "t5 cross": Family(lambda: t5(True, False), call_t5, SELF, "t5", cross=True),
}  # fmt: skip


def randomized(module: nn.Module) -> nn.Module:
    """Every parameter random, and nothing dropped."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module.eval()


def added(mask: Mask | None, queries: int, keys: int) -> Tensor | None:
    """A mask as transformers writes it: 0 where a key may be seen, -inf elsewhere, [B, 1, Q, K]."""
    if mask is None:
        return None
    return torch.zeros(B, 1, queries, keys).masked_fill(~mask.dense(B, 1, queries, keys), -torch.inf)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_without_rotary(family: Family) -> None:
    theirs = randomized(family.make())
    made = MultiHeadAttention.from_module(theirs)
    keys = S if family.cross else T
    x, context = torch.randn(B, T, E), torch.randn(B, S, E) if family.cross else None
    for name, mask in family.masks.items():
        with torch.no_grad():
            expected = family.call(theirs, x, context, added(mask, T, keys))
        torch.testing.assert_close(made(x, context, mask=mask), expected, msg=lambda text, name=name: f"{name}: {text}")
    assert_same_state(made, family.layout, theirs)


def assert_same_state(made: MultiHeadAttention, layout: str, theirs: nn.Module) -> None:
    """All of its weights, but for a norm beside them, come back to the bit."""
    again, state = made.to_state_dict(layout), theirs.state_dict()
    torch.testing.assert_close(again, {key: state[key] for key in again}, rtol=0, atol=0)
    assert all("LayerNorm" in key for key in set(state) - set(again))


def test_bert_within_its_residual_and_norm() -> None:
    """What a whole BertAttention gives: dropout, residual and norm around ours."""
    theirs: Any = randomized(bert(False))
    made = MultiHeadAttention.from_module(theirs)
    x = torch.randn(B, T, E)
    torch.testing.assert_close(theirs.output.LayerNorm(made(x) + x), theirs(x)[0])


def test_bert_self_attention_alone_is_pointed_to_its_parent() -> None:
    theirs: Any = bert(False)
    with pytest.raises(
        ValueError, match="module: BertSelfAttention is a part of BertAttention, which has all four proj"
    ):
        MultiHeadAttention.from_module(theirs.self)


def test_vit_as_on_the_hub() -> None:
    """Checkpoints of ViT have the keys of transformers 4."""
    theirs = randomized(FAMILIES["vit"].make())
    old = {
        "q_proj": "attention.query",
        "k_proj": "attention.key",
        "v_proj": "attention.value",
        "o_proj": "output.dense",
    }
    state = {old[key.split(".")[0]] + "." + key.split(".")[1]: x for key, x in theirs.state_dict().items()}
    made = MultiHeadAttention.from_state_dict(state, "vit_v4", num_heads=H)
    x = torch.randn(B, T, E)
    torch.testing.assert_close(made(x), usual(theirs, x, None, None))
    torch.testing.assert_close(made.to_state_dict("vit_v4"), state, rtol=0, atol=0)


def test_t5_layers_share_the_table_of_the_first() -> None:
    first, second = (randomized(t5(False, table)) for table in (True, False))
    one = MultiHeadAttention.from_module(first)
    assert isinstance(one.position_bias, RelativeBias)
    assert one.position_bias.buckets == T5Buckets(8, 9, bidirectional=True)
    two = MultiHeadAttention.from_module(second, position_bias=one.position_bias)
    assert two.position_bias is one.position_bias
    x = torch.randn(B, T, E)
    _, bias, *_ = first(x)
    torch.testing.assert_close(two(x), second(x, position_bias=bias)[0])
    plain = MultiHeadAttention.from_module(second)
    torch.testing.assert_close(plain(x, bias=bias), second(x, position_bias=bias)[0])


def test_a_table_of_biases_needs_its_buckets() -> None:
    state = randomized(t5(False, True)).state_dict()
    with pytest.raises(
        ValueError,
        match="position_bias: missing; the weights contain a table of biases by distance; pass "
        r"positions\.T5Buckets with its num_buckets",
    ):
        MultiHeadAttention.from_state_dict(state, "t5", num_heads=H)
    del state["relative_attention_bias.weight"]
    with pytest.raises(ValueError, match=r"options: position_bias.weight requires weights that layout 't5'"):
        MultiHeadAttention.from_state_dict(state, "t5", num_heads=H, position_bias=T5Buckets())


# ---------------------------------------------------------------- with rotary positions

SIZES: dict[str, Any] = {"hidden_size": E, "num_attention_heads": H, "num_key_value_heads": 2,
                         "max_position_embeddings": 6}  # fmt: skip
KINDS = {
    "llama": ("LlamaConfig", "LlamaAttention", "LlamaRotaryEmbedding", {}),
    "llama, biases": ("LlamaConfig", "LlamaAttention", "LlamaRotaryEmbedding", {"attention_bias": True}),
    "mistral": ("MistralConfig", "MistralAttention", "MistralRotaryEmbedding", {"head_dim": 6, "sliding_window": 3}),
    "qwen2": ("Qwen2Config", "Qwen2Attention", "Qwen2RotaryEmbedding", {}),
    "qwen3": ("Qwen3Config", "Qwen3Attention", "Qwen3RotaryEmbedding", {"head_dim": 6, "rms_norm_eps": 1e-3}),
}
TRAINED = {"original_max_position_embeddings": 6}
ROPES: dict[str, tuple[dict[str, Any], Any]] = {
    "default": ({"rope_type": "default"}, None),
    "linear": ({"rope_type": "linear", "factor": 2.5}, LinearScaling(2.5)),
    "dynamic": ({"rope_type": "dynamic", "factor": 2.0}, NTK(2.0, 6)),
    "llama3": (
        {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0, **TRAINED},
        Llama3(4.0, 1.0, 3.0, 6),
    ),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, **TRAINED}, YaRN(4.0, 6, beta_fast=8.0)),
    "yarn, not truncated": (
        {"rope_type": "yarn", "factor": 4.0, "truncate": False, **TRAINED},
        YaRN(4.0, 6, truncate=False),
    ),
}


def rotated(kind: str, rope: dict[str, Any] | None = None) -> tuple[nn.Module, Callable[[Tensor], Any]]:
    """An attention with random weights, and what its model gives it beside x: cos and sin."""
    named, attention, embedding, options = KINDS[kind]
    rope = {"rope_theta": 500.0, "rope_type": "default"} if rope is None else {"rope_theta": 500.0, **rope}
    made = config(named, rope_parameters=rope, **SIZES, **options)
    room = getattr(models, kind.split(",")[0])
    room = getattr(room, f"modeling_{kind.split(',')[0]}")
    angles = getattr(room, embedding)(made)
    return randomized(getattr(room, attention)(made, 0)), lambda x: angles(x, torch.arange(x.shape[1])[None])


@pytest.mark.parametrize("kind", KINDS)
def test_with_rotary(kind: str) -> None:
    theirs, angles = rotated(kind)
    made = MultiHeadAttention.from_module(theirs)
    assert (made.num_heads, made.kv_heads) == (H, 2)
    masks = {**CAUSAL, **SELF, "window": window(3)}
    x = torch.randn(B, T, E)
    for name, mask in masks.items():
        expected = theirs(x, position_embeddings=angles(x), attention_mask=added(mask, T, T))[0]
        torch.testing.assert_close(made(x, mask=mask), expected, msg=lambda text, name=name: f"{name}: {text}")
    assert_same_state(made, kind.split(",")[0], theirs)


@pytest.mark.parametrize("rope", ROPES)
def test_scalings(rope: str) -> None:
    said, scaling = ROPES[rope]
    theirs, angles = rotated("llama", said)
    made = MultiHeadAttention.from_module(theirs)
    assert made.rotary == Rotary(D, 500.0, scaling=scaling)
    x = torch.randn(B, T, E)
    expected = theirs(x, position_embeddings=angles(x), attention_mask=added(causal(), T, T))[0]
    torch.testing.assert_close(made(x, mask=causal()), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_default_turns_whole_heads_whatever_the_factor(kind: str) -> None:
    theirs, angles = rotated(kind, {"rope_type": "default", "partial_rotary_factor": 0.5})
    made = MultiHeadAttention.from_module(theirs)
    x = torch.randn(B, T, E)
    expected = theirs(x, position_embeddings=angles(x), attention_mask=added(causal(), T, T))[0]
    torch.testing.assert_close(made(x, mask=causal()), expected)


@pytest.mark.parametrize("rope", sorted(ROPES))
def test_scalings_turn_as_much_as_theirs(rope: str) -> None:
    """Of theirs cos and sin alone: with a part of a head their forward fails."""
    theirs, angles = rotated("qwen3", {**ROPES[rope][0], "partial_rotary_factor": 0.7})
    made = MultiHeadAttention.from_module(theirs)
    assert made.rotary is not None
    assert made.rotary.dim == angles(torch.randn(B, T, E))[0].shape[-1] == (6 if rope == "default" else 4)


def test_norms_of_q_and_k_must_agree() -> None:
    theirs: Any = rotated("qwen3")[0]
    theirs.k_norm.variance_epsilon = 0.1
    with pytest.raises(
        ValueError, match=r"module: q_norm.variance_epsilon is 0.001, k_norm.variance_epsilon is 0.1; expected"
    ):
        MultiHeadAttention.from_module(theirs)


def test_positions_may_be_given() -> None:
    theirs, _ = rotated("qwen3")
    named = models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(theirs.config)
    made = MultiHeadAttention.from_module(theirs)
    x, positions = torch.randn(B, T, E), torch.arange(T) + torch.tensor([[0], [3], [11]])
    expected = theirs(x, position_embeddings=named(x, positions), attention_mask=added(causal(), T, T))[0]
    torch.testing.assert_close(made(x, mask=causal(), positions=positions), expected)


def test_a_checkpoint_of_a_whole_model() -> None:
    """Its keys as they are saved, one layer of them; rotary is said by hand."""
    model = randomized(transformers.LlamaModel(config("LlamaConfig", num_hidden_layers=2, intermediate_size=8,
                                                      vocab_size=11, **SIZES)))  # fmt: skip
    state = model.state_dict()
    with pytest.raises(
        ValueError, match="rotary: missing; the weights do not contain it, and layout 'llama' requires it"
    ):
        MultiHeadAttention.from_state_dict(state, "llama", prefix="layers.1.self_attn", num_heads=H)
    made = MultiHeadAttention.from_state_dict(
        state, "llama", prefix="layers.1.self_attn", num_heads=H, rotary=Rotary(D, 10000.0)
    )
    x = torch.randn(B, T, E)
    angles = model.rotary_emb(x, torch.arange(T)[None])
    expected = model.layers[1].self_attn(x, position_embeddings=angles, attention_mask=added(causal(), T, T))[0]
    torch.testing.assert_close(made(x, mask=causal()), expected)


def test_buffers_of_old_checkpoints_are_left_alone() -> None:
    """Causal masks of GPT-2, frequencies of Llama."""
    buffers = {"bias": torch.ones(1, 1, 9, 9).tril(), "masked_bias": torch.tensor(-1e4)}
    state = gpt2(False).state_dict()
    made = MultiHeadAttention.from_state_dict({**state, **buffers}, "gpt2", num_heads=H)
    torch.testing.assert_close(made.to_state_dict("gpt2"), dict(state), rtol=0, atol=0)
    state = rotated("llama")[0].state_dict()
    options = {"num_heads": H, "rotary": Rotary(D)}
    made = MultiHeadAttention.from_state_dict({**state, "rotary_emb.inv_freq": torch.ones(2)}, "llama", **options)
    torch.testing.assert_close(made.to_state_dict("llama"), dict(state), rtol=0, atol=0)


def test_kinds_of_rotary_that_are_not_known() -> None:
    theirs: Any = rotated("llama")[0]
    theirs.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 10.0}
    with pytest.raises(
        ValueError,
        match="module: its rope_type is 'longrope'; expected default, linear, dynamic, llama3 or yarn, or pass rotary=",
    ):
        MultiHeadAttention.from_module(theirs)
    theirs.config.rope_parameters = {"full_attention": {}, "sliding_attention": {}}
    with pytest.raises(
        ValueError, match=r"rope_parameters for each kind of layer \(full_attention, sliding_attention\)"
    ):
        MultiHeadAttention.from_module(theirs)
    made = MultiHeadAttention.from_module(theirs, rotary=Rotary(D))
    assert made.rotary == Rotary(D)


def test_rotary_that_a_llama_does_not_have_is_no_option() -> None:
    theirs = rotated("llama")[0]
    for rotary in (Rotary(D, pairing="interleaved"), Rotary(2), None):
        with pytest.raises(ValueError, match=r"^rotary: .*layout 'llama', .*; expected dim 4 and pairing 'half', got "):
            MultiHeadAttention.from_module(theirs, rotary=rotary)


def test_a_forward_of_its_own_is_refused() -> None:
    """The weights of a subclass are those of a Llama; what it computes is not."""
    known: Any = models.llama.modeling_llama.LlamaAttention

    class Doubled(known):
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(2 * hidden_states, *args, **kwargs)

    class Inherits(Doubled):
        pass

    class Plain(known):
        pass

    theirs, _ = rotated("llama")
    x = torch.randn(B, T, E)
    wanted = MultiHeadAttention.from_module(theirs)(x)
    for kind in (Doubled, Inherits, Plain):
        theirs.__class__ = kind
        if kind is not Plain:
            error = (
                f"module: {kind.__name__} is a LlamaAttention with a forward of its own, so its output may "
                "depend on more than its weights; if it does not, pass layout='llama'"
            )
            with pytest.raises(ValueError, match=error):
                MultiHeadAttention.from_module(theirs)
        given = {} if kind is Plain else {"layout": "llama"}
        torch.testing.assert_close(MultiHeadAttention.from_module(theirs, **given)(x), wanted)


def test_a_projection_of_gpt2_with_a_forward_of_its_own_is_refused() -> None:
    theirs: Any = gpt2(False)

    class Doubled(type(theirs.c_attn)):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(2 * x)

    theirs.c_attn.__class__ = Doubled
    with pytest.raises(
        ValueError,
        match="module: c_attn is a Doubled, whose forward differs from that of a Conv1D, so its output may "
        "depend on more than its weights;",
    ):
        MultiHeadAttention.from_module(theirs)


def test_every_layout_of_transformers_is_here() -> None:
    """Each that names a class of transformers has a family above."""
    from headscope._layouts.table import LAYOUTS

    named = {name for name, each in LAYOUTS.items() if any(of.startswith("transformers:") for of in each.classes)}
    tested = {family.layout for family in FAMILIES.values()} | {kind.split(",")[0] for kind in KINDS} | {"vit_v4"}
    assert named == tested
    assert named <= set(layouts.known())

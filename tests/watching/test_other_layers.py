"""Layers that mix tokens without a softmax over keys are listed, and the attention layers next to them recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import Recording, ablate, watch
from headscope._intercept.other_layers import describe_other
from headscope.report.viewer import shown_recording
from headscope.watching import WatchError

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers: slow paths without kernels

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 61,
    "num_hidden_layers": 2, "pad_token_id": 0,
}  # fmt: skip
MAMBA = {
    "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1}

# model -> its configuration, its attention layers, and what else it has
HYBRIDS: dict[str, tuple[dict[str, Any], list[str], dict[str, str]]] = {
    "Jamba": (
        {"attn_layer_period": 2, "attn_layer_offset": 1, **EXPERTS, "use_mamba_kernels": False, "mamba_d_state": 8},
        ["layers.1.self_attn"], {"layers.0.mamba": "JambaMambaMixer: a state space"},
    ),
    "Bamba": (
        {"attn_layer_indices": [1], **MAMBA}, ["layers.1.self_attn"], {"layers.0.mamba": "BambaMixer: a state space"},
    ),
    "FalconH1": (
        {**MAMBA, "mamba_d_ssm": 64}, ["layers.0.self_attn", "layers.1.self_attn"],
        {"layers.0.mamba": "FalconH1Mixer: a state space", "layers.1.mamba": "FalconH1Mixer: a state space"},
    ),
    "Zamba2": (
        {
            "num_key_value_heads": 4, "mamba_d_state": 8, "mamba_headdim": 16, "n_mamba_heads": 4, "mamba_ngroups": 1,
            "use_mamba_kernels": False, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1,
            "hybrid_layer_ids": [1], "chunk_size": 8, "adapter_rank": 4,
        },
        ["layers.1.shared_transformer.self_attn"],
        {
            "layers.0.mamba": "Zamba2MambaMixer: a state space",
            "layers.1.mamba_decoder.mamba": "Zamba2MambaMixer: a state space",
        },
    ),
    "NemotronH": (
        {
            "layers_block_type": ["mamba", "attention"], "mamba_num_heads": 4, "mamba_head_dim": 16,
            "ssm_state_size": 8, "n_groups": 1, "chunk_size": 8, "head_dim": 8,
        },
        ["layers.1.mixer"], {"layers.0.mixer": "NemotronHMamba2Mixer: a state space"},
    ),
    "Qwen3Next": (
        {**LINEAR, **EXPERTS, "head_dim": 8, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
        ["layers.1.self_attn"], {"layers.0.linear_attn": "Qwen3NextGatedDeltaNet: a delta rule"},
    ),
    "OlmoHybrid": (LINEAR, ["layers.1.self_attn"], {"layers.0.linear_attn": "OlmoHybridGatedDeltaNet: a delta rule"}),
    "MiniMax": (
        {**LINEAR, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 8},
        ["layers.1.self_attn"], {"layers.0.self_attn": "MiniMaxLightningAttention: lightning attention"},
    ),
    "RecurrentGemma": (
        {
            "num_hidden_layers": 3, "head_dim": 8, "lru_width": 32, "attention_window_size": 16,
            "block_types": ["recurrent", "recurrent", "attention"],
        },
        ["layers.2.temporal_block"],
        {
            f"layers.{n}.temporal_block": "RecurrentGemmaRecurrentBlock: a gated linear recurrence"
            for n in (0, 1)
        },
    ),
    "Lfm2": (
        {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
        ["layers.1.self_attn"], {"layers.0.conv": "Lfm2ShortConv: a convolution over tokens"},
    ),
}  # fmt: skip

WITHOUT: dict[str, tuple[dict[str, Any], str]] = {
    "Mamba": ({"state_size": 8}, "layers.0.mixer (MambaMixer: a state space, no softmax over keys)"),
    "Mamba2": (
        {"state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
        "layers.1.mixer (Mamba2Mixer: a state space, no softmax over keys)",
    ),
    "Rwkv": (
        {"attention_hidden_size": 32, "context_length": 32},
        "blocks.0.attention (RwkvSelfAttention: the time mixing of RWKV, a recurrence, no softmax over keys)",
    ),
    "FNet": ({"intermediate_size": 40}, "encoder.layer.1.fourier (FNetFourierTransform: a Fourier transform of the"),
}


def built(name: str, options: dict[str, Any]) -> nn.Module:
    if not hasattr(transformers, f"{name}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    return getattr(transformers, f"{name}Model")(getattr(transformers, f"{name}Config")(**options)).eval()


def ids() -> Tensor:
    return torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", HYBRIDS)
def test_attention_of_a_hybrid_is_recorded_and_the_rest_is_named(name: str) -> None:
    options, layers, others = HYBRIDS[name]
    model = built(name, {**SIZES, **options})
    with torch.no_grad(), watch(model, verify=3) as seen:
        model(input_ids=ids())
    assert [*seen.layers] == layers
    listed = seen.about.other_layers
    assert [*listed] == [*others]
    for layer, what in listed.items():
        assert what.startswith(others[layer])
        assert what.endswith(", no softmax over keys")
    assert all(one.fits for one in seen.about.verified.values())


@pytest.mark.parametrize("name", WITHOUT)
def test_a_model_without_attention_is_an_error_that_names_what_it_has(name: str) -> None:
    options, expected = WITHOUT[name]
    model = built(name, {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 61, **options})
    with pytest.raises(WatchError, match="no attention call was observed") as caught, torch.no_grad(), watch(model):
        model(input_ids=ids())
    assert expected in str(caught.value)
    with pytest.raises(WatchError, match="nothing to record"), torch.no_grad(), watch(model, unseen="ignore"):
        model(input_ids=ids())


def test_a_long_model_names_some_of_its_layers() -> None:
    model = built("Mamba", {"hidden_size": 8, "num_hidden_layers": 9, "vocab_size": 61, "state_size": 2})
    with pytest.raises(WatchError, match=r"layers\.5\.mixer .* and 3 more$"), torch.no_grad(), watch(model):
        model(input_ids=ids())


# ---------------------------------------------------------------- by class, and by behaviour


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q(x), x, x)


class LinearAttention(Attention):
    def forward(self, x: Tensor) -> Tensor:
        return F.elu(self.q(x)) @ (x.mT @ x)


class RealLinearAttention(Attention):
    """The name says linear attention, the code does not."""


class SoftLinearAttention(Attention):
    """The same, with a softmax of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ x.mT).softmax(-1) @ x


class OutAttention(Attention):
    """Attention without a softmax, of an unknown class."""

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ x.mT).sigmoid() @ x


class Pair(nn.Module):
    def __init__(self, second: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = Attention(), second()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def recorded(model: nn.Module, **options: Any) -> Recording:
    with torch.no_grad(), watch(model, **options) as seen:
        model(torch.randn(1, 2, 5, 6))
    return seen


def test_a_linear_attention_is_listed_and_does_not_fail() -> None:
    seen = recorded(Pair(LinearAttention))
    assert seen.layers == ("first",)
    assert seen.about.other_layers == {"second": "LinearAttention: a linear attention, no softmax over keys"}
    assert recorded(Pair(LinearAttention), unseen="ignore").about.other_layers == seen.about.other_layers


def test_a_recorded_layer_is_not_listed_whatever_its_class() -> None:
    seen = recorded(Pair(RealLinearAttention))
    assert seen.layers == ("first", "second")
    assert seen.about.other_layers == {}


def test_a_softmax_that_is_multiplied_with_values_is_not_a_linear_attention() -> None:
    seen = recorded(Pair(SoftLinearAttention))
    assert seen.layers == ("first", "second")
    assert seen.about.other_layers == {}


def test_an_unknown_attention_is_still_an_error() -> None:
    with pytest.raises(WatchError, match=r"second \(OutAttention\)"):
        recorded(Pair(OutAttention))


def test_only_chosen_layers_are_listed() -> None:
    assert recorded(Pair(LinearAttention), layers="first").about.other_layers == {}


def test_heads_of_the_attention_layers_of_a_hybrid_can_be_ablated() -> None:
    model, x = Pair(LinearAttention), torch.randn(1, 2, 5, 6)
    with torch.no_grad():
        whole = model(x)
        with ablate(model, {"first": [0]}):
            assert not torch.equal(model(x), whole)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("KimiLinearAttention", None),  # an attention with a softmax, of a model named Kimi Linear
        ("KimiLinearDeltaAttention", "delta rule"),
        ("MambaRMSNormGated", None),
        ("JambaMambaDecoderLayer", None),
        ("OlmoHybridLinearAttentionDecoderLayer", None),
        ("RwkvFeedForward", None),
        ("MultiScaleRetention", "retention"),
        ("mLSTMLayer", "xLSTM"),
        ("DeformableDetrMultiscaleDeformableAttention", "deformable"),
        ("BertSelfAttention", None),
        ("Mamba2", "state space"),
    ],
)
def test_what_a_class_is(name: str, kind: str | None) -> None:
    what = describe_other(type(name, (nn.Module,), {})())
    assert what is None if kind is None else what is not None and kind in what


def test_norms_named_after_attention_are_not_attention() -> None:
    """A gated norm holds a matrix, and stands after an attention."""

    class ScaleNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.weight = nn.Linear(6, 6), nn.Parameter(torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, (6,)) * self.weight * self.gate(x).sigmoid()

    model = nn.ModuleDict(
        {"attn": Attention(), "post_attention_layernorm": ScaleNorm(), "attn_norm_gated": ScaleNorm()}
    )
    with torch.no_grad(), watch(model) as seen:
        for each in model.values():
            each(torch.randn(1, 2, 5, 6))
    assert seen.layers == ("attn",)


# ---------------------------------------------------------------- files and pages


def test_other_layers_are_saved_and_on_the_page(tmp_path: Path) -> None:
    seen = recorded(Pair(LinearAttention))
    again = Recording.load(seen.save(tmp_path / "seen.safetensors"))
    assert again.about.other_layers == seen.about.other_layers
    assert (
        shown_recording(again).footer["Other layers"]
        == "second (LinearAttention: a linear attention, no softmax over keys)"
    )

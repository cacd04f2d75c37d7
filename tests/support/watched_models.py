"""Small models of every kind that ``watch`` sees, and what their attention is by definition, in float64.

Nothing of headscope's watching is used here. Of a model of transformers the truth is what its own eager code computes
in float64: the weights that it returns, and the arguments of its softmax and of its product with the values, taken by a
function mode.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

VOCABULARY = 61
IDS = torch.randint(3, 9, (2, 11), generator=torch.Generator().manual_seed(5))
PADDING = torch.ones_like(IDS)
PADDING[0, :4] = 0  # the first text is shorter, and padded on the left
TARGET = IDS[:, 2:8]
GAIN = 1.3  # of each matrix: weights are then neither flat nor on one key


@dataclass
class Layer:
    """What one layer attends with: weights [B, H, Q, K] in float64, what may be seen, and the rest if it is known.

    Attributes:
        seen: boolean, broadcasts to the weights.
        lse: [B, H, Q]; values: the lengths of the value vectors, [B, H, K].
        tokens: of the keys, [B, K].
        extra: how many keys at the end belong to no token.
    """

    p: Tensor
    seen: Tensor
    kind: str = "self"
    lse: Tensor | None = None
    values: Tensor | None = None
    tokens: Tensor | None = None
    extra: int = 0


@dataclass
class Case:
    """A model, how it is called, and the truth.

    Attributes:
        truth: of a model in float64 -> layer name -> what it attends with, in the order of the model.
        options: of ``watch``.
        around: what the model in float64 runs in.
    """

    model: nn.Module
    run: Callable[[nn.Module], Any]
    truth: Callable[[nn.Module], dict[str, Layer]]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def in_float64(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double()


def spread(model: nn.Module) -> nn.Module:
    """Weights for which attention is neither flat nor on one key."""
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                scale = (
                    1.0
                    if "embed" in name or "wte" in name or "shared" in name
                    else GAIN / math.sqrt(parameter[0].numel())
                )
                parameter.copy_(scale * torch.randn(parameter.shape, generator=random))
            elif "sinks" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=random))
            elif "bias" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=random))
    return model.eval()


# ---------------------------------------------------------------- what may be seen


def band(queries: int, keys: int, window: int | None = None) -> Tensor:
    """j <= i, within a window of so many keys."""
    gap = torch.arange(queries)[:, None] + (keys - queries) - torch.arange(keys)
    return (gap >= 0) & (gap < (window or keys))


def real(padding: Tensor) -> Tensor:
    return padding.bool()[:, None, None, :]  # [B, 1, 1, K]


# ---------------------------------------------------------------- transformers


class Softmaxes(TorchFunctionMode):
    """Keeps the logits of every softmax over attention weights, and the values these are multiplied with.

    Much eager code takes its softmax in float32, whatever the model: here it is taken in the dtype of the logits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[Tensor] = []
        self.values: list[Tensor] = []
        self.waiting = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {**(kwargs or {})}
        if func is F.softmax and args[0].dtype == torch.float64:
            kwargs.pop("dtype", None)
        out = func(*args, **kwargs)
        if func is F.softmax and args[0].ndim == 4:
            self.logits.append(args[0])
            self.waiting = True
        elif func in (torch.matmul, Tensor.matmul) and self.waiting and args[1].ndim == 4:
            self.values.append(args[1])
            self.waiting = False
        return out


def told(model: Any, inputs: dict[str, Any]) -> tuple[Any, Softmaxes]:
    """Run eager, in float64, with its weights."""
    model.set_attn_implementation("eager")
    doubled = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    with torch.no_grad(), Softmaxes() as softmaxes:
        return model(**doubled, output_attentions=True), softmaxes


def layers_of(
    softmaxes: Softmaxes, weights: list[Tensor], kinds: list[tuple[str, Tensor, Tensor | None]]
) -> list[Layer]:
    """One for each softmax, in the order in which they ran."""
    found: list[Layer] = []
    for p, logits, values, (kind, seen, tokens) in zip(weights, softmaxes.logits, softmaxes.values, kinds, strict=True):
        extra = logits.shape[-1] - p.shape[-1]  # gpt-oss: the sink's column, and logits that are shifted
        lse = None if extra else logits.masked_fill(~seen, -math.inf).logsumexp(-1)
        groups = p.shape[1] // values.shape[1]
        norms = values.norm(dim=-1).repeat_interleave(groups, 1)
        found.append(Layer(p, seen.expand(p.shape), kind, lse, norms, tokens))
    return found


def decoder(
    model: type[Any], config: Any, names: str, windows: tuple[int | None, ...] = (None, None)
) -> Callable[[str], Case]:
    """A decoder on padded text."""
    inputs = {"input_ids": IDS, "attention_mask": PADDING}

    def truth(doubled: nn.Module) -> dict[str, Layer]:
        out, softmaxes = told(doubled, inputs)
        length = IDS.shape[1]
        seen = [band(length, length, window) & real(PADDING) for window in windows]
        kinds = [("self", one, IDS) for one in seen]
        found = layers_of(softmaxes, [*out.attentions], kinds)
        return {names.format(n): layer for n, layer in enumerate(found)}

    return made(model, config, inputs, truth)


def encoder(model: type[Any], config: Any, names: str, inputs: dict[str, Tensor]) -> Callable[[str], Case]:
    """An encoder, of padded text or of an image."""

    def truth(doubled: nn.Module) -> dict[str, Layer]:
        out, softmaxes = told(doubled, inputs)
        seen = (
            real(inputs["attention_mask"]) if "attention_mask" in inputs else torch.ones(1, 1, 1, 1, dtype=torch.bool)
        )
        kinds = [("self", seen, inputs.get("input_ids"))] * len(out.attentions)
        found = layers_of(softmaxes, [*out.attentions], kinds)
        return {names.format(n): layer for n, layer in enumerate(found)}

    return made(model, config, inputs, truth)


def both(
    model: type[Any], config: Any, names: tuple[str, str, str], inputs: dict[str, Tensor]
) -> Callable[[str], Case]:
    """An encoder and a decoder; the names of their self-attention, and of the cross-attention."""

    def truth(doubled: nn.Module) -> dict[str, Layer]:
        out, softmaxes = told(doubled, inputs)
        padded = (
            real(inputs["attention_mask"]) if "attention_mask" in inputs else torch.ones(1, 1, 1, 1, dtype=torch.bool)
        )
        length = TARGET.shape[1]
        weights, kinds, order = [*out.encoder_attentions], [], []
        for n in range(len(weights)):
            kinds.append(("self", padded, inputs.get("input_ids")))
            order.append(names[0].format(n))
        for n, (own, cross) in enumerate(zip(out.decoder_attentions, out.cross_attentions, strict=True)):
            weights += [own, cross]
            kinds += [("self", band(length, length), TARGET), ("cross", padded, None)]
            order += [names[1].format(n), names[2].format(n)]
        return dict(zip(order, layers_of(softmaxes, weights, kinds), strict=True))

    return made(model, config, inputs, truth)


def made(
    model: type[Any], config: Any, inputs: dict[str, Tensor], truth: Callable[[nn.Module], dict[str, Layer]]
) -> Callable[[str], Case]:
    def case(implementation: str) -> Case:
        one = copy.deepcopy(config)
        one._attn_implementation = implementation
        one._experts_implementation = "eager"  # the fast one of gpt-oss knows no float64
        torch.manual_seed(0)
        net = spread(model._from_config(one) if hasattr(model, "_from_config") else model(one))

        def run(net: nn.Module) -> Any:
            dtype = next(net.parameters()).dtype
            return net(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()})

        tokens = {"tokens": "inputs"} if "input_ids" in inputs or "decoder_input_ids" in inputs else {}
        return Case(net, run, truth, tokens, Softmaxes)

    return case


SIZES: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 4, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PLAIN = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
SEQ2SEQ: dict[str, Any] = {
    "d_model": 24, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 3, "decoder_attention_heads": 3,
    "encoder_ffn_dim": 20, "decoder_ffn_dim": 20, "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
TEXT = {"input_ids": IDS, "attention_mask": PADDING}
PAIR = {**TEXT, "decoder_input_ids": TARGET}
SOUND = {
    "input_features": torch.randn(2, 8, 26, generator=torch.Generator().manual_seed(1)),
    "decoder_input_ids": TARGET,
}
IMAGE = {"pixel_values": torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))}
EVERY = ("eager", "sdpa", "headscope")
OWN = ("eager", "headscope")  # what SDPA cannot do, transformers does not offer under that name
LAYERS = "model.layers.{}.self_attn"

FAMILIES: dict[str, tuple[Callable[[str], Case], tuple[str, ...]]] = {
    "llama": (decoder(transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES), LAYERS), EVERY),
    "qwen2": (decoder(transformers.Qwen2ForCausalLM, transformers.Qwen2Config(**SIZES), LAYERS), EVERY),
    "qwen3": (decoder(transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**SIZES), LAYERS), EVERY),
    "mistral": (
        decoder(
            transformers.MistralForCausalLM, transformers.MistralConfig(**SIZES, sliding_window=5), LAYERS, (5, 5)
        ),
        EVERY,
    ),
    "gemma2": (
        decoder(
            transformers.Gemma2ForCausalLM,
            transformers.Gemma2Config(
                **SIZES, sliding_window=5, query_pre_attn_scalar=7, attn_logit_softcapping=1.5,
                layer_types=["sliding_attention", "full_attention"],
            ),
            LAYERS,
            (5, None),
        ),
        OWN,
    ),
    "gpt_oss": (
        decoder(
            transformers.GptOssForCausalLM,
            transformers.GptOssConfig(
                **SIZES, sliding_window=5, num_local_experts=2, num_experts_per_tok=1, rope_parameters={
                    "rope_type": "default", "rope_theta": 10000.0
                }, layer_types=["sliding_attention", "full_attention"],
            ),
            LAYERS,
            (5, None),
        ),
        OWN,
    ),
    "gpt2": (
        decoder(
            transformers.GPT2LMHeadModel,
            transformers.GPT2Config(
                n_embd=24, n_layer=2, n_head=3, vocab_size=VOCABULARY, n_positions=64, bos_token_id=1, eos_token_id=2,
                scale_attn_by_inverse_layer_idx=True,
            ),
            "transformer.h.{}.attn",
        ),
        EVERY,
    ),
    "bert": (
        encoder(
            transformers.BertModel, transformers.BertConfig(**PLAIN), "encoder.layer.{}.attention.self", TEXT
        ),
        EVERY,
    ),
    "distilbert": (
        encoder(
            transformers.DistilBertModel,
            transformers.DistilBertConfig(dim=24, hidden_dim=20, n_layers=2, n_heads=3, vocab_size=VOCABULARY),
            "transformer.layer.{}.attention",
            TEXT,
        ),
        EVERY,
    ),
    "vit": (
        encoder(
            transformers.ViTModel, transformers.ViTConfig(**{
                **{name: PLAIN[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
                "num_attention_heads": 3, "image_size": 12, "patch_size": 4,
            }),
            "layers.{}.attention",
            IMAGE,
        ),
        EVERY,
    ),
    "t5": (
        both(
            transformers.T5ForConditionalGeneration,
            transformers.T5Config(
                d_model=24, d_kv=4, d_ff=20, num_layers=2, num_heads=3, vocab_size=VOCABULARY,
                relative_attention_num_buckets=8, pad_token_id=0, decoder_start_token_id=0,
            ),
            (
                "encoder.block.{}.layer.0.SelfAttention",
                "decoder.block.{}.layer.0.SelfAttention",
                "decoder.block.{}.layer.1.EncDecAttention",
            ),
            PAIR,
        ),
        EVERY,
    ),
    "bart": (
        both(
            transformers.BartModel,
            transformers.BartConfig(**SEQ2SEQ, max_position_embeddings=64),
            ("encoder.layers.{}.self_attn", "decoder.layers.{}.self_attn", "decoder.layers.{}.encoder_attn"),
            PAIR,
        ),
        EVERY,
    ),
    "whisper": (
        both(
            transformers.WhisperModel,
            transformers.WhisperConfig(**SEQ2SEQ, num_mel_bins=8, max_source_positions=13, max_target_positions=20),
            ("encoder.layers.{}.self_attn", "decoder.layers.{}.self_attn", "decoder.layers.{}.encoder_attn"),
            SOUND,
        ),
        EVERY,
    ),
}  # fmt: skip

"""Every model family of the installed transformers, small and with random weights, with an input that it takes.

Layers and vocabulary are made small first, which fits almost every configuration; then widths, by their names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from support.late_families import RECIPES
from support.model_families import HEADS, build_config

FEW = {
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2, "depth": 2, "decoder_num_hidden_layers": 2, "vocab_size": 120,
    "vocab_size_per_layer_input": 120, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2, "decoder_depth": 2, "num_embeddings": 120,
    "text_vocab_size": 120, "audio_vocab_size": 120, "block_configs": 2, "num_hidden_groups": 1,
}  # fmt: skip
"""Numbers of layers, experts and words. A shorter list of layers has the length of the list that was cut."""
WIDTHS = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "embed_dim": 32, "dim": 32, "embedding_size": 32,
    "word_embed_proj_dim": 32, "out_hidden_size": 32, "text_hidden_size": 32, "projection_dim": 32,
    "encoder_hidden_size": 32, "decoder_hidden_size": 32, "output_hidden_size": 32, "output_dim": 32,
    "hidden_size_per_layer_input": 8, "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8,
    "intermediate_size": 48, "d_ff": 48, "ffn_dim": 48, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "mlp_dim": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16, "n_inner": 48,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "image_size": 64, "index_n_heads": 4, "index_head_dim": 16, "max_position_embeddings": 512, "mamba_n_heads": 8,
    "mamba_d_head": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "ffn_hidden_size": 48,
}  # fmt: skip
LATE = frozenset(RECIPES)
"""Families with a recipe of their own."""
MOST_PARAMETERS = 120_000_000
BATCH, LENGTH = 2, 13


@dataclass
class Family:
    """A small model: its type in transformers, such as "gpt2"; the model, in eval mode; the arguments of a call."""

    name: str
    model: nn.Module
    inputs: dict[str, Any]


class UnbuiltError(Exception):
    """A family could not be built or run, so nothing is known of it."""


def list_names() -> list[str]:
    """Return the types of all models that transformers builds from a configuration."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    return sorted(MODEL_MAPPING_NAMES)


def build(name: str, most: int = MOST_PARAMETERS, *, late: bool = False) -> Family:
    """Return a family that runs, with so many parameters at most.

    Args:
        name: its type in transformers.
        most: the number of parameters.
        late: also build the families of ``LATE``. The findings that the tests of ``check_model`` list are those of the
            others.

    Raises:
        UnbuiltError: no attempt ran; the message is that of the last.
    """
    if name in LATE:
        return _build_late(name, most, wanted=late)
    reasons: list[str] = []
    for make_config in _list_configs(name):
        try:
            model = _instantiate(make_config(), most)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {str(error).strip()}")
            continue
        for inputs in _inputs(model):
            try:
                with torch.no_grad():
                    model(**inputs)
                return Family(name, model, inputs)
            except Exception as error:
                reasons.append(f"{type(error).__name__}: {str(error).strip()}")
    raise UnbuiltError(" | ".join(reason.splitlines()[0][:120] for reason in reasons if reason)[:600])


def _build_late(name: str, most: int, *, wanted: bool) -> Family:
    if not wanted:
        raise UnbuiltError("built with late=True only")
    try:
        config, inputs = RECIPES[name]()
        model = config.eval() if isinstance(config, nn.Module) else _instantiate(config, most)
        with torch.no_grad():
            model(**inputs)
    except Exception as error:
        raise UnbuiltError(f"{type(error).__name__}: {error}") from error
    return Family(name, model, inputs)


def _list_configs(name: str) -> list[Callable[[], Any]]:
    """Return what makes the configurations to try: with small sizes, then with fewer of them made small."""
    own_heads = {key: n for key, n in WIDTHS.items() if "head" not in key and not key.endswith("_dim")}
    variants: list[dict[str, int]] = [{}, WIDTHS, {**WIDTHS, "num_key_value_heads": 4}]
    variants += [
        {**own_heads, "num_attention_heads": 4, "num_key_value_heads": heads, "hidden_size": width}
        for heads, width in ((4, 256), (2, 256), (4, 512), (2, 512))
    ]
    return [
        partial(build_config, name), partial(build_config, name, num_key_value_heads=HEADS),
        *(partial(_shrunk, name, {**FEW, **sizes}) for sizes in variants),
    ]  # fmt: skip


def _shrunk(name: str, sizes: dict[str, int]) -> Any:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[name]()
    _shrink(config, sizes)
    return config


def _shrink(config: Any, sizes: dict[str, int], depth: int = 0) -> None:
    from transformers import PretrainedConfig

    layers = 0
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig) and depth < 4:
            _shrink(value, sizes, depth + 1)
        elif name == "mrope_section" and isinstance(value, list):
            continue
        elif isinstance(value, int) and not isinstance(value, bool) and value > sizes.get(name, value):
            if "layer" in name:
                layers = max(layers, value)
            _assign(config, name, sizes[name])
        elif isinstance(value, int) and name.endswith("_token_id") and value >= 120:
            _assign(config, name, 119)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and layers and len(value) == layers:
            _assign(config, name, value[:2] if len(set(map(str, value))) == 1 else _both_kinds(value))


def _both_kinds(values: list[Any]) -> list[Any]:
    """Return two entries of a list, of different kinds if there are some."""
    other = next((x for x in values if x != values[0]), values[0])
    return [values[0], other]


def _assign(config: Any, name: str, value: Any) -> None:
    try:
        setattr(config, name, value)
    except Exception:
        vars(config)[name] = value


def _instantiate(config: Any, most: int) -> nn.Module:
    from transformers import AutoModel

    with torch.device("meta"):
        size = sum(x.numel() for x in AutoModel.from_config(config).parameters())
    if size > most:
        raise UnbuiltError(f"{size:,} parameters")
    torch.manual_seed(0)
    return AutoModel.from_config(config, dtype=torch.float32).eval()


def _inputs(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Yield arguments that the model may take, those of its main input first."""
    names = set(inspect.signature(model.forward).parameters)
    main = getattr(model, "main_input_name", "input_ids")
    config: Any = model.config
    ids = torch.randint(
        3, min(100, _find(config, "vocab_size") or 100) - 1, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0)
    )
    decoder: dict[str, Any] = {"decoder_input_ids": ids[:, :7]} if "decoder_input_ids" in names else {}
    if main == "input_ids" or "input_ids" in names:
        yield {"input_ids": ids}
        yield {"input_ids": ids, **decoder}
    size = _find(config, "image_size") or 64
    height, width = (size if isinstance(size, (list, tuple)) else (size, size))[:2]
    channels = _find(config, "num_channels") or 3
    pixels = torch.randn(BATCH, channels, height, width, generator=torch.Generator().manual_seed(1))
    if "pixel_values" in names:
        yield {"pixel_values": pixels, **decoder}
        yield {"pixel_values": torch.randn(BATCH, 3, 224, 224)}
        if "input_ids" in names:
            yield {"input_ids": ids, "pixel_values": pixels}
        frames = _find(config, "num_frames") or 4
        yield {"pixel_values": pixels[:, None].repeat(1, frames, 1, 1, 1)}
    if "pixel_values_videos" in names:
        frames = _find(config, "frames_per_clip") or 4
        yield {"pixel_values_videos": pixels[:, None].repeat(1, frames, 1, 1, 1)}
    if "input_values" in names:
        yield {"input_values": torch.randn(BATCH, 4000), **decoder}
        yield {"input_values": torch.randn(BATCH, 1, 4000)}
        yield {
            "input_values": torch.randn(BATCH, _find(config, "max_length") or 64, _find(config, "num_mel_bins") or 80)
        }
    if "input_features" in names:
        mels = _find(config, "num_mel_bins") or _find(config, "feature_size") or 80
        for shape in ((BATCH, 64, mels), (BATCH, mels, 64), (BATCH, mels, 3000)):
            yield {"input_features": torch.randn(*shape), **decoder}
    if {"input_ids", "bbox"} <= names:
        yield {"input_ids": ids, "bbox": torch.zeros(BATCH, LENGTH, 4, dtype=torch.long)}
    if "inputs" in names:
        yield {"inputs": ids}
    if grid := names & {"grid_thw", "image_grid_thw"}:
        patch, frames = _find(config, "patch_size") or 14, _find(config, "temporal_patch_size") or 1
        patches = torch.randn(32, channels * frames * patch * patch)
        side = {grid.pop(): torch.tensor([[1, 4, 4], [1, 4, 4]])}
        yield {"pixel_values" if "pixel_values" in names else "hidden_states": patches, **side}
        yield {"pixel_values": patches.view(32, channels, -1, patch)[:, :, :patch], **side}
    if "pixel_position_ids" in names:
        patch = _find(config, "patch_size") or 16
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(BATCH, 16, 2)
        yield {"pixel_values": torch.randn(BATCH, 16, 3 * patch * patch), "pixel_position_ids": places}
    for more in ("past_values", "states"):
        if more in names:
            yield from _of_series(config, names)
            break
    if "qformer_input_ids" in names:
        yield {"input_ids": ids, "qformer_input_ids": ids, "pixel_values": pixels}
    if "query_embeds" in names:
        yield {"query_embeds": torch.randn(BATCH, 5, _find(config, "hidden_size") or 32)}
    if "inputs_embeds" in names:
        yield {"inputs_embeds": torch.randn(BATCH, LENGTH, _find(config, "hidden_size") or 32)}


def _of_series(config: Any, names: set[str]) -> Iterator[dict[str, Any]]:
    """Yield arguments of models of time series and of decisions."""
    if "states" in names:
        state, act = _find(config, "state_dim") or 17, _find(config, "act_dim") or 4
        steps = torch.arange(LENGTH).expand(BATCH, LENGTH)
        yield {
            "states": torch.randn(BATCH, LENGTH, state), "actions": torch.randn(BATCH, LENGTH, act),
            "rewards": torch.randn(BATCH, LENGTH, 1), "returns_to_go": torch.randn(BATCH, LENGTH, 1),
            "timesteps": steps, "attention_mask": torch.ones(BATCH, LENGTH),
        }  # fmt: skip
    length = _find(config, "context_length") or 32
    yield {"past_values": torch.randn(BATCH, length, _find(config, "num_input_channels") or 1)}
    yield {"past_values": torch.randn(BATCH, length)}


def _find(config: Any, name: str) -> Any:
    """Return a number of a configuration, or of one of its parts."""
    from transformers import PretrainedConfig

    value = getattr(config, name, None)
    if value is not None:
        return value
    parts = (part for part in vars(config).values() if isinstance(part, PretrainedConfig))
    return next((each for part in parts if (each := _find(part, name)) is not None), None)


class Spy(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts attention by its operators: fused ones, and softmaxes whose result multiplies something."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = 0
        self.softmaxes: dict[int, Tensor] = {}
        self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if "scaled_dot_product" in name or name in ("_transformer_encoder_layer_fwd", "flex_attention"):
            self.fused += 1
        elif name in ("_softmax", "_safe_softmax"):
            self.softmaxes[out.untyped_storage()._cdata] = out
        elif name in ("bmm", "mm", "baddbmm"):
            factors = args[-2:]
            for x in factors:
                if x.untyped_storage()._cdata in self.softmaxes and x.shape[-1] > 1:
                    self.written += 1
                    break
        elif isinstance(out, Tensor) and args and isinstance(args[0], Tensor):
            if args[0].untyped_storage()._cdata in self.softmaxes and out.shape == args[0].shape:
                self.softmaxes[out.untyped_storage()._cdata] = out  # dropout, a cast, a mask
            elif args[0].untyped_storage()._cdata in self.softmaxes and name in ("clone", "_to_copy", "cat"):
                self.softmaxes[out.untyped_storage()._cdata] = out
        return out


def are_same(a: Any, b: Any) -> bool:
    """Return whether two outputs of a model are equal, to the bit."""
    mine, other = list(list_tensors(a)), list(list_tensors(b))
    return len(mine) == len(other) and all(
        torch.equal(x, y) or (x.dtype.is_floating_point and torch.equal(x.nan_to_num(), y.nan_to_num()))
        for x, y in zip(mine, other, strict=True)
    )


def list_tensors(x: Any) -> Iterator[Tensor]:
    """Yield the tensors of an output."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, dict):
        for each in x.values():
            yield from list_tensors(each)
    elif isinstance(x, (list, tuple)):
        for each in x:
            yield from list_tensors(each)

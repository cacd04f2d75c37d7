"""The inputs of a model: which tensors are sequences, which masks hide parts of them, and variants of them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

SEQUENCES = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")
"""Arguments of transformers along which the output runs, the first that is present."""
PAIRS = {"attention_mask": ("input_ids", "inputs_embeds"), "decoder_attention_mask": ("decoder_input_ids",)}
"""Masks of transformers and the sequences whose tokens they hide."""
DROPPED = frozenset({"labels", "use_cache", "return_dict", "position_ids", "decoder_position_ids", "cache_position"})
"""Arguments of transformers that the questions set themselves, or that change nothing but the loss."""


@dataclass(frozen=True)
class MaskGroup:
    """A mask over tokens, [B, M], and the tensors whose tokens it hides.

    Attributes:
        mask: the name of the mask.
        tokens: the names of the tensors, [B, M, ...].
        hides: whether True hides a token, as in ``key_padding_mask`` of torch.
        dtype: of the mask.
    """

    mask: str
    tokens: tuple[str, ...]
    hides: bool
    dtype: torch.dtype

    def build(self, real: Tensor) -> Tensor:
        """Return the mask for real tokens, boolean [B, M]."""
        return (real != self.hides).to(self.dtype)


@dataclass(frozen=True)
class ModelInputs:
    """The arguments of a call.

    Attributes:
        values: by name; positional arguments have the names of the signature, or their number.
        positional: the names of the positional arguments, in order.
        main: the name of the sequence along which the output runs, or the first tensor.
        groups: the masks over tokens.
        packed: the name of a mask over pairs of tokens that the caller passed, and that the questions replace; "" =
            there was none.
    """

    values: Mapping[str, Any]
    positional: tuple[str, ...]
    main: str
    groups: tuple[MaskGroup, ...]
    packed: str = ""

    @property
    def length(self) -> int:
        """T, the length of the main sequence."""
        return self.values[self.main].shape[1]

    @property
    def batch(self) -> int:
        """B, the number of entries."""
        return self.values[self.main].shape[0]

    def with_values(self, **values: Any) -> ModelInputs:
        """Return the inputs with other values; None removes one."""
        merged = {name: value for name, value in {**self.values, **values}.items() if value is not None}
        return replace(self, values=merged)

    def entry(self, row: int) -> ModelInputs:
        """Return one entry, as a batch of one."""
        size = self.batch
        return self.with_values(
            **{name: value[row : row + 1] for name, value in self.values.items() if _has_batch(value, size)}
        )

    def describe(self) -> str:
        """Return the call in words: the names and shapes of its tensors."""
        parts = [
            f"{name} {list(value.shape)}" if isinstance(value, Tensor) else name for name, value in self.values.items()
        ]
        return f"({', '.join(parts)})"


def _has_batch(value: Any, size: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == size


def read_inputs(model: nn.Module, inputs: Any) -> ModelInputs:
    """Read the arguments of a call.

    Args:
        model: the model that is called with them.
        inputs: a mapping of names to values, a tensor, or a sequence of values.

    Raises:
        TypeError: the inputs are of another type.
        ValueError: the inputs have no tensor with a batch axis.
    """
    names = argument_names(model)
    if isinstance(inputs, Mapping):
        values, positional = {str(name): value for name, value in inputs.items()}, ()
    elif isinstance(inputs, (Tensor, Sequence)) and not isinstance(inputs, str):
        each = [inputs] if isinstance(inputs, Tensor) else list(inputs)
        positional = tuple(names[n] if n < len(names) else str(n) for n in range(len(each)))
        values = dict(zip(positional, each, strict=True))
    else:
        raise TypeError(f"inputs: got {type(inputs).__name__}, expected a dict of arguments, a tensor or a tuple")
    if is_transformers(model):
        values = {**_decoder_ids(model, values, names), **values}
        values = {name: value for name, value in values.items() if name not in DROPPED}
    values = {
        name: value.detach().cpu() if isinstance(value, Tensor) else value
        for name, value in values.items()
        if value is not None
    }
    tensors = [name for name, value in values.items() if isinstance(value, Tensor) and value.ndim > 1]
    tensors = [name for name in tensors if "mask" not in name] or tensors
    if not tensors:
        raise ValueError(_describe_missing(values))
    main = next((name for name in SEQUENCES if name in tensors), tensors[0])
    if 0 in values[main].shape:
        raise ValueError(f"inputs: {main} {list(values[main].shape)} is empty, expected at least one entry and token")
    groups = _list_groups(model, values, names)
    packed = (group.mask for group in groups if getattr(values.get(group.mask), "ndim", 2) > 2)
    return ModelInputs(values, positional, main, groups, next(packed, ""))


def _describe_missing(values: Mapping[str, Any]) -> str:
    """Return the error of inputs without a tensor of a batch, with the remedy for what they hold."""
    problem = "inputs: got no tensor with a batch axis, expected one such as input_ids [B, T]"
    for name, value in values.items():
        if isinstance(value, Mapping):
            return (
                f"{problem}; {name} is a {type(value).__name__}: pass it as inputs, with call=lambda model, **inputs: "
                "model(inputs)"
            )
        if isinstance(value, Tensor):
            return f"{problem}; {name} has shape {list(value.shape)}: add the batch as its first axis"
        if hasattr(value, "__array__") or isinstance(value, list):
            return f"{problem}; {name} is a {type(value).__name__}: pass torch.as_tensor({name})"
    return problem


def argument_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of ``forward``, and those of the classes it passes ``**kwargs`` on to."""
    names: dict[str, None] = {}
    for kind in type(model).__mro__:
        forward = vars(kind).get("forward")
        if not callable(forward):
            continue
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        names |= dict.fromkeys(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
        if all(p.kind != p.VAR_KEYWORD for p in parameters):
            break
    return tuple(names)


def is_transformers(model: nn.Module) -> bool:
    """Return whether a model is one of transformers; this does not import transformers."""
    return any(each.__module__.startswith("transformers.") for each in type(model).__mro__)


def _decoder_ids(model: Any, values: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the tokens of the decoder, where the model would make them from labels, or from those of the encoder.

    The model would shift them, with the padding among them.
    """
    paired = getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in names
    if not paired or any(name.startswith("decoder_input") for name in values):
        return {}
    ids = values.get("input_ids")
    labels = values.get("labels")
    if isinstance(labels, Tensor) and labels.ndim == 2 and not labels.is_floating_point():
        start = getattr(model.config, "decoder_start_token_id", None)
        start = start if isinstance(start, int) else 0
        tokens = labels.masked_fill(labels < 0, start)  # -100 is the label of padding
        return {"decoder_input_ids": torch.cat([torch.full_like(tokens[:, :1], start), tokens[:, :-1]], 1)}
    return {"decoder_input_ids": ids.clone()} if isinstance(ids, Tensor) else {}


def _list_groups(model: nn.Module, values: Mapping[str, Any], names: Sequence[str]) -> tuple[MaskGroup, ...]:
    groups: list[MaskGroup] = []
    if is_transformers(model):
        for mask, tokens in PAIRS.items():
            present = tuple(name for name in (*tokens, *_companions(values, tokens)) if name in values)
            if mask in names and any(name in values for name in tokens):
                mask_values = values.get(mask)
                dtype = mask_values.dtype if isinstance(mask_values, Tensor) else torch.int64
                groups.append(MaskGroup(mask, present, False, dtype))
    covered = {group.mask for group in groups}
    for mask, value in values.items():
        if mask in covered or "mask" not in mask or not isinstance(value, Tensor) or value.ndim != 2:
            continue
        fitting = tuple(
            name
            for name, other in values.items()
            if "mask" not in name and isinstance(other, Tensor) and other.shape[:2] == value.shape and other.ndim > 1
        )
        stem = mask.removesuffix("_mask").removesuffix("_padding").removesuffix("_key")
        named = tuple(name for name in fitting if name.startswith(stem) or stem.startswith(name))
        ones = bool((value != 0).any())
        if fitting and (ones or not value.is_floating_point()):  # zeros of real numbers may be numbers to add
            hides = mask.endswith("key_padding_mask") or not ones
            groups.append(MaskGroup(mask, named or fitting, hides, value.dtype))
    return tuple(groups)


def _companions(values: Mapping[str, Any], tokens: Sequence[str]) -> tuple[str, ...]:
    """Return tensors of the size of a sequence, such as token types."""
    sizes = [values[name].shape[:2] for name in tokens if name in values]
    if "decoder_input_ids" in tokens or not sizes:
        return ()
    return tuple(
        name
        for name, value in values.items()
        if name == "token_type_ids" and isinstance(value, Tensor) and value.shape[:2] == sizes[0]
    )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside a wrapper that computes the same: of torch.compile, or of data parallelism."""
    wrappers = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
    while type(model).__name__ in wrappers and type(model).__module__.startswith("torch."):
        inner = getattr(model, wrappers[type(model).__name__])
        if not isinstance(inner, nn.Module):
            break
        model = inner
    return model


def real_tokens(inputs: ModelInputs, group: MaskGroup) -> Tensor:
    """Return which tokens are real, boolean [B, M]."""
    mask = inputs.values.get(group.mask)
    size = inputs.values[group.tokens[0]].shape[:2]
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return torch.ones(size, dtype=torch.bool)
    return mask.bool() != group.hides


def without_padding(inputs: ModelInputs) -> ModelInputs:
    """Return the entry with the most real tokens, without its padding, as a batch of one; masks hide nothing."""
    real = {group.mask: real_tokens(inputs, group) for group in inputs.groups}
    row = 0
    if inputs.groups:
        main = next((group for group in inputs.groups if inputs.main in group.tokens), inputs.groups[0])
        row = int(real[main.mask].sum(-1).argmax())
        for group in inputs.groups:
            if not bool(real[group.mask][row].any()):
                raise ValueError(f"inputs: {group.mask} hides every token of entry {row}, expected at least one token")
    entry = inputs.entry(row)
    for group in inputs.groups:
        chosen = real[group.mask][row]
        cut = {name: entry.values[name][:, chosen] for name in group.tokens}
        entry = entry.with_values(**cut)
        entry = entry.with_values(**{group.mask: group.build(torch.ones(1, int(chosen.sum()), dtype=torch.bool))})
    return entry


def vary(entry: ModelInputs, seed: int) -> ModelInputs:
    """Return an entry with other contents of the same shapes: tokens in another order, or other numbers.

    Seed 0 returns it as it is.
    """
    masks = {group.mask for group in entry.groups}
    changed: dict[str, Any] = {}
    for name, value in entry.values.items():
        if name in masks or "mask" in name or not isinstance(value, Tensor) or not _has_batch(value, entry.batch):
            continue
        if value.is_floating_point():
            changed[name] = value * (1 - 0.25 * seed)
        elif value.ndim == 2 and name in SEQUENCES:
            changed[name] = value.roll(seed, 1)
    return entry.with_values(**changed)


def join(entries: Sequence[ModelInputs]) -> ModelInputs:
    """Return a batch of entries of the same shapes."""
    first = entries[0]
    joined = {
        name: torch.cat([entry.values[name] for entry in entries])
        for name, value in first.values.items()
        if _has_batch(value, first.batch)
    }
    return first.with_values(**joined)


def cut(entry: ModelInputs, group: MaskGroup, start: int, stop: int) -> ModelInputs:
    """Return some tokens of the sequences of a group."""
    return entry.with_values(**{name: entry.values[name][:, start:stop] for name in (*group.tokens, group.mask)})


def pad(entry: ModelInputs, group: MaskGroup, count: int, left: bool, fill: int | float) -> ModelInputs:
    """Return an entry with padding on one side of a group's sequences, which its mask hides.

    Args:
        entry: the inputs, without padding.
        group: whose sequences are padded.
        count: the number of tokens of padding.
        left: whether the padding is on the left.
        fill: the token id of the padding, or the number that all its features have.
    """
    padded: dict[str, Any] = {}
    for name in group.tokens:
        value = entry.values[name]
        number = fill if value.is_floating_point() or name in SEQUENCES else 0
        extra = torch.full((value.shape[0], count, *value.shape[2:]), number, dtype=value.dtype)
        padded[name] = torch.cat([extra, value] if left else [value, extra], 1)
    size = padded[group.tokens[0]].shape[:2]
    real = torch.ones(size, dtype=torch.bool)
    real[:, slice(0, count) if left else slice(size[1] - count, None)] = False
    return entry.with_values(**padded, **{group.mask: group.build(real)})

"""The module that was called with the token ids of an attention layer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headscope._intercept import Frame, InterceptedCall

_NOT_IDS = ("mask", "position", "type", "label", "target", "segment")
# other inputs of a sequence: pixel_values, input_features, image_embeds, audio, patches
_OTHER = re.compile(
    r"(^|_)(pixels?|images?|imgs?|patch(es)?|videos?|visual|vision|audios?|speech|mels?|spectrograms?|wave(form)?s?"
    r"|input_features|input_values)(_|$)"
)
_NO_SEQUENCE = re.compile(r"mask|position|rotary|bias")
_CACHES = ("past_key_values", "past_key_value", "layer_past", "cache")


class Source(NamedTuple):
    """A module that was called with ids, and the ids, [B, T]."""

    frame: Frame
    ids: Tensor


def find_source(call: InterceptedCall, frames: Iterable[Frame]) -> Source | None:
    """Find the innermost module that was called with ids, if the call's sequence is computed from them.

    It is not if a module in between takes a sequence of another kind, such as pixels, or of another length. If the
    module itself takes one together with the ids, the sequence is that of the ids only if it is passed on as
    ``inputs_embeds``.

    Args:
        call: the attention call.
        frames: the modules that run, the innermost first.
    """
    queries = call.q.shape[-2]
    embeds: Any = None
    for frame in frames:
        arguments = frame.arguments
        candidates = _id_arguments(arguments, queries)
        if candidates is not None:
            if len(candidates) != 1 or candidates[0].ndim != 2 or candidates[0].shape[-1] != queries:
                return None
            ids = candidates[0].detach()
            embedded = isinstance(embeds, Tensor) and embeds.shape[:2] == ids.shape
            return Source(frame, ids) if embedded or not _has_other(arguments) else None
        if _has_other(arguments) or not _goes_through(arguments, queries):
            return None
        embeds = arguments.get("inputs_embeds")
    return None


def find_cache(frames: Iterable[Frame]) -> object:
    """Find the cache that the innermost module was called with, or None."""
    for frame in frames:
        for name in _CACHES:
            if (cache := frame.arguments.get(name)) is not None:
                return getattr(cache, "self_attention_cache", cache)
    return None


def _id_arguments(arguments: Mapping[str, Any], queries: int) -> list[Tensor] | None:
    """Return the arguments that may be a layer's ids: ``input_ids``, or whole numbers, one for each query; or None.

    Whole numbers of another name together with a sequence of vectors are not the source of the sequence.
    """
    named = arguments.get("input_ids")
    if isinstance(named, Tensor):
        others = (value for name, value in arguments.items() if name.endswith("_input_ids"))
        return [named, *(each for each in others if _may_be_ids(each, queries) and each is not named)]
    if any(value.ndim > 2 and queries in value.shape[:2] for value in _sequences(arguments).values()):
        return None
    unnamed = [
        value
        for name, value in arguments.items()
        if _may_be_ids(value, queries) and not any(part in name for part in _NOT_IDS)
    ]
    return unnamed or None


def _may_be_ids(value: object, queries: int) -> bool:
    if not isinstance(value, Tensor) or value.ndim != 2 or value.shape[-1] != queries:
        return False
    return not (value.dtype.is_floating_point or value.dtype.is_complex or value.dtype == torch.bool)


def _has_other(arguments: Mapping[str, Any]) -> bool:
    """Return whether a module takes a sequence of another kind than ids."""
    return any(_OTHER.search(name) for name in _sequences(arguments))


def _goes_through(arguments: Mapping[str, Any], queries: int) -> bool:
    """Return whether one of a module's tensors may be the sequence of the queries; true if it has none."""
    shapes = [value.shape for value in _sequences(arguments).values() if value.ndim >= 2]
    return not shapes or any(queries in (shape[:-1] if len(shape) < 4 else shape[1:-1]) for shape in shapes)


def _sequences(arguments: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return name -> tensor of numbers that may be a sequence."""
    return {
        name: value
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.is_floating_point() and not _NO_SEQUENCE.search(name)
    }

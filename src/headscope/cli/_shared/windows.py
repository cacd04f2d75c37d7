"""The input of a model, split into windows of its context."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from headscope._support.text import visible
from headscope.cli._shared.mistakes import Mistake
from headscope.cli._shared.model_loading import Loaded
from headscope.cli._shared.text_input import describe_source, read_whole

if TYPE_CHECKING:
    from torch import Tensor

SOURCES = ("--text", "--file", "--ids", "--image")


@dataclass(frozen=True)
class Input:
    """The input of a model.

    Attributes:
        source: where it came from, in a few words.
        parts: one for each forward pass: token ids [1, T], or images.
        tokens: number of tokens in all, without those of the ends; for images, their number.
        digest: equal for equal inputs.
    """

    source: str
    parts: tuple[Tensor, ...]
    tokens: int
    digest: str


def read_input(
    loaded: Loaded, text: str | None, file: str | None, ids: str | None, image: str | None, context: int | None
) -> Input:
    """Return the input of the options.

    Raises:
        Mistake: there is none or more than one, or it has the wrong kind or cannot be read.
    """
    options = [name for name, value in zip(SOURCES, (text, file, ids, image), strict=True) if value is not None]
    if len(options) > 1:
        raise Mistake(f"expected one input, got {' and '.join(options)}")
    if loaded.takes == "image":
        if context is not None:
            raise Mistake("--context: applies to text, and this model reads images")
        return _images(loaded, options, image)
    if image is not None:
        raise Mistake("--image: this model reads text, expected --text, --file or --ids")
    if not options:
        raise Mistake("expected an input: --text, --file or --ids")
    return _tokens(loaded, text, file, ids, context)


def _images(loaded: Loaded, options: list[str], image: str | None) -> Input:
    if options and image is None:
        raise Mistake(f"{options[0]}: this model reads images, expected --image")
    if image is not None:
        assert loaded.prepare is not None
        pixels, source = loaded.prepare(image), visible(image)
    elif loaded.samples is not None:
        pixels = loaded.samples()
        source = f"the {len(pixels)} shipped samples"
    else:
        raise Mistake("expected an input: --image")
    return Input(source, (pixels,), len(pixels), _digest(pixels))


def _tokens(loaded: Loaded, text: str | None, file: str | None, ids: str | None, context: int | None) -> Input:
    if ids is not None:
        every, ends, source = _numbers(ids), ([], []), "token ids"
    else:
        if loaded.encode is None:
            raise Mistake(f"{loaded.name}: has no tokenizer that can be read ({loaded.without_tokenizer}); use --ids")
        read = read_whole(text, file)
        every, ends, source = loaded.encode(read.text), loaded.ends, describe_source(read, text)
        if not every:
            raise Mistake(f"{read.source}: has no tokens")
    if (largest := max(every)) >= loaded.vocabulary:
        most = loaded.vocabulary - 1
        if ids is not None:
            raise Mistake(f"--ids: got {largest}, expected 0 to {most}")
        raise Mistake(
            f"{'--file' if text is None else '--text'}: the tokenizer of {loaded.name} does not belong to its weights: "
            f"expected token ids from 0 to {most}, got {largest}; use the tokenizer of these weights, or --ids"
        )
    limit = loaded.limit or loaded.context
    if context is not None and context > limit:
        raise Mistake(f"--context: got {context}, expected at most {limit}, the context of the model")
    parts = windows(every, context or loaded.context, ends)
    return Input(source, parts, len(every), _digest(*parts))


def _numbers(ids: str) -> list[int]:
    """Return the numbers in --ids.

    Raises:
        Mistake: they are not whole numbers from 0, separated by commas or spaces.
    """
    words = re.split(r"[\s,]+", ids.strip(" \t\n,"))
    if words == [""]:
        raise Mistake("--ids: expected whole numbers such as 5,7,9, got none")
    if wrong := next((word for word in words if not re.fullmatch(r"[0-9]{1,9}", word)), None):
        raise Mistake(f"--ids: got {wrong[:40]}, expected whole numbers from 0, separated by commas or spaces")
    return [int(word) for word in words]


def windows(ids: list[int], context: int, ends: tuple[list[int], list[int]]) -> tuple[Tensor, ...]:
    """Split token ids into the fewest windows that fit the context, without overlap, and add the ends to each.

    Their lengths differ by at most one, so no window is a short rest whose rows have few visible keys.

    Raises:
        Mistake: the ends fill the context.
    """
    import torch

    before, after = ends
    room = context - len(before) - len(after)
    if room < 1:
        raise Mistake(f"--context: got {context}, expected more than the {len(before) + len(after)} tokens of the ends")
    count = -(-len(ids) // room)
    cuts = [n * len(ids) // count for n in range(count + 1)]
    parts = [[*before, *ids[start:stop], *after] for start, stop in pairwise(cuts)]
    return tuple(torch.tensor([part]) for part in parts)


def _digest(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()[:16]

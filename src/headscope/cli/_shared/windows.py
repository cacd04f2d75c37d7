"""The input of a model, split into windows of its context."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from headscope._support.text import visible
from headscope.cli._shared.mistakes import Mistake
from headscope.cli._shared.model_loading import Loaded
from headscope.cli._shared.segment_options import SegmentOptions, locate_segments, locate_tokens, read_chat
from headscope.cli._shared.text_input import describe_source, read_whole

if TYPE_CHECKING:
    from torch import Tensor

    from headscope.stats import Segments

SOURCES = ("--text", "--file", "--ids", "--image", "--chat")


@dataclass(frozen=True)
class Input:
    """The input of a model.

    Attributes:
        source: where it came from, in a few words.
        parts: one for each forward pass: token ids [1, T], or images.
        tokens: number of tokens in all, without those of the ends; for images, their number.
        digest: equal for equal inputs.
        segments: those of each part; none without --segment, --segments and --chat.
        regions: rows and columns of the regions of an image; None for none.
    """

    source: str
    parts: tuple[Tensor, ...]
    tokens: int
    digest: str
    segments: tuple[Segments, ...] = ()
    regions: tuple[int, int] | None = None


@dataclass(frozen=True)
class _Text:
    """The tokens of a text.

    Attributes:
        ids: the token ids.
        ends: those that the tokenizer sets before and after a text.
        source: where the text came from, in a few words.
        segments: of the tokens, without those of the ends.
    """

    ids: list[int]
    ends: tuple[list[int], list[int]]
    source: str
    segments: Segments | None


def read_input(
    loaded: Loaded, text: str | None, file: str | None, ids: str | None, image: str | None, context: int | None,
    segments: SegmentOptions,
) -> Input:  # fmt: skip
    """Return the input of the options.

    Raises:
        Mistake: there is none or more than one, or it has the wrong kind or cannot be read.
    """
    values = (text, file, ids, image, segments.chat)
    options = [name for name, value in zip(SOURCES, values, strict=True) if value is not None]
    if len(options) > 1:
        raise Mistake(f"expected one input, got {' and '.join(options)}")
    if loaded.takes == "image":
        if context is not None:
            raise Mistake("--context: applies to text, and this model reads images")
        if segments.places:
            raise Mistake(f"{segments.option}: applies to text, and this model reads images")
        return replace(_images(loaded, options, image), regions=segments.regions)
    if segments.regions is not None:
        got = "{}x{}".format(*segments.regions)
        raise Mistake(f"--segments: got {got}, regions of an image, and this model reads text; expected a JSON file")
    if image is not None:
        raise Mistake("--image: this model reads text, expected --text, --file or --ids")
    if not options:
        raise Mistake("expected an input: --text, --file or --ids")
    if loaded.paired and (segments.places or segments.chat is not None):
        option = "--chat" if segments.chat is not None else segments.option
        raise Mistake(f"{option}: applies to one sequence, and this model has an encoder and a decoder")
    return _tokens(loaded, text, file, ids, context, segments)


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


def _tokens(
    loaded: Loaded, text: str | None, file: str | None, ids: str | None, context: int | None, segments: SegmentOptions
) -> Input:
    if ids is not None:
        numbers = _numbers(ids)
        located = locate_tokens(segments, len(numbers)) if segments.places else None
        read = _Text(numbers, ([], []), "token ids", located)
    else:
        read = _read_tokens(loaded, text, file, segments)
    if (largest := max(read.ids)) >= loaded.vocabulary:
        most = loaded.vocabulary - 1
        if ids is not None:
            raise Mistake(f"--ids: got {largest}, expected 0 to {most}")
        option = "--chat" if segments.chat is not None else "--file" if text is None else "--text"
        raise Mistake(
            f"{option}: the tokenizer of {loaded.name} does not belong to its weights: "
            f"expected token ids from 0 to {most}, got {largest}; use the tokenizer of these weights, or --ids"
        )
    limit = loaded.limit or loaded.context
    if context is not None and context > limit:
        raise Mistake(f"--context: got {context}, expected at most {limit}, the context of the model")
    parts = windows(read.ids, context or loaded.context, read.ends)
    pieces = () if read.segments is None else _split_segments(read.segments, parts, read.ends)
    return Input(read.source, parts, len(read.ids), _digest(*parts), pieces)


def _read_tokens(loaded: Loaded, text: str | None, file: str | None, segments: SegmentOptions) -> _Text:
    """Return the tokens of a text or a chat.

    Raises:
        Mistake: it has none, the model has no tokenizer, or segments do not fit.
    """
    if loaded.encode is None:
        raise Mistake(f"{loaded.name}: has no tokenizer that can be read ({loaded.without_tokenizer}); use --ids")
    if segments.chat is not None:
        chat = read_chat(segments, loaded)
        return _Text(chat.ids, ([], []), visible(segments.chat), chat.segments)
    read = read_whole(text, file)
    ids = loaded.encode(read.text)
    if not ids:
        raise Mistake(f"{read.source}: has no tokens")
    located = locate_segments(segments, loaded, read.text, ids) if segments.places else None
    return _Text(ids, loaded.ends, describe_source(read, text), located)


def _split_segments(
    segments: Segments, parts: tuple[Tensor, ...], ends: tuple[list[int], list[int]]
) -> tuple[Segments, ...]:
    """Return the segments of each window; the tokens of the ends belong to none."""
    import torch

    from headscope.stats import Segments

    before, after = map(len, ends)
    lengths = [part.shape[1] - before - after for part in parts]
    pieces = segments.ids.split(lengths)
    none = [torch.full((count,), -1) for count in (before, after)]
    return tuple(Segments(segments.names, torch.cat((none[0], piece, none[1]))) for piece in pieces)


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

"""The segments of a chat, and of the images in a prompt."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from typing import Any, cast

import torch
from torch import Tensor

from headscope._support.arguments import as_whole, check_layout, check_type, kind, whole
from headscope._support.text import count_places

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32)
_MARK = "\ue000{}\ue001"  # private-use characters: they stand for a content, to see what the template adds

Span = tuple[int, int]

ImageRows = tuple[str, int, tuple[int, ...]]
"""An image in a prompt: its name, its columns of patches, and the position of the first patch of each row."""


def as_wholes(argument: str, value: Any, expected: str) -> Tensor:
    """Return a copy of whole numbers, int64 on the CPU.

    Raises:
        TypeError: other values.
    """
    if isinstance(value, Tensor):
        check_layout(argument, value)
    try:
        every = value.detach() if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{argument}: got {kind(value)}, {expected} ({error})") from error
    if every.dtype not in _INTEGERS and every.numel():
        raise TypeError(f"{argument}: dtype is {kind(every)}, {expected}")
    if every.is_meta:
        raise TypeError(f"{argument}: is on the meta device, which holds no values; {expected}")
    return every.to(device="cpu", dtype=torch.int64, copy=True)


def chat_spans(
    messages: Sequence[Mapping[str, Any]], tokenizer: Any, options: Mapping[str, Any]
) -> tuple[tuple[str, ...], list[list[Span]], Any, str]:
    """Return a name and the characters of each message in the rendered chat, the offsets of its tokens, and its text.

    Raises:
        TypeError, ValueError: see ``Segments.from_chat``.
    """
    expected = "expected a list of mappings with role and content"
    if not isinstance(cast("object", messages), Sequence) or isinstance(messages, str) or not messages:
        raise TypeError(f"messages: got {kind(messages)}, {expected}")
    if other := [each for each in cast("Sequence[object]", messages) if not isinstance(each, Mapping)]:
        raise TypeError(f"messages: got {kind(other[0])} in the list, {expected}")
    for method in ("apply_chat_template", "__call__"):
        if not hasattr(tokenizer, method):
            raise TypeError(f"tokenizer: got {kind(tokenizer)}, expected one with apply_chat_template")
    text: Any = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    try:
        encoded: Any = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
    except (NotImplementedError, KeyError) as error:
        raise ValueError(
            f"tokenizer: {kind(tokenizer)} has no offsets; expected a fast one (AutoTokenizer, use_fast=True)"
        ) from error
    roles = [str(message.get("role", "message")) for message in messages]
    texts = [_texts(message, number) for number, message in enumerate(messages)]
    spans = _content_spans(texts, roles, text, _template_pieces(messages, tokenizer, options))
    many, before = Counter(roles), Counter[str]()
    names: list[str] = []
    for role in roles:
        before[role] += 1
        names.append(role if many[role] == 1 else f"{role} {before[role]}")
    return tuple(names), spans, offsets, text


def _template_pieces(messages: Sequence[Mapping[str, Any]], tokenizer: Any, options: Mapping[str, Any]) -> list[str]:
    """Return what the template writes before, between and after the texts; [] if it refuses or moves other texts."""
    marked: list[dict[str, Any]] = []
    count = 0
    for message in messages:
        content: Any = message["content"]
        parts: list[Any] = [content] if isinstance(content, str) else [*content]
        for place, part in enumerate(parts):
            fields = cast("Mapping[str, Any]", part) if isinstance(part, Mapping) else None
            text = content if fields is None else fields.get("text")
            if isinstance(text, str) and text.strip():
                mark, count = text.replace(text.strip(), _MARK.format(count)), count + 1
                parts[place] = mark if fields is None else {**fields, "text": mark}
        marked.append({**message, "content": parts[0] if isinstance(content, str) else parts})
    try:
        rendered: Any = tokenizer.apply_chat_template(marked, tokenize=False, **options)
    except Exception:  # a template raises what it likes
        return []
    pieces = re.split(_MARK.format("([0-9]+)"), rendered)
    in_order = pieces[1::2] == [str(n) for n in range(count)]
    return pieces[::2] if in_order else []


def _content_spans(
    texts: Sequence[Sequence[str]], roles: Sequence[str], text: str, pieces: Sequence[str]
) -> list[list[Span]]:
    """Return the characters of the texts of each message; ``pieces``: what the template writes around all texts.

    Raises:
        ValueError: the text lacks a content, or a content cannot be told from what the template writes.
    """
    contents = [content for each in texts for content in each]
    exact = len(pieces) == len(contents) + 1
    exact = exact and text == pieces[0] + "".join(a + b for a, b in zip(contents, pieces[1:], strict=True))
    spans: list[list[Span]] = []
    end = done = 0
    for number, each in enumerate(texts):
        found: list[Span] = []
        for content in each:
            start = end + len(pieces[done]) if exact else text.find(content, end)
            if start < 0:
                raise ValueError(
                    f"messages: the rendered chat lacks the content of message {number} ({roles[number]}), which the "
                    "template changes or moves; use Segments.from_offsets on the text"
                )
            if not exact and (not pieces or any(content in piece for piece in pieces)) and text.count(content) > 1:
                raise ValueError(
                    f"messages: the rendered chat has the content of message {number} ({roles[number]}) more than "
                    "once, and the template changes with the content; use Segments.from_offsets on the text"
                )
            end, done = start + len(content), done + 1
            found.append((start, end))
        spans.append(found)
    return spans


def with_places(pieces: Mapping[str, Any], text: str, argument: str = "spans") -> dict[str, Any]:
    """Return name -> where its piece of a text is, in characters; what is not a text stays.

    Raises:
        TypeError: not a mapping.
        ValueError: the text lacks a piece, or has it more than once.
    """
    if not isinstance(cast("object", pieces), Mapping):
        raise TypeError(f"{argument}: got {kind(pieces)}, expected a mapping of names to pieces of the text")
    places: dict[str, Any] = {}
    for name, piece in pieces.items():
        places[name] = piece
        if isinstance(piece, str):
            count = count_places(piece, text)
            if count != 1:
                shown = repr(piece[:40])
                found = f"has {shown} {count} times; expected once: pass more of it"
                lacks = f"lacks {shown}; expected a piece of the text as it was tokenised"
                raise ValueError(f"{argument}: {name!r}: the text {found if count else lacks}")
            start = text.index(piece)
            places[name] = [(start, start + len(piece))]
        elif argument == "parts":
            raise TypeError(f"parts: {name!r}: got {kind(piece)}, expected a piece of the text")
    return places


def without(spans: Sequence[Span], holes: Sequence[Span], text: str) -> list[Span]:
    """Return the parts of spans of a text that are outside others; those of white space only if nothing was cut."""
    rest = [*spans]
    for start, stop in holes:
        cut = [pair for a, b in rest for pair in ((a, min(b, start)), (max(a, stop), b))]
        rest = [(a, b) for a, b in cut if a < b and text[a:b].strip()]
    return rest


def _texts(message: Mapping[str, Any], number: int) -> list[str]:
    """Return the texts of a message, without the white space around them, which templates remove."""
    content = message.get("content")
    if isinstance(content, str):
        content = [{"text": content}]
    pieces = cast("list[object]", content) if isinstance(content, (list, tuple)) else []
    every: list[Any] = [cast("Mapping[str, Any]", each).get("text") for each in pieces if isinstance(each, Mapping)]
    texts = [each.strip() for each in every if isinstance(each, str) and each.strip()]
    if not texts:
        raise ValueError(f"messages: message {number} has no text; expected content with at least one character")
    return texts


def image_segments(
    ids: Tensor | Sequence[int],
    image_token: int,
    grid: Span | Sequence[Span] | Tensor,
    parts: Span | Sequence[Span],
    newlines: bool | Sequence[bool],
    names: Collection[str] | None,
) -> tuple[tuple[str, ...], Tensor, tuple[ImageRows, ...]]:
    """Return the names of the regions of all images, the region of each token, and the places of their patches.

    The region is -1 for a newline and -2 for text.

    Raises:
        TypeError, ValueError: see ``Segments.from_image_tokens``.
    """
    tokens = as_wholes("ids", ids, "expected whole numbers [K]")
    if tokens.ndim == 2 and len(tokens) == 1:
        tokens = tokens[0]
    if tokens.ndim != 1:
        raise ValueError(f"ids: got {list(tokens.shape)}, expected [K]: the tokens of one sequence")
    grids = _grids("grid", grid)
    every_regions = _grids("parts", parts)
    if len(every_regions) == 1:
        every_regions *= len(grids)
    if len(every_regions) != len(grids):
        raise ValueError(f"parts: got {len(every_regions)} pairs, expected one, or one for each of {len(grids)} images")
    where = (tokens == whole("image_token", image_token, 0)).nonzero()[:, 0]
    widths = [columns + more for (_, columns), more in zip(grids, _newlines(newlines, len(grids)), strict=True)]
    sizes = [rows * width for (rows, _), width in zip(grids, widths, strict=True)]
    if sum(sizes) != len(where):
        shown = " + ".join(f"{rows} x {width}" for (rows, _), width in zip(grids, widths, strict=True)) or "none"
        raise ValueError(
            f"grid: {shown} = {sum(sizes):,} tokens, the sequence has {len(where):,} with id {image_token}; expected "
            "rows and columns after the model has merged patches, one grid for each image; newlines=, if rows end in "
            "one more image token"
        )
    labels = _image_names(names, len(grids))
    _check_runs(where, grids, labels, widths)
    every: list[str] = []
    pieces: list[Tensor] = []
    for label, (rows, columns), width, regions in zip(labels, grids, widths, every_regions, strict=True):
        if rows < regions[0] or columns < regions[1]:
            raise ValueError(f"parts: got {regions}, expected at most {rows} x {columns}, the grid of {label!r}")
        down = torch.arange(rows, device="cpu") * regions[0] // rows
        across = torch.arange(columns, device="cpu") * regions[1] // columns
        region = down[:, None] * regions[1] + across + len(every)  # [rows, columns]
        pieces.append(torch.nn.functional.pad(region, (0, width - columns), value=-1).flatten())
        if regions == (1, 1):
            every.append(label)
        else:
            every += [f"{label} [{y}, {x}]" for y in range(regions[0]) for x in range(regions[1])]
    places = torch.full((len(tokens),), -2, device="cpu")
    if pieces:
        places[where] = torch.cat(pieces)
    images: list[ImageRows] = []
    begin = 0
    for label, (rows, columns), width in zip(labels, grids, widths, strict=True):
        images.append((label, columns, tuple(where[begin : begin + rows * width : width].tolist())))
        begin += rows * width
    return tuple(every), places, tuple(images)


def _newlines(newlines: bool | Sequence[bool], count: int) -> list[bool]:
    """Return whether the rows of each image end in one more token."""
    each = [newlines] * count if isinstance(newlines, bool) else newlines
    if isinstance(each, str) or not isinstance(cast("object", each), Sequence):
        raise TypeError(f"newlines: got {kind(newlines)}, expected True or False, or a list with one for each image")
    for one in each:
        check_type("newlines", one, bool, "True or False for each image")
    if len(each) != count:
        raise ValueError(f"newlines: got {len(each)}, expected True or False, or one for each of {count} images")
    return list(each)


def _check_runs(where: Tensor, grids: Sequence[Span], labels: Sequence[str], widths: Sequence[int]) -> None:
    """Check that each image lies in one run of image tokens, or has a run for each of its rows.

    Args:
        where: the places of the image tokens, in order.
        grids, labels: rows and columns of each image, and its name.
        widths: the number of tokens of a row of each.

    Raises:
        ValueError: another token interrupts an image elsewhere.
    """
    begin = 0
    for label, (rows, columns), width in zip(labels, grids, widths, strict=True):
        places = where[begin : begin + rows * width]
        begin += rows * width
        ends = (places.diff() > 1).nonzero()[:, 0] + 1  # tokens of the image before an interruption
        if len(ends) and ends.tolist() != [width * row for row in range(1, rows)]:
            raise ValueError(
                f"grid: {label!r} is {rows} x {columns}, but other tokens interrupt its image tokens after "
                f"{int(ends[0])} of {rows * width}; expected the grids in the order of the images"
            )


def _image_names(names: Collection[str] | None, count: int) -> list[str]:
    if names is None:
        return ["image"] if count == 1 else [f"image {n}" for n in range(count)]
    if isinstance(names, (str, Set)) or not isinstance(cast("object", names), Collection):  # sets: any order
        raise TypeError(f"names: got {kind(names)}, expected a list with one for each of {count} images")
    if len(names) != count:
        raise ValueError(f"names: got {len(names)}, expected one for each of {count} images")
    return list(names)


def _grids(argument: str, value: Any) -> list[Span]:
    """Return one pair, or several, as a list."""
    value = value.tolist() if isinstance(value, Tensor) else value
    if not isinstance(value, Sequence):
        return [_grid(argument, value)]
    pairs = cast("Sequence[object]", value)
    single = len(pairs) == 2 and as_whole(pairs[0]) is not None
    return [_grid(argument, each) for each in ([value] if single else pairs)]


def _grid(argument: str, value: Any) -> Span:
    value = value.tolist() if isinstance(value, Tensor) else value
    sizes = [as_whole(each) for each in cast("Sequence[object]", value)] if isinstance(value, Sequence) else []
    if len(sizes) != 2 or sizes[0] is None or sizes[1] is None or min(sizes[0], sizes[1]) < 1:
        three = "; of [frames, rows, columns] drop the frames: grid[:, 1:]" if len(sizes) == 3 else ""
        raise ValueError(f"{argument}: got {value!r}, expected (rows, columns), whole numbers from 1{three}")
    return sizes[0], sizes[1]

"""The segments of a text on the command line: ``--segment``, ``--segments`` and ``--chat`` of ``headscope watch``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from headscope._support.text import count_places, visible
from headscope.cli._shared.mistakes import Mistake

if TYPE_CHECKING:
    from headscope.cli._shared.model_loading import Loaded
    from headscope.stats import Segments

MARK = "..."  # after a text: from there on, up to the next segment
LARGEST = 1 << 26  # characters of a file of segments or messages
SHOWN = 40  # characters of a text in a message

Span = tuple[int, int]
Place = Span | str
"""Characters of the input, or a text in it."""


@dataclass(frozen=True)
class SegmentOptions:
    """Where the named segments are, as the options describe it.

    Attributes:
        places: name -> the places of the segment.
        option: the option to name in messages.
        chat: the path of the messages of a chat, or None.
        regions: rows and columns of the regions of an image, or None.
    """

    places: Mapping[str, tuple[Place, ...]]
    option: str
    chat: str | None
    regions: tuple[int, int] | None = None


@dataclass(frozen=True)
class Chat:
    """A chat as the model reads it.

    Attributes:
        ids: the token ids.
        segments: of the messages, or those of --segment.
    """

    ids: list[int]
    segments: Segments


def read_segment_options(entries: Sequence[str], path: str | None, chat: str | None) -> SegmentOptions:
    """Return the segments that the options describe.

    Raises:
        Mistake: an entry has another form, or a file cannot be read.
    """
    places: dict[str, list[Place]] = {}
    for entry in entries:
        name, sign, where = entry.partition("=")
        if not sign or not name.strip() or not where:
            raise Mistake(
                f"--segment: got {_quote(entry)}, expected NAME=START:STOP in characters, NAME=TEXT, or NAME=TEXT... "
                "from a text up to the next segment"
            )
        places.setdefault(name.strip(), []).append(_parse_place(where))
    regions = None if path is None else _parse_regions(path)
    for name, where in ({} if path is None or regions is not None else _read_file(path)).items():
        places.setdefault(name, []).extend(where)
    option = "--segments" if path is not None and not entries else "--segment"
    return SegmentOptions({name: tuple(each) for name, each in places.items()}, option, chat, regions)


def _parse_regions(value: str) -> tuple[int, int] | None:
    """Return the rows and columns in ROWSxCOLUMNS; None for the path of a file."""
    if not re.fullmatch(r"[1-9][0-9]{0,3}x[1-9][0-9]{0,3}", value):
        return None
    rows, _, columns = value.partition("x")
    return int(rows), int(columns)


def _parse_place(where: str) -> Place:
    if re.fullmatch(r"[0-9]{1,12}:[0-9]{1,12}", where):
        start, _, stop = where.partition(":")
        return int(start), int(stop)
    return where


def _read_file(path: str) -> dict[str, list[Place]]:
    """Return name -> places of a JSON file.

    Raises:
        Mistake: it cannot be read, or has another form.
    """
    content = _read_json("--segments", path)
    expected = 'expected {"name": [start, stop] | "text" | [several of these], ...}'
    if not isinstance(content, dict) or not content:
        raise Mistake(f"--segments: {visible(path)}: {expected}")
    places: dict[str, list[Place]] = {}
    for name, value in cast("dict[str, Any]", content).items():
        each = value if isinstance(value, list) and not _is_span(value) else [value]
        if not each or not all(_is_span(one) or (isinstance(one, str) and one) for one in each):
            raise Mistake(f"--segments: {visible(path)}: {_quote(name)}: {expected}")
        places[name] = [one if isinstance(one, str) else (one[0], one[1]) for one in each]
    return places


def _is_span(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(n) is int and n >= 0 for n in value)


def _read_json(option: str, path: str) -> Any:
    if not path:
        raise Mistake(f"{option}: expected a path, got an empty one")
    try:
        with open(path, encoding="utf-8-sig") as file:
            text = file.read(LARGEST + 1)
        if len(text) > LARGEST:
            raise Mistake(f"{option}: {visible(path)}: expected at most {LARGEST:,} characters, got more")
        return json.loads(text, object_pairs_hook=_distinct)
    except OSError as error:
        raise Mistake(f"{option}: {visible(path)}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:  # JSON, UTF-8, or a zero byte in the path
        raise Mistake(f"{option}: {visible(path)}: is not JSON: {error}") from error


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON; of equal names, Python's reader would take the last without a word.

    Raises:
        ValueError: a name is there twice.
    """
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"{_quote(name)} is there twice; expected each name once, with all that belongs to it")
        entries[name] = value
    return entries


# ---------------------------------------------------------------- in a text


def locate_segments(options: SegmentOptions, loaded: Loaded, text: str, ids: Sequence[int]) -> Segments:
    """Return the segments of a text, by the offsets of its tokens.

    Raises:
        Mistake: a text is not there or not unique, spans overlap or are empty, or the tokenizer has no offsets.
    """
    offsets = _find_offsets(options, loaded, text)
    if len(offsets) != len(ids):
        raise Mistake(
            f"{options.option}: the tokenizer of {loaded.name} has offsets for {len(offsets):,} tokens, expected "
            f"{len(ids):,}; use --ids, with places in tokens"
        )
    return _locate(options, text, offsets)


def locate_tokens(options: SegmentOptions, count: int) -> Segments:
    """Return the segments of token ids; their places are in tokens.

    Raises:
        Mistake: a place is a text, or spans overlap, are empty, or beyond the tokens.
    """
    from headscope.stats import Segments

    for name, places in options.places.items():
        if text := next((place for place in places if isinstance(place, str)), None):
            raise Mistake(
                f"{options.option}: {_quote(name)}: with --ids, expected START:STOP in tokens, got {_quote(text)}"
            )
    try:
        return Segments.from_spans(cast("Mapping[str, Sequence[Span]]", options.places), count)
    except (TypeError, ValueError) as error:
        raise _as_mistake(options, error) from error


def read_chat(options: SegmentOptions, loaded: Loaded) -> Chat:
    """Return the ids of a chat by the model's chat template, and the segments of its messages.

    Raises:
        Mistake: the file has no messages, or the tokenizer has no chat template or no offsets, or changes a message.
    """
    from headscope.stats import Segments

    path = visible(options.chat or "")
    messages = _read_messages(options.chat or "")
    tokenizer: Any = loaded.tokenizer
    if not getattr(tokenizer, "chat_template", None):
        raise Mistake(
            f"--chat: {loaded.name} has no chat template; use --file with the text as the model reads it, and --segment"
        )
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False)
        ids: list[int] = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    except Exception as error:  # a template raises what it likes
        raise Mistake(f"--chat: {path}: the chat template fails: {type(error).__name__}: {error}") from error
    if options.places:
        return Chat(ids, locate_segments(options, loaded, text, ids))
    try:
        return Chat(ids, Segments.from_chat(messages, tokenizer))
    except (TypeError, ValueError) as error:
        problem = str(error).replace("use Segments.from_offsets on the text", "name the segments with --segment")
        raise Mistake(f"--chat: {path}: {problem}") from error


def _read_messages(path: str) -> list[dict[str, Any]]:
    content = _read_json("--chat", path)
    messages = content.get("messages") if isinstance(content, dict) else content
    if (
        not isinstance(messages, list)
        or not messages
        or not all(isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages)
    ):
        raise Mistake(
            f'--chat: {visible(path)}: expected [{{"role": ..., "content": ...}}, ...], or "messages" with it'
        )
    return messages


def _find_offsets(options: SegmentOptions, loaded: Loaded, text: str) -> list[Span]:
    """Return the characters of each token of a text.

    Raises:
        Mistake: the tokenizer has no offsets.
    """
    tokenizer: Any = loaded.tokenizer
    if hasattr(tokenizer, "offsets"):  # the shipped one
        return tokenizer.offsets(text)
    try:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [(int(start), int(stop)) for start, stop in encoded["offset_mapping"]]
    except Exception as error:  # NotImplementedError of slow ones, and what tokenizers of other code raise
        raise Mistake(
            f"{options.option}: the tokenizer of {loaded.name} has no offsets of characters; use --ids, with places in "
            "tokens"
        ) from error


def _locate(options: SegmentOptions, text: str, offsets: Sequence[Span]) -> Segments:
    from headscope.stats import Segments

    located = {
        name: [_find_place(options, name, place, text) for place in places] for name, places in options.places.items()
    }
    starts = sorted(start for spans in located.values() for start, _ in spans)
    spans = {
        name: [(start, _find_next(starts, start, len(text)) if stop is None else stop) for start, stop in each]
        for name, each in located.items()
    }
    for name, each in spans.items():
        if beyond := next(((start, stop) for start, stop in each if stop > len(text)), None):
            place = f"{beyond[0]}:{beyond[1]}"
            raise Mistake(
                f"{options.option}: {_quote(name)}: got {place}, expected at most {len(text):,}, the characters of the "
                "input"
            )
    last = max((stop for _, stop in offsets), default=0)  # characters after it are in no token
    spans = {name: [(start, min(stop, last)) for start, stop in each] for name, each in spans.items()}
    try:
        return Segments.from_offsets(spans, offsets)
    except (TypeError, ValueError) as error:
        raise _as_mistake(options, error) from error


def _find_place(options: SegmentOptions, name: str, place: Place, text: str) -> tuple[int, int | None]:
    """Return the characters of a place; without the end, where the next segment ends it.

    Raises:
        Mistake: its text is not there, or several times.
    """
    if not isinstance(place, str):
        return place
    is_open = place.endswith(MARK) and len(place) > len(MARK)
    phrase = place.removesuffix(MARK) if is_open else place
    count = count_places(phrase, text)
    if count != 1:
        problem = "is not in the input" if not count else f"is {count:,} times in the input"
        remedy = "copy it from the input" if not count else "use a longer text, or START:STOP in characters"
        raise Mistake(f"{options.option}: {_quote(name)}: the text {_quote(phrase)} {problem}; {remedy}")
    start = text.index(phrase)
    return start, None if is_open else start + len(phrase)


def _find_next(starts: Sequence[int], start: int, end: int) -> int:
    return next((each for each in starts if each > start), end)


def _as_mistake(options: SegmentOptions, error: Exception) -> Mistake:
    return Mistake(f"{options.option}: {str(error).removeprefix('spans: ').removeprefix('names: ')}")


def _quote(text: str) -> str:
    shown = visible(text)
    return f"'{shown}'" if len(shown) <= SHOWN else f"'{shown[: SHOWN - 1]}…'"

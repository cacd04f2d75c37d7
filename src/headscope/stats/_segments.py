"""Named segments of a sequence."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from headscope._support.arguments import as_whole, check_type, kind, whole
from headscope.stats._segment_sources import ImageRows, as_wholes, chat_spans, image_segments, with_places, without

__all__ = ["Segments"]

MOST_SEGMENTS = 64

Span = tuple[int, int]
Spans = Mapping[str, Span | Sequence[Span]]
"""Name -> start and stop, half-open; or several of them."""


class Segments:
    """Named segments of the tokens of a sequence: the system prompt, a document, an image, a speaker.

    With ``Observe(segments=...)``, ``HeadStats.segments`` has the weight that flows from segment to segment. The ids
    are copied, so later writes to the caller's tensors have no effect.

    Args:
        names: of the segments, up to 64 different ones.
        ids: the segment of each key, [K] or [B, K], from 0; -1 = none.
        query_ids: the segment of each query, [Q] or [B, Q]. Cross-attention requires it. In self-attention a query has
            the segment of the key at its position by default.

    Raises:
        TypeError: names or ids of another kind.
        ValueError: no names, more than 64, one of them twice or empty; an id without a name; or ids of another shape.

    Examples:
        >>> import torch
        >>> from headscope import Observe, Segments, observe
        >>> segments = Segments(["question", "answer"], [0, 0, 0, 1])
        >>> q = torch.zeros(1, 2, 4, 8)  # equal logits: even rows
        >>> observe(q, q, what=Observe(segments=segments)).segments["answer", "question"]
        tensor([0.7500, 0.7500], dtype=torch.float64)
    """

    def __init__(
        self, names: Collection[str], ids: Tensor | Sequence[Any], query_ids: Tensor | Sequence[Any] | None = None
    ) -> None:
        self._names = _checked_names(names)
        self._ids = _checked_ids("ids", ids, self._names)
        self._images: tuple[ImageRows, ...] = ()
        self._query_ids = None if query_ids is None else _checked_ids("query_ids", query_ids, self._names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the segments; segment n has the n-th."""
        return self._names

    @property
    def ids(self) -> Tensor:
        """A copy of the segment of each key, int64 [K] or [B, K]; -1 = none."""
        return self._ids.clone()

    @property
    def query_ids(self) -> Tensor | None:
        """A copy of the segment of each query, int64 [Q] or [B, Q]; None = that of the key at its position."""
        return None if self._query_ids is None else self._query_ids.clone()

    @property
    def images(self) -> tuple[ImageRows, ...]:
        """Of each image of ``from_image_tokens`` its name, columns of patches, and the first token of each row."""
        return self._images

    def __repr__(self) -> str:
        counts = ", ".join(f"{name}: {int((self._ids == n).sum()):,}" for n, name in enumerate(self._names))
        return f"Segments({counts}; {self._ids.numel():,} keys)"

    # ------------------------------------------------------------ constructors

    @staticmethod
    def from_spans(spans: Spans, length: int) -> Segments:
        """Return segments from spans of token positions.

        Args:
            spans: name -> (start, stop), half-open; or a list of these.
            length: the number of tokens, K.

        Raises:
            TypeError: a span of another kind.
            ValueError: a span that is empty, beyond the tokens, or overlaps another.

        Examples:
            >>> from headscope import Segments
            >>> Segments.from_spans({"system": (0, 2), "user": (2, 5)}, 6).ids
            tensor([ 0,  0,  1,  1,  1, -1])
        """
        length = whole("length", length, 0)
        ids = torch.full((length,), -1, device="cpu")
        listed = _checked_spans(spans, length, "tokens")
        for n, pieces in enumerate(listed.values()):
            for start, stop in pieces:
                ids[start:stop] = n
        return Segments(tuple(listed), ids)

    @staticmethod
    def from_documents(cu_seqlens: Tensor | Sequence[int], names: Collection[str] | None = None) -> Segments:
        """Return a segment for each document of a packed sequence.

        Args:
            cu_seqlens: the first token of each document, then the number of tokens: whole numbers [N + 1] from 0.
            names: of the documents; by default "document 0", "document 1", …

        Raises:
            TypeError: not whole numbers.
            ValueError: more than 64 documents, numbers that do not ascend from 0, or another number of names.

        Examples:
            >>> from headscope import Segments
            >>> Segments.from_documents([0, 2, 5]).ids
            tensor([0, 0, 1, 1, 1])
        """
        starts = as_wholes("cu_seqlens", cu_seqlens, "expected whole numbers [N + 1]")
        borders = [int(n) for n in starts.flatten()]
        if starts.ndim != 1 or len(borders) < 2 or borders[0] != 0 or any(a >= b for a, b in pairwise(borders)):
            raise ValueError(
                f"cu_seqlens: got {_few(borders)}, expected numbers [N + 1] that ascend from 0: the first token of "
                "each document, then the number of tokens"
            )
        count = len(borders) - 1
        named = tuple(f"document {n}" for n in range(count)) if names is None else _checked_names(names)
        if len(named) != count:
            raise ValueError(f"names: got {len(named)}, expected one for each of {count} documents")
        lengths = torch.tensor([b - a for a, b in pairwise(borders)], device="cpu")
        return Segments(named, torch.arange(count, device="cpu").repeat_interleave(lengths))

    @staticmethod
    def from_token_types(token_type_ids: Tensor | Sequence[Any], names: Collection[str]) -> Segments:
        """Return segments from the token types of a model such as BERT.

        Args:
            token_type_ids: the type of each token, [K] or [B, K].
            names: of the types 0, 1, …

        Raises:
            TypeError, ValueError: as ``Segments``.

        Examples:
            >>> from headscope import Segments
            >>> Segments.from_token_types([[0, 0, 1]], ["question", "passage"])
            Segments(question: 2, passage: 1; 3 keys)
        """
        return Segments(names, token_type_ids)

    @staticmethod
    def from_offsets(spans: Mapping[str, Any], offsets: Tensor | Sequence[Any], text: str | None = None) -> Segments:
        """Return segments from spans of characters, by the offsets of a tokenizer.

        A token belongs to the segment with most of its characters, of several the first; a token without characters,
        such as ``[CLS]``, to none.

        Args:
            spans: name -> (start, stop) in characters, half-open; or a list of these. With ``text``, a piece of it that
                occurs once will do.
            offsets: the characters of each token, [K, 2]: ``offset_mapping`` of transformers, ``Encoding.offsets`` of
                tokenizers. The spans and the offsets must be of one text: of a chat, the text that the template makes,
                not the content of a message.
            text: the whole text that was tokenised.

        Raises:
            TypeError: offsets or spans of another kind.
            ValueError: a span that is empty, overlaps another, or has no token; a piece that the text lacks, or has
                more than once; or offsets beyond the text. Other offsets of another text are not noticed.

        Examples:
            >>> from headscope import Segments
            >>> offsets = [(0, 0), (0, 3), (3, 9), (10, 13)]  # [CLS] Who wrote it?
            >>> Segments.from_offsets({"who": (0, 3), "rest": (4, 13)}, offsets).ids
            tensor([-1,  0,  1,  1])
            >>> Segments.from_offsets({"who": "Who", "what": "wrote it"}, offsets, "Who wrote it?").ids
            tensor([-1,  0,  1,  1])
        """
        places = as_wholes("offsets", offsets, "expected whole numbers [K, 2]")
        if places.ndim == 3 and len(places) == 1:
            places = places[0]
        if places.ndim != 2 or places.shape[-1] != 2:
            raise ValueError(f"offsets: got {list(places.shape)}, expected [K, 2]: the first character and the end")
        begins, ends = places.unbind(-1)
        if bool((begins > ends).any()) or bool((begins < 0).any()):
            at = int(((begins > ends) | (begins < 0)).nonzero()[0])
            raise ValueError(f"offsets: token {at} has {places[at].tolist()}, expected 0 <= start <= stop")
        length = int(ends.max()) if len(ends) else 0
        if text is not None:
            check_type("text", text, str, "the text that was tokenised")
            if length > len(text):
                raise ValueError(
                    f"offsets: end at character {length:,}, the text has {len(text):,}; expected those of this text"
                )
            spans = with_places(spans, text)
        listed = _checked_spans(spans, length, "characters of the offsets")
        shares = torch.zeros(len(listed), len(ends), dtype=torch.long, device="cpu")
        for n, pieces in enumerate(listed.values()):
            for start, stop in pieces:
                shares[n] += (ends.clamp(max=stop) - begins.clamp(min=start)).clamp(min=0)
        most, ids = shares.max(0)
        ids = torch.where(most > 0, ids, -1)
        for n, name in enumerate(listed):
            if not bool((ids == n).any()):
                raise ValueError(
                    f"spans: no token belongs to {name!r}, characters {_few(listed[name])}; expected offsets of the "
                    "same text, and spans that are not shorter than half a token"
                )
        return Segments(tuple(listed), ids)

    @staticmethod
    def from_chat(
        messages: Sequence[Mapping[str, Any]], tokenizer: Any, names: Collection[str] | None = None, *,
        parts: Mapping[str, str] | None = None, **options: Any,
    ) -> Segments:  # fmt: skip
        """Return a segment for the content of each message of a chat; the tokens of the template belong to none.

        Args:
            messages: with ``role`` and ``content``, as ``tokenizer.apply_chat_template`` takes them. Of a content in
                several parts, those with ``text`` count.
            tokenizer: of transformers, with a chat template and offsets (a fast one).
            names: of the messages; by default their roles, numbered where a role occurs again: "user 1", "user 2".
            parts: name -> a piece of a message, such as a document, that occurs once in the chat and gets a segment of
                its own, after those of the messages. The rest of the message, if any, stays in its segment.
            options: further arguments of ``apply_chat_template``, such as ``add_generation_prompt=True``.

        Raises:
            TypeError, ValueError: messages of another kind; a message without text; another number of names; a part
                that the chat lacks, or has more than once; a tokenizer without offsets; or a template that changes the
                content of a message, or depends on it so that its place is ambiguous.

        Examples:
            >>> from headscope import Segments
            >>> class Tokenizer:  # as of transformers; each character is a token
            ...     def apply_chat_template(self, messages, tokenize):
            ...         return "".join(f"<{each['role']}>{each['content']}" for each in messages)
            ...     def __call__(self, text, add_special_tokens, return_offsets_mapping):
            ...         return {"offset_mapping": [(n, n + 1) for n in range(len(text))]}
            >>> Segments.from_chat([{"role": "user", "content": "Hi"}], Tokenizer())
            Segments(user: 2; 8 keys)
            >>> Segments.from_chat([{"role": "user", "content": "A: why?"}], Tokenizer(), parts={"question": "why?"})
            Segments(user: 3, question: 4; 13 keys)
        """
        roles, spans, offsets, text = chat_spans(messages, tokenizer, options)
        named = _checked_names(roles if names is None else names)
        if len(named) != len(spans):
            raise ValueError(f"names: got {len(named)}, expected one for each of {len(spans)} messages")
        pieces = {} if parts is None else with_places(parts, text, "parts")
        if twice := [name for name in pieces if name in named]:
            raise ValueError(f"parts: {twice[0]!r} is the name of a message, too; expected different names")
        inside = [each for texts in spans for each in texts]
        for name, [(start, stop)] in pieces.items():
            if not any(first <= start and stop <= last for first, last in inside):
                raise ValueError(
                    f"parts: {name!r}: {text[start:stop][:40]!r} is in no message, or in two; expected a piece of one: "
                    "tokens of the template belong to no segment"
                )
        taken = [piece for each in pieces.values() for piece in each]
        rest = {name: without(each, taken, text) for name, each in zip(named, spans, strict=True)}
        return Segments.from_offsets({**{name: each for name, each in rest.items() if each}, **pieces}, offsets)

    @staticmethod
    def from_image_tokens(
        ids: Tensor | Sequence[int], image_token: int, grid: Span | Sequence[Span] | Tensor, *,
        parts: Span | Sequence[Span] = (1, 1), newlines: bool | Sequence[bool] = False,
        names: Collection[str] | None = None, text: str | None = "text",
    ) -> Segments:  # fmt: skip
        """Return segments of the images in the prompt of a vision-language model, by the id of their tokens.

        Args:
            ids: token ids of one sequence, [K] or [1, K], in which each image is as many tokens as it has patches.
            image_token: the id of these tokens.
            grid: rows and columns of patches of the image; or a list with one for each image, tile or thumbnail, in
                their order.
            parts: into how many rows and columns of regions each image is divided, each of them a segment; or a list
                with one pair for each image.
            newlines: whether each row of patches ends in one more image token, which belongs to no segment; or a list
                with one for each image.
            names: of the images; by default "image", or "image 0", "image 1", … A region is "image 0 [row, column]".
            text: the name of a segment with all other tokens; None = they belong to none.

        Raises:
            TypeError: ids of another kind.
            ValueError: the grids do not multiply to the image tokens, are smaller than ``parts``, other tokens
                interrupt an image within a row, or there are more than 64 segments.

        Examples:
            >>> from headscope import Segments
            >>> Segments.from_image_tokens([5, 9, 9, 9, 9, 6], 9, (2, 2), parts=(2, 1))
            Segments(image [0, 0]: 2, image [1, 0]: 2, text: 2; 6 keys)
        """
        labels, places, images = image_segments(ids, image_token, grid, parts, newlines, names)
        if text is not None:
            places = torch.where(places == -2, len(labels), places)
            labels = (*labels, text)
        made = Segments(labels, places.clamp(min=-1))
        made._images = images
        return made


def _checked_names(names: Collection[str]) -> tuple[str, ...]:
    expected = f"expected 1 to {MOST_SEGMENTS} different names"
    if isinstance(names, (str, Tensor, Set)) or not isinstance(cast("object", names), Collection):  # sets: any order
        raise TypeError(f"names: got {kind(names)}, {expected} in a list")
    every = tuple(names)
    for name in every:
        if not isinstance(cast("object", name), str):
            raise TypeError(f"names: got {kind(name)}, expected a str for each segment")
        if not name:
            raise ValueError(f"names: got an empty name, {expected}")
    if not 1 <= len(every) <= MOST_SEGMENTS:
        raise ValueError(f"names: got {len(every)}, {expected}")
    if len({*every}) < len(every):
        raise ValueError(f"names: got {', '.join(every)}, {expected}")
    # "a/b" and "c", "a" and "b/c"; "a" and "b/without_first", the pair of "a" and "b" without the first key
    pairs = {f"{a}/{b}{end}" for a in every for b in every for end in ("", "/without_first")}
    if len(pairs) < 2 * len(every) ** 2:
        differ = "whose pairs differ, too, also from 'query/key/without_first'"
        raise ValueError(f"names: got {', '.join(every)}, {expected}, {differ}")
    return every


def _checked_ids(argument: str, ids: Tensor | Sequence[Any], names: tuple[str, ...]) -> Tensor:
    """Return a copy of ids, int64 [n] or [B, n] on the CPU."""
    letter = "Q" if argument == "query_ids" else "K"
    expected = f"expected whole numbers [{letter}] or [B, {letter}]"
    every = as_wholes(argument, ids, expected)
    if every.ndim not in (1, 2):
        raise ValueError(f"{argument}: got {list(every.shape)}, {expected}")
    wrong = (every < -1) | (every >= len(names))
    if bool(wrong.any()):
        raise ValueError(
            f"{argument}: got {int(every[wrong][0])}, expected -1 (none) or the number of one of {len(names)} names, "
            f"0 to {len(names) - 1}"
        )
    return every


def _checked_spans(spans: Spans, length: int, of: str) -> dict[str, list[Span]]:
    """Return name -> its spans, all within ``length`` and disjoint."""
    if not isinstance(cast("object", spans), Mapping):
        raise TypeError(f"spans: got {kind(spans)}, expected a mapping of names to (start, stop)")
    names = _checked_names(tuple(spans))
    listed: dict[str, list[Span]] = {}
    ordered: list[tuple[int, int, str]] = []
    for name in names:
        pieces = _pieces(name, spans[name])
        for start, stop in pieces:
            if start >= stop:
                raise ValueError(f"spans: {name!r} has ({start}, {stop}), which is empty; expected start < stop")
            if start < 0 or stop > length:
                raise ValueError(f"spans: {name!r} has ({start}, {stop}), expected 0 to {length:,}, the {of}")
            ordered.append((start, stop, name))
        listed[name] = pieces
    ordered.sort()
    for (start, stop, name), (again, end, other) in pairwise(ordered):
        if again < stop:
            raise ValueError(
                f"spans: {name!r} ({start}, {stop}) and {other!r} ({again}, {end}) overlap; expected disjoint spans"
            )
    return listed


def _pieces(name: str, value: object) -> list[Span]:
    """Return the spans of one name."""
    expected = f"spans: {name!r}: expected (start, stop) in whole numbers, or a list of these; got {value!r}"
    if isinstance(value, range) and value.step == 1:
        return [(value.start, value.stop)]
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise TypeError(expected)
    every = cast("Sequence[object]", value)
    if not every:
        raise ValueError(f"spans: {name!r} has none; expected (start, stop), or a list of these")
    single = len(every) == 2 and as_whole(every[0]) is not None
    pieces: list[Span] = []
    for piece in [every] if single else every:
        ends = [as_whole(end) for end in cast("Sequence[object]", piece)] if isinstance(piece, Sequence) else []
        if len(ends) != 2 or ends[0] is None or ends[1] is None:
            raise TypeError(expected)
        pieces.append((ends[0], ends[1]))
    return pieces


def _few(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values[:6])) + (", …" if len(values) > 6 else "")


Segments.__module__ = "headscope.stats"  # its public path

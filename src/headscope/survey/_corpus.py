"""The corpus of a survey: its sources, its documents, and the borders of its shards, which depend on it alone."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, cast

from headscope._support.text import visible

BYTES_A_TOKEN = 4
"""The size of a shard is measured in bytes, so that its borders are found without a tokenizer."""

LONGEST = 1 << 26
"""The most bytes of a document in a file of JSON lines; a longer one is listed as too long."""

LINES = (".jsonl", ".ndjson")
IDS = ("input_ids", "ids")

Kind = Literal["text", "lines", "items"]


class SurveyError(ValueError):
    """A survey cannot be made, continued or joined; the message is one line with the reason and the remedy.

    Examples:
        >>> from headscope.survey import SurveyError, survey
        >>> try:
        ...     survey("text", "no such folder", "out")
        ... except SurveyError as error:
        ...     print(error)
        data: no such folder: no such file or folder
    """


@dataclass(frozen=True)
class Source:
    """A file, or a sequence of documents.

    Attributes:
        name: as the result shows it: relative to the folder that was passed.
        kind: a text file; JSON lines; or the items of a sequence.
        size: bytes of a file, items of a sequence.
        changed: when a file was last changed, in nanoseconds; 0 for a sequence.
    """

    name: str
    kind: Kind
    size: int
    changed: int


class Span(NamedTuple):
    """A part of a source in one shard.

    Attributes:
        source: its number.
        start, stop: bytes of a file, items of a sequence.
        first: the number of its first line or item, or of the part of a text file, from 1; 0: the whole text file.
        digest: of its content.
    """

    source: int
    start: int
    stop: int
    first: int
    digest: str


class Document(NamedTuple):
    """A document: its text or its token ids; or what is wrong with it."""

    name: str
    text: str | None = None
    ids: list[int] | None = None
    problem: str | None = None


class Corpus(Protocol):
    """Sources, and how to read them."""

    @property
    def sources(self) -> list[Source]: ...
    def spans(self, source: int, most: int) -> Iterator[tuple[Span, int]]:
        """Yield the spans of a source, each with its size in bytes of text."""
        ...

    def read(self, span: Span) -> Iterator[Document]:
        """Yield the documents of a span.

        Raises:
            SurveyError: its content has changed.
        """
        ...


def open_corpus(data: Any, include: Sequence[str], field: str) -> Corpus:
    """Return the corpus of the argument ``data``.

    Raises:
        SurveyError: a path does not exist, or there are no documents.
        TypeError: it is of another kind.
    """
    if isinstance(data, (str, os.PathLike)):
        return Files.below([Path(cast("str", data))], include, field)
    if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")) or isinstance(data, (Mapping, bytes)):
        raise TypeError(f"data: got {type(data).__name__}, expected a path, paths, or a sequence of documents")
    items = cast("Sequence[Any]", data)
    if len(items) == 0:
        raise SurveyError("data: is empty, expected at least one document")
    first = items[0]
    if isinstance(first, os.PathLike):
        return Files.below([Path(each) for each in items], include, field)
    if isinstance(first, str) and len(first) < 4096 and "\0" not in first and os.path.exists(first):
        raise SurveyError(f"data: {visible(first)}: is the name of a file; pass files as pathlib.Path")
    return Items(items, field)


# ---------------------------------------------------------------- files


class Files:
    """Text files and files of JSON lines."""

    def __init__(self, paths: list[Path], names: list[str], field: str) -> None:
        self._paths, self._field = paths, field
        self.sources = [_source(path, name) for path, name in zip(paths, names, strict=True)]

    @staticmethod
    def below(roots: Sequence[Path], include: Sequence[str], field: str) -> Files:
        """Return the files at these paths, and in these folders, in the order of their names.

        Raises:
            SurveyError: a path does not exist, or no file matches.
        """
        paths: list[Path] = []
        names: list[str] = []
        for root in roots:
            shown = visible(str(root))
            if os.path.isdir(root):  # False where Path.is_dir raises: a name can be too long
                if (root / "dataset_info.json").exists() and (root / "state.json").exists():
                    raise SurveyError(
                        f"data: {shown}: is a dataset of Arrow files; load it in Python: "
                        "headscope.survey.survey(model, datasets.load_from_disk(...), out)"
                    )
                found = sorted(_files_in(root, include))
                before = f"{root.resolve().name}/" if len(roots) > 1 else ""
                paths += [root / name for name in found]
                names += [before + name for name in found]
            elif os.path.isfile(root):
                paths.append(root)
                names.append(root.name)
            else:
                raise SurveyError(
                    f"data: {shown}: {'not a regular file' if os.path.exists(root) else 'no such file or folder'}"
                )
        if not paths:
            raise SurveyError(f"data: {visible(str(roots[0]))}: has no files that match {' or '.join(include)}")
        return Files(paths, names, field)

    def spans(self, source: int, most: int) -> Iterator[tuple[Span, int]]:
        """Yield the spans of a file.

        Raises:
            OSError: it cannot be read.
        """
        split = _split_lines if self.sources[source].kind == "lines" else _split_text
        for start, stop, first, digest in split(self._paths[source], most):
            yield Span(source, start, stop, first, digest), stop - start

    def read(self, span: Span) -> Iterator[Document]:
        """Yield the documents of a span.

        Raises:
            SurveyError: its content has changed, or it cannot be read any more.
        """
        source = self.sources[span.source]
        try:
            with self._paths[span.source].open("rb") as file:
                file.seek(span.start)
                if source.kind == "lines":
                    yield from self._read_lines(file, span, source.name)
                    return
                content = file.read(span.stop - span.start)
        except OSError as error:
            raise SurveyError(f"data: {visible(source.name)}: cannot be read: {error.strerror}") from error
        _check(_digest(content), span, source.name)
        name = source.name if span.first == 0 else f"{source.name} (part {span.first})"
        yield _decoded(name, content)

    def _read_lines(self, file: Any, span: Span, name: str) -> Iterator[Document]:
        digest = hashlib.sha256()
        number, at = span.first, span.start
        while at < span.stop:
            line, length = _read_line(file, digest)
            at += length
            if length == 0:
                break
            yield _parsed(f"{name}:{number}", line, self._field)
            number += 1
        _check(digest.hexdigest()[:32], span, name)


def _source(path: Path, name: str) -> Source:
    kind: Kind = "lines" if path.suffix.lower() in LINES else "text"
    try:
        stat = path.stat()
    except OSError as error:
        raise SurveyError(f"data: {visible(name)}: cannot be read: {error.strerror}") from error
    return Source(name, kind, stat.st_size, stat.st_mtime_ns)


def _files_in(root: Path, include: Sequence[str]) -> Iterator[str]:
    """Yield the regular files of a folder by their relative names; hidden ones are not included."""
    for folder, folders, files in os.walk(root):
        folders[:] = [each for each in folders if not each.startswith(".")]
        for name in files:
            path = Path(folder, name)
            relative = path.relative_to(root).as_posix()
            matches = any(fnmatch(name, pattern) or fnmatch(relative, pattern) for pattern in include)
            if matches and not name.startswith(".") and path.is_file():
                yield relative


def _split_text(path: Path, most: int) -> Iterator[tuple[int, int, int, str]]:
    """Yield start, stop, number and digest of the parts of a text file: at most ``most`` bytes, cut at line ends."""
    most = max(most, 8)  # room for a character of four bytes before the last one
    with path.open("rb") as file:
        start, number, rest = 0, 1, b""
        while True:
            block = rest + file.read(most - len(rest))
            more = file.peek(1)
            if not more:
                yield start, start + len(block), 0 if number == 1 else number, _digest(block)
                return
            cut = _cut(block)
            yield start, start + cut, number, _digest(block[:cut])
            start, number, rest = start + cut, number + 1, block[cut:]


def _cut(block: bytes) -> int:
    """Return where to cut a block: after its last line end, else before its last character."""
    if cut := block.rfind(b"\n") + 1:
        return cut
    cut = len(block) - 1
    while cut > 1 and block[cut] & 0xC0 == 0x80:  # within a character of UTF-8
        cut -= 1
    return max(cut, 1)


def _split_lines(path: Path, most: int) -> Iterator[tuple[int, int, int, str]]:
    """Yield start, stop, number of the first line and digest of runs of lines of about ``most`` bytes."""
    with path.open("rb") as file:
        start = at = 0
        first = number = 1
        digest = hashlib.sha256()
        while True:
            _, length = _read_line(file, digest)
            at, number = at + length, number + 1
            if (length == 0 and at > start) or at - start >= most:
                yield start, at, first, digest.hexdigest()[:32]
                start, first, digest = at, number, hashlib.sha256()
            if length == 0:
                return


def _read_line(file: Any, digest: Any) -> tuple[bytes | None, int]:
    """Return the next line, None if it is too long, and its length; add it to a digest."""
    line = file.readline(LONGEST)
    digest.update(line)
    length = len(line)
    if length < LONGEST or line.endswith(b"\n"):
        return line, length
    while chunk := file.readline(LONGEST):
        digest.update(chunk)
        length += len(chunk)
        if chunk.endswith(b"\n"):
            break
    return None, length


def _decoded(name: str, content: bytes) -> Document:
    try:
        return Document(name, content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        return Document(name, problem=f"byte {error.start} (0x{content[error.start]:02x}) is not UTF-8")


def _parsed(name: str, line: bytes | None, field: str) -> Document:
    if line is None:
        return Document(name, problem=f"is too long, expected at most {LONGEST:,} bytes")
    decoded = _decoded(name, line)
    if decoded.text is None:
        return decoded
    if not decoded.text.strip():
        return Document(name, problem="is empty")
    try:
        value = json.loads(decoded.text)
    except ValueError as error:
        return Document(name, problem=f"is not JSON: {getattr(error, 'msg', 'a number is too long')}")
    except RecursionError:
        return Document(name, problem="is not JSON that can be read: it is nested too deeply")
    return as_document(name, value, field)


# ---------------------------------------------------------------- sequences


class Items:
    """The items of a sequence: texts, token ids, or dictionaries that hold either, as those of ``datasets``."""

    def __init__(self, items: Sequence[Any], field: str) -> None:
        self._items, self._field = items, field
        self.sources = [Source("items", "items", len(items), 0)]

    def spans(self, source: int, most: int) -> Iterator[tuple[Span, int]]:
        """Yield the spans of the sequence."""
        start, size = 0, 0
        digest = hashlib.sha256()
        for number in range(len(self._items)):
            size += self._update(digest, number)
            if size >= most or number + 1 == len(self._items):
                yield Span(source, start, number + 1, start, digest.hexdigest()[:32]), size
                start, size, digest = number + 1, 0, hashlib.sha256()

    def read(self, span: Span) -> Iterator[Document]:
        """Yield the documents of a span.

        Raises:
            SurveyError: its content has changed.
        """
        digest = hashlib.sha256()
        for number in range(span.start, span.stop):
            self._update(digest, number)
            yield as_document(f"item {number}", self._items[number], self._field)
        _check(digest.hexdigest()[:32], span, "items")

    def _update(self, digest: Any, number: int) -> int:
        """Add an item to a digest; return its bytes of text."""
        document = as_document("", self._items[number], self._field)
        if document.text is not None:
            content = b"t" + document.text.encode("utf-8", "surrogatepass")
        elif document.ids is not None:
            content = b"i" + json.dumps(document.ids).encode()
        else:
            content = b"p" + (document.problem or "").encode()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
        return BYTES_A_TOKEN * len(document.ids) if document.ids is not None else len(content) - 1


def as_document(name: str, value: Any, field: str) -> Document:
    """Return the document that an item or a JSON value holds."""
    if isinstance(value, Mapping):
        entries = cast("Mapping[str, Any]", value)
        key = next((each for each in (field, *IDS) if each in entries), None)
        if key is None:
            there = ", ".join(visible(str(each)) for each in list(entries)[:8]) or "nothing"
            return Document(name, problem=f"has no {visible(field)}; it has {there}")
        value = entries[key]
    if hasattr(value, "tolist"):  # a tensor or an array
        value = value.tolist()
    if isinstance(value, str):
        if len(value) > LONGEST:
            return Document(name, problem=f"is too long, expected at most {LONGEST:,} characters")
        return Document(name, value)
    if isinstance(value, (list, tuple)):
        ids = cast("Sequence[Any]", value)
        if all(type(each) is int for each in ids):
            return Document(name, ids=list(ids))
    return Document(name, problem=f"is {type(value).__name__}, expected a text or a list of token ids")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _check(digest: str, span: Span, name: str) -> None:
    if digest != span.digest:
        raise SurveyError(f"data: {visible(name)}: has changed since the survey was started; use another folder as out")

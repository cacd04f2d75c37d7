"""The line of the traced code that an operation comes from."""

from __future__ import annotations

import itertools
import linecache
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

import headscope

FOREIGN = (str(Path(torch.__file__).parent), str(Path(headscope.__file__).parent))
LIBRARIES = str(Path(torch.__file__).parent.parent)  # where packages are installed
ENTRY = str(Path(__file__).parent / "trace.py")
MOST_LINES = 4  # of one expression
MOST_FRAMES = 60


class Line(NamedTuple):
    """A line of code; ``text`` may have several if one expression has."""

    file: str
    number: int
    text: str

    @property
    def place(self) -> str:
        """The name of the file and the number of the line."""
        name = "cell" if self.file.startswith("<") or "ipykernel" in self.file else Path(self.file).name
        return f"{name}:{self.number}"


class Place(NamedTuple):
    """The place of an operation: its line, None if it is torch's own, and the number of the call in that code."""

    line: Line | None
    call: int


class Places:
    """The places of the operations of one forward pass.

    Args:
        own: the files of the traced code.
    """

    def __init__(self, own: frozenset[str]) -> None:
        self._own = own
        self._lines: dict[tuple[CodeType, int], Line] = {}
        self._files: set[str] = set()
        self._last: tuple[FrameType | None, int] = (None, 0)  # held, so that no other frame has its address
        self._calls = 0

    def current(self) -> Place:
        """Return the place that runs: of the innermost frame in ``own``, or else outside of torch and headscope."""
        frame = self._find_frame()
        last = (frame, 0 if frame is None else frame.f_lasti)
        if last != self._last:
            self._last, self._calls = last, self._calls + 1
        return Place(None if frame is None else self._line_of(frame), self._calls)

    def close(self) -> None:
        """Let go of the frame that ran last, whose callers hold the tape."""
        self._last = (None, 0)

    def _find_frame(self) -> FrameType | None:
        frame: FrameType | None = sys._getframe(2)
        first: FrameType | None = None
        for _ in range(MOST_FRAMES):
            if frame is None:
                break
            file = frame.f_code.co_filename
            if file == ENTRY:  # what is beyond is the code that calls trace
                break
            if file in self._own:
                return frame
            if first is None and not file.startswith(FOREIGN):
                first = frame
            frame = frame.f_back
        return first

    def _line_of(self, frame: FrameType) -> Line:
        key = frame.f_code, frame.f_lasti
        line = self._lines.get(key)
        if line is None:
            file = frame.f_code.co_filename
            if file not in self._files:
                self._files.add(file)
                linecache.checkcache(file)  # it may have been edited since the last trace
            line = self._lines[key] = _read_line(file, *_span(*key), frame.f_globals)
        return line


def _span(code: CodeType, at: int) -> tuple[int, int]:
    """Return the first and the last line of the expression at an instruction."""
    start, end, _, _ = next(itertools.islice(code.co_positions(), at // 2, None), (None,) * 4)
    start = start or code.co_firstlineno
    return start, end or start


def _read_line(file: str, start: int, end: int, names: dict[str, Any]) -> Line:
    """Return lines of a file; ``names``: the globals of its code, whose loader may have the text."""
    lines = [linecache.getline(file, n, names).rstrip() for n in range(start, min(end, start + MOST_LINES - 1) + 1)]
    if not lines or not lines[0].strip():
        return Line(file, start, "")
    lines += ["    …"] if end - start >= MOST_LINES else []
    indent = len(lines[0]) - len(lines[0].lstrip())
    return Line(file, start, "\n".join(line[min(indent, len(line) - len(line.lstrip())) :] for line in lines))

"""The line of the traced code that an operation comes from."""

from __future__ import annotations

import functools
import linecache
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

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
    """The operation of a frame that runs: two operations of one call have the same place."""

    line: Line | None
    call: tuple[int, int, int]


def current_place(own: frozenset[str]) -> Place:
    """Return the place that runs: of the innermost frame in ``own``, or else outside of torch and headscope."""
    frame: FrameType | None = sys._getframe(1)
    first: FrameType | None = None
    for _ in range(MOST_FRAMES):
        if frame is None:
            break
        file = frame.f_code.co_filename
        if file == ENTRY:  # what is beyond is the code that calls trace
            break
        if file in own:
            return _place_of(frame)
        if first is None and not file.startswith(FOREIGN):
            first = frame
        frame = frame.f_back
    return Place(None, (0, 0, 0)) if first is None else _place_of(first)


def _place_of(frame: FrameType) -> Place:
    start, end = _span(frame.f_code, frame.f_lasti)
    line = _line(frame.f_code.co_filename, start, end, _Globals(frame.f_globals))
    caller = -1 if frame.f_back is None else frame.f_back.f_lasti  # two calls of a function may have one address
    return Place(line, (id(frame), frame.f_lasti, caller))


class _Globals(dict[str, object]):
    """The globals of a frame, all of which count as equal: the name of the file decides."""

    def __hash__(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return 0

    def __eq__(self, other: object) -> bool:
        return True


@functools.lru_cache(maxsize=4096)
def _span(code: CodeType, at: int) -> tuple[int, int]:
    """Return the first and the last line of the expression at an instruction."""
    for index, (start, end, _, _) in enumerate(code.co_positions()):
        if index == at // 2:
            return start or code.co_firstlineno, end or start or code.co_firstlineno
    return code.co_firstlineno, code.co_firstlineno


@functools.lru_cache(maxsize=4096)
def _line(file: str, start: int, end: int, names: _Globals) -> Line | None:
    lines = [linecache.getline(file, n, names).rstrip() for n in range(start, min(end, start + MOST_LINES - 1) + 1)]
    if not lines or not lines[0].strip():
        return Line(file, start, "")
    lines += ["    …"] if end - start >= MOST_LINES else []
    indent = len(lines[0]) - len(lines[0].lstrip())
    return Line(file, start, "\n".join(line[min(indent, len(line) - len(line.lstrip())) :] for line in lines))

"""The progress of a survey on stderr: a line for people, or JSON lines; only of the first rank under torchrun."""

from __future__ import annotations

import json
import os
import sys
import time
from types import TracebackType
from typing import Protocol, Self

EVERY = 10.0  # seconds between two lines, if stderr is not a terminal
OFTEN = 0.2  # on a terminal


def is_first_rank() -> bool:
    """Return whether this process is the only one, or the first that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


class _Progress(Protocol):
    @property
    def event(self) -> str: ...
    @property
    def done(self) -> int: ...
    @property
    def shards(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def overhead(self) -> float | None: ...
    @property
    def compared(self) -> int: ...


class SurveyProgress:
    """Writes how far a survey is; called with each ``headscope.survey.Progress``.

    Args:
        as_json: write JSON lines.

    Attributes:
        overhead: the last one that was reported.
        compared: the number of forward passes that it stands on.
    """

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._last = -1e9
        self._terminal = not as_json and bool(sys.stderr) and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self.overhead: float | None = None
        self.compared = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal:
            self._write("\r\x1b[K")

    def __call__(self, progress: _Progress) -> None:
        self.overhead, self.compared = progress.overhead, progress.compared
        if not is_first_rank():
            return
        now = time.monotonic()
        is_due = now - self._last >= (OFTEN if self._terminal else EVERY)
        if not (is_due or progress.event in ("start", "end") or (self._as_json and progress.event == "shard")):
            return
        self._last = now
        rate = progress.tokens / progress.seconds if progress.seconds > 0 else 0.0
        if self._as_json:
            entry = {
                "event": progress.event, "done": progress.done, "shards": progress.shards, "tokens": progress.tokens,
                "seconds": round(progress.seconds, 3), "tokens_per_second": round(rate, 1),
            }  # fmt: skip
            self._write(json.dumps(entry) + "\n")
            return
        text = (
            f"survey: {progress.done:,} of {progress.shards:,} shards, {progress.tokens:,} tokens by this process, "
            f"{rate:,.0f} a second"
        )
        self._write(f"\r\x1b[K{text}" if self._terminal else f"{text}\n")

    @staticmethod
    def _write(text: str) -> None:
        if sys.stderr:
            sys.stderr.write(text)
            sys.stderr.flush()

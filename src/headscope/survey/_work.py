"""One shard: its documents are encoded, cut into windows, run, and reduced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from headscope.stats import HeadStats
from headscope.survey._corpus import Corpus, Document, Span, SurveyError
from headscope.survey._document_scores import DocumentSums, overlaps_of, pattern_names
from headscope.survey._documents import DocumentTable, add_lengths, rows_of, values_of
from headscope.survey._identity import BATCH_TOKENS, Settings
from headscope.survey._subject import Subject
from headscope.watching import Recording, watch

MERGED_AT_ONCE = 8  # forward passes; merging several costs little more than merging two
MOST_IDS = 1 << 31  # of a model whose vocabulary is unknown
LENGTH_QUANTITIES = ("chance", "entropy", "normalized_entropy")
COMPARED = 8  # forward passes that are repeated without observing, to measure the overhead


@dataclass
class Overhead:
    """The time of some forward passes without and with observing, in seconds; no part of the result."""

    passes: int = -1  # the first one is a warm-up
    bare: float = 0.0
    observed: float = 0.0

    @property
    def share(self) -> float | None:
        """The time that observing adds, as a share of the bare passes; None if it was not measured."""
        return self.observed / self.bare - 1 if self.bare > 0 else None


@dataclass(frozen=True)
class Shard:
    """The result of a shard: None in place of a recording if it has no tokens."""

    recording: Recording | None
    table: DocumentTable


class Worker:
    """Computes shards with a model.

    Args:
        subject: the model.
        corpus: the documents.
        settings: the options.
        alive: called between forward passes.

    Attributes:
        overhead: of this process.
        tokens: the number of tokens so far.
    """

    def __init__(self, subject: Subject, corpus: Corpus, settings: Settings, alive: Callable[[int], None]) -> None:
        self._subject, self._corpus, self._settings, self._alive = subject, corpus, settings, alive
        self.overhead = Overhead()
        self.tokens = 0

    def overhead_so_far(self) -> tuple[float | None, int]:
        """Return the share that observing adds, and the number of forward passes that it stands on."""
        return self.overhead.share, max(0, self.overhead.passes)

    def compute(self, spans: Sequence[Span]) -> Shard:
        """Return the result of a shard, which depends on its documents, the model and the options alone.

        Raises:
            SurveyError: a document has changed, or the model has different layers in different passes.
            WatchError: the model cannot be watched.
        """
        state = _State()
        windows = self._windows(spans, state)
        for _, group in groupby(windows, key=lambda window: len(window.ids)):
            batch: list[_Window] = []
            for window in group:
                batch.append(window)
                if (len(batch) + 1) * len(window.ids) > BATCH_TOKENS:
                    self._run(batch, state)
                    batch = []
            if batch:
                self._run(batch, state)
        state.finish_document()
        table = state.table if state.table is not None else DocumentTable.empty((), {})
        for name, problem in state.problems:
            table.leave_out(name, problem)
        table.tokens, table.windows = state.tokens, state.windows
        table.drop_titles()
        return Shard(state.recording(), table)

    def _windows(self, spans: Sequence[Span], state: _State) -> Iterator[_Window]:
        for span in spans:
            for document in self._corpus.read(span):
                ids, problem = self._encode(document)
                if problem is not None:
                    state.problems.append((document.name, problem))
                    continue
                for window in cut(ids, self._settings.context, self._subject.ends):
                    yield _Window(document, window)
                state.tokens += len(ids)

    def _encode(self, document: Document) -> tuple[list[int], str | None]:
        """Return the token ids of a document, or what is wrong with it."""
        ids, most = document.ids or [], self._subject.vocabulary or MOST_IDS
        if document.problem is not None:
            return [], document.problem
        if document.text is not None:
            if self._subject.encode is None:
                raise SurveyError(f"tokenizer: is required for texts such as {document.name}; or pass token ids")
            try:
                ids = list(self._subject.encode(document.text))
            except Exception as error:  # tokenizers raise errors of many types
                return [], f"cannot be encoded: {type(error).__name__}: {error}"
        if not ids:
            return [], "is empty: it has no tokens"
        if min(ids) < 0 or max(ids) >= most:
            wrong = next(each for each in ids if not 0 <= each < most)
            return [], f"has token id {wrong}, expected 0 to {most - 1}"
        return ids, None

    def _run(self, batch: list[_Window], state: _State) -> None:
        """Run and observe a batch of windows of one length."""
        subject = self._subject
        ids = torch.tensor([window.ids for window in batch], device="cpu")
        moved = ids.to(subject.device)
        paired = {"tokens": "inputs"} if subject.paired else {}
        what = replace(self._settings.what, keep_rows=True, **({} if subject.paired else {"tokens": ids}))
        before = time.perf_counter()
        watching = watch(subject.model, what=what, **paired)  # pyright: ignore[reportArgumentType]
        with torch.inference_mode(), watching as recording:
            subject.run(moved)
        state.add(batch, recording)
        self._measure(moved, time.perf_counter() - before)
        self.tokens += ids.numel()
        self._alive(self.tokens)

    def _measure(self, ids: Tensor, observed: float) -> None:
        overhead = self.overhead
        if overhead.passes >= COMPARED:
            return
        overhead.passes += 1
        if overhead.passes == 0:
            return
        before = time.perf_counter()
        with torch.inference_mode():
            self._subject.run(ids)
        overhead.bare += time.perf_counter() - before
        overhead.observed += observed


def cut(ids: Sequence[int], context: int, ends: tuple[list[int], list[int]]) -> Iterator[list[int]]:
    """Yield the fewest windows of token ids that fit the context, each with its ends.

    Their lengths differ by at most one, the longer ones first, so that most have the same length.
    """
    before, after = ends
    count = -(-len(ids) // (context - len(before) - len(after)))
    short, longer = divmod(len(ids), count)
    start = 0
    for number in range(count):
        stop = start + short + (number < longer)
        yield [*before, *ids[start:stop], *after]
        start = stop


@dataclass(frozen=True)
class _Window:
    document: Document
    ids: list[int]


class _State:
    """What a shard collects."""

    def __init__(self) -> None:
        self.table: DocumentTable | None = None
        self.problems: list[tuple[str, str]] = []
        self.tokens = self.windows = 0
        self._first: Recording | None = None
        self._waiting: list[HeadStats] = []
        self._forwards = 0
        self._open: Document | None = None  # the document whose sums these are
        self._sums: DocumentSums | None = None

    def add(self, batch: Sequence[_Window], recording: Recording) -> None:
        """Add the windows of a forward pass."""
        stats = recording.stats
        if self.table is None:
            self._first = recording
            self.table = DocumentTable.empty(pattern_names(stats), {name: p.heads for name, p in stats.parts.items()})
        table = self.table
        if (heads := {name: part.heads for name, part in stats.parts.items()}) != table.heads:
            raise SurveyError(
                f"model: the recorded layers differ between forward passes; expected {', '.join(table.heads)}, got "
                f"{', '.join(heads)}"
            )
        sums = DocumentSums.of(*rows_of(stats, len(batch), partial(overlaps_of, names=table.names)))
        for number, window in enumerate(batch):
            if window.document is not self._open:  # two may have the same name
                self.finish_document()
                self._open, self._sums = window.document, None
            self._sums = sums.at(number) if self._sums is None else self._sums + sums.at(number)
        add_lengths(table, rows_of(stats, len(batch), partial(values_of, names=LENGTH_QUANTITIES)))
        self.windows += len(batch)
        self._forwards += 1
        parts = {name: replace(part, kept=()) for name, part in stats.to("cpu").parts.items()}
        self._waiting.append(HeadStats(parts, stats.origin))
        if len(self._waiting) > MERGED_AT_ONCE:
            self._waiting = [HeadStats.merge(*self._waiting)]

    def finish_document(self) -> None:
        """Add the document that was read last to the table."""
        if self._open is not None and self._sums is not None and self.table is not None:
            self.table.add_document(self._open.name, self._sums)
            self._open = None

    def recording(self) -> Recording | None:
        """Return the recording of all forward passes; None without any."""
        if self._first is None:
            return None
        about = self._first.about
        options: dict[str, Any] = {**about.options, "tokens": None, "keep_rows": False}
        about = replace(about, options=options, forwards=self._forwards, ran=self._forwards)
        return Recording(HeadStats.merge(*self._waiting), about)

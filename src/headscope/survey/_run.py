"""``survey``: statistics of every head over a corpus, by any number of processes that share a folder."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headscope.stats import Observe
from headscope.survey._corpus import SurveyError, open_corpus
from headscope.survey._folder import Folder, claimed
from headscope.survey._identity import check_settings, enter, identity_of, read_identity
from headscope.survey._merge import merge_shards, save_result, save_shard
from headscope.survey._page import save_page
from headscope.survey._plan import WAIT, Plan, find_plan
from headscope.survey._subject import as_subject
from headscope.survey._work import Worker
from headscope.watching import Recording


@dataclass(frozen=True)
class Progress:
    """How far a survey is.

    Attributes:
        event: "start", "batch" after a forward pass, "shard" after a shard, "wait" for other processes, "merge", "end".
        done, shards: the complete shards, by all processes, and their number in all.
        tokens: those that this process has read so far.
        seconds: since this process joined the survey.
        overhead: the time that observing adds to the bare forward passes, as a share of them; None: not measured yet.
        compared: the forward passes that were run without observing, too, to measure it.

    Examples:
        >>> from headscope.survey import survey
        >>> _ = survey("text", ["a = 1\\n" * 40], "out", progress=lambda progress: print(progress.event, progress.done))
        start 0
        batch 0
        shard 1
        merge 1
        end 1
    """

    event: str
    done: int
    shards: int
    tokens: int
    seconds: float
    overhead: float | None
    compared: int = 0


def survey(
    model: Any,
    data: Any,
    out: str | PathLike[str],
    *,
    shard_tokens: int = 65536,
    what: Observe | None = None,
    resume: bool = True,
    tokenizer: Any = None,
    context: int | None = None,
    rows: int | None = None,
    include: Sequence[str] = ("*",),
    field: str = "text",
    threads: int = 1,
    progress: Callable[[Progress], None] | None = None,
) -> Recording:
    """Record exact statistics of every head of a model over a corpus, alone or together with other processes.

    Every process that calls this function with the same arguments takes part: they claim shards by files in the folder
    ``out``, and any of them may end, be killed or join later. The result is the same to the bit, because a shard is
    computed by one process, its borders depend on the corpus alone, and shards are merged in order. A survey that was
    interrupted continues when it is called again. Memory does not depend on the size of the corpus.

    ``out`` then holds ``seen.safetensors``, which ``Recording.load`` reads; ``documents.safetensors``; and
    ``survey.html``, the page.

    Args:
        model: a module that is called with token ids [B, T]; a ``TextExample``, or "text" for the shipped one.
        data: a file, a folder, or a list of ``Path``. Files whose names end in ``.jsonl`` or ``.ndjson`` hold a
            document in each line, others are a text each. Or a sequence of documents, as of ``datasets``: each is a
            text, a list of token ids, or a dictionary with either in ``field`` or "input_ids".
        out: a new or empty folder, or that of the same survey.
        shard_tokens: the size of a shard, from 1, at 4 bytes of text for each token.
        what: the statistics, as for ``watch``; by default row quantities, windows, a map of 32 bins and 8 edges.
            Options whose result grows with the corpus are refused: tensors, ``keep_rows``, ``keep_qk``, ``top``,
            ``weights``.
        resume: whether to join a survey that the folder holds; False: raise.
        tokenizer: of transformers or tokenizers; needed for texts.
        context: the most tokens of a window; longer documents are read in windows, whose statistics are merged. By
            default what the model allows, up to 2048.
        rows: observe only an even sample of this many rows of each window; short for ``Observe(rows=...)`` in ``what``.
        include: patterns of the files in a folder that are read, such as ``("*.py",)``.
        field: the name of a document's text.
        threads: of this process; part of what has to be equal, because sums depend on it.
        progress: called as the survey advances.

    Returns:
        The recording of the whole corpus, the same in every process.

    Raises:
        TypeError: an argument is of another kind.
        SurveyError: the folder holds a survey of another model, other data, other options or another version; there are
            no documents; or the data changed during the survey. Documents that cannot be read are listed, not raised.
        OSError: a file cannot be written; nothing is half written.
        WatchError: the model cannot be watched.

    Examples:
        >>> from headscope.survey import survey
        >>> recording = survey("text", ["def f(x):\\n    return x\\n" * 20, "a = 1\\n" * 40], "out", shard_tokens=100)
        >>> recording.heads, recording.about.options["survey"]["documents"]
        (8, 2)
    """
    subject = as_subject(model, tokenizer)
    settings = check_settings(subject, context, shard_tokens, what, rows, field, threads)
    corpus = open_corpus(data, include, field)
    folder = Folder(Path(out))
    with _threads(settings.threads):
        identity = identity_of(subject, settings)
        enter(folder, identity, resume=resume)
        folder.remove_abandoned()
        plan = find_plan(folder, corpus, settings.shard_tokens)
        reporter = _Reporter(folder, plan, progress)
        worker = Worker(subject, corpus, settings, reporter.batch)
        reporter.worker = worker
        if not folder.seen.exists():
            reporter.report("start")
            with _evaluating(subject.model):
                _compute_all(folder, plan, worker, reporter)
            _merge(folder, plan, identity, reporter)
    reporter.report("end")
    return Recording.load(folder.seen)


def survey_digest(out: str | PathLike[str]) -> dict[str, str]:
    """Return the SHA-256 of the result files of a survey: equal for equal surveys.

    Raises:
        SurveyError: it is not complete.

    Examples:
        >>> from headscope.survey import survey, survey_digest
        >>> _ = survey("text", ["a = 1\\n" * 40], "out")
        >>> [*survey_digest("out")]
        ['seen.safetensors', 'documents.safetensors']
    """
    import hashlib

    folder = Folder(Path(out))
    read_identity(folder)
    if not folder.seen.exists():
        raise SurveyError(f"{folder.path}: the survey is not complete; run it again to continue it")
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (folder.seen, folder.documents)}


class _Reporter:
    """Passes on how far a survey is."""

    def __init__(self, folder: Folder, plan: Plan, progress: Callable[[Progress], None] | None) -> None:
        self._folder, self._shards, self._progress = folder, len(plan.shards), progress
        self._begin = time.monotonic()
        self._done = 0
        self.worker: Worker | None = None
        self.renew: Callable[[], None] = lambda: None

    def report(self, event: str) -> None:
        """Count the complete shards, and report."""
        if self._progress is not None:
            self._done = self._folder.count_complete()
        self._call(event)

    def batch(self, tokens: int) -> None:
        """Report a forward pass, and renew the claim."""
        self.renew()
        self._call("batch")

    def _call(self, event: str) -> None:
        if self._progress is None:
            return
        tokens = 0 if self.worker is None else self.worker.tokens
        overhead, compared = (None, 0) if self.worker is None else self.worker.overhead_so_far()
        seconds = time.monotonic() - self._begin
        self._progress(Progress(event, self._done, self._shards, tokens, seconds, overhead, compared))


def _compute_all(folder: Folder, plan: Plan, worker: Worker, reporter: _Reporter) -> None:
    """Compute shards until all are complete, by this process or by others."""
    missing = [*range(len(plan.shards))]
    while missing := [number for number in missing if not folder.has(number)]:
        has_computed = False
        for number in missing:
            if folder.has(number):
                continue
            with claimed(folder.shards / f"{number:06d}.claim") as claim:
                if claim is None or folder.has(number):
                    continue
                reporter.renew = claim.renew
                save_shard(folder, number, worker.compute(plan.shards[number]))
            has_computed = True
            reporter.report("shard")
        if not has_computed:
            reporter.report("wait")
            time.sleep(WAIT)


def _merge(folder: Folder, plan: Plan, identity: dict[str, Any], reporter: _Reporter) -> None:
    """Merge the shards, or wait for the process that does."""
    while not folder.seen.exists():
        with claimed(folder.path / "merge.claim") as claim:
            if claim is None:
                time.sleep(WAIT)
            elif not folder.seen.exists():
                reporter.report("merge")
                result = merge_shards(folder, plan, identity, claim.renew)
                save_page(folder.page, result, force=True)
                save_result(folder, result)


@contextmanager
def _evaluating(model: nn.Module) -> Generator[None]:
    """Put every module in eval mode, and then in its own mode again: some may be frozen in eval mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def _threads(count: int) -> Generator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

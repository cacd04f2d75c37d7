"""The plan of a survey: its corpus, and which documents each shard holds. One process writes it, all read it."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from headscope._support.text import visible
from headscope.survey._corpus import BYTES_A_TOKEN, Corpus, Document, Source, Span, SurveyError
from headscope.survey._folder import Folder, claimed, write_json

WAIT = 0.1  # seconds between two looks for the work of other processes


@dataclass(frozen=True)
class Plan:
    """The borders of the shards.

    Attributes:
        corpus: digest of the names and contents of all documents.
        shards: of each shard, its spans.
        unreadable: the files that could not be read.
    """

    corpus: str
    shards: list[list[Span]]
    unreadable: list[Document]


def find_plan(folder: Folder, corpus: Corpus, shard_tokens: int) -> Plan:
    """Return the plan of a folder; without one, write it, or wait for the process that writes it.

    Raises:
        SurveyError: it is of another corpus.
        OSError: it cannot be written.
    """
    while not folder.plan.exists():
        with claimed(folder.path / "shards.claim") as claim:
            if claim is None:
                time.sleep(WAIT)
            elif not folder.plan.exists():
                write_json(folder.plan, _make(corpus, shard_tokens * BYTES_A_TOKEN, claim.renew))
                break  # this process has just read the corpus
    else:
        stored: dict[str, Any] = json.loads(folder.plan.read_bytes())
        _check_same(stored, corpus, folder.path)
    stored = json.loads(folder.plan.read_bytes())
    shards = [[Span(*span) for span in shard] for shard in stored["shards"]]
    return Plan(stored["corpus"], shards, [Document(name, problem=why) for name, why in stored["unreadable"]])


def _make(corpus: Corpus, most: int, renew: Callable[[], None]) -> dict[str, Any]:
    """Return the plan of a corpus, as JSON: a shard ends once it has ``most`` bytes."""
    shards: list[list[Span]] = [[]]
    size = 0
    unreadable: list[tuple[str, str]] = []
    digest = hashlib.sha256()
    for number, source in enumerate(corpus.sources):
        try:
            spans = [*corpus.spans(number, most)]
        except OSError as error:
            unreadable.append((source.name, f"cannot be read: {error.strerror}"))
            continue
        renew()
        for span, length in spans:
            digest.update(json.dumps([source.name, *span[1:]]).encode())
            shards[-1].append(span)
            size += length
            if size >= most:
                shards.append([])
                size = 0
    shards = [shard for shard in shards if shard]
    if not shards:
        raise SurveyError("data: no document can be read")
    return {
        "corpus": digest.hexdigest(),
        "sources": [astuple(source) for source in corpus.sources],
        "shards": shards,
        "unreadable": unreadable,
    }


def _check_same(stored: dict[str, Any], corpus: Corpus, folder: Path) -> None:
    """Check that a plan is of this corpus. Files that were changed later are read again.

    Raises:
        SurveyError: it is not.
    """
    before = [Source(*each) for each in stored["sources"]]
    remedy = "use the same data, or another folder as out"
    where = f"out: {visible(str(folder))}: holds a survey of other data"
    if len(before) != len(corpus.sources):
        raise SurveyError(f"{where}; expected {len(before)} files, got {len(corpus.sources)}; {remedy}")
    spans: dict[int, list[Span]] = {}
    unreadable = {name for name, _ in stored["unreadable"]}
    for number, (old, new) in enumerate(zip(before, corpus.sources, strict=True)):
        if (old.name, old.kind) != (new.name, new.kind):
            raise SurveyError(f"{where}; expected {visible(old.name)}, got {visible(new.name)}; {remedy}")
        if old.size != new.size:
            unit = "items" if new.kind == "items" else "bytes"
            raise SurveyError(f"{where}; {visible(new.name)}: expected {old.size:,} {unit}, got {new.size:,}; {remedy}")
        if (old.changed != new.changed or new.kind == "items") and old.name not in unreadable:
            spans = spans or _spans_of_sources(stored["shards"])
            for span in spans.get(number, []):
                for _ in corpus.read(span):
                    pass


def _spans_of_sources(shards: list[list[list[Any]]]) -> dict[int, list[Span]]:
    spans: dict[int, list[Span]] = {}
    for shard in shards:
        for span in shard:
            spans.setdefault(span[0], []).append(Span(*span))
    return spans

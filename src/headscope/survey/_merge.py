"""The result of a survey: its shards, merged in the order of their numbers."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headscope._support.files import replace_file
from headscope._support.text import visible
from headscope.decisions import patterns
from headscope.stats import HeadStats
from headscope.survey._corpus import SurveyError
from headscope.survey._documents import DocumentTable, load_documents, save_documents
from headscope.survey._folder import Folder
from headscope.survey._identity import read_identity
from headscope.survey._plan import Plan
from headscope.survey._work import Shard
from headscope.watching import Recording

Spread = dict[str, dict[str, list[list[float] | None]]]
"""Layer -> pattern -> for each head the smallest and the largest score of a shard; None without a score."""


@dataclass(frozen=True)
class Surveyed:
    """The result of a survey.

    Attributes:
        recording: the statistics of all documents.
        table: what each head does in each document.
        spread: the scores of shards.
    """

    recording: Recording
    table: DocumentTable
    spread: Spread


def save_shard(folder: Folder, number: int, shard: Shard) -> None:
    """Write the result of a shard: its statistics, then its documents, whose file makes it complete.

    Raises:
        OSError: it cannot be written.
    """
    path = folder.statistics_of(number)
    checksum = None
    if shard.recording is not None:
        shard.recording.save(path, force=True, exact=True)
        checksum = _checksum(path)
    save_documents(shard.table, folder.documents_of(number), {"statistics": checksum})


def merge_shards(folder: Folder, plan: Plan, identity: Mapping[str, Any], renew: Callable[[], None]) -> Surveyed:
    """Return the merged shards.

    Raises:
        SurveyError: a file of a shard is damaged, and was removed; or there are no tokens.
    """
    stats: HeadStats | None = None
    first: Recording | None = None
    table: DocumentTable | None = None
    spread: Spread = {}
    forwards = 0
    empty = DocumentTable.empty((), {})
    for problem in plan.unreadable:
        empty.leave_out(problem.name, problem.problem or "")
    for number in range(len(plan.shards)):
        recording, documents = _load(folder, number)
        renew()
        if recording is None:  # none of its documents can be read
            (empty if table is None else table).merge(_without_heads(documents, table))
            continue
        forwards += recording.forwards
        _widen(spread, recording.stats)
        if stats is None or table is None:
            first, stats = recording, recording.stats
            table = DocumentTable.empty(documents.names, documents.heads)
            table.left_out, table.listed = empty.left_out, empty.listed
        else:
            stats = stats.merge(recording.stats)
        table.merge(documents)
    if stats is None or table is None or first is None:
        name, problem = empty.listed[0] if empty.listed else ("the corpus", "is empty")
        raise SurveyError(f"data: no document can be read; {name}: {problem}")
    return Surveyed(Recording(stats, _about(first, plan, identity, table, forwards)), table, spread)


def _without_heads(documents: DocumentTable, table: DocumentTable | None) -> DocumentTable:
    """Return a table without documents, in the form of another one, with the same documents left out."""
    other = DocumentTable.empty(*((), {}) if table is None else (table.names, table.heads))
    other.left_out, other.listed = documents.left_out, documents.listed
    return other


def _load(folder: Folder, number: int) -> tuple[Recording | None, DocumentTable]:
    path = folder.statistics_of(number)
    try:
        documents, entry = load_documents(folder.documents_of(number))
        if entry["statistics"] is None:
            return None, documents
        if _checksum(path) != entry["statistics"]:
            raise ValueError(f"{path}: is damaged")
        return Recording.load(path), documents
    except (OSError, ValueError, KeyError) as error:
        folder.documents_of(number).unlink(missing_ok=True)
        raise SurveyError(f"{error}; it was removed, run the survey again to compute this shard again") from error


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _widen(spread: Spread, stats: HeadStats) -> None:
    """Take the pattern scores of a shard into account."""
    for each in patterns(stats).scores:
        heads = spread.setdefault(each.layer, {}).setdefault(each.pattern, [])
        heads += [None] * (each.head + 1 - len(heads))
        least, largest = heads[each.head] or (each.score, each.score)
        heads[each.head] = [min(least, each.score), max(largest, each.score)]


def _about(first: Recording, plan: Plan, identity: Mapping[str, Any], table: DocumentTable, forwards: int) -> Any:
    counts = {"documents": table.documents, "left_out": table.left_out, "shards": len(plan.shards)}
    source = {
        "source": f"a corpus of {table.documents:,} documents", "tokens": table.tokens, "windows": table.windows,
        "digest": plan.corpus[:16],
    }  # fmt: skip
    entry = {**counts, "corpus": plan.corpus, **{name: value for name, value in identity.items() if name != "what"}}
    options = {**first.about.options, "input": source, "survey": entry}
    versions = {name: identity[name] for name in ("headscope", "torch", "transformers") if identity[name]}
    return replace(first.about, options=options, versions=versions, forwards=forwards, ran=forwards)


def save_result(folder: Folder, result: Surveyed) -> None:
    """Write the result: the documents, then the recording, whose file makes the survey complete.

    Raises:
        OSError: it cannot be written.
    """
    replace_file(folder.documents, canonical(result.table.encode({"spread": result.spread})))
    temporary = folder.path / f".headscope-{secrets.token_hex(8)}.tmp"
    try:
        result.recording.save(temporary, exact=True)
        replace_file(folder.seen, canonical(temporary.read_bytes()))
    finally:
        temporary.unlink(missing_ok=True)


def load_result(path: Path) -> Surveyed:
    """Return the result of the survey in a folder.

    Raises:
        SurveyError: it is not the folder of a survey, or the survey is not complete.
        OSError: a file cannot be read.
        ValueError: a file is damaged.
    """
    folder = Folder(path)
    read_identity(folder)
    if not folder.seen.exists():
        raise SurveyError(f"{visible(str(path))}: the survey is not complete; run it again to continue it")
    table, entry = load_documents(folder.documents)
    return Surveyed(Recording.load(folder.seen), table, entry.get("spread", {}))


def canonical(content: bytes) -> bytes:
    """Return a safetensors file with its header in one order: the library writes the metadata in any order."""
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8 : 8 + length]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + content[8 + length :]

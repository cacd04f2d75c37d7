"""What all processes of a survey have in common: model, tokenizer, options and versions; others are refused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import torch

from headscope import __version__
from headscope._attend.backends import native
from headscope._support.arguments import whole
from headscope._support.text import visible
from headscope.stats import Observe
from headscope.survey._corpus import SurveyError
from headscope.survey._folder import Folder, create_whole
from headscope.survey._subject import MOST_CONTEXT, Subject, digest_of_model, digest_of_tokenizer

FORMAT = 1
BATCH_TOKENS = 2048  # of one forward pass, unless a window is longer
MAP, EDGES = 32, 8
WINDOWS = (3, 16, 64, 256, 1024)

_WORDS = {
    "format": "format",
    "headscope": "version of headscope",
    "torch": "version of torch",
    "model": "model (its weights or its configuration)",
    "tokenizer": "tokenizer",
    "transformers": "version of transformers",
    "context": "context",
    "shard_tokens": "shard_tokens",
    "field": "field",
    "threads": "number of threads",
    "device": "device",
    "attention": "implementation of attention",
    "cpu": "instruction set of the CPU",
    "what": "set of statistics",
}


@dataclass(frozen=True)
class Settings:
    """The checked options of a survey.

    Attributes:
        context: the most tokens of a window, with those of the ends.
        shard_tokens: the tokens of a shard, about.
        what: the statistics.
        field: the field of a document that holds its text.
        threads: of this process.
    """

    context: int
    shard_tokens: int
    what: Observe
    field: str
    threads: int


def check_settings(
    subject: Subject, context: int | None, shard_tokens: int, what: Observe | None, rows: int | None, field: str,
    threads: int,
) -> Settings:  # fmt: skip
    """Return the options of a survey.

    Raises:
        TypeError: one of them is of another kind.
        SurveyError: one of them is out of range, or not supported in a survey.
    """
    most = subject.context
    context = min(most or MOST_CONTEXT, MOST_CONTEXT) if context is None else whole("context", context, 1)
    if most is not None and context > most:
        raise SurveyError(f"context: got {context}, expected at most {most}, the context of the model")
    if context <= (ends := sum(map(len, subject.ends))):
        raise SurveyError(f"context: got {context}, expected more than the {ends} tokens of the ends")
    if what is None:
        windows = tuple(w for w in WINDOWS if w == WINDOWS[0] or 3 * w <= context)
        what = Observe(map=MAP, edges=EDGES, windows=windows)
    _check_what(what)
    if rows is not None:
        if what.rows is not None:
            raise SurveyError("rows: was passed twice, here and in what.rows")
        what = replace(what, rows=rows)
    shard_tokens, threads = whole("shard_tokens", shard_tokens, 1), whole("threads", threads, 1)
    return Settings(context, shard_tokens, what, field, threads)


def _check_what(what: object) -> None:
    if not isinstance(what, Observe):
        raise TypeError(f"what: got {type(what).__name__}, expected a headscope.Observe")
    if not what.row_stats:
        raise SurveyError("what: row_stats: got False, expected True: a survey shows row quantities")
    unsupported = {
        "rows": isinstance(what.rows, torch.Tensor),
        "top": what.top > 0,
        **{name: getattr(what, name) is not None for name in ("tokens", "segments", "selected")},
        **{name: bool(getattr(what, name)) for name in ("keep_rows", "keep_qk", "weights")},
    }
    if names := [name for name, is_set in unsupported.items() if is_set]:
        raise SurveyError(
            f"what: {', '.join(names)}: not supported in a survey, whose memory does not depend on the corpus; "
            "use headscope.watch"
        )


def identity_of(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Return what has to be equal in all processes of a survey, ready for JSON."""
    what = {each.name: getattr(settings.what, each.name) for each in fields(settings.what)}
    return {
        "format": FORMAT,
        "headscope": __version__,
        "torch": torch.__version__,
        "transformers": _version_of_transformers(subject),
        "model": digest_of_model(subject),
        "tokenizer": digest_of_tokenizer(subject),
        "context": settings.context,
        "shard_tokens": settings.shard_tokens,
        "field": settings.field,
        "threads": settings.threads,
        "device": subject.device.type,
        "attention": str(getattr(getattr(subject.model, "config", None), "_attn_implementation", "")),
        # kernels of different instruction sets round differently
        "cpu": ", ".join(dict.fromkeys((torch.backends.cpu.get_cpu_capability().lower(), _target()))),
        "what": {name: list(value) if isinstance(value, (tuple, list)) else value for name, value in what.items()},
    }


def _target() -> str:
    """Return the instruction set of the native kernels."""
    return "portable" if native.extension is None else native.extension.target()


def _version_of_transformers(subject: Subject) -> str:
    """Return its version if the model is one of its models; empty for others, whatever else the process has loaded."""
    if not any(kind.__module__.startswith("transformers.") for kind in type(subject.model).__mro__):
        return ""
    return str(sys.modules["transformers"].__version__)


def enter(folder: Folder, identity: Mapping[str, Any], *, resume: bool) -> None:
    """Start a survey in a folder, or join the one that is there.

    Raises:
        SurveyError: the folder holds a survey of another model, other options or another version, or other files; or it
            holds a survey and ``resume`` is False.
        OSError: it cannot be written.
    """
    shown = visible(str(folder.path))
    if folder.path.exists() and not folder.path.is_dir():
        raise SurveyError(f"out: {shown}: is not a folder")
    folder.path.mkdir(parents=True, exist_ok=True)
    if not folder.identity.exists():
        there = sorted(name for name in os.listdir(folder.path) if not name.startswith(".headscope-"))
        if there and not folder.identity.exists():  # another process may have started the survey meanwhile
            raise SurveyError(f"out: {shown}: holds {visible(there[0])} and no survey; expected a new or empty folder")
        content = json.dumps(identity, sort_keys=True, indent=1).encode()
        if create_whole(folder.identity, content):
            folder.shards.mkdir(exist_ok=True)
            return
    if not resume:
        raise SurveyError(f"out: {shown}: holds a survey already; use another folder, or resume=True")
    _check_equal(shown, read_identity(folder), json.loads(json.dumps(identity)))
    folder.shards.mkdir(exist_ok=True)


def read_identity(folder: Folder) -> dict[str, Any]:
    """Return the identity of the survey in a folder.

    Raises:
        SurveyError: it is not a survey, or damaged.
    """
    shown = visible(str(folder.path))
    try:
        value = json.loads(folder.identity.read_bytes())
    except FileNotFoundError as error:
        raise SurveyError(f"{shown}: is not the folder of a survey: it has no {folder.identity.name}") from error
    except (OSError, ValueError) as error:
        raise SurveyError(f"{shown}: {folder.identity.name} is damaged; use another folder") from error
    if not isinstance(value, dict) or "format" not in value:
        raise SurveyError(f"{shown}: {folder.identity.name} is damaged; use another folder")
    return value


def _check_equal(shown: str, stored: dict[str, Any], here: dict[str, Any]) -> None:
    for name, word in _WORDS.items():
        if stored.get(name) != here[name]:
            expected, got = (_shortened(each) for each in _differing(stored.get(name), here[name]))
            raise SurveyError(
                f"out: {shown}: holds a survey with another {word}; expected {expected}, got {got}; use the same, or "
                "another folder as out"
            )


def _differing(one: Any, other: Any) -> tuple[Any, Any]:
    """Return two values; of two mappings, only what differs."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return one, other
    names = [name for name in cast("dict[str, Any]", one) if one[name] != other.get(name)]
    sides = (cast("dict[str, Any]", side) for side in (one, other))
    before, after = ([f"{name}={side.get(name)}" for name in names] for side in sides)
    return ", ".join(before), ", ".join(after)


def _shortened(value: Any) -> str:
    text = visible(str(value)) or "none"
    return text if len(text) <= 200 else f"{text[:16]}…"

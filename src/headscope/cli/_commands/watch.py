"""``headscope watch``: exact statistics of every head of a model on an input, and what follows from them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headscope.cli._shared.console import (
    SIZE,
    Mistake,
    busy,
    console,
    one_line,
    print_json,
    say,
    uninterrupted,
    unread,
    visible,
    warnings_as_notes,
)
from headscope.cli._shared.observation import one_thread
from headscope.cli._shared.pages import PAGE, check_apart, check_name, check_page, write_page

if TYPE_CHECKING:
    from headscope.cli._shared.models import Loaded
    from headscope.cli._shared.windows import Input
    from headscope.comparing import Comparison, Thresholds
    from headscope.decisions import KVBudget, NearDuplicates, Patterns, StreamingHeads
    from headscope.stats import HeadStats
    from headscope.watching import Recording

WINDOWS = (3, 16, 64, 256, 1024, 4096)  # the first, and those up to a third of the input: wider ones tell little
BUDGETS = (16, 64, 256, 1024)
BINS = 64
WHOLE = 128  # up to this many tokens, and
PATCHES = 256  # up to this many patches, every weight is in the map
ROWS = 2048  # up to this many tokens the rows are kept, for the entropy beside the map
EDGES = 16
MOVED = 1  # the exit code where something moved


@dataclass(frozen=True)
class Asked:
    """The options beside model and input.

    Attributes:
        page: where the page goes, or None for none.
        old: what to compare with, and from where on a change counts.
    """

    rows: int | None
    layers: tuple[str, ...]
    out: str | None
    keep_qk: bool
    page: str | None
    force: bool
    as_json: bool
    against: str | None
    old: HeadStats | None
    thresholds: Thresholds | None


@dataclass(frozen=True)
class Watched:
    """What was seen, and what follows from it; what could not be told is None.

    Attributes:
        against: the older recording that it is compared with, as it is shown.
    """

    loaded: Loaded
    given: Input
    recording: Recording
    patterns: Patterns
    streaming: StreamingHeads | None
    budget: KVBudget
    repeated: NearDuplicates
    comparison: Comparison | None
    against: str
    notes: tuple[str, ...]


@click.command(short_help="Measure every head of a model while it runs.")
@click.argument("model")
@click.option("--text", metavar="TEXT", help='Watch it read this text ("-" = stdin).')
@click.option("--file", metavar="PATH", help="Watch it read a file (UTF-8), in windows if it is long.")
@click.option("--ids", metavar="IDS", help="Watch it read these token ids: 5,7,9.")
@click.option("--image", metavar="PATH", help="Watch it look at a PNG or JPEG.  [default: the shipped samples]")
@click.option("--rows", type=SIZE, help="Look at an even sample of so many query rows a window.  [default: all]")
@click.option("--layers", multiple=True, metavar="PATTERN", help="Only these modules: h.3, 'decoder.*'; repeatable.")
@click.option("--context", type=SIZE, help="Tokens read at once.  [default: what the model allows, up to 4096]")
@click.option("--against", metavar="OLD", help="Compare with an older recording; exit code 1 if something moved.")
@click.option(
    "--threshold", "limits", multiple=True, metavar="NAME=X", help="From where on a change counts, as share=0.02."
)
@click.option("--out", metavar="PATH", help="Write the recording (.safetensors).")
@click.option("--keep-qk", is_flag=True, help="With q and k in it, for exact tiles: headscope report --serve.")
@click.option("--page", metavar="PATH", help=f"Where to write the page.  [default: {PAGE}]")
@click.option("--no-page", is_flag=True, help="Write no page.")
@click.option("--force", is_flag=True, help="Replace files there, even if they are none of headscope's own.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else; a page only with --page.")
def watch(
    model: str,
    text: str | None,
    file: str | None,
    ids: str | None,
    image: str | None,
    context: int | None,
    **options: Any,
) -> int:
    """Watch every attention head of MODEL while it runs, and say what can be decided from that.

    MODEL is "text" or "digits" (they ship with the package), a folder with a Hugging Face model (read offline, only
    .safetensors, no code of its own), or a name on the hub. Statistics are exact; what is longer than the context is
    read in windows and merged. Exit code 0, or 1 if --against found that something moved.
    """
    from headscope.cli._shared import models, windows

    with busy("loading torch"):
        import_module("torch")
    asked = _asked(**options)
    read = {"the text": file, "the image": image}
    check_apart("--out", asked.out, read, model)
    check_apart("--page", asked.page, {**read, "the older recording": asked.against}, model)
    with busy(f"loading {visible(model)}"):
        loaded = models.load(model)
    given = windows.read_input(loaded, text, file, ids, image, context)
    with one_thread() if model in models.SHIPPED else nullcontext():
        watched = _watched(loaded, given, asked)
    for note in watched.notes:
        say(f"headscope watch: {note}")
    recording = _save(watched.recording, asked)
    page = _save_page(watched, asked)
    if asked.as_json:
        print_json(_as_dict(watched, recording, page))
    else:
        from headscope.cli._shared.recording_view import show

        show(console(), watched, recording, page)
    return MOVED if watched.comparison is not None and watched.comparison.differs else 0


# ---------------------------------------------------------------- options


def _asked(
    out: str | None, keep_qk: bool, page: str | None, no_page: bool, force: bool, as_json: bool,
    against: str | None, limits: tuple[str, ...], **rest: Any,
) -> Asked:  # fmt: skip
    """Raises: Mistake: options that do not go together, or files that cannot be written or read."""
    if no_page and page is not None:
        raise Mistake("--no-page: wanted either it or --page")
    if limits and against is None:
        raise Mistake("--threshold: wanted --against with it")
    if keep_qk and out is None:
        raise Mistake("--keep-qk: wanted --out with it")
    page = None if no_page or (page is None and as_json) else PAGE if page is None else page
    thresholds = _thresholds(limits) if against is not None else None
    if out is not None:
        check_name("--out", out)
        _check_out(Path(out), force)
    if page is not None:
        check_page(page, force)
    if out is not None and page is not None and Path(out).resolve() == Path(page).resolve():
        raise Mistake(f"--page: {page}: is where --out puts the recording")
    old = None if against is None else _old(against)
    return Asked(
        out=out,
        keep_qk=keep_qk,
        page=page,
        force=force,
        as_json=as_json,
        against=against,
        old=old,
        thresholds=thresholds,
        **rest,
    )


def _thresholds(limits: tuple[str, ...]) -> Thresholds:
    from headscope.comparing import Thresholds

    names = [each.name for each in fields(Thresholds)]
    found: dict[str, float] = {}
    for limit in limits:
        name, _, number = limit.partition("=")
        if name not in names:
            raise Mistake(f"--threshold: got {limit}, wanted one of {', '.join(names)}, as share=0.02")
        try:
            found[name] = float(number)
        except ValueError:
            raise Mistake(f"--threshold: got {limit}, wanted a number after {name}=") from None
    try:
        return Thresholds(**found)
    except ValueError as error:
        raise Mistake(f"--threshold: {error}") from error


def _check_out(path: Path, force: bool) -> None:
    """Raises: Mistake: the recording cannot go there."""
    from headscope.stats import _files

    if "\0" in str(path):
        raise Mistake(f"--out: {path}: no file can have this name")
    try:
        there = path.exists()
    except OSError as error:  # the name is too long, say
        raise Mistake(f"--out: {path}: cannot be written: {error.strerror}") from error
    if not path.parent.is_dir():
        raise Mistake(f"--out: {path}: there is no such folder")
    if there and not path.is_file():
        raise Mistake(f"--out: {path}: is no regular file")
    try:
        _files.check_utf8(path)
    except ValueError as error:
        raise Mistake(f"--out: {error}") from error
    if there and not force and not _files.is_statistics(path):
        raise Mistake(f"--out: {path}: holds a file that is no recording; choose another name, or give --force")


def _old(path: str) -> HeadStats:
    from headscope.stats import HeadStats

    if not path:
        raise Mistake("--against: is empty, wanted a path")
    try:
        return HeadStats.load(path)
    except (OSError, ValueError, KeyError) as error:
        raise Mistake(f"--against: {unread(path, error)}") from error


# ---------------------------------------------------------------- watching


def _watched(loaded: Loaded, given: Input, asked: Asked) -> Watched:
    from headscope.decisions import kv_budget, near_duplicates, patterns, streaming_heads

    recording = _recorded(loaded, given, asked)
    stats = recording.stats
    keys = max((part.received.shape[-1] for part in stats.parts.values() if part.received is not None), default=0)
    budgets = tuple(k for k in BUDGETS if k < keys) or (max(1, keys // 4),)
    groups = loaded.key_heads if _divides(loaded.key_heads, stats) else None
    # below that not even the first window is up to a third of the input: it is there for "local" alone
    windowed = any(name.startswith("streaming_") for name in stats.names) and keys >= 3 * WINDOWS[0]
    return Watched(
        loaded,
        given,
        recording,
        patterns(stats),
        streaming_heads(stats) if windowed else None,
        kv_budget(stats, budgets, kv_heads=groups),
        near_duplicates(stats),
        _compared(asked, stats),
        visible(asked.against or ""),
        (*loaded.notes, *_notes(loaded, given, asked)),
    )


def _compared(asked: Asked, stats: HeadStats) -> Comparison | None:
    """What moved since the recording of --against, if there is one.

    Raises:
        Mistake: it is of another model, or of other heads.
    """
    from headscope.comparing import compare

    if asked.old is None:
        return None
    try:
        return compare(asked.old, stats, asked.thresholds)
    except ValueError as error:
        problem = str(error).partition("; compare recordings")[0]  # the remedy is one of Python's
        raise Mistake(f"--against: {visible(asked.against or '')}: {problem}") from error


def _divides(groups: int | None, stats: HeadStats) -> bool:
    """Whether all layers have several query heads to each of so many key/value heads."""
    return bool(groups) and all(part.heads % groups == 0 and part.heads > groups for part in stats.parts.values())


def _notes(loaded: Loaded, given: Input, asked: Asked) -> Iterator[str]:
    if len(given.parts) > 1:
        sizes = sorted({part.shape[1] for part in given.parts})
        size = " or ".join(f"{n:,}" for n in sizes)
        yield f"the text is read in {len(given.parts):,} windows of {size} tokens, each from position 0, and merged"
    if loaded.takes == "image":
        yield "distances, previous and next are along the sequence of patches, not on their grid"
    if loaded.paired:
        yield "the decoder reads the same tokens as the encoder, one place later"
    if asked.old is not None and asked.against is not None:
        before = _digest(asked.against)
        if before is not None and before != given.digest:
            yield f"the input is not the one of {visible(asked.against)}"


def _digest(path: str) -> str | None:
    """The digest of the input that a recording was made of, if it says one."""
    from headscope.watching import Recording

    try:
        said = Recording.load(path).about.options.get("input")
    except ValueError:  # statistics alone
        return None
    return said.get("digest") if isinstance(said, dict) else None


def _recorded(loaded: Loaded, given: Input, asked: Asked) -> Recording:
    """One recording of all forward passes.

    Raises:
        Mistake: the model cannot be watched, or fails.
    """
    import torch

    from headscope.watching import Recording, WatchError

    stats, last = None, None
    try:
        with warnings_as_notes("watch"):
            for part in _progress(given.parts):
                seen = _one(loaded, given, part, asked)
                stats = seen.stats if stats is None else stats.merge(seen.stats)
                last = seen
    except WatchError as error:
        raise Mistake(f"{loaded.name}: {_by_option(str(error).removeprefix('watch: '))}") from error
    except (ValueError, TypeError, IndexError, RuntimeError, NotImplementedError, torch.OutOfMemoryError) as error:
        option = "--" if str(error).startswith("layers:") else "the forward pass failed: "
        raise Mistake(f"{loaded.name}: {option}{one_line(str(error))[:300]}") from error
    assert stats is not None
    assert last is not None
    about = last.about
    said = {"source": given.source, "tokens": given.tokens, "windows": len(given.parts), "digest": given.digest}
    texts = _texts(loaded, given)
    count = len(given.parts)
    options = {**about.options, "tokens": None, "input": said}
    return Recording(stats, replace(about, options=options, texts=texts, forwards=count, ran=count))


def _by_option(message: str) -> str:
    """A message of ``headscope.watch``, with its arguments named as the options they come from."""
    return message.replace(', or give unseen="ignore"', "").replace("layers=", "--layers")


def _texts(loaded: Loaded, given: Input) -> tuple[str, ...] | None:
    """The text of each token, where there is one window."""
    first, *more = given.parts
    if loaded.takes == "image" or loaded.piece is None or more:
        return None
    ids: list[int] = first[0].tolist()
    return tuple(loaded.piece(token) for token in ids)


def _one(loaded: Loaded, given: Input, part: Any, asked: Asked) -> Recording:
    """One forward pass, watched."""
    import torch

    import headscope

    text = loaded.takes == "text"
    longest = max(part.shape[1] for part in given.parts) if text else 0
    shortest = min(part.shape[1] for part in given.parts) if text else 0
    what = headscope.Observe(
        rows=asked.rows,
        map=shortest if text and shortest <= WHOLE else BINS if text else _patches(loaded),
        edges=EDGES,
        windows=tuple(w for w in WINDOWS if w == WINDOWS[0] or 3 * w <= longest) if text else (),
        tokens=part if text and not loaded.paired else None,
        keep_rows=text and longest <= ROWS and len(given.parts) == 1,
        keep_qk=asked.keep_qk,
    )
    options: dict[str, Any] = {"layers": asked.layers or None}
    options |= {"tokens": "inputs"} if loaded.paired else {}  # its two halves read different ids
    with _quiet(), torch.inference_mode(), headscope.watch(loaded.model, what=what, **options) as seen:
        loaded.run(part)
    return seen


def _quiet() -> AbstractContextManager[None]:
    """Without what transformers, if the model is one of its, would remark while it runs."""
    from headscope.cli._shared import models

    transformers = sys.modules.get("transformers")
    return nullcontext() if transformers is None else models._quiet(transformers)


def _patches(loaded: Loaded) -> int:
    """How many bins the map of an image has: one for each patch, CLS and register, if the model says how many."""
    config = getattr(loaded.model, "config", None)
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    if not (isinstance(size, int) and isinstance(patch, int)):
        return BINS
    keys = (size // patch) ** 2 + 2 + (getattr(config, "num_register_tokens", 0) or 0)
    return keys if keys <= PATCHES else BINS


def _progress(parts: tuple[Any, ...]) -> Iterator[Any]:
    """The windows one by one, with how far it is on stderr, if that is a terminal."""
    import os

    if len(parts) == 1 or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        with busy("watching"):
            yield from parts
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(parts, "watching", console=Console(stderr=True), transient=True)


# ---------------------------------------------------------------- what is written


def _save(recording: Recording, asked: Asked) -> str | None:
    if asked.out is None:
        return None
    try:
        with uninterrupted():
            return str(_lean(recording).save(asked.out, qk=asked.keep_qk, force=asked.force))
    except OSError as error:
        raise Mistake(f"--out: {asked.out}: cannot be written: {error.strerror or error}") from error
    except ValueError as error:  # a mask that is too large
        raise Mistake(f"--keep-qk: {error}") from error


def _lean(recording: Recording) -> Recording:
    """Of the rows that are kept, their entropy alone, which a page shows: all of them would be most of the file."""
    from headscope.stats import HeadStats
    from headscope.watching import Recording

    parts = {
        name: replace(part, kept=tuple(replace(rows, values={"entropy": rows.values["entropy"]}) for rows in part.kept))
        for name, part in recording.stats.parts.items()
    }
    return Recording(HeadStats(parts), recording.about)


def _save_page(watched: Watched, asked: Asked) -> str | None:
    if asked.page is None:
        return None
    from headscope.cli._shared.recording_view import page

    return write_page(asked.page, page(watched), asked.force, "--page")


def _as_dict(watched: Watched, recording: str | None, page: str | None) -> dict[str, Any]:
    return {
        "model": watched.loaded.name,
        "notes": list(watched.notes),
        **watched.recording.to_dict(),
        "patterns": watched.patterns.to_dict(),
        "streaming": None if watched.streaming is None else watched.streaming.to_dict(),
        "kv_budget": watched.budget.to_dict(),
        "near_duplicates": watched.repeated.to_dict(),
        "comparison": None if watched.comparison is None else watched.comparison.to_dict(),
        "recording": recording,
        "page": page,
    }

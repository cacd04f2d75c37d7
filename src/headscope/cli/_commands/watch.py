"""``headscope watch``: exact statistics of every head of a model on an input, and a summary of them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from headscope._support.progress import progress_line
from headscope._support.text import visible
from headscope.cli._shared.console import SIZE, console, print_json, say, uninterrupted
from headscope.cli._shared.mistakes import Mistake
from headscope.cli._shared.observation import one_thread
from headscope.cli._shared.pages import check_apart, write_page
from headscope.cli._shared.watch_arguments import file_options, input_options

if TYPE_CHECKING:
    from headscope.cli._shared.model_loading import Loaded
    from headscope.cli._shared.watch_options import WatchOptions
    from headscope.cli._shared.watch_run import WatchResult
    from headscope.cli._shared.windows import Input
    from headscope.watching import Recording

MOVED = 1  # exit code
LARGE = 200_000_000  # bytes of a recording


@click.command(short_help="Measure every head of a model while it runs.")
@click.argument("model")
@input_options
@click.option("--rows", type=SIZE, help="Observe an even sample of N queries in each window.  [default: all]")
@click.option(
    "--layers", multiple=True, metavar="PATTERN", help="Watch only these modules, as h.3 or 'decoder.*'; repeatable."
)
@click.option("--context", type=SIZE, help="Tokens in a window.  [default: what the model allows, up to 32768]")
@click.option(
    "--map", "bins", metavar="N|full", help="Bins of each map, or a cell for each token.  [default: 64, full to 128]"
)
@click.option("--against", metavar="OLD", help="Compare with an older recording; exit code 1 if a head moved.")
@click.option(
    "--threshold", "limits", multiple=True, metavar="NAME=X", help="Smallest change that counts, as share=0.02."
)
@click.option("--verify", type=SIZE, help="Compute N rows of each layer again in float64.")
@file_options
def watch(
    model: str,
    text: str | None,
    file: str | None,
    ids: str | None,
    image: str | None,
    context: int | None,
    chat: str | None,
    named: tuple[str, ...],
    segments: str | None,
    **options: Any,
) -> int:
    """Watch every attention head of MODEL while it runs, and summarise what the heads do.

    MODEL is "text" or "digits" (shipped with headscope), a folder with a Hugging Face model, or its name on the hub. A
    folder is read offline; only .safetensors are read, and code of the model's repository is never run.

    Statistics are exact. A text longer than the context is read in windows, and their statistics are merged. The exit
    code is 1 if --against finds that a head moved, else 0.
    """
    from headscope.cli._shared.segment_options import read_segment_options
    from headscope.cli._shared.watch_options import parse_options
    from headscope.cli._shared.windows import read_input

    with progress_line("loading torch"):
        import_module("torch")
    parsed = parse_options(**options)
    inputs = {"the text": file, "the image": image, "the chat": chat, "the file of segments": segments}
    check_apart("--out", parsed.out, inputs, model)
    check_apart("--page", parsed.page, {**inputs, "the older recording": parsed.against}, model)
    segment_options = read_segment_options(named, segments, chat)
    loaded = _load(model)
    model_input = read_input(loaded, text, file, ids, image, context, segment_options)
    result = _run(model, loaded, model_input, parsed)
    notes = [*result.notes, *(_broken_rows(result) if parsed.as_json else ())]  # without --json, `show` prints them
    for note in notes:
        say(f"headscope watch: {note}")
    recording = _save(result.recording, parsed)
    page = _save_page(result, parsed)
    if parsed.as_json:
        print_json(_as_dict(result, notes, recording, page))
    else:
        from headscope.cli._shared.recording_view import show

        show(console(), result, recording, page)
    return MOVED if result.comparison is not None and result.comparison.differs else 0


def _load(model: str) -> Loaded:
    from headscope.cli._shared.model_loading import load

    with progress_line(f"loading {model}"):
        return load(model)


def _run(model: str, loaded: Loaded, model_input: Input, options: WatchOptions) -> WatchResult:
    from headscope.cli._shared.model_loading import SHIPPED
    from headscope.cli._shared.watch_run import run_watch

    with one_thread() if model in SHIPPED else nullcontext():
        return run_watch(loaded, model_input, options)


def _save(recording: Recording, options: WatchOptions) -> str | None:
    if options.out is None:
        return None
    try:
        written = _with_entropy_only(recording)
        _announce(written, options)
        with uninterrupted():
            return str(written.save(options.out, qk=options.keep_qk, force=options.force, exact=options.exact))
    except OSError as error:
        raise Mistake(f"--out: {options.out}: cannot be written: {error.strerror or error}") from error
    except ValueError as error:  # the mask is too large
        raise Mistake(f"--keep-qk: {error}") from error


def _announce(recording: Recording, options: WatchOptions) -> None:
    """Say how large the file will be, if it will be large."""
    from headscope.cli._shared.watch_options import size_of_file

    size = size_of_file(recording.stats, options)
    if size > LARGE:
        larger = {"--keep-qk": options.keep_qk, "--exact": options.exact, "--weights": options.heads}
        names = " and ".join(name for name, is_used in larger.items() if is_used)
        remedy = f"; without {names} it is smaller" if names else ""
        say(f"headscope watch: writing {visible(options.out or '')}: {size / 1e6:,.0f} MB{remedy}")


def _with_entropy_only(recording: Recording) -> Recording:
    """Return a recording with the entropy of each row, which the page shows; all row values would dominate the file."""
    from headscope.stats import HeadStats
    from headscope.watching import Recording

    parts = {
        name: replace(part, kept=tuple(replace(rows, values={"entropy": rows.values["entropy"]}) for rows in part.kept))
        for name, part in recording.stats.parts.items()
    }
    return Recording(HeadStats(parts), recording.about)


def _save_page(result: WatchResult, options: WatchOptions) -> str | None:
    if options.page is None:
        return None
    from headscope.cli._shared.recording_view import page

    return write_page(options.page, page(result), options.force, "--page")


def _broken_rows(result: WatchResult) -> list[str]:
    """Return a note on the rows that hold NaN or infinity, if there are any."""
    from headscope.report.sheet import broken_layers

    broken = broken_layers(result.recording.stats.parts)
    return [broken.removesuffix(".")] if broken else []


def _as_dict(result: WatchResult, notes: list[str], recording: str | None, page: str | None) -> dict[str, Any]:
    from headscope.cli._shared.recording_view import find_highlights

    return {
        "model": result.loaded.name,
        "notes": notes,
        **result.recording.to_dict(),
        "segments": None if result.segments is None else result.segments.to_dict(),
        "highlights": [each.to_dict() for each in find_highlights(result)],
        "patterns": result.patterns.to_dict(),
        "streaming": None if result.streaming is None else result.streaming.to_dict(),
        "kv_budget": result.budget.to_dict(),
        "near_duplicates": result.duplicates.to_dict(),
        "comparison": None if result.comparison is None else result.comparison.to_dict(),
        "recording": recording,
        "page": page,
    }

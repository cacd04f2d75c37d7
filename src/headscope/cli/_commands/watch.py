"""``headscope watch``: exact statistics of every head of a model on an input, and what follows from them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import click

from headscope._support.progress import progress_line
from headscope.cli._shared.console import SIZE, console, print_json, say, uninterrupted
from headscope.cli._shared.mistakes import Mistake
from headscope.cli._shared.observation import one_thread
from headscope.cli._shared.pages import PAGE, check_apart, write_page

if TYPE_CHECKING:
    from headscope.cli._shared.watch_options import WatchOptions
    from headscope.cli._shared.watch_run import WatchResult
    from headscope.watching import Recording

MOVED = 1  # the exit code where something moved


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
    from headscope.cli._shared.model_loading import SHIPPED, load
    from headscope.cli._shared.watch_options import parse_options
    from headscope.cli._shared.windows import read_input

    with progress_line("loading torch"):
        import_module("torch")
    parsed = parse_options(**options)
    inputs = {"the text": file, "the image": image}
    check_apart("--out", parsed.out, inputs, model)
    check_apart("--page", parsed.page, {**inputs, "the older recording": parsed.against}, model)
    with progress_line(f"loading {model}"):
        loaded = load(model)
    model_input = read_input(loaded, text, file, ids, image, context)
    from headscope.cli._shared.watch_run import run_watch

    with one_thread() if model in SHIPPED else nullcontext():
        result = run_watch(loaded, model_input, parsed)
    notes = [*result.notes, *(_broken_rows(result) if parsed.as_json else ())]  # else `show` prints them
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


def _save(recording: Recording, options: WatchOptions) -> str | None:
    if options.out is None:
        return None
    try:
        with uninterrupted():
            return str(_with_entropy_only(recording).save(options.out, qk=options.keep_qk, force=options.force))
    except OSError as error:
        raise Mistake(f"--out: {options.out}: cannot be written: {error.strerror or error}") from error
    except ValueError as error:  # a mask that is too large
        raise Mistake(f"--keep-qk: {error}") from error


def _with_entropy_only(recording: Recording) -> Recording:
    """Return a recording whose rows hold their entropy alone, which a page shows: all would be most of the file."""
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
    """Return a note of the rows that hold NaN or infinity, if any do."""
    from headscope.report.sheet import broken_layers

    broken = broken_layers(result.recording.stats.parts)
    return [broken.removesuffix(".")] if broken else []


def _as_dict(result: WatchResult, notes: list[str], recording: str | None, page: str | None) -> dict[str, Any]:
    return {
        "model": result.loaded.name,
        "notes": notes,
        **result.recording.to_dict(),
        "patterns": result.patterns.to_dict(),
        "streaming": None if result.streaming is None else result.streaming.to_dict(),
        "kv_budget": result.budget.to_dict(),
        "near_duplicates": result.duplicates.to_dict(),
        "comparison": None if result.comparison is None else result.comparison.to_dict(),
        "recording": recording,
        "page": page,
    }

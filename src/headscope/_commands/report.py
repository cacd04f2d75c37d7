"""``headscope report``: the page of a recording, in which every head can be looked at."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import click

from headscope._commands.pages import PAGE, check_page, write_page
from headscope._commands.screen import Mistake, busy, visible


@click.command()
@click.argument("recording")
@click.option("--out", metavar="PATH", default=PAGE, show_default=True, help="Where to write the page.")
@click.option("--title", metavar="TEXT", default="", help="What stands above it.  [default: the model]")
@click.option("--force", is_flag=True, help="Replace a file there, even if it is no page of headscope's own.")
def report(recording: str, out: str, title: str, force: bool) -> None:
    """Write the page of a RECORDING that ``watch --out`` or ``Recording.save`` wrote.

    One file that opens from disk and asks for nothing: maps of all heads, one head or two large, figures as CSV.
    """
    check_page(out, force, "--out")
    with busy("loading torch"):
        import_module("torch")
    from headscope.report.viewer import render_recording
    from headscope.watching import Recording

    try:
        with busy(f"reading {visible(recording)}"):
            found = Recording.load(recording)
    except (OSError, ValueError, KeyError) as error:
        raise Mistake(f"RECORDING: {getattr(error, 'strerror', None) or error}") from error
    try:
        with busy("writing the page"):
            html = render_recording(found, title=title)
    except ValueError as error:
        raise Mistake(f"RECORDING: {error}") from error
    path = write_page(out, html, force, "--out")
    click.echo(f"The page, to be opened in a browser: {visible(path)} ({Path(path).stat().st_size / 2**20:.1f} MiB)")

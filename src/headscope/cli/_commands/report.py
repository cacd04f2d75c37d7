"""``headscope report``: the page of a recording, with every head."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headscope._support.progress import progress_line
from headscope._support.text import visible
from headscope.cli._shared.console import Whole, say
from headscope.cli._shared.mistakes import Mistake, describe_unreadable, name_options
from headscope.cli._shared.observation import FORCE
from headscope.cli._shared.pages import PAGE, check_apart, check_page, write_page

if TYPE_CHECKING:
    from PIL.Image import Image

    from headscope.watching import Recording

ARGUMENTS = {  # of the page
    **{name: f"--{name}" for name in ("exact", "grid", "image", "special")},
    "strips": "--strip",
    "against": "OTHER",
}
LARGEST = 4096  # pixels along a side; larger images are scaled down


@click.command(short_help="Write or serve the page of a recording, or of two.")
@click.argument("recording")
@click.argument("other", required=False)
@click.option("--out", metavar="PATH", help=f"Where to write the page.  [default: {PAGE}]")
@click.option("--title", metavar="TEXT", default="", help="Title of the page.  [default: the model]")
@click.option("--image", metavar="PATH", help="Image that the model read, if the keys are its patches.")
@click.option("--grid", metavar="ROWSxCOLUMNS", help="Grid of patches, as 14x14.  [default: a square]")
@click.option(
    "--special", type=Whole(0), help="Keys before the patches: CLS, registers.  [default: those beyond the grid]"
)
@click.option(
    "--strip",
    "strips",
    multiple=True,
    metavar="LAYER.HEAD",
    help="Add strips of nearby tokens for this head; up to 16 times.",
)
@click.option(
    "--exact",
    multiple=True,
    metavar="LAYER.HEAD",
    help="Compute this head exactly at every zoom; up to 8 times, or none.  [default: those that match a pattern]",
)
@click.option("--serve", is_flag=True, help="Serve the page to this machine instead, with exact tiles at any zoom.")
@click.option("--port", type=Whole(0, 65535), help="Port for --serve.  [default: any free one]")
@click.option("--force", is_flag=True, help=FORCE)
def report(
    recording: str, other: str | None, out: str | None, serve: bool, port: int | None, force: bool, **options: Any
) -> None:
    """Write the page of a RECORDING that ``watch --out`` or ``Recording.save`` wrote, or of a training's history.

    The page is one self-contained HTML file: maps of all heads, one head or two enlarged, statistics as CSV. With a
    second recording of the model, OTHER, it opens on the heads that moved: two checkpoints, or two prompts. --serve
    writes nothing and computes every zoomed tile exactly, if the recording contains q and k (watch --keep-qk).

    RECORDING may be the folder of a survey, and OTHER that of a second one.

    RECORDING may be the file of ``headscope.History``. Its page shows every head over the steps of the training, with
    the alarms; --out, --title and --force apply.
    """
    _check_options(recording, other, out, serve, port)
    page = PAGE if out is None else out
    if not serve:
        read = {"the recording": recording, "the other recording": other, "the image": options["image"]}
        check_apart("--out", page, read)
        check_page(page, force, "--out")
    with progress_line("loading torch"):
        import_module("torch")
    from headscope.watching import History

    if os.path.isdir(recording):  # False where Path.is_dir raises: a name can be too long
        _write_survey(recording, page, force, {"serve": serve, **options}, other)
        return
    if History.is_history(recording):
        _write_history(recording, page, force, {"other": other, "serve": serve, **options})
        return
    loaded = _load("RECORDING", recording)
    arguments = _page_arguments(**options)
    if other is not None:
        labels = _labels(recording, other)
        arguments |= {"against": _load("OTHER", other), "labels": labels}
    if serve:
        _serve(loaded, port or 0, arguments)
    else:
        _write_recording(loaded, page, force, arguments)


def _write_recording(loaded: Recording, page: str, force: bool, arguments: dict[str, Any]) -> None:
    """Write the page of a recording, or of two.

    Raises:
        Mistake: an option does not fit the recording.
    """
    from headscope.report.viewer import render_recording

    _check_strips(loaded, arguments.get("strips", ()))
    try:
        with progress_line("writing the page"):
            html = render_recording(loaded, **arguments)
    except ValueError as error:
        message = str(error).removeprefix("recording: ")
        raise Mistake(name_options(message, ARGUMENTS, default="RECORDING")) from error
    path = write_page(page, html, force, "--out")
    _show_path(path)
    if exact := _without_strips(loaded, arguments.get("strips", ())):
        why = "the map already holds every weight of the layer, so the page has no strip for it"
        say(f"headscope report: --strip: {', '.join(exact)}: {why}")


def _show_path(path: str) -> None:
    click.echo(f"Open in a browser: {visible(path)} ({Path(path).stat().st_size / 2**20:.1f} MiB)")


def _write_history(path: str, page: str, force: bool, options: dict[str, Any]) -> None:
    """Write the page of a training's history.

    Raises:
        Mistake: an option of recordings was passed, or the file is damaged or empty.
    """
    from headscope.report.viewer import render_history
    from headscope.watching import History

    others = {"strips": "--strip", "other": "OTHER"}
    for name, value in options.items():
        if name != "title" and value is not None and value is not False and value != ():
            raise Mistake(f"{others.get(name, f'--{name}')}: does not apply to the history of a training")
    try:
        with progress_line("writing the page"):
            html = render_history(History.load(path), title=options["title"])
    except (OSError, ValueError) as error:
        raise Mistake(f"RECORDING: {describe_unreadable(path, error)}") from error
    _show_path(write_page(page, html, force, "--out"))


def _write_survey(path: str, page: str, force: bool, options: dict[str, Any], other: str | None) -> None:
    """Write the page of a survey, or of two.

    Raises:
        Mistake: an option of recordings was passed, or a folder does not hold a complete survey.
    """
    from headscope.survey import load_result, render_comparison, render_page

    for name, value in options.items():
        if value is not None and value is not False and value not in ((), ""):
            raise Mistake(f"{'--strip' if name == 'strips' else f'--{name}'}: does not apply to a survey")
    argument = "RECORDING"
    try:
        with progress_line("writing the page"):
            result = load_result(Path(path))
            if other is None:
                html = render_page(result)
            else:
                argument = "OTHER"
                html = render_comparison(result, load_result(Path(other)), _labels(path, other))
    except (OSError, ValueError) as error:
        raise Mistake(f"{argument}: {describe_unreadable(path if other is None else other, error)}") from error
    _show_path(write_page(page, html, force, "--out"))


def _load(argument: str, path: str) -> Recording:
    """Return the recording at a path; ``argument`` is the one that named it.

    Raises:
        Mistake: the file cannot be read, or is not a recording.
    """
    from headscope.watching import Recording

    try:
        with progress_line(f"reading {path}"):
            return Recording.load(path)
    except (OSError, ValueError, KeyError) as error:
        raise Mistake(f"{argument}: {describe_unreadable(path, error)}") from error


def _labels(recording: str, other: str) -> tuple[str, str]:
    """Return the names of two files, with their folders if the names are the same."""
    names = Path(recording).name, Path(other).name
    return names if names[0] != names[1] else (recording, other)


def _check_options(recording: str, other: str | None, out: str | None, serve: bool, port: int | None) -> None:
    """Check the options that exclude or require each other.

    Raises:
        Mistake: two options do not fit, or the recording is empty.
    """
    if serve and out is not None:
        raise Mistake("--serve: got --out too, expected one of the two")
    if port is not None and not serve:
        raise Mistake("--port: requires --serve")
    if other is not None and serve:
        raise Mistake("OTHER: expected one recording with --serve, got two")
    for name, path in (("RECORDING", recording), ("OTHER", other)):
        if path == "":
            raise Mistake(f"{name}: is empty, expected a path")


def _page_arguments(
    title: str,
    image: str | None,
    grid: str | None,
    special: int | None,
    strips: tuple[str, ...],
    exact: tuple[str, ...],
) -> dict[str, Any]:
    """Return the options as arguments of ``render_recording``.

    Raises:
        Mistake: an option cannot be parsed.
    """
    arguments: dict[str, Any] = {"title": title}
    if image is not None:
        arguments["image"] = _pixels(image)
    if grid is not None:
        sides = [part for part in grid.split("x") if part.isdecimal() and len(part) < 6]
        if len(sides) != 2 or grid.count("x") != 1:
            raise Mistake(f"--grid: got {visible(grid)}, expected rows and columns, as 14x14")
        if image is None:
            raise Mistake("--grid: requires --image")
        arguments["grid"] = (int(sides[0]), int(sides[1]))
    if special is not None:
        if image is None:
            raise Mistake("--special: requires --image")
        arguments["special"] = special
    if strips:
        arguments["strips"] = _places("--strip", strips)
    if exact:
        arguments["exact"] = [] if exact == ("none",) else _places("--exact", exact)
    return arguments


def _places(option: str, names: Sequence[str]) -> list[tuple[int, int]]:
    """Return layers and heads.

    Raises:
        Mistake: a name is not that of a layer and a head.
    """
    places: list[tuple[int, int]] = []
    for name in names:
        layer, _, head = name.partition(".")
        if not (layer.isdecimal() and head.isdecimal()):
            raise Mistake(f"{option}: got {visible(name)}, expected a layer and a head, counted from 0, as 3.5")
        places.append((int(layer), int(head)))
    return places


def _check_strips(recording: Recording, strips: Sequence[tuple[int, int]]) -> None:
    """Check the heads of --strip.

    Raises:
        Mistake: there are too many, or a head does not exist or has no q and k.
    """
    from headscope.report._viewer.from_recording import MOST_STRIPS

    parts = list(recording.stats.parts.values())
    if len(strips) > MOST_STRIPS:
        raise Mistake(f"--strip: got {len(strips)} heads, expected at most {MOST_STRIPS}")
    for layer, head in strips:
        got = f"--strip: got {layer}.{head}, expected"
        if layer >= len(parts):
            raise Mistake(f"{got} a layer from 0 to {len(parts) - 1}")
        if head >= parts[layer].heads:
            raise Mistake(f"{got} a head of layer {layer}, from 0 to {parts[layer].heads - 1}")
        if not parts[layer].tiles:
            raise Mistake(f"{got} a recording with q and k; record it with watch --keep-qk")


def _without_strips(recording: Recording, strips: Sequence[tuple[int, int]]) -> list[str]:
    """Return those heads whose map holds every weight, so that they need no strips."""
    from headscope.report._viewer.packing import exact

    parts = list(recording.stats.parts.values())
    return [f"{layer}.{head}" for layer, head in strips if exact(parts[layer])]


def _pixels(path: str) -> Any:
    """Return the pixels of an image file, uint8 [h, w, 3]."""
    import numpy as np

    from headscope.cli._shared.digits import with_picture

    def rgb(picture: Image) -> Any:
        small = picture.convert("RGB")
        small.thumbnail((LARGEST, LARGEST))
        return np.asarray(small)

    return with_picture(path, rgb)


def _serve(recording: Recording, port: int, options: dict[str, Any]) -> None:
    """Serve the page until Ctrl-C."""
    from headscope.report.serving import Server

    if "strips" in options:
        raise Mistake("--strip: expected none with --serve, which has the strips of every head")
    if "exact" in options:
        raise Mistake("--exact: expected none with --serve, which computes every head")
    try:
        with progress_line("preparing the page"):
            server = Server(recording, port=port, **options)
    except ValueError as error:
        message = str(error).removeprefix("recording: ")
        raise Mistake(name_options(message, ARGUMENTS, default="--serve")) from error
    except OSError as error:
        raise Mistake(f"--port: {port}: {error.strerror or error}") from error
    with server:
        click.echo(f"Open in a browser on this machine, until Ctrl-C: {server.url}")
        server.serve_forever()

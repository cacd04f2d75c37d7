"""The page in which every head can be looked at: of a recording, whatever the length, or of a sheet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headscope._support.progress import progress_line
from headscope.report._figures import SheetFigures
from headscope.report._page_file import write
from headscope.report._viewer import from_recording, from_sheet
from headscope.report._viewer.html import framed, render_shown
from headscope.report._viewer.model import Layer, Picture, Shown
from headscope.report.observed_model import ObservedModel

__all__ = [
    "Layer",
    "Picture",
    "Shown",
    "framed",
    "render_recording",
    "render_sheet",
    "render_shown",
    "save_recording",
    "shown_recording",
]

for _class in (Layer, Picture, Shown):
    _class.__module__ = __name__  # their public path

PROGRESS_DELAY = 1.0  # seconds after which a terminal shows that a page is being written


def save_recording(recording: ObservedModel, path: str | Path, *, force: bool = False, **options: Any) -> Path:
    """Write the page of a recording, whole or not at all; options are those of ``render_recording``.

    If it takes long, a terminal on stderr shows that it is being written.

    Raises:
        SaveError: the path is a directory, holds a file that is no headscope page, or cannot be written.
        TypeError, ValueError: as ``render_recording``.
        WatchError: nothing has been seen so far.
    """
    with progress_line("writing the page", delay=PROGRESS_DELAY):
        return write(render_recording(recording, **options), path, force=force)


def render_recording(
    recording: ObservedModel,
    *,
    title: str = "",
    image: Any = None,
    grid: tuple[int, int] | None = None,
    special: int | None = None,
    strips: Sequence[tuple[int | str, int]] | None = None,
) -> str:
    """The page as HTML: it holds all it needs and asks for nothing from anywhere.

    Args:
        recording: what was seen; maps are shown if it was observed with ``Observe(map=...)``.
        title: one line; by default the model.
        image: what the model saw, uint8 [h, w] or [h, w, 3], if its keys are the patches of one image.
        grid: rows and columns of patches; by default a square.
        special: how many keys stand before the patches (CLS, registers); by default what the grid leaves over, if that
            is less than a row or column of patches.
        strips: layers and heads whose weights near the diagonal and on the first keys are in the page at full
            resolution, at most 16, of self-attention, if q and k were kept (``Observe(keep_qk=True)``), of the first
            input of the last call; by default those with the highest scores of patterns. A layer each of whose weights
            is in the map has none.

    Raises:
        TypeError: an option of another kind.
        ValueError: the maps do not fit one page, an image or grid does not fit the keys, the keys are tokens with
            texts, or there is no such head.
        WatchError: nothing has been seen so far.
    """
    return render_shown(shown_recording(recording, title=title, image=image, grid=grid, special=special, strips=strips))


def shown_recording(recording: ObservedModel, **options: Any) -> Shown:
    """What the page of a recording shows; options as for ``render_recording``."""
    return from_recording.shown(recording, **options)


def render_sheet(sheet: SheetFigures) -> str:
    """The page of a sheet as HTML.

    Raises:
        ValueError: its weights do not fit one page.
    """
    return render_shown(from_sheet.shown(sheet))

"""The page that shows every head of a recording, of any length, or of a sheet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headscope._support.progress import progress_line
from headscope.report._figures import SheetFigures
from headscope.report._page_file import write
from headscope.report._viewer import from_history, from_recording, from_sheet
from headscope.report._viewer.from_history import TrainingHistory
from headscope.report._viewer.html import framed, render_shown
from headscope.report._viewer.model import Against, Layer, Picture, Shown
from headscope.report.observed_model import ObservedModel, TracedSteps

__all__ = [
    "Against",
    "Layer",
    "Picture",
    "Shown",
    "TrainingHistory",
    "framed",
    "render_history",
    "render_recording",
    "render_sheet",
    "render_shown",
    "save_history",
    "save_recording",
    "shown_recording",
    "worth_keeping",
]

for _class in (Against, Layer, Picture, Shown, TrainingHistory):
    _class.__module__ = __name__  # their public path

PROGRESS_DELAY = 1.0  # seconds until a terminal shows that a page is being written


def save_recording(recording: ObservedModel, path: str | Path, *, force: bool = False, **options: Any) -> Path:
    """Write the page of a recording atomically; options are those of ``render_recording``.

    After 1 second a terminal on stderr shows that the page is being written.

    Raises:
        SaveError: the path is a directory, holds a file that headscope did not write, or cannot be written.
        TypeError, ValueError: as ``render_recording``.
        WatchError: nothing has been recorded so far.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, watch
        >>> from headscope.report.viewer import save_recording
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model) as recording:
        ...     _ = model(torch.randn(1, 4, 8))
        >>> save_recording(recording, "page.html", title="A new model").name
        'page.html'
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
    trace: TracedSteps | None = None,
    exact: Sequence[tuple[int | str, int]] | None = None,
    against: ObservedModel | None = None,
    labels: tuple[str, str] | None = None,
) -> str:
    """Return the page of a recording as one self-contained HTML document, which loads nothing.

    Args:
        recording: the recording; the page has maps if it was recorded with ``Observe(map=...)``.
        title: one line; by default the name of the model.
        image: the input, uint8 [h, w] or [h, w, 3], if the keys are the patches of one image.
        grid: rows and columns of patches; by default a square.
        special: how many keys come before the patches (CLS, registers); by default the keys that the grid leaves over,
            if they are fewer than a row or column of patches.
        strips: at most 16 pairs of a layer and a head whose weights on nearby tokens and on the first keys the page
            holds at full resolution; by default the heads that match a pattern best. They need self-attention and
            saved q and k (``Observe(keep_qk=True)``), and show the first input of the last call. A layer whose map
            holds every weight has no strips.
        trace: what ``headscope.trace`` returned for a module of the model and an input: the page shows it in a tab of
            its own.
        exact: at most 8 pairs of a layer and a head whose q, k and lse the page holds, so that it computes any piece of
            their weights, at every zoom; () = none. They need a map and saved q and k, and take at most 96 MB; if they
            do not fit, the page has fewer and states it. By default, the heads that match an informative pattern
            best, in at most 24 MB.
        against: a second, later recording of the same model, or of another checkpoint of it: the page opens on a tab
            that shows which heads moved. docs/guides/compare.md explains when a head has moved.
        labels: the names of the two recordings; by default "A" and "B".

    Raises:
        TypeError: an option has the wrong type.
        ValueError: the maps do not fit one page, an image or grid does not fit the keys, the keys are tokens with
            texts, a head of ``strips`` or ``exact`` does not exist, the page cannot compute a head of ``exact``,
            ``trace`` has sizes only, or ``against`` is of another architecture or has no layer in common.
        WatchError: nothing has been recorded so far.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, watch
        >>> from headscope.report.viewer import render_recording
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model) as recording:
        ...     _ = model(torch.randn(1, 4, 8))
        >>> html = render_recording(recording, title="A new model")
        >>> html.splitlines()[1], "A new model" in html
        ('<!-- headscope report -->', True)
    """
    options: dict[str, Any] = {"image": image, "grid": grid, "special": special, "strips": strips, "trace": trace}
    options |= {"exact": exact, "against": against, "labels": labels}
    return render_shown(shown_recording(recording, title=title, **options))


def shown_recording(recording: ObservedModel, **options: Any) -> Shown:
    """Return what the page of a recording shows; options as for ``render_recording``.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, watch
        >>> from headscope.report.viewer import shown_recording
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model) as recording:
        ...     _ = model(torch.randn(1, 4, 8))
        >>> shown_recording(recording).footer["Input"]
        '4 queries × 4 keys; 1 forward pass'
    """
    return from_recording.shown(recording, **options)


def worth_keeping(recording: ObservedModel) -> tuple[list[tuple[int, int]], list[int]]:
    """Return the heads whose q and k a page should hold, as layer and head, and the forward passes to take them from.

    The best ones are first. These are the heads that the page holds by default, where their q and k were retained. Of a
    text that was read in windows, each forward pass is a window.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, Observe, watch
        >>> from headscope.report.viewer import worth_keeping
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model, what=Observe(map=4)) as recording:
        ...     _ = model(torch.randn(1, 4, 8))
        >>> heads, passes = worth_keeping(recording)
        >>> sorted(heads), passes
        ([(0, 0), (0, 1)], [0])
    """
    return from_recording.worth_keeping(recording)


def render_sheet(sheet: SheetFigures) -> str:
    """Return the page of a sheet as HTML.

    Raises:
        ValueError: the weights do not fit one page.

    Examples:
        >>> import torch
        >>> from headscope.report import text_sheet
        >>> from headscope.report.viewer import render_sheet
        >>> sheet = text_sheet("Each token attends to itself", ["a", "b", "c"], [torch.eye(3)[None]])
        >>> html = render_sheet(sheet)
        >>> html.splitlines()[1], sheet.title in html
        ('<!-- headscope report -->', True)
    """
    return render_shown(from_sheet.shown(sheet))


def render_history(history: TrainingHistory, *, title: str = "") -> str:
    """Return the page of a training's history as one self-contained HTML document, which loads nothing.

    Args:
        history: a ``headscope.History``, or another object with the same attributes.
        title: one line; by default the name of the model.

    Raises:
        ValueError: the history has no step yet.

    Examples:
        >>> import torch
        >>> from headscope import History, MultiHeadAttention, watch
        >>> from headscope.report.viewer import render_history
        >>> model, history = MultiHeadAttention(8, 2), History("run.safetensors")
        >>> with watch(model, log=history):
        ...     _ = model(torch.randn(1, 4, 8)), model(torch.randn(1, 4, 8))
        >>> html = render_history(history, title="A new model")
        >>> html.splitlines()[1], "A new model" in html
        ('<!-- headscope report -->', True)
    """
    return render_shown(from_history.shown(history, title))


def save_history(history: TrainingHistory, path: str | Path, *, title: str = "", force: bool = False) -> Path:
    """Write the page of a training's history atomically; arguments as for ``render_history``.

    Raises:
        SaveError: the path is a directory, holds a file that headscope did not write, or cannot be written.
        ValueError: the history has no step yet.

    Examples:
        >>> import torch
        >>> from headscope import History, MultiHeadAttention, watch
        >>> from headscope.report.viewer import save_history
        >>> model, history = MultiHeadAttention(8, 2), History("run.safetensors")
        >>> with watch(model, log=history):
        ...     _ = model(torch.randn(1, 4, 8))
        >>> save_history(history, "run.html").name
        'run.html'
    """
    with progress_line("writing the page", delay=PROGRESS_DELAY):
        return write(render_history(history, title=title), path, force=force)

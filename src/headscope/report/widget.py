"""The page of a recording as a widget of a notebook, in which Python reads the selection and opens heads.

It is the same page, in a frame: its script and style cannot reach the notebook. It requires ``anywidget``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headscope._support.arguments import whole
from headscope.report._viewer.from_recording import tiled_weights
from headscope.report._viewer.html import render_shown
from headscope.report._viewer.model import Shown
from headscope.report.observed_model import ObservedModel
from headscope.report.viewer import shown_recording

__all__ = ["HeadView", "show_heads"]

_SCRIPT = """
export default {
  render({ model, el }) {
    const frame = document.createElement("iframe");
    frame.title = "headscope";
    frame.setAttribute("sandbox", "allow-scripts allow-downloads");
    frame.style = "border: 0; width: 100%";
    const draw = () => {
      frame.style.height = `${model.get("height")}px`;
      frame.srcdoc = new TextDecoder().decode(model.get("page"));
    };
    const received = (event) => {
      if (event.source !== frame.contentWindow || event.data?.headscope !== "state") return;
      const { layer, head, row, column, zoom } = event.data;
      model.set("state", { layer, head, row, column, zoom });
      model.save_changes();
    };
    const open = () => {
      const to = model.get("opened");
      if ("layer" in to) frame.contentWindow.postMessage({ headscope: "open", ...to }, "*");
    };
    addEventListener("message", received);
    model.on("change:page", draw);
    model.on("change:height", draw);
    model.on("change:opened", open);
    draw();
    el.appendChild(frame);
    return () => removeEventListener("message", received);
  },
};
"""


def show_heads(recording: ObservedModel, *, height: int = 900, **options: Any) -> HeadView:
    """Return the page of a recording as a widget, for the last line of a notebook cell.

    Args:
        recording: the recording.
        height: of the widget, in pixels.
        options: those of ``render_recording``.

    Raises:
        ImportError: ``anywidget`` is not installed.
        TypeError, ValueError: as ``render_recording``.
        WatchError: nothing has been recorded yet.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, Observe, watch
        >>> from headscope.report.widget import show_heads
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model, what=Observe(map=4, keep_qk=True)) as recording:
        ...     _ = model(torch.randn(1, 4, 8))
        >>> view = show_heads(recording)
        >>> view.open(0, 1)
        >>> view.selected, view.tile.shape
        ({'layer': 0, 'head': 1, 'query': None, 'key': None}, torch.Size([4, 4]))
    """
    return HeadView(recording, whole("height", height, 1), options)


class HeadView:
    """A recording in a notebook; see ``show_heads``.

    Attributes:
        widget: the widget itself, for notebooks that take one, as ``mo.ui.anywidget(view.widget)`` of marimo does.

    Examples:
        >>> import torch
        >>> from headscope import MultiHeadAttention, Observe, watch
        >>> from headscope.report.widget import show_heads
        >>> model = MultiHeadAttention(8, 2)
        >>> with watch(model, what=Observe(map=4)) as recording:
        ...     _ = model(torch.randn(1, 4, 8))
        ...     view = show_heads(recording)  # the watch is still open
        ...     _ = model(torch.randn(1, 4, 8))
        ...     view.refresh()
        >>> view.widget.height
        900
    """

    def __init__(self, recording: ObservedModel, height: int, options: Mapping[str, Any]) -> None:
        self._recording, self._options = recording, options
        self._shown = shown_recording(recording, **options)
        self.widget: Any = _widget_class()(page=render_shown(self._shown).encode(), height=height)

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return self.widget._repr_mimebundle_(**options)

    def refresh(self) -> None:
        """Show what the recording holds now, in a watch that is still open."""
        self._shown = shown_recording(self._recording, **self._options)
        self.widget.page = render_shown(self._shown).encode()

    def open(self, layer: int | str, head: int) -> None:
        """Open a head.

        Args:
            layer: its number or name.
            head: its number, from 0.

        Raises:
            ValueError: there is no such layer or head.
        """
        number, head = _place(self._shown, layer, head)
        self.widget.state = {**_FIRST, "layer": number, "head": head}
        self.widget.opened = {}  # else the same head again would be no change
        self.widget.opened = {"layer": number, "head": head}

    @property
    def selected(self) -> dict[str, int | None]:
        """Layer and head in view, and the selected query and key, or None; of bins, their first positions."""
        state: dict[str, Any] = {**_FIRST, **self.widget.state}
        layer = self._shown.layers[state["layer"]]
        lengths: tuple[int, int] | None = layer.facts["lengths"]
        bins = (0, 0) if layer.source.map is None else layer.source.map.mean.shape[1:]
        at = [state["row"], state["column"]]
        if lengths is not None:  # else a bin has no positions
            at = [_first(each, count, length) for each, count, length in zip(at, bins, lengths, strict=True)]
        return {"layer": state["layer"], "head": state["head"], "query": at[0], "key": at[1]}

    @property
    def tile(self) -> Tensor:
        """The exact weights [Q, K] of the visible part of the head in view, of the first input of its last call.

        Masked keys are NaN.

        Raises:
            ValueError: q and k were not kept.
        """
        state: dict[str, Any] = {**_FIRST, **self.widget.state}
        kept = tiled_weights(list(self._recording.stats.parts.values())[state["layer"]])
        if kept is None:
            raise ValueError("tile: q and k were not kept; expected a recording with Observe(keep_qk=True)")
        scale, x, y = state["zoom"]
        rows, columns = (_visible(middle, scale, length) for middle, length in ((y, kept.queries), (x, kept.keys)))
        return kept.piece(0, state["head"], rows, columns)


_FIRST = {"layer": 0, "head": 0, "row": None, "column": None, "zoom": [1, 0.5, 0.5]}


@functools.cache
def _widget_class() -> Any:
    """Return the class; only now is anywidget imported, which few have."""
    try:
        import anywidget  # pyright: ignore[reportMissingTypeStubs]
        import traitlets
    except ImportError as error:
        raise ImportError("show_heads: requires anywidget; install it with: pip install anywidget") from error

    class Widget(anywidget.AnyWidget):
        _esm = _SCRIPT
        page = traitlets.Bytes().tag(sync=True)
        height = traitlets.Int().tag(sync=True)
        opened = traitlets.Dict().tag(sync=True)
        state = traitlets.Dict().tag(sync=True)

    return Widget


def _place(shown: Shown, layer: int | str, head: int) -> tuple[int, int]:
    names = [each.name for each in shown.layers]
    if isinstance(layer, str):
        if layer not in names:
            raise ValueError(f"layer: got {layer!r}, expected one of {', '.join(names)}")
        layer = names.index(layer)
    if not 0 <= layer < len(names):
        raise ValueError(f"layer: got {layer}, expected one of 0 to {len(names) - 1}")
    heads = shown.layers[layer].source.heads
    if not 0 <= head < heads:
        raise ValueError(f"head: got {head}, expected one of 0 to {heads - 1} of layer {layer}")
    return layer, head


def _first(at: int | None, bins: int, length: int) -> int | None:
    """Return the first position of a bin."""
    return at if at is None or bins >= length else at * length // bins


def _visible(middle: float, scale: float, length: int) -> tuple[int, int]:
    """Return the visible positions of an axis, whose part 1 / scale around a middle is in view."""
    start = min(1 - 1 / scale, max(0.0, middle - 0.5 / scale))
    return int(start * length), min(length, max(int(start * length) + 1, round((start + 1 / scale) * length)))

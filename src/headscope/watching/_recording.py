"""Recordings of a model's attention."""

from __future__ import annotations

import html
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from headscope._analysis.answers import short_layers
from headscope._intercept import Kind, LayerOrigin, WatchError, find_other_layers
from headscope._observe import pooled
from headscope._support.text import visible
from headscope.comparing import Comparison, Thresholds, compare
from headscope.report import viewer
from headscope.stats import Column, HeadStats, Summary, merge
from headscope.stats._layer import LayerStats, equally_segmented
from headscope.watching import _recording_file
from headscope.watching._about import About
from headscope.watching._gathered_recording import gathered
from headscope.watching._monitor import Alarm, Monitor
from headscope.watching._verify import Verifier

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, nn
    from torch.distributed import ProcessGroup


class Pass(Protocol):
    """The modules of a forward pass that ran, those with recorded attention calls, and those with others."""

    @property
    def ran(self) -> Collection[str]: ...
    @property
    def observed(self) -> Collection[str]: ...
    @property
    def unrecorded(self) -> Collection[str]: ...


__all__ = ["Recording"]

PENDING = 16  # calls of a layer that are stored before they are merged


class Recording:
    """A recording of a model's attention: the statistics of each layer, and their origin.

    It can be read while the model is still being watched. It has all attributes and methods of ``HeadStats``:
    ``recording["h.0.attn", 3, "entropy"]``, ``recording["entropy"]``, ``recording[0].received``.

    Attributes:
        about: model, options, versions, number of forward passes; ``about.part``: the heads of each layer, if not all.

    Examples:
        >>> import torch
        >>> from headscope import watch
        >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
        >>> with watch(model) as recording:
        ...     output = model(torch.zeros(1, 4, 8))
        >>> recording.layers, recording.heads, recording.forwards
        (('self_attn',), 2, 1)
    """

    def __init__(self, stats: HeadStats, about: About, alarms: tuple[Alarm, ...] = ()) -> None:
        self._about = about if stats.origin is None else replace(about, origin=stats.origin)
        self._passes = (0, 0)  # those that ``_about`` does not count yet, and how many of them were observed
        self._new: dict[str, tuple[Kind, LayerOrigin]] = {}  # layers that it does not have yet
        self._parts: dict[str, LayerStats] = dict(stats.parts)
        self._pending: dict[str, list[Callable[[], LayerStats]]] = {}  # not yet in ``_parts``, in order
        self._order: dict[str, tuple[int, int]] = {}
        self._alarms = alarms  # of a file, or of the original of a copy
        self._monitor: Monitor | None = None
        self._lock = threading.RLock()

    # ------------------------------------------------------------ reading

    @property
    def about(self) -> About:
        """The origin of the recording, and its options."""
        with self._lock:
            if self._new or self._passes[0]:
                about, (ran, observed), new = self._about, self._passes, self._new
                layers = {name: origin for name, (_, origin) in new.items()}
                self._about = replace(
                    about,
                    ran=about.ran + ran,
                    forwards=about.forwards + observed,
                    kinds={**about.kinds, **{name: kind for name, (kind, _) in new.items()}},
                    origin=about.origin and replace(about.origin, layers={**about.origin.layers, **layers}),
                )
                self._passes, self._new = (0, 0), {}
            return self._about

    @about.setter
    def about(self, about: About) -> None:
        with self._lock:
            self._about, self._passes, self._new = about, (0, 0), {}

    @property
    def stats(self) -> HeadStats:
        """The statistics of all layers, named by module path, in the order of the model.

        Raises:
            WatchError: nothing has been recorded yet.
        """
        with self._lock:
            layers = self._all()
            if not layers:
                raise WatchError("watch: nothing recorded yet; run the model inside the `with` block")
            names = sorted(layers, key=lambda name: self._order.get(name, (0, 0)))
            return HeadStats({name: layers[name] for name in names}, self.about.origin)

    def __getitem__(self, at: Any) -> Summary | Column | HeadStats | dict[str, Summary]:
        return self.stats[at]

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers' names, in order."""
        return self.stats.layers

    @property
    def names(self) -> tuple[str, ...]:
        """The row quantities that some layer has."""
        return self.stats.names

    @property
    def heads(self) -> int:
        """The number of heads of the layer with the most."""
        return self.stats.heads

    @property
    def forwards(self) -> int:
        """The number of observed forward passes."""
        return self.about.forwards

    @property
    def kinds(self) -> Mapping[str, str]:
        """Layer -> "self" or "cross"."""
        return self.about.kinds

    @property
    def texts(self) -> tuple[str, ...] | None:
        """The text of each token, if specified."""
        return self.about.texts

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """The alarms that were raised, if the model was watched with ``alarms``."""
        return self._alarms if self._monitor is None else tuple(self._monitor.alarms)

    def weights(self, layer: int | str, head: int) -> list[Tensor]:
        """Return the weights [B, Q, K] of a chosen head of a layer, of each sequence; see ``HeadStats.weights_of``.

        Raises:
            ValueError: the weights of the head were not observed.
        """
        return self.stats[layer].weights_of(head)

    def flat(self) -> dict[str, float]:
        """Return means under flat names for trackers: ``attn/L03/H05/entropy``."""
        return self.stats.flat()

    def to_dict(self) -> dict[str, Any]:
        """Return origin, options and all statistics, ready for JSON; see ``HeadStats.to_dict``."""
        return {"about": _recording_file.description(self.about), **self.stats.to_dict()}

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame``; see ``HeadStats.to_pandas``."""
        return self.stats.to_pandas()

    def table(self, sort: str | None = None, **options: Any) -> Table:
        """Return a table with one line for each head, under shortened paths; see ``HeadStats.table``."""
        from rich.markup import escape

        stats = self.stats
        short, note = short_layers(stats.layers)
        table = stats.named(*short.values()).table(sort, **options)
        table.caption = f"{table.caption} {escape(visible(note))}".rstrip()
        return table

    def compare(self, other: HeadStats | Recording, thresholds: Thresholds | None = None) -> Comparison:
        """Compare this recording with a later one, head by head; see ``headscope.comparing.compare``."""
        return compare(self, other, thresholds)

    def save(self, path: str | Path, *, qk: bool = False, force: bool = False, exact: bool = False) -> Path:
        """Write one safetensors file; ``HeadStats.load`` reads its statistics, too.

        Args:
            path: where.
            qk: include q, k and lse, if they were retained (``Observe(keep_qk=True)``), so every tile of the weights
                can be computed from the file; it then grows with the length, by B · (H + Hkv) · D numbers for each
                position.
            force: overwrite any file.
            exact: write maps in float64. Else their means and maxima take 16 bits each, with a relative error of at
                most 1e-3; with ``qk``, a map with a bin for each token is not written, but computed from q and k when
                it is read.

        Raises:
            FileExistsError, ValueError: see ``HeadStats.save``.
            ValueError: ``qk``, and a mask that is too large to be saved.
        """
        return _recording_file.save(self.stats, self.about, self.alarms, Path(path), force, qk, exact)

    def gather(
        self,
        group: ProcessGroup | None = None,
        *,
        to: int | None = 0,
        axis: Literal["rows", "heads", "layers"] = "rows",
    ) -> Recording | None:
        """Return the recordings of all ranks together on one of them, and None on the others; every rank calls it.

        The arguments are those of ``HeadStats.gather``. Of rows, ``about`` counts the forward passes of all ranks.

        Raises:
            TypeError, ValueError: see ``HeadStats.gather``; or the ranks watched with different options.
            RuntimeError: a rank did not call it within the timeout of the group, or has ended; the error names it.
            WatchError: nothing has been recorded yet.

        Examples:
            >>> import torch
            >>> from headscope import MultiHeadAttention, watch
            >>> model = MultiHeadAttention(8, 2)
            >>> with watch(model) as recording:
            ...     output = model(torch.zeros(1, 4, 8))
            >>> recording.gather().forwards  # one process: its own
            1
        """
        found = gathered(lambda: (self.stats, self.about, self.alarms), group, to, axis)
        return None if found is None else Recording(*found)

    def save_html(self, path: str | Path, *, force: bool = False, **options: Any) -> Path:
        """Write one self-contained HTML page with every head; see docs/guides/page.md.

        Maps are shown if they were observed: ``Observe(map=64)``.

        Args:
            path: where.
            force: overwrite any file.
            options: title, image, grid, special, strips, trace, exact, and against and labels for a page that
                compares this recording with a later one; as for ``headscope.report.viewer.render_recording``.

        Raises:
            SaveError: the file exists and is not a page of headscope, or it cannot be written.
            TypeError: an option of another kind.
            ValueError: the maps do not fit one page, an image does not fit the keys, or ``against`` is of another
                model.
            WatchError: nothing has been recorded yet.
        """
        return viewer.save_recording(self, path, force=force, **options)

    @staticmethod
    def load(path: str | Path) -> Recording:
        """Read what ``save`` wrote.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: it cannot be opened.
            ValueError: it is not a recording, or has a newer format.
        """
        return Recording(*_recording_file.load(Path(path)))

    def __repr__(self) -> str:
        if not self._parts and not self._pending:
            return visible(f"Recording({self.about.model}: nothing recorded yet)")
        passes = f"{self.forwards} forward pass{'' if self.forwards == 1 else 'es'}"
        return visible(f"Recording({self.about.model}, {passes}: {self.stats!r})")

    def _repr_html_(self) -> str:
        if not self._parts and not self._pending:
            return f"<p>{html.escape(repr(self))}</p>"
        return viewer.framed(viewer.render_recording(self))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy: a monitor, with its writers, stays with the original, as does the lock."""
        with self._lock:
            parts, alarms = self._all(), self.alarms
            return {
                **self.__dict__,
                "_about": self.about,
                "_passes": (0, 0),
                "_new": {},
                "_pending": {},
                "_parts": parts,
                "_alarms": alarms,
                "_monitor": None,
                "_lock": None,
            }

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        entries = {"_alarms": (), "_passes": (0, 0), "_new": {}, **state}
        if "about" in entries:  # of an earlier version
            entries["_about"] = entries.pop("about")
        self.__dict__.update(entries, _lock=threading.RLock())

    def __rich__(self) -> Table:
        return self.table()

    # ------------------------------------------------------------ writing

    def _begin(self, active: bool) -> int:
        """Count a forward pass; return its number, from 0."""
        with self._lock:
            ran, observed = self._passes
            self._passes = ran + 1, observed + active
            return self._about.ran + ran

    @property
    def _ran(self) -> int:
        """The number of forward passes so far."""
        with self._lock:
            return self._about.ran + self._passes[0]

    def _kind(self, name: str) -> Kind | None:
        """Return the kind of a layer; None: it is new."""
        with self._lock:
            return self._new[name][0] if name in self._new else self._about.kinds.get(name)

    def _add(
        self,
        name: str,
        order: tuple[int, int],
        part: Callable[[], LayerStats],
        kind: Kind,
        origin: Callable[[], LayerOrigin],
    ) -> None:
        """Add one call of a layer.

        Args:
            name: the layer.
            order: its place among the layers, and the number of its call.
            part: returns the statistics of the call.
            kind: that of the layer.
            origin: returns that of its first call.
        """
        with self._lock:
            if name not in self._order:
                self._new[name] = kind, origin()
                self._order[name] = order
            waiting = self._pending.setdefault(name, [])
            waiting.append(part)
            if len(waiting) >= PENDING:
                self._fold(name)

    def _list_others(self, modules: Mapping[str, nn.Module], chosen: Collection[str], forward: Pass) -> list[str]:
        """Add the layers of a forward pass that mix tokens without a softmax over keys, and return their names."""
        others = find_other_layers(modules, forward.ran, {*forward.observed, *forward.unrecorded})
        added = {name: what for name, what in others.items() if name in chosen and name not in self.about.other_layers}
        if added:
            with self._lock:
                self.about = replace(self.about, other_layers={**self.about.other_layers, **added})
        return [*others]

    def _verify(self, verifier: Verifier) -> None:
        """Take over what a watch has verified so far, and warn of errors."""
        if verifier.layers:
            with self._lock:
                self.about = replace(self.about, verified=dict(verifier.layers))
            verifier.warn()

    def _all(self) -> dict[str, LayerStats]:
        """Return layer -> all of its calls, merged."""
        for name in list(self._pending):
            self._fold(name)
        return self._parts | {name: waiting[0]() for name, waiting in self._pending.items()}

    def _fold(self, name: str) -> None:
        """Merge the waiting calls of a layer; if all are alike, they wait as one."""
        if name not in self._parts:  # else these would be a sum of their own
            self._pending[name] = pooled(self._pending[name])
            if len(self._pending[name]) == 1:
                return
        parts = [part() for part in self._pending[name]]
        if name in self._parts:
            parts.insert(0, self._parts[name])
        try:
            merged = merge(*(HeadStats({name: part}) for part in equally_segmented(parts)))
        except ValueError as error:
            raise WatchError(f"watch: {error}; a layer must have the same heads in every call") from error
        self._parts[name] = merged.parts[name]
        del self._pending[name]


Recording.__module__ = "headscope.watching"  # its public path

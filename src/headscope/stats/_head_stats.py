"""``HeadStats``, the result of ``headscope.observe``: access, merging, display and files.

docs/concepts/statistics.md defines every number, with its traps, and the measures of dense weights
(``row_statistics``, ``pattern_scores``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from headscope._support.arguments import as_whole, check_type, kind, whole
from headscope._support.text import visible
from headscope.stats import _statistics_file, _tables
from headscope.stats._differentiable import DifferentiableStats, requested
from headscope.stats._gathering import gathered
from headscope.stats._head_weights import HeadWeights, sequences
from headscope.stats._joining import merged_layers
from headscope.stats._kept_weights import chosen_run
from headscope.stats._layer import Edges, HeadMap, Kept, LayerStats
from headscope.stats._origin import Origin
from headscope.stats._segment_mass import SegmentMass
from headscope.stats._summaries import (
    Column,
    Summary,
    layer_at,
    names_of,
    stack_columns,
    summaries_of,
    summary_of,
)

if TYPE_CHECKING:
    from rich.table import Table
    from torch.distributed import ProcessGroup

__all__ = ["HeadStats"]


@dataclass(frozen=True, eq=False)
class HeadStats:
    """Statistics of attention heads by layer, head and name: the result of ``observe`` and ``attend(observe=...)``.

    ``stats[layer, head, name]`` is a ``Summary``, ``stats[layer, name]`` and ``stats[name]`` are ``Column``s,
    ``stats[layer, head]`` is a dictionary of summaries and ``stats[layer]`` the statistics of that layer only. A layer
    is selected by its number (0, 1, …, -1 = the last) or by its name. The values of one layer (``received``, ``map``,
    …) are attributes if there is one layer: ``stats[3].received``.

    Args:
        parts: layer name -> its statistics, in the order of the model.
        origin: the model, its configuration and the part of its heads; None if no recording states them.
        graph: ``differentiable``, if it was requested; files, copies, merged statistics and single layers lack it.

    Examples:
        >>> import torch
        >>> from headscope import observe
        >>> q = torch.zeros(1, 2, 4, 8)  # equal logits: even rows
        >>> stats = observe(q, q)
        >>> stats.heads, round(stats[0, 1, "effective_keys"].mean, 3)
        (2, 4.0)
    """

    parts: Mapping[str, LayerStats]
    origin: Origin | None = None
    graph: DifferentiableStats | None = None

    # ------------------------------------------------------------ finding

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers' names, in order."""
        return tuple(self.parts)

    @property
    def names(self) -> tuple[str, ...]:
        """The row quantities that some layer has."""
        return names_of(self.parts)

    @property
    def heads(self) -> int:
        """The number of heads of the layer with the most."""
        return max((part.heads for part in self.parts.values()), default=0)

    @overload
    def __getitem__(self, at: tuple[int | str, int, str]) -> Summary: ...
    @overload
    def __getitem__(self, at: tuple[int | str, int]) -> dict[str, Summary]: ...
    @overload
    def __getitem__(self, at: tuple[int | str, str]) -> Column: ...
    @overload
    def __getitem__(self, at: int) -> HeadStats: ...
    @overload
    def __getitem__(self, at: str) -> Any: ...

    def __getitem__(self, at: Any) -> Any:
        if not isinstance(at, tuple):
            if isinstance(at, str) and at in self.names:
                return stack_columns(self.parts.values(), at)
            name = layer_at(at, self.layers, self.names)
            return HeadStats({name: self.parts[name]}, None if self.origin is None else self.origin.of_layer(name))
        layer = layer_at(at[0] if at else "", self.layers, self.names)
        part = self.parts[layer]
        if len(at) == 2 and isinstance(at[1], str):
            return stack_columns([part], self._known(part, at[1], layer)).layer(0)
        head = as_whole(at[1]) if len(at) in (2, 3) else None
        if head is None:
            raise TypeError(
                f"stats[...]: got {at!r}, expected [layer, head, name], [layer, head], [layer, name] or less"
            )
        if not -part.heads <= head < part.heads:
            raise IndexError(f"head: got {head}, layer {layer} has {part.heads} (0 to {part.heads - 1})")
        if len(at) == 2:
            return {name: summary_of(part, name, head) for name in part.moments}
        name = self._known(part, at[2], layer)
        return summary_of(part, name, head)

    @staticmethod
    def _known(part: LayerStats, name: str, layer: str) -> str:
        if name not in part.moments:
            raise KeyError(f"{name}: layer {layer} has {', '.join(part.moments) or 'no row quantities'}")
        return name

    # ------------------------------------------------------------ of a single layer

    def _only(self, what: str) -> LayerStats:
        if len(self.parts) != 1:
            raise ValueError(f"{what}: there are {len(self.parts)} layers; select one of them: stats[layer].{what}")
        return next(iter(self.parts.values()))

    def _observed(self, what: str, argument: str) -> Any:
        part = getattr(self._only(what), what)
        if part is None:
            fitted = ", with ids that fit the keys of this layer" if what == "segments" else ""
            raise ValueError(f"{what}: was not observed; observe with Observe({argument}){fitted}")
        return part

    @property
    def rows(self) -> Tensor:
        """The number of counted rows of each head, int64 [H]; a quantity may have fewer."""
        return self._only("rows").rows

    @property
    def broken(self) -> Tensor:
        """The number of rows of each head that hold NaN or infinity and are excluded, int64 [H]."""
        return self._only("broken").broken

    @property
    def sampled(self) -> bool:
        """Whether only a sample of the query rows was observed."""
        return any(part.looked_at < part.of for part in self.parts.values())

    @property
    def received(self) -> Tensor:
        """The weight that each key received from the counted rows, float64 [H, K], by key position."""
        return self._observed("received", "received=True")

    @property
    def eligible(self) -> Tensor:
        """The number of counted rows to which each key was visible, int64 [H, K]."""
        return self._observed("eligible", "received=True")

    @property
    def received_share(self) -> Tensor:
        """received / eligible, [H, K]; NaN for a key that was masked for every counted row."""
        return self.received / self.eligible

    @property
    def received_max(self) -> Tensor:
        """The largest weight that a counted row of any batch entry gives each key, float64 [H, K], by key position.

        NaN for a key that was masked for every counted row.
        """
        return self._observed("received_max", "received_max=True")

    @property
    def segments(self) -> SegmentMass:
        """The weight that flows between the named segments of the sequence."""
        return self._observed("segments", "segments=Segments(...)")

    @property
    def differentiable(self) -> DifferentiableStats:
        """The statistics that take part in a loss; they are in the result of the call that requested them only."""
        return requested(self.graph)

    @property
    def map(self) -> HeadMap:
        """The weights in bins."""
        return self._observed("map", "map=64")

    @property
    def edges(self) -> Edges:
        """The largest weights of each head."""
        return self._observed("edges", "edges=32")

    @property
    def kept(self) -> tuple[Kept, ...]:
        """The retained rows, one entry for each observed call."""
        part = self._only("kept")
        if not part.kept:
            raise ValueError("kept: was not observed; observe with Observe(keep_rows=True) or Observe(top=8)")
        return part.kept

    @property
    def weights(self) -> dict[int, Tensor]:
        """Head -> its weights [B, R, K]; R and K are Q and K of the whole sequence, unless ``rows`` selected queries.

        Successive runs of one sequence, as in decoding with a key/value cache, are joined; see ``weights_of``. Weights
        are 0 for masked keys, for keys that a run did not have, and in rows without visible keys.

        Raises:
            ValueError: the weights were not observed, there are several layers, or the runs are of several sequences.
        """
        return {head: self._sequence(head)[0] for head in self.weights_runs[0].heads}

    @property
    def weights_rows(self) -> Tensor:
        """The query of each row of ``weights``, counted from the first query of the sequence, int64 [R].

        Raises:
            ValueError: as ``weights``.
        """
        return self._sequence(self.weights_runs[0].heads[0])[1]

    @property
    def weights_runs(self) -> tuple[HeadWeights, ...]:
        """The weights of chosen heads as they were observed, one entry for each call."""
        part = self._only("weights_runs")
        if not part.weights:
            raise ValueError("weights: were not observed; observe with Observe(weights=(0, 5))")
        return part.weights

    def weights_of(self, head: int) -> list[Tensor]:
        """Return the weights [B, R, K] of a chosen head, of each sequence.

        Runs are joined to one sequence if the queries of a run continue those of the run before it, with the same B. In
        self-attention they begin at the position after its last query: with a cache, K grows by Q. In cross-attention
        the run has one query and the same keys. Any other run begins a new sequence.

        Raises:
            ValueError: the weights of the head were not observed, or there are several layers.
        """
        return [p for p, _ in sequences(self.weights_runs, head)]

    def _sequence(self, head: int) -> tuple[Tensor, Tensor]:
        several = sequences(self.weights_runs, head)
        if len(several) > 1:
            raise ValueError(
                f"weights: the runs are of {len(several)} sequences, expected one; use weights_of(head), which returns "
                "a list, or weights_runs"
            )
        return several[0]

    def tile(self, i0: int, i1: int, j0: int, j1: int, *, run: int | None = None) -> Tensor:
        """Return exact weights p[i0:i1, j0:j1] of an observed call, [B, H, i1 - i0, j1 - j0].

        Args:
            i0, i1: queries, half-open, 0 <= i0 <= i1 <= Q.
            j0, j1: keys, half-open, 0 <= j0 <= j1 <= K.
            run: which of the observed calls, from 0, or from -1 backwards; None = the last whose q and k were retained.

        Masked keys, and rows without visible keys, have weight 0. The visible keys of a row with NaN or infinity in its
        logits have weight NaN. Time and memory are those of the rows.

        Raises:
            ValueError: q and k were not retained, or not saved; there are several layers; a number is out of range; or
                a bias, sinks or a mask were overwritten after they were observed.
        """
        part = self._only("tile")
        tiles = chosen_run(part.tiles, part.runs, run)
        return tiles(i0, i1, j0, j1)

    # ------------------------------------------------------------ merging

    def merge(self, *others: HeadStats) -> HeadStats:
        """Return the statistics of the runs of all: layers by name, new ones at the end.

        Also ``HeadStats.merge(a, b)``.

        Raises:
            TypeError: one of them is not a HeadStats.
            ValueError: a layer with different heads, bins, edges, first keys or segments, on another device, or with a
                part that only one of them has (q and k may be missing: ``tile`` then has some of the runs); recordings
                of different models, or of different parts of a layer's heads.

        Warns:
            UserWarning: a recording of an earlier version, which does not state its model and heads.
        """
        for stats in (self, *others):
            check_type("merge", stats, HeadStats, "HeadStats", kind)
        return HeadStats(*merged_layers([(stats.parts, stats.origin) for stats in (self, *others)]))

    def gather(
        self,
        group: ProcessGroup | None = None,
        *,
        to: int | None = 0,
        axis: Literal["rows", "heads", "layers"] = "rows",
    ) -> HeadStats | None:
        """Return the statistics of all ranks together on one of them, and None on the others; every rank calls it.

        The result is on the CPU, and lacks q and k of ``tile``. docs/guides/ranks.md states what is exact.

        Args:
            group: the process group; by default all processes. Without torch.distributed it is this process alone.
            to: the rank of the group that gets the result; None: all of them.
            axis: what the ranks have parts of. "rows": other rows of the same layers and heads, merged in the order of
                the ranks, as in data parallelism. "heads": other heads of the same layers and rows, joined in the order
                of the heads. "layers": other layers, joined in the order of the ranks, as in pipelines.

        Raises:
            TypeError, ValueError: an argument that does not fit; statistics that do not belong together, such as of
                other options, overlapping heads or a missing part. All ranks raise, before anything is sent.
            RuntimeError: a rank did not call it within the timeout of the group, or has ended; the error names it.

        Examples:
            >>> import torch
            >>> from headscope import observe
            >>> q = torch.zeros(1, 2, 4, 8)
            >>> observe(q, q).gather().rows  # one process: its own rows
            tensor([4, 4])
        """
        found = gathered(self.parts, self.origin, group, to, axis)
        return None if found is None else HeadStats(*found)

    def named(self, *names: str) -> HeadStats:
        """Return the same with other layer names, without ``origin``: merging no longer checks the model and its heads.

        Raises:
            ValueError: not as many names as layers, or a name twice.
        """
        if len(names) != len(self.parts) or len({*names}) < len(names):
            raise ValueError(f"names: got {', '.join(names)}, expected {len(self.parts)} different ones")
        return HeadStats(dict(zip(names, self.parts.values(), strict=True)))

    def to(self, device: torch.device | str) -> HeadStats:
        """Return the same with every tensor on a device, except the inputs of ``tile``, which stay where they are."""
        return HeadStats({name: part.to(device) for name, part in self.parts.items()}, self.origin)

    def __getstate__(self) -> dict[str, Any]:  # torch neither copies nor pickles tensors with a graph
        return {**vars(self), "graph": None}

    # ------------------------------------------------------------ export

    def summaries(self) -> Iterator[tuple[str, int, str, Summary]]:
        """Yield layer, head, name and summary of all statistics, in order."""
        return summaries_of(self.parts)

    def flat(self) -> dict[str, float]:
        """Return means under flat names for trackers: ``attn/L03/H05/entropy``; L counts the layers of this object.

        A quantity that no row of a head has is omitted. Segments have ``attn/L03/H05/segments/query/key``.
        """
        number = {layer: n for n, layer in enumerate(self.parts)}
        means = {
            f"attn/L{number[layer]:02d}/H{head:02d}/{name}": summary.mean
            for layer, head, name, summary in self.summaries()
            if summary.count
        }
        for layer, head, name, _, mean in _tables.pairs_of(self.parts, without_first=False):
            means[f"attn/L{number[layer]:02d}/H{head:02d}/{name}"] = mean
        return means

    def to_dict(self) -> dict[str, Any]:
        """Return all but retained rows and tensors of keys and bins, ready for JSON: undefined values are None."""
        return _tables.to_dict(self.parts)

    def to_pandas(self) -> Any:
        """Return a ``pandas.DataFrame`` with one line for each layer, head and name.

        Its columns are count, mean, std, min, max, and what chance gives: null_mean, null_std and z.

        Segments have one line for each pair, ``segments/query/key``, with count and mean; those that hold a first key
        also have ``segments/query/key/without_first``.

        Raises:
            ImportError: pandas is not installed.
        """
        return _tables.to_frame(self.parts)

    def table(
        self,
        sort: str | None = None,
        *,
        names: Collection[str] | None = None,
        descending: bool = True,
        limit: int | None = None,
    ) -> Table:
        """Return a table with one line for each head and its means, for ``rich.print``.

        Args:
            sort: a column: ``layer``, ``head``, ``rows`` or a quantity; by default layers and heads in order.
            names: which quantities to show (``stats.names`` = all; or ``segments/query/key``); by default a few, and
                the one to sort by.
            descending: the largest first; heads without the quantity come last either way.
            limit: the largest number of lines.

        Raises:
            ValueError: the column does not exist, or the limit is below 0.
        """
        if limit is not None:
            limit = whole("limit", limit, 0, " or None")
        return _tables.render_table(self.parts, sort, names, descending, limit)

    def save(self, path: str | Path, *, force: bool = False, exact: bool = False) -> Path:
        """Write all except the q and k of ``tile`` to one safetensors file with a JSON header.

        Means and maxima of a map take 16 bits each, with a relative error of at most 1e-3; ``exact`` writes float64.
        Everything else is exact.

        The file is written atomically. It replaces another file of statistics, and any other file only with ``force``;
        anything that is not a regular file is never replaced. A link stays, and its target is replaced.

        Raises:
            FileExistsError: the path exists and is not a file of headscope statistics, or not a regular file.
            ValueError: the statistics are too large for one file, such as retained rows of very many calls.
        """
        return _statistics_file.save(self.parts, self.origin, Path(path), force, exact=exact)

    @staticmethod
    def load(path: str | Path) -> HeadStats:
        """Read what ``save`` wrote.

        Raises:
            FileNotFoundError: the file does not exist.
            OSError: it cannot be opened.
            ValueError: it is not a file of statistics, or has a newer format.
        """
        return HeadStats(*_statistics_file.load(Path(path)))

    def __repr__(self) -> str:
        names = ", ".join(self.names) or "no row quantities"
        looked, of = (sum(getattr(part, what) for part in self.parts.values()) for what in ("looked_at", "of"))
        sample = f", a sample of {looked} of {of} rows" if self.sampled else ""
        layers = f"{len(self.parts)} layer{'' if len(self.parts) == 1 else 's'}"
        return visible(f"HeadStats({layers}, {self.heads} heads{sample}: {names})")

    def _repr_html_(self) -> str:
        return _tables.render_html(self.parts)

    def __rich__(self) -> Table:
        return self.table()


HeadStats.__module__ = "headscope.stats"  # its public path

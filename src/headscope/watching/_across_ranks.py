"""The values of a watched step over the rows of all ranks: one small all-reduce, for which no step waits.

The ranks agree on the options when a watch opens, and on the columns (layer, quantity and number of heads) in the first
step. From then on a step is one all-reduce of the sums and counts of all columns. It has a group of its own, so it does
not meet the operations of the model, and it is read in the next watched step, or when the watch ends. A rank that has
other columns states so in the same all-reduce; then the ranks agree again, and repeat it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from headscope._intercept import WatchError
from headscope._support.ranks import Ranks
from headscope.stats import LayerStats, Origin, check_equal
from headscope.watching._values import to_host, values_of


class About(Protocol):
    """What a recording states of its options and layers."""

    @property
    def options(self) -> Mapping[str, Any]: ...
    @property
    def origin(self) -> Origin | None: ...


Name = tuple[str, str]
"""A layer and a quantity of it."""
_OPENING = 120.0  # seconds in which all ranks open the watch
_ALONE = "pass log= or alarms= on every rank of the model (the first one writes), or group=None for this process alone"
_SAME_PASSES = (
    "expected the same passes on every rank. Run the model for one rank only, such as in an evaluation, outside of the "
    "watch, or pass group=None"
)


@dataclass(frozen=True)
class Column:
    """One quantity of the heads of a layer, over all ranks.

    Attributes:
        heads: the number of heads of the layer in the whole model.
        largest: whether it is a maximum, not a mean.
    """

    heads: int
    largest: bool


@dataclass(frozen=True, eq=False)
class Reduced:
    """The values of one step over the rows of all ranks.

    Attributes:
        number: the forward pass.
        names: layer and quantity of each column.
        heads: the number of heads of each.
        values: of all columns, one after the other; NaN where no rank has a row.
    """

    number: int
    names: Sequence[Name]
    heads: Sequence[int]
    values: Tensor


@dataclass(frozen=True, eq=False)
class _Mine:
    """This rank's values of a step: of each column its first head, and sums and counts or maxima, [2 or 1, H].

    Attributes:
        code: 2 * the number of the forward pass, + 1 in training mode.
    """

    code: int
    columns: dict[Name, Column]
    firsts: list[int]
    sizes: list[int]
    host: Tensor
    arrived: Any

    def pieces(self) -> list[tuple[Name, int, Tensor]]:
        """Return layer and quantity, first head and values of each column."""
        shapes = [
            (1 if column.largest else 2, size) for column, size in zip(self.columns.values(), self.sizes, strict=True)
        ]
        flat = self.host.split([rows * size for rows, size in shapes])
        each = zip(self.columns, self.firsts, flat, shapes, strict=True)
        return [(name, first, values.view(shape)) for name, first, values, shape in each]


class AcrossRanks:
    """The sums of a watch over the ranks that watch a model together.

    Attributes:
        ranks: these ranks; the first one gets the values.
    """

    def __init__(self, names: Sequence[int], is_training: Callable[[], bool]) -> None:
        """Take the ranks, among all processes, and what returns the mode of the model; nothing is sent yet."""
        self.ranks = Ranks.among(names)
        self._is_training = is_training
        self._columns: dict[Name, Column] | None = None  # those on which the ranks have agreed
        self._pending: _Pending | None = None
        self._read_about: Callable[[], About] | None = None

    def open(self, read_about: Callable[[], About], error: Exception | None = None) -> None:
        """Agree on the options with the other ranks, and connect to them.

        Args:
            read_about: returns options and layers of the recording.
            error: why this rank cannot watch, for the others.

        Raises:
            RuntimeError: a rank did not open the watch in time.
            ValueError: the ranks have different options, or one of them cannot watch.
        """
        self._read_about = read_about
        message: dict[str, Any] = {"options": {**read_about().options}, "connected": self.ranks.connected}
        message["error"] = None if error is None else f"{error}"
        try:
            again = self.ranks.agree("watch", message, self._judge_options, _OPENING)
        except ValueError as problem:
            if error is None:
                raise
            raise error from problem
        except RuntimeError as problem:
            raise type(problem)(f"{problem}; {_ALONE}") from problem
        self.ranks.connect(again=again)

    def _judge_options(self, several: list[Any]) -> bool:
        """Return whether all ranks have a connection that they can use again."""
        names = self.ranks.names
        for rank, each in enumerate(several):
            if each["error"] is not None:
                raise ValueError(f"watch: rank {names[rank]} failed: {each['error']}")
        for option in several[0]["options"]:
            check_equal("watch", names, option, [each["options"].get(option) for each in several])
        return all(each["connected"] for each in several)

    # ------------------------------------------------------------ steps

    def step(self, number: int, parts: Mapping[str, LayerStats]) -> list[Reduced]:
        """Start the sums of a step, and return the values of the one before it; [] on all ranks but the first.

        Raises:
            WatchError: the ranks are in different forward passes, or the heads of a layer are unknown.
            RuntimeError: a rank does not take part.
        """
        mine = self._measure(number, parts)
        done = self.finish()
        if self._columns is None:
            self._agree(mine)
        self._pending = _Pending(self.ranks, mine, self._columns or {})
        return done

    def finish(self) -> list[Reduced]:
        """Wait for the sums of the last step, and return its values; raise as ``step``."""
        pending = self._pending
        if pending is None:
            return []
        sums = pending.wait()
        self._check_passes(sums.passes.long().tolist())
        if bool(sums.unknown.any()):
            self._agree(pending.mine)
            pending = _Pending(self.ranks, pending.mine, self._columns or {})
            sums = pending.wait()
        self._pending = None
        return [] if self.ranks.rank else [sums.reduced(pending.mine.code // 2)]

    def _check_passes(self, codes: Sequence[int]) -> None:
        """Raise WatchError if the ranks are in different forward passes."""
        if other := next((rank for rank, each in enumerate(codes) if each != codes[0]), None):
            held = " and ".join(
                f"{_pass_in_words(codes[rank])} on rank {self.ranks.names[rank]}" for rank in (0, other)
            )
            raise WatchError(f"watch: the ranks are in different forward passes, {held}; {_SAME_PASSES}")

    def close(self) -> None:
        """Give up what is not finished, and let ranks that wait for this one know."""
        if self._pending is not None:
            self._pending = None
            self.ranks.forget()
        self.ranks.leave()

    def _measure(self, number: int, parts: Mapping[str, LayerStats]) -> _Mine:
        """Return the values of a step on their way to the host."""
        columns: dict[Name, Column] = {}
        firsts: list[int] = []
        tensors: list[Tensor] = []
        for layer, part in parts.items():
            first, of = self._span(layer, part.heads)
            for quantity, value, count in values_of(part):
                columns[layer, quantity] = Column(of, count is None)
                firsts.append(first)
                if count is None:
                    tensors.append(value[None].nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf))
                else:
                    tensors.append(torch.stack([torch.where(count > 0, value * count, 0.0), count.to(value.dtype)]))
        sizes = [each.shape[1] for each in tensors]
        device = tensors[0].device if tensors else torch.device("cpu")
        flat = [each.detach().to(device, torch.float64).flatten() for each in tensors]
        host, arrived = to_host(torch.cat(flat) if flat else torch.empty(0, dtype=torch.float64, device=device))
        return _Mine(2 * number + self._is_training(), columns, firsts, sizes, host, arrived)

    def _span(self, layer: str, heads: int) -> tuple[int, int]:
        """Return the first head of this rank's part of a layer, and the number of heads of the whole layer."""
        origin = None if self._read_about is None else self._read_about().origin
        held = None if origin is None else origin.layers.get(layer)
        if held is None or held.part is None:
            return 0, heads
        if held.part.heads is None:
            raise WatchError(
                f"watch: layer {layer} holds {held.part}, so its heads cannot be put together with those of other "
                "ranks; shard it as DTensors, with torch.distributed.tensor.parallel, or pass group=None"
            )
        return held.part.heads[0], held.part.of

    def _agree(self, mine: _Mine) -> None:
        """Agree on the columns of all ranks: those known before, then new ones in the order of the ranks."""
        known = self._columns or {}
        message = [[*name, column.heads, column.largest] for name, column in mine.columns.items()]
        agreed = self.ranks.agree("watch", {"columns": message}, partial(self._join_columns, known))
        self._columns = {(layer, quantity): Column(heads, largest) for layer, quantity, heads, largest in agreed}

    def _join_columns(self, known: Mapping[Name, Column], several: list[Any]) -> list[list[Any]]:
        joined = dict(known)
        ranks = dict.fromkeys(known, self.ranks.names[0])
        for rank, each in zip(self.ranks.names, several, strict=True):
            for layer, quantity, heads, largest in each["columns"]:
                held = joined.setdefault((layer, quantity), Column(heads, largest))
                holder = ranks.setdefault((layer, quantity), rank)
                check_equal("watch", (holder, rank), "the number of heads", [held.heads, heads], layer=layer)
        return [[*name, column.heads, column.largest] for name, column in joined.items()]


class _Sums:
    """The buffer of an all-reduce: for each rank its forward pass, whether it has unknown columns, and its maxima.

    Attributes:
        passes: the forward pass of each rank, see ``_Mine.code``.
        unknown: 1 for a rank with columns that are not in the buffer.
        means: sums and counts of the other columns, [2, heads].
        largest: the maxima of each rank, [ranks, heads].
    """

    def __init__(self, columns: Mapping[Name, Column], ranks: int) -> None:
        self.columns = columns
        means, maxima = (sum(each.heads for each in columns.values() if each.largest is kind) for kind in (False, True))
        sizes = [ranks, ranks, 2 * means, ranks * maxima]
        self.buffer = torch.zeros(sum(sizes), dtype=torch.float64, device="cpu")
        self.passes, self.unknown, flat, largest = self.buffer.split(sizes)
        self.means, self.largest = flat.view(2, means), largest.view(ranks, maxima)
        self._starts: dict[Name, int] = {}
        at = {False: 0, True: 0}
        for name, column in columns.items():
            self._starts[name] = at[column.largest]
            at[column.largest] += column.heads

    def fill(self, mine: _Mine, rank: int) -> None:
        """Write the values of this rank; all others are 0, and are added by the all-reduce."""
        self.passes[rank] = mine.code
        self.unknown[rank] = any(name not in self.columns for name in mine.columns)
        self.largest[rank] = -math.inf
        for name, first, values in mine.pieces():
            if name in self.columns:
                start = self._starts[name] + first
                target = self.largest[rank : rank + 1] if self.columns[name].largest else self.means
                target[:, start : start + values.shape[1]] = values

    def reduced(self, number: int) -> Reduced:
        """Return the values of all columns."""
        means = self.means[0] / self.means[1]  # 0 / 0 = NaN: no rank has a row
        largest = self.largest.amax(0)
        largest = largest.masked_fill(largest == -math.inf, math.nan)
        values: list[Tensor] = []
        for name, column in self.columns.items():
            start = self._starts[name]
            values.append((largest if column.largest else means)[start : start + column.heads])
        heads = [column.heads for column in self.columns.values()]
        return Reduced(number, [*self.columns], heads, torch.cat(values) if values else self.buffer.new_empty(0))


class _Pending:
    """An all-reduce under way; where values come from a device, a thread waits for them and then starts it."""

    def __init__(self, ranks: Ranks, mine: _Mine, columns: Mapping[Name, Column]) -> None:
        self.mine = mine
        self._ranks = ranks
        self._sums = _Sums(columns, ranks.size)
        self._work: Any = None
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if mine.arrived is None:
            self._start()
        else:
            self._thread = threading.Thread(target=self._start_once_arrived, daemon=True)
            self._thread.start()

    def _start(self) -> None:
        import torch.distributed as dist

        self._sums.fill(self.mine, self._ranks.rank)
        self._work = dist.all_reduce(self._sums.buffer, group=self._ranks.group, async_op=True)

    def _start_once_arrived(self) -> None:
        try:
            self.mine.arrived.synchronize()
            self._start()
        except Exception as error:  # raised where it is waited for
            self._error = error

    def wait(self) -> _Sums:
        """Return the sums over all ranks.

        Raises:
            RuntimeError: a rank does not take part.
        """
        if self._thread is not None:
            self._thread.join()
        try:
            if self._error is not None:
                raise self._error
            self._ranks.finish(self._work)
        except RuntimeError as error:
            if (left := self._ranks.left()) is not None:
                raise WatchError(
                    f"watch: rank {left} has ended its watch, and rank {self._ranks.names[self._ranks.rank]} is in "
                    f"{_pass_in_words(self.mine.code)}; {_SAME_PASSES}"
                ) from error
            raise self._ranks.failure("watch", error) from error
        return self._sums


def _pass_in_words(code: int) -> str:
    return f"pass {code // 2 + 1} ({'training' if code % 2 else 'evaluation'} mode)"

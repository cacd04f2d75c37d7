"""What the earlier calls of a watch have shown of the next ones: that they were read right, and how to measure them."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import replace
from typing import Protocol
from weakref import WeakKeyDictionary

from torch import Tensor

from headscope._intercept import InterceptedCall, Kind, Like, ReadMask, WatchError, error_of, is_cross
from headscope._support.bounded import BoundedTable
from headscope.watching._chosen_heads import ChosenHeads
from headscope.watching._known_modules import Described, KnownModules, repeated_options
from headscope.watching._options import Options
from headscope.watching._problems import check_rule

_MOST_ALIKE = 64  # calls of different sizes or chosen heads

_Table = BoundedTable[Hashable, tuple[Described, bool]]
"""Call and chosen heads, or call -> a description, and whether the layer that made it has an output to compare."""


class Kinds(Protocol):
    """Knows the kinds of layers."""

    def _kind(self, name: str) -> Kind | None: ...


class EarlierCalls:
    """The calls of a watch so far.

    Args:
        known: what earlier watches have shown of the modules.
        chosen: the modules that are recorded.
        chosen_heads: the heads whose weights are retained.
        options: those of the watch.
        kinds: knows those of the layers so far.
    """

    def __init__(
        self, known: KnownModules, chosen: Collection[str], chosen_heads: ChosenHeads, options: Options, kinds: Kinds
    ) -> None:
        self._known = known
        self._chosen = chosen
        self._chosen_heads = chosen_heads
        self._kinds = kinds
        self._options = repeated_options(options)
        self._errors: dict[str, tuple[Tensor, float]] = {}
        self._equal: set[str] = set()  # layers whose outputs an earlier watch has compared
        self._named_cross: dict[str, bool] = {}
        self._alike: _Table = BoundedTable(_MOST_ALIKE)
        self._under_mask: WeakKeyDictionary[ReadMask, _Table] = WeakKeyDictionary()  # until the end of the pass

    def compare(self, name: str, layer: str, call: InterceptedCall) -> None:
        """Compare a layer's first output with the output of its call by definition.

        If the call was misinterpreted (a model with its own rule), the result is an error instead of a wrong statistic.
        On a device it is read when the watch ends, so no step waits for it. Another watch does not compare a like call
        of the same module, with the same weights, again.
        """
        if layer in self._errors or layer in self._equal:
            return
        if self._known.was_compared(name, layer, call):
            self._equal.add(layer)
            return
        error = error_of(call if call.own is None else call.own())
        if error is None:
            return
        self._errors[layer] = error
        if error[0].device.type == "cpu":
            self._judge(layer)
            self._known.note_compared(name, layer, call)

    def repeated(self, name: str, layer: str, like: Like | None) -> Described | None:
        """Return the description of an earlier call that was like this one, and compared; None = there was none."""
        if self._options is None or like is None or name not in self._chosen:
            return None
        heads = self._chosen_heads.heads(name)
        found = None if like.mask is not None else self._known.repeated(name, (layer, like.parts, heads, self._options))
        if found is None:
            return self._of_another_layer(name, layer, like, heads)
        if layer not in self._errors and layer not in self._equal:
            if found[1] is None or found[1] != self._known.weights_of(name):
                return None
            self._equal.add(layer)
        return found[0]

    def _of_another_layer(self, name: str, layer: str, like: Like, heads: tuple[int, ...]) -> Described | None:
        """Return the description of a call like this one that another layer made; None = there was none.

        So a step of a text that is generated is described once, and not for each layer. The layer has to have been
        compared, and its kind has to be that of the other one, as in ``kind_of_call``.
        """
        table = self._table(like)
        found, is_compared = table.get((like.parts, heads), (None, False))
        if found is None and heads:
            found, is_compared = self._for_heads(table, like, heads)
        if found is None or (is_compared and layer not in self._errors and layer not in self._equal):
            return None
        before = self._kinds._kind(layer)
        if name not in self._named_cross:
            self._named_cross[name] = is_cross(name)
        kind = like.kind or ("cross" if self._named_cross[name] else "self" if before == "self" else None)
        return replace(found, origin=None) if before is not None and kind == found.kind else None

    def _for_heads(self, table: _Table, like: Like, heads: tuple[int, ...]) -> tuple[Described | None, bool]:
        """Return the description of a call like this one with other chosen heads, for these heads."""
        found, is_compared = table.get(like.parts, (None, False))
        if found is None or found.again is None:
            return None, False
        again = found.again.with_heads(self._chosen_heads.options_of(heads))
        if again is None:
            return None, False
        return table.add((like.parts, heads), (replace(found, again=again), is_compared))

    def remember(self, name: str, layer: str, like: Like, described: Described, call: InterceptedCall) -> None:
        """Remember the description of a call for others that are like it, if nothing else determines it."""
        is_compared = call.out is not None or call.own is not None
        if is_compared and layer not in self._errors and layer not in self._equal:
            return
        if self._options is None or described.again is None or call.v is None:
            return
        if not call.q.shape[0] == call.k.shape[0] == call.v.shape[0]:
            return
        heads, has_equal_lengths = self._chosen_heads.heads(name), call.q.shape[-2] == call.k.shape[-2]
        table = self._table(like)
        table.add((like.parts, heads), (described, is_compared))
        if heads:
            table.add(like.parts, (described, is_compared))
        # a growing cache never has these sizes again, and a mask is that of one pass
        if like.mask is None and (has_equal_lengths or (call.kind is not None and described.kind == "cross")):
            self._known.remember(name, (layer, like.parts, heads, self._options), described)

    def _table(self, like: Like) -> _Table:
        return self._alike if like.mask is None else self._under_mask.setdefault(like.mask, BoundedTable(_MOST_ALIKE))

    def judge(self) -> None:
        """Raise if an output differs from that of its call by definition.

        Raises:
            WatchError: one does; the message names the layer.
        """
        for layer in self._errors:
            try:
                self._judge(layer)
            except WatchError as problem:
                raise WatchError(f"watch: layer {layer}: {problem}") from problem

    def _judge(self, layer: str) -> None:
        error, most = self._errors[layer]
        check_rule(float(error), most)

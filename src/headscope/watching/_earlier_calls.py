"""What the earlier calls of a watch have shown of the next ones: that they were read right, and how to measure them."""

from __future__ import annotations

from collections.abc import Collection, Hashable

from torch import Tensor

from headscope._intercept import InterceptedCall, WatchError, error_of
from headscope.watching._chosen_heads import ChosenHeads
from headscope.watching._known_modules import Described, KnownModules, repeated_options
from headscope.watching._options import Options
from headscope.watching._problems import check_rule


class EarlierCalls:
    """The calls of a watch so far.

    Args:
        known: what earlier watches have shown of the modules.
        chosen: the modules that are recorded.
        chosen_heads: the heads whose weights are retained.
        options: those of the watch.
    """

    def __init__(
        self, known: KnownModules, chosen: Collection[str], chosen_heads: ChosenHeads, options: Options
    ) -> None:
        self._known = known
        self._chosen = chosen
        self._chosen_heads = chosen_heads
        self._options = repeated_options(options)
        self._errors: dict[str, tuple[Tensor, float]] = {}
        self._equal: set[str] = set()  # layers whose outputs an earlier watch has compared

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

    def repeated(self, name: str, layer: str, like: Hashable | None) -> Described | None:
        """Return the description of an earlier call that was like this one, and compared; None = there was none."""
        if self._options is None or name not in self._chosen:
            return None
        found = self._known.repeated(name, (layer, like, self._chosen_heads.heads(name), self._options))
        if found is None:
            return None
        if layer not in self._errors and layer not in self._equal:
            if found[1] is None or found[1] != self._known.weights_of(name):
                return None
            self._equal.add(layer)
        return found[0]

    def remember(self, name: str, layer: str, like: Hashable, described: Described, call: InterceptedCall) -> None:
        """Remember the description of a call for others that are like it, if nothing else determines it."""
        compared = layer in self._errors or layer in self._equal or (call.out is None and call.own is None)
        known = call.kind is not None or call.q.shape[-2] == call.k.shape[-2]  # whatever came before it
        if self._options is None or described.again is None or not compared or not known:
            return
        if call.v is not None and call.q.shape[0] == call.k.shape[0] == call.v.shape[0]:
            self._known.remember(name, (layer, like, self._chosen_heads.heads(name), self._options), described)

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

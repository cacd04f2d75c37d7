"""What earlier forward passes have shown of a model's modules, so that the next ones, of any watch, have less to do.

To follow every operation of a first forward pass costs as much as the pass of a small model; to observe the functions
that a small model of transformers calls, a third of it. What counts is that a module would run the same code: its
forward and hooks, its attributes that are numbers, texts or truth values, and the attention function of its config.
"""

from __future__ import annotations

import atexit
from collections.abc import Hashable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from headscope._intercept import (
    InterceptedCall,
    Kind,
    LayerOrigin,
    describe_other,
    enclosing_paths,
    is_attention,
)
from headscope._observe import Repetition, options_of
from headscope._support.bounded import BoundedTable
from headscope.watching._options import Options

_PLAIN = frozenset((bool, int, float, str))
_LIBRARIES = frozenset(("headscope", "transformers"))
_MOST_REPEATED = 4  # kinds of calls of a module; a longer text has its own


@dataclass(eq=False, slots=True)
class Described:
    """What a recording needs of a call in addition to its statistics.

    Attributes:
        kind: "self" or "cross".
        heads: the number of heads.
        widths: the head width of q and k, and that of v.
        again: measures calls that are like it; None: each has to be described.
        natively: whether headscope's native kernels attended.
        origin: that of the layer, in a watch of this model; None: not needed so far.
    """

    kind: Kind
    heads: int
    widths: tuple[int, int]
    again: Repetition | None
    natively: bool
    origin: tuple[ref[nn.Module], LayerOrigin] | None = None


@dataclass(eq=False, slots=True)
class _Known:
    """What is known of a module.

    Attributes:
        state: that of the module when it ran.
        is_calm: see ``KnownModules``.
        is_plain: see ``KnownModules``.
        compared: layer -> the kind of call, and the weights, with which its output was compared.
        repeated: layer, call and options -> the description of such calls, and the weights with which the output of one
            was compared.
    """

    state: tuple[Any, ...]
    is_calm: bool
    is_plain: bool
    compared: dict[str, Hashable] = field(default_factory=dict[str, Hashable])
    repeated: BoundedTable[Hashable, tuple[Described, Hashable]] = field(
        default_factory=lambda: BoundedTable[Hashable, tuple[Described, Hashable]](_MOST_REPEATED)
    )


_known: WeakKeyDictionary[nn.Module, _Known] = WeakKeyDictionary()
atexit.register(_known.clear)  # observations refer to the extension


class Ended(Protocol):
    """What is learned from: a forward pass that has ended.

    Attributes:
        ran: the modules that ran with a frame.
        observed, unrecorded, written: those that have attended.
        functions: those whose own code called functions that may be part of an attention.
    """

    ran: dict[str, None]
    observed: set[str]
    unrecorded: dict[str, str | None]
    written: set[str]
    functions: set[str]


class KnownModules:
    """The modules of a watched model of which an earlier forward pass has shown what they do.

    Attributes:
        followed: those whose operations were followed, and which have not written out an attention.
        calm: those of them whose own code does not call a function that may be part of an attention: their functions
            are not observed. Only modules of transformers and headscope count, and ``nn.Sequential``: they attend in
            the same way in each call. Others, torch's own among them, may begin to in a later one.
        plain: those of them that no attention is in, by name or by calls.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self._compared: dict[str, dict[str, Hashable]] = {}  # of modules in their first forward pass
        self.followed: set[str] = set()
        self.calm: set[str] = set()
        self.plain: set[str] = set()
        implementations: dict[int, Any] = {}
        for name, module in modules.items():
            known = _known.get(module)
            if known is not None and known.state == _state_of(module, implementations):
                self._add(name, known)

    def learn(self, ended: Ended, to_follow: Set[str]) -> None:
        """Learn from a forward pass.

        Args:
            ended: the forward pass.
            to_follow: the modules to follow in the next ones, too.
        """
        for name in ended.functions & self.calm:
            self.calm.discard(name)
            self.plain.discard(name)
            _known.pop(self._modules[name], None)
        new = ended.ran.keys() - self.followed - to_follow
        if not new:
            return
        attending = {*ended.observed, *ended.unrecorded, *ended.written, *ended.functions, *to_follow}
        for name, module in self._modules.items():
            if is_attention(name, module) or describe_other(module) is not None:
                attending.add(name)
        around = {path for name in attending for path in enclosing_paths(name)} | {next(iter(self._modules))}
        implementations: dict[int, Any] = {}
        for name in new:
            module = self._modules[name]
            is_calm = name not in ended.functions and _is_of_libraries(module)
            state, compared = _state_of(module, implementations), self._compared.pop(name, {})
            known = _Known(state, is_calm, is_calm and name not in around, compared)
            _known[module] = known
            self._add(name, known)

    def _add(self, name: str, known: _Known) -> None:
        self.followed.add(name)
        if known.is_calm:
            self.calm.add(name)
        if known.is_plain:
            self.plain.add(name)

    def was_compared(self, name: str, layer: str, call: InterceptedCall) -> bool:
        """Return whether a like call of an unchanged module was compared before; see ``Watch.compare``."""
        known = _known.get(self._modules[name]) if name in self.followed else None
        return known is not None and layer in known.compared and known.compared[layer] == self._kind(name, call)

    def note_compared(self, name: str, layer: str, call: InterceptedCall) -> None:
        """Note that the output of a call was compared with its definition, and equal."""
        kind = self._kind(name, call)
        known = _known.get(self._modules[name]) if name in self.followed else None
        if kind is not None:
            compared = self._compared.setdefault(name, {}) if known is None else known.compared
            compared[layer] = kind

    def repeated(self, name: str, key: Hashable) -> tuple[Described, Hashable] | None:
        """Return the description of an earlier call, and the weights with which its output was compared."""
        known = _known.get(self._modules[name]) if name in self.followed else None
        return None if known is None else known.repeated.get(key)

    def remember(self, name: str, key: Hashable, described: Described) -> None:
        """Remember the description of a call whose output was compared, for others that are like it."""
        known = _known.get(self._modules[name]) if name in self.followed else None
        if known is not None:
            known.repeated.add(key, (described, _weights_of(self._modules[name])))

    def weights_of(self, name: str) -> Hashable | None:
        """Return the parameters of a module and their versions; None: they have none, as in inference mode."""
        return _weights_of(self._modules[name])

    def _kind(self, name: str, call: InterceptedCall) -> Hashable:
        """Return what determines how a call is read: its options, sizes and weights; None = unknown."""
        weights = _weights_of(self._modules[name])
        present = (call.bias is None, call.sinks is None, call.lse is None, call.again is None, call.own is None)
        options = (call.scale, call.softcap, call.kind, call.beside, call.late, type(call.mask), *present)
        sizes = (call.q.shape, call.k.shape, None if call.out is None else call.out.shape, call.q.dtype, call.q.device)
        return None if weights is None else (options, sizes, weights)


def repeated_options(options: Options) -> Hashable | None:
    """Return the options of calls that are measured alike if they are like each other; None: there are others."""
    what = options.what
    tensors = (options.tokens, options.positions, what.tokens, what.selected, what.segments)
    if any(each is not None for each in tensors) or what.keep_qk or isinstance(what.rows, Tensor):
        return None
    return None if options.kinds or options.verify else (options.accelerate, options_of(what))


def _is_of_libraries(module: nn.Module) -> bool:
    kind = type(module)
    return kind is nn.Sequential or kind.__module__.partition(".")[0] in _LIBRARIES


def _state_of(module: nn.Module, implementations: dict[int, Any]) -> tuple[Any, ...]:
    """Return what determines the code that a module runs; ``implementations`` caches that of each configuration."""
    attributes = vars(module)
    plain = [(name, value) for name, value in attributes.items() if type(value) in _PLAIN]
    config: Any = attributes.get("config")  # of transformers; its attention function may change between watches
    implementation = None
    if config is not None:
        if id(config) not in implementations:
            implementations[id(config)] = getattr(config, "_attn_implementation", None)
        implementation = implementations[id(config)]
    after, before = attributes["_forward_hooks"], attributes["_forward_pre_hooks"]
    hooks = (*after, *before) if after or before else ()
    return attributes.get("forward", type(module).forward), plain, hooks, implementation


def _weights_of(module: nn.Module) -> tuple[tuple[int, int], ...] | None:
    """Return the parameters of a module and their versions; None: they have none, as in inference mode."""
    found: list[tuple[int, int]] = []
    waiting = [module]
    while waiting:
        each = waiting.pop()
        attributes = vars(each)
        for parameter in attributes["_parameters"].values():
            if parameter is not None:
                if parameter.is_inference():
                    return None
                found.append((id(parameter), parameter._version))
        if children := attributes["_modules"]:
            waiting += [child for child in children.values() if child is not None]
    return tuple(found)

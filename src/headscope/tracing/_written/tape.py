"""The tape: every operation of a forward pass, with the numbers that it used and made.

Each number has an id. Views, copies and joins keep the ids of the numbers that they move; every other operation makes
new ones. The ids of a storage lie in a second storage of the same shape, so views share them, and code that writes
into a part of a tensor changes them there. Where a number comes from is therefore known exactly, whatever the shapes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from headscope._provenance import FUSED_ATTENTION, define_fused_attention
from headscope._support.operation_mode import OperationMode
from headscope._support.torch_operations import PRODUCTS, is_composite, is_factory, is_in_place, is_view, name_of
from headscope.tracing._written.lines import Line, Places
from headscope.tracing._written.operations import INDEXED, MOVES

MOST_NUMBERS = 1 << 26  # of one forward pass; each takes some 20 bytes here, and 73 in ``Origins``
FUSED_LABEL = "scaled_dot_product_attention"


class TooLargeError(Exception):
    """The error of a forward pass with more numbers than a trace can follow."""


@dataclass(frozen=True, eq=False)
class Event:
    """An operation.

    Attributes:
        index: its number.
        name: that of the operation, without an underscore at the end.
        inputs: the ids of its tensors, in the order of its arguments.
        arguments: its arguments; in place of a tensor is its number among the inputs, as an ``At``.
        options: those of its arguments that have a name.
        outs: the ids of its results.
        start: the first of the ids that it made; 0 if it moved numbers only.
        size: how many it made.
        values: its first result.
        operands: of a product, the tensors that were multiplied; of a softmax, its input; of a scatter, its places.
        line: the line of code; None if it is torch's own.
        call: the number of the call in that code; operations of one call have the same.
        depends: whether it depends on the input.
        inside: the fused operation that it is part of; "" for none.
    """

    index: int
    name: str
    inputs: tuple[Tensor, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    outs: tuple[Tensor, ...]
    start: int
    size: int
    values: Tensor
    operands: tuple[Tensor, ...]
    line: Line | None
    call: int
    depends: bool = False
    inside: str = ""

    @property
    def out(self) -> Tensor:
        """The ids of the first result, in its shape."""
        return self.outs[0]

    @property
    def is_move(self) -> bool:
        """Whether it only moved numbers."""
        return self.start == 0


@dataclass(frozen=True)
class At:
    """The place of a tensor among the inputs of an event."""

    number: int


@dataclass(eq=False)
class _Shadow:
    """The ids of a storage, and whether any of its numbers depends on the input."""

    ids: Tensor
    depends: bool = False


class Tape(OperationMode):
    """Records the operations of this thread while it is on.

    Args:
        constants: tensors that do not depend on the input: parameters and buffers.
        inputs: those that are the input.
        own_files: the files of the traced code.
    """

    supports_higher_order_operators = True
    is_transparent = True  # see headscope._support.torch_state

    def __init__(self, constants: Iterable[Tensor], inputs: Sequence[Tensor], own_files: frozenset[str]) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.places = Places(own_files)
        self._shadows: dict[int, _Shadow] = {}
        self._starts: list[int] = [0]
        self._makers: list[Event | None] = [None]
        self._storages: list[Any] = []  # held, so that no other storage has the address of one
        self._count = 1
        self._inside = ""
        for name, tensors in (("constant", constants), ("input", inputs)):
            for x in tensors:
                if _is_recorded(x) and x.untyped_storage()._cdata not in self._shadows:  # parts of one buffer share it
                    self._add_outside(name, x)

    # ---------------------------------------------------------------- ids

    def ids(self, x: Tensor) -> Tensor:
        """Return the ids of the numbers of a tensor, in its shape; complex numbers have two, in one more axis."""
        shadow = self._shadows.get(x.untyped_storage()._cdata)
        if shadow is None:
            self._add_outside("outside", x)
            shadow = self._shadows[x.untyped_storage()._cdata]
        return _view(shadow.ids, x)

    def makers(self, ids: Tensor) -> list[Event]:
        """Return the events that made these numbers, in order; numbers of padding have none."""
        if not ids.numel():
            return []
        first, last = (bisect.bisect_right(self._starts, int(number)) - 1 for number in torch.aminmax(ids))
        places = [first]
        if last > first:
            starts = torch.tensor(self._starts[first : last + 1])
            indices = torch.bucketize(ids.flatten(), starts, right=True) - 1
            places = [first + place for place in torch.bincount(indices).nonzero().flatten().tolist()]
        return [event for place in places if (event := self._makers[place]) is not None]

    def values(self, ids: Tensor) -> Tensor:
        """Return the numbers with these ids in float64; 0 where nothing is known."""
        result = torch.zeros(ids.shape, dtype=torch.float64)
        makers = self.makers(ids)
        for event in makers:
            flat = event.values
            flat = torch.view_as_real(flat.resolve_conj()) if flat.is_complex() else flat
            flat = flat.detach().cpu().reshape(-1)
            if len(makers) == 1 and ids.numel() and int(ids.min()) >= event.start:
                return flat[ids - event.start].to(torch.float64)
            own = (ids >= event.start) & (ids < event.start + event.size)
            result[own] = flat[ids[own] - event.start].to(torch.float64)
        return result

    @property
    def count(self) -> int:
        """The number of ids, that of padding included."""
        return self._count

    def _create(self, x: Tensor) -> Tensor:
        """Return the ids of a tensor whose storage may be new."""
        storage = x.untyped_storage()
        if storage._cdata not in self._shadows:
            size = -(-storage.nbytes() // _width(x))
            if size > MOST_NUMBERS:
                raise TooLargeError
            self._shadows[storage._cdata] = _Shadow(torch.zeros(size, dtype=torch.long))
            self._storages.append(storage)
        return _view(self._shadows[storage._cdata].ids, x)

    def _allot(self, x: Tensor) -> tuple[Tensor, int, int]:
        """Give the numbers of a tensor new ids; return them, the first, and how many."""
        ids = self._create(x)
        start, size = self._count, ids.numel()
        if start + size > MOST_NUMBERS:
            raise TooLargeError
        self._count += size
        new = torch.arange(start, start + size).view(ids.shape)
        ids.copy_(new)
        return new, start, size

    def _add_outside(self, name: str, x: Tensor) -> None:
        """Record the storage of a tensor that no operation has made."""
        if not _is_recorded(x):
            return
        self._create(x)
        shadow = self._shadows[x.untyped_storage()._cdata]
        start, size = self._count, len(shadow.ids)
        if start + size > MOST_NUMBERS:
            raise TooLargeError
        self._count += size
        shadow.ids.copy_(torch.arange(start, start + size))
        shadow.depends = name == "input" or (name == "outside" and x.is_floating_point() and x.ndim > 1)
        whole = torch.as_strided(x.detach(), (size // (2 if x.is_complex() else 1),), (1,), 0)
        whole = whole if name == "constant" else whole.clone()
        ids = _view(shadow.ids, x).clone()
        self._append(
            Event(len(self.events), name, (), (), {}, (ids,), start, size, whole, (), None, 0, depends=shadow.depends)
        )

    def _append(self, event: Event) -> None:
        self.events.append(event)
        if event.size and event.start:
            self._starts.append(event.start)
            self._makers.append(event)

    # ---------------------------------------------------------------- operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        name = name_of(func)
        if name == FUSED_ATTENTION:
            return self._run_fused(func, args, kwargs)
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if name == "lift_fresh":
            self._add_outside("constant", args[0])
        tensors: list[Tensor] = []
        arguments = _placed(args, tensors)
        options = {key: _placed(value, tensors) for key, value in kwargs.items()}
        inputs = tuple(self.ids(x).clone() for x in tensors)
        copies = self._copy_operands(name, args)
        out = func(*args, **kwargs)
        outs = [x for x in (out if isinstance(out, (tuple, list)) else [out]) if _is_recorded(x)]
        if outs:
            self._record(func, name, args, kwargs, tensors, inputs, (arguments, options), outs, copies)
        return out

    def _record(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor],
        inputs: tuple[Tensor, ...], placed: tuple[Any, dict[str, Any]], outs: list[Tensor], copies: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        start = size = 0
        arguments, options = placed
        depends = any(self._shadows[x.untyped_storage()._cdata].depends for x in tensors) and not is_factory(name)
        shared = {x.untyped_storage()._cdata for x in tensors}
        shares = is_view(func) or outs[0].untyped_storage()._cdata in shared  # _unsafe_view, too
        if shares and not is_in_place(func):
            ids = [self.ids(x) for x in outs]
        elif (moved := self._move(func, name, args, kwargs, tensors, inputs, outs[0])) is not None:
            ids = [moved]
        elif name == "topk" and len(outs) == 2 and outs[0].dtype == tensors[0].dtype:
            ids = [self._select(inputs[0], args[2] if len(args) > 2 else -1, outs), self._allot_rest(outs[1])]
        else:
            first, start, size = self._allot(outs[0])
            ids = [first, *(self._allot_rest(x) for x in outs[1:])]
        place = self.places.current()
        for x in outs:
            shadow = self._shadows[x.untyped_storage()._cdata]
            shadow.depends = shadow.depends or depends
        values = outs[0].detach() if start == 0 else outs[0].detach().clone(memory_format=torch.contiguous_format)
        self._append(
            Event(
                len(self.events), name, inputs, arguments, options, tuple(x.clone() for x in ids), start, size, values,
                copies, place.line, place.call, depends, self._inside,
            )
        )  # fmt: skip

    def _select(self, own: Tensor, axis: int, outs: list[Tensor]) -> Tensor:
        """Write the ids of the largest numbers along an axis, whose places are the second result, and return them."""
        ids = self._create(outs[0])
        ids.copy_(own.gather(axis, outs[1].cpu()))
        return ids

    def _allot_rest(self, x: Tensor) -> Tensor:
        """Give a further result ids that no event has made."""
        ids = self._create(x)
        ids.zero_()
        return ids

    def _move(
        self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor],
        inputs: tuple[Tensor, ...], out: Tensor,
    ) -> Tensor | None:  # fmt: skip
        """Write the ids of a result whose numbers were moved, and return them; None if they are new."""
        if name == "copy" and len(inputs) == 2 and tensors[0].dtype == tensors[1].dtype:
            ids = self._create(out)
            ids.copy_(inputs[1].expand(ids.shape))
            return ids
        if name not in MOVES or not tensors or any(x.dtype != out.dtype for x in _moved(args)):
            return None
        if any(x.is_complex() for x in tensors) or self._is_looked_up(name, tensors):
            return None
        replaced = _with_ids(name, args, self.ids)
        options = {key: value for key, value in kwargs.items() if key != "dtype"}
        ids = self._create(out)
        ids.copy_(func(*replaced, **options))
        return ids

    def _is_looked_up(self, name: str, tensors: list[Tensor]) -> bool:
        """Return whether a move takes numbers that do not depend on the input from places that do: an embedding."""
        depend = [self._shadows[x.untyped_storage()._cdata].depends for x in tensors]
        return name in INDEXED and not depend[0] and any(depend[1:])

    def _copy_operands(self, name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        if name in PRODUCTS:
            return tuple(x.detach().clone() for x in PRODUCTS[name](args))
        if name == "scatter":
            return (args[2].detach().cpu().clone(),)
        return (args[0].detach().clone(),) if "softmax" in name else ()

    def _run_fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run torch's fused attention, and record its definition, whose last product has the fused result."""
        out, *rest = func(*args, **kwargs)
        self._inside = FUSED_LABEL
        try:
            with self:
                defined = define_fused_attention(args, kwargs)
        finally:
            self._inside = ""
        ids = self.ids(defined)
        self._create(out).copy_(ids)
        self._shadows[out.untyped_storage()._cdata].depends = True
        for event in self.makers(ids):
            event.values.view(-1)[ids.reshape(-1) - event.start] = out.detach().reshape(-1)
        return (out, *rest)


def _is_recorded(x: object) -> bool:
    """Return whether a tensor has numbers that can be followed."""
    return isinstance(x, Tensor) and x.layout is torch.strided and not x.is_nested and x.device.type != "meta"


def _width(x: Tensor) -> int:
    """Return the bytes of a real number of a tensor."""
    return x.element_size() // (2 if x.is_complex() else 1)


def _view(ids: Tensor, x: Tensor) -> Tensor:
    """Return the ids of a tensor from those of its storage."""
    if not x.is_complex():
        return ids.as_strided(x.size(), x.stride(), x.storage_offset())
    return ids.as_strided((*x.size(), 2), (*(2 * n for n in x.stride()), 1), 2 * x.storage_offset())


def _placed(value: Any, tensors: list[Tensor]) -> Any:
    """Return arguments with an ``At`` in place of each tensor, which is added to ``tensors``."""
    if _is_recorded(value):
        tensors.append(value)
        return At(len(tensors) - 1)
    if isinstance(value, (list, tuple)):
        return tuple(_placed(each, tensors) for each in value)
    return value


def _moved(args: tuple[Any, ...]) -> list[Tensor]:
    """Return the tensors whose numbers a move moves; not its indices."""
    first = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
    return [x for x in first if isinstance(x, Tensor)]


def _with_ids(name: str, args: tuple[Any, ...], ids: Any) -> tuple[Any, ...]:
    """Return the arguments of a move with ids in place of the numbers that it moves."""
    first = [ids(x) for x in args[0]] if isinstance(args[0], (list, tuple)) else ids(args[0])
    rest = args[1:]
    if name == "constant_pad_nd":
        rest = (*rest[:1], 0)
    return (first, *rest)

"""What is known of the storages of running code: the layout of their axes, and the role of their numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_batchedtensor, is_functorch_wrapped_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from headscope._dataflow.axes import (
    Axis,
    Fixed,
    Layout,
    Piece,
    Place,
    Source,
    fresh_axes,
    is_of,
    is_of_tokens,
    layout_of,
    resolve,
)
from headscope._dataflow.roles import PARAMETER, Role, Weights

SWEEP = 256  # entries between two searches for storages that are gone


@dataclass(slots=True)
class Entry:
    """A storage.

    Attributes:
        storage: a weak reference. While it is held, no other storage has the same address.
        strides, width, axes: those of the tensor that was assigned; the width in bytes.
        offset: the place of its first number in bytes.
        role: what its numbers are; None: nothing that matters here.
        fixed: what was selected along axes that it does not have.
        whole: the shape and the strides of the tensor that was assigned, and its axes; None: the layout has changed.
        known_layout: its pieces; None: they follow from the tensor that was assigned.
        parts: where the tensors come from that were written into parts of it.
        joined: the axes that run over these parts.
        views: the places of views whose axes all fit the layout, by shape, strides, offset and width in bytes; None:
            none has been read.
    """

    storage: StorageWeakRef
    strides: tuple[int, ...]
    width: int
    axes: list[Axis]
    offset: int
    role: Role | None = None
    fixed: Fixed = frozenset()
    whole: tuple[torch.Size, tuple[int, ...], list[Axis]] | None = None
    known_layout: Layout | None = None
    parts: Sequence[Place] = ()
    joined: Sequence[Source] = ()
    views: dict[tuple[torch.Size, tuple[int, ...], int, int], Place] | None = None

    @property
    def layout(self) -> Layout:
        """Its pieces, computed when a view is read."""
        if self.known_layout is None:
            self.known_layout = layout_of(self.strides, self.width, self.axes)
        return self.known_layout


class Table:
    """Entries by storage; views of a storage share one."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._entries: dict[int, Entry] = {}
        self._next_sweep = SWEEP
        self._parameters = [_unwrapped(x) for x in parameters if is_followed(x)]
        self._derived: dict[tuple[Source, object], Source] = {}
        for parameter in self._parameters:
            if self.find(parameter) is not None:  # one of a buffer's, as optimisers make them: its numbers are one axis
                size = parameter.untyped_storage().nbytes() // parameter.element_size()
                parameter = parameter.detach().as_strided((size,), (1,), 0)
            self.assign(parameter, fresh_axes(parameter, (), range(parameter.ndim)), PARAMETER)
        self._next_sweep += len(self._entries)

    def find(self, x: Tensor) -> Entry | None:
        """Return the entry of a tensor's storage, or None."""
        return self._entries.get(x.untyped_storage()._cdata)

    def role(self, x: Tensor) -> Role | None:
        """Return the role of a tensor's numbers."""
        entry = self.find(x)
        return None if entry is None else entry.role

    def is_projection(self, x: Tensor, scope: tuple[Any, ...]) -> bool:
        """Return whether the last axis of a tensor has the features of a projection, and is not one of tokens."""
        entry = self.find(x)
        if entry is None or entry.role is not None or x.ndim == 0:
            return False
        last = self.place_in(entry, x, scope).axes[-1]
        return is_of(last, "feature") and not is_of_tokens(last)

    def place(self, x: Tensor, scope: tuple[Any, ...]) -> Place:
        """Return where a tensor's numbers come from; one that comes from outside gets new axes."""
        entry = self.find(x)
        return self._outside(x, scope) if entry is None else self.place_in(entry, x, scope)

    def _outside(self, x: Tensor, scope: tuple[Any, ...]) -> Place:
        """Return where the numbers of a tensor come from that no followed operation has made."""
        if x.dtype in (torch.bfloat16, torch.float16) and self._note_cast(x):
            return self.place(x, scope)
        is_parameter = isinstance(x, torch.nn.Parameter)
        axes = fresh_axes(x, scope, range(x.ndim) if is_parameter else (-1,), outside=True)
        self.assign(x, axes, PARAMETER if is_parameter else None)
        return Place(axes, frozenset())

    def place_in(self, entry: Entry, x: Tensor, scope: tuple[Any, ...]) -> Place:
        """Return where the numbers of a tensor come from, whose storage has this entry."""
        whole, shape, strides, offset = entry.whole, x.shape, x.stride(), int(x.storage_offset()) * x.element_size()
        if whole is not None and offset == entry.offset and shape == whole[0] and strides == whole[1]:
            return Place(whole[2], entry.fixed)
        view = shape, strides, offset, x.element_size()
        if entry.views is None:
            entry.views = {}
        place = entry.views.get(view)
        if place is None:
            place, fits = resolve(x, entry.layout, entry.offset, scope)
            place = Place(place.axes, place.fixed | entry.fixed) if entry.fixed else place
            if fits:
                entry.views[view] = place
        return place

    def axes(self, x: Tensor, scope: tuple[Any, ...]) -> list[Axis]:
        """Return the axes of a tensor; one that comes from outside gets new ones."""
        return self.place(x, scope).axes

    def assign(self, x: Tensor, axes: Sequence[Axis], role: Role | None = None, fixed: Fixed = frozenset()) -> Entry:
        """Note the axes and the role of a tensor that an operation has made; return its entry."""
        storage, strides, width = x.untyped_storage(), x.stride(), x.element_size()
        own = list(axes)
        whole = None if 0 in strides else (x.shape, strides, own)
        offset = int(x.storage_offset()) * width
        entry = Entry(StorageWeakRef(storage), strides, width, own, offset, role, fixed, whole)
        self._entries[storage._cdata] = entry
        if len(self._entries) > self._next_sweep:
            self.sweep()
        return entry

    def _note_cast(self, x: Tensor) -> bool:
        """Return whether a tensor is a parameter that autocast has rounded earlier; if so, note it."""
        size = x.untyped_storage().nbytes() // x.element_size()
        for parameter in self._parameters:
            if parameter.numel() != size or parameter.dtype == x.dtype or parameter.device != x.device:
                continue
            whole = x.detach().as_strided(parameter.shape, parameter.stride(), 0)
            if torch.equal(whole, parameter.detach().to(x.dtype)):
                self.assign(whole, fresh_axes(parameter, (), range(parameter.ndim)), PARAMETER)
                return True
        return False

    def derive(self, axis: Axis, key: object, scope: tuple[Any, ...]) -> Axis:
        """Return an axis of the same pieces along other sources, which are the same for the same axis and key.

        The rows of a product are not those of its factor, but those of a second product of this factor.
        """
        return tuple(
            Piece(None if piece.source is None else self._derive(piece.source, key, scope), *piece[1:])
            for piece in axis
        )

    def _derive(self, source: Source, key: object, scope: tuple[Any, ...]) -> Source:
        known = self._derived.get((source, key))
        if known is None:
            scope = source.scope if source.kind == "feature" and source.scope else scope
            known = Source(source.kind, scope, False, source.projected, places=source.places)
            self._derived[source, key] = known
        return known

    def softmaxes(self) -> set[int]:
        """Return the ids of the softmaxes that the roles of living storages hold."""
        return {
            id(entry.role.softmax)
            for entry in self._entries.values()
            if isinstance(entry.role, Weights) and not entry.storage.expired()
        }

    def sweep(self) -> None:
        """Forget storages that are gone, with the tensors that their roles hold."""
        self._entries = {at: entry for at, entry in self._entries.items() if not entry.storage.expired()}
        self._next_sweep = len(self._entries) + SWEEP


def _unwrapped(x: Tensor) -> Tensor:
    """Return the tensor beneath those of torch.func, which have no storage."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def are_of_several_models(parameters: Iterable[Tensor]) -> bool:
    """Return whether parameters are those of several models at once, by ``torch.func.vmap``."""
    for x in parameters:
        while is_functorch_wrapped_tensor(x):
            if is_batchedtensor(x):
                return True
            x = get_unwrapped(x)
    return False


_PLAIN = {Tensor, torch.nn.Parameter}


def is_followed(x: object) -> bool:
    """Return whether a tensor can be followed: a plain, dense one."""
    return (
        isinstance(x, Tensor) and type(x) in _PLAIN and x.layout is torch.strided and not x.is_nested and not x.is_meta
    )

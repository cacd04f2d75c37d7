"""What is known of the storages of running code: the layout of their axes, and the role of their numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from headscope._dataflow.axes import Axis, Layout, fresh_axes, layout_of, resolve
from headscope._dataflow.roles import PARAMETER, Role

SWEEP = 256  # entries between two searches for storages that are gone


@dataclass
class Entry:
    """A storage.

    Attributes:
        storage: a weak reference. While it is held, no other storage has the same address.
        layout: its axes.
        role: what its numbers are; None: nothing that matters here.
    """

    storage: StorageWeakRef
    layout: Layout
    role: Role | None = None


class Table:
    """Entries by storage; views of a storage share one."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._entries: dict[int, Entry] = {}
        self._next_sweep = SWEEP
        for parameter in parameters:
            if is_followed(parameter):
                self.assign(parameter, fresh_axes(parameter, (), range(parameter.ndim)), PARAMETER)
        self._next_sweep += len(self._entries)

    def find(self, x: Tensor) -> Entry | None:
        """Return the entry of a tensor's storage, or None."""
        return self._entries.get(x.untyped_storage()._cdata)

    def role(self, x: Tensor) -> Role | None:
        """Return the role of a tensor's numbers."""
        entry = self.find(x)
        return None if entry is None else entry.role

    def axes(self, x: Tensor, scope: tuple[Any, ...]) -> list[Axis]:
        """Return the axes of a tensor; one that comes from outside gets new ones."""
        entry = self.find(x)
        if entry is None:
            is_parameter = isinstance(x, torch.nn.Parameter)
            axes = fresh_axes(x, scope, range(x.ndim) if is_parameter else (-1,))
            self.assign(x, axes, PARAMETER if is_parameter else None)
            return axes
        return resolve(x, entry.layout, scope)

    def assign(self, x: Tensor, axes: Sequence[Axis], role: Role | None = None) -> None:
        """Note the axes and the role of a tensor that an operation has made."""
        storage = x.untyped_storage()
        self._entries[storage._cdata] = Entry(StorageWeakRef(storage), layout_of(x, axes), role)
        if len(self._entries) > self._next_sweep:
            self.sweep()

    def sweep(self) -> None:
        """Forget storages that are gone, with the tensors that their roles hold."""
        self._entries = {at: entry for at, entry in self._entries.items() if not entry.storage.expired()}
        self._next_sweep = len(self._entries) + SWEEP


def is_followed(x: object) -> bool:
    """Return whether a tensor can be followed: a plain, dense one."""
    return (
        isinstance(x, Tensor)
        and type(x) in (Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and not x.is_nested
        and x.device.type != "meta"
    )

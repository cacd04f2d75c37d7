"""The mode under which running code is followed: every operation beneath autograd, in whatever way it was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from headscope._dataflow import operands
from headscope._dataflow.attention import WrittenAttention
from headscope._dataflow.axes import Axis, fresh_axes, is_of
from headscope._dataflow.elementwise import combined_axes, combined_role
from headscope._dataflow.moves import moved_axes, written_layout
from headscope._dataflow.products import Completion, multiply
from headscope._dataflow.roles import (
    NOISE,
    PARAMETER,
    Exponentials,
    HeadOutput,
    Role,
    RowValue,
    Scores,
    Softmax,
    Sums,
    Weights,
)
from headscope._dataflow.table import Table, is_followed
from headscope._support.torch_operations import PRODUCTS, is_composite

MOST_WAITING = 64  # softmaxes that wait for values, with their scores


class Follower(TorchDispatchMode):
    """Finds attention in the operations of this thread while it is on, and reports it.

    Args:
        parameters: those of the model: a product with one of them is a projection.
        scope: returns what encloses the operation that runs, the outermost first.
        is_paused: returns whether operations are not to be followed now.
        report: is called with each attention, and its number.
        joined: is called with the numbers of attentions whose outputs are concatenated, in their order.
    """

    supports_higher_order_operators = True
    is_transparent = True  # see headscope._support.torch_state

    def __init__(
        self,
        parameters: Sequence[Tensor],
        scope: Callable[[], tuple[Any, ...]],
        is_paused: Callable[[], bool],
        report: Callable[[WrittenAttention, int], None],
        joined: Callable[[list[int]], None],
    ) -> None:
        super().__init__()
        self.table = Table(parameters)
        self.scope = scope
        self._is_paused = is_paused
        self._report = report
        self._joined = joined
        self._waiting: list[Softmax] = []
        self._count = 0
        self.completions = 0  # products of weights with values, those of weights that were reported before included

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused() or not isinstance(func, OpOverload):  # a higher-order operator attends as a whole
            return func(*args, **kwargs)
        if is_composite(func):
            with self:
                return func.decompose(*args, **kwargs)
        if operands.is_view(func):
            return self._view(func, args, kwargs)
        name = operands.name_of(func)
        before = [self.table.axes(x, self.scope()) for x in args[:1]] if name == "copy" else []
        out = func(*args, **kwargs)
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if isinstance(first, Tensor) and is_followed(first):
            self._note(name, func, first, args, kwargs, before)
        return out

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled functions stay compiled."""
        return True

    def drop(self) -> None:
        """Let go of all tensors."""
        for softmax in self._waiting:
            softmax.scores = None
        self._waiting.clear()

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for x in args[:1]:
            if is_followed(x):
                self.table.axes(x, self.scope())  # what comes from outside has its axes before it is reshaped
        return func(*args, **kwargs)

    def _note(
        self, name: str, func: Any, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], before: list[list[Axis]]
    ) -> None:
        if name in PRODUCTS:
            self._note_product(name, out, args)
        elif name in ("_softmax", "_safe_softmax", "_log_softmax"):
            self._note_softmax(name, out, args)
        elif name in ("sum", "amax", "max", "logsumexp"):
            self._note_reduction(name, out, args)
        elif name == "bernoulli":
            self.table.assign(out, self.table.axes(out, self.scope()), NOISE)
        elif name == "native_dropout":
            self._note_dropout(out, args)
        elif name == "copy":
            self._note_write(out, args, before)
        elif name in operands.MOVES:
            self._note_move(name, out, args)
        elif operands.is_of_images(func) and out.ndim > 2:
            self.table.assign(out, fresh_axes(out, self.scope(), (1,)))
        elif operands.is_elementwise(func):
            self._note_elementwise(name, out, args, kwargs)
        elif operands.is_in_place(func):
            self.table.assign(out, self.table.axes(out, self.scope()))
        elif (tensors := operands.followed_tensors(args, kwargs)) and all(
            self.table.role(x) == PARAMETER for x in tensors
        ):
            self.table.assign(out, fresh_axes(out, self.scope(), range(out.ndim)), PARAMETER)

    def _note_product(self, name: str, out: Tensor, args: tuple[Any, ...]) -> None:
        left, right = PRODUCTS[name](args)
        if not is_followed(left) or not is_followed(right):
            return
        result = multiply(self.table, left, right, out, self.scope())
        role = result.role
        self.completions += result.attends
        if result.completion is not None:
            role = self._take(result.completion)
        self.table.assign(out, result.axes, role)

    def _take(self, completion: Completion) -> HeadOutput:
        """Report an attention whose last product has just been computed."""
        self._count += 1
        self._forget(completion.softmax)
        self.table.sweep()
        self._report(completion.attention, self._count)
        return HeadOutput(self._count)

    def _note_softmax(self, name: str, out: Tensor, args: tuple[Any, ...]) -> None:
        x, axis = args[0], args[1] % max(args[0].ndim, 1)
        role = self.table.role(x)
        axes = self.table.axes(x, self.scope())
        new_role: Role | None = None
        if x.untyped_storage()._cdata == out.untyped_storage()._cdata:
            x = out.detach().log()  # the softmax has overwritten its input
        if isinstance(role, Scores):
            if name == "_log_softmax":
                new_role = Scores(role.product, x if role.unshifted is None else role.unshifted, axis)
            else:
                new_role = self._softmax(role, x, out, axes, axis)
        self.table.assign(out, axes, new_role)

    def _softmax(self, role: Scores, scores: Tensor, weights: Tensor, axes: list[Axis], axis: int) -> Weights:
        """Return the role of the result of a softmax, which waits for values."""
        unshifted = scores if role.unshifted is None or role.unshifted.shape != weights.shape else role.unshifted
        return self._wait(Softmax(role.product, unshifted, axes, int(weights.storage_offset()), axis, self.scope()))

    def _wait(self, softmax: Softmax) -> Weights:
        self._waiting.append(softmax)
        for old in self._waiting[:-MOST_WAITING]:
            old.scores = None
        del self._waiting[:-MOST_WAITING]
        return Weights(softmax)

    def _note_reduction(self, name: str, out: Tensor, args: tuple[Any, ...]) -> None:
        x = args[0]
        role = self.table.role(x) if is_followed(x) else None
        axes = [args[1]] if len(args) > 1 and isinstance(args[1], int) else args[1] if len(args) > 1 else []
        if not isinstance(axes, (list, tuple)) or len(axes) != 1:
            return
        axis = axes[0] % x.ndim
        new_role: Role | None = None
        if isinstance(role, Scores) and name != "sum":
            new_role = RowValue(x, axis if name == "logsumexp" else None)
        elif isinstance(role, Exponentials) and name == "sum":
            new_role = Sums(role.product, axis)
        if new_role is not None:
            self.table.assign(out, fresh_axes(out, self.scope()), new_role)

    def _note_dropout(self, out: Tensor, args: tuple[Any, ...]) -> None:
        role = self.table.role(args[0])
        axes = self.table.axes(args[0], self.scope())
        self.table.assign(out, axes, Weights(role.softmax, role.changed, True) if isinstance(role, Weights) else role)

    def _note_write(self, out: Tensor, args: tuple[Any, ...], before: list[list[Axis]]) -> None:
        """Note that a tensor was written into another, or into a part of one."""
        source = args[1]
        if not is_followed(source) or source.ndim > out.ndim:
            return
        role, scope = self.table.role(source), self.scope()
        axes = combined_axes(self.table, out, [source], scope)
        if out.numel() * out.element_size() == out.untyped_storage().nbytes():
            self.table.assign(out, axes, role)
            return
        entry = self.table.find(out)
        if entry is None or not isinstance(role, (Scores, Weights, HeadOutput)):
            return
        if isinstance(role, HeadOutput) and isinstance(entry.role, HeadOutput):
            self._joined([entry.role.number, role.number])
        if isinstance(role, Weights):
            entry.role = None  # a part of the weights of several softmaxes
            return
        entry.layout = written_layout(entry.layout, out, before[0], axes, scope)
        entry.role = role

    def _note_move(self, name: str, out: Tensor, args: tuple[Any, ...]) -> None:
        parts: list[Tensor] = [
            x for x in (args[0] if isinstance(args[0], (list, tuple)) else args[:1]) if is_followed(x)
        ]
        if not parts or (name == "index" and sum(x is not None for x in args[1]) != 1):
            return
        known = [x for x in parts if self.table.find(x) is not None]
        x = max(reversed(known), key=self._rank, default=parts[-1])
        axes = moved_axes(name, x, self.table.axes(x, self.scope()), out, args, self.scope())
        role = self._role_of_parts(name, x, axes, parts, out, args)
        numbers = [each.number for part in parts if isinstance(each := self.table.role(part), HeadOutput)]
        if isinstance(role, HeadOutput) and len(parts) > 1:
            if len(numbers) == len(parts):
                self._joined(numbers)
            role = None
        if axes is not None:
            self.table.assign(out, axes, role)

    def _role_of_parts(
        self, name: str, x: Tensor, axes: list[Axis] | None, parts: Sequence[Tensor], out: Tensor, args: tuple[Any, ...]
    ) -> Role | None:
        """Return the role of a result of a move; weights that are joined have joined scores."""
        role = self.table.role(x)
        if not isinstance(role, Weights):
            return role
        softmax = role.softmax
        if len(parts) == 1:
            return role if out.numel() == x.numel() else None
        roles = [each for part in parts if isinstance(each := self.table.role(part), Weights)]
        scores = [each.softmax.scores for each in roles if each.softmax.scores is not None]
        whole = all(part.shape == each.shape for part, each in zip(parts, scores, strict=False))
        at = (args[1] if len(args) > 1 else 0) % out.ndim
        if axes is None or len(scores) != len(parts) or not whole or (name == "cat" and at == softmax.axis):
            return None
        joined = torch.cat(scores, at) if name == "cat" else torch.stack(scores, at)
        axis = softmax.axis + (name == "stack" and at <= softmax.axis)
        for each in roles:
            self._forget(each.softmax)
        return self._wait(Softmax(softmax.product, joined, axes, int(out.storage_offset()), axis, softmax.scope))

    def _forget(self, softmax: Softmax) -> None:
        softmax.scores = None
        self._waiting = [each for each in self._waiting if each is not softmax]

    def _rank(self, x: Tensor) -> tuple[bool, bool, int, int]:
        """Return how much of an argument is known: the keys of earlier steps, from outside, say less than new ones."""
        role = self.table.role(x)
        features = sum(is_of(axis, "feature") for axis in self.table.axes(x, self.scope()))
        return role != PARAMETER, role is not None, features, x.numel()

    def _note_elementwise(self, name: str, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = operands.followed_tensors(args, kwargs)
        if not any(self.table.find(x) is not None for x in tensors):
            return
        roles = [self.table.role(x) for x in tensors]
        numbers = [x for x in args if isinstance(x, (int, float)) and not isinstance(x, bool)]
        role = combined_role(name, out, tensors, roles, bool(numbers))
        axes = combined_axes(self.table, out, tensors, self.scope())
        if isinstance(role, tuple):  # the exponentials of scores, divided by their sums
            exponentials, axis = role
            role = self._softmax(Scores(exponentials.product), self._logits(exponentials, out), out, axes, axis)
        self.table.assign(out, axes, role)

    @staticmethod
    def _logits(exponentials: Exponentials, weights: Tensor) -> Tensor:
        """Return scores whose softmax these weights are: the code's own, unless it has changed their exponentials."""
        if exponentials.changed or exponentials.scores.shape != weights.shape:
            return weights.detach().log()
        return exponentials.scores

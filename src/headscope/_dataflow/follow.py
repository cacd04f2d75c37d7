"""The mode under which running code is followed: every operation beneath autograd, in whatever way it was written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef

from headscope._dataflow import operands
from headscope._dataflow.attention import WrittenAttention
from headscope._dataflow.axes import Axis, Place, fresh_axes, fresh_axis, is_of, sources
from headscope._dataflow.completion import enclosing, matches_softmax
from headscope._dataflow.elementwise import combined_place, combined_role
from headscope._dataflow.joining import joined_product
from headscope._dataflow.moves import joined_axes, moved_axes, note_part
from headscope._dataflow.operands import Operation
from headscope._dataflow.products import Result, attend_one_key, multiply
from headscope._dataflow.roles import NOISE, PARAMETER, HeadOutput, Lost, Product, Role, Scores, Softmax, Weights
from headscope._dataflow.table import Table, is_followed
from headscope._support.operation_mode import OperationMode
from headscope._support.torch_operations import PRODUCTS

MOST_WAITING = 64  # softmaxes that wait for values, with their scores


class Follower(OperationMode):
    """Finds attention in the operations of this thread while it is on, and reports it.

    Args:
        parameters: those of the model: a product with one of them is a projection.
        scope: returns what encloses the operation that runs, the outermost first.
        is_paused: returns whether operations are not to be followed now.
        report: is called with each attention, and its number.
        refuse: is called with what encloses an attention that cannot be recorded, and its first product.
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
        refuse: Callable[[tuple[Any, ...], Product], None],
        joined: Callable[[list[int], int | None], None],
    ) -> None:
        super().__init__()
        self.table = Table(parameters)
        self.scope = scope
        self._is_paused = is_paused
        self._report = report
        self._refuse = refuse
        self._joined = joined
        self._waiting: list[Softmax] = []
        self._count = 0
        self.is_running = False  # an operation, whose result has not been noted yet
        self.later: Callable[[], None] | None = None  # what is done when it has been
        self.completions = 0  # products of weights with values, those of weights that were reported before included

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused() or not isinstance(func, OpOverload):  # a higher-order operator attends as a whole
            return func(*args, **kwargs)
        operation = operands.describe(func)
        if operation.is_composite:
            with self:
                return func.decompose(*args, **kwargs)
        if operation.is_view:
            return self._view(func, args, kwargs)
        name, writes = operation.name, operation.writes
        before = [self.table.place(x, self.scope()) for x in args[:1]] if name == "copy" else []
        self.is_running = True
        try:
            out = func(*args, **kwargs)
        finally:
            self.is_running = False
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if writes:
            self._note_overwritten([first, *args[:1]])
        if isinstance(first, Tensor) and is_followed(first):
            if writes and first.numel() * first.element_size() != first.untyped_storage().nbytes():
                self._note_partial(name, first, args, before)
            else:
                self._note(operation, first, args, kwargs)
        later, self.later = self.later, None
        if later is not None:
            later()
        return out

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled functions stay compiled."""
        return True

    def drop(self) -> None:
        """Let go of all tensors."""
        for softmax in self._waiting:
            self._drop_scores(softmax)
        self._waiting.clear()

    def _drop_scores(self, softmax: Softmax) -> None:
        """Let go of scores; what was multiplied of a part of their softmax is not recorded."""
        if softmax.parts and softmax.scores is not None:
            self._refuse(enclosing([softmax.product.scope, softmax.scope]), softmax.product)
        softmax.scores = None

    def _drop_expired(self) -> None:
        """Let go of the scores of softmaxes that no tensor holds any more."""
        if not any(softmax.storage.expired() for softmax in self._waiting):
            return
        self.table.sweep()
        used = self.table.softmaxes()
        for softmax in self._waiting:
            if id(softmax) not in used:
                self._drop_scores(softmax)
        self._waiting = [softmax for softmax in self._waiting if softmax.scores is not None]

    def _view(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for x in args[:1]:
            if is_followed(x) and self.table.find(x) is None:
                self.table.axes(x, self.scope())  # what comes from outside has its axes before it is reshaped
        return func(*args, **kwargs)

    def _note_overwritten(self, tensors: Sequence[object]) -> None:
        """Let go of scores whose storage was written into."""
        for x in tensors:
            for each in x if isinstance(x, (tuple, list)) else (x,):
                if not isinstance(each, Tensor):
                    continue
                address = each.untyped_storage()._cdata
                for softmax in self._waiting:
                    if softmax.scores is not None and softmax.scores.untyped_storage()._cdata == address:
                        self._drop_scores(softmax)

    def _note(self, operation: Operation, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = operation.name
        if name in PRODUCTS:
            self._note_product(name, out, args)
        elif name in ("_softmax", "_safe_softmax", "_log_softmax"):
            self._note_softmax(name, out, args)
        elif name in operands.REDUCTIONS:
            self._note_reduction(name, out, args)
        elif name == "bernoulli":
            self.table.assign(out, self.table.axes(out, self.scope()), NOISE)
        elif name == "native_dropout":
            self._note_dropout(out, args)
        elif name == "copy":
            self._note_copy(out, args)
        elif name in operands.JOINS:
            self._note_join(name, out, args)
        elif name in operands.MOVES:
            self._note_move(name, out, args)
        elif name in operands.FILLS and self._can_fill(args, kwargs):
            self._note_fill(out, args[0])
        elif operation.is_of_images and out.ndim > 2:
            axes = fresh_axes(out, self.scope(), (1,))
            if is_followed(args[0]) and args[0].ndim == out.ndim and self.table.find(args[0]) is not None:
                axes[0] = self.table.axes(args[0], self.scope())[0]
            self.table.assign(out, axes, self._lost(args, kwargs))
        elif operation.is_elementwise:
            self._note_elementwise(name, out, args, kwargs)
        elif operation.is_norm and is_followed(args[0]) and args[0].shape == out.shape:
            self._note_norm(out, args)
        else:
            self._note_other(operation, out, args, kwargs)

    def _can_fill(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether numbers are written into scores or weights that are neither."""
        own, others = self.table.role(args[0]), operands.followed_tensors(args[1:], kwargs)
        return isinstance(own, (Scores, Weights)) and not any(
            isinstance(self.table.role(x), (Scores, Weights, Lost)) for x in others
        )

    def _note_fill(self, out: Tensor, x: Tensor) -> None:
        """Note scores or weights of which some were replaced, such as those of masked keys."""
        role, place = self.table.role(x), self.table.place(x, self.scope())
        self.table.assign(out, place.axes, role.altered() if isinstance(role, Weights) else role, place.fixed)

    def _note_other(self, operation: Operation, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the result of an operation that is not followed."""
        if operation.writes:
            self.table.assign(out, self.table.axes(out, self.scope()), self._lost(args, kwargs))
            return
        tensors = operands.followed_tensors(args, kwargs)
        address = out.untyped_storage()._cdata
        if any(x.untyped_storage()._cdata == address for x in tensors):
            return  # a view, although its schema does not say so
        if operation.is_factory:
            return
        if tensors and all(self.table.role(x) == PARAMETER for x in tensors):
            self.table.assign(out, fresh_axes(out, self.scope(), range(out.ndim)), PARAMETER)
        elif lost := self._lost(args, kwargs):
            self.table.assign(out, fresh_axes(out, self.scope()), lost)
        elif any(self._has_heads(x) for x in tensors):
            self.table.assign(out, self._unknown_axes(out))

    def _unknown_axes(self, out: Tensor) -> list[Axis]:
        """Return axes of which it is not known which ones have heads."""
        axes = [fresh_axis(n, "joined", self.scope()) for n in out.shape[:-1]]
        return [*axes, *(fresh_axis(n, "feature", self.scope()) for n in out.shape[-1:])]

    def _has_heads(self, x: Tensor) -> bool:
        """Return whether an axis of a tensor other than the last one may be one of heads."""
        if self.table.find(x) is None or self.table.role(x) == PARAMETER:
            return False
        outer = [source for axis in self.table.axes(x, self.scope())[:-1] for source in sources(axis)]
        return x.is_floating_point() and any(source.kind != "row" for source in outer)

    def _lost(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lost | None:
        """Return the role of a result if an argument has scores or weights."""
        for x in operands.followed_tensors(args, kwargs):
            role = self.table.role(x)
            if isinstance(role, (Scores, Weights)):
                return Lost(role.product)
            if isinstance(role, Lost):
                return role
        return None

    def _note_reduction(self, name: str, out: Tensor, args: tuple[Any, ...]) -> None:
        """Note one number for each row, such as its largest score; a sum over heads is lost."""
        x, axes = args[0], args[1] if len(args) > 1 else []
        axes = [axes] if isinstance(axes, int) else axes
        own_role = self.table.role(x) if is_followed(x) else None
        if isinstance(own_role, Scores):
            own_role.product.reduced.add(name)
        lost = self._lost(args[:1], {})
        if not isinstance(axes, (list, tuple)) or not axes or not is_followed(x) or self.table.find(x) is None:
            return
        place = self.table.place(x, self.scope())
        reduced = {at % x.ndim for at in axes}
        own = {source for at in reduced for source in sources(place.axes[at])}
        if lost is not None and not own and x.numel() == out.numel():  # of one number each, such as that of one key
            lost = own_role.altered() if isinstance(own_role, Weights) else own_role
        elif lost is not None and own & {*sources(lost.product.rows), *sources(lost.product.columns)}:
            return
        others = [axis for at, axis in enumerate(place.axes) if at not in reduced]
        if out.ndim == x.ndim:
            others = [() if at in reduced else axis for at, axis in enumerate(place.axes)]
        role = lost if lost is not None else PARAMETER if self.table.role(x) == PARAMETER else None
        self.table.assign(out, others, role, place.fixed)

    def _note_norm(self, out: Tensor, args: tuple[Any, ...]) -> None:
        place = self.table.place(args[0], self.scope())
        role = self.table.role(args[0])
        self.table.assign(out, place.axes, role if isinstance(role, Scores) else self._lost(args[:1], {}), place.fixed)

    def _note_partial(self, name: str, out: Tensor, args: tuple[Any, ...], before: list[Place]) -> None:
        """Note that an operation wrote into a part of a storage."""
        entry = self.table.find(out)
        if entry is None:
            return
        if name == "copy" and is_followed(args[1]) and args[1].ndim <= out.ndim and args[1].numel() == out.numel():
            self._note_part(out, args[1], before[0])
        elif isinstance(entry.role, Weights):
            entry.role = entry.role.altered()
        elif not isinstance(entry.role, (Scores, Lost)):
            entry.role = None

    def _note_part(self, out: Tensor, source: Tensor, before: Place) -> None:
        """Note that a tensor was written into a part of another."""
        entry, role = self.table.find(out), self.table.role(source)
        if entry is None:
            return
        old = entry.role
        if isinstance(old, (Weights, Lost)) and not entry.parts:  # its own weights, changed
            entry.role = old if isinstance(old, Lost) else old.altered()
            return
        if isinstance(old, Scores) and not entry.parts:
            return
        place = self.table.place(source, self.scope())
        axes: list[Axis] = [()] * (out.ndim - source.ndim) + place.axes
        note_part(entry, out, before, Place(axes, place.fixed), self.scope())
        if isinstance(role, HeadOutput) and isinstance(old, HeadOutput):
            self._joined([old.number, role.number], None)
        if isinstance(role, Weights):
            role = Lost(role.product) if role.dropped else role.altered()
        if isinstance(role, (Scores, Weights)) and isinstance(old, (Scores, Weights)):
            role = replace(role, product=joined_product([old.product, role.product]))
        entry.role = role

    def _note_product(self, name: str, out: Tensor, args: tuple[Any, ...]) -> None:
        left, right = PRODUCTS[name](args)
        if not is_followed(left) or not is_followed(right):
            return
        self._drop_expired()
        self._note_result(out, multiply(self.table, left, right, out, self.scope()))

    def _note_result(self, out: Tensor, result: Result) -> None:
        role = result.role
        self.completions += result.attends
        if result.refused is not None:
            self._refuse(enclosing([result.refused.scope, self.scope()]), result.refused)
            self.completions += 1
        if result.attention is not None:
            role = self._take(result.attention, result.softmax)
        self.table.assign(out, result.place.axes, role, result.place.fixed)

    def _take(self, attention: WrittenAttention, softmax: Softmax | None) -> HeadOutput | None:
        """Report an attention whose last product has just been computed."""
        self._count += 1
        self._forget(softmax)
        self.table.sweep()
        self._report(attention, self._count)
        return HeadOutput(self._count) if attention.is_whole else None

    def _note_softmax(self, name: str, out: Tensor, args: tuple[Any, ...]) -> None:
        x, axis = args[0], args[1] % max(args[0].ndim, 1)
        role = self.table.role(x)
        place = self.table.place(x, self.scope())
        new_role: Role | None = role if isinstance(role, Lost) else None
        if isinstance(role, Weights):
            new_role = Lost(role.product)
        elif isinstance(role, Scores) and name == "_log_softmax":
            new_role = role
        elif isinstance(role, Scores):
            is_own = x.untyped_storage()._cdata != out.untyped_storage()._cdata  # else it has overwritten its input
            softmax = self._wait(role.product, x, out, place.axes, axis) if is_own and x.shape == out.shape else None
            new_role = Weights(role.product, softmax, frozenset(sources(place.axes[axis])), softmax is None)
        self.table.assign(out, place.axes, new_role, place.fixed)

    def _wait(self, product: Product, scores: Tensor, out: Tensor, axes: list[Axis], axis: int) -> Softmax:
        """Return a softmax that waits for values."""
        self._drop_expired()
        storage = out.untyped_storage()
        at = int(out.storage_offset())
        softmax = Softmax(product, StorageWeakRef(storage), storage._cdata, scores, axes, at, axis, self.scope())
        self._waiting.append(softmax)
        for old in self._waiting[:-MOST_WAITING]:
            self._drop_scores(old)
        del self._waiting[:-MOST_WAITING]
        return softmax

    def _forget(self, softmax: Softmax | None) -> None:
        if softmax is not None:
            softmax.scores = None
            self._waiting = [each for each in self._waiting if each is not softmax]

    def _note_dropout(self, out: Tensor, args: tuple[Any, ...]) -> None:
        role = self._before_dropout(args[0])
        place = self.table.place(args[0], self.scope())
        if isinstance(role, Weights):
            role = replace(role, dropped=True)
        self.table.assign(out, place.axes, role, place.fixed)

    def _before_dropout(self, x: Tensor) -> Role | None:
        """Return the role of a tensor that is dropped now; weights that are still their softmax are unchanged."""
        role = self.table.role(x)
        if isinstance(role, Weights) and role.changed and not role.dropped and role.softmax is not None:
            softmax = role.softmax
            if softmax.scores is not None and matches_softmax(x, softmax.scores, softmax.axis):
                return Weights(role.product, softmax, role.over, use=role.use)
        return role

    def _note_copy(self, out: Tensor, args: tuple[Any, ...]) -> None:
        """Note that a tensor was written into a whole storage."""
        source = args[1]
        if not is_followed(source) or source.ndim > out.ndim:
            self.table.assign(out, fresh_axes(out, self.scope()), None)
            return
        place = combined_place(self.table, out, [source], [self.table.find(source)], self.scope())
        self.table.assign(out, place.axes, self.table.role(source), place.fixed)

    def _note_move(self, name: str, out: Tensor, args: tuple[Any, ...]) -> None:
        x = args[0]
        if not is_followed(x):
            return
        role, place = self.table.role(x), self.table.place(x, self.scope())
        follows = isinstance(role, (Scores, Weights))
        axes = moved_axes(name, args, place.axes, out, self.scope(), ordered=follows)
        if axes is None or (name == "index" and sum(each is not None for each in args[1]) != 1):
            axes = self._unknown_axes(out) if self._has_heads(x) else fresh_axes(out, self.scope())
            self.table.assign(out, axes, self._lost(args[:1], {}))
            return
        if isinstance(role, Weights) and name not in operands.COPIES:
            role = Lost(role.product) if role.dropped else role.altered()
        self.table.assign(out, axes, role, place.fixed)

    def _note_join(self, name: str, out: Tensor, args: tuple[Any, ...]) -> None:
        parts = [x for x in args[0] if x.numel()]  # a cache may begin as an empty tensor of one axis
        if not parts or not all(is_followed(x) for x in parts):
            return
        scope, at = self.scope(), (args[1] if len(args) > 1 else 0) % out.ndim
        roles = [self.table.role(x) for x in parts]
        known = [x for x in parts if self.table.find(x) is not None and self.table.role(x) != PARAMETER]
        if not known:
            if all(role == PARAMETER for role in roles):
                self.table.assign(out, fresh_axes(out, scope, range(out.ndim)), PARAMETER)
            return
        places = [self.table.place(x, scope) for x in known]
        best = max(reversed(range(len(known))), key=lambda n: self._rank(known[n]))
        complete = len(known) == len(parts)
        role = self._joined_role(name, roles, at - out.ndim)
        same = isinstance(self.table.role(known[best]), Scores)
        after = sum(x.shape[at] for x in parts[1 + max(n for n, x in enumerate(parts) if x is known[-1]) :])
        axes = joined_axes(name, places, places[best], at, out, scope, all_known=complete, same=same, after=after)
        fixed = frozenset[Any].intersection(*(place.fixed for place in places))
        self.table.assign(out, axes, role, fixed)

    def _joined_role(self, name: str, roles: Sequence[Role | None], at: int) -> Role | None:
        """Return the role of tensors that are joined along an axis, counted from the end."""
        numbers = [role.number for role in roles if isinstance(role, HeadOutput)]
        if len(numbers) == len(roles):
            self._joined(numbers, None if name == "stack" else at)
            return None
        lost = next((role for role in roles if isinstance(role, Lost)), None)
        if lost is not None:
            return lost
        weights = [role for role in roles if isinstance(role, Weights)]
        if weights:
            over = weights[0].over
            if len(weights) == len(roles) and all(each.over == over and not each.dropped for each in weights):
                return replace(weights[0].altered(), product=joined_product([each.product for each in weights]))
            return Lost(weights[0].product)
        scores = [role.product for role in roles if isinstance(role, Scores)]
        return Scores(joined_product(scores)) if scores else None

    def _rank(self, x: Tensor) -> tuple[bool, int, int]:
        """Return how much of an argument is known: the keys of earlier steps, from outside, say less than new ones."""
        features = sum(is_of(axis, "feature") for axis in self.table.axes(x, self.scope()))
        return self.table.role(x) is not None, features, x.numel()

    def _note_elementwise(self, name: str, out: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors = operands.followed_tensors(args, kwargs)
        entries = [self.table.find(x) for x in tensors]
        roles = [None if entry is None else entry.role for entry in entries]
        if not any(entries):
            return
        if not any(roles):
            place = combined_place(self.table, out, tensors, entries, self.scope())
            self.table.assign(out, place.axes, None, place.fixed)
            return
        if NOISE in roles and name == "mul":
            roles = [self._before_dropout(x) for x in tensors]
        numbers = [x for x in args if isinstance(x, (int, float)) and not isinstance(x, bool)]
        one_key = attend_one_key(self.table, tensors, roles, out, self.scope()) if name == "mul" else None
        if one_key is not None:
            self._note_result(out, one_key)
            return
        role = combined_role(name, out, tensors, roles, bool(numbers))
        place = combined_place(self.table, out, tensors, entries, self.scope())
        self.table.assign(out, place.axes, role, place.fixed)

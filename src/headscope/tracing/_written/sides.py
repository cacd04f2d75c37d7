"""Queries, keys and values: from the input to the operands of a product."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.tracing._invariants import Check, close, rounding
from headscope.tracing._written.arrangement import walk
from headscope.tracing._written.axes import is_same
from headscope.tracing._written.origins import Origins, Projection
from headscope.tracing._written.scores import SCALES, uniform_factor
from headscope.tracing._written.tape import At, Event, Tape

ADDITIONS = ("add", "sub")


@dataclass(frozen=True, eq=False)
class Change:
    """What code does to queries, keys or values after their projection.

    Attributes:
        events: its operations.
        ids: of its result.
        factor: of a scale; None for anything else.
    """

    events: tuple[Event, ...]
    ids: Tensor
    factor: float | None


@dataclass(frozen=True, eq=False)
class Side:
    """The queries, keys or values of one attention.

    Attributes:
        name: "q", "k" or "v".
        projections: the products that made them; empty where they are not projected.
        projected: the ids after the projection and its bias, [B, H, T, D].
        operand: those that the product takes.
        bias: what was added after the product, if it was a separate operation.
        changes: what follows.
    """

    name: str
    projections: tuple[Projection, ...]
    root: Tensor
    projected: Tensor
    operand: Tensor
    bias: Event | None
    changes: tuple[Change, ...]

    @property
    def factor(self) -> float:
        """The product of its scales."""
        result = 1.0
        for change in self.changes:
            result *= 1.0 if change.factor is None else change.factor
        return result

    @property
    def others(self) -> list[Change]:
        """The changes that are not scales."""
        return [change for change in self.changes if change.factor is None]


def read_side(origins: Origins, name: str, operand: Tensor) -> Side:
    """Return where an operand, [B, H, T, D], comes from."""
    tape = origins.tape
    levels = walk(origins, operand)[::-1]
    makers = tape.makers(levels[0])
    projections = tuple(origins.projections[event.index] for event in makers if event.index in origins.projections)
    bias: Event | None = None
    projected = levels[0]
    changes: list[Change] = []
    for before, after in itertools.pairwise(levels):
        changed = after != before
        events = tuple(event for event in tape.makers(after[changed]))
        if not events or all(event.name in ("_to_copy", "clone") for event in events):
            projected = after if not changes else projected
            continue
        factor = None
        x, y = tape.values(before), tape.values(after)
        if all(event.name in SCALES for event in events):
            factor = uniform_factor(x, y, events[-1])
        if not changes and bias is None and _is_bias(tape, events, projections):
            bias, projected = events[-1], after
            continue
        if factor is not None and abs(factor - 1) < 1e-9:
            continue
        changes.append(Change(events, after, factor))
    return Side(name, projections, levels[0], projected, operand, bias, tuple(changes))


def _is_bias(tape: Tape, events: tuple[Event, ...], projections: tuple[Projection, ...]) -> bool:
    """Return whether operations add a parameter that is the same for every token."""
    for event in events:
        others = _constants_among(tape, event)
        if event.name not in ADDITIONS or len(others) != 1 or event.out.numel() == others[0].numel():
            return False
        if others[0].numel() not in {each.out.shape[2] for each in projections}:
            return False
    return True


def _constants_among(tape: Tape, event: Event) -> list[Tensor]:
    """Return the inputs of an operation that are parameters; a projection of a parameter is none."""
    return [ids for ids in event.inputs if all(maker.name == "constant" for maker in tape.makers(ids))]


def adds_parameter(tape: Tape, projection: Projection) -> bool:
    """Return whether a product itself adds a bias of the module."""
    event = projection.event
    if event.name == "convolution":
        return event.arguments[2] is not None
    if event.name not in ("addmm", "baddbmm") or float(event.options.get("beta", 1)) == 0:
        return False
    return any(maker.name == "constant" for maker in tape.makers(event.inputs[0]))


def check_projection(origins: Origins, sides: list[Side], claim: str) -> Check:
    """Check that queries, keys or values are their input times the weights plus the bias, in float64."""
    checks = [_check_side(origins, side, claim) for side in sides]
    failed = [check for check in checks if not check.held]
    return failed[0] if failed else checks[0]


def _check_side(origins: Origins, side: Side, claim: str) -> Check:
    tape = origins.tape
    expected, allowed = (
        torch.zeros(side.root.shape, dtype=torch.float64),
        torch.zeros(side.root.shape, dtype=torch.float64),
    )
    known = torch.zeros(side.root.shape, dtype=torch.bool)
    for projection in side.projections:
        event = projection.event
        x, w = tape.values(projection.rows), tape.values(projection.weights).transpose(1, 2)
        bare, size = x @ w, x.abs() @ w.abs()
        bias = _bias_of(tape, event, projection)
        bare, size = bare + bias, size + bias.abs()
        flat_ids, order = projection.out.flatten().sort()
        own = (side.root >= event.start) & (side.root < event.start + event.size)
        at = order[torch.searchsorted(flat_ids, side.root[own])]
        known |= own
        expected[own], allowed[own] = bare.flatten()[at], size.flatten()[at] * rounding(event.values.dtype, x.shape[-1])
    actual = tape.values(side.projected)
    dtype = side.projections[0].event.values.dtype
    if side.bias is not None:
        added = tape.values(side.projected) - tape.values(side.root)  # exact up to the rounding of the sum
        own = _constant_of(tape, side.bias, side.projected)
        expected = expected + (added if own is None else own)
        allowed = (
            allowed
            + (allowed * 0 if own is None else own.abs()) * rounding(dtype, 1)
            + expected.abs() * rounding(dtype, 1)
        )
    if not bool(known.any()):
        return Check(claim, "nothing to compare", True)
    return close(
        claim,
        actual[known].to(torch.float64 if dtype == torch.float64 else torch.float32),
        expected[known],
        allowed[known],
    )


def _bias_of(tape: Tape, event: Event, projection: Projection) -> Tensor:
    """Return what a product adds by itself, in the shape of its rows and features."""
    zero = torch.zeros((), dtype=torch.float64)
    if event.name in ("addmm", "baddbmm"):
        place, beta = event.arguments[0], float(event.options.get("beta", 1))
        if not isinstance(place, At) or beta == 0:
            return zero
        own = tape.values(event.inputs[place.number]) * beta
        own = own.expand(event.out.shape)
        own = own[None] if own.ndim == 2 else own
        return own if projection.out.shape == own.shape and not _is_turned(event, projection) else own.transpose(1, 2)
    if event.name == "convolution" and isinstance(event.arguments[2], At):
        return tape.values(event.inputs[event.arguments[2].number])
    return zero


def _is_turned(event: Event, projection: Projection) -> bool:
    """Return whether the rows of a projection are the columns of its product."""
    out = event.out if event.out.ndim == 3 else event.out[None]
    return not torch.equal(out, projection.out)


def _constant_of(tape: Tape, event: Event, ids: Tensor) -> Tensor | None:
    """Return the constant that an addition adds to each of these numbers."""
    others = _constants_among(tape, event)
    if (
        len(others) != 1
        or event.out.numel() < ids.numel()
        or not bool(((ids >= event.start) & (ids < event.start + event.size)).all())
    ):
        return None
    sign = -1.0 if event.name == "sub" else 1.0
    added = tape.values(others[0]).expand(event.out.shape) * sign * float(event.options.get("alpha", 1))
    return added.flatten()[ids - event.start]


def columns_of(side: Side) -> Tensor | None:
    """Return the column of its projection that each number of a side is, in the shape of its ids; None if unknown."""
    result = torch.full(side.root.shape, -1)
    for projection in side.projections:
        event = projection.event
        flat, order = projection.out.flatten().sort()
        own = (side.root >= event.start) & (side.root < event.start + event.size)
        if bool(own.any()):
            at = order[torch.searchsorted(flat, side.root[own])]
            result[own] = at % projection.out.shape[2]
    return None if bool((result < 0).any()) else result


def find_split(tape: Tape, side: Side, numbers: Tensor, product: Event) -> list[Event]:
    """Return the operations that split a projection into the heads that a product takes: the last one last.

    Those on the line of the product belong to the product, unless there are no others.
    """
    ids = numbers.unique()
    first = max((projection.event.index for projection in side.projections), default=0)
    first = max(first, -1 if side.bias is None else side.bias.index)
    own_calls = {projection.event.call for projection in side.projections}
    own_calls |= {side.bias.call} if side.bias is not None else set()
    moves = [
        event for event in tape.events[first + 1 : product.index]
        if event.is_move and event.call not in (*own_calls, product.call)
        and any(is_same(out, ids) for out in event.outs)
    ]  # fmt: skip
    return [event for event in moves if event.line != product.line] or moves

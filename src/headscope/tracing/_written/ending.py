"""Stages 5 and 6: the heads are joined, and projected to the output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.tracing._explanations import subscript
from headscope.tracing._invariants import Check
from headscope.tracing._written.arrangement import Coordinate, operands_of, walk
from headscope.tracing._written.axes import is_same, name_axes
from headscope.tracing._written.origins import Field, Projection
from headscope.tracing._written.rows import NO_STEP, Result, Writer, unusual
from headscope.tracing._written.sides import Side, adds_parameter, check_projection
from headscope.tracing._written.tape import Event


@dataclass(frozen=True, eq=False)
class Joined:
    """The outputs of the heads side by side: the ids of the rows of the output projection, [N, R, W], and it."""

    rows: Tensor
    projection: Projection | None


def find_joined(writer: Writer) -> Joined | None:
    """Return where the outputs of the heads are joined: as rows of a projection, or as the module's own result."""
    own = writer.own
    last = max(own)
    later = _operands_of_others(writer, last)
    for index, projection in sorted(writer.origins.projections.items()):
        if index < last or index in later:
            continue
        mixed = set(writer.origins.of(Field.MIXED_BY, projection.rows).unique().tolist()) - {-1}
        if mixed and mixed <= own:
            return Joined(projection.rows, projection)
    return None


def _operands_of_others(writer: Writer, last: int) -> set[int]:
    """Return the projections that made operands of later attentions: theirs are not the output of this one."""
    origins = writer.origins
    later = [mixing for mixing in origins.mixings if mixing.event.index > last]
    scored = [each for mixing in later if (each := operands_of(origins, mixing)) is not None]
    operands = [*(mixing.v for mixing in later), *(ids for each in scored for ids in (each.q, each.k))]
    return {event.index for ids in operands for event in origins.tape.makers(origins.roots(ids))}


def add_ending(writer: Writer, returned: Tensor | None) -> None:
    """Add stages 5 and 6; ``returned`` has the ids of the module's own output."""
    joined = find_joined(writer)
    if joined is None and _add_sum_of_heads(writer):
        return
    if joined is None:
        _add_without_projection(writer, returned)
        return
    assert joined.projection is not None
    projection = _find_returned(writer, joined.projection, returned)
    _add_concatenation(writer, joined.rows, projection.event)
    _add_output(writer, projection, returned)


def _find_returned(writer: Writer, projection: Projection, returned: Tensor | None) -> Projection:
    """Return the projection of the same rows that the module returns, if it computes several, such as for a print."""
    if returned is None:
        return projection
    makers = {event.index for event in writer.origins.tape.makers(returned)}
    if projection.event.index in makers:
        return projection
    rows = projection.rows.unique()
    others = writer.origins.projections.items()
    return next((each for index, each in others if index in makers and is_same(each.rows, rows)), projection)


def _add_sum_of_heads(writer: Writer) -> bool:
    """Add the sum of the outputs of the heads, if the code sums them over heads; return whether it does."""
    own = writer.own
    table = writer.coordinates
    for event in writer.origins.tape.events[max(own) + 1 :]:
        if event.name not in ("sum", "mean") or not event.inputs:
            continue
        ids = event.inputs[0]
        mixed = set(writer.origins.of(Field.MIXED_BY, ids).unique().tolist()) - {-1}
        axes = event.arguments[1] if len(event.arguments) > 1 else ()
        axes = axes if isinstance(axes, tuple) else (axes,)
        names = name_axes(table, ids, _letters(writer), ("B", "H", "Q", "D"))
        if not mixed or not mixed <= own or not axes or {names[axis % ids.ndim][0] for axis in axes} - {"H", "H′"}:
            continue
        out = [(name, size) for at, (name, size) in enumerate(names) if at not in {a % ids.ndim for a in axes}]
        if event.out.ndim == ids.ndim:
            out = [(name, event.out.shape[at]) for at, (name, _) in enumerate(names)]
        note = unusual("the outputs of the heads are summed instead of joined", "heads-not-joined")
        check = Check("each head has columns of its own", f"{writer.attention.p.shape[1]} heads share them", False)
        writer.add(
            5, "concatenation", Result(event.out, out), event.values.dtype, equation="o = Σₕ oₕ", events=[event],
            check=check, notes=[note],
        )  # fmt: skip
        writer.missing["output"] = "no projection takes the outputs of all heads"
        return True
    return False


def _letters(writer: Writer) -> dict[Coordinate, str]:
    return {
        Coordinate.BATCH: "B",
        Coordinate.HEAD: writer.head_letter,
        Coordinate.TIME: "Q",
        Coordinate.WIDTH: writer.value_letter,
    }


def _add_without_projection(writer: Writer, returned: Tensor | None) -> None:
    """Add the concatenation that the module returns itself."""
    own = writer.own
    mixed = set() if returned is None else set(writer.origins.of(Field.MIXED_BY, returned).unique().tolist())
    if returned is None or not mixed or not mixed <= own or returned.numel() != writer.attention.out.numel():
        _describe_absence(writer, own)
        return
    note = unusual("the module returns the heads without an output projection", "no-output-projection")
    _add_concatenation(writer, returned, None, note)
    writer.missing["output"] = "there is no output projection"


def _describe_absence(writer: Writer, own: set[int]) -> None:
    """Note why there is neither a concatenation nor an output, in words that hold whatever the code does instead."""
    table, last = writer.origins, max(own)
    for index, projection in writer.origins.projections.items():
        mixed = set(table.of(Field.MIXED_BY, projection.rows).unique().tolist()) - {-1}
        if index > last and mixed & own:
            if mixed - own:
                reasons = "joined with results of other products, which are not shown", "it takes such results, too"
            else:
                reasons = NO_STEP, "the next projection is part of a later attention"
            writer.missing["concatenation"], writer.missing["output"] = reasons
            return
    writer.missing["concatenation"] = "the outputs of the heads are not joined before a projection"
    writer.missing["output"] = "no projection takes the outputs of the heads"


def _add_concatenation(writer: Writer, rows: Tensor, product: Event | None, note: str | None = None) -> None:
    """Add stage 5, unless the product itself joins the heads."""
    tape, attention = writer.origins.tape, writer.attention
    ids = rows.unique()
    first = max(mixing.event.index for mixing in attention.mixings)
    stop = len(tape.events) if product is None else product.index
    calls = {mixing.event.call for mixing in attention.mixings} if not writer.is_loop else set()
    calls |= set() if product is None else {product.call}
    moves = [
        event for event in tape.events[first + 1 : stop]
        if event.is_move and event.call not in calls and any(is_same(out, ids) for out in event.outs)
    ]  # fmt: skip
    if attention.p.shape[1] == 1 and not moves:
        writer.missing["concatenation"] = "there is one head"
        return
    if not moves:
        if product is not None:
            writer.missing["concatenation"] = NO_STEP
            _check_rows(writer, rows)
        return
    check = _check_rows(writer, rows)
    out = next(out for out in moves[-1].outs if is_same(out, ids))
    letter = writer.value_letter
    usual = ("B", "Q", f"{writer.head_letter}·{letter}")
    heads = attention.p.shape[1]
    names = ["o₁", "…", f"o{subscript(heads)}"] if heads > 2 else ["o₁", "o₂"][:heads]
    are_heads = writer.head_letter == "H"
    equation = f"o = concat({', '.join(names)})" if are_heads else "o = the outputs of all products, joined"
    notes = [note] if note else []
    dropped = _dropped_heads(writer, rows)
    if dropped:
        text = f"head {', '.join(str(head + 1) for head in dropped)} is not among the numbers that are joined"
        check = Check(check.claim, text, False)
        notes.append(unusual(text, "heads-dropped"))
    elif check.held is False:
        text = "a row of the result holds numbers of several positions: the heads were joined without transposing back"
        notes.append(unusual(text, "heads-merged-wrong"))
    else:
        notes += _changes_of(writer, rows)
    result = Result(out, name_axes(writer.coordinates, out, _letters(writer), usual))
    writer.add(
        5, "concatenation", result, attention.mixings[0].event.values.dtype, equation=equation,
        events=moves, check=check, notes=notes,
    )  # fmt: skip


def _changes_of(writer: Writer, rows: Tensor) -> list[str]:
    """Return a note on outputs of heads that were changed before they were joined, as by a gate."""
    tape, levels = writer.origins.tape, walk(writer.origins, rows)
    own, now = tape.values(levels[-1]), tape.values(rows)
    if torch.equal(own, now) or not own.numel():
        return []
    heads = writer.coordinates[Coordinate.HEAD][levels[-1]]
    gone = [
        h
        for h in range(writer.attention.p.shape[1])
        if bool((now[heads == h] == 0).all()) and bool((own[heads == h] != 0).any())
    ]
    if gone:
        text = f"the output of head {', '.join(str(head + 1) for head in gone)} is set to 0"
        return [unusual(text, "heads-dropped")]
    names = {event.name.strip("_") for level in levels[:-1] for event in tape.makers(level) if event.name != "_to_copy"}
    return (
        [f"the outputs of the heads are changed before they are joined, by {', '.join(sorted(names))}"] if names else []
    )


def _dropped_heads(writer: Writer, rows: Tensor) -> list[int]:
    """Return the heads whose outputs are not among joined numbers."""
    base = writer.origins.roots(rows)
    heads = set(writer.coordinates[Coordinate.HEAD][base].unique().tolist())
    return sorted(set(range(writer.attention.p.shape[1])) - heads)


def _check_rows(writer: Writer, rows: Tensor) -> Check:
    """Check that each row has the outputs of all heads at one position, head by head."""
    claim = "each position has the outputs of its own heads"
    if not writer.attention.is_sound:
        return Check(claim, "not checked, because the heads do not belong to positions", None)
    own = walk(writer.origins, rows)
    table = writer.coordinates
    for level in own:
        known = table[Coordinate.TIME][level] >= 0
        if bool(known.all()):
            rows = level
            break
    else:
        rows = own[-1]
        for coordinate in (Coordinate.BATCH, Coordinate.HEAD, Coordinate.TIME, Coordinate.WIDTH):
            for level in own[:-1]:
                table[coordinate, level] = table[coordinate, rows]
    for level in own:
        for coordinate in (Coordinate.BATCH, Coordinate.HEAD, Coordinate.TIME, Coordinate.WIDTH):
            table[coordinate, level] = torch.where(
                table[coordinate, level] < 0, table[coordinate, rows], table[coordinate, level]
            )
    time, batch = table[Coordinate.TIME][rows], table[Coordinate.BATCH][rows]
    bad = ((time != time[..., :1]) | (batch != batch[..., :1])).any(-1)
    if bool(bad.any()):
        return Check(claim, f"{int(bad.sum()):,} of {bad.numel():,} rows hold numbers of several positions", False)
    head, width = table[Coordinate.HEAD][rows], table[Coordinate.WIDTH][rows]
    places = head * writer.attention.v.shape[-1] + width
    if bool((places != places.reshape(-1, places.shape[-1])[0]).any()):
        return Check(claim, "the heads are joined in different orders for different positions", False)
    if not _are_ordered(batch[..., 0].flatten(), time[..., 0].flatten()):
        return Check(claim, "not checked: the rows are in another order than the positions", None)
    in_order = bool((places.reshape(-1, places.shape[-1])[0].diff() == 1).all())
    return Check(claim, "to the bit, head by head" if in_order else "to the bit, in an order of its own", True)


def _are_ordered(batch: Tensor, time: Tensor) -> bool:
    """Return whether rows are in the order of their positions, batch entry by batch entry or the other way round.

    A module may sort its rows and restore their order later, so another order is no error by itself.
    """
    if not time.numel():
        return True
    by_entry, by_time = batch * (time.max() + 1) + time, time * (batch.max() + 1) + batch
    return any(bool((places.diff() > 0).all()) for places in (by_entry, by_time))


def _add_output(writer: Writer, projection: Projection, returned: Tensor | None) -> None:
    """Add stage 6: the output projection."""
    tape = writer.origins.tape
    _check_rows(writer, projection.rows)
    table = writer.coordinates
    shape = projection.out.shape
    for coordinate in (Coordinate.BATCH, Coordinate.TIME):
        table[coordinate, projection.out] = table[coordinate][projection.rows].amax(-1)[:, :, None].expand(shape)
    table[Coordinate.HEAD, projection.out] = -1
    table[Coordinate.WIDTH, projection.out] = torch.arange(shape[2]).expand(shape)
    side = _side_of_output(writer, projection)
    has_bias = side.bias is not None or adds_parameter(tape, projection)
    formula = "o W_oᵀ" + (" + b_o" if has_bias else "")
    last = side.bias or projection.event
    ids = side.projected
    own = returned is not None and is_same(returned, ids.flatten())
    claim = f"{'the module’s own output equals' if own else 'equals'} {formula} in float64"
    check = check_projection(writer.origins, [side], claim)
    for level in walk(writer.origins, ids):
        for coordinate in (Coordinate.BATCH, Coordinate.TIME, Coordinate.WIDTH):
            table[coordinate, ids] = table[coordinate, level]
    outs = [
        out for event in tape.events[last.index :] if event.call == last.call for out in event.outs
        if is_same(out, last.out)
    ]  # fmt: skip
    letters = {Coordinate.BATCH: "B", Coordinate.TIME: "Q", Coordinate.WIDTH: "E"}
    out = outs[-1] if outs else last.out
    if own and returned is not None:
        out = returned
    result = Result(out, name_axes(table, out, letters, ("B", "Q", "E")))
    notes = () if own or returned is None else ("the module goes on from here",)
    events: Sequence[Event] = [last]
    writer.add(
        6, "output", result, last.values.dtype, equation=f"out = {formula}", events=events, check=check, notes=notes
    )


def _side_of_output(writer: Writer, projection: Projection) -> Side:
    """Return the output projection with the bias that follows it, as a side."""
    tape = writer.origins.tape
    root = projection.out
    for event in tape.events[projection.event.index + 1 :]:
        if event.name != "add" or event.is_move or len(event.inputs) < 2:
            continue
        others = [ids for ids in event.inputs if not is_same(ids, root.flatten())]
        if len(others) == len(event.inputs) or event.out.numel() != root.numel():
            continue
        constant = all(maker.name == "constant" for ids in others for maker in tape.makers(ids))
        if constant and others and others[0].numel() < root.numel():
            main = next(ids for ids in event.inputs if is_same(ids, root.flatten()))
            flat, order = main.flatten().sort()
            places = order[torch.searchsorted(flat, root)]
            return Side("o", (projection,), root, event.out.flatten()[places], root, event, ())
        break
    return Side("o", (projection,), root, root, root, None, ())

"""Stages 1 to 3: the input, the projections to queries, keys and values, and their split into heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from headscope.tracing._invariants import Check, finite
from headscope.tracing._written.arrangement import Coordinate
from headscope.tracing._written.axes import is_same, name_axes
from headscope.tracing._written.origins import Field
from headscope.tracing._written.rows import NO_STEP, Result, Writer, unusual
from headscope.tracing._written.sides import Side, adds_parameter, check_projection, columns_of, find_split
from headscope.tracing._written.slots import check_split, has_split_fault
from headscope.tracing._written.tape import Event

NAMES = {"q": "queries", "k": "keys", "v": "values"}


def letters_of(writer: Writer, name: str) -> dict[Coordinate, str]:
    """Return the letters of the axes of queries, keys or values."""
    heads = writer.attention.p.shape[1]
    number = {"q": heads, "k": writer.attention.kv_heads, "v": writer.attention.value_heads}[name]
    return {
        Coordinate.BATCH: "B", Coordinate.HEAD: "H" if number == heads else "Hkv",
        Coordinate.TIME: "Q" if name == "q" else "K", Coordinate.WIDTH: writer.value_letter if name == "v" else "D",
    }  # fmt: skip


def add_inputs(writer: Writer, sides: Sequence[Side], labels: dict[int, str]) -> None:
    """Add stage 1: what is projected."""
    shown: list[Tensor] = []
    for side, step in zip(sides[:2], ("input", "context"), strict=True):
        source = _source_of(writer, side)
        if source is None:
            if step == "input":
                writer.missing["input"] = "the queries are not a projection of one tensor"
            continue
        ids, maker = source
        if any(ids.shape == other.shape and torch.equal(ids, other) for other in shown):
            continue
        shown.append(ids)
        length = "Q" if step == "input" and not _reads_more_keys(writer, sides) else "K"
        letters = {Coordinate.BATCH: "B", Coordinate.TIME: length, Coordinate.WIDTH: "E"}
        axes = _input_axes(writer, side, ids, letters, length)
        values = writer.origins.tape.values(ids)
        code = None if maker.line is not None else _describe_outside(maker, labels, step)
        symbol = "x" if step == "input" else "context"
        writer.add(
            1, step, Result(ids, axes), maker.values.dtype, equation=symbol, events=[maker], code=code,
            check=finite(values), notes=() if maker.line is None else ("computed by the module before its attention",),
        )  # fmt: skip


def _reads_more_keys(writer: Writer, sides: Sequence[Side]) -> bool:
    """Return whether queries and keys come from one tensor, in which there are more keys than queries."""
    rows = [{each.event.index for each in side.projections} for side in sides[:2]]
    return (
        rows[0] == rows[1] and len(rows[0]) > 0 and writer.attention.q.shape[2] < without_past(sides[1]).root.shape[2]
    )


def _describe_outside(maker: Event, labels: dict[int, str], step: str) -> str:
    """Return the code of a tensor that no line of the module has made."""
    if maker.name == "constant":
        return f"{step}  # a parameter or another tensor of the module"
    if maker.index in labels:
        return f"{labels[maker.index]}  # an argument of the call"
    return f"{step}  # a tensor from outside of the module" if maker.name == "outside" else "# inside torch"


def _source_of(writer: Writer, side: Side) -> tuple[Tensor, Event] | None:
    """Return the ids of the tensor that a side is projected from, in its own shape, and the operation that made it."""
    tape = writer.origins.tape
    rows = side.projections[0].rows if side.projections else side.root
    makers = [event for event in tape.makers(rows) if event.depends or event.name == "constant"]
    if len(makers) == 1:
        return makers[0].out, makers[0]
    if not side.projections:
        return None
    projection = side.projections[0]
    calls = {each.event.call for each in writer.origins.projections.values()}  # each makes a view of its input
    for own in (rows.unique(), rows.flatten()):  # learned numbers may be there several times
        for event in reversed(tape.events[: projection.event.index]):
            if event.is_move and event.call not in calls:
                out = next((out for out in event.outs if is_same(out, own)), None)
                if out is not None:
                    return out, event
    return rows, projection.event


def _input_axes(
    writer: Writer, side: Side, ids: Tensor, letters: dict[Coordinate, str], length: str
) -> list[tuple[str, int]]:
    """Return the axes of an input, from which of its rows became which query or key."""
    table = writer.coordinates
    for projection in side.projections[:1]:
        where = table[:, projection.out]  # [6, N, R, F]
        for coordinate in (Coordinate.BATCH, Coordinate.TIME):
            known = where[coordinate].amax(-1)  # [N, R]
            rows = projection.rows
            spread = known[:, :, None].expand(rows.shape)
            table[coordinate, rows] = spread
            table[coordinate, rows[table[coordinate][rows] != spread]] = -1  # learned rows are of several entries
        table[Coordinate.WIDTH, projection.rows] = torch.arange(projection.rows.shape[-1]).expand(projection.rows.shape)
    table[:, 0] = -1
    if not side.projections:
        letters = {**letters, Coordinate.HEAD: "H"}
    return name_axes(table, ids, letters, ("B", length, "E"))


def add_projections(writer: Writer, sides: Sequence[Side]) -> None:
    """Add stage 2: a row for each projection; one product may compute several."""
    groups: list[list[Side]] = []
    for side in sides:
        if not side.projections:
            writer.missing[NAMES[side.name]] = f"{side.name} is not projected"
            continue
        same = [
            g for g in groups if {p.event.index for p in g[0].projections} == {p.event.index for p in side.projections}
        ]
        if same:
            same[0].append(side)
        else:
            groups.append([side])
    for group in groups:
        _add_projection(writer, group, sides)


def _add_projection(writer: Writer, group: list[Side], sides: Sequence[Side]) -> None:
    origins = writer.origins
    names = [side.name for side in group]
    step = ", ".join(NAMES[name] for name in names)
    if step not in ("queries", "keys", "values", "queries, keys, values", "keys, values"):
        step = NAMES[names[0]]
    first = group[0]
    has_bias = first.bias is not None or adds_parameter(writer.origins.tape, first.projections[0])
    symbol = "".join(names)
    source = _symbol(sides, first)
    formula = f"{source} W_{symbol}ᵀ" + (f" + b_{symbol}" if has_bias else "")
    check = check_projection(origins, group, f"equals {formula} in float64")
    events = [projection.event for projection in first.projections] + ([] if first.bias is None else [first.bias])
    result = _projection_result(writer, group)
    notes = _projection_notes(writer, group, sides)
    equation = f"{', '.join(names)} = {formula}"
    writer.add(2, step, result, events[0].values.dtype, equation=equation, events=events, check=check, notes=notes)


def _symbol(sides: Sequence[Side], side: Side) -> str:
    """Return "x", or "context" for keys and values that come from other tokens than the queries."""
    if side.name == "q" or not sides[0].projections:
        return "x"
    tokens = [set(each.projections[0].rows.flatten().tolist()) for each in (sides[0], side)]
    return "x" if tokens[0] & tokens[1] else "context"


def _projection_result(writer: Writer, group: list[Side]) -> Result:
    """Return the result of a projection: the code's own tensor, or those of a loop over heads on top of each other."""
    first = group[0]
    events = [projection.event for projection in first.projections]
    last = first.bias or events[-1]
    letters = letters_of(writer, first.name)
    if len(group) > 1:
        letters = {**letters, Coordinate.TIME: "Q" if first.name == "q" else "K"}
        letters = {Coordinate.PART: str(len(group)), **letters}
    width = letters[Coordinate.WIDTH]
    usual = ("B", letters[Coordinate.TIME], f"H·{width}")
    if len(events) > 1:
        usual = ("B", letters[Coordinate.HEAD], letters[Coordinate.TIME], width)
        return Result(first.projected, list(zip(usual, first.projected.shape, strict=True)))
    later = writer.origins.tape.events[last.index :]
    outs = [out for each in later if each.call == last.call for out in each.outs if is_same(out, last.out)]
    return Result(outs[-1], name_axes(writer.coordinates, outs[-1], letters, usual))


def _projection_notes(writer: Writer, group: list[Side], sides: Sequence[Side]) -> list[str]:
    notes: list[str] = []
    first = group[0]
    if len(first.projections) > 1:
        notes.append(f"{len(first.projections)} projections, one after the other")
    by_name = {side.name: side for side in sides}
    names = [side.name for side in group]
    if "k" in names and _share_weights(writer, by_name["q"], by_name["k"]):
        notes.append(unusual("keys and queries are projected by the same weights", "keys-are-queries"))
    for name, word in (("k", "keys"), ("q", "queries")):
        if "v" in names and _share_weights(writer, by_name[name], by_name["v"]):
            notes.append(unusual(f"values and {word} are projected by the same weights", "values-are-keys"))
            break
    if "k" in names and not by_name["v"].projections and _is_input(writer, by_name["v"]):
        notes.append(unusual("the values are the input itself, without a projection", "values-not-projected"))
    return notes


def _share_weights(writer: Writer, one: Side, other: Side) -> bool:
    """Return whether two sides are made by the same columns of the same weights."""
    features = [_features_of(writer, side) for side in (one, other)]
    return len(features[0]) > 0 and torch.equal(features[0], features[1])


def _features_of(writer: Writer, side: Side) -> Tensor:
    """Return the columns of the weights that a side is projected by; numbers that are not projected do not count."""
    parts = [
        writer.origins.of(Field.FEATURE, side.root[(side.root >= start) & (side.root < start + size)])
        for start, size in ((each.event.start, each.event.size) for each in side.projections)
    ]
    rows = [writer.origins.of(Field.TOKEN, each.rows) for each in side.projections]
    if any(bool((tokens != tokens[..., :1]).any()) for tokens in rows):
        return torch.zeros(0)  # a product over positions, as of pooled keys
    return torch.cat(parts).unique() if parts else torch.zeros(0)


def _is_input(writer: Writer, side: Side) -> bool:
    return all(event.name == "input" for event in writer.origins.tape.makers(side.root))


def add_splits(writer: Writer, sides: Sequence[Side], product: Event) -> None:
    """Add stage 3: the heads of queries, keys and values, where they are cut from a joined projection."""
    faults = (
        {side.name: has_split_fault(writer.origins, side) for side in sides} if not writer.attention.is_sound else {}
    )
    for side in sides:
        step = f"split {NAMES[side.name]}"
        if faults and not (faults[side.name] and (side.name != "q" or faults["k"])):
            writer.missing[step] = (
                "its heads and positions could not be told apart"  # rows of several heads are not a fault of queries
            )
            continue
        if len(side.projections) != 1:
            writer.missing.setdefault(step, _describe_own_projections(writer, side))
            continue
        _add_split(writer, side, step, product)


def _describe_own_projections(writer: Writer, side: Side) -> str:
    """Return why a side that is not cut from one projection is not split."""
    if not side.projections:
        return "not projected"
    tape = writer.origins.tape
    alone = all(len(tape.makers(side.root[:, head])) == 1 for head in range(side.root.shape[1]))
    return "each head has its own projection" if alone else "its numbers come from several products"


def _add_split(writer: Writer, side: Side, step: str, product: Event) -> None:
    letters = letters_of(writer, side.name)
    usual = tuple(letters[each] for each in (Coordinate.BATCH, Coordinate.HEAD, Coordinate.TIME, Coordinate.WIDTH))
    columns = columns_of(side)
    whole = side.root.shape[2]
    if columns is None:
        side = without_past(side)
        columns = columns_of(side)
    if columns is None:
        writer.missing[step] = "its numbers come from several products"
        return
    if side.projected.shape[1] == 1 and writer.attention.is_sound:
        writer.missing[step] = "there is one head"
        return
    user = writer.attention.mixings[0].event if side.name == "v" else product
    numbers = side.projected
    events: list[Event] = []
    for numbers in (side.projected, *(change.ids for change in side.changes)):  # a scale may come before the split
        if events := find_split(writer.origins.tape, side, numbers, user):
            break
    in_loop = writer.is_loop
    if not events and not in_loop:
        writer.missing[step] = NO_STEP
        return
    claim = f"joining the heads restores {side.name}"
    check = _check_columns(claim, columns)
    notes: list[str] = []
    if not writer.attention.is_sound:
        check, notes = check_split(writer.origins, side)
    elif _is_interleaved(columns):
        notes.append(
            unusual("a head takes its numbers from the projection in steps, not side by side", "heads-interleaved")
        )
    if in_loop:
        events = _cuts_of_loop(writer, side)
        result = Result(side.projected, list(zip(usual, side.projected.shape, strict=True)))
        notes.append(f"the code takes {writer.describe_loop()} one by one")
    else:
        own = numbers.unique()
        named = [
            Result(out, name_axes(writer.coordinates, out, letters, usual))
            for event in events for out in event.outs if is_same(out, own)
        ]  # fmt: skip
        result = next((each for each in reversed(named) if "1" not in dict(each.axes)), named[-1])
    if (others := whole - side.root.shape[2]) > 0:
        notes.append(f"{others} more {NAMES[side.name]} are not from this projection: earlier ones, or learned ones")
    index = "i" if side.name == "q" else "j"
    writer.add(
        3, step, result, side.projections[0].event.values.dtype,
        equation=f"{side.name}ₕ[{index}] = the part of {side.name}[{index}] that belongs to head h", events=events,
        check=check, notes=notes,
    )  # fmt: skip


def _cuts_of_loop(writer: Writer, side: Side) -> list[Event]:
    """Return the operations by which a loop takes heads from a projection, one for each line of code."""
    own, cuts = side.projected.unique(), list[Event]()
    start, stop = side.projections[0].event.index, writer.attention.mixings[0].event.index
    for event in writer.origins.tape.events[start:stop]:
        takes = all(out.numel() and bool(torch.isin(out, own).all()) for out in event.outs)
        if event.is_move and event.line is not None and takes and event.line not in [each.line for each in cuts]:
            cuts.append(event)
    return cuts[:3]


def without_past(side: Side) -> Side:
    """Return a side without the positions that do not come from its projection: those of a cache, or learned ones."""
    known = torch.zeros(side.root.shape, dtype=torch.bool)
    for projection in side.projections:
        known |= (side.root >= projection.event.start) & (side.root < projection.event.start + projection.event.size)
    times = known.flatten(0, 1).transpose(0, 1).flatten(1).all(-1).nonzero().flatten()
    if not len(times):
        return side
    parts = {name: getattr(side, name)[:, :, times] for name in ("root", "projected", "operand")}
    return replace(side, **parts)


def _check_columns(claim: str, columns: Tensor) -> Check:
    """Check that each head has columns of its own, the same for each token, so that joining restores them all."""
    first = columns[:1, :, :1]
    if bool((columns != first).any()):
        return Check(claim, "the columns of a head differ from token to token", False)
    heads = first[0, :, 0].unique(dim=0)  # shared heads are there once
    flat = heads.flatten()
    if len(flat.unique()) != len(flat):
        return Check(claim, "two heads have the same columns", False)
    return Check(claim, "to the bit", True)


def _is_interleaved(columns: Tensor) -> bool:
    steps = columns[0, :, 0].diff(dim=-1)
    return bool(steps.numel()) and int(steps.min()) == int(steps.max()) > 1


def add_changes(writer: Writer, sides: Sequence[Side]) -> None:
    """Add what happens to queries and keys before their product, other than a scale: norms and rotary positions."""
    for side, step in zip(sides[:2], ("change queries", "change keys"), strict=True):
        if not side.others:
            continue
        last = side.others[-1]
        letters = letters_of(writer, side.name)
        usual = tuple(letters[each] for each in (Coordinate.BATCH, Coordinate.HEAD, Coordinate.TIME, Coordinate.WIDTH))
        result, dtype = writer.result_of(last.events, last.ids, letters, usual)
        values, start = writer.origins.tape.values(last.ids), writer.origins.tape.values(side.projected)
        events = [event for change in side.others for event in change.events]
        check, equation = _check_change(side.name, start, values, events)
        writer.add(4, step, result, dtype, equation=equation, events=events, check=check)


def _check_change(name: str, before: Tensor, after: Tensor, events: Sequence[Event]) -> tuple[Check, str]:
    """Return what holds of changed queries or keys, and the equation."""
    length, new = before.norm(dim=-1), after.norm(dim=-1)
    if bool(((new - 1).abs() < 1e-3).all()):
        error = float((new - 1).abs().max())
        return Check("each has length 1", f"error {error:.0e}", True), f"{name} ← {name} / |{name}|"
    if bool(((new - length).abs() <= 1e-3 * length).all()):
        error = float(((new - length).abs() / length.clamp(min=1e-30)).max())
        return Check(
            f"each {name} has the same length as before", f"error {error:.0e}", True
        ), f"{name} ← turned {name}"
    names = list(dict.fromkeys(event.name.strip("_") for event in events))
    check = finite(after)
    return check, f"{name} ← {' → '.join(names[:3])}{' …' if len(names) > 3 else ''} of {name}"

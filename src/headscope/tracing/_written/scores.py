"""The steps from the product of queries and keys to the weights that the values are multiplied by."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from headscope.tracing._invariants import rounding
from headscope.tracing._written.arrangement import walk
from headscope.tracing._written.origins import SOFTMAXES, Field, Origins
from headscope.tracing._written.tape import At, Event

Kind = Literal["scale", "cap", "bias", "mask", "weights", "dropout", "mask after", "scale after", "convert", "other"]
SUMS = ("add", "sub", "rsub", "copy", "minimum")
ADDITIONS = ("add", "sub", "rsub")
NEGATING = (("sub", False), ("rsub", True))  # a difference, and whether the scores are its first operand
SCALES = ("mul", "div", "neg")
FILLS = ("where", "masked_fill", "index_put", "index_fill", "masked_scatter", "scatter", "fill")
LOW = -1000.0  # an addition below this hides a pair, if its weight is 0


@dataclass(frozen=True, eq=False)
class Step:
    """A step of the way; values in float64, in the shape of the ids.

    Attributes:
        kind: what it does.
        event: the last of its operations.
        ids: of its result.
        before, after: the values.
        factor: of a scale; the cap of a cap; the fill of a mask; -1 of a difference from which scores are taken.
        hidden: where a mask hides.
        events: all of its operations.
        detail: what else is known of it: "part" of a softmax that is written by hand, a mask that "multiplied", …
    """

    kind: Kind
    event: Event
    ids: Tensor
    before: Tensor
    after: Tensor
    factor: float | None = None
    hidden: Tensor | None = None
    events: tuple[Event, ...] = ()
    detail: str = ""


def read_steps(origins: Origins, p: Tensor) -> list[Step]:
    """Return the steps from the product of queries and keys to these weights, in order."""
    tape = origins.tape
    levels = _order_levels(origins, p)[::-1]
    steps: list[Step] = []
    for before, after in itertools.pairwise(levels):
        events = [event for event in tape.makers(after) if not event.name.startswith("bmm")]
        changed = after != before
        events = [
            event
            for event in events
            if bool(((after >= event.start) & (after < event.start + event.size) & changed).any())
        ]
        if not events:
            continue
        steps.append(Step("other", events[-1], after, tape.values(before), tape.values(after), events=tuple(events)))
    return _merge([_classify(origins, step) for step in steps])


def _order_levels(origins: Origins, p: Tensor) -> list[Tensor]:
    """Return weights, what they were made from, and so on; where some pairs have a step more, in the order of steps."""
    levels, table = walk(origins, p), origins.table[Field.PARENT]
    if all(bool((table[level] > 0).all()) for level in levels[:-1]):
        return levels
    ordered = [p]
    while bool((table[ordered[-1]] > 0).any()):
        ids = ordered[-1]
        ready = origins.tape.makers(ids[table[ids] > 0])
        parents = ids.clone()
        for event in ready:
            if (event.name, event.line) == (ready[-1].name, ready[-1].line):
                own = (ids >= event.start) & (ids < event.start + event.size) & (table[ids] > 0)
                parents[own] = table[ids[own]]
        ordered.append(parents)
    return ordered


def _classify(origins: Origins, step: Step) -> Step:
    """Return a step with its kind."""
    name, before, after = step.event.name, step.before, step.after
    is_after = bool((origins.of(Field.WEIGHTS, step.ids) >= 0).any())
    makes_weights = any(softmax.event is step.event for softmax in origins.softmaxes)
    if name in SOFTMAXES or makes_weights:
        return replace(step, kind="weights")
    if name in ("_to_copy", "clone", "detach"):
        return replace(step, kind="convert")
    if is_after:
        return _classify_after(origins, step)
    if name in ("exp", "exp2", "_log_softmax"):
        return replace(step, kind="weights", detail="part")
    if bool((origins.of(Field.EXPONENTIAL, step.ids) >= 0).any()):
        hidden = (after == 0) & (before != 0)
        return replace(step, kind="mask", hidden=hidden, factor=0.0) if _zeroes(before, after) else step
    if name == "tanh":
        return replace(step, kind="cap")
    if name in SCALES and (factor := uniform_factor(before, after, step.event)) is not None:
        return replace(step, kind="scale", factor=factor)
    if name in ("mul", "div") and _zeroes(before, after):
        return replace(step, kind="mask", hidden=(after == 0) & (before != 0), factor=0.0, detail="multiplied")
    if name in ("mul", "div") and (factors := _factors_of_heads(before, after, step.event)) is not None:
        return replace(step, kind="scale", detail=f"from {min(factors):.4g} to {max(factors):.4g}")
    if name in (*SUMS, *FILLS):
        return step if _adds_own_reduction(origins, step) else _classify_sum(origins, step)
    return step


def _classify_after(origins: Origins, step: Step) -> Step:
    """Return a step after the softmax with its kind."""
    before, after = step.before, step.after
    if _same(before, after):
        return replace(step, kind="convert")
    noise = any(_is_noise(origins, ids, 3) for event in step.events for ids in event.inputs)
    if step.event.name == "native_dropout" or noise:
        return replace(step, kind="dropout")
    if _zeroes(before, after) or _zeroes(before.nan_to_num(1.0), after):
        return replace(step, kind="mask after", hidden=(after == 0) & (before != 0), factor=0.0)
    factor = uniform_factor(before, after, step.event)
    if factor is None:
        return step
    return replace(step, kind="convert" if abs(factor - 1) < 1e-4 else "scale after", factor=factor)


def _adds_own_reduction(origins: Origins, step: Step) -> bool:
    """Return whether a sum or difference with a reduction of the scores along another axis than the keys."""
    reductions = ("logsumexp", "sum", "mean", "amax", "max", "amin")
    for ids in step.event.inputs:
        for maker in origins.tape.makers(ids):
            own = maker.inputs and bool((origins.of(Field.PRODUCT, maker.inputs[0]) >= 0).any())
            if maker.name in reductions and own and not _is_constant_of_rows(step.before, step.after):
                return True
    return False


def _is_noise(origins: Origins, ids: Tensor, depth: int) -> bool:
    """Return whether numbers are random, or made from random ones only."""
    for maker in origins.tape.makers(ids)[-1:]:
        if maker.name in ("bernoulli", "rand", "rand_like"):
            return True
        if depth and not maker.depends and any(_is_noise(origins, each, depth - 1) for each in maker.inputs):
            return True
    return False


def _classify_sum(origins: Origins, step: Step) -> Step:
    """Return a step that adds or fills with its kind: a shift of rows, a bias, a mask, or both."""
    before, after = step.before, step.after
    sign, is_of_scores = read_sum(origins, step)
    changed = ~((before == after) | (before.isnan() & after.isnan()))
    if not bool(changed.any()):
        return replace(step, kind="mask", hidden=changed, factor=0.0, detail="hides nothing")
    delta = after - before
    low = changed & ((after == -torch.inf) | (delta <= LOW))
    rest = changed & ~low
    fills = after[changed]
    if not bool(rest.any()) or (step.event.name in FILLS and not is_of_scores):
        lowest = float(fills.max())
        return replace(step, kind="mask", hidden=changed, factor=lowest)
    if _is_constant_of_rows(before, after) and step.event.name == "sub":
        return replace(step, kind="weights", detail="part")
    if is_of_scores and step.event.name in ADDITIONS:
        factor = uniform_factor(before, after, step.event)
        if factor is not None:
            return replace(step, kind="scale", factor=factor)
    if sign is None or step.event.name in FILLS or (is_of_scores and not _is_constant_of_rows(before, after)):
        return step
    if sign < 0:
        return replace(step, kind="bias", factor=sign)
    return replace(step, kind="bias", hidden=low if bool(low.any()) else None)


def read_sum(origins: Origins, step: Step) -> tuple[float | None, bool]:
    """Return the sign of the scores in a sum or difference, and whether its other numbers depend on these scores.

    None where it is not a sum or difference of the scores alone and other numbers.
    """
    event, table = step.event, origins.table
    own = step.ids[(step.ids >= event.start) & (step.ids < event.start + event.size)]
    parents = table[Field.PARENT, own]
    scored = [bool(torch.isin(parents[:1], ids).all()) and bool((parents > 0).all()) for ids in event.inputs]
    products = set(origins.of(Field.PRODUCT, own).unique().tolist())
    others = [ids for ids, is_own in zip(event.inputs, scored, strict=True) if not is_own]
    is_of_scores = sum(scored) > 1 or any(depends_on(origins, ids, products) for ids in others)
    if event.name not in ADDITIONS or sum(scored) != 1 or float(event.options.get("alpha", 1)) != 1:
        return None, is_of_scores
    first = event.arguments[0]
    is_first = isinstance(first, At) and first.number == scored.index(True)
    return (-1.0 if (event.name, is_first) in NEGATING else 1.0), is_of_scores


def depends_on(origins: Origins, ids: Tensor, products: set[int]) -> bool:
    """Return whether numbers are made from the results of these products."""
    waiting, known = [ids], set[int]()
    while waiting:
        for maker in origins.tape.makers(waiting.pop()):
            if maker.index in products:
                return True
            if maker.index not in known and maker.index > min(products, default=0):
                known.add(maker.index)
                waiting += maker.inputs
    return False


def _is_constant_of_rows(before: Tensor, after: Tensor) -> bool:
    """Return whether each row was shifted by one number, up to the rounding of large scores."""
    finite = before.isfinite() & after.isfinite()
    smallest = torch.where(finite, before.abs(), torch.inf).argmin(-1, keepdim=True)
    shift = (after - before).gather(-1, smallest)
    off = (after - before - shift).abs()[finite]
    return bool((off <= 1e-6 * (before.abs() + after.abs() + shift.abs())[finite]).all())


def _same(before: Tensor, after: Tensor) -> bool:
    return bool(((before == after) | (before.isnan() & after.isnan())).all())


def _zeroes(before: Tensor, after: Tensor) -> bool:
    """Return whether some numbers became 0, and the others did not change."""
    unchanged = after == before
    return bool((unchanged | (after == 0)).all()) and bool(((after == 0) & (before != 0)).any())


def uniform_factor(before: Tensor, after: Tensor, event: Event) -> float | None:
    """Return the number that all numbers were multiplied by; None if there is not one."""
    finite = before.isfinite() & after.isfinite()
    x, y = before[finite], after[finite]
    norm = float((x * x).sum())
    if not norm:
        return None
    factor = float((x * y).sum()) / norm
    unit = rounding(event.values.dtype, 1) if event.values.is_floating_point() else 1e-6
    off = (y - factor * x).abs()
    return factor if bool((off <= 8 * unit * (factor * x).abs() + 1e-30).all()) else None


def _factors_of_heads(before: Tensor, after: Tensor, event: Event) -> list[float] | None:
    factors = [uniform_factor(before[:, h], after[:, h], event) for h in range(before.shape[1])]
    return [each for each in factors if each is not None] if None not in factors else None


def _merge(steps: Sequence[Step]) -> list[Step]:
    """Return steps of which those that belong together are one: softmax by hand, a cap, a mask of two operations."""
    return _merge_masks(_merge_caps(_merge_softmax([step for step in steps if step.kind != "convert"])))


def _merge_softmax(steps: Sequence[Step]) -> list[Step]:
    """Join the parts of a softmax that is written by hand: the shift, the exponentials and the division."""
    merged: list[Step] = []
    parts: list[Step] = []
    for step in steps:
        if step.kind == "weights" and step.detail == "part":
            parts.append(step)
        elif step.kind == "weights":
            events = tuple(event for each in (*parts, step) for event in each.events)
            before = parts[0].before if parts else step.before
            merged.append(replace(step, before=before, events=events))
            parts = []
        else:
            merged.append(step)
    return merged


def _merge_caps(steps: Sequence[Step]) -> list[Step]:
    """Join the division by c, tanh and the product with c."""
    merged: list[Step] = []
    waiting = iter(steps)
    for step in waiting:
        if step.kind != "cap":
            merged.append(step)
            continue
        later = next(waiting, None)
        former = merged[-1] if merged else None
        cap = later.factor if later is not None and later.kind == "scale" else None
        if (
            later is None
            or former is None
            or cap is None
            or former.kind != "scale"
            or former.factor is None
            or not math.isclose(cap * former.factor, 1, rel_tol=1e-4)
        ):
            merged += [replace(step, kind="other"), *([later] if later is not None else [])]
            continue
        merged[-1] = replace(
            later, kind="cap", before=former.before, factor=cap, events=(*former.events, *step.events, *later.events)
        )
    return merged


def _merge_masks(steps: Sequence[Step]) -> list[Step]:
    """Join a product with a mask and the sum that lowers the same pairs."""
    merged: list[Step] = []
    for step in steps:
        former = merged[-1] if merged else None
        if (
            former is not None
            and former.detail == "multiplied"
            and step.kind == "mask"
            and former.hidden is not None
            and step.hidden is not None
            and bool((step.hidden | ~former.hidden).all())
        ):
            merged[-1] = replace(step, before=former.before, events=(*former.events, *step.events))
        else:
            merged.append(step)
    return merged


def added_by_product(event: Event, origins: Origins) -> tuple[float, Tensor | None]:
    """Return the factor of a product, and what it adds, in the shape of its result; None for nothing."""
    alpha, beta = float(event.options.get("alpha", 1)), float(event.options.get("beta", 1))
    if event.name not in ("addmm", "baddbmm") or beta == 0:
        return alpha, None
    place = event.arguments[0]
    assert isinstance(place, At)
    added = origins.tape.values(event.inputs[place.number]) * beta
    return alpha, added.expand(event.out.shape)

"""observe under random combinations of every option, against its definition in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from torch import Tensor

import headscope
from headscope._attend import prepare
from headscope._attend.interface import accumulate_dtype
from headscope._observe import inputs, native_observer
from headscope.masks import Band, Mask
from headscope.stats import HeadStats
from support import oracle, oracle_null, oracle_observe, oracle_segments, oracle_selection
from support.attention_fuzz import Case, sizes_of
from support.observed import Observed, observations

BEYOND = 1e30  # Σ p² of a row whose weight went to the sink underflows in float32: its effective_keys are not compared


# ---------------------------------------------------------------- what should come out


def _line(case: Case, batch: int, queries: int, keys: int) -> list[list[int]]:
    """The place of each query on the line: what the mask's bands agree on, else bottom-right."""
    said: list[list[int]] = []
    for leaf in case.mask.leaves() if isinstance(case.mask, Mask) else ():
        if isinstance(leaf, Band):
            offset = keys - queries if leaf.offset is None else leaf.offset
            said.append(torch.as_tensor(offset).expand(batch).tolist())
    agreed = said[0] if said and all(each == said[0] for each in said) else [keys - queries] * batch
    return [[i + agreed[b] for i in range(queries)] for b in range(batch)]


def _places(given: Tensor | None, batch: int, default: Sequence[Sequence[oracle_observe.Place]]) -> Any:
    if given is None:
        return default
    each = given.double()
    each = each if each.ndim == 3 else each[None] if each.ndim == 2 else each[None, :, None]
    return [[tuple(place) for place in entry] for entry in each.expand(batch, -1, -1).tolist()]


def asked(seen: Observed, weights: oracle.Attended, visible: Tensor) -> oracle_observe.Asked:
    """The same observation of other weights, as the oracle takes it."""
    case, what = seen.case, seen.what
    lead, heads, queries, keys = sizes_of(case)
    batch = math.prod(lead)
    line = _line(case, batch, queries, keys)
    k_at = _places(seen.k_pos, batch, [[(float(j),) for j in range(keys)]] * batch)
    if seen.q_pos is None and seen.k_pos is not None:
        axes = len(k_at[0][0]) if batch and keys else 1
        lost = (math.nan,) * axes
        own = [[k_at[b][at] if 0 <= at < keys else lost for at in line[b]] for b in range(batch)]
    else:
        own = [[(float(at),) for at in line[b]] for b in range(batch)]
    q_at = _places(seen.q_pos, batch, own)
    values = None
    if seen.values:
        _, _, v = oracle.spread(case.q.double(), case.k.double(), case.v.double())
        values = v.norm(dim=-1).reshape(batch, heads, keys)
    sampled, rows = None, None
    if isinstance(what.rows, int) and what.rows < queries:
        sampled = [(2 * r + 1) * queries // (2 * what.rows) for r in range(what.rows)]
    elif isinstance(what.rows, Tensor):
        rows = what.rows.expand(*(lead or (1,)), heads, queries).reshape(batch, heads, queries)
    tokens = None if what.tokens is None else what.tokens.expand(batch, keys).tolist()
    cross = seen.kind == "cross"
    return oracle_observe.Asked(
        weights.weights.reshape(batch, heads, queries, keys),
        weights.lse.reshape(batch, heads, queries),
        visible.reshape(batch, heads, queries, keys),
        None if cross else q_at,
        None if cross else k_at,
        line,
        tokens,
        rows,
        sampled,
        values,
        tuple(what.windows),
        what.first,
    )


@contextmanager
def blocks_of(logits: int) -> Iterator[None]:
    """Blocks so small that there are many of them."""
    usual, inputs.BLOCK = inputs.BLOCK, logits
    try:
        yield
    finally:
        inputs.BLOCK = usual


@contextmanager
def portable() -> Iterator[None]:
    """The portable form, also where the native kernels could observe."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native_observer, "refuses", lambda *_: ["this test wants the portable form"])
        patch.setattr(prepare, "prepared_calls", prepare.PreparedCalls())  # what was made ready before
        yield


@contextmanager
def native_or_portable() -> Iterator[None]:
    """As users have it; which form observed is an event."""
    usual = native_observer.observe_natively

    def told(*asked: Any) -> Any:
        found = usual(*asked)
        event(
            "observed by " + ("the portable form, for a row is not finite" if found is None else "the native kernels")
        )
        return found

    native_observer.observe_natively = told
    try:
        yield
    finally:
        native_observer.observe_natively = usual


def check(seen: Observed) -> HeadStats:
    """Everything that comes out, against the oracle and against what plain float32 makes of it."""
    case = seen.case
    double = {name: x.double() for name, x in case.tensors().items()}
    told = {**case.numbers, "seen": case.seen}
    exact = oracle.attention(**double, **told)
    wide = {name: x.to(accumulate_dtype(case.q.dtype)) for name, x in case.tensors().items()}
    plain = oracle.plain(**wide, **told)
    visible, _ = oracle._visible(*oracle.spread(*(double[n] for n in "qkv"))[:2], case.seen, double.get("bias"))
    lse = None
    if seen.lse != "none":
        lse = exact.lse.to(wide["q"].dtype)
    if seen.lse == "other":  # of some other softmax: to be taken as it stands
        lse = (exact.lse + 0.7).to(wide["q"].dtype)
        exact, plain = (_normalised(x, lse) for x in (exact, plain))
    given = seen.tensors()
    with blocks_of(seen.block):
        if seen.q_pos is None and seen.k_pos is not None and seen.kind == "self":
            event("positions of keys alone")
        wanted = oracle_observe.observe_by_definition(asked(seen, exact, visible))
        for form in (native_or_portable, portable):
            with form():
                got = headscope.observe(
                    **given, lse=lse, mask=case.mask, **case.numbers,
                    q_pos=seen.q_pos, k_pos=seen.k_pos, kind=seen.kind, what=seen.what,
                )  # fmt: skip
                compare(seen, got, wanted, exact, plain, visible)
    return got


def _normalised(x: oracle.Attended, lse: Tensor) -> oracle.Attended:
    """With another lse; rows that may see nothing stay empty."""
    lse = lse.to(x.lse.dtype)
    empty = x.lse == -torch.inf
    factor = torch.where(empty, 0.0, (x.lse - lse).exp())
    return oracle.Attended(x.out, torch.where(empty, x.lse, lse), x.weights * factor[..., None])


def compare(
    seen: Observed, got: HeadStats, wanted: oracle_observe.Seen, exact: oracle.Attended, plain: oracle.Attended,
    visible: Tensor,
) -> None:  # fmt: skip
    baseline = oracle_observe.observe_by_definition(asked(seen, plain, visible))
    (kept,) = got.kept
    picked = kept.queries
    assert torch.equal(kept.counted, wanted.counted[..., picked])
    assert not wanted.counted.any() or set(wanted.rows) <= set(kept.values)
    assert got.broken.tolist() == wanted.broken.sum((0, 2)).tolist()
    compare_selection(seen, got, wanted, visible)
    least = _rounding(seen.case)
    for name, values in kept.values.items():
        if not name.startswith("top_") and name != "argmax" and name not in oracle_selection.QUANTITIES:
            truth = wanted.rows.get(name, torch.full(wanted.counted.shape, math.nan, dtype=torch.float64))
            theirs = baseline.rows.get(name, truth)
            floor = least
            if seen.lse == "other":  # exp(s - lse) carries the rounding of both, which is relative to their size
                sizes = exact.lse.abs().nan_to_num(0, 0, 0).flatten().tolist()
                floor = max(floor, 5e-6, 2.4e-7 * max(sizes, default=0))
            compare_rows(name, values, truth[..., picked], theirs[..., picked], floor)
            compare_heads(name, got, truth, 1e-5 if seen.lse != "other" else 3e-5)  # twice over in 1 / Σ p²
    compare_nulls(got, oracle_null.nulls(asked(seen, exact, visible)), 1e-5 if seen.lse != "other" else 6e-5)
    _, _, queries, keys = sizes_of(seen.case)
    before = _before(seen)
    torch.testing.assert_close(got.received[:, before:], wanted.received, rtol=1e-5, atol=2e-6)
    assert torch.equal(got.eligible[:, before:], wanted.eligible)
    assert not got.eligible[:, :before].any()
    p = asked(seen, exact, visible).p
    compare_segments(seen, got, wanted, p, visible.reshape(p.shape))
    if seen.what.received_max:
        largest = oracle_segments.largest_received(p, wanted.counted, visible.reshape(p.shape))
        torch.testing.assert_close(got.received_max[:, before:], largest, rtol=1e-5, atol=2e-6, equal_nan=True)
        assert got.received_max[:, :before].isnan().all()
    if seen.what.map is not None:
        compare_map(got, oracle_observe.head_map(wanted, seen.what.map, queries, keys), p)
    compare_edges(seen, got, wanted, p)
    compare_top(kept, wanted, p, visible.reshape(p.shape), seen.what.top)
    if seen.what.keep_qk and not p.isnan().any():
        lead, heads, *_ = sizes_of(seen.case)
        tile = got.tile(queries // 3, queries, keys // 4, keys)
        assert tile.shape == (*lead, heads, queries - queries // 3, keys - keys // 4)
        wide = p[:, :, queries // 3 :, keys // 4 :].reshape(tile.shape)
        torch.testing.assert_close(tile.double(), wide, rtol=2e-5, atol=1e-6)


def _rounding(case: Case) -> float:
    """The least that is allowed, relative to a number's size.

    Plain float32 multiplies two half-precision numbers exactly; the kernels round q · scale · log2 e first. That moves
    a logit by an epsilon of Σ |q k|, and its weight by as much.
    """
    if accumulate_dtype(case.q.dtype) == case.q.dtype:
        return 1e-6
    q, k, _ = oracle.spread(*(x.double().abs() for x in (case.q, case.k, case.v)))
    scale = case.scale if case.scale is not None else q.shape[-1] ** -0.5
    sizes = (q @ k.mT * scale).flatten().tolist()
    return max(1e-6, torch.finfo(torch.float32).eps * max(sizes, default=0))


def compare_selection(seen: Observed, got: HeadStats, wanted: oracle_observe.Seen, visible: Tensor) -> None:
    """The rows to 1e-5, and what is pooled of them."""
    if seen.selection is None:
        assert not {*oracle_selection.QUANTITIES} & {*got.names}
        return
    case, sizes = seen.case, seen.selection.table.shape
    double = {name: x.double() for name, x in case.tensors().items()}
    q, k, _ = oracle.spread(*(double[name] for name in "qkv"))
    bias = oracle._visible(q, k, case.seen, double.get("bias"))[1]
    s = oracle_selection.logits(q, k, bias, case.scale, case.softcap, sizes)
    shown = visible.reshape(sizes)
    rows = oracle_selection.recall_rows(s, shown, seen.selection.table, wanted.counted)
    close = oracle_selection.near_ties(s, shown)
    for name, truth in rows.items():
        values = got.kept[0].values[name].double()
        queries = got.kept[0].queries
        if name == "largest_selected" and close.any():
            values = torch.where(close[..., queries], truth[..., queries], values)
        else:
            compare_heads(name, got, truth.masked_fill(truth.isinf(), math.nan), 1e-5)
        torch.testing.assert_close(values, truth[..., queries], rtol=1e-5, atol=2e-6, equal_nan=True)


def compare_segments(seen: Observed, got: HeadStats, wanted: oracle_observe.Seen, p: Tensor, visible: Tensor) -> None:
    if (segments := seen.what.segments) is None:
        return
    batch, _, queries, keys = p.shape
    of_keys = segments.ids.expand(batch, keys)
    of_queries = torch.full((batch, queries), -1)
    for (b, i), j in wanted.own.items():
        of_queries[b, i] = of_keys[b, j]
    if segments.query_ids is not None:
        of_queries = segments.query_ids.expand(batch, queries)
    size = len(segments.names)
    total, count = oracle_segments.segment_mass(p, wanted.counted, of_queries, of_keys, size)
    assert torch.equal(got.segments.count, count)
    torch.testing.assert_close(got.segments.sum, total, rtol=1e-5, atol=2e-6)
    ids = (of_queries, of_keys, visible, seen.what.first, size)
    on_first = oracle_segments.mass_on_first(p, wanted.counted, *ids)
    torch.testing.assert_close(got.segments.first_sum, on_first, rtol=1e-5, atol=2e-6)
    if seen.what.row_stats:
        mean, variance = oracle_segments.nulls(p, wanted.counted, of_queries, of_keys, visible, size)
        near = 1e-5 if seen.lse != "other" else 6e-5
        torch.testing.assert_close(got.segments.null_sums[0], mean, rtol=near, atol=2e-6)
        torch.testing.assert_close(got.segments.null_sums[1], variance, rtol=10 * near, atol=1e-5)


def _before(seen: Observed) -> int:
    """How many absolute positions lie before the first key: keys may stand on consecutive ones from there."""
    at = seen.k_pos
    if seen.kind == "cross" or at is None or at.ndim == 2 or len(at) == 0:
        return 0
    places = at.flatten().tolist() if at.ndim == 1 or len(at) == 1 else []
    return int(places[0]) if places and places == [places[0] + j for j in range(len(places))] else 0


def compare_rows(name: str, got: Tensor, wanted: Tensor, baseline: Tensor, floor: float) -> None:
    """At most twice the error of plain float32, plus ``floor`` times the size of the number (or times 1)."""
    outside = (wanted > BEYOND) if name == "effective_keys" else torch.zeros_like(wanted, dtype=torch.bool)
    assert torch.equal(got.isnan() | outside, wanted.isnan() | outside), f"{name}: other rows have it"
    there = ~wanted.isnan() & ~outside
    if not there.any():
        return
    error = (got.double() - wanted)[there].abs()
    theirs = (baseline - wanted)[there].abs().nan_to_num(0).max()
    size = wanted[there].abs().clamp_min(1.0)
    if name == "effective_keys":  # 1 / p² where the sink took the row: a logit of -30 rounds p by 30 times an epsilon
        size = size * size.log().clamp_min(1.0)
    worst = float((error / (2 * theirs + floor * size)).max())
    assert worst <= 1, f"{name}: error {float(error.max()):.3g}, plain float32 {float(theirs):.3g}"


def compare_nulls(got: HeadStats, wanted: dict[str, tuple[Tensor, Tensor, Tensor]], rtol: float) -> None:
    """Means to ``rtol``, variances to ``rtol`` of what they are summed from: Σp² and (Σp)² / n, which may cancel."""
    for name in got.names:
        null = got[0, name].null
        if not oracle_null.has_null(name):
            assert null is None, name
            continue
        assert null is not None, name
        mean, std, scale = wanted.get(name, (torch.full((got.heads,), math.nan, dtype=torch.float64),) * 3)
        torch.testing.assert_close(
            null.mean, mean, rtol=rtol, atol=2e-6, equal_nan=True, msg=lambda x, name=name: f"{name}: {x}"
        )
        assert torch.equal(null.std.isnan(), std.isnan()), name
        error = (null.std.square() - std.square()).abs().nan_to_num(0)
        assert bool((error <= 3 * rtol * scale.square().nan_to_num(0) + 1e-9).all()), f"{name}: {null.std} {std}"


def compare_heads(name: str, got: HeadStats, rows: Tensor, rtol: float) -> None:
    """Counts exactly, the rest to ``rtol`` (and a millionth, where the terms themselves are that exact only)."""
    wanted, column = oracle_observe.head(rows), got[0, name]
    assert [sum(got[0, h, name].histogram) for h in range(got.heads)] == column.count.tolist(), name
    if (rows > BEYOND).any():  # some of which may be missing
        return
    assert column.count.tolist() == wanted["count"].tolist(), name
    for what in ("mean", "min", "max"):
        torch.testing.assert_close(
            getattr(column, what), wanted[what], rtol=rtol, atol=2e-6, equal_nan=True,
            msg=lambda text, what=what: f"{what} of {name}: {text}",
        )  # fmt: skip


def compare_map(got: HeadStats, wanted: dict[str, Any], p: Tensor) -> None:
    assert torch.equal(got.map.count, wanted["count"])
    torch.testing.assert_close(got.map.sum, wanted["sum"], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(got.map.mean, wanted["sum"] / wanted["count"], rtol=1e-5, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(got.map.max, wanted["max"], rtol=1e-5, atol=2e-6, equal_nan=True)
    for head, x, y in (wanted["count"] > 0).nonzero().tolist():
        run, b, i, j = got.map.argmax[head, x, y].tolist()
        assert run == 0
        assert (
            oracle_observe.bin_of(i, p.shape[2], got.map.bins),
            oracle_observe.bin_of(j, p.shape[3], got.map.bins),
        ) == (x, y)
        assert float(p[b, head, i, j]) == pytest.approx(float(wanted["max"][head, x, y]), rel=1e-5, abs=2e-6)
    assert (got.map.argmax[wanted["count"] == 0] == -1).all()


def compare_edges(seen: Observed, got: HeadStats, wanted: oracle_observe.Seen, p: Tensor) -> None:
    if not seen.what.edges:
        return
    for head, order in enumerate(wanted.order):
        found = got.edges.of(head)
        assert len(found) == min(seen.what.edges, len(order))
        assert len({(edge.b, edge.i, edge.j) for edge in found}) == len(found)
        allowed = {each[1:] for each in order}
        for edge, (weight, *_) in zip(found, order, strict=False):
            assert edge.p == pytest.approx(weight, rel=1e-5, abs=2e-6)
            assert float(p[edge.b, head, edge.i, edge.j]) == pytest.approx(edge.p, rel=1e-5, abs=2e-6)
            assert (edge.b, edge.i, edge.j) in allowed
        assert [edge.p for edge in found] == sorted((edge.p for edge in found), reverse=True)


def compare_top(kept: Any, wanted: oracle_observe.Seen, p: Tensor, visible: Tensor, k: int) -> None:
    for b, h, r in kept.counted.nonzero().tolist():
        i = int(kept.queries[r])
        shown = p[b, h, i].masked_fill(~visible[b, h, i], -1)
        first = int(kept.values["argmax"][b, h, r])
        assert float(shown[first]) == pytest.approx(float(shown.max()), rel=1e-5, abs=2e-6)
        if not k:
            continue
        many = min(k, int(visible[b, h, i].sum()))
        keys, weights = kept.values["top_keys"][b, h, r], kept.values["top_weights"][b, h, r].double()
        assert (keys >= 0).sum() == many
        assert (~weights.isnan()).sum() == many
        assert len({*keys[:many].tolist()}) == many
        best = shown.sort(descending=True).values[:many]
        torch.testing.assert_close(weights[:many], best, rtol=1e-5, atol=2e-6)
        torch.testing.assert_close(shown[keys[:many]], best, rtol=1e-5, atol=2e-6)


@given(observations())
@settings(max_examples=20)
def test_against_the_definition(seen: Observed) -> None:
    assert check(seen).parts


@pytest.mark.long
@given(observations())
@settings(settings.get_profile("long"), max_examples=5_000)
def test_against_the_definition_at_length(seen: Observed) -> None:
    assert check(seen).parts

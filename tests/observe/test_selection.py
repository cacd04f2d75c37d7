"""``Observe(selected=...)``: the recall of selected keys, against float64, and its limits, files and layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headscope import HeadStats, Observe, attend, masks, observe, watch
from headscope._attend import prepare
from headscope._attend.interface import accumulate_dtype
from headscope._intercept import WatchError
from headscope._observe import inputs, native_observer, selected_mass
from headscope.comparing import compare
from support import oracle, oracle_selection
from support.attention_fuzz import Case, cases
from support.selections import Drawn, selections, sizes_of

NAMES = oracle_selection.QUANTITIES
B, H, HKV, Q, K, D = 2, 6, 3, 7, 11, 5


@contextmanager
def form(name: str) -> Iterator[None]:
    """Only the portable form, or what usually observes."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "portable":
            patch.setattr(native_observer, "refuses", lambda *_: ["this test requires the portable form"])
        patch.setattr(prepare, "prepared_calls", prepare.PreparedCalls())
        yield


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def example() -> tuple[Tensor, Tensor]:
    return drawn(B, H, Q, D), drawn(B, HKV, K, D, seed=1)


def rows_of(stats: HeadStats) -> dict[str, Tensor]:
    return {name: stats.kept[0].values[name].double() for name in NAMES}


def expected(selected: Tensor, visible: Tensor) -> dict[str, Tensor]:
    """The rows of ``example``, by the oracle."""
    q, k = (x.double() for x in example())
    s = q @ k.repeat_interleave(H // HKV, 1).mT * D**-0.5
    sizes = (B, H, Q, K)
    return oracle_selection.recall_rows(
        s, visible.expand(sizes), selected.expand(sizes), torch.ones(sizes[:3], dtype=torch.bool)
    )


def assert_rows(stats: HeadStats, wanted: dict[str, Tensor]) -> None:
    for name, values in rows_of(stats).items():
        torch.testing.assert_close(values, wanted[name], rtol=1e-5, atol=1e-6, equal_nan=True)


# ---------------------------------------------------------------- against the definition


@dataclass(repr=False)
class Call:
    """A call, its selection, and how it is observed."""

    case: Case
    selection: Drawn
    block: int
    lse: bool
    rows: int | None

    def __repr__(self) -> str:
        return f"Call({vars(self)})"


@st.composite
def calls(draw: st.DrawFn) -> Call:
    case = draw(cases())
    return Call(
        case,
        draw(selections(case)),
        draw(st.sampled_from((1 << 19, 1, 10, 64))),
        draw(st.booleans()),
        draw(st.sampled_from((None, None, 3))),
    )


def check(call: Call) -> HeadStats:
    """The rows and the mean divergence, in both forms, against the oracle."""
    case = call.case
    lead, heads, queries, keys = sizes_of(case)
    sizes = (math.prod(lead), heads, queries, keys)
    double = {name: x.double() for name, x in case.tensors().items()}
    exact = oracle.attention(**double, **case.numbers, seen=case.seen)
    q, k, _ = oracle.spread(*(double[name] for name in "qkv"))
    visible, bias = oracle._visible(q, k, case.seen, double.get("bias"))
    s = oracle_selection.logits(q, k, bias, case.scale, case.softcap, sizes)
    visible = visible.reshape(sizes)
    lse = exact.lse.to(accumulate_dtype(case.q.dtype)) if call.lse else None
    what = Observe(selected=call.selection.selected, keep_rows=True, rows=call.rows)
    stats = HeadStats({})
    usual, inputs.BLOCK = inputs.BLOCK, call.block
    try:
        for name in ("usual", "portable"):
            with form(name):
                stats = observe(**case.tensors(), lse=lse, mask=case.mask, **case.numbers, what=what)
            (kept,) = stats.kept
            counted = torch.zeros(sizes[:3], dtype=torch.bool)
            counted[:, :, kept.queries] = kept.counted
            wanted = oracle_selection.recall_rows(s, visible, call.selection.table, counted)
            close = oracle_selection.near_ties(s, visible)
            for quantity in NAMES:
                got, truth = kept.values[quantity].double(), wanted[quantity]
                if quantity == "largest_selected":
                    truth = truth.masked_fill(close, 0.5)
                    got = got.masked_fill(close[:, :, kept.queries], 0.5)
                truth = truth[:, :, kept.queries]
                torch.testing.assert_close(got, truth, rtol=1e-5, atol=1e-6, equal_nan=True)
                if quantity == "recall_kl" and len(truth):
                    finite = truth.masked_fill(truth.isinf(), math.nan).movedim(1, 0).flatten(1)
                    mean = finite.nanmean(-1) if finite.shape[1] else finite.sum(-1) / 0
                    torch.testing.assert_close(stats[0, quantity].mean, mean, rtol=1e-5, atol=1e-6, equal_nan=True)
    finally:
        inputs.BLOCK = usual
    return stats


@given(calls())
@settings(max_examples=30)
def test_against_the_definition(call: Call) -> None:
    assert check(call).parts


@pytest.mark.long
@given(calls())
@settings(settings.get_profile("long"), max_examples=5_000)
def test_against_the_definition_at_length(call: Call) -> None:
    assert check(call).parts


@pytest.mark.parametrize("name", ["usual", "portable"])
@pytest.mark.parametrize("shape", [(Q, 4), (H, Q, 4), (B, 1, Q, 4), (1, HKV, Q, 4), (B, HKV, 1, 4), (B, H, Q, 4)])
def test_indices_broadcast_and_repeated_ones_count_once(name: str, shape: tuple[int, ...]) -> None:
    indices = torch.randint(-1, K, shape, generator=torch.Generator().manual_seed(3))
    indices[..., 1] = indices[..., 0]
    q, k = example()
    with form(name):
        stats = observe(q, k, mask=masks.causal(), what=Observe(selected=indices, keep_rows=True))
    assert_rows(stats, expected(oracle_selection.of_indices(indices, (B, H, Q, K)), masks.causal().dense(B, H, Q, K)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_small_whole_numbers_are_indices_of_any_number_of_keys(dtype: torch.dtype) -> None:
    q, k = drawn(1, 1, 300, D), drawn(1, 1, 300, D, seed=1)  # the dtype may not hold 300, nor -1
    selected = torch.randint(100, (300, 3), generator=torch.Generator().manual_seed(2))
    got, wanted = (observe(q, k, what=Observe(selected=x))["recall"] for x in (selected.to(dtype), selected))
    assert torch.equal(got.mean, wanted.mean)
    if dtype == torch.uint8:
        with pytest.raises(ValueError, match="got key 255 at"):
            observe(q[:, :, :20], k[:, :, :20], what=Observe(selected=torch.full((20, 1), 255, dtype=dtype)))


def test_all_visible_keys_have_a_recall_of_exactly_1() -> None:
    q, k = example()
    for name in ("usual", "portable"):
        with form(name):
            stats = observe(q, k, mask=masks.window(5), sinks=torch.ones(H), what=Observe(selected=masks.causal()))
        assert stats["recall"].min.tolist() == [[1.0] * H]
        assert stats["recall_kl"].max.tolist() == [[0.0] * H]
        assert stats["largest_selected"].min.tolist() == [[1.0] * H]


def test_a_recall_near_1_has_an_exact_divergence() -> None:
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, -20.0, -25.0])[None, None, :, None]
    stats = observe(q, k, scale=1.0, what=Observe(selected=torch.tensor([[0]]), keep_rows=True))
    rest = math.exp(-20) + math.exp(-25)
    assert rows_of(stats)["recall_kl"].item() == pytest.approx(math.log1p(rest), rel=1e-6)


@pytest.mark.parametrize("sink", [None, 150.0])
def test_a_recall_too_small_for_float32_has_a_finite_divergence(sink: float | None) -> None:
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([0.0, -120.0, -121.0])[None, None, :, None]
    sinks = None if sink is None else torch.tensor([sink])
    stats = observe(q, k, scale=1.0, sinks=sinks, what=Observe(selected=torch.tensor([[1, 2]]), keep_rows=True))
    wanted = 120 - math.log1p(math.exp(-1))
    assert rows_of(stats)["recall_kl"].item() == pytest.approx(wanted, rel=1e-6)
    assert rows_of(stats)["largest_selected"].item() == 0


def test_rows_without_weight_to_the_keys_have_no_recall() -> None:
    q, k = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 3, 1)
    stats = observe(q, k, sinks=torch.tensor([900.0]), what=Observe(selected=masks.Prefix(1)))
    assert stats["mass"].mean.item() == 0
    assert [stats[name].count.item() for name in NAMES] == [0, 0, 0]


def test_ties_go_to_the_lowest_key() -> None:
    q, k = torch.ones(1, 1, 5, 4), torch.ones(1, 1, 5, 4)
    for first, share in ((0, 1.0), (1, 0.0)):
        stats = observe(q, k, what=Observe(selected=torch.tensor([[first]])))
        assert stats["largest_selected"].mean.item() == share
        assert stats["recall"].mean.item() == pytest.approx(1 / 5)


def test_rows_without_a_selected_key_are_left_out_of_the_mean_divergence(tmp_path: Path) -> None:
    q, k = example()
    indices = torch.arange(Q)[:, None] - 3  # none for three queries
    stats = observe(q, k, what=Observe(selected=indices.clamp_min(-1), keep_rows=True))
    assert rows_of(stats)["recall_kl"].isinf().sum((0, 2)).tolist() == [3 * B] * H
    assert (stats["recall"].count - stats["recall_kl"].count).tolist() == [[3 * B] * H]
    assert bool(stats["recall_kl"].mean.isfinite().all())
    assert bool(stats["recall_kl"].std.isfinite().all())
    again = HeadStats.load(stats.save(tmp_path / "a.safetensors"))
    assert torch.equal(rows_of(again)["recall_kl"], rows_of(stats)["recall_kl"])


def test_no_key_at_all() -> None:
    q, k = example()
    stats = observe(q, k, what=Observe(selected=torch.empty(Q, 0, dtype=torch.long)))
    assert stats["recall"].max.tolist() == [[0.0] * H]
    assert stats["recall_kl"].count.tolist() == [[0] * H]


# ---------------------------------------------------------------- wherever statistics are measured


def test_a_sample_of_rows_equals_these_rows_of_all() -> None:
    q, k = example()
    indices = torch.randint(K, (B, H, Q, 3), generator=torch.Generator().manual_seed(5))
    for selected in (indices, masks.Dense(drawn(B, H, Q, K, seed=4) > 0), masks.window(3)):
        whole = observe(q, k, what=Observe(selected=selected, keep_rows=True))
        for rows in (3, torch.arange(Q) % 3 == 1):
            some = observe(q, k, what=Observe(selected=selected, keep_rows=True, rows=rows))
            for name in NAMES:
                of_all = rows_of(whole)[name][:, :, some.kept[0].queries]
                counted = some.kept[0].counted
                torch.testing.assert_close(rows_of(some)[name][counted], of_all[counted], rtol=1e-5, atol=1e-6)


def test_a_band_follows_the_positions_of_the_queries() -> None:
    """Window 3 is the last three visible keys, wherever the queries stand among the keys."""
    q, k = example()
    table = (torch.arange(Q)[:, None] + 2 - torch.arange(K)).clamp(-1, 3).remainder(4) < 3  # 0, 1 or 2 keys back
    visible = masks.Band(None, 0, offset=2)
    wanted = expected(table, visible.dense(B, H, Q, K))
    what = Observe(selected=masks.window(3) | masks.Prefix(0), keep_rows=True)
    assert_rows(observe(q, k, mask=visible, what=what), wanted)
    dense = visible.dense(1, 1, Q, K)[0, 0]
    assert_rows(observe(q, k, mask=dense, q_pos=torch.arange(Q) + 2, what=what), wanted)
    assert_rows(observe(q, k, mask=visible, rows_at=(2, 20), what=what), wanted)
    each = torch.tensor([2, 4])
    got = rows_of(observe(q, k, mask=masks.Band(None, 0, offset=each), what=what))
    torch.testing.assert_close(got["recall"][0], wanted["recall"][0], rtol=1e-5, atol=1e-6)
    usual = expected(masks.window(3).dense(B, H, Q, K), masks.causal().dense(B, H, Q, K))
    torch.testing.assert_close(got["recall"][1], usual["recall"][1], rtol=1e-5, atol=1e-6)  # K - Q is 4
    cross = observe(q, k, kind="cross", what=what)
    assert_rows(cross, expected(masks.window(3).dense(B, H, Q, K), torch.ones(Q, K, dtype=torch.bool)))


def test_no_block_is_larger_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is linear in the length: blocks have a fixed size, whatever the selection."""
    sizes: list[int] = []
    compute = selected_mass._values

    def note_size(shares: Tensor, selected: Tensor, ones: Tensor) -> Any:
        sizes.append(max(shares.numel(), selected.numel()))
        return compute(shares, selected, ones)

    monkeypatch.setattr(selected_mass, "_values", note_size)
    monkeypatch.setattr(inputs, "BLOCK", 1 << 12)
    q, k = drawn(2, 3, 211, 4), drawn(2, 3, 211, 4, seed=1)
    for name in ("usual", "portable"):
        for selected in (masks.window(5) | masks.Prefix(2), torch.zeros(2, 3, 211, 7, dtype=torch.long)):
            sizes.clear()
            with form(name):
                observe(q, k, mask=masks.causal(), what=Observe(selected=selected))
            assert max(sizes) <= 1 << 12
            assert sum(sizes) >= 2 * 3 * 211 * 212 / 2


def test_attend_measures_it_again_and_again() -> None:
    q, k, v = drawn(B, H, K, D), drawn(B, H, K, D, seed=1), drawn(B, H, K, D, seed=2)
    what = Observe(selected=masks.window(2))
    wanted = observe(q, k, mask=masks.causal(), what=what)
    for _ in range(3):
        done = attend(q, k, v, mask=masks.causal(), observe=what)
        assert done.stats is not None
        torch.testing.assert_close(done.stats["recall"].mean, wanted["recall"].mean)
    half = attend(q[..., :4, :], k[..., :4, :], v[..., :4, :], mask=masks.causal(), observe=what)
    assert half.stats is not None
    assert half.stats["recall"].mean.mean() > wanted["recall"].mean.mean()


def test_a_mask_that_changes_is_read_again() -> None:
    q, k = example()
    table = torch.zeros(Q, K, dtype=torch.bool)
    what = Observe(selected=table)
    assert observe(q, k, what=what)["recall"].max.max() == 0
    table.fill_(True)
    assert observe(q, k, what=what)["recall"].min.min() == 1


def test_merging_saving_and_comparing(tmp_path: Path) -> None:
    q, k = example()
    first, other = (observe(q, k, what=Observe(selected=masks.Prefix(n), keep_rows=True)) for n in (2, 5))
    both = first.merge(other)
    for name in NAMES:
        rows = torch.cat([rows_of(each)[name].movedim(1, 0).flatten(1) for each in (first, other)], 1)
        torch.testing.assert_close(both[0, name].mean, rows.mean(-1))
        torch.testing.assert_close(both[0, name].std, rows.std(-1, correction=0))
        assert both[0, 0, name].count == 2 * B * Q
    again = HeadStats.load(both.save(tmp_path / "both.safetensors"))
    assert again.names == both.names
    assert torch.equal(again["recall"].mean, both["recall"].mean)
    assert "attn/L00/H00/recall" in both.flat()
    assert {*NAMES} <= {*both.to_dict()["layers"]["0"]["heads"][0]}
    changed = {change.name: change for change in compare(first, other).heads[0].changes}
    assert changed["recall"].after > changed["recall"].before
    assert {*NAMES} <= {*changed}
    plain = observe(q, k, what=Observe(keep_rows=True))
    assert plain.merge(first)["recall"].count.tolist() == [[B * Q] * H]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, x, x, need_weights=False)[0]
        return x


def test_watch_calls_a_function_for_each_layer() -> None:
    places: list[tuple[str, list[int], list[int]]] = []

    def largest(layer: str, q: Tensor, k: Tensor) -> Tensor:
        places.append((layer, list(q.shape), list(k.shape)))
        return (q @ k.mT).topk(2 if layer == "layers.0" else 9, -1).indices

    model, x = Model(), drawn(3, 9, 8)
    with watch(model, what=Observe(selected=largest)) as recording, torch.no_grad():
        model(x)
    stats = recording.stats
    assert places == [(f"layers.{n}", [3, 2, 9, 4], [3, 2, 9, 4]) for n in range(2)]
    assert stats["layers.1", "recall"].min.tolist() == [1.0, 1.0]
    assert stats["layers.0", "recall"].max.max() < 1
    assert stats["layers.0", "largest_selected"].mean.tolist() == [1.0, 1.0]


def test_watch_takes_masks_and_refuses_indices_of_another_length() -> None:
    model, x = Model(), drawn(3, 9, 8)
    with watch(model, what=Observe(selected=masks.window(3))) as recording, torch.no_grad():
        model(x)
        model(x[:, :5])
    assert recording.stats["layers.0", "recall"].count.tolist() == [3 * 14] * 2
    text = r"layer layers.0: selected: axis 0 \(Q\) is 7, expected 9 or 1"
    with pytest.raises(WatchError, match=text):  # noqa: SIM117
        with watch(model, what=Observe(selected=torch.zeros(7, 2, dtype=torch.long))), torch.no_grad():
            model(x)


class Written(nn.Module):
    """Its scores are a product plus a table, so q and k do not give them."""

    def __init__(self, table: bool) -> None:
        super().__init__()
        self.project, self.table = nn.Linear(8, 24), table

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
        s = q @ k.mT / 2
        if self.table:
            s = s + torch.randn(2, x.shape[1], x.shape[1], generator=torch.Generator().manual_seed(0))
        return (s.softmax(-1) @ v).transpose(1, 2).flatten(2)


def test_watch_passes_q_and_k_of_a_written_attention_where_they_are_known() -> None:
    def largest(layer: str, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT).topk(1, -1).indices

    model = nn.ModuleDict({"attention": Written(table=False)})
    with watch(model, what=Observe(selected=largest)) as recording, torch.no_grad():
        model["attention"](drawn(1, 9, 8))
    assert recording.stats["largest_selected"].mean.tolist() == [[1.0, 1.0]]
    model = nn.ModuleDict({"attention": Written(table=True)})
    with pytest.raises(WatchError, match="selected: its function takes q and k"):  # noqa: SIM117
        with watch(model, what=Observe(selected=largest)), torch.no_grad():
            model["attention"](drawn(1, 9, 8))


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("selected", "error", "message"),
    [
        (torch.zeros(Q, 2), TypeError, "selected: dtype is float32, expected indices of keys"),
        ("window", TypeError, "selected: got str, expected indices of keys"),
        ([1, 2], TypeError, "selected: got list, expected indices of keys"),
    ],
)
def test_other_kinds_are_refused_before_a_call(selected: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Observe(selected=selected)


def test_rows_must_be_measured() -> None:
    with pytest.raises(ValueError, match="selected: expected None together with row_stats=False"):
        Observe(selected=masks.causal(), row_stats=False)


def index(*shape: int, key: int = 0) -> Tensor:
    return torch.full(shape, key, dtype=torch.long)


@pytest.mark.parametrize(
    ("selected", "error", "message"),
    [
        (index(3), ValueError, r"selected: indices have 1 axes, expected \[B, H, Q, n\]"),
        (index(1, B, H, Q, 3), ValueError, r"selected: indices have 5 axes, expected \[B, H, Q, n\]"),
        (index(Q + 1, 3), ValueError, r"selected: axis 0 \(Q\) is 8, expected 7 or 1; selected \[8, 3\], q \[2, 6,"),
        (index(2, Q, 3), ValueError, r"selected: axis 0 \(H\) is 2, expected 6 or 3 or 1"),
        (index(3, H, Q, 3), ValueError, r"selected: axis 0 \(B\) is 3, expected 2 or 1"),
        (index(Q, 3, key=K), ValueError, r"selected: got key 11 at \[0, 0\] of \[Q, n\], expected 0 to 10, or -1"),
        (index(Q, 3, key=-2), ValueError, r"selected: got key -2 at \[0, 0\]"),
        (torch.ones(Q, K + 1, dtype=torch.bool), ValueError, r"selected: axis 1 \(K\) is 12, expected 11 or 1"),
        (masks.Dense(torch.ones(Q + 1, K, dtype=torch.bool)), ValueError, r"selected: axis 0 \(Q\) is 8"),
        (masks.KeyLengths(torch.ones(3, dtype=torch.long)), ValueError, "selected: "),
        (lambda *_: None, TypeError, "selected: the function returned NoneType, expected indices"),
        (lambda *_: torch.zeros(Q, 2), TypeError, "selected: dtype is float32"),
    ],
)
def test_what_does_not_fit_the_call_is_an_error(selected: Any, error: type[Exception], message: str) -> None:
    q, k = example()
    with pytest.raises(error, match=message):
        observe(q, k, what=Observe(selected=selected))

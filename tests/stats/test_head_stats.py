"""HeadStats: that it merges exactly, and how it is read, shown, saved and loaded."""

from __future__ import annotations

import copy
import errno
import io
import json
import math
import os
import pickle
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from headscope import HeadStats, Observe, observe
from headscope.masks import causal
from headscope.stats import _statistics_file, histogram_edges, merge
from support.recording_files import as_version_1, without_checksums

ALL = Observe(map=4, edges=7, top=2, windows=(2,), tokens=torch.arange(11) % 4, keep_rows=True)


def tensors(batch: int, seed: int = 0, heads: int = 3, length: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, length, 5, generator=random) for _ in range(3))
    return q, k, v


def stats_of(batch: int = 2, seed: int = 0, what: Observe = ALL) -> HeadStats:
    return observe(*tensors(batch, seed), mask=causal(), what=what)


def console(stats: Any, width: int = 100) -> str:
    printer = Console(width=width)
    with printer.capture() as captured:
        printer.print(stats)
    return captured.get()


def assert_same(one: HeadStats, other: HeadStats, *, exactly: bool = False) -> None:
    """Equal in everything but the order of the runs."""
    close: dict[str, Any] = {"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-12, "atol": 1e-12}
    assert one.layers == other.layers
    assert one.names == other.names
    for layer in one.layers:
        a, b = one[layer], other[layer]
        assert torch.equal(a.rows, b.rows)
        assert torch.equal(a.broken, b.broken)
        for name in one.names:
            for what in ("count", "mean", "M2", "min", "max"):
                x, y = getattr(a[name], what), getattr(b[name], what)
                torch.testing.assert_close(x, y, **close, equal_nan=True, msg=f"{what} of {name}")
            for head in range(one.heads):
                assert a[0, head, name].histogram == b[0, head, name].histogram
        torch.testing.assert_close(a.received, b.received, **close)
        assert torch.equal(a.eligible, b.eligible)
        torch.testing.assert_close(a.map.sum, b.map.sum, **close)
        assert torch.equal(a.map.count, b.map.count)
        torch.testing.assert_close(a.map.max, b.map.max, **close, equal_nan=True)
        torch.testing.assert_close(a.edges.p, b.edges.p, **close, equal_nan=True)


# ---------------------------------------------------------------- merging


def test_merging_gives_the_statistic_of_both() -> None:
    """A batch observed at once, and its entries observed one by one."""
    q, k, v = tensors(3)
    whole = observe(q, k, v, mask=causal(), what=ALL)
    parts = [observe(*(x[b : b + 1] for x in (q, k, v)), mask=causal(), what=ALL) for b in range(3)]
    merged = merge(*parts)
    for name in whole.names:
        for what in ("count", "min", "max"):
            x, y = getattr(whole[name], what), getattr(merged[name], what)
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7, equal_nan=True, msg=f"{what} of {name}")
        for what in ("mean", "M2", "std"):
            x, y = getattr(whole[name], what), getattr(merged[name], what)
            torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-9, equal_nan=True, msg=f"{what} of {name}")
    torch.testing.assert_close(whole.received, merged.received, rtol=1e-6, atol=1e-7)
    assert torch.equal(whole.eligible, merged.eligible)
    assert torch.equal(whole.map.count, merged.map.count)
    torch.testing.assert_close(whole.map.mean, merged.map.mean, rtol=1e-6, atol=1e-7, equal_nan=True)
    # the entry of the batch is now the run
    assert torch.equal(whole.map.argmax[..., 1], merged.map.argmax[..., 0])
    assert torch.equal(whole.edges.at[..., 1], merged.edges.at[..., 0])
    assert len(merged.kept) == 3
    assert repr(merged) == repr(whole)


def test_it_does_not_matter_what_is_merged_first() -> None:
    a, b, c = (stats_of(seed=seed) for seed in range(3))
    left, right = a.merge(b).merge(c), a.merge(b.merge(c))
    assert_same(left, right)
    assert torch.equal(left.edges.at, right.edges.at)
    assert torch.equal(left.map.argmax, right.map.argmax)
    assert_same(HeadStats.merge(a, b, c), left, exactly=True)
    assert_same(HeadStats({}).merge(a), a, exactly=True)
    assert_same(b.merge(a), a.merge(b))


def test_rows_pool_with_equal_weight() -> None:
    long, short = stats_of(seed=1), observe(*tensors(1, 2, length=3), what=replace(ALL, tokens=None, map=4))
    both = long.merge(short)
    rows = torch.cat([each.values["entropy"].movedim(1, 0).flatten(1) for each in both.kept], 1).double()
    assert both["entropy"].count.tolist() == [[25] * 3]
    torch.testing.assert_close(both["entropy"].mean[0], rows.mean(1))
    torch.testing.assert_close(both["entropy"].std[0], rows.std(1, correction=0))
    torch.testing.assert_close(both["entropy"].max[0], rows.amax(1))
    assert both.received.shape == (3, 11), "the shorter extended by zeros"
    assert torch.equal(both.eligible[:, 3:], long.eligible[:, 3:])
    assert torch.equal(both.eligible[:, :3], long.eligible[:, :3] + short.eligible)
    assert both["duplicate"].count.tolist() == long["duplicate"].count.tolist(), "counts are per name"


def test_a_name_that_one_of_them_has_no_row_of() -> None:
    """Row 0 of a causal head has no previous key: its mean is NaN, and must not spoil that of others."""
    one, more = (observe(*tensors(1, n, length=n), mask=causal()) for n in (1, 5))
    assert math.isnan(one[0, 0, "previous"].mean)
    for both in (one.merge(more), more.merge(one)):
        for what in ("count", "mean", "M2", "min", "max"):
            assert getattr(both[0, 0, "previous"], what) == getattr(more[0, 0, "previous"], what)
    nothing = one.merge(one)[0, 0, "previous"]
    assert nothing.count == 0
    assert all(map(math.isnan, (nothing.mean, nothing.M2, nothing.min, nothing.max, nothing.std)))


def test_equal_edges_are_ordered_by_run() -> None:
    q = torch.zeros(1, 1, 2, 3)
    a = observe(q, q, kind="cross", what=Observe(edges=6, map=1))
    both = a.merge(a).merge(a)
    assert both.edges.at[0].tolist() == [
        [0, 0, 0, 0],
        [0, 0, 0, 1],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
        [1, 0, 0, 0],
        [1, 0, 0, 1],
    ]
    assert both.map.argmax[0, 0, 0].tolist() == [0, 0, 0, 0]
    assert both.edges.of(0)[4].run == 1


def test_lengths_that_differ_are_not_the_lengths_of_all() -> None:
    long, short = stats_of(), observe(*tensors(1, length=3), what=replace(ALL, tokens=None))
    assert long.merge(long).parts["0"].lengths == (11, 11)
    assert long.merge(short).parts["0"].lengths is None
    assert short.merge(long, long).parts["0"].lengths is None


def test_what_neither_has_is_not_merged() -> None:
    bare = Observe(received=False)
    merged = stats_of(what=bare).merge(stats_of(seed=1, what=bare)).parts["0"]
    assert (merged.received, merged.eligible, merged.runs) == (None, None, 2)


def test_a_layer_without_a_quantity_has_no_rows_in_its_column() -> None:
    wide, bare = stats_of(), stats_of(what=Observe(row_stats=False))
    column = wide.named("a").merge(bare.named("b"))["window_2"]
    assert column.mean[0].tolist() == wide["window_2"].mean[0].tolist()
    assert column.count.tolist() == [wide["window_2"].count[0].tolist(), [0, 0, 0]]
    assert all(getattr(column, what)[1].isnan().all() for what in ("mean", "M2", "min", "max"))


def test_merging_keeps_the_number_of_first_keys_where_one_file_does_not_say_it() -> None:
    """Files of older versions do not."""
    known = stats_of(what=replace(ALL, first=2))
    unknown = HeadStats({layer: replace(part, first=None) for layer, part in known.parts.items()})
    for one, other in ((known, unknown), (unknown, known)):
        assert one.merge(other).parts["0"].first == 2
    with pytest.raises(ValueError, match="first: cannot merge sums over the first 2 keys with those over 1"):
        unknown.merge(known, stats_of())


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (1, 0, 1), (1, 1, 0)])
def test_tiles_are_those_of_the_run_that_is_asked_for_also_where_others_have_none(
    order: tuple[int, ...], tmp_path: Path
) -> None:
    with_qk, without = stats_of(what=replace(ALL, keep_qk=True)), stats_of(seed=1)
    merged = merge(*([with_qk, without][n] for n in order))
    saved = _statistics_file.save(merged.parts, merged.origin, tmp_path / "qk.safetensors", False, qk=True)
    n, k = order.index(0), len(order)
    for stats in (merged, HeadStats.load(saved), merged.to("cpu")):
        for run in (n, n - k):
            torch.testing.assert_close(stats.tile(0, 11, 0, 11, run=run), with_qk.tile(0, 11, 0, 11))
        torch.testing.assert_close(stats.tile(0, 11, 0, 11), with_qk.tile(0, 11, 0, 11))
        edge = next(edge for edge in stats.edges.of(0) if edge.run == n)
        p = stats.tile(edge.i, edge.i + 1, edge.j, edge.j + 1, run=edge.run)[edge.b, 0]
        torch.testing.assert_close(p.item(), edge.p)
        for run in (run for run, which in enumerate(order) if which == 1):
            with pytest.raises(
                ValueError, match=rf"run: got {run}, whose q and k were not retained; expected one of {n}"
            ):
                stats.tile(0, 1, 0, 1, run=run)
        with pytest.raises(ValueError, match=rf"run: got {k}, expected -{k} to {k - 1}"):
            stats.tile(0, 1, 0, 1, run=k)


def test_what_does_not_merge() -> None:
    base = stats_of()
    other_heads = observe(*tensors(1, heads=2), what=ALL)
    for other, message in (
        (other_heads, r"layer 0: heads: cannot merge 3 heads with 2"),
        (stats_of(what=replace(ALL, map=5)), r"layer 0: map: cannot merge 4 bins with 5; maps merge for equal n only"),
        (stats_of(what=replace(ALL, map=None)), r"layer 0: map: cannot merge, only one of the two has it"),
        (stats_of(what=replace(ALL, edges=3)), r"layer 0: edges: cannot merge 7 for each head with 3"),
        (stats_of(what=replace(ALL, received=False)), r"layer 0: received: cannot merge, only one"),
        (stats_of(what=Observe(map=4, edges=7, row_stats=False)), r"layer 0: row_stats: cannot merge, only one"),
        (stats_of(what=replace(ALL, keep_rows=False, top=0)), r"layer 0: kept: cannot merge, only one"),
        (
            stats_of(what=replace(ALL, first=4)),
            r"layer 0: first: cannot merge sums over the first 1 keys with .* over 4",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            base.merge(other)
    with pytest.raises(
        ValueError, match=r"layer 0: device: cannot merge statistics on cpu with statistics on meta; move both"
    ):
        base.merge(base.to("meta"))
    with pytest.raises(TypeError, match="merge: got int, expected HeadStats"):
        merge(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="merge: got NoneType, expected HeadStats"):
        base.merge(base, None)  # pyright: ignore[reportArgumentType]


def test_layers_are_kept_apart() -> None:
    a, b = stats_of(seed=1), stats_of(seed=2)
    both = a.named("model.0").merge(b.named("model.1"))
    assert both.layers == ("model.0", "model.1")
    assert both["model.1", 2, "entropy"] == b[0, 2, "entropy"]
    assert both[-1, 2, "entropy"] == b[0, 2, "entropy"]
    more = both.merge(a.named("model.1"))
    assert more[1, 0, "entropy"].count == 44
    assert more[0, 0, "entropy"].count == 22
    with pytest.raises(ValueError, match=r"received: there are 2 layers; select one of them: stats\[layer\]\.received"):
        _ = both.received
    assert torch.equal(both[1].received, b.received)
    with pytest.raises(ValueError, match=r"names: got a, a, expected 2 different ones"):
        both.named("a", "a")


# ---------------------------------------------------------------- reading


def test_indexing() -> None:
    stats = stats_of().named("enc").merge(observe(*tensors(1, heads=2), what=Observe()).named("dec"))
    assert stats.heads == 3
    summary = stats["enc", 1, "entropy"]
    assert summary.edges == histogram_edges("entropy")
    assert sum(summary.histogram) == summary.count == 22
    assert len(summary.histogram) == len(summary.edges) - 1
    assert summary.std == pytest.approx(math.sqrt(summary.M2 / summary.count))
    assert stats["enc", 1]["entropy"] == stats[0, 1, "entropy"] == summary
    assert stats["enc", "entropy"].mean[1] == summary.mean
    assert stats["entropy"].mean.shape == (2, 3)
    assert stats["entropy"].count.tolist() == [[22] * 3, [11, 11, 0]], "the second layer has two heads"
    assert stats["dec"].layers == ("dec",)
    for at, error, message in (
        ((2, 0, "entropy"), IndexError, r"layer: got 2, expected one of 2 layers: enc, dec"),
        ((0, 3, "entropy"), IndexError, r"head: got 3, layer enc has 3 \(0 to 2\)"),
        ((0, 0, "entrpy"), KeyError, r"entrpy: layer enc has lse, max_logit"),
        ((1, "window_2"), KeyError, r"window_2: layer dec has lse"),
        ("decoder", KeyError, r"decoder: is neither a quantity nor a layer; expected one of lse, .*, enc, dec"),
        (
            (0, 1.5, "entropy"),
            TypeError,
            r"stats\[\.\.\.\]: got \(0, 1\.5, 'entropy'\), expected \[layer, head, name\]",
        ),
        (1.5, TypeError, r"layer: got float, expected a number or a name"),
    ):
        with pytest.raises(error, match=message):
            stats[at]  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.parametrize(
    ("name", "needed"),
    [
        ("induction", "the option tokens="),
        ("recall_kl", "the option selected="),
        ("second_weight", 'the option extra=("second_weight",)'),
        ("window_3", "the option windows=(3,)"),
        ("streaming_2.5", "the option windows=(2.5,)"),
        ("value_norm", "the values v of the call"),
    ],
)
def test_quantities_that_are_not_always_measured_say_what_they_need(name: str, needed: str) -> None:
    q, k, _ = tensors(1)
    with pytest.raises(KeyError, match=rf"{name}: is neither .*; it needs {re.escape(needed)}"):
        observe(q, k)[name]


def test_a_name_that_begins_like_a_quantity_needs_no_option() -> None:
    with pytest.raises(KeyError) as error:
        observe(*tensors(1))["window_attention"]
    assert "it needs" not in str(error.value)


def test_histograms_hold_every_row_in_its_bin() -> None:
    stats = stats_of()
    for name in stats.names:
        values = stats.kept[0].values[name][:, 1].flatten()
        edges = histogram_edges(name)
        wanted = [0] * (len(edges) - 1)
        for x in values[~values.isnan()].double().tolist():
            wanted[max(0, min(sum(x >= edge for edge in edges) - 1, len(wanted) - 1))] += 1
        assert list(stats[0, 1, name].histogram) == wanted, name


def test_key_quantities_have_a_ratio() -> None:
    stats = stats_of()
    torch.testing.assert_close(stats.received_share * stats.eligible, stats.received)
    assert stats.received.dtype == torch.float64
    assert stats.eligible.dtype == torch.int64


def test_flat_names_for_trackers() -> None:
    stats = stats_of().named("a").merge(stats_of(seed=1).named("b"))
    flat = stats.flat()
    assert flat["attn/L01/H02/entropy"] == stats[1, 2, "entropy"].mean
    assert "attn/L00/H00/next" not in flat, "what no row has is left out"
    assert all(isinstance(value, float) and math.isfinite(value) for value in flat.values())


def test_a_dictionary_for_json() -> None:
    stats = stats_of(what=replace(ALL, rows=3))
    back = json.loads(json.dumps(stats.to_dict(), allow_nan=False))["layers"]["0"]
    assert back["looked_at"] == 6
    assert back["of"] == 22
    assert back["rows"] == [6, 6, 6]
    assert back["heads"][1]["entropy"]["mean"] == stats[0, 1, "entropy"].mean
    assert back["heads"][1]["next"] | {"histogram": None, "edges": None} == {
        "count": 0, "mean": None, "std": None, "min": None, "max": None, "histogram": None, "edges": None,
        "null_mean": None, "null_std": None, "z": None,
    }  # fmt: skip
    assert back["edges"][2][0]["p"] == float(stats.edges.p[2, 0])


def test_a_dictionary_without_edges() -> None:
    assert "edges" not in stats_of(what=Observe()).to_dict()["layers"]["0"]
    assert len(stats_of(what=Observe(edges=2)).to_dict()["layers"]["0"]["edges"]) == 3


def test_pandas_is_asked_for_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"to_pandas: pandas is not installed; pip install pandas, or use to_dict"):
        stats_of().to_pandas()


def test_a_data_frame_has_one_line_for_each_head_and_name(monkeypatch: pytest.MonkeyPatch) -> None:
    stub = types.ModuleType("pandas")  # not a dependency, and all that is used of it is this
    monkeypatch.setattr(
        stub, "DataFrame", lambda lines, columns: [dict(zip(columns, x, strict=True)) for x in lines], raising=False
    )
    monkeypatch.setitem(sys.modules, "pandas", stub)
    stats = stats_of()
    lines = stats.to_pandas()
    assert len(lines) == 3 * len(stats.names)
    one = next(line for line in lines if (line["head"], line["name"]) == (2, "first"))
    first = stats[0, 2, "first"]
    assert one == {
        "layer": "0", "head": 2, "name": "first", "count": 22,
        "mean": first.mean, "std": first.std, "min": first.min, "max": first.max,
        "null_mean": first.null_mean, "null_std": first.null_std, "z": first.z,
    }  # fmt: skip


# ---------------------------------------------------------------- showing


def test_a_table_can_be_sorted_by_any_column() -> None:
    stats = stats_of().named("a").merge(stats_of(seed=5).named("b"))
    for name in ("layer", "head", "rows", *stats.names):
        for descending in (True, False):
            table = stats.table(sort=name, names=stats.names, descending=descending)
            shown = [column for column in table.columns if column.header == name]
            cells = [str(cell) for cell in shown[0].cells]
            assert len(cells) == 6
            numbers = [float(cell) for cell in cells if cell not in ("–", "a", "b")]
            assert numbers == sorted(numbers, reverse=descending)
            assert cells == sorted(cells, key=lambda cell: cell == "–"), "what a head does not have comes last"
    assert len(stats.table(limit=2).rows) == 2
    with pytest.raises(ValueError, match="limit: got -1, expected a whole number from 0 or None"):
        stats.table(limit=-1)
    assert "window_2" in console(stats.table(sort="window_2"))
    narrow = console(stats.table(sort="normalized_entropy"), width=50)
    assert "normalized_entropy" in narrow, "the column that decides the order is never cut"
    with pytest.raises(ValueError, match=r"sort: got 'entropi', expected one of layer, head, rows, lse"):
        stats.table(sort="entropi")
    with pytest.raises(ValueError, match=r"names: got 'x', expected one of layer"):
        stats.table(names=("x",))


def test_the_terminal_shows_it() -> None:
    text = console(stats_of(what=replace(ALL, rows=2)).named("[red]layer"))
    assert "[red]layer" in text, "a name is no markup"
    assert "entropy" in text
    assert "A sample: 4 of 22 rows" in text


def test_html_is_escaped() -> None:
    q, k, _ = tensors(1)
    q[0, 0, 3] = math.nan
    page = observe(q, k).named("<script>alert(1)</script>")._repr_html_()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert "1 rows hold NaN or infinity" in page
    assert page.count("<tr>") == 4


# ---------------------------------------------------------------- files


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    stats = stats_of(what=replace(ALL, rows=5)).named("layer/0 ü").merge(stats_of(seed=3).named("b"))
    path = stats.save(tmp_path / "heads.safetensors", exact=True)
    back = HeadStats.load(path)
    assert_same(stats, back, exactly=True)
    assert repr(back) == repr(stats)
    assert back.sampled
    for layer in stats.layers:
        assert torch.equal(back[layer].edges.at, stats[layer].edges.at)
        assert torch.equal(back[layer].map.argmax, stats[layer].map.argmax)
        (one,), (other,) = back[layer].kept, stats[layer].kept
        assert torch.equal(one.queries, other.queries)
        assert torch.equal(one.counted, other.counted)
        assert set(one.values) == set(other.values)
        for name, values in other.values.items():
            torch.testing.assert_close(one.values[name], values, rtol=0, atol=0, equal_nan=True)
    assert_same(back.merge(stats), stats.merge(stats), exactly=True)
    assert [each.name for each in tmp_path.iterdir()] == ["heads.safetensors"], "nothing temporary is left"
    with pytest.raises(ValueError, match=r"tile: q and k were not retained"):
        back["b"].tile(0, 1, 0, 1)


def test_numbers_beyond_what_can_be_summed_are_saved_and_loaded(tmp_path: Path) -> None:
    q, k = torch.randn(2, 1, 2, 5, 4, dtype=torch.double)
    huge = torch.full((1, 2, 5, 1), 1e308, dtype=torch.double)
    seen = observe(q, k, huge, what=Observe(first=10**20))
    again = HeadStats.load(seen.save(tmp_path / "seen.safetensors"))
    assert again.parts["0"].first == 10**20
    assert torch.equal(again["value_norm"].max, seen["value_norm"].max)


def test_a_part_that_was_not_asked_for_is_not_saved(tmp_path: Path) -> None:
    stats = stats_of(what=Observe(received=False))
    back = HeadStats.load(stats.save(tmp_path / "heads.safetensors"))
    assert back.flat() == stats.flat()
    with pytest.raises(ValueError, match=r"received: was not observed"):
        _ = back.received
    assert HeadStats.load(HeadStats({}).save(tmp_path / "none.safetensors")).layers == ()


def test_only_files_of_statistics_are_replaced(tmp_path: Path) -> None:
    stats = stats_of()
    path = tmp_path / "weights.safetensors"
    save_file({"w": torch.ones(3)}, path)
    before = path.read_bytes()
    with pytest.raises(FileExistsError, match=r"weights.safetensors: exists and is not a file of headscope statistics"):
        stats.save(path)
    assert path.read_bytes() == before
    with pytest.raises(ValueError, match=r"weights.safetensors: is not a file of headscope statistics"):
        HeadStats.load(path)
    stats.save(path, force=True)
    stats.merge(stats).save(path)
    with pytest.raises(FileNotFoundError, match=r"none.safetensors: the folder .*missing does not exist"):
        stats.save(tmp_path / "missing" / "none.safetensors")
    assert HeadStats.load(path)[0, 0, "entropy"].count == 44
    path.write_text("no tensors")
    with pytest.raises(ValueError, match=r"not a file of headscope statistics"):
        HeadStats.load(path)
    with pytest.raises(FileNotFoundError, match=r"absent: no such file"):
        HeadStats.load(tmp_path / "absent")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of files are no bytes, and pipes no files")
def test_what_cannot_be_read_is_not_called_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=r"pipe: is not a regular file"):
        HeadStats.load(tmp_path / "pipe")
    path = stats_of().save(tmp_path / "a.safetensors")
    other = path.rename(tmp_path / "a\udcff.safetensors")
    with pytest.raises(ValueError, match=r"is not UTF-8, and safetensors does not open files with such names"):
        HeadStats.load(other)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")  # which no mode of a file denies to root

    other.rename(path)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PermissionError):
        HeadStats.load(path)


@pytest.mark.skipif(os.name != "posix", reason="pipes and links are POSIX's")
@pytest.mark.parametrize("force", [False, True])
def test_a_pipe_is_left_alone_and_a_link_stays(force: bool, tmp_path: Path) -> None:
    stats = stats_of()
    os.mkfifo(tmp_path / "pipe")
    for name, message in (("pipe", "pipe: is not a regular file"), (".", "is a directory")):
        with pytest.raises(FileExistsError, match=message):
            stats.save(tmp_path / name, force=force)
    assert not _statistics_file.is_statistics(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        stats.save(tmp_path / "loop", force=force)
    (tmp_path / "link").symlink_to("target")
    stats.save(tmp_path / "link", force=force)
    stats.merge(stats).save(tmp_path / "link", force=force)
    assert (tmp_path / "link").is_symlink()
    assert HeadStats.load(tmp_path / "target")[0, 0, "entropy"].count == 44
    assert {each.name for each in tmp_path.iterdir()} == {"pipe", "loop", "link", "target"}


def test_more_kept_rows_than_a_file_can_name_are_refused(tmp_path: Path) -> None:
    stats = stats_of()
    path = stats.save(tmp_path / "heads.safetensors")
    before = path.read_bytes()
    (part,) = stats.parts.values()
    kept = replace(part.kept[0], values={"x" * 10**8: part.kept[0].counted})  # in place of some 60,000 calls
    with pytest.raises(
        ValueError, match=r"too large for one file .* rows or weights of 1 calls are retained; observe without"
    ):
        HeadStats({"0": replace(part, kept=(kept,))}).save(path)
    assert path.read_bytes() == before


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_statistics_file, "VERSION", 3)
    path = stats_of(what=ALL).save(tmp_path / "heads.safetensors")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"format 3, this version of headscope reads up to 2"):
        HeadStats.load(path)


def damaged(path: Path, entry: str = "", **tensors: Tensor | None) -> Path:
    """The file of statistics at a path with another header, or other tensors, or without them."""
    with safe_open(path, framework="pt") as file:
        held: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()} | tensors  # noqa: SIM118
        said = file.metadata()
    held = {name: x for name, x in held.items() if x is not None}
    save_file(held, path, without_checksums({**said, "headscope.stats": entry or said["headscope.stats"]}))
    return path


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("{bad", r"is damaged: its header is not JSON"),
        ("[]", r"is damaged: 'list' object"),
        ("[" * 100_000, r"is damaged: maximum recursion depth"),
        ("{}", r"is damaged: it lacks 'version'"),
        (f'{{"version": {"1" * 5000}}}', r"is damaged: Exceeds the limit"),
        ('{"version": "2"}', r"is damaged: version: got str, expected int"),
        ('{"version": -3}', r"is damaged: version: got -3, expected 1 to"),
        ('{"version": 1, "layers": [3]}', r"is damaged: layers: got int, expected dict"),
    ],
)
def test_a_damaged_header_is_told_as_such(entry: str, message: str, tmp_path: Path) -> None:
    path = damaged(stats_of().save(tmp_path / "heads.safetensors"), entry)
    with pytest.raises(ValueError, match=rf"heads.safetensors: {message}"):
        HeadStats.load(path)
    if not entry.startswith("{") or entry == "{bad":  # what cannot be read is not replaced unasked
        with pytest.raises(FileExistsError, match="is not a file of headscope statistics"):
            stats_of().save(path)


NUMBERS = ("heads", "runs", "looked_at", "of")
SAID: list[tuple[str, Any, str]] = [
    ("name", 3, "name: got int, expected str"),
    *(
        (name, got, f"{name}: got {type(got).__name__}, expected int")
        for name in NUMBERS
        for got in ("3", [], None, True)
    ),
    ("heads", 2, r"0/rows: got \[3\], expected \[H\]"),
    ("moments", "lse", "moments: got str, expected list"),
    ("received", 1, "received: got int, expected bool"),
    *((name, got, f"{name}: got {got}, expected 0 to") for name in NUMBERS for got in (-1, 2**70)),
    ("looked_at", 23, "looked_at: got 23, expected 0 to 22"),
    ("looked_at", 1, r"0/rows: holds 22 to 22, outside the possible range"),
    ("runs", 0, r"0/map/argmax: holds -1 to 10, outside the possible range"),
    ("lengths", [1], "lengths: got 1 numbers, expected 2"),
    ("lengths", [-1, 11], "lengths: got -1, expected 0 to"),
    ("lengths", [11, 2**70], f"lengths: got {2**70}, expected 0 to"),
    ("lengths", [11, 5], r"0/map/argmax: holds -1 to 10, outside the possible range"),
    ("lengths", [11, 12], r"0/qk/0/k: got \[2, 3, 11, 5\], expected \[B, Hkv, K, D\]"),
    ("moments", ["x" * 100_000], f"it lacks '0/moments/{'x' * 200}x*…$"),
    ("first", "1", "first: got str, expected int or NoneType"),
    ("first", 0, "first: got 0, expected 1 to"),
    ("qk", {}, "qk: got dict, expected list"),
    ("qk_runs", [1], r"qk_runs: got \[1\] for 1 of 1 runs"),
    ("qk_runs", [0, 0], r"qk_runs: got \[0, 0\] for 1 of 1 runs"),
    ("scale", "1", "scale: got str, expected float or int"),
    ("scale", math.nan, "scale: got nan, expected a finite number"),
    ("softcap", [], "softcap: got list, expected float or int or NoneType"),
    ("softcap", -1, "softcap: got -1, expected a finite number above 0"),
    ("offset", 0.5, "offset: got float, expected int or NoneType"),
    ("offset", 2**70, f"offset: got {2**70}, expected -"),
    ("lead", [-1, -2], "lead: got -1, expected 0 to"),
    ("lead", 2, "lead: got int, expected list"),
    ("lead", [3], r"lead \(3,\) and 3 key/value heads do not fit \(2, 3, 11, 5\)"),
    ("parts", None, "parts: got NoneType, expected list"),
]


@pytest.mark.parametrize(("name", "got", "message"), SAID)
def test_what_a_header_says_in_another_kind_is_told_as_damage(name: str, got: Any, message: str, saved: Path) -> None:
    with safe_open(saved, framework="pt") as file:
        said = json.loads(file.metadata()["headscope.stats"])
    (layer,) = said["layers"]
    (layer if name in layer else layer["qk"][0])[name] = got
    with pytest.raises(ValueError, match=rf"heads.safetensors: is damaged: (0/qk/0: )?{message}"):
        HeadStats.load(damaged(saved, json.dumps(said)))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Statistics of one layer with all that there can be, as format 1."""
    stats = stats_of(what=replace(ALL, keep_qk=True))
    path = _statistics_file.save(stats.parts, None, tmp_path / "heads.safetensors", False, qk=True)
    return as_version_1(path, stats.parts)


@pytest.mark.parametrize(("to", "nth"), [("gone", 0), ("flat", 1), ("bool", 2)])
def test_a_tensor_that_is_another_is_told_as_damage(to: str, nth: int, saved: Path) -> None:
    before = saved.read_bytes()
    with safe_open(saved, framework="pt") as file:
        names = [*file.keys()]
    assert len(names) > 100
    for name in names[nth::3]:
        saved.write_bytes(before)
        with safe_open(saved, framework="pt") as file:
            x = file.get_tensor(name)
        if to == "bool" and ("/qk/" in name or x.dtype == torch.bool):
            continue
        other = {"gone": None, "flat": x[None], "bool": x.bool()}[to]
        with pytest.raises(ValueError, match=r"heads.safetensors: is damaged: .*" + name.rpartition("/")[2]):
            HeadStats.load(damaged(saved, **{name: other}))


@pytest.mark.parametrize(
    ("name", "to"),
    [
        ("rows", -7),
        ("broken", -7),
        ("broken", 2**62),
        *((f"moments/lse/{what}", to) for what in ("count", "histogram") for to in (-1, 2**62)),
        ("moments/lse/histogram", 1),
        ("moments/lse/M2", -1e-3),
        ("moments/lse/mean", 1e3),
        *(
            (each, -1)
            for each in ("received", "eligible", "map/sum", "map/count", "map/max", "edges/p", "kept/0/queries")
        ),
        *((each, -2) for each in ("map/argmax", "edges/at", "kept/0/values/argmax", "kept/0/values/top_keys")),
        *((each, 11) for each in ("map/argmax", "edges/at", "kept/0/values/argmax", "kept/0/queries")),
        ("qk/0/spans", 12),
        ("qk/0/spans", 2**62),
        ("qk/0/spans", -(2**62)),
    ],
)
def test_numbers_that_no_rows_come_to_are_told_as_damage(name: str, to: float, saved: Path) -> None:
    with safe_open(saved, framework="pt") as file:
        x = file.get_tensor(f"0/{name}")
    x.view(-1)[-1] = to
    with pytest.raises(
        ValueError, match=rf"heads.safetensors: is damaged: 0/{name}: (holds .* to |is not possible for any)"
    ):
        HeadStats.load(damaged(saved, **{f"0/{name}": x}))


def test_two_layers_of_one_name_are_told_as_damage(tmp_path: Path) -> None:
    path = stats_of().named("a").merge(stats_of().named("b")).save(tmp_path / "heads.safetensors")
    with safe_open(path, framework="pt") as file:
        entry = file.metadata()["headscope.stats"].replace('"name": "b"', '"name": "a"')
    with pytest.raises(ValueError, match=r"is damaged: layers: got a twice, expected different names"):
        HeadStats.load(damaged(path, entry))


@pytest.mark.parametrize("name", ["spans", "lse"])
def test_a_tensor_of_weights_of_another_dtype_is_told_as_damage(name: str, saved: Path) -> None:
    with safe_open(saved, framework="pt") as file:
        other = file.get_tensor(f"0/qk/0/{name}").short()
    with pytest.raises(ValueError, match=f"is damaged: 0/qk/0/{name}: got I16, expected "):
        HeadStats.load(damaged(saved, **{f"0/qk/0/{name}": other}))


def test_a_name_that_could_not_be_read_again_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not UTF-8, and safetensors does not open files with such names"):
        stats_of().save(tmp_path / os.fsdecode(b"o\xff.safetensors"))
    assert [*tmp_path.iterdir()] == []


def test_loaded_weights_can_be_copied_and_pickled(tmp_path: Path) -> None:
    _statistics_file.save(
        stats_of(what=replace(ALL, keep_qk=True)).parts, None, tmp_path / "qk.safetensors", False, qk=True
    )
    stats = HeadStats.load(tmp_path / "qk.safetensors")
    for again in (copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))):
        assert torch.equal(again.tile(0, 11, 0, 11), stats.tile(0, 11, 0, 11))


def test_torch_saves_what_was_observed() -> None:
    def again(what: Any) -> Any:
        torch.save(what, file := io.BytesIO())
        file.seek(0)
        return torch.load(file, weights_only=False)

    stats = stats_of()
    raw = {"received": stats.received, "eligible": stats.eligible, **vars(stats.map), **stats.kept[0].values}
    assert_same(again(stats), stats, exactly=True)
    torch.testing.assert_close(vars(again(stats.map)), vars(stats.map), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(again(raw), raw, rtol=0, atol=0, equal_nan=True)


def test_a_pickle_holds_the_numbers_and_no_more() -> None:
    stats = observe(*tensors(1, length=300), what=Observe(map=30, top=2, keep_rows=True))
    stats.flat()
    size = sum(x.nbytes for x in (stats.received, stats.eligible, *vars(stats.map).values()))
    size += sum(x.nbytes for x in (stats.kept[0].counted, stats.kept[0].queries, *stats.kept[0].values.values()))
    size += sum(x.nbytes for moments in stats.parts["0"].moments.values() for x in vars(moments).values())
    assert size < len(pickle.dumps(stats)) < 1.3 * size


def test_nothing_is_left_of_a_write_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no space left")

    path = stats_of().save(tmp_path / "heads.safetensors")
    before = path.read_bytes()
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match=r"no space left"):
        stats_of(seed=4).save(path)
    assert path.read_bytes() == before
    assert len([*tmp_path.iterdir()]) == 1


def test_a_device_can_be_chosen() -> None:
    stats = stats_of()
    assert stats.to("meta").edges.p.device.type == "meta"
    assert stats.to("cpu").flat() == stats.flat()

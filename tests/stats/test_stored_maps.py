"""Maps in files: 16 bits with a bounded error, exact on request, left out where q and k give them, and never a bomb."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import headscope
from headscope import HeadStats, Observe, Recording, masks, observe, watch
from headscope.report._viewer.packing import Map
from headscope.report.viewer import render_recording
from headscope.stats import HeadMap, _derived_map, _statistics_file
from headscope.stats._layer import LayerStats
from headscope.stats._map_codes import ERROR, decode, encode, expand_runs, runs_of_equal, scale_of
from headscope.stats._tensor_reader import TensorFile
from support.commands import Run
from support.oracle import attention
from support.recording_files import as_version_1, without_checksums

HEADS, LENGTH = 3, 13


def written(stats: HeadStats, path: Path, *, qk: bool = False, exact: bool = False) -> Path:
    return _statistics_file.save(stats.parts, None, path, True, qk=qk, exact=exact)


def observed(bins: int = 5, length: int = LENGTH, *, seed: int = 0, batch: int = 1, **options: Any) -> HeadStats:
    what = options.pop("what", Observe(map=bins, keep_qk=True))
    draw = torch.Generator().manual_seed(seed)
    q, k = 2 * torch.randn(2, batch, HEADS, length, 4, generator=draw, dtype=options.pop("dtype", torch.float32))
    return observe(q, k, what=what, **options)


def contents(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """All that is in a file; the order of its entries differs from one to the next."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return {name: (x.dtype, x.shape, x.numpy().tobytes()) for name, x in tensors.items()}, file.metadata()


def form(path: Path, layer: int = 0) -> str:
    with safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["headscope.stats"])["layers"][layer]["cells"]["form"]


def assert_near(ours: HeadMap, theirs: HeadMap, error: float = ERROR) -> None:
    assert torch.equal(ours.count, theirs.count)
    for one, other in ((ours.mean, theirs.mean), (ours.max, theirs.max), (ours.sum, theirs.sum)):
        torch.testing.assert_close(one.double(), other.double(), rtol=error, atol=1e-36, equal_nan=True)


# ---------------------------------------------------------------- codes


@given(st.lists(st.one_of(st.just(0.0), st.floats(1e-50, 1.0)), min_size=1, max_size=29))
@example([1e-50, math.nextafter(1e-50, 1)])
@example([0.3, 0.3 + 1e-9, 0.3 + 1e-8])
@example([0.3, 0.3 + 1e-6, 0.3 + 1e-5, 0.0])
def test_a_code_has_the_stated_error_and_the_order_of_its_weight(numbers: list[float]) -> None:
    weights = torch.tensor(numbers, dtype=torch.float64)
    scale = scale_of(weights)
    assert scale is not None
    codes = encode(weights, *scale)
    back = decode(codes, *scale)
    assert ((back - weights).abs() <= ERROR * weights).all()
    assert torch.equal(codes[weights.argsort()], codes.sort().values)
    if (weights > 0).any():
        assert (back.max(), back[back > 0].min()) == (weights.max(), weights[weights > 0].min())
    assert scale_of(back) == scale
    assert torch.equal(encode(back, *scale), codes), "saving it again changes nothing"


@pytest.mark.parametrize("numbers", [[1.0, 1e-60], [math.nan], [math.inf, 0.1], [-1.0]])
def test_weights_that_codes_cannot_hold_have_no_scale(numbers: list[float]) -> None:
    assert scale_of(torch.tensor(numbers, dtype=torch.float64)) is None


@given(st.lists(st.integers(0, 2**40), max_size=31))
def test_runs_of_equal_numbers_are_those_numbers(numbers: list[int]) -> None:
    flat = torch.tensor(numbers, dtype=torch.int64)
    assert torch.equal(expand_runs("x", *runs_of_equal(flat), len(numbers)), flat)
    with pytest.raises(ValueError, match=r"x: expected runs of \d+ numbers"):
        expand_runs("x", *runs_of_equal(flat), len(numbers) + 1)


# ---------------------------------------------------------------- what is loaded

MASKS: dict[str, Callable[[], Any]] = {
    "all": lambda: None,
    "causal": masks.causal,
    "window": lambda: masks.window(3),
    "padding": lambda: masks.causal() & masks.KeyLengths(torch.tensor([LENGTH, 7, 5])),
    "dense": lambda: masks.Dense(torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.4),
    "heads": lambda: masks.Dense(torch.rand(HEADS, LENGTH, LENGTH, generator=torch.Generator().manual_seed(5)) < 0.4),
    "nothing": lambda: masks.Dense(torch.zeros(LENGTH, LENGTH, dtype=torch.bool)),
}


@settings(deadline=None, max_examples=60)
@given(
    name=st.sampled_from(sorted(MASKS)), bins=st.sampled_from([1, 3, 5, LENGTH, 17, 67]), exact=st.booleans(),
    qk=st.booleans(), rows=st.sampled_from([None, 5]), runs=st.integers(1, 3), double=st.booleans(),
    single=st.booleans(),
)  # fmt: skip
def test_a_loaded_map_is_the_map(
    tmp_path_factory: pytest.TempPathFactory, name: str, bins: int, exact: bool, qk: bool, rows: int | None,
    runs: int, double: bool, single: bool,
) -> None:  # fmt: skip
    batch = 1 if single and name != "padding" else 3
    what = Observe(map=bins, rows=rows, keep_qk=True)
    dtype = torch.float64 if double else torch.float32
    calls = [observed(batch=batch, seed=n, dtype=dtype, what=what, mask=MASKS[name]()) for n in range(runs)]
    stats = calls[0].merge(*calls[1:])
    path = tmp_path_factory.mktemp("maps") / "a.safetensors"
    back = HeadStats.load(written(stats, path, qk=qk, exact=exact))
    assert_near(back.map, stats.map, 0.0 if exact else ERROR)
    assert not (back.map.mean > back.map.max * (1 + 1e-12)).any()
    if form(path) == "weights":
        assert (qk, exact) == (True, False)
        assert_near(back.map, stats.map, 1e-5)
        at = back.map.argmax[back.map.count > 0]
        p = torch.stack([stats.tile(0, LENGTH, 0, LENGTH, run=run) for run in range(runs)])  # [run, B, H, Q, K]
        heads = torch.arange(HEADS)[:, None, None].expand(back.map.count.shape)[back.map.count > 0]
        places = p[at[:, 0], at[:, 1], heads, at[:, 2], at[:, 3]].double()
        torch.testing.assert_close(places, stats.map.max[stats.map.count > 0].double(), rtol=1e-5, atol=1e-30)
    else:
        assert torch.equal(back.map.argmax, stats.map.argmax)
        again = written(HeadStats.load(path), path.with_name("b.safetensors"), qk=qk, exact=exact)
        assert contents(again) == contents(path), "saving it again changes nothing"
    assert_near(back.merge(stats).map, stats.merge(stats).map, 1e-12 if exact else ERROR)


@pytest.mark.parametrize("qk", [False, True])
@pytest.mark.parametrize("bins", [5, LENGTH])
def test_a_loaded_map_is_that_of_float64_weights(bins: int, qk: bool, tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, HEADS, LENGTH, 4, generator=draw, dtype=torch.float64)
    stats = observe(q, k, mask=masks.causal(), what=Observe(map=bins, keep_qk=True))
    back = HeadStats.load(written(stats, tmp_path / "a.safetensors", qk=qk)).map
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    p = attention(q, k, k, seen=seen).weights[0]
    starts = torch.arange(bins + 1) * LENGTH // bins
    for x, y in itertools.product(range(bins), repeat=2):
        rows, columns = slice(*starts[x : x + 2]), slice(*starts[y : y + 2])
        visible = seen[rows, columns]
        if not visible.any():
            assert back.mean[:, x, y].isnan().all()
            continue
        piece = p[:, rows, columns]
        torch.testing.assert_close(back.mean[:, x, y], piece.sum((1, 2)) / visible.sum(), rtol=ERROR, atol=0)
        torch.testing.assert_close(back.max[:, x, y], piece.amax((1, 2)), rtol=ERROR, atol=0)


def test_weights_too_far_apart_for_codes_are_exact(tmp_path: Path) -> None:
    q, k = 40 * torch.randn(2, 1, HEADS, LENGTH, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    stats = observe(q, k, what=Observe(map=LENGTH))
    smallest = stats.map.sum[stats.map.sum > 0].min()
    assert 0 < smallest < 1e-100
    back = HeadStats.load(stats.save(tmp_path / "a.safetensors"))
    assert form(tmp_path / "a.safetensors") == "exact"
    assert torch.equal(back.map.sum, stats.map.sum)


@pytest.mark.parametrize("lengths", [(7, 11), (11, 7)])
def test_runs_of_several_lengths_have_places_in_their_own_calls(lengths: tuple[int, int], tmp_path: Path) -> None:
    several = [observe(*torch.randn(2, 1, HEADS, n, 4), what=Observe(map=5, keep_qk=True)) for n in lengths]
    stats = several[0].merge(several[1])
    back = HeadStats.load(written(stats, tmp_path / "a.safetensors", qk=True))
    assert torch.equal(back.map.argmax, stats.map.argmax)
    assert_near(back.map, stats.map)


def test_rows_that_a_mask_of_rows_leaves_out_are_left_out_of_a_computed_map(tmp_path: Path) -> None:
    rows = torch.zeros(1, LENGTH, dtype=torch.bool)
    rows[0, 2:9] = True
    stats = observed(what=Observe(map=LENGTH, keep_qk=True, rows=rows))
    path = written(stats, tmp_path / "a.safetensors", qk=True)
    assert form(path) == "weights"
    assert_near(HeadStats.load(path).map, stats.map, 1e-5)


def test_a_map_that_q_and_k_do_not_give_again_is_stored(tmp_path: Path) -> None:
    stats = observed(bins=LENGTH, batch=3)
    part = stats.parts["0"]
    assert part.map is not None
    other = replace(part.map, sum=part.map.sum * 1.01)
    path = written(HeadStats({"0": replace(part, map=other)}), tmp_path / "a.safetensors", qk=True)
    assert form(path) == "codes"
    assert_near(HeadStats.load(path).map, other)


# ---------------------------------------------------------------- computed when it is read


def unread(path: Path) -> HeadStats:
    stats = HeadStats.load(written(observed(bins=LENGTH), path, qk=True))
    assert form(path) == "weights"
    return stats


def test_a_computed_map_reads_q_and_k_only_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[str] = []
    read = TensorFile.read_piece
    monkeypatch.setattr(
        TensorFile, "read_piece", lambda self, name, bounds: (reads.append(name), read(self, name, bounds))[1]
    )
    stats = unread(tmp_path / "a.safetensors")
    assert (stats.map.bins, stats[0].flat() != {}, reads) == (LENGTH, True, [])
    first = stats.map.sum
    count = len(reads)
    assert count > 0
    assert stats.map.sum is first
    assert stats.map.argmax.shape == (HEADS, LENGTH, LENGTH, 4)
    assert len(reads) == count
    assert type(stats.map) is HeadMap
    with pytest.raises(AttributeError, match="nothing"):
        _ = unread(tmp_path / "b.safetensors").map.nothing  # type: ignore[attr-defined]


def test_a_computed_map_is_copied_pickled_moved_and_replaced(tmp_path: Path) -> None:
    expected = unread(tmp_path / "a.safetensors").map.sum
    for change in (
        copy.deepcopy,
        lambda stats: pickle.loads(pickle.dumps(stats)),
        lambda stats: stats.to("cpu"),
        lambda stats: HeadStats({"0": replace(stats.parts["0"], map=replace(stats.map, max=stats.map.max))}),
    ):
        stats: HeadStats = change(unread(tmp_path / "a.safetensors"))
        assert torch.equal(stats.map.sum, expected)


def test_a_computed_map_is_saved_again_with_and_without_q_and_k(tmp_path: Path) -> None:
    stats = observed(bins=LENGTH)
    first = written(stats, tmp_path / "a.safetensors", qk=True)
    second = written(HeadStats.load(first), tmp_path / "b.safetensors", qk=True)
    assert contents(second) == contents(first)
    for exact, expected in ((False, "codes"), (True, "exact")):
        third = written(HeadStats.load(first), tmp_path / "c.safetensors", exact=exact)
        assert form(third) == expected
        assert_near(HeadStats.load(third).map, stats.map)


def test_a_computed_map_of_a_changed_file_is_one_clear_error(tmp_path: Path) -> None:
    stats = unread(tmp_path / "a.safetensors")
    (tmp_path / "a.safetensors").unlink()
    with pytest.raises(ValueError, match=r"a\.safetensors: can no longer be read"):
        _ = stats.map.sum
    with pytest.raises(ValueError, match=r"a\.safetensors: can no longer be read"):
        stats.merge(stats)
    assert stats.flat(), "row quantities are in memory"


def test_a_damaged_file_of_a_computed_map_is_one_line_of_the_command(run: Run, tmp_path: Path) -> None:
    path = recorded(LENGTH).save(Path("r.safetensors"), qk=True)
    entry = TensorFile(path).entries["0/qk/0/q"]
    content = bytearray(path.read_bytes())
    content[8 + int.from_bytes(content[:8], "little") + entry.start + 2] ^= 64
    path.write_bytes(content)
    assert Recording.load(path).layers == ("0",)
    ran = run("report", "r.safetensors")
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert "r.safetensors: is damaged: 0/qk/0/q: the file was changed or damaged since it was saved" in ran.err


# ---------------------------------------------------------------- pages and sizes


def recorded(bins: int) -> Recording:
    torch.manual_seed(0)
    model = nn.Sequential(headscope.MultiHeadAttention(12, HEADS)).eval()
    with torch.no_grad(), watch(model, what=Observe(map=bins, edges=3, keep_qk=True)) as seen:
        model(torch.randn(1, LENGTH, 12))
    return seen


@pytest.mark.parametrize("qk", [False, True])
@pytest.mark.parametrize("bins", [5, LENGTH])
def test_the_page_of_a_loaded_recording_shows_the_same_maps(bins: int, qk: bool, tmp_path: Path) -> None:
    seen = recorded(bins)
    back = Recording.load(seen.save(tmp_path / "r.safetensors", qk=qk))
    (ours,), (theirs,) = (list(each.stats.parts.values()) for each in (back, seen))
    assert ours.map is not None
    assert theirs.map is not None
    one, other = Map.of(ours.map, ours), Map.of(theirs.map, theirs)
    assert (one.visible == other.visible).all()
    assert (one.exact, one.ranges) == (other.exact, other.ranges)
    for name in ("mean", "max", "first_share"):
        x, y = (torch.from_numpy(getattr(each, name)) for each in (one, other))
        torch.testing.assert_close(x, y, rtol=2 * ERROR, atol=0, equal_nan=True)
    for (x, wide), (y, as_wide) in zip(one.places, other.places, strict=True):
        assert wide == as_wide
        assert (x[one.visible] == y[one.visible]).all()
    pages = [render_recording(each, exact=()) for each in (back, seen)]
    assert len(pages[0]) == pytest.approx(len(pages[1]), rel=0.01)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 80e6), (torch.bfloat16, 40e6)])
def test_a_bert_of_512_tokens_with_q_and_k_is_small(dtype: torch.dtype, most: float) -> None:
    q, k = torch.randn(2, 1, 12, 512, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    stats = observe(q, k, what=Observe(map=512, keep_qk=True))
    assert 12 * _statistics_file.size_of(stats.parts, qk=True) < most
    part = replace(stats.parts["0"], tiles={})
    cells = 12 * 512 * 512
    assert 2 * cells < _statistics_file.size_of({"0": part}) < 2.1 * cells


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("qk", [False, True])
def test_the_size_that_is_announced_is_that_of_the_file(qk: bool, exact: bool, tmp_path: Path) -> None:
    stats = observed(bins=LENGTH).named("a").merge(observed(bins=3, seed=1).named("b"))
    path = written(stats, tmp_path / "a.safetensors", qk=qk, exact=exact)
    begin = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert _statistics_file.size_of(stats.parts, qk=qk, exact=exact) == path.stat().st_size - begin


def test_a_map_is_compared_with_q_and_k_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    compute = _derived_map.computed_map
    monkeypatch.setattr(_derived_map, "computed_map", lambda source: (computed.append(0), compute(source))[1])
    stats = observed(bins=LENGTH)
    size = _statistics_file.size_of(stats.parts, qk=True)
    assert form(written(stats, tmp_path / "a.safetensors", qk=True)) == "weights"
    assert size == _statistics_file.size_of(stats.parts, qk=True)
    assert len(computed) == 1
    other = HeadStats({"0": replace(stats.parts["0"], tiles=observed(bins=LENGTH, seed=1).parts["0"].tiles)})
    assert form(written(other, tmp_path / "a.safetensors", qk=True)) == "codes", "of other q and k"


def test_only_visible_bins_and_other_counts_take_bytes(tmp_path: Path) -> None:
    bins, length = 31, 31 * 7
    q, k = torch.randn(2, 1, HEADS, length, 4, generator=torch.Generator().manual_seed(0))
    stats = observe(q, k, mask=masks.causal(), what=Observe(map=bins))
    path = stats.save(tmp_path / "a.safetensors")
    with safe_open(path, framework="pt") as file:
        sizes = {name[6:]: file.get_tensor(name).nbytes for name in file.keys() if "/map/" in name}  # noqa: SIM118
    cells = HEADS * bins * (bins + 1) // 2
    assert {name: sizes.pop(name) for name in ("mean", "max", "query", "key")} == {
        "mean": 2 * cells, "max": 2 * cells, "query": cells, "key": cells
    }  # fmt: skip
    assert sum(sizes.values()) < 16 * bins


# ---------------------------------------------------------------- damage

Damage = Callable[[dict[str, Tensor], dict[str, Any]], object]


def damaged(path: Path, damage: Damage) -> Path:
    """The same file without checksums, whose tensors or whose header of the layer were changed."""
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        entries = without_checksums(file.metadata())
    header = json.loads(entries["headscope.stats"])
    damage(tensors, header["layers"][0])
    save_file(tensors, path, {**entries, "headscope.stats": json.dumps(header)})
    return path


def filled(name: str, value: float) -> Damage:
    return lambda tensors, _: tensors[f"0/map/{name}"].view(-1)[-1:].fill_(value)


def cells(**changes: Any) -> Damage:
    return lambda _, layer: layer["cells"].update(changes)


def entry(**changes: Any) -> Damage:
    return lambda _, layer: layer.update(changes)


def longer(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    tensors["0/map/length"] = tensors["0/map/length"].long() * 2**40


def negative(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    tensors["0/map/count"] = -tensors["0/map/count"].to(torch.int16).clamp(max=1)


CODES: list[tuple[Damage, str]] = [
    (entry(cells=3), "cells: got int, expected dict or NoneType"),
    (cells(bins=0), "bins: got 0, expected 1 to"),
    (cells(bins=2**40), rf"0/map: got {2**40} x {2**40} bins of 3 heads in \d+ bytes, expected more bytes"),
    (cells(bins=12), "0/map/length: expected runs of 144 numbers"),
    (cells(form="x"), "form: got x, expected weights, codes or exact"),
    (cells(form="exact"), "it lacks '0/map/sum'"),
    (cells(form="weights"), r"0/map: got 11 bins for lengths \(77, 77\), expected one for each token"),
    (cells(equal=True), "0/map/mean|expected weights"),
    (cells(equal=1), "equal: got int, expected bool"),
    (cells(places=["key", 3]), "places: got int, expected str"),
    (filled("scale", math.nan), "0/map/scale: holds nan to nan, outside the possible range"),
    (filled("scale", 1e-9), "0/map/scale: holds .*, outside the possible range"),
    (filled("scale", -1), "0/map/scale: holds -1 to .*, outside the possible range"),
    (filled("scale", 2), "0/map/(sum|max): expected weights, or sums of them, of at most"),
    (negative, "0/map/count: holds -1 to .*, outside the possible range"),
    (filled("query", 7), "0/map/query: holds 0 to 7, outside the possible range"),
    (filled("key", 7), "0/map/key: holds 0 to 7, outside the possible range"),
    (filled("length", 9), "0/map/length: expected runs of 121 numbers"),
    (longer, "0/map/length: expected runs of 121 numbers, got others"),
    (entry(runs=0), "0/map/run: holds 0 to 0, outside the possible range"),
]


@pytest.mark.parametrize("number", range(len(CODES)))
def test_a_damaged_map_is_one_clear_error(number: int, tmp_path: Path) -> None:
    damage, message = CODES[number]
    path = observed(11, 77, mask=masks.causal()).save(tmp_path / "a.safetensors")
    if number == 7:  # maxima that are not read do no harm
        HeadStats.load(damaged(path, damage))
        return
    with pytest.raises(ValueError, match=rf"^\S+a\.safetensors: is damaged: .*({message})"):
        HeadStats.load(damaged(path, damage))


WEIGHTS: list[tuple[Damage, str]] = [
    (cells(bins=12), r"0/map: got 12 bins for lengths \(13, 13\), expected one for each token"),
    (cells(bins=2**40), rf"0/map: got {2**40} bins for lengths \(13, 13\), expected one for each token"),
    (entry(lengths=None), r"0/map: got 13 bins for lengths None, expected one for each token"),
    (entry(qk=[], qk_runs=[]), r"0/map: expected q and k of 1 runs, got those of \[\]"),
    (entry(runs=2), r"0/map: expected q and k of 2 runs, got those of \[0\]"),
    (lambda tensors, _: tensors.pop("0/map/counted/0"), "it lacks '0/map/counted/0'"),
    (
        lambda tensors, _: tensors.update({"0/map/counted/0": torch.ones(1, 2, LENGTH, dtype=torch.bool)}),
        r"0/map/counted/0: got \[1, 2, 13\], expected \[1, 3, 13\]",
    ),
    (
        lambda tensors, _: tensors.update({"0/map/counted/0": torch.ones(1, 1, LENGTH)}),
        "0/map/counted/0: got torch.float32, expected torch.bool",
    ),
]


@pytest.mark.parametrize("number", range(len(WEIGHTS)))
def test_the_damaged_source_of_a_map_is_one_clear_error(number: int, tmp_path: Path) -> None:
    damage, message = WEIGHTS[number]
    path = written(observed(bins=LENGTH), tmp_path / "a.safetensors", qk=True)
    with pytest.raises(ValueError, match=rf"^\S+a\.safetensors: is damaged: .*({message})"):
        HeadStats.load(damaged(path, damage))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("to", ["gone", "flat", "bool"])
def test_a_tensor_of_a_map_that_is_another_is_damage(to: str, exact: bool, tmp_path: Path) -> None:
    stats = observed(mask=MASKS["heads"](), batch=2).merge(observed(batch=2, seed=1))
    content = written(stats, tmp_path / "a.safetensors", exact=exact).read_bytes()
    with safe_open(tmp_path / "a.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if "/map/" in name]  # noqa: SIM118
    assert {"pattern", "run", "entry", "query", "key", "max"} <= {name.rpartition("/")[2] for name in names}
    for name in names:
        (tmp_path / "a.safetensors").write_bytes(content)

        def change(tensors: dict[str, Tensor], _: dict[str, Any], name: str = name) -> None:
            x = tensors.pop(name)
            if to != "gone":
                tensors[name] = x[None].contiguous() if to == "flat" else x.bool()

        with pytest.raises(ValueError, match=r"a\.safetensors: is damaged: .*0/map/"):
            HeadStats.load(damaged(tmp_path / "a.safetensors", change))


@pytest.mark.parametrize(
    ("name", "value"), [("sum", -1), ("max", -0.5), ("sum", math.nan), ("max", math.inf), ("sum", 1e9), ("pattern", 9)]
)
def test_an_impossible_number_of_an_exact_map_is_damage(name: str, value: float, tmp_path: Path) -> None:
    stats = observed(mask=MASKS["heads"]())
    path = written(stats, tmp_path / "a.safetensors", exact=True)
    with pytest.raises(ValueError, match=rf"a\.safetensors: is damaged: 0/map/{name}: "):
        HeadStats.load(damaged(path, filled(name, value)))


def test_a_small_file_never_holds_a_large_map(tmp_path: Path) -> None:
    """A map of few visible bins has a count for every bin, so a file is never much smaller than its maps."""
    stats = observed(bins=67, mask=masks.window(1))
    path = stats.save(tmp_path / "a.safetensors")
    assert path.stat().st_size > HEADS * 67 * 67
    assert_near(HeadStats.load(path).map, stats.map)
    with pytest.raises(ValueError, match=r"a\.safetensors: is damaged: 0/map: got 67 x 67 bins .* expected more bytes"):
        HeadStats.load(damaged(path, small))


def small(tensors: dict[str, Tensor], _: dict[str, Any]) -> None:
    """The same counts in as few bytes as they need."""
    counts = tensors["0/map/count"]
    assert counts.shape == (HEADS, 67, 67)
    del tensors["0/map/pattern"]
    tensors["0/map/count"], tensors["0/map/length"] = runs_of_equal(counts[0].flatten())


# ---------------------------------------------------------------- versions


def test_a_file_of_format_1_has_the_same_map(tmp_path: Path) -> None:
    stats = observed(mask=masks.causal())
    path = as_version_1(written(stats, tmp_path / "a.safetensors", qk=True), stats.parts)
    with safe_open(path, framework="pt") as file:
        assert '"version": 1' in file.metadata()["headscope.stats"]
    back = HeadStats.load(path)
    assert torch.equal(back.map.sum, stats.map.sum)
    assert torch.equal(back.map.argmax, stats.map.argmax)
    assert form(written(back, tmp_path / "b.safetensors")) == "codes"


@pytest.mark.parametrize(("bins", "version"), [(None, 1), (3, 2)])
def test_a_file_without_a_map_is_one_that_earlier_versions_read(bins: int | None, version: int, tmp_path: Path) -> None:
    path = observed(what=Observe(map=bins)).save(tmp_path / "a.safetensors")
    with safe_open(path, framework="pt") as file:
        assert re.match(rf'{{"version": {version}, ', file.metadata()["headscope.stats"])


def test_a_map_on_float32_sums_is_saved(tmp_path: Path) -> None:
    """A device without float64 has sums in float32."""
    part: LayerStats = observed().parts["0"]
    assert part.map is not None
    short = replace(part.map, sum=part.map.sum.float(), max=part.map.max.float())
    for exact in (False, True):
        path = written(HeadStats({"0": replace(part, map=short)}), tmp_path / "a.safetensors", exact=exact)
        assert_near(HeadStats.load(path).map, short)

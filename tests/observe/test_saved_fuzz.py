"""Random observations, saved and loaded, are as they were."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import headscope
from headscope import Observe
from headscope.stats import HeadStats, _statistics_file, merge
from support.observed import Observed, observations

HEADS = st.sets(st.integers(0, 3), max_size=2).map(lambda heads: tuple(sorted(heads)))


def save(stats: HeadStats, path: Path, qk: bool, exact: bool) -> None:
    _statistics_file.save(stats.parts, stats.origin, path, False, qk=qk, exact=exact)


def assert_same_files(one: Path, other: Path) -> None:
    """They have the same bytes, but for the scales of codes: sum / count · count may round to another mean."""
    if one.read_bytes() == other.read_bytes():
        return
    tensors, others = load_file(one), load_file(other)
    assert tensors.keys() == others.keys()
    scales = {name for name in tensors if name.endswith("/map/scale")}
    assert scales
    for name, x in tensors.items():
        rtol = 1e-15 if name in scales else 0
        torch.testing.assert_close(others[name], x, rtol=rtol, atol=0, equal_nan=True)


def check(seen: Observed, heads: tuple[int, ...], exact: bool) -> HeadStats:
    """A file gives the same numbers, and saved once more the same file; also of two runs."""
    case = seen.case
    what = replace(seen.what, weights=tuple(head for head in heads if head < case.q.shape[-3]))
    stats = headscope.observe(
        **seen.tensors(), mask=case.mask, **case.numbers, q_pos=seen.q_pos, k_pos=seen.k_pos, kind=seen.kind, what=what
    )
    qk = what.keep_qk and case.mask is None
    with tempfile.TemporaryDirectory() as folder:
        for name, each in (("one", stats), ("two", merge(stats, stats))):
            first, again = Path(folder, name), Path(folder, f"{name} again")
            save(each, first, qk, exact)
            loaded = HeadStats.load(first)
            save(loaded, again, qk, exact)
            assert_same_files(first, again)
            if exact:
                assert loaded.to_dict() == each.to_dict()
                assert merge(loaded, stats).to_dict() == merge(each, stats).to_dict()
            for head in what.weights:
                for one, other in zip(each.weights_of(head), loaded.weights_of(head), strict=True):
                    torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
    return stats


@given(observations(), HEADS, st.booleans())
@settings(max_examples=20)
def test_a_file_gives_what_was_saved(seen: Observed, heads: tuple[int, ...], exact: bool) -> None:
    assert check(seen, heads, exact).parts


@pytest.mark.long
@given(observations(), HEADS, st.booleans())
@settings(settings.get_profile("long"), max_examples=5_000)
def test_a_file_gives_what_was_saved_at_length(seen: Observed, heads: tuple[int, ...], exact: bool) -> None:
    assert check(seen, heads, exact).parts


@pytest.mark.parametrize(("batch", "queries", "keys"), [(1, 1, 5), (1, 1, 1), (1, 0, 3), (0, 13, 13), (2, 1, 0)])
def test_few_rows_of_many_heads_are_saved_and_loaded(batch: int, queries: int, keys: int, tmp_path: Path) -> None:
    """The number of a head may be larger than that of all rows, and a single number may have any strides."""
    q, k = torch.randn(batch, 12, queries, 8), torch.randn(batch, 12, keys, 8)
    stats = headscope.observe(q, k, what=Observe(weights=[0, 11], top=3, keep_rows=True, map=2, edges=2))
    loaded = HeadStats.load(stats.save(tmp_path / "stats"))
    assert loaded.parts["0"].weights[0].heads == (0, 11)
    assert torch.equal(loaded.parts["0"].weights[0].p, stats.parts["0"].weights[0].p)
    for name, values in stats.kept[0].values.items():
        torch.testing.assert_close(loaded.kept[0].values[name], values, rtol=0, atol=0, equal_nan=True)

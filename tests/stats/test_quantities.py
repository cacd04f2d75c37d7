"""Each row quantity has one definition, and both observers compute what it states; a test names what is missing."""

from __future__ import annotations

import math
import re
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headscope import HeadStats, Observe, attend, masks, observe
from headscope._attend import prepare
from headscope._observe import native_observer, steps
from headscope.report.words import STATISTICS, word
from headscope.stats import ROW_QUANTITIES, Quantity, histogram_edges, quantity_names, quantity_of
from headscope.stats._quantities import Row
from support.paths import ROOT

B, H, Q, K, D = 2, 3, 9, 11, 5
WINDOW = 2
NAMES = [each.name for each in ROW_QUANTITIES]
ON_REQUEST = tuple(each.name for each in ROW_QUANTITIES if each.on_request)
BEYOND_ROWS = {"argmax", "top"}  # of the table in docs/concepts/statistics.md: they are keys, not numbers


def test_names_are_different() -> None:
    assert len({*NAMES}) == len(NAMES)


def test_every_definition_has_a_row_in_the_docs() -> None:
    page = (ROOT / "docs" / "concepts" / "statistics.md").read_text(encoding="utf-8")
    table = page.partition("## Row quantities")[2].partition("\n\n| ")[2].partition("\n\n")[0]
    cells = [line.split(" | ")[0] for line in table.splitlines()]
    documented = {name.removesuffix("_w") for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert [name for name in NAMES if name not in documented] == [], "docs/concepts/statistics.md has no row of these"
    assert documented - BEYOND_ROWS - {*NAMES} == set(), "stats/_quantities.py does not define these"


def test_what_is_measured_on_request_is_named_with_its_option() -> None:
    page = (ROOT / "docs" / "concepts" / "statistics.md").read_text(encoding="utf-8")
    documented = page.partition("\n| `extra` |")[2].partition("\n")[0]
    docstring = (Observe.__doc__ or "").partition(" extra:")[2].partition("\n\n")[0]
    for place, text in (("docs/concepts/statistics.md", documented), ("the docstring of Observe", docstring)):
        lacking = [name for name in ON_REQUEST if name not in re.findall(r"\w+", text)]
        assert lacking == [], f"`extra` of {place} lacks these"


def test_the_native_kernels_list_every_definition_in_their_order() -> None:
    listed = native_observer.QUANTITIES
    own = [
        each for each in ROW_QUANTITIES if not each.has_distance and each.requires != "selection"
    ]  # has its own pass
    missing = [each.name for each in own if each.name not in listed]
    assert missing == [], "QUANTITIES of _observe/native_observer.py lacks these"
    header = (ROOT / "csrc" / "interface" / "attention.h").read_text(encoding="utf-8")
    entries = header.partition("enum Quantity : int {")[2].partition("QUANTITIES")[0]
    assert [name.lower() for name in re.findall(r"\w+", entries)] == [*listed], "csrc/interface/attention.h: Quantity"
    check = (ROOT / "tests" / "native" / "selfcheck.cpp").read_text(encoding="utf-8")
    names = re.findall(r'"(\w+)"', check.partition("NAMES[QUANTITIES] = {")[2].partition("};")[0])
    assert [name for name in listed if name not in names] == [], "NAMES of tests/native/selfcheck.cpp lacks these"
    assert names == [*listed]


@pytest.mark.parametrize("quantity", ROW_QUANTITIES, ids=lambda each: each.name)
def test_a_definition_is_whole(quantity: Quantity) -> None:
    name = f"{quantity.name}_16" if quantity.has_distance else quantity.name
    assert quantity_of(name) is quantity
    assert histogram_edges(name) == quantity.edges == tuple(sorted({*quantity.edges}))
    assert quantity.bounds[0] < quantity.bounds[1]
    assert quantity.formula
    assert word(name).meaning.endswith(".")
    assert "{" not in word(name).meaning
    assert word(name).heading == (quantity.heading or name.replace("_", " "))
    assert quantity.has_distance or name in STATISTICS


def test_other_names_have_no_definition() -> None:
    assert [quantity_of(name) for name in ("window", "window_", "entropy_2", "other")] == [None] * 4
    assert histogram_edges("other") == histogram_edges("mass")
    assert word("some_thing") == ("some thing", "", 2)


def test_names_follow_what_rows_have() -> None:
    assert quantity_names(["weights"], [1.0]) == [each.name for each in ROW_QUANTITIES if on_weights(each)]
    assert quantity_names(["positions"], [1.0, 2.5])[2:] == ["window_1", "window_2.5", "streaming_1", "streaming_2.5"]
    everything = {each.requires for each in ROW_QUANTITIES}
    assert len(quantity_names(everything, [1.0], ON_REQUEST)) == len(NAMES)


def on_weights(quantity: Quantity) -> bool:
    return quantity.requires == "weights" and not quantity.on_request


# ---------------------------------------------------------------- both observers against the definitions


def visible(mask: str) -> Tensor:
    """Which keys each query sees, [Q, K]."""
    i, j = torch.arange(Q)[:, None] + K - Q, torch.arange(K)
    seen = {"none": torch.ones(Q, K, dtype=torch.bool), "causal": j <= i, "band": (j <= i) & (j > i - 2)}[mask]
    return seen.clone().index_fill_(0, torch.tensor([4]), False) | ((j == i) & (mask == "band"))


def example(mask: str, sinks: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(len(mask))
    q, k, v = (torch.randn(B, H, n, D, generator=random, dtype=dtype) for n in (Q, K, K))
    k[:, :, 5] = k[:, :, 6]  # equal weights
    tensors = {"q": q, "k": k, "v": v, "mask": visible(mask)}
    return tensors | ({"sinks": torch.randn(H, generator=random, dtype=dtype)} if sinks else {})


TOKENS = torch.arange(K) % 4
FIRST = 2
SELECTED = torch.arange(K) % 3 != 1


def row_of(tensors: dict[str, Tensor], b: int, h: int, i: int) -> Row | None:
    """A row in float64, or None if it sees no key."""
    keys = tensors["mask"][i].nonzero()[:, 0]
    if len(keys) == 0:
        return None
    q, k, v = (tensors[name].double() for name in "qkv")
    s = k[b, h, keys] @ q[b, h, i] / math.sqrt(D)
    sink = tensors["sinks"][h].double()[None] if "sinks" in tensors else s.new_empty(0)
    lse = torch.logsumexp(torch.cat([s, sink]), 0)
    own = i + K - Q
    real = tensors["mask"].any(0).nonzero()[:FIRST, 0]
    after = torch.tensor([bool(j > 0 and TOKENS[j - 1] == TOKENS[own]) for j in keys])
    return Row(
        p=(s - lse).exp(),
        s=s,
        lse=float(lse),
        gap=keys - own,
        first=torch.isin(keys, real),
        duplicate=(TOKENS[keys] == TOKENS[own]) & (keys != own),
        induction=after,
        norms=v[b, h, keys].norm(dim=-1),
        distance=WINDOW,
        selected=SELECTED[keys],
    )


def refuse(*_: object) -> list[str]:
    return ["this test requires the portable form"]


@contextmanager
def observer(form: str) -> Generator[None]:
    """Only the portable form, or only the native kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare, "prepared_calls", prepare.PreparedCalls())  # what was made ready before
        if form == "portable":
            patch.setattr(native_observer, "refuses", refuse)
        else:
            patch.setattr(steps, "observe_blocks", None)
        yield


def observed(form: str, tensors: dict[str, Tensor]) -> HeadStats:
    what = Observe(windows=(WINDOW,), first=FIRST, tokens=TOKENS, keep_rows=True, extra=ON_REQUEST, selected=SELECTED)
    with observer(form):
        try:
            return observe(**tensors, what=what)  # pyright: ignore[reportArgumentType]
        except KeyError as error:
            pytest.fail(f"the {form} observer does not compute {error}")


@cache
def by_definition(mask: str, sinks: bool, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every quantity of the rows of an example, [B, H, Q]; NaN where a row sees no key."""
    tensors = example(mask, sinks, dtype)
    places = torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(Q)).tolist()
    rows = {(b, h, i): row for b, h, i in places if (row := row_of(tensors, b, h, i)) is not None}
    found = {quantity.name: torch.full((B, H, Q), math.nan, dtype=torch.float64) for quantity in ROW_QUANTITIES}
    for quantity in ROW_QUANTITIES:
        for at, row in rows.items():
            found[quantity.name][at] = quantity.reference(row)
    return found


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mask", ["none", "causal", "band"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("form", ["portable", "native"])
def test_an_observer_computes_every_definition(form: str, dtype: torch.dtype, mask: str, sinks: bool) -> None:
    stats = observed(form, example(mask, sinks, dtype))
    (kept,) = stats.kept
    definitions = by_definition(mask, sinks, dtype)
    rtol = 1e-5 if dtype == torch.float32 else 1e-12
    for quantity in ROW_QUANTITIES:
        name = f"{quantity.name}_{WINDOW}" if quantity.has_distance else quantity.name
        assert name in kept.values, f"the {form} observer does not compute {name}"
        expected = definitions[quantity.name]
        torch.testing.assert_close(
            kept.values[name].double(), expected, rtol=rtol, atol=rtol / 10, equal_nan=True,
            msg=lambda text, name=name: f"{name} by the {form} observer: {text}",
        )  # fmt: skip
        values = expected[~expected.isnan()]
        least, most = quantity.bounds
        assert not len(values) or least - 1e-9 <= values.min() <= values.max() <= most + 1e-9, f"bounds of {name}"
        absent = expected.isnan() & kept.counted
        assert quantity.absent or not absent.any(), f"{name}: rows lack it, though its definition has absent=''"


# ---------------------------------------------------------------- quantities on request


def test_a_quantity_on_request_is_measured_only_then(tmp_path: Path) -> None:
    q, k, v = torch.randn(3, 1, 2, 9, 4)
    usual = observe(q, k, v, what=Observe(map=3))
    assert not {*ON_REQUEST} & {*usual.names}
    for form in ("portable", "native"):
        with observer(form):
            stats = observe(q, k, v, what=Observe(map=3, extra=ON_REQUEST))
        assert {*stats.names} - {*usual.names} == {*ON_REQUEST}
        again = HeadStats.load(stats.save(tmp_path / f"{form}.safetensors"))
        assert again.names == stats.names
        assert stats.merge(usual)["second_weight"].count.tolist() == [[9, 9]]
    attended = attend(q, k, v, observe=Observe(extra=["second_weight"]))
    assert attended.stats is not None
    torch.testing.assert_close(attended.stats["second_weight"].mean, stats["second_weight"].mean)


def test_the_second_weight_of_one_key_is_0_and_of_two_equal_ones_is_the_largest() -> None:
    q, k = torch.ones(1, 1, 3, 4), torch.ones(1, 1, 3, 4)
    for form in ("portable", "native"):
        with observer(form):
            stats = observe(q, k, mask=masks.causal(), what=Observe(extra=["second_weight"], keep_rows=True))
            alone = observe(q, k[:, :, :1], what=Observe(extra=["second_weight"]), q_pos=None)
        torch.testing.assert_close(stats.kept[0].values["second_weight"][0, 0], torch.tensor([0.0, 1 / 2, 1 / 3]))
        assert alone["second_weight"].max.tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"extra": ["entropy"]}, ValueError, "extra: got 'entropy', expected names of second_weight"),
        ({"extra": "second_weight"}, TypeError, "extra: got str, expected a tuple of names"),
        ({"extra": 3}, TypeError, "extra: got int, expected a tuple of names"),
        (
            {"extra": ON_REQUEST, "row_stats": False},
            ValueError,
            "extra: expected no names together with row_stats=False",
        ),
    ],
)
def test_what_cannot_be_requested_is_an_error(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Observe(**options)

"""A trace as JSON, as HTML, and in the terminal."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console

import headscope
from headscope import MultiHeadAttention, masks, trace
from headscope._support.ascii import to_ascii
from headscope.tracing import Trace
from headscope.tracing._explanations import memory
from support.traced_modules import WithoutOutput, made, printed, rich_trace, words
from support.traced_options import OPTIONS, E, H


def test_json_is_strict_and_complete() -> None:
    found = rich_trace()

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    read = json.loads(found.to_json(), parse_constant=refuse)
    assert read == found.to_dict()
    assert (read["kind"], read["version"], read["held"]) == ("headscope-trace", 1, True)
    assert read["module"]["kv_heads"] == 2
    for line, row in zip(read["rows"], found.rows, strict=True):
        assert line["shape"] == list(line["axes"].values()) == row.shape
        assert all(type(size) is int for size in line["shape"])
    mask = next(line for line in read["rows"] if line["step"] == "mask")
    assert mask["corner"][0][3] == "-Infinity"
    assert float(mask["corner"][0][3]) == -torch.inf
    x = torch.tensor([[[torch.nan, torch.inf, 1.0]]])
    corner = json.loads(trace(made(3, 1), x).to_json(), parse_constant=refuse)["rows"][0]["corner"]
    assert corner == [["NaN", "Infinity", 1.0]]


class Checker(HTMLParser):
    """Counts what is open, and gathers text and attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [f"{name}={value}" for name, value in attrs]
        if tag not in ("br", "meta", "hr"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_html_is_well_formed_self_contained_and_escaped() -> None:
    evil = type("<script>alert(1)</script>", (MultiHeadAttention,), {})
    hostile = type("<img src=x onerror=alert(2)>", (masks.Prefix,), {})
    found = trace(evil(20, 4), torch.randn(2, 5, 20), mask=hostile(3) & masks.causal())
    html = found._repr_html_()
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert "<script" not in html
    assert "<img" not in html
    assert "<script>alert(1)</script>" in checker.text
    assert not re.search(r"https?:|url\(|@import", html)
    assert {name.split("=")[0] for name in checker.attributes} == {"class", "style", "colspan"}
    for row in found.rows:
        assert row.equation in checker.text
        assert row.mistake in checker.text
        assert row.invariant in checker.text


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("explain", [False, True])
def test_the_table_fits_the_terminal(width: int, explain: bool) -> None:
    found = rich_trace()
    text = printed(found, width, explain=explain)
    assert max(map(len, text.splitlines())) <= width
    flat = words(text)
    for row in found.rows:
        assert row.step in text
        assert row.equation in text
        assert all(line in text for line in row.code.split("\n")), row.step
        assert words(row.invariant)[:30] in flat
        assert (words(row.mistake)[:40] in flat) is explain
        assert (words(row.why)[:40] in flat) is explain
    assert "unusual" in text
    assert "all 17 invariants hold" in text


def test_a_terminal_that_knows_only_ascii() -> None:
    found = rich_trace()
    text = printed(found, explain=True, encoding="ascii")
    assert text.isascii()
    assert "?" not in text, "a character has no plain form"
    assert "s[i, j] <- -inf where" in text
    alone = printed(trace(seq=1_000_000, dim=512, heads=8), encoding="ascii")
    assert "8 x 10^12" in alone
    assert "- sizes only, nothing was computed" in words(alone)


def test_memory_has_three_digits() -> None:
    assert [memory(size) for size in (0, 999, 1000, 102400)] == ["0 B", "999 B", "0.977 KiB", "100 KiB"]
    assert [memory(int(kib * 1024)) for kib in (999.4, 999.7, 1000)] == ["999 KiB", "0.976 MiB", "0.977 MiB"]


def test_printing_and_repr() -> None:
    found = trace(made(15, 3), torch.randn(2, 7, 15))
    assert words(str(found)) == words(printed(found))
    assert repr(found) == "<Trace of MultiHeadAttention(15, 3) on x [2, 7, 15]: 12 steps, 12 invariants held>"
    for options in (
        "bias=False",
        "out_bias=False",
        "bias=('q', 'v')",
        "bias=('v',), out_bias=False",
        "sinks=True, dropout=0.5",
    ):
        module = eval(f"MultiHeadAttention(15, 3, {options})")
        assert trace(module, torch.randn(2, 7, 15)).title == f"MultiHeadAttention(15, 3, {options}) on x [2, 7, 15]"
    assert "failed at output" in repr(trace(WithoutOutput(15, 3), torch.randn(2, 7, 15)))
    console = Console(file=io.StringIO(), width=80)
    console.print(found)
    assert "concatenation" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert headscope.Trace is Trace


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_every_option_fits_the_terminal(encoding: str) -> None:
    found = trace(made(E, H, **OPTIONS["all"]), torch.randn(2, 5, E), causal=True)
    text = printed(found, explain=True, encoding=encoding)
    assert max(map(len, text.splitlines())) <= 80
    for row in found.rows:
        assert row.step in text
        lines = row.code.split("\n")
        assert all(to_ascii(line) in text if encoding == "ascii" else line in text for line in lines), row.step
    if encoding == "ascii":
        assert "?" not in text, "a character has no plain form"
        assert "R(i theta_n)" in text
        assert "g = sigmoid(x W_g^T + b_g)" in text
    html = found._repr_html_()
    assert '<td style="color: hsl(35 60% 45%)">K+1</td>' in html
    assert "<b>K+1</b> keys, and the one of bias_kv" in html

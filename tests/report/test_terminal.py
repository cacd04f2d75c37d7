"""The terminal: colours, numbers and shades are the sheet's weights, at any width, encoding and depth of colour."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
from rich.console import Console, RenderableType

from headscope.report import image_sheet, terminal, text_sheet
from headscope.report.colours import colour_at
from support.sheets import digit, picture, softmax, text, words


def printed(what: RenderableType, *, width: int = 80, colour: str | None = None, encoding: str = "utf-8") -> str:
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding=encoding, write_through=True) as file:
        console = Console(
            file=file,
            width=width,
            color_system=colour,
            force_terminal=colour is not None,
            _environ={},
            legacy_windows=False,
        )  # pyright: ignore[reportArgumentType]
        console.print(what)
        return raw.getvalue().decode(encoding)


def backgrounds(line: str) -> list[tuple[int, int, int]]:
    """The background colours of a line, in order."""
    return [(int(r), int(g), int(b)) for r, g, b in re.findall(r"48;2;(\d+);(\d+);(\d+)", line)]


def test_the_terminal_shows_a_few_tokens_as_numbers() -> None:
    sheet = text(words(7))
    weights = sheet.weights[1][2]
    lines = printed(terminal.map_picture(sheet, 1, 2)).splitlines()
    assert lines[0].split() == ["␣w0", "␣w1", "␣w2", "␣w3", "␣w4", "␣w0", "␣w1"]
    for i in range(7):
        label, *numbers = lines[1 + i].split()
        assert label == f"␣w{i % 5}"
        assert numbers == [f"{weights[i, j]:.2f}" for j in range(i + 1)], "row = query; what is hidden is blank"
    assert "strongest weight " + f"{weights[1:].max():.2f}" in lines[8]


def test_the_terminals_colours_are_the_weights() -> None:
    sheet = text(words(23))
    weights = sheet.weights[0][1].astype(np.float64)
    most = weights[1:].max()
    lines = printed(terminal.map_picture(sheet, 0, 1), colour="truecolor").splitlines()
    for i in range(23):
        got = backgrounds(lines[3 + i])
        assert got == [colour_at(min(1.0, weights[i, j] / most), dark=True) for j in range(i + 1)], i


def test_the_terminal_without_colours_or_unicode() -> None:
    sheet = text([" a", "é", "😀", *words(20)])
    for width in (30, 60, 80):
        shown = printed(terminal.map_picture(sheet, 0, 1), width=width, encoding="ascii")
        assert shown.isascii()
        assert max(map(len, shown.splitlines())) <= width
        assert "_a" in shown
    assert printed(terminal.tokens_line(sheet), encoding="ascii").startswith("0 _a  1 \\xe9  2 \\U0001f600  3 _w0")
    pinned = text_sheet("x", words(23), [torch.eye(23).expand(1, 23, 23)], causal=False)
    lines = printed(terminal.map_picture(pinned, 0, 0), encoding="ascii").splitlines()[3:26]
    assert [line[4:].rstrip() for line in lines] == ["  " * i + "@@" for i in range(23)]


def test_a_number_above_a_column_is_whole_or_missing() -> None:
    length = 61
    sheet = text_sheet("x", [f"{n:02}" for n in range(length)], [torch.eye(length)[None]], causal=False)
    ruler = printed(terminal.map_picture(sheet, 0, 0), width=80, encoding="ascii").splitlines()[0]
    assert ruler.split() == ["0", "10", "20", "30", "40", "50"]


def test_a_long_map_is_pooled_and_says_so() -> None:
    length = 101
    eye = torch.eye(length).expand(1, length, length)
    sheet = text_sheet("x", words(length), [eye], causal=False)
    whole = printed(terminal.map_picture(sheet, 0, 0), width=120, encoding="ascii")
    assert "places" not in whole
    assert whole.count("@") == length + 1, "and one in the legend"
    assert " ".join(whole.split()).endswith("From weak to strong: .:-=+*#%@")
    pooled = printed(terminal.map_picture(sheet, 0, 0), width=60, encoding="ascii")
    room = 60 - 3 - 1
    assert f"{length} tokens in {room} cells: each cell shows its largest weight" in " ".join(pooled.split())
    assert pooled.count("@") == room + 1, "the largest of a place, not the mean"
    halves = printed(terminal.map_picture(sheet, 0, 0), width=60, colour="truecolor")
    assert "▀" in halves
    assert len(halves.splitlines()) == len(pooled.splitlines()) - room // 2


@pytest.mark.parametrize("width", [10, 40, 80, 120])
def test_the_table_fits(width: int) -> None:
    for sheet in (text(words(11), ids=[n % 3 for n in range(11)]), picture()):
        lines = printed(terminal.statistics_table(sheet), width=width).splitlines()
        assert max(map(len, lines)) <= width
        rows = [line.split()[0] for line in lines if line.strip()]
        rows = rows[rows.index("head") + 1 :]  # above it, the first lines of long headings
        assert rows == ["0.0", "0.1", "0.2", "1.0", "1.1", "1.2"]
    match = text(words(11)).patterns[0][1]
    assert match is not None
    assert match.pattern == "uniform"
    assert not match.is_name, "some rows put half of their weight on one token"
    upper, heading, _, line, *_ = printed(terminal.statistics_table(text(words(11)))).splitlines()
    assert upper.split()[0] == "normalized"
    assert heading.split()[:5] == ["head", "best", "match", "score", "entropy"]
    row = line.split()
    assert row[:3] == ["0.1", "-", f"{match.score:.2f}"]


def test_marks_of_what_cannot_be_seen_have_words_in_ascii() -> None:
    shown = printed(terminal.tokens_line(text(["", " a", "\u0301", "é"])), encoding="ascii")
    assert shown.split() == ["0", "(empty)", "1", "_a", "2", r"o\u0301", "3", r"\xe9"]


def test_one_token() -> None:
    sheet = text_sheet("x", ["a"], [torch.ones(2, 1, 1)], ids=[0])
    assert printed(terminal.map_picture(sheet, 0, 1)).splitlines()[1].split() == ["a", "1.00"]
    assert printed(terminal.statistics_table(sheet)).splitlines()[-2].split()[:3] == ["0.0", "-", "-"]


def test_tokens_are_not_broken_across_lines() -> None:
    lines = printed(terminal.tokens_line(text(words(30))), width=33).splitlines()
    assert max(map(len, lines)) <= 33
    assert "  ".join(lines).split("  ") == [f"{n} ␣w{n % 5}" for n in range(30)]


def test_the_image_in_the_terminal() -> None:
    sheet = picture()
    weights = sheet.weights[0][1].astype(np.float64)
    for query in (None, 9):
        looked = weights.mean(0) if query is None else weights[query]
        shown = printed(terminal.image_picture(sheet, 0, 1, query=query), colour="truecolor", width=100)
        lines = shown.splitlines()
        for row in range(5):
            got = backgrounds(lines[row])
            grey = [(int(v),) * 3 for v in digit()[row]]
            assert got == grey + [colour_at(looked[7 * row + column] / looked.max(), dark=True) for column in range(7)]
        assert shown.count("[]") == (0 if query is None else 3)
        best = int(looked.argmax())
        assert f"Strongest: row {best // 7}, column {best % 7} with {looked[best]:.3f}" in re.sub(
            r"\x1b\[[\d;]*m", "", shown
        ).replace("\n", " ")
    assert printed(terminal.image_picture(sheet, 0, 1), encoding="ascii", width=20).isascii()
    with pytest.raises(ValueError, match=r"query: expected 0 to 34, got 35"):
        terminal.image_picture(sheet, 0, 1, query=35)
    with pytest.raises(ValueError, match=r"sheet: expected the sheet of an image, got kind 'text'"):
        terminal.image_picture(text(words(3)), 0, 1)


def test_weights_that_are_not_finite_in_the_terminal() -> None:
    weights = softmax(1, 5)
    weights[0, 3, 2] = torch.nan
    shown = printed(terminal.map_picture(text_sheet("x", words(5), [weights]), 0, 0))
    assert shown.splitlines()[4].split()[3] == "nan"
    blank = image_sheet("x", digit(), (5, 7), [torch.full((1, 35, 35), torch.nan)])
    assert "the weights are not finite" in printed(terminal.image_picture(blank, 0, 0))
    assert printed(terminal.statistics_table(blank)).splitlines()[1].split() == ["0.0", *"-" * 9]

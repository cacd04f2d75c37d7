"""The name of a head in words: partly below a score of 0.5, with what it shows too, and even only where rows are."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console, RenderableType
from torch import Tensor

from headscope import Observe, masks, observe
from headscope.cli._shared.head_grid import HeadGrid
from headscope.cli._shared.observation import Choice
from headscope.decisions import patterns
from headscope.report import Sheet, terminal, text_sheet
from headscope.report._viewer.from_recording import shown as shown_recording
from headscope.report._viewer.from_sheet import shown as shown_sheet
from headscope.report.highlights import Highlight, recording_highlights, sheet_highlights
from headscope.stats import HeadStats, Match, best_matches, name_in_words, pattern_scores, second_name
from headscope.watching import About, Recording

LENGTH = 29
TOKENS = [f" w{n}" for n in range(LENGTH)]


def printed(what: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=80).print(what)
    return out.getvalue()


def mixed(**shares: float) -> Tensor:
    """Weights of one causal head: these shares on the previous, own and first key, the rest evenly; float64 [T, T]."""
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.float64).tril()
    p = (1 - sum(shares.values())) * visible / visible.sum(-1, keepdim=True)
    at = torch.arange(LENGTH)
    for name, share in shares.items():
        p[at, {"previous": (at - 1).clamp_min(0), "self": at, "first": 0 * at}[name]] += share
    return p


def peaked(of: int) -> Tensor:
    """Even causal rows, except that every so many-th puts 0.62 on a key that no pattern has; float64 [T, T]."""
    p = mixed()
    for row in range(5, LENGTH, of):
        p[row] *= 0.38 / p[row].sum()
        p[row, row // 2] += 0.62
    return p


def recorded(*heads: Tensor) -> Recording:
    """One layer of heads with these weights: the logits are their logarithms."""
    weights = torch.stack(heads)
    q = torch.eye(LENGTH, dtype=torch.float64).expand(1, len(heads), -1, -1)
    k = weights.clamp_min(1e-30).log().mT[None]
    stats = observe(q, k, mask=masks.causal(), scale=1.0, what=Observe(map=LENGTH)).named("layers.0.attention")
    kinds: Any = {"layers.0.attention": "self"}
    return Recording(HeadStats(stats.parts), About("m", {}, {}, kinds, tuple(TOKENS), 1, 1))


def sheet(*heads: Tensor) -> Sheet:
    return text_sheet("m", TOKENS, [torch.stack(heads).float()])


PARTLY = mixed(previous=0.4, self=0.33)
MOSTLY = mixed(previous=0.6, self=0.3)
BOTH = mixed(previous=0.55, self=0.41)
WHOLLY = mixed(previous=0.9)


def sentences(*heads: Tensor) -> list[list[str]]:
    """The sentences about a recording and about a sheet of these heads."""
    found = recording_highlights(recorded(*heads)), sheet_highlights(sheet(*heads))
    return [[each.sentence.replace("layers.0.attention, head 0", "0.0") for each in one] for one in found]


def test_a_sentence_says_partly_and_what_the_head_shows_too() -> None:
    for one in sentences(PARTLY):
        assert one == ["0.0 partly looks at the previous token (36%; also self, 28%)"]
    for one in sentences(MOSTLY):
        assert one == ["0.0 mostly looks at the previous token (56%)"], "a second score below 0.3 is no name"
    for one in sentences(BOTH):
        assert one == ["0.0 mostly looks at the previous token (50%; also self, 34%)"]
    for one in sentences(WHOLLY):
        assert one == ["0.0 looks at the previous token (90%)"]


def test_words_agree_with_whole_per_cent() -> None:
    scores = (0.494, 0.496, 0.794, 0.796)
    found = [Highlight("self", 1, 8, layer=0, head=0, name="0.0", score=score).sentence for score in scores]
    assert found == [
        "0.0 partly looks at the token itself (49%)",
        "0.0 mostly looks at the token itself (50%)",
        "0.0 mostly looks at the token itself (79%)",
        "0.0 looks at the token itself (80%)",
    ]
    assert [name_in_words("first", score) for score in scores[:2]] == ["partly first", "first"]


def scored(pattern: str, score: float, z: float = 9.0) -> Match:
    return Match(pattern, score, 28, z, 0.0)


@pytest.mark.parametrize(
    ("best", "other", "named"),
    [
        (scored("first", 0.59), scored("induction", 0.52), True),
        (scored("first", 0.59), scored("induction", 0.31), True),
        (scored("first", 0.59), scored("induction", 0.29), False),
        (scored("first", 0.59), scored("induction", 0.52, z=2.9), False),
        (scored("first", 0.45), scored("induction", 0.11), True),
        (scored("first", 0.45), scored("induction", 0.09), False),
        (scored("previous", 0.59), scored("local", 0.4), False),
        (scored("first", 0.59), scored("local", 0.4), True),
        (scored("first", 0.59), scored("uniform", 0.4), False),
        (scored("first", 0.25), scored("induction", 0.2), False),
    ],
)
def test_a_second_name_needs_a_clear_score(best: Match, other: Match, named: bool) -> None:
    assert second_name(best, [best, other]) == (other if named else None)


def test_a_head_counts_for_both_of_its_names() -> None:
    only = mixed(self=0.9)
    for found in (recording_highlights(recorded(only, BOTH, PARTLY)), sheet_highlights(sheet(only, BOTH, PARTLY))):
        heads = {each.pattern: each.heads for each in found}
        assert heads["previous"] == 2
        assert heads["self"] == 2, "a score of 28 % beside a partly followed pattern is no name"


def test_what_chance_explains_is_not_named_too() -> None:
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(LENGTH, LENGTH, generator=generator, dtype=torch.float64).tril()
    p = mixed(previous=0.4) + 0.2 * (noise / noise.sum(-1, keepdim=True) - mixed())
    for one in sentences(p):
        assert one == ["0.0 partly looks at the previous token (40%)"]


def test_all_surfaces_have_the_same_words() -> None:
    recording, one_pass = recorded(PARTLY, MOSTLY), sheet(PARTLY, MOSTLY)
    answer = patterns(recording.stats)
    assert [each.name for each in answer.best] == ["partly previous", "previous"]
    assert [(each.head, each.pattern) for each in answer.also] == [(0, "self")]
    assert [line[2] for line in answer.cells()] == ["partly previous", "previous"]
    assert "Partly: the score is below 0.5." in answer.caveat
    assert [match and match.name for match in one_pass.patterns[0]] == ["partly previous", "previous"]
    assert [match and match.pattern for match in one_pass.also[0]] == ["self", None]
    table = printed(terminal.statistics_table(one_pass))
    assert "partly previous" in table
    lines = printed(HeadGrid(one_pass, Choice(0, 0, ""))).splitlines()
    assert [line.split() for line in lines[1:3]] == [["layer", "0", "previous", "previous"], ["match", "partly"]]
    for page in (shown_recording(recording), shown_sheet(one_pass)):
        second, none = page.layers[0].also
        assert none is None
        assert second is not None
        assert second[0] == "self"
        assert second[1] == pytest.approx(0.30, abs=0.02)


def test_tables_have_both_names() -> None:
    both = sheet(BOTH, WHOLLY)
    assert "previous · self" in printed(terminal.statistics_table(both))
    lines = [line.split() for line in printed(HeadGrid(both, Choice(0, 0, ""))).splitlines()]
    assert ["also", "self"] in lines
    assert [line[0] for line in lines] == ["head", "layer", "score", "also", "keys"]


def test_a_grid_without_partial_names_has_no_line_for_them() -> None:
    lines = printed(HeadGrid(sheet(MOSTLY), Choice(0, 0, ""))).splitlines()
    assert [line.split()[0] for line in lines] == ["head", "layer", "score", "keys"]


@pytest.mark.parametrize(("of", "named"), [(2, False), (7, False), (11, False), (13, True), (LENGTH, True)])
def test_rows_with_peaks_are_not_even(of: int, named: bool) -> None:
    p = peaked(of)
    share = len(range(5, LENGTH, of)) / (LENGTH - 2)  # of the rows with at least three keys
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    scores = pattern_scores(p[None, None], seen=visible)
    assert scores.peaks.tolist() == pytest.approx([share])
    (match,) = best_matches(scores)
    assert match is not None
    assert (match.pattern, match.is_name, match.name) == ("uniform", named, "uniform" if named else "")
    (best,) = patterns(recorded(p).stats).best
    assert (best.pattern, best.is_name) == ("uniform", named)
    assert best.peaks == pytest.approx(share)
    assert [bool(head) for head in shown_recording(recorded(p)).layers[0].patterns[0][:1]] == [True]
    assert (shown_recording(recorded(p)).layers[0].patterns[0][0][0] == "uniform") == named


def test_a_few_keys_are_no_peak() -> None:
    p = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0.2, 0.3, 0.5]], dtype=torch.float64)
    scores = pattern_scores(p[None, None], seen=torch.ones(3, 3, dtype=torch.bool).tril())
    assert scores.peaks.tolist() == [1.0], "only the third row has three keys"
    none = pattern_scores(p[None, None, :2, :2], seen=torch.ones(2, 2, dtype=torch.bool).tril())
    assert none.peaks.isnan().all()


def test_the_second_pattern_of_a_fixed_key_stands_in_its_sentence() -> None:
    head = Highlight("fixed key", 2, 8, layer=0, head=0, name="0.0", score=0.45, share=0.52, cell=(9, 5))
    assert head.sentence == "0.0 puts 52% of its attention on one token: 5 (one of 2)"
    also = Highlight("fixed key", 1, 8, layer=0, head=0, name="0.0", score=0.45, share=0.52, also=("self", 0.31))
    assert also.sentence == "0.0 puts 52% of its attention on one token (also self, 31%)"
    assert also.to_dict()["also"] == ("self", 0.31)

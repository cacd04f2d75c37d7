"""What to look at first: named where a head shows a pattern beyond chance, and not where it does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headscope import Observe, load_example, masks, observe, watch
from headscope.examples.text import TextConfig, TextModel
from headscope.report import Sheet, image_sheet, text_sheet
from headscope.report._example_cells import recorded_cell
from headscope.report.fixed_keys import FIXED_KEY, fixed_key_of_weights, fixed_keys
from headscope.report.highlights import Highlight, fixed_names, recording_highlights, sheet_highlights
from headscope.report.words import REGIONS
from headscope.stats import HeadStats
from headscope.watching import About, Recording

LENGTH = 29
TOKENS = [f" w{n % 13}" for n in range(LENGTH)]  # a text that repeats: duplicate and induction have keys
SEPARATOR = 5


def even(causal: bool) -> Tensor:
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    return visible.tril() if causal else visible


def on(keys: Tensor, causal: bool) -> Tensor:
    """Weights of one head: 95 % on these keys of each row, evenly; the whole row evenly where none is visible."""
    visible = even(causal)
    spread = visible / visible.sum(-1, keepdim=True)
    targets = (keys & visible).double()
    there = targets.sum(-1, keepdim=True) > 0
    return torch.where(there, 0.95 * targets / targets.sum(-1, keepdim=True).clamp_min(1) + 0.05 * spread, spread)


def targets(pattern: str) -> Tensor:
    i, j = torch.meshgrid(torch.arange(LENGTH), torch.arange(LENGTH), indexing="ij")
    same = i % 13 == j % 13
    return {
        "previous": j == i - 1,
        "next": j == i + 1,
        "self": j == i,
        "duplicate": same & (i != j),
        "induction": same.roll(1, 1) & (j > 0) & (j != i + 1),
        "first": j == 0,
        FIXED_KEY: j == SEPARATOR,
        "uniform": torch.ones_like(same),
    }[pattern]


def recorded(patterns: list[str], causal: bool, **options: Any) -> Recording:
    """One layer with a head for each pattern: the logits are the logarithms of its weights."""
    weights = torch.stack([on(targets(pattern), causal) for pattern in patterns])
    q = torch.eye(LENGTH, dtype=torch.float64).expand(1, len(patterns), -1, -1)
    k = weights.clamp_min(1e-30).log().mT[None]
    what = Observe(tokens=torch.arange(LENGTH) % 13, **options)
    stats = observe(q, k, mask=masks.causal() if causal else None, scale=1.0, what=what).named("layers.0.attention")
    kinds: Any = {"layers.0.attention": "self"}
    return Recording(HeadStats(stats.parts), About("m", {}, {}, kinds, tuple(TOKENS), 1, 1))


def by_pattern(found: tuple[Highlight, ...]) -> dict[str, Highlight]:
    return {each.pattern: each for each in found}


# ---------------------------------------------------------------- known heads


@pytest.mark.parametrize("options", [{"map": LENGTH}, {"edges": 40}, {"keep_rows": True}, {"map": 7}])
@pytest.mark.parametrize("causal", [True, False])
def test_a_head_of_each_pattern_is_named_with_a_cell_that_shows_it(causal: bool, options: dict[str, Any]) -> None:
    for pattern in ("induction", "duplicate", "previous", "next", FIXED_KEY, "self"):
        if causal and pattern == "next":
            continue  # its keys are masked
        found = recording_highlights(recorded([pattern, "uniform", "first"], causal, **options))
        first = found[0]
        assert (first.pattern, first.layer, first.head, first.heads, first.of) == (pattern, 0, 0, 1, 3)
        assert first.cell is not None
        assert bool(targets(pattern)[first.cell]), f"{pattern}: {first.cell}"
        assert first.weight == pytest.approx(float(on(targets(pattern), causal)[first.cell]), abs=1e-5)
        assert first.texts == (f"␣w{first.cell[0] % 13}", f"␣w{first.cell[1] % 13}")
        assert {(each.pattern, each.heads) for each in found[1:]} == {("uniform", 1), ("first", 1)}


def test_informative_patterns_come_first_and_the_others_are_counted() -> None:
    names = ["uniform", FIXED_KEY, "first", "self", "previous", "uniform", "induction", "duplicate", "uniform", "first"]
    found = recording_highlights(recorded(names, causal=True, map=LENGTH))
    assert [(each.pattern, each.head, each.heads) for each in found] == [
        ("induction", 6, 1), ("duplicate", 7, 1), ("previous", 4, 1), (FIXED_KEY, 1, 1), ("uniform", None, 3),
    ]  # fmt: skip


def test_a_sheet_has_the_highlights_of_a_recording() -> None:
    names = ["uniform", "previous", "induction", FIXED_KEY, "first"]
    for causal in (True, False):
        weights = torch.stack([on(targets(name), causal) for name in names])
        sheet = text_sheet("t", TOKENS, [weights], ids=[n % 13 for n in range(LENGTH)], causal=causal)
        found = sheet_highlights(sheet)
        recording = recording_highlights(recorded(names, causal, map=LENGTH))
        assert [(each.pattern, each.head, each.cell) for each in found] == [
            (each.pattern, each.head, each.cell) for each in recording
        ]
        assert sheet.patterns[0][3] is not None
        assert sheet.patterns[0][3].pattern == FIXED_KEY
        assert [each.name for each in found if each.layer is not None] == ["0.2", "0.1", "0.3"]
        for one, other in zip(found, recording, strict=True):
            assert other.score == pytest.approx(one.score, rel=0.02)


def test_of_several_heads_the_best_stands_for_the_pattern() -> None:
    weak = 0.6 * on(targets("previous"), True) + 0.4 * on(targets("uniform"), True)
    weights = torch.stack([weak, on(targets("previous"), True), weak])
    first = sheet_highlights(text_sheet("t", TOKENS, [weights.float()]))[0]
    assert (first.head, first.heads, first.of) == (1, 3, 3)
    assert "one of 3" in first.sentence


# ---------------------------------------------------------------- nothing beyond chance


def test_without_a_head_beyond_chance_one_sentence_states_it() -> None:
    gentle = torch.randn(1, 3, LENGTH, 7, generator=torch.Generator().manual_seed(3))
    stats = observe(3 * gentle, 2 * gentle.roll(1, -1), what=Observe(map=LENGTH)).named("a")
    kinds: Any = {"a": "self"}
    found = recording_highlights(Recording(HeadStats(stats.parts), About("m", {}, {}, kinds, None, 1, 1)))
    assert [each.sentence for each in found] == ["No head matches a pattern clearly better than chance"]


@pytest.mark.parametrize("length", [17, 61, 127])
def test_on_random_weights_no_head_is_named(length: int) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        model = TextModel(TextConfig()).eval()
        ids = torch.randint(0, 50, (1, length), generator=torch.Generator().manual_seed(seed))
        with torch.inference_mode(), watch(model, what=Observe(map=16, tokens=ids)) as recording:
            model(ids)
        found = recording_highlights(recording)
        assert [each.pattern for each in found if each.layer is not None] == []
        assert found[0].pattern == ""


def digit_sheet(seed_random: bool) -> Sheet:
    example = load_example("digits", seed_random=seed_random)
    image = example.samples[3].image
    with torch.inference_mode():
        _, weights = example.model(image[None], need_weights=True)
    return image_sheet("a digit", (image * 255).round().byte().numpy(), (8, 8), weights)


def test_regions_are_named_of_the_trained_vision_model_and_not_of_a_random_one() -> None:
    trained, random = (sheet_highlights(digit_sheet(seed_random)) for seed_random in (False, True))
    regions = [each for each in trained if each.pattern in REGIONS]
    assert len(regions) == 2
    assert all(each.score is not None and each.score >= 1.9 for each in regions)
    assert [each.score for each in regions] == sorted((each.score for each in regions), reverse=True)  # pyright: ignore[reportArgumentType]
    assert [each.pattern for each in random if each.layer is not None] == []


def test_a_head_with_the_same_rows_is_not_named_by_a_region_first() -> None:
    sheet = digit_sheet(False)
    fixed = {
        (layer, head)
        for layer, weights in enumerate(sheet.weights)
        for head, each in enumerate(weights)
        if 0.5 * abs(each - each.mean(0)).sum(-1).mean() <= 0.1
    }
    looks = [(layer, head) for layer, head in fixed if sheet.named_looks[layer][head] is not None]
    assert looks, "some of them have a region"
    regions = [each for each in sheet_highlights(sheet) if each.pattern in REGIONS]
    assert not {(each.layer, each.head) for each in regions} & fixed


def test_a_head_on_one_patch_is_not_named_by_the_region_of_that_patch() -> None:
    sheet = digit_sheet(False)
    fixed = {
        (layer, head)
        for layer, matches in enumerate(sheet.patterns)
        for head, match in enumerate(matches)
        if match is not None and match.pattern == FIXED_KEY
    }
    assert fixed
    for layer, weights in enumerate(sheet.weights):
        share = weights.mean(-2).max(-1)  # [H]
        for head in range(len(weights)):
            assert ((layer, head) in fixed) == (share[head] >= 0.5)
            assert (layer, head) not in fixed or sheet.named_looks[layer][head] is None


def test_random_logits_have_no_fixed_key() -> None:
    for seed in range(20):
        for length in (13, 31, 67):
            q, k = 1.5 * torch.randn(2, 1, 5, length, 11, generator=torch.Generator().manual_seed(seed))
            for mask in (None, masks.causal()):
                found = observe(q, k, mask=mask)
                assert fixed_names(found) == {}


def test_too_short_and_without_row_quantities_there_is_none() -> None:
    assert sheet_highlights(text_sheet("t", ["a"], [torch.ones(1, 1, 1)])) == ()
    stats = observe(torch.zeros(1, 1, 7, 3), torch.zeros(1, 1, 7, 3), what=Observe(row_stats=False, map=7)).named("a")
    kinds: Any = {"a": "self"}
    assert recording_highlights(Recording(HeadStats(stats.parts), About("m", {}, {}, kinds, None, 1, 1))) == ()


# ---------------------------------------------------------------- one fixed key


def sums_oracle(p: Tensor, visible: Tensor, key: int) -> tuple[float, float, float]:
    """Share, score and z of a key, row by row in float64."""
    gain = room = variance = share = 0.0
    rows = [i for i in range(len(p)) if visible[i, key] and int(visible[i].sum()) > 1]
    for i in rows:
        n = int(visible[i].sum())
        gain += float(p[i, key]) - float(p[i].sum()) / n
        room += 1 - 1 / n
        variance += (float((p[i] ** 2).sum()) - float(p[i].sum()) ** 2 / n) / n
        share += float(p[i, key]) / len(rows)
    return share, gain / room, gain / variance**0.5


@pytest.mark.parametrize("causal", [True, False])
def test_a_fixed_key_of_weights_is_exact_and_of_sums_at_most_that(causal: bool) -> None:
    noise = torch.rand(LENGTH, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(5)) * even(causal)
    p = 0.8 * on(targets(FIXED_KEY), causal) + 0.2 * noise / noise.sum(-1, keepdim=True)
    (exact,) = fixed_key_of_weights(p[None].float().numpy(), even(causal)[None].numpy())
    assert exact is not None
    share, score, z = sums_oracle(p, even(causal), SEPARATOR)
    assert exact.key == SEPARATOR
    assert (exact.share, exact.score, exact.z) == pytest.approx((share, score, z), rel=1e-4)
    q, k = torch.eye(LENGTH, dtype=torch.float64)[None, None], p.clamp_min(1e-30).log().mT[None, None]
    (found,) = fixed_keys(observe(q, k, mask=masks.causal() if causal else None, scale=1.0), "0")
    assert found is not None
    assert (found.key, found.rows) == (SEPARATOR, exact.rows)
    assert found.share == pytest.approx(share, rel=1e-4)
    assert 0.9 * score <= found.score <= score + 1e-4
    assert 0.8 * z <= found.z <= z * (1 + 1e-4)


def test_a_key_that_few_rows_see_is_not_fixed() -> None:
    late = LENGTH - 5
    weights = torch.where(torch.arange(LENGTH)[:, None] >= late, torch.arange(LENGTH) == late, torch.eye(LENGTH) > 0)
    (found,) = fixed_key_of_weights(weights[None].float().numpy(), even(True)[None].numpy())
    assert found is None or (found.key != late and not found.is_clear)
    k = torch.where(weights, 0.0, -60.0).double().mT[None, None]
    stats = observe(torch.eye(LENGTH, dtype=torch.float64)[None, None], k, mask=masks.causal(), scale=1.0)
    assert fixed_names(stats) == {}


def test_the_first_real_key_behind_padding_is_the_first() -> None:
    visible = even(True)
    visible[:, :3] = False
    p = (torch.arange(LENGTH) == 3) * visible
    (found,) = fixed_key_of_weights(p[None].float().numpy(), visible[None].numpy())
    assert found is None or found.key != 3


def test_of_grouped_heads_each_has_its_key() -> None:
    q = torch.ones(1, 4, LENGTH, 3)
    k = torch.zeros(1, 2, LENGTH, 3)
    k[:, 0, 7], k[:, 1, 11] = 6.0, 6.0
    found = fixed_keys(observe(q, k), "0")
    assert [each and each.key for each in found] == [7, 7, 11, 11]


def test_of_patches_the_first_is_like_any_other() -> None:
    k = torch.zeros(1, 1, 25, 3)
    k[:, :, 0] = 6.0
    stats = observe(torch.ones(1, 1, 25, 3), k)
    assert fixed_names(stats) == {}
    assert fixed_names(stats, skips_first=False)["0", 0].key == 0


# ---------------------------------------------------------------- the shipped model, and the example


def test_the_shipped_text_model_has_an_induction_and_a_previous_head() -> None:
    example = load_example("text")
    ids = example.tokenizer.encode("The cat sat on the mat. The cat sat on the mat.")
    pieces = [example.tokenizer.piece(token) for token in ids]
    tokens = torch.tensor([ids])
    with torch.inference_mode(), watch(example.model, what=Observe(edges=16, tokens=tokens), texts=pieces) as recording:
        example.model(tokens)
    found = by_pattern(recording_highlights(recording))
    assert list(found)[:2] == ["induction", "previous"]
    induction, previous = found["induction"], found["previous"]
    assert (induction.name, previous.name) == ("3.3", "2.0")
    assert induction.cell is not None
    query, key = induction.cell
    assert pieces[query] == pieces[key - 1]
    assert key != query + 1
    assert (
        induction.sentence
        == f"3.3 looks like an induction head (85%, one of 7; also first, 32%): {' → '.join(induction.texts or ())}"
    )


def test_without_texts_an_induction_head_has_no_example() -> None:
    recording = recorded(["induction"], True, map=LENGTH)
    assert recorded_cell("induction", recording.stats, "layers.0.attention", 0, []) is None
    assert recorded_cell("previous", recording.stats, "layers.0.attention", 0, []) is not None

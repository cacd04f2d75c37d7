"""Families of transformers, small: what watch records of them. docs/concepts/families.md has all of them."""

from __future__ import annotations

from typing import Any

import pytest

from support.families import list_names
from support.family_survey import DIFFERENT, render_page, survey

WRITTEN = ("bloom", "gptj", "deberta-v2", "canine", "ibert", "big_bird")
"""Families that compute attention with their own lines."""
FUSED = ("bert", "t5", "vit", "qwen3", "whisper")


@pytest.mark.parametrize("name", [*WRITTEN, *FUSED])
def test_a_family_is_recorded_as_its_own_weights_are(name: str) -> None:
    result = survey(name)
    assert result["same"]
    assert result["layers"] >= result["written" if name in WRITTEN else "fused"] > 0
    assert result["unmatched"] == 0


@pytest.mark.parametrize(("name", "verdict"), [
    ("mamba", "nothing to record: MambaMixer: a state space, no softmax over keys"),
    ("longformer", "refused: not recognised in LongformerSelfAttention"),
])  # fmt: skip
def test_what_is_not_recorded_has_its_reason_on_the_page(name: str, verdict: str) -> None:
    assert f"| {verdict} |" in render_page([survey(name)])


def test_the_page_shows_what_went_wrong() -> None:
    family: dict[str, Any] = {"name": "a", "fused": 2, "written": 0, "layers": 2, "same": True}
    page = render_page([{**family, "same": False}, {**family, "name": "b", "error": 1.0, "unmatched": 2}])
    assert "| `a` | 2 fused | 2 layers; **other outputs** |" in page
    assert "| `b` | 2 fused | 2 layers; **2 differ from its own weights** |" in page


@pytest.mark.long
def test_all_families() -> None:
    results = [result for name in list_names() if "unbuilt" not in (result := survey(name))]
    assert [each["name"] for each in results if "crashed" in each or each.get("same") is False] == []
    assert {each["name"] for each in results if each.get("unmatched")} <= set(DIFFERENT)
    attending = [each for each in results if each["fused"] + each["written"]]
    assert sum(bool(each.get("layers")) for each in attending) >= 0.95 * len(attending)

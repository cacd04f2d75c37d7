"""Families of transformers and of timm, small: what watch records. docs/concepts/families.md has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headscope import watch
from support import timm_families
from support.families import LATE, UnbuiltError, build, list_names
from support.family_survey import DIFFERENT, render_page, render_timm, survey
from support.timm_families import TruthSpy
from support.watched_models import spread

WRITTEN = ("bloom", "gptj", "deberta-v2", "canine", "ibert", "big_bird")
"""Families that compute attention with their own lines."""
FUSED = ("bert", "t5", "vit", "qwen3", "whisper")
OF_OWN_SIZES = ("detr", "funnel", "perceiver")


@pytest.mark.parametrize("name", [*WRITTEN, *FUSED])
def test_a_family_is_recorded_as_its_own_weights_are(name: str) -> None:
    result = survey(name)
    assert result["same"]
    assert result["layers"] >= result["written" if name in WRITTEN else "fused"] > 0
    assert result["unmatched"] == 0


@pytest.mark.parametrize(("name", "verdict"), [
    ("mamba", "nothing to record: MambaMixer: a state space, no softmax over keys"),
    ("longformer", "refused: not recognised in LongformerSelfAttention"),
    ("informer", "refused: not recognised in InformerProbSparseAttention"),
])  # fmt: skip
def test_what_is_not_recorded_has_its_reason_on_the_page(name: str, verdict: str) -> None:
    assert f"| {verdict} |" in render_page([survey(name)])


def test_the_page_shows_what_went_wrong() -> None:
    family: dict[str, Any] = {"name": "a", "fused": 2, "written": 0, "layers": 2, "same": True}
    page = render_page([{**family, "same": False}, {**family, "name": "b", "error": 1.0, "unmatched": 2}])
    assert "| `a` | 2 fused | 2 layers; **other outputs** |" in page
    assert "| `b` | 2 fused | 2 layers; **2 differ from its own weights** |" in page


@pytest.mark.parametrize("name", OF_OWN_SIZES)
def test_a_family_with_a_recipe_is_recorded_as_its_own_weights_are(name: str) -> None:
    result = survey(name)
    assert result["same"]
    assert result["layers"] == result["fused"] + result["written"] > 0
    assert result["unmatched"] == 0


def test_families_with_recipes_are_built_on_request_only() -> None:
    assert set(list_names()) >= LATE
    with pytest.raises(UnbuiltError, match="late=True"):
        build("detr")


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_the_spy_computes_the_entropies_of_each_layer(implementation: str) -> None:
    family = build("vit")
    spread(family.model)
    family.model.set_attn_implementation(implementation)  # type: ignore[attr-defined]
    with TruthSpy() as spy:
        family.model(**family.inputs)
    with watch(family.model) as seen:
        family.model(**family.inputs)
    result = timm_families.compare(seen, spy)
    assert result["unmatched"] == []
    assert result["matched"] == len(seen.layers) == 2
    spy.entropies = [each * 1.0001 for each in spy.entropies]
    assert len(timm_families.compare(seen, spy)["unmatched"]) == 2


def test_the_section_about_timm_shows_what_went_wrong() -> None:
    way: dict[str, Any] = {"fused": 2, "written": 0, "layers": 2, "same": True, "unmatched": []}
    refusal = "watch: 1 of the attention layers that ran could not be observed: a (TalkingHeadAttn). They neither"
    section = render_timm([
        {"name": "a", "module": "m", "on": way, "off": {**way, "fused": 0, "written": 3, "refused": refusal}},
        {"name": "b", "module": "m", "on": {**way, "same": False}, "off": {**way, "unmatched": ["x: 0.1"]}},
        {"name": "c", "unbuilt": "it is too large"},
    ], "1.0")  # fmt: skip
    cells = "2 fused: 2 layers, equal | 3 by a softmax: 2 layers, equal; refused: not recognised in TalkingHeadAttn |"
    assert f"| `m` | `a` | {cells}" in section
    wrong = "2 fused: 2 layers, equal; **other outputs** | 2 fused: 2 layers, **1 differ from the spy's** |"
    assert f"| `m` | `b` | {wrong}" in section
    assert "Not built: `c`." in section


@pytest.mark.long
@pytest.mark.parametrize("name", timm_families.NAMES)
def test_a_family_of_timm_is_recorded_as_the_spy_computes(name: str) -> None:
    pytest.importorskip("timm", reason="timm is not installed: the tests of headscope do not require it")
    result = timm_families.survey(name)
    for way in (result["on"], result["off"]):
        assert "crashed" not in way
        assert way.get("unmatched", []) == []
        assert way.get("same", True)
        assert "refused" in way or way["layers"] == way["fused"] + way["written"]


@pytest.mark.long
def test_all_families() -> None:
    results = [result for name in list_names() if "unbuilt" not in (result := survey(name))]
    assert [each["name"] for each in results if "crashed" in each or each.get("same") is False] == []
    assert {each["name"] for each in results if each.get("unmatched")} <= set(DIFFERENT)
    attending = [each for each in results if each["fused"] + each["written"]]
    assert sum(bool(each.get("layers")) for each in attending) >= 0.95 * len(attending)

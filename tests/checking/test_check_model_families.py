"""check_model on tiny random models of many families of transformers: every finding is listed here, and is true."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from headscope import Findings, check_model
from support.model_families import IDS, KINDS, build_model

pytestmark = pytest.mark.filterwarnings("ignore")

STATE = ("documents-mixed",)
"""State layers and convolutions read along the row, past the mask of attention."""
FINDINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "causal": {},
    "masked": {},
    "seq2seq": {},
}
"""Families with findings, of transformers 5.23. The cause of each, where it is not a state layer:

- bamba and others pass position_ids only in generate(), which is no finding.
"""
FEW: dict[str, tuple[str, ...]] = {
    "causal": ("llama", "gpt2", "mistral", "gemma2", "qwen3_moe", "bloom", "opt", "mamba", "rwkv", "jamba"),
    "masked": ("bert", "roberta", "fnet"),
    "seq2seq": ("t5", "bart"),
}
SLOW = {
    "blt": "its patches are found by a second model of millions of parameters",
    "diffusion_gemma": "it denoises in many steps",
    "kimi_linear": "its recurrence is a loop of Python over a chunk of 64",
    "nemotron_h": "its recurrence is a loop of Python over a chunk of 128",
}


def check_family(kind: str, family: str) -> Findings:
    torch.set_num_threads(1)
    return check_model(build_model(kind, family), {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)})


@pytest.mark.parametrize(("kind", "family"), [(kind, family) for kind, names in FEW.items() for family in names])
def test_a_few_families_have_the_findings_that_are_listed(kind: str, family: str) -> None:
    findings = check_family(kind, family)
    assert findings.names == FINDINGS[kind].get(family, ()), str(findings)


@pytest.mark.long
@pytest.mark.timeout(5400)
@pytest.mark.parametrize(("kind", "least"), [("causal", 130), ("masked", 35), ("seq2seq", 18)])
def test_every_family_has_the_findings_that_are_listed(kind: str, least: int) -> None:
    """Families whose configuration the table of sizes does not fit are not counted."""
    outcomes: dict[str, tuple[str, ...]] = {}
    for family in KINDS[kind]:
        if family in SLOW:
            continue
        try:
            model: Any = build_model(kind, family)
        except ValueError as error:
            warnings.warn(str(error), stacklevel=1)
            continue
        inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
        outcomes[family] = check_model(model, inputs).names
    assert {family: names for family, names in outcomes.items() if names} == FINDINGS[kind]
    assert len(outcomes) >= least


def test_a_leak_is_one_without_check_model_too() -> None:
    """YOSO divides the mask by 10,000, which no longer is its fill; Mamba restarts its state at each chunk."""
    yoso = build_model("masked", "yoso")
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :3] = 0
    with torch.no_grad():
        one, other = (yoso(input_ids=IDS.index_fill(1, torch.arange(3), fill), attention_mask=mask) for fill in (7, 44))
        assert float((one.logits[0, 3:] - other.logits[0, 3:]).abs().max()) > 1
        mamba = build_model("causal", "mamba")
        whole = mamba(input_ids=IDS[:1]).logits
        first = mamba(input_ids=IDS[:1, :4], use_cache=True)
        second = mamba(input_ids=IDS[:1, 4:], cache_params=first.cache_params, use_cache=True).logits
        assert float((second - whole[:, 4:]).abs().max()) > 1

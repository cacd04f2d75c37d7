"""check_model on families beyond text: vision, audio, video, text with images. Every finding is listed and proven."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch

from headscope import Findings, check_model
from headscope.checking import CheckError
from support.families import UnbuiltError, build, list_names
from support.model_families import KINDS
from support.proofs import FEATURES, prove

pytestmark = pytest.mark.filterwarnings("ignore")

MOST = 4_000_000  # parameters; larger families are not counted
WRONG, FRAGILE, UNUSUAL, SLOW = "wrong", "fragile", "unusual", "slow"
MIXED = {"documents-mixed": FRAGILE}
"""Layers with a state or a convolution read along the row, past a mask of attention."""
BORDER = {"padding-leaks": FRAGILE}
"""The first convolution over features of audio reads those behind the border."""
UNMASKED = {"implementations-differ": WRONG}
"""The eager implementation masks where a mask of numbers is 0, which gives NaN."""
NORMALISED = {"padding-leaks": WRONG}
"""The first layer normalises over all samples of audio, with those of padding."""
FINDINGS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("inkling2", "lfm3_vl", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7"), MIXED),
    **dict.fromkeys(
        ("canary", "cohere_asr", "parakeet_ctc", "parakeet_encoder", "parakeet_rnnt", "parakeet_tdt"), BORDER
    ),
    **dict.fromkeys(("moonshine", "sew", "sew-d"), NORMALISED),
    **dict.fromkeys(("nemotron3_5_asr", "nemotron_asr_streaming", "nemotron_asr_streaming_encoder"), UNMASKED),
    "aimv2": {"padding-changes-output": WRONG, "implementations-differ": WRONG},  # sdpa: a mask of ones is not causal
    "canine": {"padding-leaks": WRONG},  # a convolution with stride 4 joins characters with those of padding
    "glm5_next_text": {"mask-4d-ignored": FRAGILE},  # its layers drop masks that are not [B, T]
    "markuplm": MIXED,  # a mask of four axes gets six, and the output mixes heads and tokens
    "nemotron3_diarization": {"padding-leaks": WRONG},  # eight frames are one step, real ones and padding
    "paligemma": {"padding-changes-output": WRONG, "implementations-differ": WRONG},  # sdpa: no mask, not causal
    "sam3_lite_text_text_model": {"mask-ignored": WRONG},  # both layers are convolutions, which the mask does not reach
    "siglip_vision_model": {"weights-discarded": SLOW},  # the pooling head calls nn.MultiheadAttention
    "speech_to_text": {"padding-leaks": WRONG},  # convolutions with a bias over padding
    "vilt": {"random-in-eval": UNUSUAL},  # patches are selected at random
    "vit_mae": {"random-in-eval": UNUSUAL},  # patches are masked at random
}
"""Families with findings, of transformers 5.23, and their causes."""
FEW = (
    "aimv2", "beit", "clip_text_model", "decision_transformer", "dpr", "groupvit", "lasr_encoder", "parakeet_encoder",
    "siglip_vision_model", "sam3_lite_text_text_model", "vit_mae",
)  # fmt: skip


def list_other_families() -> list[str]:
    text = {family for names in KINDS.values() for family in names}
    return [name for name in list_names() if name not in text]


def build_other(name: str) -> tuple[Any, dict[str, Any]]:
    """A family and the arguments of a call, of audio with a mask if the model takes one of the features' length."""
    family = build(name, MOST)
    names = inspect.signature(family.model.forward).parameters
    main = next((each for each in FEATURES if each in family.inputs), None)
    inputs = dict(family.inputs)
    if main is None:
        return family.model, inputs
    mask = torch.ones(inputs[main].shape[:2], dtype=torch.long)
    partial = mask.clone()
    partial[0, -(mask.shape[1] // 3) :] = 0
    options = {"use_cache": False} if "use_cache" in names else {}  # a cache cuts masks that are too long
    if "attention_mask" in names and "attention_mask" not in inputs:
        try:
            with torch.no_grad():
                for each in (mask, partial):
                    family.model(**inputs, **options, attention_mask=each)
        except Exception:  # a mask of another length, or of another type
            return family.model, inputs
        return family.model, {**inputs, "attention_mask": mask}
    return family.model, inputs


def check_other(name: str) -> Findings:
    torch.set_num_threads(1)
    return check_model(*build_other(name))


def severities(findings: Findings) -> dict[str, str]:
    return {finding.name: finding.severity for finding in findings}


@pytest.mark.parametrize("name", FEW)
def test_a_few_other_families_have_the_findings_that_are_listed(name: str) -> None:
    findings = check_other(name)
    assert severities(findings) == FINDINGS.get(name, {}), str(findings)


@pytest.mark.parametrize(
    "name", ["aimv2", "parakeet_encoder", "siglip_vision_model", "sam3_lite_text_text_model", "vit_mae"]
)
def test_a_few_findings_of_other_families_are_proven_by_calls_of_the_model(name: str) -> None:
    for finding in FINDINGS[name]:
        assert prove(finding, *build_other(name)), finding


@pytest.mark.long
@pytest.mark.timeout(5400)
def test_every_other_family_has_the_findings_that_are_listed() -> None:
    """Families that are not built or are large, and those whose inputs have no axis of a batch, are not counted."""
    outcomes: dict[str, dict[str, str]] = {}
    refused: dict[str, str] = {}
    for name in list_other_families():
        try:
            model, inputs = build_other(name)
        except UnbuiltError as error:
            warnings.warn(f"{name}: {error}", stacklevel=1)
            continue
        try:
            outcomes[name] = severities(check_model(model, inputs))
        except CheckError as error:
            refused[name] = str(error).rpartition(": ")[2]
    assert {name: found for name, found in outcomes.items() if found} == FINDINGS
    assert set(refused.values()) == {"the first axis of each tensor must be the batch"}, refused
    assert len(outcomes) >= 170


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", FINDINGS)
def test_every_finding_of_other_families_is_proven_by_calls_of_the_model(name: str) -> None:
    for finding in FINDINGS[name]:
        assert prove(finding, *build_other(name)), finding


def test_an_output_that_is_not_one_row_for_each_token_is_not_taken_for_a_leak() -> None:
    """Poolers read the first token, and three rows for each token or one for eight are those of padding, too."""
    pooled = check_other("dpr")
    assert "read from the first token: pad on the right" in pooled.not_tested["padding, input_ids padded on the left"]
    assert "padding" not in check_other("decision_transformer").not_tested
    audio = check_other("lasr_encoder").not_tested["padding, input_features padded on the left"]
    assert audio == "of attention_mask, only the sum has an effect, as a length: pad on the right"

"""check_model on tiny random models of many families of transformers: every finding is listed here, and is true."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers

from headscope import Findings, check_model
from support.model_families import IDS, KINDS, build_config, build_model
from support.proofs import prove
from support.watched_models import spread

pytestmark = pytest.mark.filterwarnings("ignore")

MIXED = ("documents-mixed",)
"""Layers with a state or a convolution read along the row, past a mask of attention."""
FINDINGS: dict[str, dict[str, tuple[str, ...]]] = {
    "causal": {
        **dict.fromkeys(("bailing_hybrid", "bamba", "falcon_h1", "granitemoehybrid", "inkling2_text"), MIXED),
        **dict.fromkeys(("inkling_text", "lfm3", "minimax", "olmo_hybrid"), MIXED),
        **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), MIXED),
        "cpmant": ("mask-ignored",),  # attention_mask is an argument without use: its mask is that of token id 0
        "deepseek_v4": ("padding-leaks", "documents-mixed"),  # keys are compressed with the padding among them
        "falcon_mamba": ("chunked-prefill-differs",),  # the state starts again in a chunk of several tokens
        "jamba": ("chunked-prefill-differs", "documents-mixed"),  # its Mamba layers, as above
        "mamba": ("chunked-prefill-differs",),  # as above
        "mamba2": ("mask-4d-ignored",),  # it has no attention, and accepts a mask of it
        "moshi": ("decoding-differs",),  # its cache forgets keys behind a window, which the mask of a whole text lacks
        "prophetnet": ("padding-changes-output", "decoding-differs"),  # masked keys count in rows that see nothing
        "recurrent_gemma": ("padding-leaks", "documents-mixed"),  # the recurrence does not read the mask
        "rwkv": ("mask-ignored",),  # attention_mask is documented as not used
        "xlstm": ("mask-ignored",),  # attention_mask is an argument without use
    },
    "masked": {
        "convbert": ("padding-leaks", "documents-mixed"),  # convolutions over padding
        "fnet": ("mask-ignored",),  # a Fourier transform of all tokens
        "funnel": ("padding-leaks",),  # a mean of neighbours, of which one can be padding
        "nystromformer": ("padding-leaks", "documents-mixed"),  # landmarks are means over the padding, too
        "yoso": ("mask-ignored",),  # the mask is divided by 10,000, which is no longer its fill
    },
    "seq2seq": {
        "fsmt": ("decoding-differs",),  # use_cache=True drops the causal mask, also for a prompt of several tokens
        "longt5": ("fp16-overflow",),  # scores are filled with -1e10, which is -infinity in float16
        "prophetnet": ("padding-changes-output", "decoding-differs"),
    },
}
"""Families with findings, of transformers 5.23, and their causes."""
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


def prove_all(kind: str, family: str) -> None:
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    decoder = {"decoder_input_ids": IDS} if kind == "seq2seq" else {}
    for name in FINDINGS[kind][family]:
        assert prove(name, build_model(kind, family), {**inputs, **decoder}), name


@pytest.mark.parametrize(("kind", "family"), [("causal", "mamba"), ("causal", "jamba"), ("masked", "fnet")])
def test_a_few_findings_are_proven_by_calls_of_the_model(kind: str, family: str) -> None:
    prove_all(kind, family)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "family"), [(kind, family) for kind, names in FINDINGS.items() for family in names])
def test_every_finding_is_proven_by_calls_of_the_model(kind: str, family: str) -> None:
    prove_all(kind, family)


@pytest.mark.parametrize(("kind", "family", "name"), [
    ("causal", "llama", "padding-leaks"), ("causal", "llama", "mask-ignored"), ("causal", "llama", "documents-mixed"),
    ("causal", "llama", "decoding-differs"), ("causal", "llama", "chunked-prefill-differs"),
    ("causal", "llama", "implementations-differ"), ("causal", "llama", "padding-changes-output"),
    ("causal", "llama", "batch-changes-output"), ("causal", "llama", "mask-4d-ignored"),
    ("masked", "bert", "padding-leaks"), ("masked", "bert", "mask-ignored"), ("seq2seq", "t5", "fp16-overflow"),
])  # fmt: skip
def test_a_sound_model_has_no_proof(kind: str, family: str, name: str) -> None:
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
    assert not prove(
        name, build_model(kind, family), {**inputs, **({"decoder_input_ids": IDS} if kind == "seq2seq" else {})}
    )


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


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_a_batch_that_shares_the_capacity_of_its_experts_changes_its_texts(fraction: float) -> None:
    """NLLB-MoE drops tokens of full experts; which ones are full depends on the other texts of the batch."""
    sizes = {"encoder_sparse_step": 1, "decoder_sparse_step": 1, "moe_eval_capacity_token_fraction": fraction}
    torch.manual_seed(0)
    model = spread(transformers.NllbMoeForConditionalGeneration(build_config("nllb-moe", **sizes)))
    inputs = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS), "decoder_input_ids": IDS}
    assert ("batch-changes-output" in check_model(model, inputs).names) == (fraction < 1)
    assert prove("batch-changes-output", model, inputs) == (fraction < 1)

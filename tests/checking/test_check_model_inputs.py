"""check_model on the inputs and models that people have: each is checked, or gives one clear error."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from headscope import check_model
from headscope.checking import CheckError
from support.faulty_models import IDS
from support.watched_models import PLAIN, SIZES

pytestmark = pytest.mark.filterwarnings("ignore")
TEXT = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
LABELS = IDS[:, :7].masked_fill(torch.arange(7) > 4, -100)
X = torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(2))


def llama(**sizes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, **sizes}))


class ReadsDict(nn.Module):
    """Its forward takes one dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(53, 5), nn.Linear(5, 5)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.out(self.embed(batch["ids"])) * batch["mask"][..., None]


@dataclass
class Result:
    loss: Tensor
    scores: Tensor


Named = namedtuple("Named", ["loss", "scores"])


class Returns(nn.Module):
    """Returns its output in a form that a test selects."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.linear = form, nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        loss = y.mean()
        forms: dict[str, Any] = {
            "tensor": y, "tuple": (loss, y), "list": [None, y], "dict": {"loss": loss, "scores": y},
            "nested": ({"a": (y,)},), "dataclass": Result(loss, y), "namedtuple": Named(loss, y), "nothing": None,
            "integers": y.argmax(-1),
            "loss": loss, "other batch": y[:, :3].repeat(3, 1, 1),
        }  # fmt: skip
        return forms[self.form]


def test_a_forward_that_takes_a_dict() -> None:
    batch = {"ids": IDS, "mask": torch.ones(IDS.shape)}
    findings = check_model(ReadsDict(), batch, call=lambda model, **inputs: model(inputs))
    assert findings.names == ()
    for inputs in ({"batch": batch}, (batch,)):
        with pytest.raises(
            ValueError, match=r"batch is a dict: pass it as inputs, with call=lambda model, \*\*inputs: m"
        ):
            check_model(ReadsDict(), inputs)
    with pytest.raises(CheckError, match=r"unexpected keyword argument 'ids'; check inputs, or give call=lambda model"):
        check_model(ReadsDict(), batch)


@pytest.mark.parametrize("form", ["tuple", "list", "dict", "nested", "dataclass", "namedtuple"])
def test_an_output_of_any_form_is_checked_as_its_tensor_is(form: str) -> None:
    torch.manual_seed(0)
    expected = check_model(Returns("tensor"), X)
    torch.manual_seed(0)
    findings = check_model(Returns(form), X)
    assert findings.names == ()
    assert findings.understood == expected.understood


def test_an_output_without_numbers_of_the_batch_is_an_error_that_names_it() -> None:
    problem = "the output has no tensor of real numbers with the batch of 1 as its first axis, got "
    words = {"nothing": "NoneType", "integers": r"a tensor \[1, 7\] of int64", "loss": r"a tensor \[\]",
             "other batch": r"a tensor \[3, 3, 5\]"}  # fmt: skip
    for form, got in words.items():
        with pytest.raises(CheckError, match=f"fails in float64: CheckError: model: {problem}{got}; check inputs"):
            check_model(Returns(form), X)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_is_compared_in_float64(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    findings = check_model(model, TEXT)
    assert findings.names == ()
    assert findings.understood[0].endswith("in float64")
    assert model.dtype == dtype


def test_a_model_without_values_is_an_error() -> None:
    with pytest.raises(CheckError, match="on the meta device and have no values; load or initialise them first"):
        check_model(llama().to("meta"), TEXT)
    with pytest.raises(CheckError, match="its parameters are lazy and have no values; call the model once first"):
        check_model(nn.Sequential(nn.LazyLinear(5)), X)


def test_a_wrapper_is_checked_as_the_model_inside() -> None:
    model = llama().train()
    expected = check_model(model, TEXT)
    assert "cache" not in expected.not_tested
    for wrapped in (torch.compile(model), nn.DataParallel(model), torch.compile(nn.DataParallel(model))):
        findings = check_model(wrapped, TEXT)
        assert (findings.subject, findings.understood) == ("LlamaForCausalLM", expected.understood)
    model.compile()
    assert check_model(model, TEXT).understood == expected.understood
    assert model.training


def test_labels_give_the_tokens_of_the_decoder() -> None:
    """As in training: shifted, and without the -100 of padding."""
    sizes = dict.fromkeys(("encoder_layers", "decoder_layers"), 1)
    sizes |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2)
    config = transformers.WhisperConfig(
        vocab_size=53, d_model=22, num_mel_bins=7, max_source_positions=16, max_target_positions=20, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, encoder_ffn_dim=19, decoder_ffn_dim=19, **sizes,
    )  # fmt: skip
    whisper = transformers.WhisperForConditionalGeneration(config).eval()
    features = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(4))
    findings = check_model(whisper, {"input_features": features, "labels": LABELS})
    assert findings.names == (), str(findings)
    assert "decoder_input_ids [1, 7], input_features [1, 7, 32]" in findings.understood[0]
    with pytest.raises(CheckError, match="; pass decoder_input_ids or labels in inputs"):
        check_model(whisper, {"input_features": features})


def test_labels_of_a_text_or_an_image_change_nothing() -> None:
    model = llama()
    assert (
        check_model(model, {**TEXT, "labels": IDS, "return_dict": False}).understood
        == check_model(model, TEXT).understood
    )
    config = transformers.ViTConfig(
        hidden_size=22, num_hidden_layers=1, num_attention_heads=2, intermediate_size=19, image_size=12, patch_size=4
    )
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(config)
    pixels = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(4))
    findings = check_model(model, {"pixel_values": pixels, "labels": torch.tensor([0, 1])})
    assert findings.names == (), str(findings)
    assert findings.understood[0] == "called as model(pixel_values [1, 3, 12, 12]), in float64"


@pytest.mark.parametrize(
    ("name", "side"), [("BertForSequenceClassification", "left"), ("BertForQuestionAnswering", "")]
)
def test_a_classifier_that_reads_the_first_token_has_no_leak(name: str, side: str) -> None:
    torch.manual_seed(0)
    model = getattr(transformers, name)(transformers.BertConfig(**PLAIN))
    findings = check_model(model, TEXT)
    assert findings.names == (), str(findings)
    questions = [question for question in findings.not_tested if question.startswith("padding")]
    assert questions == [f"padding, input_ids padded on the {side}"] * bool(side)


def test_a_classifier_that_knows_its_padding_by_the_token_has_no_leak() -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**{**SIZES, "pad_token_id": 0}))
    findings = check_model(model, TEXT)
    assert findings.names == (), str(findings)
    assert "input_ids padded on the right: equal to the text alone, if padded with 0" in findings.understood


def test_a_pooled_output_that_other_tokens_move_is_a_leak() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(53, 5)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            x = self.embed(input_ids)
            return x.mean(1) + (x * attention_mask[..., None]).sum(1)

    assert check_model(Mean(), TEXT).names == ("padding-leaks",)


def test_padding_that_must_be_zero_is_fragile() -> None:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.convolution = nn.Linear(5, 5), nn.Conv1d(5, 5, 3, padding=1)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = self.convolution(x.mT).mT
            return self.linear(x + (x * mask[..., None]).sum(1, keepdim=True))

    findings = check_model(Convolution(), {"x": torch.randn(2, 11, 5), "mask": torch.ones(2, 11)})
    leak = findings["padding-leaks"]
    assert (findings.names, leak.severity) == (("padding-leaks",), "fragile")
    assert leak.seen.endswith("; with the usual padding, the output is that of the text alone")
    assert leak.condition == "the padding is not pad_token_id, or numbers other than 0"


def test_inputs_that_are_not_a_batch_of_tensors_are_errors_with_a_remedy() -> None:
    model = llama()
    problem = r"inputs: got no tensor with a batch axis, expected one such as input_ids \[B, T\]; input_ids "
    errors: dict[str, Any] = {
        problem + r"is a ndarray: pass torch.as_tensor\(input_ids\)": {"input_ids": np.array(IDS)},
        problem + r"is a list: pass torch.as_tensor\(input_ids\)": {"input_ids": IDS.tolist()},
        problem + r"has shape \[13\]: add the batch as its first axis": IDS[0],
        r"inputs: input_ids \[0, 13\] is empty, expected at least one entry and token": IDS[:0],
        "inputs: attention_mask hides every token of entry 0": {**TEXT, "attention_mask": torch.zeros_like(IDS)},
    }
    for message, inputs in errors.items():
        with pytest.raises(ValueError, match=message):
            check_model(model, inputs)


def test_inputs_without_an_axis_of_the_batch_are_an_error() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, patches: Tensor, sizes: Tensor) -> Tensor:
            return torch.cat([self.linear(part).mean(0)[None] for part in patches.split(sizes.tolist())])

    one, whole = (rf"the call with \(patches \[{n}, 5\], sizes \[2\]\)" for n in (1, 7))
    remedy = "does not: the first axis of each tensor must be the batch"
    with pytest.raises(CheckError, match=f"{one} fails .* {whole} {remedy}"):
        check_model(Packed(), (X[0], torch.tensor([3, 4])))


def test_an_output_whose_first_axis_is_not_the_batch_is_not_compared() -> None:
    class Joins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> SimpleNamespace:
            return SimpleNamespace(last_hidden_state=self.linear(x).flatten(0, 1)[None])

    findings = check_model(Joins(), X)
    assert findings.names == ()
    reason = "a batch of three has an output [1, 21, 5]: its first axis is not the batch"
    assert findings.not_tested["batch size and place"] == reason


def test_an_output_whose_sizes_change_with_the_batch_is_not_compared() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x).flatten(0, 1)
            return y.expand(x.shape[0], *y.shape)

    findings = check_model(Flat(), X)
    assert findings.names == ()
    assert findings.not_tested["batch size and place"] == "the output of one entry is [1, 7, 5], of three [3, 21, 5]"


def test_a_mask_of_which_only_the_sum_counts_is_padded_on_the_right() -> None:
    class Lengths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            real = torch.arange(x.shape[1]) < mask.sum(-1, keepdim=True)
            x = x * real[..., None]
            return self.linear(x + x.cumsum(1))

    findings = check_model(Lengths(), {"x": torch.randn(2, 11, 5), "mask": torch.ones(2, 11)})
    assert findings.names == (), str(findings)
    expected = {"padding, x padded on the left": "of mask, only the sum has an effect, as a length: pad on the right"}
    assert {k: v for k, v in findings.not_tested.items() if k.startswith("padding")} == expected


@pytest.mark.parametrize("token", [0, 1, 52])
def test_a_later_token_is_changed_where_all_tokens_are_the_same(token: int) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(53, 5)

        def forward(self, input_ids: Tensor) -> Tensor:
            x = self.embed(input_ids)
            return x + x.mean(1, keepdim=True)

    findings = check_model(Mean(), {"input_ids": torch.full((1, 7), token)}, causal=True)
    assert findings.names == ("looks-into-the-future",)

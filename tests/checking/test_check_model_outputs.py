"""check_model on outputs that are not one row for each token, and on weights before training: no fault is reported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import Findings, check_model
from support.faulty_models import IDS, VOCABULARY, WIDTH, SelfAttention

TEXT = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}
END = 31  # a token of IDS


class Reader(nn.Module):
    """A text whose output is read from one token, [B, E]; masked scores have the lowest number, as in transformers."""

    def __init__(self, place: str, causal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.place, self.causal = place, causal
        self.embed, self.attention = nn.Embedding(VOCABULARY, WIDTH), SelfAttention()
        if place == "end":
            self.config = SimpleNamespace(eos_token_id=[END], pad_token_id=0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = self.attention.split(x)
        visible = attention_mask.bool()[:, None, None, :]
        if self.causal:
            visible = visible & torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.mT).masked_fill(~visible, torch.finfo(q.dtype).min)
        out = x + self.attention.join(scores.softmax(-1) @ v)
        rows = torch.arange(len(x))
        if self.place == "mean":
            return out.mean(1)
        if self.place == "first":
            return out[:, 0]
        return out[rows, (input_ids if self.place == "largest" else (input_ids == END).int()).argmax(-1)]


class Similarities(nn.Module):
    """The similarity of each vector with each text, [B, B]."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.reader, self.linear = Reader(place), nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: Tensor, image: Tensor, attention_mask: Tensor) -> Tensor:
        return self.linear(image) @ self.reader(input_ids, attention_mask).mT


def check_similarities(place: str) -> Findings:
    image = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3))
    return check_model(Similarities(place), {"input_ids": IDS, "image": image, "attention_mask": torch.ones_like(IDS)})


def test_of_all_pairs_of_entries_each_with_itself_is_compared() -> None:
    findings = check_similarities("first")
    assert findings.names == (), str(findings)
    assert any("the output relates all entries of a batch" in line for line in findings.understood)
    assert any("whatever the size of the batch" in line for line in findings.understood)
    assert [name for name in findings.not_tested if "padding" in name] == ["padding, input_ids padded on the left"]
    assert check_similarities("mean").names == ("padding-leaks",)


def test_a_text_that_is_read_at_its_largest_token_has_no_leak() -> None:
    """CLIP, OWL-ViT: the token at the end of a text is the largest of the vocabulary."""
    findings = check_model(Reader("largest"), TEXT)
    assert findings.names == (), str(findings)
    assert not [name for name in findings.not_tested if "padding" in name]


def test_a_text_that_is_read_at_its_end_has_no_leak() -> None:
    """The tokens that end a text, by the config, are not tokens of padding."""
    short = torch.tensor([[END, 5, END, 7, END, 9, END, END, END, END, 9]])
    findings = check_model(Reader("end"), {"input_ids": short, "attention_mask": torch.ones_like(short)})
    assert findings.names == (), str(findings)


def test_a_row_of_padding_that_attends_to_all_is_not_a_leak() -> None:
    """GroupViT: a row whose keys are all masked is their mean, and the output is read from such a row."""
    findings = check_model(Reader("first"), TEXT)
    assert findings.names == (), str(findings)
    reason = "the first token is padding, and the output is read from the first token: pad on the right"
    assert findings.not_tested["padding, input_ids padded on the left"] == reason
    assert check_model(Reader("mean", causal=False), TEXT).names == ("padding-leaks",)


class Stacked(nn.Module):
    """Seven frames are one step of attention, and the mask is that of the first; the output has a row for each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.attention = nn.Linear(7 * WIDTH, WIDTH), SelfAttention()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        length = x.shape[1]
        x = F.pad(x, (0, 0, 0, -length % 7))
        q, k, v = self.attention.split(self.into(x.unflatten(1, (-1, 7)).flatten(2)))
        scores = (q @ k.mT).masked_fill(~mask[:, None, None, ::7].bool(), torch.finfo(q.dtype).min)
        return self.attention.join(scores.softmax(-1) @ v).repeat_interleave(7, 1)[:, :length]


def test_a_mask_that_hides_groups_of_frames_is_not_ignored() -> None:
    inputs: dict[str, Any] = {"x": torch.randn(2, 13, WIDTH), "mask": torch.ones(2, 13)}
    assert check_model(Stacked(), inputs).names == ("padding-leaks",)


def test_padding_that_must_be_zero_is_fragile_where_lengths_are_rounded_up() -> None:
    class Rounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv1d(5, 5, 3, padding=1, bias=False)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            x = self.convolution(F.pad(x, (0, 0, 0, x.shape[1] % 2)).mT).mT
            return x * 2 + (x[:, : mask.shape[1]] * mask[..., None]).sum(1, keepdim=True)

    findings = check_model(Rounded(), {"x": torch.randn(2, 12, 5), "mask": torch.ones(2, 12)})
    assert [(each.name, each.severity) for each in findings] == [("padding-leaks", "fragile")], str(findings)


class Normalised(nn.Module):
    """Vectors of length 1, whose length before is 0 in float16 if the weights are small."""

    def __init__(self, size: float, scale: float = 1.0) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(5, 5, bias=False), nn.Parameter(torch.tensor(scale))
        nn.init.constant_(self.linear.weight, size)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x.abs())
        return y / y.norm(dim=-1, keepdim=True) + self.scale


def test_weights_that_become_zero_in_half_precision_are_not_an_overflow() -> None:
    """BLIP starts from numbers of 1e-10, whose norm is 0 in float16."""
    x = torch.randn(2, 7, 5)
    findings = check_model(Normalised(1e-10), x)
    assert findings.names == (), str(findings)
    reason = "linear.weight has numbers up to 1e-10, which become 0: load trained weights"
    assert findings.not_tested["half precision, float16"] == reason
    for scale in (1.0, 1e-10):
        assert check_model(Normalised(3e4, scale), x * 9).names == ("fp16-overflow",)

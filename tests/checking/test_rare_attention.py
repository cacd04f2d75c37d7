"""check: attention that is right and rare, such as windows, low-rank keys, several attentions in one module."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import check

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
H, D, T = 3, 5, 7


def score(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * q.shape[-1] ** -0.5


def attend_by_definition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return score(q, k).softmax(-1) @ v


class Layer(nn.Module):
    """Three heads of five numbers around a function of queries, keys and values [B, H, T, D]."""

    def __init__(self, attend: Attend = attend_by_definition) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(H * D, H * D) for _ in range(4))
        self.attend = attend

    def split(self, x: Tensor, linear: nn.Module) -> Tensor:
        return linear(x).unflatten(-1, (H, D)).transpose(1, 2)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(q, k, v)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(x, linear) for linear in (self.q, self.k, self.v))
        return self.o(self.mix(q, k, v).transpose(1, 2).flatten(2))


def attend_in_windows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (F.pad(x, (0, 0, 2, 0)).unfold(2, 3, 1) for x in (k, v))  # [B, H, T, D, 3]
    scores = torch.einsum("bhtd,bhtdw->bhtw", q, k) * D**-0.5
    hidden = torch.arange(q.shape[2])[:, None] + torch.arange(3) < 2
    return torch.einsum("bhtw,bhtdw->bhtd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    length = q.shape[2]
    q, k, v = (F.pad(x, (0, 0, 0, -length % 4)).unflatten(2, (-1, 4)) for x in (q, k, v))
    visible = (torch.arange(q.shape[2] * 4) < length).view(-1, 1, 4)
    return (score(q, k).masked_fill(~visible, -math.inf).softmax(-1) @ v).flatten(2, 3)[:, :, :length]


def attend_by_cumulative_sums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = score(q, k)
    return (scores - scores.logcumsumexp(-1)[..., -1:]).exp() @ v


@pytest.mark.parametrize("window", [True, False])
def test_padded_windows_and_blocks_are_masked_attention(window: bool) -> None:
    layer = Layer(attend_in_windows if window else attend_in_blocks).double()
    i, j = torch.arange(T)[:, None], torch.arange(T)
    visible = (j <= i) & (j > i - 3) if window else i // 4 == j // 4
    hidden = torch.zeros(T, T).double().masked_fill(~visible, -math.inf)
    x = torch.randn(2, T, H * D).double()
    dense = Layer(lambda q, k, v: (score(q, k) + hidden).softmax(-1) @ v).double()
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-12, atol=1e-12)
    assert check(layer, inputs=x).names == ()


def test_outputs_that_are_merged_without_a_transpose_are_still_found() -> None:
    findings = check(Layer(lambda q, k, v: attend_in_blocks(q, k, v).reshape(2, T, H, D).transpose(1, 2)))
    assert findings.names == ("heads-merged-wrong",)


def test_a_sum_of_each_row_does_not_replace_its_logits() -> None:
    findings = check(Layer(attend_by_cumulative_sums), heads=H)
    assert findings.names == ()
    assert any("1/√D" in text for text in findings.understood)


class LowRank(Layer):
    """Linformer: keys and values are three weighted sums of seven tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.Parameter(torch.randn(3, T))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_by_definition(q, self.sums @ k, self.sums @ v)


def test_sums_of_keys_over_tokens_are_no_wrong_split() -> None:
    findings = check(LowRank(), inputs=torch.randn(2, T, H * D))
    assert not findings
    assert findings.not_tested["weights"].endswith("as in Linformer")


def test_a_wrong_split_of_keys_is_still_found() -> None:
    findings = check(Layer(lambda q, k, v: attend_by_definition(q, k.transpose(1, 2).reshape(k.shape), v)))
    assert findings.names == ("heads-split-wrong",)


class LowRankUpdate(Layer):
    """LoRA: queries are a projection plus a scaled one."""

    def __init__(self, by: float, *, first: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(H * D, 2, bias=False), nn.Linear(2, H * D, bias=False)
        self.by, self.first = by, first

    def split(self, x: Tensor, linear: nn.Module) -> Tensor:
        if linear is not self.q:
            return super().split(x, linear)
        update = super().split(self.a(x), self.b) * self.by
        return update + super().split(x, linear) if self.first else super().split(x, linear) + update


@pytest.mark.parametrize("by", [0.5, 2.0])
@pytest.mark.parametrize("first", [True, False])
def test_the_factor_of_an_update_is_not_the_scale_of_the_logits(by: float, first: bool) -> None:
    findings = check(LowRankUpdate(by, first=first))
    assert findings.names == ()
    assert any("1/√D" in text for text in findings.understood)


class TwoInOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Layer(), Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x + self.a(x))


def test_heads_are_counted_for_each_attention_of_a_module() -> None:
    findings = check(TwoInOne(), heads=H)
    assert findings.names == ()
    assert "6 heads of width 5, 3 in each of 2 attentions" in findings.understood
    assert check(TwoInOne(), heads=2).names == ("heads-not-split",)


def retrieve_in_steps(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return score(score(q, k).softmax(-1) @ k, k).softmax(-1) @ v


def test_the_steps_of_a_retrieval_are_attentions_of_their_own() -> None:
    findings = check(Layer(retrieve_in_steps), heads=H)
    assert "heads-not-split" not in findings.names


@pytest.mark.parametrize(("causal", "severity"), [(None, "unusual"), (True, "wrong")])
def test_a_model_from_right_to_left_is_wrong_only_where_it_must_be_causal(causal: bool | None, severity: str) -> None:
    hidden = torch.ones(T, T, dtype=torch.bool).tril(-1)
    layer = Layer(lambda q, k, v: score(q, k).masked_fill(hidden, -1e4).softmax(-1) @ v)
    assert check(layer, causal=causal)["looks-into-the-future"].severity == severity


def test_the_difference_of_two_softmaxes_is_unusual() -> None:
    def subtract(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (score(q, k).softmax(-1) - 0.3 * score(2 * q.flip(-1), k).softmax(-1)) @ v

    finding = check(Layer(subtract))["no-softmax"]
    assert finding.severity == "unusual"
    assert "sum to 0.7, the same for all queries" in finding.seen


def test_scores_without_a_softmax_are_wrong() -> None:
    assert check(Layer(lambda q, k, v: score(q, k) @ v))["no-softmax"].severity == "wrong"


class Pooled(Layer):
    """Learned queries attend to the tokens; each output is the average of what they get."""

    def __init__(self) -> None:
        super().__init__()
        self.learned = nn.Parameter(torch.randn(1, H, 2, D))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend_by_definition(self.learned, k, v).mean(2, keepdim=True).expand(q.shape)


def test_an_output_that_is_the_same_in_any_order_is_not_reported() -> None:
    findings = check(Pooled())
    assert "not-permutation-equivariant" not in findings.names
    assert "the output does not depend on the order of the tokens" in findings.understood


class Experts(nn.Module):
    """A mixture of three layers for each token: no token sees another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.experts = nn.Linear(15, 3), nn.ModuleList([nn.Linear(15, 15) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.stack([expert(x) for expert in self.experts], 2)
        return torch.einsum("bte,bted->btd", self.gate(x).softmax(-1), outputs)


def test_a_module_without_attention_is_not_told_to_see_the_past() -> None:
    findings = check(Experts())
    assert not findings
    assert "no attention was observed: no output depends on another position" in findings.understood


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(30, 30) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        pairs = (linear(x).unflatten(-1, (H, D, 2)) for linear in (self.q, self.k, self.v))
        q, k, v = (torch.view_as_complex(pair).transpose(1, 2) for pair in pairs)
        p = ((q @ k.conj().mT).real * D**-0.5).softmax(-1)
        return self.o(torch.view_as_real(p.to(v.dtype) @ v).transpose(1, 2).flatten(2))


def test_the_parts_of_complex_numbers_are_not_interleaved_heads() -> None:
    assert "heads-interleaved" not in check(Complex()).names


@pytest.mark.parametrize(("axis", "names"), [(-1, ()), (-2, ("logits-changed",))])
def test_the_maximum_over_the_queries_changes_the_weights(axis: int, names: tuple[str, ...]) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        e = (score(q, k) - score(q, k).amax(axis, keepdim=True)).exp()
        return e / e.sum(-1, keepdim=True) @ v

    x = torch.randn(2, T, H * D).double()
    equal = torch.allclose(Layer(attend).double()(x), Layer().double()(x), rtol=1e-9, atol=1e-9)
    assert equal == (axis == -1)
    findings = check(Layer(attend))
    assert findings.names == names
    if names:
        assert "not that of each query" in findings["logits-changed"].seen
        assert "dim=-1" in findings["logits-changed"].code

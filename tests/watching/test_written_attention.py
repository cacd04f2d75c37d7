"""watch: attention that a module writes out, in the styles of those who had not seen how it is recognised."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headscope import watch
from headscope._intercept import written
from headscope.watching import WatchError
from support import softmax_elsewhere, written_styles, written_styles_more

UNRECORDED = {"stepwise_decoder_lists": "its scores are sums, not a product of matrices"}
OTHER_KIND = {"non_local_block_pooled_keys": "the keys are pooled, and fewer than the queries"}
ROUNDED = {"bf16_softmax_in_float32"}  # its scores are rounded to bfloat16
CASES: dict[str, Any] = {each.name: each for each in (*written_styles.CASES, *written_styles_more.CASES)}


def watched(case: Any) -> tuple[Any, Any, Any]:
    """Return the output of a case without and with a watch, and the recording."""
    module, inputs = case.make(), case.inputs()
    torch.manual_seed(1)
    plain = module(*inputs)
    module, inputs = case.make(), case.inputs()
    torch.manual_seed(1)
    with warnings.catch_warnings(action="error"), watch(module) as seen:
        out = module(*inputs)
    return plain, out, seen


def same(a: Any, b: Any) -> bool:
    if isinstance(a, (tuple, list)):
        return all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, Tensor) else True


@pytest.mark.parametrize("name", [name for name in CASES if name not in UNRECORDED])
def test_every_style_has_the_statistics_of_its_float64_truth(name: str) -> None:
    case = CASES[name]
    plain, out, seen = watched(case)
    truth = case.truth(case.make(), *case.inputs())
    assert same(plain, out)
    assert len(seen.layers) == len(truth)
    for layer, expected in zip(seen.layers, truth, strict=True):
        p, visible = expected["weights"].double(), expected["visible"].expand_as(expected["weights"])
        rows = visible.any(-1) & (p.sum(-1) > 0)
        if expected["kind"] == "self" and p.shape[-2] == p.shape[-1]:
            rows &= visible.any(-2)  # rows of padding do not count
        if name not in OTHER_KIND:
            assert seen.about.kinds[layer] == expected["kind"]
        tolerance = {"rtol": 1e-3 if name in ROUNDED else 1e-5, "atol": 1e-6}
        for quantity, values in (("entropy", torch.special.entr(p).sum(-1)), ("max_weight", p.amax(-1))):
            means = torch.stack([values[:, h][rows[:, h]].mean() for h in range(p.shape[1])])
            torch.testing.assert_close(seen[layer, quantity].mean, means, **tolerance)
        assert seen[layer, "entropy"].count.tolist() == rows.sum((0, 2)).tolist()


@pytest.mark.parametrize("name", UNRECORDED)
def test_what_is_not_recognised_is_an_error(name: str) -> None:
    case = CASES[name]
    module = case.make()
    with pytest.raises(WatchError, match="no attention call was observed"), watch(module):
        module(*case.inputs())


@pytest.mark.parametrize("case", softmax_elsewhere.CASES, ids=lambda case: case.name)
def test_a_softmax_that_is_not_attention_is_not_recorded(case: Any) -> None:
    module, inputs = case.make(), case.inputs()
    torch.manual_seed(1)
    with pytest.raises(WatchError, match=r"no attention call was observed|could not be observed"), watch(module):
        module(*inputs)


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
        later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
        weights = (q @ k.transpose(-2, -1) / 8**0.5).masked_fill(later, -1e9).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("grad", [True, False])
def test_outputs_and_gradients_are_the_same_to_the_bit(grad: bool) -> None:
    model, x = nn.Sequential(Written(), Written()), torch.randn(2, 9, 24)
    results: list[list[Tensor]] = []
    for context in (warnings.catch_warnings(), watch(model)):
        with context, torch.set_grad_enabled(grad):
            out = model(x)
        results.append([out, *(torch.autograd.grad(out.square().sum(), [*model.parameters()]) if grad else ())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("context", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_every_pass_is_recorded_and_only_the_layers_are_followed(context: Any) -> None:
    model, x = nn.Sequential(Written(), nn.Linear(24, 24), Written()), torch.randn(2, 9, 24)
    with context(), watch(model) as seen:
        for _ in range(3):
            model(x)
    assert seen.layers == ("0", "2")
    assert seen["entropy"].count.tolist() == [[54] * 3] * 2


def test_a_mask_of_minus_1e9_hides_keys() -> None:
    model, x = Written(), torch.randn(1, 6, 24)
    with watch(model) as seen:
        model(x)
    assert seen["chance"].mean[0].tolist() == pytest.approx([sum(1 / n for n in range(1, 7)) / 6] * 3)


def test_heads_that_are_modules_are_one_layer() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(24, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            return (self.q(x) @ self.k(x).mT / 8**0.5).softmax(-1) @ self.v(x)

    class Heads(nn.Module):
        def __init__(self, *, joined: bool) -> None:
            super().__init__()
            self.heads, self.joined = nn.ModuleList(Head() for _ in range(3)), joined

        def forward(self, x: Tensor) -> Tensor:
            outs = [head(x) for head in self.heads]
            return torch.cat(outs, -1) if self.joined else outs[0] + outs[1] + outs[2]

    x = torch.randn(2, 5, 24)
    for joined, layers in ((True, ("0", "1")), (False, tuple(f"{n}.heads.{h}" for n in range(2) for h in range(3)))):
        model = nn.Sequential(Heads(joined=joined), nn.Linear(24 if joined else 8, 24), Heads(joined=joined))
        names = tuple(layer.replace("1", "2", 1) if layer[0] == "1" else layer for layer in layers)
        with watch(model) as seen:
            model(x)
        assert seen.layers == names


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_layer_is_recorded_once(reentrant: bool) -> None:
    layer, x = Written(), torch.randn(2, 9, 24, requires_grad=True)

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.layer, x, use_reentrant=reentrant)

    model = Checkpointed()
    expected = backward(model, x)
    with watch(model) as seen:
        grad = backward(model, x)
    assert torch.equal(grad, expected)
    assert seen.layers == ("layer",)
    assert seen["entropy"].count.tolist() == [[18] * 3]


def backward(model: nn.Module, x: Tensor) -> Tensor:
    x.grad = None
    model(x).sum().backward()
    assert x.grad is not None
    return x.grad.clone()


def test_autocast() -> None:
    model, x = Written(), torch.randn(2, 9, 24)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        with watch(model) as seen:
            out = model(x)
    assert torch.equal(out, expected)
    assert seen.layers == ("Written",)


def test_weights_that_were_changed_are_an_error() -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            x = self.attention(x)
            weights = (x @ x.mT).softmax(-1)
            return (weights * torch.linspace(0.5, 1.5, x.shape[1])) @ x

    model = Changed()
    with pytest.raises(WatchError, match="no attention call was observed"), watch(model):
        model(torch.randn(2, 9, 24))


def test_scores_of_layers_with_one_head_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(24, 72)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return x + (q @ k.mT).softmax(-1) @ v

    model, x = nn.Sequential(*(One() for _ in range(4))), torch.randn(2, 9, 24)
    for most in (1, 400, written.MOST_SCORES):
        monkeypatch.setattr(written, "MOST_SCORES", most)
        with watch(model) as seen:
            model(x)
        assert seen.layers == ("0", "1", "2", "3")

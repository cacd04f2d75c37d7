"""check: right modules that it called wrong, each next to a wrong one that it must still find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headscope import check
from headscope.cli._check.results import Result

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
H, D = 3, 5
E = H * D


class Layer(nn.Module):
    """Three heads of five numbers around a function of queries, keys and values [B, H, T, D]."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v, self.o = (nn.Linear(E, E) for _ in range(4))
        self.attend = attend

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x), self.k(x), self.v(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (H, D)).transpose(1, 2) for each in self.project(x))
        return self.o(self.attend(q, k, v).transpose(1, 2).flatten(2))


# ---------------------------------------------------------------- a scale before the product, in windows


def in_windows(attend: Attend) -> Attend:
    """Attend inside windows of four tokens, [B, H, W, 4, D], as Swin does."""
    return lambda q, k, v: attend(*(x.unflatten(2, (-1, 4)) for x in (q, k, v))).flatten(2, 3)


def dilated(attend: Attend) -> Attend:
    """Attend to every third token, [B, H, 3, T/3, D]."""

    def split(x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, 3)).transpose(2, 3)

    return lambda q, k, v: attend(split(q), split(k), split(v)).transpose(2, 3).flatten(2, 3)


@pytest.mark.parametrize("places", [in_windows, dilated])
@pytest.mark.parametrize(("of_q", "of_k"), [(D**-0.5, 1.0), (1.0, D**-0.5), (D**-0.25, D**-0.25)])
def test_scale_of_an_operand_in_windows(places: Callable[[Attend], Attend], of_q: float, of_k: float) -> None:
    layer = Layer(places(lambda q, k, v: ((q * of_q) @ (k * of_k).mT).softmax(-1) @ v))
    findings = check(layer, inputs=torch.randn(2, 12, E))
    assert findings.names == ()
    assert "scale 0.4472 = 1/√D" in findings.understood


def test_missing_scale_in_windows() -> None:
    layer = Layer(in_windows(lambda q, k, v: (q @ k.mT).softmax(-1) @ v))
    assert check(layer, inputs=torch.randn(2, 12, E)).names == ("scale-missing",)


# ---------------------------------------------------------------- weights of zeros


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * D**-0.5).softmax(-1) @ v


class Adapted(Layer):
    """Queries with a LoRA adapter."""

    def __init__(self) -> None:
        super().__init__(attend)
        self.a, self.b = nn.Linear(E, 2, bias=False), nn.Linear(2, E, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x) + self.b(self.a(x)), self.k(x), self.v(x)


class Gated(Layer):
    """An output with a factor, as in ReZero."""

    def __init__(self) -> None:
        super().__init__(attend)
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


def zero(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        nn.init.zeros_(module.get_parameter(name))
    return module


@pytest.mark.parametrize(
    ("module", "moved"),
    [
        (zero(Layer(attend), "o.weight", "o.bias"), "o.weight [15, 15]"),
        (zero(Layer(attend), "q.weight", "q.bias"), "q.weight [15, 15]"),
        (zero(nn.MultiheadAttention(E, H, batch_first=True), "out_proj.weight"), "out_proj.weight [15, 15]"),
        (zero(Adapted(), "b.weight"), "b.weight [15, 2]"),
        (zero(Gated(), "factor"), "factor []"),
        (zero(Layer(attend), "o.weight").requires_grad_(False), "o.weight [15, 15]"),
    ],
)
def test_weights_of_zeros_that_learn(module: nn.Module, moved: str) -> None:
    findings = check(module)
    assert findings.names == ()
    assert f"{moved} is zero, which hides other weights: checked as after a step of training" in findings.understood
    assert "scale 0.4472 = 1/√D" in findings.understood


@pytest.mark.parametrize(
    ("module", "name", "evidence"),
    [
        (zero(Adapted(), "a.weight", "b.weight"), "unused-parameter", "changing a.weight [2, 15], b.weight [15, 2] "),
        (zero(Layer(attend), "q.weight", "q.bias", "k.weight", "k.bias"), "unused-parameter", "changing q.weight"),
        (zero(Gated(), "factor", "o.weight", "o.bias"), "input-ignored", "changing any token does not affect"),
    ],
)
def test_weights_of_zeros_that_never_learn(module: nn.Module, name: str, evidence: str) -> None:
    findings = check(module)
    assert findings.names == (name,)
    assert findings[name].seen.startswith(evidence)


def test_rows_of_zeros_that_never_learn() -> None:
    findings = check(zero(nn.MultiheadAttention(E, H, batch_first=True), "in_proj_weight"), only="gradient-blocked")
    assert findings["gradient-blocked"].seen.startswith("the output depends on in_proj_weight (30 of 45 rows)")


def test_check_leaves_zeros_of_the_caller() -> None:
    module = zero(Layer(attend), "o.weight")
    check(module)
    assert not module.get_parameter("o.weight").any()


# ---------------------------------------------------------------- patterns of causal attention


def attend_where(rule: Callable[[Tensor, Tensor], Tensor]) -> Layer:
    """Attend causally to the pairs of which a rule of query and key is true."""

    def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        i = torch.arange(q.shape[2])
        visible = rule(i[:, None], i) & (i[:, None] >= i)
        return (q @ k.mT * D**-0.5).masked_fill(~visible, -1e4).softmax(-1) @ v

    return Layer(masked)


@pytest.mark.parametrize("length", [7, 11])
def test_chunks_of_causal_keys(length: int) -> None:
    findings = check(attend_where(lambda i, j: i // 4 == j // 4), inputs=torch.randn(2, length, E))
    assert findings.names == ()
    assert "causal, with chunks of 4 keys" in findings.understood


@pytest.mark.parametrize(
    ("rule", "pattern"),
    [
        (lambda i, j: i // 4 - j // 4 <= 1, "blocks of 4 keys at distances 0, 1"),
        (lambda i, j: (i - j < 3) | ((i - j) % 3 == 0), "keys at distances 0, 1, 2, 3, …"),
        (lambda i, j: (i // 3 == j // 3) | (j % 3 == 2), "blocks of 3 keys and the last key of each block"),
        (lambda i, j: (i - j < 3) | (j < 1), "a window of 3 keys and the first key"),
        (
            lambda i, j: i - j < torch.tensor([2, 3, 3])[:, None, None],
            "a window of 2 keys or a window of 3 keys",
        ),
    ],
)
def test_patterns_of_causal_keys(rule: Callable[[Tensor, Tensor], Tensor], pattern: str) -> None:
    findings = check(attend_where(rule), inputs=torch.randn(2, 11, E))
    assert [(each.name, each.severity) for each in findings] == [("cannot-see-the-past", "unusual")]
    assert findings["cannot-see-the-past"].seen.endswith(f": causal, with {pattern}")


@pytest.mark.parametrize(
    "rule",
    [
        lambda i, j: (j != 2) | (i == j),
        lambda i, j: i - j < torch.tensor([1, 3, 9])[:, None, None],
        lambda i, j: (i < 9) | (i == j),
    ],
)
def test_causal_keys_without_a_pattern(rule: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert check(attend_where(rule), inputs=torch.randn(2, 11, E))["cannot-see-the-past"].severity == "wrong"


# ---------------------------------------------------------------- other diagnoses


class Latent(nn.Module):
    """Latent attention after absorption: all heads share one vector of a token as key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down, self.o = nn.Linear(E, E), nn.Linear(E, 7), nn.Linear(E, E)
        self.up_k, self.up_v = nn.Parameter(torch.randn(H, D, 7)), nn.Parameter(torch.randn(H, D, 7))
        self.v = nn.Linear(E, 7)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.down(x)[:, None]  # [B, 1, T, 7]
        q = torch.einsum("bthd,hdr->bhtr", self.q(x).unflatten(-1, (H, D)), self.up_k)
        p = (q @ latents.mT * D**-0.5).softmax(-1)
        return self.o(torch.einsum("bhtr,hdr->bthd", p @ latents, self.up_v).flatten(2))


def test_values_are_keys_of_latent_attention() -> None:
    unused, module = check(Latent()), Latent()
    del module.v
    finding = check(module)["values-are-keys"]
    assert finding.severity == "unusual"
    assert finding.seen.endswith("one vector for all heads, as in latent attention")
    assert unused["values-are-keys"].severity == "wrong"
    assert unused["values-are-keys"].seen.endswith("changing v.weight [7, 15] does not affect the output")


def test_weights_of_several_pairs() -> None:
    findings = check(Layer(lambda q, k, v: ((p := (q @ k.mT * D**-0.5).softmax(-1)) + p.mT) / 2 @ v))
    assert findings.names == ("rows-do-not-sum-to-one",)
    assert findings["rows-do-not-sum-to-one"].seen.endswith("those of several pairs of tokens are added")
    symmetric = check(Layer(lambda q, k, v: ((s := q @ k.mT * D**-0.5) + s.mT).softmax(-1) @ v))
    assert symmetric.names == ()
    assert symmetric.not_tested["weights"] == "weights or scores of several pairs of tokens are added"


@pytest.mark.parametrize(("sees", "evidence"), [(True, "attends only to key 0"), (False, "has no visible key")])
def test_first_query_without_its_own_key(sees: bool, evidence: str) -> None:
    def strictly_past(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = torch.ones(q.shape[2], q.shape[2]).triu().bool()
        hidden[0, 0] = not sees
        return (q @ k.mT * D**-0.5).masked_fill(hidden, -torch.inf).softmax(-1).nan_to_num() @ v

    assert check(Layer(strictly_past))["cannot-see-itself"].seen.endswith(f"; query 0 {evidence}")


class Convolved(nn.Module):
    """Projections by convolutions of width 1, over a line or a plane of tokens."""

    def __init__(self, plane: bool, axis: int = -1, scale: float = D**-0.5) -> None:
        super().__init__()
        convolution = nn.Conv2d if plane else nn.Conv1d
        self.qkv, self.o = convolution(E, 3 * E, 1), convolution(E, E, 1)
        self.size, self.axis, self.scale = ((2, -1) if plane else (-1,)), axis, scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.mT.unflatten(-1, self.size)).flatten(2).unflatten(1, (3, H, D)).mT.unbind(1)
        out = (q @ k.mT * self.scale).softmax(self.axis) @ v
        return self.o(out.mT.flatten(1, 2).unflatten(-1, self.size)).flatten(2).mT


@pytest.mark.parametrize("plane", [False, True])
@pytest.mark.parametrize(
    ("options", "names"), [({}, ()), ({"axis": 1}, ("softmax-over-heads",)), ({"scale": 1.0}, ("scale-missing",))]
)
def test_projections_by_convolutions(plane: bool, options: dict[str, float], names: tuple[str, ...]) -> None:
    module = Convolved(plane, **options)  # pyright: ignore[reportArgumentType]
    assert check(module, inputs=torch.randn(2, 14, E)).names == names


def test_wider_convolutions_are_not_projections() -> None:
    module = Convolved(False)
    module.qkv = nn.Conv1d(E, 3 * E, 3, padding=1)
    findings = check(module, inputs=torch.randn(2, 7, E))
    assert findings.not_tested["weights"].startswith("a convolution computes numbers of several neighbours")


# ---------------------------------------------------------------- no attention


def test_a_module_without_attention_does_not_pass() -> None:
    findings = check(nn.Linear(E, E))
    assert (findings.summary, bool(findings)) == ("Linear: nothing found; no attention was observed", False)
    result = Result.of("hw.py", findings.to_dict(), "", "")
    assert (result.outcome, result.error) == (
        "not checked",
        "no attention was observed: no output depends on another position",
    )
    attends = Result.of("hw.py", check(Layer(attend)).to_dict(), "", "")
    assert (attends.outcome, attends.error) == ("passed", "")
    wrong = {**findings.to_dict(), "fails": True}
    assert Result.of("hw.py", wrong, "", "").outcome == "failed"


class InList(nn.Module):
    """Attention whose layers are in a plain list, or in one of torch's."""

    def __init__(self, holder: Any) -> None:
        super().__init__()
        self.parts = holder(nn.Linear(15, 15) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (3, 5)).transpose(1, 2) for part in [*self.parts][:3])
        return self.parts[3](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_layers_in_a_plain_list_are_not_registered() -> None:
    found = check(InList(list), embed_dim=15)
    assert found.names == ("layers-not-registered",)
    assert "not in parameters(): 8 parameters of parts" in str(found)
    assert check(InList(nn.ModuleList), embed_dim=15).names == ()

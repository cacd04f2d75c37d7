"""Derivatives in forward mode, batches of gradients, and torch.func within compiled functions: right, or an error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import headscope
from headscope._attend import prepare
from headscope._attend.backends import native as cpu
from headscope.masks import KeyLengths, causal
from support.attention_cases import ON_A_CPU

pytestmark = [
    pytest.mark.skipif(cpu.extension is None, reason="the native extension was not built: no C++ compiler"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),  # torch's own, within torch
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # likewise, of torch's kernel in a batch
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not:DeprecationWarning"),
]

LONG = pytest.mark.long  # on combinations of what other cases compile
NO_TANGENTS = "attention: this backend does not support forward-mode gradients"


class Attend(nn.Module):
    """Attention by one backend."""

    def __init__(self, backend: str | None) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return headscope.attention(q, k, v, bias=bias, backend=self.backend)


def given() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(1, 2, length, 4) for length in (5, 7, 7))
    return q, k, v, torch.randn(1, 2, 5, 7)


def compiled(function: Callable[..., Any], backend: Any = "aot_eager") -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, backend=backend, fullgraph=True)


# ---------------------------------------------------------------- forward mode


def by_the_operator(module: Attend) -> Callable[..., Tensor]:
    rest = (None, [], [], 0.5, 0.0, 0.0, None, module.backend or "cpu")
    return lambda *inputs: torch.ops.headscope.attend_forward(*inputs, *rest)[0]


RUNS: dict[str, Callable[[Attend], Callable[..., Tensor]]] = {
    "as it is": lambda module: module,
    "eager": lambda module: compiled(module, "eager"),
    "aot_eager": compiled,
    "exported": lambda module: torch.export.export(module, given()).module(),
    "the operator": by_the_operator,
}


def list_cases(hows: Iterable[str]) -> list[Any]:
    """Return ways and backends.

    Without a backend a graph has what "cpu" compiles to, because it is selected: that of "cpu" is in the long runs.
    "reproducible" has the same operators: it stays with "aot_eager", the longest way of the three.
    """
    long = {("cpu", how) for how in ("eager", "aot_eager", "exported")} | {
        ("reproducible", how) for how in ("eager", "exported")
    }
    return [
        pytest.param(how, backend, marks=LONG if (backend, how) in long else ())
        for how in hows
        for backend in (None, *ON_A_CPU)
    ]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's, of a dual tensor
@pytest.mark.parametrize("leaves", [False, True], ids=["constants", "leaves"])
@pytest.mark.parametrize(("how", "backend"), list_cases(RUNS))
def test_no_tangent_is_lost(how: str, backend: str | None, leaves: bool) -> None:
    run = RUNS[how](Attend(backend))
    by_torch = how == "aot_eager" and leaves  # it has no forward mode for any function that it compiled with gradients
    error = "implement the jvp function" if by_torch else NO_TANGENTS
    if how in ("eager", "aot_eager"):
        error += "|carry a forward-mode AD tangent"  # torch 2.15 says so before it compiles
    for n in range(4):
        inputs = [x.requires_grad_(leaves) for x in given()]
        wanted = headscope.attention(*inputs[:3], bias=inputs[3])
        with forward_ad.dual_level():
            inputs[n] = forward_ad.make_dual(inputs[n], torch.ones_like(inputs[n]))
            with pytest.raises(RuntimeError, match=error):
                run(*inputs)
            still = run(*(forward_ad.unpack_dual(x).primal for x in inputs))  # a level alone is no reason
            torch.testing.assert_close(still, wanted)


@pytest.mark.parametrize(("how", "backend"), list_cases(RUNS))
def test_no_tangent_of_a_gradient_is_lost(how: str, backend: str | None) -> None:
    """The gradient is linear in what comes in: blocked torch, where autograd sees it, hands the tangent on."""
    inputs = [x.requires_grad_() for x in given()]
    run = RUNS[how](Attend(backend))
    out = run(*inputs)
    (wanted,) = torch.autograd.grad(out, inputs[0], torch.ones_like(out), retain_graph=True)
    with forward_ad.dual_level():
        late = run(*inputs)
        dual = forward_ad.make_dual(torch.randn_like(out), torch.ones_like(out))
        if how == "as it is" and backend == "blocked":
            (gradient,) = torch.autograd.grad(out, inputs[0], dual)
            torch.testing.assert_close(forward_ad.unpack_dual(gradient).tangent, wanted)
            outs = [late]
        else:
            outs = [out, late]
        for each in outs:
            with pytest.raises(RuntimeError, match=NO_TANGENTS):
                torch.autograd.grad(each, inputs[0], dual)


# ---------------------------------------------------------------- batches of gradients


def counted(module: Attend) -> Callable[..., Tensor]:
    def run(*inputs: Tensor) -> Tensor:
        with FlopCounterMode(display=False):
            return module(*inputs)

    return run


@pytest.mark.parametrize(("how", "backend"), list_cases([*RUNS, "counted"]))
def test_a_batch_of_gradients_is_refused(how: str, backend: str | None) -> None:
    inputs = [x.requires_grad_() for x in given()]
    run = {**RUNS, "counted": counted}[how](Attend(backend))
    out = run(*inputs)
    batch = torch.empty_strided((3, *out.shape), (0, *out.stride())).fill_(
        1.0
    )  # laid out as out: AOT would copy others
    with pytest.raises(
        RuntimeError,
        match="attention: this backend does not support batched gradients",
    ):
        torch.autograd.grad(out, inputs[0], batch, is_grads_batched=True)


# ---------------------------------------------------------------- torch.func within a compiled function


def of_vmap(attend: Callable[..., Tensor], q: Tensor, bias: Tensor) -> Tensor:
    return torch.func.grad(lambda bias: torch.func.vmap(attend)(q, bias).square().sum())(bias)


def around_vmap(attend: Callable[..., Tensor], q: Tensor, bias: Tensor) -> Tensor:
    leaf = bias.clone().requires_grad_()
    return torch.autograd.grad(torch.func.vmap(attend)(q, leaf).square().sum(), leaf)[0]


@pytest.mark.parametrize("gradient", [of_vmap, around_vmap])
@pytest.mark.parametrize("native", [True, False], ids=["native", "portable"])
def test_a_bias_under_vmap_has_a_gradient(native: bool, gradient: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch does not say that its entries need one: torch's fused kernels must not be taken."""
    if not native:
        monkeypatch.setattr(cpu, "extension", None)
        monkeypatch.setattr(prepare, "prepared_calls", prepare.PreparedCalls())
    q, bias = torch.randn(3, 1, 2, 5, 4), torch.randn(3, 2, 5, 5)

    def attend(backend: str | None) -> Callable[..., Tensor]:
        return lambda q, bias: headscope.attention(q, q, q, bias=bias, backend=backend)

    wanted = gradient(attend("reference"), q, bias)
    torch.testing.assert_close(gradient(attend(None), q, bias), wanted)
    with pytest.raises(
        ValueError,
        match="bias: torch's fused kernels do not compute its gradient",
    ):
        gradient(attend("sdpa"), q, bias)
    if gradient is of_vmap:  # the compiler leaves autograd.grad to plain Python
        torch.testing.assert_close(compiled(lambda q, bias: of_vmap(attend(None), q, bias))(q, bias), wanted)


def test_a_bias_under_vmap_that_needs_no_gradient_is_for_torchs_kernels() -> None:
    q, bias = torch.randn(1, 2, 5, 4), torch.randn(3, 2, 5, 5)
    found = [
        torch.func.vmap(lambda b, name=name: headscope.attention(q, q, q, bias=b, backend=name))(bias)
        for name in ("sdpa", "cpu")
    ]
    torch.testing.assert_close(*found)


def test_a_bias_needs_a_gradient_though_the_innermost_transform_does_not_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gradient around a batch, around one that was detached."""
    monkeypatch.setattr(cpu, "extension", None)
    monkeypatch.setattr(prepare, "prepared_calls", prepare.PreparedCalls())
    q, bias = torch.randn(1, 2, 5, 4), torch.randn(3, 2, 5, 5)

    def run(backend: str | None) -> Tensor:
        def one(b: Tensor) -> Tensor:
            of = torch.func.vjp(lambda x: headscope.attention(q, q, q, bias=x.detach() + b, backend=backend).sum(), b)
            return of[0]

        return torch.func.grad(lambda bias: torch.func.vmap(one)(bias).square().sum())(bias)

    torch.testing.assert_close(run(None), run("reference"))


def test_a_first_gradient_within_a_compiled_function_is_by_torchs_kernels() -> None:
    """Where autograd may not ask for the next; and where it may, a graph does not hold each row by itself."""
    q, graphs = torch.randn(1, 8, 700, 4), []

    def grad(q: Tensor) -> Tensor:
        return torch.func.grad(lambda q: headscope.attention(q, q, q, mask=causal()).square().sum())(q)

    def called(run: Callable[[Tensor], Tensor]) -> list[str]:
        torch.compiler.reset()
        graphs.clear()
        torch.compile(run, backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)(q)
        return [getattr(node.target, "__name__", str(node.target)) for node in graphs[0].graph.nodes]

    names = called(grad)
    assert "scaled_dot_product_attention" not in names
    assert names.count("matmul") == 2
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            assert "scaled_dot_product_attention" in called(grad)
            assert "scaled_dot_product_attention" in called(torch.func.vmap(lambda q: headscope.attention(q, q, q)))


@pytest.mark.parametrize("option", [pytest.param("nothing", marks=LONG), "causal", "bias"])
def test_the_default_has_every_derivative_within_a_compiled_function(option: str) -> None:
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    said = {"nothing": {}, "causal": {"mask": causal()}, "bias": {"bias": torch.randn(2, 5, 5)}}[option]

    def twice(backend: str | None) -> Callable[[Tensor], Tensor]:
        grad = torch.func.grad(lambda q: headscope.attention(q, k, v, **said, backend=backend).square().sum())
        return torch.func.grad(lambda q: grad(q).square().sum())

    torch.testing.assert_close(compiled(twice(None))(q), twice("reference")(q), rtol=1e-4, atol=1e-5)


RATE = 0.4
DERIVATIVES: dict[str, Callable[[Tensor], Tensor]] = {  # what is found beside out = p v, where v is the identity
    "vmap": lambda p: p,
    "jvp": lambda p: p,  # along v
    "grad": lambda p: p.sum(-2)[..., None].expand_as(p.mT @ p),  # of Σ p v
    "grad of each sample": lambda p: p.sum(-2)[..., None].expand_as(p.mT @ p),
    "grad of grad": lambda p: (p.mT @ p.sum(-1, keepdim=True)).expand_as(p.mT @ p),  # of Σ pᵀ p v
}


@pytest.mark.parametrize(
    ("transform", "backend"),
    [
        ("vmap", None), ("jvp", "blocked"), ("grad of each sample", "blocked"), ("grad of grad", None),
        pytest.param("grad", None, marks=LONG),  # within that of each sample, and of itself
        pytest.param("vmap", "blocked", marks=LONG), pytest.param("jvp", None, marks=LONG),
        pytest.param("grad", "blocked", marks=LONG), pytest.param("grad of each sample", None, marks=LONG),
        pytest.param("grad of grad", "blocked", marks=LONG),
    ],
)  # fmt: skip
def test_dropout_within_a_compiled_function(transform: str, backend: str | None) -> None:
    q, k = torch.randn(2, 1, 3, 29, 4), torch.randn(1, 3, 31, 4)
    v = torch.eye(31).expand(1, 3, 31, 31).clone()

    def attend(v: Tensor, q: Tensor, rate: float = RATE) -> Tensor:
        return headscope.attention(q, k, v, mask=causal(), dropout=rate, backend=backend)

    def loss(power: int) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(v: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
            out = attend(v, q)
            return out.pow(power).sum() / power, out

        return run

    def sum_of_grad(v: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        gradient, out = torch.func.grad(loss(2), has_aux=True)(v, q)
        return gradient.sum(), out

    grad, each = torch.func.grad(loss(1), has_aux=True), {"in_dims": (None, 0), "randomness": "different"}
    run: Callable[..., tuple[Tensor, Tensor]] = {
        "vmap": torch.func.vmap(lambda v, q: (attend(v, q),) * 2, **each),
        "jvp": lambda v, q: torch.func.jvp(lambda v: attend(v, q), (v,), (v,)),
        "grad": grad,
        "grad of each sample": torch.func.vmap(grad, **each),
        "grad of grad": torch.func.grad(sum_of_grad, has_aux=True),
    }[transform]
    rows = q if transform in ("vmap", "grad of each sample") else q[0]
    graph = compiled(run)
    torch.manual_seed(3)
    (gradient, out), other = graph(v, rows), graph(v, rows)[1]
    torch.manual_seed(3)
    torch.testing.assert_close(graph(v, rows)[1], out, rtol=0, atol=0)
    torch.testing.assert_close(gradient, DERIVATIVES[transform](out), rtol=1e-4, atol=1e-5)
    usual = attend(v, rows.reshape(-1, *q.shape[2:]), 0.0).view_as(out)
    kept = out != 0
    torch.testing.assert_close(out[kept], (usual / (1 - RATE))[kept])
    share, seen = float(kept[usual != 0].float().mean()), int((usual != 0).sum())
    spread = (RATE * (1 - RATE) / seen) ** 0.5
    assert abs(share - (1 - RATE)) < 5 * spread, f"kept {share:.4f}, expected {1 - RATE:.4f} ± {spread:.4f}"
    assert not torch.equal(other, out), "two runs drop the same"
    assert out.ndim == 4 or not torch.equal(kept[0], kept[1]), "two entries drop the same"


@pytest.mark.parametrize(
    ("transform", "backend"),
    [
        ("grad", None),
        *itertools.product(["vmap", "grad of each sample", "grad of vmap", "jacrev"], ["cpu", "blocked"]),
        ("grad of each sample", "reproducible"),  # the same operators call it: the other transforms are long
        *(pytest.param(each, "reproducible", marks=LONG) for each in ("vmap", "grad of vmap", "jacrev")),
    ],
)
def test_transforms_of_a_compiled_function(transform: str, backend: str | None) -> None:
    """torch.func around a compiled function: the compiler then leaves it out, and meets what it calls."""
    q, k, v = torch.randn(3, 3, 1, 2, 5, 4)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return headscope.attention(q, k, v, mask=causal() & KeyLengths(torch.tensor([4])), backend=backend)

    def run(attend: Callable[..., Tensor]) -> Any:
        grad = torch.func.grad(lambda *x: attend(*x).square().sum())
        many = torch.func.vmap(attend)
        runs: dict[str, Callable[[], Any]] = {
            "vmap": lambda: many(q, k, v),
            "grad": lambda: grad(q[0], k[0], v[0]),
            "grad of each sample": lambda: torch.func.vmap(grad)(q, k, v),
            "grad of vmap": lambda: torch.func.grad(lambda q: many(q, k, v).square().sum())(q),
            "jacrev": lambda: torch.func.jacrev(lambda q: attend(q, k[0], v[0]).sum(-1))(q[0]),
        }
        return runs[transform]()

    torch.compiler.reset()
    torch.testing.assert_close(run(torch.compile(attend, backend="aot_eager")), run(attend))

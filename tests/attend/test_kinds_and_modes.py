"""Every kind of tensor, mode and transform of torch: right, or refused by name, as docs/concepts/modes.md says."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.masked import masked_tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import headscope
from headscope import MultiHeadAttention
from headscope.masks import Dense, KeyLengths, causal, window

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "modes.md"
Call = Callable[..., Any]


class Plain(Tensor):
    """A subclass that changes nothing."""


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def of(change: Callable[[Tensor], Tensor]) -> Callable[[Call, tuple[Tensor, ...]], Any]:
    """Call with each tensor changed."""
    return lambda call, tensors: call(*map(change, tensors))


def within(context: Callable[[], Any]) -> Callable[[Call, tuple[Tensor, ...]], Any]:
    """Call in a context."""

    def run(call: Call, tensors: tuple[Tensor, ...]) -> Any:
        with context():
            return call(*tensors)

    return run


def transformed(transform: Callable[[Call], Call]) -> Callable[[Call, tuple[Tensor, ...]], Any]:
    """Call what a transform makes of the call."""
    return lambda call, tensors: transform(call)(*tensors)


def dual(call: Call, tensors: tuple[Tensor, ...]) -> Any:
    with forward_ad.dual_level():
        return call(*(forward_ad.make_dual(x, torch.ones_like(x)) for x in tensors))


def gradient(call: Call, tensors: tuple[Tensor, ...]) -> Any:
    value = [torch.empty(0)]

    def total(*args: Tensor) -> Tensor:
        value[0] = call(*args)
        return value[0].sum()

    torch.func.grad(total)(*tensors)
    return call(*tensors)


def traced_by_jit(call: Call, tensors: tuple[Tensor, ...]) -> Any:
    return torch.jit.trace(called(call), tensors)(*tensors)


def traced_by_fx(call: Call, tensors: tuple[Tensor, ...]) -> Any:
    return torch.fx.symbolic_trace(called(call))(*tensors)


def called(call: Call) -> nn.Module:
    """A module that calls, and has the module of the calls as its own."""
    made = type("Called", (nn.Module,), {"forward": lambda self, q, k, v: call(q, k, v)})()
    made.inner = MODULE
    return made


def functionally(call: Call, tensors: tuple[Tensor, ...]) -> Any:
    module = called(call)
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return torch.func.functional_call(module, parameters, tensors)


def with_hooks(call: Call, tensors: tuple[Tensor, ...]) -> Any:
    with torch.autograd.graph.save_on_cpu():
        inputs = [x.clone().requires_grad_() for x in tensors]
        out = call(*inputs)
        out.sum().backward()
        return out


def exported(call: Call, tensors: tuple[Tensor, ...]) -> Any:
    return torch.export.export(called(call), tensors).module()(*tensors)


KINDS: dict[str, Callable[[Call, tuple[Tensor, ...]], Any]] = {
    "`nn.Parameter`": of(nn.Parameter),
    "`nn.Buffer`": of(nn.Buffer),
    "a subclass without `__torch_dispatch__`": of(lambda x: x.as_subclass(Plain)),
    "a wrapper subclass (`TwoTensor`)": of(lambda x: TwoTensor(x.clone(), x.clone())),
    "`MaskedTensor`": of(lambda x: masked_tensor(x, torch.ones_like(x).bool())),
    "`UninitializedParameter`": of(lambda x: nn.UninitializedParameter()),
    "sparse COO": of(lambda x: x.to_sparse()),
    "sparse CSR": of(lambda x: x.to_sparse_csr()),
    "MKL-DNN": of(lambda x: x.to_mkldnn()),
    "quantised": of(lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)),
    "nested, `torch.strided`": of(lambda x: torch.nested.nested_tensor(list(x))),
    "complex": of(lambda x: x.to(torch.complex64)),
    "integers": of(lambda x: x.long()),
    "float8": of(lambda x: x.to(torch.float8_e4m3fn)),
    "a negative view": of(lambda x: torch._neg_view(-x)),
    "the imaginary part of a conjugate": of(lambda x: torch.complex(x, -x).conj().imag),
    "shared memory": of(lambda x: x.clone().share_memory_()),
    "functional tensors of `torch.func`": of(torch._to_functional_tensor),
    "on the meta device": of(lambda x: x.to("meta")),
    "`FakeTensor`": lambda call, tensors: call(*map(FakeTensorMode().from_tensor, tensors)),
}
MODES: dict[str, Callable[[Call, tuple[Tensor, ...]], Any]] = {
    "`FakeTensorMode`": within(lambda: FakeTensorMode(allow_non_fake_inputs=True)),
    "`inference_mode`": within(torch.inference_mode),
    "a `TorchFunctionMode`": within(Functions),
    "a `TorchDispatchMode`": within(Operators),
    "`FlopCounterMode`": within(lambda: FlopCounterMode(display=False)),
    "another default device": within(lambda: torch.device("meta")),
    "anomaly detection": within(torch.autograd.detect_anomaly),
    "`save_on_cpu`": with_hooks,
    "deterministic algorithms": lambda call, tensors: deterministic(call, tensors),
    "`forward_ad.dual_level`": dual,
    "`torch.vmap`": transformed(torch.vmap),
    "`torch.func.grad`": gradient,
    "`torch.func.functional_call`": functionally,
    "`torch.func.vjp`": lambda call, tensors: torch.func.vjp(call, *tensors)[0],
    "`torch.func.jvp`": lambda call, tensors: torch.func.jvp(call, tensors, tensors)[0],
    "`torch.func.linearize`": lambda call, tensors: torch.func.linearize(call, *tensors)[0],
    "`torch.func.functionalize`": transformed(torch.func.functionalize),
    "`make_fx`": lambda call, tensors: make_fx(call)(*tensors)(*tensors),
    "`torch.fx.symbolic_trace`": traced_by_fx,
    "`torch.jit.trace`": traced_by_jit,
    "`torch.compile`": transformed(lambda call: torch.compile(call, backend="aot_eager", fullgraph=True)),
    "`torch.export`": exported,
}


def deterministic(call: Call, tensors: tuple[Tensor, ...]) -> Any:
    torch.use_deterministic_algorithms(True)
    try:
        return call(*tensors)
    finally:
        torch.use_deterministic_algorithms(False)


torch.manual_seed(0)
MODULE = MultiHeadAttention(8, 2)
CALLS: dict[str, tuple[tuple[int, ...], Call]] = {
    "attention": ((2, 2, 6, 8), lambda q, k, v: headscope.attention(q, k, v, mask=causal())),
    "observe": ((2, 2, 6, 8), lambda q, k, v: observed(q, k, v)),
    "module": ((2, 6, 8), lambda x, *others: MODULE(x, mask=causal())),
}
SEEN: list[float] = []


def observed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    SEEN.append(float(headscope.observe(q, k, v, mask=causal())[0, 0, "entropy"].mean))
    return q.sum()


MEMORY = "a functional tensor"
NO_VALUES = "observe: its tensors have no values"
NO_TANGENTS = "attention: this backend does not support forward-mode gradients"
REFUSED: dict[str, tuple[str | None, str | None, str | None]] = {
    "`MaskedTensor`": ("q: got a MaskedTensor", "q: got a MaskedTensor", "x: got a MaskedTensor"),
    "`UninitializedParameter`": ("q: is an Uninit", "q: is an Uninit", "x: is an Uninit"),
    "sparse COO": ("q: layout is", "q: layout is", "x: layout is"),
    "sparse CSR": ("q: layout is", "q: layout is", "x: layout is"),
    "MKL-DNN": ("q: layout is", "q: layout is", "x: layout is"),
    "quantised": ("q: dtype is", "q: dtype is", "x: dtype is"),
    "nested, `torch.strided`": ("q: is a nested", "q: is a nested", "x: is a nested"),
    "complex": ("q: dtype is", "q: dtype is", "x: dtype is"),
    "integers": ("q: dtype is", "q: dtype is", "x: dtype is"),
    "float8": ("q: dtype is", "q: dtype is", "x: dtype is"),
    "functional tensors of `torch.func`": (f"q: is {MEMORY}", f"q: is {MEMORY}", f"x: is {MEMORY}"),
    "on the meta device": (None, NO_VALUES, "x: is on meta, the module on cpu"),
    "`FakeTensor`": (None, NO_VALUES, "convert all Tensors to FakeTensors"),
    "`FakeTensorMode`": (None, NO_VALUES, None),
    "`forward_ad.dual_level`": (NO_TANGENTS, None, NO_TANGENTS),
    "`torch.vmap`": (None, "observe: within torch.vmap", None),
    "`torch.func.jvp`": (NO_TANGENTS, None, NO_TANGENTS),
    "`torch.func.linearize`": (NO_TANGENTS, NO_VALUES, NO_TANGENTS),
    "`torch.func.functionalize`": (f"q: is {MEMORY}", f"q: is {MEMORY}", f"x: is {MEMORY}"),
    "`make_fx`": (None, NO_VALUES, None),
    "`torch.fx.symbolic_trace`": ("q: got Proxy", "q: got Proxy", "x: got Proxy"),
    "`torch.compile`": (None, "torch.compiler.disable", None),
    "`torch.export`": (None, NO_VALUES, None),
}


def run(name: str, what: str) -> tuple[Any, Tensor]:
    """What comes of a call, and what comes of it plainly."""
    sizes, call = CALLS[what]
    torch.manual_seed(1)
    tensors = tuple(torch.randn(sizes) for _ in "qkv")
    expected = call(*tensors)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = {**KINDS, **MODES}[name](call, tensors)
    return got, expected


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("name", [*KINDS, *MODES])
def test_each_is_right_or_refused_by_name(name: str, what: str) -> None:
    refusal = REFUSED.get(name, (None, None, None))[[*CALLS].index(what)]
    if refusal is not None:
        with pytest.raises(Exception, match=re.escape(refusal)):
            run(name, what)
        return
    SEEN.clear()
    got, expected = run(name, what)
    if what == "observe":
        assert SEEN[0] == pytest.approx(SEEN[-1], abs=1e-6)
        assert len(SEEN) >= 2
        return
    plain = getattr(got, "a", got)  # a TwoTensor's
    if plain.is_meta or isinstance(plain, FakeTensor):
        assert plain.shape == expected.shape
    else:
        torch.testing.assert_close(torch.as_tensor(plain.detach()).as_subclass(Tensor), expected.detach())


def table(first: str, names: Iterable[str]) -> str:
    """A table of docs/concepts/modes.md."""
    lines = [f"| {first} | `attention` | `observe` | `MultiHeadAttention` |", "|---|---|---|---|"]
    for name in names:
        refused = REFUSED.get(name, (None, None, None))
        lines.append("| " + " | ".join([name, *("works" if each is None else "refused" for each in refused)]) + " |")
    return "\n".join(lines) + "\n"


def test_the_page_has_these_tables() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert table("tensor", KINDS) in page
    assert table("mode or transform", MODES) in page


def test_flops_are_counted() -> None:
    q, k, v = (torch.randn(2, heads, length, 8, requires_grad=True) for heads, length in ((4, 6), (2, 10), (2, 10)))
    counter: Any = FlopCounterMode(display=False)
    with counter:
        headscope.attention(q, k, v).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 4 * 6 * 10 * 8 * (2 + 5)
    with counter:
        MultiHeadAttention(8, 2, reproducible=True)(torch.randn(3, 5, 8))
    assert counter.get_total_flops() == 2 * 3 * 5 * 8 * (24 + 8) + 2 * 3 * 2 * 5 * 5 * 4 * 2


# ---------------------------------------------------------------- DTensors


@pytest.fixture(scope="module")
def distribute(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Tensor], Tensor]]:
    """Make a tensor a DTensor on a mesh of this process alone."""
    place = tmp_path_factory.mktemp("mesh") / "store"
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        yield lambda x: distribute_tensor(x, mesh, [Replicate()])
    finally:
        dist.destroy_process_group()


DTENSORS: dict[str, str | None] = {
    "q, k and v": None,
    "q alone": "k: is an ordinary tensor, q is a DTensor; expected q, k and v all",
    "k alone": "q: is an ordinary tensor, k is a DTensor; expected q, k and v all",
    "all, and a window": None,
    "all, and lengths": None,
    "all, and a table": None,
    "all, and a bias": None,
    "all, and sinks": None,
    "all, and a table of DTensors": "mask (Dense): is a DTensor; expected an ordinary tensor, whole on each rank",
    "all, and an ordinary bias": "bias: is an ordinary tensor, q, k and v are DTensors; expected a DTensor over their",
    "all, and ordinary sinks": "sinks: is an ordinary tensor, q, k and v are DTensors; expected a DTensor over their",
    "a bias alone": "bias: is a DTensor, q, k and v are ordinary; expected an ordinary tensor: use .to_local()",
    "sinks alone": "sinks: is a DTensor, q, k and v are ordinary; expected an ordinary tensor: use .to_local()",
    "lengths alone": "mask (KeyLengths): is a DTensor, q, k and v are ordinary",
}


@pytest.mark.parametrize("case", DTENSORS)
def test_dtensors_are_right_or_refused_by_name(distribute: Callable[[Tensor], Tensor], case: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 6, 8) for _ in "qkv")
    lengths, table, bias, sinks = (
        torch.tensor([3, 6]),
        torch.ones(6, 6).tril().bool(),
        torch.randn(6, 6),
        torch.randn(2),
    )
    all_of_them = case.startswith(("q, k", "all"))
    inputs = [
        distribute(x) if all_of_them or case == f"{name} alone" else x for name, x in zip("qkv", (q, k, v), strict=True)
    ]
    ordinary: dict[str, dict[str, Any]] = {
        "window": {"mask": window(3)}, "lengths": {"mask": KeyLengths(lengths)}, "table": {"mask": Dense(table)},
        "bias": {"bias": bias}, "sinks": {"sinks": sinks},
    }  # fmt: skip
    distributed: dict[str, dict[str, Any]] = {
        "window": {"mask": window(3)},
        "lengths": {"mask": KeyLengths(distribute(lengths) if case.endswith("alone") else lengths)},
        "table": {"mask": Dense(distribute(table) if "DTensors" in case else table)},
        "bias": {"bias": bias if "ordinary" in case else distribute(bias)},
        "sinks": {"sinks": sinks if "ordinary" in case else distribute(sinks)},
    }
    option = next((word for word in ordinary if word in case), None)
    refusal = DTENSORS[case]
    if refusal is not None:
        with pytest.raises(TypeError, match=re.escape(refusal)):
            headscope.attention(*inputs, **(distributed[option] if option else {}))
        return
    out: Any = headscope.attention(*inputs, **(distributed[option] if option else {}))
    torch.testing.assert_close(out.full_tensor(), headscope.attention(q, k, v, **(ordinary[option] if option else {})))


def test_of_two_masks_of_a_class_the_dtensor_is_named(distribute: Callable[[Tensor], Tensor]) -> None:
    q, lengths = torch.randn(2, 2, 6, 8), torch.tensor([3, 6])
    for mask in (
        KeyLengths(distribute(lengths)) & KeyLengths(lengths),
        KeyLengths(lengths) & KeyLengths(distribute(lengths)),
    ):
        with pytest.raises(
            TypeError,
            match=re.escape(
                "mask (KeyLengths): is a DTensor, q, k and v are ordinary; expected an ordinary tensor: use .to_local()"
            ),
        ):
            headscope.attention(q, q, q, mask=mask)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_observing_refuses_dtensors_by_name(distribute: Callable[[Tensor], Tensor], name: str) -> None:
    inputs = {each: torch.randn(2, 2, 6, 8) for each in "qkv"}
    inputs[name] = distribute(inputs[name])
    with pytest.raises(TypeError, match=rf"^{name}: got a DTensor; expected an ordinary tensor: use \.to_local\(\)"):
        headscope.observe(**inputs)

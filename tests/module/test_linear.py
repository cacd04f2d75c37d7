"""The projections' routes: the same numbers, chosen by the shipped table; no gradient is lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import headscope
from headscope._attend.backends import native
from headscope._linear import layer as _linear
from headscope._linear import product as _product
from headscope._linear.layer import Linear
from headscope._linear.product import Native
from support.tolerance import assert_as_accurate

ROWS, WIDTH, OUT = 67, 256, 257  # more products than the table's least


@pytest.fixture(params=["onednn", "native"])
def preferred(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A CPU for which the table prefers this product; the list grows by one for each that it makes."""
    made: list[int] = []
    if request.param == "native":
        product = own(torch.float32)
        monkeypatch.setattr(_product, "multiply", counting(_product.multiply, made))
        chosen: _linear.Product = product
    else:
        product = _linear.onednn()
        if product is None:
            pytest.skip("this torch has no oneDNN product")
        chosen = counting(product, made)
    monkeypatch.setattr(_linear, "routes", lambda dtype: ((0, chosen),) if dtype is torch.float32 else ())
    monkeypatch.setattr(_linear, "trained_routes", lambda dtype: ())
    return made


def counting(product: Any, made: list[int]) -> Any:
    def counted(*given: Any) -> Any:
        made.append(1)
        return product(*given)

    return counted


def own(dtype: torch.dtype) -> Native:
    """The product of our own kernels, whatever target runs."""
    if native.extension is None or not native.extension.supports_linear(native.CODES[dtype], 2):
        pytest.skip(f"no native kernels, or none that multiply {dtype}")
    return Native(dtype)


def test_table_names_its_maker_and_known_routes() -> None:
    table = _linear.table()
    assert table["made_by"].startswith("python benchmarks/linear.py")
    assert table["least_products"] > 0
    assert table["least_side"] > 0
    for name, entry in table["cpus"].items():
        assert entry["measured_on"], name
        for dtype in _linear.DTYPES.values():
            routes = entry.get(dtype, {}).get("routes", [])
            assert all(route in ("native", "onednn") and rows >= 0 for rows, route in routes), (name, dtype)
            assert [rows for rows, _ in routes] == sorted((rows for rows, _ in routes), reverse=True), (name, dtype)
            trained = entry.get(dtype, {}).get("trained", [])
            assert all(route == "native" and dtype == "float32" for _, route in trained), (name, dtype)
            assert "target" in entry or "native" not in [route for _, route in [*routes, *trained]], (name, dtype)


@pytest.mark.parametrize("bias", [True, False])
def test_same_numbers_by_either_route(preferred: list[int], bias: bool) -> None:
    layer = Linear(WIDTH, OUT, bias=bias)
    x = torch.randn(2, ROWS, WIDTH)
    with torch.inference_mode():
        out = layer(x)
    assert len(preferred) == 1
    exact = F.linear(x.double(), layer.weight.double(), None if layer.bias is None else layer.bias.double())
    plain = (F.linear(x, layer.weight, layer.bias).double() - exact).abs().max()
    assert (out.double() - exact).abs().max() <= 2 * plain + 1e-7


def test_gradients_are_never_lost(preferred: list[int]) -> None:
    layer = Linear(WIDTH, OUT)
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    layer(x).sum().backward()
    assert not preferred
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(ROWS, -1))


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A CPU for which the table prefers our own product in training; the list grows by one for each of its products."""
    product, made = own(torch.float32), []
    monkeypatch.setattr(_product, "multiply", counting(_product.multiply, made))
    monkeypatch.setattr(
        _linear, "trained_routes", lambda dtype: ((0, product.trained),) if dtype is torch.float32 else ()
    )
    monkeypatch.setattr(_linear, "fits", lambda x, weight, bias: True)
    return made


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("batch", "width", "outs"), [((), 5, 3), ((1,), 1, 1), ((2, 7), 34, 5), ((129,), 130, 97), ((3, 401), 65, 200)]
)
def test_gradients_by_our_own_product(
    training: list[int], batch: tuple[int, ...], width: int, outs: int, bias: bool
) -> None:
    """As exact as torch's, and the same twice, with more rows than are added up at once and sizes that leave a rest."""
    layer = Linear(width, outs, bias=bias)
    x, grad = torch.randn(*batch, width, requires_grad=True), torch.randn(*batch, outs)
    wanted = [x, *layer.parameters()]
    found, again = ((out.detach(), *torch.autograd.grad(out, wanted, grad)) for out in (layer(x), layer(x)))
    assert len(training) == 6
    plain = F.linear(x, layer.weight, layer.bias)
    theirs = (plain, *torch.autograd.grad(plain, wanted, grad))
    doubles = [leaf.detach().double().requires_grad_() for leaf in wanted]
    out = F.linear(*doubles)
    exact = (out, *torch.autograd.grad(out, doubles, grad.double()))
    for mine, same, right, other in zip(found, again, exact, theirs, strict=True):
        assert mine.shape == other.shape
        assert_as_accurate(mine, right.detach(), other.detach())
        torch.testing.assert_close(mine, same, rtol=0, atol=0)


def test_only_gradients_that_are_wanted_are_made(training: list[int]) -> None:
    layer, x = Linear(WIDTH, OUT), torch.randn(ROWS, WIDTH)
    layer(x).sum().backward()
    assert len(training) == 2
    assert layer.weight.grad is not None
    assert layer.weight.grad.is_contiguous()
    negated = torch._neg_view(torch.ones(ROWS, OUT))
    (by_torch,) = torch.autograd.grad(layer(x), layer.weight, negated)
    assert by_torch.is_contiguous()
    torch.testing.assert_close(by_torch, -layer.weight.grad)
    assert len(training) == 3
    layer.requires_grad_(False)
    layer(x.requires_grad_()).sum().backward()
    assert len(training) == 5
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(ROWS, -1))


def test_second_derivatives_are_torchs(training: list[int]) -> None:
    layer, x = Linear(WIDTH, OUT), torch.randn(ROWS, WIDTH, requires_grad=True)
    wanted = [x, layer.weight, layer.bias]

    def penalty(out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
        return torch.autograd.grad(sum(each.square().sum() for each in first), wanted)

    for mine, theirs in zip(penalty(layer(x)), penalty(F.linear(*wanted)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3 * float(theirs.abs().max()))


def test_many_gradients_at_once_and_what_hooks_give_back(training: list[int]) -> None:
    layer, x = Linear(WIDTH, OUT), torch.randn(ROWS, WIDTH, requires_grad=True)
    many = torch.randn(3, ROWS, OUT)
    found = torch.autograd.grad(layer(x), [x, layer.weight], many, is_grads_batched=True)
    for n in range(3):
        for mine, theirs in zip(found, torch.autograd.grad(layer(x), [x, layer.weight], many[n]), strict=True):
            torch.testing.assert_close(mine[n], theirs, rtol=1e-4, atol=1e-4)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.t().contiguous(), lambda t: t.t()):
        out = layer(x)
    found = torch.autograd.grad(out, [x, layer.weight], many[0])
    for mine, theirs in zip(found, torch.autograd.grad(layer(x), [x, layer.weight], many[0]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def test_saved_is_what_torch_saves(training: list[int]) -> None:
    """As many, of the same sizes, and only where something needs them: frozen layers keep nothing alive."""

    def saved(layer: nn.Linear, x: torch.Tensor) -> list[tuple[torch.Size, tuple[int, ...]]]:
        kept: list[tuple[torch.Size, tuple[int, ...]]] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t.shape, t.stride())) or t, lambda t: t):
            layer(x)
        return kept

    for frozen in ((), ("weight",), ("bias",), ("weight", "bias")):
        for needs in (True, False):
            for bias in (True, False):
                ours, theirs = Linear(WIDTH, OUT, bias=bias), nn.Linear(WIDTH, OUT, bias=bias)
                for layer in (ours, theirs):
                    for name, parameter in layer.named_parameters():
                        parameter.requires_grad_(name not in frozen)
                x = torch.randn(2, ROWS, WIDTH, requires_grad=needs)
                assert saved(ours, x) == saved(theirs, x), (frozen, needs, bias)
    assert training


def test_what_changes_before_the_backward_pass(training: list[int]) -> None:
    """What torch forbids raises, and what it does not is the same."""
    layer, x = Linear(WIDTH, OUT), torch.randn(ROWS, WIDTH, requires_grad=True)
    wanted = F.linear(x, layer.weight).sum()
    out = layer(x)
    layer.weight.data = 2 * layer.weight.data
    found = torch.autograd.grad(out.sum(), [x])
    torch.testing.assert_close(found, torch.autograd.grad(wanted, [x]))
    for change in (layer.weight, layer.bias):
        out = layer(x)
        with torch.no_grad():
            change.mul_(2)
        if change is layer.weight:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
        else:
            out.sum().backward()
    layer.requires_grad_(False)
    hidden = x * 1
    out = layer(hidden)
    hidden.add_(1)
    out.sum().backward()
    assert training


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_does_not_lie_in_memory_as_it_says_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    product, made = own(torch.float32), []
    monkeypatch.setattr(_product, "multiply", counting(_product.multiply, made))
    monkeypatch.setattr(_linear, "trained_routes", lambda dtype: ((0, product.trained),))
    monkeypatch.setattr(_linear, "routes", lambda dtype: ((0, product),))
    layer, x = Linear(WIDTH, OUT), torch.randn(ROWS, WIDTH, requires_grad=True)
    assert layer(x).shape == (ROWS, OUT)
    assert len(made) == 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t[:4]):
        out = layer(x)
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        out.sum().backward()
    made.clear()
    zeros = torch.autograd.grad(layer(x), [x, layer.weight], torch._efficientzerotensor((ROWS, OUT)))
    assert all(not each.any() for each in zeros)
    assert len(made) == 1, "the forward pass"
    made.clear()
    freed, short, other = Linear(WIDTH, OUT), Linear(WIDTH, OUT), Linear(WIDTH, OUT)
    freed.weight.untyped_storage().resize_(0)
    short.bias = nn.Parameter(torch.ones(5))
    other.bias = nn.Parameter(torch.ones(OUT, device="meta"))
    for broken in (freed, short, other):
        with pytest.raises(RuntimeError):
            broken(x)
    short.bias = nn.Parameter(torch.ones(1))
    torch.testing.assert_close(short(x), F.linear(x, short.weight) + 1)
    nested = torch.nested.nested_tensor([x.detach(), x.detach()])
    torch.testing.assert_close(layer(nested)[0], layer(x))
    assert len(made) == 1, "that of an ordinary input"


def test_narrow_layers_are_torchs() -> None:
    side = _linear.table()["least_side"]
    rows = 2 + _linear.table()["least_products"] // side**2
    for width, outs, fits in ((side, side, True), (side - 1, 2 * side, False), (2 * side, side - 1, False)):
        layer = Linear(width, outs)
        assert _linear.fits(torch.randn(rows, width), layer.weight, layer.bias) == fits


def test_a_training_module_is_the_same(training: list[int]) -> None:
    """Under checkpointing and torch.func, too."""
    module, x = headscope.MultiHeadAttention(64, 4), torch.randn(2, 33, 64, requires_grad=True)
    names = list(dict(module.named_parameters()))
    wanted = [x, *module.parameters()]
    found = torch.autograd.grad(module(x).square().sum(), wanted)
    assert len(training) == 6
    kept = torch.autograd.grad(checkpoint(module, x, use_reentrant=False).square().sum(), wanted)

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(module, parameters, (x,)).square().sum()

    with FlopCounterMode(display=False):  # by torch's product, as it wants to see operators
        out = checkpoint(module, x, use_reentrant=False)
    found_outside = torch.autograd.grad(out.square().sum(), wanted)
    for mine, again in zip(found, found_outside, strict=True):
        torch.testing.assert_close(mine, again, rtol=1e-4, atol=1e-4)
    before = len(training)
    of_func = torch.func.grad(loss)(dict(module.named_parameters()), x)
    assert len(training) == before
    for name, mine, again in zip(["x", *names], found, kept, strict=True):
        torch.testing.assert_close(mine, again, rtol=0, atol=0, msg=name)
        if name != "x":
            torch.testing.assert_close(mine, of_func[name], rtol=1e-4, atol=1e-4, msg=name)


def test_what_the_table_does_not_speak_of_goes_to_torch(preferred: list[int]) -> None:
    layer = Linear(WIDTH, OUT)
    x = torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        for other in (x[:3], x[:, ::1].t().contiguous().t(), x.double()):
            wanted = F.linear(other, layer.weight.to(other.dtype), layer.bias.to(other.dtype))
            torch.testing.assert_close(layer.to(other.dtype)(other), wanted)
        assert layer.to("meta", torch.float32)(x.to("meta")).shape == (ROWS, OUT)
    assert not preferred


@pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's, of its own rules for tangents
def test_tangents_are_never_lost(preferred: list[int]) -> None:
    layer, x, tangent = Linear(WIDTH, OUT), torch.randn(1, ROWS, WIDTH), torch.randn(1, ROWS, WIDTH)
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        found = forward_ad.unpack_dual(layer(dual)).tangent
        with pytest.raises(RuntimeError, match="this backend does not support forward-mode gradients"):
            headscope.MultiHeadAttention(WIDTH, 4)(dual)
    assert not preferred
    torch.testing.assert_close(found, F.linear(tangent, layer.weight))


def test_the_route_does_not_depend_on_where_it_is_first_asked_for() -> None:
    if _linear.onednn() is None:
        pytest.skip("this torch has no oneDNN product")
    layer, x = Linear(WIDTH, OUT), torch.randn(ROWS, WIDTH)
    with torch.device("meta"):
        assert _linear.onednn.__wrapped__() is not None
    torch.set_default_dtype(torch.float64)
    try:
        assert _linear.onednn.__wrapped__() is not None
    finally:
        torch.set_default_dtype(torch.float32)
    _linear.onednn.cache_clear()
    _linear.routes.cache_clear()
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        assert layer(mode.from_tensor(x)).shape == (ROWS, OUT)
    assert _linear.onednn() is not None


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dynamic_quantization_takes_what_is_exactly_torchs() -> None:
    module = nn.Sequential(headscope.MultiHeadAttention(WIDTH, 4)).eval()
    x = torch.randn(1, ROWS, WIDTH)
    wanted = module(x)
    for part in module.modules():
        if type(part) is Linear:
            part.__class__ = nn.Linear
    smaller = torch.ao.quantization.quantize_dynamic(module)
    assert not isinstance(smaller[0].qkv_proj, nn.Linear)
    torch.testing.assert_close(smaller(x), wanted, rtol=0, atol=0.1)


@pytest.mark.filterwarnings("ignore:TF32 acceleration:UserWarning")  # torch's, of what flags() sets beside
def test_onednn_switched_off_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    product, x, weight = _linear.onednn(), torch.randn(ROWS, WIDTH), torch.randn(OUT, WIDTH)
    if product is None:
        pytest.skip("this torch has no oneDNN product")
    made: list[int] = []
    monkeypatch.setattr(_linear.F, "linear", counting(F.linear, made))
    with torch.no_grad():
        product(x, weight, None)
        assert not made
        with torch.backends.mkldnn.flags(enabled=False):
            product(x, weight, None)
    assert made


def test_wrong_width_is_torchs_error(preferred: list[int]) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be multiplied"):
        Linear(WIDTH, OUT)(torch.randn(ROWS, WIDTH + 1))
    assert not preferred


def test_absent_operator_leaves_torchs_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert _linear.onednn.__wrapped__() is None


def test_routes_follow_vendor_family_and_target(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"routes": [[100, "native"], [0, "onednn"]]}
    cpus = {"Maker": {"float32": {"routes": [[0, "onednn"]]}}, "Maker 7": {"target": "here", "float32": said}}
    monkeypatch.setattr(_linear, "table", lambda: {"cpus": cpus, "least_products": 1, "least_side": 1})
    monkeypatch.setattr(_linear, "vendor", lambda: "Maker")
    monkeypatch.setattr(_linear, "native_product", _linear.native_product.__wrapped__)
    there = _linear.onednn()

    def routes(family: str, dtype: torch.dtype = torch.float32) -> list[tuple[int, str]]:
        monkeypatch.setattr(_linear, "family", lambda: family)
        return [
            (rows, "native" if isinstance(x, Native) else "onednn") for rows, x in _linear.routes.__wrapped__(dtype)
        ]

    onednn = [] if there is None else [(0, "onednn")]
    assert routes("8") == onednn
    assert routes("7") == onednn  # of another target than was measured
    if native.extension is not None:
        cpus["Maker 7"]["target"] = native.extension.target()
        assert routes("7") == [(100, "native"), *onednn]
    assert routes("7", torch.bfloat16) == []
    monkeypatch.setattr(_linear, "vendor", lambda: "NoSuchVendor")
    assert routes("7") == []


def test_few_rows_go_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    many, few = [], []
    ways = ((ROWS, counting(F.linear, many)), (ROWS // 2, counting(F.linear, few)))
    monkeypatch.setattr(_linear, "routes", lambda dtype: ways)
    layer = Linear(1024, 1024)
    with torch.inference_mode():
        layer(torch.randn(ROWS, 1024)), layer(torch.randn(ROWS - 1, 1024)), layer(torch.randn(ROWS // 2 - 1, 1024))
    assert (len(many), len(few)) == (1, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize(
    ("rows", "width", "outs"), [(1, 2, 1), (7, 34, 5), (129, 130, 97), (300, 1030, 48), (257, 64, 1536)]
)
def test_own_product_is_as_exact_as_torchs(dtype: torch.dtype, bias: bool, rows: int, width: int, outs: int) -> None:
    product = own(dtype)
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(outs, width).to(dtype)
    b = torch.randn(outs).to(dtype) if bias else None
    exact = F.linear(x.double(), weight.double(), None if b is None else b.double())
    with torch.no_grad():
        assert_as_accurate(product(x, weight, b), exact, F.linear(x, weight, b))
        first, again = product(x, weight, b), product(x, weight, b)
    torch.testing.assert_close(first, again, rtol=0, atol=0)


def test_own_product_adds_long_rows_in_parts() -> None:
    product = own(torch.float32)
    x, weight = torch.rand(3, 100_000), torch.rand(5, 100_000)
    with torch.no_grad():
        assert_as_accurate(product(x, weight, None), F.linear(x.double(), weight.double()), F.linear(x, weight))


def test_an_odd_width_of_bf16_goes_to_torch() -> None:
    product = own(torch.bfloat16)
    x, weight = torch.randn(9, 33).bfloat16(), torch.randn(7, 33).bfloat16()
    torch.testing.assert_close(product(x, weight, None), F.linear(x, weight), rtol=0, atol=0)


def test_own_product_takes_what_there_is_nothing_of() -> None:
    product = own(torch.float32)
    assert product(torch.randn(2, 3, 8), torch.randn(0, 8), None).shape == (2, 3, 0)
    assert product.heads(torch.randn(2, 0, 8), torch.randn(32, 8), None, 16).shape == (2, 2, 0, 16)
    assert product(torch.randn(3, 0), torch.randn(2, 0), torch.ones(2)).eq(1).all()
    with pytest.raises(ValueError, match="heads of that width"):
        product.heads(torch.randn(3, 8), torch.randn(34, 8), None, 17)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [(), (3,)], ids=["[T, E]", "[B, T, E]"])
def test_heads_lie_together_and_are_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, batch: tuple[int, ...]
) -> None:
    product = own(dtype)
    monkeypatch.setattr(_linear, "routes", lambda _: ((0, product),))
    module = headscope.MultiHeadAttention(160, 5).eval().to(dtype)  # heads of 32
    x = torch.randn(*batch, 331, 160).to(dtype)
    with torch.inference_mode():
        together = module.project(x)
        out = module(x)
        hook = module.qkv_proj.register_forward_hook(lambda *_: None)
        apart, wanted = module.project(x), module(x)
        hook.remove()
    assert all(part.is_contiguous() or len(batch) == 1 for part in together)
    assert not any(part.is_contiguous() for part in apart)
    for one, other in zip(together, apart, strict=True):
        assert one.stride(-2) == 32
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("which", ["hook", "pre_hook"])
def test_hooks_of_all_modules_see_the_projection(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    product = own(torch.float32)
    monkeypatch.setattr(_linear, "routes", lambda _: ((0, product),))
    module, seen = headscope.MultiHeadAttention(WIDTH, 4).eval(), []
    hook = getattr(nn.modules.module, f"register_module_forward_{which}")(lambda m, *_: seen.append(m))
    with torch.inference_mode():
        module(torch.randn(1, ROWS, WIDTH))
    hook.remove()
    assert module.qkv_proj in seen


def test_a_forward_that_was_set_on_the_projection_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    product = own(torch.float32)
    monkeypatch.setattr(_linear, "routes", lambda _: ((0, product),))
    module, x = headscope.MultiHeadAttention(WIDTH, 4).eval(), torch.randn(1, ROWS, WIDTH)
    usual = module.qkv_proj.forward
    monkeypatch.setattr(module.qkv_proj, "forward", lambda x: 2 * usual(x))
    with torch.inference_mode():
        found = module(x)
        monkeypatch.undo()
        module.qkv_proj.weight.mul_(2), module.qkv_proj.bias.mul_(2)
        torch.testing.assert_close(found, module(x))


def test_module_uses_it_and_hooks_still_run(preferred: list[int]) -> None:
    module = headscope.MultiHeadAttention(WIDTH, 4).eval()
    seen: list[torch.Size] = []
    hook = module.qkv_proj.register_forward_hook(lambda _module, _inputs, out: seen.append(out.shape))
    x = torch.randn(1, ROWS, WIDTH)
    wanted = module(x).detach()
    with torch.inference_mode():
        out = module(x)
    hook.remove()
    assert len(preferred) == 2
    assert seen == [torch.Size((1, ROWS, 3 * WIDTH))] * 2
    assert isinstance(module.out_proj, nn.Linear)
    torch.testing.assert_close(out, wanted)

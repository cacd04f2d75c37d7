"""The projections' two routes: the same numbers, chosen by the shipped table; no gradient is lost."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.nn import functional as F

import headscope
from headscope import _linear
from headscope._linear import Linear

ROWS, WIDTH, OUT = 67, 256, 257  # more products than the table's least


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A CPU for which the table prefers oneDNN; the list grows by one for each product that it makes."""
    product = _linear.onednn()
    if product is None:
        pytest.skip("this torch has no oneDNN product")
    made: list[int] = []

    def counted(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        made.append(1)
        return product(x, weight, bias)

    monkeypatch.setattr(_linear, "route", lambda: counted)
    return made


def test_table_names_its_maker_and_known_routes() -> None:
    table = _linear.table()
    assert table["made_by"].startswith("python benchmarks/linear.py")
    assert table["least_products"] > 0
    for vendor, entry in table["vendors"].items():
        assert entry["route"] in ("onednn", "torch"), vendor
        assert entry["measured_on"], vendor
        assert (entry["route"] == "onednn") == (entry["ratio"] >= 1.1), vendor


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
        with pytest.raises(RuntimeError, match="this backend has no gradient in forward mode"):
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
    _linear.route.cache_clear()
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
def test_onednn_switched_off_is_not_used(preferred: list[int]) -> None:
    module, x = Linear(WIDTH, OUT), torch.randn(ROWS, WIDTH)
    with torch.no_grad():
        with torch.backends.mkldnn.flags(enabled=False):
            module(x)
        assert not preferred
        module(x)
        assert preferred


def test_wrong_width_is_torchs_error(preferred: list[int]) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="cannot be multiplied"):
        Linear(WIDTH, OUT)(torch.randn(ROWS, WIDTH + 1))
    assert not preferred


def test_absent_operator_leaves_torchs_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert _linear.onednn.__wrapped__() is None


def test_route_follows_the_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_linear, "vendor", lambda: "NoSuchVendor")
    assert _linear.route.__wrapped__() is None
    monkeypatch.setattr(_linear, "vendor", lambda: "AuthenticAMD")
    assert (_linear.route.__wrapped__() is None) == (_linear.onednn() is None)


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

"""MultiHeadAttention: its numbers against torch's module and the oracle, and all that a module must survive."""

from __future__ import annotations

import copy
import itertools
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm

from headscope import MultiHeadAttention
from headscope._linear import merge_heads, split_heads
from headscope._linear.names_and_heads import QKV
from headscope.masks import Band, KeyLengths, Prefix, causal, window
from support import oracle

B, Q, K, E, H = 2, 5, 7, 12, 3


def module(**said: Any) -> MultiHeadAttention:
    """A module whose biases are not zero, so that they count."""
    made = MultiHeadAttention(E, H, **said)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.normal_()
    return made


def linear(module: MultiHeadAttention, name: str, x: Tensor) -> Tensor:
    """One projection of a module in float64."""
    weight, bias = module.projection(name)
    projected = x.double() @ weight.detach().double().T
    return projected if bias is None else projected + bias.detach().double()


def by_the_oracle(
    module: MultiHeadAttention, x: Tensor, k_from: Tensor | None = None, v_from: Tensor | None = None, **said: Any
) -> tuple[Tensor, Tensor]:
    """out and weights in float64, written out."""
    k_from = x if k_from is None else k_from
    v_from = k_from if v_from is None else v_from
    heads = {"q": (x, H, module.head_dim), "k": (k_from, module.kv_heads, module.head_dim)}
    heads["v"] = (v_from, module.kv_heads, module.v_head_dim)
    q, k, v = (
        torch.stack(linear(module, name, source).split(width, -1), -3)  # [B, H, length, D]
        for name, (source, _, width) in heads.items()
    )
    said = {"scale": module.scale, "softcap": module.softcap, **said}
    sinks = None if module.sinks is None else module.sinks.detach()
    exact = oracle.attention(q, k, v, sinks=sinks, **said)
    return linear(module, "out", torch.cat(exact.out.unbind(-3), -1)), exact.weights


# ---------------------------------------------------------------- against torch's module


def pair(**said: Any) -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    """Ours and torch's, with the same weights; what is said is said to torch's."""
    theirs = nn.MultiheadAttention(E, H, batch_first=True, **said)
    nn.init.normal_(theirs.out_proj.bias) if theirs.out_proj.bias is not None else None
    if theirs.in_proj_bias is not None:
        nn.init.normal_(theirs.in_proj_bias)
    ours = MultiHeadAttention(E, H, kdim=said.get("kdim"), vdim=said.get("vdim", E), bias=said.get("bias", True))
    packed = theirs.in_proj_weight
    weights = packed.chunk(3) if packed is not None else [getattr(theirs, f"{n}_proj_weight") for n in QKV]
    state = {f"{name}_proj.weight": weight for name, weight in zip(QKV, weights, strict=True)}
    if theirs.in_proj_bias is not None:
        state |= {f"{n}_proj.bias": bias for n, bias in zip(QKV, theirs.in_proj_bias.chunk(3), strict=True)}
    state |= {f"out_proj.{name}": value for name, value in theirs.out_proj.state_dict().items()}
    ours.load_state_dict(state)
    return ours, theirs


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_self_attention_is_that_of_torch(bias: bool, mode: str) -> None:
    ours, theirs = pair(bias=bias)
    x = torch.randn(B, Q, E)
    for each in (ours, theirs):
        each.train(mode == "train")
    out, weights = ours(x, need_weights=True)
    wanted, their_weights = theirs(x, x, x, need_weights=True, average_attn_weights=False)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(weights, their_weights)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0])


def test_masks_are_those_of_torch_turned_round() -> None:
    """True means attend here, and hide there."""
    ours, theirs = pair()
    x = torch.randn(B, Q, E)
    hidden = torch.rand(Q, Q) < 0.4
    hidden[torch.arange(Q), torch.arange(Q)] = False
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    wanted = theirs(x, x, x, attn_mask=hidden)[0]
    torch.testing.assert_close(ours(x, mask=~hidden), wanted)
    assert not torch.allclose(ours(x, mask=hidden), wanted), "the polarity matters"
    wanted = theirs(x, x, x, key_padding_mask=padding)[0]
    torch.testing.assert_close(ours(x, mask=~padding[:, None, None]), wanted)
    torch.testing.assert_close(ours(x, mask=KeyLengths(torch.tensor([5, 3]))), wanted)
    upper = nn.Transformer.generate_square_subsequent_mask(Q)
    wanted = theirs(x, x, x, attn_mask=upper, is_causal=True)[0]
    torch.testing.assert_close(ours(x, mask=causal()), wanted)
    torch.testing.assert_close(ours(x, bias=upper), wanted)
    each = torch.rand(B * H, Q, Q) < 0.3
    each[:, torch.arange(Q), torch.arange(Q)] = False
    torch.testing.assert_close(ours(x, mask=~each.view(B, H, Q, Q)), theirs(x, x, x, attn_mask=each)[0])


@pytest.mark.parametrize(("kdim", "vdim"), [(E, E), (10, 10), (10, 7), (E, 7)])
def test_cross_attention_is_that_of_torch(kdim: int, vdim: int) -> None:
    ours, theirs = pair(kdim=kdim, vdim=vdim)
    x, k_from, v_from = torch.randn(B, Q, E), torch.randn(B, K, kdim), torch.randn(B, K, vdim)
    wanted, weights = theirs(x, k_from, v_from, average_attn_weights=False)
    out, got = ours(x, (k_from, v_from), need_weights=True)
    torch.testing.assert_close((out, got), (wanted, weights))
    if kdim == vdim:
        torch.testing.assert_close(ours(x, k_from), theirs(x, k_from, k_from)[0])


def test_gradients_are_those_of_torch() -> None:
    ours, theirs = pair()
    x = torch.randn(B, Q, E, requires_grad=True)
    mask = torch.ones(Q, Q, dtype=torch.bool).tril()
    along = torch.randn(B, Q, E)
    got = torch.autograd.grad((ours(x, mask=causal()) * along).sum(), [x, ours.qkv_proj.weight, ours.qkv_proj.bias])
    out = theirs(x, x, x, attn_mask=~mask)[0]
    wanted = torch.autograd.grad((out * along).sum(), [x, theirs.in_proj_weight, theirs.in_proj_bias])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- against the oracle


VARIANTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "grouped": {"kv_heads": 1},
    "head_dim": {"head_dim": 5},
    "v_head_dim": {"v_head_dim": 7},
    "both": {"head_dim": 3, "v_head_dim": 2, "kv_heads": 1},
    "no bias": {"bias": False},
    "some biases": {"bias": ("q", "v")},
    "out_bias alone": {"bias": False, "out_bias": True},
    "no out_bias": {"out_bias": False},
    "scale": {"scale": E**-0.5},
    "softcap": {"softcap": 1.5},
    "sinks": {"sinks": True},
    "kdim": {"kdim": 10},
    "vdim": {"vdim": 10},
    "kdim, vdim": {"kdim": 10, "vdim": 8, "bias": ("k",)},
    "everything": {"head_dim": 5, "v_head_dim": 3, "kv_heads": 1, "sinks": True, "softcap": 2.0, "bias": ("q",)},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str) -> None:
    ours = module(**VARIANTS[name])
    x, k_from, v_from = torch.randn(B, Q, E), torch.randn(B, K, ours.kdim), torch.randn(B, K, ours.vdim)
    seen = torch.rand(B, 1, Q, K) < 0.7
    bias = torch.randn(H, 1, K)
    out, weights = ours(x, (k_from, v_from), mask=seen, bias=bias, need_weights=True)
    exact, exact_weights = by_the_oracle(ours, x, k_from, v_from, seen=seen.expand(B, H, Q, K), bias=bias)
    torch.testing.assert_close((out, weights), (exact.float(), exact_weights.float()), rtol=1e-4, atol=1e-5)
    if ours.kdim == ours.vdim == E:
        torch.testing.assert_close(ours(x), by_the_oracle(ours, x)[0].float(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(ours(x, x), ours(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["usual", "both", "kdim"])
def test_without_a_batch(name: str) -> None:
    ours = module(**VARIANTS[name])
    x, context = torch.randn(B, Q, E), torch.randn(B, K, ours.kdim)
    wanted, wanted_weights = ours(x, context, mask=Prefix(4), need_weights=True)
    for b in range(B):
        out, weights = ours(x[b], context[b], mask=Prefix(4), need_weights=True)
        torch.testing.assert_close((out, weights), (wanted[b], wanted_weights[b]))


def test_one_context_for_a_whole_batch() -> None:
    ours = module()
    x, context = torch.randn(B, Q, E), torch.randn(1, K, E)
    torch.testing.assert_close(ours(x, context), ours(x, context.expand(B, -1, -1)))


@pytest.mark.parametrize("name", ["usual", "both", "kdim, vdim", "sinks"])
def test_the_sizes_of_its_parameters(name: str) -> None:
    ours = MultiHeadAttention(E, H, **VARIANTS[name])
    rows = {"q": H * ours.head_dim, "k": ours.kv_heads * ours.head_dim, "v": ours.kv_heads * ours.v_head_dim}
    widths = {"q": E, "k": ours.kdim, "v": ours.vdim}
    for each in QKV:
        weight, _ = ours.projection(each)
        assert weight.shape == (rows[each], widths[each])
    assert ours.projection("out")[0].shape == (E, H * ours.v_head_dim)
    with pytest.raises(ValueError, match="name: got 'z', expected q, k, v or out"):
        ours.projection("z")
    assert ours.packed == (ours.kdim == ours.vdim == E)


@pytest.mark.parametrize(
    ("bias", "names"),
    [
        (True, {"qkv", "out"}),
        (False, set()),
        (("q", "k", "v"), {"qkv", "out"}),
        (("q", "v"), {"q", "v", "out"}),
        (["k"], {"k", "out"}),
        ((), set()),
    ],
)
def test_which_projections_have_a_bias(bias: Any, names: set[str]) -> None:
    state = MultiHeadAttention(E, H, bias=bias).state_dict()
    assert {key.removesuffix("_proj.bias") for key in state if key.endswith(".bias")} == names
    assert ("out_proj.bias" in MultiHeadAttention(E, H, bias=bias, out_bias=True).state_dict()) is True
    assert ("out_proj.bias" in MultiHeadAttention(E, H, bias=bias, out_bias=False).state_dict()) is False


def test_starts_as_each_projection_by_itself() -> None:
    torch.manual_seed(0)
    ours = MultiHeadAttention(64, 8, kv_heads=2, sinks=True)
    for name in (*QKV, "out"):
        weight, bias = ours.projection(name)
        bound = (6 / sum(weight.shape)) ** 0.5
        assert 0.95 * bound < weight.detach().abs().max() <= bound, name
        assert bias is not None
        assert not bias.any(), name
    assert ours.sinks is not None
    assert not ours.sinks.any()
    before = ours.qkv_proj.weight.detach().clone()
    ours.reset_parameters()
    assert not torch.equal(ours.qkv_proj.weight, before)


def test_split_and_merge_are_inverse() -> None:
    x = torch.randn(2, 3, 35)
    heads = split_heads(x, 5, 7)
    assert heads.shape == (2, 5, 3, 7)
    torch.testing.assert_close(heads[1, 4, 2], x[1, 2, 28:35], rtol=0, atol=0)
    torch.testing.assert_close(merge_heads(heads), x, rtol=0, atol=0)
    torch.testing.assert_close(split_heads(x[0], 5, 7), heads[0], rtol=0, atol=0)


# ---------------------------------------------------------------- weights and dropout


@pytest.mark.parametrize("name", ["usual", "everything"])
@pytest.mark.parametrize("mask", [None, causal(), KeyLengths(torch.tensor([3, 0]))], ids=["all", "causal", "lengths"])
def test_need_weights_leaves_the_output_as_it_is(name: str, mask: Any) -> None:
    ours = module(**VARIANTS[name])
    x = torch.randn(B, Q, E, requires_grad=True)
    out = ours(x, mask=mask)
    with_weights, weights = ours(x, mask=mask, need_weights=True)
    torch.testing.assert_close(with_weights, out, rtol=0, atol=0)
    gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (out, with_weights)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)
    assert weights.shape == (B, H, Q, Q)
    with torch.no_grad():
        torch.testing.assert_close(ours(x, mask=mask, need_weights=True)[0], ours(x, mask=mask), rtol=0, atol=0)


def test_weights_are_differentiable() -> None:
    ours, x = module(), torch.randn(B, Q, E, requires_grad=True)
    _, weights = ours(x, need_weights=True)
    (gradient,) = torch.autograd.grad(weights[0, 1, 2, 3], x)
    assert gradient[0].any()
    assert not gradient[1].any()


def test_dropout_is_for_training() -> None:
    ours, x = module(dropout=0.5), torch.randn(B, Q, E)
    usual = module()
    usual.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours.eval()(x), usual(x), rtol=0, atol=0)
    ours.train()
    first, second = ours(x), ours(x)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    seeded = ours(x)
    torch.manual_seed(3)
    with_weights, weights = ours(x, need_weights=True)
    torch.testing.assert_close(with_weights, seeded, rtol=0, atol=0)
    torch.testing.assert_close(weights.sum(-1), torch.ones(B, H, Q), msg="the weights are those without dropout")


# ---------------------------------------------------------------- state


def separate(ours: MultiHeadAttention) -> dict[str, Tensor]:
    """The state of a packed module in separate projections."""
    state = {name: x for name, x in ours.state_dict().items() if not name.startswith("qkv_proj")}
    for name in QKV:
        weight, bias = ours.projection(name)
        state[f"{name}_proj.weight"] = weight.detach()
        if bias is not None:
            state[f"{name}_proj.bias"] = bias.detach()
    return state


@pytest.mark.parametrize("name", VARIANTS)
def test_state_survives_safetensors(name: str, tmp_path: Path) -> None:
    ours = module(**VARIANTS[name])
    save_file(ours.state_dict(), tmp_path / "weights.safetensors")
    fresh = MultiHeadAttention(E, H, **VARIANTS[name])
    fresh.load_state_dict(load_file(tmp_path / "weights.safetensors"))
    x, context = torch.randn(B, Q, E), (torch.randn(B, K, ours.kdim), torch.randn(B, K, ours.vdim))
    torch.testing.assert_close(fresh(x, context), ours(x, context), rtol=0, atol=0)
    assert list(fresh.state_dict()) == list(ours.state_dict())


@pytest.mark.parametrize("name", ["usual", "no bias", "both", "sinks", "no out_bias"])
@pytest.mark.parametrize("assign", [False, True])
def test_a_packed_module_takes_separate_projections(name: str, assign: bool) -> None:
    ours, fresh = module(**VARIANTS[name]), MultiHeadAttention(E, H, **VARIANTS[name])
    state = separate(ours)
    before = list(state)
    fresh.load_state_dict(state, assign=assign)
    assert list(state) == before, "the caller's dictionary was changed"
    for key, value in ours.state_dict().items():
        torch.testing.assert_close(fresh.state_dict()[key], value, rtol=0, atol=0, msg=key)


def test_a_projection_without_a_tensor_for_a_weight_says_so() -> None:
    class Quantized(nn.Module):
        def weight(self) -> None: ...

        bias = weight

    module = MultiHeadAttention(8, 2)
    module.qkv_proj = Quantized()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match=r"qkv_proj: expected .*, got Quantized, whose weight is not a tensor"):
        module.projection("k")


def test_a_separate_module_takes_a_packed_projection() -> None:
    ours = module(bias=False, out_bias=True)
    fresh = MultiHeadAttention(E, H, bias=("q", "v"))
    missing, unexpected = fresh.load_state_dict(ours.state_dict(), strict=False)
    assert (missing, unexpected) == (["q_proj.bias", "v_proj.bias"], [])
    for name in (*QKV, "out"):
        torch.testing.assert_close(fresh.projection(name)[0], ours.projection(name)[0], rtol=0, atol=0)
    fewer = MultiHeadAttention(E, H, kv_heads=1, bias=("q", "v"))
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "qkv_proj.weight"'):
        fewer.load_state_dict(ours.state_dict())


def test_nested_in_another_module() -> None:
    ours = nn.ModuleDict({"attention": module()})
    fresh = nn.ModuleDict({"attention": MultiHeadAttention(E, H)})
    inner = ours["attention"]
    assert isinstance(inner, MultiHeadAttention)
    fresh.load_state_dict({f"attention.{name}": value for name, value in separate(inner).items()})
    x = torch.randn(B, Q, E)
    torch.testing.assert_close(fresh["attention"](x), inner(x), rtol=0, atol=0)


def test_projections_that_do_not_fit_are_an_error() -> None:
    """Not a packed matrix put together from the wrong parts, even where their rows add up."""
    other = separate(MultiHeadAttention(E, H, kv_heads=1, head_dim=4, v_head_dim=16))
    assert sum(len(x) for name, x in other.items() if name.endswith("weight") and "out" not in name) == 32
    fresh = MultiHeadAttention(E, H, head_dim=4, v_head_dim=4)
    with pytest.raises(RuntimeError, match=r"Missing key.*qkv_proj\.weight"):
        fresh.load_state_dict(other)
    with pytest.raises(RuntimeError, match=r"Missing key.*qkv_proj\.weight"):
        fresh.load_state_dict(
            separate(MultiHeadAttention(E, H, kdim=E, vdim=E)) | {"v_proj.weight": torch.zeros(12, 5)}
        )
    rows = {"q_proj.weight": torch.zeros(20, E), "k_proj.weight": torch.zeros(8, E), "v_proj.weight": torch.zeros(8, E)}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*q_proj\.weight"):
        MultiHeadAttention(E, H, bias=False).load_state_dict(rows)
    with pytest.raises(RuntimeError, match=r"size mismatch for qkv_proj\.weight"):
        MultiHeadAttention(E, H).load_state_dict(MultiHeadAttention(E, H, head_dim=5).state_dict())


def test_a_part_of_a_state_is_missing() -> None:
    state = separate(module())
    del state["k_proj.weight"]
    with pytest.raises(RuntimeError, match=r"qkv_proj\.weight"):
        MultiHeadAttention(E, H).load_state_dict(state)


# ---------------------------------------------------------------- what a module must survive


@pytest.mark.parametrize("name", ["usual", "kdim", "everything"])
def test_copies(name: str) -> None:
    ours = module(**VARIANTS[name])
    x, context = torch.randn(B, Q, E), (torch.randn(B, K, ours.kdim), torch.randn(B, K, ours.vdim))
    wanted = ours(x, context, mask=window(3))
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        torch.testing.assert_close(copied(x, context, mask=window(3)), wanted, rtol=0, atol=0)
        with torch.no_grad():
            copied.out_proj.weight.zero_()
        assert ours.out_proj.weight.any(), "a copy shares its weights"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_another_dtype(dtype: torch.dtype) -> None:
    ours = module(sinks=True)
    x = torch.randn(B, Q, E)
    converted = copy.deepcopy(ours).to(dtype)
    out, weights = converted(x.to(dtype), mask=causal(), need_weights=True)
    assert (out.dtype, weights.dtype) == (dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(out.float(), ours(x, mask=causal()), rtol=0.1, atol=0.1)
    assert all(parameter.dtype == dtype for parameter in MultiHeadAttention(E, H, dtype=dtype).parameters())


def test_under_autocast() -> None:
    ours, x = module(), torch.randn(B, Q, E, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, weights = ours(x, mask=window(3), need_weights=True)
    assert (out.dtype, weights.dtype) == (torch.bfloat16, torch.float32)
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), ours(x, mask=window(3)), rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", ["usual", "kdim", "everything"])
def test_meta(name: str) -> None:
    ours = MultiHeadAttention(E, H, **VARIANTS[name], device="meta")
    assert all(parameter.is_meta for parameter in ours.parameters())
    x = torch.empty(B, Q, E, device="meta")
    context = torch.empty(B, K, ours.kdim, device="meta"), torch.empty(B, K, ours.vdim, device="meta")
    out, weights = ours(x, context, mask=causal(), need_weights=True)
    assert (out.shape, weights.shape) == ((B, Q, E), (B, H, Q, K))
    ours.to_empty(device="cpu").reset_parameters()
    here = torch.randn(B, Q, E), (torch.randn(B, K, ours.kdim), torch.randn(B, K, ours.vdim))
    assert ours(*here).isfinite().all()


def test_with_torch_device() -> None:
    with torch.device("meta"):
        assert MultiHeadAttention(E, H).out_proj.weight.is_meta


@pytest.mark.parametrize("name", [pytest.param("usual", marks=pytest.mark.long), "everything"])
@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not:DeprecationWarning"
)  # torch's
def test_compiles_without_a_break(name: str) -> None:
    """Also for a second length, for which torch makes the lengths symbols."""
    torch.compiler.reset()
    ours = module(**VARIANTS[name])
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for length, mask in ((5, causal()), (6, causal())):
        x, context = torch.randn(B, length, E), torch.randn(B, length, ours.kdim)
        given = (x,) if ours.packed else (x, context)
        torch.testing.assert_close(compiled(*given, mask=mask), ours(*given, mask=mask), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not:DeprecationWarning"
)  # torch's
def test_gradients_of_a_compiled_module() -> None:
    torch.compiler.reset()
    ours, x = module(kv_heads=1), torch.randn(B, Q, E)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    for mask in (None, window(2), KeyLengths(torch.tensor([4, 0]))):
        wanted = torch.autograd.grad(ours(x, mask=mask).square().sum(), list(ours.parameters()))
        got = torch.autograd.grad(compiled(x, mask=mask).square().sum(), list(ours.parameters()))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.long  # half a minute of compiling
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's
@pytest.mark.parametrize("name", ["usual", "everything"])
def test_compiles_to_machine_code(name: str) -> None:
    torch.compiler.reset()
    ours = module(**VARIANTS[name])
    compiled = torch.compile(ours, fullgraph=True)
    for length in (5, 6):
        x = torch.randn(B, length, E, requires_grad=True)
        out, wanted = compiled(x, mask=window(3)), ours(x, mask=window(3))
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)
        gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (out, wanted)]
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-3)


def test_checkpointing_repeats_dropout() -> None:
    from torch.utils.checkpoint import checkpoint

    ours = module(dropout=0.4)
    gradients = []
    for kept in (True, False):
        x = torch.ones(B, Q, E).cumsum(1).requires_grad_()
        torch.manual_seed(5)
        out = ours(x, mask=causal()) if kept else checkpoint(ours, x, mask=causal(), use_reentrant=False)
        assert isinstance(out, Tensor)
        out.sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)


def test_hooks_on_its_projections_run() -> None:
    ours, seen = module(), []
    for name, part in ours.named_modules():
        part.register_forward_hook(lambda *_, name=name: seen.append(name))
    ours(torch.randn(B, Q, E))
    assert seen == ["qkv_proj", "out_proj", ""]
    apart, seen = module(kdim=7), []
    for name, part in apart.named_modules():
        part.register_forward_hook(lambda *_, name=name: seen.append(name))
    apart(torch.randn(B, Q, E), torch.randn(B, K, 7))
    assert seen == ["q_proj", "k_proj", "v_proj", "out_proj", ""]


class Wrapped(nn.Module):
    """A linear with something added to it, as LoRA does; it still shows the weight of what it wraps."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.more = base, nn.Linear(base.in_features, base.out_features)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.more(x)


@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_what_takes_the_place_of_a_projection_is_called(cross: bool) -> None:
    ours, x = module(bias=("q", "v")), torch.randn(B, Q, E)
    given = (x, torch.randn(B, K, E)) if cross else (x,)
    added = copy.deepcopy(ours)
    for name in QKV:
        wrapped = Wrapped(getattr(ours, f"{name}_proj"))
        setattr(ours, f"{name}_proj", wrapped)
        both = nn.Linear(E, E)
        with torch.no_grad():
            both.weight.copy_(wrapped.weight + wrapped.more.weight)
            both.bias.copy_(wrapped.more.bias if wrapped.bias is None else wrapped.bias + wrapped.more.bias)  # pyright: ignore[reportUnnecessaryComparison]
        setattr(added, f"{name}_proj", both)
    torch.testing.assert_close(ours(*given), added(*given), rtol=1e-4, atol=1e-5)


def test_separate_projections_may_be_pruned_and_trained() -> None:
    ours, x = module(bias=("q", "v")), torch.randn(B, Q, E)
    for name in QKV:
        prune.random_unstructured(getattr(ours, f"{name}_proj"), "weight", 0.5)
    for _ in range(2):  # the masked weight is made anew
        ours(x, x + 1).sum().backward()
    assert ours.q_proj.weight_orig.grad is not None
    with torch.no_grad():
        ours.q_proj.weight_orig.zero_()
        ours.q_proj.bias.zero_()
        weights = ours(x, need_weights=True)[1]
    torch.testing.assert_close(weights, torch.full((B, H, Q, Q), 1 / Q))


def test_cross_attention_passes_nothing_by() -> None:
    x = torch.randn(B, Q, E)

    def refused(change: Any, message: str) -> None:
        ours = module()
        change(ours)
        ours(x)
        with pytest.raises(ValueError, match=f"^qkv_proj: {message}, which cross-attention would skip.*separate"):
            ours(x, x + 1)

    refused(lambda ours: setattr(ours, "qkv_proj", Wrapped(ours.qkv_proj)), "is a Wrapped")
    refused(lambda ours: ours.qkv_proj.register_forward_hook(lambda *_: None), "has hooks")
    refused(lambda ours: prune.random_unstructured(ours.qkv_proj, "weight", 0.5), "has hooks")
    refused(lambda ours: setattr(ours.qkv_proj, "forward", ours.qkv_proj.forward), "has hooks")
    ours = module()
    expected = ours(x, x + 1)
    weight_norm(ours.qkv_proj)  # a parametrization: its weight is right wherever it is read
    torch.testing.assert_close(ours(x, x + 1), expected)


@pytest.mark.parametrize("name", ["usual", "kdim"])
def test_another_dtype_or_device_is_named(name: str) -> None:
    ours = module(**VARIANTS[name])
    x, context = torch.randn(B, Q, E), (torch.randn(B, K, ours.kdim), torch.randn(B, K, ours.vdim))
    for wrong, error, message in (
        (torch.Tensor.double, TypeError, "dtype is float64, the module has float32"),
        (torch.Tensor.half, TypeError, "dtype is float16, the module has float32"),
        (torch.Tensor.long, TypeError, "dtype is int64, the module has float32"),
        (lambda x: x.to("meta"), ValueError, "is on meta, the module on cpu"),
    ):
        with pytest.raises(error, match=f"^x: {message}"):
            ours(wrong(x), context)
        with pytest.raises(error, match=f"^context: {message}"):
            ours(x, (context[0], wrong(context[1])))
        if ours.packed:
            with pytest.raises(error, match=f"^x: {message}"):
                ours(wrong(x))
    with pytest.raises(TypeError, match=r"^x: dtype is float64, the module has float32"):
        copy.deepcopy(ours).to("meta")(x.double().to("meta"), tuple(each.to("meta") for each in context))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ours(x.bfloat16(), context).dtype == torch.bfloat16


def test_empty_sequences_and_batches() -> None:
    ours = module()
    assert ours(torch.randn(B, 0, E)).shape == (B, 0, E)
    assert ours(torch.randn(0, Q, E)).shape == (0, Q, E)
    nothing = ours(torch.randn(B, Q, E), torch.randn(B, 0, E))
    torch.testing.assert_close(nothing, ours.out_proj.bias.expand(B, Q, E))


def test_a_cache_of_fixed_size() -> None:
    """One query at a time against keys that fill up: as the whole at once."""
    ours = module().eval()
    x = torch.randn(B, K, E)
    whole = ours(x, mask=causal())
    cache = torch.full((B, K, E), torch.nan)
    for at in range(K):
        cache[:, at] = x[:, at]
        step = ours(x[:, at : at + 1], cache, mask=Band(None, 0, offset=at))
        torch.testing.assert_close(step[:, 0], whole[:, at], rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------- mistakes


SIZES_WRONG: dict[str, tuple[type[Exception], tuple[Any, Any], dict[str, Any]]] = {
    "num_heads: embed_dim 12 is not divisible by num_heads 5; choose a divisor of 12, or pass head_dim": (
        ValueError,
        (12, 5),
        {},
    ),
    "num_heads: got 0, expected a whole number from 1": (ValueError, (12, 0), {}),
    "embed_dim: got -4, expected a whole number from 1": (ValueError, (-4, 2), {}),
    "num_heads: got str, expected a whole number": (TypeError, (12, "3"), {}),
    "embed_dim: got float, expected a whole number": (TypeError, (12.0, 3), {}),
    "num_heads: got bool, expected a whole number": (TypeError, (12, True), {}),
    "kv_heads: got 2, expected a divisor of num_heads 3": (ValueError, (12, 3), {"kv_heads": 2}),
    "head_dim: got 0, expected a whole number from 1": (ValueError, (12, 3), {"head_dim": 0}),
    "v_head_dim: got 0, expected a whole number from 1": (ValueError, (12, 3), {"v_head_dim": 0}),
    "kdim: got 0, expected a whole number from 1": (ValueError, (12, 3), {"kdim": 0}),
    "vdim: got float, expected a whole number": (TypeError, (12, 3), {"vdim": 2.5}),
    "bias: got ['q', 'w'], expected True, False, or names among q, k, v": (ValueError, (12, 3), {"bias": ("q", "w")}),
    "bias: got int, expected True, False, or names among q, k, v": (TypeError, (12, 3), {"bias": 1}),
    "scale: got str, expected a number": (TypeError, (12, 3), {"scale": "1"}),
    "softcap: got -1, expected a finite number above 0, or None": (ValueError, (12, 3), {"softcap": -1}),
    "dropout: got 1.0, expected a probability in [0, 1)": (ValueError, (12, 3), {"dropout": 1.0}),
    "out_bias: got 'no', expected True or False": (TypeError, (12, 3), {"out_bias": "no"}),
    "sinks: got 4, expected True or False": (TypeError, (12, 3), {"sinks": 4}),
    "gate: got None, expected True or False": (TypeError, (12, 3), {"gate": None}),
    "dtype: got int64, expected a floating one": (TypeError, (12, 3), {"dtype": torch.int64}),
}

INPUTS_WRONG: dict[str, tuple[type[Exception], tuple[Any, ...]]] = {
    "x: got list, expected a torch.Tensor": (TypeError, ([1.0],)),
    "x: axis 2 (E) is 11, expected 12; x [2, 5, 11]": (ValueError, (torch.zeros(2, 5, 11),)),
    "x: has 4 axes, expected 2 or 3 ([B, length, E]); x [1, 2, 5, 12]": (ValueError, (torch.zeros(1, 2, 5, 12),)),
    "x: has 1 axes, expected 2 or 3": (ValueError, (torch.zeros(12),)),
    "context: axis 2 (E) is 10, expected 12; context [2, 7, 10], x [2, 5, 12]": (
        ValueError,
        (torch.zeros(2, 5, 12), torch.zeros(2, 7, 10)),
    ),
    "context: has 2 axes, expected 3, as x ([B, length, E]); context [7, 12], x [2, 5, 12]": (
        ValueError,
        (torch.zeros(2, 5, 12), torch.zeros(7, 12)),
    ),
    "context: got list, expected a torch.Tensor, or a pair (for the keys, for the values)": (
        TypeError,
        (torch.zeros(2, 5, 12), [torch.zeros(2, 7, 12)] * 2),
    ),
    "context: got 3 of them, expected a torch.Tensor, or a pair": (
        TypeError,
        (torch.zeros(2, 5, 12), (torch.zeros(2, 7, 12),) * 3),
    ),
    "context: got str, expected a torch.Tensor": (TypeError, (torch.zeros(2, 5, 12), ("k", "v"))),
    "context: got Band, expected a torch.Tensor, or a pair (for the keys, for the values); pass a mask by name": (
        TypeError,
        (torch.zeros(2, 5, 12), causal()),
    ),
    "context: axis 1 (K) is 3 for the values, expected 7 as for the keys; keys [2, 7, 12], values [2, 3, 12]": (
        ValueError,
        (torch.zeros(2, 5, 12), (torch.zeros(2, 7, 12), torch.zeros(2, 3, 12))),
    ),
    "context: axis 0 (B) is 3, expected 2, as x; context [3, 7, 12], x [2, 5, 12]": (
        ValueError,
        (torch.zeros(2, 5, 12), torch.zeros(3, 7, 12)),
    ),
}


@pytest.mark.parametrize("message", SIZES_WRONG)
def test_wrong_sizes(message: str) -> None:
    error, sizes, said = SIZES_WRONG[message]
    with pytest.raises(error) as caught:
        MultiHeadAttention(*sizes, **said)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("message", INPUTS_WRONG)
def test_wrong_inputs(message: str) -> None:
    error, given = INPUTS_WRONG[message]
    with pytest.raises(error) as caught:
        MultiHeadAttention(E, H)(*given)
    assert str(caught.value).startswith(message)


def test_no_context_where_the_widths_differ() -> None:
    with pytest.raises(
        ValueError, match=r"^context: axis 2 \(E\) is 12, expected 10; without context, the module projects"
    ):
        MultiHeadAttention(E, H, kdim=10)(torch.zeros(B, Q, E))


def test_repr_names_what_is_not_usual() -> None:
    assert MultiHeadAttention(E, H).extra_repr() == "12, 3"
    sizes = {"kv_heads": 1, "head_dim": 5, "v_head_dim": 2, "kdim": 7, "vdim": 9}
    said = {**sizes, "softcap": 2.0, "dropout": 0.1, "scale": 0.5, "sinks": True}
    assert all(f"{name}={value}" in MultiHeadAttention(E, H, **said).extra_repr() for name, value in said.items())


def test_every_combination_of_sizes_runs() -> None:
    for kv_heads, head_dim, v_head_dim, bias in itertools.product((1, 3), (None, 5), (None, 7), (True, ("k",))):
        ours = MultiHeadAttention(E, H, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, bias=bias)
        x = torch.randn(B, Q, E)
        torch.testing.assert_close(ours(x), by_the_oracle(ours, x)[0].float(), rtol=1e-4, atol=1e-5)

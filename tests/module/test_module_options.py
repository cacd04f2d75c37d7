"""Options of MultiHeadAttention beyond the plain one: rotary, bias by distance, norms of q and k, the gate."""

from __future__ import annotations

import copy
import pickle
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from headscope import MultiHeadAttention, functional, trace, watch
from headscope._linear import merge_heads, split_heads
from headscope.cache import GrowingCache
from headscope.masks import Band, Dense, Documents, KeyLengths, Mask, Prefix, as_mask, causal, window
from headscope.positions import NTK, ALiBi, RelativeBias, Rotary, T5Buckets, YaRN, matrix
from support import oracle

B, Q, E, H = 2, 5, 24, 3

OPTIONS: dict[str, dict[str, Any]] = {
    "rotary": {"rotary": Rotary(8)},
    "partial, interleaved, scaled": {"rotary": Rotary(4, 50.0, "interleaved", YaRN(4, 8)), "kv_heads": 1},
    "dynamic": {"rotary": Rotary(8, scaling=NTK(2, 3))},
    "alibi": {"position_bias": ALiBi(H)},
    "t5": {"position_bias": T5Buckets(8, 10), "scale": 1.0},
    "rms": {"qk_norm": "rms", "kv_heads": 1, "rotary": Rotary(8)},
    "layer": {"qk_norm": "layer", "qk_norm_eps": 1e-3},
    "rms_all": {"qk_norm": "rms_all", "kv_heads": 1, "head_dim": 6, "rotary": Rotary(6)},
    "gate": {"gate": True, "v_head_dim": 5},
    "all": {
        "rotary": Rotary(6), "position_bias": ALiBi(H), "qk_norm": "layer", "gate": True, "sinks": True, "bias": False,
    },
}  # fmt: skip


def module(**said: Any) -> MultiHeadAttention:
    """A module in float64 whose every parameter counts."""
    made = MultiHeadAttention(E, H, dtype=torch.float64, **said)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


def norm(m: MultiHeadAttention, which: Any, x: Tensor) -> Tensor:
    """x [B, heads, T, D], normalised as the option says, from the sums up."""
    if m.qk_norm is None:
        return x
    wide = merge_heads(x) if m.qk_norm == "rms_all" else x
    if m.qk_norm == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide / (wide.square().mean(-1, keepdim=True) + which.eps).sqrt() * which.weight
    wide = wide + which.bias if m.qk_norm == "layer" else wide
    return split_heads(wide, x.shape[1], m.head_dim) if m.qk_norm == "rms_all" else wide


CAUSAL = torch.ones(Q, Q, dtype=torch.bool).tril()


def by_definition(
    m: MultiHeadAttention, x: Tensor, positions: Tensor, seen: Tensor | None = CAUSAL
) -> tuple[Tensor, Tensor]:
    q, k, v = m.project(x)
    q, k = norm(m, m.q_norm, q), norm(m, m.k_norm, k)
    if m.rotary is not None:
        q, k = (m.rotary.rotate(each, positions) for each in (q, k))
    bias = None if m.position_bias is None else matrix(m.position_bias, positions, positions, torch.float64)
    exact = oracle.attention(q, k, v, seen=seen, bias=bias, scale=m.scale, sinks=m.sinks)
    merged = torch.cat(exact.out.unbind(1), -1)
    if m.gate_proj is not None:
        bias = dict(m.gate_proj.named_parameters()).get("bias", torch.zeros(()))
        merged = merged / (1 + torch.exp(-(x @ m.gate_proj.weight.T + bias)))
    return m.out_proj(merged), exact.weights


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_every_option_is_its_definition(name: str) -> None:
    m, x = module(**OPTIONS[name]), torch.randn(B, Q, E, dtype=torch.float64)
    wanted, weights = by_definition(m, x, torch.arange(Q))
    out, got = m(x, mask=causal(), need_weights=True)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(got, weights)
    torch.testing.assert_close(m(x[0], mask=causal()), wanted[0])
    if m.rotary is None and m.position_bias is None:
        return
    for places in (torch.tensor([2, 3, 4, 9, 11]), torch.tensor([[0, 0, 1, 2, 3], [4, 3, 2, 1, 0]])):
        torch.testing.assert_close(m(x, mask=causal(), positions=places), by_definition(m, x, places)[0])


@pytest.mark.parametrize("name", OPTIONS)
def test_gradients_reach_every_parameter(name: str) -> None:
    m, x = module(**OPTIONS[name]), torch.randn(1, 3, E, dtype=torch.float64, requires_grad=True)
    parameters = dict(m.named_parameters())

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(m, dict(zip(parameters, values, strict=True)), x, {"mask": causal()})

    torch.autograd.gradcheck(run, (x, *parameters.values()), fast_mode=True)


def test_a_given_bias_is_added_to_that_by_distance() -> None:
    m, x = module(position_bias=ALiBi(H)), torch.randn(B, Q, E, dtype=torch.float64)
    more = torch.randn(B, 1, Q, Q, dtype=torch.float64)
    alone = MultiHeadAttention(E, H, dtype=torch.float64)
    alone.load_state_dict(m.state_dict())
    at = torch.arange(Q)
    bias = matrix(ALiBi(H), at, at, torch.float64)
    torch.testing.assert_close(m(x, bias=more), alone(x, bias=bias + more))


def test_norms_are_those_of_qwen3_and_olmo2() -> None:
    for name, kind in (("qwen3.modeling_qwen3.Qwen3", "rms"), ("olmo2.modeling_olmo2.Olmo2", "rms_all")):
        path, prefix = name.rsplit(".", 1)
        theirs: Any = getattr(pytest.importorskip(f"transformers.models.{path}"), f"{prefix}RMSNorm")
        m: Any = module(qk_norm=kind, qk_norm_eps=1e-5)
        wanted = theirs(len(m.q_norm.weight), 1e-5)
        wanted.weight = m.q_norm.weight
        x = torch.randn(B, Q, len(m.q_norm.weight))
        torch.testing.assert_close(m.q_norm(x.double()), wanted(x.double()))


def test_layers_may_share_a_table_and_keep_it() -> None:
    table = RelativeBias(H, T5Buckets(8, 16))
    nn.init.normal_(table.weight)
    before = table.weight.clone()
    layers = [MultiHeadAttention(E, H, position_bias=table) for _ in range(2)]
    assert layers[0].position_bias is layers[1].position_bias is table
    layers[0].reset_parameters()
    torch.testing.assert_close(table.weight, before, rtol=0, atol=0)
    own = MultiHeadAttention(E, H, position_bias=T5Buckets(8, 16))
    assert isinstance(own.position_bias, RelativeBias)
    assert own.position_bias is not table


@pytest.mark.parametrize("name", OPTIONS)
def test_a_module_with_options_survives_what_modules_go_through(name: str) -> None:
    m, x = module(**OPTIONS[name]), torch.randn(B, Q, E, dtype=torch.float64)
    m.requires_grad_(False)
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        torch.testing.assert_close(other(x, mask=causal()), m(x, mask=causal()), rtol=0, atol=0)
    fresh = MultiHeadAttention(E, H, dtype=torch.float64, **OPTIONS[name])
    fresh.load_state_dict(m.state_dict())
    torch.testing.assert_close(fresh(x), m(x), rtol=0, atol=0)
    half = m.bfloat16()(x.bfloat16())
    assert half.dtype == torch.bfloat16
    meta = MultiHeadAttention(E, H, device="meta", **OPTIONS[name])
    assert meta(x.float().to("meta")).shape == x.shape


def test_it_compiles_without_a_break() -> None:
    m, x = module(**OPTIONS["all"]).requires_grad_(False), torch.randn(B, Q, E, dtype=torch.float64)
    compiled = torch.compile(m, fullgraph=True, backend="eager", dynamic=True)
    torch.testing.assert_close(compiled(x, mask=causal()), m(x, mask=causal()))
    torch.testing.assert_close(compiled(x[:, :3], mask=causal()), m(x[:, :3], mask=causal()))


def test_watching_sees_the_weights_with_all_options() -> None:
    m, x = module(**OPTIONS["all"]), torch.randn(B, Q, E, dtype=torch.float64)
    weights = m(x, mask=causal(), need_weights=True)[1]
    with watch(m) as seen:
        m(x, mask=causal())
    for h in range(H):
        found: Any = seen["MultiHeadAttention", h, "mass"]
        torch.testing.assert_close(found.mean, weights[:, h].sum(-1).mean().item(), rtol=1e-5, atol=0)


def test_it_says_what_it_is_made_of() -> None:
    said = repr(MultiHeadAttention(24, 3, **OPTIONS["all"]))
    for part in (
        "rotary=Rotary(dim=6",
        "position_bias=ALiBi(num_heads=3",
        "qk_norm='layer'",
        "sinks=True",
        "gate=True",
    ):
        assert part in said
    assert repr(MultiHeadAttention(24, 3)).splitlines()[0] == "MultiHeadAttention("
    assert "RelativeBias(3, T5Buckets(num_buckets=32" in repr(MultiHeadAttention(24, 3, position_bias=T5Buckets()))


@pytest.mark.parametrize(
    ("said", "error", "says"),
    [
        ({"rotary": 8}, TypeError, "rotary: got int, expected headscope.positions.Rotary or None"),
        ({"rotary": Rotary(10)}, ValueError, "rotary: its dim is 10, expected at most head_dim 8"),
        ({"position_bias": "alibi"}, TypeError, "position_bias: got str, expected ALiBi, T5Buckets, RelativeBias"),
        ({"position_bias": ALiBi}, TypeError, "position_bias: got the class ALiBi"),
        ({"position_bias": ALiBi(4)}, ValueError, "position_bias: has 4 heads, expected num_heads 3"),
        ({"qk_norm": "l2"}, ValueError, "qk_norm: got 'l2', expected \"rms\""),
        ({"qk_norm": "rms", "qk_norm_eps": 0}, ValueError, "qk_norm_eps: got 0, expected a finite number above 0"),
        ({"qk_norm": "rms", "qk_norm_eps": None}, TypeError, "qk_norm_eps: got NoneType, expected a number"),
        ({"rotary": Rotary(8), "kdim": 8}, ValueError, "kdim: got 8, expected embed_dim 24, because rotary"),
        (
            {"position_bias": ALiBi(3), "vdim": 8},
            ValueError,
            "vdim: got 8, expected embed_dim 24, because position_bias requires self-attention",
        ),
    ],
)
def test_options_that_do_not_fit_are_named(said: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        MultiHeadAttention(E, H, **said)


def test_calls_that_do_not_fit_are_named() -> None:
    x, plain = torch.randn(B, Q, E), MultiHeadAttention(E, H)
    with pytest.raises(ValueError, match="positions: expected None, because this module has neither"):
        plain(x, positions=torch.arange(Q))
    turning = MultiHeadAttention(E, H, rotary=Rotary(8))
    with pytest.raises(
        ValueError, match="context: expected None, because this module has rotary, and x and context do not share"
    ):
        turning(x, x.clone())
    with pytest.raises(ValueError, match=r"context: expected None, because this module has position_bias"):
        MultiHeadAttention(E, H, position_bias=ALiBi(H))(x, x.clone())
    with pytest.raises(ValueError, match=r"positions: positions \[4\], expected \[5\] or \[2, 5\]"):
        turning(x, positions=torch.arange(4))
    with pytest.raises(TypeError, match="positions: got float32, expected integers"):
        turning(x, positions=torch.zeros(Q))
    plain.qkv_proj = torch.nn.Sequential(plain.qkv_proj)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(TypeError, match="module: has a Sequential as qkv_proj, whose steps cannot be traced yet"):
        trace(plain, x)


# ---------------------------------------------------------------- a bias by distance in linear memory


class Odd(Mask):
    """A mask that nobody knows: keys whose number is odd, or the query's own."""

    def allows(self, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return (j % 2 == 1) | (i == j)


IDS = torch.tensor([[0, 0, 1, 1, 1], [2, 1, 2, 1, 2]])
MASKS: dict[str, Any] = {
    "none": None,
    "causal": causal(),
    "window, from elsewhere": Band(1, 1, offset=(1, -1)),
    "prefix or window": Prefix(2) | window(2),
    "lengths": KeyLengths(torch.tensor([5, 3])),
    "documents": causal() & Documents(IDS),
    "dense": torch.rand(B, 1, Q, Q, generator=torch.Generator().manual_seed(1)) < 0.6,
    "dense of all heads": torch.rand(Q, Q, generator=torch.Generator().manual_seed(2)) < 0.6,
    "dense row": Dense(torch.tensor([True, True, False, True, True])),
    "odd": Odd(),
}


def _means(seen: Any, quantity: str) -> Tensor:
    return torch.as_tensor(seen[quantity].mean)  # [layers, H]


@pytest.mark.parametrize("option", ["alibi", "t5"])
@pytest.mark.parametrize("name", MASKS)
@torch.no_grad()
def test_turned_queries_give_what_the_definition_gives(name: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    m, x, mask = module(**OPTIONS[option]), torch.randn(B, Q, E, dtype=torch.float64), MASKS[name]
    known = as_mask(mask)
    seen = None if known is None else known.dense(B, H, Q, Q)
    wanted, weights = by_definition(m, x, torch.arange(Q), seen)
    out = m(x, mask=mask)
    torch.testing.assert_close(out, wanted)
    again, got = m(x, mask=mask, need_weights=True)
    torch.testing.assert_close(got, weights)
    torch.testing.assert_close(again, out, rtol=0, atol=0)
    with watch(m) as seen_turned:
        torch.testing.assert_close(m(x, mask=mask), out, rtol=0, atol=0)
    monkeypatch.setattr("headscope.module._placement._may_be_turned", Mock(return_value=False))
    with watch(m) as seen_plain:
        torch.testing.assert_close(m(x, mask=mask), out)
    assert seen_turned.names == seen_plain.names
    for quantity in seen_plain.names:
        got, plain = (_means(each, quantity) for each in (seen_turned, seen_plain))
        torch.testing.assert_close(got, plain, equal_nan=True, msg=quantity)


def test_dropout_drops_the_weight_of_the_key_of_its_own_too() -> None:
    m = MultiHeadAttention(4, 2, bias=False, bias_kv=True, dropout=0.5)
    assert m.bias_v is not None
    with torch.no_grad():
        m.qkv_proj.weight[8:] = 0  # of the values: only that of the module's own key is left
        nn.init.ones_(m.bias_v)
        nn.init.eye_(m.out_proj.weight)
        x = torch.randn(3, 40, 4)
        own, dropped = (m.train(mode)(x).unflatten(-1, (2, 2)) for mode in (False, True))  # [B, T, H, Dv]
    share = dropped / own
    torch.testing.assert_close(share, torch.where(share > 1, 2.0, 0.0))
    assert 0.3 < float((share > 1).float().mean()) < 0.7


@pytest.mark.parametrize("option", [{"rotary": Rotary(8)}, {"rotary": Rotary(8), "position_bias": ALiBi(H)}], ids=str)
def test_the_key_of_its_own_has_no_position(option: dict[str, Any]) -> None:
    m = module(bias_kv=True, **option).eval()
    x, longer = torch.randn(5, E, dtype=torch.float64), torch.randn(7, E, dtype=torch.float64)
    with torch.no_grad():
        alone = m(x[None], mask=causal())[0]

        nested = m(torch.nested.nested_tensor([longer, x], layout=torch.jagged), mask=causal()).unbind()[1]
        packed = m(torch.cat([longer, x])[None], mask=causal() & Documents.from_cu_seqlens(torch.tensor([0, 7, 12])))
        padded = m(torch.cat([longer[:2], x])[None], cache=GrowingCache(padding=[2]))

    torch.testing.assert_close(nested, alone)
    torch.testing.assert_close(packed[0, 7:], alone)
    torch.testing.assert_close(padded[0, 2:], alone)


def test_a_bias_by_distance_takes_linear_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    attention = functional.attention

    def look(*args: Any, **said: Any) -> Tensor:
        given.append(said["bias"])
        return attention(*args, **said)

    monkeypatch.setattr(functional, "attention", look)
    x = torch.randn(1, 11, E, dtype=torch.float64)
    for option in ("alibi", "t5"):
        with torch.no_grad():
            module(**OPTIONS[option])(x, mask=causal())
    learned = module(**OPTIONS["t5"])
    learned(x)
    assert [bias.untyped_storage().nbytes() // 8 for bias in given] == [H * 21, H * 21, H * 121]
    assert all(bias.shape == (H, 11, 11) for bias in given)
    monkeypatch.undo()
    q = torch.randn(1, H, 11, 4, dtype=torch.float64)
    for backend in ("sdpa", "blocked"):  # where there are no native kernels
        got = functional.attention(q, q, q, bias=given[0], backend=backend)
        torch.testing.assert_close(got, functional.attention(q, q, q, bias=given[0].contiguous(), backend="reference"))


def test_masks_are_turned_and_turned_back() -> None:
    for name, mask in MASKS.items():
        known = as_mask(mask)
        if known is None or name == "odd":
            continue
        there = known.reverse_queries(Q, Q)
        assert there is not None
        back = there.reverse_queries(Q, Q)
        assert back is not None
        torch.testing.assert_close(there.dense(B, H, Q, Q), known.dense(B, H, Q, Q).flip(-2))
        torch.testing.assert_close(back.dense(B, H, Q, Q), known.dense(B, H, Q, Q))
    assert Odd().reverse_queries(Q, Q) is None
    assert (causal() & Odd()).reverse_queries(Q, Q) is None
    assert causal().reverse_queries(Q, Q) == causal().reverse_queries(Q, Q), "by value, so that a plan is kept"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.uint16, torch.uint64], ids=str)
@pytest.mark.parametrize("name", ["rotary", "dynamic", "alibi", "t5"])
def test_positions_of_any_integer_dtype(name: str, dtype: torch.dtype) -> None:
    m, x = module(**OPTIONS[name]), torch.randn(B, Q, E, dtype=torch.float64)
    for at in (torch.tensor([5, 0, 3, 100, 1]), torch.tensor([[4, 3, 2, 1, 0], [0, 7, 0, 9, 0]])):
        torch.testing.assert_close(m(x, positions=at.to(dtype)), m(x, positions=at), rtol=0, atol=0)


def test_no_tokens_where_the_length_counts() -> None:
    m = module(**OPTIONS["dynamic"])
    assert m(torch.zeros(B, 0, E, dtype=torch.float64), positions=torch.arange(0)).shape == (B, 0, E)


def test_cross_attention_reads_a_packed_weight_once() -> None:
    """What makes it may move on each time, as spectral_norm does in training, or draw."""
    module = MultiHeadAttention(16, 4).train()

    class Drawn(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight * torch.rand(())

    nn.utils.parametrize.register_parametrization(module.qkv_proj, "weight", Drawn())
    x = torch.randn(2, 9, 16)
    torch.manual_seed(3)
    wanted = module(x)
    torch.manual_seed(3)
    torch.testing.assert_close(module(x, x.clone()), wanted)

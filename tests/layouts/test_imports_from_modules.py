"""layouts: weights of other modules against the modules they come from, under every mask they take."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from headscope import MultiHeadAttention, ablate, attention, functional, layouts, nn_compat, trace
from headscope._intercept.intercepted_call import WatchError
from headscope.masks import Band, KeyLengths, Mask, causal
from headscope.positions import ALiBi, RelativeBias, T5Buckets
from support import layout_modules
from support.paths import DOCS

B, H, T, E = 3, 2, 5, 12  # batch, heads, length, width
LENGTHS = torch.tensor([2, T, 4])
TUTORIALS = [layout_modules.QLinear, layout_modules.ToKeys, layout_modules.QKV, layout_modules.QueryKeyValue,
             layout_modules.WQ, layout_modules.CapitalWQ, layout_modules.ShortWQ, layout_modules.SmallWQ]  # fmt: skip
MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": causal(),
    "padding": KeyLengths(LENGTHS),
    "both": causal() & KeyLengths(LENGTHS),
}


def randomized(module: nn.Module) -> nn.Module:
    """Every parameter random, norms and biases as well."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module


def hidden(mask: Mask | None, heads: int = H) -> Tensor | None:
    """What a mask hides, [B, H, T, T], True = hidden."""
    return None if mask is None else ~mask.dense(B, heads, T, T)


def assert_same_state(made: MultiHeadAttention, layout: str, state: dict[str, Tensor]) -> None:
    """Back to where it came from, to the bit."""
    again = made.to_state_dict(layout)
    torch.testing.assert_close(again, {key: state[key] for key in again}, rtol=0, atol=0)
    assert all(x.is_contiguous() for x in again.values())


# ---------------------------------------------------------------- nn.MultiheadAttention


@pytest.mark.parametrize("batch_first", [False, True], ids=["LNE", "NLE"])
@pytest.mark.parametrize("add_zero_attn", [False, True], ids=["", "zero"])
@pytest.mark.parametrize("add_bias_kv", [False, True], ids=["", "bias_kv"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("widths", [{}, {"kdim": 7, "vdim": 3}, {"vdim": 5}], ids=["one width", "three", "two"])
def test_torch(widths: dict[str, int], bias: bool, add_bias_kv: bool, add_zero_attn: bool, batch_first: bool) -> None:
    options = {"bias": bias, "add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn, "batch_first": batch_first}
    theirs = randomized(nn.MultiheadAttention(E, H, **options, **widths))
    made = MultiHeadAttention.from_module(theirs)
    x, key, value = (torch.randn(B, T, width) for width in (E, widths.get("kdim", E), widths.get("vdim", E)))
    context, inputs = ((key, value), (x, key, value)) if widths else (None, (x, x, x))
    order = (lambda y: y) if batch_first else (lambda y: y.transpose(0, 1))
    for name, mask in MASKS.items():
        seen = hidden(mask)
        given = None if seen is None else seen.flatten(0, 1)
        expected, weights = theirs(*map(order, inputs), attn_mask=given, average_attn_weights=False)
        out, ours = made(x, context, mask=mask, need_weights=True)
        torch.testing.assert_close(out, order(expected), msg=lambda text, name=name: f"{name}: {text}")
        torch.testing.assert_close(ours, weights[..., :T], msg=lambda text, name=name: f"{name}, weights: {text}")
        torch.testing.assert_close(made(x, context, mask=mask), out)
    assert_same_state(made, "torch_separate" if widths else "torch", theirs.state_dict())


def test_torch_by_headscope() -> None:
    """nn_compat's module is torch's."""
    theirs = nn.MultiheadAttention(E, H, batch_first=True)
    made = MultiHeadAttention.from_module(nn_compat.MultiheadAttention.from_torch(theirs))
    x = torch.randn(B, T, E)
    torch.testing.assert_close(made(x), theirs(x, x, x)[0])


def test_torch_takes_ours_back() -> None:
    """A module of ours with fewer biases, into torch's: a bias that is not there is zero."""
    ours = randomized(MultiHeadAttention(E, H, bias=("q", "v")))
    theirs = nn.MultiheadAttention(E, H, batch_first=True)
    theirs.load_state_dict(ours.to_state_dict("torch"))
    x = torch.randn(B, T, E)
    torch.testing.assert_close(theirs(x, x, x)[0], ours(x))
    assert not theirs.in_proj_bias.chunk(3)[1].any()


@pytest.mark.parametrize("more", [{}, {"add_zero_attn": True}], ids=["", "zero"])
def test_torch_with_a_key_of_its_own(more: dict[str, bool]) -> None:
    """Gradients too, and rows that may see nothing else."""
    theirs = randomized(nn.MultiheadAttention(E, H, add_bias_kv=True, batch_first=True, **more))
    made = MultiHeadAttention.from_module(theirs)
    seen = torch.rand(B, H, T, T) < 0.4
    seen[:, :, 2] = False
    results: list[tuple[Tensor, ...]] = []
    for module, mask in ((theirs, {"attn_mask": ~seen.flatten(0, 1)}), (made, {"mask": seen})):
        x = torch.linspace(-2, 2, B * T * E).view(B, T, E).requires_grad_()
        out = module(x, x, x, **mask)[0] if module is theirs else module(x, **mask)
        out.square().sum().backward()
        own = (parameter.grad.flatten() for parameter in (module.bias_k, module.bias_v, module.out_proj.weight))
        results.append((out, x.grad, *own))
    for expected, ours in zip(*results, strict=True):
        size = float(expected.detach().abs().max())  # sixty and more, of a gradient: it rounds relative to that
        torch.testing.assert_close(ours, expected, rtol=1.3e-6, atol=3e-6 * size)


def test_a_key_of_its_own_with_grouped_heads_softcap_and_dropout() -> None:
    """By its definition: one more key, put before the others."""
    made = MultiHeadAttention(E, 4, kv_heads=2, softcap=3.0, sinks=True, bias_kv=True)
    randomized(made)
    x = torch.randn(B, T, E)
    q, k, v = made.project(x)
    assert made.bias_k is not None
    assert made.bias_v is not None
    k, v = (torch.cat([own[None, :, None].expand(B, -1, 1, -1), rest], 2)
            for own, rest in ((made.bias_k, k), (made.bias_v, v)))  # fmt: skip
    mask = Band(None, 0, offset=1)  # the first key is its own
    heads = attention(q, k, v, mask=mask, softcap=3.0, sinks=made.sinks)
    torch.testing.assert_close(made(x, mask=causal()), made.out_proj(heads.transpose(1, 2).flatten(2)))
    out, weights = made(x, mask=causal(), need_weights=True)
    torch.testing.assert_close(out, made(x, mask=causal()))
    expected = functional.weights(q, k, mask=mask, softcap=3.0, sinks=made.sinks)
    torch.testing.assert_close(weights, expected[..., 1:])
    made.dropout = 0.5
    once = made(x)
    torch.testing.assert_close(made.eval()(x), made(x))
    assert not torch.allclose(once, made(x))
    small = made.prune_heads([2, 3])
    assert small.bias_k is not None
    torch.testing.assert_close(small.bias_k, made.bias_k[:1], rtol=0, atol=0)
    zeroed = copy.deepcopy(made)
    with torch.no_grad():
        zeroed.out_proj.weight[:, E // 2 :] = 0
    torch.testing.assert_close(small(x), zeroed(x))
    with ablate(model := nn.ModuleList([made]), {"0": 1}), pytest.raises(WatchError, match="this module has bias_kv"):
        model[0](x)
    assert trace(made, x).held


# ---------------------------------------------------------------- tutorials, timm, Keras


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kind", TUTORIALS)
def test_tutorials(kind: type[layout_modules.Tutorial], mask: str) -> None:
    theirs = randomized(kind(E, H))
    options = {"num_heads": H} if kind is layout_modules.QKV else {}
    made = MultiHeadAttention.from_module(theirs, **options)
    x = torch.randn(B, T, E)
    torch.testing.assert_close(made(x, mask=MASKS[mask]), theirs(x, hidden(MASKS[mask])))
    name = kind.names[0] if kind is not layout_modules.ToKeys else "tokeys"
    name = {"Q": "QKV", "query": "query_key_value"}.get(name, name)
    assert_same_state(made, name, theirs.state_dict())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm", [nn.Identity, nn.LayerNorm, nn.RMSNorm])
def test_timm(norm: Any, bias: bool, mask: str) -> None:
    theirs = randomized(layout_modules.Timm(E, H, bias, norm if norm is nn.Identity else lambda d: norm(d, eps=1e-3)))
    made = MultiHeadAttention.from_module(theirs)
    x = torch.randn(B, T, E)
    torch.testing.assert_close(made(x, mask=MASKS[mask]), theirs(x, hidden(MASKS[mask])))
    assert_same_state(made, "timm", theirs.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_norms_of_timm_without_an_eps_have_torchs(dtype: torch.dtype) -> None:
    theirs = randomized(layout_modules.Timm(E, H, norm=nn.RMSNorm)).to(dtype)
    x = torch.randn(B, T, E, dtype=dtype) * 1e-3
    with torch.no_grad():
        theirs.qkv.bias.zero_()
    torch.testing.assert_close(MultiHeadAttention.from_module(theirs)(x), theirs(x))


@pytest.mark.parametrize(("scale", "wanted"), [(torch.tensor(0.25), 0.25), (None, (E // H) ** -0.5)])
def test_a_scale_may_be_a_tensor_or_the_usual_one(scale: Any, wanted: float) -> None:
    theirs = randomized(layout_modules.Timm(E, H))
    theirs.scale = scale
    assert MultiHeadAttention.from_module(theirs).scale == wanted


class ByVariance(nn.Module):
    """A LayerNorm without bias, under a name that does not say so."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps


class RmsNorm(ByVariance):
    """As timm calls it."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight


def test_norms_of_timm_are_known_by_their_classes() -> None:
    theirs = randomized(layout_modules.Timm(E, H, norm=RmsNorm))
    x = torch.randn(B, T, E)
    torch.testing.assert_close(MultiHeadAttention.from_module(theirs)(x), theirs(x))
    unknown = layout_modules.Timm(E, H, norm=ByVariance)
    with pytest.raises(
        ValueError, match='module: q_norm is a ByVariance, an unknown kind of norm; pass qk_norm="rms" or "layer"'
    ):
        MultiHeadAttention.from_module(unknown)
    assert MultiHeadAttention.from_module(unknown, qk_norm="rms").qk_norm == "rms"


@pytest.mark.parametrize(
    ("k_norm", "message"),
    [
        (
            RmsNorm(E // H, eps=1e-2),
            r"module: q_norm\.eps is 1e-06, k_norm\.eps is 0\.01; expected equal values, because headscope "
            "has one qk_norm_eps",
        ),
        (nn.LayerNorm(E // H, eps=1e-6), "module: q_norm is 'rms' and k_norm 'layer', expected one kind"),
        (nn.Identity(), "module: q_norm is 'rms' and k_norm None, expected one kind"),
    ],
)
def test_norms_of_q_and_k_must_agree(k_norm: nn.Module, message: str) -> None:
    theirs = layout_modules.Timm(E, H, norm=RmsNorm)
    theirs.k_norm = k_norm
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention.from_module(theirs)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "value_dim"), [(2, 2, 7), (2, 2, 3), (4, 2, 5)])
def test_keras(heads: int, kv_heads: int, value_dim: int, bias: bool, mask: str) -> None:
    rng = np.random.default_rng(1)
    weights = layout_modules.keras_weights(E, heads, kv_heads, 7, value_dim, rng, bias=bias)
    made = MultiHeadAttention.from_state_dict(weights, "keras")
    assert (made.num_heads, made.kv_heads, made.head_dim, made.v_head_dim) == (heads, kv_heads, 7, value_dim)
    query, value = rng.normal(size=(2, B, T, E))
    seen = hidden(MASKS[mask], heads)
    expected = layout_modules.keras_attention(weights, query, value, None if seen is None else ~seen.numpy())
    out = made(torch.tensor(query), torch.tensor(value), mask=MASKS[mask])
    torch.testing.assert_close(out, torch.tensor(expected))
    again = made.to_state_dict("keras", prefix="layer/")
    torch.testing.assert_close(again, {f"layer/{key}": torch.tensor(x) for key, x in weights.items()}, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({}, {"num_heads": 2}, "num_heads: got 2, expected 4, as query/kernel has"),
        ({"key/kernel": (12, 2, 6), "value/kernel": (12, 2, 6)}, {}, "key/kernel: has 2 heads of 6, expected 4 of 3"),
        ({"attention_output/kernel": (2, 6, 12)}, {}, "attention_output/kernel: has 2 heads of 6, expected 4 of 3"),
        ({"query/bias": (2, 6)}, {}, "query/bias: has 2 heads of 6, expected 4 of 3"),
    ],
)
def test_heads_of_keras_that_contradict_each_other(changed: Any, options: dict[str, int], message: str) -> None:
    weights = layout_modules.keras_weights(12, 4, 4, 3, 3, np.random.default_rng(1), bias=True)
    assert MultiHeadAttention.from_state_dict(weights, "keras", num_heads=4).num_heads == 4
    weights |= {key: np.zeros(shape) for key, shape in changed.items()}
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention.from_state_dict(weights, "keras", **options)


# ---------------------------------------------------------------- what is kept


def test_dtype_mode_and_freezing_are_kept() -> None:
    theirs = nn.MultiheadAttention(E, H, dropout=0.3, dtype=torch.bfloat16).eval().requires_grad_(False)
    state = torch.get_rng_state()
    made = MultiHeadAttention.from_module(theirs)
    assert torch.equal(torch.get_rng_state(), state), "no random numbers are drawn"
    assert not made.training
    assert made.dropout == 0.3
    assert {x.dtype for x in made.parameters()} == {torch.bfloat16}
    assert not any(x.requires_grad for x in made.parameters())
    assert_same_state(made, "torch", theirs.state_dict())
    theirs.requires_grad_(True).train()
    made = MultiHeadAttention.from_module(theirs)
    assert made.training
    assert all(x.requires_grad for x in made.parameters())


def test_weights_are_copies() -> None:
    theirs = layout_modules.WQ(E, H)
    made = MultiHeadAttention.from_module(theirs)
    nn.init.zeros_(theirs.w_q.weight)
    assert made.projection("q")[0].any()
    given = made.to_state_dict("w_q")
    given["w_q.weight"].zero_()
    assert made.projection("q")[0].any()


def test_zero_attention_becomes_a_sink_that_does_not_train() -> None:
    made = MultiHeadAttention.from_module(nn.MultiheadAttention(E, H, add_zero_attn=True))
    assert made.sinks is not None
    assert not made.sinks.any()
    assert not made.sinks.requires_grad


def test_meta_modules_stay_on_meta() -> None:
    made = MultiHeadAttention.from_module(nn.MultiheadAttention(E, H, device="meta"))
    assert {x.device.type for x in made.parameters()} == {"meta"}


def test_subclasses_make_themselves() -> None:
    class Mine(MultiHeadAttention):
        pass

    theirs = nn.MultiheadAttention(E, H)
    assert type(Mine.from_module(theirs)) is Mine
    assert type(Mine.from_state_dict(theirs.state_dict(), "torch", num_heads=H)) is Mine


def test_one_attention_of_a_file(tmp_path: Path) -> None:
    model = randomized(nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 7, batch_first=True), 2)).eval()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    theirs = model.layers[1].self_attn
    x = torch.randn(B, T, E)
    for prefix in ("layers.1.self_attn", "layers.1.self_attn."):
        made = MultiHeadAttention.from_state_dict(tmp_path / "model.safetensors", "torch", prefix=prefix, num_heads=H)
        torch.testing.assert_close(made(x), theirs(x, x, x)[0])
    assert set(made.to_state_dict("torch", prefix="layers.1.self_attn")) <= set(model.state_dict())


def test_one_attention_of_several_files(tmp_path: Path) -> None:
    """An index says which file holds which key; those that hold nothing of it need not be there."""
    state = {f"a.{key}": x for key, x in randomized(layout_modules.WQ(E, H)).state_dict().items()}
    files = {key: f"{n % 2}.safetensors" for n, key in enumerate(state)} | {"b.weight": "2.safetensors"}
    for file in ("0.safetensors", "1.safetensors"):
        save_file({key: x for key, x in state.items() if files[key] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    made = MultiHeadAttention.from_state_dict(index, "w_q", prefix="a", num_heads=H)
    torch.testing.assert_close(made.to_state_dict("w_q", prefix="a"), state, rtol=0, atol=0)


def test_the_index_decides_which_file_a_key_is_from(tmp_path: Path) -> None:
    state = randomized(layout_modules.WQ(E, H)).state_dict()
    save_file(state, tmp_path / "0.safetensors")
    save_file({key: torch.zeros_like(x) for key, x in state.items()}, tmp_path / "1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    files = {key: "1.safetensors" if key == "w_o.bias" else "0.safetensors" for key in state}
    index.write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    made = MultiHeadAttention.from_state_dict(index, "w_q", num_heads=H)
    state["w_o.bias"] = torch.zeros(E)
    torch.testing.assert_close(made.to_state_dict("w_q"), state, rtol=0, atol=0)


def test_a_key_that_an_index_does_not_name_is_in_one_file(tmp_path: Path) -> None:
    state = randomized(layout_modules.WQ(E, H)).state_dict()
    bias = {"w_o.bias": state.pop("w_o.bias")}
    files = {key: f"{n % 2}.safetensors" for n, key in enumerate(state)}
    for file in ("0.safetensors", "1.safetensors"):
        save_file({key: x for key, x in state.items() if files[key] == file} | bias, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": files}), encoding="utf-8")
    with pytest.raises(
        ValueError,
        match=r"model\.safetensors\.index\.json does not list w_o\.bias, which more than one of its files "
        "contains",
    ):
        MultiHeadAttention.from_state_dict(index, "w_q", num_heads=H)


def test_what_an_index_names_must_be_there(tmp_path: Path) -> None:
    """Biases are optional, and would be taken for what the module never had."""
    state = layout_modules.WQ(E, H).state_dict()
    save_file({key: x for key, x in state.items() if "bias" not in key}, tmp_path / "0.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(state, "0.safetensors")}), encoding="utf-8")
    message = (
        r"model\.safetensors\.index\.json lists w_q\.bias in 0\.safetensors, w_k\.bias in "
        r"0\.safetensors, w_v\.bias in 0\.safetensors, w_o\.bias"
    )
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention.from_state_dict(index, "w_q", num_heads=H)


@pytest.mark.parametrize("file", ["../0.safetensors", "/0.safetensors", "a/../../0.safetensors", "..\\0.safetensors"])
def test_an_index_names_no_file_outside_its_folder(file: str, tmp_path: Path) -> None:
    state = layout_modules.WQ(E, H).state_dict()
    save_file(state, tmp_path / "0.safetensors")
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.parent.mkdir()
    index.write_text(json.dumps({"weight_map": dict.fromkeys(state, file)}), encoding="utf-8")
    message = re.escape(f"index.json: weight_map: expected a file in the same folder, got {file!r}")
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention.from_state_dict(index, "w_q", num_heads=H)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    torch.save(nn.MultiheadAttention(E, H).state_dict(), tmp_path / "model.pt")
    with pytest.raises(
        ValueError,
        match=r"model\.pt is not a safetensors file (.*); "
        "headscope does not read pickles",
    ):
        MultiHeadAttention.from_state_dict(tmp_path / "model.pt", "torch", num_heads=H)


# ---------------------------------------------------------------- what does not fit


def test_known_layouts_say_whose_they_are() -> None:
    assert {"torch", "bert", "gpt2", "llama", "t5", "timm", "keras"} <= set(layouts.known())
    assert all(layouts.known().values())


def test_the_page_lists_every_layout() -> None:
    page = (DOCS / "guides" / "load_weights.md").read_text(encoding="utf-8")
    table = page[page.index("## Supported layouts") : page.index("## What differs from the original")]
    assert [name for name in layouts.known() if f"`{name}`" not in table] == []


STATE = layout_modules.WQ(E, H).state_dict()


@pytest.mark.parametrize(
    ("state", "options", "message"),
    [
        (STATE, {"layout": "w"}, r"layout: got 'w', expected one of torch, .*, keras"),
        (STATE, {"layout": "w_q"}, "num_heads: missing; the weights do not contain it, and layout 'w_q' requires it"),
        (STATE, {"layout": "w_q", "num_heads": 5}, "w_q.weight: has 12 rows of q, expected a multiple of num_heads 5"),
        (STATE, {"layout": "torch"}, "does not fit layout 'torch': missing in_proj_weight, out_proj.weight; unexpected "
         "w_k.bias, .* and 2 more; these keys match w_q"),
        ({"a": STATE["w_q.bias"]}, {"layout": "w_q"}, "missing w_q.weight, .*; unexpected a; known layouts: torch, "),
        ({}, {"layout": "w_q"}, "state: is empty, expected a mapping of tensors"),
        (STATE, {"layout": "w_q", "prefix": "layers.0"}, "prefix: no key begins with 'layers.0.'; w_q.weight, w_q.bi"),
        ({**STATE, "w_k.weight": torch.zeros(7, 12)}, {"layout": "w_q", "num_heads": H},
         r"w_k\.weight: has 7 rows of k, expected head_dim 6 times a divisor of num_heads 2"),
        ({**STATE, "w_q.weight": torch.zeros(0, 12)}, {"layout": "w_q", "num_heads": H},
         r"w_k\.weight: has 12 rows of k, expected head_dim 0 times a divisor of num_heads 2"),
        ({**STATE, "w_k.weight": torch.zeros(6, 12)}, {"layout": "w_q", "num_heads": H},
         r"w_k\.weight: has 6 rows of k, expected 2 heads of 6, as q has; got 1"),
        ({**STATE, "w_v.weight": torch.zeros(7, 12)}, {"layout": "w_q", "num_heads": H},
         r"w_v\.weight: has 7 rows of v, expected a multiple of the 2 heads of k"),
        ({**STATE, "w_o.weight": torch.zeros(12, 11)}, {"layout": "w_q", "num_heads": H},
         r"w_o.weight: holds out.weight as \[12, 11\], expected \[12, 12\]"),
        ({**STATE, "w_q.bias": torch.zeros(11)}, {"layout": "w_q", "num_heads": H},
         r"w_q.bias: holds q.bias as \[11\], expected \[12\]"),
        ({**STATE, "w_q.weight": torch.zeros(12)}, {"layout": "w_q", "num_heads": H},
         r"w_q.weight: has 1 axes, expected 2; it is \[12\]"),
        ({**STATE, "w_q.weight": STATE["w_q.weight"].half()}, {"layout": "w_q", "num_heads": H},
         "w_q.bias: is float32 on cpu, expected float16 on cpu, as w_q.weight"),
        (STATE, {"layout": "w_q", "num_heads": H, "gate": True},
         "options: gate_proj.weight, gate_proj.bias require weights that layout 'w_q' does not have"),
        ({"qkv.weight": torch.zeros(35, 12), "proj.weight": torch.zeros(12, 12), "proj.bias": torch.zeros(12)},
         {"layout": "timm"}, r"qkv.weight: holds q.weight, k.weight, v.weight, but its 35 rows are not divisible by 3"),
        ({"qkv.weight": torch.zeros(36, 12), "proj.weight": torch.zeros(12, 12), "proj.bias": torch.zeros(12),
          "q_norm.weight": torch.ones(6), "k_norm.weight": torch.ones(6)},
         {"layout": "timm", "num_heads": H}, "the weights do not show .* q_norm .*; pass \"rms\" or \"layer\""),
    ],
)  # fmt: skip
def test_states_that_do_not_fit(state: dict[str, Tensor], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention.from_state_dict(state, **options)


def test_states_of_the_wrong_kind() -> None:
    with pytest.raises(TypeError, match="state: got int, expected a mapping of tensors, or the path of a safetensors"):
        MultiHeadAttention.from_state_dict(3, "torch")  # pyright: ignore[reportArgumentType]
    integers = {key: x.long() for key, x in STATE.items()}
    with pytest.raises(TypeError, match=r"w_q.weight: dtype is int64, expected float32, bfloat16"):
        MultiHeadAttention.from_state_dict(integers, "w_q", num_heads=H)


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v, self.project = (nn.Linear(E, E) for _ in range(4))


class Ambiguous(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(E, E) for _ in range(4))
        self.n_heads = H


def test_modules_that_are_not_known() -> None:
    wanted = (
        r"module: no layout is known for Unknown; the closest is 'w_q': missing w_o\.weight; unexpected "
        r"project\.bias, project\.weight;"
    )
    with pytest.raises(ValueError, match=wanted):
        MultiHeadAttention.from_module(Unknown())
    with pytest.raises(TypeError, match=r"module: got int, expected a torch.nn.Module"):
        MultiHeadAttention.from_module(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"module: is already a headscope.MultiHeadAttention"):
        MultiHeadAttention.from_module(MultiHeadAttention(E, H))


def test_a_forward_of_its_own_is_refused() -> None:
    class Doubled(nn.MultiheadAttention):
        def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(2 * query, *args, **kwargs)

    class Plain(nn.MultiheadAttention):
        pass

    with pytest.raises(
        ValueError,
        match="module: Doubled is a MultiheadAttention with a forward of its own, so its output may depend "
        "on more than its weights; if it",
    ):
        MultiHeadAttention.from_module(Doubled(E, H))
    for made in (MultiHeadAttention.from_module(Doubled(E, H), "torch"), MultiHeadAttention.from_module(Plain(E, H))):
        assert made.num_heads == H


class Tripled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 3 * super().forward(input)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m, "forward", m.forward), "WQ has a forward set on the instance"),
        (lambda m: setattr(m.w_o, "forward", m.w_o.forward), "w_o has a forward set on the instance"),
        (lambda m: setattr(m, "w_k", Tripled(E, E)), "w_k is a Tripled, whose forward differs from that of a Linear"),
        (lambda m: m.w_v.register_forward_hook(lambda *_: None), "w_v has hooks"),
        (lambda m: m.w_q.register_forward_pre_hook(lambda *_: None), "w_q has hooks"),
    ],
)
def test_what_runs_beside_the_weights_is_refused(change: Any, message: str) -> None:
    """Unless the caller says which layout it is."""
    theirs = layout_modules.WQ(E, H)
    change(theirs)
    with pytest.raises(ValueError, match=f"module: {message}, so its output may .*; if it does not, pass layout='w_q'"):
        MultiHeadAttention.from_module(theirs)
    assert_same_state(MultiHeadAttention.from_module(theirs, "w_q"), "w_q", theirs.state_dict())


def test_hooks_of_the_module_itself_are_around_its_attention() -> None:
    """Those of transformers stay on a module that was asked for its weights."""
    theirs = layout_modules.WQ(E, H)
    x = torch.randn(B, T, E)
    wanted = theirs(x)
    theirs.register_forward_hook(lambda *_: torch.zeros(()))
    torch.testing.assert_close(MultiHeadAttention.from_module(theirs)(x), wanted)


def test_linears_that_inherit_their_forward_are_linears() -> None:
    class Named(nn.Linear):
        pass

    theirs = layout_modules.WQ(E, H)
    theirs.w_q = Named(E, E)
    x = torch.randn(B, T, E)
    torch.testing.assert_close(MultiHeadAttention.from_module(theirs)(x), theirs(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_modules_are_known_by_their_keys() -> None:
    theirs = torch.jit.script(nn.MultiheadAttention(E, H, batch_first=True))
    with pytest.raises(
        ValueError,
        match="module: no layout is known for RecursiveScriptModule; its keys match layout torch; if its "
        "forward matches too, pass",
    ):
        MultiHeadAttention.from_module(theirs)
    x = torch.randn(B, T, E)
    torch.testing.assert_close(MultiHeadAttention.from_module(theirs, "torch")(x), theirs(x, x, x)[0])


def test_a_layout_may_be_named() -> None:
    """Where keys leave a doubt, the caller says; the number of heads is found under its usual names."""
    theirs = Ambiguous()
    with pytest.raises(
        ValueError,
        match="module: no layout is known for Ambiguous; its keys match layout clip, bart; if its forward "
        "matches too, pass layout='clip' or 'bart'",
    ):
        MultiHeadAttention.from_module(theirs)
    made = MultiHeadAttention.from_module(theirs, "clip")
    assert made.num_heads == H
    assert_same_state(made, "clip", theirs.state_dict())


@pytest.mark.parametrize(
    ("options", "layout", "message"),
    [
        ({"sinks": True}, "bert", "module: has sinks, which layout 'bert' does not have; .* without sinks"),
        ({"gate": True, "bias": False}, "t5", "module: has gate_proj.weight, which layout 't5' does not"),
        ({}, "tokeys", "module: has q.bias, k.bias, v.bias, which layout 'tokeys' does not have"),
        ({"bias": False, "out_bias": True}, "tokeys", "module: scale is 0.408248; a module of layout 'tokeys' has 0.2"),
        ({"kv_heads": 1}, "torch", "module: kv_heads is 1; layout 'torch' has one key/value head for each query head"),
        ({"v_head_dim": 3}, "timm", "module: v_head_dim is 3; a module of layout 'timm' has 6"),
        ({"softcap": 5.0}, "torch", "module: softcap is 5.0, which a module of layout 'torch' does not have"),
        ({}, "qwen3", "module: lacks q_norm.weight, k_norm.weight, which layout 'qwen3' requires"),
        ({"position_bias": ALiBi(H)}, "torch", "module: has position_bias ALiBi, which a module of layout 'torch'"),
        ({"qk_norm": "rms_all"}, "timm", "module: qk_norm is 'rms_all'; a module of layout 'timm' has a norm for each"),
        ({"qk_norm": "rms_all"}, "qwen3", "module: qk_norm is 'rms_all'; a module of layout 'qwen3' has a norm"),
        ({"head_dim": 4}, "torch", "module: head_dim is 4; a module of layout 'torch' has 6"),
        ({"kdim": 7}, "llama", "module: kdim is 7; a module of layout 'llama' has 12"),
        ({"kdim": 7}, "bert", "module: kdim is 7; a module of layout 'bert' has 12"),
        ({"kdim": 7, "bias": False, "scale": 1.0}, "t5", "module: kdim is 7; a module of layout 't5' has 12"),
        ({"head_dim": 4}, "torch_separate", "module: head_dim is 4; a module of layout 'torch_separate' has 6"),
        ({"v_head_dim": 3}, "llama", "module: v_head_dim is 3; a module of layout 'llama' has 6"),
    ],
)  # fmt: skip
def test_what_a_layout_cannot_express(options: dict[str, Any], layout: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(E, H, **options).to_state_dict(layout)


@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_sinks_are_never_dropped_by_an_export(layout: str) -> None:
    """Zeros are add_zero_attn=True of torch's module, where the layout is torch's; any other sink has no place."""
    made = MultiHeadAttention(E, H, sinks=True)
    assert made.sinks is not None
    for value in (0.0, 1.5, -torch.inf):
        with torch.no_grad():
            made.sinks.zero_()
            made.sinks[-1] = value
        if value == 0 and "sinks" in layouts.LAYOUTS[layout].more:
            assert not any("sinks" in key for key in made.to_state_dict(layout))
            continue
        with pytest.raises(ValueError, match=f"module: has .*sinks, which layout '{layout}' does not have"):
            made.to_state_dict(layout)


def test_what_is_more_than_a_linear_is_not_written() -> None:
    made = MultiHeadAttention(E, H)
    made.out_proj = nn.Sequential(made.out_proj, nn.ReLU())  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValueError, match=r"module: out_proj is a Sequential, expected nn\.Linear"):
        made.to_state_dict("torch")
    made.out_proj = Tripled(E, E)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(
        ValueError, match=r"module: out_proj is a Tripled, expected nn\.Linear, or a module with its forward"
    ):
        made.to_state_dict("torch")


# ---------------------------------------------------------------- what must stay as it is


def test_what_is_frozen_stays_frozen_and_the_rest_does_not() -> None:
    theirs = nn.MultiheadAttention(E, H, add_bias_kv=True)
    theirs.in_proj_weight.requires_grad_(False)
    theirs.out_proj.bias.requires_grad_(False)
    made = MultiHeadAttention.from_module(theirs)
    frozen = {name for name, parameter in made.named_parameters() if not parameter.requires_grad}
    assert frozen == {"qkv_proj.weight", "out_proj.bias"}
    partly = layout_modules.QKV(E, H)
    partly.Q.weight.requires_grad_(False)
    assert MultiHeadAttention.from_module(partly, num_heads=H).qkv_proj.weight.requires_grad


def test_a_table_that_is_passed_in_is_left_alone() -> None:
    table = RelativeBias(H, T5Buckets(8, 10))
    nn.init.normal_(table.weight)
    weight, before = table.weight, table.weight.detach().clone()
    state = {f"{name}.weight": torch.randn(E, E) for name in "qkvo"}
    made = MultiHeadAttention.from_state_dict(state, "t5", num_heads=H, position_bias=table)
    assert made.position_bias is table
    assert table.weight is weight
    torch.testing.assert_close(table.weight.detach(), before, rtol=0, atol=0)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(E, E, bias=False) for _ in range(4))

    frozen = Layer().requires_grad_(False)
    made = MultiHeadAttention.from_module(frozen, "t5", num_heads=H, position_bias=table)
    assert table.weight.requires_grad
    assert [name for name, parameter in made.named_parameters() if parameter.requires_grad] == ["position_bias.weight"]


# ---------------------------------------------------------------- states that do not fit


@pytest.mark.parametrize(
    ("position_bias", "message"),
    [
        (
            RelativeBias(H, T5Buckets(8, 10)),
            r"position_bias: expected none, because the state has relative_attention_bias\.weight; got a "
            "RelativeBias",
        ),
        (
            T5Buckets(4, 10),
            r"relative_attention_bias.weight: holds position_bias.weight as \[8, 2\], expected \[4, 2\]",
        ),
        (
            ALiBi(H),
            r"relative_attention_bias\.weight: holds position_bias\.weight as \[8, 2\], expected none, "
            "because no option adds it",
        ),
        (
            None,
            r"relative_attention_bias\.weight: holds position_bias\.weight as \[8, 2\], expected none, "
            "because no option adds it",
        ),
    ],
)
def test_a_table_among_the_weights_is_not_thrown_away(position_bias: Any, message: str) -> None:
    state = {f"{name}.weight": torch.randn(E, E) for name in "qkvo"}
    state["relative_attention_bias.weight"] = torch.randn(8, H)
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention.from_state_dict(state, "t5", num_heads=H, position_bias=position_bias)


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"bias_v": None}, {}, "options: bias_v requires weights that layout 'torch' does not have"),
        ({"bias_k": None}, {}, "options: bias_k requires weights that layout 'torch' does not have"),
        ({"bias_k": (1, 1, 7)}, {}, r"bias_k: holds bias_k as \[7\], expected \[12\]"),
        ({"bias_v": (1, 1, 24)}, {}, r"bias_v: holds bias_v as \[24\], expected \[12\]"),
        ({}, {"bias_kv": False}, r"bias_kv: expected none, because the weights determine it \(True\); got False"),
    ],
)
def test_keys_of_its_own_that_contradict_each_other(changed: Any, options: dict[str, Any], message: str) -> None:
    state = nn.MultiheadAttention(E, H, add_bias_kv=True).state_dict()
    state |= {key: torch.zeros(shape) for key, shape in changed.items() if shape}
    state = {key: x for key, x in state.items() if changed.get(key, ()) is not None}
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention.from_state_dict(state, "torch", num_heads=H, **options)


@pytest.mark.parametrize(
    ("left_out", "options", "message"),
    [
        ("q_norm", {}, r"options: q_norm\.weight, q_norm\.bias require weights that layout 'timm' does not have"),
        ("q_norm.weight", {}, r"options: q_norm\.weight requires weights that layout 'timm' does not have"),
        (
            "none",
            {"qk_norm": "rms"},
            r"q_norm\.bias: holds q_norm\.bias as \[6\], expected none, because no option adds it",
        ),
        (
            "none",
            {"qk_norm": None},
            r"q_norm\.weight: holds q_norm\.weight as \[6\], expected none, because no option adds it",
        ),
        ("none", {"qk_norm": "rms_all"}, r"q_norm.weight: holds q_norm.weight as \[6\], expected \[12\]"),
    ],
)
def test_norms_that_do_not_fit(left_out: str, options: dict[str, Any], message: str) -> None:
    state = layout_modules.Timm(E, H, norm=nn.LayerNorm).state_dict()
    state = {key: x for key, x in state.items() if not key.startswith(left_out)}
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention.from_state_dict(state, "timm", num_heads=H, **options)


def test_sinks_need_weights_where_the_layout_has_no_zero_attention() -> None:
    with pytest.raises(ValueError, match="options: sinks requires weights that layout 'w_q' does not have"):
        MultiHeadAttention.from_state_dict(STATE, "w_q", num_heads=H, sinks=True)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (
            torch.zeros(E, E).to(torch.float8_e4m3fn),
            TypeError,
            "dtype is float8_e4m3fn, expected float32, bfloat16, flo",
        ),
        (torch.zeros(E, E).to_sparse(), TypeError, r"layout is torch.sparse_coo, expected an ordinary tensor"),
        (
            torch.nested.nested_tensor([torch.zeros(E, E)], layout=torch.jagged),
            TypeError,
            "is a nested tensor of layout",
        ),
        (
            nn.UninitializedParameter(),
            ValueError,
            "is uninitialised, expected weights; call the lazy module once first",
        ),
        (np.full((E, E), "a"), TypeError, "got an array of <U1, expected a tensor or an array of numbers"),
    ],
)
def test_tensors_that_are_no_weights(weight: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=rf"w_q\.weight: {message}"):
        MultiHeadAttention.from_state_dict({**STATE, "w_q.weight": weight}, "w_q", num_heads=H)


def test_arrays_of_any_order_are_read() -> None:
    """Of bytes, and of rows: those that another tool wrote, or that were turned round."""
    state = MultiHeadAttention(E, H).to_state_dict("w_q")
    arrays = {key: x.numpy().astype(">f4")[::-1] for key, x in state.items()}
    made = MultiHeadAttention.from_state_dict(arrays, "w_q", num_heads=H)
    assert_same_state(made, "w_q", {key: x.flip(0) for key, x in state.items()})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_heads": 2.0}, TypeError, "num_heads: got float, expected a whole number"),
        ({"num_heads": "2"}, TypeError, "num_heads: got str, expected a whole number"),
        ({"num_heads": None}, TypeError, "num_heads: got NoneType, expected a whole number"),
        ({"num_heads": 0}, ValueError, "num_heads: got 0, expected a whole number from 1"),
        ({"num_heads": H, "prefix": 3}, TypeError, "prefix: got int, expected the prefix of the keys, as a string"),
        (
            {"num_heads": H, "prefix": None},
            TypeError,
            "prefix: got NoneType, expected the prefix of the keys, as a string",
        ),
    ],
)
def test_options_of_the_wrong_kind(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MultiHeadAttention.from_state_dict(STATE, "w_q", **options)


def test_arrays_are_the_hosts_whatever_the_default_device() -> None:
    state = MultiHeadAttention(E, H).to_state_dict("torch")
    with torch.device("meta"):
        made = MultiHeadAttention.from_state_dict({key: x.numpy() for key, x in state.items()}, "torch", num_heads=H)
    assert_same_state(made, "torch", state)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"kv_heads": 1}, r"kv_heads: expected none, because the weights determine it \(2\); got 1"),
        ({"head_dim": 3}, r"head_dim: expected none, because the weights determine it \(6\); got 3"),
        ({"bias": True}, r"bias: expected none, because the weights determine it \(\('q', 'k', 'v'\)\); got True"),
        (
            {"dtype": torch.float64},
            r"dtype: expected none, because the weights determine it \(torch\.float32\); got torch\.float64",
        ),
        (
            {"device": "cpu"},
            r"device: expected none, because the weights determine it \(device\(type='cpu'\)\); got 'cpu'",
        ),
    ],
)
def test_what_the_weights_say_is_no_option(option: dict[str, Any], message: str) -> None:
    state = MultiHeadAttention(E, H).to_state_dict("torch")
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention.from_state_dict(state, "torch", num_heads=H, **option)


def test_states_of_another_kind_are_named(tmp_path: Path) -> None:
    state: dict[Any, Any] = dict(MultiHeadAttention(E, H).to_state_dict("w_q"))

    def refused(state: Any, error: type[Exception], message: str, layout: Any = "w_q") -> None:
        with pytest.raises(error, match=message):
            MultiHeadAttention.from_state_dict(state, layout, num_heads=H)

    refused(tmp_path, ValueError, "is a directory, expected a safetensors file in it")
    refused(
        "/dev/null", ValueError, r"state: /dev/null is not a file, expected a safetensors file, or its \.index\.json"
    )
    refused({**state, 3: torch.zeros(1)}, TypeError, "state: has the key 3 of int, expected strings")
    refused({**state, "w_q.weight": None}, TypeError, "w_q.weight: got NoneType, expected a tensor or an array")
    refused(state, TypeError, "layout: got list, expected a name", layout=["llama"])
    index = tmp_path / "model.safetensors.index.json"
    for text, message in {
        "{": "is not JSON", "[]": 'has no "weight_map"', '{"metadata": {}}': 'has no "weight_map"',
        '{"weight_map": ["a"]}': 'has no "weight_map"', '{"weight_map": {"a": 1}}': 'has no "weight_map"',
        "[" * 100_000: "is not JSON", json.dumps({"weight_map": {"a": index.name}}): "is not a safetensors file",
    }.items():  # fmt: skip
        index.write_text(text)
        refused(index, ValueError, message)

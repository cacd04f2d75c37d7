"""Heads as things one can act on: scaled, ablated, pruned, and how much a loss needs them; exact checks throughout."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import headscope
from headscope import MultiHeadAttention, ablate, head_importance, watch
from headscope.masks import causal
from headscope.positions import ALiBi, RelativeBias, Rotary, T5Buckets
from headscope.watching import WatchError
from support.forking import run_program
from support.watched_small import Alone, Attention, Small, input_of

SCALES = (0.0, 0.3, -2.0)


def double(model: nn.Module) -> Any:
    """In float64, in eval, every parameter a random one."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def cut(model: Any, path: str, heads: list[int], count: int, scale: float, conv: bool = False) -> Any:
    """A copy whose output projection multiplies what it takes of these heads."""
    changed = copy.deepcopy(model)
    weight: Tensor = changed.get_submodule(path).weight.data
    columns = (weight if conv else weight.T).unflatten(0, (count, -1))  # [H, Dv, E], a view
    columns[heads] *= scale
    return changed


class Stack(nn.Module):
    """torch's encoder layer, whose fast path, for even numbers of heads, computes all of it at once."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 4, 7, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], str, str, int]] = {  # model, layer, output projection, heads
    "SDPA": (Small, "plain", "plain.out", 3),
    "headscope": (Small, "ours", "ours.out_proj", 5),
    "nn.MultiheadAttention": (Small, "theirs", "theirs.out_proj", 3),
    "encoder": (Stack, "encoder.layers.1.self_attn", "encoder.layers.1.self_attn.out_proj", 4),
    "nn.MultiheadAttention, fast": (Alone, "attention", "attention.out_proj", 2),
}


WIDTHS: dict[Any, int] = {Stack: 12, Alone: 16}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_scaling_a_head_is_scaling_its_slice_of_the_output_projection(name: str, gradients: bool, scale: float) -> None:
    make, layer, projection, count = MODELS[name]
    model = double(make()).requires_grad_(gradients)  # without, torch takes its fast path
    x = input_of(model, WIDTHS.get(make, 15))
    before = model(x)
    with ablate(model, {layer: [0, count - 1]}, scale):
        out = model(x)
    torch.testing.assert_close(out, cut(model, projection, [0, count - 1], count, scale)(x))
    assert not torch.allclose(out, before)
    torch.testing.assert_close(model(x), before, rtol=0, atol=0)


def families() -> Iterator[Any]:
    for implementation in ("sdpa", "eager", "headscope"):
        yield pytest.param("gpt2", "h.1.attn", "h.1.attn.c_proj", implementation, id=f"gpt2 {implementation}")
        yield pytest.param("llama", "layers.1.self_attn", "layers.1.self_attn.o_proj", implementation)
    yield pytest.param("bert", "encoder.layer.0", "encoder.layer.0.attention.output.dense", "sdpa", id="bert")
    yield pytest.param("t5", "encoder.block.0", "encoder.block.0.layer.0.SelfAttention.o", "eager", id="t5")


def family(name: str, implementation: str) -> Any:
    transformers = pytest.importorskip("transformers")
    if implementation == "headscope":
        headscope.watching.register_transformers()  # pyright: ignore[reportAttributeAccessIssue]
    said: dict[str, Any] = {"vocab_size": 31, "attn_implementation": implementation}
    if name == "gpt2":
        config: Any = transformers.GPT2Config(n_embd=12, n_layer=2, n_head=3, n_positions=16, **said)
    elif name == "t5":
        config = transformers.T5Config(d_model=12, d_kv=4, d_ff=8, num_layers=1, num_heads=3, **said)
    else:
        kind = transformers.LlamaConfig if name == "llama" else transformers.BertConfig
        more = {"num_key_value_heads": 1} if name == "llama" else {}
        config = kind(
            hidden_size=12, intermediate_size=8, num_hidden_layers=2, num_attention_heads=3,
            max_position_embeddings=16, **more, **said,
        )  # fmt: skip
    return double(transformers.AutoModel.from_config(config))


@pytest.mark.parametrize(("name", "layer", "projection", "implementation"), [*families()])
@torch.no_grad()
def test_heads_of_hugging_face_models(name: str, layer: str, projection: str, implementation: str) -> None:
    model, ids = family(name, implementation), torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
    said = {"decoder_input_ids": ids} if name == "t5" else {}
    with ablate(model, {layer: 1}):
        out = model(ids, **said)[0]
    torch.testing.assert_close(out, cut(model, projection, [1], 3, 0.0, conv=name == "gpt2")(ids, **said)[0])


def test_eager_models_are_reached_whatever_else_has_been_imported() -> None:
    """In a new process, for here other tests have imported watch."""
    code = """
import torch, transformers, headscope
said = dict(n_embd=12, n_layer=2, n_head=3, n_positions=16, vocab_size=31, attn_implementation="eager")
model, ids = transformers.GPT2Model(transformers.GPT2Config(**said)).eval(), torch.tensor([[3, 1, 4]])
before = model(ids)[0]
with headscope.ablate(model, {"h.1.attn": 1}):
    assert not torch.allclose(model(ids)[0], before)
print(*headscope.head_importance(model, lambda model: model(ids)[0].square().sum((1, 2))))
"""
    done = run_program(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["h.0.attn", "h.1.attn"]


def test_blocks_nest_and_patterns_take_all_that_is_inside() -> None:
    model = double(Stack())
    x = input_of(model, 12)
    first, second = (f"encoder.layers.{n}.self_attn.out_proj" for n in range(2))
    wanted = cut(cut(cut(model, first, [1], 4, 0.5), second, [1], 4, 0.5), second, [0, 1, 2, 3], 4, 3.0)
    with ablate(model, {"encoder.layers.*": [1]}, 0.5), ablate(model, {"encoder.layers.1": "all"}, 3.0):
        torch.testing.assert_close(model(x), wanted(x))


def test_a_layer_that_several_patterns_fit_loses_the_heads_of_each() -> None:
    model = double(Stack())
    x = input_of(model, 12)
    first, second = (f"encoder.layers.{n}.self_attn.out_proj" for n in range(2))
    both = cut(cut(model, first, [1, 2], 4, 0.5), second, [1], 4, 0.5)
    with ablate(model, {"encoder.layers.*": [1], "encoder.layers.0": [2]}, 0.5):
        torch.testing.assert_close(model(x), both(x))
    all_of_one = cut(cut(model, first, [0, 1, 2, 3], 4, 0.5), second, [1], 4, 0.5)
    for heads in (
        {"encoder.layers.0": "all", "encoder.layers.*": [1]},
        {"encoder.layers.*": [1], "encoder.layers.0": "all"},
    ):
        with ablate(model, heads, 0.5):
            torch.testing.assert_close(model(x), all_of_one(x))


def test_watching_beside_it_sees_the_weights_as_they_are() -> None:
    model = double(Small())
    x = input_of(model)
    with watch(model, layers="plain") as before:
        model(x)
    with watch(model, layers="plain") as seen, ablate(model, {"plain": "all"}):
        model(x)
    assert seen["plain", 1, "entropy"].mean == before["plain", 1, "entropy"].mean  # pyright: ignore[reportAttributeAccessIssue]


def test_gradients_are_those_of_the_ablated_model_also_under_checkpointing() -> None:
    model = double(Attention())
    x = torch.randn(2, 7, 15, dtype=torch.float64, requires_grad=True)
    changed = cut(model, "out", [1], 3, 0.3)
    wanted = torch.autograd.grad(changed(x).square().sum(), [x, changed.qkv.weight])
    for reentrant in (None, False, True):
        with ablate(model, {"Attention": [1]}, 0.3):
            out = model(x) if reentrant is None else checkpoint(model, x, use_reentrant=reentrant)
            out.square().sum().backward()
        torch.testing.assert_close((x.grad, model.qkv.weight.grad), wanted)
        x.grad = model.qkv.weight.grad = model.qkv.bias.grad = None


@pytest.mark.parametrize("project", [False, True])
def test_importance_names_layers_in_reentrant_checkpoints(project: bool) -> None:
    """torch raises an error of its own, none, or disables gradients, by where the checkpoint stands."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.attention = nn.Linear(15, 15), Attention()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.attention, self.first(x) if project else x, use_reentrant=True)

    model, x = double(Block()), torch.randn(2, 7, 15, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that no input requires a gradient
        with pytest.raises(ValueError, match=r"loss_fn: no gradient reaches the heads of attention: .*use_reentrant=F"):
            head_importance(model, lambda model: model(x).square().sum())
        head_importance(model, lambda model: model(x).square().sum(), method="ablation")


def test_a_block_can_be_trained_in_after_a_pass_in_inference_mode() -> None:
    model = double(Attention())
    x = input_of(model)
    with ablate(model, {"Attention": [1]}):
        with torch.inference_mode():
            before = model(x)
        out = model(x)
        out.sum().backward()
    torch.testing.assert_close(out, before.clone())
    assert model.qkv.weight.grad is not None


def test_the_default_device_does_not_matter() -> None:
    model = double(Small())
    attention = double(MultiHeadAttention(24, 6, kv_heads=3, sinks=True, position_bias=T5Buckets(6, 8)))
    x, wide = input_of(model), torch.randn(2, 5, 24, dtype=torch.float64)
    wanted = [head_importance(model, loss_of(x), method=method) for method in ("gradient", "ablation")]
    small = cut(attention, "out_proj", [0, 3, 4], 6, 0.0)(wide)
    out = cut(model, "plain.out", [1], 3, 0.0)(x)
    with torch.device("meta"):
        found = [head_importance(model, loss_of(x), method=method) for method in ("gradient", "ablation")]
        with ablate(model, {"plain": 1}):
            ablated = model(x)
        pruned = attention.prune_heads([0, 3, 4])(wide)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close((ablated, pruned), (out, small))


class ProductAttention(nn.Module):
    """Attention by matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Linear(15, 15)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ self.v(x)


def test_what_cannot_be_done_is_named() -> None:
    model = Small()
    x = input_of(model)

    def refused(error: type[Exception], says: str, model: Any, heads: Any, scale: Any = 0.0, run: bool = True) -> None:
        before = model(x) if isinstance(model, nn.Module) else None
        with pytest.raises(error, match=says), ablate(model, heads, scale):
            model(x) if run else None
        torch.testing.assert_close(model(x) if before is not None else None, before, rtol=0, atol=0)

    refused(WatchError, "ablate: layer plain has no head 3, expected numbers from 0 to 2", model, {"plain": [0, 3]})
    refused(WatchError, "ablate: 'plain': no attention call of it was observed", model, {"plain": [0]}, run=False)
    refused(
        WatchError,
        r"heads: 1 of the attention layers that ran could not be reached: ProductAttention\.",
        ProductAttention(),
        {"*": 0},
    )
    refused(ValueError, "heads: 'plane' does not match any module of the model", model, {"plane": [0]})
    refused(ValueError, "heads: got none, expected at least one layer", model, {})
    refused(ValueError, "heads: got none for 'plain'", model, {"plain": []})
    refused(ValueError, "heads: got -1 for 'plain', expected numbers from 0", model, {"plain": -1})
    refused(TypeError, "heads: got float for 'plain', expected whole numbers", model, {"plain": [0.0]})
    refused(TypeError, "heads: got 'some' for 'plain', expected a number", model, {"plain": "some"})
    refused(TypeError, "heads: got list, expected a mapping", model, ["plain"])
    refused(TypeError, "scale: got str, expected a number", model, {"plain": 0}, "0")
    refused(ValueError, "scale: got inf, expected a finite number", model, {"plain": 0}, float("inf"))
    refused(TypeError, "model: got function, expected a torch.nn.Module", F.relu, {"plain": 0})
    with pytest.raises(WatchError, match="heads: the model, or a part of it, is compiled"):
        ablate(torch.compile(Small(), backend="eager"), {"*": 0}).__enter__()  # pyright: ignore[reportArgumentType]
    used = ablate(model, {"plain": 0})
    with used:
        model(x)
    with pytest.raises(WatchError, match="ablate: was already used"), used:
        pass


# ---------------------------------------------------------------- importance


def loss_of(x: Tensor, each: bool = False) -> Callable[[Any], Tensor]:
    def loss(model: Any) -> Tensor:
        squares = model(x).square().sum((1, 2))  # [B]
        return squares if each else squares.mean()

    return loss


@pytest.mark.parametrize("each", [False, True])
def test_the_gradient_is_the_finite_difference(each: bool) -> None:
    model = double(Small())
    loss_fn, step = loss_of(input_of(model), each), 1e-5
    found = head_importance(model, loss_fn)
    assert {name: len(values) for name, values in found.items()} == {"plain": 3, "ours": 5, "theirs": 3}
    assert list(found) == ["plain", "ours", "theirs"]
    for layer, values in found.items():
        for head, value in enumerate(values):
            ends: list[Tensor] = []
            for scale in (1 - step, 1 + step):
                with ablate(model, {layer: head}, scale), torch.no_grad():
                    ends.append(loss_fn(model))
            slope = (ends[1] - ends[0]) / (2 * step)
            torch.testing.assert_close(value, slope.abs().mean(), rtol=1e-6, atol=1e-8)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("under", [torch.no_grad, torch.inference_mode])
def test_importance_by_gradient_has_gradients_where_there_are_none(under: Any, each: bool) -> None:
    model = Small()
    loss_fn = loss_of(input_of(model), each)
    wanted = head_importance(model, loss_fn)
    with under():
        found = head_importance(model, loss_fn)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once_and_not_in_the_sum_of_the_gradient(dtype: torch.dtype) -> None:
    model, x = MultiHeadAttention(16, 4, dtype=dtype), torch.randn(4, 256, 16, dtype=dtype)
    loss_fn = loss_of(x)
    outs: list[Tensor] = []
    keep = model.out_proj.register_forward_pre_hook(lambda _, given: outs.append(given[0]))
    loss = loss_fn(model)
    (grad,) = torch.autograd.grad(loss, outs)
    (found,) = head_importance(model, loss_fn).values()
    keep.remove()
    products = (outs[0].detach() * grad.double()).unflatten(-1, (4, -1))  # [B, Q, H, Dv]
    torch.testing.assert_close(found, products.sum((0, 1, 3)).abs(), rtol=1e-5, atol=1e-6 * float(products.abs().max()))
    torch.testing.assert_close(outs[1], outs[0], rtol=0, atol=0)


def test_importance_by_ablation_is_what_the_loss_gains() -> None:
    model = double(Small())
    loss_fn = loss_of(input_of(model))
    found = head_importance(model, loss_fn, method="ablation", layers=["plain", "ours"])
    assert list(found) == ["plain", "ours"]
    for layer, values in found.items():
        for head, value in enumerate(values):
            with ablate(model, {layer: [head]}):
                torch.testing.assert_close(value, (loss_fn(model) - loss_fn_before(model, loss_fn)).detach())


def test_importance_by_ablation_takes_layers_that_run_later() -> None:
    """As in training with layer drop: the first pass leaves one out."""
    model = double(nn.ModuleDict({"a": Attention(), "b": Attention()}))
    x = input_of(model)
    passes: list[int] = []

    def loss(model: Any) -> Tensor:
        passes.append(len(passes))
        return (model["a"](x) if passes == [0] else model["a"](model["b"](x))).square().sum()

    found = head_importance(model, loss, method="ablation")
    assert {name: len(values) for name, values in found.items()} == {"a": 3, "b": 3}
    assert len(passes) == 1 + 3 + 3


def loss_fn_before(model: Any, loss_fn: Callable[[Any], Tensor]) -> Tensor:
    return loss_fn(copy.deepcopy(model))  # a copy is not ablated


def test_importance_of_a_shipped_model() -> None:
    example: Any = headscope.load_example("text")
    ids = torch.tensor([example.tokenizer.encode("def add(a, b):\n    return a + b\n")])

    def loss(model: Any) -> Tensor:
        return F.cross_entropy(model(ids)[0, :-1], ids[0, 1:])

    found = head_importance(example.model, loss, layers="layers.0")
    assert [*found] == ["layers.0.attention"]
    assert found["layers.0.attention"].isfinite().all()


def test_importance_that_cannot_be_had_is_named() -> None:
    model = double(Small())
    x = input_of(model)

    def refused(error: type[Exception], says: str, loss_fn: Any, model: Any = model, **said: Any) -> None:
        with pytest.raises(error, match=says):
            head_importance(model, loss_fn, **said)

    refused(ValueError, "method: got 'taylor', expected", loss_of(x), method="taylor")
    refused(TypeError, "loss_fn: returned float, expected a floating tensor", lambda model: loss_of(x)(model).item())
    refused(ValueError, r"loss_fn: returned a tensor \[2, 7, 15\]", lambda model: model(x))
    refused(ValueError, "loss_fn: its loss has no gradient", lambda model: loss_of(x)(model).detach())
    refused(
        WatchError, "head_importance: no attention call was observed", lambda model: torch.zeros(()), method="ablation"
    )
    partly = "loss_fn: no gradient reaches the heads of ours: they ran under torch.no_grad"

    def forgetful(model: Any) -> Tensor:
        with torch.no_grad():
            model.ours(x)
        return model.plain(x).sum()

    refused(ValueError, partly, forgetful)
    for make in (Stack, Alone):
        frozen = double(make()).requires_grad_(False)
        refused(WatchError, "torch's fast path has no gradient", loss_of(input_of(frozen, WIDTHS[make])), frozen)


# ---------------------------------------------------------------- pruning


PRUNED: dict[str, tuple[dict[str, Any], list[int], int]] = {  # options, heads, key/value heads that stay
    "usual": ({}, [1], 5),
    "unpacked": ({"kdim": 7, "bias": ("q", "v")}, [5, 0, 2], 3),
    "v_head_dim": ({"v_head_dim": 3, "sinks": True, "bias": False}, [3], 5),
    "one of each group": ({"kv_heads": 3}, [0, 3, 4], 3),
    "a whole group": ({"kv_heads": 3, "gate": True, "qk_norm": "rms"}, [2, 3], 2),
    "multi-query": ({"kv_heads": 1, "head_dim": 4, "rotary": Rotary(4)}, [0, 1, 2, 5], 1),
    "alibi": ({"position_bias": ALiBi(6), "gate": True, "v_head_dim": 5}, [0, 4], 4),
    "t5": ({"position_bias": T5Buckets(6, 8), "sinks": True}, [2, 3, 4], 3),
}


@pytest.mark.parametrize("name", PRUNED)
def test_a_pruned_module_is_the_module_with_the_columns_zeroed(name: str) -> None:
    said, heads, kv_heads = PRUNED[name]
    m: MultiHeadAttention = double(MultiHeadAttention(24, 6, **said))
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    given: Any = (x, torch.randn(2, 3, 7, dtype=torch.float64)) if "kdim" in said else (x,)
    before = {key: value.clone() for key, value in m.state_dict().items()}
    small = m.prune_heads(heads)
    wanted = cut(m, "out_proj", heads, 6, 0.0)
    torch.testing.assert_close(small(*given, mask=causal()), wanted(*given, mask=causal()))
    out, weights = small(*given, need_weights=True)
    kept = [head for head in range(6) if head not in heads]
    torch.testing.assert_close((out, weights), (wanted(*given), m(*given, need_weights=True)[1][:, kept]))
    assert (small.num_heads, small.kv_heads, small.training) == (len(kept), kv_heads, False)
    assert sum(each.numel() for each in small.parameters()) < sum(each.numel() for each in m.parameters())
    for key, value in m.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    made = {key: value for key, value in said.items() if key not in ("kv_heads", "head_dim", "position_bias")}
    bias = said.get("position_bias")
    if isinstance(bias, ALiBi):
        made["position_bias"] = ALiBi(len(kept), tuple(bias.slopes[head] for head in kept))
    elif bias is not None:
        made["position_bias"] = bias
    fresh = MultiHeadAttention(24, len(kept), kv_heads=kv_heads, head_dim=m.head_dim, dtype=torch.float64, **made)
    fresh.load_state_dict(small.state_dict())
    torch.testing.assert_close(fresh(*given), small(*given), rtol=0, atol=0)
    assert repr(fresh.train().extra_repr()) == repr(small.extra_repr())


def test_a_pruned_module_can_be_pruned_ablated_and_trained() -> None:
    m = double(MultiHeadAttention(24, 6, position_bias=T5Buckets(6, 8)))
    m.position_bias.requires_grad_(False)
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    twice = m.prune_heads([0]).prune_heads([4])
    torch.testing.assert_close(twice(x), m.prune_heads([0, 5])(x))
    with ablate(twice, {"MultiHeadAttention": [0, 1]}):
        torch.testing.assert_close(twice(x), m.prune_heads([0, 1, 2, 5])(x))
    assert isinstance(twice.position_bias, RelativeBias)
    assert not twice.position_bias.weight.requires_grad
    twice(x).sum().backward()
    assert twice.qkv_proj.weight.grad is not None
    assert m.qkv_proj.weight.grad is None
    torch.testing.assert_close(m.prune_heads([])(x), m(x), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("said", "heads", "error", "says"),
    [
        ({}, [6], ValueError, "heads: got 6, expected numbers from 0 to 5"),
        ({}, [-1], ValueError, "heads: got -1, expected numbers from 0 to 5"),
        ({}, range(6), ValueError, "heads: got all 6, expected at least one to remain"),
        ({}, [True], TypeError, "heads: got bool, expected whole numbers"),
        ({}, 3, TypeError, "heads: got int, expected numbers of heads"),
        ({"qk_norm": "rms_all"}, [0], ValueError, "heads: this module has qk_norm='rms_all'"),
        (
            {"kv_heads": 2},
            [0, 1, 4],
            ValueError,
            "heads: would leave [1, 2] query heads for the 2 key/value heads, expected equally many for each key/value "
            "head, or none: head h uses key/value head h // 3",
        ),
    ],
)
def test_heads_that_cannot_be_pruned_are_named(said: Any, heads: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=re.escape(says)):
        MultiHeadAttention(24, 6, **said).prune_heads(heads)


def test_a_module_whose_weights_are_made_anew_cannot_be_pruned() -> None:
    for change in (
        lambda m: prune.l1_unstructured(m.qkv_proj, "weight", 0.5),
        lambda m: weight_norm(m.out_proj),
        lambda m: prune.random_unstructured(m, "sinks", 0.5),
    ):
        m = MultiHeadAttention(24, 6, sinks=True)
        change(m)
        with pytest.raises(ValueError, match="is recomputed in each call by a pruning mask or a parametrization"):
            m.prune_heads([0])
    wrapped = MultiHeadAttention(24, 6)
    for part in (nn.Sequential(wrapped.out_proj), Gained(24, 24)):
        wrapped.out_proj = part  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(ValueError, match=rf"module: out_proj is a {type(part).__name__}, expected nn\.Linear"):
            wrapped.prune_heads([0])


class Gained(nn.Linear):
    """More than its weight's product."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)

"""nn_compat.MultiheadAttention against torch's own, over its whole grid of options."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization

import headscope
from headscope import functional, masks
from headscope.nn_compat import MultiheadAttention, replace

N, H, L, S, E = 3, 2, 5, 7, 6  # batch, heads, queries, keys, width

Sources = tuple[Tensor, Tensor, Tensor]


def pair(heads: int = H, **options: Any) -> tuple[nn.MultiheadAttention, MultiheadAttention]:
    """torch's module with random weights and biases, and ours with the same."""
    theirs = nn.MultiheadAttention(E, heads, dtype=torch.float64, **options)
    ours = MultiheadAttention(E, heads, dtype=torch.float64, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(kind: str, axes: str) -> Sources:
    """query, key, value: one tensor for all, two, or three of different widths."""

    def random(length: int, width: int) -> Tensor:
        shape = {"LE": (length, width), "LNE": (length, N, width), "NLE": (N, length, width)}[axes]
        return torch.randn(shape, dtype=torch.float64, requires_grad=True)

    query = random(L, E)
    if kind == "self":
        return query, query, query
    if kind == "cross":
        key = random(S, E)
        return query, key, key
    return query, random(S, 4), random(S, 3)


def attn_masks(heads: int, queries: int, keys: int) -> Iterator[Tensor | None]:
    """Each hides something, but no row's first key."""
    yield None
    for shape in ((queries, keys), (heads, queries, keys)):
        hidden = torch.rand(shape) < 0.4
        hidden[..., 0] = False
        yield hidden
        yield torch.randn(shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)


def padding_masks(batch: int | None, keys: int) -> Iterator[Tensor | None]:
    """Padding at the end, padding anywhere, numbers; the first key stays."""
    yield None
    lengths = torch.tensor([2, keys, keys - 1])
    hidden = torch.arange(keys) >= lengths[:, None]
    scattered = torch.rand(N, keys) < 0.4
    scattered[:, 0] = False
    for mask in (hidden, scattered, torch.randn(N, keys, dtype=torch.float64).masked_fill(hidden, -torch.inf)):
        yield mask if batch is not None else mask[0]


def compare(
    modules: tuple[nn.Module, nn.Module], sources: Sources, message: str, *, grad: bool = True, **options: Any
) -> None:
    """Output, weights and every gradient of two modules."""
    results: list[tuple[Any, ...]] = []
    for module in modules:
        with warnings.catch_warnings(), torch.set_grad_enabled(grad):
            warnings.filterwarnings("ignore", "Support for mismatched")  # torch's, of masks of two kinds
            out, weights = module(*sources, **options)
        wanted: tuple[Tensor | None, ...] = ()
        if grad:
            loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()
            loss = loss if weights is None else loss + (weights * weights).sum()
            leaves = [x for x in (*sources, *module.parameters()) if x.requires_grad]
            wanted = torch.autograd.grad(loss, leaves, allow_unused=True)
        results.append((out, weights, wanted))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9, msg=lambda text: f"{message}: {text}")


ASKED = ({"need_weights": False}, {}, {"average_attn_weights": False})


@pytest.mark.parametrize("thirds", [1, pytest.param(3, marks=pytest.mark.long)], ids=["a third", "all"])
@pytest.mark.parametrize("add_zero_attn", [False, True], ids=["", "zero"])
@pytest.mark.parametrize("add_bias_kv", [False, True], ids=["", "bias_kv"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", ["self", "cross", "widths"])
@pytest.mark.parametrize("axes", ["LE", "LNE", "NLE"])
def test_the_grid(axes: str, kind: str, bias: bool, add_bias_kv: bool, add_zero_attn: bool, thirds: int) -> None:
    """Every constructor with every pair of masks; what is asked for takes turns, or (long) each has all three."""
    widths = {"kdim": 4, "vdim": 3} if kind == "widths" else {}
    options = {"bias": bias, "add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn, **widths}
    modules = pair(batch_first=axes == "NLE", **options)
    sources = inputs(kind, axes)
    batch, keys = None if axes == "LE" else N, L if kind == "self" else S
    heads = H if batch is None else N * H
    turn = len(axes) + len(kind) + bias + add_bias_kv + add_zero_attn
    for n, (attn_mask, padding) in enumerate(itertools.product(attn_masks(heads, L, keys), padding_masks(batch, keys))):
        for asked in (ASKED[(n + turn + more) % 3] for more in range(thirds)):
            shown = f"{asked}, attn_mask {describe(attn_mask)}, key_padding_mask {describe(padding)}"
            given = {"attn_mask": attn_mask, "key_padding_mask": padding, **asked}
            compare(modules, sources, shown, grad=(n + turn) % 4 == 0, **given)


def describe(mask: Tensor | None) -> str:
    return "None" if mask is None else f"{mask.dtype} {list(mask.shape)}"


def test_in_float32_and_eval() -> None:
    """There torch takes its fused operator for inference."""
    theirs, ours = (module.float().eval() for module in pair(batch_first=True))
    x = torch.randn(N, L, E)
    hidden = torch.ones(L, L, dtype=torch.bool).triu(1)
    for options in ({}, {"need_weights": False}, {"attn_mask": hidden}, {"average_attn_weights": False}):
        with torch.no_grad():
            torch.testing.assert_close(ours(x, x, x, **options), theirs(x, x, x, **options))


@pytest.mark.parametrize("extra", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=["", "more keys"])
def test_is_causal_is_a_hint_about_the_mask(extra: dict[str, bool]) -> None:
    modules = pair(batch_first=True, **extra)
    sources = inputs("self", "NLE")
    mask = nn.Transformer.generate_square_subsequent_mask(L, dtype=torch.float64)
    lengths = torch.arange(L) >= torch.tensor([2, L, 4])[:, None]
    for padding in (None, lengths, torch.zeros(N, L).masked_fill(lengths, -torch.inf).double()):
        for options in ASKED:
            given = {"attn_mask": mask, "key_padding_mask": padding, **options}
            # torch itself hides its own last keys from most rows where it takes the hint: it is compared without
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Support for mismatched")
                theirs = modules[0](*sources, **given)
            torch.testing.assert_close(modules[1](*sources, is_causal=True, **given), theirs)


def test_a_causal_hint_is_kept_without_reading_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(functional, "attention", lambda q, k, v, **options: seen.append(options["mask"]) or v)
    _, ours = pair()
    x = torch.randn(L, N, E, dtype=torch.float64)
    ours(x, x, x, attn_mask=torch.ones(L, L, dtype=torch.bool).triu(1), is_causal=True, need_weights=False)
    assert seen == [masks.Band(None, 0, offset=0)]


@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_padding_at_the_end_is_never_read(kind: str) -> None:
    """Whichever way it is said: what stands there may be NaN."""
    _, ours = pair(batch_first=True)
    padding = torch.arange(S) >= torch.tensor([2, S, 3])[:, None]
    key = torch.randn(N, S, E, dtype=torch.float64)
    query = torch.randn(N, L, E, dtype=torch.float64)
    given = padding if kind == "boolean" else torch.zeros(N, S).masked_fill(padding, -torch.inf)
    out, _ = ours(query, key, key, key_padding_mask=given, need_weights=False)
    dirty = key.masked_fill(padding[..., None], torch.nan)
    again, _ = ours(query, dirty, dirty, key_padding_mask=given, need_weights=False)
    torch.testing.assert_close(again, out, rtol=0, atol=0)


def test_the_default_device_does_not_matter() -> None:
    _, ours = pair(batch_first=True)
    query, key, _ = inputs("cross", "NLE")
    scattered = list(padding_masks(N, S))[2]
    wanted = ours(query, key, key, key_padding_mask=scattered)
    with torch.device("meta"):
        found = ours(query, key, key, key_padding_mask=scattered)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("options", ASKED, ids=["out", "mean", "each"])
def test_a_row_that_may_see_nothing_is_zero(options: dict[str, bool]) -> None:
    theirs, ours = pair(batch_first=True)
    query, key, _ = inputs("cross", "NLE")
    hidden = torch.zeros(L, S, dtype=torch.bool)
    hidden[3] = True
    out, weights = ours(query, key, key, attn_mask=hidden, **options)
    torch.testing.assert_close(out[:, 3], theirs.out_proj.bias.expand(N, E))
    expected, _ = theirs(query, key, key, attn_mask=hidden)
    assert expected[:, 3].isnan().all(), "torch has learned: the documented difference is gone"
    rest = [0, 1, 2, 4]
    torch.testing.assert_close(out[:, rest], expected[:, rest])
    if weights is not None:
        assert not weights[..., 3, :].any()
    out.sum().backward()
    assert query.grad is not None
    assert not query.grad[:, 3].any()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in ours.parameters())


def test_dropout_with_weights_is_that_of_torch() -> None:
    """The same generator makes the same choice: output and weights are equal."""
    modules = pair(dropout=0.4)
    x = torch.randn(L, N, E, dtype=torch.float64)
    results: list[Any] = []
    for module in modules:
        torch.manual_seed(5)
        results.append(module(x, x, x, average_attn_weights=False))
    torch.testing.assert_close(results[1], results[0])
    assert (results[1][1] == 0).any()
    ours = modules[1]
    with headscope.watch(ours) as recording:
        torch.manual_seed(5)
        torch.testing.assert_close(ours(x, x, x, average_attn_weights=False), results[1], rtol=0, atol=0)
    assert recording.forwards == 1
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    torch.manual_seed(5)
    torch.testing.assert_close(compiled(x, x, x, average_attn_weights=False), results[1])
    once, again = (ours(x, x, x, need_weights=False)[0] for _ in range(2))
    assert not torch.equal(once, again)
    ours.eval()
    torch.testing.assert_close(ours(x, x, x)[0], ours(x, x, x, need_weights=False)[0])


def test_no_weights_are_made_where_none_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functional, "weights", lambda *args, **kwargs: pytest.fail("weights were made"))
    _, ours = pair()
    query, key, _ = inputs("cross", "LNE")
    for mask in attn_masks(N * H, L, S):
        for padding in padding_masks(N, S):
            _, weights = ours(query, key, key, attn_mask=mask, key_padding_mask=padding, need_weights=False)
            assert weights is None


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True}, {"kdim": 4, "vdim": 3}], ids=str)
def test_state_dicts_go_both_ways(options: dict[str, Any]) -> None:
    theirs, ours = pair(**options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for parameter in ours.parameters():
        nn.init.normal_(parameter)
    theirs.load_state_dict(ours.state_dict())
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(parameter, ours.get_parameter(name), rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"add_bias_kv": True}, {"kdim": 4, "vdim": 3}], ids=str)
def test_it_starts_as_torch_does(options: dict[str, Any]) -> None:
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(E, H, **options)
    torch.manual_seed(3)
    ours = MultiheadAttention(E, H, **options)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    for module in (theirs, ours):
        torch.manual_seed(4)
        module._reset_parameters()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=0, atol=0)


def test_from_torch_shares_the_parameters() -> None:
    theirs = nn.MultiheadAttention(E, H, dropout=0.2, add_bias_kv=True, add_zero_attn=True, batch_first=True).eval()
    ours = MultiheadAttention.from_torch(theirs)
    assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    assert all(ours.get_parameter(name) is parameter for name, parameter in theirs.named_parameters())
    assert (ours.training, ours.dropout, ours.batch_first, ours.add_zero_attn) == (False, 0.2, True, True)
    x = torch.randn(N, L, E)
    torch.testing.assert_close(ours(x, x, x), theirs(x, x, x))


# ---------------------------------------------------------------- inside torch's transformer


def encoder(layers: int = 2) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(E, H, dim_feedforward=11, dropout=0.0, batch_first=True)
    made = nn.TransformerEncoder(layer, layers)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.3)
    return made


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "both"])
def test_in_a_transformer_encoder(mask: str, grad: bool, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our attention runs, also where torch would take its fused layers, and the results are torch's."""
    theirs = encoder().train(training)
    ours = copy.deepcopy(theirs)
    assert replace(ours) == ["layers.0.self_attn", "layers.1.self_attn"]
    calls: list[Any] = []
    attention = functional.attention
    monkeypatch.setattr(
        functional, "attention", lambda *args, **options: calls.append(1) or attention(*args, **options)
    )
    x = torch.randn(N, L, E)
    padding = torch.arange(L) >= torch.tensor([2, L, 4])[:, None]
    options: dict[str, Any] = {}
    if mask in ("causal", "both"):
        options["mask"] = nn.Transformer.generate_square_subsequent_mask(L)
    if mask in ("padding", "both"):
        options["src_key_padding_mask"] = torch.zeros(N, L).masked_fill(padding, -torch.inf)
    with torch.set_grad_enabled(grad):
        out = ours(x, **options)
        assert len(calls) == 2
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
            expected = theirs(x, **options)
    kept = ~padding if "src_key_padding_mask" in options else torch.ones_like(padding)  # torch's fused layers zero it
    torch.testing.assert_close(out[kept], expected[kept], rtol=1e-4, atol=1e-5)


def test_in_a_decoder_layer_and_a_transformer() -> None:
    theirs = nn.Transformer(E, H, 1, 1, dim_feedforward=11, dropout=0.0, batch_first=True)
    ours = copy.deepcopy(theirs)
    replaced = ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"]
    assert replace(ours) == replaced
    source, target = torch.randn(N, S, E), torch.randn(N, L, E)
    mask = nn.Transformer.generate_square_subsequent_mask(L)
    options = {"tgt_mask": mask, "tgt_is_causal": True}
    torch.testing.assert_close(ours(source, target, **options), theirs(source, target, **options))


def test_replace_keeps_what_is_shared() -> None:
    one = nn.MultiheadAttention(E, H)
    model = nn.ModuleDict({"a": one, "b": nn.ModuleList([one])})
    weight = one.in_proj_weight
    assert replace(model) == ["a", "b.0"]
    assert model["a"] is model["b"][0]
    assert model["a"].in_proj_weight is weight
    assert replace(model) == []
    with pytest.raises(
        TypeError, match=r"model: expected a model that contains nn\.MultiheadAttention, got one itself"
    ):
        replace(one)
    twice = nn.Module()
    twice.a = twice.b = one
    assert replace(twice) == ["a", "b"]
    assert type(twice.a) is MultiheadAttention
    assert twice.a is twice.b


@pytest.mark.parametrize("how", ["pruned", "parametrized"])
def test_weights_that_are_made_anew_are_refused(how: str) -> None:
    theirs = nn.MultiheadAttention(E, H)
    if how == "pruned":
        prune.l1_unstructured(theirs, "in_proj_weight", 0.5)
    else:
        register_parametrization(theirs, "in_proj_weight", nn.Identity())
    whole = nn.Sequential(nn.MultiheadAttention(E, H), theirs)
    for change in (MultiheadAttention.from_torch, headscope.MultiHeadAttention.from_module):
        with pytest.raises(ValueError, match="module: in_proj_weight is recomputed in each call by a pruning mask"):
            change(theirs)
    with pytest.raises(ValueError, match="module: in_proj_weight is recomputed in each call by a pruning mask"):
        replace(whole)
    assert type(whole[0]) is nn.MultiheadAttention


def test_a_forward_that_is_not_torchs_is_refused() -> None:
    class Doubled(nn.MultiheadAttention):
        def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
            return super().forward(2 * query, *args, **kwargs)

    changed = nn.MultiheadAttention(E, H)
    changed.forward = changed.forward
    for theirs in (Doubled(E, H), changed):
        with pytest.raises(ValueError, match=f"module: {type(theirs).__name__} overrides forward, expected nn.Mu"):
            MultiheadAttention.from_torch(theirs)
    with pytest.raises(ValueError, match="module: MultiheadAttention overrides forward"):
        replace(nn.Sequential(changed))


def test_it_can_be_watched() -> None:
    model = encoder(1).eval()
    replace(model)
    x = torch.randn(N, L, E)
    with headscope.watch(model) as recording, torch.no_grad():
        model(x)
    _, weights = model.layers[0].self_attn(x, x, x, average_attn_weights=False)
    entropies = -(weights * weights.log()).sum(-1).mean((0, 2))  # [H]
    assert recording.kinds == {"layers.0.self_attn": "self"}
    means = [recording.flat()[f"attn/L00/H{head:02d}/entropy"] for head in range(H)]
    torch.testing.assert_close(torch.tensor(means), entropies)


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_watch_sees_what_it_sees_of_torch(need_weights: bool) -> None:
    """The same kinds and numbers, in self-attention, also of views, and in cross-attention of equal lengths."""
    names = ("self", "views", "cross")
    theirs = nn.ModuleDict({name: nn.MultiheadAttention(E, H, batch_first=True) for name in names}).eval()
    ours = copy.deepcopy(theirs)
    replace(ours)
    x, y = torch.randn(2, N, L, E)
    seen: list[headscope.Recording] = []
    for model in (theirs, ours):
        with headscope.watch(model) as recording, torch.no_grad():
            model["self"](x, x, x, need_weights=need_weights)
            model["views"](x[:], x[:], value=x[:], need_weights=need_weights)
            model["cross"](x, y, y, need_weights=need_weights)
        seen.append(recording)
    assert seen[1].kinds == seen[0].kinds == {"self": "self", "views": "self", "cross": "cross"}
    assert seen[1].flat() == pytest.approx(seen[0].flat(), rel=1e-5, nan_ok=True)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("need_weights", [False, True])
def test_its_heads_can_be_ablated(need_weights: bool, training: bool) -> None:
    """As with the columns of the output projection set to zero."""
    _, ours = pair(batch_first=True, dropout=0.3)
    model, zeroed = nn.ModuleDict({"one": ours.train(training)}), copy.deepcopy(ours)
    with torch.no_grad():
        zeroed.out_proj.weight[:, : E // H] = 0
    x = torch.randn(N, L, E, dtype=torch.float64)
    torch.manual_seed(7)
    with headscope.ablate(model, {"one": 0}):
        out, _ = model["one"](x, x, x, need_weights=need_weights)
    torch.manual_seed(7)
    torch.testing.assert_close(out, zeroed(x, x, x, need_weights=need_weights)[0])


@pytest.mark.parametrize("need_weights", [False, True])
def test_it_compiles_without_a_graph_break(need_weights: bool) -> None:
    _, ours = pair(batch_first=True)
    x = torch.randn(N, L, E, dtype=torch.float64)
    options = {"key_padding_mask": torch.arange(L) >= torch.tensor([2, L, 4])[:, None], "need_weights": need_weights}
    compiled = torch.compile(ours, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, x, x, **options), ours(x, x, x, **options))


# ---------------------------------------------------------------- what is refused

X = torch.zeros(L, N, E)


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        ((X, X, 3), {}, TypeError, "value: got int, expected a torch.Tensor"),
        ((X[None],) * 3, {}, ValueError, r"query: has 4 axes, expected 2 \(\[L, E\]\) or 3"),
        ((X, X[0], X[0]), {}, ValueError, r"key: has 2 axes, query has 3; query \[5, 3, 6\], key \[3, 6\]"),
        ((X, X, X[..., :4]), {}, ValueError, r"value: axis 2 \(E\) is 4, expected 6"),
        ((X, X, X[:4]), {}, ValueError, "value: its batch and length differ from those of key"),
        ((X, X[:, :2], X[:, :2]), {}, ValueError, r"key: axis 1 \(N\) is 2, query has 3; batch_first is False"),
        ((X,) * 3, {"is_causal": True}, ValueError, "is_causal: is a hint about attn_mask, which is None"),
        ((X,) * 3, {"attn_mask": torch.zeros(5, 4)}, ValueError, r"attn_mask: is \[5, 4\], .*: \[5, 5\] or \[6"),
        ((X,) * 3, {"attn_mask": torch.zeros(3, 5, 5)}, ValueError, r"attn_mask: is \[3, 5, 5\], expected \[L, S\] or"),
        ((X,) * 3, {"attn_mask": torch.zeros(5)}, ValueError, r"attn_mask: is \[5\], expected"),
        ((X,) * 3, {"attn_mask": torch.zeros(5, 5, dtype=torch.long)}, TypeError, "attn_mask: got int64, expected a t"),
        ((X,) * 3, {"key_padding_mask": torch.zeros(5, 3)}, ValueError, r"key_padding_mask: is \[5, 3\], .*: \[3, 5\]"),
    ],
)  # fmt: skip
def test_what_is_refused(given: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MultiheadAttention(E, H)(*given, **options)


def test_nested_tensors_are_refused() -> None:
    x = torch.nested.as_nested_tensor([torch.zeros(2, E), torch.zeros(3, E)], layout=torch.jagged)
    with pytest.raises(TypeError, match="query: is a nested tensor, expected a padded one and key_padding_mask"):
        MultiheadAttention(E, H)(x, x, x)


def test_sizes_are_refused_as_by_torch() -> None:
    with pytest.raises(AssertionError, match="embed_dim must be divisible by num_heads"):
        MultiheadAttention(E, 4)
    with pytest.raises(ValueError, match="embed_dim and num_heads must be greater than 0"):
        MultiheadAttention(E, 0)

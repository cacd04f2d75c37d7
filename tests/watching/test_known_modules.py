"""What an earlier forward pass has shown of a module is not looked for again, by any watch, until it changes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch.nn import functional as F

from headscope import MultiHeadAttention, Observe, watch
from headscope._intercept import error_of, function_mode
from headscope.watching import WatchError, _earlier_calls
from support.families import build
from support.forking import run_program


class Layer(nn.Module):
    """Attends by SDPA, or writes it out; ``modes``: how many dispatch modes were on in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.written_out = False
        self.modes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.modes.append(_len_torch_dispatch_stack())
        if self.written_out:
            return (x @ x.mT / x.shape[-1] ** 0.5).softmax(-1) @ x
        return F.scaled_dot_product_attention(x, x, x)


def run(model: nn.Module, x: Tensor) -> float:
    with watch(model) as recording:
        model(x)
    return recording.stats[0, "entropy"].mean.mean().item()


def test_the_first_watch_of_a_model_follows_it_and_the_next_does_not() -> None:
    layer, x = Layer(), torch.randn(1, 2, 5, 4)
    first, second = run(layer, x), run(layer, x)
    assert first == second
    assert layer.modes == [1, 0]


def test_a_layer_that_writes_its_attention_out_is_followed_in_every_watch() -> None:
    layer, x = Layer(), torch.randn(1, 2, 5, 4)
    layer.written_out = True
    assert run(layer, x) == run(layer, x)
    assert layer.modes == [1, 1]


@pytest.mark.parametrize("change", ["attribute", "forward"])
def test_a_changed_layer_is_followed_again(change: str) -> None:
    layer, x = Layer(), torch.randn(1, 2, 5, 4)
    expected = run(layer, x)
    if change == "attribute":
        layer.written_out = True
    else:
        layer.forward = lambda x: (x @ x.mT / 2).softmax(-1) @ x  # pyright: ignore[reportAttributeAccessIssue]
    assert run(layer, x) == pytest.approx(expected, rel=1e-5), "in its first pass"


def test_another_layer_of_the_same_class_is_followed() -> None:
    x = torch.randn(1, 2, 5, 4)
    layers = Layer(), Layer()
    assert [run(layer, x) for layer in layers] == [run(layers[1], x)] * 2
    assert [layer.modes for layer in layers] == [[1], [1, 0]]


# ---------------------------------------------------------------- functions that are not observed


def llama(**more: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=16, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def observed_functions(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions that went through headscope's mode."""
    functions: list[Any] = []
    original = function_mode.Mode.__torch_function__

    def note(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        functions.append(func)
        return original(self, func, types, args, kwargs)

    monkeypatch.setattr(function_mode.Mode, "__torch_function__", note)
    return functions


def watched(model: nn.Module, *inputs: Any, **options: Any) -> tuple[Tensor, Any]:
    with torch.no_grad(), watch(model, **options) as seen:
        out = model(*inputs)
    return (out if isinstance(out, Tensor) else out.logits), seen


def assert_same(seen: Any, expected: Any) -> None:
    assert seen.layers == expected.layers
    for name in expected.names:
        for layer in expected.layers:
            means = seen[layer, name].mean, expected[layer, name].mean
            torch.testing.assert_close(*means, rtol=0, atol=0, equal_nan=True, msg=f"{layer}, {name}")


IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_known_model_is_observed_without_the_mode(use_cache: bool, observed_functions: list[Any]) -> None:
    model = llama(use_cache=use_cache)
    out, first = watched(model, IDS)
    assert observed_functions
    for _ in range(3):
        observed_functions.clear()
        again, seen = watched(model, IDS)
        assert not observed_functions
        assert torch.equal(out, again)
        assert_same(seen, first)
        assert seen.kinds == first.kinds
        assert seen.about.origin == first.about.origin


def test_other_numbers_lengths_and_options_are_measured_anew() -> None:
    known, fresh = llama(), llama()
    for _ in range(3):
        watched(known, IDS)
    for ids, options in (
        (IDS.flip(-1), {}),
        (IDS[:, :5], {}),
        (IDS.repeat(2, 1), {}),
        (IDS, {"what": Observe(map=4)}),
        (IDS, {"rows": 3}),
        (IDS, {"tokens": "inputs"}),
        (IDS, {"weights": {"model.layers.0.self_attn": [1]}}),
        (IDS, {"kinds": {"*": "cross"}}),
        (IDS, {"verify": 2}),
        (IDS, {"accelerate": True}),
    ):
        seen, expected = (watched(copy.deepcopy(model) if model is fresh else model, ids, **options)[1]
                          for model in (known, fresh))  # fmt: skip
        assert_same(seen, expected)
        assert seen.kinds == expected.kinds
        assert {*seen.about.verified} == {*expected.about.verified}
        if "what" in options:
            maps = [each.stats.parts["model.layers.1.self_attn"].map for each in (seen, expected)]
            assert torch.equal(maps[0].sum, maps[1].sum)


def test_a_cache_with_tokens_is_described() -> None:
    known, fresh = llama(), llama()
    for _ in range(3):
        watched(known, IDS)
    recordings = []
    for model in (known, fresh):
        with torch.no_grad(), watch(model) as seen:
            out = model(IDS[:, :5], use_cache=True)
            model(IDS[:, 5:], past_key_values=out.past_key_values)
        recordings.append(seen)
    assert_same(*recordings)
    assert recordings[0].stats.parts["model.layers.0.self_attn"].runs == 2


def test_rows_that_are_not_finite_are_described() -> None:
    known, fresh = llama(), llama()
    for _ in range(3):
        watched(known, IDS)
    for model in (known, fresh):
        with torch.no_grad():
            model.get_input_embeddings().weight[IDS[0, 5]] = float("nan")
    seen, expected = (watched(model, IDS)[1] for model in (known, fresh))
    assert_same(seen, expected)


def test_a_known_module_with_another_forward_is_observed(observed_functions: list[Any]) -> None:
    model: Any = llama()
    for _ in range(3):
        watched(model, IDS)
    mlp = model.model.layers[0].mlp
    original = mlp.forward

    def attend_too(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(heads, heads, heads)
        return original(x) + attended.transpose(1, 2).flatten(-2)

    mlp.forward = attend_too
    _, seen = watched(model, IDS)
    assert seen.layers == ("model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.1.self_attn")
    del mlp.forward
    assert watched(model, IDS)[1].layers == ("model.layers.0.self_attn", "model.layers.1.self_attn")


def test_a_known_module_with_a_hook_is_observed() -> None:
    model: Any = llama()
    for _ in range(3):
        watched(model, IDS)

    def attend_too(module: nn.Module, inputs: Any, out: Tensor) -> Tensor:
        heads = out.unflatten(-1, (4, 4)).transpose(1, 2)
        return out + F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)

    hook = model.model.layers[1].mlp.register_forward_hook(attend_too)
    assert watched(model, IDS)[1].layers[-1] == "model.layers.1.mlp"
    hook.remove()
    assert len(watched(model, IDS)[1].layers) == 2


class Later(nn.Module):
    """Attends to a context, in its own code, if it gets one."""

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x = F.scaled_dot_product_attention(x, x, x) if context is None else x
        return x if context is None else x + (x @ context.mT).softmax(-1) @ context


class Never(nn.Module):
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return x if context is None else F.scaled_dot_product_attention(x, context, context)


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Later(), Never()

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.two(self.one(x), context)


def test_code_of_a_user_may_attend_later() -> None:
    model, x = Both(), torch.randn(1, 2, 5, 4)
    for _ in range(3):
        assert watched(model, x)[1].layers == ("one",)
    with watch(model) as seen:
        model(x)
        model(x, x)
    assert seen.layers == ("one", "two")


def test_torchs_own_layer_changes_its_path_with_its_mode() -> None:
    layer, x = nn.TransformerEncoderLayer(8, 2, batch_first=True, dropout=0.0), torch.randn(2, 5, 8)
    model = nn.Sequential(layer)
    for training in (True, True, False, True, False, False):
        model.train(training)
        _, seen = watched(model, x)
        assert seen.layers == ("0.self_attn",)
    with torch.no_grad(), watch(model) as seen:
        for training in (True, False, True, False):
            model.train(training)
            model(x)
    assert seen.stats.parts["0.self_attn"].runs == 4


def test_layers_without_a_softmax_are_listed_by_each_watch() -> None:
    class MambaMixer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.cumsum(-2)

    MambaMixer.__module__ = "transformers.models.mamba"
    model = nn.Sequential(MultiHeadAttention(8, 2), MambaMixer())
    for _ in range(3):
        assert watched(model, torch.randn(1, 4, 8))[1].about.other_layers == {
            "1": "MambaMixer: a state space, no softmax over keys"
        }


# ---------------------------------------------------------------- outputs that are not compared again


def test_outputs_are_compared_again_only_if_weights_or_calls_change(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []

    def note(call: Any) -> Any:
        compared.append(call)
        return error_of(call)

    monkeypatch.setattr(_earlier_calls, "error_of", note)
    model = llama()
    counts: list[int] = []
    for ids, change in ((IDS, None), (IDS, None), (IDS, 1.5), (IDS, None), (IDS[:, :5], None), (IDS[:, :5], None)):
        compared.clear()
        if change is not None:
            with torch.no_grad():
                model.get_parameter("model.layers.1.self_attn.q_proj.weight").mul_(change)
        watched(model, ids)
        counts.append(len(compared))
    assert counts == [2, 0, 1, 0, 2, 0]


def test_a_module_that_is_misread_stays_an_error() -> None:
    transformers = pytest.importorskip("transformers")

    def doubled(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: Any = None, **_: Any
    ) -> Any:
        out = F.scaled_dot_product_attention(2 * query, key[:, [0, 0, 1, 1]], value[:, [0, 0, 1, 1]], is_causal=True)
        return out.transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("doubled", doubled)
    model: Any = llama()
    for _ in range(3):
        watched(model, IDS)
    model.set_attn_implementation("doubled")
    for _ in range(3):
        with pytest.raises(WatchError, match="differs"):
            watched(model, IDS)


@pytest.mark.parametrize("name", ["convbert", "reformer", "timesformer"])
def test_what_a_first_watch_refuses_is_refused_by_all(name: str) -> None:
    """Followed alone, such a module would look like another: of its batch, or of heads, some are chunks of the text."""
    pytest.importorskip("transformers")
    family = build(name, late=True)
    messages: list[str] = []
    for _ in range(3):
        with pytest.raises(WatchError, match="could not be observed") as caught, torch.no_grad(), watch(family.model):
            family.model(**family.inputs)
        messages.append(str(caught.value))
    assert len({*messages}) == 1


@pytest.mark.filterwarnings("ignore")
def test_what_a_first_pass_does_not_record_is_not_recorded_by_the_next() -> None:
    pytest.importorskip("transformers")
    family = build("convbert", late=True)
    counts: list[int] = []
    for passes in (1, 3):
        with torch.no_grad(), watch(family.model, unseen="ignore") as seen:
            for _ in range(passes):
                family.model(**family.inputs)
        counts.append(len(seen.layers))
    assert counts[0] == counts[1]


class Sorting(nn.Module):
    """Attends, in a module inside, over tokens in an order of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Written()

    def forward(self, x: Tensor) -> Tensor:
        order = x[..., :1].argsort(1).expand_as(x)
        return self.inner(x.gather(1, order))


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return (self.q(x) @ self.k(x).mT / 6**0.5).softmax(-1) @ self.v(x)


def test_tokens_in_another_order_have_no_positions_in_any_pass() -> None:
    model, x = Sorting(), torch.randn(2, 5, 6)
    assert watched(model.inner, x)[1].kinds == {"Written": "self"}
    for _ in range(3):
        assert watched(model, x)[1].kinds == {"inner": "cross"}
    with torch.no_grad(), watch(model) as seen:
        model(x)
        model(x)
    assert seen.kinds == {"inner": "cross"}


HELD_AT_EXIT = """
import torch
from headscope import watch
model, x = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval(), torch.zeros(1, 4, 8)
with torch.no_grad():
    for _ in range(3):
        with watch(model) as recording:
            model(x)
before = torch.nn.MultiheadAttention.forward
def forward(self, *args, **kwargs):
    return recording, before(self, *args, **kwargs)
torch.nn.MultiheadAttention.forward = forward  # Python never destroys this class, nor what it holds
"""


def test_a_recording_that_lives_at_exit_is_not_reported_as_a_leak() -> None:
    done = run_program(HELD_AT_EXIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

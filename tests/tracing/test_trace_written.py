"""trace: the steps of modules that are not headscope's, in many styles, with and without a fault."""

from __future__ import annotations

import json
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headscope
from headscope import trace
from headscope.checking._catalogue import CATALOGUE
from headscope.tracing import Trace
from headscope.tracing._written import arrangement, origins, tape
from support import seed_modules, softmax_elsewhere, written_styles, written_styles_more
from support.buggy.catalogue import BUGS, CAUSAL
from support.buggy.functional_attention import Functional
from support.buggy.head_loops import Loops
from support.buggy.packed_projection import Packed

STYLES: dict[str, Any] = {each.name: each for each in (*written_styles.CASES, *written_styles_more.CASES)}
FEW = (
    "fused_qkv_permute_unbind_vit_two_blocks",
    "python_loop_slices_cross_padding",
    "keras_like_einsum_dense_cross",
    "einsum_five_axes_grouped",
    "tanh_softcap",
    "rotary_rotate_half",
    "exp_minus_max_over_sum",
    "sink_logit_dropped",
)
SUMS = {"stepwise_decoder_lists": "its scores are sums, not a product of matrices"}

FULL = [
    *("input", "queries", "keys", "values", "split queries", "split keys", "split values"),
    *("scores", "scale", "weights", "head outputs", "concatenation", "output"),
]

DEPARTURES = {
    "heads_in_module_list_concatenated": {"scale-sqrt-embed-dim"},
    "t5_relative_bias_decoder_self_and_cross": {"scale-missing"},
    "finfo_min_local_unscaled": {"scale-missing"},
    "non_local_block_pooled_keys": {"scale-missing"},
    "deberta_c2p_p2c": {"scale-unusual", "no-output-projection"},
    "cosine_learned_temperature": {"scale-not-uniform"},
    "exp_times_mask_over_sum": {"softmax-overflows"},
    "nan_to_num_segments": {"nan-on-empty-row", "no-output-projection"},
    "old_bert_10000": {"no-output-projection"},
}
"""What is unusual in these styles: their code says so."""


def names_of(steps: Trace) -> set[str]:
    """Return the findings that rows and missing steps mention."""
    texts = [row.note or "" for row in steps.rows] + list(steps.missing.values())
    return {name for text in texts for name in re.findall(r"\(check: ([a-z-]+)\)", text)}


def traced(case: Any) -> Trace:
    module, (x, *more) = case.make(), case.inputs()
    with warnings.catch_warnings(action="error"):
        return trace(module, x, more or None)


# ---------------------------------------------------------------- the seeds


SEEDS = {
    "SixSteps": (lambda: seed_modules.SixSteps(20, 4), (3, 7, 20)),
    "FoldedHeads": (lambda: seed_modules.FoldedHeads(20, 4), (3, 7, 20)),
    "OneText": (lambda: seed_modules.OneText(20, 4), (7, 20)),
    "Patches": (lambda: seed_modules.Patches(20, 4), (3, 7, 20)),
    "Enforced": (lambda: seed_modules.Enforced(20, 4, True), (3, 7, 20)),
}


@pytest.mark.parametrize("name", SEEDS)
def test_the_seeds_are_traced_completely(name: str) -> None:
    make, shape = SEEDS[name]
    torch.manual_seed(3)
    module, x = make(), torch.randn(shape)
    steps = trace(module, x)
    expected = [*FULL[:9], "mask", *FULL[9:]] if name == "Enforced" else FULL
    assert [row.step for row in steps.rows] == expected
    assert steps.held
    assert not steps.missing
    assert names_of(steps) == ({"scale-sqrt-embed-dim"} if name == "FoldedHeads" else set())
    assert torch.equal(steps.output, module(x))
    assert not steps.output.requires_grad
    assert all(row.code.startswith("# seed_modules.py:") for row in steps.rows if row.step != "input")


def test_a_row_has_the_line_the_axes_and_the_values_of_its_step() -> None:
    torch.manual_seed(3)
    module, x = seed_modules.FoldedHeads(20, 4), torch.randn(3, 7, 20)
    steps = trace(module, x)
    assert steps.row("queries").axes == {"B": 3, "Q": 7, "H·D": 20}
    assert steps.row("split queries").axes == {"B·H": 12, "Q": 7, "D": 5}
    assert steps.row("weights").axes == {"B·H": 12, "Q": 7, "K": 7}
    assert steps.row("output").axes == {"B": 3, "Q": 7, "E": 20}
    assert "torch.bmm(queries, keys.transpose(1, 2))" in steps.row("scores").code
    with torch.no_grad():
        q, k = (layer(x).view(3, 7, 4, 5).transpose(1, 2) for layer in (module.toqueries, module.tokeys))
        weights = ((q @ k.mT) / 20**0.5).softmax(-1)[0, 0, :4, :4]
    torch.testing.assert_close(torch.tensor(steps.row("weights").corner), weights, rtol=1e-6, atol=1e-7)


def test_axes_of_one_size_are_named_by_their_role() -> None:
    class Same(nn.Module):  # B = H = T = D = 4
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (f(x).view(4, 4, 4, 4) for f in (self.q, self.k, self.v))
            p = torch.einsum("bqhd,bkhd->bqkh", q, k).div(2).softmax(2)
            return self.o(torch.einsum("bqkh,bkhd->bqhd", p, v).reshape(4, 4, 16))

    steps = trace(Same(), torch.randn(4, 4, 16))
    assert steps.held
    assert list(steps.row("split keys").axes) == ["B", "K", "H", "D"]
    assert list(steps.row("weights").axes) == ["B", "Q", "K", "H"]
    assert list(steps.row("head outputs").axes) == ["B", "Q", "H", "D"]


def test_the_code_is_that_of_the_module_in_order() -> None:
    steps = trace(seed_modules.Enforced(20, 4, True), torch.randn(2, 7, 20))
    lines = steps.code.splitlines()
    assert lines[0] == "# the lines of Enforced that compute each step"
    assert len(set(lines)) == len(lines)
    assert [n for n, line in enumerate(lines) if "scores.masked_fill" in line] > [
        n for n, line in enumerate(lines) if "q @ k.transpose" in line
    ]


# ---------------------------------------------------------------- sixty styles


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.long) for name in STYLES if name not in SUMS]
)
def test_every_style_is_traced_and_no_claim_is_wrong(name: str) -> None:
    case = STYLES[name]
    steps = traced(case)
    assert steps.held, [(row.step, row.invariant) for row in steps.failed]
    assert {"input", "scores", "weights", "head outputs"} <= {row.step for row in steps.rows}
    assert names_of(steps) == DEPARTURES.get(name, set())
    assert not [reason for reason in steps.missing.values() if "not identified" in reason]
    json.loads(steps.to_json())
    assert steps._repr_html_().count("<tr") >= len(steps.rows)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.long) for name in STYLES if name not in SUMS]
)
def test_the_weights_of_every_style_are_those_of_its_float64_truth(name: str) -> None:
    case = STYLES[name]
    module, inputs = case.make().eval(), case.inputs()
    truth = case.truth(case.make(), *case.inputs())[0]["weights"].double()
    reel = tape.Tape(
        [*module.parameters(), *module.buffers()], [x for x in inputs if isinstance(x, Tensor)], frozenset()
    )
    with reel:
        module(*inputs)
    known = origins.Origins(reel)
    found = arrangement.arrange(known, arrangement.group_mixings(known, {})[0])
    assert found is not None
    ours = reel.values(found.p)
    assert ours.shape == truth.shape
    rows = ~ours.isnan().any(-1) & (truth.sum(-1) > 0)
    tolerance = getattr(case, "tolerance", 2e-5)
    torch.testing.assert_close(ours[rows], truth[rows], rtol=0, atol=max(tolerance, 2e-5))
    visible = case.truth(case.make(), *case.inputs())[0]["visible"].expand(truth.shape)
    masked = next((row for row in traced(case).rows if row.step == "mask"), None)
    if masked is not None and "causal:" in (masked.note or ""):
        assert not bool(visible.triu(1 + truth.shape[-1] - truth.shape[-2]).any())


@pytest.mark.parametrize("name", SUMS)
def test_attention_without_a_product_is_one_clear_error(name: str) -> None:
    case = STYLES[name]
    with pytest.raises(ValueError, match="no attention was found in StepwiseDecoder"):
        traced(case)


NOT_OF_POSITIONS = {
    "slot_attention": {"softmax-over-queries"},
    "sinkhorn_matching": {"keys-are-queries", "values-not-projected"},
    "capsule_routing": {"values-are-keys", "scale-missing"},
}
"""Softmaxes that are not attention in the usual sense, but weights of a product; what is said of them is true."""


@pytest.mark.parametrize("case", softmax_elsewhere.CASES, ids=lambda case: case.name)
def test_a_softmax_that_is_not_attention_has_no_wrong_claim(case: Any) -> None:
    module, (x, *more) = case.make(), case.inputs()
    if case.name in NOT_OF_POSITIONS:
        assert names_of(trace(module, x, more or None)) == NOT_OF_POSITIONS[case.name]
        return
    with pytest.raises(ValueError, match=r"no attention was found in|cannot be arranged by heads"):
        trace(module, x, more or None)


# ---------------------------------------------------------------- faults


UNSEEN = {
    *("one head", "batch and length swapped", "causal forgotten", "mask inverted", "mask ignored", "fill of -inf"),
    *("fill of -1e9", "dropout before softmax", "state", "input in place", "detached", "squeeze", "cache in front"),
    *("heads averaged", "padding on queries"),
}
"""Faults that one forward pass in eval does not show: they need a mask, training, gradients, or an intention."""
REFUSED = {("functional", "last head dropped")}


def buggy(kind: str, bug: str) -> nn.Module:
    causal = bug in CAUSAL
    if kind == "packed":
        return Packed(20, 4, causal, 0.1, bug)
    return Loops(20, 4, causal, 0.1, bug) if kind == "loops" else Functional(20, 2, 2, causal, 0.1, bug)


@pytest.mark.parametrize("kind", ["packed", "loops", "functional"])
@pytest.mark.parametrize("bug", [bug for bug in BUGS if bug not in UNSEEN])
def test_a_departure_is_shown_with_the_name_of_its_finding(bug: str, kind: str) -> None:
    torch.manual_seed(3)
    x = torch.randn(7, 2, 20) if kind == "functional" else torch.randn(2, 7, 20)
    module = buggy(kind, bug)
    if (kind, bug) in REFUSED:
        with pytest.raises(ValueError, match="cannot be arranged by heads"):
            trace(module, x)
        return
    assert names_of(trace(module, x)) == {BUGS[bug]}


@pytest.mark.parametrize("kind", ["packed", "loops", "functional"])
@pytest.mark.parametrize("bug", ["", *sorted(UNSEEN)])
def test_what_is_not_shown_is_not_claimed(bug: str, kind: str) -> None:
    torch.manual_seed(3)
    steps = trace(buggy(kind, bug), torch.randn(7, 2, 20) if kind == "functional" else torch.randn(2, 7, 20))
    assert names_of(steps) == set()
    assert steps.held


def test_queries_that_are_masked_as_a_whole_are_shown() -> None:
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[0, 5:] = False
    module = Packed(20, 4, False, 0.0, "padding on queries")
    steps = trace(module, torch.randn(2, 7, 20), call=lambda m, x: m(x, keep[:, None, None, :]))
    assert names_of(steps) == {"mask-on-queries"}


def test_every_finding_that_a_row_may_name_is_in_the_catalogue() -> None:
    from pathlib import Path

    folder = Path(tape.__file__).parent
    text = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    named = set(re.findall(r'"((?:[a-z0-9]+-)+[a-z0-9]+)"', text)) - {"utf-8"}
    assert len(named) > 20
    assert named <= set(CATALOGUE)


# ---------------------------------------------------------------- modules of torch, calls and errors


class Torch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(20, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def test_a_fused_call_is_shown_by_its_definition() -> None:
    torch.manual_seed(3)
    module, x = Torch(), torch.randn(3, 7, 20)
    steps = trace(module, x)
    assert steps.held
    assert torch.equal(steps.output, module(x))
    assert "inside scaled_dot_product_attention" in str(steps.row("scores").note)
    assert steps.row("weights").axes == {"B": 3, "H": 4, "Q": 7, "K": 7}


def test_a_module_of_three_inputs_gets_x_three_times_and_others_need_call() -> None:
    attention = nn.MultiheadAttention(20, 4, batch_first=True)
    x = torch.randn(3, 7, 20)
    assert trace(attention, x).held

    class TwoInputs(nn.Module):
        def forward(self, x: Tensor, scale: float, mask: Tensor) -> Tensor:
            return (x @ x.mT * scale).masked_fill(mask, -1e9).softmax(-1) @ x

    with pytest.raises(TypeError, match=r"the call TwoInputs\(x \[3, 7, 20\]\) failed with TypeError.*pass call="):
        trace(TwoInputs(), x)
    later = torch.ones(7, 7, dtype=torch.bool).triu(1)
    steps = trace(TwoInputs(), x, call=lambda module, x: module(x, 20**-0.5, later))
    assert steps.held
    assert str(steps.row("mask").note).startswith("causal")


def test_calls_of_one_function_are_told_apart() -> None:
    def times(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    class Short(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.randn(3, 20, 20) / 5)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (times(x, w) for w in self.weights)
            return (q @ k.mT / 20**0.5).softmax(-1) @ v

    torch.manual_seed(3)
    module, x = Short(), torch.randn(2, 7, 20)
    steps = trace(module, x)
    for step, weight in zip(("queries", "keys", "values"), module.weights.detach(), strict=True):
        expected = (x @ weight)[0, :4, :4]
        torch.testing.assert_close(torch.tensor(steps.row(step).corner), expected, rtol=1e-5, atol=1e-6)
        assert list(steps.row(step).axes) == ["B", "Q" if step == "queries" else "K", "D"]


def test_layers_of_fused_calls_are_told_apart() -> None:
    torch.manual_seed(3)
    model, x = nn.Sequential(Torch(), Torch()), torch.randn(3, 7, 20)
    steps = trace(model, x)
    assert steps.held
    assert steps.title.endswith("layer 0 of 0–1")
    assert steps.row("weights").axes == {"B": 3, "H": 4, "Q": 7, "K": 7}
    assert names_of(steps) == set()


def test_a_bias_and_a_scale_inside_a_product_are_rows_of_their_own() -> None:
    class Bloom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.slopes = nn.Linear(20, 60), torch.rand(4, 1, 7)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (y.transpose(1, 2).flatten(0, 1) for y in self.qkv(x).unflatten(-1, (3, 4, 5)).unbind(2))
            p = torch.baddbmm(self.slopes.repeat(3, 1, 1), q, k.mT, alpha=5**-0.5).softmax(-1)
            return (p @ v).unflatten(0, (3, 4)).transpose(1, 2).flatten(2)

    steps = trace(Bloom(), torch.randn(3, 7, 20))
    assert steps.held
    assert [row.step for row in steps.rows if row.stage == 4] == ["scores", "scale", "bias", "weights", "head outputs"]
    assert names_of(steps) == {"no-output-projection"}


def test_the_fast_path_of_torch_is_not_recorded_but_its_output_is_returned() -> None:
    module = nn.TransformerEncoderLayer(20, 4, 40, batch_first=True).eval().requires_grad_(False)
    x = torch.randn(3, 7, 20)
    steps = trace(module, x)
    assert steps.held
    assert torch.equal(steps.output, module(x))
    assert torch.backends.mha.get_fastpath_enabled()


def test_headscopes_own_attention_in_a_model_is_named() -> None:
    model = nn.Sequential(nn.Linear(20, 20), headscope.MultiHeadAttention(20, 4))
    with pytest.raises(ValueError, match=r"1 is headscope's own attention, .*trace that module itself"):
        trace(model, torch.randn(2, 5, 20))


def test_a_function_is_traced() -> None:
    def attend(x: Tensor) -> Tensor:
        return (x @ x.mT / 20**0.5).softmax(-1) @ x

    steps = trace(attend, torch.randn(3, 7, 20))
    assert [row.step for row in steps.rows] == ["input", "scores", "scale", "weights", "head outputs"]
    assert steps.title == "attend on x [3, 7, 20]"


@pytest.mark.parametrize("layer", [0, 1])
def test_one_of_several_attentions_is_traced(layer: int) -> None:
    torch.manual_seed(3)
    model, x = nn.Sequential(seed_modules.SixSteps(20, 4), seed_modules.SixSteps(20, 5)), torch.randn(2, 7, 20)
    steps = trace(model, x, layer=layer)
    assert steps.title.endswith(f"layer {layer} of 0–1")
    assert steps.held
    assert steps.module["attentions"] == 2
    assert steps.row("weights").axes == {"B": 2, "H": 4 + layer, "Q": 7, "K": 7}
    assert steps.row("weights").code.endswith("values = torch.matmul(F.softmax(scores, dim=-1), v)")
    alone = trace(model[layer], model[:layer](x))
    assert [row.corner for row in alone.rows[1:]] == [row.corner for row in steps.rows[1:]]


def test_a_layer_that_does_not_exist_is_refused() -> None:
    model, x = nn.Sequential(seed_modules.SixSteps(20, 4), seed_modules.SixSteps(20, 4)), torch.randn(2, 7, 20)
    with pytest.raises(ValueError, match="layer: got 2, expected 0 to 1, the attentions of Sequential"):
        trace(model, x, layer=2)
    with pytest.raises(ValueError, match="layer: got -1, expected a whole number from 0"):
        trace(model, x, layer=-1)
    with pytest.raises(ValueError, match="layer: got 1, expected 0: headscope's own module is one layer"):
        trace(headscope.MultiHeadAttention(20, 4), x, layer=1)


def test_modes_gradients_and_the_input_are_as_before() -> None:
    module, x = nn.Sequential(seed_modules.SixSteps(20, 4), nn.Dropout(0.5)), torch.randn(2, 7, 20)
    module[1].eval()
    copy = x.clone()
    with torch.no_grad():
        steps = trace(module, x)
    assert module.training
    assert not module[1].training
    assert all(p.grad is None for p in module.parameters())
    assert torch.equal(x, copy)
    assert steps.output.grad_fn is None


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((nn.Linear(4, 4), torch.randn(2, 4)), {}, "no attention was found in Linear"),
        ((nn.Linear(4, 4),), {}, "x: missing; Linear is traced by running it"),
        ((nn.Linear(4, 4),), {"seq": 3}, "x: missing"),
        ((nn.Linear(4, 4), torch.randn(2, 4)), {"causal": True}, "causal: Linear has arguments of its own; pass call="),
        ((nn.Linear(4, 4), torch.empty(2, 4, device="meta")), {}, "x: is on the meta device"),
        ((nn.MultiheadAttention(4, 2), torch.randn(2, 4)), {"mask": torch.ones(2, 2)}, "module(x, x, x, key_padding_"),
    ],
)
def test_arguments_that_cannot_be_traced_are_errors(
    arguments: tuple[Any, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        trace(*arguments, **options)


def test_a_pass_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tape, "MOST_NUMBERS", 1000)
    with pytest.raises(ValueError, match="more than 2\\^26 numbers"):
        trace(seed_modules.SixSteps(20, 4), torch.randn(2, 7, 20))


def test_parameters_that_are_parts_of_one_buffer_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = seed_modules.SixSteps(20, 4), torch.randn(2, 7, 20)
    expected = trace(model, x).to_json()
    parameters = [*model.parameters()]
    sizes = [each.numel() for each in parameters]
    buffer = torch.cat([each.detach().flatten() for each in parameters])
    for parameter, part in zip(parameters, buffer.split(sizes), strict=True):
        parameter.data = part.view(parameter.shape)  # as optimisers that flatten parameters do
    monkeypatch.setattr(tape, "MOST_NUMBERS", 10_000)  # of these, the buffer has 1,680
    assert trace(model, x).to_json() == expected


def test_a_value_that_is_not_a_tensor_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"x: got list, expected a torch\.Tensor"):
        trace(nn.Linear(4, 4), [1.0])  # type: ignore[arg-type]

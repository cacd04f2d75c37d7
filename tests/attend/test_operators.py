"""The operators that torch.compile, torch.export and torch.func see in the place of the native kernels."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor import config as inductor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import headscope
import headscope.functional  # registers the operators
from headscope import positions
from headscope._attend.backends import native
from headscope.masks import Band, Dense, Documents, KeyLengths, Mask, Prefix, causal, mask_from_codes, window
from support.attention_cases import ON_A_CPU, OPTIONS, SIZES, Asked, B, H, K, Q, gradients, tensors
from support.forking import run_program

pytestmark = [
    pytest.mark.skipif(native.extension is None, reason="the native extension was not built: no C++ compiler"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),  # torch's own, within torch
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'> should not:DeprecationWarning"),
]

LONG = pytest.mark.long  # on combinations of what other cases compile
FORWARD, BACKWARD = "headscope.attend_forward.default", "headscope.attend_backward.default"


class Even(Mask):
    """A mask of the caller's own: every other key."""

    def allows(self, b: Any, h: Any, i: Any, j: Any) -> Tensor:
        return (j % 2 == 0) & (i >= 0)


class Seen:
    """A backend for torch.compile that runs a graph as it is and keeps the names of what it calls."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.names += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return graph.forward


def compiled(function: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    torch.compiler.reset()
    return torch.compile(function, **{"backend": "aot_eager", "fullgraph": True, **how})


def arguments(asked: Asked, backend: str, dropout: float = 0.0) -> tuple[Any, ...]:
    """Those of the forward operator."""
    q, k, v = (asked.tensors[name] for name in "qkv")
    codes: list[int] = []
    parts: list[Tensor] = []
    if "mask" in asked.said:
        mask = asked.said["mask"]
        (mask if isinstance(mask, Mask) else Dense(mask)).encode((B, H, q.shape[2], K), q.device, codes, parts)
    bias, sinks = native.four_axes(asked.tensors.get("bias")), asked.tensors.get("sinks")
    if bias is not None:
        bias = bias.detach().requires_grad_(bias.requires_grad)  # a leaf again
    numbers = (float(asked.said.get("scale", 0.5)), float(asked.said.get("softcap", 0.0)), dropout)
    return q, k, v, bias, sinks, codes, parts, *numbers, torch.tensor(5) if dropout else None, backend


# ---------------------------------------------------------------- masks


MASKS = [
    causal(), window(3), Band(), Band(sys.maxsize, -1, offset=2), Band(2, None, offset=(3, -2)), Prefix(4),
    Band(1, 1, offset=torch.tensor([1, 0])), Band(1, 1, offset=torch.tensor(2)), KeyLengths(torch.tensor([9, 0])),
    Documents(torch.arange(Q)[None] // 4, torch.arange(K)[None] // 4), Dense(torch.ones(Q, K).tril(1).bool()), Even(),
    (Prefix(2) | window(3)) & KeyLengths(torch.tensor([9, 0])) | Dense(torch.eye(Q, K).bool()),
]  # fmt: skip


@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
def test_a_mask_survives_as_numbers_and_tensors(mask: Mask) -> None:
    codes: list[int] = []
    parts: list[Tensor] = []
    mask.encode(SIZES, torch.device("cpu"), codes, parts)
    assert all(type(code) is int for code in codes)
    again = mask_from_codes(codes, parts)
    assert again is not None
    torch.testing.assert_close(again.dense(*SIZES), mask.dense(*SIZES))


@pytest.mark.parametrize("codes", [[8], [0, 1, 0, 9], [1, 2, 1, 3, 8]], ids=str)
def test_codes_of_another_version_are_refused(codes: list[int]) -> None:
    parts = [torch.tensor([2, 3])] * 2
    with pytest.raises(
        ValueError,
        match=r"mask: got the code \d, which this version of headscope does not define",
    ):
        mask_from_codes(codes, parts)
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(ValueError, match=r"export the program again with this version"):
        torch.ops.headscope.attend_forward(q, q, q, None, None, codes, parts, 1.0, 0.0, 0.0, None, "blocked")


def test_no_mask_is_none() -> None:
    assert mask_from_codes([], []) is None


def test_a_mask_of_the_callers_own_is_obeyed() -> None:
    given = tensors(torch.float32)
    for mask in (Even(), Even() | Prefix(2), causal() & Even()):
        wanted = headscope.attention(**given, mask=mask, backend="reference")
        torch.testing.assert_close(headscope.attention(**given, mask=mask, backend="cpu"), wanted)


# ---------------------------------------------------------------- the operators themselves


CHECKED = ["nothing", "mask: causal & documents | dense", "bias of keys", "everything"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.15's check itself
@pytest.mark.parametrize(
    ("option", "backend"),
    [
        pytest.param(
            option, backend, marks=() if option == "everything" or (option, backend) == ("nothing", "cpu") else LONG
        )
        for option in CHECKED
        for backend in ON_A_CPU
    ],  # "everything" has the mask and the bias of the others, "nothing" has dropout
)
def test_the_operators_are_what_they_say(option: str, backend: str) -> None:
    asked = OPTIONS[option](torch.float32)
    leaves = {name: x.requires_grad_() for name, x in asked.tensors.items()}
    args = arguments(Asked(leaves, asked.said, {}), backend, dropout=0.3 if option == "nothing" else 0.0)
    checked = [torch.library.opcheck(torch.ops.headscope.attend_forward.default, args)]
    args = tuple(x.detach() if isinstance(x, Tensor) else x for x in args)
    out, lse = torch.ops.headscope.attend_forward(*args)
    for grads in ((torch.randn_like(out), torch.randn_like(lse)), (torch.randn_like(out), None)):
        everything = (*args, out, lse, *grads, args[3] is not None, args[4] is not None)
        checked.append(torch.library.opcheck(torch.ops.headscope.attend_backward.default, everything))
    assert {outcome for found in checked for outcome in found.values()} == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("bad", [None, 0, 1, 2], ids=["finite", "q", "k", "v"])
@pytest.mark.parametrize("option", ["one query", "Dv 7", "everything"])
@pytest.mark.parametrize("backend", ON_A_CPU)
def test_fake_results_are_laid_out_as_real_ones(option: str, backend: str, bad: int | None, dtype: torch.dtype) -> None:
    args = arguments(OPTIONS[option](dtype), backend)
    if bad is not None:  # as one NaN in the padding of one entry
        args[bad][0, 0, -1, 0] = torch.nan
    real = torch.ops.headscope.attend_forward(*args)
    rest = (*real, torch.ones_like(real[0]), None, args[3] is not None, args[4] is not None)
    real = (*real, *torch.ops.headscope.attend_backward(*args, *rest))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_args, fake_rest = torch.utils._pytree.tree_map_only(Tensor, mode.from_tensor, (args, rest))
        fake = torch.ops.headscope.attend_forward(*fake_args)
        fake = (*fake, *torch.ops.headscope.attend_backward(*fake_args, *fake_rest))
    for one, other in zip(fake, real, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


# ---------------------------------------------------------------- torch.compile


def test_every_option_compiles_to_the_operator() -> None:
    calls = {name: option(torch.float32) for name, option in OPTIONS.items()}
    seen = Seen()

    def run(tensors: dict[str, dict[str, Tensor]]) -> Any:
        return {name: tuple(headscope.attend(**tensors[name], **call.said))[:2] for name, call in calls.items()}

    tensors = {name: call.tensors for name, call in calls.items()}
    got = compiled(run, backend=seen)(tensors)
    assert [name for name in seen.names if "headscope" in name] == ["headscope.attend_forward"] * len(calls), seen.names
    assert not [name for name in seen.names if "arange" in name], "a plan in the graph, which nobody reads"
    torch.testing.assert_close(got, run(tensors), rtol=0, atol=0)


@pytest.mark.parametrize("option", ["mask: lengths", "everything", "bias in float64"])
def test_compiled_gradients(option: str) -> None:
    asked = OPTIONS[option](torch.float32)
    leaves = {name: x.requires_grad_() for name, x in asked.tensors.items()}

    def run(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(zip(("out", "lse"), tuple(headscope.attend(**given, **asked.said))[:2], strict=True))

    torch.testing.assert_close(gradients(compiled(run)(leaves), leaves), gradients(run(leaves), leaves))


LENGTHS = KeyLengths(torch.tensor([9, 4]))


@pytest.mark.parametrize(
    ("mask", "dynamic"),
    [
        pytest.param(None, None, marks=LONG),
        pytest.param(causal(), None, marks=LONG),
        pytest.param(window(3) | Prefix(2), None, marks=LONG),
        (causal() & LENGTHS, None),
        (None, True),
        pytest.param(causal(), True, marks=LONG),  # also in test_compile_matrix.py
    ],
    ids=str,
)
def test_one_graph_for_every_length(mask: Mask | None, dynamic: bool | None) -> None:
    """With a length that is marked dynamic, and with everything dynamic."""
    counter = CompileCounterWithBackend("aot_eager")
    module = headscope.MultiHeadAttention(12, 3)
    run = compiled(module, backend=counter, dynamic=dynamic)
    frames = []
    for length in (11, 13, 17, 29):
        x = torch.randn(2, length, 12, requires_grad=True)
        if dynamic is None:
            torch._dynamo.mark_dynamic(x, 1)
        leaves = [x, *module.parameters()]
        out, wanted = run(x, mask=mask), module(x, mask=mask)
        torch.testing.assert_close(out, wanted)
        found, exact = (torch.autograd.grad(y.square().sum(), leaves) for y in (out, wanted))
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)
        frames.append(counter.frame_count)
    assert frames == [frames[0]] * 4, f"compiled again for another length: {frames}"


@pytest.mark.parametrize("axis", [0, 2])
def test_a_graph_with_an_open_axis_takes_masks_that_hold_tensors(axis: int) -> None:
    compiled = torch.compile(
        lambda q, mask: headscope.attention(q, q, q, mask=mask), backend="aot_eager", fullgraph=True
    )
    for size in (2, 3):
        compiled(torch.randn(*(size if number == axis else 4 for number in range(4))), causal())
    q = torch.randn(2, 4, 7, 4)
    for mask in (
        KeyLengths(torch.tensor([5, 7])), Band(None, 0, offset=torch.tensor([0, 1])),
        Documents(torch.arange(7)[None].expand(2, 7) // 3), Documents.from_cu_seqlens(torch.tensor([0, 5, 7])),
    ):  # fmt: skip
        torch.testing.assert_close(compiled(q, mask), headscope.attention(q, q, q, mask=mask))


def test_a_reach_that_changes_does_not_compile_forever() -> None:
    counter = CompileCounterWithBackend("eager")
    given = tensors(torch.float32)
    run = compiled(lambda n: headscope.attention(**given, mask=window(n)), backend=counter)
    for n in range(2, 9):
        torch.testing.assert_close(run(n), headscope.attention(**given, mask=window(n)), rtol=0, atol=0)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("backend", ON_A_CPU)
def test_the_seed_of_dropout_is_drawn_by_each_run(backend: str) -> None:
    given = tensors(torch.float32)

    def run() -> Tensor:
        return headscope.attention(**given, dropout=0.4, backend=backend)

    graph = compiled(run)
    torch.manual_seed(3)
    first, second = graph(), graph()
    torch.manual_seed(3)
    torch.testing.assert_close(graph(), first, rtol=0, atol=0)
    for seed in range(6):
        drawn = []
        for each in (run, graph):
            torch.manual_seed(seed)
            drawn.append(each())
        torch.testing.assert_close(*drawn, rtol=0, atol=0)
    assert not torch.equal(first, second), "the seed is part of the graph"


@pytest.mark.parametrize(
    ("backend", "fused"),
    [
        # the partition into passes, and what inductor recomputes; and its own calls of the operators
        ("aot_eager_decomp_partition", True), ("inductor", False),
        # with kernels of its own, which g++ compiles for 15 s
        pytest.param(
            "inductor", True, marks=[LONG, pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")]
        ),
    ],
)  # fmt: skip
def test_inductor_with_dropout_drops_the_same_in_both_passes(backend: str, fused: bool) -> None:
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 7, 4)
    v = torch.eye(7).expand(1, 2, 7, 7).clone().requires_grad_()  # out shows the dropped weights; so does the gradient

    def run(v: Tensor) -> Tensor:
        if not fused:
            return headscope.attention(q, k, v, mask=causal(), dropout=0.4)
        return headscope.attention(q * 2, k * 0.5, v, mask=causal(), dropout=0.4) * 1.0

    torch.manual_seed(0)
    with inductor.patch(fallback_random=not fused):
        out = compiled(run, backend=backend)(v)
        (gradient,) = torch.autograd.grad(out.sum(), v)
    torch.testing.assert_close(gradient[..., 0], out.detach().sum(2), rtol=1e-5, atol=1e-6)
    assert 0 < int((out == 0).sum()) < out.numel()


def test_nan_reaches_who_may_see_it_in_a_graph_too() -> None:
    given = tensors(torch.float32)
    given["k"][0, 1, 8, 2], given["v"][1, 0, 12, 0], given["q"][0, 2, 4, 1] = torch.nan, torch.inf, torch.nan
    hidden = torch.ones(Q, K, dtype=torch.bool)
    hidden[:, 8], hidden[:6, 12] = False, False
    leaves = {name: x.requires_grad_() for name, x in given.items()}

    def run(given: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"out": headscope.attention(**given, mask=Dense(hidden) & causal())}

    got, wanted = compiled(run)(leaves), run(leaves)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(gradients(got, leaves), gradients(wanted, leaves), equal_nan=True)
    assert got["out"].isnan().any()
    assert got["out"].isfinite().any()


def test_autocast_changes_nothing_in_a_graph() -> None:
    given = tensors(torch.float32)
    wanted = headscope.attention(**given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = compiled(lambda: headscope.attention(**given))()
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_leading_axes_and_named_backends_compile() -> None:
    q, k = torch.randn(2, 3, 4, 5, 6), torch.randn(3, 4, 7, 6)
    for backend in ("cpu", "blocked", "reference"):

        def run(backend: str = backend) -> Tensor:
            return headscope.attention(q, k, k, mask=window(2), backend=backend)

        torch.testing.assert_close(compiled(run)(), run(), msg=lambda text, name=backend: f"{name}: {text}")


# ---------------------------------------------------------------- torch.export


class Padded(nn.Module):
    """What is exported: attention of a padded batch."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = headscope.MultiHeadAttention(12, 4, kv_heads=2, softcap=5.0, sinks=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.attention(x, mask=causal() & KeyLengths(lengths))


LOADED = """
import sys, torch
from headscope import attention  # the operators come with the first public name that is asked for
program = torch.export.load(sys.argv[1]).module()
x, lengths, expected = torch.load(sys.argv[2])
torch.testing.assert_close(program(x, lengths), expected)
print("agrees")
"""


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    module, lengths = Padded().eval(), torch.tensor([11, 5])
    shapes = ({1: torch.export.Dim("length", min=2, max=512)}, None)
    program = torch.export.export(module, (torch.randn(2, 11, 12), lengths), dynamic_shapes=shapes, strict=strict)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert called.count(FORWARD) == 1, called
    for length in (11, 23):
        x = torch.randn(2, length, 12)
        torch.testing.assert_close(program.module()(x, lengths), module(x, lengths))


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.9's own load
def test_an_exported_program_is_saved_and_loaded(tmp_path: Any) -> None:
    module, x, lengths = Padded().eval(), torch.randn(2, 11, 12), torch.tensor([11, 5])
    program = torch.export.export(module, (x, lengths))
    kept = io.BytesIO()
    torch.export.save(program, kept)
    kept.seek(0)
    torch.testing.assert_close(torch.export.load(kept).module()(x, lengths), module(x, lengths))
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save((x, lengths, module(x, lengths).detach()), tmp_path / "given.pt")
    paths = [str(tmp_path / "program.pt2"), str(tmp_path / "given.pt")]
    done = run_program(LOADED, *paths)
    assert done.stdout == "agrees\n", done.stderr


# ---------------------------------------------------------------- torch.func and modes


def stacked(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """What vmap stands for."""
    each = [function(*entries) for entries in zip(*tensors, strict=True)]
    return torch.stack(each) if isinstance(each[0], Tensor) else tuple(torch.stack(x) for x in zip(*each, strict=True))


def test_vmap_and_grad() -> None:
    q, k, v = (torch.randn(3, 2, 2, 5, 4) for _ in range(3))
    lengths, bias = torch.tensor([[5, 3], [1, 0], [2, 4]]), torch.randn(3, 2, 5, 5)

    def out(*given: Tensor) -> Tensor:
        return headscope.attention(*given[:3], mask=KeyLengths(given[3]), bias=given[4], backend="cpu")

    def loss(*given: Tensor) -> Tensor:
        return out(*given).square().sum()

    torch.testing.assert_close(torch.func.vmap(out)(q, k, v, lengths, bias), stacked(out, q, k, v, lengths, bias))
    gradient = torch.func.grad(loss, argnums=(0, 1, 2, 4))
    leaves = [x[0].clone().requires_grad_() for x in (q, k, v, bias)]
    wanted = torch.autograd.grad(loss(*leaves[:3], lengths[0], leaves[3]), leaves)
    torch.testing.assert_close(gradient(q[0], k[0], v[0], lengths[0], bias[0]), wanted)
    per_entry = torch.func.vmap(gradient)(q, k, v, lengths, bias)
    torch.testing.assert_close(per_entry, stacked(gradient, q, k, v, lengths, bias))
    of_all = torch.func.grad(lambda q: torch.func.vmap(out)(q, k, v, lengths, bias).square().sum())(q)
    torch.testing.assert_close(of_all, per_entry[0])


def test_vmap_over_one_tensor_along_another_axis() -> None:
    q, k = torch.randn(2, 5, 3, 4), torch.randn(2, 7, 4)
    got = torch.func.vmap(lambda x: headscope.attention(x, k, k, mask=causal()), in_dims=2, out_dims=2)(q)
    wanted = torch.stack([headscope.attention(q[:, :, n], k, k, mask=causal()) for n in range(3)], 2)
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
def test_vmap_over_nothing(backend: str) -> None:
    q, k, lengths = torch.randn(2, 0, 3, 5, 11), torch.randn(0, 2, 3, 7, 11), torch.zeros(0, 2, dtype=torch.int64)

    def out(q: Tensor, k: Tensor, lengths: Tensor) -> Tensor:
        return headscope.attention(q, k, k[..., :2], mask=KeyLengths(lengths), backend=backend)

    many = torch.func.vmap(out, in_dims=(1, 0, 0))
    assert many(q, k, lengths).shape == (0, 2, 3, 5, 2)
    per_entry = torch.func.vmap(torch.func.grad(lambda *x: out(*x).sum()), in_dims=(1, 0, 0))
    assert per_entry(q, k, lengths).shape == (0, 2, 3, 5, 11)
    assert torch.func.grad(lambda q: many(q, k, lengths).sum())(q).shape == q.shape


def test_jacrev() -> None:
    q = torch.randn(1, 3, 2, dtype=torch.float64)

    def run(q: Tensor) -> Tensor:
        return headscope.attention(q, q, q, mask=causal())

    torch.testing.assert_close(torch.func.jacrev(run)(q), torch.autograd.functional.jacobian(run, q))


def test_what_has_no_derivative_says_so() -> None:
    q = torch.randn(1, 2, 5, 4)

    def run(q: Tensor) -> Tensor:
        return headscope.attention(q, q, q).sum()

    with pytest.raises(
        RuntimeError,
        match="this backend does not support forward-mode gradients",
    ):
        torch.func.jvp(run, (q,), (q,))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="does not support forward-mode gradients"):
        headscope.attention(forward_ad.make_dual(q, q), q, q)
    with pytest.raises(RuntimeError, match="this backend does not support second derivatives"):
        torch.func.grad(lambda q: torch.func.grad(run)(q).sum())(q)
    leaf = q.clone().requires_grad_()
    with FlopCounterMode(display=False):
        (gradient,) = torch.autograd.grad(run(leaf), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="this backend does not support second derivatives"):
        gradient.sum().backward()


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # torch's, of its own kernel
def test_vmap_inside_a_compiled_function_is_left_to_others() -> None:
    q = torch.randn(3, 1, 2, 5, 4)
    run = torch.func.vmap(lambda q: headscope.attention(q, q, q))
    torch.testing.assert_close(compiled(run)(q), run(q))
    with pytest.raises(Exception, match=r"backend: cpu refuses this call: torch\.func: within torch\.compile"):
        compiled(torch.func.vmap(lambda q: headscope.attention(q, q, q, backend="cpu")))(q)


@pytest.mark.parametrize(
    ("bias", "strict"),
    [
        pytest.param(positions.ALiBi(2), False, marks=LONG, id="alibi"),
        pytest.param(positions.ALiBi(2), True, id="alibi, strict"),
        pytest.param(positions.RelativeBias(2, positions.T5Buckets()), False, id="t5"),
        pytest.param(positions.RelativeBias(2, positions.T5Buckets()), True, marks=LONG, id="t5, strict"),
        pytest.param(None, False, marks=LONG, id="rotary"),
        pytest.param(None, True, id="rotary, strict"),
    ],
)
def test_an_exported_module_takes_positions_of_any_batch_and_length(bias: Any, strict: bool) -> None:
    rotary = positions.Rotary(8) if bias is None else None
    module = headscope.MultiHeadAttention(16, 2, position_bias=bias, rotary=rotary).eval()
    batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=64)

    def given(b: int, t: int) -> tuple[Tensor, Tensor]:
        return torch.randn(b, t, 16), (torch.arange(t) + torch.arange(b)[:, None])

    x, places = given(3, 5)
    dims = {"x": {0: batch, 1: length}, "positions": {0: batch, 1: length}}
    program = torch.export.export(module, (x,), {"positions": places}, dynamic_shapes=dims, strict=strict).module()
    for b, t in ((3, 5), (2, 2), (9, 9), (4, 9)):
        x, places = given(b, t)
        torch.testing.assert_close(program(x, positions=places), module(x, positions=places))


def test_a_bias_with_a_fixed_number_of_heads_fits_a_graph_of_any_number() -> None:
    run = compiled(lambda q, bias: headscope.attention(q, q, q, bias=bias.expand(-1, 2, -1, -1)), dynamic=True)
    q, bias = torch.randn(3, 2, 5, 8), torch.randn(3, 1, 5, 5)
    torch.testing.assert_close(run(q, bias), headscope.attention(q, q, q, bias=bias))


@pytest.mark.parametrize(
    "mask", [*(pytest.param(each, marks=LONG) for each in (Band(3, 0), Prefix(3) | causal())), causal()], ids=str
)
def test_queries_and_keys_are_open_apart_by_definition_too(mask: Mask) -> None:
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(
        lambda q, k: headscope.attention(q, k, k, mask=mask, backend="reference"),
        backend=counter, dynamic=True, fullgraph=True,
    )  # fmt: skip
    torch.compiler.reset()
    for queries, keys in ((5, 9), (6, 20), (7, 8), (9, 9), (20, 6), (3, 50)):
        q, k = torch.randn(1, 2, queries, 8), torch.randn(1, 2, keys, 8)
        torch.testing.assert_close(run(q, k), headscope.attention(q, k, k, mask=mask))
    assert counter.frame_count <= (2 if mask == causal() else 1), "a causal mask is asked whether it is square"


def test_a_decomposed_program_takes_more_queries_than_keys() -> None:
    class Own(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return headscope.attention(q, k, k, backend="cpu")

    q, k = torch.randn(2, 2, 7, 8), torch.randn(2, 2, 9, 8)
    dims = {name: {2: torch.export.Dim.DYNAMIC} for name in "qk"}
    program = torch.export.export(Own(), (q, k), dynamic_shapes=dims).run_decompositions().module()
    torch.testing.assert_close(program(k, q), headscope.attention(k, q, q))


@pytest.mark.parametrize("backend", ON_A_CPU)
def test_gradients_have_the_strides_of_eager_mode(backend: str) -> None:
    q = torch.randn(1, 4, 2, 8).transpose(1, 2).requires_grad_()

    def run(q: Tensor) -> Tensor:
        return headscope.attention(q, q * 1, q * 1, backend=backend).sum()

    strides = [torch.autograd.grad(each(q), q)[0].stride() for each in (run, compiled(run))]
    assert strides[0] == strides[1]


@pytest.mark.parametrize(
    ("transform", "itself"),
    [
        pytest.param("jvp", False, marks=LONG),
        ("hessian", True),
        ("grad of grad", False),
        pytest.param("grad of grad", True, marks=LONG),
        ("grad of each sample", False),
    ],
)
def test_blocked_has_every_derivative_inside_a_compiled_function(transform: str, itself: bool) -> None:
    q = torch.randn(1, 2, 5, 4)

    def run(backend: str) -> Callable[[Tensor], Tensor]:
        def loss(q: Tensor) -> Tensor:
            k, v = (q, q) if itself else (2 * q, q + 1)
            return headscope.attention(q, k, v, mask=causal(), backend=backend).square().sum()

        grad = torch.func.grad(loss)
        if transform == "jvp":
            return lambda q: torch.func.jvp(loss, (q,), (torch.ones_like(q),))[1]
        if transform == "hessian":
            return torch.func.hessian(loss)
        if transform == "grad of grad":
            return torch.func.grad(lambda q: grad(q).square().sum())
        return lambda q: torch.func.vmap(grad)(torch.stack([q, -q]))

    torch.testing.assert_close(compiled(run("blocked"))(q), run("reference")(q), rtol=1e-4, atol=1e-4)


def test_modes_see_the_operators() -> None:
    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    q = torch.randn(1, 2, 5, 4, requires_grad=True)
    with Names() as mode:
        out = headscope.attention(q, q, q, mask=causal())
        out.sum().backward()
    assert {FORWARD, BACKWARD} <= set(mode.names)
    torch.testing.assert_close(out, headscope.attention(q, q, q, mask=causal()), rtol=0, atol=0)


def test_a_fake_call_leaves_nothing_behind() -> None:
    q = torch.randn(1, 2, 5, 4)
    mask = Band(3, 1, offset=1)
    with FakeTensorMode() as mode:
        fake = headscope.attention(*[mode.from_tensor(q)] * 3, mask=mask)
    real = headscope.attention(q, q, q, mask=mask)
    assert type(real) is Tensor
    assert (fake.shape, fake.stride()) == (real.shape, real.stride())


def test_subclasses_are_refused() -> None:
    class Own(Tensor):
        pass

    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(
        ValueError,
        match="backend: cpu refuses this call: tensors: are of a subclass of Tensor",
    ):
        headscope.attention(q, q.as_subclass(Own), q, backend="cpu")
    torch.testing.assert_close(headscope.attention(q, q.as_subclass(Own), q).as_subclass(Tensor),
                               headscope.attention(q, q, q))  # fmt: skip


@pytest.mark.parametrize("backend", [None, "blocked"])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
def test_subclasses_are_masked_as_others(mask: Mask, backend: str | None) -> None:
    class Own(Tensor):
        pass

    q, k, v = (torch.randn(B, H, length, 4) for length in (Q, K, K))
    (seen, wanted) = (
        headscope.attend(each, k.clone().requires_grad_(), v, mask=mask, backend=backend)
        for each in (q.as_subclass(Own), q)
    )
    for name in ("out", "lse"):
        torch.testing.assert_close(getattr(seen, name).as_subclass(Tensor), getattr(wanted, name))
    looked, truth = (headscope.observe(each, k, mask=mask).flat() for each in (q.as_subclass(Own), q))
    assert looked == pytest.approx(truth)


@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize(
    ("mask", "transform"),
    [(causal(), "vmap"), pytest.param(causal(), "grad", marks=LONG), (Band(1, 0, offset=-1), "vjp"),
     pytest.param(Prefix(2), "grad", marks=LONG), pytest.param(None, "vjp", marks=LONG),
     pytest.param(KeyLengths(torch.tensor([3])), "vmap", marks=LONG),  # each transform stays with one mask
     pytest.param(KeyLengths(torch.tensor([3])), "vjp", marks=LONG), (KeyLengths(torch.tensor([3])), "grad")],
)  # fmt: skip
def test_transforms_inside_a_compiled_function_are_masked_as_elsewhere(mask: Mask | None, transform: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 5, 4)

    def attend(q: Tensor) -> Tensor:
        return headscope.attention(q, k, v, mask=mask, bias=torch.linspace(0, 1, 5))

    def vjp(q: Tensor) -> Tensor:
        return torch.func.vjp(attend, q)[1](torch.ones_like(q))[0]

    grad = torch.func.grad(lambda q: attend(q).square().sum())
    run = {"vmap": torch.func.vmap(attend), "vjp": vjp, "grad": grad}[transform]
    given = torch.stack([q, -q]) if transform == "vmap" else q
    torch.testing.assert_close(compiled(run)(given), run(given))


@pytest.mark.parametrize("backend", [None, *ON_A_CPU])
@pytest.mark.parametrize("mask", MASKS, ids=lambda mask: type(mask).__name__)
def test_masks_hold_while_forward_mode_gradients_are_open(mask: Mask, backend: str | None) -> None:
    """With nothing to differentiate: what is frozen, beside what is not."""
    q, k, v = (torch.randn(B, H, length, 4, requires_grad=True) for length in (Q, K, K))
    wanted = tuple(headscope.attend(q, k, v, mask=mask, backend=backend))[:2]
    outer = torch.autograd.grad(wanted[0].square().sum(), (q, k, v), retain_graph=True)
    with forward_ad.dual_level():
        seen = tuple(headscope.attend(q, k, v, mask=mask, backend=backend))[:2]
        inner = torch.autograd.grad(seen[0].square().sum(), (q, k, v))
        late = torch.autograd.grad(wanted[0].square().sum(), (q, k, v))
    torch.testing.assert_close(seen, wanted)
    torch.testing.assert_close(inner, outer)
    torch.testing.assert_close(late, outer)


HELD: dict[str, Callable[[Tensor], Mask]] = {
    "lengths": KeyLengths,
    "dense": lambda x: Dense(x[:, None, None, None] > 4),
    "both": lambda x: causal() & KeyLengths(x),
}


@pytest.mark.parametrize("hold", HELD.values(), ids=HELD)
def test_a_mask_may_hold_tensors_of_a_subclass(hold: Callable[[Tensor], Mask]) -> None:
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    q, k, v = (torch.randn(2, H, 6, 4) for _ in range(3))
    held = torch.tensor([6, 3])
    seen, wanted = (headscope.attention(q, k, v, mask=hold(x)) for x in (two(held, held.clone()), held))
    torch.testing.assert_close(seen.a if type(seen) is two else seen, wanted)


def test_a_hidden_nan_of_a_subclass_stays_hidden() -> None:
    class Own(Tensor):
        pass

    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    k[:, :, 3:] = torch.nan
    wanted = headscope.attention(q, k, v, mask=Prefix(3), backend="reference")
    assert wanted.isfinite().all()
    for given in ((q.as_subclass(Own), k, v), [x.as_subclass(Own) for x in (q, k, v)]):
        torch.testing.assert_close(headscope.attention(*given, mask=Prefix(3)).as_subclass(Tensor), wanted)


@pytest.mark.parametrize("backend", ON_A_CPU)
@pytest.mark.parametrize("mask", [Prefix(3), causal()])
def test_a_nan_spoils_the_same_gradients_under_a_mode(mask: Mask, backend: str) -> None:
    q, k, v = (torch.randn(1, 2, 5, 4) for _ in range(3))
    k[:, :, 3:] = v[:, :, 4] = torch.nan
    found: list[tuple[Tensor, ...]] = []
    for mode in (contextlib.nullcontext(), FlopCounterMode(display=False)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with mode:
            out = headscope.attention(*leaves, mask=mask, backend=backend)
            found.append((out.detach(), *torch.autograd.grad(out[:, :, :3].sum(), leaves)))
    torch.testing.assert_close(*found, equal_nan=True)
    assert all(x.isfinite().all() for x in found[0][1:])


# ---------------------------------------------------------------- the direct path, with gradients


@pytest.mark.parametrize(
    "said",
    [{}, {"mask": causal()}, {"bias": torch.randn(H, 1, K)}, {"sinks": torch.randn(H)}],
    ids=["plain", "causal", "bias", "sinks"],
)
def test_a_repeated_call_has_the_gradients_of_its_own_tensors(said: dict[str, Any]) -> None:
    numbers = {name: x for name, x in said.items() if name == "mask"}
    for scale in (1.0, 2.0, 3.0):
        given = {**tensors(torch.float32), **{name: x for name, x in said.items() if name != "mask"}}
        leaves = {name: (x * scale).requires_grad_() for name, x in given.items()}
        for run in (headscope.attention, lambda **all_of: tuple(headscope.attend(**all_of))[:2]):
            results: list[dict[str, Tensor]] = []
            for backend in ("cpu", "reference"):
                got = run(**leaves, **numbers, backend=backend)
                results.append({"out": got} if isinstance(got, Tensor) else {"out": got[0], "lse": got[1]})
            torch.testing.assert_close(results[0], results[1])
            found, wanted = (gradients(result, leaves) for result in results)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=3e-5)  # sums of some numbers of 10 and more


@pytest.mark.parametrize("repeat", [1, 2])
def test_hidden_nan_spoils_no_gradient_of_a_repeated_call(repeat: int) -> None:
    """A key that nobody sees leaves out as it is, so that only the backward pass can notice it."""
    for _ in range(repeat):
        given = tensors(torch.float32)
        given["k"][0, 1, 12, 2] = torch.inf
        leaves = {name: x.requires_grad_() for name, x in given.items()}
        found = gradients({"out": headscope.attention(**leaves, mask=Prefix(12))}, leaves)
    clean = {name: x.detach().clone() for name, x in leaves.items()}
    clean["k"][0, 1, 12] = 0
    clean = {name: x.requires_grad_() for name, x in clean.items()}
    wanted = gradients({"out": headscope.attention(**clean, mask=Prefix(12))}, clean)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_nothing_is_said_at_exit() -> None:
    code = "import torch; from headscope import attention, masks; q = torch.randn(1, 1, 2, 8)"
    code += "; attention(q, q, q); attention(q, q.requires_grad_(), q, mask=masks.causal()).sum().backward()"
    done = run_program(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

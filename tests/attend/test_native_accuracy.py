"""The native kernels in float32 against float64, for few queries, few keys and narrow heads.

The measure is the root of the mean square over all numbers of many calls, against that of plain torch.
"""

from __future__ import annotations

import pytest

from headscope._attend.backends import native
from support.native_targets import TARGETS, run

pytestmark = pytest.mark.skipif(native.extension is None, reason="the native extension was not built: no C++ compiler")

COMPARE = """
import itertools, os, sys, torch
from headscope import attend

NAMES = ("out", "lse", "dq", "dk", "dv")

def results(inputs, grad, compute):
    *leaves, bias = [x.clone().requires_grad_() for x in inputs]
    out, lse = compute(*leaves, bias.detach())
    return [x.detach().double() for x in (out, lse, *torch.autograd.grad(out, leaves, grad))]

def plain(q, k, v, bias):
    logits = q @ k.mT * q.shape[-1] ** -0.5 + bias
    return logits.softmax(-1) @ v, logits.logsumexp(-1)

def native(q, k, v, bias):
    result = attend(q, k, v, bias=bias if BIAS else None, backend="cpu")
    return result.out, result.lse

def rms(x, y):
    return float((x - y).square().mean().sqrt())

def compare(target, cases):
    from headscope._attend.backends import native as cpu
    assert cpu.extension.target() == target
    for size, inputs, grad, truth, theirs in cases:
        ours = results(inputs, grad, native)
        for name, x, y, z in zip(NAMES, ours, theirs, truth):
            allowed = BOUNDS[NAMES.index(name)] * rms(y, z)
            assert rms(x, z) <= allowed, (size, name, f"{rms(x, z):.2e}, allowed {allowed:.2e}")

torch.set_num_threads(1)
torch.manual_seed(0)
cases = []
for queries, keys, depth, spread in SIZES:
    size, batch = (queries, keys, depth, spread), 2048 // queries + 64
    q, grad = torch.randn(batch, 1, queries, depth) * spread, torch.randn(batch, 1, queries, depth)
    k, v = torch.randn(batch, 1, keys, depth) * spread, torch.randn(batch, 1, keys, depth)
    inputs = (q, k, v, BIAS * torch.randn(batch, 1, 1, keys))
    truth = results([x.double() for x in inputs], grad.double(), plain)
    cases.append((size, inputs, grad, truth, results(inputs, grad, plain)))
for target in TARGETS:
    child = os.fork()
    if child == 0:
        os.environ["HEADSCOPE_CPU_TARGET"] = target
        code = 1
        try:
            compare(target, cases)
            code = 0
        except AssertionError as error:
            print(target, error, file=sys.stderr, flush=True)
        os._exit(code)
    print(target, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def compare(sizes: list[tuple[int, int, int, float]], bounds: tuple[float, ...], bias: float = 0) -> None:
    """Assert, on each target, that errors are at most these times plain torch's.

    Args:
        sizes: each is (Q, K, D, spread).
        bounds: of out, lse, dq, dk and dv.
        bias: the spread of a bias [B, 1, 1, K]; 0 = none.
    """
    program = COMPARE.replace("TARGETS", repr(TARGETS)).replace("SIZES", repr(sizes)).replace("BOUNDS", repr(bounds))
    program = program.replace("BIAS", repr(bias))
    done = run(program)
    assert done.stdout == "".join(f"{target} 0\n" for target in TARGETS), done.stderr


def test_lse_of_small_logits_is_as_accurate_as_torch() -> None:
    """The logarithm of the sum is then the largest part of lse: in float its roundings would be most of the error."""
    compare([(8, keys, depth, 0.3) for keys in (3, 5, 40) for depth in (4, 8)], (2.0, 1.25, 2.0, 2.0, 2.0))


def test_gradients_of_few_queries_and_peaked_rows_are_as_accurate_as_torch() -> None:
    """The keys lie in several blocks: the rounding of dP must cancel in dP - δ all the same."""
    compare([(queries, 100, depth, 4.0) for queries in (1, 3, 8) for depth in (2, 4, 8)], (2.0,) * 5)


def test_gradients_of_narrow_heads_are_as_accurate_as_torch() -> None:
    """Beside nearly exact logits the rounding of lse would be the largest error of the weights."""
    compare(
        [(queries, keys, depth, 1.0) for queries in (16, 40) for keys in (100, 300) for depth in (1, 4)], (2.0,) * 5
    )


@pytest.mark.parametrize("spread", [1.0, 3.0])
def test_small_shapes_are_as_accurate_as_torch(spread: float) -> None:
    sizes = [
        (queries, keys, depth, spread) for queries in (1, 2, 7) for keys in (1, 2, 6, 8, 100) for depth in (1, 3, 6)
    ]
    compare(sizes, (2.0,) * 5)


@pytest.mark.parametrize("spread", [5.0, 30.0])
def test_gradients_beside_a_large_bias_are_as_accurate_as_torch(spread: float) -> None:
    """One weight is close to 1: the rounding of lse, which is then above 16, would be the largest error of dV."""
    compare([(17, 300, 64, 1.0), (128, 128, 64, 1.0)], (2.0,) * 5, bias=spread)

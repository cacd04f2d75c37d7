"""The native kernels: every target that this CPU has, threads, forks, and what is read of memory.

Their results against the float64 oracle are in test_functional.py and test_attention_fuzz.py, like those of every
backend.
"""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
from torch import Tensor

from headscope import attend, attention, masks
from headscope._attend.backends import native
from headscope.masks import Dense, Documents, KeyLengths
from support.native_targets import TARGETS, run
from support.paths import PROGRAMS
from support.tolerance import assert_as_accurate

pytestmark = pytest.mark.skipif(native.extension is None, reason="the native extension was not built: no C++ compiler")


# Each target in a process of its own: of one that has imported torch.
FORCED = """
import itertools, os, torch

def compare(target):
    from headscope import attend, masks
    from headscope._attend.backends import native as cpu
    assert cpu.extension.target() == target, cpu.extension.target()
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for number, dtype, softcap in itertools.product(range(4), dtypes, (None, 3.0)):
        # every pair of size, mask and dtype; the self-check has the rest
        place = number + dtypes.index(dtype) + (softcap is not None)
        batch, heads, kv_heads, queries, keys, depth, width = SIZES[place % 4]
        ids = torch.arange(keys).remainder(3)[None].expand(batch, -1)
        documents = masks.Documents(ids[:, -queries:], ids)
        mask = (None, masks.causal(), masks.window(5) | masks.Prefix(2), documents)[number]
        q = torch.randn(batch, heads, queries, depth).to(dtype)
        k = torch.randn(batch, kv_heads, keys, depth) * torch.linspace(0.5, 4, keys)[:, None]  # maxima move to the last
        k, v = k.to(dtype), torch.randn(batch, kv_heads, keys, width).to(dtype)
        options = dict(mask=mask, softcap=softcap, bias=torch.randn(heads, 1, keys), sinks=torch.randn(heads))
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        exact = [x.clone().double().requires_grad_() for x in (q, k, v)]
        plain = [x.clone().requires_grad_() for x in (q, k, v)]
        grad = torch.randn(batch, heads, queries, width)
        got = attend(*leaves, backend="cpu", **options)
        want = attend(*exact, backend="reference", **options)
        near = attend(*plain, backend="blocked", **options)
        for out, x in ((got, grad.to(dtype)), (want, grad.to(dtype).double()), (near, grad.to(dtype))):
            torch.autograd.backward([out.out, out.lse], [x, torch.ones_like(out.lse)])
        pairs = [(got.out, near.out, want.out), (got.lse, near.lse, want.lse)]
        pairs += [(a.grad, b.grad, c.grad) for a, b, c in zip(leaves, plain, exact)]
        floor = 64 * torch.finfo(dtype).eps
        for ours, theirs, truth in pairs:
            seen = truth.isfinite()
            error = (ours.double() - truth)[seen].abs().max()
            allowed = 2 * (theirs.double() - truth)[seen].abs().max()
            allowed = allowed + floor * truth[seen].abs().max().clamp(min=1e-3)
            assert error <= allowed, (target, dtype, mask, softcap, float(error), float(allowed))
for target in TARGETS:
    child = os.fork()
    if child == 0:
        os.environ["HEADSCOPE_CPU_TARGET"] = target
        compare(target)
        os._exit(0)
    print(target, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
SIZES = "((2, 6, 3, 5, 7, 5, 3), (1, 2, 2, 53, 131, 16, 24), (1, 4, 1, 1, 67, 64, 64), (3, 1, 1, 17, 17, 33, 19))"

STARVED = """
import resource, torch
from headscope import attention

def forward():  # scratch is some hundred times D
    q = torch.ones(1, 1, 4, 1 << 18)
    return attention(q, q, q, backend="cpu")

q, k = torch.ones(1, 1, 512, 4, requires_grad=True), torch.ones(1, 1, 300_000, 4, requires_grad=True)
loss = attention(q, k, k, backend="cpu").sum()

def backward():  # dk and dv are summed in rows of whole vectors
    return torch.autograd.grad(loss, (q, k), retain_graph=True)

for step in (forward, backward):
    expected = step()  # with what is made once: threads, imports
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (24 << 20), limits[1]))
    try:
        step()
        print("enough memory")
    except MemoryError:
        print("MemoryError")
    resource.setrlimit(resource.RLIMIT_AS, limits)
    torch.testing.assert_close(step(), expected, rtol=0, atol=0)
"""

# Calls that would take minutes: the process would outlast its time if they were not left.
INTERRUPTED = """
import os, signal, threading, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever the parent of the tests does with it
from headscope import attention
from headscope._attend.backends import native as cpu

def made(length, train):
    return torch.ones(1, 1, length, 64, requires_grad=train)

def call(q, train):
    out = attention(q, q, q, backend="cpu")
    if train:
        out.sum().backward()
    return out

def nothing(described, call, need_lse):
    return torch.zeros(1, 1, call.queries, 64), torch.zeros(1, 1, call.queries)

expected, usual = call(made(100, True), True), cpu.run_forward
for threads in (1, 2):
    torch.set_num_threads(threads)
    for train in (False, True):
        cpu.run_forward = nothing if train else usual  # only the one pass shall be long
        q = made(400_000, train)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            call(q, train)
            print(threads, train, "finished")
        except KeyboardInterrupt:
            print(threads, train, "interrupted")
        cpu.run_forward = usual
        torch.testing.assert_close(call(made(100, True), True), expected, rtol=0, atol=0)
"""


def tensors(queries: int = 37, keys: int = 41) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 3, queries, 13), torch.randn(2, 3, keys, 13), torch.randn(2, 3, keys, 11)


def test_each_target_agrees_with_the_definition() -> None:
    done = run(FORCED.replace("TARGETS", repr(TARGETS)).replace("SIZES", SIZES))
    assert done.stdout == "".join(f"{target} 0\n" for target in TARGETS), done.stderr


# Each target in a process of its own: of one that has the truth, and torch's results.
LONG_SUMS = """
import os, torch
from headscope import attention

def results(q, k, v, grad, attend):
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [x.detach().double() for x in (out, *torch.autograd.grad(out, leaves, grad))]

def exact(q, k, v):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v

def compare(target, cases):
    from headscope._attend.backends import native
    assert native.extension.target() == target
    for inputs, truth, theirs in cases:
        ours = results(*inputs, lambda *x: attention(*x, backend="cpu"))
        for name, x, y, z in zip(("out", "dq", "dk", "dv"), ours, theirs, truth):
            ratio = float((x - z).square().mean().sqrt() / (y - z).square().mean().sqrt())
            assert ratio <= 2, (name, inputs[0].shape, inputs[1].shape, f"{ratio:.2f} times torch's error")

torch.set_num_threads(1)
torch.manual_seed(0)
cases = []
for queries, keys in ((100, 8192), (3, 8192), (8192, 100)):
    q, grad, (k, v) = torch.randn(1, 2, queries, 64), torch.randn(1, 2, queries, 64), torch.randn(2, 1, 2, keys, 64)
    truth = results(*(x.double() for x in (q, k, v, grad)), exact)
    theirs = results(q, k, v, grad, torch.nn.functional.scaled_dot_product_attention)
    cases.append(((q, k, v, grad), truth, theirs))
for target in TARGETS:
    child = os.fork()
    if child == 0:
        os.environ["HEADSCOPE_CPU_TARGET"] = target
        compare(target, cases)
        os._exit(0)
    print(target, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_long_sums_are_as_accurate_as_short_ones() -> None:
    """In float32, on the average of all numbers, for which there is no floor: a single chain over a row loses bits."""
    done = run(LONG_SUMS.replace("TARGETS", repr(TARGETS)))
    assert done.stdout == "".join(f"{target} 0\n" for target in TARGETS), done.stderr


def test_an_unknown_target_is_one_clear_error() -> None:
    code = "from headscope._attend.backends import native as cpu; cpu.extension.target()"
    done = run(code, HEADSCOPE_CPU_TARGET="abacus")
    assert done.returncode == 1
    assert "HEADSCOPE_CPU_TARGET: got 'abacus', expected a target of this CPU:" in done.stderr


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(9)], ids=repr)
def test_the_result_does_not_depend_on_the_threads(mask: masks.Mask | None) -> None:
    q, k, v = tensors(700, 900)
    before = torch.get_num_threads()
    results: list[list[Tensor]] = []
    try:
        for threads in (1, 2, 7, 30):  # alone; each at heads of its own; several at a head; more than there is to do
            torch.set_num_threads(threads)
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = attention(*leaves, mask=mask, backend="cpu")
            out.sum().backward()
            results.append([out, *(x.grad for x in leaves if x.grad is not None)])
    finally:
        torch.set_num_threads(before)
    for found in results[1:]:
        torch.testing.assert_close(found, results[0], rtol=0, atol=0)


def test_called_from_several_threads() -> None:
    q, k, v = tensors()
    wanted = attention(q, k, v, mask=masks.causal(), backend="cpu")
    results: list[Tensor] = []

    def work() -> None:
        results.extend(attention(q, k, v, mask=masks.causal(), backend="cpu") for _ in range(20))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 80
    for result in results:
        torch.testing.assert_close(result, wanted, rtol=0, atol=0)


def test_a_forked_child_runs() -> None:
    code = """
import os, torch
from headscope import attention
q = torch.randn(2, 4, 200, 16)
expected = attention(q, q, q, backend="cpu")
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(attention(q, q, q, backend="cpu"), expected) else 3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = run(code)
    assert done.stdout == "0\n", done.stderr


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(70), masks.window(9)])
@pytest.mark.parametrize("length", [39, 96, 144, 300])
def test_maxima_that_move_with_every_block_of_keys(mask: masks.Mask | None, length: int) -> None:
    q, k, v = (torch.randn(1, 2, length, 64) for _ in range(3))
    k = k * torch.linspace(0, 9, length)[:, None]
    ours = attention(q, k, v, mask=mask, backend="cpu")
    exact = attention(q.double(), k.double(), v.double(), mask=mask, backend="reference")
    torch.testing.assert_close(ours.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(5)])
def test_nothing_around_the_tensors_is_read(mask: masks.Mask | None) -> None:
    wanted, guarded = tensors(), []
    for x in wanted:
        room = torch.full((2, 3, x.shape[2] + 8, x.shape[3] + 16), torch.nan)
        inside = room[:, :, 3:-5, 7:-9]
        inside.copy_(x)
        guarded.append(inside)
    torch.testing.assert_close(
        attention(*guarded, mask=mask, backend="cpu"), attention(*wanted, mask=mask, backend="cpu"), rtol=0, atol=0
    )


def test_a_tensor_changed_after_the_call_is_noticed_by_the_backward_pass() -> None:
    q, k, v = (x.requires_grad_() for x in tensors())
    out = attention(q, k * 1, v, backend="cpu")
    scaled = q * 2
    out = attention(scaled, k, v, backend="cpu")
    scaled.data.add_(0)
    with torch.no_grad():
        scaled.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("backend", ["cpu", "blocked"])
@pytest.mark.parametrize("documents", [False, True])
def test_a_mask_changed_after_the_call_is_noticed_by_the_backward_pass(backend: str, documents: bool) -> None:
    q, k, v = (x[:1].requires_grad_() for x in tensors(7, 7))
    own = torch.arange(7)[None] % 3 if documents else torch.ones(7, 7, dtype=torch.bool).tril()
    mask = KeyLengths(torch.tensor([3])) | Documents(own) if documents else Dense(own)
    attention(q, k, v, mask=mask, backend=backend).sum().backward()
    out = attention(q, k, v, mask=mask, backend=backend)
    own.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("lengths", [None, (2999, 2051), (1, 2048)])
def test_a_step_of_decoding(group: int, lengths: tuple[int, int] | None, dtype: torch.dtype) -> None:
    """Several keys share a vector, but not in the block in which some are hidden; and the keys are shared out."""
    random = torch.Generator().manual_seed(group)
    q = torch.randn(2, 2 * group, 1, 24, generator=random).to(dtype)
    k, v = (torch.randn(2, 2, 2999, 24, generator=random).to(dtype) for _ in range(2))
    sinks = torch.randn(2 * group, generator=random)
    mask = None if lengths is None else KeyLengths(torch.tensor(lengths))
    found = attend(q, k, v, mask=mask, sinks=sinks, backend="cpu")
    exact = attend(q.double(), k.double(), v.double(), mask=mask, sinks=sinks.double(), backend="reference")
    if dtype == torch.float64:  # nothing is more exact
        torch.testing.assert_close((found.out, found.lse), (exact.out, exact.lse), rtol=1e-12, atol=1e-13)
        return
    plain = attend(q, k, v, mask=mask, sinks=sinks, backend="reference")
    assert_as_accurate(found.out, exact.out, plain.out)
    assert_as_accurate(found.lse, exact.lse, plain.lse)


# in float32 avx512 and avx512_bf16 run the same code
UNLIKE_TARGETS = [each for each in TARGETS if each != "avx512" or "avx512_bf16" not in TARGETS]


@pytest.fixture(scope="module")
def short_call_errors() -> subprocess.CompletedProcess[str]:
    """What the program prints of all targets."""
    return run((PROGRAMS / "short_call_errors.py").read_text(encoding="utf-8"), *UNLIKE_TARGETS)


@pytest.mark.parametrize("target", UNLIKE_TARGETS)
def test_results_of_short_calls_err_at_most_twice_as_much_as_those_of_torch(
    target: str, short_call_errors: subprocess.CompletedProcess[str]
) -> None:
    """Torch multiplies few vectors, and short ones, in sums of few roundings."""
    lines = [line.split() for line in short_call_errors.stdout.splitlines()]
    rows = [row for name, *row in lines if name == target]
    names = (*(f"queries={n}" for n in (1, 2, 3)), *(f"keys={n}" for n in (3, 8, 11, 10)), "depth=8", "depth=32")
    assert [row[0] for row in rows] == [*names, "width=256", "width=256"], short_call_errors.stderr
    assert all(float(ratio) < 2 for row in rows for ratio in row[2::2]), rows


# "generic" has no fused multiply-add, which saves the rounding of log2(e) times a bias
MOST_BESIDE_SINKS = 2.5 if native.extension is not None and native.extension.target() == "generic" else 1.9


@pytest.mark.parametrize("depth", [3, 16])
@pytest.mark.parametrize("scale", [0.0, None])
def test_gradients_beside_sinks_err_at_most_twice_as_much_as_those_of_torch(scale: float | None, depth: int) -> None:
    """Where all logits are equal, additions of the weights, which are no power of 2, all round the same way."""
    errors = {"cpu": torch.zeros(2, dtype=torch.float64), "reference": torch.zeros(2, dtype=torch.float64)}
    random = torch.Generator().manual_seed(5)

    def gradients(backend: str, *inputs: Tensor) -> list[Tensor]:
        *qkv, sinks, grad_out = inputs
        leaves = (qkv[2].clone().requires_grad_(), sinks.clone().requires_grad_())
        out = attention(*qkv[:2], leaves[0], sinks=leaves[1], scale=scale, backend=backend)
        return [x.double() for x in torch.autograd.grad(out, leaves, grad_out)]

    for _ in range(40):
        q, k, v = (torch.randn(1, 2, n, depth, generator=random) for n in (8, 129, 129))
        inputs = (q, k, v, torch.randn(2, generator=random), torch.randn(1, 2, 8, depth, generator=random))
        exact = gradients("reference", *(x.double() for x in inputs))
        for backend, sums in errors.items():
            found = gradients(backend, *inputs)
            sums += torch.stack([(x - y).square().mean() for x, y in zip(found, exact, strict=True)])
    ratios = (errors["cpu"] / errors["reference"]).sqrt()
    assert (ratios < MOST_BESIDE_SINKS).all(), ratios


@pytest.mark.parametrize(("sizes", "shift"), [((8, 8, 65, 64), 0.0), ((16, 9, 63, 2), -60.0), ((16, 40, 1, 16), -60.0)])
def test_rows_beside_sinks_and_biases_err_at_most_twice_as_much_as_those_of_torch(
    sizes: tuple[int, int, int, int], shift: float
) -> None:
    """A sum of dS over all keys, which cancel; biases and sinks to which log2(e) gives another rounding."""
    heads, queries, keys, depth = sizes
    random = torch.Generator().manual_seed(7)

    def results(backend: str, *inputs: Tensor) -> list[Tensor]:
        *qkv, bias, sinks, grad_out = inputs
        leaves = (bias.clone().requires_grad_(), sinks.clone().requires_grad_())
        out = attention(*qkv, bias=leaves[0], sinks=leaves[1], backend=backend)
        return [x.double() for x in (out.detach(), *torch.autograd.grad(out, leaves, grad_out))]

    errors = torch.zeros(2, 3, dtype=torch.float64)
    for _ in range(40):
        q, k, v, grad_out = (torch.randn(1, heads, n, depth, generator=random) for n in (queries, keys, keys, queries))
        bias = torch.randn(heads, 1, 1, generator=random) + shift
        inputs = (q, k, v, bias, torch.randn(heads, generator=random) + shift, grad_out)
        exact = results("reference", *(x.double() for x in inputs))
        for n, backend in enumerate(("cpu", "reference")):
            found = results(backend, *inputs)
            errors[n] += torch.stack([(x - y).square().mean() for x, y in zip(found, exact, strict=True)])
    ratios = (errors[0] / errors[1]).sqrt()
    assert (ratios < MOST_BESIDE_SINKS).all(), ratios


def test_dropout_drops_the_same_in_both_passes() -> None:
    leaves = [x.double().requires_grad_() for x in tensors(5, 7)]

    def dropped(*inputs: Tensor) -> Tensor:
        torch.default_generator.manual_seed(3)  # torch.manual_seed also formats the stack, at each call
        return attention(*inputs, dropout=0.4, backend="cpu")

    assert torch.autograd.gradcheck(dropped, leaves)


def test_the_share_that_dropout_keeps() -> None:
    q = torch.zeros(1, 4, 64, 8)
    v = torch.ones(1, 4, 256, 1)
    k = torch.zeros(1, 4, 256, 8)
    torch.manual_seed(0)
    kept = attention(q, k, v, dropout=0.25, backend="cpu").mean()
    torch.testing.assert_close(kept, torch.tensor(1.0), atol=0.02, rtol=0)


def test_a_repeated_call_with_other_tensors() -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        q, k, v = torch.randn(2, 3, 37, 13), torch.randn(2, 3, 41, 13), torch.randn(2, 3, 41, 11)
        torch.testing.assert_close(
            attention(q, k, v, mask=masks.causal(), backend="cpu"),
            attend(q, k, v, mask=masks.causal(), backend="reference").out,
        )


def test_any_byte_but_zero_of_a_boolean_mask_is_true() -> None:
    """As for torch, where other libraries fill the memory of a boolean tensor."""
    q, k, v = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 19, 8), torch.randn(1, 2, 19, 8)
    bytes_ = torch.arange(5 * 19, dtype=torch.uint8).view(5, 19) % 7 * 32  # 0, 32, 64, 96, 128, 160, 192
    found, wanted = (attention(q, k, v, mask=Dense(x), backend="cpu") for x in (bytes_.view(torch.bool), bytes_ != 0))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def _squared_gradients(leaves: list[Tensor], softcap: float | None) -> tuple[Tensor, ...]:
    leaves = [x.requires_grad_() for x in leaves]
    out = attention(*leaves, mask=masks.causal(), softcap=softcap, backend="cpu")
    return torch.autograd.grad(out.float().square().sum(), leaves)


@pytest.mark.parametrize("before", [97, 128])
@pytest.mark.parametrize(
    ("dtype", "length", "softcap"),
    [(torch.float32, 97, 2.0), (torch.bfloat16, 97, 2.0), (torch.bfloat16, 97, None), (torch.bfloat16, 33, None)],
)
def test_what_an_earlier_call_left_in_memory_changes_no_gradient(
    dtype: torch.dtype, length: int, softcap: float | None, before: int
) -> None:
    """A call with logits that overflow fills the scratch memory, which the next call reuses, with NaN."""
    tensors = [torch.randn(1, 2, length, 32).to(dtype) for _ in range(3)]
    first = _squared_gradients([x.clone() for x in tensors], softcap)
    overflow = _squared_gradients([torch.full((1, 2, before, 32), 3e38).to(dtype) for _ in range(3)], softcap)
    assert all(x.isnan().any() for x in overflow)
    torch.testing.assert_close(_squared_gradients(tensors, softcap), first, rtol=0, atol=0)


def test_tensors_whose_numbers_are_not_what_lies_in_memory() -> None:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 4, 8, requires_grad=True)
    attention(q, q, q, backend="cpu").sgn().sum().backward()  # its gradient is a zero that has no memory
    assert q.grad is not None
    assert not q.grad.any()
    found = attention(torch._efficientzerotensor((1, 2, 4, 8)), q, q, backend="cpu")
    torch.testing.assert_close(found, attention(torch.zeros_like(q), q, q, backend="cpu"), rtol=0, atol=0)
    for options in ({}, {"mask": masks.KeyLengths(torch.tensor([3]))}):
        for n, name in enumerate("qkv"):
            given = [torch.randn(1, 2, 4, 8) for _ in range(3)]
            given[n].untyped_storage().resize_(0)
            with pytest.raises(ValueError, match=f"^{name}: its storage is empty"):
                attention(*given, backend="cpu", **options)
    lazy = torch.randn(2, 4, 4, dtype=torch.complex64).conj().imag
    assert lazy.is_neg()
    x = torch.randn(3, 1, 2, 4, 8)
    assert torch.equal(attention(*x, bias=lazy, backend="cpu"), attention(*x, bias=lazy.clone(), backend="cpu"))
    negated = torch._neg_view(x)
    assert torch.equal(attention(*negated, bias=lazy, backend="cpu"), attention(*-x, bias=lazy, backend="cpu"))


GUARDED = """
import ctypes, mmap, sys
import torch
from headscope import attention, masks
page = mmap.PAGESIZE
libc = ctypes.CDLL(None, use_errno=True)

def guarded(dtype, keys, there):  # [1, 1, keys, 64], of which what comes after `there`, at a page, must not be touched
    size = keys * 64 * dtype.itemsize
    memory = mmap.mmap(-1, size)
    x = torch.frombuffer(memory, dtype=dtype).view(1, 1, keys, 64)
    x[:, :, :there] = torch.randn(there, 64)
    at = there * 64 * dtype.itemsize
    assert at % page == 0 and not libc.mprotect(ctypes.c_void_p(x.data_ptr() + at), ctypes.c_size_t(size - at), 0)
    return x, memory

for name in sys.argv[1:]:
    dtype = getattr(torch, name)
    for there in (512, 4096):
        k, v = guarded(dtype, 8192, there), guarded(dtype, 8192, there)
        for queries in (1, 7, 16, 33, 64, 300):
            q = torch.randn(1, 1, queries, 64).to(dtype)
            expected = attention(q, k[0][:, :, :there], v[0][:, :, :there])
            found = attention(q, k[0], v[0], mask=masks.KeyLengths(torch.tensor([there])), backend="cpu")
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
    print(name, "read nothing else", flush=True)
"""


def test_keys_beyond_the_lengths_are_not_read() -> None:
    """Nor are they copied, which took as long as all of a static cache is."""
    dtypes = ("float32", "bfloat16", "float16", "float64")
    ended = run(GUARDED, *dtypes)
    said = "".join(f"{dtype} read nothing else\n" for dtype in dtypes)
    assert ended.stdout == said, f"exit code {ended.returncode}: {ended.stdout}{ended.stderr}"


def test_hooks_may_lay_out_what_is_saved_anew() -> None:
    def laid_out(x: Tensor) -> Tensor:
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    torch.manual_seed(0)
    x = [torch.randn(2, 3, 65, 8, requires_grad=True) for _ in range(3)]
    grads = (torch.randn(2, 3, 65, 8), torch.randn(2, 3, 65))
    wanted = torch.autograd.grad(attend(*x, backend="cpu")[:2], x, grads)
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, laid_out):
        results = attend(*x, backend="cpu")[:2]
    torch.testing.assert_close(torch.autograd.grad(results, x, grads), wanted, rtol=0, atol=0)


def test_the_gradient_of_a_bias_of_many_rows() -> None:
    torch.manual_seed(0)
    q, k, v, change = (
        torch.randn(16, 2, 8192, 4),
        torch.randn(16, 2, 4, 4),
        torch.rand(16, 2, 4, 4),
        torch.rand(16, 2, 8192, 4),
    )
    v[..., 0] += 1
    v[:, :, 0] += 1

    def gradient(shape: tuple[int, ...], dtype: torch.dtype, backend: str) -> Tensor:
        bias = torch.zeros(shape, dtype=dtype, requires_grad=True)
        out = attention(q.to(dtype), k.to(dtype), v.to(dtype), bias=bias, backend=backend)
        return torch.autograd.grad(out, bias, change.to(dtype))[0]

    for shape in ((2, 1, 4), (4,), (16, 1, 1, 4)):
        exact = gradient(shape, torch.float64, "reference")
        found, plain = (gradient(shape, torch.float32, backend) for backend in ("cpu", "reference"))
        assert_as_accurate(found, exact, plain, message=f"dbias {list(shape)}")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc and RLIMIT_AS")
def test_too_little_memory_is_a_memory_error() -> None:
    done = run(STARVED)
    assert done.stdout == "MemoryError\n" * 2, done.stdout + done.stderr


def test_a_long_call_can_be_interrupted() -> None:
    """Forward and backward, with one thread and with two."""
    done = run(INTERRUPTED)
    said = [f"{threads} {train} interrupted" for threads in (1, 2) for train in (False, True)]
    assert done.stdout.splitlines() == said, done.stdout + done.stderr

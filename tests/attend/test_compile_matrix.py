"""What each backend does under torch's compilers and transforms: the table of docs/guides/compile.md, line by line."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import headscope
import headscope.onnx
from headscope import masks
from headscope.masks import KeyLengths
from support.forking import run_program
from support.paths import DOCS

BACKENDS = ("cpu", "sdpa", "blocked", "reference")
PAGE = DOCS / "guides" / "compile.md"


class Attend(nn.Module):
    """Causal attention of grouped heads by one backend."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return headscope.attention(q, k, v, mask=masks.causal(), backend=self.backend)


def given(length: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(2, 6, length, 8), torch.randn(2, 3, length, 8), torch.randn(2, 3, length, 8)


def exact(*inputs: Tensor) -> Tensor:
    return Attend("reference")(*inputs)


def any_length() -> tuple[dict[int, Any], ...]:
    return ({2: Dim("length")},) * 3  # with no max


def check(run: Callable[..., Tensor], *lengths: int) -> None:
    for length in lengths:
        inputs = given(length)
        torch.testing.assert_close(run(*inputs), exact(*inputs), rtol=1e-5, atol=2e-6)


def compiled(backend: str) -> None:
    torch.compiler.reset()
    model = torch.compile(Attend(backend), backend="aot_eager", fullgraph=True)
    check(model, 11)
    q, k, v = (x.requires_grad_() for x in given())
    found = torch.autograd.grad(model(q, k, v).square().sum(), (q, k, v))
    torch.testing.assert_close(found, torch.autograd.grad(exact(q, k, v).square().sum(), (q, k, v)))


def one_graph(backend: str) -> None:
    torch.compiler.reset()
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    check(torch.compile(Attend(backend), backend=keep, fullgraph=True, dynamic=True), 11, 17, 33)
    assert len(graphs) == 1, "compiled anew for another length"


def exported(backend: str, strict: bool) -> None:
    program = torch.export.export(Attend(backend), given(), dynamic_shapes=any_length(), strict=strict)
    check(program.module(), 11, 23)


def onnx(backend: str) -> None:
    from onnxruntime import InferenceSession

    if backend == "reference" and torch.__version__ < (2, 11):
        pytest.skip("torch 2.9 splits a product into parts that ask for a length other than 1, by itself")
    made = torch.onnx.export(
        Attend(backend).eval(), given(), dynamo=True, opset_version=23, dynamic_shapes=any_length(), verbose=False,
        custom_translation_table=headscope.onnx.translations(),
    )  # fmt: skip
    assert made is not None
    session = InferenceSession(made.model_proto.SerializeToString())

    def run(*inputs: Tensor) -> Tensor:
        feeds = {each.name: x.numpy() for each, x in zip(session.get_inputs(), inputs, strict=True)}
        return torch.from_numpy(session.run(None, feeds)[0])

    check(run, 11, 23)


def autocast(backend: str) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        check(Attend(backend), 11)


def by_func(backend: str) -> None:
    q, k, v = given()
    leaf = q.clone().requires_grad_()
    wanted = torch.autograd.grad(exact(leaf, k, v).square().sum(), leaf)[0]
    run = Attend(backend)
    torch.testing.assert_close(torch.func.grad(lambda q: run(q, k, v).square().sum())(q), wanted)
    torch.testing.assert_close(torch.func.vmap(lambda q: run(q, k, v))(torch.stack([q, 2 * q]))[1], exact(2 * q, k, v))


def checkpointed(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in given())
    out = torch.utils.checkpoint.checkpoint(Attend(backend), q, k, v, use_reentrant=False)
    found = torch.autograd.grad(out.square().sum(), (q, k, v))
    torch.testing.assert_close(found, torch.autograd.grad(exact(q, k, v).square().sum(), (q, k, v)))


def forward_mode(backend: str) -> None:
    q, k, v = given()
    torch.func.jvp(lambda q: Attend(backend)(q, k, v), (q,), (q,))


def second_derivative(backend: str) -> None:
    q, k, v = (x.requires_grad_() for x in given())
    once = torch.autograd.grad(Attend(backend)(q, k, v).square().sum(), q, create_graph=True)[0]
    torch.autograd.grad(once.sum(), q)


LINES: dict[str, Callable[[str], None]] = {
    "`torch.compile(fullgraph=True)`, with gradients": compiled,
    "one graph for every length": one_graph,
    "`torch.export`, any length": lambda backend: exported(backend, strict=False),
    "the same, `strict=True`": lambda backend: exported(backend, strict=True),
    "`torch.onnx.export`, any length": onnx,
    "autocast": autocast,
    "`torch.func.grad`, `vmap`": by_func,
    "`torch.utils.checkpoint`": checkpointed,
    "`torch.func.jvp`": forward_mode,
    "a second derivative": second_derivative,
}


def table() -> dict[str, dict[str, str]]:
    """What the page says of each line and backend."""
    lines = [
        [cell.strip() for cell in line.strip("| \n").split("|")]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
    ]
    top = next(n for n, cells in enumerate(lines) if tuple(cells[1:]) == tuple(f"`{name}`" for name in BACKENDS))
    return {cells[0]: dict(zip(BACKENDS, cells[1:], strict=True)) for cells in lines[top + 2 : top + 2 + len(LINES)]}


def test_the_page_has_these_lines() -> None:
    assert list(table()) == list(LINES)


@pytest.mark.filterwarnings("ignore:# The axis name. .* will not be used:UserWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")  # of onnxscript's, at import
@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not:DeprecationWarning"
)  # torch's
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")  # SDPA has no batching rule
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("line", LINES, ids=lambda line: re.sub(r"\W+", " ", line).strip())
@pytest.mark.usefixtures("operators_read_once")
def test_what_the_page_says_is_so(line: str, backend: str) -> None:
    said = table()[line][backend]
    assert said in ("yes", "an error")
    if said == "yes":
        LINES[line](backend)
    else:
        with pytest.raises(
            (RuntimeError, NotImplementedError),
            match=r"forward-mode|second derivative|implemented",
        ):
            LINES[line](backend)


# ---------------------------------------------------------------- several processes' wrappers, in one

PARALLEL = """
import sys, tempfile, torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from headscope import MultiHeadAttention, masks

dist.init_process_group("gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1)

def made():
    torch.manual_seed(0)
    return MultiHeadAttention(24, 6, kv_heads=3, sinks=True)

def trained(model, module):
    x = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(1))
    model(x, mask=masks.causal() & masks.KeyLengths(torch.tensor([7, 4]))).square().mean().backward()
    torch.optim.SGD(module.parameters(), 0.1).step()
    return {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in module.state_dict().items()}

plain = made()
expected = trained(plain, plain)
ddp = made()
torch.testing.assert_close(trained(DistributedDataParallel(ddp), ddp), expected)
sharded = made()
fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
torch.testing.assert_close(trained(sharded, sharded), expected)
dist.destroy_process_group()
print("agrees")
"""


def test_ddp_and_fsdp2_train_the_same() -> None:
    done = run_program(PARALLEL, timeout=120)
    assert done.stdout.endswith("agrees\n"), done.stderr  # behind what older versions of gloo print


def test_key_lengths_of_a_batch_under_vmap() -> None:
    q, k, v = (x[:, None] for x in given())  # [B, 1, H, length, D]
    lengths = torch.tensor([[11], [4]])

    def run(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        return headscope.attention(q, k, v, mask=KeyLengths(lengths), backend="cpu")

    each = torch.func.vmap(run)(q, k, v, lengths)
    whole = headscope.attention(q[:, 0], k[:, 0], v[:, 0], mask=KeyLengths(lengths[:, 0]), backend="reference")
    torch.testing.assert_close(each[:, 0], whole)

"""The peers that run on torch: ours, torch's SDPA and module, the plain form, flex, zentorch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention_peers.cases import DECODE, DOCUMENT, FORWARD, MODULE, OPTION, SOFTCAP, TRAIN, WINDOW, Case
from attention_peers.exact import Array, Result
from attention_peers.route import RefusedError, Route

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRODUCTS = (512, 1024, 2048, 3072)  # sizes of the square products that stand for the library's best
MEMORY_SHARE = 0.4  # of what is free, for the plain form's matrices

Tensors = dict[str, Tensor]
Function = Callable[[], Tensor]


class Peer:
    """One of them, by name."""

    def __init__(self, name: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.name = name
        self.maker: Callable[[Case, Tensors], tuple[str, Function]] = {
            "headscope": ours, "torch": sdpa, "plain": plain, "flex": flex, "zentorch": zentorch,
        }[name]  # fmt: skip
        if name == "headscope":
            import headscope

            self._versions = {"headscope": headscope.__version__, "torch": torch.__version__}
        elif name == "zentorch":
            import zentorch as plugin  # pyright: ignore[reportMissingImports]

            self._versions = {"zentorch": plugin.__version__, "torch": torch.__version__}
        else:
            self._versions = {"torch": torch.__version__}

    def versions(self) -> dict[str, str]:
        """What this environment has."""
        return self._versions | {"capability": torch.backends.cpu.get_cpu_capability()}

    def routes(self, case: Case) -> list[Callable[[dict[str, Array]], Route]]:
        """One: torch's own dispatch chooses further."""

        def route(arrays: dict[str, Array]) -> Route:
            tensors = {name: torch.from_numpy(x).to(DTYPES[case.dtype]) for name, x in arrays.items()}
            if case.kind == TRAIN:
                return _train(case, tensors, self.maker)
            return _infer(case, tensors, self.maker)

        return [route]

    def products(self) -> dict[str, float]:
        """FLOP/s of the fastest of torch.mm's square products, by dtype."""
        with torch.inference_mode():
            return {name: max(_product(size, dtype) for size in PRODUCTS) for name, dtype in DTYPES.items()}


def _product(size: int, dtype: torch.dtype) -> float:
    a, b = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    out = a @ b
    best, until = math.inf, time.perf_counter() + 0.4
    while time.perf_counter() < until:
        begun = time.perf_counter()
        torch.mm(a, b, out=out)
        best = min(best, time.perf_counter() - begun)
    return 2 * size**3 / best


def _infer(case: Case, tensors: Tensors, maker: Callable[[Case, Tensors], tuple[str, Function]]) -> Route:
    with torch.inference_mode():
        name, function = maker(case, tensors)

    def run() -> Tensor:
        with torch.inference_mode():
            return function()

    return Route(name, run, lambda out: Result(_numpy(out)))


def _train(case: Case, tensors: Tensors, maker: Callable[[Case, Tensors], tuple[str, Function]]) -> Route:
    leaves = [tensors[name].requires_grad_() for name in "qkv"]
    name, function = maker(case, tensors)

    def run() -> tuple[Tensor, ...]:
        out = function()
        return out, *torch.autograd.grad(out, leaves, tensors["dout"])

    return Route(name, run, lambda outs: Result(*map(_numpy, outs)))


def _numpy(x: Tensor) -> Any:
    return x.detach().float().contiguous().numpy()


# ---------------------------------------------------------------- ours


def ours(case: Case, tensors: Tensors) -> tuple[str, Function]:
    """headscope.attention, or its module."""
    import headscope
    from headscope import masks
    from headscope._attend.backends import native
    from headscope._attend.prepare import prepare

    if case.kind == MODULE:
        module = headscope.MultiHeadAttention(case.embed_dim, case.sizes[1], dtype=tensors["x"].dtype).eval()
        _load(module.qkv_proj, module.out_proj, tensors)
        return "MultiHeadAttention", lambda: module(tensors["x"])
    q, k, v = (tensors[name] for name in "qkv")
    mask = masks.causal() if case.causal else None
    if case.option == "window":
        mask = masks.window(WINDOW)
    elif case.option == "documents":
        mask = masks.Documents((torch.arange(case.sizes[3]) // DOCUMENT)[None])
    bias, sinks = tensors.get("bias"), tensors.get("sinks")
    cap = SOFTCAP if case.option == "softcap" else None
    backend = prepare(q, k, v, mask, bias, sinks, None, cap, 0.0, False, None).backend.name
    target = f", {native.extension.target()}" if backend == "cpu" and native.extension is not None else ""
    if mask is None and bias is None and sinks is None and cap is None:  # as a caller writes it: no unused keywords
        return backend + target, lambda: headscope.attention(q, k, v)
    return backend + target, lambda: headscope.attention(q, k, v, mask=mask, bias=bias, softcap=cap, sinks=sinks)


# ---------------------------------------------------------------- torch


def sdpa(case: Case, tensors: Tensors) -> tuple[str, Function]:
    """scaled_dot_product_attention; nn.MultiheadAttention for the module."""
    if case.kind == MODULE:
        theirs = nn.MultiheadAttention(case.embed_dim, case.sizes[1], batch_first=True, dtype=tensors["x"].dtype).eval()
        x = tensors["x"]
        with torch.no_grad():
            theirs.in_proj_weight.copy_(tensors["w_in"])
            theirs.in_proj_bias.copy_(tensors["b_in"])
            theirs.out_proj.weight.copy_(tensors["w_out"])
            theirs.out_proj.bias.copy_(tensors["b_out"])
        return "nn.MultiheadAttention, need_weights=False", lambda: theirs(x, x, x, need_weights=False)[0]
    if case.option in ("softcap", "sinks"):
        raise RefusedError(f"scaled_dot_product_attention has no {case.option}")
    q, k, v = (tensors[name] for name in "qkv")
    grouped = q.shape[1] != k.shape[1]
    mask = _dense(case, q.dtype) if case.option in ("window", "documents") else tensors.get("bias")
    if mask is not None:
        return "dense mask", lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return "flash", lambda: F.scaled_dot_product_attention(q, k, v, is_causal=case.causal, enable_gqa=grouped)


def _dense(case: Case, dtype: torch.dtype) -> Tensor:
    """[Q, K], -inf where nothing may be seen: torch's kernel would make this of a boolean mask in every call."""
    i, j = torch.arange(case.sizes[3])[:, None], torch.arange(case.sizes[4])
    seen = i // DOCUMENT == j // DOCUMENT if case.option == "documents" else (j <= i) & (j > i - WINDOW)
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, -torch.inf)


# ---------------------------------------------------------------- the plain form


def plain(case: Case, tensors: Tensors) -> tuple[str, Function]:
    """bmm, softmax, bmm: the scale goes into the first product, the heads of a group share one."""
    if case.kind == OPTION:
        raise RefusedError("not built for the options: its matrices are quadratic")
    if case.kind == MODULE:
        return "packed projections, softmax(QKᵀ)V", _plain_module(case, tensors)
    batch, heads, kv_heads, queries, keys, width = case.sizes
    # scores and weights; the softmax and its gradient make one more of each
    wanted = batch * heads * queries * keys * (4 if case.dtype == "fp32" else 2) * (5 if case.kind == TRAIN else 2)
    if wanted > _free_bytes() * MEMORY_SHARE:
        raise RefusedError(f"its matrices would take {wanted / 2**30:.0f} GiB")
    rows = heads // kv_heads * queries
    bias = torch.zeros((), dtype=tensors["q"].dtype)
    if case.causal:
        later = torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1)
        bias = torch.zeros(queries, keys, dtype=bias.dtype).masked_fill(later, -torch.inf).repeat(rows // queries, 1)
    beta, scale = int(case.causal), width**-0.5

    def function() -> Tensor:
        q = tensors["q"].reshape(batch * kv_heads, rows, width)  # [B·Hkv, group·Q, D]
        k, v = (tensors[name].reshape(batch * kv_heads, keys, width) for name in "kv")  # [B·Hkv, K, D]
        s = torch.baddbmm(bias, q, k.transpose(1, 2), beta=beta, alpha=scale)
        return torch.bmm(torch.softmax(s, dim=-1), v).reshape(batch, heads, queries, width)  # [B, H, Q, D]

    return "baddbmm, softmax, bmm", function


def _plain_module(case: Case, tensors: Tensors) -> Function:
    batch, heads, _, queries, _, width = case.sizes

    def function() -> Tensor:
        projected = F.linear(tensors["x"], tensors["w_in"], tensors["b_in"])
        q, k, v = projected.view(batch, queries, 3, heads, width).permute(2, 0, 3, 1, 4)  # each [B, H, Q, D]
        out = torch.softmax(q @ k.transpose(-2, -1) * width**-0.5, dim=-1) @ v
        return F.linear(
            out.transpose(1, 2).reshape(batch, queries, -1), tensors["w_out"], tensors["b_out"]
        )  # [B, Q, E]

    return function


def _free_bytes() -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _load(into: nn.Linear, out: nn.Linear, tensors: Tensors) -> None:
    with torch.no_grad():
        for layer, end in ((into, "in"), (out, "out")):
            layer.weight.copy_(tensors[f"w_{end}"])
            layer.bias.copy_(tensors[f"b_{end}"])


# ---------------------------------------------------------------- flex


def flex(case: Case, tensors: Tensors) -> tuple[str, Function]:
    """torch.compile(flex_attention), compiled for exactly this case."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if case.kind == TRAIN:
        raise RefusedError("flex_attention has no backward on a CPU")
    if case.kind == MODULE:
        raise RefusedError("not a module")
    if case.option == "sinks":
        raise RefusedError("flex_attention has no sinks")
    torch.compiler.reset()
    seen, score = _flex_mask(case), _flex_score(case, tensors)
    block_mask = None
    if seen is not None:
        block_mask = create_block_mask(seen, None, None, case.sizes[3], case.sizes[4], device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)
    q, k, v = (tensors[name] for name in "qkv")
    grouped = q.shape[1] != k.shape[1]
    return "compiled", lambda: compiled(q, k, v, score_mod=score, block_mask=block_mask, enable_gqa=grouped)


def _flex_mask(case: Case) -> Callable[..., Tensor] | None:
    if case.causal:
        return lambda b, h, i, j: j <= i
    if case.option == "window":
        return lambda b, h, i, j: (j <= i) & (j > i - WINDOW)
    if case.option == "documents":
        return lambda b, h, i, j: i // DOCUMENT == j // DOCUMENT
    return None


def _flex_score(case: Case, tensors: Tensors) -> Callable[..., Tensor] | None:
    if case.option == "softcap":
        return lambda s, b, h, i, j: SOFTCAP * torch.tanh(s / SOFTCAP)
    if case.option == "bias":
        bias = tensors["bias"][:, 0].contiguous()  # [H, K]
        return lambda s, b, h, i, j: s + bias[h, j]
    return None


# ---------------------------------------------------------------- zentorch


def zentorch(case: Case, tensors: Tensors) -> tuple[str, Function]:
    """zentorch's own operator, which torch.compile(backend="zentorch") puts in SDPA's place."""
    from zentorch import _C  # pyright: ignore[reportMissingImports]

    if case.kind not in (FORWARD, DECODE):
        raise RefusedError("only its inference operator is measured")
    question = "is_avx512_supported" if case.dtype == "fp32" else "is_bf16_supported"
    if not getattr(_C, question)():
        raise RefusedError(f"{question}() is False on this CPU: its operator would run torch's own kernel")
    q, k, v = (tensors[name] for name in "qkv")
    operator = torch.ops.zentorch.zentorch_sdpa
    return "zentorch_sdpa", lambda: operator(q, k, v, 0.0, case.causal)[0]

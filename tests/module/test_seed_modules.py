"""The five systems this project grew from, by file name, each against its mathematics written out in float64.

The numbers and sizes of those files stand here as literals. The transcriptions use numpy and no attention of anybody's.
"""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from headscope import MultiHeadAttention, attend, attention
from headscope.masks import causal

Array = NDArray[np.float64]


def array(x: Tensor) -> Array:
    return x.detach().double().numpy()


def softmax(scores: Array) -> Array:
    """Over the last axis."""
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def parameters(module: MultiHeadAttention) -> dict[str, tuple[Array, Array | float]]:
    """Weight and bias (0 where there is none) of each projection."""
    return {
        name: (array(weight), 0.0 if bias is None else array(bias))
        for name in ("q", "k", "v", "out")
        for weight, bias in [module.projection(name)]
    }


def as_close(got: Tensor, exact: Array) -> None:
    """float32 against float64."""
    assert got.shape == exact.shape
    np.testing.assert_allclose(array(got), exact, rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- 000_f3c3baa441acd90b.txt: six steps and a class


def six_steps(x: Array, w: dict[str, tuple[Array, Array | float]], num_heads: int) -> dict[str, Array]:
    """Input, projections, split, scaled dot products and weights, concatenation, output projection."""
    batch, seq, d_model = x.shape
    d_head = d_model // num_heads
    steps = {"input": x}
    for name in ("q", "k", "v"):
        weight, bias = w[name]
        steps[name.upper()] = x @ weight.T + bias  # (32, 10, 512)
        split = steps[name.upper()].reshape(batch, seq, num_heads, d_head)
        steps[f"{name.upper()} of heads"] = split.transpose(0, 2, 1, 3)  # (32, 8, 10, 64)
    scores = steps["Q of heads"] @ steps["K of heads"].transpose(0, 1, 3, 2) / d_head**0.5
    steps["scores"], steps["weights"] = scores, softmax(scores)  # (32, 8, 10, 10)
    steps["heads"] = steps["weights"] @ steps["V of heads"]  # (32, 8, 10, 64)
    steps["concatenated"] = steps["heads"].transpose(0, 2, 1, 3).reshape(batch, seq, d_model)  # (32, 10, 512)
    weight, bias = w["out"]
    steps["output"] = steps["concatenated"] @ weight.T + bias  # (32, 10, 512)
    return steps


def test_000_six_steps_at_its_sizes() -> None:
    batch_size, seq_len, d_model, num_heads = 32, 10, 512, 8
    module = MultiHeadAttention(d_model, num_heads)
    nn.init.normal_(module.qkv_proj.bias)
    x = torch.randn(batch_size, seq_len, d_model)
    steps = six_steps(array(x), parameters(module), num_heads)
    shapes = {
        "input": (32, 10, 512), "Q": (32, 10, 512), "K": (32, 10, 512), "V": (32, 10, 512),
        "Q of heads": (32, 8, 10, 64), "K of heads": (32, 8, 10, 64), "V of heads": (32, 8, 10, 64),
        "scores": (32, 8, 10, 10), "weights": (32, 8, 10, 10), "concatenated": (32, 10, 512), "output": (32, 10, 512),
    }  # fmt: skip
    assert {name: steps[name].shape for name in shapes} == shapes

    for got, name in zip(module.project(x), "QKV", strict=True):
        as_close(got, steps[f"{name} of heads"])
    output, weights = module(x, need_weights=True)
    as_close(weights, steps["weights"])
    as_close(output, steps["output"])
    as_close(attention(*module.project(x)), steps["heads"])


def test_000_the_class() -> None:
    """q_linear, k_linear, v_linear and out_proj of the class, at (2, 10, 512)."""
    linears = {name: nn.Linear(512, 512) for name in ("q", "k", "v", "out")}
    module = MultiHeadAttention(512, 8)
    module.load_state_dict(
        {f"{name}_proj.{part}": x for name, linear in linears.items() for part, x in linear.state_dict().items()}
    )
    x = torch.randn(2, 10, 512)
    w = {name: (array(linear.weight), array(linear.bias)) for name, linear in linears.items()}
    output = module(x)
    assert output.shape == (2, 10, 512)
    assert module.head_dim == 64
    as_close(output, six_steps(array(x), w, 8)["output"])


# ---------------------------------------------------------------- 001_5b5ac358f863e816.txt: no biases, scaled by √k


def heads_folded_into_the_batch(x: Array, w: dict[str, tuple[Array, Array | float]], h: int) -> dict[str, Array]:
    """View, transpose, fold into (b * h, t, s); bmm; divide by √k, the whole width; softmax; bmm; unify."""
    b, t, k = x.shape
    s = k // h
    folded = {}
    for name in ("k", "q", "v"):
        projected = x @ w[name][0].T
        folded[name] = projected.reshape(b, t, h, s).swapaxes(1, 2).reshape(b * h, t, s)
    dot = np.stack([folded["q"][n] @ folded["k"][n].T for n in range(b * h)])
    dot = softmax(dot / k ** (1 / 2))
    out = np.stack([dot[n] @ folded["v"][n] for n in range(b * h)]).reshape(b, h, t, s)
    out = out.swapaxes(1, 2).reshape(b, t, s * h)
    return {**folded, "dot": dot, "out": out @ w["out"][0].T + w["out"][1]}


@pytest.mark.parametrize(("b", "t", "k", "h"), [(2, 10, 6, 2), (2, 7, 12, 4)])
def test_001_no_biases_and_the_scale_of_the_whole_width(b: int, t: int, k: int, h: int) -> None:
    module = MultiHeadAttention(k, h, bias=False, out_bias=True, scale=k**-0.5)
    nn.init.normal_(module.out_proj.bias)
    assert {name: tuple(x.shape) for name, x in module.state_dict().items()} == {
        "qkv_proj.weight": (3 * k, k),
        "out_proj.weight": (k, k),
        "out_proj.bias": (k,),
    }
    x = torch.randn(b, t, k)
    steps = heads_folded_into_the_batch(array(x), parameters(module), h)
    assert steps["k"].shape == (b * h, t, k // h)
    assert steps["dot"].shape == (b * h, t, t)
    output, weights = module(x, need_weights=True)
    as_close(weights.flatten(0, 1), steps["dot"])
    as_close(output, steps["out"])


def test_001_the_shapes_that_it_prints() -> None:
    """Input, keys, weight, (4, 10, 3) of the heads, (4, 10, 10) of the products, output."""
    module = MultiHeadAttention(6, 2, bias=False, out_bias=True, scale=6**-0.5)
    x = torch.randn(2, 10, 6)
    q, k, v = module.project(x)
    assert q.flatten(0, 1).shape == k.flatten(0, 1).shape == v.flatten(0, 1).shape == (4, 10, 3)
    assert module.projection("q")[0].shape == (6, 6)
    output, weights = module(x, need_weights=True)
    assert weights.flatten(0, 1).shape == (4, 10, 10)
    assert output.shape == (2, 10, 6)


def test_001_its_scale_is_not_the_usual_one() -> None:
    """√k instead of √(k / h): the logits are √h times smaller, and the weights flatter."""
    usual, flat = MultiHeadAttention(6, 2, bias=False), MultiHeadAttention(6, 2, bias=False, scale=6**-0.5)
    flat.load_state_dict(usual.state_dict())
    assert math.isclose(usual.scale / flat.scale, math.sqrt(2))
    x = torch.randn(2, 10, 6)
    entropies = [-(p * p.log()).sum(-1).mean() for p in (each(x, need_weights=True)[1] for each in (usual, flat))]
    assert entropies[1] > entropies[0]


# ---------------------------------------------------------------- 002_888e49f2512e31a9.txt: from text to merged heads

Q_W = [[0.0357, -0.0050, -0.9573, 0.1623], [0.3952, 0.6331, -0.8375, 0.3189],
       [0.1392, -0.0054, -0.6463, 0.1741], [-0.7766, 0.4740, 0.2468, 0.4739]]  # fmt: skip
K_W = [[0.8485, -0.0183, -0.7542, -0.5700], [0.7656, 0.3594, -1.2888, -1.2898],
       [0.9554, 0.5377, -0.3983, -0.2228], [-0.9299, -0.6553, 0.5126, 1.5518]]  # fmt: skip
V_W = [[0.4343, -0.4957, 0.2706, 1.2963], [0.0052, -0.6249, -0.3505, 1.8123],
       [0.5499, -0.3414, 0.2242, 0.7206], [-0.9433, 0.7010, 0.4386, -0.3949]]  # fmt: skip
SPLIT_K = [[[0.8485, -0.0183], [0.7656, 0.3594], [0.9554, 0.5377], [-0.9299, -0.6553]],
           [[-0.7542, -0.5700], [-1.2888, -1.2898], [-0.3983, -0.2228], [0.5126, 1.5518]]]  # fmt: skip
HEADS = [[[0.0217, -0.1993], [0.1869, -0.3428], [0.0521, -0.2263], [-0.1752, -0.0223]],
         [[0.0619, 1.1051], [0.1031, 0.9833], [0.1002, 0.9954], [0.2571, 0.4498]]]  # fmt: skip
RESULT = [[0.0217, -0.1993, 0.0619, 1.1051], [0.1869, -0.3428, 0.1031, 0.9833],
          [0.0521, -0.2263, 0.1002, 0.9954], [-0.1752, -0.0223, 0.2571, 0.4498]]  # fmt: skip
PRINTED = 1e-4  # four decimals of the inputs, and of what came out


def by_head(rows: list[list[float]]) -> Tensor:
    """[4, 4] -> [2 heads, 4 tokens, 2]."""
    return torch.tensor(rows).view(4, 2, 2).transpose(0, 1)


def one_head(q: Array, k: Array, v: Array, d_k: float) -> Array:
    """softmax(q kᵀ / √d_k) v"""
    return softmax(q @ k.T / math.sqrt(d_k)) @ v


def test_002_printed_heads_by_attention() -> None:
    q, k, v = by_head(Q_W), by_head(K_W), by_head(V_W)
    torch.testing.assert_close(k, torch.tensor(SPLIT_K), rtol=0, atol=0)
    heads = attention(q, k, v)
    torch.testing.assert_close(heads, torch.tensor(HEADS), rtol=0, atol=PRINTED)
    torch.testing.assert_close(heads.transpose(0, 1).reshape(4, 4), torch.tensor(RESULT), rtol=0, atol=PRINTED)
    exact = np.stack([one_head(*(array(x[h]) for x in (q, k, v)), 2.0) for h in range(2)])
    as_close(heads, exact)
    np.testing.assert_allclose(exact, np.array(HEADS), atol=PRINTED)


@pytest.mark.parametrize("backend", ["sdpa", "blocked", "reference"])
def test_002_by_each_backend(backend: str) -> None:
    heads = attention(by_head(Q_W), by_head(K_W), by_head(V_W), backend=backend)
    torch.testing.assert_close(heads, torch.tensor(HEADS), rtol=0, atol=PRINTED)


def test_002_printed_result_by_the_module() -> None:
    """Queries, keys and values are given, so that each projection is the identity."""
    identity = torch.eye(4)
    module = MultiHeadAttention(4, 2)
    module.load_state_dict(
        {f"{name}_proj.weight": identity for name in ("q", "k", "v", "out")}
        | {f"{name}_proj.bias": torch.zeros(4) for name in ("q", "k", "v", "out")}
    )
    result = module(torch.tensor(Q_W), (torch.tensor(K_W), torch.tensor(V_W)))
    torch.testing.assert_close(result, torch.tensor(RESULT), rtol=0, atol=PRINTED)


def test_002_from_its_embeddings_on() -> None:
    """Four tokens, "i love to code", embedded in four numbers; projections with biases; two heads of two."""
    embedded = torch.tensor([[0.5008, -1.6228, 0.5575, 0.8338], [-2.0577, -0.4445, 1.1370, 2.4174],
                             [1.7751, -0.0243, -0.3921, 1.1995], [-0.0620, -2.4201, -0.4190, 1.7088]])  # fmt: skip
    assert len(["i", "love", "to", "code"]) == len(embedded)
    module = MultiHeadAttention(4, 2)
    nn.init.normal_(module.qkv_proj.bias)
    w, x = parameters(module), array(embedded)
    projected = {name: x @ w[name][0].T + w[name][1] for name in ("q", "k", "v")}
    heads = []
    for h in range(2):
        columns = slice(2 * h, 2 * h + 2)
        heads.append(one_head(*(projected[name][:, columns] for name in ("q", "k", "v")), 2.0))
    merged = np.concatenate(heads, -1)
    as_close(module(embedded), merged @ w["out"][0].T + w["out"][1])


# ---------------------------------------------------------------- 003_ba33964569a40964.txt: patches of an image


def test_003_patches() -> None:
    """1 x 64 patches x 128 numbers, 8 heads."""
    dim, num_heads = 128, 8
    module = MultiHeadAttention(dim, num_heads)
    nn.init.normal_(module.qkv_proj.bias)
    x = torch.randn(1, 64, dim)
    w = parameters(module)
    patches, head_dim = array(x)[0], dim // num_heads
    projected = {name: patches @ w[name][0].T + w[name][1] for name in ("q", "k", "v")}
    context, every = [], []
    for h in range(num_heads):
        q, k, v = (projected[name][:, h * head_dim : (h + 1) * head_dim] for name in ("q", "k", "v"))
        p = softmax(q @ k.T / math.sqrt(head_dim))
        every.append(p)
        context.append(p @ v)
    exact = np.concatenate(context, -1) @ w["out"][0].T + w["out"][1]
    output, weights = module(x, need_weights=True)
    assert output.shape == (1, 64, 128)
    as_close(output[0], exact)
    as_close(weights[0], np.stack(every))


def test_003_heads_look_at_different_things() -> None:
    """No two heads share their map; untrained ones already differ, as their projections do."""
    torch.manual_seed(0)
    _, weights = MultiHeadAttention(128, 8)(torch.randn(1, 64, 128), need_weights=True)
    maps = weights[0].flatten(1)  # [H, Q * K]
    for one in range(8):
        for other in range(one):
            overlap = torch.minimum(maps[one], maps[other]).sum() / 64
            assert overlap < 0.9, f"heads {other} and {one} share {float(overlap):.2f} of their weight"
    most = weights[0].argmax(-1)  # [H, Q]: the patch each query looks at most
    assert (most != most[:1]).any(0).all(), "for each patch some head looks elsewhere than the first"


def test_003_the_width_must_divide() -> None:
    with pytest.raises(ValueError, match="embed_dim 128 is not divisible by num_heads 12"):
        MultiHeadAttention(128, 12)


# ---------------------------------------------------------------- 004_f396f69f7efccc32.txt: d_k = d_v = d_model / h


def masked_heads(x: Array, w: dict[str, tuple[Array, Array | float]], h: int, lower: bool) -> Array:
    """The forward pass of the file, loop by loop; its causal mask where it says "if needed"."""
    batch, length, d_model = x.shape
    d_k = d_model // h
    out = np.empty_like(x)
    for b in range(batch):
        q, k, v = (x[b] @ w[name][0].T + w[name][1] for name in ("q", "k", "v"))
        for head in range(h):
            at = slice(head * d_k, (head + 1) * d_k)
            for i in range(length):
                keys = range(i + 1) if lower else range(length)
                scores = np.array([q[i, at] @ k[j, at] for j in keys]) / d_k**0.5
                out[b, i, at] = sum(p * v[j, at] for p, j in zip(softmax(scores), keys, strict=True))
    return out @ w["out"][0].T + w["out"][1]


@pytest.mark.parametrize("lower", [False, True], ids=["all", "causal"])
def test_004_forward(lower: bool) -> None:
    module = MultiHeadAttention(24, 3)
    nn.init.normal_(module.qkv_proj.bias)
    assert module.head_dim == module.v_head_dim == 24 / 3
    x = torch.randn(2, 7, 24)
    output, weights = module(x, mask=causal() if lower else None, need_weights=True)
    assert weights.shape == (2, 3, 7, 7)
    assert output.shape == (2, 7, 24)
    as_close(output, masked_heads(array(x), parameters(module), 3, lower))
    if lower:
        assert not weights.triu(1).any(), "no weight on the future"


def test_004_d_k_is_enforced() -> None:
    wanted = "num_heads: embed_dim 512 is not divisible by num_heads 7; choose a divisor of 512, or pass head_dim"
    with pytest.raises(ValueError, match=re.escape(wanted)):
        MultiHeadAttention(512, 7)


def test_004_shapes_of_the_forward_pass() -> None:
    """[Batch, SeqLength, d_model] -> [Batch, h, SeqLength, d_k] -> context -> [Batch, SeqLength, d_model]."""
    module = MultiHeadAttention(24, 3)
    x = torch.randn(2, 7, 24)
    q, k, v = module.project(x)
    assert q.shape == k.shape == v.shape == (2, 3, 7, 8)
    context, lse, _ = attend(q, k, v)
    assert (context.shape, lse.shape) == ((2, 3, 7, 8), (2, 3, 7))
    assert module(x).shape == (2, 7, 24)

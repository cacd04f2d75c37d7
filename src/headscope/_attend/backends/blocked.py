"""Blocked torch, the portable backend: every option on any device, memory linear in the length.

A block is a run of query rows of some heads with all keys visible to them, so each softmax is a plain one.
The number of rows is what fits into ``BLOCK`` logits: it decreases as the keys grow, and depends only on shapes. The
backward pass recomputes the weights from q and k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from headscope._attend.blocks import block_sizes, logits_of_block, slices, visible_keys
from headscope._attend.call import Call
from headscope._attend.dropout import DropoutPlace, Seed, draw_seed, dropout_factors
from headscope._attend.interface import (
    ForwardPass,
    Inputs,
    Pair,
    accumulate_dtype,
    full_precision,
    once,
    refuse_batched,
)
from headscope._support.autograd import Function
from headscope._support.logits import cap_logits, half_products, has_half_products, scaled_products
from headscope._support.precision import exact_products
from headscope.masks import Plan

name = "blocked"
attend_finite = attend_careful = repeater = None

BLOCK = 1 << 19  # logits in one block: 2 MiB of float32, about one core's second-level cache
COMPILED_BLOCK = 1 << 24  # the same within torch.compile, where the graph unrolls the blocks
FEW_QUERIES = 3  # up to so many rows torch sums products in shorter chains


def refuses(call: Call) -> list[str]:
    """Return no reasons: every call is supported."""
    return []


def attend(call: Call, plan: Plan | None, inputs: Inputs, seed: Seed | None = None) -> tuple[Tensor, Tensor | None]:
    """Return out and lse, block by block. Without ``seed``, torch's generator draws the dropout seed."""
    if call.in_compiled_func:
        return _attend_plainly(call, plan, inputs)
    if seed is None:
        seed = int(draw_seed().item()) if call.dropout else 0
    return _Attend.apply(call, None if plan is None else plan.on(inputs.q.device), seed, *inputs)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the weights: batch entries, key/value heads, queries, keys."""

    b: slice
    h: slice
    i: slice
    j: slice
    number: int

    def heads(self, group: int) -> slice:
        """Return the query heads."""
        return slice(self.h.start * group, self.h.stop * group)


def blocks(call: Call, plan: Plan | None) -> Iterator[Block]:
    """Cut a call into blocks of at most ``BLOCK`` logits (at least one row), without keys masked for every row.

    On a GPU blocks are larger.
    """
    if call.heads == 0:
        return
    sizes = block_sizes(call, call.queries, logits_of_block(call.device, BLOCK))
    places = product(
        slices(call.queries, sizes.rows), slices(call.batch, sizes.batch), slices(call.kv_heads, sizes.kv_heads)
    )
    for number, (i, b, h) in enumerate(places):
        yield Block(b, h, i, visible_keys(call, plan, i), number)


class _Logits(NamedTuple):
    """The final logits of a block.

    Attributes:
        s: [b, h, g * i, j], -inf where a key is masked.
        uncapped: the argument of tanh if there is a softcap.
        visible: which keys are visible, broadcastable to [b, h, g, i, j]; None = all.
    """

    s: Tensor
    uncapped: Tensor | None
    visible: Tensor | None


def _logits(call: Call, plan: Plan | None, block: Block, inputs: Inputs) -> _Logits:
    """Return the final logits of a block."""
    dtype = accumulate_dtype(call.dtype)
    q, k = _grouped(call, block, inputs.q), inputs.k[block.b, block.h, block.j]
    if has_half_products(q) and not call.in_compiled_func:
        uncapped = half_products(q, k, call.scale, call.softcap)  # [b, h, g * i, j]
    else:
        uncapped = _products(call, q.to(dtype), k.to(dtype))
    s, visible = cap_logits(uncapped, call.softcap), None
    if inputs.bias is not None:
        bias = _bias_tile(call, block, inputs.bias)
        visible = bias != -torch.inf
        s = _per_head(call, s).add(bias).masked_fill(~visible, -torch.inf).view_as(s)
    if plan is not None and not plan.everything:
        tile = plan.tile(block.b, block.heads(call.group), block.i, block.j).to(s.device)
        tile = tile.unflatten(1, (-1, call.group)) if tile.shape[1] > 1 else tile[:, :, None]  # [b, h, g, i, j]
        s = _per_head(call, s).masked_fill(~tile, -torch.inf).view_as(s)
        visible = tile if visible is None else visible & tile
    return _Logits(s, None if call.softcap is None else uncapped, visible)


def _products(call: Call, q: Tensor, k: Tensor) -> Tensor:
    """Return the scaled products of queries [b, h, g * i, D] and keys [b, h, j, D], as [b, h, g * i, j].

    On a CPU torch sums a product of few rows in shorter chains than one of many. So each head's few queries are
    multiplied separately: in one product their errors were up to three times those of plain torch.
    """
    if call.group == 1 or call.queries > FEW_QUERIES or call.device != "cpu":
        return scaled_products(q, k, call.scale, call.softcap)
    heads = q.unflatten(2, (call.group, -1)).unbind(2)
    return torch.cat([scaled_products(each, k, call.scale, call.softcap) for each in heads], 2)


def _grouped(call: Call, block: Block, tensor: Tensor) -> Tensor:
    """Return the query rows of a block, those of one key/value head together: [B, H, Q, D] -> [b, h, g * i, D]."""
    rows = tensor[block.b, block.heads(call.group), block.i]
    return rows.unflatten(1, (-1, call.group)).flatten(2, 3)  # [b, h, g * i, D]


def _per_head(call: Call, tile: Tensor) -> Tensor:
    """Return [b, h, g * i, j] as [b, h, g, i, j]."""
    return tile.unflatten(2, (call.group, -1))


def _bias_tile(call: Call, block: Block, bias: Tensor) -> Tensor:
    """Return the bias of a block, broadcastable to [b, h, g, i, j]."""
    at = (block.b, block.heads(call.group), block.i, block.j)
    tile = bias[tuple(slice(None) if size == 1 else here for size, here in zip(bias.shape, at, strict=True))]
    tile = tile.to(accumulate_dtype(call.dtype))
    return tile[:, :, None] if tile.shape[1] == 1 else tile.unflatten(1, (-1, call.group))  # [b, h, g, i, j]


def _sink_rows(call: Call, block: Block, sinks: Tensor) -> Tensor:
    """Return the sink logit of each row of a block, [h, g * i, 1]."""
    rows = sinks[block.heads(call.group)].to(accumulate_dtype(call.dtype)).view(-1, call.group, 1)  # [h, g, 1]
    return rows.expand(-1, -1, block.i.stop - block.i.start).flatten(1)[..., None]  # [h, g * i, 1]


def _keep(call: Call, block: Block, seed: Seed, like: Tensor) -> Tensor:
    """Return the dropout factors of a block, 0 or 1 / (1 - p); the same in both passes."""
    if like.device.type == "meta":
        return torch.empty_like(like)
    if isinstance(seed, DropoutPlace):
        at = (block.b, block.heads(call.group), block.i, block.j)
        factors = dropout_factors(seed, call.dropout, *at, like.device)  # [b, H, i, j]
        return factors.to(like.dtype).unflatten(1, (-1, call.group)).flatten(2, 3)  # [b, h, g * i, j]
    generator = torch.Generator(like.device).manual_seed(seed + block.number)
    retained = torch.rand(like.shape, generator=generator, device=like.device) >= call.dropout
    return retained.to(like.dtype).mul_(1 / (1 - call.dropout))


def _attend_plainly(call: Call, plan: Plan | None, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Attend with torch's operations only, none in place, for torch.func within torch.compile.

    Any input may be batched there, and the result of ``_Attend.backward`` would be a constant: a second derivative
    would be silently wrong. The gradient saves the weights, so dropout does not require a seed and can be torch's own.
    """
    rows = (call.batch, call.heads, call.queries)
    if call.queries == 0 or call.heads == 0:
        return inputs.q.new_zeros((*rows, call.v_head_dim)), inputs.q.new_zeros(
            rows, dtype=accumulate_dtype(call.dtype)
        )
    step = COMPILED_BLOCK // max(1, call.batch * call.heads * call.keys)
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for number, i in enumerate(slices(call.queries, step)):
        block = Block(slice(0, call.batch), slice(0, call.kv_heads), i, visible_keys(call, plan, i), number)
        out, lse = _forward(call, plan, block, inputs, 0)
        outs.append(_per_head(call, out).flatten(1, 2))  # [B, H, i, Dv]
        lses.append(_per_head(call, lse)[..., 0].flatten(1, 2))  # [B, H, i]
    return torch.cat(outs, 2).to(call.dtype), torch.cat(lses, 2)


class _Attend(Function[tuple[Tensor, Tensor]]):
    """The forward pass in blocks, and its gradient, which recomputes the weights."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, plan: Plan | None, seed: Seed,
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        inputs = Inputs(q, k, v, bias, sinks)
        rows = (call.batch, call.heads, call.queries)
        out = q.new_zeros((*rows, call.v_head_dim))
        lse = q.new_full(rows, -torch.inf, dtype=accumulate_dtype(call.dtype))
        for block in blocks(call, plan):
            tile_out, tile_lse = _forward(call, plan, block, inputs, seed)
            at = (block.b, block.heads(call.group), block.i)
            out[at] = _per_head(call, tile_out).flatten(1, 2).to(out.dtype)  # [b, H, i, Dv]
            lse[at] = _per_head(call, tile_lse)[..., 0].flatten(1, 2)  # [b, H, i]
        ctx.call, ctx.plan, ctx.seed = call, plan, seed
        ctx.save_for_backward(q, k, v, bias, sinks, out, lse, *(() if plan is None else plan.read_again()))
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_batched(*grads)
        saved = ctx.saved_tensors  # read once: checkpointing recomputes them in each access
        tensors, (out, lse) = saved[:5], saved[5:7]
        forward = ForwardPass(ctx.call, ctx.plan, ctx.seed)
        with torch.no_grad():
            gradients_of_inputs = gradients(
                forward, Inputs(*tensors), (out, lse), (grads[0], grads[1]), ctx.needs_input_grad[6:]
            )
        return None, None, None, *once(gradients_of_inputs, *grads, *saved)


def gradients(
    forward: ForwardPass,
    inputs: Inputs,
    results: tuple[Tensor, Tensor],
    grads: Pair,
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, v, and of bias and sinks if needed.

    Args:
        forward: the forward pass.
        inputs: its inputs.
        results: its out and lse, of which it reads only the sizes.
        grads: the gradients of out and lse, or None.
        needed: whether the gradients of bias and sinks are needed: a bias may be as large as the matrix.
    """
    call, plan, seed = forward
    plan = None if plan is None else plan.on(inputs.q.device)
    grad_out, grad_lse = (torch.zeros_like(x) if grad is None else grad for x, grad in zip(results, grads, strict=True))
    sums = _zeros(inputs, needed, accumulate_dtype(call.dtype))
    with full_precision(call), exact_products(call.device):
        for block in blocks(call, plan):
            _backward(_Backward(call, plan, block, inputs, grad_out, grad_lse, seed), sums)
    return tuple(_like(total, tensor) for total, tensor in zip(sums, inputs, strict=True))


def _zeros(inputs: Inputs, needed: tuple[bool, ...], dtype: torch.dtype) -> Inputs:
    """Return zeros for each gradient: those of q, k and v, and of bias and sinks if needed."""

    def zeros(x: Tensor) -> Tensor:
        return torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format)

    bias, sinks = (zeros(x) if x is not None and need else None for x, need in zip(inputs[3:], needed, strict=True))
    return Inputs(zeros(inputs.q), zeros(inputs.k), zeros(inputs.v), bias, sinks)


def _like(total: Tensor | None, tensor: Tensor | None) -> Tensor | None:
    return None if total is None or tensor is None else total.to(tensor.dtype)


def _forward(call: Call, plan: Plan | None, block: Block, inputs: Inputs, seed: Seed) -> tuple[Tensor, Tensor]:
    """Return out [b, h, g * i, Dv] and lse [b, h, g * i, 1] of one block, in the accumulating dtype."""
    if block.j.start == block.j.stop:
        return _nothing_seen(call, block, inputs)
    w = _weights(call, block, inputs, _logits(call, plan, block, inputs))
    p = w.p
    if call.dropout:
        p = F.dropout(p, call.dropout) if call.in_compiled_func else p * _keep(call, block, seed, p)
    out = p @ inputs.v[block.b, block.h, block.j].to(p.dtype)
    lse = w.top + w.divisor.log()  # torch may differentiate this: log(0) has no derivative
    return out / w.divisor, lse.masked_fill(w.total == 0, -torch.inf) if call.may_be_empty else lse


class _Weights(NamedTuple):
    """The weights of a block before the division, [b, h, g * i, j], and the values of each row, [.., 1]."""

    p: Tensor
    sink: Tensor | None
    top: Tensor
    total: Tensor
    divisor: Tensor


def _weights(call: Call, block: Block, inputs: Inputs, logits: _Logits) -> _Weights:
    """Compute weights in place of the logits. A row without a visible key is divided by 1; logits of -inf give NaN."""
    s = logits.s
    top = s.amax(-1, keepdim=True)
    sink = None if inputs.sinks is None else _sink_rows(call, block, inputs.sinks)
    if sink is not None:
        top = torch.maximum(top, sink)
    if call.may_be_empty and logits.visible is not None:
        lost = top == -torch.inf
        if call.device != "cpu" or call.form != "plain" or lost.any():  # elsewhere the check would wait for the device
            empty = ~logits.visible.any(-1, keepdim=True)
            top = top.masked_fill((_per_head(call, lost) & empty).view_as(top), 0)
    p = (s - top).exp() if call.in_compiled_func else s.sub_(top).exp_()
    total = p.sum(-1, keepdim=True)
    if sink is not None:
        sink = (sink - top).exp()
        total = total + sink
    return _Weights(p, sink, top, total, total.masked_fill(total == 0, 1) if call.may_be_empty else total)


def _nothing_seen(call: Call, block: Block, inputs: Inputs) -> tuple[Tensor, Tensor]:
    shape = (block.b.stop - block.b.start, block.h.stop - block.h.start, call.group * (block.i.stop - block.i.start))
    dtype = accumulate_dtype(call.dtype)
    out = inputs.q.new_zeros((*shape, call.v_head_dim), dtype=dtype)
    lse = inputs.q.new_full((*shape, 1), -torch.inf, dtype=dtype)
    if inputs.sinks is not None:
        sink = _sink_rows(call, block, inputs.sinks)
        own, absent = sink * _weights_of_sink_alone(sink).detach(), sink == -torch.inf
        out = out + 0 * own.masked_fill(absent, 0)  # NaN where the sink is NaN or +inf
        lse = own.masked_fill(absent, -torch.inf).expand_as(lse)
    return out, lse


def _weights_of_sink_alone(sink: Tensor) -> Tensor:
    """Return the weight of the sink in rows without visible keys: 1, 0 for -inf, NaN for NaN and +inf."""
    return (sink - sink).masked_fill(sink == -torch.inf, -torch.inf).exp()


@dataclass(frozen=True, slots=True)
class _Backward:
    """The inputs of the gradient of one block."""

    call: Call
    plan: Plan | None
    block: Block
    inputs: Inputs
    grad_out: Tensor
    grad_lse: Tensor
    seed: Seed


def _backward(a: _Backward, sums: Inputs) -> None:
    """Add one block's gradients to the sums: ds = p (dp - δ + dlse), then through cap, scale and products."""
    call, block, inputs = a.call, a.block, a.inputs
    dtype = accumulate_dtype(call.dtype)
    grad_lse = _grouped(call, block, a.grad_lse[..., None]).to(dtype)  # [b, h, g * i, 1]
    if block.j.start == block.j.stop:
        if inputs.sinks is not None:  # the sink has all the weight, or there is none
            weights = _weights_of_sink_alone(_sink_rows(call, block, inputs.sinks))
            _add_sink_gradient(call, block, grad_lse * weights, sums)
        return
    grad_out = _grouped(call, block, a.grad_out).to(dtype)
    logits = _logits(call, a.plan, block, inputs)
    uncapped, hidden = logits.uncapped, logits.s == -torch.inf
    w = _weights(call, block, inputs, logits)  # recomputed, not from lse: a large lse has rounded away the sum
    p = w.p.div_(w.divisor)
    v = inputs.v[block.b, block.h, block.j].to(dtype)
    grad_p = grad_out @ v.transpose(-2, -1)  # [b, h, g * i, j]
    dropped = p
    if call.dropout:
        keep = _keep(call, block, a.seed, p)
        dropped, grad_p = p * keep, grad_p.mul_(keep)
    sums.v[block.b, block.h, block.j] += dropped.transpose(-2, -1) @ grad_out
    delta = _delta(call, p, grad_p, logits.visible)
    if w.sink is not None:
        _add_sink_gradient(call, block, w.sink / w.divisor * (grad_lse - delta), sums)
    grad_s = grad_p.sub_(delta).add_(grad_lse).mul_(p).masked_fill_(hidden, 0)
    if sums.bias is not None:
        _add_bias_gradient(call, block, _per_head(call, grad_s), sums.bias)
    if uncapped is not None:
        grad_s = grad_s / uncapped.cosh().square()  # not 1 - tanh², which loses its digits as tanh approaches ±1
    q, k = _grouped(call, block, inputs.q).to(dtype), inputs.k[block.b, block.h, block.j].to(dtype)
    # scaled last: with an extreme scale the product with grad_s alone would overflow
    sums.k[block.b, block.h, block.j] += (grad_s.transpose(-2, -1) @ q).mul_(call.scale)
    grad_q = _per_head(call, (grad_s @ k).mul_(call.scale)).flatten(1, 2)  # [b, H, i, D]
    sums.q[block.b, block.heads(call.group), block.i] += grad_q


def _delta(call: Call, p: Tensor, grad_p: Tensor, visible: Tensor | None) -> Tensor:
    """Return δ = Σ p dp of each row.

    The rounding of dp cancels in dp - δ; with δ = out · dout that of out would remain.
    """
    weighted = p * grad_p
    delta = weighted.sum(-1, keepdim=True)
    if visible is not None and (call.device != "cpu" or call.form != "plain" or not delta.isfinite().all()):
        # A masked key counts as 0, even if its dp is infinite.
        delta = _per_head(call, weighted).masked_fill_(~visible, 0).sum(-1, keepdim=True).view_as(delta)
    return delta


def _add_sink_gradient(call: Call, block: Block, grad_s: Tensor, sums: Inputs) -> None:
    if sums.sinks is not None:
        sums.sinks[block.heads(call.group)] += _per_head(call, grad_s).sum((0, 3, 4)).flatten()


def _add_bias_gradient(call: Call, block: Block, grad_s: Tensor, total: Tensor) -> None:
    """Sum a block's [b, h, g, i, j] over the axes along which the bias repeats."""
    grad = grad_s.flatten(1, 2)  # [b, H, i, j]
    axes = [axis for axis in range(4) if total.shape[axis] == 1]
    grad = grad.sum(axes, keepdim=True) if axes else grad
    at = (block.b, block.heads(call.group), block.i, block.j)
    total[tuple(slice(None) if n == 1 else here for n, here in zip(total.shape, at, strict=True))] += grad

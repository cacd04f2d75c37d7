"""Sums of the weights by key and by segment, and their gradients, by the native kernels of attention.

They are attention with other values in place of v, so its forward and backward pass compute them:

- the mass of each row on the segments is the output for values that are 1 in the column of the key's segment
- the weight on each key is the gradient of the values, if that of each counted row is 1
- a gradient with respect to these sums is a product of gradients of outputs with values: dloss/dp_ij = dout_i · v_j

The kernels compute ds_ij = p_ij (dout_i · v_j - δ_i), where δ_i = out_i · dout_i. The gradient of the entropy is not
such a product: the backward pass takes it for each row, and adds -(ln p_ij + 1) times it to dout_i · v_j.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headscope._attend.backends import native
from headscope._attend.call import Call
from headscope._attend.interface import ForwardPass, Inputs, accumulate_dtype
from headscope._observe.native_observer import refuses_call
from headscope._observe.scene import Scene
from headscope._observe.weight_gradients import Request, Sums


@dataclass(frozen=True, eq=False)
class Rows:
    """The results of each row that the gradients require, [B, H, Q].

    Attributes:
        counted: boolean.
        lse: of every row with visible keys.
        entropy, mass: of counted rows, else 0.
    """

    counted: Tensor
    lse: Tensor
    entropy: Tensor
    mass: Tensor


def native_scene(scene: Scene) -> Scene | None:
    """Return the rows of a scene as a call of their own, if the native kernels support it; else None."""
    call, plan = scene.call, scene.plan
    if refuses_call(call) or not scene.rows:
        return None
    if scene.whole:
        return scene
    if call.bias is not None or (plan is not None and plan.rest is not None):  # these count all queries
        return None
    if plan is not None and plan.spans.shape[1] > 1:
        index = torch.tensor(list(scene.rows), dtype=torch.long, device=plan.spans.device)
        spans = plan.spans.index_select(1, index)
        plan = replace(plan, spans=spans, bounds=None, is_causal=False)
    rows = len(scene.rows)
    call = replace(call, queries=rows)
    return replace(scene, call=call, plan=plan, inputs=scene.inputs._replace(q=scene.q), rows=range(rows))


def lse_of_rows(scene: Scene) -> Tensor:
    """Return the log-sum-exp of each row, [B, H, Q]."""
    inputs, call = _in_full_precision(scene)
    column = inputs.k[..., :1]
    _, lse, _ = native.run_forward(replace(call, v_head_dim=1), scene.plan, inputs._replace(v=column), 0, need_lse=True)
    assert lse is not None  # it is requested
    return lse


def sum_weights_natively(scene: Scene, request: Request, rows: Rows) -> Sums | None:
    """Return the sums of the weights; None if an input is not finite."""
    inputs, call = _in_full_precision(scene)
    received = segments = None
    finite = True
    if request.segments:
        of_keys = _memberships(scene.key_segments, request.segments, rows.mass.dtype)
        columns = of_keys[:, None].expand(call.batch, call.kv_heads, -1, -1)
        masses, finite = _attend(scene, call, inputs, columns)  # [B, H, Q, S]
        of_rows = _memberships(scene.row_segments, request.segments, rows.mass.dtype)[:, None]
        segments = of_rows.mT @ torch.where(rows.counted[..., None], masses, 0.0)
    if request.received and finite:
        ones = _of_own_member(rows.counted.to(rows.mass.dtype), call.group)
        values = ones.new_zeros(call.batch, call.kv_heads, call.keys, call.group)
        out = torch.zeros_like(ones)
        gradients, finite = _differentiate(scene, call, inputs._replace(v=values), rows, (out, ones))
        of_values = gradients[2]
        assert of_values is not None
        received = of_values.mT.flatten(1, 2)  # [B, H, K]
    return Sums(None, received, segments) if finite else None


def native_gradients(
    scene: Scene, grads: Sums, rows: Rows, needed: tuple[bool, bool]
) -> tuple[Tensor | None, ...] | None:
    """Return the gradients of q, k, and of bias and sinks if needed; None if an input is not finite.

    Args:
        scene: the call, with all of its rows.
        grads: the gradients of the sums and entropies.
        rows: the results of each row.
        needed: whether those of bias and sinks are needed.
    """
    inputs, call = _in_full_precision(scene)
    values: list[Tensor] = []
    grads_of_outs: list[Tensor] = []
    entropy = None
    if grads.entropy is not None:
        grad = torch.where(rows.counted, grads.entropy, 0.0).contiguous()
        entropy = (grad, (grad * (rows.entropy - rows.mass)).contiguous())
    if grads.segments is not None:
        size, dtype = grads.segments.shape[-1], grads.segments.dtype
        of_rows = _memberships(scene.row_segments, size, dtype)[:, None] @ grads.segments
        of_keys = _memberships(scene.key_segments, size, dtype)[:, None]
        values.append(of_keys.expand(call.batch, call.kv_heads, -1, -1))
        grads_of_outs.append(torch.where(rows.counted[..., None], of_rows, 0.0))
    if grads.received is not None:
        values.append(grads.received.unflatten(1, (call.kv_heads, call.group)).mT)  # [B, Hkv, K, group]
        grads_of_outs.append(_of_own_member(rows.counted.to(grads.received.dtype), call.group))
    if values:
        of_keys, grad_out = (x[0] if len(x) == 1 else torch.cat(x, -1) for x in (values, grads_of_outs))
        out, finite = _attend(scene, call, inputs, of_keys)
        if not finite:
            return None
    else:
        of_keys, out = (x.new_zeros(1).expand(*x.shape[:-1], 1) for x in (inputs.k, inputs.q))
        grad_out = out
    inputs = inputs._replace(v=of_keys)
    gradients, finite = _differentiate(scene, call, inputs, rows, (out, grad_out), needed, entropy)
    return (*gradients[:2], *gradients[3:]) if finite else None


def _in_full_precision(scene: Scene) -> tuple[Inputs, Call]:
    """Return q, k, bias and sinks as float32, or float64, and the call with this dtype."""
    dtype = accumulate_dtype(scene.call.dtype)
    q, k, v, bias, sinks = scene.inputs
    call = replace(scene.call, dtype=dtype, dropout=0.0, lse=True)
    return Inputs(q.to(dtype), k.to(dtype), v, bias, sinks), call


def _memberships(ids: Tensor | None, size: int, dtype: torch.dtype) -> Tensor:
    """Return 1 where an entry belongs to a segment, else 0: [B or 1, n] -> [B or 1, n, S]."""
    assert ids is not None  # segments are requested
    return (ids[..., None] == torch.arange(size, device=ids.device)).to(dtype)


def _of_own_member(x: Tensor, group: int) -> Tensor:
    """Return rows [B, H, Q] in the column of their head among those of its key/value head, else 0: [B, H, Q, group]."""
    if group == 1:
        return x[..., None]
    members = torch.eye(group, dtype=x.dtype, device=x.device)  # of each query head its column
    return x[..., None] * members.repeat(x.shape[1] // group, 1)[:, None]


def _attend(scene: Scene, call: Call, inputs: Inputs, values: Tensor) -> tuple[Tensor, bool]:
    """Return the output for other values, [B, H, Q, columns], and whether all of it is finite."""
    call = replace(call, v_head_dim=values.shape[-1])
    out, _, finite = native.run_forward(call, scene.plan, inputs._replace(v=values), 0, need_lse=False)
    return out, finite


def _differentiate(
    scene: Scene, call: Call, inputs: Inputs, rows: Rows, results: tuple[Tensor, Tensor],
    needed: tuple[bool, bool] = (False, False), entropy: tuple[Tensor, Tensor] | None = None,
) -> tuple[tuple[Tensor | None, ...], bool]:  # fmt: skip
    """Return the gradients of q, k, v, bias and sinks, and whether all are finite.

    Args:
        scene, call, inputs, rows: the call, and the results of its rows.
        results: out and its gradient.
        needed: whether those of bias and sinks are needed.
        entropy: as ``native.compute_gradients`` takes it.
    """
    call = replace(call, v_head_dim=inputs.v.shape[-1])
    forward = ForwardPass(call, scene.plan, 0)
    return native.compute_gradients(forward, inputs, (results[0], rows.lse), (results[1], None), needed, entropy)

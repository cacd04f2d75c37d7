"""Observe a call, and give statistics of its weights a graph: they take part in a loss.

The observer measures as always. Its rows have the entropies; the sums by key and by segment are summed again for each
batch entry. ``_Statistics`` ties them to q, k, bias and sinks: by the native kernels, else by the portable form.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad

from headscope._attend.call import Call
from headscope._attend.interface import Inputs, accumulate_dtype, full_precision, once
from headscope._attend.prepare import canonical_inputs
from headscope._observe import inputs as observe_inputs
from headscope._observe import measure, native_gradients, steps, weight_gradients
from headscope._observe.aggregate import LayerStats
from headscope._observe.measure import SELF, Positions
from headscope._observe.native_gradients import Rows
from headscope._observe.scene import Scene, build_scene
from headscope._observe.weight_gradients import Request, Sums
from headscope._support.arguments import kind
from headscope._support.autograd import Function
from headscope._support.precision import exact_products
from headscope.masks import Mask
from headscope.stats import DIFFERENTIABLE, DifferentiableStats, HeadStats, Kept, Observe

FIRST_ONLY = (
    "differentiable: these statistics do not support second derivatives; expected one backward pass, without "
    'create_graph=True. Weights from attend(..., backend="reference") support them: p = exp(s - lse), with memory '
    "quadratic in the length"
)
NO_TRANSFORMS = (
    "differentiable: these statistics do not support torch.func, forward-mode or batched gradients (is_grads_batched); "
    "expected loss.backward() or torch.autograd.grad"
)


def check_differentiable(names: object, what: Observe | None) -> tuple[str, ...]:
    """Return the names of the statistics that get a gradient, in the order of ``DIFFERENTIABLE``.

    Raises:
        TypeError: they are not a collection of names.
        ValueError: a name is unknown, or ``what`` does not provide it.
    """
    expected = ", ".join(map(repr, DIFFERENTIABLE))
    if isinstance(names, str) or not isinstance(names, Collection):
        got = repr(names) if isinstance(names, str) else kind(names)
        raise TypeError(f"differentiable: got {got}, expected a tuple of names from {expected}")
    if unknown := [name for name in names if name not in DIFFERENTIABLE]:
        raise ValueError(f"differentiable: got {unknown[0]!r}, expected names from {expected}")
    if names and what is None:
        raise ValueError("differentiable: observe= is missing; expected an Observe, such as observe=Observe()")
    if "segments" in names and what is not None and what.segments is None:
        raise ValueError(
            "differentiable: segments are not observed; expected Observe(segments=Segments(...)) together with "
            "'segments'"
        )
    return tuple(name for name in DIFFERENTIABLE if name in names)


def measure_with_gradients(
    q: Tensor, k: Tensor, v: Tensor | None, mask: Mask | Tensor | None, bias: Tensor | None, sinks: Tensor | None,
    scale: float | None, softcap: float | None, dropout: float, lse: Tensor | None, what: Observe,
    names: tuple[str, ...], positions: Positions = SELF,
) -> HeadStats:  # fmt: skip
    """Measure the weights of a call; the result's ``differentiable`` has a graph.

    Args:
        q, k, v, mask, bias, scale, softcap, sinks, dropout, what: those of ``headscope.observe``.
        lse: the log-sum-exp of each row by headscope's own attention, or None.
        names: the statistics with a graph.
        positions: those of queries and keys.
    """
    _check_transforms(q, k, bias, sinks)
    request = measure.to_request(q, k, v, mask, bias, sinks, scale, softcap, dropout, lse, what, positions)
    inputs = canonical_inputs(request.prepared, q, k, k[..., :1] if v is None else v, bias, sinks)
    stats, rows = _observe_rows(replace(request, lse=None))  # it changes nothing, and such calls are prepared once
    call = request.call
    with torch.no_grad(), full_precision(call), exact_products(call.device):
        scene = build_scene(request)
    size = len(what.segments.names) if "segments" in names and what.segments is not None else 0
    values = rows.values
    sums = Request("received" in names, size)
    task = _Task(scene, sums, "entropy" in names, rows.counted, _known_sums(call, stats.parts["0"], sums))
    row_values = (values["entropy"], values["lse"], values["mass"])
    entropy, received, segments = _Statistics.apply(task, *row_values, inputs.q, inputs.k, inputs.bias, inputs.sinks)
    counted, segment_rows = _to_queries(scene, rows.counted), None
    if segments is not None:
        segment_rows = _count_rows(scene, rows.counted, size)
        segments = segments / segment_rows.clamp_min(1)[..., None]

    def led(x: Tensor | None) -> Tensor | None:
        return x if x is None else x.reshape(*call.lead, *x.shape[1:])

    tensors = (led(entropy), led(received), led(segments), led(segment_rows))
    return replace(stats, graph=DifferentiableStats(counted.reshape(*call.lead, *counted.shape[1:]), *tensors))


def _check_transforms(*tensors: Tensor | None) -> None:
    """Raise if gradients of another kind than autograd's are requested."""
    dual = forward_ad._current_level >= 0 and any(
        isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )
    if _are_functorch_transforms_active() or dual:
        raise RuntimeError(NO_TRANSFORMS)


def _observe_rows(request: observe_inputs.Request) -> tuple[HeadStats, Kept]:
    """Return the statistics of a request, and its rows: from the same pass if the request measures rows."""
    what = request.what
    if not what.row_stats:
        rows_only = Observe(rows=what.rows, received=False, keep_rows=True)
        (rows,) = steps.observe_request(replace(request, what=rows_only)).kept
        return steps.observe_request(request), rows
    stats = steps.observe_request(replace(request, what=replace(what, keep_rows=True)))
    (rows,) = stats.kept
    if what.keep_rows:
        return stats, rows
    top = {name: x for name, x in rows.values.items() if name in ("top_keys", "top_weights")}
    parts = {
        name: replace(part, kept=(replace(rows, values=top),) if top else ()) for name, part in stats.parts.items()
    }
    return replace(stats, parts=parts), rows


def _known_sums(call: Call, layer: LayerStats, request: Request) -> Sums | None:
    """Return the sums from the statistics, which sum over the batch; None if it has several entries."""
    if not request.received and not request.segments:
        return Sums(None, None, None)
    if call.batch != 1 or (request.received and layer.received is None):
        return None
    dtype = accumulate_dtype(call.dtype)
    received = segments = None
    if request.received and layer.received is not None:  # by absolute position: the last are the keys of the call
        received = layer.received[None, :, layer.received.shape[-1] - call.keys :].to(dtype)
    if request.segments and layer.segments is not None:
        segments = layer.segments.sum[None].to(dtype)
    return Sums(None, received, segments)


@dataclass(frozen=True, eq=False)
class _Task:
    """What is computed.

    Attributes:
        scene: the call; in a backward pass its q, k, bias and sinks are those that autograd saved.
        request: the sums.
        entropy: whether the entropy is requested.
        counted: which rows count, boolean [B, H, R].
        known: the sums, if the observation has them.
    """

    scene: Scene
    request: Request
    entropy: bool
    counted: Tensor
    known: Sums | None

    def without_inputs(self) -> _Task:
        """Return the same without q, k, bias and sinks, which autograd saves."""
        nothing = self.scene.q.new_empty(0)
        inputs = Inputs(nothing, nothing, nothing, None, None)
        return replace(self, scene=replace(self.scene, inputs=inputs, q=nothing, lse=None), known=None)

    def with_inputs(self, inputs: Inputs) -> _Task:
        """Return the same with inputs."""
        return replace(self, scene=replace(self.scene, inputs=inputs, q=_of_rows(self.scene, inputs.q)))


class _Statistics(Function[tuple[Tensor | None, Tensor | None, Tensor | None]]):
    """Entropy [B, H, Q], and the sums received [B, H, K] and segments [B, H, S, S], None where not requested.

    Its inputs after the task: entropy, lse and mass of each row, NaN where it does not count; q, k, bias and sinks.
    """

    @staticmethod
    def forward(
        ctx: Any, task: _Task, entropy: Tensor, lse: Tensor, mass: Tensor,
        q: Tensor, k: Tensor, bias: Tensor | None, sinks: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
        scene, call, request = task.scene, task.scene.call, task.request
        native = native_gradients.native_scene(scene)
        with full_precision(call), exact_products(call.device):
            entropy, mass = (x.masked_fill(~task.counted, 0.0) for x in (entropy, mass))
            if native is not None:  # which reads it in all rows
                lse = _lse_of_rows(scene, native, lse, task.counted)
            rows = Rows(task.counted, lse, entropy, mass)
            summed = task.known
            if summed is None and native is not None:
                summed = native_gradients.sum_weights_natively(native, request, rows)
            if summed is None:
                summed = weight_gradients.sum_weights(scene, request)
        ctx.task = task.without_inputs()
        masks = () if scene.plan is None else scene.plan.read_again()
        ctx.save_for_backward(q, k, bias, sinks, lse, entropy, mass, *masks)
        ctx.set_materialize_grads(False)
        return (_to_queries(scene, entropy) if task.entropy else None), summed.received, summed.segments

    @staticmethod
    def backward(
        ctx: Any, of_entropy: Tensor | None, of_received: Tensor | None, of_segments: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        grads = (of_entropy, of_received, of_segments)
        if any(x is not None and is_legacy_batchedtensor(x) for x in grads):
            raise RuntimeError(NO_TRANSFORMS)
        saved = ctx.saved_tensors  # read once: checkpointing recomputes them in each access
        q, k, bias, sinks, lse, entropy, mass = saved[:7]
        needed = (bias is not None and ctx.needs_input_grad[6], sinks is not None and ctx.needs_input_grad[7])
        with torch.no_grad():
            task = ctx.task.with_inputs(Inputs(q, k, k[..., :1], bias, sinks))
            if of_entropy is not None:
                of_entropy = _of_rows(task.scene, of_entropy)
            rows = Rows(task.counted, lse, entropy, mass)
            gradients = _gradients(task, Sums(of_entropy, of_received, of_segments), rows, needed)
            gradients = tuple(
                None if x is None or of is None else x.to(of.dtype)
                for x, of in zip(gradients, (q, k, bias, sinks), strict=True)
            )
        return None, None, None, None, *once(gradients, *grads, *saved, message=FIRST_ONLY)


def _gradients(task: _Task, grads: Sums, rows: Rows, needed: tuple[bool, bool]) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k, bias and sinks: natively if possible."""
    scene, call = task.scene, task.scene.call
    with full_precision(call), exact_products(call.device):
        native = native_gradients.native_scene(scene)
        if native is not None:
            gradients = native_gradients.native_gradients(native, grads, rows, needed)
            if gradients is not None:
                dq, *others = gradients
                return None if dq is None else _to_queries(scene, dq), *others
        return weight_gradients.gradients_of_weights(scene, grads, needed)


def _lse_of_rows(scene: Scene, native: Scene, lse: Tensor, counted: Tensor) -> Tensor:
    """Return the log-sum-exp of all rows: ``lse`` is NaN in those that do not count."""
    if scene.lse is not None:
        return scene.lse.to(lse.dtype)
    return lse if bool(counted.all()) else native_gradients.lse_of_rows(native)


def _index(scene: Scene) -> Tensor | None:
    """Return which queries the rows of a scene are; None = all."""
    return None if scene.whole else torch.tensor(list(scene.rows), dtype=torch.long, device=scene.q.device)


def _of_rows(scene: Scene, x: Tensor) -> Tensor:
    """Return the rows of a scene: [B, H, Q, ...] -> [B, H, R, ...]."""
    index = _index(scene)
    return x if index is None else x.index_select(2, index)


def _to_queries(scene: Scene, x: Tensor) -> Tensor:
    """Return [B, H, R, ...] as [B, H, Q, ...]: other queries have 0."""
    index = _index(scene)
    if index is None:
        return x
    whole = x.new_zeros(*x.shape[:2], scene.call.queries, *x.shape[3:])
    return whole.index_copy_(2, index, x)


def _count_rows(scene: Scene, counted: Tensor, size: int) -> Tensor:
    """Return the number of counted rows in each segment, int64 [B, H, S]."""
    assert scene.row_segments is not None  # they are requested
    belongs = scene.row_segments[..., None] == torch.arange(size, device=counted.device)  # [B or 1, R, S]
    return (counted[..., None] & belongs[:, None]).sum(2)

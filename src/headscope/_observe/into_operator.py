"""The operator ``headscope::observe_into``: it adds one attention call to the sums of its layer.

A compiler traces it as one node that writes to two tensors: nothing reads its result, so neither the output of the
model nor its backward pass depend on it. Its inputs are detached.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headscope._attend.interface import Inputs
from headscope._observe.layer_sums import ACTIVE, CROSS, LOOKED_AT, OF, RUNS, V_WIDTH, WIDTH
from headscope._observe.measure import Positions, measure_call
from headscope.masks import mask_from_codes
from headscope.stats import Observe, RowSums

NAME = "headscope::observe_into"
_SCHEMA = (
    "observe_into(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? sinks, SymInt[] codes, Tensor[] parts,"
    " float scale, float softcap, bool cross, int rows, int first, float[] windows, str layer,"
    " Tensor(a!) counters, Tensor(b!) sums) -> ()"
)


def _observe_into(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, codes: list[int], parts: list[Tensor],
    scale: float, softcap: float, cross: bool, rows: int, first: int, windows: list[float], layer: str,
    counters: Tensor, sums: Tensor,
) -> None:  # fmt: skip
    """Add a call, unless its step is not looked at, or a checkpoint recomputes it in the backward pass."""
    if not int(counters[ACTIVE]) or torch._C._current_graph_task_id() != -1:
        return
    what = Observe(rows=rows or None, received=False, first=first, windows=tuple(windows))
    positions = Positions(kind="cross" if cross else "self")
    layout = RowSums.of(windows, q.shape[-3])
    if layout.size != len(sums):
        raise RuntimeError(
            f"watch_compiled: layer {layer}: a call has {q.shape[-3]} heads; expected those of its module"
        )
    if not cross and q.shape[-2] != k.shape[-2]:
        raise RuntimeError(
            f"watch_compiled: layer {layer}: a call has {q.shape[-2]} queries and {k.shape[-2]} keys; expected equally "
            'many in self-attention, because caches are not supported; for cross-attention, give kinds={"'
            f'{layer}": "cross"}}'
        )
    inputs = Inputs(q, k, v, bias, sinks)
    with torch.no_grad():
        mask = mask_from_codes(codes, parts)
        numbers = (scale, softcap or None, 0.0, None)
        stats = measure_call(*inputs[:3], mask, *inputs[3:], *numbers, what, positions, nulls=False)
        part = stats.parts["0"]
        layout.add(sums, part)
        for place, number in ((RUNS, 1), (CROSS, int(cross)), (LOOKED_AT, part.looked_at), (OF, part.of)):
            counters[place] += number
        counters[WIDTH], counters[V_WIDTH] = q.shape[-1], v.shape[-1]


def _fake(*arguments: object) -> None:
    """Return nothing: the operator has no result."""


_library = torch.library.Library("headscope", "FRAGMENT")
_library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("observe_into", _observe_into, "CompositeExplicitAutograd")
torch.library.register_fake(NAME, _fake, lib=_library)

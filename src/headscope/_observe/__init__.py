"""Statistics of attention weights, computed tile by tile.

``steps.py`` takes three steps from a request to statistics. The second one has two forms:

1. **The plan.** ``inputs.to_reductions`` lists the reductions as numbers (``Reductions``); ``scene.build_scene``
   checks the request and returns their inputs as tensors (``Scene``).
2. **The pass over the weights**, which gives an ``Observed``. ``portable.observe_blocks`` takes ``Reductions`` and
   ``Scene``: blocked torch, any device, every option, memory linear in the length, blocks that depend on shapes only.
   ``native_observer.observe_natively`` takes both as one ``Ready``, which serves further similar calls, and can attend
   in the same pass; it does not support every option. ``result.py`` describes the result of both.
3. **The aggregation**, ``aggregate.py``: means, histograms, sums over the batch, in float64. ``pooling.py`` merges
   the results of alike calls before they are aggregated.

``differentiable.py`` gives some of the statistics a graph, for a loss. ``into_operator.py`` observes for compiled code,
and adds to the tensors that ``layer_sums.py`` describes.
"""

from headscope._observe.differentiable import check_differentiable
from headscope._observe.entry import observe_call
from headscope._observe.inputs import Continued
from headscope._observe.into_operator import NAME as OBSERVE_INTO
from headscope._observe.layer_sums import NAME as SUMS
from headscope._observe.layer_sums import LayerSums, StepOfLayer
from headscope._observe.measure import Positions, attend_and_observe, measure_call
from headscope._observe.pooling import pooled
from headscope._observe.scene import sample
from headscope._observe.steps import Repetition, options_of, repetition_of

__all__ = [
    "OBSERVE_INTO",
    "SUMS",
    "Continued",
    "LayerSums",
    "Positions",
    "Repetition",
    "StepOfLayer",
    "attend_and_observe",
    "check_differentiable",
    "measure_call",
    "observe_call",
    "options_of",
    "pooled",
    "repetition_of",
    "sample",
]

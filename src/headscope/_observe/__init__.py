"""Statistics of attention weights, computed tile by tile.

An observation has three steps, of which the second has two forms:

1. **The plan.** ``inputs.to_work`` states in numbers what is to be reduced (``Work``); ``scene.build_scene`` checks the
   request and states in tensors what it is reduced from (``Scene``).
2. **The pass over the weights**, ``observe_rows(work, scene) -> Observed``. ``portable.py`` is its portable form:
   blocked torch, any device, every option, memory linear in the length, blocks cut by shapes alone.
   ``native_observer.py`` is the fast form, by the kernels of csrc, which can attend in the same pass. It refuses what
   they cannot do. Both take the numbers of ``Work`` and ``Call`` and the tensors of ``Scene``. ``result.py`` describes
   what both return.
3. **The aggregation**, ``aggregate.py``: means, histograms, sums over the batch, in float64.
"""

from headscope._observe.call import observe_call
from headscope._observe.inputs import Continued
from headscope._observe.measure import Positions, attend_and_observe

__all__ = ["Continued", "Positions", "attend_and_observe", "observe_call"]

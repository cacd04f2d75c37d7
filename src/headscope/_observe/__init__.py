"""Statistics of attention weights, computed tile by tile."""

from headscope._observe.call import observe_call
from headscope._observe.inputs import Continued
from headscope._observe.measure import Positions, attend_and_observe

__all__ = ["Continued", "Positions", "attend_and_observe", "observe_call"]
